"""Asking a running job what its ranks are doing: real ranks that wait, sleep, are stopped or are not there."""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import on_ranks
from processes import begin, free_port, platform_env, run
from signals import stop_process

import ddpkit
from ddpkit.errors import LaunchError
from ddpkit.job import current_job
from ddpkit.rendezvous import session
from ddpkit.tools import cli, where
from ddpkit.tools.where import Answer, ask, jobs_here
from ddpkit.watch import messages, thread
from ddpkit.watch import messages as monitor_tree
from ddpkit.watch.messages import Activity, fold

PATIENCE = 120.0  # seconds, which only a hang needs


def load_image() -> None:
    parent = os.getppid()
    while os.getppid() == parent:  # a loader's worker, which nobody ends here
        time.sleep(1)


def work(chain: bool, watch: bool) -> None:
    if chain:
        monitor_tree.CHILDREN = 1
    with ddpkit.distributed(watch=watch) as context:
        loader = ddpkit.make_loader(range(20 * context.world_size), batch_size=1)
        loader.set_epoch(3)
        batches = iter(loader)
        for _ in range(5 + context.rank):
            next(batches)
        Path(os.environ["READY"], f"{context.rank}").touch()
        if context.rank == context.world_size - 1:
            load_image()
        dist.all_reduce(torch.ones(1))


@contextmanager
def job(
    ranks: int, folder: Path, chain: bool = False, watch: bool = True, body: Callable[..., None] | None = None
) -> Iterator[tuple[int, list[Any]]]:
    """Run a job whose last rank does not come; yield its port and processes."""
    port = free_port()
    envs = [platform_env(rank, ranks, port, READY=f"{folder}") for rank in range(ranks)]
    words = () if body else (chain, watch)
    crew = [begin(body or work, env, *words, output=f"{folder}/log{env['RANK']}") for env in envs]
    try:
        until(lambda: all((folder / f"{rank}").exists() for rank in range(ranks)))
        yield port, crew
    finally:
        for process in crew:
            os.kill(process.pid, signal.SIGKILL)
            process.join()


def until(is_so: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.05)


def ask_until_there(port: int, ranks: int) -> Answer:
    """Ask until the first ranks are in their collective."""
    answers: list[Answer] = []

    def are_there() -> bool:
        answers.append(ask("127.0.0.1", port, PATIENCE))
        return [each.call for each in answers[-1].activities].count("all_reduce") == ranks - 1

    until(are_there)
    return answers[-1]


@pytest.mark.parametrize(("ranks", "chain"), [pytest.param(2, False, marks=pytest.mark.storm), (3, True)])
def test_each_rank_says_where_it_is(
    tmp_path: Path, ranks: int, chain: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with job(ranks, tmp_path, chain) as (port, crew):
        answer = ask_until_there(port, ranks)
        assert {each.rank: each.pid for each in answer.activities} == {
            rank: process.pid for rank, process in enumerate(crew)
        }
        last = next(each for each in answer.activities if each.rank == ranks - 1)
        assert (last.call, last.place.partition(":")[0]) == ("load_image", "test_where.py")
        time.sleep(1.2)
        lines = fold(ask("127.0.0.1", port, PATIENCE).activities, ranks)
        waiting = "rank 0 (" if ranks == 2 else "ranks 0-1: all_reduce at test_where.py:"
        assert lines[0].startswith(waiting) and " s since a batch or collective, " in lines[0], lines
        assert lines[0].endswith(", epoch 3, batch 5" if ranks == 2 else ", epoch 3, batch 5 to 6"), lines
        last_line = next(line for line in lines if line.startswith(f"rank {ranks - 1}"))
        assert "load_image" in last_line and " s since a batch or collective" in last_line, last_line

        tool = ["where", "--timeout", "60", "--job", f"127.0.0.1:{port}"]
        assert cli.main(tool) == 0 and capsys.readouterr().out.startswith(f"{ranks} ranks on 1 node, at ")
        assert cli.main([*tool, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["world_size"] == len(found["ranks"]) == ranks
        assert all(process.is_alive() for process in crew)


def test_a_stopped_rank_is_one_that_does_not_answer_and_the_job_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with job(3, tmp_path) as (port, crew):
        stop_process(crew[2].pid)
        assert cli.main(["where", "--job", f"127.0.0.1:{port}"]) == 1
        *_, told, process, state = capsys.readouterr().out.splitlines()
        assert state == f"rank 2, pid {crew[2].pid}: is stopped"
        assert told.startswith("rank 2: no answer")
        assert process == f"    rank 2: {socket.gethostname()} (pid {crew[2].pid})"
        assert cli.main(["where", "--json", "--job", f"127.0.0.1:{port}"]) == 1
        silent = json.loads(capsys.readouterr().out)["silent"]
        assert silent == [{"rank": 2, "host": socket.gethostname(), "pid": crew[2].pid}]
        os.kill(crew[2].pid, signal.SIGCONT)
        assert len(ask("127.0.0.1", port, PATIENCE).activities) == 3


class Images(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        load_image()
        return index


def hold_the_interpreter() -> None:
    re.match("(a+)+b", "a" * 60)


def load_and_hold() -> None:
    with ddpkit.distributed() as context:
        Path(os.environ["READY"], f"{context.rank}").touch()
        if context.rank == 1:
            hold_the_interpreter()
        next(iter(torch.utils.data.DataLoader(Images(), num_workers=2)))


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux")
def test_stacks_of_loader_workers_and_of_a_rank_that_holds_the_interpreter_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with job(2, tmp_path, body=load_and_hold) as (port, crew):
        tool = ["where", "--job", f"127.0.0.1:{port}"]

        def are_shown() -> bool:
            assert cli.main(tool) == 1
            return capsys.readouterr().out.count("load_image") == 1

        until(are_shown)
        assert cli.main([*tool, "--json"]) == 1
        processes = json.loads(capsys.readouterr().out)["processes"]
        silent, *workers = sorted(processes, key=lambda each: each["is_worker"])
        assert (silent["rank"], silent["pid"], silent["state"]) == (1, crew[1].pid, "runs")
        assert any(line.endswith(" hold_the_interpreter") for line in silent["stack"])
        for worker in workers:
            first, *_, last = worker["stack"]
            assert (worker["rank"], last.split()[-1]) == (0, "load_image") and first.endswith(" _worker_loop"), worker
        assert cli.main(tool) == 1
        shown = capsys.readouterr().out
        assert re.search(rf"^rank 1, pid {crew[1].pid}: runs$", shown, re.MULTILINE), shown
        assert re.search(r"^loader workers of rank 0, pid \d+, \d+: sleeps$", shown, re.MULTILINE), shown
        assert all(process.is_alive() for process in crew)


def sleep_in_c() -> None:
    with ddpkit.distributed() as context:
        folder = Path(os.environ["READY"])
        (folder / f"{context.rank}").touch()
        failed = 0
        while context.rank == 1 and not (folder / "asked").exists():
            failed += ctypes.PyDLL(None).usleep(3_000_000)  # -1 if a signal interrupts it; it holds the interpreter
        (folder / f"failed-{context.rank}").write_text(f"{failed}")
        time.sleep(PATIENCE)


@pytest.mark.storm
@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux")
def test_a_rank_whose_stack_is_read_sleeps_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with job(2, tmp_path, body=sleep_in_c) as (port, _):

        def is_shown() -> bool:
            cli.main(["where", "--job", f"127.0.0.1:{port}"])
            shown = capsys.readouterr().out
            return re.search(r"^rank 1, pid \d+: sleeps$.* sleep_in_c$", shown, re.MULTILINE | re.DOTALL) is not None

        until(is_shown)
        (tmp_path / "asked").touch()
        until(lambda: (tmp_path / "failed-1").exists() and (tmp_path / "failed-1").read_text())
        assert (tmp_path / "failed-1").read_text() == "0"


def test_where_there_is_no_job_to_ask_the_reason_is_said(tmp_path: Path) -> None:
    port = free_port()
    with pytest.raises(LaunchError, match=f"Nobody answers at 127.0.0.1:{port}"):
        ask("127.0.0.1", port, 1.0)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(LaunchError, match="No job has joined"):
        ask("127.0.0.1", store.port, 1.0)
    with job(2, tmp_path, watch=False) as (port, _), pytest.raises(LaunchError, match="without the watch"):
        ask("127.0.0.1", port, 1.0)


def wait_in_vain(call: str) -> None:
    short = timedelta(seconds=2)
    with ddpkit.distributed(timeout=timedelta(seconds=PATIENCE)) as context:
        group = dist.new_group(timeout=short)
        if context.rank == 1:
            load_image()
        elif call == "barrier":
            ddpkit.barrier(timeout=short)
        else:
            dist.all_reduce(torch.ones(1), group=group)


@pytest.mark.parametrize(
    ("ranks", "call"), [(2, "barrier"), pytest.param(3, "barrier", marks=pytest.mark.storm), (3, "all_reduce")]
)
def test_a_wait_that_takes_too_long_shows_once_what_all_ranks_are_doing(ranks: int, call: str) -> None:
    port = free_port()
    ended = run(wait_in_vain, [platform_env(rank, ranks, port) for rank in range(ranks)], call)
    for rank, end in enumerate(ended):
        assert end.code == 1
        assert end.output.count("A wait took too long") == int(rank == 0), end.output
    shown = ended[0].output
    assert "load_image at test_where.py:" in shown, shown
    if call == "barrier":  # ranks that have raised torch's own time-out are out of it
        assert "barrier at test_where.py:" in shown and "BarrierTimeoutError" in shown, shown


def log_on_the_main_process() -> None:
    thread._LONG_WAIT = 2.0
    with ddpkit.distributed(timeout=timedelta(seconds=15)):
        model = ddpkit.wrap_model(torch.nn.Linear(1, 1))
        for _ in range(3):
            loss = model(torch.ones(1)).sum()
            loss.backward()
            if ddpkit.is_main_process():
                ddpkit.all_reduce_mean(loss.detach())


def test_ranks_that_wait_in_different_calls_are_shown_long_before_the_time_is_up() -> None:
    port = free_port()
    ended = run(log_on_the_main_process, [platform_env(rank, 2, port) for rank in range(2)])
    first, rest = ended[0].output.split("The ranks are in different calls. ")
    assert "time" not in first and ended[0].code == 1
    assert re.search(r"^rank 0 \(.*: all_reduce_mean at test_where.py:\d+, [2-6] s since", rest, re.MULTILINE), rest
    assert re.search(r"^rank 1 \(.*: (forward|backward) at test_where.py:\d+, ", rest, re.MULTILINE), rest


def wait_for_each_other(kind: str, folder: str) -> None:
    thread._LONG_WAIT, messages._LASTING = 2.0, 1.0
    if kind == "slow barrier":  # each question to the store takes long, in ddpkit's own code
        names = {"ask": session.StoreBarrier._is_complete, "sleep": time.sleep}
        exec(compile("def slow(barrier): return [ask(barrier), sleep(0.1)][0]", session.__file__, "exec"), names)
        session.StoreBarrier._is_complete = names["slow"]  # type: ignore[method-assign]
    with ddpkit.distributed(timeout=timedelta(minutes=9)):
        if ddpkit.is_main_process():
            if "barrier" in kind:
                ddpkit.barrier("main")
            else:
                ddpkit.Checkpointer(folder).save(1, note=1)
        if kind == "mean":
            ddpkit.run_on_main(int)
            ddpkit.all_reduce_mean(1.0)
        ddpkit.barrier()


@pytest.mark.parametrize(
    ("kind", "world_size"),
    [
        ("save", 2),
        ("mean", 3),
        ("slow barrier", 3),
        *(pytest.param(*case, marks=pytest.mark.storm) for case in [("barrier", 2), ("barrier", 3), ("save", 3)]),
    ],
)
def test_ranks_of_which_none_can_continue_end_and_hear_a_guess(kind: str, world_size: int, tmp_path: Path) -> None:
    port = free_port()
    environments = [platform_env(rank, world_size, port) for rank in range(world_size)]
    call = "barrier" if "barrier" in kind else "save"
    for end in run(wait_for_each_other, environments, kind, str(tmp_path)):
        assert end.code == 1
        assert "MismatchError: The ranks wait for each other in different calls, so that none can" in end.output
        assert re.search(rf"is {call} at test_where.py:\d+ inside `if is_main_process\(\):`\?", end.output), end.output


def work_while_others_wait() -> None:
    thread._LONG_WAIT, messages._LASTING = 0.5, 0.1
    with ddpkit.distributed(timeout=timedelta(minutes=9)):
        ddpkit.run_on_main(time.sleep, 2.0)
        if ddpkit.is_main_process():
            time.sleep(2.0)  # the others are in another call, which rank 0 still reaches
        ddpkit.barrier()
        if not ddpkit.is_main_process():
            time.sleep(2.0)
        ddpkit.all_reduce_mean(1.0)


def test_ranks_that_wait_for_one_that_works_are_left_alone() -> None:
    port = free_port()
    for end in run(work_while_others_wait, [platform_env(rank, 3, port) for rank in range(3)]):
        assert end.code == 0 and "different calls" not in end.output, end.output


def meet_by_a_slow_store() -> None:
    thread._LONG_WAIT, messages._LASTING = 1.0, 0.5
    is_complete = session.StoreBarrier._is_complete

    def slow(barrier: session.StoreBarrier) -> bool | None:
        time.sleep(5.0 if ddpkit.is_main_process() and barrier.name == "barrier 'slow'" else 0.0)
        return is_complete(barrier)

    session.StoreBarrier._is_complete = slow  # type: ignore[method-assign]
    with ddpkit.distributed(timeout=timedelta(minutes=9)):
        if not ddpkit.is_main_process():
            time.sleep(0.5)  # rank 0 asks the store first
        ddpkit.barrier("slow")
        ddpkit.all_reduce_mean(1.0)


def test_a_rank_whose_store_is_slow_is_left_alone() -> None:
    port = free_port()
    for end in run(meet_by_a_slow_store, [platform_env(rank, 2, port) for rank in range(2)]):
        assert end.code == 0 and "different calls" not in end.output, end.output


def test_equal_stacks_are_shown_once_and_the_silent_are_named() -> None:
    def at(rank: int, call: str, seconds: float) -> Activity:
        stack = ("train.py:8 main", f"{call}.py:1 {call}")
        return Activity(
            rank, "node", 100 + rank, call, "train.py:8", seconds, {"batch": rank // 2}, "", 0.0, 0.0, stack
        )

    activities = [at(rank, "all_reduce", 10.0 + rank) for rank in (3, 0, 1, 6)] + [at(2, "sleep", 0.3)]
    assert fold(activities, 8) == [
        "ranks 0-1,3,6: all_reduce at train.py:8, 10 s since a batch or collective, batch 0 to 3",
        "    train.py:8 main",
        "    all_reduce.py:1 all_reduce",
        "rank 2 (node, pid 102): sleep at train.py:8, batch 1",
        "    train.py:8 main",
        "    sleep.py:1 sleep",
        "ranks 4-5,7: no answer; it has left, is stopped, or is in a C call that holds the interpreter",
    ]


def test_ranks_below_one_that_does_not_answer_are_not_called_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor_tree, "CHILDREN", 1)
    first = Activity(0, "node", 100, "step", "train.py:8", 0.0, {}, "", 0.0, 0.0, ())
    assert fold([first], 4)[1:] == [
        "rank 1: no answer; it has left, is stopped, or is in a C call that holds the interpreter",
        "ranks 2-3: not reached: ranks on the way from rank 0 do not answer",
    ]


def work_on() -> list[float]:
    """Return the moments that this rank tells after nothing, after a batch, and after a collective."""
    loader = iter(ddpkit.make_loader(range(20), batch_size=1))
    session = current_job.current_session()
    moments = [session.acted_at]
    for work in (lambda: None, lambda: next(loader), ddpkit.barrier):
        time.sleep(0.01)
        work()
        moments.append(session.acted_at)
    return moments


def test_a_batch_and_a_collective_begin_the_seconds_anew() -> None:
    for before, idle, batch, collective in on_ranks(work_on, 2):
        assert before == idle < batch < collective


def test_jobs_are_found_by_the_environments_of_their_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for pid, env in {
        "1": "RANK=0\0WORLD_SIZE=2\0MASTER_ADDR=10.0.0.1\0MASTER_PORT=29500\0",
        "2": "RANK=1\0WORLD_SIZE=2\0MASTER_ADDR=10.0.0.1\0MASTER_PORT=29500\0",
        "3": "RANK=0\0WORLD_SIZE=1\0MASTER_ADDR=10.0.0.2\0MASTER_PORT=29500\0",
        "4": "RANK=0\0MASTER_PORT=29500\0",
        "5": "HOME=/\0",
    }.items():
        (tmp_path / pid).mkdir()
        (tmp_path / pid / "environ").write_text(env)
        (tmp_path / pid / "cmdline").write_text("python\0-u\0/home/me/train.py\0--lr=1\0")
        (tmp_path / pid / "exe").symlink_to("/usr/bin/python3.11")
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "environ").write_text("RANK=0\0WORLD_SIZE=2\0MASTER_ADDR=10.0.0.3\0MASTER_PORT=29500\0")
    (tmp_path / "0" / "cmdline").write_text("timeout\0-v\0python\0/home/me/train.py\0")
    (tmp_path / "0" / "exe").symlink_to("/usr/bin/timeout")
    (tmp_path / "6").mkdir()
    assert jobs_here(tmp_path) == {("10.0.0.1", 29500): "train.py, pid 1"}
    (tmp_path / "3" / "environ").write_text("RANK=0\0WORLD_SIZE=2\0MASTER_ADDR=10.0.0.2\0MASTER_PORT=29500\0")
    monkeypatch.setattr(where, "jobs_here", lambda: jobs_here(tmp_path))
    assert cli.main(["where"]) == 1
    shown = capsys.readouterr().err
    assert "choose one.\n    --job 10.0.0.1:29500  (train.py, pid 1)\n    --job 10.0.0.2:29500  (train.py" in shown
