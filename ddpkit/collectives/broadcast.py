"""Give every rank the value of one: a small one in the block of the check, a larger one and tensors after it."""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ..arguments import plain_index
from ..errors import MismatchError
from ..job import current_job, lifecycle
from ..job.job import Peers, group_of, ranks_of
from ..join.failures import describe_error
from ..launch import ranks
from ..torch_internals import has_no_memory, is_sharded, untraced
from .consistency import CHECK, PAYLOAD, communication_device, fingerprint_of, new_block, raise_everywhere, sum_block
from .differences import explain_sharded
from .tree import bytes_as_tensor, explain_not_dense, flat_bytes, is_dense, leaves_of, loses_gradient

# Pickle values for other ranks: tensors of any dtype, without the memory around a view, and never one rank's shard.

_OF_A_CLASS = b"\x93"  # in a pickle that holds more than plain data: pickle.STACK_GLOBAL


class UnshardedPickler(pickle.Pickler):
    """Pickle anything but sharded tensors: what arrives elsewhere would be one rank's part."""

    def __init__(self, file: io.BytesIO, call: str) -> None:
        super().__init__(file)
        self.call = call

    def reducer_override(self, obj: Any) -> Any:
        """Refuse a sharded tensor; leave everything else to pickle."""
        if isinstance(obj, Tensor) and is_sharded(obj):
            raise TypeError(explain_sharded(self.call, [("a tensor in the value", obj)]))
        return NotImplemented


class CompactPickler(UnshardedPickler):
    """Pickle of a view its own elements only, for which torch writes all of its storage, and any dtype."""

    def reducer_override(self, obj: Any) -> Any:
        """Write a dense tensor in its own way where torch's is too large, or missing."""
        super().reducer_override(obj)
        if type(obj) is not Tensor or not is_dense(obj):
            return NotImplemented
        if not _can_be_pickled(obj.dtype):
            copy = flat_bytes(obj).cpu().clone()
            return _from_bytes, (copy, obj.dtype, tuple(obj.shape), obj.device, obj.requires_grad)
        if obj.untyped_storage().nbytes() <= obj.nbytes and not has_no_memory(obj):
            return NotImplemented
        return reduce_to_own_elements(obj)


class TensorPickler(CompactPickler):
    """Leave the tensors out of a pickle, in a list of their own, so that they can travel by themselves."""

    def __init__(self, file: io.BytesIO, call: str, tensors: list[Tensor]) -> None:
        super().__init__(file, call)
        self.tensors = tensors
        self.indices: dict[int, int] = {}  # in the list, by id

    def persistent_id(self, obj: Any) -> int | None:
        """Give a dense tensor its index in the list."""
        if type(obj) is not Tensor or not is_dense(obj):  # a Parameter is asked for again by its data
            return None
        if id(obj) not in self.indices:
            self.indices[id(obj)] = len(self.tensors)
            self.tensors.append(obj)  # keeps it alive, and with it its id
        return self.indices[id(obj)]


class TensorUnpickler(pickle.Unpickler):
    """Read what `TensorPickler` wrote, given the tensors that it left out."""

    def __init__(self, file: io.BytesIO, tensors: list[Tensor]) -> None:
        super().__init__(file)
        self.tensors = tensors

    def persistent_load(self, index: int) -> Tensor:
        """Find a tensor by its index in the list."""
        return self.tensors[index]


def reduce_to_own_elements(tensor: Tensor) -> Any:
    """Return what pickle asks of a dense tensor, for its own elements: torch writes all of a view's storage."""
    copy: Any = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    return copy.__reduce_ex__(2)


def check_copies(call: str, data: bytes, load: Callable[[bytes], object]) -> None:
    """Raise if a value that was pickled cannot be unpickled, before others try to and part ways."""
    if _OF_A_CLASS not in data:
        return
    try:
        load(data)
    except Exception as error:
        raise TypeError(
            f"{call} sends copies, and this value can be pickled but not unpickled: {describe_error(error)}"
        ) from error


@lru_cache
def _can_be_pickled(dtype: torch.dtype) -> bool:
    """Return whether torch pickles tensors of a dtype; its youngest ones it does not."""
    try:
        pickle.loads(pickle.dumps(torch.empty(0, dtype=dtype, device="cpu")))
    except Exception:
        return False
    return True


def _from_bytes(
    data: Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device, requires_grad: bool
) -> Tensor:
    """Make a tensor that was pickled as its bytes."""
    return data.view(dtype).reshape(shape).to(device).requires_grad_(requires_grad)


_SMALL = 4 * (PAYLOAD - 1)  # bytes that travel with the check: 32 bits are exact in a float64


class Description(NamedTuple):
    """Describe a tensor to the other ranks before it comes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    on_cpu: bool


def broadcast_value(value: Any, src: Any, peers: Peers | None = None, check: bool = True) -> Any:
    """Give every rank the value of rank `src`: there itself, elsewhere a copy. Collective."""
    src = ranks_of(peers)[0] if src is None else plain_index(src)
    call = f"broadcast(src={src!r})"
    if not check:
        return _broadcast_unchecked(call, value, src, peers)
    tensors: list[Tensor] = []
    data = b""
    with raise_everywhere(call, peers):
        _check_src(src, peers)
        if ranks.get_rank() == src:
            data = _pickle(call, value, tensors)
    if not lifecycle.joined():
        return value
    data = broadcast_bytes(call, data, src, peers)
    if ranks.get_rank() == src:
        for tensor in tensors:
            broadcast_tensor(flat_bytes(tensor), src, peers)
        return value
    descriptions, body = pickle.loads(data)
    received = [receive(description, src, peers) for description in descriptions]
    return TensorUnpickler(io.BytesIO(body), received).load()


def _broadcast_unchecked(call: str, value: Any, src: Any, peers: Peers | None) -> Any:
    """Give every rank the tensor of rank `src` in the place of its own, by nothing but a broadcast. Collective.

    An error is this rank's alone: in the broadcast the others would not hear of it.
    """
    _check_src(src, peers)
    problem = explain_not_dense(value) if isinstance(value, Tensor) else type(value).__name__
    if problem:
        like = "a dense tensor on every rank, of the same shape and dtype"
        raise TypeError(f"{call} with check=False takes {like}, found {problem}.")
    _refuse_gradients(call, value)
    if not lifecycle.joined():
        return value
    if ranks.get_rank() != src:
        return receive(_describe(value), src, peers)
    broadcast_tensor(flat_bytes(value), src, peers)
    return value


def _check_src(src: object, peers: Peers | None) -> None:
    everyone = ranks_of(peers)
    if type(src) is not int or src not in everyone:
        expected = f"0 to {len(everyone) - 1}" if peers is None else f"one of {', '.join(map(str, everyone))}"
        raise ValueError(f"src must be a rank, {expected}, got {src!r}.")


def _pickle(call: str, value: Any, tensors: list[Tensor]) -> bytes:
    """Pickle a value and the descriptions of its tensors, which are appended to `tensors`."""

    def load(body: bytes) -> Any:
        return TensorUnpickler(io.BytesIO(body), tensors).load()

    _refuse_gradients(call, value)
    file = io.BytesIO()
    TensorPickler(file, call, tensors).dump(value)
    body = file.getvalue()
    check_copies(call, body, load)
    descriptions = [_describe(tensor) for tensor in tensors]
    return pickle.dumps((descriptions, body))


def _refuse_gradients(call: str, value: Any) -> None:
    for path, leaf in leaves_of(value).items():
        if isinstance(leaf, Tensor) and loses_gradient(leaf):
            raise ValueError(f"{call} would lose the gradient of {path}. Pass {path}.detach().")


def _describe(tensor: Tensor) -> Description:
    on_cpu = tensor.device.type == "cpu"
    return Description(tensor.dtype, tuple(tensor.shape), on_cpu)


@untraced
def broadcast_bytes(call: str, data: bytes, src: int, peers: Peers | None = None, most: float = math.inf) -> bytes:
    """Give every rank the bytes that rank `src` holds, at most so many; the others hold none. Collective."""
    block = new_block()
    payload = block[CHECK:]
    payload[0] = len(data)
    start = data[:_SMALL].ljust(_SMALL, b"\0")
    payload[1:] = np.frombuffer(start, "<u4")
    sum_block(fingerprint_of(call), block, peers)
    if not 0 <= payload[0] <= most:
        raise MismatchError(f"{call}: rank {src} sends {payload[0]:g} bytes, and at most {most:g} are expected.")
    size = int(payload[0])
    if size <= _SMALL:
        return payload[1:].astype("<u4").tobytes()[:size]
    buffer = bytes_as_tensor(data) if data else torch.empty(size, dtype=torch.uint8, device="cpu")
    return broadcast_tensor(buffer, src, peers).numpy().tobytes()


def receive(description: Description, src: int, peers: Peers | None = None) -> Tensor:
    """Receive a tensor of rank `src` on this rank's device, or on the CPU if it was there. Collective."""
    device = torch.device("cpu") if description.on_cpu else current_job.get_device()
    tensor = torch.empty(description.shape, dtype=description.dtype, device=device)
    data = broadcast_tensor(flat_bytes(tensor), src, peers)
    return data.view(description.dtype).reshape(description.shape)


def broadcast_tensor(data: Tensor, src: int, peers: Peers | None = None) -> Tensor:
    """Give every rank the bytes of rank `src`, which are as many as this rank's. Collective."""
    buffer = data.to(communication_device(data.device, peers))
    if buffer.numel():
        with current_job.exchanging():
            dist.broadcast(buffer, src, group=group_of(peers))
    return buffer.to(data.device)
