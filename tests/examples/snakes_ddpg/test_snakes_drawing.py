"""What pictures of a game show, looked up pixel by pixel and character by character."""

import re

import numpy as np
import pytest
from PIL import Image
from snakes import drawing
from snakes.drawing import Frame, render, snap, write_gif, write_strip
from snakes.game import DOWN, LEFT, RIGHT, UP, Game

pytestmark = pytest.mark.storm  # it plays, and compiles what it plays with

COLOURS = [(72, 160, 255), (38, 214, 214), (92, 208, 108), (240, 72, 80), (255, 146, 44), (255, 112, 160)]
BEAN, EYE = (255, 236, 160), (255, 255, 255)
FREE = {(28, 33, 44), (34, 40, 54)}
SIZE, LEFT_EDGE, TOP = 24, 12, 48  # of a cell in a GIF's frame, and where its board begins

# Snake 1 runs over the right border, 3 over the lower one; 2 has respawned in a row with its head in the middle;
# 4 has a head that looks into its neck across the border; 6 found no place
FRAME = Frame(
    bodies=[[41, 40, 59, 58], [5, 6, 4], [188, 8, 28], [120, 139, 138], [95, 115, 135], []],
    headings=[RIGHT, LEFT, UP, LEFT, UP, DOWN],
    beans=[0, 77, 199],
    scores=(12, 3),
    step=50,
)


@pytest.fixture(scope="module")
def frames() -> list[Frame]:
    """A game that random moves play on one board, with long snakes put in at its start."""
    game, rng = Game(1, seed=4), np.random.default_rng(4)
    game.put(0, [*FRAME.bodies[:5], [150, 170, 190, 10, 11, 12, 13]], [*FRAME.headings[:5], UP], FRAME.beans)
    frames = [snap(game)]
    while not game.done[0]:
        game.step(rng.integers(0, 4, (1, 6), dtype=np.uint8))
        frames.append(snap(game))
    return frames


def middles(cell: int, other: int) -> list[tuple[float, float]]:
    """Row and column of the points where two cells touch, one on either side of a border; none if they do not touch."""
    (r, c), (s, d) = divmod(cell, 20), divmod(other, 20)
    if r == s and abs(c - d) in (1, 19):
        return [(r, c + 0.45 if (d - c) % 20 == 1 else c - 0.45), (r, d - 0.45 if (d - c) % 20 == 1 else d + 0.45)]
    if c == d and abs(r - s) in (1, 9):
        return [(r + 0.45 if (s - r) % 10 == 1 else r - 0.45, c), (s - 0.45 if (s - r) % 10 == 1 else s + 0.45, c)]
    return []


def check_board(image: Image.Image, left: int, top: int, frame: Frame) -> None:
    """That an image of a board has every cell's right colour, links between segments that touch, and eyes."""

    def at(row: float, column: float) -> tuple[int, ...]:
        return image.getpixel((int(left + (column + 0.5) * SIZE), int(top + (row + 0.5) * SIZE)))

    seen = {}
    for s, body in enumerate(frame.bodies):
        for i, cell in enumerate(body):
            seen[cell] = COLOURS[s]
            for point in middles(cell, body[i + 1]) if i + 1 < len(body) else []:
                assert at(*point) == COLOURS[s], (s, cell, point)
        for head in body[:1]:
            row, column = divmod(head, 20)
            y, x = {UP: (-1, 0), DOWN: (1, 0), LEFT: (0, -1), RIGHT: (0, 1)}[frame.headings[s]]
            for side in (-0.2, 0.2):  # left and right of the heading; behind the pupil there is white
                assert min(at(row + 0.1 * y + side * x, column + 0.1 * x + side * y)) > 170
            assert at(row - 0.3 * y, column - 0.3 * x) == COLOURS[s]  # no eyes behind
    seen |= dict.fromkeys(frame.beans, BEAN)
    for cell in range(200):
        colour = at(*divmod(cell, 20))
        assert colour == seen[cell] if cell in seen else colour in FREE, (cell, colour)


def test_a_frame_stays_as_it_was_when_the_game_goes_on():
    game = Game(2, seed=1)
    game.put(1, [*FRAME.bodies[:5], [150, 170, 190, 191, 192]], FRAME.headings, FRAME.beans, time=50)
    frame = snap(game, 1)
    assert frame == Frame(
        [*FRAME.bodies[:5], [150, 170, 190, 191, 192]], FRAME.headings, FRAME.beans, scores=(1, 2), step=50
    )
    before = repr(frame)
    for _ in range(20):
        game.step(np.full((2, 6), RIGHT, np.uint8))
    assert repr(frame) == before


def test_plain_text_shows_digits_arrows_and_beans():
    assert render(FRAME, ("flood", "greedy"), colours=False).split("\n") == [
        "123 flood 12 : 3 greedy 456, step 50",
        "+----------------------------------------+",
        "|() . . .222<22 .33 . . . . . . . . . . .|",
        "| . . . . . . . .33 . . . . . . . . . . .|",
        "|111> . . . . . . . . . . . . . . . .1111|",
        "| . . . . . . . . . . . . . . . . .() . .|",
        "| . . . . . . . . . . . . . . .5^ . . . .|",
        "| . . . . . . . . . . . . . . .55 . . . .|",
        "|4< . . . . . . . . . . . . . .55 . .4444|",
        "| . . . . . . . . . . . . . . . . . . . .|",
        "| . . . . . . . . . . . . . . . . . . . .|",
        "| . . . . . . . .3^ . . . . . . . . . .()|",
        "+----------------------------------------+",
    ]


def test_coloured_text_shows_bodies_that_cross_the_border_in_its_frame():
    title, *lines = render(FRAME, ("flood", "greedy"), colours=True).split("\n")
    assert re.sub(r"\x1b\[[\d;]*m", "", title) == "flood 12 : 3 greedy, step 50"
    cells = [re.findall(r"\x1b\[48;5;(\d+)m(?:\x1b\[1;38;5;\d+m)?([^\x1b]{2})", line) for line in lines]
    assert [len(row) for row in cells] == [22] * 12
    assert all(line.endswith("\x1b[0m") for line in lines)

    board, frame = ("235", "  "), ("239", "  ")
    expected = [[frame] * 22, *([frame, *[board] * 20, frame] for _ in range(10)), [frame] * 22]
    bodies, heads = ("32", "37", "71", "160", "172"), ("75", "80", "120", "203", "215")
    for s, eyes in enumerate((" :", ": ", "''", ": ", "''")):
        for i, cell in enumerate(FRAME.bodies[s]):
            expected[cell // 20 + 1][cell % 20 + 1] = (bodies[s], "  ") if i else (heads[s], eyes)
    for cell in FRAME.beans:
        expected[cell // 20 + 1][cell % 20 + 1] = ("235", "()")
    for row, column, s in ((3, 0, 0), (3, 21, 0), (0, 9, 2), (11, 9, 2), (7, 0, 3), (7, 21, 3)):
        expected[row][column] = (bodies[s], "  ")
    assert cells == expected


@pytest.mark.parametrize(
    ("terminal", "variables", "coloured"),
    [
        (True, {}, True),
        (True, {"NO_COLOR": ""}, True),  # only a value counts
        (True, {"NO_COLOR": "1"}, False),
        (True, {"TERM": "dumb"}, False),
        (False, {}, False),
    ],
)
def test_colours_go_to_terminals_that_want_them(monkeypatch, terminal, variables, coloured):
    monkeypatch.setattr(drawing.sys.stdout, "isatty", lambda: terminal)
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.setenv(name, variables[name]) if name in variables else monkeypatch.delenv(name, raising=False)
    assert ("\x1b" in render(FRAME)) is coloured


def test_a_gif_shows_every_step_of_a_game(frames, tmp_path):
    write_gif(frames, tmp_path / "game.gif", ("flood", "greedy"), fps=10)
    assert (tmp_path / "game.gif").stat().st_size < 2_000_000
    with Image.open(tmp_path / "game.gif") as gif:
        assert gif.n_frames == len(frames) == 201
        assert gif.info["loop"] == 0
        for i, frame in enumerate(frames):
            gif.seek(i)
            assert gif.info["duration"] == (2000 if i == 200 else 100)
            check_board(gif.convert("RGB"), LEFT_EDGE, TOP, frame)


def test_a_frame_of_a_gif_shows_wraps_gaps_and_a_snake_without_place(tmp_path):
    end = FRAME._replace(step=200)
    write_gif([FRAME, end], tmp_path / "game.gif")
    with Image.open(tmp_path / "game.gif") as gif:
        image = gif.convert("RGB")
    check_board(image, LEFT_EDGE, TOP, FRAME)
    assert len(image.getcolors()) > 40  # edges are smooth
    assert image.getpixel((LEFT_EDGE, TOP + 2 * SIZE + 12)) == COLOURS[0]  # out to the border, and in again
    assert image.getpixel((LEFT_EDGE + 20 * SIZE - 1, TOP + 2 * SIZE + 12)) == COLOURS[0]
    assert image.getpixel((LEFT_EDGE - 1, TOP + 2 * SIZE + 12)) not in COLOURS
    gap = [image.getpixel((LEFT_EDGE + 6 * SIZE, TOP + y)) for y in range(SIZE)]
    assert COLOURS[1] in gap  # head and neck
    assert COLOURS[1] not in [image.getpixel((LEFT_EDGE + 5 * SIZE, TOP + y)) for y in range(SIZE)]  # head and tail


def test_the_header_shows_teams_scores_and_the_share_of_the_game(tmp_path):
    frames = [FRAME, FRAME._replace(scores=(12, 4), step=100), FRAME._replace(step=200)]
    write_gif(frames, tmp_path / "game.gif", ("flood", "greedy"))
    pictures = []
    with Image.open(tmp_path / "game.gif") as gif:
        for i in range(3):
            gif.seek(i)
            pictures.append(np.array(gif.convert("RGB")))
    for picture, share in zip(pictures, (0.25, 0.5, 1), strict=True):
        bar = (picture[42, LEFT_EDGE : LEFT_EDGE + 480] > 150).all(1)
        assert bar.sum() == pytest.approx(480 * share, abs=1)
        assert bar[: int(480 * share)].all()
    header = pictures[0][:38]
    for team, half in ((COLOURS[:3], header[:, :150]), (COLOURS[3:], header[:, -150:])):
        assert all((half == colour).all(2).any() for colour in team)
    changed = np.argwhere((pictures[0][:38] != pictures[1][:38]).any(2))
    assert len(changed) and changed[:, 1].min() > 252 and changed[:, 1].max() < 300  # B's score alone


def test_a_strip_shows_six_moments_from_first_to_last(frames, tmp_path):
    write_strip(frames, tmp_path / "strip.png", ("flood", "greedy"))
    with Image.open(tmp_path / "strip.png") as image:
        image.load()
        assert image.format == "PNG" and image.mode == "RGB"
    for i, step in enumerate((0, 40, 80, 120, 160, 200)):
        check_board(image, 12 + i % 3 * (480 + 12), 48 + i // 3 * (240 + 48), frames[step])


@pytest.mark.parametrize("name", ["rl_trainer/runs/snakes_3v3/run1/trained_model/actor_6250.pth", "W" * 20])
def test_long_names_leave_room_for_the_score(tmp_path, name):
    headers = []
    for names in ((name, name), ("", "")):
        write_gif([FRAME._replace(scores=(100, 100))], tmp_path / "game.gif", names)
        with Image.open(tmp_path / "game.gif") as image:
            headers.append(np.array(image.convert("RGB"))[:40])
    changed = np.argwhere((headers[0] != headers[1]).any(2))[:, 1]
    scores = np.argwhere((headers[1][:, 150:-150] > 100).any(2))[:, 1] + 150
    assert len(changed) and not ((scores.min() - 4 < changed) & (changed < scores.max() + 4)).any()
