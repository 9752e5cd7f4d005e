"""Draw a game, in the terminal and as an animated GIF, from frames: a frame is one moment of one board."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from PIL import Image, ImageDraw, ImageFont

from .game import CELLS, COLUMNS, NEXT, NONE, ROWS, Game

SNAKE = ("#48a0ff", "#26d6d6", "#5cd06c", "#f04850", "#ff922c", "#ff70a0")  # team A is blue and green
CODES = (75, 80, 120, 203, 215, 211)  # the same in a terminal of 256 colours
BOARD = "#1c212c"
BEAN = "#ffeca0"
TEXT = "#e8e8e8"
EYE = "#000000"
SIZE = 24  # of a cell, in pixels
ARROWS = "^v<>"  # by heading
WAY = ((0, -1), (0, 1), (-1, 0), (1, 0))  # x and y, by heading


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
    return Frame(game.bodies(b), game.boards.headings[b].tolist(), beans, scores, int(game.boards.times[b]))


def render(frame: Frame, names: Sequence[str] = ("A", "B"), *, colours: bool = False) -> str:
    """Render a frame as 13 lines of text, two columns to a cell.

    Snakes are the digits 1 to 6, a head has an arrow along its heading, and a bean is `()`.

    Args:
        frame: The moment to show.
        names: Of team A and team B.
        colours: Use the terminal's 256 colours.
    """
    text = [" ."] * CELLS
    for cell in frame.beans:
        text[cell] = "()"
    for s, body in enumerate(frame.bodies):
        for i, cell in enumerate(body):
            mark = s + 1 if i else ARROWS[frame.headings[s]]
            text[cell] = f"{s + 1}{mark}"
            if colours:
                text[cell] = f"\x1b[38;5;16;48;5;{CODES[s]}m{text[cell]}\x1b[0m"
    edge = f"+{'-' * 2 * COLUMNS}+"
    rows = ["|" + "".join(text[i : i + COLUMNS]) + "|" for i in range(0, CELLS, COLUMNS)]
    return "\n".join([f"123 {_title(frame, names)} 456, step {frame.step}", edge, *rows, edge])


def write_gif(frames: Sequence[Frame], path: Path, names: Sequence[str] = ("A", "B"), *, fps: float = 12) -> None:
    """Write an animated GIF, one picture per frame of a game; it holds the last for two seconds and starts again."""
    first, *others = [_picture(frame, names) for frame in frames]
    durations = [round(1000 / fps)] * len(others) + [2000]
    first.save(path, save_all=True, append_images=others, duration=durations, loop=0, format="GIF")


def _title(frame: Frame, names: Sequence[str]) -> str:
    return "{0} {2} : {3} {1}".format(*names, *frame.scores)


def _picture(frame: Frame, names: Sequence[str]) -> Image.Image:
    """Draw the names and scores, and the board below them."""
    image = Image.new("RGB", (COLUMNS * SIZE, (ROWS + 1) * SIZE), BOARD)
    draw = ImageDraw.Draw(image)
    font = ImageFont.load_default(0.6 * SIZE)
    draw.text((image.width / 2, SIZE / 2), f"{_title(frame, names)}, step {frame.step}", TEXT, font, "mm")
    for cell in frame.beans:
        _disc(draw, _centre(cell), 0.25, BEAN)
    for body, heading, colour in zip(frame.bodies, frame.headings, SNAKE, strict=True):
        for cell in body:
            _disc(draw, _centre(cell), 0.35, colour)
        for cell, after in pairwise(body):
            around = NEXT[cell].tolist()
            if after in around:  # a body that has come back may have a gap
                _link(draw, cell, around.index(after), colour)
                _link(draw, after, NEXT[after].tolist().index(cell), colour)
        for head in body[:1]:
            x, y = _centre(head)
            dx, dy = WAY[heading]
            _disc(draw, (x, y), 0.45, colour)
            _disc(draw, (x + dx * SIZE / 5, y + dy * SIZE / 5), 0.15, EYE)
    return image


def _centre(cell: int) -> tuple[float, float]:
    return (cell % COLUMNS + 0.5) * SIZE, (cell // COLUMNS + 1.5) * SIZE


def _disc(draw: ImageDraw.ImageDraw, centre: tuple[float, float], radius: float, colour: str) -> None:
    x, y = centre
    radius *= SIZE
    draw.ellipse((x - radius, y - radius, x + radius, y + radius), colour)


def _link(draw: ImageDraw.ImageDraw, cell: int, direction: int, colour: str) -> None:
    """Draw a segment's half of a link, to the edge of its cell: across the border, both halves leave the picture."""
    x, y = _centre(cell)
    dx, dy = WAY[direction]
    draw.line((x, y, x + dx * SIZE / 2, y + dy * SIZE / 2), colour, round(0.6 * SIZE))
