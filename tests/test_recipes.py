"""The quick start and the recipes of the docs: any number of ranks gives what one process gives."""

from __future__ import annotations

import importlib
import os
import re
import runpy
import signal
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import ROOT, free_port, launch, platform_env, run
from stand_in import use_stand_in

FOLDER = ROOT / "docs" / "recipes"
RECIPES = sorted(path.stem for path in FOLDER.glob("*.py"))
DEPENDS_ON_RANKS = {"stream", "profiling"}  # in the one, ranks stop with the first; the other prints times
STARTS_RANKS = {"from_a_notebook"}
TRIED_APART = {*STARTS_RANKS, "compressed_gradients"}
NEEDS = {"logged_metrics": "tensorboard", "logged_to_wandb": "wandb", "metrics_of_torchmetrics": "torchmetrics"}
TOLERANCE = {"mixed_precision": 1e-2}  # relative; bfloat16 has three digits
UNEVEN = [("480", "481"), ("500", "481"), ("610", "611"), (" 12, context", " 13, context"), ("/ 12 ", "/ 13 ")]


def recipe(name: str) -> Any:
    """Return the name of a recipe, marked with the package that it needs besides those of the tests."""
    package = NEEDS.get(name, "tensorboard")
    return pytest.param(name, marks=pytest.mark.peers(package) if package != "tensorboard" else ())


def run_recipe(name: str, folder: str, envs: list[dict[str, str]]) -> None:
    """Run a recipe in an empty folder on one process, and on some ranks in another, at once.

    They are forked from this process, which has imported for all of them what takes long. The one process has a device
    other than the host.
    """
    if name in NEEDS:
        importlib.import_module(NEEDS[name])
    crew = {}
    for number, env in enumerate([{}, *envs]):
        pid = os.fork()
        if not pid:
            os.environ.update(env)
            output = os.open(f"{folder}/{number}", os.O_WRONLY | os.O_CREAT)
            os.dup2(output, 1)
            os.dup2(output, 2)
            warnings.filterwarnings("error", "In batch .* ranks shared")
            torch.set_default_dtype(torch.float64)
            start = run_in if env else run_on_stand_in
            start(f"{folder}/recipe.py", f"{folder}/{'several' if env else 'one'}")
            return
        crew[pid] = number
    for _ in range(len(crew)):
        pid, status = os.wait()
        print(crew[pid], "ended with", os.waitstatus_to_exitcode(status))


def run_in(path: str, folder: str) -> None:
    os.chdir(folder)
    runpy.run_path(path, run_name="__main__")


def run_on_stand_in(path: str, folder: str) -> None:
    use_stand_in()
    run_in(path, folder)


def play(name: str, ranks: int, folder: Path) -> tuple[str, str]:
    """Run a recipe on one process and on so many ranks; return what the main process of each prints last.

    With a sample more than fill the batches, in float64.
    """
    source = (FOLDER / f"{name}.py").read_text()
    for even, uneven in UNEVEN:
        source = source.replace(even, uneven)
    (folder / "recipe.py").write_text(source)
    for each in ("one", "several"):
        (folder / each).mkdir()
    port = free_port()
    envs = [platform_env(rank, ranks, port) for rank in range(ranks)]
    (ended,) = run(run_recipe, [{"OMP_NUM_THREADS": "1"}], name, str(folder), envs)
    alone, main, *others = [(folder / f"{number}").read_text() for number in range(1 + ranks)]
    assert sorted(ended.output.splitlines()) == [f"{number} ended with 0" for number in range(1 + ranks)], alone + main
    if name != "profiling":  # torch's profiler prints on each rank
        assert not any(others), "only the main process speaks"
    return alone.splitlines()[-1], main.splitlines()[-1]


def number_in(line: str) -> float:
    return float(line.split(": ")[-1])


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.storm)])
@pytest.mark.parametrize("name", [recipe(name) for name in RECIPES if name not in TRIED_APART])
def test_a_recipe_gives_on_several_ranks_what_it_gives_on_one(name: str, ranks: int, tmp_path: Path) -> None:
    alone, together = play(name, ranks, tmp_path)
    if name not in DEPENDS_ON_RANKS:
        assert number_in(together) == pytest.approx(number_in(alone), rel=TOLERANCE.get(name, 1e-9))


KEEP_RESTORED = """    torch.save(compression.error_dict, f"restored-{context.rank}.pt")
    for epoch in loader"""


def test_compressed_gradients_go_on_with_what_they_owe(tmp_path: Path) -> None:
    """And several ranks end where one process does."""
    recipe = (FOLDER / "compressed_gradients.py").read_text().replace("480", "240")
    recipe = recipe.replace("    for epoch in loader", KEEP_RESTORED)
    weights = {}
    for ranks, epochs, folder in ((1, 12, "alone"), (2, 11, "several"), (2, 12, "several")):
        file = tmp_path / f"{epochs}.py"
        file.write_text(recipe.replace("epochs(20)", f"epochs({epochs})"))
        (tmp_path / folder).mkdir(exist_ok=True)
        port = free_port()
        envs = [platform_env(rank, ranks, port) for rank in range(ranks)]
        ended = run(run_in, envs, str(file), str(tmp_path / folder))
        assert {end.code for end in ended} == {0}, ended
        weights[folder] = number_in(ended[0].output.splitlines()[-1])
    assert weights["several"] == pytest.approx(weights["alone"], rel=1e-4)
    saved = torch.load(tmp_path / "several/runs/compressed/step-000000011.pt")
    for rank in range(2):
        owed = saved["per_rank"][rank]["per_rank"]["compression"]["error_dict"][0]
        restored = torch.load(tmp_path / f"several/restored-{rank}.pt")[0]
        assert torch.equal(owed, restored) and owed.any()


@pytest.mark.storm
@pytest.mark.parametrize("name", sorted(STARTS_RANKS))
def test_a_recipe_that_starts_its_ranks_runs(name: str) -> None:
    (ended,) = launch([sys.executable, str(FOLDER / f"{name}.py")])
    assert ended.code == 0, ended.output
    assert number_in(ended.output.splitlines()[-1]) < 1


@pytest.mark.parametrize(
    ("moved", "forgotten"),
    [("x, y = x.to(context.device), y.to(context.device)", "pass"), ("- y.to(context.device)", "- y")],
)
def test_a_batch_that_stays_on_the_host_is_found_here(moved: str, forgotten: str, tmp_path: Path) -> None:
    source = (FOLDER / "early_stopping.py").read_text()
    assert moved in source
    file = tmp_path / "recipe.py"
    file.write_text(source.replace(moved, forgotten))
    (ended,) = run(run_on_stand_in, [{}], str(file), str(tmp_path))
    assert ended.code == 1 and "expected all tensors to be on the same device" in ended.output


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_short(name: str) -> None:
    longest = 60 if name.startswith("contrastive") else 50  # lines
    assert len((FOLDER / f"{name}.py").read_text().splitlines()) <= longest


def test_the_page_shows_each_recipe_and_links_to_it_where_nothing_is_included() -> None:
    page = (ROOT / "docs/guide/recipes.md").read_text()
    assert sorted(re.findall(r"{literalinclude} \.\./recipes/(\w+)\.py", page)) == RECIPES
    assert sorted(re.findall(r"\[Source\]\(\.\./recipes/(\w+)\.py\)", page)) == RECIPES


# Quick start


def run_script(path: str, stop_at: int) -> None:
    """Run a script in its folder; a rank that is to stop gets a signal after the checkpoint of this step."""
    os.chdir(os.path.dirname(path))
    script = runpy.run_path(path)
    if stop_at >= 0 and os.environ.get("RANK") == "1":
        checkpoint = Path("runs/quick-start", f"step-{stop_at:09}.pt")
        threading.Thread(target=signal_after, args=(checkpoint,), daemon=True).start()
    sys.exit(script["main"](epochs=4))


def signal_after(checkpoint: Path) -> None:
    while not checkpoint.exists():
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGUSR1)


def losses_in(output: str) -> dict[str, str]:
    """The printed losses by step."""
    return dict(re.findall(r"^step (\d+): loss (.*)$", output, re.MULTILINE))


def test_the_quick_start_stops_on_two_ranks_and_goes_on_with_three_to_the_losses_of_one(tmp_path: Path) -> None:
    page = (ROOT / "docs/guide/quick-start.md").read_text()
    (source,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    source = source.replace("6000", "6001")  # one sample is left for the last step of an epoch, its 101st
    losses = []
    for name, runs in {"one": [(1, -1)], "stopped": [(2, 101), (3, -1)]}.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "train.py").write_text(source)
        outputs = ""
        for ranks, stop_at in runs:
            envs = [{"OMP_NUM_THREADS": "1"}]
            if ranks > 1:
                port = free_port()
                envs = [platform_env(rank, ranks, port) for rank in range(ranks)]
            ended = run(run_script, envs, str(folder / "train.py"), stop_at)
            assert {end.code for end in ended} == {0 if stop_at < 0 else 128 + signal.SIGUSR1}, ended
            outputs += ended[0].output
        losses.append(losses_in(outputs))
    assert len(losses[0]) == 4
    assert list(losses[1]) == list(losses[0])
    for step, loss in losses[0].items():
        assert float(losses[1][step]) == pytest.approx(float(loss), abs=2e-4)
