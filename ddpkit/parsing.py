"""Read what other processes wrote: JSON of a known form, with printable texts."""

from __future__ import annotations

import hmac
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from types import UnionType
from typing import Any, NoReturn, Union, get_args, get_origin

from .errors import LaunchError, printable

_VALUE_BYTES = 8 << 20  # bytes that the store takes at once; larger values were appended by another program


def parse(text: bytes | str, key: str, *shapes: Mapping[str, Any], values: int = 1) -> dict[str, Any]:
    """Parse a JSON object from the store; its texts are printable.

    Args:
        text: Bytes from the store.
        key: Their key, for the error.
        *shapes: Name and type of each field, one mapping for each valid form; `[int]` is a list of ints.
        values: Bound on the length, in numbers of values.

    Raises:
        LaunchError: If the text has none of these forms.
    """
    if len(text) > _VALUE_BYTES * values:
        refuse_text(text, key)
    try:
        found = all_printable(json.loads(text))
    except (ValueError, RecursionError):
        refuse_text(text, key)
    if not any(fits(found, shape) for shape in shapes):
        refuse_text(text, key)
    return dict(found)


def sealed(secret: bytes, place: Sequence[object], fields: Mapping[str, Any]) -> str:
    """Return fields as JSON, with a proof that the writer of this place knows a secret."""
    return json.dumps({**fields, "proof": _proof(secret, place, fields)})


def opened(
    secret: bytes, place: Sequence[object], text: bytes | str, key: str, shape: Mapping[str, Any]
) -> dict[str, Any]:
    """Read what `sealed()` wrote.

    Raises:
        LaunchError: If it has another form, or was written for another place or without the secret.
    """
    found = parse(text, key, {**shape, "proof": str})
    proof = found.pop("proof").encode(errors="replace")
    if not hmac.compare_digest(proof, _proof(secret, place, found).encode()):
        refuse_text(text, key)
    return found


def _proof(secret: bytes, place: Sequence[object], fields: Mapping[str, Any]) -> str:
    return hmac.new(secret, json.dumps([place, fields]).encode(), "sha256").hexdigest()


def refuse_text(text: bytes | str, key: str) -> NoReturn:
    """Raise `LaunchError`: no rank of this job wrote this text."""
    shown = repr(text[:60])
    if len(text) > 60:
        shown += "…"
    raise LaunchError(
        f"The store holds {shown} under {key!r}, which no rank of this job wrote. "
        "Does another program use this MASTER_ADDR and MASTER_PORT? Give each job its own port."
    )


def all_printable(value: Any) -> Any:
    """Return a JSON value with all its texts printable."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, list):
        return [all_printable(part) for part in value]
    if isinstance(value, dict):
        return {printable(name): all_printable(part) for name, part in value.items()}
    return value


def fits(value: Any, hint: Any) -> bool:
    """Return whether a JSON value has a type, or the form of a mapping from names to types, or of `[type]`."""
    if isinstance(hint, dict):
        has_names = isinstance(value, dict) and value.keys() == hint.keys()
        return has_names and all(fits(value[name], hint[name]) for name in hint)
    if isinstance(hint, list):
        return isinstance(value, list) and all(fits(each, hint[0]) for each in value)
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(fits(value, choice) for choice in args)
    if origin is dict:
        return isinstance(value, dict) and all(fits(each, args[1]) for each in value.values())
    if origin is tuple and args[-1] is Ellipsis:
        return fits(value, [args[0]])
    if origin is tuple:
        return isinstance(value, list) and len(value) == len(args) and all(map(fits, value, args))
    return type(value) is hint  # a bool is not an int


def encode(**fields: Any) -> bytes:
    """Return a message as a line. A `token`, if there is one, must be the first field."""
    return json.dumps(fields, default=asdict).encode() + b"\n"
