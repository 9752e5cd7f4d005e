"""How a rank runs a collected test: with fixtures of its own, and so that the other ranks hear of a failure."""

from __future__ import annotations

import pdb
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from ..errors import PeerError
from ..process_group import lifecycle
from .messages import Done


class Items:
    """The tests that this rank has collected so far; a plugin of the rank's pytest.

    Args:
        session: The rank's session.
        take_terminal: Waits until no other rank's debugger has the terminal.
        return_terminal: Gives it back.
    """

    def __init__(
        self, session: pytest.Session, take_terminal: Callable[[], None], return_terminal: Callable[[], None]
    ) -> None:
        self._session = session
        self._take_terminal = take_terminal
        self._return_terminal = return_terminal
        self._items: dict[str, pytest.Item] = {}
        self._files: dict[Path, str] = {}
        self._reports: list[pytest.TestReport] = []
        self._problems: list[str] = []
        self._folder = Path()
        self._failing: BaseException | None = None
        self._debug = False

    def run(self, path: Path, nodeid: str, folder: Path, debug: bool, begin: Callable[[], None]) -> Done:
        """Run one test; `folder` is its `tmp_path` on all ranks.

        Returns:
            Its reports, in a form that can be sent.
        """
        self._folder, self._debug = folder, debug
        self._reports.clear()
        item = self._collected(path, nodeid)
        if item is None:
            with lifecycle.peer_errors():  # raises if another rank's failure interrupted the import
                pass
            return Done(True, "".join(self._problems) or f"{nodeid} was not found in {path} on the ranks.\n")
        state = self._session._setupstate
        state.teardown_exact(item)  # what the tests before had and this one does not
        begin()
        assert item.parent is not None
        item.ihook.pytest_runtest_protocol(item=item, nextitem=_Next.from_parent(item.parent, name="next"))
        failed = any(report.failed or hasattr(report, "wasxfail") for report in self._reports)
        hook = self._session.config.hook
        return Done(failed, [hook.pytest_report_to_serializable(config=item.config, report=r) for r in self._reports])

    def finalise(self) -> None:
        """Finalise the fixtures that outlive a test."""
        self._session._setupstate.teardown_exact(None)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep a report of the present test."""
        report.ddpkit_time = time.monotonic()  # type: ignore[attr-defined]
        report.ddpkit_echo = isinstance(self._failing, PeerError)  # type: ignore[attr-defined]
        self._reports.append(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keep what prevents a file from being collected."""
        if report.failed:
            self._problems.append(report.longreprtext + "\n")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self) -> Generator[None, object, object]:
        """Tell the other ranks when fixtures fail."""
        self._failing = None
        return (yield from self._telling())

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self) -> Generator[None, object, object]:
        """Tell the other ranks when the test fails."""
        return (yield from self._telling())

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self) -> Generator[None, object, object]:
        """Tell the other ranks when fixtures fail at their end."""
        return (yield from self._telling())

    def pytest_exception_interact(self, node: pytest.Item, call: pytest.CallInfo[Any], report: Any) -> None:
        """Debug a failure where it happened, if the run is one with --pdb."""
        if not self._debug or call.excinfo is None or isinstance(call.excinfo.value, PeerError):
            return
        self._take_terminal()
        capture = node.config.pluginmanager.getplugin("capturemanager")
        capture.suspend(in_=True)
        print(f"\n{report.longreprtext}\n>>> post-mortem on rank {node.config.workerinput['ddpkit_rank']}")  # type: ignore[attr-defined]
        pdb.post_mortem(call.excinfo.tb)
        capture.resume()
        self._return_terminal()

    @pytest.fixture
    def tmp_path(self) -> Path:
        """One folder for the test, the same on all ranks."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return self._folder

    def _collected(self, path: Path, nodeid: str) -> pytest.Item | None:
        if nodeid not in self._items:
            self._problems.clear()
            for item in self._session.perform_collect([str(path)]):
                self._items[item.nodeid] = item
        return self._items.get(nodeid)

    def _telling(self) -> Generator[None, object, object]:
        try:
            return (yield)
        except pytest.skip.Exception:
            raise
        except BaseException as error:
            self._failing = cause = lifecycle.report(error)
            if cause is error:
                raise
            raise cause from error


class _Next(pytest.Item):
    """The next test, as far as this one is concerned: one beside it, so that only its own fixtures end with it."""

    def runtest(self) -> None:
        raise NotImplementedError
