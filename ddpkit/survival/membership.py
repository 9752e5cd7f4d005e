"""The places of lost ranks in a job that continues without them, as told to processes that may take them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, get_type_hints

from ..errors import LaunchError
from ..join import failures
from ..join.sockets import is_listening
from ..parsing import opened, parse, sealed


def address_of(master: str) -> tuple[str, int]:
    """Take "host:port" apart."""
    host, _, port = master.rpartition(":")
    return host, int(port)


@dataclass(frozen=True)
class Membership:
    """Membership of a job that continues without some of its ranks.

    Attributes:
        master: Where the job started, as "host:port".
        master_host: The same host, as its members reach it.
        size: Number of ranks at the start.
        regrouping: Number of the last decision on the members.
        members: The current members, the newest last.
        addresses: Where each member can be asked to admit a process.
        proof: Proof that a member of the job wrote this.
    """

    master: str
    master_host: str
    size: int
    regrouping: int
    members: list[int]
    addresses: list[tuple[str, int]]
    proof: str = ""

    @classmethod
    def from_json(cls, text: str) -> Membership:
        """Parse a membership; raise `LaunchError` if it is none."""
        found = parse(text, "membership", _FORM)
        return cls(**{**found, "addresses": [(host, port) for host, port in found["addresses"]]})

    def to_json(self) -> str:
        """Serialise it for the store."""
        return json.dumps(asdict(self))

    def sealed(self, secret: bytes) -> Membership:
        """Return it with a proof for processes that know the job's secret."""
        return Membership.from_json(sealed(secret, _PLACE, self._fields()))

    def is_of_job(self, secret: bytes) -> bool:
        """Return whether its writer knows this secret."""
        try:
            opened(secret, _PLACE, self.to_json(), "membership", _FIELDS)
        except LaunchError:
            return False
        return True

    def _fields(self) -> dict[str, Any]:
        fields = asdict(self)
        del fields["proof"]
        return fields

    @property
    def master_address(self) -> tuple[str, int]:
        """Return where the job started, as host and port."""
        return address_of(self.master)

    @property
    def open_ranks(self) -> list[int]:
        """Return the ranks with a vacant place."""
        return sorted(set(range(self.size)) - set(self.members))

    def is_alive(self, rank: int) -> bool:
        """Return whether this rank is a member and has not ended."""
        return rank in self.members and is_listening(*self.addresses[self.members.index(rank)])

    def __str__(self) -> str:
        text = f"The job at {self.master} continues with {len(self.members)} of its {self.size} ranks."
        if not self.open_ranks:
            return text
        ranks = ", ".join(map(str, self.open_ranks))
        return f"{text} A process that calls ddpkit.survive() may take the place of a lost one: {ranks}."


# addresses of the members of ended jobs that this process was a member of
_ended: set[tuple[str, int]] = set()


def remember_ended(addresses: Iterable[tuple[str, int]]) -> None:
    """Remember the addresses of the members of a job that has ended."""
    _ended.update(addresses)


_FORM = {**get_type_hints(Membership), "members": [int], "addresses": [tuple[str, int]]}
_FIELDS = {name: form for name, form in _FORM.items() if name != "proof"}
_PLACE = ["membership"]


def _is_of_ended_job(membership: str) -> bool:
    """Return whether that job has ended, with this process as a member to the end."""
    return not _ended.isdisjoint(Membership.from_json(membership).addresses)


failures.out_of_date.append(_is_of_ended_job)
