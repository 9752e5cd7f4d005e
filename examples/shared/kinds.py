"""Types of settings besides pydantic's."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, Any, TypeVar

from pydantic import Field, ValidationError, WrapValidator
from pydantic_core import PydanticCustomError

Item = TypeVar("Item")


def such(kind: Any, expected: str, fits: Callable[[Any], Any]) -> Any:
    """Narrow a type to the values that fit."""

    def check(given: Any, read: Callable[[Any], Any]) -> Any:
        with suppress(ValidationError):
            value = read(given)
            if fits(value):
                return value
        raise PydanticCustomError("such", "Input should be {expected}", {"expected": expected})

    return Annotated[kind, WrapValidator(check)]


def class_or(*names: str) -> Any:
    """Accept one of some names, or a class of the user's."""
    pattern = re.compile("|".join([*names, r"[\w.]+:\w+"]))
    return such(str, " or ".join([*names, "package.module:Class"]), pattern.fullmatch)


Text = Annotated[str, Field(min_length=1)]
FolderName = such(Text, "a name without / and \\, since it names a folder", re.compile(r"(?!\.\.?$)[^/\\]+").fullmatch)
Share = Annotated[float, Field(gt=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Some = Annotated[list[Item], Field(min_length=1)]
Betas = Annotated[list[Decay], Field(min_length=2, max_length=2)]
UseWandb = such(
    bool,
    "false, or true if wandb is installed (pip install wandb)",
    lambda use: not use or importlib.util.find_spec("wandb"),
)
