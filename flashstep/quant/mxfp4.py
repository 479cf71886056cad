"""MXFP4, "QM4" of spec/model.md section 0: E2M1 data with one E8M0 scale for each 32 channels of a row.

scale = p2c(max(amax, 6 * 2^-126) * fp32(1 / 6)), data = e2m1(clamp(x / scale, +-6)). Used by index keys and queries and
by the weights of routed experts.
"""

import torch
from torch import Tensor

from flashstep.quant import e2m1, e8m0

GROUP = 32
AMAX_FLOOR = 6.0 * 2.0**-126
INVERSE_MAX = 1.0 / e2m1.MAX


def group_scale(amax: Tensor) -> Tensor:
    """fp32 power-of-two scale of groups whose largest magnitude is ``amax`` (fp32)."""
    return e8m0.ceil_power_of_two(amax.clamp(min=AMAX_FLOOR) * INVERSE_MAX)


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Packed E2M1 (uint8 [..., n / 2]) and E8M0 bytes (uint8 [..., n / 32]) of ``x`` (any float [..., n])."""
    grid, scale = _on_grid(x)
    return e2m1.pack(e2m1.encode(grid).flatten(-2)), e8m0.encode(scale.squeeze(-1))


def dequantise(data: Tensor, scale: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values [..., n] in ``dtype`` of packed E2M1 ``data`` [..., n / 2] and E8M0 bytes [..., n / 32]."""
    grouped = e2m1.decode(data).unflatten(-1, (-1, GROUP))
    return (grouped * e8m0.decode(scale).unsqueeze(-1)).flatten(-2).to(dtype)


def quantise_dequantise(x: Tensor) -> Tensor:
    """``dequantise(*quantise(x))`` without the bytes; shape and dtype of ``x`` (exact in bf16)."""
    grid, scale = _on_grid(x)
    return (grid * scale).flatten(-2).to(x.dtype)


def _on_grid(x: Tensor) -> tuple[Tensor, Tensor]:
    grouped = x.float().unflatten(-1, (-1, GROUP))
    scale = group_scale(grouped.abs().amax(-1, keepdim=True))
    return e2m1.round_to_grid((grouped / scale).clamp(-e2m1.MAX, e2m1.MAX)), scale
