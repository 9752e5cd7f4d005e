"""Find files that every rank writes, and states that are saved with the names of wrappers."""

from __future__ import annotations

import os
from collections.abc import Iterator

from ...script.recorder import Record
from .facts import Facts, Finding, place, places, say_ranks


def find(facts: Facts) -> Iterator[Finding]:
    """Look at files and saved states."""
    yield from _find_same_files(facts)
    yield from _find_prefixes(facts)


def _find_same_files(facts: Facts) -> Iterator[Finding]:
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


def _find_prefixes(facts: Facts) -> Iterator[Finding]:
    done = set()
    loaded = [record["keys"] for records in facts.of("wrapper loads").values() for record in records]
    for rank, records in facts.of("saved").items():
        for record in records:
            where = place(record["where"])
            if where in done or record["loads"] or record["keys"] in loaded:
                continue
            done.add(where)
            evidence = f"{record['number']} saved tensors are called `{record['keys'][0]}` and so on"
            why = "the file loads only into a model that is wrapped in the same way"
            fix = "save the state of the module inside: `model.module.state_dict()`"
            also = places(record["where"])[1:]
            yield Finding("wrapper-prefix", "wrong", where, [rank], evidence, why, fix, also)
