"""What a checkpoint holds of an object, whether that fits another one, and how it gets in: wholly or not at all."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..collectives.digest import digest
from ..errors import CheckpointError
from ..parallel.models import sharing_memory, strip, unwrap_model, wrapped_paths
from ..parallel.wrap import clean_state_dict

_SHAPED = (Optimizer, LRScheduler)  # a state of another class of these loads without an error, and fails later


def state_of(value: Any) -> Any:
    """Return what is saved of a value: its state dict, a model's under the names it has without wrappers."""
    if isinstance(value, nn.Module):
        return module_state(value)
    return value.state_dict() if hasattr(value, "state_dict") else value


def module_state(model: nn.Module) -> dict[str, Any]:
    """Return a model's state dict under torch's own names: those it has without the wrappers in and around it."""
    model = unwrap_model(model)
    state, wrapped = model.state_dict(), wrapped_paths(model)
    if not wrapped:
        return state
    renamed = OrderedDict((strip(key, wrapped), value) for key, value in state.items())
    versions = getattr(state, "_metadata", {})  # by module; load_state_dict() migrates what has no version
    renamed._metadata = {strip(path, wrapped): value for path, value in versions.items()}  # type: ignore[attr-defined]
    return renamed


def tensors_of(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Go through the tensors that an object or nested value holds, without asking for its state dict."""
    if isinstance(value, nn.Module):
        for inner, tensor in (*value.named_parameters(), *value.named_buffers()):
            yield f"{name}.{inner}", tensor
    elif isinstance(value, Optimizer):
        yield from tensors_of(f"{name}.param_groups", value.param_groups)
        yield from tensors_of(f"{name}.state", list(value.state.values()))
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from tensors_of(f"{name}.{key}", inner)
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from tensors_of(f"{name}.{number}", inner)
    elif isinstance(value, Tensor):
        yield name, value


def is_fsdp(value: Any) -> bool:
    """Return whether a model is wrapped in torch's first FSDP, whose tensors look like ordinary ones."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    return kind is not None and isinstance(value, nn.Module) and any(isinstance(m, kind) for m in value.modules())


def is_consolidated(value: Any) -> bool:
    """Return whether an optimizer collects the state that it spreads over ranks, as ZeroRedundancyOptimizer does."""
    return isinstance(value, Optimizer) and hasattr(value, "consolidate_state_dict")


def fingerprint(name: str, state: Any) -> dict[str, str]:
    """Return a short text for each leaf of a nested state, by its path: equal if the leaves are, to the last bit."""
    if isinstance(state, Mapping):
        parts = [fingerprint(path_to(name, key), value) for key, value in state.items()]
    elif isinstance(state, list | tuple):
        parts = [fingerprint(path_to(name, number), value) for number, value in enumerate(state)]
    else:
        return {name: digest(state)}
    merged = {name: f"{type(state).__name__} of {len(state)}"}
    for part in parts:
        merged.update(part)
    return merged


def path_to(container: str, key: Any) -> str:
    """Write the path of what a container holds under a key, as no other key and no nesting is written."""
    plain = type(key) is str and key.isidentifier()
    return f"{container}.{key}" if plain else f"{container}[{key!r}]"


def synced_buffers(model: Any) -> set[str]:
    """Return the names of the buffers that DDP overwrites with rank 0's before the next forward."""
    if not isinstance(model, nn.Module):
        return set()
    names, wrapped = set(), wrapped_paths(model)
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, DistributedDataParallel) and module.broadcast_buffers:
            for name, _ in module.named_buffers(prefix=path, remove_duplicate=False):
                names.add(strip(name, wrapped))
    return names


def describe(value: Any) -> tuple[str, list[list[list[int]]]]:
    """Return the class of an optimizer or scheduler, "" for others, and the shapes of an optimizer's parameters."""
    kind = type(value).__name__ if isinstance(value, _SHAPED) else ""
    if not isinstance(value, Optimizer):
        return kind, []
    return kind, [[list(tensor.shape) for tensor in group["params"]] for group in value.param_groups]


def misfits(target: Any, saved: Any, kind: str | None, shapes: Any) -> list[str]:
    """Say why a saved state does not fit an object; [] if nothing speaks against it.

    Args:
        target: The object that it is meant for.
        saved: The state.
        kind: The class of the object that it was saved from, if known.
        shapes: What `describe()` said of its shapes then, if known.
    """
    if isinstance(target, nn.Module):
        return _module_misfits(target, saved)
    here = type(target).__name__
    if isinstance(target, _SHAPED) and kind and kind != here:
        return [f"is {kind} there, {here} here"]
    if isinstance(target, Optimizer):
        return _optimizer_misfits(target, saved, shapes)
    return []


def contradictions(modules: Mapping[str, tuple[nn.Module, Any]]) -> list[str]:
    """Say which saved tensors differ but are meant for the same memory, where the last one loaded would win.

    Args:
        modules: By name, each model and the saved state that fits it.
    """
    here: dict[str, Tensor] = {}
    there: dict[str, Tensor] = {}
    for name, (module, saved) in modules.items():
        mine = module_state(module)
        matched = _matched(saved, list(mine))
        for key, tensor in mine.items():
            if isinstance(tensor, Tensor) and isinstance(matched[key], Tensor):
                path = path_to(name, key)
                here[path], there[path] = tensor, matched[key]
    paths = list(here)
    found = []
    for place in sorted(sharing_memory(here.values())):
        path = paths[place]
        for other in paths[:place]:
            if not sharing_memory([here[other], here[path]]):
                continue
            if _overwrites((here[path], there[path]), (here[other], there[other])):
                found.append(f"{other} and {path} differ there, but share memory here: untie them, or load equal ones")
                break
    return found


@torch.no_grad()
def _overwrites(second: tuple[Tensor, Tensor], first: tuple[Tensor, Tensor]) -> bool:
    """Return whether loading the second of two tensors changes the first, each given with its saved value."""
    if _is_same(first[0], second[0]) and _is_same(first[1], second[1]):
        return False
    storages = [tensor.untyped_storage() for tensor, _ in (first, second)]
    start = min(storage.data_ptr() for storage in storages)
    end = max(storage.data_ptr() + storage.nbytes() for storage in storages)
    memory = torch.empty(end - start, dtype=torch.uint8, device="cpu").untyped_storage()
    copies = []
    for tensor, _ in (first, second):
        offset = (tensor.data_ptr() - start) // tensor.element_size()
        copy = torch.empty(0, dtype=tensor.dtype, device="cpu")
        copies.append(copy.set_(memory, offset, tensor.shape, tensor.stride()))
    copies[0].copy_(first[1])
    before = digest(copies[0])
    copies[1].copy_(second[1])
    return digest(copies[0]) != before


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are the same elements of the same memory."""
    if one.data_ptr() != other.data_ptr() or one.dtype != other.dtype:
        return False
    return one.shape == other.shape and one.stride() == other.stride()


class Before:
    """An object as it was before a state was loaded into it, to be put back."""

    def __init__(self, name: str, target: Any) -> None:
        self.name, self.target = name, target
        # an optimizer that is spread over the ranks has a state dict only when all of it was collected
        self.holder = target.optim if is_consolidated(target) else target
        self.attributes = {} if isinstance(target, nn.Module) else dict(getattr(target, "__dict__", {}))
        self.state = _copied(self.holder.state_dict())

    def put_back(self) -> None:
        """Make the object what it was.

        Raises:
            CheckpointError: If it takes its own former state no more.
        """
        if isinstance(self.target, nn.Module):
            _copy_in(self.target.state_dict(), self.state)
        elif self.attributes:
            vars(self.target).clear()
            vars(self.target).update(self.attributes)
        problem = ""
        if not self._is_as_before():
            try:
                self.holder.load_state_dict(_copied(self.state))
            except Exception as error:
                problem = f" ({type(error).__name__}: {error})"
        if not self._is_as_before():
            raise CheckpointError(
                f"{self.name} could not be put back{problem}: it is partly loaded. Make it anew before going on."
            )

    def _is_as_before(self) -> bool:
        return fingerprint("", self.holder.state_dict()) == fingerprint("", self.state)


def load_into(target: Any, saved: Any) -> None:
    """Load a state into an object that it fits."""
    if not isinstance(target, nn.Module):
        target.load_state_dict(saved)
        return
    model = unwrap_model(target)
    here, wrapped = model.state_dict(), wrapped_paths(model)  # its keys still name the wrappers inside the model
    there = _matched(saved, [strip(key, wrapped) for key in here])
    state = OrderedDict((key, there[strip(key, wrapped)]) for key in here)
    versions = getattr(saved, "_metadata", None)
    if versions and there is saved:
        paths = getattr(here, "_metadata", {})
        state._metadata = {path: versions.get(strip(path, wrapped), {}) for path in paths}  # type: ignore[attr-defined]
    model.load_state_dict(state)


def _matched(saved: Mapping[str, Any], names: list[str]) -> Mapping[str, Any]:
    """Return a saved state under these names: as it is, or where it has wrappers' names, as far as can be guessed."""
    if saved.keys() == set(names):
        return saved
    guessed = clean_state_dict(saved)
    alias = dict(zip(names, clean_state_dict(dict.fromkeys(names)), strict=True))
    if guessed.keys() != set(alias.values()):
        return guessed if set(names) & guessed.keys() else saved
    return {name: guessed[alias[name]] for name in names}


def _module_misfits(module: nn.Module, saved: Any) -> list[str]:
    if not isinstance(saved, Mapping) or not all(isinstance(key, str) for key in saved):
        return [f"is a {type(saved).__name__} there, not a model's state dict"]
    here = module_state(module)
    there = _matched(saved, list(here))
    found = [f"has {key} here, not there" for key in here if key not in there]
    found += [f"has {key} there, not here" for key in there if key not in here]
    for key in (key for key in here if key in there):  # in this order on every rank, which no set has
        shapes = [_shape(there[key]), _shape(here[key])]
        if shapes[0] != shapes[1]:
            found.append(f"has {key} of shape {shapes[0]} there, of {shapes[1]} here")
        elif isinstance(here[key], Tensor) and here[key].is_meta:
            found.append(f"has {key} on the meta device here, which takes no values: move it with to_empty() before")
        elif isinstance(there[key], Tensor) and isinstance(here[key], Tensor):
            found += _losses(key, there[key], here[key].dtype)
    return found


def _losses(key: str, saved: Tensor, dtype: torch.dtype) -> list[str]:
    """Say that a saved tensor would be changed by more than rounding if it were loaded as this dtype."""
    if saved.dtype == dtype or _holds(dtype, saved):
        return []
    names = [str(kind).removeprefix("torch.") for kind in (saved.dtype, dtype)]
    return [f"has {key} of {names[0]} there, of {names[1]} here, which does not hold its values"]


def _holds(dtype: torch.dtype, saved: Tensor) -> bool:
    """Return whether a tensor keeps its values in another dtype: numbers that are not integers may be rounded."""
    if saved.is_complex() and not dtype.is_complex:
        return False
    there = saved.to(dtype)
    if dtype.is_complex and not saved.is_complex():
        there = there.real
    rounds = saved.is_floating_point() or saved.is_complex()
    if rounds and (dtype.is_floating_point or dtype.is_complex):
        return _is_rounded(there, saved)
    return torch.equal(there.to(saved.dtype), saved) and _has_negative(there) == _has_negative(saved)


def _is_rounded(there: Tensor, saved: Tensor) -> bool:
    """Return whether a tensor of another dtype is a saved one but for rounding, the smallest numbers to 0."""
    limits = torch.finfo(there.dtype)
    if limits.max >= torch.finfo(saved.dtype).max:
        return True
    if saved.itemsize == 1:  # torch does not compare floats of 8 bits
        saved = saved.float()
    back = there.to(saved.dtype)  # larger numbers became infinite, NaN, or the largest
    return torch.allclose(back, saved, rtol=limits.eps, atol=limits.smallest_normal, equal_nan=True)


def _has_negative(tensor: Tensor) -> bool:
    return tensor.dtype.is_signed and bool((tensor < 0).any())


def _optimizer_misfits(optimizer: Optimizer, saved: Any, shapes: Any) -> list[str]:
    try:
        there = [len(group["params"]) for group in saved["param_groups"]]
        dict(saved["state"])
    except (TypeError, KeyError, IndexError, ValueError, AttributeError):
        return ["is no optimizer's state dict there"]
    here = [len(group["params"]) for group in optimizer.param_groups]
    if there != here:
        return [f"has groups of {there} tensors there, of {here} here"]
    if found := _misplaced(optimizer.param_groups, saved["param_groups"]):
        return found
    mine = describe(optimizer)[1]
    if not shapes or shapes == mine:  # files of older versions do not say
        return _state_losses(optimizer, saved)
    for number, (group, other) in enumerate(zip(mine, shapes, strict=False)):
        for place, (wanted, shape) in enumerate(zip(group, other, strict=False)):
            if wanted != shape:
                found.append(
                    f"has tensor {place} of group {number} of shape {tuple(shape)} there, of {tuple(wanted)} here"
                )
    return found or ["has tensors of other shapes there"]


def _state_losses(optimizer: Optimizer, saved: Any) -> list[str]:
    """Say which tensors of an optimizer's saved state would be changed by the dtypes of its parameters."""
    if type(optimizer).load_state_dict is not Optimizer.load_state_dict:
        return []  # only torch's own is known to give a state the dtype of its parameter
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    places = [place for group in saved["param_groups"] for place in group["params"]]
    found = []
    for place, parameter in zip(places, parameters, strict=True):
        state = saved["state"].get(place)
        if not parameter.is_floating_point() or not isinstance(state, Mapping):
            continue
        for key, value in state.items():
            if key == "step":  # keeps its own
                continue
            for path, tensor in tensors_of(f"state[{place!r}].{key}", value):
                found += _losses(path, tensor, parameter.dtype)
    return found


def _misplaced(here: Any, there: Any) -> list[str]:
    """Say which of an optimizer's named parameters stand at another's place in a saved state of as many."""
    mine, saved = _parameter_names(here), _parameter_names(there)
    found = []
    for place, name in saved.items():
        now = mine.get(place, name)
        if name != now and name in mine.values():
            found.append(
                f"has {name} as tensor {place[1]} of group {place[0]} there, {now} here: "
                "make it of the parameters in the same order"
            )
    return found


def _parameter_names(groups: Any) -> dict[tuple[int, int], str]:
    """Return an optimizer's parameters' names, less those of wrappers, by group and place, as far as it has them."""
    names: dict[tuple[int, int], str] = {}
    for number, group in enumerate(groups):
        given = group.get("param_names")
        if not isinstance(given, list | tuple):
            continue
        names.update({(number, place): name for place, name in enumerate(given) if isinstance(name, str)})
    whole = dict.fromkeys(names.values())
    plain = clean_state_dict(whole)
    if len(plain) < len(whole):  # they were no wrappers'
        return names
    alias = dict(zip(whole, plain, strict=True))
    return {place: alias[name] for place, name in names.items()}


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(value.shape) if isinstance(value, Tensor) else ()


def _copied(state: Any) -> Any:
    """Return a copy with tensors on the CPU, so that no accelerator must hold them twice."""
    if isinstance(state, Tensor):
        return state.detach().to("cpu", copy=True)
    if isinstance(state, OrderedDict):  # with the versions that torch keeps beside
        copy = OrderedDict((key, _copied(value)) for key, value in state.items())
        copy.__dict__.update(state.__dict__)
        return copy
    if type(state) is dict:
        return {key: _copied(value) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(_copied(value) for value in state)
    return deepcopy(state)


@torch.no_grad()
def _copy_in(here: Mapping[str, Any], before: Mapping[str, Any]) -> None:
    for key, old in before.items():
        now = here.get(key)
        if isinstance(old, Tensor) and isinstance(now, Tensor) and now.shape == old.shape:
            now.copy_(old)
