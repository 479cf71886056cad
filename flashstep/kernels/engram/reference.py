"""Engram injection in plain torch: float64 inside, one rounding to bf16."""

import torch
from torch import Tensor

GATE_FLOOR = 1e-6  # spec/model.md 6.5: a zero product gives sigmoid(sqrt(1e-6)), not one half


def inject(
    x_TSD: Tensor, kv: Tensor, *, query_weight_SD: Tensor, key_weight_SD: Tensor, eps: float
) -> Tensor:
    """See ``Engram.inject``; statistics are per stream."""
    streams, width = x_TSD.shape[1:]
    x = x_TSD.double()
    key = kv[:, : streams * width].double().unflatten(1, (streams, width))
    value = kv[:, streams * width :].double().unsqueeze(1)
    weight = query_weight_SD.double() * key_weight_SD.double()
    x_scale = torch.rsqrt(x.square().mean(-1) + eps)
    key_scale = torch.rsqrt(key.square().mean(-1) + eps)
    product = (x * weight * key).sum(-1) * x_scale * key_scale * width**-0.5
    gate = torch.sigmoid(torch.copysign(product.abs().clamp(min=GATE_FLOOR).sqrt(), product))
    return (x + gate.unsqueeze(2) * value).bfloat16()
