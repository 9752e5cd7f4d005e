"""Errors in the state of the job: each says what was expected, what was found and what to do.

Bad arguments are plain `ValueError` and `TypeError`.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
import traceback
from collections.abc import Mapping
from typing import Any, TypeVar

# characters of a failure: the store drops connections over values of megabytes
MESSAGE_LENGTH = 10_000
TRACE_LENGTH = 50_000
GUIDE = "https://ddpkit.readthedocs.io/en/latest/guide/"
_OURS = (os.path.dirname(__file__) + os.sep, contextlib.__file__)  # files that a traceback leaves out
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
_Error = TypeVar("_Error", bound="DdpkitError")


class DdpkitError(RuntimeError):
    """The root of ddpkit's own errors; most name the page of the guide that explains them.

    Example:
        >>> from ddpkit import DdpkitError, detect_launch
        >>> try:
        ...     detect_launch({"RANK": "1"})
        ... except DdpkitError as error:
        ...     print(type(error).__name__)
        LaunchError
    """

    _page = ""  # of the guide
    _made: float  # when, in this process: so which job's it is, and for how long it has been on its way

    def __new__(cls: type[_Error], *args: Any, **kwargs: Any) -> _Error:
        """Make the error, and note when."""
        error = super().__new__(cls, *args)
        error._made = time.monotonic()
        if cls._page and sys.version_info >= (3, 11):  # a note, so that what logs and reports quote stays one line
            error.add_note(docs_line(cls._page))
        return error

    def __reduce__(self) -> tuple[Any, ...]:  # subclasses take keywords, so the default would not unpickle
        state = {name: value for name, value in self.__dict__.items() if name != "_made"}
        return _rebuild, (type(self), self.args, state)


class LaunchError(DdpkitError):
    """The environment hints at several processes but the hints are incomplete, contradictory or shared.

    Example:
        >>> from ddpkit import detect_launch
        >>> detect_launch({"RANK": "1"})
        Traceback (most recent call last):
        ddpkit.errors.LaunchError: ...WORLD_SIZE, MASTER_ADDR, MASTER_PORT are not set. Found: RANK=1. ...
    """

    _page = "launching"
    is_failure = True  # of the rank that raises it


class NotSetUpError(DdpkitError):
    """Several processes were launched, but `setup()` was not called.

    Example:
        >>> from unittest.mock import patch
        >>> from ddpkit import barrier
        >>> launched = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
        >>> with patch.dict("os.environ", launched):
        ...     barrier()
        Traceback (most recent call last):
        ddpkit.errors.NotSetUpError: 2 processes were launched (platform), but this one has not joined them. ...
    """

    _page = "launching"


class MismatchError(DdpkitError):
    """Ranks passed values that cannot be combined.

    Example:
        >>> from ddpkit import MismatchError, all_reduce_mean
        >>> try:
        ...     means = all_reduce_mean({"loss": 2.0})
        ... except MismatchError as error:
        ...     print(error)

        On two, of which one has another key::

            all_reduce_mean(value) needs the same structure, dtypes and shapes on every rank, but found:
              value['loss']: number on rank 0; missing on rank 1
              value['lost']: missing on rank 0; number on rank 1
    """

    _page = "collectives"


class ReplicaMismatchError(DdpkitError):
    """Model or optimizer state that must be equal on every rank is not.

    Example:
        >>> import torch
        >>> from ddpkit import ReplicaMismatchError, check_replicas
        >>> try:
        ...     check_replicas(torch.nn.Linear(1, 1))
        ... except ReplicaMismatchError as error:
        ...     print(error)

        On two, of which one has another bias::

            1 of 3 entries differ between ranks:
              parameter bias: float32[1] #2144df1c on rank 0; float32[1] #aca16a6a on rank 1
    """

    _page = "dp-or-ddp"


class CheckpointError(DdpkitError):
    """A checkpoint cannot be read or written.

    Example:
        >>> import tempfile
        >>> from ddpkit import Checkpointer
        >>> with tempfile.NamedTemporaryFile() as file:
        ...     Checkpointer("checkpoints").load(file.name)
        Traceback (most recent call last):
        ddpkit.errors.CheckpointError: Cannot read ...: its checksum is missing: it was truncated, or ...
    """

    _page = "checkpoints"


class BadStepError(DdpkitError):
    """More steps in a row could not be taken than may be skipped.

    Attributes:
        ranks: Those on which the last one failed.

    Example:
        >>> import math, torch
        >>> from ddpkit import BadStepError, StepGuard
        >>> net = torch.nn.Linear(1, 1)
        >>> try:
        ...     with StepGuard(net, max_skips=0):
        ...         net(torch.full((1, 1), math.nan)).sum().backward()
        ... except BadStepError as error:
        ...     print(error.ranks)
        [0]
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

    Example:
        >>> from datetime import timedelta
        >>> from ddpkit import BarrierTimeoutError, barrier
        >>> try:
        ...     barrier("shards", timedelta(minutes=30))
        ... except BarrierTimeoutError as error:
        ...     print("not here:", error.missing)

        On two, of which one does not come::

            barrier 'shards': 1 of 2 ranks did not arrive within 1800 s: rank 1 (node2). Arrived: rank 0 (node1).
    """

    _page = "troubleshooting"
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


_WITHOUT_ERROR = {  # what a rank did that has raised none
    "left": "left the job ",
    "lost": "was lost: ",
    "silent": "does not answer: ",
    "orphaned": "has lost its launcher: ",
}


class PeerError(DdpkitError):
    """Another rank failed.

    Attributes:
        rank: The rank that failed first.
        host: The host it ran on.
        error_type: Name of its exception's class; without one "lost" for a process that died, "left" for one that ended
            or called `teardown()`, "silent" for one that does not answer, "orphaned" for one whose launcher has died.
        message: The exception's message.
        traceback: Its formatted traceback, "" where there was none.

    Example:
        >>> from ddpkit import spawn
        >>> try:
        ...     spawn(int, 1, "seven")
        ... except ValueError as error:  # a rank's own exception, with a PeerError as its cause
        ...     print(error.__cause__.rank, error.__cause__.error_type)
        0 ValueError
    """

    _page = "faults"

    def __init__(self, rank: int, host: str, error_type: str, message: str, traceback: str = "") -> None:
        text = f"rank {rank} ({host}) failed: {error_type}: "
        if error_type in _WITHOUT_ERROR:
            text = f"rank {rank} ({host}) {_WITHOUT_ERROR[error_type]}"
        text = text + message if message else text.rstrip(": ")
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


class RankRejoins(DdpkitError):
    """The ranks leave their job to begin anew, with a process that takes the place of a lost one."""


# that each rank raises, not one of them and the others a PeerError
ERRORS_OF_ALL_RANKS = (BadStepError, BarrierTimeoutError, CheckpointError, MismatchError, ReplicaMismatchError)


def message_of(error: BaseException, length: int = MESSAGE_LENGTH) -> str:
    """Make the text of an exception, shortened to `length` characters, also where its own `__str__` raises."""
    try:
        text = str(error)
    except BaseException as broken:  # SystemExit too: what matters is the error that we are asked about
        text = f"(no message: its __str__ raises {type(broken).__name__})"
    return printable(text[:length])


def describe_error(error: BaseException, length: int = MESSAGE_LENGTH) -> str:
    """Write an exception as the last line of its traceback does: its class and its text, shortened to `length`."""
    return f"{type(error).__name__}: {message_of(error, length)}"


def docs_line(page: str) -> str:
    """Write the address of a page of the guide."""
    return f"Docs: {GUIDE}{page}.html"


def report_of(error: DdpkitError) -> str:
    """Write an error with its cause first: what happened, the page that explains it, and where in the script it was."""
    message, _, details = message_of(error, TRACE_LENGTH).partition("\n\n")
    lines = [f"{type(error).__name__}: {message}"]
    if error._page:
        lines.append(docs_line(error._page))
    if details:
        lines += ["", details.strip("\n")]
    stack = traceback.extract_tb(error.__traceback__)
    if stack:
        shown = [frame for frame in stack if not frame.filename.startswith(_OURS)] or stack
        lines += ["", "Traceback (most recent call last):", "".join(traceback.format_list(shown)).rstrip("\n")]
    return "\n".join(lines) + "\n"


def trace_of(error: BaseException) -> str:
    """Format the traceback, "" for an error that was never raised; shortened in the middle if it is long."""
    if error.__traceback__ is None:
        return ""
    try:
        lines = traceback.format_exception(type(error), error, error.__traceback__)
        if isinstance(error, DdpkitError):
            lines = [report_of(error)]
    except BaseException:  # an exception may hold anything, and the formatter of a SyntaxError trusts its fields
        lines = traceback.format_tb(error.__traceback__)
        lines.append(f"{describe_error(error)}\n")
    text = "".join(lines)
    if len(text) > TRACE_LENGTH:
        half = TRACE_LENGTH // 2
        text = f"{text[:half]}\n…\n{text[-half:]}"
    return printable(text)


def printable(text: str) -> str:
    """Escape what no encoding has, such as the halves of a broken file name, and what a terminal takes for commands.

    Lines and tabs stay.
    """
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
