"""Bounds to rows: what each span of a plan turns out to be, now that the step before has run.

A decode span begins at the request's newest token and takes of the request's proposal what the plan, the request's room and its
grammar allow. Knows no tensors.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from flashstep.runner.histories import History, Slots
from flashstep.speculate.depth import CostTable, choose, survivals
from flashstep.step import Span


@dataclass(frozen=True, kw_only=True, slots=True)
class Resolved:
    """A span with exact numbers, and the drafts that are its last rows (``span.drafts`` counts them).

    ``cut`` drafts more were proposed and fell to the grammar: rejected without a row.
    """

    span: Span
    history: History
    drafts: tuple[int, ...] = ()
    cut: int = 0

    def tokens(self, start: int) -> list[int]:
        """Token ids at positions ``start ..`` to the span's end."""
        end = self.span.start + self.span.length - len(self.drafts)
        return [*self.history.tokens(start, end), *self.drafts]

    def trimmed(self, count: int) -> "Resolved":
        """The same with at most ``count`` drafts."""
        if count >= len(self.drafts):
            return self
        span = msgspec.structs.replace(
            self.span, length=self.span.length - len(self.drafts) + count, drafts=count
        )
        return Resolved(span=span, history=self.history, drafts=self.drafts[:count])


def resolve(span: Span, slots: Slots, *, max_model_len: int, by_ratio: bool = False) -> Resolved | None:
    """The rows of ``span``; None if it has none, because its request has all the tokens it may have.

    ``by_ratio``: drawn drafts are judged by a ratio test (and not by lot).
    """
    history = slots.holder(span.slot)
    if span.drafts is None:
        return Resolved(span=span, history=history)
    room = history.room(max_model_len)
    if room == 0:
        return None
    drafts: tuple[int, ...] = ()
    cut = 0
    if span.drafts and history.proposal is not None:
        drafts = history.proposal.tokens[: min(span.drafts, room - 1)]
        proposed = len(drafts)
        drafts = drafts[: _kept(history, drafts, by_ratio=by_ratio)]
        cut = proposed - len(drafts)
    exact = msgspec.structs.replace(
        span, start=history.length - 1, length=1 + len(drafts), drafts=len(drafts)
    )
    assert exact.start <= span.start, (exact, span)
    return Resolved(span=exact, history=history, drafts=drafts, cut=cut)


def _kept(history: History, drafts: Sequence[int], *, by_ratio: bool) -> int:
    """How many of ``drafts`` are worth a row: those that the grammar allows.

    A drawn draft that it forbids has p = 0 and must be seen to be REJECTED by the ratio test, or the token in its place would
    come from p, not from what p leaves of q; so it is kept, as the last one.
    """
    if history.matcher is None or not drafts:
        return len(drafts)
    assert history.proposal is not None
    kept = history.matcher.keep(drafts)
    drawn = by_ratio and history.proposal.logits_KV is not None
    return min(kept + 1, len(drafts)) if drawn else kept


def adapt(resolved: Sequence[Resolved], costs: CostTable) -> list[Resolved]:
    """Cut the drafts of a step to what is worth verifying (spec/model.md 8.7): the likeliest over all requests.

    How many that is, drawn drafts must not decide themselves (see ``choose``): their last survivals stand for them.
    """
    drafted = [index for index, item in enumerate(resolved) if item.drafts]
    if not drafted:
        return list(resolved)
    chances, foreseen = [], []
    for index in drafted:
        history = resolved[index].history
        proposal = history.proposal
        assert proposal is not None
        chances.append(survivals(proposal.confidences[: len(resolved[index].drafts)]))
        drawn = proposal.logits_KV is not None
        foreseen.append((history.foreseen or (1.0,) * len(proposal.tokens)) if drawn else chances[-1])
    other_rows = sum(item.span.length - len(item.drafts) for item in resolved)
    counts = choose(chances, costs, other_rows=other_rows, foreseen=foreseen)
    result = list(resolved)
    for index, count in zip(drafted, counts, strict=True):
        result[index] = resolved[index].trimmed(count)
    return result
