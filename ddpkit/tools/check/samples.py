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
_WORK_OF_ONE = "all ranks do the work of one: the gradient is that of one rank's samples"
_FEW = 8  # words: a choice that all ranks are to make alike takes as many


def find(facts: Facts) -> Iterator[Finding]:
    """Look at each loader, at its first epochs; loaders that one line makes have one bug."""
    training = facts.training
    done: set[str] = set()
    told: set[tuple[str, Place | None]] = set()
    for (loader, _), records in facts.rows("epoch", "loader", "number"):
        found = None if loader in done else _examine(facts, records, loader in training)
        if found is None:
            continue
        done.add(loader)
        if (found.kind, found.where) not in told:  # a function may make a loader each time it is called
            told.add((found.kind, found.where))
            yield found
    if not training:
        yield from _find_equal_inputs(facts)
    yield from _find_same_orders(facts, training)
    yield from islice(chain(_find_same_draws(facts), _find_same_noise(facts)), 1)


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
        fix = "let each rank take its share, `[rank::world_size]`, or draw with a seed of its own, `seed + rank`"
    elif not epoch["iterable"] and not agree(records, "plan"):  # then the dataset draws the samples
        lines = [*seeds, *lines]
        fix = "give each rank a seed of its own: `seed + rank`"
    else:
        lines = [epoch["made"], *lines]
        fix = "`DataLoader(dataset, sampler=DistributedSampler(dataset))`"
    evidence = f"the first {equal} batches are the same on {facts.who}"
    return facts.finding("same-samples", evidence, _WORK_OF_ONE, fix, *lines)


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
        fix = "draw the samples of each rank with a seed of its own, or let each take its share: `[rank::world_size]`"
        yield facts.finding("same-samples", evidence, _WORK_OF_ONE, fix, *lines)


def _find_repeated_batches(facts: Facts, epoch: Record, contents: list[int]) -> Finding | None:
    """Find batches that come several times in an epoch of one rank."""
    repeated = sum(number - 1 for content, number in Counter(contents).items() if content)
    if not repeated or epoch["workers"] < 2:
        return None
    evidence = f"{repeated} of the first {len(contents)} batches of rank 0 came before in the same epoch"
    why = f"each of the {epoch['workers']} workers reads all samples of its rank, so an epoch has them several times"
    fix = "share the samples out among workers, too: `get_worker_info().id` and `.num_workers`"
    return _about_sampler("samples-repeated", facts, epoch, evidence, why, fix)


# Compare the samples that a sampler deals with those that there are.


def _examine_plans(facts: Facts, records: list[Record], trains: bool) -> Finding | None:
    epoch = records[0]
    if any(record["replaces"] for record in records):
        return None
    if not agree(records, "dataset"):
        return _differently_ordered(facts, epoch) if trains and agree(records, "contents") else None
    plans = [record["plan"] for record in records]
    expected: set[int] = set()
    for record in records:
        expected |= set(range(record["total"]) if record["expected"] is None else record["expected"])
    total = len(expected)
    if all(len(plan) >= total for plan in plans):
        evidence = f"each of {facts.who} goes through all {total} samples in an epoch"
        why = f"an epoch is {facts.world_size} epochs, of which the ranks know nothing: schedules and logs are wrong"
        fix = "`DataLoader(dataset, sampler=DistributedSampler(dataset))`"
        return _about_sampler("samples-repeated", facts, epoch, evidence, why, fix) if trains else None
    dealt = {index for plan in plans for index in plan}
    missing = len(expected - dealt)
    extra = sum(map(len, plans)) - len(dealt)
    batch = int(epoch["batch_size"]) * facts.world_size
    padding = max(-total % facts.world_size, -total % batch)
    if extra <= padding:
        may_drop = batch - 1 if trains or epoch["drop_last"] else 0
        if missing > may_drop or _never_come(facts, epoch, missing):
            return _missing(facts, epoch, f"{missing} of {total}")
        return None
    if not trains or not missing or _come_in_runs(plans):
        return None
    evidence = f"of {total} samples, {missing} come on no rank and {extra} come again, in one epoch"
    why = "the ranks take their shares of orders that differ, so the shares overlap"
    fix = "give all ranks one seed, `DistributedSampler(dataset, seed=0)`, and one epoch, `sampler.set_epoch(epoch)`"
    return _about_sampler("shuffle-differs", facts, epoch, evidence, why, fix)


def _never_come(facts: Facts, epoch: Record, missing: int) -> bool:
    """Return whether a shuffled order leaves out the same samples in each epoch."""
    rows = [records for (loader, _), records in facts.rows("epoch", "loader", "number") if loader == epoch["loader"]]
    is_shuffled = any(records[0]["plan"] != epoch["plan"] for records in rows)
    return (
        missing > 1 and is_shuffled and all_equal([{i for r in records for i in r["plan"] or ()} for records in rows])
    )


def _missing(facts: Facts, epoch: Record, missing: str) -> Finding | None:
    if "Subset" in epoch["sampler"]:  # others are meant to be left out
        return None
    why = "the model never sees them, or they are in no metric"
    fix = "deal all samples, once: `DistributedSampler(dataset)`"
    return _about_sampler("samples-missing", facts, epoch, f"{missing} samples come on no rank", why, fix)


def _come_in_runs(plans: list[list[int]]) -> bool:
    """Return whether one order of all ranks repeats samples, each a few times in turn: that is meant."""
    if all_equal(plans):
        return False
    order: list[int] = [index for row in zip(*plans, strict=False) for index in row]
    runs = sum(one != other for one, other in pairwise(order)) + 1
    return runs <= len(set(order)) + len(plans)


def _about_sampler(kind: str, facts: Facts, epoch: Record, evidence: str, why: str, fix: str, *lines: Any) -> Finding:
    """Make a finding about a sampler: where it is defined if it is the script's, else where it was made."""
    return facts.finding(kind, evidence, why, fix, *lines, epoch["lines"], epoch["sampler_made"], epoch["made"])


def _differently_ordered(facts: Facts, epoch: Record) -> Finding:
    evidence = f"{facts.who} hold the same samples in different orders, and deal positions in them"
    why = "a position is another sample on each rank: some samples come twice, others never"
    fix = "leave the list in one order, or shuffle it with a seed that all ranks have: `random.Random(0).shuffle(x)`"
    return _about_sampler("shuffle-differs", facts, epoch, evidence, why, fix, *_seeded(facts, "shuffle"))


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
        evidence = f"{seen}: `set_epoch` is not called"
        why = "the same samples meet in the same batches, on the same rank, for ever"
        fix = "call `sampler.set_epoch(epoch)` at the head of each epoch"
        yield facts.finding("epoch-not-set", evidence, why, fix, first["where"], first["sampler_made"], first["made"])


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
    lines = {record["generator"]: record["where"] for record in facts.first("seeded")}
    return [lines[kind] for kind in kinds if kind in lines]


def _find_same_draws(facts: Facts) -> Iterator[Finding]:
    """Find datasets that draw the same numbers on all ranks for other samples."""
    for (worker, *_), records in sorted(facts.rows("fetch", "worker", "number", "step"), key=str):
        kinds = _equal_states([record["drawn"] for record in records], 0)
        if kinds and not agree(records, "content"):
            who = "the loaders" if worker is None else f"workers {worker}"
            evidence = f"{who} of {facts.who} draw from equal states of {', '.join(kinds)}"
            yield _same_numbers(facts, evidence, *_seeded(facts, *kinds), records[0]["lines"])


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
    yield _same_numbers(facts, evidence, own_lines, *_seeded(facts, *kinds))


def _same_numbers(facts: Facts, evidence: str, *lines: Any) -> Finding:
    why = "noise, dropout masks or augmentations are those of one rank, used several times: less variety"
    fix = "after the model is made, seed each rank on its own, `torch.manual_seed(seed + rank)`"
    fix += ", and what workers draw from by `torch.initial_seed() % 2**32`, in `worker_init_fn`"
    return facts.finding("same-random-numbers", evidence, why, fix, *lines)


def _equal_states(drawn: list[list[Record]], least: int) -> list[str]:
    """Name the generators from whose equal states all ranks draw so many words."""
    states = [{(e["generator"], e["state"]) for e in entries if e["words"] >= least} for entries in drawn]
    return sorted(kind for kind, _ in set.intersection(*states))
