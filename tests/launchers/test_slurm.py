"""One program under a Slurm of two virtual nodes: real daemons, real srun and sbatch."""

from __future__ import annotations

import shlex
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import ONE_EPOCH, PROGRAM, PYTHON, assert_joined, assert_trained
from nodes import Node, needs, virtual_nodes
from processes import TORCHRUN, Ended, launch

pytestmark = needs("slurmctld", "slurmd", "srun", "munged", nodes=True)
CONF = """
ClusterName=test
SlurmctldHost=login
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={folder}/munge.sock
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1
SlurmdParameters=config_overrides
KillWait=5
NodeName=node[1-2] CPUs=8 RealMemory=1000
PartitionName=main Nodes=node[1-2] Default=YES State=UP
"""  # config_overrides: nodes may claim more cores than the machine has


class Slurm:
    """A running cluster, used from its login node."""

    def __init__(self, login: Node, conf: Path) -> None:
        self.login, self.env = login, {"SLURM_CONF": str(conf)}

    def run(self, *command: str) -> Ended:
        return launch(self.login.run(*command), env=self.env)[0]

    def submit(self, folder: Path, *lines: str) -> Ended:
        """Runs a batch script of these lines on both nodes, with four tasks."""
        script, output, end = folder / "job.sh", folder / "output", "the script has ended"
        script.write_text("\n".join(["#!/bin/bash", *lines, f"echo {end}"]))
        sent = self.run("sbatch", "--nodes=2", "--ntasks-per-node=2", f"--output={output}", str(script))
        assert sent.code == 0, sent
        stop = time.monotonic() + 240
        while time.monotonic() < stop:  # sbatch --wait looks every few seconds only
            if output.exists() and end in output.read_text():
                return Ended(0, output.read_text(), 0)
            time.sleep(0.1)
        return Ended(None, output.read_text() if output.exists() else "", 240)


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    with tempfile.TemporaryDirectory() as name, virtual_nodes(2) as (login, *nodes):
        folder = Path(name)
        for part in ("state", "spool-node1", "spool-node2"):
            (folder / part).mkdir()
        (folder / "slurm.conf").write_text(CONF.format(folder=folder))
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # or slurmd looks for a mounted one
        (folder / "munge.key").write_bytes(b"a key for the tests, which no other machine ever sees")
        (folder / "munge.key").chmod(0o600)
        files = [f"--{option}={folder}/munge.{option}" for option in ("socket", "pid-file", "log-file", "seed-file")]
        munge = ["munged", "--foreground", "--force", f"--key-file={folder}/munge.key", *files]
        munge[munge.index(files[0])] = f"--socket={folder}/munge.sock"
        conf = str(folder / "slurm.conf")
        daemons = [login.run(*munge), login.run("slurmctld", "-D", "-f", conf)]
        daemons += [node.run("slurmd", "-D", "-f", conf, "-N", node.name) for node in nodes]
        with open(folder / "log", "w") as log:
            crew = [subprocess.Popen(daemon, stdin=subprocess.DEVNULL, stdout=log, stderr=log) for daemon in daemons]
        try:
            slurm, stop = Slurm(login, folder / "slurm.conf"), time.monotonic() + 120
            while slurm.run("sinfo", "--noheader", "--Node", "--format=%T").output.split() != ["idle"] * 2:
                assert time.monotonic() < stop, (folder / "log").read_text()
                time.sleep(0.2)
            yield slurm
        finally:
            for node in (login, *nodes):
                node.end()
            for process in crew:
                process.wait()


def test_srun_starts_one_rank_for_each_task(slurm: Slurm) -> None:
    tasks = ["--nodes=2", "--ntasks-per-node=2", "--kill-on-bad-exit"]
    assert_joined([slurm.run("srun", *tasks, *PYTHON, *PROGRAM)], "slurm", 2, 2)


def test_the_digits_train_on_two_tasks(slurm: Slurm, tmp_path: Path) -> None:
    train = [*PYTHON, *ONE_EPOCH, "--folder", str(tmp_path)]
    assert_trained([slurm.run("srun", "--nodes=2", "--ntasks-per-node=1", "--kill-on-bad-exit", *train)], 2)


def test_srun_in_a_batch_script_starts_the_ranks(slurm: Slurm, tmp_path: Path) -> None:
    program = shlex.join([*PYTHON, *PROGRAM])
    assert_joined([slurm.submit(tmp_path, f"srun --kill-on-bad-exit {program}")], "slurm", 2, 2)


def test_a_batch_script_without_srun_is_one_process_and_a_warning(slurm: Slurm, tmp_path: Path) -> None:
    done = slurm.submit(tmp_path, shlex.join([*PYTHON, *PROGRAM]))
    assert_joined([done], "single", 1)
    assert "SLURM_NTASKS=4, but this process is none of srun's tasks" in done.output
    assert "start the ranks with srun" in done.output


def test_a_program_in_a_terminal_of_srun_is_one_process(slurm: Slurm) -> None:
    lone = shlex.join(["srun", "--pty", *PYTHON, *PROGRAM])
    done = slurm.run("script", "--quiet", "--return", "--command", lone, "/dev/null")
    assert_joined([Ended(done.code, done.output.replace("\r", ""), done.seconds)], "slurm", 1)


def test_torchrun_in_one_task_of_each_node_is_one_job(slurm: Slurm) -> None:
    meet = ["--rdzv-backend=c10d", "--rdzv-id=test", "--rdzv-endpoint=node1:29400"]
    agent = [*TORCHRUN, "--nnodes=2", "--nproc-per-node=2", *meet]
    tasks = ["--nodes=2", "--ntasks-per-node=1", "--kill-on-bad-exit"]
    assert_joined([slurm.run("srun", *tasks, *agent, *PROGRAM)], "torchrun", 2, 2)
