"""Call functions on ranks: for helpers of tests, and to compare several world sizes."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from ..arguments import as_integer
from ..errors import PeerError
from ..spawning.pickling import dump_call, open_reply
from ..spawning.rank_process import first_cause
from .messages import Answer, CallFunction, Task

T = TypeVar("T")
_FOREVER = 1e8  # seconds
_NO_RUN = "on_ranks() needs a pytest run with ddpkit's plugin; outside of one use ddpkit.spawn()."


def on_ranks(
    fn: Callable[..., T],
    nprocs: int,
    *args: Any,
    timeout: float = 60.0,
    join: bool = True,
    fresh: bool = False,
) -> list[T]:
    """Call `fn(*args)` on ranks that have called `setup()`, in a test that is not marked itself.

    Args:
        fn: A function that can be pickled: defined at the top of a module. Where cloudpickle is
            installed also a lambda or an inner function.
        nprocs: Number of ranks, at least 1.
        *args: Passed to every rank as copies.
        timeout: Bound on the call, in seconds; that of the process group is at least
            `ranks_timeout`.
        join: If true, the ranks have called `setup()`; else they find the environment of a launch.
        fresh: If true, start new processes for it instead of using warm ones.

    Returns:
        The ranks' results, by rank.

    Raises:
        Exception: The exception of the rank that failed first, its rank and traceback in
            `__cause__`, a `PeerError`.
        PeerError: If a process died, or the exception cannot be pickled.
        TimeoutError: If the time is up; the message holds every unfinished rank's stack.
        TypeError: If `fn` or an argument cannot be sent to other processes.

    Example::

        def test_three_ranks_find_the_same_mean():
            assert on_ranks(mean_of_the_data, 3) == [mean_of_the_data()] * 3
    """
    nprocs = as_integer(nprocs, "nprocs")
    if not isinstance(timeout, (int, float)) or not 0 < timeout < _FOREVER:
        raise ValueError(f"timeout must be seconds above 0, got {timeout!r}.")
    config = _config_of_this_run()
    if config is None:
        raise RuntimeError(_NO_RUN)
    work = CallFunction(dump_call("on_ranks", fn, args))
    from .dispatch import pools_of

    # joining takes long on a loaded machine
    patience = max(timeout, float(config.getini("ranks_timeout")))
    task = Task(work, join, patience, folder=os.getcwd(), path=sys.path)
    answers = pools_of(config).run(nprocs, task, timeout, fresh)
    for answer in answers:
        if answer.done is not None:
            sys.stdout.write(answer.done.output)
    return _results(answers, timeout)


def _config_of_this_run() -> Any:
    """Find the configuration of the run in this process.

    The plugin's module has one name where it is installed and another in this repository.
    """
    for name in ("ddpkit_pytest", f"{__package__}.hooks"):
        config = getattr(sys.modules.get(name), "current", None)
        if config is not None:
            return config
    return None


def _results(answers: list[Answer], timeout: float) -> list[Any]:
    """Return the ranks' results, or raise the error of the first that failed."""
    late = [answer for answer in answers if answer.stack]
    results = []
    errors = []
    for answer in answers:
        if answer.stack:
            continue
        error, result = _outcome(answer)
        results.append(result)
        if error is not None:
            errors.append((answer.rank, error))
    if errors:
        raise first_cause(errors)
    if late:
        stacks = "\n".join(f"rank {answer.rank}:\n{answer.stack}" for answer in late)
        raise TimeoutError(f"on_ranks() ended after {timeout:g} s; not finished:\n{stacks}")
    return results


def _outcome(answer: Answer) -> tuple[BaseException | None, Any]:
    """Return the error of a rank, or None and its result."""
    host = socket.gethostname()
    done = answer.done
    if done is None:
        return PeerError(answer.rank, host, "lost", answer.problem), None
    if done.heard_of is not None:
        return PeerError(done.heard_of, host, "lost", "could not begin", done.value), None
    if isinstance(done.value, str):
        return PeerError(answer.rank, host, "lost", "could not begin", done.value), None
    return open_reply(answer.rank, done.value)
