"""Measure what ranks say to each other beside torch, for more ranks than a machine can run: threads play them.

Each rank is a thread with a connection of its own to the store, spread over a few processes. It claims its rank, waits
for the members, meets the others, and exchanges a text with them. Then it takes its place in the tree of the watch, and
hears that the last rank has failed. There is no process group.

    python tests/benchmarks/store_protocol.py [--ranks 64 250 1000] [--processes 4]
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import resource
import socket
import threading
import time
from contextlib import closing
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ddpkit.parsing import encode
from ddpkit.rendezvous.failures import Failure
from ddpkit.rendezvous.generation import join
from ddpkit.rendezvous.members import Member
from ddpkit.rendezvous.session import Session
from ddpkit.rendezvous.sockets import listen
from ddpkit.watch.connections import Connections
from ddpkit.watch.messages import children_of, parent_of

_TIMEOUT = timedelta(minutes=5)
_STEPS = ("connect", "join", "first barrier", "barrier", "exchange", "watch", "news of a failure")


def _play(rank: int, ranks: int, port: int, start: Any, ends: list[float]) -> None:
    """Do what a rank does, and note when each step ended on the last rank of this process."""
    marks = []
    start.wait()
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=_TIMEOUT)
    marks.append(time.time())
    prefixed, members = join(store, Member(rank, ranks, None, True), _TIMEOUT)
    marks.append(time.time())
    session = Session(prefixed, rank, members.hosts, _TIMEOUT, members.node_of, peer_lost=str)
    for step in (lambda: session.barrier(session.count("barrier")),) * 2 + (lambda: session.exchange("fine"),):
        step()
        marks.append(time.time())
    with closing(_watch(session, ranks, members.token)) as connections:
        session.barrier(session.count("watch"))
        marks.append(time.time())
        _hear_of_failure(connections, rank, ranks)
        marks.append(time.time())
        session.barrier(session.count("end"))
    for number, mark in enumerate(marks):
        ends[number] = max(ends[number], mark)


def _watch(session: Session, ranks: int, token: str) -> Connections:
    """Connect this rank to those below it in the tree, and then to the one above it."""
    rank, store = session.rank, session.store
    listener = None
    if children_of(rank, ranks):
        listener, (_, port) = listen("127.0.0.1", one_node=True)
        store.set(f"watch/{rank}", f"{port}")
    connections = Connections(rank, ranks, token, listener, print)
    while not connections.is_full:
        connections.poll(1.0)
    if rank > 0:
        port = int(store.get(f"watch/{parent_of(rank)}"))
        connections.connect(socket.create_connection(("127.0.0.1", port)))
    return connections


def _hear_of_failure(connections: Connections, rank: int, ranks: int) -> None:
    """Pass on that the last rank has failed."""
    line = encode(failure=Failure.of(ranks - 1, ValueError("boom")))
    if rank == ranks - 1:
        connections.post(line)
        return
    while True:
        for event in connections.poll(1.0):
            if event.message is not None and event.message.failure is not None:
                connections.post(line, exclude=event.rank)
                return


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
