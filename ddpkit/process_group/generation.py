"""One start of a job in the store: who claims which rank, who its members are, and why it was given up.

A restarted job finds the keys of the dead one, so each start is a *generation* of its own: its number is the prefix of
all its keys.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from contextlib import suppress

import torch.distributed as dist

from ..errors import LaunchError
from .failures import Failure, first_failure, record_failure
from .member import Member, claim_key
from .members import Members
from .monitor_tree import monitor_key
from .sockets import connect
from .store_values import add, encode, refuse_text
from .vacancy import Vacancy

_NUMBER = "ddpkit/generation"  # key of the newest generation's number
_CHANGES = "ddpkit/changes"  # counts what those who join wait for, so that they need not look for each of it


class Generation:
    """The keys of one start of a job."""

    def __init__(self, store: dist.Store, number: int) -> None:
        self.number = number
        self._all = store
        self.store = dist.PrefixStore(f"ddpkit/{number}", store)

    @classmethod
    def new(cls, store: dist.Store) -> Generation:
        """Begin a generation that no process has joined."""
        generation = cls(store, add(store, _NUMBER, 1))
        generation._count_change()
        return generation

    @classmethod
    def refuse(cls, store: dist.Store, failure: Failure) -> None:
        """Begin a generation that is given up already, in a store where nobody else begins one meanwhile.

        The reason is there first: who sees a generation without one would take it for a start, or for another job.
        """
        record_failure(cls(store, add(store, _NUMBER, 0) + 1).store, failure)
        cls.new(store)

    @classmethod
    def latest(cls, store: dist.Store) -> Generation | None:
        """Return the newest generation, None if there is none."""
        number = add(store, _NUMBER, 0)
        return cls(store, number) if number else None

    @staticmethod
    def changes(store: dist.Store) -> int:
        """Return how often a generation has begun, was completed or given up."""
        return add(store, _CHANGES, 0)

    def _count_change(self) -> None:
        add(self._all, _CHANGES, 1)

    # Claims and members

    def claim(self, me: Member) -> Member:
        """Claim a rank, unless that is done; return the process that holds it."""
        mine = me.to_json()
        text = self.store.compare_set(claim_key(me.rank), "", mine)
        if text != mine.encode():
            return Member.from_json(text, me.rank)
        number = add(self.store, "claims", 1)
        self.store.set(_claimant_key(number), f"{me.rank}")
        return me

    def claims_after(self, number: int) -> list[Member]:
        """Return the processes other than rank 0 that have claimed a rank since so many had."""
        keys = [_claimant_key(later) for later in range(number + 1, add(self.store, "claims", 0) + 1)]
        if not keys or not self.store.check(keys):  # one has counted its claim, and is just saying whose it is
            return []
        ranks = []
        for key, text in zip(keys, self.store.multi_get(keys), strict=True):
            if not re.fullmatch(rb"[0-9]{1,7}", text):
                refuse_text(text, key)
            ranks.append(int(text))
        return self._claims(ranks)

    def publish(self, members: Members) -> None:
        """Write down who is in the job: from now on, it is complete."""
        self.store.set("members", members.to_json())
        self._count_change()

    def is_complete(self) -> bool:
        """Return whether rank 0 has written down who is in the job."""
        return self.store.check(["members"])

    def members(self) -> Members:
        """Return the members of a complete job."""
        return Members.from_json(self.store.get("members"), "members")

    def is_over(self) -> bool:
        """Return whether all ranks have left in good order: then nobody reads or writes here any more."""
        return self.store.check(["members", "left"]) and add(self.store, "left", 0) >= self.members().world_size

    def starter(self) -> Member | None:
        """Return the rank that started this process, if the job is complete and has not ended; None otherwise."""
        if not self.is_complete() or self.is_over():
            return None
        for claim in self._claims(range(self.members().world_size)):
            if claim.is_above_me():
                return claim
        return None

    def _claims(self, ranks: Sequence[int]) -> list[Member]:
        """Return the processes that claim these ranks; none if one of them is not claimed."""
        keys = [claim_key(rank) for rank in ranks]
        if not self.store.check(keys):  # no rank has named them
            return []
        texts = self.store.multi_get(keys)
        return [Member.from_json(text, rank) for text, rank in zip(texts, ranks, strict=True)]

    # Giving up

    def fail(self, reason: str) -> None:
        """Write down why this job cannot be; the first reason stands. Ranks that have joined hear of it, too."""
        self.give_up(Failure.of(-1, LaunchError(reason)))

    def give_up(self, failure: Failure) -> None:
        """Write down why this job cannot be, as `fail()`."""
        record_failure(self.store, failure)
        self._count_change()
        if self.is_complete():  # only their monitors can tell those who have joined
            _tell_monitor(self.members(), failure)

    def raise_if_failed(self, readers: int = 0) -> None:
        """Raise the reason why this job cannot be, if there is one.

        Args:
            readers: Number of ranks for which the store's host first waits up to 2 s, so that they can read it.
        """
        failure = first_failure(self.store)
        if failure:
            self.await_readers(readers, 2.0)
            raise failure.to_error()

    def vacancy(self) -> Vacancy | None:
        """Return the error by which this start was given up because the job goes on already, None if it was not."""
        failure = first_failure(self.store)
        error = failure.to_error() if failure else None
        return error if isinstance(error, Vacancy) else None

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
        names = ["claims", "arrived", "left"]
        for rank in range(self.members().world_size):
            names += [claim_key(rank), _claimant_key(rank), monitor_key(rank), f"group//cpu//0/{rank}"]
        names.append("members")
        return names


def _claimant_key(number: int) -> str:
    """Return the key of the rank that was the n-th to be claimed, not counting rank 0."""
    return f"claimant/{number}"


def _tell_monitor(members: Members, failure: Failure) -> None:
    """Tell the monitor of rank 0, which passes it on, why the job cannot go on."""
    if members.monitor_address is None:
        return
    line = encode(token=members.token, failure=failure)
    with suppress(OSError), connect(*members.monitor_address, 2) as connection:
        connection.sendall(line)
