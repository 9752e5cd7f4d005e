"""Add vectors exactly: the sum is the same to the last bit in any order, and in any division into partial sums."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_WIDTH = 40  # bits of a digit
_OFFSET = -28  # usual gradients, of which the largest is below 2**11, keep far more than 40 bits
MOST = 1 << 14  # vectors: each digit is at most 2**39 units, and float64 counts to 2**53
PLACES = range(-4, 23)  # from below the least number of float32 to 2**891
_CHUNK = 1 << 17  # elements that are split at a time, and stay in the cache meanwhile


class ExactSum:
    """The sum of vectors whose elements are rounded to multiples of one unit.

    Each element is split into two digits of 40 bits, at places that are fixed: the upper digit is a multiple of
    2**(40 * place - 28), the lower one of 2**(40 * place - 68). Sums of digits are exact. The place follows the
    largest element of all vectors, which is 2**39 to 2**79 lower units. When the place rises, the upper digits become
    the lower ones, and the sum is what it would be if it had been at that place before.

    Args:
        digits: Zeros, of shape (2, elements) and float64, to hold the sums of the upper and of the lower digits. Those
            of several sums at the same place may be added up: `raise_to` brings them there.

    References:
        James Demmel and Hong Diep Nguyen, Parallel reproducible summation, IEEE Transactions on Computers 64 (7), 2015.
        The digits are its bins, of which it keeps two.

    Example:
        >>> total = ExactSum(torch.zeros(2, 1, dtype=torch.float64))
        >>> for number in [1000.0, 2.0**-60, -1000.0]:
        ...     total.add(torch.tensor([[number]]))
        >>> total.rounded().item() == 2.0**-60
        True
    """

    def __init__(self, digits: Tensor) -> None:
        self.digits = digits
        self.place = PLACES[0]
        self._rest, self._digit = digits.new_empty(2, _CHUNK)

    @torch.no_grad()
    def add(self, vectors: Tensor) -> None:
        """Add vectors of any real floating dtype, shape (vectors, elements).

        An element that is not finite, or beyond 2**891, makes its sum NaN.
        """
        limit = _limit(PLACES[-1])
        least, greatest = _extremes(vectors)
        if not -limit < least <= greatest < limit:
            usable = vectors.abs() < limit
            self.digits[0].masked_fill_(~usable.all(0), math.nan)
            vectors = torch.where(usable, vectors, 0)
            least, greatest = _extremes(vectors)
        self.raise_to(_place_of(max(-least, greatest)))
        upper, lower = self.digits
        width = max(1, _CHUNK // len(vectors))
        for start in range(0, len(upper), width):
            piece = slice(start, start + width)
            self._add_digits(vectors[:, piece], upper[piece], lower[piece])

    def _add_digits(self, vectors: Tensor, upper: Tensor, lower: Tensor) -> None:
        """Round to a multiple of the upper unit, and the rest to one of the lower unit; halves to even ones."""
        rest = self._rest[: vectors.numel()].view(vectors.shape).copy_(vectors)
        digit = self._digit[: vectors.numel()].view(vectors.shape)
        shift = 1.5 * 2.0**52 * _unit(self.place)  # next to it float64 has no other numbers than multiples
        torch.add(rest, shift, out=digit).sub_(shift)
        upper.add_(digit.sum(0))
        shift = 1.5 * 2.0**52 * _unit(self.place - 1)
        lower.add_(rest.sub_(digit).add_(shift).sub_(shift).sum(0))

    @torch.no_grad()
    def raise_to(self, place: int) -> None:
        """Let the digits be those at a place, if it is higher: round the sum as if it had been there from the start."""
        if place <= self.place:
            return
        upper, lower = self.digits
        if place > self.place + 1:
            upper.sub_(upper)  # NaN stays
        lower.copy_(upper)
        upper.sub_(upper)
        self.place = place

    @torch.no_grad()
    def rounded(self) -> Tensor:
        """Return the sum, rounded once to float64; it takes the place of the upper digits."""
        upper, lower = self.digits
        total: Tensor = upper.add_(lower)
        return total.masked_fill_(total.isnan(), math.nan)  # of which there are several forms


def _extremes(vectors: Tensor) -> tuple[float, float]:
    least, greatest = torch.aminmax(vectors)
    return least.item(), greatest.item()


def _unit(place: int) -> float:
    """Return the unit of the upper digits at a place."""
    return math.ldexp(1.0, _WIDTH * place + _OFFSET)


def _limit(place: int) -> float:
    """Return the least number that is too large for a place: half a unit of the place above."""
    return _unit(place + 1) / 2


def _place_of(largest: float) -> int:
    """Return the lowest place where a number is below the limit."""
    _, exponent = math.frexp(largest)
    if not largest:
        return PLACES[0]
    return max(PLACES[0], (exponent - _OFFSET) // _WIDTH)
