"""Proposing: one pass of the draft layers over a block, then the Markov chain token by token (spec/model.md 8.3, 8.4).

Takes the newest token of each request and what its draws depend on; gives a ``Proposal`` a request. Knows no plan, no rule of
acceptance. Suffixes: R requests, K draft slots, D width, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from flashstep.config.speculative import DraftSampleMethod
from flashstep.model.batch import DraftBatch
from flashstep.model.dspark import DraftModel
from flashstep.speculate.verify import draw_drafts


@dataclass(frozen=True, kw_only=True, slots=True)
class Anchor:
    """What drafts are proposed behind: a request's newest token, its position, and its number among the outputs (from 0)."""

    token: int
    position: int
    output_position: int
    seed: int
    temperature: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposal:
    """Drafts, and for each the estimated probability that it stands if those before it do.

    ``logits_KV`` fp32 are the draft's, before temperature, where the drafts were drawn from them; None: each is a point mass.
    """

    tokens: tuple[int, ...]
    confidences: tuple[float, ...]
    logits_KV: Tensor | None = None


class Drafter(Protocol):
    """Whoever proposes."""

    def propose(
        self, anchors: Sequence[Anchor], *, window_table_RB: Tensor, window_start_R: Tensor, count: int
    ) -> list[Proposal]:
        """At most ``count`` drafts for each of ``anchors``; the tables are those of their window records (``DraftBatch``)."""
        ...


class Proposer:
    """Drafts by the model's own draft layers."""

    def __init__(self, model: DraftModel, *, method: DraftSampleMethod) -> None:
        self._model = model
        self._method = method

    def propose(
        self, anchors: Sequence[Anchor], *, window_table_RB: Tensor, window_start_R: Tensor, count: int
    ) -> list[Proposal]:
        """``count`` drafts for each of ``anchors``, at most the draft model's width."""
        device = window_table_RB.device
        tokens_R = torch.tensor([anchor.token for anchor in anchors], device=device)
        block = self._model.propose(
            DraftBatch(
                anchor_R=tokens_R,
                position_R=torch.tensor([anchor.position for anchor in anchors], device=device),
                window_table_RB=window_table_RB,
                window_start_R=window_start_R,
            )
        )
        drawn = self._method is DraftSampleMethod.PROBABILISTIC
        temperatures_R = torch.tensor(
            [a.temperature if drawn else 0.0 for a in anchors], dtype=torch.float64, device=device
        )
        seeds_R = torch.tensor([anchor.seed for anchor in anchors], device=device)
        positions_R = torch.tensor([anchor.output_position for anchor in anchors], device=device)
        tokens: list[Tensor] = []
        confidences: list[Tensor] = []
        logits: list[Tensor] = []
        previous_R = tokens_R
        for slot in range(count):  # the block is always run whole: its width is part of the attention
            embedding_RM, bias_RV = self._model.markov(previous_R)
            logits_RV = block.logits_RKV[:, slot] + bias_RV
            previous_R = draw_drafts(
                logits_RV, temperatures_R, seeds_R=seeds_R, positions_R=positions_R, offset=slot
            )
            tokens.append(previous_R)
            confidences.append(self._model.confidence(block.hidden_RKD[:, slot], embedding_RM))
            logits.append(logits_RV)
        rows = zip(
            anchors,
            torch.stack(tokens, dim=1).tolist(),
            torch.stack(confidences, dim=1).tolist(),
            torch.stack(logits, dim=1),
            strict=True,
        )
        return [
            Proposal(
                tokens=tuple(ids),
                confidences=tuple(sure),
                logits_KV=logits_KV if drawn and anchor.temperature > 0 else None,
            )
            for anchor, ids, sure, logits_KV in rows
        ]
