"""Workers of a loader, and the signals that go to all processes of a rank that stops in good order."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from itertools import chain
from typing import Any

import pytest
from conftest import on_ranks
from processes import launch

import ddpkit

SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]


class Slow:
    """Numbers, of which each takes a while."""

    def __len__(self) -> int:
        return 600

    def __getitem__(self, index: int) -> int:
        time.sleep(0.002)
        return index


def send(number: int, *pids: int | None) -> None:
    """Send a signal from a process of its own: torch's workers know whether their parent has sent it."""
    subprocess.run(["kill", f"-{number}", *map(str, pids)], check=True)


def train(number: int, options: dict[str, Any]) -> tuple[int, list[int]]:
    """Train until all stop; return the step, and the samples that this rank has seen."""
    seen = []
    loader = ddpkit.make_loader(Slow(), 4, shuffle=False, num_workers=2, **options)
    with ddpkit.stopping() as stop:
        for step, batch in enumerate(loader, 1):
            seen += batch.tolist()
            if ddpkit.get_rank() == 0 and step == 8:
                send(number, os.getpid(), *[worker.pid for worker in multiprocessing.active_children()])
            if step > 8:
                time.sleep(0.02)
            if stop.now():
                break
    return step, seen


@pytest.mark.parametrize(
    ("options", "number", "nprocs"),
    [
        pytest.param({}, signal.SIGTERM, 2, id="fork"),
        pytest.param({}, signal.SIGUSR1, 2, id="fork, asked by USR1"),
        pytest.param({}, signal.SIGINT, 1, id="fork, from a terminal"),
        pytest.param({"persistent_workers": True}, signal.SIGTERM, 1, id="persistent"),
        pytest.param({"persistent_workers": True}, signal.SIGINT, 2, id="persistent, from a terminal"),
        *[
            pytest.param({"multiprocessing_context": "spawn"}, number, 1 + index % 2, marks=pytest.mark.storm)
            for index, number in enumerate(SIGNALS)
        ],
    ],
)
def test_workers_go_on_until_all_ranks_stop(options: dict[str, Any], number: int, nprocs: int) -> None:
    results = on_ranks(train, nprocs, number, options, timeout=120)
    steps = {step for step, _ in results}
    assert len(steps) == 1
    step = steps.pop()
    assert step >= 8
    assert sorted(chain(*[seen for _, seen in results])) == list(range(4 * step * nprocs))


def loop_whose_worker_ends() -> bool:
    """Return whether the loop ends with an error: torch's, or of the connection if the worker was sending a batch."""
    batches = iter(ddpkit.make_loader(Slow(), 4, num_workers=2))
    next(batches)
    try:  # torch's handler of the end of children raises wherever that finds this process
        send(signal.SIGTERM, multiprocessing.active_children()[0].pid)
        list(batches)
    except (RuntimeError, OSError):
        return True
    return False


def test_without_stopping_they_end_as_ever() -> None:
    assert on_ranks(loop_whose_worker_ends, 1, timeout=60) == [True]


STUCK = """
import os, signal, sys, time, ddpkit, torch
torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.5  # seconds, not 5, for each worker to end by itself

class Numbers:
    def __len__(self):
        return 100

    def __getitem__(self, index):
        if index == 50:
            open(sys.argv[1], "w").close()
            time.sleep(600)
        return index

with ddpkit.stopping() as stop:
    batches = iter(ddpkit.make_loader(Numbers(), 10, shuffle=False, num_workers=2, prefetch_factor=4))
    next(batches)
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.01)
{end}
print("end", flush=True)
"""


@pytest.mark.parametrize("end", ["", "del batches"], ids=["left to the exit", "dropped"])
def test_a_stuck_worker_does_not_outlive_its_rank(end: str, tmp_path: Any) -> None:
    ended = launch([sys.executable, "-c", STUCK.format(end=end), str(tmp_path / "stuck")], timeout=60)[0]
    assert (ended.code, ended.output) == (0, "end\n")
