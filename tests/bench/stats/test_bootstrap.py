"""Bootstrap intervals against scipy's, and what they resample."""

import numpy as np
import pytest
from scipy import stats

from flashstep.bench.stats.bootstrap import of_differences, of_rounds_and_samples, of_runs
from flashstep.bench.stats.paired import Interval

RNG = np.random.default_rng(5)


def width(found: Interval | None) -> float:
    assert found is not None
    return found.high - found.low


def test_of_many_rounds_it_is_near_the_t_interval_and_seeded() -> None:
    values = RNG.normal(3, 2, 60)
    found, t = of_differences(values), stats.ttest_1samp(values, 0).confidence_interval()
    assert found is not None and found == of_differences(values) and found.words == "BCa over 60 rounds"
    assert (found.low, found.high) == pytest.approx((t.low, t.high), abs=0.1)
    a, b = RNG.normal(0, 1, 40), RNG.normal(1, 2, 50)
    theirs = stats.ttest_ind(b, a, equal_var=False).confidence_interval()
    runs = of_runs(a, b)
    assert runs is not None and (runs.low, runs.high) == pytest.approx((theirs.low, theirs.high), abs=0.1)


def test_too_few_or_all_alike_have_none() -> None:
    assert of_differences([1, 2]) is None and of_differences([2, 2, 2, 2]) is None
    assert of_runs([1, 2, 3], [1, 1, 1]) is None
    few = [np.ones(3)] * 2
    assert of_rounds_and_samples(few, few, np.mean, unit="request", shared=True) is None


def test_nested_is_the_law_of_two_stages() -> None:
    """Rounds vary by 1, samples by 2 of 50 each: the spread of the mean is the root of (1 + 4 / 50) / rounds."""
    rounds, size = 40, 50
    a = [np.zeros(size)] * rounds
    b = [RNG.normal(level, 2, size) for level in RNG.normal(0, 1, rounds)]
    found = of_rounds_and_samples(a, b, lambda x: float(x.mean()), unit="request", shared=False)
    within, between = np.mean([row.var() for row in b]) / size, np.var([row.mean() for row in b])
    assert width(found) == pytest.approx(2 * 1.96 * np.sqrt((between + within) / rounds), rel=0.08)


def test_requests_that_rounds_share_are_resampled_together() -> None:
    """Ten requests differ among themselves, rounds hardly do: more rounds make the interval no narrower."""
    each = RNG.normal(5, 3, 10)
    a = [np.zeros(10)] * 30
    b = [each + RNG.normal(0, 0.1, 10) for _ in range(30)]
    crossed = of_rounds_and_samples(a, b, lambda x: float(x.mean()), unit="request", shared=True)
    nested = of_rounds_and_samples(a, b, lambda x: float(x.mean()), unit="request", shared=False)
    assert width(crossed) == pytest.approx(2 * 1.96 * each.std() / np.sqrt(10), rel=0.15)
    assert width(nested) < width(crossed) / 3
    assert crossed is not None and "10 requests that they share" in crossed.words


def test_a_coverage_that_is_told() -> None:
    """Of 500 experiments of 20 rounds with 30 requests each, the crossed interval holds the truth in about 95%."""
    rng, held = np.random.default_rng(7), 0
    for _ in range(500):
        per_round, per_request = rng.normal(0, 1, (20, 1)), rng.normal(0, 1, 30)
        b = list(2 + per_round + per_request + rng.normal(0, 1, (20, 30)))
        found = of_rounds_and_samples(
            [np.zeros(30)] * 20, b, np.mean, unit="request", shared=True, resamples=60
        )
        assert found is not None
        held += found.low <= 2 <= found.high
    assert 0.89 * 500 <= held <= 500
