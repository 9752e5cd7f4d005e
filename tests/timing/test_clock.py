"""The clock of steps: which phase gets the time, and which blocks are kept."""

from __future__ import annotations

import threading
import time

import pytest

from ddpkit.timing import STEPS, Phase, StepClock


def spend(clock: StepClock, phase: Phase, seconds: float) -> None:
    clock.begin(phase)
    time.sleep(seconds)
    clock.begin(Phase.OTHER)


def make_steps(clock: StepClock, number: int) -> None:
    for _ in range(number):
        clock.end_step()


def test_the_time_of_a_phase_lasts_until_the_next_begins() -> None:
    clock = StepClock()
    time.sleep(0.1)  # before the first step
    clock.end_step()
    spend(clock, Phase.DATA, 0.05)
    spend(clock, Phase.FORWARD, 0.02)
    make_steps(clock, STEPS)
    (block,) = clock.window(1, 1) or []
    assert block[Phase.DATA] >= 0.05 and block[Phase.FORWARD] >= 0.02
    assert block[Phase.OTHER] < 0.1 and block[Phase.WAITING] == 0


def test_a_phase_inside_another_takes_none_of_its_time() -> None:
    clock = StepClock()
    clock.end_step()
    clock.begin(Phase.BACKWARD)
    with pytest.raises(ZeroDivisionError), clock.within(Phase.WAITING):
        time.sleep(0.05)
        raise ZeroDivisionError
    assert clock.begin(Phase.OTHER) == Phase.BACKWARD
    make_steps(clock, STEPS)
    (block,) = clock.window(1, 1) or []
    assert block[Phase.WAITING] >= 0.05 > block[Phase.BACKWARD]


def test_waits_of_another_thread_are_none_of_the_step() -> None:
    clock = StepClock()
    clock.end_step()

    def wait() -> None:
        with clock.within(Phase.WAITING):
            time.sleep(0.05)

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    make_steps(clock, STEPS)
    (block,) = clock.window(1, 1) or []
    assert block[Phase.WAITING] == 0


def test_blocks_are_known_by_their_number_as_long_as_they_are_kept() -> None:
    clock = StepClock()
    make_steps(clock, 1 + 200 * STEPS + STEPS - 1)
    assert (clock.steps, clock.blocks) == (201 * STEPS - 1, 200)
    assert clock.window(200, 8) and clock.window(190, 8)
    for last, length in [(201, 1), (100, 8), (0, 1), (-1, 1), (200, 100)]:
        assert clock.window(last, length) is None
    assert StepClock().window(0, 1) is None
