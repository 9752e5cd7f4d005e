"""Run a marked test: send it to a pool of ranks, and report it as one test."""

from __future__ import annotations

import os
import re
import socket
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import dropwhile
from multiprocessing.connection import Connection
from typing import Any

import pytest

from ..errors import PeerError
from ..spawning import dump_call, first_cause, open_reply
from .merging import merge, merge_late
from .pool import Answer, Pools
from .rank import RunOptions, RunTest, Task, Warned

# options that ranks do not inherit: selection and distribution of tests, files written once, and other
# plugins' work
# fmt: off
_NOT_FOR_RANKS = {
    "basetemp", "cacheclear", "cacheshow", "collectonly", "debug", "deselect", "dist", "distload",
    "failedfirst", "file_or_dir", "junitxml", "keyword", "lf", "log_file", "log_file_mode",
    "looponfail", "markexpr", "maxfail", "maxprocesses", "newfirst", "numprocesses", "plugins",
    "px", "setuponly", "setupplan", "setupshow", "stepwise", "stepwise_reset", "stepwise_skip",
    "trace", "tx", "usepdb", "xmlpath",
}
# fmt: on
_COVERAGE_SETTINGS = ("source", "branch", "omit", "include")


def run_on_ranks(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Run a marked test and report it, in place of pytest."""
    hook = item.ihook
    hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports = _reports(item, nextitem)

    def end_fixtures() -> None:  # of the module's other tests, in this process
        item.session._setupstate.teardown_exact(nextitem)

    ending = pytest.CallInfo.from_call(end_fixtures, "teardown")
    if ending.excinfo is not None:
        reports.append(hook.pytest_runtest_makereport(item=item, call=ending))
    for report in reports:
        hook.pytest_runtest_logreport(report=report)
    hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)


def call_on_ranks(
    config: pytest.Config,
    fn: Callable[..., Any],
    nprocs: int,
    args: tuple[Any, ...],
    timeout: float,
    join: bool,
    fresh: bool,
) -> list[Any]:
    """Call a function on the ranks of this run; see `on_ranks`."""
    # joining is slow on a busy machine
    patience = max(timeout, float(config.getini("ranks_timeout")))
    task = Task(dump_call("on_ranks", fn, args), join, patience, os.getcwd(), sys.path)
    answers = _pools_of(config).run(nprocs, task, timeout, fresh)
    for answer in answers:
        if answer.done is not None:
            sys.stdout.write(answer.done.output)
    return _results(answers, timeout)


def _results(answers: list[Answer], timeout: float) -> list[Any]:
    """Return the ranks' results, or raise the error of the first that failed."""
    outcomes = [(answer.rank, *_outcome(answer)) for answer in answers if not answer.stack]
    errors = [(rank, error) for rank, error, _ in outcomes if error is not None]
    if errors:
        raise first_cause(errors)
    late = [f"rank {answer.rank}:\n{answer.stack}" for answer in answers if answer.stack]
    if late:
        stacks = "\n".join(late)
        raise TimeoutError(f"on_ranks() ended after {timeout:g} s; not finished:\n{stacks}")
    return [result for _, _, result in outcomes]


def _outcome(answer: Answer) -> tuple[BaseException | None, Any]:
    """Return the error of a rank, or None and its result."""
    host = socket.gethostname()
    done = answer.done
    if done is None:
        return PeerError(answer.rank, host, "lost", answer.problem), None
    if isinstance(done.value, str):
        rank = answer.rank if done.heard_of is None else done.heard_of
        return PeerError(rank, host, "lost", "could not start", done.value), None
    return open_reply(answer.rank, done.value)


def _pools_of(config: pytest.Config) -> Pools:
    """Return the ranks of this run; the first test that needs ranks starts them."""
    state = config.__dict__
    if "_ddpkit_pool" not in state:

        def report_late(by_rank: list[list[Any]]) -> None:
            for report in merge_late(config, by_rank):
                _log_late(config, report)

        state["_ddpkit_pool"] = Pools(_run_options(config), report_late)
    pools: Pools = state["_ddpkit_pool"]
    return pools


def _log_late(config: pytest.Config, report: pytest.TestReport) -> None:
    """Log a report of an earlier test."""
    log = config.hook.pytest_runtest_logreport
    for plugin in config.pluginmanager.get_plugins():
        if type(plugin).__name__ == "WorkerInteractor":
            # xdist's worker rejects a report of a test other than the current one
            worker: Any = plugin
            before = worker.item_index
            worker.item_index = [item.nodeid for item in worker.session.items].index(report.nodeid)
            log(report=report)
            worker.item_index = before
            return
    log(report=report)


def _reports(item: pytest.Item, nextitem: pytest.Item | None) -> list[pytest.TestReport]:
    """Run a test on its ranks and return its reports."""
    config = item.config
    marker: Any = item.get_closest_marker("ranks")
    usual = float(config.getini("ranks_timeout"))
    limit = float(marker.kwargs.get("timeout", usual))
    name = re.sub(r"\W", "_", item.name)[:30]
    folder = _temporary(config).mktemp(f"{name}-ranks")
    fresh = marker.kwargs.get("fresh", False)
    following = None if fresh else _next_on_these_ranks(item, nextitem)
    task = Task(
        RunTest(item.path, item.nodeid, folder, following),
        join=marker.kwargs.get("join", True),
        # one group serves all tests but the longest; joining is slow on a busy machine
        timeout=max(limit, usual),
        folder=os.getcwd(),
        path=sys.path,
    )
    answers = _pools_of(config).run(_world_size(item), task, limit, fresh)
    _record_warnings(item, answers)
    return merge(item, answers)


def _next_on_these_ranks(item: pytest.Item, nextitem: pytest.Item | None) -> str | None:
    """Return the next test with the same number of ranks; None if there is none or it needs new ones."""
    world_size = _world_size(item)
    for other in dropwhile(lambda other: other is not nextitem, item.session.items):
        marker = other.get_closest_marker("ranks")
        if marker is not None and _world_size(other) == world_size:
            return None if marker.kwargs.get("fresh", False) else other.nodeid
    return None


def _world_size(item: pytest.Item) -> int:
    """Return the number of ranks of a test, 0 if it has none."""
    params: dict[str, int] = getattr(getattr(item, "callspec", None), "params", {})
    return params.get("world_size", 0)


def _record_warnings(item: pytest.Item, answers: list[Answer]) -> None:
    """Pass the ranks' warnings to pytest, once if several ranks have the same."""
    counts: Counter[Warned] = Counter()
    for answer in answers:
        counts |= Counter(answer.warnings)
    for warned in counts.elements():
        record = {"warning_message": _warning(warned), "nodeid": item.nodeid}
        record |= {"when": "runtest", "location": None}
        item.ihook.pytest_warning_recorded.call_historic(kwargs=record)


def _warning(warned: Warned) -> warnings.WarningMessage:
    """Return a rank's warning, as a UserWarning if its class is unknown here."""
    category = getattr(sys.modules.get(warned.module), warned.category, UserWarning)
    return warnings.WarningMessage(warned.text, category, warned.filename, warned.lineno)


def _temporary(config: pytest.Config) -> pytest.TempPathFactory:
    """Return the factory of this run's temporary folders."""
    factory: pytest.TempPathFactory = config._tmp_path_factory  # type: ignore[attr-defined]
    return factory


def _run_options(config: pytest.Config) -> RunOptions:
    """Collect the start settings of this run's ranks."""
    options = {
        name: value
        for name, value in vars(config.option).items()
        if name not in _NOT_FOR_RANKS and not name.startswith("cov") and _can_be_sent(value)
    }
    return RunOptions(
        list(_arguments(config)),
        options,
        basetemp=str(_temporary(config).getbasetemp() / "rank"),
        streams=[_sendable(stream) for stream in config.__dict__["_ddpkit_streams"]],
        coverage=_coverage_settings(),
    )


def _sendable(stream: int | None) -> Connection | None:
    """Wrap a descriptor so that multiprocessing passes it on."""
    return None if stream is None else Connection(os.dup(stream))


def _arguments(config: pytest.Config) -> Iterator[str]:
    """Return the command line of a rank's pytest."""
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
    """Return how coverage is measured in this process, so that the ranks do the same."""
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
