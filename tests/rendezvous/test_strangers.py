"""The watch of a running job under attack: afterwards the job goes on, and a rank that is killed is still noticed."""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import timedelta

import pytest
from nodes import needs, virtual_nodes
from processes import ROOT, TORCHRUN, Ended, free_port, launch, platform_env, run

import ddpkit
from ddpkit.job import current_job
from ddpkit.rendezvous.failures import Failure
from ddpkit.rendezvous.members import Members

PATHS = [f"{ROOT}/tests", f"{ROOT}/tests/rendezvous"]
LONG = timedelta(seconds=60)
FAILURE = asdict(Failure.of(1, ValueError("not true")))
BAD_RANKS = ["1", True, None, -1, 99, 1.0, 10**30, [1], {}]


class Door:
    """Where the watch of this job listens, and what it lets in."""

    def __init__(self) -> None:
        text = current_job.current_session().store.get("members")
        members = Members.from_json(text)
        assert members.watch_address is not None
        self.address, self.token = members.watch_address, members.token

    def enter(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=5)

    def say(self, *lines: bytes) -> None:
        """Connect, say this, and stay until the other side has had time to read it."""
        with self.enter() as wire, contextlib.suppress(OSError):
            for line in lines:
                wire.sendall(line)
            wire.settimeout(0.3)
            wire.recv(1)

    def message(self, **fields: object) -> bytes:
        return json.dumps({"token": self.token} | fields).encode() + b"\n"


def bad_ranks(door: Door) -> None:
    for rank in BAD_RANKS:
        door.say(door.message(rank=rank))
        door.say(door.message(left=rank))
        door.say(door.message(failure=FAILURE | {"rank": "1" if rank == -1 else rank}))


def odd_failures(door: Door) -> None:
    for failure in (None, [], [FAILURE], "lost", 1, {}, {"rank": 1}, FAILURE | {"type": ["lost"]}):
        door.say(door.message(failure=failure))


def news_of_ranks(door: Door) -> None:
    """Whoever is no rank has nothing to say of the ranks, only that something is wrong with the job."""
    door.say(door.message(failure=FAILURE))
    door.say(door.message(left=2))
    door.say(door.message(rank=2, left=2))


def a_rank_again(door: Door) -> None:
    for rank in (0, 1, 2):
        door.say(door.message(rank=rank), json.dumps({"left": 2}).encode() + b"\n")


def odd_bytes(door: Door) -> None:
    big = b"x" * 300_000
    for line in (b"\n" * 1000, b"\xff\xfe\n", b"[" * 90_000 + b"\n", b"GET / HTTP/1.1\r\n\r\n", big, big + b"\n"):
        door.say(line)
    nested = b'{"token": "%s", "failure": ' % door.token.encode() + b"[" * 90_000 + b"\n"
    door.say(nested)
    door.say(door.message(rank=2).replace(b'"rank"', b'"\xff"'))


def split_bytes(door: Door) -> None:
    line = door.message(rank=99)
    for place in range(1, len(line), 7):
        with door.enter() as wire, contextlib.suppress(OSError):
            wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            wire.sendall(line[:place])
            time.sleep(0.002)
            wire.sendall(line[place:])


def resets(door: Door) -> None:
    for _ in range(100):
        with door.enter() as wire:
            wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            wire.sendall(b"x")


def flood(door: Door) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(400):
            stack.enter_context(door.enter())
        time.sleep(1)


ATTACKS = [bad_ranks, odd_failures, news_of_ranks, a_rank_again, odd_bytes, split_bytes, resets, flood]


def attacked(attacks: list[Callable[[Door], None]]) -> None:
    with ddpkit.distributed(timeout=LONG) as context:
        for attack in attacks:
            ddpkit.barrier()
            if context.rank == 1:
                print(attack.__name__, flush=True)
                attack(Door())
        ddpkit.barrier()
        lose_rank_2(context.rank)


def lose_rank_2(rank: int) -> None:
    print("the job goes on", flush=True)
    if rank == 2:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(20)


def still_notices(ended: list[Ended]) -> None:
    """The job went on, and the ranks heard at once when rank 2 was killed."""
    for end in ended[:2]:
        assert "the job goes on" in end.output, end.output
        assert "rank 2 (" in end.output and "was lost" in end.output, end.output
        assert end.code == 1
    assert ended[2].code == -signal.SIGKILL


def job(program: Callable[..., None], *args: object, **more: str) -> list[Ended]:
    port = free_port()
    return run(program, [platform_env(rank, 3, port, **more) for rank in range(3)], *args, timeout=400)


@pytest.mark.parametrize("attacks", [ATTACKS[:-1], ATTACKS[-1:]])
def test_strangers_neither_end_the_job_nor_blind_the_watch(attacks: list[Callable[[Door], None]]) -> None:
    still_notices(job(attacked, attacks))


def without_descriptors() -> None:
    with ddpkit.distributed(timeout=LONG) as context:
        ddpkit.barrier()
        door, held = Door(), []
        ddpkit.barrier()
        if context.rank == 0:
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 128), hard))
            with contextlib.suppress(OSError):
                while True:
                    held.append(os.open(os.devnull, os.O_RDONLY))
        ddpkit.barrier()
        if context.rank == 0:
            time.sleep(2)
            used = time.thread_time(), time.process_time()
            time.sleep(2)
            used = time.process_time() - used[1]
            for descriptor in held:
                os.close(descriptor)
            print(f"busy for {used:.2f} s", flush=True)
            assert used < 0.5, "the watch must not spin"
        if context.rank == 1:
            for _ in range(3):
                door.say(b"anybody there?\n")
            time.sleep(0.5)
        ddpkit.barrier()
        lose_rank_2(context.rank)


def test_a_process_out_of_descriptors_still_notices_a_lost_rank() -> None:
    ended = job(without_descriptors)
    still_notices(ended)
    assert ended[0].output.count("ulimit -n") == 1, ended[0].output


def storm(seconds: float) -> None:
    with ddpkit.distributed(timeout=timedelta(seconds=seconds + 60)) as context:
        ddpkit.barrier()
        if context.rank == 1:
            rage(Door(), seconds)
        ddpkit.barrier()
        lose_rank_2(context.rank)


def rage(door: Door, seconds: float) -> None:
    """Throw lines, true in part and broken at random, at the watch over connections that come and go."""
    dice = random.Random(os.environ.get("SEED", "1"))
    wires: list[socket.socket] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        action = dice.random()
        with contextlib.suppress(OSError):
            if action < 0.3 or not wires:
                wires.append(door.enter())
                wires[-1].settimeout(0.05)
            elif action < 0.4 or len(wires) > 100:
                wires.pop(dice.randrange(len(wires))).close()
            else:
                dice.choice(wires).sendall(noise(door, dice))
    for wire in wires:
        wire.close()


def noise(door: Door, dice: random.Random) -> bytes:
    rank = dice.choice([*BAD_RANKS, 0, 1, 2])
    fields = {"rank": rank, "left": rank, "failure": dice.choice([FAILURE, [], {"rank": rank}, rank])}
    names = dice.sample(list(fields), dice.randrange(4))
    line = bytearray(door.message(**{name: fields[name] for name in names}))
    for _ in range(dice.choice([0, 0, 1, 3])):
        line[dice.randrange(len(line))] = dice.randrange(256)
    cut = dice.randrange(len(line) + 1)
    return bytes(dice.choice([line, line[:cut], line * 50, dice.randbytes(dice.choice([1, 100, 50_000]))]))


def test_a_short_storm_of_noise_does_not_blind_the_watch() -> None:
    still_notices(job(storm, 4.0))


@pytest.mark.storm
@pytest.mark.parametrize("seed", range(3))
def test_a_storm_of_noise_does_not_blind_the_watch(seed: int) -> None:
    still_notices(job(storm, 60.0, SEED=f"{seed}"))


def listeners() -> Iterator[tuple[str, int]]:
    """The addresses on which this process listens."""
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as wire:
            if wire.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                yield wire.getsockname()[:2]


def show_listeners() -> None:
    with ddpkit.distributed(timeout=LONG):
        addresses = {address for address, port in listeners() if port != int(os.environ["MASTER_PORT"])}
        print("listens on", *sorted(addresses), flush=True)
        ddpkit.barrier()


@pytest.mark.parametrize("master", ["127.0.0.1", "localhost", "::1"])
def test_a_job_on_one_node_cannot_be_reached_from_outside(master: str) -> None:
    if master == "::1" and not has_loopback_6():
        pytest.skip("needs IPv6 on the loopback interface")
    for end in job(show_listeners, MASTER_ADDR=master):
        assert end.code == 0, end.output
        addresses = end.output.partition("listens on")[2].split()
        assert addresses and set(addresses) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}, end.output


def has_loopback_6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.storm
def test_one_node_under_torchrun_cannot_be_reached_from_outside() -> None:
    program = f"import sys; sys.path[:0] = {PATHS!r}; import test_strangers as t; t.show_watch()"
    ended = launch([*TORCHRUN, "--nnodes=1", "--nproc-per-node=2", "--no-python", sys.executable, "-c", program])
    assert "the watch listens on 127.0.0.1" in ended[0].output, ended[0].output


def show_watch() -> None:
    with ddpkit.distributed(timeout=LONG):
        print("the watch listens on", Door().address[0], flush=True)
        ddpkit.barrier()


@pytest.mark.storm
@needs(nodes=True)
def test_the_watch_of_several_nodes_listens_on_the_interface_between_them() -> None:
    program = f"import sys; sys.path[:0] = {PATHS!r}; import test_strangers as t; t.show_listeners()"
    with virtual_nodes(2) as nodes:
        commands = []
        for rank, node in enumerate(nodes[1:]):
            env = platform_env(rank, 2, 29_600, MASTER_ADDR="node1")
            words = [f"{name}={value}" for name, value in env.items()]
            commands.append(node.run("env", *words, sys.executable, "-c", program))
        ended = launch(*commands)
        for end, node in zip(ended, nodes[1:], strict=True):
            assert end.code == 0, end.output
            assert end.output.partition("listens on")[2].split() == [node.address], end.output
