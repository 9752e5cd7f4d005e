"""Pools of warm ranks, one per world size: start them, give them tasks, and end them."""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

from ..rendezvous.store import host_on
from ..spawning import RankProcess, Reply, rank_environment, wait_for_messages
from .rank import RunOptions, Task, Warned, main

PRELOADED = ["ddpkit.testing.rank", "torch._dynamo"]  # DDP imports the second
_STARTING = 300.0  # seconds to start, join and import the test, even on a busy machine
_SETTLING = 5.0  # seconds for a rank to clean up after a test
_AFTER_FAILURE = 10.0  # seconds for the other ranks after the first failure
_LEAVING = 20.0  # seconds for ranks to finalise their fixtures and leave
_KEPT = 3  # warm pools
_RANKS_VARIABLE = "DDPKIT_TESTING_RANKS"  # in the environment of ranks and of all that they start


@dataclass
class Answer:
    """The outcome of a task on one rank.

    Attributes:
        rank: The rank.
        began: Whether the test's own code runs.
        failed: Whether it failed, hung or died; None while this is not known.
        reply: Outcome of a call; of a test only if it did not begin.
        output: Printed output of a call; a test's reports contain theirs.
        problem: Reason why it did not finish, or "".
        stack: Its stack at the time-out.
        joined: Whether the rank is still in the group that it was given.
        leftovers: Reasons not to use the process again, as phrases; None until the rank has cleaned up.
        reports: Its reports of the test, serialised by pytest.
        late_reports: Reports of tests that were already reported.
        warnings: The warnings of the test.
    """

    rank: int
    began: bool = False
    failed: bool | None = None
    reply: Reply | None = None
    output: str = ""
    problem: str = ""
    stack: str = ""
    joined: bool = False
    leftovers: tuple[str, ...] | None = None
    reports: list[Any] = field(default_factory=list)
    late_reports: list[Any] = field(default_factory=list)
    warnings: list[Warned] = field(default_factory=list)


class Pools:
    """The pools of a test run, at most one per world size.

    Args:
        options: How to start the ranks.
        report_late: Called with reports of tests that were already reported, by rank.
    """

    def __init__(self, options: RunOptions, report_late: Callable[[list[list[Any]]], None]) -> None:
        self._options = options
        self._report_late = report_late
        self._pools: dict[int, _Pool] = {}

    def run(self, world_size: int, task: Task, timeout: float, fresh: bool) -> list[Answer]:
        """Run a task on a number of ranks.

        Args:
            world_size: Number of ranks.
            task: The task, the same on all.
            timeout: Time-out in seconds, from when all ranks have begun.
            fresh: Whether to use new processes instead of warm ones, and end them afterwards.

        Returns:
            The outcome, by rank.
        """
        pool = self._pools.pop(world_size, None)
        if pool is not None and (fresh or not pool.is_clean()):
            self._end(pool)
            pool = None
        if pool is None:
            pool = _Pool(world_size, self._options)
        try:
            answers = pool.run(task, timeout)
        except BaseException:  # Ctrl-C
            pool.kill()
            raise
        self._report_late(pool.take_late_reports())
        if fresh or any(answer.failed for answer in answers):
            self._end(pool)
        else:
            self._pools[world_size] = pool
        if len(self._pools) > _KEPT:  # end the least recently used one
            self._end(self._pools.pop(next(iter(self._pools))))
        return answers

    def close(self) -> None:
        """End all ranks and the processes that they left behind."""
        while self._pools:
            self._end(self._pools.popitem()[1])

    def _end(self, pool: _Pool) -> None:
        pool.end()
        self._report_late(pool.take_late_reports())


class _Pool:
    """Warm ranks of one world size."""

    def __init__(self, world_size: int, options: RunOptions) -> None:
        self._mark = uuid.uuid4().hex
        self._store = host_on("127.0.0.1")
        self._group_timeout: float | None = None  # of the ranks' current group
        self._ranks = [
            _WarmRank(rank, self._environment(rank, world_size), PRELOADED, main, options, rank)
            for rank in range(world_size)
        ]

    def run(self, task: Task, timeout: float) -> list[Answer]:
        """Run a task on all ranks; `timeout` in seconds, from when all have begun."""
        former = self._store  # kept until the ranks have left its group at the start of the task
        if not task.join or self._group_timeout != task.timeout:
            self._store = host_on("127.0.0.1")
        self._group_timeout = task.timeout if task.join else None
        for rank in self._ranks:
            rank.answer = Answer(rank.rank)
            rank.send((task, self._environment(rank.rank, len(self._ranks))))
        self._wait_for_answers(timeout)
        del former
        answers = [rank.answer for rank in self._ranks]
        if not any(answer.failed for answer in answers):
            for rank in self._ranks:  # only now: a rank may wait in a collective for one that is done
                rank.send("clean up")
        return answers

    def is_clean(self) -> bool:
        """Return whether every rank has cleaned up after its last task and is reusable."""
        deadline = time.monotonic() + _SETTLING
        while waiting := [rank for rank in self._ranks if rank.answer.leftovers is None]:
            ready = wait_for_messages(waiting, deadline)
            if not ready:
                return False
            for rank in ready:
                rank.receive()
        for rank in wait_for_messages(self._ranks, time.monotonic()):
            rank.receive()  # its death since
        joined = {rank.answer.joined for rank in self._ranks}
        if False in joined:
            self._group_timeout = None
        return len(joined) == 1 and not any(rank.answer.leftovers for rank in self._ranks)

    def end(self) -> None:
        """Ask the ranks to finalise their fixtures and to end; kill those that do not."""
        for rank in self._ranks:
            rank.send(None)
        deadline = time.monotonic() + _LEAVING
        for rank in self._ranks:
            while rank.process.is_alive() and wait_for_messages([rank], deadline):
                rank.receive()
            while rank.receive():  # its last messages
                pass
        self.kill()

    def take_late_reports(self) -> list[list[Any]]:
        """Return reports of tests that were already reported, by rank, each once."""
        taken = [rank.answer.late_reports for rank in self._ranks]
        for rank in self._ranks:
            rank.answer.late_reports = []
        return taken

    def kill(self) -> None:
        """End the ranks and everything that they started, at once."""
        for rank in self._ranks:
            rank.process.kill()
            rank.process.join()
            rank.close()
        _kill_marked(self._mark)

    def _environment(self, rank: int, world_size: int) -> dict[str, str]:
        env = rank_environment(rank, world_size, self._store.port) | {_RANKS_VARIABLE: self._mark}
        return {key: text for key, text in env.items() if not key.startswith("PYTEST_CURRENT_")}

    def _wait_for_answers(self, timeout: float) -> None:
        """Wait until each rank has answered, died, or reached the time-out."""
        deadline = time.monotonic() + _STARTING
        began = False
        while waiting := [rank for rank in self._ranks if rank.answer.failed is None]:
            ready = wait_for_messages(waiting, deadline)
            for rank in ready:
                rank.receive()
            if not began and all(rank.answer.began or rank.answer.failed is not None for rank in self._ranks):
                began = True
                deadline = time.monotonic() + timeout
            if any(rank.answer.failed for rank in ready):
                deadline = min(deadline, time.monotonic() + _AFTER_FAILURE)
            if not ready and time.monotonic() >= deadline:
                for rank in waiting:
                    rank.give_up(
                        f"did not finish within {timeout:g} s" if began else f"did not start within {_STARTING:g} s"
                    )


class _WarmRank(RankProcess):
    """A process that runs tasks one after the other.

    Attributes:
        answer: Outcome of the current task, as far as known.
    """

    label = "warm rank"
    answer: Answer

    def send(self, message: object) -> None:
        """Send a message; the death of a rank is noticed when it should answer."""
        with suppress(OSError):
            self.pipe.send(message)

    def receive(self) -> bool:
        """Receive one message from the rank, or its death; return whether there was a message."""
        message = self.next_message()
        answer = self.answer
        if message is None:
            answer.leftovers = ("its death",)
            if answer.failed is None:
                answer.failed = True
                answer.problem = self.wait_for_exit().replace("killed", "was killed")
            return False
        name, value = message
        before = getattr(answer, name)
        setattr(answer, name, [*before, value] if isinstance(before, list) else value)
        return True

    def give_up(self, problem: str) -> None:
        """End a rank that has not finished, and record its stack."""
        self.answer.stack = _stack_of_test(self.read_stack())
        self.answer.problem = problem
        self.answer.failed = True
        self.process.kill()


def _stack_of_test(stack: str) -> str:
    """Remove the lines of a stack that belong to pytest and to the rank itself."""
    lines = stack.splitlines(keepends=True)
    own = [*takewhile(lambda line: "/_pytest/" not in line and "/ddpkit/testing/" not in line, lines)]
    return "".join(own) if len(own) > 1 else stack


def _kill_marked(mark: str) -> None:
    """Kill the processes that the ranks left behind; without /proc they are not found."""
    sign = f"{_RANKS_VARIABLE}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if sign in (folder / "environ").read_bytes():
                os.kill(int(folder.name), signal.SIGKILL)
