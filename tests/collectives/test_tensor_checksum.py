"""The checksum of a tensor's bytes: another if one bit is, also where a GPU adds up its words."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
import torch

from ddpkit.collectives.differences import _sum_rows, checksum
from ddpkit.collectives.tree import flat_bytes

ROW = 1 << 20  # bytes that are added up


def summed(tensor: torch.Tensor) -> bytes:
    """What a GPU adds up."""
    return _sum_rows(flat_bytes(tensor)).numpy().tobytes()


def random_bytes(length: int) -> torch.Tensor:
    return torch.randint(0, 256, (length,), dtype=torch.uint8, generator=torch.Generator().manual_seed(length))


@pytest.mark.parametrize("length", [0, 1, 1000, ROW + 1])
def test_on_the_cpu_it_is_the_crc(length: int) -> None:
    data = random_bytes(length)
    assert checksum(data) == zlib.crc32(data.numpy().data)


@pytest.mark.parametrize("length", [ROW, 3 * ROW])
def test_one_bit_makes_another(length: int) -> None:
    data = random_bytes(length)
    found = {summed(data)}
    places = [0, 7, 8, ROW // 2, ROW - 1, length - 1, *np.random.default_rng(0).integers(length, size=20).tolist()]
    for place in set(places):
        for bit in range(8):
            data[place] ^= 1 << bit
            found.add(summed(data))
            data[place] ^= 1 << bit
    assert len(found) == 1 + 8 * len(set(places))


def test_what_is_elsewhere_makes_another() -> None:
    rows = random_bytes(3 * ROW).view(3, ROW)
    words = rows.view(torch.int64)
    changed = [rows.flip(0), rows.roll(8, 1), rows.roll(1, 1), words.flip(1)]
    found = {summed(other.reshape(-1)) for other in (rows, *changed)}
    assert len(found) == 5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8])
def test_signs_that_change_make_another(dtype: torch.dtype) -> None:
    numbers = torch.linspace(1, 100, ROW // dtype.itemsize).to(dtype)
    halves = numbers.clone()
    halves[::2] *= -1
    found = {summed(other) for other in (numbers, -numbers, halves, -halves)}
    for first in range(0, 40, 4):
        for second in range(first + 4, 44, 4):
            other = numbers.clone()
            other[[first, second]] *= -1
            found.add(summed(other))
    assert len(found) == 4 + 55


@pytest.mark.parametrize("value", [1.0, -0.0, float("inf")])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_each_place_of_a_value_among_zeros_makes_another(dtype: torch.dtype, value: float) -> None:
    numbers = torch.zeros(ROW // dtype.itemsize, dtype=dtype)
    found = set()
    for place in range(0, len(numbers), 997):
        numbers[place] = value
        found.add(summed(numbers))
        numbers[place] = 0
    assert len(found) == len(range(0, len(numbers), 997))


def test_whole_numbers_and_their_complements_have_different_ones() -> None:
    numbers = torch.arange(ROW // 8)
    assert len({summed(other) for other in (numbers, ~numbers, -numbers, numbers + 1)}) == 4


@pytest.mark.parametrize("offset", range(9))
def test_bytes_may_begin_anywhere(offset: int) -> None:
    data = random_bytes(2 * ROW + 8)[offset : 2 * ROW + offset]
    assert summed(data) == summed(data.clone())


@pytest.mark.parametrize("rows", [1, 2, 16, 17, 40])
def test_sums_are_those_of_numpy(rows: int) -> None:
    data = random_bytes(rows * ROW)
    words = data.numpy().view(np.uint64).reshape(rows, -1)
    keys = np.random.PCG64(0).random_raw(ROW // 8) | np.uint64(1)
    assert summed(data) == ((words >> np.uint64(29) ^ words) * keys).sum(1).tobytes()


def test_it_is_the_same_in_every_version_of_torch_and_numpy() -> None:
    assert f"{zlib.crc32(summed(-3 * torch.arange(ROW // 4))):08x}" == "3a80dcac"


def test_a_default_device_and_the_threads_do_not_change_it() -> None:
    data = random_bytes(3 * ROW)
    expected, threads = summed(data), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with torch.device("meta"), torch.inference_mode():
            assert summed(data) == expected
    finally:
        torch.set_num_threads(threads)
