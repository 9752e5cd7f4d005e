"""Observe random number generators: which are used in training, and from which state."""

from __future__ import annotations

import copy
import random
import sys
import zlib
from collections.abc import Iterator
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

from ...script.recorder import Recorder
from ..places import Place, Stack, is_own, own_frames, place_of, stack
from .modules import variables
from .patching import before

_MANY = 8  # windows that are kept for a step
_LINES = 8  # of drawing that are kept
_LOOKED_AT = 4  # steps at which the script's own generators are looked at
_FEW_STEPS = 16  # of a generator that are counted
GENERATORS = (np.random.RandomState, np.random.Generator, random.Random, torch.Generator)
State = dict[str, tuple[int, int]]  # hash and position of each generator


def states(others: tuple[Any, ...] = ()) -> State:
    """Hash the states of the global generators, and of others."""
    python = random.getstate()[1]
    generator = torch.get_rng_state().numpy()
    found = {
        "torch": (zlib.crc32(generator.data), _position_of(generator)),
        "numpy": _of_numpy(np.random.get_state(legacy=True)),
        "random": (hash(python), int(python[-1])),
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        device = torch.cuda.get_rng_state()
        found["torch on the GPU"] = (zlib.crc32(device.numpy().data), -1)
    for number, other in enumerate(others):
        found[f"{type(other).__name__} {number}"] = (_hash_of(other), -1)
    return found


def _of_numpy(state: Any) -> tuple[int, int]:
    _, keys, position, *_ = state
    return zlib.crc32(np.asarray(keys).data, int(position)), int(position)


def _hash_of(generator: Any) -> int:
    if isinstance(generator, torch.Generator):
        return zlib.crc32(generator.get_state().cpu().numpy().data)
    if isinstance(generator, random.Random):
        return zlib.crc32(repr(generator.getstate()).encode())
    if isinstance(generator, np.random.Generator):
        return zlib.crc32(repr(generator.bit_generator.state).encode())
    return _of_numpy(generator.get_state(legacy=True))[0]


def _position_of(state: np.ndarray[Any, Any]) -> int:
    """Return how many words of a block torch's generator has used."""
    left = int(state[8:12].view(np.int32)[0])
    return 624 - left


def generators_in(value: Any, depth: int = 4) -> Iterator[Any]:
    """Yield the generators in the fields of an object."""
    if isinstance(value, GENERATORS):
        yield value
    elif depth and isinstance(value, list | tuple) and len(value) <= 32:
        for child in value:
            yield from generators_in(child, depth - 1)
    elif depth and hasattr(value, "__dict__") and not isinstance(value, type):
        for child in list(vars(value).values()):
            yield from generators_in(child, depth - 1)


def generators_around() -> list[Any]:
    """List the generators of the script's running functions and networks, but for those of loaders and samplers.

    Those of Python's `random` are left out: they make choices that all ranks are to make alike.
    """
    found: dict[int, Any] = {}
    others: set[int] = set()
    for _, value in variables():
        if isinstance(value, DataLoader | Sampler | Dataset):
            others.update(map(id, generators_in(value)))
        elif isinstance(value, nn.Module):
            fields = [child for module in value.modules() for child in vars(module).values()]
            found.update({id(child): child for child in fields if isinstance(child, GENERATORS)})
        elif isinstance(value, GENERATORS):
            found[id(value)] = value
    return [g for key, g in found.items() if key not in others and not isinstance(g, random.Random)]


class _Own:
    """One generator of the script at the beginning of a window."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator
        self._old = self._copy()
        self.hashed = _hash_of(generator)

    def _copy(self) -> Any:
        if isinstance(self._generator, torch.Generator):
            return self._generator.get_state().cpu().numpy()
        if isinstance(self._generator, np.random.Generator):
            return copy.deepcopy(self._generator.bit_generator)
        return self._generator.get_state(legacy=True)

    def words(self) -> int:
        """Count what was drawn since: 0 for nothing, -1 for more than can be counted."""
        new = self._copy()
        if _hash_of(self._generator) == self.hashed:
            return 0
        if isinstance(self._generator, np.random.Generator):
            return _advance(self._old, new)
        if isinstance(self._generator, torch.Generator):
            is_on_cpu = self._generator.device.type == "cpu"
            return (_position_of(new) - _position_of(self._old)) % 624 if is_on_cpu else -1
        return int(new[2] - self._old[2]) % 624


def _advance(old: Any, new: Any) -> int:
    """Count the steps between two states of a bit generator as far as these are few; -1 if they are not."""
    for number in range(1, _FEW_STEPS):
        if not hasattr(old, "advance"):
            break
        old.advance(1)
        if repr(old.state["state"]) == repr(new.state["state"]):
            return number
    return -1


class Draws:
    """Finds the script's lines that draw random numbers, by a trace function which compares states line by line.

    Args:
        others: Generators to look at besides the global ones.
    """

    def __init__(self, others: tuple[Any, ...] = ()) -> None:
        self.lines: list[Place] = []
        self.by_kind: dict[str, list[Place]] = {}
        self._others = others
        self._state: State = {}
        self._place: Place | None = None
        self._is_tracing = False

    def begin(self) -> None:
        """Look from here on, unless somebody else traces."""
        if sys.gettrace() is not None:
            return
        self._is_tracing = True
        self._state = states(self._others)
        for frame in own_frames(sys._getframe(1)):
            frame.f_trace = self._look
            self._place = self._place or place_of(frame)
        sys.settrace(self._look)

    def end(self) -> None:
        """Look no more."""
        if not self._is_tracing:
            return
        sys.settrace(None)
        self._is_tracing = False
        self._compare()
        for frame in own_frames(sys._getframe(1)):
            frame.f_trace = None

    def _look(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not is_own(frame.f_code.co_filename):
            return None
        self._compare()
        self._place = place_of(frame)
        return self._look

    def _compare(self) -> None:
        """Blame the line before for a state that has changed."""
        now = states(self._others)
        is_new = self._place not in self.lines and len(self.lines) < _LINES
        if now != self._state and self._place and is_new:
            self.lines.append(self._place)
        for kind in now:
            if self._place and now[kind] != self._state.get(kind) and len(self.by_kind.get(kind, [])) < _LINES:
                self.by_kind.setdefault(kind, []).append(self._place)
        self._state = now


class Windows:
    """Watches the random numbers that a training step draws outside of its loader."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._opened: State = {}
        self._own: dict[str, _Own] = {}
        self._drawn: list[dict[str, Any]] = []
        self._draws: Draws | None = None

    def install(self) -> None:
        """Note where generators are seeded, and where lists are shuffled."""
        before(torch, "manual_seed", self._note("torch"))
        before(np.random, "seed", self._note("numpy"))
        before(random, "seed", self._note("random"))
        before(random, "shuffle", self._note("shuffle"))
        before(np.random, "shuffle", self._note("shuffle"))
        before(np.random, "permutation", self._note("shuffle"))

    def _note(self, kind: str) -> Any:
        def look(*args: Any, **kwargs: Any) -> None:
            places: Stack = stack()
            if places:
                self._recorder.tell("seeded", generator=kind, where=places, worker=not self._recorder.is_main)

        return look

    def open(self) -> None:
        """Begin to watch, after a batch was fetched or a step has ended."""
        if self._draws:
            self._draws.end()
        self._opened = states()
        own = generators_around() if self._recorder.step < _LOOKED_AT else []
        self._own = {f"{type(g).__name__} {number}": _Own(g) for number, g in enumerate(own)}
        if self._recorder.step == 1:  # the lines are the same ones in other steps
            self._draws = self._draws or Draws(tuple(own))
            self._draws.begin()

    def pause(self) -> None:
        """Note what was drawn since `open`, before a loader draws for itself."""
        if not self._opened:
            return
        if self._draws:
            self._draws.end()
        now = states()
        for kind, (hashed, position) in self._opened.items():
            if now[kind][0] != hashed and len(self._drawn) < _MANY:
                words = (now[kind][1] - position) % 624
                self._drawn.append({"generator": kind, "state": hashed, "words": words})
        for kind, generator in self._own.items():
            if (words := generator.words()) and len(self._drawn) < _MANY:
                self._drawn.append({"generator": kind, "state": generator.hashed, "words": words})
        self._opened = {}
        self._own = {}

    def close(self) -> dict[str, Any]:
        """Return what this step has drawn, and where."""
        self.pause()
        lines = self._draws.lines if self._draws else []
        by_kind = self._draws.by_kind if self._draws else {}
        return {"drawn": self._drawn, "lines": lines, "by_kind": by_kind}

    def begin_step(self) -> None:
        """Forget what belongs to the step that has ended."""
        self._drawn = []
        self.open()
