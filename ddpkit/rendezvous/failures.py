"""Failures of ranks: their form for other ranks, and this rank's knowledge of the first failure of its job."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from traceback import FrameSummary
from types import TracebackType
from typing import Any, get_type_hints

import torch
import torch.distributed as dist

from ..errors import (
    MESSAGE_LENGTH,
    TRACE_LENGTH,
    DdpkitError,
    LaunchError,
    MismatchError,
    PeerError,
    message_of,
    printable,
    trace_of,
)
from ..launch.process_tree import Lost
from ..parsing import parse, refuse_text
from .store import try_store

GRACE = 5.0  # default seconds for a main thread to handle a failure

PACKAGE = os.path.dirname(os.path.dirname(__file__))
_LIBRARIES = (PACKAGE + os.sep, os.path.dirname(torch.__file__) + os.sep, contextlib.__file__, threading.__file__)
_IN_MODELS = {  # collectives that start in C++, without a function of torch.distributed
    os.path.join("torch", "nn", "parallel", "distributed.py"): "DDP's forward",
    os.path.join("torch", "autograd", "graph.py"): "backward",
}

_TEXT_LENGTHS = {"host": 300, "type": 300, "message": MESSAGE_LENGTH, "traceback": TRACE_LENGTH + 10_000}


class JobContinues(LaunchError):
    """The job continues without the ranks that it has lost, and refuses processes in their place."""

    _page = "lost-ranks"


@dataclass(frozen=True)
class Failure:
    """The failure of a rank, as ranks report it to each other.

    Attributes:
        rank: The rank that failed; -1 for a failure of the job itself.
        host: Its host.
        type: Name of its exception's class, or a word for a failure without one, such as "lost".
        message: The exception's message.
        traceback: Its formatted traceback; "" if there is none.
    """

    rank: int
    host: str
    type: str
    message: str
    traceback: str

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Failure:
        """Describe an error for the other ranks; with rank -1 for a failure of the job itself."""
        if isinstance(error, PeerError):  # it only forwards a peer's failure
            return cls(error.rank, error.host, error.error_type, error.message, error.traceback)
        return cls(rank, socket.gethostname(), type(error).__name__, message_of(error), trace_of(error))

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Failure:
        """Create a failure from fields of the form `FAILURE`, with texts shortened: strangers may write, too."""
        texts = {name: printable(fields[name])[:longest] for name, longest in _TEXT_LENGTHS.items()}
        return cls(fields["rank"], **texts)

    @classmethod
    def from_json(cls, text: bytes) -> Failure:
        """Parse a failure from the store."""
        return cls.from_fields(parse(text, "failure", FAILURE))

    def to_json(self) -> str:
        """Serialise the failure for the store."""
        return json.dumps(asdict(self))

    def to_error(self) -> DdpkitError:
        """Create the exception that the other ranks raise."""
        if self.type == JobContinues.__name__:
            return JobContinues(self.message)
        if self.rank < 0:
            kind = MismatchError if self.type == MismatchError.__name__ else LaunchError
            return kind(self.message)
        return PeerError(self.rank, self.host, self.type, self.message, self.traceback)


FAILURE = get_type_hints(Failure)  # the form of its JSON


def record_failure(store: dist.Store, failure: Failure) -> bytes:
    """Record the failure of a job, unless there is an earlier one; return the text of the first."""
    return store.compare_set("failure", "", failure.to_json())


def first_failure(store: dist.Store) -> Failure | None:
    """Return the failure of a job, None if there is none."""
    return Failure.from_json(store.get("failure")) if store.check(["failure"]) else None


@dataclass(eq=False)
class Failures:
    """This rank's knowledge of the first failure of its job, and of ranks that have left.

    The watch's thread and the main thread write it.

    Attributes:
        known: The first failure that this rank knows of.
        muted: Whether this rank has reported the failure or is leaving the job, so that it is not raised any more.
        held: Whether this rank must finish something before a failure is raised in it.
        grace: Seconds for the main thread to end or to handle the failure, from the first attempt to raise it, before
            the process is ended.
        left: Ranks that have left the job.
        exiting: Ranks with exiting processes, and until when to wait for the exit code.
        peer_lost: Returns the fate of the process that must outlive this one, "" while it lives.
        explained: The last exception whose cause was looked for.
        compared: Whether the ranks have compared which collective broke.
    """

    store: dist.Store
    rank: int
    hosts: Sequence[str]
    peer_lost: Lost
    known: Failure | None = None
    muted: bool = False
    held: bool = False
    grace: float = GRACE
    left: list[int] = field(default_factory=list)
    exiting: dict[int, float] = field(default_factory=dict)
    explained: BaseException | None = None
    compared: bool = False

    def announce(self, failure: Failure, patience: float = 2.0) -> None:
        """Write a failure into the store, within a time limit, for ranks that read it there."""
        try_store(lambda: record_failure(self.store, failure), patience)

    def look_up(self) -> Failure | None:
        """Return the first failure; ask the store if this rank knows of none."""
        if self.known is None:
            failure = first_failure(self.store)
            if failure and failure.rank not in range(-1, len(self.hosts)):
                refuse_text(failure.to_json(), "failure")
            if self.known is None:  # still: the watch may have received one meanwhile
                self.known = failure
        return self.known

    def raise_if_known(self) -> None:
        """Raise if this rank knows that any rank has failed."""
        if self.known:
            raise self.known.to_error()

    def cause(self, host: int | None) -> DdpkitError | None:
        """Return the error for the rank that failed or left, if known; with a host, only for its departure."""
        if self.known:
            return self.known.to_error()
        departures = (self.departure(rank) for rank in self.left if host in (None, rank))
        return self.lost_peer() or next(departures, None)

    def lost_peer(self) -> PeerError | None:
        """Create the error for the end of the process that must outlive this rank; None while it lives."""
        words = self.peer_lost()
        return PeerError(self.rank, self.hosts[self.rank], "orphaned", words) if words else None

    def departure(self, rank: int) -> PeerError:
        """Create the error for a wait for a rank that has left."""
        words = (
            f"while rank {self.rank} waited for it{_in_call()}. Every rank must make the same calls: is this one in a "
            f"branch that only some ranks take, such as `if is_main_process():`, or had rank {rank} fewer batches?"
        )
        return PeerError(rank, self.hosts[rank], "left", words)


def last_call(trace: TracebackType | None) -> tuple[FrameSummary | None, list[FrameSummary]]:
    """Find the script's last line of this thread, or of a traceback, and the calls from there.

    Returns:
        The script's frame, None if there is none, and the following frames of torch and ddpkit.
    """
    script, called = None, []
    for frame in [*traceback.extract_stack(), *traceback.extract_tb(trace)]:
        if frame.filename.startswith(_LIBRARIES):
            called.append(frame)
        else:
            script, called = frame, []
    return script, called


def in_model(frame: FrameSummary) -> str:
    """Name what averages gradients or buffers in a torch frame, "" if nothing does."""
    return next((name for file, name in _IN_MODELS.items() if frame.filename.endswith(file)), "")


def _in_call() -> str:
    """Describe this thread's current call, as in " in barrier() at train.py:31"; "" if there is none."""
    script, called = last_call(sys.exc_info()[2])
    if script is None:
        return ""
    names = [in_model(frame) for frame in reversed(called)]
    names += [f"{frame.name}()" for frame in called if not frame.name.startswith("_")]
    doing = next((f" in {name}" for name in names if name), "")
    return f"{doing} at {os.path.basename(script.filename)}:{script.lineno}"
