"""Continue training when ranks are lost or return, from the last complete step."""

from __future__ import annotations

import hmac
import logging
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..arguments import as_integer, check_timeout
from ..collectives.consistency import (
    check_fingerprint,
    control_device,
    fingerprint_of,
    raise_everywhere,
    reduce_in_place,
)
from ..collectives.ops import broadcast
from ..collectives.sync import barrier
from ..errors import DdpkitError, LaunchError, PeerError, RankRejoins
from ..job import current_job, lifecycle
from ..job.job import ChooseDevice, Context, Options, checked_options
from ..job.joining import hosted_store, offer_store
from ..join.causes import lost_peer_of
from ..join.failures import Failure, JobContinues
from ..join.rendezvous import StoreLost
from ..join.sockets import is_listening
from ..join.store import call_with_timeout
from ..launch import ranks
from ..watch import stop_agreement
from ..watch.main_thread import undisturbed
from .membership import Membership, address_of, remember_ended
from .regrouping import Admission, Candidate, Quorum, Rendezvous
from .states import KeptStates, Resumable

log = logging.getLogger(__name__)
_ANSWERING = 1.0  # seconds in which a reachable store answers
_GIVEN_UP = "given up"
_GRACE = 60.0  # seconds from the loss of a rank to the end of an attempt: loaders' workers may be slow to end
_SECRET = "DDPKIT_SECRET"  # environment variable; it authorises taking the place of a lost rank
_SHORTEST = 16  # bytes of a secret that cannot be guessed
_NOTICING = 1.0  # seconds between questions whether the others have noticed a loss
_UNSURE = ("lost", "silent", "left", "orphaned")  # the rank raised no error and may continue


T = TypeVar("T", bound=Resumable)


def survive(
    *states: Any,
    min_ranks: int = 1,
    patience: timedelta = timedelta(seconds=10),
    backend: str | None = None,
    device: str | torch.device | ChooseDevice | None = None,
    timeout: timedelta = timedelta(minutes=10),
    num_threads: int | None = None,
) -> Iterator[Attempt]:
    """Continue with the remaining ranks when others are lost. Collective.

    The training runs in attempts. Each attempt is a block that calls `setup()` first. When a rank is lost (killed or
    cut off), the block ends on all other ranks, and they start the next attempt from the last committed step::

        for attempt in ddpkit.survive(model, optimizer):
            with attempt as context:
                loader = attempt.resume(ddpkit.make_loader(data, 32))
                wrapped = ddpkit.wrap_model(model)
                for epoch in loader.epochs(10):
                    for batch in loader:
                        ...  # forward, backward
                        optimizer.step()
                        attempt.commit()

    Create everything that depends on the number of ranks (loaders, wrapped models, scale plans) inside the block. A
    process that you start in place of a lost rank, in the same environment, joins if it has the job's `DDPKIT_SECRET`;
    all ranks then start the next attempt. Between the start of `optimizer.step()` and `commit()` the loss of a rank
    interrupts nothing; do not communicate there.

    Args:
        *states: Everything that a step changes: the unwrapped model, its optimizer (one of torch's, or an object that
            holds one as `.optimizer`), a scheduler, a scaler, an average; anything with `state_dict` and
            `load_state_dict`. They are equal on all ranks.
        min_ranks: Smallest number of ranks; with fewer the job ends.
        patience: How long the others wait, after a loss, for a rank that may be alive.
        backend: As for `setup()`.
        device: As for `setup()`.
        timeout: As for `setup()`.
        num_threads: As for `setup()`.

    Yields:
        Attempts, until one completes.

    Raises:
        CheckpointError: If a state holds anything but numbers, strings, tensors, and dicts, lists and tuples of them.
        DdpkitError: If an attempt is not entered by `with`, or a process group already exists.
        LaunchError: If the remaining ranks cannot continue: they are too few, may be the smaller part of a network
            partition, or were all in the middle of a step; or if `DDPKIT_SECRET` is not that of the job.
        TypeError: If a state has no `state_dict`, there is no optimizer, or an argument is of a wrong type.
        ValueError: If `min_ranks` is less than 1, or more than the number of ranks.

    Example:
        >>> net = torch.nn.Linear(1, 1)
        >>> optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        >>> for attempt in survive(net, optimizer):
        ...     with attempt as context:
        ...         for step in range(attempt.steps, 3):
        ...             net(torch.ones(1, 1)).sum().backward()
        ...             optimizer.step()
        ...             attempt.commit()
        >>> attempt.steps, context.world_size
        (3, 1)
    """
    check_timeout(patience)
    least = as_integer(min_ranks, "min_ranks")
    for state in states:
        if not hasattr(state, "state_dict") or not hasattr(state, "load_state_dict"):
            raise TypeError(f"survive() takes objects with state_dict() and load_state_dict(), got {type(state)}.")
    survivors = _Survivors(KeptStates(states), least, patience)
    try:
        survivors.enter(backend=backend, device=device, timeout=timeout, num_threads=num_threads)
        while True:
            attempt = Attempt(survivors)
            yield attempt
            if not attempt.has_ended:
                raise DdpkitError(
                    "An attempt of survive() was not entered: for attempt in survive(...): with attempt: ..."
                )
            if attempt.lost is None:
                survivors.remember_end()
                break
            survivors.go_on(attempt.lost)
    finally:
        survivors.close()


class Attempt:
    """One run of the block of `survive`: a context manager that returns the `Context` of the job.

    Attributes:
        lost: The error that named the lost rank and ended this attempt; None if no rank was lost.
        has_ended: Whether the block is over.

    Example:
        >>> for attempt in survive():
        ...     with attempt:
        ...         attempt.commit()
        >>> attempt.steps, attempt.lost
        (1, None)
    """

    def __init__(self, survivors: _Survivors) -> None:
        self.lost: DdpkitError | None = None
        self._survivors = survivors
        self.has_ended = False

    @property
    def steps(self) -> int:
        """Number of committed steps, over all attempts."""
        return self._survivors.kept.steps

    @undisturbed
    def __enter__(self) -> Context:
        self._survivors.kept.begin()
        current_job.hold_failures(False, grace=_GRACE)
        return self._survivors.context

    def resume(self, loader: T) -> T:
        """Resume a loader after the last committed step, and return it.

        Args:
            loader: A loader from `make_loader` over a dataset. Several are identified by the order of the calls.

        Raises:
            TypeError: If the loader cannot resume.
        """
        self._survivors.kept.add_loader(loader)
        return loader

    def commit(self) -> None:
        """Mark a step as complete, on every rank, after the optimizer and all other states have changed."""
        self._survivors.commit()

    @undisturbed
    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        self.has_ended = True
        late = self._finish() if error is None else None
        current_job.hold_failures(True)  # only now: a wait without an answer must be interruptible
        if late is not None and not self._is_loss(late):
            raise late
        return error is not None and self._is_loss(error)

    def _finish(self) -> RuntimeError | None:
        """Wait for the other ranks; return the error, because the last step may be lost with a rank."""
        try:
            current_job.finish()
            barrier()
        except RuntimeError as late:
            return late
        return None

    def _is_loss(self, error: BaseException) -> bool:
        """Return whether another rank was lost; if not, this rank fails.

        Raises:
            PeerError: If this rank was lost.
        """
        lost = lost_peer_of(error, current_job.session()) if isinstance(error, Exception) else None
        if isinstance(lost, PeerError) and lost.rank == ranks.get_rank():  # to the others, or its launcher has died
            self._survivors.close(lost)
            raise lost from error
        if lost is None:
            self._survivors.close(error)
        self.lost = lost
        return lost is not None


class _Survivors:
    """The remaining ranks, as seen from one of them."""

    context: Context
    _asked: Options
    _secret: bytes  # the job's secret; it is in no store

    def __init__(self, kept: KeptStates, least: int, patience: timedelta) -> None:
        self.kept = kept
        self._least = least
        self._patience = patience.total_seconds()
        self._regroupings = 0
        self._rendezvous: Rendezvous | None = None
        self._admission: Admission | None = None
        self._store: dist.Store | None = None  # where the job started, if this process hosts it
        self._members: list[int] = []
        self._size = 1  # number of members at the start
        self._master: str | None = None  # where the job started
        self._master_host = ""
        self._resumed_at: int | None = None  # the step of the last resume without a missing member
        self._returning: RankRejoins | None = None  # raised at the next commit by a rank that is alone

    def enter(self, timeout: timedelta, **options: Any) -> None:
        """Join a starting job, or one that continues without this rank."""
        deadline = time.monotonic() + timeout.total_seconds()
        while True:
            try:
                self.begin(lifecycle.setup(timeout=timeout, **options))
                return
            except JobContinues as continued:
                if time.monotonic() > deadline:
                    raise
                membership = Membership.from_json(continued.membership)
            except StoreLost as lost:  # its rank has ended, or its job continues elsewhere
                if time.monotonic() > deadline:
                    raise
                log.warning("trying to join again: %s", lost)
                continue
            # only now that the error is gone, which would keep open the store that a new rank 0 opened
            if self.take_place(membership, checked_options(timeout=timeout, **options)):
                return

    def begin(self, context: Context) -> None:
        """Start with all ranks of the job."""
        if self._least > context.world_size:
            raise ValueError(f"min_ranks={self._least} is more than the world size, {context.world_size}.")
        if not current_job.owns_group():
            raise DdpkitError("survive() creates the process group, again for each attempt: do not create one before.")
        self.context = context
        self._asked = current_job.asked_options()
        self._size = context.world_size
        self._members = list(range(self._size))
        self._regroupings = 0
        self.kept.is_whole = True
        if lifecycle.joined():
            self._secret = agree_on_secret()
            self._rendezvous = Rendezvous.of_job(current_job.current_session(), self._patience, self._secret)
            self._master = context.master
            self._store = hosted_store(context.master)
            self._master_host = self._rendezvous.addresses[0][0]
            current_job.hold_failures(True)  # until an attempt is entered

    def take_place(self, membership: Membership, asked: Options) -> bool:
        """Join a running job in place of a lost rank; return False if the membership is outdated."""
        launch = ranks.current_launch()
        if launch.world_size != membership.size or membership.is_alive(launch.rank):
            raise LaunchError(f"This process was started as rank {launch.rank} of {launch.world_size}. {membership}")
        self._secret = _given_secret()
        if not membership.is_of_job(self._secret):
            raise LaunchError(
                f"{membership} It admits only processes with its {_SECRET}: start all ranks, and their replacements, "
                "with this environment variable set to the same long random text."
            )
        if launch.rank not in membership.open_ranks:  # the others have not noticed yet that it has ended
            time.sleep(_NOTICING)
            return False
        self._asked = asked
        self._size = membership.size
        self._master, self._master_host = membership.master, membership.master_host
        self._regroupings = membership.regrouping
        self.kept.is_whole = False
        self._rendezvous = Rendezvous.beside(launch.rank, membership, self._patience, self._secret)
        found = self._rendezvous.come_in(self._candidate(), membership, asked.timeout)
        if found is None:
            self._close_rendezvous()
            if not is_listening(*membership.master_address):
                raise LaunchError(f"{membership} But its ranks have ended, or cannot be reached.")
            return False
        quorum, store = found
        self._members = quorum.members
        try:
            self._join(quorum, store)
        except RuntimeError as error:  # this rank took part in no step yet, and can join again
            log.warning("trying to join again: %s", error)
            lifecycle.leave_to_rejoin()
            self._close_rendezvous()
            return False
        return True

    def commit(self) -> None:
        """Keep the current states."""
        self.kept.commit()
        if self._rendezvous is not None:
            self._rendezvous.is_together()
        if self._returning is not None:
            raise self._returning

    def go_on(self, lost: RuntimeError) -> None:
        """Join the remaining members, until none is lost meanwhile, and synchronise the states."""
        assert self._rendezvous is not None
        self._close_admission()
        begun = time.monotonic()
        stop = stop_agreement.current()
        request = stop.request if stop.decision is None else stop.decision.request
        if current_job.has_unfinished():
            log.warning("a checkpoint of save(wait=False) may be incomplete: save it again")
        members = self._members  # plus those that join while others are lost again
        gone = [members[lost.rank]] if isinstance(lost, PeerError) and lost.error_type not in _UNSURE else []
        tried: list[int] = []  # failed; a second try is right if one of them is stopped
        while True:
            lifecycle.leave_to_rejoin()
            quorum, store = self._rendezvous.regroup(self._candidate(), members, self._least, gone)
            self._check_progress(quorum, lost)
            try:
                self._join(quorum, store)
                break
            except RuntimeError:
                if quorum.members == tried and not any(map(self._rendezvous.has_ended, tried)):
                    raise
                tried = quorum.members
            members = sorted({*members, *tried})
            gone = []  # a new process may have taken such a place
        self._members = quorum.members
        if request is not None:
            stop_agreement.ask(request)
        if quorum.leader == self._rendezvous.member:
            took = time.monotonic() - begun
            who = f"{len(self._members)} of {self._size} ranks"
            former = ", ".join(map(str, quorum.members))
            news = f"{who} resume from step {quorum.steps}, after {took:.1f} s (original ranks {former})"
            log.warning("%s: %s", news, str(lost).partition("\n")[0])

    def _check_progress(self, quorum: Quorum, lost: RuntimeError) -> None:
        """Raise an error taken for a loss if it recurs at the same step with nobody missing: it is a bug."""
        if quorum.members != self._members or isinstance(lost, RankRejoins):
            self._resumed_at = None
        elif quorum.steps == self._resumed_at:
            raise lost
        else:
            self._resumed_at = quorum.steps

    def _candidate(self) -> Candidate:
        assert self._rendezvous is not None
        rendezvous, kept = self._rendezvous, self.kept
        return Candidate(rendezvous.member, self._regroupings, kept.steps, kept.is_whole, rendezvous.address)

    def _join(self, quorum: Quorum, store: dist.Store) -> None:
        """Join the quorum in a part of the leader's store, and take the states from one of its members."""
        assert self._rendezvous is not None
        self._regroupings = quorum.regrouping
        store = dist.PrefixStore(f"job {quorum.regrouping}", store)
        rendezvous = self._rendezvous
        members = quorum.members
        host = members.index(quorum.leader)
        needed = members if quorum.leader == rendezvous.member else [quorum.leader]
        is_joining = True

        def lost() -> str:
            if not is_joining:
                return ""
            with suppress(RuntimeError, TimeoutError):  # the leader has ended, or is stopped
                if call_with_timeout(lambda: store.check([_GIVEN_UP]), _ANSWERING):
                    return "another rank has given up"
            found = ", ".join(f"member {member} has ended" for member in needed if rendezvous.has_ended(member))
            # asking takes time in which all may have joined; from then on the watch reports ended members
            return found if is_joining else ""

        rank = members.index(rendezvous.member)
        try:
            self.context = lifecycle.rejoin(self._asked, store, rank, len(members), host, lost)
        except BaseException:
            with suppress(RuntimeError, TimeoutError):
                call_with_timeout(lambda: store.set(_GIVEN_UP, ""), _ANSWERING)
            raise
        is_joining = False
        check_members(self._secret, f"{quorum.regrouping}")
        self.kept.put_back(quorum, rendezvous.member)
        current_job.hold_failures(True)  # until the next attempt is entered
        self._open_admission(quorum)

    def _open_admission(self, quorum: Quorum) -> None:
        """Admit processes in place of lost ones, if the others know where the job started."""
        assert self._rendezvous is not None
        if self._master is None:
            return
        me = self._rendezvous.member
        hosts = {member: host for member, (host, _) in zip(quorum.members, quorum.addresses, strict=True)}
        self._master_host = hosts.get(0, self._master_host)
        there = [member for member, host in hosts.items() if host == self._master_host]
        opens = there[0] if there else quorum.leader
        if me != opens:
            self._store = None  # the other opens one at the same address
        if me not in (opens, quorum.leader):
            return
        places = (self._master, self._master_host)
        addresses = [self._rendezvous.addresses[member] for member in quorum.joining_order]
        membership = Membership(*places, self._size, quorum.regrouping, quorum.joining_order, addresses).sealed(
            self._secret
        )
        rendezvous = self._rendezvous if me == quorum.leader else None
        self._admission = Admission(membership, me == opens, bool(there), rendezvous, self._interrupt_for, self._store)

    def _interrupt_for(self, arrived: list[int]) -> None:
        """Interrupt all ranks, so that they regroup with the processes that have arrived."""
        returning = RankRejoins(f"rank {', '.join(map(str, arrived))} rejoins, in a new process")
        if not current_job.interrupt(Failure.of(-1, returning)):
            self._returning = returning

    def _close_admission(self) -> None:
        if self._admission is not None:
            self._store = self._admission.close()  # it stays open: a process may be asking there
        self._admission = self._returning = None

    def remember_end(self) -> None:
        """Record that the job has completed: what is still served about it is outdated."""
        if self._rendezvous is not None:
            remember_ended(self._rendezvous.addresses[member] for member in self._members)

    def _close_rendezvous(self) -> None:
        if self._rendezvous is not None:
            self._rendezvous.close()
            self._rendezvous = None

    def close(self, error: BaseException | None = None) -> None:
        """Leave the job; after an error tell the others, and that this rank does not continue."""
        self.kept.close()
        self._close_admission()
        if error is not None:
            self._close_rendezvous()
            lifecycle.report(error)
        lifecycle.teardown()
        self._close_rendezvous()  # after the others have left, which need its store
        if self._store is not None and self._master is not None:
            launch = ranks.current_launch()
            if launch.rank == 0:
                offer_store(launch, self._store, *address_of(self._master))  # to be joined again
        self._store = None


def agree_on_secret() -> bytes:
    """Return a secret that all ranks share, and that is not in their stores. Collective.

    It is the one in the environment; otherwise rank 0 draws one and sends it over the group's connections.
    """
    call = "survive()"
    with raise_everywhere(call):
        given = _given_secret()
    others, drawn = broadcast((given, os.urandom(32)), src=0)
    with raise_everywhere(call):
        if given != others:
            raise LaunchError(f"{_SECRET} differs between this rank and rank 0. Start all with one, or all without.")
    check_fingerprint(fingerprint_of(call))
    return bytes(given or drawn)


def _given_secret() -> bytes:
    given = os.environb.get(os.fsencode(_SECRET), b"")
    if 0 < len(given) < _SHORTEST:
        raise LaunchError(f"{_SECRET} has {len(given)} bytes; set it to a random text of {_SHORTEST} or more.")
    return given


def check_members(secret: bytes, occasion: str) -> None:
    """Let all ranks of a new group prove that they know the secret, before they exchange anything else. Collective.

    Raises:
        LaunchError: If one does not: another program changed the addresses in the store while the ranks joined.
    """
    if not lifecycle.joined():
        return
    challenges = _gather(os.urandom(16))
    expected = []
    for rank in range(len(challenges)):
        words = f"{occasion} {rank} ".encode() + b"".join(challenges)
        expected.append(hmac.new(secret, words, "sha256").digest())
    for rank, shown in enumerate(_gather(expected[ranks.get_rank()])):
        if not hmac.compare_digest(shown, expected[rank]):
            raise LaunchError(f"The process that joined as rank {rank} does not know the secret of this job.")


def _gather(own: bytes) -> list[bytes]:
    """Give every rank the bytes of all ranks, of one length, unpickled and in a buffer of known size. Collective."""
    table = torch.zeros((ranks.get_world_size(), len(own)), dtype=torch.int64, device=control_device(None))
    table[ranks.get_rank()] = torch.tensor(list(own))
    reduce_in_place(table)
    return [bytes(row) for row in table.clamp(0, 255).tolist()]
