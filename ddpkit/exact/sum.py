"""Add vectors exactly: the sum is the same to the last bit in any order, and in any division into partial sums."""

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
from ..job import current_job
from ..job.job import Peers, group_of

_WIDTH = 40  # bits of a digit
_OFFSET = -28  # usual gradients, of which the largest is below 2**11, keep far more than 40 bits
MOST = 1 << 14  # vectors: each digit is at most 2**39 units, and float64 counts to 2**53
PLACES = range(-4, 23)  # from below the least number of float32 to 2**891
_LOWEST = -2  # place whose unit has a reciprocal in float32
_CHUNK = 1 << 18  # elements that are split at a time, and stay in the cache meanwhile


class ExactSum:
    """The sum of vectors whose elements are rounded to multiples of one unit.

    Each element is split into two digits of 40 bits, at places that are fixed: the upper digit counts units of
    2**(40 * place - 28), the lower one units of 2**(40 * place - 68). Sums of digits are exact. The place follows the
    largest element of all vectors, which is 2**39 to 2**79 lower units. When the place rises, the upper digits become
    the lower ones, and the sum is what it would be if it had been at that place before.

    Args:
        memory: Of shape (2, elements) and float64, for the sums of the upper and of the lower digits.

    References:
        James Demmel and Hong Diep Nguyen, Parallel reproducible summation, IEEE Transactions on Computers 64 (7), 2015.
        The digits are its bins, of which it keeps two.

    Example:
        >>> total = ExactSum(torch.empty(2, 1, dtype=torch.float64))
        >>> for number in [1000.0, 2.0**-60, -1000.0]:
        ...     total.add(torch.tensor([[number]]))
        >>> total.rounded().item() == 2.0**-60
        True
    """

    def __init__(self, memory: Tensor) -> None:
        self._digits = memory
        self._rest = self._digit = memory.new_empty(0)
        self._wide = memory.new_empty(0)
        self.clear()

    @classmethod
    def of(cls, digits: Tensor, place: int) -> ExactSum:
        """Return the sum whose digits are those of others, at the same place, added up."""
        total = cls(digits)
        total.place = place
        total._is_empty = False
        return total

    def clear(self) -> None:
        """Begin a new sum in the same memory."""
        self.place = PLACES[0]
        self._is_empty = True  # the memory holds anything

    @property
    def digits(self) -> Tensor:
        """The sums of the upper and of the lower digits, shape (2, elements)."""
        if self._is_empty:
            self._digits.zero_()
            self._is_empty = False
        return self._digits

    @torch.no_grad()
    def add(self, vectors: Tensor) -> None:
        """Add vectors of any real floating dtype, shape (vectors, elements).

        An element that is not finite, or beyond 2**891, makes its sum NaN.
        """
        vectors = vectors.to(torch.promote_types(vectors.dtype, torch.float32))
        vectors, usable, place = _fitting(vectors)
        self.raise_to(place)
        if self._rest.dtype != vectors.dtype or not len(self._rest):
            self._rest, self._digit = vectors.new_empty(2, _CHUNK)
            self._wide = self._digits.new_empty(_CHUNK)
        upper, lower = self._digits
        width = max(1, _CHUNK // len(vectors))
        for start in range(0, len(upper), width):
            piece = slice(start, start + width)
            self._add_digits(vectors[:, piece], upper[piece], lower[piece])
        self._is_empty = False
        if usable is not None:
            upper.masked_fill_(~usable.all(0), math.nan)

    def _add_digits(self, vectors: Tensor, upper: Tensor, lower: Tensor) -> None:
        """Round to a multiple of the upper unit, and the rest to one of the lower unit; halves to even ones.

        Nothing else is rounded: units are powers of two, and what is left of an element has no more bits than it.
        """
        rest = self._rest[: vectors.numel()].view(vectors.shape)
        digit = self._digit[: vectors.numel()].view(vectors.shape)
        torch.mul(vectors, 1 / _unit(max(self.place, _LOWEST)), out=rest)
        if self.place < _LOWEST:
            rest.mul_(_unit(_LOWEST) / _unit(self.place))
        torch.round(rest, out=digit)
        self._sum_into(upper, digit)
        rest.sub_(digit).mul_(2.0**_WIDTH).round_()
        self._sum_into(lower, rest)

    def _sum_into(self, total: Tensor, vectors: Tensor) -> None:
        wide = self._wide[: vectors.numel()].view(vectors.shape).copy_(vectors)
        if self._is_empty:
            torch.sum(wide, 0, out=total)
        else:
            total.add_(wide.sum(0))

    @torch.no_grad()
    def raise_to(self, place: int) -> None:
        """Let the digits be those at a place, if it is higher: round the sum as if it had been there from the start."""
        if place <= self.place:
            return
        upper, lower = self._digits
        if not self._is_empty:
            if place > self.place + 1:
                upper.sub_(upper)  # NaN stays
            lower.copy_(upper)
            upper.sub_(upper)
        self.place = place

    @torch.no_grad()
    def rounded(self) -> Tensor:
        """Return the sum, rounded once to float64; it takes the place of the upper digits."""
        upper, lower = self.digits
        total: Tensor = upper.mul_(2.0**_WIDTH).add_(lower).mul_(_unit(self.place - 1))
        if total.sum().isnan():  # of which there are several forms
            total.masked_fill_(total.isnan(), math.nan)
        return total


def place_of(vectors: Tensor) -> int:
    """Return the lowest place that has room for some vectors, but for elements that are not finite or beyond all."""
    return _fitting(vectors)[2] if vectors.numel() else PLACES[0]


def _fitting(vectors: Tensor) -> tuple[Tensor, Tensor | None, int]:
    """Put zeros in the place of elements that are not finite, or beyond all places.

    Returns:
        The vectors, which elements are the others, None if all are, and the lowest place that has room for these.
    """
    usable = None
    largest = _largest(vectors)
    if not largest < _LIMIT:
        usable = vectors.abs() < _LIMIT
        vectors = torch.where(usable, vectors, 0)
        largest = _largest(vectors)
    if not largest:
        return vectors, usable, PLACES[0]
    _, exponent = math.frexp(largest)
    return vectors, usable, max(PLACES[0], (exponent - _OFFSET) // _WIDTH)


def _largest(vectors: Tensor) -> float:
    """Return the largest absolute value; NaN if an element is NaN."""
    least, greatest = torch.aminmax(vectors)
    return max(-least.item(), greatest.item())


def _unit(place: int) -> float:
    """Return the unit of the upper digits at a place."""
    return math.ldexp(1.0, _WIDTH * place + _OFFSET)


_LIMIT = _unit(PLACES[-1] + 1) / 2  # what is half a unit of the place above is too large for one


# Add up vectors of all ranks exactly: each rank adds up a part of the elements, and gives it to the others.

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
        with current_job.peer_errors():
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
        with current_job.peer_errors():
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
