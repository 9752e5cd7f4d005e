"""The process is the user's: `ddpkit` touches nothing there that is not its own, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import free_port, platform_env, run
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
