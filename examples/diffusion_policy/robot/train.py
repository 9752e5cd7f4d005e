"""Train a diffusion policy on demonstrations, on one process or on any number of ranks.

From the folder above, after `python -m robot.collect`: on one process; on four ranks with a learning rate for the
larger batch; on two GPUs in one process, which is slower than two ranks; and resuming a run, on any number of ranks::

    python -m robot.train load_from=config.json
    torchrun --nproc_per_node=4 -m robot.train load_from=config.json train.batch_size=128 \\
        train.optim_params.policy.learning_rate.initial=4e-4
    CUDA_VISIBLE_DEVICES=0,1 python -m robot.train
    torchrun --nproc_per_node=2 -m robot.train train.resume=runs/fetch_pick_and_place/20250101120000

README.md, in the folder above, has the measured results. `robot/config.py` lists all settings.
"""

from __future__ import annotations

import logging
import math
import pickle
import random
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from shared.boards import Boards
from shared.networks import NO_STEP, evaluating, make_equal, stop_if_not_finite, without_gradient
from shared.program import Parser, UserError, one_message, user_error
from shared.settings import nested
from torch.utils.data import default_collate
from tqdm import trange

import ddpkit

from . import checkpoints
from .config import Config, read_config
from .policy import EMA, DiffusionPolicy
from .samples import Index, make_loader, make_validation_loader, scan

log = logging.getLogger("robot")
BAD_LOSS = "a smaller learning rate or train.amp=none may help"
EPOCH = "Train Epoch %d: loss %.4f, learning rate %.2e, %.1f steps/s, %.0f samples/s"
OPTIMIZERS = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}


def main(job: ddpkit.Context, stop: ddpkit.Stop) -> None:
    config = ddpkit.run_on_main(read_config, *read_arguments())
    steps_per_epoch, epochs = config["experiment.epoch_every_n_steps"], config["train.num_epochs"]
    accumulation, max_norm = config["train.gradient_accumulation_steps"], config["train.max_grad_norm"]
    compare_every, roll_out_every = config["experiment.check_replicas_every_n_steps"], config["experiment.rollout.rate"]
    rolls_out, saves = config["experiment.rollout.enabled"], config["experiment.save.enabled"]
    resumes = config["train.resume"] is not None

    index = scan(config)
    if rolls_out:
        ddpkit.run_on_main(try_environment, index)
    plan = plan_batches(config, job.world_size)
    loader = make_loader(index, config, plan.per_rank_batch_size)
    validation = make_validation_loader(index, config, plan.per_rank_batch_size) if index.held_out else None

    ddpkit.seed_everything(config["train.seed"])
    policy = make_policy(config, index, loader.dataset[0], job.device)
    ddpkit.seed_everything(config["train.seed"], per_rank=True)  # the ranks' dropout differs; their weights do not
    model = wrap(policy, config, job.world_size, torch.cuda.device_count())
    optimizer = make_optimizer(policy, config, plan.lr)
    ema = EMA(policy, config["algo.ema.power"]) if config["algo.ema.enabled"] else None
    scaler = torch.amp.GradScaler(job.device.type, enabled=config["train.amp"] == "fp16")

    parts = {"policy": policy, "optimizer": optimizer, "scaler": scaler} | ({"ema": ema} if ema else {})
    folder, saver, saved = checkpoints.open_run(config, parts)
    log.info("%s\n\nwriting to %s, from step %d\n\n%s", plan, folder, saved["step"], index)
    log.info("%d parameters, wrapped in %s", sum(p.numel() for p in policy.parameters()), type(model).__name__)
    log.info("%s", ", ".join(ddpkit.all_gather_object(f"rank {job.rank}: {job.device} on {socket.gethostname()}")))
    boards = open_boards(folder, config, saved)
    about = {"config": nested(config), "env_id": index.env_id, "entries": vars(index.entries)}
    about |= {"picture_size": index.rendered_size, "wandb_id": boards.run_id}
    step, done = saved["step"], saved["steps_of_next"]  # of an interrupted epoch
    if done:
        place = {"epoch": saved["epoch"] + 1, "consumed": done * plan.global_batch_size}
        loader.load_state_dict(loader.state_dict() | place)
    actor = ema.policy if ema else policy
    may_roll_out = resumes and rolls_out and not done and checkpoints.due(saved["epoch"], roll_out_every, epochs)
    if may_roll_out and not ddpkit.run_on_main(checkpoints.score_path(folder, saved["epoch"]).exists):
        roll_out(actor, index, config, folder, boards, saved["epoch"])  # the run ended before these
    first_bad = torch.full((), NO_STEP, device=job.device)  # the first step whose loss here is not finite
    for epoch in range(saved["epoch"] + 1, epochs + 1):
        loader.set_epoch(epoch)
        batches, losses, begun = iter(loader), torch.zeros((), device=job.device), time.monotonic()
        begun_at, no_bar = done, None if job.rank == 0 else True
        for _ in trange(done, steps_per_epoch, desc=f"epoch {epoch}", leave=False, disable=no_bar):
            optimizer.param_groups[0]["lr"] = plan.lr * lr_factor(config, step)
            loss = backpropagate(model, batches, accumulation, scaler, job.device)
            if job.world_size > 1:
                check_all_used(policy)
            if max_norm is not None:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(policy.parameters(), max_norm)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if ema:
                ema.update(policy)
            losses += loss
            first_bad = torch.where(loss.isfinite(), first_bad, first_bad.clamp(max=step + 1))
            step, done = step + 1, done + 1
            if step % compare_every == 0:
                make_equal([policy, ema] if ema else [policy], optimizer)
            if stop.now():
                break

        stop_if_not_finite(first_bad, step, policy, BAD_LOSS)
        make_equal([policy, ema] if ema else [policy], optimizer)
        if stop.reason:
            if saves:
                path = saver.save(step, **parts, epoch=epoch - 1, steps_of_next=done, **about)
                ddpkit.run_on_main(checkpoints.copy, path, folder / "last.pth")
            break
        steps, done = done - begun_at, 0
        # a run stopped at the very end of an epoch has no loss to report when it resumes
        news = {"train/loss": ddpkit.all_reduce_mean(losses.item() / steps if steps else math.nan)}
        speed = steps / (time.monotonic() - begun)  # reading the loss above has synchronised the GPU
        news |= {"train/learning_rate": optimizer.param_groups[0]["lr"], "train/steps_per_second": speed}
        log.info(EPOCH, epoch, *news.values(), speed * plan.global_batch_size)
        if validation:
            news["validation/loss"] = validate(actor, validation, job.device)
            log.info("Epoch %d: validation loss %.4f", epoch, news["validation/loss"])
        boards.add(news, epoch)
        if saves:
            path = saver.save(step, **parts, epoch=epoch, steps_of_next=0, **about)
            ddpkit.run_on_main(checkpoints.publish, path, folder, config, epoch, news)
        if rolls_out and checkpoints.due(epoch, roll_out_every, epochs):  # after saving, as environments may fail
            roll_out(actor, index, config, folder, boards, epoch)
    boards.close()
    log.info("%s after step %d: %s", "stopped" if stop.reason else "done", step, folder)


def read_arguments() -> tuple[list[str], str | None]:
    parser = Parser(__doc__)
    parser.add_argument("--config", metavar="FILE", help="the settings, as load_from=FILE")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="single settings; robot/config.py lists them")
    given = parser.parse_intermixed_args()
    return given.settings, given.config


def try_environment(index: Index) -> None:
    """Try the environment before training starts."""
    if not index.env_id:
        raise UserError(
            "the demonstrations name no environment: set experiment.env to a gymnasium id or to module:Class, or "
            "experiment.rollout.enabled=false"
        )
    try:
        from .environments import check_environment  # imported here, as training alone needs no simulator
    except ImportError as error:
        raise UserError(
            f"{index.env_id} needs a package that is not installed ({error}): pip install -e '.[examples-robot]' in "
            "the repository, or set experiment.rollout.enabled=false"
        ) from None
    try:
        check_environment(index)
    except UserError as error:
        raise UserError(
            f"{error}: set experiment.env to another gymnasium id or module:Class, or experiment.rollout.enabled=false"
        ) from error


@user_error("train.batch_size", ValueError)
def plan_batches(config: Config, world_size: int) -> ddpkit.ScalePlan:
    """Choose the batch sizes and the learning rate."""
    return ddpkit.ScalePlan(
        config["train.batch_size"],
        config["algo.optim_params.policy.learning_rate.initial"],
        world_size,
        keep=config["train.keep_batch_size"],
        rule=config["train.lr_scaling"],
        accumulation=config["train.gradient_accumulation_steps"],
    )


def make_optimizer(policy: DiffusionPolicy, config: Config, lr: float) -> torch.optim.Optimizer:
    section = "algo.optim_params.policy."
    kind = OPTIMIZERS[config[f"{section}optimizer_type"]]
    betas, decay = tuple(config[f"{section}betas"]), config[f"{section}regularization.L2"]
    return kind(policy.parameters(), lr, betas=betas, weight_decay=decay, fused=True)


def make_policy(config: Config, index: Index, sample: dict[str, Any], device: torch.device) -> DiffusionPolicy:
    """Make the policy and try it out; a run that resumes loads its weights later. Collective."""
    policy = DiffusionPolicy(config, index.statistics, index.entries.cameras).to(device)
    policy.try_out(to_device(default_collate([sample]), device))
    if config["train.resume"] is None:
        load_encoders(policy, config)
    return policy


def load_encoders(policy: DiffusionPolicy, config: Config) -> None:
    """Load pretrained weights into each camera's ResNet, if the settings name a file."""
    key = "observation.encoder.rgb.core_kwargs.backbone_kwargs.weights"
    if config[key] is None:
        return
    with user_error(key, OSError, RuntimeError, pickle.UnpicklingError):
        weights = torch.load(config[key], map_location="cpu", weights_only=True)
    for encoder in policy.encoders:
        left = encoder.load_pretrained(weights)
    log.info("%s: unused weights: %s", config[key], ", ".join(left) or "none")


def wrap(policy: DiffusionPolicy, config: Config, world_size: int, gpus: int) -> torch.nn.Module:
    """Wrap by `train.strategy`; "auto" is DDP on several ranks and DataParallel on several GPUs of one process."""
    strategy = config["train.strategy"]
    if strategy == "auto" and world_size == 1 and gpus > 1:
        log.warning("DataParallel on %d GPUs; faster: torchrun --nproc_per_node=%d -m robot.train ...", gpus, gpus)
        strategy = "dp"
    synchronises = config["train.sync_batchnorm"]
    try:
        with user_error("train.sync_batchnorm", ValueError) if synchronises else nullcontext():
            model = ddpkit.wrap_model(policy, strategy, broadcast_buffers=False, sync_batchnorm=synchronises)
    except ddpkit.DdpkitError as error:
        if type(error) is not ddpkit.DdpkitError:  # another rank's failure, for instance
            raise
        raise UserError(f"train.strategy: {error}") from error
    return torch.compile(model) if config["train.compile"] else model


def backpropagate(
    model: torch.nn.Module,
    batches: Iterator[Any],
    accumulation: int,
    scaler: torch.amp.GradScaler,
    device: torch.device,
) -> torch.Tensor:
    """Add up the gradients of a step's batches; return their mean loss, (), on the device."""
    loss = torch.zeros((), device=device)
    for number in range(accumulation):
        batch = to_device(next(batches), device)
        with ddpkit.accumulate(model, number, accumulation):
            part = model(batch).mean() / accumulation
            scaler.scale(part).backward()
        loss += part.detach()
    return loss


def check_all_used(policy: DiffusionPolicy) -> None:
    """Raise if the loss does not depend on some weights, and name them; DDP would only give numbers."""
    if unused := without_gradient(policy):
        raise UserError(
            f"the loss does not depend on {', '.join(unused)}: on several ranks, use them in the forward pass, delete "
            "them, or freeze them with requires_grad_(False)"
        )


def lr_factor(config: Config, step: int) -> float:
    """Return the factor of the learning rate after `step` optimiser steps; there is no state to save."""
    rate, every = "algo.optim_params.policy.learning_rate.", config["experiment.epoch_every_n_steps"]
    warmup = config[f"{rate}warmup_steps"]
    if step < warmup:
        return ddpkit.warmup_factor(step + 1, warmup)
    if config[f"{rate}scheduler_type"] == "cosine":
        last = max(warmup + 1, config["train.num_epochs"] * every)
        progress = min(1.0, (step - warmup) / (last - warmup))
        return (1 + math.cos(math.pi * progress)) / 2
    if config[f"{rate}scheduler_type"] == "multistep":
        passed = sum(step >= every * epoch for epoch in config[f"{rate}epoch_schedule"])
        return config[f"{rate}decay_factor"] ** passed
    return 1.0


def to_device(batch: dict[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    return {key: value.to(device, non_blocking=True) for key, value in batch.items()}


@torch.no_grad()
def validate(policy: DiffusionPolicy, loader: Any, device: torch.device) -> float:
    """Compute the mean loss on the held-out samples, with the same noise each time. Collective."""
    loader.set_epoch(0)
    total, count = 0.0, 0
    with evaluating(policy):
        for batch in loader:
            losses = policy(to_device(batch, device))
            total += losses.double().sum().item()
            count += len(losses)
    total, count = ddpkit.all_reduce((total, count))
    return total / count


def open_boards(folder: Path, config: Config, saved: dict[str, Any]) -> Boards:
    """Open TensorBoard and Weights & Biases, as the settings say. Collective."""
    section = "experiment.logging."
    tensorboard = folder / "logs" / "tb" if config[f"{section}log_tb"] else None
    wandb = None
    if config[f"{section}log_wandb"]:
        wandb = {"project": config[f"{section}wandb_proj_name"] or "ddpkit", "name": config["experiment.name"]}
        wandb |= {"dir": folder / "logs", "config": nested(config)}
    return Boards(saved["epoch"], tensorboard, wandb, saved.get("wandb_id"))


def roll_out(policy: DiffusionPolicy, index: Index, config: Config, folder: Path, boards: Boards, epoch: int) -> None:
    """Measure success on unseen seeds, film the first of them, and keep the best model. Collective."""
    from . import drawing
    from .environments import UNSEEN, Learned, evaluate

    player, horizon, begun = Learned(policy, index.entries), config["experiment.rollout.horizon"], time.monotonic()
    episodes, size = config["experiment.rollout.n"], index.rendered_size
    saves = config["experiment.save.enabled"]
    about = f"rollouts in {index.env_id} after epoch {epoch}"
    if saves:
        about += f", which is saved (resume with train.resume={folder})"
    with user_error(about, UserError), keeping_random_state(policy.mean.device):
        score = evaluate(index.env_id, player, episodes, horizon, picture_size=size)
        log.info("Epoch %d rollouts: success %s, %.0f s", epoch, score, time.monotonic() - begun)
        if config["experiment.render_video"]:
            video = folder / "videos" / f"epoch_{epoch}"
            film = ddpkit.run_on_main(drawing.film, index.env_id, player, UNSEEN, horizon, video, size)
            if film and film.suffix == ".gif":
                boards.play({"rollout/film": film}, epoch)
    boards.add({"rollout/success_rate": score.rate}, epoch)
    if saves:
        ddpkit.run_on_main(checkpoints.keep_best, folder / "last.pth", folder, config, epoch, "success", score.rate)
    ddpkit.run_on_main(score.write, checkpoints.score_path(folder, epoch))  # marks the rollouts as done


@contextmanager
def keeping_random_state(device: torch.device) -> Iterator[None]:
    """Restore the random state after a block: the checkpoint to resume from was saved before it."""
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield
    random.setstate(states[0])
    np.random.set_state(states[1])


if __name__ == "__main__":
    with one_message():
        with ddpkit.distributed(num_threads=1) as job, ddpkit.stopping() as stop:
            main(job, stop)
        sys.exit(stop.exit_code)
