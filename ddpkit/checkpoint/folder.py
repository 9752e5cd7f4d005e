"""The checkpoints in a folder: their names and order, the list `latest` of them, and pruning.

The text file `latest` lists what a `Checkpointer` wrote here, the last written first, with scores.
Nothing else is ever deleted.
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from ..errors import CheckpointError
from .files import NoFileError, open_file, unreadable, write_durably
from .pieces import delete_unused

Scores = dict[str, float | None]  # by a checkpoint's name, the last written first

_log = logging.getLogger(__name__)
_LIST = "latest"
_NAME = re.compile(r"step-(\d{9,})\.pt")
_LEFT_OVER = re.compile(rf"({_NAME.pattern}|{_LIST})\.tmp")  # by a writer that was killed


def name_of(step: int) -> str:
    """Name the checkpoint of a step."""
    return f"step-{step:09d}.pt"


def step_of(name: str) -> int:
    """Return the step from a checkpoint's name."""
    return int(name[len("step-") : -len(".pt")])


def find_checkpoints(folder: Path) -> list[str]:
    """Name the checkpoints, the last written first; then those not listed, the greatest step first.

    A name may be gone when it is used, if a job beside this one saves and deletes.
    """
    while True:
        listed = list(_read_list(folder))
        present = _find_files(folder)
        if list(_read_list(folder)) == listed:  # else a writer has changed it meanwhile
            break
    others = present.difference(listed)
    return listed + sorted(others, key=step_of, reverse=True)


def find_best(folder: Path) -> list[str]:
    """Name the listed checkpoints that have a score, the greatest first, NaN last."""
    return _rank_by_score(_read_list(folder))


def _read_list(folder: Path) -> Scores:
    """Read `latest`, without what is no file here; {} if it cannot be read.

    Raises:
        CheckpointError: If it is a pipe or the like.
    """
    path = folder / _LIST
    try:
        with open_file(path) as file:
            lines = file.read().decode(errors="replace").splitlines()
    except NoFileError as error:
        raise unreadable(path, error) from error
    except OSError:
        return {}
    listed: Scores = {}
    for line in lines:
        name, _, score = line.partition(" ")
        if _is_checkpoint(folder, name):
            listed.setdefault(name, _parse_score(score))
    return listed


def list_and_prune(path: Path, score: float | None, keep: int, keep_best: int, pieces: str = "") -> None:
    """List a new checkpoint in `latest`, and delete the listed ones that are not kept any more.

    Args:
        path: The checkpoint, complete.
        score: How good it is, if known.
        keep: Number of checkpoints to keep, the last written ones.
        keep_best: Number of checkpoints to keep besides, those with the greatest score.
        pieces: The name of the folder of its pieces, if it has one.

    Raises:
        CheckpointError: If `latest` cannot be written; nothing is deleted then.
    """
    folder = path.parent
    former = _read_list(folder)
    former.pop(path.name, None)
    listed: Scores = {path.name: score, **former}
    last = list(listed)[:keep]
    best = _rank_by_score(listed)[:keep_best]
    kept = {name: listed[name] for name in listed if name in last or name in best}
    try:
        _write_list(folder, kept)
    except OSError as error:
        raise CheckpointError(
            f"Saved {path}, which is complete, but cannot list it in {folder / _LIST}: {error}. "
            "So load_latest() and load_best() may take another checkpoint; load(path) takes this "
            "one. No older one was deleted."
        ) from error
    for name in listed.keys() - kept.keys():
        try:
            (folder / name).unlink(missing_ok=True)
        except OSError as error:
            _log.warning("Saved %s, but an old checkpoint stays: %s.", path, error)
    delete_unused(folder, of=path.stem, used=pieces)


def delete_left_overs(folder: Path) -> None:
    """Delete the files that a writer which was killed has left."""
    for name in os.listdir(folder):
        if _LEFT_OVER.fullmatch(name):
            with suppress(OSError):
                os.unlink(folder / name)
    delete_unused(folder)


def _find_files(folder: Path) -> set[str]:
    """Find the names of all checkpoints in the folder, listed or not."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return set()
    return {name for name in names if _is_checkpoint(folder, name)}


def _is_checkpoint(folder: Path, name: str) -> bool:
    return _NAME.fullmatch(name) is not None and (folder / name).is_file()


def _parse_score(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _write_list(folder: Path, scores: Mapping[str, float | None]) -> None:
    lines = []
    for name, score in scores.items():
        if score is None:
            lines.append(f"{name}\n")
        else:
            lines.append(f"{name} {score!r}\n")

    def write(file: BinaryIO) -> None:
        file.write("".join(lines).encode())

    write_durably(folder / _LIST, write)


def _rank_by_score(scores: Mapping[str, float | None]) -> list[str]:
    """Name those that have a score, the greatest first, equal ones in their order, NaN last."""
    comparable = {}
    for name, score in scores.items():
        if score is None:
            continue
        if math.isnan(score):
            score = -math.inf
        comparable[name] = score
    return sorted(comparable, key=comparable.__getitem__, reverse=True)
