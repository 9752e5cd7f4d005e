"""Reads option files: JSON with `//` comments, every key checked, whatever is wrong said at once."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from deblurring.clips import ROOT
from deblurring.errors import TrainerError
from deblurring.keys import ABSENT, KEYS, REQUIRED

Options = dict[str, Any]
_TEXT_OR_COMMENT = re.compile(r'("(?:\\.|[^"\\\n])*")|//[^\n]*')


def read_options(path: str | Path) -> Options:
    """Reads an option file and fills in the defaults.

    Returns:
        Nested dictionaries, as in the file.

    Raises:
        TrainerError: If it cannot be read, or anything in it is wrong; the message names every key.
    """
    try:
        source = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise TrainerError(f"cannot read the option file {path}: {error}") from error
    return complete(parse(source, str(path)), str(path))


def parse(source: str, name: str = "the option file") -> Options:
    """The content of JSON with `//` comments; what looks like one inside a text is left alone."""
    try:
        content = json.loads(_TEXT_OR_COMMENT.sub(lambda match: match[1] or "", source), object_pairs_hook=_once)
    except ValueError as error:
        raise TrainerError(f"{name} is not JSON with // comments: {error}") from error
    if not isinstance(content, dict):
        raise TrainerError(f"{name} must hold an object: {{ … }}")
    return content


def complete(content: Mapping[str, Any], name: str = "the option file") -> Options:
    """Checks parsed options and adds the defaults.

    Raises:
        TrainerError: If anything is wrong, naming every key.
    """
    given, problems = dict(_flatten(content)), []
    absent: dict[str, list[str]] = {}  # by the reason
    for key, value in given.items():
        if key in ABSENT:
            reason, neutral = ABSENT[key]
            if value not in neutral:
                absent.setdefault(reason, []).append(key)
        elif any(known.startswith(f"{key}.") for known in KEYS):
            problems.append(f"{key} must be a section: {{ … }}")
        elif key not in KEYS:
            problems.append(f"{key} is unknown{_nearest(key)}")
        elif not KEYS[key].fits(value):
            problems.append(f"{key} must be {KEYS[key].expected}, not {_shown(key, value)}")
    for reason, keys in absent.items():
        problems.append(f"{', '.join(keys)}: of the original, not supported here: {reason}. Remove it")
    missing = [key for key, rule in KEYS.items() if rule.default is REQUIRED and key not in given]
    problems += [f"{key} is missing: it must be {KEYS[key].expected}" for key in missing]
    opt: Options = {}
    for key, rule in KEYS.items():
        section = opt
        *path, leaf = key.split(".")
        for part in path:
            section = section.setdefault(part, {})
        section[leaf] = copy.deepcopy(given.get(key, rule.default))
    problems = problems or list(_contradictions(opt))
    if problems:
        raise TrainerError("\n  ".join([f"{name}:", *problems]))
    _fill_in(opt)
    return opt


def redacted(opt: Options) -> Options:
    """A copy to show and to save, without the values of keys like `wandb_api_key`."""
    return {
        key: redacted(value) if isinstance(value, dict) else _shown(key, value, plain=True)
        for key, value in opt.items()
    }


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"{', '.join(sorted(twice))} is there twice")
    return dict(pairs)


def _flatten(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in content.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and (key not in ABSENT) and any(known.startswith(f"{key}.") for known in KEYS):
            yield from _flatten(value, f"{key}.")
        else:
            yield key, value


def _nearest(key: str) -> str:
    """The known key that was probably meant: of the same section first."""
    section, _, name = key.rpartition(".")
    here = {known.rpartition(".")[2]: known for known in KEYS if known.rpartition(".")[0] == section}
    if near := get_close_matches(name, here, 1):
        return f"; did you mean {here[near[0]]}?"
    for near in get_close_matches(name, {known.rpartition(".")[2] for known in KEYS}, 1):
        return f"; did you mean {next(known for known in KEYS if known.rpartition('.')[2] == near)}?"
    sections = dict.fromkeys(known.split(".")[0] for known in KEYS)
    near = get_close_matches(name, sections, 1)
    return f"; did you mean {near[0]}?" if near else ""


def _shown(key: str, value: Any, plain: bool = False) -> Any:
    if "api_key" in key.lower() and value is not None:
        return "<redacted>"
    return value if plain else json.dumps(value)


def _contradictions(opt: Options) -> Iterator[str]:
    train, data, val = opt["train"], opt["datasets"]["train"], opt["val"]
    spikes = ["RGBSpike" in opt["datasets"][split]["dataset_type"] for split in ("train", "test")]
    if spikes[0] != spikes[1]:
        yield "datasets.train.dataset_type and datasets.test.dataset_type: both with spikes, or neither"
    for split, has_spikes in zip(("train", "test"), spikes, strict=True):
        if opt["datasets"][split]["dataroot_spike"] and not has_spikes:
            yield f"datasets.{split}.dataroot_spike needs a dataset_type with RGBSpike in its name"
        roots = ["dataroot_gt", "dataroot_lq", *(["dataroot_spike"] if has_spikes else [])]
        absent = [name for name in roots if opt["datasets"][split][name] is None]
        if 0 < len(absent) < len(roots):
            yield f"datasets.{split} lacks {' and '.join(absent)}: name {', '.join(roots)}, or none of them"
    if not data["dataloader_num_workers"]:
        for name in ("dataloader_persistent_workers", "dataloader_prefetch_factor"):
            if data[name]:
                yield f"datasets.train.{name} needs dataloader_num_workers of at least 1"
    if train["G_scheduler_type"] == "MultiStepLR" and not train["G_scheduler_milestones"]:
        yield "train.G_scheduler_type MultiStepLR needs train.G_scheduler_milestones"
    if train["G_scheduler_type"] == "CosineAnnealingWarmRestarts" and train["G_scheduler_periods"] is None:
        yield "train.G_scheduler_type CosineAnnealingWarmRestarts needs train.G_scheduler_periods"
    if train["fix_iter"] and not train["fix_keys"]:
        yield "train.fix_iter needs train.fix_keys: parts of the names of what to freeze until then"
    if val["num_frame_testing"] not in (None, data["num_frame"]):
        yield (
            f"val.num_frame_testing must be datasets.train.num_frame, {data['num_frame']}, since tiny_clip takes "
            f"exactly as many frames as it was trained with; not {val['num_frame_testing']}"
        )
    if val["num_frame_overlapping"] >= data["num_frame"]:
        yield f"val.num_frame_overlapping must be less than the {data['num_frame']} frames that are tested at once"


def _fill_in(opt: Options) -> None:
    """The defaults that depend on other keys."""
    opt["val"]["num_frame_testing"] = opt["datasets"]["train"]["num_frame"]
    for split in ("train", "test"):
        data = opt["datasets"][split]
        for name, part in (("dataroot_gt", "GT"), ("dataroot_lq", "GT_blurred"), ("dataroot_spike", "spike")):
            if data[name] is None and (part != "spike" or "RGBSpike" in data["dataset_type"]):
                data[name] = str(ROOT / f"{split}_{part}")
