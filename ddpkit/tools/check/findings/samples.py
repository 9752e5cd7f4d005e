"""Find samples that are the same on every rank, missing, repeated, or dealt in orders that do not fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from ...script.recorder import Record
from .facts import Facts, Finding, all_equal, place, places, say_ranks

_CLOSE = 0.1  # share of a stream's samples that may be left out, as broken ones, or come again
_COMPARED = 3  # batches that must be equal on all ranks, if there are as many
_SHARE_OUT = "one share for each worker of each rank: `[rank * num_workers + id :: world_size * num_workers]`"


def find(facts: Facts) -> Iterator[Finding]:
    """Look at each loader once, at its first epochs; loaders that one line makes have one bug."""
    training = facts.training
    done: set[str] = set()
    told: set[tuple[str, object]] = set()
    for (loader, number), records in facts.rows("epoch", "loader", "number"):
        trains = loader in training
        found = None
        if loader not in done:
            found = _examine(facts, records, number, trains)
        if found is None:
            continue
        done.add(loader)
        bugs: set[tuple[str, object]] = {(found.kind, _line_of(loader)), (found.kind, found.where)}
        if not bugs & told:  # a function may make a loader each time it is called
            yield found
        told |= bugs
    if not training:
        yield from _find_equal_inputs(facts)
    yield from _find_same_orders(facts, training, done)


def _line_of(loader: str) -> str:
    """Name the line that made a loader."""
    return loader.rpartition("#")[0]


def _examine(facts: Facts, records: list[Record], number: int, trains: bool) -> Finding | None:
    """Look at one epoch of one loader."""
    contents = _contents(facts, records[0]["loader"], number)
    if trains and (found := _find_same(facts, records, contents)):
        return found
    if records[0]["iterable"]:
        found = _find_repeated_batches(facts, records, contents)
        return found or _compare_with_length(facts, records, number)
    if all(record.get("plan") is not None for record in records):
        return _examine_plans(facts, records, trains)
    return None


def _contents(facts: Facts, loader: str, number: int) -> list[list[int]]:
    """List what each rank's batches of an epoch held, as hashes."""
    found = []
    for batches in facts.of("batch").values():
        found.append([b["content"] for b in batches if (b["loader"], b["number"]) == (loader, number)])
    return found


def _find_same(facts: Facts, records: list[Record], contents: list[list[int]]) -> Finding | None:
    """Find ranks that train on the same samples."""
    first = records[0]
    number = min(map(len, contents))
    equal = 0
    while equal < number and contents[0][equal] and all_equal([batches[equal] for batches in contents]):
        equal += 1
    plans = [record.get("plan") for record in records]
    are_planned = plans[0] is not None and all_equal(plans) and all_equal([record["dataset"] for record in records])
    draws = _draws(facts, first["loader"])
    if not (equal and equal >= min(number, _COMPARED)) and not (are_planned and number and draws):
        return None
    lines, fix = _cause_of_same(facts, first, draws, are_planned)
    batches = min(equal, number) or number
    evidence = f"the first {batches} batches are the same on {say_ranks(facts.ranks)}"
    why = f"{facts.world_size} ranks do the work of one: the gradient is that of one rank's samples"
    return facts.finding("same-samples", evidence, why, fix, *lines)


def _draws(facts: Facts, loader: str) -> dict[str, Any]:
    """Return a record of a fetch that drew the same numbers on all ranks, {} if there is none."""
    for (_, _, _), records in facts.rows("fetch", "loader", "worker", "number"):
        common = set(records[0]["drawn"].items())
        for record in records:
            common &= set(record["drawn"].items())
        if common and records[0]["loader"] == loader:
            return {"kinds": [kind for kind, _ in common], "lines": records[0]["lines"]}
    return {}


def _cause_of_same(facts: Facts, epoch: Record, draws: Record, are_planned: bool) -> tuple[list[Any], str]:
    made = [epoch["sampler_made"], epoch["made"]]
    if draws and not are_planned:
        return [
            _seeded(facts, draws["kinds"]),
            draws["lines"],
            *made,
        ], "give each rank a seed of its own: `seed + rank`"
    if epoch["lines"]:
        return [epoch["lines"], *made], "let each rank take its share: `[rank::world_size]`"
    return [epoch["made"], *made], "`DataLoader(dataset, sampler=DistributedSampler(dataset))`"


def _seeded(facts: Facts, kinds: list[str]) -> list[Any]:
    """Return where the first of some generators was last seeded by the script."""
    for record in reversed(facts.of("seeded")[facts.ranks[0]]):
        if record["generator"] in kinds:
            stack: list[Any] = record["where"]
            return stack
    return []


def _find_repeated_batches(facts: Facts, records: list[Record], contents: list[list[int]]) -> Finding | None:
    """Find batches that come several times in an epoch of one rank."""
    epoch = records[0]
    counts = Counter(content for content in contents[0] if content)
    repeated = sum(number - 1 for number in counts.values())
    if not repeated or epoch["workers"] < 2:
        return None
    evidence = f"{repeated} of the first {len(contents[0])} batches of rank 0 came before in the same epoch"
    why = f"each of the {epoch['workers']} workers reads all samples of its rank, so an epoch has them several times"
    fix = "share the samples out among workers, too: `get_worker_info().id` and `.num_workers`"
    return facts.finding("samples-repeated", evidence, why, fix, epoch["lines"], epoch["made"])


def _compare_with_length(facts: Facts, records: list[Record], number: int) -> Finding | None:
    """Find a stream of which the ranks read fewer or more samples in a whole epoch than its length.

    The length may be that of the whole stream, or of one rank's part; and several ranks may read the
    same part on purpose, as those do that share a model.
    """
    epoch = records[0]
    ends = dict(facts.rows("epoch end", "loader", "number")).get((epoch["loader"], number), [])
    lengths = [record["length"] for record in records]
    if not ends or any(end["cut"] for end in ends) or None in lengths:
        return None
    bounds = [_samples_read(record, end["batches"]) for record, end in zip(records, ends, strict=True)]
    least = sum(bound[0] for bound in bounds)
    most = sum(bound[1] for bound in bounds)
    length = max(lengths)
    sharing = [n for n in range(1, facts.world_size) if facts.world_size % n == 0]  # of a model
    for meant in (*(n * length for n in sharing), sum(lengths)):
        if least <= (1 + _CLOSE) * meant and most >= (1 - _CLOSE) * meant:
            return None
    kind = "samples-repeated"
    number_read = f"at least {least}"
    why = "samples come several times in an epoch"
    if most < length:
        kind = "samples-missing"
        number_read = f"at most {most}"
        why = "samples come on no rank"
    why += ", unless the length is wrong; then `len(loader)` is, and schedules that are made by it"
    evidence = f"{say_ranks(facts.ranks)} read {number_read} samples in an epoch; the stream's length is {length}"
    where = place(epoch["lines"]) or place(epoch["made"])
    fix = _SHARE_OUT
    if where is not None and where.function == "shard":
        fix = "parts that together are the whole: `[index::num_shards]`"
    also = places(epoch["lines"], epoch["made"])
    return Finding(kind, "suspicious", where, facts.ranks, evidence, why, fix, also)


def _samples_read(epoch: Record, batches: int) -> tuple[int, int]:
    """Return the smallest and the largest number of samples that a rank's workers may have read.

    The last batch of each worker may be short, or left out.
    """
    size = epoch["batch_size"]
    readers = max(epoch["workers"], 1)
    if epoch["drop_last"]:
        return batches * size, batches * size + readers * (size - 1)
    return batches * size - min(batches, readers) * (size - 1), batches * size


def _examine_plans(facts: Facts, records: list[Record], trains: bool) -> Finding | None:
    """Compare the samples that a sampler deals with those that there are."""
    epoch = records[0]
    if any(record["replaces"] for record in records):
        return None
    if not all_equal([record["dataset"] for record in records]):
        if all_equal([record["contents"] for record in records]) and trains:
            return _differently_ordered(facts, epoch)
        return None
    plans = [record["plan"] for record in records]
    expected: set[int] = set()
    for record in records:
        expected |= set(record["expected"] if record["expected"] is not None else range(record["total"]))
    counts = Counter(index for plan in plans for index in plan)
    dealt = sum(map(len, plans))
    missing = len(expected - counts.keys())
    extra = dealt - len(counts)
    batch = int(epoch["batch_size"]) * facts.world_size
    padding = -len(expected) % facts.world_size
    allowed = max(padding, -len(expected) % batch)
    if all(len(plan) >= len(expected) for plan in plans):
        return _all_on_each(facts, epoch, expected) if trains else None
    if extra > allowed and _come_in_runs(plans):
        return None
    if extra > allowed and missing:
        found = _find_other_epochs(facts, records)
        return found or _shuffled_differently(facts, epoch, missing, extra, len(expected))
    if extra > allowed:
        return _repeated(facts, epoch, extra, len(expected))
    return _missing(facts, records, missing, len(expected), batch, trains)


def _come_in_runs(plans: list[list[int]]) -> bool:
    """Return whether one order of all ranks repeats samples, each a few times in turn: that is meant."""
    if all_equal(plans):
        return False
    order: list[int] = [index for row in zip(*plans, strict=False) for index in row]
    runs = sum(one != other for one, other in pairwise(order)) + 1
    return runs <= len(set(order)) + len(plans)


def _all_on_each(facts: Facts, epoch: Record, expected: set[int]) -> Finding:
    evidence = f"each of {say_ranks(facts.ranks)} goes through all {len(expected)} samples in an epoch"
    why = f"an epoch is {facts.world_size} epochs, of which the ranks know nothing: schedules and logs are wrong"
    fix = "`DataLoader(dataset, sampler=DistributedSampler(dataset))`"
    return _about_sampler("samples-repeated", facts, epoch, evidence, why, fix)


def _about_sampler(
    kind: str, facts: Facts, epoch: Record, evidence: str, why: str, fix: str, *lines: Sequence[Any]
) -> Finding:
    """Make a finding about a sampler: where it is defined if it is the script's, else where it was made."""
    return facts.finding(kind, evidence, why, fix, *lines, epoch["lines"], epoch["sampler_made"], epoch["made"])


def _differently_ordered(facts: Facts, epoch: Record) -> Finding:
    evidence = f"{say_ranks(facts.ranks)} hold the same samples in different orders, and deal positions in them"
    why = "a position is another sample on each rank: some samples come twice, others never"
    fix = "leave the list in one order, or shuffle it with a seed that all ranks have: `random.Random(0).shuffle(x)`"
    return _about_sampler("shuffle-differs", facts, epoch, evidence, why, fix, _seeded(facts, ["shuffle"]))


def _find_other_epochs(facts: Facts, records: list[Record]) -> Finding | None:
    """Find ranks that tell their samplers different epochs."""
    told = [record["last_set"] for record in records]
    if None in told or all_equal([entry["epoch"] for entry in told]):
        return None
    numbers = " and ".join(str(entry["epoch"]) for entry in told)
    evidence = f"{say_ranks(facts.ranks)} tell their samplers that this is epoch {numbers}"
    why = "they shuffle in different orders, so that their shares overlap, and do not end together"
    fix = "let rank 0 tell the others where to begin: `dist.broadcast(start, src=0)`"
    return facts.finding("one-rank-decides", evidence, why, fix, told[0]["where"])


def _shuffled_differently(facts: Facts, epoch: Record, missing: int, extra: int, total: int) -> Finding:
    evidence = f"of {total} samples, {missing} come on no rank and {extra} come again, in one epoch"
    why = "the ranks take their shares of orders that differ, so the shares overlap"
    fix = "shuffle with one seed on all ranks: `DistributedSampler(dataset, seed=0)`"
    return _about_sampler("shuffle-differs", facts, epoch, evidence, why, fix)


def _repeated(facts: Facts, epoch: Record, extra: int, total: int) -> Finding:
    evidence = f"{extra} samples of an epoch come again, of {total} that there are; padding explains fewer"
    why = "these samples count more than others"
    fix = "deal each sample once: `DistributedSampler(dataset)`"
    return _about_sampler("samples-repeated", facts, epoch, evidence, why, fix)


def _missing(
    facts: Facts,
    records: list[Record],
    missing: int,
    total: int,
    batch: int,
    trains: bool,
) -> Finding | None:
    epoch = records[0]
    allowed = 0
    if epoch["drop_last"]:
        allowed = batch - 1
    elif epoch["sampler"] not in ("DistributedSampler", "SequentialSampler", "RandomSampler"):
        allowed = batch - 1 if trains else 0
    if missing <= allowed and not _never_come(facts, records, missing):
        return None
    evidence = f"{missing} of {total} samples come on no rank"
    why = "the model never sees them" if trains else "they are in no metric"
    fix = "deal all samples: `DistributedSampler(dataset)`"
    return _about_sampler("samples-missing", facts, epoch, evidence, why, fix)


def _never_come(facts: Facts, records: list[Record], missing: int) -> bool:
    """Return whether a shuffled order leaves out the same samples in each epoch."""
    left_out = []
    orders = []
    for (loader, _), epochs in facts.rows("epoch", "loader", "number"):
        if loader == records[0]["loader"]:
            dealt = {index for epoch in epochs for index in epoch["plan"]}
            left_out.append(frozenset(range(epochs[0]["total"])) - dealt)
            orders.append(epochs[0]["plan"])
    is_shuffled = len(orders) > 1 and orders[0] != orders[1]
    return bool(missing) and is_shuffled and all_equal(left_out)


def _find_same_orders(facts: Facts, training: set[str], done: set[str]) -> Iterator[Finding]:
    """Find loaders that deal the same order in each epoch, or will, because nobody calls `set_epoch`."""
    for records in _epochs_of_lines(facts, training):
        first = records[0]
        plan = first.get("plan")
        if not first["has_epoch"] or not plan or plan == sorted(plan):
            continue
        if len(records) < 2 or not all_equal([record["plan"] for record in records]):
            continue
        seen = f"{len(records)} epochs have the same order of the {len(plan)} samples of rank 0"
        evidence = f"{seen}: `set_epoch` is not called"
        why = "the same samples meet in the same batches, on the same rank, for ever"
        fix = "call `sampler.set_epoch(epoch)` at the head of each epoch"
        yield facts.finding("epoch-not-set", evidence, why, fix, first["where"], first["sampler_made"], first["made"])


def _epochs_of_lines(facts: Facts, training: set[str]) -> list[list[Record]]:
    """Put together the epochs of each loader, and of loaders which one line makes anew for each epoch."""
    epochs: dict[str, list[Record]] = {}
    for record in facts.of("epoch")[facts.ranks[0]]:
        if record["loader"] in training:
            epochs.setdefault(record["loader"], []).append(record)
    found: dict[tuple[Any, ...], list[Record]] = {}
    for loader, records in epochs.items():
        key: tuple[Any, ...] = (loader,)
        if len(records) == 1:  # of the same data, for the same optimizer
            key = (_line_of(loader), records[0].get("dataset"), _optimizers_after(facts, records[0]))
        found.setdefault(key, []).extend(records)
    return list(found.values())


def _optimizers_after(facts: Facts, epoch: Record) -> int:
    """Count the optimizers that make their first step after an epoch, when another one has begun."""
    records = facts.records[facts.ranks[0]]
    later = records[records.index(epoch) + 1 :]
    ends = [number for number, record in enumerate(later) if record["kind"] == "epoch"]
    return sum(record["kind"] == "optimizer" for record in later[ends[0] :]) if ends else 0


def _find_equal_inputs(facts: Facts) -> Iterator[Finding]:
    """Find ranks that give their networks the same inputs at each step, where no loader is used."""
    steps = facts.rows("step", "optimizer", "number")
    rows = [records for _, records in steps if all(record["calls"] for record in records)]
    if not rows:
        return
    for records in rows[:_COMPARED]:
        inputs = [[call["input"] for call in record["calls"] if call["input"]] for record in records]
        if not inputs[0] or not all_equal(inputs):
            return
    call = rows[0][0]["calls"][0]
    seeded = _seeded(facts, ["torch", "numpy", "random"])
    evidence = f"at each of {min(len(rows), _COMPARED)} steps the inputs are the same on {say_ranks(facts.ranks)}"
    why = f"{facts.world_size} ranks do the work of one: the gradient is that of one rank's samples"
    fix = "draw the samples of each rank with a seed of its own, or let each take its share: `[rank::world_size]`"
    yield facts.finding("same-samples", evidence, why, fix, call["where"], seeded)
