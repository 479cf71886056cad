"""How many drafts are worth verifying: a budget over the batch, from the drafts' confidences and from what steps cost.

Takes confidences and a ``CostTable`` measured at start-up, gives drafts a request (spec/model.md 8.7). Knows no tensors and no
tokens; the smaller k at larger batches that a user may ask for is ``Speculation.depth``.
"""

import bisect
import itertools
import math
from collections.abc import Sequence

import msgspec


def survivals(confidences: Sequence[float]) -> tuple[float, ...]:
    """P(draft i stands), of one request: the running product of confidences, each P(stands | those before stand)."""
    return tuple(itertools.accumulate(confidences, lambda before, confidence: before * confidence))


class CostCurve(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds by rows, as measured at ``rows`` (ascending).

    In between the next measured size is paid for, as a captured graph of that size would run; beyond the last the cost grows with
    the line through the first and the last point, or in proportion where there is only one.
    """

    rows: tuple[int, ...]
    seconds: tuple[float, ...]

    @classmethod
    def measured(cls, points: Sequence[tuple[int, float]]) -> "CostCurve":
        """The curve of (rows, seconds) points in any order; ``ValueError`` if they cannot be costs.

        More rows never cost less: where a measurement says so it was noise, and the dearest smaller size counts.
        """
        problems = [
            f"a cost of {seconds} s was measured at {rows} rows; rows are at least 1, seconds finite and above 0"
            for rows, seconds in points
            if rows < 1 or not (math.isfinite(seconds) and seconds > 0)
        ]
        ordered = sorted(points)
        problems += [
            f"{before[0]} rows were measured twice"
            for before, after in itertools.pairwise(ordered)
            if before[0] == after[0]
        ]
        if not points:
            problems.append("no cost was measured")
        if problems:
            raise ValueError("; ".join(problems))
        return cls(
            rows=tuple(rows for rows, _ in ordered),
            seconds=tuple(itertools.accumulate((seconds for _, seconds in ordered), max)),
        )

    def cost(self, rows: int) -> float:
        """Seconds of a step of ``rows`` rows; 0 for none."""
        if rows == 0:
            return 0.0
        place = bisect.bisect_left(self.rows, rows)
        if place < len(self.rows):
            return self.seconds[place]
        first = (self.rows[0], self.seconds[0]) if len(self.rows) > 1 else (0, 0.0)
        slope = (self.seconds[-1] - first[1]) / (self.rows[-1] - first[0])
        return self.seconds[-1] + slope * (rows - self.rows[-1])


class CostTable(msgspec.Struct, frozen=True, kw_only=True):
    """What a step costs: ``verify`` by rows of the target, ``draft`` by requests that are drafted for."""

    verify: CostCurve
    draft: CostCurve


def choose(
    survivals_by_request: Sequence[Sequence[float]],
    table: CostTable,
    *,
    other_rows: int,
    foreseen: Sequence[Sequence[float]] | None = None,
) -> list[int]:
    """How many of its first drafts each request verifies: ``share`` of the ``budget``.

    Drafts that were DRAWN need ``foreseen``, survivals known before they were drawn (the last step's; ones for a new request),
    of which the budget is worked out: a budget that looks at the confidence behind a draft decides by what the draft is whether
    it is verified at all, and what then stands no longer follows the target. The ranking may use the present survivals, because
    that of a draft depends only on the drafts before it. Point masses stay exact either way.
    """
    known = survivals_by_request if foreseen is None else foreseen
    return share(survivals_by_request, budget=budget(known, table, other_rows=other_rows))


def budget(survivals_by_request: Sequence[Sequence[float]], table: CostTable, *, other_rows: int) -> int:
    """B, how many drafts a step verifies over all requests: where the expected tokens a second are most, the smaller of equals.

    With R requests and B drafts, R + (sum of the B largest survivals) tokens are expected in
    cost_draft[R] + cost_verify[T0 + B] seconds; ``other_rows`` is T0, every row that is no draft, the requests' newest tokens
    among them.
    """
    requests = len(survivals_by_request)
    assert other_rows >= requests
    drafting = table.draft.cost(requests)
    expected = float(requests)
    best_rate, best = -math.inf, 0
    largest_first = sorted(itertools.chain.from_iterable(survivals_by_request), reverse=True)
    for count, survival in enumerate([0.0, *largest_first]):
        assert 0 <= survival <= 1, "survivals are probabilities"
        expected += survival
        seconds = drafting + table.verify.cost(other_rows + count)
        rate = expected / seconds if seconds else 0.0
        if rate > best_rate:
            best_rate, best = rate, count
    return best


def share(survivals_by_request: Sequence[Sequence[float]], *, budget: int) -> list[int]:
    """Drafts a request, when the ``budget`` likeliest are verified: of equals the nearer to its newest token, then the earlier
    request's. A survival is never above the one before it, so every request verifies a prefix.
    """
    for row in survivals_by_request:
        assert all(later <= earlier for earlier, later in itertools.pairwise(row)), "survivals decrease"
    ranked = sorted(
        (-survival, place, request)
        for request, row in enumerate(survivals_by_request)
        for place, survival in enumerate(row)
    )
    depths = [0] * len(survivals_by_request)
    for _, _, request in ranked[:budget]:
        depths[request] += 1
    return depths
