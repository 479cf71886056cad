"""The compressor of a KV source: latents from hidden rows, published as compressed records and index keys (spec/model.md 3.4).

Two classes, by ratio: with ratio 2 a gated pair of tokens makes one latent and the open half waits in the tail ring; with
ratio 1 every token makes one and there is no gate. The un-rotated latent feeds both records; its position is that of its FIRST
token.
"""

from typing import Any

from torch import Tensor

from flashstep.cache.pool import SourceView
from flashstep.config.model import ModelConfig
from flashstep.kernels import Ops
from flashstep.model.linear import LinearB, LinearF
from flashstep.model.parameters import Parameters
from flashstep.model.rows import Rows


class PairPublisher:
    """Ratio 2: channelwise softmax over the two tokens of an aligned pair."""

    def __init__(
        self,
        config: ModelConfig,
        parameters: Parameters,
        prefix: str,
        *,
        ops: Ops,
        view: SourceView,
        tail: Tensor,
    ) -> None:
        self._fused = ops.fused
        within = f"{prefix}.compressor"
        self._wkv_wgate = LinearF(parameters, f"{within}.wkv", f"{within}.wgate", ops=ops)
        self._norm_C = parameters.plain(f"{within}.norm.weight")
        self._wk = LinearB(parameters, f"{prefix}.indexer.wk", ops=ops)
        self._key_norm_K = parameters.plain(f"{prefix}.indexer.k_norm.weight")
        self._eps = config.rms_norm_eps
        self._view = view
        self._tail = tail

    def publish(self, x_TD: Tensor, rows: Rows) -> None:
        """Store what the rows close; rows that close nothing, or that replay, write no record."""
        cos_TP, sin_TP = rows.entry_rotation[2]
        stores: dict[str, Any] = {
            "eps": self._eps,
            "cos_TP": cos_TP,
            "sin_TP": sin_TP,
            "slot_T": rows.entry_slot_T[2],
        }
        ring: dict[str, Any] = {
            "tail": self._tail,
            "row_slot_T": rows.slot_T,
            "positions_T": rows.positions_T,
        }
        product_TX = self._wkv_wgate(x_TD)
        latent_TC = self._fused.publish_pairs(
            product_TX, self._norm_C, planes=self._view.compressed, **stores, **ring
        )
        self._fused.store_key_and_tail(
            self._wk(latent_TC),
            self._key_norm_K,
            planes=self._view.index_keys,
            product_TX=product_TX,
            **stores,
            **ring,
        )


class TokenPublisher:
    """Ratio 1: one latent a token."""

    def __init__(
        self, config: ModelConfig, parameters: Parameters, prefix: str, *, ops: Ops, view: SourceView
    ) -> None:
        self._fused = ops.fused
        self._wkv = LinearB(parameters, f"{prefix}.compressor.wkv", ops=ops)
        self._norm_C = parameters.plain(f"{prefix}.compressor.norm.weight")
        self._wk = LinearB(parameters, f"{prefix}.indexer.wk", ops=ops)
        self._key_norm_K = parameters.plain(f"{prefix}.indexer.k_norm.weight")
        self._eps = config.rms_norm_eps
        self._view = view

    def publish(self, x_TD: Tensor, rows: Rows) -> None:
        """Store every row's entry; rows that replay write no record."""
        cos_TP, sin_TP = rows.entry_rotation[1]
        stores: dict[str, Any] = {
            "eps": self._eps,
            "cos_TP": cos_TP,
            "sin_TP": sin_TP,
            "slot_T": rows.entry_slot_T[1],
        }
        latent_TC = self._fused.publish_rows(
            self._wkv(x_TD), self._norm_C, planes=self._view.compressed, **stores
        )
        self._fused.store_key(self._wk(latent_TC), self._key_norm_K, planes=self._view.index_keys, **stores)


Publisher = PairPublisher | TokenPublisher


def publisher_of(
    config: ModelConfig, parameters: Parameters, prefix: str, *, ops: Ops, view: SourceView
) -> Publisher:
    """The publisher of the KV source ``view``: a tail ring means pairs."""
    if view.tail is None:
        return TokenPublisher(config, parameters, prefix, ops=ops, view=view)
    return PairPublisher(config, parameters, prefix, ops=ops, view=view, tail=view.tail)
