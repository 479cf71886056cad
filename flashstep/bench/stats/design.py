"""Designs: in which order arms run, how far an order leaves time in the difference, and the least p of a design.

Takes names and counts. Knows no measurement.
"""

import math
from collections.abc import Hashable, Sequence

# of places, round by round. Three arms: all six orders, each next to its reverse. Each arm stands in each place twice, each one
# follows each other twice within rounds, and what a round leaves to the next falls on A and B alike.
ORDERS = {2: ((0, 1), (1, 0)), 3: ((0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 2, 0), (2, 0, 1), (1, 0, 2))}


def order(arms: Sequence[str], *, rounds: int) -> list[tuple[int, str]]:
    """(round, arm) in the order to run: A B, B A, A B, ... (E23); with a control all six orders of three.

    A drift that is linear in time cancels over every two rounds, what a run leaves to the next over all orders. ``ValueError``
    for a number of rounds that does not hold all orders equally often.
    """
    if len(arms) not in ORDERS:
        raise ValueError(f"{len(arms)} arms; there are two, or three with a control")
    orders = ORDERS[len(arms)]
    if rounds < 1 or rounds % len(orders):
        raise ValueError(
            f"{rounds} rounds; {len(arms)} arms are balanced in {len(orders)}, {2 * len(orders)}, {3 * len(orders)}, ... rounds"
        )
    return [(r, arms[place]) for r in range(rounds) for place in orders[r % len(orders)]]


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


def fewest_rounds(alpha: float, *, arms: int = 2) -> int:
    """The least balanced number of paired rounds with which the sign-flip can reach ``alpha``: 6 for 0.05."""
    return balanced(math.ceil(1 - math.log2(alpha)), arms=arms)


def balanced(rounds: int, *, arms: int) -> int:
    """The least number that holds all orders of ``arms`` equally often, and not less than ``rounds``."""
    return math.ceil(rounds / len(ORDERS[arms])) * len(ORDERS[arms])


def fewest_runs(alpha: float) -> int:
    """The least even number of runs an arm with which exchanging all runs can reach ``alpha``: 4 for 0.05 (2/70)."""
    runs = 2
    while smallest_p([(runs, runs)]) > alpha:
        runs += 2
    return runs
