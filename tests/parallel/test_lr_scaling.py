"""Scaling rules: against arithmetic by hand, and against the big batch on one process."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from conftest import on_ranks
from torch import nn

import ddpkit
from ddpkit import get_rank
from ddpkit.parallel.lr_scaling import ScalePlan, rule_for, scale_lr, warmup_factor
from ddpkit.parallel.wrap import wrap_model


def test_the_rules_multiply_by_the_factor_its_root_and_nothing():
    assert scale_lr(0.1, 8) == scale_lr(0.1, 8, "linear") == 0.8
    assert scale_lr(0.1, 8, "sqrt") == pytest.approx(0.1 * math.sqrt(8), rel=1e-15)
    assert scale_lr(0.1, 8, "none") == 0.1
    assert scale_lr(0.1, 0.25, "sqrt") == 0.05  # a smaller batch
    with pytest.raises(ValueError, match="linear, sqrt, none, got 'cubic'"):
        scale_lr(0.1, 8, "cubic")
    with pytest.raises(ValueError, match="factor must be positive"):
        scale_lr(0.1, 0)
    with pytest.raises(ValueError, match="positive and finite .* got inf"):
        scale_lr(0.1, math.inf)


def test_warm_up_is_a_line_from_start_to_one():
    assert [warmup_factor(step, 4, start=0.2) for step in range(6)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])
    assert warmup_factor(0, 0) == 1.0
    with pytest.raises(ValueError, match="step=-1"):
        warmup_factor(-1, 4)


def test_a_plan_keeps_the_batch_of_each_rank_or_the_global_one():
    plan = ScalePlan(32, 0.1, 4, rule="linear", accumulation=2)
    assert (plan.per_rank_batch_size, plan.global_batch_size, plan.factor, plan.lr) == (32, 256, 8.0, 0.8)
    plan = ScalePlan(32, 0.1, 4, keep="global", rule="linear", accumulation=2)
    assert (plan.per_rank_batch_size, plan.global_batch_size, plan.factor, plan.lr) == (4, 32, 1.0, 0.1)


def test_the_total_number_of_samples_is_constant():
    for world_size in (1, 2, 4, 8):
        for accumulation in (1, 2):
            for keep in ("per_rank", "global"):
                plan = ScalePlan(64, 0.1, world_size, keep=keep, accumulation=accumulation)
                assert plan.steps(6400 * 16, 1) * plan.global_batch_size == 6400 * 16


def test_an_incomplete_last_step_counts_as_the_loop_counts_it():
    for n in range(1, 60):
        for world_size in (1, 2, 3):
            for accumulation in (1, 2):
                plan = ScalePlan(4, 0.1, world_size, accumulation=accumulation)
                share = math.ceil(n / world_size)  # what a padding sampler gives to each rank
                batches = math.ceil(share / plan.per_rank_batch_size)
                assert plan.steps(n, 1) == math.ceil(batches / accumulation)


def test_a_plan_takes_integers_of_any_kind_but_no_bool():
    plan = ScalePlan(np.int64(64), 0.1, np.uint8(4), rule="linear", accumulation=np.int32(100))
    assert plan == ScalePlan(64, 0.1, 4, rule="linear", accumulation=100)
    assert type(plan.global_batch_size) is int and plan.global_batch_size == 25600
    for wrong in (True, np.True_, 2.0, np.float64(2), 0, "2", None):
        with pytest.raises(ValueError, match="world_size must be a positive integer"):
            ScalePlan(64, 0.1, wrong)


def test_a_global_batch_that_does_not_divide_raises_and_says_what_would():
    with pytest.raises(ValueError, match=r"30 does not divide into 8 ranks x 1 .* choose a multiple of 8\."):
        ScalePlan(30, 0.1, 8, keep="global")
    with pytest.raises(ValueError, match=r"choose a multiple of 8\."):
        ScalePlan(3, 0.1, 4, keep="global", accumulation=2)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((0, 0.1, 2), {}, "base_batch_size must be a positive integer, got 0"),
        ((8, 0.1, 2.0), {}, "world_size must be a positive integer"),
        ((8, 0.1, 2), {"accumulation": 0}, "accumulation must be a positive integer"),
        ((8, math.nan, 2), {}, "base_lr must be positive and finite"),
        ((8, 0.1, 2), {"keep": "both"}, "'per_rank' or 'global', got 'both'"),
        ((8, 0.1, 2), {"rule": "cubic"}, "linear, sqrt, none, auto, got 'cubic'"),
    ],
)
def test_a_bad_plan_says_what_is_wrong(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        ScalePlan(*arguments, **options)


def test_sgd_is_linear_and_adam_and_its_kin_are_sqrt():
    class MySGD(torch.optim.SGD):
        pass

    class Lamb:  # known by name: it is not in torch
        pass

    net = nn.Linear(1, 1)
    assert rule_for(torch.optim.SGD) == rule_for(MySGD(net.parameters(), lr=0.1)) == "linear"
    for name in ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "RMSprop", "SparseAdam"):
        assert rule_for(getattr(torch.optim, name)) == "sqrt"
    assert rule_for(Lamb()) == "sqrt"
    with pytest.raises(ValueError, match="known for LBFGS; pass rule="):
        rule_for(torch.optim.LBFGS)


def test_auto_is_linear_for_sgd_and_sqrt_for_adam():
    plan, net = ScalePlan(8, 0.1, 4), nn.Linear(1, 1)
    for optimizer, lr in (
        (torch.optim.SGD(net.parameters(), 0.1), 0.4),
        (torch.optim.Adam(net.parameters(), 0.1), 0.2),
    ):
        plan.apply(optimizer)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(lr)
    assert "0.4 (linear) or 0.2 (sqrt)" in str(plan)
    with pytest.raises(ValueError, match=r"pass rule=rule_for\(optimizer\)"):
        _ = plan.lr
    assert str(ScalePlan(8, 0.1, 4, keep="global")).endswith("0.1, unchanged")
    assert ScalePlan(8, 0.1, 4, rule=rule_for(torch.optim.Adam)).lr == pytest.approx(0.2)
    assert ScalePlan(8, 0.1, 4, keep="global").lr == ScalePlan(8, 0.1, 1).lr == 0.1  # no rule has a say


def test_apply_scales_every_group_once_and_a_checkpoint_remembers():
    net, plan = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), ScalePlan(8, 0.1, 4, rule="linear")
    groups = [{"params": net[0].parameters()}, {"params": net[1].parameters(), "lr": 0.01}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    plan.apply(optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.4, 0.04])
    with pytest.raises(ValueError, match="already scaled by 4"):
        plan.apply(optimizer)
    resumed = torch.optim.SGD([{"params": net[0].parameters()}, {"params": net[1].parameters()}], lr=0.1)
    resumed.load_state_dict(optimizer.state_dict())
    with pytest.raises(ValueError, match="already scaled"):
        plan.apply(resumed)
    assert [group["lr"] for group in resumed.param_groups] == pytest.approx([0.4, 0.04])


def test_apply_after_a_scheduler_raises_and_changes_nothing():
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    with pytest.raises(ValueError, match="before creating the scheduler"):
        ScalePlan(8, 0.1, 4).apply(optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_with_a_constant_gradient_one_linearly_scaled_step_is_n_small_ones():
    x = torch.randn(
        4 * 8, 3, dtype=torch.float64
    )  # 4 batches of 8; the loss is linear, so gradients do not depend on w
    plan = ScalePlan(8, 0.1, 4, rule="linear")
    small, big = (torch.zeros(3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    optimizer = torch.optim.SGD([small], lr=0.1)
    for batch in x.split(8):
        optimizer.zero_grad()
        (batch @ small).mean().backward()
        optimizer.step()
    optimizer = torch.optim.SGD([big], lr=plan.base_lr)
    plan.apply(optimizer)
    (x @ big).mean().backward()
    optimizer.step()
    assert torch.allclose(small, big, rtol=0, atol=1e-6)


def _batches() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 6, 3, generator=generator, dtype=torch.float64)  # 4 steps, global batches of 6
    return x, x.square().sum(-1, keepdim=True)


def _train(world_size: int, keep: str, optimizer_class: type, rank: int | None = None) -> list[float]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    model = net if rank is None else wrap_model(net)
    plan = ScalePlan(6 if keep == "global" else 6 // world_size, 0.05, world_size, keep=keep)
    optimizer = optimizer_class(net.parameters(), lr=plan.base_lr)
    plan.apply(optimizer)
    size = plan.per_rank_batch_size
    for x, y in zip(*_batches(), strict=True):
        mine = slice(None) if rank is None else slice(rank * size, (rank + 1) * size)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x[mine]), y[mine]).backward()
        optimizer.step()
    return nn.utils.parameters_to_vector(net.parameters()).tolist()


def _train_all(world_size: int) -> list[list[float]]:
    cases = [(keep, kind) for keep in ("per_rank", "global") for kind in (torch.optim.SGD, torch.optim.Adam)]
    return [_train(world_size, *case, get_rank()) for case in cases]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_under_a_plan_equal_one_process_with_the_big_batch(world_size):
    cases = [(keep, kind) for keep in ("per_rank", "global") for kind in (torch.optim.SGD, torch.optim.Adam)]
    expected = [_train(world_size, *case) for case in cases]
    for result in on_ranks(_train_all, world_size, world_size):
        for (keep, kind), got, want in zip(cases, result, expected, strict=True):
            assert got == pytest.approx(want, abs=1e-6), (keep, kind)


def test_steps_are_those_of_the_loop_over_several_epochs():
    for n, epochs, size, ranks, accumulation in itertools.product(range(1, 40), (1, 3), (4, 6), (1, 2), (1, 2)):
        plan = ScalePlan(size, 0.1, ranks, accumulation=accumulation)
        batches = {"batch_size": plan.per_rank_batch_size, "accumulation": accumulation}
        loader = ddpkit.make_loader(range(n), **batches, num_replicas=ranks, rank=0)
        assert plan.steps(n, epochs) == epochs * loader.steps_per_epoch
    assert ScalePlan(24, 0.1, 1).steps(48, 0.5) == 1 and ScalePlan(24, 0.1, 1).steps(49, 0.5) == 2
    assert ScalePlan(10, 0.1, 1).steps(1000, 0.07) == 7
    with pytest.raises(ValueError, match="must be at least 0"):
        ScalePlan(10, 0.1, 1).steps(1000, -1)
    with pytest.raises(TypeError, match=r"needs the number of epochs.*3 \* loader\.steps_per_epoch"):
        ScalePlan(8, 0.1, 1).steps(101 * 3)
