"""Uses of ddpkit, and the types that a checker is to see in them. Nothing here runs."""
# pyright: strict

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from typing_extensions import assert_type

import ddpkit
from ddpkit.testing import on_ranks


@dataclass
class Metrics:
    loss: float


class Net(nn.Module):
    def act(self) -> int:
        return 0


def name(number: int) -> str:
    return str(number)


def joining() -> None:
    with ddpkit.distributed(backend="gloo", device=torch.device, timeout=timedelta(minutes=1)) as context:
        assert_type(context, ddpkit.Context)
        assert_type(context.device, torch.device)
    assert_type(ddpkit.setup(launch=ddpkit.Launch("platform", 0, 1)), ddpkit.Context)
    assert_type(ddpkit.detect_launch({"RANK": "0"}).local_rank, int | None)


def waiting() -> None:
    assert_type(ddpkit.run_on_main(name, number=3), str)
    assert_type(ddpkit.main_process_only(name)(3), str | None)
    with ddpkit.together("read"), ddpkit.main_process_first(local=True), ddpkit.peer_errors():
        ddpkit.barrier("read", timedelta(seconds=1))


def means(tensor: Tensor, floats: dict[str, float], ints: dict[str, int], metrics: Metrics, yes: bool) -> None:
    assert_type(ddpkit.all_reduce_mean(1.0), float)
    assert_type(ddpkit.all_reduce_mean(1, weight=3), float)
    assert_type(ddpkit.all_reduce_mean(yes, weight=tensor), float)
    assert_type(ddpkit.all_reduce_mean(nn.Parameter(tensor)), Tensor)
    assert_type(ddpkit.all_reduce_mean(floats), dict[str, float])
    assert_type(ddpkit.all_reduce_mean({"loss": 2.0}), dict[str, float])
    assert_type(ddpkit.all_reduce_mean(ints), dict[str, float])
    assert_type(ddpkit.all_reduce_mean({"a": yes}), dict[str, float])
    assert_type(ddpkit.all_reduce_mean([1, 2]), list[float])
    assert_type(ddpkit.all_reduce_mean({"a": tensor}), dict[str, Tensor])
    assert_type(ddpkit.all_reduce_mean(metrics), Metrics)


def sums(tensor: Tensor, ints: dict[str, int], yes: bool) -> None:
    assert_type(ddpkit.all_reduce(3), int)
    assert_type(ddpkit.all_reduce(yes), int)
    assert_type(ddpkit.all_reduce(yes, "max"), bool)
    assert_type(ddpkit.all_reduce(3, "mean"), float)
    assert_type(ddpkit.all_reduce(ints, "max"), dict[str, int])
    assert_type(ddpkit.all_reduce(nn.Parameter(tensor), "min"), Tensor)


def gathering(tensor: Tensor, floats: dict[str, float]) -> None:
    assert_type(ddpkit.all_gather(tensor), list[Tensor])
    assert_type(ddpkit.all_gather({"a": tensor}), list[dict[str, Tensor]])
    assert_type(ddpkit.all_gather_object("a"), list[str])
    assert_type(ddpkit.gather_exact({"a": tensor}, [0], 1), dict[str, Tensor])
    assert_type(ddpkit.gather_exact(["a"], range(1), 1), list[str])
    assert_type(ddpkit.broadcast(floats), dict[str, float])
    assert_type(ddpkit.broadcast(tensor), Tensor)


def models(net: Net, other: nn.Module, ddp: DistributedDataParallel, parallel: DataParallel[Net]) -> None:
    model = ddpkit.wrap_model(net)
    assert_type(model, Net | DistributedDataParallel | DataParallel[Net])
    assert_type(ddpkit.unwrap_model(model), Net)
    assert_type(ddpkit.unwrap_model(model).act(), int)
    assert_type(ddpkit.unwrap_model(net), Net)
    assert_type(ddpkit.unwrap_model(ddpkit.wrap_model(other)), nn.Module)
    assert_type(ddpkit.unwrap_model(other), nn.Module)
    assert_type(ddpkit.unwrap_model(ddp), nn.Module)
    assert_type(ddpkit.unwrap_model(parallel), Net)
    optimizer = torch.optim.SGD(model.parameters())
    ddpkit.wrap_model(net, bucket_cap_mb=50, gradient_as_bucket_view=True)
    ddpkit.check_replicas(net, optimizer)
    ddpkit.check_replicas([net, other], (optimizer, optimizer))
    with ddpkit.accumulate(model, 0, every=2) as complete:
        assert_type(complete, bool)
    with ddpkit.averaging(model, nn.Parameter(torch.zeros(1))), ddpkit.StepGuard(model) as guard:
        assert_type(guard.skipped, bool)


def losses(loss: Tensor, count: Tensor, model: nn.Module) -> None:
    assert_type(ddpkit.global_mean(loss, 3), Tensor)
    assert_type(ddpkit.global_mean(loss, count), Tensor)
    assert_type(ddpkit.global_mean(2.0, np.int64(3)), float)
    ddpkit.global_mean(model, 3.0, minimum=1)


def data() -> ddpkit.Loader:
    loader = ddpkit.make_loader(range(4), 2, pin_memory=True)
    assert_type(loader.state_dict(), dict[str, Any])
    for epoch in loader.epochs(2):
        assert_type(epoch, int)
    return loader


def same_bits(model: nn.Module) -> None:
    for batch in ddpkit.make_micro_batch_loader(range(4), 4, 2):
        assert isinstance(batch, ddpkit.MicroBatches)
        assert_type(batch.global_batch_size, int)
        with ddpkit.exact_gradients(batch, model) as micro_batches:
            for x in micro_batches:
                model(x).backward()


def surviving(model: nn.Module) -> None:
    for attempt in ddpkit.survive(model, min_ranks=2):
        assert_type(attempt, ddpkit.Attempt)
        with attempt as context:
            assert_type(context, ddpkit.Context)
            assert_type(attempt.resume(ddpkit.make_loader(range(4), 2)), ddpkit.Loader)
            attempt.commit()


def launching() -> None:
    assert_type(ddpkit.spawn(name, 2, end_together=False), list[str | BaseException])
    assert_type(ddpkit.spawn(name, 2, 3, timeout=timedelta(minutes=1)), list[str])
    assert_type(on_ranks(name, 2, 3), list[str])
