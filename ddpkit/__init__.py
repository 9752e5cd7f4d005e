"""Run one PyTorch training script, unchanged and correct, on any number of ranks.

A script calls, in this order:

    setup             joins the ranks into a job; a misconfigured launch raises
    make_loader       loads each rank's share of the data, and resumes it
    wrap_model        averages gradients across ranks
    ScalePlan         adjusts the batch size or the learning rate to the number of ranks
    all_reduce_mean   averages numbers across ranks
    Checkpointer      saves the run, and restores it on any number of ranks

`ddpkit.__all__` lists the public names in learning order. Other names may change at any time, except
the pytest plugin `ddpkit.testing`. `python -m ddpkit` lists the tools: check, rehearse, where and doctor.

Docs: https://ddpkit.readthedocs.io, or the folder docs/ of a clone.

Example:
    >>> import torch
    >>> from torch.utils.data import TensorDataset
    >>> import ddpkit
    >>> device = ddpkit.setup().device
    >>> inputs, targets = torch.ones(8, 2), torch.zeros(8, 1)
    >>> loader = ddpkit.make_loader(TensorDataset(inputs, targets), batch_size=4)  # per rank
    >>> model = ddpkit.wrap_model(torch.nn.Linear(2, 1))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> for inputs, targets in loader:
    ...     loss = (model(inputs.to(device)) - targets.to(device)).square().mean()
    ...     optimizer.zero_grad()
    ...     loss.backward()
    ...     optimizer.step()
    >>> mean = ddpkit.all_reduce_mean(loss.item())  # equal on every rank
    >>> ddpkit.is_main_process()  # the one that prints
    True
    >>> ddpkit.teardown()
"""

from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from .collectives.groups import set_data_parallel
from .collectives.ops import (
    all_gather,
    all_gather_object,
    all_reduce,
    all_reduce_mean,
    broadcast,
)
from .collectives.sync import barrier, main_process_first, main_process_only, run_on_main, stop_together, together
from .data.loader import Loader, make_loader
from .data.samplers import DistributedEvalSampler, DistributedSampler, DistributedWeightedSampler
from .data.seeds import sample_seed, seed_everything
from .errors import (
    BadStepError,
    BarrierTimeoutError,
    CheckpointError,
    DdpkitError,
    LaunchError,
    MismatchError,
    NotSetUpError,
    PeerError,
    ReplicaMismatchError,
)
from .job import current_job
from .job.current_job import get_data_parallel_rank, get_data_parallel_world_size, get_device, peer_errors
from .job.job import Context
from .job.lifecycle import distributed, setup, teardown
from .launch.detection import detect_launch
from .launch.launch import Launch
from .launch.ranks import (
    get_local_rank,
    get_local_world_size,
    get_node_rank,
    get_rank,
    get_world_size,
    is_distributed,
    is_local_main_process,
    is_main_process,
)
from .logging import RankFilter, get_logger
from .parallel.gradients import accumulate, global_mean
from .parallel.lr_scaling import ScalePlan, rule_for, scale_lr, warmup_factor
from .parallel.models import clean_state_dict, unwrap_model
from .parallel.replicas import check_replicas, sync_buffers
from .parallel.wrap import wrap_model

if TYPE_CHECKING:
    from .checkpoint.checkpointer import Checkpointer
    from .contrastive import gather_batch
    from .exact.gather import gather_exact
    from .exact.gradients import MicroBatches, exact_gradients
    from .exact.loader import make_micro_batch_loader
    from .gradient_exchange import average_gradients, averaging
    from .guard import StepGuard, find_batch_size
    from .spawning import spawn
    from .stop import Stop, stopping
    from .survival.survive import Attempt, survive

__version__ = "0.1.0"

__all__ = [
    # joining
    "Launch",
    "detect_launch",
    "Context",
    "setup",
    "teardown",
    "distributed",
    # ranks
    "get_rank",
    "get_world_size",
    "get_local_rank",
    "get_local_world_size",
    "get_node_rank",
    "is_distributed",
    "is_main_process",
    "is_local_main_process",
    "get_device",
    "set_data_parallel",
    "get_data_parallel_rank",
    "get_data_parallel_world_size",
    # waiting
    "barrier",
    "main_process_first",
    "run_on_main",
    "main_process_only",
    "together",
    "stop_together",
    "peer_errors",
    # collectives
    "all_reduce_mean",
    "all_reduce",
    "all_gather",
    "all_gather_object",
    "broadcast",
    "gather_batch",
    "gather_exact",
    # models
    "wrap_model",
    "unwrap_model",
    "clean_state_dict",
    "accumulate",
    "global_mean",
    "average_gradients",
    "averaging",
    "exact_gradients",
    "check_replicas",
    "sync_buffers",
    # data
    "DistributedSampler",
    "DistributedEvalSampler",
    "DistributedWeightedSampler",
    "make_loader",
    "Loader",
    "make_micro_batch_loader",
    "MicroBatches",
    "sample_seed",
    # scaling rules
    "scale_lr",
    "warmup_factor",
    "ScalePlan",
    "rule_for",
    # runs
    "seed_everything",
    "get_logger",
    "RankFilter",
    "Checkpointer",
    "stopping",
    "Stop",
    "StepGuard",
    "find_batch_size",
    "survive",
    "Attempt",
    # launching from Python
    "spawn",
    # errors
    "DdpkitError",
    "LaunchError",
    "NotSetUpError",
    "BarrierTimeoutError",
    "PeerError",
    "MismatchError",
    "ReplicaMismatchError",
    "CheckpointError",
    "BadStepError",
]


_LOADED_AT_USE = {  # names that most scripts do not need; listed above, too, for type checkers
    "Checkpointer": "checkpoint.checkpointer",
    "gather_batch": "contrastive",
    "gather_exact": "exact.gather",
    "MicroBatches": "exact.gradients",
    "exact_gradients": "exact.gradients",
    "make_micro_batch_loader": "exact.loader",
    "average_gradients": "gradient_exchange",
    "averaging": "gradient_exchange",
    "StepGuard": "guard",
    "find_batch_size": "guard",
    "spawn": "spawning",
    "Stop": "stop",
    "stopping": "stop",
    "Attempt": "survival.survive",
    "survive": "survival.survive",
}

current_job.load_watch = partial(import_module, "ddpkit.watch.thread")  # job/ imports nothing optional

if not TYPE_CHECKING:  # a type checker would take every name for valid

    def __getattr__(name: str) -> Any:
        if name not in _LOADED_AT_USE:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f".{_LOADED_AT_USE[name]}", __name__), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:  # submodules are private: only these names are stable
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
