"""Samplers against the obvious reference: one global order, written out, cut up by hand."""

import time
import tracemalloc
from collections import Counter
from itertools import chain

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from torch.utils.data import DistributedSampler as TorchSampler

import ddpkit
from ddpkit.data.samplers import DistributedEvalSampler, DistributedSampler, DistributedWeightedSampler

WORLDS = (1, 2, 3)
LARGE = 2**17 + 5  # above 2**17 an order is computed in blocks


def dealt(make, world_size):
    """The global order as the ranks together get it: position by position."""
    shards = [list(make(world_size, rank)) for rank in range(world_size)]
    assert [len(shard) for shard in shards] == [len(make(world_size, rank)) for rank in range(world_size)]
    longest = max(map(len, shards))
    return [shard[i] for i in range(longest) for shard in shards if i < len(shard)]


def sampler(n, world_size=1, rank=0, **options):
    return DistributedSampler(range(n), world_size, rank, **options)


@pytest.mark.parametrize("drop_last", [False, True])
def test_without_shuffling_it_deals_what_torchs_deals(drop_last):
    for n in range(1, 18):
        for world_size in range(1, 6 if not drop_last else min(n, 5) + 1):
            for rank in range(world_size):
                ours = DistributedSampler(range(n), world_size, rank, False, 0, drop_last)
                theirs = TorchSampler(range(n), world_size, rank, False, 0, drop_last)
                assert list(ours) == list(theirs) and len(ours) == len(theirs)


def test_for_evaluation_each_sample_comes_once_for_any_number_of_ranks():
    for n in range(1, 18):
        metric = np.arange(n) ** 2
        for world_size in range(1, 6):
            shards = [list(DistributedEvalSampler(range(n), world_size, rank)) for rank in range(world_size)]
            assert sorted(chain(*shards)) == list(range(n))
            assert max(map(len, shards)) - min(map(len, shards)) <= 1
            assert sum(int(metric[shard].sum()) for shard in shards if shard) == metric.sum()
            assert [len(DistributedEvalSampler(range(n), world_size, r)) for r in range(world_size)] == [
                len(shard) for shard in shards
            ]


@pytest.mark.parametrize("n", [17, LARGE])
def test_the_global_order_is_the_same_for_any_number_of_ranks(n):
    alone = dealt(lambda w, r: sampler(n, w, r, seed=3), 1)
    assert sorted(alone) == list(range(n)) and alone != list(range(n))
    for world_size in (2, 3, 5):
        together = dealt(lambda w, r: sampler(n, w, r, seed=3), world_size)
        assert together[:n] == alone
        assert together[n:] == alone[: -n % world_size]


def test_every_rank_gets_as_many_batches_and_each_sample_comes_once():
    """Any number of ranks has the global batches of one; padding comes only where a rank would get no batch."""
    for n in range(1, 26):
        alone = dealt(lambda w, r, n=n: sampler(n, w, r), 1)
        for world_size in (1, 2, 3, 4):
            for batch_size in (1, 2, 3, 5):
                made = [sampler(n, world_size, rank, batch_size=batch_size) for rank in range(world_size)]
                batches = [-(-len(s) // batch_size) for s in made]
                assert len(set(batches)) == 1
                assert max(map(len, made)) - min(map(len, made)) <= 1  # the end is spread evenly
                tail = n % (world_size * batch_size)
                padding = max(0, world_size - tail) if tail else 0
                everything = [list(s) for s in made]
                assert Counter(chain(*everything)) == Counter(alone) + Counter((alone * 4)[:padding])
                for step in range(batches[0]):
                    lo, hi = step * batch_size, (step + 1) * batch_size
                    union = sorted(chain(*(shard[lo:hi] for shard in everything)))
                    wanted = alone[lo * world_size : hi * world_size]
                    if step == batches[0] - 1:
                        wanted = wanted + (alone * 4)[:padding]
                    assert union == sorted(wanted)


def test_drop_last_leaves_out_the_incomplete_global_batch():
    alone = list(sampler(23))
    for world_size, batch_size, kept in [(1, 4, 20), (2, 2, 20), (2, 5, 20), (3, 1, 21), (3, 7, 21)]:
        got = dealt(lambda w, r, b=batch_size: sampler(23, w, r, drop_last=True, batch_size=b), world_size)
        assert got == alone[:kept]


@pytest.mark.parametrize("shuffle", [True, False])
def test_after_a_resume_come_exactly_the_samples_that_were_left(shuffle):
    """Every cut and every change of the number of ranks."""
    n, batch_size = 23, 2
    alone = list(sampler(n, shuffle=shuffle))
    for before in WORLDS:
        saved = sampler(n, before, before - 1, shuffle=shuffle, batch_size=batch_size)
        saved.set_epoch(0)
        for step in range(-(-n // (before * batch_size)) + 1):
            state, cut = saved.state_dict(), min(n, step * before * batch_size)
            assert state["consumed"] == cut
            for after in WORLDS:

                def resumed(w, r, state=state):
                    made = sampler(n, w, r, shuffle=shuffle, batch_size=batch_size)
                    made.load_state_dict(state)
                    made.set_epoch(state["epoch"])  # torch's habit, at the head of each epoch: it changes nothing
                    return made

                rest = dealt(resumed, after)
                assert rest[: n - cut] == alone[cut:]
                assert len(rest) - (n - cut) < after
                assert set(rest[n - cut :]) <= set(alone)
            saved.advance(before * batch_size)


def test_a_resume_works_in_a_large_order_too():
    alone = list(sampler(LARGE, seed=9))
    saved = sampler(LARGE, 2, 1, seed=9)
    saved.advance(131_000)
    made = [sampler(LARGE, 3, rank, seed=9) for rank in range(3)]
    for one in made:
        one.load_state_dict(saved.state_dict())
    rest = [index for step in zip(*made, strict=True) for index in step]
    assert rest[: LARGE - 131_000] == alone[131_000:]


def test_a_new_epoch_starts_at_its_front_after_a_resume():
    resumed = sampler(10)
    resumed.load_state_dict({"epoch": 2, "consumed": 7, "seed": 0, "n": 10, "shuffle": True})
    assert (resumed.epoch, len(resumed), len(list(resumed))) == (2, 3, 3)
    resumed.set_epoch(3)
    assert (resumed.consumed, len(resumed)) == (0, 10)
    assert sorted(resumed) == list(range(10))


def test_a_resumed_run_can_be_saved_again():
    first = sampler(20, 2, 0)
    first.advance(6)
    second = sampler(20, 3, 1)
    second.load_state_dict(first.state_dict())
    iter(second)
    second.advance(9)
    assert second.state_dict()["consumed"] == 15
    second.advance(9)
    assert second.state_dict()["consumed"] == 20  # padding is not counted


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"n": 21}, "n was 20 when the state was saved and is 21 now"),
        ({"seed": 5}, "seed was 1 when the state was saved and is 5 now"),
        ({"shuffle": False}, "shuffle was True when the state was saved and is False now"),
    ],
)
def test_a_state_of_another_order_is_refused(changed, message):
    state = sampler(20, seed=1).state_dict()
    made = sampler(**{"n": 20, "seed": 1, **changed})
    with pytest.raises(ValueError, match=message):
        made.load_state_dict(state)


def test_a_state_survives_torch_save_without_pickled_code(tmp_path):
    weighted = DistributedWeightedSampler([1.0, 2.0], np.int64(5), 1, 0, seed=np.int64(3))
    for made in (sampler(20, seed=np.int64(3)), weighted):
        torch.save(made.state_dict(), tmp_path / "state.pt")
        made.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))


@pytest.mark.parametrize("n", [50, LARGE])
def test_seed_epoch_and_length_each_give_another_order(n):
    def order(seed, epoch, n=n):
        made = sampler(n, seed=seed)
        made.set_epoch(epoch)
        return list(made)[:40]

    orders = [order(0, 0), order(0, 1), order(1, 0), order(1, 1), [i for i in order(0, 0, n + 1) if i < n]]
    assert len(set(map(tuple, orders))) == len(orders)
    assert order(0, 1) == order(0, 1)


def test_all_orders_of_five_are_equally_likely_over_epochs():
    made, counts = sampler(5, 1, 0), Counter()
    for epoch in range(12_000):
        made.set_epoch(epoch)
        counts[tuple(made)] += 1
    assert len(counts) == 120
    assert sum((count - 100) ** 2 / 100 for count in counts.values()) < 119 + 4 * (2 * 119) ** 0.5


def test_samples_stay_apart_from_the_global_generators():
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    list(sampler(1000)), list(DistributedWeightedSampler([1.0, 2.0], 10, 1, 0))
    assert torch.equal(before[0], torch.get_rng_state()) and before[1] == np.random.get_state()[1].tolist()


def test_a_hundred_million_samples_start_in_milliseconds_and_megabytes():
    list(sampler(1000))
    tracemalloc.start()
    start = time.thread_time()
    made = sampler(10**8, 8, 3)
    first = next(iter(made))
    seconds, (_, peak) = time.thread_time() - start, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0 <= first < 10**8 and len(made) == 12_500_000
    assert seconds < 0.2 and peak < 4e6  # 1 ms on an idle core


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sampler(0), "The dataset is empty"),
        (lambda: DistributedEvalSampler([], 1, 0), "The dataset is empty"),
        (lambda: sampler(3, 8, 0, drop_last=True), "drop_last=True drops all 3 samples: 8 ranks take 8"),
        (lambda: sampler(7, 2, 0, drop_last=True, batch_size=4), "drop_last=True drops all 7 samples"),
        (lambda: sampler(5, 2, 2), "rank is 2 and num_replicas is 2"),
        (lambda: DistributedEvalSampler(range(5), 2, -1), "rank must be an integer of at least 0, got -1"),
        (lambda: sampler(5, batch_size=0), "batch_size must be a positive integer, got 0"),
        (lambda: DistributedWeightedSampler([1, 2], 2.5, 1, 0), "num_samples must be a positive integer, got 2.5"),
        (lambda: DistributedWeightedSampler([1, -2], 2, 1, 0), "weights must be a vector of finite numbers >= 0"),
        (lambda: DistributedWeightedSampler([1, float("nan")], 2, 1, 0), "weights must be a vector"),
        (lambda: DistributedWeightedSampler([0, 0], 2, 1, 0), "at least one of them positive"),
        (lambda: DistributedWeightedSampler([], 2, 1, 0), "weights must be a vector"),
        (lambda: DistributedWeightedSampler([[1, 2]], 2, 1, 0), "weights must be a vector"),
        (lambda: DistributedWeightedSampler([1, 0], 2, 1, 0, replacement=False), "only 1 weights are positive"),
    ],
)
def test_what_cannot_be_dealt_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_dataset_without_a_length_is_refused():
    for cls in (DistributedSampler, DistributedEvalSampler):
        with pytest.raises(TypeError, match="generator has no __len__"):
            cls((i for i in range(3)), 1, 0)


@pytest.mark.parametrize("replacement", [True, False])
def test_weighted_draws_are_one_global_draw_that_resumes(replacement):
    weights = np.arange(40.0)

    def weighted(w, r, state=None):
        made = DistributedWeightedSampler(weights, 17, w, r, replacement, seed=4)
        made.set_epoch(6)
        if state:
            made.load_state_dict(state)
        return made

    alone = dealt(weighted, 1)
    assert len(alone) == 17 and 0 not in alone
    assert replacement or len(set(alone)) == 17
    for world_size in WORLDS:
        assert dealt(weighted, world_size) == alone + alone[: -17 % world_size]
        for cut in range(18):
            state = {**weighted(1, 0).state_dict(), "consumed": cut}
            assert dealt(lambda w, r, state=state: weighted(w, r, state), world_size)[: 17 - cut] == alone[cut:]
    state = weighted(1, 0).state_dict()
    with pytest.raises(ValueError, match=r"weights was .* when the state was saved"):
        DistributedWeightedSampler(weights + 1, 17, 1, 0, replacement, seed=4).load_state_dict(state)


def test_weighted_draws_follow_the_weights():
    weights, draws = np.array([0.0, 1.0, 2.0, 0.0, 5.0, 0.0]), 200_000
    drawn = np.array(list(DistributedWeightedSampler(torch.tensor(weights), draws, 1, 0)))
    counts, expected = np.bincount(drawn, minlength=6), draws * weights / 8
    assert np.all(np.abs(counts - expected) <= 4 * np.sqrt(expected))
    firsts = Counter()  # without replacement the first one follows the weights, the second those that are left
    made = DistributedWeightedSampler(weights, 2, 1, 0, replacement=False)
    for epoch in range(8000):
        made.set_epoch(epoch)
        firsts[tuple(made)] += 1
    for (first, second), count in firsts.items():
        mean = 8000 * weights[first] / 8 * weights[second] / (8 - weights[first])
        assert abs(count - mean) < 4 * mean**0.5


def test_weights_of_any_size_are_drawn_by_their_ratios():
    huge = [*DistributedWeightedSampler([1e308] * 3, 3000, num_replicas=1, rank=0)]
    assert min(huge.count(i) for i in range(3)) > 800
    tiny = [
        frozenset(DistributedWeightedSampler([1e-310] * 10, 3, 1, 0, replacement=False, seed=seed))
        for seed in range(20)
    ]
    assert len(set(tiny)) > 10


def test_a_samplers_attributes_are_also_those_of_torchs():
    ours = DistributedSampler(range(100), num_replicas=3, rank=1)
    theirs = TorchSampler(range(100), num_replicas=3, rank=1)
    assert (ours.num_samples, ours.total_size) == (theirs.num_samples, theirs.total_size) == (34, 102)
    for name in ("num_replicas", "rank", "shuffle", "seed", "drop_last", "epoch"):
        assert getattr(ours, name) == getattr(theirs, name)


def test_weights_that_change_afterwards_change_no_draw():
    for weights in (np.ones(4), torch.ones(4, dtype=torch.float64)):
        sampler = DistributedWeightedSampler(weights, 8, 1, 0)
        before, state = list(sampler), sampler.state_dict()
        weights[:3] = 0
        assert list(sampler) == before and sampler.state_dict() == state


@pytest.mark.parametrize("n", [50, LARGE])
def test_an_iterator_keeps_the_epoch_and_place_that_it_was_made_with(n):
    for made in (sampler(n, 2, 1), DistributedWeightedSampler(np.ones(n), n, 2, 1)):
        expected = list(made)
        indices = iter(made)
        made.set_epoch(5)
        assert list(indices) == expected
        made.set_epoch(0)
        indices = iter(made)
        made.load_state_dict({**made.state_dict(), "epoch": 2, "consumed": 10})
        assert list(indices) == expected


def test_a_place_that_is_given_asks_no_launcher(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")  # without the rest, which is an error where it is asked
    assert list(DistributedEvalSampler(range(5), 2, 1)) == [1, 3]
    with pytest.raises(ddpkit.LaunchError):
        DistributedEvalSampler(range(5), 2)


@pytest.mark.parametrize("train", [True, False])
def test_a_loader_in_place_of_its_dataset_is_refused_at_once(train):
    with pytest.raises(TypeError, match="this is a DataLoader: pass its `dataset`"):
        ddpkit.make_loader(DataLoader(range(4)), 2, train=train)
