"""Text for terminals: aligned columns, colours where they are wanted, and progress on stderr while one waits.

Where rich is installed, tables on a terminal are drawn by it; everything is readable without.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, TextIO

Cell = Sequence[tuple[str, str]]  # pieces of text, each with the name of a colour or ""
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
    right = [_is_figures(column) for column in zip(*cells[1:], strict=True)] or [False] * len(header)
    lines = (
        "  ".join(cell.rjust(w) if r else cell.ljust(w) for cell, w, r in zip(row, widths, right, strict=True))
        for row in cells
    )
    return [line.rstrip() for line in lines]


def drawn(header: Sequence[str], rows: Sequence[Sequence[Any]], stream: TextIO | None = None) -> list[str]:
    """The lines of a table for people: in a box where there can be one and the terminal is wide enough, else plain."""
    lines = table(header, rows)
    if max(map(len, lines)) + len(header) + 3 > shutil.get_terminal_size().columns:
        return lines
    return boxed(header, [[[(str(cell), "")] for cell in row] for row in rows], stream or sys.stdout) or lines


def boxed(header: Sequence[str], rows: Sequence[Sequence[Cell]], stream: TextIO) -> list[str]:
    """The lines of a table in a box, cells wrapped to the terminal; none without rich, or where the stream is none.

    Args:
        header: Names of the columns; may be empty.
        rows: Cells of pieces of text.
        stream: Where the lines will be printed.
    """
    if os.environ.get("TERM") == "dumb" or not stream.isatty() or not can_show("╭│✓→", stream):
        return []
    try:
        console, box, tables, texts = (import_module(f"rich.{name}") for name in ("console", "box", "table", "text"))
    except ImportError:
        return []
    grid = tables.Table(box=box.ROUNDED, show_header=bool(header), header_style="bold", border_style="dim")
    for i, column in enumerate(zip(*rows, strict=True)):
        right = _is_figures(["".join(text for text, _ in cell) for cell in column])
        grid.add_column(header[i] if header else "", justify="right" if right else "left", overflow="fold")
    for row in rows:
        grid.add_row(*(texts.Text.assemble(*cell) for cell in row))
    terminal = console.Console(file=stream, width=min(shutil.get_terminal_size().columns, 120), highlight=False)
    with terminal.capture() as captured:
        terminal.print(grid)
    return str(captured.get()).splitlines()


def _is_figures(column: Sequence[str]) -> bool:
    return all(cell.lstrip("-")[:1].isdigit() for cell in column)


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
