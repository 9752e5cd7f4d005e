"""One program under Open MPI and MPICH: real mpirun, on one node and on two virtual ones."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from jobs import (
    HYDRA,
    ONE_EPOCH,
    OPENMPI,
    PREEMPTED,
    PROGRAM,
    PYTHON,
    assert_done,
    assert_ended,
    assert_joined,
    assert_trained,
    ending,
    process_of,
    stopped_after,
    wait_until_all_train,
)
from nodes import needs, remote_shell, virtual_nodes
from processes import launch

pytestmark = pytest.mark.storm  # launchers take long
KINDS = [
    pytest.param(OPENMPI, "openmpi", marks=needs("mpirun.openmpi"), id="openmpi"),
    pytest.param(HYDRA, "pmi", marks=needs("mpiexec.hydra"), id="hydra"),
]


@pytest.mark.parametrize(("mpirun", "kind"), KINDS)
def test_mpirun_on_one_node(mpirun: list[str], kind: str) -> None:
    assert_joined(launch([*mpirun, "-n", "4", *PYTHON, *PROGRAM]), kind, 4)


@needs(nodes=True)
@pytest.mark.parametrize(("mpirun", "kind"), KINDS)
def test_mpirun_on_two_nodes(mpirun: list[str], kind: str, tmp_path: Path) -> None:
    with virtual_nodes(2) as (login, *nodes):
        shell = remote_shell(nodes, tmp_path)
        if kind == "openmpi":
            told = ["-x", "MASTER_ADDR=node1", "-x", "MASTER_PORT=29400"]
            where = ["--mca", "plm_rsh_agent", shell, "--mca", "oob_tcp_if_include", "10.77.0.0/24", *told]
        else:
            where = ["-launcher", "ssh", "-launcher-exec", shell]
        hosts = ["-host", "node1:2,node2:2", "-n", "4"]
        assert_joined(launch(login.lead(*mpirun, *where, *hosts, *PYTHON, *PROGRAM)), kind, 2, 2)


@pytest.mark.parametrize(
    ("mpirun", "fault", "by_launcher"),
    [
        pytest.param(OPENMPI, "raise", "got SIGTERM", marks=needs("mpirun.openmpi"), id="openmpi-raise"),
        pytest.param(OPENMPI, "kill", "got SIGTERM", marks=needs("mpirun.openmpi"), id="openmpi-kill"),
        pytest.param(HYDRA, "raise", "stayed", marks=needs("mpiexec.hydra"), id="hydra-raise"),
        pytest.param(HYDRA, "kill", "got SIGKILL", marks=needs("mpiexec.hydra"), id="hydra-kill"),
    ],
)
def test_who_ends_the_other_rank(mpirun: list[str], fault: str, by_launcher: str, tmp_path: Path) -> None:
    (end,) = launch([*mpirun, "-n", "2", *PYTHON, *ending(tmp_path, fault, by_launcher)])
    assert_ended(end, tmp_path, by_launcher)


@pytest.mark.parametrize(("mpirun", "kind"), KINDS)
def test_the_digits_train_on_two_ranks(mpirun: list[str], kind: str, tmp_path: Path) -> None:
    assert_trained(launch([*mpirun, "-n", "2", *PYTHON, *ONE_EPOCH, "--folder", str(tmp_path)]), 2)


@needs("mpirun.openmpi")
def test_the_doctor_examines_an_mpi_job() -> None:
    (end,) = launch([*OPENMPI, "-n", "2", *PYTHON, "-m", "ddpkit", "doctor", "--device", "cpu"])
    assert end.code == 0 and "2 ranks over gloo" in end.output and "openmpi: rank 0 of 2" in end.output, end
    assert "opening the store of the launcher" in end.output


@pytest.mark.parametrize(("mpirun", "kind"), KINDS)
def test_a_signal_to_one_rank_stops_all(mpirun: list[str], kind: str, tmp_path: Path) -> None:
    def end(crew: list[subprocess.Popen[bytes]]) -> None:
        wait_until_all_train(tmp_path, 2)
        os.kill(process_of(tmp_path, 1)[0], signal.SIGUSR1)

    launch([*mpirun, "-n", "2", *PYTHON, PREEMPTED, str(tmp_path)], meanwhile=end)
    stopped_after(tmp_path, 2, r"rank 1 \(.*\) got SIGUSR1")
    assert launch([*mpirun, "-n", "2", *PYTHON, PREEMPTED, str(tmp_path)])[0].code == 0
    assert_done(tmp_path, 2)
