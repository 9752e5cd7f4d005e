"""Find a batch size for which the memory of every rank suffices."""

from __future__ import annotations

import traceback
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..arguments import as_integer
from ..collectives.consistency import check_fingerprint, fingerprint_of, raise_everywhere
from ..collectives.reduce import reduce_tree
from ..errors import DdpkitError
from ..parallel.local_pass import LocalPass
from ..process_group import current_job
from ..process_group.failures import message_of

_TEXTS = ("DefaultCPUAllocator", "CUDNN_STATUS_ALLOC_FAILED", "CUBLAS_STATUS_ALLOC_FAILED")  # of RuntimeErrors


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception says that memory, of the CPU or an accelerator, has run out."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in message_of(error) for text in _TEXTS)


def find_batch_size(
    trial: Callable[[int], object],
    largest: int,
    *modules: nn.Module | Tensor,
) -> int:
    """Halve a batch size until no rank runs out of memory in a trial. Collective.

    A trial is a forward and a backward on a batch of that size, of random numbers for example. In it
    DDP exchanges nothing, and afterwards the gradients are dropped and the buffers are what they were.
    The optimizer's state and whatever else comes later needs memory, too: make the optimizer take a step
    before, or choose a smaller size than the one that is found.

    Args:
        trial: Called with a batch size, in samples per rank; what it returns is dropped.
        largest: The size to begin with, at least 1.
        *modules: The models that a trial trains, wrapped or not.

    Returns:
        The first of `largest`, `largest // 2`, ... for which every rank's memory suffices.

    Raises:
        DdpkitError: On every rank, if memory does not suffice for a batch of 1.
        MismatchError: On the other ranks, if a trial raises another error.
        TypeError: If an argument is of a wrong type.
        ValueError: If a number is out of range.

    Example:
        >>> net = nn.Linear(4, 1)
        >>> find_batch_size(lambda size: net(torch.randn(size, 4)).sum().backward(), 64, net)
        64
    """
    call = "find_batch_size()"
    peers = current_job.data_parallel()
    with raise_everywhere(call, peers):
        batch_size = as_integer(largest, "largest")
        local_pass = LocalPass(call, modules)
    while True:
        with raise_everywhere(call, peers):
            fits = _try(trial, batch_size, local_pass)
        check_fingerprint(fingerprint_of(call, {"batch size": f"{batch_size}"}), peers)
        if reduce_tree(fits, "min", None, check=True, peers=peers):
            return batch_size
        if batch_size == 1:
            where = "on other ranks" if fits else "on this rank"
            raise DdpkitError(f"{call} found no size: memory does not suffice for one sample {where}.")
        batch_size //= 2


def _try(trial: Callable[[int], object], batch_size: int, local_pass: LocalPass) -> bool:
    """Run a trial; return whether memory sufficed."""
    try:
        with local_pass:
            trial(batch_size)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        release(error)
        return False
    finally:
        local_pass.undo()
    return True


def release(error: BaseException | None) -> None:
    """Free what the frames hold in which an exception was raised, and those that led to it, such as tensors."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
