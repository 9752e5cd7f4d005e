"""Read settings from a JSON file and `key=value` arguments, and check them against a table.

In a table, a setting is a default, a type, or (type, default). A default alone has the type in `OF_DEFAULTS`. The
default of a `Literal` is its first value, that of a type with `None` is null; another type alone must be given.
"""

from __future__ import annotations

import copy
import json
import logging
import re
from ast import literal_eval
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import ConfigDict, NonNegativeFloat, PositiveInt, TypeAdapter, ValidationError

from shared.kinds import Text
from shared.program import UserError, user_error

log = logging.getLogger("trainer")
OF_DEFAULTS = {bool: bool, int: PositiveInt, float: NonNegativeFloat, str: Text}
REQUIRED = ...
COMMAND_LINE = "the command line"
_MISSING = "it is missing"
_TEXT_OR_COMMENT = re.compile(r'("(?:\\.|[^"\\\n])*")|//[^\n]*')


class Refused(str):
    """Why a setting of the original is not supported, and what to do."""


def _type_and_default(setting: Any) -> tuple[Any, Any]:
    if isinstance(setting, tuple):
        return setting
    if type(setting) in OF_DEFAULTS:
        return OF_DEFAULTS[type(setting)], setting
    if get_origin(setting) is Literal:
        return setting, get_args(setting)[0]
    return setting, None if type(None) in get_args(setting) else REQUIRED


def read_json(path: str | Path) -> dict[str, Any]:
    """Read a file of JSON with `//` comments."""
    with user_error(f"cannot read the settings in {path}", OSError, UnicodeDecodeError):
        source = Path(path).read_text()
    return parse(source, str(path))


def parse(source: str, name: str) -> dict[str, Any]:
    """Parse JSON with `//` comments; `//` inside a string is kept."""
    plain = _TEXT_OR_COMMENT.sub(lambda match: match[1] or "", source)
    with user_error(f"{name} is not JSON with // comments", ValueError):
        content = json.loads(plain, object_pairs_hook=_once)
    if not isinstance(content, dict):
        raise UserError(f"{name} must hold an object: {{ … }}")
    return content


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for name, value in pairs:
        if name in content:
            raise ValueError(f"{name} is given twice")
        content[name] = value
    return content


def read_arguments(arguments: Iterable[str]) -> dict[str, Any]:
    """Read `key=value` arguments; a value may be a section, in JSON."""
    given: dict[str, Any] = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals:
            raise UserError(f"settings must look like key=value, not {argument!r} (see --help)")
        if "api_key" in argument:
            raise UserError(f"{key}: other users can read the command line: set the environment variable WANDB_API_KEY")
        given[key] = parse(value, argument) if value.startswith("{") else value
    return given


def fill_in(
    table: Mapping[str, Any],
    absent: Mapping[str, str],
    contradictions: Callable[[dict[str, Any]], Iterable[str]],
    layers: Mapping[str, Mapping[str, Any]],
    aliases: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Merge layers of settings, each flat or in sections, over the defaults; later layers override earlier ones.

    Layers are named by their sources; `COMMAND_LINE` holds strings. Settings of the original that are absent here,
    {"section.name name=1": reason}, are ignored or `Refused`, unless their value is empty, false or the named one.
    Aliases map prefixes of names to others. One `UserError` lists all problems, unknown names with the nearest match.
    """
    reasons = _reasons(absent)
    known = {key: _type_and_default(setting) for key, setting in table.items() if key not in reasons}
    settings = {key: copy.deepcopy(default) for key, (_, default) in known.items()}
    given = {key: (None, _MISSING) for key, default in settings.items() if default is REQUIRED}
    for source, layer in layers.items():
        for key, value in flatten(layer, {*known, *reasons}):
            for alias, name in (aliases or {}).items():
                if key.startswith(alias):
                    log.warning("%s stands for %s%s (%s)", key, name, key.removeprefix(alias), source)
                    key = name + key.removeprefix(alias)
            given[key] = value, source
    problems: list[str] = []
    ignored: dict[str, list[str]] = {}  # by the reason
    for key, (value, source) in given.items():
        readings = _readings(value) if source == COMMAND_LINE else [value]
        reason, neutral = reasons.get(key, ("", None))
        if key in known:
            try:
                settings[key] = _valid(known[key][0], readings)
            except ValidationError as error:
                found = f"found {shown(key, json.dumps(value))} ({source})" if source != _MISSING else source
                problems += [f"{key}: {text}; {found}" for text in dict.fromkeys(map(_said, error.errors()))]
        elif not reason:
            refused = [name for name, (reason, _) in reasons.items() if isinstance(reason, Refused)]
            problems.append(f"{key} {_unknown(key, [*known, *refused])} ({source})")
        elif readings[0] in (neutral, None, False, [], {}):
            continue
        elif isinstance(reason, Refused):
            problems.append(f"{key} is {json.dumps(value)} ({source}), but {reason}")
        else:
            ignored.setdefault(reason, []).append(key)
    problems = problems or [*contradictions(settings)]
    if problems:
        raise UserError("\n  ".join(problems))
    if ignored:
        lists = [f"{', '.join(keys)} ({reason})" for reason, keys in ignored.items()]
        log.warning("ignored settings of the original: %s", "; ".join(lists))
    return settings


def _reasons(absent: Mapping[str, str]) -> dict[str, tuple[str, Any]]:
    """Read {"section.name name=1": reason} as reasons and neutral values by name."""
    reasons = {}
    for names, reason in absent.items():
        (section,) = re.findall(r"^(?:\w+\.)*", names)
        for word in names.removeprefix(section).split():
            name, _, neutral = word.partition("=")
            reasons[f"{section}{name}"] = reason, _readings(neutral)[0]
    return reasons


def _said(detail: Any) -> str:
    """Say what pydantic found wrong, and in which entry of a list, in JSON's words."""
    entries = "".join(f"entry {place + 1}: " for place in detail["loc"] if isinstance(place, int))
    return entries + detail["msg"].replace(" after validation", "").replace("False", "false")


def _unknown(key: str, known: Sequence[str]) -> str:
    """Name what may be meant: the same last word, one that ends with it, its letters' words, or what looks alike."""
    if any(name.startswith(f"{key}.") for name in known):
        return "must be a section: { … }"
    section, _, word = key.rpartition(".")
    word = re.escape(word)
    words = "_".join(rf"{letter}[^\W_]+" for letter in word if letter.isalpha())
    for pattern in (rf"(.*\.)?{word}", rf"(.*[._])?{word}", rf"(.*\.)?({word}|{words})(\..*)?"):
        if found := [name for name in known if re.fullmatch(pattern, name)]:
            return f"is unknown; did you mean {get_close_matches(key, found, 1, cutoff=0)[0]}?"
    sections = {name.rpartition(".")[0] for name in known if "." in name}
    names = {other: f"the section {other}" for other in sections if not f"{section}.".startswith(f"{other}.")}
    names |= {name[dot.end() :]: name for name in known for dot in re.finditer(r"^|\.", name)}
    for near in get_close_matches(key, names, 1):
        return f"is unknown; did you mean {names[near]}?"
    return "is unknown"


def _readings(given: Any) -> list[Any]:
    """List the values that a string of the command line may stand for."""
    if not isinstance(given, str):  # but part of a section
        return [given]
    readings: list[Any] = []
    for read in (json.loads, literal_eval):
        with suppress(ValueError, SyntaxError):
            readings.append(read(given))
    if readings and isinstance(readings[0], list | dict):
        return readings[:1]
    if given.startswith("[") and given.endswith("]"):  # shells take away a list's quotes
        readings.append([part.strip() for part in given[1:-1].split(",")])
    return [*readings, given]


def _valid(kind: Any, readings: list[Any]) -> Any:
    """Return the first valid reading, or raise the error of the first."""
    adapter = TypeAdapter(kind, config=ConfigDict(strict=True, allow_inf_nan=False))
    for reading in readings:
        with suppress(ValidationError):
            return adapter.validate_python(reading)
    return adapter.validate_python(readings[0])


def flatten(section: Mapping[str, Any], whole: Container[str] = (), prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Flatten sections to dotted names, except the values of names in `whole`."""
    for name, value in section.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and key not in whole:
            yield from flatten(value, whole, f"{key}.")
        else:
            yield key, value


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Nest settings into sections, as in files."""
    content: dict[str, Any] = {}
    for key, value in settings.items():
        *sections, name = key.split(".")
        place = content
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
    return content


def shown(key: str, value: Any) -> Any:
    """Hide the value of a key like `wandb_api_key`."""
    if "api_key" in key.lower() and value not in (None, "null"):
        return "<redacted>"
    return value
