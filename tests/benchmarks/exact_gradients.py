"""What gradients of the same bits on any number of ranks cost: next to adding up those of the same micro-batches.

The networks are those of `examples/digits.py` (8 micro-batches of 12 images) and `examples/gpt.py` (6 of 2 windows, of
64 bytes each). Both ways go through the same micro-batches, up to the gradients of all ranks, without the optimizer.
Plainly, backward adds up, and `average_gradients` exchanges. They take turns, so that both see the same load; times are
medians of the slowest rank, with one thread per rank.

    python tests/benchmarks/exact_gradients.py
    python tests/benchmarks/exact_gradients.py --nprocs 2 --rounds 100
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from timing import make_parser, show, take_turns
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import ddpkit

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    return example


def digits() -> tuple[nn.Module, Callable[..., Tensor], Any]:
    net = load("digits").make_model()

    def loss_of(images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(net(images), labels, reduction="sum")

    dataset = TensorDataset(torch.rand(96, 1, 8, 8), torch.arange(96) % 10)
    return net, loss_of, ddpkit.make_micro_batch_loader(dataset, 96, 12)


def gpt() -> tuple[nn.Module, Callable[..., Tensor], Any]:
    args = argparse.Namespace(layers=4, width=128, context=64)
    net = load("gpt").GPT(args)

    def loss_of(windows: Tensor) -> Tensor:
        return F.cross_entropy(net(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten(), reduction="sum")

    dataset = TensorDataset(torch.randint(256, (12, args.context + 1)))
    return net, loss_of, ddpkit.make_micro_batch_loader(dataset, 12, 2)


def measure(
    make: Callable[[], tuple[nn.Module, Callable[..., Tensor], Any]], rounds: int
) -> tuple[dict[str, float], int]:
    """The medians of a step added up plainly, and of an exact one, in seconds; and the number of parameters."""
    with ddpkit.distributed(num_threads=1):
        ddpkit.seed_everything(0)
        net, loss_of, loader = make()
        batch = next(iter(loader))

        def plain() -> None:
            net.zero_grad()
            for micro_batch in batch:
                (loss_of(*micro_batch) / batch.global_batch_size).backward()
            ddpkit.average_gradients(net)

        def exact() -> None:
            with ddpkit.exact_gradients(batch, net) as micro_batches:
                for micro_batch in micro_batches:
                    (loss_of(*micro_batch) / batch.global_batch_size).backward()

        return take_turns({"plain": plain, "exact": exact}, rounds), sum(p.numel() for p in net.parameters())


def main() -> None:
    parser = make_parser(__doc__, 60, "timed steps of each kind")
    parser.add_argument("--nprocs", type=int, nargs="+", default=[1, 2], help="ranks, on this machine, with gloo")
    args = parser.parse_args()
    for make in (digits, gpt):
        for nprocs in args.nprocs:
            medians, count = ddpkit.spawn(measure, nprocs, make, args.rounds)[0]
            show(f"{make.__name__}, {count:,} parameters, ranks: {nprocs}", medians, "plain")


if __name__ == "__main__":
    main()
