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
_ROWS_AT_ONCE = 16
_SHIFT = 29  # of a word that is mixed: no multiple of a number's size, so that signs do not meet signs
_NOT_SIGN = (1 << 64 - _SHIFT) - 1  # torch, which has no shift for unsigned words, shifts copies of the highest bit in


def checksum(tensor: Tensor) -> int:
    """Return a checksum of 32 bits of a dense tensor's bytes, row-major.

    It is the CRC-32 of the bytes; on a GPU of a sum for each whole MiB, and of the bytes that are left. Other bytes
    have the same once in four billion times; nobody cheats here.
    """
    data = flat_bytes(tensor)
    found = 0
    whole = len(data) - len(data) % _ROW
    if data.device.type == "cuda" and whole:
        found = zlib.crc32(_sum_rows(data[:whole]).cpu().numpy().data)
        data = data[whole:]
    return zlib.crc32(data.cpu().numpy().data, found)


def _sum_rows(data: Tensor) -> Tensor:
    """Add up the words of each row, modulo 2^64, each times the key of its place.

    Before that a word's upper bits are mixed into the lower ones: signs that change would else cancel at the very top.
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
    """Return an odd number for each word of a row: one bit that changes then changes the sum."""
    numbers = np.random.PCG64(0).random_raw(_WORDS) | np.uint64(1)
    return torch.from_numpy(numbers.view(np.int64)).to(device)


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
