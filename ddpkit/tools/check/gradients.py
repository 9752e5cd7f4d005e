"""Find gradients that are not averaged or divided by the wrong number, and replicas that are not equal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ..recorder import Record
from .facts import Facts, Finding, agree, all_equal, in_function_of, name_some, places
from .source import rank_condition, scales_by_ranks, setting_lines

_SOME_STEPS = 3  # after which a parameter without a gradient gets none
_ROUNDING = 1e-4  # relative difference of gradients that sums in another order may have


class _Optimizer(NamedTuple):
    """What the ranks have told of one optimizer.

    Attributes:
        parameters: Descriptions by rank 0 of its parameters, by their names.
        made: Where it was made.
        positions: Of the parameters that all ranks hold whole, on each rank.
        steps: A record of each rank, for each step.
        by_hand: The parameters that a collective was given after they were trained.
    """

    parameters: dict[str, Record]
    made: list[Any]
    positions: dict[str, list[int]]
    steps: list[list[Record]]
    by_hand: set[str]

    def values(self, key: str, name: str, records: list[Record]) -> list[Any]:
        """List the ranks' gradients or parameters of one name at a step."""
        return [record[key][i] for record, i in zip(records, self.positions[name], strict=True)]

    def different(self, records: list[Record]) -> list[str]:
        """Name the parameters that differ at a step."""
        return [name for name in self.positions if not all_equal(self.values("parameters", name, records))]

    def different_gradients(self, records: list[Record]) -> dict[str, float]:
        """Name the parameters whose gradients differ at a step by more than rounding, and by how much."""
        found = {name: _difference(self.values("gradients", name, records)) for name in self.positions}
        return {name: difference for name, difference in found.items() if difference > _ROUNDING}

    def becomes_equal(self, step: int) -> bool:
        """Return whether the parameters are equal at a later step: then they are averaged themselves."""
        return any(not self.different(records) for records in self.steps if records[0]["number"] > step)

    def is_averaged(self, step: int) -> bool:
        """Return whether the ranks make parameters equal again, now and then, after gradients that differ."""
        if self.becomes_equal(step):
            return True
        for records in self.steps:
            number = records[0]["number"]
            differed = any(records[0]["rates"]) and bool(self.different_gradients(records))
            # the first step of Adam is as long for any gradient
            if 1 < number < step and differed and self.becomes_equal(number):
                return True
        return False


def find(facts: Facts) -> Iterator[Finding]:
    """Compare what the ranks' optimisers hold at each step."""
    steps = facts.steps
    optimizers = list(_optimizers(facts, steps))
    unaveraged = [_find_unaveraged(facts, optimizer) for optimizer in optimizers]
    different = _find_different_start(facts, optimizers)
    if different is None and not any(unaveraged):
        different = _find_states(facts, steps) or _find_drift(facts, optimizers)
    yield from filter(None, [*unaveraged, different, _find_buffers(facts, steps)])
    yield from _find_divisors(facts, steps)


def find_without(facts: Facts) -> Iterator[Finding]:
    """Find trainable parameters that never get a gradient."""
    yield from filter(None, [_find_without(facts, optimizer) for optimizer in _optimizers(facts, facts.steps)])


def _optimizers(facts: Facts, steps: list[list[Record]]) -> Iterator[_Optimizer]:
    """Put together what the ranks have told of each optimizer."""
    for (number,), told in facts.rows("optimizer", "optimizer"):
        tables: list[dict[tuple[Any, ...], int]] = []
        for record in told:
            whole = [(i, p) for i, p in enumerate(record["parameters"]) if p["whole"]]
            tables.append({(p["name"], tuple(p["shape"])): i for i, p in whole})
        common = [key for key in tables[0] if all(key in table for table in tables)]
        positions = {key[0]: [table[key] for table in tables] for key in common}
        parameters = {p["name"]: p for p in told[0]["parameters"]}
        own_steps = [records for records in steps if records[0]["optimizer"] == number]
        yield _Optimizer(parameters, told[0]["made"], positions, own_steps, _reduced(facts, number))


def _reduced(facts: Facts, optimizer: int) -> set[str]:
    """Name what a collective was given of an optimiser's parameters; -1 is for buffers."""
    trained = [record.get("trained") for record in facts.first("collective")]
    return {name for number, name in filter(None, trained) if number == optimizer}


def _difference(gradients: Sequence[Any]) -> float:
    """Return the relative difference of gradients, 0 if they are equal."""
    if all_equal(gradients):
        return 0.0
    if any(gradient is None for gradient in gradients):
        zeros = all(gradient is None or not any(gradient[1]) for gradient in gradients)
        return 0.0 if zeros else 1.0
    first = gradients[0][1]
    largest = 0.0
    for _, other in gradients[1:]:
        norm = max(math.hypot(*first), math.hypot(*other))
        difference = math.dist(first, other)
        if math.isfinite(difference) and norm:
            largest = max(largest, difference / norm)
    return largest


def _find_unaveraged(facts: Facts, optimizer: _Optimizer) -> Finding | None:
    """Find the first step of an optimiser at which gradients differ."""
    for records in optimizer.steps:
        number = records[0]["number"]
        found = optimizer.different_gradients(records)
        names = [name for name in found if name not in optimizer.by_hand]
        if not names or optimizer.is_averaged(number):
            continue
        rule, lines = _cause(records[0], optimizer, names)
        difference = max(found[name] for name in names)
        who = facts.who
        evidence = f"{name_some(names)}: at optimizer step {number} the gradients of {who} differ by {difference:.0%}"
        return facts.finding(rule, evidence, *lines)
    return None


def _cause(step: Record, optimizer: _Optimizer, names: list[str]) -> tuple[str, list[Sequence[Any] | None]]:
    """Find the rule by which the gradients of some parameters are not averaged, and the lines."""
    first = optimizer.parameters[names[0]]
    at_step, made = step["where"], first["made"]
    wrapped = next((cause for cause in step["causes"] if cause["made"] == first["ddp"]), None)
    if wrapped is None:
        is_part = len(names) < len(optimizer.parameters)
        return "outside-of-ddp" if is_part else "without-ddp", [at_step, optimizer.made, made]
    if not first["managed"]:
        return "added-after-ddp", [in_function_of(made, wrapped["made"]), made, wrapped["made"]]
    if wrapped["bypassed"]:
        return "past-ddp", [wrapped["bypassed"], wrapped["taken_out"]]
    if wrapped["unsynced"]:
        return "last-unsynced", [wrapped["unsynced"], at_step]
    return "changed-after-ddp", [at_step, wrapped["made"], wrapped["taken_out"]]


def _find_without(facts: Facts, optimizer: _Optimizer) -> Finding | None:
    if len(optimizer.steps) < _SOME_STEPS:
        return None
    steps = [record["without"] for records in optimizer.steps for record in records]
    last = optimizer.steps[-1][0]
    skipping = [cause["made"] for cause in last["causes"] if cause["skips"]]
    names = [name for name in optimizer.parameters if all(name in step for step in steps)]
    lost = [name for name in names if steps[-1][name]]
    names = lost or [name for name in names if optimizer.parameters[name]["ddp"] not in skipping]
    if not names:
        return None
    evidence = f"{name_some(names)}: no gradient at any of {len(optimizer.steps)} optimizer steps, on {facts.who}"
    made = optimizer.parameters[names[0]]["made"]
    lines = [last["without"][names[0]], in_function_of(made, optimizer.made), made, optimizer.made]
    return facts.finding("gathered-without" if lost else "no-loss", evidence, *lines)


# Find replicas that differ at the first step, or later although gradients were equal.


def _find_different_start(facts: Facts, optimizers: list[_Optimizer]) -> Finding | None:
    """Find parameters that differ before the first step, and fixed networks that differ."""
    for optimizer in optimizers:
        for records in optimizer.steps[:1]:
            names = optimizer.different(records)
            if names and not optimizer.becomes_equal(1):
                return _started_different(facts, names, optimizer.parameters[names[0]]["made"], optimizer.made)
            for name, (hashes, made) in records[0]["others"].items():
                others = [record["others"].get(name, [[]])[0] for record in records]
                if not all_equal(others) and all(len(other) == len(hashes) for other in others):
                    return _started_different(facts, [name], made, optimizer.made)
    return None


def _started_different(facts: Facts, names: list[str], made: list[Any], optimizer: list[Any]) -> Finding:
    loaded = [set(places(*(record["where"][:1] for record in told))) for told in facts.of("loaded").values()]
    alone = [line for line in loaded[0] if not all(line in lines for lines in loaded)]
    evidence = f"{name_some(names)}: at the first optimizer step {facts.who} hold different values"
    lines = [*filter(None, map(rank_condition, alone)), alone, in_function_of(made, optimizer), made, optimizer]
    return facts.finding("replicas-differ-at-start", evidence, *lines)


def _find_states(facts: Facts, rows: list[list[Record]]) -> Finding | None:
    """Find optimisers whose states differ before a step."""
    for records in rows:
        number = records[0]["number"]
        rates = [record["rates"] for record in records]
        if not all_equal(rates):
            found = " and ".join(f"{rate[0]:.4g}" for rate in rates)
            evidence = f"at optimizer step {number} the learning rates of {facts.who} are {found}"
        elif number == 1 and not agree(records, "state"):
            evidence = f"at the first step the optimizer states of {facts.who} differ"
        else:
            continue
        loaded: list[Any] = next((record["loaded"] for record in records if record["loaded"]), [])
        condition = next(filter(None, map(rank_condition, places(loaded))), None)
        by_hand = setting_lines(places(records[0]["where"]), "lr") if number > 1 else []
        return facts.finding("states-differ", evidence, condition, loaded, by_hand, records[0]["where"])
    return None


def _find_drift(facts: Facts, optimizers: list[_Optimizer]) -> Finding | None:
    """Find parameters that are equal at one step and differ at a later one."""
    for optimizer in optimizers:
        for records in optimizer.steps[1:]:
            number = records[0]["number"]
            names = [name for name in optimizer.different(records) if name not in optimizer.by_hand]
            if not names or optimizer.is_averaged(number):
                continue
            seen = f"equal at first, different on {facts.who} before step {number}"
            evidence = f"{name_some(names)}: {seen}"
            return facts.finding("weights-drift", evidence, optimizer.steps[0][0]["where"])
    return None


def _find_buffers(facts: Facts, rows: list[list[Record]]) -> Finding | None:
    """Find running statistics that differ and that nobody sends out."""
    by_hand = _reduced(facts, -1)
    for records in rows:
        number = records[0]["number"]
        for name, entry in records[0]["buffers"].items():
            hashes = _buffers(records, name)
            if number == 1 or entry["sent"] or {} in hashes or all_equal(hashes) or _become_equal(rows, name):
                continue
            differing = [n for n in hashes[0] if not all_equal([h.get(n) for h in hashes])]
            differing = [n for n in differing if f"{name}.{n}" not in by_hand]
            if differing:
                evidence = f"buffer {name_some(differing)}: different on {facts.who} at step {number}"
                severity = "wrong" if entry["trained"] else "suspicious"
                lines = entry["ddp"] or records[0]["where"]
                return facts.finding("buffers-differ", evidence, lines, severity=severity)
    return None


def _buffers(records: list[Record], name: str) -> list[dict[str, int]]:
    """List the ranks' hashes of a network's running statistics at a step."""
    return [record["buffers"].get(name, {}).get("hashes", {}) for record in records]


def _become_equal(rows: list[list[Record]], name: str) -> bool:
    """Return whether the running statistics of a network differ at a step and are equal at a later one."""
    has_differed = False
    for hashes in (_buffers(records, name) for records in rows):
        if has_differed and hashes[0] and all_equal(hashes):
            return True
        has_differed = has_differed or not all_equal(hashes)
    return False


# Find losses that are divided by the wrong number, and metrics that are means of the ranks' means.

_EXACT = 1e-3  # relative difference of numbers that are meant to be equal
_UNEVEN = 1.02  # ratio of counts that are not
_SCALE_FREE = ("Adam", "Rprop", "Adagrad", "RMSprop", "Lion", "Adadelta")  # a factor of the gradient changes little
_NEAR = 3  # collectives, within which counts may travel with means
_Losses = dict[tuple[Any, ...], list[dict[str, Any]]]


def _find_divisors(facts: Facts, rows: list[list[Record]]) -> Iterator[Finding]:
    """Look at how losses enter the gradients of each step, and at metrics."""
    if not facts.deals_micro_batches:
        uneven = _find_uneven(facts, rows) or _find_divided_twice(facts, rows)
        yield from filter(None, [uneven, _find_sums(facts, rows)])
    for _, records in facts.rows("collective", "position", "group"):
        if _is_mean_of_means(facts, records):
            yield _mean_of_means(facts, records)
            return


def by_line(losses: list[dict[str, Any]]) -> _Losses:
    """Put together the records of each line, () for those of none."""
    found: _Losses = {}
    for loss in losses:
        found.setdefault(tuple(loss["where"][0]) if loss["where"] else (), []).append(loss)
    return found


def _total(losses: list[dict[str, Any]]) -> float:
    """Add up the weights with which losses enter the gradients."""
    return float(sum(loss["total"] for loss in losses))


def near(one: float, other: float) -> bool:
    """Return whether two numbers are meant to be equal."""
    return abs(one - other) <= _EXACT * max(abs(one), abs(other))


def _find_uneven(facts: Facts, rows: list[list[Record]]) -> Finding | None:
    """Find means over different numbers of samples that count as equals in one step."""
    for records in rows:
        tables = [by_line(record["losses"]) for record in records]
        for line in tables[0]:
            if not all(line in table for table in tables):
                continue
            losses = [by_backward(table[line]) for table in tables]
            number = len(losses[0])
            if 1 < number <= len(records[0]["position"]):  # each from a loader of its own: tasks
                continue
            if number == 1 and not any(loss["masked"] for loss in tables[0][line]):
                continue  # the last batch of an epoch may be uneven
            totals, counts = zip(*(loss for rank in losses for loss in rank), strict=True)
            is_uneven = min(counts) > 0 and max(counts) > _UNEVEN * min(counts)
            if is_uneven and near(min(totals), max(totals)) and max(totals) > 0:
                step = records[0]
                many = f"{min(counts)} to {max(counts)}"
                evidence = f"at optimizer step {step['number']} means over {many} samples or tokens get equal weights"
                lines = [step["backward"], [line] if line else []]
                return facts.finding("means-uneven", evidence, *lines)
    return None


def by_backward(losses: list[dict[str, Any]]) -> list[tuple[float, int]]:
    """Give for each backward pass the weight of its losses, and over how many samples they are means."""
    found: dict[int, tuple[float, int]] = {}
    for loss in losses:
        total, count = found.get(loss["backward"], (0.0, 0))
        found[loss["backward"]] = total + loss["total"], count + loss["count"]
    return list(found.values())


def _find_divided_twice(facts: Facts, rows: list[list[Record]]) -> Finding | None:
    """Find sums that are divided by the count of all ranks, and then averaged over ranks."""
    steps = [records[0] for records in rows]
    if len(rows) < _SOME_STEPS or not all(step["losses"] and step["causes"] and not step["summed"] for step in steps):
        return None
    lines = by_line(steps[0]["losses"])
    for line in lines:
        weights = [[_total(by_line(record["losses"]).get(line, [])) for record in records] for records in rows]
        uneven = [each for each in weights if not all_equal([round(weight, 4) for weight in each])]
        if not uneven or not all(near(sum(each), sum(uneven[0])) for each in weights):
            continue
        total = sum(uneven[0])
        is_mean = len(lines) == 1 and near(total, 1.0)
        where = places(steps[0]["backward"], [line] if line else [])
        is_scaled = any(scales_by_ranks(each.file) for each in where)  # then two ranks' halves look like a mean
        if near(total, facts.world_size) or (is_scaled and not is_mean):
            return None
        shares = " and ".join(f"{weight:.3f}" for weight in uneven[0])
        evidence = f"the losses of {facts.who} have weights such as {shares}, which always add up to {total:.3g}"
        severity = "wrong" if is_mean and not is_scaled else "suspicious"
        return facts.finding("divided-by-all", evidence, where, severity=severity)
    return None


def _find_sums(facts: Facts, rows: list[list[Record]]) -> Finding | None:
    """Find gradients that are added up over ranks, and never divided."""
    for records in rows:
        summed = records[0]["summed"]
        if not summed or not near(summed["ratio"], 1.0):
            continue
        divides = any(record["divides"] for record in records if record["summed"])
        if divides or _counts_travel(facts) or _are_one_mean([record["losses"] for record in records]):
            continue
        number = records[0]["number"]
        evidence = f"at optimizer step {number} the gradients are the sum of those of {facts.who}"
        return facts.finding("summed-gradients", evidence, summed["where"], severity=_severity(records[0]))
    return None


def _severity(step: Record) -> str:
    """Judge a gradient that is wrong by a factor: optimizers that divide by its size hardly see it."""
    name = step["class_name"]
    is_free = name.startswith(_SCALE_FREE) or name.endswith(_SCALE_FREE)
    return "suspicious" if is_free else "wrong"


def _are_one_mean(by_rank: list[list[dict[str, Any]]]) -> bool:
    """Return whether sums over samples were divided before by the number of samples of all ranks: they weigh 1."""
    sums = by_line([loss for losses in by_rank for loss in losses if loss["summed"]])
    return any(near(_total(losses), 1.0) for losses in sums.values())


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
    if any(record.get("averages") for record in records):  # gradients, between backward and the step
        return False
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
    epoch: Record = next((record for record in reversed(before) if record["kind"] == "epoch"), {})
    is_evaluation = bool(epoch) and epoch["loader"] not in facts.training
    severity = "wrong" if is_evaluation else "suspicious"
    shares = " and ".join(str(record["samples"]) for record in records)
    evidence = f"means over {shares} samples, of {facts.who}, are averaged with equal weights"
    where = in_function_of(first["where"], epoch["where"]) if is_evaluation else None
    return facts.finding("mean-of-means", evidence, where, first["where"], severity=severity)
