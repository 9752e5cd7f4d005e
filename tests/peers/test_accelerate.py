"""The cases of accelerate's own suite, with our names.

They come from `test_utils/scripts` (`test_ops`, `test_script`, `test_sync`, `test_distributed_data_loop`,
`external_deps/test_metrics`) and `tests` (`test_data_loader`, `test_scheduler`, `test_state_checkpointing`,
`test_accelerator`, `test_utils`, `test_logging`).

Differs on purpose; a test below pins what we do:

| theirs | here | why |
|---|---|---|
| a scheduler steps once per process | it steps once | ddpkit never touches a scheduler; `ScalePlan` plans its steps |
| even batches by repeating samples | the last global batch is shared out | fewer samples count twice |
| a batch is a contiguous piece | batches of a step together are one | the order is that of any number of ranks |
| `gather_object` joins lists | a list by rank | what came from whom stays known |
| `gather` of a number has a dimension | numbers stay numbers | shapes are kept |
| `gather_for_metrics` guesses what to drop | told by indices | a duplicate or a hole is an error |
| preparing twice wraps once | refused | the second call is a mistake in the script |
| `broadcast` of shapes that differ raises | the others' value is ignored | it is a placeholder |
| `split_batches` | `ScalePlan(keep="global")` | it is arithmetic |
| custom batch samplers are kept | refused | every rank must get as many batches |
| a loader without batch size | refused | the same |
| `check_trigger` resets a flag that was set | `stop_together` has no memory | the flag is an argument |

No counterpart:

| case | why |
|---|---|
| `dispatch_batches`, `central_dl_preparation_check` | no rank reads for others |
| `on_last_process`, `on_process`, `on_local_main_process` | an `if` on the rank |
| `split_between_processes` of a dict of lists | slice with a sampler's indices |
| `trigger_sync_in_backward`, `sync_each_batch` | the loop decides with `accumulate` |
| `reduce(scale=…)` | multiply |
| `join_uneven_inputs` | torch's `Join` around the DDP model, see `test_torch` |
| `test_reinstantiated_state`, `test_pickle_accelerator`, mutable states | there is no object to hold |
| `keep_torch_compile` | `unwrap_model` gives the model itself |
| `free_memory`, offloading, FSDP, DeepSpeed, TPUs, `bnb`, `convert_to_fp32` | not our business |
"""

from __future__ import annotations

import copy
import gc
import inspect
import io
import logging
import os
import pickle
import time
import weakref
from collections import namedtuple
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import close, flat, gradients, on, share
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, IterableDataset, Sampler, SequentialSampler, TensorDataset

import ddpkit
from ddpkit import (
    Checkpointer,
    DistributedEvalSampler,
    DistributedSampler,
    MismatchError,
    ScalePlan,
    accumulate,
    all_gather,
    all_gather_object,
    all_reduce,
    broadcast,
    gather_exact,
    get_rank,
    get_world_size,
    make_loader,
    unwrap_model,
    wrap_model,
)

pytestmark = pytest.mark.storm  # what is tested elsewhere once more

Pair = namedtuple("Pair", "first second")


def own_tensor() -> torch.Tensor:
    """Return a tensor as long as there are ranks; all of them together count from 1."""
    n = get_world_size()
    return torch.arange(n) + 1.0 + n * get_rank()


# --- operations -------------------------------------------------------------------------------------------------------


@on(1, 2, 3)
def test_gathered_tensors_come_in_the_order_of_the_ranks() -> None:
    gathered = torch.cat(all_gather(own_tensor()))
    assert gathered.tolist() == list(range(1, get_world_size() ** 2 + 1))


@on(1, 2, 3)
def test_gathered_objects_stay_apart_by_rank() -> None:
    gathered = all_gather_object([get_rank()])
    assert gathered == [[rank] for rank in range(get_world_size())]


@on(1, 2, 3)
def test_a_number_is_gathered_as_a_number() -> None:
    gathered = all_gather(torch.tensor(get_rank()))
    assert [tensor.shape for tensor in gathered] == [()] * get_world_size()
    assert [int(tensor) for tensor in gathered] == list(range(get_world_size()))


@on(1, 2, 3)
def test_a_tensor_that_is_not_contiguous_is_gathered_row_by_row() -> None:
    mine = torch.arange(12).view(4, 3).t() + 100 * get_rank()
    assert not mine.is_contiguous()
    gathered = all_gather(mine)
    for rank, theirs in enumerate(gathered):
        assert torch.equal(theirs, torch.arange(12).view(4, 3).t() + 100 * rank)


@on(1, 2, 3)
def test_nested_tensors_are_gathered_as_objects() -> None:
    gathered = all_gather_object({"logits": own_tensor(), "pair": (get_rank(), "text")})
    for rank, theirs in enumerate(gathered):
        assert theirs["pair"] == (rank, "text")
        assert theirs["logits"][0] == 1 + get_world_size() * rank


@on(1, 2, 3)
def test_tensors_of_different_lengths_need_no_padding() -> None:
    longer = get_world_size() + 1 if get_rank() == 0 else get_world_size()
    gathered = all_gather(torch.arange(longer))
    lengths = [len(tensor) for tensor in gathered]
    assert lengths == [get_world_size() + 1] + [get_world_size()] * (get_world_size() - 1)


@on(1, 2, 3)
def test_a_broadcast_gives_all_ranks_the_first_ones_tensor() -> None:
    value = broadcast(own_tensor())
    assert value.tolist() == list(range(1, get_world_size() + 1))


@on(1, 2, 3)
def test_a_broadcast_may_start_at_the_last_rank() -> None:
    last = get_world_size() - 1
    value = broadcast({"rank": get_rank(), "tensor": own_tensor()}, src=last)
    assert value["rank"] == last
    assert value["tensor"][0] == 1 + get_world_size() * last


@on(1, 2, 3)
def test_a_tensor_reaches_ranks_that_hold_none() -> None:
    value = broadcast(torch.tensor([1, 2, 3], dtype=torch.int32) if get_rank() == 0 else None)
    assert value.dtype == torch.int32 and value.tolist() == [1, 2, 3]


@on(2, 3)
def test_a_broadcast_ignores_the_shapes_of_the_other_ranks() -> None:
    shape = (1, 5) if get_rank() == 0 else (1, 2, 5)
    value = broadcast({"tensor": torch.full(shape, float(get_rank()))})
    assert torch.equal(value["tensor"], torch.zeros(1, 5))


@on(1, 2, 3)
def test_sums_means_and_maxima_of_tensors_are_those_of_the_ranks() -> None:
    n = get_world_size()
    everyone = (torch.arange(n * n) + 1.0).view(n, n)
    assert torch.equal(all_reduce(own_tensor(), "sum"), everyone.sum(0))
    assert torch.equal(all_reduce(own_tensor(), "mean"), everyone.mean(0))
    assert torch.equal(all_reduce(own_tensor(), "max"), everyone.amax(0))


@on(2, 3)
def test_reducing_shapes_that_differ_raises_on_every_rank() -> None:
    shape = (1, 5) if get_rank() == 0 else (1, 2, 5)
    with pytest.raises(MismatchError, match=r"\['tensor'\].*\(1, 5\) on rank 0"):
        all_reduce({"tensor": torch.zeros(shape)})
    assert all_reduce(1) == get_world_size()  # they can go on


@on(2, 3)
def test_gathering_different_numbers_of_dimensions_raises_on_every_rank() -> None:
    shape = (1, 5) if get_rank() == 0 else (1, 1, 6)
    with pytest.raises(MismatchError, match="all_gather"):
        all_gather(torch.zeros(shape))
    assert all_reduce(1) == get_world_size()


@on(1, 2, 3)
def test_reducing_keeps_the_types_of_lists_tuples_and_named_tuples() -> None:
    ones = [torch.ones(2), (1.0, Pair(torch.zeros(1), second=2))]
    result = all_reduce(ones)
    assert type(result) is list and type(result[1]) is tuple and type(result[1][1]) is Pair
    assert result[1][1].second == 2 * get_world_size()


# --- who does what ----------------------------------------------------------------------------------------------------


@on(1, 2, 3)
def test_the_main_process_goes_first_and_the_others_follow(folder: Path) -> None:
    diary = folder / "diary"
    with ddpkit.main_process_first():
        if get_rank() == 0:
            time.sleep(0.1)
        with diary.open("a") as file:
            file.write(f"{get_rank()}\n")
    ddpkit.barrier("written")
    lines = diary.read_text().split()
    assert lines[0] == "0" and sorted(lines) == [str(rank) for rank in range(get_world_size())]


@on(1, 2, 3)
def test_on_one_node_the_local_main_process_is_the_main_process(folder: Path) -> None:
    assert ddpkit.is_local_main_process() == ddpkit.is_main_process() == (get_rank() == 0)
    diary = folder / "diary"
    with ddpkit.main_process_first(local=True):
        if get_rank() != 0:
            assert diary.exists()
        diary.touch()


@on(1, 2, 3)
def test_a_function_for_the_main_process_does_nothing_elsewhere() -> None:
    called = []
    result = ddpkit.main_process_only(lambda: called.append(get_rank()) or "done")()
    assert (called, result) == (([0], "done") if get_rank() == 0 else ([], None))


@on(1, 2, 3)
def test_a_second_setup_returns_the_first() -> None:
    assert ddpkit.setup() is ddpkit.setup()
    assert ddpkit.setup().world_size == get_world_size()


@on(1, 2, 3)
def test_a_seed_gives_all_ranks_equal_random_states() -> None:
    ddpkit.seed_everything(42)
    states = all_gather_object((torch.get_rng_state().tolist(), np.random.get_state()[1].tolist()))
    assert all(state == states[0] for state in states)


@on(1, 2, 3)
def test_a_flag_that_the_main_process_raises_reaches_all_and_is_forgotten() -> None:
    assert ddpkit.stop_together(False) is False
    assert ddpkit.stop_together(get_rank() == 0) is True
    assert ddpkit.stop_together(False) is False


@on(2, 3)
def test_a_flag_that_the_last_rank_raises_reaches_all() -> None:
    assert ddpkit.stop_together(get_rank() == get_world_size() - 1) is True


@on(1, 2, 3)
def test_seventeen_samples_are_split_as_evenly_as_possible() -> None:
    n = get_world_size()
    share = len(list(DistributedEvalSampler(range(17))))
    assert share == 17 // n + (get_rank() < 17 % n)
    assert sum(all_gather_object(share)) == 17


@on(1, 2, 3)
def test_results_of_split_work_come_back_in_the_order_of_the_data() -> None:
    for n in (2 * get_world_size(), 2 * get_world_size() - 1):
        data = [f"item {i}" for i in range(n)]
        mine = list(DistributedEvalSampler(data))
        assert gather_exact([data[i].upper() for i in mine], mine, n=n) == [text.upper() for text in data]


# --- loaders ----------------------------------------------------------------------------------------------------------


def global_batches(loader: Any) -> list[list[int]]:
    """Return each step's samples of all ranks together, sorted."""
    mine = [batch.tolist() for batch in loader]
    everyone = all_gather_object(mine)
    assert len({len(batches) for batches in everyone}) == 1, "the ranks took different numbers of steps"
    return [sorted(flat(step)) for step in zip(*everyone, strict=True)]


@on(1, 2, 3)
def test_without_shuffling_the_ranks_batches_of_a_step_are_one_piece_of_the_data() -> None:
    n = get_world_size()
    steps = global_batches(make_loader(range(32 * n), batch_size=8, shuffle=False))
    assert steps == [list(range(8 * n * i, 8 * n * (i + 1))) for i in range(4)]


@on(1, 2, 3)
def test_with_shuffling_every_sample_comes_once() -> None:
    steps = global_batches(make_loader(range(32 * get_world_size()), batch_size=8))
    assert sorted(flat(steps)) == list(range(32 * get_world_size()))


@on(1, 2, 3)
def test_every_rank_takes_as_many_steps_without_repeating_samples() -> None:
    n = get_world_size()
    steps = global_batches(make_loader(range(7 * n), batch_size=2, shuffle=False))
    assert flat(steps) == list(range(7 * n))  # theirs repeats the first n


@on(2, 3)
def test_a_last_batch_smaller_than_the_ranks_is_padded_from_the_front() -> None:
    n = get_world_size()
    steps = global_batches(make_loader(range(2 * n + 1), batch_size=2, shuffle=False))
    assert steps[-1] == sorted([2 * n, *range(n - 1)])


@on(1, 2, 3)
def test_evaluation_does_not_pad_so_a_rank_may_have_a_batch_more() -> None:
    loader = make_loader(range(2 * get_world_size() + 1), batch_size=1, train=False)
    counts = all_gather_object(len([batch.tolist() for batch in loader]))
    assert counts == [3] + [2] * (get_world_size() - 1)


@on(1, 2, 3)
def test_drop_last_leaves_only_whole_batches() -> None:
    n = get_world_size()
    loader = make_loader(range(10 * n + 1), batch_size=5, drop_last=True)
    for batch in loader:
        assert len(torch.cat(all_gather(batch))) == 5 * n
    assert len(loader) == 2


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("n", [24, 22, 20, 4, 2])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_shards_of_a_batch_sampler_are_equally_many_and_together_the_data(
    n: int, world_size: int, drop_last: bool
) -> None:
    whole = n // (3 * world_size) * 3 * world_size
    if drop_last and not whole:
        with pytest.raises(ValueError, match="leaves nothing"):
            DistributedSampler(range(n), world_size, 0, False, drop_last=True, batch_size=3)
        return
    shards = []
    for rank in range(world_size):
        sampler = DistributedSampler(range(n), world_size, rank, False, drop_last=drop_last, batch_size=3)
        shards.append(list(BatchSampler(sampler, 3, drop_last)))
    assert len({len(shard) for shard in shards}) == 1
    seen = {index for shard in shards for batch in shard for index in batch}
    assert seen == set(range(whole if drop_last else n))


def test_a_global_batch_that_does_not_divide_is_refused() -> None:
    assert ScalePlan(16, 0.1, world_size=2, keep="global").per_rank_batch_size == 8
    with pytest.raises(ValueError, match="does not divide into 2 ranks"):
        ScalePlan(3, 0.1, world_size=2, keep="global")


class Words(IterableDataset):
    """A stream that knows how to split itself."""

    def __init__(self, n: int) -> None:
        self.n = n

    def shard(self, index: int, num_shards: int) -> Any:
        return range(index, self.n, num_shards)

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.n))


@on(1, 2, 3)
def test_the_shards_of_a_stream_are_together_the_stream() -> None:
    for n in (30, 2):
        with pytest.warns(UserWarning, match="nothing to read") if get_rank() >= n else nullcontext():
            mine = [int(x) for batch in make_loader(Words(n), batch_size=4) for x in batch]
        assert sorted(flat(all_gather_object(mine))) == list(range(n))


@on(2, 3)
def test_a_stream_that_cannot_split_is_refused_where_all_ranks_would_read_all_of_it() -> None:
    class Plain(IterableDataset):
        def __iter__(self) -> Iterator[int]:
            return iter(range(4))

    with pytest.raises(TypeError, match="shard"):
        make_loader(Plain(), batch_size=2)


def test_a_loader_needs_a_batch_size() -> None:
    with pytest.raises(ValueError, match="batch_size must be a positive integer, got None"):
        make_loader(Words(4), batch_size=None)


def test_a_batch_sampler_is_taken_instead_of_a_batch_size() -> None:
    batches = BatchSampler(SequentialSampler(range(8)), 3, False)
    assert [batch.tolist() for batch in make_loader(range(8), batch_sampler=batches)] == [[0, 1, 2], [3, 4, 5], [6, 7]]
    with pytest.raises(ValueError, match="leave out batch_size"):
        make_loader(range(8), batch_size=2, batch_sampler=batches)


def test_what_a_batch_holds_besides_tensors_comes_through() -> None:
    loader = make_loader(range(10), 4, collate_fn=lambda samples: {"tensor": torch.tensor(samples), "text": "same"})
    for batch in loader:
        assert isinstance(batch["tensor"], torch.Tensor) and batch["text"] == "same"


@on(1, 2)
def test_one_seed_gives_one_order_and_another_seed_another() -> None:
    def epochs(seed: int) -> list[list[int]]:
        loader = make_loader(range(30), batch_size=5, seed=seed)
        return [[int(x) for batch in loader for x in batch] for _ in range(3)]

    first = epochs(21)
    assert first == epochs(21) and first != epochs(42)
    assert len({tuple(order) for order in first}) == 3  # and each epoch has its own


@on(1, 2)
def test_going_back_to_epoch_0_gives_the_same_batches_again() -> None:
    loader = make_loader(range(10), batch_size=2, seed=42)
    first = [batch.tolist() for _ in range(3) for batch in loader]
    loader.set_epoch(0)
    assert [batch.tolist() for _ in range(3) for batch in loader] == first


@on(1, 2, 3)
def test_a_resumed_loader_skips_exactly_the_batches_that_were_done() -> None:
    whole = [batch.tolist() for batch in make_loader(range(16 * get_world_size()), batch_size=4)]
    loader = make_loader(range(16 * get_world_size()), batch_size=4)
    for step, _ in enumerate(loader, start=1):
        if step == 2:
            state = loader.state_dict()
            break
    again = make_loader(range(16 * get_world_size()), batch_size=4)
    again.load_state_dict(state)
    assert [batch.tolist() for batch in again] == whole[2:]
    assert again.epoch == 1 and len(list(again)) == 4  # the next epoch is whole


@on(1, 2)
def test_skipping_batches_keeps_the_epoch() -> None:
    loader = make_loader(range(32), batch_size=4, seed=42)
    loader.set_epoch(1)
    for _ in loader:
        state = loader.state_dict()
        break
    again = make_loader(range(32), batch_size=4, seed=42)
    again.load_state_dict(state)
    assert again.epoch == 1
    next(iter(again))
    assert again.epoch == again.sampler.epoch == 1


@on(1, 2)
def test_the_length_tells_the_last_batch_in_every_epoch() -> None:
    loader = make_loader(range(15), batch_size=4)
    for _ in range(2):
        assert len(list(loader)) == len(loader)


def test_a_samplers_own_set_epoch_is_called() -> None:
    class Own(Sampler[int]):
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __len__(self) -> int:
            return 4

        def __iter__(self) -> Iterator[int]:
            return iter(range(4))

    sampler = Own()
    loader = make_loader(range(4), batch_size=2, sampler=sampler)
    loader.set_epoch(1)
    assert sampler.epoch == 1
    list(loader)
    assert sampler.epoch == 2


@on(1, 2)
def test_a_loader_within_a_loaders_loop_does_not_disturb_it() -> None:
    outer = make_loader(range(80), batch_size=16)
    inner = make_loader(range(96), batch_size=16)
    seen = []
    for step, batch in enumerate(outer):
        seen.append(batch.tolist())
        if step == 1:
            assert sum(1 for _ in inner) == len(inner)
        assert outer.epoch == 0
    assert seen == [batch.tolist() for batch in make_loader(range(80), batch_size=16)]
    assert (outer.epoch, inner.epoch) == (1, 1)


@on(1, 2)
def test_a_loader_can_be_pickled() -> None:
    loader = make_loader(TensorDataset(torch.arange(12)), batch_size=3)
    again = pickle.loads(pickle.dumps(loader))
    assert [batch[0].tolist() for batch in again] == [batch[0].tolist() for batch in loader]


def test_a_loader_that_nobody_holds_is_gone() -> None:
    loader = make_loader(list(range(16)), batch_size=4)
    batches = iter(loader)
    next(batches)
    known = weakref.ref(loader)
    del loader, batches
    gc.collect()
    assert known() is None


# --- training ---------------------------------------------------------------------------------------------------------


def regression() -> tuple[nn.Linear, torch.Tensor, torch.Tensor]:
    """Return the same model and data on every rank."""
    torch.manual_seed(42)
    return nn.Linear(3, 1).double(), torch.randn(24, 3).double(), torch.randn(24, 1).double()


@on(1, 2, 3)
def test_training_on_n_ranks_gives_the_model_of_one_process() -> None:
    model, x, y = regression()
    alone, data = copy.deepcopy(model), TensorDataset(x, y)
    wrapped = wrap_model(model)
    together = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    reference = torch.optim.SGD(alone.parameters(), lr=0.1)
    batch = 12 // get_world_size()
    for a, b in make_loader(data, batch_size=batch, seed=3):
        together.zero_grad()
        F.mse_loss(wrapped(a), b).backward()
        together.step()
    for step in range(2):
        order = list(DistributedSampler(data, 1, 0, seed=3))[12 * step : 12 * (step + 1)]
        reference.zero_grad()
        F.mse_loss(alone(x[order]), y[order]).backward()
        reference.step()
    assert close(list(model.parameters()), list(alone.parameters()))


@on(1)
def test_on_one_process_accumulation_synchronises_nothing() -> None:
    model, x, y = regression()
    alone = copy.deepcopy(model)
    for step in range(3):
        with accumulate(wrap_model(model), step, every=2) as complete:
            F.mse_loss(model(x), y).backward()
        assert complete == (step % 2 == 1)
        F.mse_loss(alone(x), y).backward()
        assert close(gradients(model), gradients(alone))


@on(2, 3)
def test_gradients_are_synchronised_with_the_micro_batch_that_completes_a_step() -> None:
    model, x, y = regression()
    alone, wrapped = copy.deepcopy(model), wrap_model(model)
    for step in range(4):
        with accumulate(wrapped, step, every=2):
            F.mse_loss(wrapped(share(x)), share(y)).backward()
        F.mse_loss(alone(x), y).backward()
        assert close(gradients(model), gradients(alone)) == (step % 2 == 1)
        if step % 2:
            model.zero_grad()
            alone.zero_grad()


@on(2, 3)
def test_the_incomplete_end_of_an_epoch_is_synchronised_where_the_loop_says_so() -> None:
    model, x, y = regression()
    alone, wrapped = copy.deepcopy(model), wrap_model(model)
    in_step = []
    for step in range(3):
        with accumulate(wrapped, step, every=2, last=step == 2):
            F.mse_loss(wrapped(share(x)), share(y)).backward()
        F.mse_loss(alone(x), y).backward()
        in_step.append(close(gradients(model), gradients(alone)))
    assert in_step == [False, True, True]


@on(1, 2)
def test_with_accumulation_the_weights_are_those_of_one_process() -> None:
    model, x, y = regression()
    alone, wrapped = copy.deepcopy(model), wrap_model(model)
    together = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    reference = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step, rows in enumerate(torch.arange(24).split(8)):
        last = step == 2
        with accumulate(wrapped, step, every=2, last=last) as complete:
            (F.mse_loss(wrapped(share(x[rows])), share(y[rows])) / 2).backward()
        (F.mse_loss(alone(x[rows]), y[rows]) / 2).backward()
        if complete:
            for optimizer in (together, reference):
                optimizer.step()
                optimizer.zero_grad()
    assert close(list(model.parameters()), list(alone.parameters()))


@on(1, 2)
def test_a_scheduler_steps_once_whatever_the_number_of_ranks() -> None:
    optimizer = torch.optim.SGD(wrap_model(nn.Linear(2, 4)).parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 - n / 10)
    optimizer.step()
    scheduler.step()
    assert scheduler.last_epoch == 1 and scheduler.get_last_lr() == [0.9]


def test_a_plan_says_how_many_steps_a_schedule_has_on_n_ranks() -> None:
    samples = 12_800
    for world_size, accumulation in ((1, 1), (2, 1), (2, 4)):
        plan = ScalePlan(64, 0.1, world_size=world_size, rule="linear", accumulation=accumulation)
        assert plan.steps(samples) == samples // (64 * world_size * accumulation)


@on(1, 2)
def test_wrapping_twice_is_refused() -> None:
    wrapped = wrap_model(nn.Linear(2, 2))
    if get_world_size() == 1:
        assert wrap_model(wrapped) is wrapped  # there was nothing to wrap in
        return
    assert isinstance(wrapped, DistributedDataParallel)
    with pytest.raises(ValueError, match="already wrapped"):
        wrap_model(wrapped)


@on(1, 2)
def test_a_model_comes_back_out_of_its_wrappers() -> None:
    model = nn.Linear(2, 2)
    assert unwrap_model(model) is model
    assert unwrap_model(nn.DataParallel(model)) is model
    assert unwrap_model(wrap_model(model)) is model


@on(1, 2)
def test_a_compiled_wrapped_model_comes_back_uncompiled() -> None:
    model = nn.Linear(2, 2)
    assert unwrap_model(torch.compile(wrap_model(model), backend="eager")) is model


# --- metrics ----------------------------------------------------------------------------------------------------------


@on(1, 2, 3)
def test_a_metrics_predictions_are_as_many_as_the_samples() -> None:
    for n, batch_size in ((82, 16), (99, 16), (512, 16), (1, 16)):
        loader = make_loader(range(n), batch_size, train=False)
        mine = [int(x) for batch in loader for x in batch]
        assert gather_exact(torch.tensor(mine, dtype=torch.int64), mine, n=n).tolist() == list(range(n))


@on(1, 2, 3)
def test_accuracy_on_n_ranks_is_that_of_one_process() -> None:
    torch.manual_seed(1)
    scores, labels = torch.randn(83, 4), torch.randint(4, (83,))
    data = TensorDataset(torch.arange(83), scores, labels)
    places, right = [], []
    for rows, logits, truth in make_loader(data, 16, train=False):
        places += rows.tolist()
        right.append(logits.argmax(1) == truth)
    gathered = gather_exact(torch.cat(right), places, n=83)
    assert gathered.float().mean() == (scores.argmax(1) == labels).float().mean()


@on(1, 2, 3)
def test_a_dict_of_results_is_gathered_as_a_dict() -> None:
    n = 7
    mine = list(DistributedEvalSampler(range(n)))
    values = {"logits": torch.tensor(mine).float(), "text": [f"sample {i}" for i in mine]}
    gathered = gather_exact(values, mine, n=n)
    assert gathered["logits"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert gathered["text"] == [f"sample {i}" for i in range(n)]


@on(1, 2, 3)
def test_results_that_are_no_tensors_are_gathered_in_order() -> None:
    n = 30
    mine = list(DistributedEvalSampler(range(n)))
    assert gather_exact([{"id": i} for i in mine], mine, n=n) == [{"id": i} for i in range(n)]


@on(2, 3)
def test_a_sample_that_padding_repeats_is_an_error_not_a_guess() -> None:
    mine = list(DistributedSampler(range(2 * get_world_size() + 1), shuffle=False))
    with pytest.raises(ValueError, match="repeated"):
        gather_exact(mine, mine, n=2 * get_world_size() + 1)


@on(1, 2, 3)
def test_a_streams_batches_are_gathered_whole() -> None:
    mine = torch.tensor([int(x) for batch in make_loader(Words(30), batch_size=4) for x in batch])
    assert sorted(torch.cat(all_gather(mine)).tolist()) == list(range(30))


# --- checkpoints ------------------------------------------------------------------------------------------------------


def parts() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    model = wrap_model(nn.Linear(3, 1).double())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)


def train(steps: int, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> list[float]:
    """Take steps on random data; return the numbers that were drawn."""
    drawn = []
    for _ in range(steps):
        x = torch.randn(4, 3).double()
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        scheduler.step()
        drawn.append(float(x[0, 0]))
    return drawn


@on(1, 2)
def test_a_limit_of_one_leaves_one_checkpoint(folder: Path) -> None:
    checkpoints = Checkpointer(folder / "run", keep=1)
    for step in (1, 2):
        checkpoints.save(step, model=nn.Linear(2, 1))
    assert [path.name for path in (folder / "run").glob("*.pt")] == ["step-000000002.pt"]


@on(1, 2)
def test_of_eleven_checkpoints_the_last_two_stay(folder: Path) -> None:
    checkpoints = Checkpointer(folder / "run", keep=2)
    for step in range(11):
        checkpoints.save(step, step_in_words=str(step))
    names = sorted(path.name for path in (folder / "run").glob("*.pt"))
    assert names == ["step-000000009.pt", "step-000000010.pt"]


@on(1, 2)
def test_a_resumed_run_repeats_what_it_would_have_done(folder: Path) -> None:
    ddpkit.seed_everything(42, per_rank=True)
    objects = parts()
    train(3, *objects)
    names = dict(zip(("model", "optimizer", "scheduler"), objects, strict=True))
    path = Checkpointer(folder).save(3, **names)
    drawn = train(2, *objects)
    after = [parameter.clone() for parameter in objects[0].parameters()]
    rate = objects[2].get_last_lr()
    others = parts()
    names = dict(zip(("model", "optimizer", "scheduler"), others, strict=True))
    assert Checkpointer(folder).load(path, **names) == {"step": 3}
    assert train(2, *others) == drawn
    assert all(torch.equal(one, other) for one, other in zip(others[0].parameters(), after, strict=True))
    assert others[2].get_last_lr() == rate


@on(1, 2)
def test_the_latest_checkpoint_is_the_one_that_is_loaded(folder: Path) -> None:
    model, checkpoints = nn.Linear(1, 1, bias=False), Checkpointer(folder)
    for step in (1, 2):
        nn.init.constant_(model.weight, float(step))
        checkpoints.save(step, model=model)
    nn.init.constant_(model.weight, 3.0)
    assert checkpoints.load_latest(model=model) == {"step": 2}
    assert model.weight.item() == 2.0


@on(1, 2)
def test_a_relative_folder_is_that_of_the_moment(folder: Path) -> None:
    with inside(folder):
        Checkpointer("runs/first").save(1, note="here")
        assert Checkpointer("runs/first").load_latest() == {"step": 1, "note": "here"}
    assert (folder / "runs/first/step-000000001.pt").is_file()


@contextmanager
def inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


@on(1, 2)
def test_what_cannot_be_restored_in_place_is_named(folder: Path) -> None:
    checkpoints = Checkpointer(folder)
    checkpoints.save(1, tensor=torch.tensor([1, 2, 3]), model=nn.Linear(1, 1))
    with pytest.raises(TypeError, match="tensor=.*has no load_state_dict"):
        checkpoints.load_latest(tensor=torch.zeros(3), model=nn.Linear(1, 1))
    assert checkpoints.load_latest(model=nn.Linear(1, 1))["tensor"].tolist() == [1, 2, 3]


@on(1, 2)
def test_tied_weights_are_saved_and_stay_tied(folder: Path) -> None:
    def tied() -> nn.Sequential:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        model[1].weight = model[0].weight
        return model

    one, other = tied(), tied()
    Checkpointer(folder).save(1, model=wrap_model(one))
    Checkpointer(folder).load_latest(model=other)
    assert other[1].weight is other[0].weight
    assert torch.equal(other[0].weight, one[0].weight)


@on(1, 2)
def test_a_loaders_place_is_part_of_a_checkpoint(folder: Path) -> None:
    def loader() -> Any:
        return make_loader(range(24), batch_size=3)

    one, other = loader(), loader()
    whole = [batch.tolist() for batch in loader()]
    for step, _ in enumerate(one, start=1):
        if step == 2:
            Checkpointer(folder).save(step, loader=one)
            break
    Checkpointer(folder).load_latest(loader=other)
    assert [batch.tolist() for batch in other] == whole[2:]


# --- logs -------------------------------------------------------------------------------------------------------------


@on(1, 2, 3)
def test_a_record_says_where_it_was_logged_and_only_the_main_process_informs() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(filename)s:%(lineno)d:%(funcName)s %(message)s"))
    log = ddpkit.get_logger("peers.accelerate")
    log.setLevel(logging.INFO)
    log.propagate = False
    log.addHandler(handler)
    try:
        here = inspect.currentframe().f_lineno  # type: ignore[union-attr]
        log.info("information")
        log.warning("warning")
    finally:
        log.removeHandler(handler)
    name = f"{Path(__file__).name}:%d:{inspect.currentframe().f_code.co_name}"  # type: ignore[union-attr]
    lines = [f"{name % (here + 1)} information", f"{name % (here + 2)} warning"]
    assert stream.getvalue().splitlines() == (lines if get_rank() == 0 else lines[1:])
