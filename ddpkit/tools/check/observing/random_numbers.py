"""Observe random number generators: which are used in training, and from which state."""

from __future__ import annotations

import random
import sys
import zlib
from collections.abc import Iterator
from types import FrameType
from typing import Any

import numpy as np
import torch

from ...script.recorder import Recorder
from ..places import Place, Stack, is_own, own_frames, place_of, stack
from .patching import before

_MANY = 8  # windows that are kept for a step
_LINES = 8  # of drawing that are kept
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


class Draws:
    """Finds the script's lines that draw random numbers, by a trace function which compares states line by line.

    Args:
        others: Generators to look at besides the global ones.
    """

    def __init__(self, others: tuple[Any, ...] = ()) -> None:
        self.lines: list[Place] = []
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
        self._state = now


class Windows:
    """Watches the random numbers that a training step draws outside of its loader."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._opened: State = {}
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
        if self._recorder.step == 1:  # the lines are the same ones in other steps
            self._draws = self._draws or Draws()
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
        self._opened = {}

    def close(self) -> dict[str, Any]:
        """Return what this step has drawn, and where."""
        self.pause()
        return {"drawn": self._drawn, "lines": self._draws.lines if self._draws else []}

    def begin_step(self) -> None:
        """Forget what belongs to the step that has ended."""
        self._drawn = []
        self.open()
