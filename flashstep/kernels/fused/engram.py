"""The look-up of n-gram rows in Triton, quantised for the product that takes them, in the launch that fetches them."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from flashstep.kernels.cast.triton import e4m3_of, largest, mxfp8_exponent, scale_of
from flashstep.kernels.engram import Hashing, Planes
from flashstep.kernels.engram.triton import LOOK_UP, LOOK_UP_CONSTANTS, launch_look_up, look_up_rows


@triton.jit
def _look_up_quantised(
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
    """Program (block of tokens, hash column). Quantised again a group keeps its numbers, unless it is below the floor."""
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
    exponent = mxfp8_exponent(largest(x, 1))
    y = e4m3_of(x, exponent).to(tl.float32) * scale_of(exponent)[:, None]
    channel = out[:, None] * 32 + tl.arange(0, 32)[None, :]
    tl.store(out_ptr + channel, y.to(tl.bfloat16), mask=held[:, None])


def look_up_quantised(lookback_TN: Tensor, hashing: Hashing, table: Planes) -> Any:
    """See ``Fused.look_up_quantised``."""
    return launch_look_up(_look_up_quantised, lookback_TN, hashing, table)


AOT = tuple(
    (
        _look_up_quantised,
        LOOK_UP,
        {**LOOK_UP_CONSTANTS, "VALUES_ROW": values, "SCALES_ROW": scales},
        {"num_warps": 4},
    )
    for values, scales in ((256, 8), (264, 264))
)
