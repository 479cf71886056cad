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


@pytest.mark.parametrize(
    ("ramp", "first", "last"),
    [("linear", 0.01, 100.0), ("linear", 60.0, 5.0), ("linear", 50.0, 50.0), ("exponential", 1.0, 100.0),
     ("exponential", 80.0, 2.0), ("exponential", 50.0, 50.0)],
)  # fmt: skip
def test_a_ramp_sends_what_its_rates_say_in_every_part_of_it(ramp: str, first: float, last: float) -> None:
    """The law of a Poisson process: in each sixth of the time as many as the integral of the rate, within 5 standard errors."""
    arrivals = Arrivals(ramp=ramp, start_rate=first, end_rate=last)  # ty: ignore[invalid-argument-type]
    runs = [times(arrivals, None, 60.0, seed) for seed in range(20)]
    shares = np.linspace(0, 1, 6001)
    rates = first + (last - first) * shares if ramp == "linear" else first * (last / first) ** shares
    for part in range(6):
        sent = sum(((10 * part <= run) & (run < 10 * part + 10)).sum() for run in runs)
        wished = 20 * 10 * rates[1000 * part : 1000 * part + 1000].mean()
        assert abs(sent - wished) < 5 * math.sqrt(wished) + 2
    by_number = [times(arrivals, 600, seed=seed)[-1] for seed in range(20)]
    over_s = 600 / rates.mean()
    assert np.mean(by_number) == pytest.approx(over_s, rel=0.06), (
        "where a number is asked for, the ramp ends with it"
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
