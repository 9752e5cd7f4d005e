"""Write a trained model as the one file that the competition platform takes, and check it.

Of the newest run, or any other::

    python export.py latest
    python export.py run3:2000 --output /tmp/submission.py

The file needs NumPy alone. What to expect: under a megabyte; 0.1 to 0.2 s for the first call of a step, which moves
all three snakes and takes at most half a second on a busy machine; 27 MB of memory. With `--depth 0` a distilled
network takes four megabytes, 0.003 s and 40 MB. The platform allows two seconds and 500 MB.
"""

import argparse
import base64
import logging
import runpy
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # where `shared` is, which all trainers share

from player.search import DEPTH, Search, load_player
from player.student import StudentPolicy, Value
from shared.program import Parser, one_message, user_error
from snakes.ddpg import Policy
from snakes.game import COLUMNS, NONE, ROWS, SNAKES, Game
from snakes.opponents import OPPONENTS
from snakes.runs import ROOT, parse, replacing

TEMPLATE = Path(__file__).parent / "player" / "submission_template.py"
NAMES = ("up", "down", "left", "right")
CHECKED = 100  # steps on each side for which a submission has to play as the model
TIMED = 20  # the last of these steps, which are timed


def read_settings() -> argparse.Namespace:
    parser = Parser(
        "Writes a trained model as a submission for the competition platform.", argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("model", help="path of an actor_*.pth, a run's folder, runN, runN:EPISODE, or latest")
    parser.add_argument("--runs_folder", type=Path, default=ROOT, help="where the runs' folders are")
    parser.add_argument("--output", type=Path, default=Path("submission.py"), help="the file to write")
    text = "steps that it looks ahead; 0: play as the actor, or the distilled network, alone does"
    parser.add_argument("--depth", type=int, default=DEPTH, help=text)
    text = "that a call may take, by the wall clock; then it answers with what the search has found"
    parser.add_argument("--seconds", type=float, default=0.5, help=text)
    return parser.parse_args()


def write(policy: Policy, seconds: float, path: Path) -> None:
    """Write the template with the weights of the policy's networks behind it."""
    text = f"{TEMPLATE.read_text()}\n\n"
    if isinstance(policy, StudentPolicy):
        text += f"BOARD = {packed(policy.actor.board)}\nHEAD = {packed(policy.actor.layers)}\n"
    else:
        text += f"ACTOR = {packed(policy.actor)}\n"
    if isinstance(policy, Search):
        text += f"RIVALS = {packed(policy.rivals)}\nSTEPS = {policy.depth}\nSECONDS = float({str(seconds)!r})\n"
        parts = ("own", "others", "both") if isinstance(policy.value, Value) else ("critic",)
        text += "".join(f"{part.upper()} = {packed(getattr(policy.value, part))}\n" for part in parts)
    path.write_text(text)


def packed(network: torch.nn.Module) -> str:
    """Write a network's weights as the call that reads them."""
    weights = [tensor.float().cpu().numpy() for tensor in network.state_dict().values()]
    shapes = [array.shape for array in weights[::2]]  # the others are biases
    data = base64.b64encode(b"".join(array.astype("<f4").tobytes() for array in weights)).decode()
    lines = "\n".join(textwrap.wrap(data, 120))
    return f'unpack({shapes}, """\n{lines}\n""")'


def observations(game: Game, b: int, before: np.ndarray | None) -> list[dict[Any, Any]]:
    """Make what the platform tells each snake of board `b`, with its keys and types.

    As there, the coordinates of beans are NumPy's integers and those of snakes Python's, all six are handed the same
    lists, and the last directions are the headings of the step `before`.
    """
    beans = game.boards.beans[b][game.boards.beans[b] != NONE].astype(np.int64)
    told: dict[Any, Any] = {1: [[cell // COLUMNS, cell % COLUMNS] for cell in beans]}
    for s, body in enumerate(game.bodies(b)):
        told[2 + s] = [[int(cell) // COLUMNS, int(cell) % COLUMNS] for cell in body]
    told |= {"board_width": COLUMNS, "board_height": ROWS}
    told["last_direction"] = None if before is None else [NAMES[heading] for heading in before]
    return [{**told, "controlled_snake_index": s + 2} for s in range(SNAKES)]


def check(path: Path, policy: Policy) -> list[dict[Any, Any]]:
    """Play half a game with the written file on each side, against random moves; return what it was told for each move.

    Raise a ValueError if anything raises inside the file, or it does not play as the policy does.
    """
    submission = runpy.run_path(str(path))
    submission["my_controller"].__globals__["SECONDS"] = np.inf  # however busy this machine is
    asked = []
    differ = 0
    for team in (0, 1):
        game = Game(1, seed=team, episode_length=CHECKED)
        before = None
        actions, wanted = np.zeros((2, 1, SNAKES), np.uint8)
        while not game.done[0]:
            policy(game.boards, team, wanted)
            OPPONENTS["random"](game.boards, 1 - team, actions)
            told = observations(game, 0, before)
            for s in range(3 * team, 3 * team + 3):
                actions[0, s] = submission["my_controller"](told[s], None, False)[0].index(1)
                asked.append(told[s])
                differ += int(actions[0, s] != wanted[0, s])
            before = game.boards.headings[0].copy()
            game.step(actions)
    for function, error in submission["failures"].items():  # after which a match goes on with the next best player
        raise ValueError(f"{function}() of the submission raised {type(error).__name__}: {error}") from error
    if differ > len(asked) / 300:  # a heading that cannot be known, or two ways that are equally good but for rounding
        raise ValueError(
            f"{differ} of {len(asked)} moves of the submission are not the model's; "
            f"{TEMPLATE.name} has to compute what features.py and search.py do"
        )
    return asked


def time_calls(path: Path, asked: list[dict[Any, Any]]) -> float:
    """Ask the written file as a match does, where its search ends in time; return the seconds of the slowest call."""
    controller = runpy.run_path(str(path))["my_controller"]
    slowest = 0.0
    for observation in asked:
        start = time.perf_counter()
        controller(observation)
        slowest = max(slowest, time.perf_counter() - start)
    return slowest


@user_error("cannot export", OSError, ValueError)
def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)  # the check asks for one state at a time, which a second one would only delay
    if not args.seconds >= 0:
        raise ValueError(f"--seconds must be 0 or more, not {args.seconds}")
    if not args.output.parent.is_dir():
        raise FileNotFoundError(f"cannot write {args.output}: there is no folder {args.output.parent}")
    model = parse(args.model, args.runs_folder)
    policy = load_player(model, args.depth)
    with replacing(args.output) as unchecked:
        write(policy, args.seconds, unchecked)
        asked = check(unchecked, policy)
        seconds = time_calls(unchecked, asked[-3 * TIMED :])
    size = args.output.stat().st_size / 1000
    print(
        f"{args.output} plays as {model} in {len(asked)} moves: {size:.0f} kB, up to {1000 * seconds:.0f} ms per call"
    )


if __name__ == "__main__":
    with one_message(logging.Formatter("%(message)s")):
        main(read_settings())
