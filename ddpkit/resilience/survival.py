"""Go on with the ranks that are left when some are lost, from the last step that was whole."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..arguments import as_integer, check_timeout
from ..collectives.sync import barrier
from ..errors import DdpkitError, PeerError
from ..launch import ranks
from ..process_group import lifecycle
from ..process_group.job import Context
from ..process_group.main_thread import undisturbed
from ..process_group.options import ChooseDevice
from ..process_group.regrouping import Arrival, Decision, Refuge
from .kept_states import KeptStates, Resumable

log = logging.getLogger(__name__)
_GIVEN_UP = "given up"
_GRACE = 60.0  # seconds from the loss of a rank until an attempt must be over: loaders' workers may be slow to end
_UNSURE = ("lost", "silent", "left")  # of a rank that may go on: it has raised no error


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
    """Let the ranks that are left go on when others are lost. Collective.

    Each attempt is a block that holds the training. Its beginning calls `setup()`; when a rank is lost, killed or cut
    off, the block ends on all others, and they begin the next attempt among themselves, from the last committed step::

        for attempt in ddpkit.survive(model, optimizer):
            with attempt as context:
                loader = attempt.resume(ddpkit.make_loader(data, 32))
                wrapped = ddpkit.wrap_model(model)
                for epoch in loader.epochs(10):
                    for batch in loader:
                        ...  # forward, backward
                        optimizer.step()
                        attempt.commit()

    What hangs on the number of ranks (loaders, wrapped models, scale plans) is made in the block, so it is made anew.
    From the beginning of `optimizer.step()` until `commit()` the loss of a rank does not interrupt; do nothing there
    that talks to other ranks.

    Args:
        *states: What a step changes: the model, not wrapped, its optimizer (one of torch's, or what holds one as
            `.optimizer`), a schedule, a scaler, an average; anything with `state_dict` and `load_state_dict`. They
            are equal on all ranks.
        min_ranks: With fewer the job ends.
        patience: How long to wait for a rank that may live, where the others have noticed a loss.
        backend: As for `setup()`, as are the ones below.
        device: The same.
        timeout: The same.
        num_threads: The same.

    Yields:
        Attempts, until one ends well.

    Raises:
        DdpkitError: If an attempt is not entered by `with`; if there is a process group already that others made.
        LaunchError: If the ranks that are left cannot go on: there are too few of them, they may be the smaller part
            of a network that was cut, or all were in the middle of a step.
        TypeError: If a state has no `state_dict`, there is no optimizer, or an argument is of a wrong type.
        ValueError: If `min_ranks` is less than 1, or more than there are.

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
            raise TypeError(f"survive() keeps objects with state_dict() and load_state_dict(), got {type(state)}.")
    kept = KeptStates(states)
    try:
        context = lifecycle.setup(backend=backend, device=device, timeout=timeout, num_threads=num_threads)
        _check_job(context, least)
        survivors = _Survivors(context, kept, least, patience)
    except BaseException:
        kept.close()
        lifecycle.teardown()
        raise
    try:
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


def _check_job(context: Context, least: int) -> None:
    if least > context.world_size:
        raise ValueError(f"min_ranks={least} is more than there are: {context.world_size}.")
    if not lifecycle.owns_group():
        raise DdpkitError("survive() makes the process group, and makes it anew: do not make one before.")


class Attempt:
    """One run of the block in `survive`: a context that gives the `Context` of the job.

    Attributes:
        lost: The error that named the rank whose loss has ended it, None if none was lost.
        has_ended: Whether its block is over.

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
        """The number of steps that were committed, in all attempts."""
        return self._survivors.kept.steps

    @undisturbed
    def __enter__(self) -> Context:
        self._survivors.kept.begin()
        lifecycle.hold_failures(False, grace=_GRACE)
        return self._survivors.context

    def resume(self, loader: T) -> T:
        """Let a loader go on behind the last committed step, and return it.

        Args:
            loader: One of `make_loader`'s over a dataset. Several are told apart by the order of the calls.

        Raises:
            TypeError: If it cannot resume.
        """
        self._survivors.kept.add_loader(loader)
        return loader

    def commit(self) -> None:
        """Say that a step is whole: after the optimizer and all else that it changes have stepped, on every rank."""
        self._survivors.commit()

    @undisturbed
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self.has_ended = True
        late = self._finish() if error is None else None
        lifecycle.hold_failures(True)  # only now, for a wait for what does not answer must end
        if late is not None and not self._is_loss(late):
            raise late
        return error is not None and self._is_loss(error)

    def _finish(self) -> RuntimeError | None:
        """Wait for the other ranks; return what went wrong, for with a rank the last step may yet be lost."""
        try:
            lifecycle.finish()
            barrier()
        except RuntimeError as late:
            return late
        return None

    def _is_loss(self, error: BaseException) -> bool:
        """Return whether this is because another rank was lost; if not, this rank fails.

        Raises:
            PeerError: If it is this rank that was lost.
        """
        lost = lifecycle.lost_peer(error) if isinstance(error, Exception) else None
        if isinstance(lost, PeerError) and lost.rank == ranks.get_rank():  # by the others, or its launcher has gone
            self._survivors.close(lost)
            raise lost from error
        if lost is None:
            self._survivors.close(error)
        self.lost = lost
        return lost is not None


class _Survivors:
    """The ranks that are left, seen from one of them."""

    def __init__(self, context: Context, kept: KeptStates, least: int, patience: timedelta) -> None:
        self.context = context
        self.kept = kept
        self._least = least
        self._patience = patience.total_seconds()
        self._regroupings = 0
        self._asked = lifecycle.asked_options()
        self._refuge: Refuge | None = None
        self._members = list(range(context.world_size))
        self._resumed_at: int | None = None  # the step, where nobody was missing after the last loss
        if lifecycle.joined():
            self._refuge = Refuge(lifecycle.current_session(), self._patience)
            lifecycle.hold_failures(True)  # until an attempt is entered

    def commit(self) -> None:
        """Keep the present states."""
        self.kept.commit()
        if self._refuge is not None:
            self._refuge.is_together()

    def go_on(self, lost: DdpkitError) -> None:
        """Join those who are left, until nobody is lost meanwhile, and let all have the same states."""
        assert self._refuge is not None
        begun = time.monotonic()
        stop = lifecycle.stop_agreement()
        request = stop.request if stop.decision is None else stop.decision.request
        if lifecycle.has_unfinished():
            log.warning("a checkpoint that save(wait=False) has begun may not be there: save it again")
        gone = [self._members[lost.rank]] if isinstance(lost, PeerError) and lost.error_type not in _UNSURE else []
        tried: list[int] = []  # in vain; once more is right if one of them is stopped
        while True:
            lifecycle.teardown()
            decision, store = self._refuge.regroup(self._arrival(), self._members, self._least, gone)
            self._regroupings = decision.regrouping
            self._check_progress(decision, lost)
            try:
                self._rejoin(decision, dist.PrefixStore(f"job {decision.regrouping}", store))
                break
            except RuntimeError:
                if decision.members == tried and not any(map(self._refuge.has_ended, tried)):
                    raise
                tried = decision.members
        former, self._members = self._members, decision.members
        if request is not None:
            lifecycle.ask_to_stop(request)
        if ranks.is_main_process():
            took = time.monotonic() - begun
            news = f"{len(self._members)} of {len(former)} ranks go on from step {decision.steps}, after {took:.1f} s"
            if decision.members[-1] >= len(decision.members):  # numbers are others than at the beginning
                news += f" (at the beginning ranks {', '.join(map(str, decision.members))})"
            log.warning("%s: %s", news, str(lost).partition("\n")[0])

    def _check_progress(self, decision: Decision, lost: DdpkitError) -> None:
        """Raise what was taken for a loss if it comes again at the same step, and nobody is missing: it is a bug."""
        if decision.members != self._members:
            self._resumed_at = None
        elif decision.steps == self._resumed_at:
            raise lost
        else:
            self._resumed_at = decision.steps

    def _arrival(self) -> Arrival:
        assert self._refuge is not None
        return Arrival(self._refuge.member, self._regroupings, self.kept.steps, self.kept.is_whole)

    def _rejoin(self, decision: Decision, store: dist.Store) -> None:
        assert self._refuge is not None
        refuge = self._refuge
        members = decision.members
        needed = members if members[0] == refuge.member else members[:1]  # the first hosts the store
        is_joining = True

        def lost() -> str:
            if not is_joining:
                return ""
            if store.check([_GIVEN_UP]):
                return "another has given up"
            return ", ".join(f"member {member} has ended" for member in needed if refuge.has_ended(member))

        rank = members.index(refuge.member)
        try:
            self.context = lifecycle.rejoin(self._asked, store, rank, len(members), lost)
        except BaseException:
            with suppress(RuntimeError):
                store.set(_GIVEN_UP, "")
            raise
        is_joining = False
        self.kept.put_back(decision, refuge.member)
        lifecycle.hold_failures(True)  # until the next attempt is entered

    def close(self, error: BaseException | None = None) -> None:
        """Leave the job; after an error the others hear of it, and that this rank does not go on."""
        self.kept.close()
        if self._refuge is not None:
            self._refuge.close()
            self._refuge = None
        if error is not None:
            lifecycle.report(error)
        lifecycle.teardown()
