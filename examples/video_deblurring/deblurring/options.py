"""Read option files: the keys, their values and their defaults."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from shared.kinds import Betas, Decay, FolderName, Share, Some, Text, UseWandb, class_or, such
from shared.settings import COMMAND_LINE, Refused, fill_in, flatten, nested, read_arguments, read_json, shown

from deblurring.clips import ROOT

Options = dict[str, Any]


def data_type(*names: str) -> Any:
    remedy = "noise is not added and frames are not interpolated here: write noisy frames to dataroot_lq"
    return such(str, f"{' or '.join(names)} ({remedy})", names.__contains__)


TrainType = data_type("VideoRecurrentTrainDataset", "VideoRecurrentTrainVimeoDataset", "TrainDatasetRGBSpike")
TestType = data_type("VideoRecurrentTestDataset", "TestDatasetRGBSpike")
Frames = such(int, "a whole number of at least 1 (7 for Vimeo-90K)", lambda frames: frames >= 1)
Milestones = such(list[PositiveInt], "an increasing list of iterations", lambda steps: steps == sorted({*steps}))
Tile = such(int, "an even number of at least 32, or 0 for whole frames", lambda tile: tile in (0, *range(32, 2**16, 2)))
KEYS = {
    "task": FolderName,
    "model": Literal["vrt"],
    "gpu_ids": list[NonNegativeInt] | None,
    "dist": False,
    "find_unused_parameters": False,
    "use_static_graph": False,
    "sync_batchnorm": False,  # statistics of all ranks' samples; needs GPUs
    "compile": False,  # by torch.compile
    "scale": Literal[1, 2, 3, 4],
    "n_channels": Literal[3],
    "path.root": "experiments",
    "path.pretrained_netG": Text | None,
    "path.pretrained_netE": Text | None,
    "datasets.train.name": "dataset",
    "datasets.train.dataroot_gt": Text | None,  # null: what prepare.py made
    "datasets.train.dataroot_lq": Text | None,
    "datasets.train.dataroot_spike": Text | None,
    "datasets.train.meta_info_file": Text | None,
    "datasets.train.cache_data": True,
    "datasets.train.dataset_type": TrainType,
    "datasets.train.num_frame": Frames,
    "datasets.train.gt_size": Annotated[int, Field(ge=8, multiple_of=2)],
    "datasets.train.use_hflip": False,
    "datasets.train.use_rot": False,
    "datasets.train.dataloader_shuffle": True,
    "datasets.train.dataloader_num_workers": (NonNegativeInt, 0),
    "datasets.train.dataloader_batch_size": PositiveInt,
    "datasets.train.dataloader_batch_size_is": Literal["per_rank", "global"],
    "datasets.train.dataloader_pin_memory": False,
    "datasets.train.dataloader_persistent_workers": False,
    "datasets.train.dataloader_prefetch_factor": PositiveInt | None,
    "datasets.train.interval_list": (Some[PositiveInt], [1]),
    "datasets.train.random_reverse": False,
    "datasets.train.pad_sequence": False,  # the last frame comes twice
    "datasets.train.mirror_sequence": False,  # the frames come once more, in the other direction
    "datasets.train.val_partition": Literal["", "REDS4", "official"] | None,
    "datasets.test.name": "dataset",
    "datasets.test.dataroot_gt": Text | None,  # null: what prepare.py made
    "datasets.test.dataroot_lq": Text | None,
    "datasets.test.dataroot_spike": Text | None,
    "datasets.test.meta_info_file": Text | None,
    "datasets.test.cache_data": False,
    "datasets.test.dataset_type": TestType,
    "netG.net_type": class_or("tiny_clip", "vrt", "rvrt"),
    "train.total_iter": PositiveInt,
    "train.manual_seed": NonNegativeInt | None,
    "train.E_decay": (Decay, 0.0),
    "train.G_lossfn_type": class_or("l1", "l2", "charbonnier"),
    "train.G_lossfn_weight": (PositiveFloat, 1.0),
    "train.G_charbonnier_eps": (PositiveFloat, 1e-6),
    "train.G_optimizer_type": (Literal["adam", "adamw"], ...),
    "train.G_optimizer_lr": PositiveFloat,
    "train.G_optimizer_betas": (Betas, [0.9, 0.99]),
    "train.G_optimizer_wd": 0.0,
    "train.G_optimizer_clipgrad": NonNegativeFloat | None,
    "train.G_optimizer_reuse": True,
    "train.G_scheduler_type": (Literal["MultiStepLR", "CosineAnnealingWarmRestarts"], ...),
    "train.G_scheduler_milestones": (Milestones, []),
    "train.G_scheduler_gamma": (Share, 0.5),
    "train.G_scheduler_periods": PositiveInt | None,
    "train.G_scheduler_restart_weights": 1,
    "train.G_scheduler_eta_min": 0.0,
    "train.fix_iter": (Annotated[int, Field(ge=-1)], 0),  # KAIR's -1 is 0, too
    "train.fix_keys": (list[Text], []),
    "train.fix_lr_mul": 1.0,
    "train.G_param_strict": True,
    "train.E_param_strict": True,
    "train.amp": Literal[False, "bf16", "fp16"],
    "train.accumulation": 1,
    "train.checkpoint_print": 200,
    "train.checkpoint_save": 5000,
    "train.checkpoint_test": 5000,
    "val.num_frame_testing": NonNegativeInt | None,  # null: num_frame; 0: whole clips
    "val.num_frame_overlapping": (NonNegativeInt, 0),
    "val.size_patch_testing": Tile | None,
    "val.save_img": False,
    "val.center_frame_only": False,
    "val.flip_seq": False,
    "val.pad_seq": False,
    "logging.use_tensorboard": True,
    "logging.use_wandb": (UseWandb, False),
    "logging.wandb_project": Text | None,
    "logging.wandb_entity": Text | None,
    "logging.wandb_name": Text | None,
    "logging.wandb_api_key": Text | None,  # never shown, saved or used
}
TINY_CLIP = {"netG.embed_dim": 32, "netG.depth": 5}
_IN_NO_TINY_CLIP = """netG.
    upscale img_size window_size depths indep_reconsts embed_dims num_heads mul_attn_ratio spynet_path pa_frames
    deformable_groups nonblind_denoising use_checkpoint_attn use_checkpoint_ffn no_checkpoint_attn_blocks
    no_checkpoint_ffn_blocks optical_flow in_chans out_chans recal_all_flows clip_size num_blocks inputconv_groups
    attention_heads attention_window cpu_cache_length
"""
ABSENT = {
    "path.pretrained_optimizerG": "the newest checkpoint under models/ is found automatically",
    "datasets.train.io_backend filename_tmpl filename_ext": "folders, .lmdb folders and frame names are recognised",
    "datasets.test.io_backend filename_tmpl filename_ext": "folders, .lmdb folders and frame names are recognised",
    "datasets.train.test_mode": Refused("it would train on the clips of val_partition: set false"),
    "datasets.test.num_frame=-1": "whole clips are tested",
    "datasets.train.sigma_min sigma_max temporal_scale color_jitter": "for data sets that are not supported",
    "datasets.test.sigma temporal_scale pad_sequence": "for data sets that are not supported",
    "netG.init_type=default init_bn_type=default init_gain=default": "the network's own initialisation is used",
    "train.E_bn": "the average copies the buffers of G",
    "train.G_regularizer_orthstep G_regularizer_clipstep": Refused("weights are not regularised here: set null"),
}


def read_options(path: str | Path, changes: Iterable[str] = ()) -> Options:
    """Read an option file and `key=value` arguments, which override it, and fill in the defaults."""
    return complete(read_json(path), str(path), read_arguments(changes))


def complete(
    content: Mapping[str, Any], name: str = "the option file", changes: Mapping[str, Any] | None = None
) -> Options:
    """Check options and add the defaults."""
    changes = changes or {}
    if isinstance(changes.get("netG"), dict):  # in place of the file's, which may name another network
        content = {**content, "netG": {}}
    table, absent = KEYS | TINY_CLIP, {**ABSENT, _IN_NO_TINY_CLIP: "tiny_clip has embed_dim and depth"}
    given = dict(flatten(content)) | dict(flatten(changes))
    if given.get("netG.net_type", "tiny_clip") != "tiny_clip":  # others take any arguments
        own = [key for key in given if key.startswith("netG.")]
        table, absent = dict.fromkeys(own, Any) | KEYS, ABSENT
    opt = fill_in(table, absent, _contradictions, {name: content, COMMAND_LINE: changes})
    opt["val.num_frame_testing"] = _frames_at_once(opt)
    for split in ("train", "test"):
        root = f"datasets.{split}.dataroot_"
        if opt[f"{root}lq"] is None:
            opt |= {f"{root}gt": str(ROOT / f"{split}_GT"), f"{root}lq": str(ROOT / f"{split}_GT_blurred")}
            if "RGBSpike" in opt[f"datasets.{split}.dataset_type"]:
                opt[f"{root}spike"] = str(ROOT / f"{split}_spike")
    return nested(opt)


def redacted(opt: Options) -> Options:
    """Copy options for the log and for files, without the values of keys like `wandb_api_key`."""
    return nested({key: shown(key, value) for key, value in flatten(opt)})


def has_spikes(opt: Options, split: str = "train") -> bool:
    return "RGBSpike" in opt["datasets"][split]["dataset_type"]


def _frames_at_once(opt: Options) -> int:
    tested = opt["val.num_frame_testing"]
    return opt["datasets.train.num_frame"] if tested is None else tested


def _contradictions(opt: Options) -> Iterator[str]:
    spikes = {split: "RGBSpike" in opt[f"datasets.{split}.dataset_type"] for split in ("train", "test")}
    if spikes["train"] != spikes["test"]:
        yield "datasets.train.dataset_type and datasets.test.dataset_type must both have spikes, or neither"
    for split, with_spikes in spikes.items():
        data = f"datasets.{split}."
        roots = ["dataroot_gt", "dataroot_lq", "dataroot_spike"]
        if not with_spikes and opt[data + roots.pop()]:
            yield f"{data}dataroot_spike needs a dataset_type with RGBSpike in its name"
        absent = [name for name in roots if opt[data + name] is None]
        only_restore = split == "test" and absent == ["dataroot_gt"]
        if 0 < len(absent) < len(roots) and not only_restore:
            yield f"datasets.{split} lacks {' and '.join(absent)}: name {', '.join(roots)}, or none of them"
    scale, size, tiny = opt["scale"], opt["datasets.train.gt_size"], opt["netG.net_type"] == "tiny_clip"
    only_plain = spikes["train"] or tiny
    if scale > 1 and only_plain:
        yield f"scale must be 1, not {scale}, with tiny_clip and with spikes: these have half the sharp frames' height"
    if only_plain and (opt["datasets.train.pad_sequence"] or opt["datasets.train.mirror_sequence"]):
        yield "datasets.train.pad_sequence and mirror_sequence must be false with tiny_clip and with spikes"
    if size % scale:
        yield f"datasets.train.gt_size {size} must be a multiple of scale {scale}"
    if opt["train.G_scheduler_type"] == "MultiStepLR" and not opt["train.G_scheduler_milestones"]:
        yield "train.G_scheduler_type MultiStepLR needs train.G_scheduler_milestones"
    if opt["train.G_scheduler_type"] == "CosineAnnealingWarmRestarts" and not opt["train.G_scheduler_periods"]:
        yield "train.G_scheduler_type CosineAnnealingWarmRestarts needs train.G_scheduler_periods"
    if opt["train.G_scheduler_eta_min"] > opt["train.G_optimizer_lr"]:
        yield "train.G_scheduler_eta_min must not be above train.G_optimizer_lr"
    if opt["train.fix_iter"] > 0 and not opt["train.fix_keys"]:
        yield "train.fix_iter needs train.fix_keys: parts of the names of the parameters to freeze"
    frames, tested, overlap = opt["datasets.train.num_frame"], _frames_at_once(opt), opt["val.num_frame_overlapping"]
    if tiny and tested != frames:
        yield f"val.num_frame_testing must be datasets.train.num_frame, {frames}, with tiny_clip; not {tested}"
    if overlap >= tested > 0:
        yield f"val.num_frame_overlapping must be less than the {tested} frames that are tested at once"
    tile, window = opt["val.size_patch_testing"] or 0, opt.get("netG.window_size") or [1]
    if tile % window[-1]:
        yield f"val.size_patch_testing {tile} must be a multiple of the last of netG.window_size, {window[-1]}"
