"""Draw pictures of a game: in the terminal, as an animated GIF, and as a PNG of a few moments for a README.

All three are made of frames. A frame is one moment of one board; `snap` takes it, and it stays as
it is when the game goes on. Team A is blue and green, team B red and orange, in every picture.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from .game import CELLS, COLUMNS, NEXT, NONE, OPPOSITE, ROWS, Game

Colour = tuple[int, int, int]

# One colour per snake, and those of all else in a picture
SNAKE = ((72, 160, 255), (38, 214, 214), (92, 208, 108), (240, 72, 80), (255, 146, 44), (255, 112, 160))
BOARD = (28, 33, 44)
SQUARE = (34, 40, 54)
AROUND = (14, 17, 24)
BEAN = (255, 236, 160)
TEXT = (232, 232, 232)
EYE = (255, 255, 255)
FINE = 4  # pictures are drawn this many times as large, then reduced: smooth edges
SIZE = 24 * FINE  # of a cell, before that

# The same in a terminal of 256 colours
BODY_CODES = (32, 37, 71, 160, 172, 168)
HEAD_CODES = (75, 80, 120, 203, 215, 211)
BOARD_CODE = 235
FRAME_CODE = 239
BEAN_CODE = 229
EYE_CODE = 16

# By heading: up, down, left, right
EYES = ("''", "..", ": ", " :")
ARROWS = "^v<>"
WAY = ((0, -1), (0, 1), (-1, 0), (1, 0))  # x, y


class Frame(NamedTuple):
    """Hold one moment of one board."""

    bodies: list[list[int]]  # cells of each of the six snakes, head first
    headings: list[int]
    beans: list[int]  # cells
    scores: tuple[int, int]  # of team A and team B
    step: int


def snap(game: Game, b: int = 0) -> Frame:
    """Take the picture of a board as it is now."""
    beans = [cell for cell in game.boards.beans[b].tolist() if cell != NONE]
    scores = tuple(game.scores()[b].tolist())
    step = int(game.boards.times[b])
    return Frame(game.bodies(b), game.boards.headings[b].tolist(), beans, scores, step)


def _links(body: Sequence[int]) -> list[tuple[int, int, int]]:
    """List cell, next cell and the direction between them, for segments that touch: a respawned body may have a gap."""
    pairs = ((cell, after, NEXT[cell].tolist()) for cell, after in pairwise(body))
    return [(cell, after, around.index(after)) for cell, after, around in pairs if after in around]


# In the terminal


def has_colours() -> bool:
    """Tell if standard output is a terminal that wants colours, see https://no-color.org."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def render(frame: Frame, names: Sequence[str] = ("A", "B"), *, colours: bool | None = None) -> str:
    """Render a frame as 13 lines of text, two columns to a cell.

    Args:
        frame: The moment to show.
        names: Of team A and team B.
        colours: Use the terminal's 256 colours. Without, snakes are the digits 1 to 6, a head has
            an arrow along its heading, and a bean is `()`. By default `has_colours()`.
    """
    if colours is None:
        colours = has_colours()
    return _render_colours(frame, names) if colours else _render(frame, names)


def _render(frame: Frame, names: Sequence[str]) -> str:
    text = [" ."] * CELLS
    for cell in frame.beans:
        text[cell] = "()"
    for s, body in enumerate(frame.bodies):
        for i, cell in enumerate(body):
            mark = s + 1 if i else ARROWS[frame.headings[s]]
            text[cell] = f"{s + 1}{mark}"
    edge = f"+{'-' * 2 * COLUMNS}+"
    rows = ["|" + "".join(text[i : i + COLUMNS]) + "|" for i in range(0, CELLS, COLUMNS)]
    a, b = names
    score_a, score_b = frame.scores
    return "\n".join([f"123 {a} {score_a} : {score_b} {b} 456, step {frame.step}", edge, *rows, edge])


def _render_colours(frame: Frame, names: Sequence[str]) -> str:
    # one cell more on each side: a body that crosses the border colours the frame where it leaves
    # and where it enters
    colour = np.full((ROWS + 2, COLUMNS + 2), FRAME_CODE)
    colour[1:-1, 1:-1] = BOARD_CODE
    text = np.full(colour.shape, "  ", object)
    for cell in frame.beans:
        text[_place(cell)] = f"\x1b[1;38;5;{BEAN_CODE}m()"
    for s, body in enumerate(frame.bodies):
        for cell, after, direction in _links(body):
            colour[_place(cell, direction)] = BODY_CODES[s]
            colour[_place(after, OPPOSITE[direction])] = BODY_CODES[s]
        for cell in body:
            colour[_place(cell)] = BODY_CODES[s]
        for cell in body[:1]:
            colour[_place(cell)] = HEAD_CODES[s]
            text[_place(cell)] = f"\x1b[1;38;5;{EYE_CODE}m{EYES[frame.headings[s]]}"
    a, b = names
    score_a, score_b = frame.scores
    title_a = f"\x1b[1;38;5;{HEAD_CODES[0]}m{a} {score_a}\x1b[0m"
    title_b = f"\x1b[1;38;5;{HEAD_CODES[3]}m{score_b} {b}\x1b[0m"
    lines = [f"{title_a} : {title_b}, step {frame.step}"]
    for colours, texts in zip(colour, text, strict=True):
        cells = [f"\x1b[48;5;{code}m{cell}" for code, cell in zip(colours, texts, strict=True)]
        lines.append("".join(cells) + "\x1b[0m")
    return "\n".join(lines)


def _place(cell: int, direction: int | None = None) -> tuple[int, int]:
    """Find row and column of a cell, or of the one next to it, in a grid with one more on each side."""
    x, y = (0, 0) if direction is None else WAY[direction]
    return cell // COLUMNS + 1 + y, cell % COLUMNS + 1 + x


# As pictures


def _disc(draw: ImageDraw.ImageDraw, x: float, y: float, radius: float, colour: Colour) -> None:
    draw.ellipse((x - radius, y - radius, x + radius, y + radius), colour)


@cache
def _empty_board() -> Image.Image:
    image = Image.new("RGB", (COLUMNS * SIZE, ROWS * SIZE), BOARD)
    draw = ImageDraw.Draw(image)
    for cell in range(CELLS):
        y, x = divmod(cell, COLUMNS)
        if (x + y) % 2:
            draw.rectangle((x * SIZE, y * SIZE, (x + 1) * SIZE - 1, (y + 1) * SIZE - 1), SQUARE)
    return image


def _draw_board(frame: Frame) -> Image.Image:
    image = _empty_board().copy()
    draw = ImageDraw.Draw(image)
    for cell in frame.beans:
        _disc(draw, *_centre(cell), 0.24 * SIZE, BEAN)
    for body, heading, colour in zip(frame.bodies, frame.headings, SNAKE, strict=True):
        _draw_body(draw, body, colour)
        for head in body[:1]:
            _draw_head(draw, head, heading, colour)
    return image


def _centre(cell: int) -> tuple[float, float]:
    return (cell % COLUMNS + 0.5) * SIZE, (cell // COLUMNS + 0.5) * SIZE


def _draw_body(draw: ImageDraw.ImageDraw, body: Sequence[int], colour: Colour) -> None:
    """Draw a body, thinner towards the tail; across the border both ends of a link run out of the picture."""
    radius = dict(zip(body, np.linspace(0.40, 0.24, len(body)) * SIZE, strict=True))
    for cell in body:
        _disc(draw, *_centre(cell), radius[cell], colour)
    for cell, after, direction in _links(body):
        for one, other, sign in ((cell, after, 1), (after, cell, -1)):
            x, y = _centre(one)
            dx, dy = (sign * step for step in WAY[direction])
            ends = ((x, y, radius[one]), (x + dx * SIZE, y + dy * SIZE, -radius[other]))
            draw.polygon([(u + side * r * dy, v - side * r * dx) for u, v, r in ends for side in (-1, 1)], colour)


def _draw_head(draw: ImageDraw.ImageDraw, cell: int, heading: int, colour: Colour) -> None:
    """Draw a head, whose eyes look along the heading."""
    x, y = _centre(cell)
    dx, dy = WAY[heading]
    _disc(draw, x, y, 0.46 * SIZE, colour)
    for side in (-0.2, 0.2):
        eye_x = x + (0.16 * dx + side * dy) * SIZE
        eye_y = y + (0.16 * dy + side * dx) * SIZE
        _disc(draw, eye_x, eye_y, 0.15 * SIZE, EYE)
        _disc(draw, eye_x + 0.06 * dx * SIZE, eye_y + 0.06 * dy * SIZE, 0.08 * SIZE, AROUND)


def _draw_header(draw: ImageDraw.ImageDraw, width: int, unit: int, frame: Frame, names: Sequence[str]) -> None:
    """Draw both teams' colours and names from the sides, the score in the middle; 1.6 units high."""
    y = 0.95 * unit
    font = ImageFont.load_default(0.72 * unit)
    for team, side, anchors in ((0, -1, "lr"), (1, 1, "rl")):
        name = names[team]
        edge = width / 2 + side * (width / 2 - 0.5 * unit)
        while font.getlength(name) > width / 2 - 5.2 * unit:  # the end of a model's path tells most
            name = "…" + name[2:]
        for s in range(3):
            _disc(draw, edge - side * (0.3 + 0.65 * s) * unit, y, 0.25 * unit, SNAKE[3 * team + s])
        draw.text((edge - side * 2.2 * unit, y), name, TEXT, font, anchors[0] + "m")
        _write(draw, width / 2 + side * 0.35 * unit, y, str(frame.scores[team]), unit, SNAKE[3 * team], anchors[1])
    _write(draw, width / 2, y, ":", unit, TEXT, "m")


def _write(draw: ImageDraw.ImageDraw, x: float, y: float, text: str, size: float, colour: Colour, anchor: str) -> None:
    draw.text((x, y), text, colour, ImageFont.load_default(size), anchor + "m")


def _palette() -> Image.Image:
    """Make a palette of every colour in use and its blends with what it lies on, for all frames."""
    pairs = [(colour, SQUARE) for colour in (*SNAKE, BEAN)]
    pairs += [(colour, AROUND) for colour in (*SNAKE, TEXT, EYE)]
    colours = [*SNAKE, BOARD, SQUARE, AROUND, BEAN, TEXT, EYE]
    for pair in pairs:
        for part in (1, 2, 3):
            blend = np.average(pair, 0, (part, 4 - part))
            colours.append(blend.round().astype(int))
    image = Image.new("P", (1, 1))
    image.putpalette(np.vstack(colours).ravel().tolist())
    return image


def _picture(frame: Frame, names: Sequence[str], last: int) -> Image.Image:
    """Draw the board; above it names, scores, and a bar for the share of `last` steps that are played."""
    board = _draw_board(frame)
    edge = SIZE // 2
    top = 2 * SIZE
    image = Image.new("RGB", (board.width + 2 * edge, board.height + top + edge), AROUND)
    image.paste(board, (edge, top))
    draw = ImageDraw.Draw(image)
    _draw_header(draw, image.width, SIZE, frame, names)
    for width, colour in ((board.width, SQUARE), (board.width * frame.step // max(last, 1), TEXT)):
        draw.rectangle((edge, 1.68 * SIZE, edge + width, 1.8 * SIZE), colour)
    return image.reduce(FINE)


def write_gif(frames: Sequence[Frame], path: str | Path, names: Sequence[str] = ("A", "B"), *, fps: float = 12) -> None:
    """Write an animated GIF, one picture per frame; it holds the last for two seconds and starts again.

    Args:
        frames: Of one game, in order.
        path: Of the file.
        names: Of team A and team B.
        fps: Frames per second.
    """
    palette = _palette()
    pictures = [
        _picture(frame, names, frames[-1].step).quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames
    ]
    durations = [round(1000 / fps)] * (len(frames) - 1) + [2000]
    pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=durations, loop=0, format="GIF")


def write_strip(frames: Sequence[Frame], path: str | Path, names: Sequence[str] = ("A", "B")) -> None:
    """Write a PNG of six moments of a game, evenly spread from its first frame to its last, in two rows.

    Args:
        frames: Of one game, in order.
        path: Of the file.
        names: Of team A and team B.
    """
    across = 3
    down = 2
    gap = SIZE // 2
    top = 2 * SIZE
    width = COLUMNS * SIZE + gap
    height = ROWS * SIZE + top
    image = Image.new("RGB", (across * width + gap, top + down * height), AROUND)
    draw = ImageDraw.Draw(image)
    _draw_header(draw, image.width, round(1.2 * SIZE), frames[-1], names)
    for i, at in enumerate(np.linspace(0, len(frames) - 1, across * down).round().astype(int)):
        x = gap + i % across * width
        y = top + i // across * height
        frame = frames[at]
        image.paste(_draw_board(frame), (x, y))
        texts = (x, f"step {frame.step}", "l"), (x + width - gap, "{} : {}".format(*frame.scores), "r")
        for edge, text, anchor in texts:
            _write(draw, edge, y + height - 1.2 * SIZE, text, 0.9 * SIZE, TEXT, anchor)
    image.reduce(FINE).save(path, format="PNG")


class Table(NamedTuple):
    """Hold a league of n players, the best first."""

    names: list[str]
    ratings: np.ndarray  # (n,) Elo
    errors: np.ndarray  # (n,) their standard errors
    rates: np.ndarray  # (n, n) win rates of the player of a row against that of a column


def write_league(table: Table, path: Path) -> None:
    """Draw a league: Elo as bars with their errors, and beside each the win rates against the others."""
    from matplotlib.figure import Figure  # which takes a second to import, for this alone

    count = len(table.names)
    figure = Figure(figsize=(4 + 0.7 * count, 1.2 + 0.45 * count), layout="constrained")
    bars, cells = figure.subplots(1, 2, width_ratios=[3, 0.7 * count])
    places = np.arange(count)
    bars.barh(places, table.ratings, xerr=table.errors, color="#4878a8", ecolor="black", capsize=3)
    bars.set_yticks(places, table.names)
    bars.set_ylim(count - 0.5, -0.5)
    bars.set_xlim(left=min(0, 1.1 * float(table.ratings.min())))
    bars.set_xlabel("Elo, with its standard error")
    shown = np.ma.masked_array(table.rates, mask=np.eye(count, dtype=bool))
    cells.imshow(shown, cmap="RdYlGn", vmin=0, vmax=1, aspect="auto")
    cells.set_yticks([])
    cells.set_xticks(places, table.names, rotation=30, ha="right")
    cells.set_xlabel("win rate of the row against the column")
    for row in range(count):
        for column in range(count):
            if row != column:
                cells.text(column, row, f"{table.rates[row, column]:.2f}", ha="center", va="center", fontsize=8)
    figure.savefig(path, dpi=150)
