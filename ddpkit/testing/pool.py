"""Pools of warm ranks, one for each world size: start them, give them tasks, and end them."""

from __future__ import annotations

import os
import signal
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ..join.store import host_on
from ..spawning.rank_process import rank_environment, wait_for_messages
from .messages import Answer, RunOptions, Task
from .warm_rank import WarmRank

_STARTING = 300.0  # seconds to start, join and import the test, however loaded the machine is
_SETTLING = 5.0  # seconds in which a rank cleans up after a test
_AFTER_FAILURE = 10.0  # seconds that the other ranks get after the first failure
_LEAVING = 20.0  # seconds in which ranks finalise their fixtures and leave
_KEPT = 3  # pools that are kept warm
_RANKS_VARIABLE = "DDPKIT_TESTING_RANKS"  # in the environment of ranks, and so of all that they start


class Pools:
    """The pools of a test run, at most one for each world size.

    Args:
        options: How to start the ranks.
        report_late: Called with the reports of tests that had been reported before, by rank.
    """

    def __init__(
        self,
        options: RunOptions,
        report_late: Callable[[list[list[Any]]], None],
    ) -> None:
        self._options = options
        self._report_late = report_late
        self._pools: dict[int, Pool] = {}
        self._leaving: list[Pool] = []

    def run(self, world_size: int, task: Task, timeout: float, fresh: bool = False) -> list[Answer]:
        """Run a task on so many ranks.

        Args:
            world_size: Number of ranks.
            task: The task, the same on all.
            timeout: Bound on it in seconds, from when all ranks have begun.
            fresh: Use new processes instead of warm ones, and end them afterwards.

        Returns:
            The outcome, by rank.
        """
        pool = self._take(world_size, fresh)
        try:
            answers = pool.run(task, timeout)
        except BaseException:  # Ctrl-C
            pool.kill()
            raise
        self._report_late(pool.take_late_reports())
        if fresh or any(answer.failed for answer in answers):
            self._dismiss(pool)
        else:
            self._keep(world_size, pool)
        return answers

    def close(self) -> None:
        """End all ranks and the processes that they have left."""
        for pool in self._pools.values():
            pool.dismiss()
        for pool in [*self._pools.values(), *self._leaving]:
            pool.end()
            self._report_late(pool.take_late_reports())
        self._pools.clear()
        self._leaving.clear()

    def _take(self, world_size: int, fresh: bool) -> Pool:
        """Return a warm pool that can be used again, else a new one."""
        pool = self._pools.pop(world_size, None)
        if pool is not None and not fresh and pool.ready():
            return pool
        if pool is not None:
            self._dismiss(pool)
        return Pool(world_size, self._options)

    def _keep(self, world_size: int, pool: Pool) -> None:
        """Keep a pool warm, and let the one go that was not used for longest if there are many."""
        self._pools[world_size] = pool
        if len(self._pools) > _KEPT:
            oldest = next(iter(self._pools))
            self._dismiss(self._pools.pop(oldest))

    def _dismiss(self, pool: Pool) -> None:
        pool.dismiss()
        leaving = [*self._leaving, pool]
        self._leaving = []
        for other in leaving:
            if other.gone():
                self._report_late(other.take_late_reports())
            else:
                self._leaving.append(other)


class Pool:
    """Warm ranks of one world size."""

    def __init__(self, world_size: int, options: RunOptions) -> None:
        self._mark = uuid.uuid4().hex
        self._store: dist.TCPStore | None = None
        self._joined = False
        self._group_timeout = 0.0
        self._settling = False
        self._ranks: list[WarmRank] = []
        for number in range(world_size):
            first = {"RANK": str(number), "WORLD_SIZE": str(world_size), _RANKS_VARIABLE: self._mark}
            self._ranks.append(WarmRank(number, os.environ | first, options))

    def ready(self) -> bool:
        """Return whether every rank has cleaned up after its last task and can be used again."""
        if not self._settling:
            return True
        self._settling = False
        deadline = time.monotonic() + _SETTLING
        joined = set()
        for rank in self._ranks:
            leftovers = rank.receive_leftovers(deadline)
            if leftovers is None or leftovers.traces:
                return False
            joined.add(leftovers.joined)
        if len(joined) > 1:
            return False
        self._joined = self._joined and joined == {True}
        return True

    def run(self, task: Task, timeout: float) -> list[Answer]:
        """Run a task on all ranks; `timeout` in seconds, from when all have begun."""
        former = self._store  # stays until the ranks have left its group, as they begin the task
        store = self._store_for(task)
        for rank in self._ranks:
            rank.send(replace(task, environment=self._environment(rank.rank, store.port)))
        self._joined = task.join
        self._group_timeout = task.timeout
        self._wait_for_answers(timeout)
        del former
        answers = [rank.answer for rank in self._ranks if rank.answer is not None]
        if not any(answer.failed for answer in answers):
            self._settling = True
            for rank in self._ranks:  # only now: a rank may wait in a collective for one that is done
                rank.request_leftovers()
        return answers

    def dismiss(self) -> None:
        """Ask the ranks to finalise their fixtures and to end; those that hang are killed."""
        for rank in self._ranks:
            rank.dismiss()

    def gone(self) -> bool:
        """Return whether no process is left."""
        if any(rank.process.is_alive() for rank in self._ranks):
            return False
        self.end()
        return True

    def end(self) -> None:
        """Wait for the ranks to end after `dismiss()`, and kill those that do not."""
        deadline = time.monotonic() + _LEAVING
        for rank in self._ranks:
            rank.wait_for_end(deadline)
        self.kill()

    def take_late_reports(self) -> list[list[Any]]:
        """Return what came of tests that had been reported before, by rank."""
        return [rank.take_late_reports() for rank in self._ranks]

    def kill(self) -> None:
        """End the ranks and all that they have started, at once."""
        for rank in self._ranks:
            rank.kill()
        _kill_marked(self._mark)

    def _store_for(self, task: Task) -> dist.TCPStore:
        """Return the store of the group that is kept, or a new one if the task cannot use it."""
        reuses_group = task.join and self._joined and self._group_timeout == task.timeout
        if self._store is None or not reuses_group:
            self._store = host_on("127.0.0.1")
        return self._store

    def _environment(self, rank: int, port: int) -> dict[str, str]:
        env = rank_environment(rank, len(self._ranks), port)
        env = {key: text for key, text in env.items() if not key.startswith("PYTEST_CURRENT_")}
        return env | {_RANKS_VARIABLE: self._mark}

    def _wait_for_answers(self, timeout: float) -> None:
        """Wait until each rank has answered, has died, or was given up for lack of time."""
        deadline = time.monotonic() + _STARTING
        began = False
        while True:
            waiting = [rank for rank in self._ranks if rank.answer is None]
            if not waiting:
                return
            ready = wait_for_messages(waiting, deadline)
            for rank in ready:
                rank.receive()
            self._lend_terminal()
            if any(rank.debugging for rank in self._ranks):
                deadline = time.monotonic() + timeout
            elif not began and all(rank.started or rank.answer for rank in self._ranks):
                began = True
                deadline = time.monotonic() + timeout
            if any(rank.answer and rank.answer.failed for rank in ready):
                deadline = min(deadline, time.monotonic() + _AFTER_FAILURE)
            if not ready and time.monotonic() >= deadline:
                problem = f"did not come to begin within {_STARTING:g} s"
                if began:
                    problem = f"did not come to an end within {timeout:g} s"
                for rank in waiting:
                    rank.give_up(problem)

    def _lend_terminal(self) -> None:
        """Give the terminal to a debugger that wants it, one at a time."""
        if any(rank.has_terminal for rank in self._ranks):
            return
        for rank in self._ranks:
            if rank.debugging:
                rank.lend_terminal()
                return


def _kill_marked(mark: str) -> None:
    """Kill the processes that the ranks have left; where there is no /proc they are not found."""
    if sys.platform != "linux":
        return
    sign = f"{_RANKS_VARIABLE}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if sign in (folder / "environ").read_bytes():
                os.kill(int(folder.name), signal.SIGKILL)
