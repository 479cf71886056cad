"""V4.1 as modules. Start reading here, then ``block``; the draft is ``dspark``.

Takes a ``ForwardBatch``, gives fp32 logits; caches are written on the way through the views that layers were built with.
Knows no request, schedule or checkpoint. Suffixes: T rows, S streams, D width, V vocabulary,
F features of the draft's target layers (others: ``batch``).

Weights come as a mapping by released name (spec/model.md 11), FP8 dense weights as ``QuantTensor`` under ``<name>.weight``, the
experts of a layer stacked as MXFP4 ``QuantTensor`` under ``layers.L.ffn.experts.{w1,w2,w3}``. Engram tables come apart, by layer.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from flashstep.cache.pool import CachePool
from flashstep.config.model import ModelConfig
from flashstep.engram.hash import EngramHash
from flashstep.kernels import Ops
from flashstep.model.attention import attention_of
from flashstep.model.batch import ForwardBatch
from flashstep.model.block import Block, State
from flashstep.model.dspark import DRAFT, DraftModel
from flashstep.model.embedding import Embedding, Head
from flashstep.model.engram import EngramInjection, RowTable
from flashstep.model.linear import LinearF, Norm
from flashstep.model.parameters import Parameters
from flashstep.model.rope import compressed_frequencies, window_frequencies
from flashstep.model.rows import rows_of
from flashstep.quant.tensor import QuantTensor

OTHERS = ("vision.", "aligner.", "image_")  # released names that belong to other modules


class Transformer:
    """The text backbone, complete when constructed.

    ``engram_tables`` maps each Engram layer to its rows. With ``drafts`` the draft model is built from the same
    weights: ``draft``, which every forward feeds. Pipeline or tensor shards would be declared where blocks are built.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Tensor | QuantTensor],
        *,
        ops: Ops,
        pool: CachePool,
        engram_tables: Mapping[int, RowTable],
        drafts: bool = False,
    ) -> None:
        parameters = Parameters(weights)
        hashing = EngramHash(config, pool.device) if config.engram_layer_ids else None

        def engram(layer: int) -> EngramInjection | None:
            if hashing is None or layer not in config.engram_layer_ids:
                return None
            table = engram_tables[layer]
            return EngramInjection(config, parameters, layer, ops=ops, hashing=hashing, table=table)

        self._ops = ops
        self._block_size = pool.block_size
        self._window_frequencies = window_frequencies(config).to(pool.device)
        self._compressed_frequencies = compressed_frequencies(config).to(pool.device)
        self._last_source = config.last_kv_source
        self._embedding = Embedding(config, parameters)
        self._blocks = [
            Block(
                config,
                parameters,
                f"layers.{spec.index}",
                ops=ops,
                attention=attention_of(spec, config, parameters, ops=ops, pool=pool),
                experts_per_token=config.num_experts_per_tok,
                engram=engram(spec.index),
                captures=drafts and spec.index in config.dspark_target_layer_ids,
            )
            for spec in config.layers
        ]
        linear = LinearF(parameters, "head", ops=ops)
        self._head = Head(Norm(parameters, "norm", eps=config.rms_norm_eps, ops=ops), linear)
        self.draft: DraftModel | None = None
        if drafts:
            self.draft = DraftModel(
                config, parameters, ops=ops, pool=pool, embedding=self._embedding, head=linear
            )
        others = OTHERS if drafts else (*OTHERS, DRAFT)
        strays = [name for name in parameters.left_over() if not name.startswith(others)]
        if strays:
            raise ValueError(
                f"the weights hold {len(strays)} names that the model does not use: {strays[:20]}"
            )

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Run the rows of ``batch`` -> fp32 logits [len(batch.logit_rows), V], in the order of ``logit_rows``."""
        rows = rows_of(
            batch,
            window_frequencies=self._window_frequencies,
            compressed_frequencies=self._compressed_frequencies,
            block_size=self._block_size,
            ops=self._ops,
        )
        state = State.first(self._embedding(batch.input_ids_T))
        for layer, block in enumerate(self._blocks):
            if batch.tail_start_R is not None and layer == self._last_source:
                kept = rows.from_positions(batch.tail_start_R)
                kept_rows = rows.keep(kept)
                state = block.forward_tail(state, rows, kept=kept, kept_rows=kept_rows)
                if kept.numel() == 0:
                    break
                rows = kept_rows.cut_windows(batch.tail_start_R)
            else:
                state = block.forward(state, rows)
        if self.draft is not None and state.x_TSD.shape[0]:
            self.draft.remember(torch.cat(state.features, dim=1), rows)
        wanted = batch.logit_rows
        hidden_TD = self._ops.mhc.collapse(state.x_TSD[wanted], state.pre_TS[wanted])
        return self._head(hidden_TD)
