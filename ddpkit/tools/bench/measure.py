"""What the ranks of one job measure: collectives, metric reduction, barriers and training steps."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...collectives import ops, sync
from ...parallel.wrap import wrap_model
from ...process_group.lifecycle import distributed
from ...process_group.startup import Context
from ..tables import Progress
from . import workloads
from .timing import Case, time_cases
from .workloads import METRICS, BadFlag, MakeBatch, Plan, Workload


def measure(plan: Plan, problem: str = "") -> dict[str, Any]:
    """Joins the job and measures. Collective. What a user's model prints goes to stderr.

    Args:
        plan: The same on every rank.
        problem: What this rank already knows to be wrong.

    Returns:
        "results": what was measured, each with its "times"; and what is to be told about the job.

    Raises:
        BadFlag: On every rank, if there is a problem on some rank.
    """
    with contextlib.redirect_stdout(sys.stderr), distributed(device=plan.device, num_threads=1) as job:
        built = {}
        try:
            built = {name: workloads.build(name) for name in plan.models}
        except BadFlag as error:
            problem = problem or str(error)
        problem = next(filter(None, sync.exchange(problem)), "")
        if not problem:
            return _measure(plan, built, job)
    raise BadFlag(problem)  # outside of the job, in which no rank has failed


def _measure(plan: Plan, built: dict[str, Workload], job: Context) -> dict[str, Any]:
    progress = Progress(job.rank == 0)
    cases = list(_cases(plan, built, job))
    title = f"{job.world_size} rank{'s' * (job.world_size > 1)}"
    try:
        times = time_cases(cases, plan.seconds, plan.rounds, job.device, lambda text: progress(f"{title}: {text}"))
    finally:
        progress.done()
    results = [case.what | {"times": taken} for case, taken in zip(cases, times, strict=True)]
    name = "cpu" if job.device.type == "cpu" else getattr(torch, job.device.type).get_device_name(job.device)
    about = {"ranks": job.world_size, "nodes": job.num_nodes, "launcher": job.launcher, "backend": job.backend}
    return {"results": results, "device": name} | about


def _cases(plan: Plan, built: dict[str, Workload], job: Context) -> Iterator[Case]:
    if job.world_size > 1:
        for size in plan.sizes if "collectives" in plan.parts else ():
            yield from _collectives(size, job)
        if "metrics" in plan.parts:
            yield from _metrics(job)
        if "barrier" in plan.parts:
            yield _case("barrier", "ddpkit.barrier", job, sync.barrier)
            yield _case("barrier", "torch.distributed.barrier", job, dist.barrier)
    for name, (module, make_batch) in built.items():
        yield from _steps(name, module, make_batch, plan, job)


def _case(part: str, name: str, job: Context, call: Any, **more: Any) -> Case:
    return Case({"part": part, "name": name, "ranks": job.world_size} | more, call)


def _collectives(size: int, job: Context) -> Iterator[Case]:
    n = job.world_size
    part = torch.zeros(max(1, size // 4 // n), device=job.device)  # float32
    whole = part.repeat(n)
    gather = (
        getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    )  # the newer name warns of the other
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    calls = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: gather(whole, part),
        "reduce_scatter": lambda: scatter(part, whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
    }
    for name, call in calls.items():
        yield _case("collectives", name, job, call, bytes=whole.nbytes)


def _metrics(job: Context) -> Iterator[Case]:
    metrics = {f"metric_{i}": float(i + job.rank) for i in range(METRICS)}

    def by_hand() -> dict[str, float]:
        flat = torch.tensor(list(metrics.values()), device=job.device)
        dist.all_reduce(flat)
        return dict(zip(metrics, (flat / job.world_size).tolist(), strict=True))

    yield _case("metrics", "ddpkit.all_reduce_mean", job, lambda: ops.all_reduce_mean(metrics))
    yield _case("metrics", "by hand", job, by_hand)


def _steps(name: str, module: nn.Module, make_batch: MakeBatch, plan: Plan, job: Context) -> Iterator[Case]:
    """Through DDP with a batch per rank and with one for all; without communication; by DataParallel."""
    n, size = job.world_size, plan.batch_size
    share = size // n + (job.rank < size % n)
    model = wrap_model(module) if n > 1 else module.to(job.device)
    ways = [("ddp", model, size, size * n)]
    if n > 1:
        alone = workloads.build(name)[0].to(job.device)
        ways += [("ddp", model, share, size), ("local", alone, size, size * n)]
    elif plan.dp:
        gpus = torch.accelerator.device_count()
        ways += [("dp", wrap_model(workloads.build(name)[0], "dp"), size * gpus, size * gpus)]
    parameters = sum(parameter.numel() for parameter in module.parameters())
    for way, net, mine, samples in ways:
        step = workloads.make_step(name, net, make_batch(mine), job.device)
        yield _case("steps", name, job, step, way=way, samples=samples, parameters=parameters)
