"""Train a small GPT to write like Python's manual: on one process, or on any number of ranks with DDP or FSDP2.

The text is that of Python's `help()` pages, byte by byte; the last tenth is for validation. On one process; on two that
each hold the model, or a part of every tensor; and with the same bits on any number::

    python examples/gpt.py
    torchrun --nproc_per_node=2 examples/gpt.py
    torchrun --nproc_per_node=2 examples/gpt.py --parallel fsdp
    torchrun --nproc_per_node=3 examples/gpt.py --deterministic

After Ctrl-C, or a scheduler's signal to any rank, all ranks save and stop after the same step. With `--resume` an
interrupted run resumes in the middle of its epoch, also on another number of ranks and from DDP to FSDP2 or back. What
to expect: after 2,188 steps, 3 minutes on a CPU core, a validation loss of 1.32 nats per byte, equal up to rounding on
any number of ranks, and text in the manual's layout with many real words.
"""

from __future__ import annotations

import argparse
import logging
import math
import sys
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ddpkit

log = logging.getLogger("gpt")


def read_settings() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("--parallel", default="ddp", choices=["ddp", "fsdp"], help="replicate the model on each rank, or shard it")
    add("--layers", type=int, default=4, help="blocks of attention and MLP")
    add("--width", type=int, default=128, help="features per byte, 32 for each attention head")
    add("--context", type=int, default=64, help="bytes that the model sees at a time")
    add("--epochs", type=int, default=4, help="passes over the training text")
    add("--batch-size", type=int, default=12, help="windows of text per optimiser step, over all ranks")
    add("--accumulate", type=int, default=1, help="micro-batches per optimiser step")
    add("--lr", type=float, default=3e-3, help="learning rate after the warm-up; then a cosine to a tenth of it")
    add("--warm-up", type=int, default=100, help="optimiser steps until the learning rate is reached")
    add("--deterministic", action="store_true", help="the same bits on any number of ranks: 6 micro-batches a step")
    add("--bf16", action="store_true", help="multiply matrices in bfloat16")
    add("--seed", type=int, default=0, help="of the weights, the order of the windows and the generated text")
    add("--folder", type=Path, default=Path("runs/gpt"), help="for checkpoints")
    add("--log-every", type=int, default=100, help="optimiser steps between lines with the loss")
    add("--save-every", type=int, default=500, help="optimiser steps between checkpoints")
    add("--stop-after", type=int, help="optimiser step after which to save and stop, before a time limit for example")
    add("--resume", action="store_true", help="resume from the last checkpoint in the folder, if there is one")
    add("--generate", type=int, default=400, help="bytes of text to generate at the end")
    return parser.parse_args()


def load_data(context: int) -> tuple[Tensor, Tensor]:
    """Return the training and validation set: windows of `context` bytes and the next one."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    data = torch.tensor(list(text.encode()))
    windows = data.unfold(0, context + 1, context)
    split = len(windows) * 9 // 10
    return windows[:split], windows[split:]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:  # (batch, length, width)
        parts = self.query_key_value(self.attention_norm(x)).unflatten(2, (3, -1, 32))
        query, key, value = parts.permute(2, 0, 3, 1, 4)  # each (batch, heads, length, 32)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, args.width)
        self.positions = nn.Parameter(torch.empty(args.context, args.width))
        self.blocks = nn.ModuleList(Block(args.width) for _ in range(args.layers))
        self.norm = nn.LayerNorm(args.width)
        self.head = nn.Linear(args.width, 256)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, text: Tensor) -> Tensor:  # from (batch, length) to (batch, length, 256)
        x = self.embedding(text) + self.positions[: text.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def distribute(model: GPT, parallel: str, job: ddpkit.Context) -> nn.Module:
    """Replicate the model on each rank, or shard every tensor and gather it block by block. Collective."""
    if parallel == "ddp" or job.backend is None:  # without a launcher there is no group to shard over
        return ddpkit.wrap_model(model)
    mesh = init_device_mesh(job.device.type, (job.world_size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def mean_loss(model: nn.Module, windows: Tensor, args: argparse.Namespace) -> Tensor:
    """Return the mean loss, in nats, of the predictions after each byte."""
    windows = windows.to(ddpkit.get_device())
    with torch.autocast(windows.device.type, torch.bfloat16, enabled=args.bf16):
        logits = model(windows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())


def train_on(model: nn.Module, windows: Tensor, weight: float, args: argparse.Namespace) -> Tensor:
    """Add the gradients of the weighted mean loss; return that loss."""
    loss = mean_loss(model, windows, args) * weight
    loss.backward()
    return loss.detach()


@torch.no_grad()
def validate(model: nn.Module, data: Tensor, args: argparse.Namespace) -> float:
    """Return the mean loss over all bytes, of which each rank counts its share once. Collective."""
    # a loader for training, padded: under FSDP2 all ranks need the same number of forwards
    loader = ddpkit.make_loader(data, global_batch_size=args.batch_size, shuffle=False)
    losses = [mean_loss(model, windows, args).item() * loader.samples for windows in loader]
    return ddpkit.all_reduce(sum(losses)) / len(data)


@torch.no_grad()
def generate(model: nn.Module, args: argparse.Namespace) -> str:
    """Sample one byte after another; all ranks draw the same. Collective."""
    generator = torch.Generator().manual_seed(args.seed)
    text = torch.tensor([list(b"The ")])
    for _ in range(args.generate):
        logits = model(text[:, -args.context :].to(ddpkit.get_device()))
        chances = torch.softmax(logits[0, -1].cpu() / 0.8, dim=0)  # temperature 0.8
        drawn = torch.multinomial(chances, 1, generator=generator)
        text = torch.cat([text, drawn[None]], dim=1)
    return bytes(text[0].tolist()).decode(errors="replace")


def main(args: argparse.Namespace, job: ddpkit.Context, stop: ddpkit.Stop) -> None:
    train, valid = load_data(args.context)
    if args.deterministic:
        loader = ddpkit.make_micro_batch_loader(train, args.batch_size, args.batch_size // 6, seed=args.seed)
    else:
        loader = ddpkit.make_loader(
            train, global_batch_size=args.batch_size, accumulation=args.accumulate, seed=args.seed
        )
    steps = args.epochs * loader.steps_per_epoch

    ddpkit.seed_everything(args.seed)  # equal weights on any number of ranks
    model = distribute(GPT(args), args.parallel, job)
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, betas=(0.9, 0.99))

    def factor(step: int) -> float:
        cosine = math.cos(math.pi * step / steps)
        return ddpkit.warmup_factor(step + 1, args.warm_up) * (0.55 + 0.45 * cosine)

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    checkpoints = ddpkit.Checkpointer(args.folder)
    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "loader": loader}
    saved = checkpoints.load_latest(**state) if args.resume else None
    step = saved["step"] if saved else 0
    log.info("training from step %d to %d", step, steps)

    loss = torch.zeros((), device=job.device)  # this rank's part of the step's mean
    for epoch in loader.epochs(args.epochs):
        for i, batch in enumerate(loader):
            if args.deterministic:
                with ddpkit.exact_gradients(batch, model) as micro_batches:
                    for windows in micro_batches:
                        loss += train_on(model, windows, len(windows) / batch.global_batch_size, args)
            else:
                with ddpkit.accumulate(model, i, args.accumulate, last=i + 1 == len(loader)) as complete:
                    loss += train_on(model, batch, loader.weight, args) / job.world_size
                if not complete:
                    continue
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            step += 1
            if step % args.log_every == 0:
                log.info("step %d: loss %.4f", step, ddpkit.all_reduce(loss.item()))
            loss = torch.zeros_like(loss)
            leaves = stop.now() or step == args.stop_after
            if leaves or step % args.save_every == 0 or step == steps:
                checkpoints.save(step, **state)
            if leaves:
                log.info("stopped after step %d; resume with --resume", step)
                return
        log.info("epoch %d: validation loss %.4f", epoch, validate(model, valid, args))
    log.info("%s", generate(model, args))


if __name__ == "__main__":
    handler = logging.StreamHandler()
    handler.addFilter(ddpkit.RankFilter())  # the main process speaks for all; warnings come from every rank
    logging.basicConfig(format="%(message)s", level=logging.INFO, handlers=[handler])
    settings = read_settings()
    threads = 1 if settings.deterministic else None  # the number of threads changes the bits
    with ddpkit.distributed(num_threads=threads) as context, ddpkit.stopping() as stop:
        main(settings, context, stop)
    sys.exit(stop.exit_code)
