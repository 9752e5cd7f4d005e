"""What the launchers' tests start, and what each of these programs must print."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

from processes import ROOT, Ended

PROGRAM = [str(Path(__file__).with_name("program.py"))]
DIGITS = str(ROOT / "examples" / "digits.py")
ONE_EPOCH = [DIGITS, "--epochs=1"]
PYTHON = [sys.executable]
MEET = ["--rdzv-backend=c10d", "--rdzv-id=test", "--rdzv-endpoint=node1:29400"]  # on virtual nodes
OPENMPI = ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
HYDRA = ["mpiexec.hydra"]
PREEMPTED = str(Path(__file__).with_name("preempted.py"))


def assert_joined(ended: list[Ended], launcher: str, *nodes: int) -> None:
    """The program ran as one job with that many ranks on each node, in this order, and averaged their numbers."""
    world_size, expected = sum(nodes), []
    for node, size in enumerate(nodes):
        for local_rank in range(size):
            place = f"rank {len(expected)}/{world_size} local {local_rank}/{size} node {node}/{len(nodes)}"
            expected.append(f"{place} {launcher} mean {(world_size - 1) / 2:g}")
    assert [end.code for end in ended] == [0] * len(ended), ended
    assert sorted(re.findall(r"^rank \d+/.*$", "".join(end.output for end in ended), re.MULTILINE)) == expected, ended


def assert_trained(ended: list[Ended], world_size: int) -> None:
    """The digits example made one epoch as one job, which no number of ranks changes."""
    assert [end.code for end in ended] == [0] * len(ended), ended
    output = "".join(end.output for end in ended)
    (right,) = re.findall(r"^epoch 0: training loss \S+, test: (\d+) of 360 right$", output, re.MULTILINE)
    assert f"world size: {world_size}" in output and int(right) > 200, output


def ending(folder: Path, fault: str, by_launcher: str) -> list[str]:
    """The script in which rank 1 fails, and its arguments: a launcher that ends the other rank gets time to do so."""
    return [str(Path(__file__).with_name("ending.py")), str(folder), fault, "2" if by_launcher == "stayed" else "30"]


def assert_ended(end: Ended, folder: Path, by_launcher: str) -> None:
    """When rank 1 had failed, rank 0 heard of it, and the launcher did this to it.

    Where the launcher ends it at once, it may have no time to hear or to say either.
    """
    said = (folder / "said").read_text().splitlines() if (folder / "said").exists() else []
    assert end.code and end.code > 0, end
    if by_launcher in ("got SIGKILL", "got SIGTERM"):
        assert set(said) <= {"heard of rank 1", by_launcher}, (said, end)
    else:
        assert said == ["heard of rank 1", by_launcher], (said, end)


def wait_until_all_train(folder: Path, world_size: int, step: int = 0) -> None:
    """Until all ranks of the preempted run are in its loop, which begins after that step."""
    end = time.monotonic() + 120
    while not all((folder / f"rank {rank} from step {step}").exists() for rank in range(world_size)):
        assert time.monotonic() < end, [*folder.iterdir()]
        time.sleep(0.02)


def process_of(folder: Path, rank: int) -> tuple[int, int, str]:
    """The process of that rank of the preempted run, the one that started it, and the host's name."""
    own, parent, host = (folder / f"rank {rank} from step 0").read_text().split()
    return int(own), int(parent), host


def stopped_after(folder: Path, world_size: int, because: str) -> int:
    """The step after which all ranks of the preempted run have stopped, for the one reason."""
    found = [path for path in folder.iterdir() if " stopped " in path.name]
    steps = {int(path.name.rpartition(" ")[2]) for path in found}
    assert len(found) == world_size, found
    assert len(steps) == 1, found
    (reason,) = {path.read_text() for path in found}
    assert re.fullmatch(because, reason), reason
    return steps.pop()


def assert_done(folder: Path, world_size: int) -> None:
    """The preempted run has gone on to its end, and each sample came once."""
    assert {path.name for path in folder.iterdir() if path.name.endswith("done")} == {
        f"rank {rank} done" for rank in range(world_size)
    }
