"""Warnings of what is rarely meant, each once: GPUs that stay idle, a dataset that every rank shuffles as a whole."""

from __future__ import annotations

import contextlib
import gc
import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import on_ranks
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, TensorDataset

import ddpkit
from ddpkit.parallel.wrap import _warn_of_idle_gpus, _warn_of_unshared_loader

SAMPLES = TensorDataset(torch.ones(12, 2))
LOADERS: dict[str, Callable[[], Any]] = {
    "shuffled": lambda: DataLoader(SAMPLES, 2, shuffle=True),
    "batches": lambda: DataLoader(SAMPLES, batch_sampler=BatchSampler(RandomSampler(SAMPLES), 2, True)),
    "in order": lambda: DataLoader(SAMPLES, 2),
    "distributed": lambda: DataLoader(SAMPLES, 2, sampler=DistributedSampler(SAMPLES, 3, 0)),
    "ours": lambda: ddpkit.make_loader(SAMPLES, batch_size=2),
}


class Trainer:
    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def train(self) -> None:
        for _ in range(2):
            model = ddpkit.wrap_model(nn.Linear(2, 1))
            for number, (x,) in enumerate(self.loader):
                model(x * number).sum().backward()


def warned(name: str) -> list[str]:
    _warn_of_unshared_loader.cache_clear()  # this process may have run another test
    gc.collect()
    with contextlib.suppress(ValueError):
        DataLoader(SAMPLES, num_workers=-1)  # leaves a loader that has not everything
    with warnings.catch_warnings(record=True) as caught, ddpkit.distributed():
        warnings.simplefilter("always")
        Trainer(LOADERS[name]()).train()
    return [text for one in caught if "shuffles" in (text := f"{one.message}")]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(
    ("name", "is_wrong"),
    [("shuffled", True), ("batches", True), ("in order", False), ("distributed", False), ("ours", False)],
)
def test_a_loader_that_each_rank_shuffles_alone_is_named_once(name: str, is_wrong: bool, world_size: int) -> None:
    first, *others = on_ranks(warned, world_size, name)
    assert not any(others)
    if is_wrong and world_size > 1:
        (text,) = first
        assert text.startswith("A DataLoader shuffles all of its TensorDataset on every rank")
    else:
        assert not first


@pytest.mark.parametrize("device", [None, "cpu"])
def test_idle_gpus_are_told_once_unless_a_device_was_named(
    device: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ddpkit.parallel.wrap.count_accelerators", lambda: 4)
    _warn_of_idle_gpus.cache_clear()
    with caplog.at_level(logging.WARNING), ddpkit.distributed(device=device):
        for _ in range(2):
            ddpkit.wrap_model(nn.Linear(2, 1))
    told = [record.getMessage() for record in caplog.records if "GPUs" in record.getMessage()]
    assert len(told) == (0 if device else 1)
    assert all("torchrun --nproc_per_node=4" in text and "setup(device='cuda:0')" in text for text in told)
