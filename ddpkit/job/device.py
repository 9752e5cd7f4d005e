"""Choose each rank's accelerator, and the backend."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from ..errors import LaunchError
from .job import ChooseDevice, checked_device

MASKS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
_CPU = torch.device("cpu")


def device_index(visible: int, local_rank: int, local_world_size: int) -> int | None:
    """Return a rank's accelerator: the one at its local rank, or the only visible one; None if there is none.

    Raises:
        LaunchError: If the node has more ranks than accelerators.
    """
    if visible == 0:
        return None
    if local_world_size <= visible:
        return local_rank
    if visible == 1:  # the launcher gave each rank its own; if not, `identity` shows that they are the same
        return 0
    raise LaunchError(
        f"{local_world_size} ranks on this node, but {visible} visible accelerators. Start {visible} ranks on it, or "
        'share one explicitly: setup(device="cuda:0").'
    )


def choose_device(asked: torch.device | ChooseDevice | None, local_rank: int, local_world_size: int) -> torch.device:
    """Return the requested device, or the one for the local rank."""
    if callable(asked):
        asked = checked_device(asked(local_rank))
    if asked is not None:
        return _device_asked_for(asked, local_rank)
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if kind is None or (kind.type == "mps" and local_world_size > 1):  # mps has no collectives
        return _CPU
    index = device_index(_count(kind.type), local_rank, local_world_size)
    return _CPU if index is None else torch.device(kind.type, index)


def _device_asked_for(asked: torch.device, local_rank: int) -> torch.device:
    if asked.type in ("cpu", "mps"):
        return asked
    index = local_rank if asked.index is None else asked.index
    visible = _count(asked.type)
    if index >= visible:
        raise LaunchError(f"{asked} was requested on local rank {local_rank}; visible {asked.type} devices: {visible}.")
    return torch.device(asked.type, index)


def count_accelerators() -> int:
    """Return the number of accelerators that this process sees."""
    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def is_same_device(asked: torch.device | ChooseDevice, device: torch.device, local_rank: int = 0) -> bool:
    """Return whether a device is the requested one; without an index any of its type is."""
    if callable(asked):
        asked = checked_device(asked(local_rank)) or device
    return asked == device or (asked.index is None and asked.type == device.type)


def bind_device(device: torch.device) -> None:
    """Make it the current device, before the group exists: NCCL binds to the current GPU."""
    if device.index is not None and device.type != "mps":  # there is only one mps device
        getattr(torch, device.type).set_device(device.index)


def identity(device: torch.device) -> str:
    """Return a name that two processes on one node share only if it is the same accelerator; "" for the CPU."""
    if device.type in ("cpu", "mps"):
        return ""
    properties = getattr(torch, device.type).get_device_properties(device)
    if uuid := getattr(properties, "uuid", None):
        return str(uuid)
    masks = ",".join(os.environ.get(name, "") for name in MASKS)
    return f"{device} of {masks}"


def default_backend(device: torch.device, shared: bool) -> str:
    """Return the backend for the device; with accelerators, gloo carries the job's CPU tensors, too."""
    if device.type in ("cpu", "mps") or shared:  # NCCL rejects two ranks on one GPU
        return "gloo"
    native = dist.get_default_backend_for_device(device)
    if native == "nccl" and not dist.is_nccl_available():
        return "gloo"
    return f"cpu:gloo,{device.type}:{native}" if dist.is_gloo_available() else native


def control_device_of(config: str, device: torch.device) -> torch.device:
    """Return the device for a group's small messages: the CPU if its backend supports it, as gloo does.

    Args:
        config: The group's backends, from `dist.get_backend_config()`.
        device: This rank's device.
    """
    return _CPU if "cpu:" in config else device


def _count(kind: str) -> int:
    return int(getattr(torch, kind).device_count()) if hasattr(torch, kind) else 0
