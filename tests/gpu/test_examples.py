"""The examples, on small budgets: alone, under torchrun on one rank, and on a rank for each GPU."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
from starting import ROOT, TORCHRUN, run, several

EXAMPLES = ROOT / "examples"
DIGITS = ("sklearn", "tensorboard", "tqdm")
SNAKES = ("numba", "tensorboard", "tqdm", "PIL")
ROBOT = ("gymnasium_robotics", "mujoco", "pydantic", "tensorboard", "tqdm", "PIL", "matplotlib")
ON_ALL = pytest.param(several(), marks=pytest.mark.gpus(2))
VIDEO = ("pydantic", "tensorboard", "tqdm", "PIL")
IN_HALF_PRECISION = pytest.mark.parametrize(
    ("nprocs", "amp"), [(0, "fp16"), (1, "bf16"), pytest.param(several(), "fp16", marks=pytest.mark.gpus(2))]
)


def start_with(nprocs: int) -> list[str]:
    """Begin the command that starts so many ranks; none is one process without a launcher."""
    if not nprocs:
        return [sys.executable]
    return [*TORCHRUN, f"--nproc_per_node={nprocs}"]


@pytest.mark.needs(*DIGITS)
@pytest.mark.parametrize("nprocs", [0, 1, ON_ALL])
def test_the_digits_are_trained_and_resumed(nprocs: int, device: str, tmp_path: Path) -> None:
    program = [*start_with(nprocs), str(EXAMPLES / "digits.py"), "--folder", str(tmp_path)]
    first = run([*program, "--epochs", "2", "--stop-after", "20"])
    assert "stopped after step 20, in epoch 1" in first
    assert f"device: {device}" in first
    resumed = run([*program, "--epochs", "2", "--resume"])
    assert "resumed after step 20" in resumed
    assert "epoch 1: training loss" in resumed


@pytest.mark.parametrize("nprocs", [1, ON_ALL])
def test_the_gpt_is_trained_in_parts_and_resumed_whole(nprocs: int, device: str, tmp_path: Path) -> None:
    """Begin in parts, and go on with the whole model on each rank."""
    flags = ["--layers", "1", "--width", "32", "--generate", "10", "--log-every", "5", "--folder", str(tmp_path)]
    program = [*start_with(nprocs), str(EXAMPLES / "gpt.py"), *flags]
    first = run([*program, "--parallel", "fsdp", "--bf16", "--stop-after", "10"])
    assert "step 10: loss" in first
    assert f"device: {device}" in first
    resumed = run([*program, "--resume", "--stop-after", "20"])
    assert "training from step 10 to " in resumed
    assert "step 20: loss" in resumed


@pytest.mark.needs(*SNAKES)
@pytest.mark.parametrize("nprocs", [0, 1, ON_ALL])
def test_the_snakes_are_trained(nprocs: int, device: str, tmp_path: Path) -> None:
    flags = "--boards 8 --hidden 16 --batch_size 32 --episode_length 20 --total_episodes 24"
    flags += f" --eval_games 4 --log_interval 12 --save_interval 24 --eval_interval 24 --runs_folder {tmp_path}"
    command = [*start_with(nprocs), "rl_trainer/main_ddp.py", *flags.split()]
    output = run(command, timeout=150.0, folder=EXAMPLES / "snakes_ddpg")
    assert "\ta_loss " in output
    assert f"device: {device}" in output


@pytest.mark.needs(*ROBOT)
@IN_HALF_PRECISION
def test_the_robot_is_trained(nprocs: int, amp: str, device: str, tmp_path: Path) -> None:
    where = EXAMPLES / "diffusion_policy"
    collect = ["-m", "robot.collect", "--env", "FetchReach-v4", "--episodes", "4", "--horizon", "12"]
    run([sys.executable, *collect, "--folder", str(tmp_path / "data")], folder=where)
    settings = [
        "experiment.epoch_every_n_steps=4",
        "train.batch_size=8",
        "algo.unet.down_dims=[8, 16]",
        "algo.unet.n_groups=4",
        "algo.unet.diffusion_step_embed_dim=8",
        f"train.amp={amp}",
        "train.pin_memory=true",
        "train.num_data_workers=1",
        "train.num_epochs=2",
        "experiment.rollout.n=2",
        "experiment.rollout.horizon=12",
        f"train.data_path={tmp_path / 'data'}",
        f"train.output_dir={tmp_path / 'runs'}",
    ]
    output = run([*start_with(nprocs), "-m", "robot.train", *settings], timeout=150.0, folder=where)
    assert "Train Epoch 2: loss" in output
    assert f"rank 0: {device}" in output


@pytest.mark.needs(*VIDEO)
@IN_HALF_PRECISION
def test_the_video_network_is_trained_and_tested(nprocs: int, amp: str, device: str, tmp_path: Path) -> None:
    video = importlib.import_module("video")  # makes clips; it needs the packages
    changes = {"train__amp": amp, "train__total_iter": 4, "datasets__train__dataloader_pin_memory": True}
    options = video.options(video.write_clips(tmp_path / "clips"), tmp_path / "runs", **changes)
    path = video.write_options(tmp_path / "options.json", options)
    where = EXAMPLES / "video_deblurring"
    train = [*start_with(nprocs), "main_train_vrt.py", "--opt", path]
    output = run(train, timeout=120.0, folder=where)
    assert "iter:       4" in output
    assert f"device: {device}" in output
    assert "PSNR" in run([*start_with(nprocs), "main_test_vrt.py", "--opt", path], folder=where)


@pytest.mark.cuda
@pytest.mark.gpus(2)
@pytest.mark.needs(*VIDEO)
def test_the_video_network_is_trained_in_data_parallel(tmp_path: Path) -> None:
    video = importlib.import_module("video")
    options = video.options(video.write_clips(tmp_path / "clips"), tmp_path / "runs", gpu_ids=[0, 1])
    path = video.write_options(tmp_path / "options.json", options)
    run([sys.executable, "main_train_vrt.py", "--opt", path], folder=EXAMPLES / "video_deblurring")
