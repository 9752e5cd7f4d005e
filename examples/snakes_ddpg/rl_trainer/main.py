"""Train three snakes to beat three others, on one process or on any number of ranks.

From the folder above, on one process; on two; with a public guide's settings; going on with a run::

    python rl_trainer/main.py
    torchrun --nproc_per_node=2 rl_trainer/main_ddp.py
    ./train_ddp.sh --preset guide-c
    ./train_ddp.sh --resume

What to expect: README.md, beside `train_ddp.sh`, has the measured results. Ctrl-C saves, and ends all ranks.

`main()` is the program. A step of training is three calls in it: `play()` and `sample()` of `snakes/collector.py`, and
the update of `snakes/ddpg.py`, which is started, and finished one step of the boards later.
"""

import argparse
import logging
import resource
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

import numpy as np
import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[2]))  # where `shared` is, which all trainers share
sys.path.insert(0, str(Path(__file__).parents[1]))

from shared.boards import Boards
from shared.program import hides_bar, one_message, user_error
from snakes import opponents, runs
from snakes.collector import Collector
from snakes.ddpg import DDPG, Actor, Critic, Policy, load_network, uses_bfloat16
from snakes.evaluation import Result, play_on_all_ranks
from snakes.settings import (
    MIXED,
    ROUND,
    describe,
    epsilon_at,
    go_on,
    model_name,
    opponent_at,
    read_settings,
    resolve,
    suspect,
)

import ddpkit

log = logging.getLogger("snakes")
EVALUATION_SEED = 2**31  # evaluations play games of their own, the same ones each time
LEARNT = 1000  # episodes after which any run that learns beats greedy now and then
COUNTERS = ("episodes", "environment_steps", "optimiser_steps", "samples")


@user_error("cannot start", ValueError, OSError, MemoryError)
def prepare(settings: argparse.Namespace, world_size: int) -> argparse.Namespace:
    """Find or make the run's folder, and return the settings with it, resolved."""
    if settings.resume:
        folder = runs.find_run(settings.resume, settings.runs_folder, "checkpoints/latest")
        saved = runs.read_config(folder)
        settings = read_settings(saved=go_on(saved, world_size))
        if not (folder / "checkpoints" / "latest").is_file():
            raise ValueError(f"there is no checkpoint in {folder} to go on with: name another run, or start a new one")
        if settings.hidden != saved["hidden"]:
            raise ValueError(
                f"{folder} goes on with --hidden {saved['hidden']}, not {settings.hidden}: start a new run"
            )
    settings = resolve(settings, world_size)
    make_collector(settings, 0, 0).replay.ready(settings.batch_per_rank)  # raises if it never can be
    if settings.load_model:
        settings.models = find_weights(settings)
    if not settings.resume:
        folder = runs.new_run(settings.runs_folder)
    settings.folder = folder
    runs.save_json(folder / "config.json", vars(settings))
    if settings.enable_opponent_evasion and settings.evasion_start > settings.episodes:
        log.warning(
            f"warning: the evasive opponent is never met: it comes with episode {settings.evasion_start:,}, the run "
            f"ends with {settings.episodes:,}; pass a part of the run, as in --opponent_evasion_start_episode 0.8"
        )
    return settings


def find_weights(settings: argparse.Namespace) -> list[Path]:
    """Find the files of the actor and the critic to begin with; raise a ValueError if they do not fit."""
    folder = runs.find_run(settings.load_model_run or "latest", settings.runs_folder, runs.ACTORS)
    episode = settings.load_model_run_episode
    if episode:
        saved = [name for name in runs.list_models(folder) if isinstance(name, int) and name <= episode]
        if saved and saved[-1] != episode:
            log.warning(f"warning: there is no model of episode {episode}, the last one before it is {saved[-1]}")
            episode = saved[-1]
    actor = runs.find_model(folder, episode, but="distilled")
    critic = runs.critic_of(actor)
    load_network(Actor, actor, settings.hidden)
    load_network(Critic, critic, settings.hidden)
    return [actor, critic]


def main(settings: argparse.Namespace, job: ddpkit.Context, stopping: ddpkit.Stop) -> None:
    """Train until the run's end, or a signal. Collective."""
    settings = ddpkit.run_on_main(prepare, settings, job.world_size)
    log.info("\n%s\n\nwriting to %s\n", describe(settings), settings.folder)

    # The agent, and how far it has come: counts over all ranks; its standing when it was best
    ddpkit.seed_everything(settings.seed)
    agent = DDPG(
        job.device,
        hidden=settings.hidden,
        a_lr=settings.actor_lr,
        c_lr=settings.critic_lr,
        gamma=settings.gamma,
        tau=settings.tau,
        bfloat16=uses_bfloat16(settings.precision, job.device),
    )
    checkpoints = ddpkit.Checkpointer(settings.folder / "checkpoints", keep=2)
    total = Counter(dict.fromkeys(COUNTERS, 0))
    best = -1.0
    if settings.resume:
        saved = checkpoints.load_latest(**agent.parts)
        total = Counter(saved["total"])
        best = saved["best"]
        ranks = f"saved by {saved['ranks']} rank(s) and now on {settings.world_size}"
        log.info("resumed after episode %d, %s; boards and replay begin empty", total["episodes"], ranks)
    elif settings.load_model:
        agent.load(*settings.models)
        log.info("begins with %s and its critic", settings.models[0])
    for group, rate in zip(agent.optimizer.param_groups, (settings.actor_lr, settings.critic_lr), strict=True):
        group["lr"] = rate  # a checkpoint has brought that of its run

    # This rank's boards with their replay
    log.info("compiling what is not in Numba's cache yet; the first time that takes half a minute")
    with ddpkit.main_process_first(local=True):
        warm_up()
    collector = make_collector(settings, job.rank, total["environment_steps"])
    replay = collector.replay
    seed = ddpkit.sample_seed(settings.seed, 2 + job.rank, total["environment_steps"])
    rng = np.random.default_rng(seed)  # draws this rank's batches

    curves = Boards(total["episodes"], settings.folder, wandb=None)
    bar = tqdm(total=settings.episodes, initial=total["episodes"], unit="episode", disable=hides_bar())
    news = Counter()  # sums over all ranks since the last report
    before = Counter(total)
    start = time.monotonic()
    stop = total["episodes"] >= settings.episodes
    while not stop:
        episode = total["episodes"]
        epsilon = epsilon_at(settings, total["environment_steps"])
        opponent = opponent_at(settings, episode + 1)
        names = opponents.LADDER if opponent == MIXED else [opponent]
        players = [opponents.get(name) for name in names]

        # Train. While the gradients of an update travel, until its finish, the boards play on
        sums = Counter(updates=0)
        losses = torch.zeros(2, device=job.device)
        for _ in range(ROUND):
            sums.update(collector.play(agent.actor, players, epsilon))
            if not replay.ready(settings.batch_per_rank):
                continue
            batch = replay.sample(settings.batch_per_rank, rng, job.device)
            agent.finish_update()
            losses += agent.start_update(batch)
            sums["updates"] += 1
            if stopping.now():
                break
        agent.finish_update()
        sums["a_loss"], sums["c_loss"] = losses.tolist()

        # Count over all ranks, which so agree on what comes next
        sums = Counter(ddpkit.all_reduce(dict(sums)))
        steps = sums["updates"] // job.world_size  # a step is one of all ranks together
        total["episodes"] += sums["episodes"]
        total["environment_steps"] += sums["environment_steps"]
        total["optimiser_steps"] += steps
        total["samples"] += steps * settings.batch_global
        news.update(sums)
        finished = total["episodes"] >= settings.episodes
        stop = finished or stopping.now()
        bar.update(sums["episodes"])

        if is_due(settings.log_interval, episode, total, finished) and news["episodes"]:
            report(curves, total, news, epsilon, opponent)
            news.clear()
        if episode < max(settings.episodes // 10, LEARNT) <= total["episodes"]:
            warn_of_failure(agent, settings)
        if is_due(settings.eval_interval, episode, total, finished):
            results = evaluate(agent, settings.eval_games)
            report_evaluation(curves, total, results)
            surely = mean([result.win_rate - result.standard_error for result in results.values()])
            if surely > best:
                best = surely
                ddpkit.run_on_main(runs.save_models, settings.folder, "best", *agent.states())
        if stop or is_due(settings.save_every, episode, total, finished):
            ddpkit.check_replicas([agent.networks, agent.targets], agent.optimizer)
            name = model_name(settings, total["episodes"], stop)
            ddpkit.run_on_main(runs.save_models, settings.folder, name, *agent.states())
            progress = {"total": dict(total), "best": best, "ranks": job.world_size}
            checkpoints.save(total["optimiser_steps"], **agent.parts, **progress)
    bar.close()
    summarize(settings, total, before, time.monotonic() - start)


def make_collector(settings: argparse.Namespace, rank: int, environment_steps: int) -> Collector:
    """Make the boards of a rank, which begin other games than those that the run began with before."""
    count = settings.boards_per_rank
    return Collector(
        range(rank * count, (rank + 1) * count),
        settings.boards_global,
        ddpkit.sample_seed(settings.seed, 1, environment_steps),
        episode_length=settings.episode_length,
        transitions=settings.buffer_size,
    )


def warm_up() -> None:
    """Run what Numba compiles once, so that it is in the cache."""
    agent = DDPG(torch.device("cpu"), hidden=4, a_lr=1.0, c_lr=1.0, gamma=1.0, tau=1.0)
    collector = Collector(range(2), 2, 0, episode_length=9, transitions=60)
    for player in opponents.OPPONENTS:
        collector.play(agent.actor, [opponents.get(player)], 0.5)
    collector.replay.sample(2, np.random.default_rng(0), torch.device("cpu"))


def is_due(interval: int, episode: int, total: Counter, finished: bool) -> bool:
    """Tell if a multiple of an interval lies between the last look at the episodes and this one, or the run is over."""
    return finished or total["episodes"] // interval > episode // interval


def evaluate(agent: DDPG, games: int, names: Sequence[str] = opponents.LADDER) -> dict[str, Result]:
    """Play the evaluation's games, of which every rank takes a share; return results by opponent. Collective."""
    players = {name: opponents.get(name) for name in names}
    return play_on_all_ranks(Policy(agent.actor), players, games, EVALUATION_SEED)


def warn_of_failure(agent: DDPG, settings: argparse.Namespace) -> None:
    """Say so if the agent has learnt nothing by now, and the flag that is the likely reason. Collective."""
    result = evaluate(agent, settings.eval_games, ["greedy"])["greedy"]
    if result.win_rate < 0.2 and ddpkit.is_main_process():
        log.warning(
            f"warning: this run learns next to nothing: {result.wins} of {result.games} games won against greedy; "
            f"the likely reason is {suspect(settings)}"
        )


def report(curves: Boards, total: Counter, news: Counter, epsilon: float, opponent: str | int) -> None:
    """Report means over the episodes since the last report, of all ranks."""
    episodes = news["episodes"]
    updates = max(news["updates"], 1)
    snakes = {name: news[name] / episodes for name in ("snake_1", "snake_2", "snake_3")}
    progress = {name: total[name] for name in COUNTERS if name != "episodes"}
    values = {
        **{f"reward/{name}": value for name, value in snakes.items()},
        "reward/total": sum(snakes.values()),
        "loss/actor": news["a_loss"] / updates,
        "loss/critic": news["c_loss"] / updates,
        "play/win_rate": news["wins"] / episodes,
        "play/opponent": news["opponent"] / episodes,
        "play/deaths": news["deaths"] / news["environment_steps"] * 200,
        "progress/epsilon": epsilon,
        **{f"progress/{name}": value for name, value in progress.items()},
    }
    log.info(
        f"[Episode {total['episodes']:05d}] total_reward: {values['reward/total']:.1f} epsilon: {epsilon:.2f} [v3.0] "
        f"difficulty: {opponent}\n"
        f"\t{' '.join(f'{name}: {value:.1f}' for name, value in snakes.items())}\n"
        f"\ta_loss {values['loss/actor']:.3f} c_loss {values['loss/critic']:.3f}\n"
        f"\twin_rate {values['play/win_rate']:.2f} opponent_reward {values['play/opponent']:.1f}"
        f" {' '.join(f'{name} {value}' for name, value in progress.items())}"
    )
    curves.add(values, total["episodes"])


def report_evaluation(curves: Boards, total: Counter, results: dict[str, Result]) -> None:
    """Report what came of an evaluation's games."""
    for opponent, result in results.items():
        log.info("evaluation after episode %d, against %s: %s", total["episodes"], opponent, result)
    win_rate = mean([result.win_rate for result in results.values()])
    log.info("evaluation after episode %d: mean win rate %.3f", total["episodes"], win_rate)
    values = {f"evaluation/win_rate_{opponent}": result.win_rate for opponent, result in results.items()}
    values["evaluation/win_rate"] = win_rate
    values["evaluation/score"] = mean([result.lead for result in results.values()])
    curves.add(values, total["episodes"])


def summarize(settings: argparse.Namespace, total: Counter, before: Counter, seconds: float) -> None:
    """Report the speed since `before` and the memory of each rank, also in `summary.json`. Collective."""
    summary = {
        "ranks": settings.world_size,
        "seconds": seconds,
        "total": dict(total),
        "per_second": {name: (total[name] - before[name]) / seconds for name in COUNTERS},
        "memory_mib_by_rank": ddpkit.all_gather_object(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }
    end = "done" if total["episodes"] >= settings.episodes else "stopped (go on with --resume)"
    log.info(
        f"{end} after {total['episodes']} episodes and {seconds:.0f} s, "
        f"{summary['per_second']['episodes']:.1f} episodes/s; "
        f"{max(summary['memory_mib_by_rank']):.0f} MiB of memory on the rank that took most"
    )
    if ddpkit.is_main_process() and total != before:
        runs.save_json(settings.folder / "summary.json", summary)


if __name__ == "__main__":
    with one_message(logging.Formatter("%(message)s")):
        given = read_settings()
        with ddpkit.distributed(num_threads=1) as context, ddpkit.stopping() as stop:
            main(given, context, stop)
        sys.exit(stop.exit_code)
