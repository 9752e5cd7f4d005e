"""Paths of the leaves of nested states."""

from __future__ import annotations

from itertools import combinations
from typing import Any

from ddpkit.checkpoint.states import digest_leaves


def test_no_two_paths_of_a_state_are_the_same() -> None:
    states: list[Any] = [
        {"a.b": 1, "a": {"b": 2}},
        {"a.b": 2, "a": {"b": 2}},
        {"a.b": 2, "a": {"b": 1}},
        {"a": {"b": {"c": 1}, "b.c": 2}},
        {"a": {"b": {"c": 2}, "b.c": 2}},
        {"a": [5], "a[0]": 6},
        {"a": [7], "a[0]": 6},
        {1: 5, "1": 6},
        {1: 7, "1": 6},
        {"1": 5},
        {1: 5},
        {1.0: 5},
        {(1, 2): 5},
        {"": 5},
        {"'a'": 5},
    ]
    for one, other in combinations(states, 2):
        assert digest_leaves("run", one) != digest_leaves("run", other), (one, other)
    assert set(digest_leaves("run", {"a": {"b.c": [1]}, 2: 3})) == {
        "run",
        "run.a",
        "run.a['b.c']",
        "run.a['b.c'][0]",
        "run[2]",
    }
