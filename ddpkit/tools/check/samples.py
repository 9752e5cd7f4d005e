"""Find samples that are the same on every rank, that are missing or come again, and orders that do not change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import chain, islice, pairwise, takewhile

from .facts import Facts, Finding, Findings, Lines, agree, all_equal, by_fields, first_of
from .observed import Batch, Epoch, EpochEnd, EpochSet, Optimized, Step, Trains
from .random_numbers import seeding

_COMPARED = 3  # batches or steps that must be equal on all ranks, if there are as many


def _of_loaders(facts: Facts) -> Findings:
    """Look at the epochs of each loader until something is found."""
    done: set[str] = set()
    for row in facts.epochs:
        loader = row[0].loader
        if loader in done:
            continue
        for finding in islice(_examine(facts, row), 1):
            done.add(loader)
            yield finding


def _examine(facts: Facts, row: list[Epoch]) -> Findings:
    """Look at one epoch of one loader."""
    epoch = row[0]
    trains = any(seen.loader == epoch.loader for seen, *_ in facts.rows(Trains, "loader"))  # on all ranks
    contents = []  # what each rank's batches held, as hashes
    for batches in facts.of(Batch).values():
        own = [batch for batch in batches if batch[:2] == epoch[:2]]
        contents.append([batch.content for batch in own])
    if _is_preview(facts, epoch):
        return
    if trains:
        yield from _same(facts, row, contents)
    if epoch.iterable:
        yield from _repeated_batches(facts, epoch, contents[0]) if trains else ()
    elif all(each.plan is not None for each in row):
        yield from _examine_plans(facts, row, trains)


def _is_preview(facts: Facts, epoch: Epoch) -> bool:
    """Return whether an epoch has one batch, for which no step was made before others were taken: it was only shown."""
    own = [batch for batch in facts.first(Batch) if batch[:2] == epoch[:2]]
    later = [batch.step for batch in facts.first(Batch) if batch[:2] != epoch[:2]]
    return len(own) == 1 and own[0].step in later


def _same(facts: Facts, row: list[Epoch], contents: list[list[int]]) -> Findings:
    """Find ranks that train on the same samples."""
    epoch = row[0]
    number = min(map(len, contents))
    batches = zip(*contents, strict=False)  # of all ranks, one after the other
    same = takewhile(lambda hashes: hashes[0] and all_equal(hashes), batches)
    equal = len(list(same))
    if not equal or equal < min(number, _COMPARED):
        return
    seeds = seeding(facts, "random", "numpy", "torch")
    evidence = f"the first {equal} batches are the same on {facts.who}"
    if epoch.lines or "Subset" in epoch.sampler:
        yield facts.finding("same-by-sampler", evidence, epoch.lines, epoch.sampler_made, epoch.made, seeds)
    elif epoch.replaces or not (epoch.iterable or agree(row, "plan")):  # the sampler or the dataset draws
        yield facts.finding("same-by-seed", evidence, seeds, epoch.sampler_made, epoch.made)
    else:
        yield facts.finding("same-by-loader", evidence, epoch.made, epoch.sampler_made)


def _repeated_batches(facts: Facts, epoch: Epoch, contents: list[int]) -> Findings:
    """Find batches that come several times in an epoch of one rank."""
    repeated = sum(number - 1 for content, number in Counter(contents).items() if content)
    if repeated and epoch.workers > 1:
        evidence = f"{repeated} of the first {len(contents)} batches of rank 0 repeat earlier ones of the epoch"
        yield _about_sampler("read-by-each-worker", facts, epoch, evidence)


def _unweighted(facts: Facts) -> Findings:
    """Find loaders of ddpkit whose unequal shares are averaged as equal ones, also in batches after the cut."""
    backward = [step.backward for step in facts.first(Step)[:1]]
    for end in facts.first(EpochEnd):
        if end.shares:
            yield facts.finding("shares-unweighted", end.shares, *backward)


def _equal_inputs(facts: Facts) -> Findings:
    """Find ranks that give their networks the same inputs at each step, where no loader is used."""
    rows = [steps for steps in facts.steps if all(step.calls for step in steps)]
    rows = rows[:_COMPARED]
    if facts.training or not rows:
        return
    for steps in rows:
        inputs = [[call.input for call in step.calls if call.input] for step in steps]
        if not inputs[0] or not all_equal(inputs):
            return
    evidence = f"at each of {len(rows)} steps the inputs are the same on {facts.who}"
    where = rows[0][0].calls[0].where
    yield facts.finding("same-inputs", evidence, where, seeding(facts, "torch", "numpy", "random"))


# Compare the samples that a sampler deals with those that there are.


def _examine_plans(facts: Facts, row: list[Epoch], trains: bool) -> Findings:
    epoch = row[0]
    plans = [each.plan or [] for each in row]
    has_repeated = [len(set(plan)) < len(plan) for plan in plans]
    if any(has_repeated) or any(each.replaces for each in row):
        return  # samples are drawn with replacement
    if not agree(row, "dataset"):
        if trains and agree(row, "contents"):
            evidence = f"{facts.who} hold the same samples in different orders, and share out indices"
            yield _about_sampler("order-differs", facts, epoch, evidence, seeding(facts, "shuffle"))
        return
    parts = [_expected(each) for each in row]
    if not all_equal(parts) and parts[0].intersection(*parts):
        if trains:
            yield _differently_split(facts, epoch, parts)
        return
    expected = set.union(*parts)
    total = len(expected)
    if all(len(plan) >= total for plan in plans):
        if trains:
            evidence = f"each of {facts.who} goes through all {total} samples in an epoch"
            yield _about_sampler("all-samples-on-each", facts, epoch, evidence)
        return
    number = sum(map(len, plans))
    dealt = _dealt(row)
    missing = len(expected - dealt)
    extra = number - len(dealt)
    batch = epoch.batch_size * facts.world_size
    padding = max(-total % facts.world_size, -total % batch)
    if extra <= padding:
        may_drop = batch - 1 if trains or epoch.drop_last else 0
        yield from _missing(facts, epoch, expected, may_drop)
        return
    is_partition = abs(number - total) < batch + facts.world_size
    if trains and missing and is_partition and not _come_in_runs(plans):
        evidence = f"in one epoch of {total} samples, {missing} reach no rank and {extra} come again"
        yield _about_sampler("shuffle-differs", facts, epoch, evidence)


def _expected(epoch: Epoch) -> set[int]:
    """Return the samples that a rank's loader has."""
    if epoch.expected is None:
        return set(range(epoch.total))
    return set(epoch.expected)


def _dealt(row: list[Epoch]) -> set[int]:
    """Return the samples that any rank gets."""
    return set().union(*(each.plan or [] for each in row))


def _missing(facts: Facts, epoch: Epoch, expected: set[int], may_drop: int) -> Findings:
    """Find samples that no rank gets in any epoch that was seen, where each deals the same ones."""
    rows = [row for row in facts.epochs if row[0].loader == epoch.loader]
    dealt = list(map(_dealt, rows))
    missing = len(expected - dealt[0])
    is_shuffled = any(row[0].plan != epoch.plan for row in rows)
    is_part = not all_equal(dealt) and epoch.sampler != "DistributedSampler"
    is_meant = "Subset" in epoch.sampler or is_part
    if not is_meant and missing > (1 if is_shuffled else may_drop):
        evidence = f"{missing} of {len(expected)} samples reach no rank"
        yield _about_sampler("samples-missing", facts, epoch, evidence)


def _come_in_runs(plans: list[list[int]]) -> bool:
    """Return whether one order of all ranks repeats samples, each a few times in turn: that is meant."""
    if all_equal(plans):
        return False
    order: list[int] = list(chain.from_iterable(zip(*plans, strict=False)))
    runs = sum(one != other for one, other in pairwise(order)) + 1
    return runs <= len(set(order)) + len(plans)


def _about_sampler(rule: str, facts: Facts, epoch: Epoch, evidence: str, *lines: Lines) -> Finding:
    """Make a finding about a sampler: where it is defined if it is the script's, else where it was made."""
    return facts.finding(rule, evidence, *lines, epoch.lines, epoch.sampler_made, epoch.made)


def _differently_split(facts: Facts, epoch: Epoch, parts: list[set[int]]) -> Finding:
    """Explain parts of one dataset that overlap, and look for samples of a validation that another rank trains on."""
    others = len(parts[0] - parts[0].intersection(*parts))
    evidence = f"{facts.who} hold different parts of the samples: {others} of rank 0's {len(parts[0])} are not in all"
    trained = set.union(*parts)
    for row in facts.epochs:
        other = row[0]
        held = set(other.expected or ())
        is_validation = other.loader not in facts.training
        if is_validation and other.dataset == epoch.dataset and held & trained:
            evidence += f"; {len(held & trained)} of the {len(held)} that rank 0 validates on are trained on elsewhere"
            break
    return facts.finding("split-differs", evidence, epoch.split, seeding(facts, "torch"), epoch.made)


def _same_orders(facts: Facts) -> Findings:
    """Find loaders that deal the same order in each epoch, because nobody calls `set_epoch`."""
    for epochs in _epochs_of_lines(facts):
        first = epochs[0]
        plan = first.plan or []
        is_shuffled = plan != sorted(plan)
        is_repeated = len(epochs) > 1 and agree(epochs, "plan")
        if not first.has_epoch or not is_shuffled or not is_repeated:
            continue
        seen = f"{len(epochs)} epochs have the same order of the {len(plan)} samples of rank 0"
        calls = [each for each in facts.first(EpochSet) if each.sampler == first.sampler]
        rule, how, lines = "epoch-not-set", "is not called", first.where
        if calls and agree(calls, "epoch"):
            rule, how, lines = "epoch-constant", f"gets {calls[0].epoch} each time", calls[0].where
        elif calls:
            rule, how, lines = "epoch-unused", "is called, and the order does not depend on it", first.lines
        evidence = f"{seen}: `set_epoch` {how}"
        yield facts.finding(rule, evidence, lines, first.where, first.sampler_made, first.made)


def _epochs_of_lines(facts: Facts) -> Iterator[list[Epoch]]:
    """Put together the epochs of each loader, and of loaders which one line makes anew for each epoch."""
    training = [epoch for epoch in facts.first(Epoch) if epoch.loader in facts.training]
    is_one_training = len(facts.first(Optimized)) == 1
    found: dict[tuple[str, str], list[Epoch]] = {}
    for (loader,), epochs in by_fields(training, "loader").items():
        key = loader, ""
        if len(epochs) == 1 and is_one_training:  # perhaps of the same data
            key = loader.rpartition("#")[0], epochs[0].dataset
        found.setdefault(key, []).extend(epochs)
    yield from found.values()


def _validated_in_training(facts: Facts) -> Findings:
    """Find an evaluation on a part of the training samples, if there is none on others."""
    known = {epoch.loader: epoch for epoch in facts.first(Epoch)}  # a base is known by an address, of one process
    trained: set[tuple[int, int]] = set()  # a dataset, and an index
    others: dict[str, set[tuple[int, int]]] = {}
    for epoch in facts.all(Epoch) if facts.are_replicas else facts.first(Epoch):
        if epoch.loader not in known:
            continue
        base = known[epoch.loader].base
        samples = {(base, index) for index in epoch.plan or ()}
        if epoch.loader in facts.training:
            trained |= samples
        elif samples:
            others.setdefault(epoch.loader, set()).update(samples)
    if len(facts.first(Optimized)) > 1:  # perhaps of folds
        return
    for samples in others.values():
        if trained.isdisjoint(samples) or trained <= samples:
            return
    for loader, samples in others.items():
        epoch = known[loader]
        evidence = f"{len(trained & samples)} of the {len(samples)} samples of this loader are trained on"
        yield facts.finding("validation-seen", evidence, epoch.made, epoch.split)


ALONE = (first_of(_validated_in_training),)
RULES = (_of_loaders, _equal_inputs, first_of(_unweighted), _same_orders)
