"""The doctor's checks that need several ranks: do values arrive and come out right, how soon, and who is where."""

from __future__ import annotations

import json
import os
import socket
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist

from ...collectives.ops import all_reduce, all_reduce_mean
from ...collectives.sync import barrier, exchange
from ...launch import ranks
from ...process_group.lifecycle import distributed, get_device
from ...process_group.session import parse, refuse_text
from ...process_group.startup import Context
from ..tables import table
from .machine_checks import installed
from .report import Check, number_of, say_ranks

_PLACE = {
    **dict.fromkeys(("rank", "pid", "node_rank", "local_rank"), int),
    **dict.fromkeys(("host", "device"), str),
    "versions": dict[str, str],
}
_READINGS = 7  # of each clock
_SLOW = 20e-3  # seconds; a small collective takes 0.1 to 1 ms, on several nodes up to a few


def two_ranks(backend: str | None, device: str | None, seconds: float) -> list[Check]:
    """What each process of the local trial does."""
    with distributed(backend=backend, device=device, timeout=timedelta(seconds=seconds)):
        return [mean(), latency()]


def mean() -> Check:
    """Averages one number, and 1 MiB, which must pass in packets of full size. Collective."""
    rank, n = ranks.get_rank(), ranks.get_world_size()
    ramp = torch.arange(1 << 18, device=get_device(), dtype=torch.float32) % 1024
    number, block = all_reduce_mean(float(rank)), all_reduce_mean(ramp + rank)
    wanted = (n - 1) / 2
    off = int((block != ramp + wanted).sum())
    if number == wanted and not off:
        return Check("mean", "ok", f"the mean of the ranks' numbers is {number:g}, and that of 1 MiB is right")
    remedy = (
        "Run again with --backend gloo: if that is right, the accelerators' links or their driver give wrong values."
    )
    found = f"the mean of 0 to {n - 1} came out as {number:g}, and {off} of {ramp.numel()} elements of 1 MiB are wrong"
    return Check("mean", "failed", found, remedy)


def latency() -> Check:
    """Times a small all-reduce and a barrier. Collective."""
    device = get_device()
    value = torch.zeros(1, device=device)

    def reduce() -> None:
        dist.all_reduce(value)
        if device.type != "cpu":
            torch.accelerator.synchronize()

    figures = {}
    for name, call in (("all_reduce_us", reduce), ("barrier_us", barrier)):
        seconds = []
        for _ in range(60):
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
        figures[name] = round(1e6 * statistics.median(seconds[10:]), 1)
    figures = all_reduce(figures, "max")  # the slowest rank's
    found = f"all-reduce of one number {_microseconds(figures['all_reduce_us'])} (median of 50), "
    found += f"barrier {_microseconds(figures['barrier_us'])}"
    slow = figures["all_reduce_us"] > 1e6 * _SLOW
    remedy = "Are the cores busy with something else, or is the interface above the slow one?" if slow else ""
    return Check("latency", "warning" if slow else "ok", found, remedy, [], figures)


def clocks(hosts: list[str]) -> Check:
    """Compares the nodes' clocks, read at the end of the same all-reduce. Collective."""
    value, readings = torch.zeros(1, device=get_device()), []
    for _ in range(_READINGS):
        dist.all_reduce(value)
        value.item()  # waits for an accelerator
        readings.append(time.time())
    texts = exchange(json.dumps({"readings": readings}))
    return compare_clocks([_read_clock(text, rank) for rank, text in enumerate(texts)], hosts)


def _read_clock(text: str, rank: int) -> list[float]:
    key = f"clock of rank {rank}"
    readings: list[float] = parse(text, key, {"readings": [float]})["readings"]
    if len(readings) != _READINGS:
        refuse_text(text, key)
    return readings


def compare_clocks(readings: list[list[float]], hosts: list[str]) -> Check:
    """How far each node's clock is from rank 0's, by readings of the same moments."""
    offsets: dict[str, float] = {}
    for host, mine in zip(hosts, readings, strict=True):
        offsets.setdefault(host, statistics.median(a - b for a, b in zip(mine, readings[0], strict=True)))
    furthest = max(offsets, key=lambda host: abs(offsets[host]))
    largest = abs(offsets[furthest])
    figures = {"largest_offset_ms": round(1e3 * largest, 3)}
    found = f"all nodes within {1e3 * largest:.1f} ms of rank 0" if len(offsets) > 1 else "one node, one clock"
    if largest < 1:
        return Check("clocks", "ok", found, measured=figures)
    lines = [f"{host}: {offset:+.3f} s" for host, offset in offsets.items()]
    remedy = "Logs and files of the nodes will be out of order: let chrony or ntpd set their clocks."
    found = f"{furthest} is {largest:.1f} s {'ahead of' if offsets[furthest] > 0 else 'behind'} rank 0"
    return Check("clocks", "warning", found, remedy, lines, figures)


def place(context: Context) -> dict[str, Any]:
    """What the others are told of this rank."""
    mine = {"rank": context.rank, "host": socket.gethostname(), "pid": os.getpid(), "node_rank": context.node_rank}
    return mine | {"local_rank": context.local_rank, "device": str(context.device), "versions": installed()}


def read_places(texts: Sequence[str]) -> list[dict[str, Any]]:
    """Read where every rank is, from what each has told; raise `LaunchError` if no rank wrote it."""
    places = []
    for rank, text in enumerate(texts):
        found = parse(text, f"place of rank {rank}", _PLACE)
        if found["rank"] != rank:
            refuse_text(text, f"place of rank {rank}")
        places.append(found)
    return places


def roll_call(places: list[dict[str, Any]]) -> Check:
    """Who is where, and which pairs of ranks share a host."""
    keys = ("rank", "host", "pid", "node_rank", "local_rank", "device")
    lines = table([key.replace("_", " ") for key in keys], [[place[key] for key in keys] for place in places])
    near = sum(pair["same_host"] for pair in pairs(places))
    far = len(places) * (len(places) - 1) // 2 - near
    hosts = len({place["host"] for place in places})
    found = f"{number_of('rank', len(places))} on {number_of('host', hosts)}; "
    found += f"pairs on one host: {near}, on different hosts: {far}"
    return Check("ranks", "ok", found, "", lines)


def pairs(places: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each pair of ranks, whether they share a host."""
    return [{"ranks": [a["rank"], b["rank"]], "same_host": a["host"] == b["host"]} for a, b in combinations(places, 2)]


def same_versions(places: list[dict[str, Any]]) -> Check:
    """Whether every rank has the same of everything that takes part."""
    hosts = [place["host"] for place in places]
    names = dict.fromkeys(name for place in places for name in place["versions"])
    lines = []
    for name in names:
        values = [place["versions"].get(name, "none") for place in places]
        if len(set(values)) > 1:
            common = Counter(values).most_common(1)[0][0]
            others = {
                v: [r for r, mine in enumerate(values) if mine == v] for v in dict.fromkeys(values) if v != common
            }
            odd = ", ".join(f"{value} on {say_ranks(those, hosts)}" for value, those in others.items())
            lines.append(f"{name}: {odd}; {common} elsewhere")
    if lines:
        remedy = "Install the same on every node, or start all ranks from one environment or image."
        return Check(
            "same versions",
            "failed",
            f"the ranks differ in {', '.join(line.split(':')[0] for line in lines)}",
            remedy,
            lines,
        )
    return Check("same versions", "ok", f"{', '.join(names)} are the same on every rank")


def _microseconds(figure: float) -> str:
    return f"{figure:.0f} µs" if figure < 1000 else f"{figure / 1000:.1f} ms"
