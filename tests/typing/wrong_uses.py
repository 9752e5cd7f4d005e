"""Wrong uses of ddpkit: a checker is to find an error in each line that says so, and no other. Nothing here runs."""

from __future__ import annotations

from torch import Tensor, nn

import ddpkit


class Net(nn.Module):
    def act(self) -> int:
        return 0


def joining() -> None:
    with ddpkit.distributed(backnd="gloo"):  # error: no such argument
        pass
    with ddpkit.distributed("gloo"):  # error: only by keyword
        pass
    ddpkit.setup(timeout=60)  # error: a number has no unit


def waiting() -> None:
    ddpkit.barrier(timeout=5.0)  # error: a number has no unit
    ddpkit.run_on_main(len, 3)  # error: not an argument of the function
    ddpkit.main_process_only(len)(3)  # error: the same


def collectives() -> None:
    ddpkit.all_reduce(1.0, "maxx")  # error: no such operation
    ddpkit.all_reduce_mean(1.0, "3")  # error: no weight
    ddpkit.all_gather_object("a", group=0)  # error: no group


def mean() -> int:
    return ddpkit.all_reduce_mean(1)  # error: a mean is no integer


def losses(tensor: Tensor) -> dict[str, float]:
    return ddpkit.all_reduce_mean({"loss": tensor})  # error: of tensors


def models(net: Net) -> None:
    ddpkit.wrap_model(net, "fsdp")  # error: no such strategy
    ddpkit.wrap_model("net")  # error: no model
    ddpkit.wrap_model(net).act()  # error: DDP has no such method
    ddpkit.global_mean(net, "3")  # error: no count


def launching() -> list[str]:
    ddpkit.spawn(len, 2, "abc", timeout=3)  # error: a number has no unit
    return ddpkit.spawn(len, 2, "abc")  # error: of integers
