"""Programs print the same, bit by bit, whether they are observed or not."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from processes import platform_env, run

from ddpkit.tools import check
from ddpkit.tools.parity import rank as parity
from ddpkit.tools.parity.inputs import Plan
from ddpkit.tools.ranks import Script, run_script
from ddpkit.tools.recorder import Recorder

PROGRAMS = Path(__file__).with_name("unchanged.py")
NAMES = re.findall(r"^def (\w+)\(\) -> None", PROGRAMS.read_text(), re.MULTILINE)
QUICK = ["traced", "exported", "gradients_of_samples", "compiled", "functions_known_by_name", "copied"]
STEPS = 1000  # more than any makes


def begin(name: str, observers: str, folder: Path) -> None:
    """Be the program, observed as a rank of a tool is; by nobody if `observers` is empty."""
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    script = Script(str(PROGRAMS), [name])
    if not observers:
        sys.exit(run_script(script)[0])
    (folder / "run/work").mkdir(parents=True)
    recorder = Recorder(os.open(folder / "records", os.O_WRONLY | os.O_CREAT))
    ended = os.open(os.devnull, os.O_RDONLY)
    if observers == "check":
        check.be_rank(script, STEPS, recorder, ended)
    parity.be_rank(script, Plan(STEPS, folder, keep=("dropout", "batch norm")), recorder, ended)


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.storm) for n in NAMES])
def test_a_program_prints_the_same_under_observation(name: str, tmp_path: Path) -> None:
    env = platform_env(0, 1, 0)
    plain, *observed = [run(begin, [env], name, tool, tmp_path / tool)[0] for tool in ("", "check", "parity")]
    assert plain.code == 0 and plain.output
    for tool, ended in zip(("check", "parity"), observed, strict=True):
        assert (ended.code, ended.output) == (0, plain.output), tool
        assert '"kind":"failure"' not in (tmp_path / tool / "records").read_text()
