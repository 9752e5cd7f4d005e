"""Merge the reports of several ranks: the first failure in full, one line for each other rank."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import pytest

from .pool import Answer

_PHASES = ("setup", "call", "teardown")
Reports = list[pytest.TestReport]  # of one rank, in order
ByRank = dict[int, pytest.TestReport]  # of the same phase


def merge(item: pytest.Item, answers: list[Answer]) -> Reports:
    """Report a test as one, from its outcomes on all ranks."""
    ranks = [_reports(item, answer) for answer in answers]
    lost = [answer for answer in answers if answer.done is None]
    if lost:
        return [_merge_lost(item, lost, ranks)]
    _move_echoes(ranks)
    merged: Reports = []
    for phase in _PHASES:
        reports = _of_phase(phase, ranks)
        failed_before = any(map(_has_failed, merged))
        # the calls of ranks whose fixtures did not fail
        if not reports or (failed_before and phase == "call"):
            continue
        report = _merge_alike(reports, ranks)
        if failed_before and report.failed and _is_echo(report):
            report.outcome = "passed"
            report.longrepr = None
        merged.append(report)
    return merged


def merge_late(config: pytest.Config, by_rank: list[list[Any]]) -> Reports:
    """Report each failure in fixtures' teardown, sent by ranks after a test, as one."""
    ranks = [_read(config, sent) for sent in by_rank]
    merged: Reports = []
    for nodeid in dict.fromkeys(report.nodeid for reports in ranks for report in reports):
        of_test = [[report for report in reports if report.nodeid == nodeid] for reports in ranks]
        report = _merge_alike(_of_phase("teardown", of_test), of_test)
        if not _is_echo(report):
            merged.append(report)
    return merged


def _read(config: pytest.Config, sent: list[Any]) -> Reports:
    read = config.hook.pytest_report_from_serializable
    return [read(config=config, data=data) for data in sent]


def _reports(item: pytest.Item, answer: Answer) -> Reports:
    """Read the reports of one rank, or create one if it could not begin, or a peer's failure ended it."""
    done = answer.done
    if done is None or not isinstance(done.value, str):
        return _read(item.config, answer.reports)
    report = _failure(item, "setup", done.value)
    report.__dict__["ddpkit_echo"] = done.heard_of is not None
    return [report]


def _has_failed(report: pytest.TestReport) -> bool:
    """Return whether a phase failed, as expected or not."""
    return report.failed or hasattr(report, "wasxfail")


def _is_echo(report: pytest.TestReport) -> bool:
    """Return whether the report only repeats the failure of another rank."""
    return bool(getattr(report, "ddpkit_echo", False))


def _move_echoes(ranks: list[Reports]) -> None:
    """Move an echo to the phase of the failure that it repeats: its own rank may have been in an earlier one."""
    failed = [report for reports in ranks for report in reports if _has_failed(report)]
    causes = [report.when for report in failed if not _is_echo(report)]
    if not causes:
        return
    first = min(causes, key=_PHASES.index)
    for report in failed:
        if _is_echo(report) and _PHASES.index(report.when) < _PHASES.index(first):
            report.when = first


def _of_phase(phase: str, ranks: list[Reports]) -> ByRank:
    """Find each rank's report of a phase."""
    found: ByRank = {}
    for rank, reports in enumerate(ranks):
        for report in reports:
            if report.when == phase:
                found[rank] = report
    return found


def _merge_alike(alike: ByRank, ranks: list[Reports]) -> pytest.TestReport:
    """Choose the most important of several ranks' reports of one phase, and add the others' outcomes.

    Args:
        alike: The reports.
        ranks: The reports that describe the ranks not shown.
    """
    chosen = min(alike, key=lambda rank: _importance(alike[rank]))
    report = alike[chosen]
    report.duration = max(other.duration for other in alike.values())
    report.sections = _sections(alike.items(), len(ranks))
    properties = [entry for other in alike.values() for entry in other.user_properties]
    report.user_properties = list({repr(entry): entry for entry in properties}.values())
    disagreement = _disagreement(alike) if report.skipped else ""
    if disagreement:
        report.outcome = "failed"
        report.longrepr = disagreement
    if report.failed and len(ranks) > 1:
        others = [rank for rank in range(len(ranks)) if rank != chosen]
        lines = [f"rank {rank}: {_describe(ranks[rank])}" for rank in others]
        _add_section(report, f"That was rank {chosen} of {len(ranks)}", "\n".join(lines))
    return report


def _importance(report: pytest.TestReport) -> tuple[int, float]:
    """Return the sort key of a report: the smallest is shown."""
    if report.skipped and hasattr(report, "wasxfail"):
        order = 1
    elif _passed_unexpectedly(report):
        order = 3
    elif report.failed:
        order = 2 if _is_echo(report) else 0  # an echo of an expected failure is expected, too
    else:
        order = 4 if report.skipped else 5
    return order, getattr(report, "ddpkit_time", 0.0)


def _passed_unexpectedly(report: pytest.TestReport) -> bool:
    return report.failed and report.longreprtext.startswith("[XPASS(strict)]")


def _disagreement(alike: ByRank) -> str:
    """Describe a skip that only some ranks made; "" if there is none."""
    skipped = [rank for rank, report in alike.items() if report.skipped and not hasattr(report, "wasxfail")]
    if 0 < len(skipped) < len(alike):
        return f"Rank {skipped[0]} skipped the test, other ranks did not. Skip it on all ranks or on none."
    return ""


def _sections(
    reports: Iterable[tuple[int, pytest.TestReport]],
    world_size: int,
) -> list[tuple[str, str]]:
    """Collect the output of reports by rank, with the rank in its title if there are several."""
    found = []
    for rank, report in reports:
        mark = f" (rank {rank})" if world_size > 1 else ""
        found += [(f"{title}{mark}", text) for title, text in report.sections]
    return found


def _describe(reports: Reports) -> str:
    """Describe the outcome on one rank, on one line."""
    if not reports:
        return "nothing"
    bad = next((report for report in reports if not report.passed), None)
    if bad is None:
        return "passed"
    crash = getattr(bad.longrepr, "reprcrash", None)
    text = bad.longreprtext
    if crash is not None:
        text = f"{crash.path}:{crash.lineno}: {crash.message}"
    return f"{bad.outcome}: {text.strip().splitlines()[0]}"


def _add_section(report: pytest.TestReport, title: str, text: str) -> None:
    add = getattr(report.longrepr, "addsection", None)
    if add is not None:
        add(title, text, "-")
    else:
        report.longrepr = f"{report.longreprtext}\n--- {title} ---\n{text}"


def _merge_lost(item: pytest.Item, lost: list[Answer], ranks: list[Reports]) -> pytest.TestReport:
    """Report a test in which ranks hung or died, but first another rank's own failure."""
    lines = []
    for answer in lost:
        lines.append(f"Rank {answer.rank} of {len(ranks)} {answer.problem}.")
        if answer.stack:
            lines.append(f"It was here:\n{answer.stack}")
    lost_ranks = [answer.rank for answer in lost]
    for rank, reports in enumerate(ranks):
        outcome = _describe(reports)
        if reports and not (rank in lost_ranks and outcome == "passed"):  # a lost rank's fixtures alone passed
            lines.append(f"rank {rank}: {outcome}")
    report = _failure(item, "call", "\n".join(lines))
    every = [(rank, report) for rank, reports in enumerate(ranks) for report in reports]
    report.sections = _sections(every, len(ranks))
    failed = [other for _, other in every if other.failed]
    first = min(failed, key=_importance, default=None)
    if first is None or _is_echo(first):
        return report
    _add_section(first, "besides", report.longreprtext)
    first.sections = report.sections
    return first


def _failure(item: pytest.Item, phase: Any, text: str) -> pytest.TestReport:
    """Create the report of a failed phase from a text."""
    now = time.time()
    keywords: dict[str, Any] = dict.fromkeys(item.keywords, 1)
    place = (item.nodeid, item.location, keywords)
    return pytest.TestReport(*place, "failed", text, phase, start=now, stop=now)
