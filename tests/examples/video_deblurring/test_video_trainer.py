"""The video trainer as people run it, on tiny clips: by `launch_train.sh` and torchrun, and rank by rank.

One launch trains several times, as starting a process takes longer than a tiny run.
"""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
import video
from deblurring.networks import TinyClip
from deblurring.options import complete
from deblurring.testing import find_test_clips, measure
from deblurring.tiles import restore
from PIL import Image
from processes import CLEAN, Ended, free_port, platform_env, run
from signals import signalled
from somebodys.nets import Net

import ddpkit

pytestmark = pytest.mark.storm  # it trains again and again

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "examples" / "video_deblurring"
# as for somebody who has installed ddpkit, on a machine without a GPU
ENV = CLEAN | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
ENV["CUDA_VISIBLE_DEVICES"] = ""
CPU = torch.device("cpu")
PATIENCE = 600.0  # seconds for a launch, which takes 10 on an idle machine
HAS_WANDB = importlib.util.find_spec("wandb") is not None
TRAIN, TEST = "main_train_vrt.py", "main_test_vrt.py"
LINE = re.compile(  # of the console
    r"^\d\d-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} : "
    r"<epoch:( *\d+), iter:( *[\d,]+), lr:(\d\.\d{3}e-\d\d)> G_loss: (\d\.\d{3}e-\d\d) images/s: \d",
    re.M,
)


def program(name: str, *arguments: str) -> None:
    """Runs a program as it is run by its users."""
    sys.path.insert(0, str(FOLDER))
    sys.argv = [name, *arguments]
    runpy.run_path(str(FOLDER / name), run_name="__main__")


def programs(calls: list[tuple[str, str]]) -> None:
    """Runs programs with option files, where there are such, one after another, as the same rank."""
    with ddpkit.distributed(num_threads=1):
        for name, options in calls:
            code = 0
            try:
                program(name, *(["--opt", options] if Path(options).exists() else []))
            except SystemExit as end:
                code = end.code
            sys.stderr.flush()
            print(f"== {Path(options).stem}: exit status {code}", flush=True)


def launch(ranks: int, calls: list[tuple[str, str]]) -> list[Ended]:
    """Runs them as every rank."""
    return start(ranks, programs, calls)


def start(ranks: int, fn: Callable[..., None], *args: Any) -> list[Ended]:
    """Runs `fn` as every rank, started by hand; without a launcher's variables if there is one rank."""
    port = free_port()
    envs = [platform_env(rank, ranks, port) for rank in range(ranks)] if ranks > 1 else [{"OMP_NUM_THREADS": "1"}]
    more = {"CUDA_VISIBLE_DEVICES": "", "WANDB_MODE": "offline"}
    return run(fn, [env | more for env in envs], *args, timeout=PATIENCE)


def outputs(ended: list[Ended]) -> list[dict[str, str]]:
    """By rank, what each call printed, by the option file's name; all calls have ended well."""
    found = []
    for process in ended:
        assert process.code == 0, process.output
        pieces = re.split(r"^== (\w+): exit status (\d+)\n", process.output, flags=re.M)
        assert set(pieces[2::3]) == {"0"}, process.output
        found.append(dict(zip(pieces[1::3], pieces[0::3], strict=False)))
    return found


def weights(folder: Path, iteration: int, letter: str = "G") -> dict[str, torch.Tensor]:
    return torch.load(folder / "tiny" / "models" / f"{iteration}_{letter}.pth")


def near(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Equal but for the order in which floats were added; an optimiser step moves a weight by about 1e-3."""
    return one.keys() == other.keys() and all(torch.allclose(one[name], other[name], atol=2e-5) for name in one)


def picture(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.array(image)


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return video.write_clips(tmp_path_factory.mktemp("clips"))


Runs = tuple[Path, dict[int, list[dict[str, str]]]]


@pytest.fixture(scope="module")
def runs(clips: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Runs on one, two and three ranks; the folder above theirs, and what they printed by number of ranks and rank.

    On two ranks `whole` trains for 12 iterations. `half` stops after 7 and resumes on three ranks, a copy of it on one.
    """
    root = tmp_path_factory.mktemp("runs")

    def call(name: str, folder: str, program: str = TRAIN, **changes: Any) -> tuple[str, str]:
        opt = video.options(clips, root / folder, **changes)
        return program, video.write_options(root / f"{name}.json", opt)

    workers = {"dataloader_num_workers": 1, "dataloader_prefetch_factor": 2, "dataloader_persistent_workers": True}
    workers = {f"datasets__train__{key}": value for key, value in workers.items()}
    torch.manual_seed(0)
    torch.save({"params": Net(4).state_dict(), "params_ema": Net(4).state_dict()}, root / "released.pth")
    apart = {"train__G_lossfn_type": "somebodys.nets:Apart", "train__total_iter": 2}
    frozen = {"train__fix_iter": 5, "train__fix_keys": ["body"], "use_static_graph": True}
    printed = {
        2: outputs(
            launch(
                2,
                [
                    call(
                        "whole2",
                        "whole2",
                        val__save_img=True,
                        logging__use_wandb=HAS_WANDB,
                        logging__wandb_api_key="s3cret",
                    ),
                    call("half", "half", train__total_iter=7, logging__use_wandb=HAS_WANDB),
                    call("frozen", "frozen", **frozen, train__total_iter=10),
                    call("accumulated", "accumulated", train__accumulation=3, train__total_iter=5),
                    call("workers", "workers", **workers, train__total_iter=5),
                    call(
                        "per_rank",
                        "per_rank",
                        datasets__train__dataloader_batch_size_is="per_rank",
                        train__total_iter=1,
                    ),
                    call("rgb", "rgb", **video.RGB, **apart),
                    call("own", "own", **own(root / "released.pth"), train__total_iter=4),
                    call("normed", "normed", **somebodys("Normed"), train__E_decay=0.5, train__total_iter=4),
                    call("idle", "idle", **somebodys("Idle"), find_unused_parameters=True, train__total_iter=2),
                    call("test2", "whole2", TEST),
                ],
            )
        )
    }
    for copy in ("half1", "slower"):
        shutil.copytree(root / "half", root / copy)
    blind = {"datasets__test__dataroot_gt": None, "path__pretrained_netE": str(root / "whole2/tiny/models/12_E.pth")}
    three = [call("resumed3", "half", logging__use_wandb=HAS_WANDB), call("test3", "whole2", TEST)]
    printed[3] = outputs(launch(3, [*three, call("blind3", "blind3", TEST, **blind)]))
    one = [call("resumed1", "half1"), call("whole1", "whole1"), call("test1", "whole2", TEST)]
    one += [call("blind1", "blind1", TEST, **blind), call("rgb1", "rgb1", **video.RGB, **apart)]
    one += [call("owntest", "own", TEST, **own(root / "released.pth"))]
    one += [
        call(
            "released", "released", TEST, **own(root / "released.pth"), path__pretrained_netE=str(root / "released.pth")
        )
    ]
    one += [call(f"amp_{kind}", f"amp_{kind}", train__amp=kind, train__total_iter=2) for kind in ("bf16", "fp16")]
    one += [call("normed1", "normed1", **somebodys("Normed"), train__E_decay=0.5, train__total_iter=4)]
    one += [call("shorter", "half1", train__total_iter=9)]
    one += [call("slower", "slower", train__G_optimizer_lr=1e-4, train__total_iter=8)]
    one += [call(f"unseeded{i}", "unseeded", train__manual_seed=None, train__total_iter=i) for i in (1, 2)]
    printed[1] = outputs(launch(1, one))
    return root, printed


def somebodys(network: str) -> dict[str, Any]:
    return video.RGB | {"netG": {"net_type": f"somebodys.nets:{network}", "width": 4}}


def own(released: Path) -> dict[str, Any]:
    """Options of a run with somebody's network, begun with released weights, and tested on longer windows."""
    arguments = {"width": 4, "dropout": 0.5, "checkpointing": True}
    changes = {"path__pretrained_netG": str(released), "use_static_graph": True, "val__num_frame_testing": 4}
    changes |= {"train__fix_iter": 2, "train__fix_keys": ["first"], "train__checkpoint_save": 2}
    return video.RGB | changes | {"netG": {"net_type": "somebodys.nets:Net", **arguments}}


def test_two_ranks_give_what_one_gives(runs: Runs) -> None:
    root, printed = runs
    for letter in "GE":
        one, two = (weights(root / f"whole{ranks}", 12, letter) for ranks in (1, 2))
        assert near(one, two)
    start = TinyClip(3, 4, 1, spikes=True).state_dict()
    assert not near(start | {"last.weight": one["last.weight"]}, one) and one["last.weight"].abs().max() > 1e-3
    lines = [LINE.findall(printed[ranks][0][f"whole{ranks}"]) for ranks in (1, 2)]
    assert [line[:3] for line in lines[0]] == [line[:3] for line in lines[1]]
    for first, second in zip(*lines, strict=True):
        assert float(first[3]) == pytest.approx(float(second[3]), rel=2e-3)  # the loss is that of all ranks


def test_computed_weights_and_layers_without_sizes_train_and_are_averaged(runs: Runs) -> None:
    one, two = (weights(runs[0] / folder, 4, "E") for folder in ("normed1", "normed"))
    assert one.keys() >= {"first.weight_v", "last.weight"} and near(one, two)


@pytest.mark.parametrize(("folder", "ranks"), [("half", 3), ("half1", 1)])
def test_a_run_goes_on_exactly_where_it_was_on_another_number_of_ranks(runs: Runs, folder: str, ranks: int) -> None:
    root, printed = runs
    assert "period of the schedule, the first one, so training ends at a high lr" in printed[2][0]["half"]
    assert "period of the schedule" not in printed[2][0]["whole2"]
    assert re.search(r"resuming from iteration 7 of 12: .*/7_optimizerG.pth", printed[ranks][0][f"resumed{ranks}"])
    for letter in "GE":
        assert near(weights(root / folder, 12, letter), weights(root / "whole2", 12, letter))
    states = [ddpkit.Checkpointer(root).load(root / f / "tiny/models/12_optimizerG.pth") for f in (folder, "whole2")]
    assert states[0]["loader"] == states[1]["loader"]
    moments = [[state["optimizer"]["state"][i]["exp_avg"] for i in range(8)] for state in states]
    assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(*moments, strict=True))


def test_a_run_that_is_over_says_that_there_is_nothing_to_do(runs: Runs) -> None:
    said = runs[1][1][0]["shorter"]
    assert re.search("from iteration 12 of 9: .*/12_optimizerG.pth\n.*nothing to do: raise total_iter", said)
    assert "done" not in said


def test_a_run_goes_on_with_the_learning_rate_of_its_options(runs: Runs) -> None:
    (line,) = LINE.findall(runs[1][1][0]["slower"])
    assert float(line[2]) == pytest.approx(1e-4 * (1 + np.cos(np.pi * 7 / 12)) / 2, rel=1e-3)


def test_what_has_been_set_free_moves_and_what_is_frozen_does_not(runs: Runs) -> None:
    root, printed = runs
    ddpkit.seed_everything(3)
    before = TinyClip(3, 4, 1, spikes=True).state_dict()
    then, after = (weights(root / "frozen", iteration) for iteration in (5, 10))
    for name, value in before.items():
        assert torch.equal(then[name], value) == name.startswith("body"), name
        assert not torch.equal(after[name], then[name]), name
    assert "['body'] frozen until iteration 5" in printed[2][0]["frozen"]


def test_batches_in_pieces_and_from_workers_are_the_same_batches(runs: Runs) -> None:
    root, printed = runs
    whole = weights(root / "whole2", 5)
    assert near(weights(root / "accumulated", 5), whole)
    assert all(torch.equal(value, whole[name]) for name, value in weights(root / "workers", 5).items())
    assert "2 x 3" in printed[2][0]["accumulated"] and "1 samples per forward" in printed[2][0]["accumulated"]


def test_per_rank_and_global_batch_are_printed(runs: Runs) -> None:
    printed = runs[1][2][0]
    assert "3 samples per forward" in printed["whole2"] and "6 samples per optimiser step" in printed["whole2"]
    assert "6 samples per forward" in printed["per_rank"] and "12 samples per optimiser step" in printed["per_rank"]


def test_the_scores_are_exact_on_any_number_of_ranks(runs: Runs, clips: Path) -> None:
    root, printed = runs
    rows = [
        re.findall(r"(?:Testing .*|<epoch.*Average .*|\| .*)$", printed[ranks][0][f"test{ranks}"], re.M)
        for ranks in (1, 2, 3)
    ]
    assert rows[0] == rows[1] == rows[2] and len(rows[0]) == 3 + 1 + 5
    report = json.loads((root / "whole2/tiny/test.json").read_text())
    net = TinyClip(3, 4, 1, spikes=True)
    net.load_state_dict(weights(root / "whole2", 12, "E"))  # of E and G it is E
    decibels = []
    for name, (frames, _, _) in video.SIZES["test"].items():
        paths = [[clips / f"test_{part}" / name / f"{i:06d}" for i in range(frames)] for part in video.PARTS.values()]
        sharp, blurred = (
            torch.stack([torch.from_numpy(picture(Path(f"{p}.png"))).permute(2, 0, 1) for p in paths[i]])
            for i in (0, 1)
        )
        spikes = torch.from_numpy(np.stack([np.load(f"{p}.npy") for p in paths[2]]))
        opt = complete(video.options(clips, root))
        pixels = (restore(net, {"L": blurred, "S": spikes}, opt, CPU).clamp(0, 1) * 255).round().numpy()
        errors = ((pixels - sharp.numpy()) ** 2).mean((1, 2, 3))
        decibels.append(float((10 * np.log10(255**2 / errors)).mean()))
        assert report["clips"][name]["restored"]["psnr"] == pytest.approx(decibels[-1], abs=1e-3)
        for number, error in enumerate(errors):
            frame = report["frames"][name][f"{number:06d}"]["restored"]
            assert frame["psnr"] == pytest.approx(10 * np.log10(255**2 / error), abs=1e-3)
    average = re.search(r"Average PSNR: (.*) dB; SSIM: (0\.\d{4}); PSNR_Y: (.*) dB; SSIM_Y: ", rows[0][3])
    assert average and float(average[1]) == pytest.approx(np.mean(decibels), abs=0.006)


def test_a_run_leaves_the_folders_of_the_original(runs: Runs) -> None:
    root, _ = runs
    folder = root / "whole2" / "tiny"
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    for iteration in (5, 10, 12):
        assert {f"models/{iteration}_{kind}.pth" for kind in ("G", "E", "optimizerG")} <= names
    images = {f"images/{name}/12.{kind}" for name in video.SIZES["test"] for kind in ("png", "mp4")}
    images |= {f"images/{name}/{i:06d}_12.png" for name, (n, _, _) in video.SIZES["test"].items() for i in range(n)}
    assert images == {name for name in names if name.startswith("images/")}
    options = [name for name in names if name.startswith("options/")]
    assert options and all(re.fullmatch(r"options/tiny_\d{6}_\d{6}.json", name) for name in options)
    rest = names - images - set(options)
    assert {name for name in rest if not name.startswith("models/")} >= {"train.log", "test.json", "test.csv"}
    assert len(list(folder.glob("tb_logger/events.out.tfevents.*"))) == 1
    state = weights(root / "whole2", 12)
    assert {value.device.type for value in state.values()} == {"cpu"} and "first.weight" in state
    height, width = video.SIZES["test"]["x"][1:]
    assert picture(folder / "images/x/12.png").shape == (height, 3 * width, 3)  # blurred | restored | sharp
    with open(folder / "test.csv") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3 * (4 + 3 + 5) and list(rows[0])[:4] == ["clip", "frame", "what", "psnr"]
    report = json.loads((folder / "test.json").read_text(), parse_constant=pytest.fail)
    for row in rows:
        assert float(row["ssim"]) == report["frames"][row["clip"]][row["frame"]][row["what"]]["ssim"]
    with av.open(str(folder / "images/x/12.mp4")) as film:
        shown = [frame.to_ndarray(format="rgb24") for frame in film.decode(video=0)]
    assert len(shown) == 4 and shown[0].shape == (height, 3 * width, 3)


def test_without_sharp_frames_the_ranks_write_the_restored_ones(runs: Runs) -> None:
    root, printed = runs
    pictures = []
    for ranks in (1, 3):
        assert "no dataroot_gt: its frames are restored and written, not scored" in printed[ranks][0][f"blind{ranks}"]
        folder = root / f"blind{ranks}/tiny"
        files = {path.relative_to(folder / "images").as_posix(): path for path in folder.glob("images/*/*.png")}
        pictures.append({name: picture(path) for name, path in files.items()})
        assert not list(folder.glob("test.*"))
    one, three = pictures
    frames = {f"{clip}/{i:06d}" for clip, (n, _, _) in video.SIZES["test"].items() for i in range(n)}
    assert one.keys() == three.keys() == {f"{frame}_0.png" for frame in frames} | {f"{clip}/0.png" for clip in "xyz"}
    for name, shown in one.items():
        assert np.array_equal(shown, three[name])
    for frame in frames:  # as the test with sharp frames has written them
        assert np.array_equal(one[f"{frame}_0.png"], picture(root / f"whole2/tiny/images/{frame}_12.png"))


def test_tensorboard_gets_what_the_log_says(runs: Runs) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    root, printed = runs
    events = EventAccumulator(str(root / "whole2/tiny/tb_logger")).Reload()
    lines = LINE.findall(printed[2][0]["whole2"])
    assert [int(line[1]) for line in lines] == [4, 8, 12] == [event.step for event in events.Scalars("G_loss")]
    for line, loss, lr in zip(lines, events.Scalars("G_loss"), events.Scalars("lr"), strict=True):
        assert float(line[2]) == pytest.approx(lr.value, rel=1e-3)
        assert float(line[3]) == pytest.approx(loss.value, rel=1e-3)
    assert [event.step for event in events.Scalars("test/psnr")] == [12]
    assert [event.step for event in events.Images("test/y")] == [12]
    assert "G_loss" in (root / "whole2/tiny/train.log").read_text()


def test_each_process_reports_itself_and_only_the_first_says_more(runs: Runs) -> None:
    _, printed = runs
    for rank, said in enumerate(printed[2]):
        line, title, *place = said["whole2"].splitlines()[:9]
        assert title == f"Distributed training: process {rank} of 2" and line == "=" * 60
        assert [name.split(":")[0].strip() for name in place] == [
            "launcher",
            "backend",
            "world size",
            "rank",
            "local rank",
            "device",
            "master",
        ]
    assert all(len(text.splitlines()) == 10 for text in printed[2][1].values())


def test_a_secret_in_the_options_is_seen_nowhere(runs: Runs) -> None:
    root, printed = runs
    assert "wandb_api_key is ignored: set the environment variable WANDB_API_KEY" in printed[2][0]["whole2"]
    assert "s3cret" not in printed[2][0]["whole2"]
    files = [path for path in (root / "whole2/tiny").rglob("*") if path.is_file()]
    assert not [path for path in files if b"s3cret" in path.read_bytes()]


@pytest.mark.peers("wandb")
def test_a_run_that_goes_on_is_the_same_run_of_weights_and_biases(runs: Runs) -> None:
    folders = list((runs[0] / "half/tiny/wandb").glob("offline-run-*"))
    assert len(folders) == 2 and len({folder.name.rpartition("-")[2] for folder in folders}) == 1
    assert list((runs[0] / "half/tiny/wandb").rglob("media/images/test/x_*.png"))


def test_without_spikes_with_another_loss_and_in_mixed_precision_it_trains_too(runs: Runs) -> None:
    root, printed = runs
    report = json.loads((root / "rgb/tiny/test.json").read_text())
    assert set(report["clips"]["x"]) == {"blurred", "restored"}
    one, two = (weights(root / folder, 2) for folder in ("rgb1", "rgb"))  # the loss is somebody's, with weights
    assert near(one, two) and one["last.weight"].any()
    losses = [LINE.findall(text)[0][3] for text in (printed[1][0]["rgb1"], printed[2][0]["rgb"])]
    assert float(losses[0]) == pytest.approx(float(losses[1]), rel=2e-3)
    plain = float(LINE.findall(printed[1][0]["whole1"])[0][3])
    for kind in ("bf16", "fp16"):
        ((*_, loss),) = LINE.findall(printed[1][0][f"amp_{kind}"])
        assert float(loss) == pytest.approx(plain, rel=0.5)
        state = weights(root / f"amp_{kind}", 2)
        assert {value.dtype for value in state.values()} == {torch.float32}
        assert all(value.isfinite().all() for value in state.values()) and state["last.weight"].any()


def test_somebodys_network_trains_from_released_weights_and_is_tested_on_longer_windows(
    runs: Runs, clips: Path
) -> None:
    root, printed = runs
    files = torch.load(root / "released.pth")
    then, after = (weights(root / "own", iteration) for iteration in (2, 4))
    for name, value in Net(4).state_dict().items():
        assert then[name].shape == value.shape
        assert torch.equal(then[name], files["params"][name]) == name.startswith("first"), name
    assert not torch.equal(after["first.weight"], then["first.weight"])
    table = re.findall(r"^\| .*$", printed[2][0]["own"], re.M)
    assert table == re.findall(
        r"^\| .*$", printed[1][0]["owntest"], re.M
    )  # the statistics, too, are those of all ranks
    assert "testing " + str(root / "released.pth") in printed[1][0]["released"]
    released = json.loads((root / "released/tiny/test.json").read_text())["clips"]["x"]
    net = Net(4).eval()
    net.load_state_dict(files["params_ema"])  # since it is an E
    opt = complete(video.options(clips, root, **own(root)))
    (clip, *_) = find_test_clips(opt)
    restored = restore(net, {"L": torch.from_numpy(clip.stack("L"))}, opt, CPU)
    sharp = torch.from_numpy(clip.stack("H")) / 255
    decibels = [measure(*pair)["psnr"] for pair in zip(restored, sharp, strict=True)]
    assert released["restored"]["psnr"] == pytest.approx(np.mean(decibels), abs=1e-3)


def test_without_a_seed_a_run_goes_on_with_the_one_it_drew(runs: Runs) -> None:
    assert "resuming from iteration 1 of 2" in runs[1][1][0]["unseeded2"]


def test_what_cannot_be_done_is_said_once_and_all_ranks_end(runs: Runs, clips: Path, tmp_path: Path) -> None:
    root = tmp_path
    shutil.copytree(runs[0] / "half1", root / "kept")
    shutil.copytree(clips / "test_GT", root / "damaged_GT")
    (root / "damaged_GT/x/000001.png").write_bytes((root / "damaged_GT/x/000001.png").read_bytes()[:-20])
    (root / "foreign.pth").write_bytes((root / "kept/tiny/models/12_G.pth").read_bytes()[:2000])
    cases: dict[str, tuple[str, dict[str, Any] | None, str]] = {
        "nothing": (TRAIN, None, "the following arguments are required: --opt\nusage: main_train_vrt.py"),
        "typo": (TRAIN, {"train__totl_iter": 3}, "train.totl_iter is unknown; did you mean train.total_iter"),
        "nodata": (
            TRAIN,
            {"datasets__train__dataroot_lq": "/nowhere"},
            "no folder /nowhere .*dataroot_lq.: name a folder",
        ),
        "batch": (TRAIN, {"datasets__train__dataloader_batch_size": 7}, "batch of 7 does not divide into 2 ranks"),
        "large": (TRAIN, {"datasets__train__dataloader_batch_size": 600}, "crops do not fill one batch"),
        "fixed": (TRAIN, {"train__fix_iter": 2, "train__fix_keys": ["deform"]}, "no parameter has 'deform'"),
        "pretrained": (TRAIN, {"path__pretrained_netG": "/no.pth"}, "Cannot read /no.pth: .*No such file"),
        "foreign": (TRAIN, {"path__pretrained_netG": str(root / "foreign.pth")}, "Cannot read .*foreign.pth"),
        "sizes": (
            TRAIN,
            {"netG__embed_dim": 6},
            r"^to train another network, name another task, or move .*models away: .*"
            r"12_G.pth does not fit the network.*\s+size mismatch for first.weight",
        ),
        "nowhere": (TRAIN, {"netG": {"net_type": "nowhere.nets:Net"}}, "cannot import nowhere.nets:Net: Module.*"),
        "depht": (
            TRAIN,
            {"netG": {"net_type": "somebodys.nets:Net", "width": 4, "depht": 2}},
            r"netG.net_type: cannot make somebodys.nets:Net: TypeError: .* unexpected keyword argument 'depht'; it "
            r"gets all keys of netG, also from the option file: 'netG={.net_type.: .somebodys.nets:Net., …}' on the co",
        ),
        "loss": (
            TRAIN,
            {"train__G_lossfn_type": "somebodys.nets:Net"},
            "train.G_lossfn_type: cannot make somebodys.nets:Net: .* missing 1 required positional argument: 'width'",
        ),
        "middle": (
            TRAIN,
            video.RGB | {"netG": {"net_type": "somebodys.nets:Middle", "width": 4}},
            r"netG.net_type: it must return \(batch, frames, channels, height, width\), here \(\d, \d, 3, .*, "
            r"but it returned \(\d, 1, 3, ",
        ),
        "pair": (
            TRAIN,
            somebodys("Pair"),
            "netG.net_type: it must return one tensor, but it returned a tuple: wrap it",
        ),
        "turned": (
            TRAIN,
            somebodys("Turned"),
            r"must return \(batch, frames, channels, height, width\), here \(1, 2, 3, .*, but it returned \(1, 3, 2,",
        ),
        "talkative": (
            TRAIN,
            somebodys("Talkative"),
            "netG.net_type: it must return one tensor, but it returned a tuple",
        ),
        "later": (TRAIN, somebodys("Later"), "netG.net_type: aside.weight, aside.bias got no size by a call in eval"),
        "placed": (
            TRAIN,
            somebodys("Placed"),
            r"netG.net_type: the network fails on \d frames of \d+ x \d+: RuntimeError: The size of tensor .*nets.py, "
            r"line \d+\); val.num_frame_testing and val.size_patch_testing set the size",
        ),
        "detached": (TRAIN, somebodys("Detached"), "netG.net_type: it returned a tensor that has no gradient"),
        "picky": (
            TRAIN,
            somebodys("Picky"),
            "netG.net_type: cannot make somebodys.nets:Picky: KeyError: 'width 4' .in __init__, .*nets.py, line",
        ),
        "bare": (
            TRAIN,
            video.RGB | {"netG": {"net_type": "somebodys.nets:Bare"}},
            "the network has no parameters to train",
        ),
        "function": (
            TRAIN,
            video.RGB | {"netG": {"net_type": "somebodys.nets:no_module"}},
            "netG.net_type: somebodys.nets:no_module must make a torch.nn.Module, but it made a str",
        ),
        "module": (
            TRAIN,
            video.RGB | {"netG": {"net_type": "somebodys.nets:__name__"}},
            "netG.net_type: cannot make somebodys.nets:__name__: TypeError: 'str' object is not callable",
        ),
        "terms": (
            TRAIN,
            {"train__G_lossfn_type": "somebodys.nets:Terms"},
            "train.G_lossfn_type: it must return one tensor, but it returned a dict",
        ),
        "still": (
            TRAIN,
            {"train__G_lossfn_type": "somebodys.nets:Still"},
            "train.G_lossfn_type: it returned a tensor that has no gradient",
        ),
        "idle": (
            TRAIN,
            somebodys("Idle"),
            "the loss does not depend on 2 parameters of the network, spare.weight, spare.bias: "
            "set find_unused_parameters",
        ),
        "prefetch": (
            TRAIN,
            {"datasets__train__dataloader_prefetch_factor": 2},
            "datasets.train.dataloader: prefetch_f",
        ),
        "seed": (TRAIN, {"train__manual_seed": 4}, "seed was 3 when the state was saved and is 4 now"),
        "apart": (TRAIN, {"sync_batchnorm": True}, "sync_batchnorm: sync_batchnorm=True needs an accelerator"),
        "infinite": (
            TRAIN,
            {"train__G_lossfn_weight": 1e300, "train__checkpoint_save": 1},
            "not finite since iteration 1, first on rank 0; nothing was saved",
        ),
        "damaged": (TRAIN, {"datasets__test__dataroot_gt": str(root / "damaged_GT")}, "cannot read .*_GT/x/000001.png"),
        "untrained": (TEST, {}, "there are no checkpoints in .*untrained/tiny/models and no path.pretrained_netG"),
    }
    calls = []
    for name, (program, changes, _) in cases.items():
        folder = root / ("kept" if name in ("sizes", "seed") else name)
        if changes is not None:
            video.write_options(root / f"{name}.json", video.options(clips, folder, **changes))
        calls.append((program, str(root / f"{name}.json")))
    first, second = launch(2, calls)
    said, silence = (re.split(r"^== (\w+): exit status 2\n", process.output, flags=re.M) for process in (first, second))
    assert first.code == second.code == 0 and said[1::2] == silence[1::2] == list(cases), first.output + second.output
    for (name, (program, _, message)), text, nothing in zip(cases.items(), said[::2], silence[::2], strict=False):
        assert len(re.findall(rf" : {program}: error: ", text, re.M)) == 1, text
        assert re.search(message, text.partition("error: ")[2]), (name, text)
        assert "Traceback" not in text + nothing and "error" not in nothing
    assert not [*(root / "infinite/tiny/models").iterdir()]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_frame_that_a_rank_cannot_read_is_one_line_and_ends_all(clips: Path, tmp_path: Path, workers: int) -> None:
    shutil.copytree(clips, tmp_path / "clips")
    (tmp_path / "clips/train_GT/a/000003.png").write_bytes(b"")  # which the start does not look at
    changes = {"cache_data": False, "dataloader_num_workers": workers}
    changes = {f"datasets__train__{key}": value for key, value in changes.items()}
    options = video.write_options(tmp_path / "opt.json", video.options(tmp_path / "clips", tmp_path, **changes))
    first, second = start(2, program, TRAIN, "--local-rank=0", "--opt", options, "--dist", "True")
    assert first.code == second.code == 2, first.output + second.output
    (line,) = re.findall(".*cannot read.*", first.output)
    assert re.search(rf" : {TRAIN}: error: cannot read .*train_GT/a/000003.png", line)
    assert line in (tmp_path / "tiny/train.log").read_text()
    assert "cannot read" not in second.output
    tracebacks = (first.output + second.output).split("Traceback")[1:]
    # multiprocessing prints one in a worker that was handing over a batch when its rank ended.
    assert all("resource_sharer.py" in traceback for traceback in tracebacks)


def test_a_damaged_or_incomplete_newest_set_is_passed_over(runs: Runs, clips: Path, tmp_path: Path) -> None:
    shutil.copytree(runs[0] / "whole2", tmp_path / "kept")
    models = tmp_path / "kept/tiny/models"
    (models / "12_optimizerG.pth").unlink()
    (models / "10_E.pth").write_bytes((models / "10_E.pth").read_bytes()[:2000])
    opt = video.options(clips, tmp_path / "kept", train__total_iter=6, val__size_patch_testing=32)
    calls = [(program, video.write_options(tmp_path / f"{program[:9]}.json", opt)) for program in (TEST, TRAIN)]
    tested, trained = outputs(launch(1, calls))[0].values()
    assert "Cannot read" in tested and "10_E.pth" in tested and "testing" in tested and "models/5_E.pth" in tested
    assert "resuming from iteration 5 of 6" in trained
    assert near(weights(tmp_path / "kept", 5), weights(runs[0] / "whole2", 5))


def shell(command: list[str], **env: str) -> subprocess.CompletedProcess[str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.run(command, env=ENV | env, cwd=FOLDER, text=True, timeout=PATIENCE, **pipes)


@pytest.mark.storm
def test_launch_train_sh_trains_on_two_processes_by_torchrun(clips: Path, tmp_path: Path) -> None:
    opt = video.write_options(tmp_path / "opt.json", video.options(clips, tmp_path))
    ended = shell(["./launch_train.sh", "2", opt, "train.total_iter=4"])
    assert ended.returncode == 0, ended.stdout
    assert ended.stdout.count("launcher: torchrun") == 2 and len(LINE.findall(ended.stdout)) == 1
    assert "done: 4 iterations" in ended.stdout and "Traceback" not in ended.stdout
    assert len(weights(tmp_path, 4)) == 8


def test_launch_train_sh_leaves_a_platforms_processes_alone(clips: Path, tmp_path: Path) -> None:
    opt = video.write_options(tmp_path / "opt.json", video.options(clips, tmp_path))
    ended = shell(["./launch_train.sh", "4", opt, "train.totl_iter=4"], **platform_env(0, 1, free_port()))
    assert "process 0 of 1, started by a platform: no torchrun" in ended.stdout
    assert "Distributed training: process 0 of 1" in ended.stdout
    assert ended.returncode == 2 and "did you mean train.total_iter? (the command line)" in ended.stdout


@pytest.mark.parametrize("options", [[], ["of my own.json"]])
def test_launch_train_sh_passes_all_arguments_on(options: list[str]) -> None:
    ended = shell(["./launch_train.sh", "1", *options, "train.totl_iter=1", "task=two words"])
    assert ended.returncode == 2
    said = "cannot read the settings in of my own.json" if options else "train.totl_iter is unknown"
    assert said in ended.stdout


@pytest.mark.parametrize("arguments", [[], ["two"], ["0"]])
def test_launch_train_sh_wants_a_number_of_processes(arguments: list[str]) -> None:
    ended = shell(["./launch_train.sh", *arguments])
    assert ended.returncode == 2 and "usage: ./launch_train.sh N" in ended.stdout


def programs_until_signalled(calls: list[tuple[str, str]]) -> None:
    with signalled(rank=1, step=5):
        programs(calls)


def test_a_signal_to_one_rank_saves_on_all_and_the_run_goes_on(runs: Runs, clips: Path, tmp_path: Path) -> None:
    call = TRAIN, video.write_options(tmp_path / "opt.json", video.options(clips, tmp_path))
    first, other = start(2, programs_until_signalled, [call])
    assert "== opt: exit status 138" in first.output
    assert "== opt: exit status 138" in other.output
    (stopped,) = map(int, re.findall(r"stopped after iteration (\d+) of 12: the same command resumes", first.output))
    assert 5 <= stopped < 12
    assert (tmp_path / f"tiny/models/{stopped}_optimizerG.pth").is_file()
    outputs(launch(2, [call]))
    assert near(weights(tmp_path, 12), weights(runs[0] / "whole2", 12))
