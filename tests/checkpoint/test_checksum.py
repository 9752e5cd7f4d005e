"""The checksum of a file: the same however its bytes come, another if one of them is."""

from __future__ import annotations

import hashlib
import random
import zlib

from ddpkit.checkpoint.files import LENGTH, Checksum

MIB = 1 << 20


def summed(*pieces: bytes) -> str:
    checksum = Checksum()
    for piece in pieces:
        checksum.update(piece)
    return checksum.text()


def test_it_is_the_digest_of_the_sums_of_each_mib() -> None:
    for size in (0, 1, MIB - 1, MIB, MIB + 1, 3 * MIB, 3 * MIB + 17):
        data = random.Random(size).randbytes(size)
        sums = [zlib.crc32(data[start : start + MIB]).to_bytes(4, "little") for start in range(0, size, MIB)]
        expected = hashlib.sha256(b"".join(sums)).hexdigest()
        assert summed(data) == expected and len(expected) == LENGTH


def test_it_does_not_matter_how_the_bytes_are_cut() -> None:
    rng = random.Random(0)
    data = rng.randbytes(3 * MIB + 5)
    for _ in range(10):
        cuts = sorted(rng.randrange(len(data)) for _ in range(rng.randrange(8)))
        pieces = [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]
        assert summed(*pieces) == summed(data)


def test_one_bit_or_two_blocks_in_another_order_change_it() -> None:
    data = random.Random(0).randbytes(2 * MIB + 5)
    flipped = bytearray(data)
    flipped[MIB + 3] ^= 4
    assert summed(bytes(flipped)) != summed(data)
    assert summed(data[MIB : 2 * MIB], data[:MIB], data[2 * MIB :]) != summed(data)
    assert summed(data + b"\0") != summed(data)
