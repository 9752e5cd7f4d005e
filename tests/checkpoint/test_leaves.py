"""Paths of the leaves of nested states."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import nn

from ddpkit.checkpoint.states import digest_leaves, take_out, tensors_of, without_tensors


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


Point = namedtuple("Point", "x y")


def _odd_state() -> Any:
    """A state with all kinds of containers."""
    model = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1)).state_dict()
    return {
        "model": model,
        "nested": [(torch.ones(1), 2), UserDict(a=torch.zeros(1)), Point(torch.ones(2), 3), {0: None, "0": [1.5]}],
        "random": tuple(range(5)),
        "size": torch.Size([1, 2]),
    }


def test_tensors_have_the_paths_of_the_leaves() -> None:
    state = _odd_state()
    tensors = dict(tensors_of("run", state))
    assert list(tensors) == [
        *("run.model['0.weight']", "run.model['0.bias']", "run.model['1.weight']", "run.model['1.bias']"),
        *("run.model['1.running_mean']", "run.model['1.running_var']", "run.model['1.num_batches_tracked']"),
        *("run.nested[0][0]", "run.nested[1].a", "run.nested[2][0]"),
    ]
    assert tensors["run.nested[0][0]"] is state["nested"][0][0]
    leaves = digest_leaves("run", state)
    assert set(tensors) < set(leaves)
    assert leaves["run.nested[3]"] == "dict of 2" and leaves["run.nested[2]"] == "Point of 2"
    assert leaves["run.nested[3][0]"] == "None" and leaves["run.nested[3]['0'][0]"] == "1.5"
    assert leaves["run.size"] == "Size of 2" and leaves["run.random[4]"] == "4"


def test_a_state_without_what_is_taken_out_is_returned_itself() -> None:
    state = _odd_state()
    found: dict[str, Any] = {}
    assert take_out("run", state, found, lambda value: False) is state and not found
    del state["nested"]
    assert take_out("run", state, found) is state


def test_what_is_taken_out_leaves_everything_else_as_it_was() -> None:
    state = _odd_state()
    found: dict[str, Any] = {}
    left = take_out("run", state, found, lambda value: isinstance(value, torch.Tensor))
    assert list(found) == [path for path, _ in tensors_of("run", state) if path != "run.nested[2][0]"]
    assert left["model"]._metadata == state["model"]._metadata  # by which load_state_dict() migrates
    assert type(left["model"]) is OrderedDict and list(left["model"]) == list(state["model"])
    assert left["random"] is state["random"] and left["size"] is state["size"]
    assert left["nested"][3] is state["nested"][3]
    assert left["nested"][2] is state["nested"][2], "a named tuple is a leaf"
    assert type(left["nested"][0]) is tuple and left["nested"][0][0].is_meta
    assert state["nested"][0][0] is found["run.nested[0][0]"]


def test_numpys_scalars_become_pythons_also_as_keys() -> None:
    state = {np.str_("a"): np.float64(1.5), "b": [np.int64(2)], "c": {"d": np.bool_(True)}}
    plain = take_out("run", state, {})
    assert plain == {"a": 1.5, "b": [2], "c": {"d": True}}
    kinds = [type(value) for value in (*plain, plain["a"], plain["b"][0], plain["c"]["d"])]
    assert kinds == [str, str, str, float, int, bool]


def test_ordinary_tensors_are_replaced_by_their_paths() -> None:
    special = torch.ones(2).to_sparse()
    state = {"a": torch.ones(1), "b": [special, 1]}
    assert without_tensors(state) == {"a": ".a", "b": [special, 1]}
