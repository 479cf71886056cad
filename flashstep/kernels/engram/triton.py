"""Engram injection in Triton: one program a stream of a row, statistics in fp32, one rounding to bf16."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashstep.kernels.engram.reference import GATE_FLOOR

BLOCK = 1024  # channels in registers at a time; the second pass finds a row of 5120 in L1


@triton.jit
def _inject(
    x_ptr,
    kv_ptr,
    query_weight_ptr,
    key_weight_ptr,
    out_ptr,
    kv_stride,
    eps,
    floor: tl.constexpr,
    STREAMS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (row, stream): its gate from one pass over stream and key, then the stream with the gated value added."""
    row, stream = tl.program_id(0).to(tl.int64), tl.program_id(1)
    x_ptr += (row * STREAMS + stream) * WIDTH
    out_ptr += (row * STREAMS + stream) * WIDTH
    kv_ptr += row * kv_stride
    columns = tl.arange(0, BLOCK)
    x_squares = tl.zeros((BLOCK,), tl.float32)
    key_squares = tl.zeros((BLOCK,), tl.float32)
    products = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, WIDTH, BLOCK):
        at = start + columns
        inside = at < WIDTH
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        key = tl.load(kv_ptr + stream * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
        query_weight = tl.load(query_weight_ptr + stream * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
        key_weight = tl.load(key_weight_ptr + stream * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
        x_squares += x * x
        key_squares += key * key
        products += x * (query_weight * key_weight) * key
    x_scale = tl.rsqrt(tl.sum(x_squares) / WIDTH + eps)
    key_scale = tl.rsqrt(tl.sum(key_squares) / WIDTH + eps)
    product = tl.sum(products) * x_scale * key_scale * tl.rsqrt(WIDTH * 1.0)
    root = tl.sqrt(tl.maximum(tl.abs(product), floor))
    gate = tl.sigmoid(tl.where(product < 0, -root, root))
    for start in range(0, WIDTH, BLOCK):
        at = start + columns
        inside = at < WIDTH
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(kv_ptr + STREAMS * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_ptr + at, (x + gate * value).to(tl.bfloat16), mask=inside)


def inject(
    x_TSD: Tensor, kv: Tensor, *, query_weight_SD: Tensor, key_weight_SD: Tensor, eps: float
) -> Tensor:
    """See ``Engram.inject``."""
    rows, streams, width = x_TSD.shape
    assert x_TSD.is_contiguous() and kv.stride(1) == 1
    assert query_weight_SD.is_contiguous() and key_weight_SD.is_contiguous()
    out_TSD = torch.empty_like(x_TSD)
    if rows:
        _inject[(rows, streams)](
            x_TSD,
            kv,
            query_weight_SD,
            key_weight_SD,
            out_TSD,
            kv.stride(0),
            eps,
            floor=GATE_FLOOR,
            STREAMS=streams,
            WIDTH=width,
            BLOCK=min(BLOCK, triton.next_power_of_2(width)),
        )
    return out_TSD


_POINTERS = dict.fromkeys(("x_ptr", "kv_ptr", "query_weight_ptr", "key_weight_ptr", "out_ptr"), "*bf16")
AOT = (
    (
        _inject,
        {**_POINTERS, "kv_stride": "i32", "eps": "fp32"},
        {"floor": GATE_FLOOR, "STREAMS": 4, "WIDTH": 5120, "BLOCK": BLOCK},
    ),
)
