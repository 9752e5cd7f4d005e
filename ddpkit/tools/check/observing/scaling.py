"""Observe what is done to gradients between backward and step: clipping and unscaling."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import utils

from ...script.recorder import Recorder
from ...script.tensors import hash_of, parameters_of, whole
from ..places import stack
from .patching import Function, before, guarded, replace


class Scaling:
    """Observes clipping from the moment of `install`."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def install(self) -> None:
        """Begin."""
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            replace(utils, name, self._clipping)
            setattr(utils.clip_grad, name, getattr(utils, name))
        before(torch.amp.GradScaler, "unscale_", self._unscale)

    def _clipping(self, original: Function) -> Function:
        tell = guarded(self._tell)

        def call(parameters: Tensor | Iterable[Tensor], *args: Any, **kwargs: Any) -> Any:
            if isinstance(parameters, Tensor):
                parameters = [parameters]
            parameters = list(parameters)  # it may be a generator
            tell("clips", parameters)
            return original(parameters, *args, **kwargs)

        return call

    def _unscale(self, scaler: Any, optimizer: Any) -> None:
        self._tell("unscales", parameters_of(optimizer))

    def _tell(self, does: str, parameters: Iterable[Tensor]) -> None:
        gradients = [whole(p.grad) for p in parameters if p.grad is not None]
        norm = [float(torch.linalg.vector_norm(g)) for g in gradients if g is not None and not g.is_sparse]
        hashes = [hash_of(g) for g in gradients if g is not None and not g.is_sparse]
        self._recorder.tell("clip", does=does, gradients=hashes, norm=sum(n * n for n in norm) ** 0.5, where=stack())
