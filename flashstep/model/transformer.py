"""V4.1 as modules: Transformer and Block. Start reading here.

Takes a ``ForwardBatch``, gives fp32 logits; caches are written on the way through the views that layers were built with.
Knows no request, schedule or checkpoint. Suffixes: T rows, S streams, D width, V vocabulary (others: ``batch``).

Weights come as a mapping by released name (spec/model.md 11), FP8 dense weights as ``QuantTensor`` under ``<name>.weight``, the
experts of a layer stacked as MXFP4 ``QuantTensor`` under ``layers.L.ffn.experts.{w1,w2,w3}``. Engram tables come apart, by layer.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from flashstep.cache.pool import CachePool
from flashstep.config.model import LayerSpec, ModelConfig
from flashstep.engram.hash import EngramHash
from flashstep.kernels import Ops
from flashstep.model.attention import attention_of
from flashstep.model.batch import ForwardBatch
from flashstep.model.embedding import Embedding, Head
from flashstep.model.engram import EngramInjection, RowTable
from flashstep.model.indexer import Selection
from flashstep.model.linear import Norm
from flashstep.model.mhc import Site
from flashstep.model.moe import MoE
from flashstep.model.parameters import Parameters
from flashstep.model.rope import compressed_frequencies, window_frequencies
from flashstep.model.rows import Rows, rows_of
from flashstep.quant.tensor import QuantTensor

TILE_ROWS = 512  # measured 2026-11-30, see docs/log.md
OTHERS = ("mtp.", "vision.", "aligner.", "image_")  # released names that belong to other modules


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """What passes from layer to layer: streams bf16 [T, S, D], the read vector fp32 [T, S], the selection in force."""

    x_TSD: Tensor
    pre_TS: Tensor
    selection: Selection | None


class Block:
    """One layer: Engram where it has one, attention, MoE, each sublayer inside its hyper-connection."""

    def __init__(
        self,
        spec: LayerSpec,
        config: ModelConfig,
        parameters: Parameters,
        *,
        ops: Ops,
        pool: CachePool,
        engram: EngramInjection | None,
    ) -> None:
        prefix = f"layers.{spec.index}"
        self._engram = engram
        self._attention_site = Site(config, parameters, f"{prefix}.hc_attn", ops=ops)
        self._attention_norm = Norm(parameters, f"{prefix}.attn_norm", eps=config.rms_norm_eps, ops=ops)
        self._attention = attention_of(spec, config, parameters, ops=ops, pool=pool)
        self._ffn_site = Site(config, parameters, f"{prefix}.hc_ffn", ops=ops)
        self._ffn_norm = Norm(parameters, f"{prefix}.ffn_norm", eps=config.rms_norm_eps, ops=ops)
        self._moe = MoE(config, parameters, f"{prefix}.ffn", ops=ops)

    def forward(self, state: State, rows: Rows) -> State:
        """All rows through the layer."""
        x_TSD, u_TD = self._enter(state, rows)
        latent_TL = self._attention.publish(u_TD, rows)
        return self._rest(x_TSD, u_TD, latent_TL, rows, state.selection)

    def forward_tail(self, state: State, rows: Rows, *, kept: Tensor, kept_rows: Rows) -> State:
        """All rows publish, only ``kept`` (int64 row numbers) go on: the last KV source under bounded replay."""
        x_TSD, u_TD = self._enter(state, rows)
        latent_TL = self._attention.publish(u_TD, rows)
        assert state.selection is None or state.selection.candidates_TM is None, (
            "candidates cannot precede the last source"
        )
        if kept.numel() == 0:  # the chunk ends before anybody's last rows
            return State(x_TSD=x_TSD[kept], pre_TS=state.pre_TS[kept], selection=None)
        return self._rest(x_TSD[kept], u_TD[kept], latent_TL[kept], kept_rows, None)

    def _enter(self, state: State, rows: Rows) -> tuple[Tensor, Tensor]:
        return _by_tiles(self._enter_tile, state.x_TSD, state.pre_TS, rows.lookback_TN)

    def _enter_tile(self, x_TSD: Tensor, pre_TS: Tensor, lookback_TN: Tensor) -> tuple[Tensor, Tensor]:
        if self._engram is not None:
            x_TSD = self._engram(x_TSD, lookback_TN)
        return x_TSD, self._attention_norm(self._attention_site.collapse(x_TSD, pre_TS))

    def _rest(
        self, x_TSD: Tensor, u_TD: Tensor, latent_TL: Tensor, rows: Rows, selection: Selection | None
    ) -> State:
        y_TD, selection = self._attention.attend(u_TD, latent_TL, rows, selection)
        x_TSD, pre_TS = _by_tiles(self._leave_tile, x_TSD, y_TD)
        return State(x_TSD=x_TSD, pre_TS=pre_TS, selection=selection)

    def _leave_tile(self, x_TSD: Tensor, y_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Attention's output into the streams it was read from, and the FFN."""
        attention = self._attention_site.coefficients(x_TSD)
        x_TSD = self._attention_site.write(y_TD, x_TSD, attention)
        ffn = self._ffn_site.coefficients(x_TSD)
        u_TD = self._ffn_norm(self._ffn_site.collapse(x_TSD, attention.pre_TS))
        return self._ffn_site.write(self._moe(u_TD), x_TSD, ffn), ffn.pre_TS


def _by_tiles(step: Callable[..., tuple[Tensor, Tensor]], *tensors: Tensor) -> tuple[Tensor, Tensor]:
    """``step`` on ``TILE_ROWS`` rows at a time: no row sees another there, and what a tile works on stays in a core's cache."""
    tiles = [step(*tile) for tile in zip(*(tensor.split(TILE_ROWS) for tensor in tensors), strict=True)]
    if len(tiles) == 1:
        return tiles[0]
    first, second = zip(*tiles, strict=True)
    return torch.cat(first), torch.cat(second)


class Transformer:
    """The text backbone, complete when constructed.

    ``engram_tables`` maps each Engram layer to its rows. Pipeline or tensor shards would be declared where blocks are built.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Tensor | QuantTensor],
        *,
        ops: Ops,
        pool: CachePool,
        engram_tables: Mapping[int, RowTable],
    ) -> None:
        parameters = Parameters(weights)
        hashing = EngramHash(config) if config.engram_layer_ids else None

        def engram(layer: int) -> EngramInjection | None:
            if hashing is None or layer not in config.engram_layer_ids:
                return None
            table = engram_tables[layer]
            return EngramInjection(config, parameters, layer, ops=ops, hashing=hashing, table=table)

        self._ops = ops
        self._block_size = pool.block_size
        self._window_frequencies = window_frequencies(config)
        self._compressed_frequencies = compressed_frequencies(config)
        self._last_source = config.last_kv_source
        self._embedding = Embedding(config, parameters)
        self._blocks = [
            Block(spec, config, parameters, ops=ops, pool=pool, engram=engram(spec.index))
            for spec in config.layers
        ]
        self._head = Head(config, parameters, ops=ops)
        strays = [name for name in parameters.left_over() if not name.startswith(OTHERS)]
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
        x_TSD = self._embedding(batch.input_ids_T)
        pre_TS = x_TSD.new_zeros(x_TSD.shape[:2], dtype=torch.float32)
        pre_TS[:, 0] = 1  # before the first site the streams are equal: read one of them
        state = State(x_TSD=x_TSD, pre_TS=pre_TS, selection=None)
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
        wanted = batch.logit_rows
        hidden_TD = self._ops.mhc.collapse(state.x_TSD[wanted], state.pre_TS[wanted])
        return self._head(hidden_TD)
