"""Make a report of measured times: one dictionary that is printed as JSON or as tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ... import __version__
from ...join.members import usable_cores
from ..terminal import table
from .measure import COLLECTIVES, PARTS, Plan, bandwidths, summary

SCHEMA = 1  # of the report; raised when a key changes its meaning or goes away
_BUSY = 0.2  # spread above which a time is hardly to be trusted
Row = dict[str, Any]


def make_report(plan: Plan, outcomes: list[Row]) -> Row:
    """Make the report; docs/guide/bench.md describes its keys.

    Args:
        plan: The settings.
        outcomes: Of `measure`, one for each job; rounds of equal measurements are put together.
    """
    results = _results(outcomes)
    ranks = sorted({outcome["ranks"] for outcome in outcomes})
    largest = max(outcomes, key=_ranks_of)
    return {
        "schema": SCHEMA,
        "ddpkit": __version__,
        "torch": torch.__version__,
        "launcher": largest["launcher"],
        "backend": largest["backend"],
        "device": largest["device"],
        "nodes": largest["nodes"],
        "cores": len(usable_cores()),
        "threads_per_rank": 1,
        "ranks": ranks,
        "batch_size": plan.batch_size,
        "results": results,
        "scaling": list(_scaling(results, ranks, plan.batch_size)),
        "notes": list(_notes(plan, ranks, results)),
    }


def _ranks_of(row: Row) -> int:
    ranks: int = row["ranks"]
    return ranks


def _results(outcomes: list[Row]) -> list[Row]:
    """Summarise each measurement over the rounds of all jobs, in the order of ranks."""
    rounds: dict[tuple[tuple[str, Any], ...], list[float]] = {}
    for outcome in outcomes:
        for result in outcome["results"]:
            labels = tuple((key, value) for key, value in result.items() if key != "times")
            rounds.setdefault(labels, []).extend(result["times"])
    results = [_result(dict(labels), times) for labels, times in rounds.items()]
    return sorted(results, key=_ranks_of)


def _result(labels: Row, times: list[float]) -> Row:
    result = labels | summary(times)
    seconds = result["seconds"]
    if labels["part"] == "collectives":
        result |= bandwidths(labels["name"], labels["ranks"], labels["bytes"], seconds)
    if labels["part"] == "steps":
        result["samples_per_second"] = labels["samples"] / seconds
    return result


def _scaling(results: list[Row], ranks: list[int], batch_size: int) -> Iterator[Row]:
    """Compute speed-ups over the fewest ranks that were measured, and their share of the ideal."""
    steps = [result for result in results if result.get("way") == "ddp"]
    speeds = {}
    for step in steps:
        speeds[step["name"], step["ranks"], step["samples"]] = step["samples_per_second"]
    fewest = ranks[0]
    for model in _names(steps):
        for kind in ("weak", "strong"):
            base = speeds[model, fewest, _samples(kind, fewest, batch_size)]
            for n in ranks:
                samples = _samples(kind, n, batch_size)
                speed = speeds[model, n, samples]
                speed_up = speed / base
                yield {
                    "model": model,
                    "scaling": kind,
                    "ranks": n,
                    "samples": samples,
                    "samples_per_second": speed,
                    "speed_up": speed_up,
                    "efficiency": speed_up * fewest / n,
                }


def _samples(kind: str, ranks: int, batch_size: int) -> int:
    """Compute the samples per step on all ranks together."""
    if kind == "weak":
        return batch_size * ranks
    return batch_size


def _names(results: Iterable[Row]) -> list[str]:
    """List the names of measurements once, in the order in which they come."""
    return list(dict.fromkeys(result["name"] for result in results))


def _notes(plan: Plan, ranks: list[int], results: list[Row]) -> Iterator[str]:
    """Explain gaps and doubts in the figures."""
    yield "One CPU thread per rank. Times are those of the slowest rank."
    if ranks[0] == 1 and "collectives" in plan.parts:
        yield "Collectives are not measured on 1 rank, which has nobody to talk to."
    busy = sum(_spread(result) > _BUSY for result in results)
    if busy:
        some = f"{busy} of {len(results)} measurements vary by more than +-{_BUSY:.0%}"
        advice = "Measure again, with more --seconds."
        yield f"{some}: this machine is busy with other work. {advice}"


def text(report: Row) -> str:
    """Write the report as tables, each followed by an empty line, and notes."""
    lines = [_heading(report), ""]
    for rows in _tables(report):
        if rows:
            lines += [*rows, ""]
    return "\n".join([*lines, *report["notes"]])


def _heading(report: Row) -> str:
    versions = f"ddpkit {report['ddpkit']}, torch {report['torch']}"
    backend = report["backend"] or "no backend"
    where = f"{report['device']}, {backend}, {report['cores']} cores"
    return f"{versions}, {where}; ranks started by {report['launcher']}"


def _tables(report: Row) -> Iterator[list[str]]:
    parts: dict[str, list[Row]] = {part: [] for part in PARTS}
    for result in report["results"]:
        parts[result["part"]].append(result)
    yield _collectives(parts["collectives"])
    yield _steps(parts["steps"])
    yield _speed_ups("weak", "per rank", report)
    yield _speed_ups("strong", "in all", report)


def _collectives(results: list[Row]) -> list[str]:
    header = ["collective", "ranks", "size", "time", "+-", "algorithm GB/s", "bus GB/s"]
    rows = []
    for result in sorted(results, key=_collective_order):
        row = [result["name"], result["ranks"], _size(result["bytes"]), *_time(result)]
        rows.append([*row, f"{result['algbw']:.3g}", f"{result['busbw']:.3g}"])
    return table(header, rows)


def _collective_order(result: Row) -> tuple[int, int, int]:
    return COLLECTIVES.index(result["name"]), result["ranks"], result["bytes"]


def _steps(results: list[Row]) -> list[str]:
    rows = []
    for name in _names(results):
        for result in results:
            if result["name"] == name:
                row = [name, f"{result['parameters']:,}", result["ranks"], _way(result)]
                rows.append([*row, result["samples"], *_time(result)])
    header = ["step", "parameters", "ranks", "way", "samples in all", "time", "+-"]
    return table(header, rows)


def _way(step: Row) -> str:
    if step["way"] == "local":
        return "no communication"
    if step["ranks"] == 1:
        return "alone"
    return "DDP"


def _speed_ups(kind: str, whose: str, report: Row) -> list[str]:
    title = f"{kind} scaling, {report['batch_size']} samples {whose}"
    rows = []
    for row in report["scaling"]:
        if row["scaling"] == kind:
            speed = f"{row['samples_per_second']:,.0f}"
            shares = [f"{row['speed_up']:.2f}", f"{row['efficiency']:.0%}"]
            rows.append([row["model"], row["ranks"], speed, *shares])
    return table([title, "ranks", "samples/s", "speed-up", "efficiency"], rows)


def _spread(result: Row) -> float:
    """Compute half the distance of the quartiles, as a share of the median."""
    return float((result["high"] - result["low"]) / 2 / result["seconds"])


def _time(result: Row) -> list[str]:
    """Write a time in its unit, and its spread."""
    seconds = result["seconds"]
    if seconds >= 1:
        written = f"{seconds:.3g} s"
    elif seconds >= 1e-3:
        written = f"{seconds * 1e3:.3g} ms"
    else:
        written = f"{seconds * 1e6:.3g} us"
    return [written, f"{_spread(result):.0%}"]


def _size(size: int) -> str:
    """Write a number of bytes in the largest unit that divides it."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit and size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} B"
