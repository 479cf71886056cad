"""Injection of gathered n-gram rows into the residual streams (spec/model.md 6.5).

Owns the signature. The rows come from the table (``flashstep.engram``), their projection from a linear; here they meet the
streams. Suffixes: T rows, S streams, D width.
"""

import torch
from torch import Tensor

from flashstep.kernels.registry import Cost, Family, Implementation

OPS = ("inject",)


class Engram(Family):
    """Public Engram op."""

    TABLE = (
        *(
            Implementation(
                op=f"engram.{op}", module="flashstep.kernels.engram.triton", needs=frozenset({"sm90"})
            )
            for op in OPS
        ),
        *(Implementation(op=f"engram.{op}", module="flashstep.kernels.engram.reference") for op in OPS),
    )

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


def inject_cost(*, rows: int, streams: int, width: int) -> Cost:
    """Streams in and out, keys and value in, two weight planes."""
    return Cost(bytes=2 * width * (rows * (3 * streams + 1) + 2 * streams), flops=10 * rows * streams * width)
