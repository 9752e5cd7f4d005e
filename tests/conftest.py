"""Shared by all tests: `on_ranks` runs a module-level function on real ranks, and nothing may be left behind."""

from __future__ import annotations

import gc
import importlib.util
import multiprocessing
import os
import random
import re
import signal
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, settings
from processes import import_once
from workers import pytest_sessionfinish, pytest_testnodedown, pytest_xdist_make_scheduler  # noqa: F401  hooks

import ddpkit
from ddpkit import testing
from ddpkit.job import current_job

# a loaded machine draws and runs examples slowly
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

# there are more ranks than GPUs; what GPUs do is shown by tests/gpu
os.environ["CUDA_VISIBLE_DEVICES"] = ""

# several tests run at a time, on ranks: more threads than cores wait for each other, and make small work slow
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # it was imported before

# a loader's forked worker that collects a store among the garbage of tests waits for threads that it has not
os.register_at_fork(after_in_child=gc.freeze)

# torch looks up the name of each connection's other end; a name server that does not answer costs 5 s each time
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:4")

# which tests need packages that the library does not
_OF_EXAMPLES = {
    "examples/digits/*": ["sklearn", "tensorboard"],
    "examples/diffusion_policy/*": ["gymnasium_robotics", "mujoco", "pydantic", "tensorboard", "PIL"],
    "examples/shared/*": ["tqdm"],
    "examples/snakes_ddpg/*": ["numba", "tensorboard", "PIL"],
    "examples/video_deblurring/*": ["av", "skvideo", "skimage", "pydantic", "tensorboard", "PIL"],
}


def _missing(packages: list[str]) -> list[str]:
    return [package for package in packages if importlib.util.find_spec(package) is None]


# the share of the storm's tests that run, and at most how many variants of each, both drawn with a seed
_STORM_SHARE = float(os.environ.get("STORM_SHARE", "1"))
_STORM_VARIANTS = int(os.environ.get("STORM_VARIANTS", sys.maxsize))
_STORM_SEED = os.environ.get("STORM_SEED", "1")

# scripts, which train as soon as they are imported, or need packages that nothing else here does
collect_ignore = [
    "check/wrong",
    "check/correct",
    "parity/scripts",
    "tools/rehearsed_accelerate.py",
    "tools/rehearsed_lightning_fabric.py",
]
collect_ignore_glob = [files for files, packages in _OF_EXAMPLES.items() if _missing(packages)]


def pytest_configure() -> None:
    """Let Python keep compiled modules, also where it is told not to: hundreds of processes would compile them anew.

    And let what tests start hear of Ctrl-C, which a shell has runs in the background ignore.
    """
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_report_header() -> list[str]:
    """Say which tests are left out, so that nobody takes them for passed."""
    header = [f"left out: {files}, without {_missing(_OF_EXAMPLES[files])}" for files in collect_ignore_glob]
    if os.environ.keys() & {"STORM_SHARE", "STORM_VARIANTS"}:
        share = f"STORM_SHARE={_STORM_SHARE} STORM_VARIANTS={_STORM_VARIANTS} STORM_SEED={_STORM_SEED}"
        header.append(f"left out: much of the storm, by {share}")
    return header


def pytest_collection_finish() -> None:
    """Start the process from which all others are forked, before a test starts it with less in it."""
    if "DDPKIT_TESTING_RANKS" not in os.environ:
        import_once()
    gc.freeze()  # collecting garbage need not look through torch and the tests each time


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave variants out if asked to, and skip tests whose packages are not installed."""
    variants: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("storm") and not config.getoption("lf", False):
            variants[item.nodeid.partition("[")[0]].append(item)
    left_out: set[pytest.Item] = set()
    for test, each in variants.items():
        draw = random.Random(f"{_STORM_SEED} {test}")
        kept = int(_STORM_SHARE * min(len(each), _STORM_VARIANTS) + draw.random())  # a whole number, right on average
        left_out.update(draw.sample(each, len(each) - min(len(each), kept)))
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]
    for item in items:
        packages = [package for marker in item.iter_markers("peers") for package in marker.args]
        if re.search("digits|logged_metrics", item.name):
            packages += _OF_EXAMPLES["examples/digits/*"]
        if missing := _missing(packages):
            item.add_marker(pytest.mark.skip(reason=f"needs {', '.join(missing)}"))


def _call(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("default")  # the plugin's ranks make errors of them, as pytest does here
        return fn(*args)


def _join_and_call(fn: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> Any:
    with ddpkit.distributed(timeout=timedelta(seconds=timeout)):
        return _call(fn, args)


def on_ranks(fn: Callable[..., Any], nprocs: int, *args: Any, timeout: float | None = None, fresh: bool = False) -> Any:
    """Run `fn(*args)` on `nprocs` warm ranks that have called `setup()`; return the results by rank.

    `timeout` in seconds, that of a `setup()` for this call alone; without, the ranks stay joined from one call to the
    next. Ask for fresh ranks if `fn` changes modules or classes of others.
    """
    if timeout is None:
        return testing.on_ranks(_call, nprocs, fn, args, timeout=180.0, fresh=fresh)
    return testing.on_ranks(_join_and_call, nprocs, fn, args, timeout, timeout=4 * timeout, join=False, fresh=fresh)


def same(one: Any, other: Any) -> bool:
    """Whether two states, of tensors in dictionaries and lists, are equal to the last bit."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    before = _environment()
    yield
    if "DDPKIT_TESTING_RANKS" in os.environ:  # a rank of a marked test, after which the plugin looks itself
        return
    assert not dist.is_initialized(), "the test left a process group behind"
    joined = current_job.job is not None
    ddpkit.teardown()  # or the tests after it would fail
    assert not joined, "the test left setup() behind, also where it is alone"
    assert _environment() == before, "the test changed the environment"
    left = [child for child in multiprocessing.active_children() if not child.name.startswith("warm rank")]
    assert not left, "the test left a process behind"


def _environment() -> dict[str, str]:
    theirs = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR")  # set by pytest, and by torch's first optimizer
    return {name: value for name, value in os.environ.items() if name not in theirs}
