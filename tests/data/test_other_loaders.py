"""ddpkit's samplers and loaders in the hands of torchdata, accelerate and Lightning Fabric."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch.utils.data import Sampler
from torch.utils.data.distributed import DistributedSampler as TorchSampler

import ddpkit

stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="needs torchdata: pip install torchdata")

N = 11  # two ranks pad the last sample
SAMPLERS: dict[str, Callable[[], Sampler[int]]] = {
    "torch": lambda: TorchSampler(range(N), ddpkit.get_world_size(), ddpkit.get_rank()),
    "ddpkit": lambda: ddpkit.DistributedSampler(range(N)),
    "weighted": lambda: ddpkit.DistributedWeightedSampler([1.0] * N, num_samples=N),
}


def stateful_loader(name: str, workers: int) -> Any:
    fork = {"multiprocessing_context": "fork"} if workers else {}
    return stateful.StatefulDataLoader(range(N), 2, sampler=SAMPLERS[name](), num_workers=workers, **fork)


@pytest.mark.ranks(1, 2)
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("advances", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", SAMPLERS)
def test_a_stateful_loader_resumes_with_each_sampler_where_it_was(name: str, workers: int, advances: bool) -> None:
    whole = [batch.tolist() for batch in stateful_loader(name, workers)]
    for taken in (0, 1, 2, len(whole) - 1):
        loader = stateful_loader(name, workers)
        batches = iter(loader)
        for _ in range(taken):
            next(batches)
            if advances and name != "torch":
                loader.sampler.advance(2 * ddpkit.get_world_size())
        resumed = stateful_loader(name, workers)
        resumed.load_state_dict(loader.state_dict())
        assert [batch.tolist() for batch in resumed] == whole[taken:], taken
        assert [batch.tolist() for batch in resumed] == whole, "the next epoch, without set_epoch()"
        assert len(resumed) == len(whole)


@pytest.mark.ranks(1, 2)
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_a_stateful_loader_restores_the_epoch() -> None:
    loader = stateful_loader("ddpkit", 0)
    loader.sampler.set_epoch(3)
    whole = [batch.tolist() for batch in loader]
    next(iter(loader))
    resumed = stateful_loader("ddpkit", 0)
    resumed.load_state_dict(loader.state_dict())
    assert [batch.tolist() for batch in resumed] == whole[1:] and resumed.sampler.epoch == 3
