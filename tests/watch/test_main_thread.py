"""A peer's failure is raised in the main thread, whatever the script does with signals, and until it is handled."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from processes import Ended, free_port, platform_env, run

import ddpkit
from ddpkit.job import current_job, lifecycle
from ddpkit.watch.main_thread import MainThread

LONG = timedelta(seconds=500)
FOREVER = 600.0  # seconds: longer than any test may take, so that only a rank that has not heard meets it


def beside_a_failure(program: Callable[[], None]) -> None:
    """Rank 1 fails and stays, so that nothing but the watch tells rank 0, which runs the program."""
    with ddpkit.distributed(timeout=LONG) as context:
        survivor = ddpkit.all_gather_object(os.getpid())[0]
        if context.rank == 1:
            fail_and_stay(survivor)
        try:
            program()
        finally:
            print("left the program", flush=True)


def fail_and_stay(survivor: int) -> None:
    time.sleep(0.5)
    lifecycle.report(ValueError("boom"))
    with contextlib.suppress(ProcessLookupError):
        while True:
            os.kill(survivor, 0)
            time.sleep(0.05)
    os._exit(1)


def survivor(program: Callable[[], None]) -> Ended:
    port = free_port()
    return run(beside_a_failure, [platform_env(rank, 2, port) for rank in range(2)], program)[0]


@pytest.fixture(scope="module")
def ends(request: pytest.FixtureRequest) -> dict[Callable[[], None], Ended]:
    """How the survivor ends in each program of the tests that are run: side by side, for they only wait."""
    items = [item for item in request.session.items if item.path == request.path and "ends" in item.fixturenames]
    programs = [item.callspec.params["program"] for item in items]  # type: ignore[attr-defined]
    with ThreadPoolExecutor(len(programs)) as pool:
        return dict(zip(programs, pool.map(survivor, programs), strict=True))


def heard(end: Ended) -> None:
    assert end.code == 1, end.output
    assert "PeerError: rank 1 (" in end.output and "ValueError: boom" in end.output, end.output
    assert "left the program" in end.output and " ends: " not in end.output, end.output


def say(*_: object) -> None:
    print("my own handler", flush=True)


def compute(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def with_a_handler_for_urgent_data() -> None:
    signal.signal(signal.SIGURG, say)
    os.kill(os.getpid(), signal.SIGURG)
    time.sleep(FOREVER)


def with_urgent_data_blocked() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGURG])
    time.sleep(FOREVER)


def with_all_signals_blocked() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    while True:
        time.sleep(0.01)


def in_an_idle_event_loop() -> None:
    asyncio.run(asyncio.sleep(FOREVER))


def in_a_busy_event_loop() -> None:
    asyncio.run(much_to_do())


async def much_to_do() -> None:
    """The main task waits for longer than the test, and short tasks whose results nobody asks for follow each other."""

    async def step() -> None:
        compute(0.02)

    async def steps() -> None:
        while True:
            asyncio.get_running_loop().create_task(step())
            await asyncio.sleep(0.03)  # so that it also waits, which is when nothing gets lost

    await steps()


SLOW = """
def _call_soon(loop, callback, args, context):
    compute(0.02)
    return former(loop, callback, args, context)
"""


def in_the_bookkeeping_of_an_event_loop() -> None:
    """What is raised there makes the loop forget the task, which it waits for when it closes."""

    async def main() -> None:
        while True:
            await asyncio.sleep(0)
            for _ in range(500_000):  # here it may be raised
                pass

    loops = asyncio.base_events
    names = {"former": loops.BaseEventLoop._call_soon, "compute": compute}
    exec(compile(SLOW, loops.__file__, "exec"), names)
    compute.__code__ = compute.__code__.replace(co_filename=loops.__file__)
    loops.BaseEventLoop._call_soon = names["_call_soon"]
    asyncio.run(main())


def in_callbacks_of_weak_references() -> None:
    class Thing:
        pass

    def busy(_: object) -> None:
        compute(0.3)

    while True:
        thing = Thing()
        reference = weakref.ref(thing, busy)
        del thing
        compute(0.3)
        del reference


def in_finalisers() -> None:
    class Thing:
        def __del__(self) -> None:
            compute(0.3)

    while True:
        Thing()
        compute(0.3)


def after_it_was_swallowed_once() -> None:
    with contextlib.suppress(Exception):
        time.sleep(FOREVER)
    print("swallowed", flush=True)
    time.sleep(FOREVER)


def after_a_barrier_whose_error_was_swallowed() -> None:
    with contextlib.suppress(Exception):
        ddpkit.barrier()
    print("swallowed", flush=True)
    time.sleep(FOREVER)


def with_a_handler_of_c() -> None:
    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda _: None)
    ctypes.CDLL(None).signal(signal.SIGURG, handler)
    time.sleep(FOREVER)


def while_an_event_loop_waits_for_its_threads() -> None:
    asyncio.run(asyncio.to_thread(time.sleep, 15))  # which Python waits for in the end, too


def while_pools_wait_for_their_threads() -> None:
    with ThreadPoolExecutor() as outer, ThreadPoolExecutor() as inner:
        outer.submit(time.sleep, FOREVER)
        inner.submit(time.sleep, FOREVER).result()


def while_a_child_is_waited_for() -> None:
    child = subprocess.Popen(["sleep", f"{FOREVER}"])
    try:
        with child:
            child.wait()
    finally:
        child.kill()


def where_it_is_the_cause_of_a_later_error() -> None:
    failure = None
    while True:
        try:
            if failure is not None:
                raise OSError("much later") from failure
            time.sleep(FOREVER)
        except ddpkit.PeerError as error:
            failure = error
        except OSError:
            time.sleep(FOREVER)


def while_ctrl_c_is_handled_for_long() -> None:
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        time.sleep(FOREVER)


@pytest.mark.parametrize(
    "program",
    [
        while_an_event_loop_waits_for_its_threads,
        while_pools_wait_for_their_threads,
        while_a_child_is_waited_for,
        where_it_is_the_cause_of_a_later_error,
        with_a_handler_for_urgent_data,
        with_urgent_data_blocked,
        with_all_signals_blocked,
        in_an_idle_event_loop,
        after_it_was_swallowed_once,
        after_a_barrier_whose_error_was_swallowed,
        with_a_handler_of_c,
        while_ctrl_c_is_handled_for_long,
    ],
)
def test_a_failure_is_raised(program: Callable[[], None], ends: dict[Callable[[], None], Ended]) -> None:
    heard(ends[program])


@pytest.mark.parametrize(
    "program",
    [
        in_a_busy_event_loop,
        in_the_bookkeeping_of_an_event_loop,
        in_callbacks_of_weak_references,
        in_finalisers,
    ],
)
def test_a_failure_is_raised_in_a_main_thread_that_computes(program: Callable[[], None]) -> None:
    heard(survivor(program))


def all_end(error: BaseException) -> None:
    with ddpkit.distributed(timeout=LONG) as context:
        ddpkit.barrier()
        try:
            raise error
        finally:
            if context.rank == 0:
                await_failure_and_signal()


def await_failure_and_signal() -> None:
    """Let the signal of the watch come now, whose handler raises the peer's failure."""
    while current_job.current_session().failures.known is None:
        time.sleep(0.01)
    signal.raise_signal(current_job.watch()._main_thread._signal)


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 1), (SystemExit(143), 143)])
def test_a_rank_that_is_itself_told_to_end_ends_for_that(error: BaseException, code: int) -> None:
    port = free_port()
    ended = run(all_end, [platform_env(rank, 2, port) for rank in range(2)], error)
    assert [end.code for end in ended] == [code, code], ended
    assert all("PeerError" not in end.output for end in ended), ended
    if code == 1:
        assert all(end.output.endswith("KeyboardInterrupt\n") for end in ended), ended


def swallow_all() -> None:
    while True:
        try:
            time.sleep(0.01)
        except Exception:
            pass


def replace_all_handlers() -> None:
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, 32, 33}:
        signal.signal(number, say)
    time.sleep(FOREVER)


def block_and_sleep() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    time.sleep(FOREVER)


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (swallow_all, "kept running: the error raised in it was caught or lost"),
        (replace_all_handlers, "cannot be interrupted, because the script has set a handler"),
        (block_and_sleep, "is in a call that does not return"),
    ],
)
def test_a_rank_that_cannot_be_told_ends_with_the_true_reason(
    program: Callable[[], None], reason: str, ends: dict[Callable[[], None], Ended]
) -> None:
    end = ends[program]
    assert end.code == 1, end
    assert f"Rank 0 ends: its main thread {reason}" in end.output, end.output
    assert "ValueError: boom" in end.output
    assert "my own handler" not in end.output, "nobody else's handler is called"


def in_a_thread() -> None:
    def join() -> None:
        with ddpkit.distributed(timeout=LONG) as context:
            ddpkit.barrier()
            if context.rank == 1:
                fail_and_stay()
            time.sleep(FOREVER)

    thread = threading.Thread(target=join)
    thread.start()
    thread.join()


def test_a_rank_that_joined_in_another_thread_ends_with_the_true_reason() -> None:
    port = free_port()
    end, _ = run(in_a_thread, [platform_env(rank, 2, port) for rank in range(2)])
    assert end.code == 1 and "Rank 0 ends: its main thread did not call setup()" in end.output, end


def handle_for_long() -> None:
    try:
        time.sleep(FOREVER)
    except ddpkit.PeerError:
        handle()
        sys.exit(3)


def handle() -> None:
    """What a script does to save: it takes its time, waits, and meets errors of its own."""
    end = time.monotonic() + 4
    while time.monotonic() < end:
        with contextlib.suppress(KeyError):
            {}["missing"]
        try:
            raise OSError("try again")
        except OSError:
            time.sleep(0.01)
    time.sleep(4)
    print("saved", flush=True)


def handle_the_error_of_a_barrier_for_long() -> None:
    try:
        ddpkit.barrier()
    except ddpkit.PeerError:
        handle()
        sys.exit(3)


def handle_the_error_of_a_checkpoint_for_long() -> None:
    try:
        raise ddpkit.CheckpointError("as on all ranks, of which one ends with it")
    except ddpkit.CheckpointError:
        handle()
        sys.exit(3)


def handle_in_finally() -> None:
    with contextlib.suppress(ddpkit.PeerError):
        try:
            time.sleep(FOREVER)
        finally:
            handle()
    sys.exit(3)


def handle_after_teardown() -> None:
    try:
        time.sleep(FOREVER)
    except ddpkit.PeerError:
        pass
    ddpkit.teardown()
    handle()
    sys.exit(3)


def handle_around_an_event_loop() -> None:
    async def main() -> None:
        while True:
            await asyncio.sleep(0)

    try:
        asyncio.run(main())
    except ddpkit.PeerError:
        handle()
        sys.exit(3)


def handle_in_a_task() -> None:
    async def main() -> None:
        try:
            while True:
                pass
        except ddpkit.PeerError:
            handle()
            sys.exit(3)

    asyncio.run(main())


def handle_in_a_pool() -> None:
    try:
        time.sleep(FOREVER)
    except ddpkit.PeerError:
        with ThreadPoolExecutor() as pool:  # which the script enters now, and leaves in good order
            pool.submit(handle)
        sys.exit(3)


def handle_in_a_thread_of_an_event_loop() -> None:
    try:
        time.sleep(FOREVER)
    except ddpkit.PeerError:
        asyncio.run(asyncio.to_thread(handle))
        sys.exit(3)


def handle_a_group() -> None:
    failures: list[Exception] = []
    while True:
        try:
            if failures:
                raise ExceptionGroup("of several tasks", failures)  # noqa: F821
            time.sleep(FOREVER)
        except ddpkit.PeerError as error:
            failures.append(error)
        except ExceptionGroup:  # noqa: F821
            handle()
            sys.exit(3)


def handle_and_leave_slowly() -> None:
    """The interpreter waits for threads and hooks when the script has ended."""
    threading.Thread(target=time.sleep, args=[4]).start()
    handle_for_long()


@pytest.mark.parametrize(
    "program",
    [
        handle_for_long,
        handle_the_error_of_a_barrier_for_long,
        handle_the_error_of_a_checkpoint_for_long,
        handle_in_finally,
        handle_after_teardown,
        handle_around_an_event_loop,
        handle_in_a_task,
        handle_in_a_pool,
        handle_in_a_thread_of_an_event_loop,
        pytest.param(handle_a_group, marks=pytest.mark.skipif(sys.version_info < (3, 11), reason="has no groups")),
        handle_and_leave_slowly,
    ],
)
def test_a_rank_that_handles_the_failure_has_its_peace(
    program: Callable[[], None], ends: dict[Callable[[], None], Ended]
) -> None:
    end = ends[program]
    assert end.code == 3 and "saved" in end.output, end.output
    assert "Traceback" not in end.output and " ends: " not in end.output, end.output


def keep_handlers() -> None:
    mine, signals = [], [number for number in signal.valid_signals() if number not in (32, 33)]
    before = {number: signal.getsignal(number) for number in signals}
    for round_ in range(3):
        with ddpkit.distributed(timeout=LONG):
            ddpkit.barrier()
            taken = [number for number in signals if signal.getsignal(number) != before[number]]
            assert len(taken) == 1 and isinstance(signal.getsignal(taken[0]).__self__, MainThread)
            if round_ == 2:
                signal.signal(taken[0], say)
                before[taken[0]] = say
                mine = taken
        assert {number: signal.getsignal(number) for number in signals} == before
        print("kept", mine)


def test_handlers_are_given_back_unless_the_script_has_replaced_them() -> None:
    port = free_port()
    for end in run(keep_handlers, [platform_env(rank, 2, port) for rank in range(2)]):
        assert end.code == 0 and end.output.count("kept") == 3, end.output


def join_while_handling(again: bool) -> None:
    """A job that is joined where the failure of one before is handled hears of its own."""
    try:
        with ddpkit.distributed(timeout=LONG) as context:
            ddpkit.barrier()
            if context.rank == 1:
                raise KeyError("first")
            time.sleep(FOREVER)
    except (KeyError, ddpkit.PeerError) as error:
        first = error
        with ddpkit.distributed(timeout=LONG) as context:
            ddpkit.barrier()
            if context.rank == 1:
                raise ValueError("second") from None
            if again:
                try:
                    raise first
                except ddpkit.PeerError:
                    time.sleep(FOREVER)
            time.sleep(FOREVER)


@pytest.mark.parametrize("again", [False, True])  # whether the failure of the first job is raised in the second
def test_a_job_joined_in_the_handler_of_another_hears_of_its_own_failures(again: bool) -> None:
    port = free_port()
    end, _ = run(join_while_handling, [platform_env(rank, 2, port) for rank in range(2)], again)
    assert end.code == 1 and "ValueError: second" in end.output, end
