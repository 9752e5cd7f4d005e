"""Find exchanges that give nothing, or could be one: the result is right, and takes longer than it must."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from ..recorder import Record
from .facts import Facts, Finding, place, places, say_ranks

_BACKWARD = "backward of DDP"
_FEW_CALLS = 12  # exchanges for one step's gradients that are no loss, as for a small network
_LARGE = 1 << 18  # numbers in one exchange, of which the time is that of the numbers and not of the call


def find(facts: Facts) -> Iterator[Finding]:
    """Count the exchanges of gradients before each step."""
    yield from _find_repeated(facts)
    yield from _find_many(facts)


def _find_repeated(facts: Facts) -> Iterator[Finding]:
    """Find DDP's exchange in each micro-batch, where only the last one's counts."""
    windows = _windows(facts.records[facts.ranks[0]])
    if len(windows) < 2:  # the first alone may be something else, such as a step that a scaler skips
        return
    first = windows[0]
    for line, times in first.items():
        if times < 2 or any(window[line] != times for window in windows[:2]):
            continue
        lines = [list(line)]
        evidence = f"DDP averages {times} times before each optimizer step on {say_ranks(facts.ranks)}"
        why = "gradients add up over the micro-batches, so the average after the last one gives the same"
        fix = "run forward and backward of all micro-batches but the last under `with model.no_sync():`"
        yield Finding("exchanges-too-often", "slow", place(lines), facts.ranks, evidence, why, fix)
        return


def _windows(records: list[Record]) -> list[Counter[tuple[object, ...]]]:
    """Count DDP's backwards by their line, for each step."""
    windows = []
    window: Counter[tuple[object, ...]] = Counter()
    for record in records:
        if record["kind"] == "collective" and record["op"] == _BACKWARD and record["where"]:
            window[tuple(record["where"][0])] += 1
        elif record["kind"] == "step":
            windows.append(window)
            window = Counter()
    return windows


def _find_many(facts: Facts) -> Iterator[Finding]:
    """Find gradients that are averaged by hand, one parameter after the other."""
    for records in facts.of("step").values():
        for record in records:
            summed = record["summed"]
            if not summed or summed["calls"] <= _FEW_CALLS or summed["numel"] > _LARGE * summed["calls"]:
                continue
            evidence = (
                f"{summed['calls']} all-reduces for the {summed['numel']} numbers of one step on "
                f"{say_ranks(facts.ranks)}"
            )
            why = "each call waits for all ranks; for so few numbers that is most of its time"
            fix = "reduce them at once: `flat = torch.cat([p.grad.flatten() for p in model.parameters()])`"
            also = places(summed["where"], record["where"])
            yield Finding("many-small-exchanges", "slow", place(summed["where"]), facts.ranks, evidence, why, fix, also)
            return
