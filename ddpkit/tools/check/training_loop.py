"""Observe the training loop of one process, and find its mistakes: gradients, modes, losses and parameters."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import takewhile
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from ..recorder import Record, Recorder, after, before, hash_of, parameters_of
from .facts import Facts, Finding, all_equal, name_some, places
from .gradients import by_backward, by_line, near
from .modules import Modules
from .source import Stack, calls_method, stack

_MANY = 64  # events that are kept between two steps of an optimizer
_SEVERAL = 3  # steps or calls, all of which must show a mistake
_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout")


class TrainingLoop:
    """Observes what happens to gradients from the moment of `install`.

    Attributes:
        optimizers: What happened to the gradients of each since its last step: kind, line, and for a backward pass
            whether there were gradients already.
    """

    def __init__(self, recorder: Recorder, modules: Modules) -> None:
        self._recorder = recorder
        self._modules = modules
        self._unscaled: set[int] | None = None  # optimizers since gradients were scaled, None if they are not
        self._scale = 1.0
        self._told: set[tuple[Any, ...]] = set()
        self.optimizers: WeakKeyDictionary[Optimizer, list[tuple[str, Stack, bool]]] = WeakKeyDictionary()

    def install(self) -> None:
        """Begin."""
        after(Optimizer, "__init__", lambda optimizer, *args, **kwargs: self.optimizers.setdefault(optimizer, []))
        before(Optimizer, "zero_grad", lambda optimizer, *args, **kwargs: self._zero([optimizer]))
        before(nn.Module, "zero_grad", self._zero_module)
        for name in ("backward", "grad"):
            before(torch.autograd, name, self._backward)
        for owner in (nn.utils, nn.utils.clip_grad):
            before(owner, "clip_grad_norm_", self._clip)
            before(owner, "clip_grad_value_", self._clip)
        before(torch.amp.GradScaler, "scale", self._scaled)
        before(torch.amp.GradScaler, "unscale_", self._unscale)
        before(torch.amp.GradScaler, "update", self._updated)
        before(nn.Module, "__setattr__", self._set)
        before(nn.Module, "load_state_dict", self._load)
        for name in _DROPOUTS:
            before(functional, name, self._drop)

    def take(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return what happened to an optimizer's gradients before this step, and to its networks."""
        events = self.optimizers.get(optimizer, [])
        self.optimizers[optimizer] = []
        mistakes = {}
        is_fused = getattr(optimizer, "grad_scale", None) is not None  # it divides by the scale itself
        if self._unscaled is not None and id(optimizer) not in self._unscaled and not is_fused:
            mistakes["steps-scaled"] = "each step uses gradients that are still scaled"
        if not any(p.requires_grad or p.grad is not None for p in parameters_of(optimizer)):
            mistakes["frozen"] = "none of the optimizer's parameters has `requires_grad`"
        networks = {
            "modes": self._modes(optimizer),
            "outside": self._outside(optimizer),
            "evaluated": self._evaluated(),
        }
        return {"events": events, "scale": self._scale, "mistakes": mistakes, **networks}

    def _outside(self, optimizer: Optimizer) -> dict[str, Any]:
        """Describe the parameters of an optimizer's networks that have a gradient and are in no optimizer."""
        own = set(map(id, parameters_of(optimizer)))
        known = {id(p) for other in list(self.optimizers) for p in parameters_of(other)} | own
        found = {}
        for network, _ in self._modules.networks:
            parameters = dict(network.named_parameters())
            if own.isdisjoint(map(id, parameters.values())):
                continue
            for name, parameter in parameters.items():
                if parameter.requires_grad and id(parameter) not in known and _has_gradient([parameter]):
                    found[name.removeprefix("module.")] = self._modules.made(parameter)
        return found

    def _evaluated(self) -> list[Record]:
        """Describe networks that were evaluated since the last step, are in no optimizer, and resemble one that is."""
        known = {id(p) for optimizer in list(self.optimizers) for p in parameters_of(optimizer)}
        trained = [[p.shape for p in network.parameters()] for network, _ in self._modules.networks]
        found = []
        for network, (loader, where) in self._modules.evaluated.items():
            parameters = list(network.parameters())
            is_copy = known.isdisjoint(map(id, parameters)) and [p.shape for p in parameters] in trained
            if is_copy and parameters:
                hashes = [hash_of(p) for p in parameters]
                found.append({"network": id(network), "hashes": hashes, "loader": loader, "where": where})
        return found

    def _modes(self, optimizer: Optimizer) -> list[str]:
        """List the modes in which an optimizer's networks have computed gradients since the last step."""
        own = set(map(id, parameters_of(optimizer)))
        networks = self._modules.networks
        return sorted({mode for network, mode in networks if mode and own & set(map(id, network.parameters()))})

    def _note(self, kind: str, optimizer: Optimizer) -> None:
        events = self.optimizers.setdefault(optimizer, [])
        has_gradient = _has_gradient(parameters_of(optimizer))
        if len(events) < _MANY and (has_gradient or kind == "backward"):
            events.append((kind, stack()[:2], has_gradient))

    def _backward(self, *args: Any, **kwargs: Any) -> None:
        for optimizer in list(self.optimizers):
            self._note("backward", optimizer)

    def _zero(self, optimizers: list[Optimizer]) -> None:
        for optimizer in optimizers:
            self._note("zeroed", optimizer)

    def _zero_module(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        inside = set(map(id, module.parameters()))
        self._zero([o for o in list(self.optimizers) if inside.issuperset(map(id, parameters_of(o)))])

    def _clip(self, *args: Any, **kwargs: Any) -> None:
        given = dict(zip(("parameters", "max_norm"), args, strict=False)) | kwargs
        parameters, bound = given["parameters"], float(given.get("max_norm", given.get("clip_value", 0.0)))
        clipped = set(map(id, [parameters] if isinstance(parameters, Tensor) else list(parameters)))
        owners = [o for o in list(self.optimizers) if not clipped.isdisjoint(map(id, parameters_of(o)))]
        if owners and math.isfinite(bound) and self._recorder.step < _MANY:
            kinds = [[kind for kind, *_ in self.optimizers[owner]][-1:] for owner in owners]
            mistakes = {}
            if self._unscaled is not None and self._unscaled.isdisjoint(map(id, owners)):
                mistakes["clips-scaled"] = "the clipped gradients are still scaled each time"
            if all(kind != ["backward"] for kind in kinds):
                mistakes["clips-nothing"] = "each time, the gradients are clipped after the step that used them"
            self._recorder.tell("clip", where=stack()[:2], mistakes=mistakes)

    def _scaled(self, scaler: Any, *args: Any) -> None:
        if scaler.is_enabled():
            self._scale = scaler.get_scale()
            self._unscaled = set() if self._scale != 1.0 and self._unscaled is None else self._unscaled

    def _unscale(self, scaler: Any, optimizer: Optimizer) -> None:
        if self._unscaled is not None:
            self._unscaled.add(id(optimizer))

    def _updated(self, *args: Any) -> None:
        self._unscaled = None

    def _set(self, module: nn.Module, name: str, value: Any) -> None:
        if name == "requires_grad" and not hasattr(type(module), name):
            what = f"`requires_grad = {bool(value)}` is set on a {type(module).__name__}"
            self._mistake("requires-grad", f"{what}, not on its parameters")

    def _drop(self, input: Tensor, *args: Any, **kwargs: Any) -> None:
        if self._modules.is_evaluating and len(args) < 2 and "training" not in kwargs:
            self._mistake("dropout-without-mode", "a network in evaluation mode calls it without `training=`")

    def _load(self, module: nn.Module, state: Any, *args: Any, **kwargs: Any) -> None:
        own = {tensor.data_ptr() for tensor in (*module.parameters(), *module.buffers())}
        loaded = {tensor.data_ptr() for tensor in state.values() if isinstance(tensor, Tensor)}
        if self._recorder.step and loaded and loaded <= own:
            self._mistake("loads-itself", "it gets the module's own tensors")

    def _mistake(self, rule: str, evidence: str) -> None:
        """Tell a mistake of a line once."""
        where = stack()
        if where and (rule, where[0]) not in self._told:
            self._told.add((rule, where[0]))
            self._recorder.tell("mistake", rule=rule, evidence=evidence, where=where)


def _has_gradient(parameters: list[Tensor]) -> bool:
    gradients = [p.grad for p in parameters if p.grad is not None]
    return any(gradient.is_sparse or bool(gradient.any()) for gradient in gradients)


# The rules: each looks at the first rank's records, and yields the name of a mistake, what it has seen, and the lines.

_Found = Iterator[tuple[str, str, list[Any]]]


def _optimizers(facts: Facts) -> Iterator[list[Record]]:
    """Yield the steps of each optimizer that has made several."""
    for optimizer in facts.first("optimizer"):
        steps = [r for r in facts.first("step") if r["optimizer"] == optimizer["optimizer"]]
        if len(steps) >= _SEVERAL and optimizer["parameters"]:
            yield steps


def _seen(facts: Facts) -> _Found:
    """Yield what observers have told as mistakes: once, of each record of a line, or of an optimizer's last steps."""
    for record in facts.first("mistake"):
        yield record["rule"], record["evidence"], [record["where"]]
    losses = [loss for step in facts.first("step") for loss in step["losses"]]
    lines = [records for line, records in by_line(losses).items() if line]
    clips = [records for line, records in by_line(facts.first("clip")).items() if line and len(records) >= _SEVERAL]
    for records in [*lines, *clips, *(steps[-_SEVERAL:] for steps in _optimizers(facts))]:
        for rule, evidence in records[0]["mistakes"].items():
            if all(rule in record["mistakes"] for record in records):
                yield rule, evidence, [records[0]["where"]]


def _zeroing(facts: Facts) -> _Found:
    for steps in _optimizers(facts):
        events = [step["events"] for step in steps]
        thrown = [lines for lines in map(_thrown_away, events) if lines]
        if len(thrown) >= _SEVERAL and 2 * len(thrown) >= len(steps):
            seen = f"in {len(thrown)} of {len(steps)} steps gradients of an earlier micro-batch were thrown away"
            yield "discards-micro-batches", seen, thrown[0]
        if all(len(each) > 1 and each[-1][0] == "zeroed" for each in events):
            seen = f"before each of {len(steps)} steps the gradients were set to zero"
            yield "zeroed-before-step", seen, [events[0][-1][1], steps[0]["where"]]
        if all(each and all(kind == "backward" and stale for kind, _, stale in each) for each in events[1:]):
            seen = f"at each of {len(steps) - 1} steps the gradients of the step before were still there"
            yield "never-zeroed", seen, [events[1][-1][1], steps[0]["where"]]


def _thrown_away(events: list[Any]) -> list[Any]:
    """List the lines that set gradients to zero between backward passes of one line, the last one's."""
    passes = [number for number, event in enumerate(events) if event[0] == "backward"]
    same = [number for number in passes if events[number][1] == events[passes[-1]][1]]
    return [line for kind, line, _ in events[same[0] : same[-1]] if kind == "zeroed"] if same else []


def _left_over(facts: Facts) -> _Found:
    """Find gradients of an epoch's last micro-batches in the first step of the next one."""
    for steps in _optimizers(facts):
        passes = [_passes(step["events"]) for step in steps]
        read = [step["position"][0][1:] if len(step["position"]) == 1 else [0, 0] for step in steps]
        for number in range(1, len(steps)):
            more = passes[number] - read[number][1]
            if read[number][0] > read[number - 1][0] and more > 0 and passes[0] == read[0][1]:
                seen = f"the first step of an epoch also has gradients of {more} micro-batches of the epoch before"
                yield "left-over", seen, [steps[number]["events"][-1][1]]
                break


def _passes(events: list[Any]) -> int:
    """Count the backward passes of the last one's line, since gradients were set to zero."""
    return sum(line == events[-1][1] for _, line, _ in takewhile(lambda event: event[0] != "zeroed", reversed(events)))


def _schedules(facts: Facts) -> _Found:
    steps = [step["schedules"] for step in facts.first("step")]
    epochs = sum(record["loader"] in facts.training for record in facts.first("epoch end"))
    for before_it, schedule in zip(*steps[:1], *steps[-1:], strict=False):
        where = schedule["made"]
        if schedule["length"] is not None and schedule["steps"] > schedule["length"]:
            yield (
                "schedule-over",
                f"it has made {schedule['steps']} steps, and `T_max` is {schedule['length']}",
                [where],
            )
        is_called = any(calls_method(line, "step") for line in places(where[:1]))
        if epochs > 1 and schedule["steps"] == before_it["steps"] and not is_called:
            yield "schedule-unused", f"after {epochs} epochs nothing has called its `step`", [where]


def _schedule_lengths(facts: Facts) -> _Found:
    """Find schedules that step with the optimizer, and are made for the steps of one process with all samples."""
    steps = [step for step in facts.first("step") if step["position"]]
    is_one = len(facts.training) == len(facts.first("optimizer")) == 1
    if not facts.is_distributed or not is_one or len(steps) < _SEVERAL:
        return
    some, last = steps[_SEVERAL - 1], steps[-1]
    ((loader, number, read),) = some["position"]
    epochs = {(r["loader"], r["number"]): r for r in facts.first("epoch")}  # an endless one is not told
    epoch = epochs.get((loader, number))
    if not epoch or epoch["bounded"] or not epoch["rounds"] or not epoch["batches"]:
        return
    if number != steps[0]["position"][0][1]:
        return
    for schedule in last["schedules"]:
        per_step = schedule["steps"] / (last["number"] - 1)
        expected = per_step * epoch["rounds"] * epoch["batches"] * some["number"] / read
        error = abs(schedule["total"] - expected * facts.world_size)
        if per_step >= 1 and error <= min(expected / 4, per_step * epoch["rounds"] * facts.world_size):
            seen = f"it is made for {schedule['total']} steps; {epoch['rounds']} epochs have {expected:.0f} per rank"
            yield "schedule-length", seen, [schedule["made"]]


def _averages(facts: Facts) -> _Found:
    """Find networks that only evaluations use, and that stay as they are while one of the same form trains."""
    evaluated = [each for step in facts.first("step") for each in step["evaluated"]]
    for network in dict.fromkeys(each["network"] for each in evaluated):
        own = [each for each in evaluated if each["network"] == network]
        trains = any(each["loader"] in facts.training for each in own)
        if len(own) > 1 and all_equal([each["hashes"] for each in own]) and not trains and own[0]["loader"]:
            yield "average-stale", f"its weights were the same at {len(own)} evaluations", [own[0]["where"]]


def _divided_twice(facts: Facts) -> _Found:
    for steps in _optimizers(facts):
        if any(step["summed"] for step in steps):  # gradients of all ranks are added up: a loss may count less
            continue
        totals = [[total / step["scale"] for total, _ in by_backward(step["losses"])] for step in steps]
        many = max(map(len, totals))
        full = [weights for weights in totals if len(weights) == many]
        share = 1.0 / max(many, 1) ** 2
        if many > 1 and len(full) > 1 and all(near(w, share) for ws in full for w in ws):
            seen = f"each of {many} micro-batches of a step has the weight 1/{many**2} instead of 1/{many}"
            yield "divided-twice", seen, [steps[0]["backward"], steps[0]["losses"][0]["where"]]


def _evaluation_mode(facts: Facts) -> _Found:
    for steps in _optimizers(facts):
        modes = [step["modes"] for step in steps if step["modes"]]
        others = [number for number, mode in enumerate(modes) if mode != ["eval"]]
        left = len(modes) - 1 - others[-1] if others else len(modes)
        if left >= _SEVERAL:
            seen = f"at the last {left} of {len(modes)} steps the network is in evaluation mode"
            rule = "evaluation-left-on" if others else "always-evaluation"
            yield rule, seen, [*steps[-1]["switched"].values(), steps[-1]["where"]]


def _training_mode(facts: Facts) -> _Found:
    calls = [r for r in facts.first("call") if r["loader"] not in facts.training and facts.first("step")]
    for loader in dict.fromkeys(record["loader"] for record in calls):
        own = [record for record in calls if record["loader"] == loader]
        if all(record["mode"] == "train" for record in own):
            seen = "dropout or batch norm is in training mode for all batches of an evaluation loader"
            yield "training-mode", seen, [own[0]["where"]]


def _outside(facts: Facts) -> _Found:
    for steps in _optimizers(facts):
        first = steps[0]
        names = [name for name in first["outside"] if all(name in step["outside"] for step in steps)]
        lost = [name for name in first["without"] if all(name in step["without"] for step in steps)]
        if names:
            seen = f"{name_some(names)}: a gradient at each step, but in no optimizer"
            rule = "replaced-after-optimizer" if lost else "not-in-optimizer"
            yield rule, seen, [first["outside"][names[0]], first["made"]]


_OF_GRADIENTS = (_zeroing, _left_over, _divided_twice, _outside)
_RULES = (_seen, *_OF_GRADIENTS, _schedules, _schedule_lengths, _averages, _evaluation_mode, _training_mode)


def find(facts: Facts) -> Iterator[Finding]:
    """Apply each rule."""
    for look in _RULES:
        for rule, evidence, lines in look(facts):
            yield facts.finding(rule, evidence, *lines)
