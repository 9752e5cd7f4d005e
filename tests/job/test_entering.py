"""Every collective makes sure that this rank may call it, before it asks whether there are peers."""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ddpkit
from ddpkit.errors import DdpkitError
from ddpkit.job import lifecycle

TENSOR = torch.ones(2)


def _model() -> nn.Module:
    model = nn.Linear(2, 1)
    model(TENSOR).backward()
    return model


def _run(block: AbstractContextManager[Any]) -> None:
    with block:
        pass


def _save(wait: bool) -> None:
    ddpkit.Checkpointer(Path("states")).save(1, wait=wait, model=_model())


def _exact() -> None:
    for batch in ddpkit.make_micro_batch_loader([TENSOR] * 4, 2, 1):
        _run(ddpkit.exact_gradients(batch, _model()))


def _stop() -> None:
    with ddpkit.stopping() as stop:
        stop.now()


CALLS: dict[str, Callable[[], Any]] = {
    "set_data_parallel": lambda: ddpkit.set_data_parallel(None),
    "barrier": ddpkit.barrier,
    "main_process_first": lambda: _run(ddpkit.main_process_first()),
    "run_on_main": lambda: ddpkit.run_on_main(list),
    "together": lambda: _run(ddpkit.together()),
    "stop_together": lambda: ddpkit.stop_together(False),
    "all_reduce_mean": lambda: ddpkit.all_reduce_mean(TENSOR, check=False),
    "all_reduce": lambda: ddpkit.all_reduce(TENSOR, check=False),
    "all_gather": lambda: ddpkit.all_gather(TENSOR),
    "all_gather_object": lambda: ddpkit.all_gather_object(1),
    "broadcast": lambda: ddpkit.broadcast(1),
    "gather_batch": lambda: ddpkit.gather_batch(TENSOR, check=False),
    "gather_exact": lambda: ddpkit.gather_exact(TENSOR, [0, 1], 2),
    "wrap_model": lambda: ddpkit.wrap_model(nn.Linear(2, 1)),
    "global_mean": lambda: ddpkit.global_mean(TENSOR.sum(), 2),
    "average_gradients": lambda: ddpkit.average_gradients(_model()),
    "averaging": lambda: _run(ddpkit.averaging(_model())),
    "exact_gradients": _exact,
    "check_replicas": lambda: ddpkit.check_replicas(_model()),
    "sync_buffers": lambda: ddpkit.sync_buffers(nn.BatchNorm1d(2)),
    "StepGuard": lambda: _run(ddpkit.StepGuard(_model())),
    "find_batch_size": lambda: ddpkit.find_batch_size(lambda size: None, 2, _model()),
    "Checkpointer.save": lambda: _save(True),
    "Checkpointer.save(wait=False)": lambda: _save(False),
    "Checkpointer.load_latest": lambda: ddpkit.Checkpointer(Path("states")).load_latest(model=_model()),
    "stopping": _stop,
}
JOINS = {"setup", "distributed", "survive"}  # these join themselves


def test_all_that_communicate_are_called_here() -> None:
    names = set()
    for name in ddpkit.__all__:
        summary = (inspect.getdoc(getattr(ddpkit, name)) or "").partition("\n\n")[0]
        if "Collective" in summary:
            names.add(name)
    assert names - JOINS <= set(CALLS)


@pytest.mark.parametrize("name", CALLS)
def test_a_collective_is_refused_where_ranks_do_not_communicate(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with lifecycle.no_collectives("a test"), pytest.raises(DdpkitError, match="inside a block of a test"):
        CALLS[name]()
