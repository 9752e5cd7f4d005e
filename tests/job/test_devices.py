from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import on_ranks

from ddpkit import LaunchError, get_rank
from ddpkit.job import current_job, joining
from ddpkit.job import device as devices
from ddpkit.job.device import choose_device, default_backend, device_index, identity, is_same_device
from ddpkit.launch import ranks


@pytest.mark.parametrize("visible", [0, 1, 2, 4, 8])
@pytest.mark.parametrize("local_world_size", [1, 2, 3, 4, 8])
def test_two_ranks_of_a_node_never_get_one_index_unless_each_sees_one(visible: int, local_world_size: int) -> None:
    def indices() -> list[int | None]:
        return [device_index(visible, local_rank, local_world_size) for local_rank in range(local_world_size)]

    if 1 < visible < local_world_size:
        with pytest.raises(LaunchError, match=f"{local_world_size} ranks on this node, but {visible} visible"):
            indices()
    elif visible == 0:
        assert indices() == [None] * local_world_size
    elif visible == 1:  # one for each task; whether it is the same one shows in its identity
        assert indices() == [0] * local_world_size
    else:
        assert indices() == list(range(local_world_size))


def test_a_device_that_is_not_there_is_an_error_that_counts_those_that_are() -> None:
    if torch.cuda.is_available():
        pytest.skip("needs a machine without CUDA")
    with pytest.raises(LaunchError, match="cuda:3 was requested on local rank 0; visible cuda devices: 0"):
        choose_device(torch.device("cuda:3"), 0, 1)


def test_a_device_without_an_index_is_the_one_in_use() -> None:
    assert is_same_device(torch.device("cuda"), torch.device("cuda:1"))
    assert not is_same_device(torch.device("cuda:0"), torch.device("cuda:1"))
    assert not is_same_device(torch.device("cpu"), torch.device("cuda:1"))


def test_a_device_of_which_there_is_one_needs_no_binding() -> None:
    devices.bind_device(torch.device("mps", 0))


def test_the_cpu_is_shared_by_all_and_joined_by_gloo() -> None:
    assert choose_device(torch.device("cpu"), 5, 8) == torch.device("cpu")
    assert identity(torch.device("cpu")) == ""
    assert default_backend(torch.device("cpu"), shared=False) == "gloo"


def test_ranks_that_share_an_accelerator_are_joined_by_gloo_because_nccl_refuses() -> None:
    assert default_backend(torch.device("cuda:0"), shared=True) == "gloo"


def agree(kinds: list[str], names: list[str], asked: str | None) -> Any:
    """The ranks' agreement, on real ranks with accelerators that this machine has not got."""
    chosen = torch.device(kinds[get_rank()], 0)
    asked_device = torch.device(asked) if asked else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(joining, "choose_device", lambda *_: chosen)
        patch.setattr(joining, "identity", lambda _: names[get_rank()])
        try:
            session, launch = current_job.current_session(), ranks.current_launch()
            return joining.choose_together(session, launch, asked_device, None)[0].type
        except LaunchError as error:
            return str(error)


@pytest.mark.parametrize(
    ("kinds", "names", "asked", "found"),
    [
        (["cuda"] * 3, ["GPU-a", "GPU-b", "GPU-c"], None, "cuda"),  # one for each task: index 0 everywhere
        (["cuda"] * 3, ["GPU-a", "GPU-b", "GPU-a"], None, "Ranks [0, 2] on"),
        (["cuda"] * 3, ["GPU-a", "GPU-b", "GPU-a"], "cuda:0", "cuda"),  # shared on purpose
        (["cuda", "cuda", "cpu"], ["GPU-a", "GPU-b", ""], None, "different device types: rank 0 cuda, rank 1 cuda,"),
    ],
)
def test_every_rank_hears_of_a_device_that_two_would_share(
    kinds: list[str], names: list[str], asked: str | None, found: str
) -> None:
    results = on_ranks(agree, 3, kinds, names, asked)
    assert len(set(results)) == 1
    assert results[0].startswith(found) or found in results[0]
    assert "see the same accelerator: 2 ranks, 1 cuda device" in results[0] or not found.startswith("Ranks")


def agree_on_cloned_machines() -> Any:
    current_job.current_session().nodes = range(3)  # of one host name, and accelerators whose names tell nothing
    return agree(["cuda"] * 3, ["cuda:0 of "] * 3, None)


def test_accelerators_of_machines_with_one_host_name_are_not_one() -> None:
    assert on_ranks(agree_on_cloned_machines, 3, fresh=True) == ["cuda"] * 3
