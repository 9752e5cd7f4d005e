"""Launch the trainers of the snakes' folder as ranks."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Ended, free_port, platform_env, run

import ddpkit

FOLDER = Path(__file__).parents[3] / "examples" / "snakes_ddpg"
PATIENCE = 900.0  # seconds for a launch, which takes 10 on an idle machine


def train(program: str, flags: str) -> None:
    """What a rank does."""
    sys.argv = [program, *flags.split()]
    runpy.run_path(str(FOLDER / program), run_name="__main__")


def train_again_and_again(program: str, cases: list[str]) -> None:
    """Runs a trainer with one set of flags after another, as the same rank."""
    with ddpkit.distributed(num_threads=1):
        for flags in cases:
            with pytest.raises(SystemExit) as end:
                train(program, flags)
            sys.stderr.flush()
            print(f"exit status {end.value.code}", flush=True)


def launch(ranks: int, fn: Any, *args: Any) -> list[Ended]:
    """Runs a function as every rank, started by hand; without a launcher's variables if there is one rank."""
    port = free_port()
    envs = [platform_env(rank, ranks, port) for rank in range(ranks)] if ranks > 1 else [{"OMP_NUM_THREADS": "1"}]
    return run(fn, envs, *args, timeout=PATIENCE)


def said(ended: list[Ended], code: int = 0) -> str:
    """What the main process has said, and that all ended well and the others kept silent."""
    for process in ended:
        assert process.code == code, process.output
    assert "".join(process.output for process in ended[1:]) == ""
    return ended[0].output


def checkpoint(folder: Path) -> dict[str, Any]:
    name = (folder / "latest").read_text().split()[0]
    return torch.load(folder / name)["state"]


def look_that_each_is_one_line(program: str, common: str, cases: Mapping[str, str]) -> None:
    """Looks that flags end both of two ranks with one line, which the main process says."""
    ended = launch(2, train_again_and_again, program, [f"{common} {flags}" for flags in cases])
    assert [process.code for process in ended] == [0, 0], ended[0].output
    spoken, silence = ([*re.split(r"(?<=exit status 2)\n", process.output)] for process in ended)
    assert silence == ["exit status 2"] * len(cases) + [""]
    for (flags, expected), output in zip(cases.items(), [text for text in spoken if text], strict=True):
        lines = [line for line in output.splitlines() if "error" in line]
        assert len(lines) == 1, output
        assert re.search(f"^{Path(program).name}: error: .*{expected}", lines[0]), (flags, output)
        assert "Traceback" not in output and "usage" not in output
