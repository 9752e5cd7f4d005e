"""Collectives under other defaults and modes of torch's, and with tensors that are not what they seem."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from conftest import on_ranks
from test_ops import last, raised
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh

import ddpkit


@contextmanager
def setting(change: Callable[[Any], Any], value: Any, default: Any) -> Any:
    change(value)
    try:
        yield
    finally:
        change(default)


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "default device": lambda: setting(torch.set_default_device, "meta", None),
    "device block": lambda: torch.device("meta"),
    "default dtype": lambda: setting(torch.set_default_dtype, torch.float64, torch.float32),
    "half dtype": lambda: setting(torch.set_default_dtype, torch.float16, torch.float32),
    "inference": torch.inference_mode,
    "no gradients": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "deterministic": lambda: setting(torch.use_deterministic_algorithms, True, False),
}


def all_calls(rank: int, world: int, tensors: list[torch.Tensor]) -> list[Any]:
    small, large, whole, half = tensors
    value = {"small": small, "large": large, "whole": whole, "half": half, "numbers": [rank, 0.5, True] * 50}
    found: list[Any] = []
    for op in ("sum", "mean", "min", "max"):
        found.append(ddpkit.all_reduce(value, op))
    found.append(ddpkit.all_reduce_mean(value, weight=rank + 1))
    found.append(ddpkit.all_reduce_mean({"nan": math.nan, "small": small}, weight=1e3))
    found.append(ddpkit.all_reduce_mean(np.arange(3, dtype=np.float32) + rank))
    found.append(ddpkit.all_reduce_mean(large, check=False))
    found.append(ddpkit.all_gather({"a": small[: rank + 1], "b": whole}))
    found.append(ddpkit.all_gather_object([small, rank]))
    found.append(ddpkit.broadcast({"small": small, "large": large, "text": "x" * 3000}, world - 1))
    found.append(ddpkit.gather_exact({"a": small[:1], "b": [whole], "c": np.array([rank])}, [rank], world))
    return found


def text_of(found: Any) -> str:
    """All values, types and devices, as text."""
    if isinstance(found, torch.Tensor):
        return f"{found.dtype} {found.device} {found.tolist()}"
    if isinstance(found, dict):
        return str({key: text_of(child) for key, child in found.items()})
    if isinstance(found, (list, tuple)):
        return str([text_of(child) for child in found])
    return f"{type(found)} {found!r}"


def in_modes() -> list[str]:
    rank, world = ddpkit.get_rank(), ddpkit.get_world_size()
    tensors = [
        torch.arange(6.0).reshape(2, 3).T + rank,
        (torch.arange(600.0) + rank).requires_grad_(),
        torch.arange(600)[::3] + rank,
        torch.ones(1, dtype=torch.float16).expand(600) * (rank + 1),
    ]
    expected = text_of(all_calls(rank, world, tensors))
    wrong = []
    for name, mode in MODES.items():
        with mode():
            if text_of(all_calls(rank, world, tensors)) != expected:
                wrong.append(name)
            ddpkit.barrier()
            ddpkit.stop_together(False)
    return wrong


@pytest.mark.parametrize("world", [1, 2, 3])
def test_torchs_defaults_and_modes_change_no_result(world: int) -> None:
    assert on_ranks(in_modes, world) == [[]] * world


# --- tensors that are not what they seem ------------------------------------------------------------------------------


def sharded() -> dict[str, tuple[str, str, float]]:
    from torch.distributed.tensor import Shard, distribute_tensor  # here: it takes long to import

    rank, world = ddpkit.get_rank(), ddpkit.get_world_size()
    plain = torch.ones(4)
    odd = {
        "DTensor": distribute_tensor(torch.ones(4), init_device_mesh("cpu", (world,)), [Shard(0)]),
        "FakeTensor": FakeTensorMode().from_tensor(torch.ones(4)),
    }
    found = {}
    for kind, tensor in odd.items():
        calls: dict[str, Callable[[], Any]] = {
            "all_reduce": partial(ddpkit.all_reduce, {"w": [last(tensor, plain)]}),
            "all_reduce_mean": partial(ddpkit.all_reduce_mean, {"w": [last(tensor, plain)]}, check=False),
            "all_gather": partial(ddpkit.all_gather, {"w": [last(tensor, plain)]}),
            "gather_exact": partial(ddpkit.gather_exact, {"w": last(tensor, plain)}, range(4), 4),
        }
        for name, call in calls.items():
            found[f"{name} {kind}"] = raised(call)
    dtensor = odd["DTensor"]
    in_objects: dict[str, Callable[[], Any]] = {
        "all_gather_object": partial(ddpkit.all_gather_object, {"w": last(dtensor, plain)}),
        "broadcast": partial(ddpkit.broadcast, {"w": [dtensor]}, world - 1),
        "gather_exact of a list": partial(ddpkit.gather_exact, [last(dtensor, plain)], [rank], world),
    }
    found.update({f"{name} DTensor": raised(call) for name, call in in_objects.items()})
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_tensors_that_do_not_hold_their_values_are_refused_on_every_rank(world: int) -> None:
    for rank, got in enumerate(on_ranks(sharded, world)):
        own = "TypeError" if rank == world - 1 else "MismatchError"
        for name, (kind, message, seconds) in got.items():
            assert kind == own and seconds < 30, (name, kind, message)
            words = "sharded tensor" if name.endswith("DTensor") else "FakeTensor"
            assert words in message, (name, message)
            if "object" not in name and "list" not in name and "broadcast" not in name:
                assert re.search(r"values?\['w'\]", message), (name, message)


def faked() -> list[str]:
    found = []
    for call in (partial(ddpkit.all_reduce, 1), partial(ddpkit.broadcast, 1), partial(ddpkit.all_gather_object, 1)):
        with FakeTensorMode():
            found.append(" ".join(raised(call)[:2]))
        assert raised(call)[0] == ""
    return found


def test_nothing_is_exchanged_under_fake_tensor_mode() -> None:
    for found in on_ranks(faked, 2):
        assert len(found) == 3 and all(re.match(r"TypeError .*FakeTensorMode.*outside", text) for text in found), found
