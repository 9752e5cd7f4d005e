"""Describe the job that holds a lock on a folder, name it, and see if it runs."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from typing import Any

from ..launch.process_tree import boot_id, own_birth, runs_since

# variables that stay the same when a job is started again, maybe on another machine
_IDENTITIES = (
    "TORCHELASTIC_RUN_ID",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "PBS_JOBID",
    "LSB_JOBID",
    "LSB_JOBINDEX",
)


def describe_this_job() -> dict[str, Any]:
    """Describe this process and its job, so that others can name it, and know it again."""
    return {
        "host": socket.gethostname(),
        "machine": _machine(),
        "pid": os.getpid(),
        "born": own_birth(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        "job": _identity(os.environ),
        "token": os.urandom(8).hex(),
    }


def name_job(holder: Mapping[str, Any]) -> str:
    """Name the job of such a description, as in a sentence; it may be empty."""
    if not holder:
        return "Another job"
    process = f"process {holder.get('pid')} on {holder.get('host')}"
    return f"Another job ({process}, since {holder.get('since')})"


def is_running(holder: Mapping[str, Any]) -> bool:
    """Return whether a holder on this machine runs, by its number and by when it started."""
    pid = holder.get("pid")
    if not isinstance(pid, int):
        return False
    start = holder.get("born")
    if isinstance(start, str) and start:
        runs = runs_since(pid, start)
        if runs is not None:
            return runs
    return _is_in_use(pid)  # /proc does not tell


def _is_in_use(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it is another user's
        return True
    return True


def _identity(env: Mapping[str, str]) -> str:
    """Return a text that names this job, also after a restart; "" if nothing does."""
    found = []
    for name in _IDENTITIES:
        value = env.get(name, "")
        if value not in ("", "none"):  # torchrun's default is none
            found.append(f"{name}={value}")
    return " ".join(found)


def _machine() -> str:
    try:
        return boot_id()
    except OSError:
        return socket.gethostname()
