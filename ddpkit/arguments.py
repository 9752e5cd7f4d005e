"""Checks of arguments that several rooms take."""

from __future__ import annotations

import operator
from contextlib import suppress
from datetime import timedelta
from typing import Any

import numpy as np

_LONGEST = timedelta(days=10_000)  # torch counts nanoseconds in 64 bits


def check_timeout(timeout: object) -> None:
    """Refuse anything but a positive time-out: a number does not say its unit."""
    if not isinstance(timeout, timedelta):
        raise TypeError(f"timeout must be a datetime.timedelta, such as timedelta(seconds=30), got {timeout!r}.")
    if timeout <= timedelta(0):
        raise ValueError(f"timeout must be positive, got {timeout}.")
    if timeout > _LONGEST:
        raise ValueError(f"timeout must be at most {_LONGEST.days} days, got {timeout}.")


def as_integer(value: Any, name: str, least: int = 1) -> int:
    """Convert an integer of any kind but a bool; raise ValueError if it is none, or less than `least`."""
    number = None
    if not isinstance(value, bool | np.bool_):  # older versions of NumPy take theirs for an index
        with suppress(TypeError):
            number = operator.index(value)
    if number is None or number < least:
        expected = "a positive integer" if least == 1 else f"an integer of at least {least}"
        raise ValueError(f"{name} must be {expected}, got {value!r}.")
    return number
