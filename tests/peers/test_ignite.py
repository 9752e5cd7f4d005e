"""The cases of ignite's own suite, with our names.

They come from `tests/ignite/distributed`: `utils/__init__` (what every backend is put through), `utils/test_serial`,
`utils/test_native`, `comp_models/test_native`, `test_auto`, `test_launcher`; and from `tests/ignite/handlers/
test_checkpoint` and `tests/ignite/metrics/test_accumulation`.

Differs on purpose; a test below pins what we do:

| theirs | here | why |
|---|---|---|
| `all_reduce(op="PRODUCT")` | refused | nobody has asked for one, and it overflows |
| `all_gather` takes numbers, strings, dicts | `all_gather_object` does | a tensor's gather pickles nothing |
| `all_gather` joins tensors | a list by rank; `torch.cat` joins it | lengths may differ |
| `all_gather_tensors_with_shapes` | `all_gather_object` | only the first dimension may differ |
| `broadcast` of None or of a list raises | both are values | `safe_mode` is the only mode |
| `auto_dataloader` divides the batch size by the ranks | `batch_size` is per rank | every count says whose it is |
| it divides `num_workers` by the ranks | `num_workers` is per rank | the same |
| a sampler made for another rank warns | refused | samples would be missing |
| `WeightedRandomSampler` is wrapped in a proxy | refused | `DistributedWeightedSampler` draws once for all |
| Slurm's variables of the allocation are enough | the step's are asked for | `sbatch` alone starts one process |
| Slurm and torchrun variables that differ warn | they contradict, or torchrun's are complete | ranks must be unique |

No counterpart:

| case | why |
|---|---|
| `*_group`, `new_group`, `_rank_not_in_group` | one group: all ranks |
| `one_rank_only(rank=…)`, `one_rank_first(rank=…)` | an `if` on the rank; the main process goes first |
| `auto_optim` | the optimizer stays torch's |
| `_test_sync`, `set_local_rank`, `_get_max_length`, overhead | computation models are internal to it |
| `show_config` | `setup()` logs its context |
| Horovod, XLA | other communication libraries |
| engines, events, the other handlers and metrics | ddpkit has no trainer |
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from cases import flat, on, slurm
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler as TorchSampler

import ddpkit
from ddpkit import (
    Checkpointer,
    DistributedEvalSampler,
    DistributedWeightedSampler,
    LaunchError,
    MismatchError,
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


def odd(rank: int) -> float:
    """Return a number of a rank's own: 1, 3, 5, ..."""
    return rank * 2.0 + 1.0


def everyone() -> list[float]:
    return [odd(rank) for rank in range(get_world_size())]


# --- who am I ---------------------------------------------------------------------------------------------------------


@on(1)
def test_without_a_launcher_this_is_the_only_process() -> None:
    assert (get_rank(), get_world_size(), ddpkit.get_local_rank(), ddpkit.get_node_rank()) == (0, 1, 0, 0)
    assert not ddpkit.is_distributed() and not dist.is_initialized()
    assert ddpkit.setup().backend is None


@on(2, 3)
def test_in_a_group_ranks_and_backend_are_torchs() -> None:
    assert (get_rank(), get_world_size()) == (dist.get_rank(), dist.get_world_size())
    assert ddpkit.setup().backend == dist.get_backend() == "gloo"
    assert ddpkit.get_device() == torch.device("cpu")


@on(1, 2, 3)
def test_ranks_and_nodes_fit_together() -> None:
    context = ddpkit.setup()
    assert context.world_size == context.num_nodes * context.local_world_size
    assert context.local_rank < context.local_world_size and context.node_rank < context.num_nodes
    assert sorted(all_gather_object(context.rank)) == list(range(context.world_size))


# --- reductions -------------------------------------------------------------------------------------------------------


@on(1, 2, 3)
def test_a_python_number_is_summed_to_a_python_number() -> None:
    total = all_reduce(10)
    assert total == 10 * get_world_size() and type(total) is int


@on(1, 2, 3)
def test_tensors_of_numbers_are_summed() -> None:
    assert all_reduce(torch.tensor(10)).item() == 10 * get_world_size()
    assert all_reduce(torch.tensor(odd(get_rank()))).item() == sum(everyone())


@on(1, 2, 3)
def test_minima_and_maxima_are_taken_element_by_element() -> None:
    mine = torch.ones(4, 4) * odd(get_rank())
    assert torch.equal(all_reduce(mine, "min"), torch.ones(4, 4) * min(everyone()))
    assert torch.equal(all_reduce(mine, "max"), torch.ones(4, 4) * max(everyone()))


@on(1, 2, 3)
def test_a_product_or_an_unknown_operation_is_refused_on_every_rank() -> None:
    for op in ("PRODUCT", "ABC"):
        with pytest.raises(ValueError, match="op"):
            all_reduce(torch.tensor(2.0), op)
    assert all_reduce(1) == get_world_size()


@on(1, 2, 3)
def test_a_string_is_refused_on_every_rank() -> None:
    with pytest.raises(TypeError, match="str"):
        all_reduce("abc")
    assert all_reduce(1) == get_world_size()


@on(1, 2, 3)
def test_a_result_is_on_the_device_of_its_tensor() -> None:
    mine = torch.tensor([0, 1, 2])
    assert all_reduce(mine).device == mine.device


@on(1, 2, 3)
def test_an_average_over_uneven_ranks_is_that_over_all_samples() -> None:
    samples = np.random.default_rng(0).random(11)
    mine = samples[list(DistributedEvalSampler(samples))]
    mean = all_reduce_mean(mine.mean(), weight=len(mine))
    assert np.isclose(mean, samples.mean(), rtol=1e-12)


# --- gathering --------------------------------------------------------------------------------------------------------


@on(1, 2, 3)
def test_numbers_are_gathered_as_objects_or_as_tensors() -> None:
    assert all_gather_object(10) == [10] * get_world_size()
    assert torch.stack(all_gather(torch.tensor(get_rank()))).tolist() == list(range(get_world_size()))
    with pytest.raises(TypeError, match="all_gather_object"):
        all_gather(10)  # type: ignore[arg-type]


@on(1, 2, 3)
def test_strings_of_any_length_are_gathered() -> None:
    for text in ("test-test", "tests/peers/test_ignite.py" * 4000):
        mine = "abc" if get_rank() == 0 else text
        assert all_gather_object(mine) == ["abc"] + [text] * (get_world_size() - 1)


@on(1, 2, 3)
def test_a_matrix_of_every_rank_is_gathered_with_its_type() -> None:
    for dtype in (torch.int64, torch.uint8, torch.bool, torch.bfloat16):
        mine = (torch.arange(100).reshape(4, 25) * (get_rank() + 1)).to(dtype)
        joint = torch.cat(all_gather(mine))
        assert joint.shape == (4 * get_world_size(), 25) and joint.dtype == dtype
        for rank in range(get_world_size()):
            theirs = (torch.arange(100).reshape(4, 25) * (rank + 1)).to(dtype)
            assert torch.equal(joint[4 * rank : 4 * rank + 4], theirs)


@on(1, 2, 3)
def test_nested_objects_with_tensors_are_gathered() -> None:
    def nested(rank: int) -> dict[str, Any]:
        return {"a": [rank + 1, torch.tensor(rank + 3)], "c": {"text": rank, "b": torch.tensor([[rank]])}}

    for rank, theirs in enumerate(all_gather_object(nested(get_rank()))):
        assert list(theirs) == ["a", "c"]
        assert theirs == nested(rank)


@on(2, 3)
def test_tensors_that_differ_in_other_dimensions_too_are_gathered_as_objects() -> None:
    def block(rank: int) -> torch.Tensor:
        return torch.full((rank + 1, rank + 2, rank + 3), float(rank))

    with pytest.raises(MismatchError, match="shape"):
        all_gather(block(get_rank()))
    for rank, theirs in enumerate(all_gather_object(block(get_rank()))):
        assert torch.equal(theirs, block(rank))


# --- broadcasts -------------------------------------------------------------------------------------------------------

VALUES = (
    10,
    torch.tensor([1.2345, 2.3456]),
    "test-abcdefg",
    Path("tests/peers/test_ignite.py"),
    "tests/peers/test_ignite.py::test_broadcast" * 200,
    torch.arange(100).reshape(4, 25) * 2,
    torch.tensor(12),
    [0, 1, 2],
)


def is_same(one: Any, other: Any) -> bool:
    if isinstance(other, torch.Tensor):
        return torch.equal(one, other) and one.dtype == other.dtype
    return type(one) is type(other) and one == other


@on(1, 2, 3)
def test_every_kind_of_value_is_broadcast_from_every_rank() -> None:
    for src in range(get_world_size()):
        for value in VALUES:
            assert is_same(broadcast(value if get_rank() == src else None, src=src), value)


@on(1, 2, 3)
def test_what_the_other_ranks_pass_may_be_of_another_type() -> None:
    for src in range(get_world_size()):
        for value in VALUES:
            for other in ("abc", 1.2, torch.empty(3, dtype=torch.int8)):
                assert is_same(broadcast(value if get_rank() == src else other, src=src), value)


@on(1, 2, 3)
def test_none_is_a_value_too() -> None:
    assert broadcast(None if get_rank() == 0 else "something") is None


# --- waiting ----------------------------------------------------------------------------------------------------------


@on(1, 2, 3)
def test_what_is_done_before_a_barrier_is_seen_after_it(folder: Path) -> None:
    value = torch.tensor(float(get_rank()))
    if get_rank() == 0:
        value += 10.0
        (folder / "ready").touch()
    ddpkit.barrier()
    assert (folder / "ready").exists()
    assert all_reduce(value).item() == sum(range(get_world_size())) + 10.0


@on(1, 2, 3)
def test_a_function_for_one_rank_changes_nothing_on_the_others() -> None:
    value = torch.tensor(0)

    @ddpkit.main_process_only
    def initialise() -> None:
        value.add_(100)

    initialise()
    assert [int(x) for x in all_gather(value)] == [100] + [0] * (get_world_size() - 1)


@on(1, 2, 3)
def test_the_first_rank_prepares_what_the_others_find(folder: Path) -> None:
    for local in (False, True):
        file = folder / f"data-{local}"
        with ddpkit.main_process_first(local=local):
            if not file.exists():
                assert get_rank() == 0
                file.write_text("prepared")
            assert file.read_text() == "prepared"


# --- launchers --------------------------------------------------------------------------------------------------------

ADDRESS = {"MASTER_ADDR": "c1", "MASTER_PORT": "12233"}


def torch_variables(rank: int, local_rank: int, size: int) -> dict[str, str]:
    return {"RANK": f"{rank}", "LOCAL_RANK": f"{local_rank}", "WORLD_SIZE": f"{size}"}


def test_slurms_variables_say_rank_local_rank_and_first_host() -> None:
    launch = detect_launch(slurm(5, 1, "c[1-2]", "4(x2)", 8))
    assert (launch.rank, launch.local_rank, launch.world_size, launch.node_rank) == (5, 1, 8, 1)
    assert launch.master_addr == "c1" and launch.master_port is not None
    assert detect_launch(slurm(0, 0, "c[1-2]", "4(x2)", 8)).master_port == launch.master_port


def test_torchruns_variables_win_within_a_slurm_task_of_one() -> None:
    env = slurm(0, 0, "c1", "1", 1) | torch_variables(2, 2, 8) | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "2233"}
    launch = detect_launch(env)
    assert (launch.rank, launch.local_rank, launch.world_size) == (2, 2, 8)
    assert (launch.master_addr, launch.master_port) == ("127.0.0.1", 2233)


def test_a_containers_torch_variables_beside_slurms_agree() -> None:
    launch = detect_launch(slurm(3, 3, "c1", "4", 4) | torch_variables(3, 3, 4) | ADDRESS)
    assert (launch.rank, launch.local_rank, launch.world_size) == (3, 3, 4)
    assert (launch.master_addr, launch.master_port) == ("c1", 12233)


@pytest.mark.parametrize("address", [{}, ADDRESS], ids=["without address", "with address"])
def test_torch_variables_that_contradict_slurms_are_refused(address: dict[str, str]) -> None:
    with pytest.raises(LaunchError, match="contradict"):
        detect_launch(slurm(3, 1, "c[1-2]", "2(x2)", 4) | torch_variables(1, 1, 2) | address)


def test_a_host_list_that_cannot_be_read_is_refused() -> None:
    for hosts in ("[]", "invalid[]"):
        with pytest.raises(LaunchError, match="not a list of nodes"):
            detect_launch(slurm(1, 1, hosts, "4", 4))


@pytest.mark.parametrize(
    ("hosts", "first", "count"),
    [
        ("localhost", "localhost", 1),
        ("node[18-19,1-16,21-22]", "node18", 20),
        ("machine2-[02-4]vm1", "machine2-02vm1", 3),
        ("machine2-[009-11]vm1", "machine2-009vm1", 3),
        ("node[1,2,3]", "node1", 3),
        ("compute-b24-[1-3,5-9],compute-b25-[1,4,8],compute-b25-[2-3,13]", "compute-b24-1", 14),
    ],
)
def test_a_host_list_is_expanded(hosts: str, first: str, count: int) -> None:
    launch = detect_launch(slurm(0, 0, hosts, f"1(x{count})" if count > 1 else "1", count, SLURM_NODEID="0"))
    assert launch.num_nodes == count
    assert count == 1 or launch.master_addr == first


def without_the_step(rank: int) -> dict[str, str]:
    """Return what a container's white list lets through of srun's variables."""
    names = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_JOB_NODELIST", "SLURM_JOB_ID")
    return {name: slurm(rank, rank, "c1", "2", 2)[name] for name in names} | {"SLURM_JOB_NUM_NODES": "1"}


def test_a_slurm_rank_other_than_0_without_the_steps_variables_is_no_run_on_one_process() -> None:
    try:
        launch = detect_launch(without_the_step(1))
    except LaunchError:
        return  # to refuse is right as well
    assert (launch.rank, launch.world_size) == (1, 2)


def test_slurm_rank_0_without_the_steps_variables_looks_like_a_batch_script_and_says_so() -> None:
    try:
        launch = detect_launch(without_the_step(0))
    except LaunchError:
        return
    alone = launch.world_size == 1 and any("SLURM_NTASKS=2" in line for line in launch.evidence)
    assert alone or (launch.rank, launch.world_size) == (0, 2)


def test_a_rank_alone_is_refused_with_what_is_missing() -> None:
    with pytest.raises(LaunchError, match="WORLD_SIZE, MASTER_ADDR, MASTER_PORT are not set"):
        detect_launch({"RANK": "1"})


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises((ValueError, LaunchError)):
        ddpkit.spawn(with_unknown_backend, 1)


def with_unknown_backend() -> None:
    ddpkit.setup(backend="abc")


def double(number: int) -> tuple[int, str]:
    with ddpkit.distributed() as context:
        return number * 2 + context.rank, os.environ["MASTER_ADDR"]


def test_a_function_is_launched_on_ranks_of_its_own() -> None:
    assert ddpkit.spawn(double, 2, 10) == [(20, "127.0.0.1"), (21, "127.0.0.1")]
    with pytest.raises(ValueError, match="nprocs"):
        ddpkit.spawn(double, 0, 10)


# --- loaders and models -----------------------------------------------------------------------------------------------


class Numbers(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(100))

    def shard(self, index: int, num_shards: int) -> Any:
        return range(index, 100, num_shards)


@on(1, 2, 3)
def test_a_loader_is_torchs_and_its_batch_size_is_per_rank() -> None:
    for dataset in (torch.rand(100, 3), Numbers()):
        loader = make_loader(dataset, batch_size=10, num_workers=0)
        assert isinstance(loader, DataLoader) and loader.batch_size == 10
        assert len(next(iter(loader))) == 10
        assert loader.pin_memory is False


@on(1, 2, 3)
def test_torchs_distributed_sampler_is_accepted_if_it_is_for_this_rank() -> None:
    n, rank = get_world_size(), get_rank()
    data = list(range(10))
    loader = make_loader(data, 2, sampler=TorchSampler(data, n, rank, shuffle=False))
    padded = -(-10 // n) * n
    assert sorted(flat(all_gather_object([int(x) for batch in loader for x in batch]))) == sorted(
        [*data, *range(padded - 10)]
    )
    for wrong in (TorchSampler(data, n + 1, rank), TorchSampler(data, n + 1, n)):
        with pytest.raises(ValueError, match=f"this is rank {rank} of {n}"):
            make_loader(data, 2, sampler=wrong)


@on(1, 2, 3)
def test_a_sampler_that_does_not_split_is_refused_on_several_ranks() -> None:
    sampler = WeightedRandomSampler(torch.ones(100).tolist(), num_samples=100)
    if get_world_size() == 1:
        assert len(list(make_loader(range(100), 10, sampler=sampler))) == 10
        return
    with pytest.raises(TypeError, match="DistributedWeightedSampler"):
        make_loader(range(100), 10, sampler=sampler)


def test_a_weighted_draw_is_dealt_out_to_the_ranks() -> None:
    weights = torch.ones(100)
    weights[:50] += 1
    alone = DistributedWeightedSampler(weights, 200, num_replicas=1, rank=0)
    shares = [DistributedWeightedSampler(weights, 200, num_replicas=8, rank=rank) for rank in range(8)]
    for epoch in range(20):
        for sampler in (alone, *shares):
            sampler.set_epoch(epoch)
        assert sorted(flat(shares)) == sorted(alone)


@on(1, 2)
def test_on_several_ranks_a_model_becomes_torchs_ddp_with_its_options() -> None:
    for unused in (True, False):
        model = wrap_model(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), find_unused_parameters=unused)
        assert all(parameter.device == ddpkit.get_device() for parameter in model.parameters())
        if get_world_size() == 1:
            assert type(model) is nn.Sequential
        else:
            assert isinstance(model, DistributedDataParallel) and model.find_unused_parameters == unused


@on(2)
def test_synchronised_batch_norm_is_refused_on_cpus() -> None:
    with pytest.raises(ValueError, match="sync_batchnorm=True needs an accelerator"):
        wrap_model(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), sync_batchnorm=True)


# --- checkpoints ------------------------------------------------------------------------------------------------------


@on(1, 2, 3)
def test_only_the_main_process_writes_and_all_may_read_at_once(folder: Path) -> None:
    checkpoints = Checkpointer(folder, keep=2)
    for step in range(4):
        path = checkpoints.save(step, number=step * 10)
        assert path.exists()
    names = sorted(path.name for path in folder.glob("step-*"))
    assert names == ["step-000000002.pt", "step-000000003.pt"]
    assert torch.load(path, weights_only=True)["state"]["number"] == 30


@on(1, 2)
def test_a_wrapped_models_checkpoint_loads_into_a_plain_model_and_back(folder: Path) -> None:
    torch.manual_seed(get_rank())
    plain, other = nn.Linear(2, 2), nn.Linear(2, 2)
    wrapped = wrap_model(plain)
    Checkpointer(folder / "wrapped").save(1, model=wrapped)
    Checkpointer(folder / "wrapped").load_latest(model=other)
    assert torch.equal(other.weight, plain.weight)
    nn.init.zeros_(other.weight)
    Checkpointer(folder / "plain").save(1, model=other)
    Checkpointer(folder / "plain").load_latest(model=wrapped)
    assert not plain.weight.any()
