"""How the cost of meeting, moving values and watching grows with the number of ranks.

On real ranks of this machine, forked after `import torch`: the time of a call, and the CPU time of all ranks together.
In the simulated world of the tests, up to thousands: what passes through the store and between the watches, where the
store needs a fixed time for each request and does one after the other.

    python tests/benchmarks/growth.py --ranks 8 32 128
    python tests/benchmarks/growth.py --simulated 128 1024 4096
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from timing import fork_rank, free_port
from torch import nn

import ddpkit

_REQUEST = 25e-6  # seconds in which the store of the simulated world does a request
_SIMULATION = Path(__file__).parents[1] / "simulation"


# Real ranks


def _calls(folder: Path) -> dict[str, Callable[[], Any]]:
    model = nn.Sequential(*(nn.Linear(100, 100) for _ in range(10)))
    rank, size = ddpkit.get_rank(), ddpkit.get_world_size()
    indices = torch.arange(rank, 100 * size, size)
    saver = ddpkit.Checkpointer(folder)
    return {
        "barrier": ddpkit.barrier,
        "mean of a number": lambda: ddpkit.all_reduce_mean(1.0),
        "broadcast of a number": lambda: ddpkit.broadcast(1.0),
        "gather_exact, 100 samples a rank": lambda: ddpkit.gather_exact(indices.float(), indices, 100 * size),
        "check_replicas, 20 tensors": lambda: ddpkit.check_replicas(model),
        "save, 400 kB": lambda: saver.save(1, model=model),
    }


def _measure(rounds: int, folder: Path) -> dict[str, tuple[float, float]]:
    """Return the time of each call, and the CPU time of all ranks together."""
    found = {}
    for name, call in _calls(folder).items():
        call()  # makes connections
        ddpkit.barrier()
        began, used = time.perf_counter(), time.process_time()
        for _ in range(rounds):
            call()
        used = time.process_time() - used
        ddpkit.barrier()
        seconds = (time.perf_counter() - began) / rounds
        found[name] = seconds, ddpkit.all_reduce(used) / rounds
    return found


def _rank(ranks: int, rounds: int, folder: Path) -> None:
    with ddpkit.distributed(timeout=timedelta(minutes=5), num_threads=1):
        found = _measure(rounds, folder)
    if os.environ["RANK"] == "0":
        for name, (seconds, used) in found.items():
            print(f"| {ranks} | {name} | {seconds * 1e3:.2f} | {used * 1e3:.1f} |", flush=True)


def measure(ranks: int, rounds: int) -> None:
    """Measure each call on so many ranks of this machine."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        work = partial(_rank, ranks, rounds, Path(folder))
        for child in [fork_rank(rank, ranks, work, MASTER_PORT=port) for rank in range(ranks)]:
            os.waitpid(child, 0)


# Simulated ranks


def simulate(ranks: int) -> None:
    """Let simulated ranks join, meet, exchange texts and lose one; print what passed through rank 0."""
    import outside
    import starts
    from network import Socket
    from store import Store
    from world import World

    requests: Counter[str] = Counter()
    sent: Counter[str] = Counter()
    phase, free_at, ends = ["join"], [0.0], {}
    call, transmit = Store._call, Socket._transmit

    def counted(self: Store, act: Callable[[], Any]) -> Any:
        requests[phase[0]] += 1
        world = self.server.world
        free_at[0] = max(world.now, free_at[0]) + _REQUEST
        world.suspend(free_at[0])
        return call(self, act)

    def counted_bytes(self: Socket, data: bytes) -> None:
        sent[f"messages {phase[0]}"] += 1
        sent[f"bytes {phase[0]}"] += len(data)
        transmit(self, data)

    Store._call, Socket._transmit = counted, counted_bytes  # type: ignore[method-assign]
    starts.TIMEOUT = timedelta(minutes=5)
    world: World = outside.begin(0)
    begins = {"join": world.now}
    there = Counter[str]()

    def pass_on(name: str, following: str) -> None:
        """Begin the next phase with the last rank; the others wait for the clock, not for each other."""
        there[name] += 1
        if there[name] == ranks:
            ends[name], begins[following], phase[0] = world.now, world.now + 1, following
        while phase[0] == name:
            outside.sleep(0.5)
        outside.sleep(begins[following] - world.now)

    def script(mine: Any, job: Any) -> None:
        session = job.session
        pass_on("join", "barrier")
        session.barrier(session.count("once"))
        pass_on("barrier", "exchange")
        session.exchange("x" * 50, "texts")
        pass_on("exchange", "failure")
        if mine.rank == 1:
            raise ValueError("broken")
        outside.sleep(30)
        session.barrier(session.count("end"))

    start = starts.Start(world, ranks)
    for rank in range(ranks):
        start.start(rank, script, 0.0 if rank == 0 else 0.1)
    world.run(1200)
    told = [rank for rank in start.ranks if rank.error is not None]
    for name in begins:
        seconds = f"{ends[name] - begins[name]:.2f}" if name in ends else f"(told: {len(told)})"
        traffic = sent[f"messages {name}"], sent[f"bytes {name}"]
        asked = f"{requests[name] / ranks:.1f}"
        print(f"| {ranks} | {name} | {seconds} | {asked} | {traffic[0]} | {traffic[1]} |", flush=True)
    Store._call, Socket._transmit = call, transmit  # type: ignore[method-assign]
    world.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[], help="numbers of real ranks, on this machine")
    parser.add_argument("--rounds", type=int, default=20, help="calls in a row")
    parser.add_argument("--simulated", type=int, nargs="+", default=[], help="numbers of simulated ranks")
    args = parser.parse_args()
    if args.ranks:
        print("| ranks | call | ms | CPU time of all ranks, ms |\n|---|---|---|---|", flush=True)
    for ranks in args.ranks:
        measure(ranks, args.rounds)
    if args.simulated:
        sys.path.insert(0, str(_SIMULATION))
        import search

        search.put_in_place()
        print(f"| ranks | what | s | requests a rank | watch messages | their bytes |\n|{'---|' * 6}", flush=True)
    for ranks in args.simulated:
        gc.disable()
        simulate(ranks)
        gc.enable()


if __name__ == "__main__":
    main()
