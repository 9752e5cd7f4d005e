"""Contrastive training on the joined batch of the ranks: the weights are those of one process."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from conftest import on_ranks
from torch import Tensor, nn
from torch.nn import functional

import ddpkit
from ddpkit import all_gather, all_reduce, all_reduce_mean, broadcast, gather_batch, get_rank, get_world_size

GLOBAL_BATCH = 6
EVEN, UNEVEN = 24, 28  # samples; the last batch of 4 is shared out as 2, 1, 1 on three ranks
QUEUE = 7  # keys: no multiple of the batch, so that those that leave depend on the order
Batch = tuple[Tensor, Tensor]


def samples(n: int) -> Tensor:
    return torch.randn(n, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class Encoders(nn.Module):
    """Two encoders and a learned temperature, as in CLIP."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 3).double(), nn.Linear(4, 3).double()
        self.temperature = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        left, right = functional.normalize(self.left(x)), functional.normalize(self.right(y))
        return left, right, self.temperature.exp()


def make_model() -> Encoders:
    torch.manual_seed(0)
    return Encoders()


def views(x: Tensor) -> Batch:
    return x, x.roll(1, 1) + 0.1 * x.square()


def clip_loss(left: Tensor, right: Tensor, scale: Tensor) -> Tensor:
    logits = scale * left @ right.T
    pairs = torch.arange(len(left))
    return (functional.cross_entropy(logits, pairs) + functional.cross_entropy(logits.T, pairs)) / 2


def simclr_loss(left: Tensor, right: Tensor, scale: Tensor) -> Tensor:
    both = torch.cat([left, right])
    logits = (scale * both @ both.T).masked_fill(torch.eye(len(both), dtype=torch.bool), -torch.inf)
    return functional.cross_entropy(logits, torch.arange(len(both)).roll(len(left)))


def barlow_loss(left: Tensor, right: Tensor, scale: Tensor) -> Tensor:
    correlation = left.T @ right / len(left)
    return scale * (correlation - torch.eye(3)).square().sum()


LOSSES = {"clip": clip_loss, "simclr": simclr_loss, "barlow": barlow_loss}


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def train_alone(loss_of: Callable[..., Tensor], n: int) -> Tensor:
    """Train by torch alone, on whole batches."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x in samples(n).split(GLOBAL_BATCH):
        optimizer.zero_grad()
        loss_of(*model(*views(x))).backward()
        optimizer.step()
    return weights(model)


def train(loss: str, n: int, how: str) -> Tensor:
    model: Any = make_model()
    if how == "ddp":
        model = ddpkit.wrap_model(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x in ddpkit.make_loader(samples(n), GLOBAL_BATCH // get_world_size(), shuffle=False):
        optimizer.zero_grad()
        left, right, scale = model(*views(x))
        left, right = gather_batch((left, right))
        LOSSES[loss](left, right, scale).backward()
        if how == "plain":
            ddpkit.average_gradients(model)
        optimizer.step()
    return weights(model)


def within(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=0, atol=1e-12)


def train_in_all_ways() -> dict[str, Tensor]:
    ways = product(LOSSES, (EVEN, UNEVEN), ("ddp", "plain"))
    return {f"{loss} {n} {how}": train(loss, n, how) for loss, n, how in ways}


@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_weights_are_those_of_one_process_on_the_joined_batch(world: int) -> None:
    for got in on_ranks(train_in_all_ways, world):
        for way, found in got.items():
            loss, n, _ = way.split()
            expected = train_alone(LOSSES[loss], int(n))
            assert within(found, expected) and not within(found, weights(make_model())), way


def train_by_shares(n: int) -> Tensor:
    """Train as CLIP does with a local loss: each rank compares its own rows with all."""
    model = ddpkit.wrap_model(make_model())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    world = get_world_size()
    for x in ddpkit.make_loader(samples(n), GLOBAL_BATCH // world, shuffle=False):
        optimizer.zero_grad()
        left, right, scale = model(*views(x))
        all_left, all_right = gather_batch((left, right))
        own = torch.arange(len(left)) * world + get_rank()
        loss = functional.cross_entropy(scale * left @ all_right.T, own, reduction="sum")
        loss = loss + functional.cross_entropy(scale * right @ all_left.T, own, reduction="sum")
        ddpkit.global_mean(loss / 2, len(own)).backward()
        optimizer.step()
    return weights(model)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_share_of_the_loss_on_each_rank_gives_the_same_weights(world: int) -> None:
    for got in on_ranks(train_by_shares, world, UNEVEN):
        assert within(got, train_alone(clip_loss, UNEVEN))


def train_in_micro_batches(n: int) -> Tensor:
    model = ddpkit.wrap_model(make_model())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = ddpkit.make_loader(samples(n), GLOBAL_BATCH // get_world_size(), shuffle=False)
    for step, x in enumerate(loader):
        with ddpkit.accumulate(model, step, 2, last=step == len(loader) - 1) as complete:
            left, right, scale = model(*views(x))
            (clip_loss(*gather_batch((left, right)), scale) / 2).backward()
        if complete:
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


@pytest.mark.parametrize("world", [2, 3])
def test_micro_batches_add_up(world: int) -> None:
    (alone,) = on_ranks(train_in_micro_batches, 1, UNEVEN)
    for got in on_ranks(train_in_micro_batches, world, UNEVEN):
        assert within(got, alone)


def train_with_queue(n: int) -> tuple[Tensor, Tensor]:
    """Train as MoCo does: a momentum encoder makes keys, and a queue of earlier ones holds the negatives."""
    model = make_model().requires_grad_(True)
    query, key = model.left, make_model().left.requires_grad_(False)
    ddp = ddpkit.wrap_model(query)
    optimizer = torch.optim.SGD(query.parameters(), 0.1)
    queue = functional.normalize(samples(QUEUE)[:, :3])
    for x in ddpkit.make_loader(samples(n), GLOBAL_BATCH // get_world_size(), shuffle=False):
        first, second = views(x)
        with torch.no_grad():
            keys = functional.normalize(key(second))
        queries = functional.normalize(ddp(first))
        logits = torch.cat([(queries * keys).sum(1, keepdim=True), queries @ queue.T], 1)
        loss = functional.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long), reduction="sum")
        optimizer.zero_grad()
        ddpkit.global_mean(loss, len(x)).backward()
        optimizer.step()
        with torch.no_grad():
            queue = torch.cat([queue, gather_batch(keys)])[-QUEUE:]
            for mean, now in zip(key.parameters(), query.parameters(), strict=True):
                mean.lerp_(now, 0.1)
    return weights(query), queue


@pytest.mark.parametrize("world", [2, 3])
def test_a_queue_of_negatives_is_in_the_order_of_one_process(world: int) -> None:
    ((alone, queue),) = on_ranks(train_with_queue, 1, UNEVEN)
    for got, own_queue in on_ranks(train_with_queue, world, UNEVEN):
        assert within(got, alone) and within(own_queue, queue)


def gradients_of_kinds() -> dict[str, Any]:
    """Join rows in many ways; rank r has r + 1 rows, or none where the last has all."""
    rank, world = get_rank(), get_world_size()
    found: dict[str, Any] = {}
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64):
        x = torch.full((rank + 1, 2), rank + 1.0, dtype=dtype, requires_grad=True)
        joined = gather_batch(x)
        (joined * (rank + 1)).sum().abs().backward()
        found[str(dtype)] = joined.detach(), x.grad
    x = torch.zeros(3 * (rank == world - 1), 2, requires_grad=True)
    gather_batch(x).sum().backward()
    found["empty"] = x.grad
    x, label = torch.ones(1, requires_grad=True), torch.tensor([rank])
    joined = gather_batch({"x": x, "unused": torch.ones(2, 2, requires_grad=True), "label": label})
    assert joined["x"].requires_grad and not joined["label"].requires_grad
    joined["x"].sum().backward()
    found["dict"] = joined["label"], x.grad
    features, keys = gather_batch((torch.ones(2, requires_grad=True) * 2, torch.ones(2)))
    assert features.requires_grad and not keys.requires_grad
    features.mul_(3)  # as on one process
    with torch.autocast("cpu", torch.bfloat16):
        net = nn.Linear(2, 2)
        (gather_batch(net(torch.ones(1, 2))).float().sum()).backward()
    found["autocast"] = net.bias.grad
    x = torch.ones(2, requires_grad=True)
    compile = torch.compile if torch.__version__ >= "2.7" else lambda fn, backend: fn  # older ones fail
    compile(lambda x: gather_batch(x * 2).square().sum(), backend="aot_eager")(x).backward()
    found["compiled"] = x.grad
    x = torch.ones(2, requires_grad=True)
    gather_batch(x, check=False).sum().backward()
    found["unchecked"] = x.grad
    return found


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_rank_gets_the_sum_of_the_gradients_of_its_rows(world: int) -> None:
    total = world * (world + 1) / 2  # of the factors rank + 1
    rows = [r for turn in range(world) for r in range(turn, world)]
    for rank, got in enumerate(on_ranks(gradients_of_kinds, world)):
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64):
            joined, gradient = got[str(dtype)]
            assert joined.dtype == gradient.dtype == dtype
            assert joined.tolist() == [[r + 1.0] * 2 for r in rows]
            assert gradient.tolist() == [[total] * 2] * (rank + 1)
        assert got["empty"].tolist() == [[float(world)] * 2] * (3 * (rank == world - 1))
        labels, gradient = got["dict"]
        assert labels.tolist() == list(range(world)) and gradient.tolist() == [world]
        assert got["autocast"].tolist() == [world] * 2
        assert got["compiled"].tolist() == [8.0 * world] * 2
        assert got["unchecked"].tolist() == [float(world)] * 2


def last() -> bool:
    return get_rank() == get_world_size() - 1


def raised(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def backwards_of_two_calls() -> None:
    """Let the ranks run the backwards of different calls first."""
    one, other = (gather_batch(torch.ones(2, 3, requires_grad=True)) for _ in range(2))
    (one if get_rank() else other).sum().backward()


def wrong_calls() -> list[str]:
    """Let ranks pass what does not go together; the errors, by call."""
    rank = get_rank()
    x = torch.ones(2, 3, requires_grad=True)
    calls: list[Callable[[], Any]] = [
        lambda: gather_batch(x.detach() if last() else x),
        lambda: gather_batch(torch.ones(2, 3 + last())),
        lambda: gather_batch(torch.tensor(1.0) if last() else x),
        lambda: gather_batch([1.0] if last() else x),
        lambda: all_reduce_mean(gather_batch(x).sum()) if rank else gather_batch(x).sum().backward(),
        backwards_of_two_calls,
    ]
    return [raised(call) for call in calls]


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_that_differ_raise(world: int) -> None:
    *others, wrong = on_ranks(wrong_calls, world)
    for errors in (*others, wrong):
        assert "MismatchError" in errors[0] and "with gradient" in errors[0]
        assert "MismatchError" in errors[1]
        assert "MismatchError" in errors[4] and "the backward of gather_batch" in errors[4]
        assert "MismatchError" in errors[5] and "the backward of gather_batch" in errors[5]
    for error, kind in ((wrong[2], "ValueError"), (wrong[3], "TypeError")):
        assert kind in error
    assert "MismatchError" in others[0][2] and "no dimensions" in others[0][2]
    assert "MismatchError" in others[0][3]


def losing_calls() -> list[str]:
    x = torch.ones(2, 3, requires_grad=True)
    loss = (x * 2).sum()
    calls: list[Callable[[], Any]] = [
        lambda: all_gather(x if last() else x.detach()),
        lambda: all_gather({"features": x * 2 if last() else x.detach()}),
        lambda: all_reduce_mean(x * 2 if last() else x.detach()),
        lambda: all_reduce([x * 2 if last() else x.detach()]),
        lambda: broadcast(x * 2 if last() else None, get_world_size() - 1),
    ]
    errors = [raised(call) for call in calls]
    assert all_reduce_mean({"loss": loss})["loss"].item() == 12.0  # how people log
    assert torch.equal(all_reduce_mean(x), x) and not all_reduce_mean(x).requires_grad  # a parameter
    with torch.no_grad():
        all_gather(x)
    return errors


@pytest.mark.parametrize("world", [1, 2])
def test_no_gradient_is_lost_without_a_word(world: int) -> None:
    *others, wrong = on_ranks(losing_calls, world)
    for error in wrong:
        assert re.search(r"(Value|Type)Error.*gradient.*detach\(\)", error), error
    assert "gather_batch()" in wrong[0] and "value['features']" in wrong[1]
    for errors in others:
        assert all("MismatchError" in error for error in errors)
