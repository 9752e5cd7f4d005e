"""Messages of the watch, and reports of what a rank is doing: one JSON object per line, with every field checked."""

from __future__ import annotations

import faulthandler
import hmac
import json
import math
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from inspect import CO_GENERATOR
from itertools import islice
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

import torch

from ..errors import printable
from ..parsing import all_printable, encode, fits
from ..rendezvous.failures import Failure

if TYPE_CHECKING:
    from ..rendezvous.session import Session

# The tree along which ranks report failures: rank 0 at the top, at most 64 connections per rank.

CHILDREN = 63  # most children of a rank


def parent_of(rank: int) -> int:
    """Return the rank above this one, which is not rank 0."""
    return (rank - 1) // CHILDREN


def children_of(rank: int, world_size: int) -> range:
    """Return the ranks below this one that connect to it.

    >>> children_of(0, world_size=65), children_of(1, world_size=65), children_of(2, world_size=65)
    (range(1, 64), range(64, 65), range(65, 65))
    """
    first = rank * CHILDREN + 1
    return range(min(first, world_size), min(first + CHILDREN, world_size))


def is_below(rank: int, top: int) -> bool:
    """Return whether a rank's path to rank 0 leads through another, or is that rank."""
    while rank > top:
        rank = parent_of(rank)
    return rank == top


# What each rank is doing: its stack, the time since its last progress, and the report on all ranks.

_PACKAGE = os.path.dirname(os.path.dirname(__file__))
_PYTHON = os.path.dirname(os.__file__)
_LIBRARIES = tuple(path + os.sep for path in (_PACKAGE, os.path.dirname(torch.__file__)))
# torch's frames around the relevant ones
_WRAPPERS = {"wrapper", "decorate_context", "_fn", "_call_impl", "_wrapped_call_impl", "inner"}
_MOST_FRAMES = 60  # innermost frames of a stack in a report
ANSWERS = 1.0  # seconds in which the ranks answer what they are doing
_PAUSE = 600.0  # seconds before the next report
_LASTING = 15.0  # seconds after which a rank is not merely about to leave a wait
_MOST_CALLS = 8  # ranks in an error
_MOST_NUMBERS = 5  # numbers that describe the script's progress
_LONGEST = 300  # characters of a text in a report


@dataclass(frozen=True)
class Activity:
    """What a rank is doing.

    Attributes:
        rank: The rank.
        host: Its host.
        pid: Its process.
        call: Its current function: the library function that the script called, or the script's own.
        place: The script's line.
        seconds: Time since the script got a batch from a loader, or entered a ddpkit collective.
        progress: Epoch and batch of the loader that the script reads, as far as known.
        waits: The wait of ddpkit's for all ranks that it is in; "" if it is in none.
        waited: Time since the start of that wait.
        asked: Time since it asked the question to which the answer was that ranks are missing.
        stack: Its calls, the outermost first, as "file:line function".
    """

    rank: int
    host: str
    pid: int
    call: str
    place: str
    seconds: float
    progress: dict[str, int]
    waits: str
    waited: float
    asked: float
    stack: tuple[str, ...]

    @property
    def is_in_collective(self) -> bool:
        """Return whether its script has called ddpkit or torch.distributed, or DDP may be averaging gradients."""
        folders = self.stack[-1].partition(":")[0].split(os.sep) if self.stack else []
        return self.call == "backward" or not {"ddpkit", "distributed", "distributed.py"}.isdisjoint(folders)

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Activity:
        """Create it from its fields, and shorten their texts."""
        texts = {name: _short(fields[name]) for name in ("host", "call", "place", "waits")}
        stack = tuple(map(_short, fields["stack"][-_MOST_FRAMES:]))
        progress = {_short(name): number for name, number in islice(fields["progress"].items(), _MOST_NUMBERS)}
        return cls(**(fields | texts | {"stack": stack, "progress": progress}))


STACKS = "ddpkit-stacks"
STACK_SIGNAL = getattr(signal, "SIGRTMIN", 0) + 3


def mask_stack_signal(how: int) -> None:
    """Let this thread, and those that it starts, not be interrupted by a signal for the stacks, or let it again."""
    if signal.getsignal(STACK_SIGNAL) == signal.SIG_DFL:
        signal.pthread_sigmask(how, {STACK_SIGNAL})


os.register_at_fork(after_in_child=lambda: mask_stack_signal(signal.SIG_UNBLOCK))


@contextmanager
def readable_stacks() -> Iterator[None]:
    """Let `where` read the stacks of this process and of loader workers that it forks, also without the interpreter.

    A signal, which this thread takes, makes Python write the stacks into a file in memory, which other processes of the
    same user find in `/proc`. The main thread sleeps on in C, which would return early.
    """
    mask_stack_signal(signal.SIG_UNBLOCK)
    file = None
    if hasattr(os, "memfd_create") and signal.getsignal(STACK_SIGNAL) == signal.SIG_DFL:  # on Linux, and free
        with suppress(OSError):
            file = os.memfd_create(STACKS)
            faulthandler.register(STACK_SIGNAL, file=file)
    try:
        yield
    finally:
        if file is not None:
            if signal.getsignal(STACK_SIGNAL) == signal.SIG_DFL:  # else the script has taken it meanwhile
                faulthandler.unregister(STACK_SIGNAL)
            os.close(file)


def describe_main_thread(session: Session) -> Activity:
    """Describe the main thread's position, from another thread, and the script's reported progress."""
    now = time.monotonic()
    waits, since, asked = session.waits or ("", now, now)
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    call, place, stack = _describe(frame)
    found = {
        "rank": session.rank,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "call": call,
        "place": place,
        "seconds": now - session.acted_at,
        "progress": session.progress,
        "waits": waits,
        "waited": now - since,
        "asked": max(0.0, now - asked),
        "stack": stack,
    }
    return Activity.from_fields(found)


def _describe(frame: FrameType | None) -> tuple[str, str, list[str]]:
    """Return a thread's current call, the script's line, and the stack.

    The call is that of the script's code into a library, or its own innermost function outside of any.
    """
    if frame is None:  # for which walk_stack() would take the calling thread's
        return "", "", []
    frames = [(each.f_code, line) for each, line in traceback.walk_stack(frame)][::-1]
    scripts = [number for number, (code, _) in enumerate(frames) if not _is_library(code.co_filename)]
    script = max(scripts, default=0)
    last = len(frames) - 1
    call = min(script + 1, last) if scripts else last
    while call < last and _is_wrapper(frames[call][0]):
        call += 1
    code, line = frames[script]
    shown = frames
    if frames[call][0].co_filename.startswith(_LIBRARIES):  # frames inside a library do not help
        shown = frames[: call + 1]
    stack = [f"{short_path(each.co_filename)}:{number} {each.co_name}" for each, number in shown]
    return frames[call][0].co_name, f"{os.path.basename(code.co_filename)}:{line}", stack


def _is_wrapper(code: CodeType) -> bool:
    return code.co_name in _WRAPPERS or bool(code.co_flags & CO_GENERATOR)


def _is_library(filename: str) -> bool:
    """Return whether a file belongs to torch, ddpkit or Python's standard library."""
    if filename.startswith(_LIBRARIES) or filename.startswith("<frozen"):
        return True
    return filename.startswith(_PYTHON + os.sep) and "site-packages" not in filename


def short_path(filename: str) -> str:
    """Return a file as its package or folder and its name."""
    return os.sep.join(filename.split(os.sep)[-3:])


def _short(text: str) -> str:
    """Shorten a text, and escape what would break a terminal's line."""
    return printable(text[:_LONGEST]).replace("\n", r"\n").replace("\t", r"\t")


class StatusReport:
    """What all ranks are doing, gathered on rank 0 for its log; at most once in ten minutes.

    It is shown after too long a wait; or, on mere suspicion, if all ranks are in collectives, but not in the same one.

    Attributes:
        deadlock: Why no rank of the report shown last can continue; "" if one may.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._activities: dict[int, Activity] = {}
        self._begun_at = -math.inf
        self._until: float | None = None
        self._is_suspected = False
        self.deadlock = ""

    def begin(self, is_suspected: bool = False) -> bool:
        """Return whether to ask the ranks now, or to make rank 0 ask; it awaits the answers with a time limit."""
        now = time.monotonic()
        if now < self._begun_at + _PAUSE:
            return False
        self._begun_at = now
        self._until = now + ANSWERS
        self._is_suspected = is_suspected
        self._activities.clear()
        return True

    def add(self, activity: Activity) -> None:
        """Add a rank's answer."""
        self._activities[activity.rank] = activity

    def take(self, at_once: bool = False) -> list[str]:
        """Return its lines if they are due: when all have answered, or after the time limit. Once."""
        complete = len(self._activities) == self._world_size
        if self._until is None or not (complete or at_once or time.monotonic() > self._until):
            return []
        self._until = None
        title = "A wait took too long. What the ranks are doing:"
        if self._is_suspected:
            if not (complete and self._is_deadlock()):
                self._begun_at = -math.inf
                return []
            title = (
                "The ranks are in different calls. Unless one of them still computes, they wait for each other until "
                f"the time-out. Every rank must make the same calls in the same order{self._guess()}:"
            )
        return [title, *fold(self._activities.values(), self._world_size)]

    def _is_deadlock(self) -> bool:
        """Return whether all ranks are in collectives, but not in the same one; explain it if none can continue."""
        found = [self._activities[rank] for rank in sorted(self._activities)]
        waits = {each.waits for each in found}
        if "" in waits or len(waits) == 1:
            return all(each.is_in_collective for each in found) and len({each.call for each in found}) > 1
        # ranks were missing after the last had come: without that answer one may be about to leave its wait
        if min(each.waited for each in found) < _LASTING or max(each.asked for each in found) > _LASTING / 2:
            return False
        calls = "; ".join(f"rank {each.rank} in {each.call} at {each.place}" for each in found[:_MOST_CALLS])
        self.deadlock = (
            f"The ranks wait for each other in different calls, so that none can continue: {calls}. "
            f"Every rank must make the same calls in the same order{self._guess()}."
        )
        return True

    def _guess(self) -> str:
        """Guess why rank 0 is in another call than all others; "" if it is not."""
        mine = self._activities[0]
        for each in self._activities.values():
            if each.rank and each.waits == mine.waits and each.call == mine.call:
                return ""
        return f": is {mine.call} at {mine.place} inside `if is_main_process():`? Call it on every rank"


def fold(activities: Iterable[Activity], world_size: int, processes: Mapping[int, str] | None = None) -> list[str]:
    """Describe what all ranks are doing: equal stacks once, the most ranks first, then the ranks that did not answer.

    Args:
        activities: The ranks' answers.
        world_size: Number of ranks in the job.
        processes: Host and process of the ranks, if known.
    """
    alike: dict[tuple[str, ...], list[Activity]] = {}
    for activity in sorted(activities, key=lambda each: each.rank):
        alike.setdefault((activity.call, activity.place, *activity.stack), []).append(activity)
    lines = []
    for some in sorted(alike.values(), key=len, reverse=True):
        lines.append(_headline(some))
        lines += [f"    {line}" for line in some[0].stack]
    answered = {each.rank for some in alike.values() for each in some}
    silent = [rank for rank in range(world_size) if rank not in answered]
    unreached = [rank for rank in silent if rank > 0 and parent_of(rank) not in answered]
    unanswered = [rank for rank in silent if rank not in unreached]
    if unanswered:
        words = "no answer; it has left, is stopped, or is in a C call that holds the interpreter"
        lines.append(f"{_name(unanswered)}: {words}")
        lines += [f"    rank {rank}: {processes[rank]}" for rank in unanswered if processes]
    if unreached:
        lines.append(f"{_name(unreached)}: not reached: ranks on the way from rank 0 do not answer")
    return lines


def _headline(some: list[Activity]) -> str:
    first = some[0]
    who = _name(each.rank for each in some)
    if len(some) == 1:
        who += f" ({first.host}, pid {first.pid})"
    doing = f"{first.call} at {first.place}" if first.place else "its main thread has ended"
    seconds = min(each.seconds for each in some)
    since = f", {seconds:.0f} s since a batch or collective" if seconds >= 1 else ""
    return f"{who}: {doing}{since}{_progress(some)}"


def _progress(some: list[Activity]) -> str:
    """Describe the ranks' progress, from the slowest to the fastest."""
    text = ""
    for name in some[0].progress:
        numbers = [each.progress[name] for each in some if name in each.progress]
        least, most = min(numbers), max(numbers)
        text += f", {name} {least}" if least == most else f", {name} {least} to {most}"
    return text


def _name(ranks: Iterable[int]) -> str:
    """Name ascending ranks, such as "ranks 0-95,192"."""
    ranges: list[list[int]] = []
    for rank in ranks:
        if ranges and rank == ranges[-1][-1] + 1:
            ranges[-1][1:] = [rank]
        else:
            ranges.append([rank])
    names = ",".join("-".join(map(str, ends)) for ends in ranges)
    return f"rank {names}" if names.isdecimal() else f"ranks {names}"


LONGEST = 2_000_000  # bytes of a line: more than the longest failure with every character escaped


@dataclass(frozen=True)
class StopRequest:
    """A rank's request that all ranks stop.

    Attributes:
        rank: The rank.
        host: Its host.
        reason: Its reason, such as "got SIGTERM".
        signal: Number of the signal that it got, 0 without one.
        step: Count of the step at which all stop; 0 until rank 0 has decided it.
    """

    rank: int
    host: str
    reason: str
    signal: int
    step: int = 0

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host}) {self.reason}"

    def announcement(self) -> str:
        """Describe the consequence."""
        text = f"{self}: all ranks stop after the next step or two"
        if self.signal == signal.SIGINT:
            text += "; another Ctrl-C ends this process at once, without saving"
        return text


@dataclass(frozen=True)
class Steps:
    """Number of steps in which a rank could have stopped."""

    rank: int
    number: int


@dataclass(frozen=True)
class Message:
    """The content of one line: the speaker, a rank that left, is exiting, or failed.

    Or a question what the ranks are doing, or a rank's answer. Or part of a stop of all ranks: a request, the question
    for a rank's number of steps, an answer, the decision. The last byte of an exiting process is its exit code.
    """

    rank: int | None = None
    left: int | None = None
    exiting: int | None = None
    failure: Failure | None = None
    code: int | None = None
    asks: bool | None = None
    activity: Activity | None = None
    wants_stop: StopRequest | None = None
    asks_steps: bool | None = None
    steps: Steps | None = None
    stop: StopRequest | None = None


class Lines:
    """Splits a stream at its newlines; lines that are too long are dropped.

    Attributes:
        rest: Data since the last newline.
    """

    def __init__(self) -> None:
        self.rest = b""
        self._is_cut = False  # whether the beginning of the current line was dropped

    def feed(self, data: bytes) -> list[bytes]:
        """Add data; return the lines completed by it, without their newlines."""
        *lines, self.rest = (self.rest + data).split(b"\n")
        if lines and self._is_cut:
            del lines[0]
            self._is_cut = False
        if len(self.rest) > LONGEST:
            self.rest = b""
            self._is_cut = True
        return [line for line in lines if len(line) <= LONGEST]


def shows_token(line: bytes, token: str) -> bool:
    """Return whether a line begins with the job's token: nothing else of a stranger's line is read."""
    start = encode(token=token)[: -len(b"}\n")]
    return hmac.compare_digest(line[: len(start)], start)


def parse(line: bytes, world_size: int) -> Message | None:
    """Parse a message; return None for anything else.

    Example:
        >>> parse(b'{"left": 1}', world_size=2).left
        1
        >>> parse(b'{"left": 2}', world_size=2)
    """
    try:
        fields = all_printable(json.loads(line.decode()))
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict):
        return None
    names = _KINDS.keys() & fields.keys()
    known = {name: _read(_KINDS[name], fields[name], world_size) for name in names}
    if not known or None in known.values():
        return None
    return Message(**known)


def _read(kind: Any, value: Any, world_size: int) -> Any:
    """Parse a field of a message; return None if it is invalid."""
    if kind is bool:
        return True if value is True else None
    if kind is int:
        return value if fits(value, int) and value in range(world_size) else None
    least = -1 if kind is Failure else 0  # -1: a failure of the job itself
    if not fits(value, get_type_hints(kind)) or value["rank"] not in range(least, world_size):
        return None
    return getattr(kind, "from_fields", lambda fields: kind(**fields))(value)


# type of each field; a code is no part of a line
_KINDS = {name: get_args(hint)[0] for name, hint in get_type_hints(Message).items() if name != "code"}
