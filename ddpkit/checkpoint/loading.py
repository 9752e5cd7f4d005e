"""Loading of a checkpoint: every rank reads it, and nothing is changed unless it fits on all of them."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from torch.optim import Optimizer

from ..collectives.differences import list_lines
from ..data.seeds import set_rng_states
from ..errors import CheckpointError
from ..job.lifecycle import exchange
from ..join.failures import message_of
from ..launch.ranks import get_rank, get_world_size, is_main_process
from ..parallel.lr_scaling import applied_scales
from ..torch_internals import is_dtensor
from .comparison import merge_problems, try_on_all, try_on_main
from .files import open_file, read, unreadable
from .fit import Saved, explain_misfits
from .format import explain_unusable, load_into
from .leaves import tensors_of
from .sharded import SavedPieces, files_of, find_stand_ins, from_plain, is_folder_of, verify_pieces

_log = logging.getLogger(__name__)
_TRIES = 20  # at a file that some ranks see and others do not
_PAUSE = 0.05  # seconds between them
_UNDEFINED = (
    "The objects are in an undefined state on every rank, some of them loaded: load a checkpoint "
    "that fits them, or create them again, before going on."
)


class FileChanged(CheckpointError):
    """A file has gone, or is another one, since its name was read."""


def load_first(
    folder: Path,
    candidates: Callable[[Path], list[str]],
    objects: Mapping[str, Any],
) -> dict[str, Any] | None:
    """Load the first checkpoint that can be read. Collective.

    Args:
        folder: The folder of the checkpoints.
        candidates: Names those in a folder that may be taken, the first to try in front.
        objects: The objects to restore, by name.

    Returns:
        The rest of its content; None if there is no candidate.

    Raises:
        CheckpointError: On every rank, if there are candidates and none can be read, or the one
            that can does not fit.
    """
    reasons: dict[str, str] = {}  # why those that were tried cannot be read
    tries: Counter[str] = Counter()

    def choose() -> str | None:
        for name in candidates(folder):
            if name not in reasons:
                return name
        return None

    while True:
        name = try_on_main(choose)
        if name is None:
            break
        tries[name] += 1
        try:
            content = _read_on_all(folder / name, objects)
        except CheckpointError as error:  # the same on every rank
            if isinstance(error, FileChanged) and tries[name] < _TRIES:
                time.sleep(_PAUSE)  # a job beside this one saves and deletes
                continue
            if is_main_process():
                _log.warning("%s Trying the checkpoint before it.", error)
            reasons[name] = f"\n  {error}"
            continue
        return _restore(folder / name, content, objects)
    if reasons:
        texts = "".join(reasons.values())
        raise CheckpointError(f"No checkpoint in {folder} can be read:{texts}")
    return None


def load_file(path: Path, objects: Mapping[str, Any]) -> dict[str, Any]:
    """Load one checkpoint, and return what is not restored into an object. Collective.

    Raises:
        CheckpointError: On every rank, if one cannot read it, or it does not fit.
    """
    content = _read_on_all(path, objects)
    return _restore(path, content, objects)


def _read_on_all(path: Path, objects: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a file that every rank reads. Collective.

    Args:
        path: The file.
        objects: The objects to restore, by name.

    Raises:
        CheckpointError: On every rank, if one cannot read it, or it is no checkpoint that could be
            restored.
    """
    problem = ""
    with ExitStack() as stack:
        try:
            # held open, for it may be deleted before all have read it
            file = stack.enter_context(open_file(path))
        except (OSError, ValueError) as error:  # the second for a name with a null character
            problem = message_of(unreadable(path, error))
        problems = exchange(problem)
        if any(problems):
            raise FileChanged(merge_problems(problems))
        content, digest = try_on_all(
            lambda: _read(path, file, bool(objects), is_mapped=_any_sharded(objects)),
            doing=f"Cannot read {path}: ",
        )
    files = len(set(exchange(digest)))
    if files > 1:
        raise FileChanged(
            f"The ranks see {files} different files at {path}. They must share the folder.",
        )
    if "sharded" in content:
        _verify_pieces_on_all(path, content)
    return content


def _verify_pieces_on_all(path: Path, content: Mapping[str, Any]) -> None:
    """Compare the files of a checkpoint's pieces with their checksums, some on each rank. Collective.

    Raises:
        CheckpointError: On every rank, if one is not there or damaged.
    """
    layouts = from_plain(content["sharded"]["tensors"])
    files = files_of(layouts)
    own = files[get_rank() :: get_world_size()]
    folder = path.with_name(content["sharded"]["folder"])
    try_on_all(lambda: verify_pieces(folder, own))


def _read(
    path: Path,
    file: BinaryIO,
    with_random_states: bool,
    is_mapped: bool,
) -> tuple[dict[str, Any], str]:
    content, digest = read(file, is_mapped)
    problem = explain_unusable(content, with_random_states)
    if not problem and "sharded" in content and not is_folder_of(path, content["sharded"]["folder"]):
        problem = "the folder of its pieces is not one that a Checkpointer makes, or the file was renamed"
    if problem:
        raise CheckpointError(f"Cannot read {path}: {problem}.")
    return content, digest


def _restore(path: Path, content: dict[str, Any], objects: Mapping[str, Any]) -> dict[str, Any]:
    """Load a checkpoint's content into objects, if it fits them on all ranks. Collective.

    Returns:
        The rest of its content.
    """
    states = try_on_all(
        lambda: _fitting_states(path, content, objects),
        doing=f"{path} does not fit; nothing was loaded: ",
    )
    pieces = _pieces_of(path, content)
    try:
        try_on_all(lambda: _load_into_all(objects, states, pieces, content["rng"]))
    except CheckpointError as error:
        raise CheckpointError(f"Cannot load {path}: {error}\n{_UNDEFINED}") from error
    rest = {name: state for name, state in states.items() if name not in objects}
    if not objects:
        rest = try_on_all(lambda: {name: pieces.fill(name, state) for name, state in rest.items()})
    result = {"step": content["step"]}
    if content.get("score") is not None:
        result["score"] = content["score"]
    return result | rest


def _pieces_of(path: Path, content: Mapping[str, Any]) -> SavedPieces:
    """Return the sharded tensors of a checkpoint, none if it has no such ones."""
    entry = content.get("sharded")
    if entry is None:
        return SavedPieces(path.parent, {}, {})
    stand_ins: dict[str, Any] = {}
    for name, state in content["state"].items():
        stand_ins.update(find_stand_ins(name, state))
    return SavedPieces(path.with_name(entry["folder"]), from_plain(entry["tensors"]), stand_ins)


def _any_sharded(objects: Mapping[str, Any]) -> bool:
    """Return whether this rank holds only parts of some tensors of these objects."""
    tensors = chain.from_iterable(tensors_of(name, value) for name, value in objects.items())
    return any(is_dtensor(tensor) for _, tensor in tensors)


def _fitting_states(
    path: Path,
    content: Mapping[str, Any],
    objects: Mapping[str, Any],
) -> dict[str, Any]:
    """Return this rank's states by name; raise if those asked for are not there or do not fit."""
    saved = _states_of_this_rank(path, content)
    problems = explain_misfits(objects, saved)
    if problems:
        headline = f"{path} does not fit; nothing was loaded:"
        raise CheckpointError(list_lines(headline, problems))
    return saved.states


def _states_of_this_rank(path: Path, content: Mapping[str, Any]) -> Saved:
    saved = Saved(
        states=dict(content["state"]),
        kinds=dict(content["kinds"]),
        shapes=dict(content["shapes"]),
    )
    parts = content.get("per_rank")
    if not parts:
        return saved
    if len(parts) != get_world_size():
        names = ", ".join(parts[0]["per_rank"])
        raise CheckpointError(
            f"{path} holds {names} of each of {len(parts)} ranks, and this job has "
            f"{get_world_size()}. Run on {len(parts)} ranks, or read it with "
            'torch.load(path)["per_rank"].'
        )
    own = parts[get_rank()]
    saved.states.update(own["per_rank"])
    saved.kinds.update(own["kinds"])
    saved.shapes.update(own["shapes"])
    return saved


def _load_into_all(
    objects: Mapping[str, Any],
    states: Mapping[str, Any],
    pieces: SavedPieces,
    rng_states: list[dict[str, Any]],
) -> None:
    """Load states into objects, and set the generators if there are objects."""
    if not objects:
        return
    for name, target in objects.items():
        if isinstance(target, Optimizer):
            _load_optimizer(name, target, states[name], pieces)
        else:
            load_into(name, target, states[name], pieces)
    set_rng_states(rng_states)


def _load_optimizer(name: str, optimizer: Optimizer, state: Any, pieces: SavedPieces) -> None:
    """Load an optimizer's state; warn where its learning rates are those of another global batch."""
    here = applied_scales(optimizer)
    load_into(name, optimizer, state, pieces)
    if not is_main_process():
        return
    for old, new in zip(applied_scales(optimizer), here, strict=True):
        if old is None or new is None or old == new:
            continue
        _log.warning(
            "The learning rates of %s were scaled by %g when it was saved, and by %g here: the saved ones are back. If "
            "the global batch is another one now, multiply each group's lr, and base_lrs of its scheduler, by %g.",
            name,
            old,
            new,
            new / old,
        )
        return
