"""The recipes and the code of the guide's pages, on one process that has the device, side by side."""

from __future__ import annotations

import importlib.util
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from starting import ROOT, run

NEEDS = {"logged_metrics": "tensorboard", "logged_to_wandb": "wandb", "metrics_of_torchmetrics": "torchmetrics"}
APART = {"from_a_notebook"}  # starts two ranks, each of which needs a device
FENCES = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def run_all(commands: dict[str, list[str]], folder: Path) -> dict[str, str]:
    """Run each command in a folder of its own; return what went wrong, by name."""

    def attempt(name: str) -> str:
        (folder / name).mkdir(exist_ok=True)
        try:
            run(commands[name], timeout=200.0, folder=folder / name)
        except AssertionError as error:
            return f"{error}"[-1500:]
        return ""

    with ThreadPoolExecutor(8) as pool:
        found = dict(zip(commands, pool.map(attempt, commands), strict=True))
    return {name: error for name, error in found.items() if error}


def test_the_recipes_run_on_the_device(device: str, tmp_path: Path) -> None:
    recipes = {path.stem: path for path in sorted((ROOT / "docs/recipes").glob("*.py"))}
    chosen = [
        name
        for name in recipes.keys() - APART
        if name not in NEEDS or importlib.util.find_spec(NEEDS[name]) is not None
    ]
    assert run_all({name: [sys.executable, str(recipes[name])] for name in sorted(chosen)}, tmp_path) == {}


def test_the_code_of_the_pages_runs_on_the_device(device: str, tmp_path: Path) -> None:
    commands = {}
    for page in sorted((ROOT / "docs/guide").glob("*.md")):
        source = "\n".join(FENCES.findall(page.read_text()))
        if source:
            file = tmp_path / page.stem / f"test_{page.stem.replace('-', '_')}.py"
            file.parent.mkdir()
            file.write_text(f"{source}\n\ndef test_nothing_else(): pass\n")
            commands[page.stem] = [sys.executable, "-m", "pytest", "-q", "-p", "ddpkit.testing.hooks", file.name]
    assert run_all(commands, tmp_path) == {}
