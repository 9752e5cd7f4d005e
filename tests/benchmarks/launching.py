"""How long the launchers take: seconds from the command to the end of a program that joins and averages one number.

Four ranks, two on each node where there are two (virtual ones); all ways take turns, figures are medians. What is not
installed, or needs root, is left out. Next to it the same program on one process, which is mostly the import of torch.

    python tests/benchmarks/launching.py
    python tests/benchmarks/launching.py --rounds 3
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "launchers")]

from cluster import cluster  # noqa: E402
from jobs import HYDRA, MEET, OPENMPI, PROGRAM, PYTHON  # noqa: E402
from nodes import may_make_nodes, virtual_nodes  # noqa: E402
from processes import TORCHRUN, Ended, free_port, launch, platform_env  # noqa: E402

Way = Callable[[], list[Ended]]


def by_hand() -> list[Ended]:
    envs = [platform_env(rank, 4, port) for port in [free_port()] for rank in range(4)]
    return launch(*(["env", *(f"{name}={text}" for name, text in env.items()), *PYTHON, *PROGRAM] for env in envs))


def find_ways(stack: contextlib.ExitStack) -> dict[str, Way]:
    """The launchers that can be had here, with their nodes up."""
    torchrun = [*TORCHRUN, "--standalone", "--nproc-per-node=4", *PROGRAM]
    ways: dict[str, Way] = {
        "one process": lambda: launch([*PYTHON, *PROGRAM]),
        "platform": by_hand,
        "torchrun": lambda: launch(torchrun),
    }
    if may_make_nodes() and shutil.which("ip"):
        _, *nodes = stack.enter_context(virtual_nodes(2))
        agent = [*TORCHRUN, "--nnodes=2", "--nproc-per-node=2", *MEET, *PROGRAM]
        ways["torchrun, two nodes"] = lambda: launch(*(node.run(*agent) for node in nodes))
        if all(map(shutil.which, ("slurmctld", "slurmd", "srun", "munged"))):
            slurm = stack.enter_context(cluster())
            tasks = ["--nodes=2", "--ntasks-per-node=2", *PYTHON, *PROGRAM]
            ways["srun, two nodes"] = lambda: [slurm.run("srun", *tasks)]
    for name, mpirun in {"Open MPI": OPENMPI, "MPICH": HYDRA}.items():
        if shutil.which(mpirun[0]):
            ways[name] = lambda mpirun=mpirun: launch([*mpirun, "-n", "4", *PYTHON, *PROGRAM])
    return ways


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="runs of each launcher")
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        ways = find_ways(stack)
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(args.rounds):
            for name, way in ways.items():
                ended = way()
                assert all(end.code == 0 for end in ended), ended
                seconds[name].append(max(end.seconds for end in ended))
    for name, times in seconds.items():
        print(f"{name:20} {statistics.median(times):5.1f} s   ({min(times):.1f} to {max(times):.1f})")


if __name__ == "__main__":
    main()
