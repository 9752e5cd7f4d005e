"""What is saved of models, optimizers and others: under which names, whether ranks agree, and all of it or nothing."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import on_ranks, same
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

import ddpkit
from ddpkit.checkpoint.checkpointer import Checkpointer
from ddpkit.checkpoint.files import dump
from ddpkit.checkpoint.states import module_state
from ddpkit.errors import CheckpointError, DdpkitError


class Only(nn.Module):
    """A model whose only child is called as wrappers call theirs."""

    def __init__(self, child: nn.Module | None = None) -> None:
        super().__init__()
        self.module = child or nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)


class Twice(nn.Module):
    """Shares a layer, and keeps a state of its own beside its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self._orig_mod = nn.BatchNorm1d(2)
        self.again = self._orig_mod
        self.note = "new"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._orig_mod(x)

    def get_extra_state(self) -> str:
        return self.note

    def set_extra_state(self, note: str) -> None:
        self.note = note


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")  # type: ignore[return-value]  # the default takes long to import


def inside(wrap: Any) -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), Only(), Twice())
    model[0], model[1].module = wrap(model[0]), wrap(model[1].module)
    return model


MODELS = {"only": Only, "only twice": lambda: Only(Only()), "shared": Twice, "plain": lambda: inside(lambda m: m)}


def wrapped_in_all_ways(folder: str) -> None:
    def ddp(model: nn.Module) -> nn.Module:
        return DistributedDataParallel(model) if dist.is_initialized() else model

    ways = {
        "ddp": ddp,
        "dp": DataParallel,
        "compiled": compiled,
        "compiled ddp": lambda model: compiled(ddp(model)),
        "ddp of compiled": lambda model: ddp(compiled(model)),
        "dp of compiled": lambda model: DataParallel(compiled(model)),
    }
    step = 0
    for make in MODELS.values():
        for wrap in ways.values():
            torch.manual_seed(0)
            model = wrap(make())
            saved_and_loaded(folder, step := step + 1, model, make)
    for wrap in (compiled, DataParallel, ddp):
        torch.manual_seed(0)
        saved_and_loaded(folder, step := step + 1, wrap(inside(wrap)), MODELS["plain"])
        saved_and_loaded(folder, step := step + 1, inside(wrap), MODELS["plain"])


def saved_and_loaded(folder: str, step: int, model: nn.Module, make: Any) -> None:
    path = Checkpointer(folder).save(step, model=model)
    plain, again = make(), make()
    state = torch.load(path, weights_only=True)["state"]["model"]
    assert list(state) == list(plain.state_dict()) and state._metadata.keys() == plain.state_dict()._metadata.keys()
    plain.load_state_dict(state)  # as everybody would without this library
    Checkpointer(folder).load(path, model=again)
    assert same(dict(plain.state_dict()), dict(module_state(model))) and same(dict(again.state_dict()), dict(state))
    nn.init.normal_(next(plain.parameters()))
    Checkpointer(folder).load(path, model=model)
    assert same(dict(module_state(model)), dict(state))


@pytest.mark.parametrize("nprocs", [1, 2])
def test_models_are_saved_under_torchs_own_names_however_wrapped(tmp_path: Path, nprocs: int) -> None:
    on_ranks(wrapped_in_all_ways, nprocs, str(tmp_path), timeout=60.0)


def test_files_with_the_names_of_wrappers_or_of_older_versions_load(tmp_path: Path) -> None:
    model = Only()
    path = Checkpointer(tmp_path).save(1, model=model)
    content = torch.load(path, weights_only=True)
    del content["shapes"], content["score"]  # which older versions did not write
    for names in (
        ["weight", "bias"],
        ["module.module.weight", "module.module.bias"],
        ["_orig_mod.weight", "_orig_mod.bias"],
    ):
        content["state"]["model"] = dict(zip(names, model.state_dict().values(), strict=True))
        with open(path, "wb") as file:
            dump(content, file)
        for other in (Only(), compiled(Only()), DataParallel(Only())):
            Checkpointer(tmp_path).load(path, model=other)
            assert same(dict(module_state(other)), dict(model.state_dict()))


# Everything or nothing


class Strict(nn.Linear):
    """Raises when its extra state comes, after its tensors and those before it have been changed."""

    def get_extra_state(self) -> int:
        return 1

    def set_extra_state(self, state: int) -> None:
        raise ValueError("no extra state today")


class Overridden(nn.Linear):
    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        super().load_state_dict(*args, **kwargs)
        raise ValueError("overridden")


class Fussy(torch.optim.Adam):
    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state)
        raise ValueError("fussy")


class Halves:
    """Something with a state, as people write it; it changes what it holds in place and may raise then."""

    def __init__(self, value: int, fails: bool = False) -> None:
        self.values, self.fails, self.average = [value, value], fails, torch.full((2,), float(value))

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values, "average": self.average}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values[0] = state["values"][0]
        self.average.copy_(state["average"])
        if self.fails and state["values"] == [7, 7]:
            raise ValueError("halves")
        self.values[1] = state["values"][1]


def hooked() -> nn.Module:
    model = nn.Linear(2, 2)

    def hook(*_: Any) -> None:
        raise ValueError("hooked")

    model.register_load_state_dict_post_hook(hook)
    return model


def run_with(value: int, fails: bool = False, **more: Any) -> dict[str, Any]:
    torch.manual_seed(value)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * value)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for _ in range(value):
        model(torch.rand(4, 2)).square().sum().backward()
        optimizer.step()
        scheduler.step()
    scaler, loader = torch.amp.GradScaler("cpu", init_scale=2.0**value), ddpkit.make_loader(range(20), 4)
    loader.set_epoch(value)
    ema = torch.optim.swa_utils.AveragedModel(model)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler, "loader": loader}
    return parts | {"ema": ema, "halves": Halves(value, fails)} | more


def look(run: dict[str, Any]) -> dict[str, Any]:
    keep = {name: value.state_dict() for name, value in run.items()}
    keep["lr"] = [group["lr"] for group in run["optimizer"].param_groups]
    keep["tensors"] = [tensor.detach().clone() for tensor in run["model"].parameters()]
    return torch.load(_through_a_file(keep), weights_only=False)


def _through_a_file(value: Any) -> Any:
    import io

    torch.save(value, buffer := io.BytesIO())
    buffer.seek(0)
    return buffer


def fails_halfway(folder: str) -> list[str]:
    rank, last = ddpkit.get_rank(), ddpkit.get_world_size() - 1
    breaking = {
        "no extra state today": ("last", lambda: nn.Sequential(nn.Linear(2, 2), Strict(2, 2)), nn.Module),
        "overridden": ("last", lambda: Overridden(2, 2), nn.Module),
        "hooked": ("last", hooked, nn.Module),
        "fussy": ("last", lambda: Fussy(nn.Linear(2, 2).parameters()), object),
        "halves": ("halves", lambda: Halves(1, fails=True), object),
    }
    said = []
    for number, (message, (name, make, _)) in enumerate(breaking.items()):
        torch.manual_seed(0)
        path = Checkpointer(folder).save(number, **run_with(7, **{name: Halves(7) if name == "halves" else make()}))
        torch.manual_seed(1)
        objects = run_with(1, **{name: make()})
        if rank != last:  # only on the last rank does it fail
            objects[name] = Halves(1) if name == "halves" else objects[name]
        before, drawn = look(objects), torch.get_rng_state()
        with pytest.raises(CheckpointError, match=f"nothing was changed: (Rank {last}: )?.*{message}"):
            Checkpointer(folder).load(path, **objects)
        after = look(objects)
        assert same(before, after), [key for key in before if not same(before[key], after[key])]
        assert torch.equal(drawn, torch.get_rng_state())
        optimizer = objects["optimizer"]
        assert [*optimizer.state] == [*objects["model"].parameters()]
        optimizer.step()
        said.append(message)
    return said


@pytest.mark.parametrize("nprocs", [1, 2, 3])
def test_what_fails_halfway_is_undone_on_every_rank(tmp_path: Path, nprocs: int) -> None:
    for said in on_ranks(fails_halfway, nprocs, str(tmp_path), timeout=60.0):
        assert len(said) == 5


def test_what_does_not_take_its_own_state_back_is_said(tmp_path: Path) -> None:
    class Gone(Halves):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.values[0] += 1
            raise ValueError("gone")

    path = Checkpointer(tmp_path).save(1, halves=Gone(7))
    model = nn.Linear(1, 1)
    with pytest.raises(
        CheckpointError, match=r"halves could not be put back \(ValueError: gone\): it is partly loaded"
    ):
        Checkpointer(tmp_path).load(path, halves=Gone(1))
    with pytest.raises(TypeError, match=r"has no load_state_dict\(\)"):
        Checkpointer(tmp_path).load(path, halves=model.weight)


def test_an_optimizer_or_scheduler_of_another_shape_or_class_is_refused(tmp_path: Path) -> None:
    def make(width: int, kind: Any = torch.optim.Adam) -> torch.optim.Optimizer:
        model = nn.Linear(2, width)
        optimizer = kind(model.parameters(), lr=0.1)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return optimizer

    saved = make(3)
    scheduler = torch.optim.lr_scheduler.StepLR(saved, 5)
    path = Checkpointer(tmp_path).save(1, optimizer=saved, scheduler=scheduler)
    narrow = make(5)
    before = str(narrow.state_dict())
    message = (
        r"optimizer has tensor 0 of group 0 of shape \(3, 2\) there, of \(5, 2\) here\n.*tensor 1 .*\(3,\) .*\(5,\)"
    )
    with pytest.raises(CheckpointError, match=message):
        Checkpointer(tmp_path).load(path, optimizer=narrow)
    assert str(narrow.state_dict()) == before
    other = torch.optim.lr_scheduler.ExponentialLR(narrow, 0.5)
    with pytest.raises(CheckpointError, match="scheduler is StepLR there, ExponentialLR here"):
        Checkpointer(tmp_path).load(path, scheduler=other)


def test_an_optimizer_of_named_parameters_in_another_order_is_refused(tmp_path: Path) -> None:
    def make(order: str, wrap: Any = None) -> torch.optim.Optimizer:
        model = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in "abc"})
        named = dict((wrap(model) if wrap else model).named_parameters())
        ordered = [next((name, p) for name, p in named.items() if f"{one}.weight" in name) for one in order]
        groups = [{"params": ordered[:2]}, {"params": ordered[2:], "lr": 0.5}]
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9)

    checkpoints = Checkpointer(tmp_path)
    path = checkpoints.save(1, optimizer=make("abc"))
    for wrap in (None, DataParallel, compiled):  # whose names have a prefix
        checkpoints.load(path, optimizer=make("abc", wrap))
    for order, message in {
        "bac": r"optimizer has a.weight as tensor 0 of group 0 there, b.weight here.*\n.*has b.weight as tensor 1",
        "acb": "optimizer has b.weight as tensor 1 of group 0 there, c.weight here: make it of the parameters in the",
    }.items():
        for wrap in (None, DataParallel):
            with pytest.raises(CheckpointError, match=message):
                checkpoints.load(path, optimizer=make(order, wrap))
    two_nets = [nn.Linear(2, 2), nn.Linear(2, 2)]  # whose parameters have the same names
    twins = torch.optim.SGD([{"params": net.named_parameters()} for net in two_nets], lr=0.1)
    checkpoints.load(checkpoints.save(2, optimizer=twins), optimizer=twins)
    unnamed = torch.optim.SGD([{"params": [p]} for p in nn.Linear(2, 2).parameters()], lr=0.1)
    checkpoints.load(checkpoints.save(3, optimizer=unnamed), optimizer=unnamed)


# saved values, the dtypes that hold them, and those that do not
DTYPES: list[tuple[torch.Tensor, list[torch.dtype], list[torch.dtype]]] = [
    (torch.tensor([1.7]), [torch.float64, torch.bfloat16, torch.complex64], [torch.int64, torch.bool]),
    (torch.tensor([2.0]), [torch.int8, torch.uint8], [torch.bool]),
    (torch.tensor([float("nan")]), [torch.float16], [torch.int64]),
    (torch.tensor([2**40]), [torch.float64, torch.float32], [torch.int8, torch.int32]),
    (torch.tensor([2**53 + 1]), [torch.uint64], [torch.float64, torch.complex128]),
    (torch.tensor([2**24 + 1]), [torch.float64, torch.complex128], [torch.float32, torch.complex64, torch.bfloat16]),
    (torch.tensor([-1.0e6]), [torch.bfloat16, torch.complex64], [torch.float16, torch.float8_e4m3fn]),
    (torch.tensor([float("inf"), -0.1]), [torch.float16, torch.bfloat16, torch.float8_e5m2], [torch.int64]),
    (torch.tensor([1e300], dtype=torch.float64), [torch.complex128], [torch.float32, torch.complex64]),
    (torch.tensor([1e300j], dtype=torch.complex128), [], [torch.complex64, torch.float64]),
    (torch.tensor([5e4], dtype=torch.float16).to(torch.float8_e5m2), [torch.float16], [torch.float8_e4m3fn]),
    (torch.tensor([1e-30]), [torch.float16], [torch.int8]),
    (torch.tensor([70000]), [torch.float32], [torch.float16, torch.uint16]),
    (torch.tensor([-1], dtype=torch.int8), [torch.int64], [torch.uint8, torch.uint64]),
    (torch.tensor([True]), [torch.float16, torch.uint8, torch.complex64], []),
    (torch.tensor([1 + 2j]), [torch.complex128], [torch.float32, torch.int64]),
]


@pytest.mark.parametrize("saved, fit, unfit", DTYPES, ids=[str(saved.tolist()) for saved, *_ in DTYPES])
def test_a_buffer_of_a_dtype_that_does_not_hold_the_saved_values_is_refused(
    tmp_path: Path, saved: torch.Tensor, fit: list[torch.dtype], unfit: list[torch.dtype]
) -> None:
    def holder(value: torch.Tensor) -> nn.Module:
        module = nn.Module()
        module.register_buffer("seen", value.clone())
        return module

    checkpoints = Checkpointer(tmp_path)
    path = checkpoints.save(1, model=holder(saved))
    for dtype in fit:
        model = holder(torch.zeros(len(saved), dtype=dtype))
        checkpoints.load(path, model=model)
        assert torch.equal(model.seen, saved.to(dtype)) or saved.isnan().all()
    for dtype in unfit:
        model = holder(torch.zeros(len(saved), dtype=dtype))
        with pytest.raises(CheckpointError, match=f"model has seen of {saved.dtype} there, of ".replace("torch.", "")):
            checkpoints.load(path, model=model)
        assert torch.equal(model.seen, torch.zeros(len(saved), dtype=dtype))


def adam(value: float, dtype: torch.dtype, kind: type[torch.optim.Adam] = torch.optim.Adam) -> torch.optim.Adam:
    """An optimizer after a step with a gradient of this value."""
    parameter = nn.Parameter(torch.zeros(2, dtype=dtype))
    parameter.grad = torch.full_like(parameter, value)
    optimizer = kind([parameter], lr=1e-3)
    optimizer.step()
    return optimizer


class Wide(torch.optim.Adam):
    """An optimizer that keeps its state in float32, whatever its parameters are."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        (parameter,) = self.param_groups[0]["params"]
        self.state[parameter] = dict(state_dict["state"][0])


def test_an_optimizer_whose_dtype_does_not_hold_the_saved_state_is_refused(tmp_path: Path) -> None:
    checkpoints = Checkpointer(tmp_path)
    small, large = checkpoints.save(1, optimizer=adam(1.0, torch.float32)), tmp_path / "step-000000002.pt"
    checkpoints.save(2, optimizer=adam(1e4, torch.float32))  # whose square's mean is 1e5
    half = adam(0.5, torch.float16)
    before = copy.deepcopy(half.state_dict())
    with pytest.raises(
        CheckpointError, match=r"optimizer has state\[0\]\.exp_avg_sq of float32 there, of float16 here"
    ):
        checkpoints.load(large, optimizer=half)
    assert same(half.state_dict(), before)
    checkpoints.load(small, optimizer=half)
    assert half.state[half.param_groups[0]["params"][0]]["exp_avg_sq"].tolist() == pytest.approx([1e-3] * 2, rel=1e-3)
    checkpoints.load(large, optimizer=adam(1.0, torch.bfloat16))
    wide = checkpoints.save(3, optimizer=adam(1e4, torch.float32, Wide))
    checkpoints.load(wide, optimizer=adam(0.5, torch.float16, Wide))


# Tensors that share memory


class Two(nn.Module):
    """A model with two layers, which may be one."""

    def __init__(self, tied: bool, value: float = 0.0, other: float = 0.0) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        nn.init.constant_(self.first.weight, value)
        nn.init.constant_(self.second.weight, other)
        if tied:
            self.second.weight = self.first.weight


def load_into_shared_memory(folder: str) -> list[str]:
    checkpoints = Checkpointer(folder, keep=9)
    apart = checkpoints.save(1, model=Two(False, 1.0, 2.0))
    equal = checkpoints.save(2, model=Two(False, 3.0, 3.0))
    tied = checkpoints.save(3, model=Two(True, 4.0))
    said = []
    for wrap in (lambda model: model, ddpkit.wrap_model):
        model = Two(True, 5.0)
        with pytest.raises(CheckpointError) as caught:
            checkpoints.load(apart, model=wrap(model))
        said.append(str(caught.value))
        assert model.second.weight.unique().tolist() == [5.0]
        for path, value in ((equal, 3.0), (tied, 4.0)):
            checkpoints.load(path, model=wrap(Two(True)))
            checkpoints.load(path, model=model)
            assert model.second.weight.unique().tolist() == [value]
            checkpoints.load(path, model=Two(False))
    actor, critic = Two(False), Two(False)
    path = checkpoints.save(4, actor=Two(False, 1.0, 2.0), critic=Two(False, 3.0, 4.0))
    checkpoints.load(path, actor=actor, critic=critic)
    critic.second = actor.first  # one layer in both
    for names in ({"actor": actor, "critic": critic}, {"critic": critic, "actor": actor}):
        with pytest.raises(CheckpointError) as caught:
            checkpoints.load(path, **names)
        said.append(str(caught.value))
    checkpoints.load(checkpoints.save(5, actor=actor, critic=critic), actor=actor, critic=critic)
    memory = torch.arange(6.0)
    overlapping = nn.Module()
    overlapping.register_buffer("all", memory)
    overlapping.register_buffer("odd", memory[1::2])
    overlapping.register_buffer("even", memory[::2])
    path = checkpoints.save(6, model=overlapping)
    checkpoints.load(path, model=overlapping)
    separate = copy.deepcopy(overlapping)
    separate.odd = separate.odd + 1
    with pytest.raises(CheckpointError) as caught:
        checkpoints.load(checkpoints.save(7, model=separate), model=overlapping)
    said.append(str(caught.value))
    return said


@pytest.mark.parametrize("nprocs", [1, 2])
def test_tensors_that_differ_are_not_loaded_into_one(tmp_path: Path, nprocs: int) -> None:
    for said in on_ranks(load_into_shared_memory, nprocs, str(tmp_path)):
        one, wrapped, actor, critic, overlapping = said
        for text in (one, wrapped):
            assert "model['first.weight'] and model['second.weight'] differ there, but share memory here" in text
        assert "actor['first.weight'] and critic['second.weight'] differ there" in actor
        assert "critic['second.weight'] and actor['first.weight'] differ there" in critic
        assert "model.all and model.odd differ there" in overlapping and "even" not in overlapping


# Ranks that hold different things


def shard_models(folder: str) -> dict[str, str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (ddpkit.get_world_size(),))
    plain = nn.Linear(4, 4)
    path = Checkpointer(folder).save(1, model=plain, optimizer=torch.optim.Adam(plain.parameters()), ema=Halves(1))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters())
    tensor = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
    holder = Halves(1)
    holder.average = tensor
    assert isinstance(tensor, DTensor)
    calls = {
        "model": lambda: Checkpointer(folder).save(2, model=model),
        "optimizer": lambda: Checkpointer(folder).save(2, optimizer=optimizer),
        "nested": lambda: Checkpointer(folder).save(2, notes={"deep": [1, tensor]}),
        "held": lambda: Checkpointer(folder).save(2, holder=holder),
        "own": lambda: Checkpointer(folder).save(2, per_rank={"mine": tensor}),
        "one rank": lambda: Checkpointer(folder).save(2, note=tensor if ddpkit.get_rank() else 1),
        "load model": lambda: Checkpointer(folder).load(path, model=model),
        "load optimizer": lambda: Checkpointer(folder).load_latest(optimizer=optimizer),
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


def test_sharded_models_and_tensors_are_refused_by_name_on_every_rank(tmp_path: Path) -> None:
    named = {"model": "model.0.weight", "optimizer": "optimizer.param_groups.0.params.0", "nested": "notes.deep.1"}
    named |= {"held": "state.holder.average", "own": "mine", "one rank": "note", "fsdp1": "model"}
    named |= {"load model": "model.0.weight", "load optimizer": "optimizer.param_groups.0.params.0"}
    for said in on_ranks(shard_models, 2, str(tmp_path), timeout=60.0):
        for name, text in said.items():
            assert text.startswith("CheckpointError: ") and "does not handle sharded tensors" in text, (name, text)
            assert named[name] in text, (name, text)


class OwnPart:
    """An optimizer in the manner of ZeRO: each rank has the state of its own parameters."""

    def __init__(self, value: float) -> None:
        self.moment = torch.full((2 + ddpkit.get_rank(),), value)

    def state_dict(self) -> dict[str, Any]:
        return {"state": {0: {"moment": self.moment}}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.moment.copy_(state["state"][0]["moment"])


def save_what_differs(folder: str) -> dict[str, str]:
    rank, checkpoints, said = ddpkit.get_rank(), Checkpointer(folder), {}
    torch.manual_seed(rank)
    params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))]
    sharded = torch.optim.Adam(params)
    params[rank].grad = torch.ones(3)
    sharded.step()  # has state for one of them
    bn = nn.BatchNorm1d(2)
    bn(torch.randn(4, 2))
    own = DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), broadcast_buffers=False)
    own(torch.randn(4, 2))
    cases: dict[str, Any] = {
        "optimizer": sharded,
        "part": OwnPart(float(rank)),
        "model": nn.Linear(2, 2),
        "number": {"mine": [1, rank]},
        "kind": 1 if rank else 1.0,
        "extra": {"a": 1, "b": 2} if rank else {"a": 1},
        "buffers": bn,
        "own": own,
        "text": "x" * 500 + str(rank),
    }
    for name, value in cases.items():
        try:
            checkpoints.save(1, **{name: value}, same=torch.ones(3))
            said[name] = "went on"
        except CheckpointError as error:
            said[name] = str(error)
    assert checkpoints.steps() == []
    return said


def test_what_differs_between_ranks_is_named_and_not_saved(tmp_path: Path) -> None:
    one, two = on_ranks(save_what_differs, 2, str(tmp_path))
    assert one == two
    assert "optimizer.state[0].exp_avg: float32[3] #" in one["optimizer"] and "absent on rank 1" in one["optimizer"]
    assert "part.state[0].moment: float32[2] #" in one["part"] and "float32[3] #" in one["part"]
    assert "2 entries differ between ranks" in one["model"] and "model.weight" in one["model"]
    assert "number.mine[1]: 0 on rank 0; 1 on rank 1" in one["number"]
    assert "kind: 1.0 on rank 0; 1 on rank 1" in one["kind"]
    assert "extra.b: absent on rank 0; 2 on rank 1" in one["extra"]
    assert "buffers.running_mean" in one["buffers"] and "sync_buffers" in one["buffers"]
    assert "own['1.running_mean']" in one["own"] and "own['0" not in one["own"]
    assert "text: str #" in one["text"]
    assert all("per_rank={name: value}" in text and "same" not in text.split("\n")[1] for text in one.values())


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
    with pytest.raises(CheckpointError, match="Rank 1: .*\n.*different is Adam there, Adagrad here"):
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
            assert f"holds part, mine, different of each of {nprocs} ranks, and this job has {others}" in said


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


def test_nothing_is_loaded_into_what_takes_no_values(tmp_path: Path) -> None:
    checkpoints = Checkpointer(tmp_path)
    path = checkpoints.save(1, model=nn.Linear(2, 2))
    with pytest.raises(CheckpointError, match=r"model has weight on the meta device here, which .* to_empty\(\)"):
        checkpoints.load(path, model=nn.Linear(2, 2, device="meta"))
