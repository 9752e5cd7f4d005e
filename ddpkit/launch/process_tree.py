"""Facts about a launch from the process tree. On Linux; elsewhere it finds almost nothing."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..errors import LaunchError
from .detection import Reading, detect_launch, filled, number
from .launch import MPI_AND_SLURM, PLATFORM, RANKS, Environment, Launch, forgotten_launcher

Lost = Callable[[], str]  # returns the fate of a process that must outlive this one, "" while it lives


@dataclass(frozen=True)
class Agent:
    """torchrun's process that started a rank."""

    pid: int
    born: str
    env: dict[str, str]

    def lost(self) -> str:
        """Describe its end; "" as long as it lives."""
        if runs_since(self.pid, self.born) is not False:
            return ""
        return f"torchrun (pid {self.pid}), which started it, was killed or crashed"


def find_agent(env: Environment, pid: int) -> Agent | None:
    """Find the torchrun that started a rank: the nearest ancestor that is not a rank, or is one of another job.

    Args:
        env: The environment of the process.
        pid: Its process number.

    Returns:
        The agent; None where `/proc` does not show it (another system, another user's process).
    """
    marks = ["TORCHELASTIC_ERROR_FILE"] if env.get("TORCHELASTIC_ERROR_FILE") else ["TORCHELASTIC_RUN_ID", "RANK"]
    with suppress(OSError, ValueError, IndexError):
        for above in _parents(pid):
            theirs = environment_of(above)
            if any(theirs.get(mark) != env.get(mark) for mark in marks):
                return Agent(above, born(above), theirs)
    return None


def ancestors() -> dict[int, str]:
    """Return this process's ancestors and their start times; without `/proc`, only the parent."""
    found = {os.getppid(): ""}
    with suppress(OSError, ValueError, IndexError):
        for above in _parents(os.getpid()):
            found[above] = born(above)
    return found


def typed_in_terminal(launch: Launch, env: Environment, pid: int) -> bool:
    """Return whether the process was started from the shell of a step of several tasks (`srun -n4 --pty bash`).

    Then it runs alone. SLURM_PTY_PORT does not tell, because programs started by srun from such a shell inherit it. But
    those tasks have no terminal, and a program that got it from `srun --pty` is the task itself.
    """
    if launch.kind != "slurm" or launch.world_size == 1 or launch.rank or not env.get("SLURM_PTY_PORT"):
        return False
    with suppress(OSError, ValueError, IndexError):
        return env.get("SLURM_TASK_PID") != str(pid) and int(_stat(pid)[4]) != 0
    return False


def born(pid: int) -> str:
    """Return a process's start time, in the kernel's form, because pids are reused; "" if it has ended.

    Raises:
        OSError: If it cannot be read now, for example because this process is out of file descriptors.
    """
    try:
        state = _stat(pid)
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if state[0] in "ZX" else state[19]  # dead, but not yet reaped


def own_birth() -> str:
    """Return this process's start time; "" where the system does not provide it."""
    with suppress(OSError):
        return born(os.getpid())
    return ""


def boot_id() -> str:
    """Return the identity of this boot of the machine; raise OSError where the system does not provide it."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def runs_since(pid: int, start: str) -> bool | None:
    """Return whether the process with this start time still runs; None where that cannot be read now."""
    with suppress(OSError):
        return born(pid) == start
    return None


def _parents(pid: int) -> Iterator[int]:
    """Yield a process's ancestors, the nearest first; raise where `/proc` does not show them."""
    while (pid := int(_stat(pid)[1])) > 0:
        yield pid


def environment_of(pid: int, processes: str | os.PathLike[str] = "/proc") -> dict[str, str]:
    """Return the environment in which a process was started; raise OSError where the system does not provide it."""
    with open(os.path.join(processes, f"{pid}", "environ"), "rb") as file:
        entries = file.read().split(b"\0")
    pairs = [os.fsdecode(entry).partition("=") for entry in entries if entry]
    return {name: text for name, _, text in pairs}


def child_processes(pid: int | str = "self") -> list[int]:
    """List the children of this process, or of another; none where `/proc` does not show them."""
    found: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # a thread has ended
            found += map(int, file.read_text().split())
    return found


def _stat(pid: int) -> list[str]:
    with open(f"/proc/{pid}/stat", errors="replace") as file:  # the name of the program may be any bytes
        return file.read().rpartition(")")[2].split()  # state, parent, process group, session, terminal, ...


# Detect torchruns that each rank of another launch started, so that each runs a separate job.


def outer_launch(agent_env: Environment, launch: Launch, env: Environment) -> str | None:
    """Explain which launch started torchrun itself, if that launch's processes run separate torchrun jobs.

    Each process of a launch may start one agent of the same torchrun job. That job then has as many agents as the
    launch has processes (in any order: torchrun's rendezvous sorts them by host name). If a platform configures
    torchrun by PET_NNODES, that is their number, or its range.

    Args:
        agent_env: The environment in which torchrun was started.
        launch: This process's launch.
        env: This process's environment.

    Returns:
        The error's text; None if all is right, or if torchrun's environment is invalid by itself.
    """
    outside = filled(agent_env)
    agents = number(env.get("GROUP_WORLD_SIZE"))
    try:
        outer = _launch_around(outside)
    except LaunchError:
        return None
    if launch.kind != "torchrun" or outer.world_size == 1 or not agents or agents in _expected_agents(outside, outer):
        return None
    signs = [*RANKS.values(), *(sign for launcher in MPI_AND_SLURM for sign in launcher.signs)]
    unset = [name for name in signs if name in outside]
    count = "1 agent" if agents == 1 else f"{agents} agents"
    return (
        f"torchrun was started by rank {outer.rank} of {outer.world_size} of another launch "
        f"({', '.join(outer.evidence[:2])}), but its job has {count}: "
        "the outer ranks would run separate jobs. Start torchrun once per node with --nnodes, or remove one of the "
        f"two launchers; to run separate jobs, unset {', '.join(unset)} in front of torchrun."
    )


def _launch_around(outside: Environment) -> Launch:
    if not all(name in outside for name in RANKS.values()):
        return detect_launch(outside)
    without_address = PLATFORM._replace(signs=(), needs=RANKS, takes={})  # torchrun brings its own
    return Reading(without_address, outside).launch()


def _expected_agents(outside: Environment, outer: Launch) -> range:
    """Return the possible numbers of agents of a torchrun job in this environment."""
    nodes = outside.get("PET_NNODES", "")
    if "TORCHELASTIC_RUN_ID" in outside or not re.fullmatch("[0-9]{1,9}(:[0-9]{1,9})?", nodes):
        nodes = str(outer.world_size)
    low, _, high = nodes.partition(":")
    return range(int(low), int(high or low) + 1)


def unnested_launch() -> tuple[Launch, str]:
    """Return the launch in the environment, and a warning if it may be unintended, else "".

    Raises:
        LaunchError: If it is invalid, or nested in another.
    """
    launch = detect_launch(os.environ)
    agent = agent_of(launch)
    outer = outer_launch(agent.env, launch, os.environ) if agent else None
    if outer:
        raise LaunchError(outer)
    if typed_in_terminal(launch, os.environ, os.getpid()):
        shells = f"{launch.world_size} shells that srun opened"
        return Launch("single", 0, 1, 0, 1, 0, 1), f"This was started from one of {shells}, so it runs alone"
    return launch, forgotten_launcher(launch) or ""


def agent_of(launch: Launch) -> Agent | None:
    """Find torchrun's agent above this process; None if there is none."""
    if launch.kind != "torchrun":
        return None
    return find_agent(os.environ, os.getpid())
