"""Bugs planted on purpose: the search must find each. Some were in the code before it was searched."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ddpkit.rendezvous import generation, session
from ddpkit.rendezvous import session as store_barrier
from ddpkit.survival import regrouping
from ddpkit.survival import states as kept_states
from ddpkit.watch import connections as monitor_connections
from ddpkit.watch import stop_agreement


def give_up_a_start_that_is_over() -> None:
    """A rank that is started anew gives up the last start, in which others are that were started anew. It was so."""
    claim = generation._claim

    def give_up(start: generation.Generation, me: Any) -> bool:
        is_mine = claim(start, me)
        if not is_mine and start.claim(me).is_alive() is False and not start.is_complete():
            start.fail(f"Rank {me.rank} ended while the ranks joined.")
        return is_mine

    generation._claim = give_up


def give_two_processes_one_number() -> None:
    """A rank looks whether its number is free, and then takes it."""

    def claim(self: generation.Generation, me: Any) -> Any:
        key = generation.claim_key(me.rank)
        if not self.store.check([key]):
            self.store.set(key, me.to_json())
            number = self.store.add("claims", 1)
            self.store.set(generation._claimant_key(number), f"{me.rank}")
            return me
        return generation.Member.from_json(self.store.get(key), me.rank)

    generation.Generation.claim = claim


def pass_a_barrier_that_others_gave_up() -> None:
    """A rank whose time is up does not break the barrier."""

    def give_up(self: store_barrier.StoreBarrier) -> None:
        self._store.set(self._present(self.session.rank), "")
        absent = [(rank, "") for rank in self._call_roll(self._store.add(self.counter, 0))]
        if absent:
            raise store_barrier.BarrierTimeoutError("too late", absent, [])

    store_barrier.StoreBarrier._give_up = give_up


def stop_one_step_too_early() -> None:
    """All stop at the step that the furthest one is in, not at the one after it."""

    def decide(self: stop_agreement.StopAgreement, left: Any) -> Any:
        decision = decide_well(self, left)
        return decision and replace(decision, step=decision.step - 1)

    decide_well = stop_agreement.StopAgreement.decide
    stop_agreement.StopAgreement.decide = decide


def let_both_halves_go_on() -> None:
    """Those who are left do not ask whether they are the larger part."""
    regrouping._may_speak_for_all = lambda members, unknown: True


def excuse_an_absence_at_a_commit() -> None:
    """A rank takes a step that it commits after an absence for a sign that the others are still there. It was so."""

    def record_contact(self: regrouping.Rendezvous) -> None:
        self._excused = self._heartbeat.absences()

    regrouping.Rendezvous.record_contact = record_contact


def keep_states_that_others_have_not() -> None:
    """Those who go on keep the states that they have."""

    def restore(self: kept_states.KeptStates, decision: Any, member: int) -> None:
        self.is_consistent = True

    kept_states.KeptStates.restore = restore


def let_the_host_of_the_store_leave_first() -> None:
    """Who hosts the store does not wait at the end for those who still need it. Of leaders it was so."""
    leave = session.Session.leave
    session.Session.leave = lambda self, linger: leave(self, False)


def refuse_nobody() -> None:
    """No rank refuses processes that come late."""
    regrouping.Refusals._has_refused_all = lambda self: True


def end_a_connection_that_is_silent_for_a_moment() -> None:
    """Three seconds without a segment end a connection. It was so for three lost questions of keep-alive."""
    monitor_connections._SILENT = 3


# each with the scenario in which it shows
PLANTED = {
    "give_up_a_start_that_is_over": "joining",
    "give_two_processes_one_number": "joining",
    "pass_a_barrier_that_others_gave_up": "meeting",
    "stop_one_step_too_early": "stopping",
    "let_both_halves_go_on": "surviving",
    "excuse_an_absence_at_a_commit": "surviving",
    "keep_states_that_others_have_not": "surviving",
    "let_the_host_of_the_store_leave_first": "meeting",
    "refuse_nobody": "coming_late",
    "end_a_connection_that_is_silent_for_a_moment": "losing",
}


def plant(bug: str) -> None:
    """Put a bug into this process."""
    globals()[bug]()
