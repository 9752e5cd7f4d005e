"""What ddpkit's collectives cost next to plain torch, on ranks of this machine.

Each case is done in several ways, in turn so that all see the same load: by hand, with torch alone and nothing
checked, or after messages such as a check needs, and by ddpkit. A call takes as long as on its slowest rank; printed is
the median of the calls, and how often that of the call by hand fits in.

    python tests/benchmarks/all_reduce_mean.py
    python tests/benchmarks/all_reduce_mean.py --ranks 2 8 32 --rounds 20 --cases "1 number" "32 numbers"
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from timing import make_parser, show, take_turns
from torch import Tensor
from torch.distributed.nn.functional import all_gather as all_gather_with_gradients

import ddpkit

Metrics = dict[str, float]
Ways = dict[str, Callable[[], Any]]
SAMPLES = 10_000
TENSORS = 1_000


def numbers_by_hand(metrics: Metrics) -> Metrics:
    flat = torch.tensor(list(metrics.values()), dtype=torch.float64)
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    return dict(zip(metrics, flat.tolist(), strict=True))


def one_by_one(metrics: Metrics) -> Metrics:
    means = {}
    for name, value in metrics.items():
        single = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(single)
        means[name] = single.item() / dist.get_world_size()
    return means


def number_by_hand(number: float) -> float:
    single = torch.tensor(number)
    dist.all_reduce(single)
    return single.item() / dist.get_world_size()


def tensor_by_hand(tensor: Tensor) -> Tensor:
    mean = tensor.clone()
    dist.all_reduce(mean)
    return mean.div_(dist.get_world_size())


def tree_by_hand(tree: dict[str, Tensor]) -> dict[str, Tensor]:
    flat = torch.cat([tensor.reshape(-1) for tensor in tree.values()])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    parts = flat.split([tensor.numel() for tensor in tree.values()])
    return {name: part.view(tensor.shape) for (name, tensor), part in zip(tree.items(), parts, strict=True)}


def losses_by_hand(losses: dict[str, Tensor]) -> dict[str, Tensor]:
    """Average 0-dim tensors, whatever their dtypes, in float32."""
    flat = torch.stack([loss.float() for loss in losses.values()])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    return dict(zip(losses, flat.unbind(), strict=True))


def gather_by_hand(values: Tensor, indices: Tensor) -> Tensor:
    """Gather without a check, and only if all ranks have equally many."""
    all_values = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    all_indices = [torch.empty_like(indices) for _ in range(dist.get_world_size())]
    dist.all_gather(all_values, values)
    dist.all_gather(all_indices, indices)
    joint = torch.cat(all_values)
    joint[torch.cat(all_indices)] = torch.cat(all_values)
    return joint


def after_a_check(call: Callable[[], Any], checks: int = 1) -> Callable[[], Any]:
    """Exchange a block of 512 numbers before a call, or several: no check of what ranks pass can cost less."""
    ranks = dist.get_world_size()
    sent, received = torch.zeros(2, ranks, 512, dtype=torch.float64)

    def checked() -> Any:
        for _ in range(checks):
            dist.all_to_all_single(received, sent)
        return call()

    return checked


def number() -> Ways:
    return {
        "by hand": lambda: number_by_hand(1.0),
        "all_reduce_mean": lambda: ddpkit.all_reduce_mean(1.0),
    }


def numbers(count: int) -> Ways:
    metrics = make_metrics(count)
    return {
        "by hand": lambda: numbers_by_hand(metrics),
        "all_reduce_mean": lambda: ddpkit.all_reduce_mean(metrics),
    }


def separate_numbers(count: int) -> Ways:
    metrics = make_metrics(count)
    return {
        "by hand": lambda: numbers_by_hand(metrics),
        "one by one": lambda: one_by_one(metrics),
    }


def losses(count: int, dtypes: tuple[torch.dtype, ...] = (torch.float32,)) -> Ways:
    """Average what `loss.detach()` gives."""
    made = {f"loss_{i}": torch.tensor(float(i)).to(dtypes[i % len(dtypes)]) for i in range(count)}
    return {
        "by hand": lambda: losses_by_hand(made),
        "all_reduce_mean": lambda: ddpkit.all_reduce_mean(made),
    }


def make_metrics(count: int) -> Metrics:
    return {f"metric_{i}": float(i) for i in range(count)}


def tensor() -> Ways:
    large = torch.ones(1_000_000)
    return {
        "by hand": lambda: tensor_by_hand(large),
        "all_reduce_mean": lambda: ddpkit.all_reduce_mean(large),
        "check=False": lambda: ddpkit.all_reduce_mean(large, check=False),
    }


def tree() -> Ways:
    tensors = {f"tensor_{i}": torch.ones(10) for i in range(TENSORS)}
    return {
        "by hand": lambda: tree_by_hand(tensors),
        "all_reduce_mean": lambda: ddpkit.all_reduce_mean(tensors),
    }


def gather() -> Ways:
    size = SAMPLES - SAMPLES % dist.get_world_size()
    indices = torch.arange(dist.get_rank(), size, dist.get_world_size())
    values = indices.float()
    return {
        "by hand": lambda: gather_by_hand(values, indices),
        "gather_exact": lambda: ddpkit.gather_exact(values, indices, n=size),
    }


def shuffle_by_hand(indices: Tensor) -> Tensor:
    received = indices.clone()
    dist.broadcast(received, src=0)
    return received


def shuffle() -> Ways:
    """MoCo's broadcast in each step: the order in which all ranks' samples go through the second encoder."""
    indices = torch.randperm(64 * dist.get_world_size())
    return {
        "by hand": lambda: shuffle_by_hand(indices),
        "by hand, checked": after_a_check(lambda: shuffle_by_hand(indices)),
        "broadcast": lambda: ddpkit.broadcast(indices),
    }


def join_by_hand(features: Tensor) -> Tensor:
    """Join the rows of all ranks with gradients, in the order of the ranks, and only if all have equally many."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch deprecates it, and has nothing else
        return torch.cat(all_gather_with_gradients(features))


def joined_features() -> Ways:
    features = torch.ones(64, 128, requires_grad=True)
    return {
        "by hand": lambda: join_by_hand(features).sum().backward(),
        "by hand, checked": after_a_check(lambda: join_by_hand(features).sum().backward(), 2),
        "gather_batch": lambda: ddpkit.gather_batch(features).sum().backward(),
        "check=False": lambda: ddpkit.gather_batch(features, check=False).sum().backward(),
    }


def gather_tensors_by_hand(tensor: Tensor) -> list[Tensor]:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    return parts


def small_gather() -> Ways:
    few = torch.arange(8)
    return {
        "by hand": lambda: gather_tensors_by_hand(few),
        "by hand, checked": after_a_check(lambda: gather_tensors_by_hand(few)),
        "all_gather": lambda: ddpkit.all_gather(few),
    }


def objects_by_hand(text: str) -> list[str]:
    found = [""] * dist.get_world_size()
    dist.all_gather_object(found, text)
    return found


def small_objects() -> Ways:
    text = f"rank {dist.get_rank()}: cpu"
    return {
        "by hand": lambda: objects_by_hand(text),
        "all_gather_object": lambda: ddpkit.all_gather_object(text),
    }


def moco_by_hand(images: Tensor, keys: Tensor, order: Tensor) -> None:
    gather_tensors_by_hand(images)
    dist.broadcast(order, 0)
    gather_tensors_by_hand(keys)
    gather_tensors_by_hand(keys)


def moco(images: Tensor, keys: Tensor, order: Tensor) -> None:
    ddpkit.all_gather(images)
    ddpkit.broadcast(order)
    ddpkit.all_gather(keys)
    ddpkit.all_gather(keys)


def moco_step() -> Ways:
    """Do the exchanges of a step of MoCo: images are shuffled between ranks, their keys go back, and into the queue."""
    images, keys = torch.ones(32, 3, 32, 32), torch.ones(32, 128)
    order = torch.randperm(32 * dist.get_world_size())
    return {
        "by hand": lambda: moco_by_hand(images, keys, order),
        "by hand, checked": after_a_check(lambda: moco_by_hand(images, keys, order), 4),
        "ddpkit": lambda: moco(images, keys, order),
    }


CASES: dict[str, Callable[[], Ways]] = {
    "1 number": number,
    "32 numbers": lambda: numbers(32),
    "100 numbers": lambda: numbers(100),
    "32 numbers, one by one": lambda: separate_numbers(32),
    "8 losses": lambda: losses(8),
    "32 losses": lambda: losses(32),
    "100 losses": lambda: losses(100),
    "32 losses and counts": lambda: losses(32, (torch.float32, torch.int64)),
    "10⁶ float32": tensor,
    f"{TENSORS} tensors": tree,
    f"{SAMPLES} samples": gather,
    "64 x 128 features": joined_features,
    "a gather of 8 ints": small_gather,
    "a gather of objects": small_objects,
    "a MoCo step": moco_step,
    "a shuffle": shuffle,
}


def measure(cases: list[str], rounds: int, in_a_row: int) -> dict[str, dict[str, float]]:
    with ddpkit.distributed():
        return {case: take_turns(CASES[case](), rounds, warm_up=1, in_a_row=in_a_row) for case in cases}


def main() -> None:
    parser = make_parser(__doc__, 200, "calls of each way")
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[2], help="numbers of ranks, on this machine, with gloo"
    )
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES, metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--in_a_row", type=int, default=1, help="calls between two barriers")
    args = parser.parse_args()
    for ranks in args.ranks:
        found = ddpkit.spawn(measure, ranks, args.cases, args.rounds, args.in_a_row)[0]
        for case, medians in found.items():
            show(f"{case}, {ranks} ranks", medians, "by hand")


if __name__ == "__main__":
    main()
