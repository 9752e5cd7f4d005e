"""The agent's update: against sums written out in NumPy, and on real ranks against one with all rows."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import on_ranks
from snakes.collector import Batch
from snakes.ddpg import DDPG, Actor, Critic, Perceptron, computes_in_bfloat16
from snakes.features import FEATURES, WAYS
from torch import nn

import ddpkit

CPU = torch.device("cpu")
ROWS = 24  # of the global batch


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Networks as small as these are slower on several threads, and much slower where cores are shared."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make_agent(dtype: torch.dtype = torch.float32, *, tau: float = 0.1) -> DDPG:
    torch.manual_seed(1)
    agent = DDPG(CPU, hidden=16, a_lr=0.01, c_lr=0.02, gamma=0.9, tau=tau)
    for module in (agent.networks, agent.targets):
        module.to(dtype)
    return agent


def make_batch(seed: int = 0, rows: int = ROWS, dtype: torch.dtype = torch.float32) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    seen, later = torch.randn(2, rows, FEATURES, generator=generator)
    way = torch.randint(0, 3, (rows,), generator=generator)
    reward = torch.randn(rows, generator=generator)
    return Batch(seen.to(dtype), way, reward.to(dtype), later.to(dtype))


def flat(module: nn.Module) -> np.ndarray:
    return nn.utils.parameters_to_vector(module.parameters()).detach().double().numpy()


def gradients(module: nn.Module) -> np.ndarray | None:
    found = [p.grad for p in module.parameters() if p.grad is not None]
    return np.concatenate([g.double().numpy().ravel() for g in found]) if found else None


def update(agent: DDPG, batch: Batch) -> list[float]:
    """Takes a step; returns the losses before it."""
    before = flat(agent.networks)
    losses = agent.start_update(batch)
    np.testing.assert_array_equal(flat(agent.networks), before, err_msg="the step comes with the finish")
    agent.finish_update()
    assert (flat(agent.networks) != before).any()
    return losses.tolist()


# Losses, row by row


def run(layers: nn.Sequential, seen: np.ndarray) -> list[float]:
    x = seen
    for layer in layers:
        if isinstance(layer, nn.Linear):
            x = layer.weight.detach().numpy() @ x + layer.bias.detach().numpy()
        else:
            x = np.maximum(x, 0)
    return x.tolist()


def expected_value(actor: Actor, critic: Critic, seen: np.ndarray) -> float:
    chances = [math.exp(score) for score in run(actor.layers, seen)]
    return sum(p * value for p, value in zip(chances, run(critic.values, seen), strict=True)) / sum(chances)


def test_the_losses_are_what_their_formulas_say_row_by_row():
    agent, batch = make_agent(torch.float64), make_batch(dtype=torch.float64)
    with torch.no_grad():  # targets that are not the networks
        for i, parameter in enumerate(agent.targets.parameters()):
            parameter.add_(0.05 * math.sin(i))
    actor_sum = critic_sum = 0.0
    for seen, way, reward, later in zip(*(part.numpy() for part in batch), strict=True):
        target = reward + 0.9 * expected_value(*agent.targets, later)
        critic_sum += (run(agent.critic.values, seen)[way] - target) ** 2
        actor_sum -= expected_value(agent.actor, agent.critic, seen)
    actor_loss, critic_loss = agent.losses(batch)
    assert actor_loss.item() == pytest.approx(actor_sum / ROWS, rel=1e-12)
    assert critic_loss.item() == pytest.approx(critic_sum / ROWS, rel=1e-12)


@pytest.mark.parametrize("which", [0, 1], ids=["actor", "critic"])
def test_each_loss_has_gradients_in_its_own_network_only(which):
    agent = make_agent()
    agent.losses(make_batch())[which].backward()
    assert np.abs(gradients(agent.networks[which])).max() > 0
    assert gradients(agent.networks[1 - which]) is None and gradients(agent.targets) is None


# The update


def test_targets_begin_as_the_networks_and_follow_by_tau_without_gradients():
    agent = make_agent(tau=0.25)
    before = flat(agent.networks)
    np.testing.assert_array_equal(flat(agent.targets), before)
    update(agent, make_batch())
    after = flat(agent.networks)
    assert np.abs(after - before).max() > 1e-3
    np.testing.assert_allclose(flat(agent.targets), before + 0.25 * (after - before), atol=1e-6)
    assert gradients(agent.targets) is None and not any(p.requires_grad for p in agent.targets.parameters())


def test_a_finish_without_a_start_changes_nothing():
    agent = make_agent()
    before = flat(agent.networks)
    agent.finish_update()
    update(agent, make_batch())
    after = flat(agent.networks)
    agent.finish_update()
    np.testing.assert_array_equal(flat(agent.networks), after)
    assert (before != after).any()


def test_a_start_before_the_last_finish_is_an_error():
    """The library's, which says what to do."""
    agent = make_agent()
    agent.start_update(make_batch())
    agent.start_update(make_batch(1))
    with pytest.raises(RuntimeError, match="still being averaged"):
        agent.finish_update()


def updates_of_rank(dtype: torch.dtype) -> dict[str, Any]:
    """Five updates on this rank's share of the rows; everything that has changed, and what was averaged."""
    agent, averaged, losses = make_agent(dtype), [], []
    for step in range(5):
        share = slice(ddpkit.get_rank(), None, ddpkit.get_world_size())
        batch = Batch(*(part[share] for part in make_batch(step, dtype=dtype)))
        losses.append(update(agent, batch))
        averaged.append(gradients(agent.networks))
    adam = agent.optimizer.state_dict()["state"].values()
    return {
        "networks": flat(agent.networks),
        "targets": flat(agent.targets),
        "adam": np.concatenate([s[name].double().numpy().ravel() for s in adam for name in sorted(s)]),
        "averaged": np.concatenate(averaged),
        "losses": np.array(losses),
    }


CASES = {"double": torch.float64, "float": torch.float32}


def all_updates() -> dict[str, dict[str, Any]]:
    torch.set_num_threads(1)
    return {name: updates_of_rank(dtype) for name, dtype in CASES.items()}


@functools.cache  # one launch per world size
def results(world_size: int) -> list[dict[str, dict[str, Any]]]:
    """By rank; on no ranks: in this process, without `setup()`."""
    return on_ranks(all_updates, world_size) if world_size else [all_updates()]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("world_size", [1, 2, pytest.param(3, marks=pytest.mark.storm)])
def test_updates_of_ranks_with_a_share_of_the_rows_are_those_of_one_with_all(world_size, case):
    alone = results(0)[0][case]
    tolerance = {"rtol": 1e-9, "atol": 1e-11} if case != "float" else {"rtol": 1e-4, "atol": 1e-5}
    found = [rank[case] for rank in results(world_size)]
    for rank in found:
        for name in ("networks", "targets", "adam", "averaged"):
            np.testing.assert_allclose(rank[name], alone[name], **tolerance, err_msg=name)
        for name in ("networks", "targets", "adam", "averaged"):
            np.testing.assert_array_equal(rank[name], found[0][name], err_msg=f"{name} differ between ranks")
    mean = np.mean([rank["losses"] for rank in found], axis=0)
    np.testing.assert_allclose(mean, alone["losses"], **tolerance)


def update_or_fail(folder: Path) -> None:
    agent = make_agent()
    try:  # rank 0 may hear of it before it is there itself
        update(agent, make_batch(0, 4))
        rows = make_batch(1, 4)
        update(agent, rows if ddpkit.get_rank() == 0 else rows._replace(seen=rows.seen[:, 1:]))
    except ddpkit.PeerError as error:
        (folder / f"rank{ddpkit.get_rank()}").write_text(f"{error.rank} {error.error_type}")
        raise


def test_a_rank_that_fails_in_an_update_is_named_on_the_others(tmp_path):
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        on_ranks(update_or_fail, 2, tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"rank0": "1 RuntimeError"}


# Learning


def test_the_actor_comes_to_prefer_the_way_that_pays_in_the_state_where_it_pays():
    """One feature tells the way that gains 1; the others gain nothing, and nothing later counts."""
    torch.manual_seed(3)
    agent = DDPG(CPU, hidden=32, a_lr=3e-3, c_lr=3e-3, gamma=0.0, tau=0.05)
    generator = torch.Generator().manual_seed(3)
    for _ in range(300):
        pays, way = torch.randint(0, 3, (2, 64), generator=generator)
        seen = torch.zeros(64, FEATURES)
        seen[torch.arange(64), 13 * pays] = 1
        update(agent, Batch(seen, way, (way == pays).float(), torch.zeros(64, FEATURES)))
    state = torch.zeros(3, FEATURES)
    state[range(3), [0, 13, 26]] = 1
    with torch.no_grad():
        chances, values = agent.actor(state), agent.critic(state)
    assert (chances.diagonal() > 0.9).all()
    np.testing.assert_allclose(values, np.eye(3), atol=0.1)


# Weights from files


def test_loaded_weights_are_those_of_networks_and_targets(tmp_path):
    trained, agent = make_agent(), DDPG(CPU, hidden=16, a_lr=0.01, c_lr=0.02, gamma=0.9, tau=0.1)
    update(trained, make_batch())
    torch.save(trained.actor.state_dict(), tmp_path / "actor_1.pth")
    torch.save(trained.critic.state_dict(), tmp_path / "critic_1.pth")
    agent.load(tmp_path / "actor_1.pth", tmp_path / "critic_1.pth")
    np.testing.assert_array_equal(flat(agent.networks), flat(trained.networks))
    np.testing.assert_array_equal(flat(agent.targets), flat(trained.networks))


@pytest.mark.parametrize(("actor", "critic", "named"), [(8, 16, "actor"), (16, 8, "critic")])
def test_weights_of_another_width_are_an_error_of_one_line_that_names_the_file(tmp_path, actor, critic, named):
    torch.save(Actor(actor).state_dict(), tmp_path / "actor_1.pth")
    torch.save(Critic(critic).state_dict(), tmp_path / "critic_1.pth")
    with pytest.raises(ValueError, match=rf"{named}_1.pth does not hold an? {named} .*\[8, .*16.*--hidden") as caught:
        make_agent().load(tmp_path / "actor_1.pth", tmp_path / "critic_1.pth")
    assert "\n" not in str(caught.value)


# The networks in bfloat16: near what they are in float32, and only where the CPU has it


@pytest.fixture
def network() -> Perceptron:
    torch.manual_seed(0)
    return Perceptron(64)


def test_bfloat16_is_near_float32_and_its_results_are_float32(network: Perceptron) -> None:
    seen = torch.rand(500, FEATURES)
    exact = network(seen)
    network.bfloat16 = True
    near = network(seen)
    assert near.dtype == torch.float32 and near.shape == (500, WAYS)
    assert not torch.equal(near, exact)
    assert (near - exact).abs().max() < 0.02 * exact.std()


def test_weights_and_gradients_stay_in_float32(network: Perceptron) -> None:
    seen = torch.rand(500, FEATURES)
    gradients = []
    for network.bfloat16 in (False, True):
        network.zero_grad()
        network(seen).square().mean().backward()
        gradients.append(torch.cat([weights.grad.flatten() for weights in network.parameters()]))
    exact, near = gradients
    assert near.dtype == torch.float32
    assert (near - exact).norm() < 0.02 * exact.norm()


def test_networks_begin_in_float32() -> None:
    assert not Actor(4).layers.bfloat16 and not Critic(4).values.bfloat16


@pytest.mark.parametrize(
    ("flags", "has"),
    [
        ("flags : fpu avx512f avx512_bf16 avx512vbmi", True),
        ("flags : fpu amx_bf16 amx_tile", True),
        ("flags : fpu avx2 avx512f", False),
        ("", False),
    ],
)
def test_the_cpu_is_asked_for_bfloat16(tmp_path: Path, flags: str, has: bool) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor : 0\n{flags}\n")
    assert computes_in_bfloat16(tmp_path / "cpuinfo") is has


def test_a_system_without_that_file_has_none(tmp_path: Path) -> None:
    assert not computes_in_bfloat16(tmp_path / "cpuinfo")
