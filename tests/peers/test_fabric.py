"""The cases of Lightning Fabric's own suite, with our names.

They come from `tests/tests_fabric`: `utilities` (`test_distributed`, `test_seed`, `test_rank_zero`, `test_data`,
`test_load`), `plugins/environments`, `plugins/collectives`, `strategies/test_ddp_integration`, `strategies/launchers`,
`test_fabric`, `test_wrappers`; and from `tests_pytorch/utilities/test_all_gather_grad`.

Differs on purpose; a test below pins what we do:

| theirs | here | why |
|---|---|---|
| `all_reduce` is a mean by default | a sum; `all_reduce_mean` is the mean | the field's names |
| strings in a collection are passed over | refused with their place | nothing is silently left alone |
| reductions change the tensor | the input stays | a value is used twice without a trap |
| uneven tensors of any shape are gathered | the first dimension may differ | else gather objects |
| `all_gather(sync_grads=True)` | no gradient; `global_mean` for losses | a loss is averaged, not a tensor gathered |
| a rank variable alone gives a rank | incomplete hints are refused | N silent single runs |
| Kubeflow's local rank is 0, its node rank the rank | asked of the other ranks | two pods may share a node |
| `SLURM_NTASKS` alone is a Slurm job | it is a forgotten `srun`, said in the evidence | `sbatch` starts one process |
| `seed_everything()` reads the environment | a seed is an argument | what is drawn shows in the script |
| `no_backward_sync` of a plain model raises | `accumulate` does nothing | one script for one process and many |
| `setup_dataloaders` replaces shuffling by torch's order | an order of its own | resumable on any number of ranks |
| `load` changes the state's own dict | returns what was not restored | nothing is half loaded |

No counterpart:

| case | why |
|---|---|
| groups, `two_groups`, `convert_ops` beyond sum, mean, min, max | one group: all ranks |
| `set_global_rank`, `set_world_size`, `teardown` of an environment | a `Launch` is frozen |
| `validate_settings(num_devices, num_nodes)` | the launcher alone says how many |
| `is_shared_filesystem` | loading compares what the ranks read |
| `suggested_max_num_workers`, `has_iterable_dataset`, dunder replacement | torch's DataLoader is built once, by us |
| precision, autocast, callbacks, loggers, `init_module`, filters, lazy loading | torch's |
| `reset_seed`, `load_raw` | `seed_everything` again, `torch.load` |
| XLA, DeepSpeed, FSDP, model parallel, throughput | not our business |
"""

from __future__ import annotations

import copy
import random
import time
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from dataclasses import InitVar, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import on, slurm, wait_for
from torch import nn
from torch.utils.data import Sampler, TensorDataset
from torch.utils.data.distributed import DistributedSampler as TorchSampler

import ddpkit
from ddpkit import (
    Checkpointer,
    CheckpointError,
    DistributedSampler,
    LaunchError,
    MismatchError,
    accumulate,
    all_gather,
    all_gather_object,
    all_reduce,
    all_reduce_mean,
    broadcast,
    detect_launch,
    get_rank,
    get_world_size,
    make_loader,
    wrap_model,
)

pytestmark = pytest.mark.storm  # what is tested elsewhere once more

# --- collectives ------------------------------------------------------------------------------------------------------


@on(1, 2, 3)
def test_tensors_as_long_as_the_rank_are_gathered_the_empty_one_too() -> None:
    gathered = all_gather(torch.ones(get_rank()))
    assert [tensor.tolist() for tensor in gathered] == [[1.0] * rank for rank in range(get_world_size())]


@on(2, 3)
def test_tensors_uneven_in_the_second_dimension_are_refused_and_go_as_objects() -> None:
    mine = torch.ones(get_rank() + 1, 4 - get_rank())
    with pytest.raises(MismatchError, match=r"\(any, 4\).*on rank 0"):
        all_gather(mine)
    shapes = [tuple(tensor.shape) for tensor in all_gather_object(mine)]
    assert shapes == [(rank + 1, 4 - rank) for rank in range(get_world_size())]


@on(1, 2, 3)
def test_sums_and_maxima_are_exact_for_integers_and_floats_of_any_size() -> None:
    n = get_world_size()
    for dtype in (torch.int64, torch.int32, torch.float32, torch.float16):
        mine = torch.tensor(get_rank() + 1, dtype=dtype)
        largest, total, mean = all_reduce(mine, "max"), all_reduce(mine), all_reduce(mine, "mean")
        assert largest.dtype == dtype and largest == n
        assert total == n * (n + 1) // 2
        assert mean == (n + 1) / 2
        assert mine == get_rank() + 1


@on(1, 2, 3)
def test_booleans_are_summed_as_counts_and_compared_as_booleans() -> None:
    mine = get_rank() == 0
    assert all_reduce(mine) == 1
    assert all_reduce(torch.tensor(mine)) == 1
    largest = all_reduce(torch.tensor(mine), "max")
    assert largest.dtype == torch.bool and bool(largest)
    assert all_reduce(mine, "max") is True
    assert all_reduce(mine, "min") is (get_world_size() == 1)


@on(1, 2, 3)
def test_a_string_in_a_collection_is_refused_with_its_place() -> None:
    with pytest.raises(TypeError, match=r"value\[2\]"):
        all_reduce([torch.tensor(2), torch.tensor(3), "string"])
    with pytest.raises(TypeError, match=r"value\['c'\]"):
        all_reduce_mean({"a": torch.tensor(4.0), "b": [torch.tensor(5.0)], "c": "string"})


@on(1, 2, 3)
def test_collections_of_tensors_arrays_and_numbers_are_reduced_leaf_by_leaf() -> None:
    n = get_world_size()
    value = {
        "integers": torch.ones(2, 2, dtype=torch.int32),
        "list": [torch.ones(2), torch.zeros(1)],
        "array": np.array([1, 2, 3]),
        "booleans": [True, False],
        "floats": (0.0, 1.0),
    }
    result = all_reduce(value)
    assert torch.equal(result["integers"], torch.full((2, 2), n))
    assert torch.equal(result["list"][0], torch.full((2,), float(n)))
    assert isinstance(result["array"], np.ndarray) and result["array"].tolist() == [n, 2 * n, 3 * n]
    assert result["booleans"] == [n, 0] and result["floats"] == (0.0, 1.0 * n)


@dataclass
class Plain:
    x: Any
    y: Any = 2


@dataclass(frozen=True)
class Frozen:
    x: Any


@dataclass
class Slotted:
    __slots__ = ("x",)
    x: Any


@dataclass
class WithInitVar:
    """Cannot be made from its fields alone."""

    x: Any
    scale: InitVar[float]

    def __post_init__(self, scale: float) -> None:
        self.x = self.x * scale


@on(1, 2, 3)
def test_dataclasses_and_dicts_of_any_kind_come_back_as_they_were() -> None:
    n = get_world_size()
    one = torch.ones(2)
    for value in (Plain(one), Frozen(one), Slotted(one), WithInitVar(one, scale=1.0)):
        result = all_reduce(value)
        assert type(result) is type(value)
        assert torch.equal(result.x, n * one) and torch.equal(value.x, one)
    ordered = all_reduce(OrderedDict(b=1, a=2))
    assert type(ordered) is OrderedDict and list(ordered.items()) == [("b", n), ("a", 2 * n)]
    counts = all_reduce(defaultdict(int, cats=1))
    assert type(counts) is defaultdict and counts == {"cats": n} and counts["dogs"] == 0


@on(1, 2, 3)
def test_gathered_and_averaged_tensors_carry_no_gradient() -> None:
    loss = torch.ones(8, requires_grad=True).sum()
    with pytest.raises(ValueError, match=r"would lose the gradient of value. Use gather_batch\(\).*\.detach\(\)"):
        all_gather(loss)
    assert not any(tensor.requires_grad for tensor in all_gather(loss.detach()))
    assert not all_reduce_mean(loss).requires_grad
    assert not broadcast(loss if get_rank() == 0 else None, src=0).requires_grad or get_rank() == 0


@on(1, 2, 3)
def test_a_broadcast_may_come_from_any_rank() -> None:
    for src in range(get_world_size()):
        assert broadcast(torch.tensor(get_rank()), src=src).item() == src
    with pytest.raises(ValueError, match="src must be a rank"):
        broadcast(1, src=get_world_size())


# --- waiting ----------------------------------------------------------------------------------------------------------


@on(2, 3)
def test_a_barriers_name_and_the_missing_ranks_are_in_the_error(folder: Path) -> None:
    if get_rank() > 0:
        wait_for(folder / "rank 0 gave up")
    with pytest.raises(ddpkit.BarrierTimeoutError, match="barrier 'test'") as caught:
        ddpkit.barrier("test", timeout=timedelta(seconds=0.3))
    (folder / "rank 0 gave up").touch()
    assert [rank for rank, _ in caught.value.missing] == list(range(1, get_world_size()))


@on(2, 3)
def test_the_first_rank_may_work_longer_than_a_barrier_would_wait(folder: Path) -> None:
    with ddpkit.main_process_first():
        if get_rank() == 0:
            time.sleep(0.3)
            (folder / "done").touch()
        assert (folder / "done").exists()


@on(2, 3)
def test_if_the_first_rank_fails_all_raise_and_can_go_on() -> None:
    error = ValueError if get_rank() == 0 else ddpkit.PeerError
    with pytest.raises(error, match="no data"):
        with ddpkit.main_process_first():
            raise ValueError("no data")
    assert all_reduce(1) == get_world_size()


# --- launchers --------------------------------------------------------------------------------------------------------

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "MASTER_ADDR": "1.2.3.4",
    "MASTER_PORT": "500",
    "WORLD_SIZE": "20",
    "RANK": "11",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "5",
    "GROUP_RANK": "2",
    "GROUP_WORLD_SIZE": "4",
}
JSRUN = {
    "LSB_JOBID": "1234",
    "JSM_NAMESPACE_SIZE": "4",
    "JSM_NAMESPACE_RANK": "3",
    "JSM_NAMESPACE_LOCAL_RANK": "1",
    "JSM_NAMESPACE_LOCAL_SIZE": "2",
}


def test_without_variables_this_is_one_process() -> None:
    launch = detect_launch({})
    assert (launch.kind, launch.rank, launch.world_size, launch.local_rank, launch.node_rank) == ("single", 0, 1, 0, 0)
    assert launch.master_addr is None and launch.master_port is None


def test_torchruns_variables_are_taken_as_they_are() -> None:
    launch = detect_launch(TORCHRUN)
    assert (launch.kind, launch.rank, launch.world_size) == ("torchrun", 11, 20)
    assert (launch.local_rank, launch.node_rank, launch.num_nodes) == (1, 2, 4)
    assert (launch.master_addr, launch.master_port) == ("1.2.3.4", 500)
    with pytest.raises(AttributeError):
        launch.rank = 100  # type: ignore[misc]


def test_torchruns_mark_without_the_rest_is_refused() -> None:
    with pytest.raises(LaunchError, match="looks like a torchrun job, but RANK, WORLD_SIZE, LOCAL_RANK"):
        detect_launch({"TORCHELASTIC_RUN_ID": "x"})


def test_a_platforms_ranks_are_taken_and_their_place_on_the_node_is_left_to_ask() -> None:
    launch = detect_launch(
        {
            "KUBERNETES_PORT": "tcp://127.0.0.1:443",
            "MASTER_ADDR": "1.2.3.4",
            "MASTER_PORT": "500",
            "WORLD_SIZE": "20",
            "RANK": "1",
        }
    )
    assert (launch.kind, launch.rank, launch.world_size) == ("platform", 1, 20)
    assert (launch.master_addr, launch.master_port) == ("1.2.3.4", 500)
    assert launch.local_rank is None and launch.node_rank is None


def test_slurms_step_says_ranks_nodes_and_address() -> None:
    launch = detect_launch(slurm(17, 2, "n[1-4]", "5(x4)", 20, SLURM_NODEID="3"))
    assert (launch.kind, launch.rank, launch.world_size) == ("slurm", 17, 20)
    assert (launch.local_rank, launch.local_world_size) == (2, 5)
    assert (launch.node_rank, launch.num_nodes, launch.master_addr) == (3, 4, "n1")


@pytest.mark.parametrize(
    ("hosts", "per_node", "size", "first"),
    [
        ("alpha,beta,gamma", "1(x3)", 3, "alpha"),
        ("1.2.3.[100-110]", "1(x11)", 11, "1.2.3.100"),
        ("1.2.3.[089,100-110]", "1(x12)", 12, "1.2.3.089"),
        ("host[1,5-9]", "1(x6)", 6, "host1"),
        ("host[5-9,1]", "1(x6)", 6, "host5"),
        ("alpha,host[5-9],gamma", "1(x7)", 7, "alpha"),
        ("alpha[3,1],beta", "1(x3)", 3, "alpha3"),
    ],
)
def test_the_ranks_meet_on_the_first_host_of_slurms_list(hosts: str, per_node: str, size: int, first: str) -> None:
    assert detect_launch(slurm(0, 0, hosts, per_node, size)).master_addr == first


def test_an_address_that_the_user_set_wins_over_slurms() -> None:
    launch = detect_launch(slurm(0, 0, "a,b", "1(x2)", 2, MASTER_ADDR="1.2.3.4", MASTER_PORT="1234"))
    assert (launch.master_addr, launch.master_port) == ("1.2.3.4", 1234)


def test_an_allocation_without_srun_is_one_process_that_says_so() -> None:
    launch = detect_launch({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2"})
    assert (launch.kind, launch.world_size) == ("single", 1)
    assert any("start the ranks with srun" in line for line in launch.evidence)
    for name in ("bash", "interactive"):
        assert detect_launch({"SLURM_JOB_NAME": name}).kind == "single"


def test_jsruns_variables_are_read_or_refused_but_make_no_run_on_one_process() -> None:
    try:
        launch = detect_launch(JSRUN)
    except LaunchError:
        return
    assert (launch.rank, launch.world_size, launch.local_rank) == (3, 4, 1)


def test_an_mpi_rank_without_its_number_on_the_node_is_left_to_ask() -> None:
    launch = detect_launch({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8"})
    assert (launch.kind, launch.rank, launch.world_size, launch.local_rank) == ("openmpi", 3, 8, None)
    assert detect_launch({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}).local_rank == 0


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK"])
def test_a_rank_variable_other_than_0_alone_is_refused(name: str) -> None:
    with pytest.raises(LaunchError):
        detect_launch({name: "3"})


# --- seeds ------------------------------------------------------------------------------------------------------------


def test_a_seed_is_returned_as_given() -> None:
    assert ddpkit.seed_everything(45) == 45


@pytest.mark.parametrize("seed", [-1, 2**63, -(10**10)])
def test_a_seed_out_of_range_is_refused(seed: int) -> None:
    with pytest.raises(ValueError, match=r"in \[0, 2\*\*63\)"):
        ddpkit.seed_everything(seed)


def test_one_seed_gives_the_same_numbers_again() -> None:
    def draw() -> tuple[float, float, float]:
        ddpkit.seed_everything(123)
        return random.random(), float(np.random.rand()), float(torch.rand(1))

    assert draw() == draw()


@on(2, 3)
def test_a_seed_per_rank_makes_the_ranks_differ_in_all_three_generators() -> None:
    ddpkit.seed_everything(3, per_rank=True)
    drawn = all_gather_object((random.random(), float(np.random.rand()), float(torch.rand(1))))
    for column in zip(*drawn, strict=True):
        assert len(set(column)) == get_world_size()


def test_workers_of_all_ranks_draw_different_numbers() -> None:
    seeds = {ddpkit.sample_seed(base, epoch, index) for base in (0, 1, 42) for epoch in range(8) for index in range(64)}
    assert len(seeds) == 3 * 8 * 64


@on(1, 2)
def test_a_checkpoint_restores_the_random_states(folder: Path) -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(1))

    model = nn.Linear(1, 1)
    Checkpointer(folder).save(1, model=model)
    drawn = draw()
    Checkpointer(folder).load_latest(model=model)
    assert draw() == drawn


# --- models -----------------------------------------------------------------------------------------------------------


@on(1, 2)
def test_a_model_is_moved_to_the_ranks_device_and_its_optimizer_left_alone() -> None:
    model = nn.Linear(1, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = wrap_model(model)
    assert all(parameter.device == ddpkit.get_device() for parameter in wrapped.parameters())
    assert next(wrapped.parameters()) is optimizer.param_groups[0]["params"][0]


@on(2)
def test_a_model_that_is_wrapped_already_is_refused_even_inside_another() -> None:
    wrapped = wrap_model(nn.Linear(1, 2))
    for model in (wrapped, nn.Sequential(wrapped), torch.compile(wrapped, backend="eager")):
        with pytest.raises(ValueError, match="already wrapped"):
            wrap_model(model)


@on(1, 2)
def test_a_compiled_model_may_be_wrapped_and_comes_back_out() -> None:
    model = nn.Linear(2, 2)
    wrapped = wrap_model(torch.compile(model, backend="eager"))
    assert ddpkit.unwrap_model(wrapped) is model
    assert list(ddpkit.clean_state_dict(wrapped.state_dict())) == ["weight", "bias"]


@on(1, 2)
def test_accumulation_on_a_plain_model_is_no_error() -> None:
    model = nn.Linear(3, 3)
    with accumulate(model, 0, every=2) as complete:
        model(torch.ones(1, 3)).sum().backward()
    assert not complete and model.weight.grad is not None


@on(2, 3)
def test_within_the_block_no_gradient_travels_and_after_it_it_does() -> None:
    wrapped = wrap_model(nn.Linear(2, 1, bias=False).double())
    x = torch.full((1, 2), float(get_rank() + 1), dtype=torch.float64)
    with accumulate(wrapped, 0, every=2):
        wrapped(x).sum().backward()
    assert wrapped.module.weight.grad.tolist() == [[get_rank() + 1.0] * 2]
    with accumulate(wrapped, 1, every=2):
        wrapped(x).sum().backward()
    mean = (get_world_size() + 1) / 2
    assert torch.allclose(wrapped.module.weight.grad, torch.full((1, 2), 2 * mean).double())


@on(1, 2, 3)
def test_clipping_after_the_synchronised_step_is_the_same_on_every_rank() -> None:
    model = wrap_model(nn.Linear(4, 2))
    model(torch.randn(3, 4) * (get_rank() + 1)).square().sum().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    norms = all_gather_object((float(norm), [p.grad.norm().item() for p in model.parameters()]))
    assert all(one == norms[0] for one in norms)


# --- loaders ----------------------------------------------------------------------------------------------------------


@on(2)
def test_without_shuffling_rank_r_gets_every_second_sample() -> None:
    loader = make_loader(TensorDataset(torch.arange(8)), batch_size=1, shuffle=False)
    assert [int(batch[0]) for batch in loader] == list(range(8))[get_rank() :: 2]


@pytest.mark.parametrize("n", [10, 11, 1])
@pytest.mark.parametrize("drop_last", [False, True])
def test_without_shuffling_shards_are_those_of_torchs_sampler(n: int, drop_last: bool) -> None:
    for world_size in (1, 2, 3):
        if drop_last and n < world_size:
            continue
        for rank in range(world_size):
            ours = DistributedSampler(range(n), world_size, rank, shuffle=False, drop_last=drop_last)
            theirs = TorchSampler(range(n), world_size, rank, shuffle=False, drop_last=drop_last)  # type: ignore[arg-type]
            assert list(ours) == list(theirs) and len(ours) == len(theirs)


@on(1, 2)
def test_what_is_no_dataset_is_refused() -> None:
    for wrong in (5, None, object()):
        with pytest.raises(TypeError):
            make_loader(wrong, batch_size=1)


class Custom(Sampler[int]):
    """A sampler of a user's own, for this rank."""

    def __init__(self, n: int) -> None:
        self.n, self.num_replicas, self.rank = n, get_world_size(), get_rank()

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.n))


@on(1, 2)
def test_a_custom_sampler_for_this_rank_is_left_as_it_is() -> None:
    sampler = Custom(4)
    loader = make_loader(range(4), batch_size=2, sampler=sampler)
    assert loader.sampler is sampler
    for _ in range(2):  # it has no set_epoch, which is no error
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]


@on(1, 2)
def test_a_custom_sampler_is_told_every_epoch() -> None:
    told = []
    sampler = Custom(4)
    sampler.set_epoch = told.append  # type: ignore[attr-defined]
    loader = make_loader(range(4), batch_size=2, sampler=sampler)
    for _ in range(3):
        list(loader)
    assert told == sorted(told) and set(told) >= {1, 2}
    loader.set_epoch(10)
    assert told[-1] == 10


def test_an_attribute_set_epoch_that_is_no_function_is_left_alone() -> None:
    sampler = Custom(4)
    sampler.set_epoch = "not a method"  # type: ignore[attr-defined]
    loader = make_loader(range(4), batch_size=2, sampler=sampler)
    loader.set_epoch(5)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]
    assert sampler.set_epoch == "not a method"  # type: ignore[attr-defined]


@on(2)
def test_a_custom_sampler_that_does_not_split_is_refused() -> None:
    class Plain(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(4))

    with pytest.raises(TypeError, match="does not split its samples"):
        make_loader(range(4), batch_size=2, sampler=Plain())


# --- checkpoints ------------------------------------------------------------------------------------------------------


@on(1, 2)
def test_what_was_saved_before_or_after_wrapping_loads_before_or_after_wrapping(folder: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    before = copy.deepcopy(model)
    Checkpointer(folder / "before").save(1, model=model)
    Checkpointer(folder / "after").save(1, model=wrap_model(model))
    for name in ("before", "after"):
        for wrap in (lambda module: module, wrap_model):
            target = wrap(nn.Linear(2, 2))
            Checkpointer(folder / name).load_latest(model=target)
            assert all(torch.equal(a, b) for a, b in zip(target.parameters(), before.parameters(), strict=True))


@on(1, 2)
def test_what_is_not_restored_into_an_object_comes_back(folder: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    Checkpointer(folder).save(3, model=model, optimizer=optimizer, anything={"cocofruit": 1})
    assert Checkpointer(folder).load_latest(model=model, optimizer=optimizer) == {
        "step": 3,
        "anything": {"cocofruit": 1},
    }


@on(1, 2)
def test_plain_torch_reads_a_checkpoint(folder: Path) -> None:
    model = nn.Linear(2, 2)
    path = Checkpointer(folder).save(1, model=wrap_model(model))
    nn.Linear(2, 2).load_state_dict(torch.load(path, weights_only=True)["state"]["model"])


@on(1, 2)
def test_a_name_that_was_not_saved_is_an_error_and_nothing_is_changed(folder: Path) -> None:
    model = nn.Linear(2, 2)
    Checkpointer(folder).save(1, model=model)
    nn.init.ones_(model.weight)
    with pytest.raises(CheckpointError, match="it has no 'optimizer'; it has: model"):
        Checkpointer(folder).load_latest(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    assert bool((model.weight == 1).all())


@on(1, 2)
def test_code_in_a_checkpoint_is_refused(folder: Path) -> None:
    if get_rank() == 0:
        torch.save({"model": nn.Linear(1, 1)}, folder / "step-000000001.pt")
    ddpkit.barrier("written")
    with pytest.raises(CheckpointError):
        Checkpointer(folder).load(folder / "step-000000001.pt")


@on(2, 3)
def test_ranks_that_see_different_folders_are_told(folder: Path) -> None:
    own = folder / f"rank-{get_rank()}"
    if get_rank() == 0:
        own.mkdir()
    path = folder / "rank-0" / "step-000000001.pt"
    Checkpointer(folder / "rank-0").save(1, model=nn.Linear(1, 1))
    if get_rank() == 1:
        path = own / path.name
    with pytest.raises(CheckpointError, match="rank-1"):
        Checkpointer(folder / "rank-0").load(path, model=nn.Linear(1, 1))


# --- launching --------------------------------------------------------------------------------------------------------


def fill(values: dict[str, Any]) -> Any:
    with ddpkit.distributed() as context:
        values["seen"] = context.rank
        return values


def fail_on_rank_1() -> None:
    with ddpkit.distributed():
        if get_rank() == 1:
            raise KeyError("missing")
        ddpkit.barrier("never")


def test_launched_ranks_get_copies_and_give_back_their_results() -> None:
    values = {"tensor": torch.ones(2)}
    results = ddpkit.spawn(fill, 2, values)
    assert [result["seen"] for result in results] == [0, 1]
    assert "seen" not in values


def test_a_launched_ranks_exception_is_raised_with_its_rank() -> None:
    with pytest.raises(KeyError, match="missing") as caught:
        ddpkit.spawn(fail_on_rank_1, 2)
    assert isinstance(caught.value.__cause__, ddpkit.PeerError)
    assert caught.value.__cause__.rank == 1 and "fail_on_rank_1" in caught.value.__cause__.traceback
