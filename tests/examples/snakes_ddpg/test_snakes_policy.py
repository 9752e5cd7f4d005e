"""Moves from an actor: the best way to play, drawn ways to learn; and files that hold one, or do not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from player.search import load_player
from snakes.collector import explore
from snakes.ddpg import Actor, Critic, Policy, load_network
from snakes.features import FEATURES, observe
from snakes.game import DOWN, LEFT, RIGHT, UP, Game

TURN = {UP: (LEFT, UP, RIGHT), RIGHT: (UP, RIGHT, DOWN), DOWN: (RIGHT, DOWN, LEFT), LEFT: (DOWN, LEFT, UP)}


def game_with_all_headings(count: int, seed: int) -> Game:
    game, rng = Game(count, seed), np.random.default_rng(seed)
    for _ in range(20):
        game.step(rng.integers(0, 4, (count, 6), dtype=np.uint8))
    assert np.bincount(game.boards.headings.ravel(), minlength=4).min() > 0
    return game


def turned(game: Game, ways: np.ndarray) -> np.ndarray:
    """Directions of ways of shape (n, 6)."""
    pairs = zip(game.boards.headings.ravel().tolist(), ways.ravel().tolist(), strict=True)
    return np.array([TURN[heading][way] for heading, way in pairs]).reshape(ways.shape)


def perceive(state: dict[str, torch.Tensor], seen: np.ndarray) -> np.ndarray:
    """The actor's last layer, in float64."""
    layers = [state[f"layers.{i}.{name}"].double().numpy() for i in (0, 2, 4) for name in ("weight", "bias")]
    x = seen.astype(np.float64)
    for i in (0, 2):
        x = np.maximum(0, x @ layers[i].T + layers[i + 1])
    return x @ layers[4].T + layers[5]


@pytest.mark.parametrize("team", [0, 1])
def test_a_policy_takes_each_snakes_most_probable_way_and_leaves_the_other_team_alone(team):
    torch.manual_seed(1)
    game, actor, mine = game_with_all_headings(300, seed=1), Actor(hidden=16), slice(3 * team, 3 * team + 3)
    seen = np.empty((300, 3, FEATURES), np.float32)
    observe(game.boards, team, seen)
    actor.layers[4].bias.data -= torch.from_numpy(perceive(actor.state_dict(), seen).mean((0, 1)))  # so that all vary
    ways = np.full((300, 6), 9)
    ways[:, mine] = perceive(actor.state_dict(), seen).argmax(-1)
    assert np.bincount(ways[:, mine].ravel()).min() > 50
    ways[ways == 9] = 0

    actions = np.full((300, 6), 7, np.uint8)
    Policy(actor)(game.boards, team, actions)
    np.testing.assert_array_equal(actions[:, mine], turned(game, ways)[:, mine])
    assert (np.delete(actions, np.r_[mine], axis=1) == 7).all()


def draw_ways(game: Game, team: int, probabilities: np.ndarray, epsilon: float) -> tuple[np.ndarray, np.ndarray]:
    n = len(game.done)
    ways, actions = np.full((n, 3), 9, np.uint8), np.full((n, 6), 7, np.uint8)
    explore(game.boards, team, np.broadcast_to(probabilities, (n, 3, 3)).astype(np.float32), epsilon, ways, actions)
    return ways, actions


PROBABILITIES = np.array([[0.2, 0.5, 0.3], [0.05, 0.05, 0.9], [0.6, 0.4, 0.0]])


@pytest.mark.parametrize("epsilon", [0.0, 0.3, 1.0])
def test_ways_are_drawn_by_their_probability_and_with_epsilon_alike_each_snake_for_itself(epsilon):
    n = 50_000
    ways, _ = draw_ways(Game(n, seed=2), 0, PROBABILITIES, epsilon)
    found = np.zeros((3, 3, 3))
    np.add.at(found, tuple(ways.T), 1)
    wanted = n * np.einsum("i,j,k->ijk", *((1 - epsilon) * PROBABILITIES + epsilon / 3))
    possible = wanted > 0
    assert found[~possible].sum() == 0
    chi_square = ((found - wanted)[possible] ** 2 / wanted[possible]).sum()
    assert chi_square < 60  # up to 26 degrees of freedom: once in 6,000 seeds


@pytest.mark.parametrize("way", [0, 1, 2])
def test_a_way_that_is_certain_is_taken(way):
    ways, _ = draw_ways(Game(1000, seed=3), 1, np.eye(3)[way], 0.0)
    assert (ways == way).all()


@pytest.mark.parametrize("team", [0, 1])
def test_explored_ways_become_directions_of_that_team_alone(team):
    game = game_with_all_headings(200, seed=4)
    ways, actions = draw_ways(game, team, PROBABILITIES, 0.3)
    mine = slice(3 * team, 3 * team + 3)
    np.testing.assert_array_equal(actions[:, mine], turned(game, np.hstack([ways, ways]))[:, mine])
    assert (np.delete(actions, np.r_[mine], axis=1) == 7).all()


def test_what_a_board_draws_does_not_depend_on_the_boards_beside_it():
    games = [Game(10, seed=5), Game(4, seed=5), Game(6, seed=5, first=4)]
    rounds = [[draw_ways(game, 0, PROBABILITIES, 0.3)[0] for _ in range(20)] for game in games]
    whole, *parts = (np.stack(ways) for ways in rounds)
    np.testing.assert_array_equal(whole, np.concatenate(parts, axis=1))
    assert (whole[1:] != whole[:-1]).any() and (whole[:, 1:] != whole[:, :-1]).any()


# Files


@pytest.mark.parametrize("hidden", [8, 32])
def test_a_loaded_policy_plays_as_the_actor_that_was_saved(tmp_path, hidden):
    torch.manual_seed(hidden)
    game, actor = game_with_all_headings(50, seed=6), Actor(hidden)
    torch.save(actor.state_dict(), tmp_path / "actor_best.pth")
    played = np.zeros((2, 50, 6), np.uint8)
    Policy(actor)(game.boards, 0, played[0])
    load_player(tmp_path / "actor_best.pth", depth=0)(game.boards, 0, played[1])
    np.testing.assert_array_equal(*played)


def of_other_features() -> dict[str, torch.Tensor]:
    return Actor(8).state_dict() | {"layers.0.weight": torch.zeros(8, FEATURES - 1)}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (of_other_features(), f"{FEATURES - 1}.*{FEATURES}[^.]*"),
        (Actor(8).state_dict() | {"more": torch.zeros(1)}, "more"),
        (Critic(8).state_dict(), "layers.0"),
    ],
    ids=["other features", "another layer", "a critic"],
)
def test_a_file_without_a_fitting_actor_is_an_error_of_one_line(tmp_path, content, reason):
    path = tmp_path / "actor_7.pth"
    torch.save(content, path)
    with pytest.raises(ValueError, match=rf"actor_7.pth .*actor.*{FEATURES} features.*{reason}.*made with") as caught:
        load_network(Actor, path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


@pytest.mark.parametrize("content", [b"hello\n" * 100, b""])
def test_a_file_that_is_not_of_weights_is_told_without_torchs_advice_to_run_it(tmp_path, content):
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"notes.txt is no file of weights .*actor_\*.pth") as caught:
        load_network(Actor, path)
    assert "weights_only" not in str(caught.value)


@pytest.mark.parametrize("content", [[1, 2], torch.zeros(3), {1: torch.zeros(2)}], ids=["list", "tensor", "numbers"])
def test_a_file_that_holds_no_weights_by_name_is_refused(tmp_path, content):
    path = tmp_path / "actor_7.pth"
    torch.save(content, path)
    with pytest.raises(ValueError, match=r"actor_7.pth is no file of weights .*actor_\*.pth"):
        load_player(path)


def test_a_missing_file_is_named():
    with pytest.raises(FileNotFoundError, match=r"there is no file no_folder/actor_3.pth: .*trained_model") as caught:
        load_player(Path("no_folder/actor_3.pth"))
    assert "\n" not in str(caught.value)
