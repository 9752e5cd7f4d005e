"""The process is the user's: `ddpkit` touches nothing there that is not its own, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
import socket
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import ROOT, free_port, platform_env, run
from torch import nn

import ddpkit

HANG = 90.0  # seconds


class Connections:
    """Connections that another thread of a script opens, one after the other, to an echo in this process."""

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0), backlog=4096)
        self._opened: list[socket.socket] = []
        self._stop = threading.Event()
        self._opener = threading.Thread(target=self._open, daemon=True)
        threading.Thread(target=self._serve, daemon=True).start()
        self._opener.start()

    def _serve(self) -> None:
        while True:
            connection, _ = self._server.accept()
            threading.Thread(target=self._echo, args=(connection,), daemon=True).start()

    def _echo(self, connection: socket.socket) -> None:
        while data := connection.recv(10):
            connection.sendall(data)

    def _open(self) -> None:
        while not self._stop.is_set():
            self._opened.append(socket.create_connection(self._server.getsockname()))
            time.sleep(0.001)

    def stop(self) -> int:
        """Open no more; return how many there are."""
        self._stop.set()
        self._opener.join()
        return len(self._opened)

    def alive(self) -> int:
        """Count those on which the echo answers."""
        found = 0
        for connection in self._opened:
            connection.settimeout(10)
            try:
                connection.sendall(b"x")
                found += connection.recv(1) == b"x"
            except OSError:
                pass
        return found


def wrapped_model() -> Any:
    return ddpkit.wrap_model(nn.Linear(1, 1))  # DDP keeps the group


def open_during_setup() -> None:
    connections = Connections()
    ddpkit.setup(device="cpu")
    model = wrapped_model()
    opened = connections.stop()
    ddpkit.barrier()
    ddpkit.teardown()
    assert opened > 1 and connections.alive() == opened, (opened, connections.alive())
    print("well", type(model).__name__)


@pytest.mark.parametrize("world_size", [2, 3])
def test_connections_opened_by_another_thread_during_setup_outlive_teardown(world_size: int) -> None:
    port = free_port()
    for end in run(open_during_setup, [platform_env(rank, world_size, port) for rank in range(world_size)]):
        assert end.code == 0 and "well DistributedDataParallel" in end.output, end


def open_and_lose_a_rank() -> None:
    connections = Connections()
    context = ddpkit.setup(device="cpu")
    model = wrapped_model()
    opened = connections.stop()
    ddpkit.barrier()
    start = time.monotonic()
    if context.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        if context.rank == 0:
            dist.recv(torch.ones(1), 2)  # of a rank that lives: only a cut ends it
        time.sleep(HANG)
    except ddpkit.PeerError as error:
        seconds = time.monotonic() - start
        assert error.rank == 1 and seconds < 0.5 * HANG, (error, seconds)
        ddpkit.teardown()
    assert opened > 1 and connections.alive() == opened, (opened, connections.alive())
    print("heard", type(model).__name__)


def test_connections_of_the_script_outlive_a_failure_that_cuts_those_of_gloo() -> None:
    port = free_port()
    ended = run(open_and_lose_a_rank, [platform_env(rank, 3, port) for rank in range(3)])
    for rank in (0, 2):
        assert ended[rank].code == 0 and "heard DistributedDataParallel" in ended[rank].output, ended[rank]


def state_of_process() -> dict[str, Any]:
    """What a job may change in a process, by name."""
    descriptors = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing itself
            descriptors.append(re.sub(r"\d+", "N", os.readlink(f"/proc/self/fd/{name}")))
    native = [Path(task, "comm").read_text() for task in Path("/proc/self/task").iterdir()]
    modules, optimizers = (sys.modules[f"torch.{name}"] for name in ("nn.modules.module", "optim.optimizer"))
    return {
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "threads of gloo": [name for name in native if "gloo" in name],
        "descriptors": sorted(descriptors),
        "hooks of optimizers": [
            *optimizers._global_optimizer_pre_hooks.values(),
            *optimizers._global_optimizer_post_hooks.values(),
        ],
        "hooks of modules": [*modules._global_forward_pre_hooks.values(), *modules._global_forward_hooks.values()],
        "hooks of Python": [sys.excepthook, threading.excepthook, sys.unraisablehook, sys.displayhook],
        "handlers of signals": [signal.getsignal(number) for number in range(1, signal.NSIG)],
        "threads of operators": torch.get_num_threads(),
        "environment": dict(os.environ),
        "warnings": list(warnings.filters),
        "default device": torch.get_default_device(),
        "generator": torch.get_rng_state().tolist(),
        "group": dist.is_initialized(),
    }


def make_step(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    net(torch.ones(2, 1)).sum().backward()
    optimizer.step()


def train_and_leave() -> None:
    net = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    make_step(net, optimizer)  # what torch itself changes at the first one is not counted
    before = state_of_process()
    for _ in range(2):
        with ddpkit.distributed(num_threads=torch.get_num_threads() + 1, device="cpu"):
            model = ddpkit.wrap_model(net)
            make_step(model, optimizer)
            make_step(net, optimizer)
            ddpkit.average_gradients(net)
            ddpkit.all_reduce_mean(1.0)
        del model
        gc.collect()
    after = state_of_process()
    changes = {name: (before[name], value) for name, value in after.items() if value != before[name]}
    assert changes == {}, changes
    print("well")


def leave_by_errors() -> None:
    before = sys.excepthook
    for _ in range(2):
        with contextlib.suppress(KeyError), ddpkit.distributed():
            raise KeyError("handled")
    with ddpkit.distributed():
        pass
    assert sys.excepthook is before
    print("well")


def test_exception_hooks_do_not_pile_up_where_errors_are_handled() -> None:
    port = free_port()
    (end,) = run(leave_by_errors, [platform_env(0, 1, port)])
    assert end.code == 0 and "well" in end.output, end.output


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_nothing_that_setup_changed_is_left_after_teardown(world_size: int) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as an agent hosts it
    elastic = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "test", "GROUP_WORLD_SIZE": "1"}
    envs = []
    for rank in range(world_size):
        more = elastic | {"LOCAL_RANK": f"{rank}", "LOCAL_WORLD_SIZE": f"{world_size}", "GROUP_RANK": "0"}
        envs.append(platform_env(rank, world_size, store.port, **more))
    for end in run(train_and_leave, envs):
        assert end.code == 0 and "well" in end.output, end.output


# The table of the launching guide


def footprint() -> dict[str, int]:
    """What the table counts, by the first cell of its rows."""
    sockets = "".join(Path(f"/proc/net/{kind}").read_text() for kind in ("tcp", "tcp6"))
    listening = [line.split()[9] for line in sockets.splitlines() if " 0A " in line]
    descriptors = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing itself
            descriptors.append(os.readlink(f"/proc/self/fd/{name}"))
    python = threading.enumerate()
    optimizers = sys.modules["torch.optim.optimizer"]
    hooks = (optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks)
    return {
        "Python threads": len(python),
        "other threads": len(os.listdir("/proc/self/task")) - len(python),
        "file descriptors": len(descriptors),
        "listening sockets": sum(f"socket:[{inode}]" in descriptors for inode in listening),
        "signal handlers": sum(callable(signal.getsignal(number)) for number in range(1, signal.NSIG)),
        "`sys.excepthook`": int(sys.excepthook is not sys.__excepthook__),
        "hooks of all optimizers": sum(map(len, hooks)),
    }


def count_what_setup_adds() -> None:
    net = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    make_step(net, optimizer)  # what torch itself starts at the first one is not counted
    before = footprint()
    ddpkit.setup(device="cpu")
    model = ddpkit.wrap_model(net)
    make_step(model, optimizer)
    ddpkit.barrier()
    during = footprint()
    ddpkit.barrier()
    ddpkit.teardown()
    del model
    gc.collect()
    after = footprint()
    print("added", [during[name] - before[name] for name in before])
    print("left", [after[name] - before[name] for name in before])


def assert_as_in_the_table(cell: str, number: int, what: str) -> None:
    """The library's own numbers are exact; those of gloo and the store follow the version of torch."""
    if cell.startswith("up to "):
        assert 0 < number <= int(cell.removeprefix("up to ")), what
    else:
        assert number == int(cell), what


def test_the_guide_counts_what_setup_adds_to_a_process() -> None:
    page = (ROOT / "docs/guide/launching.md").read_text()
    table = page[page.index("| `setup()` adds |") :].partition("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    assert [row[0] for row in rows] == list(footprint())
    port = free_port()
    ended = run(count_what_setup_adds, [{"OMP_NUM_THREADS": "1"}])
    ended += run(count_what_setup_adds, [platform_env(rank, 2, port) for rank in range(2)])
    columns = []
    for end in ended:
        assert end.code == 0, end.output
        columns.append(re.findall(r"^(?:added|left) \[(.*)\]$", end.output, re.MULTILINE))
    (alone, none), (main, of_store), (other, nothing) = columns
    assert set(f"{none}, {nothing}".split(", ")) == {"0"}
    for column, numbers in enumerate([alone, main, other, of_store], start=1):
        for row, number in zip(rows, numbers.split(", "), strict=True):
            assert_as_in_the_table(row[column], int(number), f"{row[0]}, column {column}: {number}")


def leave_in_a_signal_handler() -> str:
    former = signal.signal(signal.SIGALRM, lambda *_: ddpkit.teardown())
    with ddpkit.distributed():
        ddpkit.all_reduce(1)
        signal.setitimer(signal.ITIMER_REAL, 0.01)  # while the block ends
    signal.signal(signal.SIGALRM, former)
    return "left"


def keep_a_handler(number: int, is_before: bool) -> list[str]:
    """Have a handler of one's own for the signal that `where` sends, from before or in the middle of a job."""
    calls: list[str] = []

    def handle(*_: Any) -> None:
        calls.append("handled")

    if is_before:
        signal.signal(number, handle)
    with ddpkit.distributed():
        ddpkit.all_reduce(1)
        time.sleep(0.2)  # the watch's thread has begun
        signal.signal(number, handle)
        os.kill(os.getpid(), number)
    os.kill(os.getpid(), number)
    time.sleep(0.1)
    return calls


def refuse_memory() -> int:
    def refuse(*_: Any) -> int:
        raise OSError(38, "Function not implemented")

    os.memfd_create = refuse
    with ddpkit.distributed():
        time.sleep(0.2)
        return ddpkit.all_reduce(1)


def test_teardown_in_a_signal_handler_while_a_job_ends_is_harmless() -> None:
    assert ddpkit.spawn(leave_in_a_signal_handler, 2) == ["left"] * 2


@pytest.mark.skipif(sys.platform != "linux", reason="where reads stacks on Linux alone")
@pytest.mark.parametrize("is_before", [True, False])
def test_a_handler_for_the_signal_of_where_stays_the_scripts(is_before: bool) -> None:
    assert ddpkit.spawn(keep_a_handler, 2, signal.SIGRTMIN + 3, is_before) == [["handled", "handled"]] * 2


@pytest.mark.skipif(sys.platform != "linux", reason="where reads stacks on Linux alone")
def test_a_system_without_files_in_memory_runs_the_job() -> None:
    assert ddpkit.spawn(refuse_memory, 2) == [2, 2]
