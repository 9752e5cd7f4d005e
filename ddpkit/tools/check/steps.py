"""Observe training steps: losses, schedules, and what each optimizer holds on each rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from inspect import getclosurevars
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.optim import Optimizer, lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..recorder import Function, Recorder, after, before, guarded, hash_of, parameters_of, replace, sample, whole
from .collectives import Collectives, tell_values
from .loaders import Ending, Samples
from .modules import Modules, roots, variables
from .random_numbers import Windows
from .source import Stack, divides_by_ranks, stack
from .training_loop import TrainingLoop

_ELEMENTWISE = ["mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"]
_OF_LOGARITHMS = ["nll_loss", "kl_div"]
_LOSSES = [*_ELEMENTWISE, *_OF_LOGARITHMS, "cross_entropy", "binary_cross_entropy", "binary_cross_entropy_with_logits"]
_APPLIED = {"cross_entropy": "Softmax", "binary_cross_entropy_with_logits": "Sigmoid"}
_SHAPES = ("_DDPSink", "ToCopy", "Squeeze", "Unsqueeze", "View", "UnsafeView", "Transpose", "Permute", "Alias")
_MANY_LOSSES = 64  # losses that are kept for a step
_IMAGES = 4  # dimensions of classes by pixel, of which each rank ignores a few: their means count as equals everywhere
_LOOSE = 0.05  # of 1, by which probabilities in half precision may miss it
_FIRST_STEPS = 3  # at which states are compared: what differs differs by then


class Losses:
    """Observes loss functions and `backward` from the moment of `install`.

    Attributes:
        places: Where `backward` was called last.
        divides: Whether the script divides by the number of ranks there.
    """

    def __init__(self, modules: Modules, samples: Samples, ending: Ending) -> None:
        self._modules = modules
        self._samples = samples
        self._ending = ending
        self._found: list[dict[str, Any]] = []
        self._backwards = 0
        self._depth = 0
        self.places: Stack = []
        self.divides = False

    def install(self) -> None:
        """Begin."""
        for name in _LOSSES:
            replace(functional, name, self._observed)
        before(Tensor, "backward", self._begin_backward)
        before(torch.autograd, "backward", self._begin_backward)

    def begin_step(self) -> None:
        """Forget what belongs to the step that has ended."""
        self._found = []
        self._backwards = 0

    def of_this_step(self) -> list[dict[str, Any]]:
        """List the losses that were differentiated in this step."""
        return [loss for loss in self._found if "backward" in loss]

    def _begin_backward(self, *args: Any, **kwargs: Any) -> None:
        self._backwards += 1
        self._samples.begin_backward()
        self._ending.accumulates = True
        self._modules.begin_backward()
        self.places = stack()[:4]
        self.divides = divides_by_ranks(4)

    def _observed(self, original: Function) -> Function:
        watch = guarded(self._watch)

        def call(input: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            try:
                result = original(input, target, *args, **kwargs)
            finally:
                self._depth -= 1
            is_whole = self._depth == 0 and isinstance(result, Tensor)
            if is_whole and result.requires_grad and len(self._found) < _MANY_LOSSES:
                watch(result, original.__name__, input, target, kwargs)
            return result

        return call

    def _watch(self, result: Tensor, name: str, input: Tensor, target: Tensor, kwargs: dict[str, Any]) -> None:
        reduction = kwargs.get("reduction", "mean")
        count = len(input) if input.ndim else 1
        if name in ("cross_entropy", "nll_loss") and not target.is_floating_point():
            count = int((target != kwargs.get("ignore_index", -100)).sum())
        ignores = not target.is_floating_point() and count < target.numel() and input.ndim < _IMAGES
        loss: dict[str, Any] = {"where": stack()[:3], "count": count, "total": 0.0}
        loss |= {"summed": reduction != "mean", "masked": reduction != "mean" or ignores}
        loss["mistakes"] = dict(_mistakes(name, input, target))
        self._found.append(loss)

        def arrived(gradient: Tensor) -> None:
            share = float(gradient.sum())
            if reduction == "sum":
                share *= loss["count"]
            elif reduction == "none":
                loss["count"] = int(gradient.count_nonzero())
            loss["total"] += share
            loss["backward"] = self._backwards

        result.register_hook(guarded(arrived))  # type: ignore[no-untyped-call]


def _mistakes(name: str, input: Tensor, target: Tensor) -> Iterator[tuple[str, str]]:
    """Yield the rules that what a loss gets breaks, and the evidence."""
    if activation := _activation(name, input):
        yield "activated-twice", f"the loss gets the result of {activation}, and applies it again"
    if name in _OF_LOGARITHMS and input.ndim > 1:
        likely = input.detach().exp()
        dimensions = range(1, 2 if name == "nll_loss" else input.ndim)
        sums = [float(likely.sum(dim).median()) for dim in dimensions]  # some samples may be masked
        total = min(sums, key=lambda total: abs(total - 1))
        if abs(total - 1) > _LOOSE:
            rule = "above-one" if total > 1 else "not-log-probabilities"
            yield rule, f"the exponentials of its input add up to {total:.2g} per sample"
    if name in _ELEMENTWISE and input.shape != target.shape:
        pairs = torch.broadcast_tensors(input, target)[0].numel()  # type: ignore[no-untyped-call]
        if pairs > max(input.numel(), target.numel()):
            yield "shapes-broadcast", f"input and target have the shapes {list(input.shape)} and {list(target.shape)}"


def _activation(name: str, logits: Tensor) -> str:
    """Name the function that has computed what a loss takes for logits, "" if it is no activation."""
    activation = _APPLIED.get(name)
    node, output = logits.grad_fn, logits.output_nr
    while activation and node is not None:
        if node.name().startswith(activation):
            return activation.lower()
        is_shape = node.name().startswith(_SHAPES)
        node, output = node.next_functions[output if "DDP" in node.name() else 0] if is_shape else (None, 0)
    return ""


def observe_plateaus(recorder: Recorder) -> None:
    """Tell the numbers by which schedules judge if the training has come to a plateau."""

    def step(schedule: Any, metrics: Any = None, *args: Any, **kwargs: Any) -> None:
        if metrics is not None:
            recorder.tell("plateau", value=float(metrics), where=stack())

    before(lr_scheduler.ReduceLROnPlateau, "step", step)


class _Seen:
    """What is known of one optimiser: its number, its parameters' names, and where it was made."""

    def __init__(self, number: int, made: Stack) -> None:
        self.number = number
        self.made = made
        self.names: list[str] = []
        self.parameters: list[Tensor] = []
        self.steps = 0


@dataclass
class Steps:
    """Observes each optimiser from the moment of `install`."""

    recorder: Recorder
    ending: Ending
    modules: Modules
    losses: Losses
    windows: Windows
    collectives: Collectives
    samples: Samples
    loop: TrainingLoop
    _schedules: list[tuple[Any, Stack]] = field(default_factory=list)
    _made: WeakKeyDictionary[Optimizer, Stack] = field(default_factory=WeakKeyDictionary)
    _seen: WeakKeyDictionary[Optimizer, _Seen] = field(default_factory=WeakKeyDictionary)
    _depth: int = 0
    _loaded: Stack = field(default_factory=list)
    _buffers: dict[str, dict[str, Any]] | None = None  # at the first call of a network since the last step

    def install(self) -> None:
        """Begin."""
        self.modules.on_call = guarded(self._note_buffers)
        for kind in (lr_scheduler.LRScheduler, lr_scheduler.SequentialLR, lr_scheduler.ChainedScheduler):
            after(kind, "__init__", lambda made, *args, **kwargs: self._schedules.append((made, stack())))
        after(Optimizer, "__init__", self._note_made)
        before(Optimizer, "load_state_dict", self._note_loaded)
        register_optimizer_step_pre_hook(self._begins)
        register_optimizer_step_post_hook(self._ended)

    def _note_made(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        self._made[optimizer] = stack()

    def _note_loaded(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        self._loaded = stack()

    def _begins(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._depth += 1
        if self._depth > 1:  # an optimiser that is part of another
            return
        seen = self._seen.get(optimizer)
        if seen is None:
            seen = self._seen[optimizer] = _Seen(len(self._seen), self._made.get(optimizer, []))
        self.ending.before_step(seen.steps)
        seen.steps += 1
        self.recorder.step = max(self.recorder.step, seen.steps)
        if not _has_closure(args, kwargs):
            guarded(self._record)(optimizer, seen)

    def _ended(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._depth -= 1
        if self._depth:
            return
        if _has_closure(args, kwargs):
            guarded(self._record)(optimizer, self._seen[optimizer])
        self.ending.accumulates = False
        self._buffers = None
        for observer in (self.samples, self.modules, self.losses, self.windows):
            observer.begin_step()

    @torch.no_grad()
    def _record(self, optimizer: Optimizer, seen: _Seen) -> None:
        parameters = parameters_of(optimizer)
        if list(map(id, parameters)) != list(map(id, seen.parameters)):
            seen.parameters = parameters
            self._introduce(seen)
        whole_ones = [whole(p) for p in parameters]
        for name, plain in zip(seen.names, whole_ones, strict=True):
            if plain is not None:
                self.collectives.trained[plain.data_ptr()] = (seen.number, name)
        if self.recorder.step == 1:
            tell_values(self.recorder)
        gradients = [_whole_gradient(p) for p in parameters]
        summed = self._summed(gradients)
        self.recorder.tell(
            "step",
            position=self.samples.position(),
            optimizer=seen.number,
            number=seen.steps,
            where=stack(),
            gradients=[None if g is None else [hash_of(g), sample(g)] for g in gradients],
            parameters=[None if p is None else hash_of(p) for p in whole_ones],
            without=self._without_gradient(parameters, seen),
            causes=[wrapped.described() for wrapped in self.modules.wrapped.values()],
            state=_state_of(optimizer, seen),
            rates=[float(group["lr"]) for group in optimizer.param_groups if "lr" in group],
            others=self._others(parameters) if seen.steps == 1 else {},
            buffers=self._hash_buffers() if self._buffers is None else self._buffers,
            calls=self.modules.calls,
            losses=self.losses.of_this_step(),
            backward=self.losses.places,
            divides=self.losses.divides or divides_by_ranks(4) or bool(summed and summed["divides"]),
            summed=summed,
            class_name=type(optimizer).__name__,
            made=seen.made,
            joined=dist.is_initialized(),
            switched=self.modules.switched,
            schedules=self._describe_schedules(),
            **self.loop.take(optimizer),
            random=self.windows.close(),
            loaded=self._loaded,
        )

    def _describe_schedules(self) -> list[dict[str, Any]]:
        """Tell how often the schedules that are no part of others have stepped, and how long they are."""
        parts = [id(part) for schedule, _ in self._schedules for part in getattr(schedule, "_schedulers", [])]
        whole_ones = [(schedule, made) for schedule, made in self._schedules if id(schedule) not in parts]
        return [{"made": m, "steps": s.last_epoch} | _lengths_of(s) for s, m in whole_ones]

    def _without_gradient(self, parameters: list[Tensor], seen: _Seen) -> dict[str, Stack]:
        """Name the parameters without a gradient, and where a collective got what they compute, if one did."""
        named = zip(seen.names, parameters, strict=True)
        return {name: self.collectives.cut.get(id(p), []) for name, p in named if p.requires_grad and p.grad is None}

    def _summed(self, gradients: list[Tensor | None]) -> dict[str, Any] | None:
        """Compare the gradients with the sums that were reduced before this step, if these are of as many numbers."""
        sums = self.collectives.take_sums()
        present = [g for g in gradients if g is not None]
        if not sums or sum(entry["numel"] for entry in sums) != sum(g.numel() for g in present):
            return None
        square = sum(float(torch.linalg.vector_norm(g, dtype=torch.float64)) ** 2 for g in present)
        ratio = (sum(entry["square"] for entry in sums) / square) ** 0.5 if square else 0.0
        return sums[0] | {"ratio": ratio}

    def _introduce(self, seen: _Seen) -> None:
        """Tell the names of an optimiser's parameters, and where they come from."""
        seen.names = _names_of(seen.parameters)
        described = []
        for parameter, name in zip(seen.parameters, seen.names, strict=True):
            wrapped, is_managed = self.modules.wrapper_of(parameter)
            told: dict[str, Any] = {"name": name, "shape": list(parameter.shape), "made": self.modules.made(parameter)}
            told |= {"ddp": wrapped.made if wrapped else None, "managed": is_managed}
            described.append(told | {"whole": whole(parameter) is not None})
        self.recorder.tell("optimizer", optimizer=seen.number, made=seen.made, parameters=described)

    def _others(self, parameters: list[Tensor]) -> dict[str, list[Any]]:
        """Hash the parameters of networks that are used and not trained."""
        trained = set(map(id, parameters))
        for optimizer in list(self._made):
            trained |= set(map(id, parameters_of(optimizer)))
        found = {}
        for name, root in roots():
            tensors = [*root.parameters(), *root.buffers()]
            others = [t for t in tensors if whole(t) is not None]
            is_trained = any(id(t) in trained for t in tensors)
            if others and not is_trained and self.modules.is_used(root):
                found[name] = [[hash_of(t) for t in others], self.modules.made(others[0])]
        return found

    def _note_buffers(self) -> None:
        """Hash buffers before a network changes them, for a script may average them after a step."""
        if self._buffers is None:
            self._buffers = self._hash_buffers()

    def _hash_buffers(self) -> dict[str, dict[str, Any]]:
        """Hash the running statistics of networks, and tell if DDP sends them out."""
        found: dict[str, dict[str, Any]] = {}
        trained = {id(p) for optimizer in list(self._made) for p in parameters_of(optimizer)}
        for name, root in roots() if self.recorder.step <= self.ending.steps + 1 else ():
            used = self.modules.used_buffers(root)
            buffers = {n: b for n, b in used if b.is_floating_point() and whole(b) is not None}
            for buffer_name, buffer in buffers.items():
                self.collectives.trained[buffer.data_ptr()] = (-1, f"{name}.{buffer_name}")
            if buffers:
                around = [w for w in self.modules.wrapped.values() if any(m is w.inner for m in root.modules())]
                sent = bool(around and around[0].module.broadcast_buffers)
                made = around[0].made if around else []
                found[name] = {"hashes": {n: hash_of(b) for n, b in buffers.items()}, "sent": sent, "ddp": made}
                found[name]["trained"] = any(id(p) in trained for p in root.parameters())
        return found


def _lengths_of(schedule: Any) -> dict[str, int | None]:
    """Tell the length of a cosine, and the steps that a schedule is made for, also by what its functions know."""
    known = [getattr(schedule, name, 0) for name in ("T_max", "total_iters", "total_steps")]
    for function in getattr(schedule, "lr_lambdas", []):
        known += getattr(function, "keywords", {}).values()
        if isinstance(function, FunctionType):
            known += [value for names in getclosurevars(function)[:2] for value in names.values()]
    parts = [_lengths_of(part)["total"] or 0 for part in getattr(schedule, "_schedulers", [])]
    total = max(0, sum(parts), *(n for n in known if isinstance(n, int)))
    return {"length": getattr(schedule, "T_max", None), "total": total}


def _has_closure(args: Any, kwargs: Any) -> bool:
    """Return whether an optimizer computes its gradients itself, during its step."""
    return any(given is not None for given in (*args[1:], kwargs.get("closure")))


def _whole_gradient(parameter: Tensor) -> Tensor | None:
    gradient = parameter.grad
    if gradient is None or whole(parameter) is None or gradient.is_sparse:
        return None
    return whole(gradient)


def _state_of(optimizer: Optimizer, seen: _Seen) -> dict[str, int]:
    """Hash the state of an optimiser, by parameter and name."""
    found: dict[str, int] = {}
    if seen.steps > _FIRST_STEPS:
        return found
    for name, parameter in zip(seen.names, seen.parameters, strict=True):
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor) and (plain := whole(value)) is not None:
                found[f"{name}: {key}"] = hash_of(plain)
    return found


def _names_of(parameters: list[Tensor]) -> list[str]:
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
