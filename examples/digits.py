"""Train a small convolutional network to read handwritten digits, on one process or on any number of ranks.

The data are scikit-learn's 1,797 images of 8 x 8 pixels; every fifth, 360 in all, is for the test.

On one process; on two; and on two started by hand, each in its own shell::

    python examples/digits.py
    torchrun --nproc_per_node=2 examples/digits.py
    RANK=0 WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=29500 python examples/digits.py
    RANK=1 WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=29500 python examples/digits.py

After Ctrl-C, or a scheduler's signal to any rank, all ranks save and stop after the same step. With `--resume` an
interrupted run resumes in the middle of its epoch, also on another number of ranks, so torchrun may restart it. Watch
it with `tensorboard --logdir runs`::

    torchrun --nproc_per_node=2 --max-restarts=3 examples/digits.py --resume

With `--deterministic` the weights are bit-identical on any number of ranks, even if that changes during the run; the
last line is their SHA-256::

    python examples/digits.py --deterministic
    torchrun --nproc_per_node=3 examples/digits.py --deterministic

What to expect: 356 of the 360 test images (98.9 %) are correct after 20 epochs, on any number of ranks, which together
take the same batches of 96. One CPU core needs about 10 seconds, start-up included; more cores do not help so small a
task.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

import ddpkit

log = logging.getLogger("digits")


def read_settings() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("--epochs", type=int, default=20, help="passes over the training set")
    add("--batch-size", type=int, default=96, help="samples per optimiser step")
    add("--keep", default="global", choices=["global", "per_rank"], help="whose batch has that size on several ranks")
    add("--accumulate", type=int, default=1, help="micro-batches per optimiser step")
    add("--deterministic", action="store_true", help="the same bits on any number of ranks: 8 micro-batches a step")
    add("--lr", type=float, default=3e-3, help="learning rate for the batch size")
    add("--warm-up", type=float, default=1.0, help="epochs until the learning rate is reached; then it falls to 0")
    add("--seed", type=int, default=0, help="of the weights and the order of the samples")
    add("--folder", type=Path, default=Path("runs/digits"), help="for checkpoints and TensorBoard")
    add("--save-every", type=int, default=50, help="optimiser steps between checkpoints")
    add("--stop-after", type=int, help="optimiser step after which to save and stop, before a time limit for example")
    add("--resume", action="store_true", help="resume from the last checkpoint in the folder, if there is one")
    args = parser.parse_args()
    if args.deterministic and (args.keep, args.accumulate) != ("global", 1):
        parser.error("--deterministic sets a global batch and its micro-batches: remove --keep and --accumulate")
    return args


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """Return the training and test set: images of shape (1, 8, 8) in [0, 1], and labels from 0 to 9."""
    pixels, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    images = pixels.float().view(-1, 1, 8, 8) / 16
    test = torch.arange(len(labels)) % 5 == 0
    return TensorDataset(images[~test], labels[~test]), TensorDataset(images[test], labels[test])


def make_model() -> nn.Module:
    """Make a network with GroupNorm: with BatchNorm, outputs would depend on the other samples of the rank."""

    def block(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.ReLU()]

    half = nn.MaxPool2d(2)
    return nn.Sequential(*block(1, 16), *block(16, 32), half, *block(32, 32), half, nn.Flatten(), nn.Linear(128, 10))


def mean_loss(model: nn.Module, images: Tensor, labels: Tensor, job: ddpkit.Context, dtype: torch.dtype) -> Tensor:
    with torch.autocast(job.device.type, dtype, enabled=job.device.type == "cuda"):
        logits = model(images.to(job.device))
    return F.cross_entropy(logits.float(), labels.to(job.device))


@torch.no_grad()
def count_correct(model: nn.Module, loader: DataLoader, device: torch.device) -> int:
    """Count correct answers over the test set, of which every rank holds a share without padding. Collective."""
    model = ddpkit.unwrap_model(model).eval()  # ranks may differ in their number of batches, and DDP's forward may wait
    correct = [(model(images.to(device)).argmax(1).cpu() == labels).sum().item() for images, labels in loader]
    return ddpkit.all_reduce(sum(correct))


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return the SHA-256 of the weights and of the optimizer's state."""
    tensors = list(ddpkit.unwrap_model(model).state_dict().values())
    for kept in optimizer.state_dict()["state"].values():
        tensors += kept.values()
    return hashlib.sha256(b"".join(tensor.cpu().numpy().tobytes() for tensor in tensors)).hexdigest()


def main(args: argparse.Namespace, job: ddpkit.Context, stop: ddpkit.Stop) -> None:
    ranks = job.world_size if args.keep == "per_rank" else 1  # else they share one batch
    plan = ddpkit.ScalePlan(args.batch_size, args.lr, ranks, keep=args.keep, rule="sqrt", accumulation=args.accumulate)
    batch_size = plan.global_batch_size
    log.info("%d samples a step on %d rank(s), learning rate %g", batch_size, job.world_size, plan.lr)

    train, test = load_data()
    if args.deterministic:
        train_loader = ddpkit.make_micro_batch_loader(train, batch_size, batch_size // 8, seed=args.seed)
    else:
        train_loader = ddpkit.make_loader(
            train, global_batch_size=batch_size, accumulation=args.accumulate, seed=args.seed
        )
    test_loader = ddpkit.make_loader(test, 128, train=False)

    ddpkit.seed_everything(args.seed)
    model = ddpkit.wrap_model(make_model())
    optimizer = torch.optim.AdamW(model.parameters(), args.lr)
    plan.apply(optimizer)
    steps, warm_up = (round(epochs * train_loader.steps_per_epoch) for epochs in (args.epochs, args.warm_up))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: ddpkit.warmup_factor(step + 1, warm_up) * (1 - step / steps)
    )
    mixed = job.device.type == "cuda"
    dtype = torch.bfloat16 if not mixed or torch.cuda.is_bf16_supported() else torch.float16
    scaler = torch.amp.GradScaler(job.device.type, enabled=dtype == torch.float16)

    checkpoints = ddpkit.Checkpointer(args.folder)
    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "scaler": scaler, "loader": train_loader}
    saved = checkpoints.load_latest(**state) if args.resume else None
    step = saved["step"] if saved else 0
    if args.resume:
        log.info(f"resumed after step {step} of {steps}" if saved else "nothing to resume: starting from step 0")

    writer = SummaryWriter(args.folder, purge_step=step) if ddpkit.is_main_process() else None
    no_bar = None if writer else True  # None: a bar if there is a terminal
    for epoch in range(train_loader.epoch, args.epochs):
        model.train()
        loss_sum, samples = torch.zeros((), device=job.device), 0
        for i, batch in enumerate(tqdm(train_loader, f"epoch {epoch}", leave=False, disable=no_bar)):
            if args.deterministic:
                with ddpkit.exact_gradients(batch, model) as micro_batches:
                    for images, labels in micro_batches:
                        loss = mean_loss(model, images, labels, job, dtype)
                        scaler.scale(loss * len(labels) / batch.global_batch_size).backward()
                        loss_sum, samples = loss_sum + loss.detach() * len(labels), samples + len(labels)
            else:
                images, labels = batch
                with ddpkit.accumulate(model, i, args.accumulate, last=i + 1 == len(train_loader)) as complete:
                    loss = mean_loss(model, images, labels, job, dtype)
                    scaler.scale(loss * train_loader.weight).backward()
                mine = train_loader.samples
                loss_sum, samples = loss_sum + loss.detach() * mine, samples + mine
                if not complete:
                    continue
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            schedule.step()
            step += 1
            leaves = stop.now() or step == args.stop_after
            if leaves or step % args.save_every == 0 or step == steps:
                checkpoints.save(step, **state)
            if leaves:
                log.info("stopped after step %d, in epoch %d; resume with --resume", step, epoch)
                return

        loss_sum, samples = ddpkit.all_reduce((loss_sum.item(), samples))
        loss = loss_sum / samples if samples else float("nan")  # resumed at the very end of an epoch
        correct = count_correct(model, test_loader, job.device)
        log.info("epoch %d: training loss %.4f, test: %d of %d right", epoch, loss, correct, len(test))
        if writer and samples:
            writer.add_scalar("train/loss", loss, step)
            writer.add_scalar("train/learning rate", schedule.get_last_lr()[0], step)
            writer.add_scalar("test/accuracy", correct / len(test), step)
            writer.flush()
    if args.deterministic:
        log.info("SHA-256 of weights and optimizer: %s", digest(model, optimizer))


if __name__ == "__main__":
    handler = logging.StreamHandler()
    handler.addFilter(ddpkit.RankFilter())  # the main process speaks for all; warnings come from every rank
    logging.basicConfig(format="%(message)s", level=logging.INFO, handlers=[handler])
    settings = read_settings()
    # one thread: such small images would not keep a second one busy
    with ddpkit.distributed(num_threads=1) as context, ddpkit.stopping() as stop:
        main(settings, context, stop)
    sys.exit(stop.exit_code)
