"""The harness of this folder: a case that fails is reported by name, and hides no other."""

from __future__ import annotations

import os
from pathlib import Path

from cases import _launch, on

import ddpkit


def _all_pass() -> None:
    assert ddpkit.all_reduce(1) == 2


def _one_rank_fails_before_a_collective() -> None:
    assert ddpkit.get_rank() == 0, "I am another"
    ddpkit.all_reduce(1)


def _one_rank_ends() -> None:
    if ddpkit.get_rank() == 1:
        os._exit(3)
    ddpkit.barrier("alone")


CASES = [_all_pass, _one_rank_fails_before_a_collective, _one_rank_ends, _all_pass]
first, fails, ends, last = (on(2)(case) for case in CASES)


def test_a_case_that_fails_on_one_rank_is_reported_and_the_others_go_on(tmp_path: Path) -> None:
    names = [(__name__, name) for name in ("first", "fails", "ends", "last")]
    failures = _launch(names, 2, tmp_path)
    assert list(failures) == [(__name__, "fails"), (__name__, "ends")]
    assert "On rank 1" in failures[__name__, "fails"] and "I am another" in failures[__name__, "fails"]
    assert "exited with code 3" in failures[__name__, "ends"]
