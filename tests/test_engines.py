"""ddpkit inside of other engines: real ones, where they are installed, end with the loss of one plain process."""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec

import pytest
from processes import ROOT, TORCHRUN, launch

FOLDER = ROOT / "docs" / "engines"
LOSS = pytest.approx(4.43296e-05, rel=1e-4)  # what one process ends with
NEEDS = {
    "ray_train": "ray",
    "dask_cluster": "distributed",
    "inside_fabric": "lightning_fabric",
    "inside_accelerate": "accelerate",
}


@pytest.mark.storm
@pytest.mark.parametrize("name", NEEDS)
def test_the_losses_under_an_engine_are_those_of_one_process(name: str) -> None:
    if find_spec(NEEDS[name]) is None:
        pytest.skip(f"{NEEDS[name]} is not installed")
    script = [str(FOLDER / f"{name}.py")]
    command = [*TORCHRUN, "--nproc-per-node=2", *script] if name.startswith("inside") else [sys.executable, *script]
    (ended,) = launch(command, timeout=300)
    assert ended.code == 0, ended.output
    losses = re.findall(r"\d\.\d+e-\d\d", ended.output)
    assert losses and all(float(loss) == LOSS for loss in losses), ended.output
    assert "loss of 2 ranks" in ended.output or len(losses) == 4


def test_the_page_shows_every_script() -> None:
    shown = re.findall(r"\.\./engines/(\w+)\.py", (ROOT / "docs/guide/other-engines.md").read_text())
    assert sorted(shown) == sorted(NEEDS) == sorted(path.stem for path in FOLDER.glob("*.py"))
