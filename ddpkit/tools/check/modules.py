"""Observe modules: where they were made, which are in DDP, and calls that go past it."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from itertools import islice
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parallel import DistributedDataParallel

from ..recorder import Function, after, before, content, guarded, size_of
from .observed import Averaging, Call, Collective, Loaded, Mode, tell
from .source import Stack, is_own_object, own_frames, place_of, stack

_MANY_CALLS = 16  # calls of networks that are kept for a step
_DEEPEST = 8  # lines
_TRAIN = nn.Module.train


class Wrapped:
    """One instance of DDP.

    Attributes:
        made: Where it was constructed.
        managed: The identities of the parameters whose gradients it averages.
        inside: The identities of the modules in it.
        taken_out: Where `.module` was last read.
        bypassed: Where a module in it was called past it, since the last step.
        unsynced: Where synchronisation was last turned off or on.
        pending: Whether a call has not been followed by backward.
        regroups: Whether the next call with gradients makes DDP's buckets anew, which the ranks do together.
    """

    def __init__(self, module: DistributedDataParallel) -> None:
        self.module = module  # kept: gloo's destructor may wait for a thread that needs Python's lock
        self.made = stack()
        inner = module._modules["module"]  # `.module` would be taken for the script's
        assert inner is not None
        self.inner = inner
        self.managed = {id(p) for p in self.inner.parameters() if p.requires_grad}
        self.inside = {id(m) for m in self.inner.modules()}
        self.taken_out: Stack = []
        self.bypassed: Stack = []
        self.unsynced: Stack = []
        self.pending = False
        self.regroups = False
        self._will_regroup = bool(module.static_graph or not module.find_unused_parameters)

    def begin_backward(self) -> None:
        """Note a backward that averages gradients: after the first, DDP knows in which order they come."""
        self.pending = False
        if self._will_regroup:
            self._will_regroup = False
            self.regroups = True

    def described(self) -> Averaging:
        """Describe what could keep this DDP from averaging the gradients of a step."""
        skips = bool(self.module.find_unused_parameters or self.module.static_graph)
        return Averaging(self.made, self.bypassed, self.taken_out, self.unsynced, skips)


class Modules:
    """Observes modules from the moment of `install`.

    Attributes:
        wrapped: The instances of DDP, by their identity.
        calls: The calls of networks with gradients since the last step.
        samples: How many networks were given since the last step, without gradients.
        networks: The networks that were called with gradients since the last step, and their modes.
        evaluated: Those that were called without, with the key of the loader that has fed them, and the line.
        is_evaluating: Whether a network runs that is in evaluation mode.
        feeding: The key of the loader that has yielded last, "" between epochs.
        switched: Where the script has called `train()` and `eval()` last.
        on_call: Called before a network is called with gradients.
    """

    def __init__(self) -> None:
        self.wrapped: dict[int, Wrapped] = {}
        self.calls: list[Call] = []
        self.samples = 0
        self.networks: list[tuple[nn.Module, str]] = []
        self.evaluated: dict[nn.Module, tuple[str, Stack]] = {}
        self.is_evaluating = False
        self.feeding = ""
        self.switched: dict[str, Stack] = {"train": [], "eval": []}
        self._noted: set[tuple[Any, ...]] = set()
        self.on_call: Function = lambda: None
        self._parameters: dict[int, tuple[Any, Stack]] = {}
        self._called: set[int] = set()  # identities of networks, not of their parts
        self._modes: dict[int, set[bool]] = {}  # in which modules were called, by identity: training or not
        self._depth = 0
        self._in_ddp = 0

    def install(self) -> None:
        """Begin."""
        hooks.register_module_parameter_registration_hook(guarded(self._registered))
        hooks.register_module_buffer_registration_hook(guarded(self._registered))
        hooks.register_module_forward_pre_hook(guarded(self._entered))
        hooks.register_module_forward_hook(guarded(self._left), with_kwargs=True, always_call=True)
        before(nn.Module, "train", self._switch)
        before(nn.Module, "load_state_dict", lambda: tell(Loaded(stack())))
        after(nn.Parameter, "__deepcopy__", self._copied)
        after(Tensor, "__deepcopy__", self._copied)
        after(DistributedDataParallel, "__init__", self._made)
        before(DistributedDataParallel, "__setattr__", self._set)
        before(DistributedDataParallel, "__getattr__", self._read)

    def made(self, parameter: Tensor) -> Stack:
        """Return where a parameter was given to a module, [] if that was not seen."""
        ref, places = self._parameters.get(id(parameter), (None, []))
        if ref is None or ref() is not parameter:
            return []
        return places

    def wrapper_of(self, parameter: Tensor) -> tuple[Wrapped | None, bool]:
        """Find the DDP that a parameter is in, and whether that averages its gradient."""
        for wrapped in self.wrapped.values():
            if id(parameter) in wrapped.managed:
                return wrapped, True
        for wrapped in self.wrapped.values():
            if any(parameter is other for other in wrapped.inner.parameters()):
                return wrapped, False
        return None, False

    def wrapper_inside(self, network: nn.Module) -> Wrapped | None:
        """Find the first DDP whose module is a part of a network."""
        parts = list(network.modules())
        for wrapped in self.wrapped.values():
            if wrapped.inner in parts:
                return wrapped
        return None

    def is_used(self, network: nn.Module) -> bool:
        """Return whether a network was called, or a part of it, or one that it is a part of."""
        if any(id(module) in self._called for module in network.modules()):
            return True
        wrappers = [wrapped for key, wrapped in self.wrapped.items() if key in self._called]
        if any(id(network) in wrapped.inside for wrapped in wrappers):
            return True
        called = [root for _, root in roots() if id(root) in self._called]
        return any(network in root.modules() for root in called)

    def used_buffers(self, network: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers by which a network has computed; in training, batch norm computes without its own."""
        for prefix, module in network.named_modules(remove_duplicate=False):
            modes = self._modes.get(id(module), set())
            is_used = False in modes if isinstance(module, _NormBase) else bool(modes)
            if is_used:
                yield from module.named_buffers(prefix, recurse=False)

    def begin_step(self) -> None:
        """Forget what belongs to the step that has ended."""
        self.calls = []
        self.networks = []
        self.evaluated = {}
        self.samples = 0
        for wrapped in self.wrapped.values():
            wrapped.bypassed = []

    def begin_backward(self) -> None:
        """Tell of a backward that averages gradients."""
        pending = [wrapped for wrapped in self.wrapped.values() if wrapped.pending]
        for wrapped in pending:
            wrapped.begin_backward()
        if pending:
            self._tell_of_ddp("backward")

    def _tell_of_ddp(self, what: str) -> None:
        tell(Collective(f"{what} of DDP", "0", stack(4)))

    def _registered(self, module: Any, name: str, parameter: Any) -> None:
        if isinstance(parameter, Tensor):
            self._parameters[id(parameter)] = (weakref.ref(parameter), _made_at())

    def _copied(self, original: Tensor, memo: dict[int, Any]) -> None:
        if id(original) in self._parameters:
            self._registered(None, "", memo.get(id(original)))

    def _made(self, made: DistributedDataParallel) -> None:
        self.wrapped[id(made)] = Wrapped(made)

    def _set(self, module: DistributedDataParallel, name: str) -> None:
        wrapped = self.wrapped.get(id(module))
        if wrapped and name == "require_backward_grad_sync":
            wrapped.unsynced = stack() or wrapped.unsynced

    def _read(self, module: DistributedDataParallel, name: str) -> None:
        wrapped = self.wrapped.get(id(module))
        if wrapped and name == "module" and not self._in_ddp:
            wrapped.taken_out = stack() or wrapped.taken_out

    def _entered(self, module: nn.Module, args: Any) -> None:
        self._depth += 1
        self._modes.setdefault(id(module), set()).add(module.training)
        wrapped = self.wrapped.get(id(module))
        if wrapped:
            self._in_ddp += 1
            self._enter_ddp(wrapped)
        elif not self._in_ddp and torch.is_grad_enabled():
            self._look_for_bypass(module)
        if self._depth == 1:
            self._note_call(module, args)
            if torch.is_grad_enabled():
                self.on_call()

    def _enter_ddp(self, wrapped: Wrapped) -> None:
        regroups = wrapped.regroups and torch.is_grad_enabled()
        if regroups:
            wrapped.regroups = False
        if regroups or wrapped.module.will_sync_module_buffers():  # type: ignore[no-untyped-call]
            self._tell_of_ddp("forward")
        if torch.is_grad_enabled():
            wrapped.pending = wrapped.pending or bool(wrapped.module.require_backward_grad_sync)

    def _left(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._depth -= 1
        if id(module) in self.wrapped:
            self._in_ddp -= 1
        if self._depth == 0 and kwargs and not size_of(args):
            self._note_named(kwargs)

    def _look_for_bypass(self, module: nn.Module) -> None:
        for wrapped in self.wrapped.values():
            if id(module) in wrapped.inside and not wrapped.bypassed:
                frames = list(own_frames())
                outside = [frame for frame in frames if id(_self_of(frame)) not in wrapped.inside]
                wrapped.bypassed = [place_of(frame) for frame in outside[:_DEEPEST]]

    def _switch(self, module: nn.Module, mode: bool = True) -> None:
        if sys._getframe(3).f_code is not _TRAIN.__code__:  # which calls itself for the parts of a module
            self.switched["train" if mode else "eval"] = stack()

    def _note_call(self, module: nn.Module, args: Any) -> None:
        self._called.add(id(module))
        self.is_evaluating = not module.training
        if isinstance(module, nn.modules.loss._Loss):
            return
        mode = mode_of(module)
        where = stack(3)
        key = (self.feeding, mode, *where)
        if mode and self.feeding and key not in self._noted:
            self._noted.add(key)
            tell(Mode(self.feeding, mode, where))
        if not torch.is_grad_enabled():
            self.samples += size_of(args)
            self.evaluated[module] = self.feeding, where
        elif len(self.calls) < _MANY_CALLS and any(True for _ in module.parameters()):  # no transform of a sample
            self.calls.append(Call(where, content(args)))
            self.networks.append((module, mode))

    def _note_named(self, given: dict[str, Any]) -> None:
        """Note what a network was given by name, which hooks get only after the call."""
        if not torch.is_grad_enabled():
            self.samples += size_of(given)
        elif self.calls and not self.calls[-1].input:
            self.calls[-1] = self.calls[-1]._replace(input=content(given))


def mode_of(network: nn.Module) -> str:
    """Return the mode of a network's dropout and batch norm, "mixed" if a part was frozen, "" if it has none."""
    modes = set()
    for module in network.modules():
        is_dropout = isinstance(module, _DropoutNd) and module.p > 0
        if is_dropout or (isinstance(module, _NormBase) and module.track_running_stats):
            modes.add(module.training)
    if isinstance(network, DistributedDataParallel):
        network = next(network.children(), network)
    if not modes:
        return ""
    if modes != {network.training}:
        return "mixed"
    return "train" if network.training else "eval"


def _made_at() -> Stack:
    """List the script's lines that make a network, without those of its own constructors if there are others."""
    frames = list(own_frames())
    outside = [frame for frame in frames if not isinstance(_self_of(frame), nn.Module)]
    frames = outside or frames
    return [place_of(frame) for frame in frames[:_DEEPEST]]


def _self_of(frame: FrameType) -> Any:
    """Return the object whose method a frame runs, None for other functions."""
    return frame.f_locals.get("self")


_MOST = 4096  # objects that are looked at in the variables of a function


def roots(depth: int = 1) -> Iterator[tuple[str, nn.Module]]:
    """Yield the networks that the running functions of the script know, by the names of their variables."""
    seen: set[int] = set()
    for name, value in variables(depth):
        if isinstance(value, DistributedDataParallel):
            value = value._modules["module"]
        if isinstance(value, nn.Module) and id(value) not in seen:
            seen.update(id(module) for module in value.modules())
            yield name, value


def variables(depth: int = 1) -> Iterator[tuple[str, Any]]:
    """Yield the variables of the script's running functions, and the fields of their objects, of theirs, and so on."""
    for frame in list(own_frames()):
        for scope in (frame.f_locals, frame.f_globals):
            known = list(scope.items())
            yield from known
            for _ in range(depth):
                parts = (part for name, value in known for part in parts_of(name, value))
                known = list(islice(parts, _MOST))
                yield from known


def parts_of(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a container or an object of the script holds, with names."""
    if isinstance(value, dict):
        for key, child in islice(dict.items(value), 32):  # one of another class may make its values now
            yield f"{name}[{key!r}]", child
    elif isinstance(value, list | tuple):
        for number, child in enumerate(value[:32]):
            yield f"{name}[{number}]", child
    elif not isinstance(value, nn.Module | type) and is_own_object(value):
        for field, child in list(vars(value).items()):
            yield f"{name}.{field}", child
