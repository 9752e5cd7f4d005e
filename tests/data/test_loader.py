"""Loaders on real ranks against one process that goes through the same global order."""

import gc
import pickle
import random
import warnings
import weakref
from itertools import chain, islice

import numpy as np
import pytest
import torch
from conftest import on_ranks
from torch.utils.data import (
    ConcatDataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    StackDataset,
    Subset,
    random_split,
)
from torch.utils.data import DistributedSampler as TorchSampler

import ddpkit
from ddpkit.data.loader import make_loader
from ddpkit.data.samplers import DistributedSampler, DistributedWeightedSampler
from ddpkit.data.seeds import sample_seed

WORLDS = (1, 2, 3)
GLOBAL_BATCH = 6
LENGTHS = (1, 2, 5, 6, 7, 8, 17, 18, 20)


def workers(number):
    """Options for so many workers; in a spawned rank the default would have each of them import torch again."""
    return {"num_workers": number, "multiprocessing_context": "fork" if number else None}


class Noisy:
    """Each sample comes with the draws that a random augmentation would take, and the worker that took them."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return index, random.random(), float(np.random.rand()), float(torch.rand(()))


class Augmented(Noisy):
    """Its noise depends on seed, epoch and index alone."""

    epoch = None

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, index):
        return index, self.epoch, sample_seed(0, self.epoch, index) % 2**31


class Stream:
    """Numbers in files of three; it knows its epoch."""

    epoch = None

    def set_epoch(self, epoch):
        self.epoch = epoch

    def shard(self, index, num_shards):
        for file in range(index, 8, num_shards):
            for line in range(3):
                yield 3 * file + line, self.epoch, random.random()


class Whole(IterableDataset):
    def __iter__(self):
        return iter(range(5))


class Draws(IterableDataset):
    """A stream of one part; it draws once at its start and then for each sample."""

    epoch = None

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 8

    def __iter__(self):
        offset = random.random()
        return ((i, self.epoch, offset, random.random(), float(np.random.rand())) for i in range(8))


class Parts(Draws):
    def shard(self, index, num_shards):
        return (row for row in self if row[0] % num_shards == index)


def plain(batches):
    return [batch.tolist() for batch in batches]


def rows(batches):
    """The samples as tuples, of batches of tuples of tensors."""
    return [row for batch in batches for row in zip(*(column.tolist() for column in batch), strict=True)]


def one_epoch(n, batch_size=GLOBAL_BATCH, epoch=0, **options):
    loader = make_loader(range(n), batch_size, **options)
    loader.set_epoch(epoch)
    return plain(loader)


def union(shards, step):
    return sorted(chain(*(shard[step] for shard in shards if step < len(shard))))


def of_all_lengths(batch_size):
    return [
        (
            one_epoch(n, batch_size),
            one_epoch(n, batch_size, drop_last=True) if n >= GLOBAL_BATCH else [],
            one_epoch(n, batch_size, train=False),
        )
        for n in LENGTHS
    ]


def test_any_number_of_ranks_takes_the_same_samples_at_each_step():
    per_world = {w: on_ranks(of_all_lengths, w, GLOBAL_BATCH // w) for w in WORLDS}
    for which, n in enumerate(LENGTHS):
        alone, dropped, evaluated = per_world[1][0][which]
        assert sorted(chain(*alone)) == sorted(chain(*evaluated)) == list(range(n))
        assert dropped == [batch for batch in alone if len(batch) == GLOBAL_BATCH]
        for w in WORLDS:
            train, drop, evaluation = zip(*(per_world[w][rank][which] for rank in range(w)), strict=True)
            assert {len(shard) for shard in train} == {len(alone)}  # nobody waits for a step the others do not take
            for step, batch in enumerate(alone):
                sizes = [len(shard[step]) for shard in train]
                assert max(sizes) - min(sizes) <= 1
                padding = max(0, w - len(batch))
                assert union(train, step) == sorted(batch + (alone[0] * w)[:padding])
            assert [union(drop, step) for step in range(len(drop[0]))] == [sorted(batch) for batch in dropped]
            assert sorted(chain(*chain(*evaluation))) == list(range(n))


def cut_everywhere(n, batch_size):
    """The state inside the loop at every step, and after it."""
    loader, states = make_loader(range(n), batch_size, seed=5), []
    loader.set_epoch(3)
    states.append(loader.state_dict())
    for _ in loader:
        states.append(loader.state_dict())
    return [*states, loader.state_dict()]


def after_each_cut(n, batch_size, states):
    """What is left of the epoch, and the epoch after it."""
    rests = []
    for state in states:
        loader = make_loader(range(n), batch_size, seed=5)
        loader.load_state_dict(state)
        epoch = loader.epoch
        loader.set_epoch(epoch)  # torch's habit: no harm
        length, rest = len(loader), plain(loader)
        assert length == len(rest)
        rests.append((epoch, rest, plain(loader)))
        assert loader.epoch == epoch + 2
    return rests


def test_after_a_resume_on_any_number_of_ranks_come_exactly_the_samples_that_were_left():
    n = 20
    alone = {epoch: one_epoch(n, epoch=epoch, seed=5) for epoch in (3, 4, 5)}
    states = {w: on_ranks(cut_everywhere, w, n, GLOBAL_BATCH // w) for w in WORLDS}
    for w in WORLDS:
        assert all(state == states[1][0] for state in states[w])  # every rank saves the same, and any number of ranks
    consumed = [(state["epoch"], state["consumed"]) for state in states[1][0]]
    assert consumed == [(3, 0), (3, 6), (3, 12), (3, 18), (3, 20), (4, 0)]
    for w in WORLDS:
        resumed = on_ranks(after_each_cut, w, n, GLOBAL_BATCH // w, states[1][0])
        for cut, (epoch, done) in enumerate(consumed):
            left = alone[epoch][-(-done // GLOBAL_BATCH) :]
            shards = [rank[cut][1] for rank in resumed]
            padding = max(0, w - len(left[-1])) if left else 0
            assert {len(shard) for shard in shards} == {len(left)}
            for step, batch in enumerate(left):
                extra = padding if step == len(left) - 1 else 0
                got = union(shards, step)
                assert len(got) == len(batch) + extra and set(got) >= set(batch)
                assert extra or got == sorted(batch)
            following = [rank[cut][2] for rank in resumed]
            assert union(following, 0) == sorted(alone[epoch + 1][0])


def after_a_cut_with_workers(cut):
    """With two workers that fetch ahead: the state at a cut, then the rest, uninterrupted and resumed."""
    options = {**workers(2), "prefetch_factor": 3, "seed": 8}
    loader, rest = make_loader(Noisy(), 2, **options), []
    for step, batch in enumerate(loader, start=1):
        if step == cut:
            state = loader.state_dict()
        elif step > cut:
            rest.append(batch)
    resumed = make_loader(Noisy(), 2, **options)
    resumed.load_state_dict(state)
    return state["consumed"], rows(rest), rows(resumed)


def test_two_workers_with_prefetch_skip_nothing_and_repeat_the_augmentations():
    for w, cut in [(1, 5), (2, 3)]:
        for consumed, rest, resumed in on_ranks(after_a_cut_with_workers, w, cut):
            assert consumed == cut * 2 * w
            assert len(rest) == (24 - consumed) // w
            assert resumed == rest


def noise(num_workers, epochs=2, **options):
    loader = make_loader(Noisy(), 3, seed=1, shuffle=False, **workers(num_workers), **options)
    return [rows(loader) for _ in range(epochs)]


def noise_on_ranks():
    return noise(2, persistent_workers=True)


def test_random_numbers_of_workers_differ_between_ranks_workers_and_epochs():
    drawn = on_ranks(noise_on_ranks, 2)
    for which in (1, 2, 3):  # random, NumPy, torch
        numbers = [row[which] for rank in drawn for epoch in rank for row in epoch]
        assert len(set(numbers)) == len(numbers) == 48


def test_random_numbers_of_workers_depend_on_neither_their_number_nor_persistence():
    once = noise(1)
    assert noise(2) == once and noise(2, persistent_workers=True) == once
    assert make_noise_of_epoch_one() == once[1]
    assert noise(2, worker_init_fn=seed_badly) == once
    assert rows(make_loader(Noisy(), 3, num_workers=2, seed=2, shuffle=False)) != once[0]


def make_noise_of_epoch_one():
    loader = make_loader(Noisy(), 3, num_workers=1, seed=1, shuffle=False)
    loader.set_epoch(1)
    return rows(loader)


def seed_badly(worker):
    random.seed(0), np.random.seed(0), torch.manual_seed(0)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_global_random_numbers_are_left_alone(num_workers):
    def states():
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

    before = states()
    loader = make_loader(list(range(10)), 2, num_workers=num_workers)
    for _ in range(2):
        list(loader)
    assert states() == before


def test_without_workers_samples_draw_from_the_process():
    drawn = []
    for _ in range(2):
        torch.manual_seed(3)
        drawn.append([row[3] for row in rows(make_loader(Noisy(), 24))])
    torch.manual_seed(3)
    assert drawn[0] == drawn[1] == [float(torch.rand(())) for _ in range(24)]


def augmented(batch_size, num_workers):
    loader = make_loader(Augmented(), batch_size, **workers(num_workers), persistent_workers=num_workers > 0)
    return [rows(loader) for _ in range(2)]


def test_sample_seeds_augment_alike_on_any_number_of_ranks_and_workers():
    alone = augmented(6, 0)
    assert [{row[1] for row in epoch} for epoch in alone] == [{0}, {1}]
    for w, number in [(1, 2), (2, 0), (3, 1)]:
        shards = on_ranks(augmented, w, 6 // w, number)
        for epoch in (0, 1):
            assert sorted(chain(*(rank[epoch] for rank in shards))) == sorted(alone[epoch])


class Wrapper:
    """Somebody's own wrapper, which refers to itself and computes things when asked."""

    def __init__(self, dataset):
        self.dataset, self.itself = dataset, self
        self.datasets = [self, None]

    @property
    def other(self):
        raise RuntimeError("asked for")

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        return self.dataset[index]


def told():
    """The epochs that two loops over datasets in wrappers of any kind see."""
    wrapped = {
        "Subset": Subset(Augmented(), range(8)),
        "random_split": random_split(Augmented(), [8, 16])[0],
        "deep": Subset(Wrapper(Subset(Augmented(), range(8))), range(6)),
        "ConcatDataset": ConcatDataset([Subset(Augmented(), [0]), Augmented(), range(0)]),
        "StackDataset": StackDataset(Augmented(), Augmented()),
        "named StackDataset": StackDataset(one=Augmented(), other=Augmented()),
    }
    found = {}
    for name, dataset in wrapped.items():
        for number, options in ((0, {}), (2, {}), (1, {"persistent_workers": True})):
            loader = make_loader(dataset, 4, collate_fn=list, **workers(number), **options)
            loader.peek()
            found[f"{name}, {number}"] = [epochs_in(list(loader)) for _ in range(2)]
    return found


def epochs_in(rows):
    """The second of every three numbers."""
    if isinstance(rows, tuple) and isinstance(rows[0], int):
        return {rows[1]}
    parts = rows.values() if isinstance(rows, dict) else rows
    return set().union(*map(epochs_in, parts))


@pytest.mark.parametrize("w", [2])
def test_a_dataset_inside_wrappers_is_told_the_epoch(w):
    for found in on_ranks(told, w):
        for name, epochs in found.items():
            assert epochs == [{0}, {1}], name


def beside_another_loader(kind, number):
    """The epochs that each batch of a loop saw, while other loaders over the same dataset are used in its middle."""
    if kind == "stream":
        base = Stream()
        mine, others = base, base
    else:
        base = Augmented()
        mine, others = Subset(base, range(11)), Subset(base, range(11, 24))
    loader = make_loader(mine, 2, collate_fn=list, **workers(number))
    other = make_loader(others, 2, train=False, collate_fn=list)
    loader.set_epoch(4)
    seen = []
    for batch in loader:
        seen.append(epochs_in(batch))
        list(other), other.peek()
    return seen


@pytest.mark.parametrize("w", [1, 3])
def test_another_loader_over_the_same_dataset_leaves_the_epoch_of_this_one_alone(w):
    for kind in ("subset", "stream"):
        for number in (0, 2):
            for seen in on_ranks(beside_another_loader, w, kind, number):
                assert len(seen) >= 2 and all(epochs == {4} for epochs in seen), (kind, number)


def test_each_iteration_is_the_next_epoch():
    loader = make_loader(range(20), 4)
    epochs = [one_epoch(20, 4, epoch=epoch) for epoch in range(6)]
    assert plain(loader) == epochs[0] and loader.epoch == 1
    for _ in loader:
        assert (loader.epoch, len(loader)) == (1, 5)  # steady while the loop runs
        break
    assert (loader.epoch, loader.state_dict()["consumed"]) == (1, 4)  # a state after break counts the batch, too
    with pytest.warns(UserWarning, match="The loop over epoch 1 stopped after 4 of 20 samples; this loop starts epoch"):
        assert plain(loader) == epochs[2]
    loader.set_epoch(5)
    assert plain(loader) == epochs[5] and loader.epoch == 6
    loader.set_epoch(0)
    next(iter(loader))
    loader.set_epoch(0)
    assert plain(loader) == epochs[0]
    loader.sampler.set_epoch(3)  # torch's way
    assert plain(loader) == epochs[3] and loader.epoch == 4
    next(iter(loader))
    loader.sampler.set_epoch(5)
    assert plain(loader) == epochs[5]


def test_an_iterator_that_was_left_counts_nothing_anymore():
    loader = make_loader(range(20), 4)
    old = iter(loader)
    with pytest.warns(UserWarning, match="stopped after 0 of 20 samples"):
        new = iter(loader)
    next(new), next(new), list(old)
    assert (loader.epoch, loader.state_dict()["consumed"]) == (1, 8)
    loader = make_loader(range(20), 4)
    old = iter(loader)
    next(old)
    loader.set_epoch(0)  # of the same epoch
    next(iter(loader)), list(old)
    assert (loader.epoch, loader.state_dict()["consumed"]) == (0, 4)


class Lazy:
    """A sampler of one's own whose `__iter__` is a generator, which does nothing before it is asked for an index."""

    def __init__(self, n):
        self.n, self.epoch = n, 0
        self.num_replicas, self.rank = ddpkit.get_world_size(), ddpkit.get_rank()

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = torch.randperm(self.n, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        yield from order[self.rank :: self.num_replicas]


def samplers_of(n):
    """Nobody's, so that the loader makes one, somebody's own and torch's."""
    return None, Lazy(n), TorchSampler(range(n), ddpkit.get_world_size(), ddpkit.get_rank())


def changed_after_iter(n, batch_size, number):
    """What an iterator gives if the loader goes elsewhere before the first `next()`; and what it should."""
    pairs = []
    for sampler in samplers_of(n):
        loader = make_loader(range(n), batch_size, sampler=sampler, **workers(number))
        batches = iter(loader)
        loader.set_epoch(5)
        pairs.append((plain(batches), one_epoch(n, batch_size, sampler=sampler)))
    loader = make_loader(range(n), batch_size, **workers(number))
    state = {**loader.state_dict(), "epoch": 3, "consumed": GLOBAL_BATCH}
    batches = iter(loader)
    loader.load_state_dict(state)
    pairs.append((plain(batches), one_epoch(n, batch_size)))
    assert loader.state_dict() == state  # what the iterator gave is not of that epoch
    pairs.append((plain(loader), one_epoch(n, batch_size, epoch=3)[1:]))
    return pairs


@pytest.mark.parametrize("w", [1, 3])
def test_an_iterator_takes_its_epoch_and_place_when_it_is_made(w):
    for number in (0, 2):
        for pairs in on_ranks(changed_after_iter, w, 20, GLOBAL_BATCH // w, number):
            for got, expected in pairs:
                assert got == expected


class Numbered(Augmented):
    """It gives the index and the epoch that it was told."""

    def __getitem__(self, index):
        return index, self.epoch


def side_by_side(number):
    """What zip() and nested loops over one loader give, for each sampler; and its epochs 0 to 2 one by one."""
    found = []
    for sampler in samplers_of(24):
        options = {"collate_fn": list, "sampler": sampler, **workers(number)}
        zipped = make_loader(Numbered(), 2, **options)
        zipped.set_epoch(0)  # the sampler was in other loaders
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            pairs = list(zip(zipped, zipped, strict=True))
        nested = make_loader(Numbered(), 2, **options)
        nested.set_epoch(0)
        outer, inner = [], []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for step, batch in enumerate(nested):
                outer.append(batch)
                if step < 2:
                    inner.append(list(nested))
        one_by_one = make_loader(Numbered(), 2, **options)
        one_by_one.set_epoch(0)
        epochs = [list(one_by_one) for _ in range(3)]
        said = [str(each.message) for each in caught]
        ours = [text for text in said if "multi-threaded" not in text]  # so says Python 3.12 of every fork
        found.append((pairs, [outer, *inner], epochs, ours))
    return found


@pytest.mark.parametrize("w", [pytest.param(1, marks=pytest.mark.storm), 2, pytest.param(3, marks=pytest.mark.storm)])
def test_loops_over_one_loader_at_once_are_each_over_an_epoch_of_their_own(w):
    for number in (0, 2):
        for found in on_ranks(side_by_side, w, number):
            for pairs, nested, epochs, _ in found:
                assert [list(one) for one in zip(*pairs, strict=True)] == epochs[:2]
                assert nested == epochs
            ours = found[0][3]
            assert (
                len(ours) == 1
                and "stopped after 0 of 24 samples" in ours[0]
                and "unless the earlier loop continues" in ours[0]
            )


def zipped_streams(number):
    loader = make_loader(Stream(), 2, **workers(number))
    return [rows(one) for one in zip(*zip(loader, loader, strict=True), strict=True)], [rows(loader)]


@pytest.mark.parametrize("w", [2])
def test_loops_over_one_stream_at_once_are_each_over_an_epoch_of_their_own(w):
    for number in (0, 2):
        for zipped, after in on_ranks(zipped_streams, w, number):
            assert [{row[1] for row in rows} for rows in zipped + after] == [{0}, {1}, {2}]
            assert [row[0] for row in zipped[0]] == [row[0] for row in zipped[1]] == [row[0] for row in after[0]]


def test_persistent_workers_serve_one_loop_at_a_time():
    for dataset in (range(24), Stream()):
        loader = make_loader(dataset, 2, train=False, num_workers=1, persistent_workers=True, collate_fn=list)
        with pytest.raises(ddpkit.DdpkitError, match="persistent workers serve one loop at a time"):
            for _ in zip(loader, loader, strict=True):
                pass
        assert len(list(loader)) == 12  # the next loop is whole


def resumed_at(n, batch_size, consumed, **options):
    loader = make_loader(range(n), batch_size, seed=5, **options)
    loader.load_state_dict({**loader.state_dict(), "epoch": 3, "consumed": consumed})
    return loader


def peek_and_go_on(n, batch_size, consumed, num_workers):
    """What a peek at a resumed loader shows, and what comes after it; and both without one."""
    options = workers(num_workers)
    with_peek, without = resumed_at(n, batch_size, consumed, **options), resumed_at(n, batch_size, consumed, **options)
    peeked = with_peek.peek().tolist()
    states = [with_peek.state_dict(), without.state_dict()]
    return peeked, [plain(with_peek) for _ in range(2)], [plain(without) for _ in range(2)], states


@pytest.mark.parametrize("w", [1, 3])
def test_a_peek_shows_the_next_batch_and_counts_nothing(w):
    for number in (0, 2):
        for peeked, after, expected, states in on_ranks(peek_and_go_on, w, 20, GLOBAL_BATCH // w, 6, number):
            assert peeked == expected[0][0] and after == expected and states[0] == states[1]


def test_a_peek_draws_no_random_numbers_and_finds_something_where_nothing_is_left():
    torch.manual_seed(0)
    random.seed(0)
    before = torch.get_rng_state(), random.getstate()
    assert [len(column) for column in make_loader(Noisy(), 4).peek()] == [4] * 4
    assert torch.equal(before[0], torch.get_rng_state()) and random.getstate() == before[1]
    done = resumed_at(20, 8, 20)
    assert done.peek().tolist() == list(range(8)) and plain(done) == []
    assert [len(column) for column in make_loader(Stream(), 4).peek()] == [4] * 3
    assert make_loader(range(3), 8, train=False).peek().tolist() == [0, 1, 2]


class OwnOrder:
    """A sampler of one rank's part of an order that torch's global generator draws."""

    def __init__(self, n):
        self.num_replicas, self.rank = ddpkit.get_world_size(), ddpkit.get_rank()
        self.inner = RandomSampler(range(n))

    def __iter__(self):
        return iter([*self.inner][self.rank :: self.num_replicas])

    def __len__(self):
        return len(range(self.rank, self.inner.num_samples, self.num_replicas))


def two_epochs(number, peeks):
    """What two epochs give, and the global numbers after them."""
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    dataset = Noisy()
    sampler = OwnOrder(len(dataset))
    loader, epochs = make_loader(dataset, 5, sampler=sampler, collate_fn=list, **workers(number)), []
    for _ in range(2):
        seen = [loader.peek() for _ in range(peeks)]
        epochs.append(list(loader))
        assert all(batch == seen[0] for batch in seen)
        assert number or not seen or seen[0] == epochs[-1][0]
    return epochs, random.random(), np.random.rand(), float(torch.rand(()))


def with_and_without_peeks():
    return [[two_epochs(number, peeks) for peeks in (2, 0)] for number in (0, 2)]


@pytest.mark.parametrize("w", [2])
def test_a_peek_leaves_the_global_generators_as_they_were(w):
    for found in on_ranks(with_and_without_peeks, w):
        assert all(with_peeks == without for with_peeks, without in found)


def test_a_loop_left_early_after_a_resume_is_not_silent():
    loader = resumed_at(20, 4, 12)
    next(iter(loader))
    with pytest.warns(
        UserWarning, match=r"epoch 3 stopped after 16 of 20 samples; .* epoch 4\. .*peek\(\).*epochs\(n\)"
    ):
        assert plain(loader) == one_epoch(20, 4, epoch=4, seed=5)


def test_a_loop_that_had_its_last_batch_was_not_left_early():
    for options, batches in (({}, 7), ({"drop_last": True}, 6)):
        loader = make_loader(range(20), 3, **options)
        assert len([batch for _, batch in zip(range(batches), loader, strict=False)]) == batches
        assert len(plain(loader)) == batches and loader.epoch == 2


def test_evaluation_and_streams_may_be_left_at_any_time():
    for loader in (make_loader(range(20), 4, train=False), make_loader(Stream(), 4)):
        next(iter(loader))
        assert len(list(loader)) >= 5


def all_epochs(n, batch_size, consumed):
    loader = resumed_at(n, batch_size, consumed)
    next(iter(loader))  # undone by the loop over epochs
    return [(epoch, plain(loader)) for epoch in loader.epochs(6)]


@pytest.mark.parametrize("w", WORLDS)
def test_the_loop_over_epochs_goes_on_where_the_state_was(w):
    for (epoch, rest), *later in on_ranks(all_epochs, w, 20, GLOBAL_BATCH // w, 12):
        assert epoch == 3 and len(rest) == 2
        assert [number for number, _ in later] == [4, 5] and {len(batches) for _, batches in later} == {4}


def test_epochs_may_be_cut_short_on_purpose():
    loader = make_loader(range(20), 4)
    seen = []
    for epoch in loader.epochs(3):
        for batch in loader:
            seen.append((epoch, batch.tolist()))
            break
    assert seen == [(epoch, one_epoch(20, 4, epoch=epoch)[0]) for epoch in range(3)]
    assert list(loader.epochs(np.int64(2))) == []


def cut_short(n, batch_size, batches, epochs, state=None, stop=None, inside=True):
    """The samples of epochs that are cut after so many batches, as the guide does it; and the state at a step."""
    loader, seen, step = make_loader(range(n), batch_size), [], 0
    if state:
        loader.load_state_dict(state)
    for epoch in loader.epochs(epochs):
        left = batches - loader.sampler.consumed // GLOBAL_BATCH
        for batch in islice(loader, left):
            seen.append((epoch, batch.tolist()))
            step += 1
            if step == stop and inside:
                return seen, loader.state_dict()
        loader.set_epoch(epoch + 1)
        if step == stop:
            return seen, loader.state_dict()
    return seen


@pytest.mark.parametrize("w", WORLDS)
def test_a_run_of_epochs_cut_short_resumes_with_as_many_batches(w):
    size = GLOBAL_BATCH // w
    whole = on_ranks(cut_short, w, 20, size, 2, 3)
    assert {len(seen) for seen in whole} == {6}
    for stop, inside in [(1, True), (2, True), (2, False), (3, True)]:
        for rank, (seen, state) in enumerate(on_ranks(cut_short, w, 20, size, 2, 3, None, stop, inside)):
            assert seen == whole[rank][:stop]
            saved = state
        for rank, rest in enumerate(on_ranks(cut_short, w, 20, size, 2, 3, saved)):
            assert rest == whole[rank][stop:]


def test_a_loader_says_what_it_is():
    loader = resumed_at(20, 4, 12)
    assert repr(loader) == "Loader(range, batch_size=4, rank=0, epoch=3, consumed=12 of 20)"
    assert repr(make_loader(Parts(), 4)) == "Loader(Parts, batch_size=4, rank=0, epoch=0)"


@pytest.mark.parametrize(
    "state",
    [[], {}, {"epoch": "3"}, {"epoch": -1}, {"epoch": True}, {"consumed": 21}, {"consumed": -1}, {"consumed": None}],
)
def test_a_state_that_leads_nowhere_is_refused_and_changes_nothing(state):
    loader = make_loader(range(20), 4)
    before = loader.state_dict()
    with pytest.raises((ValueError, TypeError)):
        loader.load_state_dict({**before, **state} if state else state)
    assert loader.state_dict() == before and plain(loader) == one_epoch(20, 4)


def on_a_default_device(device):
    torch.set_default_device(device)
    try:
        data = torch.utils.data.TensorDataset(torch.arange(20, device="cpu"))
        loader = make_loader(data, 4, seed=5)
        batches = [batch.tolist() for (batch,) in loader]
        state = loader.state_dict()
        loader.load_state_dict(state)
        peeked = loader.peek()[0].tolist()
        weighted = make_loader(data, 4, sampler=DistributedWeightedSampler(np.ones(20), 8))
        streamed = [len(batch) for batch in make_loader(Stream(), 4, collate_fn=list)]
        return batches, peeked, [batch.tolist() for (batch,) in weighted], streamed
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("w", [1, 2])
def test_the_default_device_does_not_matter(w):
    assert on_ranks(on_a_default_device, w, "meta") == on_ranks(on_a_default_device, w, "cpu")


def test_a_state_of_the_last_batch_leaves_an_empty_loop():
    loader = make_loader(range(20), 8)
    states = [loader.state_dict() for _ in loader]
    resumed = make_loader(range(20), 8)
    resumed.load_state_dict(states[-1])
    assert (resumed.epoch, len(resumed), plain(resumed)) == (0, 0, [])
    assert (resumed.epoch, len(resumed)) == (1, 3)
    assert plain(resumed) == one_epoch(20, 8, epoch=1)


def test_a_state_of_other_data_is_refused():
    state = make_loader(range(20), 4).state_dict()
    with pytest.raises(ValueError, match="n was 20 when the state was saved and is 21 now"):
        make_loader(range(21), 4).load_state_dict(state)
    with pytest.raises(ValueError, match="shuffle was True when the state was saved and is False now"):
        make_loader(range(20), 4, shuffle=False).load_state_dict(state)


@pytest.mark.parametrize("no", [False, 0, np.False_, "", 0.0])
def test_any_false_value_leaves_the_order_alone_as_in_torch(no):
    loader = make_loader(range(8), 4, shuffle=no)
    assert plain(loader) == plain(torch.utils.data.DataLoader(range(8), 4, shuffle=no))
    assert repr(loader.state_dict()["shuffle"]) == "False"  # plain data, whatever was passed
    assert plain(make_loader(range(4), 4, train=False, shuffle=no)) == [[0, 1, 2, 3]]
    assert plain(make_loader(Whole(), 5, shuffle=no)) == [[0, 1, 2, 3, 4]]
    assert plain(make_loader(range(4), 4, sampler=SequentialSampler(range(4)), shuffle=no)) == [[0, 1, 2, 3]]


@pytest.mark.parametrize("yes", [True, 1, np.True_, "yes", None])
def test_any_true_value_shuffles(yes):
    loader = make_loader(range(8), 4, shuffle=yes)
    assert plain(loader) == plain(make_loader(range(8), 4)) != [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert repr(loader.state_dict()["shuffle"]) == "True"


def test_a_sampler_whose_set_epoch_is_no_function_is_used_as_it_is():
    sampler = OwnOrder(8)
    sampler.set_epoch = "not a method"
    loader = make_loader(range(8), 2, sampler=sampler)
    loader.set_epoch(5)
    assert sorted(chain(*plain(loader))) == list(range(8))
    assert loader.sampler is sampler and sampler.set_epoch == "not a method"


def test_a_loader_can_be_pickled():
    loader = make_loader(range(12), 3)
    assert plain(pickle.loads(pickle.dumps(loader))) == plain(loader)


def test_a_loader_that_nobody_holds_is_freed():
    loader = make_loader(range(16), 4)
    batches = iter(loader)
    next(batches)
    known = weakref.ref(loader)
    del loader, batches
    gc.collect()
    assert known() is None


def test_it_shows_what_a_data_loader_shows():
    loader = make_loader(range(20), 4, drop_last=True)
    assert isinstance(loader, torch.utils.data.DataLoader)
    assert (loader.batch_size, loader.drop_last, loader.dataset, len(loader)) == (4, True, range(20), 5)
    assert isinstance(loader.sampler, DistributedSampler) and loader.pin_memory is False


def with_samplers():
    n, world_size = 20, ddpkit.get_world_size()
    weighted = make_loader(range(n), 3, sampler=DistributedWeightedSampler(np.arange(n), 12))
    first = plain(weighted)
    for _ in weighted:
        break
    state = weighted.state_dict()
    torchs = make_loader(range(n), 3, sampler=TorchSampler(range(n), world_size, ddpkit.get_rank()))
    if world_size == 1:
        assert len(plain(make_loader(range(n), 3, sampler=RandomSampler(range(n))))) == 7
        with pytest.raises(ValueError, match="The sampler is for rank 1 of 2, but this is rank 0 of 1"):
            make_loader(range(n), 3, sampler=DistributedSampler(range(n), 2, 1))
    else:
        words = "RandomSampler does not split its samples: each of 2 ranks would load.*DistributedWeightedSampler"
        with pytest.raises(TypeError, match=words):
            make_loader(range(n), 3, sampler=RandomSampler(range(n)))
        with pytest.raises(TypeError, match=r"Whole has no shard\(index, num_shards\): each of 2 readers"):
            make_loader(Whole(), 2)
    return first, state, plain(torchs), plain(torchs), torchs.epoch


def test_a_sampler_of_ones_own_is_used_as_it_is():
    alone, together = on_ranks(with_samplers, 1), on_ranks(with_samplers, 2)
    (draws, _, *_), (halves, states, first, second, epochs) = alone[0], zip(*together, strict=True)
    assert sorted(chain(*chain(*halves))) == sorted(chain(*draws))
    assert states[0] == states[1] and states[0]["consumed"] == 6
    assert sorted(chain(*chain(*first))) == list(range(20)) and first != second and epochs == (2, 2)


class Repeated(Sampler):
    """A sampler of a user's, which deals each sample three times."""

    def __init__(self, n):
        self.num_replicas, self.rank = ddpkit.get_world_size(), ddpkit.get_rank()
        self.n, self.epoch = n, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.epoch)
        order = torch.randperm(self.n, generator=generator).repeat_interleave(3)
        return iter(order[self.rank :: self.num_replicas][: len(self)].tolist())

    def __len__(self):
        return self.n // self.num_replicas


def saved_between_epochs(folder):
    """What is said inside an epoch; the batches of the epochs of a run, and of one resumed after the first."""
    net, checkpointer = torch.nn.Linear(1, 1), ddpkit.Checkpointer(folder)
    loader = make_loader(range(48), 4, sampler=Repeated(48))
    epochs, said = [], []
    for epoch in loader.epochs(3):
        epochs.append([])
        for batch in loader:
            epochs[-1].append(batch.tolist())
            if epoch == 1 and not said:
                with pytest.raises(TypeError) as caught:
                    loader.state_dict()
                said.append(str(caught.value))
        if epoch == 0:
            checkpointer.save(1, net=net, loader=loader)
    resumed = make_loader(range(48), 4, sampler=Repeated(48))
    checkpointer.load_latest(net=net, loader=resumed)
    return said, epochs[1:], [plain(resumed) for _ in resumed.epochs(3)]


@pytest.mark.parametrize("w", [2])
def test_the_end_of_an_epoch_is_kept_where_a_sampler_cannot_resume_inside(w, tmp_path):
    for (said,), went_on, resumed in on_ranks(saved_between_epochs, w, str(tmp_path)):
        assert resumed == went_on
        assert "Repeated cannot resume inside an epoch, and batch 1 of epoch 1 is done. Take the state at" in said


def test_a_state_inside_an_epoch_is_not_given_to_a_sampler_that_cannot_resume():
    loader = make_loader(range(9), 2, sampler=TorchSampler(range(9), 1, 0))
    assert loader.state_dict() == {"epoch": 0, "batches": 0}
    with pytest.raises(TypeError, match="DistributedSampler cannot resume inside an epoch, and batch 3 of epoch 5"):
        loader.load_state_dict({"epoch": 5, "batches": 3})
    with pytest.raises(TypeError, match="A sampler's state is a dict, got a int"):
        loader.load_state_dict(5)
    with pytest.raises(ValueError, match="the state has epoch 5 with None batches done"):
        loader.load_state_dict({"epoch": 5, "consumed": 3})
    assert loader.epoch == 0


def test_an_epoch_that_was_ended_early_is_kept_too():
    loader = make_loader(range(9), 2, sampler=RandomSampler(range(9)))
    next(iter(loader))
    with pytest.raises(TypeError, match=r"after set_epoch\(epoch \+ 1\)"):
        loader.state_dict()
    loader.set_epoch(1)
    assert loader.state_dict() == {"epoch": 1, "batches": 0}


def with_noise(samples):
    return [(index, random.random()) for index, *_ in samples]


def test_random_numbers_of_a_collate_function_depend_on_the_batch_alone():
    found = []
    for number, persistent in [(1, False), (2, False), (2, True)]:
        loader = make_loader(Noisy(), 4, collate_fn=with_noise, **workers(number), persistent_workers=persistent)
        found.append([list(loader), list(loader)])
    assert found[0] == found[1] == found[2] and found[0][0] != found[0][1]


def of_two_readers(rank):
    """What a reader gets of samples dealt to two, with random augmentations in a worker; then of a stream."""
    place = {"num_replicas": 2, "rank": rank}
    loader = make_loader(Noisy(), 4, **place, **workers(1))
    first = rows(loader)
    torchs = make_loader(range(20), 3, sampler=TorchSampler(range(20), 2, rank), **place)
    with pytest.raises(ValueError, match="pass num_replicas and rank here, too"):
        make_loader(range(20), 3, sampler=TorchSampler(range(20), 5, 4), **place)
    stream = rows(make_loader(Stream(), 4, **place, **workers(1)))
    return first, plain(torchs), stream, loader.state_dict(), len(make_loader(range(20), 4, train=False, **place))


def test_ranks_of_one_number_load_equal_batches():
    peers, (second,), (first,) = (
        on_ranks(of_two_readers, 3, 1),
        on_ranks(of_two_readers, 1, 1),
        on_ranks(of_two_readers, 1, 0),
    )
    assert peers == [second] * 3 and first[:3] != second[:3]
    for ours, others in zip(first[:3], second[:3], strict=True):
        assert not set(map(str, ours)) & set(map(str, others))
    assert first[3] == second[3] and first[4] == second[4] == 3
    with pytest.raises(ValueError, match="rank is 2 and num_replicas is 2"):
        make_loader(range(20), 3, num_replicas=2, rank=2)


def streamed(num_workers, **options):
    loader = make_loader(Stream(), 2, **workers(num_workers), **options)
    return [rows(loader) for _ in range(2)]


def test_a_stream_is_spread_over_ranks_and_workers():
    assert [row[0] for row in streamed(0)[0]] == list(range(24))
    for w, number in [(1, 2), (2, 0), (3, 2)]:
        for options in [{}, {"persistent_workers": True}] if number else [{}]:
            shards = on_ranks(streamed_with, w, number, options)
            drawn = []
            for epoch in (0, 1):
                read = list(chain(*(rank[epoch] for rank in shards)))
                assert sorted(row[0] for row in read) == list(range(24))
                assert {row[1] for row in read} == {epoch}
                drawn += [row[2] for row in read]
            assert not number or len(set(drawn)) == 48


def streamed_with(num_workers, options):
    return streamed(num_workers, **options)


def test_on_one_rank_any_stream_will_do():
    loader = make_loader(Whole(), 2, train=False)
    assert plain(loader) == [[0, 1], [2, 3], [4]] and loader.epoch == 1
    assert loader.state_dict()["batches"] == 0
    assert plain(make_loader(Whole(), 2, num_workers=1)) == [[0, 1], [2, 3], [4]]
    told = make_loader(Draws(), 2, collate_fn=list, num_workers=1, persistent_workers=True)
    assert [epochs_in(list(told)) for _ in range(3)] == [{0}, {1}, {2}]
    assert len(told) == 4
    with pytest.raises(TypeError, match="shards have no known length"):
        len(make_loader(Parts(), 2))


def test_a_stream_without_shards_is_not_read_by_several_workers():
    with pytest.raises(TypeError, match=r"Whole has no shard\(index, num_shards\): each of 2 readers would read all"):
        make_loader(Whole(), 2, num_workers=2)


@pytest.mark.parametrize(
    ("error", "arguments", "message"),
    [
        (ValueError, {"batch_size": 0}, "batch_size must be a positive integer, got 0"),
        (ValueError, {"batch_size": 2.0}, "batch_size must be a positive integer, got 2.0"),
        (ValueError, {"batch_size": True}, "batch_size must be a positive integer, got True"),
        (ValueError, {"dataset": Stream(), "batch_size": 0}, "batch_size must be a positive integer, got 0"),
        (TypeError, {"batch_size": None}, "either batch_size, .* or global_batch_size, .*; got None and None"),
        (TypeError, {"global_batch_size": 2}, "either batch_size, .* or global_batch_size, .*; got 2 and 2"),
        (
            ValueError,
            {"batch_size": None, "global_batch_size": 4, "accumulation": 3},
            "global_batch_size=4 does not divide into accumulation=3 equal batches",
        ),
        (ValueError, {"accumulation": 0}, "accumulation must be a positive integer, got 0"),
        (ValueError, {"dataset": []}, "The dataset is empty"),
        (ValueError, {"dataset": [], "train": False}, "The dataset is empty"),
        (ValueError, {"batch_size": 9, "drop_last": True}, "drop_last=True drops all 8 samples"),
        (ValueError, {"train": False, "shuffle": True}, "remove shuffle and drop_last"),
        (ValueError, {"train": False, "drop_last": True}, "remove shuffle and drop_last"),
        (ValueError, {"sampler": RandomSampler(range(8)), "shuffle": True}, "Remove shuffle"),
        (
            ValueError,
            {"sampler": DistributedSampler(range(8), 1, 0, batch_size=4)},
            "The sampler deals batches of 4 samples, the loader of 2",
        ),
        (ValueError, {"dataset": Stream(), "shuffle": True}, "Remove shuffle"),
        (ValueError, {"dataset": Stream(), "sampler": RandomSampler(range(8))}, "remove the sampler"),
        (TypeError, {"dataset": (i for i in range(3))}, "generator has no __len__"),
        (TypeError, {"dataset": None}, "NoneType has no __len__"),
        (TypeError, {"generator": torch.Generator()}, "takes no generator: it seeds its own"),
        (TypeError, {"batch_sampler": [[1]]}, "takes no batch_sampler: it builds its own"),
        (TypeError, {"in_order": False}, "takes no in_order: batches out of order can be neither"),
        (TypeError, {"num_worker": 2}, r"has no option num_worker: did you mean num_workers\?"),
    ],
)
def test_what_cannot_be_loaded_is_refused(error, arguments, message):
    with pytest.raises(error, match=message):
        make_loader(**{"dataset": range(8), "batch_size": 2, **arguments})


class Ends:
    """A dataset in which a call of the script raises StopIteration, as `next()` of an empty iterator does."""

    epoch = 0

    def __init__(self, place):
        self.place = place

    def __len__(self):
        return 24

    def set_epoch(self, epoch):
        self.epoch = epoch
        if self.place == "set_epoch" and epoch == 1:
            next(iter([]))

    def __getitem__(self, index):
        return next(iter([])) if self.place == "sample" and index == 8 else index

    def collate(self, samples):
        return next(iter([])) if self.place == "collate" and 8 in samples else samples


def batches_and_errors(loader):
    batches, errors = iter(loader), []
    found = []
    while True:
        try:
            found.append(next(batches))
        except StopIteration:
            return found, errors
        except RuntimeError as error:
            errors.append(str(error))


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("number", [0, 2])
@pytest.mark.parametrize("place", ["sample", "collate"])
@pytest.mark.parametrize("train", [True, False])
def test_a_scripts_stop_iteration_is_an_error_that_names_the_samples(number, place, train):
    rank, size = ddpkit.get_rank(), ddpkit.get_world_size()
    dataset = Ends(place)
    options = {"shuffle": False if train else None, "collate_fn": dataset.collate, "train": train}
    loader = make_loader(dataset, 2, **options, **workers(number))
    found, errors = batches_and_errors(loader)
    mine = [list(range(24))[rank::size][i : i + 2] for i in range(0, 24, 2)]
    assert found == [batch for batch in mine if batch and 8 not in batch]
    assert len(errors) == (8 % size == rank) and loader.epoch == 1
    for error in errors:
        samples = ", ".join(map(str, next(batch for batch in mine if 8 in batch)))
        assert f"epoch 0, samples {samples}, raised StopIteration" in error


def test_stop_iteration_in_a_micro_batch_or_in_set_epoch_is_an_error():
    sizes = {"global_batch_size": 6, "micro_batch_size": 2, "shuffle": False}
    found, errors = batches_and_errors(ddpkit.make_micro_batch_loader(Ends("sample"), **sizes))
    assert len(found) == 3 and len(errors) == 1 and "samples 8, 9, raised" in errors[0]
    loader = make_loader(Ends("set_epoch"), 2)
    assert len(list(loader)) == 12
    with pytest.raises(RuntimeError, match=r"Ends\.set_epoch\(\) raised StopIteration"):
        list(loader)
