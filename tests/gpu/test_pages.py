"""The recipes and the code of the guide's pages, on one process that has the device, side by side."""

from __future__ import annotations

import importlib.util
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from starting import run
from test_docs import SOURCES
from test_recipes import FOLDER, NEEDS, RECIPES, STARTS_RANKS


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
    there = [name for name in RECIPES if name not in NEEDS or importlib.util.find_spec(NEEDS[name]) is not None]
    commands = {name: [sys.executable, str(FOLDER / f"{name}.py")] for name in there if name not in STARTS_RANKS}
    assert run_all(commands, tmp_path) == {}


def test_the_code_of_the_pages_runs_on_the_device(device: str, tmp_path: Path) -> None:
    commands = {}
    for page, source in SOURCES.items():
        path = Path(page)
        if path.parent == Path("docs/guide") and source.strip():
            file = tmp_path / path.stem / f"test_{path.stem.replace('-', '_')}.py"
            file.parent.mkdir()
            file.write_text(f"{source}\n\ndef test_nothing_else(): pass\n")
            commands[path.stem] = [sys.executable, "-m", "pytest", "-q", "-p", "ddpkit.testing.hooks", file.name]
    assert run_all(commands, tmp_path) == {}
