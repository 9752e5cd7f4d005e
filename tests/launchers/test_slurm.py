"""One program under a Slurm of two virtual nodes: real daemons, real srun and sbatch."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import video
from cluster import Slurm, cluster
from jobs import (
    MEET,
    ONE_EPOCH,
    PREEMPTED,
    PROGRAM,
    PYTHON,
    assert_done,
    assert_ended,
    assert_joined,
    assert_trained,
    ending,
    stopped_after,
    wait_until_all_train,
)
from nodes import needs
from processes import ROOT, TORCHRUN, launch

pytestmark = [pytest.mark.storm, needs("slurmctld", "slurmd", "srun", "munged", nodes=True)]


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    with cluster() as slurm:
        yield slurm


def test_srun_starts_one_rank_for_each_task(slurm: Slurm) -> None:
    tasks = ["--nodes=2", "--ntasks-per-node=2", "--kill-on-bad-exit"]
    assert_joined([slurm.run("srun", *tasks, *PYTHON, *PROGRAM)], "slurm", 2, 2)


def test_the_digits_train_on_two_tasks(slurm: Slurm, tmp_path: Path) -> None:
    train = [*PYTHON, *ONE_EPOCH, "--folder", str(tmp_path)]
    assert_trained([slurm.run("srun", "--nodes=2", "--ntasks-per-node=1", "--kill-on-bad-exit", *train)], 2)


@pytest.mark.parametrize(("flags", "by_launcher"), [(["--kill-on-bad-exit"], "got SIGTERM"), ([], "stayed")])
@pytest.mark.parametrize("fault", ["raise", "kill"])
def test_who_ends_the_other_rank(slurm: Slurm, flags: list[str], by_launcher: str, fault: str, tmp_path: Path) -> None:
    end = slurm.run("srun", "--nodes=2", "--ntasks-per-node=1", *flags, *PYTHON, *ending(tmp_path, fault, by_launcher))
    assert_ended(end, tmp_path, by_launcher)


@pytest.mark.parametrize("victim", [0, 3])
def test_the_others_go_on_where_srun_lets_them(slurm: Slurm, victim: int, tmp_path: Path) -> None:
    tasks = ["--nodes=2", "--ntasks-per-node=2", "--no-kill", "--kill-on-bad-exit=0"]
    program = [*PYTHON, str(ROOT / "tests" / "launchers" / "lost.py"), str(tmp_path), f"{victim}"]
    ended = slurm.run("srun", *tasks, *program)
    survivors = [member for member in range(4) if member != victim]
    found = {path.name: path.read_text().split(" ", 1) for path in tmp_path.iterdir()}
    assert sorted(found) == [str(member) for member in survivors], ended.output
    assert [found[str(member)][0] for member in survivors] == ["0", "1", "2"]
    assert {rest for _, rest in found.values()} == {found[str(survivors[0])][1]}
    assert found[str(survivors[0])][1].startswith("3 8 ")  # 2 steps of 8 samples, 5 of 6, and a rest


def test_srun_in_a_batch_script_starts_the_ranks(slurm: Slurm, tmp_path: Path) -> None:
    program = shlex.join([*PYTHON, *PROGRAM])
    assert_joined([slurm.submit(tmp_path, f"srun --kill-on-bad-exit {program}")], "slurm", 2, 2)


def submit_example(slurm: Slurm, folder: str, name: str, tmp_path: Path, *arguments: str) -> str:
    """Submits an example's batch script, without GPUs, for two nodes; what the job has printed."""
    script, output = tmp_path / "train.sh", tmp_path / "output"
    given = (ROOT / "examples" / folder / name).read_text()
    script.write_text(re.sub("^#SBATCH --gpus.*\n", "", given, flags=re.MULTILINE))  # as it says itself
    sbatch = ["sbatch", "--wait", "--ntasks-per-node=1", "--cpus-per-task=2", f"--output={output}", str(script)]
    python = f"PATH={Path(sys.executable).parent}:$PATH"
    sent = slurm.run("sh", "-c", f"cd {ROOT / 'examples' / folder} && {python} {shlex.join([*sbatch, *arguments])}")
    said = output.read_text() if output.exists() else ""
    assert sent.code == 0, (sent, said)
    return said


@pytest.mark.peers("pydantic", "tensorboard", "tqdm")
def test_the_robot_trainers_batch_script_trains_on_two_nodes(slurm: Slurm, tmp_path: Path) -> None:
    episode = {"observations_0": np.random.randn(12, 3), "actions_0": np.random.randn(12, 2)}
    np.savez(tmp_path / "episodes-0.npz", env_id=np.array(""), **episode)
    settings = [f"train.data_path={tmp_path}", f"train.output_dir={tmp_path}/runs", "experiment.rollout.enabled=false"]
    settings += ["train.batch_size=8", "train.num_epochs=1", "experiment.epoch_every_n_steps=4"]
    said = submit_example(slurm, "diffusion_policy", "scripts/train_slurm.sh", tmp_path, *settings)
    assert "done after step 4" in said and [*tmp_path.glob("runs/*/*/last.pth")], said
    assert len(re.findall("rank [01]: cpu on node[12]", said)) == 2, said


@pytest.mark.peers("av", "skimage", "pydantic", "tensorboard", "tqdm")
def test_the_video_trainers_batch_script_trains_on_two_nodes(slurm: Slurm, tmp_path: Path) -> None:
    opt = video.options(video.write_clips(tmp_path / "clips"), tmp_path)
    arguments = [video.write_options(tmp_path / "opt.json", opt), "train.total_iter=4"]
    said = submit_example(slurm, "video_deblurring", "train_slurm.sh", tmp_path, *arguments)
    assert said.count("launcher: slurm") == 2 and said.count("world size: 2 on 2 nodes") == 2, said
    assert "done: 4 iterations" in said and (tmp_path / "tiny/models/4_optimizerG.pth").is_file(), said


def test_a_batch_script_without_srun_is_one_process_and_a_warning(slurm: Slurm, tmp_path: Path) -> None:
    done = slurm.submit(tmp_path, shlex.join([*PYTHON, *PROGRAM]))
    assert_joined([done], "single", 1)
    assert "SLURM_NTASKS=4, but this process is not one of srun's tasks" in done.output
    assert "start the ranks with srun" in done.output


def test_a_program_in_a_terminal_of_srun_is_one_process(slurm: Slurm) -> None:
    lone = shlex.join(["srun", "--pty", *PYTHON, *PROGRAM])
    done = slurm.run("script", "--quiet", "--return", "--command", lone, "/dev/null")
    assert done.code == 0 and "rank 0/1 local 0/1 node 0/1 slurm mean 0" in done.output, done


def test_torchrun_in_one_task_of_each_node_is_one_job(slurm: Slurm) -> None:
    agent = [*TORCHRUN, "--nnodes=2", "--nproc-per-node=2", *MEET]
    tasks = ["--nodes=2", "--ntasks-per-node=1", "--kill-on-bad-exit"]
    assert_joined([slurm.run("srun", *tasks, *agent, *PROGRAM)], "torchrun", 2, 2)


def test_a_program_typed_into_a_shell_of_four_tasks_runs_alone_with_a_warning(slurm: Slurm) -> None:
    typed = shlex.quote(f"{shlex.join([*PYTHON, *PROGRAM])}\nexit\n")
    shell = shlex.join(["script", "--quiet", "--return", "--command", "srun --ntasks=4 --pty bash", "/dev/null"])
    done = slurm.run("sh", "-c", f"printf %s {typed} | {shell}")
    assert done.code == 0 and "rank 0/1 local 0/1 node 0/1 single mean 0" in done.output, done
    assert "started from one of 4 shells that srun opened, so it runs alone" in done.output


def test_a_job_that_is_signalled_saves_is_requeued_and_goes_on(slurm: Slurm, tmp_path: Path) -> None:
    folder, script, output = tmp_path / "run", tmp_path / "job.sh", tmp_path / "output"
    folder.mkdir()
    program = shlex.join([*PYTHON, PREEMPTED, str(folder)])
    lines = ["#!/bin/bash", "code=0", f"srun --kill-on-bad-exit=1 {program} || code=$?"]
    lines += ["echo the ranks ended with $code", "if [ $code -eq 138 ]; then", 'scontrol requeue "$SLURM_JOB_ID"', "fi"]
    script.write_text("\n".join([*lines, "exit $code", ""]))
    options = ["--requeue", "--open-mode=append", "--nodes=2", "--ntasks-per-node=2", f"--output={output}"]
    sent = slurm.run("sbatch", "--parsable", *options, str(script))
    assert sent.code == 0, sent
    wait_until_all_train(folder, 4)
    assert slurm.run("scancel", "--signal=USR1", sent.output.strip()).code == 0
    end = time.monotonic() + 300
    while output.read_text().count("the ranks ended") < 2:
        assert time.monotonic() < end, output.read_text()
        time.sleep(0.2)
    step = stopped_after(folder, 4, r"rank \d \(node[12]\) got SIGUSR1")
    assert (folder / f"rank 3 from step {step}").exists()
    assert_done(folder, 4)
    assert re.findall(r"ended with (\d+)", output.read_text()) == ["138", "0"]


def test_a_job_that_is_cancelled_saves_before_it_is_killed(slurm: Slurm, tmp_path: Path) -> None:
    tasks = ["--nodes=2", "--ntasks-per-node=1", "--kill-on-bad-exit=1", "--job-name=cancelled"]

    def cancel(crew: list[subprocess.Popen[bytes]]) -> None:
        wait_until_all_train(tmp_path, 2)
        slurm.run("scancel", "--name=cancelled")

    launch(slurm.login.run("srun", *tasks, *PYTHON, PREEMPTED, str(tmp_path)), env=slurm.env, meanwhile=cancel)
    stopped_after(tmp_path, 2, r"rank \d \(node[12]\) got SIGTERM")
