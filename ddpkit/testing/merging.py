"""Merge the reports of several ranks: the first failure in full, a line about each other rank."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from .messages import Answer

_PHASES = ("setup", "call", "teardown")
Reports = dict[str, pytest.TestReport]  # of one rank, by phase
Sections = list[tuple[str, str]]  # captured output, with a title


def merge(item: pytest.Item, answers: list[Answer]) -> list[pytest.TestReport]:
    """Report a test as one, from its outcomes on all ranks."""
    ranks = [_reports(item, answer) for answer in answers]
    _add_echoes(item, answers, ranks)
    lost = [answer for answer in answers if answer.done is None]
    if lost:
        return [_merge_lost(item, lost, ranks)]
    merged: list[pytest.TestReport] = []
    for phase in _PHASES:
        report = _merge_phase(phase, ranks)
        if report is None:
            continue
        if any(earlier.failed for earlier in merged):
            if phase == "call":  # of ranks whose fixtures did not fail
                continue
            if report.failed and _is_echo(report):
                report.outcome = "passed"
                report.longrepr = None
        merged.append(report)
    return merged


def _reports(item: pytest.Item, answer: Answer) -> Reports:
    """Read the reports of one rank, by phase."""
    done = answer.done
    if done is None or done.heard_of is not None:
        return {}
    if isinstance(done.value, str):  # it could not begin
        return {"setup": _failure(item, "setup", done.value)}
    read = item.config.hook.pytest_report_from_serializable
    reports = [read(config=item.config, data=data) for data in done.value]
    return {report.when: report for report in reports}


def _add_echoes(item: pytest.Item, answers: list[Answer], ranks: list[Reports]) -> None:
    """Report for ranks that another's failure kept from reporting, in the phase of that failure."""
    phase = _first_failed_phase(ranks)
    for answer in answers:
        if answer.done is None or answer.done.heard_of is None:
            continue
        report = _failure(item, phase, answer.done.value)
        report.ddpkit_echo = True  # type: ignore[attr-defined]
        ranks[answer.rank] = {phase: report}


def _first_failed_phase(ranks: list[Reports]) -> str:
    for phase in _PHASES:
        if any(phase in reports and reports[phase].failed for reports in ranks):
            return phase
    return "call"


def _merge_phase(phase: str, ranks: list[Reports]) -> pytest.TestReport | None:
    """Report one phase as the most important rank does; None if no rank came to it."""
    reports = {rank: reports[phase] for rank, reports in enumerate(ranks) if phase in reports}
    if not reports:
        return None
    chosen = min(reports, key=lambda rank: _importance(reports[rank]))
    report = reports[chosen]
    report.duration = max(other.duration for other in reports.values())
    report.sections = list(_sections(reports, len(ranks)))
    if report.skipped:
        _fail_if_some_skip(report, reports, len(ranks))
    if report.failed and len(ranks) > 1:
        title = f"That was rank {chosen} of {len(ranks)}"
        _add_section(report, title, _describe_others(chosen, ranks))
    return report


def _sections(reports: dict[int, pytest.TestReport], world_size: int) -> Iterator[tuple[str, str]]:
    """Collect the ranks' output, with the rank in its title where there are several."""
    for rank, report in reports.items():
        for title, text in report.sections:
            if world_size > 1:
                title = f"{title} (rank {rank})"
            yield title, text


def _fail_if_some_skip(
    report: pytest.TestReport,
    reports: dict[int, pytest.TestReport],
    world_size: int,
) -> None:
    """Make a skip that not all ranks share a failure."""
    skipped = []
    for rank, other in reports.items():
        if other.skipped and not hasattr(other, "wasxfail"):
            skipped.append(rank)
    if skipped and len(skipped) < world_size:
        advice = "all ranks must, or none"
        report.outcome = "failed"
        report.longrepr = f"Rank {skipped[0]} skipped the test and others did not; {advice}."


def _importance(report: pytest.TestReport) -> tuple[int, float]:
    """Order reports: the smallest is the one to show."""
    when = getattr(report, "ddpkit_time", 0.0)
    passed_unexpectedly = report.longreprtext.startswith("[XPASS(strict)]")
    if report.failed and not passed_unexpectedly:
        return int(_is_echo(report)), when
    if report.skipped and hasattr(report, "wasxfail"):
        return 2, when
    if report.failed:
        return 3, when
    if report.skipped:
        return 4, when
    return 5, when


def _is_echo(report: pytest.TestReport) -> bool:
    """Return true if the report only repeats the failure of another rank."""
    return bool(getattr(report, "ddpkit_echo", False))


def _describe_others(chosen: int, ranks: list[Reports]) -> str:
    """Describe the outcome on the ranks that are not shown, a line each."""
    others = [rank for rank in range(len(ranks)) if rank != chosen]
    return "\n".join(f"rank {rank}: {_describe(ranks[rank])}" for rank in others)


def _describe(reports: Reports) -> str:
    """Describe the outcome on one rank, on one line."""
    bad = next((report for report in reports.values() if not report.passed), None)
    if bad is None:
        return "passed"
    crash = getattr(bad.longrepr, "reprcrash", None)
    if crash is None:
        return f"{bad.outcome}: {_first_line(bad.longreprtext)}"
    return f"{bad.outcome}: {crash.path}:{crash.lineno}: {_first_line(crash.message)}"


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0]


def _add_section(report: pytest.TestReport, title: str, text: str) -> None:
    add = getattr(report.longrepr, "addsection", None)
    if add is not None:
        add(title, text, "-")
    else:
        report.longrepr = f"{report.longreprtext}\n--- {title} ---\n{text}"


def _merge_lost(item: pytest.Item, lost: list[Answer], ranks: list[Reports]) -> pytest.TestReport:
    """Report a test in which ranks hung or died; a failure of another rank's own is shown first."""
    report = _failure(item, "call", _describe_lost(lost, ranks))
    report.sections = _all_sections(ranks)
    failed = [other for reports in ranks for other in reports.values() if other.failed]
    first = min(failed, key=_importance, default=None)
    if first is None or _is_echo(first):
        return report
    _add_section(first, "besides", report.longreprtext)
    first.sections = report.sections
    return first


def _describe_lost(lost: list[Answer], ranks: list[Reports]) -> str:
    lines = []
    for answer in lost:
        lines.append(f"Rank {answer.rank} of {len(ranks)} {answer.problem}.")
        if answer.stack:
            lines.append(f"It was here:\n{answer.stack}")
    for rank, reports in enumerate(ranks):
        if reports:
            lines.append(f"rank {rank}: {_describe(reports)}")
    return "\n".join(lines)


def _all_sections(ranks: list[Reports]) -> Sections:
    """Collect the output of all ranks in all phases, with the rank in its title."""
    sections: Sections = []
    for rank, reports in enumerate(ranks):
        for report in reports.values():
            for title, text in report.sections:
                sections.append((f"{title} (rank {rank})", text))
    return sections


def _failure(item: pytest.Item, phase: Any, text: str) -> pytest.TestReport:
    """Make the report of a failed phase from a text."""
    now = time.time()
    keywords: dict[str, Any] = dict.fromkeys(item.keywords, 1)
    return pytest.TestReport(
        item.nodeid,
        item.location,
        keywords,
        "failed",
        text,
        phase,
        start=now,
        stop=now,
    )
