from __future__ import annotations

import os
import signal
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from nodes import needs
from processes import Ended, free_port, launch, platform_env, run
from signals import stop_process

import ddpkit
from ddpkit.rendezvous import generation as rendezvous
from ddpkit.rendezvous.generation import Generation
from ddpkit.rendezvous.members import Member, Members

SOON = timedelta(seconds=100)


def join_and_reduce() -> None:
    with ddpkit.distributed(timeout=SOON) as context:
        total = torch.tensor([context.rank + 1.0])
        dist.all_reduce(total)
        print(f"rank {context.rank} of {context.world_size} local {context.local_rank} sum {total.item():g}")


def join_and_stay() -> None:
    with ddpkit.distributed(timeout=SOON):
        print("joined", flush=True)
        time.sleep(100)


def join_or_end_early(folder: str) -> None:
    claimed = Path(folder, "claimed")

    def end(generation: Generation, readers: int = 0) -> None:
        claimed.symlink_to(f"/proc/{os.getpid()}/stat")
        os.kill(os.getpid(), signal.SIGKILL)

    if os.environ["ROLE"] == "ends":
        Generation.raise_if_failed = end  # which a rank calls when it has claimed its number
    while os.environ["ROLE"] == "follows" and not has_ended(claimed):
        time.sleep(0.01)
    join_and_stay()


def has_ended(stat: Path) -> bool:
    """Whether the process with this file in /proc has ended; a killed one takes a while, and then is a zombie."""
    if not stat.is_symlink():  # it has not begun
        return False
    try:
        return stat.read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def all_name(ended: list[Ended], text: str) -> None:
    """Every process failed, long before its time-out, and says why."""
    for end in ended:
        assert end.code == 1, end
        assert text in end.output, end
        assert end.seconds < 0.5 * SOON.total_seconds(), end


def test_a_platform_without_local_ranks_gives_one_world_and_fills_them_in() -> None:
    port = free_port()
    ended = run(join_and_reduce, [platform_env(rank, 2, port) for rank in range(2)])
    assert [end.code for end in ended] == [0, 0], ended
    assert [end.output.strip() for end in ended] == [f"rank {rank} of 2 local {rank} sum 3" for rank in range(2)]


CONFLICTS = {  # what the environments of the ranks of a job say, and what each of them is told
    "a rank twice": ([(0, 3), (1, 3), (1, 3)], "Two processes claim rank 1"),
    "world sizes 2 and 3": ([(0, 2), (1, 3)], f"Rank 0 on {socket.gethostname()}"),
    "world sizes 3 and 2": ([(0, 3), (1, 2)], f"Rank 0 on {socket.gethostname()}"),
    "a rank beyond": ([(0, 2), (2, 2)], "RANK"),
    "two jobs": ([(0, 2, "a"), (1, 2, "b")], "two jobs meet at one MASTER_ADDR:MASTER_PORT"),
    "a rank twice before rank 0": ([(1, 2), (1, 2), (0, 2)], "Two processes claim rank 1"),
    "rank 0 twice": ([(0, 2), (1, 2), (0, 2)], "of 127.0.0.1 is taken"),
}
LATE = {"a rank twice before rank 0": 1.0, "rank 0 twice": 2.0}  # seconds after the others, for the last of a job


def test_ranks_that_do_not_fit_together_are_refused_on_every_rank() -> None:
    envs, delays = [], []
    for name, (places, _) in CONFLICTS.items():
        port = free_port()
        for rank, size, *run_id in places:
            more = {"DDPKIT_RUN_ID": run_id[0]} if run_id else {}
            envs.append(platform_env(rank, size, port, **more))
            delays.append(0.0)
        delays[-1] = LATE.get(name, 0.0)
    ended = run(join_and_stay, envs, delays=delays)
    found = {}
    for name, (places, words) in CONFLICTS.items():
        found[name] = [ended.pop(0) for _ in places]
        all_name(found[name], words)
    assert "count nodes or pods" in found["a rank twice"][1].output  # both on one host: perhaps one claim for each pod
    for name in ("world sizes 2 and 3", "world sizes 3 and 2"):
        assert all(f"WORLD_SIZE={size}" in end.output for end in found[name] for size in (2, 3))


def test_a_refusal_that_comes_while_rank_zero_writes_the_members_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    store, (me, other) = dist.HashStore(), (Member(rank, 2, None, True) for rank in range(2))
    dist.PrefixStore("ddpkit/1", store).set("claim/1", other.to_json())
    dist.PrefixStore("ddpkit/1", store).add("claims", 1)
    dist.PrefixStore("ddpkit/1", store).set("claimant/1", "1")
    publish = Generation.publish

    def refuse_then_publish(generation: Generation, members: Members) -> None:
        generation.fail("there are two of rank 1")
        publish(generation, members)

    monkeypatch.setattr(Generation, "publish", refuse_then_publish)
    with pytest.raises(ddpkit.LaunchError, match="two of rank 1"):
        rendezvous.join(store, me, SOON)


def test_a_rank_that_takes_the_place_of_one_that_ended_while_joining_ends_the_wait_of_the_others(
    tmp_path: Path,
) -> None:
    port = free_port()
    envs = [platform_env(rank, 3, port, ROLE=role) for rank, role in ((0, "waits"), (1, "ends"), (1, "follows"))]
    first, dead, second = run(join_or_end_early, envs, str(tmp_path))
    assert dead.code == -signal.SIGKILL, dead
    assert "ended while the ranks joined. Restart all ranks." in first.output, first
    all_name([first, second], "guide/launching")  # the page of LaunchErrors


def join_and_tell(folder: str) -> None:
    while "COMES_LATE" in os.environ and len(os.listdir(folder)) < 2:
        time.sleep(0.05)
    with ddpkit.distributed(timeout=SOON) as context:
        Path(folder, f"{context.rank}").touch()
        print("joined", flush=True)
        time.sleep(100)


def test_a_duplicate_that_comes_late_ends_the_running_job(tmp_path: Path) -> None:
    port = free_port()
    envs = [platform_env(0, 2, port), platform_env(1, 2, port), platform_env(1, 2, port, COMES_LATE="yes")]
    ended = run(join_and_tell, envs, str(tmp_path))
    all_name(ended, "Two processes claim rank 1")
    assert "joined" in ended[0].output and "joined" in ended[1].output


def watch_on_rank_zero_only() -> None:
    ddpkit.setup(timeout=SOON, watch=os.environ["RANK"] == "0")


def test_ranks_that_disagree_on_the_watch_all_hear_of_it() -> None:
    port = free_port()
    all_name(run(watch_on_rank_zero_only, [platform_env(rank, 2, port) for rank in range(2)]), "has watch=True")


@pytest.mark.storm
@needs(nodes=True)
def test_a_process_of_another_container_is_neither_alive_nor_dead_from_here() -> None:
    claim = [
        sys.executable,
        "-c",
        "from ddpkit.rendezvous.members import Member; print(Member(0, 1, None, False).to_json())",
    ]
    ended, contained = launch(claim, ["unshare", "--pid", "--fork", "--mount-proc", *claim])
    mine = Member(0, 1, None, False)
    claims = [mine.to_json(), ended.output, contained.output]
    assert [Member.from_json(claim, 0).is_alive() for claim in claims] == [True, False, None]
    assert {Member.from_json(claim, 0).node for claim in claims} == {mine.node}


def test_a_restarted_job_on_the_same_store_forms_a_world_of_its_own() -> None:
    """As under torchrun with max_restarts: the agent keeps the store, with all keys of the dead ranks."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "test", "LOCAL_WORLD_SIZE": "2"}
    for attempt in range(3):
        more = agent | {"TORCHELASTIC_RESTART_COUNT": f"{attempt}", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
        envs = [platform_env(rank, 2, store.port, LOCAL_RANK=f"{rank}", **more) for rank in range(2)]
        # a rank that comes before the new rank 0 finds the dead generation complete, and must wait for the next
        ended = run(die_or_reduce, envs[::-1], attempt, delays=[0, 0.5])
        if attempt < 2:
            assert all(end.code != 0 for end in ended), ended
        else:
            assert [end.output.strip()[-5:] for end in ended] == ["sum 3", "sum 3"], ended


def die_or_reduce(attempt: int) -> None:
    if attempt == 0 and os.environ["RANK"] == "1":
        ddpkit.setup(timeout=SOON)
        os.kill(os.getpid(), 9)
    if attempt == 1 and os.environ["RANK"] == "0":
        os._exit(1)  # dies before it draws a generation
    if attempt == 1:
        ddpkit.setup(timeout=timedelta(seconds=3))
    join_and_reduce()


def join_or_stop_the_host(folder: str) -> None:
    host = Path(folder, "host")
    if os.environ["RANK"] == "0":
        host.symlink_to(f"{os.getpid()}")
        join_and_stay()
    while not host.is_symlink():
        time.sleep(0.01)
    pid = int(os.readlink(host))
    check = Generation.raise_if_failed

    def stop_first(generation: Generation, readers: int = 0) -> None:
        stop_process(pid)
        check(generation, readers)

    Generation.raise_if_failed = stop_first  # which a rank calls when it has claimed its number
    try:
        ddpkit.setup(timeout=timedelta(seconds=4))
    finally:
        os.kill(pid, signal.SIGKILL)


def join_in_vain(folder: str) -> None:
    if "HOST_STOPS" in os.environ:
        join_or_stop_the_host(folder)
    ddpkit.setup(timeout=timedelta(seconds=int(os.environ.get("SECONDS", 2))))


BAD_ADDRESSES = {"no.such.host.invalid": "did not resolve", "http://x": "neither a host name"}


def test_ranks_that_join_in_vain_are_told_why(tmp_path: Path) -> None:
    """All wait for time-outs, and so at once; each begins when the one before it waits."""
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        taken, hosted, incomplete = stranger.getsockname()[1], free_port(), free_port()
        envs = [platform_env(rank, 3, incomplete, SECONDS="10") for rank in (0, 2)]
        envs += [platform_env(rank, 3, hosted, HOST_STOPS="yes") for rank in range(2)]
        envs += [platform_env(rank, 2, taken) for rank in range(2)]
        envs.append(platform_env(1, 2, free_port()))
        envs += [platform_env(0, 2, free_port(), MASTER_ADDR=address) for address in BAD_ADDRESSES]
        ended = run(join_in_vain, envs, str(tmp_path), delays=[0.0, 0.0, 0.5, 0.0, 0.5, 0.0, 0.5, 0.0, 0.0])
    words = ["Ranks [1] of 3 did not join within 0:00:10"] * 2
    words += ["", "the store does not answer"]
    words += [f"port {taken} of 127.0.0.1 is taken", f"127.0.0.1:{taken} is not the store of a job"]
    words += ["Nobody answers at MASTER_ADDR:MASTER_PORT", *BAD_ADDRESSES.values()]
    for end, text in zip(ended, words, strict=True):
        assert not text or (end.code == 1 and text in end.output), end
