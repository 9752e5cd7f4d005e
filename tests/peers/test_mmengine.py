"""The cases of MMEngine's own suite, with our names.

They come from `tests/test_dist` (`test_dist`, `test_utils`), `tests/test_dataset/test_sampler`,
`tests/test_runner/test_checkpoint`, `tests/test_hooks` (`test_sync_buffers_hook`, `test_sampler_seed_hook`,
`test_checkpoint_hook`), `tests/test_logging/test_logger` and `tests/test_optim/test_optimizer`.

Differs on purpose; a test below pins what we do:

| theirs | here | why |
|---|---|---|
| reductions change the tensor | the input stays | a value is used twice without a trap |
| a mean of integers is an integer | it is a float | the mean of 1 and 2 is no integer |
| `gather`, `gather_object`, `collect_results` answer on rank 0 | on every rank | no `if` on the rank is needed |
| `collect_results(size)` cuts off what is too much | told by indices | duplicates and holes are errors |
| `all_reduce_params` takes a generator | a list | a generator cannot be put together again |
| a seed of None is drawn and synchronised | `seed=0` | a run is repeatable unless it says otherwise |
| an order is torch's `randperm(seed + epoch)` | an order of its own | seed 1, epoch 0 is not seed 0, epoch 1 |
| `MMLogger` is silent below ERROR on other ranks | below WARNING | a warning may be true on one rank only |
| the last, incomplete accumulation is rescaled | `global_mean` | weights of samples, not of batches |

No counterpart:

| case | why |
|---|---|
| `get_data_device`, `cast_data_device`, `get_comm_device` | internal: values travel where the group can |
| `InfiniteSampler` | a loop over epochs; each `iter()` is the next |
| loaders from FTP, http, Petrel, model zoos; post hooks | files only |
| log files by rank, instance names, device ids in the log | handlers are the program's business |
| `MMDistributedDataParallel.train_step`, FSDP wrappers | the loop calls the model |
| parameter schedulers | torch's |
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import on
from torch import nn
from torch.nn.parallel import DataParallel

import ddpkit
from ddpkit import (
    Checkpointer,
    DistributedEvalSampler,
    DistributedSampler,
    ReplicaMismatchError,
    ScalePlan,
    accumulate,
    all_gather,
    all_gather_object,
    all_reduce,
    all_reduce_mean,
    broadcast,
    check_replicas,
    clean_state_dict,
    gather_exact,
    get_rank,
    get_world_size,
    global_mean,
    make_loader,
    unwrap_model,
    wrap_model,
)

pytestmark = pytest.mark.storm  # what is tested elsewhere once more


def row(rank: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Return [1, 2] on rank 0, [3, 4] on rank 1, ..."""
    return torch.tensor([2 * rank + 1, 2 * rank + 2], dtype=dtype)


def rows(dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.stack([row(rank, dtype) for rank in range(get_world_size())])


# --- collectives ------------------------------------------------------------------------------------------------------


@on(1, 2, 3)
def test_a_sum_keeps_the_integers_and_leaves_the_input_alone() -> None:
    mine = row(get_rank())
    total = all_reduce(mine, "sum")
    assert torch.equal(total, rows().sum(0)) and total.dtype == torch.int64
    assert torch.equal(mine, row(get_rank()))


@on(1, 2, 3)
def test_a_mean_of_floats_keeps_its_type_and_that_of_integers_is_a_float() -> None:
    assert torch.equal(all_reduce_mean(row(get_rank(), torch.float32)), rows(torch.float32).mean(0))
    mean = all_reduce_mean(row(get_rank()))
    assert mean.dtype == torch.float64 and torch.equal(mean, rows().double().mean(0))


@on(1, 2, 3)
def test_tensors_are_gathered_on_every_rank() -> None:
    assert torch.equal(torch.stack(all_gather(row(get_rank()))), rows())


@on(1, 2, 3)
def test_a_broadcast_tensor_is_rank_0s() -> None:
    assert torch.equal(broadcast(row(get_rank())), row(0))


@on(1, 2, 3)
def test_a_list_of_objects_is_broadcast_to_ranks_that_hold_none() -> None:
    value = ["foo", 12, {1: 2}] if get_rank() == 0 else [None, None, None]
    assert broadcast(value) == ["foo", 12, {1: 2}]


@on(1, 2, 3)
def test_a_random_seed_becomes_that_of_rank_0() -> None:
    seeds = all_gather_object(broadcast(int(np.random.default_rng().integers(2**31))))
    assert len(set(seeds)) == 1


@on(1, 2, 3)
def test_a_dict_is_reduced_by_its_keys() -> None:
    mine = {"key1": row(get_rank()), "key2": row(get_rank()) + 1}
    result = all_reduce(mine)
    assert torch.equal(result["key1"], rows().sum(0))
    assert torch.equal(result["key2"], (rows() + 1).sum(0))
    means = all_reduce_mean({key: value.float() for key, value in mine.items()})
    assert torch.equal(means["key1"], rows().float().mean(0))


@on(1, 2, 3)
def test_a_dict_of_mixed_types_keeps_each_of_them() -> None:
    mine = {"key1": row(get_rank(), torch.float32), "key2": row(get_rank(), torch.int32)}
    result = all_reduce(mine)
    assert torch.equal(result["key1"], rows(torch.float32).sum(0)) and result["key1"].dtype == torch.float32
    assert torch.equal(result["key2"], rows().sum(0)) and result["key2"].dtype == torch.int64


@on(1, 2, 3)
def test_keys_may_come_in_any_order_but_must_be_the_same() -> None:
    items = [("a", 1.0), ("b", 2.0)]
    result = all_reduce(dict(reversed(items) if get_rank() else items))
    assert result == {"a": 1.0 * get_world_size(), "b": 2.0 * get_world_size()}
    if get_world_size() > 1:
        with pytest.raises(ddpkit.MismatchError, match="missing on rank"):
            all_reduce(dict(items[: 1 + (get_rank() == 0)]))


@on(1, 2, 3)
def test_what_is_no_number_is_refused_with_its_place() -> None:
    with pytest.raises(TypeError, match=r"value\['name'\]"):
        all_reduce({"loss": 1.0, "name": "foo"})


@on(1, 2, 3)
def test_objects_of_different_types_are_gathered_by_rank() -> None:
    kinds = ["foo", {1: 2}, [24, {"a": "b"}]]
    assert all_gather_object(kinds[get_rank()]) == kinds[: get_world_size()]


@on(1, 2, 3)
def test_results_of_ranks_are_put_into_the_order_of_the_data() -> None:
    results = ["foo", 24, {1: 2}, {"a": "b"}]
    mine = list(DistributedEvalSampler(results))
    assert gather_exact([results[i] for i in mine], mine, n=4) == results


@on(2, 3)
def test_more_results_than_samples_are_an_error() -> None:
    mine = list(DistributedSampler(range(4 * get_world_size() - 1), shuffle=False))
    with pytest.raises(ValueError, match="1 repeated"):
        gather_exact(mine, mine, n=4 * get_world_size() - 1)


@on(1, 2, 3)
def test_a_hundred_parameters_are_reduced_in_one_call() -> None:
    for dtype, op, expected in (
        (torch.int64, "sum", rows().sum(0)),
        (torch.float32, "mean", rows(torch.float32).mean(0)),
    ):
        result = all_reduce([row(get_rank(), dtype) for _ in range(100)], op)
        assert len(result) == 100 and all(torch.equal(one, expected) for one in result)


@on(1, 2, 3)
def test_a_generator_is_refused() -> None:
    with pytest.raises(TypeError, match="generator"):
        all_reduce(row(get_rank()) for _ in range(3))


# --- who am I ---------------------------------------------------------------------------------------------------------


@on(1, 2, 3)
def test_local_size_local_rank_and_main_process_are_right_on_one_node() -> None:
    assert ddpkit.get_local_world_size() == get_world_size()
    assert ddpkit.get_local_rank() == get_rank()
    assert ddpkit.is_main_process() == (get_rank() == 0)


@on(1, 2, 3)
def test_what_only_the_master_does_is_done_by_rank_0() -> None:
    @ddpkit.main_process_only
    def who() -> int:
        return get_rank()

    assert who() == (0 if get_rank() == 0 else None)


# --- samplers ---------------------------------------------------------------------------------------------------------


def test_without_other_ranks_a_sampler_gives_the_data() -> None:
    for sampler in (DistributedSampler(range(100), 1, 0, shuffle=False), DistributedEvalSampler(range(100), 1, 0)):
        assert (sampler.num_replicas, sampler.rank, len(sampler)) == (1, 0, 100)
        assert list(sampler) == list(range(100))


def test_rounding_up_repeats_the_front_and_not_rounding_up_repeats_nothing() -> None:
    padded = DistributedSampler(range(100), 3, 2, shuffle=False)
    assert len(padded) == 34 and list(padded) == [*range(100)[2::3], 1]
    exact = DistributedEvalSampler(range(100), 3, 2)
    assert len(exact) == 33 and list(exact) == list(range(100)[2::3])


def test_a_sampler_tells_its_length_as_torchs_does() -> None:
    sampler = DistributedSampler(range(100), 3, 2)
    assert sampler.num_samples == 34  # type: ignore[attr-defined]
    assert sampler.total_size == 102  # type: ignore[attr-defined]


def test_an_order_depends_on_seed_and_epoch_and_not_on_their_sum() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        sampler = DistributedSampler(range(100), 1, 0, seed=seed)
        sampler.set_epoch(epoch)
        return list(sampler)

    assert order(42, 10) == order(42, 10)
    assert sorted(order(42, 10)) == list(range(100))
    assert order(0, 10) != order(10, 0)


@on(1, 2, 3)
def test_a_sampler_finds_its_rank_and_every_rank_has_the_same_seed() -> None:
    sampler = DistributedSampler(range(100))
    assert (sampler.num_replicas, sampler.rank) == (get_world_size(), get_rank())
    assert all_gather_object(sampler.seed) == [0] * get_world_size()


@on(1, 2)
def test_each_pass_over_a_loader_is_a_new_epoch_without_a_hook() -> None:
    loader = make_loader(range(16), batch_size=4)
    orders = []
    for epoch in range(3):
        assert loader.epoch == epoch
        orders.append([int(x) for batch in loader for x in batch])
    assert len({tuple(order) for order in orders}) == 3


# --- models and checkpoints -------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)
        self.norm = nn.BatchNorm2d(3)


class Model(nn.Module):
    def __init__(self, wrap: Any = lambda module: module) -> None:
        super().__init__()
        self.block = wrap(Block())
        self.conv = wrap(nn.Conv2d(3, 3, 1))


def test_keys_are_those_of_the_model_wherever_a_wrapper_stands() -> None:
    names = list(Model().state_dict())
    for wrapped in (DataParallel(Model()), Model(wrap=DataParallel), DataParallel(Model(wrap=DataParallel))):
        cleaned = clean_state_dict(wrapped.state_dict())
        assert isinstance(cleaned, OrderedDict) and list(cleaned) == names


def test_the_versions_of_modules_survive_the_cleaning() -> None:
    state = DataParallel(Model()).state_dict()
    cleaned = clean_state_dict(state)
    assert cleaned._metadata["block.norm"]["version"] == nn.BatchNorm2d._version  # type: ignore[attr-defined]
    Model().load_state_dict(cleaned)


def test_a_module_called_module_keeps_its_name() -> None:
    model = nn.Module()
    model.module = nn.Linear(2, 1)
    model.head = nn.Linear(2, 1)
    assert list(clean_state_dict(model.state_dict())) == list(model.state_dict())


@on(1, 2)
def test_a_checkpoint_of_a_model_whose_only_child_is_called_module_has_torchs_keys(folder: Path) -> None:
    model = nn.Module()
    model.module = nn.Linear(2, 1)
    path = Checkpointer(folder).save(1, model=model)
    state = torch.load(path, weights_only=True)["state"]["model"]
    assert list(state) == ["module.weight", "module.bias"]
    model.load_state_dict(state)


@on(1, 2)
def test_a_checkpoint_is_found_by_its_pointer_and_holds_plain_data(folder: Path) -> None:
    checkpoints = Checkpointer(folder, keep=1)
    for step in (5, 10):
        checkpoints.save(step, meta={"epoch": step, "classes": ["cat", "dog"]})
    assert (folder / "latest").read_text().strip() == "step-000000010.pt"
    assert checkpoints.load_latest() == {"step": 10, "meta": {"epoch": 10, "classes": ["cat", "dog"]}}


@on(2, 3)
def test_buffers_that_differ_are_named_and_made_equal_by_their_mean() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    for buffer in model.buffers():
        buffer.fill_(get_rank() * 2)
    with pytest.raises(ReplicaMismatchError, match=r"buffer 1\.running_mean"):
        check_replicas(model)
    means = all_reduce_mean({name: buffer for name, buffer in model.named_buffers() if buffer.is_floating_point()})
    for name, buffer in model.named_buffers():
        buffer.copy_(means[name] if name in means else broadcast(buffer))
    check_replicas(model)
    assert model[1].running_mean.tolist() == [get_world_size() - 1.0] * 2


@on(1, 2)
def test_a_wrapped_models_parts_are_reached_through_unwrap() -> None:
    model = wrap_model(Model())
    assert isinstance(unwrap_model(model).block, Block)


# --- optimisation -----------------------------------------------------------------------------------------------------


def test_a_step_is_complete_after_every_nth_micro_batch_and_at_the_end() -> None:
    complete = []
    for step in range(10):
        with accumulate(nn.Linear(1, 1), step, every=3, last=step == 9) as done:
            complete.append(done)
    assert complete == [False, False, True] * 3 + [True]


@on(1, 2, 3)
def test_the_incomplete_end_counts_samples_not_batches() -> None:
    torch.manual_seed(3)
    x = torch.randn(7, 2).double()
    weight = torch.ones(2, dtype=torch.float64, requires_grad=True)
    mine = x[get_rank() :: get_world_size()]
    share = global_mean(1.0, len(mine))
    for micro in mine.split(2):
        (share * (micro @ weight).square().sum()).backward()
    reference = torch.ones(2, dtype=torch.float64, requires_grad=True)
    (x @ reference).square().mean().backward()
    ddpkit.average_gradients(weight)
    assert torch.allclose(weight.grad, reference.grad)


def test_a_learning_rate_is_scaled_by_the_real_batch_once() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    plan = ScalePlan(16, 0.1, world_size=4, rule="linear")
    plan.apply(optimizer)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.4)
    with pytest.raises(ValueError, match="already scaled"):
        plan.apply(optimizer)


# --- logs -------------------------------------------------------------------------------------------------------------


@on(1, 2, 3)
def test_information_is_said_once_and_warnings_on_every_rank() -> None:
    seen: list[tuple[str, int]] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append((record.levelname, record.rank))  # type: ignore[attr-defined]

    log = logging.getLogger("peers.mmengine")
    log.setLevel(logging.INFO)
    log.propagate = False
    handler = Keep()
    handler.addFilter(ddpkit.RankFilter())
    log.addHandler(handler)
    for level in (logging.INFO, logging.WARNING, logging.ERROR):
        log.log(level, "welcome")
    log.removeHandler(handler)
    everything = [(name, get_rank()) for name in ("INFO", "WARNING", "ERROR")]
    assert seen == (everything if get_rank() == 0 else everything[1:])


def test_a_logger_of_one_name_is_one_logger() -> None:
    assert ddpkit.get_logger("peers.one") is ddpkit.get_logger("peers.one") is logging.getLogger("peers.one")
    assert len(ddpkit.get_logger("peers.one").filters) == 1
