"""Keep the files of runs, and find them again.

A run is a folder `runN_YYYYMMDD_HHMMSS` with `config.json`, TensorBoard's events,
`trained_model/actor_E.pth` and `critic_E.pth` (E: the episode, or "best"), and `checkpoints/`, from
which it resumes. Writing is for the main process.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1] / "rl_trainer" / "runs" / "snakes_3v3"
MODELS = "trained_model"


def list_runs(root: Path = ROOT) -> dict[int, Path]:
    """List the folders of the runs by number, in order; the newest is the last."""
    found = {}
    for path in sorted(root.glob("run*")):
        match = re.fullmatch(r"run(\d+)(_.*)?", path.name)
        if match and path.is_dir():
            found[int(match[1])] = path
    return dict(sorted(found.items()))


def list_models(folder: Path, what: str = "actor") -> dict[int | str, Path]:
    """List the files of a run's actors, or critics, by episode, in order; "best" is the last."""
    found = {}
    for path in (folder / MODELS).glob("*"):
        if match := re.fullmatch(rf"{what}_(\d+)\.pth", path.name):
            found[int(match[1])] = path
    models: dict[int | str, Path] = dict(sorted(found.items()))
    best = folder / MODELS / f"{what}_best.pth"
    if best.exists():
        models["best"] = best
    return models


def new_run(root: Path = ROOT) -> Path:
    """Make the folder of a new run, with the next number; runs that start in one moment get different ones.

    Raises:
        OSError: If it cannot be made.
    """
    try:
        return _new_run(root)
    except OSError as error:
        text = f"cannot make a run's folder in {root}: {error.strerror}; name another place with --runs_folder"
        raise OSError(text) from error


def _new_run(root: Path) -> Path:
    """Claim the next free number by a folder that only one run can make, then make the run's."""
    root.mkdir(parents=True, exist_ok=True)
    number = max(list_runs(root), default=0)
    while True:
        number += 1
        claim = root / f".run{number}"  # the folders' names hold a time too, so their names alone would not collide
        try:
            claim.mkdir()
        except FileExistsError:  # another run is making the folder of this number
            continue
        try:
            if number not in list_runs(root):
                folder = root / f"run{number}_{time.strftime('%Y%m%d_%H%M%S')}"
                folder.mkdir()
                return folder
        finally:
            claim.rmdir()


def find_run(run: int | str, root: Path = ROOT, holding: str = "") -> Path:
    """Find the folder of a run.

    Args:
        run: Its number, also as "3" or "run3"; "latest"; or a folder, by its path or its name in
            `root`.
        root: Folder of the runs.
        holding: Pattern of a file that the latest one must hold: a run may have ended before it had
            saved anything.

    Raises:
        FileNotFoundError: If there is none; the message names what was looked for and the runs that
            exist.
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


def find_model(run: int | str, episode: int | str | None = None, what: str = "actor", root: Path = ROOT) -> Path:
    """Find the file of a model of a run.

    Args:
        run: See `find_run()`.
        episode: After which it was saved, or "best"; None: the best by evaluation if there is one,
            else the last.
        what: "actor" or "critic".
        root: Folder of the runs.

    Raises:
        FileNotFoundError: If there is no such run or episode; the message lists those that exist.
    """
    folder = find_run(run, root, f"{MODELS}/{what}_*.pth")
    found = list_models(folder, what)
    if episode is None and found:
        return list(found.values())[-1]
    if episode not in found:
        looked_for = folder / MODELS / f"{what}_{'*' if episode is None else episode}.pth"
        raise FileNotFoundError(f"there is no {looked_for}; the episodes of this run are: {_listed(found)}")
    return found[episode]


def find_models(run: int | str, episode: int | None, root: Path = ROOT) -> list[Path]:
    """Find the actor and the critic of a run, those saved last up to an episode.

    Args:
        run: See `find_run()`.
        episode: None: the best by evaluation if there are, else the last.
        root: Folder of the runs.

    Raises:
        FileNotFoundError: If there is no such run or nothing so early; the message lists what
            exists.
    """
    if episode is not None:
        folder = find_run(run, root, f"{MODELS}/actor_*.pth")
        saved = [number for number in list_models(folder) if number != "best" and number <= episode]
        episode = max(saved, default=episode)
    return [find_model(run, episode, what, root) for what in ("actor", "critic")]


def parse(text: str, root: Path = ROOT) -> Path:
    """Find the file of the actor that a user means: "run3:2000", "run3:best", "run3", "3", "latest", a folder, a file.

    Raises:
        FileNotFoundError: If there is none; the message lists the runs or episodes that exist.
    """
    if Path(text).is_file():
        return Path(text)
    if text.endswith(".pth"):
        raise FileNotFoundError(f"there is no file {text}; a run's model is also found as runN:EPISODE, runN or latest")
    run, episode = re.fullmatch(r"(.*?)(?::(\d+|best))?", text).groups()
    return find_model(run, int(episode) if episode and episode != "best" else episode, root=root)


def save_models(folder: Path, episode: int | str, actor: Mapping[str, Any], critic: Mapping[str, Any]) -> None:
    """Write state dicts into a run's folder under the episode's number, or a name; a file is whole or absent."""
    (folder / MODELS).mkdir(parents=True, exist_ok=True)
    for what, state in (("critic", critic), ("actor", actor)):
        with _replacing(folder / MODELS / f"{what}_{episode}.pth") as path:
            torch.save(state, path)


def save_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write the settings or the summary of a run, whole or not at all; paths become text."""
    with _replacing(path) as whole:
        whole.write_text(json.dumps(values, indent=2, default=str) + "\n")


def save_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    """Write the summary of a run's last part; those of the parts before, oldest first, are kept as `earlier`."""
    path = folder / "summary.json"
    earlier = []
    if path.is_file():
        last = json.loads(path.read_text())
        earlier = [*last.pop("earlier", []), last]
    save_json(path, {**summary, "earlier": earlier})


def read_config(folder: Path) -> dict[str, Any]:
    """Read the settings of a run.

    Raises:
        FileNotFoundError: If the folder holds none.
    """
    return json.loads((folder / "config.json").read_text())


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Lend a name to write a file under, which replaces the old file when it is complete."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _listed(found: Mapping[Any, Path]) -> str:
    return ", ".join(map(str, found)) or "none"
