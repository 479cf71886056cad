"""Bootstrap intervals of a difference, resampling what was sampled: rounds, or rounds and what was measured in each.

Takes differences or raw values of both arms; gives ``Interval``. With fewer than some ten rounds any bootstrap is too narrow:
claims stand on exact tests, and this is shown beside them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy import stats

from flashstep.bench.stats.paired import Interval

RESAMPLES = 9_999
BATCH = 500  # resamples at a time: some megabytes for thousands of questions
RESAMPLES_OF_TWO = 1_999  # each evaluates a statistic of all rounds


def of_differences(
    differences: Sequence[float] | np.ndarray,
    *,
    unit: str = "round",
    confidence: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Interval | None:
    """BCa interval of the mean difference, resampling rounds (or what ``unit`` says). None of fewer than 3 or equal ones."""
    values = np.asarray(differences, float)
    if len(values) < 3 or np.ptp(values) == 0:
        return None
    words = f"BCa over {len(values):,} {unit}s"
    return _bca((values,), np.mean, words, confidence=confidence, resamples=resamples, seed=seed)


def of_runs(
    a: Sequence[float] | np.ndarray,
    b: Sequence[float] | np.ndarray,
    *,
    confidence: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Interval | None:
    """BCa interval of mean(b) - mean(a), resampling each arm's runs. None where runs are fewer than three or all alike."""
    if min(len(a), len(b)) < 3 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return None
    return _bca(
        (np.asarray(b, float), np.asarray(a, float)),
        lambda x, y, axis: np.mean(x, axis=axis) - np.mean(y, axis=axis),
        f"BCa over {len(a)} and {len(b)} runs",
        confidence=confidence,
        resamples=resamples,
        seed=seed,
    )


def _bca(
    samples: tuple[np.ndarray, ...],
    statistic: Callable[..., Any],
    words: str,
    *,
    confidence: float,
    resamples: int,
    seed: int,
) -> Interval:
    found = stats.bootstrap(
        samples,
        statistic,
        n_resamples=resamples,
        confidence_level=confidence,
        method="BCa",
        batch=BATCH,
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return Interval(low=float(found.low), high=float(found.high), confidence=confidence, words=words)


def of_rounds_and_samples(
    a: Sequence[np.ndarray],
    b: Sequence[np.ndarray],
    statistic: Callable[[np.ndarray], float],
    *,
    unit: str,
    shared: bool,
    confidence: float = 0.95,
    resamples: int = RESAMPLES_OF_TWO,
    seed: int = 0,
) -> Interval | None:
    """Percentile interval of the mean over rounds of statistic(B) - statistic(A), resampling rounds and samples.

    ``a[r][i]`` and ``b[r][i]`` are the same sample in both arms. ``shared``: sample i is the same in all rounds, and all rounds
    take the same resampled ones (crossed; it does not get narrower by repeating few requests often). Else each round resamples
    its own (nested). None where there are fewer than three rounds.
    """
    rounds = len(a)
    if rounds < 3:
        return None
    rng = np.random.default_rng(seed)
    found = np.empty(resamples)
    for place in range(resamples):
        common = rng.integers(0, len(a[0]), len(a[0])) if shared else None
        gaps = []
        for r in rng.integers(0, rounds, rounds):
            of = common if common is not None else rng.integers(0, len(a[r]), len(a[r]))
            gaps.append(statistic(b[r][of]) - statistic(a[r][of]))
        found[place] = np.mean(gaps)
    low, high = np.quantile(found, [(1 - confidence) / 2, (1 + confidence) / 2])
    plural = f"{unit}s"
    words = (
        f"percentiles, resampling {rounds} rounds and the {len(a[0]):,} {plural} that they share"
        if shared
        else f"percentiles, resampling {rounds} rounds and the {plural} within each"
    )
    return Interval(low=float(low), high=float(high), confidence=confidence, words=words)
