"""Observe random number generators: which are used in training, from which state, and by which lines."""

from __future__ import annotations

import random
import sys
import zlib
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

import numpy as np
import torch

from ..recorder import Function, Recorder, before, guarded, replace
from .source import Place, is_own, own_frames, place_of, stack

State = dict[str, tuple[int, int]]  # hash and position of each generator
GENERATORS = (np.random.RandomState, np.random.Generator, random.Random, torch.Generator)
_MANY = 8  # draws that are kept for a step
_CHILDREN = 32  # of an object that are searched for generators
_LINES = 8  # of drawing that are kept
_SEEDING = (
    (torch, "manual_seed", "torch"), (torch, "set_rng_state", "torch"), (torch.random, "set_rng_state", "torch"),
    (np.random, "seed", "numpy"), (np.random, "set_state", "numpy"), (np.random, "shuffle", "shuffle"),
    (np.random, "permutation", "shuffle"),
    (random, "seed", "random"), (random, "setstate", "random"), (random, "shuffle", "shuffle"),
)  # fmt: skip


def states(others: Sequence[Any] = ()) -> State:
    """Hash the states of the global generators, and of others."""
    found = {"torch": torch.default_generator, "numpy": np.random.mtrand._rand, "random": random._inst}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found["torch on the GPU"] = torch.cuda.default_generators[torch.cuda.current_device()]
    found |= {f"{type(other).__name__} {number}": other for number, other in enumerate(others)}
    return {name: _state_of(generator) for name, generator in found.items()}


def _state_of(generator: Any) -> tuple[int, int]:
    """Hash a generator's state, and tell how many words of a block it has used, 0 if that is not known."""
    if isinstance(generator, random.Random):
        return hash(generator.getstate()[1]), 0
    if isinstance(generator, np.random.Generator):
        return zlib.crc32(repr(generator.bit_generator.state).encode()), 0
    if isinstance(generator, np.random.RandomState):
        _, keys, position, *_ = generator.get_state(legacy=True)
        return zlib.crc32(np.asarray(keys).data, int(position)), int(position)
    state = generator.get_state().numpy()
    if generator.device.type != "cpu":
        return zlib.crc32(state.data), 0
    left = int(state[8:12].view(np.int32)[0])
    return zlib.crc32(state.data), 624 - left


def _generators_in(value: Any, depth: int = 4) -> Iterator[Any]:
    """Yield the generators in the fields of an object."""
    if type(value) in GENERATORS:
        yield value
    elif depth and hasattr(value, "__dict__") and not isinstance(value, type):
        value = list(vars(value).values())
    if depth and isinstance(value, list | tuple):
        for child in value[:_CHILDREN]:
            yield from _generators_in(child, depth - 1)


class Draws:
    """Finds the generators that are used between `begin` and `end`, and the script's lines that draw from them.

    Args:
        value: Has generators in its fields, besides the global ones.
    """

    def __init__(self, value: Any = None) -> None:
        self.lines: list[Place] = []
        self.drawn: list[dict[str, Any]] = []
        self._others = list(_generators_in(value))
        self._begun: State = {}
        self._state: State = {}
        self._place: Place | None = None
        self._is_tracing = False

    def begin(self, traces: bool = True) -> None:
        """Look from here on; compare states line by line, unless somebody else traces."""
        self._begun = self._state = states(self._others)
        if not traces or sys.gettrace() is not None:
            return
        self._is_tracing = True
        for frame in own_frames(sys._getframe(1)):
            frame.f_trace = self._look
            self._place = self._place or place_of(frame)
        sys.settrace(self._look)

    @property
    def watches(self) -> bool:
        """Return whether it looks now."""
        return bool(self._begun)

    def end(self) -> None:
        """Look no more."""
        if self._is_tracing:
            sys.settrace(None)
            self._is_tracing = False
            self._compare()
            for frame in own_frames(sys._getframe(1)):
                frame.f_trace = None
        now = states(self._others) if self._begun else {}
        for kind, (hashed, position) in self._begun.items():
            if now.get(kind, (hashed,))[0] != hashed and len(self.drawn) < _MANY:
                words = (now[kind][1] - position) % 624
                self.drawn.append({"generator": kind, "state": hashed, "words": words})
        self._begun = {}

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
        self._draws = Draws()

    def install(self) -> None:
        """Note where generators are seeded, and where lists are shuffled."""
        for module, name, kind in _SEEDING:
            before(module, name, self._note(kind))
        for name in ("randn", "rand", "normal", "bernoulli"):
            replace(torch, name, self._own)

    def _own(self, original: Function) -> Function:
        note = guarded(self._draws_from)

        def call(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("generator") is None:
                return original(*args, **kwargs)
            state = _state_of(kwargs["generator"])[0]
            result = original(*args, **kwargs)
            note(state, result)
            return result

        return call

    def _draws_from(self, state: int, result: torch.Tensor) -> None:
        """Note what is drawn from a generator that was given, in a step."""
        if self._draws.watches and len(self._draws.drawn) < _MANY:
            self._draws.lines += stack()[:1]
            self._draws.drawn.append({"generator": "a generator", "state": state, "words": result.numel()})

    def _note(self, kind: str) -> Any:
        def look(*args: Any, **kwargs: Any) -> None:
            if places := stack():
                self._recorder.tell("seeded", generator=kind, where=places)

        return look

    def open(self) -> None:
        """Begin to watch, after a batch was fetched or a step has ended."""
        self.pause()
        self._draws.begin(traces=self._recorder.step == 1)  # the lines are the same ones in other steps

    def pause(self) -> None:
        """Note what was drawn since `open`, before a loader draws for itself."""
        self._draws.end()

    def close(self) -> dict[str, Any]:
        """Return what this step has drawn, and where."""
        self.pause()
        return {"drawn": self._draws.drawn, "lines": self._draws.lines}

    def begin_step(self) -> None:
        """Forget what belongs to the step that has ended."""
        self.pause()
        self._draws.drawn = []
        self.open()
