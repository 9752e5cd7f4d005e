"""Plan what a run is going to do on its number of ranks: what follows from the settings, step by step and in all.

Every schedule follows global counters, the episodes and environment steps of all boards of all
ranks together, so it is the same on any number of ranks.
"""

from __future__ import annotations

import argparse
import math
from bisect import bisect_left
from collections.abc import Callable, Mapping
from typing import Any

from ddpkit import ScalePlan

ROUND = 50  # steps of all boards from one look at the global counters to the next
BATCH_SIZE = 6144  # rows per optimiser step, global, if no flag says otherwise
LEAGUE = "league"  # the opponents of the strategy of that name
EVASIVE = "evasive"  # the opponent's name
OPPONENT = "greedy"  # for the strategy fixed, if no flag says otherwise

# difficulty, to be rounded down, by the part of the run that is over
LADDERS: dict[str, Callable[[float], float]] = {
    "linear": lambda p: 4 * p,
    "exponential": lambda p: 4 * p**1.5,
    "curriculum": lambda p: sum(p >= change for change in (0.10, 0.30, 0.60, 0.85)),
}


def resolve(settings: argparse.Namespace, world_size: int) -> argparse.Namespace:
    """Add what depends on the number of ranks.

    Returns:
        A copy of the settings with `world_size`; `episodes` (global); `boards_global` and
        `boards_per_rank`; `batch_global` and `batch_per_rank` (rows per optimiser step); `actor_lr`
        and `critic_lr`, scaled; `counted_by`, the global episodes to one that the flags count: the
        ranks if `--max_episodes` told the run's length, also after it went on with other ranks,
        else 1; `evasion_start` (episode, global); and `save_every` (episodes, global).

    Raises:
        ValueError: If the global batch does not divide by the ranks or a rank's batch is larger
            than its buffer.
    """
    size = settings.batch_size
    keep = "per_rank"
    if size is None:
        size = settings.global_batch_size or _round_up(BATCH_SIZE, world_size)
        keep = "global"
    actor = ScalePlan(size, settings.a_lr, world_size, keep=keep, rule=settings.lr_scaling)
    critic = ScalePlan(size, settings.c_lr, world_size, keep=keep, rule=settings.lr_scaling)
    if actor.per_rank_batch_size > settings.buffer_size:
        raise ValueError(
            f"a batch of {actor.per_rank_batch_size} rows per rank does not fit a buffer of {settings.buffer_size} "
            "transitions per rank: raise --buffer_size or lower the batch size"
        )
    episodes = settings.total_episodes or settings.max_episodes * world_size
    counted_by = world_size if settings.max_episodes else getattr(settings, "counted_by", 1)
    start = settings.opponent_evasion_start_episode
    evasion_start = round(start * episodes) if isinstance(start, float) else start * counted_by
    boards = _round_up(settings.boards, world_size)
    added = {
        "world_size": world_size,
        "episodes": episodes,
        "boards_global": boards,
        "boards_per_rank": boards // world_size,
        "batch_global": actor.global_batch_size,
        "batch_per_rank": actor.per_rank_batch_size,
        "actor_lr": actor.lr,
        "critic_lr": critic.lr,
        "counted_by": counted_by,
        "evasion_start": evasion_start,
        "save_every": settings.save_interval * counted_by,
    }
    return argparse.Namespace(**vars(settings) | added)


def go_on(saved: Mapping[str, Any], world_size: int) -> dict[str, Any]:
    """Put the settings of a run in terms of all ranks, so that they mean the same on another number of them."""
    rates = {"a_lr": saved["actor_lr"], "c_lr": saved["critic_lr"], "lr_scaling": "none"}
    lengths = {"total_episodes": saved["episodes"], "max_episodes": None, "time_limit": None}
    batch = {"global_batch_size": _round_up(saved["batch_global"], world_size), "batch_size": None}
    return {**saved, **lengths, **rates, **batch}


def difficulty(strategy: str, episode: int, max_episodes: int) -> int:
    """Find the opponent's level, 0 to 4, in an episode, which counts from 1 to `max_episodes`; both global."""
    return min(4, int(LADDERS[strategy](episode / max_episodes)))


def opponent_at(settings: argparse.Namespace, episode: int) -> str | int:
    """Find whom to play in an episode (global, from 1), by name or difficulty. Takes resolved settings."""
    if settings.enable_opponent_evasion and episode >= settings.evasion_start:
        return EVASIVE
    if settings.opponent_difficulty_strategy == LEAGUE:
        return LEAGUE
    if settings.opponent_difficulty_strategy == "fixed":
        return OPPONENT if settings.opponent is None else settings.opponent
    return difficulty(settings.opponent_difficulty_strategy, episode, settings.episodes)


def schedule_change(settings: argparse.Namespace, saved: Mapping[str, Any], episode: int) -> str:
    """Explain that another length of a run moves its opponent, in a line; "" if it does not.

    Args:
        settings: Resolved settings, with which the run goes on.
        saved: Those that it had.
        episode: After which it goes on, global.
    """
    schedule = ("opponent_difficulty_strategy", "opponent", "enable_opponent_evasion")
    if settings.episodes == saved["episodes"] or any(getattr(settings, name) != saved[name] for name in schedule):
        return ""
    before = opponent_at(argparse.Namespace(**saved), episode + 1)
    now = opponent_at(settings, episode + 1)
    if now == before:
        return ""
    return (
        f"the schedule now spans {settings.episodes:,} episodes, not {saved['episodes']:,}: the opponent after episode "
        f"{episode:,} is {now}, not {before}; to keep it, add --opponent_difficulty_strategy fixed --opponent {before}"
    )


def model_name(settings: argparse.Namespace, episodes: int, stopped: bool = False) -> int:
    """Find the episode that a model is named by, counted as the run's flags are.

    It is the last multiple of `--save_interval`, at the end the run's length: the counters are
    looked at every `ROUND` steps of all boards, when some episodes more are over.

    Args:
        settings: Resolved settings.
        episodes: Those that are over, global.
        stopped: If the run ends here. Before its time, the name is how far it came.
    """
    if episodes >= settings.episodes:
        return settings.episodes // settings.counted_by
    if stopped:
        return episodes // settings.counted_by
    return episodes // settings.save_every * settings.save_interval


def epsilon_at(settings: argparse.Namespace, environment_steps: int) -> float:
    """Find the part of the moves that is random after so many environment steps of all ranks."""
    floor = min(settings.epsilon_min, settings.epsilon)
    return max(floor, settings.epsilon * settings.epsilon_speed**environment_steps)


def rates_at(settings: argparse.Namespace, episode: int) -> tuple[float, float]:
    """Find the learning rates of actor and critic after so many episodes of all ranks. Takes resolved settings."""
    progress = min(1.0, episode / settings.episodes)
    left = 1 - progress * (1 - settings.lr_end)
    return settings.actor_lr * left, settings.critic_lr * left


def describe(settings: argparse.Namespace) -> str:
    """Describe what a run is going to do, in a few lines for its start. Takes resolved settings."""
    s = settings
    ranks = settings.world_size
    # steps of all boards together: one more per episode, to start anew, and the first, part
    # episodes are not counted
    length = s.episode_length
    board_steps = _round_up(math.ceil(s.episodes / s.boards_global * (length + 1) + length), ROUND)
    steps = board_steps * s.updates
    rows = {
        "ranks": f"{ranks}",
        "episodes": f"{s.episodes:,} in all, {s.episodes / ranks:,.10g} per rank, of {s.episode_length} steps",
        "boards": f"{s.boards_global:,} at once, {s.boards_per_rank:,} per rank",
        "batch": f"{s.batch_global:,} rows per optimiser step, {s.batch_per_rank:,} per rank",
        "learning rates": f"{_scaled(s.a_lr, s.actor_lr)} (actor), {_scaled(s.c_lr, s.critic_lr)} (critic), "
        f"scaling {s.lr_scaling}",
        "environment steps": f"some {board_steps * s.boards_global * length // (length + 1):,} in all",
        "optimiser steps": f"some {steps:,}, each of all ranks together: {s.updates} per step of all boards",
        "samples": f"some {steps * s.batch_global:,} rows drawn from the replays in all",
        "models": f"saved every {s.save_every:,} episodes in all, as number {s.save_interval:,} and its multiples",
        "epsilon": _describe_epsilon(s),
        "opponents": _describe_opponents(s),
    }
    return "\n".join(f"{name:<18}  {value}" for name, value in rows.items())


def cautions(settings: argparse.Namespace) -> list[str]:
    """Name what a user may not have meant, a line each. Takes resolved settings."""
    lines = []
    if settings.episodes < settings.boards_global:
        lines.append(
            f"{settings.boards_global:,} boards at once play more than the {settings.episodes:,} episodes of the run: "
            "lower --boards"
        )
    if settings.opponent is not None and settings.opponent_difficulty_strategy != "fixed":
        lines.append(
            f"--opponent {settings.opponent} does nothing: whom to play follows the strategy "
            f"{settings.opponent_difficulty_strategy}; add --opponent_difficulty_strategy fixed"
        )
    if settings.enable_opponent_evasion and settings.evasion_start > settings.episodes:
        lines.append(
            f"the evasive opponent is never met: it comes with episode {settings.evasion_start:,}, the run ends with "
            f"{settings.episodes:,}; pass a part of the run, as in --opponent_evasion_start_episode 0.8"
        )
    return lines


def _describe_epsilon(s: argparse.Namespace) -> str:
    floor = min(s.epsilon_min, s.epsilon)
    text = f"{s.epsilon:g} x {s.epsilon_speed:.10g} per environment step, not below {floor:g}"
    if not (0 < floor < s.epsilon and 0 < s.epsilon_speed < 1):
        return text
    steps = math.ceil(math.log(floor / s.epsilon) / math.log(s.epsilon_speed))
    return f"{text}: after {steps:,}, some {steps // s.episode_length:,} episodes"


def _describe_opponents(s: argparse.Namespace) -> str:
    strategy = s.opponent_difficulty_strategy
    numbers = range(1, s.episodes + 1)
    if strategy == LEAGUE:
        text = "the ladder and past selves, each as often as it wins"
    elif strategy == "fixed":
        opponent = OPPONENT if s.opponent is None else s.opponent
        text = f"{opponent}, all the time"
    else:
        starts = []
        for level in range(1, 5):
            first = bisect_left(numbers, level, key=lambda e: difficulty(strategy, e, s.episodes))
            starts.append(f"{numbers[first]:,}")
        text = f"{strategy}: level 1, 2, 3, 4 from episode {', '.join(starts)}"
    if s.enable_opponent_evasion:
        text += f"; {EVASIVE} from {s.evasion_start:,}"
    return text


def _scaled(base: float, lr: float) -> str:
    return f"{base:g}" if lr == base else f"{base:g} -> {lr:g}"


def _round_up(count: int, ranks: int) -> int:
    return -(-count // ranks) * ranks
