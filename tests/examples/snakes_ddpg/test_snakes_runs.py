"""The folders of the snakes trainer's runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from conftest import on_ranks
from snakes import runs
from torch import nn


@pytest.fixture
def root(tmp_path):
    """Runs 1, 2 and 10; run 2 has models of episodes 900 and 1000 and a best one, run 10 of 5 alone."""
    for name in ("run1_20250101_000000", "run2_20250102_000000", "run10_20240101_000000"):
        (tmp_path / name).mkdir()
    (tmp_path / "run77").write_text("a file")
    (tmp_path / "other").mkdir()
    for run, episodes in ((2, (900, 1000, "best")), (10, (5,))):
        for episode in episodes:
            runs.save_models(runs.find_run(run, tmp_path), episode, {"w": torch.ones(1)}, {"w": torch.zeros(1)})
    return tmp_path


def make_runs(root, count):
    return [runs.new_run(root).name for _ in range(count)]


def test_the_first_run_is_number_1_and_its_name_tells_the_time(tmp_path):
    folder = runs.new_run(tmp_path / "a" / "b")
    assert folder.is_dir() and re.fullmatch(r"run1_20\d{6}_\d{6}", folder.name)


def test_a_new_run_has_the_number_after_the_largest(root):
    assert runs.new_run(root).name.startswith("run11_")
    assert list(runs.list_runs(root)) == [1, 2, 10, 11]


def test_runs_that_start_in_one_moment_get_different_numbers(tmp_path):
    names = [name for made in on_ranks(make_runs, 4, tmp_path, 25) for name in made]
    assert sorted(int(name[3:].split("_")[0]) for name in names) == list(range(1, 101))


@pytest.mark.parametrize("run", [2, "2", "run2", "run2_20250102_000000"])
def test_a_run_is_found_by_number_and_by_name(root, run):
    assert runs.find_run(run, root) == root / "run2_20250102_000000"


def test_the_latest_run_has_the_largest_number(root):
    assert runs.find_run("latest", root) == root / "run10_20240101_000000"
    assert runs.find_run(str(root / "other"), root) == root / "other"


def test_the_latest_run_is_the_latest_that_has_what_is_asked_for(root):
    newest = runs.new_run(root)  # which has saved nothing yet
    assert runs.find_run("latest", root) == runs.find_run(11, root, "trained_model/actor_*.pth") == newest
    assert runs.find_run("latest", root, "trained_model/actor_*.pth") == root / "run10_20240101_000000"
    assert runs.find_model("latest", root=root).parents[1] == root / "run10_20240101_000000"
    with pytest.raises(FileNotFoundError, match=r"there is no .*run\*/checkpoints/latest; the runs in .* are: none"):
        runs.find_run("latest", root, "checkpoints/latest")


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"Not a directory: .*/file/.run1"):
        runs.new_run(tmp_path / "file")


@pytest.mark.parametrize(
    "run, looked_for", [(3, "run3_*"), ("run3", "run3_*"), (77, "run77_*"), ("nowhere", "nowhere")]
)
def test_a_missing_run_is_told_with_those_that_exist(root, run, looked_for):
    with pytest.raises(FileNotFoundError) as caught:
        runs.find_run(run, root)
    assert str(caught.value) == f"there is no {root / looked_for}; the runs in {root} are: 1, 2, 10"


def test_no_run_at_all_is_told(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no .*run\*; the runs in .* are: none"):
        runs.find_run("latest", tmp_path / "missing")


def test_models_are_found_by_episode(root):
    folder = root / "run2_20250102_000000" / "trained_model"
    assert runs.find_model(2, 900, root=root) == folder / "actor_900.pth"
    assert runs.find_model(2, root=root) == folder / "actor_best.pth"
    (folder / "actor_best.pth").unlink()
    assert runs.find_model(2, root=root) == folder / "actor_1000.pth"


def test_a_distilled_model_is_preferred_but_not_to_begin_with(root):
    folder = root / "run2_20250102_000000" / "trained_model"
    (folder / "actor_distilled.pth").touch()
    (folder / "actor_other.pth").touch()
    assert list(runs.list_models(folder.parent)) == [900, 1000, "best", "distilled"]
    assert runs.parse("run2", root) == runs.parse("run2:distilled", root) == folder / "actor_distilled.pth"
    assert runs.parse("run2", root, but="distilled") == folder / "actor_best.pth"


def test_a_missing_model_is_told_with_those_that_exist(root):
    folder = root / "run2_20250102_000000" / "trained_model"
    with pytest.raises(FileNotFoundError) as caught:
        runs.find_model(2, 950, root=root)
    message = f"there is no {folder / 'actor_950.pth'}; the episodes of this run are: 900, 1000, best"
    assert str(caught.value) == message
    with pytest.raises(FileNotFoundError, match=r"actor_\*.pth; the episodes of this run are: none"):
        runs.find_model(1, root=root)
    with pytest.raises(FileNotFoundError, match="the runs in .* are: 1, 2, 10"):
        runs.find_model(3, 950, root=root)


@pytest.mark.parametrize(
    "text, name",
    [
        ("run2:900", "run2_20250102_000000/trained_model/actor_900.pth"),
        ("2:best", "run2_20250102_000000/trained_model/actor_best.pth"),
        ("run2", "run2_20250102_000000/trained_model/actor_best.pth"),
        ("latest", "run10_20240101_000000/trained_model/actor_5.pth"),
        ("latest:5", "run10_20240101_000000/trained_model/actor_5.pth"),
        ("{root}/run2_20250102_000000", "run2_20250102_000000/trained_model/actor_best.pth"),
        ("{root}/run2_20250102_000000/trained_model/actor_900.pth", "run2_20250102_000000/trained_model/actor_900.pth"),
    ],
)
def test_what_a_user_writes_means_an_actor(root, text, name):
    assert runs.parse(text.format(root=root), root) == root / name


@pytest.mark.parametrize(
    "text, message",
    [
        ("run3:900", r"run3_\*; the runs in .* are: 1, 2, 10"),
        ("run2:901", "actor_901.pth; the episodes of this run are: 900, 1000, best"),
        ("run10:best", "actor_best.pth; the episodes of this run are: 5"),
        ("gone/actor_5.pth", "there is no file gone/actor_5.pth"),
        ("greddy", "there is no .*greddy; the runs in"),
    ],
)
def test_what_is_not_there_is_told(root, text, message):
    with pytest.raises(FileNotFoundError, match=message):
        runs.parse(text, root)


def test_saved_models_load_again(tmp_path):
    actor, critic = nn.Linear(2, 3), nn.Linear(3, 1)
    runs.save_models(tmp_path, 100, actor.state_dict(), critic.state_dict())
    runs.save_models(tmp_path, 100, actor.state_dict(), critic.state_dict())
    assert sorted(path.name for path in (tmp_path / runs.MODELS).iterdir()) == ["actor_100.pth", "critic_100.pth"]
    loaded = torch.load(tmp_path / runs.MODELS / "actor_100.pth", weights_only=True)
    assert all(torch.equal(loaded[name], value) for name, value in actor.state_dict().items())


def test_a_save_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    runs.save_models(tmp_path, 1, {"w": 1}, {"w": 2})

    def fill_the_disk(state, path):
        Path(path).write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(torch, "save", fill_the_disk)
    with pytest.raises(OSError, match="No space"):
        runs.save_models(tmp_path, 1, {"w": 3}, {"w": 4})
    monkeypatch.undo()
    assert torch.load(tmp_path / runs.MODELS / "actor_1.pth", weights_only=True) == {"w": 1}
    assert list(runs.list_models(tmp_path)) == [1]
    assert len(list((tmp_path / runs.MODELS).iterdir())) == 2


def test_the_config_is_read_back(tmp_path):
    runs.save_json(tmp_path / "config.json", {"gamma": 0.5, "resume": None, "runs_folder": Path("x")})
    assert runs.read_config(tmp_path) == {"gamma": 0.5, "resume": None, "runs_folder": "x"}
