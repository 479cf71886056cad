"""The Engram injection of a layer: look up the n-gram rows, project, add to every stream (spec/model.md 6.4, 6.5).

Takes row ids from the hash and rows from the table (``flashstep.engram``); where the table's bytes live is not known here.
"""

from typing import Protocol

from torch import Tensor

from flashstep.config.model import ModelConfig
from flashstep.engram.hash import EngramHash
from flashstep.kernels import Ops
from flashstep.model.linear import Linear8
from flashstep.model.parameters import Parameters


class RowTable(Protocol):
    """Anything that gives Engram rows."""

    def rows(self, row_ids: Tensor) -> Tensor:
        """int64 [T, columns] -> bf16 [T, columns, head_dim], dequantised."""
        ...


class EngramInjection:
    """bf16 streams [T, S, D] -> bf16 [T, S, D]."""

    def __init__(
        self,
        config: ModelConfig,
        parameters: Parameters,
        layer: int,
        *,
        ops: Ops,
        hashing: EngramHash,
        table: RowTable,
    ) -> None:
        prefix = f"layers.{layer}.engram"
        self._engram = ops.engram
        self._layer = layer
        self._hash = hashing
        self._table = table
        self._wkv = Linear8(parameters, f"{prefix}.wkv", ops=ops)
        self._query_weight_SD = parameters.plain(f"{prefix}.q_weight")
        self._key_weight_SD = parameters.plain(f"{prefix}.k_weight")
        self._eps = config.rms_norm_eps

    def __call__(self, x_TSD: Tensor, lookback_TN: Tensor) -> Tensor:
        rows = self._table.rows(self._hash.rows(self._layer, lookback_TN))
        return self._engram.inject(
            x_TSD,
            self._wkv(rows.flatten(1)),
            query_weight_SD=self._query_weight_SD,
            key_weight_SD=self._key_weight_SD,
            eps=self._eps,
        )
