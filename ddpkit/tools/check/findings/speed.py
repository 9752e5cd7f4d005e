"""Find exchanges that give nothing, or could be one: the result is right, and takes longer than it must."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from ...script.recorder import Record
from .facts import Facts, Finding, place, places, say_ranks

_STEPS = 2  # at which an exchange is repeated: once may be for a step that a scaler skipped
_FEW_CALLS = 12  # exchanges for one step's gradients that are no loss, as for a small network
_LARGE = 1 << 18  # numbers in one exchange, of which the time is that of the numbers and not of the call


def find(facts: Facts) -> Iterator[Finding]:
    """Count the exchanges of gradients before each step."""
    yield from _find_repeated(facts)
    yield from _find_many(facts)


def _find_repeated(facts: Facts) -> Iterator[Finding]:
    """Find DDP's exchange in each micro-batch, where only the last one's counts."""
    counted: Counter[tuple[object, int]] = Counter()  # steps, by the line and by how often it averages before each
    for record in facts.of("step")[facts.ranks[0]]:
        for cause in record["causes"]:
            line, times = _repeats(cause)
            if times < 2:
                continue
            counted[line, times] += 1
            if counted[line, times] < _STEPS:
                continue
            evidence = f"DDP averages {times} times before each optimizer step on {say_ranks(facts.ranks)}"
            why = "gradients add up over the micro-batches, so the average after the last one gives the same"
            fix = "run forward and backward of all micro-batches but the last under `with model.no_sync():`"
            where = place(cause["averaged"][0])
            yield Finding("exchanges-too-often", "slow", where, facts.ranks, evidence, why, fix)
            return


def _repeats(cause: Record) -> tuple[object, int]:
    """Return the line at which a DDP averages before a step, and how often; 0 if that may be needed.

    Parameters that the last micro-batch does not use would keep sums that are not averaged.
    """
    lines = {tuple(entry) for stack in cause["averaged"] for entry in stack}
    if len(lines) != 1 or not cause["uses_all"]:
        return None, 0
    return lines.pop(), len(cause["averaged"])


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
