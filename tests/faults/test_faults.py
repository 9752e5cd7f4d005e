"""Each case is a test: in a storm under torchrun, where it waits for a time-out, or where one of its kind has been."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from .cases import CONFLICTS, FAULTS, LONG, SHORT, TORCHRUN, Conflict, Fault
from .playing import Outcome, Pair, play_all, why_not
from .table import name_of, pairs_of, shown, tables

CHOSEN = [pair for case in [*FAULTS, *CONFLICTS] if case.quick for pair in pairs_of(case)]


def marked(pair: Pair) -> Any:
    """A case as a parameter."""
    case, launcher = pair
    takes_long = launcher == TORCHRUN or getattr(case, "timeout", SHORT) == SHORT or getattr(case, "nodes", False)
    is_in_storm = takes_long or is_variant(case)
    return pytest.param(pair, id=name_of(pair), marks=[pytest.mark.storm] if is_in_storm else [])


def is_variant(case: Fault | Conflict) -> bool:
    """Whether a case before this one differs only in where the other ranks are."""
    if isinstance(case, Conflict):
        return False
    before = itertools.takewhile(lambda other: other is not case, FAULTS)
    return any((other.fault, other.faulty, other.strike) == (case.fault, case.faulty, case.strike) for other in before)


@pytest.mark.parametrize("pair", [marked(pair) for pair in CHOSEN])
def test_all_others_know_in_time_who_failed_and_nothing_is_left(pair: Pair, tmp_path: Path) -> None:
    if reason := why_not(pair[0]):
        pytest.skip(reason)
    outcomes: dict[Pair, Outcome] = {}
    play_all([pair], tmp_path, 1, outcomes.__setitem__)
    outcome = outcomes[pair]
    assert not outcome.problems, f"{outcome.problems}\n{outcome.text}"
    assert outcome.seconds < pair[0].limit + LONG / 3  # the machine may be loaded; the script holds to the limit


@pytest.mark.parametrize("name", ["faults", "conflicts"])
def test_the_guide_shows_every_case(name: str) -> None:
    assert first_cells(shown(name)[1]) == first_cells(tables({})[name]), "run python -m tests.faults --write"


def first_cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:2]] for line in table.splitlines() if line.startswith("|")]
