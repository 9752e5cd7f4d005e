"""A loop that multiplies its mean loss by `loader.weight` trains what one process does, for every number of samples."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from conftest import on_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset

import ddpkit
from ddpkit.data.samplers import DistributedSampler


def steps_of(n: int, ranks: int, start: int = 0, **options: Any) -> list[list[tuple[float, list[int]]]]:
    """Return for each optimizer step the weight and the samples of each rank's batches, from a position on."""
    accumulation = options.get("accumulation", 1)
    passes = []
    for rank in range(ranks):
        loader = ddpkit.make_loader(range(n), num_replicas=ranks, rank=rank, collate_fn=list, **options)
        loader.load_state_dict({**loader.state_dict(), "consumed": start})
        expected = len(loader)
        passes.append([(loader.weight, batch) for batch in loader])
        assert len(passes[-1]) == expected
    assert len({len(batches) for batches in passes}) == 1, "ranks have different numbers of batches"
    steps: dict[int, list[tuple[float, list[int]]]] = {}
    for batches in passes:
        for number, batch in enumerate(batches):
            steps.setdefault(number // accumulation, []).append(batch)
    return list(steps.values())


def coefficients(step: list[tuple[float, list[int]]], n: int, ranks: int) -> np.ndarray:
    """Return how much each sample counts in the gradient of a step, averaged over ranks."""
    found = np.zeros(n)
    for weight, batch in step:
        np.add.at(found, batch, weight / len(batch) / ranks)
    return found


def check_steps(n: int, ranks: int, size: int, start: int, drop_last: bool, **options: Any) -> None:
    """Check that each sample of a step counts the same, and no other, as in one process with its whole batch."""
    order = list(DistributedSampler(range(n), 1, 0))[start:]
    if drop_last:
        order = order[: len(order) // size * size]
    steps = steps_of(n, ranks, start, drop_last=drop_last, **options)
    assert len(steps) == -(-len(order) // size)
    for number, step in enumerate(steps):
        samples = order[number * size : (number + 1) * size]
        expected = np.zeros(n)
        expected[samples] = 1 / len(samples)
        np.testing.assert_allclose(coefficients(step, n, ranks), expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize("ranks", range(1, 9))
def test_every_sample_counts_the_same_for_every_number_of_samples(ranks: int) -> None:
    for n, size in itertools.product(range(1, 101), (1, 7, 12, 32)):
        check_steps(n, ranks, size, 0, drop_last=False, global_batch_size=size)


@settings(max_examples=300, deadline=None)
@given(
    n=st.integers(1, 100),
    ranks=st.integers(1, 8),
    micro=st.integers(1, 40),
    accumulation=st.integers(1, 5),
    start=st.integers(0, 100),
    drop_last=st.booleans(),
)
def test_also_with_accumulation_after_a_resume_and_without_the_rest(
    n: int, ranks: int, micro: int, accumulation: int, start: int, drop_last: bool
) -> None:
    size = micro * accumulation
    drop_last = drop_last and n >= size
    options = {"global_batch_size": size, "accumulation": accumulation}
    check_steps(n, ranks, size, min(start, n), drop_last, **options)
    size = micro * ranks * accumulation  # as a batch per rank
    drop_last = drop_last and n >= size
    check_steps(n, ranks, size, min(start, n), drop_last, batch_size=micro, accumulation=accumulation)


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_samples_of_weighted_draws_and_of_evaluations_count_once(ranks: int) -> None:
    for n in range(1, 30):
        drawn = []
        for rank in range(ranks):
            sampler = ddpkit.DistributedWeightedSampler(np.ones(9), n, ranks, rank)
            loader = ddpkit.make_loader(range(9), 4, sampler=sampler, num_replicas=ranks, rank=rank)
            drawn += [loader.samples for _ in loader]
            for size in ({"batch_size": 4}, {"global_batch_size": 7}):
                seen = ddpkit.make_loader(range(n), **size, train=False, num_replicas=ranks, rank=rank)
                assert [len(batch) for batch in seen] == [seen.samples for _ in seen]
        assert sum(drawn) == n


def test_the_steps_of_an_epoch_are_those_of_the_loop_and_stay_after_a_load() -> None:
    for n, size, accumulation, drop_last in itertools.product(range(6, 30), (2, 6), (1, 2), (False, True)):
        options = {"global_batch_size": size, "accumulation": accumulation, "drop_last": drop_last}
        loader = ddpkit.make_loader(range(n), **options)
        steps = -(-sum(1 for _ in loader) // accumulation)
        assert loader.steps_per_epoch == steps
        loader.load_state_dict({**loader.state_dict(), "epoch": 0, "consumed": 4})
        assert loader.steps_per_epoch == steps
    assert ddpkit.make_loader(range(10), 3, train=False).steps_per_epoch == 4


def test_what_the_loader_does_not_know_is_said() -> None:
    loader = ddpkit.make_loader(range(4), 2)
    with pytest.raises(ddpkit.DdpkitError, match=r"loader\.weight is that of the current batch: read it in the loop"):
        _ = loader.weight
    stream = ddpkit.make_loader(iter_of_two(), 2)
    for _ in stream:
        with pytest.raises(TypeError, match=r"loader\.samples is known for ddpkit's samplers only"):
            _ = stream.samples
    with pytest.raises(ValueError, match="With a stream, 2 ranks cannot divide a global batch of 3 evenly"):
        ddpkit.make_loader(iter_of_two(), global_batch_size=3, num_replicas=2, rank=0)


def iter_of_two() -> Any:
    class Two:
        def shard(self, index: int, num_shards: int) -> Any:
            return iter([1, 2])

    return Two()


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def train(n: int, size: int, accumulation: int, folder: str = "", save_at: int = -1, ends: bool = False) -> Any:
    """Train for two epochs; return the weights and the printed means. Save after a step, and end there if asked."""
    x = torch.linspace(-1, 1, 2 * n, dtype=torch.float64).view(n, 2)
    data = TensorDataset(x, x.sin().sum(1, keepdim=True))
    loader = ddpkit.make_loader(data, global_batch_size=size, accumulation=accumulation)
    model = ddpkit.wrap_model(net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    state = {"model": model, "optimizer": optimizer, "loader": loader}
    checkpoints = ddpkit.Checkpointer(folder) if folder else None
    saved = checkpoints.load_latest(**state) if checkpoints else None
    step, means = saved["step"] if saved else 0, []
    for _ in loader.epochs(2):
        for i, (inputs, targets) in enumerate(loader):
            with ddpkit.accumulate(model, i, accumulation, last=i + 1 == len(loader)) as complete:
                loss = nn.functional.mse_loss(model(inputs), targets)
                (loss * loader.weight).backward()
            means.append(ddpkit.all_reduce_mean(loss.item(), weight=loader.samples))
            if complete:
                optimizer.step()
                optimizer.zero_grad()
                step += 1
            if complete and step == save_at:
                checkpoints.save(step, **state)
                if ends:
                    return None
    return torch.cat([p.detach().flatten() for p in model.parameters()]), means


CASES = [(1, 5, 1), (7, 6, 1), (13, 12, 1), (14, 12, 2), (25, 12, 3), (61, 60, 1), (61, 10, 5)]


def train_all() -> list[Any]:
    return [train(*case) for case in CASES]


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_ranks_train_the_weights_of_one_process(ranks: int) -> None:
    """With DDP and real ranks, for numbers that do not divide, and no warning."""
    expected = train_all()
    for found in on_ranks(train_all, ranks):
        for (weights, means), (one, losses) in zip(found, expected, strict=True):
            torch.testing.assert_close(weights, one, rtol=1e-12, atol=1e-13)
            np.testing.assert_allclose(means, losses, rtol=1e-12)


def test_a_run_resumed_on_another_number_of_ranks_trains_the_weights_of_one_process(tmp_path: Any) -> None:
    expected, _ = train(25, 8, 2)
    on_ranks(train, 3, 25, 8, 2, str(tmp_path), 2, True)
    for weights, _ in on_ranks(train, 2, 25, 8, 2, str(tmp_path)):
        torch.testing.assert_close(weights, expected, rtol=1e-12, atol=1e-13)


def train_somehow(n: int, how: str) -> list[str]:
    """Return the warnings of a loop over a global batch of 12, or over batches of 5 whose sums are accumulated."""
    x = torch.ones(n, 1)
    accumulates = how == "global_mean of the model"
    sizes = {"global_batch_size": 10, "accumulation": 2} if accumulates else {"global_batch_size": 12}
    loader = ddpkit.make_loader(TensorDataset(x), **sizes)
    module = nn.Linear(1, 1)
    model = module if how == "average_gradients" else ddpkit.wrap_model(module)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            numbers = range(len(loader)) if how == "by number" else itertools.count()
            for i, (inputs,) in zip(numbers, loader, strict=False):
                if accumulates:
                    with ddpkit.accumulate(model, i, 2, last=i + 1 == len(loader)) as complete:
                        (model(inputs).square().mean() * loader.samples).backward()
                    if complete:
                        ddpkit.global_mean(model, loader.samples)
                    continue
                loss = model(inputs).square().mean()
                if how == "weight":
                    loss = loss * loader.weight
                if how == "global_mean of len":
                    loss = ddpkit.global_mean(loss * len(inputs), len(inputs))
                if how == "global_mean of samples":
                    loss = ddpkit.global_mean(loss * loader.samples, loader.samples)
                if how == "gather_batch":
                    loss = ddpkit.gather_batch(model(inputs)).square().mean()
                if how == "nothing":
                    continue
                loss.backward()
                if how == "average_gradients":
                    ddpkit.average_gradients(module)
                if how == "evaluated within":
                    list(ddpkit.make_loader(range(4), 1, train=False))
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize(
    ("n", "how", "said"),
    [
        (24, "a mean", ""),
        (26, "a mean", ""),
        (25, "weight", ""),
        (27, "global_mean of len", ""),
        (25, "global_mean of samples", ""),
        (27, "gather_batch", ""),
        (25, "gather_batch", "The repeated one is in the joined batch: pass drop_last=True"),
        (25, "evaluated within", "Unless you weight them by hand, backpropagate loss * loader.weight"),
        (25, "by number", "Unless you weight them by hand, backpropagate loss * loader.weight"),
        (25, "nothing", ""),
        (25, "average_gradients", "in batch 3 of an epoch 2 ranks share 1 samples, and some get a repeated one"),
        (
            25,
            "global_mean of len",
            "share 1 samples, and some get a repeated one. Leave it out of the loss and of the count",
        ),
        (25, "global_mean of the model", ""),
        (27, "a mean", "in batch 3 of an epoch 2 ranks share 3 samples. Unless you weight them by hand"),
    ],
)
def test_a_loop_that_averages_unequal_shares_is_told_once_on_one_rank(n: int, how: str, said: str) -> None:
    first, last = on_ranks(train_somehow, 2, n, how)
    assert first == []
    if not said:
        assert last == []
        return
    assert len(last) == 1 and said in last[0]
