"""Describe any value in a short text, by which ranks compare what they hold. Nothing here talks to other ranks."""

from __future__ import annotations

import hashlib
import io
import zlib
from collections import deque
from collections.abc import Mapping, Set
from enum import Enum
from functools import cache
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .tree import flat_bytes, is_dense, local_part, name_dtype

# A tensor's checksum: the bytes of a large one on a GPU are summed there, and only the sums are copied.

_WORDS = 1 << 17  # of 8 bytes, in a row
_ROW = 8 * _WORDS  # bytes: a MiB
_SHIFT = 29  # of a word that is mixed: no multiple of a number's size, so that signs do not meet signs
_NOT_SIGN = (1 << 64 - _SHIFT) - 1  # torch, which has no shift for unsigned words, shifts copies of the highest bit in
_ROWS_AT_ONCE = 16  # on a GPU


def checksum(tensor: Tensor) -> int:
    """Return a checksum of 32 bits of a dense tensor's bytes, row-major: the same on every device.

    It is the CRC-32 of a sum for each whole MiB, and of the bytes that are left. Other bytes have the same once in four
    billion times; nobody cheats here.
    """
    if not _can_be_summed_there(tensor):
        tensor = tensor.cpu()
    data = flat_bytes(tensor)
    whole = len(data) - len(data) % _ROW
    if not whole:
        return zlib.crc32(data.cpu().numpy().data)
    if data.device.type == "cpu":
        sums = _sum_rows(data.numpy()[:whole])
    else:
        sums = _sum_rows_there(data[:whole]).cpu().numpy()
    return zlib.crc32(data[whole:].cpu().numpy().data, zlib.crc32(sums.data))


def _can_be_summed_there(tensor: Tensor) -> bool:
    """Return whether a tensor is on a GPU, and so placed that it need not be copied there first."""
    if tensor.device.type != "cuda" or tensor.is_conj() or tensor.is_neg() or not tensor.is_contiguous():
        return False
    return not (tensor.storage_offset() * tensor.itemsize | tensor.data_ptr()) % 8


def _sum_rows(data: np.ndarray[Any, np.dtype[np.uint8]]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Add up the words of each row, modulo 2^64, each times the key of its place.

    Before that a word's upper bits are mixed into the lower ones: signs that change would else cancel at the very top.
    With torch it would need threads, and be slow where the ranks' threads are more than the cores.
    """
    rows = data.view(np.uint64).reshape(-1, _WORDS)
    keys = _keys()
    mixed = np.empty(_WORDS, np.uint64)
    sums = np.empty(len(rows), np.uint64)
    for i, row in enumerate(rows):
        np.right_shift(row, np.uint64(_SHIFT), out=mixed)
        np.bitwise_xor(mixed, row, out=mixed)
        np.multiply(mixed, keys, out=mixed)
        sums[i] = np.add.reduce(mixed)
    return sums


def _sum_rows_there(data: Tensor) -> Tensor:
    """Do the same with torch, where the bytes are."""
    rows = data.view(torch.int64).view(-1, _WORDS)
    keys = _keys_on(data.device)
    room = torch.empty_like(rows[:_ROWS_AT_ONCE])
    sums = torch.empty_like(rows[:, 0])
    for some, their_sums in zip(torch.split(rows, _ROWS_AT_ONCE), torch.split(sums, _ROWS_AT_ONCE), strict=True):
        mixed = torch.bitwise_right_shift(some, _SHIFT, out=room[: len(some)])
        mixed &= _NOT_SIGN
        mixed ^= some
        mixed *= keys
        torch.sum(mixed, dim=1, out=their_sums)
    return sums


@cache
def _keys() -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Return an odd number for each word of a row: one bit that changes then changes the sum."""
    numbers: np.ndarray[Any, np.dtype[np.uint64]] = np.random.PCG64(0).random_raw(_WORDS)
    numbers |= np.uint64(1)
    return numbers


@cache
def _keys_on(device: torch.device) -> Tensor:
    return torch.from_numpy(_keys().view(np.int64)).to(device)


_SHOWN_AS_TEXT = 100  # characters that are shown as they are
_PLAIN = (Number, str, bytes, bytearray, Enum, torch.dtype, torch.device, type(None))


def digest(value: Any) -> str:
    """Describe a value in a short text: equal for equal values, and as good as surely another if one bit is.

    Tensors and arrays are shown by dtype, shape and checksum (of a DTensor, that of this rank's part), containers by
    their elements, sequences all alike. Of other objects only the class is known, for their own text may hold an
    address.
    """
    text = _describe(value)
    if len(text) <= _SHOWN_AS_TEXT:
        return text
    return f"{type(value).__name__} #{hash_of(text)}"


def hash_of(text: str) -> str:
    """Return 16 hexadecimal digits: other ones, as good as surely, for another text."""
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
