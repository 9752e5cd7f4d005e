"""Network, scores and schedule of the video example, each against the same thing computed another way."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from deblurring.checkpoints import load_weights
from deblurring.data import count_workers
from deblurring.networks import TinyClip, as_float, inject_detail
from deblurring.running import visible_gpus
from deblurring.testing import measure, psnr, save_film, ssim, strip
from deblurring.tiles import restore, starts
from deblurring.training import (
    cut_short,
    freeze,
    learning_rate,
    make_loss,
    make_optimizer,
    set_learning_rates,
    take_settings,
)
from shared.networks import average_of, check_output, update_average
from shared.program import UserError

CPU = torch.device("cpu")
TRAIN: dict[str, Any] = {
    "total_iter": 100,
    "G_lossfn_type": "l1",
    "G_lossfn_weight": 1.0,
    "G_charbonnier_eps": 1e-6,
    "G_optimizer_type": "adam",
    "G_optimizer_lr": 1e-3,
    "G_optimizer_betas": [0.9, 0.99],
    "G_optimizer_wd": 0,
    "G_scheduler_type": "CosineAnnealingWarmRestarts",
    "G_scheduler_periods": 100,
    "G_scheduler_restart_weights": 1,
    "G_scheduler_eta_min": 1e-5,
    "G_scheduler_milestones": [10, 40],
    "G_scheduler_gamma": 0.5,
    "fix_iter": 0,
    "fix_keys": [],
    "fix_lr_mul": 1.0,
}


def rates(**changes: Any) -> list[float]:
    train = TRAIN | changes
    return [learning_rate(train, step, 1e-3) for step in range(train["total_iter"])]


def stepped(scheduler: Any, steps: int) -> list[float]:
    """What torch's scheduler gives step by step."""
    optimizer = torch.optim.SGD([torch.zeros(1)], 1e-3)
    schedule, found = scheduler(optimizer), []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


def test_the_cosine_is_torchs_and_ends_at_its_least() -> None:
    torchs = stepped(lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 100, 1, 1e-5), 100)
    assert rates() == pytest.approx(torchs, rel=1e-9)
    assert rates()[-1] < 1.1e-5


def test_restarts_are_torchs_as_long_as_they_end_in_time() -> None:
    torchs = stepped(lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 10, 2, 1e-5), 70)
    found = rates(total_iter=70, G_scheduler_periods=10, G_scheduler_restart_weights=2)
    assert found == pytest.approx(torchs, rel=1e-9)
    assert cut_short(TRAIN | {"total_iter": 70, "G_scheduler_periods": 10, "G_scheduler_restart_weights": 2}) is None


@pytest.mark.parametrize(("period", "total"), [(100, 102), (50, 120)])
def test_a_period_that_would_be_cut_short_is_not_begun(period: int, total: int) -> None:
    found = rates(G_scheduler_periods=period, total_iter=total)
    assert found[100:] == [1e-5] * (total - 100)  # torch's wraps: the last steps would run at the full rate
    assert found[:100] == rates(G_scheduler_periods=period, total_iter=100)
    assert cut_short(TRAIN | {"G_scheduler_periods": period, "total_iter": total}) == 100


def test_a_period_longer_than_the_run_is_that_of_the_long_run() -> None:
    assert rates(G_scheduler_periods=300) == rates(G_scheduler_periods=300, total_iter=300)[:100]
    assert cut_short(TRAIN | {"G_scheduler_periods": 300}) == 0 and cut_short(TRAIN) is None


def test_milestones_are_torchs() -> None:
    torchs = stepped(lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [10, 40], 0.5), 100)
    assert rates(G_scheduler_type="MultiStepLR") == pytest.approx(torchs, rel=1e-9)


@pytest.mark.parametrize(("kind", "expected"), [("l1", 2.0), ("l2", 5.0), ("charbonnier", (math.sqrt(2) + 5) / 2)])
def test_losses_are_those_of_the_formula(kind: str, expected: float) -> None:
    train = TRAIN | {"G_lossfn_type": kind, "G_charbonnier_eps": 16.0 if kind == "charbonnier" else 0.0}
    if kind == "charbonnier":
        expected = (math.sqrt(1 + 16) + 5) / 2
    found = make_loss(train, CPU)(torch.tensor([1.0, 3.0], requires_grad=True), torch.tensor([2.0, 0.0]))
    assert found.item() == pytest.approx(expected)
    ones = torch.ones(1, requires_grad=True)
    assert make_loss(train | {"G_lossfn_weight": 2.0}, CPU)(ones, torch.ones(1)) == 2 * (4.0 if kind[0] == "c" else 0.0)


def test_a_restored_optimizer_takes_the_tested_of_the_options_and_keeps_its_moments() -> None:
    net = torch.nn.Linear(2, 1)
    old = make_optimizer(net, TRAIN)
    net(torch.ones(1, 2)).sum().backward()
    old.step()
    moments = old.state[net.weight]["exp_avg"].clone()
    take_settings(old, make_optimizer(net, TRAIN | {"G_optimizer_lr": 5e-4, "G_optimizer_wd": 0.1}))
    assert set_learning_rates(old, TRAIN, 0) == 5e-4 and old.param_groups[0]["weight_decay"] == 0.1
    assert old.param_groups[0]["params"][0] is net.weight and torch.equal(old.state[net.weight]["exp_avg"], moments)


def test_frozen_parts_do_not_move_and_have_a_learning_rate_of_their_own() -> None:
    torch.manual_seed(0)
    net = TinyClip(2, 4, 1, spikes=False)
    train = TRAIN | {"fix_iter": 3, "fix_keys": ["body"], "fix_lr_mul": 0.125}
    optimizer = make_optimizer(net, train)
    assert [(group["base_lr"], len(group["params"])) for group in optimizer.param_groups] == [(1e-3, 4), (1.25e-4, 4)]
    assert freeze(net, train, 2) and not net.body[0].one.weight.requires_grad and net.first.weight.requires_grad
    assert not freeze(net, train, 3) and all(parameter.requires_grad for parameter in net.parameters())
    net.first.requires_grad_(False)  # by itself
    for step, changes in ((2, {}), (3, {}), (0, {"fix_iter": 0, "fix_keys": ["first"]})):
        freeze(net, train | changes, step)
        assert not net.first.weight.requires_grad
    with pytest.raises(UserError, match="no parameter has 'spynet' in its name; the first ones are first.weight"):
        make_optimizer(net, train | {"fix_keys": ["body", "spynet"]})
    with pytest.raises(UserError, match=r"every parameter has one of \['i', 'o'\] in its name, so nothing would train"):
        make_optimizer(net, train | {"fix_keys": ["i", "o"]})


def test_the_moving_average_is_that_of_the_formula() -> None:
    net, average = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    for each in (net, average):
        each.register_buffer("scale", torch.ones(2))
    expected = {name: value.clone() for name, value in average.state_dict().items()}
    for _ in range(3):
        torch.nn.init.normal_(net.weight)
        net.scale = 0.9 * net.scale  # another tensor
        update_average(average, net, 0.75)
        expected = {name: 0.75 * value + 0.25 * net.state_dict()[name] for name, value in expected.items()}
        expected["scale"] = net.scale
    for name, value in average.state_dict().items():
        assert torch.allclose(value, expected[name], atol=1e-7)


def test_an_average_follows_buffers_of_any_kind_and_copies_integers() -> None:
    net = torch.nn.Linear(2, 2)
    net.register_buffer("scale", torch.tensor(1))
    net.register_buffer("later", None)
    net.register_parameter("count", torch.nn.Parameter(torch.tensor(0), requires_grad=False))
    average = average_of(net, "train.E_decay=0")
    net.scale, net.later = 0.9 * net.scale, torch.ones(3)
    net.count += 2
    update_average(average, net, 0.75)
    assert torch.equal(average.scale, torch.tensor(0.9)) and torch.equal(average.later, torch.ones(3))
    assert average.later is not net.later and int(average.count) == 2


@pytest.mark.parametrize("kind", [torch.complex64, torch.int64])
def test_a_network_returns_floating_point_numbers(kind: torch.dtype) -> None:
    with torch.no_grad(), pytest.raises(UserError, match=f"it must return floating-point numbers, .* {kind}"):
        check_output("netG.net_type", torch.zeros(2, dtype=kind))


def test_an_untrained_network_returns_the_detail_injection_or_the_blurred_frames() -> None:
    torch.manual_seed(0)
    blurred, spikes = torch.rand(2, 3, 3, 8, 12), torch.rand(2, 3, 5, 4, 6)
    assert torch.equal(TinyClip(3, 4, 1, spikes=True)(blurred, spikes), inject_detail(blurred, spikes))
    assert torch.equal(TinyClip(3, 4, 1, spikes=False)(blurred), blurred)


def test_the_detail_injection_is_that_of_the_formula() -> None:
    rng = np.random.default_rng(0)
    blurred, spikes = rng.random((1, 2, 3, 6, 8)), rng.random((1, 2, 5, 3, 4))
    found = inject_detail(torch.from_numpy(blurred), torch.from_numpy(spikes)).numpy()
    for t, c, y, x in np.ndindex(2, 3, 6, 8):
        near = [(min(max(y // 2 + i, 0), 2), min(max(x // 2 + j, 0), 3)) for i in (-1, 0, 1) for j in (-1, 0, 1)]
        detail = np.mean([spikes[0, t, 2, i, j] - spikes[0, t, :, i, j].mean() for i, j in near])
        assert found[0, t, c, y, x] == pytest.approx(blurred[0, t, c, y, x] + detail)


@pytest.mark.parametrize(
    ("length", "size", "overlap", "expected"),
    [(3, 3, 1, [0]), (4, 3, 1, [0, 1]), (7, 3, 1, [0, 2, 4]), (7, 3, 2, [0, 1, 2, 3, 4]), (50, 32, 20, [0, 12, 18])],
)
def test_pieces_cover_all_and_overlap_as_asked(length: int, size: int, overlap: int, expected: list[int]) -> None:
    found = starts(length, size, overlap)
    assert found == expected
    assert {i for start in found for i in range(start, min(start + size, length))} == set(range(length))


def settings(scale: int = 1, window_size: list[int] | None = None, **val: Any) -> dict[str, Any]:
    """Options of a test of whole frames, one window after the other, unless `val` says otherwise."""
    usual = {"num_frame_testing": 3, "num_frame_overlapping": 0, "size_patch_testing": 0}
    usual |= {"flip_seq": False, "pad_seq": False, "center_frame_only": False, "save_img": False}
    netG = {"window_size": window_size} if window_size else {}
    return {"scale": scale, "netG": netG, "val": usual | val}


def bytes_of(*shape: int, most: int = 255) -> torch.Tensor:
    return torch.randint(0, most + 1, shape, dtype=torch.uint8)


class Marked(torch.nn.Module):
    """Adds to each frame what it is in the window: 0, 1, 2."""

    def forward(self, blurred: torch.Tensor, spikes: torch.Tensor | None = None) -> torch.Tensor:
        return blurred + torch.arange(float(blurred.shape[1])).view(1, -1, 1, 1, 1)


def test_where_windows_overlap_a_clip_gets_their_mean() -> None:
    black = {"L": torch.zeros(5, 3, 8, 8, dtype=torch.uint8)}
    restored = restore(Marked(), black, settings(num_frame_overlapping=2), CPU)
    assert restored[:, 0, 0, 0].tolist() == [0, 0.5, 1, 1.5, 2]
    restored = restore(Marked(), black, settings(num_frame_overlapping=2, flip_seq=True), CPU)
    assert restored[:, 0, 0, 0].tolist() == [1, 1, 1, 1, 1]  # of 0, .5, 1, 1, 1 and, back, 2, 1.5, 1, 1, 1
    restored = restore(Marked(), black, settings(num_frame_overlapping=2, pad_seq=True), CPU)
    assert restored[:, 0, 0, 0].tolist() == [0, 0.5, 1, 1, 1.5]


class Noted(torch.nn.Module):
    """Returns the number of its call, everywhere, at some scale; notes the shapes of what it gets."""

    def __init__(self, scale: int = 1) -> None:
        super().__init__()
        self.scale, self.shapes = scale, []

    def forward(self, blurred: torch.Tensor, spikes: torch.Tensor | None = None) -> torch.Tensor:
        self.shapes.append(tuple(blurred.shape[1:]))
        *rest, height, width = blurred.shape
        return torch.full((*rest, height * self.scale, width * self.scale), float(len(self.shapes)))


def test_tiles_lose_ten_pixels_where_another_one_is_beside_them() -> None:
    net = Noted()
    restored = restore(net, {"L": bytes_of(3, 3, 40, 52)}, settings(size_patch_testing=40), CPU)
    assert net.shapes == [(3, 3, 40, 40)] * 2  # that begin at 0 and at 12
    row = [1.0] * 22 + [1.5] * 8 + [2.0] * 22  # each without ten pixels, and their mean where both are
    assert restored[0, 0, 0].tolist() == restored[2, 1, 39].tolist() == row


def test_at_a_scale_tiles_lie_where_their_blurred_pixels_are() -> None:
    restored = restore(Noted(2), {"L": bytes_of(3, 3, 40, 52)}, settings(scale=2, size_patch_testing=40), CPU)
    assert restored.shape == (3, 3, 80, 104)
    assert restored[0, 0, 0].tolist() == [1.0] * 34 + [1.5] * 36 + [2.0] * 34


class Injection(torch.nn.Module):
    def forward(self, blurred: torch.Tensor, spikes: torch.Tensor) -> torch.Tensor:
        return inject_detail(blurred, spikes)


def test_what_is_tested_whole_is_mirrored_up_to_the_next_window_of_the_network() -> None:
    net = Noted()
    clip = {"L": bytes_of(5, 3, 18, 16), "S": bytes_of(5, 5, 9, 8, most=16)}
    whole = settings(window_size=[2, 8, 8], num_frame_testing=0)
    assert restore(net, clip, whole, CPU).shape == (5, 3, 18, 16)
    assert net.shapes == [(6, 3, 24, 24)]
    exact = as_float(clip, CPU)
    injected = inject_detail(exact["L"][None], exact["S"][None])[0]
    restored = restore(Injection(), clip, whole, CPU)
    assert torch.equal(restored[:, :, :16, :14], injected[:, :, :16, :14])  # away from the mirrors


def test_turning_time_around_turns_the_spikes_within_a_frame_too() -> None:
    clip = {"L": bytes_of(4, 3, 8, 8), "S": bytes_of(4, 5, 4, 4, most=16)}

    class First(torch.nn.Module):
        def forward(self, blurred: torch.Tensor, spikes: torch.Tensor) -> torch.Tensor:
            return spikes[:, :, :1].repeat_interleave(2, 3).repeat_interleave(2, 4).expand_as(blurred)

    restored = restore(First(), clip, settings(num_frame_testing=4, flip_seq=True), CPU)
    ends = clip["S"][:, [0, 4]].float().mean(1) / 16  # the first count of a frame and, back in time, its last
    assert torch.allclose(restored[:, 0, ::2, ::2], ends)


def test_tiles_give_what_whole_frames_give_where_a_network_sees_no_farther_than_is_cut() -> None:
    torch.manual_seed(0)
    net = TinyClip(3, 4, 1, spikes=True)
    torch.nn.init.normal_(net.last.weight, std=0.1)
    clip = {"L": bytes_of(4, 3, 64, 48), "S": bytes_of(4, 5, 32, 24, most=16)}
    whole, tiled = (
        restore(net, clip, settings(num_frame_overlapping=1, size_patch_testing=size), CPU) for size in (0, 32)
    )
    assert torch.allclose(whole, tiled, atol=1e-6)
    assert not torch.allclose(whole, as_float(clip, CPU)["L"], atol=1e-2)


def test_psnr_and_ssim_are_those_of_the_formulas() -> None:
    rng = np.random.default_rng(0)
    one = rng.integers(0, 256, (2, 3, 13, 14)).astype(float)
    other = np.clip(one + rng.normal(0, 20, one.shape), 0, 255).round()
    pairs = zip(torch.from_numpy(one / 255), torch.from_numpy(other / 255), strict=True)
    found = [list(measure(*pair).values()) for pair in pairs]
    window = np.exp(-((np.arange(11) - 5.0) ** 2) / 4.5)
    window = np.outer(window, window) / window.sum() ** 2

    def reference(a: np.ndarray, b: np.ndarray) -> tuple[float, float]:
        values = []
        for channel in range(len(a)):
            for y, x in np.ndindex(3, 4):
                p, q = (image[channel, y : y + 11, x : x + 11] for image in (a, b))
                means = (window * p).sum(), (window * q).sum()
                variances = (window * (p - means[0]) ** 2).sum(), (window * (q - means[1]) ** 2).sum()
                covariance = (window * (p - means[0]) * (q - means[1])).sum()
                light = (2 * means[0] * means[1] + 6.5025) / (means[0] ** 2 + means[1] ** 2 + 6.5025)
                values.append(light * (2 * covariance + 58.5225) / (variances[0] + variances[1] + 58.5225))
        return 10 * np.log10(255**2 / ((a - b) ** 2).mean()), float(np.mean(values))

    def gray(image: np.ndarray) -> np.ndarray:
        return np.tensordot(image, [65.481, 128.553, 24.966], ([0], [0]))[None] / 255 + 16

    for row, a, b in zip(found, one, other, strict=True):
        assert row == pytest.approx([*reference(a, b), *reference(gray(a), gray(b))], rel=1e-9)


def test_weights_are_found_in_released_files_and_what_does_not_fit_is_listed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    net, other = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    file = tmp_path / "released.pth"
    wrapped = {f"module.{name}": value for name, value in other.state_dict().items()}
    torch.save({"params": wrapped, "params_ema": {"weight": torch.ones(1, 2), "bias": torch.ones(1)}}, file)
    load_weights(net, file)
    assert torch.equal(net.weight, other.weight)
    load_weights(net, file, average=True)
    assert torch.equal(net.weight, torch.ones(1, 2))

    torch.save({"params_ema": {"weight": torch.zeros(1, 3), "bias": torch.zeros(1), "flow": torch.zeros(1)}}, file)
    listed = (
        r"released.pth does not fit .*:\s+Unexpected key.*\"flow\"\.\s+size mismatch for weight: .*\[1, 3\].*\[1, 2\]"
    )
    with pytest.raises(UserError, match=listed):
        load_weights(net, file)
    load_weights(net, file, strict=False)
    assert re.search(rf"{listed}\)\.\n  the other 1 fit and were loaded", caplog.text) and net.bias == 0
    torch.save({"flow": torch.zeros(1)}, file)
    with pytest.raises(UserError, match=r"Missing key.*\"weight\", \"bias\"\.\s+Unexpected key.*\"flow\""):
        load_weights(net, file, strict=False)  # nothing fits


def test_every_frame_of_a_film_has_its_labels(tmp_path: Path) -> None:
    black = np.zeros((49, 63, 3), np.uint8)
    picture = strip({"blurred": black, "middle": black, "sharp": black})
    assert picture.shape == (49, 189, 3)
    assert (picture[:20, :63] > 200).any() and (picture[:20, 126:] > 200).any() and not picture[20:].any()
    save_film(tmp_path / "film.mp4", [picture] * 3)
    with av.open(str(tmp_path / "film.mp4")) as film:
        shown = [frame.to_ndarray(format="rgb24") for frame in film.decode(video=0)]
    assert len(shown) == 3 and shown[2][:20].max() > 150 and shown[2][30:].max() < 30
    assert shown[0].shape == (48, 188, 3)  # films are even


def test_no_more_loading_processes_are_taken_than_there_are_cores() -> None:
    cores = len(os.sched_getaffinity(0))
    assert count_workers(0) == 0 and count_workers(1) == 1 and count_workers(cores + 30) == cores


def test_equal_images_are_infinitely_near() -> None:
    image = torch.rand(3, 12, 12, dtype=torch.float64) * 255
    assert psnr(image, image) == math.inf and ssim(image, image) == pytest.approx(1.0)


def test_scores_are_those_of_images_in_bytes() -> None:
    sharp = torch.full((3, 12, 12), 100 / 255)
    assert measure(sharp + 0.4 / 255, sharp)["psnr"] == math.inf
    assert measure(sharp + 0.6 / 255, sharp)["psnr"] == pytest.approx(20 * math.log10(255))


def test_bytes_are_scaled_to_one() -> None:
    batch = {"H": torch.tensor([255], dtype=torch.uint8), "S": torch.tensor([16], dtype=torch.uint8)}
    assert {part: value.item() for part, value in as_float(batch, torch.device("cpu")).items()} == {"H": 1, "S": 1}


@pytest.mark.parametrize(
    ("visible", "expected"), [(None, "2,0"), ("4,5,6", "6,4"), ("GPU-a,GPU-b", "GPU-a"), ("", ""), ("7", "7")]
)
def test_gpu_ids_count_among_the_visible_gpus(visible: str | None, expected: str) -> None:
    assert visible_gpus([2, 0], visible) == expected
