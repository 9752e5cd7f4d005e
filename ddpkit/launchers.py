"""Placeholder while detection is being written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Launch:
    kind: str
    rank: int = 0
    world_size: int = 1
    local_rank: int | None = 0
    local_world_size: int | None = 1
    node_rank: int | None = 0
    num_nodes: int | None = 1
    master_addr: str | None = None
    master_port: int | None = None
    evidence: tuple[str, ...] = ()


def detect_launch(env: Mapping[str, str] | None = None) -> Launch:
    import os

    env = os.environ if env is None else env
    if "RANK" not in env:
        return Launch("single")
    return Launch(
        "spawn" if "DDPKIT_SPAWN" in env else "torchrun",
        int(env["RANK"]),
        int(env["WORLD_SIZE"]),
        int(env["LOCAL_RANK"]),
        int(env["LOCAL_WORLD_SIZE"]),
        0,
        1,
        env["MASTER_ADDR"],
        int(env["MASTER_PORT"]),
    )
