"""Agree on the remaining members of a job after a loss, without the job's store, which may be lost, too.

Each member keeps a store of its own. The remaining members ask all members at once; one with a closed port has ended.
The first that answers leads: it waits for the others, and tells them the members.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
import uuid
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from typing import get_type_hints

import torch.distributed as dist

from ..errors import LaunchError
from ..job.joining import host_address
from ..parsing import opened, parse, sealed
from ..rendezvous import sockets
from ..rendezvous.failures import Failure, JobContinues
from ..rendezvous.generation import Generation
from ..rendezvous.session import Session
from ..rendezvous.sockets import probe
from ..rendezvous.store import call_with_timeout, connect_to_store, host_on, polls

log = logging.getLogger(__name__)
_READING = 2.0  # seconds for the others to read an answer
_BETWEEN_PROBES = 0.05  # seconds
_LEADERS_PATIENCE = 10.0  # seconds that others wait longer than the leader
_DECIDED = "decided"

Address = tuple[str, int]


@dataclass(frozen=True)
class Candidate:
    """A member's request to continue.

    Attributes:
        member: Its number: its rank at the start of the job.
        regroupings: Number of decisions it has received.
        steps: Number of its committed steps.
        is_consistent: Whether its states are those of that step, not of the middle of the next.
        address: Address of its store, as exchanged at the start: that of another process with its number differs.
        answer: Key where it waits for the quorum.
    """

    member: int
    regroupings: int
    steps: int
    is_consistent: bool
    address: Address
    answer: str = ""


@dataclass(frozen=True)
class Quorum:
    """The members that continue, and the step they continue from.

    Attributes:
        regrouping: Number of this decision.
        members: In the order of their new ranks.
        leader: The member that decided, and hosts the store in which they meet.
        steps: Number of committed steps to resume from.
        source: A member with the states of that step.
        refusal: Reason why nobody continues; "" if the members do.
    """

    regrouping: int
    members: list[int]
    leader: int
    steps: int
    source: int
    refusal: str = ""


_CANDIDATE = get_type_hints(Candidate)
_QUORUM = {**get_type_hints(Quorum), "members": [int]}


def decide(leader: int, candidates: Collection[Candidate], unknown: Collection[int], least: int) -> Quorum:
    """Decide who continues.

    Args:
        leader: The deciding member.
        candidates: Requests of the members that answered.
        unknown: Members that did not answer but may be alive, across a network partition.
        least: Smallest number of members.
    """
    members = sorted(candidate.member for candidate in candidates)
    whole = [candidate for candidate in candidates if candidate.is_consistent]
    steps = max((candidate.steps for candidate in whole), default=0)
    able = sorted(candidate.member for candidate in whole if candidate.steps == steps)
    refusal = ""
    if not able:
        refusal = "no remaining rank has the states of a complete step"
    elif len(members) < least:
        refusal = f"{len(members)} ranks remain, but min_ranks is {least}"
    elif not _may_speak_for_all(members, unknown):
        refusal = f"members {sorted(unknown)} cannot be reached, and may continue without this rank"
    number = 1 + max(candidate.regroupings for candidate in candidates)
    return Quorum(number, members, leader, steps, able[0] if able else -1, refusal)


def _may_speak_for_all(members: Sequence[int], unknown: Collection[int]) -> bool:
    """Return whether the absent members cannot be the majority; of two halves the one with the first member wins."""
    if len(members) != len(unknown):
        return len(members) > len(unknown)
    return members[0] < min(unknown)


class Rendezvous:
    """Where the members of a job meet again after a loss.

    Args:
        member: This process's number.
        host: Address at which the others reach this process.
        patience: Seconds to wait for a member that may be alive.
        secret: The job's secret: it authorises deciding, and asking, who continues. It is in no store.

    Attributes:
        addresses: Addresses of the members' stores.
        secret: As given.
    """

    def __init__(self, member: int, host: str, patience: float, secret: bytes) -> None:
        self.member = member
        self.secret = secret
        self._regroupings = 0
        self._patience = patience
        self._heartbeat = _Heartbeat(patience)
        self._noted = 0  # absences before the others last worked with this member
        self._excused = 0  # absences after which they still did
        self._answered: set[str] = set()  # keys of answers already given
        self._store = host_store(host)
        self.address = (self._store.host, self._store.port)
        self.addresses: dict[int, Address] = {member: self.address}

    @classmethod
    def of_job(cls, session: Session, patience: float, secret: bytes) -> Rendezvous:
        """Create one on each rank of a job. Collective."""
        one_node = len(set(session.nodes)) == 1
        host = "127.0.0.1" if one_node else host_address(session.store)
        rendezvous = cls(session.rank, host, patience, secret)
        everyone = session.exchange(json.dumps({"address": rendezvous.address}))
        found = [parse(text, "rendezvous", {"address": Address})["address"] for text in everyone]
        rendezvous.addresses = {rank: (host, port) for rank, (host, port) in enumerate(found)}
        return rendezvous

    def record_contact(self) -> None:
        """Record that the others have worked with this member since the last record."""
        self._excused, self._noted = self._noted, self._heartbeat.absences()

    def close(self) -> None:
        """Show the others that this member does not continue."""
        self._heartbeat.close()
        del self._store

    def has_ended(self, member: int) -> bool:
        """Return whether a member's process has ended: its host refuses connections to it."""
        return probe(*self.addresses[member]) is False

    def _ask(self, members: Collection[int]) -> dict[int, bool | None]:
        """Return for each member whether it accepts a connection; all at once, because each may be slow."""
        found: dict[int, bool | None] = {}

        def ask(member: int) -> None:
            found[member] = probe(*self.addresses[member])

        threads = [threading.Thread(target=partial(ask, member), daemon=True) for member in members]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    def regroup(
        self, steps: int, is_consistent: bool, members: Collection[int], least: int, gone: Collection[int]
    ) -> tuple[Quorum, dist.Store]:
        """Agree on who continues.

        Args:
            steps: Number of this rank's committed steps.
            is_consistent: Whether its states are those of that step.
            members: The members before the loss.
            least: Smallest number of members.
            gone: Members that announced that they do not continue.

        Returns:
            The quorum, and the store in which its members meet.

        Raises:
            LaunchError: If nobody continues, or the others continue without this rank.
        """
        me = Candidate(self.member, self._regroupings, steps, is_consistent, self.address)
        candidates = set(members) - set(gone)
        while True:
            answers = self._ask(candidates - {self.member}) | {self.member: True}
            leader = min(member for member, answer in answers.items() if answer)
            if leader == self.member:
                return self._accept(self._lead(me, members, least, gone)), self._store
            quorum, store = self._follow(leader, me, self._patience + _LEADERS_PATIENCE)
            if quorum is not None:
                return self._accept(quorum), store
            candidates.remove(leader)

    def _follow(self, leader: int, me: Candidate, seconds: float) -> tuple[Quorum | None, dist.Store]:
        """Wait for the quorum of a possible leader; None if it has ended or does not answer."""
        try:  # on another thread: a stopped leader's store does not answer
            return call_with_timeout(
                lambda: self._ask_leader(leader, me, seconds), seconds, lambda: self._check(leader)
            )
        except (RuntimeError, TimeoutError):  # the leader has ended, or cannot be reached
            return None, self._store

    def _ask_leader(self, leader: int, me: Candidate, seconds: float) -> tuple[Quorum, dist.Store]:
        store = connect_to_store(*self.addresses[leader], timedelta(seconds=seconds))
        place = self.addresses[leader]
        if store.check([_DECIDED]):
            last = self._read_quorum(place, store, _DECIDED)
            if last.regrouping > me.regroupings and self.member not in last.members:
                return last, store  # it was made without this rank
        answer = f"answer/{uuid.uuid4().hex}"
        key = _candidate_key(self.member)
        store.set(key, sealed(self.secret, [place, key], asdict(replace(me, answer=answer))))
        for _ in polls(seconds):
            if store.check([answer]):  # which raises when the leader ends
                break
        else:
            raise TimeoutError(f"member {leader} does not decide")
        quorum = self._read_quorum(place, store, answer)
        store.delete_key(answer)
        return quorum, store

    def _check(self, leader: int) -> None:
        if self.has_ended(leader):
            raise RuntimeError(f"member {leader} has ended")

    def _lead(self, me: Candidate, members: Collection[int], least: int, gone: Collection[int]) -> Quorum:
        """Wait for the members that are alive, and tell them who continues."""
        candidates = {self.member: me}
        others = set(members) - {self.member}
        ended = set(gone)
        next_probe = 0.0
        for _ in polls(self._patience):
            for member in others:
                arrived = self._read_candidate(member)
                if arrived is not None:
                    candidates[member] = arrived
            if time.monotonic() >= next_probe:
                ended |= {member for member, answer in self._ask(others - ended).items() if answer is False}
                next_probe = time.monotonic() + _BETWEEN_PROBES
            absent = others - candidates.keys() - ended
            if not absent:
                break
        present = [candidate for member, candidate in candidates.items() if member not in ended]
        was_away = self._heartbeat.absences() > self._excused
        unknown = absent | (ended if was_away else set())  # they may have continued, and ended normally
        quorum = decide(self.member, present, unknown, least)
        self._write_quorum(quorum, _DECIDED)
        del candidates[self.member]
        for member, candidate in candidates.items():
            self._store.delete_key(_candidate_key(member))
            self._write_quorum(quorum, candidate.answer)
        answers = [candidate.answer for candidate in candidates.values()]
        self._answered.update(answers)
        if quorum.refusal:  # this process ends with it
            self._wait_for_readers(answers)
        return quorum

    def _wait_for_readers(self, answers: list[str]) -> None:
        for _ in polls(_READING):
            if not any(self._store.check([answer]) for answer in answers):
                return

    def _read_candidate(self, member: int) -> Candidate | None:
        """Return the request under this number; delete foreign writes."""
        key = _candidate_key(member)
        if not self._store.check([key]):
            return None
        try:
            place = [self.address, key]
            candidate = Candidate(**opened(self.secret, place, self._store.get(key), key, _CANDIDATE))
            is_member = candidate.member == member and tuple(candidate.address) == self.addresses[member]
            if is_member and candidate.answer not in self._answered:  # else a replay
                return candidate
        except LaunchError:
            log.warning("a process without this job's secret asks to join as rank %d", member)
        self._store.delete_key(key)
        return None

    def _write_quorum(self, quorum: Quorum, key: str) -> None:
        self._store.set(key, sealed(self.secret, [self.address, key], asdict(quorum)))

    def _read_quorum(self, place: Address, store: dist.Store, key: str) -> Quorum:
        return Quorum(**opened(self.secret, [place, key], store.get(key), key, _QUORUM))

    def _accept(self, quorum: Quorum) -> Quorum:
        """Adopt a quorum with this process in it; raise `LaunchError` otherwise."""
        if quorum.refusal:
            raise LaunchError(f"The remaining ranks cannot continue: {quorum.refusal}.")
        if self.member not in quorum.members:
            raise LaunchError("The other ranks have continued without this one, which they considered lost.")
        self._regroupings = quorum.regrouping
        return quorum


def _candidate_key(member: int) -> str:
    return f"candidate/{member}"


def host_store(host: str, port: int | None = None) -> dist.TCPStore:
    """Host a store that forked children close: otherwise a worker that holds the port looks like a living rank.

    With a given port it listens on all interfaces, as torch's does.
    """
    if port is None:
        store = host_on(host)
    else:
        store = dist.TCPStore(host, port, is_master=True, wait_for_workers=False)
    _inherited.update(sockets.sockets_on(store.port) | sockets.sockets_to(store.port))
    return store


_inherited: set[int] = set()
os.register_at_fork(after_in_child=lambda: sockets.close(_inherited))


class _Heartbeat(threading.Thread):
    """Detects that this process was stopped for so long that the others may have continued without it.

    Args:
        patience: Seconds that the others wait.
    """

    def __init__(self, patience: float) -> None:
        super().__init__(name="ddpkit heartbeat", daemon=True)
        self._patience = patience
        self._absences = 0
        self._last = time.monotonic()
        self._over = threading.Event()
        self.start()

    def run(self) -> None:
        """Compare the clock periodically."""
        while not self._over.wait(self._patience / 10):
            self.absences()

    def absences(self) -> int:
        """Return how often this process was stopped; safe in any thread."""
        last, self._last = self._last, time.monotonic()
        if self._last > last + self._patience:
            self._absences += 1
        return self._absences

    def close(self) -> None:
        """Stop watching."""
        self._over.set()


_BETWEEN_CALLS = 1.0  # seconds, at the address where the job started
_ANSWERING = timedelta(seconds=2)  # for a store there


class Refusals(threading.Thread):
    """The thread with which one of the remaining ranks refuses processes that come in place of lost ranks.

    Args:
        master: Where the job started, as "host:port".
        size: Number of ranks at the start.
        is_here: Whether that is on this host, where this process can open a store.
        store: The store there, if this process hosts it.
    """

    def __init__(self, master: str, size: int, is_here: bool, store: dist.Store | None) -> None:
        super().__init__(name="ddpkit refusals", daemon=True)
        host, _, port = master.rpartition(":")
        self._address = host, int(port)
        self._is_here = is_here
        self._store = store
        message = (
            f"The job at {master} lost some of its {size} ranks and went on without them; nobody can take their place. "
            "To train on all ranks again, stop that job, let it save a checkpoint, and start all ranks anew."
        )
        self._reason = Failure.of(-1, JobContinues(message))
        self._over = threading.Event()
        self.start()

    def run(self) -> None:
        """Refuse each start there, until this process hosts the store, where the reason stays."""
        while not self._over.is_set():
            with suppress(OSError, RuntimeError):  # no answer now may mean an answer later
                if self._has_refused_all():
                    break
            self._over.wait(_BETWEEN_CALLS)

    def _has_refused_all(self) -> bool:
        if self._store is None and probe(*self._address):
            latest = Generation.latest(connect_to_store(*self._address, _ANSWERING))
            if latest is not None and not latest.is_complete():  # a complete start is that of another job
                latest.give_up(self._reason)
            return False
        if self._store is None:
            if not self._is_here:
                return False
            self._store = host_store(*self._address)
        Generation.refuse(self._store, self._reason)
        return True

    def close(self) -> None:
        """Stop, when a call that has begun has ended."""
        self._over.set()
        self.join()
        self._store = None
