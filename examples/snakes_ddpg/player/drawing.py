"""Draw a game, in the terminal and as an animated GIF, from frames: a frame is one moment of one board."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from PIL import Image, ImageDraw, ImageFont
from snakes.game import CELLS, COLUMNS, NONE, ROWS, Game

SNAKE = ("#48a0ff", "#26d6d6", "#5cd06c", "#f04850", "#ff922c", "#ff70a0")  # team A is blue and green
CODES = (75, 80, 120, 203, 215, 211)  # the same in a terminal of 256 colours
BOARD = "#1c212c"
BEAN = "#ffeca0"
TEXT = "#e8e8e8"
SIZE = 24  # of a cell, in pixels
ARROWS = "^v<>"  # by heading


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
    """Render a frame as 13 lines of text, two columns to a cell; `colours` are a terminal's 256.

    Snakes are the digits 1 to 6, a head has an arrow along its heading, and a bean is `()`.
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
    """Draw the names and scores, and the board below them: a square for each cell, with an eye for a head."""
    image = Image.new("RGB", (COLUMNS * SIZE, (ROWS + 1) * SIZE), BOARD)
    draw = ImageDraw.Draw(image)
    font = ImageFont.load_default(0.6 * SIZE)
    draw.text((image.width / 2, SIZE / 2), f"{_title(frame, names)}, step {frame.step}", TEXT, font, "mm")
    for cell in frame.beans:
        draw.ellipse(_box(cell, SIZE // 4), BEAN)
    for body, colour in zip(frame.bodies, SNAKE, strict=True):
        for cell in body:
            draw.rectangle(_box(cell, 1), colour)
        for head in body[:1]:
            draw.ellipse(_box(head, SIZE // 3), "black")
    return image


def _box(cell: int, margin: int) -> tuple[int, int, int, int]:
    """Find the corners of a cell in the picture, less a margin."""
    x, y = cell % COLUMNS * SIZE, (cell // COLUMNS + 1) * SIZE
    return x + margin, y + margin, x + SIZE - 1 - margin, y + SIZE - 1 - margin
