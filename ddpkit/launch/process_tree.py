"""What the process tree tells of a launch and environment variables do not. Linux; elsewhere it is almost silent."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from .launchers import Launch


@dataclass(frozen=True)
class Agent:
    """torchrun's process that started a rank."""

    pid: int
    born: str
    env: dict[str, str]

    def lost(self) -> str:
        """What became of it: "" as long as it lives."""
        gone = born(self.pid) != self.born
        return f"torchrun (pid {self.pid}), which started it, has gone: it was killed or crashed" if gone else ""


def find_agent(env: Mapping[str, str], pid: int) -> Agent | None:
    """The torchrun that started a rank: the nearest ancestor whose environment is not that of a rank, or another's.

    Args:
        env: The environment of the process.
        pid: Its process number.

    Returns:
        The agent; None where `/proc` does not tell (another system, another user's process).
    """
    marks = ["TORCHELASTIC_ERROR_FILE"] if env.get("TORCHELASTIC_ERROR_FILE") else ["TORCHELASTIC_RUN_ID", "RANK"]
    try:
        while (pid := int(_stat(pid)[1])) > 0:
            with open(f"/proc/{pid}/environ", "rb") as file:
                pairs = (os.fsdecode(entry).partition("=") for entry in file.read().split(b"\0") if entry)
            theirs = {name: text for name, _, text in pairs}
            if any(theirs.get(mark) != env.get(mark) for mark in marks):
                return Agent(pid, born(pid), theirs)
    except (OSError, ValueError, IndexError):
        pass
    return None


def ancestors() -> dict[int, str]:
    """Return the processes above this one and when they were born; only the parent where `/proc` does not tell."""
    pid = os.getppid()
    found = {pid: born(pid)}
    try:
        while (pid := int(_stat(pid)[1])) > 0:
            found[pid] = born(pid)
    except (OSError, ValueError, IndexError):
        pass
    return found


def typed_in_terminal(launch: Launch, env: Mapping[str, str], pid: int) -> bool:
    """Whether this process was typed into the shell of a step of several tasks (`srun -n4 --pty bash`): it runs alone.

    SLURM_PTY_PORT does not tell, for what srun starts from such a shell inherits it. But those tasks have no terminal,
    and a program that has it because it was given to `srun --pty` is the task itself.
    """
    if launch.kind != "slurm" or launch.world_size == 1 or launch.rank or not env.get("SLURM_PTY_PORT"):
        return False
    try:
        return env.get("SLURM_TASK_PID") != str(pid) and int(_stat(pid)[4]) != 0
    except (OSError, ValueError, IndexError):
        return False


def born(pid: int) -> str:
    """When a process started, in the kernel's words, for its number may be given again; "" if it does not run."""
    try:
        state = _stat(pid)
        return "" if state[0] in "ZX" else state[19]
    except (OSError, IndexError):
        return ""


def _stat(pid: int) -> list[str]:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()  # state, parent, process group, session, terminal, ...
