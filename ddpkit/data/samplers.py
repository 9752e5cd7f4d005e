"""Give each rank its samples, as a pure function of (seed, epoch, n). Nothing here communicates.

Every sampler splits one global order, batch by batch: rank r takes positions r, r + world size, and
so on of each global batch. Any number of ranks therefore consumes that order from the front, the
progress is one number, and a run resumes on any number of ranks.
"""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from hashlib import blake2b
from itertools import chain
from math import isqrt
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch.utils.data import DataLoader, Sampler, get_worker_info

from ..arguments import as_integer
from ..errors import DdpkitError
from ..job.current_job import get_data_parallel_rank, get_data_parallel_world_size
from .seeds import hash_seeds

if TYPE_CHECKING:
    import numpy.typing as npt

    Positions = npt.NDArray[np.int64]
    Order = Callable[[Positions], Positions]

# Random orders of [0, n): functions from positions to numbers, without a list in memory.


# Largest permutation kept in memory: 1 MB and 1.5 ms, with all orders equally likely.
_IN_MEMORY = 2**17


def shuffled(n: int, key: int) -> Order:
    """Make a random order of [0, n), equal on every platform and NumPy version.

    Up to 2**17 it is a true permutation; beyond, a keyed bijection: six Feistel rounds with random
    tables of about sqrt(n) entries each on rows x columns >= n.

    Args:
        n: Length of the order, positive.
        key: Seed in [0, 2**63).

    Returns:
        A function from positions, int64 in [0, n), to the numbers there, in the same shape.

    References:
        Luby and Rackoff, How to construct pseudorandom permutations from pseudorandom functions,
        1988. Black and Rogaway, Ciphers with arbitrary finite domains, 2002 (rows x columns, and
        walking back inside).

    Example:
        >>> sorted(shuffled(5, key=1)(np.arange(5)).tolist())
        [0, 1, 2, 3, 4]
    """
    bits = np.random.PCG64(key)
    if n > _IN_MEMORY:
        return bijection(n, bits)
    generator = np.random.RandomState(bits)  # NumPy guarantees that its stream never changes
    return generator.permutation(n).take


def bijection(n: int, bits: np.random.PCG64) -> Order:
    """Make a bijection on [0, n) from raw bits, statistically random from about n = 1000 on."""
    root = isqrt(n - 1) + 1
    # rows x columns exceeds n by as little as possible
    rows = min(range(root, root + 64), key=lambda rows: -n % rows)
    columns = -(-n // rows)
    rounds = [(_table(bits, columns, rows), _table(bits, rows, columns)) for _ in range(3)]

    def mixed(positions: Positions) -> Positions:
        row = positions // columns
        column = positions - row * columns
        for row_shift, column_shift in rounds:
            row = _wrapped(row + row_shift.take(column), rows)
            column = _wrapped(column + column_shift.take(row), columns)
        return row * columns + column

    def order(positions: Positions) -> Positions:
        numbers = mixed(positions)
        while (beyond := np.flatnonzero(numbers >= n)).size:  # repeat until below n, which keeps it a bijection
            numbers[beyond] = mixed(numbers[beyond])
        return numbers

    return order


def _table(bits: np.random.PCG64, length: int, below: int) -> Positions:
    return (bits.random_raw(length) % np.uint64(below)).astype(np.int64)


def _wrapped(values: Positions, size: int) -> Positions:
    """Return `values % size` for 0 <= values < 2 * size, faster."""
    unsigned = values.view(np.uint64)
    smaller = (values - size).view(np.uint64)  # a negative number becomes huge as unsigned
    return np.minimum(unsigned, smaller).view(np.int64)


# One of the readers that split a dataset.


class Place(NamedTuple):
    """One of `num_replicas` readers of a dataset; by default this process among the data-parallel ranks.

    Attributes:
        rank: Its index, from 0.
        num_replicas: Number of readers.
        made_for: This process's data-parallel rank and world size at creation; None if the caller chose both.
    """

    rank: int
    num_replicas: int
    made_for: tuple[int, int] | None

    @classmethod
    def choose(cls, num_replicas: int | None, rank: int | None) -> Place:
        """Take the caller's choice, and the rest from the job.

        Raises:
            ValueError: If a number is not an integer, or the rank is out of range.
        """
        made_for = None
        if num_replicas is None or rank is None:
            made_for = _own_place()
            rank = made_for[0] if rank is None else rank
            num_replicas = made_for[1] if num_replicas is None else num_replicas
        num_replicas = as_integer(num_replicas, "num_replicas")
        rank = as_integer(rank, "rank", least=0)
        if rank >= num_replicas:
            raise ValueError(
                f"rank must be in [0, num_replicas), but rank is {rank} and num_replicas is {num_replicas}."
            )
        return cls(rank, num_replicas, made_for)

    def check(self, name: str) -> None:
        """Raise if this process has another rank now, or the job another number of ranks.

        Args:
            name: The caller, for the message.

        Raises:
            DdpkitError: If either has changed.
        """
        if self.made_for is None or get_worker_info() is not None:  # a loader's worker may not know its rank
            return
        now = _own_place()
        if now != self.made_for:
            raise DdpkitError(
                f"{name} was made for rank {self.made_for[0]} of {self.made_for[1]}, "
                f"but this is now rank {now[0]} of {now[1]}: the process group was created, replaced or "
                "left in between. Create it again; it can load the old state_dict()."
            )


def _own_place() -> tuple[int, int]:
    """Return this process's current data-parallel rank and world size."""
    return get_data_parallel_rank(), get_data_parallel_world_size()


_BLOCK = 2**13  # positions computed at a time, so that they stay in the cache


class ResumableSampler(Sampler[int], ABC):
    """Deal a global order of `n` positions to the ranks, starting where the run stopped.

    Attributes:
        epoch: The epoch of the order; see `set_epoch`.
        start: Global position where this pass starts: 0, or the samples consumed in a loaded state.
        consumed: Samples of this epoch that all ranks together have consumed, counted by `advance`.
        global_batch_size: Samples per batch of all ranks together.
        accumulation: Batches per optimiser step.
        drop_last: Whether to drop the samples that do not fill a step.
    """

    def __init__(self, n: int, num_replicas: int | None, rank: int | None, seed: int) -> None:
        self.place = Place.choose(num_replicas, rank)
        self.num_replicas, self.rank = self.place.num_replicas, self.place.rank
        self.n = n
        self.seed = operator.index(seed)
        self.global_batch_size = self.num_replicas
        self.accumulation = 1
        self.drop_last = False
        self.epoch = self.start = self.consumed = 0

    @abstractmethod
    def _order(self) -> Order:
        """Return the global order of this epoch."""

    @abstractmethod
    def _identity(self) -> dict[str, Any]:
        """Return the numbers, besides the epoch, that determine the order.

        A state loads only if they are equal.
        """

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass.

        It starts at the front; in the epoch of a loaded state, at that state's position.
        """
        epoch = operator.index(epoch)
        if epoch != self.epoch:
            self.epoch = epoch
            self.start = 0
        self.consumed = self.start

    def advance(self, samples: int) -> None:
        """Count `samples` more samples, of all ranks together, as consumed.

        `make_loader` does this. In your own loop call it once per step, on every rank, with the
        global batch size: workers prefetch, so the sampler cannot count what it yields.
        """
        self.consumed = min(self.consumed + samples, self.n)

    def cut_into(self, global_batch_size: int, accumulation: int = 1, drop_last: bool = False) -> None:
        """Set how the order is cut: see the attributes.

        Raises:
            ValueError: If `drop_last` leaves nothing.
        """
        self.global_batch_size = global_batch_size
        self.accumulation = accumulation
        self.drop_last = drop_last
        if self.end_from(0) == 0:
            raise ValueError(
                f"drop_last=True drops all {self.n} samples: {self.num_replicas} ranks take "
                f"{global_batch_size * accumulation} per step. Use fewer ranks, a smaller batch, or drop_last=False."
            )

    @property
    def remaining(self) -> int:
        """Return the samples of this epoch that all ranks together have left, without padding."""
        return max(0, self.positions.stop - self.consumed)

    @property
    def positions(self) -> range:
        """Return the positions of the global order that this pass deals."""
        return range(self.start, self.end_from(self.start))

    def state_dict(self) -> dict[str, Any]:
        """Return the progress of the run: equal on every rank, plain numbers and text."""
        return {"epoch": self.epoch, "consumed": self.consumed, **self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume at `state`, on any number of ranks, with any batch size.

        Raises:
            ValueError: If the state's order differs; the message names both values, and nothing
                changes.
            TypeError: If it is not a sampler's state.
        """
        epoch, consumed = read_progress(state, "consumed", f"of {self.n} samples consumed", self.n)
        check_identity(state, self._identity())
        self.epoch = epoch
        self.start = self.consumed = consumed

    def __len__(self) -> int:
        """Return the number of samples of this pass on this rank, padding included."""
        return self._count(len(self.positions))

    def __iter__(self) -> Iterator[int]:
        self.place.check(type(self).__name__)
        return _Indices(self)

    @property
    def num_samples(self) -> int:
        """Return the samples of a whole epoch on this rank, padding included, as in torch."""
        return self._count(self.end_from(0))

    @property
    def total_size(self) -> int:
        """Return the samples of a whole epoch on all ranks together, padding included."""
        batches, tail = divmod(self.end_from(0), self.global_batch_size)
        return batches * max(self.global_batch_size, self.num_replicas) + (max(tail, self.num_replicas) if tail else 0)

    def end_from(self, start: int) -> int:
        """Return the position where a pass from a position on ends."""
        if not self.drop_last:
            return self.n
        return self.n - (self.n - start) % (self.global_batch_size * self.accumulation)

    def _count(self, samples: int) -> int:
        """Count this rank's among so many samples, from the beginning of a batch."""
        batches, tail = divmod(samples, self.global_batch_size)
        return batches * self.share_of(self.global_batch_size) + self.share_of(tail)

    def share_of(self, samples: int) -> int:
        """Return how many samples of a batch this rank gets; at least one, so that it has as many batches as others."""
        return max(min(samples, 1), len(range(self.rank, samples, self.num_replicas)))

    def _blocks(self, order: Order, positions: range) -> Iterator[list[int]]:
        """Yield this rank's samples, in blocks of whole batches, the last batch alone if it is incomplete."""
        size = self.global_batch_size
        tail = len(positions) % size
        mine = self.rank + self.num_replicas * np.arange(self.share_of(size), dtype=np.int64)
        end = positions.stop - tail
        per_block = max(1, _BLOCK // len(mine)) * size
        for first in range(positions.start, end, per_block):
            starts = np.arange(first, min(first + per_block, end), size, dtype=np.int64)
            ours = np.add.outer(starts, mine).ravel()
            if ours[-1] >= self.n:
                ours %= self.n  # padding is from the front
            yield order(ours).tolist()
        if tail:
            yield order((end + mine[: self.share_of(tail)]) % self.n).tolist()


class _Indices(chain[int]):
    """One pass over a sampler, with a state: torchdata's loaders save that of the iterator, too.

    Such a loader restores what it has drawn, whether or not `advance()` counts the steps.
    """

    _blocks: _Blocks

    def __new__(cls, sampler: ResumableSampler) -> _Indices:
        """Begin a pass."""
        blocks = _Blocks(sampler)
        indices: Any = super().from_iterable(blocks)
        indices._blocks = blocks
        return indices  # type: ignore[no-any-return]

    def state_dict(self) -> dict[str, int]:
        """Return the samples that all ranks together have drawn, if all draw alike."""
        return {"consumed": self._blocks.consumed()}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue behind the samples drawn, unless all were; the next pass begins at the front, as in torch."""
        self._blocks.begin(state["consumed"])
        self._blocks.sampler.consumed = state["consumed"]
        self._blocks.sampler.start = 0


class _Blocks(Iterator[Iterator[int]]):
    """The blocks of a pass, which know how many of their samples were drawn: to count each one takes longer."""

    def __init__(self, sampler: ResumableSampler) -> None:
        self.sampler = sampler
        self._order = sampler._order()
        self._block: Iterator[int] = iter(())
        self.begin(sampler.start)

    def begin(self, position: int) -> None:
        """Go on from a global position."""
        for _ in self._block:  # the rest is not drawn
            pass
        self._positions = range(position, self.sampler.end_from(position))
        self._blocks = self.sampler._blocks(self._order, self._positions)
        self._given = 0

    def __next__(self) -> Iterator[int]:
        block = next(self._blocks)
        self._given += len(block)
        self._block = iter(block)
        return self._block

    def consumed(self) -> int:
        """Return where all ranks together are in the global order, if all draw alike."""
        drawn = self._given - operator.length_hint(self._block)
        end = self._positions.stop
        if drawn == self.sampler._count(len(self._positions)):  # the ranks' last shares may be unequal
            return end
        return min(end, self._positions.start + drawn * self.sampler.num_replicas)


class DistributedSampler(ResumableSampler):
    """Split a dataset's indices between the ranks; resumable, with little memory.

    A drop-in for `torch.utils.data.DistributedSampler` that needs no process group. The order is a
    pure function of (seed, epoch, n). Above 2**17 samples it is computed in blocks, so any number of
    samples starts within milliseconds.

    Args:
        dataset: Anything with a length.
        num_replicas: Number of ranks; by default the world size.
        rank: This rank; by default the process's own.
        shuffle: Whether to shuffle each epoch; otherwise 0, 1, 2, ...
        seed: Any integer, the same on every rank.
        drop_last: Whether to drop the samples that do not fill a batch on every rank. By default the
            ranks split them.
        batch_size: Samples per batch, per rank, of your own loader; `make_loader` sets it. All ranks
            get the same number of batches; if the last one has fewer samples than ranks, it is
            padded. The default, 1, gives torch's padding: the same number of indices on every rank.

    Raises:
        ValueError: If the dataset is empty, `drop_last` leaves nothing, or a number is out of range.
        TypeError: If the dataset has no length.

    Example:
        >>> sampler = DistributedSampler(range(10**9), num_replicas=8, rank=3)
        >>> len(sampler)
        125000000
        >>> list(DistributedSampler(range(5), num_replicas=2, rank=1, shuffle=False))
        [1, 3, 0]
    """

    def __init__(
        self,
        dataset: Any,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        batch_size: int = 1,
    ) -> None:
        super().__init__(_length(dataset), num_replicas, rank, seed)
        self.shuffle = bool(shuffle)
        self.cut_into(self.num_replicas * as_integer(batch_size, "batch_size"), drop_last=drop_last)

    def _identity(self) -> dict[str, Any]:
        return {"seed": self.seed, "n": self.n, "shuffle": self.shuffle}

    def _order(self) -> Order:
        if not self.shuffle:
            return lambda positions: positions
        return shuffled(self.n, hash_seeds("order", self.seed, self.epoch, self.n))


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
        possible = np.count_nonzero(self.weights)
        if self.weights.ndim != 1 or not possible or not np.all(np.isfinite(self.weights) & (self.weights >= 0)):
            raise ValueError("weights must be a vector of finite numbers >= 0, at least one of them positive.")
        if not replacement and num_samples > possible:
            raise ValueError(f"Cannot draw {num_samples} different samples: only {possible} weights are positive.")

    def _identity(self) -> dict[str, Any]:
        digest = blake2b(self.weights.tobytes(), digest_size=8).hexdigest()
        return {"seed": self.seed, "n": self.n, "replacement": self.replacement, "weights": digest}

    def _order(self) -> Order:
        if not self.replacement:
            return self._without_replacement()
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


class DistributedEvalSampler(Sampler[int]):
    """Give each index to exactly one rank, in order, without padding.

    The number of samples differs by at most one between ranks, and may be 0.

    Args:
        dataset: Anything with a length.
        num_replicas: Number of ranks; by default the world size.
        rank: This rank; by default the process's own.

    Raises:
        ValueError: If the dataset is empty or the rank out of range.
        TypeError: If the dataset has no length.

    Example:
        >>> [list(DistributedEvalSampler(range(5), 3, rank)) for rank in range(3)]
        [[0, 3], [1, 4], [2]]
    """

    def __init__(self, dataset: Any, num_replicas: int | None = None, rank: int | None = None) -> None:
        self.place = Place.choose(num_replicas, rank)
        self.num_replicas, self.rank = self.place.num_replicas, self.place.rank
        self.n = _length(dataset)

    def __len__(self) -> int:
        return len(range(self.rank, self.n, self.num_replicas))

    def __iter__(self) -> Iterator[int]:
        self.place.check(type(self).__name__)
        return iter(range(self.rank, self.n, self.num_replicas))


def _length(dataset: Any) -> int:
    if isinstance(dataset, DataLoader):
        raise TypeError("A dataset is needed, but this is a DataLoader: pass its `dataset`.")
    if not hasattr(dataset, "__len__"):
        raise TypeError(f"A sampler needs a dataset with a length; {type(dataset).__name__} has no __len__.")
    if length := len(dataset):
        return length
    raise ValueError("The dataset is empty: there is nothing to sample.")


def check_identity(state: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    """Raise if a state belongs to another order.

    Raises:
        ValueError: If a number that determines the order differs.
    """
    for name, now in identity.items():
        saved = state.get(name)
        if saved != now:
            raise ValueError(
                f"Cannot resume: {name} was {saved!r} when the state was saved and is {now!r} now, which changes the "
                "order of the samples. Restore the old value, or start a new epoch."
            )


def read_progress(state: Any, name: str, unit: str, limit: float = math.inf) -> tuple[int, int]:
    """Return the epoch from the state of a sampler or loader, and its progress within it.

    Args:
        state: The state.
        name: Key of the progress.
        unit: Unit of the progress, for messages.
        limit: Largest possible progress.

    Raises:
        TypeError: If it is not a state.
        ValueError: If a number is missing or out of range.
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"A sampler's state is a dict, got a {type(state).__name__}.")
    epoch: Any = state.get("epoch")
    done: Any = state.get(name)
    if type(epoch) is not int or type(done) is not int or epoch < 0 or not 0 <= done <= limit:
        raise ValueError(f"Cannot resume: the state has epoch {epoch!r} with {done!r} {unit}. Start a new epoch.")
    return epoch, done
