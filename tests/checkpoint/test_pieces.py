"""Checkpoints of sharded models: loaded on other numbers of ranks and into plain models, whole or not there."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import on_ranks, same
from processes import free_port, platform_env, run
from runs import files_in
from torch import nn

import ddpkit
from ddpkit.checkpoint.checkpointer import Checkpointer
from ddpkit.checkpoint.files import dump
from ddpkit.checkpoint.sharded import lay_out
from ddpkit.errors import CheckpointError


def mesh_of(*sizes: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    sizes = sizes or (ddpkit.get_world_size(),)
    return init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :])


def distribute(tensor: torch.Tensor, mesh: Any, *placements: Any) -> Any:
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor, mesh, placements)


def make_run(kind: str, mesh: Any = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model that no number of ranks divides evenly, with a buffer that every rank holds; trained for a step."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3), nn.BatchNorm1d(3)).eval()
    if kind == "sharded":
        from torch.distributed.fsdp import fully_shard

        for part in (model[0], model):
            fully_shard(part, mesh=mesh or mesh_of())
    elif kind == "ddp":
        model = ddpkit.wrap_model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, optimizer


def set_state(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int = 1) -> None:
    """Give parameters and optimizer values that are the same in any layout, without backward."""
    torch.manual_seed(seed)
    for parameter in model.parameters():
        value = torch.randn(parameter.shape).to(parameter.dtype)
        local = value
        if hasattr(parameter, "placements"):
            local = distribute(value, parameter.device_mesh, *parameter.placements)
        parameter.grad = local
    optimizer.step()
    optimizer.zero_grad()


def whole_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    whole = {f"model.{name}": value for name, value in ddpkit.unwrap_model(model).state_dict().items()}
    for number, state in optimizer.state_dict()["state"].items():
        whole |= {f"{number}.{name}": value for name, value in state.items()}
    return {name: _full(value) for name, value in whole.items()}


def _full(value: Any) -> torch.Tensor:
    if hasattr(value, "full_tensor"):
        value = value.full_tensor()
    return value.detach().clone()


def save(folder: str, kind: str, wait: bool) -> dict[str, Any]:
    model, optimizer = make_run(kind)
    set_state(model, optimizer)
    state = whole_state(model, optimizer)
    checkpoints = Checkpointer(folder)
    checkpoints.save(1, model=model, optimizer=optimizer, note=[1, 2], wait=wait)
    if not wait:
        set_state(model, optimizer, seed=2)  # what is saved is what it was
        checkpoints.wait()
    assert checkpoints.steps() == [1]
    return state


def load(folder: str, kind: str) -> tuple[Any, dict[str, Any]]:
    model, optimizer = make_run(kind)
    found = Checkpointer(folder).load_latest(model=model, optimizer=optimizer)
    state = whole_state(model, optimizer)
    set_state(model, optimizer)  # the optimizer works on
    return found, state


@pytest.mark.parametrize("wait", [pytest.param(True, marks=pytest.mark.storm), False])
def test_it_is_the_same_on_any_number_of_ranks_sharded_or_not(tmp_path: Path, wait: bool) -> None:
    readers = [(3, "sharded"), (1, "plain"), (2, "ddp"), (2, "sharded")]
    writers = {(2, "sharded"): readers[:3], (3, "sharded"): readers[3:], (2, "ddp"): readers[:1], (1, "sharded"): []}
    for number, ((ranks, kind), some_readers) in enumerate(writers.items()):
        folder = str(tmp_path / f"{number}")
        saved = on_ranks(save, ranks, folder, kind, wait)
        for ranks_now, kind_now in readers if wait else some_readers or readers[3:]:
            for found, state in on_ranks(load, ranks_now, folder, kind_now):
                assert found == {"step": 1, "note": [1, 2]}
                assert same(state, saved[0]), (ranks, kind, ranks_now, kind_now)


def save_on_meshes(folder: str) -> dict[str, Any]:
    """Four ranks: HSDP, tensor parallelism on both dimensions, and tensors in nested data."""
    from torch.distributed.tensor import Replicate, Shard

    mesh = mesh_of(2, 2)
    model, optimizer = make_run("sharded", mesh)
    set_state(model, optimizer)
    number = torch.arange(35.0).reshape(5, 7)
    nested = {
        "both": [distribute(number, mesh, Shard(0), Shard(1))],
        "one twice": distribute(number, mesh, Shard(0), Shard(0)),
        "copies": distribute(number, mesh, Replicate(), Replicate()),
        "scalar": distribute(torch.tensor(7), mesh, Replicate(), Replicate()),
        "empty": distribute(torch.empty(0, 3), mesh, Shard(0), Shard(1)),
        "halves": distribute(number.bfloat16(), mesh, Replicate(), Shard(1)),
    }
    checkpoints = Checkpointer(folder)
    path = checkpoints.save(1, model=model, optimizer=optimizer, nested=nested)
    state = whole_state(model, optimizer)
    expected = {"both": [number], "one twice": number, "copies": number, "scalar": torch.tensor(7)}
    expected |= {"empty": torch.empty(0, 3), "halves": number.bfloat16()}
    loaded = checkpoints.load(path)
    assert same(loaded["nested"], expected)
    here = {"both": [distribute(number * 0, mesh, Shard(1), Replicate())], "copies": number * 0}
    holder = Holder(here)
    checkpoints.load(path, nested=holder)
    assert holder.state["both"][0].placements == here["both"][0].placements
    assert torch.equal(holder.state["both"][0].full_tensor(), number)
    other, other_optimizer = make_run("sharded", mesh_of(4))
    found = checkpoints.load_latest(model=other, optimizer=other_optimizer)
    assert found is not None and found["nested"]["copies"].is_meta  # not read where it was not asked for
    assert same(whole_state(other, other_optimizer), state)
    folder_of_pieces = next(entry for entry in path.parent.iterdir() if entry.is_dir())
    return {"bytes": sum(file.stat().st_size for file in folder_of_pieces.iterdir()), "state": state}


class Holder:
    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def test_each_piece_is_written_once_whatever_the_mesh(tmp_path: Path) -> None:
    found = on_ranks(save_on_meshes, 4, str(tmp_path))[0]
    numbers = sum(value.numel() for name, value in found["state"].items() if "3." not in name and "step" not in name)
    # besides: alignment, and a last line for each of four files
    assert 4 * numbers <= found["bytes"] <= 4 * numbers + 4 * 200 + 64 * 60


def save_what_differs(folder: str) -> dict[str, str]:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    rank, mesh = ddpkit.get_rank(), mesh_of()
    ones = torch.ones(4)

    def part(tensor: torch.Tensor, placement: Any) -> Any:  # unlike `distribute`, not collective
        return DTensor.from_local(tensor, mesh, [placement], run_check=False)

    calls = {
        "copies": part(ones * (rank == 0), Replicate()),
        "terms": part(ones, Partial()),
        "one rank": part(ones, Shard(0)) if rank else 1,
        "shapes": part(ones if rank else torch.ones(4, 2), Shard(0)),
    }
    said = {}
    for name, value in calls.items():
        with pytest.raises(CheckpointError) as raised:
            Checkpointer(folder).save(2, values={"deep": [1, value]})
        said[name] = str(raised.value)
    with pytest.raises(CheckpointError) as raised:
        Checkpointer(folder).save(2, per_rank={"mine": part(ones, Shard(0))})
    said["own"] = str(raised.value)
    ddpkit.barrier()
    assert [name for name in files_in(Path(folder)) if name.endswith(".pt")] == []
    return said


def test_what_cannot_be_saved_is_refused_on_every_rank(tmp_path: Path) -> None:
    for said in on_ranks(save_what_differs, 2, str(tmp_path)):
        assert "values.deep[1]: float32[4] #" in said["copies"] and "differ between ranks" in said["copies"]
        assert "hold partial sums" in said["terms"]
        assert "the ranks hold parts of different tensors:\n  values.deep[1]:" in said["one rank"]
        assert "the ranks hold parts of different tensors:\n  values.deep[1]:" in said["shapes"]
        assert "does not handle sharded tensors" in said["own"] and "mine" in said["own"]


def save_copies_on_a_mesh(folder: str) -> str:
    from torch.distributed.tensor import DTensor, Replicate

    rank = ddpkit.get_rank()
    ones = torch.ones(4) + (rank == 3)
    copies = DTensor.from_local(ones, mesh_of(2, 2), [Replicate(), Replicate()], run_check=False)
    with pytest.raises(CheckpointError) as raised:
        Checkpointer(folder).save(1, copies=copies)
    return str(raised.value)


def test_a_copy_that_differs_on_one_rank_of_a_mesh_is_named_on_all(tmp_path: Path) -> None:
    for said in on_ranks(save_copies_on_a_mesh, 4, str(tmp_path)):
        assert "Rank 1: Nothing was saved" in said and "copies: float32[4] #" in said


def save_and_break(folder: str, wait: bool) -> list[str]:
    checkpoints, rank = Checkpointer(folder), ddpkit.get_rank()
    model, optimizer = make_run("sharded")
    set_state(model, optimizer)
    checkpoints.save(1, model=model, optimizer=optimizer)
    before = checkpoints_in(folder)
    ddpkit.barrier()
    fsync = os.fsync

    def full(file: int) -> None:
        raise OSError(28, "No space left on device")

    said = []
    for broken in (1, 0):
        if rank == broken:
            os.fsync = full
        try:
            with pytest.raises(CheckpointError) as raised:
                checkpoints.save(2, model=model, optimizer=optimizer, wait=wait)
                checkpoints.wait()
            said.append(str(raised.value))
        finally:
            os.fsync = fsync
        ddpkit.barrier()
        assert checkpoints_in(folder) == before
        ddpkit.barrier()
    checkpoints.save(2, model=model, optimizer=optimizer, wait=wait)
    checkpoints.wait()
    assert checkpoints.steps() == [1, 2]
    # a rank that was still writing may have kept rank 0 from deleting a folder of pieces: this save has done it
    assert sum(entry.is_dir() for entry in Path(folder).iterdir()) == 2
    return said


def checkpoints_in(folder: str) -> list[str]:
    return sorted(entry.name for entry in Path(folder).iterdir() if entry.is_file())


@pytest.mark.parametrize("wait", [True, False])
def test_a_rank_that_cannot_write_its_part_is_named_on_every_rank(tmp_path: Path, wait: bool) -> None:
    for said in on_ranks(save_and_break, 3, str(tmp_path), wait):
        assert "Rank 1: " in said[0] and "rank-1.bin" in said[0] and "No space left" in said[0], said
        assert "rank-0.bin" in said[1] and "No space left" in said[1], said


def save_without_memory_for_the_copy(folder: str) -> list[str]:
    def fail(*_: object) -> None:
        raise MemoryError("no memory for the copy")

    checkpoints, said = Checkpointer(folder), []
    model, _ = make_run("sharded")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ddpkit.checkpoint.sharded._PATIENCE", 0.2)
        for _ in range(2):
            with pytest.MonkeyPatch.context() as once, pytest.raises(CheckpointError) as raised:
                if ddpkit.get_rank() == 1 and not said:
                    once.setattr("ddpkit.checkpoint.checkpointer.snapshot", fail)
                checkpoints.save(1, model=model, wait=False)
            said.append(str(raised.value))
    checkpoints.save(2, model=model)
    assert checkpoints.steps() == [2]
    return said


def test_a_rank_that_cannot_copy_its_part_leaves_the_ranks_alike(tmp_path: Path) -> None:
    for first, second in on_ranks(save_without_memory_for_the_copy, 2, str(tmp_path)):
        assert "Rank 1: MemoryError: no memory for the copy" in first
        assert "Saving step 1 without waiting failed: Not saved: rank 1 wrote nothing into" in second


def keep_some(folder: str) -> list[list[str]]:
    def entries() -> list[str]:
        ddpkit.barrier()
        found = [name.partition(".")[0] for name in os.listdir(folder) if Path(folder, name).is_dir()]
        ddpkit.barrier()
        return sorted(found)

    model, _ = make_run("sharded")
    checkpoints = Checkpointer(folder, keep=2)
    seen = []
    for step in (1, 2, 3):
        checkpoints.save(step, model=model, wait=step > 1)
    seen.append(entries())
    checkpoints.save(3, model=model)  # again
    seen.append(entries())
    if ddpkit.is_main_process():
        Path(folder, "step-000000009.0123456789abcdef").mkdir()  # of a writer that was killed
        Path(folder, "step-mine.0123456789abcdef").mkdir()
    ddpkit.barrier()
    checkpoints.save(3, note=1)  # plain
    seen.append(entries())
    return seen


def test_pieces_go_with_their_checkpoint(tmp_path: Path) -> None:
    two, three = "step-000000002", "step-000000003"
    for seen in on_ranks(keep_some, 2, str(tmp_path)):
        assert seen == [[two, three], [two, three], [two, "step-mine"]]


class Refuses(Holder):
    """Takes its state on rank 0 only."""

    def load_state_dict(self, state: Any) -> None:
        if ddpkit.get_rank():
            raise RuntimeError("not today")
        super().load_state_dict(state)


def load_what_does_not_fit(folder: str) -> dict[str, str]:
    checkpoints = Checkpointer(folder)
    model, optimizer = make_run("sharded")
    set_state(model, optimizer)
    with torch.no_grad():
        for parameter in model[0].parameters():
            parameter.fill_(1e30)
    checkpoints.save(1, model=model, optimizer=optimizer, other=[3])
    saved = {name: _full(value) for name, value in model.state_dict().items()}
    said = {}

    def fails(name: str, model: nn.Module, optimizer: torch.optim.Optimizer, **others: Any) -> None:
        set_state(model, optimizer, seed=3)
        before = whole_state(model, optimizer)
        with pytest.raises(CheckpointError) as raised:
            checkpoints.load_latest(model=model, optimizer=optimizer, **others)
        said[name] = str(raised.value)
        if "undefined state" not in said[name]:
            assert same(whole_state(model, optimizer), before), name

    fails("refused", *make_run("sharded"), other=Refuses(1))
    halves, _ = make_run("sharded")
    fails("dtype", halves.half(), torch.optim.AdamW(halves.parameters()))
    brains, _ = make_run("sharded")
    brains.bfloat16()
    checkpoints.load_latest(model=brains)
    for name, value in brains.state_dict().items():
        assert torch.equal(_full(value), saved[name].to(value.dtype)), name
    wider = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3), nn.BatchNorm1d(3))
    with pytest.raises(CheckpointError) as raised:
        checkpoints.load_latest(model=wider)
    said["shape"] = str(raised.value)
    return said


def test_a_load_that_fails_says_why_on_every_rank(tmp_path: Path) -> None:
    for said in on_ranks(load_what_does_not_fit, 2, str(tmp_path)):
        assert "Rank 1: RuntimeError: not today\nThe objects are in an undefined state" in said["refused"]
        assert "as float32 in the checkpoint, float16 here, which cannot hold its values" in said["dtype"]
        assert "nothing was loaded" in said["dtype"]
        assert "has 0.weight of shape (7, 5) in the checkpoint, (8, 5) here" in said["shape"]


def damage(folder: str) -> list[Any]:
    model, optimizer = make_run("sharded")
    set_state(model, optimizer)
    checkpoints = Checkpointer(folder)
    found = []
    for step in (1, 2, 3, 4):
        checkpoints.save(step, model=model)
    if ddpkit.is_main_process():
        folders = sorted(entry for entry in Path(folder).iterdir() if entry.is_dir())
        data = bytearray((folders[-1] / "rank-1.bin").read_bytes())
        data[3] ^= 1
        (folders[-1] / "rank-1.bin").write_bytes(data)
        (folders[-2] / "rank-0.bin").unlink()
    ddpkit.barrier()
    for step in (4, 3):
        with pytest.raises(CheckpointError) as raised:
            checkpoints.load(Path(folder, f"step-{step:09d}.pt"))
        found.append(str(raised.value))
    return [*found, checkpoints.load_latest(model=model)]


def test_a_checkpoint_with_a_damaged_or_missing_part_is_not_taken(tmp_path: Path) -> None:
    for damaged, missing, loaded in on_ranks(damage, 2, str(tmp_path)):
        assert "rank-1.bin: its checksum does not match" in damaged
        assert "rank-0.bin" in missing and "No such file" in missing
        assert loaded == {"step": 2}


def lose_a_rank(folder: str) -> None:
    with ddpkit.distributed(device="cpu") as context:
        model, optimizer = make_run("sharded")
        set_state(model, optimizer)
        checkpoints = Checkpointer(folder)
        checkpoints.save(1, model=model, optimizer=optimizer)
        ddpkit.barrier()
        if context.rank == 1:

            def killed(file: int) -> None:
                os.kill(os.getpid(), signal.SIGKILL)

            os.fsync = killed
        checkpoints.save(2, model=model, optimizer=optimizer, wait=False)
        time.sleep(60)


@pytest.mark.storm
def test_a_rank_that_is_killed_while_it_writes_costs_no_earlier_checkpoint(tmp_path: Path) -> None:
    port = free_port()
    ended = run(lose_a_rank, [platform_env(rank, 2, port) for rank in range(2)], str(tmp_path))
    assert ended[1].code == -signal.SIGKILL and ended[0].code not in (0, None)
    assert "PeerError" in ended[0].output and max(each.seconds for each in ended) < 50
    assert [name for name in files_in(tmp_path) if name.endswith(".pt")] == ["step-000000001.pt"]
    for found, _ in on_ranks(load, 2, str(tmp_path), "sharded"):
        assert found == {"step": 1}


def test_one_plain_file_is_what_other_states_have_still(tmp_path: Path) -> None:
    Checkpointer(tmp_path).save(1, model=nn.Linear(2, 2))
    assert files_in(tmp_path) == ["latest", "step-000000001.pt"]
    assert torch.load(tmp_path / "step-000000001.pt")["format"] == 1


def test_a_file_that_tells_of_pieces_wrongly_is_refused(tmp_path: Path) -> None:
    on_ranks(save, 2, str(tmp_path), "sharded", True)
    path = tmp_path / "step-000000001.pt"
    content = torch.load(path)
    assert content["format"] == 2
    assert content["state"]["model"]["0.weight"].is_meta  # a reader sees the shape
    layout = next(iter(content["sharded"]["tensors"].values()))
    pieces = [[[0], [35], 0, 0]]  # of a tensor of two dimensions
    flat = content["sharded"]["tensors"] | {"model['0.weight']": {**layout, "shape": [7, 5], "pieces": pieces}}
    with open(tmp_path / "step-000000001.pt", "wb") as file:
        dump(content | {"sharded": content["sharded"] | {"tensors": flat}}, file)
    with pytest.raises(CheckpointError, match="has 2 dimensions, but its pieces have another number"):
        Checkpointer(tmp_path).load(path)
    shutil.copy(path, tmp_path / "step-000000007.pt")
    with pytest.raises(CheckpointError, match="its folder of pieces does not have a name"):
        Checkpointer(tmp_path).load(tmp_path / "step-000000007.pt")


def test_a_tensor_of_which_pieces_are_missing_is_not_saved() -> None:
    half = {"x": {"dtype": torch.float32, "shape": [4], "boxes": [((0,), (2,))]}}
    with pytest.raises(CheckpointError, match="x has 4 elements, but its pieces on all ranks have 2"):
        lay_out([half, half])
