"""Draw the disturbances of a trial from its seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from ..script.recorder import Record

KINDS = {
    "kill": "SIGKILL to one rank",
    "kill-all": "SIGKILL to all ranks at once, as when the power fails",
    "terminate": "SIGTERM to one rank",
    "terminate-all": "SIGTERM to all ranks, as schedulers do before they end a job",
    "pause": "one rank is stopped for some seconds, and goes on",
}
_TWICE = 0.3  # share of the trials that are disturbed a second time
_CHANGES = 0.5  # share of the disturbances that come when a file is changed
_LATE = 0.5  # share of the disturbances that come some time after an event, not at it
_LONGEST = 5.0  # seconds

Events = dict[int, list[Record]]  # of an undisturbed run, by rank


@dataclass(frozen=True)
class Disturbance:
    """What happens to the ranks, and when.

    Attributes:
        kind: One of `KINDS`.
        rank: The rank to which it happens, or by which it is timed.
        event: The number of that rank's event at which it happens: its start, a step, or a change of a file.
        delay: Seconds between the event and the disturbance.
    """

    kind: str
    rank: int
    event: int
    delay: float


@dataclass(frozen=True)
class Start:
    """One start of the script.

    Attributes:
        ranks: How many.
        disturbance: What happens meanwhile; None for nothing.
    """

    ranks: int
    disturbance: Disturbance | None


def plan_trial(seed: int, number: int, kinds: Sequence[str], undisturbed: dict[int, Events]) -> list[Start]:
    """Draw the starts of a trial, the last of which is not disturbed.

    Args:
        seed: Of all trials.
        number: Of this trial, counted from 1; the kinds take turns.
        kinds: The kinds of disturbances.
        undisturbed: The events of undisturbed runs, by their number of ranks.
    """
    generator = random.Random(f"{seed} {number}")
    ranks = generator.choice(list(undisturbed))
    kind = kinds[(number - 1) % len(kinds)]
    starts = [Start(ranks, _draw(generator, kind, undisturbed[ranks]))]
    ranks = _another(generator, ranks, undisturbed)
    if generator.random() < _TWICE:
        starts.append(Start(ranks, _draw(generator, generator.choice(kinds), undisturbed[ranks])))
        ranks = _another(generator, ranks, undisturbed)
    return [*starts, Start(ranks, None)]


def _another(generator: random.Random, ranks: int, undisturbed: dict[int, Events]) -> int:
    """Draw another number of ranks, where there is one."""
    others = [number for number in undisturbed if number != ranks]
    if not others:
        return ranks
    return generator.choice(others)


def _draw(generator: random.Random, kind: str, events: Events) -> Disturbance:
    """Draw a moment of an undisturbed run: often one at which a file is about to be changed."""
    moments = []
    for rank, records in events.items():
        moments += [(rank, number) for number in range(len(records) - 1)]  # the last is the end
    changes = [(rank, number) for rank, number in moments if events[rank][number]["what"] not in ("start", "step")]
    if changes and generator.random() < _CHANGES:
        moments = changes
    rank, number = generator.choice(moments)
    delay = 0.0
    if generator.random() < _LATE:
        gap = events[rank][number + 1]["time"] - events[rank][number]["time"]
        delay = generator.uniform(0, min(gap, _LONGEST))
    return Disturbance(kind, rank, number, delay)
