"""Shared by all tests: `on_ranks` runs a module-level function on real ranks, and nothing may be left behind."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ddpkit


def _joined(fn: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> Any:
    with ddpkit.distributed(timeout=timedelta(seconds=timeout)):
        return fn(*args)


def on_ranks(fn: Callable[..., Any], nprocs: int, *args: Any, timeout: float = 30.0) -> list[Any]:
    """Runs `fn(*args)` on `nprocs` ranks that have called `setup()`; returns the results by rank. `timeout` in
    seconds.
    """
    return ddpkit.spawn(_joined, nprocs, fn, args, timeout, timeout=timedelta(seconds=4 * timeout))


def same(one: Any, other: Any) -> bool:
    """Whether two states, of tensors in dictionaries and lists, are equal to the last bit."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    before = _environment()
    yield
    if "DDPKIT_TESTING_CREW" in os.environ:  # a rank of a marked test, after which the plugin looks itself
        return
    assert not dist.is_initialized(), "the test left a process group behind"
    assert _environment() == before, "the test changed the environment"
    left = [child for child in multiprocessing.active_children() if not child.name.startswith("warm rank")]
    assert not left, "the test left a process behind"


def _environment() -> dict[str, str]:
    theirs = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR")  # set by pytest, and by torch's first optimizer
    return {name: value for name, value in os.environ.items() if name not in theirs}
