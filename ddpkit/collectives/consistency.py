"""Check, before values are exchanged, that all ranks are in the same collective with the same kind of value.

Each rank describes its call as text, the fingerprint. Every ddpkit collective begins by summing a block of fixed size
over the ranks, so that ranks in different collectives still meet, and gloo never gets different sizes, which would
abort the process. The block begins with a hash of the fingerprint, as 16-bit numbers, and their squares: the sums match
those of equal ranks only if the ranks are equal. The rest is payload: small values travel with the check.

On the CPU a few ranks send their blocks to each other; more ranks send them to the first, which returns the sum, two
messages per rank. gloo's all-reduce, a ring, would send each number of a small buffer as a message of its own, passed
on twice by all ranks.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from hashlib import blake2b
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import MismatchError, NotSetUpError, describe_error
from ..job import current_job, lifecycle
from ..job.device import control_device_of
from ..job.job import Peers, group_of, ranks_of, subset_of
from ..launch import ranks
from ..parsing import parse
from .differences import explain_mismatch, hash_of

Numbers = np.ndarray[Any, np.dtype[np.float64]]
_CHECK = 16  # numbers of a block used by the check
PAYLOAD = 512 - _CHECK  # numbers after them
_FEW = 4  # most ranks that send their blocks to each other, as measured
_LONGEST = 1_000_000  # characters of a fingerprint sent through the store as it is; longer ones are shortened:
_PARTS_SHOWN = 300
_PART_LENGTH = 300  # characters
_FIELDS = {"call": str, "parts": dict[str, str], "error": str}


def fingerprint_of(call: str, parts: dict[str, str] | None = None, error: str = "") -> str:
    """Describe this rank's call as text: its name, and by path its values."""
    return json.dumps({"call": call, "parts": parts or {}, "error": error})


def check_fingerprint(fingerprint: str, peers: Peers | None = None) -> None:
    """Check that all ranks have the same fingerprint. Collective.

    Raises:
        MismatchError: If they differ, on every rank, with what differs.
    """
    add_up(fingerprint, (), peers)


def add_up(fingerprint: str, numbers: Sequence[float] | Numbers, peers: Peers | None = None) -> Numbers:
    """Return the sums of the ranks' numbers if all ranks have the same fingerprint. Collective.

    Up to `PAYLOAD` numbers travel with the check, more after it.

    Raises:
        MismatchError: If the fingerprints differ, on every rank, with what differs.
    """
    session = lifecycle.enter_collective()
    if session is None:
        return np.array(numbers, np.float64)
    block = np.zeros(_CHECK + PAYLOAD)
    payload = block[_CHECK : _CHECK + len(numbers)]
    is_inline = len(numbers) <= PAYLOAD
    if is_inline:
        payload[:] = numbers
    everyone = ranks_of(peers)
    block[:_CHECK], expected = _check_numbers(fingerprint, len(everyone))
    check_real()
    if peers is None:
        session.waits = "check", time.monotonic(), math.inf  # it asks nobody
    try:
        with current_job.peer_errors():
            _sum_over_ranks(block, everyone, peers)
    finally:
        session.waits = None
    if block[:_CHECK].tobytes() != expected:
        _raise_mismatch(fingerprint, peers)
    if is_inline:
        return payload
    sums = torch.tensor(numbers, dtype=torch.float64, device=control_device(peers))
    return reduce_in_place(sums, peers=peers).cpu().numpy()


def check_real() -> None:
    """Raise where tensors would not be sent, so that the other ranks would wait."""
    if type(torch.empty(0)) is not Tensor:
        raise TypeError("Collectives cannot run under FakeTensorMode. Call them outside it.")


def reduce_in_place(buffer: Tensor, op: str = "sum", peers: Peers | None = None) -> Tensor:
    """Reduce a tensor in place, on every rank, to its "sum", "min" or "max"; return it. Collective.

    Never AVG: gloo lacks it, or it is wrong or raises, depending on torch's version and the dtype.
    """
    if current_job.has_peers() and buffer.numel():
        with current_job.peer_errors():
            dist.all_reduce(buffer, getattr(dist.ReduceOp, op.upper()), group=group_of(peers))
    return buffer


@contextmanager
def raise_everywhere(call: str, peers: Peers | None = None) -> Iterator[None]:
    """Run local work before a check: if it raises here, the other ranks raise in the check instead of waiting."""
    try:
        yield
    except Exception as error:
        with suppress(MismatchError, NotSetUpError):
            check_fingerprint(fingerprint_of(call, error=describe_error(error)), peers)
        raise


def communication_device(device: torch.device, peers: Peers | None = None) -> torch.device:
    """Choose the device where a tensor travels: its own if the group's backend supports it, else the control device."""
    if not current_job.has_peers() or f"{device.type}:" in dist.get_backend_config(group_of(peers)):
        return device
    return control_device(peers)


def control_device(peers: Peers | None) -> torch.device:
    """Return the device for small control messages: the CPU if the group's backend supports it, like gloo."""
    if peers is not None:
        return control_device_of(dist.get_backend_config(peers.group), current_job.get_device())
    return torch.device("cpu") if current_job.job is None else current_job.job.control


def _sum_over_ranks(block: Numbers, everyone: Sequence[int], peers: Peers | None) -> None:
    """Sum a block over all ranks, in place and in rank order. Collective."""
    group = group_of(peers)
    device = control_device(peers)
    if device.type != "cpu":
        on_device = torch.from_numpy(block).to(device)
        dist.all_reduce(on_device, group=group)
        block[:] = on_device.cpu().numpy()
    elif len(everyone) <= _FEW:
        copies = np.repeat(block[np.newaxis], len(everyone), axis=0)
        received = np.empty_like(copies)
        dist.all_to_all_single(torch.from_numpy(received), torch.from_numpy(copies), group=group)
        _add_rows(received, block)
    else:
        _sum_on_first(block, everyone, group)


def _sum_on_first(block: Numbers, everyone: Sequence[int], group: dist.ProcessGroup | None) -> None:
    """Sum the blocks of all ranks on the first, which returns the sum."""
    first = everyone[0]
    received = np.empty((len(everyone) if ranks.get_rank() == first else 0, len(block)))
    total = torch.from_numpy(block.copy())
    sending = dist.gather(torch.from_numpy(block), list(torch.from_numpy(received)), first, group, async_op=True)
    if len(received):
        sending.wait()
        _add_rows(received, total.numpy())
    dist.broadcast(total, first, group)
    sending.wait()
    block[:] = total.numpy()


def _add_rows(blocks: Numbers, total: Numbers) -> None:
    """Add up blocks one by one: in one call the order would be NumPy's."""
    total[:] = blocks[0]
    with np.errstate(over="ignore", invalid="ignore"):
        for block in blocks[1:]:
            total += block


@lru_cache(maxsize=256)
def _check_numbers(fingerprint: str, world_size: int) -> tuple[Numbers, bytes]:
    """Hash a fingerprint; return the numbers of the check, and their bytes when that many equal ranks are summed."""
    hashed = blake2b(fingerprint.encode(), digest_size=_CHECK).digest()
    numbers = np.frombuffer(hashed, "<u2").astype(np.float64)
    check = np.concatenate([numbers, numbers**2])
    return check, (check * world_size).tobytes()


def _raise_mismatch(fingerprint: str, peers: Peers | None) -> None:
    """Exchange fingerprints between all ranks, and raise with what differs. Collective."""
    texts = lifecycle.exchange(_shortened(fingerprint), subset_of(peers))
    fields = [parse(text, "exchange", _FIELDS) for text in texts]
    raise MismatchError(explain_mismatch(dict(zip(ranks_of(peers), fields, strict=True))))


def _shortened(fingerprint: str) -> str:
    """Shorten a fingerprint too long for the store to what messages show; its hash covers the rest."""
    if len(fingerprint) < _LONGEST:
        return fingerprint
    fields = json.loads(fingerprint)
    parts = fields["parts"]
    shown = {path[:_PART_LENGTH]: text[:_PART_LENGTH] for path, text in islice(parts.items(), _PARTS_SHOWN)}
    shown["all entries"] = f"{len(parts)}, together #{hash_of(fingerprint)}"
    return fingerprint_of(fields["call"][:_PART_LENGTH], shown, fields["error"])
