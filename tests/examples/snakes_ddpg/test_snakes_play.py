"""play.py as its users run it: what it prints, draws and refuses."""

import contextlib
import os
import pty
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import play
import processes
import pytest
from PIL import Image
from player.drawing import Frame, render, write_gif
from shared.program import UserError
from snakes.evaluation import play_games
from snakes.game import DOWN, LEFT, RIGHT, UP
from snakes.opponents import OPPONENTS, get

pytestmark = pytest.mark.storm  # the first time, compiling the players takes half a minute

FOLDER = Path(play.__file__).parent
ENVIRONMENT = {**os.environ, "PYTHONWARNINGS": "error"}
COLOURS = [(72, 160, 255), (38, 214, 214), (92, 208, 108), (240, 72, 80), (255, 146, 44), (255, 112, 160)]
SIZE = 24  # of a cell in a GIF

# Snake 1 runs over the right border, 3 over the lower one; 2 has respawned in a row with its head in the middle;
# 4 has a head that looks into its neck across the border; 6 found no place
FRAME = Frame(
    bodies=[[41, 40, 59, 58], [5, 6, 4], [188, 8, 28], [120, 139, 138], [95, 115, 135], []],
    headings=[RIGHT, LEFT, UP, LEFT, UP, DOWN],
    beans=[0, 77, 199],
    scores=(12, 3),
    step=50,
)


def call(monkeypatch, *arguments: object) -> None:
    """Run it in this process."""
    monkeypatch.setattr(sys, "argv", ["play.py", *map(str, arguments)])
    play.main(play.read_settings())


def test_two_players_meet_and_a_game_becomes_a_picture(tmp_path):
    command = [sys.executable, "play.py", "greedy", "2", "--games=30", "--seed=3", "--fps=25"]
    command.append(f"--gif={tmp_path / 'game.gif'}")
    done = subprocess.run(command, cwd=FOLDER, env=ENVIRONMENT, capture_output=True, encoding="utf-8", timeout=600)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"greedy against 2: {play_games(get('greedy'), get(2), 30, seed=3)}\n"
    with Image.open(tmp_path / "game.gif") as image:
        assert (image.format, image.n_frames, image.info["duration"], image.info["loop"]) == ("GIF", 201, 40, 0)


def test_a_player_meets_each_of_several_others(monkeypatch, capsys):
    call(monkeypatch, "random", "greedy", "1", "--games", 141, "--seed", 5)
    met = {"greedy": get("greedy"), "1": get(1)}
    wanted = [f"random against {name}: {play_games(get('random'), other, 141, seed=5)}" for name, other in met.items()]
    assert capsys.readouterr().out.splitlines() == wanted


def test_text_shows_digits_arrows_and_beans_and_colours_where_asked_for():
    plain = render(FRAME, ("flood", "greedy"))
    assert plain.split("\n") == [
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
    coloured = render(FRAME, ("flood", "greedy"), colours=True)
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == plain
    assert "\x1b[38;5;16;48;5;75m11\x1b[0m\x1b[38;5;16;48;5;75m1>" in coloured


def test_a_gif_shows_bodies_heads_beans_and_a_snake_without_place(tmp_path):
    write_gif([FRAME, FRAME._replace(step=200, beans=[])], tmp_path / "game.gif", ("flood", "greedy"))
    with Image.open(tmp_path / "game.gif") as gif:
        assert gif.n_frames == 2 and gif.info["duration"] == 80
        image = gif.convert("RGB")

    def at(row: float, column: float) -> tuple[int, ...]:
        return image.getpixel((int((column + 0.5) * SIZE), int((row + 1.5) * SIZE)))

    for s, body in enumerate(FRAME.bodies):
        for cell in body[1:]:
            assert at(*divmod(cell, 20)) == COLOURS[s]
        for row, column in (divmod(head, 20) for head in body[:1]):
            assert at(row, column) == (0, 0, 0) and at(row, column + 0.4) == COLOURS[s]
    for bean in FRAME.beans:
        assert at(*divmod(bean, 20)) == (255, 236, 160)
    assert at(5, 3) == at(0, 4.5) == (28, 33, 44)


def test_the_game_to_watch_is_the_first_that_is_counted(monkeypatch, capsys):
    call(monkeypatch, "greedy", "random", "--games", 1, "--watch", "--seed", 8)
    *boards, counted = capsys.readouterr().out.strip().split("\n\n")
    last, _, result = counted.rpartition("\n")
    assert len(boards) == 200
    assert boards[0].startswith("123 greedy 0 : 0 random 456, step 0\n+")
    a, b = re.search(r"score (\S+) : (\S+)$", result).groups()
    assert last.startswith(f"123 greedy {float(a):.0f} : {float(b):.0f} random 456, step 200\n")


def test_ctrl_c_ends_watching_without_a_traceback():
    terminal, other_end = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "play.py", "greedy", "--watch", "--fps=4"],
        cwd=FOLDER,
        env=ENVIRONMENT,
        stdout=other_end,
        stderr=subprocess.PIPE,
    )
    os.close(other_end)
    try:
        shown = b""
        while b"step 1\r" not in shown:
            shown += os.read(terminal, 65536)
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):  # the other end is closed
            while True:  # a terminal that nobody reads keeps who writes to it waiting
                shown += os.read(terminal, 65536)
        _, errors = process.communicate(timeout=300)
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
    assert (process.returncode, errors) == (130, b"play.py: interrupted\n")
    assert b"48;5;75m" in shown
    assert b"\x1b[?25h" in shown, "the cursor comes back"


def watch_unread() -> None:
    """Show a game to a reader that has left."""
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, sys.stdout.fileno())
    sys.path.insert(0, str(FOLDER))
    sys.argv = ["play.py", "greedy", "random", "--games=0", "--watch"]
    runpy.run_path(play.__file__, run_name="__main__")


def test_a_reader_that_leaves_ends_it_without_a_word():
    (process,) = processes.run(watch_unread, [{}])
    assert (process.code, process.output) == (-signal.SIGPIPE, "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["unknown"], f"there is no .*unknown; .*players are: {', '.join(OPPONENTS)}"),
        (["run3", "--runs_folder=nowhere"], "there is no nowhere/run3_"),
        ([__file__], "test_snakes_play.py is no file of weights"),
        (["greedy", "9"], "difficulty from 0 to 4"),
        (["greedy", "--games=0"], "--games 0 counts nothing"),
        (["greedy", "--games=-1"], "--games is at least 0"),
        (["greedy", "--fps=0"], "--fps above 0"),
        (["greedy", "--gif=nowhere/game.gif"], "cannot write nowhere/game.gif: there is no folder nowhere"),
        (["greedy", "--games=0", "--gif=."], "cannot write: "),
        ([], "the following arguments are required: player"),
    ],
)
def test_bad_input_is_refused(monkeypatch, arguments, message):
    with pytest.raises(UserError, match=message):
        call(monkeypatch, *arguments)
