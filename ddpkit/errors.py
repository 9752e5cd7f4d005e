"""Errors in the state of a job. Each says what was expected, what was found and what to do.

Bad arguments are plain `ValueError` and `TypeError`.
"""

from __future__ import annotations

import os
import re
import sys
import time
import traceback
from collections.abc import Mapping
from typing import Any, TypeVar

# characters of a failure: the store closes connections over values of megabytes
MESSAGE_LENGTH = 10_000
TRACE_LENGTH = 50_000
GUIDE = "https://ddpkit.readthedocs.io/en/latest/guide/"
_PACKAGE = os.path.dirname(__file__) + os.sep
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
Places = list[tuple[int, str]]  # rank and host
_Error = TypeVar("_Error", bound="DdpkitError")


class DdpkitError(RuntimeError):
    """Base class of ddpkit's errors. Most name the guide page that explains them.

    Example:
        >>> from ddpkit import DdpkitError, detect_launch
        >>> try:
        ...     detect_launch({"RANK": "1"})
        ... except DdpkitError as error:
        ...     print(type(error).__name__)
        LaunchError
    """

    _page = ""  # guide page
    _module = ""  # of another rank's exception, if known
    _made: float  # creation time in this process, which tells the job it belongs to and its age

    def __new__(cls: type[_Error], *args: Any, **kwargs: Any) -> _Error:
        """Create the error, and record the time."""
        error = super().__new__(cls, *args)
        error._made = time.monotonic()
        if cls._page and sys.version_info >= (3, 11):  # a note, so that logs and reports quote one line
            error.add_note(docs_line(cls._page))
        return error

    def __str__(self) -> str:
        """Return the message; it may quote what other processes wrote."""
        return printable(super().__str__())

    def __reduce__(self) -> tuple[Any, ...]:  # subclasses take keywords, which the default cannot unpickle
        state = {name: value for name, value in self.__dict__.items() if name != "_made"}
        return _rebuild, (type(self), self.args, state)


class LaunchError(DdpkitError):
    """The ranks cannot form a job: environment variables are incomplete or contradictory, or ranks do not join.

    Example:
        >>> from ddpkit import LaunchError, detect_launch
        >>> try:
        ...     detect_launch({"RANK": "1"})
        ... except LaunchError as error:
        ...     print(error)
        This looks like a distributed job, but WORLD_SIZE, MASTER_ADDR, MASTER_PORT are not set. ...
    """

    _page = "launching"
    is_failure = True  # a failure of the rank that raises it


class NotSetUpError(DdpkitError):
    """Several processes were launched, but `setup()` was not called.

    Example:
        >>> from unittest.mock import patch
        >>> from ddpkit import NotSetUpError, barrier
        >>> launched = {"RANK": "0", "WORLD_SIZE": "2"}
        >>> launched |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
        >>> with patch.dict("os.environ", launched):
        ...     try:
        ...         barrier()
        ...     except NotSetUpError as error:
        ...         print(error)
        2 processes were launched (platform), but this one has not joined them. ...
    """

    _page = "launching"


class MismatchError(DdpkitError):
    """Ranks passed values that do not match, or made different calls.

    Example:
        >>> from ddpkit import MismatchError, all_reduce_mean
        >>> try:
        ...     means = all_reduce_mean({"loss": 2.0})
        ... except MismatchError as error:
        ...     print(error)

        On two ranks with different keys::

            all_reduce_mean(value) needs the same structure, dtypes and shapes on every rank,
            but found:
              value['loss']: number on rank 0; missing on rank 1
              value['lost']: missing on rank 0; number on rank 1
    """

    _page = "collectives"


class ReplicaMismatchError(DdpkitError):
    """Models or optimizers that must be equal on every rank differ.

    Example:
        >>> import torch
        >>> from ddpkit import ReplicaMismatchError, check_replicas
        >>> try:
        ...     check_replicas(torch.nn.Linear(1, 1))
        ... except ReplicaMismatchError as error:
        ...     print(error)

        On two ranks with different biases::

            1 of 3 entries differ between ranks:
              parameter bias: float32[1] #2144df1c on rank 0; float32[1] #aca16a6a on rank 1
    """

    _page = "dp-or-ddp"


class CheckpointError(DdpkitError):
    """A checkpoint cannot be read or written.

    Example:
        >>> import tempfile
        >>> from ddpkit import CheckpointError, Checkpointer
        >>> with tempfile.NamedTemporaryFile() as file:
        ...     try:
        ...         Checkpointer("checkpoints").load(file.name)
        ...     except CheckpointError as error:
        ...         print(error)
        Cannot read ...: its checksum is missing: ...
    """

    _page = "checkpoints"


class BadStepError(DdpkitError):
    """More steps in a row were bad than `max_skips` allows.

    Attributes:
        ranks: Ranks on which the last step failed.

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
        missing: `(rank, host)` of each rank that had not arrived when the first rank timed out.
        arrived: `(rank, host)` of each rank that had.
        elsewhere: Where each missing rank was waiting instead, as far as known, by rank.

    Example:
        >>> from datetime import timedelta
        >>> from ddpkit import BarrierTimeoutError, barrier
        >>> try:
        ...     barrier("shards", timedelta(minutes=30))
        ... except BarrierTimeoutError as error:
        ...     print("not here:", error.missing)

        On two ranks, when rank 1 does not come::

            barrier 'shards': 1 of 2 ranks did not arrive within 1800 s: rank 1 (node2).
            Arrived: rank 0 (node1).
    """

    _page = "troubleshooting"
    missing: Places
    arrived: Places
    elsewhere: dict[int, str]

    def __init__(
        self, message: str, missing: Places, arrived: Places, elsewhere: Mapping[int, str] | None = None
    ) -> None:
        super().__init__(message)
        self.missing = missing
        self.arrived = arrived
        self.elsewhere = dict(elsewhere or {})


_WITHOUT_ERROR = {  # failures without an exception
    "left": "left the job ",
    "lost": "was lost: ",
    "silent": "does not answer: ",
    "orphaned": "has lost its launcher: ",
}


class PeerError(DdpkitError):
    """Another rank failed.

    Attributes:
        rank: The rank that failed first.
        host: Its host.
        error_type: Class name of its exception. Without an exception: "lost" if its process died, "left" if it exited
            or called `teardown()`, "silent" if it does not answer, "orphaned" if its launcher died.
        message: The exception's message.
        traceback: Its formatted traceback; "" if there is none.

    Example:
        >>> from ddpkit import spawn
        >>> try:
        ...     spawn(int, 1, "seven")
        ... except ValueError as error:  # the rank's own, caused by a PeerError
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


def like_original(error: PeerError) -> PeerError:
    """Return an error that an `except` for the other rank's exception catches as well, if its class is known here."""
    kind = getattr(sys.modules.get(error._module), "__dict__", {}).get(error.error_type)
    if not isinstance(kind, type) or not issubclass(kind, Exception) or issubclass(PeerError, kind):
        return error
    if issubclass(kind, StopIteration):  # a generator would turn it into another error
        return error
    methods = {"__new__": kind.__new__, "__init__": Exception.__init__, "__str__": Exception.__str__}
    methods["__reduce__"] = lambda self: error.__reduce__()  # this class has no name that pickle could find
    try:
        alike: PeerError = type("PeerError", (PeerError, kind), methods)(*error.args)
    except Exception:  # no common subclass, or a class of the script's with demands
        return error
    alike.__dict__.update(error.__dict__)
    return alike


def _rebuild(cls: type[DdpkitError], args: tuple[Any, ...], state: dict[str, Any]) -> DdpkitError:
    error = cls.__new__(cls, *args)
    error.__dict__.update(state)
    return error


# every rank raises these; for others, one rank raises and the rest get a PeerError
ERRORS_OF_ALL_RANKS = (BadStepError, BarrierTimeoutError, CheckpointError, MismatchError, ReplicaMismatchError)


def message_of(error: BaseException, length: int = MESSAGE_LENGTH) -> str:
    """Return an exception's text, shortened to `length` characters, even if its `__str__` raises."""
    try:
        text = str(error)
    except BaseException as broken:  # SystemExit too: only the original error matters
        text = f"(no message: its __str__ raises {type(broken).__name__})"
    return printable(text[:length])


def describe_error(error: BaseException, length: int = MESSAGE_LENGTH) -> str:
    """Format an exception like the last line of its traceback: class and text, shortened to `length`."""
    return f"{type(error).__name__}: {message_of(error, length)}"


def docs_line(page: str) -> str:
    """Return a line with the address of a guide page."""
    return f"Docs: {GUIDE}{page}.html"


def is_ours(error: BaseException) -> bool:
    """Return whether ddpkit raised an error on purpose, so that its own frames explain nothing."""
    if isinstance(error, DdpkitError):
        return True
    stack = traceback.extract_tb(error.__traceback__)
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if before is not None or hasattr(error, "__notes__") or not stack:  # there is more to show
        return False
    is_raised_here = stack[-1].filename.startswith(_PACKAGE) and f"{stack[-1].line}".startswith("raise ")
    return is_raised_here or hasattr(error, "_page")


def report_of(error: BaseException) -> str:
    """Format an error, cause first: what happened, the page that explains it, the place in the script."""
    message, _, details = message_of(error, TRACE_LENGTH).partition("\n\n")
    lines = [f"{type(error).__name__}: {message}"]
    if page := getattr(error, "_page", ""):
        lines.append(docs_line(page))
    if details:
        lines += ["", details.strip("\n")]
    stack = traceback.extract_tb(error.__traceback__)
    if stack:
        shown = [frame for frame in stack if not _is_internal(frame)] or stack
        lines += ["", "Traceback (most recent call last):", "".join(traceback.format_list(shown)).rstrip("\n")]
    return printable("\n".join(lines)) + "\n"


def _is_internal(frame: traceback.FrameSummary) -> bool:
    """Return whether a frame is ddpkit's, or of a block or a dataclass of its."""
    is_of_dataclass = frame.filename == "<string>" and frame.name == "__init__"
    is_of_block = os.path.basename(frame.filename) in ("contextlib.py", "_contextlib.py")  # torch's decorators, too
    return is_of_dataclass or is_of_block or frame.filename.startswith(_PACKAGE)


def trace_of(error: BaseException) -> str:
    """Format an error's traceback, long ones shortened in the middle; "" if it was never raised."""
    if error.__traceback__ is None:
        return ""
    try:
        lines = [report_of(error)] if is_ours(error) else traceback.format_exception(error)
    except BaseException:  # exceptions hold arbitrary values, and SyntaxError's formatter trusts its fields
        lines = [*traceback.format_tb(error.__traceback__), f"{describe_error(error)}\n"]
    text = "".join(lines)
    if len(text) > TRACE_LENGTH:
        half = TRACE_LENGTH // 2
        text = f"{text[:half]}\n…\n{text[-half:]}"
    return printable(text)


def printable(text: str) -> str:
    """Escape characters that no encoding has (surrogates of broken file names) and terminal control characters.

    Newlines and tabs stay. All text that another process may have written goes through it before it is shown.
    """
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
