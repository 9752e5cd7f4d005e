"""Measure on the ranks of one job: collectives and training steps."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ... import Context, distributed, wrap_model
from ...collectives import ops
from ..terminal import announce, count

# Time calls that all ranks make together: blocks of calls, in alternating rounds, for a while.

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
_ROUNDS = 8
_FEWEST = 3  # rounds that even a call which uses up its time at once gets


@dataclass(frozen=True)
class Case:
    """One call to measure.

    Attributes:
        labels: Names and sizes that describe it; JSON values.
        call: Does it once, on every rank.
    """

    labels: dict[str, Any]
    call: Callable[[], object]


def bandwidths(collective: str, ranks: int, size: int, seconds: float) -> dict[str, float]:
    """Compute algorithm and bus bandwidth in GB/s (10⁹ bytes), as nccl-tests define them.

    Args:
        collective: One of `COLLECTIVES`.
        ranks: Number of ranks.
        size: Bytes: of the whole tensor for all_reduce and broadcast, of all ranks' parts for the
            others.
        seconds: Time of one call.

    References:
        https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md

    Example:
        >>> bandwidths("all_reduce", ranks=4, size=10**9, seconds=0.5)
        {'algbw': 2.0, 'busbw': 3.0}
    """
    algbw = size / seconds / 1e9
    return {"algbw": algbw, "busbw": algbw * _bus_factor(collective, ranks)}


def _bus_factor(collective: str, ranks: int) -> float:
    if collective == "broadcast":
        return 1.0
    if collective == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks


def summary(times: Sequence[float]) -> dict[str, float]:
    """Compute median and quartiles of the rounds' times.

    >>> summary([3.0, 1.0, 2.0, 9.0, 4.0])
    {'seconds': 3.0, 'low': 2.0, 'high': 4.0, 'rounds': 5}
    """
    low, middle, high = np.quantile(times, [0.25, 0.5, 0.75]).tolist()
    return {"seconds": middle, "low": low, "high": high, "rounds": len(times)}


def time_cases(
    cases: Sequence[Case],
    seconds: float,
    device: torch.device,
    say: Callable[[str], None],
) -> list[list[float]]:
    """Time one call of each case in each round, in seconds, on the slowest rank. Collective.

    Args:
        cases: The same ones on every rank.
        seconds: About how long to measure each case, after two calls that are not counted. In each
            of eight rounds every case is called as often as fits into its share of the time, in
            another order. A case that needs longer ends after fewer.
        device: Where the work runs; the clock is read when it is done.
        say: Called with the step that begins.

    Returns:
        For each case the times of its rounds.
    """
    say(f"warming up, {len(cases)} measurements")
    timers = [_Timer(case, device) for case in cases]
    for number in range(_ROUNDS):
        say(f"round {number + 1} of {_ROUNDS}")
        order = random.Random(number).sample(timers, len(timers))  # none always follows the same
        for timer in order:
            if number < _FEWEST or timer.used < seconds:
                timer.run(seconds / _ROUNDS)
    return [timer.times for timer in timers]


class _Timer:
    """Times one case, and keeps account of it.

    Attributes:
        times: Seconds for one call, in each round.
        used: Seconds that all rounds took together.
    """

    def __init__(self, case: Case, device: torch.device) -> None:
        self.times: list[float] = []
        self.used = 0.0
        self._call = case.call
        self._device = device
        _time(self._call, 1, device)  # allocates, connects; DDP rearranges its buckets after it
        self._quickest = _time(self._call, 1, device)

    def run(self, seconds: float) -> None:
        """Do one round, with as many calls as fit into so many seconds."""
        calls = max(1, int(seconds / self._quickest))
        taken = _time(self._call, calls, self._device)
        self.times.append(taken)
        self.used += taken * calls
        self._quickest = min(self._quickest, taken)  # the first call may have been disturbed


def _time(call: Callable[[], object], count: int, device: torch.device) -> float:
    """Time one of `count` calls; equal on every rank, so that all decide alike."""
    _synchronise(device)
    ops.all_reduce(0.0, "max")  # all start together
    start = time.perf_counter()
    for _ in range(count):
        call()
    _synchronise(device)
    slowest = ops.all_reduce(time.perf_counter() - start, "max")
    return float(slowest) / count


def _synchronise(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


# Define the settings of a measurement, and models for training steps.

PARTS = ("collectives", "steps")


class BadFlag(ValueError):
    """A flag asks for something that cannot be measured."""


@dataclass(frozen=True)
class Plan:
    """The settings of a measurement.

    Attributes:
        parts: Some of `PARTS`.
        sizes: Bytes of the collectives' tensors.
        batch_size: Samples per step: per rank for weak, in all for strong scaling.
        seconds: Per measurement.
        device: As `setup()` takes it.
    """

    parts: tuple[str, ...]
    sizes: tuple[int, ...]
    batch_size: int
    seconds: float
    device: str | None


Model = tuple[nn.Module, tuple[int, ...]]  # and the shape of one sample


def mlp() -> Model:
    """Make three linear layers."""
    layers = [nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)]
    module = nn.Sequential(*layers)
    return module, (256,)


def transformer() -> Model:
    """Make an encoder of two layers, for sequences of 16 tokens."""
    layer = nn.TransformerEncoderLayer(128, nhead=4, dim_feedforward=512, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, num_layers=2), (16, 128)


MODELS: dict[str, Callable[[], Model]] = {"mlp": mlp, "transformer": transformer}


def make_step(module: nn.Module, batch: Tensor, device: torch.device) -> Callable[[], None]:
    """Make a function that does one training step: forward, backward from the mean, SGD."""
    inputs = batch.to(device)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-6)

    def step() -> None:
        optimizer.zero_grad()
        module(inputs).mean().backward()
        optimizer.step()

    return step


def measure(plan: Plan) -> dict[str, Any]:
    """Join the job and measure. Collective.

    Args:
        plan: The same on every rank.

    Returns:
        "results": for each measurement its labels with its "times"; and facts of the job.
    """
    with distributed(device=plan.device, num_threads=1) as job:
        cases = list(_cases(plan, job))

        def say(step: str) -> None:
            if job.rank == 0:
                announce(f"{count(job.world_size, 'rank')}: {step}")

        times = time_cases(cases, plan.seconds, job.device, say)
        results = []
        for case, taken in zip(cases, times, strict=True):
            results.append(case.labels | {"times": taken})
        return {
            "results": results,
            "device": _device_name(job.device),
            "ranks": job.world_size,
            "nodes": job.num_nodes,
            "launcher": job.launcher,
            "backend": job.backend,
        }


def _device_name(device: torch.device) -> str:
    if device.type == "cpu":
        return "cpu"
    name: str = getattr(torch, device.type).get_device_name(device)
    return name


def _cases(plan: Plan, job: Context) -> Iterator[Case]:
    """Make all that the plan asks for; one rank has nobody to talk to."""
    if job.world_size > 1 and "collectives" in plan.parts:
        for size in plan.sizes:
            yield from _collectives(size, job)
    if "steps" in plan.parts:
        for name in MODELS:
            yield from _steps(name, plan.batch_size, job)


def _case(
    job: Context,
    part: str,
    name: str,
    call: Callable[[], object],
    **more: Any,
) -> Case:
    labels = {"part": part, "name": name, "ranks": job.world_size}
    return Case(labels | more, call)


def _collectives(size: int, job: Context) -> Iterator[Case]:
    """Make torch's own collectives, on about so many bytes."""
    floats = size // torch.float32.itemsize // job.world_size
    part = torch.zeros(max(1, floats), device=job.device)
    whole = part.repeat(job.world_size)

    # newer torch has other names for these two, and warns of the former ones
    all_gather_tensor = _first_in_torch("all_gather_single", "all_gather_into_tensor")
    reduce_scatter_tensor = _first_in_torch("reduce_scatter_single", "reduce_scatter_tensor")

    def all_reduce() -> None:
        dist.all_reduce(whole)

    def all_gather() -> None:
        all_gather_tensor(whole, part)

    def reduce_scatter() -> None:
        reduce_scatter_tensor(part, whole)

    def broadcast() -> None:
        dist.broadcast(whole, 0)

    for call in (all_reduce, all_gather, reduce_scatter, broadcast):
        yield _case(job, "collectives", call.__name__, call, bytes=whole.nbytes)


def _first_in_torch(*names: str) -> Callable[..., object]:
    """Return the first of these functions of torch.distributed that there is."""
    there = [name for name in names if hasattr(dist, name)]
    function: Callable[..., object] = getattr(dist, there[0])
    return function


def _steps(name: str, batch_size: int, job: Context) -> Iterator[Case]:
    """Make training steps: with a batch per rank and with one for all, and one without DDP."""
    model, shape = MODELS[name]()
    ranks = job.world_size
    parameters = sum(parameter.numel() for parameter in model.parameters())

    def case(module: torch.nn.Module, way: str, mine: int, samples: int) -> Case:
        step = make_step(module, torch.randn(mine, *shape), job.device)
        return _case(job, "steps", name, step, way=way, samples=samples, parameters=parameters)

    if ranks == 1:
        yield case(model.to(job.device), "ddp", batch_size, batch_size)
        return
    alone = MODELS[name]()[0].to(job.device)
    wrapped = wrap_model(model)
    share = batch_size // ranks
    if job.rank < batch_size % ranks:
        share += 1
    yield case(wrapped, "ddp", batch_size, batch_size * ranks)
    yield case(wrapped, "ddp", share, batch_size)
    yield case(alone, "local", batch_size, batch_size * ranks)
