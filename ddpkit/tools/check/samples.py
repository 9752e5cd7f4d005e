"""Find samples, or random numbers, that are the same on every rank, and samples that are missing or come again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import chain, islice, pairwise
from typing import Any

from ..recorder import Record
from .facts import Facts, Finding, agree, all_equal
from .source import Place, is_shared_out

_COMPARED = 3  # batches or steps that must be equal on all ranks, if there are as many
_FEW = 8  # words: a choice that all ranks are to make alike takes as many


def find(facts: Facts) -> Iterator[Finding]:
    """Look at each loader, at its first epochs."""
    training = facts.training
    done: set[str] = set()
    for (loader, _), records in facts.rows("epoch", "loader", "number"):
        found = None if loader in done else _examine(facts, records, loader in training)
        if found is not None:
            done.add(loader)
            yield found
    if not training:
        yield from _find_equal_inputs(facts)
    yield from islice(_find_unweighted(facts), 1)
    yield from _find_same_orders(facts, training)
    yield from islice(chain(_find_same_draws(facts), _find_same_noise(facts)), 1)


def find_alone(facts: Facts) -> Iterator[Finding]:
    """Find mistakes of one process: random numbers that come again, and a validation with training samples."""
    yield from islice(chain(_find_repeated_draws(facts), _find_repeated_noise(facts)), 1)
    yield from islice(_find_seen(facts), 1)


def _examine(facts: Facts, records: list[Record], trains: bool) -> Finding | None:
    """Look at one epoch of one loader."""
    epoch = records[0]
    key = epoch["loader"], epoch["number"]
    contents = []  # what each rank's batches held, as hashes
    for batches in facts.of("batch").values():
        contents.append([batch["content"] for batch in batches if (batch["loader"], batch["number"]) == key])
    if trains and (found := _find_same(facts, records, contents)):
        return found
    if epoch["iterable"]:
        return _find_repeated_batches(facts, epoch, contents[0]) if trains else None
    if all(record.get("plan") is not None for record in records):
        return _examine_plans(facts, records, trains)
    return None


def _find_same(facts: Facts, records: list[Record], contents: list[list[int]]) -> Finding | None:
    """Find ranks that train on the same samples."""
    epoch = records[0]
    number = min(map(len, contents))
    equal = 0
    while equal < number and contents[0][equal] and all_equal([batches[equal] for batches in contents]):
        equal += 1
    if not equal or equal < min(number, _COMPARED):
        return None
    lines = [epoch["sampler_made"], epoch["made"]]
    seeds = _seeded(facts, "random", "numpy", "torch")
    if epoch["lines"]:
        lines = [epoch["lines"], *lines, *seeds]
        rule = "same-by-sampler"
    elif not epoch["iterable"] and not agree(records, "plan"):  # then the dataset draws the samples
        lines = [*seeds, *lines]
        rule = "same-by-seed"
    else:
        lines = [epoch["made"], *lines]
        rule = "same-by-loader"
    evidence = f"the first {equal} batches are the same on {facts.who}"
    return facts.finding(rule, evidence, *lines)


def _find_unweighted(facts: Facts) -> Iterator[Finding]:
    """Find loaders of ddpkit whose unequal shares are averaged as equal ones, also in batches after the cut."""
    backward = [step["backward"] for step in facts.first("step")[:1]]
    for record in facts.first("epoch end"):
        if record["shares"]:
            yield facts.finding("shares-unweighted", record["shares"], *backward)


def _find_equal_inputs(facts: Facts) -> Iterator[Finding]:
    """Find ranks that give their networks the same inputs at each step, where no loader is used."""
    rows = [records for records in facts.steps if all(record["calls"] for record in records)][:_COMPARED]
    for records in rows:
        inputs = [[call["input"] for call in record["calls"] if call["input"]] for record in records]
        if not inputs[0] or not all_equal(inputs):
            return
    if rows:
        lines = [rows[0][0]["calls"][0]["where"], *_seeded(facts, "torch", "numpy", "random")]
        evidence = f"at each of {len(rows)} steps the inputs are the same on {facts.who}"
        yield facts.finding("same-inputs", evidence, *lines)


def _find_repeated_batches(facts: Facts, epoch: Record, contents: list[int]) -> Finding | None:
    """Find batches that come several times in an epoch of one rank."""
    repeated = sum(number - 1 for content, number in Counter(contents).items() if content)
    if not repeated or epoch["workers"] < 2:
        return None
    evidence = f"{repeated} of the first {len(contents)} batches of rank 0 repeat earlier ones of the epoch"
    return _about_sampler("read-by-each-worker", facts, epoch, evidence)


# Compare the samples that a sampler deals with those that there are.


def _examine_plans(facts: Facts, records: list[Record], trains: bool) -> Finding | None:
    epoch = records[0]
    plans = [record["plan"] for record in records]
    if any(record["replaces"] for record in records) or any(len(set(plan)) < len(plan) for plan in plans):
        return None  # a sample comes again on one rank: they are drawn with replacement
    if not agree(records, "dataset"):
        return _differently_ordered(facts, epoch) if trains and agree(records, "contents") else None
    parts: list[set[int]] = []
    for record in records:
        parts.append(set(range(record["total"]) if record["expected"] is None else record["expected"]))
    expected = set.union(*parts)
    total = len(expected)
    if not all_equal(parts) and parts[0].intersection(*parts):
        return _differently_split(facts, records, parts) if trains else None
    if all(len(plan) >= total for plan in plans):
        evidence = f"each of {facts.who} goes through all {total} samples in an epoch"
        found = _about_sampler("all-samples-on-each", facts, epoch, evidence)
        return found if trains else None
    dealt = {index for plan in plans for index in plan}
    missing = len(expected - dealt)
    extra = sum(map(len, plans)) - len(dealt)
    batch = int(epoch["batch_size"]) * facts.world_size
    padding = max(-total % facts.world_size, -total % batch)
    if extra <= padding:
        may_drop = batch - 1 if trains or epoch["drop_last"] else 0
        return _missing(facts, epoch, expected, may_drop)
    is_partition = abs(sum(map(len, plans)) - total) < batch + facts.world_size
    if not trains or not missing or not is_partition or _come_in_runs(plans):
        return None
    evidence = f"in one epoch of {total} samples, {missing} reach no rank and {extra} come again"
    return _about_sampler("shuffle-differs", facts, epoch, evidence)


def _missing(facts: Facts, epoch: Record, expected: set[int], may_drop: int) -> Finding | None:
    """Find samples that no rank gets in any epoch that was seen, where each deals the same ones."""
    rows = [records for (loader, _), records in facts.rows("epoch", "loader", "number") if loader == epoch["loader"]]
    dealt = [{index for record in records for index in record["plan"] or ()} for records in rows]
    missing = len(expected - dealt[0])
    is_shuffled = any(records[0]["plan"] != epoch["plan"] for records in rows)
    is_part = not all_equal(dealt) and epoch["sampler"] != "DistributedSampler"
    is_meant = "Subset" in epoch["sampler"] or is_part or (missing < 2 and is_shuffled)
    if is_meant or (missing <= may_drop and not is_shuffled):
        return None
    evidence = f"{missing} of {len(expected)} samples reach no rank"
    return _about_sampler("samples-missing", facts, epoch, evidence)


def _come_in_runs(plans: list[list[int]]) -> bool:
    """Return whether one order of all ranks repeats samples, each a few times in turn: that is meant."""
    if all_equal(plans):
        return False
    order: list[int] = [index for row in zip(*plans, strict=False) for index in row]
    runs = sum(one != other for one, other in pairwise(order)) + 1
    return runs <= len(set(order)) + len(plans)


def _about_sampler(rule: str, facts: Facts, epoch: Record, evidence: str, *lines: Any) -> Finding:
    """Make a finding about a sampler: where it is defined if it is the script's, else where it was made."""
    return facts.finding(rule, evidence, *lines, epoch["lines"], epoch["sampler_made"], epoch["made"])


def _differently_ordered(facts: Facts, epoch: Record) -> Finding:
    evidence = f"{facts.who} hold the same samples in different orders, and share out indices"
    return _about_sampler("order-differs", facts, epoch, evidence, *_seeded(facts, "shuffle"))


def _differently_split(facts: Facts, records: list[Record], parts: list[set[int]]) -> Finding:
    """Explain parts of one dataset that overlap, and look for samples of a validation that another rank trains on."""
    others = len(parts[0] - parts[0].intersection(*parts))
    evidence = f"{facts.who} hold different parts of the samples: {others} of rank 0's {len(parts[0])} are not in all"
    trained = set.union(*parts)
    for _, rows in facts.rows("epoch", "loader", "number"):
        held = set(rows[0]["expected"] or ())
        if rows[0]["loader"] not in facts.training and rows[0]["dataset"] == records[0]["dataset"] and held & trained:
            evidence += f"; {len(held & trained)} of the {len(held)} that rank 0 validates on are trained on elsewhere"
            break
    epoch = records[0]
    return facts.finding("split-differs", evidence, epoch["split"], *_seeded(facts, "torch"), epoch["made"])


def _find_same_orders(facts: Facts, training: set[str]) -> Iterator[Finding]:
    """Find loaders that deal the same order in each epoch, because nobody calls `set_epoch`."""
    for records in _epochs_of_lines(facts, training):
        first = records[0]
        plan = first.get("plan")
        if not first["has_epoch"] or not plan or plan == sorted(plan):
            continue
        if len(records) < 2 or not agree(records, "plan"):
            continue
        seen = f"{len(records)} epochs have the same order of the {len(plan)} samples of rank 0"
        calls = [record for record in facts.first("set epoch") if record["sampler"] == first["sampler"]]
        rule, how, lines = "epoch-not-set", "is not called", first["where"]
        if calls and agree(calls, "epoch"):
            rule, how, lines = "epoch-constant", f"gets {calls[0]['epoch']} each time", calls[0]["where"]
        elif calls:
            rule, how, lines = "epoch-unused", "is called, and the order does not depend on it", first["lines"]
        evidence = f"{seen}: `set_epoch` {how}"
        yield facts.finding(rule, evidence, lines, first["where"], first["sampler_made"], first["made"])


def _epochs_of_lines(facts: Facts, training: set[str]) -> list[list[Record]]:
    """Put together the epochs of each loader, and of loaders which one line makes anew for each epoch."""
    epochs: dict[str, list[Record]] = {}
    for record in facts.first("epoch"):
        if record["loader"] in training:
            epochs.setdefault(record["loader"], []).append(record)
    is_one_training = len(facts.first("optimizer")) == 1
    found: dict[tuple[str, str], list[Record]] = {}
    for loader, records in epochs.items():
        key = loader, ""
        if len(records) == 1 and is_one_training:  # perhaps of the same data
            key = loader.rpartition("#")[0], records[0].get("dataset", "")
        found.setdefault(key, []).extend(records)
    return list(found.values())


# Find random numbers that are the same on every rank.


def _seeded(facts: Facts, *kinds: str) -> list[list[Any]]:
    """List where the script has last seeded each of some generators."""
    seeded = facts.first("seeded")
    early = [record for record in seeded if not record["step"]]
    lines = {record["generator"]: record["where"] for record in early or seeded}
    return [lines[kind] for kind in kinds if kind in lines]


def _find_same_draws(facts: Facts) -> Iterator[Finding]:
    """Find datasets that draw the same numbers on all ranks for other samples."""
    for (worker, *_), records in sorted(facts.rows("fetch", "worker", "number", "step"), key=str):
        kinds = _equal_states([record["drawn"] for record in records], 0)
        if kinds and not agree(records, "content"):
            who = "the loaders" if worker is None else f"workers {worker}"
            evidence = f"{who} of {facts.who} draw from equal states of {', '.join(kinds)}"
            yield facts.finding("same-random-numbers", evidence, *_seeded(facts, *kinds), records[0]["lines"])


def _find_same_noise(facts: Facts) -> Iterator[Finding]:
    """Find noise and dropout that are the same on all ranks at each step."""
    rows = [records for records in facts.steps if all(record["random"]["drawn"] for record in records)]
    drawn = [[record["random"]["drawn"] for record in records] for records in rows[:_COMPARED]]
    kinds = sorted(set.intersection(*(set(_equal_states(each, _FEW)) for each in drawn))) if len(rows) > 1 else []
    if not kinds:
        return
    lines: list[Any] = max((records[0]["random"]["lines"] for records in rows), key=len)
    own_lines = [line for line in lines if not is_shared_out(Place(*line))]
    if lines and not own_lines:
        return
    evidence = f"at each of {len(drawn)} steps {facts.who} draw from equal states of {', '.join(kinds)}"
    yield facts.finding("same-random-numbers", evidence, *_seeded(facts, *kinds), own_lines)


def _find_repeated_draws(facts: Facts) -> Iterator[Finding]:
    """Find workers that draw in each epoch what they have drawn in the one before."""
    fetches: dict[tuple[Any, ...], list[Record]] = {}
    for record in facts.first("fetch"):
        if record["worker"] is not None and record["loader"] in facts.training:
            fetches.setdefault((record["loader"], record["worker"], record["number"]), []).append(record)
    for (_, worker, _), records in fetches.items():
        kinds = _equal_states([record["drawn"] for record in records], 0) if len(records) > 1 else []
        if kinds:
            evidence = f"in {len(records)} epochs workers {worker} draw from equal states of {', '.join(kinds)}"
            yield facts.finding("random-numbers-repeat", evidence, *_seeded(facts, *kinds), records[0]["lines"])


def _find_repeated_noise(facts: Facts) -> Iterator[Finding]:
    """Find steps that draw what an earlier one has drawn; each does, if it is from a generator of the script."""
    steps = [record for record in facts.first("step") if record["optimizer"] == 0]
    drawn = [{(e["generator"], e["state"]) for e in r["random"]["drawn"] if e["words"] >= _FEW} for r in steps]
    always = set.intersection(*drawn) if drawn else set()
    seen: set[tuple[str, int]] = set()
    for number, states in enumerate(drawn):
        again = {kind for kind, state in states & seen if kind != "a generator" or (kind, state) in always}
        if again and (number > 1 or "a generator" not in again):
            evidence = f"step {number + 1} draws from the same states of {', '.join(sorted(again))} as an earlier one"
            late = [r["where"] for r in facts.first("seeded") if r["step"] and r["generator"] in again]
            yield facts.finding("random-numbers-repeat", evidence, *late[:1], steps[number]["random"]["lines"])
        seen |= states


def _find_seen(facts: Facts) -> Iterator[Finding]:
    """Find an evaluation on a part of the training samples, if there is none on others."""
    if len(facts.first("optimizer")) > 1:  # perhaps of folds
        return
    bases = {record["loader"]: record.get("base") for record in facts.first("epoch")}
    used: dict[str, set[Any]] = {loader: set() for loader in bases}
    for record in facts.all("epoch"):
        base = bases.get(record["loader"])
        used.setdefault(record["loader"], set()).update((base, index) for index in record.get("plan") or ())
    trained = {sample for loader in facts.training for sample in used.get(loader, ())}
    others = {loader: samples for loader, samples in used.items() if loader not in facts.training and samples}
    for loader, samples in others.items():
        if all(not trained.isdisjoint(other) and not trained <= other for other in others.values()):
            first = next(record for record in facts.first("epoch") if record["loader"] == loader)
            evidence = f"{len(trained & samples)} of the {len(samples)} samples of this loader are trained on"
            yield facts.finding("validation-seen", evidence, first["made"], first["split"])


def _equal_states(drawn: list[list[Record]], least: int) -> list[str]:
    """Name the generators from whose equal states all ranks draw so many words."""
    states = [{(e["generator"], e["state"]) for e in entries if e["words"] >= least} for entries in drawn]
    return sorted(kind for kind, _ in set.intersection(*states))
