"""NVFP4 without a tensor scale, "QN4" of spec/model.md section 0: E2M1 data, one E4M3 scale for each 16 channels.

scale = e4m3(max(amax, 6 * 2^-9) / 6), data = e2m1(clamp(x / scale, +-6)); the division by the scale must be a true one,
since a reciprocal moves ties. Scales saturate at 448 (as the hardware conversion does). Used by compressed KV records.
"""

import torch
from torch import Tensor

from flashstep.quant import e2m1

GROUP = 16
AMAX_FLOOR = 6.0 * 2.0**-9
SCALE_MAX = 448.0


def group_scale(amax: Tensor) -> Tensor:
    """float8_e4m3fn scale of groups whose largest magnitude is ``amax`` (fp32)."""
    return (amax.clamp(min=AMAX_FLOOR) / e2m1.MAX).clamp(max=SCALE_MAX).to(torch.float8_e4m3fn)


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Packed E2M1 (uint8 [..., n / 2]) and float8_e4m3fn scales [..., n / 16] of ``x`` (any float [..., n])."""
    grid, scale = _on_grid(x)
    return e2m1.pack(e2m1.encode(grid).flatten(-2)), scale.squeeze(-1)


def dequantise(data: Tensor, scale: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values [..., n] in ``dtype`` of packed E2M1 ``data`` [..., n / 2] and E4M3 scales (or their bytes) [..., n / 16]."""
    grouped = e2m1.decode(data).unflatten(-1, (-1, GROUP))
    return (grouped * scale.view(torch.float8_e4m3fn).float().unsqueeze(-1)).flatten(-2).to(dtype)


def quantise_dequantise(x: Tensor) -> Tensor:
    """``dequantise(*quantise(x))`` without the bytes; shape and dtype of ``x`` (exact in bf16)."""
    grid, scale = _on_grid(x)
    return (grid * scale.float()).flatten(-2).to(x.dtype)


def _on_grid(x: Tensor) -> tuple[Tensor, Tensor]:
    grouped = x.float().unflatten(-1, (-1, GROUP))
    scale = group_scale(grouped.abs().amax(-1, keepdim=True))
    return e2m1.round_to_grid((grouped / scale.float()).clamp(-e2m1.MAX, e2m1.MAX)), scale
