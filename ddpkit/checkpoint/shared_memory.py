"""Saved tensors that differ but are meant for the same memory: the last one loaded would win."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..collectives.digest import digest
from ..parallel.models import sharing_memory
from ..torch_internals import is_dtensor
from .leaves import path_to
from .states import match_names, module_state


class _Pair(NamedTuple):
    here: Tensor  # a model's tensor
    saved: Tensor  # the one to load into it


def explain_conflicts(modules: Mapping[str, tuple[nn.Module, Any]]) -> list[str]:
    """Say which saved tensors differ but would be loaded into the same memory.

    Args:
        modules: By name, each model and the saved state that fits it.
    """
    pairs = _pairs(modules)
    paths = list(pairs)
    found = []
    for index in sorted(sharing_memory(pair.here for pair in pairs.values())):
        path = paths[index]
        for other in paths[:index]:
            if _overwrites(pairs[path], pairs[other]):
                problem = f"{other} and {path} differ there, but share memory here"
                found.append(f"{problem}: untie them, or load equal ones")
                break
    return found


def _pairs(modules: Mapping[str, tuple[nn.Module, Any]]) -> dict[str, _Pair]:
    """Pair the models' tensors with the saved ones, by path, in the order of loading.

    Without sharded ones, here or there.
    """
    pairs = {}
    for name, (module, saved) in modules.items():
        state = module_state(module)
        matched = match_names(saved, list(state))
        for key, here in state.items():
            there = matched[key]
            if is_dtensor(here) or not isinstance(here, Tensor) or not isinstance(there, Tensor):
                continue
            if not there.is_meta:
                pairs[path_to(name, key)] = _Pair(here, there)
    return pairs


@torch.no_grad()
def _overwrites(later: _Pair, earlier: _Pair) -> bool:
    """Return whether loading the later of two tensors changes the earlier one; it is tried on copies."""
    if not sharing_memory([earlier.here, later.here]):
        return False
    if _is_same(earlier.here, later.here) and _is_same(earlier.saved, later.saved):
        return False
    trial, trial_of_later = _copy_layout(earlier.here, later.here)
    trial.copy_(earlier.saved)
    loaded = digest(trial)
    trial_of_later.copy_(later.saved)
    return digest(trial) != loaded


def _copy_layout(*tensors: Tensor) -> list[Tensor]:
    """Make tensors on the CPU that share memory as these do; their values are arbitrary."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    start = min(storage.data_ptr() for storage in storages)
    end = max(storage.data_ptr() + storage.nbytes() for storage in storages)
    memory = torch.empty(end - start, dtype=torch.uint8, device="cpu").untyped_storage()
    copies = []
    for tensor in tensors:
        offset = (tensor.data_ptr() - start) // tensor.element_size()
        copy = torch.empty(0, dtype=tensor.dtype, device="cpu")
        copies.append(copy.set_(memory, offset, tensor.shape, tensor.stride()))
    return copies


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are the same elements of the same memory."""
    if one.data_ptr() != other.data_ptr() or one.dtype != other.dtype:
        return False
    return one.shape == other.shape and one.stride() == other.stride()
