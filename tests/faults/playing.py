"""Plays a case and measures it."""

from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from nodes import Node, cut, lacks, virtual_nodes
from processes import free_port, platform_env

import ddpkit

from . import programs
from .cases import TORCHRUN, Conflict, Fault
from .launching import PYTHON, Run, side_by_side

HOST = socket.gethostname()
SCRIPT = str(Path(programs.__file__))
Case = Fault | Conflict
Pair = tuple[Case, str]  # and its launcher


@dataclass
class Outcome:
    """What became of a case under one launcher."""

    seconds: float = math.nan  # from the fault until all others knew
    total: float = math.nan  # until everything that was started had ended
    how: list[str] = field(default_factory=list)  # what became of each rank that did not fail itself
    problems: list[str] = field(default_factory=list)  # what was not as it should be
    text: str = ""  # all that was printed


def why_not(case: Case) -> str:
    """Why this case cannot be played on this machine; "" if it can."""
    if isinstance(case, Fault) and case.nodes:
        return lacks(nodes=True)
    if isinstance(case, Fault) and case.fault == "save_too_much":
        mount = ["unshare", "--mount", "mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", "/mnt"]
        done = subprocess.run(mount, capture_output=True, text=True, check=False)
        return f"no tmpfs can be mounted: {done.stderr.strip()}" if done.returncode else ""
    return ""


def play_all(pairs: list[Pair], folder: Path, jobs: int, done: Callable[[Pair, Outcome], None]) -> None:
    """Plays cases, `jobs` at a time, those that wait longest first; `done` is told the outcome of each."""
    tasks = []
    for number, pair in enumerate(sorted(pairs, key=lambda pair: -pair[0].limit)):
        place = folder / str(number)
        place.mkdir()
        tasks.append(_play(pair, Run(place, 300 + 3 * pair[0].limit), done))
    side_by_side(tasks, jobs)


def _play(pair: Pair, run: Run, done: Callable[[Pair, Outcome], None]) -> Iterator[None]:
    outcome = Outcome()
    with ExitStack() as cleanup:
        try:
            yield from (_fault if isinstance(pair[0], Fault) else _conflict)(*pair, run, outcome, cleanup)
            yield from run.until(lambda: not run.left_behind())
        finally:
            outcome.text = run.text()
            left = run.close()
            if isinstance(pair[0], Fault) and pair[0].nodes:  # torchrun itself may hang on the node that is cut off
                left = [pid for pid in left if pid not in [member.pid for member in run.members]]
            if left:
                outcome.problems.append(f"processes {left} were left behind")
    done(pair, outcome)


def _fault(case: Fault, launcher: str, run: Run, outcome: Outcome, cleanup: ExitStack) -> Iterator[None]:
    disk = run.folder / "disk"
    disk.mkdir()
    if case.fault == "save_too_much":
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], check=True)
        cleanup.callback(subprocess.run, ["umount", str(disk)], check=True)
    nodes = cleanup.enter_context(virtual_nodes(2)) if case.nodes else []
    words = (str(run.folder), case.fault, case.place, str(case.faulty), str(case.timeout))
    size = 2 if nodes else 3
    if nodes:
        for rank in range(size):
            start_node(run, nodes[1:], rank, launcher, words)
    elif launcher == TORCHRUN:
        run.torchrun(SCRIPT, "fail_or_stay", *words, nprocs=size)
    else:
        port = free_port()
        for rank in range(size):
            run.plain(programs.fail_or_stay, platform_env(rank, size, port), *words)
    yield from run.until(lambda: run.noted("fault"))
    pids = {entry["rank"]: entry["pid"] for entry in run.noted("begin")}
    if not run.noted("fault"):
        outcome.problems.append(
            f"it never came to the fault, {'and ended' if run.over() else 'in all the time it had'}"
        )
        return
    run.end = min(run.end, time.time() + 90 + 3 * case.limit)  # torchrun may hang on a node that is cut off
    start = run.noted("fault")[0]["time"]
    others = [rank for rank in pids if rank != case.faulty]
    if nodes:
        start = time.time()
        cut(nodes, 2)
        others = list(pids)
    elif case.strike:
        start, others = time.time(), list(pids)
        for pid in [run.members[0].pid] if launcher == TORCHRUN else pids.values():
            os.kill(pid, case.strike)
    yield from run.until(lambda: all(rank in run.knew for rank in others))
    outcome.seconds = max(run.knew.get(rank, math.inf) for rank in others) - start
    if case.fault == "stop" and launcher != TORCHRUN:  # torchrun ends it after 30 s
        os.kill(pids[case.faulty], signal.SIGCONT)
    yield from run.until(run.over)
    outcome.total = time.time() - start
    judge_fault(case, launcher, run, outcome, others)


def start_node(run: Run, nodes: list[Node], rank: int, launcher: str, words: tuple[str, ...]) -> None:
    env = {"GLOO_SOCKET_IFNAME": "eth0"}
    if launcher == TORCHRUN:
        meet = ["--nnodes=2", "--nproc_per_node=1", "--rdzv_backend=c10d", f"--rdzv_endpoint={nodes[0].address}:29400"]
        words = ("-m", "torch.distributed.run", *meet, SCRIPT, "fail_or_stay", *words)
    else:
        words = (SCRIPT, "fail_or_stay", *words)
        env |= platform_env(rank, 2, 29500, MASTER_ADDR="node1")
    run.command(*nodes[rank].lead(PYTHON, *words), **env)


def judge_fault(case: Fault, launcher: str, run: Run, outcome: Outcome, others: list[int]) -> None:
    said = case.said.format(host="" if case.nodes else HOST, faulty=case.faulty)
    agent = launcher == TORCHRUN and case.strike != signal.SIGKILL
    summary = run.text("0.log").partition("Root Cause")[2] if agent else ""
    for rank in others:
        text = run.text_of(rank)
        if case.fault == "all_reduce_more" and "gloo::EnforceNotMet" in text:  # this rank got more than it expected
            continue
        outcome.how.append(run.how(rank, text))
        by_torchrun = agent and outcome.how[-1] == "was ended"  # because it saw another one fail
        first = "SIGABRT" if case.fault == "all_reduce_more" else f"rank      : {case.faulty}"
        by_torchrun &= first in summary or any(said in run.text_of(other) for other in others)
        if case.nodes:
            said = f"rank {1 - rank} (node{2 - rank}) was lost"
        if case.passes != (outcome.how[-1] == "passed") or not (said in text or by_torchrun):
            outcome.problems.append(f"rank {rank} {outcome.how[-1]} and did not say {said!r}")
    if not outcome.how:
        outcome.problems.append("nobody was left to hear of it")
    if launcher != TORCHRUN:
        codes = [code for rank, code in enumerate(run.codes()) if rank in others]
        if any((code == 0) != case.passes for code in codes):
            outcome.problems.append(f"exit codes {codes}")
    elif any((code == 0) != case.passes for code in run.codes()):
        outcome.problems.append(f"torchrun's exit code {run.codes()}")
    loaded = ddpkit.Checkpointer(run.folder / "disk").load_latest()
    if loaded is None or (loaded["step"] != 1 and case.place != "save_forever"):
        outcome.problems.append(f"the last complete checkpoint does not load: {loaded}")


def _conflict(case: Conflict, launcher: str, run: Run, outcome: Outcome, cleanup: ExitStack) -> Iterator[None]:
    words = (str(run.folder), str(case.timeout), "0" if case.passes else "30")
    port = free_port()
    if case.stranger:
        port = cleanup.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
    if case.torchrun is not None:
        inner = ["--no-python", PYTHON, "-m", "torch.distributed.run", "--nproc_per_node=2"] if case.nested else []
        run.torchrun(*inner, SCRIPT, "join_and_stay", *words, nprocs=2, **case.torchrun)
    for envs in (case.early, case.late):
        for rank, size, *more in envs:
            run.plain(programs.join_and_stay, platform_env(rank, size, port, **(more[0] if more else {})), *words)
        if case.late:
            yield from run.until(lambda: len(run.noted("joined")) == len(case.early))
    yield from run.until(run.over)
    begins = [entry["time"] for entry in run.noted("begin")]
    ends = [entry["time"] for entry in run.noted("passed" if case.passes else "raised")]
    outcome.total = time.time() - max(begins, default=math.nan)
    outcome.seconds = max(ends, default=math.inf) - max(begins, default=math.nan)
    if not ends or len(ends) < len(begins):
        outcome.problems.append(f"of {len(begins)} processes {len(ends)} ended as they should")
    if any((code == 0) != case.passes for code in run.codes()):
        outcome.problems.append(f"exit codes {run.codes()}")
    said = case.said.format(port=port)
    for path in run.logs():
        if said not in path.read_text(errors="replace"):
            outcome.problems.append(f"{path.name} does not say {said!r}")
