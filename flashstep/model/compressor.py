"""The compressor of a KV source: latents from hidden rows, published as compressed records and index keys (spec/model.md 3.4).

Two classes, by ratio: with ratio 2 a gated pair of tokens makes one latent and the open half waits in the tail ring; with
ratio 1 every token makes one and there is no gate. The un-rotated latent feeds both records; its position is that of its FIRST
token.
"""

from typing import Protocol

from torch import Tensor

from flashstep.cache.pool import SourceView
from flashstep.config.model import ModelConfig
from flashstep.kernels import Ops
from flashstep.model.linear import LinearB, LinearF, Norm
from flashstep.model.parameters import Parameters
from flashstep.model.rows import Rows


class Pooling(Protocol):
    """Hidden rows -> bf16 latents [T, C], meaningful where a row closes a group."""

    def __call__(self, x_TD: Tensor, rows: Rows) -> Tensor: ...


class PairPooling:
    """Ratio 2: channelwise softmax over the two tokens of an aligned pair."""

    def __init__(
        self, config: ModelConfig, parameters: Parameters, prefix: str, *, ops: Ops, tail: Tensor
    ) -> None:
        self._compressor = ops.compressor
        self._wkv_wgate = LinearF(parameters, f"{prefix}.wkv", f"{prefix}.wgate", ops=ops)
        self._norm = Norm(parameters, f"{prefix}.norm", eps=config.rms_norm_eps, ops=ops)
        self._tail = tail

    def __call__(self, x_TD: Tensor, rows: Rows) -> Tensor:
        value_TC, score_TC = self._wkv_wgate(x_TD).chunk(2, dim=1)
        place = {"tail": self._tail, "slot_T": rows.slot_T, "positions_T": rows.positions_T}
        pooled_TC = self._compressor.pool_pairs(value_TC, score_TC, **place)
        self._compressor.store_tail(value_TC, score_TC, **place)
        return self._norm(pooled_TC)


class PlainPooling:
    """Ratio 1: one latent a token."""

    def __init__(self, config: ModelConfig, parameters: Parameters, prefix: str, *, ops: Ops) -> None:
        self._wkv = LinearB(parameters, f"{prefix}.wkv", ops=ops)
        self._norm = Norm(parameters, f"{prefix}.norm", eps=config.rms_norm_eps, ops=ops)

    def __call__(self, x_TD: Tensor, rows: Rows) -> Tensor:
        return self._norm(self._wkv(x_TD))


class Publisher:
    """Writes the compressed records and index keys of one KV source."""

    def __init__(
        self,
        config: ModelConfig,
        parameters: Parameters,
        prefix: str,
        *,
        ops: Ops,
        view: SourceView,
        frequencies: Tensor,
    ) -> None:
        self._pooling: Pooling
        if view.tail is not None:
            self._pooling = PairPooling(config, parameters, f"{prefix}.compressor", ops=ops, tail=view.tail)
        else:
            self._pooling = PlainPooling(config, parameters, f"{prefix}.compressor", ops=ops)
        self._wk = LinearB(parameters, f"{prefix}.indexer.wk", ops=ops)
        self._k_norm = Norm(parameters, f"{prefix}.indexer.k_norm", eps=config.rms_norm_eps, ops=ops)
        self._norm_rope, self._cast = ops.norm_rope, ops.cast
        self._view = view
        self._frequencies = frequencies

    def publish(self, x_TD: Tensor, rows: Rows) -> None:
        """Store what the rows close; rows that close nothing, or that replay, write no record."""
        latent_TC = self._pooling(x_TD, rows)
        ratio = self._view.ratio
        first_T = (rows.positions_T - (ratio - 1)).clamp(
            min=0
        )  # even rows of ratio 2 write nothing: any angle will do
        rotation = self._norm_rope.angles(first_T, self._frequencies)
        slot_T = rows.entry_slot_T[ratio]
        key_TK = self._norm_rope.rotate(self._k_norm(self._wk(latent_TC)), *rotation)
        self._cast.store_mxfp4(key_TK, self._view.index_keys, slot_T=slot_T)
        entry_TC = self._norm_rope.rotate(latent_TC, *rotation)
        self._cast.store_nvfp4(entry_TC, self._view.compressed, slot_T=slot_T)
