"""Find ranks that part: in their collectives, in their numbers of batches, in what they decide."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from ...script.recorder import Record
from ..places import Loop, Place, is_inside, leaving_condition, loops_around, rank_condition
from .facts import SCRIPT_END, Facts, Finding, Parting, all_equal, place, places, say_ranks


def find(facts: Facts) -> Iterator[Finding]:
    """Explain where the ranks part, and find where they will."""
    uneven = _find_uneven_epochs(facts)
    found = [uneven, _find_plateau(facts) or _find_decision(facts)]
    if uneven is None:
        found.append(_find_skipping(facts))
    found.append(_find_other_keys(facts))
    if facts.parted and not any(found):
        found.append(_explain(facts, facts.parted))
    yield from filter(None, found)


def _find_decision(facts: Facts) -> Finding | None:
    """Find a decision that each rank takes by a number of its own."""
    for where, rows in _decisions(facts):
        columns = zip(*rows, strict=False)
        differing = [column for column in columns if not all_equal(column)]
        if differing:
            numbers = " and ".join(f"{value:.4g}" for value in differing[0])
            evidence = f"{say_ranks(facts.ranks)} decide by numbers of their own: {numbers}"
            why = "one rank stops when others do not, and they wait for it"
            fix = "average the number over ranks before: `loss = ddpkit.all_reduce_mean(loss, weight=count)`"
            return facts.finding("one-rank-decides", evidence, why, fix, where)
    return None


def _decisions(facts: Facts) -> Iterator[tuple[Place, list[list[float]]]]:
    """Yield the lines at which all ranks decide, with the numbers that each compares there."""
    for _, records in facts.rows("decision", "file", "line", "number"):
        values = [record["values"] for record in records]
        if all_equal([len(row) for row in values]):
            first = records[0]
            yield Place(first["file"], first["line"], first["function"]), values


def _find_skipping(facts: Facts) -> Finding | None:
    """Find ranks that are at different batches at one step, because some have left one out."""
    if facts.deals_micro_batches:
        return None
    skips: list[Any] = []
    for (_, number), records in facts.rows("step", "optimizer", "number"):
        positions = [record["position"] for record in records]
        skips = skips or records[0]["skips"]
        if all_equal(positions) or not skips or _is_handled(facts):
            continue
        batches = " and ".join(str(position[-1][2]) for position in positions if position)
        evidence = f"at optimizer step {number}, {say_ranks(facts.ranks)} are at batches {batches} of an epoch"
        why = "gradients of different steps are averaged, and at the end somebody waits in vain"
        fix = "let all ranks skip together: `skip = ddpkit.stop_together(skip)`"
        return facts.finding("one-rank-decides", evidence, why, fix, skips)
    return None


def _find_other_keys(facts: Facts) -> Finding | None:
    """Find collectives of one line that ranks call for the same keys in another order."""
    sequences = []
    for records in facts.of("collective").values():
        by_line: dict[tuple[Any, ...], list[Any]] = {}
        for record in records:
            if record.get("keys") and record["where"]:
                by_line.setdefault(tuple(record["where"][0]), []).append(record)
        sequences.append(by_line)
    for line, first in sequences[0].items():
        if not all(line in other for other in sequences):
            continue
        rows = list(zip(*(other[line] for other in sequences), strict=False))
        for row in rows:
            keys = [record["keys"] for record in row]
            if all_equal(keys) or not _are_names(rows):
                continue
            said = " and ".join(", ".join(key) for key in keys)
            evidence = f"call {rows.index(row) + 1} of {first[0]['op']} here is for {said} on {say_ranks(facts.ranks)}"
            why = "what belongs to one key is added to what belongs to another, and nothing fails"
            fix = "go through the keys in one order: `for key in sorted(values):`"
            return facts.finding("collective-order", evidence, why, fix, first[0]["where"])
    return None


def _are_names(rows: list[Any]) -> bool:
    """Return whether the keys are the same on all ranks, or words, so that their order has a meaning."""
    by_rank = [sorted(map(str, (record["keys"] for record in column))) for column in zip(*rows, strict=False)]
    words = all(any("'" in key for key in record["keys"]) for record in rows[0])
    return all_equal(by_rank) or words


def _find_uneven_epochs(facts: Facts) -> Finding | None:
    """Find a loader from which the ranks train with different numbers of batches."""
    if facts.deals_micro_batches:
        return None
    training = facts.training
    for (loader, _), records in facts.rows("epoch", "loader", "number"):
        batches = [record["batches"] for record in records]
        if loader not in training or None in batches or all_equal(batches) or _is_handled(facts):
            continue
        if _have_common_bound(records, batches):
            continue
        return _uneven(facts, records[0], batches)
    for (loader, _), records in facts.rows("epoch end", "loader", "number"):
        batches = [record["batches"] for record in records]
        is_seen = not any(record["cut"] for record in records)
        if loader in training and is_seen and not all_equal(batches) and not _is_handled(facts):
            return _uneven(facts, _epoch_of(facts, loader), batches)
    return None


def _have_common_bound(records: list[Record], batches: list[int]) -> bool:
    """Return whether the loops of all ranks end after as many batches, which each loader has."""
    bounds = [record["bound"] for record in records]
    return None not in bounds and all_equal(bounds) and bounds[0] <= min(batches)


def _epoch_of(facts: Facts, loader: str) -> Record:
    return next(r for r in facts.of("epoch")[facts.ranks[0]] if r["loader"] == loader)


def _is_handled(facts: Facts) -> bool:
    """Return whether the script deals with ranks that end earlier: by Join, or by telling each other."""
    for records in facts.records.values():
        for record in records:
            if record["kind"] == "join":
                return True
            if record["kind"] == "collective" and record.get("reduction") in ("MIN", "MAX"):
                return True
            if record["kind"] == "collective" and record["op"] == "all_gather_object":
                return True
    return False


def _uneven(facts: Facts, epoch: Record, batches: list[int]) -> Finding:
    numbers = " and ".join(map(str, batches))
    evidence = f"{say_ranks(facts.ranks)} have {numbers} batches in an epoch"
    why = "the ranks that have more wait for ever, or meet the others in their next epoch: a hang to come"
    fix = "give all ranks as many: `DistributedSampler(dataset)`, or train in `with Join([model]):`"
    lines = [epoch["lines"], epoch["sampler_made"], epoch["made"], epoch["where"]]
    return facts.finding("batches-differ", evidence, why, fix, *lines)


def _find_plateau(facts: Facts) -> Finding | None:
    """Find learning rates that follow a number which each rank has measured on its own."""
    steps = facts.of("plateau")
    for records in zip(*steps.values(), strict=False):
        if not all_equal([record["value"] for record in records]):
            values = " and ".join(f"{record['value']:.4g}" for record in records)
            evidence = f"{say_ranks(facts.ranks)} tell the schedule {values}"
            return _about_plateau(facts, records[0], evidence)
    counts = [len(records) for records in steps.values()]
    if 0 in counts and any(counts):
        rank = next(rank for rank, records in steps.items() if records)
        evidence = f"rank {rank} steps the schedule, and others do not"
        return _about_plateau(facts, steps[rank][0], evidence)
    return None


def _about_plateau(facts: Facts, record: Record, evidence: str) -> Finding:
    why = "sooner or later the ranks lower their learning rates at different times, and the replicas drift apart"
    fix = "average the metric over ranks before: `schedule.step(ddpkit.all_reduce_mean(loss, weight=count))`"
    return facts.finding("one-rank-decides", evidence, why, fix, record["where"])


def _explain(facts: Facts, parting: Parting) -> Finding:
    one, other = parting.entered
    rank, theirs = parting.ranks
    said = [_say(rank, one), _say(theirs, other, parting.ends)]
    evidence = "; ".join(said)
    lines = places(one["where"] if one else [], other["where"] if other else [])
    guarded = [line for line in lines if rank_condition(line)]
    if not guarded and (left := _explain_by_loop(facts, parting, evidence, lines)):
        return left
    why = "each waits for the other, or they mix what does not belong together"
    fix = "let all ranks call the same collectives in the same order: none under `if rank == 0:`"
    return facts.finding("collective-order", evidence, why, fix, guarded[:1], lines, ranks=sorted(parting.ranks))


def _explain_by_loop(facts: Facts, parting: Parting, evidence: str, lines: list[Place]) -> Finding | None:
    """Find the loop that one rank has left and another goes on with."""
    for one, other in ((0, 1), (1, 0)):
        running, left = parting.entered[one], parting.entered[other]
        for line in places(running["where"] if running else []):
            for loop in reversed(loops_around(line.file, line.line)):
                spanned = [p for p in _seen_at(facts, parting.ranks[other], line) if is_inside(loop, p.line)]
                if not spanned or not _is_left(loop, line, left, parting.ends):
                    continue
                condition = leaving_condition(loop)
                if condition is not None:
                    return _left_early(facts, line._replace(line=condition), evidence, lines)
                if left is not None and isinstance(loop, ast.For):
                    return _left_at_end(facts, line._replace(line=loop.lineno), evidence, lines)
    return None


def _seen_at(facts: Facts, rank: int, line: Place) -> list[Place]:
    """List the lines of a function from which a rank has entered collectives."""
    entered = places(*(record["where"] for record in facts.of("collective")[rank]))
    return [place for place in entered if (place.file, place.function) == (line.file, line.function)]


def _is_left(loop: Loop, line: Place, left: Record | None, ends: str) -> bool:
    """Return whether a rank is behind a loop: elsewhere in its function, or at the end of the script."""
    if left is None:
        return ends == SCRIPT_END
    same = [p for p in places(left["where"]) if (p.file, p.function) == (line.file, line.function)]
    return bool(same) and not any(is_inside(loop, place.line) for place in same)


def _left_early(facts: Facts, where: Place, evidence: str, lines: list[Place]) -> Finding:
    why = "one rank leaves the loop by something that it knows alone, and others wait for it"
    fix = "let all ranks leave together: `if ddpkit.stop_together(stop): break`"
    return facts.finding("one-rank-decides", evidence, why, fix, where, lines)


def _left_at_end(facts: Facts, where: Place, evidence: str, lines: list[Place]) -> Finding:
    why = "the loop has more rounds on one rank than on another, which waits for it or meets it elsewhere"
    fix = "give all ranks as many rounds, or train in `with Join([model]):`"
    return facts.finding("batches-differ", evidence, why, fix, where, lines)


def _say(rank: int, record: Record | None, ends: str = "") -> str:
    if record is None:
        return f"rank {rank} has ended ({ends})"
    shape = f" of {record['shape']}" if record.get("shape") else ""
    where = place(record["where"])
    return f"rank {rank} enters {record['op']}{shape} at {where}"
