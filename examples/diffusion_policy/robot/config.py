"""Settings in robomimic's sections: what each may be, and which of the original's are not here.

Inside the program a setting is `config["train.batch_size"]`; in files it stands in nested sections.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from shared.program import UserError
from shared.settings import (
    COMMAND_LINE,
    Refused,
    Setting,
    absent,
    choice,
    class_or,
    count,
    fill_in,
    flag,
    folder_name,
    many,
    number,
    or_null,
    pair,
    read_arguments,
    read_json,
    refuse,
    text,
    use_wandb,
)

from .formats import RLDS

Config = dict[str, Any]


def is_text_or_texts(value: Any) -> bool:
    return text().fits(value) or many(text(), empty=False).fits(value)


_RGB = "observation.encoder.rgb."
_RANDOMIZER = Setting("'CropRandomizer', alone and not in a list", lambda value: value == "CropRandomizer")
SETTINGS = {
    "algo_name": choice("diffusion_policy"),
    "experiment.name": folder_name("fetch_pick_and_place"),
    "experiment.epoch_every_n_steps": count(250),  # optimiser steps in an epoch
    "experiment.check_replicas_every_n_steps": count(500),
    "experiment.validate": flag(False),  # the loss on episodes that are held out, after each epoch
    "experiment.validation_epoch_every_n_steps": count(10),  # batches that it takes at most
    "experiment.env": or_null(text()),  # environment of rollouts; null: the demonstrations' own
    "experiment.save.enabled": flag(True),
    "experiment.save.every_n_epochs": count(5),  # models/model_epoch_N.pth; last.pth comes every epoch
    "experiment.save.on_best_validation": flag(False),  # models/model_epoch_N_validation_X.pth
    "experiment.save.on_best_rollout_success_rate": flag(True),  # models/model_epoch_N_success_X.pth
    "experiment.save.top_k": count(1),  # how many of the best are kept
    "experiment.rollout.enabled": flag(True),
    "experiment.rollout.n": count(100),  # episodes, over all ranks
    "experiment.rollout.horizon": count(50),  # environment steps in an episode
    "experiment.rollout.rate": count(10),  # epochs from one evaluation to the next
    "experiment.render_video": flag(True),  # one episode of each evaluation
    "experiment.logging.terminal_output_to_txt": flag(True),
    "experiment.logging.log_tb": flag(True),
    "experiment.logging.log_wandb": use_wandb(),  # the key is the environment's WANDB_API_KEY
    "experiment.logging.wandb_proj_name": or_null(text()),
    "train.data_path": Setting("a text or a list of texts", is_text_or_texts, ["data/fetch_pick_and_place"]),
    "train.sample_weights": or_null(many(number())),  # share of the samples by path; null: by their steps
    "train.on_broken_shard": choice("error", "skip"),  # what a broken episode is
    "train.action_keys": or_null(many(text(), empty=False)),  # null: what the format calls them
    "train.hdf5_filter_key": or_null(text()),  # episodes of robomimic's files to use; null: all
    "train.hdf5_validation_filter_key": or_null(text()),  # and to hold out for validation
    "train.validation_fraction": number(0.05, "(0, 1)"),  # held out where no key says which
    "train.output_dir": text("runs"),
    "train.resume": or_null(text()),  # folder of a run to go on with
    "train.seed": count(0, low=0),
    "train.num_epochs": count(20),
    "train.batch_size": count(128),  # samples per optimiser step
    "train.keep_batch_size": choice("per_rank", "global"),  # whose batch has that size
    "train.lr_scaling": choice("none", "linear", "sqrt"),  # when the global batch grows with the ranks
    "train.gradient_accumulation_steps": count(1),  # batches per optimiser step
    "train.gradient_checkpointing": flag(False),
    "train.max_grad_norm": or_null(number(interval="(0, inf)")),  # longer gradients are scaled down to it
    "train.amp": choice("none", "bf16", "fp16"),
    "train.strategy": choice("auto", "ddp", "dp"),
    "train.num_data_workers": count(0, low=0),  # loading processes per rank; 0: the rank itself
    "train.pin_memory": flag(False),
    "train.persistent_workers": flag(False),
    "train.prefetch_factor": or_null(count()),
    "algo.optim_params.policy.optimizer_type": choice("adamw", "adam"),
    "algo.optim_params.policy.betas": pair("two numbers in [0, 1)", number(interval="[0, 1)"), [0.95, 0.999]),
    "algo.optim_params.policy.learning_rate.initial": number(1e-3, "(0, inf)"),
    "algo.optim_params.policy.learning_rate.scheduler_type": choice("cosine", "multistep", "constant"),
    "algo.optim_params.policy.learning_rate.decay_factor": number(0.1, "(0, 1]"),  # of multistep, at each of
    "algo.optim_params.policy.learning_rate.epoch_schedule": many(count(), []),  # these epochs
    "algo.optim_params.policy.learning_rate.warmup_steps": count(0, low=0),  # from 0 to the initial one
    "algo.optim_params.policy.regularization.L2": number(1e-6),  # weight decay
    "algo.horizon.observation_horizon": count(2),  # observations that the policy sees
    "algo.horizon.action_horizon": count(8),  # actions that are carried out before it looks again
    "algo.horizon.prediction_horizon": count(16),  # actions that it predicts
    "algo.network.class": or_null(class_or()),  # in place of the U-Net
    "algo.network.kwargs": Setting("a section of its arguments", lambda value: isinstance(value, dict), {}),
    "algo.unet.diffusion_step_embed_dim": Setting("an even number", lambda value: value in range(2, 2**20, 2), 32),
    "algo.unet.down_dims": many(count(), [32, 64], empty=False),
    "algo.unet.kernel_size": Setting("an odd number", lambda value: value in range(1, 2**20, 2), 3),
    "algo.unet.n_groups": count(8),
    "algo.ema.enabled": flag(True),
    "algo.ema.power": number(0.75, "(0, 1]"),
    "algo.ddpm.num_train_timesteps": count(100, low=2),
    "algo.ddpm.beta_schedule": choice("squaredcos_cap_v2"),
    "algo.ddpm.prediction_type": choice("epsilon", "sample"),  # what the network finds: the noise, or the actions
    "algo.ddim.num_inference_timesteps": count(10),
    "observation.modalities.obs.low_dim": many(text(), []),  # observed numbers; []: what the format has
    "observation.modalities.obs.rgb": many(text(), []),  # cameras
    f"{_RGB}size": or_null(pair("a height and a width", count())),  # that pictures are scaled to
    f"{_RGB}obs_randomizer_class": or_null(_RANDOMIZER),  # crops at random, in acting the middle
    f"{_RGB}obs_randomizer_kwargs.crop_height": or_null(count()),
    f"{_RGB}obs_randomizer_kwargs.crop_width": or_null(count()),
    f"{_RGB}core_kwargs.backbone_class": choice(
        "ResNet18Conv",
        "ResNet34Conv",  # these need torchvision
        "ResNet50Conv",
        "ResNet101Conv",
    ),
    f"{_RGB}core_kwargs.backbone_kwargs.width": count(64, low=8),  # channels of the first stage
    f"{_RGB}core_kwargs.backbone_kwargs.weights": or_null(text()),  # file to begin with; null: at random
    f"{_RGB}core_kwargs.feature_dimension": count(64),  # per camera
    f"{_RGB}core_kwargs.pool_class": choice("SpatialSoftmax", "SpatialMeanPool"),
    f"{_RGB}core_kwargs.pool_kwargs.num_kp": count(32),  # points of SpatialSoftmax
}
ALIASES = {"train.optim_params.": "algo.optim_params."}  # the guide's spelling
_RATE = "algo.optim_params.policy.learning_rate."
_CORE = f"{_RGB}core_kwargs."
_DRAWN = "actions are drawn by DDIM, clipped"
_BY_PATH = "sets are found by their paths: list them in train.data_path, their shares in train.sample_weights"
_NO_SUBSAMPLES = "samples are drawn from all steps of all episodes: leave it out"
_NO_LANGUAGE = "policies take no language: take VisualCore, or leave it out"
ABSENT = (
    absent("train.", "data_format", f"{RLDS}, without this key", "robomimic", kind=Refused)
    | absent("train.", "dataset_names", _BY_PATH, [], kind=Refused)
    | absent("train.", "subsample_length", _NO_SUBSAMPLES, kind=Refused)
    | absent(_RGB, "core_class", _NO_LANGUAGE, "VisualCore", kind=Refused)
    | absent("observation.modalities.obs.", "depth scan", "policies see numbers and pictures", [])
    | absent("observation.modalities.goal.", "low_dim rgb depth scan", "policies see no goal besides", [])
    | absent("observation.encoder.", "low_dim depth scan", "only pictures are encoded")
    | absent("observation.", "image_dim", "observation.encoder.rgb.size says it", [])
    | absent(_RGB, "fuser input_maps", "the features of all cameras stand side by side", {})
    | absent(_CORE, "flatten", "features are a vector", True)
    | absent(f"{_CORE}backbone_kwargs.", "pretrained input_coord_conv use_cam downsample", "weights names a file")
    | absent(f"{_CORE}pool_kwargs.", "learnable_temperature noise_std output_variance", "points are all there is", 0)
    | absent(f"{_CORE}pool_kwargs.", "temperature", "it is 1", 1)
    | absent(f"{_RGB}obs_randomizer_kwargs.", "num_crops pos_enc", "a sample has one crop", 1)
    | absent("", "meta", "it is about scans of settings")
    | absent("experiment.save.", "every_n_seconds epochs", "every_n_epochs says it", [])
    | absent("experiment.save.", "on_best_rollout_return", "on_best_rollout_success_rate says it")
    | absent("experiment.", "additional_envs env_meta_update_dict", "experiment.env names one", {})
    | absent("experiment.", "render keep_all_videos video_skip", "one film is made of each evaluation")
    | absent("experiment.rollout.", "warmstart terminate_on_success", "an episode has a fixed length", 0)
    | absent("experiment.", "ckpt_path", "train.resume names a run")
    | absent("train.", "data", "train.data_path names files and folders")
    | absent("train.", "hdf5_cache_mode hdf5_use_swmr hdf5_load_next_obs", "numbers are cached, pictures are not")
    | absent("train.", "hdf5_normalize_obs", "observations are always normalised", True)
    | absent("train.", "num_parallel_calls traj_transform_threads traj_read_threads", "num_data_workers says it")
    | absent("train.", "action_shapes", "they are those of the data")
    | absent("train.", "shuffle_buffer_size", "samples are drawn from all episodes")
    | absent("train.", "normalize_weights_by_ds_size", "train.sample_weights says it")
    | absent("train.", "seq_length pad_seq_length frame_stack pad_frame_stack", "the horizons say it", 1, True)
    | absent("train.", "dataset_keys action_config", "train.action_keys and the modalities say it", {})
    | absent("train.", "goal_mode truncated_geom_factor shuffled_obs_key_groups", "it is not implemented")
    | absent("train.", "cuda", "each rank takes the GPU of its local rank, if there is one")
    | absent("experiment.", "mse", "experiment.validate measures the loss", {})
    | absent("algo.", "noise_samples", "a sample has one noise", 1)
    | absent(_RATE, "step_every_batch", "the rate changes in every step", True)
    | absent(_RATE, "num_cycles", "the cosine falls to 0 at the end", 0.5)
    | absent("algo.unet.", "enabled", "there is no other network", True)
    | absent("algo.ddpm.", "enabled num_inference_timesteps clip_sample", _DRAWN)
    | absent("algo.ddim.", "enabled clip_sample set_alpha_to_one", _DRAWN, True)
    | absent("algo.ddim.", "num_train_timesteps beta_schedule steps_offset", "those of algo.ddpm hold", 0)
    | absent("algo.ddim.", "prediction_type", "algo.ddpm says it", "epsilon")
)


def read_config(arguments: Iterable[str], file: str | None = None) -> Config:
    """Read the settings of a run: defaults < a file (`load_from=`), or the run of `train.resume=` < `key=value`."""
    given = read_arguments(arguments)
    file = given.pop("load_from", file)
    folder = given.get("train.resume")
    if folder and file is not None:
        raise UserError(
            "train.resume reads the settings of its run: leave out load_from, change single ones by key=value"
        )
    if folder:
        file = str(Path(folder) / "config.json")
        if not Path(file).is_file():
            raise UserError(f"train.resume: {folder} is not the folder of a run, for it holds no config.json")
    layers = {COMMAND_LINE: given}
    if file is not None:
        layers = {file: _with_our_paths(read_json(file))} | layers
    config = fill_in(SETTINGS | ABSENT, layers, ALIASES)
    if isinstance(config["train.data_path"], str):
        config["train.data_path"] = [config["train.data_path"]]
    refuse(_contradictions(config))
    return config


def _with_our_paths(content: dict[str, Any]) -> dict[str, Any]:
    """Read robomimic's `train.data`, a path or a list of {"path": ...}, as `train.data_path`."""
    section = content.get("train")
    if not isinstance(section, dict) or not section.get("data"):
        return content
    data = section.pop("data")
    entries = [one for one in data if isinstance(one, dict)]
    more = {name for one in entries for name in one if name != "path" and (name, one[name]) != ("weight", 1)}
    if more:
        raise UserError(
            f"train.data names {', '.join(sorted(more))} beside paths: weights belong into train.sample_weights, a "
            "filter_key into train.hdf5_filter_key, and language is not used: leave it out"
        )
    if entries:
        data = [one.get("path") if isinstance(one, dict) else one for one in data]
    section["data_path"] = data
    return content


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
    if config["algo.ddim.num_inference_timesteps"] > config["algo.ddpm.num_train_timesteps"]:
        yield "algo.ddim.num_inference_timesteps must not exceed algo.ddpm.num_train_timesteps"
    weights, folders = config["train.sample_weights"], config["train.data_path"]
    if weights is not None and (len(weights) != len(folders) or not sum(weights)):
        yield f"train.sample_weights needs a number for each of {len(folders)} train.data_path, not all of them 0"
    rate = "algo.optim_params.policy.learning_rate."
    if config[f"{rate}epoch_schedule"] and config[f"{rate}scheduler_type"] != "multistep":
        yield f"{rate}epoch_schedule is for scheduler_type multistep, not {config[f'{rate}scheduler_type']}"
    if config["train.hdf5_validation_filter_key"] and not config["experiment.validate"]:
        yield "train.hdf5_validation_filter_key holds episodes out for experiment.validate=true"
    kwargs = f"{_RGB}obs_randomizer_kwargs.crop_"
    given = [config[f"{kwargs}height"], config[f"{kwargs}width"]]
    if config[f"{_RGB}obs_randomizer_class"] and None in given:
        yield f"{_RGB}obs_randomizer_class CropRandomizer needs {kwargs}height and {kwargs}width"
    if config[f"{_CORE}backbone_class"] != "ResNet18Conv" and config[f"{_CORE}backbone_kwargs.width"] != 64:
        yield f"{_CORE}backbone_kwargs.width is for ResNet18Conv; others have 64 channels at first"
    if config["experiment.save.on_best_validation"] and not config["experiment.validate"]:
        yield "experiment.save.on_best_validation needs experiment.validate=true"
