"""One program under Open MPI and MPICH: real mpirun, on one node and on two virtual ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import HYDRA, ONE_EPOCH, OPENMPI, PROGRAM, PYTHON, assert_joined, assert_trained
from nodes import needs
from processes import launch

KINDS = [
    pytest.param(OPENMPI, "openmpi", marks=needs("mpirun.openmpi"), id="openmpi"),
    pytest.param(HYDRA, "pmi", marks=needs("mpiexec.hydra"), id="hydra"),
]


@pytest.mark.parametrize(("mpirun", "kind"), KINDS)
def test_mpirun_on_one_node(mpirun: list[str], kind: str) -> None:
    assert_joined(launch([*mpirun, "-n", "4", *PYTHON, *PROGRAM]), kind, 4)


@pytest.mark.parametrize(("mpirun", "kind"), KINDS)
def test_the_digits_train_on_two_ranks(mpirun: list[str], kind: str, tmp_path: Path) -> None:
    assert_trained(launch([*mpirun, "-n", "2", *PYTHON, *ONE_EPOCH, "--folder", str(tmp_path)]), 2)


@needs("mpirun.openmpi")
def test_the_doctor_examines_an_mpi_job() -> None:
    (end,) = launch([*OPENMPI, "-n", "2", *PYTHON, "-m", "ddpkit", "doctor", "--device", "cpu"])
    assert end.code == 0 and "2 ranks over gloo" in end.output and "openmpi: rank 0 of 2" in end.output, end
    assert "opening the store where the launcher leads" in end.output
