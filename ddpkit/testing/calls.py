"""Functions called on ranks: for helpers of tests, and for a test that compares several world sizes."""

from __future__ import annotations

import os
import pickle
import socket
import sys
from collections.abc import Callable
from typing import Any

from ..errors import PeerError
from .messages import Answer, Task

_NO_RUN = "on_ranks() needs a pytest run with ddpkit's plugin; outside of one use ddpkit.spawn()."


def on_ranks(
    fn: Callable[..., Any], nprocs: int, *args: Any, timeout: float = 60.0, join: bool = True, fresh: bool = False
) -> list[Any]:
    """Call `fn(*args)` on ranks that have called `setup()`, in a test that is not marked itself.

    Args:
        fn: A function that can be pickled: defined at the top of a module.
        nprocs: Number of ranks, at least 1.
        *args: Passed to every rank as copies.
        timeout: Bound on the call, and of the process group, in seconds.
        join: Whether the ranks have called `setup()`; otherwise they find the environment of a launch.
        fresh: Whether to start new processes for it instead of using warm ones.

    Returns:
        The ranks' results, by rank.

    Raises:
        Exception: The exception of the rank that failed first, its rank and traceback in `__cause__`, a `PeerError`.
        PeerError: If a process died, or the exception cannot be pickled.
        TimeoutError: If the time is up; the message holds every unfinished rank's stack.
    """
    if not isinstance(nprocs, int) or nprocs < 1:
        raise ValueError(f"nprocs must be a positive integer, got {nprocs!r}.")
    config = _config_of_this_run()
    if config is None:
        raise RuntimeError(_NO_RUN)
    try:
        job = pickle.dumps((fn, args))  # plain pickle copies tensors; multiprocessing's own would share them
    except Exception as error:
        raise TypeError(f"on_ranks() cannot send {fn!r} and its arguments to other processes: {error}") from error
    from .dispatch import pool_of

    task = Task("call", (job,), join, timeout, folder=os.getcwd(), path=sys.path)
    answers = pool_of(config).run(nprocs, task, timeout, fresh)
    for answer in answers:
        if answer.done is not None:
            sys.stdout.write(answer.done.output)
    late = [answer for answer in answers if answer.stack]
    outcomes = {answer.rank: _outcome(answer) for answer in answers if not answer.stack}
    errors = {rank: error for rank, (error, _) in outcomes.items() if error is not None}
    if errors:
        raise errors[min(errors, key=lambda rank: _is_echo(rank, errors[rank]))]
    if late:
        places = "\n".join(f"rank {answer.rank}:\n{answer.stack}" for answer in late)
        raise TimeoutError(f"on_ranks() ended after {timeout:g} s; not finished:\n{places}")
    return [value for _, value in outcomes.values()]


def _config_of_this_run() -> Any:
    """The configuration of the run in this process: the plugin's module has one name installed and another here."""
    for name in ("ddpkit_pytest", f"{__package__}.hooks"):
        config = getattr(sys.modules.get(name), "current", None)
        if config is not None:
            return config
    return None


def _outcome(answer: Answer) -> tuple[BaseException | None, Any]:
    host = socket.gethostname()
    if answer.done is None:
        return PeerError(answer.rank, host, "lost", answer.problem), None
    if isinstance(answer.done.value, str):
        rank = answer.rank if answer.done.heard_of is None else answer.done.heard_of
        return PeerError(rank, host, "lost", "could not begin", answer.done.value), None
    error, value, text = pickle.loads(answer.done.value)
    if error is not None:
        error.__cause__ = PeerError(answer.rank, host, type(error).__name__, str(error), text)
    return error, value


def _is_echo(rank: int, error: BaseException) -> bool:
    """Return whether this rank failed only because another did."""
    return isinstance(error, PeerError) and error.rank != rank
