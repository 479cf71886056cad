"""Sparse latent attention over window records and selected compressed records (spec/model.md 3.3, 3.5, 3.6).

Owns the signature. One softmax over the union of the last W window positions and the selected entries, with a sink that only
enters the denominator; key and value are the same record. The draft attends by blocks (spec/model.md 8.3). Suffixes: T rows,
H heads, C channels, K selected (of a draft block: its places), R requests, B block columns.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

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
        *(
            Implementation(
                op=f"attention.{op}", module="flashstep.kernels.attention.triton", needs=frozenset({"sm90"})
            )
            for op in OPS
        ),
        *(Implementation(op=f"attention.{op}", module="flashstep.kernels.attention.reference") for op in OPS),
    )

    def attend_window(
        self, q_THC: Tensor, *, window: Planes, rows: AttentionRows, width: int, sink_H: Tensor
    ) -> Tensor:
        """Rotated queries bf16 -> bf16 [T, H, C] over positions max(start, t - width + 1) .. t.

        ``window`` are uint8 views of MXFP8 records, values [blocks, slots, C] and scales [blocks, slots, C/32]; sink fp32.
        """
        _check(q_THC, rows, sink_H)
        return self._loaded["attend_window"](q_THC, window=window, rows=rows, width=width, sink_H=sink_H)

    def attend_sparse(
        self,
        q_THC: Tensor,
        *,
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
        _check(q_THC, rows, sink_H)
        assert selected_TK.shape[0] == q_THC.shape[0]
        return self._loaded["attend_sparse"](
            q_THC,
            window=window,
            compressed=compressed,
            rows=rows,
            selected_TK=selected_TK,
            width=width,
            sink_H=sink_H,
        )

    def attend_block(
        self, q_RKHC: Tensor, k_RKC: Tensor, *, window: Planes, rows: BlockRows, width: int, sink_H: Tensor
    ) -> Tensor:
        """Rotated queries and keys bf16, K places a request -> bf16 [R, K, H, C].

        Every place sees the records of positions max(start, n - width) .. n - 1, n its block's first, and the keys of all K
        places [R, K, C], which go through Q8 as a record would. ``window`` and sink as in ``attend_window``.
        """
        assert q_RKHC.dtype is torch.bfloat16 and k_RKC.dtype is torch.bfloat16 and q_RKHC.ndim == 4
        assert k_RKC.shape == (*q_RKHC.shape[:2], q_RKHC.shape[3]) and sink_H.dtype is torch.float32
        assert rows.position_R.shape == q_RKHC.shape[:1]
        return self._loaded["attend_block"](
            q_RKHC, k_RKC, window=window, rows=rows, width=width, sink_H=sink_H
        )


def _check(q_THC: Tensor, rows: AttentionRows, sink_H: Tensor) -> None:
    assert q_THC.dtype is torch.bfloat16 and q_THC.ndim == 3
    assert rows.positions_T.shape == q_THC.shape[:1] and sink_H.dtype is torch.float32


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
