"""A warm rank: a process that waits for tests, runs them under a pytest of its own, and cleans up after each."""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import queue
import signal
import sys
import threading
import traceback
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ..errors import PeerError
from ..process_group import lifecycle, monitor
from . import cleaning
from .items import Items
from .messages import Debugging, Done, Left, Plan, Started, Task
from .rank_call import call


def main(
    connection: Connection, plan: Plan, streams: list[int | None], env: dict[str, str], rank: int, stack: str
) -> None:
    """Be a rank until the test process says that it is over, or has gone."""
    os.environ.clear()
    os.environ.update(env)
    os.environ.pop("PYTEST_ADDOPTS", None)
    multiprocessing.set_start_method(None, force=True)  # for loader workers: the user's default, not what started us
    _take_streams(streams)
    gc.freeze()  # pytest collects garbage again and again, but not torch's modules
    with open(stack, "w") as file:
        faulthandler.register(signal.SIGUSR2, file=file, all_threads=False)
        measuring = _start_coverage(plan.coverage)
        arguments = [*plan.arguments, f"--basetemp={plan.basetemp}-{os.getpid()}"]
        code = pytest.main(arguments, plugins=[Rank(connection, plan, rank)])
        if measuring is not None:
            measuring.stop()
            measuring.save()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(code))  # whatever threads a test may have left


class Rank:
    """The plugin with which a rank's pytest runs what arrives instead of what it would collect itself."""

    def __init__(self, connection: Connection, plan: Plan, rank: int) -> None:
        self._connection, self._plan, self._rank = connection, plan, rank
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._meeting: str | None = None  # the port of the store where the group that is kept was made
        self._group: object = None
        self._capture: Any = None
        self._originals = cleaning.Originals(Path())

    @pytest.hookimpl(tryfirst=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        """Take over the test process's options, and tell other plugins that this is no run of its own."""
        vars(config.option).update(self._plan.options)
        names = {"workerid": f"rank{self._rank}", "workercount": 1, "testrunuid": "ranks", "mainargv": sys.argv}
        config.__dict__["workerinput"] = self._plan.options | names | {"ddpkit_rank": self._rank}

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> bool:
        """Collect nothing yet."""
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run what arrives, until nothing more comes."""
        self._capture = session.config.pluginmanager.getplugin("capturemanager")
        items = Items(session, self.pytest_enter_pdb, self.pytest_leave_pdb)
        session.config.pluginmanager.register(items, "ddpkit items")
        cleaning.remember()
        self._originals = cleaning.Originals(session.config.rootpath)
        threading.Thread(target=self._listen, name="ddpkit testing", daemon=True).start()
        try:
            while (task := self._next_task()) is not None:
                self._run(task, items)
        except PeerError:  # one has died between tests, or after its part of one: the test process replaces all
            lifecycle.teardown()
            with suppress(Exception):
                items.finalise()
            return True
        items.finalise()
        lifecycle.teardown()
        return True

    def _next_task(self) -> Task | None:
        """Wait for the next task, in silence, for nobody asks what becomes of idle ranks."""
        monitor.log.disabled = True
        try:
            task: Task | None = self._inbox.get()
        finally:
            monitor.log.disabled = False
        return task

    def pytest_enter_pdb(self) -> None:
        """Wait for the terminal."""
        self.borrow_terminal()

    def pytest_leave_pdb(self) -> None:
        """Give the terminal back."""
        self._say(Debugging(False))

    def borrow_terminal(self) -> None:
        """Wait until no other rank's debugger has the terminal."""
        self._say(Debugging(True))
        while not isinstance(self._inbox.get(), Debugging):
            pass

    def _run(self, task: Task, items: Items) -> None:
        try:
            self._prepare(task)
            before = cleaning.traces()
            done = self._do(task, items)
        except PeerError as error:  # between the parts of the test in which it would be reported
            done = Done(True, f"PeerError: {error}", heard_of=error.rank)
        except Exception:  # it cannot join, for example
            done = Done(True, traceback.format_exc())
        self._say(done)
        if done.failed:
            lifecycle.teardown()  # the process will not be used again
        else:
            self._say(self._look_back(task, before))

    def _prepare(self, task: Task) -> None:
        os.chdir(task.folder)
        sys.path[:] = task.path
        os.environ.clear()
        os.environ.update(task.environment)
        meeting = os.environ["MASTER_PORT"] if task.join else None
        if self._meeting != meeting:
            lifecycle.teardown()
            self._meeting = None
        cleaning.reset()
        if task.join and self._meeting is None:
            lifecycle.setup(timeout=timedelta(seconds=task.timeout))
            self._meeting = meeting
        self._group = dist.group.WORLD

    def _do(self, task: Task, items: Items) -> Done:
        def begin() -> None:
            self._originals.learn()  # now that the test's modules have been imported
            self._say(Started())

        if task.kind == "item":
            path, nodeid, folder, debug = task.body
            return items.run(path, nodeid, folder, debug, begin)
        self._capture.resume_global_capture()
        done = call(task.body[0], begin)
        self._capture.suspend_global_capture()
        done.output = "".join(self._capture.read_global_capture())
        return done

    def _look_back(self, task: Task, before: cleaning.Traces) -> Left:
        joined = dist.group.WORLD is self._group and self._group is not None
        found = before.compare(cleaning.traces()) + self._originals.replaced()
        if task.join and joined:
            found += self._meet()
        if not joined:
            lifecycle.teardown()
            self._meeting = None
        return Left(joined, found)

    def _meet(self) -> list[str]:
        """Do a step together, which fails or hangs if the ranks are not where they should be in their group."""
        if lifecycle.current_session().told:
            return ["a failure in the group"]
        number = torch.ones(1)
        try:
            dist.all_reduce(number)
        except RuntimeError:
            return ["ranks that are not together"]
        return [] if number.item() == dist.get_world_size() else ["collectives that do not fit together"]

    def _say(self, message: object) -> None:
        self._connection.send(message)

    def _listen(self) -> None:
        try:
            while True:
                self._inbox.put(self._connection.recv())
        except (EOFError, OSError):  # the test process has gone
            os._exit(1)


def _take_streams(streams: list[int | None]) -> None:
    """Make the test process's own streams this one's, which inherited those of the process that forked it."""
    for number, stream in enumerate(streams):
        if stream is None:
            stream = os.open(os.devnull, os.O_RDWR)
        os.dup2(stream, number)
        os.close(stream)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", closefd=False, buffering=1)


def _start_coverage(settings: dict[str, Any] | None) -> Any:
    if settings is None:
        return None
    import coverage

    if coverage.Coverage.current() is not None:  # coverage looks after processes itself
        return None
    measuring = coverage.Coverage(data_suffix=True, **settings)
    measuring.start()
    return measuring
