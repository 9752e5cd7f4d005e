"""Option files of the video example: what is read, what is refused, and with which words."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import video
from deblurring.clips import ROOT
from deblurring.options import complete, read_options, redacted
from shared.program import UserError
from shared.settings import parse

EXAMPLE = Path(__file__).parents[3] / "examples" / "video_deblurring"
FILES = sorted((EXAMPLE / "options/vrt").glob("*.json"))


def checked(**changes: Any) -> dict[str, Any]:
    return complete(video.options(Path("clips"), Path("runs"), **changes))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_option_files_are_right_and_named_like_their_tasks(path: Path) -> None:
    opt = read_options(path)
    assert opt["task"] == path.stem
    spikes = path.stem.endswith("rgbspike")
    assert opt["datasets"]["train"]["dataroot_gt"] == str(ROOT / "train_GT")
    assert opt["datasets"]["test"]["dataroot_spike"] == (str(ROOT / "test_spike") if spikes else None)


def test_the_two_option_files_differ_in_the_spikes_only() -> None:
    rgb, spikes = (read_options(path) for path in FILES)
    for opt in (rgb, spikes):
        del opt["task"]
        for data in opt["datasets"].values():
            del data["dataset_type"], data["dataroot_spike"]
    assert rgb == spikes


def test_comments_go_and_texts_that_look_like_one_stay() -> None:
    source = '{ // one\n"a": "http://x//y", "b": "\\"// no", // "c": 1\n"d": [1, 2] // end\n}'
    assert parse(source, "x.json") == {"a": "http://x//y", "b": '"// no', "d": [1, 2]}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ('{"task": 1,}', "not JSON.*line 1"),
        ('{"task": "a", "task": "b"}', "task is given twice"),
        ("[]", "must hold an object"),
        ('{"a": "x\n"}', "not JSON"),
    ],
)
def test_what_is_not_json_is_refused(source: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse(source, "x.json")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read the settings in .*nothing.json"):
        read_options(tmp_path / "nothing.json")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("train__totl_iter", 3, "train.totl_iter is unknown; did you mean train.total_iter?"),
        ("train__gt_size", 3, "train.gt_size is unknown; did you mean datasets.train.gt_size?"),
        ("trian", {"E_decay": 0.9}, "trian.E_decay is unknown; did you mean train.E_decay?"),
        ("datasets__train__dataloder_batch_size", 3, "did you mean datasets.train.dataloader_batch_size?"),
        ("train__compile", True, "train.compile is unknown; did you mean compile?"),
        ("batch_size", 3, "did you mean datasets.train.dataloader_batch_size?"),
        ("lr", 3, "did you mean train.G_optimizer_lr?"),
        ("train__amp", True, "train.amp: Input should be false, 'bf16' or 'fp16'; found true"),
        ("trian", {"x": 1}, "trian.x is unknown; did you mean the section train?"),
        ("zzz", 1, "zzz is unknown"),
        (
            "task",
            "../other",
            'task: Input should be a name without / and \\, since it names a folder; found "../other"',
        ),
        ("task", "..", "task: Input should be a name without /"),
        ("train__total_iter", "many", 'train.total_iter: Input should be a valid integer; found "many"'),
        ("train__total_iter", True, "train.total_iter: Input should be a valid integer; found true"),
        ("train", 3, "train must be a section: {"),
        ("train__E_decay", 1.0, "train.E_decay: Input should be less than 1; found 1.0"),
        ("train__E_decay", float("nan"), "train.E_decay: Input should be a finite number; found NaN"),
        (
            "train__G_lossfn_type",
            "l3",
            'train.G_lossfn_type: Input should be l1 or l2 or charbonnier or package.module:Class; found "l3"',
        ),
        (
            "train__G_scheduler_milestones",
            [5, 3],
            "G_scheduler_milestones: Input should be an increasing list of iterations; found [5, 3]",
        ),
        (
            "train__G_optimizer_betas",
            [0.9],
            "train.G_optimizer_betas: List should have at least 2 items, not 1; found [0.9]",
        ),
        ("datasets__train__gt_size", 15, "datasets.train.gt_size: Input should be a multiple of 2; found 15"),
        ("datasets__train__gt_size", 6, "datasets.train.gt_size: Input should be greater than or equal to 8; found 6"),
        ("val__size_patch_testing", 31, "an even number of at least 32, or 0"),
        ("task", "", 'task: Input should be a name without / and \\, since it names a folder; found ""'),
        ("scale", 2, "scale must be 1, not 2, with tiny_clip and with spikes"),
        ("scale", 5, "scale: Input should be 1, 2, 3 or 4; found 5"),
        (
            "netG__net_type",
            "VRT",
            'netG.net_type: Input should be tiny_clip or vrt or rvrt or package.module:Class; found "VRT"',
        ),
        ("netG__depht", 2, "netG.depht is unknown"),
        ("netG", 3, "netG must be a section"),
        (
            "datasets__train__test_mode",
            True,
            "test_mode is true (the option file), but it would train on the clips of val_partition: set false",
        ),
        ("datasets__train__interval_list", [], "interval_list: List should have at least 1 item"),
        ("logging__wandb_api_key", 123, "logging.wandb_api_key: Input should be a valid string; found <redacted>"),
        ("datasets__test__dataset_type", "VideoRecurrentTestDataset", "must both have spikes, or neither"),
        ("train__G_scheduler_type", "MultiStepLR", "needs train.G_scheduler_milestones"),
        ("train__G_scheduler_periods", None, "needs train.G_scheduler_periods"),
        ("train__G_optimizer_lr", 0, "train.G_optimizer_lr: Input should be greater than 0; found 0"),
        ("datasets__train__dataroot_lq", None, "datasets.train lacks dataroot_lq: name dataroot_gt, dataroot_lq, data"),
        ("datasets__train__dataroot_gt", None, "datasets.train lacks dataroot_gt: name dataroot_gt, dataroot_lq, data"),
        ("datasets__test__dataroot_lq", None, "datasets.test lacks dataroot_lq"),
        (
            "train__G_scheduler_gamma",
            1.5,
            "train.G_scheduler_gamma: Input should be less than or equal to 1; found 1.5",
        ),
        ("train__G_scheduler_eta_min", 1.0, "train.G_scheduler_eta_min must not be above train.G_optimizer_lr"),
        ("train__G_charbonnier_eps", 0, "train.G_charbonnier_eps: Input should be greater than 0; found 0"),
        ("train__fix_iter", 3, "train.fix_iter needs train.fix_keys"),
        ("val__num_frame_testing", 4, "val.num_frame_testing must be datasets.train.num_frame, 3"),
        ("val__num_frame_overlapping", 3, "val.num_frame_overlapping must be less than the 3 frames"),
    ],
)
def test_what_is_wrong_is_named_with_what_to_do(key: str, value: Any, message: str) -> None:
    with pytest.raises(UserError) as error:
        checked(**{key: value})
    assert message in str(error.value)


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(UserError) as error:
        checked(train__totl_iter=3, train__E_decay=2, scale=5)
    assert len(str(error.value).splitlines()) == 3
    with pytest.raises(UserError, match="train.total_iter: Input should be a valid integer; it is missing"):
        complete({"task": "x"})


def test_keys_of_the_original_without_a_meaning_are_listed_once(caplog: pytest.LogCaptureFixture) -> None:
    checked(netG__upscale=1, netG__depths=[8, 4], datasets__test__num_frame=7)
    (line,) = caplog.messages
    assert (
        "netG.upscale, netG.depths (tiny_clip has embed_dim and depth)" in line
        and "datasets.test.num_frame (whole clips" in line
    )


def test_a_key_of_the_original_that_asks_for_nothing_is_taken(caplog: pytest.LogCaptureFixture) -> None:
    opt = checked(datasets__test__num_frame=-1, netG__init_type="default", train__E_bn=False, netG__upscale=None)
    assert "num_frame" not in opt["datasets"]["test"] and not caplog.messages


KAIRS: dict[str, Any] = {  # as KAIR's 006 has them
    "gpu_ids": [0, 1, 2, 3, 4, 5, 6, 7],
    "scale": 1,
    "datasets__train__dataset_type": "VideoRecurrentTrainDataset",
    "datasets__train__dataroot_spike": None,
    "datasets__train__io_backend": {"type": "lmdb"},
    "datasets__train__filename_tmpl": "06d",
    "datasets__train__test_mode": False,
    "datasets__train__dataloader_num_workers": 32,
    "datasets__test__dataset_type": "VideoRecurrentTestDataset",
    "datasets__test__dataroot_spike": None,
    "datasets__test__io_backend": {"type": "disk"},
    "datasets__test__num_frame": -1,
    "netG": {"net_type": "vrt", "window_size": [6, 8, 8], "depths": [8, 8], "init_type": "default"},
    "train__G_charbonnier_eps": 1e-9,
    "train__G_param_strict": True,
    "train__G_regularizer_orthstep": None,
    "val__num_frame_testing": 18,
    "val__size_patch_testing": 192,
}


def test_the_originals_options_are_taken_and_the_network_gets_its_own(caplog: pytest.LogCaptureFixture) -> None:
    opt = checked(**KAIRS)
    assert opt["netG"] == {"net_type": "vrt", "window_size": [6, 8, 8], "depths": [8, 8]}
    assert opt["val"]["num_frame_testing"] == 18 and opt["datasets"]["train"]["num_frame"] == 3
    (line,) = caplog.messages
    assert "train.io_backend, datasets.train.filename_tmpl, datasets.test.io_backend (folders, .lmdb folders" in line
    assert complete(redacted(opt)) == opt


VIMEO = {
    "scale": 4,
    "datasets__train__dataset_type": "VideoRecurrentTrainVimeoDataset",
    "datasets__train__random_reverse": True,
    "datasets__train__pad_sequence": True,
}
RVRT = {"netG": {"net_type": "rvrt", "clip_size": 2, "window_size": [2, 8, 8], "cpu_cache_length": 100}}
MIRRORED = (
    VIMEO | RVRT | {"datasets__train__mirror_sequence": True, "train__fix_iter": -1, "train__fix_keys": ["spynet"]}
)
NOISY = {
    "datasets__train__dataset_type": "VideoRecurrentTrainNonblindDenoisingDataset",
    "datasets__train__sigma_min": 0,
    "datasets__train__sigma_max": 50,
    "datasets__test__sigma": 30,
}
BETWEEN = {
    "datasets__train__dataset_type": "VideoRecurrentTrainVimeoVFIDataset",
    "datasets__train__temporal_scale": 2,
    "datasets__train__color_jitter": True,
    "datasets__test__pad_sequence": False,
    "datasets__test__temporal_scale": 2,
    "train__fix_iter": -1,
}
REDS = {"scale": 4, "datasets__train__val_partition": "REDS4", "val__num_frame_testing": 40}
NO_NOISE = r"datasets.train.dataset_type: .*noise is not added .*: write noisy frames to dataroot_lq\); found .*"
FIFTEEN = {  # option files in KAIR's options/vrt and options/rvrt: what is special in each, and why it is refused
    "vrt/001": (REDS, ""),
    "vrt/002": (REDS, ""),
    "vrt/003": (VIMEO, ""),
    "vrt/004": (VIMEO, ""),
    "vrt/005": ({}, ""),
    "vrt/006": ({}, ""),
    "vrt/007": ({"datasets__train__val_partition": "REDS4"}, ""),
    "vrt/008": (NOISY, NO_NOISE),
    "vrt/009": (BETWEEN, NO_NOISE),
    "rvrt/001": (REDS | RVRT | {"val__num_frame_testing": 0}, ""),
    "rvrt/002": (MIRRORED, ""),
    "rvrt/003": (MIRRORED, ""),
    "rvrt/004": (RVRT, ""),
    "rvrt/005": (RVRT, ""),
    "rvrt/006": (RVRT | NOISY, NO_NOISE),
}


@pytest.mark.parametrize(("changes", "refused"), FIFTEEN.values(), ids=FIFTEEN)
def test_which_of_the_originals_option_files_are_read(changes: dict[str, Any], refused: str) -> None:
    asked = KAIRS | changes
    if refused:
        with pytest.raises(UserError) as error:
            checked(**asked)
        assert re.fullmatch(refused, str(error.value))
        return
    opt = checked(**asked)
    assert opt["netG"]["net_type"] == asked["netG"]["net_type"]
    if "datasets__train__mirror_sequence" in changes:
        with pytest.raises(UserError, match=r"train.num_frame: .* at least 1 \(7 for Vimeo-90K\); found -1"):
            checked(**asked, datasets__train__num_frame=-1)  # as the original has it, which finds no frames then


def test_arguments_of_a_network_may_stand_on_the_command_line() -> None:
    changes = {"netG.depths": "[2, 2]", "netG.act": "relu"}
    opt = complete(video.options(Path("clips"), Path("runs"), netG={"net_type": "my.net:Net"}), changes=changes)
    assert opt["netG"] == {"net_type": "my.net:Net", "depths": [2, 2], "act": "relu"}


def test_a_network_on_the_command_line_takes_the_place_of_the_files(tmp_path: Path) -> None:
    path = tmp_path / "opt.json"
    path.write_text(json.dumps(video.options(Path("clips"), Path("runs"), netG={"net_type": "tiny_clip", "depth": 2})))
    opt = read_options(path, ['netG={"net_type": "my_nets:Net", "width": 4, "name": "a"}'])
    assert opt["netG"] == {"net_type": "my_nets:Net", "width": 4, "name": "a"}
    with pytest.raises(UserError, match='netG={"net_type" is not JSON'):
        read_options(path, ['netG={"net_type"'])
    with pytest.raises(UserError) as error:
        read_options(path, ["netG=tiny_clip"])
    assert str(error.value) == "netG must be a section: { … } (the command line)"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"val__size_patch_testing": 100}, "val.size_patch_testing 100 must be a multiple of the last of netG.window"),
        ({"val__num_frame_overlapping": 18}, "must be less than the 18 frames"),
        ({"scale": 4, "datasets__train__gt_size": 18}, "datasets.train.gt_size 18 must be a multiple of scale 4"),
    ],
)
def test_what_does_not_fit_the_originals_options_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        checked(**KAIRS | changes)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_saved_options_are_an_option_file(path: Path) -> None:
    opt = read_options(path)
    assert complete(json.loads(json.dumps(redacted(opt)))) == opt


def test_the_command_line_outranks_the_file(tmp_path: Path) -> None:
    file = video.write_options(tmp_path / "opt.json", video.options(Path("clips"), Path("runs")))
    opt = read_options(file, ["train.total_iter=3", "gpu_ids=[0, 1]", "train.amp=bf16", "train.E_decay=.5"])
    assert (opt["train"]["total_iter"], opt["gpu_ids"], opt["train"]["amp"]) == (3, [0, 1], "bf16")
    assert opt["train"]["E_decay"] == 0.5 and opt["train"]["G_lossfn_type"] == "charbonnier"
    with pytest.raises(UserError, match=r"train.total_iter: .*; found \"many\" \(the command line\)"):
        read_options(file, ["train.total_iter=many"])
    with pytest.raises(UserError, match="settings must look like key=value, not 'total_iter'"):
        read_options(file, ["total_iter"])


def test_defaults_are_filled_in_and_values_kept() -> None:
    opt = checked(train__E_decay=0.5)
    assert opt["train"]["E_decay"] == 0.5 and opt["train"]["accumulation"] == 1
    assert opt["val"]["num_frame_testing"] == 3 and opt["logging"]["use_tensorboard"] is True


@pytest.mark.parametrize("change", ["logging.wandb_api_key=s3cret", 'logging={"wandb_api_key": "s3cret"}'])
def test_a_secret_on_the_command_line_is_refused(change: str) -> None:
    with pytest.raises(UserError, match="set the environment variable WANDB_API_KEY") as error:
        read_options(FILES[0], [change])
    assert "s3cret" not in str(error.value)


def test_secrets_are_hidden_where_options_are_shown_or_saved() -> None:
    opt = checked(logging__wandb_api_key="s3cret")
    assert "s3cret" not in json.dumps(redacted(opt)) and opt["logging"]["wandb_api_key"] == "s3cret"
    with pytest.raises(UserError) as error:
        checked(logging__wandb_api_kye="s3cret", train__my_API_KEY="s3cret")
    assert "s3cret" not in str(error.value) and re.search("did you mean logging.wandb_api_key", str(error.value))


def test_a_run_that_needs_wandb_is_refused_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(
        UserError, match="use_wandb: Input should be false, or true if wandb is installed .pip install wandb."
    ):
        checked(logging__use_wandb=True)
    assert not checked(logging__use_wandb=False)["logging"]["use_wandb"]
