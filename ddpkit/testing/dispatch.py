"""Run a marked test: send it to a pool of ranks, and report it as one test."""

from __future__ import annotations

import os
import pickle
import re
import shutil
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .merging import merge, merge_late
from .messages import Answer, RunOptions, RunTest, Task, Warned
from .pool import Pools

# options that ranks do not take over: how tests are chosen and distributed, files that are written
# once, and other plugins' work
# fmt: off
_NOT_FOR_RANKS = {
    "basetemp", "cacheclear", "cacheshow", "collectonly", "debug", "deselect", "dist", "distload",
    "failedfirst", "file_or_dir", "junitxml", "keyword", "lf", "log_file", "log_file_mode",
    "looponfail", "markexpr", "maxfail", "maxprocesses", "newfirst", "numprocesses", "plugins",
    "px", "setuponly", "setupplan", "setupshow", "stepwise", "stepwise_reset", "stepwise_skip",
    "trace", "tx", "usepdb", "xmlpath",
}
# fmt: on
_DEBUGGING = 24 * 3600.0  # seconds that a test may take while a person debugs
_COVERAGE_SETTINGS = ("source", "branch", "omit", "include")


def run_on_ranks(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Run a marked test and report it, in the place of pytest."""
    hook = item.ihook
    hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports = _reports(item, nextitem)

    def end_fixtures() -> None:  # that other tests of the module had in this process
        item.session._setupstate.teardown_exact(nextitem)

    ending = pytest.CallInfo.from_call(end_fixtures, "teardown")
    if ending.excinfo is not None:
        reports.append(hook.pytest_runtest_makereport(item=item, call=ending))
    for report in reports:
        hook.pytest_runtest_logreport(report=report)
    hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)


def pools_of(config: pytest.Config) -> Pools:
    """Return the ranks of this run; none has been started before the first test asks for them."""
    state = config.__dict__
    if "_ddpkit_pool" not in state:

        def report_late(by_rank: list[list[Any]]) -> None:
            for report in merge_late(config, by_rank):
                _log_late(config, report)

        state["_ddpkit_pool"] = Pools(_run_options(config), report_late)
    pools: Pools = state["_ddpkit_pool"]
    return pools


def _log_late(config: pytest.Config, report: pytest.TestReport) -> None:
    """Log a report of a test that ran before the present one."""
    # a worker of xdist refuses the report of another test than that which it believes to run
    workers = [plugin for plugin in config.pluginmanager.get_plugins() if _runs_by_index(plugin)]
    before = [worker.item_index for worker in workers]
    for worker in workers:
        nodeids = [item.nodeid for item in worker.session.items]
        worker.item_index = nodeids.index(report.nodeid)
    try:
        config.hook.pytest_runtest_logreport(report=report)
    finally:
        for worker, index in zip(workers, before, strict=True):
            worker.item_index = index


def _runs_by_index(plugin: Any) -> bool:
    return type(plugin).__name__ == "WorkerInteractor" and hasattr(plugin, "item_index")


def _reports(item: pytest.Item, nextitem: pytest.Item | None) -> list[pytest.TestReport]:
    """Run a test on its ranks and return its reports."""
    config = item.config
    marker = item.get_closest_marker("ranks")
    assert marker is not None
    world_size = _world_size(item)
    assert world_size is not None
    usual = float(config.getini("ranks_timeout"))
    limit = float(marker.kwargs.get("timeout", usual))
    post_mortem = bool(config.getoption("usepdb"))
    if post_mortem or config.getoption("trace"):
        usual = _DEBUGGING
        limit = _DEBUGGING
    folder = _folder(item)
    fresh = marker.kwargs.get("fresh", False)
    following = None if fresh else _next_on_these_ranks(item, nextitem)
    task = Task(
        RunTest(item.path, item.nodeid, folder, post_mortem, _shared(item, following)),
        join=marker.kwargs.get("join", True),
        # one group serves all tests but the longest; joining takes long on a loaded machine
        timeout=max(limit, usual),
        folder=os.getcwd(),
        path=sys.path,
    )
    answers = pools_of(config).run(world_size, task, limit, fresh)
    _end_run_if_asked(answers)
    _record_warnings(item, answers)
    reports = merge(item, answers)
    if not _keeps_folder(config, reports):
        shutil.rmtree(folder, ignore_errors=True)
    return reports


def _next_on_these_ranks(item: pytest.Item, nextitem: pytest.Item | None) -> pytest.Item | None:
    """Return the next test of the same number of ranks, None if there is none or it has new ones."""
    if nextitem is None:
        return None
    items = item.session.items
    start = items.index(nextitem) if nextitem in items else len(items)
    world_size = _world_size(item)
    for other in [nextitem, *items[start + 1 :]]:
        marker = other.get_closest_marker("ranks")
        if marker is not None and _world_size(other) == world_size:
            return None if marker.kwargs.get("fresh", False) else other
    return None


def _world_size(item: pytest.Item) -> int | None:
    call = getattr(item, "callspec", None)
    return None if call is None else call.params.get("world_size")


def _shared(item: pytest.Item, following: pytest.Item | None) -> str | None:
    """Name the smallest class or module that holds both tests, "" if only the session does."""
    if following is None:
        return None
    others = following.listchain()
    shared = [node.nodeid for node in item.listchain() if node in others and node.path == item.path]
    return shared[-1] if shared else ""


def _end_run_if_asked(answers: list[Answer]) -> None:
    """Call `pytest.exit()` here if the test has called it on a rank."""
    for answer in answers:
        if answer.done is not None and answer.done.ended_run is not None:
            message, code = answer.done.ended_run
            pytest.exit(f"{message} (rank {answer.rank} of {len(answers)})", returncode=code)


def _record_warnings(item: pytest.Item, answers: list[Answer]) -> None:
    """Hand the ranks' warnings to pytest, one that several ranks have once."""
    counts: Counter[Warned] = Counter()
    for answer in answers:
        counts |= Counter(answer.warnings)
    for warned in counts.elements():
        message = _warning(warned)
        record = warnings.WarningMessage(message, type(message), warned.filename, warned.lineno)
        item.ihook.pytest_warning_recorded.call_historic(
            kwargs={
                "warning_message": record,
                "nodeid": item.nodeid,
                "when": "runtest",
                "location": None,
            },
        )


def _warning(warned: Warned) -> Warning:
    """Return a rank's warning, or another with its text if it cannot be made here."""
    try:
        message = pickle.loads(warned.pickled or b"")
    except Exception:  # the class decides what it raises
        message = None
    if isinstance(message, Warning):
        return message
    return UserWarning(f"{warned.category}: {warned.text}")


def _folder(item: pytest.Item) -> Path:
    """Choose a name for the test's `tmp_path` that no other test of this run has."""
    state = item.config.__dict__
    number = state.get("_ddpkit_folders", 0) + 1
    state["_ddpkit_folders"] = number
    name = re.sub(r"\W", "_", item.name)[:30]
    return _basetemp(item.config) / f"{name}-ranks{number}"


def _keeps_folder(config: pytest.Config, reports: list[pytest.TestReport]) -> bool:
    """Return whether pytest's settings keep the test's folder."""
    policy = config.getini("tmp_path_retention_policy")
    if policy == "failed":
        return any(not report.passed for report in reports)
    return bool(policy != "none")


def _basetemp(config: pytest.Config) -> Path:
    folder: Path = config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
    return folder


def _run_options(config: pytest.Config) -> RunOptions:
    """Collect the settings with which the ranks of this run start."""
    options = {
        name: value
        for name, value in vars(config.option).items()
        if name not in _NOT_FOR_RANKS and not name.startswith("cov") and _can_be_sent(value)
    }
    return RunOptions(
        list(_arguments(config)),
        options,
        basetemp=str(_basetemp(config) / "rank"),
        streams=config.__dict__["_ddpkit_streams"],
        coverage=_coverage_settings(),
    )


def _arguments(config: pytest.Config) -> Iterator[str]:
    """Write the command line of a rank's pytest."""
    option = config.option
    yield from ("--rootdir", str(config.rootpath), "-o", "addopts=", "-p", "no:terminal")
    for setting in config.known_args_namespace.pythonwarnings or ():
        yield from ("-W", setting)
    # a rank has imported ddpkit before its pytest
    yield from ("-W", "ignore::pytest.PytestAssertRewriteWarning")
    if config.inipath is not None:
        yield from ("-c", str(config.inipath))
    for setting in option.override_ini or ():
        yield from ("-o", setting)
    for plugin in option.plugins or ():
        yield from ("-p", plugin)
    yield f"--capture={option.capture}"
    yield f"--assert={option.assertmode}"
    yield f"--import-mode={option.importmode}"
    for argument in config.args:
        yield argument.split("::")[0]


def _can_be_sent(value: Any) -> bool:
    simple = (str, int, float, bool, type(None))
    if isinstance(value, (list, tuple, set)):
        return all(isinstance(entry, simple) for entry in value)
    return isinstance(value, simple)


def _coverage_settings() -> dict[str, Any] | None:
    """Read how coverage is measured in this process, so that the ranks measure it likewise."""
    coverage = sys.modules.get("coverage")
    if coverage is None:
        return None
    running = coverage.Coverage.current()
    if running is None:
        return None
    settings = {name: running.get_option(f"run:{name}") for name in _COVERAGE_SETTINGS}
    settings["data_file"] = os.path.abspath(running.get_option("run:data_file"))
    settings["config_file"] = next(iter(running.config.config_files_read), False)
    return settings
