"""How many samples per second the robot trainer trains on, on different numbers of ranks, by short runs of the program.

Every rank has one thread. The batch is that of `config.json`, for each rank or, with `--keep global`, for all together;
then a rank of many has a small one, and what a step costs whatever its batch counts for more. The rate is what the
trainer logs, without a run's first epoch, in which starting up counts.

    python tests/benchmarks/robot_speed.py
    python tests/benchmarks/robot_speed.py --keep global
"""

from __future__ import annotations

import argparse
import re
import statistics
import tempfile
from pathlib import Path

import by_ranks
from robot_success import run


def rate(ranks: int, args: argparse.Namespace) -> float:
    """Samples per second of all ranks, in one run."""
    settings = [
        f"train.data_path={args.data}",
        f"train.output_dir={args.data}/runs",
        "experiment.rollout.enabled=false",
    ]
    settings += [f"train.keep_batch_size={args.keep}", f"train.num_epochs={args.epochs}"]
    said = run(ranks, "train", *settings, *args.settings)
    return statistics.median(float(found) for found in re.findall(r"([\d.]+) samples/s", said)[1:])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--keep", default="per_rank", choices=["per_rank", "global"], help="whose batch is that of the file"
    )
    parser.add_argument("--epochs", type=int, default=4, help="of 250 optimiser steps, at least 2")
    parser.add_argument("--settings", nargs="*", default=[], help="further settings of the trainer, key=value")
    with tempfile.TemporaryDirectory() as scratch:
        parser.set_defaults(data=Path(scratch, "data"))
        run(2, "collect", "--folder", f"{scratch}/data", "--episodes", "60")
        by_ranks.compare(__doc__, "samples/s", rate, parser)
