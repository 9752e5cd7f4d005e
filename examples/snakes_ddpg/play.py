"""Let players meet on the snakes' board: count who wins, show a game in the terminal, write it as a GIF.

Whole games on both sides against one or more others; the first of them to watch, and as a picture::

    python play.py greedy random
    python play.py latest foresighted territory
    python play.py greedy random --games 0 --watch
    python play.py greedy random --gif game.gif

A player is a scripted opponent by its name, a difficulty from 0 to 4, or a trained model. What to expect:
greedy wins 99 % of its games against random; 400 games take a second, after some that it needs to start.
"""

import argparse
import logging
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1]))  # where `shared` is, which all trainers share

from player.drawing import Frame, render, snap, write_gif
from player.search import DEPTH, load_player
from shared.program import Parser, UserError, one_message, user_error
from snakes import runs
from snakes.evaluation import Result, play_games
from snakes.game import SNAKES, Game
from snakes.opponents import OPPONENTS, Player, get

AT_ONCE = 128  # games between two moves of the progress bar


def read_settings() -> argparse.Namespace:
    parser = Parser("Lets players meet on the snakes' board.", argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("players", nargs="+", metavar="player", help="who meets each of those that follow; greedy if none follows")
    add("--games", type=int, default=400, help="to play per pair, half of them on either side")
    add("--seed", type=int, default=0, help="of all games")
    add("--runs_folder", type=Path, default=runs.ROOT, help="where the runs' folders are")
    add("--depth", type=int, default=DEPTH, help="steps that trained models look ahead; 0: play without search")
    add("--watch", action="store_true", help="show the first game in the terminal; Ctrl-C ends it")
    add("--fps", type=float, default=12, help="steps per second to watch, and in the GIF")
    add("--gif", type=Path, metavar="FILE", help="write the first game as an animated GIF")
    args = parser.parse_args()
    if args.games < 0 or args.fps <= 0:
        parser.error("--games is at least 0, and --fps above 0")
    if args.games == 0 and not args.watch and not args.gif:
        parser.error("--games 0 counts nothing: add --watch or --gif")
    if args.gif and not args.gif.parent.is_dir():
        parser.error(f"cannot write {args.gif}: there is no folder {args.gif.parent}")
    return args


def player(name: str, depth: int = DEPTH, runs_folder: Path = runs.ROOT) -> Player:
    """Find a scripted opponent by its name or difficulty, or a trained model, which searches if the depth is not 0."""
    try:
        if name in OPPONENTS or name.isdecimal():
            return get(name)
        path = runs.parse(name, runs_folder)
        print(f"{name} is {path}", file=sys.stderr)
        return load_player(path, depth)
    except FileNotFoundError as error:
        raise UserError(f"{error}; the scripted players are: {', '.join(OPPONENTS)}") from error
    except ValueError as error:
        raise UserError(str(error)) from error


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
            print("\x1b[H" + render(frame, names, colours=True), flush=True)
            time.sleep(1 / fps)
    finally:
        print("\x1b[?25h", flush=True)


def count(one: Player, other: Player, games: int, seed: int) -> Result:
    """Play games with a progress bar, and return what came of them."""
    result = Result()
    with tqdm(total=games, unit="game", leave=False, disable=None) as bar:
        for first in range(0, games, AT_ONCE):
            result += play_games(one, other, min(AT_ONCE, games - first), seed=seed, first=first)
            bar.update(min(AT_ONCE, games - first))
    return result


@user_error("cannot write", OSError)
def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)  # more only get in each other's way with networks this small
    names = args.players if len(args.players) > 1 else [*args.players, "greedy"]
    one, *others = [player(name, args.depth, args.runs_folder) for name in names]
    if args.watch or args.gif:
        frames = list(play_one(one, others[0], args.seed))
        if args.watch:
            watch(frames, names[:2], args.fps)
        if args.gif:
            write_gif(frames, args.gif, names[:2], fps=args.fps)
    if args.games:
        for name, other in zip(names[1:], others, strict=True):
            print(f"{names[0]} against {name}: {count(one, other, args.games, args.seed)}", flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a reader that leaves, such as `| head`, ends it without a word
    with one_message(logging.Formatter("%(message)s")):
        main(read_settings())
