"""Compare what N ranks have trained with what one process has: find the first step and thing that differ."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ..check.facts import joined, name_some
from ..check.source import Place
from ..cli import UnfitScriptError, count
from ..recorder import Record
from .inputs import Batch, read
from .rank import Event, Tensors, pair

_ROUNDING = 10.0  # times the difference that another order of rows makes
_FLOOR = 1e-6  # of the norm of all tensors together
_TIMES = {"unclipped": 5.0, "gradients": 5.0, "update": 100.0}  # as much of these
_SURE = 30.0  # times its rounding: an element with a smaller gradient may be updated either way
_CLOSE = 0.01  # by which a ratio may miss the number that explains it
_EXPLAINED = 0.1  # of a difference, that may be left
_NOISY = 0.05  # rounding that is none
WORDS = {  # in the order in which each explains the next
    "parameters": "parameters before the step",
    "others": "buffers and averages",
    "unclipped": "gradients",
    "gradients": "gradients that the optimizer gets",
    "update": "update of the parameters",
}


class UncomparableError(UnfitScriptError):
    """Why the two cannot be compared."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"could not compare: {reason}")


class Difference(NamedTuple):
    """The first thing that differs."""

    step: int  # its number, from 1
    thing: str
    evidence: str
    cause: str  # what makes such a difference, "" if that is not known
    where: Place | None


@dataclass
class Step:
    """A step of the ranks, of one process, and of this with permuted rows: their tensors by thing and name."""

    number: int
    events: list[Event]
    things: list[dict[str, Tensors]]

    def is_equal(self, thing: str) -> bool:
        """Return whether all ranks have the same of a thing."""
        first, *others = [things[thing] for things in self.things[:-2]]
        return all(name in each and torch.equal(first[name], each[name]) for each in others for name in first)


@dataclass
class Comparison:
    """Compares the steps of ranks with those of one process.

    Args:
        ranks: The files of each rank.
        one: Those of one process, and those of one that gets the rows of its batches in another order.
        alone: Lets one process make a step from the samples of one rank, and returns its files.

    Attributes:
        steps: How many were compared.
        distances: The largest distance of each thing, and the rounding there.
        numbers: Of those that are printed, how many were compared.
        unpaired: The lines that one process prints, but not at the same step.
        precision: Of the numbers by which the script computes.
        is_cut: Whether the script was ended after these steps.
        uses_cuda: Whether it uses CUDA, for which the CPU stands.
        unsteady: What rounding, or the order of rows, changes so much that it was not compared.
    """

    ranks: list[Path]
    one: list[Path]
    alone: Callable[[int], Path]
    steps: int = 0
    distances: dict[str, tuple[float, float]] = field(default_factory=dict)
    numbers: int = 0
    unpaired: int = 0
    precision: float = _FLOOR
    is_cut: bool = False
    uses_cuda: bool = False
    unsteady: list[str] = field(default_factory=list)
    _has_gradients: bool = False
    _sure: dict[str, Tensor] = field(default_factory=dict)  # elements, by parameter

    def find(self) -> Difference | None:
        """Return the first difference, None if there is none."""
        events = (read(folder / "events") for folder in (*self.ranks, *self.one))
        for self.steps, row in enumerate(zip(*events, strict=False), 1):
            step = Step(self.steps, list(row), [_things(event, row[0]) for event in row])
            self.precision = max(self.precision, row[0].precision)
            self._note_sure(step)
            for thing in WORDS:
                found = self._compare(thing, step)
                if found:
                    return found
        if self.steps and not self._has_gradients:
            raise UncomparableError("all gradients of one process are 0")
        return None

    def _note_sure(self, step: Step) -> None:
        """Leave out of the update what rounding may send either way: elements with small gradients."""
        one, again = [things["gradients"] for things in step.things[-2:]]
        least = _FLOOR * math.hypot(*(gradient.norm().item() for gradient in one.values()))
        for name, gradient in one.items():
            self._has_gradients = self._has_gradients or bool(gradient.any())
            rounding = (again[name] - gradient).norm() + step.events[0].precision * gradient.norm()
            rounding /= gradient.numel() ** 0.5
            is_sure = gradient.abs() >= (_SURE * rounding).clamp(min=least)
            self._sure[name] = is_sure & self._sure.get(name, is_sure)
        for things in step.things:
            for thing in ("parameters", "update"):
                for name, tensor in things[thing].items():
                    tensor *= self._sure[name]

    def _compare(self, thing: str, step: Step) -> Difference | None:
        if thing == "update" and (setting := next(_differing(step.events[:-1]), "")):
            line = "made" if step.number == 1 else "step"
            return Difference(step.number, "settings", setting, "", next(iter(step.events[0].lines[line]), None))
        *ranks, one, again = [things[thing] for things in step.things]
        if thing == "others" and not (one := self._steady(one, again)):
            return None
        if not all(bool(tensor.isfinite().all()) for tensor in one.values()):
            raise UncomparableError(f"the {WORDS[thing]} of one process are not finite at step {step.number}")
        if thing == "unclipped":
            ranks = [_mean(ranks)]
            if measure(ranks[0], one, again, self.precision * _TIMES[thing])[0] and self._are_alike_otherwise(step):
                return None
        return self._compare_ranks(thing, step, ranks, one)

    def _are_alike_otherwise(self, step: Step) -> bool:
        """Return whether gradients are equal as ranks add them up later, or were before the script changed them."""
        *ranks, one, again = [things["unclipped"] for things in step.things]
        added = {name: torch.stack([mine[name] for mine in ranks]).sum(0) for name in one}
        floor = self.precision * _TIMES["unclipped"]
        if not step.is_equal("unclipped") and not measure(added, one, again, floor)[0]:
            return True
        *ranks, one, again = [things["raw"] for things in step.things]
        return not measure(_mean(ranks), one, again, floor)[0]

    def _compare_ranks(self, thing: str, step: Step, ranks: list[Tensors], one: Tensors) -> Difference | None:
        again = step.things[-1][thing]
        floor = self.precision * _TIMES.get(thing, 1.0)
        for rank, mine in enumerate(ranks):
            names, size, rounding = measure(mine, one, again, floor)
            if rounding > _NOISY and thing == "update":  # of equal gradients
                self.unsteady.append("updates")
                return None
            if rounding > _NOISY:
                raise UncomparableError(
                    f"two runs of one process differ at step {step.number} by {rounding:.1g} of the {WORDS[thing]}: "
                    "the script draws random numbers that are not switched off, or combines rows by their position"
                )
            self._note_distances(thing, size, rounding)
            if names:
                whose = f" of rank {rank}" if thing != "unclipped" and not step.is_equal(thing) else ""
                return self._describe(thing, step, whose, mine, {name: one[name] for name in names})
        return None

    def _steady(self, one: Tensors, again: Tensors) -> Tensors:
        """Select the buffers and averages that another order of rows does not change, as it does a queue."""
        same = [name for name in one if name in again and one[name].shape == again[name].shape]
        same = [name for name in same if one[name].isfinite().all()]  # a mask of -inf is constant
        unsteady = [name for name in same if (again[name] - one[name]).norm() > _NOISY * one[name].norm()]
        self.unsteady += unsteady
        return {name: one[name] for name in same if name not in unsteady}

    def _note_distances(self, thing: str, size: float, rounding: float) -> None:
        largest = self.distances.get(thing, (0.0, 0.0))
        resolved = rounding if self.precision == _FLOOR else max(rounding, self.precision)
        self.distances[thing] = max(largest[0], size), max(largest[1], resolved)

    def _describe(self, thing: str, step: Step, whose: str, mine: Tensors, one: Tensors) -> Difference:
        """Describe what differs, of a rank or of all."""
        of_one = step.things[-2][thing]
        is_part = len(one) < len(of_one) or thing == "others"
        some = f"{name_some(list(one))}, of {len(of_one)}" if is_part else f"all {len(one)}"
        _, size, rounding = measure(mine, one, step.things[-1][thing], self.precision)
        ratio = _ratio(_flat(mine, list(one)), _flat(one, list(one)))
        much = f"{size:.2g} of their size apart" if ratio is None else f"{ratio:.3g} times those of one process"
        cause, line = self._explain(thing, step, ratio, is_part)
        where = next(iter(step.events[0].lines.get(line, [])), None)
        return Difference(step.number, thing, f"{some}{whose}: {much} (rounding: {rounding:.0e})", cause, where)

    def _explain(self, thing: str, step: Step, ratio: float | None, is_part: bool) -> tuple[str, str]:
        """Name the cause, "" if it is not known, and the kind of line that has it."""
        if thing == "unclipped":
            return self._explain_gradients(step, ratio, is_part), "backward"
        if thing == "gradients" and not step.is_equal("gradients"):
            return "each rank makes its step by its own gradients: they are not, or not wholly, averaged", "backward"
        if thing == "gradients" and not step.is_equal("unclipped"):
            return "each rank clips its own gradients, before their mean is taken", "clip"
        if thing == "parameters" and step.number == 1:
            return "ranks begin with other parameters, or the network changes them when it is called", "made"
        if thing == "parameters":
            return "changed after the last step, and before the network was called again", "step"
        if thing == "others" and step.number > 1:
            return "changed in the last step, from its forward pass on, or after it", "step"
        return "", "step"

    def _explain_gradients(self, step: Step, ratio: float | None, is_part: bool) -> str:
        world_size = len(self.ranks)
        if ratio is not None and abs(ratio * world_size - 1) < _CLOSE:
            if is_part:
                return "as if only one rank's share reached them: a gather without gradients, or a part without DDP"
            return "as if the loss were divided by the number of ranks, and their mean taken, too; or were a sum"
        if ratio is not None and abs(ratio - world_size) < _CLOSE:
            return "as if the ranks' gradients were added up, and no mean taken"
        if step.number > 1 or not batches_in(self.ranks[0]):
            return ""
        names = list(step.things[0]["unclipped"])
        target = torch.stack([_flat(things["unclipped"], names) for things in step.things[:-2]]).mean(0)
        alone = [next(read(self.alone(rank) / "events")) for rank in range(world_size)]
        columns = torch.stack([_flat(_things(event, step.events[0])["unclipped"], names) for event in alone], 1)
        weights = torch.linalg.lstsq(columns, target[:, None]).solution[:, 0]
        away = target - _flat(step.things[-2]["unclipped"], names)
        if (columns @ weights - target).norm() > _EXPLAINED * away.norm():
            return "they are no sum of the gradients that one process has from each rank's samples alone"
        samples = list(map(rows_of, self.ranks))
        if not torch.allclose(weights, torch.full_like(weights, 1 / world_size), atol=_CLOSE):
            shares = joined(weights.tolist(), ".3g")
            return f"they add up the gradients of each rank's samples with the weights {shares}, for {joined(samples)}"
        if len(set(samples)) > 1:
            return f"a mean of means: each rank counts the same, with {joined(samples)} samples"
        return (
            "each rank counts the same: the loss divides by what differs between ranks, is a sum, couples samples, or "
            "is taken at other parameters on each; or something is added to the mean"
        )


def measure(mine: Tensors, one: Tensors, again: Tensors, floor: float) -> tuple[list[str], float, float]:
    """Compare tensors of a rank with those of one process, and these with a second run.

    Returns:
        The names of those that differ by more than rounding; the size of all differences, in units of the norm; and
        that of rounding.
    """
    shapes = [{name: tensor.shape for name, tensor in each.items()} for each in (mine, one, again)]
    common = [name for name in one if all(each.get(name) == shapes[1][name] for each in shapes)]
    away = {name: (mine[name] - one[name]).norm().item() for name in common}
    rounding = {name: (again[name] - one[name]).norm().item() for name in common}
    norm = math.hypot(*(one[name].norm().item() for name in common))
    names = [name for name in common if not away[name] <= max(_ROUNDING * rounding[name], floor * norm)]
    unit = norm or 1.0
    return names, math.hypot(*away.values()) / unit, math.hypot(*rounding.values()) / unit


def _things(event: Event, like: Event) -> dict[str, Tensors]:
    """Give the tensors of a step the names that they have in another process; what has no gradient has zeros."""
    pairs = pair(like.before, event.before)
    if not pairs:
        raise UncomparableError("the ranks and one process do not train the same parameters in the same order")

    def named(tensors: Tensors) -> Tensors:
        found = {}
        for name, other in pairs.items():
            found[name] = tensors.get(other, torch.zeros_like(event.before[other])).double()
        return found

    before, after = named(event.before), named(event.after)
    return {
        "parameters": named(event.arrived),
        "raw": named(event.raw),
        "unclipped": named(event.unclipped),
        "gradients": named(event.gradients),
        "update": {name: after[name] - before[name] for name in before},
        "others": {name: tensor.double() for name, tensor in event.others.items()},
    }


def _mean(ranks: list[Tensors]) -> Tensors:
    return {name: torch.stack([mine[name] for mine in ranks]).mean(0) for name in ranks[0]}


def _flat(tensors: Tensors, names: list[str]) -> Tensor:
    return torch.cat([tensors[name].flatten() for name in names])


def _ratio(mine: Tensor, one: Tensor) -> float | None:
    """Return the factor by which numbers are a multiple of others, None if they are none, or too close."""
    ratio = (mine @ one / (one @ one)).item() if one.any() else 0.0
    is_multiple = (mine - ratio * one).norm() <= _CLOSE * mine.norm()
    return ratio if is_multiple and abs(ratio - 1) > _CLOSE else None


def _differing(events: Sequence[Event]) -> Iterator[str]:
    """Yield the settings of optimizers that differ between ranks and one process, the last, in words."""
    *ranks, one = [event.settings for event in events]
    for rank, mine in enumerate(ranks):
        if len(mine) != len(one):
            yield f"rank {rank} has {count(len(mine), 'group')} of parameters, one process {len(one)}"
        for group, other in zip(mine, one, strict=False):
            for name in sorted(group.keys() & other.keys(), key=lambda name: (name != "lr", name)):
                if not math.isclose(group[name], other[name], rel_tol=_FLOOR):
                    yield f"{name} is {group[name]:.6g} on rank {rank}, {other[name]:.6g} in one process"


def batches_in(folder: Path) -> list[Batch]:
    """List the batches from which a process has trained."""
    return list(read(folder / "batches"))


def rows_of(folder: Path) -> int:
    """Count the samples that a process fetches between its first step and its second, one of them perhaps ahead."""
    return sum(batch.rows for batch in batches_in(folder) if batch.step == 1)


# Compare what is printed.

_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?|\bnan\b|\binf\b", re.IGNORECASE)
_TIMING = 0.001  # by which two runs of one process may differ in a number that is no measured time
_MEASURED = re.compile(
    r"\.py(?::|\", line )\d+|\d{2,4}[-/]\d\d[-/]\d\d|\d+:\d\d(?::\d\d)?(?:[.,]\d+)?"  # lines, dates, times of the day
    r"|\b(?:time|elapsed|eta|data|speed|throughput|mem|memory)\W*[\d.]+(?: *\([\d. ]+\))?"
    r"|[\d.]+ ?(?:ms|s|secs?|seconds|min|\w+/s|s/\w+|[KMG]i?B)\b",
    re.IGNORECASE,
)


def compare_lines(
    told: Sequence[list[Record]], world_size: int, precision: float, steps: int
) -> tuple[Difference | None, int, int]:
    """Find the first number that the first rank prints and one process does not.

    Args:
        told: What the first rank has told, one process, and this with permuted rows.
        world_size: The number of ranks.
        precision: Of the numbers by which the script computes.
        steps: The last one, after which loops are cut: what follows it is printed at it.

    Returns:
        The difference, None if there is none; how many numbers were compared; and how many lines with numbers were
        not, as one process prints them, but not at the same step.
    """
    numbers = unpaired = 0
    first, *others = [_by_text(records) for records in told]
    elsewhere = {text for _, text in others[0].keys() - first.keys()}
    for text, lines in first.items():
        if text not in others[0] and text[1] in elsewhere:
            unpaired += len(lines)
        for line, *same in zip(lines, *(table.get(text, []) for table in others), strict=False):
            for mine, one, again in zip(*(_NUMBER.findall(each["line"]) for each in (line, *same)), strict=True):
                rounding = abs(float(one) - float(again))
                if rounding > _TIMING * abs(float(one)):
                    continue
                numbers += 1
                allowed = _ROUNDING * (rounding + precision * abs(float(one)))
                if not _is_close(mine, one, allowed, world_size):
                    where = next((Place(*place) for place in line["where"]), None)
                    evidence = f"rank 0 prints {mine}, one process {one}: {line['line']}"
                    return Difference(min(line["step"], steps), "printed", evidence, "", where), numbers, unpaired
    return None, numbers, unpaired


def _by_text(records: list[Record]) -> dict[tuple[int, str], list[Record]]:
    """Put lines of one step together that differ in numbers only."""
    found: dict[tuple[int, str], list[Record]] = {}
    for record in records:
        if record["kind"] == "printed":
            line = " ".join(_MEASURED.sub("", record["line"]).split())
            found.setdefault((record["step"], _NUMBER.sub("#", line)), []).append(record | {"line": line})
    return found


def _is_close(mine: str, other: str, allowed: float, world_size: int) -> bool:
    """Return whether two printed numbers are equal; whole ones may count the ranks, or samples of one of them."""
    one, two = float(mine), float(other)
    are_counts = mine.isdecimal() and other.isdecimal()
    if are_counts and (abs(one - two / world_size) < 1 or abs(two - one / world_size) < 1):
        return True
    decimals = len(mine.partition(".")[2].lower().partition("e")[0])
    digit = 1.5 * 10.0**-decimals if "e" not in mine.lower() else 0.0
    are_nan = math.isnan(one) and math.isnan(two)
    return are_nan or one == two or abs(one - two) <= allowed + digit
