"""Join a job: every rank claims its number in one generation of the store, and gets the list of members.

Rank 0 begins a generation and publishes its *members* once all claims fit together. A restarted rank that finds an old
generation sees that its own claim is not among them and waits for the next one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

import torch.distributed as dist

from ..errors import DdpkitError, LaunchError
from ..launch.detection import detect_launch
from ..launch.launch import Launch
from ..launch.process_tree import Lost
from ..parsing import encode, refuse_text
from .failures import Failure, JobContinues, first_failure, record_failure
from .members import Member, Members, claim_key
from .sockets import connect
from .store import call_with_timeout, count_in, polls

# One start of a job in the store: the claims, its members, and the reason if it was cancelled.
#
# A restarted job finds the keys of the dead one, so each start is a *generation* of its own; its number is the prefix
# of all its keys.

_NUMBER = "ddpkit/generation"  # key of the newest generation's number


class Generation:
    """The keys of one start of a job."""

    def __init__(self, store: dist.Store, number: int) -> None:
        self.number = number
        self.store = dist.PrefixStore(f"ddpkit/{number}", store)

    @classmethod
    def new(cls, store: dist.Store) -> Generation:
        """Begin a generation without processes."""
        return cls(store, store.add(_NUMBER, 1))

    @classmethod
    def refuse(cls, store: dist.Store, failure: Failure) -> None:
        """Begin a generation that is already cancelled, in a store where no other begins meanwhile.

        The reason is written first: a generation without one looks like a start, or like another job.
        """
        record_failure(cls(store, store.add(_NUMBER, 0) + 1).store, failure)
        cls.new(store)

    @classmethod
    def latest(cls, store: dist.Store) -> Generation | None:
        """Return the newest generation, or None."""
        number = store.add(_NUMBER, 0)
        return cls(store, number) if number else None

    # Claims and members.

    def claim(self, me: Member) -> Member:
        """Claim a rank, unless it is claimed; return the process that holds it."""
        mine = me.to_json()
        text = self.store.compare_set(claim_key(me.rank), "", mine)
        if text != mine.encode():
            return Member.from_json(text, me.rank)
        self.store.set(_claimant_key(self.store.add("claims", 1)), f"{me.rank}")
        return me

    def claims_after(self, number: int) -> list[Member]:
        """Return the processes other than rank 0 that have claimed a rank since this number of claims."""
        keys = [_claimant_key(later) for later in range(number + 1, self.store.add("claims", 0) + 1)]
        if not keys or not self.store.check(keys):  # one has counted its claim, but not yet named its rank
            return []
        texts = self.store.multi_get(keys)
        for key, text in zip(keys, texts, strict=True):
            if not re.fullmatch(rb"[0-9]{1,7}", text):
                refuse_text(text, key)
        return self.claims([int(text) for text in texts])

    def claims(self, ranks: Sequence[int]) -> list[Member]:
        """Return the processes that claim these ranks; none if one of them is unclaimed."""
        keys = [claim_key(rank) for rank in ranks]
        if not self.store.check(keys):  # no rank has named them
            return []
        texts = self.store.multi_get(keys)
        return [Member.from_json(text, rank) for text, rank in zip(texts, ranks, strict=True)]

    def publish(self, members: Members) -> None:
        """Publish the members: from now on, the job is complete."""
        self.store.set("members", members.to_json())

    def is_complete(self) -> bool:
        """Return whether rank 0 has published the members."""
        return self.store.check(["members"])

    def members(self) -> Members:
        """Return the members of a complete job."""
        return Members.from_json(self.store.get("members"))

    def is_over(self) -> bool:
        """Return whether all ranks have left normally: then no rank reads or writes here any more."""
        return self.store.check(["members", "left"]) and self.store.add("left", 0) >= self.members().world_size

    def parent_rank(self) -> Member | None:
        """Return the rank that started this process, if the job is complete and has not ended; None otherwise."""
        if not self.is_complete() or self.is_over():
            return None
        claims = self.claims(range(self.members().world_size))
        return next((claim for claim in claims if claim.is_ancestor()), None)

    def is_started_by_rank(self, world_size: int) -> bool:
        """Return whether a rank of this job started this process; raise if it is to be one of several ranks itself."""
        parent = self.parent_rank()
        if parent and world_size > 1:
            raise StartedByRank(parent)
        return parent is not None

    # Cancelling.

    def fail(self, reason: str) -> bytes:
        """Record why this job cannot start; the first reason stays. Ranks that have joined get it, too."""
        return self.give_up(Failure.of(-1, LaunchError(reason)))

    def give_up(self, failure: Failure) -> bytes:
        """Record why this job cannot start, as `fail()`; return the text of the first reason."""
        first = record_failure(self.store, failure)
        members = self.members() if self.is_complete() else None
        if members and members.watch_address:  # only watches, to which rank 0's forwards it, reach ranks that joined
            with suppress(OSError), connect(*members.watch_address, 2) as connection:
                connection.sendall(encode(token=members.token, failure=failure))
        return first

    def absence(self, world_size: int, timeout: timedelta, readers: int = 0) -> DdpkitError:
        """Record which ranks did not join in time; return the error with the first reason."""
        absent = [rank for rank in range(world_size) if not self.store.check([claim_key(rank)])]
        advice = "Check that each one is running, with this MASTER_ADDR and MASTER_PORT."
        first = self.fail(f"Ranks {absent} of {world_size} did not join within {timeout}. {advice}")
        self.await_readers(readers, 2.0)
        return Failure.from_json(first).to_error()

    def raise_if_failed(self, readers: int = 0) -> None:
        """Raise the reason why this job cannot start, if there is one.

        Args:
            readers: Number of ranks that the store's host first waits for, up to 2 s, so that they can read it.
        """
        failure = first_failure(self.store)
        if failure:
            self.await_readers(readers, 2.0)
            raise failure.to_error()

    def raise_if_continued(self) -> None:
        """Raise if this start was cancelled because its job continues without the ranks that it has lost."""
        failure = first_failure(self.store)
        if failure and failure.type == JobContinues.__name__:
            raise failure.to_error()

    def await_readers(self, readers: int, seconds: float) -> None:
        """Count this rank as a reader of the reason; wait, with a time limit, for this number of readers."""
        count_in(self.store, "readers", readers, seconds)


def _claimant_key(number: int) -> str:
    """Return the key of the n-th claimed rank, not counting rank 0."""
    return f"claimant/{number}"


_AGREED = {  # fields that must be equal on all ranks, each with its name for the user and advice
    "world_size": ("WORLD_SIZE", "start all ranks with the same value"),
    "watch": ("watch", "pass the same to setup()"),
    "run_id": ("run", "two jobs meet at one MASTER_ADDR:MASTER_PORT, give each its own MASTER_PORT"),
}
Start = tuple[dist.Store, Members]  # the store under the prefix of the generation
_STORE_GRACE = 5.0  # seconds beyond the time-out for the store to answer


class StoreLost(LaunchError):
    """The process that hosted the store ended while this one joined."""


class StartedByRank(LaunchError):
    """This process inherited the environment of a rank that is in its job."""

    is_failure = False

    def __init__(self, parent: Member) -> None:
        evidence = [line.partition("=") for line in detect_launch(os.environ).evidence if " " not in line]
        names = ", ".join(name for name, sign, _ in evidence if sign)
        super().__init__(
            f"Rank {parent.rank} of a running job, {parent}, started this process, which has inherited its "
            f"environment but is not a rank. The job continues without it. To run it alone, start it without {names}."
        )


def join(store: dist.Store, me: Member, timeout: timedelta, peer_lost: Lost = str) -> Start:
    """Agree with all ranks on a generation and its members.

    Args:
        store: Where the ranks meet.
        me: This process.
        timeout: Longest wait for the other ranks.
        peer_lost: Returns the fate of the process that must outlive this one, "" while it lives.

    Returns:
        The store under the generation's prefix, and the members.

    Raises:
        LaunchError: On every rank, if the ranks do not fit together or do not come.
    """
    meet = _collect_claims if me.rank == 0 else _claim_until_accepted
    seconds = timeout.total_seconds() + _STORE_GRACE
    check = partial(raise_if_peer_lost, peer_lost)
    try:
        return call_with_timeout(lambda: meet(store, me, timeout), seconds, check)
    except TimeoutError:
        raise LaunchError(
            f"Rank {me.rank} did not join within {timeout}: the store does not answer. Is the process that hosts it, "
            "rank 0 or torchrun, stopped or cut off?"
        ) from None
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        check()
        raise StoreLost(f"Rank {me.rank} lost the store while joining; its host has ended: {error}") from error


def raise_if_peer_lost(peer_lost: Lost) -> None:
    """Raise if the process that must outlive this one has ended."""
    if reason := peer_lost():
        raise LaunchError(f"This rank cannot join: {reason}.")


def complete_launch(launch: Launch, members: Members) -> Launch:
    """Complete the launch, from the nodes of all ranks."""
    nodes = members.node_of
    mine = nodes[launch.rank]
    found = {
        "local_rank": nodes[: launch.rank].count(mine),
        "local_world_size": nodes.count(mine),
        "node_rank": mine,
        "num_nodes": len(members.nodes),
    }
    untold: dict[str, Any] = {name: value for name, value in found.items() if getattr(launch, name) is None}
    return replace(launch, **untold)


def _collect_claims(store: dist.Store, me: Member, timeout: timedelta) -> Start:
    """Begin a generation, as rank 0, and publish its members when all ranks are claimed."""
    former = Generation.latest(store)
    if former:
        former.raise_if_continued()
        if former.is_started_by_rank(me.world_size):
            store = dist.HashStore()  # a separate job of one rank
    generation = Generation.new(store)
    generation.store.set(claim_key(0), me.to_json())
    claims = {0: me}
    seen = 0
    readers = 0 if me.store_outlives_ranks else me.world_size
    for _ in polls(timeout.total_seconds()):
        for claim in generation.claims_after(seen):
            seen += 1
            claims[claim.rank] = claim
            problem = _disagreement(me, claim)
            if problem:
                generation.fail(problem)
        generation.raise_if_failed(readers)
        if len(claims) == me.world_size:
            break
    else:
        raise generation.absence(me.world_size, timeout, readers)
    members = Members.of([claims[rank] for rank in range(me.world_size)])
    generation.publish(members)
    generation.raise_if_failed(readers)  # the reason may come before the writer could see the members
    return generation.store, members


def _claim_until_accepted(store: dist.Store, me: Member, timeout: timedelta) -> Start:
    """Claim this rank in the newest generation, and in each newer one, until rank 0 publishes its members."""
    seen = -1
    claimed = None
    for _ in polls(timeout.total_seconds(), me.world_size):
        latest = Generation.latest(store)
        if latest and latest.number > seen:  # earlier ones belong to dead attempts
            seen = latest.number
            latest.raise_if_continued()
            claimed = latest if _claim(latest, me) else None
        members = _accepted(claimed, me) if claimed else None
        if claimed and members:
            return claimed.store, members
    if claimed is None:
        raise LaunchError(f"Rank 0 did not join within {timeout}. Is it running, and is MASTER_ADDR its address?")
    raise claimed.absence(me.world_size, timeout)


def _claim(generation: Generation, me: Member) -> bool:
    """Claim this rank; return whether it is this process's. If not, a newer generation must come.

    Raises:
        LaunchError: If another process of this job holds the rank, or a rank of it started this process.
    """
    holder = generation.claim(me)
    if holder is me:
        return True
    if (holder.pid, holder.born) == (me.pid, me.born):  # our own claim, from before a teardown
        return False
    alive = holder.is_alive()
    # a process on another host cannot be checked; an agent reuses a number only after its holder has ended
    perhaps_alive = alive is None and not me.store_outlives_ranks
    if (alive or perhaps_alive) and not generation.is_over():
        generation.is_started_by_rank(me.world_size)
        _refuse_second_claim(generation, me, holder)
    # others may wait for it; an agent restarts all of them, and they move on to the next generation
    if alive is False and not me.store_outlives_ranks and not generation.is_complete():
        generation.fail(f"Rank {me.rank} on {holder} ended while the ranks joined. Restart all ranks.")
    return False


def _accepted(generation: Generation, me: Member) -> Members | None:
    """Return the members of this rank's generation, None until rank 0 publishes them."""
    complete = generation.is_complete()  # before the check for a failure, because rank 0 checks once more
    generation.raise_if_failed()
    if not complete:
        return None
    members = generation.members()
    if members.world_size != me.world_size:
        generation.is_started_by_rank(me.world_size)
        refuse_text(generation.store.get("members"), "members")
    return members


def _disagreement(mine: Member, other: Member) -> str | None:
    """Explain why two ranks cannot be in one job; None if they can."""
    for name, (word, advice) in _AGREED.items():
        ours, theirs = getattr(mine, name), getattr(other, name)
        if ours != theirs and None not in (ours, theirs):
            return f"Rank 0 on {mine} has {word}={ours}, rank {other.rank} on {other} has {word}={theirs}: {advice}."
    return None


def _refuse_second_claim(generation: Generation, me: Member, holder: Member) -> NoReturn:
    reason = f"Two processes claim rank {me.rank}: {holder} and {me}. Give every process its own RANK."
    if me.node == holder.node:
        reason += " If RANK and WORLD_SIZE count nodes or pods here, start torchrun once on each instead."
    generation.fail(reason)
    raise LaunchError(reason)
