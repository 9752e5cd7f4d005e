"""Find random numbers that are the same on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...script.recorder import Record
from ..places import Place, is_shared_out
from .facts import Facts, Finding, say_ranks

_FEW = 8  # words: a choice that all ranks are to make alike takes as many


def find(facts: Facts) -> Iterator[Finding]:
    """Compare the states of the generators from which training draws."""
    found = _find_in_loaders(facts) or _find_in_steps(facts)
    if found is not None:
        yield found


def _find_in_loaders(facts: Facts) -> Finding | None:
    """Find datasets that draw the same numbers on all ranks for other samples."""
    for (loader, worker, _), records in facts.rows("fetch", "loader", "worker", "number"):
        common = set(records[0]["drawn"].items())
        for record in records[1:]:
            common &= set(record["drawn"].items())
        if not common or _same_content(facts, loader):
            continue
        who = "the loaders" if worker is None else f"workers {worker}"
        kinds = sorted(kind for kind, _ in common)
        evidence = f"{who} of {say_ranks(facts.ranks)} draw from equal states of {', '.join(kinds)}"
        return _same(facts, evidence, records[0]["lines"], kinds)
    return None


def _same_content(facts: Facts, loader: str) -> bool:
    """Return whether the ranks' first batches are equal, which is another bug."""
    for (other, _, _), records in facts.rows("batch", "loader", "number", "batch"):
        if other == loader:
            return len({record["content"] for record in records}) == 1
    return False


def _find_in_steps(facts: Facts) -> Finding | None:
    """Find noise and dropout that are the same on all ranks at each step."""
    rows = [records for _, records in facts.rows("step", "optimizer", "number")]
    rows = [records for records in rows if all(record["random"]["drawn"] for record in records)]
    kinds: set[str] | None = None
    for records in rows[:3]:
        common = _common(records)
        kinds = common if kinds is None else kinds & common
    if not kinds or len(rows) < 2:
        return None
    drawing = max((records[0]["random"] for records in rows), key=_number_of_lines)
    lines = drawing["lines"]
    own_lines = [line for line in lines if not is_shared_out(Place(*line))]
    if lines and not own_lines:
        return None
    names = ", ".join(sorted(kinds))
    evidence = f"at each of {min(3, len(rows))} steps {say_ranks(facts.ranks)} draw from equal states of {names}"
    return _same(facts, evidence, own_lines, sorted(kinds))


def _number_of_lines(drawing: Record) -> int:
    return len(drawing["lines"])


def _common(records: list[Any]) -> set[str]:
    """Name the generators from whose equal states all ranks draw more than a few numbers."""
    drawn = []
    for record in records:
        entries = [entry for entry in record["random"]["drawn"] if entry["generator"] != "random"]
        drawn.append({(e["generator"], e["state"]) for e in entries if e["words"] >= _FEW or e["words"] < 0})
    return {kind for kind, _ in set.intersection(*drawn)}


def _same(facts: Facts, evidence: str, lines: list[Any], kinds: list[str]) -> Finding:
    why = "noise, dropout masks or augmentations are those of one rank, used several times: less variety"
    fix = "after the model is made, seed each rank on its own: `torch.manual_seed(seed + rank)`"
    seeds = [r for r in facts.of("seeded")[facts.ranks[0]] if r["generator"] in kinds]
    seeded = seeds[-1]["where"] if seeds else []
    if seeds and seeds[-1]["worker"]:
        lines = []
        fix = "leave the seeds of workers to torch, or derive them from its own: `torch.initial_seed() % 2**32`"
    return facts.finding("same-random-numbers", evidence, why, fix, lines, seeded)
