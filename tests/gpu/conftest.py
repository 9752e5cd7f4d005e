"""Run the checks where there is a GPU, skip them with the reason where there is none, and print one table."""

from __future__ import annotations

import importlib.util
import os
import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from starting import Crew

_ENOUGH = 420.0  # seconds after which no further check begins
_begun = pytest.StashKey[float]()
_EACH = pytest.param(None, marks=pytest.mark.gpus(2), id="one on each")
_COLUMNS = ("check", "result", "seconds", "reason, or what was measured")


@dataclass
class _Row:
    """What the table says of a check."""

    name: str
    result: str = "passed"
    seconds: float = 0.0
    words: str = ""


_rows: dict[str, _Row] = {}  # by the check's node id


def pytest_addoption(parser: pytest.Parser) -> None:
    help = "cuda (default); with cpu the checks that can run there do so, to be tried without a GPU"
    parser.addoption("--device", choices=["cuda", "cpu"], default="cuda", help=help)


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_begun] = time.monotonic()
    if config.getoption("--device") == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # for ranks and programs that name no device


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    device = config.getoption("--device")
    items.sort(key=lambda item: "test_examples" in item.nodeid)  # what takes long comes last
    for item in items:
        reason = _why_not(item, device)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


def _why_not(item: pytest.Item, device: str) -> str:
    """Say why a check cannot run here, "" if it can."""
    if device == "cuda" and not torch.cuda.is_available():
        return "no CUDA device"
    if device == "cpu" and item.get_closest_marker("cuda"):
        return "only on CUDA devices"
    for marker in item.iter_markers("gpus"):
        (needed,) = marker.args
        if device == "cuda" and torch.cuda.device_count() < needed:
            return f"{needed} GPUs needed, found {torch.cuda.device_count()}"
    packages = [name for marker in item.iter_markers("needs") for name in marker.args]
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    return ""


def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.monotonic() - item.config.stash[_begun] > _ENOUGH:
        pytest.skip(f"the {_ENOUGH:g} s of this run are used up")


@pytest.fixture
def device(pytestconfig: pytest.Config) -> str:
    """Return the kind of device that the checks are about."""
    return str(pytestconfig.getoption("--device"))


@pytest.fixture(params=[pytest.param(1, id="one"), pytest.param(2, id="two on it"), _EACH])
def crew(request: pytest.FixtureRequest, device: str) -> Crew:
    """Return one rank, two that share the device, and one on each device."""
    return Crew(device, request.param)


@pytest.fixture(params=[pytest.param(2, id="two on it"), _EACH])
def several_ranks(request: pytest.FixtureRequest, device: str) -> Crew:
    """Return two ranks that share the device, and one on each device."""
    return Crew(device, request.param)


@pytest.fixture(params=[pytest.param(1, id="one"), _EACH])
def ranks_over_nccl(request: pytest.FixtureRequest, device: str) -> Crew:
    """Return one rank, and one on each device: NCCL refuses those that share one."""
    return Crew(device, request.param)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep a row for each check; its report comes in three parts, or from a rank."""
    name = report.nodeid.rpartition("::")[2].removeprefix("test_").replace("_", " ")
    row = _rows.setdefault(report.nodeid, _Row(name))
    row.seconds += report.duration
    if report.skipped and isinstance(report.longrepr, tuple):
        row.result = "skipped"
        row.words = report.longrepr[2].removeprefix("Skipped: ")
    elif report.failed:
        row.result = "failed"
        row.words = _last_line(report)
    elif report.when == "call":
        row.words = str(dict(report.user_properties).get("measured", ""))


def _last_line(report: pytest.TestReport) -> str:
    """Return the error itself: its traceback stands above the table."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash else report.longreprtext
    return text.strip().splitlines()[0][:150]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    rows = [_COLUMNS]
    for row in _rows.values():
        rows.append((row.name, row.result, f"{row.seconds:.1f}", row.words))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    terminalreporter.section(f"on {_describe(config.getoption('--device'))}")
    for *cells, words in rows:
        padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
        terminalreporter.write_line("  ".join([*padded, words]).rstrip())


def _describe(device: str) -> str:
    if device == "cuda" and torch.cuda.is_available():
        device = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    return f"{device}, torch {torch.__version__}"
