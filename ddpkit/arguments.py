"""Check arguments that several modules take."""

from __future__ import annotations

import inspect
import operator
import re
import sys
from collections.abc import Iterable
from datetime import timedelta
from linecache import getline
from traceback import walk_tb
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor

_UNKNOWN_OPTION = re.compile(r"([\w.]+)\(\) got an unexpected keyword argument '(\w+)'(?:\..*)?")
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

    known = list(known)
    alike = [each for each in known if name.startswith(each) or each.startswith(name)]
    near = sorted(alike, key=lambda each: abs(len(each) - len(name))) or get_close_matches(name, known, 1)
    return f"{call} has no option {name}: did you mean {near[0]}?" if near else f"{call} has no option {name}."


def suggest_option(error: BaseException) -> None:
    """Add to Python's own error for an unknown option of a public function the options that it has."""
    found = _UNKNOWN_OPTION.fullmatch(str(error)) if type(error) is TypeError else None
    if found is None:
        return
    first, *rest = found[1].split(".")
    function = vars(sys.modules["ddpkit"]).get(first)
    frames = [*walk_tb(error.__traceback__)][-4:]  # a context manager is made deeper
    if function is None or not any(_calls(frame, line, found[1], function) for frame, line in frames):
        return
    for name in rest:
        function = getattr(function, name)
    known = [name for name in inspect.signature(function).parameters if name != "self"]
    call = found[1].removesuffix(".__init__")
    error.args = (f"{no_option(f'{call}()', found[2], known)} It takes {', '.join(known)}.",)
    vars(error)["_page"] = ""  # shown like ddpkit's errors


def _calls(frame: FrameType, number: int, path: str, function: Any) -> bool:
    """Return whether a line calls ddpkit's function or method, not another one of this name."""
    known = frame.f_globals | frame.f_locals
    first, *rest = path.split(".")
    if first in known:
        return known[first] is function
    line = getline(frame.f_code.co_filename, number)
    if rest and rest != ["__init__"]:
        return f".{rest[-1]}(" in line
    return any(value is sys.modules["ddpkit"] and f"{alias}.{first}(" in line for alias, value in known.items())


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
        problem = f"{name} must be {expected}, got {value!r}."
        if name in ("batch_size", "micro_batch_size") and type(number) is int and number == 0:
            problem += " Did you divide fewer samples than there are ranks by the number of ranks?"
        raise ValueError(problem)
    return number
