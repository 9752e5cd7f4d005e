"""The protocol keeps its promises in every simulated world that is searched, and the search finds what is planted."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import planted
import pytest

HERE = Path(__file__).parent
WORLDS = {  # of each kind: a hundred thousand together
    "joining": 20_000,
    "meeting": 20_000,
    "failing": 20_000,
    "losing": 5_000,
    "stopping": 20_000,
    "surviving": 10_000,
    "returning": 10_000,
}
FEW = {  # in which seven of the planted bugs show
    "joining": 60,
    "meeting": 30,
    "failing": 50,
    "losing": 30,
    "stopping": 30,
    "surviving": 100,
    "returning": 40,
}
PART = 1_000  # of them in each test


def run(program: str, *arguments: object, timeout: float) -> str:
    """Run a program in a process of its own, whose protocol it changes for good."""
    command = [sys.executable, "-c", f"import search; search.put_in_place(); {program}", *map(str, arguments)]
    ended = subprocess.run(command, cwd=HERE, capture_output=True, text=True, timeout=timeout, check=False)
    assert ended.returncode == 0 and not ended.stderr, ended.stderr
    return ended.stdout.strip()


SEARCH = "import sys; print(search.search(sys.argv[1], range(int(sys.argv[2]), int(sys.argv[3]))))"
FIND = (
    "import sys, planted; planted.plant(sys.argv[1]); print(search.search(planted.PLANTED[sys.argv[1]], range(10**6)))"
)


def test_nothing_is_wrong_in_a_few_worlds() -> None:
    search = (
        "import json, sys; print({kind: search.search(kind, range(n)) for kind, n in json.loads(sys.argv[1]).items()})"
    )
    assert run(search, json.dumps(FEW), timeout=600) == str({kind: {} for kind in FEW})


@pytest.mark.storm
@pytest.mark.parametrize(
    ("scenario", "first"), [(scenario, first) for scenario in WORLDS for first in range(0, WORLDS[scenario], PART)]
)
def test_nothing_is_wrong_in_very_many(scenario: str, first: int) -> None:
    """A world that is wrong is shown by `python search.py SCENARIO SEED`."""
    assert run(SEARCH, scenario, first, first + PART, timeout=600) == "{}"


@pytest.mark.storm
@pytest.mark.parametrize("bug", planted.PLANTED)
def test_a_planted_bug_is_found(bug: str) -> None:
    assert run(FIND, bug, timeout=240) != "{}"


def test_a_seed_is_a_world() -> None:
    show = "import sys; print(search.look(sys.argv[1], int(sys.argv[2]), tells=True))"
    with ThreadPoolExecutor() as threads:
        first, second = [threads.submit(run, show, "surviving", 7, timeout=240) for _ in range(2)]
    assert first.result() == second.result()
