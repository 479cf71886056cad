"""Loads of experts: exact, no expert twice in a row, balanced as they say."""

import numpy as np
import pytest

from flashstep.parallel.balance import (
    balancedness,
    balancedness_by_window,
    chosen_experts,
    scaled,
    touched,
    uniform,
)

SHAPES = [(16, 2), (8, 2), (384, 6), (128, 3)]


def check(counts_LE: np.ndarray, *, rows: int, chosen: int) -> None:
    """Counts that rows can have, and rows that have them."""
    assert (counts_LE.sum(1) == rows * chosen).all() and counts_LE.max() <= rows and counts_LE.min() >= 0
    for counts_E in counts_LE:
        experts_RK = chosen_experts(counts_E, rows=rows)
        assert experts_RK.shape == (rows, chosen)
        assert (np.diff(experts_RK, axis=1) > 0).all(), "ascending, so distinct"
        assert (np.bincount(experts_RK.flatten(), minlength=len(counts_E)) == counts_E).all()


@pytest.mark.parametrize(("experts", "chosen"), SHAPES)
@pytest.mark.parametrize("rows", [1, 2, 6, 48, 300])
def test_uniform_loads_touch_what_routing_at_random_touches(experts: int, chosen: int, rows: int) -> None:
    counts_LE = uniform(rows=rows, layers=5, experts=experts, chosen=chosen, seed=(1, rows))
    check(counts_LE, rows=rows, chosen=chosen)
    active_L = (counts_LE > 0).sum(1)
    assert np.ptp(counts_LE[counts_LE > 0]) <= 1 and (active_L == active_L[0]).all()
    chance = np.random.default_rng(0)
    drawn = [len(np.unique([chance.permutation(experts)[:chosen] for _ in range(rows)])) for _ in range(40)]
    assert abs(active_L[0] - np.mean(drawn)) < 1 + 4 * np.std(drawn) / np.sqrt(len(drawn))
    assert touched(rows=rows, experts=experts, chosen=chosen) == pytest.approx(active_L[0], abs=1)


def test_uniform_loads_move_from_step_to_step_and_layer_to_layer() -> None:
    one = uniform(rows=6, layers=4, experts=384, chosen=6, seed=(0, 1))
    again, other = (uniform(rows=6, layers=4, experts=384, chosen=6, seed=(0, step)) for step in (1, 2))
    assert (one == again).all() and (one != other).any()
    assert len({row.tobytes() for row in one}) > 1


def test_uniform_loads_are_balanced() -> None:
    counts_LE = uniform(rows=256, layers=40, experts=384, chosen=6, seed=(0,))
    found = balancedness(counts_LE, parts=8)
    assert found is not None and found > 0.98
    for rows, least in ((6, 0.75), (48, 0.95), (8192, 0.999)):
        few_LE = uniform(rows=rows, layers=40, experts=384, chosen=6, seed=(0,))
        found = balancedness(few_LE, parts=8)
        assert found is not None and found > least, (rows, found)


@pytest.mark.parametrize(("experts", "chosen"), SHAPES)
@pytest.mark.parametrize("rows", [1, 3, 7, 64, 1000])
def test_recorded_loads_are_scaled_to_any_rows(experts: int, chosen: int, rows: int) -> None:
    chance = np.random.default_rng(experts)
    weights = chance.gamma(0.3, size=experts) + 1e-9
    weights /= weights.sum()
    picks = [chance.choice(experts, size=chosen, replace=False, p=weights) for _ in range(64)]
    counts_LE = np.bincount(np.concatenate(picks), minlength=experts)[None]
    found = scaled(counts_LE, rows=rows, chosen=chosen)
    check(found, rows=rows, chosen=chosen)
    assert (np.abs(found - counts_LE * rows / 64) < 1).all(), "no expert is off by a whole pair"
    assert (scaled(counts_LE, rows=64, chosen=chosen) == counts_LE).all()


def test_a_layer_without_rows_gets_equal_loads() -> None:
    counts_LE = np.zeros((2, 8), dtype=np.int64)
    counts_LE[0, 3] = counts_LE[0, 5] = 4
    found = scaled(counts_LE, rows=8, chosen=2)
    assert found[0].tolist() == [0, 0, 0, 8, 0, 8, 0, 0] and found[1].tolist() == [2] * 8


def test_balancedness_is_mean_over_largest() -> None:
    counts_LE = np.array([[4, 0, 0, 0], [1, 1, 1, 1]])
    assert balancedness(counts_LE, parts=2) == pytest.approx((2 + 2) / (4 + 2))
    assert balancedness(counts_LE, parts=4) == pytest.approx((1 + 1) / (4 + 1))
    assert balancedness(counts_LE, parts=1) == 1 and balancedness(0 * counts_LE, parts=2) is None
    with pytest.raises(ValueError, match="3 parts cannot share 4 experts"):
        balancedness(counts_LE, parts=3)


def test_a_window_adds_its_steps_up_first() -> None:
    """Loads that take turns are unbalanced in each step and balanced over two."""
    left, right = np.array([[6, 0]]), np.array([[0, 6]])
    steps = [left, right, left]
    assert balancedness_by_window(steps, parts=2, window=1) == [0.5, 0.5, 0.5]
    assert balancedness_by_window(steps, parts=2, window=2) == [1, 0.5]
