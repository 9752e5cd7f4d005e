"""Which accelerator belongs to which rank, and which backend joins them."""

from __future__ import annotations

import json
import os
from typing import Any

import torch
import torch.distributed as dist

from ..errors import LaunchError
from ..join.session import Session
from ..join.store_values import parse
from ..launch.launch import Launch
from .options import ChooseDevice, checked_device

_CHOICE = {"error": str, "device": str, "shared": bool, "backend": str | None, "kind": str}
_CONCLUSION = {"error": str, "shared": bool}
MASKS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
_CPU = torch.device("cpu")


def device_index(visible: int, local_rank: int, local_world_size: int) -> int | None:
    """Return the accelerator of a rank: that at its local rank, the only one it sees, or None where there is none.

    Raises:
        LaunchError: If there are more ranks on the node than accelerators to give them.
    """
    if visible == 0:
        return None
    if local_world_size <= visible:
        return local_rank
    if visible == 1:  # the launcher gave each rank one of its own; if not, `identity` shows that it is the same one
        return 0
    raise LaunchError(
        f"{local_world_size} ranks on this node, but {visible} visible accelerators. Start {visible} ranks on it, or "
        'let ranks share one by naming it: setup(device="cuda:0").'
    )


def choose_device(asked: torch.device | ChooseDevice | None, local_rank: int, local_world_size: int) -> torch.device:
    """Return the device that was asked for, or the one that the local rank gives."""
    if callable(asked):
        asked = checked_device(asked(local_rank))
    if asked is not None:
        return _device_asked_for(asked, local_rank)
    if not torch.accelerator.is_available():
        return _CPU
    kind = torch.accelerator.current_accelerator()
    if kind is None or (kind.type == "mps" and local_world_size > 1):  # no collectives on mps
        return _CPU
    index = device_index(_count(kind.type), local_rank, local_world_size)
    if index is None:
        return _CPU
    return torch.device(kind.type, index)


def _device_asked_for(asked: torch.device, local_rank: int) -> torch.device:
    if asked.type in ("cpu", "mps"):
        return asked
    index = local_rank if asked.index is None else asked.index
    visible = _count(asked.type)
    if index >= visible:
        raise LaunchError(f"{asked} was asked for on local rank {local_rank}; visible {asked.type} devices: {visible}.")
    return torch.device(asked.type, index)


def count_accelerators() -> int:
    """Return the number of accelerators that this process sees."""
    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def choose_together(
    session: Session, launch: Launch, device: torch.device | ChooseDevice | None, backend: str | None
) -> tuple[torch.device, str]:
    """Choose this rank's device and the backend of all. Collective.

    Raises:
        LaunchError: On every rank, if one has no device, or their devices or backends do not fit together.
    """
    choice: dict[str, Any] = {"error": "", "device": "", "shared": device is not None, "backend": backend}
    chosen = _CPU
    try:
        chosen = choose_device(device, launch.local_rank or 0, launch.local_world_size or 1)
        choice["device"] = identity(chosen)
        default_backend(chosen, False)
    except (RuntimeError, ValueError) as error:
        choice["error"] = str(error)
    choice["kind"] = chosen.type

    def conclude(texts: list[str]) -> str:
        try:
            return json.dumps({"error": "", "shared": _check_choices(session, texts)})
        except LaunchError as error:
            return json.dumps({"error": str(error), "shared": False})

    found = parse(session.conclude(json.dumps(choice), conclude, "devices"), "devices", _CONCLUSION)
    if found["error"]:
        raise LaunchError(found["error"])
    return chosen, backend or default_backend(chosen, found["shared"])


def _check_choices(session: Session, texts: list[str]) -> bool:
    """Return whether ranks share an accelerator; raise if what the ranks have chosen does not fit together."""
    choices = [parse(text, f"choice of rank {rank}", _CHOICE) for rank, text in enumerate(texts)]
    _raise_errors(choices)
    _raise_if_different(choices, "kind", "kinds of device")
    _raise_if_different(choices, "backend", "backends")
    return _check_sharing(session, choices)


def _raise_errors(choices: list[dict[str, Any]]) -> None:
    errors = []
    for rank, choice in enumerate(choices):
        if choice["error"]:
            errors.append(f"rank {rank}: {choice['error']}")
    if errors:
        raise LaunchError("; ".join(errors))


def _raise_if_different(choices: list[dict[str, Any]], key: str, name: str) -> None:
    values = [choice[key] for choice in choices]
    if len(set(values)) > 1:
        found = ", ".join(f"rank {rank} {value}" for rank, value in enumerate(values))
        raise LaunchError(f"The ranks use different {name}: {found}. Name one for all: setup(device=..., backend=...).")


def _check_sharing(session: Session, choices: list[dict[str, Any]]) -> bool:
    """Return whether ranks share an accelerator; raise if one of them did not ask for it."""
    holders: dict[tuple[object, str], list[int]] = {}
    for rank, choice in enumerate(choices):
        if choice["device"]:
            holders.setdefault((session.nodes[rank], choice["device"]), []).append(rank)
    crowds = [ranks for ranks in holders.values() if len(ranks) > 1]
    for ranks in crowds:
        if not all(choices[rank]["shared"] for rank in ranks):
            host, kind = session.hosts[ranks[0]], choices[ranks[0]]["kind"]
            raise LaunchError(
                f"Ranks {ranks} on {host} see the same accelerator: {len(ranks)} ranks, 1 {kind} device. Start "
                f'one rank for each device, or share it on purpose: setup(device="{kind}:0").'
            )
    return bool(crowds)


def is_same_device(asked: torch.device | ChooseDevice, device: torch.device, local_rank: int = 0) -> bool:
    """Return whether a device is the one asked for; without an index any of its kind is."""
    if callable(asked):
        asked = checked_device(asked(local_rank)) or device
    return asked == device or (asked.index is None and asked.type == device.type)


def bind_device(device: torch.device) -> None:
    """Make it the current device, before the group exists: NCCL binds to the current GPU."""
    if device.index is not None and device.type != "mps":  # there is only one
        getattr(torch, device.type).set_device(device.index)


def identity(device: torch.device) -> str:
    """Return a name that two processes on one node share only if they mean the same accelerator; "" for the CPU."""
    if device.type in ("cpu", "mps"):
        return ""
    properties = getattr(torch, device.type).get_device_properties(device)
    uuid = getattr(properties, "uuid", None)
    if uuid:
        return str(uuid)
    masks = ",".join(os.environ.get(name, "") for name in MASKS)
    return f"{device} of {masks}"


def default_backend(device: torch.device, shared: bool) -> str:
    """Return the backend that suits the device; gloo also carries the CPU tensors of a job on accelerators."""
    if device.type in ("cpu", "mps") or shared:  # NCCL refuses two ranks on one GPU
        return "gloo"
    native = dist.get_default_backend_for_device(device)
    if native == "nccl" and not dist.is_nccl_available():
        return "gloo"
    if not dist.is_gloo_available():
        return native
    return f"cpu:gloo,{device.type}:{native}"


def _count(kind: str) -> int:
    if not hasattr(torch, kind):
        return 0
    return int(getattr(torch, kind).device_count())
