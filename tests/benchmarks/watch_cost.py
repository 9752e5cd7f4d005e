"""What the watch costs: CPU time per rank of idle and of computing ranks, as shares of one core.

Each rank joins once with the watch and once without, waits, and asks the kernel how long its watch's thread was on a
core, and how much CPU time the whole process took. The goal is below 0.1 %.

    python tests/benchmarks/watch_cost.py [--nprocs 8] [--seconds 60]
"""

from __future__ import annotations

import argparse
import threading
import time
from pathlib import Path

import ddpkit


def on_core(thread: threading.Thread) -> float:
    """Seconds that a thread has run on a core, as the scheduler counts them."""
    return int(Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()[0]) / 1e9


def measure(seconds: float, watch: bool, busy: bool) -> tuple[float, float]:
    """This rank's shares of a core: the watch's thread, and the whole process."""
    with ddpkit.distributed(watch=watch):
        ddpkit.barrier()
        threads = [thread for thread in threading.enumerate() if thread.name == "ddpkit watch"]
        start, ran, used = time.perf_counter(), sum(map(on_core, threads)), time.process_time()
        while (left := start + seconds - time.perf_counter()) > 0:
            if busy:
                sum(range(1000))
            else:
                time.sleep(left)
        wall = time.perf_counter() - start
        result = (sum(map(on_core, threads)) - ran) / wall, (time.process_time() - used) / wall
        ddpkit.barrier()
        return result


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nprocs", type=int, default=8, help="ranks")
    parser.add_argument("--seconds", type=float, default=60, help="how long each of the four measurements takes")
    args = parser.parse_args()
    print(f"{args.nprocs} ranks, {args.seconds:g} s each; shares of one core, the mean and the largest of the ranks")
    for busy in (False, True):
        for watch in (True, False):
            ranks = ddpkit.spawn(measure, args.nprocs, args.seconds, watch, busy)
            name = f"{'computing' if busy else 'idle'} ranks, {'with' if watch else 'without'} the watch"
            cells = (f"{100 * sum(of) / len(of):8.4f} % {100 * max(of):8.4f} %" for of in zip(*ranks, strict=True))
            print(f"{name:<34} its thread {'   the process '.join(cells)}", flush=True)


if __name__ == "__main__":
    main()
