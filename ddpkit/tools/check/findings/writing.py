"""Find files that every rank writes."""

from __future__ import annotations

import os
from collections.abc import Iterator

from ...script.recorder import Record
from .facts import Facts, Finding, place, places, say_ranks


def find(facts: Facts) -> Iterator[Finding]:
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
        also = places(first["where"])[1:]
        yield Finding("same-file", severity, where, sorted(by_rank), evidence, why, fix, also)
