"""The command line, `ddpkit` or `python -m ddpkit`: choose a tool, read its flags, and write for terminals."""

from __future__ import annotations

import argparse
import math
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import Any, NamedTuple, NoReturn

from .. import __version__
from ..errors import docs_line, printable


class _Tool(NamedTuple):
    text: str
    example: str
    page: str  # of the guide


_TOOLS = {
    "check": _Tool(
        "runs a training script for a few steps, and finds its silent distributed bugs",
        "python -m ddpkit check -n 2 train.py",
        "check",
    ),
    "parity": _Tool(
        "proves that a training script trains on N ranks what it, or its original, trains on one process",
        "python -m ddpkit parity --reference single.py port.py",
        "parity",
    ),
    "where": _Tool(
        "asks a running job what each rank is doing, and for how long",
        "python -m ddpkit where",
        "troubleshooting",
    ),
    "rehearse": _Tool(
        "kills, stops and resumes a training script at random, and compares it with a whole run",
        "python -m ddpkit rehearse -n 2,3 train.py --folder {folder} --resume",
        "testing",
    ),
    "doctor": _Tool(
        "checks this machine or, under a launcher, the whole job; says how to fix it",
        "torchrun --nproc-per-node=4 -m ddpkit doctor",
        "troubleshooting",
    ),
}
_DOCS = "TOOL --help lists its flags and its page of the docs; in Python, help(ddpkit) is about the library."
_INTERRUPTED = 130  # exit codes as a shell reports them
_BROKEN_PIPE = 141
BAD_SCRIPT = 2


class UnfitScriptError(Exception):
    """Why a tool cannot do its work with a script: a sentence, and lines that belong to it."""


class _Parser(argparse.ArgumentParser):
    words: Sequence[str] = ()  # that may be meant

    def error(self, message: str) -> NoReturn:
        """Exit with one line, without the usage, and with the nearest word to an unknown one."""
        unknown = re.search(r"invalid choice: '(\w+)'|unrecognized arguments: (--[\w-]+)", message)
        near = get_close_matches(unknown[1] or unknown[2], self.words, 1) if unknown else []
        meant = f"; did you mean {near[0]}?" if near else ""
        self.exit(2, f"{self.prog}: error: {message}{meant} (--help lists what there is)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a tool; without a word, show what there is.

    Returns:
        The exit code: 0 if all is well, 1 if something failed, 2 for no tool or flags it does not know.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    parser = _parser(words)
    if not words:
        parser.print_help(sys.stderr)
        return 2
    args = parser.parse_args(words)
    try:
        code: int = import_module(f".{args.tool}", __package__).run(args)
        sys.stdout.flush()
    except UnfitScriptError as error:
        reason, *details = error.args
        show("\n    ".join([f"ddpkit {args.tool}: {reason}", *details]), on_stderr=True)
        return BAD_SCRIPT
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:  # `| head` has read enough
        _discard_stdout()
        return _BROKEN_PIPE
    return code


def _parser(words: Sequence[str]) -> _Parser:
    """Make the parser; only the tool that the words name is imported."""
    called = os.path.basename(sys.argv[0])
    prog = "ddpkit" if called == "ddpkit" else "python -m ddpkit"
    shape = argparse.RawDescriptionHelpFormatter
    common: dict[str, Any] = {"formatter_class": shape, "allow_abbrev": False}
    parser = _Parser(prog=prog, description="Tools for jobs on many ranks.", epilog=_DOCS, **common)
    parser.words = list(_TOOLS)
    parser.add_argument("--version", action="version", version=f"ddpkit {__version__}")
    tools = parser.add_subparsers(title="tools", dest="tool", required=True, metavar="TOOL")
    chosen = next((word for word in words if not word.startswith("-")), None)
    for name, (text, example, page) in _TOOLS.items():
        description = f"{text[0].upper()}{text[1:]}."
        tool = tools.add_parser(name, help=text, description=description, **common)
        if name == chosen:
            import_module(f".{name}", __package__).add_arguments(tool)
            parser.words = list(tool._option_string_actions)
        tool.epilog = f"Example: {example}\n{docs_line(page)}"
    return parser


def _discard_stdout() -> None:
    """Let the interpreter flush at its end without an error."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())


# Read flags, and write aligned columns, colours where they are wanted, and progress on stderr.

_COLOURS = {"red": 31, "green": 32, "yellow": 33, "bold": 1, "dim": 2}
_CODES = "|".join(map(str, [0, *_COLOURS.values()]))
_WIDEST = 120  # columns


def show(text: str, *, on_stderr: bool = False) -> None:
    """Print a text for people: what would control the terminal is escaped, except the codes of `paint()`.

    Args:
        text: The text; it may quote what other processes wrote.
        on_stderr: Whether it goes to stderr instead of stdout.
    """
    stream = sys.stderr if on_stderr else sys.stdout
    parts = re.split(rf"(\033\[(?:{_CODES})m)", text)
    parts[::2] = map(printable, parts[::2])
    encoding = stream.encoding or "utf-8"
    print("".join(parts).encode(encoding, "backslashreplace").decode(encoding), file=stream, flush=True)


def paint(text: str, colour: str) -> str:
    """Colour a text for stdout, unless that is no terminal or colours are not wanted.

    Args:
        text: The text.
        colour: "red", "green", "yellow", "bold" or "dim".
    """
    is_terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    unwanted = os.environ.get("NO_COLOR") or not is_terminal
    if unwanted or not text:
        return text
    return f"\033[{_COLOURS[colour]}m{text}\033[0m"


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    r"""Lay out a table, none without rows; numbers, and figures with a unit, are aligned to the right.

    >>> print("\n".join(table(["rank", "host"], [[0, "node1"], [10, "node2"]])))
    rank  host
       0  node1
      10  node2
    """
    if not rows:
        return []
    columns = []
    for number, name in enumerate(header):
        cells = [str(row[number]) for row in rows]
        are_figures = all(cell.lstrip("-")[:1].isdigit() for cell in cells)
        width = max(map(len, [name, *cells]))
        aligned = str.rjust if are_figures else str.ljust
        columns.append([aligned(cell, width) for cell in [name, *cells]])
    return ["  ".join(cells).rstrip() for cells in zip(*columns, strict=True)]


def wrap(texts: Sequence[str], margin: int) -> list[str]:
    """Break texts into lines that fit into the terminal beside a margin of so many columns."""
    width = max(columns() - margin, 40)
    lines = []
    for text in texts:
        lines += textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False) or [""]
    return lines


def columns() -> int:
    """Return how many columns a report may take: of the terminal, else 100."""
    return min(shutil.get_terminal_size((100, 24)).columns, _WIDEST)


def count(number: int, noun: str) -> str:
    """Write a number with its noun, in the plural unless it is one.

    >>> count(1, "rank"), count(2, "rank")
    ('1 rank', '2 ranks')
    """
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}s"


def announce(step: str) -> None:
    """Tell the person which step begins now, on stderr."""
    show(f"{step} ...", on_stderr=True)


def annotate(level: str, text: str, **properties: Any) -> None:
    """Print an annotation for GitHub, on stderr, which it reads as well: a report on stdout stays as it is.

    Args:
        level: "error" or "warning".
        text: What it says, in any number of lines.
        properties: Its "title", and the "file" and "line" that it is shown at.
    """
    pairs = [f"{name}={_escape(str(value), ':,')}" for name, value in properties.items()]
    show(f"::{level} {','.join(pairs)}::{_escape(text)}", on_stderr=True)


def _escape(text: str, separators: str = "") -> str:
    """Write what would end a part of an annotation as GitHub reads it."""
    return re.sub(rf"[%\r\n{separators}]", lambda found: f"%{ord(found[0]):02X}", text)


def positive(text: str) -> int:
    """Read a flag that is a positive number."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def several(text: str) -> int:
    """Read a flag that is a number of ranks to be compared."""
    if positive(text) == 1:
        raise argparse.ArgumentTypeError("at least 2 are needed")
    return int(text)


def checked_by(check: Callable[[str], object]) -> Callable[[str], str]:
    """Make a type of flags from a check that raises ValueError."""

    def convert(text: str) -> str:
        try:
            check(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return text

    return convert


def positive_seconds(text: str) -> float:
    """Read a flag that is a positive, finite number of seconds."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds")
    return seconds
