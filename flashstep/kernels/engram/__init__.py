"""N-gram rows: hashed, fetched and dequantised, and their injection into the residual streams (spec/model.md 6.4, 6.5).

Owns the signatures. Where a table's bytes live is the caller's affair (``flashstep.engram``), the rows' projection is a linear's.
Suffixes: T tokens, N look-back columns (newest first), C hash columns (n-major), R table rows, G groups of 32 channels,
X channels of all columns, S streams, D width of a stream.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from flashstep.kernels.registry import Cost, Family, Implementation

Planes = tuple[Tensor, Tensor]  # uint8 E4M3 values [R, 32 * G] and E8M0 scales [R, G], rows of any stride
OPS = ("look_up", "inject")


class Hashing(NamedTuple):
    """What makes look-back ids into rows of one layer's table, all int64: multipliers [N], primes [C], offsets [C]."""

    multipliers_N: Tensor
    primes_C: Tensor
    offsets_C: Tensor


class Engram(Family):
    """Public Engram ops."""

    TABLE = (
        *(
            Implementation(
                op=f"engram.{op}", module="flashstep.kernels.engram.triton", needs=frozenset({"sm90"})
            )
            for op in OPS
        ),
        *(Implementation(op=f"engram.{op}", module="flashstep.kernels.engram.reference") for op in OPS),
    )

    def look_up(self, lookback_TN: Tensor, hashing: Hashing, table: Planes) -> Tensor:
        """int64 [T, N] compressed ids, newest first, blocked places already PAD -> bf16 [T, X], the tokens' rows dequantised."""
        _check_look_up(lookback_TN, hashing, table)
        return self._loaded["look_up"](lookback_TN, hashing, table)

    def inject(
        self, x_TSD: Tensor, kv: Tensor, *, query_weight_SD: Tensor, key_weight_SD: Tensor, eps: float
    ) -> Tensor:
        """bf16 streams, bf16 [T, (S + 1) * D] keys (stream-major) then value -> bf16 [T, S, D] streams with the value added.

        The gate of a stream is the sigmoid of the signed square root of the normalised product of stream and key.
        """
        assert x_TSD.dtype is torch.bfloat16 and kv.dtype is torch.bfloat16
        assert kv.shape[1] == (x_TSD.shape[1] + 1) * x_TSD.shape[2]
        return self._loaded["inject"](
            x_TSD, kv, query_weight_SD=query_weight_SD, key_weight_SD=key_weight_SD, eps=eps
        )


def _check_look_up(lookback_TN: Tensor, hashing: Hashing, table: Planes) -> None:
    assert lookback_TN.dtype is torch.int64 and lookback_TN.shape[1:] == hashing.multipliers_N.shape
    assert hashing.primes_C.shape[0] % (lookback_TN.shape[1] - 1) == 0
    assert table[0].dtype is torch.uint8 and table[1].dtype is torch.uint8
    assert table[0].shape[1] == 32 * table[1].shape[1] and table[0].shape[0] == table[1].shape[0]


def look_up_cost(*, rows: int, columns: int, width: int) -> Cost:
    """A byte a channel and one a group in (over PCIe where the table is the host's), bf16 out."""
    return Cost(bytes=rows * columns * (3 * width + width // 32), flops=rows * columns * width)


def inject_cost(*, rows: int, streams: int, width: int) -> Cost:
    """Streams in and out, keys and value in, two weight planes."""
    return Cost(bytes=2 * width * (rows * (3 * streams + 1) + 2 * streams), flops=10 * rows * streams * width)
