"""The parts of the robot's trainer: diffusion, network, average, shards and streams, each against something obvious."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from robot import shards
from robot.config import read_config
from robot.diffusion import ddim, squaredcos_cap_v2
from robot.policy import EMA, DiffusionPolicy, add_noise
from robot.shards import Samples, deal, scan, write_shard
from robot.train import lr_factor, wrap
from shared.program import UserError
from torch import nn

import ddpkit

SMALL = ["algo.unet.down_dims=[8, 16]", "algo.unet.n_groups=4", "algo.unet.diffusion_step_embed_dim=8"]


def make_policy(*settings: str, observations: int = 5) -> DiffusionPolicy:
    torch.manual_seed(0)
    return DiffusionPolicy(read_config([*SMALL, *settings]), 4, np.zeros(observations), np.ones(observations))


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


def test_noise_is_drawn_before_the_forward_as_gpus_of_one_process_would_draw_the_same() -> None:
    policy, batch = make_policy(), make_batch(600)
    drawn, again = policy.draw(batch), policy.draw(batch)
    assert not torch.equal(drawn["noise"], again["noise"]) and not torch.equal(drawn["step"], again["step"])
    assert drawn["noise"].shape == batch["actions"].shape and drawn["noise"].std() == pytest.approx(1, abs=0.02)
    assert drawn["step"].shape == (600,) and {0, 99} <= set(drawn["step"].tolist()) <= set(range(100))
    before = torch.get_rng_state()
    policy(drawn)
    assert torch.equal(torch.get_rng_state(), before)


def test_actions_are_those_from_the_present_moment_on() -> None:
    policy, noise = make_policy("algo.horizon.action_horizon=3"), torch.randn(2, 16, 4)
    seen = make_batch(2)["observations"]
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
            saved, ema = ema.state_dict(), EMA(make_policy(), 0.75)
            ema.load_state_dict(saved)
    assert next(ema.policy.parameters()).flatten()[0].item() == pytest.approx(expected, rel=1e-5)
    assert int(ema.updates) == 30


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
    with pytest.raises(UserError, match="train.strategy: strategy='dp' is for 1 process on several GPUs"):
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


def write_folder(folder: Path, steps: list[int], per_shard: int = 2, offset: float = 0.0) -> str:
    """Episodes whose observations say which episode and step they are from, and whose actions the step."""
    folder.mkdir()
    episodes = []
    for number, length in enumerate(steps):
        step = np.arange(length)
        seen = np.stack([np.full(length, offset + number), step, step % 3], 1)
        episodes.append((seen, np.stack([step / 1000] * 4, 1)))
    for start in range(0, len(episodes), per_shard):
        write_shard(folder / f"episodes-{start:05d}.npz", "FetchReach-v4", episodes[start : start + per_shard])
    return str(folder)


def make_samples(folders: list[str], **options: Any) -> Samples:
    defaults = {"weights": None, "observation_horizon": 2, "prediction_horizon": 4, "buffer_size": 10, "seed": 3}
    return Samples(scan(folders, "error"), **(defaults | options))


def who(sample: dict[str, np.ndarray]) -> tuple[int, int]:
    """Episode and step of a sample."""
    return int(sample["observations"][-1, 0]), int(sample["observations"][-1, 1])


@pytest.mark.parametrize("readers", sorted({world * max(1, workers) for world in range(1, 6) for workers in range(4)}))
def test_readers_have_a_partition_of_the_episodes_in_every_epoch(readers: int, tmp_path: Path) -> None:
    samples = make_samples([write_folder(tmp_path / "a", [3] * 17)])
    for epoch in range(3):
        samples.set_epoch(epoch)
        streams = [itertools.islice(samples.shard(reader, readers), 150) for reader in range(readers)]
        seen = [{who(sample)[0] for sample in stream} for stream in streams]
        assert sum(map(len, seen)) == 17 and set.union(*seen) == set(range(17))


def test_every_epoch_deals_anew() -> None:
    hands = [deal(100, seed=0, epoch=epoch, index=0, num_shards=2).tolist() for epoch in range(3)]
    assert len({tuple(sorted(hand)) for hand in hands}) == 3
    assert all(len(hand) == 50 for hand in hands)


def test_in_the_long_run_every_step_counts_the_same(tmp_path: Path) -> None:
    samples = make_samples([write_folder(tmp_path / "a", [10, 5, 1, 4])])
    counts = Counter(who(sample) for sample in itertools.islice(samples.shard(0, 1), 20 * 200))
    assert len(counts) == 20 and all(180 <= count <= 205 for count in counts.values())


def test_the_buffer_shuffles_and_the_stream_repeats_itself_only_for_its_seed_and_epoch(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "a", [20] * 4)

    def stream(seed: int = 3, epoch: int = 0, **options: Any) -> list[tuple[int, int]]:
        samples = make_samples([folder], seed=seed, **options)
        samples.set_epoch(epoch)
        return [who(sample) for sample in itertools.islice(samples.shard(0, 1), 60)]

    assert stream() == stream()
    assert stream() != stream(epoch=1) and stream() != stream(seed=4)

    def in_order(order: list[tuple[int, int]]) -> int:
        return sum(after == (episode, step + 1) for (episode, step), after in itertools.pairwise(order))

    assert in_order(stream(buffer_size=1)) > 50 > 10 > in_order(stream(buffer_size=40))


def test_samples_come_from_folders_by_their_weights(tmp_path: Path) -> None:
    folders = [write_folder(tmp_path / "a", [30] * 3), write_folder(tmp_path / "b", [10] * 3, offset=100.0)]
    for weights, share in ((None, 0.25), ([1.0, 3.0], 0.75), ([2, 0], 0.0)):
        samples = make_samples(folders, weights=weights)
        drawn = [who(sample)[0] >= 100 for sample in itertools.islice(samples.shard(1, 3), 4000)]
        assert np.mean(drawn) == pytest.approx(share, abs=0.03)


def test_a_sample_is_a_window_that_repeats_the_ends(tmp_path: Path) -> None:
    samples = make_samples([write_folder(tmp_path / "a", [6])])
    for sample in itertools.islice(samples.shard(0, 1), 40):
        step = who(sample)[1]
        assert sample["observations"][:, 1].tolist() == [max(step - 1, 0), step]
        expected = [min(max(t, 0), 5) / 1000 for t in range(step - 1, step + 3)]
        assert sample["actions"][:, 0].tolist() == pytest.approx(expected)


def test_demonstrations_in_other_precisions_become_float32(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    arrays = {"observations_0": np.ones((4, 3)), "actions_0": np.zeros((4, 4), int)}  # float64, int64
    np.savez(tmp_path / "a" / "episodes-0.npz", env_id="FetchReach-v4", **arrays)
    sample = next(make_samples([str(tmp_path / "a")]).shard(0, 1))
    assert {value.dtype for value in sample.values()} == {np.dtype(np.float32)}


def test_an_index_counts_and_measures_all_episodes(tmp_path: Path) -> None:
    index = scan([write_folder(tmp_path / "a", [4, 7, 5], per_shard=2)], "error")
    assert [episode.steps for episode in index.folders[0]] == [4, 7, 5] and index.steps == [16]
    values = np.concatenate(
        [np.stack([np.full(n, i), np.arange(n), np.arange(n) % 3], 1) for i, n in enumerate((4, 7, 5))]
    )
    assert index.mean == pytest.approx(values.mean(0)) and index.std == pytest.approx(values.std(0))
    assert index.env_id == "FetchReach-v4" and index.action_size == 4


@pytest.mark.parametrize("damage", ["truncated", "flipped", "text", "out of range", "empty"])
def test_a_broken_shard_is_named_or_left_out(damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
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
    elif damage == "out of range":
        write_shard(broken, "FetchReach-v4", [(np.zeros((2, 3)), np.full((2, 4), 1.5))])
    else:
        broken.write_bytes(b"")
    with pytest.raises(UserError, match=f"{broken} is broken: .*train.on_broken_shard=skip") as caught:
        scan([folder], "error")
    assert ("is not a zip file" in str(caught.value)) == (damage in ("truncated", "text", "empty"))
    index = scan([folder], "skip")
    assert len(index.folders[0]) == 4 and f"skipped: {broken} is broken" in caplog.text


def test_missing_or_unfitting_demonstrations_are_said(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    with pytest.raises(UserError, match=f"no demonstrations in {folder}.*python -m robot.collect --folder {folder}"):
        scan([str(folder)], "error")
    write_folder(folder, [3])
    (tmp_path / "b").mkdir()
    write_shard(tmp_path / "b" / "episodes-0.npz", "FetchReach-v4", [(np.zeros((2, 5)), np.zeros((2, 4)))])
    with pytest.raises(UserError, match="do not fit together"):
        scan([str(folder), str(tmp_path / "b")], "error")


def test_more_readers_than_episodes_are_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "a", [3, 3])
    config = read_config([f"train.data_path={folder}", "train.num_data_workers=3"])
    with pytest.raises(UserError, match=f"{folder} has 2 episodes, but 3 readers"):
        shards.make_loader(scan([folder], "error"), config, 4)


def test_a_loader_with_workers_gives_whole_batches_and_lasts_over_epochs(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "a", [5] * 4)
    settings = ["train.num_data_workers=2", "train.persistent_workers=true", "train.prefetch_factor=2"]
    settings += [f"train.data_path={folder}", "train.shuffle_buffer_size=8"]
    loader = shards.make_loader(scan([folder], "error"), read_config(settings), 4)
    taken = []
    for epoch in (1, 2, 1):
        loader.set_epoch(epoch)
        taken.append([batch["observations"] for batch in itertools.islice(loader, 5)])
        assert all(batch.shape == (4, 2, 3) for batch in taken[-1])
    assert all(map(torch.equal, taken[0], taken[2])) and not torch.equal(taken[0][0], taken[1][0])
