"""Agree on the remaining members of a job after a loss, without the job's store, which may be lost, too.

Each member keeps a store of its own. The remaining members ask all members at once; one with a closed port has ended.
The first that answers leads: it waits for the others, and tells them the members.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import get_type_hints

import torch.distributed as dist

from ..errors import LaunchError
from ..job.joining import host_address
from ..join import sockets
from ..join.failures import Failure, JobContinues
from ..join.rendezvous import Generation
from ..join.session import Session
from ..join.sockets import is_listening, probe
from ..join.store import Pause, call_with_timeout, connect_to_store, host_on, reachable
from ..parsing import opened, parse, sealed
from .membership import Membership

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
        is_whole: Whether its states are those of that step, not of the middle of the next.
        address: Address of its store, which distinguishes processes with the same number.
    """

    member: int
    regroupings: int
    steps: int
    is_whole: bool
    address: Address


@dataclass(frozen=True)
class Quorum:
    """The members that continue, and the step they continue from.

    Attributes:
        regrouping: Number of this decision.
        members: In the order of their new ranks.
        addresses: Addresses of their stores, in the same order.
        leader: The member that decided, and hosts the store in which they meet.
        joining_order: The members, the newest last.
        steps: Number of committed steps to resume from.
        source: A member with the states of that step.
        behind: Members without them.
        refusal: Reason why nobody continues; "" if the members do.
    """

    regrouping: int
    members: list[int]
    addresses: list[Address]
    leader: int
    joining_order: list[int]
    steps: int
    source: int
    behind: list[int]
    refusal: str = ""


_CANDIDATE = {**get_type_hints(Candidate)}
_QUORUM = {**get_type_hints(Quorum), "members": [int], "joining_order": [int], "behind": [int], "addresses": [Address]}


def decide(
    leader: int, joining_order: Sequence[int], candidates: Collection[Candidate], unknown: Collection[int], least: int
) -> Quorum:
    """Decide who continues.

    Args:
        leader: The deciding member.
        joining_order: The previous members, the newest last.
        candidates: Requests of the members that answered.
        unknown: Members that did not answer but may be alive, across a network partition.
        least: Smallest number of members.
    """
    addresses = {candidate.member: candidate.address for candidate in candidates}
    members = sorted(addresses)
    whole = [candidate for candidate in candidates if candidate.is_whole]
    steps = max((candidate.steps for candidate in whole), default=0)
    able = sorted(candidate.member for candidate in whole if candidate.steps == steps)
    refusal = ""
    if not able:
        refusal = "no remaining rank has the states of a complete step"
    elif len(members) < least:
        refusal = f"{len(members)} ranks remain, but min_ranks is {least}"
    elif not _may_speak_for_all(members, unknown):
        refusal = f"members {sorted(unknown)} cannot be reached, and may continue without this rank"
    behind = [member for member in members if member not in able]
    number = 1 + max(candidate.regroupings for candidate in candidates)
    places = [addresses[member] for member in members]
    order = [member for member in joining_order if member in addresses]
    order += [member for member in members if member not in order]
    return Quorum(number, members, places, leader, order, steps, able[0] if able else -1, behind, refusal)


def _may_speak_for_all(members: Sequence[int], unknown: Collection[int]) -> bool:
    """Return whether the absent members cannot be the majority; of two halves the one with the first member wins."""
    if len(members) != len(unknown):
        return len(members) > len(unknown)
    return members[0] < min(unknown)


class Rendezvous:
    """Where the members of a job meet again after a loss.

    Args:
        member: This process's number.
        size: Number of members at the start.
        host: Address at which the others reach this process.
        patience: Seconds to wait for a member that may be alive.
        secret: The job's secret: it authorises deciding, and asking, who continues. It is in no store.

    Attributes:
        addresses: Addresses of the members' stores.
    """

    def __init__(self, member: int, size: int, host: str, patience: float, secret: bytes) -> None:
        self.member = member
        self._secret = secret
        self._size = size
        self._joining_order: list[int] = []  # the members, the newest last
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
        rendezvous = cls(session.rank, len(session.nodes), host, patience, secret)
        everyone = session.exchange(json.dumps({"address": rendezvous.address}))
        found = [parse(text, "rendezvous", {"address": Address})["address"] for text in everyone]
        rendezvous.addresses = {rank: (host, port) for rank, (host, port) in enumerate(found)}
        rendezvous._joining_order = list(rendezvous.addresses)
        return rendezvous

    @classmethod
    def beside(cls, member: int, membership: Membership, patience: float, secret: bytes) -> Rendezvous:
        """Create it for a process that takes the place of a lost member."""
        host = next((reachable(*address) for address in membership.addresses if is_listening(*address)), "")
        if not host:
            raise LaunchError(f"{membership} None of its ranks can be reached now.")
        rendezvous = cls(member, membership.size, host, patience, secret)
        rendezvous.addresses |= dict(zip(membership.members, membership.addresses, strict=True))
        return rendezvous

    def is_together(self) -> None:
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

        threads = [threading.Thread(target=functools.partial(ask, member), daemon=True) for member in members]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    def regroup(
        self, me: Candidate, members: Collection[int], least: int, gone: Collection[int]
    ) -> tuple[Quorum, dist.Store]:
        """Agree on who continues.

        Args:
            me: This rank's request.
            members: The members before the loss.
            least: Smallest number of members.
            gone: Members that announced that they do not continue.

        Returns:
            The quorum, and the store in which its members meet.

        Raises:
            LaunchError: If nobody continues, or the others continue without this rank.
        """
        candidates = set(members) - set(gone)
        while True:
            answers = self._ask(candidates - {self.member}) | {self.member: True}
            leader = next(member for member in self._joining_order if answers.get(member))
            if leader == self.member:
                return self._accept(self._lead(me, members, least, gone)), self._store
            quorum, store = self._follow(leader, me, self._patience + _LEADERS_PATIENCE)
            if quorum is not None:
                return self._accept(quorum), store
            candidates.remove(leader)

    def arrived(self, lost: Collection[int]) -> list[int]:
        """Return the lost members in whose place a process waits at this one."""
        found = []
        for member in lost:
            arrived = self._read_candidate(member)
            if arrived is None:
                continue
            if probe(*arrived[0].address) is False:
                self._store.delete_key(_candidate_key(member))
            else:
                found.append(member)
        return found

    def come_in(self, me: Candidate, membership: Membership, timeout: timedelta) -> tuple[Quorum, dist.Store] | None:
        """Wait until the members of a job admit this process.

        Returns:
            The quorum, and the store in which all meet; None if the members of the membership have ended.
        """
        deadline = time.monotonic() + timeout.total_seconds()
        for member in membership.members:
            if probe(*self.addresses[member]):
                quorum, store = self._follow(member, me, max(0.0, deadline - time.monotonic()))
                if quorum is not None:
                    return self._accept(quorum), store
        return None

    def _follow(self, leader: int, me: Candidate, seconds: float) -> tuple[Quorum | None, dist.Store]:
        """Wait for the quorum of a possible leader; None if it has ended or does not answer."""
        try:  # on another thread: a stopped leader's store does not answer
            return call_with_timeout(
                lambda: self._ask_leader(leader, me, seconds), seconds, lambda: self._check(leader)
            )
        except (RuntimeError, TimeoutError):  # the leader has ended, or cannot be reached
            return None, self._store

    def _ask_leader(self, leader: int, me: Candidate, seconds: float) -> tuple[Quorum, dist.Store]:
        deadline = time.monotonic() + seconds
        store = connect_to_store(*self.addresses[leader], timedelta(seconds=seconds))
        place = self.addresses[leader]
        if store.check([_DECIDED]):
            last = self._read_quorum(place, store, _DECIDED)
            if self._joining_order and last.regrouping > me.regroupings and self.address not in last.addresses:
                return last, store  # it was made without this rank
        answer = f"answer/{uuid.uuid4().hex}"
        key = _candidate_key(self.member)
        store.set(key, sealed(self._secret, [place, key], {**asdict(me), "answer": answer}))
        pause = Pause()
        next_probe = 0.0
        while not store.check([answer]):
            if time.monotonic() > deadline:
                raise TimeoutError(f"member {leader} does not decide")
            if time.monotonic() > next_probe:
                self._check(leader)
                next_probe = time.monotonic() + _BETWEEN_PROBES
            pause()
        quorum = self._read_quorum(place, store, answer)
        store.delete_key(answer)
        return quorum, store

    def _check(self, leader: int) -> None:
        if self.has_ended(leader):
            raise RuntimeError(f"member {leader} has ended")

    def _lead(self, me: Candidate, members: Collection[int], least: int, gone: Collection[int]) -> Quorum:
        """Wait for the members that are alive, and tell them who continues."""
        deadline = time.monotonic() + self._patience
        candidates = {self.member: me}
        answers: dict[int, str] = {}
        ended = set(gone)
        next_probe = 0.0
        pause = Pause()
        while True:
            for member in set(range(self._size)) - {self.member}:
                arrived = self._read_candidate(member)
                if arrived is None:
                    continue
                candidate, answer = arrived
                if member in set(members) - ended and candidate.address != self.addresses[member]:
                    continue  # another process with this number, which lived on outside the job
                if candidate.address != self.addresses.get(member):  # it takes the place of one that has ended
                    ended.discard(member)
                    self._joining_order = [other for other in self._joining_order if other != member]
                    self.addresses[member] = candidate.address
                candidates[member], answers[member] = candidate, answer
            if time.monotonic() >= next_probe:
                others = (set(members) | candidates.keys()) - ended - {self.member}
                ended |= {member for member, answer in self._ask(others).items() if answer is False}
                next_probe = time.monotonic() + _BETWEEN_PROBES
            absent = set(members) - candidates.keys() - ended
            if not absent or time.monotonic() > deadline:
                break
            pause()
        present = [candidate for member, candidate in candidates.items() if member not in ended]
        was_away = self._heartbeat.absences() > self._excused
        unknown = absent | (ended if was_away else set())  # they may have continued, and ended normally
        quorum = decide(self.member, self._joining_order, present, unknown, least)
        self._write_quorum(quorum, _DECIDED)
        for member, answer in answers.items():
            self._store.delete_key(_candidate_key(member))
            self._write_quorum(quorum, answer)
        self._answered.update(answers.values())
        if quorum.refusal:  # this process ends with it
            self._wait_for_readers(list(answers.values()))
        return quorum

    def _wait_for_readers(self, answers: list[str]) -> None:
        deadline = time.monotonic() + _READING
        while time.monotonic() < deadline and any(self._store.check([answer]) for answer in answers):
            time.sleep(0.01)

    def _read_candidate(self, member: int) -> tuple[Candidate, str] | None:
        """Return the request under this number, and where it waits for an answer; delete foreign writes."""
        key = _candidate_key(member)
        if not self._store.check([key]):
            return None
        try:
            found = opened(self._secret, [self.address, key], self._store.get(key), key, {**_CANDIDATE, "answer": str})
            host, port = found.pop("address")
            answer = found.pop("answer")
            candidate = Candidate(**found, address=(host, port))
            if candidate.member == member and answer not in self._answered:  # else a replay
                return candidate, answer
        except LaunchError:
            log.warning("a process without this job's secret asks to join as rank %d", member)
        self._store.delete_key(key)
        return None

    def _write_quorum(self, quorum: Quorum, key: str) -> None:
        self._store.set(key, sealed(self._secret, [self.address, key], asdict(quorum)))

    def _read_quorum(self, place: Address, store: dist.Store, key: str) -> Quorum:
        found = opened(self._secret, [place, key], store.get(key), key, _QUORUM)
        return Quorum(**{**found, "addresses": [(host, port) for host, port in found["addresses"]]})

    def _accept(self, quorum: Quorum) -> Quorum:
        """Adopt a quorum with this process in it; raise `LaunchError` otherwise."""
        if quorum.refusal:
            raise LaunchError(f"The remaining ranks cannot continue: {quorum.refusal}.")
        if self.address not in quorum.addresses:
            raise LaunchError("The other ranks have continued without this one, which they considered lost.")
        self._joining_order = quorum.joining_order
        self.addresses |= dict(zip(quorum.members, quorum.addresses, strict=True))
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
    _inherited().update(sockets.sockets_on(store.port) | sockets.sockets_to(store.port))
    return store


@functools.cache
def _inherited() -> set[int]:
    everywhere: set[int] = set()
    os.register_at_fork(after_in_child=lambda: sockets.close(everywhere))
    return everywhere


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


# Admit processes that take the place of lost ranks, by serving the membership where the job started.

_BETWEEN_LOOKS = 0.2  # seconds
_BETWEEN_CALLS = 1.0  # seconds, at the address where the job started
_PATIENCE = timedelta(seconds=5)  # for the store there


class Admission(threading.Thread):
    """The thread with which a rank admits processes to a job that has lost some.

    Args:
        membership: Membership to serve.
        tells: Whether this process serves it where the job started.
        is_at_master: Whether it is on that host, and can open a store there.
        rendezvous: Where processes arrive; None if they arrive at another rank.
        on_arrival: Called with the ranks that have arrived, at the end.
        store: The store there, if this process already hosts it.

    Attributes:
        store: The store in which it serves, if this process hosts it.
    """

    def __init__(
        self,
        membership: Membership,
        tells: bool,
        is_at_master: bool,
        rendezvous: Rendezvous | None,
        on_arrival: Callable[[list[int]], None],
        store: dist.Store | None,
    ) -> None:
        super().__init__(name="ddpkit admission", daemon=True)
        self._membership = membership
        self._tells = tells
        self._is_at_master = is_at_master
        self._rendezvous = rendezvous
        self._on_arrival = on_arrival
        self.store = store
        self._has_told = False
        self._acting = threading.Lock()  # so that nothing happens after `close()`
        self._over = threading.Event()
        self.start()

    def run(self) -> None:
        """Check for arrivals until there is one."""
        next_call = 0.0
        while self._is_needed() and not self._over.wait(_BETWEEN_LOOKS):
            with suppress(OSError, RuntimeError):  # no answer now may mean an answer later
                if self._tells and time.monotonic() >= next_call:
                    next_call = time.monotonic() + _BETWEEN_CALLS
                    self._tell_at(*self._membership.master_address)
                arrived = self._rendezvous.arrived(self._membership.open_ranks) if self._rendezvous else []
                if arrived:
                    self._let_in(arrived)
                    break

    def _let_in(self, arrived: list[int]) -> None:
        with self._acting:
            if not self._over.is_set():
                self._on_arrival(arrived)

    def _is_needed(self) -> bool:
        return bool(self._membership.open_ranks) or (self._tells and not self._has_told)

    def close(self) -> dist.Store | None:
        """Stop admitting; return the store. The thread may take a moment to end."""
        self._over.set()
        with self._acting:
            store, self.store = self.store, None
        return store

    def _tell_at(self, host: str, port: int) -> None:
        """Answer each start of a job there with the membership: in our own store, or in that of a new rank 0."""
        if self._has_told:
            return
        if self.store is None and is_listening(host, port):
            _refuse_start(connect_to_store(host, port, _PATIENCE), self._membership)
        elif self.store is not None or self._is_at_master:
            with self._acting:
                if self._over.is_set():
                    return
                self.store = self.store or host_store(host, port)
                Generation.refuse(self.store, _failure(self._membership))
                self._has_told = True


def _refuse_start(store: dist.Store, membership: Membership) -> None:
    """Refuse a start hosted by a new rank 0, unless it is complete: then it is another job."""
    latest = Generation.latest(store)
    if latest is None or latest.is_complete():
        return
    former = latest.continued()
    if former is not None and former.membership == membership.to_json():
        return
    generation = latest if former is None else Generation.new(store)
    generation.give_up(_failure(membership))


def _failure(membership: Membership) -> Failure:
    return Failure(-1, socket.gethostname(), JobContinues.__name__, str(membership), membership.to_json())
