"""Engram in Triton: rows hashed, fetched and decoded in one launch; injection with statistics in fp32 and one rounding to bf16.

A row is fetched from wherever its bytes lie, the device or pinned host memory: the kernel reads them over PCIe itself, with as
many programs waiting at once as the device holds. ``look_up_rows`` and ``launch_look_up`` are used by ``kernels.fused`` too.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashstep.kernels.engram import Hashing, Planes
from flashstep.kernels.engram.reference import GATE_FLOOR
from flashstep.kernels.jit import programmatic, wait_for_producers

TOKENS = 8  # of one look-up program: 16 bytes of a row a thread, in four warps


@triton.jit
def look_up_rows(
    lookback_ptr,
    multipliers_ptr,
    primes_ptr,
    offsets_ptr,
    values_ptr,
    scales_ptr,
    tokens,
    lookback_stride,
    LOOKBACK: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    GROUPS: tl.constexpr,
    VALUES_ROW: tl.constexpr,
    SCALES_ROW: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Program (block of tokens, hash column): their rows, fp32 [tokens * groups, 32], where each group goes, and which exist."""
    column = tl.program_id(1)
    number = tl.arange(0, TOKENS * GROUPS)
    token = (tl.program_id(0) * TOKENS + number // GROUPS).to(tl.int64)
    group = number % GROUPS
    held = token < tokens
    ids_ptr = lookback_ptr + token * lookback_stride
    running = tl.load(ids_ptr, mask=held, other=0) * tl.load(multipliers_ptr)
    for back in tl.static_range(1, LOOKBACK):
        product = tl.load(ids_ptr + back, mask=held, other=0) * tl.load(multipliers_ptr + back)
        running = tl.where(back <= column // (COLUMNS // (LOOKBACK - 1)) + 1, running ^ product, running)
    row = running % tl.load(primes_ptr + column) + tl.load(offsets_ptr + column)
    inside = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    data = tl.load(values_ptr + row[:, None] * VALUES_ROW + inside, mask=held[:, None], other=0)
    exponent = tl.load(scales_ptr + row * SCALES_ROW + group, mask=held, other=0).to(tl.int32)
    bits = tl.where(exponent == 0, 1 << 22, tl.where(exponent == 255, 0x7FC00000, exponent << 23))
    scale = bits.to(tl.int32).to(tl.float32, bitcast=True)
    value = data.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    out = (token * COLUMNS + column) * GROUPS + group
    return (value * scale[:, None]).to(tl.bfloat16).to(tl.float32), out, held


@triton.jit
def _look_up(
    lookback_ptr,
    multipliers_ptr,
    primes_ptr,
    offsets_ptr,
    values_ptr,
    scales_ptr,
    out_ptr,
    tokens,
    lookback_stride,
    LOOKBACK: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    GROUPS: tl.constexpr,
    VALUES_ROW: tl.constexpr,
    SCALES_ROW: tl.constexpr,
):
    """Program (block of tokens, hash column)."""
    x, out, held = look_up_rows(
        lookback_ptr,
        multipliers_ptr,
        primes_ptr,
        offsets_ptr,
        values_ptr,
        scales_ptr,
        tokens,
        lookback_stride,
        LOOKBACK,
        COLUMNS,
        TOKENS,
        GROUPS,
        VALUES_ROW,
        SCALES_ROW,
    )
    channel = out[:, None] * 32 + tl.arange(0, 32)[None, :]
    tl.store(out_ptr + channel, x.to(tl.bfloat16), mask=held[:, None])


@triton.jit
def _inject(
    x_ptr,
    kv_ptr,
    query_weight_ptr,
    key_weight_ptr,
    out_ptr,
    kv_stride,
    eps,
    FLOOR: tl.constexpr,
    STREAMS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_POW2: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (row, stream): its gate from stream and key, then the stream with the gated value added; all read once."""
    row, stream = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, WIDTH_POW2)
    inside = at < WIDTH
    query_weight = tl.load(query_weight_ptr + stream * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    key_weight = tl.load(key_weight_ptr + stream * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    wait_for_producers(PDL)
    x_ptr += (row * STREAMS + stream) * WIDTH
    kv_ptr += row * kv_stride
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    key = tl.load(kv_ptr + stream * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(kv_ptr + STREAMS * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    x_scale = tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)
    key_scale = tl.rsqrt(tl.sum(key * key, 0) / WIDTH + eps)
    products = tl.sum(x * (query_weight * key_weight) * key, 0)
    product = products * x_scale * key_scale * tl.rsqrt(WIDTH * 1.0)
    root = tl.sqrt(tl.maximum(tl.abs(product), FLOOR))
    gate = tl.sigmoid(tl.where(product < 0, -root, root))
    out_ptr += (row * STREAMS + stream) * WIDTH
    tl.store(out_ptr + at, (x + gate * value).to(tl.bfloat16), mask=inside)


def look_up(lookback_TN: Tensor, hashing: Hashing, table: Planes) -> Tensor:
    """See ``Engram.look_up``."""
    return launch_look_up(_look_up, lookback_TN, hashing, table)


def launch_look_up(kernel: Any, lookback_TN: Tensor, hashing: Hashing, table: Planes) -> Tensor:
    """What ``kernel``, which makes bf16 of ``look_up_rows``, gives: [T, C * D].

    The table may be pinned host memory, whose address is the device's too. Programs that run together read one column, a small
    part of the table: the device translates fewer addresses. No programmatic launch: a step may put it on a stream of its own.
    """
    values_RD, scales_RG = table
    (tokens, lookback), columns, groups = lookback_TN.shape, hashing.primes_C.shape[0], scales_RG.shape[1]
    assert lookback_TN.stride(1) == 1 and values_RD.stride(1) == 1 and scales_RG.stride(1) == 1
    assert groups & (groups - 1) == 0, "a row has a power of two of groups"
    shape = (tokens, columns * values_RD.shape[1])
    out_TX = torch.empty(shape, dtype=torch.bfloat16, device=lookback_TN.device)
    if tokens:
        kernel[(triton.cdiv(tokens, TOKENS), columns)](
            lookback_TN,
            *hashing,
            values_RD,
            scales_RG,
            out_TX,
            tokens,
            lookback_TN.stride(0),
            LOOKBACK=lookback,
            COLUMNS=columns,
            TOKENS=TOKENS,
            GROUPS=groups,
            VALUES_ROW=values_RD.stride(0),
            SCALES_ROW=scales_RG.stride(0),
            num_warps=max(1, min(4, TOKENS * groups // 16)),
        )
    return out_TX


def inject(
    x_TSD: Tensor, kv: Tensor, *, query_weight_SD: Tensor, key_weight_SD: Tensor, eps: float
) -> Tensor:
    """See ``Engram.inject``."""
    rows, streams, width = x_TSD.shape
    assert x_TSD.is_contiguous() and kv.stride(1) == 1
    assert query_weight_SD.is_contiguous() and key_weight_SD.is_contiguous()
    out_TSD = torch.empty_like(x_TSD)
    if rows:
        pdl = programmatic(x_TSD.device)
        _inject[(rows, streams)](
            x_TSD,
            kv,
            query_weight_SD,
            key_weight_SD,
            out_TSD,
            kv.stride(0),
            eps,
            FLOOR=GATE_FLOOR,
            STREAMS=streams,
            WIDTH=width,
            WIDTH_POW2=triton.next_power_of_2(width),
            PDL=pdl,
            launch_pdl=pdl,
            num_warps=_inject_warps(width),
        )
    return out_TSD


def _inject_warps(width: int) -> int:
    return min(4, max(1, triton.next_power_of_2(width) // 512))


_POINTERS = dict.fromkeys(("x_ptr", "kv_ptr", "query_weight_ptr", "key_weight_ptr", "out_ptr"), "*bf16:16")
LOOK_UP = {
    **dict.fromkeys(("lookback_ptr", "multipliers_ptr", "primes_ptr", "offsets_ptr"), "*i64:16"),
    "values_ptr": "*u8:16",
    "scales_ptr": "*u8",
    "out_ptr": "*bf16:16",
    "tokens": "i32",
    "lookback_stride": "i32",
}
LOOK_UP_CONSTANTS = {"LOOKBACK": 4, "COLUMNS": 24, "TOKENS": TOKENS, "GROUPS": 8}
AOT = (
    *(
        (
            _look_up,
            LOOK_UP,
            {**LOOK_UP_CONSTANTS, "VALUES_ROW": values, "SCALES_ROW": scales},
            {"num_warps": 4},
        )
        for values, scales in ((256, 8), (264, 264))
    ),
    (
        _inject,
        {**_POINTERS, "kv_stride": "i32:16", "eps": "fp32"},
        {"FLOOR": GATE_FLOOR, "STREAMS": 4, "WIDTH": 5120, "WIDTH_POW2": 8192, "PDL": True},
        {"num_warps": _inject_warps(5120)},
    ),
)
