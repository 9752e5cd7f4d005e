"""Streams: spread over ranks and workers, and resumed."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import on_ranks
from torch.utils.data import IterableDataset, get_worker_info

import ddpkit
from ddpkit.data.loader import make_loader

WORLDS = (1, 2, 3)


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
    assert "Rank 1 of 2, worker 0 of 1, has nothing to read: part 1 of 2 parts of the stream is empty" in second
    (found,) = on_ranks(read_one_shard, 1, 2)
    assert "Rank 0 of 1, worker 1 of 2, has nothing to read: part 1 of 2 parts of the stream is empty" in found


def test_a_part_is_read_without_the_number_of_its_worker() -> None:
    for number in (0, 2):
        loader = make_loader(Rows(3), 2, collate_fn=list, **workers(number))
        assert all(alone for batch in loader for *_, alone in batch)


class SeededByItsWorker(IterableDataset[int]):
    """Nothing to divide: it has no `shard`, and one reader."""

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        assert worker is not None
        yield worker.id


def test_a_stream_of_one_reader_knows_its_worker() -> None:
    assert [batch.tolist() for batch in make_loader(SeededByItsWorker(), 2, **workers(1))] == [[0]]


def test_random_numbers_of_workers_go_on_where_a_stream_does_and_those_of_the_process_are_left_alone() -> None:
    whole, begun, resumed = (make_loader(Rows(6), 4, collate_fn=list, **workers(2)) for _ in range(3))
    batches = iter(begun)
    before = [next(batches) for _ in range(3)]
    resumed.load_state_dict(begun.state_dict())
    assert before + list(resumed) == list(whole)
    loader = make_loader(Rows(6), 4, collate_fn=list)
    loader.load_state_dict(loader.state_dict() | {"batches": 3})
    random.seed(5)
    first = next(iter(loader))
    random.seed(5)
    assert [row[2] for row in first] == [random.random() for _ in range(4)]


def states_and_loaders(number: int) -> Any:
    loader = make_loader(Rows(12), 2, collate_fn=list, **workers(number))
    batches = iter(loader)
    states = []
    while not ddpkit.stop_together(next(batches, None) is None):
        states.append(loader.state_dict())
    loader.set_epoch(1)
    return states, loader.state_dict()


def test_a_state_of_a_stream_is_for_as_many_ranks_and_workers_inside_an_epoch_alone() -> None:
    (states, end), (others, same_end) = on_ranks(states_and_loaders, 2, 1)
    assert states == others and [state["batches"] for state in states] == list(range(1, len(states) + 1))
    assert end == same_end and (end["epoch"], end["batches"]) == (1, 0)
    alone = make_loader(Rows(12), 2, num_workers=1)
    with pytest.raises(ValueError, match="num_replicas was 2 when the state was saved and is 1 now"):
        alone.load_state_dict(states[0])
    with pytest.raises(ValueError, match="the state has epoch 1 with -1 batches done"):
        alone.load_state_dict({"epoch": 1, "batches": -1})
    assert alone.state_dict()["epoch"] == 0
    alone.load_state_dict(end)
    assert (alone.epoch, alone.state_dict()["batches"]) == (1, 0)


def save_and_load(folder: str) -> list[Any]:
    loader = make_loader(Rows(12), 2, collate_fn=list)
    net = torch.nn.Linear(1, 1)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    checkpointer = ddpkit.Checkpointer(folder)
    checkpointer.save(3, net=net, loader=loader)
    resumed = make_loader(Rows(12), 2, collate_fn=list)
    checkpointer.load_latest(net=net, loader=resumed)
    return [[row[0] for row in batch] for batch in (next(iter(resumed)), next(batches))]


@pytest.mark.parametrize("w", WORLDS)
def test_a_checkpoint_keeps_the_place_in_a_stream(w: int, tmp_path: Path) -> None:
    for resumed, went_on in on_ranks(save_and_load, w, str(tmp_path)):
        assert resumed == went_on


class Ends(Rows):
    """A stream in which a call of the script raises StopIteration, as `next()` of an empty iterator does."""

    def __init__(self, place: str) -> None:
        super().__init__(6)
        self.place = place

    def shard(self, index: int, num_shards: int) -> Any:
        return next(iter([])) if self.place == "shard" else super().shard(index, num_shards)

    def collate(self, rows: list[Any]) -> Any:
        return next(iter([])) if self.place == "collate_fn" else rows


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("number", [0, 2])
@pytest.mark.parametrize("place", ["shard", "collate_fn"])
def test_a_scripts_stop_iteration_does_not_end_a_stream(place: str, number: int) -> None:
    stream = Ends(place)
    loader = make_loader(stream, 2, collate_fn=stream.collate, **workers(number))
    with pytest.raises(RuntimeError, match=rf"{place}.* raised StopIteration"):
        list(loader)
    assert loader.epoch == 0


class Eight(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


def stop(worker: int) -> None:
    next(iter([]))


@pytest.mark.ranks(1)
def test_a_stop_iteration_in_worker_init_fn_does_not_end_a_stream() -> None:
    loader = make_loader(Eight(), 2, worker_init_fn=stop, **workers(1))
    with pytest.raises(RuntimeError, match="raised StopIteration"):
        list(loader)


class Parts(Rows):
    def shard(self, rank: int, world_size: int) -> Any:  # type: ignore[override]
        return super().shard(rank, world_size)


@pytest.mark.ranks(1, 2, 3)
def test_a_shard_with_other_parameters_is_refused_at_once() -> None:
    with pytest.raises(TypeError, match=r"Parts has shard\(rank: .*Name its parameters index and num_shards"):
        make_loader(Parts(6), 2, num_workers=1)
