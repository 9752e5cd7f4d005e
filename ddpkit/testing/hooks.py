"""Define the plugin that pytest imports at its start: the marker, its parameters and fixtures.

It imports neither torch nor ddpkit, so that runs without such tests start quickly. For the same reason a wheel has this
file beside the package, as `ddpkit_pytest`, and the rest of the plugin must not import it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import NoReturn

import pytest

_MARKER = (
    "ranks(*world_sizes, timeout=60, join=True, fresh=False): run the test on this number of ranks, for each world size"
)
_NO_WORLD_SIZE = (
    "@pytest.mark.ranks had no effect on this test: it works on functions and on methods of plain classes, not of "
    "unittest.TestCase, and must be set when tests are collected."
)
_STREAMS = "_ddpkit_streams"
_OPTIONS = {"timeout", "join", "fresh"}
_FOREVER = 1e8  # seconds
current: pytest.Config | None = None  # of the run in this process; `on_ranks` gets no configuration


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the setting for all tests."""
    parser.addini("ranks_timeout", "Default time-out, in seconds, of a test on ranks.", default="60")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> Generator[None, object, object]:
    """Copy stdout and stderr of this run before pytest captures them, for the ranks."""
    early_config.__dict__[_STREAMS] = [_copy_of(1), _copy_of(2)]
    return (yield)


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker, and check the setting for all tests."""
    config.addinivalue_line("markers", _MARKER)
    setting = config.getini("ranks_timeout")
    seconds = 0.0
    with suppress(ValueError):
        seconds = float(setting)
    if not 0 < seconds < _FOREVER:
        raise pytest.UsageError(f"ranks_timeout must be seconds above 0, got {setting!r}.")


def pytest_unconfigure(config: pytest.Config) -> None:
    """Close the copies of the streams."""
    for stream in config.__dict__.pop(_STREAMS, []):
        os.close(stream)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Turn the marker's world sizes into parameters."""
    marker = metafunc.definition.get_closest_marker("ranks")
    if marker is None:
        return
    _check(marker, metafunc.definition.nodeid)
    if "world_size" not in metafunc.fixturenames:
        metafunc.fixturenames.append("world_size")
    metafunc.parametrize("world_size", marker.args, ids="{}ranks".format)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Run a marked test on its ranks; leave all others to pytest."""
    if not _is_for_ranks(item) or not _has_world_size(item):
        return None
    from ddpkit.testing.dispatch import run_on_ranks

    run_on_ranks(item, nextitem)
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Raise for a marked test without a number of ranks."""
    if _is_for_ranks(item) and not _has_world_size(item):
        pytest.fail(_NO_WORLD_SIZE, pytrace=False)


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, object, object]:
    """End all ranks after the last test or an interrupt, before coverage is combined."""
    global current
    if in_rank(session.config):
        return (yield)
    outer = current  # a run may be inside another run's test, like pytester's
    current = session.config
    try:
        return (yield)
    finally:
        current = outer
        pools = session.config.__dict__.pop("_ddpkit_pool", None)
        if pools is not None:
            pools.close()


@pytest.fixture
def parity() -> Callable[..., None]:
    """Return a function that runs `python -m ddpkit parity`, and fails unless ranks train what one process trains."""

    def compare(script: str, *args: str, reference: str = "", ranks: int = 2) -> None:
        words = ["-n", f"{ranks}", *(["--reference", f"{reference}"] if reference else []), f"{script}", *args]
        done = subprocess.run(
            [sys.executable, "-m", "ddpkit", "parity", *words], capture_output=True, text=True, check=False
        )
        if done.returncode:
            pytest.fail(done.stdout or done.stderr, pytrace=False)

    return compare


@pytest.fixture
def rank(request: pytest.FixtureRequest) -> int:
    """Return this process's rank, in a test marked `ranks`."""
    if not in_rank(request.config):
        _refuse("rank")
    return int(os.environ["RANK"])


@pytest.fixture
def world_size(request: pytest.FixtureRequest) -> int:
    """Return the number of ranks, a parameter of tests marked `ranks`."""
    _refuse("world_size")


def in_rank(config: pytest.Config) -> bool:
    """Return whether this process is a rank that runs a test."""
    return "ddpkit_rank" in getattr(config, "workerinput", {})


def _has_world_size(item: pytest.Item) -> bool:
    """Return whether the marker has given the test its number of ranks."""
    return "world_size" in getattr(getattr(item, "callspec", None), "params", {})


def _is_for_ranks(item: pytest.Item) -> bool:
    return item.get_closest_marker("ranks") is not None and not in_rank(item.config)


def _refuse(fixture: str) -> NoReturn:
    pytest.fail(f"The fixture {fixture} is for tests marked with @pytest.mark.ranks(...).", pytrace=False)


def _check(marker: pytest.Mark, name: str) -> None:
    """Raise for invalid arguments of a marker; `name` is the test's."""
    if not marker.args or not all(type(size) is int and size > 0 for size in marker.args):
        raise pytest.UsageError(f"{name}: ranks() takes numbers of ranks, for example ranks(1, 2, 3); got {marker}.")
    if unknown := sorted(marker.kwargs.keys() - _OPTIONS):
        raise pytest.UsageError(f"{name}: ranks() takes {sorted(_OPTIONS)}, got {unknown}.")
    timeout = marker.kwargs.get("timeout", 1)
    if not isinstance(timeout, (int, float)) or not 0 < timeout < _FOREVER:
        raise pytest.UsageError(f"{name}: ranks() takes a timeout in seconds above 0, got {timeout!r}.")


def _copy_of(stream: int) -> int:
    try:
        return os.dup(stream)
    except OSError:  # closed, as in a service
        return os.open(os.devnull, os.O_RDWR)
