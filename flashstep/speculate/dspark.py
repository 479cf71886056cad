"""Proposing: one pass of the draft layers over a block, then the Markov chain token by token (spec/model.md 8.3, 8.4).

Takes the newest token of each request and what its draws depend on; gives a ``Proposal`` a request. Knows no plan, no rule of
acceptance. Suffixes: R requests, K draft slots, P drafts that are made, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from flashstep.config.speculative import DraftSampleMethod
from flashstep.model.batch import DraftBatch
from flashstep.model.dspark import DraftBlock, DraftModel
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
        tokens_R, positions_R = torch.tensor(
            [[anchor.token, anchor.position] for anchor in anchors], device=device
        ).unbind(1)
        block = self._model.propose(
            DraftBatch(
                anchor_R=tokens_R.contiguous(),
                position_R=positions_R.contiguous(),
                window_table_RB=window_table_RB,
                window_start_R=window_start_R,
            )
        )
        if self._method is DraftSampleMethod.PROBABILISTIC:
            return self._drawn(block, anchors, tokens_R, count=count)
        drafts_RP = self._model.chain(block, tokens_R, places=count)
        confidences_RP = self._model.confidences(block, tokens_R, drafts_RP)
        return [
            Proposal(tokens=tuple(ids), confidences=tuple(sure))
            for ids, sure in zip(drafts_RP.tolist(), confidences_RP.tolist(), strict=True)
        ]

    def _drawn(
        self, block: DraftBlock, anchors: Sequence[Anchor], tokens_R: Tensor, *, count: int
    ) -> list[Proposal]:
        """Drafts drawn at the requests' temperatures, with the logits they were drawn from; the best ones at temperature 0."""
        device = tokens_R.device
        temperatures_R = torch.tensor([a.temperature for a in anchors], dtype=torch.float64, device=device)
        seeds_R = torch.tensor([anchor.seed for anchor in anchors], device=device)
        positions_R = torch.tensor([anchor.output_position for anchor in anchors], device=device)
        tokens: list[Tensor] = []
        logits: list[Tensor] = []
        previous_R = tokens_R
        for place in range(count):  # the block is always run whole: its width is part of the attention
            _, bias_RV = self._model.markov(previous_R)
            logits_RV = block.logits_RKV[:, place] + bias_RV
            previous_R = draw_drafts(
                logits_RV, temperatures_R, seeds_R=seeds_R, positions_R=positions_R, offset=place
            )
            tokens.append(previous_R)
            logits.append(logits_RV)
        drafts_RP = torch.stack(tokens, dim=1)
        confidences_RP = self._model.confidences(block, tokens_R, drafts_RP)
        rows = zip(
            anchors, drafts_RP.tolist(), confidences_RP.tolist(), torch.stack(logits, dim=1), strict=True
        )
        return [
            Proposal(
                tokens=tuple(ids),
                confidences=tuple(sure),
                logits_KV=logits_KV if anchor.temperature > 0 else None,
            )
            for anchor, ids, sure, logits_KV in rows
        ]
