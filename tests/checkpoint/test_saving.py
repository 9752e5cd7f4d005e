"""States of which each rank holds only a part, has its own, or that have no values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import on_ranks
from runs import (
    Halves,
    OwnPart,
    run_with,
)
from torch import nn

import ddpkit
from ddpkit.checkpoint.checkpointer import Checkpointer
from ddpkit.errors import CheckpointError, DdpkitError


def shard_models(folder: str) -> dict[str, str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (ddpkit.get_world_size(),))
    Checkpointer(folder).save(1, model=nn.Linear(4, 4))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model, mesh=mesh)
    tensor = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
    holder = Halves(1)
    holder.average = tensor
    assert isinstance(tensor, DTensor)
    calls = {
        "model": lambda: Checkpointer(folder).save(2, per_rank={"mine": model}),
        "held": lambda: Checkpointer(folder).save(2, per_rank={"mine": holder}),
        "own": lambda: Checkpointer(folder).save(2, per_rank={"mine": tensor}),
        "one rank": lambda: Checkpointer(folder).save(2, per_rank={"mine": tensor if ddpkit.get_rank() else 1}),
    }
    try:
        calls["fsdp1"] = (lambda old: lambda: Checkpointer(folder).save(2, model=old))(
            FullyShardedDataParallel(nn.Linear(4, 4), use_orig_params=True, device_id=torch.device("cpu"))
        )
    except Exception:  # some versions of torch have it on accelerators only
        pass
    said = {}
    for name, call in calls.items():
        try:
            call()
            said[name] = "went on"
        except DdpkitError as error:
            said[name] = f"{type(error).__name__}: {error}"
    assert Checkpointer(folder).steps() == [1]
    return said


def test_sharded_tensors_per_rank_and_fsdp_are_refused_by_name_on_every_rank(tmp_path: Path) -> None:
    named = {
        "model": "mine['0.weight']",
        "held": "per_rank.mine.average",
        "own": "mine",
        "one rank": "mine",
        "fsdp1": "model",
    }
    for said in on_ranks(shard_models, 2, str(tmp_path), timeout=60.0):
        for name, text in said.items():
            assert text.startswith("CheckpointError: ") and "does not handle sharded tensors" in text, (name, text)
            assert named[name] in text, (name, text)


def save_what_may_differ(folder: str) -> list[Any]:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns of what it uses itself

    rank, world_size, checkpoints = ddpkit.get_rank(), ddpkit.get_world_size(), Checkpointer(folder)
    torch.manual_seed(rank)
    model = ddpkit.wrap_model(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(plain, 5)
    loader = ddpkit.make_loader(torch.utils.data.TensorDataset(torch.randn(50, 2)), 4)

    def step() -> list[Any]:
        (x,) = next(batches)
        model(x + rank).square().sum().backward()
        for optimizer in (zero, plain):
            optimizer.step()
        plain.zero_grad()
        scheduler.step()
        return [tensor.detach().clone() for tensor in model.module.state_dict().values()]

    batches, part = iter(loader), OwnPart(rank + 1.0)
    for _ in range(2):
        step()
    everyone = ddpkit.all_gather_object(model.module[1].running_mean.tolist())
    assert world_size == 1 or everyone[0] != everyone[1], "the buffers are alike: this test shows nothing"
    state = {"model": model, "zero": zero, "plain": plain, "scheduler": scheduler, "loader": loader}
    different = [torch.optim.SGD, torch.optim.Adam][rank % 2](nn.Linear(2, 2).parameters(), lr=0.1)
    own = {"part": part, "mine": {"rank": rank, "t": torch.full((rank,), 1)}, "different": different}
    path = checkpoints.save(3, **state, per_rank=own)
    expected = step()[0]
    nn.init.normal_(model.module[0].weight)
    part.moment.zero_()
    different.param_groups[0]["lr"] = 0.0
    rest = checkpoints.load_latest(**state, part=part, different=different)
    assert different.param_groups[0]["lr"] == 0.1
    of_another = torch.optim.Adagrad(nn.Linear(2, 2).parameters()) if rank == 1 else different
    with pytest.raises(CheckpointError, match="Rank 1: .*\n.*different is Adam in the checkpoint, Adagrad here"):
        checkpoints.load(path, different=of_another)
    assert rest["mine"]["rank"] == rank and len(rest["mine"]["t"]) == rank and rest.keys() == {"step", "mine"}
    assert part.moment.tolist() == [rank + 1.0] * (2 + rank)
    batches = iter(loader)
    assert torch.equal(step()[0], expected), "the resumed run is another one"
    assert torch.load(path, weights_only=True)["per_rank"][rank]["per_rank"]["mine"]["rank"] == rank
    return [rank]


@pytest.mark.parametrize("nprocs", [2, 3])
def test_each_rank_gets_its_own_back_when_asked_to(tmp_path: Path, nprocs: int) -> None:
    on_ranks(save_what_may_differ, nprocs, str(tmp_path), timeout=60.0)
    for others in (1, 2) if nprocs == 3 else (1, 3):
        for said in on_ranks(load_on_others, others, str(tmp_path)):
            assert f"holds part, mine, different for each of {nprocs} ranks, but this job has {others}" in said


def load_on_others(folder: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        Checkpointer(folder).load_latest()
    return str(caught.value)


def on_a_default_device(folder: str, device: str) -> list[Any]:
    torch.manual_seed(0)
    run = run_with(2)
    checkpoints = Checkpointer(folder)
    torch.set_default_device(device)
    try:
        path = checkpoints.save(1, **run, note=[1, {"a": 2.0}])
        drawn = torch.rand((), device="cpu").item()
        assert checkpoints.load_latest(**run)["note"] == [1, {"a": 2.0}]
        again = torch.rand((), device="cpu").item()
        whole = checkpoints.load(path)
        return [drawn == again, whole["model"]["0.weight"].tolist(), run["optimizer"].state_dict()["param_groups"]]
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("nprocs", [1, 2])
def test_the_default_device_does_not_matter(tmp_path: Path, nprocs: int) -> None:
    usual, other = (on_ranks(on_a_default_device, nprocs, str(tmp_path / kind), kind) for kind in ("cpu", "meta"))
    assert all(result[0] for result in usual) and other == usual


def test_what_has_no_values_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"Cannot save state\.model\.weight: it is on the meta device"):
        Checkpointer(tmp_path).save(1, model=nn.Linear(1, 1, device="meta"))


def save_what_is_lazy(folder: str) -> list[str]:
    calls = [
        {"net": nn.LazyLinear(2)},
        {"per_rank": {"net": nn.Sequential(nn.LazyLinear(2))}},
        {"found": [nn.UninitializedBuffer()]},
    ]
    found = []
    for call in calls:
        with pytest.raises(CheckpointError) as caught:
            Checkpointer(folder).save(1, **call)
        found.append(str(caught.value))
    return found


@pytest.mark.parametrize("nprocs", [1, 2])
def test_what_is_lazy_is_named(tmp_path: Path, nprocs: int) -> None:
    for found in on_ranks(save_what_is_lazy, nprocs, str(tmp_path)):
        names = ("state.net.weight", "per_rank.net['0.weight']", "state.found[0]")
        for name, text in zip(names, found, strict=True):
            assert f"Cannot save {name}: it is lazy" in text and "Call the model once first." in text


NUMPY_SCALARS = {
    "float": (np.float16(1.5), np.float32(0.1), np.float64(np.inf)),
    "int": [np.int8(-3), np.int64(2**62), np.uint64(2**64 - 1)],
    "bool": np.bool_(True),
    "complex": np.complex64(1j),
    "texts": {"str": np.str_("best"), "bytes": np.bytes_(b"best")},
    "counts": {np.int64(3): np.int64(4), np.str_("cat"): 1},
}


def save_scalars_of_numpy(folder: str, wait: bool) -> list[Any]:
    checkpoints = Checkpointer(folder)
    net = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=np.float32(0.5))
    found: list[Any] = []
    path = checkpoints.save(1, optimizer=optimizer, **NUMPY_SCALARS, per_rank={"mine": NUMPY_SCALARS}, wait=wait)
    checkpoints.wait()
    content = checkpoints.load(path)
    found.append({name: content[name] for name in NUMPY_SCALARS})
    found.append(content["mine"])
    checkpoints.load(path, optimizer=optimizer)
    found.append(optimizer.param_groups[0]["lr"])
    assert isinstance(NUMPY_SCALARS["bool"], np.bool_)  # what was passed is left alone
    return found


@pytest.mark.parametrize(("nprocs", "wait"), [(1, True), (2, True), (2, False)])
def test_scalars_of_numpy_come_back_as_those_of_python(tmp_path: Path, nprocs: int, wait: bool) -> None:
    scalars = {
        "float": (1.5, 0.10000000149011612, float("inf")),
        "int": [-3, 2**62, 2**64 - 1],
        "bool": True,
        "complex": 1j,
        "texts": {"str": "best", "bytes": b"best"},
        "counts": {3: 4, "cat": 1},
    }
    for found in on_ranks(save_scalars_of_numpy, nprocs, str(tmp_path), wait):
        assert repr(found) == repr([scalars, scalars, 0.5])  # shows the types, too
