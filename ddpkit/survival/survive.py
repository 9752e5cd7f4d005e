"""Continue training when ranks are lost, from the last complete step."""

from __future__ import annotations

import hmac
import logging
import os
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..arguments import as_integer, check_timeout
from ..collectives.consistency import control_device, reduce_in_place
from ..collectives.sync import barrier
from ..collectives.transfer import broadcast_bytes
from ..data.loader import Loader
from ..errors import DdpkitError, LaunchError, PeerError
from ..job import current_job, lifecycle
from ..job.job import ChooseDevice, Context, Options
from ..job.joining import hosted_store
from ..launch import ranks
from ..rendezvous.causes import lost_peer_of
from ..rendezvous.store import try_store
from ..watch import stop_agreement
from ..watch.main_thread import no_interrupt
from .regrouping import Quorum, Refusals, Rendezvous
from .states import KeptStates

log = logging.getLogger(__name__)
_ANSWERING = 1.0  # seconds in which a reachable store answers
_GIVEN_UP = "given up"
_GRACE = 60.0  # seconds from the loss of a rank to the end of an attempt: loaders' workers may be slow to end
_UNSURE = ("lost", "silent", "left", "orphaned")  # the rank raised no error and may continue


T = TypeVar("T", bound=Loader)


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

    Create everything that depends on the number of ranks (loaders, wrapped models, scale plans) inside the block.
    Between the start of `optimizer.step()` and `commit()` the loss of a rank interrupts nothing; do not communicate
    there. A lost rank cannot return: to train on all ranks again, stop the job, save a checkpoint and start it anew.

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
            partition, or were all in the middle of a step; or if the job has continued without this rank.
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
        survivors.begin(lifecycle.setup(backend=backend, device=device, timeout=timeout, num_threads=num_threads))
        while True:
            attempt = Attempt(survivors)
            yield attempt
            if not attempt.has_ended:
                raise DdpkitError(
                    "An attempt of survive() was not entered: for attempt in survive(...): with attempt: ..."
                )
            if attempt.lost is None:
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

    @no_interrupt
    def __enter__(self) -> Context:
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

    @no_interrupt
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
    _master: str | None  # where the job started, as "host:port"

    def __init__(self, kept: KeptStates, least: int, patience: timedelta) -> None:
        self.kept = kept
        self._least = least
        self._patience = patience.total_seconds()
        self._rendezvous: Rendezvous | None = None
        self._refusals: Refusals | None = None
        self._store: dist.Store | None = None  # where the job started, if this process hosts it
        self._members: list[int] = []
        self._resumed_at: int | None = None  # the step of the last resume without a missing member

    def begin(self, context: Context) -> None:
        """Start with all ranks of the job."""
        if self._least > context.world_size:
            raise ValueError(f"min_ranks={self._least} is more than the world size, {context.world_size}.")
        if not current_job.owns_group():
            raise DdpkitError("survive() creates the process group, again for each attempt: do not create one before.")
        self.context = context
        self._asked = current_job.asked_options()
        self._members = list(range(context.world_size))
        session = lifecycle.enter_collective()
        if session is not None:
            drawn = os.urandom(32) if context.rank == 0 else b""
            secret = broadcast_bytes("survive()", drawn, 0)
            self._rendezvous = Rendezvous.of_job(session, self._patience, secret)
            self._master = context.master
            self._store = hosted_store(context.master)
            current_job.hold_failures(True)  # until an attempt is entered

    def commit(self) -> None:
        """Keep the current states."""
        self.kept.commit()
        if self._rendezvous is not None:
            self._rendezvous.record_contact()

    def go_on(self, lost: RuntimeError) -> None:
        """Join the remaining members, until none is lost meanwhile, and synchronise the states."""
        assert self._rendezvous is not None
        begun = time.monotonic()
        stop = stop_agreement.current()
        request = stop.decision or stop.request
        if current_job.has_unfinished():
            log.warning("a checkpoint of save(wait=False) may be incomplete: save it again")
        members = self._members
        gone = [members[lost.rank]] if isinstance(lost, PeerError) and lost.error_type not in _UNSURE else []
        tried: list[int] = []  # failed; a second try is right if one of them is stopped
        while True:
            lifecycle.leave_to_rejoin()
            kept = self.kept
            quorum, store = self._rendezvous.regroup(kept.steps, kept.is_consistent, members, self._least, gone)
            self._check_progress(quorum, lost)
            try:
                self._join(quorum, store)
                break
            except RuntimeError:
                if quorum.members == tried and not any(map(self._rendezvous.has_ended, tried)):
                    raise
                tried = quorum.members
        self._members = quorum.members
        if request is not None:
            stop_agreement.ask(request)
        if quorum.leader == self._rendezvous.member:
            took = time.monotonic() - begun
            who = f"{len(self._members)} of {len(self._rendezvous.addresses)} ranks"
            former = ", ".join(map(str, quorum.members))
            news = f"{who} resume from step {quorum.steps}, after {took:.1f} s (original ranks {former})"
            log.warning("%s: %s", news, str(lost).partition("\n")[0])

    def _check_progress(self, quorum: Quorum, lost: RuntimeError) -> None:
        """Raise an error taken for a loss if it recurs at the same step with nobody missing: it is a bug."""
        if quorum.members != self._members:
            self._resumed_at = None
        elif quorum.steps == self._resumed_at:
            raise lost
        else:
            self._resumed_at = quorum.steps

    def _join(self, quorum: Quorum, store: dist.Store) -> None:
        """Join the quorum in a part of the leader's store, and take the states from one of its members."""
        assert self._rendezvous is not None
        store = dist.PrefixStore(f"job {quorum.regrouping}", store)
        rendezvous = self._rendezvous
        members = quorum.members
        host = members.index(quorum.leader)
        needed = members if quorum.leader == rendezvous.member else [quorum.leader]
        is_joining = True

        def lost() -> str:
            if not is_joining:
                return ""
            if try_store(lambda: store.check([_GIVEN_UP]), _ANSWERING):  # else the leader may have ended, or be stopped
                return "another rank has given up"
            found = ", ".join(f"member {member} has ended" for member in needed if rendezvous.has_ended(member))
            # asking takes time in which all may have joined; from then on the watch reports ended members
            return found if is_joining else ""

        rank = members.index(rendezvous.member)
        try:
            self.context = lifecycle.rejoin(self._asked, store, rank, len(members), host, lost)
        except BaseException:
            try_store(lambda: store.set(_GIVEN_UP, ""), _ANSWERING)
            raise
        is_joining = False
        check_members(rendezvous.secret, f"{quorum.regrouping}")
        self.kept.restore(quorum, rendezvous.member)
        current_job.hold_failures(True)  # until the next attempt is entered
        self._refuse_late_processes(rendezvous, members)

    def _refuse_late_processes(self, rendezvous: Rendezvous, members: list[int]) -> None:
        """Begin to refuse processes in place of lost ranks, if this is for this rank to do.

        They come to where the job started. It is for the first member on that host, else for the first of all.
        """
        addresses = rendezvous.addresses
        there = [member for member in members if addresses[member][0] == addresses[0][0]]
        refuses = (there or members)[0] == rendezvous.member
        if refuses and self._refusals is None and self._master is not None:
            self._refusals = Refusals(self._master, len(addresses), bool(there), self._store)

    def close(self, error: BaseException | None = None) -> None:
        """Leave the job; after an error tell the others, and that this rank does not continue."""
        self.kept.close()
        if self._refusals is not None:
            self._refusals.close()
        if error is not None:
            self._close_rendezvous()
            lifecycle.report(error)
        lifecycle.teardown()
        self._close_rendezvous()  # after the others have left, which need its store

    def _close_rendezvous(self) -> None:
        if self._rendezvous is not None:
            self._rendezvous.close()
            self._rendezvous = None


def check_members(secret: bytes, occasion: str) -> None:
    """Let all ranks of a new group prove that they know the secret, before they exchange anything else. Collective.

    Raises:
        LaunchError: If one does not: another program changed the addresses in the store while the ranks joined.
    """
    if lifecycle.enter_collective() is None:
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
