from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from nodes import lossy_link, needs, virtual_nodes
from processes import ROOT, launch

from ddpkit.parsing import encode
from ddpkit.rendezvous.failures import Failure
from ddpkit.rendezvous.sockets import is_loopback, listen, probe
from ddpkit.watch import connections as monitor_connections
from ddpkit.watch.connections import Connections, Event
from ddpkit.watch.messages import Message, parse

TOKEN = "secret"
PATIENCE = 60.0  # seconds, which only a hang needs


class Hub:
    """Rank 0's connections to three ranks, and how others come to it."""

    def __init__(self, world_size: int = 3) -> None:
        listener, self.address = listen("127.0.0.1", one_node=True)
        self.said: list[str] = []
        self.connections = Connections(0, world_size, TOKEN, listener, self.said.append)
        self.world_size = world_size

    def knock(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=PATIENCE)

    def join(self, rank: int) -> Connections:
        spoke = Connections(rank, self.world_size, TOKEN, None, self.said.append)
        spoke.connect(self.knock())
        while rank in self.connections.absent():
            assert not self.connections.poll(1.0)
        return spoke

    def hear(self, number: int = 1, seconds: float = PATIENCE) -> list[Event]:
        """What comes until there are as many events."""
        events: list[Event] = []
        end = time.monotonic() + seconds
        while len(events) < number and time.monotonic() < end:
            events += self.connections.poll(0.05)
        return events


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub()
    with contextlib.closing(hub.connections):
        yield hub


def is_closed(wire: socket.socket) -> bool:
    wire.settimeout(0.01)
    try:
        return wire.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def closes(hub: Hub, wire: socket.socket, seconds: float = PATIENCE) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        hub.connections.poll(0.01)
        if is_closed(wire):
            return True
    return False


def test_ranks_are_heard_by_their_numbers_and_an_end_is_an_event(hub: Hub) -> None:
    with contextlib.closing(hub.join(1)) as one, contextlib.closing(hub.join(2)) as two:
        assert hub.connections.is_full and hub.connections.absent() == []
        one.post(encode(left=1))
        assert hub.hear() == [Event(1, Message(left=1))]
        hub.connections.post(encode(left=1), exclude=1)
        assert two.poll(PATIENCE) == [Event(0, Message(left=1))]
        assert one.poll(0.0) == []
    assert set(hub.hear(2)) == {Event(1, None), Event(2, None)}


@pytest.mark.parametrize(
    "line",
    [
        b"\n",
        b"GET / HTTP/1.1\r\n",
        b"\xff\xfe\n",
        encode(token="another", rank=1),
        encode(rank=1),
        encode(token=TOKEN, rank=0),
        encode(token=TOKEN, rank=3),
        encode(token=TOKEN, rank=True),
        encode(token=TOKEN, left=1),
        encode(token=TOKEN, failure=Failure.of(1, ValueError())),
    ],
)
def test_whoever_does_not_belong_to_the_job_is_shown_out(hub: Hub, line: bytes) -> None:
    with hub.knock() as wire:
        wire.sendall(line)
        assert closes(hub, wire)
    assert hub.connections.absent() == [1, 2] and not hub.hear(seconds=0.2)


def test_whoever_knows_the_token_may_say_that_the_job_is_wrong(hub: Hub) -> None:
    failure = Failure.of(-1, ValueError("two processes are rank 1"))
    with hub.knock() as wire:
        wire.sendall(encode(token=TOKEN, failure=failure))
        assert hub.hear() == [Event(None, Message(failure=failure))]
        assert closes(hub, wire)


def test_who_asks_is_answered_and_cannot_speak_of_a_rank(hub: Hub) -> None:
    with hub.knock() as wire:
        wire.sendall(encode(token=TOKEN, asks=True, failure=Failure.of(1, ValueError("not true"))))
        assert hub.hear() == [Event(None, Message(asks=True))]
        hub.connections.answer(b"an answer\n")
        assert wire.recv(100) == b"an answer\n"
    assert not hub.hear(seconds=0.2)


def test_a_second_connection_that_claims_a_rank_is_refused(hub: Hub) -> None:
    with contextlib.closing(hub.join(1)) as one, hub.knock() as other:
        other.sendall(encode(token=TOKEN, rank=1))
        assert closes(hub, other)
        one.post(encode(left=1))
        assert hub.hear() == [Event(1, Message(left=1))]


def test_what_is_no_message_of_a_rank_is_passed_over(hub: Hub) -> None:
    with contextlib.closing(hub.join(1)) as one:
        one.post(encode(rank=2))
        one.post(b"no message\n")
        one.post(encode(left=1))
        assert hub.hear() == [Event(1, Message(left=1))]


@pytest.mark.parametrize("code", [0, 1, ord("\n"), ord("{"), 255])
@pytest.mark.parametrize("at_once", [True, False])
def test_the_last_byte_of_a_process_that_ends_is_its_exit_code(hub: Hub, code: int, at_once: bool) -> None:
    one = hub.join(1)
    one.post(encode(exiting=1))
    if not at_once:
        assert hub.hear() == [Event(1, Message(exiting=1))]
    (descriptor,) = one.detach()
    with socket.socket(fileno=descriptor) as wire:
        wire.send(bytes([code]))
    heard = hub.hear(3 if at_once else 2)
    assert heard[-2:] == [Event(1, Message(code=code)), Event(1, None)]


def test_a_rank_says_no_exit_code_of_another(hub: Hub) -> None:
    with contextlib.closing(hub.join(1)) as one:
        one.post(encode(exiting=2))
        one.post(b"\n")
        one.post(encode(left=1))
        assert hub.hear(2) == [Event(1, Message(exiting=2)), Event(1, Message(left=1))]


def test_a_line_is_understood_wherever_it_is_split(hub: Hub) -> None:
    line = encode(token=TOKEN, rank=1) + encode(left=1)
    with hub.knock() as wire:
        wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in line:
            assert not hub.connections.poll(0.0)
            wire.sendall(bytes([byte]))
        assert hub.hear() == [Event(1, Message(left=1))]


def test_a_stranger_has_little_room(hub: Hub) -> None:
    with hub.knock() as wire:
        wire.settimeout(0.01)
        sent = 0
        with contextlib.suppress(ConnectionError):
            while sent < 50_000_000:
                with contextlib.suppress(TimeoutError):
                    sent += wire.send(b"x" * 65536)
                hub.connections.poll(0.0)
        assert sent < 50_000_000


def test_a_stranger_has_little_time(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor_connections, "_TOKEN_SECONDS", 0.3)
    with hub.knock() as silent, hub.knock() as slow:
        slow.sendall(b"{")
        assert closes(hub, silent) and closes(hub, slow)


def test_a_flood_of_strangers_keeps_no_rank_out(hub: Hub) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(hub.knock())
            hub.connections.poll(0.0)
        before = len(list(Path("/proc/self/fd").iterdir()))
        stack.enter_context(contextlib.closing(hub.join(1)))
        stack.enter_context(contextlib.closing(hub.join(2)))
        hub.connections.poll(0.0)
        assert hub.connections.is_full
        assert len(list(Path("/proc/self/fd").iterdir())) < before + 80, "of 300 strangers a few are let wait"


def test_a_peer_that_does_not_read_keeps_nobody_waiting(hub: Hub) -> None:
    line = encode(failure=replace(Failure.of(0, ValueError("x" * 10_000)), traceback="\U0001f600" * 50_000))
    with hub.knock() as deaf, contextlib.closing(hub.join(2)) as two:
        deaf.sendall(encode(token=TOKEN, rank=1))
        while hub.connections.absent():
            hub.connections.poll(0.05)
        for _ in range(10):
            hub.connections.post(line)
        heard: list[Event] = []
        while len(heard) < 10:
            hub.connections.poll(0.01)
            heard += two.poll(0.01)
        hub.connections.flush(0.1)  # returns although the other does not read
        received = b""
        deaf.settimeout(0.01)
        while received.count(b"\n") < 10:
            hub.connections.poll(0.0)
            with contextlib.suppress(TimeoutError):
                received += deaf.recv(1_000_000)
        assert all(parse(line, 3) for line in received.splitlines()), "in the end it has got everything"


def test_last_words_arrive_however_long_they_are(hub: Hub) -> None:
    line = encode(failure=replace(Failure.of(1, ValueError()), traceback="\U0001f600" * 50_000))
    with contextlib.closing(hub.join(1)) as one:
        for _ in range(10):
            one.post(line)
        leaving = threading.Thread(target=lambda: list(one.shutdown(PATIENCE)))
        leaving.start()
        heard = hub.hear()
        while heard[-1].message is not None:
            heard += hub.connections.poll(0.01)
        hub.connections.close()
        leaving.join()
        assert len(heard) == 11
        assert heard[-1] == Event(1, None)


@pytest.mark.parametrize(
    ("address", "alone"),
    [("127.0.0.1", True), ("127.1.2.3", True), ("::1", True), ("localhost", True), ("10.0.0.1", False)]
    + [("node1", False), ("::", False), ("0.0.0.0", False), ("", False), (None, False)],
)
def test_which_addresses_reach_this_machine_alone(address: str | None, alone: bool) -> None:
    assert is_loopback(address) is alone


@pytest.mark.parametrize(
    ("address", "one_node", "found"),
    [("10.9.8.7", True, "127.0.0.1"), ("127.0.0.1", False, "127.0.0.1"), ("node1", False, "node1")],
)
def test_where_rank_0_listens(address: str, one_node: bool, found: str) -> None:
    listener, (host, port) = listen(address, one_node)
    with listener:
        assert (host, port) == (found, listener.getsockname()[1])
        everywhere = listener.getsockname()[0] in ("::", "0.0.0.0")
        assert everywhere is (found == "node1")


PAIRS = 30  # connections over one link


def keep_talking(address: str, rank: int, seconds: float) -> None:
    """Hold one end of the connections while questions and answers go over them; then until they have ended."""
    port = 29_700
    monitor_connections._TOKEN_SECONDS = 2 * PATIENCE  # in which a lost packet has been sent again often enough
    if rank == 0:
        listener = socket.create_server((address, port), backlog=PAIRS)
        ends = [Connections(0, PAIRS + 1, TOKEN, listener, print)]
        while not ends[0].full.is_set():
            ends[0].poll(0.1)
    else:
        while not probe(address, port):
            time.sleep(0.1)
        ends = [Connections(child, PAIRS + 1, TOKEN, None, print) for child in range(1, PAIRS + 1)]
        for end in ends:
            end.connect(socket.create_connection((address, port), timeout=PATIENCE))
    begun, talked, heard = time.monotonic(), time.monotonic(), 0
    ended: list[Event] = []
    while len(ended) < PAIRS:
        events = [event for end in ends for event in end.poll(0.01)]
        ended += [event for event in events if event.message is None]
        heard += sum(event.message is not None for event in events)
        now = time.monotonic()
        if now > talked + 2.0:
            talked = now
            for end in ends:
                end.post(encode(asks=True))
        if begun and now > begun + seconds:
            begun = 0.0
            print(f"{len(ended)} ended, heard {'enough' if heard > PAIRS else heard}", flush=True)
    print(f"{sum(event.silent for event in ended)} silent at {time.time()}", flush=True)
    os._exit(0)


@pytest.mark.storm
@needs("ip", nodes=True)
@pytest.mark.skipif(not os.path.exists("/dev/net/tun"), reason="needs /dev/net/tun")
@pytest.mark.parametrize(("loss", "delay"), [(0.3, 0.02), (0.3, 0.1), (0.1, 0.25)])
def test_a_link_that_loses_much_ends_no_connection_and_a_cut_one_ends_all(
    loss: float, delay: float, tmp_path: Path
) -> None:
    paths = [f"{ROOT}/tests", f"{ROOT}/tests/watch"]
    with virtual_nodes(2) as (_, *nodes), lossy_link(*nodes, loss, delay) as (address, _, cut):
        commands = []
        for rank, node in enumerate(nodes):
            call = f"import test_connections as t; t.keep_talking({address!r}, {rank}, 60.0)"
            program = f"import sys; sys.path[:0] = {paths!r}; {call}"
            shell = f'exec {sys.executable} -c "$0" > {tmp_path}/{rank}'
            commands.append(node.run("sh", "-c", shell, program))
        moments = []

        def cut_later(_: object) -> None:
            deadline = time.monotonic() + 2 * PATIENCE
            while not all("heard" in read(tmp_path, rank) for rank in (0, 1)) and time.monotonic() < deadline:
                time.sleep(0.1)
            moments.append(time.time())
            cut()

        codes = [end.code for end in launch(*commands, timeout=300, meanwhile=cut_later)]
    assert codes == [0, 0]
    for rank in (0, 1):
        before, _, after = read(tmp_path, rank).partition("\n")
        assert before == "0 ended, heard enough", rank
        assert after.startswith(f"{PAIRS} silent at "), after
        assert 7 < float(after.split()[-1]) - moments[0] < 15


def read(folder: Path, rank: int) -> str:
    path = folder / f"{rank}"
    return path.read_text() if path.exists() else ""
