"""Compute on the CPU what a script asks of CUDA, on a machine without GPUs."""

from __future__ import annotations

import inspect
import os
import re
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary

from .recorder import Function, current, replace

_CUDA = re.compile(r"cuda(:\d+)?")
_OF_TORCH = (
    *("tensor", "as_tensor", "zeros", "ones", "full", "empty", "arange", "linspace", "eye", "load"),
    *("rand", "randn", "randint", "randperm"),
)
_TAKE_A_DEVICE = (
    (Tensor, "to"),
    *((torch, name) for name in _OF_TORCH),
    (nn.Module, "to"),
    (device_mesh, "init_device_mesh"),
    (device_mesh.DeviceMesh, "__init__"),
)
_TAKE_NUMBERS = ((DistributedDataParallel, "__init__"), (dist, "barrier"))
_NUMBERS = ("device_ids", "output_device")
_used: list[bool] = []
ON_THE_CPU = "CUDA on the CPU"  # for reports
_kept: list[Any] = []
_there: Any = WeakTensorKeyDictionary()  # tensors that a GPU would hold, of those that were made or moved there


def put_cuda_on_the_cpu() -> None:
    """Let what is made on a GPU, or copied there, be on the CPU; autocast and synchronized batch norm are off there.

    A script from which GPUs are not even hidden finds one for each rank.
    """
    kernels: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    # torch takes memory by these, and fills it by others
    kernels.impl("empty.memory_format", partial(_made_on_the_cpu, torch.empty), "CUDA")
    kernels.impl("empty_strided", partial(_made_on_the_cpu, torch.empty_strided), "CUDA")
    _kept.append(kernels)
    for owner, name in _TAKE_A_DEVICE:
        replace(owner, name, _taking_the_cpu)
    for owner, name in _TAKE_NUMBERS:
        replace(owner, name, _without_numbers)
    replace(Tensor, "cuda", lambda original: lambda tensor, *args, **kwargs: tensor.to("cuda"))
    replace(Tensor, "cpu", lambda original: lambda tensor, *args, **kwargs: _copied(original(tensor), tensor))
    replace(Tensor, "pin_memory", lambda original: lambda tensor, *args: tensor)
    replace(Tensor, "record_stream", lambda original: lambda tensor, stream: None)
    replace(torch.autocast, "__init__", _off_for_cuda)
    replace(nn.SyncBatchNorm, "convert_sync_batchnorm", lambda original: lambda module, *args: module)
    for name, answer in _ANSWERS.items():
        replace(torch.cuda, name, partial(_answering, answer))
    for name in ("Stream", "Event", "device"):
        setattr(torch.cuda, name, type(name, (_Stream,), {}))
    for name in ("range_push", "range_pop", "mark"):
        replace(torch.cuda.nvtx, name, lambda original: lambda *args: None)
    replace(sys.modules[nn.DataParallel.__module__], "_get_available_device_type", lambda original: lambda: None)
    if os.environ.get("CUDA_VISIBLE_DEVICES") != "":
        for name, answer in _CLAIMS.items():
            for module in (torch.cuda, torch.accelerator):
                replace(module, name, partial(_answering, answer))


def _use() -> None:
    """Note that the script uses CUDA."""
    if not _used:
        _used.append(True)
        current().tell("cuda")


def _made_on_the_cpu(make: Function, *args: Any, **kwargs: Any) -> Any:
    _use()
    given = {name: value for name, value in kwargs.items() if value is not None}
    made = make(*args, **given | {"device": "cpu", "pin_memory": False})
    _there[made] = True
    return made


def _is_gpu(value: Any) -> bool:
    return isinstance(value, str | torch.device) and bool(_CUDA.fullmatch(str(value)))


def _is_cpu(value: Any) -> bool:
    return isinstance(value, str | torch.device) and str(value) == "cpu"


def _taking_the_cpu(original: Function) -> Function:
    """Let a function take the CPU for a GPU, and copy a tensor that is moved there."""
    moves = original in (Tensor.to, nn.Module.to)

    def call(*args: Any, **kwargs: Any) -> Any:
        if moves and len(args) > 1 and type(args[1]) is int:
            args = (args[0], "cuda", *args[2:])
        if type(kwargs.get("device")) is int:
            kwargs["device"] = "cuda"
        if not any(map(_is_gpu, (*args, *kwargs.values()))):
            result = original(*args, **kwargs)
            is_back = moves and any(map(_is_cpu, (*args[1:2], kwargs.get("device"))))
            return _copied(result, args[0]) if is_back else result
        _use()
        given = {name: "cpu" if _is_gpu(value) else value for name, value in kwargs.items()}
        result = original(*("cpu" if _is_gpu(value) else value for value in args), **given)
        if isinstance(result, Tensor):
            result = result if result in _there else _copied(result, next(iter(args), None))
            _there[result] = True
        return result

    return call


def _copied(result: Any, moved: Any) -> Any:
    """Return a tensor that was moved, copied as between GPU and CPU once CUDA is used, unless it is trained."""
    is_same = isinstance(result, Tensor) and result is moved and not result.requires_grad
    return result.clone() if _used and is_same else result


def _without_numbers(original: Function) -> Function:
    """Let a function that can take numbers of GPUs get none, once CUDA is used."""
    signature = inspect.signature(original)

    def call(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        for name in _NUMBERS if _used else ():
            given.arguments.pop(name, None)
        return original(*given.args, **given.kwargs)

    return call


def _off_for_cuda(original: Function) -> Function:
    """Let autocast of CUDA do nothing."""

    def call(context: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        original(context, device_type, *args, **kwargs)
        context._enabled = context._enabled and device_type != "cuda"

    return call


class _Stream:
    """Stands for a stream or an event, each of whose methods does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Function:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *error: object) -> None: ...

    def elapsed_time(self, end: Any) -> float:
        return 0.0

    def is_capturing(self) -> bool:
        return False


_MEMORY = 1 << 36  # bytes
_PROPERTIES = {"name": "CPU", "major": 8, "minor": 0, "total_memory": _MEMORY, "multi_processor_count": 1}
_ANSWERS: dict[str, Function] = {  # of functions of torch.cuda
    **dict.fromkeys(("_lazy_init", "set_device", "synchronize", "set_rng_state"), lambda *args: _use()),
    **dict.fromkeys(("stream", "current_stream", "default_stream"), lambda *args: _Stream()),
    **dict.fromkeys(("reset_peak_memory_stats", "set_rng_state_all"), lambda *args: None),
    "current_device": lambda: int(os.environ["LOCAL_RANK"]),
    "get_device_name": lambda *args: _PROPERTIES["name"],
    "get_device_capability": lambda *args: (_PROPERTIES["major"], _PROPERTIES["minor"]),
    "get_device_properties": lambda *args: SimpleNamespace(**_PROPERTIES),
    "mem_get_info": lambda *args: (_MEMORY, _MEMORY),
    "get_rng_state": lambda *args: torch.get_rng_state(),
    "get_rng_state_all": lambda: [],
    "is_current_stream_capturing": lambda: False,
}
_CLAIMS: dict[str, Function] = {  # of functions of torch.cuda and torch.accelerator, where a script finds GPUs
    "is_available": lambda: True,
    "device_count": lambda: int(os.environ["LOCAL_WORLD_SIZE"]),
    "current_accelerator": lambda *args: torch.device("cuda"),
    "current_device_index": lambda: int(os.environ["LOCAL_RANK"]),
    "set_device_index": lambda *args: _use(),
    **{name: _ANSWERS[name] for name in ("current_stream", "synchronize")},
}


def _answering(answer: Function, original: Function) -> Function:
    return lambda *args, **kwargs: answer(*args, *kwargs.values())
