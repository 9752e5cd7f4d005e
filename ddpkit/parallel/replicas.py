"""Compare the ranks' replicas and make buffers equal: diverging weights raise no error by themselves."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ..collectives.consistency import check_fingerprint, fingerprint_of, raise_everywhere
from ..collectives.differences import differing_parts, digest, explain_disorder, list_lines
from ..collectives.groups import peers_of
from ..collectives.reduce import reduce_tree
from ..collectives.transfer import gather_objects
from ..collectives.tree import local_part, name_dtype
from ..errors import ReplicaMismatchError
from ..job import current_job, lifecycle
from ..job.job import Peers, ranks_of, subset_of
from ..torch_internals import is_dtensor, untraced
from .models import (
    broadcast_into,
    check_module,
    check_tensors,
    describe_tensors,
    mark_if_frozen,
    named_parameters,
    named_tensors,
    strip,
    unwrapped_names,
    without_dtensors,
    wrapped_paths,
)

_DIFFERENCES_SHOWN = 20  # differences listed in the error

Entries = dict[str, str]  # digests of one rank's values, by name


@untraced
def check_replicas(
    model: nn.Module | list[nn.Module] | tuple[nn.Module, ...],
    optimizer: Optimizer | list[Optimizer] | tuple[Optimizer, ...] | None = None,
) -> None:
    """Raise on every rank unless models and optimizers are equal on all, bit by bit. Collective.

    It computes a checksum of every parameter, buffer, optimizer state and hyper-parameter (bit
    patterns, in order), includes which parameters are frozen and which modules are in training
    mode, and exchanges one digest; if the digests differ, it exchanges the checksums. It takes
    about 0.5 s per GB on one core and 8 ms on a GPU (H200): call it after loading, before saving,
    or periodically.

    It compares the data-parallel ranks (`set_data_parallel`). A DTensor (`fully_shard`, tensor
    parallelism) is compared along the mesh dimensions in which it is replicated: each rank's part
    with the same part on other ranks.

    With DDP, BatchNorm statistics differ between ranks after a training forward, until the next one
    broadcasts rank 0's (see `broadcast_buffers`); each rank would evaluate with its own.
    `sync_buffers` makes them equal.

    Args:
        model: A model, wrapped or not, or a list of them, whose names then start with the index.
            Check target networks and weight averages, too: DDP does not synchronise them.
        optimizer: The optimizer, or a list of optimizers, of these models.

    Raises:
        ReplicaMismatchError: If they differ; it names what differs, and the ranks.
        MismatchError: On the other ranks, if one raises an error below.
        TypeError: If a model is not a module, an optimizer is not one of torch's, or tensors are
            sharded in another way, such as by FSDP.
        ValueError: If a model has lazy tensors that are not initialised yet, or tensors on the meta
            device.

    Example:
        >>> check_replicas(nn.Linear(2, 1))  # one process: nothing to compare

        On three ranks, after rank 1 alone changed something::

            ddpkit.errors.ReplicaMismatchError: 2 of 10 entries differ between ranks:
              parameter 0.bias: float32[4] #9f0c0e6f on ranks 0, 2; float32[4] #1f6a3cd2 on rank 1
              optimizer group 0 lr: 0.1 on ranks 0, 2; 0.2 on rank 1
    """
    call, peers = "check_replicas()", current_job.data_parallel()
    with raise_everywhere(call, peers):
        whole = _as_one_module(call, model)
        check_tensors(call, without_dtensors(named_tensors(whole).items()))
        optimizers = _name_optimizers(call, optimizer)
        if lifecycle.enter_collective() is None:
            return
        values: dict[str, Any] = {**unwrapped_names(whole, whole.named_parameters(), "parameter ")}
        values |= unwrapped_names(whole, whole.named_buffers(), "buffer ")
        names = {parameter: name for name, parameter in named_parameters(whole).items()}
        for name, each in optimizers.items():
            values |= _optimizer_values(name, names, each)
        mine = {name: _describe(value) for name, value in values.items()} | _modes(whole)
    check_fingerprint(fingerprint_of(call), peers)
    _compare(mine, peers)
    for group, parts in replicated_parts(values).items():
        _compare(parts, peers_of(group))


def _compare(mine: Entries, peers: Peers | None) -> None:
    """Raise on each of these ranks unless their entries are equal. Collective."""
    if everyone := gather_unless_equal(mine, peers):
        raise ReplicaMismatchError(_explain(everyone))


def replicated_parts(values: Mapping[str, Any]) -> dict[dist.ProcessGroup, Entries]:
    """Describe this rank's parts of DTensors for each group of ranks that should hold equal parts."""
    groups: dict[dist.ProcessGroup, Entries] = {}
    for name, value in values.items():
        if not is_dtensor(value) or value.device_mesh.get_coordinate() is None:
            continue
        for dim, placement in enumerate(value.placements):
            if placement.is_replicate() and value.device_mesh.size(dim) > 1:
                entries = groups.setdefault(value.device_mesh.get_group(dim), {})
                entries[name] = digest(local_part(value))
    return groups


def _describe(value: Any) -> str:
    """Describe a value as the data-parallel ranks compare it; they hold different parts of a DTensor."""
    if not is_dtensor(value):
        return digest(value) + mark_if_frozen(value)
    placements = ", ".join(map(str, value.placements))
    return f"{name_dtype(value.dtype)}{list(value.shape)} DTensor, {placements}{mark_if_frozen(value)}"


def _as_one_module(call: str, model: Any) -> nn.Module:
    """Return the model, or one module that holds those of a list, named by index."""
    is_list = isinstance(model, list | tuple)
    for each in model if is_list else [model]:
        check_module(call, each)
    return nn.ModuleList(model) if is_list else cast(nn.Module, model)


def _name_optimizers(call: str, optimizer: Any) -> dict[str, Optimizer]:
    """Name an optimizer, or those of a list by index."""
    named = {} if optimizer is None else {"optimizer": optimizer}
    if isinstance(optimizer, list | tuple):
        named = {f"optimizer {i}": each for i, each in enumerate(optimizer)}
    for each in named.values():
        if not isinstance(each, Optimizer):
            raise TypeError(f"{call} takes a torch.optim.Optimizer, or a list of them, got {type(each).__name__}.")
    return named


def gather_unless_equal(mine: Entries, peers: Peers | None) -> dict[int, Entries]:
    """Return each rank's entries; {} if they are equal, including names and order. Collective."""
    together = hashlib.sha256(repr(mine).encode()).hexdigest()
    if len(set(lifecycle.exchange(together, subset_of(peers)))) == 1:
        return {}
    return dict(zip(ranks_of(peers), gather_objects("all_gather_object(obj)", mine, peers), strict=True))


def _explain(everyone: dict[int, Entries]) -> str:
    """List the entries that differ, with their values by rank."""
    differing = differing_parts(everyone)
    if not differing:
        disorder = explain_disorder(everyone)
        return f"The ranks hold equal entries in different orders: {disorder}"
    has_buffers = any(name.startswith("buffer ") for name in differing)
    remedy = " (sync_buffers(model) makes buffers equal)" if has_buffers else ""
    lines = [f"{name}: {values}" for name, values in differing.items()]
    head = f"{len(lines)} of {len(set().union(*everyone.values()))} entries differ between ranks{remedy}:"
    return list_lines(head, lines, _DIFFERENCES_SHOWN)


def _modes(model: nn.Module) -> Entries:
    """Report the training mode of modules that differ from the model's."""
    wrapped = wrapped_paths(model)
    return {
        f"mode of {strip(path, wrapped) or 'the model'}": "train" if module.training else "eval"
        for path, module in model.named_modules()
        if module is model or module.training != model.training
    }


def _optimizer_values(called: str, names: dict[Tensor, str], optimizer: Optimizer) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for i, group in enumerate(optimizer.param_groups):
        members = []
        for j, parameter in enumerate(group["params"]):
            members.append(names.get(parameter, f"group {i} parameter {j}"))
            state = optimizer.state.get(parameter, {})
            entries |= {f"{called} state {key} of {members[-1]}": value for key, value in state.items()}
        entries |= {f"{called} group {i} {key}": value for key, value in (group | {"params": members}).items()}
    return entries


@untraced
def sync_buffers(model: nn.Module, how: Literal["mean", "broadcast"] = "mean") -> None:
    """Make a model's buffers, such as BatchNorm statistics, equal on all ranks. Collective.

    DDP keeps parameters equal, but not buffers: each rank's BatchNorm follows its own batches, so
    ranks evaluate, and rank 0 saves, different models. Call this after the last training step,
    before you evaluate or save. Buffers change in place; equal ones stay the same to the last bit.

    Args:
        model: A model, wrapped, compiled or not; the same on every rank.
        how: "mean" averages floating buffers over ranks, such as BatchNorm's running mean and
            variance, and sets integer, boolean and complex ones to rank 0's. "broadcast" sets all of
            them to rank 0's.

    Raises:
        MismatchError: On every rank, if the buffers' names, dtypes or shapes differ between ranks; on
            the other ranks, if one raises an error below.
        TypeError: If the model is not a module, or has sharded tensors.
        ValueError: If `how` is unknown, or a buffer has no value.

    Example:
        >>> sync_buffers(nn.BatchNorm1d(2))  # one process: nothing to do

        On two ranks::

            sync_buffers(model)    # rank 0, running_mean 1.0
            sync_buffers(model)    # rank 1, running_mean 3.0; both have 2.0
    """
    call, peers = "sync_buffers()", current_job.data_parallel()
    with raise_everywhere(call, peers):
        if how not in ("mean", "broadcast"):
            raise ValueError(f"how must be 'mean' or 'broadcast', got {how!r}.")
        check_module(call, model)
        check_tensors(call, named_tensors(model).items())
        buffers = {name: buffer.detach() for name, buffer in unwrapped_names(model, model.named_buffers()).items()}
        if lifecycle.enter_collective() is None:
            return
        mine = {name: digest(buffer) for name, buffer in buffers.items()}
    check_fingerprint(fingerprint_of(f"sync_buffers(how={how!r})", describe_tensors(buffers)), peers)
    differing = [buffers[name] for name in differing_parts(gather_unless_equal(mine, peers))]
    averaged = [buffer for buffer in differing if how == "mean" and buffer.is_floating_point()]
    others = [buffer for buffer in differing if how != "mean" or not buffer.is_floating_point()]
    with torch.inference_mode(False), torch.no_grad():
        if averaged:
            means = reduce_tree(averaged, "mean", None, check=True, peers=peers)
            for buffer, mean in zip(averaged, means, strict=True):
                buffer.copy_(mean)
        if others:
            broadcast_into(others)
