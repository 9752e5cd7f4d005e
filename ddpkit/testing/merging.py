"""Merge the reports of several ranks: the first failure in full, a line about each other rank."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from .pool import Answer

_PHASES = ("setup", "call", "teardown")
Reports = list[pytest.TestReport]  # of one rank, in their order
ByRank = dict[int, pytest.TestReport]  # reports of the same thing


def merge(item: pytest.Item, answers: list[Answer]) -> Reports:
    """Report a test as one, from its outcomes on all ranks."""
    ranks = [_reports(item, answer) for answer in answers]
    _add_echoes(item, answers, ranks)
    _move_echoes(ranks)
    lost = [answer for answer in answers if answer.done is None]
    if lost:
        added = [report for phase in _PHASES for report in _merge_added(phase, ranks)]
        return [*added, _merge_lost(item, lost, ranks)]
    merged: Reports = []
    for phase in _PHASES:
        added = _merge_added(phase, ranks)
        report = _merge_phase(phase, ranks)
        if report is None:
            continue
        failed_before = any(map(_has_failed, merged))
        if failed_before and phase == "call":  # of ranks whose fixtures did not fail
            continue
        if failed_before and report.failed and _is_echo(report):
            report.outcome = "passed"
            report.longrepr = None
        _fail_if_part_failed(report, added)
        merged += [*added, report]
    return merged


def _has_failed(report: pytest.TestReport) -> bool:
    """Return whether a phase failed, as expected or not."""
    return report.failed or hasattr(report, "wasxfail")


def merge_late(config: pytest.Config, by_rank: list[list[Any]]) -> Reports:
    """Report as one each failure of fixtures at their end that ranks have sent after a test."""
    read = config.hook.pytest_report_from_serializable
    ranks = [[read(config=config, data=data) for data in sent] for sent in by_rank]
    merged: Reports = []
    for nodeid in dict.fromkeys(report.nodeid for reports in ranks for report in reports):
        of_test = [[report for report in reports if report.nodeid == nodeid] for reports in ranks]
        report = _merge_phase("teardown", of_test)
        if report is not None and not _is_echo(report):
            merged.append(report)
    return merged


def _reports(item: pytest.Item, answer: Answer) -> Reports:
    """Read the reports of one rank."""
    done = answer.done
    if done is not None and done.heard_of is not None:
        return []
    if done is not None and isinstance(done.value, str):  # it could not begin
        return [_failure(item, "setup", done.value)]
    read = item.config.hook.pytest_report_from_serializable
    return [read(config=item.config, data=data) for data in answer.reports]


def _add_echoes(item: pytest.Item, answers: list[Answer], ranks: list[Reports]) -> None:
    """Report for ranks that another's failure kept from reporting, in the phase of that failure."""
    phase = _first_failed_phase(ranks)
    for answer in answers:
        if answer.done is None or answer.done.heard_of is None:
            continue
        report = _failure(item, phase, answer.done.value)
        report.ddpkit_echo = True  # type: ignore[attr-defined]
        ranks[answer.rank] = [report]


def _move_echoes(ranks: list[Reports]) -> None:
    """Let an echo be of the phase of the failure that it repeats: its own rank may have been in an earlier one."""
    failed = [report for reports in ranks for report in reports if _has_failed(report)]
    causes = [report.when for report in failed if not _is_echo(report)]
    if not causes:
        return
    first = min(causes, key=_PHASES.index)
    for report in failed:
        if _is_echo(report) and _PHASES.index(report.when) < _PHASES.index(first):
            report.when = first


def _first_failed_phase(ranks: list[Reports]) -> str:
    for phase in _PHASES:
        if any(report.failed for report in _of_phase(phase, ranks).values()):
            return phase
    return "call"


def _of_phase(phase: str, ranks: list[Reports]) -> ByRank:
    """Find pytest's own report of a phase on each rank: it comes last, when the phase has ended."""
    found: ByRank = {}
    for rank, reports in enumerate(ranks):
        for report in reports:
            if report.when == phase and type(report) is pytest.TestReport:  # a subtest's is a subclass
                found[rank] = report
    return found


def _added_in(phase: str, ranks: list[Reports]) -> list[ByRank]:
    """Find the reports that plugins have added to a phase, such as those of subtests.

    The first of ranks that bear one name are reports of the same thing, so are the second, and so on.
    """
    own = _of_phase(phase, ranks)
    found: dict[tuple[str | None, int], ByRank] = {}
    for rank, reports in enumerate(ranks):
        times: Counter[str | None] = Counter()
        for report in reports:
            if report.when != phase or report is own.get(rank):
                continue
            name = report.head_line
            times[name] += 1
            found.setdefault((name, times[name]), {})[rank] = report
    return list(found.values())


def _merge_phase(phase: str, ranks: list[Reports]) -> pytest.TestReport | None:
    """Report one phase as the most important rank does; None if no rank came to it."""
    reports = _of_phase(phase, ranks)
    if not reports:
        return None
    chosen, report = _merge_alike(reports, len(ranks))
    if report.failed and len(ranks) > 1:
        _add_section(report, _title(chosen, ranks), _describe_others(chosen, ranks))
    return report


def _merge_added(phase: str, ranks: list[Reports]) -> Reports:
    """Report what plugins have added to a phase, each thing once."""
    merged: Reports = []
    for reports in _added_in(phase, ranks):
        chosen, report = _merge_alike(reports, len(ranks))
        if report.failed and _is_echo(report):  # the rank that is the cause reports it
            continue
        if report.failed and len(ranks) > 1:
            only_these = [[reports[rank]] if rank in reports else [] for rank in range(len(ranks))]
            _add_section(report, _title(chosen, ranks), _describe_others(chosen, only_these))
        merged.append(report)
    return merged


def _merge_alike(reports: ByRank, world_size: int) -> tuple[int, pytest.TestReport]:
    """Choose the most important of several ranks' reports, and add to it what all must say."""
    chosen = min(reports, key=lambda rank: _importance(reports[rank]))
    report = reports[chosen]
    report.duration = max(other.duration for other in reports.values())
    report.sections = list(_sections(reports.items(), world_size))
    report.user_properties = _user_properties(reports)
    if report.skipped:
        _fail_unless_agreed(report, reports)
    return chosen, report


def _fail_if_part_failed(report: pytest.TestReport, added: Reports) -> None:
    """Make a phase that passed fail if a report that was added to it failed, as pytest does."""
    failures = sum(part.failed for part in added)
    if report.passed and failures:
        report.outcome = "failed"
        report.longrepr = f"contains {failures} failed subtest{'s' if failures > 1 else ''}"


def _user_properties(reports: ByRank) -> list[tuple[str, object]]:
    """Collect what the ranks have recorded for files of results, the same thing once."""
    found: dict[str, tuple[str, object]] = {}
    for report in reports.values():
        for entry in report.user_properties:
            found.setdefault(repr(entry), entry)
    return list(found.values())


def _sections(
    reports: Iterable[tuple[int, pytest.TestReport]],
    world_size: int,
) -> Iterator[tuple[str, str]]:
    """Collect the output of reports with their ranks, the rank in its title where there are several."""
    for rank, report in reports:
        for title, text in report.sections:
            if world_size > 1:
                title = f"{title} (rank {rank})"
            yield title, text


def _fail_unless_agreed(report: pytest.TestReport, reports: ByRank) -> None:
    """Make a skip, or a call of `pytest.xfail()`, that not all ranks share a failure."""
    advice = "all ranks must, or none"
    skipped = [rank for rank, other in reports.items() if _is_skip(other)]
    if skipped and len(skipped) < len(reports):
        report.outcome = "failed"
        report.longrepr = f"Rank {skipped[0]} skipped the test and others did not; {advice}."
    callers = [rank for rank, other in reports.items() if getattr(other, "ddpkit_called_xfail", False)]
    if callers and not all(map(_expects_failure, reports.values())):
        report.outcome = "failed"
        report.longrepr = (
            f"Rank {callers[0]} called pytest.xfail() ({reports[callers[0]].wasxfail}) and others did not; {advice}. "
            "If any rank may fail, use @pytest.mark.xfail."
        )
    if report.failed and hasattr(report, "wasxfail"):
        del report.wasxfail


def _is_skip(report: pytest.TestReport) -> bool:
    return report.skipped and not hasattr(report, "wasxfail")


def _expects_failure(report: pytest.TestReport) -> bool:
    """Return whether the rank was expected to fail, also if it did not."""
    return hasattr(report, "wasxfail") or _passed_unexpectedly(report)


def _passed_unexpectedly(report: pytest.TestReport) -> bool:
    return report.failed and report.longreprtext.startswith("[XPASS(strict)]")


def _importance(report: pytest.TestReport) -> tuple[int, float]:
    """Order reports: the smallest is the one to show."""
    when = getattr(report, "ddpkit_time", 0.0)
    if report.skipped and hasattr(report, "wasxfail"):
        return 1, when
    if _passed_unexpectedly(report):
        return 3, when
    if report.failed:
        # an echo of an expected failure is expected, too
        return 2 if _is_echo(report) else 0, when
    if report.skipped:
        return 4, when
    return 5, when


def _is_echo(report: pytest.TestReport) -> bool:
    """Return whether the report only repeats the failure of another rank."""
    return bool(getattr(report, "ddpkit_echo", False))


def _describe_others(chosen: int, ranks: list[Reports]) -> str:
    """Describe the outcome on the ranks that are not shown, a line each."""
    others = [rank for rank in range(len(ranks)) if rank != chosen]
    return "\n".join(f"rank {rank}: {_describe(ranks[rank])}" for rank in others)


def _describe(reports: Reports) -> str:
    """Describe the outcome on one rank, on one line."""
    if not reports:
        return "nothing"
    bad = next((report for report in reports if not report.passed), None)
    if bad is None:
        return "passed"
    crash = getattr(bad.longrepr, "reprcrash", None)
    if crash is None:
        return f"{bad.outcome}: {_first_line(bad.longreprtext)}"
    return f"{bad.outcome}: {crash.path}:{crash.lineno}: {_first_line(crash.message)}"


def _title(chosen: int, ranks: list[Reports]) -> str:
    return f"That was rank {chosen} of {len(ranks)}"


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
    every = [(rank, report) for rank, reports in enumerate(ranks) for report in reports]
    report.sections = list(_sections(every, len(ranks)))
    own = [other for phase in _PHASES for other in _of_phase(phase, ranks).values()]
    failed = [other for other in own if other.failed]
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
