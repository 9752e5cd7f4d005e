"""Run forwards and backwards that exchange nothing with other ranks, and that can be undone."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..process_group import lifecycle
from ..torch_internals import ignored_by_ddp, is_fully_sharded, own_buffers, rebuild_buckets, version_of
from .models import broadcast_into

Modules = Sequence[nn.Module | Tensor]


class LocalPass:
    """A block of forwards and backwards in which DDP exchanges nothing, nor may anything of ddpkit's.

    A rank that raises in the block keeps no other rank waiting. What DDP exchanges at the beginning
    of a forward travels when the block begins: buffers, and how gradients are cut into buckets.

    Args:
        call: Whose block it is, for errors.
        modules: The models that are used in the block, and single parameters.

    Raises:
        TypeError: If something is no module and no tensor, or a model exchanges values in its forward.
    """

    def __init__(self, call: str, modules: Modules) -> None:
        self._call = call
        self._modules = modules
        self._before: _Before | None = None
        self._stack = ExitStack()
        for module in modules:
            _check_local(call, module)

    def __enter__(self) -> LocalPass:
        lifecycle.joined()  # refuses a block in another one, before anything is exchanged
        models = _wrapped(self._modules)
        self._exchange_first(models)
        self._before = _Before.of(self._modules)
        for model in models:
            self._stack.enter_context(model.no_sync())
            model.require_forward_param_sync = False  # its buffers
            self._stack.callback(setattr, model, "require_forward_param_sync", True)
        self._stack.enter_context(lifecycle.apart(self._call))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def undo(self) -> None:
        """Give buffers and frozen parameters back what they had when the block began; drop all gradients."""
        if self._before is not None:
            self._before.restore()

    def changed_buffer(self) -> str:
        """Return the name of a buffer that the block has changed, with its module's class; "" if there is none."""
        if self._before is None:
            return ""
        return self._before.changed_buffer()

    def _exchange_first(self, models: list[DistributedDataParallel]) -> None:
        """Exchange what DDP does before a forward. Collective."""
        if not torch.is_grad_enabled() or not lifecycle.joined():
            return
        buffers = []
        for model in models:
            rebuild_buckets(model)
            if model.broadcast_buffers:
                buffers += list(model.module.buffers())
        if buffers:
            with torch.no_grad():
                broadcast_into(buffers)


@dataclass
class _Before:
    """What a block may change, from when it began.

    Attributes:
        buffers: Each with its module and name there, the object, its version, and a copy of its values.
        parameters: Each with whether it was trained.
    """

    buffers: list[tuple[nn.Module, str, Tensor | None, int, Tensor | None]]
    parameters: list[tuple[Tensor, bool]]

    @classmethod
    @torch.no_grad()
    def of(cls, modules: Modules) -> _Before:
        before = cls([], [])
        for module in modules:
            if isinstance(module, Tensor):
                before.parameters.append((module, module.requires_grad))
                continue
            for parameter in module.parameters():
                before.parameters.append((parameter, parameter.requires_grad))
            for part in module.modules():
                for name, buffer in own_buffers(part).items():
                    copy = None if buffer is None else buffer.clone()
                    before.buffers.append((part, name, buffer, version_of(buffer), copy))
        return before

    @torch.no_grad()
    def restore(self) -> None:
        for part, name, buffer, _, copy in self.buffers:
            own_buffers(part)[name] = buffer  # the model may have put another in its place
            if buffer is not None and copy is not None:
                buffer.copy_(copy)
        for parameter, is_trained in self.parameters:
            parameter.requires_grad_(is_trained)
            parameter.grad = None

    def changed_buffer(self) -> str:
        for part, name, buffer, version, _ in self.buffers:
            now = own_buffers(part)[name]
            if now is not buffer or version_of(now) != version:
                return f"{type(part).__name__}.{name}"
        return ""


def _wrapped(modules: Modules) -> list[DistributedDataParallel]:
    found = []
    for module in modules:
        if isinstance(module, nn.Module):
            found += [part for part in module.modules() if isinstance(part, DistributedDataParallel)]
    return found


def _check_local(call: str, module: object) -> None:
    """Refuse a model whose forward waits for other ranks: they would wait for one that has raised."""
    if isinstance(module, Tensor):
        return
    if not isinstance(module, nn.Module):
        raise TypeError(f"{call} takes modules and tensors, got {type(module).__name__}: unpack a list with *.")
    for part in module.modules():
        problem = _why_not_local(part)
        if problem:
            raise TypeError(f"{call} cannot take this model: {problem}.")


def _why_not_local(part: nn.Module) -> str:
    if isinstance(part, nn.SyncBatchNorm):
        return "SyncBatchNorm exchanges statistics in forward, where ranks would wait for one that has raised"
    if is_fully_sharded(part):
        return "fully_shard exchanges weights in forward, where ranks would wait for one that has raised"
    if not isinstance(part, DistributedDataParallel):
        return ""
    if part.static_graph:
        return "DDP with static_graph=True exchanges gradients in its first backward, whatever no_sync() says"
    if ignored_by_ddp(part.module):
        return "its DDP was told to leave some parameters or buffers alone"
    return ""
