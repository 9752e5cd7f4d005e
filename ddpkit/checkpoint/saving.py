"""The content of a new checkpoint, put together from the states of all ranks."""

from __future__ import annotations

import io
import logging
import os
import pickle
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.util import Finalize
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, UntypedStorage
from torch.nn.parameter import is_lazy

from ..collectives.differences import explain_sharded
from ..collectives.ops import all_gather_object
from ..data.seeds import get_rng_state
from ..errors import CheckpointError, describe_error
from ..job import current_job
from ..launch.ranks import get_rank, is_main_process
from ..parallel.models import without_dtensors
from ..torch_internals import storage_like, untyped_storage
from .comparison import try_on_all
from .files import NotWanted, from_bytes, to_bytes
from .format import FORMAT, FORMAT_WITH_PIECES, describe, is_consolidated, state_of
from .leaves import pickler_for, tensors_of
from .sharded import Layout, Pieces, as_plain, lay_out, own_pieces, take_out
from .sharded import describe as describe_pieces


class Collected(NamedTuple):
    """What the ranks write for a checkpoint.

    Attributes:
        content: For rank 0 to write.
        sharded: The sharded tensors in it, of which the content has the shapes only, by path.
        layouts: Where in the files of all ranks their pieces are to be.
        pieces: Those that this rank writes.
    """

    content: dict[str, Any]
    sharded: dict[str, Any]
    layouts: dict[str, Layout]
    pieces: Pieces


def collect_content(
    step: int,
    score: float | None,
    values: Mapping[str, Any],
    own: Mapping[str, Any],
) -> Collected:
    """Put together the content of a checkpoint. Collective.

    Whether the ranks' states are equal is not looked at.

    Args:
        step: Optimiser steps done.
        score: How good the checkpoint is, if known.
        values: The objects and values of which rank 0's are saved, by name.
        own: Those of which each rank's are saved, by name.

    Raises:
        CheckpointError: On every rank, if some states cannot be saved.
    """
    _consolidate(values)
    sharded: dict[str, Any] = {}
    content, part = try_on_all(lambda: _take_states(step, score, values, own, sharded))
    parts = [from_bytes(data) for data in all_gather_object(part)]
    content["rng"] = [each.pop("rng") for each in parts]
    layouts = lay_out([each.pop("sharded") for each in parts])  # the same on every rank
    if own:
        content["per_rank"] = parts
    if layouts:
        content["format"] = FORMAT_WITH_PIECES
        content["sharded"] = {"tensors": as_plain(layouts)}  # and their folder, when it is known
    return Collected(content, sharded, layouts, own_pieces(sharded, layouts, get_rank()))


def _consolidate(values: Mapping[str, Any]) -> None:
    """Have optimizers that spread their state over ranks collect it on rank 0. Collective."""
    for value in values.values():
        if is_consolidated(value):
            with current_job.peer_errors():
                value.consolidate_state_dict(to=0)


def _take_states(
    step: int,
    score: float | None,
    values: Mapping[str, Any],
    own: Mapping[str, Any],
    sharded: dict[str, Any],
) -> tuple[dict[str, Any], bytes]:
    """Return the content as far as it is rank 0's, and this rank's part of the rest.

    Args:
        step: Optimiser steps done.
        score: How good the checkpoint is, if known.
        values: The objects and values of which rank 0's are saved, by name.
        own: Those of which each rank's are saved, by name.
        sharded: Gets the sharded tensors among the states, by path.
    """
    states = {}
    for name, value in values.items():
        if is_main_process() or not is_consolidated(value):
            states[name] = state_of(value)
    own_states = {name: state_of(value) for name, value in own.items()}
    _check_tensors(states, own_states)
    states = {name: take_out(name, state, sharded) for name, state in states.items()}
    own_states = take_out("per_rank", own_states, {})  # in which none are sharded
    kinds, shapes = _describe_all(values)
    content = {
        "format": FORMAT,
        "step": step,
        "score": score,
        "state": states,
        "kinds": kinds,
        "shapes": shapes,
    }
    own_kinds, own_shapes = _describe_all(own)
    part = {
        "rng": get_rng_state(),
        "per_rank": own_states,
        "kinds": own_kinds,
        "shapes": own_shapes,
        "sharded": describe_pieces(sharded),
    }
    _check_readable(own_states)
    return content, to_bytes(part)


def _check_tensors(states: Mapping[str, Any], own_states: Mapping[str, Any]) -> None:
    """Raise if a tensor that only a state shows is sharded in a way that cannot be saved, or if one has no values."""
    of_all = list(tensors_of("state", states))
    of_each = list(tensors_of("per_rank", own_states))
    tensors = [*of_all, *of_each]
    problem = explain_sharded("Checkpointer.save", [*without_dtensors(of_all), *of_each])
    if problem:
        raise CheckpointError(problem)
    for name, tensor in tensors:
        if is_lazy(tensor):
            problem = f"Cannot save {name}: it is lazy and not initialised yet."
            raise CheckpointError(f"{problem} Call the model once before.")
        if tensor.is_meta:
            problem = f"Cannot save {name}: it is on the meta device and has no values."
            raise CheckpointError(f"{problem} Make it with some.")


def _describe_all(values: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the classes of those values that have one that matters, and the shapes of all."""
    kinds = {}
    shapes = {}
    for name, value in values.items():
        kind, shapes[name] = describe(value)
        if kind:
            kinds[name] = kind
    return kinds, shapes


def _check_readable(own_states: Mapping[str, Any]) -> None:
    """Raise if a state of this rank alone cannot be read without code from the file."""
    for name, state in own_states.items():
        try:
            from_bytes(to_bytes(state))
        except Exception as error:
            raise CheckpointError(f"Cannot save per_rank[{name!r}]: {error}") from error


# A checkpoint that a thread writes while this rank goes on, and that is kept only if all agree.

_log = logging.getLogger(__name__)
_PAUSE = 1.0  # seconds between looks at the main thread, while nothing is decided


class Writing:
    """A thread that writes a checkpoint. The process does not end before it, unless it is killed.

    Args:
        step: The checkpoint's.
        write: Writes it. It gets this object, whose `check()` and `confirm()` it calls.
        is_awaited: Whether `save()` waits for it, and raises its error.
    """

    def __init__(self, step: int, write: Callable[[Writing], None], is_awaited: bool) -> None:
        self.step = step
        self.is_awaited = is_awaited
        self._write: Callable[[Writing], None] | None = write
        self._pid = os.getpid()
        self._decided = threading.Event()
        self._ended = threading.Event()
        self._ended.set()
        self._wanted = True
        self._process_ends = False
        self._error: BaseException | None = None
        # the interpreter waits for threads that are no daemons, but a child of multiprocessing lets
        # go of the folder before it does
        self._finalizer = Finalize(None, self._end_with_process, exitpriority=10)

    def start(self) -> None:
        """Begin to write."""
        thread = threading.Thread(target=self._run, name="ddpkit-checkpoint", daemon=False)
        self._ended.clear()
        try:
            thread.start()
        except Exception:
            self._finalizer.cancel()
            self._ended.set()
            raise

    def keep(self) -> None:
        """Let the checkpoint get its name when it is on the disk."""
        self._decided.set()

    def give_up(self) -> None:
        """Delete what was written, unless the checkpoint is complete; wait until that is done."""
        self._wanted = False
        self._decided.set()
        self.join()

    def check(self) -> None:
        """Raise NotWanted if the checkpoint was given up."""
        if not self._wanted:
            raise NotWanted

    def confirm(self) -> None:
        """Wait for the decision; raise NotWanted if the checkpoint was given up."""
        while not self._decided.wait(_PAUSE):
            if not threading.main_thread().is_alive():  # it was interrupted before it could decide
                raise NotWanted
        self.check()

    def is_ending(self) -> bool:
        """Return whether the process waits for this thread, to end."""
        return self._process_ends

    def is_running(self) -> bool:
        """Return whether there is still something to write; a forked child has no such thread."""
        return self._pid == os.getpid() and not self._ended.is_set()

    def join(self) -> None:
        """Wait until the checkpoint is complete, or its writing has failed."""
        if self.is_running():
            # not the thread's own join(), after whose interruption nobody waits for the thread
            self._ended.wait()

    def raise_error(self) -> None:
        """Raise what the thread has raised."""
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # whose traceback holds this frame, and the folder with it

    def _run(self) -> None:
        write, self._write = self._write, None  # lets go of the content at the end
        assert write is not None
        try:
            if not self.is_awaited:
                self.confirm()  # not beside the comparison, for which the step waits
            write(self)
        except NotWanted:
            pass
        except BaseException as error:
            self._error = error
            if not self.is_awaited:
                _log.error("Saving step %d without waiting failed: %s", self.step, describe_error(error))
        finally:
            del write  # and with it what holds the folder, before anybody goes on
            self._finalizer.cancel()
            self._ended.set()

    def _end_with_process(self) -> None:
        """Wait for the end, without a decision if there is none yet."""
        self._process_ends = True
        if not self._decided.is_set():
            self._wanted = False
        self._decided.set()
        self.join()


# A copy of a checkpoint's content, which a thread can write while the training changes the original.
#
# The copy is made by pickling: what is no storage of tensors goes into the pickle, and each storage
# is copied into memory on the CPU, which the next copy uses again.

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
