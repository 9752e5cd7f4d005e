"""Check arguments that several modules take."""

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
    """Raise unless a time-out is a positive timedelta: a number has no unit."""
    if not isinstance(timeout, timedelta):
        seconds = timeout if type(timeout) in (int, float) else 30
        raise TypeError(f"timeout must be a datetime.timedelta, such as timedelta(seconds={seconds}), got {timeout!r}.")
    if timeout <= timedelta(0):
        raise ValueError(f"timeout must be positive, got {timeout}.")
    if timeout > _LONGEST:
        raise ValueError(f"timeout must be at most {_LONGEST.days} days, got {timeout}.")


def no_option(call: str, name: str, known: Iterable[str]) -> str:
    """Return a message that a function has no such keyword, with the closest one it has."""
    from difflib import get_close_matches  # imported only here: it takes memory

    near = get_close_matches(name, known, 1)
    return f"{call} has no option {name}: did you mean {near[0]}?" if near else f"{call} has no option {name}."


def plain_index(value: Any) -> Any:
    """Convert any integer type except bool to int; return anything else as it is."""
    if isinstance(value, (bool, np.bool_)):
        return value
    if isinstance(value, Tensor) and value.dtype == torch.bool:
        return value
    try:
        return operator.index(value)
    except Exception:  # user classes raise anything, and tensors' errors depend on size and dtype
        return value


def as_integer(value: Any, name: str, least: int = 1) -> int:
    """Convert an integer of any type except bool; raise ValueError if it is not one or is less than `least`."""
    number = plain_index(value)
    if type(number) is not int or number < least:
        expected = "a positive integer" if least == 1 else f"an integer of at least {least}"
        raise ValueError(f"{name} must be {expected}, got {value!r}.")
    return number
