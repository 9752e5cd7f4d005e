"""Models on real ranks: what wrap_model makes of them, and the way back."""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import warnings
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from conftest import on_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DataParallel
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

import ddpkit
from ddpkit import DdpkitError, MismatchError, accumulate, all_gather, all_reduce_mean, barrier, get_rank
from ddpkit.parallel.models import clean_state_dict, named_tensors, unwrap_model
from ddpkit.parallel.replicas import check_replicas
from ddpkit.parallel.wrap import wrap_model

compiled = functools.partial(torch.compile, backend="eager")  # wraps as any backend does, imports less


def _net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def _message(error: type[Exception], call: Callable[[], Any]) -> str:
    with pytest.raises(error) as caught:
        call()
    return str(caught.value)


@functools.cache  # one launch per world size: a rank's first forward imports torch._dynamo, which takes seconds
def _results(world_size: int) -> list[tuple[dict[str, Any], dict[str | None, list[float]]]]:
    return on_ranks(_everything, world_size)


def _everything() -> tuple[dict[str, Any], dict[str | None, list[float]]]:
    return _wrap(), _compressed()


class _Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.unused = nn.Linear(2, 1), nn.Linear(2, 1)
        self.register_buffer("seen", torch.full((), float(get_rank())))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += get_rank() + 1
        return self.linear(x)


def _wrap() -> dict[str, Any]:
    warnings.simplefilter("error")
    found: dict[str, Any] = {}
    torch.manual_seed(get_rank())
    for option, synced in itertools.product(("broadcast_buffers", "forward_sync_buffers"), (True, False)):
        inner = _Buffered()
        model = wrap_model(inner, find_unused_parameters=True, **{option: synced})
        check_replicas(model)  # weights and buffers are rank 0's
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
        found.setdefault(f"seen, {synced}", []).append(inner.seen.item())
    found["type"] = type(model).__name__
    found["unwrapped"] = unwrap_model(model) is inner
    frozen = _Buffered().requires_grad_(False)
    found["frozen"] = wrap_model(frozen) is frozen
    with_gradient = nn.Linear(1, 1).requires_grad_(False)
    with_gradient.register_buffer("scale", torch.ones(1, requires_grad=True))  # which DDP does not count
    found["frozen"] &= wrap_model(with_gradient) is with_gradient
    check_replicas(frozen)
    found["again"] = _message(ValueError, lambda: wrap_model(nn.Sequential(model)))
    found["batchnorm"] = _message(ValueError, lambda: wrap_model(nn.BatchNorm1d(2), sync_batchnorm=True))
    found["dp"] = _message(DdpkitError, lambda: wrap_model(_net(), "dp"))
    different = nn.Linear(2 + get_rank(), 1)
    different.bias.requires_grad_(get_rank() == 0)
    found["different"] = _message(MismatchError, lambda: wrap_model(different))
    return found


@pytest.mark.parametrize("world_size", [3])
def test_on_several_ranks_a_model_becomes_ddp_with_rank_0s_weights_and_buffers(world_size):
    for rank, found in enumerate(wrapped for wrapped, _ in _results(world_size)):
        assert found["type"] == "DistributedDataParallel"
        assert found["unwrapped"] and found["frozen"]
        assert found["seen, True"] == [1.0 + (rank + 1)] * 2  # rank 0's after its first forward, then this rank's own
        assert found["seen, False"] == [2.0 * (rank + 1)] * 2  # rank 0's at the start, then each rank's own
        assert "already wrapped, completely or in part" in found["again"]
        assert "sync_batchnorm=True needs an accelerator" in found["batchnorm"]
        assert "1 process and several GPUs" in found["dp"]
        assert "weight: float32[1, 2] on rank 0; float32[1, 3] on rank 1" in found["different"]
        assert "bias: float32[1] on rank 0; float32[1], frozen on rank" in found["different"]


def _compressed() -> dict[str | None, list[float]]:
    """The gradients by the hooks of torch's that the guide shows."""
    gradients = {}
    hooks = {
        None: None,
        "fp16": (None, fp16_compress_hook),
        "powersgd": (PowerSGDState(None), powerSGD_hook),
    }
    for kind, hook in hooks.items():
        net = _net().float()
        model = wrap_model(net)
        if hook:
            model.register_comm_hook(*hook)
        model(torch.full((2, 3), get_rank() + 1.0)).sum().backward()
        gradients[kind] = torch.cat([p.grad.reshape(-1) for p in net.parameters()]).tolist()
    return gradients


def test_compressed_gradients_are_close_and_equal_on_all_ranks():
    first, second = (compressed for _, compressed in _results(2))
    assert first == second
    for kind, accuracy in (("fp16", 1e-3), ("powersgd", 1e-6)):
        assert first[kind] == pytest.approx(first[None], rel=accuracy, abs=1e-6)
    assert first["fp16"] != first[None]


_OPTIONS_OF_DDP = (
    {"bucket_cap_mb": 1},
    {"gradient_as_bucket_view": True},
    {"find_unused_parameters": True, "gradient_as_bucket_view": True, "bucket_cap_mb": 0.5},
)


def _with_options_of_ddp() -> list[Any]:
    found = []
    for options in _OPTIONS_OF_DDP:
        net = _net(get_rank())
        model = wrap_model(net, **options)
        for _ in range(2):
            model.zero_grad()
            model(torch.full((2, 3), get_rank() + 1.0).double()).sum().backward()
        check_replicas(model)
        found.append(torch.cat([p.grad.flatten() for p in net.parameters()]).tolist())
        if isinstance(model, DDP):
            assert model.gradient_as_bucket_view == ("gradient_as_bucket_view" in options)
            assert model.bucket_bytes_cap == options.get("bucket_cap_mb", 25) * 2**20
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_options_of_torchs_ddp_reach_it_and_train_the_same(world_size):
    results = on_ranks(_with_options_of_ddp, world_size)
    for found in results:
        assert found == results[0]
        for gradient in found:
            assert gradient == pytest.approx(found[0])


_REFUSED_OPTIONS = {
    "wrap_model() has no option process_group. ": {"process_group": None},
    "wrap_model() has no option device_ids. ": {"device_ids": [0]},
    "wrap_model() has no option module. ": {"module": nn.Linear(2, 1)},
    "wrap_model() has no option init_sync. ": {"init_sync": False},
    "wrap_model() has no option bucket_cap: did you mean bucket_cap_mb? With torch": {"bucket_cap": 25},
    "strategy must be auto, ddp or dp, got SGD": {"strategy": torch.optim.SGD(nn.Linear(1, 1).parameters())},
}


def _refused_options() -> list[str]:
    found = []
    for options in _REFUSED_OPTIONS.values():
        with pytest.raises((TypeError, ValueError)) as caught:
            wrap_model(nn.Linear(2, 1), **options)
        found.append(str(caught.value))
    with pytest.raises(TypeError, match=r"got list\. Call it for each of them"):
        wrap_model([nn.Linear(2, 1)])
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_options_that_ddp_has_not_or_that_are_decided_are_refused_on_any_number_of_ranks(world_size):
    for found in on_ranks(_refused_options, world_size):
        for text, head in zip(found, _REFUSED_OPTIONS, strict=True):
            assert text.startswith(head)


def test_one_process_keeps_the_model_itself(caplog):
    net = _net()
    for options in ({}, {"sync_batchnorm": True, "broadcast_buffers": False}):
        assert wrap_model(net, **options) is net
    assert "torchrun --nproc_per_node" in _message(DdpkitError, lambda: wrap_model(net, "ddp"))
    if torch.accelerator.device_count() < 2:
        assert "'dp' needs 1 process and several GPUs; " in _message(DdpkitError, lambda: wrap_model(net, "dp"))
    assert "auto, ddp or dp, got 'fsdp'" in _message(ValueError, lambda: wrap_model(net, "fsdp"))
    assert "already wrapped" in _message(ValueError, lambda: wrap_model(DataParallel(net)))


def test_unwrapping_goes_through_compile_and_parallel_wrappers_in_any_nesting():
    net = nn.Linear(2, 1)
    for wrapped in (DataParallel(net), compiled(net), DataParallel(compiled(net)), compiled(DataParallel(net))):
        assert unwrap_model(wrapped) is net
        assert list(clean_state_dict(wrapped.state_dict())) == ["weight", "bias"]
    assert unwrap_model(net) is net


def test_cleaned_keys_load_into_the_model_wherever_the_wrappers_were():
    net = nn.ModuleDict({"actor": nn.Sequential(nn.Linear(2, 2), nn.ReLU()), "critic": nn.BatchNorm1d(2)})
    plain = net.state_dict()
    net["actor"], net["critic"] = DataParallel(compiled(net["actor"])), DataParallel(net["critic"])
    wrapped = DataParallel(net).state_dict()
    assert next(iter(wrapped)) == "module.actor.module._orig_mod.0.weight"
    cleaned = clean_state_dict(wrapped)
    assert list(cleaned) == list(plain)
    assert all(cleaned[key] is wrapped[old] for key, old in zip(cleaned, wrapped, strict=True))
    assert cleaned._metadata == plain._metadata  # versions, by which load_state_dict() migrates


def test_a_submodule_called_module_is_no_wrapper_if_it_has_siblings():
    averaged = torch.optim.swa_utils.AveragedModel(nn.Linear(2, 1))
    assert list(clean_state_dict(averaged.state_dict())) == ["n_averaged", "module.weight", "module.bias"]
    assert clean_state_dict({"module": 1}) == {"module": 1}  # a parameter of that name
    assert clean_state_dict({}) == {}


class _Own(nn.Module):
    """A model whose only child is called as a wrapper's."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)


def test_an_only_child_called_module_is_no_wrapper_for_unwrap_model():
    own = _Own()
    for wrapped in (own, DataParallel(own), compiled(own), compiled(DataParallel(own))):
        assert unwrap_model(wrapped) is own
        assert list(unwrap_model(wrapped).state_dict()) == ["module.weight", "module.bias"]


class _OwnOriginal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self._orig_mod, self.head = nn.Linear(2, 2), nn.Linear(2, 1)


def test_a_child_of_its_own_that_is_called_as_that_of_compiled_models_is_no_wrapper():
    own = _OwnOriginal()
    for wrapped in (own, DataParallel(own), compiled(own)):
        assert unwrap_model(wrapped) is own
        assert list(named_tensors(wrapped)) == [name for name, _ in own.named_parameters()]


def _half_moved() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1, device="meta"))


UNFIT: dict[str, Callable[[], Any]] = {
    "takes a torch.nn.Module, got list": lambda: [nn.Linear(2, 1)],
    "takes a torch.nn.Module, got type": lambda: nn.Linear,
    "1.weight is on the meta device": _half_moved,
    "0.weight is lazy": lambda: nn.Sequential(nn.LazyLinear(1), nn.BatchNorm1d(1)),
    "already wrapped": lambda: nn.Sequential(DataParallel(nn.Linear(2, 1))),
}


def _refused() -> dict[str, str]:
    """The error for every unfit model, on all ranks and on rank 1 alone."""
    found = {}
    for words, make in UNFIT.items():
        for alone in (False, True):
            model = nn.Linear(2, 1) if alone and get_rank() != 1 else make()
            with pytest.raises((TypeError, ValueError, MismatchError)) as caught:
                wrap_model(model)
            found[f"{words}, {alone}"] = f"{type(caught.value).__name__}: {caught.value}"
    for options in ({"static_graph": True}, {"broadcast_buffers": False}, {"bucket_cap_mb": 2}):
        mine = options if get_rank() == 1 else {}
        found[next(iter(options))] = _message(MismatchError, lambda mine=mine: wrap_model(nn.Linear(2, 1), **mine))
    return found


@pytest.mark.parametrize("world_size", [2])
def test_models_that_cannot_be_wrapped_are_refused_on_every_rank(world_size):
    for rank, found in enumerate(on_ranks(_refused, world_size)):
        for words in UNFIT:
            assert words in found[f"{words}, False"] and words in found[f"{words}, True"]
            assert not found[f"{words}, False"].startswith("MismatchError")
            assert found[f"{words}, True"].startswith("MismatchError") == (rank != 1)
        assert "static_graph: False on rank" in found["static_graph"]
        assert "broadcast_buffers" in found["broadcast_buffers"]
        assert "bucket_cap_mb: missing on rank 0; 2 on rank 1" in found["bucket_cap_mb"]


@pytest.mark.parametrize("words", UNFIT)
def test_one_process_refuses_the_same_models(words):
    with pytest.raises((TypeError, ValueError), match=words):
        wrap_model(UNFIT[words]())


def _fit() -> list[Any]:
    """Odd models that are right: what they become, and their gradient on inputs of rank + 1."""
    found: list[Any] = []
    x = torch.full((1, 2), get_rank() + 1.0)
    nothing = wrap_model(nn.Identity())
    found.append(type(nothing).__name__)
    half = nn.Linear(2, 1, bias=False)
    tied = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    tied[1].weight = tied[0].weight
    for net in (compiled(half), tied, _Own()):
        model = wrap_model(net)
        model(x).sum().backward()
        check_replicas(model)
        gradient = next(model.parameters()).grad
        found.append(torch.allclose(gradient, all_reduce_mean(gradient)) and bool(gradient.any()))
    for setting in (torch.device("meta"), torch.device("cpu"), torch.no_grad(), torch.autocast("cpu")):
        with setting:
            model = wrap_model(nn.Linear(2, 1, device="cpu"))
        model(x).sum().backward()
        found.append(model.module.weight.grad.tolist())
    frozen = nn.BatchNorm1d(2, affine=False)
    frozen.running_mean.fill_(get_rank())
    found.append(wrap_model(frozen).running_mean.tolist())
    wrap_model(unwrap_model(model))(x)  # again, once it was unwrapped
    return found


@pytest.mark.parametrize("world_size", [2])
def test_odd_models_that_can_be_wrapped_are_and_train(world_size):
    mean = [[(world_size + 1) / 2] * 2]
    for found in on_ranks(_fit, world_size):
        assert found == ["Identity", True, True, True, *[mean] * 4, [0, 0]]


def _unfreeze() -> dict[str, Any]:
    """What the forward of models says that have more to train than when they were wrapped."""
    found: dict[str, Any] = {}
    x = torch.ones(1, 3).double()
    for name, frozen in {"wholly": ["0", "2"], "partly": ["2"]}.items():
        for how in ("itself", "copied", "compiled"):
            net = _net()
            for path in frozen:
                net.get_submodule(path).requires_grad_(False)
            model = wrap_model(net)
            if how == "copied" and model is net:
                model = copy.deepcopy(model)
            if how == "compiled":
                model = compiled(model)
            model(x)
            unwrap_model(model)[2].bias.requires_grad_(True)
            with torch.no_grad():
                model(x)
            found[f"{name}, {how}"] = _message(DdpkitError, lambda model=model: model(x))
        again = wrap_model(unwrap_model(model))
        again(x * (get_rank() + 1)).sum().backward()
        found[f"{name}, wrapped again"] = again.module[2].bias.grad.item()
    net[0].requires_grad_(False)  # from here on it is part of a model
    part = wrap_model(net.requires_grad_(False))
    whole = nn.Sequential(part.requires_grad_(True), nn.Linear(1, 1).double())
    wrap_model(whole)(x).sum().backward()
    return found


def _one_joint_backward(model: nn.Module, x: Callable[[], torch.Tensor]) -> None:
    (model(x()).mean() + model(x()).mean()).backward()


def _each_its_own_backward(model: nn.Module, x: Callable[[], torch.Tensor]) -> None:
    model(x()).mean().backward()
    model(x()).mean().backward()


def _gradient_penalty(model: nn.Module, x: Callable[[], torch.Tensor]) -> None:
    inputs = x().requires_grad_()
    output = model(inputs)
    (slope,) = torch.autograd.grad(output.sum(), inputs, create_graph=True)
    (output.mean() + slope.square().sum()).backward()


def _gradient_of_a_parameter(model: nn.Module, x: Callable[[], torch.Tensor]) -> None:
    loss = model(x()).square().mean()
    torch.autograd.grad(loss, next(model.parameters()), retain_graph=True)
    loss.backward()


def _transform(model: nn.Module, x: Callable[[], torch.Tensor]) -> None:
    torch.func.grad(lambda inputs: model(inputs).sum())(x())
    model(x()).mean().backward()


def _micro_batches(model: nn.Module, x: Callable[[], torch.Tensor]) -> None:
    with accumulate(model, 0, 2):
        one, other = model(x()), model(x())
        one.mean().backward()
        other.mean().backward()
    with accumulate(model, 1, 2):
        model(x()).mean().backward()


def _after_a_backward_that_failed(model: nn.Module, x: Callable[[], torch.Tensor]) -> None:
    output = model(x())
    output.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        output.mean().backward()
    model(x()).mean().backward()


def _two_forwards_two_backwards(model: nn.Module, x: Callable[[], torch.Tensor]) -> None:
    one, other = model(x()), model(x())
    one.mean().backward()
    other.mean().backward()


def _retained_graph(model: nn.Module, x: Callable[[], torch.Tensor]) -> None:
    loss = model(x()).mean()
    loss.backward(retain_graph=True)
    loss.backward()


def _micro_batch_in_place_of_the_last(model: nn.Module, x: Callable[[], torch.Tensor]) -> None:
    with accumulate(model, 0, 2):
        one = model(x())
    with accumulate(model, 1, 2):
        other = model(x())
    one.mean().backward()
    other.mean().backward()


def _micro_batch_after_the_last(model: nn.Module, x: Callable[[], torch.Tensor]) -> None:
    with accumulate(model, 0, 2):
        one = model(x())
    with accumulate(model, 1, 2):
        other = model(x())
    other.mean().backward()
    one.mean().backward()


_RIGHT = [
    _one_joint_backward,
    _each_its_own_backward,
    _gradient_penalty,
    _gradient_of_a_parameter,
    _transform,
    _micro_batches,
    _after_a_backward_that_failed,
]
_WRONG = [
    _two_forwards_two_backwards,
    _retained_graph,
    _micro_batch_in_place_of_the_last,
    _micro_batch_after_the_last,
]
_NOT_OF_STATIC_GRAPHS = ("_gradient_penalty", "_gradient_of_a_parameter", "_micro_batches")


def _backwards() -> dict[str, Any]:
    """Train in ways of which DDP averages all gradients, or not; whether the ranks' are equal, or the error."""
    warnings.filterwarnings("ignore", "Grad strides do not match")  # of torch's, for second derivatives
    generator = torch.Generator().manual_seed(get_rank())

    def x() -> torch.Tensor:
        return torch.randn(4, 3, dtype=torch.float64, generator=generator)

    found: dict[str, Any] = {}
    options: list[dict[str, Any]] = [{}, {"static_graph": True}, {"find_unused_parameters": True}]
    for option, train in itertools.product(options, _RIGHT + _WRONG):
        if option.get("static_graph") and train.__name__ in _NOT_OF_STATIC_GRAPHS:
            continue
        if option and train is _transform:  # DDP's own function for these options takes no transforms
            continue
        model = wrap_model(_net(), **option)
        name = f"{train.__name__} {option}"
        try:
            train(model, x)
        except DdpkitError as error:
            found[name] = str(error)
        else:
            gradients = torch.cat([p.grad.flatten() for p in model.parameters()])
            found[name] = all(torch.equal(gradients, others) for others in all_gather(gradients))
        barrier()
    return found


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.storm)])
def test_a_backward_that_ddp_does_not_average_is_an_error(world_size):
    for found in on_ranks(_backwards, world_size):
        for name, said in found.items():
            if any(name.startswith(wrong.__name__) for wrong in _WRONG):
                assert "second backward after one forward" in said, name
            else:
                assert said is True, name


class _Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = _net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = checkpoint(self.net, x, use_reentrant=True)
        return self.last


def _wrap_checkpointed() -> bool:
    """Train a model that runs in nested backwards, and keeps its output; whether it is freed."""
    model = wrap_model(_Checkpointed(), static_graph=True)
    for _ in range(3):
        model(torch.ones(2, 3, dtype=torch.float64, requires_grad=True)).sum().backward()
    model.module.requires_grad_(False)
    model(torch.ones(2, 3, dtype=torch.float64, requires_grad=True)).sum().backward()
    reference = weakref.ref(model.module)
    del model
    gc.collect()
    return reference() is None


def test_a_model_in_reentrant_checkpoints_trains_and_is_freed():
    assert on_ranks(_wrap_checkpointed, 2) == [True, True]


class _WithScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(3, 1), nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": self.linear(x), "scale": self.scale}


def _return_a_parameter() -> int:
    model = wrap_model(_WithScale())
    for _ in range(3):
        output = model(torch.ones(1, 3))
        (output["y"] * output["scale"]).sum().backward()
    return len(model.module.scale._backward_hooks or {})


def test_a_parameter_that_a_forward_returns_keeps_no_hook():
    assert on_ranks(_return_a_parameter, 2) == [0, 0]


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.storm)])
def test_a_parameter_that_is_unfrozen_after_wrapping_is_an_error_in_forward(world_size):
    for found in on_ranks(_unfreeze, world_size):
        for name, said in found.items():
            if name.endswith("again"):
                assert said == 1.0
            else:
                assert "2.bias was frozen in wrap_model() and needs a gradient now" in said


def _wrap_scripted() -> float:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit, which people still use
        model = wrap_model(torch.jit.script(nn.Linear(1, 1).requires_grad_(False)))
        return model(torch.ones(1, 1)).item()


def test_a_frozen_model_that_is_scripted_can_be_wrapped():
    one, other = on_ranks(_wrap_scripted, 2)
    assert one == other


def _unfreeze_on_one() -> list[float]:
    net = wrap_model(_net().requires_grad_(False)).requires_grad_(True)
    net(torch.ones(1, 3).double()).sum().backward()
    return net[2].bias.grad.tolist()


def test_on_one_process_there_is_nothing_to_average_so_anything_may_be_unfrozen():
    assert on_ranks(_unfreeze_on_one, 1) == [[1.0]]
    assert _unfreeze_on_one() == [1.0]


class _Output(NamedTuple):
    y: torch.Tensor
    more: dict[str, Any]


class _Branches(nn.Module):
    """Uses one of three layers, and returns what it computes in containers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 1) for _ in range(3))

    def forward(self, x: torch.Tensor, branch: int) -> _Output:
        y = self.layers[branch](x)
        return _Output(y, {"twice": [y * 2], "count": len(x)})


def _branch() -> dict[str, Any]:
    """Use the first layer on rank 0, the second on the others, and the third on none."""
    net = _Branches()
    model = wrap_model(net, find_unused_parameters=True)
    output = model(torch.ones(1, 2), min(get_rank(), 1))
    (output.y + output.more["twice"][0]).sum().backward()
    gradients = [layer.bias.grad for layer in net.layers]
    return {
        "type": type(output).__name__,
        "count": output.more["count"],
        "gradients": [None if gradient is None else gradient.item() for gradient in gradients],
    }


@pytest.mark.parametrize("world_size", [3])
def test_ranks_that_use_different_layers_share_their_gradients(world_size):
    for found in on_ranks(_branch, world_size):
        assert (found["type"], found["count"]) == ("_Output", 1)
        first, second, third = found["gradients"]
        assert (first, second) == (pytest.approx(3 / world_size), pytest.approx(3 - 3 / world_size))
        assert third is None


def _alone_and_uneven() -> tuple[str, str]:
    """Evaluate on one rank, train until each has run out of data, then wrap what cannot be wrapped."""
    model, x = wrap_model(_net()), torch.ones(1, 3).double()
    if get_rank() == 0:
        model.eval()
        with torch.no_grad():
            model(x)
    barrier()
    model.train()
    with model.join():
        for _ in range(1 + get_rank()):
            model(x).sum().backward()
    barrier()
    longer = nn.Sequential(*(nn.Linear(2, 2) for _ in range(1 + (get_rank() == 0))))
    return _message(ValueError, lambda: wrap_model(compiled(model))), _message(
        MismatchError, lambda: wrap_model(longer)
    )


@pytest.mark.parametrize("world_size", [3])
def test_one_rank_may_evaluate_alone_and_ranks_that_run_out_of_data_may_use_torchs_join(world_size):
    for again, longer in on_ranks(_alone_and_uneven, world_size):
        assert "already wrapped" in again
        assert "1.weight: float32[2, 2] on rank 0; missing on rank" in longer


@pytest.mark.ranks(1, 2, 3)
def test_batch_norm_of_one_sample_names_the_remedy(rank, world_size):
    net = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4))
    model = wrap_model(net)
    loader = ddpkit.make_loader(torch.ones(3 * world_size, 1), 2)
    remedy = r"more than 1 value per channel.*pass drop_last=True to make_loader\(\)"
    if world_size == 1:  # torch's own model
        remedy = "more than 1 value per channel"
    with pytest.raises(ValueError, match=remedy):
        for batch in loader:
            (model(batch).sum() * loader.weight).backward()
    for batch in ddpkit.make_loader(torch.ones(3 * world_size, 1), 2, drop_last=True):
        model(batch).sum().backward()
