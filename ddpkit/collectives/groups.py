"""Find the ranks of a call, and choose the data-parallel ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import torch.distributed as dist

from ..job import current_job, lifecycle
from ..job.job import Peers, ranks_of
from ..launch import ranks
from ..torch_internals import current_group, is_mesh
from .consistency import raise_everywhere
from .differences import list_lines, name_ranks
from .transfer import gather_objects

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


Group: TypeAlias = "dist.ProcessGroup | DeviceMesh"
_REMEDY = "Call it on the ranks of the group only, with the group or one dimension of a mesh."


def peers_of(group: Group | None) -> Peers | None:
    """Return the participating ranks; None if all ranks of the job participate.

    Raises:
        NotSetUpError: If several processes were launched but `setup()` was not called.
        TypeError: If it is not a group.
        ValueError: If this rank is not in the group, or the group was destroyed.
    """
    if group is None:
        return None
    own = _process_group(group)
    if lifecycle.enter_collective() is None or own is current_group():
        return None
    try:
        members = dist.get_process_group_ranks(own)
    except (KeyError, ValueError, RuntimeError):
        raise ValueError(f"group={group!r} is not a group of this job, or was destroyed.") from None
    if ranks.get_rank() not in members:
        raise ValueError(_not_a_member(group))
    return Peers(tuple(members), own)


def _process_group(group: Any) -> dist.ProcessGroup:
    if isinstance(group, dist.ProcessGroup):
        return group
    if group is dist.GroupMember.NON_GROUP_MEMBER:  # new_group() returns it to ranks outside the group
        raise ValueError(_not_a_member(group))
    if not is_mesh(group):
        raise TypeError(f"group must be a process group, or a mesh of one dimension, got {type(group).__name__}.")
    if group.ndim != 1:
        raise ValueError(f'The mesh has {group.ndim} dimensions; pass one, such as mesh["dp"].')
    if group.get_coordinate() is None:
        raise ValueError(_not_a_member(group))
    found: dist.ProcessGroup = group.get_group()
    return found


def _not_a_member(group: Any) -> str:
    return f"Rank {ranks.get_rank()} is not in group={group!r}. {_REMEDY}"


# The data-parallel ranks: they split the samples and hold equal models.


def set_data_parallel(group: Group | None) -> None:
    """Choose the data-parallel ranks, which split the samples and hold equal models; by default all. Collective.

    Every rank passes its own group; the groups must be of one size and contain each rank once. From then on samplers,
    `make_loader`, `global_mean`, `average_gradients`, `check_replicas`, `sync_buffers`, `wrap_model`, `gather_exact`
    and `seed_everything(per_rank=True)` use these ranks. Ranks that share one model, for example by tensor parallelism,
    then read the same samples. Rank numbers, waits, logging and checkpoints still concern the whole job.

    Args:
        group: A torch process group, or a mesh with all the dimensions in which samples differ, such as `mesh["dp"]`.
            None restores all ranks.

    Raises:
        ValueError: On every rank, if the groups differ in size or do not contain each rank once.
        TypeError: If `group` is not a group; on the other ranks `MismatchError`.

    Example:
        >>> set_data_parallel(None)

        On four ranks, where two share each model::

            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            set_data_parallel(mesh["dp"])
    """
    with raise_everywhere("set_data_parallel()"):
        own = _ranks_in(group)
    session = lifecycle.enter_collective()
    if session is None:
        return
    named = gather_objects("set_data_parallel()", own)
    if not _is_partition(named):
        lines = [f"rank {rank} passed {name_ranks(members)}" for rank, members in enumerate(named)]
        headline = "set_data_parallel() needs groups of one size, each rank passing the one it is in, but:"
        raise ValueError(list_lines(headline, lines))
    if len(own) == ranks.get_world_size():
        current_job.choose_data_parallel(None)
        return
    peers = None
    for members in dict.fromkeys(map(tuple, named)):
        made = dist.new_group(list(members))
        if session.rank not in members:
            continue
        peers = Peers(members, made)
        if session.connections:  # which end, like the job's, when a rank fails
            session.follow_connections(made)
    current_job.choose_data_parallel(peers)


def _ranks_in(group: Any) -> list[int]:
    """Return the ranks of a group or mesh, in order; None is all."""
    if is_mesh(group) and group.get_coordinate() is not None:
        return sorted(group.mesh.flatten().tolist())
    return sorted(ranks_of(peers_of(group)))


def _is_partition(named: list[list[int]]) -> bool:
    """Return whether the groups that the ranks passed are of one size and contain each rank once."""
    for rank, members in enumerate(named):
        if rank not in members or len(members) != len(named[0]):
            return False
        if any(named[other] != members for other in members):
            return False
    return True
