"""Orders that cancel drift, the least p of a design, and its power against scipy's noncentral t."""

import numpy as np
import pytest
from scipy import stats

from flashstep.bench.stats.design import (
    detectable,
    fewest_rounds,
    fewest_runs,
    order,
    power,
    separation,
    smallest_p,
)
from flashstep.bench.stats.paired import exchange


def test_a_linear_drift_cancels() -> None:
    """With two arms and with a control, and in every two rounds."""
    assert [arm for _, arm in order(["A", "B"], rounds=4)] == list("ABBAABBA")
    assert [arm for _, arm in order(["A", "B", "C"], rounds=2)] == list("ABCCBA")
    for arms in (["A", "B"], ["A", "B", "C"]):
        plan = order(arms, rounds=6)
        means = {arm: np.mean([place for place, (_, name) in enumerate(plan) if name == arm]) for arm in arms}
        assert len(set(means.values())) == 1
        assert separation([arm for _, arm in plan], "A", "B") == 0
    with pytest.raises(ValueError, match="an even number is balanced"):
        order(["A", "B"], rounds=5)


@pytest.mark.parametrize(("runs", "expected"), [("AABB", 1), ("BBBAAA", -1), ("ABBA", 0), ("ABAB", 0.5)])
def test_separation(runs: str, expected: float) -> None:
    assert separation(runs, "A", "B") == expected


def test_the_least_p_is_what_the_test_gives_at_most() -> None:
    assert smallest_p([(4, 4)]) == 2 / 70 and smallest_p([(2, 2), (1, 1), (1, 1)]) == 2 / 24
    assert smallest_p([(1, 0)]) == 1
    assert (fewest_rounds(0.05), fewest_rounds(0.01), fewest_runs(0.05)) == (6, 8, 4)
    for alpha in (0.1, 0.05, 0.01, 0.001):
        rounds = fewest_rounds(alpha)
        far = exchange(np.zeros(rounds), np.arange(1, rounds + 1), range(rounds), range(rounds))
        assert far.tested.p == smallest_p([(1, 1)] * rounds) <= alpha < smallest_p([(1, 1)] * (rounds - 2))


def test_power_and_what_can_be_found() -> None:
    rng = np.random.default_rng(3)
    values = rng.normal(0.9, 1, (20_000, 10))
    p = stats.ttest_1samp(values, 0, axis=1).pvalue
    assert power(0.9, sd=1, n=10, alpha=0.05) == pytest.approx(np.mean(p <= 0.05), abs=0.01)
    assert power(0.0, sd=1, n=10, alpha=0.05) == pytest.approx(0.05)
    for n, alpha in ((2, 0.05), (2, 0.01), (6, 0.05), (6, 0.001), (40, 0.05), (1319, 0.05)):
        effect = detectable(sd=3, n=n, alpha=alpha)
        assert power(effect, sd=3, n=n, alpha=alpha) == pytest.approx(0.8, abs=1e-6)
    assert detectable(sd=0, n=4, alpha=0.05) == 0
