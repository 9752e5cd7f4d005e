"""Settings in robomimic's sections: their values and defaults, and the original's that are not supported.

Inside the program a setting is `config["train.batch_size"]`; files have nested sections.
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
    "experiment.validate": flag(False),  # the loss on held-out episodes, after each epoch
    "experiment.validation_epoch_every_n_steps": count(10),  # at most as many batches
    "experiment.env": or_null(text()),  # environment of rollouts; null: that of the demonstrations
    "experiment.save.enabled": flag(True),
    "experiment.save.every_n_epochs": count(5),  # models/model_epoch_N.pth; last.pth comes every epoch
    "experiment.save.on_best_validation": flag(False),  # models/model_epoch_N_validation_X.pth
    "experiment.save.on_best_rollout_success_rate": flag(True),  # models/model_epoch_N_success_X.pth
    "experiment.save.top_k": count(1),  # how many of the best to keep
    "experiment.rollout.enabled": flag(True),
    "experiment.rollout.n": count(100),  # episodes, over all ranks
    "experiment.rollout.horizon": count(50),  # environment steps in an episode
    "experiment.rollout.rate": count(10),  # epochs from one evaluation to the next
    "experiment.render_video": flag(True),  # one episode of each evaluation
    "experiment.logging.terminal_output_to_txt": flag(True),
    "experiment.logging.log_tb": flag(True),
    "experiment.logging.log_wandb": use_wandb(),  # the key is the environment's WANDB_API_KEY
    "experiment.logging.wandb_proj_name": or_null(text()),
    "train.data_path": Setting("a string or a list of strings", is_text_or_texts, ["data/fetch_pick_and_place"]),
    "train.sample_weights": or_null(many(number())),  # share of the samples by path; null: by their steps
    "train.on_broken_shard": choice("error", "skip"),  # what to do about a broken episode
    "train.action_keys": or_null(many(text(), empty=False)),  # null: what the format calls them
    "train.hdf5_filter_key": or_null(text()),  # episodes of robomimic's files to use; null: all
    "train.hdf5_validation_filter_key": or_null(text()),  # and to hold out for validation
    "train.validation_fraction": number(0.05, "(0, 1)"),  # held out without a key
    "train.output_dir": text("runs"),
    "train.resume": or_null(text()),  # folder of a run to resume
    "train.seed": count(0, low=0),
    "train.num_epochs": count(20),
    "train.batch_size": count(128),  # samples per optimiser step
    "train.keep_batch_size": choice("per_rank", "global"),  # whose batch has that size
    "train.lr_scaling": choice("none", "linear", "sqrt"),  # when the global batch grows with the ranks
    "train.gradient_accumulation_steps": count(1),  # batches per optimiser step
    "train.gradient_checkpointing": flag(False),
    "train.max_grad_norm": or_null(number(interval="(0, inf)")),  # gradients are clipped to it
    "train.amp": choice("none", "bf16", "fp16"),
    "train.strategy": choice("auto", "ddp", "dp"),
    "train.sync_batchnorm": flag(False),  # statistics of all ranks' samples; needs GPUs
    "train.compile": flag(False),  # by torch.compile
    "train.num_data_workers": count(0, low=0),  # loading processes per rank; 0: the rank itself
    "train.pin_memory": flag(False),
    "train.persistent_workers": flag(False),
    "train.prefetch_factor": or_null(count()),
    "algo.optim_params.policy.optimizer_type": choice("adamw", "adam"),
    "algo.optim_params.policy.betas": pair("two numbers in [0, 1)", number(interval="[0, 1)"), [0.95, 0.999]),
    "algo.optim_params.policy.learning_rate.initial": number(1e-3, "(0, inf)"),
    "algo.optim_params.policy.learning_rate.scheduler_type": choice("cosine", "multistep", "constant"),
    "algo.optim_params.policy.learning_rate.decay_factor": number(0.1, "(0, 1]"),  # of multistep, at
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
    "algo.ddpm.prediction_type": choice("epsilon", "sample"),  # what the network predicts: noise or actions
    "algo.ddim.num_inference_timesteps": count(10),
    "observation.modalities.obs.low_dim": many(text(), []),  # observed numbers; []: those of the format
    "observation.modalities.obs.rgb": many(text(), []),  # cameras
    "observation.image_dim": or_null(pair("a height and a width", count())),  # to which pictures are scaled, and then
    f"{_RGB}obs_randomizer_class": or_null(_RANDOMIZER),  # cropped at random; in acting, to the middle
    f"{_RGB}obs_randomizer_kwargs.crop_height": or_null(count()),
    f"{_RGB}obs_randomizer_kwargs.crop_width": or_null(count()),
    f"{_RGB}core_kwargs.backbone_class": choice(
        "ResNet18Conv",
        "ResNet34Conv",  # these need torchvision
        "ResNet50Conv",
        "ResNet101Conv",
    ),
    f"{_RGB}core_kwargs.backbone_kwargs.width": count(64, low=8),  # channels of the first stage
    f"{_RGB}core_kwargs.backbone_kwargs.weights": or_null(text()),  # file of pretrained weights; null: none
    f"{_RGB}core_kwargs.feature_dimension": count(64),  # per camera
    f"{_RGB}core_kwargs.pool_class": choice("SpatialSoftmax", "SpatialMeanPool"),
    f"{_RGB}core_kwargs.pool_kwargs.num_kp": count(32),  # points of SpatialSoftmax
}
ALIASES = {"train.optim_params.": "algo.optim_params."}  # the guide's names
_RATE = "algo.optim_params.policy.learning_rate."
_CORE = f"{_RGB}core_kwargs."
_DRAWN = "actions are sampled by DDIM and clipped"
_BY_PATH = "list data sets by path in train.data_path, and their shares in train.sample_weights"
_NO_SUBSAMPLES = "samples come from all steps of all episodes: remove it"
_NO_LANGUAGE = "policies take no language: set VisualCore, or remove it"
ABSENT = (
    absent("train.", "data_format", f"{RLDS}, without this key", "robomimic", kind=Refused)
    | absent("train.", "dataset_names", _BY_PATH, [], kind=Refused)
    | absent("train.", "subsample_length", _NO_SUBSAMPLES, kind=Refused)
    | absent(_RGB, "core_class", _NO_LANGUAGE, "VisualCore", kind=Refused)
    | absent("observation.modalities.obs.", "depth scan", "policies see numbers and pictures", [])
    | absent("observation.modalities.goal.", "low_dim rgb depth scan", "policies take no separate goal", [])
    | absent("observation.encoder.", "low_dim depth scan", "only pictures are encoded")
    | absent(_RGB, "fuser input_maps", "the features of all cameras are concatenated", {})
    | absent(_CORE, "flatten", "features are a vector", True)
    | absent(f"{_CORE}backbone_kwargs.", "pretrained input_coord_conv use_cam downsample", "weights names a file")
    | absent(f"{_CORE}pool_kwargs.", "learnable_temperature noise_std output_variance", "only points are returned", 0)
    | absent(f"{_CORE}pool_kwargs.", "temperature", "it is 1", 1)
    | absent(f"{_RGB}obs_randomizer_kwargs.", "num_crops pos_enc", "a sample has one crop", 1)
    | absent("", "meta", "it is for hyperparameter scans")
    | absent("experiment.save.", "every_n_seconds epochs", "set every_n_epochs", [])
    | absent("experiment.save.", "on_best_rollout_return", "set on_best_rollout_success_rate")
    | absent("experiment.", "additional_envs env_meta_update_dict", "experiment.env names one", {})
    | absent("experiment.", "render keep_all_videos video_skip", "one film is made of each evaluation")
    | absent("experiment.rollout.", "warmstart terminate_on_success", "an episode has a fixed length", 0)
    | absent("experiment.", "ckpt_path", "train.resume names a run")
    | absent("train.", "data", "train.data_path names files and folders")
    | absent("train.", "hdf5_cache_mode hdf5_use_swmr hdf5_load_next_obs", "numbers are cached, pictures are not")
    | absent("train.", "hdf5_normalize_obs", "observations are always normalised", True)
    | absent("train.", "num_parallel_calls traj_transform_threads traj_read_threads", "set num_data_workers")
    | absent("train.", "action_shapes", "they follow from the data")
    | absent("train.", "shuffle_buffer_size", "samples are drawn from all episodes")
    | absent("train.", "normalize_weights_by_ds_size", "set train.sample_weights")
    | absent("train.", "seq_length pad_seq_length frame_stack pad_frame_stack", "set algo.horizon", 1, True)
    | absent("train.", "dataset_keys action_config", "set train.action_keys and observation.modalities", {})
    | absent("train.", "goal_mode truncated_geom_factor shuffled_obs_key_groups", "it is not implemented")
    | absent("train.", "cuda", "each rank uses the GPU of its local rank, if there is one")
    | absent("experiment.", "mse", "experiment.validate measures the loss", {})
    | absent("algo.", "noise_samples", "a sample has one noise", 1)
    | absent(_RATE, "step_every_batch", "the rate changes at every step", True)
    | absent(_RATE, "num_cycles", "the cosine falls to 0 at the end", 0.5)
    | absent("algo.unet.", "enabled", "there is no other network", True)
    | absent("algo.ddpm.", "enabled num_inference_timesteps clip_sample", _DRAWN)
    | absent("algo.ddim.", "enabled clip_sample set_alpha_to_one", _DRAWN, True)
    | absent("algo.ddim.", "num_train_timesteps beta_schedule steps_offset", "those of algo.ddpm apply", 0)
    | absent("algo.ddim.", "prediction_type", "set algo.ddpm.prediction_type", "epsilon")
)


def read_config(arguments: Iterable[str], file: str | None = None) -> Config:
    """Read the settings: `key=value` over a file (`load_from=`) or the run of `train.resume=`, over the defaults."""
    given = read_arguments(arguments)
    file = given.pop("load_from", file)
    folder = given.get("train.resume")
    if folder and file is not None:
        raise UserError(
            "train.resume reads the settings of its run: remove load_from, and change settings with key=value"
        )
    if folder:
        file = str(Path(folder) / "config.json")
        if not Path(file).is_file():
            raise UserError(f"train.resume: {folder} is not the folder of a run: it has no config.json")
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
            f"train.data has {', '.join(sorted(more))} beside paths: set weights in train.sample_weights and a "
            "filter_key in train.hdf5_filter_key, and remove language, which is not supported"
        )
    if entries:
        data = [one.get("path") if isinstance(one, dict) else one for one in data]
    section["data_path"] = data
    return content


def _contradictions(config: Config) -> Iterable[str]:
    horizons = [config[f"algo.horizon.{name}_horizon"] for name in ("observation", "action", "prediction")]
    if horizons[2] < horizons[0] - 1 + horizons[1]:
        yield (
            f"algo.horizon.prediction_horizon starts at the oldest observation, so it must be at least "
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
