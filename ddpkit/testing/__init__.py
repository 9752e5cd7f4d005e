"""Run tests on several real ranks: a pytest plugin, `@pytest.mark.ranks`, and `on_ranks`.

pytest imports `hooks`, which imports the rest when the first test needs ranks. No other module of ddpkit imports this
package.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

from ..arguments import as_integer

__all__ = ["on_ranks"]
T = TypeVar("T")
_FOREVER = 1e8  # seconds


def on_ranks(
    fn: Callable[..., T], nprocs: int, *args: Any, timeout: float = 60.0, join: bool = True, fresh: bool = False
) -> list[T]:
    """Call `fn(*args)` on ranks that have called `setup()`, from a test without the marker.

    Args:
        fn: A function that can be pickled: defined at the top level of a module. With cloudpickle
            installed also a lambda or an inner function.
        nprocs: Number of ranks, at least 1.
        *args: Passed to every rank as copies.
        timeout: Time-out of the call, in seconds; that of the process group is at least
            `ranks_timeout`.
        join: Whether the ranks have called `setup()`; otherwise they only have a launcher's environment variables.
        fresh: Whether to start new processes instead of using warm ones.

    Returns:
        The ranks' results, by rank.

    Raises:
        Exception: The exception of the rank that failed first; its `__cause__`, a `PeerError`, has the
            rank and traceback.
        PeerError: If a process died, or the exception cannot be pickled.
        TimeoutError: After the time-out; the message has the stack of every unfinished rank.
        TypeError: If `fn` or an argument cannot be sent to other processes.

    Example::

        def test_three_ranks_find_the_same_mean():
            assert on_ranks(mean_of_the_data, 3) == [mean_of_the_data()] * 3
    """
    nprocs = as_integer(nprocs, "nprocs")
    if not isinstance(timeout, (int, float)) or not 0 < timeout < _FOREVER:
        raise ValueError(f"timeout must be seconds above 0, got {timeout!r}.")
    config = _config_of_this_run()
    from .dispatch import call_on_ranks  # needs pytest

    return call_on_ranks(config, fn, nprocs, args, timeout, join=join, fresh=fresh)


def _config_of_this_run() -> Any:
    """Find the configuration of the run in this process.

    The plugin's module has one name when installed and another in this repository.
    """
    for name in ("ddpkit_pytest", f"{__name__}.hooks"):
        config = getattr(sys.modules.get(name), "current", None)
        if config is not None:
            return config
    raise RuntimeError("on_ranks() needs a pytest run with ddpkit's plugin; outside of one use ddpkit.spawn().")
