"""Put the ranks' results for a dataset into its order, and check that each sample is there once."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..arguments import as_integer, plain_index
from ..collectives.consistency import raise_everywhere
from ..collectives.differences import explain_difference, name_ranks
from ..collectives.groups import Group, peers_of
from ..collectives.transfer import as_rows, describe_column, from_rows, gather_objects
from ..collectives.tree import Tree, concatenate, explain_not_dense
from ..errors import MismatchError
from ..job import current_job
from ..job.job import ranks_of
from ..launch import ranks
from ..torch_internals import untraced

T = TypeVar("T")
_INDICES_NAMED = 8  # samples that a message names


@untraced
def gather_exact(values: T, indices: Any, n: int, *, group: Group | None = None) -> T:
    """Gather the ranks' results in dataset order, and check that each sample occurs exactly once. Collective.

    Args:
        values: This rank's results, one for each index: a tensor or NumPy array, by its first dimension, or a list. Or
            several such columns, in a dict, namedtuple or dataclass. Same structure, kind, dtype and trailing shape on
            every rank that has any; a rank without samples may pass an empty list.
        indices: The samples' indices in the dataset, as ints: a list, range, tensor or array.
        n: Length of the dataset.
        group: As for `all_reduce_mean`; by default the data-parallel ranks.

    Returns:
        The n results in dataset order, equal on every rank, in the form of `values`: a tensor (on the device of this
        rank's tensor), array or list, or columns of them.

    Raises:
        MismatchError: If structure, kind, dtype, trailing shape or n differ between ranks.
        NotSetUpError: If several processes were launched but `setup()` was not called.
        TypeError: If `values` are something else: a string, a set, or a tuple, which is ambiguous.
        ValueError: If values and indices differ in length; on every rank, if the ranks' indices together are not
            range(n), each once. The message names those missing, repeated or out of range.

    Example:
        >>> gather_exact(["c", "a", "b"], [2, 0, 1], n=3)
        ['a', 'b', 'c']

        On two ranks::

            gather_exact({"loss": torch.tensor([1, 3])}, [0, 2], n=3)  # rank 0
            gather_exact({"loss": torch.tensor([2])}, [1], n=3)  # rank 1
            # both get {"loss": tensor([1, 2, 3])}
    """
    peers = current_job.data_parallel() if group is None else peers_of(group)
    n = plain_index(n)
    call = f"gather_exact(n={n!r})"
    with raise_everywhere(call, peers):
        as_integer(n, "n", least=0)
        indices = _as_array(indices)
        taken = Tree(values, _is_column, "values")
        own = taken.leaves()
        ready = [_as_column(call, path, column, len(indices)) for path, column in own.items()]
        tree = taken.rebuild(ready)
    gathered = dict(zip(ranks_of(peers), gather_objects(call, (indices, tree), peers), strict=True))
    order = _order_of({rank: found for rank, (found, _) in gathered.items()}, n)
    own_rank = ranks.get_rank()
    # a rank without samples may pass an empty list whatever the others have
    filled = [rank for rank, (found, _) in gathered.items() if len(found)] or [own_rank]
    trees = {rank: Tree(gathered[rank][1], _is_column, "values") for rank in filled}
    columns = {rank: tree.leaves() for rank, tree in trees.items()}
    _check_kinds(call, columns)
    template = own_rank if own_rank in trees else filled[0]
    results = []
    for path in columns[template]:
        result = _join([parts[path] for parts in columns.values()], order)
        if isinstance(result, Tensor) and isinstance(own.get(path), Tensor):
            result = result.to(own[path].device)
        results.append(result)
    return trees[template].rebuild(results)  # type: ignore[no-any-return]


def _check_kinds(call: str, columns: dict[int, dict[str, Any]]) -> None:
    """Refuse columns, given by rank and path, that differ in kind."""
    kinds = {}
    for rank, parts in columns.items():
        kinds[rank] = {path: describe_column(part) for path, part in parts.items()}
    difference = explain_difference(call, kinds)
    if difference:
        raise MismatchError(difference)


def _is_column(value: Any) -> bool:
    """Return whether this is taken as the samples' results, rather than as a container of several such."""
    if isinstance(value, tuple):  # of columns, or of results? nobody knows: refused
        return not hasattr(type(value), "_fields")
    return isinstance(value, (Tensor, np.ndarray, list))


def _as_array(indices: Any) -> NDArray[np.int64]:
    """Check the indices and turn them into an array."""
    is_masked = isinstance(indices, np.ma.MaskedArray)
    if isinstance(indices, Tensor) and not explain_not_dense(indices):
        indices = indices.detach().cpu()
    array = np.asarray(indices)
    are_ints = array.dtype.kind in "iu" or array.shape == (0,)
    if is_masked or array.ndim != 1 or not are_ints:
        raise ValueError(f"indices must be ints in one dimension, got {describe_column(array)}.")
    return array.astype(np.int64)


def _as_column(call: str, path: str, column: Any, count: int) -> Any:
    """Check that a column has one result per index, and make it ready to be pickled."""
    is_plain = isinstance(column, list) or type(column) in (np.ndarray, np.memmap)
    problem = "" if is_plain else explain_not_dense(column)
    if not problem and not isinstance(column, list) and not column.ndim:
        problem = "a tensor without dimensions"
    if problem:
        raise TypeError(
            f"{call} takes one result per index in a tensor, array or list, or several such columns in a dict, "
            f"namedtuple or dataclass, found {problem} at {path}."
        )
    if len(column) != count:
        results = "1 result" if len(column) == 1 else f"{len(column)} results"
        indices = "there is 1 index" if count == 1 else f"there are {count} indices"
        raise ValueError(f"{path} holds {results}, but {indices}: {call} takes one per index.")
    if isinstance(column, Tensor):
        return column.detach().as_subclass(Tensor).cpu()
    if isinstance(column, np.ndarray):
        return column
    return list(column)


def _join(parts: list[Any], order: NDArray[np.int64]) -> Any:
    """Join the ranks' parts of one column, in the order given."""
    if isinstance(parts[0], Tensor):
        joint = concatenate(parts)
        return from_rows(torch.from_numpy(as_rows(joint).numpy().take(order, 0)), joint)  # of any dtype
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts)[order]
    results = [result for part in parts for result in part]
    return [results[i] for i in order]


def _order_of(by_rank: dict[int, NDArray[np.int64]], n: int) -> NDArray[np.int64]:
    """Return where each of range(n) stands among the ranks' indices, of which each must be there once."""
    indices = np.concatenate([*by_rank.values()])
    inside = (indices >= 0) & (indices < n)
    counts = np.bincount(indices[inside], minlength=n)
    wrong = {
        "missing": np.flatnonzero(counts == 0),
        "repeated": np.flatnonzero(counts > 1),
        "out of range": np.unique(indices[~inside]),
    }
    lines = []
    for problem, found in wrong.items():
        if len(found):
            lines.append(f"  {len(found)} {problem}: {_name_indices(found, by_rank)}")
    if not lines:
        return np.argsort(indices)
    raise ValueError(
        "\n".join([f"The ranks' indices must together be range({n}), each once, but:", *lines])
        + "\nA DistributedSampler repeats or drops samples to even out its shards: use a DistributedEvalSampler."
    )


def _name_indices(indices: NDArray[np.int64], by_rank: dict[int, NDArray[np.int64]]) -> str:
    """Name the first few indices, with the ranks that have them."""
    names = []
    for index in indices[:_INDICES_NAMED]:
        owners = [rank for rank, own in by_rank.items() if index in own]
        names.append(f"{index} on {name_ranks(owners)}" if owners else f"{index}")
    if len(indices) > _INDICES_NAMED:
        names.append("…")
    return ", ".join(names)
