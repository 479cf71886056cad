"""Engram in plain torch: rows dequantised exactly; injection in float64 inside, with one rounding to bf16."""

import torch
from torch import Tensor

from flashstep.kernels.engram import Hashing, Planes
from flashstep.quant import mxfp8

GATE_FLOOR = 1e-6  # spec/model.md 6.5: a zero product gives sigmoid(sqrt(1e-6)), not one half


def look_up(lookback_TN: Tensor, hashing: Hashing, table: Planes) -> Tensor:
    """See ``Engram.look_up``; the table may lie in another memory than the tokens."""
    rows = hash_rows(lookback_TN, hashing)
    values_RD, scales_RG = table
    flat = rows.flatten().to(values_RD.device)
    values, scales = values_RD[flat].to(rows.device), scales_RG[flat].to(rows.device)
    found = mxfp8.dequantise(values.view(torch.float8_e4m3fn), scales, dtype=torch.bfloat16)
    return found.view(rows.shape[0], rows.shape[1] * values_RD.shape[1])


def hash_rows(lookback_TN: Tensor, hashing: Hashing) -> Tensor:
    """int64 [T, C]: the rows of a table that the tokens look up."""
    products_TN = lookback_TN * hashing.multipliers_N
    heads = hashing.primes_C.shape[0] // (lookback_TN.shape[1] - 1)
    running = products_TN[:, 0]
    columns = []
    for place in range(1, products_TN.shape[1]):
        running = running ^ products_TN[:, place]
        columns += [running] * heads
    return torch.stack(columns, dim=1) % hashing.primes_C + hashing.offsets_C


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
