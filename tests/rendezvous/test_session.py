from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from ddpkit.errors import BarrierTimeoutError, LaunchError, PeerError
from ddpkit.rendezvous import session as session_module
from ddpkit.rendezvous.failures import Failure, record_failure
from ddpkit.rendezvous.session import Session
from ddpkit.rendezvous.store import read_texts


def on_threads(world_size: int, fn: Callable[[Session], Any]) -> tuple[list[Any], dist.TCPStore]:
    """Runs `fn(session)` for each rank on a thread with a client of its own; returns results or exceptions."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results: list[Any] = [None] * world_size

    def work(rank: int) -> None:
        client = dist.TCPStore("127.0.0.1", server.port, is_master=False)
        hosts = [f"host{rank}" for rank in range(world_size)]
        try:
            results[rank] = fn(Session(client, rank, hosts, timedelta(seconds=120), nodes=hosts, peer_lost=str))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results, server


@pytest.mark.parametrize(
    "world_size", [1, 2, 3, 61, *(pytest.param(n, marks=pytest.mark.storm) for n in (60, 70, 130))]
)
def test_nobody_leaves_a_meeting_before_everybody_has_come(world_size: int) -> None:
    arrived: list[int] = []

    def meet(session: Session) -> int:
        arrived.append(session.rank)
        session.barrier(session.count("x"))
        return len(arrived)

    results, _ = on_threads(world_size, meet)
    assert results == [world_size] * world_size


def test_each_wait_for_a_value_and_what_follows_its_time_out_have_time_of_their_own() -> None:
    def find_deadlines(session: Session) -> list[float]:
        left: list[float] = []

        def ready() -> bool:
            left.append((session.deadline or 0) - time.monotonic())
            return False

        with session.bounded(timedelta(seconds=-60)):
            session.until(ready, timedelta(seconds=0.2), lambda: None)
        return left

    ((first, *_, last),), _ = on_threads(1, find_deadlines)
    assert first == pytest.approx(0.2, abs=0.2)
    assert last > session_module._ROLL_CALL + session_module._AT_ONCE.total_seconds()


def slow_link(port: int, seconds: float) -> int:
    """Return a port that leads to another; each answer from there comes so many seconds late."""
    listener = socket.create_server(("127.0.0.1", 0))

    def carry(source: socket.socket, target: socket.socket, pause: float) -> None:
        with contextlib.suppress(OSError), source:
            while data := source.recv(1 << 16):
                time.sleep(pause)
                target.sendall(data)

    def serve() -> None:
        with listener:
            near, _ = listener.accept()
        far = socket.create_connection(("127.0.0.1", port))
        for way in ((near, far, 0.0), (far, near, seconds)):
            threading.Thread(target=carry, args=way, daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    return int(listener.getsockname()[1])


class Noted(dict[int, Any]):
    """Notes all values that it gets."""

    def __init__(self) -> None:
        self.values_set: list[Any] = []

    def __setitem__(self, key: int, value: Any) -> None:
        self.values_set.append(value)
        super().__setitem__(key, value)


def test_a_slow_store_prolongs_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    late = 0.5  # seconds of each answer
    monkeypatch.setattr(session_module, "_AFTERWARDS", timedelta(seconds=2))
    monkeypatch.setattr(session_module, "_ROLL_CALL", 0.1)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", slow_link(server.port, late), is_master=False)
    session = Session(client, 0, ["a", "b"], timedelta(seconds=1), nodes="ab", peer_lost=str)
    session.deadlines = Noted()
    with pytest.raises(BarrierTimeoutError):
        session.barrier("x/1")
    (first, polls, _, afterwards, *inner) = [end for end, _ in session.deadlines.values_set]
    assert polls < first + 0.7 * late, "the first call is a part of the time-out"
    assert max(inner) == afterwards, "what follows the time-out is not prolonged"


def test_those_who_miss_a_meeting_are_named() -> None:
    def meet(session: Session) -> None:
        if session.rank in (0, 59, 60, 69):
            return
        if session.rank != 1:
            session.barrier("here/1")
            return
        while arrived(session) < 65:  # all but this one
            time.sleep(0.01)
        session.barrier("here/1", timedelta(seconds=0.1))

    def arrived(session: Session) -> int:
        return session.store.add("here/1/arrived", 0)

    results, _ = on_threads(70, meet)
    errors = [result for result in results if result is not None]
    assert len(errors) == 66
    for error in errors:
        assert isinstance(error, BarrierTimeoutError)
        assert error.missing == [(rank, f"host{rank}") for rank in (0, 59, 60, 69)]
        assert len(error.arrived) == 66


def test_a_rank_that_waits_reads_one_counter_however_many_ranks_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    read = set()
    add = dist.Store.add

    def note(store: dist.Store, key: str, amount: int) -> int:
        if amount == 0:
            read.add(key)
        return add(store, key, amount)

    monkeypatch.setattr(dist.Store, "add", note)

    def meet(session: Session) -> None:
        if session.rank == 100:
            time.sleep(0.1)
        session.barrier("x/1")

    results, _ = on_threads(130, meet)
    assert results == [None] * 130
    assert read == {"x/1/arrived"}


def test_a_meeting_ends_alike_for_the_one_who_gives_up_and_the_one_who_just_comes() -> None:
    gave_up = threading.Event()

    def meets(session: Session, timeout: timedelta) -> bool:
        try:
            session.barrier(session.count("x"), timeout)
        except BarrierTimeoutError:
            gave_up.set()
            return False
        return True

    def meet(session: Session) -> list[bool]:
        long, short = timedelta(seconds=120), timedelta(milliseconds=10)
        outcomes = [meets(session, long)]
        session.barrier(session.count("between"))
        if session.rank == 1:
            gave_up.wait()
        outcomes.append(meets(session, short))
        for number in range(60):
            session.barrier(session.count("between"))
            if session.rank == 1:
                time.sleep(0.005 + number * 1e-3)  # before, about when, or after the other gives up
            outcomes.append(meets(session, short))
        return outcomes

    (one, other), _ = on_threads(2, meet)
    assert one == other
    assert one[:2] == [True, False]


def test_a_failure_that_becomes_known_while_the_ranks_are_asked_what_they_do_is_raised() -> None:
    def meet(session: Session) -> None:
        if session.rank == 0:
            failure = Failure(1, "host1", "SystemExit", "it ended with exit code 1", "")
            asking = SimpleNamespace(show_ranks=lambda: record_failure(session.store, failure))
            session.watch = lambda: asking
            session.barrier("x/1", timedelta(milliseconds=10))

    (error, _), _ = on_threads(2, meet)
    assert isinstance(error, PeerError) and error.error_type == "SystemExit", error


def test_meetings_and_exchanges_leave_a_bounded_number_of_keys() -> None:
    def meet(session: Session) -> None:
        for number in range(50):
            assert session.exchange(f"{session.rank}-{number}") == [f"{rank}-{number}" for rank in range(3)]
            session.barrier(session.count("barrier"))

    results, server = on_threads(3, meet)
    assert results == [None] * 3
    assert server.num_keys() < 10


def test_rank_zero_alone_reads_what_all_have_said(monkeypatch: pytest.MonkeyPatch) -> None:
    readers = []

    def meet(session: Session) -> list[list[str]]:
        return [session.exchange("the same"), session.exchange(f"{session.rank // 2}")]

    def note(store: dist.Store, keys: list[str]) -> list[str]:
        readers.append(len(keys))
        return read_texts(store, keys)

    monkeypatch.setattr(session_module, "read_texts", note)
    results, _ = on_threads(70, meet)
    assert results == [[["the same"] * 70, [f"{rank // 2}" for rank in range(70)]]] * 70
    assert readers == [70, 70]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_texts_of_any_length_are_exchanged_and_leave_no_keys(world_size: int) -> None:
    texts = [character * 1_500_000 for character in ("é", "b", "")][:world_size]

    def meet(session: Session) -> list[list[str]]:
        return [session.exchange(texts[session.rank]), session.exchange("short")]

    results, server = on_threads(world_size, meet)
    assert results == [[texts, ["short"] * world_size]] * world_size
    assert server.num_keys() < 10


def test_a_rank_zero_that_comes_but_says_nothing_is_named() -> None:
    def meet(session: Session) -> None:
        if session.rank == 0:
            session.barrier("exchange/1")
        else:
            session.exchange("one", timeout=timedelta(seconds=0.3))

    (_, error), _ = on_threads(2, meet)
    assert isinstance(error, BarrierTimeoutError) and error.missing == [(0, "host0")]


@pytest.mark.parametrize(
    "garbage", ["", "x", "0", "0 {}", '0 {"runs": [["a", 1]]}', '0 {"runs": [["a", 3], ["b", -1]]}']
)
def test_an_answer_that_rank_zero_did_not_write_is_refused(garbage: str) -> None:
    def meet(session: Session) -> None:
        if session.rank == 0:
            session.store.set("exchange/1/answer", garbage)
            session.barrier("exchange/1")
        else:
            session.exchange("one")

    (_, error), _ = on_threads(2, meet)
    assert isinstance(error, LaunchError) and "exchange" in str(error)


def test_names_that_are_used_once_leave_no_keys() -> None:
    def meet(session: Session) -> None:
        for number in range(20):
            session.barrier(session.count(f"barrier {number}"), timedelta(seconds=60))
        session.barrier(session.count("last"), timedelta(seconds=60))

    results, server = on_threads(3, meet)
    assert results == [None] * 3
    assert server.num_keys() < 5


def test_a_wait_ends_with_the_first_recorded_failure() -> None:
    def meet(session: Session) -> None:
        if session.rank == 1:
            time.sleep(0.1)
            record_failure(session.store, Failure.of(1, KeyError("a")))
            record_failure(session.store, Failure.of(1, KeyError("b")))
            first = session.failures.look_up()
            assert first is not None and first.message == "'a'", "the first failure stands"
        else:
            session.barrier("x/1")

    results, _ = on_threads(3, meet)
    assert results[1] is None
    for error in (results[0], results[2]):
        assert isinstance(error, PeerError) and (error.rank, error.error_type) == (1, "KeyError")


def test_a_wait_for_a_rank_that_has_left_ends_at_once() -> None:
    def meet(session: Session) -> None:
        session.failures.left.append(1)  # what the watch does
        if session.rank == 0:
            session.barrier("x/1")

    results, _ = on_threads(2, meet)
    assert isinstance(results[0], PeerError) and results[0].error_type == "left"
