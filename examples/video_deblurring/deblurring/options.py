"""Read option files: the keys, their values and their defaults."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from shared.program import UserError
from shared.settings import (
    COMMAND_LINE,
    REQUIRED,
    Setting,
    Table,
    absent,
    choice,
    class_or,
    count,
    fill_in,
    flag,
    folder_name,
    many,
    nested,
    number,
    or_null,
    pair,
    read_arguments,
    read_json,
    refuse,
    shown,
    text,
    use_wandb,
)

from deblurring.clips import ROOT

Options = dict[str, Any]


def is_tile(value: Any) -> bool:
    return value in (0, *range(32, 2**16, 2))


def are_milestones(value: Any) -> bool:
    return many(count()).fits(value) and value == sorted(set(value))


def data_type(*names: str) -> Setting:
    reason = "noise is not added and frames are not interpolated here: write noisy frames to dataroot_lq"
    return Setting(f"{', '.join(names[:-1])} or {names[-1]} ({reason})", lambda value: value in names)


def missing(reason: str) -> Setting:
    """Accept only false or null, for a feature that this trainer does not have."""
    return Setting(f"false, as {reason}", lambda value: value in (None, False), None)


_dataset = {
    "name": text("dataset"),
    "dataroot_gt": or_null(text()),  # null: what prepare.py made
    "dataroot_lq": or_null(text()),
    "dataroot_spike": or_null(text()),
    "meta_info_file": or_null(text()),
}
_train_dataset = {
    "cache_data": flag(True),
    "dataset_type": data_type("VideoRecurrentTrainDataset", "VideoRecurrentTrainVimeoDataset", "TrainDatasetRGBSpike"),
    "num_frame": Setting("a whole number of at least 1 (7 for Vimeo-90K)", count().fits),
    "gt_size": Setting("an even number of at least 8", lambda value: value in range(8, 2**16, 2)),
    "use_hflip": flag(),
    "use_rot": flag(),
    "dataloader_shuffle": flag(True),
    "dataloader_num_workers": count(0, low=0),
    "dataloader_batch_size": count(),
    "dataloader_batch_size_is": choice("per_rank", "global"),
    "dataloader_pin_memory": flag(),
    "dataloader_persistent_workers": flag(),
    "dataloader_prefetch_factor": or_null(count()),
    "interval_list": many(count(), [1], empty=False),
    "random_reverse": flag(),
    "pad_sequence": flag(),  # the last frame comes twice
    "mirror_sequence": flag(),  # the frames come once more, in the other direction
    "val_partition": or_null(choice("", "REDS4", "official")),
    "test_mode": missing("it would train on the clips of val_partition"),
}
_test_dataset = {
    "cache_data": flag(),
    "dataset_type": data_type("VideoRecurrentTestDataset", "TestDatasetRGBSpike"),
}
_train = {
    "total_iter": count(),
    "manual_seed": or_null(count(low=0)),
    "E_decay": number(0.0, "[0, 1)"),
    "G_lossfn_type": class_or("l1", "l2", "charbonnier"),
    "G_lossfn_weight": number(1.0, "(0, inf)"),
    "G_charbonnier_eps": number(1e-6, "(0, inf)"),
    "G_optimizer_type": choice("adam", "adamw", default=REQUIRED),
    "G_optimizer_lr": number(interval="(0, inf)"),
    "G_optimizer_betas": pair("two numbers in [0, 1)", number(interval="[0, 1)"), [0.9, 0.99]),
    "G_optimizer_wd": number(0.0),
    "G_optimizer_clipgrad": or_null(number()),
    "G_optimizer_reuse": flag(True),
    "G_scheduler_type": choice("MultiStepLR", "CosineAnnealingWarmRestarts", default=REQUIRED),
    "G_scheduler_milestones": Setting("an increasing list of iterations", are_milestones, []),
    "G_scheduler_gamma": number(0.5, "(0, 1]"),
    "G_scheduler_periods": or_null(count()),
    "G_scheduler_restart_weights": count(1),
    "G_scheduler_eta_min": number(0.0),
    "fix_iter": count(0, low=-1),  # KAIR's -1 is 0, too
    "fix_keys": many(text(), []),
    "fix_lr_mul": number(1.0),
    "G_regularizer_orthstep": missing("weights are not regularised here"),
    "G_regularizer_clipstep": missing("weights are not regularised here"),
    "G_param_strict": flag(True),
    "E_param_strict": flag(True),
    "amp": choice(False, "bf16", "fp16"),
    "accumulation": count(1),
    "checkpoint_print": count(200),
    "checkpoint_save": count(5000),
    "checkpoint_test": count(5000),
}
_val = {
    "num_frame_testing": or_null(count(low=0)),  # null: num_frame; 0: whole clips
    "num_frame_overlapping": count(0, low=0),
    "size_patch_testing": or_null(Setting("an even number of at least 32, or 0 for whole frames", is_tile)),
    "save_img": flag(),
    "center_frame_only": flag(),
    "flip_seq": flag(),
    "pad_seq": flag(),
}
_logging = {
    "use_tensorboard": flag(True),
    "use_wandb": use_wandb(),
    "wandb_project": or_null(text()),
    "wandb_entity": or_null(text()),
    "wandb_name": or_null(text()),
    "wandb_api_key": or_null(text()),  # never shown, saved or used
}
_SECTIONS = {
    "": {
        "task": folder_name(),
        "model": choice("vrt"),
        "gpu_ids": or_null(many(count(low=0))),
        "dist": flag(),
        "find_unused_parameters": flag(),
        "use_static_graph": flag(),
        "sync_batchnorm": flag(),
        "compile": flag(),
        "scale": choice(1, 2, 3, 4),
        "n_channels": choice(3),
    },
    "path.": {"root": text("experiments"), "pretrained_netG": or_null(text()), "pretrained_netE": or_null(text())},
    "datasets.train.": _dataset | _train_dataset,
    "datasets.test.": _dataset | _test_dataset,
    "netG.": {"net_type": class_or("tiny_clip", "vrt", "rvrt")},
    "train.": _train,
    "val.": _val,
    "logging.": _logging,
}
KEYS = {f"{section}{name}": key for section, keys in _SECTIONS.items() for name, key in keys.items()}

_tiny_clip = {"netG.embed_dim": count(32), "netG.depth": count(5)}
_VRT_SIZES = """
    upscale img_size window_size depths indep_reconsts embed_dims num_heads mul_attn_ratio spynet_path pa_frames
    deformable_groups nonblind_denoising use_checkpoint_attn use_checkpoint_ffn no_checkpoint_attn_blocks
    no_checkpoint_ffn_blocks optical_flow in_chans out_chans recal_all_flows clip_size num_blocks inputconv_groups
    attention_heads attention_window cpu_cache_length
"""
_FILES = "io_backend filename_tmpl filename_ext"
_FOUND = "folders, .lmdb folders and frame names are recognised"
ABSENT = (
    absent("path.", "pretrained_optimizerG", "the newest checkpoint under models/ is found automatically")
    | absent("datasets.train.", _FILES, _FOUND)
    | absent("datasets.test.", _FILES, _FOUND)
    | absent("datasets.test.", "num_frame", "whole clips are tested", -1)
    | absent(
        "datasets.train.", "sigma_min sigma_max temporal_scale color_jitter", "for data sets that are not supported"
    )
    | absent("datasets.test.", "sigma temporal_scale pad_sequence", "for data sets that are not supported")
    | absent("netG.", "init_type init_bn_type init_gain", "the network's own initialisation is used", "default")
    | absent("train.", "E_bn", "the average copies the buffers of G")
)
_ANYTHING = Setting("anything", lambda value: True, None)


def _table(layers: Iterable[Mapping[str, Any]]) -> Table:
    """Make the table of keys; for a network other than `tiny_clip`, `netG` may hold any key."""
    given = {}
    for layer in layers:
        section = layer.get("netG")
        if isinstance(section, Mapping):
            given |= {f"netG.{name}": value for name, value in section.items()}
        given |= {key: value for key, value in layer.items() if key.startswith("netG.")}
    if given.get("netG.net_type", "tiny_clip") == "tiny_clip":
        return KEYS | ABSENT | _tiny_clip | absent("netG.", _VRT_SIZES, "tiny_clip has embed_dim and depth")
    return dict.fromkeys(given, _ANYTHING) | KEYS | ABSENT


def read_options(path: str | Path, changes: Iterable[str] = ()) -> Options:
    """Read an option file and `key=value` arguments, which override it, and fill in the defaults."""
    given = read_arguments(changes)
    for key in given:
        if "api_key" in key or "api_key" in str(given[key]):
            raise UserError(
                f"{key}: other users can read the command line, and Weights & Biases stores it: set the environment "
                "variable WANDB_API_KEY instead"
            )
    return complete(read_json(path), str(path), given)


def complete(
    content: Mapping[str, Any], name: str = "the option file", changes: Mapping[str, Any] | None = None
) -> Options:
    """Check options and add the defaults."""
    layers = {name: content, COMMAND_LINE: changes or {}}
    if "netG" in layers[COMMAND_LINE]:  # in place of the file's, which may name another network
        layers[name] = {**content, "netG": {}}
    opt = nested(fill_in(_table(layers.values()), layers))
    refuse([*_about_data(opt), *_about_training(opt["train"]), *_about_testing(opt)])
    _fill_in(opt)
    return opt


def redacted(opt: Options) -> Options:
    """Copy options for the log and for files, without the values of keys like `wandb_api_key`."""
    return {key: redacted(value) if isinstance(value, dict) else shown(key, value) for key, value in opt.items()}


def has_spikes(opt: Options, split: str = "train") -> bool:
    return "RGBSpike" in opt["datasets"][split]["dataset_type"]


def _about_data(opt: Options) -> Iterator[str]:
    data = opt["datasets"]["train"]
    if has_spikes(opt) != has_spikes(opt, "test"):
        yield "datasets.train.dataset_type and datasets.test.dataset_type must both have spikes, or neither"
    for split, section in opt["datasets"].items():
        roots = ["dataroot_gt", "dataroot_lq", "dataroot_spike"]
        if not has_spikes(opt, split) and section[roots.pop()]:
            yield f"datasets.{split}.dataroot_spike needs a dataset_type with RGBSpike in its name"
        absent = [name for name in roots if section[name] is None]
        only_restore = split == "test" and absent == ["dataroot_gt"]
        if 0 < len(absent) < len(roots) and not only_restore:
            yield f"datasets.{split} lacks {' and '.join(absent)}: name {', '.join(roots)}, or none of them"
    scale = opt["scale"]
    only_plain = has_spikes(opt) or opt["netG"]["net_type"] == "tiny_clip"
    if scale > 1 and only_plain:
        yield f"scale must be 1, not {scale}, with tiny_clip and with spikes: these have half the sharp frames' height"
    if only_plain and (data["pad_sequence"] or data["mirror_sequence"]):
        yield "datasets.train.pad_sequence and mirror_sequence must be false with tiny_clip and with spikes"
    if data["gt_size"] % scale:
        yield f"datasets.train.gt_size {data['gt_size']} must be a multiple of scale {scale}"


def _about_training(train: Options) -> Iterator[str]:
    if train["G_scheduler_type"] == "MultiStepLR" and not train["G_scheduler_milestones"]:
        yield "train.G_scheduler_type MultiStepLR needs train.G_scheduler_milestones"
    if train["G_scheduler_type"] == "CosineAnnealingWarmRestarts" and train["G_scheduler_periods"] is None:
        yield "train.G_scheduler_type CosineAnnealingWarmRestarts needs train.G_scheduler_periods"
    if train["G_scheduler_eta_min"] > train["G_optimizer_lr"]:
        yield "train.G_scheduler_eta_min must not be above train.G_optimizer_lr"
    if train["fix_iter"] > 0 and not train["fix_keys"]:
        yield "train.fix_iter needs train.fix_keys: parts of the names of the parameters to freeze"


def _about_testing(opt: Options) -> Iterator[str]:
    val, frames = opt["val"], opt["datasets"]["train"]["num_frame"]
    tested, overlap = val["num_frame_testing"], val["num_frame_overlapping"]
    if opt["netG"]["net_type"] == "tiny_clip" and tested not in (None, frames):
        yield (
            f"val.num_frame_testing must be datasets.train.num_frame, {frames}, since tiny_clip takes "
            f"exactly as many frames as it was trained with; not {tested}"
        )
    if tested != 0 and overlap >= (tested or frames):
        yield f"val.num_frame_overlapping must be less than the {tested or frames} frames that are tested at once"
    tile, window = val["size_patch_testing"] or 0, opt["netG"].get("window_size") or [1]
    if tile % window[-1]:
        yield f"val.size_patch_testing {tile} must be a multiple of the last of netG.window_size, {window[-1]}"


def _fill_in(opt: Options) -> None:
    """Fill in the defaults that depend on other keys."""
    if opt["val"]["num_frame_testing"] is None:
        opt["val"]["num_frame_testing"] = opt["datasets"]["train"]["num_frame"]
    for split, data in opt["datasets"].items():
        if data["dataroot_lq"] is None:
            data |= {"dataroot_gt": str(ROOT / f"{split}_GT"), "dataroot_lq": str(ROOT / f"{split}_GT_blurred")}
            if has_spikes(opt, split):
                data["dataroot_spike"] = str(ROOT / f"{split}_spike")
