"""Angles in Triton: rounded to fp32, their cosines in float64, as the reference takes them."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _angles_kernel(
    positions_ptr, frequencies_ptr, cos_ptr, sin_ptr, elements, PAIRS: tl.constexpr, BLOCK: tl.constexpr
):
    """``BLOCK`` elements of both contiguous [T, P] tables; the angle is rounded to fp32 before its cosine is taken."""
    element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    held = element < elements
    position = tl.load(positions_ptr + element // PAIRS, mask=held, other=0).to(tl.float32)
    frequency = tl.load(frequencies_ptr + element % PAIRS, mask=held, other=0.0)
    angle = (position * frequency).to(tl.float64)
    tl.store(cos_ptr + element, tl.cos(angle).to(tl.float32), mask=held)
    tl.store(sin_ptr + element, tl.sin(angle).to(tl.float32), mask=held)


def angles(positions_T: Tensor, frequencies_P: Tensor) -> tuple[Tensor, Tensor]:
    """See ``NormRope.angles``."""
    rows, pairs, block = positions_T.shape[0], frequencies_P.shape[0], 128
    cos, sin = (torch.empty(rows, pairs, dtype=torch.float32, device=frequencies_P.device) for _ in range(2))
    if cos.numel():
        _angles_kernel[(triton.cdiv(cos.numel(), block),)](
            positions_T.contiguous(),
            frequencies_P.contiguous(),
            cos,
            sin,
            cos.numel(),
            PAIRS=pairs,
            BLOCK=block,
            num_warps=4,
        )
    return cos, sin


_ANGLES = {
    "positions_ptr": "*i64:16",
    "frequencies_ptr": "*fp32:16",
    "cos_ptr": "*fp32:16",
    "sin_ptr": "*fp32:16",
    "elements": "i32",
}
# (kernel, signature, constants, options) to compile ahead of time: released and tiny shapes
AOT = tuple((_angles_kernel, _ANGLES, {"PAIRS": pairs, "BLOCK": 128}) for pairs in (32, 8))
