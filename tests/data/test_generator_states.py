"""The states of generators: whatever kind NumPy's global one is, a checkpoint brings it back."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import on_ranks
from torch import nn

import ddpkit
from ddpkit import Checkpointer, CheckpointError, PeerError, make_loader
from ddpkit.data.seeds import check_rng_state, get_rng_state, set_rng_state

KINDS = ["MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"]


@pytest.fixture(autouse=True)
def own_generators() -> Iterator[None]:
    saved, bits = get_rng_state(), np.random.get_bit_generator()
    yield
    np.random.set_bit_generator(bits)
    set_rng_state(saved)


def draws() -> list[Any]:
    normal, whole = np.random.normal(size=3).tolist(), np.random.randint(0, 9, 3, dtype=np.uint8).tolist()
    return [normal, whole, random.random(), torch.rand(()).item()]


def use(kind: str, seed: int) -> None:
    np.random.set_bit_generator(getattr(np.random, kind)(seed))
    np.random.randint(0, 9, dtype=np.uint8)  # so that some bits are left over


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_brings_back_whatever_kind_numpys_global_generator_was(tmp_path: Path, kind: str) -> None:
    use(kind, 5)
    model, checkpoints = nn.Linear(2, 1), Checkpointer(tmp_path)
    checkpoints.save(1, model=model)
    after = draws()
    for other in KINDS:
        use(other, 7)
        checkpoints.load_latest(model=model)
        assert draws() == after
        assert type(np.random.get_bit_generator()).__name__ == kind


@pytest.mark.parametrize("kind", KINDS)
def test_a_peek_puts_back_whatever_kind_numpys_global_generator_is(kind: str) -> None:
    use(kind, 5)
    loader = make_loader(range(4), 2, collate_fn=lambda samples: np.random.rand())
    before = get_rng_state()
    loader.peek()
    assert str(get_rng_state()) == str(before)


@pytest.mark.parametrize("name", ["RandomState", "Generator", "BitGenerator", "Unheard", "rand", 5])
def test_a_saved_state_of_no_kind_of_numpys_is_refused(name: Any) -> None:
    state = get_rng_state() | {"numpy": {"bit_generator": name, "state": {}}}
    with pytest.raises(ValueError, match="random states"):
        check_rng_state(state)


class Own(np.random.PCG64):
    """Somebody's own kind of generator."""


def with_an_own_kind(folder: str) -> list[str]:
    model = nn.Linear(2, 1)
    nn.init.ones_(model.weight), nn.init.ones_(model.bias)
    checkpoints = Checkpointer(folder)
    checkpoints.save(1, model=model)
    former = np.random.get_bit_generator()
    if ddpkit.get_rank() == ddpkit.get_world_size() - 1:
        np.random.set_bit_generator(Own(3))
    with pytest.raises((CheckpointError, PeerError)) as caught:
        checkpoints.save(2, model=model)
    checkpoints.load_latest(model=model)
    loaded = type(np.random.get_bit_generator()).__name__
    np.random.set_bit_generator(former)
    return [str(caught.value), str(checkpoints.steps()), loaded]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_kind_of_somebodys_own_is_refused_by_a_save_on_every_rank_and_replaced_by_a_load(
    tmp_path: Path, world: int
) -> None:
    for text, steps, loaded in on_ranks(with_an_own_kind, world, str(tmp_path)):
        assert "draws from Own, which is none of NumPy's own kinds" in text
        assert (steps, loaded) == ("[1]", "MT19937")
