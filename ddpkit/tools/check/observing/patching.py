"""Replace functions of torch in a checked process, which ends before anybody else would see them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

Function = Callable[..., Any]


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

    def make(original: Function) -> Function:
        def call(*args: Any, **kwargs: Any) -> Any:
            look(*args, **kwargs)
            return original(*args, **kwargs)

        return call

    replace(owner, name, make)


def after(owner: Any, name: str, look: Function) -> None:
    """Call `look` with a function's result and arguments after the function itself."""

    def make(original: Function) -> Function:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            look(result, *args, **kwargs)
            return result

        return call

    replace(owner, name, make)
