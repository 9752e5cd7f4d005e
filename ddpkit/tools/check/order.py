"""Compare the order in which ranks enter collectives, as they tell it."""

from __future__ import annotations

from ..script.recorder import Record
from .findings.facts import SCRIPT_END, Parting

_OF_ONE_SIZE = ("all_reduce", "broadcast", "reduce", "all_gather_into_tensor", "reduce_scatter_tensor")


class Order:
    """Holds the collectives of each group, and finds the first that ranks do not enter alike.

    Attributes:
        parted: That collective, once it is found.
    """

    def __init__(self, ranks: list[int]) -> None:
        self._ranks = ranks
        self._entered: dict[tuple[str, int], list[Record]] = {}
        self._ended: dict[int, str] = {}
        self._failed: set[int] = set()
        self._stepping: set[int] = set()
        self._has_join = False
        self.parted: Parting | None = None

    def take(self, rank: int, record: Record) -> None:
        """Take in what a rank tells."""
        if record["kind"] == "join" or self._has_join:  # ranks that have ended shadow the others' collectives
            self._has_join = True
        elif record["kind"] == "step":
            self._stepping.add(rank)
        elif record["kind"] in ("done", "end"):
            self._end(rank, record)
            self._compare_ends()
        elif record["kind"] == "collective":
            self._entered.setdefault((record["group"], rank), []).append(record)
            self._compare(rank, record)
            self._compare_ends()

    def _end(self, rank: int, record: Record) -> None:
        """Note that a rank enters no more collectives, unless it has failed, of which the others know nothing."""
        has_failed = record.get("error") or record.get("code")
        if has_failed:
            self._failed.add(rank)
        if rank not in self._failed:
            self._ended.setdefault(rank, record.get("reason") or SCRIPT_END)

    def _compare(self, rank: int, record: Record) -> None:
        position = len(self._entered[record["group"], rank]) - 1
        for other in self._ranks:
            theirs = self._entered.get((record["group"], other), [])
            if other != rank and len(theirs) > position and not _alike(theirs[position], record):
                self._part(rank, other, record, theirs[position], "")
                return

    def _compare_ends(self) -> None:
        """Find a rank that has entered a collective which one that has ended never will."""
        for ended, reason in self._ended.items():
            count = len(self._entered.get(("0", ended), []))
            others = self._stepping if reason == "steps" else self._ranks  # it was stopped here, others help it
            for rank in others:
                theirs = self._entered.get(("0", rank), [])
                if len(theirs) > count:
                    self._part(rank, ended, theirs[count], None, reason)

    def _part(self, rank: int, other: int, record: Record, theirs: Record | None, ends: str) -> None:
        if self.parted is None:
            self.parted = Parting((rank, other), (record, theirs), ends)


def _alike(one: Record, other: Record) -> bool:
    return _signature(one) == _signature(other)


def _signature(record: Record) -> tuple[object, ...]:
    if record["op"] not in _OF_ONE_SIZE:
        return (record["op"],)
    # a name in a loop says what the collective is about
    return record["op"], record.get("dtype"), tuple(record.get("shape", ())), record.get("reduction")
