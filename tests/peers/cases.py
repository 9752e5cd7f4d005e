"""Cases that run on real ranks: all of a world size in one launch, each reported as a test of its own.

A case is a function that every rank calls after `setup()`. It may take `folder`, an empty folder that all ranks see.
A case that fails ends its launch, so that no rank waits for another; the cases after it run in a new one.
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
from conftest import on_ranks

import ddpkit
from ddpkit import get_rank, get_world_size

Case = Callable[..., None]
Name = tuple[str, str]  # of the case's module, and of the case in it

_FAILURES = pytest.StashKey[dict[int, dict[Name, str]]]()  # by world size, of this run of pytest


def on(*world_sizes: int) -> Callable[[Case], Case]:
    """Make a test of a case for each world size."""

    def make_test(case: Case) -> Case:
        @pytest.mark.parametrize("world_size", world_sizes, ids="on_{}".format)
        def test(world_size: int, request: pytest.FixtureRequest) -> None:
            if world_size == 1:
                _run_here(case, request.getfixturevalue("tmp_path"))
                return
            failure = _failures(request, world_size).get(_name(case))
            if failure is not None:
                pytest.fail(failure, pytrace=False)

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
        "SLURM_STEP_NUM_TASKS": f"{size}",
        "SLURM_STEP_TASKS_PER_NODE": per_node,
    } | more


def _name(case: Case) -> Name:
    return case.__module__, case.__name__


def _run_here(case: Case, folder: Path) -> None:
    """Run a case as on a laptop: in one process that no launcher started."""
    with ddpkit.distributed():
        _call(case, folder)


def _call(case: Case, folder: Path) -> None:
    torch.manual_seed(0)
    if "folder" in inspect.signature(case).parameters:
        case(folder=folder)
    else:
        case()


def _failures(request: pytest.FixtureRequest, world_size: int) -> dict[Name, str]:
    """Return what went wrong in the cases of a world size; the first who asks runs them all."""
    known = request.session.stash.setdefault(_FAILURES, {})
    if world_size not in known:
        names = _selected(request.session, world_size)
        base = request.getfixturevalue("tmp_path_factory").mktemp("peers")
        known[world_size] = _launch(names, world_size, base)
    return known[world_size]


def _selected(session: pytest.Session, world_size: int) -> list[Name]:
    names = []
    for item in session.items:
        case = getattr(getattr(item, "function", None), "case", None)
        if case is not None and item.callspec.params["world_size"] == world_size:
            names.append(_name(case))
    return names


def _launch(names: list[Name], world_size: int, base: Path) -> dict[Name, str]:
    """Run cases on ranks, in a new launch after each that fails; return the failures."""
    failures: dict[Name, str] = {}
    left = names
    while left:
        launch = base / f"launch-{len(failures)}"
        launch.mkdir()
        for number in range(len(left)):
            (launch / f"case-{number}").mkdir()
        try:
            on_ranks(_run, world_size, left, str(launch))
        except Exception as error:
            culprit = _first_unfinished(launch, world_size, len(left))
            failures[left[culprit]] = _text(error)
            left = left[culprit + 1 :]
        else:
            return failures
    return failures


def _run(names: list[Name], launch: str) -> None:
    """Run cases one after the other on this rank, in step with the other ranks."""
    diary = Path(launch, f"finished-by-{ddpkit.get_rank()}")
    diary.touch()
    for number, (module, name) in enumerate(names):
        test = getattr(importlib.import_module(module), name)
        _call(test.case, Path(launch, f"case-{number}"))
        with diary.open("a") as file:
            file.write(f"{name}\n")
        ddpkit.barrier(f"after {name}")


def _first_unfinished(launch: Path, world_size: int, cases: int) -> int:
    """Return the place of the case that a rank was in when the launch failed."""
    finished = []
    for rank in range(world_size):
        diary = launch / f"finished-by-{rank}"
        finished.append(len(diary.read_text().splitlines()) if diary.exists() else 0)
    return min(*finished, cases - 1)


def _text(error: BaseException) -> str:
    """Describe a rank's failure by its traceback there."""
    cause: Any = error.__cause__ if isinstance(error.__cause__, ddpkit.PeerError) else error
    traceback = getattr(cause, "traceback", "")
    return f"{type(error).__name__}: {error}\n\nOn rank {getattr(cause, 'rank', '?')}:\n{traceback}"
