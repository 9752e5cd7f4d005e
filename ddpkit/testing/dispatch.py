"""Run a marked test: send it to a pool of ranks, and report it as one test."""

from __future__ import annotations

import math
import os
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import dropwhile
from multiprocessing.connection import Connection
from typing import Any

import pytest

from ..spawning import dump_call, first_cause, lost, open_reply
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
    # end the fixtures of the module's other tests, in this process
    ending = pytest.CallInfo.from_call(partial(item.session._setupstate.teardown_exact, nextitem), "teardown")
    if ending.excinfo is not None:
        reports.append(hook.pytest_runtest_makereport(item=item, call=ending))
    for report in reports:
        hook.pytest_runtest_logreport(report=report)
    hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)


def call_on_ranks(
    config: pytest.Config, fn: Callable[..., Any], nprocs: int, args: tuple[Any, ...], timeout: float, **options: bool
) -> list[Any]:
    """Call a function on the ranks of this run; see `on_ranks`."""
    answers = _run(config, dump_call("on_ranks", fn, args), nprocs, timeout, **options)
    for answer in answers:
        sys.stdout.write(answer.output)
    opened = {
        answer.rank: open_reply(answer.rank, answer.reply or lost(answer.rank, answer.problem))
        for answer in answers
        if not answer.stack
    }
    errors = [(rank, error) for rank, (error, _) in opened.items() if error is not None]
    if errors:
        raise first_cause(errors)
    stacks = "".join(f"\nrank {answer.rank}:\n{answer.stack}" for answer in answers if answer.stack)
    if stacks:
        raise TimeoutError(f"on_ranks() ended after {timeout:g} s; not finished:{stacks}")
    return [result for _, result in opened.values()]


def _run(
    config: pytest.Config, work: RunTest | bytes, world_size: int, timeout: float, join: bool, fresh: bool
) -> list[Answer]:
    """Run a test or a call on the ranks of this run; the first one that needs ranks starts them."""
    state = config.__dict__
    if "_ddpkit_pool" not in state:
        state["_ddpkit_pool"] = Pools(_run_options(config), partial(_report_late, config))
    pools: Pools = state["_ddpkit_pool"]
    # one group serves all tests but the longest; joining is slow on a busy machine
    patience = max(timeout, float(config.getini("ranks_timeout")))
    task = Task(work, join, patience, os.getcwd(), sys.path)
    return pools.run(world_size, task, timeout, fresh)


def _report_late(config: pytest.Config, by_rank: list[list[Any]]) -> None:
    """Report each failure in fixtures' teardown, sent by ranks after a test, as one."""
    ranks = [_read(config, sent) for sent in by_rank]
    for nodeid in dict.fromkeys(report.nodeid for reports in ranks for report in reports):
        of_test = [[report for report in reports if report.nodeid == nodeid] for reports in ranks]
        report = _merge_phase(_of_phase("teardown", of_test), of_test)
        if not _is_echo(report):
            _log_late(config, report)


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
    options = {"timeout": float(config.getini("ranks_timeout")), "join": True, "fresh": False, **marker.kwargs}
    name = re.sub(r"\W", "_", item.name)[:30]
    folder = config._tmp_path_factory.mktemp(f"{name}-ranks")  # type: ignore[attr-defined]
    following = None if options["fresh"] else _next_on_these_ranks(item, nextitem)
    test = RunTest(item.path, item.nodeid, folder, following)
    answers = _run(config, test, _world_size(item), **options)
    _show_warnings(item, answers)
    return merge(item, answers)


def _next_on_these_ranks(item: pytest.Item, nextitem: pytest.Item | None) -> str | None:
    """Return the next test with the same number of ranks; None if there is none or it needs new ones."""
    world_size = _world_size(item)
    for other in dropwhile(lambda other: other is not nextitem, item.session.items):
        marker = other.get_closest_marker("ranks")
        if marker is not None and _world_size(other) == world_size:
            return None if marker.kwargs.get("fresh") else other.nodeid
    return None


def _world_size(item: pytest.Item) -> int:
    """Return the number of ranks of a test, 0 if it has none."""
    params: dict[str, int] = getattr(getattr(item, "callspec", None), "params", {})
    return params.get("world_size", 0)


def _show_warnings(item: pytest.Item, answers: list[Answer]) -> None:
    """Pass the ranks' warnings to pytest, once if several ranks have the same."""
    counts: Counter[Warned] = Counter()
    for answer in answers:
        counts |= Counter(answer.warnings)
    for module, category, text, filename, line in counts.elements():
        kind = getattr(sys.modules.get(module), category, UserWarning)  # the class may be unknown here
        message = warnings.WarningMessage(text, kind, filename, line)
        record = {"warning_message": message, "nodeid": item.nodeid, "when": "runtest", "location": None}
        item.ihook.pytest_warning_recorded.call_historic(kwargs=record)


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
        basetemp=str(config._tmp_path_factory.getbasetemp() / "rank"),  # type: ignore[attr-defined]
        # multiprocessing passes connections on
        streams=[Connection(os.dup(stream)) for stream in config.__dict__["_ddpkit_streams"]],
        coverage=_coverage_settings(),
    )


def _arguments(config: pytest.Config) -> Iterator[str]:
    """Return the command line of a rank's pytest."""
    option = config.option
    yield from ("--rootdir", str(config.rootpath), "-o", "addopts=", "-p", "no:terminal")
    if config.inipath is not None:
        yield from ("-c", str(config.inipath))
    several = {
        # a rank has imported ddpkit before its pytest
        "-W": [*(config.known_args_namespace.pythonwarnings or ()), "ignore::pytest.PytestAssertRewriteWarning"],
        "-o": option.override_ini or (),
        "-p": option.plugins or (),
    }
    for flag, values in several.items():
        for value in values:
            yield from (flag, value)  # apart: a value may be empty
    yield f"--capture={option.capture}"
    yield f"--assert={option.assertmode}"
    yield f"--import-mode={option.importmode}"
    for argument in config.args:
        yield argument.split("::")[0]


def _can_be_sent(value: Any) -> bool:
    values = value if isinstance(value, (list, tuple, set)) else [value]
    return all(isinstance(each, (str, int, float, bool, type(None))) for each in values)


def _coverage_settings() -> dict[str, Any] | None:
    """Return how coverage is measured in this process, so that the ranks do the same."""
    coverage = sys.modules.get("coverage")
    running = coverage and coverage.Coverage.current()
    if not running:
        return None
    return {
        **{name: running.get_option(f"run:{name}") for name in _COVERAGE_SETTINGS},
        "data_file": os.path.abspath(running.get_option("run:data_file")),
        "config_file": next(iter(running.config.config_files_read), False),
    }


# Merge the reports of several ranks: the first failure in full, one line for each other rank.

_PHASES = ("setup", "call", "teardown")
Reports = list[pytest.TestReport]  # of one rank, in order
ByRank = dict[int, pytest.TestReport]  # of the same phase


def merge(item: pytest.Item, answers: list[Answer]) -> Reports:
    """Report a test as one, from its outcomes on all ranks."""
    ranks = [_reports_of(item, answer, len(answers)) for answer in answers]
    _move_echoes(ranks)
    merged: Reports = []
    for phase in _PHASES:
        reports = _of_phase(phase, ranks)
        failed_before = any(map(_has_failed, merged))
        # the calls of ranks whose fixtures did not fail
        if not reports or (failed_before and phase == "call"):
            continue
        report = _merge_phase(reports, ranks)
        if failed_before and report.failed and _is_echo(report):
            report.outcome = "passed"
            report.longrepr = None
        merged.append(report)
    return merged


def _read(config: pytest.Config, sent: list[Any]) -> Reports:
    return [config.hook.pytest_report_from_serializable(config=config, data=data) for data in sent]


def _reports_of(item: pytest.Item, answer: Answer, world_size: int) -> Reports:
    """Read the reports of one rank; create one if it hung, died or could not begin, or a peer's failure ended it."""
    reports = _read(item.config, answer.reports)
    failure = answer.reply and answer.reply.failure
    if answer.problem:
        text = f"Rank {answer.rank} of {world_size} {answer.problem}."
        if answer.stack:
            text += f"\nIt was here:\n{answer.stack}"
        is_ending = len(reports) > 1 or any(map(_has_failed, reports))
        reports.append(_failure(item, "teardown" if is_ending else "call", text, ddpkit_lost=True))
    elif failure:
        reports.append(_failure(item, "setup", failure.traceback, ddpkit_echo=failure.rank != answer.rank))
    return reports


def _has_failed(report: pytest.TestReport) -> bool:
    """Return whether a phase failed, as expected or not."""
    return report.failed or hasattr(report, "wasxfail")


def _is_echo(report: pytest.TestReport) -> bool:
    """Return whether the report only repeats the failure of another rank."""
    return bool(getattr(report, "ddpkit_echo", False))


def _move_echoes(ranks: list[Reports]) -> None:
    """Move an echo to the phase of the failure that it repeats: its own rank may have been in an earlier one."""
    failed = [report for reports in ranks for report in reports if _has_failed(report)]
    first: Any = min((each.when for each in failed if not _is_echo(each)), key=_PHASES.index, default="setup")
    for report in filter(_is_echo, failed):
        report.when = max(first, report.when, key=_PHASES.index)


def _of_phase(phase: str, ranks: list[Reports]) -> ByRank:
    """Find each rank's report of a phase."""
    return {rank: report for rank, reports in enumerate(ranks) for report in reports if report.when == phase}


def _merge_phase(alike: ByRank, ranks: list[Reports]) -> pytest.TestReport:
    """Choose the most important of several ranks' reports of one phase, and add the others' outcomes.

    Args:
        alike: The reports.
        ranks: The reports that describe the ranks not shown.
    """
    chosen = min(alike, key=lambda rank: _importance(alike[rank]))
    report = alike[chosen]
    report.duration = max(other.duration for other in alike.values())
    marks = {rank: f" (rank {rank})" if len(ranks) > 1 else "" for rank in alike}
    report.sections = [(title + marks[rank], text) for rank in alike for title, text in alike[rank].sections]
    properties = {repr(entry): entry for other in alike.values() for entry in other.user_properties}
    report.user_properties = list(properties.values())
    skipped = [rank for rank, each in alike.items() if each.skipped and not hasattr(each, "wasxfail")]
    if report.skipped and 0 < len(skipped) < len(alike):
        report.outcome = "failed"
        report.longrepr = f"Rank {skipped[0]} skipped the test, other ranks did not. Skip it on all ranks or on none."
    if report.failed and len(ranks) > 1:
        title = f"That was rank {chosen} of {len(ranks)}"
        text = "\n".join(f"rank {rank}: {_describe(each)}" for rank, each in enumerate(ranks) if rank != chosen)
        shown: Any = report.longrepr
        if hasattr(shown, "addsection"):
            shown.addsection(title, text, "-")
        else:
            report.longrepr = f"{report.longreprtext}\n--- {title} ---\n{text}"
    return report


def _importance(report: pytest.TestReport) -> tuple[int, float]:
    """Return the sort key of a report: the smallest is shown."""
    if report.skipped and hasattr(report, "wasxfail"):
        order = 1
    elif report.failed and report.longreprtext.startswith("[XPASS(strict)]"):
        order = 3
    elif report.failed:
        order = 2 if _is_echo(report) else 0  # an echo of an expected failure is expected, too
    else:
        order = 4 if report.skipped else 5
    return order, getattr(report, "ddpkit_time", math.inf)


def _describe(reports: Reports) -> str:
    """Describe the outcome on one rank: on one line, but for a rank that hung or died."""
    bad = next((report for report in reports if not report.passed), None)
    if bad is None:
        return "passed" if reports else "nothing"
    crash = getattr(bad.longrepr, "reprcrash", None)
    text = f"{crash.path}:{crash.lineno}: {crash.message}" if crash else bad.longreprtext
    if not hasattr(bad, "ddpkit_lost"):
        text = text.strip().splitlines()[0]
    return f"{bad.outcome}: {text}"


def _failure(item: pytest.Item, phase: Any, text: str, **extra: Any) -> pytest.TestReport:
    """Create the report of a failed phase from a text."""
    now = time.time()
    keywords: dict[str, Any] = dict.fromkeys(item.keywords, 1)
    place = (item.nodeid, item.location, keywords)
    return pytest.TestReport(*place, "failed", text, phase, start=now, stop=now, **extra)
