"""Play snakes 3 against 3 on the competition platform, which calls `my_controller()` for each snake and step.

It needs NumPy and no other file: `export.py` puts the weights of trained networks behind it. A snake sees the 42
numbers of `features.py`, and a distilled network the picture of `student.py`, too; the search is that of `search.py`,
all without Numba. A cell is a number from 0 to 199, row by row, and a set of cells an integer with a bit for each.
"""

# ruff: noqa: B905  (the platform's Python may be too old for zip(strict=…) and pairwise())

import base64
import time
import traceback

import numpy as np

ROWS = 10
COLUMNS = 20
SNAKES = 6
START_LENGTH = 3
PER_WAY = 13  # numbers that a snake sees of each way
CELLS = ROWS * COLUMNS
UP, DOWN, LEFT, RIGHT = range(4)
# TURNS[heading]: the directions to the left, straight on and to the right
TURNS = ((LEFT, UP, RIGHT), (RIGHT, DOWN, LEFT), (DOWN, LEFT, UP), (UP, RIGHT, DOWN))
DEPTH = 10  # steps that a flood looks ahead
ALL = (1 << CELLS) - 1
FIRST = sum(1 << cell for cell in range(0, CELLS, COLUMNS))  # the first column
LAST = FIRST << (COLUMNS - 1)

ACTOR = []  # (weights, biases) of each layer, float32
RIVALS = []  # the same of the network that foresees the ways of rivals
CRITIC = []  # the same; or instead, of a distilled model, of the networks that value boards:
OWN = []
OTHERS = []
BOTH = []
BOARD = []  # the same of a distilled network's convolutions, if it plays without search
HEAD = []  # the same of its other layers
PLANES = 10  # of the picture that it sees
SIDE = 15  # cells of the picture, each way
FAR = 20  # steps that count as never
STEPS = 0  # that the search looks ahead; 0: play as the actor prefers
SECONDS = 0.5  # that a team's moves in a step may take; then the search answers with what it has found
GAMMA = 0.97  # this and the next as in search.py
LAMBDA = 0.65
NEAR = 6
LIKELY = 0.01
TRAP = 0.6
MARGIN = 0.05
LIMIT = 12
PLACES = 300
failures = {}  # the first error of each function that failed, which export.py looks at
_seen = {"bodies": None, "before": None}  # of all snakes, when last asked for and a step before
_plans = {}  # the directions of all snakes, by the team for which they were found in this step


def my_controller(observation, action_space=None, is_act_continuous=False):
    """Name the snake's next direction as [[up, down, left, right]], one of them 1. It never raises."""
    direction = UP
    for play in (choose, flee):
        try:
            direction = play(*read(observation))
            break
        except Exception as error:  # a match goes on, with the next best player
            if play.__name__ not in failures:
                failures[play.__name__] = error
                traceback.print_exc()  # the platform's records of matches go through the root logger
    return [[int(direction == other) for other in range(4)]]


def read(observation):
    """Convert an observation into beans, the six bodies, the snake asked for, and if a step has been played."""
    # some of the platform's integers are NumPy's, whose shifts have an end: 1 << numpy.int64(64) is 0
    beans, *bodies = (
        [COLUMNS * int(row) + int(column) for row, column in observation[key]] for key in range(1, 2 + SNAKES)
    )
    last = observation["last_direction"]  # there is none after a reset
    return beans, bodies, int(observation["controlled_snake_index"]) - 2, last is not None and any(last)


def choose(beans, bodies, snake, started):
    """Find the direction that the network prefers, or that of the search."""
    if not started or bodies != _seen["bodies"]:  # the first call of a step
        _seen["before"] = _seen["bodies"] if started else None
        _seen["bodies"] = bodies
        _plans.clear()
    before = _seen["before"] or [None] * SNAKES
    headings = [find_heading(body, old) for body, old in zip(bodies, before)]
    team = snake // 3
    if team not in _plans:
        find = prefer if BOARD else search
        _plans[team] = find(bodies, headings, beans, team)
    return TURNS[headings[snake]][_plans[team][snake]]


def flee(beans, bodies, snake, started):
    """Find a direction to a cell without a segment, for want of something better."""
    taken = {cell for body in bodies for cell in body}
    free = [cell not in taken for cell in neighbours(bodies[snake][0])]
    return free.index(True) if any(free) else UP


def search(bodies, headings, beans, team):
    """Find the way of each snake as `search.py` does: the actor's, or another after which its team stands better.

    Each snake looks ahead one step after the other, for a third of the time and what the snakes before have left.
    """
    begin = time.monotonic()
    seen = [look(bodies, beans, s, headings[s]) for s in range(SNAKES)]
    chances = [softmax(preferences) for preferences in rate(seen, team)]
    ways = [int(likely.argmax()) for likely in chances]
    for k in range(3):
        s = 3 * team + k
        deadline = begin + SECONDS * (k + 1) / 3
        preferred = ways[s]
        tried = [way for way in range(3) if seen[s][PER_WAY * way] or way == preferred]
        others = [[*ways[:s], way, *ways[s + 1 :]] for way in tried]
        for values in zip(*[value(bodies, headings, beans, s, other, chances, deadline) for other in others]):
            values = [found + MARGIN * (way == preferred) for way, found in zip(tried, values)]
            ways[s] = tried[values.index(max(values))]
    return ways


def rate(seen, team):
    """Rate the ways of what all snakes see, by the actor for a team, and for its rivals."""
    return [think(ACTOR if s // 3 == team else RIVALS or ACTOR, features) for s, features in enumerate(seen)]


def softmax(preferences):
    chances = np.exp(preferences - preferences.max())
    return chances / chances.sum()


def value(bodies, headings, beans, s, ways, chances, deadline):
    """Value a board for a snake's team if all go their ways, or a rival near it another one: yields as `play_on()`."""
    team = s // 3
    doubts = []
    futures = [play_on(bodies, headings, beans, team, ways, deadline)]
    for rival in range(3 - 3 * team, 6 - 3 * team):
        if distance(bodies[s][0], bodies[rival][0]) > NEAR:
            continue
        for way, chance in enumerate(chances[rival]):
            if way == ways[rival] or chance <= LIKELY:
                continue
            other = [*ways[:rival], way, *ways[rival + 1 :]]
            doubts.append(chance)
            futures.append(play_on(bodies, headings, beans, team, other, deadline))
    for surely, *found in zip(*futures):
        yield sum((doubt * (other - surely) for doubt, other in zip(doubts, found)), surely)


def distance(cell, other):
    """Count the steps between two cells around the borders, whatever is in the way."""
    (row, column), (other_row, other_column) = divmod(cell, COLUMNS), divmod(other, COLUMNS)
    rows, columns = abs(row - other_row), abs(column - other_column)
    return min(rows, ROWS - rows) + min(columns, COLUMNS - columns)


def play_on(bodies, headings, beans, team, ways, deadline):
    """Value a board for a team if all snakes go these ways, and then those they prefer.

    Yields the value by one step, by two, and so on, up to STEPS or the deadline.
    """
    own = range(3 * team, 3 * team + 3)
    total = 0
    weight = 1
    for step in range(STEPS):
        if time.monotonic() > deadline:
            return
        directions = [TURNS[heading][way] for heading, way in zip(headings, ways)]
        bodies, headings, beans, gains = foresee(bodies, beans, directions)
        if step == 0:
            total -= TRAP * sum((len(bodies[s]) - START_LENGTH) * (1 - escape(bodies, s) / LIMIT) for s in own)
        lead = sum(gain if s in own else -gain for s, gain in enumerate(gains))
        seen = [look(bodies, beans, s, headings[s]) for s in range(SNAKES)]
        expected = expect(seen, team)
        yield total + weight * (lead + GAMMA * expected)
        total += weight * (lead + GAMMA * (1 - LAMBDA) * expected)
        weight *= GAMMA * LAMBDA
        ways = [int(preferences.argmax()) for preferences in rate(seen, team)]


def escape(bodies, snake):
    """Find how many steps a snake can go on where no other one can reach in its next step, at most LIMIT."""
    leaves = {}  # the step in which a cell is free again
    for s, body in enumerate(bodies):
        for i, cell in enumerate(body):
            leaves[cell] = max(leaves.get(cell, 0), len(body) - i)
        if s == snake:
            continue
        for cell in neighbours(body[0]):
            leaves[cell] = max(leaves.get(cell, 0), LIMIT)
    length = len(bodies[snake])
    longest = places = 0

    def go_on(cell, time):
        """Try all ways from a cell; return if one is long enough."""
        nonlocal longest, places
        for ahead in neighbours(cell):
            left = leaves.get(ahead, 0)
            if left > time + 1:
                continue
            places += 1
            longest = max(longest, time + 1)
            if longest == LIMIT or places == PLACES:
                return True
            leaves[ahead] = time + 1 + length
            if go_on(ahead, time + 1):
                return True
            leaves[ahead] = left
        return False

    return LIMIT if go_on(bodies[snake][0], 0) else longest


def expect(seen, team):
    """Find what a team may expect: by a distilled model's networks, or the critic if it goes as the actor prefers."""
    own, others = seen[3 * team : 3 * team + 3], seen[3 - 3 * team : 6 - 3 * team]
    if CRITIC:
        return sum(float(softmax(think(ACTOR, features)) @ think(CRITIC, features)) for features in own) / 3
    sides = [
        np.mean([np.maximum(think(layers, features), 0) for features in side], 0)
        for layers, side in ((OWN, own), (OTHERS, others))
    ]
    return float(think(BOTH, np.concatenate(sides))[0])


def foresee(bodies, beans, directions):
    """Play a step but for the new beans; return bodies, headings, beans and the snakes' gains."""
    beans = list(beans)
    moved = []
    gains = []
    for body, direction in zip(bodies, directions):
        head = neighbours(body[0])[direction]
        eats = head in beans
        if eats:
            beans.remove(head)
        gains.append(int(eats))
        moved.append([head] + (body if eats else body[:-1]))
    cells = [cell for body in moved for cell in body]
    dead = [s for s, body in enumerate(moved) if cells.count(body[0]) > 1]
    taken = {cell for s, body in enumerate(moved) if s not in dead for cell in body} | set(beans)
    headings = list(directions)
    for s in dead:
        gains[s] += START_LENGTH - len(moved[s])
        moved[s] = put_back(taken)
        headings[s] = find_heading_by_coordinates(*moved[s][:2])
        taken.update(moved[s])
    return moved, headings, beans, gains


def put_back(taken):
    """Find three free cells for a snake that died, as the game does."""
    for start in range(CELLS):
        if start in taken:
            continue
        found = [start]
        for cell in found:
            above, below, left, right = neighbours(cell)
            found += [near for near in (right, below, above, left) if near not in taken and near not in found]
            if len(found) >= START_LENGTH:
                head, neck, tail = found[:START_LENGTH]
                if neck // COLUMNS != tail // COLUMNS and neck % COLUMNS != tail % COLUMNS:  # the corner of an L
                    return [neck, head, tail]
                return [head, neck, tail]
    raise ValueError("there is no place for a snake")


def find_heading(body, before):
    """Find the direction in which a snake goes, which the platform does not tell.

    A snake that has moved goes from its neck to its head, one that was put back by their raw coordinates: across the
    border into its neck. Its body a step ago, `before`, None if unknown, tells the two apart, but for a snake that is
    put back just as if it had moved across the border: of random moves, which die a lot, one in 100,000.
    """
    head, neck = body[:2]
    if before is None or len(body) > START_LENGTH or body[1:] == before[:-1]:
        return neighbours(neck).index(head)
    return find_heading_by_coordinates(head, neck)


def find_heading_by_coordinates(head, neck):
    """Find the heading of a snake that was put back."""
    if head // COLUMNS == neck // COLUMNS:
        return RIGHT if head > neck else LEFT
    return DOWN if head > neck else UP


def neighbours(cell):
    """List the cells above, below, to the left and to the right, around the border."""
    row, column = divmod(cell, COLUMNS)
    above, below = (row - 1) % ROWS, (row + 1) % ROWS
    left, right = (column - 1) % COLUMNS, (column + 1) % COLUMNS
    return COLUMNS * above + column, COLUMNS * below + column, COLUMNS * row + left, COLUMNS * row + right


def as_set(cells):
    return sum(1 << cell for cell in set(cells))


def size_of(cells):
    return bin(cells).count("1")


def spread(cells, open_cells):
    """Grow a set of cells by one step, over open cells."""
    right = (cells << 1 & ~FIRST) | (cells >> COLUMNS - 1 & FIRST)
    left = (cells >> 1 & ~LAST) | (cells << COLUMNS - 1 & LAST)
    above_and_below = cells << COLUMNS | cells >> COLUMNS | cells >> CELLS - COLUMNS | cells << CELLS - COLUMNS
    return cells | ((right | left | above_and_below) & open_cells)


def flood(start, open_cells):
    """List the sets of cells reached from a cell after each step, of which the open cells are given for each."""
    reached = [as_set([start]) & open_cells[0]]
    for cells in open_cells[1:]:
        reached.append(spread(reached[-1], cells))
    return reached


def look(bodies, beans, snake, heading):
    """Compute what the snake sees: a list of 42 numbers, which `features.py` explains."""
    free = ALL
    others = as_set(body[0] for body in bodies if body is not bodies[snake])
    goals = as_set(beans)
    for body in bodies:
        may_eat = any(cell in beans for cell in neighbours(body[0]))
        free &= ~as_set(body if may_eat else body[:-1])
    calm = []  # after each step, the free cells that no other snake can have reached
    for _ in range(DEPTH):
        others = spread(others, free)
        calm.append(free & ~others)

    seen = []
    for cell in [neighbours(bodies[snake][0])[direction] for direction in TURNS[heading]]:
        wide = flood(cell, [free] * DEPTH)
        safe = flood(cell, calm)
        near = [other for other in range(SNAKES) if other != snake and cell in neighbours(bodies[other][0])]
        rivals = [len(bodies[other]) - START_LENGTH for other in near if other // 3 != snake // 3]
        seen += [free >> cell & 1, cell in beans, len(rivals), len(near) - len(rivals), max(rivals, default=0) / 10]
        for reached in (wide, safe):
            misses = sum(not cells & goals for cells in reached)
            seen += [1 / (1 + misses) if misses < DEPTH else 0, misses / DEPTH]
        seen += [size_of(wide[-1]) / 100, size_of(safe[-1]) / 100, size_of(safe[DEPTH // 2 - 1]) / 40]
        seen += [min(1, size_of(wide[-1]) / len(bodies[snake]))]
    lengths = [len(body) for body in bodies]
    ours = sum(lengths[:3] if snake < 3 else lengths[3:])
    theirs = sum(lengths) - ours
    return seen + [(lengths[snake] - START_LENGTH) / 10, (ours - theirs) / 20, theirs / 20]


def think(layers, seen):
    """Compute how good a network finds each way: linear layers with ReLU between."""
    values = np.array(seen, np.float32)
    for weights, biases in layers[:-1]:
        values = np.maximum(weights @ values + biases, 0)
    weights, biases = layers[-1]
    return weights @ values + biases


def prefer(bodies, headings, beans, team):
    """Find the ways that a distilled network likes best, for a team's snakes, which choose in turn."""
    ways = [1] * SNAKES
    going = []
    for s in range(3 * team, 3 * team + 3):
        image = draw(bodies, beans, s, headings[s], going)
        for (weights, biases), stride in zip(BOARD, (1, 2, 1)):
            image = convolve(image, weights, biases, stride)
        numbers = np.array(look(bodies, beans, s, headings[s]), np.float32)
        ways[s] = int(think(HEAD, np.concatenate([image.ravel(), numbers])).argmax())
        going.append(neighbours(bodies[s][0])[TURNS[headings[s]][ways[s]]])
    return ways


def draw(bodies, beans, snake, heading, going):
    """Draw what the snake sees of the board, its heading up; mates go to the cells `going`."""
    leaves = [0] * CELLS  # the step in which each cell is free again
    planes = np.zeros((PLANES, CELLS), np.float32)
    planes[0, beans] = 1
    planes[9, going] = 1
    heads = [], [], []  # its own, its mates', its rivals'
    for s, body in enumerate(bodies):
        kind = 0 if s == snake else 1 if s // 3 == snake // 3 else 2
        heads[kind].append(body[0])
        for i, cell in enumerate(body):
            leaves[cell] = len(body) - i
            planes[1 + kind, cell] = min(1, leaves[cell] / FAR)
        if kind:
            planes[6 + kind, body[0]] = (len(body) - 1) / 10
    for kind in range(3):
        planes[4 + kind] = 1 - np.array(reach(heads[kind], leaves)) / FAR
    half = SIDE // 2
    ahead, right = np.mgrid[half : -half - 1 : -1, -half : half + 1]
    down, right = ((-ahead, right), (ahead, -right), (-right, -ahead), (right, ahead))[heading]
    row, column = divmod(bodies[snake][0], COLUMNS)
    return planes[:, (row + down) % ROWS * COLUMNS + (column + right) % COLUMNS]


def reach(heads, leaves):
    """Find the step in which each cell can be reached from any of some heads, FAR if not before."""
    steps = [FAR] * CELLS
    for head in heads:
        steps[head] = 0
    known = list(heads)
    for cell in known:
        step = steps[cell] + 1
        for near in neighbours(cell):
            if steps[near] == FAR > step >= leaves[near]:
                steps[near] = step
                known.append(near)
    return steps


def convolve(image, weights, biases, stride):
    """Convolve an image, (channels, rows, columns), by squares of 3 x 3, with ReLU."""
    size = (image.shape[1] - 3) // stride + 1
    ends = [slice(first, first + stride * size, stride) for first in range(3)]
    patches = np.stack([image[:, rows, columns] for rows in ends for columns in ends], 1).reshape(-1, size * size)
    found = weights.reshape(len(weights), -1) @ patches + biases[:, None]
    return np.maximum(found, 0).reshape(-1, size, size)


def unpack(shapes, text):
    """Read layers with weights of these shapes, and their biases, in turn as base64 of little-endian float32."""
    numbers = np.frombuffer(base64.b64decode(text), "<f4")
    layers = []
    for shape in shapes:
        size = int(np.prod(shape))
        weights, biases, numbers = np.split(numbers, [size, size + shape[0]])
        layers.append((weights.reshape(shape), biases))
    return layers
