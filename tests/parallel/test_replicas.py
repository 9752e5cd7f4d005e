"""check_replicas: everything that can drift, damaged on one rank of three, must be named on all."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from conftest import on_ranks
from torch import nn

import ddpkit
from ddpkit import MismatchError, ReplicaMismatchError, get_rank, get_world_size
from ddpkit.parallel.replicas import check_replicas, sync_buffers
from ddpkit.parallel.wrap import wrap_model

Parts = tuple[nn.Module, torch.optim.Optimizer]


def _parts() -> Parts:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.Linear(64, 1))
    net.register_buffer("scale", torch.tensor(float("nan")))
    net.register_buffer("flags", torch.tensor([True, False]))
    net.register_buffer("sixteen", torch.ones(3, dtype=torch.bfloat16))
    net.register_buffer("empty", torch.zeros(0, 3))
    optimizer = torch.optim.Adam([{"params": net[0].parameters()}, {"params": net[2].parameters(), "lr": 0.1}])
    net(torch.randn(2, 8)).square().sum().backward()
    optimizer.step()
    return net, optimizer


@torch.no_grad()
def _ulp(net: nn.Module, _: torch.optim.Optimizer) -> None:
    net[0].weight[3, 5] = torch.nextafter(net[0].weight[3, 5], torch.tensor(torch.inf))


@torch.no_grad()
def _permuted(net: nn.Module, _: torch.optim.Optimizer) -> None:
    net[0].bias.copy_(net[0].bias.flip(0))


@torch.no_grad()
def _twos(net: nn.Module, _: torch.optim.Optimizer) -> None:
    net[2].weight.fill_(1.0 + (get_rank() == 1))


def _adam(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state[net[0].bias]["exp_avg"] *= 1.5


def _step(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state[net[2].bias]["step"] += 1


def _no_state(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    del optimizer.state[net[2].bias]


def _lr(_: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[1]["lr"] = 0.2


def _betas(_: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["betas"] = (0.9, 0.98)


def _numpy_lr(_: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["lr"] = np.float32(0.2 if get_rank() == 1 else 0.1)


def _numpy_state(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state[net[0].bias]["history"] = {"losses": [np.ones(2) * (1 + (get_rank() == 1))]}


def _buffer(net: nn.Module, _: torch.optim.Optimizer) -> None:
    net[1].running_mean[0] += 1


def _minus_nan(net: nn.Module, _: torch.optim.Optimizer) -> None:
    net.scale.neg_()


def _flag(net: nn.Module, _: torch.optim.Optimizer) -> None:
    net.flags[1] = True


def _dtype(net: nn.Module, _: torch.optim.Optimizer) -> None:
    net.sixteen = net.sixteen.half()


def _shape(net: nn.Module, _: torch.optim.Optimizer) -> None:
    net.empty = torch.zeros(3, 0)


def _missing(net: nn.Module, _: torch.optim.Optimizer) -> None:
    del net.sixteen


def _frozen(net: nn.Module, _: torch.optim.Optimizer) -> None:
    net[0].bias.requires_grad_(False)


def _evaluating(net: nn.Module, _: torch.optim.Optimizer) -> None:
    net[1].eval()


DAMAGE: dict[Callable[[nn.Module, torch.optim.Optimizer], None], str] = {
    _ulp: "parameter 0.weight: float32[64, 8] #",
    _permuted: "parameter 0.bias: float32[64] #",
    _twos: "parameter 2.weight: float32[1, 64] #",
    _evaluating: "mode of 1: ",
    _frozen: "parameter 0.bias: float32[64] #",
    _adam: "optimizer state exp_avg of 0.bias: float32[64] #",
    _step: "optimizer state step of 2.bias: float32[] #",
    _no_state: "optimizer state exp_avg of 2.bias: float32[1] #",
    _lr: "optimizer group 1 lr: 0.1 on ranks 0, 2; 0.2 on rank 1",
    _betas: "optimizer group 0 betas: [0.9, 0.999] on ranks 0, 2; [0.9, 0.98] on rank 1",
    _numpy_lr: "optimizer group 0 lr: float32 0.10000000149011612 on ranks 0, 2; float32 0.20000000298023224 on rank 1",
    _numpy_state: "optimizer state history of 0.bias: {'losses': [float64[2] array #",
    _buffer: "buffer 1.running_mean: float32[64] #",
    _minus_nan: "buffer scale: float32[] #",
    _flag: "buffer flags: bool[2] #",
    _dtype: "buffer sixteen: bfloat16[3] #",
    _shape: "buffer empty: float32[0, 3] #",
    _missing: "buffer sixteen: bfloat16[3] #",
}


def _damaged() -> dict[str, str | None]:
    messages: dict[str, str | None] = {}
    for damage in DAMAGE:
        net, optimizer = _parts()
        check_replicas(net, optimizer)  # equal so far, NaN included
        if get_rank() == 1 or damage in (_twos, _numpy_lr, _numpy_state):
            damage(net, optimizer)
        try:
            check_replicas(net, optimizer)
            messages[damage.__name__] = None
        except ReplicaMismatchError as error:
            messages[damage.__name__] = str(error)
    return messages


def test_every_difference_is_named_on_every_rank():
    results = on_ranks(_damaged, 3)
    for damage, line in DAMAGE.items():
        message, *others = (result[damage.__name__] for result in results)
        assert message is not None, f"{damage.__name__} was not seen"
        assert others == [message, message]
        assert ("sync_buffers(model) makes buffers equal" in message) == ("buffer" in line)
        entries = message.splitlines()[1:]
        (entry,) = (one for one in entries if one.startswith(f"  {line}"))
        assert "on ranks 0, 2; " in entry and entry.endswith("on rank 1")
        assert len(entries) == (3 if damage is _no_state else 1), message
        assert message.startswith(f"{len(entries)} of ")
        assert ("missing on rank 1" in message) == (damage in (_no_state, _missing)), message


def _wrapped() -> list[str]:
    model = wrap_model(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    check_replicas(model)  # as rank 0 made it
    model(torch.full((4, 2), get_rank() + 1.0))  # now BatchNorm holds the statistics of this rank's batch
    errors = []
    for _ in range(2):
        with pytest.raises(ReplicaMismatchError) as caught:
            check_replicas(model)
        errors.append(str(caught.value))
        model.eval()(torch.ones(4, 2))  # this forward sends rank 0's statistics to all
        with torch.no_grad():
            model.module[0].weight += get_rank()
    model = wrap_model(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    model.module[1].train(get_rank() == 0)
    with pytest.raises(ReplicaMismatchError, match="differ between ranks:\n  mode of 1: "):
        check_replicas(model)
    return errors


def _many() -> str:
    net = nn.ParameterList(torch.full((1,), float(get_rank())) for _ in range(30))
    with pytest.raises(ReplicaMismatchError) as caught:
        check_replicas(net)
    return str(caught.value)


def _wrapped_and_many() -> tuple[list[str], str]:
    return _wrapped(), _many()


def test_names_are_the_models_own_and_statistics_differ_until_the_next_forward():
    for (first, second), many in on_ranks(_wrapped_and_many, 2):
        assert [line.split(":")[0] for line in first.splitlines()[1:]] == ["  buffer 1.running_mean"]
        assert [line.split(":")[0] for line in second.splitlines()[1:]] == ["  parameter 0.weight"]
        assert many.startswith("30 of 31 entries")
        assert many.endswith("  and 10 more")  # a long list is cut


def test_one_process_has_nothing_to_compare():
    check_replicas(*_parts())


class _Statistics(nn.Module):
    """Buffers of all kinds, that differ between ranks, are equal, or cannot be compared with ==."""

    def __init__(self) -> None:
        super().__init__()
        rank = get_rank()
        self.norm = nn.BatchNorm1d(3)
        self.norm.running_mean.fill_(rank + 0.1)
        self.norm.running_var[1] = 10.0**rank
        self.norm.num_batches_tracked.fill_(7 + rank)
        self.register_buffer("sixteen_bits", torch.full((2,), 40000.0 + 64 * rank, dtype=torch.float16))
        self.register_buffer("flags", torch.tensor([rank == 0, True]))
        self.register_buffer("phase", torch.tensor([1j * rank, 1.0]))
        self.register_buffer("mask", torch.full((3, 3), float("-inf")).triu(1))
        self.register_buffer("empty", torch.zeros(0, 2))
        self.register_buffer("third", torch.full((2,), 1 / 3), persistent=False)
        self.register_buffer("seen", torch.full((2,), float(rank)), persistent=False)
        self.register_buffer("transposed", torch.full((2, 3), float(rank)).t())
        self.register_buffer("column", torch.full((1, 3), float(rank))[:, 0])
        self.register_buffer("conjugate", torch.tensor([1j * rank, 1.0]).conj())
        self.register_buffer("imaginary", torch.tensor([1j * rank]).conj().imag)
        self.large = nn.Module()
        self.large.register_buffer("table", torch.full((3000,), rank / 7))


def _floats(model: nn.Module) -> dict[str, list[float]]:
    return {name: buffer.flatten().tolist() for name, buffer in model.named_buffers()}


def _synced() -> dict[str, dict[str, list[float]]]:
    found = {}
    for how in ("mean", "broadcast"):
        model = _Statistics()
        given = dict(model.named_buffers())
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(get_rank())
        sync_buffers(model, how)
        assert all(model.get_buffer(name) is buffer for name, buffer in given.items())
        assert {p.unique().item() for p in model.parameters()} == {get_rank()}  # not its business
        found[how] = _floats(model)
    plain = _Statistics()
    del plain.phase, plain.conjugate, plain.flags  # DDP of torch 2.6 cannot send them from a CPU
    wrapped = wrap_model(plain, broadcast_buffers=False)
    compiled = torch.compile(_Statistics(), backend="eager")
    for p in compiled.parameters():
        nn.init.ones_(p)
    unequal = wrapped if get_rank() == 0 else wrapped.module  # a wrapper on one rank only
    for model in (wrapped, compiled, unequal):
        for i, buffer in enumerate(model.buffers()):
            if buffer.is_floating_point() and i == 0:
                buffer += get_rank()
        sync_buffers(model)
        check_replicas(model)
    with torch.inference_mode():
        model = wrapped.module
        model.norm.running_mean.fill_(get_rank())
        sync_buffers(model)
        check_replicas(model)
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_sync_buffers_makes_buffers_equal_bit_for_bit_and_leaves_equal_ones_alone(world_size):
    results = on_ranks(_synced, world_size)
    ranks = range(world_size)
    first = results[0]
    assert all(repr(found) == repr(first) for found in results)
    mean = first["mean"]
    assert mean["norm.running_mean"] == pytest.approx([sum(ranks) / world_size + 0.1] * 3)
    assert mean["norm.running_var"] == pytest.approx([1, sum(10.0**rank for rank in ranks) / world_size, 1])
    assert mean["sixteen_bits"] == [40000.0 + 32 * (world_size - 1)] * 2
    assert mean["phase"] == [0, 1]  # rank 0's
    assert mean["seen"] == pytest.approx([sum(ranks) / world_size] * 2)
    assert mean["column"] == pytest.approx([sum(ranks) / world_size])
    assert mean["conjugate"] == [0, 1]
    assert mean["imaginary"] == pytest.approx([-sum(ranks) / world_size])
    assert mean["transposed"] == pytest.approx([sum(ranks) / world_size] * 6)
    assert mean["large.table"] == pytest.approx([sum(ranks) / world_size / 7] * 3000)
    for found in first.values():
        assert found["norm.num_batches_tracked"] == [7]  # rank 0's
        assert found["flags"] == [True, True]
        assert found["third"] == [torch.tensor(1 / 3).item()] * 2
        assert found["mask"][:4] == [0, float("-inf"), float("-inf"), 0]
    assert first["broadcast"]["norm.running_mean"] == [torch.tensor(0.1).item()] * 3
    assert first["broadcast"]["large.table"] == [0] * 3000


class _Buffer(nn.Module):
    def __init__(self, buffer: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("scale", buffer)


def _cannot() -> list[str]:
    found = []
    second = get_rank() == 1
    calls = {
        "how": lambda: sync_buffers(nn.Linear(1, 1), "max" if second else "mean"),
        "lazy": lambda: sync_buffers(nn.LazyBatchNorm1d() if second else nn.BatchNorm1d(2)),
        "meta": lambda: sync_buffers(nn.BatchNorm1d(2, device="meta" if second else "cpu")),
        "optimizer": lambda: check_replicas(nn.Linear(1, 1), "Adam" if second else None),
        "none": lambda: check_replicas(None if second else nn.Linear(1, 1)),
    }
    for call in calls.values():
        with pytest.raises((TypeError, ValueError, AttributeError, MismatchError)) as caught:
            call()
        found.append(f"{type(caught.value).__name__}: {caught.value}")
    calls = [
        lambda: sync_buffers(_Buffer(torch.ones(2 + second))),
        lambda: sync_buffers(nn.BatchNorm1d(2), "broadcast" if second else "mean"),
    ]
    for call in calls:
        with pytest.raises(MismatchError) as caught:
            call()
        found.append(f"{type(caught.value).__name__}: {caught.value}")
    sync_buffers(nn.Linear(1, 1))
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_buffers_that_cannot_be_made_equal_are_an_error_on_every_rank(world_size):
    reasons = ["'mean' or 'broadcast', got 'max'", "is lazy", "on the meta device"]
    reasons += ["or a list of them, got str", "takes a torch.nn.Module, got NoneType"]
    for rank, found in enumerate(on_ranks(_cannot, world_size)):
        for text, reason in zip(found, reasons, strict=False):
            assert reason in text
            assert text.startswith("MismatchError") == (rank != 1)
            assert rank == 1 or "rank 1: " in text
        assert "scale: float32[2] on rank" in found[-2] and "float32[3] on rank 1" in found[-2]
        assert "different collectives" in found[-1]


def test_on_one_process_there_is_nothing_to_make_equal_but_mistakes_are_found():
    model = _Statistics()
    before = repr(_floats(model))
    sync_buffers(model)
    sync_buffers(model, "broadcast")
    assert repr(_floats(model)) == before
    with pytest.raises(ValueError, match="got 'max'"):
        sync_buffers(model, "max")
    with pytest.raises(TypeError, match="got list"):
        sync_buffers([model])


def _named_module() -> str:
    net = torch.optim.swa_utils.AveragedModel(nn.Linear(1, 1))
    nn.init.constant_(net.module.weight, get_rank())
    with pytest.raises(ReplicaMismatchError) as caught:
        check_replicas(nn.DataParallel(net))
    return str(caught.value)


def test_a_submodule_of_the_models_own_that_is_called_module_keeps_its_name_in_messages():
    assert all("parameter module.weight: float32[1, 1] #" in text for text in on_ranks(_named_module, 2))


def _score(sync: bool) -> tuple[float, float]:
    """The mean error that the guide's recipe finds after training, and that of the model that rank 0 would save."""
    torch.manual_seed(0)
    model = wrap_model(nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.linspace(-3, 3, 46).reshape(-1, 2)
    dataset = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    train = ddpkit.make_loader(dataset, 4, seed=1)
    evaluation = ddpkit.make_loader(dataset, 4, train=False)
    for inputs, targets in train:
        optimizer.zero_grad()
        ddpkit.global_mean(nn.functional.mse_loss(model(inputs), targets, reduction="sum"), len(inputs)).backward()
        optimizer.step()
    if sync:
        sync_buffers(model)
    plain = ddpkit.unwrap_model(model).eval()
    with torch.no_grad():
        errors = [(plain(inputs) - targets).flatten() for inputs, targets in evaluation]
        scored = ddpkit.gather_exact(torch.cat(errors), list(evaluation.sampler), len(dataset))
        plain.load_state_dict(ddpkit.broadcast(plain.state_dict()))
        saved = (plain(x) - dataset.tensors[1]).flatten()
    return scored.abs().mean().item(), saved.abs().mean().item()


def _scores() -> list[tuple[float, float]]:
    return [_score(True), _score(False)]


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_network_with_statistics_is_scored_as_it_is_saved(world_size):
    for (scored, saved), (scored_without, saved_without) in on_ranks(_scores, world_size):
        assert scored == pytest.approx(saved, rel=1e-6)
        assert abs(scored_without - saved_without) > 1e-3  # what nobody would notice


def _in_another_order() -> list[str]:
    names = ["actor", "critic", "encoder"]
    if get_rank() == get_world_size() - 1:
        names[1:] = reversed(names[1:])
    parts = {name: nn.BatchNorm1d(2) for name in names}  # as if built from a set
    calls = (check_replicas, sync_buffers, wrap_model)
    found = []
    for call in calls:
        with pytest.raises((MismatchError, ReplicaMismatchError)) as caught:
            call(nn.ModuleDict(parts))
        found.append(f"{type(caught.value).__name__}: {caught.value}")
    check_replicas(nn.ModuleDict({name: parts[name] for name in sorted(names)}))
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_equal_parts_in_another_order_are_an_error_that_says_where(world_size):
    others = "rank 0" if world_size == 2 else "ranks 0, 1"
    heads = [
        "ReplicaMismatchError: The ranks hold equal entries in different orders: entry 2 is parameter critic.weight",
        "MismatchError: sync_buffers(how='mean') needs the same order on every rank, but entry 3 is "
        "critic.running_mean",
        "MismatchError: wrap_model needs the same order on every rank, but entry 6 is critic.weight",
    ]
    for found in on_ranks(_in_another_order, world_size):
        for text, head in zip(found, heads, strict=True):
            assert text.startswith(f"{head} on {others}; ") and f" on rank {world_size - 1}. Sets" in text, text


def _two_networks() -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
    networks = [_parts()[0], nn.Linear(2, 1, bias=False)]
    networks[1].weight.data.fill_(1.0)
    return networks, [torch.optim.SGD(net.parameters(), lr=0.1) for net in networks]


def _several() -> str:
    networks, optimizers = _two_networks()
    networks[1] = wrap_model(networks[1])
    check_replicas(networks, optimizers)
    check_replicas(tuple(networks), tuple(optimizers))
    check_replicas(networks[0], optimizers)  # an actor's and a critic's of one model
    if get_rank() == 1:
        networks[0][1].eval()
        networks[1].module.weight.data[0, 1] = 2.0
        optimizers[1].param_groups[0]["lr"] = 0.2
    with pytest.raises(ReplicaMismatchError) as caught:
        check_replicas(networks, optimizers)
    return str(caught.value)


@pytest.mark.parametrize("world_size", [2, 3])
def test_several_models_and_optimizers_are_compared_by_their_places_in_the_lists(world_size):
    equal = "rank 0" if world_size == 2 else "ranks 0, 2"
    for text in on_ranks(_several, world_size):
        assert text.startswith("3 of ")
        assert "parameter 1.weight: float32[1, 2] #" in text
        assert "mode of 0.1: " in text
        assert f"optimizer 1 group 0 lr: 0.1 on {equal}; 0.2 on rank 1" in text


_NO_OPTIMIZER = {
    "Linear": lambda: nn.Linear(2, 1),
    "dict": lambda: torch.optim.SGD(nn.Linear(2, 1).parameters()).state_dict(),
    "LambdaLR": lambda: torch.optim.lr_scheduler.LambdaLR(_parts()[1], lambda step: 1.0),
    "NoneType": lambda: [_parts()[1], None],
}


def _refused() -> list[str]:
    found = []
    for make in _NO_OPTIMIZER.values():
        with pytest.raises(TypeError) as caught:
            check_replicas(_parts()[0], make())
        found.append(str(caught.value))
    for models in ({"actor": nn.Linear(2, 1)}, [nn.Linear(2, 1), None], nn.Linear(2, 1).parameters()):
        with pytest.raises(TypeError) as caught:
            check_replicas(models)
        found.append(str(caught.value))
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_what_is_no_model_or_optimizer_is_refused_on_any_number_of_ranks(world_size):
    for found in on_ranks(_refused, world_size):
        for kind, text in zip(_NO_OPTIMIZER, found, strict=False):
            assert text == f"check_replicas() takes a torch.optim.Optimizer, or a list of them, got {kind}."
        for kind, text in zip(("dict", "NoneType", "generator"), found[len(_NO_OPTIMIZER) :], strict=True):
            assert text.startswith(f"check_replicas() takes a torch.nn.Module, got {kind}.")
