"""One start of a job in the store: who claims which rank, who its members are, and why it was given up.

A restarted job finds the keys of the dead one, so each start is a *generation* of its own: its number is the prefix of
all its keys.
"""

from __future__ import annotations

import json
import socket
import time
from contextlib import suppress
from dataclasses import asdict

import torch.distributed as dist

from ..errors import LaunchError
from .failures import Failure, first_failure, record_failure
from .member import MEMBER, Member, claim_key
from .monitor_messages import encode
from .store_values import add, parse, refuse_text

_NUMBER = "ddpkit/generation"  # key of the newest generation's number


class Generation:
    """The keys of one start of a job."""

    def __init__(self, store: dist.Store, number: int) -> None:
        self.number = number
        self.store = dist.PrefixStore(f"ddpkit/{number}", store)

    @classmethod
    def new(cls, store: dist.Store) -> Generation:
        """Begin a generation that no process has joined."""
        return cls(store, add(store, _NUMBER, 1))

    @classmethod
    def latest(cls, store: dist.Store) -> Generation | None:
        """Return the newest generation, None if there is none."""
        number = add(store, _NUMBER, 0)
        return cls(store, number) if number else None

    # Claims and members

    def claim(self, me: Member) -> Member:
        """Claim a rank, unless that is done; return the process that holds it."""
        text = self.store.compare_set(claim_key(me.rank), "", me.to_json())
        holder = Member.from_json(text, me.rank)
        if holder.nonce == me.nonce:
            add(self.store, "claims", 1)
        return holder

    def claims_of_others(self) -> int:
        """Return how many ranks other than 0 have claimed their number."""
        return add(self.store, "claims", 0)

    def holder(self, rank: int) -> Member | None:
        """Return the process that claims a rank, None if there is none yet."""
        key = claim_key(rank)
        if not self.store.check([key]):
            return None
        return Member.from_json(self.store.get(key), rank)

    def publish(self, members: list[Member]) -> None:
        """Write down who is in the job: from now on, it is complete."""
        self.store.set("members", json.dumps({"members": [asdict(member) for member in members]}))

    def is_complete(self) -> bool:
        """Return whether rank 0 has written down who is in the job."""
        return self.store.check(["members"])

    def members(self) -> list[Member]:
        """Return the members of a complete job, by rank."""
        text = self.store.get("members")
        entries = parse(text, "members", {"members": [MEMBER]})["members"]
        members = [Member.from_fields(entry) for entry in entries]
        if not members or [member.rank for member in members] != list(range(members[0].world_size)):
            refuse_text(text, "members")
        return members

    def is_over(self) -> bool:
        """Return whether all ranks have left in good order: then nobody reads or writes here any more."""
        return self.store.check(["members", "left"]) and add(self.store, "left", 0) >= len(self.members())

    def starter(self) -> Member | None:
        """Return the rank that started this process, if the job is complete and has not ended; None otherwise."""
        if not self.is_complete() or self.is_over():
            return None
        for member in self.members():
            if member.is_above_me():
                return member
        return None

    # Giving up

    def fail(self, reason: str) -> None:
        """Write down why this job cannot be; the first reason stands. Ranks that have joined hear of it, too."""
        failure = Failure.of(-1, LaunchError(reason))
        record_failure(self.store, failure)
        if self.is_complete():  # only their monitors can tell those who have joined
            _tell_monitor(self.members()[0], failure)

    def raise_if_failed(self, readers: int = 0) -> None:
        """Raise the reason why this job cannot be, if there is one.

        Args:
            readers: Number of ranks for which the store's host first waits up to 2 s, so that they can read it.
        """
        failure = first_failure(self.store)
        if failure:
            self.await_readers(readers, 2.0)
            raise failure.to_error()

    def await_readers(self, readers: int, seconds: float) -> None:
        """Count this rank among those that have read why the job is off; wait until so many have, at most so long."""
        heard = self.count_as_reader()
        deadline = time.monotonic() + seconds
        while heard < readers and time.monotonic() < deadline:
            time.sleep(0.01)
            heard = add(self.store, "heard", 0)

    def count_as_reader(self) -> int:
        """Count this rank among those that have read why the job is off; return their number."""
        return add(self.store, "heard", 1)

    # Deleting

    def delete_keys(self) -> None:
        """Delete the keys of a job that is over; but for those of its last barrier where torch cannot list them."""
        for key in self._keys():
            self.store.delete_key(key)

    def _keys(self) -> list[str]:
        with suppress(AttributeError, RuntimeError):  # torch 2.6
            return list(self.store.list_keys())
        names = ["claims", "left"]
        for rank in range(len(self.members())):
            names += [claim_key(rank), f"group//cpu//0/{rank}"]
        names.append("members")
        return names


def _tell_monitor(first: Member, failure: Failure) -> None:
    """Tell the monitor of rank 0, which passes it on, why the job cannot go on."""
    if first.monitor_address is None:
        return
    line = encode(token=first.nonce, failure=failure)
    with suppress(OSError), socket.create_connection(first.monitor_address, timeout=2) as connection:
        connection.sendall(line)
