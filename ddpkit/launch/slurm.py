"""The place of a task in a Slurm step.

Only the step's own variables tell it: SLURM_NTASKS and SLURM_JOB_NODELIST are the job's, and layouts may be uneven.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import product

from . import hints
from .launch import FORGOTTEN
from .launchers import Launcher
from .reading import Reading, derive_port, meet_nobody, warn_of_allocation


def read_step(launcher: Launcher, env: Mapping[str, str]) -> Reading:
    """Read what a task is told of its step, and derive the address at which all tasks meet."""
    step = Reading(launcher, env)
    hosts = step.read("SLURM_STEP_NODELIST", expand_nodelist) or []
    counts = step.read("SLURM_STEP_TASKS_PER_NODE", expand_counts) or []
    step.check_agreement({"rank": "PMI_RANK", "world_size": "PMI_SIZE"})
    world_size = step.values.get("world_size")
    if hosts and counts and world_size:
        _place_on_nodes(step, hosts, counts)
    if world_size == 1:
        meet_nobody(step)
        warning = warn_of_allocation(env, "SLURM_NTASKS")
        if warning:  # salloc may open its shell in a step of one task
            step.evidence.append(FORGOTTEN + warning)
    else:
        _derive_address(step, hosts)
        _derive_port(step)
    return step


def is_stripped_step(env: Mapping[str, str]) -> bool:
    """Return whether a container has passed on only some of a Slurm task's variables.

    A batch script has rank 0 and the job's number of tasks as well, but the job's id too and nothing of a step.
    """
    tasks = env.get("SLURM_NTASKS", env.get("SLURM_NPROCS"))
    if "SLURM_PROCID" not in env or hints.number(tasks) < 2:
        return False
    of_a_step = any(name.startswith("SLURM_STEP") for name in env)
    return of_a_step or env["SLURM_PROCID"] != "0" or "SLURM_JOB_ID" not in env


def _place_on_nodes(step: Reading, hosts: list[str], counts: list[int]) -> None:
    """Find the number of nodes, and of tasks on this one."""
    step.values["num_nodes"] = len(hosts)
    world_size = step.values["world_size"]
    if len(hosts) != len(counts) or sum(counts) != world_size:
        layout = f"SLURM_STEP_TASKS_PER_NODE={step.env['SLURM_STEP_TASKS_PER_NODE']}"
        step.wrong.append(f"{layout} is not {world_size} tasks on {len(hosts)} nodes")
        return
    node_rank = step.values.get("node_rank")
    if node_rank is not None and node_rank < len(hosts):
        step.values["local_world_size"] = counts[node_rank]


def _derive_address(step: Reading, hosts: list[str]) -> None:
    """Let all tasks meet on the step's first node, where rank 0 runs unless the layout is arbitrary."""
    if "MASTER_ADDR" in step.env or not hosts:
        return
    arbitrary = step.env.get("SLURM_DISTRIBUTION", "").startswith("arbitrary")
    elsewhere = step.values.get("rank") == 0 and step.values.get("node_rank", 0) > 0
    if len(hosts) > 1 and (arbitrary or elsewhere):
        step.wrong.append("srun -m arbitrary may run rank 0 on any node: export MASTER_ADDR, the host of rank 0")
        return
    address = hosts[0] if len(hosts) > 1 else "127.0.0.1"
    step.values["master_addr"] = address
    step.evidence.append(f"the ranks meet at {address}, on the first node of the step")


def _derive_port(step: Reading) -> None:
    if "MASTER_PORT" in step.env:
        return
    ids = [step.read(name, str) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")]
    port = derive_port(*map(str, ids))
    step.values["master_port"] = port
    if None not in ids:
        step.evidence.append(f"port {port} follows from job and step")


def expand_nodelist(text: str) -> list[str]:
    """Return the host names that Slurm's short form stands for; raise `ValueError` if it is none.

    >>> expand_nodelist("gpu-a[01-03,7],b5")
    ['gpu-a01', 'gpu-a02', 'gpu-a03', 'gpu-a7', 'b5']
    """
    name = r"(?:[^\s,\[\]]|\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\])+"
    if not re.fullmatch(f"{name}(?:,{name})*", text, re.ASCII):
        raise ValueError("not a list of nodes")
    hosts = []
    for short in re.findall(name, text):
        parts = re.split(r"\[(.*?)\]", short)  # literal, numbers, literal, numbers, ..., literal
        choices = []
        for place, part in enumerate(parts):
            choices.append(_expand_numbers(part) if place % 2 else [part])
        hosts += ["".join(choice) for choice in product(*choices)]
    return hosts


def _expand_numbers(text: str) -> list[str]:
    """Expand "01-03,7" to 01, 02, 03, 7."""
    numbers = []
    for item in text.split(","):
        low, _, high = item.partition("-")
        width = len(low)
        for number in range(int(low), int(high or low) + 1):
            numbers.append(f"{number:0{width}}")
    return numbers


def expand_counts(text: str) -> list[int]:
    """Return the numbers that Slurm's short form stands for; raise `ValueError` if it is none.

    >>> expand_counts("4(x2),3")
    [4, 4, 3]
    """
    count = r"(\d+)(?:\(x(\d+)\))?"
    if not re.fullmatch(f"{count}(?:,{count})*", text, re.ASCII):
        raise ValueError("not a list of counts")
    counts = []
    for number, times in re.findall(count, text):
        counts += [int(number)] * int(times or 1)
    return counts
