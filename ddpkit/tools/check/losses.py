"""Find losses that are divided by the wrong number, and metrics that are means of the ranks' means."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..recorder import Record
from .facts import Facts, Finding, all_equal, in_function_of

_EXACT = 1e-3  # relative difference of numbers that are meant to be equal
_UNEVEN = 1.02  # ratio of counts that are not
_SCALE_FREE = ("Adam", "Rprop", "Adagrad", "RMSprop", "Lion", "Adadelta")  # a factor of the gradient changes little
_NEAR = 3  # collectives, within which counts may travel with means
_Losses = dict[tuple[Any, ...], list[dict[str, Any]]]


def find(facts: Facts) -> Iterator[Finding]:
    """Look at how losses enter the gradients of each step, and at metrics."""
    if not facts.deals_micro_batches:
        rows = facts.steps
        uneven = _find_uneven(facts, rows) or _find_divided_twice(facts, rows)
        yield from filter(None, [uneven, _find_sums(facts, rows)])
    for _, records in facts.rows("collective", "position", "group"):
        if _is_mean_of_means(facts, records):
            yield _mean_of_means(facts, records)
            return


def _by_line(losses: list[dict[str, Any]]) -> _Losses:
    found: _Losses = {}
    for loss in losses:
        found.setdefault(tuple(loss["where"][0]) if loss["where"] else (), []).append(loss)
    return found


def _total(losses: list[dict[str, Any]]) -> float:
    """Add up the weights with which losses enter the gradients."""
    return float(sum(loss["total"] for loss in losses))


def _near(one: float, other: float) -> bool:
    return abs(one - other) <= _EXACT * max(abs(one), abs(other))


def _find_uneven(facts: Facts, rows: list[list[Record]]) -> Finding | None:
    """Find means over different numbers of samples that count as equals in one step."""
    for records in rows:
        tables = [_by_line(record["losses"]) for record in records]
        for line in tables[0]:
            if not all(line in table for table in tables):
                continue
            losses = [_by_backward(table[line]) for table in tables]
            number = len(losses[0])
            if 1 < number <= len(records[0]["position"]):  # each from a loader of its own: tasks
                continue
            if number == 1 and not any(loss["masked"] for loss in tables[0][line]):
                continue  # the last batch of an epoch may be uneven
            totals, counts = zip(*(loss for rank in losses for loss in rank), strict=True)
            is_uneven = min(counts) > 0 and max(counts) > _UNEVEN * min(counts)
            if is_uneven and _near(min(totals), max(totals)) and max(totals) > 0:
                step = records[0]
                many = f"{min(counts)} to {max(counts)}"
                evidence = f"at optimizer step {step['number']} means over {many} samples or tokens count as equals"
                why = (
                    "a sample in a small batch counts more than one in a large; the gradient is not that of their mean"
                )
                fix = "divide the sum by the count of all: "
                fix += "`n = ddpkit.all_reduce(n); (loss_sum * world_size / n).backward()`"
                lines = [step["backward"], [line] if line else []]
                return facts.finding("wrong-divisor", evidence, why, fix, *lines)
    return None


def _by_backward(losses: list[dict[str, Any]]) -> list[tuple[float, int]]:
    """Give for each backward pass the weight of its losses, and over how many samples they are means."""
    found: dict[int, tuple[float, int]] = {}
    for loss in losses:
        total, count = found.get(loss["backward"], (0.0, 0))
        found[loss["backward"]] = total + loss["total"], count + loss["count"]
    return list(found.values())


def _find_divided_twice(facts: Facts, rows: list[list[Record]]) -> Finding | None:
    """Find sums that are divided by the count of all ranks, and then averaged over ranks."""
    shares = ""
    step: Record = {}
    for records in rows:
        first = records[0]
        totals = [_total(record["losses"]) for record in records]
        if not first["losses"] or not first["causes"] or first["summed"] or not _near(sum(totals), 1.0):
            return None
        if not all_equal([round(total, 4) for total in totals]):  # else it may be a constant
            step = first
            shares = " and ".join(f"{total:.3f}" for total in totals)
    if not shares or len(rows) < 2:
        return None
    evidence = f"the losses of {facts.who} enter their mean with weights {shares}, which add up to 1"
    why = f"DDP averages over ranks, so the gradient is 1/{facts.world_size} of that of the mean"
    fix = "multiply by the number of ranks: `loss = loss_sum / total * dist.get_world_size()`"
    lines = [step["backward"], step["losses"][0]["where"][:1]]
    return facts.finding("wrong-divisor", evidence, why, fix, *lines)


def _find_sums(facts: Facts, rows: list[list[Record]]) -> Finding | None:
    """Find gradients that are added up over ranks, and never divided."""
    for records in rows:
        summed = records[0]["summed"]
        if not summed or not _near(summed["ratio"], 1.0):
            continue
        divides = any(record["divides"] for record in records if record["summed"])
        if divides or _counts_travel(facts) or _are_one_mean([record["losses"] for record in records]):
            continue
        number = records[0]["number"]
        evidence = f"at optimizer step {number} the gradients are the sum of those of {facts.who}"
        why = f"a step is {facts.world_size} times as long, and grows with the number of ranks"
        fix = "divide after the sum: `grad /= dist.get_world_size()`"
        return facts.finding("wrong-divisor", evidence, why, fix, summed["where"], severity=_severity(records[0]))
    return None


def _severity(step: Record) -> str:
    """Judge a gradient that is wrong by a factor: optimizers that divide by its size hardly see it."""
    name = step["class_name"]
    is_free = name.startswith(_SCALE_FREE) or name.endswith(_SCALE_FREE)
    return "suspicious" if is_free else "wrong"


def _are_one_mean(by_rank: list[list[dict[str, Any]]]) -> bool:
    """Return whether sums over samples were divided before by the number of samples of all ranks: they weigh 1."""
    sums = _by_line([loss for losses in by_rank for loss in losses if loss["summed"]])
    return any(_near(_total(losses), 1.0) for losses in sums.values())


def _counts_travel(facts: Facts) -> bool:
    """Return whether the ranks add up counts, by which they may have divided before."""
    values = [value for record in facts.all("collective") for value in record.get("values") or []]
    return any(isinstance(value, int) or (float(value).is_integer() and value > 1) for value in values)


# Find metrics that are means of the ranks' means over uneven shares.


def _is_mean_of_means(facts: Facts, records: list[Record]) -> bool:
    first = records[0]
    if first["op"] not in ("all_reduce", "reduce") or not (first.get("reduction") == "AVG" or first["divides"]):
        return False
    columns = [record.get("values") or [] for record in records]
    if not all(any(not float(value).is_integer() for value in values) for values in columns):  # counts
        return False
    shares = [record["samples"] for record in records]
    return min(shares) > 0 and not all_equal(shares) and not _carries_counts(facts, first, shares)


def _carries_counts(facts: Facts, first: Record, shares: list[int]) -> bool:
    """Return whether the ranks' numbers of samples are reduced as well, about then."""
    for (position, _), records in facts.rows("collective", "position", "group"):
        if abs(position - first["position"]) > _NEAR:
            continue
        for column in zip(*(record.get("values") or [] for record in records), strict=False):
            are_counts = all(float(value).is_integer() and value > 0 for value in column)
            if (are_counts and not all_equal(column)) or list(map(float, column)) == list(map(float, shares)):
                return True
    return False


def _mean_of_means(facts: Facts, records: list[Record]) -> Finding:
    first = records[0]
    before = facts.records[facts.ranks[0]]
    before = before[: before.index(first)]
    evaluated: list[Any] = next((record["where"] for record in reversed(before) if record["kind"] == "epoch"), [])
    shares = " and ".join(str(record["samples"]) for record in records)
    evidence = f"means over {shares} samples, of {facts.who}, are averaged as equals"
    why = "the result is not the mean over the samples, and changes with the number of ranks"
    fix = "add up sums and counts, and divide then: `ddpkit.all_reduce_mean(mean, weight=count)`"
    where = in_function_of(first["where"], evaluated)
    return facts.finding("mean-of-means", evidence, why, fix, where, first["where"])
