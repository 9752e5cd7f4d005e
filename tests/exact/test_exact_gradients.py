"""Gradients of the same bits on any number of ranks: against sums of fractions, and against one rank."""

from __future__ import annotations

import hashlib
import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import on_ranks
from processes import Ended, free_port, platform_env, run
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import TensorDataset

import ddpkit
from ddpkit import DdpkitError, MismatchError, exact_gradients, make_micro_batch_loader
from ddpkit.exact.gradients import check_kernels

F = nn.functional
SAMPLES, GLOBAL_BATCH, MICRO_BATCH = 50, 16, 2  # four steps an epoch, the last of a single micro-batch


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """What `exact_gradients` expects unless it is told another number."""
    former = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(former)


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.GroupNorm(4, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 3))


def make_loader(**options: Any) -> Any:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 6, generator=generator)
    dataset = TensorDataset(x, x.argmax(1) % 3)
    return make_micro_batch_loader(dataset, GLOBAL_BATCH, MICRO_BATCH, seed=2, **options)


def loss_of(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(net(x), y, reduction="sum")


def bits_of(*tensors: Tensor) -> bytes:
    return b"".join(tensor.detach().contiguous().numpy().tobytes() for tensor in tensors)


# Gradients


def exact_sum(gradients: list[Tensor], unit: Fraction) -> Tensor:
    """The sum of gradients, each element rounded to a unit before and once after."""
    totals = []
    for column in zip(*(gradient.flatten().tolist() for gradient in gradients), strict=True):
        total = sum(round(Fraction(number) / unit) * unit for number in column)
        totals.append(float(total))
    return torch.tensor(totals, dtype=torch.float64).float().view(gradients[0].shape)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("wrapped", [False, True])
def test_gradients_are_the_exact_sums_of_all_ranks_micro_batches(wrapped: bool, rank: int) -> None:
    plain = make_net()
    net = ddpkit.wrap_model(make_net()) if wrapped else make_net()
    parameters = list(net.parameters())
    everyones = make_loader(num_replicas=1, rank=0)
    for batch, all_of_it in zip(make_loader(), everyones, strict=True):
        state = torch.get_rng_state()
        with exact_gradients(batch, net) as micro_batches:
            for x, y in micro_batches:
                (loss_of(net, x, y) / batch.global_batch_size).backward()
        assert torch.equal(torch.get_rng_state(), state)
        found = [p.grad for p in parameters]

        parts = []
        for (x, y), seed in zip(all_of_it, all_of_it.seeds, strict=True):
            torch.manual_seed(seed)
            loss = loss_of(plain, x, y) / all_of_it.global_batch_size
            parts.append(torch.autograd.grad(loss, list(plain.parameters())))
        largest = max(gradient.abs().max().item() for part in parts for gradient in part)
        assert 2.0**-29 <= largest < 2.0**11  # for which the unit is:
        for gradient, part in zip(found, zip(*parts, strict=True), strict=True):
            assert torch.equal(gradient, exact_sum(list(part), Fraction(1, 2**68)))


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_reaches_all_ranks(bad: float, rank: int) -> None:
    net = nn.Linear(6, 3)
    batch = next(iter(make_loader()))
    with exact_gradients(batch, net) as micro_batches:
        for i, (x, y) in enumerate(micro_batches):
            loss = loss_of(net, x, y)
            if rank == 0 and i == 0:
                loss = loss + bad * net.bias[1]
            loss.backward()
    assert net.bias.grad.isnan().tolist() == [False, True, False]
    assert net.weight.grad.isfinite().all()
    ddpkit.check_replicas(net)


class Chooses(nn.Module):
    """Of its parameters one has a gradient in some micro-batches, one in none, and one is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Parameter(torch.zeros(6))
        self.sometimes = nn.Parameter(torch.zeros(()))
        self.never = nn.Parameter(torch.zeros(2))
        self.frozen = nn.Parameter(torch.zeros(2), requires_grad=False)

    def forward(self, x: Tensor, number: int) -> Tensor:
        total = (x @ self.always).sum()
        return total + 2 * self.sometimes if number == 0 else total


@pytest.mark.ranks(1, 2, 3)
def test_a_parameter_without_gradient_on_all_ranks_has_none(rank: int) -> None:
    net = Chooses()
    net.never.grad = torch.ones(2)  # from before
    batch = next(iter(make_loader()))
    with exact_gradients(batch, net) as micro_batches:
        for i, (x, _) in enumerate(micro_batches):
            net(x, i if rank == 0 else 1).backward()
    assert net.sometimes.grad.item() == 2
    assert net.never.grad is None
    assert net.frozen.grad is None


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_gradients_keep_the_dtype_of_their_parameters(dtype: torch.dtype, rank: int) -> None:
    net = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3).to(dtype))
    batch = next(iter(make_loader()))
    with exact_gradients(batch, *net) as micro_batches:
        for x, y in micro_batches:
            F.cross_entropy(net[1](net[0](x).to(dtype)).double(), y).backward()
    assert [p.grad.dtype for p in net.parameters()] == [torch.float32] * 2 + [dtype] * 2
    bits = [p.grad.double() for p in net.parameters()]
    for other in ddpkit.all_gather_object(bits):
        assert all(map(torch.equal, bits, other))


@pytest.mark.skipif(not hasattr(Tensor, "grad_dtype"), reason="this torch has one dtype for both")
@pytest.mark.ranks(1, 2)
def test_gradients_in_another_dtype_than_the_parameter_keep_all_of_it(rank: int) -> None:
    class Third(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, weight: Tensor) -> Tensor:
            return weight / 3

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient.double() / 3

    weight = nn.Parameter(torch.ones(1))
    weight.grad_dtype = torch.float64
    batch = next(iter(make_micro_batch_loader(torch.zeros(4, 1), global_batch_size=2, micro_batch_size=1)))
    with exact_gradients(batch, weight) as micro_batches:
        for _ in micro_batches:
            Third.apply(weight).sum().backward()
    assert weight.grad.dtype == torch.float64
    assert weight.grad.item() == 2 / 3


@pytest.mark.ranks(1, 2)
def test_a_step_begins_anew_after_one_that_was_given_up_and_with_other_parameters(rank: int) -> None:
    net = nn.Linear(6, 1)
    batch = next(iter(make_loader()))

    def gradient() -> Tensor:
        with exact_gradients(batch, net) as micro_batches:
            for x, _ in micro_batches:
                net(x).sum().backward()
        return net.weight.grad

    expected = gradient()
    with pytest.raises(ValueError, match="given up"):
        with exact_gradients(batch, net) as micro_batches:
            net(1e20 * next(micro_batches)[0]).sum().backward()
            next(micro_batches)
            raise ValueError("given up")
    assert net.weight.grad is None
    assert torch.equal(gradient(), expected)
    net.bias.requires_grad_(False)
    assert torch.equal(gradient(), expected)


# Training


def digest(net: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    state = list(ddpkit.unwrap_model(net).state_dict().values())
    for moments in optimizer.state_dict()["state"].values():
        state += moments.values()
    return hashlib.sha256(bits_of(*state)).hexdigest()


def train_here(folder: str, until: int, wrapped: bool = False, dies_at: int | None = None) -> str:
    """Train from the last checkpoint on; return the digest of weights and moments at the end."""
    net = ddpkit.wrap_model(make_net()) if wrapped else make_net()
    torch.set_num_threads(1)
    optimizer = torch.optim.AdamW(net.parameters(), 0.01)
    loader = make_loader()
    checkpoints = ddpkit.Checkpointer(folder)
    state = {"net": net, "optimizer": optimizer, "loader": loader}
    saved = checkpoints.load_latest(**state)
    step = saved["step"] if saved else 0
    for _ in loader.epochs(100):
        for batch in loader:
            with exact_gradients(batch, net) as micro_batches:
                for x, y in micro_batches:
                    if step == dies_at and ddpkit.get_rank() == 1:
                        os.kill(os.getpid(), signal.SIGKILL)
                    (loss_of(net, x, y) / batch.global_batch_size).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
            step += 1
            if step % 5 == 0 or step == until:
                checkpoints.save(step, **state)
            if step == until:
                return digest(net, optimizer)
    raise AssertionError("the epochs are too few")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> str:
    (found,) = on_ranks(train_here, 1, str(tmp_path_factory.mktemp("alone")), 30)
    return found


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("ranks", [2, 3, *(pytest.param(n, marks=pytest.mark.storm) for n in (4, 8))])
def test_weights_and_moments_have_the_same_bits_on_any_number_of_ranks(
    ranks: int, wrapped: bool, alone: str, tmp_path: Path
) -> None:
    assert on_ranks(train_here, ranks, str(tmp_path), 30, wrapped) == [alone] * ranks


@pytest.mark.parametrize("moves", [[2, 3, 1], pytest.param([8, 1, 4], marks=pytest.mark.storm)])
def test_a_run_that_moves_to_other_numbers_of_ranks_has_the_same_bits(
    moves: list[int], alone: str, tmp_path: Path
) -> None:
    for ranks, until in zip(moves, [7, 18, 30], strict=True):  # in the middle of epochs
        found = on_ranks(train_here, ranks, str(tmp_path), until)
    assert set(found) == {alone}


def join_and_train(folder: str, dies_at: int) -> None:
    with ddpkit.distributed(num_threads=1):
        train_here(folder, 30, dies_at=dies_at)


def test_a_run_whose_rank_is_killed_and_that_goes_on_with_fewer_has_the_same_bits(alone: str, tmp_path: Path) -> None:
    port = free_port()
    envs = [platform_env(rank, 3, port) for rank in range(3)]
    ended = run(join_and_train, envs, str(tmp_path), 13)
    assert all(end.code != 0 for end in ended)
    assert ddpkit.Checkpointer(tmp_path).steps()[-1] == 10
    assert on_ranks(train_here, 2, str(tmp_path), 30) == [alone] * 2


def test_plain_sums_have_other_bits_on_other_numbers_of_ranks() -> None:
    """If not, the tests above show nothing."""
    found = set()
    for ranks in (1, 2, 3):
        found |= set(on_ranks(train_plainly, ranks))
    assert len(found) > 1


def train_plainly() -> bytes:
    net = make_net().eval()  # without dropout
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for batch in make_loader():
        optimizer.zero_grad()
        for x, y in batch:
            (loss_of(net, x, y) * ddpkit.get_world_size() / batch.global_batch_size).backward()
        ddpkit.average_gradients(net)
        optimizer.step()
    return bits_of(*net.parameters())


def gradients_in_pairs() -> bytes:
    """Of four ranks those with one of two models are data-parallel to each other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    ddpkit.set_data_parallel(mesh["dp"])
    try:
        return gradients_of_model(mesh["tp"].get_local_rank())
    finally:
        ddpkit.set_data_parallel(None)


def gradients_of_model(which: int) -> bytes:
    torch.set_num_threads(1)
    net = make_net()
    with exact_gradients(next(iter(make_loader())), net) as micro_batches:
        for x, y in micro_batches:
            (loss_of(net, x, y) * (1 + which)).backward()
    return bits_of(*(p.grad for p in net.parameters()))


def test_data_parallel_ranks_have_the_bits_of_one_for_their_model() -> None:
    first, second = on_ranks(gradients_of_model, 1, 0), on_ranks(gradients_of_model, 1, 1)
    assert on_ranks(gradients_in_pairs, 4) == (first + second) * 2


# Refusals and failures


class Counts(nn.Module):
    """Its forward changes a buffer."""

    def __init__(self, replaces: bool) -> None:
        super().__init__()
        self.replaces = replaces
        self.weight = nn.Parameter(torch.zeros(6))
        self.register_buffer("forwards", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.replaces:
            self.forwards = self.forwards + 1
        else:
            self.forwards += 1
        return x @ self.weight


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("make", [lambda: Counts(True), lambda: Counts(False), lambda: nn.BatchNorm1d(6)])
def test_a_forward_that_changes_a_buffer_is_refused(make: Callable[[], nn.Module], rank: int) -> None:
    net = make()
    batch = next(iter(make_loader()))
    with pytest.raises(DdpkitError, match="has changed (Counts.forwards|BatchNorm1d)"):
        with exact_gradients(batch, net) as micro_batches:
            for x, _ in micro_batches:
                net(x).sum().backward()
    assert all(p.grad is None for p in net.parameters())


@pytest.mark.ranks(1, 2, 3)
def test_batch_statistics_of_a_micro_batch_are_those_of_any_number_of_ranks(rank: int) -> None:
    net = nn.BatchNorm1d(6, track_running_stats=False)
    with exact_gradients(next(iter(make_loader())), net) as micro_batches:
        for x, _ in micro_batches:
            net(x).square().sum().backward()
    assert net.weight.grad.isfinite().all()


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 2, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.embedding(torch.zeros(len(x), dtype=torch.long)).sum()


def complex_parameter() -> nn.Module:
    net = nn.Linear(6, 1)
    net.phase = nn.Parameter(torch.zeros(1, dtype=torch.complex64))
    return net


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(
    ("make", "options", "error", "text"),
    [
        (lambda: [nn.Linear(6, 1)], {}, TypeError, "takes modules and tensors, got list"),
        (
            lambda: nn.Linear(6, 1).requires_grad_(False),
            {},
            ValueError,
            "needs modules with trainable parameters",
        ),
        (lambda: nn.Sequential(nn.SyncBatchNorm(6)), {}, TypeError, "SyncBatchNorm exchanges statistics"),
        (lambda: nn.Linear(6, 1, device="meta"), {}, ValueError, "is on the meta device"),
        (Sparse, {}, TypeError, "takes dense gradients"),
        (complex_parameter, {}, TypeError, "takes real parameters"),
        (lambda: nn.Linear(6, 1), {"threads": 2}, ValueError, "expects threads=2, but torch uses 1"),
    ],
)
def test_what_cannot_be_exact_is_refused(
    make: Callable[[], Any], options: dict[str, Any], error: type[Exception], text: str, rank: int
) -> None:
    net = make()
    with pytest.raises(error) as caught:
        with exact_gradients(next(iter(make_loader())), net, **options) as micro_batches:
            for x, _ in micro_batches:
                net(x).sum().backward()
    assert text in str(caught.value)


@pytest.mark.ranks(1, 2)
def test_other_batches_and_half_a_loop_are_refused(rank: int) -> None:
    net = nn.Linear(6, 1)
    plain = ddpkit.make_loader(torch.ones(8, 6), 2)
    with pytest.raises(TypeError, match="takes a batch of a loader from make_micro_batch_loader"):
        with exact_gradients(next(iter(plain)), net):
            pass
    with pytest.raises(RuntimeError, match="ended before it had looped over all micro-batches"):
        with exact_gradients(next(iter(make_loader())), net) as micro_batches:
            next(micro_batches)
    with pytest.raises(DdpkitError, match=r"Collectives cannot run inside a block of exact_gradients\(\)"):
        with exact_gradients(next(iter(make_loader())), net):
            ddpkit.all_reduce(1)
    assert net.weight.grad is None


def test_kernels_that_may_differ_are_refused() -> None:
    cuda = torch.device("cuda")
    with pytest.raises(ValueError, match=r"on cuda needs torch.use_deterministic_algorithms\(True\)"):
        check_kernels(cuda, 1)
    torch.use_deterministic_algorithms(True)
    try:
        check_kernels(cuda, 1)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.skipif(not hasattr(Tensor, "grad_dtype"), reason="this torch has one dtype for both")
@pytest.mark.ranks(2, 3)
def test_ranks_whose_gradients_have_other_dtypes_hear_of_it(rank: int) -> None:
    net = nn.Linear(6, 1)
    if rank == 1:
        net.weight.grad_dtype = torch.float64
    with pytest.raises(MismatchError, match="dtypes of gradients: .*weight float64 on rank 1"):
        with exact_gradients(next(iter(make_loader())), net) as micro_batches:
            for x, _ in micro_batches:
                (net(x) * 0).sum().backward()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("what", ["step", "kernels", "network", "error"])
def test_ranks_that_differ_all_hear_of_it(what: str, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    net: Any = nn.Linear(6, 1)
    batches = iter(make_loader())
    batch = next(batches)
    if rank == 1 and what == "step":
        batch = next(batches)
    if rank == 1 and what == "kernels":
        monkeypatch.setattr("ddpkit.exact.gradients.describe_kernels", lambda device: "another CPU")
    if rank == 1 and what == "network":
        net = nn.Linear(6, 2)
    threads = 2 if rank == 1 and what == "error" else 1
    expected = ValueError if threads == 2 else MismatchError
    words = {"step": "from sample 16 on", "kernels": "another CPU", "network": r"float32\[2, 6\]", "error": "threads=2"}
    with pytest.raises(expected, match=words[what]):
        with exact_gradients(batch, net, threads=threads) as micro_batches:
            for x, _ in micro_batches:
                net(x).sum().backward()


def step_in_which(what: str) -> None:
    """Rank 1 fails in the middle of a step; the others are to hear of it."""
    with ddpkit.distributed(timeout=timedelta(seconds=20), num_threads=1) as job:
        net = make_net()
        for number, batch in enumerate(make_loader()):
            with exact_gradients(batch, net) as micro_batches:
                for i, (x, y) in enumerate(micro_batches):
                    loss_of(net, x, y).backward()
                    if job.rank == 1 and number == i == 1:
                        if what == "is killed":
                            os.kill(os.getpid(), signal.SIGKILL)
                        if what == "hangs":
                            time.sleep(120)
                        raise ValueError("broken in the middle")


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("is killed", "rank 1 ({host}) was lost"),
        ("raises", "ValueError: broken in the middle"),
        pytest.param("hangs", "rank 1", marks=pytest.mark.storm),
    ],
)
def test_a_rank_that_fails_in_the_middle_is_named_on_the_others(what: str, words: str) -> None:
    port = free_port()
    ended: list[Ended] = run(step_in_which, [platform_env(rank, 3, port) for rank in range(3)], what)
    for rank, end in enumerate(ended):
        assert end.code != 0
        if rank != 1:
            assert words.format(host=os.uname().nodename) in end.output, end.output
            assert end.seconds < 90
