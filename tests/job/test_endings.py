"""However a script ends, the others hear of it if Python counts it as a failure, and only then."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from processes import free_port, launch, platform_env, run

import ddpkit

HANG = 400.0  # seconds: longer than any test may take, however loaded the machine is
# each script is a copy of this one, which has imported torch for all of them, and ends as the interpreter ends
FORK = """
import concurrent.futures, gc, json, multiprocessing, os, subprocess, sys, threading, time, traceback, ddpkit
import ddpkit.job.joining, ddpkit.watch.thread  # which each would load at setup()
names = {}
for name, (env, lines) in json.loads(sys.argv[1]).items():
    if "wrap_model" in lines:
        import torch._dynamo  # which each would load with its first DDP model, and the others would carry along
    gc.freeze()  # or each would look through all of torch when it ends
    if pid := os.fork():
        names[pid] = name
        continue
    os.environ.update(env)
    output = os.open(f"{sys.argv[2]}/{name}", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1), os.dup2(output, 2)
    exec(lines)
    break
else:
    for _ in names:
        pid, status = os.wait()
        print(names[pid], "ended with", os.waitstatus_to_exitcode(status))
"""

ENDINGS = {
    "falls off the end": "",
    "exits": "sys.exit()",
    "has a thread that runs on": "threading.Thread(target=time.sleep, args=[1]).start()",
    "has a daemon that runs on": "threading.Thread(target=time.sleep, args=[600], daemon=True).start()",
    "joined in a thread": "",
    "has a pool": "concurrent.futures.ThreadPoolExecutor().submit(time.sleep, 1)",
    "forks": "os.fork() or os._exit(0); os.wait()",
    "runs a program": "subprocess.run(['true'], check=True)",
    "collects garbage": "import gc; gc.collect()",
}


def ends(scripts: dict[str, tuple[dict[str, str], str]], folder: Path) -> dict[str, tuple[int, str]]:
    """Run scripts, each with its environment; return their exit codes and what they have printed."""
    (end,) = launch([sys.executable, "-c", FORK, json.dumps(scripts), str(folder)], timeout=HANG)
    lines = [line.rpartition(" ended with ") for line in end.output.splitlines()]
    codes = {name: int(code) for name, _, code in lines}
    return {name: (codes[name], (folder / name).read_text()) for name in scripts}


FORKED = """
context = ddpkit.setup()
group = torch.distributed.new_group(list(range(context.world_size)))
model = ddpkit.wrap_model(torch.nn.Linear(1, 1))
ddpkit.barrier()
pid = os.fork()
if pid == 0:
    {child}
code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
assert code == {code} and ddpkit.all_reduce(1) == context.world_size, code
ddpkit.teardown()
os._exit(0)
"""
CHILDREN = {
    "exits": ("sys.exit(7)", 7),
    "forgets what it was": ("del group, model; ddpkit.teardown(); sys.exit(7)", 7),
    "destroys the group": ("torch.distributed.destroy_process_group(); sys.exit(7)", 7),
    "raises": ("sys.excepthook = lambda *_: None; raise ValueError", 1),
    "is of multiprocessing": (
        "child = multiprocessing.get_context('fork').Process(target=sys.exit, args=[7])\n"
        "    child.start(); child.join(); sys.exit(child.exitcode)",
        7,
    ),
}


def test_a_script_or_a_forked_child_that_ends_without_teardown_ends_at_once_and_in_silence(tmp_path: Path) -> None:
    """No child hangs in a group that it has inherited."""
    scripts = {}
    for ending, lines in ENDINGS.items():
        join = "ddpkit.setup(); ddpkit.barrier()\n"
        if "joined" in ending:
            join = f"thread = threading.Thread(target=exec, args=[{join!r}, globals()]); thread.start(); thread.join()"
        port = free_port()
        scripts |= {f"{ending} {rank}": (platform_env(rank, 2, port), join + lines) for rank in range(2)}
    for number, (name, (child, code)) in enumerate(CHILDREN.items()):
        port, world_size = free_port(), 3 if number == 0 else 2
        lines = "import torch\n" + FORKED.format(child=child, code=code)
        for rank in range(world_size):
            scripts[f"child {name} {rank}"] = platform_env(rank, world_size, port), lines
    assert ends(scripts, tmp_path) == dict.fromkeys(scripts, (0, ""))


# the others compute; `pids` are those of all ranks
BEGIN = """
import traceback
context = ddpkit.setup()
pids = ddpkit.all_gather_object(os.getpid())
def fail():
    raise ValueError("boom")
def wait_for_end(some):
    while any(os.path.exists(f"/proc/{pid}") for pid in some):
        time.sleep(0.05)
"""
LATER = "time.sleep(1)\n"  # when the others have come out of BEGIN, too
# those who look on have nothing to show in how they end themselves
HEAR = """
try:
    for _ in range(3000):
        time.sleep(0.1)
except ddpkit.PeerError as error:
    print(error.rank, str(error), flush=True)
    ddpkit.teardown()
    os._exit(0)
"""
WAIT = HEAR.replace("time.sleep(0.1)", "ddpkit.barrier()")
FAILURES = {  # what a rank does, its exit code, and what the others hear
    "exits": ("sys.exit(3)", 3, "SystemExit: it ended with exit code 3"),
    "exits with 10": ("sys.exit(10)", 10, "SystemExit: it ended with exit code 10"),
    "exits with a text": ("sys.exit('bad')", 1, "SystemExit: it ended with exit code 1"),
    "shows its exception": (
        "try: fail()\nexcept ValueError: traceback.print_exc(); sys.exit(1)",
        1,
        "SystemExit: it ended with exit code 1",
    ),
    "has another hook": ("sys.excepthook = lambda *_: None\nfail()", 1, "ValueError: boom\n\nTraceback"),
    "is interrupted": (
        "sys.excepthook = lambda *_: None\nraise KeyboardInterrupt",
        -2,
        "KeyboardInterrupt\n\nTraceback",
    ),
    "leaves in finally": ("try: fail()\nfinally: ddpkit.teardown()", 1, "ValueError: boom\n\nTraceback"),
    "leaves in except": (
        "try: fail()\nexcept ValueError: ddpkit.teardown(); sys.exit(4)",
        4,
        "ValueError: boom\n\nTraceback",
    ),
    "handles an exception": ("try: next(iter(()))\nexcept StopIteration: ddpkit.teardown()", 0, "StopIteration"),
    "exits through finally": ("try: sys.exit(3)\nfinally: ddpkit.teardown()", 3, "SystemExit: 3"),
}


@pytest.mark.storm
def test_a_rank_that_fails_without_distributed_is_known_to_those_who_compute(tmp_path: Path) -> None:
    scripts = {}
    for number, (name, (lines, _, _)) in enumerate(FAILURES.items()):
        port, faulty = free_port(), number % 2
        for rank in range(2):
            scripts[f"{name} {rank}"] = platform_env(rank, 2, port), BEGIN + (LATER + lines if rank == faulty else HEAR)
    ended = ends(scripts, tmp_path)
    for number, (name, (_, code, words)) in enumerate(FAILURES.items()):
        faulty = number % 2
        code_of_other, heard = ended[f"{name} {1 - faulty}"]
        assert code_of_other == 0, heard
        assert f"{faulty} rank {faulty} (" in heard
        assert f"failed: {words}" in heard
        assert ended[f"{name} {faulty}"][0] == code


@pytest.mark.storm
def test_the_ranks_on_both_sides_hear_how_the_one_between_them_ends(tmp_path: Path) -> None:
    chain = "from ddpkit.watch import messages\nmessages.CHILDREN = 1\n"
    scripts = {}
    for name in ("exits", "leaves in except"):
        port = free_port()
        for rank in range(3):
            script = chain + BEGIN + (LATER + FAILURES[name][0] if rank == 1 else HEAR)
            scripts[f"{name} {rank}"] = platform_env(rank, 3, port), script
    ended = ends(scripts, tmp_path)
    for name in ("exits", "leaves in except"):
        _, code, words = FAILURES[name]
        assert ended[f"{name} 1"][0] == code
        for rank in (0, 2):
            assert ended[f"{name} {rank}"][0] == 0
            assert "1 rank 1 (" in ended[f"{name} {rank}"][1] and f"failed: {words}" in ended[f"{name} {rank}"][1]


SLOW = "import atexit; atexit.register(time.sleep, 6)\n"  # before setup(): so after the exit hook of ddpkit's
REDUCE = HEAR.replace(
    "time.sleep(0.1)", "with ddpkit.peer_errors(): torch.distributed.all_reduce(torch.ones(1)); time.sleep(0.01)"
)
PLACES = {"compute": HEAR, "wait": WAIT, "reduce": "import torch\n" + REDUCE}


def waiting_for_one_that_leaves() -> dict[str, tuple[dict[str, str], str]]:
    scripts = {}
    leave = "try: fail()\nfinally: ddpkit.teardown(); wait_for_end(set(pids) - {os.getpid()})"  # it has not ended yet
    for faulty in (0, 1):
        port = free_port()
        for rank in range(3):
            script = BEGIN + (LATER + leave if rank == faulty else WAIT)
            scripts[f"{faulty} {rank}"] = platform_env(rank, 3, port), script
    return scripts


def test_those_who_wait_hear_at_once_why_a_rank_has_left_and_wait_for_an_exit_that_takes_long(tmp_path: Path) -> None:
    slow_exits = {
        "sys.exit(1)": "SystemExit: it ended with exit code 1",
        "try: sys.exit('config is wrong')\nfinally: ddpkit.teardown()": "SystemExit: config is wrong",
    }
    scripts, expected = {}, {}
    for number, (how, place) in enumerate(itertools.product(slow_exits.items(), PLACES.items())):
        (lines, words), (where, others), port = how, place, free_port()
        for rank in range(3):
            name = f"{number} {where} {rank}"
            expected[name] = "" if rank == 1 else f"1 rank 1 ({socket.gethostname()}) failed: {words}"
            scripts[name] = platform_env(rank, 3, port), SLOW + BEGIN + (LATER + lines if rank == 1 else others)
    ended = ends(scripts | waiting_for_one_that_leaves(), tmp_path)
    for name, words in expected.items():
        code, output = ended[name]
        assert words in output, f"{name}: {output}"
        assert code == (0 if words else 1), f"{name}: {output}"
    for faulty in (0, 1):
        for rank in {0, 1, 2} - {faulty}:
            code, output = ended[f"{faulty} {rank}"]
            assert code == 0, output
            assert f"{faulty} rank {faulty} (" in output, output
            assert "failed: ValueError: boom\n\nTraceback" in output, output
        assert ended[f"{faulty} {faulty}"][0] == 1


GOOD = {  # ends that are no failure, and their exit codes
    "falls off the end": ("", 0),
    "exits": ("sys.exit(0)", 0),
    "leaves and exits": ("ddpkit.teardown(); sys.exit(3)", 3),
    "leaves and fails": ("ddpkit.teardown(); fail()", 1),
    "has handled an exception": ("try: next(iter(()))\nexcept StopIteration: pass\nddpkit.teardown()", 0),
    "leaves and is interrupted": ("try: raise KeyboardInterrupt\nfinally: ddpkit.teardown()", -2),
    "handles an interrupt": (
        "try: raise KeyboardInterrupt\nexcept KeyboardInterrupt: ddpkit.teardown(); sys.exit(130)",
        130,
    ),
    "joins again": (
        "try: fail()\nexcept ValueError: pass\nddpkit.teardown()\n"
        "for name in 'RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT': del os.environ[name]\n"
        "ddpkit.setup(); sys.exit(3)",
        3,
    ),
}
UNDISTURBED = """
wait_for_end([pids[int(os.environ["EARLY"])]])
time.sleep(1)
ddpkit.teardown()
print("undisturbed", flush=True)
os._exit(0)
"""


@pytest.mark.storm
def test_a_rank_that_ends_in_good_order_disturbs_nobody_who_computes(tmp_path: Path) -> None:
    scripts = {}
    for number, (name, (lines, _)) in enumerate(GOOD.items()):
        port, early = free_port(), number % 2
        for rank in range(2):
            env = platform_env(rank, 2, port, EARLY=f"{early}")
            scripts[f"{name} {rank}"] = env, BEGIN + (lines if rank == early else UNDISTURBED)
    ended = ends(scripts, tmp_path)
    for number, (name, (_, code)) in enumerate(GOOD.items()):
        early = number % 2
        code_of_other, output = ended[f"{name} {1 - early}"]
        assert code_of_other == 0 and output.endswith("undisturbed\n") and "PeerError" not in output, output
        assert ended[f"{name} {early}"][0] == code, ended[f"{name} {early}"]


def leave_at_once() -> None:
    rank, how = int(os.environ["RANK"]), os.environ["HOW"]
    make_group = dist.init_process_group

    def connect_late(*args: Any, **kwargs: Any) -> None:
        make_group(*args, **kwargs)
        time.sleep(2.0 if how != "hangs" else 12.0)
        if how == "raises":
            raise ValueError("cannot go on")
        if how == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)

    if rank == 2:
        dist.init_process_group = connect_late
    begun = time.monotonic()
    ddpkit.setup(timeout=timedelta(seconds=CONNECTIONS[how][0]))
    print(f"joined after {time.monotonic() - begun:.1f} s")
    ddpkit.teardown()


CONNECTIONS = {  # the time-out of a rank's setup() in seconds, and what the others hear; the longest begins first
    "hangs": (3, "group made: 1 of 3 ranks did not arrive"),
    "comes": (1000, ""),
    "raises": (1000, "ValueError: cannot go on"),
    "is killed": (1000, "was lost"),
}


def test_a_rank_that_still_connects_is_waited_for_or_named() -> None:
    envs = []
    for how in CONNECTIONS:
        port = free_port()
        envs += [platform_env(rank, 3, port, HOW=how) for rank in range(3)]
    every = run(leave_at_once, envs, delays=[1.0, 0.0, 0.0] * len(CONNECTIONS))
    for number, (how, (_, words)) in enumerate(CONNECTIONS.items()):
        *ended, late = every[3 * number : 3 * number + 3]
        for end in ended:
            if how == "comes":
                found = re.search(r"joined after ([\d.]+) s", end.output)
                assert end.code == 0 and found and float(found[1]) > 1.5, end
            else:
                assert end.code == 1 and words in end.output and "rank 2 (" in end.output, end
        assert late.code == {"comes": 0, "is killed": -9}.get(how, 1), late
