"""Gradients on real ranks: against one process on all samples."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpkit import MismatchError, PeerError, all_reduce, get_rank, get_world_size
from ddpkit.gradients import accumulate, average_gradients, averaging, global_mean
from ddpkit.wrapping import unwrap_model, wrap_model

F = nn.functional


def _net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def _flat(net: nn.Module) -> list[float]:
    return nn.utils.parameters_to_vector(net.parameters()).tolist()


def _message(error: type[Exception], call: Callable[[], Any]) -> str:
    with pytest.raises(error) as caught:
        call()
    return str(caught.value)


@functools.cache  # one launch per world size: a rank's first step imports torch._dynamo, which takes seconds
def _results(world_size: int) -> list[dict[str, Any]]:
    return on_ranks(_everything, world_size)


def _everything() -> dict[str, Any]:
    checks = [_train_all, _meanwhile]
    if get_world_size() > 1:
        checks += [_no_samples, _several_in_one, _average, _like_ddp, _silent]
    if get_world_size() == 2:
        checks += [_uneven]
    return {check.__name__: check() for check in checks}


def _uneven() -> tuple[float, float, float]:
    x = torch.full((3, 1), 4.0) if get_rank() == 0 else torch.full((1, 1), 8.0)
    plain, exact = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    through_torch, through_us = DistributedDataParallel(plain), wrap_model(exact)
    (-through_torch(x)).mean().backward()
    nn.init.ones_(exact.weight)
    loss = global_mean((-through_us(x)).sum(), len(x))
    loss.backward()
    return plain.weight.grad.item(), exact.weight.grad.item(), loss.item()


def test_three_and_one_samples_give_the_mean_of_four_where_plain_ddp_gives_the_mean_of_two_means():
    results = [found["_uneven"] for found in _results(2)]
    assert [(plain, exact) for plain, exact, _ in results] == [(-6.0, -5.0)] * 2
    assert np.mean([loss for *_, loss in results]) == -5.0  # the mean over the ranks is the mean over the samples


def _epochs() -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Two epochs of seven micro-batches, each for three ranks: sizes are uneven, some zero."""
    generator = torch.Generator().manual_seed(1)
    sizes = torch.randint(0, 4, (2, 7, 3), generator=generator)
    sizes[..., 0].clamp_(min=1)
    x = [[[torch.randn(int(n), 3, generator=generator, dtype=torch.float64) for n in r] for r in e] for e in sizes]
    return [[[(one, one.square().sum(-1, keepdim=True)) for one in ranks] for ranks in epoch] for epoch in x]


def _count_rounds(model: nn.Module) -> list[int]:
    rounds: list[int] = []
    if isinstance(model, DistributedDataParallel):

        def hook(_, bucket):  # torch looks at annotations, and wants none that are strings
            rounds.append(bucket.index())
            work = dist.all_reduce(bucket.buffer(), async_op=True)
            return work.get_future().then(lambda future: future.value()[0] / dist.get_world_size())

        model.register_comm_hook(None, hook)
    return rounds


def _train_accumulating(every: int, static_graph: bool) -> tuple[list[float], int, int]:
    net = _net(get_rank())  # wrap_model makes them rank 0's
    model = wrap_model(net, static_graph=static_graph)
    rounds, steps = _count_rounds(model), 0
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for epoch in _epochs():
        mine = [ranks[get_rank()] for ranks in epoch]
        for step, (x, y) in enumerate(mine):
            if step % every == 0:
                share = global_mean(1.0, sum(len(x) for x, _ in mine[step : step + every]))
            with accumulate(model, step, every, last=step == len(mine) - 1) as complete:
                (share * F.mse_loss(model(x), y, reduction="sum")).backward()
            if complete:
                optimizer.step()
                optimizer.zero_grad()
                steps += 1
    return _flat(net), len(rounds), steps


def _train_one_process(every: int, world_size: int) -> list[float]:
    net = _net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for epoch in _epochs():
        for start in range(0, len(epoch), every):
            parts = [pair for ranks in epoch[start : start + every] for pair in ranks[:world_size]]
            x, y = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
            optimizer.zero_grad()
            F.mse_loss(net(x), y).backward()
            optimizer.step()
    return _flat(net)


def _train_all() -> list[tuple[list[float], int, int]]:
    return [_train_accumulating(3, False), _train_accumulating(1, False), _train_accumulating(3, True)]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_times_micro_batches_equal_one_process_in_one_round_per_step(world_size):
    for found in _results(world_size):
        cases = zip((3, 1, 3), (False, False, True), found["_train_all"], strict=True)
        for every, static_graph, (weights, rounds, steps) in cases:
            assert weights == pytest.approx(_train_one_process(every, world_size), abs=1e-6)
            assert steps == {3: 6, 1: 14}[every]
            if world_size > 1:  # of the steps of 3, 3 and 1 micro-batches per epoch, a static graph sends the first too
                assert rounds == steps + (4 if static_graph else 0)


def _no_samples() -> str:
    return _message(ValueError, lambda: global_mean(torch.tensor(0.0), 0))


def test_no_samples_anywhere_is_an_error_on_every_rank():
    for message in [*(found["_no_samples"] for found in _results(2)), _no_samples()]:
        assert "at least one sample on some rank" in message


def test_accumulate_names_its_bounds_and_leaves_a_plain_model_alone():
    net = _net()
    assert "every=0" in _message(ValueError, lambda: accumulate(net, 0, 0).__enter__())
    assert "step=-1" in _message(ValueError, lambda: accumulate(net, -1, 2).__enter__())


def _several_in_one() -> tuple[int, int]:
    nets = nn.ModuleList(wrap_model(_net()) for _ in range(2))
    rounds = [_count_rounds(net) for net in nets]
    for step in range(4):
        with accumulate(nets, step, 4):
            sum(net(torch.ones(1, 3).double()).sum() for net in nets).backward()
    return len(rounds[0]), len(rounds[1])


def test_one_accumulate_serves_several_models_in_a_module_list():
    assert [found["_several_in_one"] for found in _results(2)] == [(1, 1)] * 2


class _Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.spare = nn.Linear(3, 4), nn.Linear(4, 1), nn.Linear(4, 1)
        self.fixed = nn.Linear(4, 1).requires_grad_(False)

    def value(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(x)))


def _set(value: float, dtype: torch.dtype) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(2, dtype=dtype))
    parameter.grad = torch.full((2,), value, dtype=dtype)
    return parameter


def _average() -> dict[str, Any]:
    rank, found = get_rank(), {}
    torch.manual_seed(0)
    policy, critic, temperature = _Policy(), _net(), nn.Parameter(torch.tensor(1.0))
    x = torch.linspace(-1, 1, 12).reshape(4, 3) * (rank + 1)
    (temperature * policy.value(x).sum() + critic(x.double()).sum()).backward()
    if rank == 1:
        policy.spare.bias.grad = torch.ones(1)
    given = {name: p.grad for name, p in policy.named_parameters()}
    found["local"] = [p.grad.reshape(-1).tolist() for p in (*critic.parameters(), policy.body.weight, temperature)]
    average_gradients(policy, critic, policy, temperature)
    found["mean"] = [p.grad.reshape(-1).tolist() for p in (*critic.parameters(), policy.body.weight, temperature)]
    found["in place"] = all(p.grad is given[name] for name, p in policy.named_parameters() if given[name] is not None)
    found["none"] = [name for name, p in policy.named_parameters() if p.grad is None]
    found["some"] = policy.spare.bias.grad.tolist()
    kinds = {"float16": 40000.0, "bfloat16": 256.0 + 2 * rank, "float64": 1.0 + rank, "complex64": 1j * rank}
    mixed = {name: _set(value, getattr(torch, name)) for name, value in kinds.items()}
    average_gradients(*mixed.values())
    found |= {name: p.grad[0].item() for name, p in mixed.items()}
    image = nn.Conv2d(2, 2, 3).to(memory_format=torch.channels_last)
    image(torch.full((1, 2, 4, 4), rank + 1.0)).sum().backward()
    average_gradients(image)
    found["channels_last"] = image.weight.grad.unique().tolist()
    average_gradients()  # nothing
    found["mismatch"] = _message(MismatchError, lambda: average_gradients(nn.Linear(2 + rank, 1)))
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_average_gradients_gives_the_mean_of_whatever_is_there(world_size):
    if world_size == 1:
        policy = _Policy()
        policy.value(torch.ones(1, 3)).sum().backward()
        before = policy.body.weight.grad.clone()
        average_gradients(policy)
        assert torch.equal(policy.body.weight.grad, before) and policy.spare.weight.grad is None
        return
    results = [found["_average"] for found in _results(world_size)]
    for found in results:
        for i, mean in enumerate(found["mean"]):
            assert mean == pytest.approx(np.mean([other["local"][i] for other in results], axis=0), rel=1e-6)
        assert found["mean"] == results[0]["mean"]
        assert found["in place"]
        assert found["none"] == ["spare.weight", "fixed.weight", "fixed.bias"]
        assert found["some"] == pytest.approx([1 / world_size])
        assert found["float16"] == 40000.0  # the sum would be infinite in half precision
        assert found["bfloat16"] == 256.0 + (world_size - 1 if world_size == 3 else 0)  # 257 rounds to even
        assert found["float64"] == (world_size + 1) / 2
        assert found["complex64"] == pytest.approx(1j * (world_size - 1) / 2)
        assert found["channels_last"] == pytest.approx([4 * (world_size + 1) / 2])
        assert "parameter 0: torch.float32[1, 2] on rank 0; torch.float32[1, 3] on rank 1" in found["mismatch"]


def _meanwhile() -> dict[str, Any]:
    """What `averaging` leaves, next to what `average_gradients` makes of the same gradients."""
    pair = [_net(), _net()]
    for net in pair:
        net(torch.full((2, 3), get_rank() + 1.0, dtype=torch.float64)).sum().backward()
        net[0].bias.grad = None if get_rank() % 2 else net[0].bias.grad
    before = [p.grad for p in pair[0].parameters()]
    with averaging(pair[0]):
        hidden = all(p.grad is None for p in pair[0].parameters())
        total = all_reduce(get_rank())
    average_gradients(pair[1])
    kept = all(old is None or p.grad is old for p, old in zip(pair[0].parameters(), before, strict=True))
    means = [[p.grad.tolist() for p in net.parameters()] for net in pair]

    def compute_in_between() -> None:
        with averaging(pair[0]):
            pair[0](torch.ones(1, 3, dtype=torch.float64)).sum().backward()

    message = _message(RuntimeError, compute_in_between)
    return {"hidden": hidden, "total": total, "kept": kept, "means": means, "message": message}


@pytest.mark.parametrize("world_size", [0, 1, 2, 3])
def test_averaging_brings_the_means_after_the_block_and_no_gradients_within(world_size):
    results = [found["_meanwhile"] for found in _results(world_size)] if world_size else [_meanwhile()]
    for found in results:
        assert found["hidden"] and found["kept"]
        assert found["total"] == sum(range(world_size))
        assert found["means"][0] == found["means"][1] == results[0]["means"][0]
        assert "leave the block of averaging()" in found["message"]


def _fail_meanwhile(folder: Path) -> None:
    net = _net()
    net(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
    try:
        for step in range(3):
            with averaging(net):
                if (step, get_rank()) == (1, 1):
                    raise ValueError("no more games")
    except PeerError as error:
        (folder / f"rank{get_rank()}").write_text(f"{error.rank} {error.error_type}")
        raise


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_that_fails_while_gradients_travel_is_named_on_the_others(world_size, tmp_path):
    with pytest.raises(ValueError, match="no more games"):
        on_ranks(_fail_meanwhile, world_size, tmp_path)
    others = {f"rank{rank}": "1 ValueError" for rank in range(world_size) if rank != 1}
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == others


def _like_ddp() -> bool:
    """Two networks in one loss, three steps with Adam: through DDP, and by average_gradients."""
    weights = []
    for through_ddp in (True, False):
        actor, critic = _net(0), _net(1)
        models = [wrap_model(net) if through_ddp else net for net in (actor, critic)]
        optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], lr=0.01)
        for step in range(3):
            x = torch.full((2, 3), 0.1 * (get_rank() + step), dtype=torch.float64)
            optimizer.zero_grad()
            (models[0](x) * models[1](x)).sum().backward()
            if not through_ddp:
                average_gradients(actor, critic)
            optimizer.step()
        weights.append(torch.tensor([*_flat(actor), *_flat(critic)]))
    return torch.allclose(*weights, rtol=0, atol=1e-12)


def _silent() -> tuple[float, float, float]:
    """What the guide says of DDP: it synchronises its own forward only, and only while it lives, without an error."""
    x = torch.full((1, 3), get_rank() + 1.0)
    torch.manual_seed(0)
    policy, averaged = _Policy(), _Policy()
    averaged.load_state_dict(policy.state_dict())
    model = wrap_model(policy, find_unused_parameters=True)
    unwrap_model(model).value(x).sum().backward()
    averaged.value(x).sum().backward()
    average_gradients(averaged)
    temporary = _net()
    wrap_model(temporary)(x.double()).sum().backward()
    return tuple(net.weight.grad.sum().item() for net in (policy.body, averaged.body, temporary[0]))


@pytest.mark.parametrize("world_size", [2, 3])
def test_average_gradients_trains_as_ddp_does_and_serves_methods_where_ddp_is_silently_wrong(world_size):
    results = _results(world_size)
    assert all(found["_like_ddp"] for found in results)
    through_ddp, averaged, temporary = zip(*(found["_silent"] for found in results), strict=True)
    assert len(set(through_ddp)) == len(set(temporary)) == world_size  # each rank kept its own gradient
    assert averaged == pytest.approx([np.mean(through_ddp)] * world_size)
