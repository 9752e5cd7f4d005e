"""Streams: spread over ranks and workers."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from typing import Any

from conftest import on_ranks
from torch.utils.data import get_worker_info

import ddpkit
from ddpkit.data.loader import make_loader


def workers(number: int) -> dict[str, Any]:
    """Options for so many workers; in a spawned rank the default would have each of them import torch again."""
    return {"num_workers": number, "multiprocessing_context": "fork" if number else None}


class Rows:
    """Shards of eight numbers, with random numbers; it does not say how many shards it has."""

    epoch = 0

    def __init__(self, shards: int) -> None:
        self.shards = range(shards)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def shard(self, index: int, num_shards: int) -> Iterator[tuple[int, int, float, bool]]:
        for shard in self.shards[index::num_shards]:
            for row in range(8 - shard % 3):
                yield 10 * shard + row, self.epoch, random.random(), get_worker_info() is None


def read_one_shard(number: int) -> str:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*nothing to read")
        try:
            return f"{len(list(make_loader(Rows(1), 2, **workers(number))))} steps"
        except UserWarning as warning:  # also that of a worker
            return str(warning)


def test_a_rank_or_worker_with_nothing_to_read_says_so() -> None:
    first, second = on_ranks(read_one_shard, 2, 0)
    assert first == "4 steps"
    assert "Rank 1 of 2, worker 0 of 1, has nothing to read: part 1 of the stream's 2 parts is empty" in second
    (found,) = on_ranks(read_one_shard, 1, 2)
    assert "Rank 0 of 1, worker 1 of 2, has nothing to read: part 1 of the stream's 2 parts is empty" in found


def test_a_part_is_read_without_the_number_of_its_worker() -> None:
    for number in (0, 2):
        loader = make_loader(Rows(3), 2, collate_fn=list, **workers(number))
        assert all(alone for batch in loader for *_, alone in batch)
