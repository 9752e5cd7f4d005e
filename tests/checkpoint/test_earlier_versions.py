"""Checkpoints that earlier versions wrote: weights, optimizers, samples and random numbers go on where they stopped.

`python tests/checkpoint/test_earlier_versions.py` writes those of this version. The files of a release never change.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import ddpkit
from ddpkit.checkpoint.files import FORMAT, FORMAT_WITH_PIECES

WRITTEN = Path(__file__).with_name("written")
VERSIONS = sorted(folder.name for folder in WRITTEN.iterdir())


def make_run() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    model = nn.Linear(5, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, optimizer, ddpkit.make_loader(TensorDataset(torch.arange(12)), batch_size=2, seed=3)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 5)).square().mean().backward()
    optimizer.step()


def go_on(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Any) -> dict[str, Any]:
    """Draw random numbers, train once more, and take the batches that are left of the epoch."""
    draws = torch.rand(3).tolist()
    train(model, optimizer)
    state = {name: tensor.tolist() for name, tensor in model.state_dict().items()}
    return {"draws": draws, "state": state, "batches": [samples.tolist() for (samples,) in batches]}


def write_plain(folder: Path) -> None:
    """Save in the middle of an epoch, and then what came after that."""
    model, optimizer, loader = make_run()
    batches = iter(loader)
    next(batches)
    train(model, optimizer)
    checkpoints = ddpkit.Checkpointer(folder)
    checkpoints.save(1, per_rank={"rank": 0}, model=model, optimizer=optimizer, loader=loader)
    checkpoints.save(2, score=0.5, **go_on(model, optimizer, batches))


def write_sharded(folder: Path) -> None:
    """Save tensors that each rank holds a piece of, and then the same as plain numbers."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with ddpkit.distributed():
        model = fully_shard(nn.Linear(5, 3), mesh=init_device_mesh("cpu", (ddpkit.get_world_size(),)))
        checkpoints = ddpkit.Checkpointer(folder)
        checkpoints.save(1, model=model)
        weights = {name: tensor.full_tensor().tolist() for name, tensor in model.state_dict().items()}
        checkpoints.save(2, weights=weights)


def test_there_are_files_of_each_format() -> None:
    first = WRITTEN.glob("*/*/step-000000001.pt")
    assert {torch.load(path)["format"] for path in first} == {FORMAT, FORMAT_WITH_PIECES}


@pytest.mark.parametrize("version", VERSIONS)
def test_a_run_of_an_earlier_version_goes_on(version: str, tmp_path: Path) -> None:
    folder = shutil.copytree(WRITTEN / version / "plain", tmp_path / "checkpoints")
    model, optimizer, loader = make_run()
    checkpoints = ddpkit.Checkpointer(folder)
    first = folder / "step-000000001.pt"
    assert checkpoints.load(first, model=model, optimizer=optimizer, loader=loader) == {"step": 1, "rank": 0}
    after = go_on(model, optimizer, loader)
    expected = checkpoints.load_best()
    assert expected is not None and expected["score"] == 0.5
    assert after["draws"] == expected["draws"] and after["batches"] == expected["batches"]
    for name, values in expected["state"].items():
        torch.testing.assert_close(torch.tensor(after["state"][name]), torch.tensor(values))


@pytest.mark.parametrize("version", VERSIONS)
def test_a_sharded_model_of_an_earlier_version_is_loaded(version: str, tmp_path: Path) -> None:
    folder = shutil.copytree(WRITTEN / version / "sharded", tmp_path / "checkpoints")
    model = nn.Linear(5, 3)
    checkpoints = ddpkit.Checkpointer(folder)
    checkpoints.load(folder / "step-000000001.pt", model=model)
    expected = checkpoints.load_latest()
    assert expected is not None
    assert {name: tensor.tolist() for name, tensor in model.state_dict().items()} == expected["weights"]


if __name__ == "__main__":
    files = WRITTEN / ddpkit.__version__
    write_plain(files / "plain")
    ddpkit.spawn(write_sharded, 2, files / "sharded")
