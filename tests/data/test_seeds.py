"""Seeds: the same everywhere, different where they should be."""

import random
from itertools import chain

import numpy as np
import pytest
import torch
from conftest import on_ranks

from ddpkit.data.samplers import DistributedSampler
from ddpkit.data.seeds import hash_seeds, sample_seed, seed_everything


@pytest.fixture(autouse=True)
def own_generators():
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(states[0]), np.random.set_state(states[1]), torch.set_rng_state(states[2])


def draws():
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def seeded_draws(seed, per_rank):
    return seed_everything(seed, per_rank=per_rank), draws()


def of_both_seeds(per_rank):
    return [seeded_draws(seed, per_rank) for seed in (0, 1)]


def test_a_seed_gives_the_draws_that_the_libraries_own_calls_give():
    used = seed_everything(11)
    ours = draws()
    random.seed(11), np.random.seed(11), torch.manual_seed(11)
    assert used == 11 and ours == draws()


def test_ranks_draw_alike_or_each_its_own():
    alike, apart = ([on_ranks(of_both_seeds, n, per_rank) for n in (1, 3)] for per_rank in (False, True))
    assert alike[1] == [alike[0][0]] * 3
    drawn = list(chain(*apart[1]))  # seeds 0 and 1 on ranks 0, 1 and 2: (0, 1) and (1, 0) differ
    for which in range(3):
        assert len({draw[which] for _, draw in drawn}) == 6
    assert len({used for used, _ in drawn}) == 6
    assert apart[0][0] == apart[1][0]  # rank 0 draws the same in any job


def test_numpy_takes_more_than_32_bits():
    assert seeded_draws(2**40, False)[1][1] != seeded_draws(0, False)[1][1]
    assert seeded_draws(2**63 - 1, False)[0] == 2**63 - 1


@pytest.mark.parametrize("kind", [np.int64, np.uint8, torch.tensor])
def test_a_seed_may_be_an_integer_of_any_kind(kind):
    assert seeded_draws(kind(11), False) == seeded_draws(11, False)
    assert seeded_draws(kind(11), True) == seeded_draws(11, True)


@pytest.mark.parametrize("seed", [1.0, "1", None])
def test_a_seed_that_is_no_integer_is_refused(seed):
    with pytest.raises(TypeError, match=f"A seed must be an integer, got {seed!r}"):
        seed_everything(seed)


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_a_seed_out_of_range_is_refused(seed):
    with pytest.raises(ValueError, match=r"A seed must be in \[0, 2\*\*63\), got"):
        seed_everything(seed)


def test_sample_seeds_differ_and_never_change():
    seeds = {sample_seed(s, e, i) for s in range(10) for e in range(10) for i in range(100)}
    assert len(seeds) == 10_000 and all(0 <= seed < 2**63 for seed in seeds)
    assert sample_seed(0, 1, 2) == sample_seed(np.int64(0), 1, np.int64(2)) == 5302496558757124415
    assert hash_seeds("order", 0, 1) == 4602570500139554110 != hash_seeds("sample", 0, 1)
    assert hash_seeds("order", 1, 23) != hash_seeds("order", 12, 3)


def test_sample_seeds_are_numbers_only():
    with pytest.raises(TypeError):
        sample_seed(0, 1.5, 2)


def test_a_seed_leaves_deterministic_settings_alone():
    def settings():
        cudnn = torch.backends.cudnn
        return cudnn.deterministic, cudnn.benchmark, torch.get_deterministic_debug_mode()

    before = settings()
    seed_everything(42)
    assert settings() == before


def test_the_order_of_samples_does_not_depend_on_the_seed_of_the_process():
    seed_everything(42)
    order = list(DistributedSampler(range(30), 1, 0))
    seed_everything(999)
    assert list(DistributedSampler(range(30), 1, 0)) == order
