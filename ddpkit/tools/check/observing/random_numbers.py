"""Observe random number generators: which are used in training, and from which state."""

from __future__ import annotations

import random
import zlib
from typing import Any

import numpy as np
import torch

from ..places import Stack, stack
from ..recorder import Recorder
from .patching import before

_MANY = 8  # windows that are kept for a step
State = dict[str, tuple[int, int]]  # hash and position of each generator


def states() -> State:
    """Hash the states of the global generators."""
    python = random.getstate()[1]
    _, keys, position, *_ = np.random.get_state()
    generator = torch.get_rng_state().numpy()
    found = {
        "torch": (zlib.crc32(generator.data), _position_of(generator)),
        "numpy": (zlib.crc32(np.asarray(keys).data, int(position)), int(position)),
        "random": (hash(python), int(python[-1])),
    }
    if torch.cuda.is_initialized():
        device = torch.cuda.get_rng_state()
        found["torch on the GPU"] = (zlib.crc32(device.numpy().data), -1)
    return found


def _position_of(state: np.ndarray[Any, Any]) -> int:
    """Return how many words of a block torch's generator has used."""
    left = int(state[8:12].view(np.int32)[0])
    return 624 - left


class Windows:
    """Watches the random numbers that a training step draws outside of its loader."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._opened: State = {}
        self._drawn: list[dict[str, Any]] = []
        self.seeded: dict[str, Stack] = {}

    def install(self) -> None:
        """Note where generators are seeded."""
        before(torch, "manual_seed", self._note("torch"))
        before(np.random, "seed", self._note("numpy"))
        before(random, "seed", self._note("random"))

    def _note(self, kind: str) -> Any:
        def look(*args: Any, **kwargs: Any) -> None:
            places = stack()
            if places:
                self.seeded[kind] = places
                self._recorder.tell("seeded", generator=kind, where=places)

        return look

    def open(self) -> None:
        """Begin to watch, after a batch was fetched or a step has ended."""
        self._opened = states()

    def pause(self) -> None:
        """Note what was drawn since `open`, before a loader draws for itself."""
        if not self._opened:
            return
        now = states()
        for kind, (hashed, position) in self._opened.items():
            if now[kind][0] != hashed and len(self._drawn) < _MANY:
                words = (now[kind][1] - position) % 624
                self._drawn.append({"generator": kind, "state": hashed, "words": words})
        self._opened = {}

    def close(self) -> list[dict[str, Any]]:
        """Return what this step has drawn."""
        self.pause()
        return self._drawn

    def begin_step(self) -> None:
        """Forget what belongs to the step that has ended."""
        self._drawn = []
        self.open()
