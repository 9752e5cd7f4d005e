"""Which ranks take part in a call: all of the job's, or those of a group that the script has made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist

from ..job import current_job, lifecycle
from ..job.job import Peers
from ..launch import ranks
from ..torch_internals import current_group, is_mesh

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


Group: TypeAlias = "dist.ProcessGroup | DeviceMesh"
_REMEDY = "Call it on the ranks of the group only, with the group or one dimension of a mesh."


def control_device(peers: Peers | None) -> torch.device:
    """Return the device on which small control messages travel: the CPU if the group reaches it, as gloo does."""
    if peers is None:
        return current_job.control_device()
    on_cpu = "cpu:" in dist.get_backend_config(peers.group)
    return torch.device("cpu") if on_cpu else current_job.get_device()


def peers_of(group: Group | None) -> Peers | None:
    """Find out who takes part; None if all of the job's do.

    Raises:
        NotSetUpError: If several processes were launched but `setup()` was not called.
        TypeError: If it is no group.
        ValueError: If this rank is not in the group, or the group has been destroyed.
    """
    if group is None:
        return None
    own = _process_group(group)
    if not lifecycle.joined() or own is current_group():
        return None
    try:
        members = dist.get_process_group_ranks(own)
    except (KeyError, ValueError, RuntimeError):
        raise ValueError(f"group={group!r} is no group of this job, or was destroyed.") from None
    if ranks.get_rank() not in members:
        raise ValueError(_not_a_member(group))
    return Peers(tuple(members), own)


def _process_group(group: Any) -> dist.ProcessGroup:
    if isinstance(group, dist.ProcessGroup):
        return group
    if group is dist.GroupMember.NON_GROUP_MEMBER:  # what new_group() gives to those that are not in it
        raise ValueError(_not_a_member(group))
    if not is_mesh(group):
        raise TypeError(f"group must be a process group, or a mesh of one dimension, got {type(group).__name__}.")
    if group.ndim != 1:
        names = group.mesh_dim_names
        example = f'mesh["{names[0]}"]' if names else 'mesh["dp"], with names for its dimensions'
        raise ValueError(f"The mesh has {group.ndim} dimensions; pass one, such as {example}.")
    if group.get_coordinate() is None:
        raise ValueError(_not_a_member(group))
    found: dist.ProcessGroup = group.get_group()
    return found


def _not_a_member(group: Any) -> str:
    return f"Rank {ranks.get_rank()} is not in group={group!r}. {_REMEDY}"
