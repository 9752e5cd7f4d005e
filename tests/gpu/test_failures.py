"""Ranks that fail while others wait for the device, or for them."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from starting import TORCHRUN, first_of, on_a_gpu_each, on_one_device, run, several, wait_for

import ddpkit
from ddpkit.testing import on_ranks

SECONDS = 3.0  # of work for the device
SIZES = {"cuda": 8192, "cpu": 1024}  # of the square matrices that keep it busy, some milliseconds each


def keep_busy(seconds: float) -> None:
    """Give the device work for about so many seconds, and wait until it is done."""
    device = ddpkit.get_device()
    matrix = torch.eye(SIZES[device.type], device=device)
    start = time.perf_counter()
    for _ in range(3):
        matrix = matrix @ matrix
    wait_for(device)
    each = (time.perf_counter() - start) / 3
    for _ in range(int(seconds / each)):
        matrix = matrix @ matrix
    wait_for(device)


def wait_in_collective() -> None:
    """Wait for the other ranks with a tensor of the device."""
    value = torch.ones(1000, device=ddpkit.get_device())
    with ddpkit.peer_errors():
        dist.all_reduce(value)
        value.sum().item()


def fail_on_last_rank(fail: Callable[[], Any], others: Callable[[], Any], folder: Path) -> None:
    """Fail on the last rank, and write down what each other rank hears of it."""
    keep_busy(0.0)  # so that there is a context on the device
    ddpkit.barrier()
    if ddpkit.get_rank() == ddpkit.get_world_size() - 1:
        time.sleep(0.5)  # the others have begun by now; if not, they hear of it all the same
        fail()
    try:
        while True:
            others()
    except ddpkit.PeerError as error:
        (folder / f"heard{ddpkit.get_rank()}").write_text(f"{error.rank} {error.error_type}")
        raise


def heard(folder: Path) -> list[str]:
    return [file.read_text() for file in sorted(folder.glob("heard*"))]


def raise_error() -> None:
    raise ValueError("shard 7 is broken")


def be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def work() -> None:
    keep_busy(SECONDS)


def test_a_rank_whose_kernels_run_hears_of_a_failure(device: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="shard 7 is broken"):
        on_one_device(fail_on_last_rank, 2, device, raise_error, work, tmp_path)
    assert heard(tmp_path) == ["1 ValueError"]


def test_a_rank_that_waits_in_a_collective_hears_of_a_failure(device: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="shard 7 is broken"):
        on_one_device(fail_on_last_rank, 2, device, raise_error, wait_in_collective, tmp_path)
    assert heard(tmp_path) == ["1 ValueError"]


def test_a_rank_that_waits_in_a_collective_hears_of_a_killed_one(device: str, tmp_path: Path) -> None:
    with pytest.raises(ddpkit.PeerError, match="SIGKILL"):
        on_one_device(fail_on_last_rank, 2, device, be_killed, wait_in_collective, tmp_path)
    assert heard(tmp_path) == ["1 lost"]


def run_out_of_memory() -> None:
    torch.empty(2**50, device=ddpkit.get_device())


@pytest.mark.cuda
def test_a_rank_that_runs_out_of_memory_is_named(device: str, tmp_path: Path) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        on_one_device(fail_on_last_rank, 2, device, run_out_of_memory, wait_in_collective, tmp_path)
    assert heard(tmp_path) == ["1 OutOfMemoryError"]


def read_past_the_end() -> None:
    values = torch.ones(3, device=ddpkit.get_device())
    values[torch.tensor([10], device=values.device)].sum().item()


@pytest.mark.cuda
def test_a_rank_whose_kernel_fails_is_named(device: str, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="device-side assert"):
        on_one_device(fail_on_last_rank, 2, device, read_past_the_end, wait_in_collective, tmp_path)
    assert len(heard(tmp_path)) == 1


@pytest.mark.gpus(2)
def test_ranks_with_kernels_on_other_devices_hear_of_a_failure(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="shard 7 is broken"):
        on_a_gpu_each(fail_on_last_rank, raise_error, work, tmp_path)
    assert set(heard(tmp_path)) == {f"{several() - 1} ValueError"}


PROGRAM = """
import time, torch, torch.distributed as dist, ddpkit

with ddpkit.distributed() as job:
    value = torch.ones(1000, device=job.device)
    dist.all_reduce(value)
    torch.cuda.is_available() and torch.cuda.synchronize()
    if job.rank == job.world_size - 1:
        time.sleep(1)
        raise ValueError("shard 7 is broken")
    dist.all_reduce(value)
    value.sum().item()  # waits for a kernel of NCCL's that never ends
"""


@pytest.mark.gpus(2)
def test_a_collective_between_devices_ends_when_a_rank_fails(tmp_path: Path, record_property: Any) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [*TORCHRUN, f"--nproc_per_node={several()}", str(tmp_path / "program.py")]
    start = time.monotonic()
    with pytest.raises(AssertionError, match="ValueError: shard 7 is broken") as caught:
        run(command, timeout=60.0)
    assert "not finished" not in str(caught.value)
    record_property("measured", f"all had ended after {time.monotonic() - start:.0f} s")


def test_a_failure_ends_one_rank_over_nccl(tmp_path: Path) -> None:
    program = PROGRAM.replace("time.sleep(1)", "time.sleep(0)")
    (tmp_path / "program.py").write_text(program)
    with pytest.raises(AssertionError, match="ValueError: shard 7 is broken") as caught:
        run([*TORCHRUN, "--nproc_per_node=1", str(tmp_path / "program.py")], timeout=60.0)
    assert "not finished" not in str(caught.value)


def test_an_interpreter_that_never_calls_teardown_ends(device: str) -> None:
    program = "import torch, ddpkit; job = ddpkit.setup(); torch.ones(3, device=job.device).sum().item()"
    run([*TORCHRUN, "--nproc_per_node=1", "--no-python", sys.executable, "-c", program], timeout=60.0)


def survive_a_kill(device: str, folder: Path) -> None:
    """Train on; the last rank is killed in the fourth step. Write down with how many ranks each step was made."""
    rank = int(os.environ["RANK"])
    last = int(os.environ["WORLD_SIZE"]) - 1
    net = torch.nn.Linear(4, 1).to(device)
    optimizer = torch.optim.AdamW(net.parameters())
    sizes = []
    for attempt in ddpkit.survive(net, optimizer, device=device):
        with attempt as context:
            wrapped = ddpkit.wrap_model(net)
            while attempt.steps < 6:
                if attempt.steps == 3 and rank == last:
                    be_killed()
                wrapped(torch.ones(2, 4, device=device)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                attempt.commit()
                sizes.append(context.world_size)
    (folder / f"sizes{rank}").write_text(f"{sizes}")


def test_the_ranks_that_are_left_go_on_after_a_kill(device: str, tmp_path: Path) -> None:
    with pytest.raises(ddpkit.PeerError, match="SIGKILL"):
        on_ranks(survive_a_kill, 3, first_of(device), tmp_path, join=False)
    for rank in range(2):
        assert (tmp_path / f"sizes{rank}").read_text() == "[3, 3, 3, 2, 2, 2]"
