"""Reading a launcher's variables: the values that they hold, and everything that is wrong with them."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import LaunchError
from . import hints
from .launch import Launch
from .launchers import ALLOCATIONS, LOCAL, MASTER, RANKS, Launcher

_VARIABLE_LENGTH = 200  # characters of a variable in an error
_BOUNDS = (  # a rank is below, a size at most
    ("rank", "world_size"),
    ("local_rank", "local_world_size"),
    ("local_rank", "world_size"),
    ("local_world_size", "world_size"),
    ("node_rank", "num_nodes"),
    ("num_nodes", "world_size"),
)


class Reading:
    """The variables of one launcher, as this process finds them.

    Attributes:
        launcher: The launcher.
        env: The environment variables.
        values: By field of `Launch`, what could be read.
        missing: Names of variables that should be there.
        wrong: Sentences about those that make no sense.
        evidence: "NAME=value" of each that was used, and in words what was concluded.
    """

    def __init__(self, launcher: Launcher, env: Mapping[str, str]) -> None:
        self.launcher = launcher
        self.env = env
        self.values: dict[str, Any] = {}
        self.missing: list[str] = []
        self.wrong: list[str] = []
        self.evidence: list[str] = []
        self._names = {}  # by field, that of its variable
        for field, alternatives in (launcher.needs | launcher.takes).items():
            self._names[field] = _first_given(alternatives, env)
        for name in launcher.signs:
            if name in env and name not in self._names.values():
                self.evidence.append(f"{name}={env[name]}")
        for field, name in self._names.items():
            if name in env or field in launcher.needs:
                value = self.read(name, _PARSERS.get(field, _size))
                if value is not None:
                    self.values[field] = value

    def read(self, name: str, parse: Callable[[str], Any]) -> Any:
        """Return the value of a variable; None, with a note, if it is missing or wrong."""
        if name not in self.env:
            self.missing.append(name)
            return None
        self.evidence.append(f"{name}={self.env[name]}")
        try:
            return parse(self.env[name])
        except ValueError as error:
            self.wrong.append(f"{name}={self.env[name]} is {error}")
            return None

    def said(self, field: str) -> str:
        """Write where a value comes from, such as "RANK=3"."""
        name = self._names.get(field, "")
        if name not in self.env:
            name = field
        return f"{name}={self.values[field]}"

    def check_agreement(self, names: Mapping[str, str]) -> None:
        """Note where other variables, by field, tell something else."""
        for field, name in names.items():
            if name not in self.env or field not in self.values:
                continue
            self.evidence.append(f"{name}={self.env[name]}")
            if self.env[name] != str(self.values[field]):
                clash = f"{name}={self.env[name]} contradicts {self.said(field)}"
                self.wrong.append(f"{clash} (does a job script export it? then unset it there)")

    def launch(self) -> Launch:
        """Make the launch.

        Raises:
            LaunchError: If something is missing or wrong.
        """
        self._conclude()
        self._check_bounds()
        if self.missing or self.wrong:
            raise LaunchError(self._complaint())
        return Launch(self.launcher.kind, **self.values, evidence=tuple(self.evidence))

    def _conclude(self) -> None:
        """Fill in what follows from the values."""
        values = self.values
        if values.get("world_size") == 1:
            values.setdefault("local_rank", 0)
            values.setdefault("local_world_size", 1)
        if values.get("num_nodes") == 1 and "rank" in values and "world_size" in values:
            values.setdefault("local_rank", values["rank"])
            values.setdefault("local_world_size", values["world_size"])
        if "world_size" in values and values.get("local_world_size") == values["world_size"]:
            values.setdefault("node_rank", 0)
            values.setdefault("num_nodes", 1)

    def _check_bounds(self) -> None:
        for part, whole in _BOUNDS:
            if part not in self.values or whole not in self.values:
                continue
            value, bound = self.values[part], self.values[whole]
            if part.endswith("rank") and value >= bound:
                self.wrong.append(f"{self.said(part)} is not below {self.said(whole)}")
            elif value > bound:
                self.wrong.append(f"{self.said(part)} is more than {self.said(whole)}")

    def _complaint(self) -> str:
        problems = list(self.wrong)
        if self.missing:
            verb = "is" if len(self.missing) == 1 else "are"
            problems.insert(0, f"{', '.join(self.missing)} {verb} not set")
        found = []
        for line in self.evidence:
            found.append(line if len(line) < _VARIABLE_LENGTH else f"{line[:_VARIABLE_LENGTH]}…")
        told = (self._names["rank"], self._names["world_size"])
        marks = (*self.launcher.signs, *told, *RANKS.values(), *LOCAL.values(), *hints.pairs(self.env))
        unset = [name for name in dict.fromkeys(marks) if name in self.env]
        text = f"This looks like {self.launcher.title}, but {'; '.join(problems)}. Found: {', '.join(found)}. "
        warning = None
        if self.launcher.kind == "platform":
            warning = warn_of_allocation(self.env, "SLURM_NTASKS")
        if warning:
            text += f"{warning}. "
        return f"{text}{self.launcher.start}; to run on one process, unset {', '.join(unset)}."


def filled(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that hold something; a rank of -1 is how many scripts say that they are not distributed."""
    found = {}
    for name, text in env.items():
        stripped = text.strip()
        if stripped:
            found[name] = stripped
    if found.get("WORLD_SIZE", "1") == "1":
        for name in ("RANK", "LOCAL_RANK"):
            if found.get(name) == "-1":
                del found[name]
    return found


def meet_nobody(reading: Reading) -> None:
    """Forget the address: jobs of one task may run side by side under one exported MASTER_PORT."""
    for field in MASTER:
        reading.values.pop(field, None)


def warn_of_allocation(env: Mapping[str, str], *names: str) -> str | None:
    """Return a sentence if one of these variables tells of several tasks, of which this process is none."""
    for name in names:
        text = env.get(name, "1")
        several = text != "1"
        if name == "LSB_MCPU_HOSTS":  # "host1 4 host2 4"
            several = len(text.split()) > 2
        if several:
            tool = ALLOCATIONS[name]
            return (
                f"{name}={text}, but this process is none of {tool}'s tasks (a batch script, or a shell in an "
                f"allocation), so it runs alone: start the ranks with {tool}"
            )
    return None


def derive_port(*parts: str) -> int:
    """Return a port that follows from the parts alone, from 10000 to 29499.

    That is below the range from which Linux takes ports by itself, and torch's 29500.
    """
    return 10_000 + zlib.crc32("\0".join(parts).encode()) % 19_500


def _first_given(alternatives: str, env: Mapping[str, str]) -> str:
    """Return the first of "NAME|OTHER" that is set, or the first."""
    names = alternatives.split("|")
    for name in names:
        if name in env:
            return name
    return names[0]


def _integer(text: str, least: int, most: int | None = None) -> int:
    bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
    if not re.fullmatch("[0-9]+", text):
        raise ValueError(f"not an integer {bounds}")
    value = int(text)
    if value < least or (most is not None and value > most):
        raise ValueError(f"not an integer {bounds}")
    return value


def _rank(text: str) -> int:
    return _integer(text, 0)


def _size(text: str) -> int:
    return _integer(text, 1)


def _port(text: str) -> int:
    return _integer(text, 1, 65535)


_PARSERS: dict[str, Callable[[str], Any]] = {  # by field; the others are sizes
    "rank": _rank,
    "local_rank": _rank,
    "node_rank": _rank,
    "master_addr": str,
    "master_port": _port,
}
