"""Failures are real here: ranks raise, die, sit in collectives; every survivor must end soon and name the first."""

from __future__ import annotations

import ctypes
import gc
import logging
import math
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from processes import Ended, free_port, platform_env, run

import ddpkit
from ddpkit.collectives import consistency
from ddpkit.job import current_job, lifecycle
from ddpkit.launch import process_tree
from ddpkit.watch import thread as watching

LONG = timedelta(seconds=200)  # far beyond what the tests allow: nothing here may end by a time-out
HANG = 400.0  # seconds: longer than any test may take, however loaded the machine is
SOON = 20.0  # seconds: what is noticed at once is noticed within these, also on a loaded machine


def start(fault: str, place: str, watch: bool = True) -> None:
    with ddpkit.distributed(timeout=LONG, watch=watch) as context:
        pids = ddpkit.all_gather_object(os.getpid())
        if context.rank == int(os.environ["FAULTY"]):
            time.sleep(0.2)
            fail(fault, pids)
        try:
            stay(place)
        finally:
            print(f"\nfreed at {time.time():.3f}", flush=True)


def fail(fault: str, pids: Sequence[int] = ()) -> None:
    print(f"\nfailed at {time.time():.3f}", flush=True)
    if fault == "raise":
        raise ValueError("boom")
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "leave":
        ddpkit.teardown()
        os._exit(0)
    if fault == "raise and stay":  # its connections stay open, so nothing but the watch frees the others
        try:
            raise ValueError("boom")
        except ValueError as error:
            lifecycle.report(error)
            outlive(pids)
            os._exit(1)


def outlive(pids: Iterable[int]) -> None:
    """Wait until the other processes have ended."""
    for pid in set(pids) - {os.getpid()}:
        while process_tree.born(pid):
            time.sleep(0.05)


def stay(place: str) -> None:
    if place == "compute":
        while True:
            pass
    elif place == "sleep":
        time.sleep(HANG)
    elif place == "barrier":
        ddpkit.barrier()
    elif place == "all_reduce":
        dist.all_reduce(torch.ones(1))
    elif place == "deadlock":  # unlike a sleep, no signal interrupts it
        lock = ctypes.create_string_buffer(64)
        for _ in range(2):
            ctypes.CDLL(None).pthread_mutex_lock(lock)
    elif place == "helper":
        ddpkit.all_reduce_mean(1.0)


def freed_after(ended: list[Ended]) -> float:
    """Seconds from one rank's failure to the last survivor's exception; infinite if one was ended without any."""
    times = {word: [] for word in ("failed", "freed")}
    for end in ended:
        for line in end.output.splitlines():
            if line.startswith(("failed at", "freed at")):
                times[line.split()[0]].append(float(line.split()[2]))
    return max(times["freed"]) - times["failed"][0] if len(times["freed"]) == len(ended) - 1 else math.inf


CASES = [
    *[("raise", "compute"), ("kill", "all_reduce"), ("raise", "barrier"), ("kill", "barrier"), ("raise", "helper")],
    ("leave", "helper"),
]
MORE_CASES = [("kill", "compute"), ("raise", "sleep"), ("leave", "barrier")]


@pytest.mark.parametrize(
    ("fault", "place", "faulty"),
    [(*case, i % 2) for i, case in enumerate(CASES)]
    + [pytest.param(*case, 1 - i % 2, marks=pytest.mark.storm) for i, case in enumerate(CASES)]
    + [pytest.param(*case, faulty, marks=pytest.mark.storm) for case in MORE_CASES for faulty in (0, 1)],
)
def test_a_failed_rank_is_named_on_every_other_at_once(fault: str, place: str, faulty: int) -> None:
    port = free_port()
    envs = [platform_env(rank, 3, port, FAULTY=f"{faulty}") for rank in range(3)]
    ended = run(start, envs, fault, place)
    assert freed_after(ended) < SOON
    for rank, end in enumerate(ended):
        if rank == faulty:
            assert end.code == {"raise": 1, "kill": -signal.SIGKILL, "leave": 0}[fault]
            continue
        assert end.code == 1, end
        assert f"rank {faulty} (" in end.output, end.output
        assert "NOT been destroyed" not in end.output
        if fault == "raise":
            assert "ValueError: boom" in end.output and "in fail" in end.output, "the peer's traceback is shown"


def test_a_rank_is_freed_from_a_collective_while_the_one_that_failed_is_still_there() -> None:
    port = free_port()
    ended = run(start, [platform_env(rank, 3, port, FAULTY="1") for rank in range(3)], "raise and stay", "all_reduce")
    assert freed_after(ended) < SOON
    for end in (ended[0], ended[2]):
        assert end.code == 1 and "ValueError: boom" in end.output and "main thread" not in end.output, end.output


def test_a_rank_stuck_in_a_call_ends_with_the_verdict() -> None:
    port = free_port()
    envs = [platform_env(rank, 2, port, FAULTY="1") for rank in range(2)]
    stuck, _ = run(start, envs, "raise and stay", "deadlock")
    assert stuck.code == 1
    assert "Rank 0 ends: its main thread is in a call that does not return. rank 1 (" in stuck.output
    assert "ValueError: boom" in stuck.output


def test_without_the_watch_waits_still_end_with_the_failure() -> None:
    port = free_port()
    envs = [platform_env(rank, 3, port, FAULTY="1") for rank in range(3)]
    ended = run(start, envs, "raise", "barrier", False)
    assert freed_after(ended) < SOON
    assert [end.code for end in ended] == [1, 1, 1]
    assert all("rank 1 (" in end.output for end in (ended[0], ended[2]))


def fail_while_gradients_travel() -> None:
    with ddpkit.distributed(timeout=LONG, watch=False) as context:
        net = torch.nn.Linear(2, 1)
        net(torch.ones(1, 2)).sum().backward()
        ddpkit.average_gradients(net)
        pids = ddpkit.all_gather_object(os.getpid())
        if context.rank == 0:
            with ddpkit.averaging(net):
                raise ValueError("boom")
        outlive(pids)
        print("outlived it", flush=True)


def test_a_rank_that_fails_while_gradients_travel_does_not_wait_for_them() -> None:
    port = free_port()
    failed, other = run(fail_while_gradients_travel, [platform_env(rank, 2, port) for rank in range(2)])
    assert failed.code == 1 and "ValueError: boom" in failed.output
    assert "outlived it" in other.output


def with_a_child() -> None:
    """A forked child, such as a loader's worker, holds copies of the rank's descriptors."""
    with ddpkit.distributed(timeout=LONG) as context:
        ddpkit.barrier()
        if context.rank == 1:
            if os.fork() == 0:
                time.sleep(8)
                os._exit(0)
            print(f"\nfailed at {time.time():.3f}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            time.sleep(HANG)
        finally:
            print(f"\nfreed at {time.time():.3f}", flush=True)


def test_a_child_that_outlives_its_rank_does_not_hide_the_death() -> None:
    port = free_port()
    ended = run(with_a_child, [platform_env(rank, 2, port) for rank in range(2)])
    assert freed_after(ended) < SOON
    assert "rank 1 (" in ended[0].output and "lost" in ended[0].output


def ignore() -> None:
    with ddpkit.distributed(timeout=LONG) as context:
        pids = ddpkit.all_gather_object(os.getpid())
        if context.rank == 1:
            fail("raise and stay", pids)
        try:
            time.sleep(HANG)
        except Exception:
            pass
        start = time.monotonic()
        try:
            ddpkit.all_reduce_mean(1.0)
        except ddpkit.PeerError as error:
            print(f"still knows rank {error.rank}: {time.monotonic() - start < SOON}", flush=True)
            os._exit(0)


def test_a_peer_error_that_was_swallowed_ends_the_next_collective() -> None:
    port = free_port()
    survivor, _ = run(ignore, [platform_env(rank, 2, port) for rank in range(2)])
    assert "still knows rank 1: True" in survivor.output


def mismatch() -> None:
    with ddpkit.distributed(timeout=LONG) as context:
        if context.rank == 2:  # is busier than the others
            say = consistency.explain_mismatch
            consistency.explain_mismatch = lambda everyone: time.sleep(1) or say(everyone)
        ddpkit.all_reduce_mean(torch.zeros(2 + context.rank))


def test_an_error_that_all_ranks_raise_is_not_replaced_by_a_peers() -> None:
    port = free_port()
    ended = run(mismatch, [platform_env(rank, 3, port) for rank in range(3)])
    assert [end.code for end in ended] == [1, 1, 1]
    for end in ended:
        assert "MismatchError" in end.output and "PeerError" not in end.output, end.output


def swallow() -> None:
    with ddpkit.distributed(timeout=LONG) as context:
        ddpkit.barrier()
        if context.rank == 1:
            raise ValueError("boom")
        try:
            time.sleep(HANG)
        except ddpkit.PeerError as error:
            print("saved what was there", error.rank)


def test_a_survivor_may_catch_the_peer_error_and_end_in_its_own_way() -> None:
    port = free_port()
    survivor, _ = run(swallow, [platform_env(rank, 2, port) for rank in range(2)])
    assert survivor.code == 0 and "saved what was there 1" in survivor.output


def fail_and_join_again() -> None:
    models = []  # each holds its group, and that the store
    for attempt in range(2):
        try:
            with ddpkit.distributed(timeout=LONG) as context:
                models.append(ddpkit.wrap_model(torch.nn.Linear(2, 2)))
                if attempt == 0 and context.rank == 1:
                    raise ValueError("boom")
                print("sum", ddpkit.all_reduce(1.0))
        except (ValueError, ddpkit.PeerError) as error:
            print(type(error).__name__)


def test_ranks_may_join_again_after_a_failure() -> None:
    port = free_port()
    ended = run(fail_and_join_again, [platform_env(rank, 3, port) for rank in range(3)])
    for end, error in zip(ended, ("PeerError", "ValueError", "PeerError"), strict=True):
        assert end.code == 0 and error in end.output and "sum 3.0" in end.output, end.output


def time_out_in_groups() -> None:
    """Rank 2 waits for rank 1, which does not come, while rank 0 waits for rank 2, which cannot come."""
    with ddpkit.distributed(timeout=timedelta(seconds=20)) as context:
        groups = [dist.new_group(ranks, timeout=timedelta(seconds=3)) for ranks in ([0, 2], [1, 2])]
        if context.rank == 0:
            dist.all_reduce(torch.ones(1), group=groups[0])
        if context.rank == 2:
            dist.all_reduce(torch.ones(1), group=groups[1])
        time.sleep(20)


def wait_for_one_of_three() -> None:
    with ddpkit.distributed(timeout=timedelta(seconds=3)) as context:
        if context.rank == 0:
            dist.recv(torch.ones(1), 2)
        time.sleep(12)


def wait_for_one_of_some() -> None:
    with ddpkit.distributed(timeout=timedelta(seconds=20)) as context:
        some = dist.new_group([1, 2], timeout=timedelta(seconds=3))
        if context.rank == 1:
            dist.all_reduce(torch.ones(1), group=some, async_op=True).wait()  # which tells no group
        time.sleep(12)


def fail_alone_before() -> None:
    with ddpkit.distributed(timeout=timedelta(seconds=3)) as context:
        if context.rank == 1:
            time.sleep(15)
        if context.rank == 0:
            try:
                with current_job.peer_errors():
                    raise RuntimeError("NCCL error: unhandled system error")
            except RuntimeError:
                pass
        dist.all_reduce(torch.ones(1))


def gather_late() -> None:
    with ddpkit.distributed(timeout=timedelta(seconds=3)) as context:
        if context.rank == 0:
            dist.gather(torch.ones(1), [torch.ones(1), torch.ones(1)], 0)
        else:
            time.sleep(4)
            dist.gather(torch.ones(1), None, 0)


def part_ways() -> None:
    with ddpkit.distributed(timeout=timedelta(seconds=3)) as context:
        if context.rank == 1:
            dist.broadcast(torch.ones(1), 0)
        else:
            dist.all_reduce(torch.ones(1))


def leave_at_once() -> None:
    """Rank 0 leaves when it has just heard of rank 1's failure, before the watch raises it."""
    with ddpkit.distributed(timeout=LONG) as context:
        ddpkit.barrier()
        if context.rank == 1:
            raise ValueError("boom")
        session = current_job.current_session()
        while session.failures.known is None:
            pass
    print(f"left; a group is there: {dist.is_initialized()}", flush=True)


def test_news_that_come_while_a_rank_leaves_do_not_stop_it() -> None:
    port = free_port()
    leaver, _ = run(leave_at_once, [platform_env(rank, 2, port) for rank in range(2)])
    assert leaver.code == 0 and "left; a group is there: False" in leaver.output, leaver


class Slow:
    """A stream that takes its time, which is where a rank that logs much spends its own."""

    def write(self, text: str) -> None:
        end = time.monotonic() + 0.05
        while time.monotonic() < end:
            pass

    def flush(self) -> None:
        pass


def log_on() -> None:
    with ddpkit.distributed(timeout=LONG) as context:
        ddpkit.barrier()
        if context.rank == 1:
            time.sleep(0.5)
            fail("raise")
        slow = logging.Logger("slow")
        slow.addHandler(logging.StreamHandler(Slow()))
        try:
            for _ in range(300):
                slow.warning("step")
                for _ in range(100_000):
                    pass
        finally:
            print(f"\nfreed at {time.time():.3f}", flush=True)


def test_a_rank_that_hears_of_a_failure_while_it_logs_still_raises() -> None:
    port = free_port()
    ended = run(log_on, [platform_env(rank, 2, port) for rank in range(2)])
    assert freed_after(ended) < SOON
    assert ended[0].code == 1 and "ValueError: boom" in ended[0].output
    assert "Logging error" not in ended[0].output


def meet_a_stopped_host() -> None:
    """Rank 0 hosts the store and stops; with a group of the script's own, nothing is concluded from a meeting."""
    with ddpkit.distributed(timeout=LONG) as context:
        dist.new_group([0, 1])
        here, other = ddpkit.all_gather_object(os.getpid())
        if context.rank == 0:
            end = f"while kill -0 {other}; do sleep 0.1; done; kill -9 {here}"  # nobody else would end it
            subprocess.Popen(["sh", "-c", end], stderr=subprocess.DEVNULL)
            os.kill(here, signal.SIGSTOP)
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1))
        dist.all_reduce(torch.ones(1))


def wait_for_a_stopped_store() -> None:
    """Rank 0 hosts the store and stops, while the others wait there, in a call that nothing interrupts."""
    with ddpkit.distributed(timeout=LONG) as context:
        pids = ddpkit.all_gather_object(os.getpid())
        if context.rank == 0:
            live = " || ".join(f"kill -0 {pid}" for pid in pids[1:])
            end = f"while {live}; do sleep 0.1; done; kill -9 {pids[0]}"  # nobody else would end it
            subprocess.Popen(["sh", "-c", end], stderr=subprocess.DEVNULL)
            os.kill(pids[0], signal.SIGSTOP)
        try:
            ddpkit.barrier(timeout=timedelta(seconds=1))
        except ddpkit.PeerError as error:
            print(f"raised for rank {error.rank}: {error}", flush=True)
            raise


BREAKS: dict[Callable[[], None], int] = {  # what each does, and on how many ranks
    meet_a_stopped_host: 2,
    wait_for_a_stopped_store: 3,
    time_out_in_groups: 3,
    fail_alone_before: 3,
    wait_for_one_of_some: 3,
    wait_for_one_of_three: 3,
    gather_late: 2,
    part_ways: 3,
}


def break_something() -> None:
    globals()[os.environ["BREAKS"]]()


def test_why_a_collective_broke_is_said_and_who_has_no_part_in_it_is_not_blamed() -> None:
    """All wait for time-outs, and so at once; each begins when the one before it has joined."""
    envs, delays = [], []
    for broken, size in BREAKS.items():
        port = free_port()
        envs += [platform_env(rank, size, port, BREAKS=broken.__name__) for rank in range(size)]
        delays += [0.5, *[0.0] * (size - 1)]
    every = iter(run(break_something, envs, delays=delays))
    ended = {broken: [next(every) for _ in range(size)] for broken, size in BREAKS.items()}
    for silent in (time_out_in_groups, fail_alone_before):
        for end in ended[silent][::2]:
            assert end.code == 1 and "rank 1 (" in end.output and "does not answer" in end.output, end.output
    assert "at the collective that broke on rank 2" in ended[time_out_in_groups][0].output
    for end in ended[wait_for_one_of_some] + ended[wait_for_one_of_three]:
        assert end.code == 1 and "Timed out" in end.output and "does not answer" not in end.output, end.output
    assert ended[gather_late][0].code == 1 and "Timed out" in ended[gather_late][0].output
    for end in ended[gather_late]:  # they are in one collective, on different lines
        assert "MismatchError" not in end.output, end.output
    for end in ended[part_ways]:
        assert end.code == 1 and "MismatchError: The ranks were in different collectives" in end.output, end.output
        assert "dist.broadcast(torch.ones(1), 0)" in end.output, end.output
    for end in ended[meet_a_stopped_host][1:] + ended[wait_for_a_stopped_store][1:]:
        assert end.code == 1 and "rank 0 (" in end.output and "does not answer" in end.output, end
    for end in ended[wait_for_a_stopped_store][1:]:
        assert "raised for rank 0: rank 0 (" in end.output, end


def lose_the_watch() -> None:
    """The script closes descriptors that are not its own, which no thread survives that waits for them."""
    with ddpkit.distributed(timeout=LONG) as context:
        ddpkit.barrier()
        if context.rank == 1:
            os.close(current_job.job.watch.connections._selector.fileno())
        time.sleep(HANG)


def test_a_rank_whose_watch_breaks_down_fails_and_all_hear_why() -> None:
    port = free_port()
    ended = run(lose_the_watch, [platform_env(rank, 3, port) for rank in range(3)])
    for end in ended:
        assert end.code == 1, end
        assert "rank 1 (" in end.output and "unwatched: its watch failed" in end.output, end.output
    assert "Rank 1 fails: its watch failed" in ended[1].output, ended[1].output


def write_nonsense() -> None:
    """A stranger who reaches the store writes into it where a failure would stand."""
    with ddpkit.distributed(timeout=LONG) as context:
        ddpkit.barrier()
        if context.rank == 1:
            current_job.current_session().store.set("failure", '["nonsense"]')
            ddpkit.barrier()  # reads it
        time.sleep(HANG)


def test_nonsense_that_stands_in_the_store_does_not_blind_the_watch() -> None:
    port = free_port()
    ended = run(write_nonsense, [platform_env(rank, 2, port) for rank in range(2)])
    for end in ended:
        assert end.code == 1, end
        assert "which no rank of this job wrote" in end.output, end.output


def sockets_held() -> int:
    return sum(os.path.realpath(entry).rpartition("/")[2].startswith(("socket:", "anon")) for entry in open_files())


def open_files() -> list[str]:
    return [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]


def join_again_and_again() -> None:
    held = []
    for _ in range(4):
        with ddpkit.distributed(timeout=LONG):
            ddpkit.barrier()
        held.append(sockets_held())
    late = time.monotonic() + HANG
    while sockets_held() > held[0] and time.monotonic() < late:  # the store's host closes them on a thread of its own
        time.sleep(0.05)
    print("held", held[0], sockets_held())
    print("threads", *[thread.name for thread in threading.enumerate() if "ddpkit" in thread.name])


def test_teardown_leaves_no_descriptor_and_no_thread() -> None:
    port = free_port()
    for end in run(join_again_and_again, [platform_env(rank, 2, port) for rank in range(2)]):
        assert end.code == 0, end.output
        first, last = end.output.partition("held ")[2].splitlines()[0].split()
        assert int(last) <= int(first), end.output  # it may have held one that was just closing
        assert end.output.rstrip().endswith("threads"), end.output


def connect_at_the_second_attempt() -> tuple[str, bool, list[str], float]:
    held = sockets_held()
    connect = watching.connect

    def refuse(*_: object) -> socket.socket:
        raise OSError("no way")

    if os.environ["RANK"] == "1":
        watching.connect = refuse
    try:
        ddpkit.setup(timeout=LONG)
    except ddpkit.DdpkitError as error:
        said = f"{type(error).__name__}: {error}"
    watching.connect = connect
    late = time.monotonic() + HANG
    while sockets_held() > held and time.monotonic() < late:
        gc.collect()
        time.sleep(0.05)
    is_closed = sockets_held() <= held
    threads = [thread.name for thread in threading.enumerate() if "ddpkit" in thread.name]
    with ddpkit.distributed(timeout=LONG):
        return said, is_closed, threads, ddpkit.all_reduce(1.0)


def test_a_watch_that_cannot_connect_is_ended_and_the_ranks_may_join_again() -> None:
    zero, one = ddpkit.spawn(connect_at_the_second_attempt, 2)
    assert zero[0].startswith("PeerError: rank 1 (") and one[0].startswith("LaunchError: ")
    for said, *_ in (zero, one):
        assert "The watch cannot connect to rank 0 at 127.0.0.1:" in said and ": no way. Open the ports" in said
    assert zero[1:] == one[1:] == (True, [], 2.0)
