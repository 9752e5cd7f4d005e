"""What each rank is doing: its stack, since when it is there, and the picture of all ranks."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from types import FrameType
from typing import Any, get_type_hints

import torch

from .member import as_ranges
from .store_values import printable

_PACKAGE = os.path.dirname(os.path.dirname(__file__))
_PYTHON = os.path.dirname(os.__file__)
_LIBRARIES = tuple(path + os.sep for path in (_PACKAGE, os.path.dirname(torch.__file__)))
_WRAPPERS = {"wrapper", "decorate_context", "_fn", "_call_impl", "_wrapped_call_impl"}  # torch's, around what is meant
_MOST_FRAMES = 60  # of a stack that are told, the innermost
_MOST_TOLD = 5  # numbers that say how far a script is
_LONGEST = 300  # characters of a text that is told


@dataclass(frozen=True)
class Activity:
    """What a rank is doing, as it tells whoever asks.

    Attributes:
        rank: The rank.
        host: The host it runs on.
        pid: Its process.
        call: The function that it is in: of a library that its script has called, or of the script.
        place: The script's line.
        seconds: For how long it has been at one place, as far as looks once a second tell; 0 if it moves.
        told: How far its script is, as far as that is known: the epoch and batch of the loader that it reads.
        stack: Its calls, the outermost first, as "file:line function".
    """

    rank: int
    host: str
    pid: int
    call: str
    place: str
    seconds: float
    told: dict[str, int]
    stack: tuple[str, ...]

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Activity:
        """Make it of fields that have the form `ACTIVITY`, and shorten their texts."""
        texts = {name: _short(fields[name]) for name in ("host", "call", "place")}
        stack = tuple(map(_short, fields["stack"][-_MOST_FRAMES:]))
        told = {_short(name): number for name, number in islice(fields["told"].items(), _MOST_TOLD)}
        return cls(**(fields | texts | {"stack": stack, "told": told}))


ACTIVITY = get_type_hints(Activity)  # the form of its JSON


class MainThreadWatcher:
    """Sees, from another thread, where this process's main thread is and for how long."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._main = threading.main_thread().ident
        self._instruction = -1
        self._since = time.monotonic()

    def look(self) -> None:
        """Notice whether the main thread has moved since the last look."""
        frame = _call(self._innermost())
        if frame is None or not self._was_there(frame):
            self._since = time.monotonic()

    def describe(self, told: dict[str, int]) -> Activity:
        """Say where the main thread is, and what it has told of how far its script is."""
        self.look()
        seconds = time.monotonic() - self._since
        innermost = self._innermost()
        call = _call(innermost)
        name, place = "", ""
        stack: tuple[str, ...] = ()
        if innermost is not None and call is not None:
            name, place = _name_call(call)
            stack = _stack(call if call.f_code.co_filename.startswith(_LIBRARIES) else innermost)
        return Activity(self._rank, socket.gethostname(), os.getpid(), name, place, seconds, told, stack)

    def _innermost(self) -> FrameType | None:
        return None if self._main is None else sys._current_frames().get(self._main)

    def _was_there(self, frame: FrameType) -> bool:
        """Return whether the main thread was in this call at the last look; in a function of the script, at this place.

        The call is marked, for the address of a frame may be given to another call. A frame that nobody traces does not
        mind the mark.
        """
        marked = not frame.f_trace_lines
        if frame.f_trace is None:
            frame.f_trace_lines = False
        instruction, self._instruction = self._instruction, frame.f_lasti
        return marked and (instruction == frame.f_lasti or _is_library(frame.f_code.co_filename))


def _call(innermost: FrameType | None) -> FrameType | None:
    """Return the call of the script's own code into a library; its own innermost function if it is in none."""
    called = []
    frame = innermost
    while frame is not None and _is_library(frame.f_code.co_filename):
        called.append(frame)
        frame = frame.f_back
    if frame is None:
        return innermost
    while len(called) > 1 and called[-1].f_code.co_name in _WRAPPERS:
        called.pop()
    return called[-1] if called else frame


def _name_call(call: FrameType) -> tuple[str, str]:
    """Return a call's function, and the script's line."""
    script = call
    while script.f_back is not None and _is_library(script.f_code.co_filename):
        script = script.f_back
    return call.f_code.co_name, f"{os.path.basename(script.f_code.co_filename)}:{script.f_lineno}"


def _stack(frame: FrameType) -> tuple[str, ...]:
    """List the calls that lead to a frame, the outermost first."""
    lines: list[str] = []
    for outer, line in traceback.walk_stack(frame):
        lines.append(f"{_short_path(outer.f_code.co_filename)}:{line} {outer.f_code.co_name}")
    return tuple(reversed(lines[:_MOST_FRAMES]))


def _is_library(filename: str) -> bool:
    """Return whether a file is torch's, ddpkit's or of Python's own library."""
    if filename.startswith(_LIBRARIES) or filename.startswith("<frozen"):
        return True
    return filename.startswith(_PYTHON + os.sep) and "site-packages" not in filename


def _short_path(filename: str) -> str:
    """Write a file as its package or folder and its name."""
    return os.sep.join(filename.split(os.sep)[-3:])


def _short(text: str) -> str:
    return printable(text)[:_LONGEST]


class Picture:
    """What all ranks are doing, as rank 0 gathers it once, to be shown in its log.

    Attributes:
        is_wanted: Whether a rank has asked for it.
        was_shown: Set when it has been logged.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._activities: dict[int, Activity] = {}
        self._until: float | None = None
        self.is_wanted = False
        self.was_shown = threading.Event()

    def has_begun(self) -> bool:
        """Return whether the ranks have been asked."""
        return self._until is not None

    def begin(self, seconds: float) -> None:
        """Begin to gather, at most for so long."""
        self._until = time.monotonic() + seconds

    def add(self, activity: Activity) -> None:
        """Take what a rank is doing into the picture."""
        if self._until is not None:
            self._activities[activity.rank] = activity

    def is_due(self) -> bool:
        """Return whether it is to be shown now: all have answered, or it has taken too long."""
        if self._until is None or self.was_shown.is_set():
            return False
        return len(self._activities) == self._world_size or time.monotonic() > self._until

    def lines(self) -> list[str]:
        """Write it down."""
        return fold(self._activities.values(), self._world_size)


def fold(activities: Iterable[Activity], world_size: int) -> list[str]:
    """Write what all ranks are doing: those with equal stacks once, the most ranks first, then who did not answer.

    Args:
        activities: What the ranks have answered.
        world_size: Number of ranks in the job.
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
    if silent:
        lines.append(f"{_name(silent)}: no answer; the process is stopped, or in a C call that holds the interpreter")
    return lines


def _headline(some: list[Activity]) -> str:
    first = some[0]
    who = _name([each.rank for each in some])
    if len(some) == 1:
        who += f" ({first.host}, pid {first.pid})"
    doing = f"{first.call} at {first.place}" if first.place else "its main thread has ended"
    seconds = min(each.seconds for each in some)
    since = f", for {seconds:.0f} s" if seconds >= 1 else ""
    return f"{who}: {doing}{since}{_progress(some)}"


def _progress(some: list[Activity]) -> str:
    """Write how far these ranks are, from the one that is behind to the one ahead."""
    text = ""
    for name in some[0].told:
        numbers = [each.told[name] for each in some if name in each.told]
        least, most = min(numbers), max(numbers)
        text += f", {name} {least}" if least == most else f", {name} {least} to {most}"
    return text


def _name(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {as_ranges(ranks)}"
