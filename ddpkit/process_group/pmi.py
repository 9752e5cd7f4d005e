"""The key-value space of MPICH's launcher, by which ranks learn an address that the environment does not tell.

hydra hands each rank a descriptor, whose number is in PMI_FD, on which it speaks the PMI-1 wire protocol.
"""

from __future__ import annotations

import os
from io import FileIO

from ..errors import LaunchError


def is_there() -> bool:
    """Return whether the launcher has handed down its descriptor."""
    return "PMI_FD" in os.environ


def share(value: str | None) -> str:
    """Give rank 0's value to all ranks; the others pass None. Collective.

    Raises:
        LaunchError: If the launcher does not answer.
    """
    try:
        with os.fdopen(os.dup(int(os.environ["PMI_FD"])), "r+b", buffering=0) as pipe:
            return _share(pipe, value)
    except OSError as error:
        raise LaunchError(
            f"The MPI launcher does not answer on the descriptor in PMI_FD ({error}). Is this a process that a "
            "rank has started? It inherits the launcher's variables but is no rank: start it without PMI_RANK and "
            "PMI_SIZE."
        ) from error


def _share(pipe: FileIO, value: str | None) -> str:
    _ask(pipe, "init pmi_version=1 pmi_subversion=1")
    space = _ask(pipe, "get_my_kvsname")["kvsname"]
    if value is not None:
        _ask(pipe, f"put kvsname={space} key=ddpkit value={value}")
    _ask(pipe, "barrier_in")
    answer = _ask(pipe, f"get kvsname={space} key=ddpkit")["value"]
    _ask(pipe, "finalize")
    return answer


def _ask(pipe: FileIO, command: str) -> dict[str, str]:
    """Send a command and return the fields of the answer, one line of name=value."""
    pipe.write(f"cmd={command}\n".encode())
    line = b""
    while not line.endswith(b"\n"):
        data = pipe.read(4096)
        if not data:
            raise LaunchError("The MPI launcher closed its PMI connection. Set MASTER_ADDR and MASTER_PORT instead.")
        line += data
    return dict(word.split("=", 1) for word in line.decode().split() if "=" in word)
