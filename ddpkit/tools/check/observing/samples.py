"""Observe loaders: the samples that each rank will get, and the batches that it gets."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Subset
from torch.utils.data import dataloader as loading
from torch.utils.data._utils import fetch

from ....collectives.digest import digest
from ..ending import Ending
from ..places import Stack, stack
from ..recorder import Recorder
from .modules import is_own_object
from .patching import Function, after, before, replace
from .random_numbers import Windows, states
from .tensors import content, size_of

_MANY = 2_000_000  # samples of an epoch that are listed
_BATCHES = 64  # of an epoch that are described one by one
_FETCHES = 3  # of each process whose random numbers are looked at


class _Loader:
    """What is known of one loader."""

    def __init__(self, key: str, made: Stack) -> None:
        self.key = key
        self.made = made
        self.epoch = -1
        self.trains = False
        self.fetched = False  # a batch since the last step
        self.batches = 0
        self.last: Any = None


class Samples:
    """Observes loaders from the moment of `install`."""

    def __init__(self, recorder: Recorder, ending: Ending, windows: Windows) -> None:
        self._recorder = recorder
        self._ending = ending
        self._windows = windows
        self._made: weakref.WeakKeyDictionary[Any, Stack] = weakref.WeakKeyDictionary()
        self._loaders: weakref.WeakKeyDictionary[Any, _Loader] = weakref.WeakKeyDictionary()
        self._iterators: weakref.WeakKeyDictionary[Any, _Loader] = weakref.WeakKeyDictionary()
        self._lines: dict[str, int] = {}
        self._epochs_set: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._fetches = 0

    def install(self) -> None:
        """Begin."""
        for owner in (DataLoader, DistributedSampler, Subset):
            after(owner, "__init__", self._note_made)
        before(DistributedSampler, "set_epoch", self._note_epoch)
        replace(loading._BaseDataLoaderIter, "__init__", self._begin)
        replace(loading._BaseDataLoaderIter, "_reset", self._reset)
        replace(loading._BaseDataLoaderIter, "__next__", self._next)
        for fetcher in (fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher):
            replace(fetcher, "fetch", self._fetch)

    def begin_backward(self) -> None:
        """Note that the loaders which have yielded since the last step feed the training."""
        for loader in list(self._loaders.values()):
            if loader.fetched and not loader.trains:
                loader.trains = True
                self._recorder.tell("trains", loader=loader.key)

    def begin_step(self) -> None:
        """Forget what belongs to the step that has ended."""
        for loader in list(self._loaders.values()):
            loader.fetched = False

    def _note_made(self, _: None, made: Any, *args: Any, **kwargs: Any) -> None:
        self._made[made] = stack()

    def _note_epoch(self, sampler: Any, epoch: int) -> None:
        self._epochs_set[sampler] = self._epochs_set.get(sampler, 0) + 1

    def _known(self, loader: Any) -> _Loader:
        known = self._loaders.get(loader)
        if known is None:
            made = self._made.get(loader) or stack()
            place = f"{made[0].file}:{made[0].line}" if made else type(loader).__name__
            self._lines[place] = self._lines.get(place, 0) + 1
            known = _Loader(f"{place}#{self._lines[place]}", made)
            self._loaders[loader] = known
        return known

    def _begin(self, original: Function) -> Function:
        def call(iterator: Any, loader: Any) -> None:
            original(iterator, loader)
            self._start_epoch(iterator, loader)

        return call

    def _reset(self, original: Function) -> Function:
        def call(iterator: Any, loader: Any, first_iter: bool = False) -> None:
            original(iterator, loader, first_iter)
            if not first_iter:
                self._start_epoch(iterator, loader)

        return call

    def _start_epoch(self, iterator: Any, loader: Any) -> None:
        """Note that a loader begins anew, and let it tell which samples it will yield."""
        self._windows.pause()
        known = self._known(loader)
        known.epoch += 1
        known.batches = 0
        known.last = None
        self._iterators[iterator] = known
        if known.trains:
            self._ending.begin_epoch()
        described = self._describe(loader, known, iterator)
        if isinstance(loader.dataset, IterableDataset):
            self._recorder.tell("epoch", batches=None, **described)
            return
        planned = _Planned(iterator._index_sampler, described, loader.dataset, self._recorder)
        iterator._index_sampler = planned
        iterator._sampler_iter = iter(planned)

    def _describe(self, loader: Any, known: _Loader, iterator: Any) -> dict[str, Any]:
        sampler = _sampler_of(loader)
        return {
            "loader": known.key,
            "number": known.epoch,
            "made": known.made,
            "where": stack(),
            "sampler": type(sampler).__name__,
            "sampler_made": self._made.get(sampler, []) if _is_weakly_known(sampler) else [],
            "has_epoch": hasattr(sampler, "set_epoch"),
            "epochs_set": self._epochs_set.get(sampler, 0) if _is_weakly_known(sampler) else 0,
            "shuffles": bool(getattr(sampler, "shuffle", False)),
            "replaces": bool(getattr(sampler, "replacement", False)) or "Weighted" in type(sampler).__name__,
            "batch_size": getattr(loader.batch_sampler, "batch_size", None) or loader.batch_size or 1,
            "drop_last": bool(loader.drop_last) or bool(getattr(sampler, "drop_last", False)),
            "workers": loader.num_workers,
            "base_seed": int(iterator._base_seed) if loader.num_workers else None,
        }

    def _next(self, original: Function) -> Function:
        def call(iterator: Any) -> Any:
            known = self._iterators.get(iterator)
            if known is None:
                return original(iterator)
            self._windows.pause()
            if known.trains and self._ending.cut_epoch():
                self._end_epoch(known, was_cut=True)
                raise StopIteration
            try:
                batch = original(iterator)
            except StopIteration:
                self._end_epoch(known, was_cut=False)
                raise
            self._note_batch(known, batch)
            self._windows.open()
            return batch

        return call

    def _end_epoch(self, known: _Loader, was_cut: bool) -> None:
        self._recorder.tell(
            "epoch end",
            loader=known.key,
            number=known.epoch,
            batches=known.batches,
            cut=was_cut,
            where=stack()[:3],
        )

    def _note_batch(self, known: _Loader, batch: Any) -> None:
        known.fetched = True
        known.batches += 1
        if known.batches <= _BATCHES:
            self._recorder.tell(
                "batch",
                loader=known.key,
                number=known.epoch,
                batch=known.batches,
                content=content(batch),
                samples=size_of(batch),
            )

    def _fetch(self, original: Function) -> Function:
        def call(fetcher: Any, *args: Any, **kwargs: Any) -> Any:
            if self._fetches >= _FETCHES:
                return original(fetcher, *args, **kwargs)
            self._fetches += 1
            old = states()
            result = original(fetcher, *args, **kwargs)
            new = states()
            drawn = {kind: old[kind][0] for kind in old if new.get(kind, old[kind])[0] != old[kind][0]}
            if drawn:
                self._tell_fetch(fetcher, drawn)
            return result

        return call

    def _tell_fetch(self, fetcher: Any, drawn: dict[str, int]) -> None:
        info = torch.utils.data.get_worker_info()
        key = next((k.key for o, k in list(self._loaders.items()) if o.dataset is fetcher.dataset), "")
        self._recorder.tell(
            "fetch",
            loader=key,
            worker=info.id if info else None,
            number=self._fetches,
            drawn=drawn,
        )


def _is_weakly_known(value: Any) -> bool:
    return hasattr(value, "__weakref__") and hasattr(value, "__hash__") and value.__hash__ is not None


def _sampler_of(loader: Any) -> Any:
    """Find the sampler that decides the order: the innermost of batch samplers."""
    sampler = loader.batch_sampler or loader.sampler
    for _ in range(4):
        inner = getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)
        if inner is None:
            break
        sampler = inner
    return sampler


class _Planned:
    """Stands for an index sampler: reads all of it when the first batch is asked for, and tells it."""

    def __init__(self, sampler: Any, described: dict[str, Any], dataset: Any, recorder: Recorder) -> None:
        self._sampler = sampler
        self._described = described
        self._dataset = dataset
        self._recorder = recorder

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._sampler)
        try:
            number = len(self._sampler)
        except (TypeError, NotImplementedError):  # it may be endless
            yield from batches
            return
        ahead = []
        for batch in batches:
            ahead.append(batch)
            if len(ahead) >= min(number, _MANY):
                break
        self._tell(ahead)
        yield from ahead
        yield from batches

    def _tell(self, ahead: list[Any]) -> None:
        flat = [index for batch in ahead for index in (batch if isinstance(batch, list | tuple) else [batch])]
        plan: list[int] | None = None
        expected: list[int] | None = None
        base: Any = self._dataset
        if len(flat) <= _MANY and all(isinstance(i, int | np.integer) for i in flat):
            base, known, mapping = _base_of(self._dataset)
            plan = [int(i) if mapping is None else int(mapping[i]) for i in flat]
            expected = None if mapping is None else sorted(set(map(int, mapping)))
            total = len(known)
        else:
            total = len(flat)
        self._recorder.tell(
            "epoch",
            batches=len(ahead),
            plan=plan,
            expected=expected,
            total=total,
            dataset=_digest_of(base),
            **self._described,
        )


def _base_of(dataset: Any) -> tuple[Any, Any, list[int] | None]:
    """Follow subsets to the dataset that holds the samples.

    Returns:
        That dataset; the one that was given; the index there of each sample of it, None if it is the same.
    """
    mapping: list[int] | None = None
    base = dataset
    while isinstance(base, Subset):
        indices = [int(i) for i in base.indices]
        mapping = indices if mapping is None else [indices[i] for i in mapping]
        base = base.dataset
    return base, dataset, mapping


def _digest_of(dataset: Any, depth: int = 3) -> str:
    """Describe the samples that a dataset holds, as far as its fields tell."""
    fields = getattr(dataset, "__dict__", {})
    known = {}
    for name, value in fields.items():
        if depth and (isinstance(value, Dataset) or is_own_object(value)):
            known[name] = _digest_of(value, depth - 1)
        else:
            known[name] = digest(value)
    return f"{type(dataset).__name__} {digest(known)}"
