"""Find losses that are divided by the wrong number."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ...script.recorder import Record
from .facts import Facts, Finding, all_equal, say_ranks

_EXACT = 1e-3  # relative difference of numbers that are meant to be equal
_UNEVEN = 1.02  # ratio of counts that are not
_SCALE_FREE = ("Adam", "Rprop", "Adagrad", "RMSprop", "Lion", "Adadelta")  # a factor of the gradient changes little
_Losses = dict[tuple[Any, ...], list[dict[str, Any]]]


def find(facts: Facts) -> Iterator[Finding]:
    """Look at how losses enter the gradients of each step."""
    if facts.deals_micro_batches:
        return
    rows = facts.rows("step", "optimizer", "number")
    found = _find_uneven(facts, rows) or _find_divided_twice(facts, rows)
    if found is not None:
        yield found
    yield from _find_divided_by_ranks(facts, rows)
    yield from _find_sums(facts, rows)


def _by_line(losses: list[dict[str, Any]]) -> _Losses:
    found: _Losses = {}
    for loss in losses:
        found.setdefault(tuple(loss["where"][0]) if loss["where"] else (), []).append(loss)
    return found


def _find_uneven(facts: Facts, rows: list[Any]) -> Finding | None:
    """Find means over different numbers of samples that count as equals in one step."""
    for (_, number), records in rows:
        tables = [_by_line(record["losses"]) for record in records]
        for line in tables[0]:
            if not all(line in table for table in tables):
                continue
            losses = [_by_backward(table[line]) for table in tables]
            if 1 < len(losses[0]) <= len(records[0]["position"]):  # each from a loader of its own: tasks
                continue
            every = [loss for rank in losses for loss in rank]
            totals = [total for total, _ in every]
            counts = [count for _, count in every]
            is_uneven = min(counts) > 0 and max(counts) > _UNEVEN * min(counts)
            is_meant = any(loss["masked"] for loss in tables[0][line]) or len(losses[0]) > 1
            if not is_meant:  # the last batch of an epoch may be uneven
                continue
            if not is_uneven or not _near(min(totals), max(totals)) or max(totals) <= 0:
                continue
            return _uneven(facts, records[0], number, line, counts)
    return None


def _by_backward(losses: list[dict[str, Any]]) -> list[tuple[float, int]]:
    """Give for each backward pass the weight of its losses, and over how many samples they are means."""
    found: dict[int, tuple[float, int]] = {}
    for loss in losses:
        total, count = found.get(loss["backward"], (0.0, 0))
        found[loss["backward"]] = total + loss["total"], count + loss["count"]
    return list(found.values())


def _near(one: float, other: float) -> bool:
    return abs(one - other) <= _EXACT * max(abs(one), abs(other))


def _uneven(facts: Facts, step: Record, number: int, line: tuple[Any, ...], counts: list[int]) -> Finding:
    evidence = f"at optimizer step {number} means over {min(counts)} to {max(counts)} samples or tokens count as equals"
    why = "a sample in a small batch counts more than one in a large batch; the gradient is not that of their mean"
    fix = "divide the sum by the count of all: `n = ddpkit.all_reduce(n); (loss_sum * world_size / n).backward()`"
    return facts.finding("wrong-divisor", evidence, why, fix, *_at_backward(step, line))


def _at_backward(step: Record, loss: Sequence[Any] = ()) -> list[Sequence[Any]]:
    """List the lines that divide, between the loss and backward, and that of the loss."""
    return [step["divided"], step["backward"], [loss] if loss else []]


def _find_divided_twice(facts: Facts, rows: list[Any]) -> Finding | None:
    """Find sums that are divided by the count of all ranks, and then averaged over ranks."""
    evidence = ""
    step: Record = {}
    for _, records in rows:
        if not records[0]["losses"] or not records[0]["causes"] or records[0]["summed"]:
            return None
        totals = [sum(loss["total"] for loss in record["losses"]) for record in records]
        if not _near(sum(totals), 1.0):
            return None
        if all_equal([round(total, 4) for total in totals]):  # it may be a constant
            continue
        shares = " and ".join(f"{total:.3f}" for total in totals)
        evidence = f"the losses of {say_ranks(facts.ranks)} enter their mean with weights {shares}, which add up to 1"
        step = records[0]
    if not evidence or len(rows) < 2:
        return None
    why = f"DDP averages over ranks, so the gradient is 1/{facts.world_size} of that of the mean"
    fix = "multiply by the number of ranks: `loss = loss_sum / total * dist.get_world_size()`"
    first = step["losses"][0]["where"][:1]
    return facts.finding("wrong-divisor", evidence, why, fix, *_at_backward(step, *first))


def _find_divided_by_ranks(facts: Facts, rows: list[Any]) -> Iterator[Finding]:
    """Find means that are divided by the number of ranks, and then averaged over ranks by DDP."""
    for _, records in rows:
        for record in records:
            is_plain = record["by_ranks"] and record["causes"] and not record["summed"]
            if not is_plain or any(cause["hooked"] for cause in record["causes"]):
                return
            if any(loss["masked"] for loss in record["losses"]):  # it may be a sum, divided by the count of all
                return
            if not _near(sum(loss["total"] for loss in record["losses"]), 1 / facts.world_size):
                return
    if not rows:
        return
    step = rows[0][1][0]
    evidence = f"{say_ranks(facts.ranks)} divide their mean losses by {facts.world_size}, and DDP averages them again"
    why = f"the gradient is 1/{facts.world_size} of that of the mean, and shrinks with the number of ranks"
    fix = "leave the division out: DDP averages gradients over ranks"
    lines = [step["by_ranks"], step["backward"]]
    yield facts.finding("wrong-divisor", evidence, why, fix, *lines, severity=_severity(step))


def _find_sums(facts: Facts, rows: list[Any]) -> Iterator[Finding]:
    """Find gradients that are added up over ranks, and never divided."""
    for (_, number), records in rows:
        summed = records[0]["summed"]
        if not summed or not _near(summed["ratio"], 1.0):
            continue
        if any(record["divides"] or record["summed"]["divides"] for record in records if record["summed"]):
            continue
        if _counts_travel(facts) or _are_one_mean([record["losses"] for record in records]):
            continue
        evidence = f"at optimizer step {number} the gradients are the sum of those of {say_ranks(facts.ranks)}"
        why = f"a step is {facts.world_size} times as long, and grows with the number of ranks"
        fix = "divide after the sum: `grad /= dist.get_world_size()`"
        yield facts.finding("wrong-divisor", evidence, why, fix, summed["where"], severity=_severity(records[0]))
        return


def _severity(step: Record) -> str:
    """Judge a gradient that is wrong by a factor: optimizers that divide by its size hardly see it."""
    name = step["class_name"]
    is_free = name.startswith(_SCALE_FREE) or name.endswith(_SCALE_FREE)
    return "suspicious" if is_free else "wrong"


def _are_one_mean(by_rank: list[list[dict[str, Any]]]) -> bool:
    """Return whether sums over samples were divided before by the number of samples of all ranks: they weigh 1."""
    totals: dict[tuple[Any, ...], float] = {}
    for losses in by_rank:
        for line, found in _by_line([loss for loss in losses if loss["summed"]]).items():
            totals[line] = totals.get(line, 0.0) + sum(loss["total"] for loss in found)
    return any(_near(total, 1.0) for total in totals.values())


def _counts_travel(facts: Facts) -> bool:
    """Return whether the ranks add up counts, by which they may have divided before."""
    for records in facts.of("collective").values():
        for record in records:
            values = record.get("values") or []
            if any(isinstance(v, int) or (float(v).is_integer() and v > 1) for v in values):
                return True
    return False
