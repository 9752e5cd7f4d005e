"""Work that all ranks finish, or after which all raise one error that says where it went wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ..collectives.sync import run_on_main
from ..errors import CheckpointError, PeerError
from ..process_group.failures import describe_error, message_of
from ..process_group.lifecycle import exchange

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
