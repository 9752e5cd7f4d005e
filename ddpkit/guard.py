"""Take or skip a step on all ranks together, when a batch is bad on one of them."""

from __future__ import annotations

import json
import logging
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, get_type_hints

import torch
from torch import Tensor, nn

from .arguments import as_integer
from .collectives.consistency import check_fingerprint, fingerprint_of, raise_everywhere
from .collectives.differences import first_of, list_lines
from .collectives.reduce import reduce_tree
from .errors import BadStepError, DdpkitError, describe_error, message_of, printable
from .gradient_exchange import Gradients, LocalPass, all_finite, begin_exchange
from .job import current_job, lifecycle
from .job.job import ranks_of, subset_of
from .parsing import parse
from .rendezvous.causes import is_of_broken_collective
from .torch_internals import is_from_worker, is_of_broken_loader

# Find a batch size that fits in the memory of every rank.

_TEXTS = ("DefaultCPUAllocator", "CUDNN_STATUS_ALLOC_FAILED", "CUBLAS_STATUS_ALLOC_FAILED")  # in RuntimeErrors


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception means that the CPU or an accelerator is out of memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in message_of(error) for text in _TEXTS)


def find_batch_size(
    trial: Callable[[int], object],
    largest: int,
    *modules: nn.Module | Tensor,
) -> int:
    """Halve a batch size until no rank runs out of memory in a trial. Collective.

    A trial runs forward and backward on a batch of that size, for example of random numbers. DDP
    communicates nothing in it; afterwards gradients are dropped and buffers restored. The optimizer's
    state and later allocations need memory, too: take an optimizer step first, or use a smaller size
    than the result.

    Args:
        trial: Called with a batch size, in samples per rank; its result is dropped.
        largest: Size to start with, at least 1.
        *modules: The models that a trial trains, wrapped or not.

    Returns:
        The first of `largest`, `largest // 2`, ... that fits in every rank's memory.

    Raises:
        DdpkitError: On every rank, if not even a batch of 1 fits.
        MismatchError: On the other ranks, if a trial raises another error.
        TypeError: If an argument is of a wrong type.
        ValueError: If a number is out of range.

    Example:
        >>> net = nn.Linear(4, 1)
        >>> find_batch_size(lambda size: net(torch.randn(size, 4)).sum().backward(), 64, net)
        64
    """
    call = "find_batch_size()"
    peers = current_job.data_parallel()
    with raise_everywhere(call, peers):
        batch_size = as_integer(largest, "largest")
        local_pass = LocalPass(call, modules)
    while True:
        with raise_everywhere(call, peers):
            fits = _try(trial, batch_size, local_pass)
        check_fingerprint(fingerprint_of(call, {"batch size": f"{batch_size}"}), peers)
        if reduce_tree(fits, "min", None, check=True, peers=peers):
            return batch_size
        if batch_size == 1:
            where = "on other ranks" if fits else "on this rank"
            raise DdpkitError(f"{call} found no size: one sample does not fit in memory {where}.")
        batch_size //= 2


def _try(trial: Callable[[int], object], batch_size: int, local_pass: LocalPass) -> bool:
    """Run a trial; return whether it fitted in memory."""
    try:
        with local_pass:
            trial(batch_size)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        release(error)
        return False
    finally:
        local_pass.undo()
    return True


def release(error: BaseException | None) -> None:
    """Free the tensors held by the frames of an exception and of its causes."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


# Describe why ranks cannot take a step, and tell the other ranks.

_SAMPLES_SHOWN = 16
_LONGEST_SAMPLE = 40  # characters of a sample's name
_LONGEST = 500  # characters of an error


class BadStep(NamedTuple):
    """Reason why a rank cannot take a step.

    Attributes:
        problem: The exception, or the problem with its gradients, and the samples; "" if there is none.
        is_out_of_memory: Whether the rank ran out of memory.
    """

    problem: str
    is_out_of_memory: bool = False


def _bad_gradient(gradients: Gradients) -> BadStep:
    """Describe this rank's first gradient that is not finite, if any."""
    for name, gradient in zip(gradients.names, gradients.values, strict=True):
        if gradient is not None and not all_finite([gradient]):
            return BadStep(f"the gradient of {name or 'a tensor'} is not finite")
    return BadStep("")


def _in_one_line(error: BaseException) -> str:
    """Describe an exception by its first line; a loader worker's contains a traceback with it."""
    kind = type(error).__name__
    lines = message_of(error).splitlines()
    if is_from_worker(error):
        raised = [line for line in lines if line.startswith(kind)]
        return printable(raised[-1][:_LONGEST]) if raised else kind
    return describe_error(error, _LONGEST).splitlines()[0].removesuffix(": ")


def _name_samples(batches: Iterable[Sequence[object]]) -> str:
    samples = [sample for batch in batches for sample in batch]
    if not samples:
        return ""
    names = [printable(str(sample)[:_LONGEST_SAMPLE]) for sample in samples]
    return f" (samples {', '.join(first_of(names, _SAMPLES_SHOWN))})"


def exchange_bad_steps(own: BadStep, samples: str) -> dict[int, BadStep]:
    """Return the problems of the ranks that have one, with the names of their samples, by rank. Collective."""
    peers = current_job.data_parallel()
    if own.problem:
        own = own._replace(problem=own.problem + samples)
    texts = lifecycle.exchange(json.dumps(own._asdict()), subset_of(peers))
    steps = [BadStep(**parse(text, "exchange", get_type_hints(BadStep))) for text in texts]
    return {rank: step for rank, step in zip(ranks_of(peers), steps, strict=True) if step.problem}


def explain(headline: str, steps: dict[int, BadStep]) -> str:
    """List each rank's problem below a headline."""
    return list_lines(headline, [f"rank {rank}: {step.problem}" for rank, step in steps.items()])


log = logging.getLogger(__name__)
_CALL = "StepGuard"
_NEVER_SKIPPED = (DdpkitError, StopIteration)


class StepGuard:
    """Take or skip a step on all ranks together. Collective.

    Each block holds the forwards and backwards of one optimiser step. If they raise on a rank, or
    gradients are not finite, then after the block no rank has gradients, buffers (such as BatchNorm's
    statistics) are restored, and `skipped` is True on every rank. Otherwise the gradients are the
    means over ranks, as with DDP and `average_gradients`.

    Ranks do not communicate in the block, so none waits for one that has raised: DDP does not
    synchronise. At its end one flat all-reduce carries the gradients, and whether a rank has
    raised. The arguments are the same on every rank.

    Args:
        *modules: All models trained in the step, wrapped or not, and single parameters. Plain ones
            start equal on all ranks, as for `average_gradients`.
        max_skips: Steps in a row that may be skipped; one more raises on every rank. With 0 the first
            bad step raises.
        errors: The exceptions that make a step bad. Others propagate, as do ddpkit's errors and
            those of collectives and of loaders that lost a worker.
        check_gradients: Whether gradients that are not finite make a step bad. Pass False if a
            `GradScaler` checks for them.
        max_pieces: Largest number of pieces to cut a batch into when memory runs out; see
            `attempts()`.

    Attributes:
        skipped: Whether the last step was skipped.
        skips: Number of skipped steps.
        pieces: Number of pieces to cut a batch into.

    Raises:
        TypeError: If a model communicates in its forward: `fully_shard`, SyncBatchNorm, DDP with
            `static_graph=True`; or an argument is of a wrong type.
        ValueError: If a number is out of range, or no parameter requires a gradient.

    Example:
        >>> import math, torch
        >>> net = nn.Linear(2, 1)
        >>> guard = StepGuard(net)
        >>> for sample in [1.0, math.nan]:
        ...     with guard:
        ...         net(torch.full((1, 2), sample)).sum().backward()
        ...     print(guard.skipped, net.weight.grad)
        False tensor([[1., 1.]])
        True None
    """

    def __init__(
        self,
        *modules: nn.Module | Tensor,
        max_skips: int = 10,
        errors: type[Exception] | tuple[type[Exception], ...] = Exception,
        check_gradients: bool = True,
        max_pieces: int = 1,
    ) -> None:
        self._modules = modules
        self._pass = LocalPass(_CALL, modules)
        self._max_skips = as_integer(max_skips, "max_skips", least=0)
        self._max_pieces = as_integer(max_pieces, "max_pieces")
        self._errors = _checked(errors)
        self._check_gradients = bool(check_gradients)
        self._batches: list[Sequence[object]] = []  # samples of the current step
        self._in_a_row = 0
        self._is_trying = False  # whether the block is in a loop over `attempts()`
        self._again = False  # whether to repeat the step in more pieces
        self.pieces = 1
        self.skips = 0
        self.skipped = False
        if not Gradients(_CALL, modules).parameters:
            raise ValueError(f"{_CALL} needs modules with trainable parameters.")

    def attempts(self) -> Iterator[int]:
        """Yield the number of pieces to cut the batch into: once, and again if a rank runs out of memory.

        The number doubles each time, up to `max_pieces`, on every rank; later steps start with the
        last one.

        Example:
            >>> import torch
            >>> net, batch = nn.Linear(2, 1), torch.ones(6, 2)
            >>> guard = StepGuard(net, max_pieces=4)
            >>> for pieces in guard.attempts():
            ...     with guard:
            ...         for part in batch.chunk(pieces):
            ...             (net(part).sum() / len(batch)).backward()
        """
        self._is_trying = True
        try:
            yield self.pieces
            while self._again:
                yield self.pieces
        finally:
            self._is_trying = False

    def __enter__(self) -> StepGuard:
        self._pass.__enter__()
        if not self._again:
            self._batches = current_job.take_samples()[-1:]  # drawn before the block
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        self._pass.__exit__()
        if error is not None and not self._may_be_skipped(error):
            return False
        self._batches = current_job.take_samples() or self._batches
        self._again = False
        own = None
        if error is not None:
            own = BadStep(_in_one_line(error), is_out_of_memory(error))
            log.warning("this rank could not take the step", exc_info=error)
            self._pass.undo()
            release(error)  # the exchange needs memory
        self._end(own)
        return True

    def _may_be_skipped(self, error: BaseException) -> bool:
        if isinstance(error, _NEVER_SKIPPED) or not isinstance(error, self._errors):
            return False
        return not is_of_broken_collective(error) and not is_of_broken_loader(error)

    def _end(self, own: BadStep | None) -> None:
        """Exchange the gradients, and use the means if no rank has a bad step. Collective."""
        settings = (  # with others the ranks would decide differently
            ("max_skips", f"{self._max_skips}"),
            ("max_pieces", f"{self._max_pieces}"),
            ("check_gradients", f"{self._check_gradients}"),
            ("pieces", f"{self.pieces}"),
        )
        exchange = begin_exchange(_CALL, self._modules, exchange=_CALL, settings=settings, spoiled=own is not None)
        if not exchange.gradients.parameters:
            raise DdpkitError(f"No parameter needs a gradient at the end of the block of {_CALL}.")
        if exchange.is_usable(finite=self._check_gradients):
            exchange.finish()
            self.skipped = False
            self._in_a_row = 0
            return
        own = own or _bad_gradient(exchange.gradients)
        self._pass.undo()
        self._skip(exchange_bad_steps(own, _name_samples(self._batches)))

    def _skip(self, steps: dict[int, BadStep]) -> None:
        """Skip or repeat the step, because of the problems on these ranks."""
        self.skipped = True
        is_memory = bool(steps) and all(step.is_out_of_memory for step in steps.values())
        if is_memory and self._is_trying and self.pieces < self._max_pieces:
            self.pieces = min(2 * self.pieces, self._max_pieces)
            self._again = True
            _say(explain(f"All ranks cut batches into {self.pieces} pieces from now on:", steps))
            return
        self.skips += 1
        self._in_a_row += 1
        if self._in_a_row > self._max_skips:
            problem = f"{self._in_a_row} steps in a row were bad, but max_skips is {self._max_skips}"
            raise BadStepError(explain(f"{problem}. In the last one:", steps), sorted(steps))
        _say(explain(f"All ranks skip this step ({self._in_a_row} in a row, {self.skips} in total):", steps))


def _checked(errors: object) -> tuple[type[Exception], ...]:
    """Return the exceptions as a tuple; raise for other values, and for exceptions that would stop Ctrl-C."""
    found = errors if isinstance(errors, tuple) else (errors,)
    if not all(isinstance(each, type) and issubclass(each, Exception) for each in found):
        raise TypeError(f"errors must be an exception class, or a tuple of them, got {errors!r}.")
    return found


def _say(text: str) -> None:
    """Log on the first of the ranks that take the step."""
    if current_job.get_data_parallel_rank() == 0:
        log.warning("%s", text)
