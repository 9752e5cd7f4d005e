"""Run as a warm rank: wait for tasks, run them in a pytest of its own, and clean up after each."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Generator
from contextlib import suppress
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import pytest
import torch
import torch.distributed as dist

from ..errors import DdpkitError, PeerError
from ..job import current_job, lifecycle
from ..launch.process_tree import child_processes
from ..spawning import call_and_reply, lost, replace_environment
from ..stop import put_back_unused
from ..torch_internals import groups
from ..watch import main_thread, stop_agreement, thread

# The messages between the test process and its ranks. A rank sends pairs: the name of a field of `pool.Answer`,
# and its value, or an entry of its list.


class RunOptions(NamedTuple):
    """How to start the ranks of a run; the same for all.

    Attributes:
        arguments: pytest's command line in the ranks.
        options: Values of pytest's options that the ranks inherit.
        basetemp: Parent of the ranks' own temporary folders.
        streams: Copies of this process's stdout and stderr.
        coverage: Arguments for `coverage.Coverage` in a rank, None if coverage is not measured.
    """

    arguments: list[str]
    options: dict[str, Any]
    basetemp: str
    streams: list[Connection]
    coverage: dict[str, Any] | None


class RunTest(NamedTuple):
    """A task that runs a collected test.

    Attributes:
        path: File of the test.
        nodeid: pytest's name of the test.
        folder: Its `tmp_path`, on all ranks.
        following: Name of the next test on these ranks, or None.
    """

    path: Path
    nodeid: str
    folder: Path
    following: str | None


class Task(NamedTuple):
    """A task for all ranks of a pool.

    Attributes:
        work: A test to run, or a call from `dump_call`.
        join: Whether the ranks call `setup()` first.
        timeout: Time-out of the process group created for it, in seconds.
        folder: Working directory.
        path: `sys.path`.
    """

    work: RunTest | bytes
    join: bool
    timeout: float
    folder: str
    path: list[str]


# a warning that the rank's pytest recorded in a test: the module and name of its class, its text, file and line
Warned = tuple[str, str, str, str, int]


def main(connection: Connection, options: RunOptions, rank: int) -> None:
    """Run as a rank until the test process ends it, or is gone."""
    os.environ.pop("PYTEST_ADDOPTS", None)
    _take_streams(options.streams)
    gc.freeze()  # pytest collects garbage often, but need not scan torch's modules
    coverage = _start_coverage(options.coverage)
    arguments = [*options.arguments, f"--basetemp={options.basetemp}-{os.getpid()}"]
    code = pytest.main(arguments, plugins=[RankPlugin(connection, options, rank)])
    if coverage is not None:
        coverage.stop()
        coverage.save()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(code))  # without waiting for threads that a test may have left


def _take_streams(streams: list[Connection]) -> None:
    """Use the test process's streams instead of those of the process that forked this."""
    for number, stream in enumerate(streams, 1):
        os.dup2(stream.fileno(), number)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", closefd=False, buffering=1)


def _start_coverage(settings: dict[str, Any] | None) -> Any:
    if settings is None:
        return None
    import coverage

    if coverage.Coverage.current() is not None:  # coverage starts itself in new processes
        return None
    running = coverage.Coverage(data_suffix=True, **settings)
    running.start()
    return running


class RankPlugin:
    """Make a rank's pytest run the tasks that arrive, instead of collecting tests itself."""

    def __init__(self, connection: Connection, options: RunOptions, rank: int) -> None:
        self._connection = connection
        self._options = options
        self._rank = rank
        self._store_port: str | None = None  # of the store of the current group
        self._session: Any = None
        self._items: dict[str, pytest.Item] = {}  # collected tests
        self._last: pytest.Item | None = None
        self._problems: list[str] = []  # errors of collection
        self._failing: BaseException | None = None
        self._show_warning = warnings.showwarning

    @pytest.hookimpl(tryfirst=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        """Inherit the test process's options, and tell other plugins that this run is a part."""
        vars(config.option).update(self._options.options)
        warnings.showwarning = lambda *args, **kwargs: None  # other plugins': the test process has shown them
        config.__dict__["workerinput"] = {
            **self._options.options,
            "workerid": f"rank{self._rank}",
            "workercount": 1,
            "testrunuid": "ranks",
            "mainargv": sys.argv,
            "ddpkit_rank": self._rank,
        }

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> bool:
        """Collect nothing yet."""
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run the tasks that arrive, until none is left."""
        self._session = session
        warnings.showwarning = self._show_warning
        self._arguments = [*sys.argv]
        self._threads = torch.get_num_threads()
        group_is_whole = False
        try:
            group_is_whole = self._run_tasks()
        except PeerError:
            # a rank died between tests or after its part of one; the test process replaces all
            lifecycle.teardown()
        with suppress(PeerError):
            self._end_fixtures(None, group_is_whole)
        lifecycle.teardown()
        return True

    # Tasks, and the cleanup after them.

    def _run_tasks(self) -> bool:
        """Run tasks; return true if the ranks are still as they were before the last one."""
        before: Traces | None = None
        is_intact = True
        while (message := self._wait()) is not None:
            is_intact = False
            if message != "clean up":
                before = self._run(*message)
                if before is None:
                    lifecycle.teardown()  # the process will not be used again
            elif before is not None:  # all ranks have done it
                is_intact = self._clean_up(before)
        return is_intact

    def _wait(self) -> Any:
        """Wait for the test process, without log records about waiting ranks.

        Returns:
            A `Task` and its environment variables; "clean up" when all ranks have done it; None at the
            end.
        """
        logger = thread.log
        logger.disabled = True
        try:
            return self._connection.recv()
        except (EOFError, OSError):  # the test process has gone
            os._exit(1)
        finally:
            logger.disabled = False

    def _run(self, task: Task, env: dict[str, str]) -> Traces | None:
        """Run a task and send its outcome; return the state before it, None if it failed."""
        try:
            self._prepare(task, env)
            before = traces()
            failed = self._do(task)
        except PeerError as error:  # between the parts of the test that would report it
            # sent while it is being handled, so that it is not raised again
            self._send("failed", self._cannot_begin(error.rank, f"PeerError: {error}"))
            return None
        except Exception:  # it cannot join, for example
            self._send("failed", self._cannot_begin(self._rank, traceback.format_exc()))
            return None
        self._send("failed", failed)
        return None if failed else before

    def _prepare(self, task: Task, env: dict[str, str]) -> None:
        """Set the task's environment, and join or leave the group as it requires."""
        os.chdir(task.folder)
        sys.path[:] = task.path
        replace_environment(env)
        port = os.environ["MASTER_PORT"] if task.join else None
        if self._store_port != port:
            self._leave()
        reset(self._arguments, self._threads)
        if task.join and self._store_port is None:
            lifecycle.setup(timeout=timedelta(seconds=task.timeout))
            self._store_port = port
        self._group: object = dist.group.WORLD

    def _leave(self) -> None:
        lifecycle.teardown()
        self._store_port = None

    def _do(self, task: Task) -> bool:
        """Run a test or a call, and send its outcome; return whether it failed."""
        if isinstance(task.work, RunTest):
            return self._run_test(task.work)
        capture = self._session.config.pluginmanager.getplugin("capturemanager")
        capture.resume_global_capture()
        reply = call_and_reply(task.work, partial(self._send, "began", True), may_exit=False)
        capture.suspend_global_capture()
        self._send("output", "".join(capture.read_global_capture()))
        self._send("reply", reply)
        return reply.failure is not None

    def _cannot_begin(self, rank: int, text: str) -> bool:
        """Send why a task did not begin, because this rank or another one failed; return true."""
        self._send("reply", lost(rank, "could not start", text))
        return True

    def _clean_up(self, before: Traces) -> bool:
        """Leave the group if the task has or has stopped it; send all leftovers, and return true if there are none."""
        joined = self._group is not None and dist.group.WORLD is self._group
        joined = joined and not stop_agreement.current().is_begun
        put_back_unused()  # they stay if the ranks have stopped
        leftovers = changes_since(before)
        if joined:
            leftovers += _try_group()
        else:
            self._leave()
        self._send("joined", joined)
        self._send("leftovers", tuple(leftovers))
        return not leftovers

    def _send(self, field: str, value: object) -> None:
        self._connection.send((field, value))

    # One test; its reports are sent at once, because the rank may not finish.

    def _run_test(self, test: RunTest) -> bool:
        self._folder = test.folder
        self._any_failed = False
        item = self._collect(test)
        if item is None:
            _raise_failure_of_peer()  # it may have interrupted the import
            not_found = f"{test.nodeid} was not found in {test.path} on the ranks.\n"
            return self._cannot_begin(self._rank, "".join(self._problems) or not_found)
        # fixtures kept for another test than this one
        self._end_fixtures(item, group_is_whole=True)
        self._last = item
        self._failing = None
        self._send("began", True)
        following = None
        if test.following is not None:
            other_file = _Next.from_parent(self._session, name="next")
            following = self._items.get(test.following, other_file)
        item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
        return self._any_failed

    def _collect(self, test: RunTest) -> pytest.Item | None:
        """Return a test, collecting its file if necessary; None if it does not exist."""
        if test.nodeid not in self._items:
            self._problems.clear()
            for item in self._session.perform_collect([str(test.path)]):
                self._items[item.nodeid] = item
        return self._items.get(test.nodeid)

    def _end_fixtures(self, following: pytest.Item | None, group_is_whole: bool) -> None:
        """End the fixtures of the previous test that the next does not use; send their failures.

        Args:
            following: The next test, or None.
            group_is_whole: False if a test has failed, so that collectives fail as well.
        """
        ending = pytest.CallInfo.from_call(partial(self._session._setupstate.teardown_exact, following), "teardown")
        if ending.excinfo is None or self._last is None:
            return
        if not group_is_whole and _needs_group(ending.excinfo.value):
            return
        self._failing = None
        self._send_report("late_reports", self._last.ihook.pytest_runtest_makereport(item=self._last, call=ending))

    def _send_report(self, field: str, report: pytest.TestReport) -> None:
        """Send a report, serialised by pytest."""
        config = self._session.config
        self._send(field, config.hook.pytest_report_to_serializable(config=config, report=report))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item) -> bool:
        """Run the test once, as pytest itself does.

        A plugin that repeats tests cannot do so on one rank alone.
        """
        runner: Any = self._session.config.pluginmanager.getplugin("runner")
        return bool(runner.pytest_runtest_protocol(item, nextitem))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self) -> Generator[None, object, object]:
        """Tell the other ranks if this part fails; raise a peer's failure if that is the cause."""
        try:
            return (yield)
        except (pytest.skip.Exception, pytest.xfail.Exception):
            raise
        except BaseException as error:
            cause = lifecycle.report(error)
            self._failing = error
            if cause is error or (hasattr(error, "exceptions") and not _needs_group(error)):  # a fixture of its own
                raise
            self._failing = cause
            raise cause from error

    pytest_runtest_setup = pytest_runtest_call  # fixtures may fail
    pytest_runtest_teardown = pytest_runtest_call  # also in teardown

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[Any]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Add to each report what the test process cannot see."""
        report = yield
        error = None if call.excinfo is None else call.excinfo.value
        is_echo = isinstance(error, PeerError) or isinstance(self._failing, PeerError)
        report.__dict__.update(ddpkit_time=time.monotonic(), ddpkit_echo=is_echo)
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Send the report of a phase."""
        self._any_failed |= report.failed or hasattr(report, "wasxfail")
        self._send_report("reports", report)

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage, when: str) -> None:
        """Send a warning of a test; the test process has collected the files itself."""
        if when == "runtest":
            kind, place = warning_message.category, (warning_message.filename, warning_message.lineno)
            self._send("warnings", (kind.__module__, kind.__name__, str(warning_message.message), *place))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Store the error that prevents a file from being collected."""
        if report.failed:
            self._problems.append(report.longreprtext + "\n")

    @pytest.fixture
    def tmp_path(self) -> Path:
        """Return the test's folder, the same on all ranks."""
        return self._folder

    @pytest.fixture
    def subtests(self) -> NoReturn:
        """Forbid subtests, which could differ between ranks."""
        pytest.fail("Tests on ranks have no subtests: use @pytest.mark.parametrize.", pytrace=False)

    def pytest_enter_pdb(self) -> NoReturn:
        """Forbid a debugger, because no rank has the terminal."""
        pytest.fail("Ranks have no debugger: call the test's function in one process.", pytrace=False)


class _Next(pytest.Item):
    """A test of another file, given to pytest as the next: only the session's fixtures stay."""

    def runtest(self) -> None:
        raise NotImplementedError


def _raise_failure_of_peer() -> None:
    """Raise the failure of another rank, if one is known."""
    with current_job.peer_errors():
        pass


def _try_group() -> list[str]:
    """Run a step together, which fails or hangs if the ranks are not together in their group."""
    number = torch.ones(1)
    try:
        _raise_failure_of_peer()
        dist.all_reduce(number)
    except DdpkitError:
        return ["a failure in the group"]
    except RuntimeError:
        return ["ranks that are not together"]
    if number.item() != dist.get_world_size():
        return ["collectives that do not fit together"]
    return []


def _needs_group(error: BaseException) -> bool:
    """Return whether this error may only follow from an earlier failure of a test."""
    if hasattr(error, "exceptions"):  # of several fixtures
        return all(map(_needs_group, error.exceptions))
    if isinstance(error, DdpkitError):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    return any("torch/distributed" in Path(frame.filename).as_posix() for frame in frames)


# Clean up after a test: reset what can be reset, and report the rest.

Traces = dict[str, Any]  # the state that a test should leave unchanged, by name
_ENDING = ("a thread", "a child process", "a process group")  # sets and a number, which must not grow
_ENDING_TIME = 1.0  # seconds for threads and processes to end
_SEED = 0
# modules whose signal handlers may stay: ddpkit's while it has joined, and torch's, which a loader with
# workers sets for good, to notice those that die
_HANDLERS = {main_thread.__name__, "torch.utils.data._utils.signal_handling"}


def reset(arguments: list[str], threads: int) -> None:
    """Start the next test in the state of the first, with these arguments and threads."""
    sys.argv[:] = arguments
    random.seed(_SEED)
    np.random.seed(_SEED)
    torch.manual_seed(_SEED)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    # to switch it off imports torch._inductor, which takes a second
    if torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(False)
    if not dist.is_initialized():  # else setup() has set them
        torch.set_num_threads(threads)


def changes_since(before: Traces) -> list[str]:
    """Describe what has been added or changed; threads and processes get a moment to end."""
    deadline = time.monotonic() + _ENDING_TIME
    while True:
        now = traces()
        added = [name for name in _ENDING if not now[name] <= before[name]]
        if not added or time.monotonic() > deadline:
            break
        time.sleep(0.01)
    return added + [name for name in before if name not in _ENDING and now.get(name) != before[name]]


def traces() -> Traces:
    """Read the state that cannot be reset."""
    multiprocessing.active_children()  # reaps those that have ended
    found: Traces = {
        "a thread": {thread.ident for thread in threading.enumerate()},
        "a child process": {*child_processes()},
        "a process group": len(groups()),
        "a signal handler": {number: _handler(number) for number in signal.valid_signals()},
    }
    for logger in (logging.root, *logging.root.manager.loggerDict.values()):
        # parts of torch change its loggers when imported
        if isinstance(logger, logging.Logger) and not logger.name.startswith("torch"):
            values = (logger.level, logger.disabled, logger.propagate, (*logger.handlers,), (*logger.filters,))
            found[f"settings of the logger {logger.name}"] = values
    return found


def _handler(number: int) -> Any:
    handler = signal.getsignal(number)
    return signal.SIG_DFL if getattr(handler, "__module__", None) in _HANDLERS else handler
