"""How a marked test runs, seen from the test process: sent to a crew, and reported as one test."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from .crew import Pool
from .merging import merge
from .messages import Plan, Task

# what ranks do not take over: how tests are chosen and distributed, what is written once, and other plugins' work
# fmt: off
_OURS = {
    "basetemp", "cacheclear", "cacheshow", "collectonly", "debug", "deselect", "dist", "distload",
    "failedfirst", "file_or_dir", "junitxml", "keyword", "lf", "log_file", "log_file_mode",
    "looponfail", "markexpr", "maxfail", "maxprocesses", "newfirst", "numprocesses", "plugins",
    "px", "setuponly", "setupplan", "setupshow", "stepwise", "stepwise_reset", "stepwise_skip",
    "trace", "tx", "usepdb", "xmlpath",
}
# fmt: on
_LONG = 24 * 3600.0  # seconds: while a person debugs


def run_on_ranks(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Do for a marked test what pytest does for one: run it, and report it."""
    hook = item.ihook
    hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports = _reports(item)
    ending = pytest.CallInfo.from_call(lambda: item.session._setupstate.teardown_exact(nextitem), "teardown")
    if ending.excinfo is not None:  # of fixtures that other tests of the module had in this process
        reports.append(hook.pytest_runtest_makereport(item=item, call=ending))
    for report in reports:
        hook.pytest_runtest_logreport(report=report)
    hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)


def pool_of(config: pytest.Config) -> Pool:
    """The ranks of this run; none has been started before the first test asks for them."""
    state = config.__dict__
    if "_ddpkit_pool" not in state:
        state["_ddpkit_pool"] = Pool(_plan(config))
    pool: Pool = state["_ddpkit_pool"]
    return pool


def _reports(item: pytest.Item) -> list[pytest.TestReport]:
    marker = item.get_closest_marker("ranks")
    assert marker is not None
    world_size = item.callspec.params["world_size"]  # type: ignore[attr-defined]
    debug = item.config.getoption("usepdb") or item.config.getoption("trace")
    usual = float(item.config.getini("ranks_timeout"))
    limit = float(marker.kwargs.get("timeout", usual))
    if debug:
        usual = limit = _LONG
    folder = _folder(item)
    task = Task(
        "item",
        (item.path, item.nodeid, folder, bool(item.config.getoption("usepdb"))),
        marker.kwargs.get("join", True),
        max(limit, usual),  # a group for all tests but the longest; and joining takes long on a loaded machine
        folder=os.getcwd(),
        path=sys.path,
    )
    answers = pool_of(item.config).run(world_size, task, limit, marker.kwargs.get("fresh", False))
    reports = merge(item, answers)
    policy = item.config.getini("tmp_path_retention_policy")
    if policy == "none" or (policy == "failed" and all(report.passed for report in reports)):
        shutil.rmtree(folder, ignore_errors=True)
    return reports


def _folder(item: pytest.Item) -> Path:
    """A name for the test's `tmp_path` that no other test of this run has."""
    state = item.config.__dict__
    number = state["_ddpkit_folders"] = state.get("_ddpkit_folders", 0) + 1
    name = re.sub(r"\W", "_", item.name)[:30]
    return _basetemp(item.config) / f"{name}-ranks{number}"


def _basetemp(config: pytest.Config) -> Path:
    folder: Path = config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
    return folder


def _plan(config: pytest.Config) -> Plan:
    option = config.option
    arguments = ["--rootdir", str(config.rootpath), "-o", "addopts=", "-p", "no:terminal"]
    arguments += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # a rank has imported ddpkit before its pytest
    if config.inipath is not None:
        arguments += ["-c", str(config.inipath)]
    for setting in option.override_ini or ():
        arguments += ["-o", setting]
    for plugin in option.plugins or ():
        arguments += ["-p", plugin]
    arguments += [f"--capture={option.capture}", f"--assert={option.assertmode}", f"--import-mode={option.importmode}"]
    arguments += [argument.split("::")[0] for argument in config.args]
    own = {name: value for name, value in vars(option).items() if name not in _OURS and not name.startswith("cov")}
    options = {name: value for name, value in own.items() if _can_travel(value)}
    return Plan(arguments, options, str(_basetemp(config) / "rank"), config.__dict__["_ddpkit_streams"], _coverage())


def _can_travel(value: Any) -> bool:
    simple = (str, int, float, bool, type(None))
    if isinstance(value, (list, tuple, set)):
        return all(isinstance(entry, simple) for entry in value)
    return isinstance(value, simple)


def _coverage() -> dict[str, Any] | None:
    """How coverage is measured in this process, so that the ranks measure it likewise."""
    coverage = sys.modules.get("coverage")
    measuring = coverage.Coverage.current() if coverage is not None else None
    if measuring is None:
        return None
    files = measuring.config.config_files_read
    names = {"source": "run:source", "branch": "run:branch", "omit": "run:omit", "include": "run:include"}
    settings = {name: measuring.get_option(option) for name, option in names.items()}
    settings["data_file"] = os.path.abspath(measuring.get_option("run:data_file"))
    settings["config_file"] = files[0] if files else False
    return settings
