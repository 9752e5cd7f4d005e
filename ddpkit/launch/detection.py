"""Detect how this process was started: environment variables in, a frozen `Launch` out."""

from __future__ import annotations

import math
import os
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..errors import LaunchError, printable
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
    Environment,
    Launch,
    Launcher,
)


def detect_launch(env: Environment | None = None) -> Launch:
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
        reading.check_agreement()
        return reading.launch()
    platforms = nodes(env)
    signs = (*platforms, *processes(env))
    if signs:
        launcher = PLATFORM._replace(signs=signs)
        if platforms:
            title = f"one of several nodes of {next(iter(platforms.values()))}"
            launcher = launcher._replace(title=title, start=START_ON_NODES)
        return Reading(launcher, env).launch()  # raises, because something is missing
    return _single(env)


def _find_mpi_or_slurm(env: Environment) -> Launcher | None:
    """Return the launcher whose variables are set, the first in the table."""
    found = [launcher for launcher in MPI_AND_SLURM if any(sign in env for sign in launcher.signs)]
    if found and found[0].kind == "submitit" and env.get("SUBMITIT_LOCAL_NTASKS") == "1":
        found = found[1:]  # a lone task may start a launcher, which passes its variables on
    if not found:  # a container may have passed on only some of a Slurm task's variables
        return SLURM if number(env.get("SLURM_PROCID")) > 0 else None
    speaks_pmi = found[0].kind == "pmi" and "MPI_LOCALRANKID" not in env
    return found[-1] if speaks_pmi else found[0]  # srun --mpi=pmi2 speaks PMI, too


def _read_mpirun(launcher: Launcher, env: Environment) -> Reading:
    """Read the variables of a launcher that sets no address, though its user may (mpirun -x)."""
    reading = Reading(launcher, env)
    absent = [name for name in MASTER.values() if name not in env]
    if reading.values.get("world_size") == 1:
        drop_address(reading)
        _refuse_copies(reading)
    elif len(absent) == 1:
        reading.missing += absent
    return reading


def _read_platform(env: Environment, launcher: Launcher | None) -> Reading:
    """Read RANK etc., which are complete; raise for fewer ranks than this launcher started processes."""
    reading = Reading(PLATFORM, env)
    names = [launcher.needs[field] for field in RANKS] if launcher else []
    if names and all(name in env for name in names) and RANKS.keys() <= reading.values.keys():
        rank, world_size = [number(env[name]) for name in names]
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
    signs = [name for name in sizes if number(reading.env.get(name)) > 1]
    for sign in (*signs, *nodes(reading.env)):
        reading.evidence.append(reading.shown(sign))
        reading.wrong.append(
            f"{reading.said('world_size')} contradicts {reading.shown(sign)}: each of several processes would run "
            f"alone (to allow this, unset {sign})"
        )


def _single(env: Environment) -> Launch:
    evidence = [shown(name, env) for name in (*RANKS.values(), *LOCAL.values()) if name in env]
    ignored = [shown(name, env) for name in MASTER.values() if name in env]
    if ignored:
        evidence.append(f"{', '.join(ignored)} ignored: nothing indicates other ranks")
    if warning := warn_of_allocation(env, *ALLOCATIONS):
        evidence.append(FORGOTTEN + warning)
    return Launch("single", 0, 1, 0, 1, 0, 1, evidence=(*evidence, "no launcher: one process"))


# A Slurm step. Only the step's own variables give the place of a task: SLURM_NTASKS and SLURM_JOB_NODELIST are the
# job's, and layouts may be uneven.


def read_step(env: Environment) -> Reading:
    """Read a task's place in its step, and derive the address at which all tasks meet."""
    step = Reading(SLURM, env)
    host = step.read("SLURM_STEP_NODELIST", first_host)
    layout = "SLURM_STEP_TASKS_PER_NODE"
    tasks = number(re.sub(r"\(x\d+\)$", "", env.get(layout, "")))
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


# Platforms that start one process per node and leave the ranks to torchrun: without it, each process would consider
# itself alone.


_PLATFORMS = {  # by the variable with the number of nodes, or their list
    "SKYPILOT_NUM_NODES": "SkyPilot",
    "DSTACK_NODES_NUM": "dstack",
    "LWS_GROUP_SIZE": "a LeaderWorkerSet",
    "_CONDOR_NPROCS": "HTCondor",
    "BEAKER_REPLICA_COUNT": "Beaker",
    "NGC_ARRAY_SIZE": "Base Command Platform",
    "ARNOLD_WORKER_NUM": "Arnold",
    "MLP_WORKER_NUM": "Volcano Engine",
    "MA_NUM_HOSTS": "ModelArts",
    "AWS_BATCH_JOB_NUM_NODES": "AWS Batch",
    "AZ_BATCH_NODE_LIST": "Azure Batch",
    "SM_HOSTS": "SageMaker",
    "PET_NNODES": "Kubeflow",
}
START_ON_NODES = (
    "Start torchrun on each node: torchrun --nnodes=<their number> --node-rank=<number of this one, from 0> "
    "--master-addr=<address of node 0> --nproc-per-node=gpu train.py; if PET_NNODES is set, torchrun train.py"
)


def nodes(env: Environment) -> dict[str, str]:
    """Return the platforms that report several nodes, by the variable that reports it."""
    return {name: title for name, title in _PLATFORMS.items() if _count(env.get(name, "")) > 1}


def processes(env: Environment) -> list[str]:
    """Return the variables that report several processes."""
    harmless = (None, "0") if env.get("WORLD_SIZE") == "1" else (None,)
    found = [name for name in ("RANK", "LOCAL_RANK", "PMIX_RANK") if env.get(name) not in harmless]
    return found + [name for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE") if env.get(name, "1") != "1"]


def number(text: str | None) -> int:
    """Return a number, or the maximum of a range such as torchrun's 1:4; 0 for another text, or one too long."""
    found = re.fullmatch("(?:[0-9]+:)?([0-9]{1,9})", (text or "").strip())
    return int(found[1]) if found else 0


def port(text: str | None) -> int:
    """Return a port; 0 for another text."""
    found = number(text)
    return found if found < 1 << 16 else 0


def _count(text: str) -> int:
    """Return a number of nodes, which may be given as their list."""
    return number(text) or len(re.findall(r"[^\s,;]+", text))


# Read a launcher's variables.

_VARIABLE_LENGTH = 200  # characters of a variable in an error
_BOUNDS = (  # a rank is below a size; a part is at most the whole
    ("rank", "world_size"),
    ("local_rank", "local_world_size"),
    ("local_rank", "world_size"),
    ("local_world_size", "world_size"),
    ("node_rank", "num_nodes"),
    ("node_rank", "world_size"),
    ("num_nodes", "world_size"),
)


@dataclass
class Reading:
    """The variables of one launcher, as found in this process.

    Attributes:
        launcher: The launcher.
        env: The environment variables.
        values: Values that could be read, by field of `Launch`.
        missing: Names of missing variables.
        wrong: Sentences about invalid ones.
        evidence: "NAME=value" of each variable used, and conclusions in words.
    """

    launcher: Launcher
    env: Environment

    def __post_init__(self) -> None:
        """Read the variables."""
        env, launcher = self.env, self.launcher
        self.values: dict[str, Any] = {}
        self.missing: list[str] = []
        self.wrong: list[str] = []
        self._names = {}  # variable of each field: the first alternative that is set
        for field, alternatives in (launcher.needs | launcher.takes).items():
            names = alternatives.split("|")
            self._names[field] = next((name for name in names if name in env), names[0])
        signs = [name for name in launcher.signs if name in env and name not in self._names.values()]
        self.evidence = [*map(self.shown, signs)]
        for field, name in self._names.items():
            is_due = name in env or field in launcher.needs
            if is_due and (value := self.read(name, partial(_parse, field))) is not None:
                self.values[field] = value

    def read(self, name: str, parse: Callable[[str], Any]) -> Any:
        """Return the value of a variable; None, with a note, if it is missing or invalid."""
        if name not in self.env:
            self.missing.append(name)
            return None
        self.evidence.append(self.shown(name))
        try:
            return parse(self.env[name])
        except ValueError as error:
            self.wrong.append(f"{self.shown(name)} is {error}")
            return None

    def shown(self, name: str) -> str:
        """Return a variable as `shown()` does."""
        return shown(name, self.env)

    def said(self, field: str) -> str:
        """Return the source of a value, such as "RANK=3"."""
        name = self._names.get(field)
        return f"{name if name in self.env else field}={self.values[field]}"

    def check_agreement(self) -> None:
        """Note where RANK etc., which a job script may set itself, contradict the values."""
        for field, name in (RANKS | LOCAL).items():
            if name in self.env and field in self.values:
                self.evidence.append(self.shown(name))
                if self.env[name] != str(self.values[field]):
                    clash = f"{self.shown(name)} contradicts {self.said(field)}"
                    self.wrong.append(f"{clash} (does a job script export it? then unset it there)")

    def launch(self) -> Launch:
        """Return the launch.

        Raises:
            LaunchError: If something is missing or invalid.
        """
        self._conclude()
        if self.missing or self.wrong:
            raise LaunchError(self._complaint())
        return Launch(self.launcher.kind, **self.values, evidence=tuple(self.evidence))

    def _conclude(self) -> None:
        """Derive further fields from the values, and note where they contradict each other."""
        values = self.values
        if values.get("world_size") == 1:
            values.setdefault("num_nodes", 1)
        if values.get("num_nodes") == 1 and "rank" in values and "world_size" in values:
            values.setdefault("local_rank", values["rank"])
            values.setdefault("local_world_size", values["world_size"])
        if "world_size" in values and values.get("local_world_size") == values["world_size"]:
            values.setdefault("node_rank", 0)
            values.setdefault("num_nodes", 1)
        for part, whole in _BOUNDS:
            value, bound = values.get(part, -1), values.get(whole, math.inf)
            if part.endswith("rank") and value >= bound:
                self.wrong.append(f"{self.said(part)} is not below {self.said(whole)}")
            elif value > bound:
                self.wrong.append(f"{self.said(part)} is more than {self.said(whole)}")

    def _complaint(self) -> str:
        verb = "is" if len(self.missing) == 1 else "are"
        missing = [f"{', '.join(self.missing)} {verb} not set"] if self.missing else []
        found = ", ".join(self.evidence)
        marks = (*self.launcher.signs, self._names["rank"], self._names["world_size"], *RANKS.values(), *LOCAL.values())
        unset = [name for name in dict.fromkeys(marks) if name in self.env]
        text = f"This looks like {self.launcher.title}, but {'; '.join(missing + self.wrong)}. Found: {found}. "
        warning = warn_of_allocation(self.env, "SLURM_NTASKS")
        if warning and self.launcher.kind == "platform":
            text += f"{warning}. "
        return f"{text}{self.launcher.start}; to run on one process, unset {', '.join(unset)}."


def filled(env: Environment) -> dict[str, str]:
    """Return the variables that are not empty; many scripts set a rank of -1 for "not distributed"."""
    found = {name: text.strip() for name, text in env.items() if text.strip()}
    if found.get("WORLD_SIZE", "1") == "1":
        for name in ("RANK", "LOCAL_RANK"):
            if found.get(name) == "-1":
                del found[name]
    return found


def shown(name: str, env: Environment) -> str:
    """Return a variable as "NAME=value", printable, a long value shortened."""
    return printable(f"{name}={env[name]}")[:_VARIABLE_LENGTH]


def drop_address(reading: Reading) -> None:
    """Forget the address: jobs of one task may run side by side under one exported MASTER_PORT."""
    for field in MASTER:
        reading.values.pop(field, None)


def warn_of_allocation(env: Environment, *names: str) -> str | None:
    """Return a warning if one of these variables reports several tasks and this process is not one of them."""
    name = next((name for name in names if env.get(name, "1") != "1"), None)
    if name is None:
        return None
    tool = ALLOCATIONS[name]
    return (
        f"{shown(name, env)}, but this process is not one of {tool}'s tasks (a batch script, or a shell in an "
        f"allocation), so it runs alone: start the ranks with {tool}"
    )


def derive_port(*parts: str) -> int:
    """Derive a port from the parts alone, from 10000 to 29499.

    This is below the range from which Linux assigns ports, and below torch's 29500.
    """
    return 10_000 + zlib.crc32("\0".join(parts).encode(errors="replace")) % 19_500


def _parse(field: str, text: str) -> Any:
    """Convert the value of a field of `Launch`; raise `ValueError` if the text is invalid."""
    if field == "master_addr":
        return text
    least = 0 if field.endswith("rank") else 1
    most, bounds = 1 << 62, f"of at least {least}"
    if field == "master_port":
        most, bounds = 65535, f"from {least} to 65535"
    if not re.fullmatch("[0-9]{1,19}", text) or not least <= int(text) <= most:
        raise ValueError(f"not an integer {bounds}")
    return int(text)
