"""Gradients on real ranks: against one process on all samples."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import on_ranks
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ddpkit import (
    MismatchError,
    PeerError,
    accumulate,
    all_reduce,
    all_reduce_mean,
    average_gradients,
    averaging,
    get_rank,
    get_world_size,
    global_mean,
)
from ddpkit.parallel.models import unwrap_model
from ddpkit.parallel.wrap import wrap_model

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
    tied = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(2))
    tied[1].weight = tied[0].weight
    tied[0].weight.grad = torch.full((1, 1), rank + 1.0)
    average_gradients(tied, tied[1].weight)
    found["tied"] = tied[0].weight.grad.item()
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
        assert found["float64"] == found["tied"] == (world_size + 1) / 2
        assert found["complex64"] == pytest.approx(1j * (world_size - 1) / 2)
        assert found["channels_last"] == pytest.approx([4 * (world_size + 1) / 2])
        assert "parameter 0: weight, float32[1, 2] on rank 0; weight, float32[1, 3] on rank 1" in found["mismatch"]


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
        assert "call backward() before the block of averaging()" in found["message"]


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


def _filled(*shape: int, value: float) -> torch.Tensor:
    return torch.full(shape, value)


def _odd_gradients(scale: float) -> dict[str, tuple[nn.Parameter, torch.Tensor]]:
    """Parameters with gradients that are laid out in memory in other ways than theirs, by what they are."""
    table = torch.arange(12.0).mul(scale).reshape(3, 4)
    found = {
        "expanded": torch.autograd.grad((scale * (p := nn.Parameter(torch.zeros(3)))).sum(), p)[0].expand(3),
        "expanded scalar": torch.tensor(scale).expand(2, 3),
        "overlapping": torch.arange(5.0).mul(scale).as_strided((3, 3), (1, 1)),
        "transposed": table.t(),
        "every other column": table[:, ::2],
        "channels last": torch.full((1, 2, 3, 3), scale).to(memory_format=torch.channels_last),
        "conjugate": torch.full((2,), complex(1, scale)).conj(),
        "with a graph": (torch.ones(2, requires_grad=True) * scale),
    }
    with torch.inference_mode():
        found["of inference mode"] = torch.full((2,), scale)
    pairs = {}
    for name, gradient in found.items():
        parameter = nn.Parameter(torch.zeros_like(gradient, memory_format=torch.contiguous_format))
        parameter.grad = gradient
        pairs[name] = parameter, gradient.detach().clone()
    return pairs


def _layouts() -> dict[str, list[Any]]:
    """The means that the odd gradients have become, one after the other and together, and those that they should be."""
    found: dict[str, list[Any]] = {}
    rank, mean = get_rank(), (get_world_size() + 1) / 2
    expected = {name: gradient for name, (_, gradient) in _odd_gradients(mean).items()}
    for together in (True, False):
        pairs = _odd_gradients(rank + 1.0)
        parameters = {name: parameter for name, (parameter, _) in pairs.items()}
        if together:
            average_gradients(*parameters.values())
        for name, parameter in parameters.items():
            if not together:
                with averaging(parameter):
                    pass
            found.setdefault(name, []).append(torch.allclose(parameter.grad, expected[name]))
    partly_zero = nn.Parameter(torch.zeros(2))
    partly_zero.grad = torch.full((2,), 1.0 * rank) if rank else torch._efficientzerotensor((2,))
    average_gradients(partly_zero)
    found["a zero without memory"] = [partly_zero.grad.tolist() == [mean - 1] * 2]
    shared, other = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    shared.grad = torch.full((2,), rank + 1.0)
    other.grad = shared.grad if rank == 0 else torch.full((2,), 5.0)  # one tensor for two, on rank 0 only
    average_gradients(shared, other)
    means = mean, (1.0 + 5.0 * (get_world_size() - 1)) / get_world_size()
    found["shared"] = [shared.grad.tolist() == pytest.approx([means[0]] * 2)]
    found["shared"].append(other.grad.tolist() == pytest.approx([means[1]] * 2))
    return found


def _largest() -> list[bool]:
    """Whether gradients near the largest number of their dtype have means, and others lose no digit by that."""
    right = []
    for dtype, top in {
        torch.float32: 3e38,
        torch.float64: 1.7e308,
        torch.bfloat16: 3e38,
        torch.complex64: 3e38,
    }.items():
        for size in (2, 300_000):  # with the check, and after it
            parameter = nn.Parameter(torch.zeros(size, dtype=dtype))
            parameter.grad = torch.full((size,), top, dtype=dtype)
            average_gradients(parameter)
            right.append(torch.allclose(parameter.grad, torch.full((size,), top, dtype=dtype)))
    world = get_world_size()
    each = [torch.randn(999, generator=torch.Generator().manual_seed(rank)) for rank in range(world)]
    parameter = nn.Parameter(torch.zeros(999))
    parameter.grad = each[get_rank()].clone()
    average_gradients(parameter)
    mean = sum(each) / world  # two addends have one order
    right.append(torch.equal(parameter.grad, mean) if world == 2 else torch.allclose(parameter.grad, mean, atol=1e-6))
    return right


def _swapped() -> str:
    """The error of networks of the same shapes in another order on the last rank; wrappers' names do not count."""
    actor, critic = nn.Sequential(nn.Linear(2, 2)), nn.ModuleDict({"q": nn.Linear(2, 2)})
    is_last = get_rank() == get_world_size() - 1
    average_gradients(DataParallel(actor) if is_last else actor, critic)
    return _message(MismatchError, lambda: average_gradients(*((critic, actor) if is_last else (actor, critic))))


def _settings() -> list[float]:
    """Means that were taken under settings that change what torch's functions return."""
    found = []

    def mean() -> None:
        parameters = [nn.Parameter(torch.zeros(2, device="cpu")), nn.Parameter(torch.zeros(2, device="cpu"))]
        parameters[0].grad = torch.full((2,), get_rank() + 1.0, device="cpu")
        if get_rank() == 0:
            parameters[1].grad = torch.full((2,), 1.0 * get_world_size(), device="cpu")
        average_gradients(*parameters)
        found.extend([parameters[0].grad[0].item(), parameters[1].grad[0].item()])
        assert not parameters[1].grad.is_inference()

    torch.set_default_device("meta")
    mean()
    torch.set_default_device(None)
    for block in (torch.device("meta"), torch.inference_mode(), torch.no_grad(), torch.autocast("cpu")):
        with block:
            mean()
    torch.set_default_dtype(torch.float64)
    mean()
    torch.set_default_dtype(torch.float32)
    return found


def _sparse(rank: int | None) -> nn.Module:
    net = nn.Sequential(nn.Embedding(4, 2, sparse=rank in (None, get_rank())), nn.Linear(2, 1))
    net(torch.tensor([1, 2])).sum().backward()
    return net


def _refused() -> dict[str, tuple[str, bool]]:
    """The error of every call that cannot be done, and whether all gradients stayed as they were."""
    found = {}
    lazy, meta = nn.LazyLinear(2), nn.Linear(2, 1, device="meta")
    calls: dict[str, tuple[Any, ...]] = {
        "sparse": (_sparse(None),),
        "sparse on rank 1": (_sparse(1),),
        "sparse, second": (nn.Linear(1, 1), _sparse(1)),
        "lazy": (lazy,),
        "meta": (meta,),
        "meta on rank 1": (meta if get_rank() == 1 else nn.Linear(2, 1),),
        "no module": ([nn.Linear(1, 1)],),
        "no module on rank 1": ("actor" if get_rank() == 1 else nn.Linear(1, 1),),
    }
    for name, modules in calls.items():
        parameters = [p for module in modules if isinstance(module, nn.Module) for p in module.parameters()]
        before = [p.grad for p in parameters]
        with pytest.raises((TypeError, ValueError, MismatchError)) as caught:
            average_gradients(*modules)
        same = all(p.grad is old for p, old in zip(parameters, before, strict=True))
        found[name] = f"{type(caught.value).__name__}: {caught.value}", same
        with pytest.raises(type(caught.value)), averaging(*modules):
            pass
    assert all_reduce(1) == get_world_size()
    return found


def _nets_that_differ() -> list[str]:
    """Layouts that all ranks have seen before, but that differ between them now: in size, in dtype, in order."""
    nets = [nn.Linear(2, 2), nn.Linear(400, 30), nn.Linear(2, 2).double(), nn.Linear(100, 300)]
    for net in nets:
        for p in net.parameters():
            p.grad = torch.full_like(p, get_rank())
    messages = []
    for i, net in enumerate(nets):
        for other in nets[:i] + nets[i + 1 :]:
            for known in (net, other):
                average_gradients(known)
            mine = net if get_rank() == 0 else other
            messages.append(_message(MismatchError, lambda mine=mine: average_gradients(mine)))
            with pytest.raises(MismatchError) as caught, averaging(mine):
                pass
            messages.append(str(caught.value))
            for p in mine.parameters():
                p.grad = torch.full_like(p, get_rank())
    for net in nets:
        for p in net.parameters():
            p.grad = torch.full_like(p, get_rank())
    average_gradients(*nets)
    means = {p.grad.unique().item() for net in nets for p in net.parameters()}
    assert means == {(get_world_size() - 1) / 2}
    return messages


def _border() -> dict[str, Any]:
    checks = (_layouts, _largest, _swapped, _settings, _refused, _counts, _another_call, _scaled)
    return {check.__name__: check() for check in checks}


@functools.cache
def _at_the_border(world_size: int) -> list[dict[str, Any]]:
    return on_ranks(_border, world_size)


@pytest.mark.parametrize("world_size", [2, 3])
def test_gradients_of_any_layout_get_their_means(world_size):
    for found in _at_the_border(world_size):
        assert {name for name, right in found["_layouts"].items() if not all(right)} == set()
        assert found["_settings"] == [(world_size + 1) / 2, 1.0] * 6
        assert found["_largest"] == [True] * 9
        assert re.search(r"parameter 0: 0.weight, float32.*; q.weight, float32.* on rank", found["_swapped"])


@pytest.mark.parametrize("world_size", [2, 3])
def test_what_cannot_be_averaged_is_refused_on_every_rank_before_anything_moves(world_size):
    for rank, found in enumerate(each["_refused"] for each in _at_the_border(world_size)):
        assert all(same for _, same in found.values())
        texts = {name: text for name, (text, _) in found.items()}
        assert (
            "dense gradients on their parameters' devices, but the gradient of 0.weight is a sparse_coo tensor"
            in texts["sparse"]
        )
        assert "but weight is lazy" in texts["lazy"]
        assert "but weight is on the meta device" in texts["meta"]
        assert "takes modules and tensors, got list: unpack a list with *" in texts["no module"]
        own = {"sparse": "TypeError", "sparse, second": "TypeError", "meta": "ValueError", "no module": "TypeError"}
        for name, kind in own.items():
            text = texts.get(f"{name} on rank 1", texts[name])
            assert text.startswith(kind if rank == 1 or text is texts["sparse"] else "MismatchError"), text
            assert rank == 1 or "rank 1" in text or f"{name} on rank 1" not in texts
        assert "gradient of 0.weight" in texts["sparse, second"]


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_that_pass_different_networks_which_were_seen_before_get_an_error_on_each(world_size):
    for messages in on_ranks(_nets_that_differ, world_size):
        for message in messages:
            assert "parameter 0: weight, float" in message and "on rank 0" in message


def _counts() -> list[str]:
    """The errors of counts that are none, on rank 1 alone."""
    found = []
    for count in (-1, float("nan"), float("inf")):
        mine = count if get_rank() == 1 else 1
        with pytest.raises((ValueError, MismatchError)) as caught:
            global_mean(1.0, mine)
        found.append(f"{type(caught.value).__name__}: {caught.value}")
    return found


def test_a_count_that_is_none_is_an_error_on_every_rank():
    for rank, found in enumerate(each["_counts"] for each in _at_the_border(2)):
        for text in found:
            assert text.startswith("ValueError" if rank == 1 else "MismatchError")
            assert "needs a count of at least 0" in text


def _another_call() -> str:
    call = all_reduce_mean if get_rank() == 1 else lambda count: global_mean(1.0, count)
    return _message(MismatchError, lambda: call(3))


def test_a_rank_that_calls_another_function_meanwhile_is_an_error_on_every_rank():
    for text in [each["_another_call"] for each in _at_the_border(2)]:
        assert "global_mean() on rank 0; all_reduce_mean(value) on rank 1" in text


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("of_model", [True, False])
def test_a_step_without_positives_divides_by_the_minimum_as_one_process(of_model: bool) -> None:
    rank, world_size = get_rank(), get_world_size()
    for positives in ([3, 0, 1], [0, 0, 0], [0, 2, 0]):
        mine = positives[:world_size][rank]
        model = wrap_model(nn.Linear(1, 1, bias=False).double())
        loss_sum = (mine + 0.25) * model(torch.ones(1, 1).double()).sum()  # the negatives' part is never 0
        if of_model:
            loss_sum.backward()
            global_mean(model, mine, minimum=1)
        else:
            global_mean(loss_sum, mine, minimum=1).backward()
        total = sum(positives[:world_size])
        gradient = unwrap_model(model).weight.grad.item()
        assert gradient == pytest.approx((total + 0.25 * world_size) / max(1, total), abs=1e-12)
    with pytest.raises(ValueError, match=r"counts add up to 0.*only padding tokens.*pass minimum=1"):
        global_mean(torch.tensor(0.0), 0)


@pytest.mark.ranks(2, 3)
def test_ranks_that_pass_different_minimums_get_an_error_on_each() -> None:
    with pytest.raises(MismatchError, match=r"global_mean\(\) on rank"):
        global_mean(1.0, 2, minimum=0 if get_rank() == 1 else 1)
    with pytest.raises((ValueError, MismatchError), match="needs a minimum of at least 0"):
        global_mean(1.0, 2, minimum=-1 if get_rank() == 1 else 1)


def _scaled() -> tuple[list[float], list[float]]:
    """The gradients of a step with accumulation and frozen, unused and shared parameters, scaled at its end."""
    net = _Policy().double()
    torch.manual_seed(0)
    for p in net.parameters():
        nn.init.normal_(p)
    net.forward = net.value
    model = wrap_model(net, find_unused_parameters=True)
    x = torch.arange(3.0 * 2 * (get_rank() + 1)).reshape(-1, 3).double() / 10
    parts = x.split(1)
    for i, part in enumerate(parts[:2]):
        with accumulate(model, i, 2):
            model(part).sum().backward()
    for p in net.spare.parameters():
        p.grad = None  # as where no rank has used it
    given = net.body.weight.grad
    assert global_mean(model, get_rank() + 1) is None
    assert net.body.weight.grad is given and net.fixed.weight.grad is None and net.spare.weight.grad is None
    samples = sum(range(1, get_world_size() + 1))
    reference = _Policy().double()
    reference.load_state_dict(net.state_dict())
    sums = torch.arange(6.0).reshape(-1, 3).double() / 10
    (get_world_size() * reference.value(sums).sum() / samples).backward()
    return given.flatten().tolist(), reference.body.weight.grad.flatten().tolist()


@pytest.mark.parametrize("world_size", [0, 2, 3])
def test_global_mean_of_a_model_scales_the_gradients_it_has(world_size):
    for given, expected in [each["_scaled"] for each in _at_the_border(world_size)] if world_size else [_scaled()]:
        assert given == pytest.approx(expected)


def test_global_mean_scales_a_gradient_of_two_parameters_once_and_one_that_was_expanded():
    net = nn.ParameterList([nn.Parameter(torch.zeros(2)) for _ in range(3)])
    net[0].grad = net[1].grad = torch.full((2,), 6.0)
    net[2].grad = torch.tensor(6.0).expand(2)
    global_mean(net, 3)
    assert [p.grad.tolist() for p in net] == [[2.0, 2.0]] * 3


def _of_one_memory(kind: str) -> list[torch.Tensor]:
    """Gradients that overlap in memory, as autograd gives them where a sum passes one on to several."""
    memory = torch.arange(1.0, 13.0)
    if kind == "whole":
        return [memory[:3], memory[:3].view(1, 3), memory[:3].view(3, 1)]
    if kind == "in part":
        return [memory[4:8], memory[2:5], memory[:3], memory[9:]]
    if kind == "of two dtypes":
        return [torch.view_as_complex(memory.view(6, 2))[:3], memory[4:7]]
    matrix = memory.view(3, 4)
    return [matrix[:, 1], matrix.t()[:2], matrix[1, 1:2], matrix[2, 2:]]


def _scaled_in_one_memory() -> dict[str, bool]:
    samples = sum(range(1, get_world_size() + 1))
    found = {}
    for kind in ("whole", "in part", "strided"):
        gradients = _of_one_memory(kind)
        expected = [gradient * get_world_size() / samples for gradient in gradients]
        net = nn.ParameterList([nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients])
        for p, gradient in zip(net, gradients, strict=True):
            p.grad = gradient
        global_mean(net, get_rank() + 1)
        found[kind] = all(torch.allclose(p.grad, one) for p, one in zip(net, expected, strict=True))
        found[f"{kind}: in place where possible"] = any(p.grad is g for p, g in zip(net, gradients, strict=True))
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_global_mean_scales_gradients_that_share_memory_once(world_size):
    for found in on_ranks(_scaled_in_one_memory, world_size):
        assert all(found.values()), found


def _averaged_in_one_memory() -> dict[str, bool]:
    """Whether gradients that overlap in memory on the last rank alone become the means of all ranks."""
    is_last = get_rank() == get_world_size() - 1
    found = {}
    for kind in ("whole", "in part", "of two dtypes", "strided"):
        ones = _of_one_memory(kind)
        factors = [1.0 if is_last else place + 2.0 for place in range(len(ones))]
        gradients = ones if is_last else [one * factor for one, factor in zip(ones, factors, strict=True)]
        expected = [one * all_reduce_mean(factor) for one, factor in zip(ones, factors, strict=True)]
        parameters = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
        for p, gradient in zip(parameters, gradients, strict=True):
            p.grad = gradient
        average_gradients(*parameters)
        found[kind] = all(torch.allclose(p.grad, one) for p, one in zip(parameters, expected, strict=True))
        is_in_place = parameters[0].grad is gradients[0]
        found[f"{kind}: in place where possible"] = is_in_place == gradients[0].is_contiguous()
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_gradients_that_overlap_in_memory_on_one_rank_get_their_means(world_size):
    for found in on_ranks(_averaged_in_one_memory, world_size):
        assert all(found.values()), found


def half_counts() -> tuple[float, float]:
    total = global_mean(torch.tensor(6.0), torch.tensor(40000.0, dtype=torch.float16))
    three = global_mean(torch.tensor(6.0), np.float16(3))
    return float(total), float(three)


def test_a_count_may_be_of_half_precision() -> None:
    for total, three in on_ranks(half_counts, 2):
        assert total == pytest.approx(1.5e-4) and three == 2.0
