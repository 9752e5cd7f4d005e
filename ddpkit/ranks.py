"""Who am I: the one place that knows the current launch. Nothing here talks to other ranks."""

from __future__ import annotations

import os

import torch.distributed as dist

from .errors import NotSetUpError
from .launchers import Launch, detect_launch

_launch: Launch | None = None  # set by setup(), which fills in what the environment does not tell


def current_launch() -> Launch:
    """The launch that `setup()` joined; before that, what the environment says."""
    return _launch or detect_launch(os.environ)


def set_launch(launch: Launch | None) -> None:
    """Remembers the joined launch, or forgets it."""
    global _launch
    _launch = launch


def get_rank() -> int:
    """This process's number in the job, from 0."""
    if _launch is None and dist.is_available() and dist.is_initialized():  # a group that somebody else made
        return dist.get_rank()
    return current_launch().rank


def get_world_size() -> int:
    """The number of processes in the job; 1 without a launcher."""
    if _launch is None and dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return current_launch().world_size


def get_local_rank() -> int:
    """This process's number on its node, from 0.

    Raises:
        NotSetUpError: If the launcher does not tell it; `setup()` finds it out by asking the other ranks.
    """
    return _told(current_launch().local_rank, "local rank")


def get_local_world_size() -> int:
    """The number of this job's processes on this node.

    Raises:
        NotSetUpError: If the launcher does not tell it; `setup()` finds it out by asking the other ranks.
    """
    return _told(current_launch().local_world_size, "local world size")


def get_node_rank() -> int:
    """This node's number in the job, from 0.

    Raises:
        NotSetUpError: If the launcher does not tell it; `setup()` finds it out by asking the other ranks.
    """
    return _told(current_launch().node_rank, "node rank")


def is_distributed() -> bool:
    """Whether the job has more than one process."""
    return get_world_size() > 1


def is_main_process() -> bool:
    """Whether this is rank 0."""
    return get_rank() == 0


def is_local_main_process() -> bool:
    """Whether this is local rank 0, the first process on its node."""
    return get_local_rank() == 0


def _told(value: int | None, name: str) -> int:
    if value is None:
        raise NotSetUpError(
            f"The launcher does not tell the {name}. Call ddpkit.setup() first: it asks the other ranks."
        )
    return value
