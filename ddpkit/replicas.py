"""Are the replicas still equal? Weights that drift apart raise no error anywhere; `check_replicas` looks."""

from __future__ import annotations

import hashlib
import re
from typing import Any

import torch
from torch import nn

from . import collectives, runtime, waiting
from .errors import ReplicaMismatch

_SHOWN = 20  # differences listed in the error


def check_replicas(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Raises on every rank unless all ranks hold the same model and optimizer, to the last bit. Collective.

    It hashes every parameter, buffer, optimizer state and hyper-parameter (bit patterns, in order) and exchanges one
    digest; only if those differ, the hashes themselves. It costs about 0.6 s per GB on one core, so call it after
    loading, before saving, or every so many steps.

    With DDP, BatchNorm statistics differ between a training forward and the next one, which first sends rank 0's to all
    (see `broadcast_buffers`): each rank would evaluate with its own.

    Args:
        model: A model, wrapped or not; target networks and averages, which DDP does not look after, are worth a check.
        optimizer: Its optimizer.

    Raises:
        ReplicaMismatch: Naming what differs, and on which ranks.

    Example:
        >>> check_replicas(nn.Linear(2, 1))  # one process: nothing to compare

        On three, after rank 1 alone changed something::

            ddpkit.errors.ReplicaMismatch: 2 of 9 entries differ between ranks:
              parameter 0.bias: float32[4] #9f0c0e6f3b0f5c11 on ranks 0, 2; float32[4] #1f6a3cd2085e91d7 on rank 1
              optimizer group 0 lr: 0.1 on ranks 0, 2; 0.2 on rank 1
    """
    if not runtime.joined():
        return
    mine = _model_entries(model) | (_optimizer_entries(model, optimizer) if optimizer is not None else {})
    if len(set(waiting.exchange(hashlib.sha256(repr(mine).encode()).hexdigest()))) == 1:
        return
    everyone = collectives.all_gather_object(mine)
    names, lines = dict.fromkeys(name for entries in everyone for name in entries), []
    for name in names:
        holders: dict[str, list[int]] = {}
        for rank, entries in enumerate(everyone):
            holders.setdefault(entries.get(name, "absent"), []).append(rank)
        if len(holders) > 1:
            lines.append(
                f"  {_clean(name)}: " + "; ".join(f"{value} on {_ranks(who)}" for value, who in holders.items())
            )
    shown = lines[:_SHOWN] + [f"  and {len(lines) - _SHOWN} more"] * (len(lines) > _SHOWN)
    raise ReplicaMismatch("\n".join([f"{len(lines)} of {len(names)} entries differ between ranks:", *shown]))


def _model_entries(model: nn.Module) -> dict[str, str]:
    entries = {f"parameter {name}": _digest(tensor) for name, tensor in model.named_parameters()}
    return entries | {f"buffer {name}": _digest(tensor) for name, tensor in model.named_buffers()}


def _optimizer_entries(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    entries: dict[str, str] = {}
    for i, group in enumerate(optimizer.param_groups):
        members = [names.get(parameter, f"group {i} parameter {j}") for j, parameter in enumerate(group["params"])]
        settings = group | {"params": members}
        entries |= {f"optimizer group {i} {key}": _digest(value) for key, value in settings.items()}
        for name, parameter in zip(members, group["params"], strict=True):
            state = optimizer.state.get(parameter, {})
            entries |= {f"optimizer state {key} of {name}": _digest(value) for key, value in state.items()}
    return entries


def _digest(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        bits = hashlib.sha256(plain.reshape(-1).view(torch.uint8).numpy().data).hexdigest()[:16]
        return f"{value.dtype}{list(value.shape)} #{bits}".removeprefix("torch.")
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_digest(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_digest, value)) + "]"
    known = isinstance(value, bool | int | float | complex | str | None)
    return repr(value) if known else type(value).__qualname__  # an object's repr may hold its address


def _clean(name: str) -> str:
    return re.sub(r"\b(module|_orig_mod)\.", "", name)


def _ranks(who: list[int]) -> str:
    return f"rank{'s' * (len(who) > 1)} {', '.join(map(str, who))}"
