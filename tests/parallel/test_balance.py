"""Loads of experts: exact, no expert twice in a row, balanced as they say."""

import numpy as np
import pytest
from scipy.stats import hypergeom

from flashstep.parallel.balance import (
    Evenness,
    balancedness,
    chosen_experts,
    drawn,
    part_loads,
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


def routed(
    rows: int, *, seed: int, layers: int = 40, experts: int = 384, chosen: int = 6, skew: float = 2.0
) -> np.ndarray:
    """Loads of ``rows`` rows that a skewed router sends: the same one for every ``seed``."""
    popular_LE = np.log(np.random.default_rng(9).dirichlet(np.full(experts, skew), size=layers))
    chance = np.random.default_rng(seed)
    counts_LE = np.zeros((layers, experts), dtype=np.int64)
    for layer, popular_E in enumerate(popular_LE):
        keys_TE = popular_E + chance.gumbel(size=(rows, experts))
        counts_LE[layer] = np.bincount(
            keys_TE.argpartition(-chosen, axis=1)[:, -chosen:].ravel(), minlength=experts
        )
    return counts_LE


@pytest.mark.parametrize(("experts", "chosen"), SHAPES)
@pytest.mark.parametrize("rows", [1, 3, 7, 64, 1000])
def test_recorded_loads_are_drawn_for_any_rows(experts: int, chosen: int, rows: int) -> None:
    counts_LE = routed(64, seed=1, layers=3, experts=experts, chosen=chosen, skew=0.3)
    found = drawn(counts_LE, rows=rows, chosen=chosen, seed=(1,))
    check(found, rows=rows, chosen=chosen)
    assert (found <= -(-rows // 64) * counts_LE).all(), "no row is drawn twice before all are"
    assert (drawn(counts_LE, rows=64, chosen=chosen, seed=(2,)) == counts_LE).all(), "as many are all of them"
    assert (drawn(counts_LE, rows=rows, chosen=chosen, seed=(1,)) == found).all(), "a seed fixes it"


@pytest.mark.parametrize(("recorded", "rows"), [(4096, 64), (64, 16), (64, 8), (16, 2), (64, 1)])
def test_drawn_loads_are_as_true_ones_of_so_many_rows(recorded: int, rows: int) -> None:
    """Ranks' shares, touched experts and balancedness, of skewed routing, in the mean over steps."""
    found = [drawn(routed(recorded, seed=n), rows=rows, chosen=6, seed=(n,)) for n in range(6)]
    true = [routed(rows, seed=100 + n) for n in range(6)]

    def figures(steps: list[np.ndarray]) -> tuple[float, float, np.ndarray]:
        shares_P = part_loads(np.sum(steps, axis=0), parts=8).sum(0)
        even = np.mean([balancedness(counts_LE, parts=8) for counts_LE in steps])
        return (
            np.mean([(counts_LE > 0).sum(1).mean() for counts_LE in steps]),
            float(even),
            shares_P / shares_P.sum(),
        )

    (touched_here, even_here, shares_here), (touched_true, even_true, shares_true) = (
        figures(found),
        figures(true),
    )
    assert touched_here == pytest.approx(touched_true, rel=0.03)
    assert even_here == pytest.approx(even_true, abs=0.03)
    noise = 4 / np.sqrt(6 * 40 * 6 * rows * 8)
    assert np.abs(shares_here - shares_true).max() < 0.003 + noise


def test_each_expert_has_the_load_of_rows_drawn_without_replacement() -> None:
    """Hypergeometric: 5 of 20 rows, of which each expert had another number."""
    counts_LE = routed(20, seed=3, layers=1, experts=16, chosen=2, skew=0.5)
    many = np.concatenate([drawn(counts_LE, rows=5, chosen=2, seed=(n,)) for n in range(3000)])
    for had, got in zip(counts_LE[0], many.T, strict=True):
        law = hypergeom(20, had, 5)
        assert got.mean() == pytest.approx(law.mean(), abs=0.08) and got.var() == pytest.approx(
            law.var(), abs=0.15
        )


def test_layers_have_rows_of_their_own_and_one_without_any_is_uniform() -> None:
    counts_LE = routed(8, seed=1, layers=4)
    counts_LE[1] = routed(3, seed=1, layers=1)[0]
    counts_LE[2] = 0
    found = drawn(counts_LE, rows=8, chosen=6, seed=(1,))
    check(found, rows=8, chosen=6)
    assert (found[[0, 3]] == counts_LE[[0, 3]]).all() and ((found[1] > 0) == (counts_LE[1] > 0)).all()
    parts_P = part_loads(found[2:3], parts=8)[0]
    assert parts_P.max() < 2 * parts_P.mean(), "not the first experts, as the first tie goes"


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
    for window, expected in ((1, [0.5, 0.5, 0.5]), (2, [1, 0.5]), (0, [pytest.approx(0.75)])):
        even = Evenness(parts=2, window=window)
        for step in (*steps, 0 * left):
            even.add(step)
        assert even.by_step == [0.5] * 3 and even.by_window == expected
        assert even.whole == pytest.approx(9 / 12) and even.total_LE.tolist() == [[12, 6]]
