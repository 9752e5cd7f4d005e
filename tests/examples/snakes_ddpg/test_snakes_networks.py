"""The networks in bfloat16: near what they are in float32, learnt in float32, and only where the CPU has it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from snakes.ddpg import Actor, Critic, Perceptron, computes_in_bfloat16
from snakes.features import FEATURES, WAYS


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
