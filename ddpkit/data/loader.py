"""Load batches: torch's DataLoader with a distributed sampler, seeded workers and a state."""

from __future__ import annotations

import inspect
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, count, islice, repeat
from typing import Any, NamedTuple

import torch
from torch.utils.data import BatchSampler, DataLoader, Sampler, get_worker_info

from ..arguments import as_integer, no_option
from ..errors import DdpkitError, describe_error
from ..job import current_job
from ..torch_internals import is_from_worker
from .samplers import DistributedEvalSampler, DistributedSampler, Place, ResumableSampler, check_identity, read_progress
from .seeds import generators_kept, hash_seeds, seed_cpu
from .streams import Stream, ends_early, is_stream, pass_epoch_on, reading, shards_of, split_twice, without_end

# context in which a loader starts its workers; `stopping()` replaces it
starting_workers: Callable[[DataLoader[Any]], AbstractContextManager[Any]] = nullcontext
_DECIDED = {
    "batch_sampler": "it builds its own, so that every rank gets the same number of batches",
    "generator": "it seeds its own, and leaves the global one alone",
    "in_order": "batches out of order can be neither counted nor resumed",
}

_SHOWN = 20  # samples of a batch in a message
Seeds = tuple[int, int, int, int]  # seed, epoch, rank, position in the global order


def make_loader(
    dataset: Any,
    batch_size: int | None = None,
    *,
    global_batch_size: int | None = None,
    accumulation: int = 1,
    train: bool = True,
    shuffle: bool | None = None,
    seed: int = 0,
    num_workers: int = 0,
    drop_last: bool = False,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    sampler: Sampler[int] | None = None,
    num_replicas: int | None = None,
    rank: int | None = None,
    **options: Any,
) -> Loader:
    """Make a loader for this rank's part of a dataset.

    In training, the ranks' batches of a step together form one batch of the global order, on any
    number of ranks, split as evenly as possible. Every rank gets the same number of batches: a rank
    for which there is no sample repeats one, as padding. Multiply the loss of a batch by
    `loader.weight`, and the weights trained are those of one process. In evaluation each sample
    comes exactly once, in order; some ranks may get one batch more.

    A stream (an `IterableDataset`, or anything without a length) needs a method
    `shard(index, num_shards)` that returns an iterable; its shards are spread over ranks x workers.
    Inside a shard `get_worker_info()` returns None.

    The loader calls the dataset's `set_epoch(epoch)`, if it has one, in every process that reads it
    and before every batch, so `set_epoch` should only store the number. It also finds datasets in
    the attributes `dataset` and `datasets` (torch's `Subset`, `ConcatDataset`).

    Args:
        dataset: Anything with a length and `__getitem__`, or a stream.
        batch_size: Samples per batch, per rank.
        global_batch_size: Instead, samples per optimiser step, of all ranks together.
        accumulation: Batches per optimiser step; see `accumulate`.
        train: True for training, False for evaluation.
        shuffle: Whether to shuffle each epoch; by default in training. Not allowed in evaluation,
            with a sampler or for a stream.
        seed: Any integer, the same on every rank; seeds the order and the workers.
        num_workers: Loading processes per rank; 0 loads in this process and leaves its random
            numbers alone.
        drop_last: Whether training drops the samples that do not fill an optimiser step.
        collate_fn: Turns a list of samples into a batch; by default torch's.
        sampler: Sampler of this rank's indices, instead of `shuffle`: one of ddpkit's, torch's
            DistributedSampler, or one with attributes `num_replicas` and `rank`; on one rank any
            sampler. Its `set_epoch` is called, if it has one. One of ddpkit's is cut into these batches.
        num_replicas: Number of ranks that split the samples; by default all, or the data-parallel
            ones (`set_data_parallel`). Below the world size if several ranks read the same samples,
            as in tensor parallelism.
        rank: This process's index among them; by default its own rank. It seeds the workers: equal
            indices load equal batches.
        **options: Further options of torch's DataLoader, such as `pin_memory`,
            `persistent_workers` or `prefetch_factor`.

    Raises:
        ValueError: If options contradict each other, `drop_last` leaves nothing, `rank` is not below
            `num_replicas`, a stream has fewer shards than readers or was split before, or the global
            batch does not divide: into `accumulation` batches or, of a stream or with another
            sampler, among the ranks.
        TypeError: If both batch sizes are given, or none; a stream has no `shard` on several ranks or
            with several workers, a sampler is not distributed on several ranks, the dataset is not a
            dataset, or `make_loader` sets the option itself.

    Example:
        >>> loader = make_loader(range(10), batch_size=4)
        >>> [len(batch) for batch in loader], loader.epoch
        ([4, 4, 2], 1)
    """
    place = Place.choose(num_replicas, rank)
    options |= {"num_workers": num_workers, "collate_fn": collate_fn}
    check_options("make_loader()", options)
    accumulation = as_integer(accumulation, "accumulation")
    size = _samples_per_batch(batch_size, global_batch_size, accumulation, place.num_replicas)
    if not train and (shuffle or drop_last):
        raise ValueError("With train=False each sample comes once, in order: remove shuffle and drop_last.")
    if shuffle and (sampler is not None or is_stream(dataset)):
        raise ValueError("Remove shuffle: the sampler, or the stream itself, decides the order.")
    if is_stream(dataset):
        if sampler is not None:
            raise ValueError("A stream is read in its own order: remove the sampler.")
        if collate_fn is not None:
            # torch would take its `StopIteration` for the end of the stream
            options["collate_fn"] = partial(without_end, "collate_fn", collate_fn)
        dataset = shards_of(dataset, place, seed, num_workers, options.get("persistent_workers", False))
    elif sampler is not None:
        _check_sampler(sampler, place, size)
    elif not train:
        sampler = DistributedEvalSampler(dataset, num_replicas, rank)
        size += -size % place.num_replicas  # it deals sample by sample
    else:
        is_shuffled = shuffle is None or bool(shuffle)  # any false value means no, as in torch
        sampler = DistributedSampler(dataset, num_replicas, rank, is_shuffled, seed)
    if isinstance(sampler, ResumableSampler):
        sampler.cut_into(size, accumulation, drop_last or sampler.drop_last)
    mine = _share_of_batch(size, sampler, place)
    return Loader(dataset, BatchShape(mine, size, drop_last, accumulation), sampler, place, seed, **options)


class BatchShape(NamedTuple):
    """How a loader cuts samples into batches.

    Attributes:
        size: Samples per batch on this rank.
        global_size: Samples per batch of all ranks together.
        drop_last: Whether an incomplete step is dropped.
        accumulation: Batches per optimiser step.
    """

    size: int
    global_size: int
    drop_last: bool
    accumulation: int = 1


def _samples_per_batch(batch_size: Any, global_batch_size: Any, accumulation: int, num_replicas: int) -> int:
    """Return the samples per batch of all ranks together."""
    if (batch_size is None) == (global_batch_size is None):
        raise TypeError(
            "make_loader() takes either batch_size, the samples of one rank, or global_batch_size, those of all ranks "
            f"together; got {batch_size} and {global_batch_size}."
        )
    if global_batch_size is None:
        return as_integer(batch_size, "batch_size") * num_replicas
    size, rest = divmod(as_integer(global_batch_size, "global_batch_size"), accumulation)
    if rest:
        raise ValueError(
            f"global_batch_size={global_batch_size} does not divide into accumulation={accumulation} equal batches."
        )
    return size


def _share_of_batch(size: int, sampler: Sampler[Any] | None, place: Place) -> int:
    """Return this rank's samples of a batch."""
    if isinstance(sampler, ResumableSampler):
        return sampler.share_of(size)
    share, rest = divmod(size, place.num_replicas)
    if rest:
        kind = "a stream" if sampler is None else type(sampler).__name__
        raise ValueError(f"With {kind}, {place.num_replicas} ranks cannot divide a global batch of {size} evenly.")
    return share


class Loader(DataLoader[Any]):
    """A torch DataLoader that counts epochs and progress. `make_loader` creates it.

    Each `iter()` starts the next epoch, beginning with epoch 0, unless `set_epoch` or a loaded state
    sets another. `next(iter(loader))` therefore uses up an epoch, and the next loop warns: use
    `peek()`. `set_epoch` and `load_state_dict` do not affect existing iterators. Simultaneous loops,
    as in `zip(loader, loader)`, run over one epoch each, and the state counts the latest; with
    persistent workers the older one raises `DdpkitError`.

    A state counts the batches that the loop received, not those prefetched by workers. Take it in
    the loop after the optimiser step: it counts the current batch as used, and the resumed run starts
    with the next one. From a state of an epoch's last batch, it starts with an empty loop, so that
    your code after the loop runs. A state taken after the loop resumes with the next epoch; after a
    `break`, with the rest of this one, unless you call `set_epoch(epoch + 1)`.

    Workers seed `random`, NumPy and torch before every batch from (seed, epoch, rank, position in the
    global order): random augmentations do not depend on the number of workers, their persistence or
    a resume.

    Example:
        >>> loader = make_loader(range(6), batch_size=2, shuffle=False)
        >>> for batch in loader:
        ...     state = loader.state_dict()  # after the step
        ...     break
        >>> resumed = make_loader(range(6), batch_size=2, shuffle=False)
        >>> resumed.load_state_dict(state)
        >>> [batch.tolist() for batch in resumed]
        [[2, 3], [4, 5]]
    """

    def __init__(
        self, dataset: Any, shape: BatchShape, sampler: Sampler[Any] | None, place: Place, seed: int, **options: Any
    ) -> None:
        self._resumable = sampler if isinstance(sampler, ResumableSampler) else None
        self._place = place
        self._seed = seed
        self._shape = shape
        self._epoch = 0
        self._given_before = 0  # batches of this epoch done before the loaded state
        self._loop: Loop | None = None  # the latest loop
        self._counts = False  # whether the state counts it
        self._given: Loop | None = None  # the loop that returned the current batch
        self._has_warned = False
        options["generator"] = torch.Generator("cpu")
        size, drop_last = shape.size, shape.drop_last
        if sampler is None:
            super().__init__(dataset, size, drop_last=drop_last, **options)
            return
        super().__init__(dataset, batch_sampler=_Batches(sampler, size, drop_last, is_own=True), **options)
        # torch does not set these with a batch sampler, but people read them
        self.__dict__.update(batch_size=size, sampler=sampler, drop_last=drop_last)

    @property
    def epoch(self) -> int:
        """Return the current epoch; outside a loop, the next one."""
        return getattr(self.sampler, "epoch", self._epoch)

    @property
    def samples(self) -> int:
        """Return this rank's number of samples in the current batch, without padding.

        It is 0 on a rank that got only a repeated sample. Use it for counts and printed means:
        `all_reduce_mean(loss.item(), weight=loader.samples)`.

        Raises:
            DdpkitError: If the loop has not begun.
            TypeError: For a stream, another library's sampler on several ranks, or micro-batches of
                `make_micro_batch_loader`: the loader does not know it.

        Example:
            >>> loader = make_loader(range(5), 2)
            >>> [loader.samples for batch in loader]
            [2, 2, 1]
        """
        return len(self._shares("samples")[0])

    @property
    def weight(self) -> float:
        """Return what the mean loss of the current batch counts in its optimiser step.

        It is this rank's `samples` x number of ranks / samples of the step on all ranks and in all
        its batches. With `(loss * loader.weight).backward()`, and gradients averaged over ranks, each
        sample counts the same. It is 1 where ranks have equally many samples, 0 for padding; with
        `accumulation` it contains the division by the number of batches.

        Raises:
            DdpkitError: As `samples`.
            TypeError: As `samples`.

        Example:
            >>> loader = make_loader(range(5), global_batch_size=4, accumulation=2)
            >>> [loader.weight for batch in loader]
            [0.5, 0.5, 1.0]
        """
        current_job.weighting["weight"] = 1
        mine, step = self._shares("weight")
        return len(mine) * self._place.num_replicas / len(step)

    @property
    def steps_per_epoch(self) -> int:
        """Return the optimiser steps of a whole epoch, for schedules; `len()` counts the batches that are left.

        Raises:
            TypeError: If a stream has no length.

        Example:
            >>> make_loader(range(5), global_batch_size=4, accumulation=2).steps_per_epoch
            2
        """
        if self._resumable is None:
            return -(-len(self) // self._shape.accumulation)
        return -(-self._resumable.end_from(0) // (self._shape.global_size * self._shape.accumulation))

    def _shares(self, name: str) -> tuple[range, range]:
        """Return the positions of this rank's samples of the current batch, and of all ranks' in its step."""
        loop = self._given
        if loop is None:
            raise DdpkitError(f"loader.{name} is that of the current batch: read it in the loop over the loader.")
        if loop.positions is None:
            raise TypeError(
                f"loader.{name} is known for ddpkit's samplers only. Elsewhere count the samples of each batch: "
                "global_mean(loss * count, count)."
            )
        size = self._shape.global_size
        per_step = size * self._shape.accumulation
        batch = (loop.batches - 1) * size
        step = loop.positions[batch // per_step * per_step :][:per_step]
        return loop.positions[batch : batch + size][self._place.rank :: self._place.num_replicas], step

    def _positions(self) -> range | None:
        """Return the positions in the global order that the next loop deals; None if they are not known."""
        if self._resumable is not None:
            return self._resumable.positions
        if isinstance(self.sampler, DistributedEvalSampler):
            return range(self.sampler.n)
        if self._place.num_replicas > 1 or not isinstance(self.sampler, Sized):
            return None
        n = len(self.sampler)
        return range(n - n % self._shape.size if self.drop_last else n)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next `iter()`; needed only to leave the sequence 0, 1, 2, ..."""
        if epoch != self.epoch:
            self._given_before = 0
        self._epoch = epoch
        self._counts = False
        pass_epoch_on(self.sampler, epoch)

    def epochs(self, n: int) -> Iterator[int]:
        """Iterate over the remaining epochs of `n`; a resumed run starts with the interrupted one.

        Loop over the loader once in each. Leaving that loop early gives no warning. If that ends the
        epoch, call `set_epoch(epoch + 1)` before taking a state; otherwise a resume continues it.

        Args:
            n: Number of epochs of the whole run.

        Example:
            >>> loader = make_loader(range(4), batch_size=2)
            >>> for epoch in loader.epochs(2):
            ...     print(epoch, len(list(loader)))
            0 2
            1 2
        """
        for epoch in range(self.epoch, n):
            self.set_epoch(epoch)
            yield epoch

    def peek(self) -> Any:
        """Return the first batch of the next loop, without counting it.

        Use it to look at shapes or to trace a model. It is loaded in this process, with other random
        numbers than in a worker, and the generators of `random`, NumPy and torch are restored. If the
        epoch has no batches left, it returns the dataset's first samples; of a stream, always the
        epoch's first batch.
        """
        with generators_kept():
            batching: dict[str, Any] = {"batch_size": self.batch_size}
            if isinstance(self.batch_sampler, _Batches):
                first = next(self.batch_sampler.cut(), None)
                batching = {"batch_sampler": [first or list(range(len(self.dataset))[: self.batch_size])]}  # type: ignore[arg-type]
            pass_epoch_on(self.dataset, self.epoch)
            batching |= {"collate_fn": self.collate_fn, "generator": torch.Generator("cpu")}
            with torch.device("cpu"), reading(self.dataset):  # as in a loop
                batches = iter(DataLoader(self.dataset, **batching))
            return without_end("The dataset or collate_fn", next, batches)

    def __repr__(self) -> str:
        progress = f"epoch={self.epoch}"
        if self._resumable is not None:
            progress += f", consumed={self._resumable.consumed} of {self._resumable.n}"
        given = self.dataset.dataset if isinstance(self.dataset, Stream) else self.dataset
        return f"Loader({type(given).__name__}, batch_size={self.batch_size}, rank={self._place.rank}, {progress})"

    def state_dict(self) -> dict[str, Any]:
        """Return the progress of the run, including the current batch.

        It is the same on every rank, and holds plain numbers and text. A stream's state counts
        batches.

        Raises:
            TypeError: If the sampler cannot resume and the loop is inside an epoch.
        """
        if self._resumable is not None:
            return self._resumable.state_dict()
        batches = self._given_before
        if self._counted is not None:
            batches = max(batches, self._counted.batches)
        return {"epoch": self.epoch, "batches": batches, **self._identity_in(self.epoch, batches)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume at `state` with the next `iter()`, on any number of ranks.

        A stream is read again up to that position. Inside an epoch it resumes only on the same number
        of ranks and workers.

        Raises:
            ValueError: If the dataset's length, seed or shuffling differ from the state's; for a
                stream, the batch size, or the number of ranks or workers.
            TypeError: If it is not a loader's state, or is inside an epoch and the sampler cannot
                resume.
        """
        if self._resumable is not None:
            self._resumable.load_state_dict(state)
            self._counts = False
            return
        epoch, batches = read_progress(state, "batches", "batches done")
        identity = self._identity_in(epoch, batches)
        if batches:
            check_identity(state, identity)
        self.set_epoch(epoch)
        self._given_before = batches

    def _identity_in(self, epoch: int, batches: int) -> dict[str, Any]:
        """Return the numbers that determine a stream's batches; raise inside an epoch of a sampler that may differ."""
        if not isinstance(self.batch_sampler, _Batches):
            return {
                "seed": self._seed,
                "batch_size": self.batch_size,
                "drop_last": bool(self.drop_last),
                "num_replicas": self._place.num_replicas,
                "num_workers": self.num_workers,
            }
        if batches:
            raise TypeError(
                f"{type(self.sampler).__name__} cannot resume inside an epoch, and batch {batches} of epoch "
                f"{epoch} is done. Take the state at the end of the epoch: after the loop, or after "
                "set_epoch(epoch + 1). Or pass one of ddpkit's training samplers."
            )
        return {}

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self._place.check("The loader")
        if self._counted is not None:  # it was left early
            self._warn_of_the_rest()
            self.set_epoch(self.epoch + 1)
        if self._given is not None:
            self._check_shares(self._given)
        start = 0
        if self._resumable is not None:
            current_job.weighting.clear()
            start = self._resumable.start
        self._loop = loop = Loop(self.epoch, start, self._given_before, self._positions())
        self._counts = True
        self._given = None
        self.generator.manual_seed(hash_seeds("workers", self._seed, loop.epoch, start, self._place.rank))
        pass_epoch_on(self.dataset, loop.epoch)
        with torch.device("cpu"), starting_workers(self):  # torch draws their seed on the default device
            batches = self._begin(loop)
        # it can continue after a batch that raised; nothing else refers to it: workers end when the script drops it
        return map(self._next, repeat(batches), repeat(loop))

    def _begin(self, loop: Loop) -> Iterator[Any]:
        """Start a pass of torch's DataLoader; draw its order now, not at the first batch."""
        if not isinstance(self.batch_sampler, _Batches):
            with reading(self.dataset):
                return super().__iter__()
        batches = self.batch_sampler.cut()
        first = list(islice(batches, 1))  # a generator reads its epoch only now
        self.batch_sampler.prepared = self._with_seeds(chain(first, batches), loop)
        try:
            return super().__iter__()
        finally:
            self.batch_sampler.prepared = None

    def _with_seeds(self, batches: Iterator[list[int]], loop: Loop) -> Iterator[Batch]:
        for indices, seeds in zip(batches, self._seeds(loop), strict=False):
            batch = Batch(indices)
            batch.seeds = seeds
            loop.drawn.append(batch)
            yield batch
        loop.all_drawn = True

    def _seeds(self, loop: Loop) -> Iterator[Seeds]:
        """Yield the seed numbers of each batch."""
        for position in count(loop.start, self._shape.global_size):
            yield self._seed, loop.epoch, self._place.rank, position

    def _next(self, batches: Iterator[Any], loop: Loop) -> Any:
        """Return the next batch of a pass. A batch that raises counts as well."""
        self._check_shares(loop)
        if self.persistent_workers and self._loop is not loop:
            raise DdpkitError(
                f"This loop over epoch {loop.epoch} cannot continue, because another loop over the same "
                "loader has started: persistent workers serve one loop at a time. Make a loader for "
                "each loop, or remove persistent_workers."
            )
        if self.num_workers == 0:
            pass_epoch_on(self.dataset, loop.epoch)  # another loader of the dataset may have set another epoch
        try:
            _skip(batches, loop)
            batch = next(batches)
        except StopIteration as error:
            if _is_from_script(error, loop):
                name = f"The dataset or collate_fn, {loop.describe_next()},"
                self._count_batch(loop)
                raise ends_early(name) from error
            if loop is self._counted:
                self.set_epoch(loop.epoch + 1)
            raise
        except DdpkitError:  # another rank failed
            raise
        except Exception as error:
            if self.num_workers > 0 and not is_from_worker(error):
                raise DdpkitError(f"The loader lost a worker, or one timed out: {describe_error(error)}") from error
            self._count_batch(loop)
            raise
        self._count_batch(loop)
        return batch

    def _count_batch(self, loop: Loop) -> None:
        self._tell_samples(loop)
        self._count_step(loop)

    def _tell_samples(self, loop: Loop) -> None:
        """Remember the indices of this batch, in training."""
        if not loop.drawn:
            return
        indices = loop.drawn.popleft()
        if not isinstance(self.sampler, DistributedEvalSampler):
            current_job.add_samples(indices)

    def _count_step(self, loop: Loop) -> None:
        if self._resumable is not None and loop is self._counted:
            self._resumable.advance(self._shape.global_size)
        loop.batches += 1
        self._given = loop
        current_job.set_progress(epoch=loop.epoch, batch=loop.batches)

    @property
    def _counted(self) -> Loop | None:
        """Return the loop that the state counts, if there is one."""
        loop = self._loop if self._counts else None
        return loop if loop and loop.epoch == self.epoch else None  # torch's set_epoch() bypasses ours

    def unequal_shares(self) -> UnequalShares | None:
        """Return the first batch of the next loop that ranks do not share equally, if there is one."""
        positions = self._positions() or range(0)
        last = (len(positions) - 1) // self._shape.global_size
        return self._unequal_in(positions, 0) or self._unequal_in(positions, last)

    def _unequal_in(self, positions: range, batch: int) -> UnequalShares | None:
        """Return a training batch if ranks do not share it equally."""
        size, ranks = self._shape.global_size, self._place.num_replicas
        samples = len(positions[batch * size : (batch + 1) * size])
        return UnequalShares(batch + 1, samples, ranks) if self._resumable is not None and samples % ranks else None

    def _check_shares(self, loop: Loop) -> None:
        """Warn once if the last batch was averaged over ranks as if their shares of it were equal."""
        if loop.batches == 0 or loop.positions is None or self._has_warned:
            return
        rest = loop.batches * self._shape.global_size < len(loop.positions)
        if rest and loop.batches % self._shape.accumulation:  # weighted perhaps when the step is complete
            return
        shares = self._unequal_in(loop.positions, loop.batches - 1)
        remedy = shares and remedy_for(shares)
        if remedy and self._place.rank == self._place.num_replicas - 1:  # the rank that gets padding first
            self._has_warned = True
            warnings.warn(f"The loop averages gradients over ranks, but {shares}. {remedy}", stacklevel=3)

    def _warn_of_the_rest(self) -> None:
        sampler = self._resumable
        if sampler is not None and sampler.remaining:
            warnings.warn(
                f"The loop over epoch {self.epoch} stopped after {sampler.consumed} of {sampler.n} samples; this loop "
                f"starts epoch {self.epoch + 1}. The rest is skipped unless the earlier loop continues; only this one "
                "counts progress. To look at a batch use loader.peek(). If you meant to stop early, loop over "
                "loader.epochs(n), or call loader.set_epoch() first.",
                stacklevel=3,
            )


class UnequalShares(NamedTuple):
    """A batch that ranks do not share equally.

    Attributes:
        batch: Its number in the epoch, from 1.
        samples: Samples of all ranks together, without padding.
        ranks: Number of ranks.
    """

    batch: int
    samples: int
    ranks: int

    @property
    def has_padding(self) -> bool:
        """Return whether there is no sample for some ranks."""
        return self.samples < self.ranks

    def __str__(self) -> str:
        padding = ", and some get a repeated one" if self.has_padding else ""
        return f"in batch {self.batch} of an epoch {self.ranks} ranks share {self.samples} samples{padding}"


def remedy_for(shares: UnequalShares) -> str:
    """Say what makes these unequal shares count right; "" if the latest loop averages no gradients, or weights them."""
    used = current_job.weighting
    if "backward" not in used or "weight" in used:
        return ""
    if "gather_batch" in used and shares.has_padding:
        return "The repeated one is in the joined batch: pass drop_last=True to make_loader()."
    if used.get("global_mean", 0) > 0 and shares.has_padding:
        return "Leave it out of the loss and of the count for global_mean(): loader.samples is 0 there."
    if "gather_batch" in used or "global_mean" in used:
        return ""
    return (
        "Unless you weight them by hand, backpropagate loss * loader.weight, where loss is the mean of this rank's "
        "batch, or global_mean(loss * loader.samples, loader.samples). For a printed mean: "
        "all_reduce_mean(loss.item(), weight=loader.samples)."
    )


@dataclass(eq=False)
class Loop:
    """State of one pass over a loader.

    Attributes:
        epoch: Its epoch.
        start: Position in the global order where it starts.
        first: Batches of a stream to read again before the first one is returned.
        positions: Positions in the global order that it deals to all ranks, if they are known.
        batches: Batches returned so far.
        drawn: Indices of the batches to come; none for a stream.
        all_drawn: Whether the sampler has no further batch.
        steps: For micro-batches, positions of each remaining step.
    """

    epoch: int
    start: int
    first: int
    positions: range | None
    batches: int = 0
    drawn: deque[list[int]] = field(default_factory=deque)
    all_drawn: bool = False
    steps: Iterator[range] = field(init=False)

    def describe_next(self) -> str:
        """Describe the batch to come."""
        text = f"asked for batch {self.batches} of epoch {self.epoch}"
        if not self.drawn:
            return text
        samples = [*map(str, self.drawn[0])]
        if len(samples) > _SHOWN:
            samples[_SHOWN:] = ["..."]
        return f"{text}, samples {', '.join(samples)}"


def _is_from_script(error: StopIteration, loop: Loop) -> bool:
    """Return whether the script raised it, and the data has not ended."""
    ended = not loop.drawn or loop.all_drawn
    # `check` ends an epoch early by an exception of its own
    return type(error) is StopIteration and (is_from_worker(error) or not ended)


def _skip(batches: Iterator[Any], loop: Loop) -> None:
    """Skip the batches of a stream that a loaded state counts."""
    if loop.batches < loop.first:
        with generators_kept():
            while loop.batches < loop.first:
                next(batches)
                loop.batches += 1


class _Batches(BatchSampler):
    """Cut a sampler's indices into batches, for its own loader alone.

    accelerate's `prepare()` iterates over it, and Fabric's `setup_dataloaders()` makes another one, to
    split it between ranks.
    """

    prepared: Iterator[list[int]] | None = None  # by a loop that begins

    def __init__(self, sampler: Sampler[int], batch_size: int, drop_last: bool, is_own: bool = False) -> None:
        if not is_own:
            raise split_twice()
        super().__init__(sampler, batch_size, drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        if self.prepared is None:
            raise split_twice()
        return self.prepared

    def cut(self) -> Iterator[list[int]]:
        """Cut the indices of the sampler's next pass."""
        return super().__iter__()


class Batch(list[int]):
    """A batch's indices and seeds, which a worker sets when it unpickles them.

    torch sends a persistent worker nothing else in a new epoch.
    """

    seeds: Seeds

    def __reduce__(self) -> tuple[Any, ...]:
        return _seed_worker_and_unpack, (list(self), self.seeds)


def _seed_worker_and_unpack(indices: list[int], seeds: Seeds) -> list[int]:
    """Return a batch's indices; in the worker that loads them, set its seeds and epoch."""
    worker = get_worker_info()
    if worker is not None:  # else the list is copied in the main process
        seed_cpu(hash_seeds("batch", *seeds))
        pass_epoch_on(worker.dataset, seeds[1])
    return indices


def check_options(call: str, options: dict[str, Any]) -> None:
    """Raise for options that torch's DataLoader does not have, or that the caller may not set."""
    for name in _DECIDED.keys() & options.keys():
        raise TypeError(f"{call} takes no {name}: {_DECIDED[name]}.")
    known = inspect.signature(DataLoader.__init__).parameters
    for name in options.keys() - known.keys():
        raise TypeError(no_option(call, name, known))


def _check_sampler(sampler: Sampler[int], place: Place, size: int) -> None:
    """Raise for a sampler of another rank, or one that gives ranks different numbers of batches."""
    found = getattr(sampler, "rank", None), getattr(sampler, "num_replicas", None)
    if found == (None, None):
        if place.num_replicas > 1:
            raise TypeError(
                f"{type(sampler).__name__} does not split its samples: each of {place.num_replicas} ranks "
                "would load them all. Pass DistributedSampler, DistributedWeightedSampler, or a sampler "
                "with attributes num_replicas and rank that yields this rank's share."
            )
    elif found != (place.rank, place.num_replicas):
        raise ValueError(
            f"The sampler is for rank {found[0]} of {found[1]}, but this is rank {place.rank} of "
            f"{place.num_replicas}. If ranks share samples, pass num_replicas and rank here, too."
        )
    if isinstance(sampler, ResumableSampler) and sampler.global_batch_size not in (place.num_replicas, size):
        raise ValueError(
            f"The sampler deals batches of {sampler.global_batch_size} samples, the loader of {size}, on all ranks "
            "together. Make a sampler for each loader, without batch_size."
        )
