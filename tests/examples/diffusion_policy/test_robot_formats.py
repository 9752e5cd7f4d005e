"""Demonstrations in the formats of others, written by the formats' own libraries, are read directly."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from robot import train
from robot.config import read_config
from robot.environments import Learned
from robot.formats import open_format
from robot.policy import DiffusionPolicy
from robot.samples import Samples, make_loader, scan, write_shard
from shared.program import UserError
from shared.settings import nested
from test_robot_parts import SMALL
from torch.utils.data import default_collate

import ddpkit

av = pytest.importorskip("av")
h5py = pytest.importorskip("h5py")
pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
zarr = pytest.importorskip("zarr")

LENGTHS = (6, 4, 5)
CAMERA = "observation.images.front"
Episodes = list[dict[str, np.ndarray]]


def make_episodes() -> Episodes:
    """Three episodes; a picture's brightness says which episode and step it is from, left and right."""
    rng = np.random.default_rng(0)
    episodes = []
    for number, length in enumerate(LENGTHS):
        frames = np.zeros((length, 32, 48, 3), np.uint8)
        frames[:, :, :24] = 60 + 60 * number
        frames[:, :, 24:] = (30 * np.arange(length) + 20)[:, None, None, None]
        episode = {"state": rng.normal(size=(length, 3)), "goal": rng.normal(size=(length, 2))}
        episode |= {"actions": rng.uniform(0, 512, (length, 2)), "frames": frames}
        episodes.append(episode)
    return episodes


def write_shards(folder: Path, episodes: Episodes) -> dict[str, str]:
    path = folder / "shards"
    path.mkdir()
    for number, episode in enumerate(episodes):
        arrays = {"observations": episode["state"], "goal": episode["goal"], "actions": episode["actions"]}
        write_shard(path / f"episodes-{number}.npz", "", [arrays | {"camera": episode["frames"]}])
    return {"path": str(path), "low_dim": "[observations, goal]", "rgb": "[camera]"}


def write_robomimic(folder: Path, episodes: Episodes) -> dict[str, str]:
    path = folder / "demonstrations.hdf5"
    with h5py.File(path, "w") as file:
        data = file.create_group("data")
        data.attrs["env_args"] = json.dumps({"env_name": "Lift", "type": 1, "env_kwargs": {}})
        data.attrs["total"] = sum(LENGTHS)
        for number, episode in enumerate(episodes):
            demo = data.create_group(f"demo_{number}")
            demo.attrs["num_samples"] = len(episode["actions"])
            demo.create_dataset("actions", data=episode["actions"])
            demo.create_dataset("obs/language_raw", data=[b"pick up the block"] * len(episode["actions"]))
            demo.create_dataset("states", data=np.zeros((len(episode["actions"]), 7)))
            for name, key in (("robot0_eef_pos", "state"), ("object", "goal"), ("agentview_image", "frames")):
                demo.create_dataset(f"obs/{name}", data=episode[key], compression="gzip")
                demo.create_dataset(f"next_obs/{name}", data=episode[key])
        file.create_dataset("mask/train", data=np.array([b"demo_0", b"demo_2"]))
        file.create_dataset("mask/valid", data=np.array([b"demo_1"]))
    return {"path": str(path), "low_dim": "[robot0_eef_pos, object]", "rgb": "[agentview_image]"}


def write_replay_buffer(folder: Path, episodes: Episodes, suffix: str = ".zarr") -> dict[str, str]:
    path = folder / f"buffer{suffix}"
    store: Any = str(path)
    if suffix.endswith(".zip"):
        store = zarr.storage.ZipStore(str(path), mode="w")
    format_2 = {"zarr_format": 2} if int(zarr.__version__.split(".")[0]) >= 3 else {}
    root = zarr.open_group(store, mode="w", **format_2)
    data, meta = root.create_group("data"), root.create_group("meta")
    for name, key in (("state", "state"), ("goal", "goal"), ("action", "actions"), ("img", "frames")):
        values = np.concatenate([episode[key] for episode in episodes]).astype(np.float32)  # pictures, too
        data.create_array(name, data=values, chunks=(5, *values.shape[1:]))
    meta.create_array("episode_ends", data=np.cumsum(LENGTHS))
    if suffix.endswith(".zip"):
        store.close()
    return {"path": str(path), "low_dim": "[state, goal]", "rgb": "[img]"}


def write_zipped_replay_buffer(folder: Path, episodes: Episodes) -> dict[str, str]:
    return write_replay_buffer(folder, episodes, ".zarr.zip")


def encode(path: Path, frames: np.ndarray, fps: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as video:
        stream = video.add_stream("libx264", rate=fps, options={"g": "4", "crf": "10"})
        stream.height, stream.width, stream.pix_fmt = 32, 48, "yuv420p"
        for frame in frames:
            video.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        video.mux(stream.encode())


def write_lerobot(
    folder: Path, episodes: Episodes, version: str, pictures: str, places: dict[str, str]
) -> dict[str, str]:
    """The tables and `meta/info.json`; what else there is differs between the versions."""
    path, fps = folder / "lerobot", 10
    (path / "meta").mkdir(parents=True)
    shapes = {"observation.state": [3], "observation.environment_state": [2], "action": [2]}
    features: dict[str, Any] = {name: {"dtype": "float32", "shape": shape} for name, shape in shapes.items()}
    features[CAMERA] = {"dtype": pictures, "shape": [32, 48, 3], "names": ["height", "width", "channels"]}
    features |= {name: {"dtype": "int64", "shape": [1]} for name in ("frame_index", "episode_index", "index")}
    info = {"codebase_version": version, "fps": fps, "chunks_size": 2, "features": features} | places
    (path / "meta" / "info.json").write_text(json.dumps(info))
    tables = []
    for number, episode in enumerate(episodes):
        columns: dict[str, Any] = {
            "observation.state": episode["state"].astype(np.float32).tolist(),
            "observation.environment_state": episode["goal"].astype(np.float32).tolist(),
            "action": episode["actions"].astype(np.float32).tolist(),
            "frame_index": list(range(LENGTHS[number])),
            "episode_index": [number] * LENGTHS[number],
        }
        if pictures == "image":
            columns[CAMERA] = [{"bytes": as_png(frame), "path": None} for frame in episode["frames"]]
        tables.append(pyarrow.table(columns))
    if version.startswith("v2"):
        lines = [json.dumps({"episode_index": n, "tasks": [""], "length": LENGTHS[n]}) for n in range(3)]
        (path / "meta" / "episodes.jsonl").write_text("\n".join(lines) + "\n")
        for number, table in enumerate(tables):
            chunk = f"chunk-{number // 2:03d}"
            (path / "data" / chunk).mkdir(parents=True, exist_ok=True)
            parquet.write_table(table, path / "data" / chunk / f"episode_{number:06d}.parquet")
            if pictures == "video":
                film = path / "videos" / chunk / CAMERA / f"episode_{number:06d}.mp4"
                encode(film, episodes[number]["frames"], fps)
    else:
        for part in ("data", "meta/episodes"):
            (path / part / "chunk-000").mkdir(parents=True)
        parquet.write_table(pyarrow.concat_tables(tables[:2]), path / "data/chunk-000/file-000.parquet")
        parquet.write_table(tables[2], path / "data/chunk-000/file-001.parquet")
        films = [np.concatenate([episode["frames"] for episode in episodes[:2]]), episodes[2]["frames"]]
        for number, film in enumerate(films):
            encode(path / "videos" / CAMERA / "chunk-000" / f"file-{number:03d}.mp4", film, fps)
        about = {
            "episode_index": [0, 1, 2],
            "length": [*LENGTHS],
            "data/chunk_index": [0, 0, 0],
            "data/file_index": [0, 0, 1],
            f"videos/{CAMERA}/chunk_index": [0, 0, 0],
            f"videos/{CAMERA}/file_index": [0, 0, 1],
            f"videos/{CAMERA}/from_timestamp": [0.0, LENGTHS[0] / fps, 0.0],
        }
        parquet.write_table(pyarrow.table(about), path / "meta/episodes/chunk-000/file-000.parquet")
    numbers = "[observation.state, observation.environment_state]"
    return {"path": str(path), "low_dim": numbers, "rgb": f"[{CAMERA}]"}


def as_png(frame: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(frame).save(file, "png")
    return file.getvalue()


VERSION_2 = {
    "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
    "video_path": "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
}
VERSION_3 = {
    "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
    "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
}


def write_lerobot_2(folder: Path, episodes: Episodes) -> dict[str, str]:
    return write_lerobot(folder, episodes, "v2.1", "video", VERSION_2)


def write_lerobot_2_with_pictures(folder: Path, episodes: Episodes) -> dict[str, str]:
    return write_lerobot(folder, episodes, "v2.1", "image", VERSION_2)


def write_lerobot_3(folder: Path, episodes: Episodes) -> dict[str, str]:
    return write_lerobot(folder, episodes, "v3.0", "video", VERSION_3)


WRITERS = [
    write_shards,
    write_robomimic,
    write_replay_buffer,
    write_zipped_replay_buffer,
    write_lerobot_2,
    write_lerobot_2_with_pictures,
    write_lerobot_3,
]
Writer = Callable[[Path, Episodes], dict[str, str]]


def arguments(written: dict[str, str], *more: str) -> list[str]:
    modalities = [f"observation.modalities.obs.{name}={written[name]}" for name in ("low_dim", "rgb")]
    horizons = ["algo.horizon.action_horizon=2", "algo.horizon.prediction_horizon=4"]
    return [f"train.data_path={written['path']}", *modalities, *horizons, *more]


@pytest.mark.parametrize("write", WRITERS)
def test_samples_are_what_was_written(write: Writer, tmp_path: Path) -> None:
    episodes = make_episodes()
    config = read_config(arguments(write(tmp_path, episodes)))
    index = scan(config)
    assert [episode.steps for episode in index.folders[0]] == [*LENGTHS] and [*index.picture_sizes.values()] == [
        (32, 48)
    ]
    seen = np.concatenate([np.concatenate([episode["state"], episode["goal"]], 1) for episode in episodes])
    done = np.concatenate([episode["actions"] for episode in episodes])
    assert index.statistics.mean == pytest.approx(seen.mean(0), abs=1e-5)
    assert index.statistics.std == pytest.approx(seen.std(0), rel=1e-4)
    assert index.statistics.low == pytest.approx(done.min(0), rel=1e-6)
    assert index.statistics.high == pytest.approx(done.max(0), rel=1e-6)

    samples = Samples(index.folders, index.entries, length=sum(LENGTHS), weights=None, config=config)
    (camera,) = index.entries.cameras
    found = set()
    for number in range(sum(LENGTHS)):
        episode, step = samples.place(number)
        sample, which = samples[number], LENGTHS.index(episode.steps)
        steps = [max(step - 1, 0), step]
        assert sample["observations"][:, :3] == pytest.approx(episodes[which]["state"][steps], abs=1e-6)
        planned = np.arange(step - 1, step + 3).clip(0, episode.steps - 1)
        assert sample["actions"] == pytest.approx(episodes[which]["actions"][planned], rel=1e-6)
        assert sample[camera].shape == (2, 32, 48, 3) and sample[camera].dtype == np.uint8
        means = [sample[camera][:, :, part].mean((1, 2, 3)) for part in (slice(0, 20), slice(28, 48))]
        assert means[0] == pytest.approx(np.full(2, 60 + 60 * which), abs=4)  # videos are not exact
        assert means[1] == pytest.approx(30 * np.array(steps) + 20, abs=4)
        found.add((which, step))
    assert len(found) == sum(LENGTHS)


@pytest.mark.parametrize(
    ("crop", "image_dim", "problem"),
    [
        ((33, 48), None, "33 x 48 (height x width) do not fit into pictures of 32 x 48"),
        ((32, 49), None, "do not fit into pictures of 32 x 48"),
        (
            (29, 40),
            [28, 40],
            "do not fit into pictures of 28 x 40: lower observation.encoder.rgb.obs_randomizer_kwargs",
        ),
        ((60, 90), [64, 96], ""),
    ],
)
def test_crops_must_fit_into_pictures(
    crop: tuple[int, int], image_dim: list[int] | None, problem: str, tmp_path: Path
) -> None:
    randomizer = "observation.encoder.rgb.obs_randomizer_"
    more = [f"{randomizer}class=CropRandomizer", f"observation.image_dim={json.dumps(image_dim)}"]
    more += [f"{randomizer}kwargs.crop_height={crop[0]}", f"{randomizer}kwargs.crop_width={crop[1]}"]
    config = read_config(arguments(write_robomimic(tmp_path, make_episodes()), *more))
    if problem:
        with pytest.raises(UserError, match=re.escape(problem)):
            scan(config)
        return
    index = scan(config)
    sample = Samples(index.folders, index.entries, length=1, weights=None, config=config)[0]
    assert sample[index.entries.cameras[0]].shape == (2, *crop, 3)


def test_hdf5_episodes_may_have_any_names(tmp_path: Path) -> None:
    path = write_robomimic(tmp_path, make_episodes())["path"]
    with h5py.File(path, "r+") as file:
        for old, new in zip(list(file["data"]), ["take 10, good", "take 2", "kitchen"], strict=False):
            file["data"].move(old, new)
        names = list(file["data"])
    found = [episode.name for episode in scan(read_config([f"train.data_path={path}"])).folders[0]]
    assert sorted(found) == sorted(names) and found.index("take 2") < found.index("take 10, good")


@pytest.mark.parametrize("write", [write_robomimic, write_lerobot_2])
def test_numbers_are_all_that_the_format_has_if_none_are_named(write: Writer, tmp_path: Path) -> None:
    path = write(tmp_path, make_episodes())["path"]
    index = scan(read_config([f"train.data_path={path}"]))
    assert len(index.statistics.mean) == 5 and not index.entries.cameras and not index.picture_sizes


def test_a_replay_buffers_state_is_observed_if_nothing_is_named_or_its_arrays_are_listed(tmp_path: Path) -> None:
    path = write_replay_buffer(tmp_path, make_episodes())["path"]
    index = scan(read_config([f"train.data_path={path}"]))
    assert index.entries.numbers == ("state",) and len(index.statistics.mean) == 3
    (tmp_path / "buffer.zarr" / "data" / "state").rename(tmp_path / "buffer.zarr" / "data" / "robot_eef_pose")
    path = str((tmp_path / "buffer.zarr").rename(tmp_path / "real.zarr"))
    with pytest.raises(
        UserError, match="does not name its observations: .* to some of action, goal, img, robot_eef_pose"
    ):
        scan(read_config([f"train.data_path={path}"]))
    only_pictures = read_config([f"train.data_path={path}", "observation.modalities.obs.rgb=[img]", *SMALL])
    index = scan(only_pictures)
    (batch,) = make_loader(index, only_pictures | {"experiment.epoch_every_n_steps": 1}, 4)
    policy = DiffusionPolicy(only_pictures, index.statistics, index.entries.cameras)
    assert batch["observations"].shape == (4, 2, 0) and policy(batch).shape == (4,)
    player = Learned(policy, index.entries)
    player.begin([1, 2])
    assert player.act({"img": batch["img"][:2, 0].numpy()}).shape == (2, 2)


def test_robomimics_files_may_hold_more_and_name_no_environment(tmp_path: Path) -> None:
    path = write_robomimic(tmp_path, make_episodes())["path"]
    with h5py.File(path, "r+") as file:
        file["data"].create_dataset("total_reward", data=[1.0, 2.0])
        file["data/demo_0"].create_group("obs/more")
        file["data"].attrs["env_args"] = "null"
        file.create_dataset("mask/gone", data=np.array([b"demo_1", b"demo_9"]))
    index = scan(read_config([f"train.data_path={path}"]))
    assert len(index.folders[0]) == len(LENGTHS) and index.env_id == ""
    with pytest.raises(UserError, match="mask/gone lists demo_9, not there in data"):
        scan(read_config([f"train.data_path={path}", "train.hdf5_filter_key=gone"]))
    path = str(tmp_path / "linked.hdf5")
    with h5py.File(path, "w") as file:
        file.create_group("data")["demo_0"] = h5py.ExternalLink("gone.hdf5", "data/demo_0")
    with pytest.raises(UserError, match="demo_0 in data are links to files that are not there"):
        scan(read_config([f"train.data_path={path}"]))
    path = str(tmp_path / "flat.hdf5")
    with h5py.File(path, "w") as file:
        file["data"] = [1.0]
    with pytest.raises(UserError, match=f"no demonstrations in {path} .AttributeError"):
        scan(read_config([f"train.data_path={path}"]))


def test_cameras_may_have_pictures_of_different_sizes(tmp_path: Path) -> None:
    episodes = make_episodes()
    written = write_robomimic(tmp_path, episodes)
    with h5py.File(written["path"], "r+") as file:
        for number, episode in enumerate(episodes):
            file[f"data/demo_{number}"].create_dataset("obs/wrist", data=episode["frames"][:, ::2, ::2])
    cameras = written | {"rgb": "[agentview_image, wrist]"}
    for more, sizes in (([], [(32, 48), (16, 24)]), (["observation.image_dim=[20, 30]"], [(20, 30)] * 2)):
        config = read_config(arguments(cameras, *more))
        index = scan(config)
        assert index.picture_sizes == {"agentview_image": (32, 48), "wrist": (16, 24)}
        sample = Samples(index.folders, index.entries, length=1, weights=None, config=config)[0]
        assert [sample[camera].shape[1:3] for camera in index.entries.cameras] == sizes
        policy = DiffusionPolicy(config, index.statistics, index.entries.cameras)
        assert policy(default_collate([sample])).isfinite().all()


def test_actions_that_change_too_little_to_tell_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    episodes = make_episodes()
    for episode in episodes:
        episode["actions"][:, 1] = 100 + 1e-5 * np.arange(len(episode["actions"]))
    scan(read_config(arguments(write_robomimic(tmp_path, episodes))))
    (said,) = (record.message for record in caplog.records if "constant" in record.message)
    assert re.fullmatch(r"numbers of an action that change too .*: 1 \(100 to 100\)", said)


def test_robomimics_subsets_are_used(tmp_path: Path) -> None:
    written = write_robomimic(tmp_path, make_episodes())
    given = arguments(written, "train.hdf5_filter_key=train", "train.hdf5_validation_filter_key=valid")
    index = scan(read_config([*given, "experiment.validate=true"]))
    assert [episode.name for episode in index.folders[0]] == ["demo_0", "demo_2"] and index.env_id == "Lift"
    assert [episode.name for episode in index.held_out] == ["demo_1"]
    with pytest.raises(UserError, match="no subset 'nice' of its episodes; there are: train, valid"):
        scan(read_config(arguments(written, "train.hdf5_filter_key=nice")))


@pytest.mark.parametrize("write", [write_robomimic, write_replay_buffer, write_lerobot_3])
def test_two_loading_processes_read_as_one_does(write: Writer, tmp_path: Path) -> None:
    written = write(tmp_path, make_episodes())
    taken = []
    for workers in (0, 2):
        given = arguments(written, f"train.num_data_workers={workers}", "experiment.epoch_every_n_steps=4")
        config = read_config(given)
        taken.append(list(make_loader(scan(config), config, 3)))
    assert len(taken[0]) == len(taken[1]) == 4
    for one, other in zip(*taken, strict=True):
        assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("write", [write_robomimic, write_zipped_replay_buffer, write_lerobot_3])
def test_an_image_policy_learns_from_them_by_options_only(
    write: Writer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = write(tmp_path, make_episodes())
    randomizer = "observation.encoder.rgb.obs_randomizer_"
    more = [*SMALL, "observation.encoder.rgb.core_kwargs.backbone_kwargs.width=8", f"{randomizer}class=CropRandomizer"]
    more += [f"{randomizer}kwargs.crop_height=28", f"{randomizer}kwargs.crop_width=40", "train.batch_size=4"]
    more += ["experiment.rollout.enabled=false", "experiment.epoch_every_n_steps=3", "train.num_epochs=1"]
    more += [f"train.output_dir={tmp_path}", "experiment.logging.log_tb=false", "observation.image_dim=[30, 44]"]
    monkeypatch.setattr("sys.argv", ["train.py", *arguments(written, *more)])
    with ddpkit.distributed() as job, ddpkit.stopping() as stop:
        train.main(job, stop)
    (path,) = tmp_path.glob("*/*/last.pth")
    saved = torch.load(path)["state"]
    assert saved["entries"]["cameras"] == (written["rgb"][1:-1],)
    assert saved["policy"]["high"].max() > 400 and saved["policy"]["encoders.0.conv1.weight"].shape == (8, 3, 7, 7)


def test_what_cannot_be_read_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = write_robomimic(tmp_path, make_episodes())
    (tmp_path / "broken.hdf5").write_text("no such thing")
    for name in ("broken.hdf5", "missing.hdf5", "missing.zarr"):
        with pytest.raises(UserError, match=f"no demonstrations in {tmp_path}/{name} "):
            scan(read_config([f"train.data_path={tmp_path}/{name}"]))
    for wanted in ("rgb=[no_camera]", "low_dim=[no_number]"):
        given = f"observation.modalities.obs.{wanted}"
        with pytest.raises(UserError, match=f"has no {wanted.split('[')[1][:-1]}; it has .*robot0_eef_pos"):
            scan(read_config([f"train.data_path={written['path']}", given]))
    with pytest.raises(UserError, match="episode demo_0 is broken: object must hold pictures"):
        scan(read_config([f"train.data_path={written['path']}", "observation.modalities.obs.rgb=[object]"]))
    with pytest.raises(UserError, match="language_raw holds no numbers: remove it .language is not supported"):
        scan(read_config([f"train.data_path={written['path']}", "observation.modalities.obs.low_dim=[language_raw]"]))
    (tmp_path / "droid" / "1.0.1").mkdir(parents=True)
    (tmp_path / "droid" / "1.0.1" / "droid-train.tfrecord-00000-of-00001").touch()
    with pytest.raises(UserError, match="droid holds TFRecords, but RLDS .* not supported: convert them to LeRobot's"):
        scan(read_config([f"train.data_path={tmp_path}/droid"]))
    index = scan(read_config(arguments(write_replay_buffer(tmp_path, make_episodes()))))
    with pytest.raises(UserError, match="name no environment: .*experiment.rollout.enabled=false"):
        train.try_environment(index)
    monkeypatch.setitem(__import__("sys").modules, "zarr", None)
    (tmp_path / "other.zarr").mkdir()
    with pytest.raises(UserError, match="needs a package that is not installed .*examples-robot-formats"):
        open_format(str(tmp_path / "other.zarr"))


def lengthen(path: Path, entry: str, rows: int) -> None:
    """Give an array of a replay buffer more rows, or fewer."""
    array = zarr.open_group(str(path), mode="a")[entry]
    array.resize((rows, *array.shape[1:]))


@pytest.mark.parametrize(
    ("ends", "rows", "said"),
    [
        ([6, 10, 17], {}, "episode 2 is broken: episode_ends says 17, state has 15 rows"),
        ([6, 10, 12], {}, "episode 2 is broken: episode_ends says 12, state has 15 rows"),
        ([6, 20, 25], {}, "episode 1 is broken: episode_ends says 20, state has 15 rows"),
        ([6, 10, 15], {"goal": 9}, "episode 1 is broken: episode_ends says 10, goal has 9 rows"),
        ([6, 10, 15], {"action": 16}, "episode 2 is broken: episode_ends says 15, action has 16 rows"),
        ([6, 10, 15], {"img": 14}, "episode 2 is broken: episode_ends says 15, img has 14 rows"),
        ([6, 6, 15], {}, "episode 1 is broken: .* same number of steps, at least one: 0 of state, 0 of goal"),
        ([10, 6, 15], {}, "buffer.zarr: meta/episode_ends must ascend, but 6 comes after 10"),
    ],
)
def test_a_replay_buffer_whose_ends_are_not_those_of_its_rows_is_refused(
    ends: list[int], rows: dict[str, int], said: str, tmp_path: Path
) -> None:
    written = write_replay_buffer(tmp_path, make_episodes())
    path = tmp_path / "buffer.zarr"
    zarr.open_group(str(path), mode="a")["meta/episode_ends"][:] = ends
    for entry, count in rows.items():
        lengthen(path, f"data/{entry}", count)
    with pytest.raises(UserError, match=said):
        scan(read_config(arguments(written)))
    if "is broken" in said and ends[1] > ends[0]:
        index = scan(read_config(arguments(written, "train.on_broken_shard=skip")))
        assert {episode.name for episode in index.folders[0]} < {"0", "1", "2"}


def test_an_episode_whose_entries_differ_in_length_is_named(tmp_path: Path) -> None:
    for damage, said in {
        "counted": "num_samples says 5, robot0_eef_pos has 4 rows",
        "longer": ".* 4 of object, 4 of actions, 5 of agentview_image",
    }.items():
        (tmp_path / damage).mkdir()
        written = write_robomimic(tmp_path / damage, make_episodes())
        with h5py.File(written["path"], "a") as file:
            demo = file["data/demo_1"]
            demo.attrs["num_samples"] = 5
            if damage == "longer":
                frames = demo["obs/agentview_image"][:]
                del demo["obs/agentview_image"], demo.attrs["num_samples"]
                demo["obs/agentview_image"] = np.concatenate([frames, frames[-1:]])
        with pytest.raises(UserError, match=f"demo_1 is broken: {said}"):
            scan(read_config(arguments(written)))


def test_a_table_or_a_film_shorter_than_its_episode_is_named(tmp_path: Path) -> None:
    episodes = make_episodes()
    written = write_lerobot_2(tmp_path, episodes)
    film = tmp_path / "lerobot" / "videos" / "chunk-001" / CAMERA / "episode_000002.mp4"
    encode(film, episodes[2]["frames"][:3], 10)
    with pytest.raises(UserError, match="episode 2 is broken: .*mp4 ends before 0.400 s"):
        scan(read_config(arguments(written)))
    (tmp_path / "lerobot").rename(tmp_path / "other")
    meta = tmp_path / "other" / "meta" / "episodes.jsonl"
    meta.write_text(meta.read_text().replace('"length": 5', '"length": 9'))
    with pytest.raises(UserError, match="episode 2 is broken: meta says 9 steps, observation.state has 5 rows"):
        scan(read_config(arguments(written | {"path": str(tmp_path / "other")})))


def test_an_episode_without_actions_is_left_out_if_asked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    written = write_robomimic(tmp_path, make_episodes())
    with h5py.File(written["path"], "a") as file:
        del file["data/demo_2/actions"]
        del file["data/demo_0/obs"]
    with pytest.raises(
        UserError, match="demo_0, has no agentview_image, .*if other episodes have it, set .*shard=skip"
    ):
        scan(read_config(arguments(written)))
    index = scan(read_config(arguments(written, "train.on_broken_shard=skip")))
    assert [episode.name for episode in index.folders[0]] == ["demo_1"]
    assert f"skipped: {written['path']}, episode demo_2, has no actions; it has" in caplog.text


def test_settings_with_cameras_survive_their_file(tmp_path: Path) -> None:
    config = read_config(["observation.modalities.obs.rgb=[a.b, c]"])
    (tmp_path / "config.json").write_text(json.dumps(nested(config)))
    assert read_config([f"load_from={tmp_path / 'config.json'}"]) == config
