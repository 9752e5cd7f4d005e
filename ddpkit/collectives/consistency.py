"""Makes sure, before values move, that every rank is in the same collective with the same kind of value.

Each collective of ddpkit begins with one SUM of the same fixed block, so that ranks in different ones still meet, and a
wrong size never reaches gloo, which would abort the process. The block holds a hash of what the rank is about to do, as
16-bit lanes, and their squares: the sums are those of equal ranks only if the ranks are equal. The rest is payload.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from ..errors import MismatchError
from ..launch import ranks
from ..process_group import lifecycle
from ..process_group.failures import message_of
from ..process_group.store_values import parse
from . import sync

Lanes = NDArray[np.float64]
HEAD = 16  # lanes of the check, in front of the payload
ROOM = 512 - HEAD  # lanes of payload that travel with it
_LINES = 10
_LONG = 1_000_000  # characters of terms that go through the store as they are; of longer ones:
_PARTS, _SHOWN = 300, 300  # parts, and characters of each
_TERMS = {"call": str, "parts": dict[str, str], "error": str}


def terms(call: str, parts: dict[str, str] | None = None, error: str = "") -> str:
    """What this rank is about to do, as text: the call, and by path what it is called on."""
    return json.dumps({"call": call, "parts": parts or {}, "error": error})


def new_block() -> Lanes:
    """A block whose payload, from `HEAD` on, is 0."""
    return np.zeros(HEAD + ROOM)


def agree(mine: str, block: Lanes | None = None) -> Lanes:
    """Sums a block over all ranks, in place, if all have passed the same terms; returns the payload. Collective.

    Raises:
        MismatchError: If the terms differ, on every rank, with what differs.
    """
    block = new_block() if block is None else block
    if not lifecycle.joined():
        return block[HEAD:]
    block[:HEAD], expected = _head(mine, ranks.get_world_size())
    wire = torch.from_numpy(block)
    if type(wire) is not Tensor:  # it would not be sent, and the other ranks would wait
        raise TypeError("Under FakeTensorMode no values can be exchanged. Call it outside.")
    device = lifecycle.control_device()
    if device.type == "cpu":
        _reduce(wire, dist.ReduceOp.SUM)
    else:
        wire.copy_(_reduce(wire.to(device), dist.ReduceOp.SUM))
    if block[:HEAD].tobytes() != expected:
        texts = sync.exchange(_shortened(mine))
        raise MismatchError(_difference([parse(text, "exchange", _TERMS) for text in texts]))
    return block[HEAD:]


class all_raise:
    """A block of local work before `agree`: if it raises here, the other ranks raise in `agree` instead of waiting."""

    def __init__(self, call: str) -> None:
        self.call = call

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception):
            with suppress(MismatchError):
                agree(terms(self.call, error=f"{type(error).__name__}: {message_of(error)}"))


def world_size() -> int:
    """The number of ranks that take part: 1 unless there are peers to talk to."""
    return ranks.get_world_size() if lifecycle.joined() else 1


def wire_device(device: torch.device) -> torch.device:
    """Where a tensor of `device` travels: there, if the group's backend can, else where control messages do."""
    if not lifecycle.joined() or f"{device.type}:" in dist.get_backend_config():
        return device
    return lifecycle.control_device()


def all_reduce(wire: Tensor, greatest: bool = False) -> Tensor:
    """Adds up a tensor in place, on every rank, or takes the greatest; returns it. Collective.

    Never AVG: on gloo it is missing, wrong or raises, by torch's version and the dtype.
    """
    if lifecycle.joined() and wire.numel():
        _reduce(wire, dist.ReduceOp.MAX if greatest else dist.ReduceOp.SUM)
    return wire


def _reduce(wire: Tensor, op: Any) -> Tensor:
    with lifecycle.peer_errors():
        dist.all_reduce(wire, op)
    return wire


def _shortened(mine: str) -> str:
    """Leave out of terms that are too long for the store what no message shows; a digest says if that differs."""
    if len(mine) < _LONG:
        return mine
    fields = json.loads(mine)
    parts = list(fields["parts"].items())
    shown = {_cut(path): _cut(text) for path, text in parts[:_PARTS]}
    if len(parts) > _PARTS:
        shown["all entries"] = f"{len(parts)}, of digest {_digest(mine)}"
    return terms(_cut(fields["call"]), shown, fields["error"])


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}… (digest {_digest(text)})"


def _digest(text: str) -> str:
    return blake2b(text.encode(errors="surrogatepass"), digest_size=8).hexdigest()


@lru_cache(maxsize=256)
def _head(text: str, world_size: int) -> tuple[Lanes, bytes]:
    """The check of terms, and its bytes after a sum over ranks that all have these."""
    hashed = np.frombuffer(blake2b(text.encode(), digest_size=HEAD).digest(), "<u2").astype(np.float64)
    head = np.concatenate([hashed, hashed**2])
    return head, (head * world_size).tobytes()


def _difference(everyone: list[dict[str, Any]]) -> str:
    call = everyone[0]["call"]
    if failed := [f"  rank {rank}: {each['error']}" for rank, each in enumerate(everyone) if each["error"]]:
        return "\n".join([f"{call} got a bad argument:", *_some(failed)])
    if len({each["call"] for each in everyone}) > 1:
        found = _by_rank({rank: each["call"] for rank, each in enumerate(everyone)})
        return (
            f"The ranks are in different collectives: {found}. Every rank must make the same calls in the same order."
        )
    if found := compare(call, {rank: each["parts"] for rank, each in enumerate(everyone)}):
        return found
    if place := out_of_order([list(each["parts"]) for each in everyone]):
        return f"{call} needs the same order on every rank, but {place}"
    return (
        f"{call} was called alike on every rank, but the ranks' checks differ: a message was damaged, or met another."
    )


def compare(call: str, parts: dict[int, dict[str, str]]) -> str:
    """Say in which parts these ranks differ; "" if in none."""
    paths = dict.fromkeys(path for each in parts.values() for path in each)
    lines = []
    for path in paths:
        row = {rank: each.get(path, "missing") for rank, each in parts.items()}
        if len(set(row.values())) > 1:
            lines.append(f"  {path}: {_by_rank(row)}")
    if not lines:
        return ""
    return "\n".join([f"{call} needs the same structure, dtypes and shapes on every rank, but found:", *_some(lines)])


def out_of_order(names: Sequence[Sequence[str]]) -> str:
    """Say where the ranks' names, by rank, first differ in order, and what to do; "" if nowhere."""
    for place, row in enumerate(zip(*names, strict=False)):
        if len(set(row)) > 1:
            return (
                f"entry {place} is {_by_rank(dict(enumerate(row)))}. "
                "A set, or a folder's listing, has another order in each process: sort it before you build from it."
            )
    return ""


def _by_rank(row: dict[int, str]) -> str:
    groups: dict[str, list[int]] = {}
    for rank, text in row.items():
        groups.setdefault(text, []).append(rank)
    return "; ".join(f"{text} on {name_ranks(members)}" for text, members in groups.items())


def name_ranks(members: list[int]) -> str:
    """These ranks as in a sentence, the first eight of them."""
    shown = ", ".join(map(str, members[:8]))
    return f"rank {shown}" if len(members) == 1 else f"ranks {shown}" + (", …" if len(members) > 8 else "")


def _some(lines: list[str]) -> list[str]:
    return lines if len(lines) <= _LINES else [*lines[:_LINES], f"  and {len(lines) - _LINES} more"]
