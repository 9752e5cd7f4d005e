"""Read the settings of a run: its flags, and presets of them. What follows from them is in `plan.py`."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from shared.program import Parser, UserError

from snakes import runs
from snakes.opponents import LADDER, LEVELS, OPPONENTS
from snakes.plan import BATCH_SIZE, LADDERS, LEAGUE, OPPONENT, ROUND

ALL = "ladder"  # all strong scripted players, as --eval_opponent
_ORIGINAL = {
    "total_episodes": None,
    "episode_length": 200,
    "boards": 1,  # which becomes one per rank
    "seed": 1,
    "global_batch_size": None,
    "buffer_size": 100_000,
    "updates": 1,
    "hidden": 256,
    "epsilon": 0.5,
    "epsilon_min": 0.0,
    "reward": "own",
    "opponent_difficulty_strategy": "curriculum",
    "opponent_evasion_start_episode": 40_000,
    "save_interval": 1000,
    "lr_scaling": "none",
}
_LADDER = _ORIGINAL | {
    "batch_size": 128,
    "a_lr": 3e-4,
    "c_lr": 3e-4,
    "gamma": 0.99,
    "tau": 0.01,
    "epsilon_speed": 0.9995,
}
PRESETS: dict[str, dict[str, Any]] = {
    "guide-a": _LADDER | {"max_episodes": 6250, "lr_scaling": "linear"},
    "guide-b": _LADDER | {"max_episodes": 50_000},
    "guide-c": _ORIGINAL
    | {
        "max_episodes": 6250,
        "batch_size": 64,
        "a_lr": 1e-4,
        "c_lr": 1e-4,
        "gamma": 0.95,
        "tau": 0.001,
        "epsilon_speed": 0.99998,
        "opponent_difficulty_strategy": "fixed",
        "opponent": "greedy",
    },
}


# Flags of public trainers that are not here, and where to go instead
_ABSENT = {
    "--model_episode": "use --load_model_run and --load_model_run_episode",
    "--log_dir": "use --runs_folder, in which each run gets a folder of its own",
}


def read_settings(argv: Sequence[str] | None = None, saved: Mapping[str, Any] | None = None) -> argparse.Namespace:
    """Read the command line.

    Args:
        argv: The arguments; those of the program by default.
        saved: The settings of a run to go on with, in place of the defaults. A preset on the
            command line is stronger than they are, a flag stronger than a preset.

    Raises:
        UserError: If it is wrong.
    """
    parser = _make_parser()
    given = parser.parse_args(argv)
    load_model = given.load_model or given.load_model_run is not None or given.load_model_run_episode is not None
    if given.resume and load_model:
        parser.error("--resume goes on with the run's own weights: leave out --load_model and its kin")
    parser.set_defaults(**(dict(saved or {}) | PRESETS.get(given.preset, {})))
    settings = parser.parse_args(argv)
    settings.load_model = load_model
    del settings.local_rank  # a launcher's, which says it in the environment, too
    return settings


def _make_parser() -> argparse.ArgumentParser:
    parser = _Parser("Trains three snakes to beat three others.")
    parser.formatter_class = _Formatter
    parser.allow_abbrev = False
    count = _number(int, 1)
    share = _number(float, 0, 1)
    rate = _number(float, 1e-12)

    group = parser.add_argument_group("length and seed")
    add = group.add_argument
    either = group.add_mutually_exclusive_group().add_argument
    add("--preset", type=_one_of(*PRESETS), help=f"the settings of a public guide: {', '.join(PRESETS)}")
    text = "episodes, global"
    either("--total_episodes", action=_Either, const="max_episodes", type=count, default=12_000, help=text)
    text = "episodes per rank, instead; episodes in flags that say so are then counted per rank too"
    either("--max_episodes", action=_Either, const="total_episodes", type=count, help=text)
    add("--episode_length", type=count, default=200, help="steps of an episode")
    text = "boards played at once, global; rounded up to a multiple of the ranks"
    add("--boards", type=count, default=1024, help=text)
    add(
        "--time_limit",
        type=_number(float, 0),
        help=f"seconds after which to save and stop, at the next of every {ROUND} steps",
    )
    add(
        "--seed",
        type=_number(int, 0, 2**63 - 1),
        default=1,
        help="of the weights and, with its own stream each, of every board",
    )

    group = parser.add_argument_group("agent")
    add = group.add_argument
    either = group.add_mutually_exclusive_group().add_argument
    text = "rows per optimiser step, per rank"
    either("--batch_size", action=_Either, const="global_batch_size", type=count, help=text)
    text = f"rows per optimiser step, global, instead (default: {BATCH_SIZE}, rounded up to a multiple of the ranks)"
    either("--global_batch_size", action=_Either, const="batch_size", type=count, help=text)
    add("--updates", type=count, default=1, help="optimiser steps per step of all boards; all ranks take them together")
    add("--buffer_size", type=count, default=200_000, help="transitions kept, per rank")
    add("--a_lr", type=rate, default=3e-3, help="learning rate of the actor, before scaling")
    add("--c_lr", type=rate, default=3e-3, help="learning rate of the critic, before scaling")
    add(
        "--lr_end",
        type=share,
        default=1.0,
        help="part of the learning rates that is left at the run's end; it falls evenly",
    )
    text = "what --batch_size on several ranks does to the learning rates; Adam ignores a gradient's scale: none"
    add("--lr_scaling", type=_one_of("none", "linear", "sqrt"), default="none", help=text)
    text = "what a snake is paid for: its own length, or what its team gains on the other"
    add("--reward", type=_one_of("own", "team"), default="team", help=text)
    add("--gamma", type=share, default=0.97, help="discount per step")
    add("--tau", type=share, default=0.01, help="part of the way that the targets go per optimiser step")
    add("--hidden", type=count, default=128, help="width of the hidden layers")
    text = "of the networks' second layers; auto: bfloat16 on a CPU with instructions for it"
    add("--precision", type=_one_of("auto", "float32", "bfloat16"), default="auto", help=text)
    softmax = _only("softmax", "the actor chooses one of four directions")
    add("--output_activation", type=softmax, default="softmax", help="of the actor")

    add = parser.add_argument_group("exploration and opponents").add_argument
    add("--epsilon", type=share, default=0.2, help="part of the moves that is random at first")
    add("--epsilon_speed", type=share, default=0.999999, help="factor of epsilon per environment step, global")
    add("--epsilon_min", type=share, default=0.02, help="what epsilon does not fall below")
    text = (
        f"{LEAGUE}: the ladder and past selves, each as often as it wins; {', '.join(LADDERS)}: how one opponent's "
        "difficulty grows from 0 to 4; fixed: --opponent"
    )
    add("--opponent_difficulty_strategy", type=_one_of(LEAGUE, *LADDERS, "fixed"), default=LEAGUE, help=text)
    text = f"for the strategy fixed: {', '.join(OPPONENTS)}, or a difficulty from 0 to {len(LEVELS) - 1}"
    add("--opponent", type=_opponent, metavar="name", help=f"{text} (default: {OPPONENT})")
    add("--enable_opponent_evasion", action="store_true", help="play against the evasive opponent later on")
    text = "when: an episode, from 1, global, or per rank with --max_episodes; or with a point, a part of the run: 0.8"
    add("--opponent_evasion_start_episode", type=_episode_or_part, default=40_000, metavar="E", help=text)

    add = parser.add_argument_group("files and reports").add_argument
    add(
        "--save_interval",
        type=count,
        default=1000,
        help="episodes between checkpoints, global, or per rank with --max_episodes",
    )
    add("--log_interval", type=count, default=500, help="episodes, global, between reports")
    text = "episodes, global, between evaluations; after each the agent joins the league as it is"
    add("--eval_interval", type=count, default=5000, help=text)
    text = "games of an evaluation with each opponent, global, on both sides in turn"
    add("--eval_games", type=count, default=100, help=text)
    text = f"whom to evaluate against; {ALL}: {', '.join(LADDER)}, and the best has the greatest mean win rate"
    add("--eval_opponent", type=_eval_opponent, default=ALL, metavar="name", help=text)
    add("--runs_folder", type=Path, default=runs.ROOT, help="where the runs' folders are")
    text = "go on with a run: a number, a folder, or latest, which it is without a value"
    add("--resume", type=str, nargs="?", const="latest", metavar="RUN", help=text)
    text = "begin a new run with the weights of an old one, by default the latest"
    add("--load_model", action="store_true", help=text)
    add("--load_model_run", type=count, metavar="N", help="the run whose weights to load")
    text = "and the episode, or the last one saved before it; by default its best, else its last"
    add("--load_model_run_episode", type=count, metavar="E", help=text)
    same = "as in the public trainers"
    add("--game_name", help=same, type=_only("snakes_3v3", "this is a trainer for one game"), default="snakes_3v3")
    add("--algo", help=same, type=_only("ddpg", "this is a trainer by one method"), default="ddpg")
    return parser


class _Parser(Parser):
    """Say in one line what is wrong, and where to go instead of flags that are not here."""

    def error(self, message: str) -> NoReturn:
        for flag, instead in _ABSENT.items():
            if flag in message:
                raise UserError(f"{message}: {instead}")
        raise UserError(message)


class _Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.MetavarTypeHelpFormatter):
    """Say nothing of a default that is none."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default in (None, False) else super()._get_help_string(action)


class _Either(argparse.Action):
    """Store one of two exclusive settings and unset the other, named by const, so that no default competes."""

    def __call__(self, parser, namespace, values, option_string=None):
        setattr(namespace, self.dest, values)
        setattr(namespace, self.const, None)


def _number(kind: type, low: float, high: float = math.inf) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        value = kind(text)
        if not low <= value <= high:
            limits = f"at least {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
            raise argparse.ArgumentTypeError(f"must be {limits}, not {text}")
        return value

    read.__name__ = kind.__name__  # which argparse shows
    return read


def _one_of(*names: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in names:
            near = get_close_matches(text, names, 1)
            meant = f": did you mean {near[0]}?" if near else "."
            raise argparse.ArgumentTypeError(f"there is no {text!r}{meant} Choose one of {', '.join(names)}")
        return text

    read.__name__ = "name"
    return read


def _only(name: str, reason: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text != name:
            raise argparse.ArgumentTypeError(f"{text!r} is not possible, only {name}: {reason}")
        return text

    read.__name__ = "name"
    return read


def _opponent(text: str) -> str | int:
    name = _one_of(*OPPONENTS, *map(str, range(len(LEVELS))))(text)
    return int(name) if name.isdecimal() else name


def _eval_opponent(text: str) -> str | int:
    return text if text == ALL else _opponent(text)


def _episode_or_part(text: str) -> int | float:
    return _number(int, 1)(text) if text.isdecimal() else _number(float, 0, 1)(text)
