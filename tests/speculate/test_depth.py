"""The budget of drafts: against every possible choice, and the edges of the cost table."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashstep.speculate.depth import CostCurve, CostTable, choose, survivals

FLAT = CostCurve.measured([(1, 1.0)])  # in proportion to the rows


def table(*points: tuple[int, float], draft: float = 0.0) -> CostTable:
    """A table whose drafting costs ``draft`` seconds at any batch size up to 64."""
    return CostTable(
        verify=CostCurve.measured(points),
        draft=CostCurve.measured([(1, draft or 1e-12), (64, draft or 1e-12)]),
    )


def rate_of(
    depths: tuple[int, ...], rows: list[tuple[float, ...]], costs: CostTable, *, other_rows: int
) -> float:
    """Expected tokens a second when request r verifies its first depths[r] drafts."""
    expected = len(rows) + sum(sum(row[:depth]) for row, depth in zip(rows, depths, strict=True))
    return expected / (costs.draft.cost(len(rows)) + costs.verify.cost(other_rows + sum(depths)))


def test_survivals() -> None:
    assert survivals([0.5, 0.5, 1.0, 0.0, 0.9]) == (0.5, 0.25, 0.25, 0.0, 0.0)
    assert survivals([]) == ()


confidence = st.sampled_from([0.0, 0.1, 0.3, 0.5, 0.8, 0.95, 1.0])
measured = st.lists(
    st.tuples(st.integers(1, 24), st.floats(0.01, 5.0)),
    min_size=1,
    max_size=5,
    unique_by=lambda point: point[0],
)


@settings(max_examples=200, deadline=None)
@given(
    confidences=st.lists(st.lists(confidence, max_size=3), min_size=1, max_size=4),
    verify=measured,
    draft=measured,
    prefill=st.integers(0, 6),
)
def test_no_choice_is_better(confidences: list[list[float]], verify: list, draft: list, prefill: int) -> None:
    """Of all combinations of prefixes, none gives more tokens a second."""
    rows = [survivals(row) for row in confidences]
    costs = CostTable(verify=CostCurve.measured(verify), draft=CostCurve.measured(draft))
    other_rows = len(rows) + prefill
    chosen = tuple(choose(rows, costs, other_rows=other_rows))
    every = itertools.product(*(range(len(row) + 1) for row in rows))
    best = max(rate_of(depths, rows, costs, other_rows=other_rows) for depths in every)
    assert rate_of(chosen, rows, costs, other_rows=other_rows) == pytest.approx(best, rel=1e-12)


def test_verifies_what_pays() -> None:
    """Rows at 1 s each: a draft that stands less often than one in (seconds a token) costs more than it brings."""
    costs = CostTable(verify=CostCurve.measured([(rows, 4.0 + rows) for rows in range(1, 40)]), draft=FLAT)
    # R = 2: drafting 2 s, verifying 6 s with no draft: 4 s a token at first
    assert choose([(0.9, 0.8, 0.1), (0.2, 0.1, 0.1)], costs, other_rows=2) == [2, 0]


def test_free_rows_are_all_used() -> None:
    """Where the next measured size is paid anyway, every draft that fits into it is verified, the likely ones first."""
    costs = table((4, 1.0), (16, 9.0))
    assert choose([(0.3, 0.2), (0.9, 0.01)], costs, other_rows=2) == [1, 1]
    assert choose([(0.3, 0.2), (0.1, 0.01)], costs, other_rows=2) == [2, 0]


def test_rows_of_prompts_count() -> None:
    """Prompt rows fill the size up: nothing is left for drafts; with none there are two."""
    costs = table((4, 1.0), (16, 9.0))
    assert choose([(0.9, 0.8)], costs, other_rows=4) == [0]
    assert choose([(0.9, 0.8)], costs, other_rows=2) == [2]


def test_ties_are_decided_the_same_way() -> None:
    costs = table((5, 1.0), (6, 100.0))
    assert choose([(0.5, 0.5), (0.5, 0.5)], costs, other_rows=2) == [
        2,
        1,
    ]  # the nearer ones, then the earlier request
    assert choose([(0.0, 0.0)], costs, other_rows=1) == [0]  # no draft for nothing
    assert choose([(), (0.5,)], costs, other_rows=2) == [0, 1]
    assert choose([], costs, other_rows=0) == []
    assert choose([], costs, other_rows=9) == []


def test_drafting_is_paid_for() -> None:
    """The dearer the drafting, the more drafts are worth verifying: its cost is spread over them."""
    confidences = [survivals([0.6] * 5)]
    points = [(rows, 1.0 + 0.5 * rows) for rows in range(1, 10)]
    depths = [choose(confidences, table(*points, draft=cost), other_rows=1)[0] for cost in (0.0, 1.0, 10.0)]
    assert depths == sorted(depths) and depths[0] < depths[-1]


def test_cost_curve() -> None:
    curve = CostCurve.measured([(8, 3.0), (1, 1.0), (4, 0.5)])
    assert curve.seconds == (1.0, 1.0, 3.0)  # more rows are never cheaper
    assert [curve.cost(rows) for rows in (0, 1, 2, 4, 5, 8)] == [0.0, 1.0, 1.0, 1.0, 3.0, 3.0]
    assert curve.cost(15) == pytest.approx(3.0 + 7 * 2.0 / 7)
    assert CostCurve.measured([(4, 2.0)]).cost(6) == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("points", "sentence"),
    [
        ([], "no cost was measured"),
        ([(0, 1.0)], "rows are at least 1"),
        ([(1, 0.0)], "above 0"),
        ([(1, math.nan)], "finite"),
        ([(1, math.inf)], "finite"),
        ([(1, 1.0), (1, 2.0)], "1 rows were measured twice"),
    ],
)
def test_costs_that_cannot_be(points: list, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        CostCurve.measured(points)


def test_survivals_must_decrease() -> None:
    with pytest.raises(AssertionError):
        choose([(0.5, 0.6)], table((1, 1.0)), other_rows=1)
