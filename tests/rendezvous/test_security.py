"""A stranger who knows host and port of the store: it has no authentication, so he may write what he likes."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import begin, free_port, platform_env, run
from test_session import on_threads

import ddpkit
from ddpkit.rendezvous.generation import Generation, join
from ddpkit.rendezvous.members import Member, Members
from ddpkit.rendezvous.session import Session

JOINING = ["ddpkit/1/claim/1", "ddpkit/1/members", "ddpkit/1/failure", "ddpkit/1/claims", "ddpkit/generation"]
JOINED = [
    "ddpkit/1/failure",
    "ddpkit/1/barrier/1/arrived",
    "ddpkit/1/together/1/why",
    "ddpkit/1/run_on_main/1",
    "ddpkit/1/run_on_main/1/arrived",
    "ddpkit/1/main_process_first/1/arrived",
    "ddpkit/1/exchange/1/from/0",
    "ddpkit/1/stop_together/1/flags",
]


class Payload:
    """What runs a command on whoever unpickles it."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.folder}/ran-$$",)


def wait_for(*paths: str) -> None:
    end = time.monotonic() + 120
    while not all(map(os.path.exists, paths)):
        assert time.monotonic() < end, paths
        time.sleep(0.01)


def train(folder: str, joins_late: bool) -> None:
    """Calls everything that waits, once the stranger is ready for it."""
    rank = os.environ["RANK"]
    if joins_late and rank == "1":
        wait_for(f"{folder}/planted")
    with ddpkit.distributed(timeout=timedelta(seconds=5 if joins_late else 45)):
        Path(folder, f"joined-{rank}").touch()
        wait_for(f"{folder}/planted")
        assert ddpkit.run_on_main(lambda: [1, 2]) == [1, 2]
        ddpkit.barrier()
        with ddpkit.together():
            pass
        with ddpkit.main_process_first():
            pass
        ddpkit.stop_together(False)
        model = torch.nn.Linear(1, 1)
        ddpkit.wrap_model(model)
        ddpkit.check_replicas(model)
        print("done")


def attack(port: int, folder: str, keys: list[str], after: list[str]) -> None:
    """Writes a payload under these keys and all that there are; then, until the job has gone, in place of values."""
    wait_for(*(f"{folder}/{name}" for name in after))
    store = _open(port)
    payload = pickle.dumps(Payload(folder))
    for key in [*keys, *_listed(store)]:
        store.set(key, payload)
    Path(folder, "planted").touch()
    with contextlib.suppress(dist.DistError):
        while True:
            for key in (key for key in _listed(store) if "run_on_main" in key):
                store.set(key, b"=" + payload)
            for number in range(1, 4):  # a whole value, as it once travelled
                store.set(f"ddpkit/1/run_on_main/{number}/0", b"=" + payload)
                store.set(f"ddpkit/1/run_on_main/{number}", b"1")
            time.sleep(0.001)


def _open(port: int) -> dist.TCPStore:
    end = time.monotonic() + 120
    while True:
        try:
            return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
        except dist.DistNetworkError:
            assert time.monotonic() < end


def _listed(store: Any) -> list[str]:
    keys = store.list_keys() if hasattr(store, "list_keys") else []  # torch 2.6 has no such call
    return [key for key in keys if "group" not in key]  # torch's own: addresses


@pytest.mark.parametrize("joins_late", [True, False], ids=["before the ranks join", "when they have joined"])
@pytest.mark.parametrize("all_keys", [True, False], ids=["every key", "values"])
def test_nothing_that_a_stranger_writes_is_executed(tmp_path: Path, joins_late: bool, all_keys: bool) -> None:
    port, folder = free_port(), str(tmp_path)
    keys: list[str] = []
    if all_keys:
        keys = JOINING if joins_late else JOINED
    after = [] if joins_late else ["joined-0", "joined-1"]
    stranger = begin(attack, {}, port, folder, keys, after, output=f"{folder}/log")
    ended = run(train, [platform_env(rank, 2, port) for rank in range(2)], folder, joins_late)
    stranger.join(120)
    assert stranger.exitcode == 0, Path(folder, "log").read_text()
    assert not list(tmp_path.glob("ran-*")), "the stranger's command ran"
    for end in ended:
        assert end.code is not None, end.output
        assert ("done" if end.code == 0 else "Docs: https://") in end.output, end.output


WHO = {"host": "h", "type": "t", "message": "m", "traceback": ""}
GARBAGE = {
    "a pickle": pickle.dumps(Payload("/nowhere")),
    "deep": b"[" * 100_000,
    "null": b"null",
    "a list": b"[]",
    "a huge number": b"1" * 5_000,
    "a word for a number": json.dumps(WHO | {"rank": "0"}).encode(),
    "a truth for a number": json.dumps(WHO | {"rank": True}).encode(),
    "a field too many": json.dumps(WHO | {"rank": 0, "more": 0}).encode(),
    "megabytes": b'"' + b"x" * 4_000_000 + b'"',
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE.keys())
@pytest.mark.parametrize("key", ["failure", "x/1/why"])
def test_garbage_in_the_store_ends_a_wait_with_its_key(key: str, garbage: bytes) -> None:
    def meet(session: Session) -> None:
        if session.rank == 1:
            session.store.set(key, garbage)
            if key == "x/1/why":
                session.store.add("x/1/arrived", 1 << 40)  # somebody has given up, and this is why
        else:
            session.barrier("x/1", timedelta(seconds=120))

    (error, _), _ = on_threads(2, meet)
    assert isinstance(error, ddpkit.LaunchError) and f"under {key!r}, which no rank" in str(error)
    assert len(str(error)) < 500


def test_a_place_of_a_rank_with_too_many_digits_is_refused() -> None:
    def meet(session: Session) -> None:
        why = {"missing": [1], "seconds": 1.0, "elsewhere": [(0, "somewhere")]}
        session.store.set("x/1/why", json.dumps(why).replace("[0, ", f"[{'9' * 5_000}, "))
        session.store.add("x/1/arrived", 1 << 40)
        session.barrier("x/1")

    (error, _), _ = on_threads(2, meet)
    assert isinstance(error, ddpkit.LaunchError) and "which no rank of this job wrote" in str(error)


def test_the_failure_that_a_stranger_reports_may_be_long() -> None:
    def meet(session: Session) -> None:
        if session.rank == 0:
            long = {"message": "x" * 3_000_000, "traceback": "y" * 3_000_000}
            session.store.set("failure", json.dumps(WHO | {"rank": 1} | long))
            session.barrier("x/1")

    (error, _), _ = on_threads(2, meet)
    assert isinstance(error, ddpkit.PeerError) and len(str(error)) < 120_000


@pytest.mark.parametrize("rank", [2, -2])
def test_the_failure_of_a_rank_that_does_not_exist_is_refused(rank: int) -> None:
    def meet(session: Session) -> None:
        if session.rank == 0:
            session.store.set("failure", json.dumps(WHO | {"rank": rank}))
            session.barrier("x/1")

    (error, _), _ = on_threads(2, meet)
    assert isinstance(error, ddpkit.LaunchError) and "under 'failure', which no rank" in str(error)


@pytest.mark.parametrize("count", [4, 1 << 62, (1 << 63) - 1])
def test_a_counter_that_no_rank_made_is_not_a_meeting(count: int) -> None:
    def meet(session: Session) -> None:
        if session.rank == 1:
            session.store.set("x/1/arrived", f"{count}")
        time.sleep(0.1)
        session.barrier("x/1", timedelta(seconds=2))

    results, _ = on_threads(2, meet)
    assert all(isinstance(error, ddpkit.DdpkitError) for error in results), results


@pytest.mark.parametrize("text", ["", "a word", "\x80\x04", "9" * 40], ids=["nothing", "word", "pickle", "huge"])
def test_a_text_in_place_of_a_counter_ends_the_wait_as_the_loss_of_the_store_does(text: str) -> None:
    def meet(session: Session) -> None:
        session.store.set("x/1/arrived", text)
        if session.rank == 0:
            session.barrier("x/1", timedelta(seconds=0.1))

    (error, _), _ = on_threads(2, meet)
    assert isinstance(error, ddpkit.PeerError) and "the connection to the store" in str(error), error


@pytest.mark.parametrize("key", ["ddpkit/generation", "ddpkit/1/claims", "ddpkit/1/readers"])
def test_a_text_in_place_of_a_counter_ends_the_joining(key: str) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    rank = 0 if key.endswith("claims") else 1
    if rank == 1:
        server.add("ddpkit/generation", 1)
    server.set(key, "a word")
    if key.endswith("readers"):
        server.set("ddpkit/1/failure", json.dumps(WHO | {"rank": 0}))
    with pytest.raises(ddpkit.LaunchError, match="lost the store while joining"):
        join(server, Member(rank, 2, None, False), timedelta(seconds=5))


def test_a_text_that_no_rank_wrote_is_refused() -> None:
    def exchange(session: Session) -> list[str]:
        if session.rank == 0:
            return session.exchange("zero")
        session.store.set("exchange/1/from/1", b"\x80\x04")
        session.barrier("exchange/1")
        return []

    results, _ = on_threads(2, exchange)
    assert "exchange/1/from/1" in str(results[0]) and isinstance(results[0], ddpkit.LaunchError)


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE.keys())
@pytest.mark.parametrize("key", ["claim/1", "claimant/1", "members", "failure"])
def test_garbage_in_the_store_ends_the_joining(key: str, garbage: bytes) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    rank = 1 if key == "members" else 0
    if rank == 1:
        server.add("ddpkit/generation", 1)
    generation = dist.PrefixStore("ddpkit/1", server)
    generation.set("claimant/1", "1")
    generation.set(key, garbage)
    generation.add("claims", 1)
    with pytest.raises(ddpkit.LaunchError, match=f"under '{key}', which no rank"):
        join(server, Member(rank, 2, None, False), timedelta(seconds=60))


def test_garbage_in_place_of_a_failure_does_not_hinder_the_report_of_another() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    generation = Generation.new(server)
    generation.store.set("failure", "garbage")
    with socket.create_server(("127.0.0.1", 0)) as watch:
        generation.publish(Members("token", watch.getsockname(), ["one"], [0], [1]))
        generation.fail("two processes have one rank")
        connection, _ = watch.accept()
        with connection:
            assert b"two processes have one rank" in connection.recv(1 << 16)


NODES = {"none": [], "too few": [0], "too many": [0, 0, 1], "of no node": [0, 2], "of less than nothing": [0, -1]}


@pytest.mark.parametrize("node_of", NODES.values(), ids=NODES.keys())
def test_members_that_are_not_of_this_job_is_refused(node_of: list[int]) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    server.add("ddpkit/generation", 1)
    members = {"token": "a", "watch_address": None, "nodes": ["one", "two"]}
    lists = {"node_of": node_of, "sharers": [1] * len(node_of)}
    dist.PrefixStore("ddpkit/1", server).set("members", json.dumps(members | lists))
    with pytest.raises(ddpkit.LaunchError, match="'members', which no rank"):
        join(server, Member(1, 2, None, False), timedelta(seconds=60))
