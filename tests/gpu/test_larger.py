"""Sharded models, meshes and groups, and saving without waiting, where the device is concerned."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from starting import Crew, on_a_gpu_each, on_one_device, wait_for
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import ddpkit

SAMPLES = 12
WIDTH = 2048  # of the layers of the state whose saving is timed
LAYERS = 10  # 500 MB with Adam's state
ROUNDS = 5


def mesh_of(*sizes: int) -> DeviceMesh:
    """Make a mesh of the ranks' devices."""
    names = ("replicate", "shard")[-len(sizes) :]
    return init_device_mesh(ddpkit.get_device().type, sizes, mesh_dim_names=names)


def make_run(kind: str, device: torch.device | None = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Make a model that no number of ranks divides evenly, and its optimizer."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    net: nn.Module = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    net.to(device or ddpkit.get_device())
    if kind == "sharded":
        mesh = mesh_of(ddpkit.get_world_size())
        for part in (net[0], net):
            fully_shard(part, mesh=mesh)
    elif kind == "ddp":
        net = ddpkit.wrap_model(net)
    return net, torch.optim.AdamW(net.parameters(), 0.01)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    samples = torch.linspace(-1, 1, SAMPLES * 5, dtype=torch.float64).view(SAMPLES, 5)
    mine = samples[ddpkit.get_rank() :: ddpkit.get_world_size()].to(next(net.parameters()).device)
    for _ in range(steps):
        for number, part in enumerate(mine.tensor_split(2)):
            with ddpkit.accumulate(net, number, 2):
                net(part).square().sum().backward()
        ddpkit.global_mean(net, len(mine))
        optimizer.step()
        optimizer.zero_grad()


def whole(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Return the numbers of the weights and the optimizer's state, of all ranks' parts."""
    tensors = list(ddpkit.unwrap_model(net).parameters())
    tensors += [value for state in optimizer.state.values() for value in state.values()]
    return [number for tensor in tensors for number in full(tensor).double().flatten().tolist()]


def full(tensor: Tensor) -> Tensor:
    found = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found.detach()


def train_and_save(kind: str, folder: Path, wait: bool) -> list[float]:
    """Train and save; return what was saved. Without waiting, train on while it is written."""
    net, optimizer = make_run(kind)
    train(net, optimizer, 3)
    ddpkit.check_replicas(net, optimizer)
    saved = whole(net, optimizer)
    checkpoints = ddpkit.Checkpointer(folder)
    checkpoints.save(3, model=net, optimizer=optimizer, wait=wait)
    if not wait:
        train(net, optimizer, 1)
        checkpoints.wait()
    return saved


def load(kind: str, folder: Path) -> list[float]:
    net, optimizer = make_run(kind)
    assert ddpkit.Checkpointer(folder).load_latest(model=net, optimizer=optimizer)["step"] == 3
    loaded = whole(net, optimizer)
    train(net, optimizer, 1)  # the optimizer works on
    return loaded


def on_one_process() -> Any:
    net, optimizer = make_run("plain", torch.device("cpu"))
    train(net, optimizer, 3)
    return pytest.approx(whole(net, optimizer), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("wait", [True, False])
def test_a_sharded_model_is_trained_saved_and_loaded_whole(device: str, tmp_path: Path, wait: bool) -> None:
    (saved,) = on_one_device(train_and_save, 1, device, "sharded", tmp_path, wait)
    assert saved == on_one_process()
    assert on_one_device(load, 1, device, "sharded", tmp_path) == [saved]
    assert on_one_device(load, 2, device, "ddp", tmp_path) == [saved] * 2
    assert on_one_device(load, 1, "cpu", "plain", tmp_path) == [saved]


@pytest.mark.gpus(2)
@pytest.mark.parametrize("wait", [True, False])
def test_a_sharded_model_is_that_on_all_devices(device: str, tmp_path: Path, wait: bool) -> None:
    found = on_a_gpu_each(train_and_save, "sharded", tmp_path, wait)
    assert found == [on_one_process()] * len(found)
    assert on_one_device(load, 1, device, "sharded", tmp_path) == found[:1]
    assert on_a_gpu_each(load, "sharded", tmp_path) == found


@pytest.mark.parametrize(("nprocs", "wait"), [(1, False), (2, False), (2, True)])
def test_whole_models_are_saved_from_the_device_and_loaded_in_parts(
    nprocs: int, wait: bool, device: str, tmp_path: Path
) -> None:
    first, *others = on_one_device(train_and_save, nprocs, device, "ddp", tmp_path, wait)
    assert first == on_one_process()
    assert others == [first] * len(others)
    assert on_one_device(load, 1, device, "sharded", tmp_path) == [first]


def exchange_over_a_mesh() -> list[Any]:
    """Return means over a mesh's groups, of tensors of the device and of DTensors."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    rank, n = ddpkit.get_rank(), ddpkit.get_world_size()
    mesh = mesh_of(1, n)
    number = torch.full((3,), float(rank), device=ddpkit.get_device())
    kept = {
        "terms": DTensor.from_local(number, mesh["shard"], [Partial()]),
        "same": DTensor.from_local(torch.ones_like(number), mesh["shard"], [Replicate()]),
    }
    means = ddpkit.all_reduce_mean(kept)
    assert means["terms"].device == number.device
    over_all = ddpkit.all_reduce_mean(number, group=mesh["shard"])
    alone = ddpkit.all_reduce_mean(number, group=mesh["replicate"])
    objects = ddpkit.all_gather_object(rank, group=mesh["shard"])
    ddpkit.barrier(group=mesh["shard"])
    return [means["terms"].tolist(), means["same"].tolist(), over_all.tolist(), alone.tolist(), objects]


def expected_over_a_mesh(n: int) -> list[list[Any]]:
    total = n * (n - 1) / 2
    shared = [[total] * 3, [1.0] * 3, [total / n] * 3]
    return [[*shared, [float(rank)] * 3, list(range(n))] for rank in range(n)]


def test_values_are_exchanged_over_a_mesh_of_devices(crew: Crew) -> None:
    assert crew(exchange_over_a_mesh) == expected_over_a_mesh(crew.size)


def make_large_state() -> dict[str, Any]:
    """Make a model with Adam's state, 500 MB together."""
    layers = [nn.Linear(WIDTH, WIDTH, bias=False, device=ddpkit.get_device()) for _ in range(LAYERS)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


def time_saves(folder: Path) -> dict[str, float]:
    """Return seconds of a save: one that waits, and one that does not, until the step goes on and until it is there."""
    state = make_large_state()
    waiting = ddpkit.Checkpointer(folder / "waiting", keep=1)
    later = ddpkit.Checkpointer(folder / "later", keep=1)
    seconds: dict[str, list[float]] = {"save": [], "blocked": [], "in all": []}
    for step in range(ROUNDS + 1):  # the first takes memory
        start = begin_clock()
        waiting.save(step, **state)
        seconds["save"].append(time.perf_counter() - start)
        start = begin_clock()
        later.save(step, **state, wait=False)
        seconds["blocked"].append(time.perf_counter() - start)
        later.wait()
        seconds["in all"].append(time.perf_counter() - start)
    return {name: statistics.median(each[1:]) for name, each in seconds.items()}


def begin_clock() -> float:
    wait_for(ddpkit.get_device())
    ddpkit.barrier()
    return time.perf_counter()


@pytest.mark.parametrize("nprocs", [1, 2])
def test_for_how_long_a_step_waits_for_a_save(nprocs: int, device: str, tmp_path: Path, record_property: Any) -> None:
    seconds, *_ = on_one_device(time_saves, nprocs, device, tmp_path, timeout=120.0)
    texts = [f"{name} {value:.3f} s" for name, value in seconds.items()]
    record_property("measured", f"500 MB: {', '.join(texts)}")


def save_and_overwrite(folder: Path) -> list[bool]:
    """Save without waiting, and change everything at once; return what was saved of it, and what is loaded."""
    net = nn.Linear(4000, 4000, device=ddpkit.get_device())
    checkpoints = ddpkit.Checkpointer(folder, keep=2)
    found = []
    for step in range(1, 6):
        with torch.no_grad():
            net.weight.fill_(float(step))
        checkpoints.save(step, model=net, wait=False)
        with torch.no_grad():
            net.weight.fill_(-1.0)  # queued behind the copy
        checkpoints.wait()
        loaded = nn.Linear(4000, 4000)
        assert ddpkit.Checkpointer(folder).load_latest(model=loaded)["step"] == step
        found.append(bool((loaded.weight == step).all()))
    return found


def test_what_the_next_step_changes_is_not_saved(device: str, tmp_path: Path) -> None:
    assert on_one_device(save_and_overwrite, 1, device, tmp_path) == [[True] * 5]


def save_from_a_stream(folder: Path) -> bool:
    """Save what a stream of this thread's has still to compute; return whether that is what was saved."""
    net = nn.Linear(4000, 4000, device=ddpkit.get_device())
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():
        torch.cuda._sleep(1_000_000_000)  # cycles: about half a second
        net.weight.fill_(7.0)
        ddpkit.Checkpointer(folder).save(1, model=net)
    loaded = nn.Linear(4000, 4000)
    ddpkit.Checkpointer(folder).load_latest(model=loaded)
    return bool((loaded.weight == 7.0).all())


@pytest.mark.cuda
def test_a_save_waits_for_the_stream_that_computes_what_is_saved(device: str, tmp_path: Path) -> None:
    (is_saved,) = on_one_device(save_from_a_stream, 1, device, tmp_path)
    assert is_saved
