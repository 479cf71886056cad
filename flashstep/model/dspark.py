"""The DSpark draft (spec/model.md 8.1 to 8.4): a few layers that guess the next tokens from the target's inner states.

``remember`` leaves a record of each row of the target in the draft layers' windows, which are paged like any other layer's;
``propose`` runs one block of places at once and gives each place's logits, ``markov`` and ``confidence`` what one token more
adds to them. Knows no sampling: who walks the block chooses its tokens.
Suffixes: T rows, R requests (one block each), K places of a block, D width, F features, L query latent, C head channels,
M Markov rank, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashstep.cache.pool import CachePool, WindowView
from flashstep.config.model import ModelConfig
from flashstep.kernels import Ops
from flashstep.kernels.attention import BlockRows
from flashstep.model.attention import Projections
from flashstep.model.batch import DraftBatch
from flashstep.model.block import Block, State
from flashstep.model.embedding import Embedding, Head
from flashstep.model.indexer import Selection
from flashstep.model.linear import Linear8, LinearF, Norm
from flashstep.model.parameters import Parameters
from flashstep.model.rope import window_frequencies
from flashstep.model.rows import Rotation, Rows

DRAFT = "mtp."  # how the draft's released names begin


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftBlock:
    """What a draft pass says of each place: place i is about the token at position n + i + 1.

    logits_RKV   fp32  before the Markov head's bias
    hidden_RKD   bf16  the state that the confidence head reads, before the last norm
    """

    logits_RKV: Tensor
    hidden_RKD: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftRows:
    """The rows of a draft pass: R blocks of K places, one block after the other; rotation tables fp32 of all R * K."""

    attention: BlockRows
    rotation: Rotation


class DraftAttention:
    """Reads the context that the target left, and the whole block, whichever place asks."""

    def __init__(
        self, config: ModelConfig, parameters: Parameters, prefix: str, *, ops: Ops, window: WindowView
    ) -> None:
        self._projections = Projections(config, parameters, prefix, ops=ops, window=window)
        self._wq_a = Linear8(parameters, f"{prefix}.wq_a", ops=ops)
        self._wkv = Linear8(parameters, f"{prefix}.wkv", ops=ops)
        self._attention = ops.attention

    def remember(self, context: Any, rows: Rows) -> None:
        """Write the context record of each of the target's rows; ``context`` is [T, D], quantised, the same for all layers."""
        self._projections.store(self._wkv.product(context), rows, rows.window_rotation)

    def publish(self, x_TD: Tensor, rows: DraftRows) -> Tensor:
        """-> the query latent [T, L]. The block leaves nothing behind."""
        return self._wq_a(x_TD)

    def attend(
        self, x_TD: Tensor, latent_TL: Tensor, rows: DraftRows, selection: Selection | None
    ) -> tuple[Tensor, Selection | None]:
        """-> output [T, D]; there is no selection."""
        p, blocks = self._projections, (rows.attention.position_R.shape[0], -1)
        q_THC = p.queries(p.latent(latent_TL), rows.rotation)
        k_TC = p.key(self._wkv(x_TD), rows.rotation)
        o_RKHC = self._attention.attend_block(
            q_THC.unflatten(0, blocks),
            k_TC.unflatten(0, blocks),
            window=p.window.planes,
            rows=rows.attention,
            width=p.width,
            sink_H=p.sink_H,
        )
        return p.output(o_RKHC.flatten(0, 1), rows.rotation), selection


class DraftModel:
    """The draft, complete when constructed; ``embedding`` and ``head`` are the target's.

    Draft layer i keeps its context in window layer num_hidden_layers + i of ``pool``.
    """

    def __init__(
        self,
        config: ModelConfig,
        parameters: Parameters,
        *,
        ops: Ops,
        pool: CachePool,
        embedding: Embedding,
        head: LinearF,
    ) -> None:
        stages, eps = config.num_nextn_predict_layers, config.rms_norm_eps
        assert stages, "the model has no draft layers"
        last = f"{DRAFT}{stages - 1}"
        self.width = config.dspark_block_size  # places of a block, however few of them are wanted
        self._noise = config.dspark_noise_token_id
        self._frequencies = window_frequencies(config).to(pool.device)
        self._norm_rope, self._mhc, self._gemm = ops.norm_rope, ops.mhc, ops.gemm
        self._main = Linear8(parameters, f"{DRAFT}0.main_proj", ops=ops)
        self._main_norm = Norm(parameters, f"{DRAFT}0.main_norm", eps=eps, ops=ops)
        self._attentions = [
            DraftAttention(
                config,
                parameters,
                f"{DRAFT}{stage}.attn",
                ops=ops,
                window=pool.window(config.num_hidden_layers + stage),
            )
            for stage in range(stages)
        ]
        self._blocks = [
            Block(
                config,
                parameters,
                f"{DRAFT}{stage}",
                ops=ops,
                attention=attention,
                experts_per_token=config.dspark_num_experts_per_tok,
            )
            for stage, attention in enumerate(self._attentions)
        ]
        self._embedding = embedding
        self._head = Head(Norm(parameters, f"{last}.norm", eps=eps, ops=ops), head)
        self._markov_embedding = parameters.plain(f"{last}.markov_head.embed.weight")
        self._markov = LinearF(parameters, f"{last}.markov_head.head", ops=ops)
        self._confidence = LinearF(parameters, f"{last}.confidence_head.proj", ops=ops)

    def remember(self, features_TF: Tensor, rows: Rows) -> None:
        """bf16 [T, F] features of the target's ``rows`` -> a context record of each in every draft layer.

        Also of rows that are rejected later: nobody reads past the newest token, and its row is written again.
        """
        context = self._gemm.quantise_input(self._main_norm(self._main(features_TF)))
        for attention in self._attentions:
            attention.remember(context, rows)

    def propose(self, batch: DraftBatch) -> DraftBlock:
        """The anchors, each followed by noise, at positions n .. n + K - 1 through the draft layers."""
        count, width = batch.position_R.shape[0], self.width
        ids_RK = batch.anchor_R.new_full((count, width), self._noise)
        ids_RK[:, 0] = batch.anchor_R
        places = torch.arange(width, device=ids_RK.device)
        positions_RK = batch.position_R.unsqueeze(1) + places
        rows = DraftRows(
            attention=BlockRows(
                position_R=batch.position_R,
                window_table_RB=batch.window_table_RB,
                window_start_R=batch.window_start_R,
            ),
            rotation=self._norm_rope.angles(positions_RK.flatten(), self._frequencies),
        )
        state = State.first(self._embedding(ids_RK.flatten()))
        for block in self._blocks:
            state = block.forward(state, rows)
        hidden_TD = self._mhc.collapse(state.x_TSD, state.pre_TS)
        return DraftBlock(
            logits_RKV=self._head(hidden_TD).unflatten(0, (count, width)),
            hidden_RKD=hidden_TD.unflatten(0, (count, width)),
        )

    def markov(self, previous_R: Tensor) -> tuple[Tensor, Tensor]:
        """int64 [R], the token before a place -> its embedding bf16 [R, M], and the bias on the place's logits, fp32 [R, V]."""
        embedding_RM = self._markov_embedding[previous_R]
        return embedding_RM, self._markov(embedding_RM)

    def confidence(self, hidden_RD: Tensor, embedding_RM: Tensor) -> Tensor:
        """bf16 [R, D] and [R, M] of a place -> fp32 [R]: the chance that its draft is accepted, if those before it are."""
        logit_R1 = self._confidence(torch.cat((hidden_RD, embedding_RM), dim=1))
        # in float64: fp32's sigmoid differs between a vector's lanes and its rest, and so with the batch
        return torch.sigmoid(logit_R1.squeeze(1).double()).float()
