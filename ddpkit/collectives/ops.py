"""Move values between ranks: any value, checked before it moves, and on one process too."""

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

    Up to 495 Python numbers or elements of tensors cost one small exchange, check included. Larger ones go in a
    further all-reduce for each dtype, half and bfloat16 added in float32. The check makes the host wait for an
    accelerator's tensors.

    Args:
        value: This rank's value: Python numbers, NumPy arrays and scalars, tensors, and dicts, lists, tuples and
            dataclasses of them, which keep their types. Floating leaves keep their dtype; ints and bools come back
            as floats: as float64, or as Python floats. A DTensor that is replicated, or a sum of the ranks' terms,
            counts as its full tensor, and comes back as such. Same structure, shapes, dtypes and kind of device on
            every rank. It is not modified, and shares no memory with the result.
        weight: This rank's share of the mean, for example its number of samples: 0, or from 1e-20 to 1e20; 1 on every
            rank by default. A rank of weight 0 may hold anything, NaN too.
        check: False on every rank lets a single tensor without weight go unchecked, so that nothing waits for its
            device. Ranks that differ then get wrong values, or hang, or abort.
        group: Those over which it averages, in place of all: a group of torch's or one dimension of a mesh, with this
            rank in it. In messages and results ranks are still those of the job.

    Returns:
        The same structure holding the means, equal on every rank. It carries no gradient. Ints beyond 2^53 count as
        the floats next to them.

    Raises:
        MismatchError: If structure, shape or dtype differ between ranks, or only some pass a weight; the message lists
            what each rank passed. On the other ranks, if one raises an error below.
        NotSetUpError: If several processes were launched but `setup()` was not called.
        TypeError: If `value` holds something else, such as a string, a sharded tensor, or a dict of a class of its own;
            the message says where.
        ValueError: If a weight is negative, too large or too small, or all are 0.

    Example:
        >>> all_reduce_mean({"loss": 2.0})   # one process: the value itself
        {'loss': 2.0}

        On two::

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
    """Add, average or compare a number, tensor or nested structure over all ranks. Collective.

    Args:
        value: As for `all_reduce_mean`.
        op: "sum", "mean", "min" or "max". Sums of ints and bools are ints, for arrays and tensors int64; "min" and
            "max" keep the dtype, and give NaN where any rank has NaN. Python numbers of which some are floats give one,
            and bools have a bool for their "min" and "max".
        check: As for `all_reduce_mean`.
        group: As for `all_reduce_mean`.

    Returns:
        The same structure holding the results, equal on every rank. It carries no gradient.

    Raises:
        MismatchError: If structure, shape, dtype or `op` differ between ranks; the message lists what each rank passed.
            On the other ranks, if one raises an error below.
        NotSetUpError: If several processes were launched but `setup()` was not called.
        OverflowError: If a Python int is beyond 2^53, or so large that the sum could be: pass it as a tensor.
        TypeError: If `value` holds something else, such as a string.
        ValueError: If `op` is none of the four.

    Example:
        >>> all_reduce({"correct": 17, "worst": 0.5})
        {'correct': 17, 'worst': 0.5}

        On two::

            all_reduce({"correct": 17}, "sum")    # rank 0
            all_reduce({"correct": 20}, "sum")    # rank 1; both get {'correct': 37}
    """
    return reduce_tree(value, op, None, check, peers_of(group))


@untraced
def all_gather(value: T, *, group: Group | None = None) -> list[T]:
    """Give every rank the tensors of all ranks, which may differ in length. Collective.

    Args:
        value: This rank's tensor, of any dtype, or dicts, lists, tuples and dataclasses of tensors. Same structure and
            dtypes on every rank, and same shapes but for the first dimension. None of them requires a gradient, unless
            gradients are turned off: use `gather_batch` for those that do.
        group: As for `all_reduce_mean`; the values are then in its order.

    Returns:
        The values by rank, each with its own length, on this tensor's device. They carry no gradient. `torch.cat`
        makes one of them.

    Raises:
        MismatchError: If structure, dtype, number of dimensions or trailing shape differ between ranks; on the other
            ranks, if one raises an error below.
        NotSetUpError: If several processes were launched but `setup()` was not called.
        TypeError: If it holds something else than dense tensors.
        ValueError: If a tensor requires a gradient, which would be lost.

    Example:
        >>> import torch
        >>> all_gather(torch.tensor([1, 2]))
        [tensor([1, 2])]

        On two::

            all_gather(torch.tensor([1, 2]))    # rank 0
            all_gather(torch.tensor([3]))       # rank 1; both get [tensor([1, 2]), tensor([3])]
    """
    return gather_trees("all_gather(value)", value, peers_of(group))


@untraced
def all_gather_object(obj: T, *, group: Group | None = None) -> list[T]:
    """Give every rank the objects of all ranks, as pickled copies. Collective.

    Args:
        obj: Anything that can be pickled. Tensors that were on an accelerator arrive on this rank's own device.
        group: As for `all_reduce_mean`; the objects are then in its order.

    Returns:
        The objects by rank.

    Raises:
        MismatchError: On the other ranks, if an object cannot be pickled; its own rank raises the reason.
        NotSetUpError: If several processes were launched but `setup()` was not called.

    Example:
        >>> all_gather_object({"host": "a"})
        [{'host': 'a'}]
    """
    return gather_objects("all_gather_object(obj)", obj, peers_of(group))


@untraced
def broadcast(value: T, src: int | None = None, *, group: Group | None = None) -> T:
    """Give every rank the value of one. Collective.

    A value of up to 1.9 kB costs one small exchange, a larger one a further broadcast.

    Args:
        value: On rank `src`: tensors, numbers, strings, None, nested, or anything that can be pickled. On the others a
            placeholder, for example None; it is ignored.
        src: The rank whose value it is, by its number in the job; the same on every rank. By default the first of
            those that take part.
        group: As for `all_reduce_mean`.

    Returns:
        The value of rank `src`: there the value itself, elsewhere a copy, its tensors without gradient, and on this
        rank's own device if they were on an accelerator.

    Raises:
        MismatchError: If `src` differs between ranks; on the other ranks, if the value cannot be pickled.
        NotSetUpError: If several processes were launched but `setup()` was not called.
        ValueError: If there is no rank `src`.

    Example:
        >>> broadcast({"run": "2024-05-01", "lr": 0.1})
        {'run': '2024-05-01', 'lr': 0.1}
    """
    return broadcast_value(value, src, peers_of(group))  # type: ignore[no-any-return]
