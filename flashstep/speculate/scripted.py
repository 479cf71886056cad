"""Drafters whose drafts somebody decides on: ``flashstep check`` and tests put them where the draft model's proposer stands.

``Scripted`` proposes what a function says, ``Watched`` what another drafter does, and keeps a record.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from flashstep.speculate.dspark import Anchor, Drafter, Proposal

NextDrafts = Callable[
    [Anchor, int], Sequence[int]
]  # an anchor and how many are wanted -> at most so many drafts


class Scripted:
    """Point masses of a function's choice."""

    def __init__(self, next_drafts: NextDrafts) -> None:
        self._next_drafts = next_drafts

    def propose(
        self, anchors: Sequence[Anchor], *, window_table_RB: Tensor, window_start_R: Tensor, count: int
    ) -> list[Proposal]:
        """As ``dspark.Proposer.propose``."""
        found = [tuple(self._next_drafts(anchor, count)) for anchor in anchors]
        return [Proposal(tokens=tokens, confidences=(0.5,) * len(tokens)) for tokens in found]


class Watched:
    """Another drafter's proposals, with the anchors they were made behind in ``seen``."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.seen: list[tuple[Anchor, Proposal]] = []

    def propose(
        self, anchors: Sequence[Anchor], *, window_table_RB: Tensor, window_start_R: Tensor, count: int
    ) -> list[Proposal]:
        """As ``dspark.Proposer.propose``."""
        proposals = self._drafter.propose(
            anchors, window_table_RB=window_table_RB, window_start_R=window_start_R, count=count
        )
        self.seen += zip(anchors, proposals, strict=True)
        return proposals
