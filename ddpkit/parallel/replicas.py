"""Are the replicas still equal? Weights that drift apart raise no error anywhere; `check_replicas` looks."""

from __future__ import annotations

import hashlib
import json
from typing import Literal

import torch
from torch import nn

from ..collectives import ops, sync
from ..collectives.consistency import check_fingerprint, fingerprint_of, raise_everywhere
from ..collectives.differences import name_ranks, out_of_order
from ..collectives.digest import digest
from ..collectives.sharded import explain_sharded
from ..errors import ReplicaMismatchError
from ..process_group import lifecycle
from ..torch_internals import untraced
from .models import (
    check_module,
    check_tensors,
    check_writable,
    describe_sharing,
    named_tensors,
    strip,
    wrapped_paths,
)

_SHOWN = 20  # differences listed in the error


@untraced
def check_replicas(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Raise on every rank unless all ranks hold the same model and optimizer, to the last bit. Collective.

    It takes a checksum of every parameter, buffer, optimizer state and hyper-parameter (bit patterns, in order) and
    exchanges one digest; only if those differ, the checksums themselves. It costs about 0.2 s per GB on one core, so
    call it after loading, before saving, or every so many steps.

    With DDP, BatchNorm statistics differ between a training forward and the next one, which first sends rank 0's to all
    (see `broadcast_buffers`): each rank would evaluate with its own. `sync_buffers` makes them equal.

    Args:
        model: A model, wrapped or not; target networks and averages, which DDP does not look after, are worth a check.
        optimizer: Its optimizer.

    Raises:
        ReplicaMismatchError: Naming what differs, and on which ranks.
        MismatchError: On the ranks whose peers raise one of the errors below.
        TypeError: If the model is no module, or has sharded tensors.
        ValueError: If it has lazy tensors that are not initialised yet, or tensors on the meta device.

    Example:
        >>> check_replicas(nn.Linear(2, 1))  # one process: nothing to compare

        On three, after rank 1 alone changed something::

            ddpkit.errors.ReplicaMismatchError: 2 of 9 entries differ between ranks:
              parameter 0.bias: float32[4] #9f0c0e6f on ranks 0, 2; float32[4] #1f6a3cd2 on rank 1
              optimizer group 0 lr: 0.1 on ranks 0, 2; 0.2 on rank 1
    """
    call = "check_replicas()"
    with raise_everywhere(call):
        check_module(call, model)
        check_tensors(call, named_tensors(model))
        if optimizer is not None:
            states = (
                ("the optimizer's state", value)
                for state in getattr(optimizer, "state", {}).values()
                for value in state.values()
            )
            if problem := explain_sharded(call, states):
                raise TypeError(problem)
        if not lifecycle.joined():
            return
        mine = _model_entries(model)
        if optimizer is not None:
            mine |= _optimizer_entries(model, optimizer)
    check_fingerprint(fingerprint_of(call))
    if len(set(sync.exchange(hashlib.sha256(repr(mine).encode()).hexdigest()))) == 1:
        return
    everyone = ops.all_gather_object(mine)
    names = dict.fromkeys(name for entries in everyone for name in entries)
    lines = []
    remedy = ""
    for name in names:
        holders: dict[str, list[int]] = {}
        for rank, entries in enumerate(everyone):
            holders.setdefault(entries.get(name, "absent"), []).append(rank)
        if len(holders) == 1:
            continue
        lines.append(f"  {name}: " + "; ".join(f"{value} on {name_ranks(who)}" for value, who in holders.items()))
        if name.startswith("buffer "):
            remedy = " (sync_buffers(model) makes buffers equal)"
    if not lines:
        place = out_of_order([list(entries) for entries in everyone])
        raise ReplicaMismatchError(f"The ranks hold equal entries, but in different orders: {place}")
    shown = lines[:_SHOWN]
    if len(lines) > _SHOWN:
        shown.append(f"  and {len(lines) - _SHOWN} more")
    head = f"{len(lines)} of {len(names)} entries differ between ranks{remedy}:"
    raise ReplicaMismatchError("\n".join([head, *shown]))


@untraced
def sync_buffers(model: nn.Module, how: Literal["mean", "broadcast"] = "mean") -> None:
    """Make a model's buffers, such as BatchNorm's statistics, equal on all ranks, in place. Collective.

    Parameters are kept equal by DDP; buffers are not: each rank's BatchNorm follows its own batches, so that ranks
    evaluate, and rank 0 saves, different models. Call this after the last training step before either. Buffers that
    are equal already are left alone, to the last bit.

    Args:
        model: A model, wrapped, compiled or not; the same on every rank.
        how: "mean" averages the floating buffers over the ranks, as BatchNorm's running mean and variance; those of
            integers and booleans become rank 0's. "broadcast" makes all of them rank 0's.

    Raises:
        MismatchError: If the buffers' names, dtypes or shapes, or memory that buffers share, differ between ranks, on
            every rank; also on the ranks whose peers raise one of the errors below.
        TypeError: If the model is no module, or has sharded tensors.
        ValueError: If `how` is unknown, or a buffer cannot be written to or has no value.

    Example:
        >>> sync_buffers(nn.BatchNorm1d(2))  # one process: nothing to do

        On two::

            sync_buffers(model)    # rank 0, running_mean 1.0
            sync_buffers(model)    # rank 1, running_mean 3.0; both have 2.0
    """
    call = "sync_buffers()"
    with raise_everywhere(call):
        if how not in ("mean", "broadcast"):
            raise ValueError(f"how must be 'mean' or 'broadcast', got {how!r}.")
        check_module(call, model)
        check_tensors(call, named_tensors(model))
        buffers = _buffers(model)
        for name, buffer in buffers.items():
            check_writable(call, name, buffer)
        if not lifecycle.joined():
            return
        mine = {name: digest(buffer) for name, buffer in buffers.items()}
    kinds = {}
    sharing = describe_sharing(buffers.values())
    for (name, buffer), shared in zip(buffers.items(), sharing, strict=True):
        kinds[name] = f"{buffer.dtype}{list(buffer.shape)}{shared}"
    check_fingerprint(fingerprint_of(f"sync_buffers(how={how!r})", kinds))
    everyone = [json.loads(text) for text in sync.exchange(json.dumps(mine))]
    differing = [buffer for name, buffer in buffers.items() if len({each[name] for each in everyone}) > 1]
    averaged: list[torch.Tensor] = []
    others: list[torch.Tensor] = []
    for buffer in differing:
        if how == "broadcast" or not (buffer.is_floating_point() or buffer.is_complex()):
            others.append(buffer)
        else:
            averaged.append(buffer)
    with torch.inference_mode(False), torch.no_grad():
        if averaged:
            means = ops.all_reduce_mean([_as_real(buffer) for buffer in averaged])
            for buffer, mean in zip(averaged, means, strict=True):
                buffer.copy_(torch.view_as_complex(mean.clone()) if buffer.is_complex() else mean)
        if others:
            for buffer, value in zip(others, ops.broadcast(others), strict=True):
                buffer.copy_(value)


def _as_real(buffer: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(buffer.resolve_conj()) if buffer.is_complex() else buffer


def _parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    wrapped = wrapped_paths(model)
    return {strip(name, wrapped): parameter for name, parameter in model.named_parameters()}


def _buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    wrapped = wrapped_paths(model)
    return {strip(name, wrapped): buffer.detach() for name, buffer in model.named_buffers()}


def _model_entries(model: nn.Module) -> dict[str, str]:
    entries = {f"parameter {name}": digest(p) for name, p in _parameters(model).items()}
    return entries | {f"buffer {name}": digest(buffer) for name, buffer in _buffers(model).items()}


def _optimizer_entries(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    names = {parameter: name for name, parameter in _parameters(model).items()}
    entries: dict[str, str] = {}
    for i, group in enumerate(optimizer.param_groups):
        members = [names.get(parameter, f"group {i} parameter {j}") for j, parameter in enumerate(group["params"])]
        settings = group | {"params": members}
        entries |= {f"optimizer group {i} {key}": digest(value) for key, value in settings.items()}
        for name, parameter in zip(members, group["params"], strict=True):
            state = optimizer.state.get(parameter, {})
            entries |= {f"optimizer state {key} of {name}": digest(value) for key, value in state.items()}
    return entries
