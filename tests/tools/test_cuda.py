"""Scripts that ask for CUDA on a machine without GPUs, and that start their ranks themselves."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from processes import ROOT, platform_env, run

from ddpkit.tools import cli
from ddpkit.tools.joining import join_here
from ddpkit.tools.recorder import Recorder

CORRECT = ROOT / "tests/check/correct"
LATE = 600.0
ASKING = """
torch.zeros(3, device="cuda:0")
torch.randn(3, device="cuda")
torch.randint(3, (3,), device=torch.device("cuda", 1))
torch.randperm(3, device="cuda")
torch.tensor([1, 2], device="cuda")
torch.tensor(1.0, device=0)
torch.full((3,), 2.0, device=1)
torch.full(size=(3,), fill_value=2.0, device="cuda")
torch.zeros_like(rows, device="cuda")
rows.new_zeros(3, device="cuda")
rows.to("cuda")
rows.to(1)
rows.to("cuda:1", torch.float64, non_blocking=True)
rows.cuda(non_blocking=True)
rows.pin_memory().cuda(1)
nn.Linear(4, 2).cuda()(rows)
nn.Linear(4, 2).to(0)(rows)
nn.Linear(4, 2, device="cuda")(rows)
nn.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(4)).to(device=1)(rows)
nn.utils.rnn.pack_sequence([rows]).to("cuda").data
torch.sparse_coo_tensor([[0], [1]], [1.0], (2, 2)).cuda()
torch.load(saved, map_location="cuda:0", weights_only=True)
"""


def ask(env: dict[str, str], folder: Path) -> None:
    """Be a script that asks for CUDA."""
    import torch
    from torch import nn

    Recorder(os.open(folder / "records", os.O_WRONLY | os.O_CREAT))
    join_here()
    rows = torch.ones(3, 4)
    assert torch.tensor([1], device="cpu").device.type == rows.to("cpu").device.type == "cpu"
    assert rows.to("cpu") is rows
    assert not (folder / "records").read_text()
    torch.save(rows, folder / "saved.pt")
    names = {"torch": torch, "nn": nn, "rows": rows, "saved": folder / "saved.pt"}
    for line in ASKING.split("\n")[1:-1]:
        assert eval(line, names).device.type == "cpu", line
    copied = rows.cuda()
    copied += 1
    assert rows.eq(1).all()  # the samples stay as they are, as beside a GPU
    assert copied.cuda() is copied.to(1) is copied
    made = torch.zeros(2, device="cuda")
    assert made.to("cuda") is made
    for kept in (made.cpu(), made.to("cpu"), made.to(device="cpu")):
        made += 1
        assert kept.sum() < made.sum()
    torch.cuda.set_device(1)
    assert torch.cuda.is_available() is bool(env)
    assert torch.cuda.device_count() == 2 * len(env)
    event = torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(torch.cuda.Stream()), torch.autocast("cuda", dtype=torch.float16):
        event.record()
        assert nn.Linear(4, 2)(rows).dtype is torch.float32
    assert event.elapsed_time(event) == 0.0
    assert len((folder / "records").read_text().splitlines()) == 1


@pytest.mark.parametrize("env", [{}, {"CUDA_VISIBLE_DEVICES": "0,1"}], ids=["hidden", "as if there"])
def test_what_is_asked_of_cuda_is_done_on_the_cpu(env: dict[str, str], tmp_path: Path) -> None:
    hidden = {"CUDA_VISIBLE_DEVICES": ""} | env
    (ended,) = run(ask, [platform_env(0, 2, 1) | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"} | hidden], env, tmp_path)
    assert ended.code == 0, ended.output


def begin(words: list[str], folder: str) -> None:
    """Be the command line, in a process that has imported torch."""
    os.chdir(folder)
    sys.path[0] = folder
    sys.exit(cli.main(words))


RESUMES = """
import os, torch
start = torch.load("last.pt", map_location="cuda", weights_only=True) if os.path.exists("last.pt") else {"step": 0}
model = torch.nn.Linear(2, 1).cuda()
torch.nn.init.ones_(model.weight)
model.load_state_dict(start.get("model", model.state_dict()))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(start["step"], 5):
    optimizer.zero_grad()
    model(torch.ones(3, 2, device="cuda")).sum().backward()
    optimizer.step()
    if os.environ["RANK"] == "0":
        torch.save({"step": step + 1, "model": model.state_dict()}, "new.pt")
        os.replace("new.pt", "last.pt")
"""


@pytest.mark.parametrize("tool", ["check", "parity", pytest.param("rehearse", marks=pytest.mark.storm)])
def test_the_first_line_says_that_the_cpu_stands_for_cuda(tool: str, tmp_path: Path) -> None:
    script = CORRECT / "hard_coded_cuda.py"
    words = [str(script)]
    if tool == "rehearse":
        script = tmp_path / "resumes.py"
        script.write_text(RESUMES)
        words = ["--trials", "1", "--kinds", "kill-all", str(script)]
    (ended,) = run(begin, [{"OMP_NUM_THREADS": "1"}], [tool, "--device", "cuda", *words], str(tmp_path), timeout=LATE)
    (title,) = [line for line in ended.output.splitlines() if "CUDA on the CPU" in line]
    assert title.startswith(f"ddpkit {tool}: ")
    assert ended.code == 0, ended.output


@pytest.mark.parametrize("name", ["spawned_ranks", "started_ranks"])
def test_ranks_that_a_script_starts_itself_are_those_of_the_tool(name: str, tmp_path: Path) -> None:
    script = str(CORRECT / f"{name}.py")
    reports = []
    for ranks in ("2", "3"):
        words = ["check", "--json", "-n", ranks, script]
        (ended,) = run(begin, [{"OMP_NUM_THREADS": "1"}], words, str(tmp_path), timeout=LATE)
        reports.append(json.loads(ended.output[ended.output.index("{\n") :]))
    right, other = reports
    assert (right["ranks"], right["findings"], right["trouble"]) == (2, [], "")
    assert right["steps"] > 5
    assert "the script wants 2 ranks, and runs on 3: see -n" in other["trouble"]
