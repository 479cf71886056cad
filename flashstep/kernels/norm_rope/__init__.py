"""RMS norm and rotary position (spec/model.md 0 and 3.2).

Owns the signatures. A rotation takes the cosines and sines of its rows, made once a forward by ``angles``. Suffixes: T rows,
C channels of a vector, P pairs of the rotary tail (the LAST 2P channels, adjacent pairs).
"""

import torch
from torch import Tensor

from flashstep.kernels.registry import Cost, Family, Implementation

OPS = ("rms", "angles", "rotate", "rotate_inverse")
IN_TRITON = (
    "angles",
)  # norms and rotations are parts of ``mhc``, ``attention`` and ``fused``: here are their references


class NormRope(Family):
    """Public norm and rotation ops."""

    TABLE = (
        *(
            Implementation(
                op=f"norm_rope.{op}", module="flashstep.kernels.norm_rope.triton", needs=frozenset({"sm90"})
            )
            for op in IN_TRITON
        ),
        *(Implementation(op=f"norm_rope.{op}", module="flashstep.kernels.norm_rope.reference") for op in OPS),
    )

    def rms(self, x_TC: Tensor, weight_C: Tensor, *, eps: float) -> Tensor:
        """bf16 [T, C], bf16 [C] -> bf16 [T, C]: b(w * x * rsqrt(mean(x^2) + eps)), weight multiplied before the cast."""
        assert x_TC.dtype is torch.bfloat16 and weight_C.shape == x_TC.shape[-1:]
        return self._loaded["rms"](x_TC, weight_C, eps=eps)

    def angles(self, positions_T: Tensor, frequencies_P: Tensor) -> tuple[Tensor, Tensor]:
        """int64 [T], fp32 [P] -> cosines and sines fp32 [T, P] of the angle fp32(position) * frequency, taken in fp32."""
        assert frequencies_P.dtype is torch.float32 and positions_T.ndim == 1
        return self._loaded["angles"](positions_T, frequencies_P)

    def rotate(self, x: Tensor, cos_TP: Tensor, sin_TP: Tensor) -> Tensor:
        """bf16 [T, ..., C] -> same: (e, o) -> (e cos - o sin, e sin + o cos) on the last 2P channels, rounded to bf16."""
        assert x.dtype is torch.bfloat16 and x.shape[0] == cos_TP.shape[0]
        return self._loaded["rotate"](x, cos_TP, sin_TP)

    def rotate_inverse(self, x: Tensor, cos_TP: Tensor, sin_TP: Tensor) -> Tensor:
        """bf16 [T, ..., C] -> same: ``rotate`` by the negative angle (attention output)."""
        assert x.dtype is torch.bfloat16 and x.shape[0] == cos_TP.shape[0]
        return self._loaded["rotate_inverse"](x, cos_TP, sin_TP)


def rms_cost(*, rows: int, channels: int) -> Cost:
    """bf16 in and out, one weight row."""
    return Cost(bytes=2 * channels * (2 * rows + 1), flops=4 * rows * channels)


def angles_cost(*, rows: int, pairs: int) -> Cost:
    """Two fp32 tables out."""
    return Cost(bytes=rows * (8 + 8 * pairs), flops=3 * rows * pairs)


def rotate_cost(*, rows: int, vectors: int, channels: int, pairs: int) -> Cost:
    """bf16 in and out; ``vectors`` a row (heads)."""
    return Cost(bytes=rows * (4 * vectors * channels + 8 * pairs), flops=6 * rows * vectors * pairs)


rotate_inverse_cost = rotate_cost
