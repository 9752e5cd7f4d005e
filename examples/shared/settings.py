"""Read settings from a JSON file and `key=value` arguments, and check them against a table."""

from __future__ import annotations

import copy
import importlib.util
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from shared.program import UserError, user_error

log = logging.getLogger("trainer")
REQUIRED = ...
COMMAND_LINE = "the command line"
_TEXT_OR_COMMENT = re.compile(r'("(?:\\.|[^"\\\n])*")|//[^\n]*')


@dataclass(frozen=True)
class Setting:
    """The values that a setting may have, in words and as a function, and its default."""

    expected: str
    fits: Callable[[Any], bool]
    default: Any = REQUIRED


class Absent(Setting):
    """A setting of the original that has no meaning here; `expected` holds the reason."""


class Refused(Absent):
    """A setting of the original that is not supported; `expected` says what is missing and what to do."""


Table = Mapping[str, Setting]  # by dotted name


def absent(section: str, names: str, reason: str, *neutral: Any, kind: type[Absent] = Absent) -> dict[str, Setting]:
    """Make entries for settings without a meaning here; neutral values are accepted silently."""
    setting = kind(reason, lambda value: value in (None, False, *neutral))
    return {f"{section}{name}": setting for name in names.split()}


def text(default: Any = REQUIRED) -> Setting:
    return Setting("a string", lambda value: isinstance(value, str) and value != "", default)


def flag(default: bool = False) -> Setting:
    return Setting("true or false", lambda value: isinstance(value, bool), default)


def count(default: Any = REQUIRED, low: int = 1) -> Setting:
    return Setting(f"an integer of at least {low}", lambda value: type(value) is int and value >= low, default)


def number(default: Any = REQUIRED, interval: str = "[0, inf)") -> Setting:
    """Accept a number in an interval, such as "(0, 1]"."""
    low, high = map(float, interval[1:-1].split(","))

    def fits(value: Any) -> bool:
        if type(value) not in (int, float) or (value == low and interval[0] == "("):
            return False
        return low <= value < high or (value == high and interval[-1] == "]")

    return Setting(f"a number in {interval}", fits, default)


def folder_name(default: Any = REQUIRED) -> Setting:
    def fits(value: Any) -> bool:
        return text().fits(value) and value not in (".", "..") and not {"/", "\\"} & {*value}

    return Setting("a string without / and \\, since it names a folder", fits, default)


def class_or(*names: str) -> Setting:
    """Accept one of some names, or a class of the user's."""

    def fits(value: Any) -> bool:
        return value in names or re.fullmatch(r"[\w.]+:\w+", str(value)) is not None

    return Setting(" or ".join([*names, "package.module:Class"]), fits)


def use_wandb() -> Setting:
    """Accept true only if Weights & Biases is installed."""

    def fits(value: Any) -> bool:
        return value is False or (value is True and importlib.util.find_spec("wandb") is not None)

    return Setting("false, or true if wandb is installed (pip install wandb)", fits, False)


def choice(*values: Any, default: Any = None) -> Setting:
    """Accept one of some values; the first is the default, unless another is given."""
    expected = " or ".join(map(repr, values))
    return Setting(expected, lambda value: value in values, values[0] if default is None else default)


def many(one: Setting, default: Any = REQUIRED, empty: bool = True) -> Setting:
    def fits(value: Any) -> bool:
        if not isinstance(value, list) or not (value or empty):
            return False
        return all(map(one.fits, value))

    some = "" if empty else ", not empty"
    return Setting(f"a list{some}, each item {one.expected}", fits, default)


def pair(expected: str, one: Setting, default: Any = REQUIRED) -> Setting:
    return Setting(expected, lambda value: many(one).fits(value) and len(value) == 2, default)


def or_null(one: Setting) -> Setting:
    return Setting(f"{one.expected}, or null", lambda value: value is None or one.fits(value), None)


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
    names = [name for name, _ in pairs]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(f"{', '.join(sorted(twice))} is given twice")
    return dict(pairs)


def read_arguments(arguments: Iterable[str]) -> dict[str, Any]:
    """Read `key=value` arguments; a value may be a section, in JSON."""
    given: dict[str, Any] = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals:
            raise UserError(f"settings must look like key=value, not {argument!r} (see --help)")
        given[key] = value
        if value.startswith("{"):
            given[key] = parse(value, argument)
    return given


def fill_in(
    table: Table, layers: Mapping[str, Mapping[str, Any]], aliases: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Merge layers of settings, flat or in sections, over the defaults; later layers override earlier ones.

    Each layer is named by its source; values from the command line are strings. Aliases map prefixes of names to
    others. One `UserError` lists all problems with their source, unknown names with the nearest match.
    """
    known = {key: setting for key, setting in table.items() if not isinstance(setting, Absent)}
    settings = {key: copy.deepcopy(setting.default) for key, setting in known.items()}
    problems: list[str] = []
    ignored: dict[str, list[str]] = {}  # by the reason
    for source, layer in layers.items():
        for key, value in _renamed(flatten(layer, table), aliases or {}, source):
            if key not in table:
                problems.append(f"{_unknown(key, known)} ({source})")
                continue
            setting = table[key]
            if source == COMMAND_LINE:
                value = _typed(value, setting)
            if key in known:
                settings[key] = value
            if setting.fits(value):
                continue
            if isinstance(setting, Refused):
                problems.append(f"{key} is {json.dumps(value)} ({source}), but {setting.expected}")
            elif key in known:
                found = shown(key, json.dumps(value))
                problems.append(f"{key} must be {setting.expected}, not {found} ({source})")
            else:
                ignored.setdefault(setting.expected, []).append(key)
    for key, value in settings.items():
        if value is REQUIRED:
            problems.append(f"{key} is missing: it must be {table[key].expected}")
    refuse(problems)
    if ignored:
        reasons = [f"{', '.join(keys)} ({reason})" for reason, keys in ignored.items()]
        log.warning("ignored settings of the original: %s", "; ".join(reasons))
    return settings


def refuse(problems: Iterable[str]) -> None:
    """Raise one error that lists all problems, if there are any."""
    lines = list(problems)
    if lines:
        raise UserError("\n  ".join(lines))


def _renamed(given: Iterable[tuple[str, Any]], aliases: Mapping[str, str], source: str) -> Iterator[tuple[str, Any]]:
    for key, value in given:
        for alias, name in aliases.items():
            if key.startswith(alias):
                log.warning("%s stands for %s (%s)", key, key.replace(alias, name, 1), source)
                key = key.replace(alias, name, 1)
        yield key, value


def _unknown(key: str, table: Table) -> str:
    if any(known.startswith(f"{key}.") for known in table):
        return f"{key} must be a section: {{ … }}"
    near = _nearest(key, table)
    return f"{key} is unknown; did you mean {near}?" if near else f"{key} is unknown"


def _nearest(key: str, table: Table) -> str | None:
    """Find the nearest match of a key: in the nearest section, else in any section, else the section itself."""
    given, _, name = key.rpartition(".")
    sections: dict[str, list[str]] = {}
    endings = {}  # of the known names, in whole and without their first sections
    for known in table:
        path, _, last = known.rpartition(".")
        sections.setdefault(path, []).append(last)
        parts = known.split(".")
        for first in range(len(parts)):
            endings.setdefault(".".join(parts[first:]), known)
    section = next(iter(get_close_matches(given, sections, 1)), None)
    for near in get_close_matches(name, sections.get(section, ()), 1):
        return f"{section}.{near}".removeprefix(".")
    for near in get_close_matches(key if section is None else name, endings, 1):
        return endings[near]
    return None if section in (None, given) else f"the section {section}"


def _typed(given: Any, setting: Setting) -> Any:
    """Parse a string of the command line as a value that fits, if possible; otherwise return it."""
    if not isinstance(given, str):  # but of a section
        return given
    for reading in _readings(given):
        if setting.fits(reading):
            return reading
    return given


def _readings(given: str) -> Iterator[Any]:
    with suppress(ValueError):
        yield json.loads({"True": "true", "False": "false", "None": "null"}.get(given, given))
    with suppress(ValueError):
        yield float(given)  # .5
    if given.startswith("[") and given.endswith("]"):  # shells take away a list's quotes
        yield [part.strip() for part in given[1:-1].split(",")]


def flatten(section: Mapping[str, Any], whole: Iterable[str], prefix: str = "") -> Iterator[tuple[str, Any]]:
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
