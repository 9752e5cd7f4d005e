"""Micro-batches on any number of ranks, against those of one."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from conftest import on_ranks
from hypothesis import given
from hypothesis import strategies as st

import ddpkit
from ddpkit import make_micro_batch_loader
from ddpkit.exact import loader as micro_batches

NOISY = 22  # samples


class Noisy:
    """Each sample comes with the draws that a random augmentation would take."""

    def __len__(self) -> int:
        return NOISY

    def __getitem__(self, index: int) -> tuple[float, ...]:
        return index, random.random(), float(np.random.rand()), float(torch.rand(()))


class Broken(Noisy):
    """One sample cannot be read."""

    def __getitem__(self, index: int) -> tuple[float, ...]:
        if index == 5:
            raise OSError("broken image")
        return super().__getitem__(index)


def steps_of(loader: Any) -> list[dict[int, Any]]:
    """What each step of a pass holds, by the seed of the micro-batch."""
    found = []
    for batch in loader:
        contents = [torch.stack([column.double() for column in part]).tolist() for part in batch]
        found.append(dict(zip(batch.seeds, contents, strict=True)))
    return found


def of_ranks(size: int, **options: Any) -> list[dict[int, Any]]:
    """What the ranks have at each step, together."""
    found: list[dict[int, Any]] = []
    for rank in range(size):
        loader = make_micro_batch_loader(Noisy(), 8, 2, num_replicas=size, rank=rank, **options)
        steps = steps_of(loader)
        assert len(loader) == len(steps) == 3
        found = found or [{} for _ in steps]
        for all_ranks, own in zip(found, steps, strict=True):
            assert not all_ranks.keys() & own.keys()
            all_ranks.update(own)
    return found


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_any_number_of_ranks_has_the_micro_batches_of_one(size: int, workers: int) -> None:
    options = {"num_workers": workers, "multiprocessing_context": "fork" if workers else None}
    alone = of_ranks(1, **options)
    assert [len(step) for step in alone] == [4, 4, 3]
    assert of_ranks(size, **options) == alone
    indices = [index for step in alone for part in step.values() for index in part[0]]
    assert sorted(indices) == list(range(NOISY))
    for kind in (1, 2, 3):
        draws = [draw for step in alone for part in step.values() for draw in part[kind]]
        assert len(set(draws)) == NOISY


@given(
    n=st.integers(1, 40),
    micro_batch_size=st.integers(1, 5),
    count=st.integers(1, 5),
    size=st.integers(1, 7),
    drop_last=st.booleans(),
)
def test_micro_batches_cover_the_global_order_once(
    n: int, micro_batch_size: int, count: int, size: int, drop_last: bool
) -> None:
    global_batch_size = micro_batch_size * count
    if drop_last and n < global_batch_size:
        return
    found: dict[int, list[list[int]]] = {}
    for rank in range(size):
        loader = make_micro_batch_loader(
            range(n),
            global_batch_size,
            micro_batch_size,
            shuffle=False,
            drop_last=drop_last,
            num_replicas=size,
            rank=rank,
        )
        taken = 0
        for step, batch in enumerate(loader):
            found.setdefault(step, []).extend(part.tolist() for part in batch)
            taken += sum(map(len, batch))
            assert batch.global_batch_size == min(global_batch_size, n - step * global_batch_size)
        assert taken == loader.sampler.num_samples
        assert len(loader.sampler) == taken
        assert loader.epoch == 1
    end = n - n % global_batch_size if drop_last else n
    expected = [list(range(end))[start : start + micro_batch_size] for start in range(0, end, micro_batch_size)]
    in_order = [part for step in sorted(found) for part in sorted(found[step])]
    assert in_order == expected


def test_each_epoch_has_seeds_of_its_own_which_are_not_those_of_another_seed() -> None:
    seeds: list[int] = []
    for seed in (0, 1):
        loader = make_micro_batch_loader(range(8), 4, 2, seed=seed)
        for _ in range(2):
            seeds += [number for batch in loader for number in batch.seeds]
    assert len(set(seeds)) == 16


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_run_goes_on_in_the_middle_of_an_epoch_on_another_number_of_ranks(size: int) -> None:
    alone = of_ranks(1)
    before = make_micro_batch_loader(Noisy(), 8, 2)
    for _ in before:
        state = before.state_dict()
        break
    rest: list[dict[int, Any]] = [{}, {}]
    for rank in range(size):
        after = make_micro_batch_loader(Noisy(), 8, 2, num_replicas=size, rank=rank)
        after.load_state_dict(state)
        assert len(after) == 2
        for all_ranks, own in zip(rest, steps_of(after), strict=True):
            all_ranks.update(own)
    assert rest == alone[1:]


def test_a_state_of_other_micro_batches_or_kernels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    state = make_micro_batch_loader(Noisy(), 8, 2).state_dict()
    with pytest.raises(ValueError, match="micro_batch_size was 2 when the state was saved and is 4 now"):
        make_micro_batch_loader(Noisy(), 8, 4).load_state_dict(state)
    with pytest.raises(ValueError, match="global_batch_size was None"):
        plain = ddpkit.make_loader(Noisy(), 8).state_dict()
        make_micro_batch_loader(Noisy(), 8, 4).load_state_dict(plain)
    with pytest.raises(TypeError, match="A sampler's state is a dict"):
        make_micro_batch_loader(Noisy(), 8, 4).load_state_dict([])
    monkeypatch.setattr(micro_batches, "describe_kernels", lambda device: "another CPU")
    loader = make_micro_batch_loader(Noisy(), 8, 2)
    with pytest.raises(ValueError, match="was saved with torch .* threads?, but this process has another CPU"):
        loader.load_state_dict(state)
    del state["kernels"]  # as the message says
    loader.load_state_dict(state)


def test_the_generators_of_this_process_are_left_alone() -> None:
    ddpkit.seed_everything(3)
    expected = random.random(), float(np.random.rand()), float(torch.rand(()))
    ddpkit.seed_everything(3)
    loader = make_micro_batch_loader(Noisy(), 8, 2)
    loader.peek()
    next(iter(loader))
    assert (random.random(), float(np.random.rand()), float(torch.rand(()))) == expected


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_that_cannot_be_read_costs_its_step_and_the_next_is_whole(workers: int) -> None:
    options = {"num_workers": workers, "multiprocessing_context": "fork" if workers else None, "shuffle": False}
    batches = iter(make_micro_batch_loader(Broken(), 8, 2, **options))
    with pytest.raises(OSError, match="broken image"):
        next(batches)
    assert [part[0].tolist() for part in next(batches)] == [[8, 9], [10, 11], [12, 13], [14, 15]]
    assert [len(batch) for batch in batches] == [3]


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"global_batch_size": 10, "micro_batch_size": 4}, ValueError, "is 2, remainder 2"),
        ({"global_batch_size": 2, "micro_batch_size": 4}, ValueError, "1 to 16,384 equal micro-batches"),
        ({"global_batch_size": 16_385, "micro_batch_size": 1}, ValueError, "1 to 16,384 equal micro-batches"),
        ({"global_batch_size": 8, "micro_batch_size": 0}, ValueError, "micro_batch_size must be a positive integer"),
        ({"global_batch_size": 24, "micro_batch_size": 4, "drop_last": True}, ValueError, "take 24 per step"),
        ({"global_batch_size": 8, "micro_batch_size": 4, "batch_sampler": []}, TypeError, "takes no batch_sampler"),
        ({"dataset": iter([]), "global_batch_size": 8, "micro_batch_size": 4}, TypeError, "dataset with a length"),
    ],
)
def test_what_cannot_be_cut_is_refused(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        make_micro_batch_loader(**{"dataset": Noisy(), **options})
    assert text in str(caught.value)


def load_here() -> int:
    return sum(len(batch) for batch in make_micro_batch_loader(Noisy(), 8, 2))


def test_ranks_take_their_own_places_by_themselves() -> None:
    assert on_ranks(load_here, 3) == [5, 3, 3]
