"""Warm ranks, seen from the test process: it starts them, hands them tasks, and notices which one hangs or has died."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import time
import uuid
from contextlib import suppress
from dataclasses import replace
from multiprocessing import reduction
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch.distributed as dist

from .messages import Answer, Debugging, Done, Left, Plan, Started, Task

_STARTING = 300.0  # seconds in which a rank starts, joins and imports the test, however loaded the machine is
_SETTLING = 5.0  # seconds in which a rank cleans up after a test
_AFTER_FAILURE = 10.0  # seconds that the other ranks get after the first failure
_ENDING = 20.0  # seconds in which ranks finalise their fixtures and leave
_KEPT = 3  # crews that are kept warm
_MARK = "DDPKIT_TESTING_CREW"


class Pool:
    """The crews of a test run, at most one for each world size."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._crews: dict[int, Crew] = {}
        self._leaving: list[Crew] = []

    def run(self, world_size: int, task: Task, timeout: float, fresh: bool = False) -> list[Answer]:
        """Run a task on as many ranks; warm ones unless it asks for fresh ones.

        Returns:
            What became of it, by rank.
        """
        crew = self._crews.pop(world_size, None)
        if crew is not None and (fresh or not crew.ready()):
            self._dismiss(crew)
            crew = None
        if crew is None:
            crew = Crew(world_size, self._plan)
        try:
            answers = crew.run(task, timeout)
        except BaseException:  # Ctrl-C
            crew.kill()
            raise
        self._crews[world_size] = crew
        if fresh or any(answer.done is None or answer.done.failed for answer in answers):
            self._dismiss(self._crews.pop(world_size))
        elif len(self._crews) > _KEPT:
            self._dismiss(self._crews.pop(next(iter(self._crews))))
        return answers

    def close(self) -> None:
        """End all ranks, and whatever processes they have left."""
        for crew in self._crews.values():
            crew.dismiss()
        for crew in [*self._crews.values(), *self._leaving]:
            crew.end()
        self._crews.clear()
        self._leaving.clear()

    def _dismiss(self, crew: Crew) -> None:
        crew.dismiss()
        self._leaving = [other for other in self._leaving if not other.gone()]
        self._leaving.append(crew)


class Crew:
    """Ranks of one world size."""

    def __init__(self, world_size: int, plan: Plan) -> None:
        self._mark = uuid.uuid4().hex
        self._store: dist.TCPStore | None = None
        self._joined = False
        self._timeout = 0.0
        self._settling = False
        self._ranks = [_Rank(number, world_size, plan, self._mark) for number in range(world_size)]

    def ready(self) -> bool:
        """Whether every rank has cleaned up after the task before, and is there to be used again."""
        if not self._settling:
            return True
        self._settling = False
        deadline = time.monotonic() + _SETTLING
        left = [rank.settle(deadline) for rank in self._ranks]
        states = [state for state in left if state is not None and not state.traces]
        joined = {state.joined for state in states}
        if len(states) < len(self._ranks) or len(joined) > 1:
            return False
        self._joined = self._joined and joined == {True}
        return True

    def run(self, task: Task, timeout: float) -> list[Answer]:
        """Run a task on all ranks; `timeout` in seconds, from when all have begun."""
        if not (task.join and self._joined and self._timeout == task.timeout):
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        assert self._store is not None
        for rank in self._ranks:
            rank.send(replace(task, environment=self._environment(rank.number, self._store.port)))
        self._joined, self._timeout = task.join, task.timeout
        deadline = time.monotonic() + _STARTING
        began = False
        while waiting := [rank for rank in self._ranks if rank.answer is None]:
            ready = _first_messages(waiting, deadline)
            for rank in ready:
                rank.receive()
            self._lend_the_terminal()
            if any(rank.debugging for rank in self._ranks):
                deadline = time.monotonic() + timeout
            elif not began and all(rank.started or rank.answer for rank in self._ranks):
                began = True
                deadline = time.monotonic() + timeout
            if any(rank.failed() for rank in ready):
                deadline = min(deadline, time.monotonic() + _AFTER_FAILURE)
            if not ready and time.monotonic() >= deadline:
                took = f"within {timeout:g} s" if began else f"to begin within {_STARTING:g} s"
                for rank in waiting:
                    rank.give_up(f"did not come to an end {took}" if began else f"did not come {took}")
        self._settling = True
        return [rank.take_answer() for rank in self._ranks]

    def dismiss(self) -> None:
        """Ask the ranks to finalise their fixtures and to end; those that hang are killed."""
        for rank in self._ranks:
            rank.dismiss()

    def gone(self) -> bool:
        """Whether no process is left."""
        if any(rank.process.is_alive() for rank in self._ranks):
            return False
        self.end()
        return True

    def end(self) -> None:
        """Wait for the ranks to end after `dismiss()`, and kill what is left."""
        deadline = time.monotonic() + _ENDING
        for rank in self._ranks:
            rank.process.join(max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """End the ranks and all that they have started, at once."""
        for rank in self._ranks:
            rank.kill()
        _kill_marked(self._mark)

    def _lend_the_terminal(self) -> None:
        asking = [rank for rank in self._ranks if rank.debugging and not rank.has_terminal]
        if asking and not any(rank.has_terminal for rank in self._ranks):
            asking[0].lend_terminal()

    def _environment(self, rank: int, port: int) -> dict[str, str]:
        env = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC_", "PYTEST_CURRENT_"))}
        size = str(len(self._ranks))
        env |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}", "DDPKIT_SPAWN": "1", _MARK: self._mark}
        env["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # torch's own init joins the store, too, and hosts none
        return env


class _Rank:
    """One warm process."""

    def __init__(self, number: int, world_size: int, plan: Plan, mark: str) -> None:
        from .rank import main

        self.number = number
        self.answer: Answer | None = None
        self.started = False
        self.debugging = False
        self.has_terminal = False
        self._folder = tempfile.TemporaryDirectory(prefix="ddpkit-testing-")
        stack = Path(self._folder.name, "stack")
        stack.touch()
        self._stack = stack
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["ddpkit.testing.rank", "torch._dynamo"])  # which DDP imports
        self._pipe, theirs = context.Pipe()
        env = os.environ | {"RANK": f"{number}", "WORLD_SIZE": f"{world_size}", _MARK: mark}
        streams = [None if stream is None else _Passed(stream) for stream in plan.streams]
        arguments = (theirs, replace(plan, streams=[]), streams, env, number, str(stack))
        self.process = context.Process(target=main, args=arguments, name=f"warm rank {number}")
        self.process.start()
        theirs.close()

    def send(self, message: object) -> None:
        """Hand over a message; a rank that has died is noticed when it should answer."""
        self.answer = None
        self.started = False
        with suppress(OSError):
            self._pipe.send(message)

    def receive(self) -> None:
        """Take in what the rank says, or that it has died."""
        message = self._next_message()
        if message is None:
            self.answer = Answer(self.number, problem=self._ending())
        elif isinstance(message, Started):
            self.started = True
        elif isinstance(message, Debugging):
            self.debugging = message.begins
            self.has_terminal = False
        elif isinstance(message, Done):
            self.answer = Answer(self.number, done=message)

    def failed(self) -> bool:
        """Whether its part of the task has failed."""
        return self.answer is not None and (self.answer.done is None or self.answer.done.failed)

    def take_answer(self) -> Answer:
        """What became of the task."""
        assert self.answer is not None
        return self.answer

    def give_up(self, problem: str) -> None:
        """Note where the rank is, for it has not come to an end."""
        self.answer = Answer(self.number, problem=problem, stack=self._where())
        self.process.kill()

    def settle(self, deadline: float) -> Left | None:
        """What the task left behind; None if the rank does not say so in time."""
        while self.process.is_alive() and self._pipe.poll(max(0.0, deadline - time.monotonic())):
            message = self._next_message()
            if isinstance(message, Left):
                return message
            if message is None:
                return None
        return None

    def lend_terminal(self) -> None:
        """Let the rank's debugger talk to the person."""
        self.has_terminal = True
        with suppress(OSError):
            self._pipe.send(Debugging(True))

    def dismiss(self) -> None:
        """Ask it to end."""
        if self.answer is None or self.answer.done is None:
            self.process.kill()
        with suppress(OSError):
            self._pipe.send(None)

    def kill(self) -> None:
        """End it, if it has not ended."""
        self.process.kill()
        self.process.join()
        self._pipe.close()
        self._folder.cleanup()

    def ends(self) -> list[Any]:
        """What becomes ready when it says something or dies."""
        return [self._pipe, self.process.sentinel]

    def _next_message(self) -> object:
        try:
            if not self._pipe.poll():  # it has died, and a child of its holds the pipe
                return None
            return self._pipe.recv()
        except (EOFError, OSError):
            return None

    def _ending(self) -> str:
        self.process.join()
        code = self.process.exitcode or 0
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended with exit status {code}"

    def _where(self) -> str:
        with suppress(ProcessLookupError):
            os.kill(self.process.pid or 0, signal.SIGUSR2)
        text, before = "", None
        for _ in range(100):  # it is written line by line
            text = self._stack.read_text()
            if text and text == before:
                break
            before = text
            time.sleep(0.03)
        return _of_the_test(text) or "  (no answer: stopped?)\n"


class _Passed:
    """A file descriptor on its way to a new process."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (reduction.DupFd(self._number),)


def _received(passed: Any) -> int:
    number: int = passed.detach()
    return number


def _of_the_test(stack: str) -> str:
    """The lines of a stack above those of pytest and of the rank itself."""
    lines = stack.splitlines(keepends=True)
    inner = [number for number, line in enumerate(lines) if "/_pytest/" in line or "/ddpkit/testing/" in line]
    return "".join(lines[: inner[0]] if inner and inner[0] > 1 else lines)


def _first_messages(ranks: list[_Rank], deadline: float) -> list[_Rank]:
    ends = {end: rank for rank in ranks for end in rank.ends()}
    ready = wait([*ends], timeout=max(0.0, deadline - time.monotonic()))
    return list({id(ends[end]): ends[end] for end in ready}.values())


def _kill_marked(mark: str) -> None:
    """Kill the processes that the ranks have left; where there is no /proc they are not found."""
    if sys.platform != "linux":
        return
    sign = f"{_MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if sign in (folder / "environ").read_bytes():
                os.kill(int(folder.name), signal.SIGKILL)
