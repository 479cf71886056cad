"""The lightning indexer: scores of index keys, candidate blocks, top-k selection (spec/model.md 4).

Owns the signatures. Keys are read as 68-byte records (at head dim 128) straight from their blocks; scores are
score(t, j) = (K H)^-0.5 sum_h w[t, h] relu(<q[t, h], key_j>), fp32, exact before that rounding. On equal scores the lowest
index wins. NaN and -inf are never selected. Suffixes: T rows, H index heads, K index channels, N entries, R requests,
B block columns.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from flashstep.kernels.registry import Cost, Family, Implementation

Planes = tuple[Tensor, Tensor]
OPS = ("top", "select", "select_with_candidates", "select_within")


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexRows:
    """What the rows of a step may look at: ``visible_T`` entries of request ``request_T``, in its ``block_table_RB``.

    All int64. Rows of one request are consecutive and ascending in ``visible_T``.
    """

    request_T: Tensor
    visible_T: Tensor
    block_table_RB: Tensor


class Indexer(Family):
    """Public indexer ops."""

    TABLE = (
        *(
            Implementation(op=f"indexer.{op}", module=f"flashstep.kernels.indexer.{module}", needs=needs)
            for module, needs in (("cuda", frozenset({"sm90", "nvcc"})), ("triton", frozenset({"sm90"})))
            for op in OPS
        ),
        *(Implementation(op=f"indexer.{op}", module="flashstep.kernels.indexer.reference") for op in OPS),
    )

    def top(self, scores_TN: Tensor, *, count: int) -> Tensor:
        """fp32 [T, N] -> int32 [T, count]: indices of the best scores, ascending, then -1 where fewer are valid."""
        assert scores_TN.dtype is torch.float32 and scores_TN.ndim == 2
        return self._loaded["top"](scores_TN, count=count)

    def select(
        self, q_THK: Tensor, weight_TH: Tensor, *, keys: Planes, rows: IndexRows, count: int
    ) -> Tensor:
        """Queries bf16 (QM4-quantised), head weights bf16 -> int32 [T, count] entries, ascending, -1 filled.

        ``keys`` are uint8 views of MXFP4 records, values [blocks, slots, K/2] and scales [blocks, slots, K/32].
        """
        _check(q_THK, weight_TH, rows)
        return self._loaded["select"](q_THK, weight_TH, keys=keys, rows=rows, count=count)

    def select_with_candidates(
        self,
        q_THK: Tensor,
        weight_TH: Tensor,
        *,
        keys: Planes,
        rows: IndexRows,
        count: int,
        blocks: int,
        block_size: int,
    ) -> tuple[Tensor, Tensor]:
        """As ``select``, and the candidate blocks int32 [T, blocks] of each row (ascending, -1 filled).

        A candidate block is ``block_size`` consecutive entries; its score is the best of its visible members; the block of the
        newest visible entry is always kept. The row's own selection is not restricted to them.
        """
        _check(q_THK, weight_TH, rows)
        return self._loaded["select_with_candidates"](
            q_THK, weight_TH, keys=keys, rows=rows, count=count, blocks=blocks, block_size=block_size
        )

    def select_within(
        self,
        q_THK: Tensor,
        weight_TH: Tensor,
        *,
        keys: Planes,
        rows: IndexRows,
        count: int,
        candidates_TM: Tensor,
        block_size: int,
    ) -> Tensor:
        """As ``select``, scoring only the visible entries of each row's candidate blocks (int32 [T, M], -1 filled)."""
        _check(q_THK, weight_TH, rows)
        assert candidates_TM.shape[0] == q_THK.shape[0]
        return self._loaded["select_within"](
            q_THK,
            weight_TH,
            keys=keys,
            rows=rows,
            count=count,
            candidates_TM=candidates_TM,
            block_size=block_size,
        )


def _check(q_THK: Tensor, weight_TH: Tensor, rows: IndexRows) -> None:
    assert q_THK.dtype is torch.bfloat16 and weight_TH.dtype is torch.bfloat16
    assert q_THK.shape[:2] == weight_TH.shape and rows.visible_T.shape == q_THK.shape[:1]


def top_cost(*, rows: int, entries: int, count: int) -> Cost:
    """Every score once."""
    return Cost(bytes=4 * rows * (entries + count), flops=rows * entries)


def select_cost(*, rows: int, entries: int, heads: int, channels: int, count: int) -> Cost:
    """``entries`` key records once for a request, queries and selections of its ``rows``."""
    record = channels // 2 + channels // 32
    io = rows * (2 * heads * channels + 2 * heads + 4 * count)
    return Cost(bytes=entries * record + io, flops=2 * rows * entries * heads * (channels + 1))


def select_with_candidates_cost(
    *, rows: int, entries: int, heads: int, channels: int, count: int, blocks: int
) -> Cost:
    """As ``select``, with the block list beside it."""
    base = select_cost(rows=rows, entries=entries, heads=heads, channels=channels, count=count)
    return Cost(bytes=base.bytes + 4 * rows * blocks, flops=base.flops + rows * entries)


def select_within_cost(*, rows: int, candidates: int, heads: int, channels: int, count: int) -> Cost:
    """Each row reads its own ``candidates`` entries."""
    record = channels // 2 + channels // 32
    io = rows * (2 * heads * channels + 2 * heads + 4 * count)
    return Cost(bytes=rows * candidates * record + io, flops=2 * rows * candidates * heads * (channels + 1))
