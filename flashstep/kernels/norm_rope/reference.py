"""RMS norm and rotation in plain torch: float64 inside, one rounding at the end."""

import torch
from torch import Tensor


def rms(x_TC: Tensor, weight_C: Tensor, *, eps: float) -> Tensor:
    """bf16 [T, C], bf16 [C] -> bf16 [T, C]: b(w * x * rsqrt(mean(x^2) + eps)), weight multiplied before the cast."""
    assert x_TC.dtype is torch.bfloat16 and weight_C.shape == x_TC.shape[-1:]
    x = x_TC.double()
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return (x * scale * weight_C.double()).bfloat16()


def angles(positions_T: Tensor, frequencies_P: Tensor) -> tuple[Tensor, Tensor]:
    """See ``NormRope.angles``. The product is rounded to fp32 (matters near 1M positions); its cosine is taken in float64."""
    angle = (positions_T.float().unsqueeze(1) * frequencies_P).double()
    return angle.cos().float(), angle.sin().float()


def rotate(x: Tensor, cos_TP: Tensor, sin_TP: Tensor) -> Tensor:
    """bf16 [T, ..., C] -> same: (e, o) -> (e cos - o sin, e sin + o cos) on the last 2P channels, rounded to bf16."""
    assert x.dtype is torch.bfloat16 and x.shape[0] == cos_TP.shape[0]
    turn = torch.complex(cos_TP, sin_TP).to(torch.complex128)
    if x.ndim == 3:
        turn = turn.unsqueeze(1)  # the same for all heads
    out = x.clone()
    tail = out[..., -2 * cos_TP.shape[1] :]
    turned = torch.view_as_complex(tail.double().unflatten(-1, (-1, 2))) * turn
    tail.copy_(torch.view_as_real(turned).flatten(-2))
    return out


def rotate_inverse(x: Tensor, cos_TP: Tensor, sin_TP: Tensor) -> Tensor:
    """bf16 [T, ..., C] -> same: ``rotate`` by the negative angle (attention output)."""
    return rotate(x, cos_TP, -sin_TP)
