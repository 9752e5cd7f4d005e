"""Stopping all ranks at the same step: signals at random moments, to any rank, and what may go wrong meanwhile."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from conftest import on_ranks
from processes import Ended, begin, free_port, launch, platform_env, run
from signals import stop_process

import ddpkit
from ddpkit import testing
from ddpkit.stop import handled_signals
from ddpkit.watch import messages as monitor_tree
from ddpkit.watch import stop_agreement
from ddpkit.watch.messages import StopRequest
from ddpkit.watch.stop_agreement import StopAgreement

HOST = socket.gethostname()
STEPS = 10_000  # more than a test ever gets through
SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]
Result = tuple[int, "str | None", int]


def train(signalled: int, number: int, at: int, together: bool) -> Result:
    """Train until all stop: the step, the reason, the exit code. A rank signals itself in step `at`, from 1."""
    rank = ddpkit.get_rank()
    pause = random.Random(rank).random() / 100
    with ddpkit.stopping() as stop:
        for step in range(1, STEPS):
            if together:
                ddpkit.all_reduce(1)
            else:
                time.sleep(pause)
            if rank == signalled and step == at:
                os.kill(os.getpid(), number)
            if stop.now():
                assert stop.now()  # from then on
                return step, stop.reason, stop.exit_code
            assert stop.reason is None
            assert stop.exit_code == 0
    raise AssertionError("the ranks have not stopped")


@pytest.mark.parametrize("together", [True, False], ids=["with a collective each step", "without"])
@pytest.mark.parametrize(
    ("number", "nprocs", "signalled"),
    [
        (signal.SIGTERM, 1, 0),
        (signal.SIGINT, 1, 0),
        (signal.SIGINT, 2, 1),
        (signal.SIGUSR1, 3, 2),
        (signal.SIGTERM, 3, 0),
        pytest.param(signal.SIGTERM, 2, 0, marks=pytest.mark.storm),
        pytest.param(signal.SIGUSR1, 2, 1, marks=pytest.mark.storm),
    ],
)
def test_a_signal_to_any_rank_stops_all_at_one_step(
    number: signal.Signals, nprocs: int, signalled: int, together: bool
) -> None:
    results = on_ranks(train, nprocs, signalled, number, 5, together, timeout=60)
    assert len(set(results)) == 1
    step, reason, code = results[0]
    assert 5 <= step <= 5 + (200 if nprocs > 1 else 0)
    assert reason == f"rank {signalled} ({HOST}) got {number.name}"
    assert code == 128 + number


def train_in_a_chain(leaving: int) -> tuple[int, str | None]:
    """Train free-running ranks of which each hears by way of the one before it; one of them leaves at once."""
    monitor_tree.CHILDREN = 1
    with ddpkit.distributed(timeout=timedelta(seconds=60)) as job:
        if job.rank == leaving:
            return -1, None
        with ddpkit.stopping([signal.SIGRTMIN + 5]) as stop:
            for step in range(1, 200):
                time.sleep(0.005 * (1 + job.rank))
                if job.rank == 1 and step == 40:
                    os.kill(os.getpid(), signal.SIGRTMIN + 5)
                if stop.now():
                    return step, stop.reason
        return step, None


@pytest.mark.parametrize("leaving", [2, *(pytest.param(rank, marks=pytest.mark.storm) for rank in (-1, 0, 3))])
def test_ranks_that_are_cut_off_by_one_that_has_left_hold_nobody_up(leaving: int) -> None:
    results = testing.on_ranks(train_in_a_chain, 4, leaving, timeout=120, join=False, fresh=True)
    reason = f"rank 1 ({HOST}) got signal {signal.SIGRTMIN + 5}"
    there = [rank for rank in range(4) if rank != leaving]
    if leaving == 0:  # nobody decides
        assert {results[rank] for rank in there} == {(199, None)}
        return
    reached = [rank for rank in there if leaving < 0 or rank < leaving]
    stopped = {results[rank] for rank in reached}
    assert len(stopped) == 1
    assert stopped.pop()[1] == reason
    assert {results[rank] for rank in there if rank not in reached} <= {(199, None)}


def signal_from_thread(seed: int) -> tuple[int, str | None]:
    draw = random.Random(seed)
    victims = draw.sample(range(3), draw.randint(1, 3))
    moment = draw.random() / 10
    rank = ddpkit.get_rank()
    timer = threading.Timer(moment if rank in victims else 0, os.kill, (os.getpid(), draw.choice(SIGNALS)))
    lengths = random.Random(1_000 * seed + rank)
    with ddpkit.stopping() as stop:
        if rank in victims:
            timer.start()
        for step in range(1, STEPS):
            time.sleep(lengths.random() / 100)
            if stop.now():
                if rank in victims:
                    timer.join()  # the other signals come, too, and are not fatal
                return step, stop.reason
    raise AssertionError("the ranks have not stopped")


@pytest.mark.parametrize("seed", range(5))
def test_signals_at_random_moments_stop_all_at_one_step_for_one_reason(seed: int) -> None:
    assert len(set(on_ranks(signal_from_thread, 3, seed, timeout=60))) == 1


def test_rank_0_does_not_stop_before_it_has_told_the_others() -> None:
    """It would leave, and they would take the decision for lost."""
    agreement = StopAgreement(2)
    agreement.first = StopRequest(1, HOST, "got SIGTERM", signal.SIGTERM)
    for rank in range(2):
        agreement.counts[rank] = agreement.answer()
    decision = agreement.decide(left=[])
    assert decision is not None
    assert decision.step == 1
    assert agreement.decision is None  # the main thread looks at it


def ask(asking: int) -> list[Any]:
    with ddpkit.stopping() as stop:
        for step in range(STEPS):
            if ddpkit.get_rank() == asking and step == 3:
                stop.ask("has used its time")
            ddpkit.all_reduce(1)
            if stop.now():
                return [stop.reason, stop.exit_code]
    raise AssertionError("the ranks have not stopped")


@pytest.mark.parametrize("nprocs", [1, 2, 3])
def test_a_script_may_ask_without_a_signal(nprocs: int) -> None:
    assert (
        on_ranks(ask, nprocs, nprocs - 1, timeout=60) == [[f"rank {nprocs - 1} ({HOST}) has used its time", 0]] * nprocs
    )


def ask_at_the_end(asking: int) -> list[bool]:
    """Ask in the last step, after which nobody asks whether to stop."""
    with ddpkit.stopping() as stop:
        told = []
        for step in range(3):
            if ddpkit.get_rank() != asking:
                time.sleep(0.2)  # it is done, and leaves, while the others train
            told.append(stop.now())
            if ddpkit.get_rank() == asking and step == 2:
                stop.ask("is done")
        return told


@pytest.mark.parametrize("asking", [0, 1, 2])
def test_a_request_after_the_last_step_holds_nobody_up(asking: int) -> None:
    told = on_ranks(ask_at_the_end, 3, asking, timeout=60)
    assert told[asking] == [False, False, False]
    assert max(map(len, told)) == 3


def stop_twice() -> list[bool]:
    told = []
    for _ in range(2):
        with ddpkit.stopping() as stop:
            stop.ask("")
            while not stop.now():
                pass
            told.append(True)
    return told


def test_a_job_that_has_stopped_stops_again_at_once() -> None:
    assert on_ranks(stop_twice, 2, timeout=60) == [[True, True]] * 2


def stop_in_jobs_of_one() -> list[int]:
    steps = []
    for _ in range(2):
        with ddpkit.distributed(), ddpkit.stopping() as stop:
            assert not stop.now()
            stop.ask("")
            steps.append(1 + [stop.now(), stop.now()].index(True))
    return steps


def test_the_next_job_of_the_process_does_not_remember() -> None:
    assert stop_in_jobs_of_one() == [1, 1]


# What may go wrong


def raise_while_deciding() -> None:
    with ddpkit.stopping() as stop:
        if ddpkit.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
            raise ValueError("boom")
        while not stop.now():
            ddpkit.all_reduce(1)


def test_a_rank_that_raises_after_the_signal_ends_all() -> None:
    with pytest.raises(Exception, match="boom"):
        on_ranks(raise_while_deciding, 3, timeout=60)


def train_by_hand(rank_dies: str, timeout: float) -> None:
    """Train as a rank that a platform has started: rank 1 stops or kills the process of rank 2, then asks."""
    with ddpkit.distributed(timeout=timedelta(seconds=timeout)) as job, ddpkit.stopping() as stop:
        pids = ddpkit.all_gather_object(os.getpid())
        try:
            for step in range(STEPS):
                if job.rank == 1 and step == 2:
                    if rank_dies == "stopped":
                        stop_process(pids[2])
                    else:
                        os.kill(pids[2], signal.SIGKILL)
                    stop.ask("is tired")
                if stop.now():
                    raise AssertionError("all cannot have answered")
                time.sleep(0.01)
        finally:
            if job.rank == 1:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pids[2], signal.SIGKILL)


def by_hand(rank_dies: str, timeout: float) -> list[Ended]:
    port = free_port()
    return run(train_by_hand, [platform_env(rank, 3, port) for rank in range(3)], rank_dies, timeout)


def test_a_rank_that_does_not_answer_is_named() -> None:
    ended = by_hand("stopped", 3.0)
    for rank in (0, 1):
        assert ended[rank].code == 1
        assert f"within 0:00:03: rank 2 ({HOST}) gave no answer." in ended[rank].output


def test_a_rank_that_is_killed_meanwhile_ends_all() -> None:
    ended = by_hand("killed", 60.0)
    for rank in (0, 1):
        assert ended[rank].code == 1
        assert "PeerError" in ended[rank].output
        assert "rank 2" in ended[rank].output


def stop_without_watch() -> str:
    try:
        with ddpkit.stopping():
            return ""
    except ddpkit.NotSetUpError as error:
        return str(error)


def _without_watch() -> str:
    with ddpkit.distributed(watch=False, timeout=timedelta(seconds=60)):
        return stop_without_watch()


def test_without_the_watch_it_is_refused() -> None:
    for said in ddpkit.spawn(_without_watch, 2):
        assert "setup(watch=True)" in said


# Workers of loaders


def slowly(worker: int) -> None:
    time.sleep(0.05)


def read_while_workers_start(method: str, number: int, epochs: int) -> list[int]:
    """Signal each worker as soon as there is one; return how many batches each epoch has."""
    options = {"num_workers": 2, "multiprocessing_context": method, "worker_init_fn": slowly}
    loader = ddpkit.make_loader(range(8), batch_size=2, **options)
    counts = []
    with ddpkit.stopping():
        for _ in range(epochs):
            batches = iter(loader)
            for worker in multiprocessing.active_children():
                os.kill(worker.pid, number)
            counts.append(len(list(batches)))
    return counts


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.storm)])
def test_workers_pass_over_signals_from_their_first_moment(method: str, number: signal.Signals) -> None:
    epochs = 10 if method == "fork" else 2
    assert testing.on_ranks(read_while_workers_start, 1, method, number, epochs, timeout=240) == [[4] * epochs]


def signal_while_workers_start() -> tuple[str | None, bool]:
    """A signal to this process is not lost meanwhile."""
    with ddpkit.stopping() as stop:
        loader = ddpkit.make_loader(range(8), batch_size=2, num_workers=2)
        timer = threading.Timer(0.005, os.kill, [os.getpid(), signal.SIGTERM])
        timer.start()
        batches = [iter(loader) for _ in range(10)]
        timer.join()
        is_stopped = stop.now()
        del batches
        return stop.reason, is_stopped


def test_a_signal_that_comes_while_workers_start_is_heard() -> None:
    assert on_ranks(signal_while_workers_start, 1, timeout=60) == [(f"rank 0 ({HOST}) got SIGTERM", True)]


# Handlers


@pytest.mark.parametrize("number", [signal.SIGKILL, 10_000, "SIGINT"])
def test_a_signal_that_nobody_can_handle_is_refused(number: Any) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with (
        pytest.raises(ValueError, match=r"stopping\(\) cannot handle signal"),
        ddpkit.stopping([signal.SIGTERM, number]),
    ):
        pass
    assert signal.getsignal(signal.SIGTERM) == before


def test_outside_the_main_thread_it_is_refused() -> None:
    said = []

    def enter() -> None:
        try:
            with ddpkit.stopping():
                pass
        except ValueError as error:
            said.append(str(error))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert "main thread" in said[0]


def test_the_former_handlers_are_put_back() -> None:
    former = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        with contextlib.suppress(ValueError), ddpkit.stopping():
            assert signal.getsignal(signal.SIGUSR1) is not signal.SIG_IGN
            raise ValueError
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, former)


def handlers() -> list[Any]:
    return [signal.getsignal(number) for number in SIGNALS]


def handle_in_many_blocks() -> None:
    """Blocks one after another and within each other: the handlers from before all of them come back."""
    former = handlers()
    with ddpkit.stopping() as stop:  # a stop that no signal has asked for
        stop.ask("is done")
        assert stop.now()
    assert handlers() == former
    for _ in range(3):
        with ddpkit.stopping() as stop:
            os.kill(os.getpid(), signal.SIGUSR1)
            while not stop.now():
                time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)  # as srun sends it once the first rank has ended: passed over
    with ddpkit.stopping([signal.SIGTERM, signal.SIGTERM]):
        with ddpkit.stopping([signal.SIGUSR2]):
            assert handled_signals() == {signal.SIGTERM, signal.SIGUSR2}
        assert handled_signals() == {signal.SIGTERM}
    assert handlers() == former


def test_however_many_blocks_there_are_the_handlers_from_before_come_back() -> None:
    testing.on_ranks(handle_in_many_blocks, 1, timeout=60, join=False, fresh=True)


def ask_outside_of_an_inner_block() -> list[bool]:
    with ddpkit.stopping() as outer:
        os.kill(os.getpid(), signal.SIGTERM)
        with ddpkit.stopping() as inner:
            return [inner.now(), outer.now()]


def test_a_block_within_another_forgets_nothing() -> None:
    assert testing.on_ranks(ask_outside_of_an_inner_block, 1, timeout=60, fresh=True) == [[True, True]]


def ask_too_late(until: Callable[[], bool]) -> str:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("ddpkit").addHandler(handler)
    with ddpkit.stopping() as stop:
        assert not stop.now()
        os.kill(os.getpid(), signal.SIGTERM)
        while not until():
            time.sleep(0.001)
    return "\n".join(said)


def at_once() -> bool:
    return True


def after_the_agreement() -> bool:
    return stop_agreement.current().decision is not None


@pytest.mark.parametrize("n, until", [(1, at_once), (2, at_once), (2, after_the_agreement)])
def test_a_signal_after_the_last_step_is_not_passed_over_in_silence(n: int, until: Callable[[], bool]) -> None:
    said, *_ = testing.on_ranks(partial(ask_too_late, until), n, timeout=60, fresh=True)
    assert f"rank 0 ({HOST}) got SIGTERM, but now() was not called again in the block of stopping()" in said


def be_interrupted() -> None:
    with ddpkit.stopping() as stop:
        print("ready", flush=True)
        while not stop.now():
            pass
        print("stopped", flush=True)
        time.sleep(60)


def wait_for(path: Path, word: str) -> None:
    while word not in path.read_text():
        time.sleep(0.02)


ENDING = """
import os, signal, sys, ddpkit

class Late:
    def __del__(self, kill=os.kill, pid=os.getpid()):
        kill(pid, 15)  # as srun does when the first rank has ended; this one is about to

late = Late()
with ddpkit.stopping() as stop:
    os.kill(os.getpid(), signal.SIGUSR1)
    while not stop.now():
        pass
sys.exit(stop.exit_code)
"""


def test_a_signal_that_comes_while_the_interpreter_ends_changes_no_exit_code() -> None:
    ended = launch([sys.executable, "-c", ENDING], timeout=60)[0]
    assert ended.code == 128 + signal.SIGUSR1, ended


def test_a_second_interrupt_ends_the_process_without_a_traceback(tmp_path: Path) -> None:
    output = tmp_path / "output"
    output.touch()
    process = begin(be_interrupted, {}, output=str(output))
    wait_for(output, "ready")
    os.kill(process.pid, signal.SIGINT)
    wait_for(output, "stopped")
    os.kill(process.pid, signal.SIGINT)  # as torchrun passes on what the terminal has sent to all
    time.sleep(2.1)
    assert process.is_alive()
    os.kill(process.pid, signal.SIGINT)
    process.join(60)
    assert process.exitcode == -signal.SIGINT
    said = output.read_text().splitlines()
    assert sorted(said) == [
        f"all ranks stop after this step: rank 0 ({HOST}) got SIGINT",
        f"rank 0 ({HOST}) got SIGINT: all ranks stop after the next step or two; "
        "another Ctrl-C ends this process at once, without saving",
        "ready",
        "stopped",
    ]


def end_a_child(number: int) -> int | None:
    """Signal a forked child of a rank that stops in good order; return what it ends with, None if it goes on."""
    with ddpkit.stopping() as stop:
        child = os.fork()
        if child == 0:
            while True:
                time.sleep(0.01)
        time.sleep(0.1)
        os.kill(child, number)
        deadline = time.monotonic() + (60 if number == signal.SIGTERM else 0.1)
        pid = 0
        while pid == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
            pid, status = os.waitpid(child, os.WNOHANG)
        if pid == 0:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        assert not stop.now(), "a child's signal is none to its rank"
        return os.waitstatus_to_exitcode(status) if pid else None


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, None), (signal.SIGUSR1, None)]
)
def test_a_forked_child_ends_by_sigterm_alone(number: int, code: int | None) -> None:
    assert on_ranks(end_a_child, 1, number, timeout=60) == [code]


def ask_before_joining() -> tuple[int, str | None]:
    rank = ddpkit.detect_launch().rank
    with ddpkit.stopping() as stop:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        with ddpkit.distributed(timeout=timedelta(seconds=60)):
            for step in range(STEPS):
                ddpkit.all_reduce(1)
                if stop.now():
                    return step, stop.reason
    raise AssertionError("the ranks have not stopped")


def test_a_signal_that_comes_before_the_ranks_have_met_counts() -> None:
    results = testing.on_ranks(ask_before_joining, 2, timeout=120, join=False)
    assert len(set(results)) == 1
    assert results[0][1] == f"rank 1 ({HOST}) got SIGTERM"


def test_without_a_job_each_block_begins_anew() -> None:
    for _ in range(2):
        with ddpkit.stopping() as stop:
            assert not stop.now()
            stop.ask("")
            assert stop.now()
    with ddpkit.distributed(), ddpkit.stopping() as stop:
        assert not stop.now(), "a job that begins later has not been asked"


def be_interrupted_at_the_end() -> None:
    with ddpkit.stopping() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.now()
    os.kill(os.getpid(), signal.SIGINT)  # torchrun's, of the same Ctrl-C
    time.sleep(2.1)
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
    except KeyboardInterrupt:
        print("interrupted")


def test_an_interrupt_after_the_block_is_the_same_for_a_while_and_then_another() -> None:
    (ended,) = run(be_interrupted_at_the_end, [{}], timeout=60)
    assert (ended.code, ended.output.splitlines()[-1]) == (0, "interrupted")


def be_slow_to_end() -> None:
    with ddpkit.stopping() as stop:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop.now()
    os.kill(os.getpid(), signal.SIGTERM)  # srun's, when another rank has ended with an exit code
    sys.exit(stop.exit_code)


def test_a_rank_that_has_stopped_is_let_end_with_its_own_code() -> None:
    (ended,) = run(be_slow_to_end, [{}], timeout=60)
    assert ended.code == 128 + signal.SIGUSR1


def stop_by_another_then_be_interrupted() -> str | None:
    with ddpkit.stopping() as stop:
        if ddpkit.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGINT)
        while not stop.now():
            ddpkit.all_reduce(1)
    if ddpkit.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGINT)  # the same Ctrl-C, which has come later to this node
    return stop.reason


def test_a_ctrl_c_that_reaches_a_rank_after_all_have_stopped_does_not_end_it() -> None:
    reason = f"rank 0 ({HOST}) got SIGINT"
    assert on_ranks(stop_by_another_then_be_interrupted, 2, timeout=60) == [reason, reason]
