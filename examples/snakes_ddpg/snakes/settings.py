"""Read a run's flags and presets, and plan what follows from them on a number of ranks.

Every schedule follows global counters, the episodes and environment steps of all boards of all
ranks together, so it is the same on any number of ranks.
"""

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from shared.program import OneLineParser
from snakes import runs
from snakes.opponents import LADDER, LEVELS, OPPONENTS

from ddpkit import ScalePlan

ROUND = 50  # steps of all boards from one look at the global counters to the next
BATCH_SIZE = 6144  # rows per optimiser step, global, if no flag says otherwise
ROWS = 6  # of them per board, which brings three transitions a step: each is drawn twice
LEARNING_RATE = 3e-3  # of Adam with a batch of that size, or more
MIXED = "mixed"  # the strategy of meeting all of the ladder
EVASIVE = "evasive"  # the opponent's name

# difficulty, to be rounded down, by the part of the run that is over
LADDERS: dict[str, Callable[[float], float]] = {
    "linear": lambda p: 4 * p,
    "exponential": lambda p: 4 * p**1.5,
    "curriculum": lambda p: sum(p >= change for change in (0.10, 0.30, 0.60, 0.85)),
}

_GUIDES = {
    "total_episodes": None,
    "boards": None,
    "global_batch_size": None,
    "batch_size": 128,
    "buffer_size": 100_000,
    "hidden": 256,
    "a_lr": 3e-4,
    "c_lr": 3e-4,
    "gamma": 0.99,
    "epsilon": 0.5,
    "epsilon_speed": 0.9995,
    "opponent_difficulty_strategy": "curriculum",
}
_GUIDE_C = {
    "max_episodes": 6250,
    "batch_size": 64,
    "a_lr": 1e-4,
    "c_lr": 1e-4,
    "gamma": 0.95,
    "tau": 0.001,
    "epsilon_speed": 0.99998,
    "opponent": "greedy",
}
PRESETS: dict[str, dict[str, Any]] = {
    "guide-a": _GUIDES | {"max_episodes": 6250, "lr_scaling": "linear"},
    "guide-b": _GUIDES | {"max_episodes": 50_000},
    "guide-c": _GUIDES | _GUIDE_C,
}


def read_settings(argv: Sequence[str] | None = None, saved: Mapping[str, Any] | None = None) -> argparse.Namespace:
    """Read the command line; raise a UserError if it is wrong.

    The `saved` settings of a run to go on with take the place of the defaults. A preset on the
    command line is stronger than they are, a flag stronger than a preset.
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
    parser = _Parser("Trains three snakes to beat three others.", _Formatter)
    count = _number(int, 1)
    share = _number(float, 0, 1)
    rate = _number(float, 1e-12)

    group = parser.add_argument_group("length and seed")
    add = group.add_argument
    either = partial(group.add_mutually_exclusive_group().add_argument, action=_Either)
    add("--preset", choices=PRESETS, help="the settings of a public guide")
    either("--total_episodes", const="max_episodes", type=count, default=12_000, help="episodes, global")
    text = "episodes per rank, instead; episodes in flags that say so are then counted per rank too"
    either("--max_episodes", const="total_episodes", type=count, help=text)
    add("--episode_length", type=count, default=200, help="steps of an episode")
    text = f"at once, global, rounded up to a multiple of the ranks (default: one per {ROWS} rows of the global batch)"
    add("--boards", type=count, help=text)
    add("--seed", type=_number(int, 0, 2**63 - 1), default=1, help="of the weights and of every board's own stream")

    group = parser.add_argument_group("agent")
    add = group.add_argument
    either = partial(group.add_mutually_exclusive_group().add_argument, action=_Either)
    either("--batch_size", const="global_batch_size", type=count, help="rows per optimiser step, per rank")
    text = f"rows per optimiser step, global, instead (default: {BATCH_SIZE}, rounded up to a multiple of the ranks)"
    either("--global_batch_size", const="batch_size", type=count, help=text)
    add("--buffer_size", type=count, default=200_000, help="transitions kept, per rank")
    text = f"before scaling (default: {LEARNING_RATE}, with a smaller batch less, by the square root)"
    add("--a_lr", type=rate, help=f"learning rate of the actor, {text}")
    add("--c_lr", type=rate, help=f"learning rate of the critic, {text}")
    text = "what --batch_size on several ranks does to the learning rates; Adam ignores a gradient's scale: none"
    add("--lr_scaling", choices=("none", "linear", "sqrt"), default="none", help=text)
    add("--gamma", type=share, default=0.97, help="discount per step")
    add("--tau", type=share, default=0.01, help="part of the way that the targets go per optimiser step")
    add("--hidden", type=count, default=128, help="width of the hidden layers")
    text = "of the networks' second layers; auto: bfloat16 on a CPU with instructions for it"
    add("--precision", choices=("auto", "float32", "bfloat16"), default="auto", help=text)
    add("--output_activation", choices=("softmax",), default="softmax", help="of the actor")

    group = parser.add_argument_group("exploration and opponents")
    add = group.add_argument
    either = partial(group.add_mutually_exclusive_group().add_argument, action=_Either)
    text = "part of the moves that is random at first, the others being drawn by the actor's probabilities"
    add("--epsilon", type=share, default=0.0, help=text)
    add("--epsilon_speed", type=share, default=1.0, help="factor of epsilon per environment step, global")
    text = f"{MIXED}: {', '.join(LADDER)}, each on as many boards; else how one opponent's difficulty grows from 0 to 4"
    strategy = "opponent_difficulty_strategy"
    either(f"--{strategy}", const="opponent", choices=(MIXED, *LADDERS), default=MIXED, help=text)
    players = (*OPPONENTS, *map(str, range(len(LEVELS))))
    either("--opponent", const=strategy, choices=players, help="instead: one player or difficulty, all the time")
    add("--enable_opponent_evasion", action="store_true", help="play against the evasive opponent later on")
    text = "when: an episode, from 1, global, or per rank with --max_episodes; or with a point, a part of the run: 0.8"
    add("--opponent_evasion_start_episode", type=_episode_or_part, default=40_000, metavar="E", help=text)

    add = parser.add_argument_group("files and reports").add_argument
    text = "episodes between checkpoints, global, or per rank with --max_episodes"
    add("--save_interval", type=count, default=1000, help=text)
    add("--log_interval", type=count, default=500, help="episodes, global, between reports")
    add("--eval_interval", type=count, default=5000, help="episodes, global, between evaluations")
    add("--eval_games", type=count, default=100, help="games with each of the ladder, global, on both sides in turn")
    add("--runs_folder", "--log_dir", type=Path, default=runs.ROOT, help="where the runs' folders are")
    text = "go on with a run: a number, a folder, or latest, which it is without a value"
    add("--resume", nargs="?", const="latest", metavar="RUN", help=text)
    add("--load_model", action="store_true", help="begin a new run with an old one's weights, by default the latest's")
    add("--load_model_run", type=count, metavar="N", help="the run whose weights to load")
    text = "and the episode, or the last one saved before it; by default its best, else its last"
    add("--load_model_run_episode", "--model_episode", type=count, metavar="E", help=text)
    add("--game_name", choices=("snakes_3v3",), default="snakes_3v3", help="as in the public trainers")
    add("--algo", choices=("ddpg",), default="ddpg", help="as in the public trainers")
    return parser


class _Parser(OneLineParser):
    """Say what stands for a flag of the source repository."""

    def error(self, message: str) -> NoReturn:
        if "--update_interval" in message:
            message += ": leave it out; one optimiser step follows each step of all boards, whose number is --boards"
        super().error(message)


class _Formatter(argparse.ArgumentDefaultsHelpFormatter):
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


def _episode_or_part(text: str) -> int | float:
    return _number(int, 1)(text) if text.isdecimal() else _number(float, 0, 1)(text)


def resolve(settings: argparse.Namespace, world_size: int) -> argparse.Namespace:
    """Return the settings with what depends on the number of ranks; raise if the global batch does not divide by them.

    `counted_by` are the global episodes to one that the flags count: the ranks if `--max_episodes`
    told the run's length, also after it went on with other ranks, else 1.
    """
    size = settings.batch_size
    keep = "per_rank"
    if size is None:
        size = settings.global_batch_size or _round_up(BATCH_SIZE, world_size)
        keep = "global"
    scaled = partial(ScalePlan, size, world_size=world_size, keep=keep, rule=settings.lr_scaling)
    rows = size if settings.lr_scaling != "none" else scaled(1.0).global_batch_size
    rate = LEARNING_RATE * min(1, rows / BATCH_SIZE) ** 0.5
    actor = scaled(settings.a_lr or rate)
    critic = scaled(settings.c_lr or rate)
    episodes = settings.total_episodes or settings.max_episodes * world_size
    counted_by = world_size if settings.max_episodes else getattr(settings, "counted_by", 1)
    start = settings.opponent_evasion_start_episode
    boards = _round_up(settings.boards or max(1, actor.global_batch_size // ROWS), world_size)
    added = {
        "world_size": world_size,
        "episodes": episodes,  # global
        "boards_global": boards,
        "boards_per_rank": boards // world_size,
        "batch_global": actor.global_batch_size,  # rows per optimiser step
        "batch_per_rank": actor.per_rank_batch_size,
        "actor_lr": actor.lr,  # scaled
        "critic_lr": critic.lr,
        "counted_by": counted_by,
        "evasion_start": round(start * episodes) if isinstance(start, float) else start * counted_by,
        "save_every": settings.save_interval * counted_by,  # episodes, global
    }
    return argparse.Namespace(**vars(settings) | added)


def go_on(saved: Mapping[str, Any], world_size: int) -> dict[str, Any]:
    """Put the settings of a run in terms of all ranks, so that they mean the same on another number of them."""
    return {
        **saved,
        "total_episodes": saved["episodes"],
        "max_episodes": None,
        "global_batch_size": _round_up(saved["batch_global"], world_size),
        "batch_size": None,
        "a_lr": saved["actor_lr"],
        "c_lr": saved["critic_lr"],
        "lr_scaling": "none",
    }


def opponent_at(settings: argparse.Namespace, episode: int) -> str | int:
    """Find whom to play in an episode (global, from 1), by name or difficulty. Takes resolved settings."""
    if settings.enable_opponent_evasion and episode >= settings.evasion_start:
        return EVASIVE
    if settings.opponent is not None:
        return settings.opponent
    if settings.opponent_difficulty_strategy == MIXED:
        return MIXED
    grown = LADDERS[settings.opponent_difficulty_strategy](episode / settings.episodes)
    return min(len(LEVELS) - 1, int(grown))


def model_name(settings: argparse.Namespace, episodes: int, stopped: bool = False) -> int:
    """Find the episode that a model is named by, counted as the run's flags are. Takes resolved settings.

    It is the last multiple of `--save_interval`, though some episodes more are over when the counters are looked at; at
    the end the run's length. A run that is `stopped` before its end names the episode that it reached.
    """
    if stopped or episodes >= settings.episodes:
        return min(episodes, settings.episodes) // settings.counted_by
    return episodes // settings.save_every * settings.save_interval


def epsilon_at(settings: argparse.Namespace, environment_steps: int) -> float:
    """Find the part of the moves that is random after so many environment steps of all ranks."""
    return settings.epsilon * settings.epsilon_speed**environment_steps


def describe(s: argparse.Namespace) -> str:
    """Describe what a run is going to do, in a few lines for its start. Takes resolved settings."""
    length = s.episode_length
    # of all boards together: one more per episode, to begin the next; the first, part episodes are not counted
    steps = _round_up(math.ceil(s.episodes / s.boards_global * (length + 1) + length), ROUND)
    opponents = s.opponent or s.opponent_difficulty_strategy
    if s.enable_opponent_evasion:
        opponents += f"; {EVASIVE} from episode {s.evasion_start:,}"
    rows = {
        "ranks": f"{s.world_size}",
        "episodes": f"{s.episodes:,} in all, {s.episodes / s.world_size:,.10g} per rank, of {length} steps",
        "boards": f"{s.boards_global:,} at once, {s.boards_per_rank:,} per rank",
        "batch": f"{s.batch_global:,} rows per optimiser step, {s.batch_per_rank:,} per rank",
        "learning rates": f"{s.actor_lr:g} (actor), {s.critic_lr:g} (critic), scaling {s.lr_scaling}",
        "environment steps": f"some {steps * s.boards_global * length // (length + 1):,} in all",
        "optimiser steps": f"some {steps:,}, each of all ranks together: one per step of all boards",
        "samples": f"some {steps * s.batch_global:,} rows drawn from the replays in all",
        "opponents": opponents,
    }
    return "\n".join(f"{name:<18}  {value}" for name, value in rows.items())


def suspect(s: argparse.Namespace) -> str:
    """Name the flag that is furthest from its default, of those that can keep a run from learning.

    Takes resolved settings.
    """
    usual = resolve(read_settings(["--global_batch_size", str(s.batch_global)]), s.world_size)

    def distance(name: str) -> float:
        scales = [getattr(one, name) + 1e-9 for one in (s, usual)]
        if name == "gamma":
            scales = [1.001 - gamma for gamma in scales]
        return abs(math.log(scales[0] / scales[1]))

    flags = {"boards_global": "boards", "actor_lr": "a_lr", "critic_lr": "c_lr"}
    name = max([*flags, "tau", "gamma", "hidden"], key=distance)
    if distance(name) < 1:
        return "no flag's, all being near their defaults: try another --seed"
    return f"--{flags.get(name, name)} {getattr(s, name):g} (default: {getattr(usual, name):g})"


def _round_up(count: int, ranks: int) -> int:
    return -(-count // ranks) * ranks
