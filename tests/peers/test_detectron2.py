"""The cases of detectron2's own suite, with our names.

They come from `tests/data/test_sampler`, `tests/test_checkpoint`, `tests/test_engine`, `tests/test_scheduler`, and from
the contracts of `detectron2/utils/comm` and `detectron2/engine/launch`, which its evaluators are tested through.

Differs on purpose; a test below pins what we do:

| theirs | here | why |
|---|---|---|
| `reduce_dict` is right on rank 0 only | on every rank | no partial sums lie about |
| `gather(dst=0)` gives the others an empty list | every rank gets all | no `if` on the rank is needed |
| `shared_random_seed()` draws a seed | `broadcast` of a draw, or `seed=0` | a run is repeatable by default |
| `InferenceSampler` gives contiguous pieces | every n-th sample | a run may end on any number of ranks |
| an empty dataset gives empty shares | refused | it is a mistake in the script |
| `TrainingSampler` is infinite | a loader's `iter()` is the next epoch | an epoch has an end |
| the trainer resumes at `iteration + 1` | `step` is what was done | counts, not indices |

No counterpart:

| case | why |
|---|---|
| `GroupedBatchSampler`, `RepeatFactorTrainingSampler` | repeat factors become weights; grouping is a batch sampler |
| matching heuristics, caffe2 names, path handlers, `_longest_common_prefix_str` | other formats |
| `create_local_process_group`, `get_local_size` of machines | one group; `get_local_world_size()` |
| trainers, hooks, writers, `EvalHook`, `BestCheckpointer` | ddpkit has no trainer |
| multi-step, cosine and step schedules | torch's |
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from cases import flat, on
from torch import nn
from torch.nn.parallel import DataParallel

import ddpkit
from ddpkit import (
    Checkpointer,
    DistributedEvalSampler,
    DistributedSampler,
    DistributedWeightedSampler,
    all_gather_object,
    all_reduce,
    all_reduce_mean,
    broadcast,
    gather_exact,
    get_rank,
    get_world_size,
    make_loader,
    warmup_factor,
    wrap_model,
)

pytestmark = pytest.mark.storm  # what is tested elsewhere once more

# --- communication ----------------------------------------------------------------------------------------------------


@on(1, 2, 3)
def test_objects_are_gathered_from_all_ranks_also_from_one() -> None:
    assert all_gather_object({"rank": get_rank()}) == [{"rank": rank} for rank in range(get_world_size())]


@on(1, 2, 3)
def test_predictions_of_an_evaluator_are_chained_on_every_rank() -> None:
    mine = [{"image": i, "boxes": [[i, i, i, i]]} for i in DistributedEvalSampler(range(7))]
    predictions = flat(all_gather_object(mine))
    assert sorted(one["image"] for one in predictions) == list(range(7))
    in_order = gather_exact(mine, [one["image"] for one in mine], n=7)
    assert [one["image"] for one in in_order] == list(range(7))


@on(1, 2, 3)
def test_a_shared_seed_is_one_seed() -> None:
    seeds = all_gather_object(broadcast(int(np.random.default_rng().integers(2**31))))
    assert len(set(seeds)) == 1


@on(1, 2, 3)
def test_a_loss_dict_is_averaged_or_summed_on_every_rank_whatever_the_order_of_its_keys() -> None:
    n = get_world_size()
    names = ["loss_cls", "loss_box", "loss_mask"]
    losses = {name: torch.tensor(float(i + get_rank())) for i, name in enumerate(names)}
    if get_rank() == 1:
        losses = dict(reversed(losses.items()))
    for i, name in enumerate(names):
        assert all_reduce_mean(losses)[name] == i + (n - 1) / 2
        assert all_reduce(losses)[name] == i * n + n * (n - 1) / 2
    assert list(all_reduce(losses)) == list(losses)


@on(1, 2, 3)
def test_a_trainers_metrics_are_the_mean_loss_and_the_longest_wait_for_data() -> None:
    n = get_world_size()
    metrics = {"total_loss": 1.0 + get_rank(), "accuracy": 0.5}
    assert all_reduce_mean(metrics) == {"total_loss": (n + 1) / 2, "accuracy": 0.5}
    assert all_reduce({"data_time": 0.1 * (get_rank() + 1)}, "max")["data_time"] == pytest.approx(0.1 * n)


@on(1, 2, 3)
def test_synchronising_does_nothing_on_one_process_and_waits_on_several(folder: Path) -> None:
    (folder / f"{get_rank()}").touch()
    ddpkit.barrier()
    assert len(list(folder.iterdir())) == get_world_size()


# --- samplers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "world_size"), [(16, 2), (2, 3), (42, 4)])
def test_for_inference_every_sample_is_read_once_and_the_shares_differ_by_one(size: int, world_size: int) -> None:
    shares = [list(DistributedEvalSampler(range(size), world_size, rank)) for rank in range(world_size)]
    assert sorted(flat(shares)) == list(range(size))
    lengths = [len(share) for share in shares]
    assert max(lengths) - min(lengths) <= 1
    assert shares[0] == list(range(0, size, world_size))


def test_an_empty_dataset_is_refused() -> None:
    for sampler in (DistributedEvalSampler, DistributedSampler):
        with pytest.raises(ValueError, match="empty"):
            sampler([], 5, 0)


def test_for_training_the_global_seed_does_not_matter() -> None:
    def samples() -> list[int]:
        loader = make_loader(range(30), batch_size=5)
        return [int(x) for _ in range(3) for batch in loader for x in batch]

    ddpkit.seed_everything(42)
    first = samples()
    ddpkit.seed_everything(999)
    assert samples() == first
    assert sorted(first[:30]) == list(range(30))


@on(1, 2)
def test_a_loader_leaves_the_global_generators_alone() -> None:
    ddpkit.seed_everything(7)
    expected = torch.rand(3).tolist()
    ddpkit.seed_everything(7)
    list(make_loader(range(10), batch_size=2))
    assert torch.rand(3).tolist() == expected


@on(1, 2)
def test_workers_neither_repeat_nor_change_samples() -> None:
    alone = [batch.tolist() for batch in make_loader(range(25), batch_size=4, seed=10)]
    for workers in (1, 2):
        loader = make_loader(range(25), batch_size=4, seed=10, num_workers=workers)
        assert [batch.tolist() for batch in loader] == alone


def test_repeat_factors_are_weights() -> None:
    sampler = DistributedWeightedSampler([2.0, 1.0, 1.0], num_samples=40_000, num_replicas=1, rank=0)
    counts = np.bincount(list(sampler), minlength=3)
    assert np.allclose(counts / 40_000, [0.5, 0.25, 0.25], atol=0.02)


# --- checkpoints ------------------------------------------------------------------------------------------------------


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block1 = nn.Module()
        self.block1.layer1 = nn.Linear(2, 3)
        self.layer2 = nn.Linear(3, 2)
        self.res = nn.Module()
        self.res.layer2 = nn.Linear(3, 2)


@on(1, 2)
def test_a_nested_models_weights_are_copied_into_plain_and_data_parallel_models(folder: Path) -> None:
    saved = Detector()
    Checkpointer(folder).save(1, model=saved)
    for wrap in (lambda model: model, DataParallel):
        target = wrap(Detector())
        Checkpointer(folder).load_latest(model=target)
        for one, other in zip(target.parameters(), saved.parameters(), strict=True):
            assert one is not other and torch.equal(one, other)


@on(1, 2)
def test_a_model_of_other_names_is_refused_and_stays_as_it_was(folder: Path) -> None:
    Checkpointer(folder).save(1, model=Detector().block1)
    model = Detector()
    nn.init.ones_(model.block1.layer1.weight)
    with pytest.raises(ddpkit.CheckpointError, match=r"layer1\.weight there, not here"):
        Checkpointer(folder).load_latest(model=model)
    assert bool((model.block1.layer1.weight == 1).all())


@on(1, 2)
def test_a_resumed_trainer_knows_how_many_steps_were_done(folder: Path) -> None:
    model = wrap_model(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    checkpoints = Checkpointer(folder)
    assert checkpoints.load_latest(model=model, optimizer=optimizer) is None
    for step in range(1, 4):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        checkpoints.save(step, model=model, optimizer=optimizer)
    again = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    saved = checkpoints.load_latest(model=model, optimizer=again)
    assert saved == {"step": 3}
    momentum = [state["momentum_buffer"] for state in again.state.values()]
    expected = [state["momentum_buffer"] for state in optimizer.state.values()]
    assert all(torch.equal(one, other) for one, other in zip(momentum, expected, strict=True))


# --- warm-up and launching --------------------------------------------------------------------------------------------


def test_a_warm_up_is_a_straight_line_to_the_base_rate() -> None:
    rates = [5 * warmup_factor(step, 5, start=0.001) for step in range(8)]
    assert rates == pytest.approx([0.005, 1.004, 2.003, 3.002, 4.001, 5.0, 5.0, 5.0])


def main(a: int, b: str) -> tuple[int, str]:
    with ddpkit.distributed() as context:
        return context.rank + a, b * context.world_size


def test_main_is_launched_with_its_arguments() -> None:
    assert ddpkit.spawn(main, 2, 5, "x") == [(5, "xx"), (6, "xx")]
