"""Measure what ranks say to each other in the store, for more ranks than a machine can run: threads play them.

Each rank is a thread with a connection of its own to the store, spread over a few processes. It claims its rank, waits
for the members, meets the others, and exchanges a text with them. There is no process group and no monitor.

    python tests/benchmarks/store_protocol.py [--ranks 64 250 1000] [--processes 4]
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import resource
import threading
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ddpkit.process_group.member import Member
from ddpkit.process_group.rendezvous import join
from ddpkit.process_group.session import Session

_TIMEOUT = timedelta(minutes=5)
_STEPS = ("connect", "join", "first barrier", "barrier", "exchange")


def _play(rank: int, ranks: int, port: int, start: Any, ends: list[float]) -> None:
    """Do what a rank does, and note when each step ended on the last rank of this process."""
    marks = []
    start.wait()
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=_TIMEOUT)
    marks.append(time.time())
    prefixed, members = join(store, Member(rank, ranks, None, True), _TIMEOUT)
    marks.append(time.time())
    nodes = members.node_of_each()
    hosts = [members.nodes[node] for node in nodes]
    session = Session(prefixed, rank, hosts, _TIMEOUT, nodes, orphaned=str)
    for step in (lambda: session.meet(session.count("barrier")),) * 2 + (lambda: session.exchange("fine"),):
        step()
        marks.append(time.time())
    for number, mark in enumerate(marks):
        ends[number] = max(ends[number], mark)


def _run_some(some: range, ranks: int, port: int, start: Any, results: Any) -> None:
    """Run a process's share of the ranks, and send when each step ended and how much CPU time all took."""
    ends = [0.0] * len(_STEPS)
    threading.stack_size(256 * 1024)
    threads = [threading.Thread(target=_play, args=(rank, ranks, port, start, ends)) for rank in some]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    results.put((ends, time.process_time()))


def measure(ranks: int, processes: int) -> tuple[list[float], float, float]:
    """Return the seconds of each step, the ranks' CPU time, and the store's."""
    fork = multiprocessing.get_context("fork")
    start, results = fork.Event(), fork.SimpleQueue()
    host, port = fork.SimpleQueue(), fork.SimpleQueue()

    def serve() -> None:
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port.put(server.port)
        host.get()
        results.put(time.process_time())

    hosting = fork.Process(target=serve)
    hosting.start()
    number = port.get()
    crew = []
    for part in range(processes):
        some = range(part, ranks, processes)
        crew.append(fork.Process(target=_run_some, args=(some, ranks, number, start, results)))
        crew[-1].start()
    time.sleep(1 + ranks / 1000)  # until all threads wait
    began = time.time()
    start.set()
    found = [results.get() for _ in crew]
    host.put(None)
    of_store = results.get()
    for process in (*crew, hosting):
        process.join()
    ends = [began, *(max(times) for times in zip(*(ends for ends, _ in found), strict=True))]
    seconds = [end - before for before, end in itertools.pairwise(ends)]
    return seconds, sum(used for _, used in found), of_store


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 250, 1000], help="numbers of ranks")
    parser.add_argument("--processes", type=int, default=4, help="processes over which the threads are spread")
    args = parser.parse_args()
    os.environ["RES_OPTIONS"] = "timeout:0 attempts:1"  # torch asks for the name behind each connection
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    columns = [f"{step} (s)" for step in _STEPS] + ["CPU time of the ranks (s)", "of the store (s)"]
    print(f"| ranks | {' | '.join(columns)} |\n|{'---|' * (1 + len(columns))}")
    for ranks in args.ranks:
        seconds, of_ranks, of_store = measure(ranks, args.processes)
        print(f"| {ranks} | {' | '.join(f'{value:.3g}' for value in (*seconds, of_ranks, of_store))} |", flush=True)


if __name__ == "__main__":
    main()
