"""FP8 weights: E4M3 data [out, in] with one E8M0 scale for each 32 x 32 block (the last ones may be ragged).

W[o, i] = e4m3[o, i] * 2^(scale[o // 32, i // 32] - 127), exact in bf16. The scale rule is that of MXFP8, over a block.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from flashstep.quant import e8m0, mxfp8

BLOCK = 32


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """float8_e4m3fn [out, in] and E8M0 bytes (uint8 [ceil(out / 32), ceil(in / 32)]) of ``weight`` (float [out, in])."""
    rows, columns = weight.shape
    padded = pad(weight.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
    scale = mxfp8.group_scale(blocks.abs().amax((1, 3)))
    data = (weight.float() / _spread(scale, weight.shape)).clamp(-mxfp8.MAX, mxfp8.MAX)
    return data.to(torch.float8_e4m3fn), e8m0.encode(scale)


def dequantise(data: Tensor, scale: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values [out, in] in ``dtype`` of E4M3 ``data`` (float8_e4m3fn or its bytes) and block E8M0 bytes."""
    expected = tuple(-(-n // BLOCK) for n in data.shape)
    if tuple(scale.shape) != expected:
        raise ValueError(
            f"a weight of shape {tuple(data.shape)} has block scales {expected}; got {tuple(scale.shape)}"
        )
    return (data.view(torch.float8_e4m3fn).float() * _spread(e8m0.decode(scale), data.shape)).to(dtype)


def quantise_dequantise(weight: Tensor) -> Tensor:
    """The weight after a round trip through the format; shape and dtype of ``weight``."""
    return dequantise(*quantise(weight), dtype=weight.dtype)


def _spread(scale: Tensor, shape: torch.Size) -> Tensor:
    return scale.repeat_interleave(BLOCK, 0)[: shape[0]].repeat_interleave(BLOCK, 1)[:, : shape[1]]
