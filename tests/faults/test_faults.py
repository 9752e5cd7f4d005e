"""Each case is a test; they are played side by side, because most of their time is waiting."""

from __future__ import annotations

from typing import Any

import pytest

from .cases import CONFLICTS, FAULTS, SHORT
from .playing import Outcome, Pair, play_all, why_not
from .table import name_of, pairs_of, shown, tables

# each under one of its launchers, in turn; the script plays each under all
CHOSEN = [pairs_of(case)[i % len(pairs_of(case))] for i, case in enumerate([*FAULTS, *CONFLICTS]) if case.quick]


def marked(pair: Pair) -> Any:
    """A case as a parameter; what has to wait for a time-out is for storms."""
    waits = getattr(pair[0], "timeout", SHORT) == SHORT
    return pytest.param(pair, id=name_of(pair), marks=[pytest.mark.storm] if waits else [])


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[Pair, Outcome]:
    """Of all cases that are to be tested."""
    tests = [item.callspec.params.get("pair") for item in request.session.items if hasattr(item, "callspec")]
    found: dict[Pair, Outcome] = {}
    pairs = [pair for pair in CHOSEN if pair in tests and not why_not(pair[0])]
    play_all(pairs, tmp_path_factory.mktemp("faults"), 6, found.__setitem__)
    return found


@pytest.mark.parametrize("pair", [marked(pair) for pair in CHOSEN])
def test_all_others_know_in_time_who_failed_and_nothing_is_left(pair: Pair, outcomes: dict[Pair, Outcome]) -> None:
    if reason := why_not(pair[0]):
        pytest.skip(reason)
    outcome = outcomes[pair]
    assert not outcome.problems, f"{outcome.problems}\n{outcome.text}"
    assert outcome.seconds < 2 * pair[0].limit + 20  # the machine is loaded


@pytest.mark.parametrize("name", ["faults", "conflicts"])
def test_the_guide_shows_every_case(name: str) -> None:
    assert first_cells(shown(name)[1]) == first_cells(tables({})[name]), "run python -m tests.faults --write"


def first_cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:2]] for line in table.splitlines() if line.startswith("|")]
