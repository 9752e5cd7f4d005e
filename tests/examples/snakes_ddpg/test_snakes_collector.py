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
    shares = np.arange(1, len(players) + 1) / 2  # add up to anything
    size = {"episode_length": LENGTH, "transitions": 100 * 3 * len(boards)}
    collector = Collector(boards, BOARDS, 7, **size)
    steps = []
    for _ in range(STEPS):
        before = copied(collector.game.boards)
        sums = collector.play(actor, players, shares, 0.3)
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


def test_each_episode_has_one_opponent_drawn_by_its_share() -> None:
    count, actor = 600, Actor(4)
    collector = Collector(range(count), count, 3, episode_length=LENGTH, transitions=3 * 3 * count)
    players, shares = [OPPONENTS[name] for name in ("random", "greedy", "wandering")], np.array([1, 2, 0])
    met: list[set[int]] = [set() for _ in range(count)]
    drawn, sums = Counter[int](), Counter[str]()
    for _ in range(2 * LENGTH + 2):
        for b in np.flatnonzero(collector.game.done):
            drawn.update(met[b])
            met[b] = set()
        begins = collector.game.done.copy()
        sums.update(collector.play(actor, players, shares, 1.0))
        for b in np.flatnonzero(~begins):
            met[b].add(int(collector._opponents[b]))
            assert len(met[b]) == 1
    assert drawn[2] == 0 and drawn[0] + drawn[1] > count
    assert drawn[1] / (drawn[0] + drawn[1]) == pytest.approx(2 / 3, abs=0.06)
    assert sums["met_0"] + sums["met_1"] == sums["episodes"] and sums["met_2"] == 0
    assert sums["beaten_0"] + sums["beaten_1"] == sums["wins"]


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
                expected.update(met_0=1, beaten_0=sum(gains[:3]) > sum(gains[3:]))
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
            collector.play(actor, [OPPONENTS["random"]], np.ones(1), epsilon)
        return float((collector.replay.ways[:50] == 1).mean())

    assert straight(0.0) == 1
    assert straight(0.6) == pytest.approx(0.4 + 0.6 / 3, abs=0.02)


@pytest.mark.parametrize("length", [1, 2, 20])
def test_the_smallest_replay_has_a_batch_after_every_step_but_the_first(length: int) -> None:
    """When all boards show their end at once, the moment before is still held."""
    torch.manual_seed(0)
    collector, rng = Collector(range(1), 1, 0, episode_length=length, transitions=9), np.random.default_rng(0)
    for step in range(50):
        collector.play(Actor(4), [OPPONENTS["random"]], np.ones(1), 0.5)
        if step:
            assert len(collector.replay.sample(3, rng, torch.device("cpu")).way) == 3


def test_boards_that_run_are_given_a_player_when_the_players_change():
    asked: list[np.ndarray] = []

    def noted(name: str):
        def player(boards, team, actions):
            asked.append(boards.streams.copy())
            OPPONENTS[name](boards, team, actions)

        return player

    collector = Collector(range(BOARDS), BOARDS, 7, episode_length=LENGTH, transitions=100 * 3 * BOARDS)
    actor = Actor(8)
    league = ["random", "greedy", "territory", "sharing"]
    for names in (league, ["evasive"], league, [0], [4], ["greedy"]):  # a league, an evasive one, and difficulties
        players = [noted(name) if isinstance(name, str) else noted(LEVELS[name]) for name in names]
        for step in range(5):
            asked.clear()
            collector.play(actor, players, np.ones(len(players)), 0.3)
            assert sum(map(len, asked)) == BOARDS, (names, step)
