"""How this process was started: environment variables in, a frozen `Launch` out. No torch, and nothing is changed.

One table says which launcher tells what in which variable. Its order is the order of belief, and the right one wherever
launchers were seen inside each other: Open MPI or hydra in an sbatch script, torchrun in srun. At the end stand two
questions that only the process tree answers: is torchrun nested in a launch, and was this program typed into a shell.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

from ..errors import LaunchError
from . import hints


@dataclass(frozen=True)
class Launch:
    """This process's place in a job, as far as its environment tells. None is what it does not tell.

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


class _Launcher(NamedTuple):
    kind: str
    title: str
    signs: tuple[str, ...]  # any of these variables gives it away
    needs: dict[str, str]  # field of Launch -> variable, or alternatives such as "NODE_RANK|GROUP_RANK"
    takes: dict[str, str]  # the same, but the variable may be absent
    start: str = (  # what to do where this cannot be read
        "Start every process with torchrun, srun or mpirun, or set in each what they would set (RANK and WORLD_SIZE "
        "count processes, not nodes)"
    )


_RANKS = {"rank": "RANK", "world_size": "WORLD_SIZE"}
_LOCAL = {"local_rank": "LOCAL_RANK", "local_world_size": "LOCAL_WORLD_SIZE"}
_MASTER = {"master_addr": "MASTER_ADDR", "master_port": "MASTER_PORT"}
_GROUP = {"node_rank": "GROUP_RANK", "num_nodes": "GROUP_WORLD_SIZE"}
_NODES = {"node_rank": "NODE_RANK|GROUP_RANK", "num_nodes": "GROUP_WORLD_SIZE"}
_TASK = {"rank": "SLURM_PROCID", "world_size": "SLURM_STEP_NUM_TASKS"}
_PLACE = {"local_rank": "SLURM_LOCALID", "node_rank": "SLURM_NODEID"}


def _engine_row(kind: str, title: str, rank: str, world_size: str, **takes: str) -> _Launcher:
    return _Launcher(kind, title, (rank, world_size), {"rank": rank, "world_size": world_size}, takes | _MASTER)


_SPAWN = _Launcher("spawn", "a rank of ddpkit.spawn()", ("DDPKIT_SPAWN",), _RANKS | _LOCAL | _MASTER, {})
_TORCHRUN = _Launcher("torchrun", "a torchrun job", ("TORCHELASTIC_RUN_ID",), _RANKS | _LOCAL | _MASTER, _GROUP)
_PLATFORM = _Launcher("platform", "a distributed job", (), _RANKS | _MASTER, _LOCAL | _NODES)
_SLURM = _Launcher("slurm", "a Slurm step", ("SLURM_STEP_NUM_TASKS",), _TASK | _PLACE, _MASTER)
_ENGINES = (
    _engine_row(
        "openmpi",
        "an Open MPI job",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        local_world_size="OMPI_COMM_WORLD_LOCAL_SIZE",  # NODE_RANK there is no number of a node
    ),
    _engine_row(
        "mvapich",
        "an MVAPICH job",
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        local_rank="MV2_COMM_WORLD_LOCAL_RANK",
        local_world_size="MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    _engine_row(
        "jsrun",
        "a jsrun job",
        "JSM_NAMESPACE_RANK",
        "JSM_NAMESPACE_SIZE",
        local_rank="JSM_NAMESPACE_LOCAL_RANK",
        local_world_size="JSM_NAMESPACE_LOCAL_SIZE",
    ),
    _engine_row(
        "horovod",
        "a Horovod job",
        "HOROVOD_RANK",
        "HOROVOD_SIZE",
        local_rank="HOROVOD_LOCAL_RANK",
        local_world_size="HOROVOD_LOCAL_SIZE",
    ),
    _engine_row(
        "submitit",
        "a job of submitit's LocalExecutor",
        "SUBMITIT_LOCAL_GLOBALID",
        "SUBMITIT_LOCAL_NTASKS",
        local_rank="SUBMITIT_LOCAL_LOCALID",
        node_rank="SUBMITIT_LOCAL_NODEID",
        num_nodes="SUBMITIT_LOCAL_JOB_NUM_NODES",
    ),
    _engine_row(
        "flux",
        "a Flux job",
        "FLUX_TASK_RANK",
        "FLUX_JOB_SIZE",
        local_rank="FLUX_TASK_LOCAL_ID",
        num_nodes="FLUX_JOB_NNODES",
    ),
    _engine_row(
        "pmi",
        "an MPI job",
        "PMI_RANK",
        "PMI_SIZE",
        local_rank="MPI_LOCALRANKID|PMI_LOCAL_RANK|PALS_LOCAL_RANKID",
        local_world_size="MPI_LOCALNRANKS|PMI_LOCAL_SIZE",
    ),
    _SLURM,
)
# What an allocation holds, and what starts several processes in it. A single one may be meant: a warning
_ALLOCATED = {
    "SLURM_NTASKS": "srun",
    "SLURM_JOB_NUM_NODES": "srun",
    "LSB_MCPU_HOSTS": "mpirun",
    "PBS_NUM_NODES": "mpiexec",
    "NHOSTS": "mpirun",
    "COBALT_JOBSIZE": "mpirun",
    "PET_NPROC_PER_NODE": "torchrun",
}
_ORDER = (  # a rank is below, a size at most
    ("rank", "world_size"),
    ("local_rank", "local_world_size"),
    ("local_rank", "world_size"),
    ("local_world_size", "world_size"),
    ("node_rank", "num_nodes"),
    ("num_nodes", "world_size"),
)
_FORGOTTEN = "warning: "
_SHOWN = 200  # characters of a variable in an error


def detect_launch(env: Mapping[str, str] | None = None) -> Launch:
    """Says how this process was started, as far as environment variables tell.

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
    env = _filled(os.environ if env is None else env)
    for launcher in (_SPAWN, _TORCHRUN):
        if launcher.signs[0] in env:
            return _Reading(launcher, env).launch()
    engine = _engine(env)
    if all(name in env for name in _PLATFORM.needs.values()):
        return _platform(env, engine).launch()
    if engine:
        reading = _slurm(engine, env) if engine.kind == "slurm" else _mpirun(engine, env)
        reading.agree(_RANKS | _LOCAL)  # a job script may set some of them itself
        return reading.launch()
    if _is_stripped_step(env):
        step = _slurm(_SLURM._replace(signs=("SLURM_PROCID", "SLURM_NTASKS")), env)
        step.wrong.append("a container must be given all of a task's SLURM_ variables")
        return step.launch()  # raises
    platforms, names = hints.nodes(env)
    if signs := tuple(dict.fromkeys([*names, *hints.processes(env)])):
        return _Reading(_unread(platforms)._replace(signs=signs), env).launch()  # raises, for something is missing
    return _single(env)


def _unread(platforms: list[hints.Nodes]) -> _Launcher:
    """Return who has started a process that is told no rank, and how to start ranks there."""
    if not platforms:
        return _PLATFORM
    start = f"Start torchrun on each node: {platforms[0].command()}"
    return _PLATFORM._replace(title=f"one of several nodes of {platforms[0].title}", start=start)


def _is_stripped_step(env: Mapping[str, str]) -> bool:
    """Return whether a container has passed on only some of a Slurm task's variables.

    A batch script has rank 0 and the job's number of tasks as well, but the job's id too and nothing of a step.
    """
    if "SLURM_PROCID" not in env or hints.number(env.get("SLURM_NTASKS", env.get("SLURM_NPROCS"))) < 2:
        return False
    of_a_step = any(name.startswith("SLURM_STEP") for name in env)
    return of_a_step or env["SLURM_PROCID"] != "0" or "SLURM_JOB_ID" not in env


def forgotten_launcher(launch: Launch) -> str | None:
    """Return a sentence to warn with if several tasks were allocated but this process is none of them; else None."""
    return next((line.removeprefix(_FORGOTTEN) for line in launch.evidence if line.startswith(_FORGOTTEN)), None)


def expand_nodelist(text: str) -> list[str]:
    """The host names that Slurm's short form stands for; `ValueError` if it is none.

    >>> expand_nodelist("gpu-a[01-03,7],b5")
    ['gpu-a01', 'gpu-a02', 'gpu-a03', 'gpu-a7', 'b5']
    """
    name, hosts = r"(?:[^\s,\[\]]|\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\])+", list[str]()
    if not re.fullmatch(f"{name}(?:,{name})*", text, re.ASCII):
        raise ValueError("not a list of nodes")
    for host in re.findall(name, text):
        parts = re.split(r"\[(.*?)\]", host)  # literal, numbers, literal, numbers, ..., literal
        hosts += map("".join, product(*(_numbers(part) if i % 2 else [part] for i, part in enumerate(parts))))
    return hosts


def _numbers(text: str) -> list[str]:
    spans = [item.partition("-") for item in text.split(",")]
    return [f"{n:0{len(low)}}" for low, _, high in spans for n in range(int(low), int(high or low) + 1)]


def expand_counts(text: str) -> list[int]:
    """The numbers that Slurm's short form stands for; `ValueError` if it is none.

    >>> expand_counts("4(x2),3")
    [4, 4, 3]
    """
    count = r"(\d+)(?:\(x(\d+)\))?"
    if not re.fullmatch(f"{count}(?:,{count})*", text, re.ASCII):
        raise ValueError("not a list of counts")
    return [int(number) for number, times in re.findall(count, text) for _ in range(int(times or 1))]


def derive_port(*parts: str) -> int:
    """A port that follows from the parts alone, from 10000 to 29499: below Linux' ephemeral range and torch's 29500."""
    return 10_000 + zlib.crc32("\0".join(parts).encode()) % 19_500


class _Reading:
    """What one launcher's variables say, and everything that is wrong with it."""

    def __init__(self, launcher: _Launcher, env: Mapping[str, str]) -> None:
        self.launcher, self.env = launcher, env
        self.names = {field: _given(names, env) for field, names in (launcher.needs | launcher.takes).items()}
        self.values: dict[str, Any] = {}
        self.missing: list[str] = []
        self.wrong: list[str] = []
        signs = (name for name in launcher.signs if name in env and name not in self.names.values())
        self.evidence = [f"{name}={env[name]}" for name in signs]
        for field, name in self.names.items():
            if name in env or field in launcher.needs:
                value = self.read(name, _PARSERS.get(field, _integer))
                self.values |= {} if value is None else {field: value}

    def read(self, name: str, parse: Callable[[str], Any]) -> Any:
        if name not in self.env:
            return self.missing.append(name)
        self.evidence.append(f"{name}={self.env[name]}")
        try:
            return parse(self.env[name])
        except ValueError as error:
            return self.wrong.append(f"{name}={self.env[name]} is {error}")

    def said(self, field: str) -> str:
        name = self.names.get(field, "")
        return f"{name if name in self.env else field}={self.values[field]}"

    def agree(self, names: Mapping[str, str]) -> None:
        for field, name in names.items():
            if name in self.env and field in self.values:
                self.evidence.append(f"{name}={self.env[name]}")
                if self.env[name] != str(self.values[field]):
                    clash = f"{name}={self.env[name]} contradicts {self.said(field)}"
                    self.wrong.append(f"{clash} (does a job script export it? then unset it there)")

    def launch(self) -> Launch:
        if self.values.get("world_size") == 1:
            self.values = {"local_rank": 0, "local_world_size": 1} | self.values
        if self.values.get("num_nodes") == 1 and {"rank", "world_size"} <= self.values.keys():
            self.values = {
                "local_rank": self.values["rank"],
                "local_world_size": self.values["world_size"],
            } | self.values
        if self.values.get("local_world_size", 0) == self.values.get("world_size"):
            self.values = {"node_rank": 0, "num_nodes": 1} | self.values
        for part, whole in _ORDER:
            if part in self.values and whole in self.values:
                is_rank = part.endswith("rank")
                if self.values[part] + is_rank > self.values[whole]:
                    relation = "is not below" if is_rank else "is more than"
                    self.wrong.append(f"{self.said(part)} {relation} {self.said(whole)}")
        if self.missing or self.wrong:
            raise LaunchError(self.complaint())
        return Launch(self.launcher.kind, **self.values, evidence=tuple(self.evidence))

    def complaint(self) -> str:
        missing = f"{', '.join(self.missing)} {'is' if len(self.missing) == 1 else 'are'} not set"
        problems = "; ".join([missing] * bool(self.missing) + self.wrong)
        forgotten = _forgotten(self.env, "SLURM_NTASKS") if self.launcher.kind == "platform" else None
        told = (self.names["rank"], self.names["world_size"])
        others = hints.pairs(self.env)
        marks = dict.fromkeys((*self.launcher.signs, *told, *_RANKS.values(), *_LOCAL.values(), *others))
        found = ", ".join(line if len(line) < _SHOWN else f"{line[:_SHOWN]}…" for line in self.evidence)
        return (
            f"This looks like {self.launcher.title}, but {problems}. Found: {found}. "
            f"{f'{forgotten}. ' if forgotten else ''}{self.launcher.start}; to run on one process, unset "
            f"{', '.join(name for name in marks if name in self.env)}."
        )


def _engine(env: Mapping[str, str]) -> _Launcher | None:
    found = [launcher for launcher in _ENGINES if any(sign in env for sign in launcher.signs)]
    if found and found[0].kind == "submitit" and env.get("SUBMITIT_LOCAL_NTASKS") == "1":
        found = found[1:]  # a lone task may start a launcher, which hands its variables on
    if found and found[0].kind == "pmi" and "MPI_LOCALRANKID" not in env:
        return found[-1]  # srun --mpi=pmi2 speaks PMI too
    return found[0] if found else None


def _platform(env: Mapping[str, str], engine: _Launcher | None) -> _Reading:
    """Complete by itself; but if more processes were started than it has ranks, some would claim the same one."""
    reading = _Reading(_PLATFORM, env)
    if engine:
        under = _Reading(engine._replace(needs={field: engine.needs[field] for field in _RANKS}, takes={}), env)
        if _RANKS.keys() <= reading.values.keys() & under.values.keys():
            more = under.values["world_size"] - reading.values["world_size"]
            if more > 0 or (more == 0 and under.values["rank"] != reading.values["rank"]):
                said = [f"{one.said('rank')}, {one.said('world_size')}" for one in (reading, under)]
                reading.wrong.append(
                    f"{' contradict '.join(said)} (does a job script export them? then unset them there)"
                )
    if reading.values.get("world_size") == 1 and not reading.wrong:
        _refuse_copies(reading, [*_signs_around(reading), *hints.nodes(env)[1]])
    return reading


def _signs_around(reading: _Reading) -> list[str]:
    """Name the variables of launches of several processes in which this one of one process was started.

    A Flux instance may span the tasks of a Slurm step, and a shell in a step is one of its tasks.
    """
    if reading.launcher.kind == "flux" or "SLURM_PTY_PORT" in reading.env:
        return []
    sizes = [engine.needs["world_size"] for engine in _ENGINES]
    several = [name for name in sizes if hints.number(reading.env.get(name)) > 1]
    return list(dict.fromkeys([*several, *hints.others(reading.env)]))


def _refuse_copies(reading: _Reading, signs: list[str]) -> None:
    """Refuse a launch of one process in each of several."""
    for name in signs[:1]:
        reading.evidence.append(f"{name}={reading.env[name]}")
        reading.wrong.append(
            f"{reading.said('world_size')} contradicts {name}={reading.env[name]}: each of several processes would run "
            f"alone (if this is meant, unset {', '.join(signs)})"
        )


def _mpirun(engine: _Launcher, env: Mapping[str, str]) -> _Reading:
    """MPI launchers tell no address to meet at, but their user may (mpirun -x)."""
    reading = _Reading(engine, env)
    given = [name for name in _MASTER.values() if name in env]
    if reading.values.get("world_size") == 1:
        _meet_nobody(reading)
        _refuse_copies(reading, _signs_around(reading))
    elif len(given) == 1:
        reading.missing += [name for name in _MASTER.values() if name not in given]
    return reading


def _slurm(engine: _Launcher, env: Mapping[str, str]) -> _Reading:
    """Only the step's own variables: SLURM_NTASKS and SLURM_JOB_NODELIST are the job's, and layouts may be uneven."""
    step = _Reading(engine, env)
    hosts = step.read("SLURM_STEP_NODELIST", expand_nodelist) or []
    counts = step.read("SLURM_STEP_TASKS_PER_NODE", expand_counts) or []
    world_size = step.values.get("world_size")
    step.agree({"rank": "PMI_RANK", "world_size": "PMI_SIZE"})
    if hosts and counts and world_size:
        step.values["num_nodes"] = len(hosts)
        if len(hosts) != len(counts) or sum(counts) != world_size:
            layout = f"SLURM_STEP_TASKS_PER_NODE={env['SLURM_STEP_TASKS_PER_NODE']}"
            step.wrong.append(f"{layout} is not {world_size} tasks on {len(hosts)} nodes")
        elif step.values.get("node_rank", len(hosts)) < len(hosts):
            step.values["local_world_size"] = counts[step.values["node_rank"]]
    if world_size == 1:
        _meet_nobody(step)
        if forgotten := _forgotten(env, "SLURM_NTASKS"):  # salloc may open its shell in a step of one task
            step.evidence.append(_FORGOTTEN + forgotten)
    else:
        _meet(step, hosts)
    return step


def _meet(step: _Reading, hosts: list[str]) -> None:
    """All tasks derive the same address: the step's first node, where rank 0 runs unless the layout is arbitrary."""
    values = step.values
    if "MASTER_ADDR" not in step.env and hosts:
        arbitrary = step.env.get("SLURM_DISTRIBUTION", "").startswith("arbitrary")
        if len(hosts) > 1 and (arbitrary or (values.get("rank") == 0 and values.get("node_rank", 0) > 0)):
            step.wrong.append("srun -m arbitrary may run rank 0 on any node: export MASTER_ADDR, the host of rank 0")
        else:
            values["master_addr"] = hosts[0] if len(hosts) > 1 else "127.0.0.1"
            step.evidence.append(f"the ranks meet at {values['master_addr']}, on the first node of the step")
    if "MASTER_PORT" not in step.env:
        ids = [step.read(name, str) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")]
        values["master_port"] = derive_port(*map(str, ids))
        step.evidence.append(f"port {values['master_port']} follows from job and step")


def _meet_nobody(reading: _Reading) -> None:
    """Jobs of one task may run side by side under one exported MASTER_PORT, so a lone task opens none."""
    for field in _MASTER:
        reading.values.pop(field, None)


def _single(env: Mapping[str, str]) -> Launch:
    evidence = [f"{name}={env[name]}" for name in (*_RANKS.values(), *_LOCAL.values()) if name in env]
    if ignored := [f"{name}={env[name]}" for name in _MASTER.values() if name in env]:
        evidence.append(f"{', '.join(ignored)} ignored: nothing tells of other ranks")
    if forgotten := _forgotten(env, *_ALLOCATED):
        evidence.append(_FORGOTTEN + forgotten)
    return Launch("single", 0, 1, 0, 1, 0, 1, evidence=(*evidence, "no launcher: one process"))


def _forgotten(env: Mapping[str, str], *names: str) -> str | None:
    for name in names:
        text, tool = env.get(name, "1"), _ALLOCATED[name]
        several = len(text.split()) > 2 if name == "LSB_MCPU_HOSTS" else text != "1"  # "host1 4 host2 4"
        if several:
            return (
                f"{name}={text}, but this process is none of {tool}'s tasks (a batch script, or a shell in an "
                f"allocation), so it runs alone: start the ranks with {tool}"
            )
    return None


def _given(names: str, env: Mapping[str, str]) -> str:
    """Return the first of these alternatives that is set, or the first."""
    alternatives = names.split("|")
    return next((name for name in alternatives if name in env), alternatives[0])


def _integer(text: str, least: int = 1, most: int | None = None) -> int:
    if not re.fullmatch("[0-9]+", text) or int(text) < least or (most is not None and int(text) > most):
        raise ValueError(f"not an integer {f'from {least} to {most}' if most else f'of at least {least}'}")
    return int(text)


_PARSERS: dict[str, Callable[[str], Any]] = {  # of the sizes: _integer
    **dict.fromkeys(("rank", "local_rank", "node_rank"), lambda text: _integer(text, 0)),
    "master_addr": str,
    "master_port": lambda text: _integer(text, 1, 65535),
}


def _filled(env: Mapping[str, str]) -> dict[str, str]:
    filled = {name: text.strip() for name, text in env.items() if text.strip()}
    if filled.get("WORLD_SIZE", "1") == "1":
        for name in ("RANK", "LOCAL_RANK"):
            if filled.get(name) == "-1":  # how many scripts say that they are not distributed
                del filled[name]
    return filled


def outer_launch(agent_env: Mapping[str, str], launch: Launch, env: Mapping[str, str]) -> str | None:
    """Says of which launch torchrun itself was part, if that launch's processes have started separate torchrun jobs.

    It is right that each process of a launch starts one agent of one torchrun job. That job then has as many agents as
    the launch has processes (in any order: torchrun's rendezvous sorts them by host name). Where a platform configures
    torchrun by PET_NNODES, that is their number, or its range.

    Args:
        agent_env: The environment in which torchrun was started.
        launch: This process's launch.
        env: This process's environment.

    Returns:
        What is wrong and what to do; None if all is right, or if torchrun's environment makes no sense by itself.
    """
    outside = _filled(agent_env)
    explicit = all(name in outside for name in _RANKS.values())
    agents = env.get("GROUP_WORLD_SIZE", "")
    try:
        bare = _PLATFORM._replace(signs=(), needs=_RANKS, takes={})  # no address needed: torchrun brings its own
        outer = _Reading(bare, outside).launch() if explicit else detect_launch(outside)
    except LaunchError:
        return None
    if launch.kind != "torchrun" or outer.world_size == 1 or not agents:
        return None
    nodes = "" if "TORCHELASTIC_RUN_ID" in outside else outside.get("PET_NNODES", "")
    low, _, high = (nodes if re.fullmatch("[0-9]+(:[0-9]+)?", nodes) else str(outer.world_size)).partition(":")
    if int(low) <= int(agents) <= int(high or low):
        return None
    marks = [name for name in (*_RANKS.values(), *(sign for x in _ENGINES for sign in x.signs)) if name in outside]
    return (
        f"torchrun was started by rank {outer.rank} of {outer.world_size} of another launch "
        f"({', '.join(outer.evidence[:2])}), but its job has {agents} agent{'s' * (agents != '1')}: "
        "the outer ranks would run separate jobs. Start torchrun once per node with --nnodes, or leave out one of the "
        f"two launchers; if this is meant, unset {', '.join(marks)} in front of torchrun."
    )
