"""Start a warm rank, send it tasks, and notice that it hangs or has died."""

from __future__ import annotations

import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from multiprocessing import reduction
from pathlib import Path
from typing import Any

from ..spawning.rank_process import RankProcess, describe_exit, wait_for_messages
from .messages import Answer, CleanUp, Debugging, Done, EndedBadly, Leftovers, Reported, RunOptions, Started, Warned

PRELOADED = ["ddpkit.testing.rank", "torch._dynamo"]  # DDP imports the second


class WarmRank(RankProcess):
    """A process that runs one task after the other.

    Attributes:
        answer: The outcome of the present task, None until it is known.
        started: True once the test's own code runs.
        debugging: True while a debugger wants or has the terminal.
        has_terminal: True while a debugger has it.
    """

    def __init__(self, number: int, env: dict[str, str], options: RunOptions) -> None:
        from .rank import main

        self._folder = tempfile.TemporaryDirectory(prefix="ddpkit-testing-")
        stack_file = Path(self._folder.name, "stack")
        streams = [stream if stream is None else _Passed(stream) for stream in options.streams]
        unsent = replace(options, streams=[])
        args = (unsent, streams, env, number, str(stack_file))
        super().__init__(number, PRELOADED, stack_file, main, *args)
        self.process.name = f"warm rank {number}"
        self.answer: Answer | None = None
        self.started = False
        self.debugging = False
        self.has_terminal = False
        self._reports: list[Any] = []  # of the present test
        self._warnings: list[Warned] = []
        self._late_reports: list[Any] = []  # of those before

    def send(self, message: object) -> None:
        """Hand over a message; a rank that has died is noticed when it should answer."""
        self.answer = None
        self.started = False
        self._reports = []
        self._warnings = []
        with suppress(OSError):
            self.pipe.send(message)

    def receive(self) -> None:
        """Take in one message of the rank, or its death."""
        message = self.next_message()
        if message is None:
            problem = self._describe_death()
            self.answer = self._answer(problem=problem)
        elif isinstance(message, Reported):
            self._reports.append(message.report)
        elif isinstance(message, Warned):
            self._warnings.append(message)
        elif isinstance(message, EndedBadly):
            self._late_reports.append(message.report)
        elif isinstance(message, Started):
            self.started = True
        elif isinstance(message, Debugging):
            self.debugging = message.begins
            self.has_terminal = False
        elif isinstance(message, Done):
            self.answer = self._answer(done=message)

    def give_up(self, problem: str) -> None:
        """End a rank that has not come to an end, and note where it was."""
        stack = _stack_of_test(self.read_stack())
        stack = stack or "  (no answer: stopped?)\n"
        self.answer = self._answer(problem=problem, stack=stack)
        self.process.kill()

    def request_leftovers(self) -> None:
        """Ask the rank to clean up after its task."""
        with suppress(OSError):
            self.pipe.send(CleanUp())

    def receive_leftovers(self, deadline: float) -> Leftovers | None:
        """Return the state in which the task left the rank, None if it does not tell in time."""
        while self.process.is_alive():
            if not self.pipe.poll(max(0.0, deadline - time.monotonic())):
                return None
            message = self.next_message()
            if message is None or isinstance(message, Leftovers):
                return message
        return None

    def take_late_reports(self) -> list[Any]:
        """Return what came of tests that had been reported before, each report once."""
        taken = self._late_reports
        self._late_reports = []
        return taken

    def lend_terminal(self) -> None:
        """Let the rank's debugger talk to the person."""
        self.has_terminal = True
        with suppress(OSError):
            self.pipe.send(Debugging(True))

    def dismiss(self) -> None:
        """Ask the rank to end; kill it if it has not come to the end of its task."""
        if self.answer is None or self.answer.done is None:
            self.process.kill()
        with suppress(OSError):
            self.pipe.send(None)

    def wait_for_end(self, deadline: float) -> None:
        """Wait until the rank has ended, and take in what it says."""
        while self.process.is_alive() and wait_for_messages([self], deadline):
            self._receive_all()
        self._receive_all()

    def _receive_all(self) -> None:
        message = self.next_message()
        while message is not None:
            if isinstance(message, EndedBadly):
                self._late_reports.append(message.report)
            message = self.next_message()

    def kill(self) -> None:
        """End the rank, if it has not ended."""
        self.process.kill()
        self.process.join()
        self.pipe.close()
        self._folder.cleanup()

    def _answer(self, **outcome: Any) -> Answer:
        return Answer(self.rank, **outcome, reports=self._reports, warnings=self._warnings)

    def _describe_death(self) -> str:
        ending = describe_exit(self.process)
        if ending.startswith("killed"):
            return f"was {ending}"
        return ending


def _stack_of_test(stack: str) -> str:
    """Leave out the lines of a stack that belong to pytest and to the rank itself."""
    lines = stack.splitlines(keepends=True)
    for number, line in enumerate(lines):
        if "/_pytest/" in line or "/ddpkit/testing/" in line:
            own = lines[:number]
            return "".join(own) if len(own) > 1 else stack
    return stack


class _Passed:
    """A file descriptor on its way to a new process."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (reduction.DupFd(self._number),)


def _received(passed: Any) -> int:
    number: int = passed.detach()
    return number
