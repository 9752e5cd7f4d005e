"""The example as people run it: by `python`, by torchrun, and by hand with only RANK, WORLD_SIZE and MASTER_*."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import on_ranks
from processes import CLEAN, ROOT, TORCHRUN, free_port, platform_env
from signals import signalled

import ddpkit

pytestmark = pytest.mark.storm  # it trains again and again
DIGITS = str(ROOT / "examples" / "digits.py")
ENV = CLEAN | {"OMP_NUM_THREADS": "1"}


def run_all(commands: list[list[str]], envs: list[dict[str, str]]) -> list[str]:
    """Runs the commands side by side; what each of them printed."""
    crew = [
        subprocess.Popen(command, env=ENV | env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for command, env in zip(commands, envs, strict=True)
    ]
    try:
        outputs = [process.communicate(timeout=900)[0] for process in crew]
    finally:
        for process in crew:
            process.kill()
            process.wait()
    for process, output in zip(crew, outputs, strict=True):
        assert process.returncode == 0, output
    return outputs


def by_hand(world_size: int, *flags: str) -> list[str]:
    envs = [platform_env(rank, world_size, port) for port in [free_port()] for rank in range(world_size)]
    return run_all([[sys.executable, DIGITS, *flags]] * world_size, envs)


def torchrun(world_size: int, *flags: str) -> str:
    return run_all([[*TORCHRUN, f"--nproc_per_node={world_size}", DIGITS, *flags]], [{}])[0]


def epochs(output: str) -> dict[int, tuple[float, int]]:
    """Training loss and number of test images read right, by epoch."""
    lines = re.findall(r"^epoch (\d+): training loss (\S+), test: (\d+) of 360 right$", output, re.MULTILINE)
    return {int(epoch): (float(loss), int(right)) for epoch, loss, right in lines}


def test_it_reads_the_digits_however_it_is_launched_interrupted_and_resumed(tmp_path: Path) -> None:
    alone, moved = str(tmp_path / "alone"), str(tmp_path / "moved")
    whole = epochs(run_all([[sys.executable, DIGITS, "--folder", alone]], [{}])[0])
    assert len(whole) == 20
    assert whole[19][1] >= 0.985 * 360

    main, other = by_hand(2, "--folder", moved, "--stop-after", "37")  # 15 steps are an epoch
    first = epochs(main)
    assert "world size: 2" in main and "stopped after step 37, in epoch 2" in main
    assert epochs(other) == {} and "stopped" not in other
    resumed = torchrun(3, "--folder", moved, "--resume")
    assert resumed.count("Saved on 2 ranks (cpu), loaded on 3 (cpu)") == 1
    rest = epochs(resumed)
    assert [*first, *rest] == [*whole]
    assert abs(rest[19][1] - whole[19][1]) <= 2
    for epoch, (loss, _) in (first | rest).items():
        if epoch != 2:  # the program that resumed saw only the end of it
            assert loss == pytest.approx(whole[epoch][0], abs=1e-3)
    assert read_accuracy(moved) == pytest.approx([right / 360 for _, right in (first | rest).values()])


def read_accuracy(folder: str) -> list[float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return [event.value for event in EventAccumulator(folder).Reload().Scalars("test/accuracy")]


def train_here(folder: str, *flags: str) -> list[float]:
    spec = importlib.util.spec_from_file_location("digits", DIGITS)
    digits: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(digits)
    # 17 steps an epoch and an incomplete one, of micro-batches of 41 and 2 images: three ranks get padding
    sys.argv = f"digits.py --folder {folder} --epochs 2 --batch-size 82 --accumulate 2".split() + list(flags)
    with ddpkit.stopping() as stop:
        digits.main(digits.read_settings(), ddpkit.setup(), stop)
    saved = ddpkit.Checkpointer(folder).load_latest()
    return torch.cat([tensor.flatten() for tensor in saved["model"].values()]).tolist()


def train_until_signalled(folder: str) -> None:
    with signalled(rank=2, step=8):
        train_here(folder)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    (weights,) = on_ranks(train_here, 1, str(tmp_path_factory.mktemp("alone")))
    return weights


def sha_of(output: str) -> str:
    (found,) = re.findall(r"^SHA-256 of weights and optimizer: (\w{64})$", output, re.MULTILINE)
    return found


@pytest.fixture(scope="module")
def deterministic(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("deterministic"))
    output = run_all([[sys.executable, DIGITS, "--folder", folder, "--deterministic", "--epochs", "5"]], [{}])[0]
    assert epochs(output)[4][1] >= 0.95 * 360
    return sha_of(output)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_a_deterministic_run_has_the_same_bits_on_any_number_of_ranks(
    ranks: int, deterministic: str, tmp_path: Path
) -> None:
    output = torchrun(ranks, "--folder", str(tmp_path), "--deterministic", "--epochs", "5")
    assert sha_of(output) == deterministic


def test_a_deterministic_run_that_is_stopped_has_the_same_bits_on_other_ranks(
    deterministic: str, tmp_path: Path
) -> None:
    flags = ["--folder", str(tmp_path), "--deterministic", "--epochs", "5", "--resume"]
    torchrun(3, *flags, "--stop-after", "20")
    torchrun(2, *flags, "--stop-after", "37")
    assert sha_of(run_all([[sys.executable, DIGITS, *flags]], [{}])[0]) == deterministic


@pytest.mark.parametrize("stopped_by", ["a flag", "a signal"])
def test_three_ranks_and_then_two_give_what_one_gives(stopped_by: str, alone: list[float], tmp_path: Path) -> None:
    if stopped_by == "a flag":
        on_ranks(train_here, 3, str(tmp_path), "--stop-after", "8")
    else:
        on_ranks(train_until_signalled, 3, str(tmp_path))
    (stopped,) = ddpkit.Checkpointer(tmp_path).steps()
    assert 8 <= stopped < 36
    for mine in on_ranks(train_here, 2, str(tmp_path), "--resume"):
        assert mine == pytest.approx(alone, abs=1e-5)
    assert ddpkit.Checkpointer(tmp_path).steps()[-1] == 36
