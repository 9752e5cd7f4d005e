"""ddpkit's objects in torchdata, accelerate and Lightning Fabric, and theirs in ddpkit."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from processes import TORCHRUN, launch
from torch.utils.data import Sampler
from torch.utils.data.distributed import DistributedSampler as TorchSampler

import ddpkit

with suppress(ImportError):
    from torchdata import stateful_dataloader as stateful

pytestmark = pytest.mark.peers("accelerate", "lightning_fabric", "torchdata")

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


BEGIN = """
import sys
import torch
from torch import nn
import ddpkit

class Lines:
    def shard(self, index, num_shards):
        return iter(range(20)[index::num_shards])

def refusal(loop):
    try:
        return len(list(loop()))
    except TypeError as error:
        return str(error)[:22]

def loaders():
    yield ddpkit.make_loader(range(20), 2)
    yield ddpkit.make_loader(range(20), 2, train=False)
    yield ddpkit.make_loader(Lines(), 2)

def parts():
    torch.manual_seed(0)
    net = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    return net, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1)

def train(model, optimizer, scheduler):
    model(torch.ones(2, 2)).sum().backward()
    optimizer.step()
    scheduler.step()

def both_ways(wrapped, folder):
    checkpoints = ddpkit.Checkpointer(folder)
    plain = parts()
    names = "model", "optimizer", "scheduler"
    train(*wrapped)
    for step, (ours, theirs) in enumerate([(wrapped, parts()), (plain, wrapped)]):
        if step:
            train(*plain)
        checkpoints.save(step, **dict(zip(names, ours)))
        checkpoints.load_latest(**dict(zip(names, theirs)))
        ddpkit.check_replicas(ddpkit.unwrap_model(theirs[0]), theirs[1])
        states = [each.state_dict() for each in (*ours[1:], *theirs[1:])]
        assert str(states[0]) == str(states[2]) and str(states[1]) == str(states[3])
        assert type(ddpkit.unwrap_model(theirs[0])) is nn.Linear
        weights = [ddpkit.unwrap_model(each[0]).weight.tolist() for each in (ours, theirs)]
        assert weights[0] == weights[1]
"""
ACCELERATE = """
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration

accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=False))
context = ddpkit.setup()
print("\\n" + " ".join(repr(refusal(lambda: accelerator.prepare(each))) for each in loaders()))
both_ways(accelerator.prepare(*parts()), sys.argv[1])
print("\\nequal\\n")
"""
FABRIC = """
from lightning_fabric import Fabric

fabric = Fabric(accelerator="cpu", devices=ddpkit.get_world_size(), strategy="ddp")
fabric.launch()
context = ddpkit.setup()
print("\\n" + " ".join(repr(refusal(lambda: fabric.setup_dataloaders(each))) for each in loaders()))
model, optimizer, scheduler = parts()
model, optimizer = fabric.setup(model, optimizer)
both_ways((model, optimizer, scheduler), sys.argv[1])
print("\\nequal\\n")
"""
REFUSED = repr("A loader of make_loader()"[:22])


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("library", ["accelerate", "fabric"])
def test_a_loader_is_not_split_twice_and_checkpoints_hold_what_is_inside_wrappers(
    library: str, ranks: int, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(BEGIN + {"accelerate": ACCELERATE, "fabric": FABRIC}[library]))
    (ended,) = launch([*TORCHRUN, f"--nproc-per-node={ranks}", str(script), str(tmp_path / "run")], timeout=120)
    assert ended.code == 0, ended.output
    found = [line for line in ended.output.splitlines() if REFUSED in line]
    stream = str(10 // ranks) if library == "fabric" else REFUSED  # Fabric leaves it to the loader, which is right
    assert found == [f"{REFUSED} {REFUSED} {stream}"] * ranks, ended.output
    assert ended.output.splitlines().count("equal") == ranks
