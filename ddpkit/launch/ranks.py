"""The rank of this process, and the only module that stores the current launch. Nothing here communicates.

The launch belongs to the existing process group. If other code creates a group, or replaces ours, the rank is that of
the new group. If a group is destroyed, its rank stays until `teardown()`: scripts query it at their end, and no two
processes may consider themselves rank 0.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from ..errors import LaunchError, NotSetUpError
from ..torch_internals import current_group, no_group, reference
from .detection import detect_launch
from .launch import Launch

_launch: Launch | None = None  # set by setup(), which completes what the environment does not define
_group: Callable[[], Any] = no_group  # the group that it belongs to


def current_launch() -> Launch:
    """Return the launch of the current or last group; before there is one, that of the environment."""
    group = current_group()
    if group is not None and group is not _group():
        set_launch(launch_of_group())
    return _launch or detect_launch(os.environ)


def set_launch(launch: Launch | None) -> None:
    """Store the launch for the current group, or clear both."""
    global _launch, _group
    _launch = launch
    _group = reference(current_group()) if launch else no_group


def launch_of_group() -> Launch:
    """Return the launch of a foreign group: the environment's if it agrees, else the group's own."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    with suppress(LaunchError):
        launch = detect_launch(os.environ)
        if (launch.rank, launch.world_size) == (rank, world_size):
            return launch
    return Launch("platform", rank, world_size, evidence=("an existing process group",))


def get_rank() -> int:
    """Return this process's number in the job, from 0.

    Example:
        >>> get_rank()
        0
    """
    return current_launch().rank


def get_world_size() -> int:
    """Return the number of processes in the job; 1 without a launcher.

    Example:
        >>> get_world_size()
        1
    """
    return current_launch().world_size


def get_local_rank() -> int:
    """Return this process's number on its node, from 0.

    Raises:
        NotSetUpError: If the launcher does not set it; `setup()` gets it from the other ranks.

    Example:
        >>> get_local_rank()
        0
    """
    return _known("local_rank")


def get_local_world_size() -> int:
    """Return the number of this job's processes on this node.

    Raises:
        NotSetUpError: If the launcher does not set it; `setup()` gets it from the other ranks.

    Example:
        >>> get_local_world_size()
        1
    """
    return _known("local_world_size")


def get_node_rank() -> int:
    """Return this node's number in the job, from 0.

    Raises:
        NotSetUpError: If the launcher does not set it; `setup()` gets it from the other ranks.

    Example:
        >>> get_node_rank()
        0
    """
    return _known("node_rank")


def is_distributed() -> bool:
    """Return whether the job has more than one process.

    Example:
        >>> is_distributed()
        False
    """
    return get_world_size() > 1


def is_main_process() -> bool:
    """Return whether this is rank 0.

    Example:
        >>> if is_main_process():
        ...     print("once per job")
        once per job
    """
    return get_rank() == 0


def is_local_main_process() -> bool:
    """Return whether this is local rank 0, the first process on its node.

    Example:
        >>> is_local_main_process()
        True
    """
    return get_local_rank() == 0


def _known(field: str) -> int:
    value: int | None = getattr(current_launch(), field)
    if value is None:
        name = field.replace("_", " ")
        raise NotSetUpError(
            f"The launcher does not set the {name}. Call ddpkit.setup() first: it gets it from the other ranks."
        )
    return value
