from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import begin, run

import ddpkit
from ddpkit import PeerError, spawn, testing


def describe(word: str) -> tuple[str, int, int, str]:
    with ddpkit.distributed() as context:
        return word, context.rank, context.world_size, context.launcher


@pytest.mark.parametrize("nprocs", [1, 3])
def test_results_come_back_by_rank(nprocs: int) -> None:
    assert spawn(describe, nprocs, "hi") == [("hi", rank, nprocs, "spawn") for rank in range(nprocs)]


def raise_on(rank: int, setup: bool) -> None:
    if setup:
        ddpkit.setup()
        ddpkit.barrier()
    if int(os.environ["RANK"]) == rank:
        raise ZeroDivisionError("oh")
    time.sleep(400)


@pytest.mark.parametrize(("rank", "setup"), [(0, True), (2, True)])
def test_the_workers_own_exception_is_raised_with_its_rank(rank: int, setup: bool) -> None:
    start = time.monotonic()
    with pytest.raises(ZeroDivisionError, match="oh") as caught:
        spawn(raise_on, 3, rank, setup)
    assert time.monotonic() - start < 200.0
    cause = caught.value.__cause__
    assert isinstance(cause, PeerError) and cause.rank == rank and "raise_on" in cause.traceback


class Stubborn(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__("cannot be unpickled")


def raise_stubborn() -> None:
    raise Stubborn(1, 2)


def test_an_exception_that_cannot_travel_is_described() -> None:
    with pytest.raises(PeerError, match=r"rank 0 .*Stubborn: cannot be unpickled"):
        spawn(raise_stubborn, 1)


def hang_on_one() -> int:
    if os.environ["RANK"] == "1":
        wait_for_godot()
    return os.getpid()


def wait_for_godot() -> None:
    threading.Event().wait(1000)


def time_out(as_expected: Callable[[str], bool], fn: Callable[..., Any], nprocs: int, *args: Any) -> None:
    """Runs out of time, and again out of more, until the ranks have come far enough; a loaded machine is slow."""
    for seconds in (2, 8, 32):
        with pytest.raises(TimeoutError) as caught:
            spawn(fn, nprocs, *args, timeout=timedelta(seconds=seconds))
        if as_expected(str(caught.value)):
            return
    pytest.fail(str(caught.value))


def only_rank_1_hangs(text: str) -> bool:
    stuck = re.search(r"not finished:\nrank 1:(.|\n)*wait_for_godot", text)
    return bool(stuck) and "rank 0" not in text and "rank 2" not in text


def test_a_hanging_rank_is_named_with_its_stack() -> None:
    time_out(only_rank_1_hangs, hang_on_one, 3)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_rank_is_named_with_its_signal() -> None:
    with pytest.raises(PeerError, match=r"rank 0 .*lost: killed by SIGKILL"):
        spawn(die, 1)


def end_on_rank_1(how: str) -> None:
    with ddpkit.distributed() as context:
        if context.rank == 1 and how == "exit":
            os._exit(10)
        if context.rank == 1:
            os.kill(os.getpid(), signal.SIGABRT)
        ddpkit.barrier("never complete")


@pytest.mark.parametrize(("how", "words"), [("exit", "10"), ("signal", "SIGABRT")])
def test_a_rank_that_ends_while_others_wait_is_named(how: str, words: str) -> None:
    with pytest.raises(PeerError, match=words) as caught:
        spawn(end_on_rank_1, 2, how)
    assert caught.value.rank == 1


def raise_everywhere() -> None:
    raise RuntimeError(f"from rank {os.environ['RANK']}")


def test_if_all_ranks_raise_one_of_their_exceptions_is_raised() -> None:
    with pytest.raises(RuntimeError, match="from rank [01]"):
        spawn(raise_everywhere, 2)


def test_a_launch_leaves_no_file_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    spawn(describe, 1, "hi")
    assert not list(tmp_path.iterdir())


def leave() -> None:
    raise SystemExit("bad arguments")


def test_a_worker_that_exits_does_not_end_the_caller() -> None:
    with pytest.raises(PeerError, match=r"rank 0 .*SystemExit: bad arguments"):
        spawn(leave, 1)


def say_a_line() -> None:
    print("a line")


def say_umlauts() -> None:
    os.write(1, b"x" + "\u00e4".encode() * 40_000)


def spawn_often() -> None:
    for _ in range(2):
        spawn(say_a_line, 2)
    sys.stdout = io.StringIO()  # as in a notebook
    spawn(say_umlauts, 1)
    assert sys.stdout.getvalue() == "x" + "\u00e4" * 40_000


def end_by(number: int) -> None:
    os.kill(os.getpid(), number)


def test_a_rank_that_a_signal_without_a_name_ends_is_an_error_of_that_rank() -> None:
    with pytest.raises(PeerError, match=f"killed by signal {signal.SIGRTMIN + 1}"):
        spawn(end_by, 1, signal.SIGRTMIN + 1)


def test_what_workers_print_arrives_also_characters_that_come_in_two_pieces() -> None:
    (end,) = run(spawn_often, [{}], timeout=600)
    assert (end.code, end.output) == (0, "a line\n" * 4)


def fill(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.fill_(int(os.environ["RANK"]) + 1)


def test_tensors_are_copied_both_ways() -> None:
    mine = torch.zeros(3)
    results = spawn(fill, 2, mine)
    assert mine.tolist() == [0, 0, 0]
    assert [result.tolist() for result in results] == [[1, 1, 1], [2, 2, 2]]


def world(number: int) -> tuple[int, list[Any]]:
    with ddpkit.distributed():
        return number, ddpkit.all_gather_object((number, ddpkit.get_rank()))


@pytest.mark.storm
def test_many_launches_in_parallel_do_not_meet() -> None:
    results: list[Any] = [None] * 20

    def work(number: int) -> None:
        results[number] = spawn(world, 2, number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [[(number, [(number, 0), (number, 1)])] * 2 for number in range(20)]


def make_torchs_own_group() -> tuple[int, str]:
    dist.init_process_group("gloo")
    dist.barrier()  # who destroys it at once closes connections that others still make
    size = dist.get_world_size()
    dist.destroy_process_group()
    return size, os.environ["MASTER_PORT"]


def test_launches_side_by_side_make_torchs_own_groups_on_ports_that_stay_held() -> None:
    results: list[Any] = [None] * 3

    def work(number: int) -> None:
        results[number] = spawn(make_torchs_own_group, 2)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(sizes == [(2, sizes[0][1])] * 2 for sizes in results), results
    assert len({sizes[0][1] for sizes in results}) == 3


def test_a_function_on_warm_ranks_may_make_torchs_own_group() -> None:
    found = testing.on_ranks(make_torchs_own_group, 2, join=False)
    assert [size for size, _ in found] == [2, 2]


def report_pid(folder: str) -> None:
    open(f"{folder}/{os.getpid()}", "w").close()
    hang_on_one()


def test_no_process_is_left_behind(tmp_path: Any) -> None:
    time_out(lambda _: len(os.listdir(tmp_path)) >= 2, report_pid, 2, str(tmp_path))
    for pid in os.listdir(tmp_path):
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


def test_bad_arguments_are_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(ValueError, match="positive integer, got 0"):
        spawn(die, 0)
    with pytest.raises(TypeError, match="cannot send"):
        spawn(lambda: None, 2)


PROMPT = """
import ddpkit, contextlib, functools, sys

class Found(Exception):
    pass

def double(x):
    with ddpkit.distributed():
        return [Found(x), 2 * ddpkit.all_reduce(x)]

def fail(x):
    raise Found(x)

for _ in range(2):
    for fn in (double, lambda x: double(x), functools.partial(double)):
        try:
            print([(type(found) is Found, twice) for found, twice in ddpkit.spawn(fn, 2, 3)])
        except TypeError as error:
            print("refused:", error)
    try:
        ddpkit.spawn(fail, 2, 7)
    except Found as error:
        print("raised", error)
    except TypeError as error:
        print("refused:", error)
    print(ddpkit.spawn(divmod, 2, 7, 2))
    sys.modules["cloudpickle"] = None
"""


def run_as_command(program: str) -> None:
    """Do what `python -c` does, in a process that has imported torch."""
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__spec__ = None
    exec(program, main.__dict__)


def run_from_stdin(program: str) -> subprocess.CompletedProcess[str]:
    pipes = {"input": program, "capture_output": True, "text": True}
    return subprocess.run([sys.executable, "-"], timeout=600, **pipes)  # type: ignore[call-overload,no-any-return]


@pytest.mark.parametrize("source", ["-c", pytest.param("stdin", marks=pytest.mark.storm)])
def test_what_a_prompt_defines_is_sent_or_refused_before_anything_starts(source: str) -> None:
    if source == "-c":
        (end,) = run(run_as_command, [{}], PROMPT, timeout=600)
        code, output, errors = end.code, end.output, ""
    else:
        done = run_from_stdin(PROMPT)
        code, output, errors = done.returncode, done.stdout, done.stderr
    lines = output.splitlines()
    assert code == 0 and len(lines) == 10, output + errors
    assert lines[:4] == ["[(True, 12), (True, 12)]"] * 3 + ["raised 7"]
    assert lines[4] == lines[9] == "[(3, 1), (3, 1)]"
    for line in lines[5:9]:  # without cloudpickle
        assert "refused: spawn() cannot send" in line and "pip install cloudpickle" in line


CELL = """
import ddpkit, os, sys

def train(x):
    with ddpkit.distributed() as context:
        print(f"rank {context.rank} prints")
        os.system("echo a child of rank $RANK prints")
        print("and to stderr", file=sys.stderr)
        return ddpkit.all_reduce(x)

ddpkit.spawn(train, 2, 3)
"""


def test_ranks_of_a_notebook_work_and_print_in_it() -> None:
    manager = pytest.importorskip("jupyter_client.manager")
    env = {name: text for name, text in os.environ.items() if name != "PYTHONUNBUFFERED"}  # which splits lines
    kernel = manager.KernelManager(kernel_name="python3", transport="ipc")  # a port may be taken before it binds it
    kernel.start_kernel(env=env)
    client = kernel.client()
    client.start_channels()
    said: dict[str, str] = {"stdout": "", "stderr": "", "result": ""}

    def hear(message: dict[str, Any]) -> None:
        content = message["content"]
        if message["msg_type"] == "stream":
            said[content["name"]] += content["text"]
        if message["msg_type"] == "execute_result":
            said["result"] += content["data"]["text/plain"]

    try:
        client.wait_for_ready(timeout=600)
        reply = client.execute_interactive(CELL, output_hook=hear, timeout=600)
    finally:
        client.stop_channels()
        kernel.shutdown_kernel(now=True)
    assert (reply["content"]["status"], said["result"]) == ("ok", "[6, 6]"), said
    lines = sorted(said["stdout"].splitlines())
    assert lines == [f"{who} {rank} prints" for who in ("a child of rank", "rank") for rank in range(2)]
    assert said["stderr"].count("and to stderr") == 2


def say(word: str) -> None:
    print(word, int(os.environ["RANK"]))
    print("é" * 100_000, file=sys.stderr)


def test_what_ranks_print_goes_where_this_process_prints() -> None:
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        spawn(say, 2, "hello")
    assert sorted(out.getvalue().splitlines()) == ["hello 0", "hello 1"]
    assert errors.getvalue().count("é") + errors.getvalue().count("\ufffd") // 2 >= 199_900


class Odd:
    def __init__(self, what: str) -> None:
        self.what = what

    def __reduce__(self) -> Any:
        return (exit if self.what == "exits" else int), ("seven",)


class OddError(Exception):
    def __str__(self) -> str:
        raise ValueError

    def __reduce__(self) -> Any:
        return exit, (3,)


def give_odd(what: str) -> Any:
    if what == "error":
        raise OddError
    return Odd(what)


@pytest.mark.parametrize("what", ["exits", "raises", "error"])
def test_what_cannot_be_unpickled_is_a_failure_of_its_rank(what: str) -> None:
    words = r"OddError: \(no message" if what == "error" else "cannot be unpickled here"
    with pytest.raises(PeerError, match=f"rank 0 .*{words}"):
        spawn(give_odd, 1, what)


def nest(depth: int) -> Any:
    with ddpkit.distributed() as context:
        inner = spawn(nest, 2, depth - 1) if depth else None
        return context.rank, ddpkit.all_reduce(1), inner


@pytest.mark.storm
def test_ranks_may_launch_ranks() -> None:
    inner = [(0, 2, None), (1, 2, None)]
    assert spawn(nest, 2, 1) == [(0, 2, inner), (1, 2, inner)]


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_default_device_here_does_not_reach_into_a_launch(device: str) -> None:
    with torch.device(device):
        assert spawn(run_on_main_tensor, 2) == [[3.0, 4.0]] * 2


def run_on_main_tensor() -> list[float]:
    with ddpkit.distributed(), torch.device("meta"):
        return ddpkit.run_on_main(lambda: torch.tensor([3.0, 4.0], device="cpu")).tolist()


def wait_in(folder: str) -> None:
    open(f"{folder}/{os.getpid()}", "w").close()
    time.sleep(1000)


def spawn_in_a_session(folder: str) -> None:
    os.setsid()
    spawn(wait_in, 2, folder)


def test_ctrl_c_leaves_no_rank_behind(tmp_path: Path) -> None:
    folder = tmp_path / "pids"
    folder.mkdir()
    program = begin(spawn_in_a_session, {}, str(folder), output=str(tmp_path / "output"))
    while len(os.listdir(folder)) < 2:
        assert program.is_alive()
        time.sleep(0.05)
    os.killpg(program.pid, signal.SIGINT)  # as a terminal does
    program.join(600)
    assert program.exitcode == 1 and "KeyboardInterrupt" in (tmp_path / "output").read_text()
    for pid in os.listdir(folder):
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


@pytest.mark.parametrize("timeout", [60, 60.0, None, "60"])
def test_a_time_out_without_a_unit_is_refused(timeout: Any) -> None:
    with pytest.raises(TypeError, match="datetime.timedelta"):
        spawn(die, 1, timeout=timeout)
