"""A copy of a checkpoint's content, which a thread can write while the training changes the original.

The copy is made by pickling: what is no storage of tensors goes into the pickle, and each storage
is copied into memory on the CPU, which the next copy uses again.
"""

from __future__ import annotations

import io
import pickle
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, UntypedStorage

from ..torch_internals import storage_like, untyped_storage
from .views import pickler_for

_WORTH_THREADS = 1 << 25  # bytes to copy
_PIECE = 1 << 24  # bytes that a thread copies at a time


class _Place(NamedTuple):
    """What stands for a storage in a pickle."""

    number: int
    dtype: torch.dtype | None  # of torch's older class of storages


class Snapshot:
    """A copy of a content, on its way to the CPU if it comes from an accelerator."""

    def __init__(self, data: bytes, storages: list[UntypedStorage], events: list[Any]) -> None:
        self._data = data
        self._storages = storages
        self._events = events

    def content(self) -> Any:
        """Wait until all is copied, and return the copy."""
        for event in self._events:
            event.synchronize()
        return _Unpickler(self._data, self._storages).load()


class SnapshotMemory:
    """Memory on the CPU for one snapshot at a time: a new one overwrites the one before."""

    def __init__(self) -> None:
        self._kept: list[Tensor] = []

    @property
    def nbytes(self) -> int:
        """Bytes that are held."""
        return sum(buffer.nbytes for buffer in self._kept)

    @torch.inference_mode(False)
    def copy(self, content: Any) -> Snapshot:
        """Copy a content; return when it may be changed."""
        file = io.BytesIO()
        sources = _pickle(content, file)
        targets = self._buffers_for(sources)
        on_cpu = []
        devices = set()
        for source, target in zip(sources, targets, strict=True):
            if source.device.type == "cpu":
                on_cpu.append((source, target))
                continue
            devices.add(source.device)
            target.copy_(source, non_blocking=target.is_pinned())
        events = [_mark(device) for device in devices if device.type == "cuda"]
        _copy_all(on_cpu)
        storages = [target.untyped_storage() for target in targets]
        return Snapshot(file.getvalue(), storages, events)

    def _buffers_for(self, sources: list[Tensor]) -> list[Tensor]:
        """Return memory for copies of these bytes: what is there of the same size, else new."""
        free = defaultdict(list)
        for buffer in self._kept:
            free[len(buffer), buffer.is_pinned()].append(buffer)
        self._kept = []  # so that memory of other sizes is given back first
        found: list[Tensor | None] = []
        for source in sources:
            fitting = free[len(source), _is_on_cuda(source)]
            found.append(fitting.pop() if fitting else None)
        free.clear()
        for source, old in zip(sources, found, strict=True):
            self._kept.append(_new_buffer(source) if old is None else old)
        return self._kept


def _pickle(content: Any, file: io.BytesIO) -> list[Tensor]:
    """Pickle a content without its storages; return the bytes of these, by their index."""
    sources: list[Tensor] = []
    indices: dict[tuple[int, int], int] = {}  # by address and size
    base = pickler_for(content)

    class Pickler(base):  # type: ignore[valid-type, misc]
        def persistent_id(self, obj: Any) -> _Place | None:
            storage = untyped_storage(obj)
            if storage is None:
                return None
            key = storage.data_ptr(), storage.nbytes()
            if key not in indices:
                indices[key] = len(sources)
                sources.append(_bytes_of(storage))  # keeps it alive, and with it its address
            return _Place(indices[key], getattr(obj, "dtype", None))

    Pickler(file, pickle.HIGHEST_PROTOCOL).dump(content)
    return sources


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, storages: list[UntypedStorage]) -> None:
        super().__init__(io.BytesIO(data))
        self._storages = storages

    def persistent_load(self, place: _Place) -> Any:
        return storage_like(self._storages[place.number], place.dtype)


def _bytes_of(storage: UntypedStorage) -> Tensor:
    """View a storage as a tensor of bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _is_on_cuda(tensor: Tensor) -> bool:
    return tensor.device.type == "cuda"


def _new_buffer(source: Tensor) -> Tensor:
    """Make memory on the CPU, such that an accelerator writes into it while the rank goes on."""
    pinned = _is_on_cuda(source)
    return torch.empty(len(source), dtype=torch.uint8, device="cpu", pin_memory=pinned)


def _mark(device: torch.device) -> Any:
    """Return an event that comes when an accelerator has done what it was asked to do so far.

    What is asked of it later, such as the next step, is done after the copies.
    """
    return torch.cuda.current_stream(device).record_event()


def _copy_all(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Copy bytes on the CPU: from each first tensor into the second one."""
    if sum(len(source) for source, _ in pairs) < _WORTH_THREADS:
        for source, target in pairs:
            _copy_bytes((source, target))
        return
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        for _ in threads.map(_copy_bytes, _in_pieces(pairs)):
            pass


def _in_pieces(pairs: list[tuple[Tensor, Tensor]]) -> Iterable[tuple[Tensor, Tensor]]:
    for source, target in pairs:
        yield from zip(torch.split(source, _PIECE), torch.split(target, _PIECE), strict=True)


def _copy_bytes(pair: tuple[Tensor, Tensor]) -> None:
    """Copy bytes as NumPy does, which is quicker than torch for many of them."""
    source, target = pair
    np.copyto(target.numpy(), source.numpy())
