import gzip
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from snakes.evaluation import play_games
from snakes.game import COLUMNS, DOWN, LEFT, RIGHT, ROWS, UP, Game
from snakes.opponents import LEVELS, OPPONENTS, get
from snakes_boards import place

pytestmark = pytest.mark.storm  # the first time, compiling the players takes half a minute

MOVES = {UP: (-1, 0), DOWN: (1, 0), LEFT: (0, -1), RIGHT: (0, 1)}
DATA = Path(__file__).with_name("reference_games.json.gz")


def cell(row, column):
    return row % ROWS * COLUMNS + column % COLUMNS


def neighbour(at, direction):
    row, column = MOVES[direction]
    return cell(at // COLUMNS + row, at % COLUMNS + column)


def squared_distance(at, to):
    return (at // COLUMNS - to // COLUMNS) ** 2 + (at % COLUMNS - to % COLUMNS) ** 2


def plain_greedy(bodies, beans, team):
    """Level 2 in the words of its rules, over lists of cells."""
    taken = {c for body in bodies for c in body}
    beans, actions = list(beans), []
    for body in bodies[3 * team : 3 * team + 3]:
        bean = min(beans, key=lambda bean: squared_distance(body[0], bean))  # min takes the first of equals
        beans.remove(bean)
        free = [d for d in MOVES if neighbour(body[0], d) not in taken]
        actions.append(min(free, key=lambda d: squared_distance(neighbour(body[0], d), bean), default=UP))
    return actions


def decide(game, name, team):
    actions = np.full((len(game.done), 6), 77, np.uint8)
    OPPONENTS[name](game.boards, team, actions)
    return actions


def positions(one, other, boards, steps, every, seed=0):
    """Plays, and yields the game every few steps."""
    game = Game(boards, seed)
    actions = np.zeros((boards, 6), np.uint8)
    for step in range(steps):
        if step % every == 0:
            yield game
        OPPONENTS[one](game.boards, 0, actions)
        OPPONENTS[other](game.boards, 1, actions)
        game.step(actions)


# six snakes, of which those that are not told of lie where they disturb nobody
FAR = [
    [cell(9, 1), cell(9, 2), cell(9, 3)],
    [cell(9, 5), cell(9, 6), cell(9, 7)],
    [cell(9, 9), cell(9, 10), cell(9, 11)],
]


def put(mine, beans, others=FAR, headings=(LEFT, LEFT, LEFT)):
    """A board with snakes 0 to 2 where told, as (row, column), head first."""
    game = Game(1)
    bodies = [[cell(*at) for at in body] for body in mine]
    place(game, 0, bodies + others[: 6 - len(mine)], [*headings, LEFT, LEFT, LEFT], [cell(*bean) for bean in beans])
    return game


def lying(row, column, length=3):
    """A snake along a row, its head on the left."""
    return [(row, column + i) for i in range(length)]


@pytest.mark.parametrize("other", ["greedy", "random", "foresighted"])
def test_greedy_is_the_plain_one_on_positions_of_real_games(other):
    compared = trapped = 0
    for game in positions("greedy", other, boards=16, steps=200, every=4):
        for team in range(2):
            actions = decide(game, "greedy", team)
            for b in range(16):
                bodies, beans = game.bodies(b), game.boards.beans[b].tolist()
                assert actions[b, 3 * team : 3 * team + 3].tolist() == plain_greedy(bodies, beans, team)
                taken = {c for body in bodies for c in body}
                trapped += any(all(neighbour(body[0], d) in taken for d in MOVES) for body in bodies)
                compared += 1
    assert compared == 1600
    assert trapped > 0  # so the rule for four excluded cells was met, too


def test_greedy_decides_as_the_recorded_original():
    decisions, game = 0, Game(1)
    for record in json.loads(gzip.decompress(DATA.read_bytes())):
        state = record["start"]
        for step in record["steps"]:
            bodies = [[cell(*at) for at in body] for body in state["bodies"]]
            place(game, 0, bodies, state["headings"], [cell(*bean) for bean in state["beans"]])
            for team in range(2):
                if record["teams"][team] == "L2":
                    asked = step["requested"][3 * team : 3 * team + 3]
                    assert decide(game, "greedy", team)[0, 3 * team : 3 * team + 3].tolist() == asked
                    decisions += 3
            state = step
    assert decisions == 4800


def test_of_beans_as_near_greedy_takes_the_first_and_a_mate_the_second():
    mine = [lying(4, 10), lying(2, 2), lying(6, 2)]
    for beans, first in (([(4, 7), (1, 10)], LEFT), ([(1, 10), (4, 7)], UP)):
        actions = decide(put(mine, beans), "greedy", 0)
        assert actions[0, 0] == first
        assert actions[0, 1] == (UP if first == LEFT else DOWN)  # to (1, 10), or to (4, 7)
    assert decide(put([lying(4, 10), lying(2, 2), lying(6, 2)], [(2, 8)]), "greedy", 0)[0, 0] == UP  # as near as LEFT


def test_greedy_measures_without_wrap_though_it_steps_across_the_border():
    game = put([lying(0, 0), lying(3, 5), lying(5, 5)], [(0, 19), (3, 1), (5, 1)])
    assert decide(game, "greedy", 0)[0, 0] == DOWN  # claims (3, 1), two columns and three rows off
    game = put([lying(0, 0), lying(3, 5), lying(5, 5)], [(0, 19)])
    assert decide(game, "greedy", 0)[0, 0] == LEFT  # one step across the border, and there


def test_greedy_goes_up_when_all_four_cells_are_taken_even_by_tails():
    snail = [(4, 10), (4, 11), (5, 11), (5, 10), (5, 9), (4, 9), (3, 9), (3, 10)]
    assert decide(put([snail, lying(1, 1), lying(7, 1)], [(4, 3)]), "greedy", 0)[0, 0] == UP


@pytest.mark.parametrize("name", OPPONENTS)
@pytest.mark.parametrize("team", [0, 1])
def test_a_player_writes_the_directions_of_its_own_team_only(name, team):
    actions = decide(Game(50), name, team)
    own = slice(3 * team, 3 * team + 3)
    assert (actions[:, own] < 4).all()
    assert (np.delete(actions, np.arange(6)[own], axis=1) == 77).all()


def test_random_moves_are_uniform_and_come_from_the_boards_streams():
    actions = np.concatenate([decide(game, "random", 0)[:, :3] for game in positions("random", "random", 100, 100, 2)])
    counts = np.bincount(actions.ravel(), minlength=4)
    assert (np.abs(counts - 3750) < 5 * np.sqrt(15000 * 3 / 16)).all()
    assert (decide(Game(40, seed=3), "random", 0)[10:] == decide(Game(30, seed=3, first=10), "random", 0)).all()


def test_wandering_is_uniform_over_the_free_directions():
    mine = [lying(4, 10), lying(0, 15), [(6, 1), (6, 2), (7, 2), (7, 1), (7, 0), (6, 0), (5, 0), (5, 1)]]
    game = put(mine, [])
    draws = np.concatenate([decide(game, "wandering", 0)[:, :3] for _ in range(3000)])
    for s, ways in enumerate([(UP, DOWN, LEFT), (UP, DOWN, LEFT), (UP,)]):
        counts = np.bincount(draws[:, s], minlength=4)
        assert set(np.flatnonzero(counts)) == set(ways)
        assert (np.abs(counts[list(ways)] - 3000 / len(ways)) < 130).all()  # five standard deviations


@pytest.mark.parametrize("name", ["wandering", "evasive", "greedy", "sharing", "foresighted"])
def test_nobody_enters_a_cell_that_stays_taken_if_another_is_free(name):
    seen = 0
    for game in positions(name, name, boards=16, steps=200, every=5):
        actions = decide(game, name, 0)
        for b in range(16):
            bodies = game.bodies(b)
            taken = {c for body in bodies for c in body}
            staying = taken - {body[-1] for body in bodies}
            for s in range(3):
                taken |= {neighbour(bodies[mate][0], actions[b, mate]) for mate in range(s)}
                free = [d for d in MOVES if neighbour(bodies[s][0], d) not in taken]
                if [d for d in free if d != game.boards.headings[b, s] ^ 1]:
                    assert neighbour(bodies[s][0], actions[b, s]) not in staying
                    seen += 1
    assert seen > 1500


def plain_evasive(bodies, beans, s):
    taken = {c for body in bodies for c in body}
    ways = [d for d in MOVES if neighbour(bodies[s][0], d) not in taken]
    lasting = [d for d in ways if any(neighbour(neighbour(bodies[s][0], d), e) not in taken for e in MOVES)]

    def nearest(d):
        return min(squared_distance(neighbour(bodies[s][0], d), bean) for bean in beans)

    return min(lasting or ways, key=nearest, default=UP)


def test_evasive_survives_two_steps_if_it_can_and_goes_to_the_nearest_bean():
    for game in positions("evasive", "foresighted", boards=16, steps=200, every=4):
        actions = decide(game, "evasive", 0)
        for b in range(16):
            bodies, beans = game.bodies(b), game.boards.beans[b].tolist()
            assert actions[b, :3].tolist() == [plain_evasive(bodies, beans, s) for s in range(3)]
    pocket = [[(4, 10), (4, 11), (5, 11)], [(3, 9), (3, 8), (4, 8), (5, 8)], [(6, 9), (6, 10), (5, 10), (5, 9)]]
    assert decide(put(pocket, [(4, 9)], headings=(LEFT, RIGHT, LEFT)), "evasive", 0)[0, 0] == UP


@pytest.mark.parametrize("name", ["sharing", "foresighted"])
def test_planners_go_around_borders_and_bodies(name):
    across = put([lying(4, 2), lying(1, 9), lying(7, 9)], [(4, 17)])
    assert decide(across, name, 0)[0, 0] == LEFT
    wall = [(7, 11), (7, 10), (7, 9), (7, 8), (6, 8), (5, 8), (4, 8), (3, 8)]  # the bean is behind it
    behind = put([lying(4, 9), lying(1, 17), lying(8, 17)], [(5, 7)], others=[[cell(*at) for at in wall], *FAR[:2]])
    assert decide(behind, "greedy", 0)[0, 0] == DOWN
    assert decide(behind, name, 0)[0, 0] == UP


@pytest.mark.parametrize("name", ["sharing", "foresighted"])
def test_the_nearest_of_the_team_claims_a_bean(name):
    game = put([lying(4, 10), lying(4, 5), lying(1, 17)], [(4, 3), (1, 10), (1, 14)])
    assert decide(game, name, 0)[0, :3].tolist() == [UP, LEFT, LEFT]


@pytest.mark.parametrize("name", ["sharing", "foresighted"])
def test_team_mates_do_not_enter_the_same_cell(name):
    game = put(
        [[(4, 9), (5, 9), (6, 9)], [(4, 11), (5, 11), (6, 11)], lying(1, 2)],
        [(4, 10), (3, 10)],
        headings=(UP, UP, LEFT),
    )
    cells = [neighbour(game.bodies(0)[s][0], decide(game, name, 0)[0, s]) for s in range(2)]
    assert cells[0] != cells[1]


def test_only_the_foresighted_keeps_out_of_a_pocket_too_small_for_it():
    # a bean in a dead end of three cells, in front of a snake of eight, and a long mate around them that stays
    pocket = [(3, 9), (3, 8), (3, 7), (3, 6), (4, 6), (5, 6), (5, 7), (5, 8), (5, 9)] + lying(6, 0, 10)[::-1]
    snake = [(4, 10), (4, 11), (4, 12), (4, 13), (4, 14), (4, 15), (4, 16), (4, 17)]
    game = put([snake, pocket, lying(0, 1)], [(4, 8)], headings=(LEFT, RIGHT, LEFT))
    assert decide(game, "sharing", 0)[0, 0] == LEFT
    assert decide(game, "foresighted", 0)[0, 0] in (UP, DOWN)


def test_only_the_foresighted_leaves_a_cell_to_an_enemy_that_can_enter_it():
    enemy = [[cell(4, 8), cell(4, 7), cell(4, 6)], *FAR[:2]]
    game = put([lying(4, 10), lying(1, 1), lying(7, 16)], [(4, 9)], others=enemy)
    assert decide(game, "sharing", 0)[0, 0] == LEFT
    assert decide(game, "foresighted", 0)[0, 0] in (UP, DOWN)


@pytest.mark.parametrize("name", ["sharing", "foresighted"])
def test_planners_do_not_ask_for_a_reversal(name):
    respawned = [
        [cell(0, 1), cell(0, 2), cell(1, 1)],
        [cell(4, 4), cell(4, 5), cell(4, 6)],
        [cell(7, 4), cell(7, 5), cell(7, 6)],
    ]
    game = Game(1)
    place(game, 0, respawned + FAR, [RIGHT, LEFT, LEFT, LEFT, LEFT, LEFT], [cell(0, 19)])  # heading into the neck
    assert decide(game, name, 0)[0, 0] == DOWN  # not LEFT, though that is the way to the bean
    game.boards.headings[0, 0] = LEFT
    assert decide(game, name, 0)[0, 0] == LEFT


def within(share, games, count, expected_games=200):
    """Four standard errors of the difference between two measured shares."""
    return abs(count / games - share) < 4 * np.sqrt(0.25 * (1 / games + 1 / expected_games))


def test_the_yardsticks_of_the_original_are_met():
    result = play_games(get("greedy"), get("random"), 600)
    assert result.win_rate > 0.96
    assert (result.score / result.games, result.other_score / result.games) == pytest.approx((20.3, 0.6), abs=1.5)
    result = play_games(get("greedy"), get("greedy"), 1200)
    assert within(0.49, 1200, result.wins)  # .43 as A, .55 as B

    result = play_games(get("random"), get("random"), 600)
    assert within(0.36, 600, result.wins)
    assert within(0.31, 600, result.draws)
    assert (result.score / result.games, result.other_score / result.games) == pytest.approx((1.0, 0.9), abs=0.4)


def test_each_difficulty_beats_the_one_below():
    for low, high in itertools.pairwise(LEVELS):
        result = play_games(get(high), get(low), 200)
        assert result.wins > result.losses + 10


def test_players_are_found_by_name_and_by_difficulty():
    assert get("greedy") is get(2) is OPPONENTS["greedy"]
    assert [get(level) for level in range(5)] == [OPPONENTS[name] for name in LEVELS]


@pytest.mark.parametrize("wrong", ["Greedy", 5, -1])
def test_an_unknown_player_is_an_error_that_lists_those_there_are(wrong):
    with pytest.raises(ValueError, match=rf"{wrong!r}.*random, wandering, .*foresighted.* 0 to 4"):
        get(wrong)
