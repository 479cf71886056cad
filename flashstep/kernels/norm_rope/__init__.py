"""RMS norm and rotary position (spec/model.md 0 and 3.2).

Owns the signature of ``angles``, made once a forward. Norms and rotations are parts of the ops of ``mhc``, ``attention`` and
``fused``: ``reference`` says what they are. Suffixes: T rows, C channels of a vector, P pairs of the rotary tail (the LAST 2P
channels, adjacent pairs).
"""

import torch
from torch import Tensor

from flashstep.kernels.registry import Cost, Family, Implementation

OPS = ("angles",)


class NormRope(Family):
    """Public norm and rotation ops."""

    TABLE = (
        *(
            Implementation(
                op=f"norm_rope.{op}", module="flashstep.kernels.norm_rope.triton", needs=frozenset({"sm90"})
            )
            for op in OPS
        ),
        *(Implementation(op=f"norm_rope.{op}", module="flashstep.kernels.norm_rope.reference") for op in OPS),
    )

    def angles(self, positions_T: Tensor, frequencies_P: Tensor) -> tuple[Tensor, Tensor]:
        """int64 [T], fp32 [P] -> cosines and sines fp32 [T, P] of the angle fp32(position) * frequency, taken in fp32."""
        assert frequencies_P.dtype is torch.float32 and positions_T.ndim == 1
        return self._loaded["angles"](positions_T, frequencies_P)


def angles_cost(*, rows: int, pairs: int) -> Cost:
    """Two fp32 tables out."""
    return Cost(bytes=rows * (8 + 8 * pairs), flops=3 * rows * pairs)
