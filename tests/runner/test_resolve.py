"""Which drafts a step verifies: drawn ones do not decide it by what they are, and a grammar cuts only what may be cut."""

from collections.abc import Sequence

import pytest
import torch

from flashstep.request import Request, SamplingParams
from flashstep.runner.histories import History, Slots
from flashstep.runner.resolve import Resolved, adapt, resolve
from flashstep.speculate.depth import CostCurve, CostTable
from flashstep.speculate.dspark import Proposal
from flashstep.step import Admission, Span

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


class OnlySmall:
    """A grammar that lets tokens below 5 through."""

    def keep(self, drafts: Sequence[int]) -> int:
        return next((place for place, token in enumerate(drafts) if token >= 5), len(drafts))


@pytest.mark.parametrize(
    ("drawn", "by_ratio", "kept"),
    [(False, True, (4,)), (True, True, (4, 5)), (True, False, (4,))],
    ids=["proposed", "drawn", "drawn, accepted by lot"],
)
def test_a_forbidden_draft_is_kept_only_to_be_rejected(
    drawn: bool, by_ratio: bool, kept: tuple[int, ...]
) -> None:
    slots = Slots(1, max_model_len=32, block_size=4)
    history = History(
        request=Request(id="r", prompt=(1, 2), params=SamplingParams(max_tokens=9)),
        output=[3],
        matcher=OnlySmall(),
        proposal=Proposal(
            tokens=(4, 5, 4), confidences=(0.5,) * 3, logits_KV=torch.zeros(3, 8) if drawn else None
        ),
    )
    slots.take(Admission(request_id="r", slot=0, computed=0), history)
    span = Span(slot=0, start=7, length=4, sample=True, drafts=3)
    resolved = resolve(span, slots, max_model_len=32, by_ratio=by_ratio)
    assert resolved is not None and resolved.drafts == kept
    assert resolved.cut == 3 - len(kept), "what is cut was drafted in vain, and is counted"
    assert (resolved.span.start, resolved.span.length, resolved.span.drafts) == (2, 1 + len(kept), len(kept))
