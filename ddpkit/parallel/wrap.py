"""Models on several ranks: torch's own DDP, chosen and entered rightly, and the way back out of it.

Nothing here is a wrapper of ours: `wrap_model` returns torch's DDP or the model itself.
"""

from __future__ import annotations

import functools
import logging
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ..collectives import ops
from ..collectives.consistency import check_fingerprint, fingerprint_of, raise_everywhere
from ..errors import DdpkitError
from ..launch import ranks
from ..process_group import lifecycle
from .models import check_module, check_tensors, check_writable, describe_sharing, named_tensors

logger = logging.getLogger(__name__)
# dtypes that all backends send
_USUAL = {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8}
M = TypeVar("M", bound=nn.Module)


def wrap_model(
    model: nn.Module,
    strategy: Literal["auto", "ddp", "dp"] = "auto",
    *,
    find_unused_parameters: bool = False,
    static_graph: bool = False,
    sync_batchnorm: bool = False,
    broadcast_buffers: bool = True,
) -> nn.Module:
    """Move a model to this rank's device and wrap it in what the job needs: DDP on several ranks. Collective.

    After it every rank holds rank 0's parameters and buffers. Call it before the optimizer is built, and before
    `torch.compile`. The keyword options only matter where DDP is used.

    Args:
        model: A plain module, the same on every rank. It is moved in place to `get_device()`; one that spans several
            devices needs torch's DDP directly, one that is sharded needs nothing.
        strategy: "auto" is DDP on several ranks and the model itself on one process, or if nothing in it is trainable.
            "ddp" insists on a process group. "dp" is `torch.nn.DataParallel`: one process, several GPUs, slow.
        find_unused_parameters: Set it if a forward may leave out parameters; it walks the graph at every step.
        static_graph: Set it if every step uses the same parameters in the same way; cheaper than the former.
        sync_batchnorm: Batch statistics over all ranks' samples; accelerators only.
        broadcast_buffers: Whether rank 0's buffers (BatchNorm statistics) are sent to all before every forward; if not,
            each rank keeps its own after the first.

    Returns:
        The wrapped model, or `model` itself. `unwrap_model` gives `model` back. On several ranks its forward raises
        `DdpkitError` once a parameter needs a gradient that is frozen now: nothing would average it.

    Raises:
        MismatchError: If names, shapes or dtypes of the model's tensors, the strides of trainable ones (channels last),
            memory that tensors share, or the options, differ between ranks, on every rank; also on the ranks whose
            peers raise one of the errors below.
        DdpkitError: If `strategy` insists on what the job has not got.
        TypeError: If the model is no module, or is sharded (FSDP, `fully_shard`, tensor parallelism).
        ValueError: If the model is already wrapped, or has tensors that are lazy and not initialised yet, on the meta
            device, expanded, or made in inference mode; if an option is unknown or impossible on this device.

    Example:
        >>> net = nn.Linear(2, 1)
        >>> wrap_model(net) is net  # on one process
        True
    """
    device, world_size = lifecycle.get_device(), ranks.get_world_size()
    gpus = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    with raise_everywhere("wrap_model()"):
        _check_model(model)
        if strategy not in ("auto", "ddp", "dp"):
            raise ValueError(f"strategy must be auto, ddp or dp, got {strategy!r}.")
        if strategy == "dp" and (world_size > 1 or gpus < 2):
            raise DdpkitError(f"strategy='dp' is for 1 process on several GPUs; here are {world_size} and {gpus} GPUs.")
        several = lifecycle.joined() or (strategy == "ddp" and dist.is_initialized())
        if strategy == "ddp" and not several:
            raise DdpkitError(
                "strategy='ddp' needs a process group. Start the script with torchrun --nproc_per_node=N."
            )
        if several and device.type == "cpu" and sync_batchnorm:
            raise ValueError("sync_batchnorm=True needs an accelerator: torch has it for NCCL and XCCL only.")
    _stop_watching(model)
    if strategy == "dp":
        return DataParallel(model.to(device))
    if not several:
        if gpus > 1:
            logger.warning("One process uses one of %d GPUs; torchrun --nproc_per_node=%d uses them all.", gpus, gpus)
        return model.to(device)
    options = {
        "find_unused_parameters": find_unused_parameters,
        "static_graph": static_graph,
        "sync_batchnorm": sync_batchnorm,
        "broadcast_buffers": broadcast_buffers,
    }
    check_fingerprint(
        fingerprint_of("wrap_model", {name: str(value) for name, value in options.items()} | _describe(model))
    )
    model = model.to(device)
    if not any(parameter.requires_grad for parameter in model.parameters()):  # DDP refuses it
        return _watch_frozen(_broadcast(model))
    _check_dtypes(model)
    if sync_batchnorm:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
    with lifecycle.peer_errors():
        ddp = DistributedDataParallel(
            model,
            device_ids=None if device.index is None or device.type == "cpu" else [device.index],
            find_unused_parameters=find_unused_parameters,
            static_graph=static_graph,
        )
    ddp.broadcast_buffers = broadcast_buffers  # as an argument, False would skip the first broadcast too
    return _watch_frozen(ddp)


def clean_state_dict(state_dict: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """Rename the keys of a wrapped or compiled model's state dict to those of the model itself.

    It is for files of others, of which only the keys are known: `unwrap_model(model).state_dict()` has the right names
    of a model at hand. `module.` and `_orig_mod.` go wherever they stand in a key, if everything at that place lies
    under them, which is how wrappers look; so does an only child that was called `module`. One with a sibling keeps its
    name. The versions that torch keeps beside come along.

    Args:
        state_dict: A whole state dict; it is not modified.

    Returns:
        A new `OrderedDict` with the same values in the same order.

    Example:
        >>> dict(clean_state_dict({"module._orig_mod.0.weight": 1, "module._orig_mod.1.module.bias": 2}))
        {'0.weight': 1, '1.bias': 2}
    """
    children: dict[str, set[str]] = {}
    for key in state_dict:
        for path, name in _walk(key):
            children.setdefault(path, set()).add(name)

    def clean(key: str) -> str:
        return ".".join(name for path, name in _walk(key) if not is_wrapper(path, name))

    def is_wrapper(path: str, name: str) -> bool:
        return name in ("module", "_orig_mod") and children.get(path) == {name} and f"{path}{name}." in children

    cleaned = OrderedDict((clean(key), value) for key, value in state_dict.items())
    if versions := getattr(state_dict, "_metadata", {}):  # by module; load_state_dict() migrates what has no version
        cleaned._metadata = {clean(f"{path}.x".lstrip("."))[:-2]: value for path, value in versions.items()}  # type: ignore[attr-defined]
    return cleaned


def _check_model(model: nn.Module) -> None:
    call = "wrap_model()"
    check_module(call, model)
    if any(isinstance(module, DataParallel | DistributedDataParallel) for module in model.modules()):
        raise ValueError("The model is already wrapped, in whole or in part. Wrap the plain model, once.")
    tensors = list(named_tensors(model))
    check_tensors(call, tensors)
    for name, tensor in tensors:
        check_writable(call, name, tensor)


def _check_dtypes(model: nn.Module) -> None:
    """Refuse tensors that the group cannot send, which torch would not name. Collective.

    Raises:
        ValueError: On every rank, if there are some.
    """
    ignored = getattr(model, "_ddp_params_and_buffers_to_ignore", ())  # by DDP
    kinds: dict[tuple[torch.device, torch.dtype], str] = {}
    for name, tensor in named_tensors(model):
        if name not in ignored and tensor.dtype not in _USUAL:
            kinds.setdefault((tensor.device, tensor.dtype), name)
    for (device, dtype), name in kinds.items():
        try:
            with lifecycle.peer_errors():
                dist.broadcast(torch.empty(1, dtype=dtype, device=device), 0)
        except (RuntimeError, TypeError, ValueError) as error:
            if isinstance(error, DdpkitError) or "type" not in str(error):  # a connection that broke
                raise
            raise ValueError(
                f"wrap_model() cannot wrap the model in DDP: the group's backend sends no {dtype}, which {name} is "
                f"({error}). Keep it as another dtype, such as int32 or float32, or outside of the model."
            ) from error


def _describe(module: nn.Module) -> dict[str, str]:
    """Describe each tensor of a model, as far as it must be equal on all ranks before DDP sends values."""
    ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    sharing = describe_sharing(tensors.values())
    texts = {}
    for (name, tensor), shared in zip(tensors.items(), sharing, strict=True):
        text = f"{tensor.dtype}{list(tensor.shape)}{shared}"
        if tensor.requires_grad:
            text += _strides_of(tensor)
        elif isinstance(tensor, nn.Parameter):
            text += ", frozen"
        if name in ignored:
            text += ", ignored by DDP"
        texts[name] = text
    return texts


def _strides_of(tensor: torch.Tensor) -> str:
    """Name the strides of a tensor that is not laid out as new ones are.

    DDP takes no trainable parameter whose strides are not those of rank 0, not even those of dimensions of size 1,
    and says so on the other rank only.
    """
    usual = torch.empty(tensor.shape, device="meta").stride()
    return "" if tensor.stride() == usual else f", strides {list(tensor.stride())}"


def _broadcast(model: nn.Module) -> nn.Module:
    tensors = [tensor.detach() for tensor in (*model.parameters(), *model.buffers())]
    for tensor, value in zip(tensors, ops.broadcast(tensors), strict=True):
        tensor.copy_(value)
    return model


def _watch_frozen(model: M) -> M:
    """Have a model's forward raise once a parameter needs a gradient that was frozen when it was wrapped."""
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    if frozen and not isinstance(model, torch.jit.ScriptModule):  # which takes no such hook
        # no closure: a copy of the model has to look at its own parameters
        model.register_forward_pre_hook(functools.partial(_refuse_unfrozen, frozen))
    return model


def _stop_watching(model: nn.Module) -> None:
    """Undo `_watch_frozen` in a model that is wrapped again, or is part of one."""
    for module in model.modules():
        hooks = module._forward_pre_hooks
        for number, hook in list(hooks.items()):
            if isinstance(hook, functools.partial) and hook.func is _refuse_unfrozen:
                del hooks[number]


def _refuse_unfrozen(frozen: list[nn.Parameter], model: nn.Module, _: Any) -> None:
    """Raise if a parameter of these needs a gradient now: it would differ between the ranks.

    Raises:
        DdpkitError: Naming the first of them.
    """
    if not torch.is_grad_enabled():
        return
    for parameter in frozen:
        if parameter.requires_grad:
            raise DdpkitError(_explain_unfrozen(model, parameter))


def _explain_unfrozen(model: nn.Module, parameter: nn.Parameter) -> str:
    names = [name for name, tensor in named_tensors(model) if tensor is parameter]
    name = names[0] if names else "a parameter"
    return (
        f"{name} was frozen when wrap_model() saw it, and needs a gradient now, which would not be averaged over the "
        "ranks. Unfreeze it before wrap_model(), or wrap unwrap_model(model) again; the optimizer must have it, too."
    )


def _walk(key: str) -> Iterable[tuple[str, str]]:
    path = ""
    for name in key.split("."):
        yield path, name
        path += f"{name}."
