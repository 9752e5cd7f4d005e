"""Streams: datasets that are read in order, in shards that the ranks and their workers share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from ..seeding.hashing import hash_seeds
from ..seeding.seeds import seed_cpu
from .dataset_contents import pass_epoch_on
from .place import Place


def is_stream(dataset: Any) -> bool:
    """Return whether a dataset is read in order only."""
    if isinstance(dataset, IterableDataset):
        return True
    return hasattr(dataset, "shard") and not hasattr(dataset, "__len__")


def shards_of(dataset: Any, place: Place, seed: int, num_workers: int, persistent: bool) -> Any:
    """Spread a stream over ranks and workers; refuse one that several of them would read whole."""
    if hasattr(dataset, "shard"):
        return Stream(dataset, place, seed, num_workers, persistent)
    if place.num_replicas > 1 or num_workers > 1:
        readers = f"{num_workers} workers"
        if place.num_replicas > 1:
            readers = f"{place.num_replicas} ranks"
        raise TypeError(
            f"{type(dataset).__name__} has no shard(index, num_shards): each of {readers} would "
            "read all of it. Give it that method, which returns one part as an iterable; or, if it "
            "splits itself, use torch's DataLoader."
        )
    if num_workers == 0:
        return dataset
    return Stream(dataset, place, seed, num_workers, persistent)


class Stream(IterableDataset[Any]):
    """Spread the shards of a stream over ranks x workers; without shards it has one reader."""

    def __init__(self, dataset: Any, place: Place, seed: int, num_workers: int, persistent: bool) -> None:
        self.dataset = dataset
        self.seed = seed
        self.readers = max(num_workers, 1)  # per rank
        self.place = place
        self.epoch = 0
        # Workers know the epoch they were started in; persistent ones read it in shared memory.
        self.latest_epoch: torch.Tensor | None = None
        if persistent:
            epoch = torch.zeros((), dtype=torch.int64, device="cpu")  # whatever the default device
            self.latest_epoch = epoch.share_memory_()  # type: ignore[no-untyped-call]

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass, also of workers that live already."""
        self.epoch = epoch
        if self.latest_epoch is not None:
            self.latest_epoch.fill_(epoch)
        pass_epoch_on(self.dataset, epoch)

    def seed_of(self, epoch: int, worker: int) -> int:
        """Return the seed of the random numbers that a worker of this rank draws in an epoch."""
        return hash_seeds("stream", self.seed, epoch, self._reader(worker))

    def __len__(self) -> int:
        if hasattr(self.dataset, "shard"):
            raise TypeError("The length of a stream's shards is not known before they are read.")
        return len(self.dataset)

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        if worker is None:  # without workers, or for peek(), which shows the first worker's part
            return self._shard(0)
        if self.latest_epoch is not None:
            self.epoch = int(self.latest_epoch)
        seed_cpu(self.seed_of(self.epoch, worker.id))
        pass_epoch_on(self.dataset, self.epoch)
        return self._shard(worker.id)

    def _shard(self, worker: int) -> Iterator[Any]:
        if not hasattr(self.dataset, "shard"):
            return iter(self.dataset)
        num_shards = self.place.num_replicas * self.readers
        return iter(self.dataset.shard(index=self._reader(worker), num_shards=num_shards))

    def _reader(self, worker: int) -> int:
        """Number a worker among those of all ranks."""
        return self.place.rank * self.readers + worker
