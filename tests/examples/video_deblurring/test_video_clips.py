"""The data of the video example: real clips of an installed package, what is made of them, and what is read back."""

from __future__ import annotations

import multiprocessing
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import video
from conftest import on_ranks
from deblurring import clips
from deblurring.clips import SHOTS, SPIKES, WINDOW, blur, prepare, shrink, spike_counts
from deblurring.data import Clip, Crops, find_clips
from deblurring.frames import remedy
from deblurring.options import complete
from deblurring.testing import find_test_clips, psnr
from PIL import Image
from shared.program import UserError

import ddpkit

CARPHONE = SHOTS[-1]


def section(root: Path, split: str = "train", **changes: Any) -> dict[str, Any]:
    roots = {f"dataroot_{key}": f"{root}/{split}_{part}" for key, part in video.PARTS.items()}
    settings = {"meta_info_file": None, "cache_data": True, "num_frame": 3, "gt_size": 16}
    settings |= {"interval_list": [1], "random_reverse": False, "val_partition": None}
    settings |= {"pad_sequence": False, "mirror_sequence": False}
    return {**roots, **settings, "use_hflip": True, "use_rot": True, **changes}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The smallest of the real clips, prepared."""
    root = tmp_path_factory.mktemp("prepared") / "clips"
    assert list(prepare(root, [CARPHONE])) == [(CARPHONE, True)]
    return root


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return video.write_clips(tmp_path_factory.mktemp("tiny"))


def test_prepare_writes_the_layout_and_the_known_blur_of_a_real_clip(prepared: Path) -> None:
    names = {path.relative_to(prepared).as_posix() for path in prepared.rglob("*0023.*")}
    parts = {"GT": "png", "GT_blurred": "png", "spike": "npy"}
    assert names == {f"test_{part}/carphone/000023.{suffix}" for part, suffix in parts.items()}
    (clip,) = find_clips(section(prepared, "test"), 3)
    sharp, blurred = (torch.from_numpy(clip.stack(part)).double() for part in "HL")
    assert sharp.shape == (24, 3, 144, 176) and clip.stack("S").shape == (24, 5, 72, 88)
    decibels = [psnr(one, other) for one, other in zip(blurred, sharp, strict=True)]
    assert np.mean(decibels) == pytest.approx(33.46, abs=0.01)  # as measured by another program
    assert clip.stack("S").max() <= SPIKES


def test_prepare_leaves_alone_what_is_complete_and_makes_what_is_not(prepared: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in prepared.rglob("*.*")}
    assert list(prepare(prepared, [CARPHONE])) == [(CARPHONE, False)]
    assert before == {path: path.stat().st_mtime_ns for path in prepared.rglob("*.*")}
    lost = prepared / "test_GT" / "carphone" / "000007.png"
    content = lost.read_bytes()
    lost.unlink()
    assert list(prepare(prepared, [CARPHONE])) == [(CARPHONE, True)]
    assert lost.read_bytes() == content and before.keys() == set(prepared.rglob("*.*"))


def test_prepare_does_not_take_what_another_version_has_made(tmp_path: Path) -> None:
    (tmp_path / "prepared.json").write_text('{"window": 7}')
    with pytest.raises(UserError, match="was made by another version of this program: delete it, or name another with"):
        list(prepare(tmp_path, [CARPHONE]))


def test_prepare_does_not_touch_data_of_others(tmp_path: Path) -> None:
    root = video.write_clips(tmp_path / "gopro")
    before = sorted(root.rglob("*"))
    with pytest.raises(UserError, match="did not make: name another folder with --root"):
        list(prepare(root, [CARPHONE]))
    assert sorted(root.rglob("*")) == before


def test_without_the_package_prepare_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clips, "PACKAGE", "no-such-package")
    with pytest.raises(UserError, match=r"bikes.mp4.*no-such-package.*pip install -e '\.\[examples-video\]'"):
        list(prepare(tmp_path / "clips"))
    assert not (tmp_path / "clips").exists()


def test_the_shots_of_a_video_do_not_overlap_and_training_shares_none_with_the_test() -> None:
    for one in SHOTS:
        for other in SHOTS:
            if one is not other and one.file == other.file:
                assert one.stop <= other.start or other.stop <= one.start
    assert {shot.name for shot in SHOTS if shot.split == "test"} == {"bikes4", "bikes5", "carphone"}


def test_blur_is_the_mean_over_windows_and_shrink_over_pixels() -> None:
    frames = np.random.default_rng(0).integers(0, 256, (12, 8, 6, 3), dtype=np.uint8)
    blurred, small = blur(frames), shrink(frames, 2)
    assert blurred.shape == (2, 8, 6, 3) and small.shape == (12, 4, 3, 3)
    assert np.abs(blurred[1] - frames[5:10].astype(float).mean(0)).max() <= 0.5
    assert np.abs(small[3, 1, 2] - frames[3, 2:4, 4:6].astype(float).mean((0, 1))).max() <= 0.5


def test_spikes_are_those_of_pixels_that_charge_step_by_step() -> None:
    frames = np.random.default_rng(1).integers(0, 256, (11, 4, 6, 3), dtype=np.uint8)
    counts = spike_counts(frames)
    assert counts.shape == (2, WINDOW, 2, 3) and counts.dtype == np.uint8
    for y, x in np.ndindex(2, 3):
        charge = 0.5
        for number, frame in enumerate(frames[:10]):
            red, green, blue = frame[2 * y : 2 * y + 2, 2 * x : 2 * x + 2].reshape(4, 3).mean(0) / 255
            fired = 0
            for _ in range(SPIKES):  # in this time full light charges by 1
                charge += 0.299 * red + 0.587 * green + 0.114 * blue
                if charge >= 1:
                    charge, fired = charge - 1, fired + 1
            assert abs(int(counts[number // WINDOW, number % WINDOW, y, x]) - fired) <= (abs(charge - 1) < 1e-9)


def test_crops_of_all_parts_show_the_same_place_turned_the_same_way(tmp_path: Path) -> None:
    height, width = 24, 32
    place = np.arange(height // 2)[:, None] * 16 + np.arange(width // 2)  # below 256: each place has its own value
    for part, values in {"GT": place, "GT_blurred": place, "spike": place}.items():
        folder = tmp_path / f"train_{part}" / "a"
        folder.mkdir(parents=True)
        for number in range(4):
            if part == "spike":
                np.save(folder / f"{number}.npy", np.stack([values] * WINDOW).astype(np.uint8))
            else:
                rgb = np.kron(values, np.ones((2, 2)))[..., None] * [1, 1, 0] + [0, 0, number]
                Image.fromarray(rgb.astype(np.uint8)).save(folder / f"{number}.png")
    data = section(tmp_path)
    crops = Crops(find_clips(data, 3), data, seed=1)
    assert len(crops) == 2 * 3  # two first frames, and about three crops of 16 x 16 make a frame
    seen = set()
    for epoch in range(8):
        crops.set_epoch(epoch)
        for index in range(len(crops)):
            sample = crops[index]
            assert {part: values.shape for part, values in sample.items()} == {
                "H": (3, 3, 16, 16),
                "L": (3, 3, 16, 16),
                "S": (3, WINDOW, 8, 8),
            }
            assert np.array_equal(sample["H"], sample["L"])
            for t in range(3):
                assert np.array_equal(sample["H"][t, 0, ::2, ::2], sample["S"][t, 2])
                assert (sample["H"][t, 2] == index // 3 + t).all()  # consecutive frames
            corner = sample["S"][0, 0].astype(int)
            seen.add((corner[0, 1] - corner[0, 0], corner[1, 0] - corner[0, 0]))
    steps = {(across, down) for across in (1, -1) for down in (16, -16)}
    assert seen == steps | {(down, across) for across, down in steps}  # all eight ways to turn a square


def test_a_sample_depends_on_seed_epoch_and_index_alone(tiny: Path) -> None:
    data = section(tiny)
    clips, again = (find_clips(data | {"cache_data": cached}, 3) for cached in (True, False))
    one, other = Crops(clips, data, seed=5), Crops(again, data, seed=5)
    np.random.seed(0)
    first = one[3]
    assert all(np.array_equal(first[part], other[3][part]) for part in first)  # read from the files each time
    other.set_epoch(1)
    assert not np.array_equal(first["H"], other[3]["H"])
    assert not np.array_equal(first["H"], Crops(clips, data, seed=6)[3]["H"])


def test_only_the_clips_that_the_list_names_are_read(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("b 4 (40,32,3) 0\n")
    (clip,) = find_clips(section(tiny, meta_info_file=str(tmp_path / "list.txt")), 3)
    assert clip.name == "b" and len(clip) == 4 and clip.parts == ("H", "L", "S")
    (tmp_path / "list.txt").write_text("b\n\n")
    (clip,) = find_clips(section(tiny, meta_info_file=str(tmp_path / "list.txt"), dataroot_spike=None), 3)
    assert clip.parts == ("H", "L")


def test_a_clip_that_is_linked_twice_counts_twice(tiny: Path, tmp_path: Path) -> None:
    for part in ("GT", "GT_blurred"):
        (tmp_path / f"train_{part}").mkdir()
        for name, clip in (("a", "a"), ("b", "b"), ("b_again", "b")):
            (tmp_path / f"train_{part}" / name).symlink_to(tiny / f"train_{part}" / clip)
    data = section(tmp_path, dataroot_spike=None)
    drawn = [clip.name for clip, _ in Crops(find_clips(data, 3), data, seed=0).places]
    assert drawn.count("b_again") == drawn.count("b") > 0 and "a" in drawn


def frames_of(clips: list[Clip]) -> dict[str, list[np.ndarray]]:
    return {clip.name: [clip.stack(part) for part in "HL"] for clip in clips}


def equal(one: dict[str, list[np.ndarray]], other: dict[str, list[np.ndarray]]) -> bool:
    return one.keys() == other.keys() and all(
        np.array_equal(a, b) for name in one for a, b in zip(one[name], other[name], strict=True)
    )


def as_gopro(tiny: Path, root: Path) -> dict[str, str]:
    """As it is downloaded: one root, and a subfolder of each clip for sharp and for blurred frames."""
    for clip in "ab":
        shutil.copytree(tiny / "train_GT" / clip, root / clip / "sharp")
        shutil.copytree(tiny / "train_GT_blurred" / clip, root / clip / "blur")
        (root / clip / "blur_gamma").mkdir()
    return {"dataroot_gt": str(root), "dataroot_lq": str(root)}


def as_dvd(tiny: Path, root: Path) -> dict[str, str]:
    """As it is downloaded, but for the loss of JPEG."""
    for clip in "ab":
        shutil.copytree(tiny / "train_GT" / clip, root / clip / "GT")
        shutil.copytree(tiny / "train_GT_blurred" / clip, root / clip / "input")
        for file in (root / clip).rglob("*.png"):
            with Image.open(file) as image:
                image.save(file.with_suffix(".JPG"), "BMP")
            file.unlink()
    return {"dataroot_gt": str(root), "dataroot_lq": str(root)}


def as_lmdb(tiny: Path, root: Path) -> dict[str, str]:
    pytest.importorskip("lmdb")
    root.mkdir()
    for name in ("train_GT", "train_GT_blurred"):
        video.write_lmdb(tiny / name, root / f"{name}.lmdb")
    return {"dataroot_gt": str(root / "train_GT.lmdb"), "dataroot_lq": str(root / "train_GT_blurred.lmdb")}


@pytest.mark.parametrize("layout", [as_gopro, as_dvd, as_lmdb])
def test_other_layouts_hold_the_same_clips(tiny: Path, tmp_path: Path, layout: Any) -> None:
    expected = frames_of(find_clips(section(tiny, dataroot_spike=None), 3))
    roots = layout(tiny, tmp_path / "data")
    (tmp_path / "list.txt").write_text("a 6 (32,48,3) 000000\r\nb 4 (40,32,3) 000000\r\n")
    for changes in ({}, {"meta_info_file": str(tmp_path / "list.txt")}, {"cache_data": False}):
        data = section(tiny, dataroot_spike=None) | roots | changes
        clips = find_clips(data, 3)
        assert equal(frames_of(clips), expected)
        crops = Crops(clips, data, seed=1)
        loader = torch.utils.data.DataLoader(crops, batch_size=8, num_workers=1)  # in another process, too
        assert next(iter(loader))["H"].shape == (8, 3, 3, 16, 16)


def test_a_deep_frame_of_a_data_base_is_refused(tmp_path: Path) -> None:
    root = video.write_clips(tmp_path / "clips")
    deepen(root / "train_GT/a/000003.png")
    (clip, _) = find_clips(section(root, dataroot_spike=None) | as_lmdb(root, tmp_path / "data"), 3)
    with pytest.raises(UserError, match="a/000003 has pixels of more than 8 bits"):
        clip.stack("H")


def test_a_data_base_that_lacks_something_is_named(tiny: Path, tmp_path: Path) -> None:
    data = section(tiny, dataroot_spike=None) | as_lmdb(tiny, tmp_path / "data")
    listed = tmp_path / "data/train_GT.lmdb/meta_info.txt"
    lines = listed.read_text()
    listed.write_text(lines.replace("a/000000.png", "a/000009.png"))
    with pytest.raises(UserError, match="train_GT_blurred.lmdb/a and .*train_GT.lmdb/a must have the same names"):
        find_clips(data, 3)
    for name in ("train_GT", "train_GT_blurred"):
        (tmp_path / f"data/{name}.lmdb/meta_info.txt").write_text(lines + "b/000009.png (40,32,3) 1\n")
    clips = find_clips(data, 3)
    with pytest.raises(UserError, match="there is no b/000009 in .*train_GT.lmdb, though meta_info.txt lists it"):
        clips[1].frame("H", 4)
    listed.unlink()
    with pytest.raises(UserError, match="train_GT.lmdb lacks the list of its pictures"):
        find_clips(data, 3)


def test_frames_that_were_cut_into_pieces_are_clips_of_pieces(tiny: Path, tmp_path: Path) -> None:
    for part in ("GT", "GT_blurred"):
        for file in sorted((tiny / f"train_{part}/a").iterdir()):
            folder = tmp_path / f"train_{part}" / "a"
            folder.mkdir(parents=True, exist_ok=True)
            with Image.open(file) as image:
                for piece, left in enumerate((0, 16, 32), 1):
                    image.crop((left, 0, left + 16, 32)).save(folder / f"{file.stem}_s{piece:03d}.png")
    (tmp_path / "list.txt").write_text("a 6 (32,48,3) 0")
    whole = find_clips(section(tiny, dataroot_spike=None), 3)[0].stack("L")
    clips = find_clips(section(tmp_path, dataroot_spike=None, meta_info_file=str(tmp_path / "list.txt")), 3)
    assert [(clip.name, len(clip), clip.names[5]) for clip in clips] == [(f"a_s00{i}", 6, "000005") for i in (1, 2, 3)]
    assert np.array_equal(np.concatenate([clip.stack("L") for clip in clips], 3), whole)


def test_a_list_says_where_a_clip_begins_and_a_partition_leaves_clips_out(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("a 3 (32,48,3) 000002\n")
    (clip,) = find_clips(section(tiny, meta_info_file=str(tmp_path / "list.txt")), 3)
    assert clip.names == ["000002", "000003", "000004"]
    for part in ("GT", "GT_blurred"):
        for name in ("000", "001", "240"):
            shutil.copytree(tiny / f"train_{part}/b", tmp_path / f"train_{part}" / name)
    for partition, left in (("REDS4", ["001", "240"]), ("official", ["000", "001"]), ("", ["000", "001", "240"])):
        clips = find_clips(section(tmp_path, dataroot_spike=None, val_partition=partition), 3)
        assert [clip.name for clip in clips] == left


def test_samples_may_skip_frames_and_go_backwards(tiny: Path) -> None:
    plain, clips = section(tiny, use_hflip=False, use_rot=False, num_frame=2), find_clips(section(tiny), 3)
    other = plain | {"interval_list": [3], "random_reverse": True}
    one, two = Crops(clips, plain, seed=0), Crops(clips, other, seed=0)
    directions = set()
    for index in range(len(two)):
        clip, first = two.places[index]
        first = min(first, len(clip) - 4)
        sample = {part: clip.stack(part) for part in clip.parts}
        top, left = _corner(one[index]["L"][0], clip.stack("L")[one.places[index][1]])
        cut = {part: sample[part][[first, first + 3], :, top : top + 16, left : left + 16] for part in "HL"}
        backwards = not np.array_equal(two[index]["L"], cut["L"])
        directions.add(backwards)
        assert np.array_equal(two[index]["H"], cut["H"][::-1] if backwards else cut["H"])
        spikes = sample["S"][[first, first + 3], :, top // 2 : top // 2 + 8, left // 2 : left // 2 + 8]
        assert np.array_equal(two[index]["S"], spikes[::-1, ::-1] if backwards else spikes)
    assert directions == {False, True}


@pytest.mark.parametrize("lmdb", [False, True])
def test_clips_of_vimeo_are_padded_or_mirrored_in_time(tiny: Path, tmp_path: Path, lmdb: bool) -> None:
    for part in ("GT", "GT_blurred"):
        folder = tmp_path / f"train_{part}" / "00001/0007"
        folder.mkdir(parents=True)
        for number, file in enumerate(sorted((tiny / f"train_{part}/a").iterdir()), 1):
            shutil.copy(file, folder / f"im{number}.png")
        if lmdb:
            pytest.importorskip("lmdb")
            video.write_lmdb(tmp_path / f"train_{part}", tmp_path / f"train_{part}.lmdb")
    (tmp_path / "list.txt").write_text("00001/0007 6 (32,48,3)\n")
    data = section(tmp_path, dataroot_spike=None, meta_info_file=str(tmp_path / "list.txt"), num_frame=6)
    data |= {key: f"{data[key]}.lmdb" for key in ("dataroot_gt", "dataroot_lq") if lmdb} | {"random_reverse": True}
    clips = find_clips(data, 6)
    assert [(clip.name, clip.names[-1]) for clip in clips] == [("00001/0007", "im6")]
    plain, padded, mirrored = (
        Crops(clips, data | changes, seed=0) for changes in ({}, {"pad_sequence": True}, {"mirror_sequence": True})
    )
    for index, sample in enumerate(plain):
        for part in "HL":
            frames = sample[part]
            assert np.array_equal(padded[index][part], np.concatenate([frames, frames[-1:]]))
            assert np.array_equal(mirrored[index][part], np.concatenate([frames, frames[::-1]]))
    assert len({sample["L"].tobytes() for sample in plain}) > 1


def _corner(crop: np.ndarray, frame: np.ndarray) -> tuple[int, int]:
    """Where a crop of 16 x 16 was cut out of a frame."""
    for top in range(0, frame.shape[1] - 15, 2):
        for left in range(0, frame.shape[2] - 15, 2):
            if np.array_equal(frame[:, top : top + 16, left : left + 16], crop):
                return top, left
    raise AssertionError("it is no part of the frame")


def test_at_a_scale_both_crops_show_the_same_place(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for number in range(3):
        small = rng.integers(0, 256, (12, 16, 3), dtype=np.uint8)
        for part, frame in (("GT", small.repeat(3, 0).repeat(3, 1)), ("GT_blurred", small)):
            (tmp_path / f"train_{part}/a").mkdir(parents=True, exist_ok=True)
            Image.fromarray(frame).save(tmp_path / f"train_{part}/a/{number}.png")
    data = section(tmp_path, dataroot_spike=None, gt_size=18)
    with pytest.raises(UserError, match=r"GT_blurred/a/0.png holds \(12, 16, 3\), but must hold \(36, 48, 3\)"):
        find_clips(data, 3)
    (alone,) = find_clips(data | {"dataroot_gt": None}, 3, scale=3)
    assert alone.parts == ("L",) and alone.shapes["L"] == (12, 16, 3) and (alone.height, alone.width) == (36, 48)
    crops = Crops(find_clips(data, 3, scale=3), data, seed=0, scale=3)
    for index in range(len(crops)):
        sample = crops[index]
        assert sample["L"].shape == (3, 3, 6, 6)
        assert np.array_equal(sample["L"].repeat(3, 2).repeat(3, 3), sample["H"])


def read_twice(root: Path) -> tuple[int, bool, list[str]]:
    """What a rank finds when the other one has read all frames: how many are kept, and the names of files for that."""
    data, usual = section(root), tempfile.tempdir
    tempfile.tempdir = str(root.parent)
    clips = find_clips(data, 3)
    tempfile.tempdir = usual
    if ddpkit.get_rank() == 0:
        before = frames_of(clips)
    ddpkit.barrier()
    kept = sum(clip.cache.get(i) is not None for clip in clips[:1] for i in range(30))
    if ddpkit.get_rank() == 1:
        before = frames_of(find_clips(data | {"cache_data": False}, 3))
        shutil.rmtree(root)  # nobody needs the files any more
    ddpkit.barrier()
    again = equal(before, frames_of(clips))
    files = [path.name for path in root.parent.iterdir()]
    return kept, again, files


def test_what_one_rank_has_read_is_there_for_all(tmp_path: Path) -> None:
    root = video.write_clips(tmp_path / "clips")
    for found in on_ranks(read_twice, 2, root):
        assert found == (2 * 6 + 2 * 4, True, [])  # sharp and blurred ones: nobody has read spikes


def read_elsewhere(crops: Crops, root: Path) -> None:
    shutil.rmtree(root)
    assert crops[0]["H"].shape == (3, 3, 16, 16)


def test_a_loading_process_that_is_not_forked_has_the_cache_too(tmp_path: Path) -> None:
    data = section(video.write_clips(tmp_path / "clips"))
    clips = find_clips(data, 3)
    for clip in clips:
        for part in clip.parts:
            clip.stack(part)
    process = multiprocessing.get_context("forkserver").Process(
        target=read_elsewhere, args=(Crops(clips, data, seed=0), tmp_path / "clips")
    )
    process.start()
    process.join()
    assert process.exitcode == 0


def test_frames_beyond_the_room_are_read_each_time(tiny: Path, monkeypatch: Any, caplog: Any) -> None:
    usage = shutil.disk_usage(tiny)._replace(free=40_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    clips = find_clips(section(tiny), 3)
    assert "has room for 19 % of the decoded frames; set TMPDIR to use another folder" in caplog.text
    expected = frames_of(find_clips(section(tiny, cache_data=False), 3))
    for _ in range(2):
        assert equal(frames_of(clips), expected)
    kept = [clips[0].cache.get(i) is not None for i in range(6)]
    assert kept == [True] * 4 + [False] * 2


def lose(path: Path) -> None:
    path.unlink()


def damage(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:40])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def narrow(path: Path) -> None:
    Image.new("RGB", (46, 32)).save(path)


def deepen(path: Path) -> None:
    Image.fromarray(np.full((32, 48), 700, np.uint16)).save(path)


def convert(path: Path) -> None:
    path.rename(path.with_suffix(".tif"))


def double(path: Path) -> None:
    shutil.copy(path, path.with_suffix(".JPG"))


@pytest.mark.parametrize(
    ("change", "file", "message"),
    [
        (lose, "train_GT/a/000002.png", "train_GT_blurred/a and .*train_GT/a must have the same names, but 000002"),
        (lose, "train_spike/b/000003.npy", "train_spike/b and .*train_GT/b must have the same names, but 000003"),
        (damage, "train_GT_blurred/a/000001.png", "cannot read .*train_GT_blurred/a/000001.png"),
        (damage, "train_spike/a/000001.npy", "cannot read .*train_spike/a/000001.npy"),
        (empty, "train_spike/a/000001.npy", "cannot read .*train_spike/a/000001.npy"),
        (narrow, "train_GT_blurred/a/000001.png", r"a/000001.png holds \(32, 46, 3\), but must hold \(32, 48, 3\)"),
        (deepen, "train_GT/a/000000.png", r"a/000000.png has pixels of more than 8 bits .*I.*: convert it to 8 bits"),
        (deepen, "train_GT_blurred/a/000003.png", "a/000003.png has pixels of more than 8 bits .*: convert it to 8"),
        (convert, "train_GT/b/000003.png", "b holds 3 frames and 1 more that would be ignored, 000003.tif: each fr"),
        (double, "train_GT/b/000001.png", "b holds 4 frames and 1 more that would be ignored, 000001.(JPG|png): "),
    ],
)
def test_frames_that_are_missing_or_do_not_fit_are_named(tmp_path: Path, change: Any, file: str, message: str) -> None:
    root = video.write_clips(tmp_path)
    change(root / file)
    with pytest.raises(UserError, match=message):
        for clip in find_clips(section(root), 3):
            for part in clip.parts:
                clip.stack(part)


def test_other_files_beside_frames_are_none(tmp_path: Path) -> None:
    root = video.write_clips(tmp_path)
    for name in ("Thumbs.db", "notes.txt", ".DS_Store", "000002.json"):
        (root / "train_GT/a" / name).touch()
    assert [len(clip) for clip in find_clips(section(root), 3)] == [6, 4]


def test_frames_are_in_the_order_of_their_numbers_and_a_gap_is_told(tmp_path: Path, caplog: Any) -> None:
    root = video.write_clips(tmp_path)
    for part in video.PARTS.values():
        for path in sorted((root / f"train_{part}/a").iterdir()):
            path.rename(path.with_stem(str(int(path.stem) + 7)))
    first, _ = find_clips(section(root), 3)
    assert first.names == ["7", "8", "9", "10", "11", "12"] and not caplog.messages
    for part in video.PARTS.values():
        next((root / f"train_{part}/a").glob("9.*")).unlink()
    find_clips(section(root), 3)
    assert caplog.messages == ["frames seem to be missing in 1 of 2 clips: a after 8"]


def test_a_test_frame_that_is_not_whole_is_found_at_the_start(tmp_path: Path) -> None:
    root = video.write_clips(tmp_path)
    opt = complete(video.options(root, tmp_path))
    assert len(find_test_clips(opt)) == 3
    path = root / "test_GT/y/000002.png"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UserError, match="cannot read .*test_GT/y/000002.png"):
        find_test_clips(opt)
    with Image.open(root / "test_GT/y/000001.png") as image:
        image.save(path, "JPEG")
    assert len(find_test_clips(opt)) == 3
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UserError, match="cannot read .*test_GT/y/000002.png"):
        find_test_clips(opt)


def test_frames_that_have_no_ssim_are_refused_at_the_start(tmp_path: Path) -> None:
    root = video.write_clips(tmp_path)
    for path in root.glob("test_GT*/y/*.png"):
        with Image.open(path) as image:
            small = image.crop((0, 0, image.width, 10))
        small.save(path)
    opt = complete(video.options(root, tmp_path, **video.RGB))
    with pytest.raises(UserError, match="clip y has frames of 24 x 10, but SSIM averages over 11 x 11 pixels"):
        find_test_clips(opt)


def test_odd_frames_are_for_networks_that_take_them(tmp_path: Path) -> None:
    root = video.write_clips(tmp_path)
    for path in root.glob("*_GT*/*/*.png"):
        with Image.open(path) as image:
            odd = image.crop((0, 0, image.width - 1, image.height - 1))
        odd.save(path)
    with pytest.raises(UserError, match="a has frames of 47 x 31: with spikes .* multiples of 2: crop or pad the fra"):
        find_clips(section(root), 3)
    data = section(root, dataroot_spike=None)
    assert Crops(find_clips(data, 3), data, seed=0)[0]["H"].shape == (3, 3, 16, 16)
    with pytest.raises(UserError, match="x has frames of 31 x 23: with tiny_clip, width and height must be multiples"):
        find_test_clips(complete(video.options(root, tmp_path, **video.RGB)))
    opt = complete(video.options(root, tmp_path, **video.RGB, netG={"net_type": "somebodys.nets:Net", "width": 4}))
    assert find_test_clips(opt)[0].shapes["L"] == (23, 31, 3)


def test_a_folder_too_deep_is_named(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="train_GT/a itself holds 6 frames: name its parent"):
        find_clips(section(tiny, dataroot_gt=str(tiny / "train_GT/a")), 3)
    as_gopro(tiny, tmp_path)
    roots = dict.fromkeys(("dataroot_gt", "dataroot_lq"), str(tmp_path / "a"))
    with pytest.raises(UserError, match="a/blur would be the sharp and the blurred frames: name two folders, or the"):
        find_clips(section(tiny, dataroot_spike=None, **roots), 3)


@pytest.mark.parametrize(("change", "message"), [(empty, "cannot read .*a/000003.png"), (narrow, "a/000003.png holds")])
def test_a_bad_frame_that_is_not_kept_in_memory_is_an_error_of_one_rank(
    tmp_path: Path, change: Any, message: str
) -> None:
    data = section(video.write_clips(tmp_path), cache_data=False)
    change(tmp_path / "train_GT_blurred/a/000003.png")
    crops = Crops(find_clips(data, 3), data, seed=0)
    crops[0]
    with pytest.raises(UserError, match=message):
        crops[len(crops) // 3]


def test_missing_data_is_named_with_the_way_to_make_it(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no folder .*nowhere/train_GT \(dataroot_gt\): name a folder that"):
        find_clips(section(tmp_path / "nowhere"), 3)
    assert remedy(clips.ROOT / "train_GT").startswith("run prepare.py")
    (tmp_path / "list.txt").write_text("c 4 (40,32,3) 0\n")
    with pytest.raises(UserError, match=r"no .png or .jpg or .* files in .*train_GT/c"):
        find_clips(section(tiny, meta_info_file=str(tmp_path / "list.txt")), 3)
    for line, message in (
        ("b 5 (40,32,3) 0", "train_GT/b has 4 frames, but .* says 5"),
        ("b four", "cannot read meta"),
    ):
        (tmp_path / "list.txt").write_text(line)
        with pytest.raises(UserError, match=message):
            find_clips(section(tiny, meta_info_file=str(tmp_path / "list.txt")), 3)
    with pytest.raises(UserError, match="train_GT/b has 4 frames, but at least 5 are needed"):
        find_clips(section(tiny), 5)
    data = section(tiny, gt_size=34)
    with pytest.raises(UserError, match="clip a has frames of 48 x 32, smaller than gt_size 34"):
        Crops(find_clips(data, 3), data, seed=0)
