"""Collectives on values: checked before anything is sent, and working on one process, too."""

from __future__ import annotations

from typing import Any, Literal, SupportsFloat, TypeVar, overload

from torch import Tensor

from ..torch_internals import untraced
from .groups import Group, peers_of
from .reduce import reduce_tree
from .transfer import broadcast_value, gather_objects, gather_trees

T = TypeVar("T")
K = TypeVar("K")
Integer = TypeVar("Integer", bound=int)  # or bool
Op = Literal["sum", "mean", "min", "max"]


@overload
def all_reduce_mean(
    value: float, weight: SupportsFloat | None = None, *, check: bool = True, group: Group | None = None
) -> float: ...
@overload
def all_reduce_mean(
    value: Tensor, weight: SupportsFloat | None = None, *, check: bool = True, group: Group | None = None
) -> Tensor: ...
@overload
def all_reduce_mean(
    value: dict[K, Integer], weight: SupportsFloat | None = None, *, check: bool = True, group: Group | None = None
) -> dict[K, float]: ...
@overload
def all_reduce_mean(
    value: list[Integer], weight: SupportsFloat | None = None, *, check: bool = True, group: Group | None = None
) -> list[float]: ...
@overload
def all_reduce_mean(
    value: T, weight: SupportsFloat | None = None, *, check: bool = True, group: Group | None = None
) -> T: ...


@untraced
def all_reduce_mean(
    value: Any, weight: SupportsFloat | None = None, *, check: bool = True, group: Group | None = None
) -> Any:
    """Average a number, tensor or nested structure over all ranks. Collective.

    Up to 495 Python numbers or tensor elements take one small exchange, including the check. Larger values take one
    more all-reduce per dtype; half and bfloat16 tensors are added in float32. The check makes the host wait for an
    accelerator's tensors.

    Args:
        value: This rank's value: Python numbers, NumPy arrays and scalars, tensors, and dicts, lists, tuples and
            dataclasses of them, which keep their types. Floating leaves keep their dtype; ints and bools become floats:
            float64, or Python floats. A replicated DTensor, or one of partial sums, counts as its full tensor; the
            result is a plain tensor. Same structure, shapes, dtypes and device type on every rank. It is not modified,
            and shares no memory with the result.
        weight: This rank's share of the mean, for example its number of samples: 0, or from 1e-20 to 1e20; by default
            1. The value of a rank with weight 0 is ignored, even NaN.
        check: False on every rank skips the check for a single tensor without weight, so that the host does not wait
            for its device. Mismatched ranks then get wrong values, hang, or abort.
        group: Ranks to average over; by default all. A torch process group, or one dimension of a mesh, that contains
            this rank. Rank numbers in messages and results are the job's.

    Returns:
        The same structure with the means, equal on every rank, without gradient. Ints beyond 2^53 are rounded to the
        nearest float.

    Raises:
        MismatchError: If structure, shape or dtype differ between ranks, or only some pass a weight; the message lists
            what each rank passed. On the other ranks, if one raises an error below.
        NotSetUpError: If several processes were launched but `setup()` was not called.
        TypeError: If `value` holds anything else, such as a string, a sharded tensor or a dict of another class; the
            message says where.
        ValueError: If a weight is negative, too large or too small, or all are 0.

    Example:
        >>> all_reduce_mean({"loss": 2.0})   # one process: the value itself
        {'loss': 2.0}

        On two ranks::

            all_reduce_mean({"loss": 1.0}, weight=3)    # rank 0
            all_reduce_mean({"loss": 5.0}, weight=1)    # rank 1; both get {'loss': 2.0}
    """
    return reduce_tree(value, "mean", weight, check, peers_of(group))


@overload
def all_reduce(value: bool, op: Literal["sum"] = "sum", *, check: bool = True, group: Group | None = None) -> int: ...
@overload
def all_reduce(value: float, op: Literal["mean"], *, check: bool = True, group: Group | None = None) -> float: ...
@overload
def all_reduce(value: Tensor, op: Op = "sum", *, check: bool = True, group: Group | None = None) -> Tensor: ...
@overload
def all_reduce(value: T, op: Op = "sum", *, check: bool = True, group: Group | None = None) -> T: ...
@untraced
def all_reduce(value: Any, op: Op = "sum", *, check: bool = True, group: Group | None = None) -> Any:
    """Reduce a number, tensor or nested structure over all ranks. Collective.

    Args:
        value: As for `all_reduce_mean`.
        op: "sum", "mean", "min" or "max". Sums of ints and bools are ints, int64 in arrays and tensors; "min" and "max"
            keep the dtype, and return NaN if any rank has NaN. Python ints combined with floats give a float; "min" and
            "max" of bools give a bool.
        check: As for `all_reduce_mean`.
        group: As for `all_reduce_mean`.

    Returns:
        The same structure with the results, equal on every rank, without gradient.

    Raises:
        MismatchError: If structure, shape, dtype or `op` differ between ranks; the message lists what each rank passed.
            On the other ranks, if one raises an error below.
        NotSetUpError: If several processes were launched but `setup()` was not called.
        OverflowError: If a Python int is beyond 2^53, or so large that the sum could be; pass it as a tensor.
        TypeError: If `value` holds anything else, such as a string.
        ValueError: If `op` is unknown.

    Example:
        >>> all_reduce({"correct": 17, "worst": 0.5})
        {'correct': 17, 'worst': 0.5}

        On two ranks::

            all_reduce({"correct": 17}, "sum")    # rank 0
            all_reduce({"correct": 20}, "sum")    # rank 1; both get {'correct': 37}
    """
    return reduce_tree(value, op, None, check, peers_of(group))


@untraced
def all_gather(value: T, *, group: Group | None = None) -> list[T]:
    """Gather tensors, which may differ in length, from all ranks on every rank. Collective.

    Args:
        value: This rank's tensor, of any dtype, or dicts, lists, tuples and dataclasses of tensors. Same structure,
            dtypes and shapes, except for the first dimension, on every rank. No tensor may require a gradient, except
            under `torch.no_grad()`: `gather_batch` keeps gradients.
        group: As for `all_reduce_mean`; the values are in its order.

    Returns:
        The ranks' values, in rank order, each of its own length, on this tensor's device, without gradient. `torch.cat`
        joins them.

    Raises:
        MismatchError: If structure, dtype, number of dimensions or trailing shape differ between ranks; on the other
            ranks, if one raises an error below.
        NotSetUpError: If several processes were launched but `setup()` was not called.
        TypeError: If it holds anything but dense tensors.
        ValueError: If a tensor requires a gradient, which would be lost.

    Example:
        >>> import torch
        >>> all_gather(torch.tensor([1, 2]))
        [tensor([1, 2])]

        On two ranks::

            all_gather(torch.tensor([1, 2]))    # rank 0
            all_gather(torch.tensor([3]))       # rank 1; both get [tensor([1, 2]), tensor([3])]
    """
    return gather_trees("all_gather(value)", value, peers_of(group))


@untraced
def all_gather_object(obj: T, *, group: Group | None = None) -> list[T]:
    """Gather objects, as pickled copies, from all ranks on every rank. Collective.

    Args:
        obj: Any object that can be pickled. Tensors on an accelerator arrive on this rank's device.
        group: As for `all_reduce_mean`; the objects are in its order.

    Returns:
        The objects by rank.

    Raises:
        MismatchError: On the other ranks, if an object cannot be pickled; its own rank raises the original error.
        NotSetUpError: If several processes were launched but `setup()` was not called.

    Example:
        >>> all_gather_object({"host": "a"})
        [{'host': 'a'}]
    """
    return gather_objects("all_gather_object(obj)", obj, peers_of(group))


@untraced
def broadcast(value: T, src: int | None = None, *, group: Group | None = None) -> T:
    """Send one rank's value to every rank. Collective.

    A value of up to 1.9 kB takes one small exchange, a larger one also a broadcast.

    Args:
        value: On rank `src`: anything that can be pickled, such as nested tensors, numbers and strings. Ignored on the
            other ranks; pass None, for example.
        src: The source rank, by its number in the job; the same on every rank. By default the group's first rank.
        group: As for `all_reduce_mean`.

    Returns:
        Rank `src`'s value: the object itself on that rank, a copy on the others. Copied tensors have no gradient; those
        from an accelerator are on this rank's device.

    Raises:
        MismatchError: If `src` differs between ranks; on the other ranks, if the value cannot be pickled.
        NotSetUpError: If several processes were launched but `setup()` was not called.
        ValueError: If there is no rank `src`.

    Example:
        >>> broadcast({"run": "2024-05-01", "lr": 0.1})
        {'run': '2024-05-01', 'lr': 0.1}
    """
    return broadcast_value(value, src, peers_of(group))  # type: ignore[no-any-return]
