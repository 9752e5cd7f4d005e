"""Batches drawn from a replay, against lists of all that happened."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from snakes.collector import Batch, Replay
from snakes.features import FEATURES

CPU = torch.device("cpu")
BOARDS = 2


class Story:
    """Fills a replay with things that happen anyhow, and keeps them all in lists."""

    def __init__(self, moments: int, seed: int = 0, end: float = 0.2) -> None:
        self.replay, self.moments = Replay(moments, BOARDS), moments
        self.rng, self.end = np.random.default_rng(seed), end
        self.past: list[dict[str, np.ndarray]] = []

    def go_on(self, steps: int) -> Story:
        replay, rng = self.replay, self.rng
        for _ in range(steps):
            moment = {
                "seen": rng.random((BOARDS, 3, FEATURES), np.float32),
                "ways": rng.integers(0, 3, (BOARDS, 3)),
                "rewards": rng.integers(-9, 2, BOARDS),
                "moved": rng.random(BOARDS) >= self.end,
            }
            at = replay.next()
            for name, value in moment.items():
                getattr(replay, name)[at] = value
            self.past.append(moment)
        return self

    def transitions(self) -> dict[bytes, tuple]:
        """All that may be drawn: way, reward and what is seen later, by what is seen first."""
        found, held = {}, self.past[-self.moments :]
        for now, later in pairwise(held):
            for b in np.flatnonzero(now["moved"]):
                for k in range(3):
                    row = (now["ways"][b, k], now["rewards"][b], later["seen"][b, k])
                    found[now["seen"][b, k].tobytes()] = row
        return found


def draw(story: Story, size: int, seed: int = 0) -> Batch:
    return story.replay.sample(size, np.random.default_rng(seed), CPU)


def rows(batch: Batch) -> list[tuple]:
    return list(zip(*(part.numpy() for part in batch), strict=True))


def draw_many(story: Story, count: int) -> list[tuple]:
    """Rows of many batches; a single one may not be larger than the replay."""
    rng, size = np.random.default_rng(1), len(story.replay)
    return [row for _ in range(count // size) for row in rows(story.replay.sample(size, rng, CPU))]


@pytest.mark.parametrize("played", [6, 11, 12, 13, 40])  # of 12 that fit
def test_rows_are_the_transitions_that_happened_and_are_still_held(played):
    story = Story(12, seed=played).go_on(played)
    wanted, drawn = story.transitions(), set()
    for now, *row, later in draw_many(story, 2500):
        *wanted_row, wanted_later = wanted[now.tobytes()]
        assert row == pytest.approx(wanted_row)
        assert later.tobytes() == wanted_later.tobytes()
        drawn.add(now.tobytes())
    assert drawn == set(wanted)


def test_every_transition_is_as_likely_as_every_other():
    story = Story(24, seed=3).go_on(60)
    wanted = story.transitions()
    drawn = Counter(now.tobytes() for now, *_ in draw_many(story, 60_000))
    mean = drawn.total() / len(wanted)
    chi_square, freedom = sum((drawn[key] - mean) ** 2 / mean for key in wanted), len(wanted) - 1
    assert freedom > 50 and mean > 400
    assert abs(chi_square - freedom) < 4 * (2 * freedom) ** 0.5


def test_a_moment_that_is_still_being_filled_only_ends_transitions():
    story = Story(5, end=0.0).go_on(7)
    at = story.replay.next()
    story.replay.seen[at] = 7
    story.replay.rewards[at], story.replay.ways[at], story.replay.moved[at] = np.nan, 99, True
    batch = [draw(story, 12, seed) for seed in range(50)]
    assert all(part.reward.isfinite().all() and part.way.max() < 3 for part in batch)
    assert any((part.later == 7).any() for part in batch) and not any((part.seen == 7).any() for part in batch)


def test_a_batch_has_the_shapes_and_kinds_it_tells_and_depends_on_its_random_numbers_alone():
    story = Story(8).go_on(9)
    one, again, other = (draw(story, 20, seed) for seed in (1, 1, 2))
    shapes = [tuple(part.shape) for part in one]
    assert shapes == [(20, FEATURES), (20,), (20,), (20, FEATURES)]
    assert [part.dtype for part in one] == [torch.float32, torch.int64, torch.float32, torch.float32]
    assert all(torch.equal(*pair) for pair in zip(one, again, strict=True))
    assert not torch.equal(one.seen, other.seen)


def test_a_replay_holds_transitions_up_to_what_fits_and_is_ready_when_it_holds_enough():
    story = Story(4)
    held = [(len(story.go_on(1).replay), story.replay.ready(13), story.replay.ready(1)) for _ in range(5)]
    assert held == [(6, False, False), (12, False, True), (18, True, True), (24, True, True), (24, True, True)]


def test_a_batch_that_can_never_fit_is_an_error_at_once():
    with pytest.raises(ValueError, match=r"25 rows does not fit 4 .* 24 .*--buffer_size"):
        Story(4).go_on(1).replay.ready(25)


@pytest.mark.parametrize("moments", [0, 1, 2])
def test_a_replay_that_may_hold_no_transition_is_an_error(moments):
    with pytest.raises(ValueError, match=f"--buffer_size 90 per rank, but there is room for {moments}: raise"):
        Replay(moments, boards=10)
