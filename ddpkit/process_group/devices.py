"""Which accelerator belongs to which rank, and which backend joins them."""

from __future__ import annotations

import json
import os

import torch
import torch.distributed as dist

from ..errors import LaunchError
from ..launch.launchers import Launch
from .session import Session, parse

_CHOICE = {"error": str, "device": str, "shared": bool, "backend": str | None, "kind": str}
_MASKS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")


def device_index(visible: int, local_rank: int, local_world_size: int) -> int | None:
    """The accelerator of a rank: the one at its local rank, the only one it sees, or None where there is none.

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


def choose_device(asked: torch.device | None, local_rank: int, local_world_size: int) -> torch.device:
    """The device that was asked for, or the one that the local rank gives."""
    if asked is not None:
        if asked.type in ("cpu", "mps"):
            return asked
        place, visible = local_rank if asked.index is None else asked.index, _count(asked.type)
        if place >= visible:
            raise LaunchError(
                f"{asked} was asked for on local rank {local_rank}; visible {asked.type} devices: {visible}."
            )
        return torch.device(asked.type, place)
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if kind is None or (kind.type == "mps" and local_world_size > 1):  # no collectives on mps
        return torch.device("cpu")
    index = device_index(_count(kind.type), local_rank, local_world_size)
    return torch.device("cpu") if index is None else torch.device(kind.type, index)


def count_accelerators() -> int:
    """Return the number of accelerators that this process sees."""
    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def agree(
    session: Session, launch: Launch, device: torch.device | None, backend: str | None
) -> tuple[torch.device, str]:
    """Chooses this rank's device, and the backend that all ranks use; what is wrong on one rank is raised on all."""
    choice = {"error": "", "device": "", "shared": device is not None, "backend": backend}
    chosen = torch.device("cpu")
    try:
        chosen = choose_device(device, launch.local_rank or 0, launch.local_world_size or 1)
        choice["device"] = identity(chosen)
        default_backend(chosen, False)
    except (RuntimeError, ValueError) as error:
        choice["error"] = str(error)
    choice["kind"] = chosen.type
    texts = session.exchange(json.dumps(choice))
    choices = [parse(text, f"choice of rank {rank}", _CHOICE) for rank, text in enumerate(texts)]
    if problems := [f"rank {rank}: {other['error']}" for rank, other in enumerate(choices) if other["error"]]:
        raise LaunchError("; ".join(problems))
    for key, name in (("kind", "kinds of device"), ("backend", "backends")):
        if len({other[key] for other in choices}) > 1:
            found = ", ".join(f"rank {rank} {other[key]}" for rank, other in enumerate(choices))
            raise LaunchError(
                f"The ranks use different {name}: {found}. Name one for all: setup(device=..., backend=...)."
            )
    holders: dict[tuple[object, str], list[int]] = {}
    for rank, other in enumerate(choices):
        holders.setdefault((session.nodes[rank], other["device"]), []).append(rank)
    crowds = [(session.hosts[crowd[0]], crowd) for (_, name), crowd in holders.items() if name and len(crowd) > 1]
    for host, crowd in crowds:
        if not all(choices[rank]["shared"] for rank in crowd):
            raise LaunchError(
                f"Ranks {crowd} on {host} see the same accelerator: {len(crowd)} ranks, 1 {chosen.type} device. Start "
                f'one rank for each device, or share it on purpose: setup(device="{chosen.type}:0").'
            )
    return chosen, backend or default_backend(chosen, shared=bool(crowds))


def bind_device(device: torch.device) -> None:
    """Makes it the current device, before the group exists: NCCL binds to the current GPU."""
    if device.index is not None:
        getattr(torch, device.type).set_device(device.index)


def identity(device: torch.device) -> str:
    """A name that two processes on one node share if and only if they mean the same accelerator; "" for the CPU."""
    if device.type in ("cpu", "mps"):
        return ""
    properties = getattr(torch, device.type).get_device_properties(device)
    masks = ",".join(os.environ.get(name, "") for name in _MASKS)
    return str(getattr(properties, "uuid", None) or f"{device} of {masks}")


def default_backend(device: torch.device, shared: bool) -> str:
    """The backend that suits the device; gloo also carries the CPU tensors of a job on accelerators."""
    if device.type in ("cpu", "mps") or shared:  # NCCL refuses two ranks on one GPU
        return "gloo"
    native = dist.get_default_backend_for_device(device)
    if native == "nccl" and not dist.is_nccl_available():
        return "gloo"
    return native if not dist.is_gloo_available() else f"cpu:gloo,{device.type}:{native}"


def _count(kind: str) -> int:
    return int(getattr(torch, kind).device_count()) if hasattr(torch, kind) else 0
