"""Joining a job: one store, one generation of it, and every rank number claimed once.

A restarted job finds the keys of the dead one, so each start of a job is a *generation* of its own. Rank 0 draws its
number, every rank *claims* its rank under it, and rank 0 answers with the *roster* of all claims once they fit
together. A restarted rank that meets an old generation sees that the roster does not hold its claim and waits for the
next one.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from typing import Any, NoReturn, get_type_hints

import torch.distributed as dist

from ..errors import LaunchError
from ..launch.launchers import Launch, detect_launch
from ..launch.process_tree import ancestors, born
from .polling import Pause, aside
from .session import FAILURE, add, as_error, failure_record, parse, refuse_text
from .tcp_store import client, knock

_GRACE = 5.0  # seconds beyond the time-out in which the store must say that it is up
PLACE = ("local_rank", "local_world_size", "node_rank", "num_nodes")  # what a launcher may leave untold


class StartedByRank(LaunchError):
    """This process inherited the environment of a rank that is in its job."""


@dataclass(frozen=True)
class Member:
    """A rank's claim: who holds this number, where, and what it believes about the job."""

    rank: int
    world_size: int
    run_id: str | None
    under_agent: bool  # the store is torchrun's or spawn's and outlives a restart of the ranks
    watch: bool = True
    door: tuple[str, int] | None = None  # where rank 0's watch listens
    host: str = field(default_factory=socket.gethostname)
    machine: tuple[str, ...] = field(default_factory=lambda: _machine())
    pid: int = field(default_factory=os.getpid)
    born: str = field(default_factory=lambda: born(os.getpid()))
    cores: tuple[int, ...] = field(default_factory=lambda: _cores())
    nonce: str = field(default_factory=lambda: os.urandom(8).hex())

    def __str__(self) -> str:
        return f"{self.host} (pid {self.pid})"

    @classmethod
    def load(cls, text: bytes | str, rank: int) -> Member:
        """Read the claim of this rank from the store."""
        member = cls.of(parse(text, f"claim/{rank}", _CLAIM))
        if member.rank != rank:
            refuse_text(text, f"claim/{rank}")
        return member

    @classmethod
    def of(cls, entry: dict[str, Any]) -> Member:
        return cls(**entry | {k: tuple(v) for k, v in entry.items() if isinstance(v, list)})

    def dump(self) -> str:
        return json.dumps(asdict(self))

    @property
    def node(self) -> tuple[str, ...]:
        """What the ranks of one node share, and no others: a host name alone is also that of a cloned machine."""
        return self.host, *self.machine[:2]

    def is_alive(self) -> bool | None:
        """Whether the process still runs; None where that cannot be seen from here."""
        return born(self.pid) == self.born if self._is_here() and self.born else None

    def is_above_me(self) -> bool:
        """Return whether this process descends from it."""
        return self._is_here() and ancestors().get(self.pid) == self.born

    def _is_here(self) -> bool:
        return (self.host, self.machine) == (socket.gethostname(), _machine())


_CLAIM = get_type_hints(Member)


def denounce(address: str, port: int, reason: str, patience: float = 2.0, launch: Launch | None = None) -> None:
    """Tell a job that this process does not belong to it, so that its ranks do not wait.

    Not the job of a rank that started this process: it waits for nobody.

    Args:
        address: Where the job's store is, or will be.
        port: The same.
        reason: What to tell.
        patience: Seconds in which the job must begin.
        launch: This process's, if it is one of the job's ranks. It does not wait for a job that all ranks refuse.
    """
    deadline = time.monotonic() + patience
    with contextlib.suppress(OSError, RuntimeError):
        store = _visit(address, port, deadline)
        refusals = _note_refusal(store, launch) if launch else []
        while time.monotonic() < deadline:
            if room := _last_room(store):
                if not _starter(room):
                    _poison(room, reason)
                    if launch and not room.check(["roster"]):
                        add(room, "heard", 1)
                return
            if refusals and store.check(refusals):
                return
            time.sleep(0.1)


def _note_refusal(store: dist.Store, launch: Launch) -> list[str]:
    """Leave a note that this rank refuses to join; return the keys of all ranks' notes."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # an agent's store outlives it
    notes = [f"ddpkit/refusals/{attempt}/{rank}" for rank in range(launch.world_size)]
    store.set(notes[launch.rank], "")
    return notes


def call_off(store: dist.Store, world_size: int, reason: str) -> None:
    """Tell the ranks that come to the store, which this rank 0 hosts, why it will not join them.

    It stays until all have heard, at most 5 s.
    """
    _, room = _new_room(store)
    _poison(room, reason)
    _await_readers(room, world_size, 5.0)


def refuse_child(address: str, port: int, world_size: int) -> bool:
    """Return whether a rank of the job there started this process, which is then a job of its own of one rank.

    Raises:
        StartedByRank: If this process is to be one of several ranks.
    """
    try:
        room = _last_room(_visit(address, port, time.monotonic() + 2))
        starter = _starter(room) if room else None
    except (OSError, RuntimeError):  # it is no store, or does not answer
        return False
    if starter and world_size > 1:
        raise StartedByRank(_inherited(starter))
    return starter is not None


def _visit(address: str, port: int, deadline: float) -> dist.Store:
    knock(address, port, deadline)
    return client(address, port, timedelta(seconds=3))


def _room(store: dist.Store, generation: int) -> dist.Store:
    return dist.PrefixStore(f"ddpkit/{generation}", store)


def _new_room(store: dist.Store) -> tuple[int, dist.Store]:
    generation = add(store, "ddpkit/generation", 1)
    return generation, _room(store, generation)


def _last_room(store: dist.Store) -> dist.Store | None:
    generation = add(store, "ddpkit/generation", 0)
    return _room(store, generation) if generation else None


def _starter(room: dist.Store) -> Member | None:
    """Return the rank of a complete job, which has not ended, that started this process; None if there is none."""
    if not room.check(["roster"]) or _is_over(room):
        return None
    return next((member for member in _read_roster(room) if member.is_above_me()), None)


def _is_over(room: dist.Store) -> bool:
    """Return whether all ranks have left in good order: then nobody reads or writes here any more."""
    return room.check(["roster", "left"]) and add(room, "left", 0) >= len(_read_roster(room))


def _inherited(starter: Member) -> str:
    evidence = [line.partition("=") for line in detect_launch(os.environ).evidence if " " not in line]
    return (
        f"Rank {starter.rank} of a running job, {starter}, started this process, which has inherited its environment "
        "and is no rank. The job goes on without it. To run it alone, start it without "
        f"{', '.join(name for name, sign, _ in evidence if sign)}."
    )


def join(
    store: dist.Store, me: Member, timeout: timedelta, orphaned: Callable[[], str] = str
) -> tuple[dist.Store, list[Member]]:
    """Agrees with all ranks on a generation and on who is who; raises `LaunchError` on every rank if that cannot be.

    `orphaned()` is what became of the process that must outlive this one, "" as long as it lives.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    meet = _lead if me.rank == 0 else _follow
    try:
        patience = timeout.total_seconds() + _GRACE
        return aside(lambda: meet(store, me, deadline, timeout), patience, lambda: refuse(orphaned()))
    except TimeoutError:
        raise LaunchError(
            f"Rank {me.rank} did not join within {timeout}: the store does not answer. Is the process that hosts it, "
            "rank 0 or torchrun, stopped or cut off?"
        ) from None
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        refuse(orphaned())
        raise LaunchError(f"Rank {me.rank} lost the store while joining; its host has gone: {error}") from error


def refuse(reason: str) -> None:
    """Raises, if there is a reason not to join."""
    if reason:
        raise LaunchError(f"This rank cannot join: {reason}.")


def place(launch: Launch, me: Member, roster: list[Member]) -> Launch:
    """Fills in what the launcher did not tell, from the nodes of all ranks."""
    near = [member for member in roster if member.node == me.node]
    nodes = list(dict.fromkeys(member.node for member in roster))
    found = (near.index(me), len(near), nodes.index(me.node), len(nodes))
    untold: dict[str, Any] = {k: v for k, v in zip(PLACE, found, strict=True) if getattr(launch, k) is None}
    return replace(launch, **untold)


def _lead(store: dist.Store, me: Member, deadline: float, timeout: timedelta) -> tuple[dist.Store, list[Member]]:
    former = _last_room(store)
    if former and (starter := _starter(former)):
        if me.world_size > 1:
            raise StartedByRank(_inherited(starter))
        store = dist.HashStore()  # a job of its own, of one rank
    generation, room = _new_room(store)
    room.set("claim/0", me.dump())
    roster: dict[int, Member] = {0: me}
    readers = 0 if me.under_agent else me.world_size
    pause = Pause()
    while len(roster) < me.world_size:
        for rank in set(range(me.world_size)) - roster.keys() if add(room, "claims", 0) >= len(roster) else ():
            if room.check([f"claim/{rank}"]):
                roster[rank] = Member.load(room.get(f"claim/{rank}"), rank)
                if problem := _disagreement(me, roster[rank]):
                    _poison(room, problem)
        _raise_if_poisoned(room, readers)
        if time.monotonic() > deadline:
            _poison(room, _absent(room, me.world_size, timeout))
        pause()
    members = [roster[rank] for rank in range(me.world_size)]
    room.set("roster", json.dumps({"members": [asdict(member) for member in members]}))
    _raise_if_poisoned(room, readers)  # by somebody who came too early to see the roster, and to warn the watch
    _sweep(store, generation - 1)
    return room, members


def _sweep(store: dist.Store, generation: int) -> None:
    """Delete what this generation and those before it left in the store, where all ranks had left in good order.

    All ranks have joined the next one, so nobody reads it any more. What a failed one left stays: it tells why.
    """
    while (room := _room(store, generation)).check(["roster"]):
        if _is_over(room):
            for key in _keys(room):
                room.delete_key(key)
        generation -= 1


def _keys(room: dist.Store) -> list[str]:
    """Name the keys of a generation; without those of its last meeting where torch cannot list them (torch 2.6)."""
    with contextlib.suppress(AttributeError, RuntimeError):
        return list(room.list_keys())
    names = ["claims", "left"]
    for rank in range(len(_read_roster(room))):
        names += [f"claim/{rank}", f"group//cpu//0/{rank}"]
    return [*names, "roster"]


def _follow(store: dist.Store, me: Member, deadline: float, timeout: timedelta) -> tuple[dist.Store, list[Member]]:
    def unsure(holder: Member) -> bool:  # on another host; an agent gives a number again only when its holder has ended
        return holder.is_alive() is None and not me.under_agent

    room, seen, pause = None, 0, Pause()  # the room in which this rank's claim stands
    while True:
        generation = add(store, "ddpkit/generation", 0)
        if generation > seen:  # rank 0 may have drawn a newer one: those before it belong to dead attempts
            here, seen = _room(store, generation), generation
            if starter := _starter(here):
                raise StartedByRank(_inherited(starter))
            holder = Member.load(here.compare_set(f"claim/{me.rank}", "", me.dump()), me.rank)
            room = here if holder.nonce == me.nonce else None
            if room:
                add(room, "claims", 1)
            elif (holder.pid, holder.born) != (me.pid, me.born):  # else it is our own from before a teardown
                if (holder.is_alive() or unsure(holder)) and not _is_over(here):
                    _usurped(here, me, holder)
                if holder.is_alive() is False and not here.check(["roster"]):  # others may wait for it
                    _poison(here, f"Rank {me.rank} on {holder} ended while the ranks joined. Start all of them anew.")
        if room:
            complete = room.check(["roster"])  # before the look at the poison, as rank 0 looks at it once more
            _raise_if_poisoned(room)
            if complete:
                roster = _read_roster(room)
                if len(roster) != me.world_size:
                    refuse_text(room.get("roster"), "roster")
                return room, roster
        if time.monotonic() > deadline:
            if room is None:
                raise LaunchError(
                    f"Rank 0 did not join within {timeout}. Is it running, and is MASTER_ADDR its address?"
                )
            _poison(room, _absent(room, me.world_size, timeout))
        pause()


def _disagreement(mine: Member, other: Member) -> str | None:
    if other.world_size != mine.world_size:
        return (
            f"Rank 0 on {mine} was told WORLD_SIZE={mine.world_size}, rank {other.rank} on {other} was told "
            f"WORLD_SIZE={other.world_size}. Start all ranks with one value."
        )
    if other.watch != mine.watch:
        return (
            f"Rank 0 on {mine} has watch={mine.watch}, rank {other.rank} on {other} the opposite. Pass one to setup()."
        )
    if mine.run_id and other.run_id and mine.run_id != other.run_id:
        return (
            f"Rank 0 on {mine} belongs to run {mine.run_id!r}, rank {other.rank} on {other} to run {other.run_id!r}: "
            "two jobs meet at one MASTER_ADDR:MASTER_PORT. Give each its own MASTER_PORT."
        )
    return None


def _usurped(room: dist.Store, me: Member, holder: Member) -> NoReturn:
    reason = f"Two processes claim rank {me.rank}: {holder} and {me}. Give every process its own RANK."
    if me.node == holder.node:
        reason += " If RANK and WORLD_SIZE count nodes or pods here, start torchrun once on each instead."
    _poison(room, reason)
    raise LaunchError(reason)


def _absent(room: dist.Store, world_size: int, timeout: timedelta) -> str:
    absent = [rank for rank in range(world_size) if not room.check([f"claim/{rank}"])]
    advice = "Are they running, with this MASTER_ADDR and MASTER_PORT?"
    return f"Ranks {absent} of {world_size} did not join within {timeout}. {advice}"


def _poison(room: dist.Store, reason: str) -> None:
    room.compare_set("failure", "", json.dumps(failure_record(-1, LaunchError(reason))))
    if room.check(["roster"]):  # the others have joined: only their watch can tell them
        _warn_watch(_read_roster(room), reason)


def _raise_if_poisoned(room: dist.Store, readers: int = 0) -> None:
    """Raises what somebody found wrong; the store's host first gives the other readers up to 2 s to see it."""
    if room.check(["failure"]):
        record = parse(room.get("failure"), "failure", FAILURE)
        _await_readers(room, readers, 2.0)
        raise as_error(record)


def _await_readers(room: dist.Store, readers: int, seconds: float) -> None:
    """Count this rank among those that have heard why the job is off, and wait until so many have."""
    heard, end = add(room, "heard", 1), time.monotonic() + seconds
    while heard < readers and time.monotonic() < end:
        time.sleep(0.01)
        heard = add(room, "heard", 0)


def _read_roster(room: dist.Store) -> list[Member]:
    text = room.get("roster")
    roster = [Member.of(entry) for entry in parse(text, "roster", {"members": [_CLAIM]})["members"]]
    if not roster or [member.rank for member in roster] != list(range(roster[0].world_size)):
        refuse_text(text, "roster")
    return roster


def _warn_watch(roster: list[Member], reason: str) -> None:
    if roster[0].door is None:
        return
    host, port = roster[0].door
    line = json.dumps({"token": roster[0].nonce, "failure": failure_record(-1, LaunchError(reason))})
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=2) as wire:
        wire.sendall(line.encode() + b"\n")


def _machine() -> tuple[str, ...]:
    """The machine's boot, this process's network and its process numbers there; () where the system does not tell."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip(), *(os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "pid"))
    except OSError:
        return ()


def _cores() -> tuple[int, ...]:
    return (
        tuple(sorted(os.sched_getaffinity(0)))
        if hasattr(os, "sched_getaffinity")
        else tuple(range(os.cpu_count() or 1))
    )
