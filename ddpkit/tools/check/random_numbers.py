"""Observe random number generators: which are used in training, from which state, and by which lines."""

from __future__ import annotations

import random
import sys
import zlib
from types import FrameType
from typing import Any

import numpy as np
import torch

from ..recorder import Recorder, before
from .source import Place, is_own, own_frames, place_of, stack

State = dict[str, tuple[int, int]]  # hash and position of each generator
_MANY = 8  # draws that are kept for a step
_LINES = 8  # of drawing that are kept
_SEEDING = (
    (torch, "manual_seed", "torch"),
    (np.random, "seed", "numpy"),
    (random, "seed", "random"),
    (random, "shuffle", "shuffle"),
    (np.random, "shuffle", "shuffle"),
    (np.random, "permutation", "shuffle"),
)


def states() -> State:
    """Hash the states of the global generators."""
    found = {
        "torch": _state_of_torch(torch.default_generator),
        "numpy": _state_of_numpy(np.random.mtrand._rand),
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        current = torch.cuda.default_generators[torch.cuda.current_device()]
        found["torch on the GPU"] = _state_of_torch(current)
    return found


def _state_of_torch(generator: torch.Generator) -> tuple[int, int]:
    """Hash a generator's state, and tell how many words of a block it has used, -1 if that is not known."""
    state = generator.get_state().numpy()
    if generator.device.type != "cpu":
        return zlib.crc32(state.data), -1
    left = int(state[8:12].view(np.int32)[0])
    return zlib.crc32(state.data), 624 - left


def _state_of_numpy(generator: np.random.RandomState) -> tuple[int, int]:
    _, keys, position, *_ = generator.get_state(legacy=True)
    return zlib.crc32(np.asarray(keys).data, int(position)), int(position)


class Draws:
    """Finds the script's lines that draw random numbers, by a trace function which compares states line by line."""

    def __init__(self) -> None:
        self.lines: list[Place] = []
        self._state: State = {}
        self._place: Place | None = None
        self._is_tracing = False

    def begin(self) -> None:
        """Look from here on, unless somebody else traces."""
        if sys.gettrace() is not None:
            return
        self._is_tracing = True
        self._state = states()
        for frame in own_frames(sys._getframe(1)):
            frame.f_trace = self._look
            self._place = self._place or place_of(frame)
        sys.settrace(self._look)

    def end(self) -> None:
        """Look no more."""
        if self._is_tracing:
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
        now = states()
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
        self._draws = Draws()

    def install(self) -> None:
        """Note where generators are seeded, and where lists are shuffled."""
        for module, name, kind in _SEEDING:
            before(module, name, self._note(kind))

    def _note(self, kind: str) -> Any:
        def look(*args: Any, **kwargs: Any) -> None:
            if self._recorder.is_main and (places := stack()):
                self._recorder.tell("seeded", generator=kind, where=places)

        return look

    def open(self) -> None:
        """Begin to watch, after a batch was fetched or a step has ended."""
        self._draws.end()
        self._opened = states()
        if self._recorder.step == 1:  # the lines are the same ones in other steps
            self._draws.begin()

    def pause(self) -> None:
        """Note what was drawn since `open`, before a loader draws for itself."""
        self._draws.end()
        now = states() if self._opened else {}
        for kind, (hashed, position) in self._opened.items():
            if now[kind][0] != hashed and len(self._drawn) < _MANY:
                words = (now[kind][1] - position) % 624
                self._drawn.append({"generator": kind, "state": hashed, "words": words})
        self._opened = {}

    def close(self) -> dict[str, Any]:
        """Return what this step has drawn, and where."""
        self.pause()
        return {"drawn": self._drawn, "lines": self._draws.lines}

    def begin_step(self) -> None:
        """Forget what belongs to the step that has ended."""
        self._drawn = []
        self.open()
