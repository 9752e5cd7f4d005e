"""A run's folder, and the policies in it.

    <output_dir>/<name>/<time>/config.json      all settings
                              /checkpoints/     the last two, to resume from
                              /last.pth         a copy of the newest of them
                              /models/model_epoch_N.pth, and the best: model_epoch_N_success_X.pth, ..._validation_X.pth
                              /logs/            log.txt, TensorBoard's events, success_epoch_N.json
                              /videos/

Every .pth is a whole checkpoint of `ddpkit.Checkpointer`, which plain `torch.load` reads too.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

from shared.program import UserError, log_to, user_error
from shared.settings import flatten, nested, read_json

import ddpkit

from .config import SETTINGS, Config, read_config
from .policy import DiffusionPolicy
from .samples import Statistics

OF_THE_NETWORK = "algo.", "observation.", "train.data_path", "train.action_keys"
BEST = {"validation": ("on_best_validation", 6, 1), "success": ("on_best_rollout_success_rate", 4, -1)}


@user_error("train.output_dir", OSError)
def new_run(config: Config) -> Path:
    """Make the folder of a new run, named by the time; never ask the user, who may be away."""
    parent, name = Path(config["train.output_dir"], config["experiment.name"]), time.strftime("%Y%m%d%H%M%S")
    folder, again = parent / name, 0
    while folder.exists():  # two runs in one second
        folder, again = parent / f"{name}_{again + 1}", again + 1
    folder.mkdir(parents=True)
    for part in ("models", "logs", "videos"):
        (folder / part).mkdir()
    return folder


def open_run(config: Config, parts: dict[str, Any]) -> tuple[Path, ddpkit.Checkpointer, dict[str, Any]]:
    """Begin or resume a run; return its folder, its checkpoints, and what was saved beside the parts. Collective."""
    resumes = config["train.resume"] is not None
    folder = ddpkit.run_on_main(find_run if resumes else new_run, config)
    saver, saved = ddpkit.Checkpointer(folder / "checkpoints", keep=2), {"step": 0, "epoch": 0, "steps_of_next": 0}
    if resumes:
        decays = [group["weight_decay"] for group in parts["optimizer"].param_groups]
        saved = restore(saver, folder, config, parts)
        for group, decay in zip(parts["optimizer"].param_groups, decays, strict=True):
            group["weight_decay"] = decay  # of the settings, not of the checkpoint
    record(folder, config)
    return folder, saver, saved


def find_run(config: Config) -> Path:
    """Return the folder of the run to resume."""
    folder = Path(config["train.resume"])
    if not any((folder / "checkpoints").glob("step-*.pt")):
        raise ddpkit.CheckpointError(
            f"there is no checkpoint in {folder} to resume from; train.resume= takes the folder of a run, such as "
            f"{Path(config['train.output_dir'], config['experiment.name'], 'YYYYMMDDhhmmss')}"
        )
    return folder


def restore(saver: ddpkit.Checkpointer, folder: Path, config: Config, parts: dict[str, Any]) -> dict[str, Any]:
    """Load the newest checkpoint of a run into its parts; name settings that do not fit it. Collective."""
    try:
        return saver.load_latest(**parts)
    except ddpkit.CheckpointError as error:
        former = read_config([]) | dict(flatten(read_json(folder / "config.json"), SETTINGS))
        changed = [key for key in SETTINGS if key.startswith(OF_THE_NETWORK) and config[key] != former[key]]
        if not changed or "does not fit" not in str(error):
            raise
        raise UserError(
            f"train.resume keeps the network of its run: remove {', '.join(changed)}, or start a new run without "
            f"train.resume. {error}"
        ) from error


def record(folder: Path, config: Config) -> None:
    """Save the settings in a run's folder, and from now on rank 0's log."""
    if not ddpkit.is_main_process():
        return
    kept = nested(config | {"train.resume": None})  # to start a new run from these settings
    (folder / "config.json").write_text(json.dumps(kept, indent=4) + "\n")
    if config["experiment.logging.terminal_output_to_txt"]:
        log_to(folder / "logs" / "log.txt")


def publish(checkpoint: Path, folder: Path, config: Config, epoch: int, news: dict[str, float]) -> None:
    """Copy a checkpoint to `last.pth` and, by epoch and validation loss, to `models/`; each file appears complete."""
    copy(checkpoint, folder / "last.pth")
    if due(epoch, config["experiment.save.every_n_epochs"], config["train.num_epochs"]):
        copy(checkpoint, folder / "models" / f"model_epoch_{epoch}.pth")
    if "validation/loss" in news:
        keep_best(checkpoint, folder, config, epoch, "validation", news["validation/loss"])


def keep_best(checkpoint: Path, folder: Path, config: Config, epoch: int, kind: str, value: float) -> None:
    """Keep the best checkpoints by "validation" or "success", if the settings ask for it."""
    setting, digits, sign = BEST[kind]
    if not config[f"experiment.save.{setting}"]:
        return
    models, found = folder / "models", {}
    copy(checkpoint, models / f"model_epoch_{epoch}_{kind}_{value:.{digits}f}.pth")
    for path in models.glob(f"model_epoch_*_{kind}_*.pth"):
        _, _, saved_at, _, written = path.stem.split("_")
        found[path] = sign * float(written), int(saved_at)
    for path in sorted(found, key=found.__getitem__)[config["experiment.save.top_k"] :]:
        path.unlink()


def score_path(folder: Path, epoch: int) -> Path:
    return folder / "logs" / f"success_epoch_{epoch}.json"


def due(epoch: int, every: int, last: int) -> bool:
    return epoch % every == 0 or epoch == last


def copy(checkpoint: Path, name: Path) -> None:
    temporary = name.with_name(f"{name.name}.tmp")
    shutil.copyfile(checkpoint, temporary)
    os.replace(temporary, name)


def load_policies(path: Path) -> tuple[dict[str, DiffusionPolicy], dict[str, Any]]:
    """Load the policies in a checkpoint, "ema" (if there is one) and "raw", and its other content. Collective."""
    saved = ddpkit.Checkpointer(path.parent).load(path)
    try:
        config = read_config([]) | dict(flatten(saved["config"], SETTINGS))
        states, prefix = {"raw": saved["policy"]}, "policy."
        if "ema" in saved:
            average = {k.removeprefix(prefix): v for k, v in saved["ema"].items() if k.startswith(prefix)}
            states = {"ema": average} | states
        policies = {}
        for name, state in states.items():
            statistics = Statistics(**{field.name: state[field.name].numpy() for field in fields(Statistics)})
            policies[name] = DiffusionPolicy(config, statistics, saved["entries"]["cameras"])
            policies[name].load_state_dict(state)
            policies[name].eval().to(ddpkit.get_device())
    except (KeyError, RuntimeError) as error:
        raise ddpkit.CheckpointError(f"{path} holds no policy of this program: {error}") from error
    return policies, saved
