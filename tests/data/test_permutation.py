"""A shuffle looks random: counted against what all orders being equally likely would give, for keys fixed here."""

import math
import time
import tracemalloc

import numpy as np
import pytest

from ddpkit.data.samplers import bijection, shuffled

BIJECTION = 2**18  # above 2**17 an order is computed in blocks


def whole(n, key):
    return shuffled(n, key)(np.arange(n))


def small_bijection(n, key):
    return bijection(n, np.random.PCG64(key))(np.arange(n))


def chi_square(counts, expected=None):
    """How many standard deviations the chi-square statistic lies above its mean."""
    counts = np.asarray(counts, dtype=float).ravel()
    expected = counts.mean() if expected is None else np.asarray(expected, dtype=float).ravel()
    freedom = len(counts) - 1
    return (((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize("n", [1, 2, 3, 5, 1000, 2**17, 2**17 + 1, BIJECTION - 1, BIJECTION, BIJECTION + 1, 300_007])
def test_every_number_comes_exactly_once(n):
    assert np.array_equal(np.sort(whole(n, key=1)), np.arange(n))


@pytest.mark.parametrize("n", [2, 3, 5, 11, 31, 59, 785, 904])
def test_the_bijection_is_one_even_where_rows_times_columns_fits_badly(n):
    for key in range(150):
        assert np.array_equal(np.sort(small_bijection(n, key)), np.arange(n))


def test_all_120_orders_of_five_are_equally_likely():
    orders, counts = np.unique([whole(5, key) for key in range(24_000)], axis=0, return_counts=True)
    assert len(orders) == 120
    assert abs(chi_square(counts)) < 4


@pytest.mark.parametrize("n", [1023, 1024, 1025])
@pytest.mark.parametrize("make", [whole, small_bijection])
def test_positions_and_neighbours_are_uniform(make, n):
    orders = np.array([make(n, key) for key in range(800)])
    bins = np.arange(n) * 16 // n
    table = np.zeros((16, 16))
    np.add.at(table, (np.broadcast_to(bins, orders.shape), bins[orders]), 1)
    share = np.bincount(bins) / n
    assert chi_square(table, np.outer(share, share) * orders.size) < 4  # position against number
    assert abs(chi_square(np.bincount(bins[orders[:, 0]]), share * 800)) < 4  # the first number
    for lag in (1, 2, math.isqrt(n - 1) + 1):
        steps = (orders[:, lag:] - orders[:, :-lag]) % n - 1  # uniform on [0, n - 1)
        groups = steps * 16 // (n - 1)
        expected = np.bincount(np.arange(n - 1) * 16 // (n - 1)) / (n - 1) * steps.size
        assert abs(chi_square(np.bincount(groups.ravel(), minlength=16), expected)) < 4


@pytest.mark.parametrize("n", [1023, 1024, 1025])
@pytest.mark.parametrize("make", [whole, small_bijection])
def test_no_structure_is_left(make, n):
    """Counts that are Poisson with a known mean: a bijection of too few rounds leaves several times as many."""
    orders = np.array([make(n, key) for key in range(1500)])
    root = math.isqrt(n - 1) + 1
    step, stride = np.diff(orders, axis=1), orders[:, root:] - orders[:, :-root]
    counted = {
        "fixed points": ((orders == np.arange(n)).sum(), 1.0),
        "neighbours that stay neighbours": ((np.abs(step) == 1).sum(), 2 * (n - 1) / n),
        "columns that stay columns": ((np.abs(stride) == root).sum(), 2 * (n - root) ** 2 / (n * (n - 1))),
        "columns that become neighbours": ((np.abs(stride) == 1).sum(), 2 * (n - root) / n),
        "neighbours that become columns": ((np.abs(step) == root).sum(), 2 * (n - root) / n),
    }
    for what, (count, mean) in counted.items():
        assert abs(count - 1500 * mean) < 4 * math.sqrt(1500 * mean), what


@pytest.mark.parametrize("n", [BIJECTION - 1, BIJECTION, BIJECTION + 1])
def test_a_large_order_is_spread_evenly(n):
    order = whole(n, key=7)
    bins = np.arange(n) * 64 // n
    table = np.zeros((64, 64))
    np.add.at(table, (bins, bins[order]), 1)
    share = np.bincount(bins) / n
    assert abs(chi_square(table, np.outer(share, share) * n)) < 4
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) * math.sqrt(n) < 4
    for bit in range(8):  # no bit of the number follows a bit of the position
        for other in range(8):
            agree = ((order >> bit & 1) == (np.arange(n) >> other & 1)).mean()
            assert abs(agree - 0.5) * 2 * math.sqrt(n) < 4.5


def test_a_position_needs_no_other_one():
    order, n = shuffled(10**6, key=3), 10**6
    everything = order(np.arange(n))
    at = np.array([999_999, 0, 31, 500_000])
    assert np.array_equal(order(at), everything[at])


def test_a_billion_numbers_start_in_milliseconds_and_megabytes():
    shuffled(10**6, key=0)(np.arange(4))
    tracemalloc.start()
    start = time.thread_time()
    numbers = shuffled(10**9, key=0)(np.arange(2**13))
    seconds, (_, peak) = time.thread_time() - start, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(set(numbers.tolist())) == 2**13 and numbers.min() >= 0 and numbers.max() < 10**9
    assert seconds < 0.2  # 2 ms on an idle core
    assert peak < 4e6


def test_orders_never_change_so_that_old_runs_resume():
    assert whole(8, key=0).tolist() == [2, 4, 3, 6, 5, 0, 1, 7]
    assert shuffled(10**6, key=0)(np.arange(6)).tolist() == [93333, 576741, 592374, 941700, 494002, 957880]
    assert shuffled(10**9, key=2**63 - 1)(np.array([10**9 - 1, 0])).tolist() == [779752605, 131780117]
