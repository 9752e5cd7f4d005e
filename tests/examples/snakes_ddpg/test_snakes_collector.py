"""What the boards of a rank play and remember, against counts in plain Python from their states step by step."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from snakes.collector import Collector
from snakes.ddpg import Actor
from snakes.features import DIRECTION, FEATURES, observe
from snakes.game import NEXT, Boards
from snakes.opponents import LEVELS, OPPONENTS

pytestmark = pytest.mark.storm  # it plays, and compiles what it plays with

BOARDS, STEPS, LENGTH = 8, 70, 20  # an episode has 20 steps


class Step(NamedTuple):
    """One call of `play()`."""

    before: Boards
    after: Boards
    died: np.ndarray
    sums: Counter


def play(boards: range, *opponents: str) -> tuple[Collector, list[Step]]:
    torch.manual_seed(0)
    actor = Actor(8)
    players = [OPPONENTS[opponent] for opponent in opponents]
    size = {"episode_length": LENGTH, "transitions": 100 * 3 * len(boards)}
    collector = Collector(boards, BOARDS, 7, **size)
    steps = []
    for _ in range(STEPS):
        before = copied(collector.game.boards)
        sums = collector.play(actor, players, 0.3)
        steps.append(Step(before, copied(collector.game.boards), collector.game.died.copy(), sums))
    return collector, steps


def copied(boards: Boards) -> Boards:
    return Boards(*(array.copy() for array in boards))


@pytest.fixture(scope="module")
def played() -> tuple[Collector, list[Step]]:
    return play(range(BOARDS), "random")


Played = tuple[Collector, list[Step]]


def heads(boards: Boards) -> np.ndarray:
    return np.take_along_axis(boards.bodies, boards.heads[..., None].astype(int), -1)[..., 0]


@pytest.mark.parametrize("opponents", [["greedy"], ["random"], ["greedy", "random", "wandering"]])
def test_the_same_boards_play_the_same_games_however_they_are_split_over_ranks(opponents: list[str]) -> None:
    whole, steps = play(range(BOARDS), *opponents)
    (one, ones), (other, others) = play(range(5), *opponents), play(range(5, BOARDS), *opponents)
    for name in ("seen", "ways", "rewards", "moved"):
        parts = [getattr(part.replay, name) for part in (one, other)]
        np.testing.assert_array_equal(getattr(whole.replay, name), np.concatenate(parts, axis=1), err_msg=name)
    for step, mine, theirs in zip(steps, ones, others, strict=True):
        assert step.sums == {name: mine.sums[name] + theirs.sums[name] for name in step.sums}
    streams = whole.game.boards.streams
    assert len({*streams.tolist()}) == BOARDS


def test_an_episode_lasts_its_steps_then_the_board_shows_its_end_once_and_starts_anew(played: Played) -> None:
    collector, steps = played
    time = [b * LENGTH // BOARDS for b in range(BOARDS)]  # they start at different times of an episode
    ends = 0
    for i, step in enumerate(steps):
        for b in range(BOARDS):
            assert step.before.times[b] == time[b]
            if time[b] == LENGTH:
                assert not collector.replay.moved[i, b]
                assert (step.after.lengths[b] == 3).all() and not step.died[b].any()
                time[b], ends = 0, ends + 1
            else:
                assert collector.replay.moved[i, b]
                time[b] += 1
            assert step.after.times[b] == time[b]
    assert ends > 2 * BOARDS


def test_what_it_remembers_is_what_the_snakes_saw_and_the_way_they_took(played: Played) -> None:
    collector, steps = played
    replay, turned = collector.replay, set()
    for i, step in enumerate(steps):
        seen = np.empty((BOARDS, 3, FEATURES), np.float32)
        observe(step.before, 0, seen)
        np.testing.assert_array_equal(replay.seen[i], seen)
        for b, k in np.argwhere(replay.moved[i][:, None] & ~step.died[:, :3]):
            way = replay.ways[i, b, k]
            heading = DIRECTION[step.before.headings[b, k], way]
            assert step.after.headings[b, k] == heading
            assert heads(step.after)[b, k] == NEXT[heads(step.before)[b, k], heading]
            turned.add(int(way))
    assert turned == {0, 1, 2}


def test_a_reward_is_what_the_team_gains_on_the_other_where_a_death_costs_all_that_was_gained(played: Played) -> None:
    collector, steps = played
    replay, losses = collector.replay, 0
    for i, step in enumerate(steps):
        gained = step.after.lengths.astype(int) - step.before.lengths
        lead = gained[:, :3].sum(1) - gained[:, 3:].sum(1)
        for b in np.flatnonzero(replay.moved[i]):
            assert replay.rewards[i, b] == lead[b]
            losses += (step.died[b] & (gained[b] < 0)).sum()
    assert losses, "nobody died longer than at the start"


def test_the_sums_are_those_of_the_episodes_that_were_played_whole(played: Played) -> None:
    _, steps = played
    whole = [b * LENGTH // BOARDS == 0 for b in range(BOARDS)]
    seen: Counter[str] = Counter()
    for step in steps:
        expected: Counter[str] = Counter(dict.fromkeys(step.sums, 0))
        for b in range(BOARDS):
            if step.before.times[b] == LENGTH:  # shows its end
                whole[b] = True
                continue
            expected["environment_steps"] += 1
            expected["deaths"] += int(step.died[b, :3].sum())
            if step.after.times[b] == LENGTH and whole[b]:
                gains = [int(length) - 3 for length in step.after.lengths[b]]
                expected.update(episodes=1, wins=sum(gains[:3]) > sum(gains[3:]), opponent=sum(gains[3:]))
                expected.update({f"snake_{k + 1}": gains[k] for k in range(3)})
        assert step.sums == expected
        seen.update(expected)
    # of 70 calls every 21st only shows an end
    assert seen["episodes"] == 3 + 7 * 2 + sum((b * LENGTH // BOARDS) >= 13 for b in range(1, BOARDS))
    assert 0 < seen["wins"] < seen["episodes"] and min(seen["opponent"], seen["deaths"], seen["snake_1"]) > 0


def test_only_some_moves_are_random_and_without_exploration_all_follow_the_actor() -> None:
    class Straight(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.anchor = torch.nn.Parameter(torch.zeros(()))

        def forward(self, seen: torch.Tensor) -> torch.Tensor:
            return torch.tensor([0.0, 1.0, 0.0]).expand(*seen.shape[:-1], 3)

    def straight(epsilon: float) -> float:
        actor: Any = Straight()
        collector = Collector(range(64), 64, 1, episode_length=LENGTH, transitions=64 * 3 * 100)
        for _ in range(50):
            collector.play(actor, [OPPONENTS["random"]], epsilon)
        return float((collector.replay.ways[:50] == 1).mean())

    assert straight(0.0) == 1
    assert straight(0.6) == pytest.approx(0.4 + 0.6 / 3, abs=0.02)


@pytest.mark.parametrize("length", [1, 2, 20])
def test_the_smallest_replay_has_a_batch_after_every_step_but_the_first(length: int) -> None:
    """When all boards show their end at once, the moment before is still held."""
    torch.manual_seed(0)
    collector, rng = Collector(range(1), 1, 0, episode_length=length, transitions=9), np.random.default_rng(0)
    for step in range(50):
        collector.play(Actor(4), [OPPONENTS["random"]], 0.5)
        if step:
            assert len(collector.replay.sample(3, rng, torch.device("cpu")).way) == 3


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_each_player_moves_on_its_share_of_the_boards_also_when_the_players_change(ranks: int) -> None:
    met: dict[str, list[int]] = {}

    def noted(name: str):
        def player(boards, team, actions):
            met.setdefault(name, []).extend(boards.streams.tolist())
            OPPONENTS[name](boards, team, actions)

        return player

    shares = np.array_split(np.arange(BOARDS), ranks)
    collectors = [
        Collector(range(share[0], share[-1] + 1), BOARDS, 7, episode_length=LENGTH, transitions=100 * 3 * BOARDS)
        for share in shares
    ]
    actor = Actor(8)
    for names in (["random", "greedy", "territory"], ["evasive"], ["sharing", "greedy"], [LEVELS[0]], [LEVELS[4]]):
        for _ in range(5):
            met.clear()
            for collector in collectors:
                collector.play(actor, [noted(name) for name in names], 0.3)
            moved = [stream for streams in met.values() for stream in streams]
            assert len({*moved}) == len(moved) == BOARDS
            counts = sorted(map(len, met.values()))
            assert len(counts) == len(names) and counts[-1] - counts[0] <= 1
