"""Load micro-batches that hold the same samples, and draw the same random numbers, on any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np

from ..arguments import as_integer
from ..data.loader import Batch, BatchShape, Loader, Loop, Seeds, check_options
from ..data.samplers import DistributedSampler
from ..data.seeds import generators_kept, hash_seeds, seed_cpu
from ..errors import DdpkitError
from ..job.current_job import get_device
from .gradients import MOST, MicroBatches, describe_kernels

if TYPE_CHECKING:
    from ..data.samplers import Order

_CALL = "make_micro_batch_loader()"


def make_micro_batch_loader(
    dataset: Any,
    global_batch_size: int,
    micro_batch_size: int,
    *,
    shuffle: bool = True,
    seed: int = 0,
    num_workers: int = 0,
    drop_last: bool = False,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    num_replicas: int | None = None,
    rank: int | None = None,
    **options: Any,
) -> Loader:
    """Make a loader that splits each step into the same micro-batches on any number of ranks.

    Use it with `exact_gradients`. Each iteration yields a list of this rank's micro-batches for one step; ranks may
    have different numbers of them, or none. The list's `global_batch_size` counts the samples of all ranks. A
    micro-batch's samples, and the random numbers used to load them, depend only on the seed, the epoch and the position
    in the global order.

    Args:
        dataset: Anything with a length and `__getitem__`.
        global_batch_size: Samples per optimiser step, on all ranks together; at most 16,384 micro-batches.
        micro_batch_size: Samples per forward; divides `global_batch_size`. An epoch's last micro-batch may be smaller.
        shuffle: Whether to shuffle each epoch.
        seed: Any integer, the same on every rank; seeds the order and the random numbers.
        num_workers: Loading processes per rank; 0 loads in this process.
        drop_last: Whether to drop the incomplete last global batch.
        collate_fn: Turns a list of samples into a micro-batch; by default torch's.
        num_replicas: As for `make_loader`.
        rank: As for `make_loader`.
        **options: As for `make_loader`.

    Raises:
        ValueError: If a number is out of range, the sizes do not divide, or `drop_last` leaves nothing.
        TypeError: If the dataset has no length, or the loader sets the option itself.

    Example:
        >>> sizes = {"global_batch_size": 4, "micro_batch_size": 2}
        >>> loader = make_micro_batch_loader(range(7), **sizes, shuffle=False)
        >>> for batch in loader:
        ...     print(batch, batch.global_batch_size)
        [tensor([0, 1]), tensor([2, 3])] 4
        [tensor([4, 5]), tensor([6])] 3

        On two ranks::

            for batch in loader: ...    # rank 0: [tensor([0, 1])], then [tensor([4, 5])]
            for batch in loader: ...    # rank 1: [tensor([2, 3])], then [tensor([6])]
    """
    options |= {"num_workers": num_workers, "collate_fn": collate_fn}
    check_options(_CALL, options)
    global_batch_size = as_integer(global_batch_size, "global_batch_size")
    micro_batch_size = as_integer(micro_batch_size, "micro_batch_size")
    count, rest = divmod(global_batch_size, micro_batch_size)
    if rest or count > MOST:
        raise ValueError(
            f"{_CALL} splits a step into 1 to {MOST:,} equal micro-batches, but global_batch_size={global_batch_size} "
            f"/ micro_batch_size={micro_batch_size} is {count}, remainder {rest}."
        )
    sampler = MicroBatchSampler(dataset, num_replicas, rank, shuffle, seed)
    sampler.micro_batch_size = micro_batch_size
    sampler.cut_into(global_batch_size, drop_last=drop_last)
    shape = BatchShape(micro_batch_size, global_batch_size, drop_last)
    return MicroBatchLoader(dataset, shape, sampler, sampler.place, seed, **options)


class MicroBatchSampler(DistributedSampler):
    """Deal the micro-batches of a step to the ranks in turn: rank r takes those numbered r, r + world size, ..."""

    micro_batch_size: int

    def _identity(self) -> dict[str, Any]:
        sizes = {"global_batch_size": self.global_batch_size, "micro_batch_size": self.micro_batch_size}
        return super()._identity() | sizes

    def state_dict(self) -> dict[str, Any]:
        """Return the progress of the run, and by which kernels this process computes."""
        return super().state_dict() | {"kernels": describe_kernels(get_device())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken, on any number of ranks.

        Raises:
            ValueError: If the order, the micro-batches or the kernels are others than the state's.
            TypeError: If it is no state of a sampler.
        """
        here = describe_kernels(get_device())
        saved = state.get("kernels", here) if isinstance(state, Mapping) else here
        if saved != here:
            raise ValueError(
                f"Cannot resume with the same bits: the state was saved with {saved}, but this process has {here}. "
                "Resume on the same kind of machine with the same number of threads "
                '(ddpkit.setup(num_threads=...)), or remove "kernels" from the state and continue with other bits.'
            )
        super().load_state_dict(state)

    @property
    def total_size(self) -> int:
        """Return the samples of a whole epoch on all ranks together."""
        return self.end_from(0)

    def share_of(self, samples: int) -> int:
        """Return how many samples of a step this rank gets."""
        return sum(len(positions) for positions in self.micro_batches(range(samples)))

    def steps(self, positions: range) -> Iterator[range]:
        """Yield the positions of all ranks' samples in each step."""
        for start in range(0, len(positions), self.global_batch_size):
            yield positions[start : start + self.global_batch_size]

    def micro_batches(self, positions: range) -> Iterator[range]:
        """Yield the positions of each micro-batch of this rank, in one step or several."""
        size = self.micro_batch_size
        for step in self.steps(positions):
            for start in step[self.rank * size :: self.num_replicas * size]:
                yield range(start, min(start + size, step.stop))

    def _blocks(self, order: Order, positions: range) -> Iterator[list[int]]:
        for mine in self.micro_batches(positions):
            yield order(np.arange(mine.start, mine.stop)).tolist()


class MicroBatchLoader(Loader):
    """Load lists of micro-batches, one list for each optimiser step: see `make_micro_batch_loader`.

    It counts epochs and steps, and has a state, as every `Loader`. `peek()` returns one micro-batch.
    """

    sampler: MicroBatchSampler

    def __len__(self) -> int:
        return len(self.sampler.positions[:: self.sampler.global_batch_size])

    def _positions(self) -> None:
        """Return None: its batches have their `global_batch_size`."""

    def _begin(self, loop: Loop) -> Iterator[Any]:
        loop.steps = self.sampler.steps(self.sampler.positions)
        return super()._begin(loop)

    def _seeds(self, loop: Loop) -> Iterator[Seeds]:
        for mine in self.sampler.micro_batches(self.sampler.positions):
            yield self._seed, loop.epoch, 0, mine.start  # whichever rank has it

    def _with_seeds(self, batches: Iterator[list[int]], loop: Loop) -> Iterator[Batch]:
        for batch in super()._with_seeds(batches, loop):
            if self.num_workers == 0:
                seed_cpu(hash_seeds("batch", *batch.seeds))
            yield batch

    def _count_batch(self, loop: Loop) -> None:
        self._tell_samples(loop)

    def _next(self, batches: Iterator[Any], loop: Loop) -> Any:
        """Return this rank's micro-batches of the next step. One that cannot be made costs the step."""
        step = next(loop.steps, None)
        if step is None:
            return super()._next(batches, loop)  # which ends the epoch
        found, seeds, errors = [], [], []
        own: AbstractContextManager[None] = nullcontext() if self.num_workers > 0 else generators_kept()
        with own:  # random numbers of samples are not those of this process
            for positions in self.sampler.micro_batches(step):
                seeds.append(hash_seeds("micro-batch", self._seed, loop.epoch, positions.start))
                try:
                    found.append(super()._next(batches, loop))
                except (DdpkitError, StopIteration):  # which a wrapper of torch's iterators may raise early
                    raise
                except Exception as error:
                    errors.append(error)
        self._count_step(loop)
        try:
            if errors:
                raise errors[0]
        finally:
            errors.clear()  # its traceback holds this frame
        name = f"epoch {loop.epoch}, from sample {step.start} on"
        sampler = self.sampler
        most = math.ceil(sampler.global_batch_size / sampler.micro_batch_size / sampler.num_replicas)  # on one rank
        return MicroBatches(found, name, len(step), seeds, most)
