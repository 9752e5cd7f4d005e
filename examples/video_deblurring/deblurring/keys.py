"""The keys of an option file: what each may hold and its default, and which of the original's are not here."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

REQUIRED = object()
TRAIN_TYPES = ("VideoRecurrentTrainDataset", "TrainDatasetRGBSpike")
TEST_TYPES = ("VideoRecurrentTestDataset", "TestDatasetRGBSpike")


@dataclass(frozen=True)
class Key:
    """What the value of a key may be, in words and as a function, and its default."""

    expected: str
    fits: Callable[[Any], bool]
    default: Any = REQUIRED


def whole(value: Any, low: int = 0) -> bool:
    return type(value) is int and value >= low


def real(value: Any, low: float = 0.0, high: float = float("inf")) -> bool:
    return type(value) in (int, float) and low <= value < high


def listed(value: Any, fits: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(fits, value))


def text(default: Any = REQUIRED) -> Key:
    return Key("a text", lambda value: isinstance(value, str) and value != "", default)


def flag(default: bool = False) -> Key:
    return Key("true or false", lambda value: isinstance(value, bool), default)


def count(default: Any = REQUIRED, low: int = 1) -> Key:
    return Key(f"a whole number of at least {low}", lambda value: whole(value, low), default)


def number(default: Any = REQUIRED, low: float = 0.0, high: float = float("inf")) -> Key:
    bounds = f"at least {low:g}" if high == float("inf") else f"in [{low:g}, {high:g})"
    return Key(f"a number {bounds}", lambda value: real(value, low, high), default)


def choice(*values: Any, default: Any = REQUIRED) -> Key:
    return Key(" or ".join(map(repr, values)), lambda value: value in values, default)


def or_null(key: Key) -> Key:
    return Key(f"{key.expected}, or null", lambda value: value is None or key.fits(value), None)


_dataset = {
    "name": text("dataset"),
    "dataroot_gt": or_null(text()),  # null: what prepare.py made
    "dataroot_lq": or_null(text()),
    "dataroot_spike": or_null(text()),
    "meta_info_file": or_null(text()),
    "cache_data": flag(),
}
_train_dataset = {
    "dataset_type": choice(*TRAIN_TYPES),
    "num_frame": count(),
    "gt_size": Key("an even number of at least 8", lambda value: whole(value, 8) and value % 2 == 0),
    "use_hflip": flag(),
    "use_rot": flag(),
    "dataloader_shuffle": flag(True),
    "dataloader_num_workers": count(0, low=0),
    "dataloader_batch_size": count(),
    "dataloader_batch_size_is": choice("per_rank", "global", default="per_rank"),
    "dataloader_pin_memory": flag(),
    "dataloader_persistent_workers": flag(),
    "dataloader_prefetch_factor": or_null(count()),
}
_train = {
    "total_iter": count(),
    "manual_seed": or_null(count(low=0)),
    "E_decay": number(0.0, high=1.0),
    "G_lossfn_type": choice("l1", "l2", "charbonnier"),
    "G_lossfn_weight": number(1.0),
    "G_charbonnier_eps": number(1e-6),
    "G_optimizer_type": choice("adam", "adamw"),
    "G_optimizer_lr": number(low=1e-12),
    "G_optimizer_betas": Key(
        "two numbers in [0, 1)",
        lambda value: listed(value, lambda beta: real(beta, high=1.0)) and len(value) == 2,
        [0.9, 0.99],
    ),
    "G_optimizer_wd": number(0.0),
    "G_optimizer_clipgrad": or_null(number()),
    "G_optimizer_reuse": flag(True),
    "G_scheduler_type": choice("MultiStepLR", "CosineAnnealingWarmRestarts"),
    "G_scheduler_milestones": Key(
        "a list of growing numbers of iterations",
        lambda value: listed(value, lambda step: whole(step, 1)) and value == sorted(set(value)),
        [],
    ),
    "G_scheduler_gamma": number(0.5),
    "G_scheduler_periods": or_null(count()),
    "G_scheduler_restart_weights": count(1),
    "G_scheduler_eta_min": number(0.0),
    "fix_iter": count(0, low=0),
    "fix_keys": Key("a list of texts", lambda value: listed(value, lambda name: isinstance(name, str) and name), []),
    "fix_lr_mul": number(1.0),
    "amp": choice(False, "bf16", "fp16", default=False),
    "accumulation": count(1),
    "checkpoint_print": count(200),
    "checkpoint_save": count(5000),
    "checkpoint_test": count(5000),
}
_val = {
    "num_frame_testing": or_null(count()),
    "num_frame_overlapping": count(0, low=0),
    "size_patch_testing": or_null(
        Key("an even number of at least 32, or 0 for whole frames", lambda v: v == 0 or (whole(v, 32) and v % 2 == 0))
    ),
    "save_img": flag(),
}
_logging = {
    "use_tensorboard": flag(True),
    "use_wandb": flag(),
    "wandb_project": or_null(text()),
    "wandb_entity": or_null(text()),
    "wandb_name": or_null(text()),
    "wandb_api_key": or_null(text()),  # never shown, saved or used
}
_SECTIONS = {
    "": {
        "task": Key(
            "the name of a folder",
            lambda value: isinstance(value, str) and value.strip(". ") != "" and "/" not in value,
        ),
        "model": choice("vrt", default="vrt"),
        "gpu_ids": or_null(Key("a list of GPU numbers", lambda value: listed(value, whole))),
        "dist": flag(),
        "find_unused_parameters": flag(),
        "use_static_graph": flag(),
        "scale": choice(1, default=1),
        "n_channels": choice(3, default=3),
    },
    "path.": {"root": text("experiments"), "pretrained_netG": or_null(text()), "pretrained_netE": or_null(text())},
    "datasets.train.": _dataset | _train_dataset,
    "datasets.test.": _dataset | {"dataset_type": choice(*TEST_TYPES)},
    "netG.": {"net_type": choice("tiny_clip"), "embed_dim": count(32), "depth": count(5)},
    "train.": _train,
    "val.": _val,
    "logging.": _logging,
}
KEYS = {f"{section}{name}": key for section, keys in _SECTIONS.items() for name, key in keys.items()}

VRT_SIZES = """
    upscale img_size window_size depths indep_reconsts embed_dims num_heads mul_attn_ratio spynet_path pa_frames
    deformable_groups nonblind_denoising use_checkpoint_attn use_checkpoint_ffn no_checkpoint_attn_blocks
    no_checkpoint_ffn_blocks optical_flow in_chans out_chans recal_all_flows
"""


def _absent(section: str, names: Iterable[str], reason: str, *neutral: Any) -> dict[str, tuple[str, tuple[Any, ...]]]:
    return {f"{section}{name}": (reason, (None, False, *neutral)) for name in names}


_FILES, _PNG = ("io_backend", "filename_tmpl", "filename_ext"), ({"type": "disk"}, "06d", "08d", "png")

# The original's keys that this trainer knows and has not got: the reason, and the values that ask for nothing.
ABSENT = (
    _absent("path.", ["pretrained_optimizerG"], "the newest set under models/ is found by itself")
    | _absent("datasets.train.", _FILES, "folders of PNG files are read", *_PNG)
    | _absent("datasets.test.", _FILES, "folders of PNG files are read", *_PNG)
    | _absent("datasets.train.", ["val_partition"], "name the clips in meta_info_file", "")
    | _absent("datasets.train.", ["test_mode", "random_reverse"], "it is not implemented")
    | _absent("datasets.train.", ["interval_list"], "consecutive frames are taken", [1])
    | _absent("datasets.test.", ["num_frame"], "whole clips are tested", -1)
    | _absent(
        "netG.",
        VRT_SIZES.split(),
        "VRT is not here, and tiny_clip has embed_dim and depth",
    )
    | _absent("netG.", ["init_type"], "torch's initialisation is used", "default")
    | _absent("train.", ["G_param_strict", "E_param_strict"], "checkpoints always have to fit", True)
    | _absent("train.", ["G_regularizer_orthstep", "G_regularizer_clipstep"], "it is not implemented")
    | _absent("train.", ["E_bn"], "there is no batch normalisation")
    | _absent("val.", ["pad_seq", "flip_seq", "center_frame_only"], "it is not implemented")
)
