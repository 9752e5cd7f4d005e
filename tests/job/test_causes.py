"""What a rank says of its own failure, whatever it raised."""

from __future__ import annotations

import asyncio
import builtins
import json
import os
import random
import re
import signal
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import free_port, platform_env, run
from test_lifecycle import torchrun

import ddpkit
from ddpkit.errors import trace_of
from ddpkit.job.leaving import fill_error_file
from ddpkit.rendezvous.failures import Failure, Failures
from ddpkit.watch import main_thread


class Mute(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")

    __repr__ = __str__


class MuteRuntimeError(RuntimeError):
    """Looked at more closely, for it might be a collective's."""

    def __str__(self) -> str:
        raise SystemExit(3)

    __repr__ = __str__


class NoText(Exception):
    def __str__(self) -> Any:
        return 5


class OddSyntaxError(SyntaxError):
    def __init__(self) -> None:
        super().__init__("odd", ("file", "one", object(), 3))


def noted() -> Exception:
    error = ValueError("noted")
    error.__notes__ = [Mute()]  # type: ignore[attr-defined]
    return error


def chained() -> Exception:
    error = ValueError("chained")
    error.__cause__ = Mute()
    return error


HOSTILE: dict[str, tuple[Callable[[], BaseException], str]] = {
    "str raises": (Mute, "Mute: (no message: its __str__ raises ValueError)"),
    "str exits": (MuteRuntimeError, "MuteRuntimeError: (no message: its __str__ raises SystemExit)"),
    "str is no text": (NoText, "NoText: (no message: its __str__ raises TypeError)"),
    "surrogates": (lambda: OSError("caf\udce9"), r"OSError: caf\udce9"),
    "huge": (lambda: ValueError("x" * 30_000_000), "ValueError: xxx"),
    "odd syntax error": (OddSyntaxError, "OddSyntaxError: odd"),
    "notes": (noted, "ValueError: noted"),
    "cause": (chained, "ValueError: chained"),
}
if sys.version_info >= (3, 11):
    two = builtins.ExceptionGroup("two", [Mute(), ValueError("b")])
    one = builtins.BaseExceptionGroup("one", [KeyboardInterrupt()])
    HOSTILE["group"] = (lambda: two, "ExceptionGroup: two (2 sub-exceptions)")
    HOSTILE["base group"] = (lambda: one, "BaseExceptionGroup: one (1 sub-exception)")


def raised(make: Callable[[], BaseException]) -> BaseException:
    try:
        raise make()
    except BaseException as error:
        return error


@pytest.mark.parametrize(("make", "words"), HOSTILE.values(), ids=HOSTILE.keys())
def test_a_failure_is_recorded_whatever_the_exception_does(
    make: Callable[[], BaseException], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = raised(make)
    text = Failure.of(1, error).to_json()
    failure = Failure.from_fields(json.loads(text))
    assert f"{failure.type}: {failure.message}".startswith(words)
    assert "in raised" in failure.traceback and "in raised" in trace_of(error)
    (failure.message + failure.traceback).encode()
    assert len(text) < 1_000_000, "more than the store takes"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    fill_error_file(error)
    message = json.loads((tmp_path / "error.json").read_text())["message"]
    assert message["message"].startswith(words) and "in raised" in message["extraInfo"]["py_callstack"]
    assert (tmp_path / "error.json").stat().st_size < 1_000_000


def raise_on_one(case: str) -> None:
    with ddpkit.distributed(timeout=timedelta(seconds=30)) as context:
        ddpkit.barrier()
        if context.rank == 1:
            raise HOSTILE[case][0]()
        ddpkit.barrier()


@pytest.mark.parametrize(
    "case",
    ["str exits", "huge", *(pytest.param(case, marks=pytest.mark.storm) for case in ("str raises", "surrogates"))]
    + [pytest.param("odd syntax error", marks=pytest.mark.storm)],
)
def test_the_other_ranks_hear_of_a_failure_whatever_the_exception_does(case: str, tmp_path: Path) -> None:
    port = free_port()
    envs = [platform_env(rank, 2, port, TORCHELASTIC_ERROR_FILE=str(tmp_path / f"{rank}")) for rank in range(2)]
    one, other = run(raise_on_one, envs, case)
    words = HOSTILE[case][1]
    assert (one.code, other.code) == (1, 1), one.output + other.output
    assert "rank 1 (" in one.output and f"failed: {words}" in one.output
    for rank in range(2):
        assert words in json.loads((tmp_path / f"{rank}").read_text())["message"]["message"]


@pytest.mark.storm
def test_torchrun_shows_an_exception_that_has_no_message(tmp_path: Path) -> None:
    script = """
        import ddpkit

        class Mute(Exception):
            def __str__(self):
                raise ValueError("no words")

        ddpkit.setup()
        ddpkit.barrier()
        if ddpkit.get_rank() == 1:
            raise Mute
        ddpkit.barrier()
    """
    code, output = torchrun(tmp_path, script)
    summary = output[output.index("Root Cause") :]
    assert code == 1 and "rank      : 1" in summary
    assert "raise Mute" in summary and "Mute: (no message: its __str__ raises ValueError)" in output


class Undecided:
    def __bool__(self) -> bool:
        raise ValueError("neither")


CODES = {"none": None, "zero": 0, "false": False, "empty": "", "text": "bad", "three": 3, "odd": Undecided()}


def exit_on_one(name: str) -> None:
    with ddpkit.distributed(timeout=timedelta(seconds=30)) as context:
        ddpkit.barrier()
        if context.rank == 1:
            sys.exit(CODES[name])
        ddpkit.barrier()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ("zero", "three") else [pytest.mark.storm]) for name in CODES]
)
def test_an_exit_is_a_failure_where_python_says_so(name: str) -> None:
    port = free_port()
    one, _ = run(exit_on_one, [platform_env(rank, 2, port) for rank in range(2)], name)
    good = name in ("none", "zero", "false")
    assert ("rank 1 (" in one.output) and ("left the job" if good else "failed: SystemExit") in one.output, one.output


@pytest.mark.skipif(sys.version_info < (3, 11), reason="asyncio.TaskGroup came with Python 3.11")
def test_a_peer_that_failed_is_named_though_the_error_came_in_a_group() -> None:
    port = free_port()
    one, other = run(fail_in_a_group, [platform_env(rank, 2, port) for rank in range(2)])
    assert (one.code, other.code) == (1, 1)
    last = [line for line in one.output.splitlines() if "PeerError: " in line]
    assert last and "rank 1 (" in last[-1] and "failed: ZeroDivisionError" in last[-1], one.output


def fail_in_a_group() -> None:
    async def step() -> None:
        torch.distributed.all_reduce(torch.ones(1))

    async def steps() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(step())

    with ddpkit.distributed(timeout=timedelta(seconds=30), watch=False) as context:
        if context.rank == 1:
            raise ZeroDivisionError("oh")
        asyncio.run(steps())


def lose_a_peer(call: str, victim: int) -> None:
    """Catches what the death of a peer makes of a torch collective, or of backward."""
    main_thread.GRACE = 60.0  # gloo takes its time on a loaded machine
    with ddpkit.distributed(timeout=timedelta(seconds=60)) as context:
        model = ddpkit.wrap_model(torch.nn.Linear(100, 100))
        ddpkit.barrier()
        if context.rank == victim:
            threading.Timer(random.uniform(0.05, 0.3), os.kill, (os.getpid(), signal.SIGKILL)).start()
        try:
            with ddpkit.peer_errors():
                while True:
                    if call == "all_reduce":
                        torch.distributed.all_reduce(torch.ones(100_000))
                    else:
                        model(torch.ones(8, 100)).sum().backward()
        except ddpkit.PeerError as error:
            print(f"caught {error.rank} {error.error_type}")


@pytest.mark.parametrize("call", ["all_reduce", "backward"])
@pytest.mark.parametrize(
    ("world_size", "victim"), [(3, 1), *(pytest.param(2, victim, marks=pytest.mark.storm) for victim in (0, 1))]
)
def test_in_the_block_the_death_of_a_peer_is_always_its_peer_error(call: str, world_size: int, victim: int) -> None:
    for _ in range(int(os.environ.get("DDPKIT_TEST_DEATHS", "2"))):
        port = free_port()
        ended = run(lose_a_peer, [platform_env(rank, world_size, port) for rank in range(world_size)], call, victim)
        for rank, end in enumerate(ended):
            if rank == victim:
                assert end.code == -signal.SIGKILL, end.output
            else:
                assert (end.code, f"caught {victim} lost" in end.output) == (0, True), end.output


def test_an_error_that_no_peer_caused_leaves_the_block_as_it_is() -> None:
    with pytest.raises(RuntimeError, match="^mine$") as caught, ddpkit.peer_errors():
        raise RuntimeError("mine")
    assert type(caught.value) is RuntimeError


def train_and_log_on_1() -> None:
    with ddpkit.distributed(timeout=timedelta(seconds=5)):
        model = ddpkit.wrap_model(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8)))
        for step in range(4):
            model(torch.randn(6, 4)).mean().backward()
            if step == 2 and ddpkit.get_rank() == 1:
                ddpkit.all_reduce_mean({"loss": 1.0})


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.storm), 3])
def test_a_rank_that_does_one_collective_more_is_shown_beside_those_in_a_model(world_size: int) -> None:
    port = free_port()
    ended = run(train_and_log_on_1, [platform_env(rank, world_size, port) for rank in range(world_size)])
    for end in ended:
        assert end.code == 1 and "MismatchError: The ranks were in different collectives" in end.output, end.output
        assert re.search(r"  rank 0: (DDP's forward|backward) at test_causes.py:\d+: model\(", end.output)
        assert re.search(
            r"  rank 1: ddpkit's all_reduce_mean at test_causes.py:\d+: ddpkit.all_reduce_mean\(", end.output
        )


class SilentStore:
    """A store without a failure, in whose answer time the monitor hears of one."""

    def __init__(self) -> None:
        self.while_asked: Callable[[], None] = lambda: None

    def check(self, keys: list[str]) -> bool:
        self.while_asked()
        return False


def test_what_is_heard_while_the_store_is_asked_is_not_forgotten() -> None:
    store = SilentStore()
    failures = Failures(store, 0, ["here", "there"], str)
    heard = Failure(1, "there", "lost", "killed", "")
    store.while_asked = lambda: setattr(failures, "known", heard)
    assert failures.look_up() is heard
    assert failures.known is heard
