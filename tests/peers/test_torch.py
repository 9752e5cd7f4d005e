"""The cases of torch's own suite, with our names.

They come from `torch/testing/_internal/distributed/distributed_test.py`, `test/distributed/test_c10d_common.py`,
`test/test_multiprocessing_spawn.py`, `test/distributed/launcher` and the tests of
`consume_prefix_in_state_dict_if_present`.

Differs on purpose; a test below pins what we do:

| theirs | here | why |
|---|---|---|
| reductions change the tensor | the input stays | a value is used twice without a trap |
| a monitored barrier names the first missing rank | all of them, on every rank | one look is enough |
| DDP refuses a model without gradients | the model itself, made equal | one script for training and evaluation |
| a model that differs between ranks is told by rank 0's view | by name, on every rank | nobody waits |
| values of other shapes may hang or abort | `MismatchError` on every rank | nobody waits |
| a sampler's order is torch's `randperm(seed + epoch)` | an order of its own | resumable on any number of ranks |
| `broadcast_object_list` fills a list | `broadcast` returns a value | nothing has to be made beforehand |

No counterpart:

| case | why |
|---|---|
| groups and subgroups, `new_subgroups`, device meshes | one group: all ranks |
| products, `async_op`, coalescing managers, profilers | torch has them |
| `send`, `recv`, `isend`, `scatter`, `gather` to one rank, `all_to_all`, `reduce_scatter` | torch has them |
| model averagers, post-local SGD, optimisers in backward, `update_process_group` | torch has them |
| SyncBatchNorm, mixed precision, streams, NCCL | need an accelerator |
| buckets, logging data, debug names, deprecations of DDP | internal to it |
| `get_future`, hooks of one's own | `wrap_model` returns torch's DDP: register them there |
| stores, rendezvous, elastic agents, DCP | torchrun's business; see `tests/launch/test_launchers.py` |
"""

from __future__ import annotations

import copy
import os
import pickle
import signal
import time
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import close, gradients, on, share, wait_for
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler as TorchSampler

import ddpkit
from ddpkit import (
    BarrierTimeoutError,
    DistributedSampler,
    MismatchError,
    PeerError,
    accumulate,
    all_gather,
    all_gather_object,
    all_reduce,
    all_reduce_mean,
    average_gradients,
    broadcast,
    check_replicas,
    clean_state_dict,
    detect_launch,
    get_rank,
    get_world_size,
    global_mean,
    make_loader,
    wrap_model,
)

pytestmark = pytest.mark.storm  # what is tested elsewhere once more

# --- collectives ------------------------------------------------------------------------------------------------------


@on(1, 2, 3)
def test_rank_and_size_are_the_groups() -> None:
    assert sorted(all_gather_object(get_rank())) == list(range(get_world_size()))
    if get_world_size() > 1:
        assert (dist.get_rank(), dist.get_world_size()) == (get_rank(), get_world_size())


@on(1, 2, 3)
def test_one_rank_holding_2_and_the_others_10_gives_their_sum_minimum_and_maximum() -> None:
    n = get_world_size()
    mine = torch.full((3, 3), 2.0 if get_rank() == 0 else 10.0)
    assert torch.equal(all_reduce(mine, "sum"), torch.full((3, 3), 2.0 + 10.0 * (n - 1)))
    assert torch.equal(all_reduce(mine, "min"), torch.full((3, 3), 2.0))
    assert torch.equal(all_reduce(mine, "max"), torch.full((3, 3), 10.0 if n > 1 else 2.0))


@on(1, 2, 3)
def test_reducing_twice_adds_twice() -> None:
    once = all_reduce(torch.ones(2))
    assert torch.equal(all_reduce(once), torch.full((2,), float(get_world_size() ** 2)))


@on(1, 2, 3)
def test_complex_tensors_are_summed_or_refused() -> None:
    mine = torch.tensor([complex(2, 3)]) * (get_rank() + 1)
    n = get_world_size()
    try:
        total = all_reduce(mine)
    except TypeError as error:
        assert "complex" in str(error)
    else:
        assert torch.equal(total, torch.tensor([complex(2, 3)]) * (n * (n + 1) // 2))
    with pytest.raises((TypeError, ValueError), match="complex"):
        all_reduce(mine, "max")  # there is no larger one
    assert all_reduce(1) == n


@on(1, 2, 3)
def test_sparse_tensors_are_summed_or_refused() -> None:
    mine = torch.sparse_coo_tensor([[get_rank()]], [1.0], (4,), check_invariants=True)
    try:
        total = all_reduce(mine)
    except TypeError as error:
        assert "sparse" in str(error)
    else:
        assert total.to_dense().tolist() == [1.0] * get_world_size() + [0.0] * (4 - get_world_size())
    assert all_reduce(1) == get_world_size()


@on(1, 2, 3)
def test_several_tensors_are_reduced_together_an_empty_one_too() -> None:
    tensors = [torch.ones(2), torch.zeros(0), torch.full((1, 3), 2, dtype=torch.int64)]
    totals = all_reduce(tensors)
    assert [total.shape for total in totals] == [tensor.shape for tensor in tensors]
    assert totals[2].tolist() == [[2 * get_world_size()] * 3]


@on(1, 2, 3)
def test_tensors_of_every_type_are_gathered_complex_ones_too() -> None:
    for dtype in (torch.float64, torch.float16, torch.complex64, torch.int8, torch.bool):
        mine = torch.full((2, 2), get_rank() % 2, dtype=dtype)
        for rank, theirs in enumerate(all_gather(mine)):
            assert theirs.dtype == dtype and torch.equal(theirs, torch.full((2, 2), rank % 2, dtype=dtype))


@on(1, 2, 3)
def test_tensors_of_every_type_are_broadcast_from_every_rank() -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.uint8, torch.bool, torch.complex128):
        for src in range(get_world_size()):
            value = broadcast(torch.full((3, 3), get_rank() % 2, dtype=dtype), src=src)
            assert torch.equal(value, torch.full((3, 3), src % 2, dtype=dtype))


@dataclass
class Foo:
    x: Any


OBJECTS: list[Any] = [{"key1": 3, "key2": 4, "key3": {"nested": True}}, Foo(10), "foo", [1, 2, True, "string"], None]


@on(1, 2, 3)
def test_objects_of_every_kind_are_gathered() -> None:
    for first in range(len(OBJECTS)):
        gathered = all_gather_object(OBJECTS[(first + get_rank()) % len(OBJECTS)])
        assert gathered == [OBJECTS[(first + rank) % len(OBJECTS)] for rank in range(get_world_size())]


@on(1, 2, 3)
def test_objects_of_every_kind_are_broadcast() -> None:
    for src in range(get_world_size()):
        assert broadcast(OBJECTS if get_rank() == src else [None], src=src) == OBJECTS


@on(2, 3)
def test_objects_that_cannot_be_pickled_raise_on_every_rank() -> None:
    mine = (lambda: 0) if get_rank() == 0 else "fine"
    error = (AttributeError, TypeError, pickle.PicklingError) if get_rank() == 0 else MismatchError
    with pytest.raises(error):
        all_gather_object(mine)
    assert all_reduce(1) == get_world_size()


@on(2, 3)
def test_lengths_types_and_operations_that_differ_raise_on_every_rank() -> None:
    first = get_rank() == 0
    for call in (
        lambda: all_reduce(torch.zeros(2 if first else 3)),
        lambda: all_reduce(torch.zeros(2, dtype=torch.float32 if first else torch.int32)),
        lambda: all_reduce(torch.zeros(2), "sum" if first else "max"),
        lambda: all_reduce(1.0) if first else all_reduce_mean(1.0),
        lambda: all_gather(torch.zeros(2, 2 if first else 3)),
        lambda: broadcast(1, src=0 if first else 1),
    ):
        with pytest.raises(MismatchError):
            call()
    assert all_reduce(1) == get_world_size()


# --- barriers ---------------------------------------------------------------------------------------------------------


@on(1, 2, 3)
def test_a_barrier_lasts_as_long_as_the_slowest_rank(folder: Path) -> None:
    if get_rank() == get_world_size() - 1:
        time.sleep(0.3)
        (folder / "done").touch()
    ddpkit.barrier()
    assert (folder / "done").exists()


@on(3)
def test_a_barrier_names_every_missing_rank_on_every_rank(folder: Path) -> None:
    if get_rank() > 0:
        wait_for(folder / "rank 0 gave up")
    with pytest.raises(BarrierTimeoutError) as caught:
        ddpkit.barrier("all", timeout=timedelta(seconds=0.3))
    (folder / "rank 0 gave up").touch()
    assert [rank for rank, _ in caught.value.missing] == [1, 2]
    assert [rank for rank, _ in caught.value.arrived] == [0]
    ddpkit.barrier("again")


@on(2)
def test_a_late_rank_0_is_named_as_any_other(folder: Path) -> None:
    if get_rank() == 0:
        wait_for(folder / "rank 1 gave up")
    with pytest.raises(BarrierTimeoutError) as caught:
        ddpkit.barrier("without the first", timeout=timedelta(seconds=0.3))
    (folder / "rank 1 gave up").touch()
    assert [rank for rank, _ in caught.value.missing] == [0]


def test_a_barriers_time_out_must_be_positive() -> None:
    with pytest.raises(ValueError, match="positive"):
        ddpkit.barrier(timeout=timedelta(seconds=-1))


# --- models -----------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(2, 10, bias=False)
        self.fc2 = nn.Linear(10, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(torch.relu(self.fc1(x)))


@on(1, 2, 3)
def test_gradients_are_those_of_the_whole_batch_on_one_process() -> None:
    net = Net().double()
    alone, x = copy.deepcopy(net), torch.randn(12, 2).double()
    model = wrap_model(net)
    model(share(x)).square().mean().backward()
    alone(x).square().mean().backward()
    assert close(gradients(net), gradients(alone))


@on(1, 2, 3)
def test_after_wrapping_every_rank_holds_rank_0s_parameters_and_buffers() -> None:
    torch.manual_seed(get_rank())
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    net[1].running_mean.fill_(get_rank())
    for broadcast_buffers in (True, False):
        wrap_model(net, broadcast_buffers=broadcast_buffers)
        check_replicas(net)
        assert net[1].running_mean.tolist() == [0.0] * 3
        net[1].running_mean.fill_(get_rank())


@on(2, 3)
def test_buffers_are_rank_0s_in_every_training_forward_unless_left_alone() -> None:
    for broadcast_buffers in (True, False):
        net = nn.BatchNorm1d(2)
        model = wrap_model(net, broadcast_buffers=broadcast_buffers)
        net.num_batches_tracked.fill_(10 * get_rank())
        model(torch.randn(4, 2))
        assert int(net.num_batches_tracked) == 1 + (0 if broadcast_buffers else 10 * get_rank())


@on(1, 2, 3)
def test_a_model_without_gradients_is_made_equal_and_stays_itself() -> None:
    torch.manual_seed(get_rank())
    net = Net().requires_grad_(False)
    assert wrap_model(net) is net
    check_replicas(net)


@on(2, 3)
def test_models_of_different_shapes_are_refused_on_every_rank_by_name() -> None:
    with pytest.raises(MismatchError, match=r"weight.*\[3, 2\].*on rank 0"):
        wrap_model(nn.Linear(2, 3 if get_rank() == 0 else 4))
    layers = [nn.Linear(2, 2) for _ in range(1 + (get_rank() == 0))]
    with pytest.raises(MismatchError, match=r"1\.weight"):
        wrap_model(nn.Sequential(*layers))
    assert all_reduce(1) == get_world_size()


@on(2, 3)
def test_gradients_differ_within_no_sync_and_agree_after_it() -> None:
    net = Net().double()
    alone, model = copy.deepcopy(net), wrap_model(net)
    x = torch.randn(12, 2).double()
    for step, rows in enumerate(x.split(6)):
        with accumulate(model, step, every=2):
            model(share(rows)).square().mean().backward()
        alone(rows).square().mean().backward()
        kept = all_gather_object([g.sum().item() for g in gradients(net)])
        assert (len({tuple(one) for one in kept}) == 1) == (step == 1)
    assert close(gradients(net), gradients(alone))


@on(2, 3)
def test_ranks_with_different_numbers_of_samples_count_samples_not_ranks() -> None:
    x = torch.randn(9, 2).double()
    mine = x[:7] if get_rank() == 0 else x[7:][get_rank() - 1 :: get_world_size() - 1]
    net = Net().double()
    alone, model = copy.deepcopy(net), wrap_model(net)
    global_mean(model(mine).square().sum(), len(mine)).backward()
    (alone(x).square().sum() / len(x)).backward()
    assert close(gradients(net), gradients(alone))


@on(2, 3)
def test_a_rank_without_samples_still_takes_part() -> None:
    x = torch.randn(3, 2).double()
    mine = x if get_rank() == 0 else x[:0]
    net = Net().double()
    alone, model = copy.deepcopy(net), wrap_model(net)
    global_mean(model(mine).square().sum(), len(mine)).backward()
    (alone(x).square().sum() / 3).backward()
    assert close(gradients(net), gradients(alone))


@on(2, 3)
def test_ranks_that_run_out_of_data_may_use_torchs_join() -> None:
    model = wrap_model(Net())
    assert isinstance(model, DistributedDataParallel)
    with model.join():
        for _ in range(1 + get_rank()):
            model(torch.ones(1, 2)).sum().backward()
    assert all_reduce(1) == get_world_size()


class Branches(nn.Module):
    """Uses one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)])

    def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:
        return self.layers[branch](x)


@on(1, 2)
def test_a_layer_that_no_rank_uses_gets_no_gradient() -> None:
    net = Branches()
    model = wrap_model(net, find_unused_parameters=True)
    for _ in range(2):
        model(torch.ones(1, 2), 0).sum().backward()
    assert net.layers[0].weight.grad is not None and net.layers[1].weight.grad is None


@on(2)
def test_ranks_that_use_different_layers_share_their_gradients() -> None:
    net = Branches()
    model = wrap_model(net, find_unused_parameters=True)
    model(torch.ones(1, 2), get_rank()).sum().backward()
    assert all(layer.weight.grad.tolist() == [[0.5, 0.5]] for layer in net.layers)


@on(1, 2)
def test_a_static_graph_gives_the_same_gradients() -> None:
    net = Net()
    alone, x = copy.deepcopy(net), torch.randn(4, 2)
    model = wrap_model(net, static_graph=True)
    for _ in range(2):
        model(share(x)).mean().backward()
        alone(x).mean().backward()
    assert close(gradients(net), gradients(alone))


Output = namedtuple("Output", "a b")


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> Output:
        y = self.linear(x)
        return Output(y, {"list": [y * 2], "count": len(x)})


@on(1, 2)
def test_outputs_of_named_tuples_and_dicts_come_through() -> None:
    model = wrap_model(Nested())
    output = model(torch.ones(3, 2))
    assert isinstance(output, Output) and output.b["count"] == 3
    (output.a.sum() + output.b["list"][0].sum()).backward()


@on(2, 3)
def test_one_rank_alone_may_evaluate_a_wrapped_model() -> None:
    model = wrap_model(Net())
    if get_rank() == 0:
        model.eval()
        with torch.no_grad():
            for _ in range(3):
                model(torch.ones(1, 2))
    ddpkit.barrier("evaluated")
    model.train()
    model(torch.ones(1, 2)).sum().backward()


@on(2)
def test_compressed_gradients_are_nearly_the_same() -> None:
    net = Net()
    alone, x = copy.deepcopy(net), torch.randn(4, 2)
    model = wrap_model(net)
    model.register_comm_hook(None, fp16_compress_hook)
    model(share(x)).square().mean().backward()
    alone(x).square().mean().backward()
    assert close(gradients(net), gradients(alone), rtol=1e-2, atol=1e-3)


@on(1, 2, 3)
def test_parameters_are_averaged_by_a_mean() -> None:
    n = get_world_size()
    net = nn.Linear(2, 2)
    nn.init.constant_(net.weight, float(get_rank()))
    average = all_reduce_mean(dict(net.named_parameters()))
    assert torch.equal(average["weight"], torch.full((2, 2), (n - 1) / 2))


@on(2, 3)
def test_without_ddp_a_gradient_that_a_rank_lacks_counts_as_zero_and_one_that_all_lack_stays_none() -> None:
    net = Branches()
    if get_rank() == 0:
        net(torch.ones(1, 2), 0).sum().backward()
    average_gradients(net)
    assert torch.allclose(net.layers[0].weight.grad, torch.full((1, 2), 1 / get_world_size()))
    assert net.layers[1].weight.grad is None


@on(1, 2, 3)
def test_without_ddp_a_shared_parameter_is_averaged_once() -> None:
    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    net[1].weight = net[0].weight
    nn.init.constant_(net[0].weight, 1.0)
    net(torch.full((1, 2), get_rank() + 1.0)).sum().backward()
    mine = net[0].weight.grad.clone()
    average_gradients(net, net[1].weight)
    expected = torch.stack(all_gather(mine)).mean(0)
    assert torch.allclose(net[0].weight.grad, expected)


@on(1, 2, 3)
def test_without_ddp_sparse_gradients_are_averaged_or_refused() -> None:
    net = nn.Embedding(4, 2, sparse=True)
    net(torch.tensor([get_rank()])).sum().backward()
    try:
        average_gradients(net)
    except (TypeError, ValueError, ddpkit.DdpkitError) as error:
        assert "sparse" in str(error)
    else:
        mean = torch.zeros(4, 2)
        mean[: get_world_size()] = 1 / get_world_size()
        assert torch.allclose(net.weight.grad.to_dense(), mean)
    assert all_reduce(1) == get_world_size()


@on(1, 2, 3)
def test_without_ddp_a_gradient_that_is_an_expanded_view_is_averaged() -> None:
    parameter = nn.Parameter(torch.zeros(2, 3))
    parameter.grad = torch.tensor(get_rank() + 1.0).expand(2, 3)
    average_gradients(parameter)
    assert torch.equal(parameter.grad, torch.full((2, 3), (get_world_size() + 1) / 2))


# --- samplers ---------------------------------------------------------------------------------------------------------


@on(1, 2, 3)
def test_every_rank_gets_as_many_samples_with_padding_and_with_drop_last() -> None:
    n = get_world_size()
    size = 100 + n + 1
    padded, dropped = DistributedSampler(range(size)), DistributedSampler(range(size), drop_last=True)
    assert len(padded) == len(list(padded)) == -(-size // n)
    assert len(dropped) == len(list(dropped)) == size // n
    assert len(set(all_gather_object((len(padded), len(dropped))))) == 1


def test_a_dataset_smaller_than_the_ranks_is_padded() -> None:
    for rank in range(8):
        assert list(DistributedSampler(range(3), 8, rank, shuffle=False)) == [rank % 3]


def test_torchs_arguments_come_in_torchs_order() -> None:
    ours, theirs = DistributedSampler(range(9), 2, 1, False, 5, True), TorchSampler(range(9), 2, 1, False, 5, True)  # type: ignore[arg-type]
    assert list(ours) == list(theirs)
    for name in ("num_replicas", "rank", "shuffle", "seed", "drop_last", "epoch"):
        assert getattr(ours, name) == getattr(theirs, name)


def test_a_rank_out_of_range_is_refused() -> None:
    for num_replicas, rank in ((3, 3), (3, -1), (1, 1)):
        with pytest.raises(ValueError, match="rank"):
            DistributedSampler(range(9), num_replicas, rank)


def test_an_epochs_order_is_the_same_for_all_ranks_and_another_in_the_next() -> None:
    def order(epoch: int) -> list[int]:
        shares = [DistributedSampler(range(12), 3, rank, seed=7) for rank in range(3)]
        for sampler in shares:
            sampler.set_epoch(epoch)
        return [index for step in zip(*shares, strict=True) for index in step]

    assert sorted(order(0)) == sorted(order(1)) == list(range(12))
    assert order(0) == order(0) != order(1)


@on(1, 2)
def test_worker_processes_give_the_batches_of_none() -> None:
    alone = [batch.tolist() for batch in make_loader(range(20), batch_size=3)]
    with_workers = make_loader(range(20), batch_size=3, num_workers=1)
    assert [batch.tolist() for batch in with_workers] == alone


# --- state dicts ------------------------------------------------------------------------------------------------------


def test_a_prefix_is_taken_from_keys_and_versions_and_the_original_stays() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    state = DataParallel(net).state_dict()
    before = list(state)
    cleaned = clean_state_dict(state)
    assert isinstance(cleaned, OrderedDict) and list(cleaned) == list(net.state_dict())
    assert set(cleaned._metadata) == set(net.state_dict()._metadata)  # type: ignore[attr-defined]
    assert list(state) == before
    net.load_state_dict(cleaned)


def test_a_state_without_prefix_is_left_as_it_is() -> None:
    state = nn.Linear(2, 2).state_dict()
    assert list(clean_state_dict(state)) == list(state)


@on(2)
def test_a_ddp_models_state_loads_into_the_plain_model() -> None:
    net = Net()
    model = wrap_model(net)
    assert isinstance(model, DistributedDataParallel)
    other = Net()
    other.load_state_dict(clean_state_dict(model.state_dict()))
    assert torch.equal(other.fc1.weight, net.fc1.weight)


# --- launching --------------------------------------------------------------------------------------------------------


def test_torchruns_agents_are_told_apart_by_group_rank() -> None:
    env = {
        "TORCHELASTIC_RUN_ID": "none",
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500",
    }
    launch = detect_launch(env)
    assert (launch.node_rank, launch.num_nodes, launch.local_world_size) == (1, 2, 4)
    with pytest.raises(ddpkit.LaunchError, match="RANK=8 is not below WORLD_SIZE=8"):
        detect_launch(env | {"RANK": "8"})


def end(how: str) -> str:
    with ddpkit.distributed() as context:
        if context.rank == 1 and how == "signal":
            os.kill(os.getpid(), signal.SIGABRT)
        if context.rank == 1 and how == "exit":
            os._exit(10)
        if how == "raise":
            raise RuntimeError(f"legitimate exception from process {context.rank}")
        if how != "well":
            ddpkit.barrier("never complete")
        return f"rank {context.rank}"


def test_processes_that_end_well_return_their_results_by_rank() -> None:
    assert ddpkit.spawn(end, 2, "well") == ["rank 0", "rank 1"]


def test_a_process_that_a_signal_ends_is_named_with_the_signal() -> None:
    with pytest.raises(PeerError, match="SIGABRT") as caught:
        ddpkit.spawn(end, 2, "signal")
    assert caught.value.rank == 1


def test_a_process_that_exits_is_named_with_its_code() -> None:
    with pytest.raises(PeerError, match="10") as caught:
        ddpkit.spawn(end, 2, "exit")
    assert caught.value.rank == 1


def test_if_all_raise_one_of_them_is_raised() -> None:
    with pytest.raises(RuntimeError, match="legitimate exception from process [01]"):
        ddpkit.spawn(end, 2, "raise")


def test_a_launch_leaves_no_file_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ddpkit.spawn(end, 1, "well")
    assert not list(tmp_path.iterdir())
