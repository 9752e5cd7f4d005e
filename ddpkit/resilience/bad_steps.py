"""Say why ranks cannot take a step, and tell the other ranks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from ..collectives.differences import list_lines
from ..parallel.gradient_exchange import Gradients, all_finite
from ..process_group import current_job, lifecycle
from ..process_group.failures import describe_error, message_of
from ..process_group.peers import ranks_of, subset_of
from ..process_group.store_values import parse, printable
from ..torch_internals import is_from_worker
from .out_of_memory import is_out_of_memory

_SAMPLES_SHOWN = 16
_LONGEST_SAMPLE = 40  # characters of what a sampler calls one
_LONGEST = 500  # characters of an error
_FIELDS = {"problem": str, "is_out_of_memory": bool, "samples": [str]}


@dataclass(frozen=True)
class BadStep:
    """Why a rank cannot take a step.

    Attributes:
        problem: What was raised, or is wrong with its gradients; "" if nothing is.
        is_out_of_memory: Whether that is why.
        samples: Those of its batches, as far as they are known.
    """

    problem: str
    is_out_of_memory: bool = False
    samples: Sequence[str] = ()

    @classmethod
    def of_error(cls, error: BaseException, batches: Iterable[Sequence[object]]) -> BadStep:
        """Describe what was raised."""
        return cls(_in_one_line(error), is_out_of_memory(error), _names_of(batches))

    @classmethod
    def of_gradients(cls, gradients: Gradients, batches: Iterable[Sequence[object]]) -> BadStep:
        """Describe the first gradient of this rank that is not finite; there may be none."""
        for name, gradient in zip(gradients.names, gradients.values, strict=True):
            if gradient is not None and not all_finite([gradient]):
                problem = f"the gradient of {name or 'a tensor'} is not finite"
                return cls(problem, False, _names_of(batches))
        return cls("")

    def __str__(self) -> str:
        if not self.samples:
            return self.problem
        return f"{self.problem} (samples {', '.join(self.samples)})"


def _in_one_line(error: BaseException) -> str:
    """Describe an exception by its first line; that of a loader's worker comes with a traceback, which has it."""
    kind = type(error).__name__
    lines = message_of(error).splitlines()
    if is_from_worker(error):
        raised = [line for line in lines if line.startswith(kind)]
        return printable(raised[-1][:_LONGEST]) if raised else kind
    return describe_error(error, _LONGEST).splitlines()[0].removesuffix(": ")


def _names_of(batches: Iterable[Sequence[object]]) -> list[str]:
    samples = [sample for batch in batches for sample in batch]
    names = [printable(str(sample)[:_LONGEST_SAMPLE]) for sample in samples[:_SAMPLES_SHOWN]]
    if len(samples) > _SAMPLES_SHOWN:
        names.append(f"and {len(samples) - _SAMPLES_SHOWN} more")
    return names


def exchange_bad_steps(own: BadStep) -> dict[int, BadStep]:
    """Return what is wrong on the ranks on which something is, by rank. Collective."""
    peers = current_job.data_parallel()
    texts = lifecycle.exchange(json.dumps(asdict(own)), subset_of(peers))
    found = {}
    for rank, text in zip(ranks_of(peers), texts, strict=True):
        step = BadStep(**parse(text, "exchange", _FIELDS))
        if step.problem:
            found[rank] = step
    return found


def explain(headline: str, steps: dict[int, BadStep]) -> str:
    """Write below a headline what is wrong on each rank."""
    return list_lines(headline, [f"rank {rank}: {step}" for rank, step in steps.items()])
