"""Sparse latent attention over window records and selected compressed records (spec/model.md 3.2, 3.3, 3.5, 3.6).

Owns the signature. One softmax over the union of the last W window positions and the selected entries, with a sink that only
enters the denominator; key and value are the same record. Queries are rotated and outputs rotated back inside, by the cosines
and sines of their rows: the last 2P channels as adjacent pairs, each time rounded to bf16. The draft attends by blocks
(spec/model.md 8.3). Suffixes: T rows, H heads, C channels, P rotary pairs, K selected (of a draft block: its places),
R requests, B block columns.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flashstep.kernels.device import ANY_ORDER
from flashstep.kernels.registry import Cost, Family, Implementation

Planes = tuple[Tensor, Tensor]
OPS = ("attend_window", "attend_sparse", "attend_block")


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionRows:
    """Where the rows of a step stand, all int64: position and request of a row, and its request's block tables.

    ``window_start_R`` is the first position whose window record may be read; table entries are -1 where nothing is held. Rows
    of one request are consecutive. ``memo`` is where an implementation keeps what it works out of these rows for all layers.
    """

    positions_T: Tensor
    request_T: Tensor
    window_table_RB: Tensor
    window_start_R: Tensor
    block_table_RB: Tensor
    memo: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockRows:
    """Where the draft blocks of a step stand, one a request, all int64: the position of a block's first place, and as above."""

    position_R: Tensor
    window_table_RB: Tensor
    window_start_R: Tensor
    memo: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)


class Attention(Family):
    """Public attention ops."""

    TABLE = (
        Implementation(
            op="attention.attend_sparse",
            module="flashstep.kernels.attention.free_order",
            needs=frozenset({"sm90", ANY_ORDER}),
        ),
        *(
            Implementation(
                op=f"attention.{op}", module="flashstep.kernels.attention.triton", needs=frozenset({"sm90"})
            )
            for op in OPS
        ),
        *(Implementation(op=f"attention.{op}", module="flashstep.kernels.attention.reference") for op in OPS),
    )

    def attend_window(
        self,
        q_THC: Tensor,
        *,
        cos_TP: Tensor,
        sin_TP: Tensor,
        window: Planes,
        rows: AttentionRows,
        width: int,
        sink_H: Tensor,
    ) -> Tensor:
        """Queries bf16 before their rotation -> bf16 [T, H, C], rotated back, over positions max(start, t - width + 1) .. t.

        ``window`` are uint8 views of MXFP8 records, values [blocks, slots, C] and scales [blocks, slots, C/32]; cosines, sines
        and sink fp32.
        """
        _check(q_THC, cos_TP, sin_TP, rows, sink_H)
        return self._loaded["attend_window"](
            q_THC, cos_TP=cos_TP, sin_TP=sin_TP, window=window, rows=rows, width=width, sink_H=sink_H
        )

    def attend_sparse(
        self,
        q_THC: Tensor,
        *,
        cos_TP: Tensor,
        sin_TP: Tensor,
        window: Planes,
        compressed: Planes,
        rows: AttentionRows,
        selected_TK: Tensor,
        width: int,
        sink_H: Tensor,
    ) -> Tensor:
        """As ``attend_window``, and over the entries ``selected_TK`` (int32, -1: none) of the row's request.

        ``compressed`` are uint8 views of NVFP4 records, values [blocks, entries, C/2] and scales [blocks, entries, C/16].
        """
        _check(q_THC, cos_TP, sin_TP, rows, sink_H)
        assert selected_TK.shape[0] == q_THC.shape[0]
        return self._loaded["attend_sparse"](
            q_THC,
            cos_TP=cos_TP,
            sin_TP=sin_TP,
            window=window,
            compressed=compressed,
            rows=rows,
            selected_TK=selected_TK,
            width=width,
            sink_H=sink_H,
        )

    def attend_block(
        self,
        q_RKHC: Tensor,
        k_RKC: Tensor,
        *,
        cos_TP: Tensor,
        sin_TP: Tensor,
        window: Planes,
        rows: BlockRows,
        width: int,
        sink_H: Tensor,
    ) -> Tensor:
        """Queries before their rotation and rotated keys, bf16, K places a request -> bf16 [R, K, H, C], rotated back.

        Every place sees the records of positions max(start, n - width) .. n - 1, n its block's first, and the keys of all K
        places [R, K, C], which go through Q8 as a record would. Cosines and sines are of T = R * K rows, ``window`` and sink as
        in ``attend_window``.
        """
        assert k_RKC.dtype is torch.bfloat16 and q_RKHC.ndim == 4
        assert k_RKC.shape == (*q_RKHC.shape[:2], q_RKHC.shape[3])
        assert rows.position_R.shape == q_RKHC.shape[:1]
        _check_rows(q_RKHC.flatten(0, 1), cos_TP, sin_TP, sink_H)
        return self._loaded["attend_block"](
            q_RKHC, k_RKC, cos_TP=cos_TP, sin_TP=sin_TP, window=window, rows=rows, width=width, sink_H=sink_H
        )


def _check(q_THC: Tensor, cos_TP: Tensor, sin_TP: Tensor, rows: AttentionRows, sink_H: Tensor) -> None:
    _check_rows(q_THC, cos_TP, sin_TP, sink_H)
    assert rows.positions_T.shape == q_THC.shape[:1]


def _check_rows(q_THC: Tensor, cos_TP: Tensor, sin_TP: Tensor, sink_H: Tensor) -> None:
    assert q_THC.dtype is torch.bfloat16 and q_THC.ndim == 3
    assert cos_TP.shape == sin_TP.shape and cos_TP.shape[0] == q_THC.shape[0]
    assert cos_TP.dtype is torch.float32 and sink_H.dtype is torch.float32


def attend_window_cost(*, rows: int, heads: int, channels: int, width: int) -> Cost:
    """Each row reads its own window (decode); prompts share records between rows."""
    record = channels + channels // 32
    return Cost(
        bytes=rows * (width * record + 4 * heads * channels), flops=4 * rows * heads * channels * width
    )


def attend_sparse_cost(*, rows: int, heads: int, channels: int, width: int, selected: int) -> Cost:
    """As ``attend_window``, with ``selected`` compressed records a row."""
    base = attend_window_cost(rows=rows, heads=heads, channels=channels, width=width)
    record = channels // 2 + channels // 16
    return Cost(
        bytes=base.bytes + rows * selected * record, flops=base.flops + 4 * rows * heads * channels * selected
    )


def attend_block_cost(*, requests: int, places: int, heads: int, channels: int, width: int) -> Cost:
    """A request's places share its window records; each has a key of its own, and a query and an output for each head."""
    record = channels + channels // 32
    own = places * channels * (4 * heads + 2)
    seen = places * heads * channels * (width + places)
    return Cost(bytes=requests * (width * record + own), flops=4 * requests * seen)
