"""Where the time of training steps goes, on real ranks: each phase gets its own, and a slow rank is named."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import on_ranks
from processes import begin, free_port, platform_env, run
from torch import nn

import ddpkit
from ddpkit.job import current_job
from ddpkit.join import members as monitor_tree
from ddpkit.torch_internals import forward_pre_hooks

PAUSE = 0.06  # seconds, much longer than anything that these steps do
PAUSES = (0.02, 0.1, 0.5)  # seconds; on a busy machine, where all takes long, one that is much longer is needed
PATIENCE = 120.0  # seconds, which only a hang needs


class Sleeps(torch.autograd.Function):
    """The identity, whose backward takes a while."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient, None


class Net(nn.Module):
    def __init__(self, pauses: dict[str, float]) -> None:
        super().__init__()
        self.pauses = pauses
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        time.sleep(self.pauses.get("forward", 0.0))
        hidden = Sleeps.apply(self.first(batch), self.pauses.get("backward", 0.0))
        return self.last(hidden)


class SlowSGD(torch.optim.SGD):
    pause = 0.0

    def step(self, closure: Any = None) -> Any:
        time.sleep(self.pause)
        return super().step(closure)


def train(pauses: dict[str, float], steps: int, by_hand: bool = False) -> None:
    """Train for so many steps, in which this rank's phases take so many seconds longer."""

    def collate(batch: list[int]) -> torch.Tensor:
        time.sleep(pauses.get("data", 0.0))
        return torch.ones(len(batch), 4)

    plain = Net(pauses)
    net = plain if by_hand else ddpkit.wrap_model(plain)
    optimizer = SlowSGD(net.parameters(), 0.01)
    optimizer.pause = pauses.get("optimizer", 0.0)
    samples = range(steps * ddpkit.get_data_parallel_world_size())
    for batch in ddpkit.make_loader(samples, batch_size=1, collate_fn=collate):
        net(batch).sum().backward()
        if by_hand:
            ddpkit.average_gradients(net)
        optimizer.step()
        time.sleep(pauses.get("other", 0.0))
        optimizer.zero_grad()


PHASES = ["data", "forward", "backward", "optimizer", "other"]


def pause_until(train_for: Callable[[float], None], share: Callable[[dict[str, float]], float]) -> None:
    """Train with longer and longer pauses until, on each rank, a share of a step's time is most of the pause."""
    for pause in PAUSES:
        before = ddpkit.step_times()
        train_for(pause)
        times = ddpkit.step_times()
        assert times is not None and times != before
        assert times.steps == 40
        assert sum(times.phases.values()) == pytest.approx(times.seconds)
        if ddpkit.all_reduce(float(share(times.phases) >= 0.5 * pause), "min"):
            return
    raise AssertionError(f"Pauses of {pause} s, and {times}.")


@pytest.mark.ranks(3, timeout=300)
@pytest.mark.parametrize("phase", PHASES)
def test_each_phase_gets_the_time_that_it_takes(rank: int, phase: str) -> None:
    is_slow = rank == ddpkit.get_world_size() - 1
    pause_until(
        lambda pause: train({phase: pause} if is_slow else {}, 45),
        lambda phases: phases[phase if is_slow else "waiting"],
    )


@pytest.mark.ranks(2, timeout=300)
def test_gradients_that_are_averaged_by_hand_end_a_step_too(rank: int) -> None:
    pause_until(
        lambda pause: train({"other": pause} if rank == 1 else {}, 45, by_hand=True),
        lambda phases: phases["other" if rank == 1 else "waiting"],
    )


@pytest.mark.ranks(1)
def test_on_one_process_nobody_is_waited_for() -> None:
    train({}, 10)
    train({}, 10, by_hand=True)
    assert ddpkit.step_times() is None


@pytest.mark.ranks(2)
def test_only_exchanges_of_gradients_end_steps(rank: int) -> None:
    net = ddpkit.wrap_model(nn.Linear(4, 1))
    clock = current_job.step_clock()
    clock.end_step()  # in this job, it may be the first
    before = clock.steps
    for step in range(1, 8):
        for micro in range(2):
            with ddpkit.accumulate(net, micro, every=2):
                net(net(torch.ones(1, 4)).expand(1, 4)).sum().backward()
        if rank == 0:
            with torch.no_grad():
                net(torch.ones(1, 4))
        assert clock.steps - before == step


class Odd(nn.Module):
    """Has a parameter of its own, which comes first; sends a buffer; each rank uses another layer; returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.norm = nn.BatchNorm1d(4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.slow = 0.0

    def forward(self, batch: torch.Tensor) -> dict[str, Any]:
        hidden = Sleeps.apply(self.layers[ddpkit.get_rank()](self.norm(batch)), self.slow)
        return {"out": [hidden * self.scale], "other": "word"}


@pytest.mark.ranks(2, 3, timeout=300)
def test_the_backward_ends_with_all_of_it_whatever_the_model(rank: int) -> None:
    net = ddpkit.wrap_model(Odd(), find_unused_parameters=True)

    def train_odd(pause: float) -> None:
        net.module.slow = pause
        for _ in range(45):
            net(torch.randn(3, 4))["out"][0].sum().backward()

    def excess(phases: dict[str, float]) -> float:
        if rank == slow:
            return phases["backward"] - phases["waiting"]
        return phases["waiting"] - max(phases["backward"], phases["forward"])

    for slow in (0, ddpkit.get_world_size() - 1):
        pause_until(lambda pause, slow=slow: train_odd(pause if rank == slow else 0.0), excess)


@pytest.mark.ranks(2, timeout=300)
def test_the_last_of_two_models_in_one_loss_counts(rank: int) -> None:
    first, second = ddpkit.wrap_model(Net({})), ddpkit.wrap_model(nn.Linear(1, 1))

    def train_both(pause: float) -> None:
        first.module.pauses["backward"] = pause if rank else 0.0
        for _ in range(25):
            second(first(torch.ones(1, 4))).sum().backward()

    pause_until(train_both, lambda phases: 2 * phases["backward" if rank else "waiting"])  # two exchanges a loss


@pytest.mark.ranks(2)
def test_wrapping_again_leaves_one_hook_and_no_mark_in_a_copy(rank: int) -> None:
    net = nn.Linear(4, 1)
    for _ in range(5):
        wrapped = ddpkit.wrap_model(net)
    assert len(forward_pre_hooks(net)) == 1
    phase = current_job.step_clock().phase
    copy.deepcopy(wrapped.module)(torch.ones(1, 4)).sum().backward()
    assert current_job.step_clock().phase == phase


@pytest.mark.ranks(2)
def test_groups_that_train_by_themselves_are_not_compared(rank: int) -> None:
    mesh = torch.distributed.init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    clock = current_job.step_clock()
    assert clock.is_comparable
    ddpkit.set_data_parallel(mesh["tp"])
    assert not clock.is_comparable
    ddpkit.set_data_parallel(None)
    assert clock.is_comparable


def save_copy_and_compile(folder: Path) -> float:
    """What three steps with a learning rate of .01 and gradients of 1 add to a weight."""
    net = ddpkit.wrap_model(Net({}))
    file = folder / f"{ddpkit.get_rank()}.pt"
    torch.save(net.module, file)
    loaded = torch.load(file, weights_only=False)
    for other in (copy.deepcopy(net.module), loaded, copy.deepcopy(loaded)):
        other(torch.ones(1, 4)).sum().backward()

    net = ddpkit.wrap_model(nn.Linear(4, 1))
    compiled = torch.compile(net, backend="eager")
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    step = torch.compile(optimizer.step, backend="eager")
    before = net.module.weight.detach().clone()
    for _ in range(3):
        compiled(torch.ones(1, 4)).sum().backward()
        step()
        optimizer.zero_grad()
    return (net.module.weight - before).mean().item()


@pytest.mark.storm
def test_models_can_be_saved_copied_and_compiled_and_optimizers_too(tmp_path: Path) -> None:
    assert on_ranks(save_copy_and_compile, 2, tmp_path) == pytest.approx([-0.03, -0.03])


def train_on(chain: bool, phase: str, steps: int, shown: str) -> None:
    """Train for so many steps, again until a file is there."""
    if chain:
        monitor_tree.CHILDREN = 1
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    with ddpkit.distributed() as context:
        while True:
            train({phase: PAUSE} if context.rank == context.world_size - 1 else {}, steps)
            if ddpkit.all_reduce(int(Path(shown).exists()), op="max"):
                break


@pytest.mark.parametrize(
    ("ranks", "phase", "chain"), [pytest.param(2, "data", False, marks=pytest.mark.storm), (3, "backward", True)]
)
def test_the_main_process_says_which_rank_is_slow_and_in_what(
    ranks: int, phase: str, chain: bool, tmp_path: Path
) -> None:
    port = free_port()
    envs = [platform_env(rank, ranks, port) for rank in range(ranks)]
    seen = tmp_path / "seen"
    crew = [begin(train_on, env, chain, phase, 140, str(seen), output=f"{tmp_path}/{env['RANK']}") for env in envs]
    end = time.monotonic() + PATIENCE
    while "makes every step" not in (tmp_path / "0").read_text() and time.monotonic() < end:
        time.sleep(0.5)
    seen.touch()
    for process in crew:
        process.join(PATIENCE)
        assert process.exitcode == 0, (tmp_path / "0").read_text()
    its = "its data take" if phase == "data" else f"its {phase} takes"
    log = (tmp_path / "0").read_text()
    assert log.count(f"Rank {ranks - 1} (") == 1 and its in log, log
    assert "makes every step" not in (tmp_path / "1").read_text()


def hang(steps: int) -> None:
    with ddpkit.distributed() as context:
        train({}, steps)
        if context.rank == 1:
            time.sleep(3)  # longer than rank 0 waits for answers
        assert ddpkit.all_reduce(1) == 2


def test_a_rank_that_hangs_holds_up_nothing() -> None:
    port = free_port()
    ended = run(hang, [platform_env(rank, 2, port) for rank in range(2)], 60)
    assert [end.code for end in ended] == [0, 0], ended
