"""Checks of arguments that several rooms take."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import Tensor

_LONGEST = timedelta(days=10_000)  # torch counts nanoseconds in 64 bits


def check_timeout(timeout: object) -> None:
    """Refuse anything but a positive time-out: a number does not say its unit."""
    if not isinstance(timeout, timedelta):
        seconds = timeout if type(timeout) in (int, float) else 30
        raise TypeError(f"timeout must be a datetime.timedelta, such as timedelta(seconds={seconds}), got {timeout!r}.")
    if timeout <= timedelta(0):
        raise ValueError(f"timeout must be positive, got {timeout}.")
    if timeout > _LONGEST:
        raise ValueError(f"timeout must be at most {_LONGEST.days} days, got {timeout}.")


def no_option(call: str, name: str, known: Iterable[str]) -> str:
    """Write that a function has no such keyword, and which one may have been meant."""
    from difflib import get_close_matches  # only where it is needed: it takes memory

    near = get_close_matches(name, known, 1)
    return f"{call} has no option {name}: did you mean {near[0]}?" if near else f"{call} has no option {name}."


def plain_index(value: Any) -> Any:
    """Turn any kind of integer but a bool into Python's; leave anything else as it is."""
    if isinstance(value, (bool, np.bool_)):
        return value
    if isinstance(value, Tensor) and value.dtype == torch.bool:
        return value
    try:
        return operator.index(value)
    except Exception:  # whatever a class of somebody's own raises; tensors raise other errors by their size and dtype
        return value


def as_integer(value: Any, name: str, least: int = 1) -> int:
    """Convert an integer of any kind but a bool; raise ValueError if it is none, or less than `least`."""
    number = plain_index(value)
    if type(number) is not int or number < least:
        expected = "a positive integer" if least == 1 else f"an integer of at least {least}"
        raise ValueError(f"{name} must be {expected}, got {value!r}.")
    return number
