"""Read what a launcher tells, and find signs of launchers that tell no rank."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import product
from typing import Any, NamedTuple

from ..errors import LaunchError
from .launch import ALLOCATIONS, LOCAL, MASTER, RANKS, Launch, Launcher

# Signs that this is one of several processes or nodes, where no rank is told that could be read.
# Platforms start a process on each node and leave the ranks there to torchrun: where it is
# forgotten, each would believe to be alone.


class Nodes(NamedTuple):
    """A platform that starts a process on each of several nodes, and the variables in which it tells them so."""

    title: str
    number: str  # number of nodes, or their list
    rank: str = ""  # number of this one
    address: str = "<address of node 0>"  # as a shell writes it

    def command(self) -> str:
        """Return the line that starts the ranks of each node."""
        if self.number == "PET_NNODES":  # torchrun reads these by itself
            return "torchrun train.py"
        number, rank = "<number of nodes>", "<number of this one, from 0>"
        if self.rank:
            number, rank = f"${self.number}", f"${self.rank}"
        return (
            f"torchrun --nnodes={number} --node-rank={rank} --master-addr={self.address} --nproc-per-node=gpu train.py"
        )


_PLATFORMS = (
    Nodes("SkyPilot", "SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK", '$(echo "$SKYPILOT_NODE_IPS" | head -n 1)'),
    Nodes("dstack", "DSTACK_NODES_NUM", "DSTACK_NODE_RANK", "$DSTACK_MASTER_NODE_IP"),
    Nodes("a LeaderWorkerSet", "LWS_GROUP_SIZE", "LWS_WORKER_INDEX", "$LWS_LEADER_ADDRESS"),
    Nodes("HTCondor", "_CONDOR_NPROCS", "_CONDOR_PROCNO"),
    Nodes("Beaker", "BEAKER_REPLICA_COUNT", "BEAKER_REPLICA_RANK", "$BEAKER_LEADER_REPLICA_HOSTNAME"),
    Nodes("Base Command Platform", "NGC_ARRAY_SIZE", "NGC_ARRAY_INDEX", "$NGC_MASTER_ADDR"),
    Nodes("Arnold", "ARNOLD_WORKER_NUM", "ARNOLD_ID", "$ARNOLD_WORKER_0_HOST"),
    Nodes("Volcano Engine", "MLP_WORKER_NUM", "MLP_ROLE_INDEX", "$MLP_WORKER_0_HOST"),
    Nodes("ModelArts", "MA_NUM_HOSTS", "VC_TASK_INDEX"),
    Nodes("PaddleCloud", "PADDLE_TRAINERS_NUM", "PADDLE_TRAINER_ID"),
    Nodes("AWS Batch", "AWS_BATCH_JOB_NUM_NODES", "AWS_BATCH_JOB_NODE_INDEX"),
    Nodes("Azure Batch", "AZ_BATCH_NODE_LIST", address="${AZ_BATCH_MASTER_NODE%:*}"),
    Nodes("SageMaker", "SM_HOSTS"),
    Nodes("SageMaker", "SM_RESOURCE_CONFIG"),
    Nodes("Vertex AI", "CLUSTER_SPEC"),
    Nodes("a TensorFlow cluster", "TF_CONFIG"),
    Nodes("a TPU slice", "TPU_WORKER_HOSTNAMES", "TPU_WORKER_ID"),
    Nodes("Kubeflow", "PET_NNODES", "PET_NODE_RANK"),
)
_ABOVE_0 = (
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "GLOBAL_RANK", "LWS_WORKER_INDEX"),
    *("PALS_RANKID", "ALPS_APP_PE", "PBS_NODENUM", "PBS_VNODENUM", "VC_TASK_INDEX"),
    *("SUBMITIT_LOCAL_LOCALID", "FLUX_TASK_LOCAL_ID"),
)
_PAIRS = {
    "JAX_PROCESS_ID": "JAX_NUM_PROCESSES",
    "PROCESS_ID": "NUM_PROCESSES",
    "WORKER_RANK": "WORKER_NUM",
    "DMLC_WORKER_ID": "DMLC_NUM_WORKER",
    "RANK_ID": "RANK_SIZE",
}
_NEURON = ("NEURON_PJRT_PROCESS_INDEX", "NEURON_PJRT_PROCESSES_NUM_DEVICES")

# endings of the number of a node, and of how many there are
_NODE_NUMBERS = ("NODE_RANK", "MACHINE_RANK", "GROUP_RANK")
_NODE_COUNTS = (
    *("NNODES", "NNODE", "NODES", "NODES_NUM", "NODE_NUM", "NODE_COUNT"),
    *("MACHINES", "MACHINES_NUM", "MACHINE_NUM", "MACHINE_COUNT"),
)
_OF_PROCESSES = "(^|_)(WORLD|COMM|JOB|GLOBAL|CROSS|DIST|DDP|DP|TP|PP)(_|$)|MPI"  # words of launchers, none of models


def processes(env: Mapping[str, str]) -> list[str]:
    """Name the variables that say that this is one of several processes."""
    hints = []
    for name in ("RANK", "LOCAL_RANK"):
        told_alone = env.get(name) == "0" and env.get("WORLD_SIZE") == "1"
        if name in env and not told_alone:
            hints.append(name)
    hints += [name for name in ["PMIX_RANK"] if name in env]
    hints += [name for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE") if env.get(name, "1") != "1"]
    hints += _above_0(env)
    for name in _ending(env, "RANK", "RANKID"):
        value = number(env[name], -1)
        is_local = re.search("_LOCAL_?RANK(ID)?$", name.upper()) and value >= 0
        is_node = name.upper().endswith("_NODE_RANK") and value > 0
        if is_local or is_node:
            hints.append(name)
    return [*hints, *pairs(env)]


def others(env: Mapping[str, str]) -> list[str]:
    """Name the variables that say that there are others beside a process that was told to be the only one."""
    pmix = [name for name in ["PMIX_RANK"] if number(env.get(name)) > 0]
    return [*_above_0(env), *pmix, *pairs(env)]


def _above_0(env: Mapping[str, str]) -> list[str]:
    names = [name for name in _ABOVE_0 if number(env.get(name)) > 0]
    if number(env.get("LSF_PM_TASKID")) > 1:  # counts from 1
        names.append("LSF_PM_TASKID")
    return names


def _ending(env: Mapping[str, str], *ends: str) -> list[str]:
    return [name for name in env if name.upper().endswith(ends)]


def pairs(env: Mapping[str, str]) -> list[str]:
    """Name pairs such as DP_RANK and DP_WORLD_SIZE that say several processes; LORA_RANK and LORA_SIZE do not."""
    ranks = _ending(env, "_RANK")
    names = {name.upper(): name for name in env} if ranks else {}
    found = []
    for rank, size in _PAIRS.items():
        if _is_one_of_several(env, rank, size):
            found += [rank, size]
    if all(name in env for name in _NEURON) and "," in env[_NEURON[1]]:  # devices of each process
        found += _NEURON
    for rank in ranks:
        stem = rank.upper().removesuffix("_RANK")
        sizes = [f"{stem}_{word}" for word in ("WORLD_SIZE", "NPROCS", "NRANKS")]
        if re.search(_OF_PROCESSES, stem) or f"{stem}_LOCAL_RANK" in names:
            sizes.append(f"{stem}_SIZE")
        for size in sizes:
            if _is_one_of_several(env, rank, names.get(size, "")):
                found += [rank, names[size]]
    return found


def _is_one_of_several(env: Mapping[str, str], rank: str, size: str) -> bool:
    """Return whether two variables hold a number and how many there are, more than one."""
    index = number(env.get(rank), -1)
    count = number(env.get(size))
    return count > 1 and 0 <= index < count


def nodes(env: Mapping[str, str]) -> tuple[list[Nodes], list[str]]:
    """Find who says that this is one of several nodes, and in which variables."""
    platforms = [each for each in _PLATFORMS if each.number in env and _count(env[each.number]) > 1]
    platforms += _numbered(env)
    names = [name for platform in platforms for name in platform[1:3] if name in env]
    tasks = _volcano(env)
    if tasks:
        platforms.append(Nodes("Volcano", tasks[0]))
        names += tasks
    return platforms, list(dict.fromkeys(names))


def _numbered(env: Mapping[str, str]) -> Iterator[Nodes]:
    """Find pairs such as NODE_RANK beside NNODES, of whoever starts a process on each node."""
    known = [platform.number for platform in _PLATFORMS]
    for rank, size in product(("NODE_ID", "NODE_INDEX"), ("NNODES", "NUM_NODES", "NODE_COUNT")):
        if _is_one_of_several(env, rank, size):
            yield Nodes("a cluster", size, rank)
    found = [*product(_ending(env, *_NODE_NUMBERS), _ending(env, *_NODE_COUNTS))]
    found += [("HOST_INDEX", "HOST_NUM"), ("INDEX", "HOST_NUM")]
    for rank, size in found:
        if rank in env and number(env.get(size)) > 1 and size not in known:
            yield Nodes("a cluster", size, rank)


def _volcano(env: Mapping[str, str]) -> list[str]:
    """Name the numbers of pods, one for each kind of task; a version of a build may be called VC_BUILD_NUM."""
    sizes = []
    for name in env:
        if not name.startswith("VC_") or not name.endswith("_NUM"):
            continue
        if "VC_TASK_INDEX" in env or f"{name.removesuffix('_NUM')}_HOSTS" in env:
            sizes.append(name)
    pods = sum(number(env[name]) for name in sizes)
    return sizes if pods > 1 else []


def number(text: str | None, otherwise: int = 0) -> int:
    """Return a number, or the greatest of a range such as torchrun's 1:4."""
    found = re.fullmatch("(?:[0-9]+:)?([0-9]{1,9})", text or "")
    return int(found[1]) if found else otherwise


def _count(text: str) -> int:
    """Return a number of nodes, which may be that of the entries of a list or of a cluster in JSON."""
    count = number(text)
    if count:
        return count
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return len(re.findall(r"[^\s,;]+", text))
    if isinstance(found, dict):
        found = found.get("hosts") or found.get("cluster")
    if isinstance(found, dict):
        return sum(len(hosts) for hosts in found.values() if isinstance(hosts, list))
    return len(found) if isinstance(found, list) else 0


# Reading what a launcher tells.

_VARIABLE_LENGTH = 200  # characters of a variable in an error
_BOUNDS = (  # a rank is below, a size at most
    ("rank", "world_size"),
    ("local_rank", "local_world_size"),
    ("local_rank", "world_size"),
    ("local_world_size", "world_size"),
    ("node_rank", "num_nodes"),
    ("num_nodes", "world_size"),
)


class Reading:
    """The variables of one launcher, as this process finds them.

    Attributes:
        launcher: The launcher.
        env: The environment variables.
        values: By field of `Launch`, what could be read.
        missing: Names of variables that should be there.
        wrong: Sentences about those that make no sense.
        evidence: "NAME=value" of each that was used, and in words what was concluded.
    """

    def __init__(self, launcher: Launcher, env: Mapping[str, str]) -> None:
        self.launcher = launcher
        self.env = env
        self.values: dict[str, Any] = {}
        self.missing: list[str] = []
        self.wrong: list[str] = []
        self.evidence: list[str] = []
        self._names = {}  # by field, that of its variable: the first of alternatives that is set
        for field, alternatives in (launcher.needs | launcher.takes).items():
            names = alternatives.split("|")
            self._names[field] = next((name for name in names if name in env), names[0])
        for name in launcher.signs:
            if name in env and name not in self._names.values():
                self.evidence.append(f"{name}={env[name]}")
        for field, name in self._names.items():
            if name in env or field in launcher.needs:
                value = self.read(name, partial(_parse, field))
                if value is not None:
                    self.values[field] = value

    def read(self, name: str, parse: Callable[[str], Any]) -> Any:
        """Return the value of a variable; None, with a note, if it is missing or wrong."""
        if name not in self.env:
            self.missing.append(name)
            return None
        self.evidence.append(f"{name}={self.env[name]}")
        try:
            return parse(self.env[name])
        except ValueError as error:
            self.wrong.append(f"{name}={self.env[name]} is {error}")
            return None

    def said(self, field: str) -> str:
        """Write where a value comes from, such as "RANK=3"."""
        name = self._names.get(field, "")
        if name not in self.env:
            name = field
        return f"{name}={self.values[field]}"

    def check_agreement(self, names: Mapping[str, str]) -> None:
        """Note where other variables, by field, tell something else."""
        for field, name in names.items():
            if name not in self.env or field not in self.values:
                continue
            self.evidence.append(f"{name}={self.env[name]}")
            if self.env[name] != str(self.values[field]):
                clash = f"{name}={self.env[name]} contradicts {self.said(field)}"
                self.wrong.append(f"{clash} (does a job script export it? then unset it there)")

    def launch(self) -> Launch:
        """Make the launch.

        Raises:
            LaunchError: If something is missing or wrong.
        """
        self._conclude()
        self._check_bounds()
        if self.missing or self.wrong:
            raise LaunchError(self._complaint())
        return Launch(self.launcher.kind, **self.values, evidence=tuple(self.evidence))

    def _conclude(self) -> None:
        """Fill in what follows from the values."""
        values = self.values
        if values.get("world_size") == 1:
            values.setdefault("local_rank", 0)
            values.setdefault("local_world_size", 1)
        if values.get("num_nodes") == 1 and "rank" in values and "world_size" in values:
            values.setdefault("local_rank", values["rank"])
            values.setdefault("local_world_size", values["world_size"])
        if "world_size" in values and values.get("local_world_size") == values["world_size"]:
            values.setdefault("node_rank", 0)
            values.setdefault("num_nodes", 1)

    def _check_bounds(self) -> None:
        for part, whole in _BOUNDS:
            if part not in self.values or whole not in self.values:
                continue
            value, bound = self.values[part], self.values[whole]
            if part.endswith("rank") and value >= bound:
                self.wrong.append(f"{self.said(part)} is not below {self.said(whole)}")
            elif value > bound:
                self.wrong.append(f"{self.said(part)} is more than {self.said(whole)}")

    def _complaint(self) -> str:
        problems = list(self.wrong)
        if self.missing:
            verb = "is" if len(self.missing) == 1 else "are"
            problems.insert(0, f"{', '.join(self.missing)} {verb} not set")
        found = []
        for line in self.evidence:
            found.append(line if len(line) < _VARIABLE_LENGTH else f"{line[:_VARIABLE_LENGTH]}…")
        told = (self._names["rank"], self._names["world_size"])
        marks = (*self.launcher.signs, *told, *RANKS.values(), *LOCAL.values(), *pairs(self.env))
        unset = [name for name in dict.fromkeys(marks) if name in self.env]
        text = f"This looks like {self.launcher.title}, but {'; '.join(problems)}. Found: {', '.join(found)}. "
        warning = None
        if self.launcher.kind == "platform":
            warning = warn_of_allocation(self.env, "SLURM_NTASKS")
        if warning:
            text += f"{warning}. "
        return f"{text}{self.launcher.start}; to run on one process, unset {', '.join(unset)}."


def filled(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that hold something; a rank of -1 is how many scripts say that they are not distributed."""
    found = {name: text.strip() for name, text in env.items() if text.strip()}
    if found.get("WORLD_SIZE", "1") == "1":
        for name in ("RANK", "LOCAL_RANK"):
            if found.get(name) == "-1":
                del found[name]
    return found


def meet_nobody(reading: Reading) -> None:
    """Forget the address: jobs of one task may run side by side under one exported MASTER_PORT."""
    for field in MASTER:
        reading.values.pop(field, None)


def warn_of_allocation(env: Mapping[str, str], *names: str) -> str | None:
    """Return a sentence if one of these variables tells of several tasks, of which this process is none."""
    for name in names:
        text = env.get(name, "1")
        several = text != "1"
        if name == "LSB_MCPU_HOSTS":  # "host1 4 host2 4"
            several = len(text.split()) > 2
        if several:
            tool = ALLOCATIONS[name]
            return (
                f"{name}={text}, but this process is none of {tool}'s tasks (a batch script, or a shell in an "
                f"allocation), so it runs alone: start the ranks with {tool}"
            )
    return None


def derive_port(*parts: str) -> int:
    """Return a port that follows from the parts alone, from 10000 to 29499.

    That is below the range from which Linux takes ports by itself, and torch's 29500.
    """
    return 10_000 + zlib.crc32("\0".join(parts).encode()) % 19_500


def _parse(field: str, text: str) -> Any:
    """Return the value of a field of `Launch`; raise `ValueError` if the text is none."""
    if field == "master_addr":
        return text
    least = 0 if field.endswith("rank") else 1
    bounds = f"of at least {least}"
    most = 1 << 62
    if field == "master_port":
        most = 65535
        bounds = f"from {least} to {most}"
    if not re.fullmatch("[0-9]+", text) or not least <= int(text) <= most:
        raise ValueError(f"not an integer {bounds}")
    return int(text)
