"""Observe training steps: losses, schedules, and what each optimizer holds on each rank."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from inspect import getclosurevars
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.optim import Optimizer, lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..recorder import Function, after, before, current, guarded, hash_of, parameters_of, replace, sample, whole
from .collectives import Collectives, square_of, tell_values
from .loaders import Ending, Samples
from .modules import Modules, roots, variables
from .observed import Buffers, Fixed, Gradient, Loss, Optimized, Parameter, Plateau, Schedule, Step, Sum, tell
from .random_numbers import Windows
from .source import Stack, divides_by_ranks, is_stepped, stack
from .training_loop import Known, TrainingLoop

_ELEMENTWISE = ["mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"]
_OF_LOGARITHMS = ["nll_loss", "kl_div"]
_LOSSES = [*_ELEMENTWISE, *_OF_LOGARITHMS, "cross_entropy", "binary_cross_entropy", "binary_cross_entropy_with_logits"]
_APPLIED = {"cross_entropy": "Softmax", "binary_cross_entropy_with_logits": "Sigmoid"}
_SHAPES = ("_DDPSink", "ToCopy", "Squeeze", "Unsqueeze", "View", "UnsafeView", "Transpose", "Permute", "Alias")
_MANY_LOSSES = 64  # losses that are kept for a step
_IMAGES = 4  # dimensions of classes by pixel, of which each rank ignores a few: their means count as equals everywhere
_LOOSE = 0.05  # of 1, by which probabilities in half precision may miss it
_FIRST_STEPS = 3  # at which states are compared: what differs differs by then


@dataclass
class Losses:
    """Observes loss functions and `backward` from the moment of `install`.

    Attributes:
        places: Where `backward` was called last.
        divides: Whether the script divides by the number of ranks there.
    """

    modules: Modules
    samples: Samples
    ending: Ending
    places: Stack = field(default_factory=list)
    divides: bool = False
    _found: list[Loss] = field(default_factory=list)
    _backwards: int = 0
    _depth: int = 0

    def install(self) -> None:
        """Begin."""
        for name in _LOSSES:
            replace(functional, name, self._observed)
        before(torch.autograd, "backward", self._begin_backward)

    def begin_step(self) -> None:
        """Forget what belongs to the step that has ended."""
        self._found = []
        self._backwards = 0

    def of_this_step(self) -> list[Loss]:
        """List the losses that were differentiated in this step."""
        return [loss for loss in self._found if loss.backward >= 0]

    def _begin_backward(self) -> None:
        self._backwards += 1
        self.samples.begin_backward()
        self.ending.accumulates = True
        self.modules.begin_backward()
        self.places = stack(4)
        self.divides = divides_by_ranks(4)

    def _observed(self, original: Function) -> Function:
        watch = guarded(self._watch)

        def call(input: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            try:
                result = original(input, target, *args, **kwargs)
            finally:
                self._depth -= 1
            if self._depth == 0:
                watch(result, original.__name__, input, target, kwargs)
            return result

        return call

    def _watch(self, result: Tensor, name: str, input: Tensor, target: Tensor, kwargs: Any) -> None:
        if not result.requires_grad or result.is_meta or len(self._found) >= _MANY_LOSSES:
            return
        reduction = kwargs.get("reduction", "mean")
        count = len(input) if input.ndim else 1
        if name in ("cross_entropy", "nll_loss") and not target.is_floating_point():
            count = int((target != kwargs.get("ignore_index", -100)).sum())
        is_masked = not target.is_floating_point() and count < target.numel() and input.ndim < _IMAGES
        is_summed = reduction != "mean"
        loss = Loss(
            where=stack(3),
            samples=count,
            total=0.0,
            summed=is_summed,
            masked=is_summed or is_masked,
            mistakes=_mistakes(name, input, target),
            backward=-1,
        )
        found = self._found
        number = len(found)
        found.append(loss)

        def arrived(gradient: Tensor) -> None:
            loss = found[number]
            share = float(gradient.sum())
            if reduction == "sum":
                share *= count
            if reduction == "none":
                loss = loss._replace(samples=int(gradient.count_nonzero()))
            found[number] = loss._replace(total=loss.total + share, backward=self._backwards)

        result.register_hook(guarded(arrived))  # type: ignore[no-untyped-call]


def _mistakes(name: str, input: Tensor, target: Tensor) -> dict[str, str]:
    """Return evidence that what a loss gets is wrong, by the rule."""
    found = {}
    if activation := _activation(name, input):
        found["activated-twice"] = f"the loss gets the result of {activation}, and applies it again"
    if name in _OF_LOGARITHMS and input.ndim > 1:
        likely = input.detach().exp()
        dimensions = range(1, 2 if name == "nll_loss" else input.ndim)
        sums = [float(likely.sum(dim).median()) for dim in dimensions]  # some samples may be masked
        total = min(sums, key=lambda total: abs(total - 1))
        if abs(total - 1) > _LOOSE:
            rule = "above-one" if total > 1 else "not-log-probabilities"
            found[rule] = f"the exponentials of its input add up to {total:.2g} per sample"
    if name in _ELEMENTWISE and input.shape != target.shape:
        pairs = torch.broadcast_tensors(input, target)[0].numel()  # type: ignore[no-untyped-call]
        if pairs > max(input.numel(), target.numel()):
            shapes = f"{list(input.shape)} and {list(target.shape)}"
            found["shapes-broadcast"] = f"input and target have the shapes {shapes}"
    return found


def _activation(name: str, logits: Tensor) -> str:
    """Name the function that has computed what a loss takes for logits, "" if it is no activation."""
    activation = _APPLIED.get(name)
    node = logits.grad_fn
    output = logits.output_nr
    while activation and node:
        if node.name().startswith(activation):
            return activation.lower()
        if not node.name().startswith(_SHAPES):
            return ""
        if "DDP" not in node.name():  # which hands each output of a network on
            output = 0
        node, output = node.next_functions[output]
    return ""


@dataclass
class Steps:
    """Observes each optimiser from the moment of `install`."""

    ending: Ending
    modules: Modules
    losses: Losses
    windows: Windows
    collectives: Collectives
    samples: Samples
    loop: TrainingLoop
    _schedules: list[tuple[Any, Stack]] = field(default_factory=list)
    _depth: int = 0
    _loaded: Stack = field(default_factory=list)
    _buffers: dict[str, Buffers] | None = None  # at the first call of a network since the last step

    def install(self) -> None:
        """Begin."""
        self.ending.optimizers = self.loop.optimizers
        self.modules.on_call = guarded(self._note_buffers)
        for kind in (lr_scheduler.LRScheduler, lr_scheduler.SequentialLR, lr_scheduler.ChainedScheduler):
            after(kind, "__init__", lambda made: self._schedules.append((made, stack())))
        before(lr_scheduler.ReduceLROnPlateau, "step", self._note_plateau)
        before(Optimizer, "load_state_dict", self._note_loaded)
        register_optimizer_step_pre_hook(self._begins)
        register_optimizer_step_post_hook(self._ended)

    def _note_plateau(self, schedule: Any, metrics: Any = None) -> None:
        if metrics is not None:
            tell(Plateau(float(metrics), stack()))

    def _note_loaded(self) -> None:
        self._loaded = stack()

    def _begins(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._depth += 1
        if self._depth > 1:  # an optimiser that is part of another
            return
        known = self.loop.known(optimizer)
        if known.number < 0:
            known.number = sum(other.number >= 0 for other in self.loop.optimizers.values())
        self.ending.before_step(known.steps)
        known.steps += 1
        current().step = max(current().step, known.steps)
        if not has_closure(args, kwargs):
            guarded(self._record)(optimizer, known)

    def _ended(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._depth -= 1
        if self._depth:
            return
        if has_closure(args, kwargs):
            guarded(self._record)(optimizer, self.loop.known(optimizer))
        self.ending.accumulates = False
        self._buffers = None
        for observer in (self.samples, self.modules, self.losses, self.windows):
            observer.begin_step()

    @torch.no_grad()
    def _record(self, optimizer: Optimizer, known: Known) -> None:
        parameters = parameters_of(optimizer)
        identities = list(map(id, parameters))
        if identities != list(map(id, known.named.values())):
            known.named = dict(zip(names_of(parameters), parameters, strict=True))
            self._introduce(known)
        if current().step == 1:
            tell_values()
        hashes = {}
        gradients = {}
        for name, p in known.named.items():
            plain = whole(p)
            if plain is None:
                continue
            self.collectives.trained[plain.data_ptr()] = (known.number, name)
            hashes[name] = hash_of(plain)
            if p.grad is None or p.grad.is_sparse:
                continue
            gradient = whole(p.grad)
            if gradient is not None:
                gradients[name] = gradient
        summed = self._summed(list(gradients.values()))
        self.windows.end()
        step = Step(
            optimizer=known.number,
            number=known.steps,
            where=stack(),
            made=known.made,
            class_name=type(optimizer).__name__,
            joined=dist.is_initialized(),
            position=self.samples.position(),
            parameters=hashes,
            gradients={name: Gradient(hash_of(g), sample(g)) for name, g in gradients.items()},
            without=self._without_gradient(known),
            outside=self.loop.outside(optimizer),
            state=_state_of(optimizer, known),
            loaded=self._loaded,
            rates=[float(group["lr"]) for group in optimizer.param_groups if "lr" in group],
            schedules=self._describe_schedules(),
            wrappers=[wrapped.described() for wrapped in self.modules.wrapped.values()],
            others=self._others() if known.steps == 1 else {},
            buffers=self._hash_buffers() if self._buffers is None else self._buffers,
            evaluated=self.loop.evaluated(),
            calls=self.modules.calls,
            modes=self.loop.modes(optimizer),
            switched=self.modules.switched,
            losses=self.losses.of_this_step(),
            backward=self.losses.places,
            divides=self.losses.divides or divides_by_ranks(4) or bool(summed and summed.divides),
            summed=summed,
            events=known.events,
            scale=self.loop.scale,
            mistakes=self.loop.mistakes(optimizer),
            random=self.windows.found,
        )
        tell(step)
        known.events = []

    def _describe_schedules(self) -> list[Schedule]:
        """Tell how often the schedules that are no part of others have stepped, and how long they are."""
        parts = [id(part) for schedule, _ in self._schedules for part in _parts_of(schedule)]
        described = []
        for schedule, made in self._schedules:
            if id(schedule) not in parts:
                length = getattr(schedule, "T_max", None)
                stepped = any(map(is_stepped, made[:1]))
                described.append(Schedule(made, schedule.last_epoch, length, _total(schedule), stepped))
        return described

    def _without_gradient(self, known: Known) -> dict[str, Stack]:
        """Name the parameters without a gradient, and where a collective got what they compute, if one did."""
        without = {}
        for name, p in known.named.items():
            if p.requires_grad and p.grad is None:
                without[name] = self.collectives.cut.get(id(p), [])
        return without

    def _summed(self, gradients: list[Tensor]) -> Sum | None:
        """Compare the gradients with the sums that were reduced before this step, if these are of as many numbers."""
        sums = self.collectives.sums
        self.collectives.sums = []
        elements = sum(each.numel for each in sums)
        if not sums or elements != sum(g.numel() for g in gradients):
            return None
        square = sum(map(square_of, gradients))
        summed = sum(each.square for each in sums)
        return sums[0]._replace(ratio=math.sqrt(summed / square) if square else 0.0)

    def _introduce(self, known: Known) -> None:
        """Tell the names of an optimiser's parameters, and where they come from."""
        described = {}
        for name, p in known.named.items():
            wrapped, is_managed = self.modules.wrapper_of(p)
            ddp = wrapped.made if wrapped else None
            shape = None if whole(p) is None else list(p.shape)
            described[name] = Parameter(shape, self.modules.made(p), ddp, is_managed)
        tell(Optimized(known.number, known.made, described))

    def _others(self) -> dict[str, Fixed]:
        """Hash the parameters of networks that are used and not trained."""
        trained = self.loop.parameters()
        found = {}
        for name, root in roots():
            tensors = [*root.parameters(), *root.buffers()]
            others = [tensor for tensor in tensors if whole(tensor) is not None]
            is_trained = any(id(tensor) in trained for tensor in tensors)
            if others and not is_trained and self.modules.is_used(root):
                hashes = list(map(hash_of, others))
                found[name] = Fixed(hashes, self.modules.made(others[0]))
        return found

    def _note_buffers(self) -> None:
        """Hash buffers before a network changes them, for a script may average them after a step."""
        if self._buffers is None:
            self._buffers = self._hash_buffers()

    def _hash_buffers(self) -> dict[str, Buffers]:
        """Hash the running statistics of networks, and tell if DDP sends them out."""
        found: dict[str, Buffers] = {}
        if current().step > self.ending.steps + 1:
            return found
        trained = self.loop.parameters()
        for name, root in roots():
            hashes = {}
            for buffer_name, buffer in self.modules.used_buffers(root):
                if buffer.is_floating_point() and whole(buffer) is not None:
                    hashes[buffer_name] = hash_of(buffer)
                    self.collectives.trained[buffer.data_ptr()] = (-1, f"{name}.{buffer_name}")
            if hashes:
                wrapped = self.modules.wrapper_inside(root)
                sent = bool(wrapped and wrapped.module.broadcast_buffers)
                is_trained = any(id(p) in trained for p in root.parameters())
                found[name] = Buffers(hashes, sent, wrapped.made if wrapped else [], is_trained)
        return found


def _parts_of(schedule: Any) -> list[Any]:
    return list(getattr(schedule, "_schedulers", []))


def _total(schedule: Any) -> int:
    """Return the steps that a schedule is made for, also by what its functions know."""
    known = [getattr(schedule, name, 0) for name in ("T_max", "total_iters", "total_steps")]
    for function in getattr(schedule, "lr_lambdas", []):
        known += getattr(function, "keywords", {}).values()
        if isinstance(function, FunctionType):
            known += [value for names in getclosurevars(function)[:2] for value in names.values()]
    parts = sum(map(_total, _parts_of(schedule)))
    return max(0, parts, *(number for number in known if isinstance(number, int)))


def has_closure(args: Any, kwargs: Any) -> bool:
    """Return whether an optimizer computes its gradients itself, during its step."""
    return any(given is not None for given in (*args[1:], kwargs.get("closure")))


def _state_of(optimizer: Optimizer, known: Known) -> dict[str, int]:
    """Hash the state of an optimiser, by parameter and name."""
    found: dict[str, int] = {}
    if known.steps > _FIRST_STEPS:
        return found
    for name, parameter in known.named.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor) and (plain := whole(value)) is not None:
                found[f"{name}: {key}"] = hash_of(plain)
    return found


def names_of(parameters: list[Tensor]) -> list[str]:
    """Name parameters as the script would: by its variables, and by modules."""
    names: dict[int, str] = {}
    networks = list(roots())
    for variable, root in networks:
        for name, parameter in root.named_parameters(remove_duplicate=False):
            known = name if len(networks) == 1 else f"{variable}.{name}"
            names.setdefault(id(parameter), known)
    for variable, value in variables():
        if isinstance(value, Tensor):
            names.setdefault(id(value), variable)
    return [names.get(id(p), f"parameter {number}") for number, p in enumerate(parameters)]
