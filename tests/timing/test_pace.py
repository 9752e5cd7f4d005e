"""Paces of ranks, made by hand and at random: which rank is slow, and which numbers are no pace."""

from __future__ import annotations

import json
import math
from dataclasses import asdict

import numpy as np
import pytest

from ddpkit.join.store_values import encode
from ddpkit.timing import BLOCKS, STEPS, Pace, Paces, Phase, StepClock, find_slow_rank
from ddpkit.watch.messages import parse

USUAL = {Phase.DATA: 0.006, Phase.FORWARD: 0.01, Phase.BACKWARD: 0.02, Phase.OPTIMIZER: 0.004, Phase.OTHER: 0.001}


def paces_of(world_size: int, slow: dict[int, dict[Phase, float]], noise: float = 0.0, seed: int = 0) -> list[Pace]:
    """Those of ranks that work for so long a step, some of them longer, and wait for the last in each block."""
    random = np.random.default_rng(seed)
    own = np.zeros((world_size, BLOCKS, len(Phase)))
    for phase, seconds in USUAL.items():
        own[:, :, phase] = seconds * (1 + noise * random.random((world_size, BLOCKS)))
    for rank, more in slow.items():
        for phase, seconds in more.items():
            own[rank, :, phase] += seconds
    work = own.sum(axis=2)
    own[:, :, Phase.WAITING] = 0.002 + work.max(axis=0) - work
    return [Pace(rank, 9, tuple(map(tuple, STEPS * own[rank]))) for rank in range(world_size)]


@pytest.mark.parametrize("world_size", [2, 3, 8, 64])
@pytest.mark.parametrize("phase", USUAL)
def test_a_rank_that_takes_a_fifth_longer_is_found_with_its_phase(world_size: int, phase: Phase) -> None:
    slow = find_slow_rank(paces_of(world_size, {1: {phase: 0.0086}}, noise=0.1))
    assert slow is not None and (slow.rank, slow.phase) == (1, phase.name.lower())
    assert slow.share == pytest.approx(0.2, abs=0.07)
    assert slow.seconds - slow.others == pytest.approx(0.0086, abs=0.003)


@pytest.mark.parametrize("world_size", [2, 3, 8, 64])
def test_among_ranks_alike_none_is_slow_however_their_steps_vary(world_size: int) -> None:
    for seed in range(200):
        assert find_slow_rank(paces_of(world_size, {}, noise=0.1, seed=seed)) is None


def test_a_rank_whose_core_is_shared_takes_longer_in_many_phases_and_is_found() -> None:
    more = {Phase.DATA: 0.0028, Phase.BACKWARD: 0.0036, Phase.OPTIMIZER: 0.0022}  # none explains half of the wait
    slow = find_slow_rank(paces_of(2, {0: more}))
    assert slow is not None and (slow.rank, slow.phase) == (0, "backward")


def test_several_slow_ranks_are_found_as_long_as_they_are_less_than_half() -> None:
    slow = find_slow_rank(paces_of(8, {rank: {Phase.DATA: 0.02} for rank in (2, 5, 6)}))
    assert slow is not None and slow.rank in (2, 5, 6) and slow.phase == "data"


def test_one_hiccup_makes_no_rank_slow() -> None:
    paces = paces_of(2, {})
    blocks = [list(block) for block in paces[0].seconds]
    blocks[3][Phase.OTHER] += 5.0  # a checkpoint
    other = [list(block) for block in paces[1].seconds]
    other[3][Phase.WAITING] += 5.0
    assert find_slow_rank([Pace(0, 9, tuple(map(tuple, blocks))), Pace(1, 9, tuple(map(tuple, other)))]) is None


def test_one_rank_waits_for_nobody() -> None:
    assert find_slow_rank([]) is None
    assert find_slow_rank(paces_of(1, {})) is None


def test_what_is_said_names_the_phase_and_the_times() -> None:
    slow = find_slow_rank(paces_of(3, {2: {Phase.DATA: 0.042}}))
    assert str(slow) == "makes every step 98 % longer: its data take 48.0 ms, the others' 6.0 ms"


def test_a_pace_travels_as_it_is() -> None:
    (pace,) = paces_of(1, {})
    message = parse(encode(pace=pace), world_size=1)
    assert message is not None and message.pace == pace


@pytest.mark.parametrize(
    "change",
    [
        {"rank": 7},
        {"rank": True},
        {"last": 1.5},
        {"seconds": []},
        {"seconds": [[0.0] * len(Phase)] * (BLOCKS - 1)},
        {"seconds": [[0.0] * (len(Phase) - 1)] * BLOCKS},
        {"seconds": [[-1.0] * len(Phase)] * BLOCKS},
        {"seconds": [[math.nan] * len(Phase)] * BLOCKS},
        {"seconds": [[math.inf] * len(Phase)] * BLOCKS},
        {"seconds": [["0"] * len(Phase)] * BLOCKS},
        {"seconds": "0"},
    ],
    ids=str,
)
def test_what_is_no_pace_is_not_believed(change: dict[str, object]) -> None:
    (pace,) = paces_of(1, {})
    assert parse(json.dumps({"pace": asdict(pace) | change}).encode(), world_size=2) is None


def test_a_wait_that_no_phase_explains_names_nobody() -> None:
    own = (0.1, 0.1, 0.1, 0.0, 0.1, 0.0)
    paces = [Pace(0, 9, (own,) * BLOCKS), Pace(1, 9, ((0.1, 0.1, 0.1, 0.2, 0.1, 0.0),) * BLOCKS)]
    assert find_slow_rank(paces) is None


def test_ranks_are_asked_for_steps_that_all_have_ended_and_answers_to_other_questions_do_not_count() -> None:
    paces, clock = Paces(2), StepClock()
    assert paces.next_question(clock) is None
    for _ in range(1 + STEPS * (BLOCKS + 1)):
        clock.end_step()
    assert paces.next_question(clock) == BLOCKS
    assert paces.next_question(clock) is None  # it has been asked
    one, other = paces_of(2, {1: {Phase.DATA: 0.05}})
    paces.add(one)
    paces.add(other)
    assert paces.latest == []
    for pace in (one, other):
        paces.add(Pace(pace.rank, BLOCKS, pace.seconds))
    assert paces.slow is not None and paces.slow.rank == 1


def test_a_slow_rank_is_said_once_when_it_has_been_slow_twice_in_the_same_phase() -> None:
    paces = Paces(2)

    def hear(phase: Phase) -> str | None:
        for pace in paces_of(2, {1: {phase: 0.05}}):
            paces.add(Pace(pace.rank, 0, pace.seconds))
        news = paces.news()
        return None if news is None else news.phase

    assert [hear(phase) for phase in (Phase.DATA, Phase.FORWARD, Phase.DATA)] == [None, None, None]
    assert [hear(Phase.DATA) for _ in range(3)] == ["data", None, None]
    assert [hear(Phase.FORWARD) for _ in range(3)] == [None, "forward", None]


def test_what_takes_no_time_makes_no_rank_slow() -> None:
    paces = [
        Pace(rank, 9, tuple((0.0, 0.001, 0.001, waiting, 0.0, 0.0) for _ in range(BLOCKS)))
        for rank, waiting in enumerate([0.002, 0.0005])
    ]
    assert find_slow_rank(paces) is None
