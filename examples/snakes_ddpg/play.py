"""Let players meet on the snakes' board: count who wins, show a game in the terminal, write pictures of it.

Whole games on both sides, and what came of them; the first of them to watch, and as pictures::

    python play.py greedy random
    python play.py greedy random --games 0 --watch
    python play.py greedy random --gif game.gif --strip game.png

Every pair of several players, as a table in Markdown::

    python play.py --compare random 1 greedy --output table.md

A league of a model and all scripted players, with Elo and its error, as a table and as a picture::

    python play.py latest --league league.png

A player is a scripted opponent by its name, or a difficulty from 0 to 4. What to expect: greedy
wins 99 % of its games against random; 400 games take a second, after some that it needs to start.
"""

from __future__ import annotations

import argparse
import math
import signal
import sys
import time
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
from snakes import runs
from snakes.drawing import Frame, Table, render, snap, write_gif, write_league, write_strip
from snakes.evaluation import Result, play_games
from snakes.game import SNAKES, Game
from snakes.opponents import OPPONENTS, Player, get
from snakes.policy import load_policy
from snakes.rating import elo
from snakes.search import DEPTH, load_search
from tqdm import tqdm

AT_ONCE = 128  # games between two moves of the progress bar


def read_settings() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Lets players meet on the snakes' board.")
    parser.error = fail  # on one line, without the usage
    add = parser.add_argument
    add("players", nargs="+", metavar="player", help="two players, the second is greedy if left out; more to compare")
    add("--compare", action="store_true", help="let every pair meet, and print win rates as a table")
    add(
        "--league",
        type=Path,
        metavar="FILE",
        help="the same with all scripted players, and Elo; also as a picture, PNG",
    )
    add("--games", type=int, default=400, help="to play per pair, half of them on either side (default: %(default)s)")
    add("--seed", type=int, default=0, help="of all games (default: %(default)s)")
    text = "steps that trained models look ahead; 0: play as their actor alone does (default: %(default)s)"
    add("--depth", type=int, default=DEPTH, help=text)
    add("--watch", action="store_true", help="show the first game in the terminal; Ctrl-C ends it")
    add("--fps", type=float, default=12, help="steps per second to watch, and in the GIF (default: %(default)s)")
    add("--gif", type=Path, metavar="FILE", help="write the first game as an animated GIF")
    add("--strip", type=Path, metavar="FILE", help="write six moments of the first game as a PNG")
    add("--output", type=Path, metavar="FILE", help="write the table, which is Markdown, to a file too")
    args = parser.parse_args()
    if args.league:
        args.compare = True
        args.players += [name for name in OPPONENTS if name not in args.players]
    if args.games < 0 or not 0 < args.fps <= 50:
        fail(f"--games is at least 0 and --fps above 0 and at most 50, not {args.games} and {args.fps:g}")
    if args.compare and (args.watch or args.gif or args.strip or args.games == 0 or len(args.players) < 2):
        fail("--compare takes two players or more and at least one game, without --watch, --gif and --strip")
    if not args.compare and len(args.players) > 2:
        fail(f"two players meet, not {len(args.players)}: with --compare every pair does")
    if args.games == 0 and not (args.watch or args.gif or args.strip):
        fail("--games 0 counts nothing: add --watch, --gif FILE or --strip FILE to see one game")
    for path, suffix in ((args.gif, ".gif"), (args.strip, ".png"), (args.league, ".png")):
        if path and path.suffix.lower() != suffix and not path.is_dir():
            fail(f"{path} would be a {suffix[1:].upper()}: name it so that it ends in {suffix}")
    for path in (args.gif, args.strip, args.league, args.output):
        if path and not path.parent.is_dir():
            fail(f"cannot write {path}: there is no folder {path.parent}")
    return args


def fail(message: object) -> NoReturn:
    """Say what is wrong in a line, and end the program."""
    print(f"play.py: {message}", file=sys.stderr)
    sys.exit(2)


def player(name: str, depth: int = DEPTH) -> Player:
    """Find the player of a name: a scripted opponent by its name or difficulty, or a trained model, see `runs.parse()`.

    A model plays with a search of this depth, at 0 without.

    Raises:
        ValueError: If there is none; the message lists those there are.
    """
    if name.isdecimal():
        return get(int(name))
    if name in OPPONENTS:
        return get(name)
    try:
        path = runs.parse(name)
        print(f"{name} is {path}", file=sys.stderr)
        return load_search(path, depth) if depth else load_policy(path)
    except FileNotFoundError as error:
        raise ValueError(f"{error}; the scripted players are: {', '.join(OPPONENTS)}") from error


def play_one(a: Player, b: Player, seed: int) -> Iterator[Frame]:
    """Play the first of the games that are counted, `a` as team A, and take a picture before and after every step."""
    game = Game(1, seed)
    actions = np.zeros((1, SNAKES), np.uint8)
    yield snap(game)
    while not game.done[0]:
        a(game.boards, 0, actions)
        b(game.boards, 1, actions)
        game.step(actions)
        yield snap(game)


def watch(frames: list[Frame], names: list[str], fps: float) -> None:
    """Show frames in place on a terminal; print them one below the other elsewhere."""
    if not sys.stdout.isatty():
        print("\n\n".join(render(frame, names) for frame in frames))
        return
    print("\x1b[?25l\x1b[2J", end="")  # hides the cursor, clears the screen
    try:
        for frame in frames:
            print("\x1b[H" + render(frame, names).replace("\n", "\x1b[K\n"), flush=True)
            time.sleep(1 / fps)
    finally:
        print("\x1b[?25h", flush=True)


def play_pairs(players: list[tuple[str, Player]], games: int, seed: int) -> dict[tuple[int, int], Result]:
    """Play the games of every pair, and return what came of them by the numbers of its players."""
    results = {pair: Result() for pair in combinations(range(len(players)), 2)}
    with tqdm(total=games * len(results), unit="game", leave=False, disable=None) as bar:
        for one, other in results:
            bar.set_description(f"{players[one][0]} / {players[other][0]}")
            for first in range(0, games, AT_ONCE):
                count = min(AT_ONCE, games - first)
                results[one, other] += play_games(players[one][1], players[other][1], count, seed=seed, first=first)
                bar.update(count)
    return results


def rate(wins: int, games: int) -> str:
    """Write the share of games won, and its standard error."""
    if games == 0:
        return "–"
    p = wins / games
    return f"{p:.3f} ± {math.sqrt(p * (1 - p) / games):.3f}"


def describe(names: list[str], result: Result) -> list[list[str]]:
    """Describe two players' games, as rows of a table, from the side of the first."""
    as_a = result.games_as_a
    as_b = result.games - result.games_as_a
    games = "1 game" if result.games == 1 else f"{result.games} games"
    return [
        [f"{names[0]} against {names[1]}", games],
        ["wins", rate(result.wins, result.games)],
        ["wins as team A", rate(result.wins_as_a, as_a)],
        ["wins as team B", rate(result.wins - result.wins_as_a, as_b)],
        ["draws", rate(result.draws, result.games)],
        ["score", "{:.1f} : {:.1f}".format(*result.scores)],
        ["deaths", "{:.1f} : {:.1f}".format(*result.deaths_per_game)],
    ]


def compare(names: list[str], results: dict[tuple[int, int], Result]) -> list[list[str]]:
    """List win rates of the player of a row against that of a column, and against all."""
    rows = [["wins against", *names, "all"]]
    games = next(iter(results.values())).games
    for one, name in enumerate(names):
        wins = {}
        for (first, second), result in results.items():
            if first == one:
                wins[second] = result.wins
            if second == one:
                wins[first] = result.losses
        cells = [rate(wins[other], games) if other in wins else "–" for other in range(len(names))]
        rows.append([name, *cells, rate(sum(wins.values()), games * len(wins))])
    return rows


def league(names: list[str], results: dict[tuple[int, int], Result]) -> Table:
    """Rate the players by their games; greedy has 1000."""
    points, games, wins = np.zeros((3, len(names), len(names)))
    for (one, other), result in results.items():
        games[one, other] = games[other, one] = result.games
        points[one, other] = result.wins + result.draws / 2
        points[other, one] = result.losses + result.draws / 2
        wins[one, other] = result.wins
        wins[other, one] = result.losses
    ratings, errors = elo(points, games)
    ratings += 1000 - ratings[names.index("greedy")]
    order = np.argsort(-ratings)
    rates = (wins / np.maximum(games, 1))[np.ix_(order, order)]
    return Table([names[i] for i in order], ratings[order], errors[order], rates)


def list_league(table: Table) -> list[list[str]]:
    """List the players of a league, the best first, with Elo and win rates."""
    rows = [["player", "Elo", *table.names]]
    for i, name in enumerate(table.names):
        cells = [f"{rate:.3f}" for rate in table.rates[i]]
        cells[i] = "–"
        rows.append([name, f"{table.ratings[i]:.0f} ± {table.errors[i]:.0f}", *cells])
    return rows


def markdown(rows: list[list[str]]) -> str:
    """Write a table in Markdown whose columns are as wide as they need, so that it reads well as it is."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    lines = []
    for first, *others in [rows[0], rule, *rows[1:]]:
        cells = [first.ljust(widths[0]), *map(str.rjust, others, widths[1:])]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)  # more only get in each other's way with networks this small
    names = args.players if len(args.players) > 1 else [*args.players, "greedy"]
    try:
        players = [(name, player(name, args.depth)) for name in names]
    except ValueError as error:
        fail(error)

    if args.watch or args.gif or args.strip:
        frames = list(play_one(players[0][1], players[1][1], args.seed))
        if args.watch:
            watch(frames, names, args.fps)
        if args.gif:
            write_gif(frames, args.gif, names, fps=args.fps)
        if args.strip:
            write_strip(frames, args.strip, names)

    if args.games:
        results = play_pairs(players, args.games, args.seed)
        if args.league:
            standing = league(names, results)
            write_league(standing, args.league)
            rows = list_league(standing)
        elif args.compare:
            rows = compare(names, results)
        else:
            rows = describe(names, results[0, 1])
        table = markdown(rows)
        print(table)
        if args.output:
            args.output.write_text(table + "\n", encoding="utf-8")


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a reader that leaves, such as `| head`, ends it without a word
    try:
        main(read_settings())
    except OSError as error:
        fail(error)
    except KeyboardInterrupt:
        sys.exit(130)
