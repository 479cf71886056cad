"""Arrivals: rates and their spread, ramps, and the same times for the same seed."""

import math
from itertools import islice

import numpy as np
import pytest

from flashstep.bench.load.arrivals import Arrivals


def times(
    arrivals: Arrivals, number: int | None, duration_s: float | None = None, seed: int = 0
) -> np.ndarray:
    return np.array(list(arrivals.times(np.random.default_rng(seed), number=number, duration_s=duration_s)))


def test_without_a_rate_all_begin_at_once() -> None:
    assert times(Arrivals(), 5).tolist() == [0.0] * 5


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_rates_mean_and_the_burstiness_spread(burstiness: float) -> None:
    """Gamma of shape b has a coefficient of variation of 1 / sqrt(b); of 20,000 gaps its error is below 3 %, four times over."""
    gaps = np.diff(times(Arrivals(rate=8.0, burstiness=burstiness), 20001))
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.06)
    assert gaps.std() / gaps.mean() == pytest.approx(1 / math.sqrt(burstiness), rel=0.06)


def test_a_duration_ends_them() -> None:
    found = times(Arrivals(rate=50.0), None, 10.0)
    assert found.max() < 10.0 and len(found) == pytest.approx(500, rel=0.2)
    assert len(times(Arrivals(rate=50.0), 20, 10.0)) == 20
    endless = Arrivals().times(np.random.default_rng(0), number=None, duration_s=1.0)
    assert list(islice(endless, 3)) == [0.0, 0.0, 0.0], "a closed loop's sessions are all due at once"


@pytest.mark.parametrize(("ramp", "middle"), [("linear", 50.5), ("exponential", 10.0)])
def test_a_ramp_goes_from_one_rate_to_the_other(ramp: str, middle: float) -> None:
    arrivals = Arrivals(ramp=ramp, start_rate=1.0, end_rate=100.0)
    assert [arrivals.rate_at(progress) for progress in (0, 0.5, 1, 2)] == pytest.approx([1, middle, 100, 100])
    gaps = np.diff(times(arrivals, 4001))
    assert gaps[:200].mean() > 5 * gaps[-200:].mean()
    by_time = times(Arrivals(ramp="linear", start_rate=1.0, end_rate=100.0), None, 20.0)
    late = (by_time > 10).sum()
    assert late == pytest.approx(3 * (len(by_time) - late), rel=0.2), (
        "a linear ramp sends 3/4 in its second half"
    )


def test_the_same_seed_gives_the_same_times() -> None:
    arrivals = Arrivals(rate=3.0, burstiness=0.5)
    assert (times(arrivals, 50, seed=7) == times(arrivals, 50, seed=7)).all()
    assert (times(arrivals, 50, seed=7) != times(arrivals, 50, seed=8)).any()


def test_every_problem_is_told() -> None:
    assert Arrivals(rate=2.0).problems() == []
    assert Arrivals(ramp="linear", start_rate=1.0, end_rate=2.0).problems() == []
    assert len(Arrivals(rate=0.0, burstiness=0.0, start_rate=1.0, end_rate=1.0).problems()) == 4
    assert len(Arrivals(rate=math.nan, burstiness=math.nan).problems()) == 2
    assert len(Arrivals(rate=2.0, ramp="exponential", start_rate=0.0, end_rate=math.inf).problems()) == 3
