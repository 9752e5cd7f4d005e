"""Explain why a collective broke, from the other ranks' reports."""

from __future__ import annotations

import math
import os
import re
import traceback
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..errors import BarrierTimeoutError, DdpkitError, MismatchError, PeerError, message_of
from ..torch_internals import current_group, other_groups_were_made
from .failures import PACKAGE, Failure, in_model, last_call
from .session import Ranks, Session
from .store import call_with_timeout

_TORCH_ERRORS = re.compile(  # torch raises plain RuntimeErrors, too
    r"^\[.*gloo"  # some of gloo's begin with a source file in brackets
    r"|^Gloo |^Application timeout caused pair closure"
    r"|NCCL (error|communicator)|ncclRemoteError"
    r"|^\[.*ProcessGroup"
)
_BY_PEERS = re.compile("timed? ?out|connection|closed|reset|remote|abort|pipe", re.IGNORECASE)
_ALL_NOTICE = timedelta(seconds=3)  # time for all ranks to notice a broken collective: its end closes connections
_TIMED_OUT = re.compile("timed? ?out", re.IGNORECASE)

_COLLECTIVES = os.path.join("torch", "distributed", "distributed_c10d.py")
_CHECK = os.path.join(PACKAGE, "collectives", "consistency.py")  # each ddpkit collective begins with its check
_OF_A_STORE = (dist.DistNetworkError, dist.DistStoreError)  # perhaps one of the script's own stores
_NOT_OURS = (PeerError, BarrierTimeoutError)  # errors with which other ranks end this one's work
_BETWEEN_TWO = {"send", "recv", "isend", "irecv", "batch_isend_irecv"}


def cause_of(error: BaseException, session: Session) -> DdpkitError | None:
    """Explain why a collective broke, from the other ranks' reports. Searches exception groups.

    Returns:
        The error to raise instead, which names the rank that failed, left or did not come, or the ranks' different
        collectives; None if the cause is unknown.
    """
    for inner in getattr(error, "exceptions", ()):
        if isinstance(inner, PeerError):
            return Failure.of(session.rank, inner).to_error()  # a new one: the group becomes its cause
        cause = cause_of(inner, session)
        if cause:
            return cause
    failures = session.failures
    if error is failures.explained or not is_of_broken_collective(error):  # explained by an inner block
        return None
    failures.explained = error
    if _TIMED_OUT.search(message_of(error)):
        session.show_ranks()
    call, place, group = _called(error)
    ranks = _participants(error, call, group)
    if session.rank not in ranks or failures.known or failures.compared:
        return session.find_cause()
    failures.compared = True  # once: a second time ranks may compare different collectives
    return _compare_places(error, f"{call} {place}", session, ranks)


def lost_peer_of(error: BaseException, session: Session | None) -> DdpkitError | None:
    """Return the error that names the peer whose loss caused this one; None if that was not the cause.

    Or the error that a peer rejoins, for which all ranks leave, too.
    """
    if isinstance(error, _NOT_OURS):
        return error
    if session is None:
        return None
    try:  # in another thread: the store's host may be stopped
        session.failures.raise_if_known()
        cause = call_with_timeout(lambda: cause_of(error, session), math.inf, session.failures.raise_if_known)
    except PeerError as known:
        return known
    if cause is None and is_of_broken_collective(error):  # several ranks are silent, and none of them is named
        return DdpkitError(f"a collective broke, and the rank that caused it is unknown: {error}")
    return cause if isinstance(cause, _NOT_OURS) else None


def is_of_broken_collective(error: BaseException) -> bool:
    """Return whether this is an error of torch's for a broken collective."""
    if not isinstance(error, RuntimeError) or isinstance(error, DdpkitError):
        return False
    return isinstance(error, dist.DistError) or _TORCH_ERRORS.search(message_of(error)) is not None


def _compare_places(error: BaseException, place: str, session: Session, ranks: Ranks) -> DdpkitError | None:
    """Meet the ranks whose collective broke, too, and compare where in the script that was. Collective.

    Returns:
        The error to raise instead: a rank is absent, or the ranks were in different collectives. None if neither.
    """
    everyone = len(ranks) == len(session.hosts)
    try:
        places = session.exchange(place, "broken collective", _ALL_NOTICE, None if everyone else ranks)
    except BarrierTimeoutError as late:
        ending = [*session.failures.exiting, *session.failures.left]
        is_ending = any(rank in ending for rank, _ in late.missing)  # its exit code tells why
        if is_ending or session.failures.known or late.elsewhere:  # those wait for others, which may be the cause
            return session.find_cause()
        (rank, host), *more = late.missing
        if more or rank == session.rank:  # one of them may have kept the others waiting; or another broke before
            return None
        here = ", ".join(f"{rank}" for rank, _ in late.arrived)
        words = (
            f"it did not arrive at the collective that broke on rank {here} ({error}). Is it stopped, stuck or in "
            "other code?"
        )
        return PeerError(rank, host, "silent", words)
    except DdpkitError as cause:
        return cause
    calls = {text.partition(" ")[0] for text in places}
    if len(calls) == 1 or "?" in calls:
        return None
    lines = "".join(f"\n  rank {rank}: {text}" for rank, text in zip(ranks, places, strict=True))
    rule = "every rank must make the same calls in the same order"
    return MismatchError(f"The ranks were in different collectives; {rule}.{lines}\n{error}")


def _participants(error: BaseException, call: str, group: Any) -> Ranks:
    """Return the ranks that took part in what broke; none if a rank that does not come now may be innocent."""
    is_of_collective = call not in _BETWEEN_TWO and not isinstance(error, _OF_A_STORE)
    if not is_of_collective or not _BY_PEERS.search(message_of(error)) or not dist.is_initialized():
        return ()
    if group is None and other_groups_were_made():  # the group is unknown
        return ()
    with suppress(KeyError, ValueError, RuntimeError, AttributeError):  # not a group, or a destroyed one
        return tuple(dist.get_process_group_ranks(group or current_group()))
    return ()


def _called(error: BaseException) -> tuple[str, str, Any]:
    """Find the origin of an error.

    Returns:
        The call, "?" if unknown, the script's line before it, and its process group, None if unknown.
    """
    script, called = last_call(error.__traceback__)
    place = f"at {os.path.basename(script.filename)}:{script.lineno}: {script.line}" if script else ""
    call = "?"
    for frame in called:
        if frame.filename == _CHECK:  # inside it ranks are in different torch functions
            call = "ddpkit's " + next(each.name for each in called if each.filename.startswith(PACKAGE))
            break
        if frame.filename.endswith(_COLLECTIVES):
            call = frame.name
        call = in_model(frame) or call
    return call, place, _group_of(error)


def _group_of(error: BaseException) -> Any:
    """Find the process group of the torch function that raised an error, None if it was none."""
    group = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_filename.endswith(_COLLECTIVES) and "group" in frame.f_locals:
            group = frame.f_locals["group"] or current_group()
    return group
