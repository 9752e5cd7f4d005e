"""ddpkit inside of other engines: real ones, where they are installed, end with the loss of one plain process."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from processes import ROOT, TORCHRUN, free_port, launch

FOLDER = ROOT / "docs" / "engines"
LOSS = pytest.approx(3.53341e-05, rel=2e-4)  # what one process ends with on 241 samples
NEEDS = {
    "ray_train": "ray",
    "dask_cluster": "distributed",
    "inside_fabric": "lightning_fabric",
    "inside_accelerate": "accelerate",
    "inside_deepspeed": "deepspeed",
}


@pytest.mark.storm
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.peers(NEEDS[name])) for name in NEEDS])
def test_the_losses_under_an_engine_are_those_of_one_process(name: str, tmp_path: Path) -> None:
    """Also with one sample more than fills the batches."""
    script = tmp_path / f"{name}.py"
    script.write_text((FOLDER / f"{name}.py").read_text().replace("240", "241"))
    start = [*TORCHRUN, "--nproc-per-node=2"] if name.startswith("inside") else [sys.executable]
    (ended,) = launch([*start, str(script)], timeout=300)
    assert ended.code == 0, ended.output
    losses = re.findall(r"\d\.\d+e-\d\d", ended.output)
    assert losses and all(float(loss) == LOSS for loss in losses), ended.output
    assert "loss of 2 ranks" in ended.output or len(losses) == 4


def test_the_page_shows_every_script() -> None:
    shown = re.findall(r"{literalinclude} \.\./engines/(\w+)\.py", (ROOT / "docs/guide/recipes.md").read_text())
    assert sorted(shown) == sorted(NEEDS) == sorted(path.stem for path in FOLDER.glob("*.py"))


@pytest.mark.storm
def test_a_pytorchjob_starts_ranks_in_its_pods(tmp_path: Path) -> None:
    """As Kubeflow's operator does: the command of each pod, with the variables that it sets."""
    pods = []
    for kind, spec in yaml.safe_load((FOLDER / "pytorchjob.yaml").read_text())["spec"]["pytorchReplicaSpecs"].items():
        (container,) = spec["template"]["spec"]["containers"]
        assert container["name"] == "pytorch" and spec["restartPolicy"] == "ExitCode", kind
        pods += [container["command"]] * spec["replicas"]
    port = free_port()
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": len(pods), "PYTHONUNBUFFERED": 1}
    shutil.copy(ROOT / "docs/recipes/exact_evaluation.py", tmp_path / "train.py")
    commands = []
    for rank, (python, script) in enumerate(pods):
        assert (python, script) == ("python", "train.py")
        variables = [f"{name}={value}" for name, value in {**place, "RANK": rank}.items()]
        commands.append(["env", f"--chdir={tmp_path}", *variables, sys.executable, script])
    together = launch(*commands, timeout=120)
    (alone,) = launch([sys.executable, str(tmp_path / "train.py")], timeout=120)
    assert [ended.code for ended in together] == [0] * 4, together
    assert together[0].output.splitlines()[-1] == alone.output.splitlines()[-1]
