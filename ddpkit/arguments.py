"""Checks of arguments that several rooms take."""

from __future__ import annotations

from datetime import timedelta
from numbers import Integral

_LONGEST = timedelta(days=10_000)  # torch counts nanoseconds in 64 bits


def check_timeout(timeout: object) -> None:
    """Refuse anything but a positive time-out: a number does not say its unit."""
    if not isinstance(timeout, timedelta):
        raise TypeError(f"timeout must be a datetime.timedelta, such as timedelta(seconds=30), got {timeout!r}.")
    if timeout <= timedelta(0):
        raise ValueError(f"timeout must be positive, got {timeout}.")
    if timeout > _LONGEST:
        raise ValueError(f"timeout must be at most {_LONGEST.days} days, got {timeout}.")


def is_positive_integer(value: object) -> bool:
    """Return whether a value is an integer of any kind, NumPy's too, but no bool, and at least 1."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 1
