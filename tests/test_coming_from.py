"""The trainers of docs/coming_from: with the samples in one order, each has the losses of the one with ddpkit."""

from __future__ import annotations

import os
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from processes import ROOT, free_port, platform_env, run
from torch.utils.data import DistributedSampler, RandomSampler

import ddpkit

FOLDER = ROOT / "docs" / "coming_from"
TRAINERS = [
    "plain_torch",
    "with_utils_dist",
    pytest.param("with_accelerate", marks=pytest.mark.peers("accelerate")),
    pytest.param("with_fabric", marks=pytest.mark.peers("lightning_fabric")),
    pytest.param("with_horovod", marks=pytest.mark.peers("horovod")),
]
SAVE_WEIGHTS = {"plain_torch", "with_utils_dist"}  # as torch does
COUNT_PASSES = {"with_accelerate", "with_fabric"}  # of this process: in a resumed run the order starts anew


def order_of_ddpkit(sampler: DistributedSampler | RandomSampler) -> Iterator[int]:
    """Deal the samples in ddpkit's order: of the epoch that was set, or of the number of the pass."""
    if isinstance(sampler, RandomSampler):
        epoch = vars(sampler).setdefault("epoch", 0)
        sampler.epoch += 1
        ours = ddpkit.DistributedSampler(sampler.data_source, num_replicas=1, rank=0)
    else:
        epoch = sampler.epoch
        ours = ddpkit.DistributedSampler(
            sampler.dataset, sampler.num_replicas, sampler.rank, shuffle=sampler.shuffle, seed=sampler.seed
        )
    ours.set_epoch(epoch)
    return iter(ours)


def run_trainer(name: str, epochs: int, folder: str) -> None:
    os.chdir(folder)
    DistributedSampler.__iter__ = RandomSampler.__iter__ = order_of_ddpkit
    sys.path.insert(0, str(FOLDER))
    sys.argv = [name, "--dist"] if name == "with_utils_dist" else [name]
    runpy.run_path(str(FOLDER / f"{name}.py"))["main"](epochs)


def play(name: str, ranks: int, folder: Path) -> list[str]:
    """Run a trainer for two epochs, and once more for the third; return what it prints for each."""
    more = {"LOCAL_WORLD_SIZE": f"{ranks}", "ACCELERATE_USE_CPU": "true"}
    more |= {"LT_CLI_USED": "1", "LT_ACCELERATOR": "cpu", "LT_DEVICES": f"{ranks}"}
    output = ""
    for epochs in (2, 3):
        port = free_port()
        envs = [platform_env(rank, ranks, port, LOCAL_RANK=f"{rank}", **more) for rank in range(ranks)]
        ended = run(run_trainer, envs, name, epochs, str(folder), timeout=120)
        for end in ended:
            assert end.code == 0, end.output
        output += ended[0].output
    lines = re.findall(r"^epoch .*$", output, re.MULTILINE)
    assert [line[:8] for line in lines] == ["epoch 0:", "epoch 1:", "epoch 2:"], output
    return lines


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.storm), 2])
def ranks(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(scope="module")
def folder(ranks: int, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("with_ddpkit")


@pytest.fixture(scope="module")
def with_ddpkit(ranks: int, folder: Path) -> list[str]:
    return play("with_ddpkit", ranks, folder)


@pytest.mark.parametrize("name", TRAINERS)
def test_a_trainer_has_the_losses_that_it_has_with_ddpkit(
    name: str, ranks: int, with_ddpkit: list[str], folder: Path, tmp_path: Path
) -> None:
    lines = play(name, ranks, tmp_path)
    assert lines[:2] == with_ddpkit[:2]
    assert (lines[2] == with_ddpkit[2]) == (name not in COUNT_PASSES)
    if name in SAVE_WEIGHTS:
        before = torch.load(tmp_path / "checkpoint.pt")["model"]
        (latest,) = folder.glob("checkpoints/step-*2.pt")
        after = torch.load(latest)["state"]["model"]
        assert before.keys() == after.keys()
        assert all(torch.equal(before[key], after[key]) for key in before)
