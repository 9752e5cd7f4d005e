"""Check a job on several ranks: values, latency, versions, and a record of each rank."""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ...collectives.differences import differing_parts
from ...collectives.ops import all_reduce, all_reduce_mean
from ...collectives.sync import barrier
from ...job.current_job import get_device
from ...job.job import Context
from ...job.lifecycle import distributed
from ...join.store_values import parse, refuse_text
from ...launch import ranks
from ..terminal import count, table
from .check import Check
from .machine_checks import installed

_RECORD = {
    **dict.fromkeys(("rank", "pid", "node_rank", "local_rank"), int),
    **dict.fromkeys(("host", "device"), str),
    "versions": dict[str, str],
}
_COLUMNS = ("rank", "host", "pid", "node_rank", "local_rank", "device")
_WARM_UP = 10  # calls that are not counted
_TIMED = 50  # calls that are
_BLOCK = 1 << 18  # float32 elements, 1 MiB: they pass in packets of full size
_SLOW = 20e-3  # seconds; a small collective takes 0.1 to 1 ms, on several nodes up to a few


def two_ranks(backend: str | None, device: str | None, seconds: float) -> list[Check]:
    """Join a job and run the checks for which two processes on one machine suffice."""
    with distributed(backend=backend, device=device, timeout=timedelta(seconds=seconds)):
        return [mean(), latency()]


def mean() -> Check:
    """Average one number, and a block of numbers. Collective."""
    rank = ranks.get_rank()
    world_size = ranks.get_world_size()
    ramp = torch.arange(_BLOCK, device=get_device(), dtype=torch.float32) % 1024
    number = all_reduce_mean(float(rank))
    block = all_reduce_mean(ramp + rank)
    expected = (world_size - 1) / 2
    wrong = int((block != ramp + expected).sum())
    if number == expected and not wrong:
        found = f"the mean of the ranks' numbers is {number:g}, and that of 1 MiB is right"
        return Check("mean", "ok", found)
    found = f"the mean of 0 to {world_size - 1} came out as {number:g}"
    found += f", and {wrong} of {_BLOCK} elements of 1 MiB are wrong"
    remedy = "Run again with --backend gloo: if that is right, the accelerators' links or their "
    remedy += "driver give wrong values."
    return Check("mean", "failed", found, remedy)


def latency() -> Check:
    """Time a small all-reduce and a barrier. Collective."""
    device = get_device()
    value = torch.zeros(1, device=device)

    def reduce() -> None:
        dist.all_reduce(value)
        if device.type != "cpu":
            torch.accelerator.synchronize()

    own = {"all_reduce_us": _time_us(reduce), "barrier_us": _time_us(barrier)}
    slowest = all_reduce(own, "max")
    reduce_us = slowest["all_reduce_us"]
    found = f"all-reduce of one number {reduce_us:.0f} us (median of {_TIMED}), "
    found += f"barrier {slowest['barrier_us']:.0f} us"
    if reduce_us <= 1e6 * _SLOW:
        return Check("latency", "ok", found, measured=slowest)
    remedy = "Are the cores busy with something else, or is the interface above the slow one?"
    return Check("latency", "warning", found, remedy, measured=slowest)


def _time_us(call: Callable[[], object]) -> float:
    """Time a call in microseconds, as the median of many."""
    seconds = []
    for _ in range(_WARM_UP + _TIMED):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return round(1e6 * statistics.median(seconds[_WARM_UP:]), 1)


def own_record(context: Context) -> dict[str, Any]:
    """Describe this rank, for the others."""
    return {
        "rank": context.rank,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "node_rank": context.node_rank,
        "local_rank": context.local_rank,
        "device": str(context.device),
        "versions": installed(),
    }


def read_records(texts: Sequence[str]) -> list[dict[str, Any]]:
    """Read the records of all ranks; raise `LaunchError` if no rank wrote them."""
    records = []
    for rank, text in enumerate(texts):
        key = f"record of rank {rank}"
        record = parse(text, key, _RECORD)
        if record["rank"] != rank:
            refuse_text(text, key)
        records.append(record)
    return records


def roll_call(records: list[dict[str, Any]]) -> Check:
    """List the ranks, and where each runs."""
    header = [name.replace("_", " ") for name in _COLUMNS]
    rows = [[record[name] for name in _COLUMNS] for record in records]
    hosts = {record["host"] for record in records}
    found = f"{count(len(records), 'rank')} on {count(len(hosts), 'host')}"
    return Check("ranks", "ok", found, "", table(header, rows))


def same_versions(records: list[dict[str, Any]]) -> Check:
    """Compare the versions that must be the same on every rank."""
    versions = {record["rank"]: record["versions"] for record in records}
    different = differing_parts(versions)
    if not different:
        names = ", ".join(records[0]["versions"])
        return Check("same versions", "ok", f"{names} are the same on every rank")
    found = f"the ranks differ in {', '.join(different)}"
    remedy = "Install the same on every node, or start all ranks from one environment or image."
    details = [f"{name}: {numbers}" for name, numbers in different.items()]
    return Check("same versions", "failed", found, remedy, details)
