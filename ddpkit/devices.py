"""Which accelerator belongs to which rank. Nothing here communicates."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from .errors import LaunchError

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
        f"{local_world_size} ranks on this node, but {visible} visible accelerators. Start {visible} ranks on it, or let "
        'ranks share one by naming it: setup(device="cuda:0").'
    )


def choose_device(asked: torch.device | None, local_rank: int, local_world_size: int) -> torch.device:
    """The device that was asked for, or the one that the local rank gives."""
    if asked is not None:
        index = local_rank if asked.index is None and asked.type != "cpu" else asked.index
        visible = _count(asked.type)
        if asked.type != "cpu" and (index or 0) >= visible:
            raise LaunchError(f"{asked} was asked for on local rank {local_rank}, but {visible} such devices are visible here.")
        return asked if asked.type in ("cpu", "mps") else torch.device(asked.type, index)
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if kind is None or (kind.type == "mps" and local_world_size > 1):  # no collectives on mps
        return torch.device("cpu")
    index = device_index(_count(kind.type), local_rank, local_world_size)
    return torch.device("cpu") if index is None else torch.device(kind.type, index)


def bind_device(device: torch.device) -> None:
    """Makes it the current device, before the group exists: NCCL binds to the current GPU."""
    if device.index is not None:
        getattr(torch, device.type).set_device(device.index)


def identity(device: torch.device) -> str:
    """A name that two processes on one host share if and only if they mean the same accelerator; "" for the CPU."""
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
