"""How often `torchrun --max-restarts` brings a job back that lost a rank or a node: with ddpkit, and with plain torch.

In each run one of four ranks fails once, in the middle: the last one, or `--rank`. With ddpkit a run has recovered if
it ends with exit code 0, went on from the last checkpoint and has seen each sample once an epoch; plain torch only has
to end, within `--patience` seconds. Needs root, for the virtual nodes; without it those lines are left out.

    python tests/benchmarks/elastic_restart.py
    python tests/benchmarks/elastic_restart.py --rank 0 --runs 3 --plain-runs 0 --only static
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "launchers")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from elastic import fail_once  # noqa: E402
from nodes import may_make_nodes  # noqa: E402
from processes import Ended  # noqa: E402
from restarts import lose_when, on_one_node, on_two_nodes  # noqa: E402

OURS, PLAIN = [str(TESTS / "launchers" / "elastic.py")], [__file__, "--as-rank"]
END = "ended after step 20"
WAYS: dict[str, tuple[Callable[..., list[Ended]], list[str]]] = {
    "c10d, one node": (partial(on_one_node, ranks=4), ["raise", "kill"]),
    "static, one node": (partial(on_one_node, ranks=4, static=True), ["raise", "kill"]),
    "c10d, two nodes": (on_two_nodes, ["raise", "kill"]),
    "static, two nodes": (partial(on_two_nodes, static=True), ["raise", "kill"]),
    "c10d, 1:2 nodes": (partial(on_two_nodes, nodes="1:2"), ["wait"]),  # to be lost
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20, help="runs with ddpkit, of each line")
    parser.add_argument("--plain-runs", type=int, default=5, help="runs with plain torch, of each line")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds after which a plain run is given up")
    parser.add_argument("--rank", type=int, default=-1, help="the rank that fails; a lost node is always the second")
    parser.add_argument("--only", default="", help="lines that contain this text")
    args = parser.parse_args()
    print("| rendezvous | fault | ddpkit recovered | median seconds | plain torch recovered |\n|---|---|---|---|---|")
    for name, (way, faults) in WAYS.items():
        for fault in faults:
            if args.only not in f"{name} {fault}" or not (name.endswith("one node") or may_make_nodes()):
                continue
            faulty = -1 if fault == "wait" else args.rank
            ours = [run(way, fault, faulty, OURS, 240.0) for _ in range(args.runs)]
            plain = [run(way, fault, faulty, PLAIN, args.patience) for _ in range(args.plain_runs)]
            counts = [f"{sum(well for well, _ in runs)} of {len(runs)}" for runs in (ours, plain)]
            seconds = statistics.median([seconds for well, seconds in ours if well] or [float("nan")])
            told = {"raise": "exception", "kill": "SIGKILL", "wait": "node lost"}[fault]
            print(f"| {name} | {told} | {counts[0]} | {seconds:.1f} | {counts[1]} |", flush=True)


def run(
    way: Callable[..., list[Ended]], fault: str, faulty: int, script: list[str], timeout: float
) -> tuple[bool, float]:
    """Whether one run recovered, and its seconds from start to end."""
    with tempfile.TemporaryDirectory() as folder:
        lost = {"strike": lose_when(Path(folder, "failed"))} if fault == "wait" else {}
        ended = way(*script, folder, fault, str(faulty), timeout=timeout, **lost)
    first, *others = ended
    words = [f"{END}, saw each sample {{2}} times", "start after step 6"] if script is OURS else [END]
    well = first.code == 0 and all(word in first.output for word in words)
    if script is OURS and not well:
        print(*(end.output for end in ended), sep="\n", file=sys.stderr)
    return well and (bool(lost) or all(end.code == 0 for end in others)), first.seconds


def train_plainly(folder: Path, fault: str, faulty: int) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    for step in range(1, 21):
        dist.all_reduce(torch.ones(1))
        if step == 8 and dist.get_rank() == faulty % dist.get_world_size():
            fail_once(folder, fault)
    if dist.get_rank() == 0:
        print(END, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as-rank"] and "RANK" in os.environ:
        train_plainly(Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
    else:
        main()
