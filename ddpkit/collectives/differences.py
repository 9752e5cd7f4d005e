"""Describe values in short texts, and how those of the ranks differ. Nothing here communicates."""

from __future__ import annotations

import hashlib
import io
import zlib
from collections import deque
from collections.abc import Iterable, Mapping, Sequence, Set
from enum import Enum
from functools import cache
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..torch_internals import is_sharded
from .tree import flat_bytes, is_dense, local_part, name_dtype

_LINES = 10  # of a message
_RANKS = 8  # that a message names


def explain_mismatch(everyone: Mapping[int, dict[str, Any]]) -> str:
    """Explain why ranks failed the check, from the fields of their fingerprints, by rank."""
    call = next(iter(everyone.values()))["call"]
    failed = [f"rank {rank}: {each['error']}" for rank, each in everyone.items() if each["error"]]
    if failed:
        return list_lines(f"{call} got a bad argument:", failed)
    calls = {rank: each["call"] for rank, each in everyone.items()}
    parts = {rank: each["parts"] for rank, each in everyone.items()}
    if len(set(calls.values())) > 1:
        return (
            f"The ranks are in different collectives: {_list_by_text(calls)}. "
            "Every rank must make the same calls in the same order."
        )
    difference = explain_difference(call, parts)
    if difference:
        return difference
    disorder = explain_disorder(parts)
    if disorder:
        return f"{call} needs the same order on every rank, but {disorder}"
    return (
        f"{call} was called alike on every rank, but the ranks' checks differ: a message was corrupted, or matched "
        "with one of another collective."
    )


def explain_difference(call: str, parts: dict[int, dict[str, str]]) -> str:
    """Describe the parts, given by rank and path, in which these ranks differ; "" if none."""
    differing = differing_parts(parts)
    if not differing:
        return ""
    lines = [f"{path}: {values}" for path, values in differing.items()]
    headline = f"{call} needs the same structure, dtypes and shapes on every rank, but found:"
    return list_lines(headline, lines)


def differing_parts(parts: Mapping[int, Mapping[str, str]]) -> dict[str, str]:
    """Describe the parts, given by rank and path, in which these ranks differ: by path, each value with its ranks.

    A missing part counts as "missing".
    """
    paths = dict.fromkeys(path for each in parts.values() for path in each)
    found = {}
    for path in paths:
        texts = {rank: each.get(path, "missing") for rank, each in parts.items()}
        if len(set(texts.values())) > 1:
            found[path] = _list_by_text(texts)
    return found


def explain_disorder(names: Mapping[int, Iterable[str]]) -> str:
    """Describe where the order of the ranks' names, by rank, first differs, and the remedy; "" if nowhere."""
    for position, row in enumerate(zip(*names.values(), strict=False)):
        if len(set(row)) > 1:
            return (
                f"entry {position} is {_list_by_text(dict(zip(names, row, strict=True)))}. "
                "Sets and directory listings have another order in each process: sort them before you use their order."
            )
    return ""


def name_ranks(ranks: list[int]) -> str:
    """Name ranks as in a sentence, at most the first eight."""
    names = ", ".join(map(str, ranks[:_RANKS]))
    if len(ranks) == 1:
        return f"rank {names}"
    if len(ranks) > _RANKS:
        names += ", …"
    return f"ranks {names}"


def _list_by_text(texts: dict[int, str]) -> str:
    """List each text with the ranks that have it."""
    holders: dict[str, list[int]] = {}
    for rank, text in texts.items():
        holders.setdefault(text, []).append(rank)
    return "; ".join(f"{text} on {name_ranks(ranks)}" for text, ranks in holders.items())


def list_lines(headline: str, lines: Sequence[str], most: int = _LINES) -> str:
    """Write lines below a headline, the first of many."""
    return "\n  ".join([headline, *first_of(lines, most)])


def first_of(texts: Sequence[str], most: int) -> list[str]:
    """Keep the first texts, and append how many more there are.

    >>> first_of(["a", "b", "c"], most=2)
    ['a', 'b', 'and 1 more']
    """
    if len(texts) <= most:
        return list(texts)
    return [*texts[:most], f"and {len(texts) - most} more"]


# Sharded tensors: each rank holds only a part.

_TENSORS_NAMED = 3  # tensors that a message names


def explain_sharded(call: str, tensors: Iterable[tuple[str, Any]]) -> str:
    """Explain why `call` rejects these named tensors; "" if none is sharded."""
    sharded = [name for name, tensor in tensors if is_sharded(tensor)]
    if not sharded:
        return ""
    names = ", ".join(first_of(sharded, _TENSORS_NAMED))
    return (
        f"{call} does not handle sharded tensors (fully_shard, FSDP, tensor parallelism), but these are: "
        f"{names}. Each rank holds only its own part. Use torch.distributed.checkpoint and torch's own functions for "
        "them, or pass tensor.full_tensor()."
    )


# Checksums of tensors. A large tensor on a GPU is summed there, and only the sums are copied.

_WORDS = 1 << 17  # of 8 bytes, in a row
_ROW = 8 * _WORDS  # bytes: a MiB
_ROWS_AT_ONCE = 16
_SHIFT = 29  # mixed into each word: not a multiple of a number's size, so that signs do not meet signs
_NOT_SIGN = (1 << 64 - _SHIFT) - 1  # torch cannot shift unsigned words, and shifts copies of the highest bit in


def checksum(tensor: Tensor) -> int:
    """Return a 32-bit checksum of a dense tensor's bytes, row-major.

    It is the CRC-32 of the bytes; on a GPU, of a sum for each whole MiB and of the remaining bytes. Different bytes
    collide once in four billion times; it does not resist forgery.
    """
    data = flat_bytes(tensor)
    found = 0
    whole = len(data) - len(data) % _ROW
    if data.device.type == "cuda" and whole:
        found = zlib.crc32(_sum_rows(data[:whole]).cpu().numpy().data)
        data = data[whole:]
    return zlib.crc32(data.cpu().numpy().data, found)


def _sum_rows(data: Tensor) -> Tensor:
    """Add up the words of each row, modulo 2^64, each multiplied by a key for its place.

    First the upper bits of each word are mixed into its lower bits: otherwise changed signs would cancel at the top.
    """
    if (data.storage_offset() | data.data_ptr()) % 8:
        data = data.clone()
    keys = _keys_on(data.device)
    sums = []
    for rows in torch.split(data.view(torch.int64).view(-1, _WORDS), _ROWS_AT_ONCE):
        mixed = torch.bitwise_right_shift(rows, _SHIFT)
        mixed &= _NOT_SIGN
        mixed ^= rows
        mixed *= keys
        sums.append(mixed.sum(1))
    return torch.cat(sums)


@cache
def _keys_on(device: torch.device) -> Tensor:
    """Return an odd number for each word of a row, so that one changed bit changes the sum."""
    numbers = np.random.PCG64(0).random_raw(_WORDS) | np.uint64(1)
    return torch.from_numpy(numbers.view(np.int64)).to(device)


_SHOWN_AS_TEXT = 100  # longest string shown in full, in characters
_PLAIN = (Number, str, bytes, bytearray, Enum, torch.dtype, torch.device, type(None))


def digest(value: Any) -> str:
    """Describe a value in a short text: equal for equal values, and almost surely different if one bit differs.

    Tensors and arrays are shown by dtype, shape and checksum (of a DTensor, that of this rank's part), containers by
    their elements, without distinguishing kinds of sequences, other objects by their class only, because their text may
    contain an address.
    """
    text = _describe(value)
    if len(text) <= _SHOWN_AS_TEXT:
        return text
    return f"{type(value).__name__} #{hash_of(text)}"


def hash_of(text: str) -> str:
    """Return 16 hexadecimal digits, almost surely different for different texts."""
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return _describe_tensor(value)
    if isinstance(value, np.ndarray):
        return _describe_array(value)
    if isinstance(value, np.generic):
        return f"{value.dtype} {value.item()!r}"
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, Mapping):
        pairs = sorted(f"{_describe(key)}: {_describe(child)}" for key, child in value.items())
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, Set):
        return "{" + ", ".join(sorted(map(_describe, value))) + "}"
    if isinstance(value, list | tuple | deque):
        return "[" + ", ".join(map(_describe, value)) + "]"
    return type(value).__qualname__


def _describe_tensor(tensor: Tensor) -> str:
    if tensor.is_meta:
        return f"{name_dtype(tensor.dtype)}{list(tensor.shape)} on the meta device"
    plain = local_part(tensor.detach())
    if is_dense(plain):
        found = checksum(plain)
    else:
        buffer = io.BytesIO()
        torch.save(plain.cpu(), buffer)
        found = zlib.crc32(buffer.getbuffer())
    shape = "[nested]" if tensor.is_nested else list(tensor.shape)
    return f"{name_dtype(tensor.dtype)}{shape} #{found:08x}"


def _describe_array(array: np.ndarray[Any, Any]) -> str:
    if array.dtype.hasobject:
        data = repr(list(map(digest, array.flat))).encode()
    else:
        data = array.tobytes()
    return f"{array.dtype}{list(array.shape)} array #{zlib.crc32(data):08x}"
