"""A process's place in a job: what the rest of the library knows of how it was started."""

from __future__ import annotations

from dataclasses import dataclass

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
