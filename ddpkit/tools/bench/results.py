"""From measured times to a report: one dictionary that is printed as JSON, as tables, or drawn."""

from __future__ import annotations

import os
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from ... import __version__
from ..tables import can_show, drawn
from .timing import BUS_FACTORS, bandwidths, summary
from .workloads import METRICS, PARTS, BadFlag, Plan

SCHEMA = 1  # of the report; raised when a key changes its meaning or goes away
_BUSY = 0.2  # spread above which a time is hardly to be trusted


def assemble(plan: Plan, outcomes: list[dict[str, Any]]) -> dict[str, Any]:
    """The report; docs/guide/bench.md describes its keys. Rounds of equal measurements are put together."""
    rounds: dict[tuple[tuple[str, Any], ...], list[float]] = {}
    for outcome in outcomes:
        for result in outcome["results"]:
            rounds.setdefault(tuple((k, v) for k, v in result.items() if k != "times"), []).extend(result["times"])
    results = [_result(dict(what), times) for what, times in rounds.items()]
    results.sort(key=lambda result: result["ranks"])
    ranks = sorted({outcome["ranks"] for outcome in outcomes})
    largest = max(outcomes, key=lambda outcome: outcome["ranks"])
    return {
        "schema": SCHEMA,
        "ddpkit": __version__,
        "torch": torch.__version__,
        **{key: largest[key] for key in ("launcher", "backend", "device", "nodes")},
        "cores": len(os.sched_getaffinity(0)),
        "threads_per_rank": 1,
        "ranks": ranks,
        "batch_size": plan.batch_size,
        "results": results,
        "scaling": list(_scaling(results, ranks, plan.batch_size)),
        "notes": list(_notes(plan, ranks, largest, results)),
    }


def _result(what: dict[str, Any], times: list[float]) -> dict[str, Any]:
    result = what | summary(times)
    if what["part"] == "collectives":
        result |= bandwidths(what["name"], what["ranks"], what["bytes"], result["seconds"])
    if what["part"] == "steps":
        result["samples_per_second"] = what["samples"] / result["seconds"]
    return result


def _scaling(results: list[dict[str, Any]], ranks: list[int], batch_size: int) -> Iterable[dict[str, Any]]:
    """Speed-up over the fewest ranks that were measured; efficiency is its share of what that many more could bring."""
    steps = [result for result in results if result.get("way") == "ddp"]
    speeds = {(step["name"], step["ranks"], step["samples"]): step["samples_per_second"] for step in steps}
    for name in dict.fromkeys(step["name"] for step in steps):
        for kind in ("weak", "strong"):
            batches = {n: batch_size * n if kind == "weak" else batch_size for n in ranks}
            base = speeds[name, ranks[0], batches[ranks[0]]]
            for n, samples in batches.items():
                speed_up = (speed := speeds[name, n, samples]) / base
                row = {"model": name, "scaling": kind, "ranks": n, "samples": samples, "samples_per_second": speed}
                yield row | {"speed_up": speed_up, "efficiency": speed_up * ranks[0] / n}


def _notes(plan: Plan, ranks: list[int], largest: dict[str, Any], results: list[dict[str, Any]]) -> Iterable[str]:
    yield "One CPU thread per rank. Times are those of the slowest rank."
    others = [part for part in plan.parts if part != "steps"]
    if ranks[0] == 1 and others:
        yield f"Not on 1 rank, which has nobody to talk to: {', '.join(others)}."
    cores = len(os.sched_getaffinity(0))
    if largest["device"] == "cpu" and largest["nodes"] == 1 and ranks[-1] > cores:
        yield f"{ranks[-1]} ranks share {cores} core{'s' * (cores > 1)}: more ranks than cores bring no speed-up."
    if busy := sum(_spread(result) > _BUSY for result in results):
        some = f"{busy} of {len(results)} measurements vary by more than ± {_BUSY:.0%}"
        yield f"{some}: this machine is busy with other work. Measure again, with more --seconds."
    if plan.models and not plan.dp:
        yield "DP against DDP: skipped; it needs several accelerators, and --ranks 1 and their number."


def text(report: dict[str, Any]) -> str:
    """The report as tables."""
    where = f"{report['device']}, {report['backend'] or 'no backend'}, {report['cores']} cores"
    parts = {part: [result for result in report["results"] if result["part"] == part] for part in PARTS}
    tables = [
        _collectives(parts["collectives"]),
        _pairs(f"mean of {METRICS} metrics", parts["metrics"]),
        _pairs("barrier", parts["barrier"]),
        _steps(parts["steps"]),
        *(_speed_ups(kind, report) for kind in ("weak", "strong")),
    ]
    lines = [f"ddpkit {report['ddpkit']}, torch {report['torch']}, {where}; ranks started by {report['launcher']}", ""]
    lines += [line for lines in tables if lines for line in [*lines, ""]] + report["notes"]
    joined = "\n".join(lines)
    return joined if can_show(joined) else joined.replace("µ", "u").replace("±", "+-")


def _collectives(results: list[dict[str, Any]]) -> list[str]:
    header = ["collective", "ranks", "size", "time", "±", "algorithm GB/s", "bus GB/s"]
    some = sorted(results, key=lambda r: (list(BUS_FACTORS).index(r["name"]), r["ranks"], r["bytes"]))
    rows = [
        [r["name"], r["ranks"], _size(r["bytes"]), *_time(r), f"{r['algbw']:.3g}", f"{r['busbw']:.3g}"] for r in some
    ]
    return drawn(header, rows) if rows else []


def _pairs(title: str, results: list[dict[str, Any]]) -> list[str]:
    """Ours and the plain way, which comes last, on each number of ranks."""
    plain = {r["ranks"]: r["seconds"] for r in results}
    rows = [[r["name"], r["ranks"], *_time(r), f"{r['seconds'] / plain[r['ranks']]:.2f}"] for r in results]
    return drawn([title, "ranks", "time", "±", "ratio"], rows) if rows else []


def _steps(results: list[dict[str, Any]]) -> list[str]:
    names = list(dict.fromkeys(r["name"] for r in results))
    rows = [
        [r["name"], f"{r['parameters']:,}", r["ranks"], _way(r), r["samples"], *_time(r)]
        for r in sorted(results, key=lambda r: names.index(r["name"]))
    ]
    header = ["step", "parameters", "ranks", "way", "samples in all", "time", "±"]
    return drawn(header, rows) if rows else []


def _way(step: dict[str, Any]) -> str:
    return {"ddp": "DDP" if step["ranks"] > 1 else "alone", "local": "no communication", "dp": "DP"}[step["way"]]


def _speed_ups(kind: str, report: dict[str, Any]) -> list[str]:
    title = f"{kind} scaling, {report['batch_size']} samples {'per rank' if kind == 'weak' else 'in all'}"
    rows = [
        [r["model"], r["ranks"], f"{r['samples_per_second']:,.0f}", f"{r['speed_up']:.2f}", f"{r['efficiency']:.0%}"]
        for r in report["scaling"]
        if r["scaling"] == kind
    ]
    return drawn([title, "ranks", "samples/s", "speed-up", "efficiency"], rows) if rows else []


def _spread(result: dict[str, Any]) -> float:
    """Half the distance of the quartiles, as a share of the median."""
    return float((result["high"] - result["low"]) / 2 / result["seconds"])


def _time(result: dict[str, Any]) -> list[str]:
    seconds = result["seconds"]
    units = (("s", 1.0), ("ms", 1e3), ("µs", 1e6))
    unit, factor = next((pair for pair in units if seconds * pair[1] >= 1), units[-1])
    return [f"{seconds * factor:.3g} {unit}", f"{_spread(result):.0%}"]


def _size(size: int) -> str:
    unit = next((i for i in (3, 2, 1) if size >> 10 * i and size % (1 << 10 * i) == 0), 0)
    return f"{size >> 10 * unit} {('B', 'KiB', 'MiB', 'GiB')[unit]}"


def check_plot(path: Path) -> None:
    """Makes sure, before anything is measured, that `plot` will work."""
    try:
        figure = import_module("matplotlib.figure").Figure()
    except ImportError:
        raise BadFlag('--plot needs matplotlib: pip install "ddpkit[plot]"') from None
    if path.suffix[1:] not in (known := figure.canvas.get_supported_filetypes()):
        raise BadFlag(f"--plot {path}: the name must end in one of {', '.join(f'.{ending}' for ending in known)}.")
    if not path.resolve().parent.is_dir():
        raise BadFlag(f"--plot {path}: there is no folder {path.resolve().parent}.")


def plot(report: dict[str, Any], path: Path) -> None:
    """Draws bus bandwidths over sizes, and speed-ups over ranks."""
    figure = import_module("matplotlib.figure").Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    curves: dict[str, list[tuple[int, float]]] = {}
    for r in report["results"]:
        if r["part"] == "collectives":
            curves.setdefault(f"{r['name']}, {r['ranks']} ranks", []).append((r["bytes"], r["busbw"]))
    for label, points in curves.items():
        left.loglog(*zip(*sorted(points), strict=True), marker="o", label=label)
    left.set(xlabel="bytes", ylabel="bus bandwidth, GB/s")
    curves = {}
    for r in report["scaling"]:
        curves.setdefault(f"{r['model']}, {r['scaling']}", []).append((r["ranks"], r["speed_up"]))
    for label, points in curves.items():
        right.plot(*zip(*points, strict=True), marker="o", linestyle="-" if "weak" in label else "--", label=label)
    ranks = report["ranks"]
    right.plot(ranks, [n / ranks[0] for n in ranks], color="grey", linewidth=1, label="ideal")
    right.set(xlabel="ranks", ylabel=f"speed-up over {ranks[0]} rank{'s' * (ranks[0] > 1)}", xticks=ranks)
    for axes in (left, right):
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="small")
    figure.suptitle(f"{report['device']}, {report['backend']}")
    figure.savefig(path, dpi=150)
