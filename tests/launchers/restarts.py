"""Two ways to start a job that torchrun restarts, and what may happen to it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from jobs import MEET
from nodes import Node, virtual_nodes
from processes import TORCHRUN, Ended, free_port, launch

# seconds that torchrun waits for more nodes than the least, 30 by default; before, it takes 15 s to miss a lost one
LAST_CALL = "--rdzv-conf=last_call_timeout=8"


def on_one_node(*script: str, ranks: int = 2, static: bool = False, timeout: float = 600.0) -> list[Ended]:
    """So many ranks on this machine."""
    meet = f"--master-port={free_port()}" if static else "--standalone"
    return launch([*TORCHRUN, meet, f"--nproc-per-node={ranks}", "--max-restarts=3", *script], timeout=timeout)


def on_two_nodes(
    *script: str,
    ranks: int = 2,
    nodes: str = "2",
    static: bool = False,
    strike: Callable[[Node], None] = lambda second: None,
    timeout: float = 600.0,
) -> list[Ended]:
    """So many ranks on each of two virtual nodes; `strike` gets the second one, which does not host the store."""
    with virtual_nodes(2) as (_, first, second):
        agent = [*TORCHRUN, f"--nnodes={nodes}", f"--nproc-per-node={ranks}", "--max-restarts=3"]
        commands = []
        for number, node in ((1, second), (0, first)):  # the host of the store is waited for
            meet = ["--master-addr=node1", f"--node-rank={number}"] if static else [*MEET, LAST_CALL]
            commands.append(node.run(*agent, *meet, *script))
        return launch(*commands, meanwhile=lambda crew: strike(second), timeout=timeout)[::-1]


def lose_when(file: Path) -> Callable[[Node], None]:
    """Loses a node for good as soon as the file is there."""
    return lambda node: _wait_for(file) or node.end()


def kill_ranks_when(file: Path) -> Callable[[Node], None]:
    """Kills a node's ranks, but not its torchrun, as soon as the file is there."""
    return lambda node: _wait_for(file) or _kill_ranks(node)


def _wait_for(file: Path) -> None:
    end = time.monotonic() + 600
    while not file.exists() and time.monotonic() < end:
        time.sleep(0.02)


def _kill_ranks(node: Node) -> None:
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            mine = os.readlink(folder / "ns" / "pid") == os.readlink(f"/proc/{node.pid}/ns/pid_for_children")
            if mine and b"\0TORCHELASTIC_RUN_ID=" in (folder / "environ").read_bytes():
                os.kill(int(folder.name), signal.SIGKILL)
        except OSError:  # it has ended
            pass
