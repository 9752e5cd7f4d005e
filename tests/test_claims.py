"""What docs/guide/what-the-guides-say.md says about torch and ddpkit is what they do."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data import DistributedSampler as TorchSampler

import ddpkit


def joined(fn: Callable[[int], Any]) -> Any:
    with ddpkit.distributed(timeout=timedelta(minutes=2)) as job:
        return fn(job.rank)


def on_two_ranks(fn: Callable[[int], Any]) -> list[Any]:
    """What `fn(rank)` returns on rank 0 and on rank 1, real processes of one job."""
    return ddpkit.spawn(joined, 2, fn)


class Policy(nn.Module):
    def __init__(self, start: int) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False)
        self.sometimes = nn.Linear(1, 1, bias=False)
        self.register_buffer("mean", torch.tensor(float(start)))

    def forward(self, x: torch.Tensor, both: bool = True) -> torch.Tensor:
        return self.train_on_batch(x) + (self.sometimes(x).sum() if both else 0)

    def train_on_batch(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).sum()


def claims_about_ddp(rank: int) -> dict[str, Any]:
    found, x = {}, torch.full((1, 1), float(rank))
    torch.manual_seed(rank)  # so the weights differ before they are wrapped
    policy = Policy(rank)
    model = DistributedDataParallel(policy)
    found["weight"] = policy.layer.weight.item()

    model.module.train_on_batch(x).backward()
    found["by method"] = policy.layer.weight.grad.item()
    model.zero_grad()
    model(x).backward()
    found["by wrapper"] = policy.layer.weight.grad.item()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.13 calls this argument deprecated
        torchs = DistributedDataParallel(Policy(rank), broadcast_buffers=False)
    found["buffer"] = torchs.module.mean.item()
    ours = ddpkit.wrap_model(Policy(rank), broadcast_buffers=False)
    found["ddpkit's buffer"] = ours.module.mean.item()

    model(x, both=False).backward()  # `sometimes` gets no gradient
    try:
        model(x)
    except RuntimeError as error:
        found["error"] = str(error)
    return found


def test_ddp_averages_only_calls_of_the_wrapper_and_keeps_buffers_apart() -> None:
    rank_0, rank_1 = on_two_ranks(claims_about_ddp)
    assert rank_0["weight"] == rank_1["weight"]  # seeds differed
    assert (rank_0["by method"], rank_1["by method"]) == (0.0, 1.0)  # never averaged
    assert (rank_0["by wrapper"], rank_1["by wrapper"]) == (0.5, 0.5)
    assert (rank_0["buffer"], rank_1["buffer"]) == (0.0, 1.0)  # not even at the start
    assert (rank_0["ddpkit's buffer"], rank_1["ddpkit's buffer"]) == (0.0, 0.0)
    assert "Expected to have finished reduction" in rank_0["error"]
    assert "parameters that were not used" in rank_0["error"]


def test_a_seed_of_its_own_on_each_rank_repeats_and_misses_samples() -> None:
    def shares(*seeds: int) -> list[set[int]]:
        return [set(TorchSampler(range(100), 2, rank, seed=seed)) for rank, seed in enumerate(seeds)]

    assert len(set.union(*shares(5, 5))) == 100
    assert 65 < len(set.union(*shares(5, 6))) < 85  # this epoch misses about a quarter


class Every(torch.utils.data.IterableDataset):
    """The stream of a guide: rank r of w takes every w-th sample, from r on."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(0, 8, 2))  # rank 0 of 2


def test_each_worker_reads_the_whole_of_a_stream_that_ranks_divide() -> None:
    with pytest.raises(ValueError, match="IterableDataset"):
        DataLoader(Every(), sampler=[0, 1])
    seen = list(DataLoader(Every(), batch_size=None, num_workers=2))
    assert sorted(seen) == [0, 0, 2, 2, 4, 4, 6, 6]  # each worker read all of it
