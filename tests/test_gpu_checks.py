"""The checks of tests/gpu, which need a GPU: here they are collected, and skipped with a reason."""

from __future__ import annotations

import re
import sys

import pytest
from processes import ROOT, launch

CHECKS = ROOT / "tests" / "gpu"
ROW = re.compile(r"^(\S.*?) +(passed|failed|skipped) +\d+\.\d  +(.*)$", re.MULTILINE)


@pytest.mark.storm
def test_without_a_gpu_every_check_is_skipped_with_the_reason() -> None:
    names = set()
    for file in CHECKS.glob("test_*.py"):
        names |= set(re.findall(r"^def test_(\w+)", file.read_text(), re.MULTILINE))
    (done,) = launch(["bash", str(CHECKS / "run.sh")], env={"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""})
    assert done.code == 0, done.output
    rows = ROW.findall(done.output)
    assert {name.partition("[")[0].replace(" ", "_") for name, _, _ in rows} == names, done.output
    assert {(result, reason) for _, result, reason in rows} == {("skipped", "no CUDA device")}, done.output
