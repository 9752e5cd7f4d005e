"""Run forwards and backwards that exchange nothing with other ranks, and that can be undone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from types import TracebackType

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..parallel.models import broadcast_into
from ..process_group import lifecycle
from ..torch_internals import is_fully_sharded

Modules = Sequence[nn.Module | Tensor]


class LocalPass:
    """A block of forwards and backwards in which DDP exchanges nothing, nor may anything of ddpkit's.

    A rank that raises in the block keeps no other rank waiting. Buffers that DDP sends out before a
    forward travel when the block begins.

    Args:
        call: Whose block it is, for errors.
        modules: The models that are used in the block, and single parameters.

    Raises:
        TypeError: If something is no module and no tensor, or a model exchanges values in its forward.
    """

    def __init__(self, call: str, modules: Modules) -> None:
        self._call = call
        self._modules = modules
        self._kept: list[tuple[Tensor, Tensor]] = []  # buffers, with copies from the block's beginning
        self._stack = ExitStack()
        for module in modules:
            _check_local(call, module)

    def __enter__(self) -> LocalPass:
        models = self._wrapped()
        self._send_buffers(models)
        self._keep_buffers()
        for model in models:
            self._stack.enter_context(model.no_sync())
            model.require_forward_param_sync = False  # its buffers
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
        """Give the buffers back the values that they had when the block began, and drop all gradients."""
        with torch.no_grad():
            for buffer, copy in self._kept:
                buffer.copy_(copy)
        for module in self._modules:
            for parameter in _parameters(module):
                parameter.grad = None

    def _wrapped(self) -> list[DistributedDataParallel]:
        found = []
        for module in self._modules:
            if isinstance(module, nn.Module):
                found += [each for each in module.modules() if isinstance(each, DistributedDataParallel)]
        return found

    def _send_buffers(self, models: Iterable[DistributedDataParallel]) -> None:
        """Make the buffers rank 0's, as DDP does before each forward. Collective."""
        buffers = []
        for model in models:
            if model.broadcast_buffers and torch.is_grad_enabled():
                buffers += list(model.module.buffers())
        if buffers and lifecycle.joined():
            with torch.no_grad():
                broadcast_into(buffers)

    def _keep_buffers(self) -> None:
        self._kept = []
        with torch.no_grad():
            for module in self._modules:
                if isinstance(module, nn.Module):
                    self._kept += [(buffer, buffer.clone()) for buffer in module.buffers()]


def _parameters(module: nn.Module | Tensor) -> list[Tensor]:
    return list(module.parameters()) if isinstance(module, nn.Module) else [module]


def _check_local(call: str, module: object) -> None:
    """Refuse a model whose forward waits for other ranks: they would wait for one that has raised."""
    if isinstance(module, Tensor):
        return
    if not isinstance(module, nn.Module):
        raise TypeError(f"{call} takes modules and tensors, got {type(module).__name__}: unpack a list with *.")
    for part in module.modules():
        problem = ""
        if isinstance(part, nn.SyncBatchNorm):
            problem = "SyncBatchNorm exchanges statistics in forward"
        elif is_fully_sharded(part):
            problem = "fully_shard exchanges weights in forward"
        elif isinstance(part, DistributedDataParallel) and part.static_graph:
            problem = "DDP with static_graph=True exchanges gradients in its first backward, whatever no_sync() says"
        if problem:
            raise TypeError(f"{call} cannot guard this model: {problem}, where ranks would wait for one that raised.")
