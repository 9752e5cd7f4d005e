from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from ddpkit.launch.launch import Launch
from ddpkit.rendezvous import members as member
from ddpkit.rendezvous.generation import complete_launch
from ddpkit.rendezvous.members import Member, Members


def claims(*nodes: str, cores: str = "0-3") -> list[Member]:
    """Claims of as many ranks, each on the node that is named."""
    mine = Member(0, len(nodes), None, False, cores=cores)
    made = []
    for rank, node in enumerate(nodes):
        made.append(replace(mine, rank=rank, host=f"host of {node}", machine=(f"boot of {node}", "net")))
    return made


def told(members: Members) -> Members:
    """The members as the others read them."""
    return Members.from_json(members.to_json())


def test_the_ranks_of_each_node_are_known() -> None:
    members = told(Members.of(claims("a", "a", "b", "b", "b", "a")))
    assert members.nodes == ("host of a", "host of b")
    assert members.world_size == 6
    assert members.node_of == (0, 0, 1, 1, 1, 0)
    assert members.hosts == [f"host of {node}" for node in "aabbba"]


def test_only_ranks_of_one_node_share_cores() -> None:
    some = claims("a", "a", "a", "b")
    some[1] = replace(some[1], cores="4-7")
    members = told(Members.of(some))
    assert members.sharers == (2, 1, 2, 1)


def test_nodes_of_one_host_name_are_told_apart() -> None:
    members = told(Members.of([replace(claim, host="clone") for claim in claims("a", "b", "b")]))
    assert members.nodes == ("clone", "clone") and members.node_of == (0, 1, 1)


@pytest.mark.parametrize("world_size", [1, 2, 3, 50])
def test_the_places_of_a_rank_are_those_that_its_claim_gives(world_size: int) -> None:
    nodes = random.Random(world_size).choices("abc", k=world_size)
    members = told(Members.of(claims(*nodes)))
    for rank, node in enumerate(nodes):
        launch = complete_launch(Launch("platform", rank, world_size, None, None, None, None, "a", 1, ()), members)
        assert launch.local_rank == nodes[:rank].count(node)
        assert launch.local_world_size == nodes.count(node)
        assert launch.node_rank == list(dict.fromkeys(nodes)).index(node)
        assert launch.num_nodes == len(set(nodes))


@pytest.mark.parametrize(("cores", "text"), [([3], "8"), ([0, 1, 2, 3], "f"), ([0, 2, 3, 7, 8, 9], "38d")])
def test_cores_are_written_as_bits(cores: list[int], text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member, "usable_cores", lambda: tuple(cores))
    assert Member(0, 1, None, False).cores == text


def test_ten_thousand_ranks_with_many_cores_are_described_in_few_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member, "usable_cores", lambda: range(192))
    mine: Any = Member(0, 10_000, None, False)
    assert len(mine.to_json()) < 600
    nodes = [f"node {rank // 8}" for rank in range(10_000)]
    members = Members.of(claims(*nodes, cores=mine.cores))
    assert len(members.to_json()) < 150_000
    assert told(members) == members
