"""Settings in robomimic's sections: their values and defaults, and the original's that are not supported.

Inside the program a setting is `config["train.batch_size"]`; files have nested sections.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from shared.kinds import Betas, FolderName, Share, Some, Text, UseWandb, class_or, such
from shared.program import UserError
from shared.settings import COMMAND_LINE, Refused, fill_in, read_arguments, read_json

from .formats import RLDS

Config = dict[str, Any]
_RGB = "observation.encoder.rgb."
_CORE = f"{_RGB}core_kwargs."
_RATE = "algo.optim_params.policy.learning_rate."


def _path(entry: Any) -> Any:
    """Read robomimic's {"path": ...} as the path."""
    if not isinstance(entry, dict):
        return entry
    if entry.keys() - {"path", "weight"} or entry.get("weight", 1) != 1:
        raise ValueError(
            "list paths alone, set weights in train.sample_weights and a filter_key in train.hdf5_filter_key, and "
            "remove language, which is not supported"
        )
    return entry.get("path")


OnePath = Annotated[Text, BeforeValidator(_path)]
Paths = Annotated[Some[OnePath], BeforeValidator(lambda paths: paths if isinstance(paths, list) else [paths])]
Size = such(list[PositiveInt], "a height and a width, such as [128, 128]", lambda size: len(size) == 2)
Randomizer = such(Any, "CropRandomizer, alone and not in a list", lambda kind: kind == "CropRandomizer")
Even = Annotated[PositiveInt, Field(multiple_of=2)]
Odd = such(PositiveInt, "a positive odd number", lambda value: value % 2)
SETTINGS = {
    "algo_name": Literal["diffusion_policy"],
    "experiment.name": (FolderName, "fetch_pick_and_place"),
    "experiment.epoch_every_n_steps": 250,  # optimiser steps in an epoch
    "experiment.check_replicas_every_n_steps": 500,
    "experiment.validate": False,  # the loss on held-out episodes, after each epoch
    "experiment.validation_epoch_every_n_steps": 10,  # at most as many batches
    "experiment.env": Text | None,  # environment of rollouts; null: that of the demonstrations
    "experiment.save.enabled": True,
    "experiment.save.every_n_epochs": 5,  # models/model_epoch_N.pth; last.pth comes every epoch
    "experiment.save.on_best_validation": False,  # models/model_epoch_N_validation_X.pth
    "experiment.save.on_best_rollout_success_rate": True,  # models/model_epoch_N_success_X.pth
    "experiment.save.top_k": 1,  # how many of the best to keep
    "experiment.rollout.enabled": True,
    "experiment.rollout.n": 100,  # episodes, over all ranks
    "experiment.rollout.horizon": 50,  # environment steps in an episode
    "experiment.rollout.rate": 10,  # epochs from one evaluation to the next
    "experiment.render_video": True,  # one episode of each evaluation
    "experiment.logging.terminal_output_to_txt": True,
    "experiment.logging.log_tb": True,
    "experiment.logging.log_wandb": (UseWandb, False),  # the key is the environment's WANDB_API_KEY
    "experiment.logging.wandb_proj_name": Text | None,
    "train.data_path": (Paths, ["data/fetch_pick_and_place"]),  # files and folders
    "train.sample_weights": list[NonNegativeFloat] | None,  # share of the samples by path; null: by their steps
    "train.on_broken_shard": Literal["error", "skip"],  # what to do about a broken episode
    "train.action_keys": Some[Text] | None,  # null: what the format calls them
    "train.hdf5_filter_key": Text | None,  # episodes of robomimic's files to use; null: all
    "train.hdf5_validation_filter_key": Text | None,  # and to hold out for validation
    "train.validation_fraction": (Annotated[float, Field(gt=0, lt=1)], 0.05),  # held out without a key
    "train.output_dir": "runs",
    "train.resume": Text | None,  # folder of a run to resume
    "train.seed": (NonNegativeInt, 0),
    "train.num_epochs": 20,
    "train.batch_size": 128,  # samples per optimiser step
    "train.keep_batch_size": Literal["per_rank", "global"],  # whose batch has that size
    "train.lr_scaling": Literal["none", "linear", "sqrt"],  # when the global batch grows with the ranks
    "train.gradient_accumulation_steps": 1,  # batches per optimiser step
    "train.gradient_checkpointing": False,
    "train.max_grad_norm": PositiveFloat | None,  # gradients are clipped to it
    "train.amp": Literal["none", "bf16", "fp16"],
    "train.strategy": Literal["auto", "ddp", "dp"],
    "train.sync_batchnorm": False,  # statistics of all ranks' samples; needs GPUs
    "train.compile": False,  # by torch.compile
    "train.num_data_workers": (NonNegativeInt, 0),  # loading processes per rank; 0: the rank itself
    "train.pin_memory": False,
    "train.persistent_workers": False,
    "train.prefetch_factor": PositiveInt | None,
    "algo.optim_params.policy.optimizer_type": Literal["adamw", "adam"],
    "algo.optim_params.policy.betas": (Betas, [0.95, 0.999]),
    f"{_RATE}initial": (PositiveFloat, 1e-3),
    f"{_RATE}scheduler_type": Literal["cosine", "multistep", "constant"],
    f"{_RATE}decay_factor": (Share, 0.1),  # of multistep, at
    f"{_RATE}epoch_schedule": (list[PositiveInt], []),  # these epochs
    f"{_RATE}warmup_steps": (NonNegativeInt, 0),  # from 0 to the initial one
    "algo.optim_params.policy.regularization.L2": 1e-6,  # weight decay
    "algo.horizon.observation_horizon": 2,  # observations that the policy sees
    "algo.horizon.action_horizon": 8,  # actions that are carried out before it looks again
    "algo.horizon.prediction_horizon": 16,  # actions that it predicts
    "algo.network.class": class_or() | None,  # in place of the U-Net
    "algo.network.kwargs": (dict, {}),
    "algo.unet.diffusion_step_embed_dim": (Even, 32),
    "algo.unet.down_dims": (Some[PositiveInt], [32, 64]),
    "algo.unet.kernel_size": (Odd, 3),
    "algo.unet.n_groups": 8,
    "algo.ema.enabled": True,
    "algo.ema.power": (Share, 0.75),
    "algo.ddpm.num_train_timesteps": (Annotated[int, Field(ge=2)], 100),
    "algo.ddpm.beta_schedule": Literal["squaredcos_cap_v2"],
    "algo.ddpm.prediction_type": Literal["epsilon", "sample"],  # what the network predicts: noise or actions
    "algo.ddim.num_inference_timesteps": 10,
    "observation.modalities.obs.low_dim": (list[Text], []),  # observed numbers; []: those of the format
    "observation.modalities.obs.rgb": (list[Text], []),  # cameras
    "observation.image_dim": Size | None,  # to which pictures are scaled, and then
    f"{_RGB}obs_randomizer_class": Randomizer | None,  # cropped at random; in acting, to the middle
    f"{_RGB}obs_randomizer_kwargs.crop_height": PositiveInt | None,
    f"{_RGB}obs_randomizer_kwargs.crop_width": PositiveInt | None,
    f"{_CORE}backbone_class": Literal["ResNet18Conv", "ResNet34Conv", "ResNet50Conv", "ResNet101Conv"],
    f"{_CORE}backbone_kwargs.width": (Annotated[int, Field(ge=8)], 64),  # channels of the first stage
    f"{_CORE}backbone_kwargs.weights": Text | None,  # file of pretrained weights; null: none
    f"{_CORE}feature_dimension": 64,  # per camera
    f"{_CORE}pool_class": Literal["SpatialSoftmax", "SpatialMeanPool"],
    f"{_CORE}pool_kwargs.num_kp": 32,  # points of SpatialSoftmax
}
ALIASES = {"train.optim_params.": "algo.optim_params."}  # the guide's names
ABSENT = {  # settings of the originals, with values that ask for nothing else than there is
    "load_from": Refused("it is read on the command line alone"),
    "train.data_format=robomimic": Refused(f"{RLDS}, without this key"),
    "train.dataset_names": Refused("list data sets by path in train.data_path, their shares in train.sample_weights"),
    "train.subsample_length": Refused("samples come from all steps of all episodes: remove it"),
    f"{_RGB}core_class=VisualCore": Refused("policies take no language: set VisualCore, or remove it"),
    "observation.modalities.obs.depth scan": "policies see numbers and pictures",
    "observation.modalities.goal.low_dim rgb depth scan": "policies take no separate goal",
    "observation.encoder.low_dim depth scan": "only pictures are encoded",
    f"{_RGB}fuser input_maps": "the features of all cameras are concatenated",
    f"{_CORE}flatten=true": "features are a vector",
    f"{_CORE}backbone_kwargs.pretrained input_coord_conv use_cam downsample": "weights names a file",
    f"{_CORE}pool_kwargs.learnable_temperature noise_std output_variance": "only points are returned",
    f"{_CORE}pool_kwargs.temperature=1": "it is 1",
    f"{_RGB}obs_randomizer_kwargs.num_crops=1 pos_enc": "a sample has one crop",
    "meta": "it is for hyperparameter scans",
    "experiment.save.every_n_seconds epochs": "set every_n_epochs",
    "experiment.save.on_best_rollout_return": "set on_best_rollout_success_rate",
    "experiment.additional_envs env_meta_update_dict": "experiment.env names one",
    "experiment.render keep_all_videos video_skip": "one film is made of each evaluation",
    "experiment.rollout.warmstart terminate_on_success": "an episode has a fixed length",
    "experiment.ckpt_path": "train.resume names a run",
    "experiment.mse": "experiment.validate measures the loss",
    "train.data": "train.data_path names files and folders",
    "train.hdf5_cache_mode hdf5_use_swmr hdf5_load_next_obs": "numbers are cached, pictures are not",
    "train.hdf5_normalize_obs=true": "observations are always normalised",
    "train.num_parallel_calls traj_transform_threads traj_read_threads": "set num_data_workers",
    "train.action_shapes": "they follow from the data",
    "train.shuffle_buffer_size": "samples are drawn from all episodes",
    "train.normalize_weights_by_ds_size": "set train.sample_weights",
    "train.seq_length=1 pad_seq_length=true frame_stack=1 pad_frame_stack=true": "set algo.horizon",
    "train.dataset_keys action_config": "set train.action_keys and observation.modalities",
    "train.goal_mode truncated_geom_factor shuffled_obs_key_groups": "it is not implemented",
    "train.cuda": "each rank uses the GPU of its local rank, if there is one",
    "algo.noise_samples=1": "a sample has one noise",
    f"{_RATE}step_every_batch=true": "the rate changes at every step",
    f"{_RATE}num_cycles=0.5": "the cosine falls to 0 at the end",
    "algo.unet.enabled=true": "there is no other network",
    "algo.ddpm.enabled num_inference_timesteps clip_sample": "actions are sampled by DDIM and clipped",
    "algo.ddim.enabled=true clip_sample=true set_alpha_to_one=true": "actions are sampled by DDIM and clipped",
    "algo.ddim.num_train_timesteps beta_schedule steps_offset": "those of algo.ddpm apply",
    "algo.ddim.prediction_type=epsilon": "set algo.ddpm.prediction_type",
}


def read_config(arguments: Iterable[str], file: str | None = None) -> Config:
    """Read the settings: `key=value` over a file (`load_from=`) or the run of `train.resume=`, over the defaults."""
    given = read_arguments(arguments)
    file = given.pop("load_from", file)
    if file == "":
        raise UserError("load_from= must name a file")
    folder = given.get("train.resume")
    if folder:
        if file is not None:
            raise UserError("train.resume reads its run's settings: remove load_from, and change them with key=value")
        file = str(Path(folder) / "config.json")
        if not Path(file).is_file():
            raise UserError(f"train.resume: {folder} is not the folder of a run: it has no config.json")
    content = read_json(file) if file is not None else {}
    section = content.get("train")
    if isinstance(section, dict) and section.get("data"):  # robomimic's name
        if section.get("data_path"):
            raise UserError(f"{file} has both train.data and train.data_path: remove one")
        section["data_path"] = section.pop("data")
    return fill_in(SETTINGS, ABSENT, _contradictions, {str(file): content, COMMAND_LINE: given}, ALIASES)


def _contradictions(config: Config) -> Iterable[str]:
    names = ("observation", "action", "prediction")
    observed, acted, predicted = (config[f"algo.horizon.{name}_horizon"] for name in names)
    least = observed - 1 + acted
    if predicted < least:
        yield (
            "algo.horizon.prediction_horizon must be at least observation_horizon - 1 + action_horizon = "
            f"{least}, not {predicted}"
        )
    halved = 2 ** (len(config["algo.unet.down_dims"]) - 1)
    if predicted % halved:
        yield f"algo.horizon.prediction_horizon is halved between down_dims, so {halved} must divide {predicted}"
    if config["algo.ddim.num_inference_timesteps"] > config["algo.ddpm.num_train_timesteps"]:
        yield "algo.ddim.num_inference_timesteps must not exceed algo.ddpm.num_train_timesteps"
    weights, folders = config["train.sample_weights"], config["train.data_path"]
    if weights is not None and (len(weights) != len(folders) or not sum(weights)):
        yield f"train.sample_weights needs a number for each of {len(folders)} train.data_path, not all of them 0"
    if config[f"{_RATE}epoch_schedule"] and config[f"{_RATE}scheduler_type"] != "multistep":
        yield f"{_RATE}epoch_schedule is for scheduler_type multistep, not {config[f'{_RATE}scheduler_type']}"
    if config["train.hdf5_validation_filter_key"] and not config["experiment.validate"]:
        yield "train.hdf5_validation_filter_key holds episodes out for experiment.validate=true"
    kwargs = f"{_RGB}obs_randomizer_kwargs.crop_"
    given = [config[f"{kwargs}height"], config[f"{kwargs}width"]]
    if given != [None, None] and not config[f"{_RGB}obs_randomizer_class"]:
        yield f"{kwargs}height and {kwargs}width need {_RGB}obs_randomizer_class=CropRandomizer"
    if config[f"{_RGB}obs_randomizer_class"] and None in given:
        yield f"{_RGB}obs_randomizer_class CropRandomizer needs {kwargs}height and {kwargs}width"
    if config[f"{_CORE}backbone_class"] != "ResNet18Conv" and config[f"{_CORE}backbone_kwargs.width"] != 64:
        yield f"{_CORE}backbone_kwargs.width is for ResNet18Conv; others have 64 channels at first"
    if config["experiment.save.on_best_validation"] and not config["experiment.validate"]:
        yield "experiment.save.on_best_validation needs experiment.validate=true"
