"""MXFP8, "Q8" of spec/model.md section 0: E4M3 data with one E8M0 scale for each 32 channels of a row.

scale = p2c(max(amax, 1e-4) * fp32(1 / 448)), data = e4m3(clamp(x / scale, +-448)). Used by window KV records, by the
inputs of FP8 and FP4 linears, and by Engram rows.
"""

from functools import cache

import torch
from torch import Tensor

from flashstep.quant import e8m0

GROUP = 32
MAX = 448.0
AMAX_FLOOR = 1e-4
INVERSE_MAX = 1.0 / MAX  # rounded to fp32 when it meets an fp32 tensor, as the formula asks


def group_scale(amax: Tensor) -> Tensor:
    """fp32 power-of-two scale of groups whose largest magnitude is ``amax`` (fp32)."""
    return e8m0.ceil_power_of_two(amax.clamp(min=AMAX_FLOOR) * INVERSE_MAX)


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """float8_e4m3fn data [..., n] and E8M0 bytes (uint8 [..., n / 32]) of ``x`` (any float [..., n])."""
    scaled, scale = _scaled(x)
    return scaled.to(torch.float8_e4m3fn).flatten(-2), e8m0.encode(scale.squeeze(-1))


def dequantise(data: Tensor, scale: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values [..., n] in ``dtype`` of E4M3 ``data`` (float8_e4m3fn or its bytes) and E8M0 bytes [..., n / 32]."""
    grouped = decode_e4m3(data).unflatten(-1, (-1, GROUP))
    return (grouped * e8m0.decode(scale).unsqueeze(-1)).flatten(-2).to(dtype)


def decode_e4m3(data: Tensor) -> Tensor:
    """fp32 of E4M3 numbers (float8_e4m3fn or their bytes, any shape): a table look-up, five times as fast as the cast (CPU)."""
    table = _table(data.device)
    return table.index_select(0, data.contiguous().view(torch.uint8).flatten().int()).view(data.shape)


@cache
@torch.inference_mode(False)
def _table(device: torch.device) -> Tensor:
    return torch.arange(256, device=device).to(torch.uint8).view(torch.float8_e4m3fn).float()


def quantise_dequantise(x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    """``dequantise(*quantise(x))`` without the bytes; shape of ``x``, in its dtype unless told (exact in bf16)."""
    scaled, scale = _scaled(x)
    return scaled.to(torch.float8_e4m3fn).float().mul_(scale).flatten(-2).to(dtype or x.dtype)


def _scaled(x: Tensor) -> tuple[Tensor, Tensor]:
    grouped = x.float().unflatten(-1, (-1, GROUP))
    scale = group_scale(grouped.abs().amax(-1, keepdim=True))
    return (grouped / scale).clamp_(-MAX, MAX), scale
