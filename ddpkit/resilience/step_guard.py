"""Let all ranks take a step, or all skip it, where a batch is bad on one of them."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from types import TracebackType

from torch import Tensor, nn

from ..arguments import as_integer
from ..collectives.differences import list_lines
from ..errors import BadStepError, DdpkitError
from ..parallel.gradient_exchange import GradientExchange, Gradients, all_finite, begin_exchange, parameters_of
from ..process_group import lifecycle
from ..process_group.failures import describe_error
from ..process_group.own_failure import is_of_broken_collective
from ..process_group.peers import ranks_of, subset_of
from ..process_group.store_values import parse
from .local_pass import LocalPass
from .out_of_memory import is_out_of_memory, release

log = logging.getLogger(__name__)
_CALL = "StepGuard"
_NEVER_SKIPPED = (DdpkitError, StopIteration)
_SAMPLES_SHOWN = 16
_LONGEST = 500  # characters of an error that the other ranks hear
_FIELDS = {"problem": str, "is_out_of_memory": bool, "samples": [int]}


class StepGuard:
    """Lets all ranks take a step, or all skip it.

    A block of it holds the forwards and backwards of one optimiser step. If they raise on a rank, or
    their gradients are not finite, no rank has gradients after the block, buffers (such as
    BatchNorm's statistics) are what they were, and `skipped` is True on every rank. Otherwise the
    gradients are their means over the ranks, as DDP and `average_gradients` make them.

    Within the block nothing is exchanged, so no rank waits for one that has raised; DDP's exchange
    is off. The gradients travel at the end, in one flat all-reduce, and whether a rank has raised
    travels with them: as long as all is well there is no other message. *Collective.*

    Args:
        *modules: All models that are trained in the step, wrapped or not, and single parameters.
            Plain ones start equal on all ranks, as for `average_gradients`.
        max_skips: Steps in a row that may be skipped; one more is an error on every rank. With 0 the
            first bad step is.
        errors: The exceptions that make a step a bad one; others leave the block, as do errors of
            ddpkit's own.
        check_gradients: Whether gradients that are not finite make a step a bad one. Say False where
            a `GradScaler` looks for them.
        max_pieces: In how many pieces `attempts()` cuts a batch at most when memory runs out.

    Attributes:
        skipped: Whether the last step was skipped.
        skips: Steps that were skipped so far.
        pieces: In how many pieces to cut a batch.

    Raises:
        TypeError: If a model exchanges values in its forward: `fully_shard`, SyncBatchNorm, DDP with
            `static_graph=True`; or something is neither module nor tensor.
        ValueError: If a number is out of range, or nothing is trained.

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
        self._errors = errors
        self._check_gradients = check_gradients
        self._in_a_row = 0
        self._again = False  # whether the step may be tried again, in more pieces
        self.pieces = 1
        self.skips = 0
        self.skipped = False
        if not any(tensor.requires_grad for _, tensor in parameters_of(_CALL, modules)):
            raise ValueError(f"{_CALL} needs modules with parameters that are trained.")

    def attempts(self) -> Iterator[int]:
        """Yield in how many pieces to cut the batch: once, and again while a rank runs out of memory.

        Each time it is twice as many, up to `max_pieces`, on every rank; later steps begin with the
        last number.

        Example:
            >>> import torch
            >>> net, batch = nn.Linear(2, 1), torch.ones(6, 2)
            >>> guard = StepGuard(net, max_pieces=4)
            >>> for pieces in guard.attempts():
            ...     with guard:
            ...         for part in batch.chunk(pieces):
            ...             (net(part).sum() / len(batch)).backward()
        """
        self._again = True
        while self._again:
            self._again = False
            yield self.pieces

    def __enter__(self) -> StepGuard:
        self._pass.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        self._pass.__exit__(kind, error, trace)
        if error is not None and not self._may_be_skipped(error):
            return False
        raised = None if error is None else _Report.of(error)
        gradients, exchange = begin_exchange(_CALL, self._modules, spoiled=raised is not None)
        if exchange is None:
            is_good = raised is None and self._are_good(gradients)
        else:
            exchange.wait()
            is_good = exchange.is_usable(finite=self._check_gradients)
        if is_good:
            self._accept(gradients, exchange)
        else:
            self._skip(raised or _Report.of_gradients(gradients), error)
        if not self._again:
            lifecycle.forget_samples()
        lifecycle.step_clock().end_step()
        return True

    def _may_be_skipped(self, error: BaseException) -> bool:
        if isinstance(error, _NEVER_SKIPPED) or is_of_broken_collective(error):
            return False
        return isinstance(error, self._errors)

    def _are_good(self, gradients: Gradients) -> bool:
        if not self._check_gradients:
            return True
        return all_finite(gradient for gradient in gradients.values if gradient is not None)

    def _accept(self, gradients: Gradients, exchange: GradientExchange | None) -> None:
        if exchange is not None:
            exchange.distribute()
            gradients.give_back()
        self.skipped = False
        self._in_a_row = 0

    def _skip(self, own: _Report, error: BaseException | None) -> None:
        """Undo the step, and hear from all ranks why. Collective."""
        self._pass.undo()
        if error is not None:
            log.warning("this rank could not take the step", exc_info=error)
        reports = _exchange(own)
        self.skipped = True
        if not self._cut_smaller(reports):
            self._count(reports, error)
        if error is not None:
            release(error)

    def _count(self, reports: dict[int, _Report], error: BaseException | None) -> None:
        self.skips += 1
        self._in_a_row += 1
        if self._in_a_row > self._max_skips:
            steps = f"{self._in_a_row} steps in a row could not be taken, and {self._max_skips} may be skipped"
            raise BadStepError(_explain(f"{steps}; of the last:", reports), sorted(reports)) from error
        _say(_explain(f"All ranks skip this step (in a row: {self._in_a_row}, in all: {self.skips}):", reports))

    def _cut_smaller(self, reports: dict[int, _Report]) -> bool:
        """Cut batches in twice as many pieces if that may help: if all that failed have run out of memory."""
        if self.pieces >= self._max_pieces:
            return False
        if not reports or not all(each.is_out_of_memory for each in reports.values()):
            return False
        self.pieces = min(2 * self.pieces, self._max_pieces)
        self._again = True
        _say(_explain(f"All ranks cut batches in {self.pieces} pieces from now on:", reports))
        return True


@dataclass(frozen=True)
class _Report:
    """Why a rank cannot take a step.

    Attributes:
        problem: What was raised, or is wrong with its gradients; "" if nothing is.
        is_out_of_memory: Whether that is why.
        samples: The indices of its batch in the dataset, as far as they are known.
    """

    problem: str
    is_out_of_memory: bool
    samples: list[int]

    @classmethod
    def of(cls, error: BaseException) -> _Report:
        return cls(_in_one_line(error), is_out_of_memory(error), _samples())

    @classmethod
    def of_gradients(cls, gradients: Gradients) -> _Report:
        """Look for the first gradient of this rank that is not finite."""
        for name, gradient in zip(gradients.names, gradients.values, strict=True):
            if gradient is not None and not all_finite([gradient]):
                return cls(f"the gradient of {name or 'a tensor'} is not finite", False, _samples())
        return cls("", False, [])

    def __str__(self) -> str:
        if not self.samples:
            return self.problem
        shown = ", ".join(map(str, self.samples))
        return f"{self.problem} (samples {shown})"


def _in_one_line(error: BaseException) -> str:
    """Describe an exception; one of a loader's worker holds a traceback, which ends with the cause."""
    message = str(error).rstrip()
    if "Original Traceback" in message:
        return message.splitlines()[-1][:_LONGEST]
    return describe_error(error, _LONGEST).strip().splitlines()[0]


def _samples() -> list[int]:
    return [int(index) for index in lifecycle.samples_at_hand()[:_SAMPLES_SHOWN]]


def _exchange(own: _Report) -> dict[int, _Report]:
    """Return the reports of the ranks that have a problem, by rank. Collective."""
    peers = lifecycle.data_parallel()
    texts = lifecycle.exchange(json.dumps(asdict(own)), subset_of(peers))
    found = {}
    for rank, text in zip(ranks_of(peers), texts, strict=True):
        report = _Report(**parse(text, "step guard", _FIELDS))
        if report.problem:
            found[rank] = report
    return found


def _explain(headline: str, reports: dict[int, _Report]) -> str:
    return list_lines(headline, [f"rank {rank}: {report}" for rank, report in reports.items()])


def _say(text: str) -> None:
    """Log on the first of the ranks that take the step."""
    if lifecycle.get_data_parallel_rank() == 0:
        log.warning("%s", text)
