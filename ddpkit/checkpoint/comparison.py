"""Comparison of the ranks' states before rank 0's are saved for all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..collectives.differences import differing_parts, list_lines
from ..collectives.groups import peers_of
from ..collectives.sync import run_on_main
from ..errors import CheckpointError, PeerError, describe_error, message_of
from ..job import lifecycle
from ..job.lifecycle import exchange
from ..parallel.models import strip, wrapped_paths
from ..parallel.replicas import gather_unless_equal, replicated_parts
from .format import is_consolidated
from .leaves import digest_leaves, path_to

# Work that all ranks finish, or after which all raise one error that says where it went wrong.

T = TypeVar("T")


def try_on_main(fn: Callable[[], T]) -> T | None:
    """Run `fn` on rank 0 and give its value, plain data, to all ranks. Collective.

    Raises:
        CheckpointError: On every rank, if `fn` raises one, or an OSError.
    """

    def attempt() -> tuple[T | None, str]:
        try:
            return fn(), ""
        except (CheckpointError, OSError) as error:
            return None, message_of(error)

    value, problem = run_on_main(attempt)
    if problem:
        raise CheckpointError(problem)
    return value


def try_on_all(fn: Callable[[], T], doing: str = "") -> T:
    """Run `fn` on every rank. Collective; `fn` itself may hold no collective.

    Args:
        fn: May raise anything.
        doing: Begins the message where `fn` raises something else than a CheckpointError.

    Raises:
        CheckpointError: On every rank, if `fn` raises on any; it says where and why.
    """
    problem = ""
    cause: Exception | None = None
    try:
        value = fn()
    except PeerError:
        raise
    except CheckpointError as error:
        problem = message_of(error)
        cause = error
    except Exception as error:
        problem = f"{doing}{describe_error(error)}"
        cause = error
    problems = exchange(problem)
    if any(problems):
        raise CheckpointError(merge_problems(problems)) from cause
    return value


def merge_problems(problems: list[str]) -> str:
    """Write the ranks' problems, by rank, as one text: once if all have the same."""
    if len(set(problems)) == 1:
        return problems[0]
    lines = []
    for rank, problem in enumerate(problems):
        if problem:
            lines.append(f"Rank {rank}: {problem}")
    return "\n".join(lines)


_ADVICE = (
    "Only rank 0's would be written. Make them equal first (BatchNorm's statistics and other "
    "buffers with ddpkit.sync_buffers(model), data with ddpkit.broadcast), or save what each rank "
    "has its own of with per_rank={name: value}."
)


def check_equal(
    values: Mapping[str, Any],
    states: Mapping[str, Any],
    sharded: Mapping[str, Any],
) -> None:
    """Raise on every rank unless all ranks would write the same states. Collective.

    Args:
        values: The objects to save, by name.
        states: Their states; consolidated optimizers may lack one, for only rank 0 has it.
        sharded: The sharded tensors, of which the states have the shapes only, by path. They are
            compared among the ranks that hold the same part.

    Raises:
        CheckpointError: If some differ, with their names and the ranks.
    """
    if not lifecycle.joined():
        return
    digests = _digests(values, states)
    problem = _explain(gather_unless_equal(dict(sorted(digests.items())), None))
    if problem:
        raise CheckpointError(problem)
    if sharded:  # on every rank
        _check_replicated(sharded)


def _check_replicated(sharded: Mapping[str, Any]) -> None:
    """Raise on every rank unless those that hold the same part of a tensor hold equal ones. Collective."""
    problem = ""
    for group, digests in replicated_parts(sharded).items():
        problem = problem or _explain(gather_unless_equal(digests, peers_of(group)))

    def report() -> None:
        if problem:
            raise CheckpointError(problem)

    try_on_all(report)


def _explain(everyone: Mapping[int, Mapping[str, str]]) -> str:
    """List the differing digests, given by rank; "" if there are none."""
    if not everyone:
        return ""
    differing = differing_parts(everyone)
    headline = f"Nothing was saved: {len(differing)} entries differ between ranks:"
    lines = [f"{path}: {found}" for path, found in differing.items()]
    return f"{list_lines(headline, lines)}\n{_ADVICE}"


def _digests(values: Mapping[str, Any], states: Mapping[str, Any]) -> dict[str, str]:
    """Digest the leaves of this rank's states that must be those of every rank."""
    digests: dict[str, str] = {}
    for name, value in values.items():
        if is_consolidated(value):
            continue
        digests.update(digest_leaves(name, states[name]))
        for buffer in _broadcast_buffers(value):
            digests.pop(path_to(name, buffer), None)
    return digests


def _broadcast_buffers(model: Any) -> set[str]:
    """Name the buffers that DDP overwrites with rank 0's before the next forward."""
    names: set[str] = set()
    if not isinstance(model, nn.Module):
        return names
    wrapped = wrapped_paths(model)
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, DistributedDataParallel) and module.broadcast_buffers:
            for name, _ in module.named_buffers(prefix=path, remove_duplicate=False):
                names.add(strip(name, wrapped))
    return names
