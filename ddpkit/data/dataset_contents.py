"""What datasets, samplers and functions hold: objects that have an epoch, and random number generators."""

from __future__ import annotations

import functools
import gc
import random
from collections import deque
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_WITHOUT_GENERATORS = (type, ModuleType, torch.Tensor, np.ndarray)
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_SHORT = 100  # entries of a container that is searched for generators; longer ones hold samples


def pass_epoch_on(owner: Any, epoch: int) -> None:
    """Set the epoch of an object, or of those inside the wrappers around them."""
    for each in with_set_epoch(owner):
        each.set_epoch(epoch)


def with_set_epoch(owner: Any) -> list[Any]:
    """List the object itself if it has `set_epoch`, else such objects that it wraps."""
    found = []
    waiting = [owner]
    seen = {id(owner)}
    while waiting:
        one = waiting.pop()
        if callable(getattr(one, "set_epoch", None)):
            found.append(one)
            continue
        for each in _wrapped_by(one):
            if id(each) not in seen:
                seen.add(id(each))
                waiting.append(each)
    return found


def _wrapped_by(wrapper: Any) -> list[Any]:
    """List the objects that a wrapper holds as `dataset` and in `datasets`."""
    held = getattr(wrapper, "__dict__", {})  # a property may be work
    inner = held.get("datasets")
    if isinstance(inner, dict):
        inner = list(inner.values())
    if not isinstance(inner, (list, tuple)):
        inner = []
    return [each for each in [held.get("dataset"), *inner] if each is not None]


def generators_in(*owners: Any) -> Iterator[Any]:
    """Yield the random number generators that objects hold: see `Loader.peek`."""
    seen: set[int] = set()
    waiting = [*owners]
    while waiting:
        owner = waiting.pop()
        if id(owner) in seen or isinstance(owner, _WITHOUT_GENERATORS):
            continue
        seen.add(id(owner))
        if isinstance(owner, random.SystemRandom):  # has no state
            continue
        if isinstance(owner, _GENERATORS):
            yield owner
        else:
            waiting += _held_by(owner)


def _held_by(owner: Any) -> list[Any]:
    """List the objects to which an object refers, but of a function not the names of its module."""
    if isinstance(owner, _CONTAINERS) and len(owner) > _SHORT:
        return []
    held = gc.get_referents(owner)
    if isinstance(owner, FunctionType):
        return [each for each in held if each is not owner.__globals__]
    return held


def keep_state(generator: Any) -> Callable[[], None]:
    """Return a function that puts a generator back into its present state."""
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        return functools.partial(setattr, bits, "state", bits.state)
    if isinstance(generator, random.Random):
        return functools.partial(generator.setstate, generator.getstate())
    return functools.partial(generator.set_state, generator.get_state())
