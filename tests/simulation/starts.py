"""Jobs in a simulated world: ranks that join, meet, compute, fail and leave by the real protocol."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from outside import HostedStore, connect_to_store, monotonic, sleep
from store import Server, Store
from world import Killed, Process, Task, World

from ddpkit.errors import LaunchError
from ddpkit.job import joining as startup
from ddpkit.job import leaving
from ddpkit.job.job import Job, Options, context_of
from ddpkit.job.joining import is_child_of_rank
from ddpkit.launch.launch import Launch
from ddpkit.rendezvous.session import Session
from ddpkit.rendezvous.sockets import probe

TIMEOUT = timedelta(seconds=10)
BOUND = 60.0  # seconds in which everything must be over, whatever happens


@dataclass(eq=False)
class Rank:
    """A process that wants to be a rank, and what came of it.

    Attributes:
        process: The process.
        rank: The number that it claims.
        session: The job that it has joined; None before.
        token: The secret of that job.
        error: What it ended with; None if it ended well or was ended.
        has_ended_well: Whether it has left the job in good order.
        value: What its script returned.
    """

    process: Process
    rank: int
    session: Session | None = None
    token: str = ""
    error: BaseException | None = None
    has_ended_well: bool = False
    value: Any = None
    notes: list[Any] = field(default_factory=list)

    def __str__(self) -> str:
        if self.has_ended_well:
            return f"{self.process.name} ended well"
        if self.error is not None:
            first = str(self.error).partition("\n")[0][:150]
            return f"{self.process.name}: {type(self.error).__name__}: {first}"
        return f"{self.process.name} {'was ended' if self.process.is_dead else 'hangs'}"


Script = Callable[[Rank, Job], Any]


class Group:
    """What stands for gloo's group: an all-reduce ends when all are there, and breaks when one of them ends."""

    def __init__(self, world: World, size: int) -> None:
        self._world = world
        self._size = size
        self._members: list[Process] = []
        self._calls: dict[tuple[Process, int], Any] = {}
        self._counts: dict[Process, int] = {}
        self._waiting: list[Task] = []
        self._is_cut = False

    def enter(self) -> None:
        """Make the running process a member."""
        process = self._world.running
        self._members.append(process)
        process.at_end.append(self._wake)

    def cut(self) -> None:
        """Break it, for all."""
        self._is_cut = True
        self._wake()

    def _wake(self) -> None:
        for task in self._waiting:
            self._world.wake(task, self._world.latency(task.process))

    def all_gather(self, value: Any, rank: int) -> list[Any]:
        """Return the values of all, in the order of their ranks."""
        world, me = self._world, self._world.running
        deadline = world.now + TIMEOUT.total_seconds()
        number = self._counts.get(me, 0)
        self._counts[me] = number + 1
        world.pause()
        self._calls[me, number] = rank, value
        self._wake()
        while len(self._members) < self._size or any((each, number) not in self._calls for each in self._members):
            if self._is_cut or any(each.is_dead for each in self._members):
                break
            assert world.current is not None
            if world.now > deadline:
                self.cut()
                raise RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:1] Timed out waiting 10000ms for recv")
            self._waiting.append(world.current)
            world.suspend(deadline + 0.01)
            self._waiting.remove(world.current)
        world.pause()  # in which another may end, that has done its part or not
        world.running.handle_signals()
        found = [self._calls.get((each, number)) for each in self._members]
        is_late = any(each.is_dead for each in self._members) and world.random.random() < 0.5
        if self._is_cut or is_late or None in found or len(found) < self._size:
            raise RuntimeError("[gloo/transport/tcp/pair.cc:1] Connection closed by peer")
        return [value for _, value in sorted(found)]


class Start:
    """One start of a job.

    Args:
        world: Where it is.
        size: Number of ranks.
        server: The store, if it outlives the ranks; else rank 0 hosts one.
    """

    def __init__(self, world: World, size: int, server: Server | None = None) -> None:
        self.world = world
        self.size = size
        self.ranks: list[Rank] = []
        self.begins: list[float] = []  # seconds after which they start
        self.groups: dict[str, Group] = {}
        self._server = server
        self._master = ("here", 1)  # where rank 0 hosts the store

    def start(
        self,
        rank: int,
        script: Script,
        after: float,
        host: str = "here",
        size: int | None = None,
        joins: bool = True,
    ) -> Rank:
        """Start a process that claims a rank, so many seconds later; the script joins by itself if this does not."""
        world = self.world
        if rank == 0:
            self._master = (host, 1)
        process = world.process(f"rank {rank}{chr(97 + len(self.ranks))}", host)
        mine = Rank(process, rank)
        self.ranks.append(mine)
        self.begins.append(after)
        world.at(world.now + after, lambda: process.start(lambda: self._main(mine, script, size or self.size, joins)))
        return mine

    def group_of(self, session: Session, name: str) -> Group:
        """Return the group of one generation, whose connections end with the job."""
        group = self.groups.setdefault(name, Group(self.world, len(session.hosts)))
        session.connections = {group.cut}
        self.world.running.ranks = range(len(session.hosts))
        group.enter()
        return group

    def new_job(self, rank: int, size: int) -> Job:
        """Describe the job of a rank before it joins."""
        kind = "spawn" if self._server is not None else "platform"
        host, port = self._master
        launch = Launch(kind, rank, size, master_addr=host, master_port=port)
        asked = Options("gloo", torch.device("cpu"), TIMEOUT)
        return Job(launch, asked, context_of(launch, torch.device("cpu"), master=f"{host}:{port}"))

    def _main(self, mine: Rank, script: Script, size: int, joins: bool) -> None:
        job = self.new_job(mine.rank, size)
        self.world.note(f"{mine.process.name} begins")
        try:
            if joins:
                self.join(mine, job)
            mine.value = script(mine, job)
        except Killed:
            raise
        except BaseException as error:
            self._fail(mine, job, error)
            mine.process.end(1)
        else:
            if job.session is not None:
                leave(job)
            mine.has_ended_well = True
            mine.process.end(0)

    def join(self, mine: Rank, job: Job) -> None:
        """Join a job."""
        opened = startup.OpenStore(self._open(job), *self._master, startup._host_of(job.launch))
        session, members = startup.join_and_watch(job, opened)
        mine.token = members.token
        session.barrier(session.count("group made"))  # as gloo connects each rank with each
        mine.session = session
        self.world.note(f"{mine.process.name} has joined")

    def _open(self, job: Job) -> Store:
        """Do as `startup._open_store()`."""
        timeout = job.asked.timeout
        if self._server is not None:
            return Store(self._server, timeout)
        if job.launch.rank == 0:
            return self._host(job.launch.world_size, tries_again=True)
        deadline = monotonic() + timeout.total_seconds()
        while monotonic() < deadline:
            with suppress(LaunchError):  # torch's client tries again and again
                return connect_to_store(*self._master, timeout)
            sleep(0.05)
        raise LaunchError("Nobody answers")

    def _host(self, size: int, tries_again: bool) -> Store:
        try:
            return HostedStore(*self._master)
        except RuntimeError as error:
            is_child_of_rank(*self._master, size)
            if tries_again and not probe(*self._master):
                return self._host(size, tries_again=False)
            raise LaunchError(f"the port of rank 0 is taken: {error}") from None

    def _fail(self, mine: Rank, job: Job, error: BaseException) -> None:
        """Do as `distributed()` does with an error that leaves its block."""
        mine.process.handles_failure = True
        if job.session is None:
            mine.error = error
        else:
            mine.error = report(job, error)
            leave(job)
        self.world.note(str(mine))


def report(job: Job, error: BaseException) -> BaseException:
    """Do as `lifecycle.report()`."""
    session = job.session
    assert session is not None
    cause = session.explain(error, session) or error
    leaving.publish(cause, session, job.watch)
    return cause


def leave(job: Job) -> None:
    """Do as `teardown()` does."""
    session = job.session
    assert session is not None
    session.failures.muted = True
    if session.failures.known is not None:
        session.cut_connections(flush=True)
    if job.watch is not None:
        job.watch.close()
    session.leave(job.hosts_store)
