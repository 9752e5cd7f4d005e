"""Cases that run on warm ranks, each a test of its own.

A case is a function that every rank calls after `setup()`. It may take `folder`, an empty folder that all ranks see.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

import ddpkit
from ddpkit import get_rank, get_world_size
from ddpkit.testing import on_ranks

Case = Callable[..., None]


def on(*world_sizes: int) -> Callable[[Case], Case]:
    """Make a test of a case for each world size."""

    def make_test(case: Case) -> Case:
        @pytest.mark.parametrize("world_size", world_sizes, ids="on_{}".format)
        def test(world_size: int, tmp_path: Path) -> None:
            if world_size == 1:  # as on a laptop: in one process that no launcher started
                with ddpkit.distributed():
                    _call(case, tmp_path)
            else:
                where = case.__module__, case.__name__
                on_ranks(_find_and_call, world_size, *where, tmp_path, timeout=120)

        test.__name__ = case.__name__
        test.__qualname__ = case.__qualname__
        test.__module__ = case.__module__
        test.case = case  # type: ignore[attr-defined]
        return test

    return make_test


def flat(lists: Iterable[list[Any]]) -> list[Any]:
    """Join lists into one."""
    return list(itertools.chain.from_iterable(lists))


def wait_for(file: Path) -> None:
    """Wait until another rank has made a file."""
    deadline = time.monotonic() + 120
    while not file.exists():
        assert time.monotonic() < deadline, f"{file.name} was never made"
        time.sleep(0.01)


def share(tensor: torch.Tensor) -> torch.Tensor:
    """Take this rank's rows."""
    return tensor[get_rank() :: get_world_size()]


def gradients(model: torch.nn.Module) -> list[torch.Tensor | None]:
    """Copy the gradients of a model."""
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def close(ones: list[Any], others: list[Any], **tolerance: float) -> bool:
    """Say whether tensors are equal but for rounding."""
    return all(torch.allclose(one, other, **tolerance) for one, other in zip(ones, others, strict=True))


def slurm(rank: int, local_rank: int, hosts: str, per_node: str, size: int, **more: str) -> dict[str, str]:
    """Return what srun sets in a task."""
    return {
        "SLURM_JOB_ID": "0012345",
        "SLURM_JOB_NODELIST": hosts,
        "SLURM_NTASKS": f"{size}",
        "SLURM_PROCID": f"{rank}",
        "SLURM_LOCALID": f"{local_rank}",
        "SLURM_NODEID": "0" if rank == local_rank else "1",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": hosts,
        "SLURM_STEP_NUM_NODES": per_node.partition("x")[2].rstrip(")") or "1",
        "SLURM_STEP_NUM_TASKS": f"{size}",
        "SLURM_STEP_TASKS_PER_NODE": per_node,
    } | more


def _find_and_call(module: str, name: str, folder: Path) -> None:
    _call(getattr(importlib.import_module(module), name).case, folder)


def _call(case: Case, folder: Path) -> None:
    torch.manual_seed(0)
    if "folder" in inspect.signature(case).parameters:
        case(folder=folder)
    else:
        case()
