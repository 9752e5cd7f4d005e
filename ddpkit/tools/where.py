"""Run `python -m ddpkit where`: what is each rank of a running job doing, and for how long?"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from .. import LaunchError, detect_launch
from ..launch import detection
from ..launch.process_tree import child_processes, environment_of
from ..parsing import encode
from ..rendezvous.generation import Generation
from ..rendezvous.members import Member, Members
from ..rendezvous.sockets import connect
from ..rendezvous.store import connect_to_store
from ..watch.messages import STACK_SIGNAL, STACKS, Activity, fold, parse, short_path
from .cli import count, positive_seconds, show

_STORE_SECONDS = 5.0  # in which the store must answer


class Answer(NamedTuple):
    """What the ranks of a job have answered.

    Attributes:
        members: The ranks of the job.
        claims: The process of each.
        activities: Of those that have answered.
    """

    members: Members
    claims: list[Member]
    activities: list[Activity]

    @property
    def silent(self) -> list[Member]:
        """List the processes of the ranks that have not answered."""
        answered = {activity.rank for activity in self.activities}
        return [claim for claim in self.claims if claim.rank not in answered]


def ask(address: str, port: int, seconds: float) -> Answer:
    """Ask all ranks of the job that has met at this address; wait at most so many seconds for answers.

    Raises:
        LaunchError: If no job runs there, it has no watch, or rank 0's cannot be reached from here.
    """
    members, claims = _find_members(address, port)
    if members.watch_address is None:
        raise LaunchError("The job runs without the watch, setup(watch=False), so its ranks cannot be asked.")
    host, number = members.watch_address
    try:
        connection = connect(host, number, seconds)
    except OSError as error:
        raise LaunchError(
            f"The watch of rank 0 at {host}:{number} cannot be reached from here: {error}. Ask on the node of rank 0, "
            f"{members.hosts[0]}; if that is here, the process may have ended."
        ) from None
    activities: dict[int, Activity] = {}
    deadline = time.monotonic() + seconds
    with connection, connection.makefile("rb") as lines, suppress(OSError):  # late, or cut
        connection.sendall(encode(token=members.token, asks=True))
        for line in lines:
            message = parse(line, members.world_size)
            if message is not None and message.activity is not None:
                activities[message.activity.rank] = message.activity
            if len(activities) == members.world_size:
                break
            connection.settimeout(max(0.001, deadline - time.monotonic()))
    return Answer(members, claims, list(activities.values()))


def _find_members(address: str, port: int) -> tuple[Members, list[Member]]:
    """Read in the store who the ranks of the job are that meets there now, and which process each is."""
    try:
        connect(address, port, _STORE_SECONDS).close()  # torch's own client would wait, and log C++ stacks
    except OSError as error:
        raise LaunchError(f"Nobody answers at {address}:{port} ({error}). Is rank 0 running there?") from None
    store = connect_to_store(address, port, timedelta(seconds=_STORE_SECONDS))
    generation = Generation.latest(store)
    if generation is None:
        raise LaunchError(f"No job has joined with ddpkit.setup() at {address}:{port}.")
    if not generation.is_complete():
        raise LaunchError(f"The ranks at {address}:{port} are still joining.")
    if generation.is_over():
        raise LaunchError(f"The job at {address}:{port} has ended.")
    members = generation.members()
    return members, generation.claims(range(members.world_size))


# Reading the stacks of processes on this machine, which need not answer: Python writes them at a signal.

_STACK_WAIT = 3.0  # seconds in which a process must write its stack
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_STATES = {"R": "runs", "S": "sleeps", "D": "waits for a device", "T": "is stopped", "t": "is traced"}


class Process(NamedTuple):
    """A process of this machine, and its calls, the outermost first; none if Python cannot write them."""

    rank: int
    pid: int
    is_worker: bool
    state: str
    stack: list[str]


def inspect(answer: Answer) -> list[Process]:
    """Read what the silent ranks on this machine are doing, and the loader workers of all ranks here."""
    found: list[Process] = []
    for claim in answer.claims:
        if claim.host != socket.gethostname():
            continue
        own = [claim.pid] if claim in answer.silent else []
        for pid in [*own, *child_processes(claim.pid)]:
            with suppress(OSError):  # it has ended
                found += _inspect_process(claim, pid)
    return found


def _inspect_process(claim: Member, pid: int) -> Iterator[Process]:
    text = Path(f"/proc/{pid}/status").read_text(errors="replace")
    status = dict(re.findall(r"^(\w+):\s*(\S*)", text, re.MULTILINE))
    state = status["State"]
    files = []  # in memory: it never waits
    if int(status["SigCgt"], 16) >> (STACK_SIGNAL - 1) & 1:  # else the signal would kill it
        fds = Path(f"/proc/{pid}/fd").iterdir()
        files = [file for file in fds if os.readlink(file).startswith(f"/memfd:{STACKS}")]
    stack = []
    if files and state in "RSD":
        stack = _frames(request_stack(pid, STACK_SIGNAL, files[0]))
    if files or pid == claim.pid:
        yield Process(claim.rank, pid, pid != claim.pid, _STATES.get(state, "has ended"), stack)


def request_stack(pid: int, number: int, file: Path) -> str:
    """Let a process append its stack to a file by a signal, and read that; "" if it does not answer."""
    known = file.stat().st_size
    with suppress(ProcessLookupError):
        os.kill(pid, number)
    deadline = time.monotonic() + _STACK_WAIT
    text, before = b"", None
    while time.monotonic() < deadline and (not text or text != before):
        time.sleep(0.02)
        before = text
        text = file.read_bytes()[known:]
    return text.decode(errors="replace")


def _frames(text: str) -> list[str]:
    """List the calls of the main thread, which Python writes last, the outermost first."""
    text = text.rpartition("most recent call first")[2]
    frames = [f"{short_path(path)}:{line} {name}" for path, line, name in _FRAME.findall(text)]
    for number, frame in enumerate(frames):
        if frame.endswith(" _worker_loop"):  # what is around it is that of the rank when it forked the worker
            del frames[number + 1 :]
            break
    return frames[::-1]


def describe(processes: list[Process]) -> list[str]:
    """Write what processes of this machine are doing: those of one rank with equal stacks once."""
    pids: dict[tuple[str, ...], list[str]] = {}
    for each in processes:
        owner = f"loader workers of rank {each.rank}" if each.is_worker else f"rank {each.rank}"
        pids.setdefault((owner, each.state, *each.stack), []).append(str(each.pid))
    lines = []
    for (owner, state, *stack), same in pids.items():
        lines.append(f"{owner}, pid {', '.join(same)}: {state}")
        lines += [f"    {line}" for line in stack]
    return lines


# Finding the jobs of which ranks run on this machine, by the environments of its processes.


def jobs_here(processes: Path = Path("/proc")) -> dict[tuple[str, int], str]:
    """Return the address of each job, MASTER_ADDR and MASTER_PORT, with one of its ranks' process and script.

    Linux shows those of one's own processes.
    """
    jobs: dict[tuple[str, int], str] = {}
    for folder in sorted(processes.glob("[0-9]*"), key=lambda folder: int(folder.name)):
        with suppress(OSError, LaunchError):  # another user's; ended; hints that contradict each other
            env = environment_of(int(folder.name), processes)
            if "MASTER_PORT" not in env or "python" not in os.readlink(folder / "exe"):  # `timeout`, which starts it
                continue
            launch = detect_launch(env)
            if launch.world_size > 1 and launch.master_addr and launch.master_port:
                words = (folder / "cmdline").read_text(errors="replace").split("\0")
                script = next((Path(word).name for word in words if word.endswith(".py")), words[0])
                jobs.setdefault((launch.master_addr, launch.master_port), f"{script}, pid {folder.name}")
    return jobs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add = parser.add_argument
    jobs = "its MASTER_ADDR:MASTER_PORT, which rank 0 logs when it has joined (default: the job on this machine)"
    add("--job", type=_address, metavar="HOST:PORT", help=jobs)
    bound = "bound on the ranks' answers (default 2)"
    add("--timeout", type=positive_seconds, default=2.0, metavar="SECONDS", help=bound)
    add("--json", action="store_true", help="print one JSON object to stdout and nothing else")


def run(args: argparse.Namespace) -> int:
    """Ask, and print the answers; return 1 if a rank has not answered, or there is no job, else 0."""
    try:
        address, port = args.job or _only_job()
        answer = ask(address, port, args.timeout)
    except LaunchError as error:
        show(f"ddpkit where: {error}", on_stderr=True)
        return 1
    if args.json:
        print(json.dumps(_as_json(answer)))
    else:
        ranks = count(answer.members.world_size, "rank")
        nodes = count(len(answer.members.nodes), "node")
        show(f"{ranks} on {nodes}, at {time.strftime('%H:%M:%S')}, job {address}:{port}")
        processes = {claim.rank: str(claim) for claim in answer.claims}
        lines = fold(answer.activities, answer.members.world_size, processes)
        show("\n".join([*lines, *describe(inspect(answer))]))
    return int(bool(answer.silent))


def _only_job() -> tuple[str, int]:
    """Return the address of the job that the environment names, else of the only one with ranks on this machine."""
    address, port = os.environ.get("MASTER_ADDR"), detection.port(os.environ.get("MASTER_PORT"))
    if address and port:
        return address, port
    jobs = jobs_here()
    if len(jobs) == 1:
        return next(iter(jobs))
    which = "--job HOST:PORT takes the master that rank 0 logs when it has joined"
    if not jobs:
        raise LaunchError(f"No process here shows in its environment that it is a rank; {which}.")
    found = "".join(f"\n    --job {address}:{port}  ({what})" for (address, port), what in jobs.items())
    raise LaunchError(f"Ranks of several jobs run here: choose one.{found}")


def _as_json(answer: Answer) -> dict[str, object]:
    ranks = [asdict(each) for each in sorted(answer.activities, key=lambda each: each.rank)]
    silent = [{"rank": each.rank, "host": each.host, "pid": each.pid} for each in answer.silent]
    processes = [each._asdict() for each in inspect(answer)]
    return {"world_size": answer.members.world_size, "ranks": ranks, "silent": silent, "processes": processes}


def _address(text: str) -> tuple[str, int]:
    found = re.fullmatch(r"\[?(\S+?)\]?:(\d{1,5})", text)
    if found is None or int(found[2]) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT")
    return found[1], int(found[2])
