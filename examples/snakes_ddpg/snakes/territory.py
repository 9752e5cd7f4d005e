"""Play by territory: a cell belongs to the snake that can be there first, and of snakes as early to the shortest.

The idea is that of a public heuristic which once led the platform's board (CarlossShi/Competition_3v3snakes); this is
our own program of it. All six snakes spread from their heads at once, over cells that bodies leave in time.

- A bean goes to a snake that owns its cell; each of the team that has one goes there through its own cells.
- A very long snake that can follow its own tail does so, and risks nothing.
- Those that are left go where the team as a whole owns most cells.
"""

import numpy as np
from numba import njit

from .game import BEANS, CELLS, NEXT, NONE, OPPOSITE, SNAKES, Boards, segment

LONG = 22  # longer than that it follows its tail: two thirds of the board, over six snakes
ANY = 4  # in place of a direction: any of them
FAR = 1_000_000  # more than any cost
# By a set of snakes, a bit for each: how many it has, and the part of them that is of team A and of team B
_members = np.arange(1 << SNAKES)[:, None] >> np.arange(SNAKES) & 1
SIZE = _members.sum(1)
PARTS = _members.reshape(-1, 2, 3).sum(2) / np.maximum(SIZE, 1)[:, None]


@njit(cache=True, nogil=True)
def territory(boards: Boards, team: int, actions: np.ndarray) -> None:
    """Go to the beans that the team's snakes can reach first; else to where they own most cells."""
    free_at, holder, steps, owners, queue = np.empty((5, CELLS), np.int64)
    beans, other_beans, firsts, ahead = np.empty((4, SNAKES), np.int64)
    for b in range(len(actions)):
        _fill_bodies(boards, b, free_at, holder)
        firsts[:] = ANY
        ahead[:] = -1  # the cells that those lead to, which team-mates stay off
        _spread(boards, b, firsts, free_at, holder, steps, owners, queue)
        if _claim(boards, b, steps, owners, other_beans, False) > _claim(boards, b, steps, owners, beans, True):
            beans[:] = other_beans
        for s in range(3 * team, 3 * team + 3):
            goal = _tail_to_follow(boards, b, s, steps, owners)
            if goal < 0:
                goal = beans[s]
            if goal >= 0:
                firsts[s] = _first_step(boards, b, s, goal, steps, owners, queue, ahead)
            if firsts[s] != ANY:
                ahead[s] = NEXT[segment(boards, b, s, 0), firsts[s]]
        _settle(boards, b, team, firsts, free_at, holder, steps, owners, queue)
        actions[b, 3 * team : 3 * team + 3] = firsts[3 * team : 3 * team + 3]


@njit(cache=True)
def _fill_bodies(boards, b, free_at, holder):
    """Fill the step in which the snake on each cell can enter it again, and that snake; 0 and -1 if it is free."""
    free_at[:] = 0
    holder[:] = -1
    for s in range(SNAKES):
        length = np.int64(boards.lengths[b, s])
        for i in range(length):
            cell = segment(boards, b, s, i)
            free_at[cell] = length - i
            holder[cell] = s


@njit(cache=True)
def _spread(boards, b, firsts, free_at, holder, steps, owners, queue):
    """Share out the board: fill the step in which each cell is reached, NONE if never, and its owners, a bit for each.

    `firsts` are the snakes' directions in the first step, where they are known. Owners of a cell are of one length.
    Return how many cells of the queue are reached, heads included.
    """
    lengths = np.empty(1 << SNAKES, np.int64)  # by a set of snakes of one length
    steps[:] = NONE
    owners[:] = 0
    for s in range(SNAKES):
        queue[s] = segment(boards, b, s, 0)
        steps[queue[s]] = 0
        owners[queue[s]] = 1 << s
        lengths[1 << s : 2 << s] = boards.lengths[b, s]
    known = SNAKES
    looked_at = 0
    while looked_at < known:
        at = queue[looked_at]
        step = steps[at] + 1
        for direction in range(4):
            if looked_at < SNAKES:
                if direction == OPPOSITE[boards.headings[b, looked_at]]:
                    continue
                if firsts[looked_at] != ANY and firsts[looked_at] != direction:
                    continue
            cell = np.int64(NEXT[at, direction])
            if steps[cell] < step or step < free_at[cell]:
                continue
            mask = owners[at]
            if step == free_at[cell]:  # others stay off a tail for one step more: its snake may eat
                mask &= 1 << holder[cell]
            if mask == 0:
                continue
            if steps[cell] == NONE:
                steps[cell] = step
                owners[cell] = mask
                queue[known] = cell
                known += 1
            elif lengths[mask] < lengths[owners[cell]]:
                owners[cell] = mask
            elif lengths[mask] == lengths[owners[cell]]:
                owners[cell] |= mask
        looked_at += 1
    return known


@njit(cache=True)
def _claim(boards, b, steps, owners, goals, nearest_first):
    """Give beans to snakes that own their cells, one to each: fill `goals`, -1 for none; return how many.

    Of all pairs it takes the nearest first, or that which leaves the others most choice.
    """
    owns = np.zeros((BEANS, SNAKES), np.int64)
    for i, cell in enumerate(boards.beans[b]):
        for s in range(SNAKES):
            owns[i, s] = cell != NONE and owners[cell] >> s & 1
    costs = np.full((BEANS, SNAKES), FAR)
    for i, s in np.ndindex(BEANS, SNAKES):
        if owns[i, s]:
            step = steps[boards.beans[b, i]]
            choices = owns[i].sum() + owns[:, s].sum()
            costs[i, s] = 1000 * step + choices if nearest_first else 1000 * choices + step
    goals[:] = -1
    count = 0
    while costs.min() < FAR:
        bean, snake = divmod(costs.argmin(), SNAKES)
        goals[snake] = boards.beans[b, bean]
        costs[bean] = FAR
        costs[:, snake] = FAR
        count += 1
    return count


@njit(cache=True)
def _tail_to_follow(boards, b, s, steps, owners):
    """Find a cell that a long snake reaches just when its tail has left it, or -1."""
    length = np.int64(boards.lengths[b, s])
    if length <= LONG:
        return -1
    for behind in range(1, length // 2):
        cell = segment(boards, b, s, length - behind)
        if steps[cell] == behind and owners[cell] == 1 << s:
            return np.int64(cell)
    return -1


@njit(cache=True)
def _first_step(boards, b, s, goal, steps, owners, queue, ahead):
    """Find a first direction of a way to a cell through a snake's own cells, better one that it shares with nobody."""
    queue[0] = goal
    known = 1
    looked_at = 0
    best = ANY
    shared = SNAKES + 1
    head = segment(boards, b, s, 0)
    while looked_at < known:
        at = queue[looked_at]
        looked_at += 1
        if steps[at] > 1:
            for direction in range(4):
                cell = NEXT[at, direction]
                if steps[cell] == steps[at] - 1 and owners[cell] >> s & 1 and not np.any(queue[:known] == cell):
                    queue[known] = cell
                    known += 1
            continue
        for direction in range(4):
            leads_there = NEXT[head, direction] == at and direction != OPPOSITE[boards.headings[b, s]]
            if leads_there and not np.any(ahead == at) and SIZE[owners[at]] < shared:
                best = direction
                shared = SIZE[owners[at]]
    return best


@njit(cache=True)
def _settle(boards, b, team, firsts, free_at, holder, steps, owners, queue):
    """Choose the directions that are still open, so that the team owns most."""
    own = firsts[3 * team : 3 * team + 3]
    choices = np.empty((3, 4), np.int64)
    counts = np.ones(3, np.int64)
    for k in range(3):
        choices[k, 0] = own[k]
        if own[k] == ANY:
            counts[k] = _open_directions(boards, b, 3 * team + k, free_at, holder, choices[k])
    best = choices[:, 0].copy()
    if counts.max() > 1:
        most = -1.0
        for chosen in np.ndindex(counts[0], counts[1], counts[2]):
            for k in range(3):
                own[k] = choices[k, chosen[k]]
            known = _spread(boards, b, firsts, free_at, holder, steps, owners, queue)
            size = _size(team, owners, queue, known)
            if size > most:
                most = size
                best[:] = own
    own[:] = best


@njit(cache=True)
def _open_directions(boards, b, s, free_at, holder, directions):
    """List where a snake can go; if it cannot, where the cell frees first. Return their number."""
    count = 0
    soonest = FAR
    for direction in range(4):
        if direction == OPPOSITE[boards.headings[b, s]]:
            continue
        cell = NEXT[segment(boards, b, s, 0), direction]
        if free_at[cell] < 1 or (free_at[cell] == 1 and holder[cell] == s):
            directions[count] = direction
            count += 1
        elif count == 0 and free_at[cell] < soonest:
            directions[0] = direction
            soonest = free_at[cell]
    return max(1, count)


@njit(cache=True)
def _size(team, owners, queue, known):
    """Add up the cells that a team owns; of a shared one its part."""
    size = 0.0
    for i in range(known):
        size += PARTS[owners[queue[i]], team]
    return size
