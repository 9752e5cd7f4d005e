"""Detect how this process was started: environment variables in, a frozen `Launch` out."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from . import environment
from .environment import START_ON_NODES, Reading, derive_port, drop_address, filled, shown, warn_of_allocation
from .launch import (
    ALLOCATIONS,
    FORGOTTEN,
    LOCAL,
    MASTER,
    MPI_AND_SLURM,
    PLATFORM,
    RANKS,
    SLURM,
    SPAWN,
    TORCHRUN,
    Launch,
    Launcher,
)


def detect_launch(env: Mapping[str, str] | None = None) -> Launch:
    """Detect from environment variables how this process was started.

    Args:
        env: The variables; by default this process's. An empty one counts as missing.

    Returns:
        The launch; without a launcher, one of kind "single", rank 0 of 1.

    Raises:
        LaunchError: If the variables are incomplete or contradictory. The message names everything that is missing or
            wrong, what was found and what to do.

    Example:
        >>> environ = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}
        >>> launch = detect_launch(environ)
        >>> launch.kind, launch.rank, launch.world_size, launch.local_rank
        ('openmpi', 3, 4, None)
        >>> detect_launch({}).kind
        'single'
    """
    env = filled(os.environ if env is None else env)
    for launcher in (TORCHRUN, SPAWN):  # a spawned rank may start torchrun; spawn() removes torchrun's variables
        if launcher.signs[0] in env:
            return Reading(launcher, env).launch()
    mpi_or_slurm = _find_mpi_or_slurm(env)
    if all(name in env for name in PLATFORM.needs.values()):
        return _read_platform(env, mpi_or_slurm).launch()
    if mpi_or_slurm:
        reading = read_step(env) if mpi_or_slurm is SLURM else _read_mpirun(mpi_or_slurm, env)
        reading.check_agreement(RANKS | LOCAL)  # a job script may set some of them itself
        return reading.launch()
    platforms = environment.nodes(env)
    signs = (*platforms, *environment.processes(env))
    if signs:
        launcher = PLATFORM._replace(signs=signs)
        if platforms:
            title = f"one of several nodes of {next(iter(platforms.values()))}"
            launcher = launcher._replace(title=title, start=START_ON_NODES)
        return Reading(launcher, env).launch()  # raises, because something is missing
    return _single(env)


def _find_mpi_or_slurm(env: Mapping[str, str]) -> Launcher | None:
    """Return the launcher whose variables are set, the first in the table."""
    found = [launcher for launcher in MPI_AND_SLURM if any(sign in env for sign in launcher.signs)]
    if found and found[0].kind == "submitit" and env.get("SUBMITIT_LOCAL_NTASKS") == "1":
        found = found[1:]  # a lone task may start a launcher, which passes its variables on
    if not found:  # a container may have passed on only some of a Slurm task's variables
        return SLURM if environment.number(env.get("SLURM_PROCID")) > 0 else None
    speaks_pmi = found[0].kind == "pmi" and "MPI_LOCALRANKID" not in env
    return found[-1] if speaks_pmi else found[0]  # srun --mpi=pmi2 speaks PMI, too


def _read_mpirun(launcher: Launcher, env: Mapping[str, str]) -> Reading:
    """Read the variables of a launcher that sets no address, though its user may (mpirun -x)."""
    reading = Reading(launcher, env)
    absent = [name for name in MASTER.values() if name not in env]
    if reading.values.get("world_size") == 1:
        drop_address(reading)
        _refuse_copies(reading)
    elif len(absent) == 1:
        reading.missing += absent
    return reading


def _read_platform(env: Mapping[str, str], launcher: Launcher | None) -> Reading:
    """Read RANK etc., which are complete; raise for fewer ranks than this launcher started processes."""
    reading = Reading(PLATFORM, env)
    names = [launcher.needs[field] for field in RANKS] if launcher else []
    if names and all(name in env for name in names) and RANKS.keys() <= reading.values.keys():
        rank, world_size = [environment.number(env[name]) for name in names]
        told_rank, told_size = [reading.values[field] for field in RANKS]
        if told_size < world_size or (told_size == world_size and told_rank != rank):
            told = f"{reading.said('rank')}, {reading.said('world_size')}"
            started = ", ".join(map(reading.shown, names))
            reading.wrong.append(f"{told} contradict {started} (does a job script export them? then unset them there)")
    if reading.values.get("world_size") == 1 and not reading.wrong:
        _refuse_copies(reading)
    return reading


def _refuse_copies(reading: Reading) -> None:
    """Raise for a launch of one process in each of several.

    A Flux instance may span the tasks of a Slurm step, and a shell in a step is one of its tasks.
    """
    if reading.launcher.kind == "flux" or "SLURM_PTY_PORT" in reading.env:
        return
    sizes = [launcher.needs["world_size"] for launcher in MPI_AND_SLURM]
    signs = [name for name in sizes if environment.number(reading.env.get(name)) > 1]
    for sign in (*signs, *environment.nodes(reading.env)):
        reading.evidence.append(reading.shown(sign))
        reading.wrong.append(
            f"{reading.said('world_size')} contradicts {reading.shown(sign)}: each of several processes would run "
            f"alone (to allow this, unset {sign})"
        )


def _single(env: Mapping[str, str]) -> Launch:
    evidence = [shown(name, env) for name in (*RANKS.values(), *LOCAL.values()) if name in env]
    ignored = [shown(name, env) for name in MASTER.values() if name in env]
    if ignored:
        evidence.append(f"{', '.join(ignored)} ignored: nothing indicates other ranks")
    if warning := warn_of_allocation(env, *ALLOCATIONS):
        evidence.append(FORGOTTEN + warning)
    return Launch("single", 0, 1, 0, 1, 0, 1, evidence=(*evidence, "no launcher: one process"))


# A Slurm step. Only the step's own variables give the place of a task: SLURM_NTASKS and SLURM_JOB_NODELIST are the
# job's, and layouts may be uneven.


def read_step(env: Mapping[str, str]) -> Reading:
    """Read a task's place in its step, and derive the address at which all tasks meet."""
    step = Reading(SLURM, env)
    host = step.read("SLURM_STEP_NODELIST", first_host)
    layout = "SLURM_STEP_TASKS_PER_NODE"
    tasks = environment.number(re.sub(r"\(x\d+\)$", "", env.get(layout, "")))
    if tasks:  # else it is uneven, and setup() asks the other ranks
        step.values["local_world_size"] = tasks
        step.evidence.append(step.shown(layout))
    if step.values.get("world_size") == 1:
        drop_address(step)
        if warning := warn_of_allocation(env, "SLURM_NTASKS"):  # salloc may open its shell in a step of one task
            step.evidence.append(FORGOTTEN + warning)
    else:
        _derive_address(step, host)
        if "MASTER_PORT" not in env:
            ids = [step.read(name, str) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")]
            step.values["master_port"] = port = derive_port(*map(str, ids))
            step.evidence.append(f"port {port} is derived from job and step")
    return step


def _derive_address(step: Reading, host: str | None) -> None:
    """Make all tasks meet on the step's first node, where rank 0 runs unless the layout is arbitrary."""
    if "MASTER_ADDR" in step.env or not host:
        return
    several = step.values.get("num_nodes", 1) > 1
    arbitrary = step.env.get("SLURM_DISTRIBUTION", "").startswith("arbitrary")
    elsewhere = step.values.get("rank") == 0 and step.values.get("node_rank", 0) > 0
    if several and (arbitrary or elsewhere):
        step.wrong.append("srun -m arbitrary may run rank 0 on any node: export MASTER_ADDR, the host of rank 0")
        return
    address = host if several else "127.0.0.1"
    step.values["master_addr"] = address
    step.evidence.append(f"the ranks meet at {address}, on the first node of the step")


def first_host(text: str) -> str:
    """Return the first host name in Slurm's compressed list; raise `ValueError` if there is none.

    >>> first_host("gpu-a[01-03,7]-x,b5")
    'gpu-a01-x'
    """
    found = re.fullmatch(r"((?:[^\s,\[\]]|\[\d[\d,-]*\])+)(?:,\S+)?", text, re.ASCII)
    if not found:
        raise ValueError("not a list of nodes")
    return re.sub(r"\[(\d+)[\d,-]*\]", r"\1", found[1])
