from __future__ import annotations

import contextlib
import inspect
import multiprocessing.util
import os
import subprocess
import sys
import textwrap
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import on_ranks
from processes import CLEAN, begin, free_port, platform_env, run

import ddpkit
from ddpkit.job import current_job
from ddpkit.job import joining as startup
from ddpkit.job.lifecycle import check_torch

ROOT = Path(__file__).parents[2]


def torchrun(folder: Path, script: str, **env: str) -> tuple[int, str]:
    """Runs a script under the real torchrun; returns its exit code and all output."""
    path = folder / "script.py"
    path.write_text(textwrap.dedent(script))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", str(path)]
    env = {**CLEAN, "OMP_NUM_THREADS": "1", **env}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


def ask_twice(backend: str) -> tuple[str | None, bool]:
    with ddpkit.distributed(backend=backend) as context:
        return context.backend, ddpkit.setup(backend="gloo", device="cpu") is context


def test_a_backends_name_may_be_written_in_any_case() -> None:
    assert ddpkit.spawn(ask_twice, 2, "GLOO") == [("gloo", True)] * 2


def test_one_process_needs_no_group_and_setup_may_be_called_twice() -> None:
    context = ddpkit.setup()
    try:
        assert (context.rank, context.world_size, context.launcher, context.backend) == (0, 1, "single", None)
        assert not dist.is_initialized()
        assert ddpkit.setup() is context
        with ddpkit.distributed() as inner:
            assert inner is context
        assert current_job.job is not None, "the inner block must not end what it did not begin"
        with pytest.raises(ValueError, match="setup\\(\\) was called before, with another backend"):
            ddpkit.setup(backend="nccl")
    finally:
        ddpkit.teardown()
        ddpkit.teardown()
    assert current_job.job is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"timeout": 10}, "timedelta"),
        ({"timeout": None}, "timedelta"),
        ({"timeout": timedelta(0)}, "positive"),
        ({"num_threads": 0}, "positive integer"),
        ({"num_threads": 2.0}, "positive integer"),
        ({"num_threads": True}, "positive integer"),
        ({"timeout": timedelta.max}, "at most 10000 days"),
        ({"device": "gpu"}, "'gpu' is not a device"),
        ({"device": 3}, "a torch.device, a name such as"),
        ({"backend": torch.device("cpu")}, "name such as 'gloo'"),
        ({"backend": "glo"}, "backend='glo' is unknown to torch"),
        ({"backend": "cpu:gloo,cuda:nccll"}, "unknown to torch"),
        ({"watch": "no"}, "True or False"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        ddpkit.setup(**options)
    with pytest.raises((TypeError, ValueError), match=words), ddpkit.distributed(**options):
        pass
    assert current_job.job is None


def test_a_mistyped_option_is_refused() -> None:
    with pytest.raises(TypeError, match="timeuot"):
        ddpkit.distributed(timeuot=timedelta(seconds=3))  # type: ignore[call-arg]
    assert inspect.signature(ddpkit.distributed).parameters == inspect.signature(ddpkit.setup).parameters


def set_up_badly(ranks: list[int]) -> None:
    bad = int(os.environ["RANK"]) in ranks
    ddpkit.setup(timeout=timedelta(seconds=200), device="gpu" if bad else None)


@pytest.mark.parametrize("ranks", [[0], [1], [0, 1], [0, 1, 2]])
def test_a_bad_option_of_some_ranks_ends_the_wait_of_the_others(ranks: list[int]) -> None:
    ended = run(set_up_badly, [platform_env(rank, 3, port) for port in [free_port()] for rank in range(3)], ranks)
    for rank, end in enumerate(ended):
        assert end.code == 1, end
        assert "'gpu' is not a device" in end.output, end
        assert ("ValueError" in end.output) == (rank in ranks), end
        assert rank in ranks or any(f"Rank {bad} on " in end.output for bad in ranks), end


SET_UP_BADLY = """
    import os, time, torch
    from datetime import timedelta
    import ddpkit

    bad = {BAD}
    if not bad:
        time.sleep(3)  # rank 0 comes later
    began = time.monotonic()
    try:
        ddpkit.setup(timeout=timedelta(seconds=200), num_threads=0 if bad else 1)
    except (ValueError, ddpkit.LaunchError) as error:
        seconds = time.monotonic() - began
        print(type(error).__name__, "num_threads must be" in str(error), "soon" if seconds < 15 else seconds)
"""


@pytest.mark.storm
@pytest.mark.parametrize(("bad", "first"), [("True", "ValueError"), ("os.environ['RANK'] == '1'", "LaunchError")])
def test_a_bad_option_ends_all_ranks_at_once_under_torchrun(bad: str, first: str, tmp_path: Path) -> None:
    code, output = torchrun(tmp_path, SET_UP_BADLY.replace("{BAD}", bad))
    assert code == 0, output
    assert output.count("True soon") == 2 and f"{first} True soon" in output and "ValueError True soon" in output


def set_up_badly_soon() -> None:
    began = time.monotonic()
    with pytest.raises(ValueError, match="positive integer"):
        ddpkit.setup(num_threads=0)
    assert time.monotonic() - began < 15  # 20 where each waits for the others


def test_a_bad_option_of_all_ranks_keeps_none_without_an_agent() -> None:
    port = free_port()
    for end in run(set_up_badly_soon, [platform_env(rank, 3, port) for rank in range(3)]):
        assert end.code == 0, end.output


def test_a_bad_option_is_heard_by_a_rank_0_that_comes_later() -> None:
    port = free_port()
    ended = run(set_up_badly, [platform_env(rank, 3, port) for rank in (1, 2, 0)], [1], delays=[0, 0, 5])
    for end in ended:
        assert end.code == 1 and "'gpu' is not a device" in end.output, end
        assert end.seconds < 100, end


def test_a_torch_that_is_too_old_is_named() -> None:
    check_torch("2.6.0a0+ecf3bae40a.nv25.01")  # a vendor's build
    check_torch("2.8.0-rocm6.3.hip")
    check_torch("2.13.0+cpu")
    with pytest.raises(ddpkit.LaunchError, match=r"needs torch 2\.6 or newer, found 2\.5\.1"):
        check_torch("2.5.1+cu124")


def describe() -> dict[str, Any]:
    context = ddpkit.setup()
    told = (ddpkit.get_rank(), ddpkit.get_world_size(), ddpkit.get_local_rank(), ddpkit.get_local_world_size())
    total = torch.tensor([1.0])
    dist.all_reduce(total)
    return {
        "told": (*told, ddpkit.get_node_rank()),
        "main": (ddpkit.is_main_process(), ddpkit.is_local_main_process(), ddpkit.is_distributed()),
        "device": ddpkit.get_device(),
        "sum": total.item(),
        "text": str(context),
        "threads": torch.get_num_threads(),
        "interface": os.environ.get("GLOO_SOCKET_IFNAME"),
    }


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_rank_knows_its_place(world_size: int) -> None:
    for rank, found in enumerate(on_ranks(describe, world_size)):
        assert found["told"] == (rank, world_size, rank, world_size, 0)
        assert found["main"] == (rank == 0, rank == 0, True)
        assert found["sum"] == world_size
        assert "backend: gloo" in found["text"] and f"local rank: {rank} of {world_size} on node 0" in found["text"]
        assert found["interface"] is None, "the environment is as it was"


def set_up_under_a_default_device(how: str) -> tuple[Any, ...]:
    block = torch.device("meta") if how == "block" else contextlib.nullcontext()
    if how == "default":
        torch.set_default_device("meta")
    try:
        with block, ddpkit.distributed(timeout=timedelta(seconds=30)) as context:
            ddpkit.barrier()
            kept = torch.empty(0).device.type
            asked = ddpkit.setup(device="cpu").device.type
            return context.device.type, ddpkit.get_device().type, asked, ddpkit.all_reduce(1.0), kept
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("how", ["default", "block"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_default_device_is_neither_asked_nor_changed(how: str, world_size: int) -> None:
    if torch.accelerator.is_available():
        pytest.skip("expects the CPU")
    found = ddpkit.spawn(set_up_under_a_default_device, world_size, how)
    assert found == [("cpu", "cpu", "cpu", float(world_size), "meta")] * world_size


@pytest.mark.parametrize("theirs", [None, "", "eth7"])
def test_the_interface_of_gloo_is_pinned_only_where_the_user_names_none(
    theirs: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", theirs or "")
    if theirs is None:
        monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    with startup._gloo_on_loopback(one_node=False):
        assert os.environ.get("GLOO_SOCKET_IFNAME") == theirs
    with startup._gloo_on_loopback(one_node=True):
        assert os.environ["GLOO_SOCKET_IFNAME"] == (theirs or "lo")
    assert os.environ.get("GLOO_SOCKET_IFNAME") == theirs
    with pytest.raises(OSError), startup._gloo_on_loopback(one_node=True):
        os.environ["GLOO_SOCKET_IFNAME"] = "eth8"  # another thread
        raise OSError
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth8"


def set_up_with_an_interface_that_is_not_there() -> str:
    os.environ["GLOO_SOCKET_IFNAME"] = "eth7"
    with pytest.raises(RuntimeError, match="eth7"):
        ddpkit.setup(timeout=timedelta(seconds=20))
    return os.environ["GLOO_SOCKET_IFNAME"]


def test_the_users_interface_is_the_one_that_gloo_takes() -> None:
    assert ddpkit.spawn(set_up_with_an_interface_that_is_not_there, 2) == ["eth7"] * 2


def threads(asked: int | None) -> int:
    with ddpkit.distributed(num_threads=asked):
        return torch.get_num_threads()


def test_ranks_share_the_cores_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = len(os.sched_getaffinity(0))
    assert ddpkit.spawn(threads, 2, None) == [max(1, cores // 2)] * 2
    assert ddpkit.spawn(threads, 2, 3) == [3, 3]


def adopt(how: str) -> tuple[float, bool, str]:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if how == "store":
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    else:
        dist.init_process_group("gloo", init_method=how, rank=rank, world_size=world_size)
    mean = ddpkit.all_reduce_mean(float(rank))  # without setup(): it finds the group and adopts it
    context = ddpkit.setup()
    ddpkit.barrier()
    ddpkit.teardown()
    alive = dist.is_initialized()
    dist.destroy_process_group()
    return mean, alive, str(context.backend)


@pytest.mark.parametrize("how", ["store", "env://", "file://{folder}/store"])
def test_a_group_that_somebody_else_made_is_adopted_and_left_alone(how: str, tmp_path: Path) -> None:
    assert ddpkit.spawn(adopt, 3, how.format(folder=tmp_path)) == [(1.0, True, "gloo")] * 3


def join_wait_and_leave() -> float:
    with ddpkit.distributed(timeout=timedelta(seconds=100)):
        ddpkit.barrier()
        return ddpkit.all_reduce(1.0)


@pytest.mark.storm
def test_64_ranks_join_wait_and_leave() -> None:
    assert ddpkit.spawn(join_wait_and_leave, 64, timeout=timedelta(seconds=200)) == [64.0] * 64


def setup_twice() -> list[float]:
    sums = []
    for _ in range(2):
        ddpkit.setup()
        sums.append(ddpkit.all_reduce(1.0))
        ddpkit.teardown()
    return sums


def test_a_job_can_be_joined_again_after_teardown() -> None:
    assert ddpkit.spawn(setup_twice, 2) == [[2.0, 2.0]] * 2


def join_two_jobs(folder: str, rank: int) -> None:
    """Rank 0 ends after each of them; rank 1 is one process, as a notebook or a warm worker is."""
    for job in (1, 2) if rank else (1,):
        while rank == 1 and not Path(folder, f"job{job}").exists():  # the host of the one before has ended
            time.sleep(0.01)
        with ddpkit.distributed(timeout=timedelta(seconds=60)):
            print(ddpkit.all_reduce(1))


def test_a_job_is_joined_at_the_port_of_one_whose_host_has_ended(tmp_path: Path) -> None:
    port = free_port()
    envs = [platform_env(rank, 2, port) for rank in range(2)]
    stays = begin(join_two_jobs, envs[1], str(tmp_path), 1, output=f"{tmp_path}/stays")
    for job in (1, 2):
        (tmp_path / f"job{job}").touch()
        (host,) = run(join_two_jobs, envs[:1], str(tmp_path), 0)
        assert (host.code, host.output) == (0, "2\n"), (tmp_path / "stays").read_text()
    stays.join()
    assert (stays.exitcode, (tmp_path / "stays").read_text()) == (0, "2\n2\n")


def count_what_stays(cycles: int) -> tuple[int, ...]:
    counts = []
    for times in (3, cycles):
        for _ in range(times):
            with ddpkit.distributed(timeout=timedelta(seconds=60)) as context:
                ddpkit.barrier()
                ddpkit.barrier(f"named {times}")
                ddpkit.all_reduce_mean({"loss": float(context.rank)})
                ddpkit.run_on_main(int)
                ddpkit.stop_together(False)
                if context.rank == context.world_size - 1:
                    time.sleep(0.02)  # the last to leave, while the others join again
        ddpkit.setup(timeout=timedelta(seconds=60))
        ddpkit.barrier()
        counts += [len(multiprocessing.util._finalizer_registry), threading.active_count()]
        ddpkit.teardown()
    return tuple(counts)


@pytest.mark.parametrize(("world_size", "cycles"), [(3, 12), pytest.param(2, 40, marks=pytest.mark.storm)])
def test_cycles_of_setup_and_teardown_leave_nothing_behind(world_size: int, cycles: int) -> None:
    for finalizers, threads, *later in ddpkit.spawn(count_what_stays, world_size, cycles):
        assert later == [finalizers, threads]


def disagree() -> None:
    ddpkit.setup(backend="gloo" if os.environ["RANK"] == "0" else "mpi")


def test_ranks_that_ask_for_different_backends_all_hear_of_it() -> None:
    ended = run(disagree, [platform_env(rank, 2, port) for port in [free_port()] for rank in range(2)])
    assert [end.code for end in ended] == [1, 1]
    assert all("different backends: rank 0 gloo, rank 1 mpi" in end.output for end in ended)


@pytest.mark.storm
def test_setup_without_teardown_ends_cleanly_under_torchrun_and_needs_no_thread_at_exit(tmp_path: Path) -> None:
    """Python 3.12.0 and 3.12.1 start none there."""
    script = """
        import atexit, os, threading, ddpkit
        context = ddpkit.setup()
        os.write(1, f"{ddpkit.all_reduce_mean(float(context.rank))} by {context.launcher}\\n".encode())

        def refuse(thread):
            raise RuntimeError("can't create new thread at interpreter shutdown")

        atexit.register(setattr, threading.Thread, "start", refuse)
    """
    code, output = torchrun(tmp_path, script)
    assert (code, sorted(output.split("\n"))) == (0, ["", "0.5 by torchrun", "0.5 by torchrun"])


NESTED = "import ddpkit, os\nos.write(1, b'world of ' + str(ddpkit.setup().world_size).encode())\n"


@pytest.mark.storm
def test_torchrun_under_preset_ranks_is_refused_on_every_rank(tmp_path: Path) -> None:
    code, output = torchrun(tmp_path, NESTED, RANK="0", WORLD_SIZE="2")
    assert code == 1 and "world of 2" not in output
    assert "torchrun was started by rank 0 of 2 of another launch" in output


@pytest.mark.storm
def test_one_agent_for_each_outer_rank_is_legitimate(tmp_path: Path) -> None:
    code, output = torchrun(tmp_path, NESTED, RANK="0", WORLD_SIZE="1", MASTER_ADDR="10.0.0.9", MASTER_PORT="23456")
    assert code == 0 and output.count("world of 2") == 2


@pytest.mark.storm
def test_torchrun_inside_torchrun_is_refused_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "inner.py").write_text(NESTED)
    script = f"""
        import subprocess, sys
        inner = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", {str(tmp_path / "inner.py")!r}]
        sys.exit(subprocess.run(inner).returncode)
    """
    code, output = torchrun(tmp_path, script)
    assert code == 1 and "world of 2" not in output
    assert output.count("LaunchError: torchrun was started by rank") >= 2
