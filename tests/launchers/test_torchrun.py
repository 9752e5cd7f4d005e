"""One program under torchrun, on one node and on several, and as a platform starts it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from jobs import (
    MEET,
    PREEMPTED,
    PROGRAM,
    PYTHON,
    assert_done,
    assert_ended,
    assert_joined,
    ending,
    process_of,
    stopped_after,
    wait_until_all_train,
)
from nodes import Node, needs, virtual_nodes
from processes import TORCHRUN, Ended, free_port, launch, platform_env

FIRST = """
import sys, time
from pathlib import Path
import ddpkit
with ddpkit.distributed() as job:
    with ddpkit.main_process_first(local=True):
        made = Path(sys.argv[1], f"node {job.node_rank}")
        if job.local_rank == 0:
            time.sleep(0.5)
            made.mkdir()
        assert made.is_dir()
"""


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[Node]]:
    with virtual_nodes(3) as (_, *nodes):
        yield nodes


def wait_for(happened: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.05)


FAILING = """
import time
with ddpkit.distributed() as job:
    if job.rank == 1:
        raise ValueError("boom")
    time.sleep(600)
"""


def test_ranks_of_torchrun_on_one_node_join_and_a_failure_is_shown_without_a_decorator(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(Path(*PROGRAM).read_text() + FAILING)
    (end,) = launch([*TORCHRUN, "--nproc-per-node=2", str(tmp_path / "script.py")])
    assert end.code == 1 and end.seconds < 120, "it has waited for the rank that sleeps, or for a time-out"
    summary = end.output[end.output.index("Root Cause") :]
    assert "rank      : 1" in summary and "ValueError: boom" in summary, end.output
    assert "PeerError: rank 1" in end.output
    assert "NOT been destroyed" not in end.output and "terminate called" not in end.output
    assert_joined([replace(end, code=0)], "torchrun", 2)


MISTAKE = """
import torch, ddpkit
with ddpkit.distributed() as job:
    model = ddpkit.wrap_model(torch.nn.Linear(1, 1))
    for step in range(STEPS):
        loss = model(torch.ones(1)).sum()
        loss.backward()
    if WHO:
        ddpkit.all_reduce_mean(loss.detach())
"""


@pytest.mark.parametrize(
    ("steps", "who", "call"),
    [
        pytest.param("2", "job.rank == 0", r"all_reduce_mean\(\) at train.py:9", id="a call on rank 0 alone"),
        pytest.param(
            "2 + 2 * (job.rank == 0)",
            "False",
            r"(backward|DDP's forward) at train.py:[67]",
            id="fewer batches on rank 1",
            marks=pytest.mark.storm,
        ),
    ],
)
def test_a_failure_begins_with_its_cause_in_one_line_and_shows_the_scripts_lines_alone(
    steps: str, who: str, call: str, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(MISTAKE.replace("STEPS", steps).replace("WHO", who))
    (end,) = launch([*TORCHRUN, "--nproc-per-node=2", str(tmp_path / "train.py")])
    cause, docs, *more = [line for line in end.output.splitlines() if line.startswith("[rank0]: ")]
    assert re.match(rf"\[rank0\]: PeerError: rank 1 \(.*\) left the job while rank 0 waited for it in {call}\. ", cause)
    assert docs == "[rank0]: Docs: https://ddpkit.readthedocs.io/en/latest/guide/faults.html"
    assert "ddpkit/" not in "".join(more) and len(more) < 20


@pytest.mark.storm
@pytest.mark.parametrize("fault", ["raise", "kill"])
def test_torchrun_ends_the_other_rank_of_a_node(fault: str, tmp_path: Path) -> None:
    (end,) = launch([*TORCHRUN, "--standalone", "--nproc-per-node=2", *ending(tmp_path, fault, "got SIGTERM")])
    assert_ended(end, tmp_path, "got SIGTERM")


@pytest.mark.storm
def test_ranks_behind_a_wrapper_end_when_torchrun_is_killed(tmp_path: Path) -> None:
    stay = """
import sys, time, ddpkit
with ddpkit.distributed() as context, open(sys.argv[1] + str(context.rank), "w", buffering=1) as file:
    print("joined", file=file)
    try:
        time.sleep(100) if context.rank else ddpkit.barrier()
    except ddpkit.PeerError as error:
        print(error, file=file)
"""
    (tmp_path / "stay.py").write_text(stay)
    (tmp_path / "wrap.sh").write_text('"$@"; exit $?\n')
    files = [tmp_path / "0", tmp_path / "1"]

    def read(word: str) -> bool:
        return all(file.exists() and word in file.read_text() for file in files)

    def kill(crew: list[subprocess.Popen[bytes]]) -> None:
        wait_for(lambda: read("joined"))
        crew[0].kill()
        wait_for(lambda: read("has lost its launcher: torchrun (pid"), 15)

    wrapped = ["--no-python", "sh", str(tmp_path / "wrap.sh"), *PYTHON, str(tmp_path / "stay.py"), f"{tmp_path}/"]
    (end,) = launch([*TORCHRUN, "--standalone", "--nproc-per-node=2", *wrapped], meanwhile=kill)
    assert end.code == -signal.SIGKILL
    assert end.output.count("Exception raised from") < 8  # a C++ stack for each call of a dead store


@pytest.mark.storm
@needs(nodes=True)
@pytest.mark.parametrize("fault", ["raise", "kill"])
def test_ddpkit_alone_ends_the_rank_on_another_node(fault: str, nodes: list[Node], tmp_path: Path) -> None:
    agent = [*TORCHRUN, "--nnodes=2", "--nproc-per-node=1", *MEET, *ending(tmp_path, fault, "stayed")]
    for end in launch(*(node.run(*agent) for node in nodes[:2])):
        assert_ended(end, tmp_path, "stayed")


@pytest.mark.storm
@needs(nodes=True)
@pytest.mark.parametrize("sizes", [(2, 2), (1, 1, 1)])
def test_torchrun_on_several_nodes(sizes: tuple[int, ...], nodes: list[Node]) -> None:
    commands = [
        node.run(*TORCHRUN, f"--nnodes={len(sizes)}", f"--nproc-per-node={size}", *MEET, *PROGRAM)
        for node, size in zip(nodes, sizes, strict=False)
    ]
    assert_joined(launch(*commands), "torchrun", *sizes)


@pytest.mark.storm
@pytest.mark.parametrize("local", [True, False])
def test_a_platform_that_sets_the_variables(local: bool) -> None:
    port = free_port()
    envs = [platform_env(rank, 2, port) for rank in range(2)]
    if local:
        envs = [env | {"LOCAL_RANK": env["RANK"], "LOCAL_WORLD_SIZE": "2"} for env in envs]
    commands = [["env", *(f"{k}={v}" for k, v in env.items()), *PYTHON, *PROGRAM] for env in envs]
    assert_joined(launch(*commands), "platform", 2)


@pytest.fixture(scope="module")
def clones() -> Iterator[list[Node]]:
    with virtual_nodes(2, name="clone") as (_, *nodes):
        yield nodes


def on_clones(nodes: list[Node], *program: str, local: bool = False) -> list[Ended]:
    """Two ranks on each of two nodes with one host name, as a platform starts them."""
    commands = []
    for rank in range(4):
        env = platform_env(rank, 4, 29400, MASTER_ADDR=nodes[0].address)
        if local:
            env |= {"LOCAL_RANK": f"{rank % 2}", "LOCAL_WORLD_SIZE": "2"}
            env |= {"NODE_RANK": f"{rank // 2}", "GROUP_WORLD_SIZE": "2"}
        commands.append(nodes[rank // 2].run("env", *(f"{k}={v}" for k, v in env.items()), *PYTHON, *program))
    return launch(*commands)


@pytest.mark.storm
@needs(nodes=True)
@pytest.mark.parametrize("local", [True, False])
def test_a_platform_on_two_nodes_with_one_host_name(local: bool, clones: list[Node]) -> None:
    assert_joined(on_clones(clones, *PROGRAM, local=local), "platform", 2, 2)


@pytest.mark.storm
@needs(nodes=True)
def test_the_first_rank_of_each_node_goes_first_where_nodes_have_one_host_name(
    clones: list[Node], tmp_path: Path
) -> None:
    ended = on_clones(clones, "-c", FIRST, str(tmp_path))
    assert [end.code for end in ended] == [0] * 4, ended


@pytest.mark.storm
@needs(nodes=True)
def test_containers_of_one_pod_are_one_node() -> None:
    """They share the host name and the network, and each has process numbers of its own."""
    port = free_port()
    envs = [[f"{k}={v}" for k, v in platform_env(rank, 2, port).items()] for rank in range(2)]
    container = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "env"]
    assert_joined(launch(*([*container, *env, *PYTHON, *PROGRAM] for env in envs)), "platform", 2)


@pytest.mark.storm
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["its SIGTERM", "Ctrl-C"])
def test_ranks_of_a_torchrun_that_is_ended_save_and_go_on(number: signal.Signals, tmp_path: Path) -> None:
    command = [*TORCHRUN, "--standalone", "--nproc-per-node=2", PREEMPTED, str(tmp_path)]

    def end(crew: list[subprocess.Popen[bytes]]) -> None:
        wait_until_all_train(tmp_path, 2)
        if number == signal.SIGTERM:
            crew[0].terminate()
        else:
            os.killpg(crew[0].pid, number)  # as a terminal does

    (stopped,) = launch(command, meanwhile=end)
    assert stopped.code == 1, stopped  # torchrun's own, which no longer waits for its ranks' codes
    assert "Traceback" not in stopped.output.partition("SignalException")[0].partition("all ranks stop")[0]
    step = stopped_after(tmp_path, 2, rf"rank \d \(.*\) got {number.name}")
    (ended,) = launch(command)
    assert ended.code == 0, ended
    assert (tmp_path / f"rank 1 from step {step}").exists()
    assert_done(tmp_path, 2)


@needs(nodes=True)
@pytest.mark.storm
def test_ranks_of_another_node_stop_with_those_of_a_torchrun_that_is_ended(nodes: list[Node], tmp_path: Path) -> None:
    agent = [*TORCHRUN, "--nnodes=2", "--nproc-per-node=1", *MEET, PREEMPTED, str(tmp_path)]

    def end_agent(rank: int) -> None:
        _, agent_of_rank, host = process_of(tmp_path, rank)
        (node,) = [node for node in nodes if node.name == host]
        subprocess.run(node.run("kill", str(agent_of_rank)), check=True)

    def end(crew: list[subprocess.Popen[bytes]]) -> None:
        wait_until_all_train(tmp_path, 2)
        end_agent(1)
        wait_for(lambda: sum(" stopped " in path.name for path in tmp_path.iterdir()) == 2)
        end_agent(0)  # which would wait for the other one for five minutes

    launch(*[node.run(*agent) for node in nodes[:2]], meanwhile=end)
    stopped_after(tmp_path, 2, r"rank 1 \(node\d\) got SIGTERM")
