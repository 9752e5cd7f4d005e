"""Record the samples and random numbers from which a rank trains, and serve those of all ranks to one process."""

from __future__ import annotations

import inspect
import io
import pickle
import random
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet, finalize, ref

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader
from torch.utils.data import dataloader as loading

from ...data.loader import Loader
from ...errors import DdpkitError
from ..check.loaders import Cut, KnownLoader, Samples
from ..check.observed import End, tell
from ..check.source import is_own, stack
from ..recorder import Function, after, current, guarded, replace, size_of

_LIKE = ("rand_like", "randn_like", "randint_like")
_FUNCTIONS = ("rand", "randn", "randint", "normal", "bernoulli", "multinomial", *_LIKE)
_METHODS = ("normal_", "uniform_", "bernoulli_", "random_", "exponential_")
_NOT_DRAWN = ("torch/utils/data/", "torch/nn/init.py")  # orders of samples, and initial parameters


class _Pickler(pickle.Pickler):
    """Writes of a tensor its own elements, and not those beside it in memory."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not Tensor or value.dtype == torch.bfloat16:  # which NumPy does not know
            return NotImplemented
        return torch.from_numpy, (value.numpy(force=True).copy(),)


class _Unpickler(pickle.Unpickler):
    """Reads what another script has written, whose classes are in another module here, or not known."""

    def find_class(self, module: str, name: str) -> Any:
        with suppress(AttributeError, ImportError):
            return super().find_class(module, name)
        own = [each for each in list(sys.modules.values()) if is_own(getattr(each, "__file__", None) or "<unknown>")]
        found = (vars(each).get(name) for each in own)
        return next(filter(inspect.isclass, found), type(name, (), {}))


def pack(value: Any) -> bytes:
    """Pickle a value."""
    written = io.BytesIO()
    _Pickler(written, pickle.HIGHEST_PROTOCOL).dump(value)
    return written.getvalue()


def append(path: Path, value: Any) -> None:
    """Add a value to a file."""
    with open(path, "ab") as file:
        file.write(pack(value))


def read(path: Path) -> Iterator[Any]:
    """Yield the values of a file, none if there is no such file."""
    if path.exists():
        with open(path, "rb") as file:
            while file.peek():
                yield pickle.load(file)


class Batch(NamedTuple):
    """A batch from which a rank trains."""

    source: str  # the loader's role
    loop: int  # the number of the loop over loaders of this role
    step: int  # how many optimizer steps came before
    samples: bytes  # a list of what the dataset has returned, or a batch
    size: int  # how many they are
    is_made: bool  # whether it is a batch, made by the dataset, or with random numbers
    generators: tuple[bytes, ...]  # the states of Python's, NumPy's and torch's before the batch was used
    drew: bool = False  # whether Python's or NumPy's was used until the step
    real: int = sys.maxsize  # how many of the samples are no padding
    of_step: int = 0  # the samples of the step, of all ranks and without padding, if ddpkit's loader knows

    @property
    def parts(self) -> Any:
        """Return what the dataset has returned, without padding."""
        samples = _Unpickler(io.BytesIO(self.samples)).load()
        return samples if self.is_made else samples[: self.real]

    @property
    def rows(self) -> int:
        """Count the samples, without padding."""
        return min(self.size, self.real)


class Draw(NamedTuple):
    """Random numbers that torch has drawn."""

    source: str  # the function, the shape of a row, and the lines that called it
    step: int  # how many optimizer steps came before
    drawn: Tensor


def read_ranks(folders: Sequence[Path], name: str) -> list[list[Any]]:
    """Read what each rank got, with the first rank's names of sources: shares of a dataset may differ in size."""
    by_rank = [list(read(folder / name)) for folder in folders]
    names = list(dict.fromkeys(each.source for each in by_rank[0]))
    for got in by_rank[1:]:
        pairs = pair_sources(dict.fromkeys(each.source for each in got), names)
        got[:] = [each._replace(source=pairs.get(each.source, each.source)) for each in got]
    return by_rank


def count_by_source(got: Iterable[Any]) -> dict[str, Counter[int]]:
    """Count the batches of each loader, or the draws of each place, by the number of steps before."""
    found: dict[str, Counter[int]] = {}
    for each in got:
        found.setdefault(each.source, Counter())[each.step] += 1
    return found


def pair_sources(own: Iterable[str], others: Sequence[str]) -> dict[str, str]:
    """Pair the sources of two processes: those of one name, else the first that is left and of one kind."""
    pairs: dict[str, str] = {}
    for source in own:
        kind = source.partition(" of ")[0]
        free = [other for other in others if other.partition(" of ")[0] == kind and other not in pairs.values()]
        match = source if source in others else next(iter(free), None)
        if match:
            pairs[source] = match
    return pairs


@dataclass
class Plan:
    """How a process takes part.

    Attributes:
        steps: The optimizer steps that it makes.
        folder: Takes its files, and is where it works.
        ranks: The folders of the ranks whose samples it gets, none for a rank.
        pairs: The ranks' sources of samples and of random numbers, by those of this process.
        merged: The ranks' sources that others go on with.
        one_by_one: The ranks' sources of which it gets each rank's batch by itself.
        times: By which loaders' batches are larger than the script says, as those of all ranks together are.
        permuted: Whether the rows of batches come in another order.
        keep: What of "dropout" and "batch norm" stays as it is.
    """

    steps: int
    folder: Path
    ranks: list[Path] = field(default_factory=list)
    pairs: dict[str, str] = field(default_factory=dict)
    merged: dict[str, str] = field(default_factory=dict)
    one_by_one: tuple[str, ...] = ()
    times: int = 1
    permuted: bool = False
    keep: tuple[str, ...] = ()


class Served:
    """What the ranks got, for one process that gets it all.

    Attributes:
        plan: How the process gets it.
        loops: The batches of each loop, those of the ranks together, by source.
        draws: The random numbers of each draw, by source; where not all ranks draw, those of the first.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._sizes: set[int] = set()  # of batches
        self.loops: dict[str, dict[int, list[list[Batch]]]] = {}
        self.draws: dict[str, list[list[Tensor]]] = {}
        by_rank = read_ranks(plan.ranks, "batches")
        loops = {batch.source: batch.loop + 1 for batch in by_rank[0]}
        for batches in by_rank:
            for number, batch in enumerate(batches):
                if source := plan.merged.get(batch.source):
                    batches[number] = batch._replace(source=source, loop=batch.loop + loops[source])
        for key, row in _rows_of(by_rank, plan.one_by_one).items():
            source, loop = key[:2]
            self.loops.setdefault(source, {}).setdefault(loop, []).append(row)
        by_rank = read_ranks(plan.ranks, "draws")
        for draws in by_rank:
            draws[:] = [draw._replace(source=plan.merged.get(draw.source, draw.source)) for draw in draws]
        shared = set.intersection(*({draw.source for draw in draws} for draws in by_rank))
        by_rank[1:] = [[draw for draw in draws if draw.source in shared] for draws in by_rank[1:]]
        for key, row in _rows_of(by_rank, plan.one_by_one).items():
            self.draws.setdefault(key[0], []).append([draw.drawn for draw in row])

    def collate(self, row: list[Batch], collate: Function) -> Any:
        """Make one batch of those of the ranks."""
        parts = [batch.parts for batch in row]
        self._sizes.add(sum(batch.rows for batch in row))
        if row[0].is_made:
            return tree_map(self.together, *parts)
        samples = list(chain(*parts))
        return collate([samples[number] for number in self._order(len(samples))])

    def together(self, *parts: Any) -> Any:
        """Put the rows of tensors one below the other."""
        if not getattr(parts[0], "ndim", 0):
            return parts[0]
        joined: Any = np.concatenate(parts) if isinstance(parts[0], np.ndarray) else torch.cat(parts)
        is_of_samples = len(joined) in self._sizes or not (self.loops or joined.is_floating_point())
        return joined[self._order(len(joined))] if is_of_samples else joined

    def _order(self, rows: int) -> list[int]:
        """Return the order of rows: one that is always the same for as many, so that what belongs together stays so."""
        if not self.plan.permuted:
            return list(range(rows))
        order: list[int] = torch.randperm(rows, generator=torch.Generator().manual_seed(rows)).tolist()
        return order


def _rows_of(by_rank: list[list[Any]], one_by_one: Collection[str]) -> dict[tuple[Any, ...], list[Any]]:
    """Put together what ranks got from one source, in one loop, step, and turn: in this order."""
    rows: dict[tuple[Any, ...], list[Any]] = {}
    for rank, got in enumerate(by_rank):
        turns: Counter[Any] = Counter()
        for each in got:
            place = each.source, getattr(each, "loop", 0), each.step
            rows.setdefault((*place, turns[place], rank * (each.source in one_by_one)), []).append(each)
            turns[place] += 1
    return {key: rows[key] for key in sorted(rows)}


class _Keeping:
    """Stands for a `collate_fn`, and keeps what that gets, or what it makes if it draws random numbers."""

    def __init__(self, collate: Function, gets_batches: bool) -> None:
        self.collate = collate
        self._gets_batches = gets_batches

    def __call__(self, samples: Any) -> tuple[bytes, int, bool, Any]:
        kept = pack(samples)
        before = _states()
        batch = self.collate(samples)
        if self._gets_batches or _states() != before:
            return pack(batch), size_of(batch), True, batch
        return kept, len(samples), False, batch


@dataclass
class Inputs:
    """Observes loaders from the moment of `install`, which comes before `check` observes them.

    Attributes:
        path: Takes the batches.
        served: What the training gets instead, if anything.
        samples: The loaders that `check` knows.
        is_fetching: Whether a loader makes a batch now.
    """

    path: Path
    served: Served | None
    samples: Samples = field(init=False)
    is_fetching: bool = False
    _pending: list[tuple[KnownLoader, Any, Batch]] = field(default_factory=list)  # since the last step
    _given: dict[Any, list[Batch]] = field(default_factory=dict)  # those served last, by loader
    _roles: WeakKeyDictionary[Any, str] = field(default_factory=WeakKeyDictionary)  # of loaders
    _ended: WeakSet[Any] = field(default_factory=WeakSet)  # loaders over which a loop has ended
    _loops: Counter[str] = field(default_factory=Counter)  # by role

    def install(self) -> None:
        """Begin."""
        replace(DataLoader, "__init__", self._enlarging)
        after(loading._BaseDataLoaderIter, "__init__", self._start)
        replace(loading._BaseDataLoaderIter, "__next__", self._next)
        replace(Loader, "_shares", self._shares)

    def begin_step(self) -> None:
        """Write the batches of a step, which has ended."""
        self._count()
        for known, _, batch in self._pending:
            if known.trains:
                drew = _states()[:2] != batch.generators[:2]
                append(self.path, batch._replace(drew=drew))
        self._pending = []

    def _enlarging(self, original: Function) -> Function:
        def call(loader: Any, dataset: Any, batch_size: Any = 1, *args: Any, **kwargs: Any) -> None:
            has_size = batch_size and "batch_sampler" not in kwargs
            self._roles[loader] = role = self._role_of(dataset)
            if has_size and self.served and role in self.served.plan.pairs:
                batch_size *= self.served.plan.times
            original(loader, dataset, batch_size, *args, **kwargs)

        return call

    def _role_of(self, dataset: Any) -> str:
        """Name the line that makes a loader, its dataset's size, and which of those it is that are in use at once.

        A loader that is made anew for each epoch keeps its role.
        """
        size = None
        with suppress(TypeError):  # a stream
            size = len(dataset)
        line = next(iter(stack()), None)
        in_use = {role for loader, role in self._roles.items() if loader not in self._ended}
        roles = (f"loader of {size} samples, {number}, {line}" for number in count())
        return next(role for role in roles if role not in in_use)

    def _start(self, iterator: Any, loader: Any) -> None:
        iterator.loader = loader
        iterator.loop = None
        self._ended.discard(loader)
        finalize(iterator, self._end, ref(loader))
        if type(iterator).__next__ is loading._BaseDataLoaderIter.__next__:
            iterator._collate_fn = _Keeping(iterator._collate_fn, not iterator._auto_collation)

    def _end(self, loader: ref[Any]) -> None:
        if loader():
            self._ended.add(loader())

    def _next(self, original: Function) -> Function:
        def call(iterator: Any) -> Any:
            if not isinstance(iterator._collate_fn, _Keeping):
                return original(iterator)
            known = self.samples.loader_of(iterator)
            role = self._roles.get(iterator.loader, "")
            loop = None
            self._count()
            if known and iterator.loop is None:
                iterator.loop = self._loops[role]
                self._loops[role] += 1
            if known and self.served:
                source = self.served.plan.pairs.get(role, "")
                loop = self.served.loops.get(source, {}).get(iterator.loop)
            if loop is not None:
                return self._serve(loop, iterator)
            self.is_fetching = True
            try:
                samples, size, is_made, batch = original(iterator)
            except StopIteration:
                self._ended.add(iterator.loader)
                raise
            finally:
                self.is_fetching = False
            if known:
                seen = Batch(role, iterator.loop, current().step, samples, size, is_made, _states())
                self._pending.append((known, iterator.loader, seen))
            return batch

        return call

    def _count(self) -> None:
        """Note how many samples of the last batch are no padding, if ddpkit's loader knows."""
        if self._pending:
            known, loader, batch = self._pending[-1]
            with suppress(AttributeError, TypeError, DdpkitError):  # it is none of ddpkit's, or reads ahead
                mine, step = loader._shares("samples")
                self._pending[-1] = known, loader, batch._replace(real=len(mine), of_step=len(step))

    def _serve(self, loop: list[list[Batch]], iterator: Any) -> Any:
        assert self.served
        if not loop:
            raise Cut
        given = self._given[iterator.loader] = loop.pop(0)
        _set_states(given[0].generators)
        try:
            return self.served.collate(given, iterator._collate_fn.collate)
        except (RuntimeError, ValueError) as error:
            how = " that the dataset makes, or collation by random numbers," if given[0].is_made else ""
            tell(End(error=f"the ranks' batches{how} cannot be joined: {error}"))
            self.samples.ending.wait("end")

    def _shares(self, original: Function) -> Function:
        def call(loader: Any, name: str) -> Any:
            given = self._given.get(loader)
            if not given or not given[0].of_step:
                return original(loader, name)
            return range(sum(batch.real for batch in given)), range(given[0].of_step)

        return call


def _states() -> tuple[bytes, ...]:
    return pack(random.getstate()), pack(np.random.get_state()), pack(torch.get_rng_state())


def _set_states(states: tuple[bytes, ...]) -> None:
    setters: list[Function] = [random.setstate, np.random.set_state, torch.set_rng_state]
    for setter, state in zip(setters, states, strict=True):
        setter(pickle.loads(state))


@dataclass
class Draws:
    """Observes random numbers that torch draws when there is an optimizer, from the moment of `install`.

    Attributes:
        path: Takes them.
        served: What is drawn instead, if anything.
        inputs: While they fetch, nothing is observed.
    """

    path: Path
    served: Served | None
    inputs: Inputs
    _has_begun: bool = False
    _counts: Counter[str] = field(default_factory=Counter)

    def install(self) -> None:
        """Begin."""
        after(Optimizer, "__init__", self._begin)
        for owner, names in ((torch, _FUNCTIONS), (Tensor, _METHODS)):
            for name in names:
                replace(owner, name, self._drawing)

    def _begin(self) -> None:
        self._has_begun = True

    def _drawing(self, original: Function) -> Function:
        note = guarded(self._note)

        def call(*args: Any, **kwargs: Any) -> Any:
            drawn = original(*args, **kwargs)
            drawer = sys._getframe(1).f_code.co_filename
            is_of_loop = self._has_begun and current().is_main and not self.inputs.is_fetching
            is_seen = is_of_loop and not any(part in drawer for part in _NOT_DRAWN)
            instead = note(original.__name__, drawn) if is_seen else None
            return drawn if instead is None else instead

        return call

    @torch.no_grad()
    def _note(self, name: str, drawn: Tensor) -> Tensor | None:
        """Write what was drawn, or return what one process uses: what the ranks have drawn together."""
        lines = "; ".join(map(str, stack()))
        draw = Draw(f"{name} {tuple(drawn.shape[1:])} of {lines}", current().step, drawn)
        if self.served is None:
            append(self.path, draw)
            return None
        source = self.served.plan.pairs.get(draw.source, draw.source)
        calls = self.served.draws.get(source, [])[self._counts[source] :]
        self._counts[source] += 1
        if not calls:
            return None
        first, *others = calls[0]
        together = self.served.together(*calls[0])
        if together.shape != drawn.shape and all(torch.equal(first, each) for each in others):
            together = first
        if together.shape == drawn.shape:
            return drawn.copy_(together)
        return None if self.served.loops else together.to(drawn)  # without a loader, batches are drawn
