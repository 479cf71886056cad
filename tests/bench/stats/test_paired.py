"""The tests of two arms: published numbers from their counts, scipy on random cases, levels and power by simulation."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from flashstep.bench.stats.paired import (
    MOST_POINTS,
    Summary,
    discordant,
    exchange,
    mcnemar,
    mean_difference,
    sign_flip,
    summary,
    unequal_shares,
    welch,
)
from tests.bench.stats.power import power

RUNS_A = [0.9067, 0.9030, 0.9075, 0.9030]  # of 1,319 questions, spec/serving.md E27
RUNS_B = [0.8999, 0.8992, 0.9014, 0.9014]
SIMULATIONS = 10_000
# 99.9% of binomial counts at the stated rate are below it
MOST_FALSE = stats.binom.ppf(0.999, SIMULATIONS, 0.05)


@pytest.mark.parametrize(
    ("only_a", "only_b", "p"),
    [
        (34, 25, ".298"),
        (35, 25, ".245"),
        (34, 30, ".708"),
        (40, 35, ".644"),
        (33, 28, ".609"),
        (35, 34, "1.0"),
    ],
)
def test_published_mcnemar(only_a: int, only_b: int, p: str) -> None:
    found = mcnemar(only_a, only_b)
    assert found.p == pytest.approx(float(p), abs=0.0005)
    assert found.p == mcnemar(only_b, only_a).p and found.count == f"{only_a}/{only_b}"
    law = sum(math.comb(only_a + only_b, k) for k in range(min(only_a, only_b) + 1)) / 2 ** (only_a + only_b)
    assert found.p == pytest.approx(min(2 * law, 1))


def test_mcnemar_of_nothing_and_of_nonsense() -> None:
    assert mcnemar(0, 0).p == 1.0
    assert mcnemar(1, 0).p == mcnemar(1, 0).smallest == 1.0
    with pytest.raises(ValueError, match="negative"):
        mcnemar(3, -1)


@pytest.mark.parametrize(("only_a", "only_b"), [(34, 25), (35, 25), (34, 30), (40, 35), (33, 28), (35, 34)])
def test_published_standard_errors(only_a: int, only_b: int) -> None:
    found = discordant(only_a, only_b, of=1319)
    gap = only_b - only_a
    assert 0.575 <= 100 * found.se <= 0.665
    assert found.se == pytest.approx(math.sqrt(only_a + only_b - gap**2 / 1319) / 1319, rel=1e-3)
    assert found.interval.high - found.mean == pytest.approx(1.96 * found.se, rel=1e-3)
    with pytest.raises(ValueError, match="items differ"):
        discordant(only_a, only_b, of=only_a)


def test_published_run_totals() -> None:
    """2/70 over all runs; 2/24 within one job of 2 + 2 and two of 1 + 1, whichever runs stand in which job."""
    found = exchange(RUNS_A, RUNS_B)
    assert found.tested.count == "2/70" and found.tested.p == pytest.approx(2 / 70)
    assert found.difference == pytest.approx(np.mean(RUNS_B) - np.mean(RUNS_A))
    assert 1319 * 4 * found.difference == pytest.approx(-24, abs=0.3)  # 24 fewer right of 5,276
    for jobs in (["x", "x", "y", "z"], ["y", "x", "z", "x"]):
        within = exchange(RUNS_A, RUNS_B, jobs, ["x", "x", "y", "z"])
        assert within.tested.count == "2/24" and within.tested.smallest == within.tested.p


def test_published_speed_arms() -> None:
    found = welch(Summary(mean=891.9, sd=3.3, n=2), Summary(mean=964.0, sd=3.0, n=2))
    assert found.t == pytest.approx(22.9, abs=0.05)
    assert welch(Summary(mean=921.3, sd=0, n=2), Summary(mean=921.3, sd=0, n=2)).p == 1.0
    assert welch(Summary(mean=921.3, sd=0, n=2), Summary(mean=999.3, sd=0, n=2)).t is None
    with pytest.raises(ValueError, match="arm B has sd 1 of 1 runs"):
        welch(Summary(mean=1, sd=1, n=2), Summary(mean=1, sd=1, n=1))


def test_welch_is_scipys() -> None:
    rng = np.random.default_rng(1)
    for _ in range(50):
        a, b = rng.normal(0, 1, rng.integers(2, 9)), rng.normal(0.5, 3, rng.integers(2, 9))
        found, theirs = welch(summary(a), summary(b)), stats.ttest_ind(b, a, equal_var=False)
        assert (found.t, found.df, found.p) == pytest.approx((theirs.statistic, theirs.df, theirs.pvalue))
        assert found.interval is not None
        bounds = theirs.confidence_interval()
        assert (found.interval.low, found.interval.high) == pytest.approx((bounds.low, bounds.high))


def test_mean_difference_is_scipys() -> None:
    values = np.random.default_rng(2).normal(1, 2, 30)
    bounds = stats.ttest_1samp(values, 0).confidence_interval()
    found = mean_difference(values).interval
    assert (found.low, found.high) == pytest.approx((bounds.low, bounds.high))


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.integers(0, 6), min_size=2, max_size=5), st.lists(st.integers(0, 6), min_size=2, max_size=5)
)
def test_exchange_is_scipys(a: list[int], b: list[int]) -> None:
    """Ties and unequal numbers of runs too: scipy's two-sided p is twice the smaller tail as well."""
    theirs = stats.permutation_test(
        (b, a),
        lambda x, y, axis: np.mean(x, axis=axis) - np.mean(y, axis=axis),
        vectorized=True,
        n_resamples=np.inf,
    )
    found = exchange(a, b)
    assert found.tested.p == pytest.approx(theirs.pvalue)
    assert found.difference == pytest.approx(theirs.statistic)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(-4, 4), min_size=2, max_size=9))
def test_three_ways_to_flip_signs_agree(values: list[int]) -> None:
    """Convolution, enumeration of arrangements, and the definition; and scipy's permutation of paired samples."""
    whole = np.array(values, float)
    signs = np.array(np.meshgrid(*[[-1, 1]] * len(values))).reshape(len(values), -1).T
    by_definition = np.mean(np.abs(signs @ whole) >= abs(whole.sum()))
    assert sign_flip(whole).p == pytest.approx(by_definition)
    assert sign_flip(whole / 3).p == pytest.approx(by_definition)
    if whole.any():
        rounds = range(len(values))
        assert exchange(np.zeros(len(values)), whole, rounds, rounds).tested.p == pytest.approx(by_definition)
        theirs = stats.permutation_test(
            (whole, np.zeros_like(whole)),
            lambda x, y, axis: np.mean(x - y, axis=axis),
            permutation_type="samples",
            vectorized=True,
            n_resamples=np.inf,
        )
        assert sign_flip(whole).p == pytest.approx(theirs.pvalue)


def test_drawn_signs_and_drawn_runs_are_near_the_exact() -> None:
    rng = np.random.default_rng(3)
    values = rng.integers(-4, 6, 133)
    exact, drawn = sign_flip(values), sign_flip(values / 7, seed=5)
    assert exact.exact and not drawn.exact and drawn.smallest == pytest.approx(1e-5, rel=0.01)
    assert drawn.p == pytest.approx(exact.p, abs=5 * math.sqrt(exact.p / 1e5))
    assert drawn == sign_flip(values / 7, seed=5)
    a, b = rng.normal(0, 1, 12), rng.normal(0.7, 1, 12)
    theirs = stats.permutation_test((b, a), lambda x, y: np.mean(x) - np.mean(y), n_resamples=9999, rng=rng)
    found = exchange(a, b)
    assert not found.tested.exact and found.tested.p == pytest.approx(theirs.pvalue, abs=0.01)
    t = stats.ttest_ind(b, a).confidence_interval()
    assert (found.interval.low, found.interval.high) == pytest.approx((t.low, t.high), abs=0.1)


def test_whole_numbers_without_end_are_drawn() -> None:
    """A convolution is bounded work; what divides all values makes none."""
    rng = np.random.default_rng(1)
    large = rng.integers(-900, 901, 2000)
    assert not sign_flip(large).exact and abs(large).sum() <= MOST_POINTS
    assert sign_flip(large).p == pytest.approx(sign_flip(large, seed=1).p, abs=0.01)
    small = rng.integers(-4, 5, 3000)
    assert sign_flip(small).exact and sign_flip(100 * small).p == sign_flip(small).p
    few = rng.integers(-6666, 6667, 300)
    found = sign_flip(few)
    spread = math.sqrt(float((few**2).sum()))
    assert found.exact and found.p == pytest.approx(2 * stats.norm.sf(abs(few.sum()) / spread), abs=0.01)


def test_what_is_no_finite_number_has_no_sign() -> None:
    with pytest.raises(ValueError, match="no finite number"):
        sign_flip([1.0, math.nan])


def test_ties_are_ties_in_the_interval_too() -> None:
    """0.1 + 0.2 is 0.3 to the test: the interval that it does not reject 0 in holds 0."""
    a, b = [0.1, 0.2, 0.3, 0.3], [0.3, 0.3, 0.1, 0.2]
    found = exchange(a, b)
    assert found.tested.p == 1 and found.interval.low <= 0 <= found.interval.high
    tied = exchange([0.3, 0.3], [0.1 + 0.2, 0.1 + 0.2])
    assert (tied.interval.low, tied.interval.high) == (0, 0)


def test_shares_that_chance_makes_unequal() -> None:
    """Fisher's tea: 0 of 4 and 4 of 4."""
    assert (
        unequal_shares((0, 4), (4, 4)) == pytest.approx(2 / 70) and unequal_shares((1, 1000), (1, 1000)) == 1
    )


def test_runs_without_an_opposite_are_refused() -> None:
    with pytest.raises(ValueError, match="no block has runs of both arms"):
        exchange([1.0, 2.0], [3.0, 4.0], ["x", "x"], ["y", "y"])
    with pytest.raises(ValueError, match="arm B has 2 runs, and blocks for 1"):
        exchange([1.0, 2.0], [3.0, 4.0], ["x", "x"], ["y"])


def test_a_block_without_an_opposite_says_nothing() -> None:
    """Its runs cannot be exchanged, and what a whole block shares drops out."""
    whole = exchange([1.0, 2.0, 50.0], [3.0, 4.5], ["x", "x", "y"], ["x", "x"])
    assert whole == exchange([1.0, 2.0], [3.0, 4.5])
    shifted = exchange([1, 12, 23], [2, 14, 24], ["p", "q", "r"], ["p", "q", "r"])
    assert shifted.difference == pytest.approx(4 / 3) and shifted.tested.count == "2/8"


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.floats(-5, 5), min_size=2, max_size=4),
    st.lists(st.floats(-5, 5), min_size=2, max_size=4),
    st.sampled_from([0.5, 0.8, 0.9]),
)
def test_the_interval_is_the_test_turned_over(a: list[float], b: list[float], confidence: float) -> None:
    """Just outside it a shift is rejected, just inside it is not: whatever the numbers of runs."""
    found = exchange(a, b, confidence=confidence).interval
    for end, out in ((found.low, -1), (found.high, 1)):
        for place, rejected in ((end + out * 1e-6, True), (end - out * 1e-6, False)):
            p = exchange(a, [value - place for value in b]).tested.p
            inside = found.low <= place <= found.high
            if rejected or inside:
                assert (p <= 1 - found.confidence + 1e-9) is rejected
    assert found.confidence >= confidence or exchange(a, b).tested.smallest > 1 - confidence


def test_of_few_rounds_the_interval_says_what_it_has() -> None:
    found = exchange([0] * 4, [1, 2, 3, 5], range(4), range(4)).interval
    assert (found.low, found.high, found.confidence) == (1, 5, 1 - 2 / 16)
    found = exchange([0] * 6, [1, 2, 3, 5, 7, 8], range(6), range(6)).interval
    assert (found.low, found.high, found.confidence) == (1, 8, 1 - 2 / 64)


def false_claims(test: str) -> int:
    """Of 10,000 pairs of arms without a difference: how many have p <= 0.05."""
    rng = np.random.default_rng(11)
    if test == "mcnemar":
        p = np.array([mcnemar(k, 60 - k).p for k in range(61)])
        return int((p[rng.binomial(60, 0.5, SIMULATIONS)] <= 0.05).sum())
    if test == "sign-flip":
        values = rng.choice([-2, -1, 1, 2], (SIMULATIONS, 60))
        return sum(sign_flip(row).p <= 0.05 for row in values)
    if test == "welch":
        a, b = rng.normal(0, 1, (2, SIMULATIONS, 4))
        return sum(welch(summary(x), summary(y)).p <= 0.05 for x, y in zip(a, b, strict=True))
    if test == "mean":
        intervals = [mean_difference(row).interval for row in rng.normal(0, 1, (SIMULATIONS, 20))]
        return sum(not item.low <= 0 <= item.high for item in intervals)
    # skewed run noise, and rounds that share a level which wanders
    a, b = rng.exponential(1, (2, SIMULATIONS, 6)) + rng.normal(0, 5, (SIMULATIONS, 6)).cumsum(1)
    if test == "rounds":
        return sum(exchange(x, y, range(6), range(6)).tested.p <= 0.05 for x, y in zip(a, b, strict=True))
    a, b = rng.exponential(1, (2, SIMULATIONS, 4))
    return sum(exchange(x, y).tested.p <= 0.05 for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("test", ["mcnemar", "sign-flip", "welch", "mean", "rounds", "runs"])
def test_arms_without_a_difference_are_called_different_at_the_stated_rate(test: str) -> None:
    found = false_claims(test)
    print(f"{test}: {found} of {SIMULATIONS} at 0.05")
    assert 0.2 * 0.05 * SIMULATIONS <= found <= MOST_FALSE


def test_known_differences_are_found_with_the_expected_power() -> None:
    """The t interval as the noncentral t says; the exact test over 8 rounds is less than 6 points behind it."""
    rng = np.random.default_rng(13)
    rounds, effect, many = 8, 1.2, 4_000
    values = rng.normal(effect, 1, (many, rounds))
    expected = power(effect, sd=1, n=rounds, alpha=0.05)
    near = 4 * math.sqrt(expected * (1 - expected) / many)
    by_t = np.mean([mean_difference(row).interval.low > 0 for row in values])
    by_exchange = np.mean(
        [exchange(np.zeros(rounds), row, range(rounds), range(rounds)).tested.p <= 0.05 for row in values]
    )
    print(f"expected {expected:.3f}, t {by_t:.3f}, exchange {by_exchange:.3f}")
    assert by_t == pytest.approx(expected, abs=near)
    assert expected - 0.06 <= by_exchange <= expected + near


def test_mcnemar_has_the_power_of_its_law() -> None:
    """60 items differ, B right in 70% of them: the share of p <= 0.05 is the binomial's beyond the critical count."""
    rng = np.random.default_rng(17)
    critical = max(k for k in range(31) if mcnemar(k, 60 - k).p <= 0.05)
    expected = stats.binom.cdf(critical, 60, 0.3) + stats.binom.sf(59 - critical, 60, 0.3)
    found = np.mean([mcnemar(int(k), 60 - int(k)).p <= 0.05 for k in rng.binomial(60, 0.3, 2000)])
    assert found == pytest.approx(expected, abs=4 * math.sqrt(expected * (1 - expected) / 2000))
