"""Distil a trained model's search into a network that plays well without it, on any number of ranks.

From the folder above, on one process or on two; the best model of a run, and any other::

    python rl_trainer/distil.py latest
    torchrun --nproc_per_node=2 rl_trainer/distil.py run3:8000

In the first round the model plays games, and its search labels every state with the values of the three ways; the
network learns their softmax. Two more learn what rivals do, and what a team gains; the search of the next rounds, and
of later games, foresees and values by them. In the next rounds the network plays, and the search labels the states that
it gets into (DAgger, Ross et al., arXiv:1011.0686); it learns from all labels so far. They are kept in files in the
run's folder. After Ctrl-C the same command goes on, on any number of ranks.

What to expect: README.md, beside `train_ddp.sh`, has the measured results.
"""

import argparse
import itertools
import logging
import sys
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[2]))  # where `shared` is, which all trainers share
sys.path.insert(0, str(Path(__file__).parents[1]))

from player.labels import Batch, Examples, mirror, play, write
from player.search import DEPTH, Search, is_distilled, load_player
from player.student import Learners, StudentPolicy
from shared.boards import Boards
from shared.program import OneLineParser, hides_bar, one_message, user_error
from snakes import runs
from snakes.ddpg import Actor, Policy, uses_bfloat16
from snakes.evaluation import play_on_all_ranks
from snakes.game import STEPS
from snakes.opponents import LADDER, OPPONENTS, Player

import ddpkit

log = logging.getLogger("snakes")
REPORT = 100  # steps between two reports, and checkpoints
WARM_UP = 100  # steps in which the learning rate rises, in each round
EVALUATION_SEED = 2**31
RIVALS = ("territory", "foresighted", "sharing")  # in the games that are labelled
VERSION = 2  # of the labels and the checkpoints
LOSSES = ("loss/divergence", "loss/rivals", "loss/value")


def read_settings() -> argparse.Namespace:
    parser = OneLineParser("Distils a model's search into a network.", argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("model", help="an actor_*.pth with its critic, a run's folder, runN, runN:EPISODE, or latest")
    add("--runs_folder", type=Path, default=runs.ROOT, help="where the runs' folders are")
    add("--rounds", type=int, default=2, help="of labelling and learning; from the second on the network plays")
    add("--games", type=int, default=600, help="of 200 steps per round, of all ranks together")
    add("--games_at_once", type=int, default=48, help="that a rank labels at once, and keeps in one file")
    add("--depth", type=int, default=DEPTH, help="steps that the search looks ahead")
    add("--epochs", type=int, default=2, help="passes over all labels so far, per round")
    add("--batch_size", type=int, default=256, help="states, of three snakes each, per step, of all ranks together")
    add("--lr", type=float, default=1e-3, help="learning rate of all networks at first; it falls to 0 in each round")
    add("--temperature", type=float, default=0.5, help="of the softmax of the search's values")
    add("--seed", type=int, default=1, help="of the weights and of all games")
    add("--eval_games", type=int, default=200, help="against each of the ladder after a round, of all ranks together")
    text = "of all but the value; auto: bfloat16 on a CPU with instructions for it"
    add("--precision", choices=("auto", "float32", "bfloat16"), default="auto", help=text)
    settings = parser.parse_args()
    for name, value in vars(settings).items():
        if isinstance(value, int | float) and not value > 0:
            parser.error(f"--{name} must be above 0, not {value}")
    return settings


@user_error("cannot start", ValueError, OSError)
def prepare(settings: argparse.Namespace) -> Path:
    """Find the model, and make the folder for its labels and checkpoints; return its file."""
    model = runs.parse(settings.model, settings.runs_folder, but="distilled")
    if is_distilled(model):
        raise ValueError(f"{model} is distilled already: name the model that it comes from")
    load_player(model, settings.depth)  # raises if it cannot search
    folder = model.parent / "distilled"
    flags = {name: value for name, value in vars(settings).items() if name not in ("model", "runs_folder")}
    flags |= {"model": model.name, "version": VERSION}
    if not (folder / "config.json").is_file():
        folder.mkdir(exist_ok=True)
        runs.save_json(folder / "config.json", flags)
    elif (began := runs.read_config(folder)).get("version") != VERSION:
        raise ValueError(f"what is in {folder} was made by another version of this program: remove that folder")
    elif began != flags:
        other = " ".join(f"--{name} {value}" for name, value in began.items() if value != flags.get(name))
        raise ValueError(f"what is in {folder} began with {other}: pass the same, or remove that folder to begin anew")
    return model


def main(settings: argparse.Namespace, job: ddpkit.Context, stop: ddpkit.Stop) -> None:
    """Label and learn, round by round, until the end or a signal. Collective."""
    model = ddpkit.run_on_main(prepare, settings)
    folder = model.parent / "distilled"
    teacher = load_player(model, settings.depth)
    bfloat16 = uses_bfloat16(settings.precision, job.device)
    nn.ModuleList([teacher.actor, teacher.rivals, teacher.value]).to(job.device)
    teacher.actor.layers.bfloat16 = teacher.rivals.layers.bfloat16 = bfloat16

    # The networks, and how far they have come
    ddpkit.seed_everything(settings.seed)
    learners = Learners().to(job.device)
    learners.rivals.layers.bfloat16 = bfloat16
    policy = StudentPolicy(learners.student, bfloat16)
    optimizer = torch.optim.AdamW(learners.parameters(), settings.lr)
    parts = {"learners": learners, "optimizer": optimizer}
    checkpoints = ddpkit.Checkpointer(folder / "checkpoints", keep=1)
    progress = checkpoints.load_latest(**parts) or {"step": 0, "round": 0, "begin": 0, "loader": None}
    total = progress["step"]
    if progress["round"] == settings.rounds:
        log.info("all rounds are done: for others, remove %s, or pass another model", folder)
    elif total:
        log.info("goes on after step %d, in round %d, on %d rank(s)", total, progress["round"] + 1, job.world_size)
    curves = Boards(total, folder, wandb=None)

    log.info("compiling what is not in Numba's cache yet; the first time that takes half a minute")
    with ddpkit.main_process_first(local=True):
        next(play(range(4), 0, policy, teacher, list(OPPONENTS.values())))

    for number in range(progress["round"], settings.rounds):
        # Label: from the second round on, the network plays, and the search relies on the two others
        mover = Policy(teacher.actor)
        if number:
            mover = policy
            teacher = Search(teacher.actor, learners.rivals, learners.value, settings.depth)
        if not make_labels(folder, number, mover, teacher, settings, job, stop):
            log.info("stopped while labelling in round %d: the same command goes on", number + 1)
            return
        files = [path for past in range(number + 1) for path in label_files(folder, past, settings)]
        examples = Examples(files, settings.temperature)
        seed = settings.seed + number
        loader = ddpkit.make_loader(examples, global_batch_size=settings.batch_size, seed=seed, collate_fn=Batch._make)
        if progress["loader"]:
            loader.load_state_dict(progress["loader"])
        begin = progress["begin"]
        steps = settings.epochs * loader.steps_per_epoch
        bar = tqdm(initial=total - begin, total=steps, unit="step", disable=hides_bar())

        # Learn from all labels so far
        sums = torch.zeros(3)
        samples = 0
        for epoch in loader.epochs(settings.epochs):
            for batch in loader:
                done = total - begin
                rate = settings.lr * ddpkit.warmup_factor(done + 1, WARM_UP) * (1 - done / steps)
                optimizer.param_groups[0]["lr"] = rate
                on_device = Batch(*(part.to(job.device) for part in mirror(batch, epoch)))
                found = losses(learners, on_device, bfloat16)
                optimizer.zero_grad()
                (found.sum() * loader.weight).backward()
                ddpkit.average_gradients(learners)
                optimizer.step()
                total += 1
                bar.update()
                sums += found.detach().cpu() * loader.samples
                samples += loader.samples

                # Report and save, now and then; after a signal to any rank, all of them save and stop
                stopped = stop.now()
                if done % REPORT == 0 or stopped:
                    sums, samples = ddpkit.all_reduce((sums, samples))
                    means = dict(zip(LOSSES, (sums / samples).tolist(), strict=True))
                    curves.add({**means, "progress/learning_rate": rate}, total)
                    text = "round %d, step %d of %d: divergence %.4f, of rivals %.4f, error of gains %.2f"
                    log.info(text, number + 1, done + 1, steps, *means.values())
                    sums = torch.zeros(3)
                    samples = 0
                    state = {"round": number, "begin": begin, "loader": loader.state_dict()}
                    checkpoints.save(total, **parts, **state)
                if stopped:
                    log.info("stopped in round %d: the same command goes on", number + 1)
                    return
        bar.close()
        ddpkit.check_replicas(learners, optimizer)
        path = ddpkit.run_on_main(save, model, teacher.actor, learners)
        progress = {"round": number + 1, "begin": total, "loader": None}
        checkpoints.save(total, **parts, **progress)
        results = play_on_all_ranks(
            policy, {name: OPPONENTS[name] for name in LADDER}, settings.eval_games, EVALUATION_SEED
        )
        for name, result in results.items():
            log.info("round %d, without search against %s: %s", number + 1, name, result)
        curves.add({f"evaluation/win_rate_{name}": result.win_rate for name, result in results.items()}, total)
        log.info("round %d of %d is done: the network is in %s", number + 1, settings.rounds, path)
    curves.close()


def label_files(folder: Path, number: int, settings: argparse.Namespace) -> list[Path]:
    """Name the files of a round's labels, by the first game of each."""
    return [folder / f"labels_{number}_{first:05d}.npz" for first in range(0, settings.games, settings.games_at_once)]


def make_labels(
    folder: Path,
    number: int,
    mover: Player,
    teacher: Search,
    settings: argparse.Namespace,
    job: ddpkit.Context,
    stop: ddpkit.Stop,
) -> bool:
    """Play the games of a round whose labels are in no file yet; return False if stopped. Collective."""
    rivals = [OPPONENTS[name] for name in RIVALS]
    seed = ddpkit.sample_seed(settings.seed, 3, number)
    files = label_files(folder, number, settings)
    left = ddpkit.broadcast([place for place, path in enumerate(files) if not path.is_file()])
    if left:
        log.info("labelling the games of round %d: %d of %d files are left", number + 1, len(left), len(files))
    bar = tqdm(total=len(left) * STEPS, unit="step", disable=hides_bar())
    for turn in range(0, len(left), job.world_size):
        mine = left[turn + job.rank : turn + job.rank + 1]
        for place in mine:
            first = place * settings.games_at_once
            games = range(first, min(first + settings.games_at_once, settings.games))
            steps = play(games, seed, mover, teacher, rivals)
        found = []
        for states in steps if mine else itertools.repeat(None, STEPS):  # as many steps on a rank that has nothing left
            found.append(states)
            bar.update(job.world_size)
            if stop.now():
                return False
        for place in mine:
            write(files[place], found)
    bar.close()
    ddpkit.barrier()
    return True


def losses(learners: Learners, batch: Batch, bfloat16: bool) -> torch.Tensor:
    """Compute the losses of the three networks, means over snakes or states: (3,).

    They are the Kullback-Leibler divergence of the student's probabilities from the goals, the cross entropy of the
    ways that rivals take, and the mean squared error of what a team gains.
    """
    with torch.autocast(batch.numbers.device.type, torch.bfloat16, enabled=bfloat16):
        ratings = learners.student(batch.pictures.flatten(0, 1), batch.numbers.flatten(0, 1))
    logarithms = ratings.float().log_softmax(-1)
    divergence = nn.functional.kl_div(logarithms, batch.goals.flatten(0, 1), reduction="batchmean")
    surprise = nn.functional.cross_entropy(learners.rivals.layers(batch.rivals).flatten(0, 1), batch.taken.flatten())
    error = nn.functional.mse_loss(learners.value(batch.later), batch.gains)
    return torch.stack([divergence, surprise, error])


def save(model: Path, actor: Actor, learners: Learners) -> Path:
    """Write the networks with the actor of the search; return the file."""
    path = model.with_name("actor_distilled.pth")
    with runs.replacing(path) as whole:
        torch.save(nn.ModuleDict({"actor": actor, "learners": learners}).state_dict(), whole)
    return path


if __name__ == "__main__":
    with one_message(logging.Formatter("%(message)s")):
        given = read_settings()
        with ddpkit.distributed(num_threads=1) as context, ddpkit.stopping() as stop:
            main(given, context, stop)
        sys.exit(stop.exit_code)
