"""Add vectors exactly: the sum is the same to the last bit in any order, and in any division into partial sums."""

from __future__ import annotations

import math

import torch
from torch import Tensor

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
