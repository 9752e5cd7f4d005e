"""Find metrics that are means of the ranks' means over uneven shares, and files that every rank writes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from ...script.recorder import Record
from .facts import Facts, Finding, all_equal, in_function_of, place, say_ranks


def find(facts: Facts) -> Iterator[Finding]:
    """Look at metrics and at files."""
    yield from _find_means_of_means(facts)
    yield from _find_same_files(facts)


def _find_means_of_means(facts: Facts) -> Iterator[Finding]:
    """Look at the small numbers that ranks reduce, and at how many samples these come from."""
    for _, records in facts.rows("collective", "position", "group"):
        if _is_mean_of_means(facts, records):
            yield _mean_of_means(facts, records)
            return


def _is_mean_of_means(facts: Facts, records: list[Record]) -> bool:
    first = records[0]
    if first["op"] not in ("all_reduce", "reduce") or not first.get("values") or not all_floats(records):
        return False
    shares = [record["samples"] for record in records]
    is_mean = first.get("reduction") == "AVG" or first["divides"]
    return is_mean and min(shares) > 0 and not all_equal(shares) and not _carries_counts(facts, first, shares)


def all_floats(records: list[Record]) -> bool:
    """Return whether all ranks reduce fractions: counts are whole."""
    return all(any(not float(value).is_integer() for value in record.get("values") or []) for record in records)


def _carries_counts(facts: Facts, first: Record, shares: list[int]) -> bool:
    """Return whether the ranks' numbers of samples are reduced as well, about then."""
    for (position, _), records in facts.rows("collective", "position", "group"):
        if abs(position - first["position"]) > 3:
            continue
        columns = zip(*(record.get("values") or [] for record in records), strict=False)
        for column in columns:
            if all(float(value).is_integer() and value > 0 for value in column) and not all_equal(column):
                return True
            if [float(value) for value in column] == [float(share) for share in shares]:
                return True
    return False


def _mean_of_means(facts: Facts, records: list[Record]) -> Finding:
    first = records[0]
    shares = " and ".join(str(record["samples"]) for record in records)
    evaluated: list[Any] = []
    for record in facts.records[facts.ranks[0]]:
        if record is first:
            break
        if record["kind"] == "epoch":
            evaluated = record["where"]
    evidence = f"means over {shares} samples, of {say_ranks(facts.ranks)}, are averaged as equals"
    why = "the result is not the mean over the samples, and changes with the number of ranks"
    fix = "add up sums and counts, and divide then: `ddpkit.all_reduce_mean(mean, weight=count)`"
    where = in_function_of(first["where"], evaluated)
    return facts.finding("mean-of-means", evidence, why, fix, where, first["where"])


def _find_same_files(facts: Facts) -> Iterator[Finding]:
    """Find files that several ranks open for writing."""
    writers: dict[str, dict[int, Record]] = {}
    for rank, records in facts.of("file").items():
        for record in records:
            writers.setdefault(record["path"], {}).setdefault(rank, record)
    done = set()
    locked = {record["path"] for records in facts.of("locked").values() for record in records}
    for path, by_rank in writers.items():
        first = next(iter(by_rank.values()))
        where = place(first["where"])
        if len(by_rank) < 2 or where in done or path in locked:
            continue
        done.add(where)
        evidence = f"{say_ranks(sorted(by_rank))} write {os.path.basename(path)}"
        why = "the ranks overwrite each other: the file is the last one's, or a mixture"
        fix = "let one rank write, `if rank == 0:`, or put the rank into the name"
        severity = "suspicious" if first["appends"] else "wrong"
        ranks = sorted(by_rank)
        yield facts.finding("same-file", evidence, why, fix, first["where"], severity=severity, ranks=ranks)
