"""What meets between two products, in one launch: norm, rotation, quantiser and store (spec/model.md 3, 4, 8.2).

Owns the signatures, and nothing that the families below do not say: each reference is the composition of theirs, so nothing on a
CPU changes by what is fused. Inputs may be slices of a wider product. ``planes`` and ``slot_T`` are those of ``cast``, cosines
and sines those of ``norm_rope.angles``; a row with a negative slot writes nothing. Suffixes: T rows, R requests, B block columns,
L query latent, C head channels, K index channels, H index heads, P rotary pairs, S draft stages, A tables of angles.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashstep.kernels.cast import Planes
from flashstep.kernels.engram import Hashing
from flashstep.kernels.engram import Planes as TablePlanes
from flashstep.kernels.registry import Cost, Family, Implementation

IN_TRITON = {  # by module
    "places": ("place_rows",),
    "triton": ("norm_quantise", "latent_and_record", "latent_and_key", "store_contexts", "rotate_round"),
    "publish": ("publish_pairs", "publish_rows", "store_key", "store_key_and_tail"),
    "engram": ("look_up_quantised",),
}
OPS = tuple(op for ops in IN_TRITON.values() for op in ops)


class Places(NamedTuple):
    """What the rows of a step ask of every layer, worked out once; by ratio (1, 2) where it depends on it.

    slot_T            int64  the request's runner slot
    window_slot_T     int64  the place of the row's window record, -1 where its block is not held
    entry_slot_T      int64  the place of the entry that the row closes, -1 where it closes none or must not write
    visible_T         int64  the entries whose last token is not after the row
    cos_ATP, sin_ATP  fp32   of the angles of each table of frequencies
    """

    slot_T: Tensor
    window_slot_T: Tensor
    entry_slot_T: tuple[Tensor, Tensor]
    visible_T: tuple[Tensor, Tensor]
    cos_ATP: Tensor
    sin_ATP: Tensor


class Fused(Family):
    """Public fused ops."""

    TABLE = (
        *(
            Implementation(
                op=f"fused.{op}", module=f"flashstep.kernels.fused.{module}", needs=frozenset({"sm90"})
            )
            for module, ops in IN_TRITON.items()
            for op in ops
        ),
        *(Implementation(op=f"fused.{op}", module="flashstep.kernels.fused.reference") for op in OPS),
    )

    def place_rows(
        self,
        positions_T: Tensor,
        request_T: Tensor,
        store_T: Tensor,
        *,
        slot_R: Tensor,
        window_table_RB: Tensor,
        block_table_RB: Tensor,
        block_size: int,
        frequencies_AP: Tensor,
        back_A: Tensor,
    ) -> Places:
        """int64 [T] positions and requests, bool [T] whether a row writes entries -> ``Places``.

        Table A's angles are those of the positions ``back_A`` (int64) before the rows' own, but of none below 0. Tables int64
        [R, B], -1 where no block is held.
        """
        assert positions_T.dtype is torch.int64 and store_T.dtype is torch.bool
        assert frequencies_AP.dtype is torch.float32 and back_A.shape == frequencies_AP.shape[:1]
        return self._loaded["place_rows"](
            positions_T,
            request_T,
            store_T,
            slot_R=slot_R,
            window_table_RB=window_table_RB,
            block_table_RB=block_table_RB,
            block_size=block_size,
            frequencies_AP=frequencies_AP,
            back_A=back_A,
        )

    def norm_quantise(self, x_TC: Tensor, weight_C: Tensor, *, eps: float) -> Any:
        """bf16 [T, C] -> what ``gemm.quantise_input`` gives of its RMS norm."""
        assert x_TC.dtype is torch.bfloat16 and weight_C.shape == x_TC.shape[1:]
        return self._loaded["norm_quantise"](x_TC, weight_C, eps=eps)

    def latent_and_record(
        self,
        x_TX: Tensor,
        *,
        latent_weight_L: Tensor,
        key_weight_C: Tensor,
        eps: float,
        cos_TP: Tensor,
        sin_TP: Tensor,
        planes: Planes,
        slot_T: Tensor,
    ) -> Any:
        """bf16 [T, L + C], query latent and key side by side -> the latent normed and quantised; stores the window record.

        The record is the key normed, rotated and in MXFP8.
        """
        _check_joint(x_TX, latent_weight_L, key_weight_C)
        return self._loaded["latent_and_record"](
            x_TX,
            latent_weight_L=latent_weight_L,
            key_weight_C=key_weight_C,
            eps=eps,
            cos_TP=cos_TP,
            sin_TP=sin_TP,
            planes=planes,
            slot_T=slot_T,
        )

    def latent_and_key(
        self,
        x_TX: Tensor,
        *,
        latent_weight_L: Tensor,
        key_weight_C: Tensor,
        eps: float,
        cos_TP: Tensor,
        sin_TP: Tensor,
    ) -> tuple[Any, Tensor]:
        """As ``latent_and_record``, but gives the key, bf16 [T, C] normed and rotated, and stores nothing."""
        _check_joint(x_TX, latent_weight_L, key_weight_C)
        return self._loaded["latent_and_key"](
            x_TX,
            latent_weight_L=latent_weight_L,
            key_weight_C=key_weight_C,
            eps=eps,
            cos_TP=cos_TP,
            sin_TP=sin_TP,
        )

    def store_contexts(
        self,
        k_TX: Tensor,
        weight_SC: Tensor,
        *,
        eps: float,
        cos_TP: Tensor,
        sin_TP: Tensor,
        planes: Sequence[Planes],
        slot_T: Tensor,
    ) -> None:
        """bf16 [T, S * C], a key of each draft stage side by side: normed, rotated and into the stages' MXFP8 ``planes``.

        These lie in one tensor, one stage behind the other: the same strides, and equal steps from one to the next.
        """
        assert k_TX.dtype is torch.bfloat16 and k_TX.shape[1] == weight_SC.numel()
        assert len(planes) == weight_SC.shape[0]
        self._loaded["store_contexts"](
            k_TX, weight_SC, eps=eps, cos_TP=cos_TP, sin_TP=sin_TP, planes=planes, slot_T=slot_T
        )

    def rotate_round(self, x_THK: Tensor, cos_TP: Tensor, sin_TP: Tensor) -> Tensor:
        """bf16 [T, H, K] -> same: rotated, then quantised and dequantised as MXFP4 (index queries)."""
        assert x_THK.dtype is torch.bfloat16 and x_THK.ndim == 3
        return self._loaded["rotate_round"](x_THK, cos_TP, sin_TP)

    def publish_pairs(
        self,
        x_TX: Tensor,
        weight_C: Tensor,
        *,
        eps: float,
        tail: Tensor,
        row_slot_T: Tensor,
        positions_T: Tensor,
        cos_TP: Tensor,
        sin_TP: Tensor,
        planes: Planes,
        slot_T: Tensor,
    ) -> Tensor:
        """fp32 [T, 2 * C], values and scores side by side -> bf16 latents [T, C], zero where no pair closes.

        The pairs are pooled (``reference.pool_pairs``, for ``row_slot_T``) and normed; the latents, rotated and in NVFP4, go to
        ``slot_T``. The ``tail`` is read only: a row that is to take a place of it may not be faster than the one that reads it.
        """
        assert x_TX.dtype is torch.float32 and x_TX.shape[1] == 2 * weight_C.shape[0]
        assert tail.dtype is torch.float32 and tail.shape[2:] == (2, weight_C.shape[0])
        return self._loaded["publish_pairs"](
            x_TX,
            weight_C,
            eps=eps,
            tail=tail,
            row_slot_T=row_slot_T,
            positions_T=positions_T,
            cos_TP=cos_TP,
            sin_TP=sin_TP,
            planes=planes,
            slot_T=slot_T,
        )

    def publish_rows(
        self,
        x_TC: Tensor,
        weight_C: Tensor,
        *,
        eps: float,
        cos_TP: Tensor,
        sin_TP: Tensor,
        planes: Planes,
        slot_T: Tensor,
    ) -> Tensor:
        """bf16 [T, C] -> its RMS norm, bf16 [T, C], which goes rotated and in NVFP4 to ``slot_T``."""
        assert x_TC.dtype is torch.bfloat16 and x_TC.shape[1] == weight_C.shape[0]
        return self._loaded["publish_rows"](
            x_TC, weight_C, eps=eps, cos_TP=cos_TP, sin_TP=sin_TP, planes=planes, slot_T=slot_T
        )

    def store_key(
        self,
        x_TK: Tensor,
        weight_K: Tensor,
        *,
        eps: float,
        cos_TP: Tensor,
        sin_TP: Tensor,
        planes: Planes,
        slot_T: Tensor,
    ) -> None:
        """bf16 [T, K], an index key: normed, rotated and in MXFP4 to ``slot_T``."""
        assert x_TK.dtype is torch.bfloat16 and x_TK.shape[1] == weight_K.shape[0]
        self._loaded["store_key"](
            x_TK, weight_K, eps=eps, cos_TP=cos_TP, sin_TP=sin_TP, planes=planes, slot_T=slot_T
        )

    def look_up_quantised(self, lookback_TN: Tensor, hashing: Hashing, table: TablePlanes) -> Any:
        """int64 [T, N] look-back ids -> what ``gemm.quantise_input`` gives of ``engram.look_up``."""
        return self._loaded["look_up_quantised"](lookback_TN, hashing, table)

    def store_key_and_tail(
        self,
        x_TK: Tensor,
        weight_K: Tensor,
        *,
        eps: float,
        cos_TP: Tensor,
        sin_TP: Tensor,
        planes: Planes,
        slot_T: Tensor,
        product_TX: Tensor,
        tail: Tensor,
        row_slot_T: Tensor,
        positions_T: Tensor,
    ) -> None:
        """``store_key``, and ``compressor.store_tail`` of the fp32 [T, 2 * C] that ``publish_pairs`` has had."""
        assert x_TK.dtype is torch.bfloat16 and x_TK.shape[1] == weight_K.shape[0]
        assert product_TX.dtype is torch.float32 and tail.dtype is torch.float32
        assert 2 * tail.shape[3] == product_TX.shape[1]
        self._loaded["store_key_and_tail"](
            x_TK,
            weight_K,
            eps=eps,
            cos_TP=cos_TP,
            sin_TP=sin_TP,
            planes=planes,
            slot_T=slot_T,
            product_TX=product_TX,
            tail=tail,
            row_slot_T=row_slot_T,
            positions_T=positions_T,
        )


def _check_joint(x_TX: Tensor, latent_weight_L: Tensor, key_weight_C: Tensor) -> None:
    assert x_TX.dtype is torch.bfloat16 and x_TX.ndim == 2
    assert x_TX.shape[1] == latent_weight_L.shape[0] + key_weight_C.shape[0]


def place_rows_cost(*, rows: int, tables: int, pairs: int) -> Cost:
    """Positions, requests and four table entries in; six numbers and the angles' tables out."""
    return Cost(bytes=rows * (8 * 12 + 8 * tables * pairs), flops=3 * rows * tables * pairs)


def norm_quantise_cost(*, rows: int, channels: int) -> Cost:
    """bf16 in, the quantised values as bf16 out, one weight row."""
    return Cost(bytes=2 * channels * (2 * rows + 1), flops=8 * rows * channels)


def latent_and_record_cost(*, rows: int, latent: int, channels: int) -> Cost:
    """The product in, the quantised latent and a record of E4M3 values and scales out."""
    return Cost(
        bytes=rows * (4 * latent + 3 * channels + channels // 32) + 2 * (latent + channels),
        flops=8 * rows * (latent + channels),
    )


def latent_and_key_cost(*, rows: int, latent: int, channels: int) -> Cost:
    """The product in, the quantised latent and a bf16 key out."""
    return Cost(bytes=(4 * rows + 2) * (latent + channels), flops=8 * rows * (latent + channels))


def store_contexts_cost(*, rows: int, stages: int, channels: int) -> Cost:
    """bf16 in, a record of each stage out."""
    return Cost(bytes=rows * stages * (3 * channels + channels // 32), flops=8 * rows * stages * channels)


def rotate_round_cost(*, rows: int, heads: int, channels: int) -> Cost:
    """bf16 in and out."""
    return Cost(bytes=4 * rows * heads * channels, flops=6 * rows * heads * channels)


def publish_pairs_cost(*, rows: int, channels: int) -> Cost:
    """Two fp32 rows in, a bf16 row out, half an entry."""
    return Cost(bytes=rows * channels * 10 + rows * channels * 9 // 32, flops=12 * rows * channels)


def publish_rows_cost(*, rows: int, channels: int) -> Cost:
    """bf16 in and out, an entry."""
    return Cost(bytes=rows * channels * 4 + rows * channels * 9 // 16, flops=8 * rows * channels)


def store_key_cost(*, rows: int, channels: int) -> Cost:
    """bf16 in, half a byte a channel and one a group of 32 out."""
    return Cost(bytes=rows * (2 * channels + channels // 2 + channels // 32), flops=8 * rows * channels)


def store_key_and_tail_cost(*, rows: int, channels: int, kept: int, width: int) -> Cost:
    """``store_key``, and of ``kept`` rows two fp32 vectors of ``width`` in and out."""
    key = store_key_cost(rows=rows, channels=channels)
    return Cost(bytes=key.bytes + 16 * kept * width, flops=key.flops)


def look_up_quantised_cost(*, rows: int, columns: int, width: int) -> Cost:
    """A byte a channel and one a group in (over PCIe where the table is the host's), bf16 out."""
    return Cost(bytes=rows * columns * (3 * width + width // 32), flops=5 * rows * columns * width)
