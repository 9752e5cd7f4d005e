"""Observe loaders: the samples that each rank will get, and the batches that it gets, until it has shown enough."""

from __future__ import annotations

import os
import zlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, finalize

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Subset, get_worker_info
from torch.utils.data import dataloader as loading
from torch.utils.data._utils import fetch

from ...collectives.differences import digest
from ...data.loader import Loader, UnequalShares, remedy_for
from ...data.streams import Stream
from ..recorder import Function, after, before, content, current, guarded, replace
from .modules import Modules
from .observed import Batch, End, Epoch, EpochEnd, EpochSet, Fetch, Position, Trains, tell
from .random_numbers import GENERATORS, Tracer, Windows
from .source import Stack, awaits_stop_iteration, definition, is_bounded, is_own_object, known_to, rounds_around, stack

_MANY = 2_000_000  # samples of an epoch that are listed
_BATCHES = 64  # of an epoch that are described one by one
_EPOCHS = 3  # that begin; the third is not finished
LONGEST = 3  # all epochs have at most so many times the steps of one
_UNORDERED = 20_000  # elements of a field that are hashed one by one
_FETCHES = 3  # of each process whose random numbers are looked at


@dataclass
class Ending:
    """Ends the script after some steps; loaders are cut short, so that what follows an epoch is seen.

    Attributes:
        steps: Optimiser steps of an epoch; epochs of a loader end after as many.
        control: A descriptor that becomes readable when the process shall end.
        has_loader: Whether the script trains from a loader, which can be cut short.
        accumulates: Whether there was a backward pass since the last step.
        optimizers: Of this rank; one that has none is taken to step with each batch, as those that it helps.
    """

    steps: int
    control: int
    optimizers: Collection[Any] = ()
    has_loader: bool = False
    accumulates: bool = False
    _begun_at: int = 0
    _epochs: int = 0
    _is_uncut: bool = False  # whether an epoch goes on that was to be cut

    def begin_epoch(self) -> None:
        """Note that a loader from which the script trains begins anew."""
        self._begun_at = current().step
        self._is_uncut = False
        self._epochs += 1

    def cut_epoch(self, batches: int, planned: int) -> bool:
        """Return whether a loader shall end its epoch here, for which the script must be prepared.

        A short epoch whose last batches make no whole step goes on: they may be left over.

        Args:
            batches: What the loader has yielded in this epoch.
            planned: What it yields in all, 0 if that is not known.
        """
        made = current().step - self._begun_at if self.optimizers else batches
        if (self.accumulates and self.optimizers) or made < self.steps:
            return False
        may_leave_some = batches < planned <= 2 * batches and planned % (batches // made or 1)
        self._is_uncut = bool(may_leave_some) or not awaits_stop_iteration()
        return not self._is_uncut

    def before_step(self, steps: int) -> None:
        """End this process if its optimiser has made enough steps."""
        allowed = self.steps
        if self.has_loader:  # one that fetches ahead yields one batch more after it was cut
            allowed += 1
        is_long = steps >= LONGEST * self.steps
        if not self._is_uncut:
            is_long = is_long or steps - self._begun_at >= allowed
        if is_long or self._epochs > _EPOCHS:
            self.wait("steps")

    def wait(self, reason: str) -> None:
        """Say why this process is done, and wait for the end."""
        tell(End(reason=reason))
        os.read(self.control, 1)
        os._exit(0)


@dataclass
class KnownLoader:
    """What is known of one loader.

    Attributes:
        key: It names the line that made the loader.
        made: Where it was made.
        epoch: The number of its present epoch.
        batches: How many it has yielded in that.
        planned: How many that has, if they can be counted.
        shares: Those of the epoch that are unequal, if the loader is ddpkit's.
        trains: Whether it feeds the training.
        fetched: Whether it has yielded a batch since the last step.
        calls_before: The calls of networks, with and without gradients, when it did.
    """

    key: str
    made: Stack
    epoch: int = -1
    batches: int = 0
    planned: int = 0
    shares: UnequalShares | None = None
    trains: bool = False
    fetched: bool = False
    calls_before: tuple[int, int] = (0, 0)

    @property
    def line(self) -> str:
        """Name the line that made it, which may make others."""
        return self.key.rpartition("#")[0]


_OfLoaders = WeakKeyDictionary[Any, KnownLoader]


@dataclass
class Samples:
    """Observes loaders from the moment of `install`."""

    ending: Ending
    windows: Windows
    modules: Modules
    _made: WeakKeyDictionary[Any, Stack] = field(default_factory=WeakKeyDictionary)
    _loaders: _OfLoaders = field(default_factory=WeakKeyDictionary)
    _iterators: _OfLoaders = field(default_factory=WeakKeyDictionary)
    _all: list[KnownLoader] = field(default_factory=list)  # nobody keeps a loader that is made in the head of a loop
    _watched: set[type] = field(default_factory=set)  # classes of samplers
    _fetches: int = 0
    _begun: tuple[str, int] = ("", 0)  # the loader and the number of the epoch that has begun last

    def install(self) -> None:
        """Begin."""
        for owner in (DataLoader, DistributedSampler, Subset):
            after(owner, "__init__", self._note_made)
        after(loading._BaseDataLoaderIter, "__init__", self._start_epoch)
        after(loading._BaseDataLoaderIter, "_reset", self._start_epoch)
        replace(loading._BaseDataLoaderIter, "__next__", self._next)
        for fetcher in (fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher):
            replace(fetcher, "fetch", self._fetch)

    def loader_of(self, iterator: Any) -> KnownLoader | None:
        """Return what is known of the loader that has made an iterator."""
        return self._iterators.get(iterator)

    def begin_backward(self) -> None:
        """Note that the loaders which have yielded since the last step feed the training."""
        for loader in self._all:
            if loader.fetched and not loader.trains:
                if any(other.trains and other.line == loader.line for other in self._all):
                    self.ending.begin_epoch()  # of a loader that is made anew for each
                loader.trains = True
                self.ending.has_loader = True
                tell(Trains(loader.key))

    def position(self) -> list[Position]:
        """Tell which batch of which epoch each loader that trains has yielded last."""
        training = [loader for loader in self._all if loader.trains]
        return [Position(loader.key, loader.epoch, loader.batches) for loader in training]

    def begin_step(self) -> None:
        """Forget what belongs to the step that has ended."""
        for loader in self._all:
            loader.fetched = False

    def _note_made(self, made: Any) -> None:
        self._made[made] = stack()

    def _known(self, loader: Any) -> KnownLoader:
        known = self._loaders.get(loader)
        if known is None:
            made = self._made.get(loader) or stack()
            line = f"{made[0].file}:{made[0].line}" if made else type(loader).__name__
            number = 1 + sum(other.line == line for other in self._all)
            known = self._loaders[loader] = KnownLoader(f"{line}#{number}", made)
            self._all.append(known)
        return known

    def _start_epoch(self, iterator: Any, loader: Any, first_iter: bool = False) -> None:
        """Note that a loader begins anew, and let it tell which samples it will yield."""
        if first_iter:  # `__init__` resets the iterator, too
            return
        self.windows.end()
        known = self._known(loader)
        known.epoch += 1
        known.batches = 0
        self._begun = known.key, known.epoch  # before workers are forked
        known.shares = loader.unequal_shares() if isinstance(loader, Loader) else None
        self._iterators[iterator] = known
        finalize(iterator, self._leave, known)
        if known.trains:
            self.ending.begin_epoch()
        described = self._describe(loader, known)
        if isinstance(loader.dataset, IterableDataset):
            tell(described)
            return
        planned = _Planned(iterator._index_sampler, described, loader.dataset, known)
        iterator._index_sampler = planned
        iterator._sampler_iter = iter(planned)

    def _leave(self, known: KnownLoader) -> None:
        """Forget batches of an iterator that is gone, if networks were called for them without gradients alone."""
        with_gradients, without = known.calls_before
        calls, samples = self._calls()
        if calls == with_gradients and samples > without:
            known.fetched = False

    def _calls(self) -> tuple[int, int]:
        """Count the calls of networks since the last step: those with gradients, and the samples of the others."""
        return len(self.modules.calls), self.modules.samples

    def _describe(self, loader: Any, known: KnownLoader) -> Epoch:
        sampler = _sampler_of(loader)
        self._watch_epochs(type(sampler))
        is_hashable = type(sampler).__hash__ is not None and hasattr(sampler, "__weakref__")
        return Epoch(
            loader=known.key,
            number=known.epoch,
            made=known.made,
            where=stack(),
            sampler=type(sampler).__name__,
            sampler_made=self._made.get(sampler, []) if is_hashable else [],
            lines=_own_lines(loader, sampler),
            split=self._made.get(loader.dataset, []) if isinstance(loader.dataset, Subset) else [],
            iterable=isinstance(loader.dataset, IterableDataset),
            has_epoch=hasattr(sampler, "set_epoch"),
            bounded=is_bounded(),
            rounds=rounds_around(),
            replaces=bool(getattr(sampler, "replacement", False)) or "Weighted" in type(sampler).__name__,
            batch_size=getattr(loader.batch_sampler, "batch_size", None) or loader.batch_size or 1,
            drop_last=bool(loader.drop_last) or bool(getattr(sampler, "drop_last", False)),
            workers=loader.num_workers,
        )

    def _watch_epochs(self, kind: Any) -> None:
        """Note from which line, and to which number, the epoch of samplers of a class is set."""

        def look(sampler: Any, epoch: Any) -> None:
            tell(EpochSet(kind.__name__, repr(epoch), stack()))

        if kind not in self._watched and hasattr(kind, "set_epoch"):
            self._watched.add(kind)
            before(kind, "set_epoch", look)

    def _next(self, original: Function) -> Function:
        pause, note = guarded(self.windows.end), guarded(self._note_batch)
        open_window = guarded(self.windows.open)

        def call(iterator: Any) -> Any:
            known = self._iterators.get(iterator)
            if known is None:
                return original(iterator)
            pause()
            was_cut = known.trains and self.ending.cut_epoch(known.batches, known.planned)
            try:
                if was_cut:
                    raise Cut
                batch = original(iterator)
            except StopIteration:
                known.fetched = False
                self.modules.feeding = ""
                shares = f"{known.shares}" if known.shares and remedy_for(known.shares) else ""
                tell(EpochEnd(known.key, known.epoch, known.batches, was_cut, shares))
                raise
            note(known, batch)
            open_window()
            return batch

        return call

    def _note_batch(self, known: KnownLoader, batch: Any) -> None:
        if not known.fetched:
            known.fetched = True
            known.calls_before = self._calls()
        self.modules.feeding = known.key
        known.batches += 1
        if known.batches <= _BATCHES:
            tell(Batch(known.key, known.epoch, content(batch), current().step))

    def _fetch(self, original: Function) -> Function:
        note = guarded(self._note_fetch)

        def call(fetcher: Any, *args: Any) -> Any:
            if self._fetches >= _FETCHES:
                return original(fetcher, *args)
            self._fetches += 1
            tracer = Tracer(fetcher.dataset)
            guarded(tracer.begin)()
            try:
                batch = original(fetcher, *args)
            finally:
                guarded(tracer.end)()
            note(tracer, batch)
            return batch

        return call

    def _note_fetch(self, tracer: Tracer, batch: Any) -> None:
        """Tell which random numbers a dataset has drawn for a batch."""
        info = get_worker_info()
        worker = None if info is None else info.id
        loader, epoch = self._begun
        fetch = Fetch(worker, self._fetches, content(batch), loader, epoch, tracer.found, current().step)
        tell(fetch)


def _own_lines(loader: Any, sampler: Any) -> Stack:
    """Return where the script decides which samples come: in its own sampler or stream."""
    if isinstance(loader.dataset, Stream):
        return definition(getattr(type(loader.dataset.dataset), "shard", None))
    deciding = loader.dataset if isinstance(loader.dataset, IterableDataset) else sampler
    return definition(getattr(type(deciding), "__iter__", None))


def _sampler_of(loader: Any) -> Any:
    """Find the sampler that decides the order: the innermost of batch samplers."""
    sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    for _ in range(4):
        inner = getattr(sampler, "batch_sampler", getattr(sampler, "sampler", None))
        if inner is None:
            break
        sampler = inner
    return sampler


class Cut(StopIteration):
    """Ends an epoch early; ddpkit's loaders let it pass."""


@dataclass
class _Planned:
    """Stands for an index sampler: reads all of it when the first batch is asked for, and tells it."""

    sampler: Any
    described: Epoch
    dataset: Any
    known: KnownLoader

    def __len__(self) -> int:
        number: int = len(self.sampler)
        return number

    def __iter__(self) -> Iterator[Any]:
        return self._read(iter(self.sampler))  # now: a loader of ddpkit's gives its batches to one loop

    def _read(self, batches: Iterator[Any]) -> Iterator[Any]:
        ahead = []
        samples = 0
        for batch in batches:
            ahead.append(batch)
            samples += len(_as_list(batch))
            if samples >= min(_MANY, 8 * len(self.dataset) + 1024):  # it may never end
                break
        else:
            guarded(self._tell)(ahead)
        yield from ahead
        yield from batches

    def _tell(self, ahead: list[Any]) -> None:
        if self.described.sampler != "MicroBatchSampler":  # of which ranks have different numbers
            self.known.planned = len(ahead)
        indices = [index for batch in ahead for index in _as_list(batch)]
        base, mapping = _base_of(self.dataset)
        plan: list[int] | None = None
        if all(isinstance(i, int | np.integer) for i in indices):
            plan = [int(i) if mapping is None else mapping[i] for i in indices]
        ordered, unordered = _digest_of(base)
        planned = self.described._replace(
            batches=len(ahead),
            plan=plan,
            total=len(self.dataset),
            base=id(base),
            expected=None if mapping is None else sorted(set(mapping)),
            dataset=ordered,
            contents=unordered,
        )
        tell(planned)


def _as_list(batch: Any) -> list[Any] | tuple[Any, ...]:
    return batch if isinstance(batch, list | tuple) else [batch]


def _base_of(dataset: Any) -> tuple[Any, list[int] | None]:
    """Follow subsets to the dataset that holds the samples.

    Returns:
        That dataset; and the index there of each sample of the given one, None if it is the same.
    """
    mapping: list[int] | None = None
    base = dataset
    while isinstance(base, Subset):
        indices = [int(i) for i in base.indices]
        mapping = indices if mapping is None else [indices[i] for i in mapping]
        base = base.dataset
    return base, mapping


def _digest_of(dataset: Any, depth: int = 3) -> tuple[str, str]:
    """Describe what a dataset's fields hold: as it is, and without regard to the order of lists."""
    known = [*known_to(type(dataset)), *getattr(dataset, "__dict__", {}).items()]
    if not known:  # a list, or a tensor
        return digest(dataset), _unordered(dataset)
    ordered = {}
    unordered = {}
    for name, value in known:
        if depth and (isinstance(value, Dataset) or is_own_object(value)):
            ordered[name], unordered[name] = _digest_of(value, depth - 1)
        elif not isinstance(value, GENERATORS):
            ordered[name], unordered[name] = digest(value), _unordered(value)
    name = type(dataset).__name__
    return f"{name} {digest(ordered)}", f"{name} {digest(unordered)}"


def _unordered(value: Any) -> str:
    is_list = isinstance(value, list | tuple | np.ndarray | torch.Tensor) and getattr(value, "ndim", 1) > 0
    if not is_list or not 2 <= len(value) <= _UNORDERED:
        return digest(value)
    return f"{len(value)} {sum(zlib.crc32(digest(child).encode()) for child in value)}"
