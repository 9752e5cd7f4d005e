"""Observe optimiser steps: gradients, parameters, buffers, states and learning rates of each rank."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ...script.recorder import Recorder, hash_of, parameters_of, sample, whole
from ..places import (
    Stack,
    stack,
)
from .collectives import Collectives
from .decisions import Decisions, Ending
from .expressions import divides_by_ranks, skips
from .losses import Losses
from .modules import Modules, Wrapped, inner_of, roots, variables
from .patching import Function, after, before, guarded
from .random_numbers import Windows

_LOOKED_AT = 6  # steps of an optimiser at which running statistics are compared


class _Seen:
    """What is known of one optimiser: its number, its parameters' names, and where it was made."""

    def __init__(self, number: int, made: Stack) -> None:
        self.number = number
        self.made = made
        self.names: list[str] = []
        self.parameters: list[Tensor] = []
        self.steps = 0


class Steps:
    """Observes each optimiser from the moment of `install`."""

    def __init__(
        self,
        recorder: Recorder,
        ending: Ending,
        modules: Modules,
        losses: Losses,
        windows: Windows,
        collectives: Collectives,
    ) -> None:
        self._recorder = recorder
        self._ending = ending
        self._modules = modules
        self._losses = losses
        self._windows = windows
        self._collectives = collectives
        self._made: weakref.WeakKeyDictionary[Optimizer, Stack] = weakref.WeakKeyDictionary()
        self._seen: weakref.WeakKeyDictionary[Optimizer, _Seen] = weakref.WeakKeyDictionary()
        self._decisions = Decisions(recorder)
        self._depth = 0
        self._loaded: Stack = []
        self.on_step: list[Function] = []
        self.position: Function = list
        self._buffers: dict[str, dict[str, Any]] | None = None  # at the first call of a network since the last step

    def install(self) -> None:
        """Begin."""
        self._modules.on_call += [guarded(self._decisions.end), guarded(self._note_buffers)]
        after(Optimizer, "__init__", self._note_made)
        before(Optimizer, "load_state_dict", self._note_loaded)
        register_optimizer_step_pre_hook(self._begins)
        register_optimizer_step_post_hook(self._ended)

    def _note_made(self, _: None, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        self._made[optimizer] = stack()

    def _note_loaded(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        self._loaded = stack()

    def _begins(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._depth += 1
        if self._depth > 1:  # an optimiser that is part of another
            return
        self._decisions.end()
        seen = self._seen.get(optimizer)
        if seen is None:
            seen = _Seen(len(self._seen), self._made.get(optimizer, []))
            self._seen[optimizer] = seen
        self._ending.before_step(seen.steps)
        seen.steps += 1
        self._recorder.step = max(self._recorder.step, seen.steps)
        has_closure = len(args) > 1 or "closure" in kwargs
        if not has_closure:
            guarded(self._record)(optimizer, seen)

    def _ended(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._depth -= 1
        if self._depth:
            return
        seen = self._seen[optimizer]
        if len(args) > 1 or "closure" in kwargs:
            guarded(self._record)(optimizer, seen)
        self._ending.after_step()
        self._buffers = None
        for look in self.on_step:
            look()
        self._modules.begin_step()
        self._losses.begin_step()
        self._windows.begin_step()
        guarded(self._decisions.begin)()

    @torch.no_grad()
    def _record(self, optimizer: Optimizer, seen: _Seen) -> None:
        parameters = parameters_of(optimizer)
        if list(map(id, parameters)) != list(map(id, seen.parameters)):
            seen.parameters = parameters
            self._introduce(seen)
        whole_ones = [whole(p) for p in parameters]
        for name, plain in zip(seen.names, whole_ones, strict=True):
            if plain is not None:
                self._collectives.trained[plain.data_ptr()] = (seen.number, name)
        gradients = [_whole_gradient(p) for p in parameters]
        self._recorder.tell(
            "step",
            skips=skips() if seen.steps == 1 else [],
            position=self.position(),
            optimizer=seen.number,
            number=seen.steps,
            where=stack(),
            gradients=[None if g is None else [hash_of(g), sample(g)] for g in gradients],
            parameters=[None if p is None else hash_of(p) for p in whole_ones],
            without=self._without_gradient(parameters, seen),
            causes=[_describe(wrapped) for wrapped in self._modules.wrapped.values()],
            state=_state_of(optimizer, seen),
            rates=[float(group["lr"]) for group in optimizer.param_groups if "lr" in group],
            others=self._others(seen.steps, parameters),
            buffers=self._take_buffers(seen.steps),
            calls=self._modules.calls,
            losses=self._losses.of_this_step(),
            backward=self._losses.places,
            divided=self._losses.divided,
            by_ranks=self._losses.by_ranks,
            divides=self._losses.divides or divides_by_ranks(4),
            summed=self._summed(gradients),
            class_name=type(optimizer).__name__,
            random=self._windows.close(),
            loaded=self._loaded,
        )

    def _without_gradient(self, parameters: list[Tensor], seen: _Seen) -> dict[str, Stack]:
        """Name the parameters without a gradient, and where a collective was given what they compute, if one was."""
        found = {}
        for name, parameter in zip(seen.names, parameters, strict=True):
            if parameter.requires_grad and parameter.grad is None:
                found[name] = self._collectives.cut.get(id(parameter), [])
        return found

    def _summed(self, gradients: list[Tensor | None]) -> dict[str, Any] | None:
        """Compare the gradients with the sums that were reduced before this step, if these are of as many numbers."""
        sums = self._collectives.take_sums()
        present = [g for g in gradients if g is not None]
        numel = sum(g.numel() for g in present)
        if not sums or sum(entry["numel"] for entry in sums) != numel:
            return None
        square = sum(float(torch.linalg.vector_norm(g, dtype=torch.float64)) ** 2 for g in present)
        ratio = (sum(entry["square"] for entry in sums) / square) ** 0.5 if square else 0.0
        first = sums[0]
        return {"ratio": ratio, "where": first["where"], "divides": first["divides"]}

    def _introduce(self, seen: _Seen) -> None:
        """Tell the names of an optimiser's parameters, and where they come from."""
        names = _names_of(seen.parameters)
        described = []
        for parameter, name in zip(seen.parameters, names, strict=True):
            wrapped, is_managed = self._modules.wrapper_of(parameter)
            described.append(
                {
                    "name": name,
                    "shape": list(parameter.shape),
                    "made": self._modules.made(parameter),
                    "ddp": wrapped.made if wrapped else None,
                    "managed": is_managed,
                    "whole": whole(parameter) is not None,
                }
            )
        seen.names = names
        self._recorder.tell("optimizer", optimizer=seen.number, made=seen.made, parameters=described)

    def _others(self, number: int, parameters: list[Tensor]) -> dict[str, list[Any]]:
        """Hash the parameters of networks that are used and not trained, at the first step."""
        if number > 1:
            return {}
        trained = set(map(id, parameters))
        for optimizer in list(self._made):
            trained |= set(map(id, parameters_of(optimizer)))
        found = {}
        for name, root in roots():
            tensors = [*root.parameters(), *root.buffers()]
            others = [t for t in tensors if whole(t) is not None]
            is_trained = any(id(t) in trained for t in tensors)
            if others and not is_trained and self._modules.is_used(root):
                found[name] = [[hash_of(t) for t in others], self._modules.made(others[0])]
        return found

    def _note_buffers(self) -> None:
        """Hash buffers before a network changes them, for a script may average them after a step."""
        if self._buffers is None and self._recorder.step < _LOOKED_AT:
            self._buffers = self._hash_buffers()

    def _take_buffers(self, number: int) -> dict[str, dict[str, Any]]:
        if number > _LOOKED_AT:
            return {}
        return self._hash_buffers() if self._buffers is None else self._buffers

    def _hash_buffers(self) -> dict[str, dict[str, Any]]:
        """Hash the running statistics of networks, and tell if DDP sends them out."""
        found: dict[str, dict[str, Any]] = {}
        for name, root in roots():
            buffers = {n: b for n, b in root.named_buffers() if b.is_floating_point() and whole(b) is not None}
            for buffer_name, buffer in buffers.items():
                self._collectives.trained[buffer.data_ptr()] = (-1, f"{name}.{buffer_name}")
            if buffers:
                sent, made = self._are_sent(root)
                found[name] = {
                    "hashes": {n: hash_of(b) for n, b in buffers.items()},
                    "sent": sent,
                    "ddp": made,
                }
        return found

    def _are_sent(self, root: nn.Module) -> tuple[bool, Stack]:
        for wrapped in self._modules.wrapped.values():
            module = wrapped.ref()
            if module is not None and any(m is inner_of(module) for m in root.modules()):
                return bool(module.broadcast_buffers), wrapped.made
        return False, []


def _describe(wrapped: Wrapped) -> dict[str, Any]:
    """Describe what could keep a DDP from averaging the gradients of this step."""
    told = {name: getattr(wrapped, name) for name in ("made", "bypassed", "taken_out", "unsynced", "thawed")}
    return {
        **told,
        "forwards": wrapped.forwards[-8:],
        "uses_all": not (wrapped.kept.find_unused_parameters or wrapped.kept.static_graph),
        "hooked": bool(getattr(wrapped.kept, "_comm_hooks", ())),
    }


def _whole_gradient(parameter: Tensor) -> Tensor | None:
    gradient = parameter.grad
    if gradient is None or whole(parameter) is None or gradient.is_sparse:
        return None
    return whole(gradient)


def _state_of(optimizer: Optimizer, seen: _Seen) -> dict[str, int]:
    """Hash the state of an optimiser, by parameter and name."""
    found: dict[str, int] = {}
    if seen.steps > 3:  # what differs differs by then
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
