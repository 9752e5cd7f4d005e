"""The parts of the robot's trainer: diffusion, network, average, shards and streams, each against something obvious."""

from __future__ import annotations

import functools
import math
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import on_ranks
from robot import samples
from robot.config import read_config
from robot.networks import ResNet, SpatialSoftmax
from robot.policy import EMA, DiffusionPolicy, add_noise, ddim, squaredcos_cap_v2
from robot.samples import Framing, Samples, Statistics, scan, write_shard
from robot.train import keeping_random_state, load_encoders, lr_factor, wrap
from shared.program import UserError
from torch import nn

import ddpkit

SMALL = ["algo.unet.down_dims=[8, 16]", "algo.unet.n_groups=4", "algo.unet.diffusion_step_embed_dim=8"]


def standard(observations: int) -> Statistics:
    """Of observations and four-number actions that need no scaling."""
    return Statistics(np.zeros(observations), np.ones(observations), np.full(4, -1.0), np.ones(4))


def make_policy(*settings: str, observations: int = 5, cameras: tuple[str, ...] = ()) -> DiffusionPolicy:
    torch.manual_seed(0)
    return DiffusionPolicy(read_config([*SMALL, *settings]), standard(observations), cameras)


def make_batch(count: int = 6, observations: int = 5) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    return {
        "observations": torch.randn(count, 2, observations, generator=draw),
        "actions": torch.rand(count, 16, 4, generator=draw) * 2 - 1,
        "noise": torch.randn(count, 16, 4, generator=draw),
        "step": torch.randint(100, (count,), generator=draw),
    }


def test_the_schedule_is_the_squared_cosine_of_the_paper() -> None:
    shares = squaredcos_cap_v2(100).numpy()
    expected = [math.cos(((t + 1) / 100 + 0.008) / 1.008 * math.pi / 2) ** 2 for t in range(100)]
    expected = np.array(expected) / math.cos(0.008 / 1.008 * math.pi / 2) ** 2
    assert shares[:-1] == pytest.approx(expected[:-1], rel=1e-12)
    assert shares[-1] == pytest.approx(0.001 * expected[-2])  # a step adds at most .999 of noise


def test_noise_is_added_with_the_variance_that_the_schedule_says() -> None:
    torch.manual_seed(0)
    noisy = add_noise(torch.full((2, 50_000), 0.5), torch.randn(2, 50_000), torch.tensor([0.9, 0.2]))
    assert noisy.mean(1).tolist() == pytest.approx([0.5 * 0.9**0.5, 0.5 * 0.2**0.5], abs=0.02)
    assert noisy.var(1).tolist() == pytest.approx([0.1, 0.8], rel=0.02)


def test_ddim_finds_the_only_sample_there_is() -> None:
    shares, only = squaredcos_cap_v2(100), torch.tensor([[0.3, -0.8, 1.0]], dtype=torch.float64)

    def find_noise(noisy: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        return (noisy - shares[step].sqrt() * only) / (1 - shares[step]).sqrt()

    start = torch.randn(1, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for steps in (1, 7, 10, 100):
        assert torch.allclose(ddim(find_noise, start, shares, steps), only)


def test_ddim_maps_noise_to_a_normal_distribution_as_the_exact_flow_does() -> None:
    """Of N(m, s^2) the noise in a sample is known, and so is where the flow of the limit of many steps leads."""
    mean, std, shares = 0.1, 0.2, squaredcos_cap_v2(1000)

    def find_noise(noisy: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        share = shares[step][:, None]
        return (1 - share).sqrt() * (noisy - share.sqrt() * mean) / (share * std**2 + 1 - share)

    def error(steps: int) -> float:
        first = shares[1000 - 1000 // steps]  # where so many evenly spaced steps begin
        exact = mean + std * (start - first.sqrt() * mean) / (first * std**2 + 1 - first).sqrt()
        return (ddim(find_noise, start, shares, steps) - exact).abs().max().item()

    start = torch.linspace(-2, 2, 9, dtype=torch.float64)[:, None]
    assert error(500) < 0.004 and 4 < error(100) / error(500) < 5.5  # of first order, as it should be


def test_a_sample_does_not_depend_on_those_beside_it() -> None:
    policy, batch = make_policy(), make_batch()
    alone = torch.cat([policy({key: value[i : i + 1] for key, value in batch.items()}) for i in range(6)])
    assert torch.allclose(policy(batch), alone, atol=1e-5)


def test_the_network_uses_all_that_it_is_given_and_all_its_weights() -> None:
    policy, batch = make_policy(), make_batch()
    before = policy(batch).detach()
    for key in ("observations", "actions", "noise"):
        assert not torch.allclose(before, policy(batch | {key: batch[key].flip(0)}), atol=1e-3), key
    assert not torch.allclose(before, policy(batch | {"step": batch["step"].flip(0)}), atol=1e-3)
    policy(batch).mean().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in policy.parameters())


def test_recomputing_activations_changes_no_gradient() -> None:
    policies = make_policy(), make_policy("train.gradient_checkpointing=true")
    for policy in policies:
        policy(make_batch()).mean().backward()
    for one, other in zip(*(policy.parameters() for policy in policies), strict=True):
        torch.testing.assert_close(
            one.grad, other.grad
        )  # where three branches meet, they may be added in another order


@pytest.mark.parametrize("amp", ["bf16", "fp16"])
def test_half_precision_gives_nearly_the_same_loss_in_float32(amp: str) -> None:
    exact, half = make_policy()(make_batch()), make_policy(f"train.amp={amp}")(make_batch())
    assert half.dtype == torch.float32 and not torch.equal(exact, half)
    assert half.tolist() == pytest.approx(exact.tolist(), rel=0.03)


class Knowing(torch.nn.Module):
    """A network that finds the same actions everywhere."""

    def forward(self, noisy: torch.Tensor, step: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        return torch.linspace(-1, 1, noisy[0].numel()).view_as(noisy[0]).expand_as(noisy)


def test_a_network_may_find_the_actions_instead_of_the_noise() -> None:
    policy, batch = make_policy("algo.ddpm.prediction_type=sample"), make_batch()
    policy.network = Knowing()
    center, reach = policy._action_range()
    batch["actions"] = center + reach * policy.network(batch["noise"], batch["step"], None)
    with torch.no_grad():  # nothing is learned
        assert policy(batch).max() < 1e-12
    plan = policy.act(batch, batch["noise"])
    torch.testing.assert_close(plan, batch["actions"][:, 1:9], rtol=1e-4, atol=1e-4)
    assert make_policy("algo.ddpm.prediction_type=epsilon")(make_batch()).equal(make_policy()(make_batch()))


def test_actions_are_those_from_the_present_moment_on() -> None:
    policy, noise = make_policy("algo.horizon.action_horizon=3"), torch.randn(2, 16, 4)
    seen = {"observations": make_batch(2)["observations"]}
    plan = make_policy("algo.horizon.action_horizon=15").act(seen, noise)
    assert policy.act(seen, noise).shape == (2, 3, 4)
    assert torch.equal(policy.act(seen, noise), plan[:, :3]) and plan.abs().max() <= 1


def test_the_average_follows_its_formula_and_goes_on_where_it_was_saved() -> None:
    policy = make_policy()
    ema, expected = EMA(policy, 0.75), 0.0
    weight = next(policy.parameters())
    for n in range(1, 31):
        nn.init.constant_(weight, float(n))
        ema.update(policy)
        expected = (1 - n**-0.75) * expected + n**-0.75 * n
        if n == 20:  # into a new one, as after a restart
            saved, ema = ema.state_dict(), EMA(policy, 0.75)
            ema.load_state_dict(saved)
    assert next(ema.policy.parameters()).flatten()[0].item() == pytest.approx(expected, rel=1e-5)
    assert int(ema.updates) == 30


def test_the_average_has_buffers_that_the_policy_replaces() -> None:
    policy = make_policy()
    ema = EMA(policy, 0.75)
    for _ in range(2):
        policy.mean = policy.mean + 1.0
        ema.update(policy)
    assert torch.equal(ema.policy.mean, policy.mean)


@pytest.mark.parametrize("size", [1e-5, 1.0, 1e5])
def test_a_range_is_constant_by_the_size_of_its_numbers_only(size: float) -> None:
    low, high = np.array([-1.0, 3.0, 0.0, 5.0]) * size, np.array([1.0, 3.5, 0.0, 5.0]) * size
    policy = DiffusionPolicy(read_config(SMALL), Statistics(np.zeros(5), np.ones(5), low, high))
    center, reach = policy._action_range()
    assert torch.allclose(center / size, torch.tensor([0.0, 3.25, 0.0, 5.0]))
    assert torch.allclose(reach, torch.tensor([size, size / 4, 1.0, 1.0]))


def test_a_checkpoint_has_no_wrappers_names_and_loads_into_any_wrapper(tmp_path: Path) -> None:
    policy = make_policy()
    saver = ddpkit.Checkpointer(tmp_path)
    path = saver.save(1, policy=nn.DataParallel(policy), ema=EMA(policy, 0.75))
    saved = torch.load(path)["state"]
    assert saved["policy"].keys() == policy.state_dict().keys()
    assert not any("module." in key or "_orig_mod" in key for part in saved.values() for key in part)
    for wrapper in (lambda model: model, nn.DataParallel, functools.partial(torch.compile, backend="eager")):
        other = make_policy()
        nn.init.zeros_(next(other.parameters()))
        saver.load(path, policy=wrapper(other))
        assert torch.equal(next(other.parameters()), next(policy.parameters()))


def test_one_process_on_several_gpus_is_data_parallel_with_a_hint(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddpkit.wrap_model", lambda policy, strategy, **_: strategy)  # there are no GPUs here
    config = read_config([])
    assert [wrap(make_policy(), config, ranks, gpus) for ranks, gpus in ((1, 1), (4, 4))] == ["auto", "auto"]
    assert not caplog.text
    assert wrap(make_policy(), config, 1, 2) == "dp" and "torchrun --nproc_per_node=2" in caplog.text
    monkeypatch.undo()
    with pytest.raises(UserError, match="train.strategy: strategy='dp' needs 1 process and several GPUs"):
        wrap(make_policy(), config | {"train.strategy": "dp"}, 1, 0)
    with pytest.raises(UserError, match="train.strategy: .*torchrun"):
        wrap(make_policy(), config | {"train.strategy": "ddp"}, 1, 0)


def test_losses_by_sample_have_the_right_mean_in_data_parallel_too() -> None:
    policy, batch = make_policy(), make_batch(5)
    parts = [{key: value[i] for key, value in batch.items()} for i in (slice(0, 3), slice(3, 5))]  # as for two GPUs
    gathered = torch.cat([policy(part) for part in parts])
    assert gathered.shape == (5,) and gathered.mean().item() == pytest.approx(policy(batch).mean().item(), abs=1e-6)


def test_learning_rates_are_functions_of_the_step() -> None:
    every = ["experiment.epoch_every_n_steps=10", "train.num_epochs=4"]
    rate = "algo.optim_params.policy.learning_rate."
    cosine = [lr_factor(read_config(every), step) for step in range(41)]
    assert cosine == pytest.approx([(1 + math.cos(math.pi * step / 40)) / 2 for step in range(41)])
    steps = [f"{rate}scheduler_type=multistep", f"{rate}epoch_schedule=[1, 3]", f"{rate}decay_factor=0.5"]
    found = [lr_factor(read_config([*every, *steps]), step) for step in (0, 9, 10, 29, 30, 39)]
    assert found == [1, 1, 0.5, 0.5, 0.25, 0.25]


def test_a_learning_rate_warms_up_and_then_falls_from_its_whole() -> None:
    given = ["experiment.epoch_every_n_steps=10", "train.num_epochs=4"]
    given.append("algo.optim_params.policy.learning_rate.warmup_steps=5")
    factors = [lr_factor(read_config(given), step) for step in range(41)]
    assert factors[:6] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])
    assert factors[5:] == pytest.approx([(1 + math.cos(math.pi * step / 35)) / 2 for step in range(36)])


def test_rollouts_draw_what_training_does_not_notice() -> None:
    drawn = []
    for plays in (False, True):
        ddpkit.seed_everything(0)
        with keeping_random_state(torch.device("cpu")):
            _ = (random.random(), np.random.rand(), torch.rand(1)) if plays else ()
        drawn.append((random.random(), np.random.rand(), torch.rand(1).item()))
    assert drawn[0] == drawn[1]


def test_actions_of_any_range_are_learned_from_minus_one_to_one() -> None:
    low, high = np.array([0.0, -3.0, 5.0, 200.0]), np.array([512.0, 3.0, 5.0, 200.5])
    wide = DiffusionPolicy(read_config(SMALL), Statistics(np.zeros(5), np.ones(5), low, high))
    plain = make_policy()
    wide.load_state_dict(plain.state_dict() | {"low": wide.low, "high": wide.high})
    batch = make_batch()
    batch["actions"][..., 2] = 0  # this number is always 5
    stretched = (batch["actions"] + 1) / 2 * torch.tensor(high - low, dtype=torch.float32) + torch.tensor(low).float()
    assert torch.allclose(wide(batch | {"actions": stretched}), plain(batch), atol=1e-4)
    acted = wide.act({"observations": batch["observations"]}, torch.randn(6, 16, 4)).double()
    assert (acted[..., 2] == 5).all()
    assert (acted[..., [0, 1, 3]] >= torch.tensor(low)[[0, 1, 3]]).all()
    assert (acted[..., [0, 1, 3]] <= torch.tensor(high)[[0, 1, 3]]).all()


class Recurrent(nn.Module):
    """A network of somebody else's."""

    def __init__(self, channels: int, observation: int, hidden: int = 8) -> None:
        super().__init__()
        self.gru = nn.GRU(channels + observation + 1, hidden, batch_first=True)
        self.out = nn.Linear(hidden, channels)

    def forward(self, actions: torch.Tensor, step: torch.Tensor, observations: torch.Tensor) -> torch.Tensor:
        seen = torch.cat([observations, step[:, None] / 100], dim=1)[:, None].expand(-1, actions.shape[1], -1)
        return self.out(self.gru(torch.cat([actions, seen], dim=2))[0])


def test_a_network_of_the_users_takes_the_u_nets_place() -> None:
    policy = make_policy(f"algo.network.class={__name__}:Recurrent", 'algo.network.kwargs={"hidden": 12}')
    assert type(policy.network) is Recurrent and policy.network.gru.hidden_size == 12
    batch = make_batch()
    assert policy(batch).shape == (6,) and policy.act(batch, batch["noise"]).shape == (6, 8, 4)
    for wrong in ("nowhere:Recurrent", f"{__name__}:Nothing"):
        with pytest.raises(UserError, match=f"algo.network.class: cannot import {wrong}: "):
            make_policy(f"algo.network.class={wrong}")
    with pytest.raises(UserError, match=r"cannot make .*:Recurrent: ValueError: .*in __init__, .*robot_parts.py, line"):
        make_policy(f"algo.network.class={__name__}:Recurrent", 'algo.network.kwargs={"hidden": 0}')
    pair = make_policy("algo.network.class=somebodys.nets:NoiseAndStep")
    with pytest.raises(UserError, match="must return one tensor, but it returned a tuple"):
        pair(batch)
    with pytest.raises(UserError, match="unexpected keyword argument 'depth'"):
        make_policy(f"algo.network.class={__name__}:Recurrent", 'algo.network.kwargs={"depth": 2}')
    with pytest.raises(UserError, match="algo.unet: num_channels .*must be divisible by num_groups"):
        make_policy("algo.unet.n_groups=3")


def test_spatial_softmax_finds_where_a_map_is_largest() -> None:
    pool = SpatialSoftmax(2, 2)
    pool.choose.weight.data = torch.eye(2)[:, :, None, None] * 50
    nn.init.zeros_(pool.choose.bias)
    maps = torch.zeros(1, 2, 5, 9)
    maps[0, 0, 4, 0] = maps[0, 1, 2, 6] = 1
    assert pool(maps)[0].tolist() == pytest.approx([1, 0, -1, 0.5], abs=1e-5)  # both downwards, then both to the right


def test_encoders_take_torchvisions_names_and_tell_what_they_do_not_use(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    encoder = ResNet(8, backbone="ResNet18Conv", pool="SpatialMeanPool", keypoints=4, width=64)
    names = {name.rpartition(".")[0] for name in encoder.state_dict() if not name.startswith("head")}
    stages = {1: 4, 2: 6, 3: 6, 4: 6}  # convolutions and norms of both blocks, and of the way past the first
    expected = {"conv1", "bn1"}
    for stage in stages:
        for block in (0, 1):
            expected |= {f"layer{stage}.{block}.{part}" for part in ("conv1", "bn1", "conv2", "bn2")}
        if stage > 1:
            expected |= {f"layer{stage}.0.downsample.{part}" for part in (0, 1)}
    assert names == expected
    assert (
        sum(weights.numel() for weights in encoder.parameters()) - 8 * 513 == 11_176_512
    )  # a ResNet-18 without its head
    theirs = {name: torch.randn_like(value) for name, value in encoder.state_dict().items() if "head" not in name}
    theirs |= {"bn1.running_mean": torch.zeros(64), "fc.weight": torch.zeros(1000, 512)}
    torch.save(theirs, tmp_path / "resnet18.pth")
    core = "observation.encoder.rgb.core_kwargs.backbone_kwargs."
    config = read_config([*SMALL, f"{core}weights={tmp_path / 'resnet18.pth'}"])
    policy = DiffusionPolicy(config, standard(3), ["left", "right"])
    load_encoders(policy, config)
    assert all(
        torch.equal(encoder.state_dict()["layer3.0.conv1.weight"], theirs["layer3.0.conv1.weight"])
        for encoder in policy.encoders
    )
    assert "unused weights: bn1.running_mean, fc.weight" in caplog.text
    with pytest.raises(UserError, match=f"{core}weights: .*No such file"):
        load_encoders(policy, config | {f"{core}weights": "/nowhere.pth"})


LARGE = "observation.encoder.rgb.core_kwargs.backbone_class=ResNet50Conv"


def test_a_larger_encoder_takes_no_width_and_says_that_it_needs_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="width is for ResNet18Conv"):
        make_policy(LARGE, NARROW[0])
    monkeypatch.setitem(sys.modules, "torchvision.models", None)
    with pytest.raises(UserError, match="backbone_class: ResNet50Conv needs torchvision .*pip install torchvision"):
        make_policy(LARGE, cameras=("camera",))


@pytest.mark.peers("torchvision")
def test_larger_encoders_are_torchvisions_with_groupnorm() -> None:
    policy, batch = make_policy(LARGE, cameras=("camera",)), make_batch(2)
    batch["camera"] = torch.randint(256, (2, 2, 40, 48, 3), dtype=torch.uint8)
    policy(batch).mean().backward()
    assert all(weights.grad is not None and weights.grad.any() for weights in policy.parameters())
    kinds = {type(module) for module in policy.encoders.modules()}
    assert nn.GroupNorm in kinds and nn.BatchNorm2d not in kinds


NARROW = ["observation.encoder.rgb.core_kwargs.backbone_kwargs.width=8", "train.gradient_checkpointing=true"]


@pytest.mark.parametrize("pool", ["SpatialSoftmax", "SpatialMeanPool"])
def test_an_image_policy_uses_each_picture_and_all_its_weights(pool: str) -> None:
    policy = make_policy(*NARROW, f"observation.encoder.rgb.core_kwargs.pool_class={pool}", cameras=("left", "right"))
    batch = make_batch()
    for camera in policy.cameras:
        batch[camera] = torch.randint(256, (6, 2, 40, 48, 3), dtype=torch.uint8)
    loss = policy(batch)
    for camera in policy.cameras:
        assert not torch.allclose(loss, policy(batch | {camera: batch[camera].flip(0)}), atol=1e-5), camera
    loss.mean().backward()
    assert all(weights.grad is not None and weights.grad.any() for weights in policy.parameters())
    alone = torch.cat([policy({key: value[i : i + 1] for key, value in batch.items()}) for i in range(6)])
    assert torch.allclose(loss, alone, atol=1e-5)
    assert policy.act(batch, torch.randn(6, 16, 4)).shape == (6, 8, 4)


def test_pictures_are_cropped_and_in_acting_in_the_middle() -> None:
    frames = torch.arange(2 * 6 * 8 * 3).byte().view(2, 6, 8, 3)
    assert torch.equal(Framing(None, [4, 4])(frames, (0.5, 0.5)), frames[:, 1:5, 2:6])
    assert torch.equal(Framing(None, [4, 4])(frames, (0.0, 0.999)), frames[:, 0:4, 4:8])
    assert torch.equal(Framing(None, None)(frames, (0.0, 0.999)), frames)
    rows, columns = torch.meshgrid(torch.arange(180.0), torch.arange(320.0), indexing="ij")
    scene = torch.stack([rows / 180 * 255, columns / 320 * 255, 0 * rows], -1).round().byte()
    seen = Framing([128, 128], [116, 116])(scene.expand(1, 2, -1, -1, -1), (0.5, 0.5))  # DROID's settings
    assert seen.shape == (1, 2, 116, 116, 3)
    lost = 255 * (128 - 116) / 128 / 2  # at each side
    for channel in (0, 1):  # nearly the whole scene, in both directions
        assert seen[..., channel].min() <= lost + 2 and seen[..., channel].max() >= 255 - lost - 3
    randomizer = "observation.encoder.rgb.obs_randomizer_"
    cropping = [f"{randomizer}class=CropRandomizer", f"{randomizer}kwargs.crop_height=32"]
    policy = make_policy(*NARROW, *cropping, f"{randomizer}kwargs.crop_width=32", cameras=("camera",))
    seen = {"observations": torch.zeros(1, 2, 5), "camera": torch.zeros(1, 2, 40, 40, 3, dtype=torch.uint8)}
    edge = {key: value.clone() for key, value in seen.items()}
    edge["camera"][:, :, :4] = 255  # what is cropped away
    noise = torch.randn(1, 16, 4)
    assert torch.equal(policy.act(seen, noise), policy.act(edge, noise))


def write_folder(folder: Path, steps: list[int], per_shard: int = 2, offset: float = 0.0) -> str:
    """Episodes whose observations say which episode and step they are from, and whose actions the step."""
    folder.mkdir()
    episodes = []
    for number, length in enumerate(steps):
        step = np.arange(length)
        seen = np.stack([np.full(length, offset + number), step, step % 3], 1)
        episodes.append({"observations": seen.astype(np.float32), "actions": np.stack([step / 1000] * 4, 1)})
    for start in range(0, len(episodes), per_shard):
        write_shard(folder / f"episodes-{start:05d}.npz", "FetchReach-v4", episodes[start : start + per_shard])
    return str(folder)


def settings_for(folders: list[str], *more: str) -> dict[str, Any]:
    return read_config(["algo.horizon.action_horizon=2", "algo.horizon.prediction_horizon=4", *more]) | {
        "train.data_path": folders
    }


def make_samples(folders: list[str], length: int, *more: str) -> Samples:
    config = settings_for(folders, *more)
    index = scan(config)
    weights = config["train.sample_weights"]
    return Samples(index.folders, index.entries, length=length, weights=weights, config=config)


def who(sample: dict[str, np.ndarray]) -> tuple[int, int]:
    """Episode and step of a sample."""
    return int(sample["observations"][-1, 0]), int(sample["observations"][-1, 1])


def test_no_moment_comes_again_before_all_others_came_and_epochs_differ(tmp_path: Path) -> None:
    samples = make_samples([write_folder(tmp_path / "a", [10, 5, 1, 4])], 50)
    seen = []
    for epoch in range(3):
        samples.set_epoch(epoch)
        seen.append([who(samples[number]) for number in range(50)])
        assert len({*seen[-1][:20]}) == len({*seen[-1][20:40]}) == 20 and len({*seen[-1][40:]}) == 10
        assert seen[-1][:20] != seen[-1][20:40] != sorted(seen[-1][20:40])
    assert seen[0] != seen[1] != seen[2]


def test_a_sample_is_a_function_of_seed_epoch_and_number(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "a", [20] * 4)
    first, second = make_samples([folder], 60), make_samples([folder], 60)

    def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
        return all(np.array_equal(one[key], other[key]) for key in one)

    assert all(same(first[number], second[number]) for number in (7, 3, 59, 3))
    noise = np.stack([first[number]["noise"] for number in range(60)])
    assert abs(noise.mean()) < 0.05 and abs(noise.std() - 1) < 0.05 and len(np.unique(noise)) > 0.99 * noise.size
    assert len({int(first[number]["step"]) for number in range(60)}) > 30
    before = first[0]
    second.set_epoch(1)
    other_seed = make_samples([folder], 60, "train.seed=1")
    assert not same(before, second[0]) and not same(before, other_seed[0])
    assert not np.array_equal(before["noise"], other_seed[0]["noise"])


def test_samples_come_from_paths_by_their_weights(tmp_path: Path) -> None:
    folders = [write_folder(tmp_path / "a", [30] * 3), write_folder(tmp_path / "b", [10] * 3, offset=100.0)]
    for weights, share in (("null", 0.25), ("[1, 3]", 0.75), ("[2, 0]", 0.0)):
        samples = make_samples(folders, 4000, f"train.sample_weights={weights}", "train.data_path=[a, b]")
        drawn = [samples.place(number)[0].path == folders[1] for number in range(4000)]
        assert np.mean(drawn) == pytest.approx(share, abs=0.03)


def test_a_sample_is_a_window_that_repeats_the_ends(tmp_path: Path) -> None:
    samples = make_samples([write_folder(tmp_path / "a", [6])], 6)
    for number in range(6):
        sample = samples[number]
        step = who(sample)[1]
        assert sample["observations"][:, 1].tolist() == [max(step - 1, 0), step]
        expected = [min(max(t, 0), 5) / 1000 for t in range(step - 1, step + 3)]
        assert sample["actions"][:, 0].tolist() == pytest.approx(expected)


def test_demonstrations_in_other_precisions_become_float32(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    arrays = {"observations_0": np.ones((4, 3)), "actions_0": np.zeros((4, 4), int)}  # float64, int64
    np.savez(tmp_path / "a" / "episodes-0.npz", env_id="FetchReach-v4", **arrays)
    sample = make_samples([str(tmp_path / "a")], 1)[0]
    assert {sample[name].dtype for name in ("observations", "actions", "noise")} == {np.dtype(np.float32)}


def scan_on_ranks(config: dict[str, Any]) -> Any:
    return scan(config)


def test_an_index_counts_and_measures_all_episodes_alike_on_any_number_of_ranks(tmp_path: Path) -> None:
    lengths = (4, 7, 5, 9, 3)
    config = settings_for([write_folder(tmp_path / "a", [*lengths])])
    index = scan(config)
    assert [episode.steps for episode in index.folders[0]] == [*lengths] and index.steps == [28]
    episodes = [np.stack([np.full(n, i), np.arange(n), np.arange(n) % 3], 1) for i, n in enumerate(lengths)]
    values = np.concatenate(episodes)
    found = index.statistics
    assert found.mean == pytest.approx(values.mean(0)) and found.std == pytest.approx(values.std(0))
    assert found.low.tolist() == [0] * 4 and found.high == pytest.approx(np.full(4, 0.008))
    assert index.env_id == "FetchReach-v4"
    for world_size in (2, 3):
        for other in on_ranks(scan_on_ranks, world_size, config):
            assert other.folders == index.folders
            for name, expected in vars(found).items():
                assert np.array_equal(getattr(other.statistics, name), expected), name  # to the last bit


def test_what_is_held_out_is_neither_learned_from_nor_measured(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "a", [5] * 10)
    held = ["experiment.validate=true", "train.validation_fraction=0.3"]
    index = scan(settings_for([folder], *held))
    kept = {episode.name for episode in index.held_out}
    assert len(kept) == 3 and len(index.folders[0]) == 7 and not kept & {one.name for one in index.folders[0]}
    learned = [int(one.name.split("-")[1][:5]) + int(one.name[-1]) for one in index.folders[0]]
    assert index.statistics.mean[0] == pytest.approx(np.mean(learned))
    assert scan(settings_for([folder], *held)).held_out == index.held_out
    assert scan(settings_for([folder], *held, "train.seed=1")).held_out != index.held_out


@pytest.mark.parametrize("damage", ["truncated", "flipped", "text", "not finite", "empty"])
def test_a_broken_episode_is_named_or_left_out(damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_folder(tmp_path / "a", [6] * 6)
    broken = tmp_path / "a" / "episodes-00002.npz"
    data = bytearray(broken.read_bytes())
    if damage == "truncated":
        broken.write_bytes(data[: len(data) // 2])
    elif damage == "flipped":
        place = data.index(np.full(3, [2.0], np.float32).tobytes()[:4])  # inside the observations of episode 2
        data[place] ^= 0xFF
        broken.write_bytes(data)
    elif damage == "text":
        broken.write_text("no shard")
    elif damage == "not finite":
        bad = {"observations": np.zeros((2, 3)), "actions": np.full((2, 4), np.nan)}
        write_shard(broken, "FetchReach-v4", [bad])
    else:
        broken.write_bytes(b"")
    named = f"{folder}: episode episodes-00002.npz/0 is broken: .*train.on_broken_shard=skip"
    with pytest.raises(UserError, match=named) as caught:
        scan(settings_for([folder]))
    assert ("is not a zip file" in str(caught.value)) == (damage in ("truncated", "text", "empty"))
    index = scan(settings_for([folder], "train.on_broken_shard=skip"))
    left = 5 if damage == "flipped" else 4  # the other episode of that file is whole
    assert len(index.folders[0]) == left and f"skipped: {folder}: episode episodes-00002.npz/0" in caplog.text


def test_missing_or_unfitting_demonstrations_are_said(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    with pytest.raises(UserError, match=f"no demonstrations in {folder}.*python -m robot.collect --folder {folder}"):
        scan(settings_for([str(folder)]))
    write_folder(folder, [3])
    (tmp_path / "b").mkdir()
    other = {"observations": np.zeros((2, 5)), "actions": np.zeros((2, 4))}
    write_shard(tmp_path / "b" / "episodes-0.npz", "FetchReach-v4", [other])
    differ = rf"in numbers of an observation: 3 in 1, as in {folder}, episode .*0.npz/0; 5 in 1, as in {tmp_path}/b, "
    with pytest.raises(
        UserError, match=f"do not fit together: episodes differ {differ}.* Remove some from train.data_path"
    ):
        scan(settings_for([str(folder), str(tmp_path / "b")]))
    wanted = "observation.modalities.obs.low_dim=[robot0_eef_pos]"
    with pytest.raises(UserError, match="has no robot0_eef_pos; it has observations, actions: choose in"):
        scan(settings_for([str(folder)], wanted))


def test_a_loader_with_workers_gives_whole_batches_and_lasts_over_epochs(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "a", [5] * 4)
    given = ["train.num_data_workers=2", "train.persistent_workers=true", "train.prefetch_factor=2"]
    config = settings_for([folder], *given, "experiment.epoch_every_n_steps=5")
    with pytest.raises(UserError, match="train: persistent_workers option needs num_workers > 0"):
        samples.make_loader(scan(config), config | {"train.num_data_workers": 0, "train.prefetch_factor": None}, 4)
    loader = samples.make_loader(scan(config), config, 4)
    taken = []
    for epoch in (1, 2, 1):
        loader.set_epoch(epoch)
        taken.append([batch["observations"] for batch in loader])
        assert len(taken[-1]) == 5 and all(batch.shape == (4, 2, 3) for batch in taken[-1])
    assert all(map(torch.equal, taken[0], taken[2])) and not torch.equal(taken[0][0], taken[1][0])
