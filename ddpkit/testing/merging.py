"""The reports of several ranks made one: that of the rank which failed first, with a line about each of the others."""

from __future__ import annotations

import time
from typing import Any

import pytest

from .messages import Answer

_PHASES = ("setup", "call", "teardown")


def merge(item: pytest.Item, answers: list[Answer]) -> list[pytest.TestReport]:
    """Report a test as one, from what became of it on its ranks."""
    reports = [_reports(item, answer) for answer in answers]
    _add_echoes(item, answers, reports)
    lost = [answer for answer in answers if answer.done is None]
    if lost:
        return [_lost(item, lost, reports)]
    merged: list[pytest.TestReport] = []
    for phase in _PHASES:
        report = _one(phase, reports)
        if report is None:
            continue
        if any(earlier.failed for earlier in merged):
            if phase == "call":  # of ranks whose fixtures did not fail
                continue
            if report.failed and getattr(report, "ddpkit_echo", False):
                report.outcome, report.longrepr = "passed", None
        merged.append(report)
    return merged


Reports = dict[str, pytest.TestReport]


def _reports(item: pytest.Item, answer: Answer) -> Reports:
    """The reports of one rank, by phase."""
    if answer.done is None or answer.done.heard_of is not None:
        return {}
    if isinstance(answer.done.value, str):  # it could not begin
        return {"setup": _made(item, "setup", answer.done.value)}
    hook = item.config.hook
    reports = [hook.pytest_report_from_serializable(config=item.config, data=data) for data in answer.done.value]
    return {report.when: report for report in reports}


def _add_echoes(item: pytest.Item, answers: list[Answer], reports: list[Reports]) -> None:
    """Report of ranks that another's failure kept from reporting themselves, in the phase in which that one failed."""
    failed = {phase for own in reports for phase, report in own.items() if report.failed}
    phase = next((phase for phase in _PHASES if phase in failed), "call")
    for answer in answers:
        if answer.done is not None and answer.done.heard_of is not None:
            report = _made(item, phase, answer.done.value)
            report.ddpkit_echo = True  # type: ignore[attr-defined]
            reports[answer.rank] = {phase: report}


def _one(phase: str, ranks: list[Reports]) -> pytest.TestReport | None:
    """One phase's report: of the rank that failed first, else of the one that skipped or was expected to fail."""
    reports = {rank: reports[phase] for rank, reports in enumerate(ranks) if phase in reports}
    if not reports:
        return None
    chosen = min(reports, key=lambda rank: _importance(reports[rank]))
    report = reports[chosen]
    for rank, other in reports.items():
        if len(ranks) > 1:
            other.sections = [(f"{title} (rank {rank})", text) for title, text in other.sections]
        report.duration = max(report.duration, other.duration)
    report.sections = [section for other in reports.values() for section in other.sections]
    skipped = [rank for rank, other in reports.items() if other.skipped and not hasattr(other, "wasxfail")]
    if skipped and report.skipped and len(skipped) < len(ranks):
        report.outcome = "failed"
        report.longrepr = f"Rank {skipped[0]} skipped the test and others did not; all ranks must, or none."
    if report.failed and len(ranks) > 1:
        _add(report, f"That was rank {chosen} of {len(ranks)}", _others(chosen, phase, ranks))
    return report


def _importance(report: pytest.TestReport) -> tuple[int, float]:
    """Order reports: the smallest is the one to show."""
    when = getattr(report, "ddpkit_time", 0.0)
    text = report.longreprtext
    if report.failed and not text.startswith("[XPASS(strict)]"):
        return int(getattr(report, "ddpkit_echo", False)), when
    if report.skipped and hasattr(report, "wasxfail"):
        return 2, when
    if report.failed:
        return 3, when
    return 5 - int(report.skipped), when


def _others(chosen: int, phase: str, ranks: list[Reports]) -> str:
    return "\n".join(f"rank {rank}: {_short(reports)}" for rank, reports in enumerate(ranks) if rank != chosen)


def _short(reports: Reports) -> str:
    """What became of the test on a rank, on one line."""
    for report in reports.values():
        if not report.passed:
            crash = getattr(report.longrepr, "reprcrash", None)
            text = crash.message if crash is not None else report.longreprtext
            place = f"{crash.path}:{crash.lineno}: " if crash is not None else ""
            return f"{report.outcome}: {place}{text.strip().splitlines()[0]}"
    return "passed"


def _add(report: pytest.TestReport, title: str, text: str) -> None:
    add = getattr(report.longrepr, "addsection", None)
    if add is not None:
        add(title, text, "-")
    else:
        report.longrepr = f"{report.longreprtext}\n--- {title} ---\n{text}"


def _lost(item: pytest.Item, lost: list[Answer], ranks: list[Reports]) -> pytest.TestReport:
    """The report of a test in which ranks hung or died."""
    lines: list[str] = []
    for answer in lost:
        lines.append(f"Rank {answer.rank} of {len(ranks)} {answer.problem}.")
        if answer.stack:
            lines.append(f"It was here:\n{answer.stack}")
    sections: list[tuple[str, str]] = []
    for rank, reports in enumerate(ranks):
        if not reports:
            continue
        lines.append(f"rank {rank}: {_short(reports)}")
        for report in reports.values():
            sections += [(f"{title} (rank {rank})", text) for title, text in report.sections]
    report = _made(item, "call", "\n".join(lines))
    report.sections = sections
    first = [r for reports in ranks for r in reports.values() if r.failed]
    if first:
        shown = min(first, key=_importance)
        if not getattr(shown, "ddpkit_echo", False):
            _add(shown, "besides", report.longreprtext)
            shown.sections = sections
            return shown
    return report


def _made(item: pytest.Item, when: Any, text: str) -> pytest.TestReport:
    now = time.time()
    return pytest.TestReport(
        item.nodeid, item.location, dict.fromkeys(item.keywords, 1), "failed", text, when, start=now, stop=now
    )
