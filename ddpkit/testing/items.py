"""Run a collected test on a rank, and tell the other ranks if it fails."""

from __future__ import annotations

import pdb
import pickle
import time
import traceback
import warnings
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from ..errors import DdpkitError, PeerError
from ..job import current_job, lifecycle
from .messages import Done, EndedBadly, Reported, RunTest, Warned


class Items:
    """The tests that this rank has collected so far; a plugin of the rank's pytest.

    Args:
        session: The rank's session.
        take_terminal: Waits until no other rank's debugger has the terminal.
        return_terminal: Gives it back.
        send: Sends a message to the test process.
    """

    def __init__(
        self,
        session: pytest.Session,
        take_terminal: Callable[[], None],
        return_terminal: Callable[[], None],
        send: Callable[[object], None],
    ) -> None:
        self._session = session
        self._send = send
        self._take_terminal = take_terminal
        self._return_terminal = return_terminal
        self._items: dict[str, pytest.Item] = {}
        self._last: pytest.Item | None = None
        self._any_failed = False
        self._problems: list[str] = []
        self._folder = Path()
        self._failing: BaseException | None = None
        self._debug = False

    def run(self, test: RunTest, begin: Callable[[], None]) -> Done:
        """Run one test and send its reports.

        Args:
            test: The test.
            begin: Called before its fixtures, when it has been imported.
        """
        self._folder = test.folder
        self._debug = test.debug
        self._any_failed = False
        item = self._collect(test)
        if item is None:
            raise_failure_of_peer()  # it may have interrupted the import
            not_found = f"{test.nodeid} was not found in {test.path} on the ranks.\n"
            return Done(True, "".join(self._problems) or not_found)
        # those that were kept for another test than this one
        self._end_fixtures(item, group_is_whole=True)
        self._last = item
        begin()
        following = self._following(item, test.keep)
        try:
            item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
        except pytest.exit.Exception as error:
            return Done(True, None, ended_run=(error.msg, error.returncode))
        return Done(self._any_failed, None)

    def finalise(self, group_is_whole: bool) -> None:
        """Finalise the fixtures that are left.

        Args:
            group_is_whole: False if a test has failed, so that collectives fail as well.
        """
        self._end_fixtures(None, group_is_whole)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item) -> bool:
        """Run the test once, as pytest itself does.

        A plugin that repeats tests cannot do it on one rank alone.
        """
        runner = self._session.config.pluginmanager.getplugin("runner")
        return bool(runner.pytest_runtest_protocol(item, nextitem))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self,
        item: pytest.Item,
        call: pytest.CallInfo[Any],
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Note in each report what the test process cannot see; subtests copy it to their own."""
        report = yield
        error = None if call.excinfo is None else call.excinfo.value
        echo = isinstance(error, PeerError) or isinstance(self._failing, PeerError)
        report.ddpkit_time = time.monotonic()  # type: ignore[attr-defined]
        report.ddpkit_echo = echo  # type: ignore[attr-defined]
        report.ddpkit_called_xfail = isinstance(error, pytest.xfail.Exception)  # type: ignore[attr-defined]
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Send a report, one of a phase or one that a plugin has added."""
        self._any_failed |= report.failed or hasattr(report, "wasxfail")
        self._send(Reported(self._serialized(report)))

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage, when: str) -> None:
        """Send a warning of a test; the test process has collected the files itself."""
        if when == "runtest":
            self._send(_warned(warning_message))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keep the error that prevents a file from being collected."""
        if report.failed:
            self._problems.append(report.longreprtext + "\n")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self) -> Generator[None, object, object]:
        """Tell the other ranks when fixtures fail."""
        self._failing = None
        return (yield from self._report_failure())

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self) -> Generator[None, object, object]:
        """Tell the other ranks when the test fails."""
        return (yield from self._report_failure())

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self) -> Generator[None, object, object]:
        """Tell the other ranks when fixtures fail at their end."""
        return (yield from self._report_failure())

    def pytest_exception_interact(
        self,
        node: pytest.Item,
        call: pytest.CallInfo[Any],
        report: Any,
    ) -> None:
        """Debug a failure where it happened, if the run is one with --pdb."""
        if not self._debug or call.excinfo is None or isinstance(call.excinfo.value, PeerError):
            return
        self._take_terminal()
        capture = node.config.pluginmanager.getplugin("capturemanager")
        rank = node.config.workerinput["ddpkit_rank"]  # type: ignore[attr-defined]
        capture.suspend(in_=True)
        print(f"\n{report.longreprtext}\n>>> post-mortem on rank {rank}")
        pdb.post_mortem(call.excinfo.tb)
        capture.resume()
        self._return_terminal()

    @pytest.fixture
    def tmp_path(self) -> Path:
        """Make one folder for the test, the same on all ranks."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return self._folder

    def _collect(self, test: RunTest) -> pytest.Item | None:
        """Return a test, collecting its file if it is not known yet; None if it is not there."""
        if test.nodeid not in self._items:
            self._problems.clear()
            for item in self._session.perform_collect([str(test.path)]):
                self._items[item.nodeid] = item
        return self._items.get(test.nodeid)

    def _following(self, item: pytest.Item, keep: str | None) -> pytest.Item | None:
        """Stand in for the next test on these ranks, so that pytest ends what it does not share."""
        if keep is None:
            return None
        for node in item.listchain():
            if isinstance(node, pytest.Collector) and node.nodeid == keep:
                return _Next.from_parent(node, name="next")
        return _Next.from_parent(self._session, name="next")

    def _end_fixtures(self, following: pytest.Item | None, group_is_whole: bool) -> None:
        """End the fixtures that the test before had and the following has not; send if they fail."""

        def end() -> None:
            self._session._setupstate.teardown_exact(following)

        ending = pytest.CallInfo.from_call(end, "teardown")
        if ending.excinfo is None or self._last is None:
            return
        if not group_is_whole and _needs_group(ending.excinfo.value):
            return
        self._failing = None
        item = self._last
        report = item.ihook.pytest_runtest_makereport(item=item, call=ending)
        self._send(EndedBadly(self._serialized(report)))

    def _serialized(self, report: pytest.TestReport) -> Any:
        """Write a report in pytest's own form for sending."""
        config = self._session.config
        return config.hook.pytest_report_to_serializable(config=config, report=report)

    def _report_failure(self) -> Generator[None, object, object]:
        """Tell the other ranks if this part fails; raise a peer's failure where it is the cause."""
        try:
            return (yield)
        except (pytest.skip.Exception, pytest.xfail.Exception):
            raise
        except BaseException as error:
            cause = lifecycle.report(error)
            if cause is error or _is_partly_own(error):
                self._failing = error
                raise
            self._failing = cause
            raise cause from error


def raise_failure_of_peer() -> None:
    """Raise the failure of another rank, if one is known."""
    with current_job.peer_errors():
        pass


def _warned(record: warnings.WarningMessage) -> Warned:
    try:
        pickled = pickle.dumps(record.message)
    except Exception:  # the class decides what it raises
        pickled = None
    name = record.category.__name__
    return Warned(pickled, name, str(record.message), record.filename, record.lineno)


def _needs_group(error: BaseException) -> bool:
    """Return whether this may be an error only because a test has failed before."""
    parts = getattr(error, "exceptions", None)  # of several fixtures
    if parts is not None:
        return all(_needs_group(part) for part in parts)
    if isinstance(error, DdpkitError):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    return any("torch/distributed" in Path(frame.filename).as_posix() for frame in frames)


def _is_partly_own(error: BaseException) -> bool:
    """Return whether several fixtures failed, and one of them not by a peer's failure."""
    return hasattr(error, "exceptions") and not _needs_group(error)


class _Next(pytest.Item):
    """A test beside the present one, given to pytest as the next, so that only its fixtures end."""

    def runtest(self) -> None:
        raise NotImplementedError
