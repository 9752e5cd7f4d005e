"""A process's place in a job: what the rest of the library knows of how it was started."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

FORGOTTEN = "warning: "  # begins a line of evidence that the user should see


@dataclass(frozen=True)
class Launch:
    """This process's place in a job, as far as its environment tells; None where it does not.

    Attributes:
        kind: "single", "torchrun", "platform" (RANK and its kin, set by a cloud platform or by hand), "slurm",
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
        evidence: The variables that were used, "NAME=value", in the order of use, and in words what was concluded.

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
    """Return a sentence to warn with if several tasks were allocated but this process is none of them; else None."""
    for line in launch.evidence:
        if line.startswith(FORGOTTEN):
            return line.removeprefix(FORGOTTEN)
    return None


# The table of launchers: which variable tells what under which of them. A new launcher is a new
# row. Its order is the order of belief, and the right one wherever launchers were seen inside each
# other: Open MPI or hydra in an sbatch script, torchrun in srun.


class Launcher(NamedTuple):
    """A program that starts ranks, and the environment variables in which it tells each of them its place.

    Attributes:
        kind: Its name, that of the `Launch`.
        title: Its name in errors.
        signs: Variables of which any gives it away.
        needs: From a field of `Launch` to its variable, or alternatives such as "NODE_RANK|GROUP_RANK".
        takes: The same, of variables that may be absent.
        start: Advice where its variables cannot be read.
    """

    kind: str
    title: str
    signs: tuple[str, ...]
    needs: dict[str, str]
    takes: dict[str, str]
    start: str = (
        "Start every process with torchrun, srun or mpirun, or set in each what they would set (RANK and WORLD_SIZE "
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
    """Describe a launcher that starts processes and tells each its rank, but not where to meet."""
    needs = {"rank": rank, "world_size": world_size}
    return Launcher(kind, title, (rank, world_size), needs, takes | MASTER)


def _world_row(kind: str, title: str, prefix: str) -> Launcher:
    """Describe one whose variables are called as Open MPI's are, after another prefix."""
    names = {"local_rank": f"{prefix}LOCAL_RANK", "local_world_size": f"{prefix}LOCAL_SIZE"}
    return _mpi_row(kind, title, f"{prefix}RANK", f"{prefix}SIZE", **names)


SPAWN = Launcher("spawn", "a rank of ddpkit.spawn()", ("DDPKIT_SPAWN",), RANKS | LOCAL | MASTER, {})
TORCHRUN = Launcher("torchrun", "a torchrun job", ("TORCHELASTIC_RUN_ID",), RANKS | LOCAL | MASTER, _GROUP)
PLATFORM = Launcher("platform", "a distributed job", (), RANKS | MASTER, LOCAL | _NODES)
SLURM = Launcher("slurm", "a Slurm step", ("SLURM_STEP_NUM_TASKS",), _TASK | _PLACE, MASTER)
MPI_AND_SLURM = (
    # whose NODE_RANK is no number of a node
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
# variables of an allocation of several tasks, and the program that starts these; a script in it may mean to run alone
ALLOCATIONS = {
    "SLURM_NTASKS": "srun",
    "SLURM_JOB_NUM_NODES": "srun",
    "PBS_NUM_NODES": "mpiexec",
    "NHOSTS": "mpirun",
    "PET_NPROC_PER_NODE": "torchrun",
}
# variables that differ between the jobs which a launcher runs on one node at a time
JOB_IDS = (
    "OMPI_MCA_ess_base_jobid",
    "PMIX_NAMESPACE",
    "PMI_JOBID",
    "SUBMITIT_LOCAL_JOB_ID",
    "FLUX_JOB_ID",
    "LSB_JOBID",
    "HOROVOD_GLOO_RENDEZVOUS_PORT",
)
