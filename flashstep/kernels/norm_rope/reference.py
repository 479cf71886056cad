"""RMS norm and rotation in plain torch: float64 inside, one rounding at the end."""

import torch
from torch import Tensor


def rms(x_TC: Tensor, weight_C: Tensor, *, eps: float) -> Tensor:
    """See ``NormRope.rms``."""
    x = x_TC.double()
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return (x * scale * weight_C.double()).bfloat16()


def angles(positions_T: Tensor, frequencies_P: Tensor) -> tuple[Tensor, Tensor]:
    """See ``NormRope.angles``. The product is rounded to fp32 (matters near 1M positions); its cosine is taken in float64."""
    angle = (positions_T.float().unsqueeze(1) * frequencies_P).double()
    return angle.cos().float(), angle.sin().float()


def rotate(x: Tensor, cos_TP: Tensor, sin_TP: Tensor) -> Tensor:
    """See ``NormRope.rotate``."""
    pairs = cos_TP.shape[1]
    shape = (x.shape[0], *(1 for _ in x.shape[1:-1]), pairs)
    cos, sin = cos_TP.double().view(shape), sin_TP.double().view(shape)
    out = x.clone()
    even, odd = x[..., -2 * pairs :: 2].double(), x[..., 1 - 2 * pairs :: 2].double()
    out[..., -2 * pairs :: 2] = (even * cos - odd * sin).bfloat16()
    out[..., 1 - 2 * pairs :: 2] = (even * sin + odd * cos).bfloat16()
    return out


def rotate_inverse(x: Tensor, cos_TP: Tensor, sin_TP: Tensor) -> Tensor:
    """See ``NormRope.rotate_inverse``."""
    return rotate(x, cos_TP, -sin_TP)
