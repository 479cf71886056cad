"""Orders that cancel drift and carry-over, and the least p of a design."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from flashstep.bench.stats.design import (
    fewest_rounds,
    fewest_runs,
    order,
    separation,
    smallest_p,
)
from flashstep.bench.stats.paired import exchange


@pytest.mark.parametrize("arms", [("A", "B"), ("A", "B", "C")])
def test_a_linear_drift_cancels(arms: tuple[str, ...]) -> None:
    """Also over every two rounds; and each arm stands first in as many."""
    plan = order(arms, rounds=6)
    for begin in (0, 2, 4):
        part = [arm for r, arm in plan if begin <= r < begin + 2]
        assert len({np.mean([place for place, name in enumerate(part) if name == arm]) for arm in arms}) == 1
        assert separation(part, "A", "B") == 0
    first = [arm for (r, arm), (before, _) in zip(plan[1:], plan, strict=False) if r != before] + [plan[0][1]]
    assert {first.count(arm) for arm in arms} == {6 // len(arms)}


def test_what_a_run_leaves_to_the_next_falls_on_all_arms_alike() -> None:
    """Within rounds each arm follows each other equally often; from round to round A and B follow the control equally often."""
    plan = order(["A", "B", "C"], rounds=6)
    within = Counter((one, other) for (r, one), (s, other) in pairwise(plan) if r == s)
    assert len(within) == 6 and set(within.values()) == {2}
    whole = Counter((one, other) for (_, one), (_, other) in pairwise(plan))
    assert whole["C", "A"] == whole["C", "B"] and whole["B", "A"] == whole["A", "B"]


@pytest.mark.parametrize(
    ("arms", "rounds", "said"),
    [("AB", 5, "2, 4, 6"), ("ABC", 8, "6, 12, 18"), ("ABCD", 6, "4 arms; there are two")],
)
def test_rounds_that_are_not_balanced(arms: str, rounds: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        order(arms, rounds=rounds)


@pytest.mark.parametrize(("runs", "expected"), [("AABB", 1), ("BBBAAA", -1), ("ABBA", 0), ("ABAB", 0.5)])
def test_separation(runs: str, expected: float) -> None:
    assert separation(runs, "A", "B") == expected


def test_the_least_p_is_what_the_test_gives_at_most() -> None:
    assert smallest_p([(4, 4)]) == 2 / 70 and smallest_p([(2, 2), (1, 1), (1, 1)]) == 2 / 24
    assert smallest_p([(1, 0)]) == 1
    assert (fewest_rounds(0.05), fewest_rounds(0.01), fewest_runs(0.05)) == (6, 8, 4)
    assert (fewest_rounds(0.05, arms=3), fewest_rounds(0.01, arms=3)) == (6, 12)
    for alpha in (0.1, 0.05, 0.01, 0.001):
        rounds = fewest_rounds(alpha)
        far = exchange(np.zeros(rounds), np.arange(1, rounds + 1), range(rounds), range(rounds))
        assert far.tested.p == smallest_p([(1, 1)] * rounds) <= alpha < smallest_p([(1, 1)] * (rounds - 2))
