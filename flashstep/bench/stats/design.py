"""Designs: in which order arms run, how far an order leaves time in the difference, and what a design can find at all.

Takes names, counts and spreads. Knows no measurement.
"""

import functools
import math
from collections.abc import Hashable, Sequence

from scipy import optimize, stats


def order(arms: Sequence[str], *, rounds: int) -> list[tuple[int, str]]:
    """(round, arm) in the order to run: A B, B A, A B, ... (E23); with a control A B C, C B A, ...

    A drift that is linear in time cancels over every two rounds. ``ValueError`` for an odd number, where it would not.
    """
    if rounds < 2 or rounds % 2:
        raise ValueError(f"{rounds} rounds; an even number is balanced (A B B A)")
    return [(r, arm) for r in range(rounds) for arm in (arms if r % 2 == 0 else arms[::-1])]


def separation(labels: Sequence[Hashable], first: Hashable, second: Hashable) -> float:
    """Of runs in order of time: +1 where all of ``first`` ran before all of ``second``, -1 the other way, 0 for A B B A.

    It is the rank-biserial correlation of arm and time: what share of all pairs of runs a drift pushes the same way.
    """
    ours = [place for place, label in enumerate(labels) if label == first]
    theirs = [place for place, label in enumerate(labels) if label == second]
    pairs = [1 if one < other else -1 for one in ours for other in theirs]
    return sum(pairs) / len(pairs) if pairs else 0.0


def smallest_p(blocks: Sequence[tuple[int, int]]) -> float:
    """The least two-sided p of exchanging labels within blocks of (runs of A, runs of B): 2/70 for one of 4 and 4 (E27)."""
    return min(2 / math.prod(math.comb(a + b, a) for a, b in blocks), 1.0)


def fewest_rounds(alpha: float) -> int:
    """The least even number of paired rounds with which the sign-flip can reach ``alpha``: 6 for 0.05."""
    rounds = max(math.ceil(1 - math.log2(alpha)), 2)
    return rounds + rounds % 2


def fewest_runs(alpha: float) -> int:
    """The least even number of runs an arm with which exchanging all runs can reach ``alpha``: 4 for 0.05 (2/70)."""
    runs = 2
    while smallest_p([(runs, runs)]) > alpha:
        runs += 2
    return runs


def power(effect: float, *, sd: float, n: int, alpha: float) -> float:
    """Chance that a two-sided paired t test of ``n`` differences with spread ``sd`` finds a mean difference of ``effect``.

    By the noncentral F, which t squared has: scipy's noncentral t is NaN in places (and its F is wrong at 0).
    """
    if effect == 0:
        return alpha
    reach = stats.t.ppf(1 - alpha / 2, n - 1)
    return float(stats.ncf.sf(reach**2, 1, n - 1, n * (effect / sd) ** 2))


def detectable(*, sd: float, n: int, alpha: float, chance: float = 0.8) -> float:
    """The mean difference that ``n`` paired differences with spread ``sd`` find with that ``chance``."""
    return sd * _spreads(n, alpha, chance)


@functools.cache
def _spreads(n: int, alpha: float, chance: float) -> float:
    """The same in units of the spread."""
    most = 4 * float(stats.t.ppf(1 - alpha / 2, n - 1)) + 10
    return float(optimize.brentq(lambda x: power(x, sd=1.0, n=n, alpha=alpha) - chance, 0.0, most))
