"""Going on without the ranks that are lost: whoever dies, and wherever, no sample is lost or repeated."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from nodes import Node, cut, needs, virtual_nodes
from processes import ROOT, Ended, free_port, launch, platform_env, run
from torch import nn

import ddpkit
from ddpkit.survival.regrouping import Candidate, Rendezvous, decide

SAMPLES = 120
BATCH = 2
EPOCHS = 2
POINTS = ["forward", "backward", "optimizer", "before the commit", "after the commit", "joining"]
Death = tuple[int, int, str]  # of which member, in which step, where


class Weight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.weight - x


class Count:
    """Changes in each step before the optimizer does, as a scaler that skips it."""

    def __init__(self) -> None:
        self.number = 0

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.number = state["number"]


class Holder(Count):
    """Has a state that would need code where it arrives."""

    def state_dict(self) -> dict[str, Any]:
        return {"net": nn.Linear(1, 1)}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def train(
    folder: str,
    deaths: list[Death],
    min_ranks: int = 1,
    num_workers: int = 0,
    pause: float = 0.0,
    until: str = "",
    meets_at: int = -1,
    **options: Any,
) -> None:
    """Train on numbers; write down which this rank uses for which step, and the result.

    After a dozen steps wait for a file `until`, if one is named. All meet in one of the steps.
    """
    member = int(os.environ["RANK"])
    mine = [(step, point) for who, step, point in deaths if who == member]
    net = Weight()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    Path(folder, f"{member}.pid").write_text(f"{os.getpid()}")

    def write(*fields: Any) -> None:
        with open(f"{folder}/{member}.log", "a") as log:
            log.write(json.dumps(fields) + "\n")

    def at(step: int, point: str) -> None:
        if (step, point) in mine:
            die()
        if (step, f"raise in {point}") in mine:
            raise ValueError("a bug")
        if (step, f"stop in {point}") in mine:
            os.kill(os.getpid(), signal.SIGSTOP)

    former = Rendezvous.regroup

    def regroup(self: Rendezvous, *args: Any) -> Any:
        found = former(self, *args)
        if any(point == "joining" for _, point in mine):
            die()
        return found

    Rendezvous.regroup = regroup  # type: ignore[method-assign]
    optimizer.register_step_pre_hook(lambda *_: at(step, "optimizer"))
    count, models = Count(), []
    for attempts, attempt in enumerate(ddpkit.survive(net, optimizer, count, min_ranks=min_ranks, **options), 1):
        with attempt:
            number = getattr(attempt._survivors._rendezvous, "_regroupings", 0)  # that of the attempt on all ranks
            loader = attempt.resume(ddpkit.make_loader(torch.arange(SAMPLES), BATCH, seed=3, num_workers=num_workers))
            wrapped = ddpkit.wrap_model(net)
            models.append(wrapped)  # those of former attempts must do no harm
            step = attempt.steps
            for epoch in loader.epochs(EPOCHS):
                for batch in loader:
                    write(number, step, epoch, batch.tolist())
                    time.sleep(pause)
                    while step >= 12 and until and not Path(folder, until).exists():
                        time.sleep(0.01)
                    at(step, "forward")
                    if step == meets_at:
                        ddpkit.barrier(timeout=timedelta(seconds=2))
                    loss = wrapped(batch.double()).square().mean() / 2
                    loss.register_hook(lambda _, step=step: at(step, "backward"))
                    optimizer.zero_grad()
                    count.number += 1
                    loss.backward()
                    optimizer.step()
                    at(step, "before the commit")
                    attempt.commit()
                    at(step, "after the commit")
                    step += 1
            result = {"steps": attempt.steps, "weight": net.weight.item(), "seen": net.seen.item()}
            result |= {
                "count": count.number,
                "rank": ddpkit.get_rank(),
                "world_size": ddpkit.get_world_size(),
                "attempts": attempts,
            }
    Path(folder, f"{member}.json").write_text(json.dumps(result))


def start(ranks: int, folder: Path, deaths: list[Death], *args: Any, fn: Any = train) -> list[Ended]:
    port = free_port()
    envs = [platform_env(rank, ranks, port) for rank in range(ranks)]
    return run(fn, envs, str(folder), deaths, *args, timeout=120)


def check(folder: Path, ranks: int, survivors: list[int]) -> None:
    """The survivors agree; every sample of each epoch counts once; the weight is that of the batches of all ranks."""
    results = [json.loads((folder / f"{member}.json").read_text()) for member in survivors]
    assert {result["world_size"] for result in results} == {len(survivors)}
    assert [result["rank"] for result in results] == list(range(len(survivors)))
    assert len({(result["steps"], result["weight"]) for result in results}) == 1
    lines = [json.loads(line) for m in range(ranks) for line in (folder / f"{m}.log").read_text().splitlines()]
    last: dict[int, int] = {}
    for number, step, _, _ in lines:
        last[step] = max(number, last.get(step, 0))
    counted = [line for line in lines if line[0] == last[line[1]]]
    assert set(last) == set(range(results[0]["steps"]))
    for epoch in range(EPOCHS):
        steps = sorted({step for _, step, e, _ in counted if e == epoch})
        dealt = [(step, sample) for _, step, e, batch in counted if e == epoch for sample in batch]
        before = Counter(sample for step, sample in dealt if step != steps[-1])
        assert {sample for _, sample in dealt} == set(range(SAMPLES))
        assert set(before.values()) == {1}
        assert len(dealt) - SAMPLES < ranks  # of the last step, so that all have a batch
    weight, momentum = 0.0, 0.0
    for step in sorted(last):
        batches = [batch for _, s, _, batch in counted if s == step]
        means = [sum(weight - sample for sample in batch) / len(batch) for batch in batches]
        momentum = 0.9 * momentum + sum(means) / len(means)
        weight -= 0.1 * momentum
    assert results[0]["weight"] == pytest.approx(weight, rel=1e-12)
    assert {result["seen"] for result in results} == {result["count"] for result in results} == {results[0]["steps"]}


@pytest.mark.parametrize(
    "point", [*POINTS[:3:2], *(pytest.param(point, marks=pytest.mark.storm) for point in (POINTS[1], *POINTS[3:5]))]
)
@pytest.mark.parametrize("member", [0, pytest.param(2, marks=pytest.mark.storm)])
def test_the_others_go_on_wherever_one_is_killed(member: int, point: str, tmp_path: Path) -> None:
    ended = start(3, tmp_path, [(member, 7, point)])
    survivors = [other for other in range(3) if other != member]
    assert [ended[other].code for other in survivors] == [0, 0], "".join(e.output for e in ended)
    check(tmp_path, 3, survivors)


@pytest.mark.parametrize(
    "deaths",
    [
        pytest.param([(0, 5, "backward"), (1, 5, "backward")], id="two at once"),
        pytest.param([(0, 5, "backward"), (1, 0, "joining")], id="the leader while joining"),
        pytest.param([(0, 5, "backward"), (2, 0, "joining")], id="another while joining", marks=pytest.mark.storm),
        pytest.param(
            [(3, 4, "optimizer"), (0, 9, "after the commit"), (1, 12, "forward")],
            id="one after the other",
            marks=pytest.mark.storm,
        ),
    ],
)
def test_several_may_be_lost(deaths: list[Death], tmp_path: Path) -> None:
    ended = start(4, tmp_path, deaths)
    survivors = sorted(set(range(4)) - {member for member, _, _ in deaths})
    assert [ended[other].code for other in survivors] == [0] * len(survivors), "".join(e.output for e in ended)
    check(tmp_path, 4, survivors)


@pytest.mark.parametrize("member", [pytest.param(0, marks=pytest.mark.storm), 1])
def test_workers_of_a_lost_rank_do_not_pass_for_it(member: int, tmp_path: Path) -> None:
    ended = start(2, tmp_path, [(member, 7, "forward")], 1, 2)
    assert ended[1 - member].code == 0, "".join(e.output for e in ended)
    check(tmp_path, 2, [1 - member])


def train_beside_late_ones(folder: str, deaths: list[Death], calls_survive: bool) -> None:
    """Train slowly until those that come late have been refused."""
    if "LATE" not in os.environ:
        train(folder, deaths, until="refused", timeout=timedelta(seconds=60))
        return
    logs = [Path(folder, f"{rank}.log") for rank in range(3)]
    while not any("\n[1, " in log.read_text() for log in logs if log.exists()):  # the second attempt
        time.sleep(0.01)
    began = time.monotonic()
    try:
        if calls_survive:
            next(ddpkit.survive())
        ddpkit.setup()
    finally:
        Path(folder, f"refused {os.environ['RANK']}").write_text(f"{time.monotonic() - began}")
        if len(list(Path(folder).glob("refused ?"))) == int(os.environ["LATE"]):
            Path(folder, "refused").touch()


@pytest.mark.parametrize("calls_survive", [pytest.param(True, marks=pytest.mark.storm), False])
@pytest.mark.parametrize("lost", [0, 1])
def test_a_late_process_is_refused_at_once_in_one_sentence(lost: int, calls_survive: bool, tmp_path: Path) -> None:
    port = free_port()
    envs = [platform_env(rank, 3, port) for rank in range(3)]
    envs.append(platform_env(lost, 3, port, LATE="1"))
    ended = run(train_beside_late_ones, envs, str(tmp_path), [(lost, 5, "forward")], calls_survive, timeout=120)
    outputs = "".join(e.output for e in ended)
    assert [e.code for e in ended] == [-signal.SIGKILL if rank == lost else 0 for rank in range(3)] + [1], outputs
    assert "lost some of its 3 ranks and went on without them" in ended[3].output, outputs
    assert "stop that job, let it save a checkpoint, and start all ranks anew" in ended[3].output
    check(tmp_path, 3, [rank for rank in range(3) if rank != lost])


def train_until_stopped(folder: str, deaths: list[Death]) -> None:
    net = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    member = int(os.environ["RANK"])
    with ddpkit.stopping() as stop:
        for attempt in ddpkit.survive(net, optimizer):
            with attempt:
                model = ddpkit.wrap_model(net)
                while attempt.steps < 1000:
                    optimizer.zero_grad()
                    model(torch.ones(1, 1)).sum().backward()
                    if attempt.steps == 5 and member == 0:
                        os.kill(os.getpid(), signal.SIGTERM)
                    if (member, attempt.steps, "optimizer") in deaths:
                        die()
                    optimizer.step()
                    attempt.commit()
                    if stop.now():
                        break
    Path(folder, f"{member}.json").write_text(json.dumps([attempt.steps, stop.reason]))


def test_a_request_to_stop_lives_on(tmp_path: Path) -> None:
    ended = start(3, tmp_path, [(2, 5, "optimizer")], fn=train_until_stopped)
    assert [e.code for e in ended] == [0, 0, -signal.SIGKILL], "".join(e.output for e in ended)
    results = [json.loads((tmp_path / f"{member}.json").read_text()) for member in range(2)]
    assert results[0] == results[1]
    assert 5 <= results[0][0] < 20 and "got SIGTERM" in results[0][1]


def begin_late(folder: str, deaths: list[Death]) -> None:
    """Be slow between the optimizer's step and the commit, while another dies."""
    member = int(os.environ["RANK"])
    net = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for attempt in ddpkit.survive(net, optimizer):
        with attempt:
            model = ddpkit.wrap_model(net)
            while attempt.steps < 4:
                optimizer.zero_grad()
                model(torch.ones(1, 1)).sum().backward()
                if member == 1 and attempt.steps == 2:
                    die()
                optimizer.step()
                if attempt.steps == 2:
                    time.sleep(7)
                attempt.commit()


def test_a_slow_step_ends_before_the_loss_is_dealt_with(tmp_path: Path) -> None:
    ended = start(3, tmp_path, [], fn=begin_late)
    assert [e.code for e in ended] == [0, -signal.SIGKILL, 0], "".join(e.output for e in ended)


def interrupt(folder: str, deaths: list[Death]) -> None:
    net = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for attempt in ddpkit.survive(net, optimizer):
        with attempt:
            if os.environ["RANK"] == "1":
                die()
            try:
                ddpkit.barrier()
            except ddpkit.PeerError:
                sys.exit(5)


def test_a_rank_that_ends_itself_is_not_kept_by_a_loss(tmp_path: Path) -> None:
    ended = start(2, tmp_path, [], fn=interrupt)
    assert [e.code for e in ended] == [5, -signal.SIGKILL]


def differ(folder: str, deaths: list[Death]) -> None:
    """One rank waits for others where they have no reason to come."""
    net = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    seconds = timedelta(seconds=3)
    for attempt in ddpkit.survive(net, optimizer, timeout=seconds, patience=seconds):
        with attempt:
            if os.environ["RANK"] == "1":
                ddpkit.barrier("for one")


@pytest.mark.storm
def test_a_bug_by_which_ranks_wait_in_vain_is_no_loss_for_ever(tmp_path: Path) -> None:
    ended = start(2, tmp_path, [], fn=differ)
    assert [e.code for e in ended] == [1, 1]


def test_a_rank_that_raises_ends_with_its_error_and_the_others_go_on(tmp_path: Path) -> None:
    ended = start(3, tmp_path, [(1, 6, "raise in forward")])
    assert [e.code for e in ended] == [0, 1, 0], "".join(e.output for e in ended)
    assert "ValueError: a bug" in ended[1].output
    assert "2 of 3 ranks resume from step 6, after" in ended[0].output
    assert "rank 1" in ended[0].output and "a bug" in ended[0].output
    check(tmp_path, 3, [0, 2])


def test_the_job_ends_where_too_few_are_left(tmp_path: Path) -> None:
    ended = start(3, tmp_path, [(2, 6, "forward")], 3)
    assert [e.code for e in ended] == [1, 1, -signal.SIGKILL]
    outputs = "".join(e.output for e in ended[:2])  # the second counts the first no more if that has ended by then
    assert "The remaining ranks cannot continue: 2 ranks remain, but min_ranks is 3." in outputs
    assert outputs.count("remain, but min_ranks is 3.") == 2


def candidate(member: int, steps: int = 7, is_consistent: bool = True, regroupings: int = 0) -> Candidate:
    return Candidate(member, regroupings, steps, is_consistent, ("here", member))


def test_all_go_on_from_the_last_whole_step_that_one_of_them_has() -> None:
    candidates = [
        candidate(3, 8),
        candidate(1, 7),
        candidate(0, 8, is_consistent=False),
        candidate(4, 8, regroupings=2),
    ]
    decision = decide(0, candidates, [], 1)
    assert (decision.members, decision.steps, decision.source) == ([0, 1, 3, 4], 8, 3)
    assert (decision.regrouping, decision.refusal) == (3, "")


@pytest.mark.parametrize(
    ("there", "unknown", "goes_on"),
    [([1, 2], [0], True), ([0], [1], True), ([1], [0], False), ([0, 1], [2, 3, 4], False), ([2, 3], [0, 1], False)],
)
def test_of_a_network_that_was_cut_one_part_at_most_goes_on(
    there: list[int], unknown: list[int], goes_on: bool
) -> None:
    assert (decide(there[0], [candidate(member) for member in there], unknown, 1).refusal == "") == goes_on
    if goes_on:
        assert decide(unknown[0], [candidate(member) for member in unknown], there, 1).refusal


def test_nobody_goes_on_from_the_middle_of_a_step() -> None:
    candidates = [candidate(0, is_consistent=False), candidate(1, is_consistent=False)]
    assert "states of a complete step" in decide(0, candidates, [], 1).refusal


def test_what_cannot_be_kept_is_refused() -> None:
    net = nn.Linear(1, 1)
    with pytest.raises(TypeError, match="needs an optimizer"):
        next(ddpkit.survive(net, Count()))
    with pytest.raises(ddpkit.CheckpointError, match=r"Cannot save Holder\.net: .*Unsupported"):
        next(ddpkit.survive(Holder()))
    with pytest.raises(ValueError, match="more than the world size, 1"):
        next(ddpkit.survive(min_ranks=2))


def test_an_attempt_must_be_entered() -> None:
    with pytest.raises(ddpkit.DdpkitError, match="with attempt"):
        for _ in ddpkit.survive():
            pass


def test_a_loader_that_cannot_go_on_with_fewer_ranks_is_refused_before_the_first_step() -> None:
    data = range(8)
    own_order = ddpkit.make_loader(data, 2, sampler=torch.utils.data.RandomSampler(data))
    for loader in (own_order, ddpkit.make_loader(data, 2, train=False)):
        for attempt in ddpkit.survive():
            with attempt, pytest.raises(TypeError, match="must resume on fewer ranks.*one of ddpkit's samplers"):
                attempt.resume(loader)


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="state_dict"):
        next(ddpkit.survive(3))
    with pytest.raises(ValueError, match="min_ranks"):
        next(ddpkit.survive(min_ranks=0))
    with pytest.raises(TypeError, match="timedelta"):
        next(ddpkit.survive(patience=3))  # type: ignore[arg-type]


def train_spawned(folder: str, deaths: list[Death]) -> int:
    train(folder, deaths)
    return ddpkit.get_world_size()


def test_ranks_of_spawn_go_on_where_it_waits_for_them(tmp_path: Path) -> None:
    deaths = [(1, 6, "backward")]
    found = ddpkit.spawn(train_spawned, 3, str(tmp_path), deaths, timeout=timedelta(minutes=2), end_together=False)
    assert isinstance(found[1], ddpkit.PeerError)
    check(tmp_path, 3, [0, 2])
    with pytest.raises(ddpkit.PeerError):
        ddpkit.spawn(die, 2, timeout=timedelta(minutes=2), end_together=False)


def train_and_wake(folder: str, deaths: list[Death], **options: Any) -> None:
    seconds = timedelta(seconds=4)
    train(folder, deaths, timeout=seconds, patience=seconds, **options)
    for stopped, _, _ in deaths:
        os.kill(int(Path(folder, f"{stopped}.pid").read_text()), signal.SIGCONT)


@pytest.mark.parametrize("stopped", [pytest.param(0, marks=pytest.mark.storm), 1])
def test_a_rank_that_hangs_is_left_behind_and_does_not_go_on_by_itself(stopped: int, tmp_path: Path) -> None:
    ended = start(3, tmp_path, [(stopped, 6, "stop in forward")], fn=train_and_wake)
    survivors = [member for member in range(3) if member != stopped]
    assert [ended[member].code for member in survivors] == [0, 0], "".join(e.output for e in ended)
    check(tmp_path, 3, survivors)
    assert ended[stopped].code == 1
    assert not (tmp_path / f"{stopped}.json").exists()


def train_meet_and_wake(folder: str, deaths: list[Death]) -> None:
    train_and_wake(folder, deaths, meets_at=6)


@pytest.mark.storm
def test_the_others_go_on_where_the_host_of_their_store_stops_and_they_wait_there(tmp_path: Path) -> None:
    ended = start(3, tmp_path, [(0, 6, "stop in forward")], fn=train_meet_and_wake)
    assert [ended[1].code, ended[2].code] == [0, 0], "".join(e.output for e in ended)
    check(tmp_path, 3, [1, 2])
    assert ended[0].code == 1 and not (tmp_path / "0.json").exists()


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)).relu())


def train_normed(folder: str, deaths: list[Death], begin: int = 0, end: int = 24, asks_at: int = -1) -> None:
    """Train from step `begin`, which a file holds, to step `end`, with statistics, moments and a schedule.

    In step `asks_at` somebody asks rank 0 to stop.
    """
    torch.manual_seed(5)
    member = int(os.environ["RANK"])
    net = Normed()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
    data = torch.randn(96, 4, generator=torch.Generator().manual_seed(1))
    with ddpkit.stopping() as stop:
        for attempt in ddpkit.survive(net, optimizer, schedule):
            with attempt:
                loader = attempt.resume(ddpkit.make_loader(data, BATCH, seed=3, drop_last=True))
                kept = ddpkit.Checkpointer(f"{folder}/checkpoints")
                if begin and not attempt.steps:
                    kept.load_latest(net=net, optimizer=optimizer, schedule=schedule, loader=loader)
                wrapped = ddpkit.wrap_model(net)
                step = begin + attempt.steps
                for _ in loader.epochs(9):
                    for batch in loader:
                        if (member, step, "backward") in deaths:
                            die()
                        if step == asks_at and member == 0:
                            os.kill(os.getpid(), signal.SIGTERM)
                        optimizer.zero_grad()
                        wrapped(batch).square().mean().backward()
                        optimizer.step()
                        schedule.step()
                        attempt.commit()
                        step += 1
                        if stop.now() or step == end:
                            break
                    if stop.now() or step == end:
                        break
                for buffer in net.buffers():
                    buffer.copy_(ddpkit.broadcast(buffer, src=0))  # as DDP does before the next step
                kept.save(step, net=net, optimizer=optimizer, schedule=schedule, loader=loader)
                state = [net.state_dict(), optimizer.state_dict(), schedule.state_dict()]
                torch.save(state, f"{folder}/{ddpkit.get_rank()}-{step}.pt")


def planned(folder: Path, *phases: tuple[int, int, int]) -> Any:
    """Train with so many ranks from step to step, each time in a job of its own; return the states at the end."""
    folder.mkdir()
    for ranks, begin, end in phases:
        port = free_port()
        envs = [platform_env(rank, ranks, port) for rank in range(ranks)]
        assert [e.code for e in run(train_normed, envs, str(folder), [], begin, end, timeout=120)] == [0] * ranks
    return torch.load(folder / f"0-{phases[-1][2]}.pt")


def test_a_loss_leads_to_the_same_weights_as_a_planned_end_of_the_rank(tmp_path: Path) -> None:
    expected = planned(tmp_path / "planned", (3, 0, 10), (2, 10, 24))
    ended = start(3, tmp_path, [(1, 10, "backward")], fn=train_normed)
    assert [e.code for e in ended] == [0, -signal.SIGKILL, 0], "".join(e.output for e in ended)
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}-24.pt")
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_after_a_loss_stop_and_a_new_start_lead_back_to_all_ranks(tmp_path: Path) -> None:
    ended = start(3, tmp_path, [(1, 4, "backward")], 0, 24, 7, fn=train_normed)
    assert [e.code for e in ended] == [0, -signal.SIGKILL, 0], "".join(e.output for e in ended)
    (stopped,) = (int(path.stem[2:]) for path in tmp_path.glob("0-*.pt"))
    assert 7 < stopped < 24
    again = start(3, tmp_path, [], stopped, fn=train_normed)
    assert [e.code for e in again] == [0, 0, 0], "".join(e.output for e in again)
    expected = planned(tmp_path / "planned", (3, 0, 4), (2, 4, stopped), (3, stopped, 24))
    torch.testing.assert_close(torch.load(tmp_path / "0-24.pt"), expected, rtol=0, atol=0)


def train_exactly(folder: str, deaths: list[Death]) -> None:
    """Train with dropout to bits that no number of ranks changes."""
    torch.manual_seed(5)
    member = int(os.environ["RANK"])
    net = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(net.parameters())
    data = torch.randn(100, 4, generator=torch.Generator().manual_seed(1))
    for attempt in ddpkit.survive(net, optimizer, num_threads=1):
        with attempt:
            loader = attempt.resume(ddpkit.make_micro_batch_loader(data, 12, 2))
            model = ddpkit.wrap_model(net)
            for _ in loader.epochs(2):
                for batch in loader:
                    with ddpkit.exact_gradients(batch, model) as micro_batches:
                        for x in micro_batches:
                            (model(x).square().sum() / batch.global_batch_size).backward()
                        if (member, attempt.steps, "backward") in deaths:
                            die()
                    optimizer.step()
                    attempt.commit()
            torch.save([net.state_dict(), optimizer.state_dict()], f"{folder}/{member}.pt")


def test_a_loss_changes_no_bit_where_steps_are_exact(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    assert [e.code for e in start(1, tmp_path / "one", [], fn=train_exactly)] == [0]
    expected = torch.load(tmp_path / "one" / "0.pt")
    ended = start(4, tmp_path, [(0, 4, "backward"), (2, 11, "backward")], fn=train_exactly)
    assert [ended[member].code for member in (1, 3)] == [0, 0], "".join(e.output for e in ended)
    for member in (1, 3):
        torch.testing.assert_close(torch.load(tmp_path / f"{member}.pt"), expected, rtol=0, atol=0)


def on_node(node: Node, call: str, **env: str) -> list[str]:
    """Write the command that calls a function of this file on a node."""
    env |= {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests", Path(__file__).parent)))}
    program = f"import test_survival as test; test.{call}"
    return node.run("env", *(f"{name}={text}" for name, text in env.items()), sys.executable, "-c", program)


def node_env(rank: int, port: int, **more: str) -> dict[str, str]:
    return platform_env(rank, 3, port, MASTER_ADDR="node1", GLOO_SOCKET_IFNAME="eth0", **more)


def train_on_a_node(folder: str) -> None:
    """Train until some time after the network is cut."""
    train(folder, [], pause=0.1, timeout=timedelta(seconds=60), patience=timedelta(seconds=4))


@needs("ip", nodes=True)
@pytest.mark.storm
@pytest.mark.parametrize("lost", [0, 2])
def test_the_larger_part_of_a_cut_network_goes_on_and_the_smaller_one_ends(lost: int, tmp_path: Path) -> None:
    port = free_port()
    call = f"train_on_a_node({str(tmp_path)!r})"
    with virtual_nodes(3) as nodes:
        commands = [on_node(node, call, **node_env(rank, port)) for rank, node in enumerate(nodes[1:])]

        def cut_in_the_middle(_: Any) -> None:
            log = tmp_path / f"{lost}.log"
            while not log.exists() or len(log.read_text().splitlines()) < 5:
                time.sleep(0.05)
            cut(nodes, lost + 1)

        ended = launch(*commands, timeout=120, meanwhile=cut_in_the_middle)
    survivors = [member for member in range(3) if member != lost]
    assert [ended[member].code for member in survivors] == [0, 0], "".join(e.output for e in ended)
    assert ended[lost].code == 1 and "may continue without this rank" in ended[lost].output, ended[lost].output
    check(tmp_path, 3, survivors)


@needs("ip", nodes=True)
@pytest.mark.storm
@pytest.mark.parametrize("lost", [0, 2])
def test_a_late_process_on_the_node_of_a_lost_rank_is_refused(lost: int, tmp_path: Path) -> None:
    port = free_port()
    call = f"train_beside_late_ones({str(tmp_path)!r}, [({lost}, 5, 'forward')], False)"
    with virtual_nodes(3) as nodes:
        commands = [on_node(node, call, **node_env(rank, port)) for rank, node in enumerate(nodes[1:])]
        commands.append(on_node(nodes[lost + 1], call, **node_env(lost, port, LATE="1")))
        ended = launch(*commands, timeout=120)
    outputs = "".join(e.output for e in ended)
    assert [e.code for e in ended] == [-signal.SIGKILL if rank == lost else 0 for rank in range(3)] + [1], outputs
    assert "went on without them" in ended[3].output, outputs
    check(tmp_path, 3, [rank for rank in range(3) if rank != lost])


@pytest.mark.storm
@pytest.mark.parametrize("seed", range(100))
def test_random_deaths_lose_and_repeat_nothing(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    ranks = chance.choice([2, 3, 3, 4])
    dying = chance.sample(range(ranks), chance.randint(1, ranks - 1))
    first = chance.randrange(12)
    deaths = [(member, first + chance.choice([0, 0, 1, 5]), chance.choice(POINTS[:5])) for member in dying]
    if len(deaths) > 1 and chance.random() < 0.3:
        deaths[1] = (deaths[1][0], 0, "joining")
    ended = start(ranks, tmp_path, deaths)
    survivors = sorted(set(range(ranks)) - set(dying))
    assert [ended[member].code for member in survivors] == [0] * len(survivors), (deaths, [e.output for e in ended])
    check(tmp_path, ranks, survivors)
