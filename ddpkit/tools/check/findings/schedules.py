"""Find learning rate schedules whose length does not fit the number of ranks."""

from __future__ import annotations

from collections.abc import Iterator

from ...script.recorder import Record
from .facts import Facts, Finding, place, places

_NEAR = 0.1  # relative difference that an incomplete batch or window makes


def find(facts: Facts) -> Iterator[Finding]:
    """Compare the length of schedules with the number of their steps in the whole training."""
    rank = facts.ranks[0]
    schedules = facts.of("schedule")[rank]
    if len(schedules) != 1:
        return
    steps = _planned_steps(facts, rank)
    length = int(schedules[0]["length"])
    for factor in (facts.world_size, 1 / facts.world_size):
        if steps and abs(length - factor * steps) <= _NEAR * factor * steps:
            yield _unfit(facts, schedules[0], length, round(steps))


def _planned_steps(facts: Facts, rank: int) -> float:
    """Estimate how often the schedule steps in all epochs, 0 if that cannot be told."""
    ends = [e for e in facts.of("epoch end")[rank] if e["loader"] in _training(facts, rank)]
    epochs = [e for e in facts.of("epoch")[rank] if e["loader"] in _training(facts, rank)]
    steps = facts.of("step")[rank]
    rounds = steps[0]["epochs"] if steps else []
    if not ends or len(rounds) != 1 or not epochs[0]["batches"]:
        return 0.0
    records = facts.records[rank]
    finished = max(i for i, record in enumerate(records) if record in ends)
    made = records.index(facts.of("schedule")[rank][0])  # its constructor steps once
    calls = sum(record["kind"] == "schedule step" for record in records[made:finished])
    seen = sum(end["batches"] for end in ends)
    by_epoch = _calls_after(facts, rank, finished)
    if not calls and by_epoch:
        return float(rounds[0])
    return float(rounds[0] * epochs[0]["batches"] * calls / seen)


def _training(facts: Facts, rank: int) -> set[str]:
    return {record["loader"] for record in facts.of("trains")[rank]}


def _calls_after(facts: Facts, rank: int, position: int) -> bool:
    return any(record["kind"] == "schedule step" for record in facts.records[rank][position:])


def _unfit(facts: Facts, schedule: Record, length: int, steps: int) -> Finding:
    evidence = f"{schedule['name']} is made for {length} steps, and will make {steps} on {facts.world_size} ranks"
    if steps > length:
        why = "the learning rate reaches its end early and goes on from there; on one process it would not"
    else:
        why = "the learning rate never comes down: the training ends before its schedule; on one process it would not"
    fix = "count the steps of one rank, `epochs * len(loader)` of its own loader, and step once an optimizer step"
    prepared = places(schedule["prepared"])
    where = prepared[0] if prepared and steps > length else place(schedule["where"])
    also = [*prepared, *places(schedule["where"])]
    return Finding("depends-on-world-size", "wrong", where, facts.ranks, evidence, why, fix, also)
