"""Add vectors exactly: the sum is the same to the last bit in any order, and in any division among the ranks."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from ..collectives.consistency import add_up, communication_device, reduce_in_place
from ..job.job import Peers

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
        size: Elements of a vector.
        device: Where they are.

    Attributes:
        digits: The sums of the upper and of the lower digits, shape (2, elements).
        place: Of the upper digits.

    References:
        James Demmel and Hong Diep Nguyen, Parallel reproducible summation, IEEE Transactions on Computers 64 (7), 2015.
        The digits are its bins, of which it keeps two.

    Example:
        >>> total = ExactSum(1, torch.device("cpu"))
        >>> for number in [1000.0, 2.0**-60, -1000.0]:
        ...     total.add(torch.tensor([number]))
        >>> total.rounded().item() == 2.0**-60
        True
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.digits = torch.zeros(2, size, dtype=torch.float64, device=device)
        self.place = PLACES[0]

    @torch.no_grad()
    def add(self, vector: Tensor) -> None:
        """Add a vector of any real floating dtype.

        An element that is not finite, or beyond 2**891, makes its sum NaN.
        """
        if not len(vector):
            return
        vector = vector.to(torch.promote_types(vector.dtype, torch.float32))
        largest = _largest(vector)
        usable = None
        if not largest < _LIMIT:
            usable = vector.abs() < _LIMIT
            vector = torch.where(usable, vector, 0)
            largest = _largest(vector)
        if largest:
            _, exponent = math.frexp(largest)
            self.raise_to((exponent - _OFFSET) // _WIDTH)
        upper, lower = self.digits
        for start in range(0, len(vector), _CHUNK):
            piece = slice(start, start + _CHUNK)
            self._add_digits(vector[piece], upper[piece], lower[piece])
        if usable is not None:
            upper.masked_fill_(~usable, math.nan)

    def _add_digits(self, vector: Tensor, upper: Tensor, lower: Tensor) -> None:
        """Round to a multiple of the upper unit, and the rest to one of the lower unit; halves to even ones.

        Nothing else is rounded: units are powers of two, and what is left of an element has no more bits than it.
        """
        rest = vector * (1 / _unit(max(self.place, _LOWEST)))
        if self.place < _LOWEST:
            rest.mul_(_unit(_LOWEST) / _unit(self.place))
        digit = rest.round()
        upper.add_(digit)
        lower.add_(rest.sub_(digit).mul_(2.0**_WIDTH).round_())

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
    def over_ranks(self, fingerprint: str, is_complete: bool, peers: Peers | None) -> bool:
        """Add up the sums of all ranks, on each; return whether all of them are complete. Collective.

        Raises:
            MismatchError: If the ranks have other fingerprints.
        """
        marks = [float(place == self.place) for place in PLACES]
        *places, incomplete = add_up(fingerprint, [*marks, float(not is_complete)], peers)
        self.raise_to(PLACES[np.flatnonzero(places)[-1]])
        digits = self.digits.to(communication_device(self.digits.device, peers))
        self.digits = reduce_in_place(digits, peers=peers).to(self.digits.device)
        return not incomplete

    @torch.no_grad()
    def rounded(self) -> Tensor:
        """Return the sum, rounded once to float64; it takes the place of the upper digits."""
        upper, lower = self.digits
        total: Tensor = upper.mul_(2.0**_WIDTH).add_(lower).mul_(_unit(self.place - 1))
        return total.masked_fill_(total.isnan(), math.nan)  # of which there are several forms


def _largest(vector: Tensor) -> float:
    """Return the largest absolute value; NaN if an element is NaN."""
    least, greatest = torch.aminmax(vector)
    return max(-least.item(), greatest.item())


def _unit(place: int) -> float:
    """Return the unit of the upper digits at a place."""
    return math.ldexp(1.0, _WIDTH * place + _OFFSET)


_LIMIT = _unit(PLACES[-1] + 1) / 2  # what is half a unit of the place above is too large for one
