"""Check a job on several ranks: values, latency, clocks, versions, and the place of each rank."""

from __future__ import annotations

import json
import os
import socket
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist

from ...collectives.ops import all_reduce, all_reduce_mean
from ...collectives.sync import barrier, exchange
from ...launch import ranks
from ...process_group.job import Context
from ...process_group.lifecycle import distributed, get_device
from ...process_group.store_values import parse, refuse_text
from ..terminal import count, table
from .check import Check, say_ranks
from .machine_checks import installed

_PLACE = {
    **dict.fromkeys(("rank", "pid", "node_rank", "local_rank"), int),
    **dict.fromkeys(("host", "device"), str),
    "versions": dict[str, str],
}
_PLACE_COLUMNS = ("rank", "host", "pid", "node_rank", "local_rank", "device")
_WARM_UP = 10  # calls that are not counted
_TIMED = 50  # calls that are
_READINGS = 7  # of each clock
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
    found = f"all-reduce of one number {_write_us(reduce_us)} (median of {_TIMED}), "
    found += f"barrier {_write_us(slowest['barrier_us'])}"
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


def _write_us(microseconds: float) -> str:
    if microseconds < 1000:
        return f"{microseconds:.0f} µs"
    return f"{microseconds / 1000:.1f} ms"


def clocks(hosts: list[str]) -> Check:
    """Compare the nodes' clocks, read at the end of the same all-reduce. Collective."""
    value = torch.zeros(1, device=get_device())
    own = []
    for _ in range(_READINGS):
        dist.all_reduce(value)
        value.item()  # waits for an accelerator
        own.append(time.time())
    texts = exchange(json.dumps({"readings": own}))
    readings = [read_clock(text, rank) for rank, text in enumerate(texts)]
    return compare_clocks(readings, hosts)


def read_clock(text: str, rank: int) -> list[float]:
    """Read the times that a rank has noted; raise `LaunchError` if no rank wrote them."""
    key = f"clock of rank {rank}"
    readings: list[float] = parse(text, key, {"readings": [float]})["readings"]
    if len(readings) != _READINGS:
        refuse_text(text, key)
    return readings


def compare_clocks(readings: list[list[float]], hosts: list[str]) -> Check:
    """Compare each node's clock with rank 0's, by readings of the same moments."""
    offsets: dict[str, float] = {}
    for host, times in zip(hosts, readings, strict=True):
        if host not in offsets:
            differences = [a - b for a, b in zip(times, readings[0], strict=True)]
            offsets[host] = statistics.median(differences)
    furthest = max(offsets, key=lambda host: abs(offsets[host]))
    largest = abs(offsets[furthest])
    figures = {"largest_offset_ms": round(1e3 * largest, 3)}
    if len(offsets) == 1:
        return Check("clocks", "ok", "one node, one clock", measured=figures)
    if largest < 1:
        found = f"all nodes within {1e3 * largest:.1f} ms of rank 0"
        return Check("clocks", "ok", found, measured=figures)
    direction = "ahead of" if offsets[furthest] > 0 else "behind"
    found = f"{furthest} is {largest:.1f} s {direction} rank 0"
    remedy = "Logs and files of nodes will be out of order: let chrony or ntpd set their clocks."
    details = [f"{host}: {offset:+.3f} s" for host, offset in offsets.items()]
    return Check("clocks", "warning", found, remedy, details, figures)


def own_place(context: Context) -> dict[str, Any]:
    """Describe the place of this rank, for the others."""
    return {
        "rank": context.rank,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "node_rank": context.node_rank,
        "local_rank": context.local_rank,
        "device": str(context.device),
        "versions": installed(),
    }


def read_places(texts: Sequence[str]) -> list[dict[str, Any]]:
    """Read the places of all ranks; raise `LaunchError` if no rank wrote them."""
    places = []
    for rank, text in enumerate(texts):
        key = f"place of rank {rank}"
        place = parse(text, key, _PLACE)
        if place["rank"] != rank:
            refuse_text(text, key)
        places.append(place)
    return places


def roll_call(places: list[dict[str, Any]]) -> Check:
    """List the ranks with their places, and count the pairs that share a host."""
    header = [name.replace("_", " ") for name in _PLACE_COLUMNS]
    rows = [[place[name] for name in _PLACE_COLUMNS] for place in places]
    hosts = {place["host"] for place in places}
    all_pairs = pairs(places)
    near = sum(pair["same_host"] for pair in all_pairs)
    far = len(all_pairs) - near
    found = f"{count(len(places), 'rank')} on {count(len(hosts), 'host')}; "
    found += f"pairs on one host: {near}, on different hosts: {far}"
    return Check("ranks", "ok", found, "", table(header, rows))


def pairs(places: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """List all pairs of ranks, with "same_host"."""
    return [
        {"ranks": [one["rank"], other["rank"]], "same_host": one["host"] == other["host"]}
        for one, other in combinations(places, 2)
    ]


def same_versions(places: list[dict[str, Any]]) -> Check:
    """Compare the versions that must be the same on every rank."""
    hosts = [place["host"] for place in places]
    names = list(dict.fromkeys(name for place in places for name in place["versions"]))
    different = []
    details = []
    for name in names:
        versions = [place["versions"].get(name, "none") for place in places]
        if len(set(versions)) > 1:
            different.append(name)
            details.append(f"{name}: {_describe_versions(versions, hosts)}")
    if not different:
        return Check("same versions", "ok", f"{', '.join(names)} are the same on every rank")
    found = f"the ranks differ in {', '.join(different)}"
    remedy = "Install the same on every node, or start all ranks from one environment or image."
    return Check("same versions", "failed", found, remedy, details)


def _describe_versions(versions: list[str], hosts: list[str]) -> str:
    """Name the ranks with another version than the most common one."""
    ((common, _),) = Counter(versions).most_common(1)
    ranks_with: dict[str, list[int]] = {}
    for rank, version in enumerate(versions):
        if version != common:
            ranks_with.setdefault(version, []).append(rank)
    odd = [f"{version} on {say_ranks(those, hosts)}" for version, those in ranks_with.items()]
    return f"{', '.join(odd)}; {common} elsewhere"
