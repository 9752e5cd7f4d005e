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

    def __init__(self, moments: int, seed: int = 0, death: float = 0.15, end: float = 0.2) -> None:
        self.replay, self.moments = Replay(moments, BOARDS), moments
        self.rng, self.death, self.end = np.random.default_rng(seed), death, end
        self.past: list[dict[str, np.ndarray]] = []

    def go_on(self, steps: int) -> Story:
        replay, rng = self.replay, self.rng
        for _ in range(steps):
            moment = {
                "seen": rng.random((BOARDS, 3, FEATURES), np.float32),
                "ways": rng.integers(0, 3, (BOARDS, 3)),
                "rewards": rng.integers(-9, 2, (BOARDS, 3)),
                "died": rng.random((BOARDS, 3)) < self.death,
                "moved": rng.random(BOARDS) >= self.end,
            }
            at = replay.next()
            for name, value in moment.items():
                getattr(replay, name)[at] = value
            self.past.append(moment)
        return self

    def transitions(self, gamma: float) -> dict[bytes, tuple]:
        """All that may be drawn: way, reward, weight and what is seen later, by what is seen first."""
        found, held = {}, self.past[-self.moments :]
        for now, later in pairwise(held):
            for b in np.flatnonzero(now["moved"]):
                for k in range(3):
                    weight = 0 if now["died"][b, k] else gamma
                    row = (now["ways"][b, k], now["rewards"][b, k], weight, later["seen"][b, k])
                    found[now["seen"][b, k].tobytes()] = row
        return found


def draw(story: Story, size: int, gamma: float, seed: int = 0) -> Batch:
    return story.replay.sample(size, gamma, np.random.default_rng(seed), CPU)


def rows(batch: Batch) -> list[tuple]:
    return list(zip(*(part.numpy() for part in batch), strict=True))


def draw_many(story: Story, count: int, gamma: float) -> list[tuple]:
    """Rows of many batches; a single one may not be larger than the replay."""
    rng, size = np.random.default_rng(1), len(story.replay)
    return [row for _ in range(count // size) for row in rows(story.replay.sample(size, gamma, rng, CPU))]


@pytest.mark.parametrize("gamma", [0.9, 0.0])
@pytest.mark.parametrize("played", [6, 11, 12, 13, 40])  # of 12 that fit
def test_rows_are_the_transitions_that_happened_and_are_still_held(played, gamma):
    story = Story(12, seed=played).go_on(played)
    wanted, drawn = story.transitions(gamma), set()
    for now, *row, later in draw_many(story, 2500, gamma):
        *wanted_row, wanted_later = wanted[now.tobytes()]
        assert row == pytest.approx(wanted_row)
        assert later.tobytes() == wanted_later.tobytes()
        drawn.add(now.tobytes())
    assert drawn == set(wanted)


def test_every_transition_is_as_likely_as_every_other():
    story = Story(24, seed=3).go_on(60)
    wanted = story.transitions(0.9)
    drawn = Counter(now.tobytes() for now, *_ in draw_many(story, 60_000, 0.9))
    mean = drawn.total() / len(wanted)
    chi_square, freedom = sum((drawn[key] - mean) ** 2 / mean for key in wanted), len(wanted) - 1
    assert freedom > 50 and mean > 400
    assert abs(chi_square - freedom) < 4 * (2 * freedom) ** 0.5


def test_a_moment_that_is_still_being_filled_only_ends_transitions():
    story = Story(5, death=0.0, end=0.0).go_on(7)
    at = story.replay.next()
    story.replay.seen[at] = 7
    story.replay.rewards[at], story.replay.ways[at], story.replay.moved[at] = np.nan, 99, True
    batch = [draw(story, 12, 0.9, seed) for seed in range(50)]
    assert all(part.reward.isfinite().all() and part.way.max() < 3 for part in batch)
    assert any((part.later == 7).any() for part in batch) and not any((part.seen == 7).any() for part in batch)


def test_a_batch_has_the_shapes_and_kinds_it_tells_and_depends_on_its_random_numbers_alone():
    story = Story(8).go_on(9)
    one, again, other = (draw(story, 20, 0.9, seed) for seed in (1, 1, 2))
    shapes = [tuple(part.shape) for part in one]
    assert shapes == [(20, FEATURES), (20,), (20,), (20,), (20, FEATURES)]
    assert [part.dtype for part in one] == [torch.float32, torch.int64, torch.float32, torch.float32, torch.float32]
    assert all(torch.equal(*pair) for pair in zip(one, again, strict=True))
    assert not torch.equal(one.seen, other.seen)


def test_a_replay_holds_transitions_up_to_what_fits_and_is_ready_when_it_holds_enough():
    story = Story(4)
    held = [(len(story.go_on(1).replay), story.replay.ready(13), story.replay.ready(1)) for _ in range(5)]
    assert held == [(6, False, False), (12, False, True), (18, True, True), (24, True, True), (24, True, True)]


@pytest.mark.parametrize("ask", ["ready", "sample"])
def test_a_batch_that_can_never_fit_is_an_error_at_once(ask):
    story = Story(4).go_on(1)
    with pytest.raises(ValueError, match=r"25 rows does not fit 4 .* 24 .*--buffer_size"):
        story.replay.ready(25) if ask == "ready" else draw(story, 25, 0.9)


@pytest.mark.parametrize(("played", "size"), [(0, 1), (1, 1), (3, 19)])
def test_a_batch_that_does_not_fit_yet_is_an_error(played, size):
    story = Story(4, end=0.0).go_on(played)
    with pytest.raises(ValueError, match=rf"{played} moments held, {6 * played} .*{size} rows: play"):
        draw(story, size, 0.9)


@pytest.mark.parametrize("moments", [0, 1, 2])
def test_a_replay_that_may_hold_no_transition_is_an_error(moments):
    with pytest.raises(ValueError, match=f"--buffer_size 90 per rank, but there is room for {moments}: raise"):
        Replay(moments, boards=10)
