"""Pooling of a ratio-2 group into one latent, with the tail ring that carries its open half (spec/model.md 3.4).

Owns the signatures. The ring holds the fp32 (value, score) rows of a slot's last positions, place = position mod ring length,
so that a group whose first half came in an earlier step, or was followed by rejected drafts, still closes by position.
Ratio 1 has no pooling: its latent is a linear and a norm. A model publishes by ``kernels.fused``, whose reference these are.
Suffixes: T rows, C channels, L ring length.
"""

import torch
from torch import Tensor

from flashstep.kernels.registry import Cost, Family, Implementation

OPS = ("pool_pairs", "store_tail")


class Compressor(Family):
    """Public compressor ops."""

    TABLE = tuple(
        Implementation(op=f"compressor.{op}", module="flashstep.kernels.compressor.reference") for op in OPS
    )

    def pool_pairs(
        self, value_TC: Tensor, score_TC: Tensor, *, tail: Tensor, slot_T: Tensor, positions_T: Tensor
    ) -> Tensor:
        """fp32 rows -> bf16 [T, C]: at an odd position the channelwise softmax pooling of (position - 1, position), rounded.

        Rows of one slot are consecutive and ascending. The first half is the row before, or comes from ``tail`` fp32
        [slots, L, 2, C] where the row before belongs to an earlier step. Rows at even positions are zero: nothing closes there.
        """
        _check(value_TC, score_TC, tail)
        return self._loaded["pool_pairs"](
            value_TC, score_TC, tail=tail, slot_T=slot_T, positions_T=positions_T
        )

    def store_tail(
        self, value_TC: Tensor, score_TC: Tensor, *, tail: Tensor, slot_T: Tensor, positions_T: Tensor
    ) -> None:
        """Write the last L rows [C] of each slot into ``tail``, none of slot -1; call after ``pool_pairs`` has read it."""
        _check(value_TC, score_TC, tail)
        self._loaded["store_tail"](value_TC, score_TC, tail=tail, slot_T=slot_T, positions_T=positions_T)


def _check(value_TC: Tensor, score_TC: Tensor, tail: Tensor) -> None:
    assert value_TC.dtype is torch.float32 and score_TC.dtype is torch.float32 and tail.dtype is torch.float32
    assert tail.ndim == 4 and tail.shape[2:] == (2, value_TC.shape[1])


def pool_pairs_cost(*, rows: int, channels: int) -> Cost:
    """Two fp32 rows in, half a bf16 row out."""
    return Cost(bytes=rows * channels * 9, flops=5 * rows * channels)


def store_tail_cost(*, rows: int, channels: int) -> Cost:
    """Two fp32 rows in and out; ``rows`` counts at most L a slot."""
    return Cost(bytes=16 * rows * channels, flops=0)
