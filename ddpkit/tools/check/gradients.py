"""Find gradients that are not averaged or divided by the wrong number, and replicas that are not equal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple, TypeVar

from .facts import (
    Facts,
    Finding,
    Findings,
    Lines,
    agree,
    all_equal,
    by_fields,
    common,
    differing,
    first_of,
    in_function_of,
    joined,
    listed,
    name_some,
)
from .observed import Averaging, Clip, Collective, Gradient, Loaded, Loss, Optimized, Parameter, Step
from .source import Place, Stack, rank_condition, scales_by_ranks, setting_lines

_SOME_STEPS = 3  # after which a parameter without a gradient gets none
_ROUNDING = 1e-4  # relative difference of gradients that sums in another order may have


class _Row(NamedTuple):
    """A step of an optimizer on all ranks.

    Attributes:
        steps: The record of each rank.
        different: Names of the parameters that differ.
        gradients: By how much gradients differ, of the parameters of which this is more than rounding.
    """

    steps: list[Step]
    different: list[str]
    gradients: dict[str, float]

    @property
    def number(self) -> int:
        """Return the number of the step."""
        return self.steps[0].number


class _Optimizer(NamedTuple):
    """What the ranks have told of one optimizer.

    Attributes:
        parameters: Descriptions by rank 0 of its parameters, by their names.
        made: Where it was made.
        rows: Its steps.
        by_hand: The parameters that a collective was given after they were trained.
    """

    parameters: dict[str, Parameter]
    made: Stack
    rows: list[_Row]
    by_hand: set[str]

    def becomes_equal(self, step: int) -> bool:
        """Return whether the parameters are equal at a later step: then they are averaged themselves."""
        return any(not row.different for row in self.rows if row.number > step)

    def is_averaged(self, step: int) -> bool:
        """Return whether the ranks make parameters equal again, now and then, after gradients that differ."""
        if self.becomes_equal(step):
            return True
        for row in self.rows:
            is_between = 1 < row.number < step  # the first step of Adam is as long for any gradient
            has_differed = row.gradients and any(row.steps[0].rates)
            if is_between and has_differed and self.becomes_equal(row.number):
                return True
        return False


def _optimizers(facts: Facts) -> Iterator[_Optimizer]:
    """Put together what the ranks have told of each optimizer."""
    for told in facts.rows(Optimized, "optimizer"):
        first = told[0]
        alike = [name for name in first.parameters if _has_one_shape(told, name)]
        own = [steps for steps in facts.steps if steps[0].optimizer == first.optimizer]
        routed = ["all_to_all" in seen.op and seen.dtype != "float64" for seen in facts.first(Collective)]
        if own and any(routed):  # to experts, each rank's own
            of_experts = differing([step.parameters for step in own[0]], alike)
            alike = [name for name in alike if name not in of_experts]
        rows = [_compare(steps, alike) for steps in own]
        by_hand = _reduced(facts, first.optimizer)
        yield _Optimizer(first.parameters, first.made, rows, by_hand)


def _has_one_shape(told: list[Optimized], name: str) -> bool:
    """Return whether all ranks hold a parameter whole, in the same shape."""
    shapes = [each.parameters[name].shape for each in told if name in each.parameters]
    return len(shapes) == len(told) and None not in shapes and all_equal(shapes)


def _compare(steps: list[Step], names: list[str]) -> _Row:
    gradients = {}
    for name in names:
        difference = _difference([step.gradients.get(name) for step in steps])
        if difference > _ROUNDING:
            gradients[name] = difference
    return _Row(steps, differing([step.parameters for step in steps], names), gradients)


def _difference(gradients: Sequence[Gradient | None]) -> float:
    """Return the relative difference of gradients, 0 if they are equal."""
    if all_equal(gradients):
        return 0.0
    samples = [gradient.sample for gradient in gradients if gradient]
    if len(samples) < len(gradients):
        return 1.0 if any(map(any, samples)) else 0.0
    largest = 0.0
    for sample in samples:
        norm = max(math.hypot(*samples[0]), math.hypot(*sample))
        difference = math.dist(samples[0], sample)
        if math.isfinite(difference) and norm:
            largest = max(largest, difference / norm)
    return largest


def _reduced(facts: Facts, optimizer: int) -> set[str]:
    """Name what a collective was given of an optimiser's parameters; -1 is for buffers."""
    trained = [seen.trained for seen in facts.first(Collective) if seen.trained]
    return {name for number, name in trained if number == optimizer}


def _unaveraged(facts: Facts) -> Findings:
    """Find the first step of each optimizer at which gradients differ."""
    for optimizer in _optimizers(facts):
        for row in optimizer.rows:
            names = [name for name in row.gradients if name not in optimizer.by_hand]
            if not names or optimizer.is_averaged(row.number):
                continue
            rule, lines = _cause(row.steps[0], optimizer, names)
            difference = max(row.gradients[name] for name in names)
            seen = f"at optimizer step {row.number} the gradients of {facts.who} differ by {difference:.0%}"
            yield facts.finding(rule, f"{name_some(names)}: {seen}", *lines)
            break


def _unaveraged_copies(facts: Facts) -> Findings:
    """Find networks that are equal at first and never averaged, where nothing says if they are replicas."""
    for optimizer in () if facts.are_stages else _optimizers(facts):
        for row in optimizer.rows[:1]:
            if row.gradients and not row.different:
                seen = f"equal on {facts.who} at the first optimizer step, but the gradients differ"
                names = name_some(list(row.gradients))
                yield facts.finding("unaveraged-copies", f"{names}: {seen}", row.steps[0].where, optimizer.made)


def _cause(step: Step, optimizer: _Optimizer, names: list[str]) -> tuple[str, list[Lines]]:
    """Find the rule by which the gradients of some parameters are not averaged, and the lines."""
    first = optimizer.parameters[names[0]]
    wrapper = _wrapper_of(first, step)
    if wrapper is None:
        is_part = len(names) < len(optimizer.parameters)
        rule = "outside-of-ddp" if is_part else "without-ddp"
        return rule, [step.where, optimizer.made, first.made]
    if not first.managed:
        nearest = in_function_of(first.made, wrapper.made)
        return "added-after-ddp", [nearest, first.made, wrapper.made]
    if wrapper.bypassed:
        return "past-ddp", [wrapper.bypassed, wrapper.taken_out]
    if wrapper.unsynced:
        return "last-unsynced", [wrapper.unsynced, step.where]
    return "changed-after-ddp", [step.where, wrapper.made, wrapper.taken_out]


def _wrapper_of(parameter: Parameter, step: Step) -> Averaging | None:
    return next((wrapper for wrapper in step.wrappers if wrapper.made == parameter.ddp), None)


def _without_gradients(facts: Facts) -> Findings:
    """Find trainable parameters that never get a gradient."""
    for optimizer in _optimizers(facts):
        if len(optimizer.rows) < _SOME_STEPS:
            continue
        steps = [step for row in optimizer.rows for step in row.steps]
        last = optimizer.rows[-1].steps[0]
        names = common(steps, "without")
        lost = [name for name in names if steps[-1].without[name]]
        skipping = [wrapper.made for wrapper in last.wrappers if wrapper.skips]
        names = lost or [name for name in names if optimizer.parameters[name].ddp not in skipping]
        if names:
            rule = "gathered-without" if lost else "no-loss"
            seen = f"no gradient at any of {len(optimizer.rows)} optimizer steps, on {facts.who}"
            where = last.without[names[0]]
            made = optimizer.parameters[names[0]].made
            nearest = in_function_of(made, optimizer.made)
            yield facts.finding(rule, f"{name_some(names)}: {seen}", where, nearest, made, optimizer.made)


# Find replicas that differ at the first step, or later although gradients were equal.


def _different_at_start(facts: Facts) -> Findings:
    """Find parameters that differ before the first step, and fixed networks that differ."""
    for optimizer in _optimizers(facts):
        for row in optimizer.rows[:1]:
            if row.different and not optimizer.becomes_equal(1):
                made = optimizer.parameters[row.different[0]].made
                yield _started_different(facts, row.different, made, optimizer.made)
            for name, fixed in row.steps[0].others.items():
                others = [step.others.get(name) for step in row.steps]
                hashes = [other.hashes if other else [] for other in others]
                if not all_equal(hashes) and all_equal(list(map(len, hashes))):
                    yield _started_different(facts, [name], fixed.made, optimizer.made)


def _started_different(facts: Facts, names: list[str], made: Stack, optimizer: Stack) -> Finding:
    loaded = []
    for told in facts.of(Loaded).values():
        loaded.append(listed(*(seen.where[:1] for seen in told)))
    alone = [line for line in loaded[0] if not all(line in lines for lines in loaded)]
    conditions = map(rank_condition, alone)
    nearest = in_function_of(made, optimizer)
    evidence = f"{name_some(names)}: at the first optimizer step {facts.who} hold different values"
    return facts.finding("replicas-differ-at-start", evidence, *conditions, alone, nearest, made, optimizer)


def _different_states(facts: Facts) -> Findings:
    """Find optimizers whose states differ before a step."""
    for steps in facts.steps:
        first = steps[0]
        if not agree(steps, "rates"):
            rates = joined([step.rates[0] for step in steps], ".4g")
            evidence = f"at optimizer step {first.number} the learning rates of {facts.who} are {rates}"
        elif first.number == 1 and not agree(steps, "state"):
            evidence = f"at the first step the optimizer states of {facts.who} differ"
        else:
            continue
        loaded = next((step.loaded for step in steps if step.loaded), [])
        condition = next(filter(None, map(rank_condition, loaded)), None)
        by_hand = setting_lines(first.where, "lr") if first.number > 1 else []
        yield facts.finding("states-differ", evidence, condition, loaded, by_hand, first.where)


def _drifting(facts: Facts) -> Findings:
    """Find parameters that are equal at one step and differ at a later one."""
    for optimizer in _optimizers(facts):
        for row in optimizer.rows[1:]:
            names = [name for name in row.different if name not in optimizer.by_hand]
            if names and not optimizer.is_averaged(row.number):
                first = optimizer.rows[0].steps[0]
                seen = f"equal at first, different on {facts.who} before step {row.number}"
                yield facts.finding("weights-drift", f"{name_some(names)}: {seen}", first.where)


def _different_buffers(facts: Facts) -> Findings:
    """Find running statistics that differ and that nobody sends out."""
    by_hand = _reduced(facts, -1)
    for steps in facts.steps:
        first = steps[0]
        for network, buffers in first.buffers.items():
            hashes = _buffers(steps, network)
            is_sent = buffers.sent or _become_equal(facts.steps, network)
            if first.number == 1 or {} in hashes or all_equal(hashes) or is_sent:
                continue
            names = differing(hashes, hashes[0])
            names = [name for name in names if f"{network}.{name}" not in by_hand]
            if names:
                evidence = f"buffer {name_some(names)}: different on {facts.who} at step {first.number}"
                severity = "wrong" if buffers.trained else "suspicious"
                yield facts.finding("buffers-differ", evidence, buffers.ddp or first.where, severity=severity)


def _buffers(steps: list[Step], network: str) -> list[dict[str, int]]:
    """List the ranks' hashes of a network's running statistics at a step."""
    buffers = [step.buffers.get(network) for step in steps]
    return [each.hashes if each else {} for each in buffers]


def _become_equal(rows: list[list[Step]], network: str) -> bool:
    """Return whether the running statistics of a network differ at a step and are equal at a later one."""
    has_differed = False
    for steps in rows:
        hashes = _buffers(steps, network)
        if not all_equal(hashes):
            has_differed = True
        elif has_differed and hashes[0]:
            return True
    return False


# Find losses that are divided by the wrong number.

_EXACT = 1e-3  # relative difference of numbers that are meant to be equal
_UNEVEN = 1.02  # ratio of counts that are not
_SCALE_FREE = ("Adam", "Rprop", "Adagrad", "RMSprop", "Lion", "Adadelta")  # a factor of the gradient changes little


_OfLine = TypeVar("_OfLine", Loss, Clip)


class Pass(NamedTuple):
    """The losses of one backward pass: their weight, and over how many samples they are means."""

    total: float
    samples: int


def by_line(records: Iterable[_OfLine]) -> dict[Place | None, list[_OfLine]]:
    """Put together the records of each line, None for those of none."""
    found: dict[Place | None, list[_OfLine]] = {}
    for record in records:
        line = next(iter(record.where), None)
        found.setdefault(line, []).append(record)
    return found


def by_backward(losses: Sequence[Loss]) -> list[Pass]:
    """List the backward passes in which losses enter the gradients."""
    passes = []
    for together in by_fields(losses, "backward").values():
        samples = sum(loss.samples for loss in together)
        passes.append(Pass(_total(together), samples))
    return passes


def _total(losses: Sequence[Loss]) -> float:
    """Add up the weights with which losses enter the gradients."""
    return float(sum(loss.total for loss in losses))


def near(one: float, other: float) -> bool:
    """Return whether two numbers are meant to be equal."""
    return abs(one - other) <= _EXACT * max(abs(one), abs(other))


def _uneven_means(facts: Facts) -> Findings:
    """Find means over different numbers of samples that count as equals in one step."""
    for steps in facts.steps:
        first = steps[0]
        tables = [by_line(step.losses) for step in steps]
        for line, losses in tables[0].items():
            by_rank = [by_backward(table.get(line, [])) for table in tables]
            number = len(by_rank[0])
            if not all(by_rank) or not _may_be_uneven(losses, number, first):
                continue
            passes = list(chain.from_iterable(by_rank))
            totals = [each.total for each in passes]
            counts = [each.samples for each in passes]
            least = min(counts)
            most = max(counts)
            is_uneven = least > 0 and most > _UNEVEN * least
            if is_uneven and near(min(totals), max(totals)) and max(totals) > 0:
                seen = f"means over {least} to {most} samples or tokens get equal weights"
                yield facts.finding("means-uneven", f"at optimizer step {first.number} {seen}", first.backward, line)


def _may_be_uneven(losses: list[Loss], passes: int, step: Step) -> bool:
    """Return whether means of a line over different numbers are no accident of an epoch's last batch, or of tasks."""
    if passes == 1:
        return any(loss.masked for loss in losses)
    return passes > len(step.position)  # else each is from a loader of its own


def _divided_by_all(facts: Facts) -> Findings:
    """Find sums that are divided by the count of all ranks, and then averaged over ranks."""
    first = [steps[0] for steps in facts.steps]
    are_averaged = [step.losses and step.wrappers and not step.summed for step in first]
    if len(first) < _SOME_STEPS or not all(are_averaged):
        return
    lines = by_line(first[0].losses)
    for line in lines:
        weights = []
        for steps in facts.steps:
            weights.append([_weight(step, line) for step in steps])
        uneven = [each for each in weights if not all_equal([round(weight, 4) for weight in each])]
        if not uneven:
            continue
        total = sum(uneven[0])
        if not all(near(sum(each), total) for each in weights):
            continue
        is_mean = len(lines) == 1 and near(total, 1.0)
        where = listed(first[0].backward, line)
        is_scaled = any(scales_by_ranks(each.file) for each in where)  # then two ranks' halves look like a mean
        if near(total, facts.world_size) or (is_scaled and not is_mean):
            return
        shares = joined(uneven[0], ".3f")
        evidence = f"the losses of {facts.who} have weights such as {shares}, which always add up to {total:.3g}"
        severity = "wrong" if is_mean and not is_scaled else "suspicious"
        yield facts.finding("divided-by-all", evidence, where, severity=severity)


def _weight(step: Step, line: Place | None) -> float:
    """Add up the weights with which the losses of a line enter the gradients of a step."""
    return _total(by_line(step.losses).get(line, []))


def _summed_gradients(facts: Facts) -> Findings:
    """Find gradients that are added up over ranks, and never divided."""
    for steps in facts.steps:
        first = steps[0]
        if not first.summed or not near(first.summed.ratio, 1.0):
            continue
        divides = any(step.divides for step in steps if step.summed)
        if divides or _counts_travel(facts) or _are_one_mean(steps):
            continue
        # optimizers that divide by a gradient's size hardly see a factor
        is_free = first.class_name.startswith(_SCALE_FREE) or first.class_name.endswith(_SCALE_FREE)
        severity = "suspicious" if is_free else "wrong"
        evidence = f"at optimizer step {first.number} the gradients are the sum of those of {facts.who}"
        yield facts.finding("summed-gradients", evidence, first.summed.where, severity=severity)


def _are_one_mean(steps: list[Step]) -> bool:
    """Return whether sums over samples were divided before by the number of samples of all ranks: they weigh 1."""
    sums = by_line([loss for step in steps for loss in step.losses if loss.summed])
    return any(near(_total(losses), 1.0) for losses in sums.values())


def _counts_travel(facts: Facts) -> bool:
    """Return whether the ranks add up counts, by which they may have divided before."""
    for seen in facts.all(Collective):
        for value in seen.values:
            if isinstance(value, int) or (value > 1 and value.is_integer()):
                return True
    return False


def _wrong_divisors(facts: Facts) -> Findings:
    if not facts.deals_micro_batches:
        yield from first_of(_uneven_means, _divided_by_all)(facts)
        yield from first_of(_summed_gradients)(facts)


ALONE = (_without_gradients,)
OF_COPIES = (_unaveraged_copies,)
RULES = (
    _unaveraged,
    first_of(_different_at_start, _different_states, _drifting),
    first_of(_different_buffers),
    _wrong_divisors,
)
