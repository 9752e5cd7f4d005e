"""Describe any value in a short text, by which ranks compare what they hold. Nothing here talks to other ranks."""

from __future__ import annotations

import hashlib
import io
import zlib
from collections import deque
from collections.abc import Mapping, Set
from enum import Enum
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .tensor_checksum import checksum
from .tensors import is_dense, local_part, name_dtype

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
    hashed = hashlib.sha256(text.encode()).hexdigest()
    return f"{type(value).__name__} #{hashed[:16]}"


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
