"""What the launchers' tests start, and what each of these programs must print."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from processes import ROOT, Ended

PROGRAM = [str(Path(__file__).with_name("program.py"))]
DIGITS = str(ROOT / "examples" / "digits.py")
ONE_EPOCH = [DIGITS, "--epochs=1"]
PYTHON = [sys.executable]
MEET = ["--rdzv-backend=c10d", "--rdzv-id=test", "--rdzv-endpoint=node1:29400"]  # on virtual nodes
OPENMPI = ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
HYDRA = ["mpiexec.hydra"]


def assert_joined(ended: list[Ended], launcher: str, *nodes: int) -> None:
    """The program ran as one job with that many ranks on each node, in this order, and averaged their numbers."""
    world_size, expected = sum(nodes), []
    for node, size in enumerate(nodes):
        for local_rank in range(size):
            place = f"rank {len(expected)}/{world_size} local {local_rank}/{size} node {node}/{len(nodes)}"
            expected.append(f"{place} {launcher} mean {(world_size - 1) / 2:g}")
    assert [end.code for end in ended] == [0] * len(ended), ended
    assert sorted(re.findall("^rank .*$", "".join(end.output for end in ended), re.MULTILINE)) == expected, ended


def assert_trained(ended: list[Ended], world_size: int) -> None:
    """The digits example made one epoch as one job, which no number of ranks changes."""
    assert [end.code for end in ended] == [0] * len(ended), ended
    output = "".join(end.output for end in ended)
    (right,) = re.findall(r"^epoch 0: training loss \S+, test: (\d+) of 360 right$", output, re.MULTILINE)
    assert f"world size: {world_size}" in output and int(right) > 200, output
