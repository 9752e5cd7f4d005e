"""Draw samples in proportion to weights, in one draw for all ranks."""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np

from .arguments import as_integer
from .data.samplers import ResumableSampler
from .data.seeds import hash_seeds

if TYPE_CHECKING:
    import numpy.typing as npt

    from .data.samplers import Order, Positions


class DistributedWeightedSampler(ResumableSampler):
    """Draw samples in proportion to weights, in one global draw per (seed, epoch) for all ranks.

    `torch.utils.data.WeightedRandomSampler` for any number of ranks, resumable. It takes O(n) time
    and memory.

    Args:
        weights: Weight per sample, shape (n,), finite, not negative; the sum is arbitrary. They are
            copied: to change them create another sampler, on every rank.
        num_samples: Samples per epoch of all ranks together; padded from the front to a
            multiple of the number of ranks.
        num_replicas: Number of ranks; by default the world size.
        rank: This rank; by default the process's own.
        replacement: Whether a sample may be drawn more than once.
        seed: Any integer, the same on every rank.

    Raises:
        ValueError: If weights are not such a vector or, without replacement, fewer than
            ``num_samples`` of them are positive.

    References:
        Without replacement: Efraimidis and Spirakis, Weighted random sampling with a reservoir,
        2006.

    Example:
        >>> weights = [0.0, 2.0, 0.0]
        >>> list(DistributedWeightedSampler(weights, num_samples=4, num_replicas=2, rank=0))
        [1, 1]
    """

    def __init__(
        self,
        weights: npt.ArrayLike,
        num_samples: int,
        num_replicas: int | None = None,
        rank: int | None = None,
        replacement: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__(as_integer(num_samples, "num_samples"), num_replicas, rank, seed)
        self.weights = np.asarray(weights, dtype=np.float64).copy()  # the caller may change its own
        self.replacement = bool(replacement)
        if not _are_weights(self.weights):
            expected = "finite numbers >= 0, at least one of them positive"
            raise ValueError(f"weights must be a vector of {expected}.")
        possible = np.count_nonzero(self.weights)
        if not replacement and num_samples > possible:
            found = f"only {possible} weights are positive"
            raise ValueError(f"Cannot draw {num_samples} different samples: {found}.")

    def _identity(self) -> dict[str, Any]:
        digest = blake2b(self.weights.tobytes(), digest_size=8).hexdigest()
        return {"seed": self.seed, "n": self.n, "replacement": self.replacement, "weights": digest}

    def _order(self) -> Order:
        if self.replacement:
            return self._with_replacement()
        return self._without_replacement()

    def _with_replacement(self) -> Order:
        uniform = self._uniform(self.n)
        totals = np.cumsum(self.weights / self.weights.max())
        last = np.flatnonzero(self.weights)[-1]  # uniform * total may round up to the total

        def order(positions: Positions) -> Positions:
            points = uniform[positions] * totals[-1]
            drawn: Positions = np.searchsorted(totals, points, side="right").clip(max=last)
            return drawn

        return order

    def _without_replacement(self) -> Order:
        uniform = self._uniform(len(self.weights))
        with np.errstate(divide="ignore"):  # a weight of 0 comes last
            # logarithms, so that nothing overflows
            times = np.log(-np.log1p(-uniform)) - np.log(self.weights)
            return np.argsort(times, kind="stable")[: self.n].take

    def _uniform(self, count: int) -> npt.NDArray[np.float64]:
        """Draw numbers in [0, 1) that depend on seed, epoch and number of weights."""
        key = hash_seeds("weighted", self.seed, self.epoch, len(self.weights))
        bits = np.random.PCG64(key).random_raw(count) >> np.uint64(11)
        return bits.astype(np.float64) * 2.0**-53


def _are_weights(weights: npt.NDArray[np.float64]) -> bool:
    if weights.ndim != 1 or not weights.any():
        return False
    return bool(np.all(np.isfinite(weights) & (weights >= 0)))
