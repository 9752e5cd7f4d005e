"""How this process was started: environment variables in, a frozen `Launch` out. No torch, and nothing is changed."""

from __future__ import annotations

import os
from collections.abc import Mapping

from . import hints
from .launch import FORGOTTEN, Launch
from .launchers import ALLOCATIONS, ENGINES, LOCAL, MASTER, PLATFORM, RANKS, SLURM, SPAWN, TORCHRUN, Launcher
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
    engine = _engine(env)
    if all(name in env for name in PLATFORM.needs.values()):
        return _read_platform(env, engine).launch()
    if engine:
        return _read_engine(engine, env).launch()
    if is_stripped_step(env):
        step = read_step(SLURM._replace(signs=("SLURM_PROCID", "SLURM_NTASKS")), env)
        step.wrong.append("a container must be given all of a task's SLURM_ variables")
        return step.launch()  # raises
    platforms, names = hints.nodes(env)
    signs = tuple(dict.fromkeys([*names, *hints.processes(env)]))
    if signs:
        return Reading(_unknown(platforms)._replace(signs=signs), env).launch()  # raises, for something is missing
    return _single(env)


def _engine(env: Mapping[str, str]) -> Launcher | None:
    """Return the launcher whose variables are there, the first in the order of belief."""
    found = [launcher for launcher in ENGINES if any(sign in env for sign in launcher.signs)]
    if found and found[0].kind == "submitit" and env.get("SUBMITIT_LOCAL_NTASKS") == "1":
        found = found[1:]  # a lone task may start a launcher, which hands its variables on
    if not found:
        return None
    if found[0].kind == "pmi" and "MPI_LOCALRANKID" not in env:
        return found[-1]  # srun --mpi=pmi2 speaks PMI too
    return found[0]


def _read_engine(engine: Launcher, env: Mapping[str, str]) -> Reading:
    reading = read_step(engine, env) if engine.kind == "slurm" else _read_mpirun(engine, env)
    reading.check_agreement(RANKS | LOCAL)  # a job script may set some of them itself
    return reading


def _read_mpirun(engine: Launcher, env: Mapping[str, str]) -> Reading:
    """Read the variables of a launcher that tells no address to meet at, though its user may (mpirun -x)."""
    reading = Reading(engine, env)
    if reading.values.get("world_size") == 1:
        meet_nobody(reading)
        _refuse_copies(reading, _signs_around(reading))
        return reading
    absent = [name for name in MASTER.values() if name not in env]
    if len(absent) == 1:
        reading.missing += absent
    return reading


def _read_platform(env: Mapping[str, str], engine: Launcher | None) -> Reading:
    """Read RANK and its kin, which are complete."""
    reading = Reading(PLATFORM, env)
    if engine:
        _compare_with_engine(reading, engine)
    if reading.values.get("world_size") == 1 and not reading.wrong:
        _refuse_copies(reading, [*_signs_around(reading), *hints.nodes(env)[1]])
    return reading


def _compare_with_engine(reading: Reading, engine: Launcher) -> None:
    """Refuse fewer ranks than a launcher has started processes: some would claim the same one."""
    needs = {field: engine.needs[field] for field in RANKS}
    under = Reading(engine._replace(needs=needs, takes={}), reading.env)
    if not RANKS.keys() <= reading.values.keys() & under.values.keys():
        return
    ranks, processes = reading.values["world_size"], under.values["world_size"]
    clash = ranks == processes and under.values["rank"] != reading.values["rank"]
    if processes > ranks or clash:
        said = [f"{one.said('rank')}, {one.said('world_size')}" for one in (reading, under)]
        words = " contradict ".join(said)
        reading.wrong.append(f"{words} (does a job script export them? then unset them there)")


def _signs_around(reading: Reading) -> list[str]:
    """Name the variables of launches of several processes in which this one of one process was started.

    A Flux instance may span the tasks of a Slurm step, and a shell in a step is one of its tasks.
    """
    if reading.launcher.kind == "flux" or "SLURM_PTY_PORT" in reading.env:
        return []
    sizes = [engine.needs["world_size"] for engine in ENGINES]
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
