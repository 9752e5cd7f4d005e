"""Find ranks that part, in their collectives and numbers of batches, and files that several write."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator

from ..recorder import Record
from .facts import SCRIPT_END, Facts, Finding, Parting, agree, all_equal, place, places, say_ranks
from .source import Loop, Place, is_inside, leaving_condition, loops_around, rank_condition, skipping_lines


def find(facts: Facts) -> Iterator[Finding]:
    """Explain where the ranks part, and find where they will."""
    uneven = _find_uneven_epochs(facts)
    found = [uneven, _find_plateau(facts)]
    if uneven is None:
        found.append(_find_skipping(facts))
    if facts.parted and not any(found):
        found.append(_explain(facts, facts.parted))
    yield from filter(None, found)
    yield from _find_same_files(facts)
    yield from _find_own_values(facts)


def _find_skipping(facts: Facts) -> Finding | None:
    """Find ranks that are at different batches at one step, because some have left one out."""
    if facts.deals_micro_batches or _is_handled(facts):
        return None
    lines: list[Place] = []
    for records in facts.steps:
        lines = lines or skipping_lines(places(records[0]["where"]))
        if lines and not agree(records, "position"):
            batches = " and ".join(str(record["position"][-1][2]) for record in records if record["position"])
            evidence = f"at optimizer step {records[0]['number']}, {facts.who} are at batches {batches} of an epoch"
            return facts.finding("batches-skipped", evidence, lines)
    return None


def _find_uneven_epochs(facts: Facts) -> Finding | None:
    """Find a loader from which the ranks train with different numbers of batches."""
    if facts.deals_micro_batches or _is_handled(facts):
        return None
    for kind in ("epoch", "epoch end"):
        for (loader, _), records in facts.rows(kind, "loader", "number"):
            batches = [record["batches"] for record in records]
            is_unknown = None in batches or any(record.get("cut") for record in records)
            if loader not in facts.training or is_unknown or all_equal(batches):
                continue
            if kind == "epoch" and any(record["bounded"] for record in records):
                continue
            epoch = next(record for record in facts.first("epoch") if record["loader"] == loader)
            numbers = " and ".join(map(str, batches))
            evidence = f"{facts.who} have {numbers} batches in an epoch"
            lines = [epoch["lines"], epoch["sampler_made"], epoch["made"], epoch["where"]]
            return facts.finding("batches-differ", evidence, *lines)
    return None


def _is_handled(facts: Facts) -> bool:
    """Return whether the script deals with ranks that end earlier: by Join, or by telling each other."""
    found = facts.all("collective")
    agrees = any(r.get("reduction") in ("MIN", "MAX") or r["op"] == "all_gather_object" for r in found)
    return agrees or bool(facts.all("join"))


def _find_plateau(facts: Facts) -> Finding | None:
    """Find learning rates that follow a number which each rank has measured on its own."""
    for records in zip(*facts.of("plateau").values(), strict=False):
        if agree(records, "value"):
            continue
        values = " and ".join(f"{record['value']:.4g}" for record in records)
        evidence = f"{facts.who} pass {values} to the schedule"
        return facts.finding("plateau-differs", evidence, records[0]["where"])
    return None


# Explain the first collective that ranks did not enter alike.


def _explain(facts: Facts, parting: Parting) -> Finding:
    one, other = parting.entered
    evidence = f"{_say(parting.ranks[0], one)}; {_say(parting.ranks[1], other, parting.ends)}"
    lines = places(one["where"] if one else [], other["where"] if other else [])
    guarded = [line for line in lines if rank_condition(line)][:1]
    if not guarded and (left := _explain_by_loop(facts, parting, evidence, lines)):
        return left
    return facts.finding("collective-order", evidence, guarded, lines, ranks=sorted(parting.ranks))


def _say(rank: int, record: Record | None, ends: str = "") -> str:
    if record is None:
        return f"rank {rank} has ended ({ends})"
    shape = f" of {record['shape']}" if record.get("shape") else ""
    return f"rank {rank} enters {record['op']}{shape} at {place(record['where'])}"


def _explain_by_loop(facts: Facts, parting: Parting, evidence: str, lines: list[Place]) -> Finding | None:
    """Find the loop that one rank has left and another goes on with."""
    for one, other in ((0, 1), (1, 0)):
        running, left = parting.entered[one], parting.entered[other]
        entered = places(*(record["where"] for record in facts.of("collective")[parting.ranks[other]]))
        for line in places(running["where"] if running else []):
            for loop in reversed(loops_around(line.file, line.line)):
                if not _are_inside(loop, line, entered) or not _is_left(loop, line, left, parting.ends):
                    continue
                condition = leaving_condition(loop)
                if condition is not None:
                    where = line._replace(line=condition)
                    return facts.finding("loop-left", evidence, where, lines)
                if left is not None and isinstance(loop, ast.For):
                    where = line._replace(line=loop.lineno)
                    return facts.finding("rounds-differ", evidence, where, lines)
    return None


def _are_inside(loop: Loop, line: Place, entered: list[Place]) -> bool:
    """Return whether some lines of a function are in its loop."""
    same = [place.line for place in entered if (place.file, place.function) == (line.file, line.function)]
    return any(is_inside(loop, number) for number in same)


def _is_left(loop: Loop, line: Place, left: Record | None, ends: str) -> bool:
    """Return whether a rank is behind a loop: elsewhere in its function, or at the end of the script."""
    if left is None:
        return ends == SCRIPT_END
    stack = places(left["where"])
    is_there = any((place.file, place.function) == (line.file, line.function) for place in stack)
    return is_there and not _are_inside(loop, line, stack)


def _find_own_values(facts: Facts) -> Iterator[Finding]:
    """Find values that one rank alone saves, and that differed between ranks from the first step on."""
    writers = [rank for rank, records in facts.of("file").items() if records]
    if len(writers) == 1:
        saved = {hashed: record["where"] for record in facts.all("file") for hashed in record["hashes"]}
        for (name,), records in facts.rows("value", "name"):
            where = saved.get(records[facts.ranks.index(writers[0])]["hash"])
            if where and not agree(records, "hash"):
                evidence = f"`{name}` differs between {facts.who}, and rank {writers[0]} saves its own"
                yield facts.finding("own-values-saved", evidence, where)
                return


def _find_same_files(facts: Facts) -> Iterator[Finding]:
    """Find files that several ranks save."""
    for path in dict.fromkeys(record["path"] for record in facts.all("file")):
        saved = {rank: [r for r in records if r["path"] == path] for rank, records in facts.of("file").items()}
        ranks = [rank for rank, records in saved.items() if records]
        if len(ranks) > 1:
            evidence = f"{say_ranks(ranks)} write {os.path.basename(path)}"
            yield facts.finding("same-file", evidence, saved[ranks[0]][0]["where"], ranks=ranks)
