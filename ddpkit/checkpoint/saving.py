"""Collect, compare, copy and write what the ranks save."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ..collectives.differences import differing_parts, explain_sharded, list_lines
from ..collectives.groups import peers_of
from ..collectives.ops import all_gather_object
from ..collectives.transfer import gather_objects
from ..data.seeds import get_rng_state
from ..errors import CheckpointError, PeerError
from ..job import current_job, lifecycle
from ..job.job import Peers
from ..job.lifecycle import exchange
from ..launch.ranks import is_main_process
from ..parallel.models import strip, without_dtensors, wrapped_paths
from ..parallel.replicas import gather_unless_equal, replicated_parts
from .files import (
    FORMAT,
    FORMAT_WITH_PIECES,
    Check,
    check_saveable,
    dump,
    from_bytes,
    to_bytes,
    write_durably,
    writing_into,
)
from .folder import explain, list_and_prune, step_of
from .sharded import Parts, WrittenPieces, describe_parts, write_pieces
from .states import (
    ByName,
    describe_object,
    digest_leaves,
    is_ordinary,
    path_to,
    state_of,
    storage_key,
    take_out,
    tensors_in,
    tensors_of,
)

T = TypeVar("T")
_CALL = "Checkpointer.save"
_ADVICE = (
    "Only rank 0's would be written. Make them equal first (BatchNorm's statistics and other buffers with "
    "ddpkit.sync_buffers(model), data with ddpkit.broadcast), or save each rank's own value with "
    "per_rank={name: value}."
)


def try_on_all(fn: Callable[[], T], doing: str = "") -> T:
    """Run `fn` on every rank. Collective; `fn` itself may not communicate.

    Args:
        fn: May raise anything.
        doing: Start of the message if `fn` raises something other than a CheckpointError.

    Raises:
        CheckpointError: On every rank, if `fn` raises on any; the message says where and why.
    """
    problem = ""
    cause: Exception | None = None
    try:
        value = fn()
    except PeerError:
        raise
    except Exception as error:
        problem = explain(error, doing)
        cause = error
    raise_problems(exchange(problem), cause)
    return value


def raise_problems(problems: list[str], cause: Exception | None = None) -> None:
    """Raise a CheckpointError with the ranks' problems if any has one; with one text if all have the same."""
    text = "\n".join(f"Rank {rank}: {problem}" for rank, problem in enumerate(problems) if problem)
    if text:
        if isinstance(cause, CheckpointError):
            cause = None  # it says the same
        raise CheckpointError(problems[0] if len(set(problems)) == 1 else text) from cause


# What is saved: the states of all ranks, and values per rank.


def refuse_sharded(call: str, tensors: list[tuple[str, Any]]) -> None:
    """Raise CheckpointError if a tensor is sharded."""
    if problem := explain_sharded(call, tensors):
        raise CheckpointError(problem)


def collect(path: Path, score: float | None, values: ByName, own: ByName) -> tuple[dict[str, Any], WrittenPieces]:
    """Collect what the ranks write: the content of the checkpoint, which rank 0 writes, and their pieces. Collective.

    Args:
        path: The file to write.
        score: Quality of the checkpoint, if known.
        values: Objects and values that are saved for rank 0 only, by name.
        own: Values that are saved for each rank, by name.

    Raises:
        CheckpointError: On every rank, if some states cannot be saved, or differ between ranks.
    """
    compared = {}  # what all ranks have
    for name, value in values.items():
        if not isinstance(value, Optimizer) or not hasattr(value, "consolidate_state_dict"):
            compared[name] = value
            continue
        with current_job.peer_errors():
            value.consolidate_state_dict(to=0)  # like ZeroRedundancyOptimizer: only rank 0 has all of it
    tensors: dict[str, Any] = {}  # the sharded ones, by path

    def take() -> tuple[dict[str, Any], Any]:
        # before states are taken: FSDP's state_dict() would communicate
        refuse_sharded(_CALL, [*without_dtensors(tensors_in(values)), *tensors_in(own)])
        content = _take_states("state", values if is_main_process() else compared, tensors)
        mine = _take_states("per_rank", own, {})
        check_saveable({"state": content["state"], "per_rank": mine["per_rank"]})
        ranks_own = to_bytes(mine) if own else b"", get_rng_state()
        return {"format": FORMAT, "step": step_of(path.name), "score": score, **content}, ranks_own

    content, ranks_own = try_on_all(take)
    by_rank = gather_objects(_CALL, ranks_own, to_all=False)
    content["rng"] = [rng_state for _, rng_state in by_rank]
    if own:
        content["per_rank"] = [from_bytes(data) for data, _ in by_rank]
    pieces = WrittenPieces(path, tensors, all_gather_object(describe_parts(tensors)))
    if pieces.entry:
        content["format"] = FORMAT_WITH_PIECES
        content["sharded"] = pieces.entry
    _check_equal(compared, content["state"], pieces)
    return content, pieces


def _take_states(key: str, values: ByName, sharded: dict[str, Any]) -> dict[str, Any]:
    """Return the states of objects and their descriptions; move DTensors out, or raise for those of one rank."""
    states = {name: state_of(value) for name, value in values.items()}
    tensors = tensors_of(key, states)
    for name, tensor in tensors:
        if is_lazy(tensor):
            raise CheckpointError(f"Cannot save {name}: it is lazy. Call the model once first.")
        if tensor.is_meta:
            raise CheckpointError(
                f"Cannot save {name}: it is on the meta device and has no values. Initialise it first."
            )
    refuse_sharded(_CALL, without_dtensors(tensors) if key == "state" else tensors)  # some show only in the state
    return {
        key: {name: take_out(name, state, sharded) for name, state in states.items()},
        "described": {name: describe_object(value) for name, value in values.items()},
    }


# Compare the ranks' states before rank 0's are saved for all.


def _check_equal(values: ByName, states: ByName, pieces: WrittenPieces) -> None:
    """Raise on every rank unless all ranks would write the same states. Collective.

    Args:
        values: The objects that all ranks have, by name.
        states: Their states, by name.
        pieces: Their sharded tensors, compared between ranks that hold the same part.

    Raises:
        CheckpointError: If some differ, with their names and ranks.
    """
    if lifecycle.enter_collective() is None:
        return
    digests: dict[str, str] = {}
    for name, value in values.items():
        digests.update(digest_leaves(name, states[name]))
        for buffer in _broadcast_buffers(value):
            digests.pop(path_to(name, buffer), None)
    problem = _explain_differences(dict(sorted(digests.items())), None)
    raise_problems([problem])
    if pieces.entry:
        for group, parts in replicated_parts(pieces.tensors).items():  # in each, whatever was found so far
            problem = _explain_differences(parts, peers_of(group)) or problem
        raise_problems(exchange(problem))


def _explain_differences(digests: dict[str, str], peers: Peers | None) -> str:
    """List the digests that differ between these ranks; "" if there are none. Collective."""
    everyone = gather_unless_equal(digests, peers)
    if not everyone:
        return ""
    differing = differing_parts(everyone)
    headline = f"Nothing was saved: {len(differing)} entries differ between ranks:"
    lines = [f"{path}: {found}" for path, found in differing.items()]
    return f"{list_lines(headline, lines)}\n{_ADVICE}"


def _broadcast_buffers(model: Any) -> Iterator[str]:
    """Name the buffers that DDP overwrites with rank 0's before the next forward."""
    if not isinstance(model, nn.Module):
        return
    wrapped = wrapped_paths(model)
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, DistributedDataParallel) and module.broadcast_buffers:
            for name, _ in module.named_buffers(prefix=path, remove_duplicate=False):
                yield strip(name, wrapped)


# Copy what is saved, so that a thread can write it while training continues.

Memory = dict[tuple[Any, ...], list[Tensor]]  # on the CPU, by dtype and size: see `_copy_to_cpu`


@torch.inference_mode(False)
def snapshot(content: Any, memory: Memory | None) -> Callable[[], Any]:
    """Return a function that gives a thread the content once the GPUs have computed it.

    Args:
        content: What is saved.
        memory: For a copy on the CPU, so that the content may change at once: the memory of the last copy, which is no
            longer read. It is replaced by this copy's.
    """
    free: Memory = {}  # reused: new memory costs twice the time of the copy, because the system clears its pages
    if memory is not None:
        free.update(memory)
        memory.clear()
    copies: dict[int, Any] = {}  # by a tensor's id
    by_storage: dict[Any, Tensor] = {}  # one copy for the same elements
    devices = set()
    for _, tensor in tensors_of("", content):
        if tensor.is_cuda:
            devices.add(tensor.device)
        if memory is None or not is_ordinary(tensor) or tensor.is_meta:
            continue
        key = storage_key(tensor)
        if key not in by_storage:
            by_storage[key] = _copy_to_cpu(tensor, free, memory)
        copies[id(tensor)] = by_storage[key]
    given = content if memory is None else copy.deepcopy(content, copies)
    # from this thread's streams; later work on the device, such as the next step, runs after the copies
    events = [torch.cuda.current_stream(device).record_event() for device in devices]

    def get() -> Any:
        for event in events:
            event.synchronize()
        return given

    return get


def _copy_to_cpu(tensor: Tensor, free: Memory, used: Memory) -> Tensor:
    """Copy a tensor to the CPU, into free memory if it fits; from a GPU to pinned memory, without waiting."""
    plain = tensor.detach()
    kind = (plain.dtype, plain.shape, plain.stride(), plain.is_cuda)
    fitting = free.get(kind)
    new = fitting.pop() if fitting else torch.empty_like(plain, device="cpu", pin_memory=plain.is_cuda)
    used.setdefault(kind, []).append(new)
    new.copy_(plain, non_blocking=plain.is_cuda)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(new, tensor.requires_grad)
    return new.detach().requires_grad_(tensor.requires_grad)


# Write in a separate thread.


def write(
    path: Path,
    saved: tuple[dict[str, Any] | None, Parts],
    pieces: WrittenPieces,
    keep: tuple[int, int],
    check: Check,
) -> None:
    """Write this rank's part; on rank 0 list the checkpoint and delete those that are not kept.

    Args:
        path: The checkpoint.
        saved: Its content, None on ranks other than 0, and this rank's pieces of sharded tensors.
        pieces: The pieces of all ranks.
        keep: Number of checkpoints to keep: the last ones, and the best ones.
        check: Raises if the writing must stop.
    """
    content, mine = saved

    def write_content(file: BinaryIO) -> None:
        dump(content, file, check)
        if pieces.entry:
            pieces.wait_for_others(check)

    try:
        if mine:
            write_pieces(pieces.folder, pieces.rank, mine, check)
        if content is None:
            return
        with writing_into(path.parent):
            write_durably(path, write_content)
    except BaseException:
        if content is not None:
            shutil.rmtree(pieces.folder, ignore_errors=True)
        raise
    list_and_prune(path, content["score"], *keep, pieces.folder.name)
