"""Sets of checkpoint files of one iteration: `<iter>_G.pth`, `<iter>_E.pth` and, last, `<iter>_optimizerG.pth`."""

from __future__ import annotations

import io
import logging
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from shared.program import UserError, user_error
from torch import Tensor, nn

import ddpkit

log = logging.getLogger(__name__)


def save_set(models: Path, step: int, nets: Mapping[str, nn.Module | None], **state: Any) -> None:
    """Writes the files of an iteration, of the networks by letter and of what else a run needs to go on. Collective.

    The networks are bare state dicts on the CPU. The optimizer's file is a `ddpkit.Checkpointer`'s. Each file appears
    when it is complete, that one last: with it the set is complete.
    """
    ddpkit.run_on_main(_write_nets, models, step, nets)
    scratch = models / f".{step}"
    state["nets"] = [letter for letter, net in nets.items() if net is not None]
    path = ddpkit.Checkpointer(scratch, keep=1).save(step, **state)
    ddpkit.run_on_main(_publish, path, models / f"{step}_optimizerG.pth")


def list_sets(models: Path) -> list[int]:
    """The iterations of the complete sets, newest first."""
    names = {path.name for path in models.glob("*_*.pth")} if models.is_dir() else set()
    steps = {int(match[1]) for name in names if (match := re.fullmatch(r"(\d+)_optimizerG\.pth", name))}
    return sorted((step for step in steps if f"{step}_G.pth" in names), reverse=True)


@dataclass(frozen=True)
class Found:
    """A set that was read: the networks' state dicts by letter, and what else was saved."""

    path: Path  # of the optimizer's file
    weights: dict[str, dict[str, Tensor]]
    saved: dict[str, Any]


def find_newest(models: Path) -> Found | None:
    """Reads the newest complete set, and the one before it if that cannot be read. Collective."""
    steps = ddpkit.run_on_main(list_sets, models)
    for step in steps:
        try:
            return _read_set(models, step)
        except ddpkit.CheckpointError as error:
            if ddpkit.is_main_process():
                log.warning("%s Trying the set before it.", error)
    if steps:
        raise UserError(f"none of the {len(steps)} sets in {models} can be read; move them away to start anew")
    return None


def _read_set(models: Path, step: int) -> Found:
    """Read a set; raise a `CheckpointError` on every rank if that cannot be done. Collective."""
    path = models / f"{step}_optimizerG.pth"
    saved = ddpkit.Checkpointer(models).load(path)
    weights, problem = {}, ""
    try:
        weights = {letter: _read(models / f"{step}_{letter}.pth") for letter in saved["nets"]}
    except UserError as error:
        problem = str(error)
    problems = list(filter(None, ddpkit.all_gather_object(problem)))
    if problems:
        raise ddpkit.CheckpointError(problems[0])
    return Found(path, weights, saved)


def restore_set(found: Found, nets: Mapping[str, nn.Module | None], **objects: Any) -> None:
    """Loads a set into networks and objects; an E that the set has not got becomes its G. Collective."""
    another = f"to train another network, name another task, or move {found.path.parent} away"
    for letter, net in nets.items():
        if net is not None:
            letter = letter if letter in found.weights else "G"
            with user_error(another, UserError):
                fit(net, found.weights[letter], found.path.with_name(f"{found.saved['step']}_{letter}.pth"))
    ddpkit.Checkpointer(found.path.parent).load(found.path, **objects)


def load_weights(net: nn.Module, path: str | Path, *, strict: bool = True, average: bool = False) -> None:
    """Load a state dict, bare or as `params` or, which an average prefers, `params_ema` of a released file."""
    weights = _read(Path(path))
    for key in sorted(("params", "params_ema"), reverse=average):
        if isinstance(weights.get(key), dict):
            weights = weights[key]
            break
    fit(net, weights, path, strict)


def fit(net: nn.Module, weights: Mapping[str, Tensor], path: str | Path, strict: bool = True) -> None:
    """Load a state dict; what does not fit is an error or, if not strict, listed in a warning and left out."""
    here, there = net.state_dict(), ddpkit.clean_state_dict(weights)
    try:
        net.load_state_dict(there)
    except RuntimeError as error:  # it lists all that does not fit
        message = f"{path} does not fit the network of the options: {error}"
        fitting = {n: value for n, value in there.items() if n in here and here[n].shape == value.shape}
        if strict or not fitting:
            raise UserError(message) from error
        if ddpkit.is_main_process():
            log.warning("%s\n  the other %d fit and are loaded", message, len(fitting))
        net.load_state_dict(here | fitting)


def _read(path: Path) -> dict[str, Tensor]:
    try:
        weights = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise UserError(f"Cannot read {path}: {str(error).splitlines()[0] if str(error) else error!r}.") from error
    if not isinstance(weights, dict):
        raise UserError(f"{path} holds no state dict.")
    return weights


@user_error("cannot save", OSError)
def _write_nets(models: Path, step: int, nets: Mapping[str, nn.Module | None]) -> None:
    models.mkdir(parents=True, exist_ok=True)
    (models / f"{step}_optimizerG.pth").unlink(missing_ok=True)  # an older set of this iteration is one no longer
    for letter, net in nets.items():
        if net is not None:
            state = {name: value.cpu() for name, value in ddpkit.unwrap_model(net).state_dict().items()}
            torch.save(state, buffer := io.BytesIO())  # torch would hide what the disk says
            temporary = models / f".{step}_{letter}.tmp"
            temporary.write_bytes(buffer.getbuffer())
            os.replace(temporary, models / f"{step}_{letter}.pth")


@user_error("cannot save", OSError)
def _publish(written: Path, path: Path) -> None:
    os.replace(written, path)
    shutil.rmtree(written.parent)
