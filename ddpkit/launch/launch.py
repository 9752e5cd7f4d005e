"""A process's place in a job, and the table of launchers that define it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

Environment = Mapping[str, str]
FORGOTTEN = "warning: "  # start of a line of evidence to show to the user


@dataclass(frozen=True)
class Launch:
    """This process's place in a job; None in fields that its environment does not define.

    Attributes:
        kind: "single", "torchrun", "platform" (RANK etc., set by a cloud platform or by hand), "slurm",
            "openmpi", "mvapich", "jsrun", "horovod", "submitit" (its LocalExecutor), "flux", "pmi" (MPICH, Intel MPI,
            Cray) or "spawn".
        rank: This process's number in the job, from 0.
        world_size: Number of processes in the job.
        local_rank: This process's number on its node, from 0.
        local_world_size: Number of the job's processes on this node.
        node_rank: This node's number in the job, from 0.
        num_nodes: Number of nodes in the job.
        master_addr: Host name or address of rank 0, where the ranks meet.
        master_port: Port there.
        evidence: The variables used, "NAME=value", in the order of use, and conclusions in words.

    Example:
        >>> launch = Launch("platform", 1, 4, master_addr="10.0.0.1", master_port=29500)
        >>> launch.local_rank is None  # setup(launch=launch) asks the other ranks
        True
    """

    kind: str
    rank: int
    world_size: int
    local_rank: int | None = None
    local_world_size: int | None = None
    node_rank: int | None = None
    num_nodes: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    evidence: tuple[str, ...] = ()


def forgotten_launcher(launch: Launch) -> str | None:
    """Return a warning if several tasks were allocated but this process is not one of them; else None."""
    return next((line.removeprefix(FORGOTTEN) for line in launch.evidence if line.startswith(FORGOTTEN)), None)


# The table of launchers: the variables that each of them sets. A new launcher is a new row. The first row that matches
# wins; the order is right for the nestings seen in practice: Open MPI or hydra in an sbatch script, torchrun in srun.


class Launcher(NamedTuple):
    """A program that starts ranks, and the environment variables that give each its place.

    Attributes:
        kind: Its name, that of the `Launch`.
        title: Its name in errors.
        signs: Variables that each identify it.
        needs: Variable of each field of `Launch`, or alternatives such as "NODE_RANK|GROUP_RANK".
        takes: The same for optional variables.
        start: Advice if its variables cannot be read.
    """

    kind: str
    title: str
    signs: tuple[str, ...]
    needs: dict[str, str]
    takes: dict[str, str]
    start: str = (
        "Start every process with torchrun, srun or mpirun, or set the same variables as they do (RANK and WORLD_SIZE "
        "count processes, not nodes)"
    )


RANKS = {"rank": "RANK", "world_size": "WORLD_SIZE"}
LOCAL = {"local_rank": "LOCAL_RANK", "local_world_size": "LOCAL_WORLD_SIZE"}
MASTER = {"master_addr": "MASTER_ADDR", "master_port": "MASTER_PORT"}
_GROUP = {"node_rank": "GROUP_RANK", "num_nodes": "GROUP_WORLD_SIZE"}
_NODES = {"node_rank": "NODE_RANK|GROUP_RANK", "num_nodes": "GROUP_WORLD_SIZE"}
_TASK = {"rank": "SLURM_PROCID", "world_size": "SLURM_STEP_NUM_TASKS"}
_PLACE = {"local_rank": "SLURM_LOCALID", "node_rank": "SLURM_NODEID", "num_nodes": "SLURM_STEP_NUM_NODES"}


def _mpi_row(kind: str, title: str, rank: str, world_size: str, **takes: str) -> Launcher:
    """Describe a launcher that starts processes and sets each one's rank, but no address."""
    needs = {"rank": rank, "world_size": world_size}
    return Launcher(kind, title, (rank, world_size), needs, takes | MASTER)


def _world_row(kind: str, title: str, prefix: str) -> Launcher:
    """Describe one with Open MPI's variable names after another prefix."""
    names = {"local_rank": f"{prefix}LOCAL_RANK", "local_world_size": f"{prefix}LOCAL_SIZE"}
    return _mpi_row(kind, title, f"{prefix}RANK", f"{prefix}SIZE", **names)


SPAWN = Launcher("spawn", "a rank of ddpkit.spawn()", ("DDPKIT_SPAWN",), RANKS | LOCAL | MASTER, {})
TORCHRUN = Launcher("torchrun", "a torchrun job", ("TORCHELASTIC_RUN_ID",), RANKS | LOCAL | MASTER, _GROUP)
PLATFORM = Launcher("platform", "a distributed job", (), RANKS | MASTER, LOCAL | _NODES)
SLURM = Launcher("slurm", "a Slurm step", ("SLURM_STEP_NUM_TASKS",), _TASK | _PLACE, MASTER)
MPI_AND_SLURM = (
    # its NODE_RANK is not a node's number
    _world_row("openmpi", "an Open MPI job", "OMPI_COMM_WORLD_"),
    _world_row("mvapich", "an MVAPICH job", "MV2_COMM_WORLD_"),
    _world_row("jsrun", "a jsrun job", "JSM_NAMESPACE_"),
    _world_row("horovod", "a Horovod job", "HOROVOD_"),
    _mpi_row(
        "submitit",
        "a job of submitit's LocalExecutor",
        "SUBMITIT_LOCAL_GLOBALID",
        "SUBMITIT_LOCAL_NTASKS",
        local_rank="SUBMITIT_LOCAL_LOCALID",
        node_rank="SUBMITIT_LOCAL_NODEID",
        num_nodes="SUBMITIT_LOCAL_JOB_NUM_NODES",
    ),
    _mpi_row(
        "flux",
        "a Flux job",
        "FLUX_TASK_RANK",
        "FLUX_JOB_SIZE",
        local_rank="FLUX_TASK_LOCAL_ID",
        num_nodes="FLUX_JOB_NNODES",
    ),
    _mpi_row(
        "pmi",
        "an MPI job",
        "PMI_RANK",
        "PMI_SIZE",
        local_rank="MPI_LOCALRANKID|PMI_LOCAL_RANK|PALS_LOCAL_RANKID",
        local_world_size="MPI_LOCALNRANKS|PMI_LOCAL_SIZE",
    ),
    SLURM,
)
# variables of an allocation of several tasks, and the program that starts them; a script in it may run alone on purpose
ALLOCATIONS = {
    "SLURM_NTASKS": "srun",
    "SLURM_JOB_NUM_NODES": "srun",
    "PBS_NUM_NODES": "mpiexec",
    "NHOSTS": "mpirun",
    "PET_NPROC_PER_NODE": "torchrun",
}
# variables that distinguish the jobs that a launcher runs at the same time on one node
JOB_IDS = (
    "OMPI_MCA_ess_base_jobid",
    "PMIX_NAMESPACE",
    "PMI_JOBID",
    "SUBMITIT_LOCAL_JOB_ID",
    "FLUX_JOB_ID",
    "LSB_JOBID",
    "HOROVOD_GLOO_RENDEZVOUS_PORT",
)
