"""What the process tree tells of a launch and environment variables do not. Linux only; elsewhere it is silent."""

from __future__ import annotations

import os
from collections.abc import Mapping

from .launchers import Launch


def read_agent_env(env: Mapping[str, str], pid: int) -> dict[str, str] | None:
    """The environment in which torchrun was started: that of the nearest ancestor that is no part of this rank.

    Args:
        env: The environment of the process.
        pid: Its process number.

    Returns:
        The variables; None where `/proc` does not tell (another system, another user's process).
    """
    marks = ["TORCHELASTIC_ERROR_FILE"] if env.get("TORCHELASTIC_ERROR_FILE") else ["TORCHELASTIC_RUN_ID", "RANK"]
    try:
        while (pid := int(_stat(pid)[1])) > 0:
            with open(f"/proc/{pid}/environ", "rb") as file:
                pairs = (os.fsdecode(entry).partition("=") for entry in file.read().split(b"\0") if entry)
            theirs = {name: text for name, _, text in pairs}
            if any(theirs.get(mark) != env.get(mark) for mark in marks):
                return theirs
    except (OSError, ValueError, IndexError):
        pass
    return None


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


def _stat(pid: int) -> list[str]:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()  # state, parent, process group, session, terminal, ...
