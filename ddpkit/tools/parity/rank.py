"""Be one rank, or the one process that is compared with the ranks: record each step, and what is printed."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..check import observe, run_observed
from ..check.loaders import Ending
from ..check.modules import roots
from ..check.source import Stack, stack
from ..check.steps import has_closure, names_of
from ..check.training_loop import TrainingLoop
from ..ranks import Script
from ..recorder import Function, Recorder, after, before, current, guarded, parameters_of, replace
from .inputs import Draws, Inputs, Plan, Served, append, read

Tensors = dict[str, Tensor]
_WRAPPERS = {"module", "_orig_mod", "_forward_module", "_original_module", "_checkpoint_wrapped_module"}
_DEPTH = 4  # of objects and containers in which networks are looked for
_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")


class Event(NamedTuple):
    """A step of an optimizer."""

    optimizer: int  # its number
    lines: dict[str, Stack]  # that call "backward", "clip" and "step", and that "made" the optimizer
    settings: list[dict[str, Any]]  # of each group of parameters
    others: Tensors  # what networks hold beside parameters, when the first is called in training since the last step
    arrived: Tensors  # parameters, by name, before the ranks' were taken
    before: Tensors  # parameters
    raw: Tensors  # gradients as they were after the last call of `backward`
    unclipped: Tensors  # gradients as they were before the script clipped them
    gradients: Tensors
    after: Tensors  # parameters
    precision: float  # of the numbers by which the script computes


def be_rank(script: Script, plan: Plan, recorder: Recorder, control: int) -> int:
    """Run the script as the main program of this process, and wait for the end."""
    folder = plan.folder / os.environ["RANK"]
    folder.mkdir()
    os.chdir(plan.folder / "run" / "work")
    served = Served(plan) if plan.ranks else None
    inputs = Inputs(folder / "batches", served)
    inputs.install()
    ending = _Ending(plan.steps, control, is_served=bool(served and served.loops))
    inputs.samples, loop = observe(ending)
    Training(loop, inputs, folder, plan.ranks).install()
    Draws(folder / "draws", served, inputs).install()
    switch_off(plan.keep)
    for stream in (sys.stdout, sys.stderr):
        stream.write = _Lines(stream.write)  # type: ignore[method-assign]
    return run_observed(script, ending)


@dataclass
class _Ending(Ending):
    """Ends epochs when there were enough steps, unless they end with what is served, and the process with the next."""

    is_served: bool = False

    def cut_epoch(self, batches: int, planned: int) -> bool:
        return not self.is_served and super().cut_epoch(batches, planned)

    def begin_epoch(self) -> None:
        if current().step >= self.steps:
            self.wait("steps")


def switch_off(keep: Sequence[str]) -> None:
    """Let dropout drop nothing, and batch norm normalise each sample by itself, but for what is kept."""
    if "batch norm" not in keep:
        replace(functional, "batch_norm", _normalising_samples)
    if "dropout" not in keep:
        for name in _DROPOUTS:
            replace(functional, name, lambda original: lambda input, *args, **kwargs: input)
        replace(functional, "scaled_dot_product_attention", _attending_to_all)
        register_module_forward_pre_hook(guarded(_evaluate_dropout))


def _evaluate_dropout(module: nn.Module) -> None:
    if "Drop" in type(module).__name__ or isinstance(module, nn.RNNBase | nn.MultiheadAttention):
        module.training = False


def _attending_to_all(original: Function) -> Function:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")

    def call(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs | {"dropout_p": 0.0}
        return original(**given)  # the others have names only, or are given by name

    return call


def _normalising_samples(original: Function) -> Function:
    def call(input: Tensor, *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(original).bind(input, *args, **kwargs)
        given.apply_defaults()
        if not given.arguments["training"]:
            return original(input, *args, **kwargs)
        return functional.group_norm(input, 1, *(given.arguments[name] for name in ("weight", "bias", "eps")))

    return call


class _Lines:
    """Stands for the `write` of a stream: tells each whole line, and which of the script's lines wrote it."""

    def __init__(self, write: Function) -> None:
        self._write = write
        self._begun = ""

    def __call__(self, text: str) -> Any:
        *lines, self._begun = (self._begun + text).replace("\r", "\n").split("\n")
        for line in lines:
            if current().is_main and current().step:
                current().tell("printed", line=line.strip(), where=stack())
        return self._write(text)


@dataclass
class Training:
    """Observes optimizers from the moment of `install`; one process begins each step with the ranks' parameters.

    Attributes:
        folder: Takes the parameters at the start, and the steps.
        given: The files of the ranks, none for a rank.
    """

    loop: TrainingLoop
    inputs: Inputs
    folder: Path
    given: list[Path]
    _lines: dict[str, Stack] = field(default_factory=dict)
    _raw: dict[Any, Tensors] = field(default_factory=dict)
    _nested: Tensors = field(default_factory=dict)  # gradients for an optimizer that is called by another
    _unclipped: dict[Any, Tensors] = field(default_factory=dict)
    _seen: dict[Any, tuple[Tensors, Tensors]] = field(default_factory=dict)  # parameters and gradients before a step
    _given: dict[int, list[Tensors]] = field(default_factory=dict)  # the ranks' parameters, from the last step on
    _arrived: dict[Any, Tensors] = field(default_factory=dict)  # those of this process, before it took the ranks'
    _begun: Tensors = field(default_factory=dict)  # buffers and averages at the start
    _held: Tensors = field(default_factory=dict)  # now
    _trained: set[int] = field(default_factory=set)  # identities of parameters
    _names: dict[Any, list[str]] = field(default_factory=dict)  # of an optimizer's parameters
    _stepped: list[Optimizer] | None = None  # since the last call of a network in training, None before the first
    _precision: float = 0.0

    def install(self) -> None:
        """Begin."""
        for name in ("backward", "grad"):
            before(torch.autograd, name, self._backward)
        after(torch.autograd, "backward", self._backpropagated)
        before(nn.utils, "clip_grad_norm_", self._clip)
        before(nn.utils, "clip_grad_value_", self._clip)
        before(torch.autocast, "__enter__", self._cast)
        register_module_forward_pre_hook(guarded(self._begin))
        register_optimizer_step_pre_hook(self._begins)
        register_optimizer_step_post_hook(self._ended)

    def _begin(self, module: nn.Module) -> None:
        """Prepare when a network is first called in training since the last step."""
        if self._stepped != [] and module.training:
            self._prepare()

    @torch.no_grad()
    def _prepare(self) -> None:
        """Note what there is before a step, and take the ranks' parameters."""
        optimizers = list(self.loop.optimizers)
        if not optimizers:
            return
        others = self._others(optimizers)
        if self._stepped is None:
            self._start(optimizers, others)
            self._begun = _copies(others)
        self._held = _copies(others)
        stepped, self._stepped = self._stepped or [], []
        for optimizer in stepped:
            number = self.loop.known(optimizer).number
            self._given[number] = coming = self._given.get(number, [])[1:]
            if coming:
                self._arrived[optimizer] = _copies(self._named(optimizer))
                _take(self._named(optimizer), coming[0])

    def _start(self, optimizers: list[Optimizer], others: Tensors) -> None:
        """Write with what the training begins, or begin with what the ranks have."""
        own = {name: p for optimizer in optimizers for name, p in self._named(optimizer).items()}
        if not self.given:
            append(self.folder / "start", (_copies(own), _copies(others)))
            return
        for given, rest in read(self.given[0] / "start"):
            _take(own, given)
            for name in others.keys() & rest.keys():
                if others[name].shape == rest[name].shape:
                    _fill(others[name], rest[name])
        for event in read(self.given[0] / "events"):
            self._given.setdefault(event.optimizer, []).append(event.before)

    def _named(self, optimizer: Optimizer) -> Tensors:
        """Name the parameters that an optimizer has trained, or will; it may have others, which stay frozen."""
        self._trained |= {id(parameter) for parameter in parameters_of(optimizer) if parameter.requires_grad}
        parameters = [parameter for parameter in parameters_of(optimizer) if id(parameter) in self._trained]
        if len(self._names.get(optimizer, ())) != len(parameters):  # only once: other functions know other variables
            self._names[optimizer] = names_of(parameters)
        return dict(zip(self._names[optimizer], parameters, strict=True))

    def _gradients(self, optimizer: Optimizer) -> Tensors:
        return _copies({name: p.grad for name, p in self._named(optimizer).items() if p.grad is not None})

    def _others(self, optimizers: list[Optimizer]) -> Tensors:
        """Name what networks hold that no optimizer trains."""
        trained = {id(parameter) for optimizer in optimizers for parameter in self._named(optimizer).values()}
        found: Tensors = {}
        for variable, root in roots(_DEPTH):
            held = {}
            for name, tensor in chain(root.named_parameters(), root.named_buffers()):
                if id(tensor) not in trained and tensor.is_floating_point():
                    held[f"{variable}.{name}"] = tensor
            if self._is_kept(root, held):
                found |= held
        return found

    def _is_kept(self, network: nn.Module, held: Tensors) -> bool:
        """Return whether this rank uses or changes a network: an average may be kept by the first one only."""
        if os.environ["RANK"] == "0" or self._stepped is None or self.loop.modules.is_used(network):
            return True
        return any(not torch.equal(now, self._begun.get(name, -now)) for name, now in _copies(held).items())

    def _cast(self, context: torch.autocast) -> None:
        if context._enabled:
            self._precision = torch.finfo(context.fast_dtype).eps

    def _backward(self) -> None:
        self._lines["backward"] = stack()
        self._unclipped = {}

    def _backpropagated(self) -> None:
        self._raw = {optimizer: self._gradients(optimizer) for optimizer in list(self.loop.optimizers)}

    def _clip(self) -> None:
        if not self._unclipped:
            self._lines["clip"] = stack()
            self._unclipped = {optimizer: self._gradients(optimizer) for optimizer in list(self.loop.optimizers)}

    def _begins(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._seen:  # it is a part of another
            self._nested = self._gradients(next(iter(self._seen)))
            return
        if self._stepped is None or optimizer in self._stepped:  # it calls the network itself, by a closure
            self._prepare()
        self._seen[optimizer] = _copies(self._named(optimizer)), self._gradients(optimizer)

    def _ended(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer not in self._seen:
            return
        parameters, gradients = self._seen.pop(optimizer)
        if has_closure(args, kwargs):
            gradients = self._gradients(optimizer) or self._nested  # it may have cleared them
        event = Event(
            optimizer=self.loop.known(optimizer).number,
            others=self._held,
            arrived=self._arrived.pop(optimizer, parameters),
            lines=self._lines | {"step": stack(), "made": self.loop.known(optimizer).made},
            settings=list(map(_numbers_in, optimizer.param_groups)),
            before=parameters,
            raw=self._raw.get(optimizer, gradients),
            unclipped=self._unclipped.get(optimizer, gradients),
            gradients=gradients,
            after=_copies(self._named(optimizer)),
            precision=max(self._precision, *(torch.finfo(p.dtype).eps for p in parameters.values())),
        )
        append(self.folder / "events", event)
        self._stepped = [*(self._stepped or []), optimizer]
        self.inputs.begin_step()


@torch.no_grad()
def _copies(tensors: Tensors) -> Tensors:
    """Copy tensors as they are on one process."""
    found = {}
    for name, tensor in tensors.items():
        plain = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
        found[name] = plain.to_dense().to("cpu", copy=True)
    return found


def _fill(tensor: Tensor, values: Tensor) -> None:
    if isinstance(tensor, DTensor):
        values = distribute_tensor(values, tensor.device_mesh, tensor.placements)
    tensor.copy_(values)


def _take(own: Tensors, given: Tensors) -> None:
    """Fill parameters with those of another process, if they can be paired."""
    for name, other in pair(own, given).items():
        _fill(own[name], given[other])


def _numbers_in(group: dict[str, Any]) -> dict[str, float]:
    """Name the numbers among a group's settings, also those in pairs."""
    found = {}
    for name, value in group.items():
        for number, each in enumerate(value if isinstance(value, tuple) else [value]):
            if isinstance(each, int | float):
                found[f"{name}[{number}]" if isinstance(value, tuple) else name] = each
    return found


def pair(names: Tensors, others: Tensors) -> dict[str, str]:
    """Pair two processes' tensors: by name, without those of wrappers, else by their order; {} if shapes differ."""
    by_name = {_plain(name): name for name in others}
    found = {name: by_name.get(_plain(name), "") for name in names}
    if not all(found.values()) or len(by_name) != len(names):
        found = dict(zip(names, others, strict=False))
    are_alike = all(names[name].shape == others[other].shape for name, other in found.items())
    return found if are_alike and len(names) == len(others) else {}


def _plain(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
