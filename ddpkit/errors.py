"""Errors in the state of the job: each says what was expected, what was found and what to do.

Bad arguments are plain `ValueError` and `TypeError`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any, TypeVar

_Error = TypeVar("_Error", bound="DdpkitError")


class DdpkitError(RuntimeError):
    """The root of ddpkit's own errors; the traceback of most ends with the page of the guide that explains them."""

    _page = ""  # of the guide
    _made: float  # when, in this process: so which job's it is, and for how long it has been on its way

    def __new__(cls: type[_Error], *args: Any, **kwargs: Any) -> _Error:
        """Make the error, and note when."""
        error = super().__new__(cls, *args)
        error._made = time.monotonic()
        if cls._page and sys.version_info >= (3, 11):  # a note, so that what logs and reports quote stays one line
            error.add_note(f"Docs: guide/{cls._page}")
        return error

    def __reduce__(self) -> tuple[Any, ...]:  # subclasses take keywords, so the default would not unpickle
        state = {name: value for name, value in self.__dict__.items() if name != "_made"}
        return _rebuild, (type(self), self.args, state)


class LaunchError(DdpkitError):
    """The environment hints at several processes but the hints are incomplete, contradictory or shared."""

    _page = "launching"


class NotSetUpError(DdpkitError):
    """Several processes were launched, but `setup()` was not called."""

    _page = "launching"


class MismatchError(DdpkitError):
    """Ranks passed values that cannot be combined."""

    _page = "collectives"


class ReplicaMismatchError(DdpkitError):
    """Model or optimizer state that must be equal on every rank is not."""

    _page = "dp-or-ddp"


class CheckpointError(DdpkitError):
    """A checkpoint cannot be read or written."""

    _page = "checkpoints"


class BadStepError(DdpkitError):
    """More steps in a row could not be taken than may be skipped.

    Attributes:
        ranks: Those on which the last one failed.
    """

    _page = "bad-batches"
    ranks: list[int]

    def __init__(self, message: str, ranks: list[int]) -> None:
        super().__init__(message)
        self.ranks = ranks


class BarrierTimeoutError(DdpkitError):
    """Some ranks did not arrive in time.

    Attributes:
        missing: `(rank, host)` of those that had not arrived when the first rank gave up.
        arrived: `(rank, host)` of those that had.
        elsewhere: Where missing ranks were waiting instead, by rank, as far as they had said so.
    """

    _page = "where"
    missing: list[tuple[int, str]]
    arrived: list[tuple[int, str]]
    elsewhere: dict[int, str]

    def __init__(
        self,
        message: str,
        missing: list[tuple[int, str]],
        arrived: list[tuple[int, str]],
        elsewhere: Mapping[int, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.missing = missing
        self.arrived = arrived
        self.elsewhere = dict(elsewhere or {})


class PeerError(DdpkitError):
    """Another rank failed.

    Attributes:
        rank: The rank that failed first.
        host: The host it ran on.
        error_type: Name of its exception's class, or "lost" for a process that died without one.
        message: The exception's message.
        traceback: Its formatted traceback, "" where there was none.
    """

    _page = "faults"

    def __init__(self, rank: int, host: str, error_type: str, message: str, traceback: str = "") -> None:
        text = f"rank {rank} ({host}) failed: {error_type}"
        if message:
            text += f": {message}"
        if traceback:
            text += f"\n\nTraceback of rank {rank}:\n{traceback.rstrip()}"
        super().__init__(text)
        self.rank = rank
        self.host = host
        self.error_type = error_type
        self.message = message
        self.traceback = traceback


def _rebuild(cls: type[DdpkitError], args: tuple[Any, ...], state: dict[str, Any]) -> DdpkitError:
    error = cls.__new__(cls, *args)
    error.__dict__.update(state)
    return error
