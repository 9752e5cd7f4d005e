"""Training on the device: what one process trains on the CPU is the reference."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from starting import Crew, on_one_device
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import ddpkit
from ddpkit.testing import on_ranks

STEPS = 4
SAMPLES = 9  # of each step; two ranks have five and four
CLOSE = {"rel": 1e-9, "abs": 1e-12}


def make_net(normalise: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    between: list[nn.Module] = [nn.BatchNorm1d(8)] if normalise else []
    return nn.Sequential(nn.Linear(4, 8), *between, nn.Tanh(), nn.Linear(8, 1)).double()


def make_batches() -> list[Tensor]:
    generator = torch.Generator("cpu").manual_seed(1)
    return [torch.randn(SAMPLES, 4, dtype=torch.float64, generator=generator) for _ in range(STEPS)]


def train(net: nn.Module, step: Callable[[nn.Module, Tensor], None]) -> list[float]:
    """Do a step with this rank's share of each batch; return the weights."""
    for batch in make_batches():
        mine = batch[ddpkit.get_rank() :: ddpkit.get_world_size()]
        step(net, mine.to(ddpkit.get_device()))
    ddpkit.check_replicas(net)
    state = ddpkit.unwrap_model(net).state_dict()
    return [number for tensor in state.values() for number in tensor.double().flatten().tolist()]


def step_by_sgd(net: nn.Module, inputs: Tensor) -> None:
    loss = mse_loss(net(inputs), inputs.sum(1, keepdim=True), reduction="sum")
    ddpkit.global_mean(loss, len(inputs)).backward()
    descend(net)


@torch.no_grad()
def descend(net: nn.Module) -> None:
    for parameter in net.parameters():
        parameter -= 0.05 * parameter.grad
        parameter.grad = None


def train_wrapped(strategy: str = "auto", **options: Any) -> list[float]:
    normalise = bool(options)
    return train(ddpkit.wrap_model(make_net(normalise), strategy, **options), step_by_sgd)


def on_one_process(normalise: bool = False) -> Any:
    """Return what one process trains on the CPU."""
    net = make_net(normalise)
    for batch in make_batches():
        step_by_sgd(net, batch)
    weights = [number for tensor in net.state_dict().values() for number in tensor.double().flatten().tolist()]
    return pytest.approx(weights, **CLOSE)


def test_several_ranks_train_what_one_process_trains(several_ranks: Crew) -> None:
    assert several_ranks(train_wrapped) == [on_one_process()] * several_ranks.size


def test_ddp_on_one_rank_trains_that_over_nccl(device: str) -> None:
    assert on_one_device(train_wrapped, 1, device, "ddp") == [on_one_process()]


def train_with_sync_batchnorm() -> list[float]:
    return train_wrapped(sync_batchnorm=True)


@pytest.mark.cuda
def test_sync_batchnorm_takes_statistics_of_all_ranks(several_ranks: Crew) -> None:
    assert several_ranks(train_with_sync_batchnorm) == [on_one_process(normalise=True)] * several_ranks.size


def contrast(net: nn.Module, inputs: Tensor) -> Tensor:
    """Compute the loss of all ranks' samples, each compared with all others."""
    features = ddpkit.gather_batch(net(inputs))
    both = torch.cat([features, features.sin()], 1)
    return (both @ both.T).logsumexp(1).mean()


def step_by_contrast(net: nn.Module, inputs: Tensor) -> None:
    contrast(net, inputs).backward()
    descend(net)


def step_by_contrast_in_bfloat16(net: nn.Module, inputs: Tensor) -> None:
    with torch.autocast(inputs.device.type, torch.bfloat16):
        loss = contrast(net, inputs.float())
    loss.backward()
    descend(net)


def train_contrastively(strategy: str, precision: str, compiles: bool) -> list[float]:
    dtype = torch.float32 if precision == "bfloat16" else torch.float64
    net: Any = ddpkit.wrap_model(make_net().to(dtype), strategy)
    if compiles:
        net = torch.compile(net)
    return train(net, step_by_contrast_in_bfloat16 if precision == "bfloat16" else step_by_contrast)


def contrast_on_one_process() -> list[float]:
    net = make_net()
    for batch in make_batches():
        step_by_contrast(net, batch)
    return [number for tensor in net.state_dict().values() for number in tensor.flatten().tolist()]


@pytest.mark.parametrize("compiles", [False, True])
def test_a_contrastive_loss_trains_what_one_process_trains(crew: Crew, compiles: bool) -> None:
    expected = pytest.approx(contrast_on_one_process(), **CLOSE)
    found = crew(train_contrastively, "ddp", "float64", compiles, timeout=120.0)
    assert found == [expected] * crew.size


def test_a_contrastive_loss_under_autocast_is_near_that(device: str) -> None:
    expected = pytest.approx(contrast_on_one_process(), abs=0.01)
    found = on_one_device(train_contrastively, 2, device, "auto", "bfloat16", False)
    assert found == [expected] * 2


def train_plain(average: str) -> list[float]:
    """Train a plain model, whose gradients are averaged after backward or while other work is done."""

    def step(net: nn.Module, inputs: Tensor) -> None:
        loss = mse_loss(net(inputs), inputs.sum(1, keepdim=True), reduction="sum")
        ddpkit.global_mean(loss, len(inputs)).backward()
        if average == "averaging":
            with ddpkit.averaging(net):
                make_batches()
        else:
            ddpkit.average_gradients(net)
        descend(net)

    return train(make_net().to(ddpkit.get_device()), step)


@pytest.mark.parametrize("average", ["average_gradients", "averaging"])
def test_gradients_of_plain_models_are_averaged(average: str, several_ranks: Crew) -> None:
    assert several_ranks(train_plain, average) == [on_one_process()] * several_ranks.size


def train_in_half_precision() -> tuple[list[float], float, bool]:
    """Train with a scale that overflows at first; return the weights, the scale, and whether all are finite."""
    device = ddpkit.get_device()
    net = ddpkit.wrap_model(make_net().float())
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**24)
    for number in range(20):
        inputs = torch.full((3 + ddpkit.get_rank(), 4), number / 20, device=device)
        with ddpkit.accumulate(net, number, 2) as complete:
            with torch.autocast(device.type, torch.float16):
                outputs = net(inputs)
            scaler.scale(mse_loss(outputs.float(), inputs[:, :1], reduction="sum")).backward()
        if not complete:
            continue
        ddpkit.global_mean(net, 6 + 2 * ddpkit.get_rank())
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    ddpkit.check_replicas(net, optimizer)
    weights = torch.cat([parameter.detach().flatten().cpu() for parameter in net.parameters()])
    return weights.tolist(), scaler.get_scale(), bool(weights.isfinite().all())


def test_the_fp16_scaler_leaves_out_the_same_steps_on_every_rank(crew: Crew) -> None:
    first, *others = crew(train_in_half_precision)
    _, scale, finite = first
    assert finite
    assert scale < 2.0**24  # steps with infinite gradients were left out, on every rank
    assert others == [first] * len(others)


def train_compiled(strategy: str, mode: str | None) -> list[float]:
    """Train a compiled model, whose losses are exchanged between its graphs."""
    torch.compiler.reset()
    net = torch.compile(ddpkit.wrap_model(make_net(), strategy), mode=mode)
    return train(net, step_by_sgd)


def test_a_compiled_model_trains_the_same(crew: Crew) -> None:
    assert crew(train_compiled, "ddp", None, timeout=150.0) == [on_one_process()] * crew.size


@pytest.mark.cuda
def test_a_compiled_model_with_cuda_graphs_trains_the_same(device: str) -> None:
    found = on_one_device(train_compiled, 1, device, "auto", "reduce-overhead", timeout=150.0)
    assert found == [on_one_process()]


_WARM_UP = 11  # steps that DDP needs before it can be captured


def train_captured(strategy: str) -> tuple[list[float], list[float]]:
    """Return the weights after steps that a CUDA graph replays, and after the same steps without one."""
    inputs = make_batches()[0].to(ddpkit.get_device())
    target = inputs.sum(1, keepdim=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        net = ddpkit.wrap_model(make_net(), strategy)
        optimizer = torch.optim.SGD(net.parameters(), 0.05)
        for _ in range(_WARM_UP):
            optimizer.zero_grad(set_to_none=True)
            mse_loss(net(inputs), target).backward()
            optimizer.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's own thread asks for events
        mse_loss(net(inputs), target).backward()
        optimizer.step()
    for _ in range(STEPS):
        graph.replay()
    torch.cuda.synchronize()
    plain = make_net().to(inputs.device)
    for _ in range(_WARM_UP + STEPS):
        mse_loss(plain(inputs), target).backward()
        descend(plain)
    return flat(ddpkit.unwrap_model(net)), flat(plain)


def flat(net: nn.Module) -> list[float]:
    return [number for parameter in net.parameters() for number in parameter.flatten().tolist()]


@pytest.mark.cuda
@pytest.mark.parametrize("strategy", ["auto", "ddp"])
def test_a_step_can_be_captured_in_a_cuda_graph(strategy: str, device: str) -> None:
    ((captured, plain),) = on_one_device(train_captured, 1, device, strategy)
    assert captured == pytest.approx(plain, **CLOSE)


def step_unwatched() -> bool:
    """Do a training step of DDP during which the host may not wait for the device."""
    net = ddpkit.wrap_model(make_net(), "ddp")
    optimizer = torch.optim.SGD(net.parameters(), 0.05)
    inputs = make_batches()[0].to(ddpkit.get_device())
    for number in range(5):  # DDP arranges its buckets in the first ones
        if number == 4:
            torch.cuda.set_sync_debug_mode("error")
        try:
            with ddpkit.accumulate(net, 0, 1):
                ddpkit.global_mean(net(inputs).square().sum(), len(inputs)).backward()
            optimizer.step()
            optimizer.zero_grad()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return True


@pytest.mark.cuda
def test_a_training_step_does_not_wait_for_the_device(ranks_over_nccl: Crew) -> None:
    assert all(ranks_over_nccl(step_unwatched))


def use_data_parallel(gpus: str | None) -> str:
    """Wrap a model in DataParallel and return the kind of the outputs' device, or the error."""
    if gpus is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus
    net = make_net()
    expected = net(make_batches()[0])
    try:
        wrapped = ddpkit.wrap_model(net, "dp")
    except ddpkit.DdpkitError as error:
        return str(error)
    found = wrapped(make_batches()[0].to(ddpkit.get_device()))
    torch.testing.assert_close(found.cpu(), expected)
    return type(wrapped).__name__


@pytest.mark.cuda
@pytest.mark.gpus(2)
def test_data_parallel_spreads_a_batch_over_gpus(device: str) -> None:
    assert on_one_device(use_data_parallel, 1, device, None) == ["DataParallel"]


def test_data_parallel_on_one_device_is_refused() -> None:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    (found,) = on_ranks(use_data_parallel, 1, visible, join=False, fresh=True)  # which has not touched a GPU yet
    assert "strategy='dp' needs 1 process and several GPUs" in found


def train_exactly(strategy: str) -> list[float]:
    """Train with dropout on micro-batches whose gradients are added up exactly; return the weights."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # cuBLAS is deterministic only with it
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [nn.Linear(4, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 1)]
    net = ddpkit.wrap_model(nn.Sequential(*layers), strategy)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    data = torch.linspace(-1, 1, 160).view(40, 4)
    loader = ddpkit.make_micro_batch_loader(data, global_batch_size=10, micro_batch_size=2, seed=4)
    for batch in loader:
        with ddpkit.exact_gradients(batch, net) as micro_batches:
            for inputs in micro_batches:
                outputs = net(inputs.to(ddpkit.get_device()))
                (outputs.square().sum() / batch.global_batch_size).backward()
        optimizer.step()
    return flat(ddpkit.unwrap_model(net))


def test_exact_gradients_have_the_same_bits_on_one_rank_and_on_two(device: str) -> None:
    one = on_one_device(train_exactly, 1, device, "auto", fresh=True)
    assert on_one_device(train_exactly, 2, device, "ddp", fresh=True) == one * 2


_MOST = 2**30  # bytes of the device's memory that a rank may use


def limit_memory() -> None:
    total = torch.cuda.get_device_properties(ddpkit.get_device()).total_memory
    torch.cuda.set_per_process_memory_fraction(_MOST / total)


def find_size() -> int:
    """Return the number of samples for which memory suffices on the rank where each takes more."""
    limit_memory()
    net = nn.Linear(4, 4).to(ddpkit.get_device())
    floats = 2**20 * (1 + ddpkit.get_rank())  # of a sample

    def try_size(size: int) -> None:
        kept = torch.empty(size, floats, device=ddpkit.get_device())
        net(kept[:, :4]).sum().backward()

    return ddpkit.find_batch_size(try_size, 1024, net)


@pytest.mark.cuda
def test_the_batch_size_is_found_for_which_memory_suffices(device: str) -> None:
    # 1 GiB holds 256 samples of 4 MiB, but for what else is there, and half as many of 8 MiB
    assert on_one_device(find_size, 1, device, fresh=True) == [128]
    assert on_one_device(find_size, 2, device, fresh=True) == [64] * 2


def train_in_pieces() -> tuple[int, list[float]]:
    """Train on a batch that does not fit on the last rank; return the pieces, and the weights."""
    limit_memory()
    net = make_net().to(ddpkit.get_device())
    guard = ddpkit.StepGuard(net, max_pieces=8)
    floats = 2**27 if ddpkit.get_rank() == ddpkit.get_world_size() - 1 else 9  # of float64: 1 GiB for a whole batch
    for batch in make_batches():
        mine = batch[ddpkit.get_rank() :: ddpkit.get_world_size()].to(ddpkit.get_device())
        for pieces in guard.attempts():
            with guard:
                for part in mine.chunk(pieces):
                    torch.empty(floats * len(part) // len(mine), dtype=torch.float64, device=ddpkit.get_device())
                    mse_loss(net(part), part.sum(1, keepdim=True), reduction="sum").backward()
        ddpkit.global_mean(net, len(mine))
        descend(net)
    return guard.pieces, flat(net)


@pytest.mark.cuda
@pytest.mark.parametrize("nprocs", [1, 2])
def test_a_step_for_which_memory_runs_out_is_done_in_pieces(nprocs: int, device: str) -> None:
    first, *others = on_one_device(train_in_pieces, nprocs, device, fresh=True)
    assert first[0] in (2, 4)  # a half fits, unless what else needs memory has taken a part of the allocator's block
    assert first[1] == on_one_process()
    assert others == [first] * len(others)


def time_check() -> float:
    """Return the milliseconds that a comparison of 1 GB takes."""
    net = nn.Sequential(*[nn.Linear(8192, 8192, bias=False, device=ddpkit.get_device()) for _ in range(4)])
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(1.0)
    times = []
    for _ in range(4):
        ddpkit.barrier()
        start = time.perf_counter()
        ddpkit.check_replicas(net)
        times.append(1e3 * (time.perf_counter() - start))
    return min(times)


def test_how_long_the_comparison_of_replicas_takes(device: str, record_property: Any) -> None:
    first, _ = on_one_device(time_check, 2, device)
    record_property("measured", f"1 GB: {first:.1f} ms")
