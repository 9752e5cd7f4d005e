"""A simulated world for a protocol: processes with threads, a clock, and a seed that decides what happens when.

One real thread runs everything. Whatever a simulated thread does to the outside takes a random time, in which others
go on; so a seed is an order of events, and the same seed is the same order. A process may be killed or stopped at any
of these moments.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

from greenlet import getcurrent, greenlet

_NEVER = float("inf")


class Killed(BaseException):
    """Raised in a thread of a process that has ended, so that it does nothing more."""


class Task:
    """A thread of a simulated process."""

    def __init__(self, process: Process, work: Callable[[], object]) -> None:
        self.process = process
        self.ticket = 0  # of its present wait: a timer or a call to wake up for an earlier one is passed over
        self.can_be_interrupted = False
        self.is_done = False
        self.error: BaseException | None = None
        self._work = work
        self._waiting: list[Task] = []
        self.greenlet = greenlet(self._run, parent=process.world.hub)

    def _run(self) -> None:
        try:
            self._work()
        except Killed:
            pass
        except BaseException as error:
            self.error = error
        self.is_done = True
        for task in self._waiting:
            self.process.world.wake(task)

    def join(self, seconds: float | None = None) -> None:
        """Wait until it has ended, at most so long."""
        world = self.process.world
        deadline = _NEVER if seconds is None else world.now + seconds
        assert world.current is not None
        while not self.is_done and world.now < deadline:
            self._waiting.append(world.current)
            world.sleep_until(deadline)
            self._waiting.remove(world.current)


class Process:
    """A simulated process. Its main thread can be interrupted by a signal."""

    def __init__(self, world: World, name: str, host: str, pid: int) -> None:
        self.world = world
        self.name = name
        self.host = host
        self.pid = pid
        self.is_dead = False
        self.is_stopped = False
        self.code: int | None = None
        self.slowness = 10 ** world.random.uniform(-0.5, 1.0)
        self.main: Task | None = None
        self.tasks: list[Task] = []
        self.at_end: list[Callable[[], None]] = []  # what the kernel does
        self.handles_failure = False  # whether its main thread is ending for one
        self.ranks: Sequence[int] = ()  # of the process group that it is in
        self.survivor: Any = None  # its job, if that may lose ranks
        self._held: list[Task] = []
        self._handler: Callable[[], None] | None = None
        self._waiting: list[Task] = []  # of other processes, for an answer of this one

    def start(self, work: Callable[[], object]) -> Task:
        """Start a thread, the first of which is the main one."""
        task = Task(self, work)
        self.tasks.append(task)
        if self.main is None:
            self.main = task
        self.world.wake(task, self.world.latency(self))
        return task

    def end(self, code: int) -> None:
        """End the process at once, as SIGKILL or `os._exit` do."""
        if self.is_dead:
            return
        self.world.note(f"{self.name} ends with {code}")
        self.is_dead = True
        self.code = code
        for act in self.at_end:
            act()
        self._answer()

    def stop(self) -> None:
        """Stop the process, as SIGSTOP does."""
        self.world.note(f"{self.name} is stopped")
        self.is_stopped = True

    def go_on(self) -> None:
        """Let a stopped process go on."""
        self.world.note(f"{self.name} goes on")
        self.is_stopped = False
        held, self._held = self._held, []
        for task in held:
            self.world.wake(task)
        self._answer()

    def hold(self, task: Task) -> None:
        """Keep a thread of a stopped process for later."""
        self._held.append(task)

    def wait_for_answer(self) -> None:
        """Let a thread of another process wait until this one, which is stopped, goes on or ends, or it is woken."""
        assert self.world.current is not None
        task = self.world.current
        self._waiting.append(task)
        self.world.suspend(None)
        if task in self._waiting:
            self._waiting.remove(task)

    def _answer(self) -> None:
        waiting, self._waiting = self._waiting, []
        for task in waiting:
            self.world.wake(task)

    def interrupt(self, handler: Callable[[], None]) -> None:
        """Run a signal's handler in the main thread: now if it sleeps, else when its call has returned."""
        self._handler = handler
        if self.main is not None and self.main.can_be_interrupted:
            self.world.wake(self.main)

    def handle_signals(self) -> None:
        """Run the handler of a signal that has come."""
        handler, self._handler = self._handler, None
        if handler is not None:
            handler()


class World:
    """What all simulated processes share.

    Args:
        seed: Decides everything.
        is_told: Called with a time and a line for each event, to look into a seed.
    """

    def __init__(self, seed: int, is_told: Callable[[float, str], None] | None = None) -> None:
        self.random = random.Random(seed)
        self._draw = self.random.random
        self.now = 1e6  # seconds that no real clock here has reached: whoever reads one is far behind, and fails
        self.hub = getcurrent()
        self.current: Task | None = None
        self.is_over = False
        self.processes: list[Process] = []
        self._is_told = is_told
        self._queue: list[tuple[float, float, int, Any, int]] = []
        self._numbers = itertools.count()
        self._pids = itertools.count(100)
        self._cuts: set[frozenset[str]] = set()

    def note(self, line: str) -> None:
        """Tell of an event."""
        if self._is_told is not None:
            self._is_told(self.now, line)

    def process(self, name: str, host: str = "here") -> Process:
        """Make a process."""
        process = Process(self, name, host, next(self._pids))
        self.processes.append(process)
        return process

    @property
    def running(self) -> Process:
        """The process that is running."""
        assert self.current is not None
        return self.current.process

    # Time

    def at(self, when: float, act: Callable[[], object]) -> None:
        """Let something happen at a moment."""
        heapq.heappush(self._queue, (when, self._draw(), next(self._numbers), act, -1))

    def wake(self, task: Task, after: float = 0.0) -> None:
        """Let a thread go on from its present wait."""
        heapq.heappush(self._queue, (self.now + after, self._draw(), next(self._numbers), task, task.ticket))

    def suspend(self, until: float | None) -> None:
        """Let others run until this thread is woken, or a moment has come."""
        task = self.current
        assert task is not None
        if self.is_over or task.process.is_dead:
            raise Killed
        if until is not None and until < _NEVER:
            self.wake(task, max(0.0, until - self.now))
        self.hub.switch()
        if self.is_over or task.process.is_dead:
            raise Killed

    def sleep_until(self, deadline: float) -> None:
        """Wait for a moment or to be woken; a signal interrupts the wait."""
        task = self.current
        assert task is not None
        task.can_be_interrupted = task is task.process.main
        try:
            self.suspend(deadline)
        finally:
            task.can_be_interrupted = False
        if task is task.process.main:
            task.process.handle_signals()

    def sleep(self, seconds: float) -> None:
        """Wait so long."""
        deadline = self.now + max(0.0, seconds) + self.latency(self.running)
        while self.now < deadline:
            self.sleep_until(deadline)

    def latency(self, process: Process) -> float:
        """Draw how long a process takes to act on the outside: most often tens of microseconds, rarely milliseconds."""
        drawn = self._draw()
        if drawn < 0.75:
            most = 5e-5
        elif drawn < 0.95:
            most = 1e-3
        elif drawn < 0.995:
            most = 1e-2
        else:
            most = 5e-2
        return most * process.slowness * self._draw()

    def pause(self) -> None:
        """Let the time pass that an act on the outside takes; signals wait until it is done."""
        task = self.current
        assert task is not None
        process = task.process
        if self.is_over or process.is_dead:
            raise Killed
        when = self.now + self.latency(process)
        heapq.heappush(self._queue, (when, self._draw(), next(self._numbers), task, task.ticket))
        self.hub.switch()
        if self.is_over or process.is_dead:
            raise Killed

    def run(self, seconds: float) -> bool:
        """Let everything happen, at most so long; return whether all has happened."""
        limit = self.now + seconds
        while self._queue:
            when, _, _, what, ticket = heapq.heappop(self._queue)
            if when > limit:
                return False
            if when > self.now:
                self.now = when
            if ticket == -1:
                what()
            elif what.ticket == ticket and not what.is_done and not what.process.is_dead:
                self._resume(what)
        return True

    def _resume(self, task: Task) -> None:
        if task.process.is_stopped:
            task.process.hold(task)
            return
        task.ticket += 1
        self.current = task
        task.greenlet.switch()
        self.current = None

    def close(self) -> None:
        """End all threads that are left."""
        self.is_over = True
        for process in self.processes:
            process.is_dead = True
            for task in process.tasks:
                self.current = task
                while task.greenlet and not task.is_done:  # it has begun, and goes on to its end
                    task.greenlet.throw(Killed)
        self.current = None

    # The network

    def cut(self, one: str, other: str) -> None:
        """Let nothing pass between two hosts."""
        self.note(f"the network between {one} and {other} is cut")
        self._cuts.add(frozenset((one, other)))

    def is_cut(self, one: str, other: str) -> bool:
        """Return whether nothing passes between two hosts."""
        return frozenset((one, other)) in self._cuts
