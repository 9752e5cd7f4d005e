"""Which device, backend and ranks there are; the doctor."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from starting import TORCHRUN, Crew, on_a_gpu_each, on_one_device, run, several

import ddpkit
from ddpkit.testing import on_ranks

DDPKIT = ["-m", "ddpkit"]


def describe() -> tuple[str, str | None, int]:
    """Return device and backend of this rank, and the current device."""
    context = ddpkit.setup()
    current = torch.cuda.current_device() if context.device.type == "cuda" else -1
    return str(context.device), context.backend, current


def test_one_rank_has_a_group_over_nccl(device: str) -> None:
    expected = {"cuda": ("cuda:0", "cpu:gloo,cuda:nccl", 0), "cpu": ("cpu", "gloo", -1)}
    assert on_one_device(describe, 1, device) == [expected[device]]


def use_torch() -> list[float]:
    """Return sums by torch's own collectives, on the device and on the CPU."""
    on_device = torch.ones(3, device=ddpkit.get_device())
    on_cpu = torch.ones(3)
    dist.all_reduce(on_device)
    dist.all_reduce(on_cpu)
    ddpkit.barrier()
    return [on_device.sum().item(), on_cpu.sum().item()]


def test_the_group_carries_tensors_of_the_device_and_of_the_cpu(crew: Crew) -> None:
    assert crew(use_torch) == [[3.0 * crew.size] * 2] * crew.size


def test_two_ranks_that_name_one_device_share_it_over_gloo(device: str) -> None:
    found = on_one_device(describe, 2, device)
    assert [backend for _, backend, _ in found] == ["gloo"] * 2
    assert found[0] == found[1]


def visible() -> list[str]:
    """Name the GPUs that this run sees, as CUDA_VISIBLE_DEVICES does."""
    count = torch.cuda.device_count()
    names = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    return names.split(",")[:count]


def join_seeing(gpus: list[str]) -> tuple[str, str | None, int, float]:
    """Join with only this rank's GPU visible; it has to be said before anything touches one."""
    os.environ["CUDA_VISIBLE_DEVICES"] = gpus[int(os.environ["RANK"])]
    with ddpkit.distributed():
        mean = ddpkit.all_reduce_mean(torch.full((2000,), float(ddpkit.get_rank()), device=ddpkit.get_device()))
        return (*describe(), mean[-1].item())


@pytest.mark.cuda
def test_two_ranks_that_did_not_ask_to_share_a_gpu_are_refused() -> None:
    with pytest.raises(ddpkit.LaunchError, match="see the same accelerator: 2 ranks, 1 cuda device"):
        on_ranks(join_seeing, 2, visible()[:1] * 2, join=False, fresh=True)


def join_on(device: str) -> str:
    with ddpkit.distributed(device=device) as context:
        return str(context.device)


@pytest.mark.cuda
def test_a_gpu_that_is_not_there_is_refused_on_every_rank() -> None:
    count = torch.cuda.device_count()
    with pytest.raises(ddpkit.LaunchError, match=f"rank 0: cuda:{count} was requested .*; rank 1: cuda:{count} was"):
        on_ranks(join_on, 2, f"cuda:{count}", join=False)


def test_a_device_without_an_index_is_that_of_the_local_rank(device: str) -> None:
    assert on_ranks(join_on, 1, device, join=False) == [{"cuda": "cuda:0", "cpu": "cpu"}[device]]


@pytest.mark.cuda
@pytest.mark.gpus(2)
def test_ranks_that_see_only_a_gpu_of_their_own_have_nccl() -> None:
    found = on_ranks(join_seeing, 2, visible()[:2], join=False, fresh=True)
    assert found == [("cuda:0", "cpu:gloo,cuda:nccl", 0, 0.5)] * 2


@pytest.mark.cuda
@pytest.mark.gpus(2)
def test_each_rank_has_the_gpu_of_its_local_rank() -> None:
    expected = [(f"cuda:{rank}", "cpu:gloo,cuda:nccl", rank) for rank in range(several())]
    assert on_a_gpu_each(describe) == expected


@pytest.mark.cuda
@pytest.mark.gpus(2)
def test_the_gpu_that_one_process_names_becomes_the_current_one() -> None:
    program = "import ddpkit, torch; ddpkit.setup(device='cuda:1'); print(torch.cuda.current_device())"
    assert run([sys.executable, "-c", program]).split()[-1] == "1"


def ask_before_setup() -> tuple[str, str]:
    """Return the device that is announced before `setup()`, and the one that it binds."""
    before = str(ddpkit.get_device())
    with ddpkit.distributed() as context:
        return before, str(context.device)


def test_the_device_is_known_before_setup(device: str) -> None:
    ((before, after),) = on_ranks(ask_before_setup, 1, join=False)
    assert before == after
    assert after.startswith(device)


def test_a_rank_that_the_plugin_for_pytest_has_joined_has_the_device(device: str) -> None:
    ((found, _, _),) = on_ranks(describe, 1)
    assert found.startswith(device)


def read_json(output: str) -> Any:
    """Read the JSON object among what a program has printed."""
    found, _ = json.JSONDecoder().raw_decode(output[output.index("{\n") :])
    return found


def examine(command: list[str]) -> dict[str, Any]:
    """Return what the doctor found, by name; every check has to be fine but for warnings."""
    report = read_json(run([*command, *DDPKIT, "doctor", "--json"]))
    checks = {check["name"]: check for check in report["checks"]}
    assert not [name for name, check in checks.items() if check["status"] == "failed"]
    return checks


def test_the_doctor_lets_two_processes_meet_on_the_device(device: str) -> None:
    checks = examine([sys.executable])
    assert f"x {device}, backend" in checks["devices"]["found"] or device == "cpu"
    assert "the mean of the ranks' numbers is 0.5" in checks["collective"]["found"]


@pytest.mark.parametrize("nprocs", [1, pytest.param(several(), marks=pytest.mark.gpus(2))])
def test_the_doctor_examines_a_job(nprocs: int, device: str) -> None:
    found = examine([*TORCHRUN, f"--nproc_per_node={nprocs}"])["join"]["found"]
    assert ("nccl" in found) == (device == "cuda")
    assert nprocs == 1 or f"{nprocs} ranks" in found


SCRIPT = """
import sys, torch, ddpkit
from pathlib import Path
from torch import nn

torch.manual_seed(0)
folder = Path(sys.argv[1])
device = "cuda:0" if torch.cuda.is_available() else "cpu"
with ddpkit.distributed(device=device):
    net = ddpkit.wrap_model(nn.Linear(4, 1).double())
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    loader = ddpkit.make_loader(torch.randn(120, 4, dtype=torch.float64), 6, seed=3)
    parts = {"model": net, "optimizer": optimizer, "loader": loader}
    checkpoints = ddpkit.Checkpointer(folder)
    found = checkpoints.load_latest(**parts)
    step = found["step"] if found else 0
    for epoch in loader.epochs(4):
        for inputs in loader:
            loss = net(inputs.to(device)).square().sum()
            ddpkit.global_mean(loss, len(inputs)).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % 10 == 0:
                checkpoints.save(step, **parts)
"""


def test_a_script_on_the_device_is_found_correct(device: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    program = [str(tmp_path / "script.py"), str(tmp_path / "run")]
    output = run([sys.executable, *DDPKIT, "check", "--device", device, *program])
    assert "nothing" in output


def test_a_script_on_the_device_is_rehearsed(device: str, tmp_path: Path, record_property: Any) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    flags = ["--device", device, "-n", "2", "--trials", "2"]
    program = [str(tmp_path / "script.py"), "{folder}/run"]
    output = run([sys.executable, *DDPKIT, "rehearse", *flags, *program], timeout=150.0)
    last = output.strip().splitlines()[-1]
    assert "2 trials ended like the undisturbed run" in last
    record_property("measured", last)
