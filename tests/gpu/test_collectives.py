"""Values on the device: the same results as on the CPU, errors, and the cost of the check."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from starting import Crew, on_one_device, several, wait_for
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import ddpkit
from ddpkit.collectives.differences import digest
from ddpkit.testing import on_ranks

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
]
OPS = ("mean", "sum", "min", "max")
FEW, MANY = 7, 3000  # elements that travel with the check, and after it
ELEMENTS = 1_000_000  # of the tensor that is timed


def own_numbers(n: int, dtype: torch.dtype) -> Tensor:
    """Make small numbers that each dtype holds exactly, other ones on each rank."""
    numbers = (torch.arange(n) + 3 * ddpkit.get_rank()) % 13
    if dtype == torch.bool:
        return numbers > 6
    return numbers.to(dtype)


def compare_with_cpu() -> list[str]:
    """List the dtypes and operations for which the device gives another result than the CPU."""
    device = ddpkit.get_device()
    wrong = []
    for dtype in DTYPES:
        for op in OPS:
            for n in (FEW, MANY):
                numbers = own_numbers(n, dtype)
                try:
                    expected = ddpkit.all_reduce(numbers, op)
                    found = ddpkit.all_reduce(numbers.to(device), op)
                    equal = found.device == device and torch.equal(found.cpu().double(), expected.double())
                except (RuntimeError, TypeError) as error:
                    wrong.append(f"{op} of {n} x {dtype}: {error!r}")
                    continue
                if not equal:
                    wrong.append(f"{op} of {n} x {dtype}")
    return wrong


def test_tensors_of_each_dtype_give_what_they_give_on_the_cpu(several_ranks: Crew) -> None:
    assert several_ranks(compare_with_cpu) == [[]] * several_ranks.size


def reduce_mixed_values() -> Any:
    """Return weighted means of a nested value that is partly on the device, as Python numbers."""
    rank, device = ddpkit.get_rank(), ddpkit.get_device()
    value = {
        "loss": torch.tensor(2.0 + rank, device=device),
        "many": torch.full((MANY,), float(rank), device=device, dtype=torch.float16),
        "host": [rank, torch.tensor([float(rank)])],
    }
    means = ddpkit.all_reduce_mean(value, weight=1 if rank else 3)
    assert means["loss"].device == means["many"].device == device
    assert means["host"][1].device.type == "cpu"
    return [means["loss"].item(), means["many"][-1].item(), means["host"][0], means["host"][1].item()]


def test_nested_values_may_be_on_the_device_and_on_the_cpu(several_ranks: Crew) -> None:
    n = several_ranks.size
    mean = n * (n - 1) / 2 / (n + 2)  # the first rank weighs three
    expected = pytest.approx([2 + mean, mean, mean, mean], rel=1e-3)
    assert several_ranks(reduce_mixed_values) == [expected] * n


def gather() -> list[Any]:
    """Return what gathering and broadcasting tensors of the device gives, and check where it is."""
    rank, device = ddpkit.get_rank(), ddpkit.get_device()
    parts = ddpkit.all_gather(torch.full((rank + 1,), rank, device=device))
    empty_on_one = ddpkit.all_gather(torch.ones(rank, 2, dtype=torch.bool, device=device))
    sent = ddpkit.broadcast({"weights": torch.full((MANY,), float(rank), device=device), "name": f"rank {rank}"})
    indices = range(rank, 5, ddpkit.get_world_size())
    in_order = ddpkit.gather_exact(torch.tensor([10 * i for i in indices], device=device), indices, n=5)
    objects = ddpkit.all_gather_object({"rank": rank})
    for tensor in (*parts, *empty_on_one, sent["weights"], in_order):
        assert tensor.device == device
    return [
        [part.tolist() for part in parts],
        [len(part) for part in empty_on_one],
        (sent["weights"].unique().tolist(), sent["name"]),
        in_order.tolist(),
        [found["rank"] for found in objects],
    ]


def expected_from_gathering(n: int) -> list[Any]:
    ranks = list(range(n))
    return [[[rank] * (rank + 1) for rank in ranks], ranks, ([0.0], "rank 0"), [0, 10, 20, 30, 40], ranks]


def test_tensors_of_the_device_are_gathered_and_broadcast(crew: Crew) -> None:
    assert crew(gather) == [expected_from_gathering(crew.size)] * crew.size


def gather_with(backend: str) -> list[Any]:
    with ddpkit.distributed(backend=backend):
        return gather()


@pytest.mark.gpus(2)
def test_values_of_the_cpu_travel_by_the_device_where_the_group_has_no_gloo(device: str) -> None:
    n = several()
    backend = {"cuda": "nccl", "cpu": "gloo"}[device]
    assert on_ranks(gather_with, n, backend, join=False) == [expected_from_gathering(n)] * n


def compare_digests() -> list[str]:
    """List the tensors on the device whose digest is not that of a copy, or that of another."""
    device = ddpkit.get_device()
    wrong = []
    for dtype in DTYPES:
        for shape in ((7,), (3000, 1001)):
            numbers = torch.arange(math.prod(shape)).view(shape).to(dtype)
            kinds = {"whole": numbers, "part": numbers.view(torch.uint8)[1:], "transposed": numbers.transpose(0, -1)}
            for name, t in kinds.items():
                found = digest(t.to(device))
                other = torch.zeros_like(t, device=device)
                if digest(t.to(device).contiguous()) != found or digest(other) == found:
                    wrong.append(f"{name} {dtype}{shape}")
    return wrong


def test_digests_are_those_of_copies_and_not_those_of_others(device: str) -> None:
    assert on_one_device(compare_digests, 1, device) == [[]]


def differ() -> list[str]:
    """Return the errors of calls in which the ranks' tensors do not fit together."""
    rank, device = ddpkit.get_rank(), ddpkit.get_device()
    cases = [
        (torch.ones(2 + rank, device=device), "shape"),
        (torch.ones(MANY, device=device, dtype=[torch.float32, torch.float64][min(rank, 1)]), "dtype"),
        (torch.ones(2, device=device if rank else "cpu"), "device"),
    ]
    found = []
    for value, name in cases:
        try:
            ddpkit.all_reduce_mean(value)
        except ddpkit.MismatchError:
            found.append(name)
    return found


def test_ranks_with_different_tensors_get_an_error(several_ranks: Crew, device: str) -> None:
    expected = ["shape", "dtype", "device"] if device == "cuda" else ["shape", "dtype"]
    assert several_ranks(differ) == [expected] * several_ranks.size


def time_means() -> dict[str, float]:
    """Return microseconds of a mean: with the check, without it, and by torch alone, in turns."""
    device = ddpkit.get_device()
    value = torch.ones(ELEMENTS, device=device)
    number = torch.ones((), device=device)
    calls: dict[str, Callable[[], Any]] = {
        "with check": lambda: ddpkit.all_reduce_mean(value),
        "without": lambda: ddpkit.all_reduce_mean(value, check=False),
        "by hand": lambda: average_by_hand(value),
        "scalar with check": lambda: ddpkit.all_reduce_mean(number),
        "scalar without": lambda: ddpkit.all_reduce_mean(number, check=False),
        "scalar by hand": lambda: average_by_hand(number),
    }
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(10):
        for name, call in calls.items():
            best[name] = min(best[name], time_call(call, device))
    assert torch.equal(calls["with check"](), calls["without"]())
    return best


def average_by_hand(value: Tensor) -> Tensor:
    value = value.clone()
    dist.all_reduce(value)
    return value / dist.get_world_size()


def time_call(call: Callable[[], Any], device: torch.device) -> float:
    """Return microseconds of a call, until the device has done it."""
    start = time.perf_counter()
    for _ in range(3):
        call()
    wait_for(device)
    return (time.perf_counter() - start) / 3 * 1e6


def write_times(times: dict[str, float]) -> str:
    return ", ".join(f"{name} {microseconds:.0f} us" for name, microseconds in times.items())


def test_the_cost_of_the_check(several_ranks: Crew, record_property: Any) -> None:
    first, *_ = several_ranks(time_means)
    record_property("measured", f"{ELEMENTS} floats: {write_times(first)}")


def reduce_unwatched() -> list[float]:
    """Return a mean without the check, during which the host may not wait for the device."""
    value = torch.full((MANY,), float(ddpkit.get_rank()), device=ddpkit.get_device())
    ddpkit.all_reduce_mean(value, check=False)  # the first one makes what the others use
    torch.cuda.set_sync_debug_mode("error")
    try:
        mean = ddpkit.all_reduce_mean(value, check=False)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return [mean[0].item()]


@pytest.mark.cuda
def test_without_the_check_the_host_does_not_wait_for_the_device(ranks_over_nccl: Crew) -> None:
    n = ranks_over_nccl.size
    assert ranks_over_nccl(reduce_unwatched) == [[(n - 1) / 2]] * n  # with gloo it would


def count_copies_of_a_mean() -> tuple[int, int]:
    """Return how often a mean of many losses and counts is copied from the device, and to it."""
    device = ddpkit.get_device()
    values = {f"{i}": torch.ones((), device=device, dtype=(torch.float32, torch.int64)[i % 2]) for i in range(32)}
    ddpkit.all_reduce_mean(values)
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        ddpkit.all_reduce_mean(values)
        torch.cuda.synchronize()
    names = [event.name for event in profiled.events()]
    return sum("DtoH" in name for name in names), sum("HtoD" in name for name in names)


@pytest.mark.cuda
def test_a_mean_of_many_leaves_is_copied_once_each_way(several_ranks: Crew) -> None:
    assert several_ranks(count_copies_of_a_mean) == [(1, 1)] * several_ranks.size


def reduce_under_a_default_device() -> Any:
    """Return values that are exchanged while torch makes new tensors on the device."""
    device = ddpkit.get_device()
    torch.set_default_device(device)
    try:
        numbers = ddpkit.all_reduce_mean({"a": float(ddpkit.get_rank()), "b": 1})
        gathered = [part.tolist() for part in ddpkit.all_gather(torch.ones(ddpkit.get_rank() + 1))]
        seen = sorted(int(i) for batch in ddpkit.make_loader(range(6), 2) for i in batch)
        ddpkit.barrier()
    finally:
        torch.set_default_device(None)
    return numbers, gathered, len(seen)


def test_torch_may_have_the_device_as_its_default(device: str) -> None:
    expected = ({"a": 0.5, "b": 1.0}, [[1.0], [1.0, 1.0]], 3)
    assert on_one_device(reduce_under_a_default_device, 2, device) == [expected] * 2
