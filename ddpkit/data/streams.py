"""Streams: datasets read in order, as shards spread over ranks and workers."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch.utils.data import IterableDataset, get_worker_info

from ..torch_internals import WithoutWorkerInfo
from .samplers import Place
from .seeds import hash_seeds, seed_cpu


def without_end(name: str, function: Callable[..., T], *args: Any, **options: Any) -> T:
    """Call a function of the script, whose `StopIteration` is an error and not the end of the data."""
    try:
        return function(*args, **options)
    except StopIteration as error:
        raise ends_early(name) from error


def ends_early(name: str) -> RuntimeError:
    """Create the error for a `StopIteration` that is not the end of the data."""
    return RuntimeError(
        f"{name} raised StopIteration, which would have ended the epoch before its end. next() of an empty iterator "
        "raises it: give it a default, or raise another exception."
    )


def pass_epoch_on(owner: Any, epoch: int) -> None:
    """Call an object's `set_epoch`; without one, that of the objects it holds as `dataset` or in `datasets`."""
    if callable(getattr(owner, "set_epoch", None)):
        without_end(f"{type(owner).__name__}.set_epoch()", owner.set_epoch, epoch)
        return
    held = getattr(owner, "__dict__", {})  # a property may be expensive
    inner = held.get("datasets")
    if isinstance(inner, dict):
        inner = inner.values()
    for each in [held.get("dataset"), *(inner or ())]:
        if each is not owner:
            pass_epoch_on(each, epoch)


# WebDataset stages that select shards by rank
_NODE_SPLITTERS = ("single_node_only", "split_by_node")
_FEWER = "Use fewer ranks or workers, or split the data into more shards (files)."
_END = object()  # end of a part
T = TypeVar("T")


def is_stream(dataset: Any) -> bool:
    """Return whether a dataset can only be read in order."""
    has_shards_only = hasattr(dataset, "shard") and not hasattr(dataset, "__len__")
    return has_shards_only or isinstance(dataset, IterableDataset)


def shards_of(dataset: Any, place: Place, seed: int, num_workers: int, persistent: bool) -> Any:
    """Spread a stream over ranks and workers; raise if it cannot be split, or was split before."""
    if getattr(dataset, "_distributed", None) is not None:
        raise ValueError(
            "split_dataset_by_node() has already split this stream between ranks: the loader would split "
            "this rank's part again and never read the rest. Pass the whole stream."
        )
    if place.num_replicas > 1:
        _check_has_seed(dataset)
    workers = max(num_workers, 1)
    readers = place.num_replicas * workers
    shards = getattr(dataset, "num_shards", None)
    if isinstance(shards, int) and shards < readers:
        raise ValueError(
            f"The stream has num_shards={shards}, but each of {readers} readers ({place.num_replicas} "
            f"ranks x {workers} workers) needs one. {_FEWER}"
        )
    if hasattr(dataset, "shard"):
        _check_takes_place(dataset)
    elif readers > 1:
        raise TypeError(
            f"{type(dataset).__name__} has no shard(index, num_shards): each of {readers} readers would "
            "read all of it. Pass an object with this method, which returns one part as an iterable; "
            "or, if the stream splits itself, use torch's DataLoader."
        )
    elif num_workers == 0:
        return dataset
    return Stream(dataset, place, seed, workers, persistent)


def _check_takes_place(dataset: Any) -> None:
    """Raise if `shard` has other parameters: workers call it, and would fail one after the other."""
    try:
        signature = inspect.signature(dataset.shard)
    except ValueError:  # of a function in C
        return
    try:
        signature.bind(index=0, num_shards=1)
    except TypeError as error:
        raise TypeError(
            f"The loader calls shard(index=..., num_shards=...), but {type(dataset).__name__} has shard{signature}: "
            f"{error}. Name its parameters index and num_shards."
        ) from None


def _check_has_seed(dataset: Any) -> None:
    """Raise for a Hugging Face stream shuffled without a seed: each rank would have another order."""
    waiting = [getattr(dataset, "_ex_iterable", None)]
    while waiting:
        stage = waiting.pop()
        if stage is None:
            continue
        if "Shuffled" in type(stage).__name__ and _is_without_seed(stage):
            raise ValueError(
                "The stream was shuffled without a seed: the order of shards differs between ranks, so some "
                "shards would be read twice and others never. Use shuffle(seed=...) with the same number, "
                "less than 2**64, on every rank."
            )
        waiting += [getattr(stage, "ex_iterable", None), *getattr(stage, "ex_iterables", [])]


def _is_without_seed(stage: Any) -> bool:
    """Return whether NumPy drew a stage's seed (128 bits) from the system."""
    for name in ("generator", "bit_generator", "seed_seq", "entropy"):
        stage = getattr(stage, name, None)
    return isinstance(stage, int) and stage >= 2**64


def split_twice() -> TypeError:
    """Create the error for another library that splits a loader's share of the samples."""
    return TypeError(
        "A loader of make_loader() reads this rank's share of the samples, and another library would split the share "
        "between the ranks again: remove it from accelerate's prepare() or Fabric's setup_dataloaders(), loop over "
        "the loader itself, and move its batches to the device."
    )


@contextmanager
def reading(dataset: Any) -> Iterator[None]:
    """Let the block, and the workers that it starts, read a stream, which refuses others."""
    if isinstance(dataset, Stream):
        dataset.is_open = True
    try:
        yield
    finally:
        if isinstance(dataset, Stream):
            dataset.is_open = False


class Stream(IterableDataset[Any]):
    """Spread a stream's shards over ranks x workers; a stream without shards has one reader.

    Attributes:
        is_open: Whether the loader itself reads it.
    """

    is_open = False

    def __init__(self, dataset: Any, place: Place, seed: int, readers: int, persistent: bool) -> None:
        self.dataset = dataset
        self.seed = seed
        self.readers = readers  # per rank
        self.place = place
        self.epoch = 0
        # Workers know the epoch in which they started; persistent workers read it from shared memory.
        self.latest_epoch: torch.Tensor | None = None
        if persistent:
            epoch = torch.zeros((), dtype=torch.int64, device="cpu")  # whatever the default device is
            self.latest_epoch = epoch.share_memory_()  # type: ignore[no-untyped-call]

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass, in running workers, too."""
        self.epoch = epoch
        if self.latest_epoch is not None:
            self.latest_epoch.fill_(epoch)
        pass_epoch_on(self.dataset, epoch)

    def __len__(self) -> int:
        if hasattr(self.dataset, "shard"):
            raise TypeError("A stream's shards have no known length before they are read.")
        return len(self.dataset)

    def __iter__(self) -> Iterator[Any]:
        if not self.is_open:
            raise split_twice()
        worker = get_worker_info()
        reader = self.place.rank * self.readers  # without workers, and for peek(), the first worker
        if worker is not None:
            reader += worker.id
            if self.latest_epoch is not None:
                self.epoch = int(self.latest_epoch)
            seed_cpu(hash_seeds("stream", self.seed, self.epoch, reader))
            pass_epoch_on(self.dataset, self.epoch)
        if not hasattr(self.dataset, "shard"):  # one reader: nothing to split
            return iter(self.dataset)
        num_shards = self.place.num_replicas * self.readers
        part = without_end("shard()", self.dataset.shard, index=reader, num_shards=num_shards)
        part = _without_node_splitters(part)
        pass_epoch_on(part, self.epoch)  # a separate object may start at epoch 0
        with WithoutWorkerInfo():
            samples = without_end("iter() of a shard", iter, part)
        return self._read_alone(samples, reader)

    def _read_alone(self, samples: Iterator[Any], reader: int) -> Iterator[Any]:
        """Read a part with the worker's number hidden: many streams would use it to split the part again."""
        alone = WithoutWorkerInfo()
        with alone:
            sample = next(samples, _END)
        is_empty = sample is _END
        while sample is not _END:
            yield sample
            with alone:
                sample = next(samples, _END)
        if is_empty:
            ranks = self.place.num_replicas
            warnings.warn(
                f"Rank {self.place.rank} of {ranks}, worker {reader % self.readers} of {self.readers}, has nothing to "
                f"read: part {reader} of {ranks * self.readers} parts of the stream is empty. {_FEWER}",
                stacklevel=2,
            )


def _without_node_splitters(part: Any) -> Any:
    """Remove the stages of a WebDataset that would split a part between ranks again."""
    if not isinstance(getattr(part, "pipeline", None), list) or not hasattr(part, "compose"):
        return part
    copy = part.compose()
    copy.pipeline = [stage for stage in part.pipeline if getattr(stage, "__name__", "") not in _NODE_SPLITTERS]
    return copy
