"""Streams of Hugging Face's `datasets` and of WebDataset, as they are: read once, in their epochs, and resumed."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from conftest import on_ranks

import ddpkit
from ddpkit import Loader, make_loader

with suppress(ImportError):
    import datasets.distributed
    import webdataset as wds

pytestmark = pytest.mark.peers("datasets", "webdataset")

SIZES = [7, 3, 10, 1, 4, 9, 2, 8, 5, 6, 11, 3, 7]  # samples of each shard
SHARDS = list(range(len(SIZES)))


def workers(number: int, persistent: bool = False) -> dict[str, Any]:
    """Options for so many workers; in a spawned rank the default would have each of them import torch again."""
    if number == 0:
        return {}
    return {"num_workers": number, "multiprocessing_context": "fork", "persistent_workers": persistent}


def numbers(shards: list[int]) -> Iterator[dict[str, int]]:
    for shard in shards:
        for sample in range(SIZES[shard]):
            yield {"i": 100 * shard + sample}


ALL = [sample["i"] for sample in numbers(SHARDS)]


def in_order(shards: list[int] = SHARDS) -> Any:
    return datasets.IterableDataset.from_generator(numbers, gen_kwargs={"shards": shards})


def shuffled() -> Any:
    return in_order().shuffle(seed=1, buffer_size=10)


def mapped() -> Any:
    return in_order().map(lambda sample: {"i": sample["i"]}).with_format("torch")


def mixed() -> Any:
    halves = [in_order(SHARDS[:6]), in_order(SHARDS[6:12])]
    return datasets.interleave_datasets(halves, stopping_strategy="all_exhausted_without_replacement")


def read(loader: Loader) -> list[int]:
    return [int(i) for batch in loader for i in batch["i"]]


def read_epochs(make: Callable[..., Any], args: list[Any], epochs: int, options: list[Any]) -> list[list[list[int]]]:
    """What a rank reads in each epoch, for each number of workers."""
    found = []
    for number, persistent in options:
        loader = make_loader(make(*args), 4, **workers(number, persistent))
        found.append([read(loader) for _ in range(epochs)])
    return found


def assert_read_once(ranks: list[list[list[list[int]]]], samples: list[int]) -> None:
    for of_ranks in zip(*ranks, strict=True):
        for epoch in zip(*of_ranks, strict=True):
            assert sorted(chain(*epoch)) == samples


# each number of ranks with other numbers of workers, which cost most of the time
@pytest.mark.parametrize(("w", "number"), [(1, 4), (2, 1), (3, 0), (3, 2)])
def test_a_hugging_face_stream_is_read_exactly_once_by_any_number_of_ranks_and_workers(w: int, number: int) -> None:
    assert_read_once(on_ranks(read_epochs, w, in_order, [], 2, [(number, False)]), ALL)


def test_a_mapped_stream_is_read_exactly_once_by_workers_that_live_on() -> None:
    assert_read_once(on_ranks(read_epochs, 2, mapped, [], 2, [(2, True)]), ALL)


def test_a_mixture_of_hugging_face_streams_is_read_exactly_once() -> None:
    samples = [sample["i"] for sample in numbers(SHARDS[:12])]
    assert_read_once(on_ranks(read_epochs, 2, mixed, [], 1, [(0, False), (2, False)]), samples)


def test_a_shuffled_stream_has_another_order_in_each_epoch_and_the_same_when_run_again() -> None:
    options = [(0, False), (2, False), (2, True)]
    ranks = on_ranks(read_epochs, 2, shuffled, [], 3, options)
    assert_read_once(ranks, ALL)
    again = on_ranks(read_epochs, 2, shuffled, [], 3, [(0, False), (2, True)])
    assert [[without, persistent] for without, _, persistent in ranks] == again
    for without, living_an_epoch, persistent in ranks:
        assert living_an_epoch == persistent
        for epochs in (without, persistent):
            assert len({tuple(epoch) for epoch in epochs}) == 3


def write_tars(folder: Path) -> list[str]:
    paths = []
    for shard in SHARDS:
        path = folder / f"{shard}.tar"
        with tarfile.open(path, "w") as tar:
            for sample in numbers([shard]):
                info = tarfile.TarInfo(f"{sample['i']}.txt")
                info.size = len(str(sample["i"]))
                tar.addfile(info, io.BytesIO(str(sample["i"]).encode()))
        paths.append(str(path))
    return paths


class Tars:
    """The one of the guide."""

    def __init__(self, urls: list[str], **splitters: Any) -> None:
        self.urls = urls
        self.num_shards = len(urls)
        self.splitters = splitters
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def shard(self, index: int, num_shards: int) -> Any:
        urls = self.urls[index::num_shards]
        samples = wds.WebDataset(urls, shardshuffle=100, seed=self.epoch, **self.splitters)
        return samples.shuffle(10, seed=self.epoch).decode().map(number_of)


def number_of(sample: dict[str, Any]) -> dict[str, int]:
    return {"i": int(sample["txt"])}


def split_by_node_too(urls: list[str]) -> Tars:
    return Tars(urls, nodesplitter=wds.split_by_node)


@pytest.mark.parametrize(("w", "options"), [(1, [(4, False)]), (2, [(1, False)]), (3, [(0, False), (2, True)])])
def test_a_web_dataset_with_its_own_splitters_is_read_exactly_once(w: int, options: list[Any], tmp_path: Path) -> None:
    urls = write_tars(tmp_path)
    ranks = on_ranks(read_epochs, w, Tars, [urls], 2, options)
    assert_read_once(ranks, ALL)
    assert all(first != second for rank in ranks for first, second in rank)
    if w == 2:
        assert_read_once(on_ranks(read_epochs, w, split_by_node_too, [urls], 1, [(2, False)]), ALL)


def given_whole(urls: list[str]) -> str:
    stream = wds.WebDataset(urls, shardshuffle=False)
    with pytest.raises(TypeError) as caught:
        make_loader(stream, 4)
    return str(caught.value)


def test_a_web_dataset_without_shards_is_refused_on_every_rank(tmp_path: Path) -> None:
    for message in on_ranks(given_whole, 2, write_tars(tmp_path)):
        assert "WebDataset has no shard(index, num_shards): each of 2 readers would read all" in message


def refused(num_workers: int) -> list[str]:
    split = datasets.distributed.split_dataset_by_node(in_order(), ddpkit.get_rank(), ddpkit.get_world_size())
    messages = []
    for stream in (in_order(SHARDS[:5]), split):
        with pytest.raises(ValueError) as caught:
            make_loader(stream, 4, num_workers=num_workers)
        messages.append(str(caught.value))
    return messages


@pytest.mark.parametrize(("w", "number"), [(1, 6), (2, 3)])
def test_every_rank_refuses_too_few_shards_and_a_stream_that_was_split_before(w: int, number: int) -> None:
    for few, split in on_ranks(refused, w, number):
        assert f"num_shards=5, but each of 6 readers ({w} ranks x {max(number, 1)} workers) needs one" in few
        assert "Use fewer ranks or workers, or split the data into more shards" in few
        assert "split_dataset_by_node() has already split this stream" in split and "Pass the whole stream" in split


def unseeded() -> Any:
    return in_order().shuffle(buffer_size=5)


def without_a_seed() -> str:
    halves = [in_order(SHARDS[:6]).shuffle(buffer_size=5).map(dict), in_order(SHARDS[6:])]
    stream = datasets.concatenate_datasets(halves)
    with pytest.raises(ValueError) as caught:
        make_loader(stream, 4)
    return str(caught.value)


def test_every_rank_refuses_a_hugging_face_stream_that_was_shuffled_without_a_seed() -> None:
    for message in on_ranks(without_a_seed, 2):
        assert "shuffled without a seed" in message and "Use shuffle(seed=...)" in message
    assert_read_once(on_ranks(read_epochs, 1, unseeded, [], 1, [(2, False)]), ALL)  # one rank has one order


def read_from_the_middle(make: Callable[..., Any], args: list[Any], options: list[Any]) -> list[Any]:
    """What a run reads of epochs 1 and 2; what one reads that ends in epoch 1, and one that goes on there."""
    found = []
    for number, persistent in options:
        whole, first, second = (
            make_loader(make(*args), 4, collate_fn=list, **workers(number, persistent)) for _ in range(3)
        )
        for loader in (whole, first):
            loader.set_epoch(1)
        before = []
        for batch in first:
            before.append(batch)
            if len(before) == 2:
                break
        state = first.state_dict()
        second.load_state_dict(state)
        epochs = [list(second) for epoch in second.epochs(3)]
        found.append(([list(whole), list(whole)], before, epochs, state, second.state_dict()))
    return found


@pytest.mark.parametrize("w", [2, 3])
def test_a_stream_goes_on_in_the_middle_of_an_epoch(w: int, tmp_path: Path) -> None:
    streams: list[tuple[Any, list[Any], list[Any]]] = [(shuffled, [], [(0, False), (2, w == 3)])]
    if w == 2:
        streams.append((Tars, [write_tars(tmp_path)], [(2, True)]))
    for make, args, options in streams:
        found = on_ranks(read_from_the_middle, w, make, args, options)
        for whole, before, (rest, following), state, end in chain(*found):
            assert before + rest == whole[0] and following == whole[1]
            assert state["epoch"] == 1 and state["batches"] == 2 and state["num_replicas"] == w
            assert end["epoch"] == 3 and end["batches"] == 0
