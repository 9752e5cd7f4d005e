"""Replace functions of torch in a checked process, which ends before anybody else would see them.

An observer that fails must not fail the script: its error becomes a record, once.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable
from typing import Any

from ...script.recorder import Recorder

Function = Callable[..., Any]
_failed: set[str] = set()
_recorders: list[Recorder] = []


def report_to(recorder: Recorder) -> None:
    """Choose where errors of observers are told."""
    _recorders[:] = [recorder]


def guarded(look: Function) -> Function:
    """Let a function return None where it would raise an exception, and tell that."""

    @functools.wraps(look)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return look(*args, **kwargs)
        except Exception:
            _tell(look.__qualname__)
            return None

    return call


def _tell(name: str) -> None:
    if name not in _failed and _recorders:
        _failed.add(name)
        _recorders[0].tell("observer failed", name=name, error=traceback.format_exc()[-2000:])


def replace(owner: Any, name: str, make: Callable[[Function], Function]) -> None:
    """Put a function in the place of another.

    Args:
        owner: The module or class that has it.
        name: Its name; nothing happens where there is none of that name.
        make: Makes the new function from the former one.
    """
    original = getattr(owner, name, None)
    if original is not None:
        setattr(owner, name, functools.wraps(original)(make(original)))


def before(owner: Any, name: str, look: Function) -> None:
    """Call `look` with a function's arguments before the function itself."""
    look = guarded(look)

    def make(original: Function) -> Function:
        def call(*args: Any, **kwargs: Any) -> Any:
            look(*args, **kwargs)
            return original(*args, **kwargs)

        return call

    replace(owner, name, make)


def after(owner: Any, name: str, look: Function) -> None:
    """Call `look` with a function's result and arguments after the function itself."""
    look = guarded(look)

    def make(original: Function) -> Function:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            look(result, *args, **kwargs)
            return result

        return call

    replace(owner, name, make)
