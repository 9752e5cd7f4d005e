"""Ranks against one process: ports that are right, and ports with one planted mistake."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import ROOT, run

from ddpkit.tools import cli

SCRIPTS = Path(__file__).parent / "scripts"
LATE = 600.0  # seconds in which a comparison of a tiny script ends on any machine
PLANTS = {  # the step and the thing that show each first
    "twice": (1, "unclipped"),
    "sum": (1, "unclipped"),
    "mean": (1, "unclipped"),
    "alone": (1, "gradients"),
    "clip": (1, "gradients"),
    "rate": (1, "settings"),
    "decay": (2, "settings"),
    "start": (1, "parameters"),
    "between": (2, "parameters"),
    "batch": (1, "samples"),
    "same": (1, "samples"),
    "metric": (5, "printed"),
    "local": (5, "printed"),
}
QUICK = ("twice", "clip", "metric")
MADE_BY = ("dataset", "collation", "attention", "loaders", "preview", "critic", "evaluation", "bfloat16")
RECIPES = sorted(path.stem for path in (ROOT / "docs/recipes").glob("*.py"))
STORM = pytest.mark.storm
WITHOUT_STEPS = {"from_a_notebook", "exact_evaluation", "metrics_of_torchmetrics", "logged_to_wandb"}


def begin(words: list[str], folder: str) -> None:
    """Be the command line, in a process that has imported torch."""
    os.chdir(folder)
    sys.path[0] = folder
    sys.exit(cli.main(["parity", *words]))


def compare(folder: Path, *words: str) -> tuple[int | None, dict[str, Any]]:
    """Compare a script; return the exit code and the report."""
    (ended,) = run(begin, [{}], ["--json", *words], f"{folder}", timeout=LATE)
    if "{" not in ended.output:
        return ended.code, {"refused": ended.output}
    return ended.code, json.loads(ended.output[ended.output.index("{\n") :])


def lines_of(plant: str) -> list[int]:
    """The lines of the port at which a mistake shows."""
    lines = (SCRIPTS / "port.py").read_text().splitlines()
    marked = {number: line.partition("# <- ")[2].split(", ") for number, line in enumerate(lines, 1)}
    return [number for number, plants in marked.items() if plant in plants]


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.storm)])
def test_a_right_port_is_equal(ranks: int, tmp_path: Path) -> None:
    code, report = compare(tmp_path, "-n", f"{ranks}", "--reference", f"{SCRIPTS}/single.py", f"{SCRIPTS}/port.py")
    assert (code, report["difference"], report["steps"]) == (0, None, 5), report
    assert report["numbers"] == 3  # the epoch, the loss, the accuracy


@pytest.mark.parametrize("plant", [p if p in QUICK else pytest.param(p, marks=pytest.mark.storm) for p in PLANTS])
def test_a_mistake_is_found_at_its_step_and_line(plant: str, tmp_path: Path) -> None:
    code, report = compare(tmp_path, "--reference", f"{SCRIPTS}/single.py", f"{SCRIPTS}/port.py", plant)
    assert code == 1, report
    found = report["difference"]
    assert (found["step"], found["thing"]) == PLANTS[plant], found
    lines = lines_of(plant)
    assert not lines or found["where"]["line"] in lines, found


@pytest.mark.storm
@pytest.mark.parametrize("ranks", ["2", "3"])
@pytest.mark.parametrize("words", ["two_networks", "schedule", "uneven 1", "uneven 3"])
def test_a_script_is_equal_to_itself(words: str, ranks: str, tmp_path: Path) -> None:
    name, *arguments = words.split()
    code, report = compare(tmp_path, "-n", ranks, f"{SCRIPTS}/{name}.py", *arguments)
    assert (code, report["difference"]) == (0, None), report
    assert report["steps"] >= 5 and report["numbers"] > 0


@pytest.mark.storm
@pytest.mark.parametrize("ranks", ["2", "3"])
@pytest.mark.parametrize("kind", MADE_BY)
def test_whatever_inputs_are_made_by_they_are_those_of_all_ranks(kind: str, ranks: str, tmp_path: Path) -> None:
    code, report = compare(tmp_path, "-n", ranks, f"{SCRIPTS}/varied.py", kind)
    assert (code, report["difference"]) == (0, None), report
    assert report["numbers"] > 0


@pytest.mark.storm
@pytest.mark.parametrize("ranks", ["2", "3"])
@pytest.mark.parametrize(("one", "port"), [("together", "apart"), ("apart", "together")])
def test_loaders_are_paired_whether_one_line_makes_them_or_two(one: str, port: str, ranks: str, tmp_path: Path) -> None:
    script = f"{SCRIPTS}/varied.py"
    code, report = compare(tmp_path, "-n", ranks, "--reference", script, f"--reference-args={one}", script, port)
    assert (code, report["difference"]) == (0, None), report


def test_one_of_several_loaders_whose_samples_are_the_same_is_found(tmp_path: Path) -> None:
    code, report = compare(tmp_path, f"{SCRIPTS}/varied.py", "alike")
    found = report["difference"]
    lines = (SCRIPTS / "varied.py").read_text().splitlines()
    (line,) = [
        number for number, text in enumerate(lines, 1) if text.endswith("DistributedSampler(second.dataset, 1, 0))")
    ]
    assert (code, found["step"], found["thing"]) == (1, 2, "samples"), report
    assert found["evidence"].endswith(f"train on the same samples of one loader, {SCRIPTS}/varied.py:{line}")


KEPT = {"all": None, "closure": None, "wrapper": None, "first": None, "average": (2, "others"), "rate": (4, "settings")}
KEPT |= {"fewer": (1, "parameters"), "same": (1, "samples")}


@pytest.mark.parametrize("kind", [k if k in ("closure", "average") else pytest.param(k, marks=STORM) for k in KEPT])
def test_what_a_trainer_keeps_beside_its_network_is_compared(kind: str, tmp_path: Path) -> None:
    code, report = compare(tmp_path, f"{SCRIPTS}/kept.py", kind)
    found = report["difference"]
    assert (code, found and (found["step"], found["thing"])) == (int(found is not None), KEPT[kind]), report


def test_batches_that_are_drawn_are_those_of_all_ranks(tmp_path: Path) -> None:
    code, report = compare(tmp_path, f"{SCRIPTS}/drawn.py")
    assert (code, report["difference"], report["steps"]) == (0, None, 5), report
    assert report["numbers"] == 2  # at the fourth step its number, and the loss of what rank 0 alone has drawn


@pytest.mark.storm
def test_a_mean_of_means_shows_the_weights_of_the_ranks(tmp_path: Path) -> None:
    code, report = compare(tmp_path, "-n", "3", f"{SCRIPTS}/uneven.py", "1", "unweighted")
    assert (code, report["difference"]["step"], report["difference"]["thing"]) == (1, 2, "unclipped"), report


@pytest.mark.peers("accelerate")
@pytest.mark.parametrize("words", ["{0}", "{0} accumulate", "--reference {1} {0}"])
def test_a_loader_that_fetches_ahead_is_served(words: str, tmp_path: Path) -> None:
    code, report = compare(tmp_path, *words.format(SCRIPTS / "with_accelerate.py", SCRIPTS / "single.py").split())
    assert (code, report["difference"], report["unpaired"]) == (0, None, 0), report


@pytest.mark.peers("accelerate")
def test_a_line_that_follows_another_step_is_said_not_to_be_compared(tmp_path: Path) -> None:
    names = ("--reference", "single.py", "--reference-args=accumulate", "with_accelerate.py", "accumulate")
    code, report = compare(tmp_path, *(f"{SCRIPTS / name}" if name.endswith(".py") else name for name in names))
    assert (code, report["numbers"], report["unpaired"]) == (0, 0, 1), report


@pytest.mark.storm
@pytest.mark.parametrize("ranks", ["2", "3"])
@pytest.mark.parametrize("name", [name for name in RECIPES if name not in WITHOUT_STEPS])
def test_a_recipe_is_equal_to_one_process(name: str, ranks: str, tmp_path: Path) -> None:
    code, report = compare(tmp_path, "-n", ranks, f"{ROOT}/docs/recipes/{name}.py")
    if name == "compressed_gradients":  # from the third step on, on purpose
        assert (code, report["difference"]["step"]) == (1, 3), report
    else:
        assert (code, report["difference"]) == (0, None), report


@pytest.mark.storm
@pytest.mark.parametrize("ranks", ["2", "3"])
@pytest.mark.parametrize("words", ["digits", "gpt", "gpt --accumulate 2", "gpt --parallel fsdp", "gpt --deterministic"])
def test_an_example_is_equal_to_one_process(words: str, ranks: str, tmp_path: Path) -> None:
    name, *arguments = words.split()
    code, report = compare(tmp_path, "-n", ranks, f"{ROOT}/examples/{name}.py", *arguments)
    assert (code, report["difference"]) == (0, None), report


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("played.py", "trains from no DataLoader"),
        ("nowhere.py", "there is no such file"),
        ("--ranks 1 played.py", "at least 2 are needed"),
        ("--reference nowhere.py played.py", "there is no such file"),
        ("idle.py", "without a step of a torch optimizer"),
        ("raising.py", "ValueError: a bug"),
    ],
)
def test_what_cannot_be_compared_is_refused_with_the_reason(words: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "played.py").write_text((SCRIPTS / "played.py").read_text())
    (tmp_path / "idle.py").write_text("")
    (tmp_path / "raising.py").write_text("raise ValueError('a bug')")
    code, report = compare(tmp_path, *words.split())
    assert code == 2
    assert reason in report["refused"], report


def test_a_difference_is_an_annotation(tmp_path: Path) -> None:
    (ended,) = run(begin, [{}], ["--github", f"{SCRIPTS}/port.py", "local"], f"{tmp_path}", timeout=LATE)
    (line,) = lines_of("local")
    assert ended.code == 1
    assert f"::error file={SCRIPTS}/port.py,line={line}::rank 0 prints " in ended.output
