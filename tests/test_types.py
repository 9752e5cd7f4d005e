"""What a type checker sees of the collectives and of `spawn`."""

from __future__ import annotations

from pathlib import Path

import mypy.api
import pytest

ROOT = Path(__file__).parents[1]
RIGHT = """
from dataclasses import dataclass
import torch
from torch import Tensor, nn
from typing_extensions import assert_type
from ddpkit import all_gather, all_reduce, all_reduce_mean, broadcast, gather_exact, spawn

def name(x: int) -> str:
    return str(x)

@dataclass
class Metrics:
    loss: float

def check(tensor: Tensor, floats: dict[str, float], ints: dict[str, int], metrics: Metrics, yes: bool) -> None:
    assert_type(all_reduce_mean(1.0), float)
    assert_type(all_reduce_mean(1, weight=3), float)
    assert_type(all_reduce_mean(yes, weight=tensor), float)
    assert_type(all_reduce_mean(nn.Parameter(tensor)), Tensor)
    assert_type(all_reduce_mean(floats), dict[str, float])
    assert_type(all_reduce_mean(ints), dict[str, float])
    assert_type(all_reduce_mean([1, 2]), list[float])
    assert_type(all_reduce_mean(metrics), Metrics)
    assert_type(all_reduce(3), int)
    assert_type(all_reduce(yes), int)
    assert_type(all_reduce(yes, "max"), bool)
    assert_type(all_reduce(3, "mean"), float)
    assert_type(all_reduce(ints, "max"), dict[str, int])
    assert_type(all_reduce(nn.Parameter(tensor), "min"), Tensor)
    assert_type(all_gather(tensor), list[Tensor])
    assert_type(all_gather({"a": tensor}), list[dict[str, Tensor]])
    assert_type(gather_exact({"a": tensor}, [0], 1), dict[str, Tensor])
    assert_type(gather_exact(["a"], range(1), 1), list[str])
    assert_type(broadcast(floats), dict[str, float])
    assert_type(spawn(name, 2, 3), list[str])
"""

WRONG = """
from ddpkit import all_reduce, all_reduce_mean
all_reduce(1.0, "maxx")
all_reduce_mean(1.0, "3")
"""


@pytest.mark.storm
def test_a_checker_can_tell_the_types_of_results_and_sees_a_wrong_op(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MYPY_CONFIG_FILE_DIR", str(ROOT))  # mypy sets it
    right, wrong = tmp_path / "right.py", tmp_path / "wrong.py"
    right.write_text(RIGHT)
    wrong.write_text(WRONG)
    ours = [f"--config-file={ROOT / 'pyproject.toml'}", f"--cache-dir={ROOT / '.mypy_cache'}"]  # knows torch already
    found = mypy.api.run(["--strict", *ours, str(right), str(wrong)])[0]
    assert "right.py" not in found, found
    assert 'wrong.py:3: error: No overload variant of "all_reduce"' in found
    assert 'wrong.py:4: error: No overload variant of "all_reduce_mean"' in found
