"""ddpkit: one training script, any number of ranks."""

from .errors import (
    BarrierTimeout,
    CheckpointError,
    DdpkitError,
    LaunchError,
    MismatchError,
    NotSetUpError,
    PeerError,
    ReplicaMismatch,
)
from .launchers import Launch, detect_launch
from .ranks import (
    get_local_rank,
    get_local_world_size,
    get_node_rank,
    get_rank,
    get_world_size,
    is_distributed,
    is_local_main_process,
    is_main_process,
)
from .runtime import distributed, get_device, setup, teardown
from .spawning import spawn

__version__ = "0.1.0"
