"""Settings in robomimic's sections: defaults, then a file, then the command line; each checked, each known by name.

Inside the program a setting is `config["train.batch_size"]`; in files it stands in nested sections.
"""

from __future__ import annotations

import difflib
import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

log = logging.getLogger("robot")

Config = dict[str, Any]
Check = Callable[[Any], Any]  # returns the value in its type; raises ValueError saying what was expected


class ConfigError(ValueError):
    """A setting that does not exist, or cannot be what it is."""


def whole(least: int) -> Check:
    def check(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"a whole number of at least {least}")
        return value

    return check


def real(least: float, most: float = math.inf, *, above: bool = False) -> Check:
    def check(value: Any) -> float:
        fits = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not fits or not least <= value <= most or (above and value == least):
            limit = f"above {least}" if above else f"of at least {least}"
            raise ValueError(f"a number {limit}" + (f" and at most {most}" if most < math.inf else ""))
        return float(value)

    return check


def switch(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("text")
    return value


def one_of(*names: str) -> Check:
    def check(value: Any) -> str:
        if value not in names:
            raise ValueError(" or ".join(map(repr, names)) if len(names) > 1 else f"{names[0]!r}, the only choice")
        return value

    return check


def many(check: Check, *, some: bool = True) -> Check:
    def checked(values: Any) -> list[Any]:
        try:
            if isinstance(values, list) and (values or not some):
                return [check(value) for value in values]
        except ValueError as error:
            raise ValueError(f"a list, each of it {error}") from None
        raise ValueError("a list" + ", not empty" * some)

    return checked


def optional(check: Check) -> Check:
    return lambda value: None if value is None else check(value)


def one_or_many(value: Any) -> list[str]:
    return many(text)([value] if isinstance(value, str) else value)


SETTINGS: dict[str, tuple[Any, Check]] = {  # default, check
    "algo_name": ("diffusion_policy", one_of("diffusion_policy")),
    "experiment.name": ("fetch_pick_and_place", text),
    "experiment.epoch_every_n_steps": (250, whole(1)),  # optimiser steps in an epoch
    "experiment.check_replicas_every_n_steps": (500, whole(1)),
    "experiment.save.enabled": (True, switch),
    "experiment.save.every_n_epochs": (5, whole(1)),  # models/model_epoch_N.pth; last.pth comes every epoch
    "experiment.rollout.enabled": (True, switch),
    "experiment.rollout.n": (100, whole(1)),  # episodes, over all ranks
    "experiment.rollout.horizon": (50, whole(1)),  # environment steps in an episode
    "experiment.rollout.rate": (10, whole(1)),  # epochs from one evaluation to the next
    "experiment.render_video": (True, switch),  # one episode of each evaluation
    "experiment.logging.terminal_output_to_txt": (True, switch),
    "experiment.logging.log_tb": (True, switch),
    "train.data_path": (["data/fetch_pick_and_place"], one_or_many),  # folders of episodes
    "train.sample_weights": (None, optional(many(real(0)))),  # share of the samples by folder; null: by their steps
    "train.on_broken_shard": ("error", one_of("error", "skip")),
    "train.output_dir": ("runs", text),
    "train.resume": (None, optional(text)),  # folder of a run to go on with
    "train.seed": (0, whole(0)),
    "train.num_epochs": (20, whole(1)),
    "train.batch_size": (128, whole(1)),  # samples per optimiser step
    "train.keep_batch_size": ("per_rank", one_of("per_rank", "global")),  # whose batch has that size
    "train.lr_scaling": ("none", one_of("none", "linear", "sqrt")),  # rule when the global batch grows with the ranks
    "train.gradient_accumulation_steps": (1, whole(1)),  # batches per optimiser step
    "train.gradient_checkpointing": (False, switch),
    "train.amp": ("none", one_of("none", "bf16", "fp16")),
    "train.strategy": ("auto", one_of("auto", "ddp", "dp")),
    "train.shuffle_buffer_size": (5000, whole(1)),  # samples, per loading process
    "train.num_data_workers": (0, whole(0)),  # loading processes per rank; 0: the rank itself
    "train.pin_memory": (False, switch),
    "train.persistent_workers": (False, switch),
    "train.prefetch_factor": (None, optional(whole(1))),
    "algo.optim_params.policy.optimizer_type": ("adamw", one_of("adamw", "adam")),
    "algo.optim_params.policy.learning_rate.initial": (1e-3, real(0, above=True)),
    "algo.optim_params.policy.learning_rate.scheduler_type": ("cosine", one_of("cosine", "multistep", "constant")),
    "algo.optim_params.policy.learning_rate.decay_factor": (0.1, real(0, 1, above=True)),  # of multistep, at each of
    "algo.optim_params.policy.learning_rate.epoch_schedule": ([], many(whole(1), some=False)),  # these epochs
    "algo.optim_params.policy.regularization.L2": (1e-6, real(0)),  # weight decay
    "algo.horizon.observation_horizon": (2, whole(1)),  # observations that the policy sees
    "algo.horizon.action_horizon": (8, whole(1)),  # actions that are carried out before it looks again
    "algo.horizon.prediction_horizon": (16, whole(1)),  # actions that it predicts
    "algo.unet.diffusion_step_embed_dim": (32, whole(2)),
    "algo.unet.down_dims": ([32, 64], many(whole(1))),
    "algo.unet.kernel_size": (3, whole(1)),
    "algo.unet.n_groups": (8, whole(1)),
    "algo.ema.enabled": (True, switch),
    "algo.ema.power": (0.75, real(0, 1, above=True)),
    "algo.ddpm.num_train_timesteps": (100, whole(2)),
    "algo.ddpm.beta_schedule": ("squaredcos_cap_v2", one_of("squaredcos_cap_v2")),
    "algo.ddim.num_inference_timesteps": (10, whole(1)),
}
ALIASES = {"train.optim_params.": "algo.optim_params."}  # the guide's spelling


def read_config(arguments: Iterable[str]) -> Config:
    """The settings of a run: defaults < the file of `load_from=`, or of the run of `train.resume=` < `key=value`.

    Raises:
        ConfigError: Naming everything that is wrong, where it stands, and the setting that may have been meant.
    """
    given: dict[str, str] = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals:
            raise ConfigError(f"arguments look like key=value, not {argument!r}; the keys are those of config.json")
        given[key] = value
    file = loaded = given.pop("load_from", None)
    if loaded is None and (folder := given.get("train.resume")):
        file = str(Path(folder) / "config.json")
        if not Path(file).is_file():
            raise ConfigError(f"train.resume: {folder} is not the folder of a run, for it holds no config.json")
    config, problems = {key: default for key, (default, _) in SETTINGS.items()}, []
    for source, layer in ((file, {} if file is None else read_file(file)), ("the command line", given)):
        for key, value in _canonical(layer, source).items():
            try:
                config[key] = _checked(key, value, typed=layer is given)
            except ValueError as error:
                problems.append(f"{error} ({source})")
    if loaded and config["train.resume"]:
        problems.append(
            "train.resume reads the settings of its run: leave out load_from, change single ones by key=value"
        )
    problems = problems or list(_contradictions(config))
    if problems:
        raise ConfigError("\n  ".join(problems))
    return config


def read_file(path: str | Path) -> dict[str, Any]:
    """The settings of a JSON file by their dotted names."""
    try:
        content = json.loads(Path(path).read_text())
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}; load_from= takes a JSON file like config.json"
        ) from None
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold sections in braces, like config.json")
    return dict(flat(content))


def nested(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings in sections, as files have them."""
    whole: dict[str, Any] = {}
    for key, value in config.items():
        *sections, name = key.split(".")
        place = whole
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
    return whole


def flat(section: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """The settings of nested sections by their dotted names."""
    for name, value in section.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and key not in SETTINGS:
            yield from flat(value, f"{key}.")
        else:
            yield key, value


def _canonical(layer: Mapping[str, Any], source: str | None) -> dict[str, Any]:
    renamed: dict[str, Any] = {}
    for key, value in layer.items():
        for alias, name in ALIASES.items():
            if key.startswith(alias):
                log.warning("%s stands for %s (%s)", key, key.replace(alias, name, 1), source)
                key = key.replace(alias, name, 1)
        renamed[key] = value
    return renamed


def _checked(key: str, value: Any, typed: bool) -> Any:
    """`typed`: on a command line, where values are text."""
    if key not in SETTINGS:
        raise ValueError(f"there is no setting {key}; the nearest is {_nearest(key)}")
    check = SETTINGS[key][1]
    readings = [value]
    if typed:
        try:
            readings.insert(0, json.loads({"True": "true", "False": "false", "None": "null"}.get(value, value)))
        except ValueError:
            if value.startswith("[") and value.endswith("]"):  # shells take away a list's quotes
                readings.insert(0, [part.strip() for part in value[1:-1].split(",")])
            with suppress(ValueError):
                readings.insert(0, float(value))  # .5
    for number, reading in enumerate(readings):
        try:
            return check(reading)
        except ValueError as error:
            if number + 1 == len(readings):
                raise ValueError(f"{key} must be {error}, not {value!r}") from None


def _nearest(key: str) -> str:
    """The setting that is most like it, in whole or but for its first sections."""

    def likeness(name: str) -> float:
        parts = name.split(".")
        return max(difflib.SequenceMatcher(None, key, ".".join(parts[first:])).ratio() for first in range(len(parts)))

    return max(SETTINGS, key=likeness)


def _contradictions(config: Config) -> Iterable[str]:
    horizons = [config[f"algo.horizon.{name}_horizon"] for name in ("observation", "action", "prediction")]
    if horizons[2] < horizons[0] - 1 + horizons[1]:
        yield (
            f"algo.horizon.prediction_horizon begins with the oldest observation, so it must be at least "
            f"observation_horizon - 1 + action_horizon = {horizons[0] - 1 + horizons[1]}, not {horizons[2]}"
        )
    halved = 2 ** (len(config["algo.unet.down_dims"]) - 1)
    if horizons[2] % halved:
        yield f"algo.horizon.prediction_horizon is halved between down_dims, so {halved} must divide {horizons[2]}"
    if any(dim % config["algo.unet.n_groups"] for dim in config["algo.unet.down_dims"]):
        yield f"algo.unet.n_groups, {config['algo.unet.n_groups']}, must divide each of algo.unet.down_dims"
    if config["algo.unet.kernel_size"] % 2 == 0 or config["algo.unet.diffusion_step_embed_dim"] % 2:
        yield "algo.unet.kernel_size must be odd and algo.unet.diffusion_step_embed_dim even"
    if config["algo.ddim.num_inference_timesteps"] > config["algo.ddpm.num_train_timesteps"]:
        yield "algo.ddim.num_inference_timesteps must not exceed algo.ddpm.num_train_timesteps"
    weights, folders = config["train.sample_weights"], config["train.data_path"]
    if weights is not None and (len(weights) != len(folders) or not sum(weights)):
        yield f"train.sample_weights needs a number for each of {len(folders)} train.data_path, not all of them 0"
    rate = "algo.optim_params.policy.learning_rate."
    if config[f"{rate}epoch_schedule"] and config[f"{rate}scheduler_type"] != "multistep":
        yield f"{rate}epoch_schedule is for scheduler_type multistep, not {config[f'{rate}scheduler_type']}"
    if not config["train.num_data_workers"]:
        for key in ("train.persistent_workers", "train.prefetch_factor"):
            if config[key]:
                yield f"{key} needs train.num_data_workers of at least 1"
