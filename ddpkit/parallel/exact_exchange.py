"""Add up vectors of all ranks exactly: each rank adds up a part of the elements, and gives it to the others."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ..collectives.consistency import CHECK, communication_device, new_block, sum_block
from ..process_group import current_job
from ..process_group.peers import Peers, group_of
from .exact_sum import PLACES, ExactSum, place_of

_AT_ONCE = 8  # vectors that are added together, which takes less time
_DIGITS = 16  # bytes of an element's digits
_SMALL = 1 << 20  # bytes of all ranks' vectors, which all add up as quickly as they would tell each other the sum
_PLACES = CHECK  # in a block: a mark at the place of each rank's sum
_INCOMPLETE = _PLACES + len(PLACES)  # and behind them, how many ranks say that pieces are missing


class Layout(NamedTuple):
    """What the memory for a sum depends on: equal on all ranks.

    Attributes:
        sizes: Of the pieces of a vector.
        vectors: Of the rank that has most.
        ranks: How many add them up.
        dtype: Of the vectors, float32 or float64.
        result: Dtype of the sum.
        device: Where they are.
    """

    sizes: tuple[int, ...]
    vectors: int
    ranks: int
    dtype: torch.dtype
    result: torch.dtype
    device: torch.device


class ExactExchange:
    """The exact sum of vectors that all ranks have, each some of them.

    The elements are divided into a part for each rank, which gets what the others have of it, adds it up, rounds once,
    and gives the result to the others. If each rank has a few vectors, up to 16 bytes an element, these travel
    themselves. Else each rank adds its own up, and the digits of the sum travel. Small vectors go to all ranks, which
    have no parts then. The bits are the same.

    The memory is kept from sum to sum, for new memory is slow.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        ranks, device = layout.ranks, layout.device
        size = layout.vectors * layout.dtype.itemsize  # of what a rank has of an element
        is_small = ranks * size * sum(layout.sizes) <= _SMALL
        self._parts = 1 if is_small else ranks  # into which the elements are divided
        self._vectors_travel = ranks > 1 and (is_small or size <= _DIGITS)
        part = max(1, math.ceil(sum(layout.sizes) / self._parts))
        if self._vectors_travel:
            shape = self._parts, layout.vectors, part
        else:
            shape = 1, min(layout.vectors, _AT_ONCE), self._parts * part
        self._waiting = torch.zeros(shape, dtype=layout.dtype, device=device)  # vectors that are to be added
        self._count = 0
        self._pieces = _cut(layout.sizes, shape[0], shape[-1])
        self._sum = ExactSum(torch.empty(2, shape[-1], dtype=torch.float64, device=device))
        self._received = torch.empty(0)
        self._total = torch.empty(self._parts, part, dtype=layout.result, device=device)

    def clear(self) -> None:
        """Begin a sum."""
        self._count = 0
        self._sum.clear()

    def add(self, pieces: list[Tensor]) -> None:
        """Add a vector, given in pieces."""
        for row, cut in zip(self._waiting[:, self._count], self._pieces, strict=True):
            if cut:
                own = [pieces[i][start:stop] for i, start, stop in cut]
                torch.cat(own, out=row[: sum(map(len, own))])
        self._count += 1
        if self._count == _AT_ONCE and not self._vectors_travel:
            self._add_waiting()

    def _add_waiting(self) -> None:
        if self._count:
            self._sum.add(self._waiting[0, : self._count])
            self._count = 0

    def total(self, fingerprint: str, is_complete: bool, peers: Peers | None) -> tuple[Tensor, bool]:
        """Return the sum over all ranks, shape (elements,), and whether it is complete on all of them. Collective.

        The sum is overwritten by the next one.

        Raises:
            MismatchError: If the ranks have other fingerprints.
        """
        if not self._vectors_travel:
            self._add_waiting()
        place, is_complete = self._agree(fingerprint, is_complete, peers)
        if self._vectors_travel:
            self._waiting[:, self._count :] = 0
            self._sum.add(self._exchange(self._waiting, peers).flatten(0, 1))
        self._sum.raise_to(place)
        part = self._sum
        if self._parts > 1 and not self._vectors_travel:
            parts = self._sum.digits.view(2, self._parts, -1).transpose(0, 1).contiguous()
            part = ExactSum.of(self._exchange(parts, peers).sum(0), place)
        self._gather(part.rounded().to(self.layout.result), peers)
        return self._total.view(-1)[: sum(self.layout.sizes)], is_complete

    def _agree(self, fingerprint: str, is_complete: bool, peers: Peers | None) -> tuple[int, bool]:
        """Return the highest place of all ranks, and whether all are complete. Collective."""
        place = max(self._sum.place, place_of(self._waiting[:, : self._count]))
        block = new_block()
        block[_PLACES + PLACES.index(place)] = 1
        block[_INCOMPLETE] = not is_complete
        sum_block(fingerprint, block, peers)
        highest = np.flatnonzero(block[_PLACES:_INCOMPLETE])[-1]
        return PLACES[highest], not block[_INCOMPLETE]

    def _exchange(self, parts: Tensor, peers: Peers | None) -> Tensor:
        """Give each rank its part; return what all have of this one's: (ranks, vectors, part). Collective."""
        sent = parts.to(communication_device(parts.device, peers))
        shape = self.layout.ranks, *sent.shape[1:]
        if self._received.shape != shape or self._received.device != sent.device:
            self._received = sent.new_empty(shape)
        with current_job.exchanging():
            if len(sent) == 1:
                dist.all_gather(list(self._received), sent[0], group=group_of(peers))
            else:
                dist.all_to_all_single(self._received, sent, group=group_of(peers))
        return self._received.to(parts.device)

    def _gather(self, part: Tensor, peers: Peers | None) -> None:
        """Fill the total with the parts of all ranks. Collective."""
        if self._parts == 1:
            self._total[0] = part
            return
        total = self._total.to(communication_device(part.device, peers))
        parts = list(total.view(torch.uint8))  # gloo does not send all dtypes
        with current_job.exchanging():
            dist.all_gather(parts, part.to(total.device).view(torch.uint8), group=group_of(peers))
        if total is not self._total:
            self._total.copy_(total)


def _cut(sizes: Sequence[int], parts: int, length: int) -> list[list[tuple[int, int, int]]]:
    """Divide pieces that lie one behind the other into parts of one length.

    Returns:
        For each part which pieces are in it, and from where to where.
    """
    starts = list(itertools.accumulate(sizes, initial=0))
    cuts = []
    for begin in range(0, parts * length, length):
        cut = []
        for i, (start, stop) in enumerate(itertools.pairwise(starts)):
            first, last = max(start, begin), min(stop, begin + length)
            if first < last:
                cut.append((i, first - start, last - start))
        cuts.append(cut)
    return cuts
