"""A stranger who reaches the stores of a healthy `survive` job: he may end it, but gets no code onto a rank."""

from __future__ import annotations

import json
import math
import os
import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import begin, free_port, platform_env, run
from torch import nn

import ddpkit
from ddpkit.checkpoint.files import to_bytes
from ddpkit.checkpoint.states import digest_leaves
from ddpkit.collectives.transfer import broadcast_bytes
from ddpkit.job.job import Options
from ddpkit.parsing import sealed
from ddpkit.rendezvous.failures import Failure, record_failure
from ddpkit.rendezvous.generation import Generation
from ddpkit.rendezvous.store import connect_to_store
from ddpkit.survival.regrouping import Candidate, Rendezvous, host_store
from ddpkit.survival.states import KeptStates, share_data
from ddpkit.survival.survive import _Survivors, check_members

SOON = timedelta(seconds=30)
GUESS = b"no secret of this job"


class Payload:
    """Runs a command on the process that unpickles it."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.folder}/ran-$$",)


class Code:
    """States that are code."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def state_dict(self) -> dict[str, Any]:
        return {"weight": Payload(self.folder)}

    def load_state_dict(self, state: Any) -> None:
        pass


def train(folder: str) -> None:
    """Take steps until the stranger has had an answer, or no time is left."""
    net = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    end = time.monotonic() + 60
    for attempt in ddpkit.survive(net, optimizer, timeout=SOON, patience=timedelta(seconds=5)):
        with attempt as context:
            survivors = attempt._survivors
            if context.world_size == 3 and context.rank == 0:
                found = {"addresses": survivors._rendezvous.addresses}  # which a scan of the ports tells, too
                Path(folder, "found.tmp").write_text(json.dumps(found))
                Path(folder, "found.tmp").rename(f"{folder}/found")
            model = ddpkit.wrap_model(net)
            for _ in range(5):
                optimizer.zero_grad()
                model(torch.ones(1, 1)).sum().backward()
                optimizer.step()
                attempt.commit()
            while context.world_size == 3 and time.monotonic() < end:
                ddpkit.barrier()
                time.sleep(0.01)
    print("done", context.world_size)


def take_a_place(folder: str, port: int) -> None:
    """Report a failure of rank 1, and come in its place with more steps than anybody."""
    end = time.monotonic() + 60
    while not Path(folder, "found").exists():
        assert time.monotonic() < end
        time.sleep(0.01)
    addresses = json.loads(Path(folder, "found").read_text())["addresses"]
    mine = _place(addresses, folder)
    job = connect_to_store("127.0.0.1", port, SOON)
    record_failure(dist.PrefixStore("ddpkit/1", job), Failure(1, "vm", "ValueError", "", ""))
    rendezvous = mine._rendezvous
    assert rendezvous is not None
    candidate = Candidate(1, 0, 1_000_000, True, rendezvous.address)
    decision, store = rendezvous._follow(0, candidate, 20.0)
    Path(folder, "answered").write_text(str(decision))
    if decision is not None:
        mine._asked = Options(timeout=SOON)
        mine._members = decision.members
        mine._join(decision, store)
    time.sleep(5)


def _place(addresses: dict[str, Any], folder: str) -> _Survivors:
    kept = KeptStates(())
    kept._states = [Code(folder), Code(folder)]
    mine = _Survivors(kept, 1, timedelta(seconds=10))
    mine._rendezvous = Rendezvous(1, "127.0.0.1", 10.0, GUESS)
    mine._rendezvous.addresses |= {
        int(member): (host, port) for member, (host, port) in addresses.items() if member != "1"
    }
    return mine


def test_a_stranger_who_takes_a_place_gets_no_code_onto_a_rank(tmp_path: Path) -> None:
    port, folder = free_port(), str(tmp_path)
    stranger = begin(take_a_place, {"OMP_NUM_THREADS": "1"}, folder, port, output=f"{folder}/stranger.log")
    ended = run(train, [platform_env(rank, 3, port) for rank in range(3)], folder, timeout=120)
    stranger.join(60)
    outputs = "".join(e.output for e in ended) + Path(folder, "stranger.log").read_text()
    assert not list(tmp_path.glob("ran-*")), outputs
    assert [e.code for e in ended] == [0, 1, 0], outputs  # rank 1 has heard that it failed
    assert "done 2" in ended[0].output and "done 2" in ended[2].output, outputs


def start_or_restart(folder: str) -> None:
    """Join the job that the environment describes, and believe what it broadcasts."""
    for attempt in ddpkit.survive(timeout=SOON):
        with attempt:
            ddpkit.broadcast(None, src=0)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stranger_who_writes_that_the_job_continues_gets_nobody_into_his_own(rank: int, tmp_path: Path) -> None:
    """He seals a membership with no secret, as of a job that has none, and waits for ranks that come."""
    his = host_store("127.0.0.1")
    master = "127.0.0.1", his.port
    fields = {"master": f"127.0.0.1:{his.port}", "master_host": "127.0.0.1", "size": 2, "regrouping": 1}
    fields |= {"members": [1 - rank], "addresses": [master]}
    generation = Generation.new(his)
    membership = sealed(b"", ["membership"], fields)
    record_failure(generation.store, Failure(-1, "vm", "JobContinues", "come here", membership))
    (ended,) = run(start_or_restart, [platform_env(rank, 2, his.port)], str(tmp_path), timeout=60)
    assert ended.code == 1 and "come here" in ended.output, ended.output
    assert not his.check([f"candidate/{rank}"])


@pytest.mark.ranks(2, 3)
def test_who_does_not_know_the_secret_is_found_before_states_travel(rank: int) -> None:
    check_members(b"the secret of this job", "1")
    secret = GUESS if rank == 1 else b"the secret of this job"
    with pytest.raises(ddpkit.LaunchError, match="joined as rank (0|1) does not know the secret of this job"):
        check_members(secret, "1")


class Marked:
    """Makes a file where it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (self.path, "w")


@pytest.mark.ranks(2, 3)
def test_states_that_hold_code_are_refused_and_it_does_not_run(rank: int, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    if rank == 0:  # a member that has been taken over
        broadcast_bytes("survive()", to_bytes([[{"weight": Marked(str(marker))}], []]), 0)
    else:
        with pytest.raises(Exception, match="open"):
            share_data([[{"weight": torch.zeros(1)}], []], 0)
    assert not marker.exists()
    with pytest.raises((ddpkit.MismatchError, pickle.UnpicklingError), match="open"):  # its own rank looks first
        share_data([[{"weight": Marked(str(marker))}], []], 0)
    assert not marker.exists()


@pytest.mark.ranks(2, 3)
def test_states_arrive_as_they_were(rank: int) -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).to(torch.bfloat16)
    optimizer = torch.optim.Adam(net.parameters())
    if rank == 0:
        net(torch.ones(4, 2, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
    mine = [[net.state_dict(), optimizer.state_dict(), {"best": math.inf}], [{"epoch": 2}]]
    found = share_data(mine, 0)
    digests = ddpkit.all_gather_object(digest_leaves("states", found))
    assert digests[1:] == digests[:1] * (len(digests) - 1)
    assert found[0][0]._metadata == net.state_dict()._metadata  # type: ignore[attr-defined]


@pytest.mark.ranks(2)
def test_states_larger_than_any_of_this_job_are_refused_before_they_are_there(rank: int) -> None:
    size = 30 << 30  # bytes, which no test could hold
    described = [[{"weight": torch.empty(size, dtype=torch.uint8, device="meta")}], []]
    if rank == 0:
        broadcast_bytes("survive()", to_bytes(described), 0)
    else:
        with pytest.raises(ddpkit.LaunchError, match=f"{size} bytes, but this job's have at most"):
            share_data([[{"weight": torch.zeros(1)}], []], 0)


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="the system does not tell who listens where")
def test_on_one_node_the_store_of_a_rank_listens_on_loopback_alone() -> None:
    store = host_store("127.0.0.1")
    lines = [line.split() for path in Path("/proc/net").glob("tcp*") for line in path.read_text().splitlines()[1:]]
    addresses = [line[1] for line in lines if line[3] == "0A" and line[1].endswith(f":{store.port:04X}")]
    assert addresses == [f"0100007F:{store.port:04X}"]


def test_a_candidate_at_another_address_than_at_the_start_is_refused() -> None:
    secret = b"the secret of this job"
    leader, newcomer = Rendezvous(0, "127.0.0.1", 1.0, secret), Rendezvous(1, "127.0.0.1", 1.0, secret)
    leader.addresses[1] = ("127.0.0.1", 1)  # of a process that has ended
    me = {**asdict(Candidate(1, 0, 7, True, newcomer.address)), "answer": "answer/1"}
    leader._store.set("candidate/1", sealed(secret, [leader.address, "candidate/1"], me))
    assert leader._read_candidate(1) is None
    assert not leader._store.check(["candidate/1"])
    leader.close()
    newcomer.close()


def test_an_arrival_counts_once_and_only_where_it_was_meant() -> None:
    secret = b"the secret of this job"
    leader, follower, other = (Rendezvous(member, "127.0.0.1", 1.0, secret) for member in range(3))
    refuges = [leader, follower, other]
    for rendezvous in refuges:
        rendezvous.addresses = {each.member: each.address for each in refuges}
    me = Candidate(1, 0, 7, True, follower.address)
    with ThreadPoolExecutor() as threads:
        asking = threads.submit(follower._follow, 0, me, 20.0)
        while not leader._store.check(["candidate/1"]):
            assert not asking.done()
        copied = leader._store.get("candidate/1")
        decision = leader._lead(Candidate(0, 0, 7, True, leader.address), [0, 1], 1, [])
        assert asking.result()[0] == decision
    for rendezvous in (leader, other):
        rendezvous._store.set("candidate/1", copied)
        assert rendezvous._read_candidate(1) is None
        assert not rendezvous._store.check(["candidate/1"])
    for rendezvous in refuges:
        rendezvous.close()
