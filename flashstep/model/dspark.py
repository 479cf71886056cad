"""The DSpark draft (spec/model.md 8.1 to 8.4): a few layers that guess the next tokens from the target's inner states.

``remember`` leaves a record of each row of the target in the draft layers' windows, which are paged like any other layer's;
``propose`` runs one block of places at once and gives each place's logits, ``markov`` and ``confidence`` what one token more
adds to them. Knows no sampling: who walks the block chooses its tokens.
Suffixes: T rows, R requests (one block each), K places of a block, D width, F features, S draft layers, L query latent,
C head channels, M Markov rank, V vocabulary.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flashstep.cache.pool import CachePool, WindowView
from flashstep.config.model import ModelConfig
from flashstep.kernels import Ops
from flashstep.kernels.attention import BlockRows
from flashstep.kernels.mhc import Hidden
from flashstep.model.attention import Projections
from flashstep.model.batch import DraftBatch
from flashstep.model.block import Block, State
from flashstep.model.embedding import Embedding
from flashstep.model.indexer import Selection
from flashstep.model.linear import Linear8, LinearF
from flashstep.model.mhc import Exit, Streams
from flashstep.model.moe import MoE
from flashstep.model.parameters import Parameters
from flashstep.model.rope import window_frequencies
from flashstep.model.routing import Taps
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
        self._attention = ops.attention

    def publish(self, hidden: Hidden, rows: DraftRows) -> tuple[Any, Tensor]:
        """-> the query latent [T, L], quantised, and the keys bf16 [T, C]. The block leaves nothing behind."""
        return self._projections.latent_and_key(hidden, rows.rotation)

    def attend(
        self,
        hidden: Hidden,
        latent: tuple[Any, Tensor],
        rows: DraftRows,
        selection: Selection | None,
    ) -> tuple[Tensor, Selection | None]:
        """-> output [T, D]; there is no selection."""
        p, blocks = self._projections, (rows.attention.position_R.shape[0], -1)
        quantised, k_TC = latent
        cos_TP, sin_TP = rows.rotation
        o_RKHC = self._attention.attend_block(
            p.queries(quantised)[0].unflatten(0, blocks),
            k_TC.unflatten(0, blocks),
            cos_TP=cos_TP,
            sin_TP=sin_TP,
            window=p.window.planes,
            rows=rows.attention,
            width=p.width,
            sink_H=p.sink_H,
        )
        return p.output(o_RKHC.flatten(0, 1)), selection


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
        taps: Taps | None = None,
    ) -> None:
        stages = config.num_nextn_predict_layers
        assert stages, "the model has no draft layers"
        last = f"{DRAFT}{stages - 1}"
        self.width = config.dspark_block_size  # places of a block, however few of them are wanted
        self._taps = taps
        self._noise = config.dspark_noise_token_id
        self._frequencies = window_frequencies(config).to(pool.device)
        self._norm_rope, self._fused, self._sampling = ops.norm_rope, ops.fused, ops.sampling
        self._main = Linear8(parameters, f"{DRAFT}0.main_proj", ops=ops)
        self._main_norm_weight = parameters.plain(f"{DRAFT}0.main_norm.weight")
        self._eps = config.rms_norm_eps
        prefixes = [f"{DRAFT}{stage}.attn" for stage in range(stages)]
        windows = [pool.window(config.num_hidden_layers + stage) for stage in range(stages)]
        layers = parameters.again()  # their own products and norms are the attentions'
        self._wkv = Linear8(layers, *(f"{prefix}.wkv" for prefix in prefixes), ops=ops)
        self._key_weight_SC = torch.stack([layers.plain(f"{prefix}.kv_norm.weight") for prefix in prefixes])
        self._planes = [window.planes for window in windows]
        self._blocks = [
            Block(
                config,
                parameters,
                f"{DRAFT}{stage}",
                ops=ops,
                attention=DraftAttention(config, parameters, prefix, ops=ops, window=window),
                moe=MoE(
                    config,
                    parameters,
                    f"{DRAFT}{stage}.ffn",
                    ops=ops,
                    experts_per_token=config.dspark_num_experts_per_tok,
                    tap=None if taps is None else partial(taps.tap, stage),
                ),
            )
            for stage, (prefix, window) in enumerate(zip(prefixes, windows, strict=True))
        ]
        self._embedding = embedding
        self._exit = Exit(config, parameters, f"{last}.norm", ops=ops)
        self._head = head
        self._markov_embedding = parameters.plain(f"{last}.markov_head.embed.weight")
        self._markov = LinearF(parameters, f"{last}.markov_head.head", ops=ops)
        self._confidence = LinearF(parameters, f"{last}.confidence_head.proj", ops=ops)

    def remember(self, features_TF: Tensor, rows: Rows) -> None:
        """bf16 [T, F] features of the target's ``rows`` -> a context record of each in every draft layer.

        Also of rows that are rejected later: nobody reads past the newest token, and its row is written again.
        """
        context = self._fused.norm_quantise(self._main(features_TF), self._main_norm_weight, eps=self._eps)
        self._store(self._wkv.product(context), rows)

    def _store(self, keys_TX: Tensor, rows: Rows) -> None:
        """bf16 [T, S * C], the product of each layer's wkv with a context, side by side -> a record of each."""
        cos_TP, sin_TP = rows.window_rotation
        self._fused.store_contexts(
            keys_TX,
            self._key_weight_SC,
            eps=self._eps,
            cos_TP=cos_TP,
            sin_TP=sin_TP,
            planes=self._planes,
            slot_T=rows.window_slot_T,
        )

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
        if self._taps is not None:
            counted_R = batch.counted_R
            self._taps.begin(
                None if counted_R is None else counted_R.unsqueeze(1).expand(-1, width).flatten()
            )
        state = State(streams=self._embedding(ids_RK.flatten()))
        for block in self._blocks:
            state = block.forward(state, rows)
        assert isinstance(state.streams, Streams), "a draft has layers"
        hidden_TD, normed_TD = self._exit(state.streams)
        return DraftBlock(
            logits_RKV=self._head(normed_TD).unflatten(0, (count, width)),
            hidden_RKD=hidden_TD.unflatten(0, (count, width)),
        )

    def markov(self, previous_R: Tensor) -> tuple[Tensor, Tensor]:
        """int64 [R], the token before a place -> its embedding bf16 [R, M], and the bias on the place's logits, fp32 [R, V]."""
        embedding_RM = self._markov_embedding[previous_R]
        return embedding_RM, self._markov(embedding_RM)

    def chain(self, block: DraftBlock, anchor_R: Tensor, *, places: int) -> Tensor:
        """The best token of each of the first ``places`` places of ``block``, one after the other, int64 [R, places]."""
        return self._sampling.chain(
            block.logits_RKV,
            anchor_R=anchor_R,
            embedding_VM=self._markov_embedding,
            weight=self._markov.weight,
            places=places,
        )

    def confidences(self, block: DraftBlock, anchor_R: Tensor, drafts_RP: Tensor) -> Tensor:
        """The chance of each of a chain's drafts to be accepted if those before it are, fp32 [R, P]."""
        before_RP = torch.cat((anchor_R.unsqueeze(1), drafts_RP[:, :-1]), dim=1)
        embedding_RPM = self._markov_embedding[before_RP]
        places = range(drafts_RP.shape[1])
        sure = [self.confidence(block.hidden_RKD[:, place], embedding_RPM[:, place]) for place in places]
        return torch.stack(sure, dim=1)

    def confidence(self, hidden_RD: Tensor, embedding_RM: Tensor) -> Tensor:
        """bf16 [R, D] and [R, M] of a place -> fp32 [R]: the chance that its draft is accepted, if those before it are."""
        logit_R1 = self._confidence(torch.cat((hidden_RD, embedding_RM), dim=1))
        # in float64: fp32's sigmoid differs between a vector's lanes and its rest, and so with the batch
        return torch.sigmoid(logit_R1.squeeze(1).double()).float()
