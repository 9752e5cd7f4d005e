"""play.py as its users run it: what it prints, writes and refuses."""

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
from snakes.evaluation import play_games
from snakes.opponents import OPPONENTS, get

pytestmark = pytest.mark.storm  # the first time, compiling the players takes half a minute

FOLDER = Path(play.__file__).parent
ENVIRONMENT = {**os.environ, "PYTHONWARNINGS": "error"}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "play.py", *arguments]
    return subprocess.run(command, cwd=FOLDER, env=ENVIRONMENT, capture_output=True, encoding="utf-8", timeout=600)


def call(monkeypatch, *arguments: object) -> None:
    """Runs it in this process."""
    monkeypatch.setattr(sys, "argv", ["play.py", *map(str, arguments)])
    play.main(play.read_settings())


def read_table(text: str) -> list[list[str]]:
    lines = text.strip().split("\n")
    assert len({len(line) for line in lines}) == 1  # its columns stand one below the other
    header, rule, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    assert all(re.fullmatch("-+:?", cell) for cell in rule)
    return [header, *rows]


@pytest.mark.storm
def test_two_players_meet_and_a_game_becomes_pictures(tmp_path):
    gif, strip, output = (tmp_path / name for name in ("game.gif", "strip.png", "table.md"))
    files = f"--gif={gif}", f"--strip={strip}", f"--output={output}"
    done = run("greedy", "2", "--games=30", "--seed=3", "--fps=25", *files)
    assert (done.returncode, done.stderr) == (0, "")
    assert output.read_text(encoding="utf-8") == done.stdout

    result = play_games(get("greedy"), get(2), 30, seed=3)
    assert result.win_rate_as_a != result.win_rate_as_b  # or the test could not tell them apart
    error = (result.win_rate * (1 - result.win_rate) / 30) ** 0.5
    (score, other), (deaths, other_deaths) = result.scores, result.deaths_per_game
    table = read_table(done.stdout)
    assert table[:2] == [["greedy against 2", "30 games"], ["wins", f"{result.win_rate:.3f} ± {error:.3f}"]]
    assert [row[0] for row in table[2:]] == ["wins as team A", "wins as team B", "draws", "score", "deaths"]
    assert [row[1].split()[0] for row in table[2:4]] == [f"{result.win_rate_as_a:.3f}", f"{result.win_rate_as_b:.3f}"]
    assert table[5][1] == f"{score:.1f} : {other:.1f}"
    assert table[6][1] == f"{deaths:.1f} : {other_deaths:.1f}"

    with Image.open(gif) as image:
        assert (image.format, image.n_frames, image.info["duration"]) == ("GIF", 201, 40)
    with Image.open(strip) as image:
        assert image.format == "PNG"


def test_every_pair_of_several_players_meets(monkeypatch, capsys):
    call(monkeypatch, "--compare", "random", "greedy", "2", "--games", 20, "--seed", 5)
    table = read_table(capsys.readouterr().out)
    assert table[0] == ["wins against", "random", "greedy", "2", "all"]
    wins = {}
    for one, other in (("random", "greedy"), ("random", "2"), ("greedy", "2")):
        players = [get(int(name) if name == "2" else name) for name in (one, other)]
        result = play_games(*players, 20, seed=5)
        wins[one, other], wins[other, one] = result.wins, result.losses
    assert wins["greedy", "random"] >= 15 > 5 >= wins["random", "greedy"]
    for name, *cells, total in table[1:]:
        against = [wins.get((name, other)) for other in table[0][1:-1]]
        assert [cell.split()[0] for cell in cells] == ["–" if w is None else f"{w / 20:.3f}" for w in against]
        p = sum(w for w in against if w is not None) / 40
        assert total == f"{p:.3f} ± {(p * (1 - p) / 40) ** 0.5:.3f}"


def test_a_league_lists_all_players_by_elo_and_draws_them(monkeypatch, capsys, tmp_path):
    players = {name: OPPONENTS[name] for name in ("random", "greedy", "wandering")}
    monkeypatch.setattr(play, "OPPONENTS", players)
    call(monkeypatch, "random", "--league", tmp_path / "league.png", "--games", 60)
    table = read_table(capsys.readouterr().out)
    assert table[0] == ["player", "Elo", "greedy", "wandering", "random"]
    assert [row[0] for row in table[1:]] == table[0][2:]
    assert table[1][1].startswith("1000 ± ")
    elos = [float(row[1].split()[0]) for row in table[1:]]
    assert elos == sorted(elos, reverse=True) and elos[1] < 800
    result = play_games(players["random"], players["wandering"], 60)
    assert table[3][3] == f"{result.win_rate:.3f}" and table[2][4] == f"{result.losses / 60:.3f}"
    with Image.open(tmp_path / "league.png") as image:
        assert image.format == "PNG" and min(image.size) > 200


def test_games_beyond_one_move_of_the_progress_bar_are_those_of_one_go(monkeypatch, capsys):
    call(monkeypatch, "random", "--games", 141, "--seed", 1)
    result = play_games(get("random"), get("greedy"), 141, seed=1)
    table = read_table(capsys.readouterr().out)
    assert table[0] == ["random against greedy", "141 games"]
    assert table[4][1].startswith(f"{result.draws / 141:.3f} ")
    assert table[6][1] == "{:.1f} : {:.1f}".format(*result.deaths_per_game)


def test_the_game_to_watch_is_the_first_that_is_counted(monkeypatch, capsys):
    call(monkeypatch, "greedy", "random", "--games", 0, "--watch", "--seed", 8)
    boards = capsys.readouterr().out.strip().split("\n\n")
    assert len(boards) == 201
    assert boards[0].startswith("123 greedy 0 : 0 random 456, step 0\n+")
    call(monkeypatch, "greedy", "random", "--games", 1, "--seed", 8)
    a, b = read_table(capsys.readouterr().out)[5][1].split(" : ")
    assert boards[-1].startswith(f"123 greedy {float(a):.0f} : {float(b):.0f} random 456, step 200\n")


def test_ctrl_c_ends_watching_without_a_traceback():
    terminal, other_end = pty.openpty()
    environment = {**ENVIRONMENT, "TERM": "xterm", "NO_COLOR": ""}
    process = subprocess.Popen(
        [sys.executable, "play.py", "greedy", "--watch", "--fps=4"],
        cwd=FOLDER,
        env=environment,
        stdout=other_end,
        stderr=subprocess.PIPE,
    )
    os.close(other_end)
    try:
        shown = b""
        while b"step 1\x1b" not in shown:
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
    assert (process.returncode, errors) == (130, b"")
    assert b"\x1b[48;5;" in shown
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
        (["greedy", "9"], "difficulty from 0 to 4"),
        (["greedy", "random", "greedy"], "two players meet, not 3: with --compare"),
        (["--compare", "greedy"], "two players or more"),
        (["--compare", "greedy", "random", "--games=0"], "at least one game"),
        (["--compare", "greedy", "random", "--watch"], "without --watch"),
        (["greedy", "--games=0"], "--games 0 counts nothing"),
        (["greedy", "--games=-1"], "--games is at least 0"),
        (["greedy", "--fps=0"], "--fps above 0"),
        (["greedy", "--gif=nowhere/game.gif"], "cannot write nowhere/game.gif: there is no folder nowhere"),
        (["greedy", "--strip=nowhere/game.png"], "there is no folder nowhere"),
        (["greedy", "--strip=game.gif"], "game.gif would be a PNG"),
        (["greedy", "--league=game.gif"], "game.gif would be a PNG"),
        (["greedy", "--league=nowhere/game.png"], "there is no folder nowhere"),
        ([], "the following arguments are required: player"),
    ],
)
def test_bad_input_is_refused_in_one_line(monkeypatch, capsys, arguments, message):
    with pytest.raises(SystemExit) as stop:
        call(monkeypatch, *arguments)
    assert stop.value.code == 2
    line = capsys.readouterr().err
    assert re.search(message, line) and line.startswith("play.py: ") and line.count("\n") == 1


def test_a_file_that_cannot_be_written_is_told_in_one_line(tmp_path):
    done = run("greedy", "--games=0", f"--strip={tmp_path}")
    assert done.returncode == 2
    assert done.stderr.startswith("play.py: ") and str(tmp_path) in done.stderr and done.stderr.count("\n") == 1
