"""Take part in a real job: every process watches its own rank, and rank 0 hears of all of them over the store."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from ...launch.launch import Launch
from ..script.ranks import Rank, Ranks
from ..script.recorder import Record

_POLL = 0.1  # seconds
_MEETING = timedelta(seconds=300)


class Link:
    """The connection of a job's processes: its own prefix in the job's store.

    Args:
        launch: This process's place; rank 0 hosts the store, unless torchrun's agent does.
    """

    def __init__(self, launch: Launch) -> None:
        self.is_hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        hosts = launch.rank == 0 and not self.is_hosted
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(address, port, is_master=hosts, timeout=_MEETING, wait_for_workers=False)
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self.store = dist.PrefixStore(f"ddpkit/check/{attempt}", store)


class RemoteRank(Rank):
    """A rank that another process of the job watches."""

    def __init__(self, number: int, link: Link) -> None:
        self.number = number
        self.records: list[Record] = []
        self.ended: str | None = None
        self._link = link
        self._read = 0

    def read(self) -> list[Record]:
        """Read what the other process has passed on."""
        new: list[Record] = []
        store = self._link.store
        while store.check([f"{self.number}/{self._read}"]):
            new += json.loads(store.get(f"{self.number}/{self._read}"))
            self._read += 1
        for record in new:
            if record["kind"] == "process ended":
                self.ended = record["how"]
        self.records += new
        return new

    def reap(self, wait: bool = False) -> None:
        """Do nothing: the other process looks."""

    def read_stack(self) -> str:
        """Return nothing: the other process prints it."""
        return ""

    def tail(self) -> list[str]:
        """Return nothing: the other process has the output."""
        return []


def pass_on(ranks: Ranks, link: Link) -> int:
    """Pass this rank's records to rank 0 until that says that all is over; return 0, or 1 if that is lost."""
    (rank,) = ranks.all
    number = 0
    has_ended = False
    while True:
        new = [record for _, record in ranks.wait(_POLL)]
        if rank.ended is not None and not has_ended:
            has_ended = True
            new.append({"kind": "process ended", "step": 0, "how": rank.ended})
            time.sleep(_POLL)
        try:
            if new:
                link.store.set(f"{rank.number}/{number}", json.dumps(new))
                number += 1
            if link.store.check(["over"]):
                return 0  # rank 0 tells the launcher
        except dist.DistError:  # rank 0 has gone
            return 1


def end(link: Link) -> None:
    """Tell all other processes that it is over, and let them leave before the store may go."""
    with suppress(dist.DistError):
        link.store.set("over", "")
        if not link.is_hosted:
            time.sleep(10 * _POLL)
