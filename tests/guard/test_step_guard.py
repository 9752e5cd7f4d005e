"""Steps that all ranks take or skip: against one process that leaves the bad steps out."""

from __future__ import annotations

import logging
import math
import os
import signal
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from processes import Ended, free_port, platform_env, run
from torch import nn

import ddpkit
from ddpkit import BadStepError, DdpkitError, MismatchError, StepGuard

F = nn.functional
STEPS, SAMPLES = 8, 4  # optimiser steps, and samples of a rank in one


class FailsInBackward(torch.autograd.Function):
    """The identity, in whose backward something breaks."""

    @staticmethod
    def forward(_: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise ValueError("broken in backward")


def broken_sample(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    raise OSError("broken image")


def broken_forward(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    net(x)
    net(x[:, :1])  # RuntimeError: the shapes do not fit


def broken_backward(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    FailsInBackward.apply(net(x)).sum().backward()


def not_a_number(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    F.mse_loss(net(x * math.nan), y).backward()


def infinite(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    (F.mse_loss(net(x), y) * math.inf).backward()


def out_of_memory(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    F.mse_loss(net(x), y).backward()
    torch.empty(1 << 52)


FAULTS = [broken_sample, broken_forward, broken_backward, not_a_number, infinite, out_of_memory]


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def batch_of(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As many samples on each rank, so that the mean of the ranks' means is that of all."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(SAMPLES, 3, generator=generator, dtype=torch.float64)
    return x, x.square().sum(1, keepdim=True)


def weights(net: nn.Module) -> list[float]:
    return nn.utils.parameters_to_vector(net.parameters()).tolist()


def train_alone(world_size: int, skipped: set[int]) -> list[float]:
    """Train on all ranks' samples, without some of the steps."""
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters(), 0.05)
    for step in range(STEPS):
        if step in skipped:
            continue
        batches = [batch_of(step, rank) for rank in range(world_size)]
        x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
        optimizer.zero_grad()
        F.mse_loss(net(x), y).backward()
        optimizer.step()
    return weights(net)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("wrapped", [True, False])
def test_a_step_that_is_bad_on_one_rank_is_taken_by_none(fault: Callable, wrapped: bool, rank: int) -> None:
    last = ddpkit.get_world_size() - 1
    net = ddpkit.wrap_model(make_net()) if wrapped else make_net()
    optimizer = torch.optim.AdamW(net.parameters(), 0.05)
    guard = StepGuard(net)
    bad = {2: last, 5: 0}  # steps, and the rank on which each is
    for step in range(STEPS):
        x, y = batch_of(step, rank)
        optimizer.zero_grad()
        with guard:
            if bad.get(step) == rank:
                fault(net, x, y)
            else:
                F.mse_loss(net(x), y).backward()
        assert guard.skipped == (step in bad)
        if guard.skipped:
            assert all(p.grad is None for p in net.parameters())
            continue
        optimizer.step()
    assert guard.skips == 2
    assert weights(net) == pytest.approx(train_alone(last + 1, set(bad)), abs=1e-12)
    ddpkit.check_replicas(net, optimizer)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("wrapped", [True, False])
def test_buffers_are_what_they_were_before_a_step_that_is_skipped(wrapped: bool, rank: int) -> None:
    net: nn.Module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    if wrapped:
        net = ddpkit.wrap_model(net)
    guard = StepGuard(net)
    for step in range(4):
        before = {name: buffer.clone() for name, buffer in net.named_buffers()}
        is_bad = step == 2
        with guard:
            net(torch.full((4, 3), math.nan if is_bad and rank == 0 else 1.0)).sum().backward()
        assert guard.skipped == is_bad
        for name, buffer in net.named_buffers():
            assert torch.equal(buffer, before[name]) or not is_bad, name
            assert buffer.isfinite().all()


@pytest.mark.ranks(2, 3)
def test_a_wrapped_models_buffers_are_rank_0s_in_each_forward(rank: int) -> None:
    norm = nn.BatchNorm1d(1)
    net = ddpkit.wrap_model(norm)
    guard = StepGuard(net)
    for _ in range(2):
        with guard:
            net(torch.full((2, 1), float(rank))).sum().backward()
    assert norm.running_mean.item() == pytest.approx(0.1 * rank)  # rank 0's is 0, and then this rank's own batch


@pytest.mark.ranks(1, 2, 3)
def test_as_many_steps_in_a_row_as_are_allowed_are_skipped_and_one_more_is_an_error_on_all(
    rank: int, world_size: int, caplog: pytest.LogCaptureFixture
) -> None:
    last = world_size - 1
    net = make_net()
    guard = StepGuard(net, max_skips=2)
    pattern = [True, True, False, True, True]  # the good one in between makes them count anew
    with caplog.at_level(logging.WARNING, logger="ddpkit"):
        for is_bad in pattern:
            with guard:
                net(torch.ones(1, 3).double()).sum().backward()
                if is_bad and rank == last:
                    raise ValueError(f"bad on rank {rank}")
    assert guard.skips == 4
    said = [record.getMessage() for record in caplog.records if "All ranks" in record.getMessage()]
    assert len(said) == (4 if rank == 0 else 0)
    if rank == 0:
        assert said[1].startswith("All ranks skip this step (2 in a row, 2 in total):")
        assert f"rank {last}: ValueError: bad on rank {last}" in said[1]
        assert "samples" not in said[1]  # of earlier loaders
    if rank == last:
        assert [record.exc_info is not None for record in caplog.records].count(True) == 4
    with pytest.raises(BadStepError, match="3 steps in a row were bad, but max_skips is 2") as caught:
        with guard:
            if rank == last:
                raise ValueError(f"bad on rank {rank}")
    assert f"rank {last}: ValueError: bad on rank {last}" in str(caught.value)
    assert caught.value.ranks == [last]
    assert isinstance(caught.value.__context__, ValueError) == (rank == last)


class Images:
    """A dataset in which one file is broken."""

    broken = 17

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.broken:
            raise OSError(f"cannot read image {index}")
        return torch.full((3,), float(index))


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_broken_sample_costs_its_step_and_is_named(workers: int, rank: int, caplog: pytest.LogCaptureFixture) -> None:
    net = ddpkit.wrap_model(nn.Linear(3, 1))
    guard = StepGuard(net)
    loader = ddpkit.make_loader(Images(), batch_size=2, num_workers=workers)
    batches = iter(loader)
    seen = []
    with caplog.at_level(logging.WARNING, logger="ddpkit"):
        for _ in range(len(loader)):
            with guard:
                x = next(batches)
                (net(x).mean() * loader.weight).backward()
            if not guard.skipped:
                seen += x[:, 0].int().tolist()
    with pytest.raises(StopIteration):
        next(batches)
    assert guard.skips == 1
    assert loader.epoch == 1
    everyone = [sample for each in ddpkit.all_gather_object(seen) for sample in each]
    assert Images.broken not in everyone
    lost = set(range(40)) - set(everyone)
    assert Images.broken in lost
    assert len(lost) <= 2 * ddpkit.get_world_size()
    if rank == 0:
        text = "\n".join(record.getMessage() for record in caplog.records)
        assert "OSError: cannot read image 17 (samples" in text
        assert "Traceback" not in text


@pytest.mark.ranks(1, 2)
def test_the_samples_of_all_micro_batches_are_named_and_no_others(
    rank: int, world_size: int, caplog: pytest.LogCaptureFixture
) -> None:
    net = nn.Linear(3, 1)
    guard = StepGuard(net)
    loader = ddpkit.make_loader(torch.arange(24.0).view(8, 3), batch_size=2, shuffle=False)
    other = ddpkit.make_loader(torch.ones(100, 3), batch_size=50, train=False)
    with caplog.at_level(logging.WARNING, logger="ddpkit"):
        list(other)
        batches = iter(loader)
        with guard:
            for _ in range(2):
                net(next(batches)).sum().backward()
            raise ValueError("bad")
        list(other)
        with guard:
            raise ValueError("worse")
    shown = [record.getMessage() for record in caplog.records if "All ranks" in record.getMessage()]
    if rank == 0:
        mine = [str(index) for index in range(0, 4 * world_size, world_size)]
        assert f"rank 0: ValueError: bad (samples {', '.join(mine)})" in shown[0]
        assert shown[1].endswith("ValueError: worse")


@pytest.mark.ranks(1, 2, 3)
def test_where_memory_runs_out_all_ranks_cut_the_batch_and_the_step_is_the_same(rank: int, world_size: int) -> None:
    net = ddpkit.wrap_model(make_net())
    optimizer = torch.optim.AdamW(net.parameters(), 0.05)
    guard = StepGuard(net, max_pieces=4)
    tried = []
    for step in range(STEPS):
        x, y = batch_of(step, rank)
        optimizer.zero_grad()
        for pieces in guard.attempts():
            tried.append((step, pieces))
            with guard:
                for part, target in zip(x.chunk(pieces), y.chunk(pieces), strict=True):
                    if step >= 3 and rank == world_size - 1:
                        torch.empty((len(part) // 2) << 52)  # too much for more than one sample
                    (F.mse_loss(net(part), target) * len(part) / len(x)).backward()
        assert not guard.skipped
        optimizer.step()
    assert guard.pieces == 4
    assert tried[3:7] == [(3, 1), (3, 2), (3, 4), (4, 4)]
    assert guard.skips == 0
    assert weights(net) == pytest.approx(train_alone(world_size, set()), abs=1e-12)


@pytest.mark.ranks(1, 2)
def test_where_the_smallest_pieces_do_not_fit_the_step_is_skipped(rank: int) -> None:
    net = make_net()
    guard = StepGuard(net, max_pieces=2)
    for _ in range(2):
        for _pieces in guard.attempts():
            with guard:
                torch.empty(1 << 52)
        assert guard.skipped
    assert (guard.pieces, guard.skips) == (2, 2)


@pytest.mark.ranks(1, 2)
def test_without_attempts_each_step_that_does_not_fit_counts(rank: int) -> None:
    guard = StepGuard(make_net(), max_pieces=2)
    for _ in range(3):
        with guard:
            torch.empty(1 << 52)
    assert (guard.pieces, guard.skips) == (1, 3)


@pytest.mark.ranks(1, 2)
def test_gradients_that_a_scaler_looks_for_are_left_to_it(rank: int, world_size: int) -> None:
    net = ddpkit.wrap_model(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    guard = StepGuard(net, check_gradients=False)
    before = weights(net)
    for step in range(2):
        optimizer.zero_grad()
        with guard:
            loss = net(torch.ones(1, 1)).sum()
            if rank == world_size - 1:
                if step == 0:
                    raise ValueError("a bad sample lowers no scale")
                loss = loss * math.inf
            scaler.scale(loss).backward()
        assert guard.skipped == (step == 0)
        if not guard.skipped:
            scaler.step(optimizer)
            scaler.update()
    assert scaler.get_scale() == 2.0
    assert weights(net) == before


@pytest.mark.ranks(2)
def test_ranks_that_train_by_themselves_skip_by_themselves(rank: int) -> None:
    mesh = torch.distributed.init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    ddpkit.set_data_parallel(mesh["tp"])
    net = make_net()
    guard = StepGuard(net)
    with guard:
        net(torch.ones(1, 3).double() * (math.nan if rank == 1 else 1.0)).sum().backward()
    assert guard.skipped == (rank == 1)
    ddpkit.set_data_parallel(None)


@pytest.mark.ranks(2, 3)
def test_a_model_may_have_trained_without_a_guard_before(rank: int, world_size: int) -> None:
    """After DDP's first backward its next forward exchanges how gradients are cut into buckets."""
    net = ddpkit.wrap_model(make_net())
    guard = StepGuard(net)
    F.mse_loss(net(batch_of(0, rank)[0]), batch_of(0, rank)[1]).backward()
    for is_bad in (True, False, True):
        with guard:
            if is_bad and rank == world_size - 1:
                raise OSError("broken image")
            net(batch_of(1, rank)[0]).sum().backward()
        assert guard.skipped == is_bad
    F.mse_loss(net(batch_of(0, rank)[0]), batch_of(0, rank)[1]).backward()
    ddpkit.check_replicas(net)


class Average(nn.Module):
    """Puts another tensor in the place of its buffer in each forward, and has one that is None at first."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.register_buffer("mean", torch.zeros(1))
        self.register_buffer("last", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        self.last = x[-1]
        return self.layer(x)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("wrapped", [True, False])
def test_buffers_that_a_model_replaces_are_put_back_too(wrapped: bool, rank: int) -> None:
    plain = Average()
    net = ddpkit.wrap_model(plain, broadcast_buffers=False) if wrapped else plain
    guard = StepGuard(net)
    with guard:
        net(torch.full((2, 1), math.nan if rank == 0 else 1.0)).sum().backward()
    assert guard.skipped
    assert (plain.mean.item(), plain.last) == (0.0, None)


@pytest.mark.ranks(1, 2)
def test_what_is_frozen_when_an_error_comes_is_trained_again(rank: int, world_size: int) -> None:
    maker, judge = make_net(), make_net()
    guard = StepGuard(maker, judge)
    for is_bad in (True, False):
        with guard:
            judge.requires_grad_(False)
            judge(maker(torch.ones(2, 3).double()).expand(2, 3)).sum().backward()
            if is_bad and rank == world_size - 1:
                raise ValueError("bad")
            judge.requires_grad_(True)
        assert guard.skipped == is_bad
    assert all(p.requires_grad for p in judge.parameters())


@pytest.mark.ranks(1, 2)
def test_a_block_in_another_is_refused(rank: int) -> None:
    outer, inner = StepGuard(make_net()), StepGuard(make_net())
    with pytest.raises(DdpkitError, match="inside a block of StepGuard"):
        with outer:
            with inner:
                pass
    assert ddpkit.all_reduce(1) == ddpkit.get_world_size()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "options",
    [{"max_skips": 3}, {"max_pieces": 2}, {"check_gradients": False}],
)
def test_ranks_that_would_decide_otherwise_hear_of_it_at_once(options: dict[str, Any], rank: int) -> None:
    net = make_net()
    guard = StepGuard(net, **(options if rank else {}))
    with pytest.raises(MismatchError, match=next(iter(options))):
        with guard:
            net(torch.ones(1, 3).double()).sum().backward()


@pytest.mark.ranks(2)
def test_a_rank_without_a_guard_hears_that_the_others_have_one(rank: int) -> None:
    net = make_net()
    net(torch.ones(1, 3).double()).sum().backward()
    with pytest.raises(MismatchError, match="StepGuard"):
        if rank == 0:
            ddpkit.average_gradients(net)
        else:
            with StepGuard(net):
                raise ValueError("bad")


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise TypeError("no words")


class Sized:
    """A dataset whose sampler asks for pairs."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, pair: tuple[int, int]) -> torch.Tensor:
        raise OSError(f"first line of {pair}\nsecond line")


class Pairs(torch.utils.data.Sampler):
    num_replicas, rank = 1, 0

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Any:
        return iter([(index, 224) for index in range(8)])


@pytest.mark.ranks(1)
@pytest.mark.parametrize("workers", [0, 1])
def test_errors_and_samples_of_any_kind_can_be_told(workers: int, caplog: pytest.LogCaptureFixture) -> None:
    guard = StepGuard(make_net())
    batches = iter(ddpkit.make_loader(Sized(), batch_size=2, sampler=Pairs(), num_workers=workers))
    with caplog.at_level(logging.WARNING, logger="ddpkit"):
        with guard:
            raise Unspeakable
        with guard:
            next(batches)
        with guard:
            raise ValueError
    said = [record.getMessage() for record in caplog.records if "All ranks" in record.getMessage()]
    assert "rank 0: Unspeakable: (no message: its __str__ raises TypeError)" in said[0]
    assert "rank 0: OSError: first line of (0, 224) (samples (0, 224), (1, 224))" in said[1]
    assert said[2].endswith("rank 0: ValueError")


@pytest.mark.ranks(1, 2)
def test_complex_gradients_are_looked_at_as_they_are(rank: int) -> None:
    weight = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    guard = StepGuard(weight)
    for factor in (1.0, math.inf):
        with guard:
            (weight.conj() * weight * factor).sum().abs().backward()
        assert guard.skipped == math.isinf(factor)


@pytest.mark.ranks(1, 2)
def test_what_the_frames_of_an_error_hold_is_freed(rank: int) -> None:
    kept = []

    def fail() -> None:
        large = torch.ones(10)
        kept.append(weakref.ref(large))
        raise MemoryError

    guard = StepGuard(make_net())
    with guard:
        try:
            fail()
        except MemoryError as error:
            raise ValueError("bad") from error
    assert kept[0]() is None


@pytest.mark.ranks(2)
def test_evaluation_after_guarded_steps_has_rank_0s_buffers_as_with_ddp_alone(rank: int) -> None:
    net = ddpkit.wrap_model(nn.BatchNorm1d(1))
    with StepGuard(net):
        net(torch.full((2, 1), float(rank))).sum().backward()
    net.eval()
    assert len(set(ddpkit.all_gather_object(net(torch.ones(1, 1)).item()))) == 1


class Deadly(Images):
    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.broken:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # torch's handler raises anywhere
def test_a_loader_that_has_lost_a_worker_is_no_bad_batch() -> None:
    loader = ddpkit.make_loader(Deadly(), batch_size=2, shuffle=False, num_workers=1)
    guard = StepGuard(nn.Linear(3, 1))
    batches = iter(loader)
    try:
        with pytest.raises(RuntimeError, match="The loader lost a worker|DataLoader worker"):
            for _ in range(len(loader)):
                with guard:
                    next(batches)
    except RuntimeError as error:  # the handler's, while pytest looked at the first error
        assert "DataLoader worker" in str(error)
    assert guard.skips == 0
    try:
        consumed = loader.state_dict()["consumed"]
    except RuntimeError:  # of torch's handler, once, where the guard has found the loss before it
        consumed = loader.state_dict()["consumed"]
    assert consumed <= 16


@pytest.mark.ranks(1, 2)
def test_nothing_is_exchanged_in_the_block(rank: int) -> None:
    net = make_net()
    guard = StepGuard(net)
    with pytest.raises(DdpkitError, match="inside a block of StepGuard"):
        with guard:
            ddpkit.all_reduce_mean(1.0)
    with pytest.raises(DdpkitError, match="Call them before or after the block"):
        with guard:
            ddpkit.barrier()
    assert ddpkit.all_reduce(1) == ddpkit.get_world_size()
    assert guard.skips == 0


@pytest.mark.ranks(1, 2)
def test_the_end_of_the_data_is_no_bad_step(rank: int) -> None:
    guard = StepGuard(make_net())
    with pytest.raises(StopIteration):
        with guard:
            next(iter([]))


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: StepGuard(nn.Sequential(nn.SyncBatchNorm(2))), TypeError, "SyncBatchNorm exchanges statistics"),
        (lambda: StepGuard([nn.Linear(1, 1)]), TypeError, "takes modules and tensors, got list: unpack a list with *"),
        (lambda: StepGuard(), ValueError, "needs modules with trainable parameters"),
        (lambda: StepGuard(nn.Linear(1, 1).requires_grad_(False)), ValueError, "trainable parameters"),
        (lambda: StepGuard(nn.Linear(1, 1), errors=[OSError]), TypeError, "errors must be an exception class"),
        (lambda: StepGuard(nn.Linear(1, 1), errors=BaseException), TypeError, "errors must be an exception class"),
        (lambda: StepGuard(nn.Linear(1, 1), max_skips=-1), ValueError, "max_skips"),
        (lambda: StepGuard(nn.Linear(1, 1), max_pieces=0), ValueError, "max_pieces"),
    ],
)
def test_what_cannot_be_guarded_is_refused(make: Callable, error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        make()
    assert text in str(caught.value)


@pytest.mark.ranks(2)
def test_a_static_graph_is_refused(rank: int) -> None:
    with pytest.raises(TypeError, match="static_graph=True exchanges gradients in its first backward"):
        StepGuard(ddpkit.wrap_model(nn.Linear(1, 1), static_graph=True))


def step_in_which(what: str) -> None:
    """Rank 1 fails in a step in a way that nobody can pass over; the others are to hear of it."""
    with ddpkit.distributed(timeout=timedelta(seconds=5)) as job:
        net = ddpkit.wrap_model(nn.Linear(1, 1))
        guard = StepGuard(net, errors=OSError)
        with guard:
            net(torch.ones(1, 1)).sum().backward()
        with guard:
            if job.rank == 1:
                if what == "is killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                if what == "hangs":
                    time.sleep(60)
                raise ValueError("this is a bug, no bad sample")
            net(torch.ones(1, 1)).sum().backward()


@pytest.mark.parametrize("nprocs", [2, 3])
@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("is killed", "rank 1 ({host}) was lost"),
        ("raises", "ValueError: this is a bug, no bad sample"),
        pytest.param("hangs", "rank 1", marks=pytest.mark.storm),
    ],
)
def test_a_rank_that_fails_otherwise_is_named_on_the_others(what: str, words: str, nprocs: int) -> None:
    port = free_port()
    ended: list[Ended] = run(step_in_which, [platform_env(rank, nprocs, port) for rank in range(nprocs)], what)
    for rank, end in enumerate(ended):
        assert end.code != 0
        if rank != 1:
            assert words.format(host=os.uname().nodename) in end.output, end.output
            assert end.seconds < 60
