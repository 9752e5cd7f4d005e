from __future__ import annotations

import pickle
import re
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import on_ranks

import ddpkit
from ddpkit import BarrierTimeoutError, PeerError, get_rank
from ddpkit.collectives import sync
from ddpkit.job import current_job
from ddpkit.rendezvous import session as store_barrier
from ddpkit.rendezvous.session import StoreBarrier


def caught(fn: Any, *args: Any, **kwargs: Any) -> Any:
    """What `fn` raised, or None, and after how many seconds."""
    start = time.monotonic()
    try:
        fn(*args, **kwargs)
    except Exception as error:
        return error, time.monotonic() - start
    return None, time.monotonic() - start


SOON = 30.0  # seconds, of which a machine under load may need many; the time-outs that would else end a wait are longer
NEVER = timedelta(seconds=90)


def wait_until(happened: Callable[[], bool]) -> None:
    """Wait for what another rank does."""
    end = time.monotonic() + NEVER.total_seconds()
    while not happened():
        assert time.monotonic() < end, "another rank never did this"
        time.sleep(0.01)


def come_last(folder: str) -> bool:
    done = Path(folder, "done")
    if get_rank() == ddpkit.get_world_size() - 1:
        time.sleep(0.3)
        done.touch()
    ddpkit.barrier()
    return done.exists()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_what_is_done_before_a_barrier_is_seen_after_it(world_size: int, tmp_path: Path) -> None:
    assert all(on_ranks(come_last, world_size, str(tmp_path)))


def late_for_barrier() -> Any:
    store, timeout = current_job.current_session().store, NEVER
    if get_rank() == 1:
        wait_until(lambda: store.add("barrier 'epoch end'/1/arrived", 0) == 1)  # rank 3 is there
        timeout = timedelta(seconds=1)
    elif get_rank() != 3:
        wait_until(lambda: store.check(["gave up"]))
    error, seconds = caught(ddpkit.barrier, "epoch end", timeout)
    store.set("gave up", "")
    ddpkit.barrier()  # the ranks are still usable
    return error, seconds


def test_a_barrier_names_the_missing_on_every_rank_also_on_the_late_ones() -> None:
    results = on_ranks(late_for_barrier, 4)
    for rank, (error, seconds) in enumerate(results):
        assert isinstance(error, BarrierTimeoutError)
        assert [rank for rank, _ in error.missing] == [0, 2]
        assert [rank for rank, _ in error.arrived] == [1, 3]
        assert "barrier 'epoch end': 2 of 4 ranks" in str(error)
        assert ("arrived too late" in str(error)) is (rank in (0, 2))
        assert "within 1 s" in str(error) and seconds < SOON
        assert rank != 1 or seconds > 0.9


def test_a_barrier_refuses_a_time_out_that_is_not_positive() -> None:
    with pytest.raises(ValueError, match="positive"):
        ddpkit.barrier(timeout=timedelta(0))


ODD_NAMES = [
    "",
    "x" * 1001,
    "failure",
    "x/1",
    "x",
    "x/1/0",
    "left",
    "a\nb",
    "'",
    "\"'",
    "caf\udce9",
    "é/🏖️",
    "barrier",
    "x/1/why",
    "run_on_main/1",
]


def meet_at_odd_names() -> int:
    for name in [*ODD_NAMES, np.str_("numpy")]:
        for _ in range(2):
            ddpkit.barrier(name, NEVER)
            with ddpkit.together(name):
                pass
    return ddpkit.run_on_main(lambda: 7)


def test_a_name_may_be_any_text_and_collides_with_nothing() -> None:
    assert on_ranks(meet_at_odd_names, 2) == [7, 7]


def wait_elsewhere() -> Any:
    ddpkit.barrier()  # a rank notes where it waits after a second
    error, seconds = caught(ddpkit.barrier, "one" if get_rank() else "other", timedelta(seconds=4))
    ddpkit.barrier()
    return str(error), seconds


def test_a_rank_that_waits_elsewhere_is_named_with_its_place() -> None:
    (zero, _), (one, _) = on_ranks(wait_elsewhere, 2)  # the quicker one may be in the last barrier by then
    assert "barrier 'other': 1 of 2 ranks" in zero
    assert re.search("Rank 1 (waits in barrier( 'one')? instead|timed out in barrier 'one')", zero)
    assert "barrier 'one': 1 of 2 ranks" in one
    assert re.search("Rank 0 (waits in barrier( 'other')? instead|timed out in barrier 'other')", one)


def wait_in_vain_and_then_compute() -> str:
    if get_rank() == 0:
        caught(ddpkit.barrier, "in vain", timedelta(seconds=1))
    ddpkit.barrier()
    error = None
    if get_rank() == 0:
        time.sleep(2)
    else:
        error, _ = caught(ddpkit.barrier, "again", timedelta(seconds=1))
    ddpkit.barrier()
    return str(error)


def test_a_rank_that_has_given_up_waiting_is_not_said_to_wait() -> None:
    _, said = on_ranks(wait_in_vain_and_then_compute, 2)
    assert "barrier 'again': 1 of 2 ranks did not arrive" in said
    assert "Rank 0 timed out in barrier 'in vain'." in said and "instead" not in said


def break_and_end() -> str:
    ddpkit.barrier()
    if get_rank() == 0:
        session = current_job.current_session()
        key = sync._key(session, "barrier", "broken")
        broken = StoreBarrier(session, range(len(session.hosts)), key, timedelta(seconds=1))
        session.store.add(broken.counter, store_barrier._BROKEN_FLAG)  # and never comes to say why
        ddpkit.barrier()
        return ""
    error, _ = caught(ddpkit.barrier, "broken")
    ddpkit.barrier()
    return str(error)


def test_a_barrier_that_was_broken_without_a_reason_says_so() -> None:
    _, said = on_ranks(break_and_end, 2)
    assert said == "barrier 'broken': a rank timed out and ended before it gave the reason."


def wait_in_a_thread_until_another_has_ended() -> float | None:
    session = current_job.current_session()
    entered, done = threading.Event(), threading.Event()

    def wait() -> None:
        with session.bounded(timedelta(seconds=1)):
            entered.set()
            done.wait()

    thread = threading.Thread(target=wait)
    thread.start()
    entered.wait()
    with session.bounded(timedelta(seconds=2)):
        done.set()
        thread.join()
    return session.deadline


def test_a_wait_of_one_thread_leaves_no_deadline_behind_in_another() -> None:
    assert on_ranks(wait_in_a_thread_until_another_has_ended, 1, fresh=True) == [None]


def pass_a_number(everybody: bool) -> Any:
    timeout: Any = 5 if everybody or get_rank() == 1 else NEVER
    out = [caught(ddpkit.barrier, "x", timeout), caught(ddpkit.barrier, "x", np.timedelta64(5, "s"))]
    ddpkit.barrier("x")
    return out


@pytest.mark.parametrize("everybody", [True, False])
def test_a_time_out_without_a_unit_is_an_error_on_every_rank(everybody: bool) -> None:
    for rank, ((error, seconds), (other, _)) in enumerate(on_ranks(pass_a_number, 2, everybody)):
        assert "timeout must be a datetime.timedelta, such as timedelta(seconds=" in str(error) and seconds < SOON
        assert isinstance(error, TypeError if everybody or rank == 1 else PeerError)
        assert isinstance(other, TypeError)


def stop_by_a_tensor() -> Any:
    flag: Any = torch.tensor([True, False]) if get_rank() == ddpkit.get_world_size() - 1 else False
    return caught(ddpkit.stop_together, flag), ddpkit.stop_together(get_rank() == 0)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_flag_that_is_neither_true_nor_false_is_an_error_on_every_rank(world_size: int) -> None:
    for rank, ((error, seconds), stop) in enumerate(on_ranks(stop_by_a_tensor, world_size)):
        assert "flag must be True or False, got tensor" in str(error) and seconds < SOON
        assert isinstance(error, TypeError if rank == world_size - 1 else PeerError)
        assert stop


def exchange_too_much() -> Any:
    rank = get_rank()
    metrics = {f"/data/n{rank:02d}/{'deep/' * 40}{number}.JPEG": 1.0 for number in range(40_000)}
    errors = [caught(ddpkit.all_reduce_mean, metrics)[0]]
    op: Any = "x" * (9 << 20) if rank == 1 else "sum"
    errors.append(caught(ddpkit.all_reduce, 1.0, op)[0])
    return [f"{type(error).__name__}: {error}" for error in errors], ddpkit.all_reduce(1.0)


def test_texts_that_are_too_long_for_the_store_are_shortened() -> None:
    for rank, ((names, op), total) in enumerate(on_ranks(exchange_too_much, 2, fresh=True)):
        assert names.startswith("MismatchError: ") and "/data/n00/deep/" in names and "more" in names
        assert len(names) < 20_000
        assert ("MismatchError" if rank == 0 else "ValueError") in op and "xxxx" in op
        assert total == 2.0


def raise_in_together() -> Any:
    def block() -> None:
        with ddpkit.together("load"):
            if get_rank() == 1:
                raise ValueError("bad file")

    error, seconds = caught(block)
    with ddpkit.together("load"):  # all caught it, so all can go on
        pass
    return error, seconds


@pytest.mark.parametrize("world_size", [2, 3])
def test_if_one_rank_raises_in_together_all_raise_and_name_it(world_size: int) -> None:
    for rank, (error, seconds) in enumerate(on_ranks(raise_in_together, world_size)):
        assert seconds < SOON
        if rank == 1:
            assert isinstance(error, ValueError)
        else:
            assert isinstance(error, PeerError)
            assert (error.rank, error.error_type, error.message) == (1, "ValueError", "bad file")
            assert "in block" in error.traceback and "bad file" in error.traceback


def helpers() -> dict[str, Any]:
    rank, out = get_rank(), {}
    out["value"] = ddpkit.run_on_main(lambda: {"rank": get_rank()})
    out["arguments"] = ddpkit.run_on_main(int, "11", base=2)
    out["error"] = caught(ddpkit.run_on_main, int, "seven")[0]
    out["unpicklable"] = caught(ddpkit.run_on_main, lambda: lambda: 0)[0]
    out["only"] = ddpkit.main_process_only(lambda: "main")()
    out["stop"] = [ddpkit.stop_together(rank == ddpkit.get_world_size() - 1), ddpkit.stop_together(False)]
    with ddpkit.main_process_first():
        if rank == 0:
            time.sleep(0.5)
        out["time"] = time.time()
    with ddpkit.main_process_first(local=True):
        if rank == 0:
            time.sleep(0.3)
        out["local time"] = time.time()

    def first_raises() -> None:
        with ddpkit.main_process_first():
            if rank == 0:
                raise OSError("disk")
            out["others ran"] = True

    out["first"] = caught(first_raises)[0]
    ddpkit.barrier()
    return out


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_what_rank_zero_does_reaches_every_rank(world_size: int) -> None:
    results = on_ranks(helpers, world_size)
    for rank, out in enumerate(results):
        assert out["value"] == {"rank": 0} and out["arguments"] == 3
        assert out["only"] == ("main" if rank == 0 else None)
        assert out["stop"] == [True, False]
        assert out["time"] >= results[0]["time"] and out["local time"] >= results[0]["local time"]
        for name, kind in (("error", ValueError), ("first", OSError)):
            if rank == 0:
                assert type(out[name]) is kind
            else:
                assert isinstance(out[name], PeerError) and out[name].error_type == kind.__name__
        assert out["unpicklable"] is not None or world_size == 1, "what cannot be sent is an error on every rank"
        assert "others ran" not in out


def extremes() -> dict[str, Any]:
    store, out = current_job.current_session().store, {}
    out["size"] = len(ddpkit.run_on_main(bytes, 9 << 20))
    before = store.num_keys()
    for number in range(30):
        ddpkit.run_on_main(str, number)
        with ddpkit.main_process_first():
            pass
    ddpkit.barrier()
    out["keys"] = store.num_keys() - before
    ddpkit.barrier()

    def block() -> None:
        with ddpkit.together():
            if get_rank() == 0:
                raise SystemExit(2)

    start = time.monotonic()
    try:
        block()
    except BaseException as error:
        out["exit"] = type(error), str(error), time.monotonic() - start
    ddpkit.barrier()
    return out


@pytest.mark.parametrize("world_size", [2, 3])
def test_large_values_many_rounds_and_exits_are_carried_too(world_size: int) -> None:
    for rank, out in enumerate(on_ranks(extremes, world_size)):
        assert out["size"] == 9 << 20
        assert out["keys"] < 10
        kind, text, seconds = out["exit"]
        assert kind is (PeerError if rank else SystemExit) and seconds < SOON
        assert not rank or ("rank 0" in text and "SystemExit: 2" in text)


@pytest.mark.parametrize("name", ["barrier", "stop_together", "all_reduce_mean", "broadcast", "check_replicas"])
def test_a_collective_before_setup_is_an_error_that_says_so(name: str) -> None:
    with pytest.raises(ddpkit.NotSetUpError, match=r"2 processes were launched.*ddpkit.setup\(\)"):
        ddpkit.spawn(call_before_setup, 2, name)


def call_before_setup(name: str) -> None:
    import torch

    arguments = {"barrier": (), "stop_together": (True,), "check_replicas": (torch.nn.Linear(1, 1),)}
    getattr(ddpkit, name)(*arguments.get(name, (1.0,)))


class Pruned(Exception):
    """As a search's exception: with an argument and a text of its own."""

    def __init__(self, trial: int) -> None:
        super().__init__(trial)
        self.trial = trial

    def __str__(self) -> str:
        return f"trial {self.trial}"


def fail(kind: type[Exception]) -> None:
    raise kind(3)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("kind", [Pruned, FileNotFoundError, KeyError, ddpkit.CheckpointError])
def test_an_except_around_what_one_rank_does_catches_on_every_rank(kind: type[Exception]) -> None:
    for place in ("run_on_main", "together", "main_process_first"):
        try:
            if place == "run_on_main":
                ddpkit.run_on_main(fail, kind)
            elif place == "together":
                with ddpkit.together():
                    if ddpkit.is_main_process():
                        fail(kind)
            else:
                with ddpkit.main_process_first():
                    fail(kind)
        except kind as error:
            assert isinstance(error, PeerError) == (not ddpkit.is_main_process())
            if isinstance(error, PeerError):
                found = pickle.loads(pickle.dumps(error))
                assert (type(found), found.error_type, str(found)) == (PeerError, kind.__name__, str(error))
                assert str(error).startswith("rank 0 (")
    assert ddpkit.all_reduce_mean(1.0) == 1.0


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("kind", [MemoryError, RuntimeError])
def test_other_exceptions_stay_a_peers_error_elsewhere(kind: type[Exception]) -> None:
    with pytest.raises(kind if ddpkit.is_main_process() else PeerError):
        ddpkit.run_on_main(fail, kind)
