"""The ranks that take part in a call, where these are not all of the job's: those of one of torch's groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from ..launch import ranks


@dataclass(frozen=True)
class Peers:
    """The ranks of a group.

    Attributes:
        ranks: Their numbers in the job, in the order of the group.
        group: Torch's group.
    """

    ranks: tuple[int, ...]
    group: dist.ProcessGroup


def ranks_of(peers: Peers | None) -> Sequence[int]:
    """Return the numbers in the job of those who take part: None is all of them, 0 alone on one process."""
    return range(ranks.get_world_size()) if peers is None else peers.ranks


def group_of(peers: Peers | None) -> dist.ProcessGroup | None:
    """Return their process group as torch takes it: None is the job's."""
    return None if peers is None else peers.group


def subset_of(peers: Peers | None) -> tuple[int, ...] | None:
    """Return their numbers as waits on the store take them: None is all."""
    return None if peers is None else peers.ranks
