"""Observe the training loop of one process, and find its mistakes: gradients, modes, losses and parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, takewhile
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from ..recorder import Function, after, before, current, guarded, hash_of, parameters_of, replace
from .facts import Facts, Findings, agree, by_fields, common, name_some
from .gradients import by_backward, by_line, near
from .modules import Modules, parts_of
from .observed import Clip, Epoch, EpochEnd, Evaluated, Event, Loss, Mistake, Mode, Optimized, Position, Step, tell
from .source import Stack, is_own_object, stack

_MANY = 64  # events that are kept between two steps of an optimizer
_SEVERAL = 3  # steps or calls, all of which must show a mistake
_OF_DIFFERENCES = ("Mul", "Div", "Mean", "Sum", "Pow", "Abs", "Sqrt", "ToCopy")
_EXPANDING = ("Unsqueeze", "TBack", "Transpose", "Permute", "Expand", "Index", "torch::autograd::AccumulateGrad")
_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout")


@dataclass
class Known:
    """What is known of one optimizer.

    Attributes:
        made: Where it was made.
        number: Of the optimizer, -1 before its first step.
        steps: How many it has made.
        named: The parameters that it had at its last step, by their names.
        events: What happened to their gradients since.
    """

    made: Stack = field(default_factory=list)
    number: int = -1
    steps: int = 0
    named: dict[str, Tensor] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)


@dataclass
class TrainingLoop:
    """Observes optimizers and what happens to gradients from the moment of `install`.

    Attributes:
        optimizers: Those of the script.
        scale: By which losses are multiplied.
    """

    modules: Modules
    optimizers: WeakKeyDictionary[Optimizer, Known] = field(default_factory=WeakKeyDictionary)
    scale: float = 1.0
    _unscaled: set[int] | None = None  # optimizers since gradients were scaled, None if they are not
    _told: set[tuple[Any, ...]] = field(default_factory=set)

    def install(self) -> None:
        """Begin."""
        after(Optimizer, "__init__", self._note_made)
        before(Optimizer, "zero_grad", self._zero)
        before(nn.Module, "zero_grad", self._zero_module)
        for name in ("backward", "grad"):
            before(torch.autograd, name, self._backward)
        replace(nn.utils, "clip_grad_norm_", self._clipping)
        replace(nn.utils, "clip_grad_value_", self._clipping)
        before(torch.amp.GradScaler, "scale", self._scaled)
        before(torch.amp.GradScaler, "unscale_", self._unscale)
        before(torch.amp.GradScaler, "update", self._updated)
        before(nn.Module, "__setattr__", self._set)
        before(nn.Module, "load_state_dict", self._load)
        for name in _DROPOUTS:
            before(functional, name, self._drop)

    def known(self, optimizer: Optimizer) -> Known:
        """Return what is known of an optimizer."""
        return self.optimizers.setdefault(optimizer, Known())

    def parameters(self) -> set[int]:
        """Return the identities of the parameters of all optimizers."""
        return set().union(*map(_parameter_ids, list(self.optimizers)))

    def mistakes(self, optimizer: Optimizer) -> dict[str, str]:
        """Return the evidence of what is wrong with a step, by the rule."""
        mistakes = {}
        is_fused = getattr(optimizer, "grad_scale", None) is not None  # it divides by the scale itself
        if self._are_scaled([optimizer]) and not is_fused:
            mistakes["steps-scaled"] = "each step uses gradients that are still scaled"
        if not any(p.requires_grad or p.grad is not None for p in parameters_of(optimizer)):
            mistakes["frozen"] = "none of the optimizer's parameters has `requires_grad`"
        return mistakes

    def outside(self, optimizer: Optimizer) -> dict[str, Stack]:
        """Describe the parameters of an optimizer's networks that have a gradient and are in no optimizer."""
        known = self.parameters()
        found = {}
        for network, _ in self._networks_of(optimizer):
            for name, p in chain(network.named_parameters(), _in_lists(network)):
                if p.requires_grad and id(p) not in known and _has_gradient([p]):
                    found[name.removeprefix("module.")] = self.modules.made(p)
        return found

    def evaluated(self) -> list[Evaluated]:
        """Describe networks that were evaluated since the last step, are in no optimizer, and resemble one that is."""
        known = self.parameters()
        trained = [_shapes_of(network) for network, _ in self.modules.networks]
        found = []
        for network, (loader, where) in self.modules.evaluated.items():
            parameters = list(network.parameters())
            is_alike = bool(parameters) and _shapes_of(network) in trained
            if is_alike and known.isdisjoint(_ids(parameters)):
                hashes = list(map(hash_of, parameters))
                found.append(Evaluated(id(network), hashes, loader, where))
        return found

    def modes(self, optimizer: Optimizer) -> list[str]:
        """List the modes in which an optimizer's networks have computed gradients since the last step."""
        return sorted({mode for _, mode in self._networks_of(optimizer) if mode})

    def _networks_of(self, optimizer: Optimizer) -> Iterator[tuple[nn.Module, str]]:
        """Yield the networks that have parameters of an optimizer, and their modes."""
        own = _parameter_ids(optimizer)
        for network, mode in self.modules.networks:
            if not own.isdisjoint(_ids(network.parameters())):
                yield network, mode

    def _note_made(self, optimizer: Optimizer) -> None:
        self.known(optimizer).made = stack()

    def _note(self, kind: str, optimizer: Optimizer) -> None:
        events = self.known(optimizer).events
        has_gradient = _has_gradient(parameters_of(optimizer))
        if len(events) < _MANY and (has_gradient or kind == "backward"):
            events.append(Event(kind, stack(2), has_gradient))

    def _backward(self, tensors: Any = None) -> None:
        if isinstance(tensors, Tensor) and (evidence := _broadcast(tensors)):
            self._mistake("shapes-broadcast", evidence)
        for optimizer in list(self.optimizers):
            self._note("backward", optimizer)

    def _zero(self, optimizer: Optimizer) -> None:
        self._note("zeroed", optimizer)

    def _zero_module(self, module: nn.Module) -> None:
        inside = _ids(module.parameters())
        for optimizer in list(self.optimizers):
            if _parameter_ids(optimizer) <= inside:
                self._note("zeroed", optimizer)

    def _clipping(self, original: Function) -> Function:
        note = guarded(self._note_clip)

        def call(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            tensors = [parameters] if isinstance(parameters, Tensor) else list(parameters)  # a generator ends
            note(tensors, *args, **kwargs)
            return original(tensors, *args, **kwargs)

        return call

    def _note_clip(self, parameters: list[Tensor], max_norm: float = 0.0) -> None:
        clipped = _ids(parameters)
        owners = [each for each in list(self.optimizers) if not clipped.isdisjoint(_parameter_ids(each))]
        if not owners or not math.isfinite(max_norm) or current().step >= _MANY:
            return
        mistakes = {}
        if self._are_scaled(owners):
            mistakes["clips-scaled"] = "the clipped gradients are still scaled each time"
        last = [event.kind for owner in owners for event in self.known(owner).events[-1:]]
        if "backward" not in last:
            mistakes["clips-nothing"] = "each time, the gradients are clipped after the step that used them"
        tell(Clip(stack(2), mistakes))

    def _are_scaled(self, optimizers: list[Optimizer]) -> bool:
        """Return whether the gradients of all of some optimizers are scaled."""
        return self._unscaled is not None and self._unscaled.isdisjoint(map(id, optimizers))

    def _scaled(self, scaler: Any) -> None:
        if scaler.is_enabled():
            self.scale = scaler.get_scale()
            if self.scale != 1.0 and self._unscaled is None:
                self._unscaled = set()

    def _unscale(self, scaler: Any, optimizer: Optimizer) -> None:
        if self._unscaled is not None:
            self._unscaled.add(id(optimizer))

    def _updated(self) -> None:
        self._unscaled = None

    def _set(self, module: nn.Module, name: str, value: Any) -> None:
        if name == "requires_grad" and not hasattr(type(module), name):
            what = f"`requires_grad = {bool(value)}` is set on a {type(module).__name__}"
            self._mistake("requires-grad", f"{what}, not on its parameters")

    def _drop(self, input: Tensor, p: float = 0.5, training: bool | None = None) -> None:
        if self.modules.is_evaluating and training is None:
            self._mistake("dropout-without-mode", "a network in evaluation mode calls it without `training=`")

    def _load(self, module: nn.Module, state_dict: Any) -> None:
        own = _addresses((*module.parameters(), *module.buffers()))
        loaded = _addresses(state_dict.values())
        if current().step and loaded and loaded <= own:
            self._mistake("loads-itself", "it gets the module's own tensors")

    def _mistake(self, rule: str, evidence: str) -> None:
        """Tell a mistake of a line once."""
        where = stack()
        if where and (rule, where[0]) not in self._told:
            self._told.add((rule, where[0]))
            tell(Mistake(rule, evidence, where))


def _addresses(values: Iterable[Any]) -> set[int]:
    return {value.data_ptr() for value in values if isinstance(value, Tensor)}


def _ids(tensors: Iterable[Tensor]) -> set[int]:
    return set(map(id, tensors))


def _parameter_ids(optimizer: Optimizer) -> set[int]:
    return _ids(parameters_of(optimizer))


def _in_lists(network: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of modules that the script's modules hold in plain lists."""
    for module in filter(is_own_object, network.modules()):
        for name, value in list(vars(module).items()):
            is_plain = isinstance(value, list | tuple | dict) and not name.startswith("_")
            for item, child in parts_of(name, value) if is_plain else ():
                if isinstance(child, nn.Module):
                    yield from child.named_parameters(item)


def _broadcast(loss: Tensor) -> str:
    """Describe a mean of all differences between n outputs of a network and n targets, "" if a loss is none."""
    node = loss.grad_fn
    while node and node.name().startswith(_OF_DIFFERENCES):
        inner = {child for child, _ in node.next_functions if child}
        node = inner.pop() if len(inner) == 1 else None
    if not node or node.name() != "SubBackward0":
        return ""
    made = list(node._input_metadata[0].shape)
    known = [(child, output) for child, output in node.next_functions if child]
    if len(known) != 1 or len(made) != 2 or made[0] != made[1] or made[0] < 2:
        return ""
    child, output = known[0]
    shape = list(child._input_metadata[output].shape)
    is_meant = child.name().startswith(_EXPANDING)
    if is_meant or shape not in (made[:1], [made[0], 1]):
        return ""
    return f"outputs of the shape {shape} minus targets are {made}, of which the loss is the mean or sum"


def _shapes_of(network: nn.Module) -> list[torch.Size]:
    return [p.shape for p in network.parameters()]


def _has_gradient(parameters: list[Tensor]) -> bool:
    gradients = [p.grad for p in parameters if p.grad is not None]
    return any(gradient.is_sparse or bool(gradient.any()) for gradient in gradients)


# Find mistakes in the first rank's records.


def _optimizers(facts: Facts) -> Iterator[list[Step]]:
    """Yield the steps of each optimizer that has made several."""
    steps = by_fields(facts.first(Step), "optimizer")
    for optimizer in facts.first(Optimized):
        own = steps.get((optimizer.optimizer,), [])
        if len(own) >= _SEVERAL and optimizer.parameters:
            yield own


def _told(facts: Facts) -> Findings:
    """Find what observers have told as mistakes: once, of each record of a line, or of an optimizer's last steps."""
    for mistake in facts.first(Mistake):
        yield facts.finding(mistake.rule, mistake.evidence, mistake.where)
    losses = by_line(chain.from_iterable(step.losses for step in facts.first(Step)))
    clips = by_line(facts.first(Clip))
    several = [same for same in clips.values() if len(same) >= _SEVERAL]
    last = [steps[-_SEVERAL:] for steps in _optimizers(facts)]
    together: list[Sequence[Loss | Clip | Step]] = [*losses.values(), *several, *last]
    for records in together:
        first = records[0]
        for rule in common(records, "mistakes") if first.where else ():
            yield facts.finding(rule, first.mistakes[rule], first.where)


def _zeroing(facts: Facts) -> Findings:
    """Find gradients that are set to zero too early, too late, or never."""
    for steps in _optimizers(facts):
        number = len(steps)
        events = [step.events for step in steps]
        thrown = [lines for lines in map(_thrown_away, events) if lines]
        if len(thrown) >= _SEVERAL and 2 * len(thrown) >= number:
            seen = f"in {len(thrown)} of {number} steps gradients of an earlier micro-batch were thrown away"
            yield facts.finding("discards-micro-batches", seen, *thrown[0])
        if all(map(_end_with_zero, events)):
            zeroed = events[0][-1].where
            seen = f"before each of {number} steps the gradients were set to zero"
            yield facts.finding("zeroed-before-step", seen, zeroed, steps[0].where)
        if all(map(_are_stale, events[1:])):
            backward = events[1][-1].where
            seen = f"at each of {number - 1} steps the gradients of the step before were still there"
            yield facts.finding("never-zeroed", seen, backward, steps[0].where)


def _end_with_zero(events: list[Event]) -> bool:
    """Return whether gradients were computed and then set to zero."""
    return len(events) > 1 and events[-1].kind == "zeroed"


def _are_stale(events: list[Event]) -> bool:
    """Return whether each backward pass of a step has found gradients, and nothing set them to zero."""
    stale = [event.kind == "backward" and event.had_gradients for event in events]
    return bool(stale) and all(stale)


def _thrown_away(events: list[Event]) -> list[Stack]:
    """List the lines that set gradients to zero between backward passes of one line, the last one's."""
    passes = [number for number, event in enumerate(events) if event.kind == "backward"]
    lines = [events[number].where for number in passes]
    if not passes:
        return []
    first = passes[lines.index(lines[-1])]
    between = events[first : passes[-1]]
    return [event.where for event in between if event.kind == "zeroed"]


def _left_over(facts: Facts) -> Findings:
    """Find gradients of an epoch's last micro-batches in the first step of the next one."""
    for steps in _optimizers(facts):
        passes = [_passes(step.events) for step in steps]
        read = [_only_position(step) for step in steps]
        if passes[0] != read[0].batch:
            continue
        for number in range(1, len(steps)):
            more = passes[number] - read[number].batch
            is_new = read[number].epoch > read[number - 1].epoch
            if is_new and more > 0:
                last = steps[number].events[-1]
                seen = f"the first step of an epoch also has gradients of {more} micro-batches of the epoch before"
                yield facts.finding("left-over", seen, last.where)
                break


def _only_position(step: Step) -> Position:
    """Return the batch of the loader that trains, if there is one."""
    if len(step.position) == 1:
        return step.position[0]
    return Position("", 0, 0)


def _passes(events: list[Event]) -> int:
    """Count the backward passes of the last one's line, since gradients were set to zero."""
    number = 0
    for event in reversed(events):
        if event.kind == "zeroed":
            break
        number += event.where == events[-1].where
    return number


def _schedules(facts: Facts) -> Findings:
    """Find schedules that step too often, or never."""
    steps = facts.first(Step)
    epochs = sum(end.loader in facts.training for end in facts.first(EpochEnd))
    ends = [*steps[:1], *steps[-1:]]
    for first, schedule in zip(*(step.schedules for step in ends), strict=False):
        where = schedule.made
        if schedule.length is not None and schedule.steps > schedule.length:
            seen = f"it has made {schedule.steps} steps, and `T_max` is {schedule.length}"
            yield facts.finding("schedule-over", seen, where)
        if epochs > 1 and schedule.steps == first.steps and not schedule.stepped:
            yield facts.finding("schedule-unused", f"after {epochs} epochs nothing has called its `step`", where)


def _schedule_lengths(facts: Facts) -> Findings:
    """Find schedules that step with the optimizer, and are made for the steps of one process with all samples."""
    steps = [step for step in facts.first(Step) if step.position]
    is_one = len(facts.training) == len(facts.first(Optimized)) == 1
    if not facts.is_distributed or not is_one or len(steps) < _SEVERAL:
        return
    some = steps[_SEVERAL - 1]
    (position,) = some.position
    epoch = _epoch_at(facts, position)
    if not epoch or epoch.bounded or not epoch.rounds or not epoch.batches:
        return
    if position.epoch != steps[0].position[0].epoch:
        return
    for schedule in steps[-1].schedules:
        per_step = schedule.steps / (steps[-1].number - 1)
        expected = per_step * epoch.rounds * epoch.batches * some.number / position.batch
        error = abs(schedule.total - expected * facts.world_size)
        bound = min(expected / 4, per_step * epoch.rounds * facts.world_size)
        if per_step >= 1 and error <= bound:
            seen = f"it is made for {schedule.total} steps; {epoch.rounds} epochs have {expected:.0f} per rank"
            yield facts.finding("schedule-length", seen, schedule.made)


def _epoch_at(facts: Facts, position: Position) -> Epoch | None:
    """Return the epoch that a loader is at, None for an endless one, which is not told."""
    for epoch in reversed(facts.first(Epoch)):
        if epoch[:2] == position[:2]:
            return epoch
    return None


def _averages(facts: Facts) -> Findings:
    """Find networks that only evaluations use, and that stay as they are while one of the same form trains."""
    evaluated = list(chain.from_iterable(step.evaluated for step in facts.first(Step)))
    for same in by_fields(evaluated, "network").values():
        trains = any(each.loader in facts.training for each in same)
        is_stale = len(same) > 1 and agree(same, "hashes")
        if is_stale and not trains and same[0].loader:
            seen = f"its weights were the same at {len(same)} evaluations"
            yield facts.finding("average-stale", seen, same[0].where)


def _divided_twice(facts: Facts) -> Findings:
    for steps in _optimizers(facts):
        if any(step.summed for step in steps):  # gradients of all ranks are added up: a loss may count less
            continue
        weights = []
        for step in steps:
            weights.append([each.total / step.scale for each in by_backward(step.losses)])
        many = max(map(len, weights))
        full = [each for each in weights if len(each) == many]
        if many < 2 or len(full) < 2:
            continue
        share = 1 / many**2
        if all(near(weight, share) for weight in chain.from_iterable(full)):
            first = steps[0]
            seen = f"each of {many} micro-batches of a step has the weight 1/{many**2} instead of 1/{many}"
            yield facts.finding("divided-twice", seen, first.backward, first.losses[0].where)


def _evaluation_mode(facts: Facts) -> Findings:
    for steps in _optimizers(facts):
        modes = [step.modes for step in steps if step.modes]
        last = list(takewhile(lambda mode: mode == ["eval"], reversed(modes)))
        if len(last) >= _SEVERAL:
            seen = f"at the last {len(last)} of {len(modes)} steps the network is in evaluation mode"
            rule = "always-evaluation" if len(last) == len(modes) else "evaluation-left-on"
            switched = steps[-1].switched.values()
            yield facts.finding(rule, seen, *switched, steps[-1].where)


def _training_mode(facts: Facts) -> Findings:
    if not facts.first(Step):
        return
    calls = [call for call in facts.first(Mode) if call.loader not in facts.training]
    for own in by_fields(calls, "loader").values():
        if all(call.mode == "train" for call in own):
            seen = "dropout or batch norm is in training mode for all batches of an evaluation loader"
            yield facts.finding("training-mode", seen, own[0].where)


def _outside(facts: Facts) -> Findings:
    for steps in _optimizers(facts):
        names = common(steps, "outside")
        if names:
            seen = f"{name_some(names)}: a gradient at each step, but in no optimizer"
            rule = "replaced-after-optimizer" if common(steps, "without") else "not-in-optimizer"
            rule = "layers-in-a-list" if "[" in names[0] else rule
            where = steps[0].outside[names[0]]
            yield facts.finding(rule, seen, where, steps[0].made)


ALONE = (
    _told, _zeroing, _left_over, _divided_twice, _outside,
    _schedules, _schedule_lengths, _averages, _evaluation_mode, _training_mode,
)  # fmt: skip
