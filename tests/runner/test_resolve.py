"""How deep a step verifies: drawn drafts do not decide it by what they are."""

import torch

from flashstep.request import Request, SamplingParams
from flashstep.runner.histories import History
from flashstep.runner.resolve import Resolved, adapt
from flashstep.speculate.depth import CostCurve, CostTable
from flashstep.speculate.dspark import Proposal
from flashstep.step import Span

COSTS = CostTable(
    verify=CostCurve.measured([(1, 1.0), (2, 1.6), (3, 3.0), (4, 3.1)]), draft=CostCurve.measured([(1, 0.1)])
)


def depth(confidences: tuple[float, ...], *, drawn: bool, foreseen: tuple[float, ...] = ()) -> int:
    """Drafts that one request verifies."""
    history = History(
        request=Request(id="r", prompt=(1, 2), params=SamplingParams(max_tokens=9)),
        output=[3],
        proposal=Proposal(
            tokens=(4, 5, 6), confidences=confidences, logits_KV=torch.zeros(3, 8) if drawn else None
        ),
        foreseen=foreseen,
    )
    span = Span(slot=0, start=2, length=4, sample=True, drafts=3)
    (resolved,) = adapt([Resolved(span=span, history=history, drafts=(4, 5, 6))], COSTS)
    return len(resolved.drafts)


def test_confidences_decide_about_proposed_drafts_only() -> None:
    every = [(0.9, second, third) for second in (0.1, 1.0) for third in (0.1, 1.0)]
    assert {depth(row, drawn=False) for row in every} == {1, 3}
    assert {depth(row, drawn=True) for row in every} == {3}  # a new request: ones
    assert {depth(row, drawn=True, foreseen=(0.9, 0.1, 0.1)) for row in every} == {1}
