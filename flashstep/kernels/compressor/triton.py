"""Pair pooling and its tail ring in Triton: fp32 inside, one rounding to bf16.

One program a row and block of channels. A row whose slot is negative is padding: it pools to zeros and leaves the ring alone.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 512  # channels a program


@triton.jit
def _pool_pairs(
    value_ptr,
    score_ptr,
    tail_ptr,
    slot_ptr,
    position_ptr,
    out_ptr,
    value_stride,
    score_stride,
    slot_stride,
    RING: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (row, channel block): the pooled pair that the row closes, or zeros."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < CHANNELS
    slot = tl.load(slot_ptr + row).to(tl.int64)
    position = tl.load(position_ptr + row).to(tl.int64)
    pooled = tl.zeros((BLOCK,), tl.float32)
    if (slot >= 0) & (position >= 0) & (position % 2 == 1):
        before = tl.maximum(row - 1, 0)
        same_step = row > 0
        same_step &= tl.load(slot_ptr + before) == slot
        same_step &= tl.load(position_ptr + before) == position - 1
        kept_ptr = tail_ptr + slot * slot_stride + (position - 1) % RING * (2 * CHANNELS)
        value_1 = tl.load(value_ptr + before * value_stride + at, mask=inside & same_step, other=0.0)
        score_1 = tl.load(score_ptr + before * score_stride + at, mask=inside & same_step, other=0.0)
        value_1 += tl.load(kept_ptr + at, mask=inside & (same_step == 0), other=0.0)
        score_1 += tl.load(kept_ptr + CHANNELS + at, mask=inside & (same_step == 0), other=0.0)
        value_2 = tl.load(value_ptr + row * value_stride + at, mask=inside, other=0.0)
        score_2 = tl.load(score_ptr + row * score_stride + at, mask=inside, other=0.0)
        pooled = value_1 * tl.sigmoid(score_1 - score_2) + value_2 * tl.sigmoid(score_2 - score_1)
    tl.store(out_ptr + row * CHANNELS + at, pooled.to(tl.bfloat16), mask=inside)


@triton.jit
def _store_tail(
    value_ptr,
    score_ptr,
    tail_ptr,
    slot_ptr,
    position_ptr,
    rows,
    value_stride,
    score_stride,
    slot_stride,
    RING: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (row, channel block): the row into its place of the ring, unless a later row of this step takes that place."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slot_ptr + row).to(tl.int64)
    later = tl.load(slot_ptr + row + RING, mask=row + RING < rows, other=-1)
    if (slot >= 0) & (later != slot):
        inside = at < CHANNELS
        position = tl.load(position_ptr + row).to(tl.int64)
        place_ptr = tail_ptr + slot * slot_stride + position % RING * (2 * CHANNELS)
        value = tl.load(value_ptr + row * value_stride + at, mask=inside)
        score = tl.load(score_ptr + row * score_stride + at, mask=inside)
        tl.store(place_ptr + at, value, mask=inside)
        tl.store(place_ptr + CHANNELS + at, score, mask=inside)


def pool_pairs(
    value_TC: Tensor, score_TC: Tensor, *, tail: Tensor, slot_T: Tensor, positions_T: Tensor
) -> Tensor:
    """See ``Compressor.pool_pairs``."""
    rows, channels = value_TC.shape
    _check(value_TC, score_TC, tail, slot_T, positions_T)
    pooled_TC = torch.empty(rows, channels, dtype=torch.bfloat16, device=value_TC.device)
    if rows:
        block = min(BLOCK, triton.next_power_of_2(channels))
        _pool_pairs[(rows, triton.cdiv(channels, block))](
            value_TC,
            score_TC,
            tail,
            slot_T,
            positions_T,
            pooled_TC,
            value_TC.stride(0),
            score_TC.stride(0),
            tail.stride(0),
            RING=tail.shape[1],
            CHANNELS=channels,
            BLOCK=block,
        )
    return pooled_TC


def store_tail(
    value_TC: Tensor, score_TC: Tensor, *, tail: Tensor, slot_T: Tensor, positions_T: Tensor
) -> None:
    """See ``Compressor.store_tail``."""
    rows, channels = value_TC.shape
    _check(value_TC, score_TC, tail, slot_T, positions_T)
    if rows:
        block = min(BLOCK, triton.next_power_of_2(channels))
        _store_tail[(rows, triton.cdiv(channels, block))](
            value_TC,
            score_TC,
            tail,
            slot_T,
            positions_T,
            rows,
            value_TC.stride(0),
            score_TC.stride(0),
            tail.stride(0),
            RING=tail.shape[1],
            CHANNELS=channels,
            BLOCK=block,
        )


def _check(value_TC: Tensor, score_TC: Tensor, tail: Tensor, slot_T: Tensor, positions_T: Tensor) -> None:
    """The kernels step over rows by a stride (values and scores are often halves of one product), inside them by one."""
    assert value_TC.stride(1) == 1 and score_TC.stride(1) == 1 and tail[0].is_contiguous()
    assert slot_T.is_contiguous() and positions_T.is_contiguous()


_POINTERS = {
    "value_ptr": "*fp32",
    "score_ptr": "*fp32",
    "tail_ptr": "*fp32",
    "slot_ptr": "*i64",
    "position_ptr": "*i64",
}
_STRIDES = {"value_stride": "i32", "score_stride": "i32", "slot_stride": "i32"}
_SHAPE = {"RING": 8, "CHANNELS": 512, "BLOCK": BLOCK}
AOT = (
    (_pool_pairs, {**_POINTERS, "out_ptr": "*bf16", **_STRIDES}, _SHAPE),
    (_store_tail, {**_POINTERS, "rows": "i32", **_STRIDES}, _SHAPE),
)
