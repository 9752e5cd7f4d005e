"""Plain text for terminals: aligned columns, colours where they are wanted, and progress on stderr while one waits."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any, TextIO

_COLOURS = {"red": 31, "green": 32, "yellow": 33, "bold": 1, "dim": 2}


def paint(text: str, colour: str, stream: TextIO | None = None) -> str:
    """The text in a colour ("red", "green", "yellow", "bold", "dim"), or as it is where colours are not wanted."""
    stream = stream or sys.stdout
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not stream.isatty()
    return text if plain or not text else f"\033[{_COLOURS[colour]}m{text}\033[0m"


def can_show(text: str, stream: TextIO | None = None) -> bool:
    """Whether the stream's encoding has every character of the text."""
    try:
        text.encode(getattr(stream or sys.stdout, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """The lines of a table: columns of numbers, and of figures with a unit, aligned to the right.

    >>> print("\\n".join(table(["rank", "host"], [[0, "node1"], [10, "node2"]])))
    rank  host
       0  node1
      10  node2
    """
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    right = [bool(rows) and all(row[i].lstrip("-")[:1].isdigit() for row in cells[1:]) for i in range(len(header))]
    lines = (
        "  ".join(cell.rjust(w) if r else cell.ljust(w) for cell, w, r in zip(row, widths, right, strict=True))
        for row in cells
    )
    return [line.rstrip() for line in lines]


class Progress:
    """Says on stderr what is being done: in one line that changes on a terminal, else one line for each step."""

    def __init__(self, wanted: bool = True) -> None:
        self.wanted, self.live = wanted, sys.stderr.isatty() and os.environ.get("TERM") != "dumb"

    def __call__(self, text: str) -> None:
        """Shows what begins now."""
        if self.wanted:
            sys.stderr.write(f"\r\033[K{text} ..." if self.live else f"{text} ...\n")
            sys.stderr.flush()

    def done(self) -> None:
        """Takes the line away again."""
        if self.wanted and self.live:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()
