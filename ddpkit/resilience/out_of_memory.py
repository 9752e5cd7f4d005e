"""Find a batch size for which the memory of every rank suffices."""

from __future__ import annotations

import traceback
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..arguments import as_integer
from ..collectives.consistency import raise_everywhere
from ..collectives.reduce import reduce_tree
from ..errors import DdpkitError
from ..process_group import lifecycle
from .local_pass import LocalPass

_TEXTS = ("DefaultCPUAllocator", "CUDNN_STATUS_ALLOC_FAILED", "CUBLAS_STATUS_ALLOC_FAILED")  # of RuntimeErrors


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception says that memory, of the CPU or an accelerator, has run out."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _TEXTS)


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
        TypeError, ValueError: If an argument cannot be used.

    Example:
        >>> net = nn.Linear(4, 1)
        >>> find_batch_size(lambda size: net(torch.randn(size, 4)).sum().backward(), 64, net)
        64
    """
    call = "find_batch_size()"
    peers = lifecycle.data_parallel()
    with raise_everywhere(call, peers):
        batch_size = as_integer(largest, "largest")
        local_pass = LocalPass(call, modules)
    while True:
        with raise_everywhere(call, peers):
            problem = _try(trial, batch_size, local_pass)
        failed = reduce_tree(float(bool(problem)), "sum", None, check=True, peers=peers)
        if not failed:
            return batch_size
        if batch_size == 1:
            found = problem or "on other ranks"
            raise DdpkitError(f"{call} found no batch size: memory does not suffice for one sample ({found}).")
        batch_size //= 2


def _try(trial: Callable[[int], object], batch_size: int, local_pass: LocalPass) -> str:
    """Run a trial; return why memory did not suffice, "" if it did."""
    problem = ""
    try:
        with local_pass:
            trial(batch_size)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        problem = str(error)
        release(error)
    finally:
        local_pass.undo()
    return problem


def release(error: BaseException) -> None:
    """Free what the frames hold in which an exception was raised, such as tensors."""
    traceback.clear_frames(error.__traceback__)
    error.__traceback__ = None
