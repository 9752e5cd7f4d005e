"""Compare how fast ranks join, wait for each other and leave, with ddpkit and with torch alone, taking turns.

The ranks are forked from one process after `import torch`, so that nobody waits for imports, and stay for all rounds.
The first of these does not count, but for the memory: a forked process copies each page when it first writes to it,
which one that was started by itself need not. Each time counts from a common start to the end on the last rank.

Two things are kept out of it. Where a client of torch's store finds nobody who listens, it tries again after half a
second: so rank 0 begins 50 ms before the others. And torch asks the name server for the name behind each connection,
and waits for the answer, a second or five if there is none: so on Linux the ranks run in a mount namespace in which no
name server is asked.

    python tests/benchmarks/joining.py [--ranks 2 8 32] [--rounds 3] [--barriers 10]
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe
from typing import Any

import torch.distributed as dist
from timing import fork_rank, free_port

import ddpkit

_TIMEOUT = timedelta(minutes=3)
_AHEAD = 0.05  # seconds by which rank 0, which hosts the store, begins to join before the others
_IS_APART = "DDPKIT_BENCHMARK_ASKS_NO_NAME_SERVER"
_COLUMNS = (
    "join (s)",
    "its CPU time, all ranks (s)",
    "barrier (ms)",
    "its CPU time, all ranks (ms)",
    "leave (s)",
    "descriptors of rank 0",
    "of rank 1",
    "memory of rank 0 (MB)",
)


def _join_with_torch() -> None:
    dist.init_process_group("gloo", timeout=_TIMEOUT)


def _join_with_ddpkit() -> None:
    ddpkit.setup(timeout=_TIMEOUT)


_WAYS: dict[str, tuple[Callable[[], Any], Callable[[], Any], Callable[[], Any]]] = {
    "torch": (_join_with_torch, dist.barrier, dist.destroy_process_group),
    "ddpkit": (_join_with_ddpkit, ddpkit.barrier, ddpkit.teardown),
}


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _resident() -> float:
    """Return the memory that this process does not share, in MB."""
    with open("/proc/self/statm") as file:
        _, resident, shared, *_ = map(int, file.read().split())
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE") / 1e6


def _rank(barriers: int, parent: Connection) -> None:
    """Join in the way and at the port that the parent says, and do each further step at its word, until it is over."""

    def wait_often() -> None:
        for _ in range(barriers):
            barrier()

    while order := parent.recv():
        way, os.environ["MASTER_PORT"] = order
        join, barrier, leave = _WAYS[way]
        descriptors, memory = _descriptors(), _resident()
        for step in (join, barrier, wait_often, leave):  # torch's first barrier makes connections
            began = time.process_time()
            step()
            parent.send((time.process_time() - began, _descriptors() - descriptors, _resident() - memory))
            parent.recv()  # after leaving, too: rank 0 hosts the store


def _fork(rank: int, ranks: int, barriers: int, inherited: list[Connection]) -> Connection:
    """Start a rank; return the connection to it."""
    ours, theirs = Pipe()

    def work() -> None:
        for connection in (*inherited, ours):
            connection.close()
        _rank(barriers, theirs)

    fork_rank(rank, ranks, work)
    theirs.close()
    return ours


def measure(way: str, connections: list[Connection], barriers: int) -> list[float]:
    """Let all ranks join, wait for each other and leave; return one value for each column."""

    def step(word: Any, ahead: float = 0.0) -> tuple[float, list[tuple[float, int, float]]]:
        connections[0].send(word)
        time.sleep(ahead)
        start = time.perf_counter()
        for connection in connections[1:]:
            connection.send(word)
        answers = [connection.recv() for connection in connections]
        return time.perf_counter() - start, answers

    join, joined = step((way, f"{free_port()}"), _AHEAD)
    _, (first, second, *_) = step("go on")
    wait, waited = step("go on")
    leave, _ = step("go on")
    for connection in connections:
        connection.send("all have left")
    per_barrier = 1000 / barriers
    return [
        join,
        sum(answer[0] for answer in joined),
        wait * per_barrier,
        sum(answer[0] for answer in waited) * per_barrier,
        leave,
        first[1],
        second[1],
        first[2],
    ]


def compare(ranks: int, rounds: int, barriers: int) -> dict[str, list[float]]:
    """Measure both ways in turn; return the medians of the columns, of the memory the first value."""
    connections: list[Connection] = []
    for rank in range(ranks):
        connections.append(_fork(rank, ranks, barriers, connections))
    found: dict[str, list[list[float]]] = {way: [] for way in _WAYS}
    for _ in range(rounds + 1):
        for way, runs in found.items():
            runs.append(measure(way, connections, barriers))
    for connection in connections:
        connection.send(None)
    for _ in connections:
        os.wait()
    medians = {}
    for way, (warm_up, *runs) in found.items():
        medians[way] = [statistics.median(column) for column in zip(*runs, strict=True)]
        medians[way][-1] = warm_up[-1]  # the memory, which later rounds use again
    return medians


def _without_name_server() -> None:
    """Start this program anew where names are looked up in files only, if that can be had."""
    if _IS_APART in os.environ:
        return
    with tempfile.NamedTemporaryFile("w") as names:
        names.write("hosts: files\npasswd: files\ngroup: files\n")
        names.flush()
        mount = f"mount --bind {shlex.quote(names.name)} /etc/nsswitch.conf"
        apart = ["unshare", "--mount", "--map-root-user", "sh", "-c"]
        if shutil.which("unshare") is None or subprocess.run([*apart, mount], capture_output=True).returncode != 0:
            print("names are looked up as always", file=sys.stderr)
            return
        again = shlex.join([sys.executable, *sys.argv])
        ended = subprocess.run([*apart, f"{mount} && exec {again}"], env=os.environ | {_IS_APART: "1"})
    sys.exit(ended.returncode)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8, 32], help="numbers of ranks, at least 2")
    parser.add_argument(
        "--rounds", type=int, default=3, help="runs of each number of ranks, of which medians are shown"
    )
    parser.add_argument("--barriers", type=int, default=10, help="barriers in a run, of which the mean counts")
    args = parser.parse_args()
    _without_name_server()
    print(f"| ranks | with | {' | '.join(_COLUMNS)} |\n|{'---|' * (2 + len(_COLUMNS))}")
    for ranks in args.ranks:
        for way, values in compare(ranks, args.rounds, args.barriers).items():
            print(f"| {ranks} | {way} | {' | '.join(f'{value:.4g}' for value in values)} |", flush=True)


if __name__ == "__main__":
    main()
