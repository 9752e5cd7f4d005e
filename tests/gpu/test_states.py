"""Random numbers, batches and checkpoints where the device is concerned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from starting import Crew, on_one_device
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import Dataset

import ddpkit


class Numbers(Dataset[Tensor]):
    """Twenty samples with random noise."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((4,), float(index)) + torch.rand(4)


def read_batches(pinned: bool) -> tuple[list[float], list[bool]]:
    """Return the sums of an epoch's batches, computed on the device, and which of them were pinned."""
    device = ddpkit.get_device()
    torch.ones(1, device=device)  # workers are forked from a process with a context on the device
    loader = ddpkit.make_loader(Numbers(), 4, seed=3, num_workers=2, pin_memory=pinned, persistent_workers=True)
    sums = []
    pins = []
    for batch in loader:
        sums.append(batch.to(device, non_blocking=True).double().sum().item())
        pins.append(pinned and batch.is_pinned())
    return sums, pins


def test_workers_load_for_the_device(device: str) -> None:
    ((sums, _),) = on_one_device(read_batches, 1, device, False)
    ((expected, _),) = on_one_device(read_batches, 1, "cpu", False)
    assert sums == pytest.approx(expected)


@pytest.mark.cuda
@pytest.mark.parametrize("nprocs", [1, 2])
def test_pinned_batches_are_the_same(nprocs: int, device: str) -> None:
    plain = on_one_device(read_batches, nprocs, device, False)
    pinned = on_one_device(read_batches, nprocs, device, True)
    assert [sums for sums, _ in pinned] == [sums for sums, _ in plain]
    assert all(all(pins) for _, pins in pinned)


def draw(per_rank: bool) -> list[float]:
    ddpkit.seed_everything(5, per_rank=per_rank)
    return torch.rand(3, device=ddpkit.get_device()).tolist()


def test_seeds_reach_the_generator_of_the_device(several_ranks: Crew) -> None:
    for per_rank, different in ((False, 1), (True, several_ranks.size)):
        assert len({*map(tuple, several_ranks(draw, per_rank))}) == different


def make_parts() -> dict[str, Any]:
    """Make what a checkpoint holds: a model, its optimizer, a scaler and a loader."""
    torch.manual_seed(0)
    model = ddpkit.wrap_model(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scaler = torch.amp.GradScaler(ddpkit.get_device().type)
    loader = ddpkit.make_loader(Numbers(), 2, seed=1)
    return {"model": model, "optimizer": optimizer, "scaler": scaler, "loader": loader}


def train(parts: dict[str, Any], steps: int) -> list[Tensor]:
    """Do some steps, in float16 and with dropout; return the weights."""
    device = ddpkit.get_device()
    for step, batch in enumerate(parts["loader"], 1):
        inputs = batch.to(device)
        with torch.autocast(device.type, torch.float16):
            outputs = parts["model"](inputs)
        loss = mse_loss(outputs.float(), inputs.sum(1, keepdim=True))
        parts["scaler"].scale(loss).backward()
        parts["scaler"].step(parts["optimizer"])
        parts["scaler"].update()
        parts["optimizer"].zero_grad()
        if step == steps:
            break
    return [parameter.detach().cpu() for parameter in parts["model"].parameters()]


def save_halfway(folder: Path) -> list[Tensor]:
    """Train for two steps, save, and train for two more."""
    parts = make_parts()
    ddpkit.seed_everything(7, per_rank=True)
    train(parts, 2)
    ddpkit.Checkpointer(folder).save(2, **parts)
    ddpkit.check_replicas(parts["model"], parts["optimizer"])
    resumed = make_parts()
    ddpkit.Checkpointer(folder).load_latest(**resumed)
    return train(resumed, 2)


def resume(folder: Path) -> list[Tensor]:
    """Train for two steps from the checkpoint; the parts have to be on this rank's device."""
    parts = make_parts()
    saved = ddpkit.Checkpointer(folder).load_latest(**parts)
    assert saved["step"] == 2
    device = ddpkit.get_device()
    for state in parts["optimizer"].state.values():
        assert state["exp_avg"].device == device
    return train(parts, 2)


def test_a_checkpoint_goes_on_on_the_device_to_the_last_bit(crew: Crew, tmp_path: Path) -> None:
    expected = crew(save_halfway, tmp_path)
    found = crew(resume, tmp_path)
    for own, own_expected in zip(found, expected, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(own, own_expected, strict=True))


def test_a_checkpoint_of_the_device_is_loaded_on_the_cpu(device: str, tmp_path: Path) -> None:
    on_one_device(save_halfway, 2, device, tmp_path)
    for weights in on_one_device(resume, 2, "cpu", tmp_path):
        assert all(weight.isfinite().all() for weight in weights)


def test_a_checkpoint_of_the_cpu_is_loaded_on_the_device(device: str, tmp_path: Path) -> None:
    on_one_device(save_halfway, 2, "cpu", tmp_path)
    for weights in on_one_device(resume, 1, device, tmp_path):
        assert all(weight.isfinite().all() for weight in weights)
