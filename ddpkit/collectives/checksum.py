"""The checksum of a tensor's bytes, computed where they are: of those on a GPU only sums travel to the CPU."""

from __future__ import annotations

import zlib
from functools import cache

import numpy as np
import torch
from torch import Tensor

_WORDS = 1 << 17  # of 8 bytes, in a row: a MiB
_SHIFT = 29  # of a word that is mixed: no multiple of a number's size, so that signs do not meet signs
_NOT_SIGN = (1 << 64 - _SHIFT) - 1  # torch shifts copies of the highest bit in
_ROWS_AT_ONCE = 16  # on an accelerator; on the CPU it is one, which stays in its cache


def checksum(data: Tensor) -> int:
    """Return a checksum of 32 bits, the same on every device: nobody cheats here.

    It is the CRC-32 of a sum for each whole MiB, and of the bytes that are left.

    Args:
        data: Bytes, contiguous: `uint8[n]`.
    """
    whole = len(data) - len(data) % (8 * _WORDS)
    found = zlib.crc32(_sum_rows(data[:whole]).numpy().data) if whole else 0
    return zlib.crc32(data[whole:].cpu().numpy().data, found)


def _sum_rows(data: Tensor) -> Tensor:
    """Add up the words of each row, modulo 2^64, each times the key of its place.

    Before that a word's upper bits are mixed into the lower ones: signs that change would else cancel at the very top.
    """
    if data.storage_offset() % 8:
        data = data.clone()  # words must begin at a multiple of their size
    rows = data.view(torch.int64).view(-1, _WORDS)
    keys = _keys(data.device)
    at_once = 1 if data.device.type == "cpu" else _ROWS_AT_ONCE
    room = torch.empty_like(rows[:at_once])
    sums = torch.empty_like(rows[:, 0])
    for some, their_sums in zip(torch.split(rows, at_once), torch.split(sums, at_once), strict=True):
        mixed = torch.bitwise_right_shift(some, _SHIFT, out=room[: len(some)])
        mixed &= _NOT_SIGN
        mixed ^= some
        mixed *= keys
        torch.sum(mixed, dim=1, out=their_sums)
    return sums.cpu()


@cache
def _keys(device: torch.device) -> Tensor:
    """Return an odd number for each word of a row: one bit that changes then changes the sum."""
    numbers = np.random.PCG64(0).random_raw(_WORDS) | np.uint64(1)
    return torch.from_numpy(numbers.view(np.int64)).to(device)
