"""Keep the files of runs, and find them again.

A run is a folder `runN_YYYYMMDD_HHMMSS` with `config.json`, TensorBoard's events,
`trained_model/actor_E.pth` and `critic_E.pth` (E: the episode, "best" or "distilled"), and `checkpoints/`, from
which it resumes. Writing is for the main process.
"""

import itertools
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1] / "rl_trainer" / "runs" / "snakes_3v3"
MODELS = "trained_model"
ACTORS = f"{MODELS}/actor_*.pth"
NAMED = ("best", "distilled")  # models that are not named by an episode, the last one being preferred


def list_runs(root: Path = ROOT) -> dict[int, Path]:
    """List the folders of the runs by number, in order; the newest is the last."""
    folders = [path for path in sorted(root.glob("run*")) if path.is_dir()]
    found = [(re.fullmatch(r"run(\d+)(_.*)?", path.name), path) for path in folders]
    return dict(sorted((int(match[1]), path) for match, path in found if match))


def list_models(folder: Path) -> dict[int | str, Path]:
    """List the files of a run's actors by episode, in order; then come "best", and "distilled"."""
    found = {path.stem.removeprefix("actor_"): path for path in folder.glob(ACTORS)}
    episodes = {int(name): path for name, path in found.items() if name.isdecimal()}
    return dict(sorted(episodes.items())) | {name: found[name] for name in NAMED if name in found}


def critic_of(actor: Path) -> Path:
    """Name the file of the critic that was saved with an actor."""
    return actor.with_name(actor.name.replace("actor", "critic"))


def new_run(root: Path = ROOT) -> Path:
    """Make the folder of a new run, with the next number; runs that start in one moment get different ones."""
    for number in itertools.count(max(list_runs(root), default=0) + 1):
        with suppress(FileExistsError):  # another run has claimed this number
            (root / f".run{number}").mkdir(parents=True)
            break
    folder = root / f"run{number}_{time.strftime('%Y%m%d_%H%M%S')}"
    folder.mkdir()
    return folder


def find_run(run: int | str, root: Path = ROOT, holding: str = "") -> Path:
    """Find the folder of a run, by its number, as "3" or "run3", as "latest", by its path, or by its name in `root`.

    The latest one must hold a file of a pattern: a run may have ended before it saved anything.
    Raise a FileNotFoundError, which names the runs that exist, if there is none.
    """
    found = list_runs(root)
    if match := re.fullmatch(r"(?:run)?(\d+)", str(run)):
        looked_for = root / f"run{match[1]}_*"
        folder = found.get(int(match[1]))
    elif run == "latest":
        found = {number: path for number, path in found.items() if not holding or any(path.glob(holding))}
        looked_for = root / "run*" / holding
        folder = found.get(max(found, default=0))
    else:
        folder = Path(run) if Path(run).is_dir() else root / run
        looked_for = folder
    if folder is None or not folder.is_dir():
        raise FileNotFoundError(f"there is no {looked_for}; the runs in {root} are: {_listed(found)}")
    return folder


def find_model(run: int | str, name: int | str | None = None, root: Path = ROOT, but: str = "") -> Path:
    """Find the file of a run's actor, by its name; else the last of `list_models()`, but for one name."""
    folder = find_run(run, root, ACTORS)
    found = list_models(folder)
    path = folder / MODELS / f"actor_{name}.pth"
    if name is None:
        path = next((found[name] for name in reversed(found) if name != but), folder / ACTORS)
    if not path.is_file():
        raise FileNotFoundError(f"there is no {path}; the episodes of this run are: {_listed(found)}")
    return path


def parse(text: str, root: Path = ROOT, but: str = "") -> Path:
    """Find the actor that a user means by "run3:2000", "run3:best", "run3", "latest", a folder, a file.

    A run alone means its distilled model, or its best one, or the last, but for one name.
    """
    if Path(text).is_file():
        return Path(text)
    if text.endswith(".pth"):
        raise FileNotFoundError(f"there is no file {text}; a run's model is also found as runN:EPISODE, runN or latest")
    run, name = re.fullmatch(rf"(.*?)(?::(\d+|{'|'.join(NAMED)}))?", text).groups()
    return find_model(run, name, root, but)


def save_models(folder: Path, episode: int | str, *states: Mapping[str, Any]) -> None:
    """Write state dicts of an actor and its critic under the episode's number, or a name."""
    (folder / MODELS).mkdir(parents=True, exist_ok=True)
    path = folder / MODELS / f"actor_{episode}.pth"
    named = list(zip((path, critic_of(path)), states, strict=True))
    for name, state in reversed(named):  # the actor, by which they are found, last
        with replacing(name) as whole:
            torch.save(state, whole)


def save_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write the settings or the summary of a run, whole or not at all; paths become text."""
    with replacing(path) as whole:
        whole.write_text(json.dumps(values, indent=2, default=str) + "\n")


def read_config(folder: Path) -> dict[str, Any]:
    """Read the settings of a run."""
    return json.loads((folder / "config.json").read_text())


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Lend a name to write a file under, which replaces the old file when it is complete; after an error it is gone."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _listed(found: Mapping[Any, Path]) -> str:
    return ", ".join(map(str, found)) or "none"
