"""Trains three snakes to beat three others, on one process or on any number of ranks.

From the folder above, on one process; on two; with a public guide's settings; and going on with the latest run::

    python rl_trainer/main.py
    torchrun --nproc_per_node=2 rl_trainer/main_ddp.py
    ./train_ddp.sh --preset guide-c
    ./train_ddp.sh --resume

What to expect: README.md, beside `train_ddp.sh`, has the measured results. Ctrl-C saves, and ends all ranks.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import logging
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

sys.path.insert(0, str(Path(__file__).parents[1]))

from snakes import opponents, runs
from snakes.collector import Collector
from snakes.ddpg import DDPG
from snakes.evaluation import Result, play_games
from snakes.networks import Actor, Critic, load_weights
from snakes.plan import (
    ROUND,
    cautions,
    describe,
    epsilon_at,
    go_on,
    model_name,
    opponent_at,
    resolve,
    schedule_change,
)
from snakes.policy import Policy
from snakes.settings import read_settings

import ddpkit

log = logging.getLogger("snakes")
EVALUATION_SEED = 2**31  # evaluations play games of their own, the same ones each time
COUNTERS = ("episodes", "environment_steps", "optimiser_steps", "samples")


def prepare(world_size: int) -> argparse.Namespace | int:
    """Reads the settings and finds or makes the run's folder; after a bad one, says so and returns the exit status."""
    try:
        settings = read_settings()
        if settings.resume:
            folder = runs.find_run(settings.resume, settings.runs_folder, "checkpoints/latest")
            saved = runs.read_config(folder)
            settings = read_settings(saved=go_on(saved, world_size))
            if not (folder / "checkpoints" / "latest").is_file():
                raise ValueError(
                    f"there is no checkpoint in {folder} to go on with: name another run, or start a new one"
                )
            if settings.hidden != saved["hidden"]:
                raise ValueError(
                    f"{folder} goes on with --hidden {saved['hidden']}, not {settings.hidden}: start a new run"
                )
        settings = resolve(settings, world_size)
        replay = make_collector(settings, 0, 0).replay
        replay.ready(settings.batch_per_rank)  # raises, as the line before, if it never can be
        if settings.load_model:
            run, episode = settings.load_model_run or "latest", settings.load_model_run_episode
            settings.models = runs.find_models(run, episode, settings.runs_folder)
            actor = settings.models[0]
            if episode and actor.stem != f"actor_{episode}":
                log.warning("warning: there is no actor_%d.pth, the last one before it is %s", episode, actor)
            for network, path in zip((Actor(settings.hidden), Critic(settings.hidden)), settings.models, strict=True):
                load_weights(network, path)  # which says so if they do not fit
        settings.folder = folder if settings.resume else runs.new_run(settings.runs_folder)
        runs.save_json(settings.folder / "config.json", vars(settings))
        settings.saved = saved if settings.resume else None
        return settings
    except SystemExit as end:  # argparse has helped
        return end.code
    except (ValueError, OSError, MemoryError) as error:
        print(f"main.py: error: {error}", file=sys.stderr)
        return 2


def main(settings: argparse.Namespace, job: ddpkit.Context, stopping: Stop) -> None:
    log.info("\n%s\n\nwriting to %s\n", describe(settings), settings.folder)
    for caution in cautions(settings) if ddpkit.is_main_process() else ():
        log.warning("warning: %s", caution)
    keep_freed_memory()
    clock = Clock()

    ddpkit.seed_everything(settings.seed)
    lrs = {"a_lr": settings.actor_lr, "c_lr": settings.critic_lr}
    agent = DDPG(job.device, hidden=settings.hidden, **lrs, tau=settings.tau)
    parts = {"networks": agent.networks, "targets": agent.targets, "optimizer": agent.optimizer}
    checkpoints = ddpkit.Checkpointer(settings.folder / "checkpoints", keep=2)
    total = Counter(dict.fromkeys(COUNTERS, 0))
    best, judges = (-1.0, 0.0), [settings.eval_opponent, settings.eval_games]
    if settings.resume:
        saved = checkpoints.load_latest(**parts)
        for group, lr in zip(agent.optimizer.param_groups, lrs.values(), strict=True):
            group["lr"] = lr  # which may be another one now
        total = Counter(saved["total"])
        best = tuple(saved["best"]) if saved["judges"] == judges else best
        moved = f", saved by {saved['ranks']} rank(s) and now on {job.world_size}" * (saved["ranks"] != job.world_size)
        log.info("resumed after episode %d%s; boards and replay start anew", total["episodes"], moved)
        change = schedule_change(settings, settings.saved, total["episodes"])
        if change and ddpkit.is_main_process():
            log.warning("warning: %s", change)
    elif settings.load_model:
        agent.load(*settings.models)
        log.info("begins with %s and its critic", settings.models[0])

    log.info("compiling what is not in Numba's cache yet; the first time that takes half a minute")
    with ddpkit.main_process_first(local=True):
        warm_up()
    collector = make_collector(settings, job.rank, total["environment_steps"])
    rng = np.random.default_rng(ddpkit.sample_seed(settings.seed, 2 + job.rank, total["environment_steps"]))
    exchange = clock.timed("exchange", ddpkit.averaging)

    writer = SummaryWriter(settings.folder, purge_step=total["episodes"] + 1) if ddpkit.is_main_process() else None
    bar = tqdm(total=settings.episodes, initial=total["episodes"], unit="episode", disable=None if writer else True)
    news, before = Counter(), Counter(total)  # news: sums over all ranks since the last report
    start, stop = time.monotonic(), total["episodes"] >= settings.episodes
    stopping.later = True
    while not stop:
        episode, epsilon = total["episodes"], epsilon_at(settings, total["environment_steps"])
        opponent = opponent_at(settings, episode + 1)
        sums, losses = Counter(updates=0), torch.zeros(2, device=job.device)
        with ExitStack() as step:  # the last one; its gradients travel while the boards play on
            for _ in range(ROUND):
                with clock("play"):
                    sums.update(collector.play(agent.actor, opponents.get(opponent), epsilon))
                for _ in range(settings.updates if collector.replay.ready(settings.batch_per_rank) else 0):
                    with clock("sample"):
                        batch = collector.replay.sample(settings.batch_per_rank, settings.gamma, rng, job.device)
                    with clock("update"):
                        step.close()
                        losses += torch.stack(step.enter_context(agent.update(batch, exchange)))
                    sums["updates"] += 1
        sums["a_loss"], sums["c_loss"] = losses.tolist()

        sums = Counter(ddpkit.all_reduce(dict(sums)))
        steps = sums["updates"] // job.world_size  # a step is one of all ranks together
        total.update({name: sums[name] for name in ("episodes", "environment_steps")})
        total.update(optimiser_steps=steps, samples=steps * settings.batch_global)
        news.update(sums)
        finished = total["episodes"] >= settings.episodes
        late = settings.time_limit is not None and time.monotonic() - start > settings.time_limit
        stop = ddpkit.stop_together(finished or late or stopping.asked is not None)
        bar.update(total["episodes"] - episode)

        intervals = {"log": settings.log_interval, "eval": settings.eval_interval, "save": settings.save_every}
        due = {what for what, n in intervals.items() if finished or total["episodes"] // n > episode // n}
        if "log" in due and news["episodes"]:
            report(writer, total, news, epsilon, opponent)
            news.clear()
        if "eval" in due:
            with clock("evaluate"):
                result = evaluate(agent, settings, job)
            log.info("evaluation after episode %d, against %s: %s", total["episodes"], settings.eval_opponent, result)
            if writer:
                writer.add_scalar("evaluation/win_rate", result.win_rate, total["episodes"])
                writer.add_scalar("evaluation/score", result.scores[0] - result.scores[1], total["episodes"])
            standing = (result.win_rate, result.scores[0] - result.scores[1])
            if standing > best:
                best = standing
                ddpkit.run_on_main(save_models, settings.folder, "best", agent)
        if stop or "save" in due:
            with clock("save"):
                ddpkit.check_replicas(nn.ModuleList([agent.networks, agent.targets]), agent.optimizer)
                ddpkit.run_on_main(save_models, settings.folder, model_name(settings, total["episodes"], stop), agent)
                state = {"total": dict(total), "best": list(best), "judges": judges, "ranks": job.world_size}
                checkpoints.save(total["optimiser_steps"], **parts, **state)
    bar.close()
    summarize(settings, job, total, before, clock, time.monotonic() - start)


def keep_freed_memory() -> None:
    """Has the C library keep what a step frees for the next one.

    Given back to the system and taken again it costs a page fault per 4 KiB: a tenth of a rank's time, now on this one,
    now on that one, and the others wait.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc has it
    for option, size in ((-1, 2**30), (-3, 2**25)) if mallopt else ():  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD's maximum
        mallopt(option, size)


def make_collector(settings: argparse.Namespace, rank: int, environment_steps: int) -> Collector:
    """The boards of a rank, which begin other games than those that the run began with before."""
    return Collector(
        range(rank * settings.boards_per_rank, (rank + 1) * settings.boards_per_rank),
        settings.boards_global,
        ddpkit.sample_seed(settings.seed, 1, environment_steps),
        episode_length=settings.episode_length,
        transitions=settings.buffer_size,
    )


def warm_up() -> None:
    """Runs what Numba compiles once, so that it is in the cache."""
    agent = DDPG(torch.device("cpu"), hidden=4, a_lr=1.0, c_lr=1.0, tau=1.0)
    collector = Collector(range(2), 2, 0, episode_length=9, transitions=60)
    for player in opponents.OPPONENTS:
        collector.play(agent.actor, opponents.get(player), 0.5)
    collector.replay.sample(2, 0.9, np.random.default_rng(0), torch.device("cpu"))


def save_models(folder: Path, name: int | str, agent: DDPG) -> None:
    runs.save_models(folder, name, agent.actor.state_dict(), agent.critic.state_dict())


def evaluate(agent: DDPG, settings: argparse.Namespace, job: ddpkit.Context) -> Result:
    """Plays the evaluation's games, of which every rank takes a share. Collective."""
    share = np.array_split(np.arange(settings.eval_games), job.world_size)[job.rank]
    first = int(share[0]) if len(share) else 0
    opponent = opponents.get(settings.eval_opponent)
    mine = play_games(Policy(agent.actor), opponent, len(share), seed=EVALUATION_SEED, first=first)
    return Result(*ddpkit.all_reduce(dataclasses.astuple(mine)))


def report(writer: SummaryWriter | None, total: Counter, news: Counter, epsilon: float, opponent: str | int) -> None:
    """Says how it goes: means over the episodes since the last report, of all ranks."""
    episode, episodes, updates = total["episodes"], news["episodes"], max(news["updates"], 1)
    snakes = {name: news[name] / episodes for name in ("snake_1", "snake_2", "snake_3")}
    reward, losses = sum(snakes.values()), {"actor": news["a_loss"] / updates, "critic": news["c_loss"] / updates}
    rates = {"win_rate": news["wins"] / episodes, "opponent": news["opponent"] / episodes}
    rates["deaths"] = news["deaths"] / news["environment_steps"] * 200
    log.info(
        f"[Episode {episode:05d}] total_reward: {reward:.1f} epsilon: {epsilon:.2f} [v3.0] difficulty: {opponent}\n"
        f"\t{' '.join(f'{name}: {value:.1f}' for name, value in snakes.items())}\n"
        f"\ta_loss {losses['actor']:.3f} c_loss {losses['critic']:.3f}\n"
        f"\twin_rate {rates['win_rate']:.2f} opponent_reward {rates['opponent']:.1f}"
        f" environment_steps {total['environment_steps']} samples {total['samples']}"
        f" optimiser_steps {total['optimiser_steps']}"
    )
    if writer:
        progress = {"epsilon": epsilon} | {name: total[name] for name in COUNTERS if name != "episodes"}
        tags = {"reward": snakes | {"total": reward}, "loss": losses, "play": rates, "progress": progress}
        for tag, values in tags.items():
            for name, value in values.items():
                writer.add_scalar(f"{tag}/{name}", value, episode)
        writer.flush()


def summarize(
    settings: argparse.Namespace, job: ddpkit.Context, total: Counter, before: Counter, clock: Clock, seconds: float
) -> None:
    """Says where the time went and how much memory each rank took, and leaves it in `summary.json`. Collective."""
    clock["update"] -= clock["exchange"]
    memory = ddpkit.all_gather_object(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    shares = {part: clock[part] / seconds for part in ("play", "sample", "update", "exchange", "evaluate", "save")}
    speeds = {name: (total[name] - before[name]) / seconds for name in COUNTERS}
    summary = {"ranks": job.world_size, "seconds": seconds, "total": dict(total), "per_second": speeds}
    summary |= {"share_of_time": shares, "memory_mib_by_rank": memory}
    log.info(
        "%s after %d episodes and %.0f s, %.1f episodes/s\n\ttime: %s\n\tmemory: %.0f MiB on the rank that took most",
        "done" if total["episodes"] >= settings.episodes else "stopped (go on with --resume)",
        total["episodes"],
        seconds,
        speeds["episodes"],
        ", ".join(f"{part} {share:.0%}" for part, share in shares.items()),
        max(memory),
    )
    if ddpkit.is_main_process() and total != before:
        runs.save_summary(settings.folder, summary)


class Clock(Counter):
    """Seconds spent in each part of the program."""

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self[part] += time.perf_counter() - start

    def timed(self, part: str, manager: Callable[..., AbstractContextManager]) -> Callable[..., AbstractContextManager]:
        """`manager`, with the seconds that entering and leaving take counted to `part`."""

        @contextmanager
        def run(*args: object) -> Iterator[None]:
            with ExitStack() as stack:
                with self(part):
                    stack.enter_context(manager(*args))
                yield
                with self(part):
                    stack.close()

        return run


class Stop:
    """What Ctrl-C and a scheduler's SIGTERM do: they end the program, and `later` on ask it to save and end.

    One more, seconds after the first, ends it in any case; the terminal and torchrun may both send the first one.
    """

    def __init__(self) -> None:
        self.later, self.asked = False, None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.stop)

    def stop(self, number: int, frame: object) -> None:
        if not self.later or (self.asked is not None and time.monotonic() - self.asked > 5):
            raise SystemExit(128 + number)
        self.asked = time.monotonic() if self.asked is None else self.asked


if __name__ == "__main__":
    handler = logging.StreamHandler()
    handler.addFilter(ddpkit.RankFilter())  # the main process speaks for all; warnings come from every rank
    logging.basicConfig(format="%(message)s", level=logging.INFO, handlers=[handler])
    stop = Stop()
    with ddpkit.distributed(num_threads=1) as context, logging_redirect_tqdm():
        outcome = ddpkit.run_on_main(prepare, context.world_size)
        try:
            if not isinstance(outcome, int):
                main(outcome, context, stop)
                outcome = 0
        except ddpkit.CheckpointError as error:  # on every rank
            outcome = 2
            if ddpkit.is_main_process():
                print(f"main.py: error: {error}", file=sys.stderr)
    sys.exit(outcome)
