"""Measure on the ranks of one job: collectives, metric reduction, barriers and training steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from ...collectives import ops, sync
from ...job.job import Context
from ...job.lifecycle import distributed
from ...parallel.wrap import wrap_model
from ..terminal import announce, count
from .timing import Case, time_cases
from .workloads import METRICS, MODELS, Plan, make_step


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
    if job.world_size > 1:
        if "collectives" in plan.parts:
            for size in plan.sizes:
                yield from _collectives(size, job)
        if "metrics" in plan.parts:
            yield from _metrics(job)
        if "barrier" in plan.parts:
            yield _case(job, "barrier", "ddpkit.barrier", sync.barrier)
            yield _case(job, "barrier", "torch.distributed.barrier", dist.barrier)
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


def _metrics(job: Context) -> Iterator[Case]:
    """Make the mean of a dict of numbers, with ddpkit and by hand."""
    metrics = {f"metric_{i}": float(i + job.rank) for i in range(METRICS)}

    def with_ddpkit() -> None:
        ops.all_reduce_mean(metrics)

    def by_hand() -> dict[str, float]:
        flat = torch.tensor(list(metrics.values()), device=job.device)
        dist.all_reduce(flat)
        means = (flat / job.world_size).tolist()
        return dict(zip(metrics, means, strict=True))

    yield _case(job, "metrics", "ddpkit.all_reduce_mean", with_ddpkit)
    yield _case(job, "metrics", "by hand", by_hand)


def _steps(name: str, batch_size: int, job: Context) -> Iterator[Case]:
    """Make training steps: with a batch per rank and with one for all, and one without DDP."""
    model = MODELS[name]()
    ranks = job.world_size
    parameters = sum(parameter.numel() for parameter in model.module.parameters())

    def case(module: torch.nn.Module, way: str, mine: int, samples: int) -> Case:
        step = make_step(module, model.make_batch(mine), job.device)
        more = {"way": way, "samples": samples, "parameters": parameters}
        return _case(job, "steps", name, step, **more)

    if ranks == 1:
        yield case(model.module.to(job.device), "ddp", batch_size, batch_size)
        return
    wrapped = wrap_model(model.module)
    alone = MODELS[name]().module.to(job.device)
    share = batch_size // ranks
    if job.rank < batch_size % ranks:
        share += 1
    yield case(wrapped, "ddp", batch_size, batch_size * ranks)
    yield case(wrapped, "ddp", share, batch_size)
    yield case(alone, "local", batch_size, batch_size * ranks)
