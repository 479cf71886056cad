"""Tests of two arms: McNemar, sign-flip over questions, exchange of runs within blocks, Welch's t, the paired interval.

Takes plain numbers; gives two-sided p-values, the smallest p that the design could have given, and intervals of B - A. A p by
enumeration or convolution is exact; where there are too many arrangements, 100,000 seeded draws stand for them.
"""

import itertools
import math
from collections.abc import Hashable, Sequence

import msgspec
import numpy as np
from scipy import stats

DRAWS = 100_000
MOST_ARRANGEMENTS = 200_000  # C(20, 10) = 184,756 of ten runs an arm, 2^17 of seventeen pairs
MOST_POINTS = 2_000_000  # of a convolution
MOST_PRODUCTS = 500_000_000  # of a convolution: about a second
NEARLY = 1e-12  # sums of the same numbers in another order


class Tested(msgspec.Struct, frozen=True, kw_only=True):
    """``p`` is two-sided: twice the smaller tail, 1 at most. ``smallest`` is the least that data of this size can give.

    ``count`` is p as a fraction of the arrangements ("2/70"); of drawn arrangements where not ``exact``.
    """

    p: float
    smallest: float
    exact: bool
    count: str


class Interval(msgspec.Struct, frozen=True, kw_only=True):
    """Of a difference B - A. ``confidence`` is what it has: discrete tests cannot choose it freely. ``words`` say how it came."""

    low: float
    high: float
    confidence: float
    words: str


class Exchanged(msgspec.Struct, frozen=True, kw_only=True):
    """``difference`` is B - A, averaged within blocks; the interval holds the shifts that the test does not reject."""

    difference: float
    tested: Tested
    interval: Interval


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """An arm's runs as papers print them: mean +- sd of n. ``sd`` has n - 1 in its denominator."""

    mean: float
    sd: float
    n: int


class Welch(msgspec.Struct, frozen=True, kw_only=True):
    """``t`` is positive where B is larger. Both spreads 0: t, degrees of freedom and interval are None, and p is 0 or 1."""

    difference: float
    t: float | None
    df: float | None
    p: float
    interval: Interval | None


class Mean(msgspec.Struct, frozen=True, kw_only=True):
    """Mean of paired differences, its standard error, and the t interval (E25; 1.96 SE for a thousand questions)."""

    mean: float
    se: float
    interval: Interval


def mcnemar(only_a: int, only_b: int) -> Tested:
    """Exact McNemar (E24) of the items that only A, and only B, has right."""
    if only_a < 0 or only_b < 0:
        raise ValueError(f"the counts are {only_a} and {only_b}; neither may be negative")
    n = only_a + only_b
    p = stats.binomtest(min(only_a, only_b), n, 0.5).pvalue if n else 1.0
    return Tested(
        p=float(min(p, 1.0)), smallest=min(2.0 ** (1 - n), 1.0), exact=True, count=f"{only_a}/{only_b}"
    )


def mean_difference(differences: Sequence[float] | np.ndarray, *, confidence: float = 0.95) -> Mean:
    """Of at least two paired differences (E25)."""
    values = np.asarray(differences, float)
    if len(values) < 2:
        raise ValueError(f"{len(values)} paired differences; a standard error needs two")
    mean, se = float(values.mean()), float(values.std(ddof=1) / math.sqrt(len(values)))
    reach = se * float(stats.t.ppf((1 + confidence) / 2, len(values) - 1))
    words = f"t over {len(values):,} paired differences"
    return Mean(
        mean=mean,
        se=se,
        interval=Interval(low=mean - reach, high=mean + reach, confidence=confidence, words=words),
    )


def discordant(only_a: int, only_b: int, *, of: int, confidence: float = 0.95) -> Mean:
    """The same from counts: of ``of`` items ``only_a`` are right in A only, ``only_b`` in B only (E25; n - 1 for its n)."""
    if of < max(only_a + only_b, 2):
        raise ValueError(
            f"{only_a} + {only_b} items differ of {of}; there must be at least {max(only_a + only_b, 2)}"
        )
    values = np.zeros(of)
    values[:only_a], values[only_a : only_a + only_b] = -1, 1
    return mean_difference(values, confidence=confidence)


def sign_flip(differences: Sequence[float] | np.ndarray, *, draws: int = DRAWS, seed: int = 0) -> Tested:
    """Sign-flip over items (E26): T = sum of differences; under no difference each sign is as likely as its opposite.

    Whole numbers (right answers over all runs) are convolved, few other values are enumerated: both exact. Else ``draws``.
    ``ValueError`` for what is no finite number.
    """
    values = np.asarray(differences, float)
    if not np.isfinite(values).all():
        raise ValueError("a difference is no finite number")
    values = values[values != 0]
    if not len(values):
        return Tested(p=1.0, smallest=1.0, exact=True, count="no item differs")
    smallest = 2.0 ** (1 - len(values))
    whole = np.rint(values).astype(np.int64) if np.abs(values).sum() <= MOST_POINTS else np.zeros(0, np.int64)
    if np.array_equal(values, whole) and _products(whole) <= MOST_PRODUCTS:
        return Tested(p=_convolved(whole), smallest=smallest, exact=True, count="exact")
    if 2 ** len(values) <= MOST_ARRANGEMENTS:
        return exchange(np.zeros(len(values)), values, range(len(values)), range(len(values))).tested
    total, rng, hits = values.sum(), np.random.default_rng(seed), 0
    near = NEARLY * np.abs(values).sum()
    for batch in _batches(draws, len(values)):
        signs = rng.integers(0, 2, (batch, len(values)), dtype=np.int8) * 2 - 1
        hits += int((np.abs(signs @ values) >= abs(total) - near).sum())
    return Tested(
        p=(hits + 1) / (draws + 1),
        smallest=1 / (draws + 1),
        exact=False,
        count=f"{hits + 1}/{draws + 1} drawn",
    )


def _batches(draws: int, width: int) -> list[int]:
    """``draws`` in pieces that take some tens of megabytes."""
    size = max(1, 4_000_000 // max(width, 1))
    return [min(size, draws - begin) for begin in range(0, draws, size)]


def _magnitudes(values: np.ndarray) -> list[tuple[int, int]]:
    """Each with how often it occurs, in units of what divides them all."""
    found, counts = np.unique(np.abs(values), return_counts=True)
    found = found // np.gcd.reduce(found)
    return list(zip(found.tolist(), counts.tolist(), strict=True))


def _products(values: np.ndarray) -> int:
    """How much work ``_convolved`` is."""
    length, work = 1, 0
    for magnitude, count in _magnitudes(values):
        work += length * (count + 1)
        length += magnitude * count
    return work


def _convolved(values: np.ndarray) -> float:
    """P(|T*| >= |T|) of whole numbers: the sum of those with a plus sign, magnitude by magnitude."""
    unit, law = int(np.gcd.reduce(np.abs(values))), np.ones(1)
    for magnitude, count in _magnitudes(values):
        longer = np.zeros(len(law) + magnitude * count)
        for place, chance in enumerate(stats.binom.pmf(np.arange(count + 1), count, 0.5)):
            longer[place * magnitude : place * magnitude + len(law)] += chance * law
        law = longer
    values = values // unit
    span = len(law) - 1
    totals = np.abs(2 * np.arange(span + 1) - span)
    return float(min(law[totals >= abs(int(values.sum()))].sum(), 1.0))


def exchange(
    a: Sequence[float] | np.ndarray,
    b: Sequence[float] | np.ndarray,
    blocks_a: Sequence[Hashable] | None = None,
    blocks_b: Sequence[Hashable] | None = None,
    *,
    confidence: float = 0.95,
    seed: int = 0,
) -> Exchanged:
    """Runs exchange their labels within blocks, all together (E27); without blocks, all runs are one.

    Blocks of one run of each arm are paired rounds: the test is then the sign-flip over the rounds' differences. T is the sum of
    A's distances from their blocks' means, so that what a whole block shares drops out. The interval is the test's own: it
    excludes 0 if and only if p <= 1 - ``confidence``; where the design has too few arrangements for that, it is the widest there
    is, and says its confidence. ``ValueError`` if no block has runs of both arms.
    """
    parts = _blocks(a, b, blocks_a, blocks_b)
    weights = [len(ours) * len(theirs) / (len(ours) + len(theirs)) for ours, theirs in parts]
    if not sum(weights):
        raise ValueError("no block has runs of both arms, so that no two runs can be exchanged")
    differences = [
        theirs.mean() - ours.mean() if len(ours) and len(theirs) else 0.0 for ours, theirs in parts
    ]
    total = math.prod(math.comb(len(ours) + len(theirs), len(ours)) for ours, theirs in parts)
    exact = total <= MOST_ARRANGEMENTS
    moved, swaps = _all(parts) if exact else _drawn(parts, np.random.default_rng(seed))
    near = NEARLY * sum(float(np.abs(values).sum()) for part in parts for values in part)
    tail = min(int((moved >= -near).sum()), int((moved <= near).sum()))
    places = len(moved)
    return Exchanged(
        difference=float(np.dot(weights, differences) / sum(weights)),
        tested=Tested(
            p=min(2 * tail / places, 1.0),
            smallest=min(2 / total, 1.0) if exact else 2 / places,
            exact=exact,
            count=f"{min(2 * tail, places)}/{places}" + ("" if exact else " drawn"),
        ),
        interval=_kept(moved, swaps, 1 - confidence, near),
    )


def _blocks(
    a: Sequence[float] | np.ndarray,
    b: Sequence[float] | np.ndarray,
    blocks_a: Sequence[Hashable] | None,
    blocks_b: Sequence[Hashable] | None,
) -> list[tuple[np.ndarray, np.ndarray]]:
    """The values of both arms, block by block."""
    names_a = [None] * len(a) if blocks_a is None else list(blocks_a)
    names_b = [None] * len(b) if blocks_b is None else list(blocks_b)
    for arm, values, names in (("A", a, names_a), ("B", b, names_b)):
        if len(values) != len(names):
            raise ValueError(f"arm {arm} has {len(values)} runs, and blocks for {len(names)}")
    found: dict[Hashable, tuple[list[float], list[float]]] = {}
    for place, (values, names) in enumerate(((a, names_a), (b, names_b))):
        for value, name in zip(values, names, strict=True):
            found.setdefault(name, ([], []))[place].append(float(value))
    return [(np.array(ours, float), np.array(theirs, float)) for ours, theirs in found.values()]


def _all(parts: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Of every arrangement: how much A's sum grows over what was seen, and how many pairs of runs changed places."""
    moved, swaps = np.zeros(1), np.zeros(1, int)
    for ours, theirs in parts:
        values = np.concatenate([ours, theirs])
        chosen = np.array(list(itertools.combinations(range(len(values)), len(ours))), int).reshape(
            -1, len(ours)
        )
        gains, counts = values[chosen].sum(1) - ours.sum(), (chosen >= len(ours)).sum(1)
        moved = np.add.outer(moved, gains).ravel()
        swaps = np.add.outer(swaps, counts).ravel()
    return np.where(swaps == 0, 0.0, moved), swaps


def _drawn(
    parts: list[tuple[np.ndarray, np.ndarray]], rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """The same of what was seen and ``DRAWS`` random arrangements."""
    moved, swaps = np.zeros(DRAWS + 1), np.zeros(DRAWS + 1, int)
    for ours, theirs in parts:
        values, begin = np.concatenate([ours, theirs]), 1
        for batch in _batches(DRAWS, len(values)):
            chosen = rng.random((batch, len(values))).argsort(1)[:, : len(ours)]
            moved[begin : begin + batch] += values[chosen].sum(1) - ours.sum()
            swaps[begin : begin + batch] += (chosen >= len(ours)).sum(1)
            begin += batch
    return moved, swaps


def _kept(moved: np.ndarray, swaps: np.ndarray, alpha: float, near: float) -> Interval:
    """The shifts of B that are not rejected: between order statistics of the mean differences of what changes places.

    For paired rounds these are the means of all subsets of the differences (Hartigan 1969, "typical values"). Within ``near`` of
    0 they are 0, as for the test.
    """
    places = len(moved)
    steps = np.sort(np.where(np.abs(moved) <= near, 0.0, moved)[swaps > 0] / swaps[swaps > 0])
    place = max(int(alpha * places / 2 + 1e-9), 1)
    return Interval(
        low=float(steps[place - 1]),
        high=float(steps[-place]),
        confidence=max(1 - 2 * place / places, 0.0),
        words="all shifts that the exchange test does not reject",
    )


def unequal_shares(a: tuple[int, int], b: tuple[int, int]) -> float:
    """Fisher's exact p that (failed, of how many) have one share in common."""
    return float(stats.fisher_exact([[failed, of - failed] for failed, of in (a, b)]).pvalue)


def summary(values: Sequence[float] | np.ndarray) -> Summary:
    """Of at least two runs."""
    return Summary(mean=float(np.mean(values)), sd=float(np.std(values, ddof=1)), n=len(values))


def welch(a: Summary, b: Summary, *, confidence: float = 0.95) -> Welch:
    """Welch's t on run means (E29), also from published mean, sd and n."""
    for name, arm in (("A", a), ("B", b)):
        if arm.n < 2 or arm.sd < 0:
            raise ValueError(
                f"arm {name} has sd {arm.sd} of {arm.n} runs; Welch's t needs two runs, and no negative sd"
            )
    difference = b.mean - a.mean
    squares = [arm.sd**2 / arm.n for arm in (a, b)]
    if not sum(squares):
        return Welch(difference=difference, t=None, df=None, p=0.0 if difference else 1.0, interval=None)
    found = stats.ttest_ind_from_stats(b.mean, b.sd, b.n, a.mean, a.sd, a.n, equal_var=False)
    df = sum(squares) ** 2 / sum(square**2 / (arm.n - 1) for square, arm in zip(squares, (a, b), strict=True))
    reach = math.sqrt(sum(squares)) * float(stats.t.ppf((1 + confidence) / 2, df))
    return Welch(
        difference=difference,
        t=float(found.statistic),
        df=df,
        p=float(found.pvalue),
        interval=Interval(
            low=difference - reach,
            high=difference + reach,
            confidence=confidence,
            words="Welch's t on run means",
        ),
    )
