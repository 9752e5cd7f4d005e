"""The messages of the monitor: one JSON object a line, believed only after every field of it was checked."""

from __future__ import annotations

import hmac
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_type_hints

from ..timing.pace import PACE, Pace
from .activity import ACTIVITY, Activity
from .failures import FAILURE, Failure
from .stop_agreement import REQUEST, StopDecision, StopRequest
from .store_values import all_printable, encode, fits

LONGEST = 2_000_000  # bytes of a line: more than the longest failure with every character escaped


@dataclass(frozen=True)
class Steps:
    """How many steps a rank has counted in which it could stop."""

    rank: int
    number: int


@dataclass(frozen=True)
class Message:
    """What one line says: who is speaking, who has left, whose process is about to end, or what has failed.

    Or it asks what the ranks are doing, or answers that for one of them; or it asks how long their steps took, up to a
    block of this number, or answers that. Or it is about a stop of all ranks: a request, the question how many steps a
    rank has counted, an answer, the decision. The last byte of a process that is about to end is its exit code.
    """

    rank: int | None = None
    left: int | None = None
    exiting: int | None = None
    failure: Failure | None = None
    reason: Failure | None = None  # the failure that a rank handled when it left, or by which it ends
    code: int | None = None
    asks: bool = False
    activity: Activity | None = None
    asks_pace: int | None = None
    pace: Pace | None = None
    wants_stop: StopRequest | None = None
    asks_steps: bool = False
    steps: Steps | None = None
    stop: StopDecision | None = None


class Lines:
    """Cuts a stream at its newlines, wherever it was split; of a line that is too long nothing is kept."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._too_long = False

    def feed(self, data: bytes) -> list[bytes]:
        """Take in the next piece; return the lines that are complete now, without their newlines."""
        *ends, rest = data.split(b"\n")
        lines = []
        for end in ends:
            self._keep(end)
            if not self._too_long:
                lines.append(bytes(self._rest))
            self._rest.clear()
            self._too_long = False
        self._keep(rest)
        return lines

    def rest(self) -> bytes:
        """Return what has come since the last newline."""
        return bytes(self._rest)

    def _keep(self, piece: bytes) -> None:
        if len(self._rest) + len(piece) > LONGEST:
            self._too_long = True
            self._rest.clear()
        if not self._too_long:
            self._rest += piece


def shows_token(line: bytes, token: str) -> bool:
    """Return whether a line begins with the token of the job: nothing else of a stranger's line is read."""
    start = encode(token=token)[: -len(b"}\n")]
    return hmac.compare_digest(line[: len(start)], start)


def parse(line: bytes, world_size: int) -> Message | None:
    """Read a message; return None for anything else.

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
    known = {}
    for name in _READERS.keys() & fields.keys():
        known[name] = _READERS[name](fields[name], world_size)
        if known[name] is None:
            return None
    if not known:
        return None
    return Message(**known)


def _read_rank(value: object, world_size: int) -> int | None:
    if type(value) is int and value in range(world_size):  # not a bool, and not 1.0
        return value
    return None


def _read_failure(fields: Any, world_size: int) -> Failure | None:
    if not fits(fields, FAILURE):
        return None
    failure = Failure.from_fields(fields)
    if failure.rank not in range(-1, world_size):  # -1: the job itself is wrong
        return None
    return failure


def _read_question(value: object, _: int) -> bool | None:
    return True if value is True else None


def _read_activity(fields: Any, world_size: int) -> Activity | None:
    if not fits(fields, ACTIVITY) or fields["rank"] not in range(world_size):
        return None
    return Activity.from_fields(fields)


def _read_number(value: object, _: int) -> int | None:
    return value if type(value) is int else None


def _read_pace(fields: Any, world_size: int) -> Pace | None:
    if not fits(fields, PACE) or fields["rank"] not in range(world_size):
        return None
    return Pace.from_fields(fields)


def _read_request(fields: Any, world_size: int) -> StopRequest | None:
    if not fits(fields, REQUEST) or fields["rank"] not in range(world_size):
        return None
    return StopRequest(**fields)


def _read_steps(fields: Any, world_size: int) -> Steps | None:
    if not fits(fields, _STEPS) or fields["rank"] not in range(world_size):
        return None
    return Steps(**fields)


def _read_decision(fields: Any, world_size: int) -> StopDecision | None:
    if not fits(fields, {"step": int, "request": REQUEST}) or fields["request"]["rank"] not in range(world_size):
        return None
    return StopDecision(fields["step"], StopRequest(**fields["request"]))


_STEPS = get_type_hints(Steps)  # the form of its JSON
_READERS: dict[str, Callable[[Any, int], Any]] = {  # of each field; they return None for what it cannot be
    "rank": _read_rank,
    "left": _read_rank,
    "exiting": _read_rank,
    "failure": _read_failure,
    "reason": _read_failure,
    "asks": _read_question,
    "activity": _read_activity,
    "asks_pace": _read_number,
    "pace": _read_pace,
    "wants_stop": _read_request,
    "asks_steps": _read_question,
    "steps": _read_steps,
    "stop": _read_decision,
}
