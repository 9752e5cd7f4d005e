"""The protocol keeps its promises in every simulated world that is searched, and the search finds what is planted."""

from __future__ import annotations

import planted
import pytest
from processes import run
from search import look, put_in_place, search

WORLDS = {  # of each kind: a hundred thousand together
    "joining": 20_000,
    "meeting": 20_000,
    "failing": 20_000,
    "losing": 5_000,
    "stopping": 20_000,
    "surviving": 10_000,
    "coming_late": 10_000,
}
FEW = {  # in which seven of the planted bugs show
    "joining": 45,
    "meeting": 20,
    "failing": 30,
    "losing": 10,
    "stopping": 20,
    "surviving": 85,
    "coming_late": 30,
}
PART = 1_000  # of them in each test


def simulate(kind: str, bug: str, first: int, end: int) -> None:
    """Search worlds of a kind or, if none is named, the few of each; print what is wrong."""
    put_in_place()
    if bug:
        planted.plant(bug)
    few = {kind: range(first, end)} if kind else {kind: range(number) for kind, number in FEW.items()}
    print({kind: found for kind, seeds in few.items() if (found := search(kind, seeds))})


def wrong(kind: str = "", bug: str = "", first: int = 0, end: int = 0, timeout: float = 600.0) -> str:
    """Search in a process of its own, whose protocol it changes for good; return what is wrong."""
    (ended,) = run(simulate, [{}], kind, bug, first, end, timeout=timeout)
    assert ended.code == 0, ended.output
    return ended.output.strip()


def test_nothing_is_wrong_in_a_few_worlds() -> None:
    assert wrong() == "{}"


@pytest.mark.storm
@pytest.mark.parametrize(
    ("scenario", "first"), [(scenario, first) for scenario in WORLDS for first in range(0, WORLDS[scenario], PART)]
)
def test_nothing_is_wrong_in_very_many(scenario: str, first: int) -> None:
    """A world that is wrong is shown by `python search.py SCENARIO SEED`."""
    assert wrong(scenario, "", first, first + PART) == "{}"


@pytest.mark.storm
@pytest.mark.parametrize("bug", planted.PLANTED)
def test_a_planted_bug_is_found(bug: str) -> None:
    assert wrong(planted.PLANTED[bug], bug, 0, 10**6, timeout=240) != "{}"


def show() -> None:
    put_in_place()
    print(look("surviving", 7, tells=True))


def test_a_seed_is_a_world() -> None:
    first, second = run(show, [{}, {}])
    assert (first.code, first.output) == (0, second.output)
