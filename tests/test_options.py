"""Arguments that a function does not take, or that fewer samples than ranks give."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from processes import free_port, platform_env, run

import ddpkit


class somebodys:
    """Has functions of the script."""

    @staticmethod
    def setup(rank: int) -> None:
        """Begin."""


UNKNOWN: dict[str, tuple[Callable[..., Any], str]] = {
    "a function": (
        lambda: ddpkit.all_reduce_mean(1.0, weights=2),  # type: ignore[call-overload]
        "all_reduce_mean() has no option weights: did you mean weight? It takes value, weight, check, group.",
    ),
    "a function with a wrapper": (
        lambda: ddpkit.global_mean(1.0, 1, minimun=1),  # type: ignore[call-overload]
        "global_mean() has no option minimun: did you mean minimum? It takes loss_sum, count, minimum.",
    ),
    "a class": (
        lambda: ddpkit.Checkpointer("", keep_last=2),  # type: ignore[call-arg]
        "Checkpointer() has no option keep_last: did you mean keep? It takes folder, keep, keep_best.",
    ),
    "a method": (
        lambda: ddpkit.make_loader(range(4), 1).epochs(num=2),  # type: ignore[call-arg]
        "Loader.epochs() has no option num: did you mean n? It takes n.",
    ),
    "a block": (
        lambda: ddpkit.accumulate(None, 0, evry=2),  # type: ignore[call-arg, arg-type]
        "accumulate() has no option evry: did you mean every? It takes model, step, every, last.",
    ),
    "another function": (lambda: int("1", bases=2), "bases"),  # type: ignore[call-overload]
    "one of torch's": (
        lambda: dist.broadcast(None, source=0),  # type: ignore[call-arg]
        "broadcast() got an unexpected keyword argument 'source'",
    ),
    "one of the script's": (lambda: somebodys.setup(lr=3), "setup() got an unexpected keyword argument 'lr'"),  # type: ignore[call-arg]
}


def call_in_a_job(which: str, in_block: bool) -> None:
    call, _ = UNKNOWN[which]
    if in_block:
        with ddpkit.distributed(timeout=timedelta(minutes=1)):
            call()
    ddpkit.setup(timeout=timedelta(minutes=1))
    if ddpkit.is_main_process():
        call()
    ddpkit.barrier()


@pytest.mark.parametrize(("which", "in_block"), [(which, False) for which in UNKNOWN] + [("a function", True)])
def test_an_unknown_option_is_told_beside_those_there_are_on_each_rank(which: str, in_block: bool) -> None:
    port = free_port()
    for end in run(call_in_a_job, [platform_env(rank, 2, port) for rank in range(2)], which, in_block):
        assert end.code == 1 and UNKNOWN[which][1] in end.output, end.output


def test_a_batch_of_none_asks_for_the_reason() -> None:
    for make in (
        lambda: ddpkit.make_loader(range(4), 4 // 8),
        lambda: ddpkit.DistributedSampler(range(4), 8, 0, batch_size=4 // 8),
        lambda: ddpkit.make_micro_batch_loader(range(4), global_batch_size=4, micro_batch_size=4 // 8),
    ):
        with pytest.raises(ValueError, match=r"got 0\. Did you divide fewer samples than there are ranks"):
            make()
