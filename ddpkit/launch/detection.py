"""How this process was started: environment variables in, a frozen `Launch` out. No torch, and nothing is changed."""

from __future__ import annotations

import os
from collections.abc import Mapping

from . import hints
from .launch import FORGOTTEN, Launch
from .launchers import ALLOCATIONS, LOCAL, MASTER, MPI_AND_SLURM, PLATFORM, RANKS, SLURM, SPAWN, TORCHRUN, Launcher
from .reading import Reading, filled, meet_nobody, warn_of_allocation
from .slurm import is_stripped_step, read_step


def detect_launch(env: Mapping[str, str] | None = None) -> Launch:
    """Find out how this process was started, as far as environment variables tell.

    Args:
        env: The variables, by default this process's. An empty one counts as missing.

    Returns:
        The launch; of kind "single", rank 0 of 1, if nothing hints at a launcher.

    Raises:
        LaunchError: If the hints are incomplete or contradict each other. The message names everything that is missing
            or wrong, what was found and what to do.

    Example:
        >>> launch = detect_launch({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"})
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
        return _read_mpi_or_slurm(mpi_or_slurm, env).launch()
    if is_stripped_step(env):
        step = read_step(SLURM._replace(signs=("SLURM_PROCID", "SLURM_NTASKS")), env)
        step.wrong.append("a container must be given all of a task's SLURM_ variables")
        return step.launch()  # raises
    platforms, names = hints.nodes(env)
    signs = tuple(dict.fromkeys([*names, *hints.processes(env)]))
    if signs:
        return Reading(_unknown(platforms)._replace(signs=signs), env).launch()  # raises, for something is missing
    return _single(env)


def _find_mpi_or_slurm(env: Mapping[str, str]) -> Launcher | None:
    """Return the launcher whose variables are there, the first in the order of belief."""
    found = [launcher for launcher in MPI_AND_SLURM if any(sign in env for sign in launcher.signs)]
    if found and found[0].kind == "submitit" and env.get("SUBMITIT_LOCAL_NTASKS") == "1":
        found = found[1:]  # a lone task may start a launcher, which hands its variables on
    if not found:
        return None
    if found[0].kind == "pmi" and "MPI_LOCALRANKID" not in env:
        return found[-1]  # srun --mpi=pmi2 speaks PMI too
    return found[0]


def _read_mpi_or_slurm(launcher: Launcher, env: Mapping[str, str]) -> Reading:
    reading = read_step(launcher, env) if launcher.kind == "slurm" else _read_mpirun(launcher, env)
    reading.check_agreement(RANKS | LOCAL)  # a job script may set some of them itself
    return reading


def _read_mpirun(launcher: Launcher, env: Mapping[str, str]) -> Reading:
    """Read the variables of a launcher that tells no address to meet at, though its user may (mpirun -x)."""
    reading = Reading(launcher, env)
    if reading.values.get("world_size") == 1:
        meet_nobody(reading)
        _refuse_copies(reading, _signs_around(reading))
        return reading
    absent = [name for name in MASTER.values() if name not in env]
    if len(absent) == 1:
        reading.missing += absent
    return reading


def _read_platform(env: Mapping[str, str], launcher: Launcher | None) -> Reading:
    """Read RANK and its kin, which are complete."""
    reading = Reading(PLATFORM, env)
    if launcher:
        _compare_with(launcher, reading)
    if reading.values.get("world_size") == 1 and not reading.wrong:
        _refuse_copies(reading, [*_signs_around(reading), *hints.nodes(env)[1]])
    return reading


def _compare_with(launcher: Launcher, reading: Reading) -> None:
    """Refuse fewer ranks than this launcher has started processes: some would claim the same one."""
    needs = {field: launcher.needs[field] for field in RANKS}
    started = Reading(launcher._replace(needs=needs, takes={}), reading.env)
    for field in RANKS:
        if field not in reading.values or field not in started.values:
            return
    too_few = reading.values["world_size"] < started.values["world_size"]
    same_size = reading.values["world_size"] == started.values["world_size"]
    same_rank = reading.values["rank"] == started.values["rank"]
    if too_few or (same_size and not same_rank):
        ranks, processes = (f"{one.said('rank')}, {one.said('world_size')}" for one in (reading, started))
        reading.wrong.append(f"{ranks} contradict {processes} (does a job script export them? then unset them there)")


def _signs_around(reading: Reading) -> list[str]:
    """Name the variables of launches of several processes in which this one of one process was started.

    A Flux instance may span the tasks of a Slurm step, and a shell in a step is one of its tasks.
    """
    if reading.launcher.kind == "flux" or "SLURM_PTY_PORT" in reading.env:
        return []
    sizes = [launcher.needs["world_size"] for launcher in MPI_AND_SLURM]
    several = [name for name in sizes if hints.number(reading.env.get(name)) > 1]
    return list(dict.fromkeys([*several, *hints.others(reading.env)]))


def _refuse_copies(reading: Reading, signs: list[str]) -> None:
    """Refuse a launch of one process in each of several."""
    if not signs:
        return
    sign = f"{signs[0]}={reading.env[signs[0]]}"
    reading.evidence.append(sign)
    reading.wrong.append(
        f"{reading.said('world_size')} contradicts {sign}: each of several processes would run alone (if this is "
        f"meant, unset {', '.join(signs)})"
    )


def _unknown(platforms: list[hints.Nodes]) -> Launcher:
    """Describe the launcher of a process that is told no rank, and how to start ranks there."""
    if not platforms:
        return PLATFORM
    start = f"Start torchrun on each node: {platforms[0].command()}"
    return PLATFORM._replace(title=f"one of several nodes of {platforms[0].title}", start=start)


def _single(env: Mapping[str, str]) -> Launch:
    evidence = [f"{name}={env[name]}" for name in (*RANKS.values(), *LOCAL.values()) if name in env]
    ignored = [f"{name}={env[name]}" for name in MASTER.values() if name in env]
    if ignored:
        evidence.append(f"{', '.join(ignored)} ignored: nothing tells of other ranks")
    warning = warn_of_allocation(env, *ALLOCATIONS)
    if warning:
        evidence.append(FORGOTTEN + warning)
    evidence.append("no launcher: one process")
    return Launch("single", 0, 1, 0, 1, 0, 1, evidence=tuple(evidence))
