"""Checkpoints, each a set of files: `<iter>_G.pth`, `<iter>_E.pth` and, last, `<iter>_optimizerG.pth`."""

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
    """Write the files of an iteration: the networks by letter, and the state that a run needs to resume. Collective.

    The networks are bare state dicts on the CPU; `ddpkit.Checkpointer` writes the optimizer's file. Each file appears
    when it is complete, the optimizer's last.
    """
    ddpkit.run_on_main(_write_nets, models, step, nets)
    scratch = models / f".{step}"
    state["nets"] = [letter for letter, net in nets.items() if net is not None]
    path = ddpkit.Checkpointer(scratch, keep=1).save(step, **state)
    ddpkit.run_on_main(_publish, path, models / f"{step}_optimizerG.pth")


def list_sets(models: Path) -> list[int]:
    """List the iterations of the complete sets, newest first."""
    names = {path.name for path in models.glob("*_*.pth")} if models.is_dir() else set()
    steps = {int(match[1]) for name in names if (match := re.fullmatch(r"(\d+)_optimizerG\.pth", name))}
    return sorted((step for step in steps if f"{step}_G.pth" in names), reverse=True)


@dataclass(frozen=True)
class Found:
    """A set that was read: the networks' state dicts by letter, and the other saved state."""

    path: Path  # of the optimizer's file
    weights: dict[str, dict[str, Tensor]]
    saved: dict[str, Any]


def find_newest(models: Path) -> Found | None:
    """Read the newest complete set; if that fails, try the one before it. Collective."""
    steps = ddpkit.run_on_main(list_sets, models)
    for step in steps:
        try:
            return _read_set(models, step)
        except ddpkit.CheckpointError as error:
            if ddpkit.is_main_process():
                log.warning("%s Trying the set before it.", error)
    if steps:
        raise UserError(f"none of the {len(steps)} sets in {models} can be read; move them away to start over")
    return None


def _read_set(models: Path, step: int) -> Found:
    """Read a set; raise a `CheckpointError` on every rank if that fails. Collective."""
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
    """Load a set into networks and objects; without an E in the set, E is loaded from G. Collective."""
    another = f"to train another network, name another task, or move {found.path.parent} away"
    for letter, net in nets.items():
        if net is not None:
            letter = letter if letter in found.weights else "G"
            with user_error(another, UserError):
                fit(net, found.weights[letter], found.path.with_name(f"{found.saved['step']}_{letter}.pth"))
    ddpkit.Checkpointer(found.path.parent).load(found.path, **objects)


def load_weights(net: nn.Module, path: str | Path, *, strict: bool = True, average: bool = False) -> None:
    """Load a state dict, bare or under `params` or `params_ema` of a released file; an average prefers the latter."""
    weights = _read(Path(path))
    for key in sorted(("params", "params_ema"), reverse=average):
        if isinstance(weights.get(key), dict):
            weights = weights[key]
            break
    fit(net, weights, path, strict)


def fit(net: nn.Module, weights: Mapping[str, Tensor], path: str | Path, strict: bool = True) -> None:
    """Load a state dict; tensors that do not fit are an error or, if not strict, skipped with a warning."""
    here, there = net.state_dict(), ddpkit.clean_state_dict(weights)
    try:
        net.load_state_dict(there)
    except RuntimeError as error:  # it lists every misfit
        message = f"{path} does not fit the network of the options: {error}"
        fitting = {n: value for n, value in there.items() if n in here and here[n].shape == value.shape}
        if strict or not fitting:
            raise UserError(message) from error
        if ddpkit.is_main_process():
            log.warning("%s\n  the other %d fit and were loaded", message, len(fitting))
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
    (models / f"{step}_optimizerG.pth").unlink(missing_ok=True)  # an older set of this iteration is now incomplete
    for letter, net in nets.items():
        if net is not None:
            state = {name: value.cpu() for name, value in ddpkit.unwrap_model(net).state_dict().items()}
            torch.save(state, buffer := io.BytesIO())  # torch would hide the disk's error
            temporary = models / f".{step}_{letter}.tmp"
            temporary.write_bytes(buffer.getbuffer())
            os.replace(temporary, models / f"{step}_{letter}.pth")


@user_error("cannot save", OSError)
def _publish(written: Path, path: Path) -> None:
    os.replace(written, path)
    shutil.rmtree(written.parent)
