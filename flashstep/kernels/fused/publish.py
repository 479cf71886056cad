"""A KV source's entries and index keys in Triton: pools, norms, rotates and stores, as ``fused.triton`` does its records.

The ring of open pairs is read by one launch and written by a later one: a row that takes a place of it may not be faster than the
first row of its slot, which may read that place.
"""

import triton
import triton.language as tl
from torch import Tensor

from flashstep.kernels.cast import Planes
from flashstep.kernels.cast.triton import pairs, place_of
from flashstep.kernels.fused.triton import (
    PDL_ON,
    RECORD,
    ROW,
    STRIDES,
    checked_angles,
    empty_rows,
    launch,
    normed_pairs,
    put_fp4,
    put_pairs,
    record_of,
    strides_of,
    turned_pairs,
    warps_of,
)
from flashstep.kernels.jit import wait_for_producers


@triton.jit
def _publish_pairs(
    x_ptr,
    weight_ptr,
    tail_ptr,
    row_slot_ptr,
    position_ptr,
    cos_ptr,
    sin_ptr,
    latent_ptr,
    values_ptr,
    scales_ptr,
    slot_ptr,
    blocks,
    x_stride,
    tail_stride,
    cos_stride,
    values_block,
    values_place,
    scales_block,
    scales_place,
    eps,
    RING: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_POW2: tl.constexpr,
    SLOTS: tl.constexpr,
    PAIRS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row: the pair it closes, if any."""
    wait_for_producers(PDL)
    CHANNELS: tl.constexpr = GROUPS * 16
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS_POW2)
    held = group < GROUPS
    at = group[:, None] * 16 + tl.arange(0, 16)[None, :]
    inside = held[:, None]
    x_ptr += row * x_stride
    slot = tl.load(row_slot_ptr + row).to(tl.int64)
    position = tl.load(position_ptr + row).to(tl.int64)
    value = tl.load(x_ptr + at, mask=inside, other=0.0)
    score = tl.load(x_ptr + CHANNELS + at, mask=inside, other=0.0)
    pooled = tl.zeros(value.shape, tl.float32)
    if (slot >= 0) & (position >= 0) & (position % 2 == 1):
        before = tl.maximum(row - 1, 0)
        same_step = (row > 0) & (tl.load(row_slot_ptr + before) == slot)
        same_step &= tl.load(position_ptr + before) == position - 1
        kept_ptr = tail_ptr + slot * tail_stride + (position - 1) % RING * (2 * CHANNELS)
        here, there = inside & same_step, inside & (same_step == 0)
        value_1 = tl.load(x_ptr - x_stride + at, mask=here, other=0.0)
        score_1 = tl.load(x_ptr - x_stride + CHANNELS + at, mask=here, other=0.0)
        value_1 += tl.load(kept_ptr + at, mask=there, other=0.0)
        score_1 += tl.load(kept_ptr + CHANNELS + at, mask=there, other=0.0)
        pooled = value_1 * tl.sigmoid(score_1 - score) + value * tl.sigmoid(score - score_1)
    pooled = pooled.to(tl.bfloat16).to(tl.float32)
    even, odd = tl.split(tl.reshape(pooled, (GROUPS_POW2, 8, 2)))
    even, odd = normed_pairs(even, odd, weight_ptr, eps, group, 16, GROUPS)
    put_pairs(even, odd, latent_ptr + row * CHANNELS, group, 16, GROUPS)
    block, place, live = place_of(slot_ptr, row, blocks, SLOTS)
    if live:
        even, odd = turned_pairs(
            even, odd, cos_ptr + row * cos_stride, sin_ptr + row * cos_stride, group, 16, GROUPS, PAIRS
        )
        values_ptr += block * values_block + place * values_place
        scales_ptr += block * scales_block + place * scales_place
        put_fp4(even, odd, values_ptr, scales_ptr, group, held, 16)


@triton.jit
def _put_row(
    x_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    latent_ptr,
    values_ptr,
    scales_ptr,
    slot_ptr,
    row,
    blocks,
    x_stride,
    cos_stride,
    values_block,
    values_place,
    scales_block,
    scales_place,
    eps,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_POW2: tl.constexpr,
    SLOTS: tl.constexpr,
    PAIRS: tl.constexpr,
    LATENT: tl.constexpr,
):
    """One row: its norm, which goes to ``latent`` too where LATENT says so; a group of 16 is NVFP4's, one of 32 MXFP4's."""
    group = tl.arange(0, GROUPS_POW2)
    held = group < GROUPS
    even, odd = pairs(x_ptr + row * x_stride, group, held, GROUP)
    even, odd = normed_pairs(even, odd, weight_ptr, eps, group, GROUP, GROUPS)
    if LATENT:
        put_pairs(even, odd, latent_ptr + row * (GROUPS * GROUP), group, GROUP, GROUPS)
    block, place, live = place_of(slot_ptr, row, blocks, SLOTS)
    if live:
        even, odd = turned_pairs(
            even, odd, cos_ptr + row * cos_stride, sin_ptr + row * cos_stride, group, GROUP, GROUPS, PAIRS
        )
        values_ptr += block * values_block + place * values_place
        scales_ptr += block * scales_block + place * scales_place
        put_fp4(even, odd, values_ptr, scales_ptr, group, held, GROUP)


@triton.jit
def _publish_row(
    x_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    latent_ptr,
    values_ptr,
    scales_ptr,
    slot_ptr,
    blocks,
    x_stride,
    cos_stride,
    values_block,
    values_place,
    scales_block,
    scales_place,
    eps,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_POW2: tl.constexpr,
    SLOTS: tl.constexpr,
    PAIRS: tl.constexpr,
    LATENT: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row."""
    wait_for_producers(PDL)
    _put_row(
        x_ptr,
        weight_ptr,
        cos_ptr,
        sin_ptr,
        latent_ptr,
        values_ptr,
        scales_ptr,
        slot_ptr,
        tl.program_id(0).to(tl.int64),
        blocks,
        x_stride,
        cos_stride,
        values_block,
        values_place,
        scales_block,
        scales_place,
        eps,
        GROUP,
        GROUPS,
        GROUPS_POW2,
        SLOTS,
        PAIRS,
        LATENT,
    )


@triton.jit
def _store_key_and_tail(
    x_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    values_ptr,
    scales_ptr,
    slot_ptr,
    blocks,
    x_stride,
    cos_stride,
    values_block,
    values_place,
    scales_block,
    scales_place,
    eps,
    product_ptr,
    tail_ptr,
    row_slot_ptr,
    position_ptr,
    rows,
    product_stride,
    tail_stride,
    GROUPS: tl.constexpr,
    GROUPS_POW2: tl.constexpr,
    SLOTS: tl.constexpr,
    PAIRS: tl.constexpr,
    RING: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_POW2: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (row, part): part 0 its key, part 1 its place in the ring, unless a later row of this step takes that."""
    wait_for_producers(PDL)
    row = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) == 0:
        _put_row(
            x_ptr,
            weight_ptr,
            cos_ptr,
            sin_ptr,
            x_ptr,
            values_ptr,
            scales_ptr,
            slot_ptr,
            row,
            blocks,
            x_stride,
            cos_stride,
            values_block,
            values_place,
            scales_block,
            scales_place,
            eps,
            32,
            GROUPS,
            GROUPS_POW2,
            SLOTS,
            PAIRS,
            False,
        )
    else:
        slot = tl.load(row_slot_ptr + row).to(tl.int64)
        later = tl.load(row_slot_ptr + row + RING, mask=row + RING < rows, other=-1)
        if (slot >= 0) & (later != slot):
            at = tl.arange(0, WIDTH_POW2)
            position = tl.load(position_ptr + row).to(tl.int64)
            both = tl.load(product_ptr + row * product_stride + at, mask=at < WIDTH, other=0.0)
            place_ptr = tail_ptr + slot * tail_stride + position % RING * WIDTH
            tl.store(place_ptr + at, both, mask=at < WIDTH)


def publish_pairs(
    x_TX: Tensor,
    weight_C: Tensor,
    *,
    eps: float,
    tail: Tensor,
    row_slot_T: Tensor,
    positions_T: Tensor,
    cos_TP: Tensor,
    sin_TP: Tensor,
    planes: Planes,
    slot_T: Tensor,
) -> Tensor:
    """See ``Fused.publish_pairs``."""
    rows, channels = x_TX.shape[0], weight_C.shape[0]
    assert x_TX.stride(1) == 1 and tail[0].is_contiguous() and channels % 16 == 0
    assert row_slot_T.is_contiguous() and positions_T.is_contiguous()
    latent_TC = empty_rows(x_TX, channels)
    if rows:
        _publish_pairs[(rows,)](
            x_TX,
            weight_C,
            tail,
            row_slot_T,
            positions_T,
            *checked_angles(cos_TP, sin_TP),
            latent_TC,
            *record_of(planes, slot_T, values=channels // 2, scales=channels // 16),
            x_TX.stride(0),
            tail.stride(0),
            cos_TP.stride(0),
            *strides_of(planes),
            eps,
            RING=tail.shape[1],
            GROUPS=channels // 16,
            GROUPS_POW2=triton.next_power_of_2(channels // 16),
            SLOTS=planes[0].shape[1],
            PAIRS=cos_TP.shape[1],
            num_warps=warps_of(2 * channels),
            **launch(x_TX.device),
        )
    return latent_TC


def publish_rows(
    x_TC: Tensor,
    weight_C: Tensor,
    *,
    eps: float,
    cos_TP: Tensor,
    sin_TP: Tensor,
    planes: Planes,
    slot_T: Tensor,
) -> Tensor:
    """See ``Fused.publish_rows``."""
    latent_TC = empty_rows(x_TC, weight_C.shape[0])
    _publish(x_TC, weight_C, eps, (cos_TP, sin_TP), planes, slot_T, group=16, latent_TC=latent_TC)
    return latent_TC


def store_key(
    x_TK: Tensor,
    weight_K: Tensor,
    *,
    eps: float,
    cos_TP: Tensor,
    sin_TP: Tensor,
    planes: Planes,
    slot_T: Tensor,
) -> None:
    """See ``Fused.store_key``."""
    _publish(x_TK, weight_K, eps, (cos_TP, sin_TP), planes, slot_T, group=32, latent_TC=None)


def store_key_and_tail(
    x_TK: Tensor,
    weight_K: Tensor,
    *,
    eps: float,
    cos_TP: Tensor,
    sin_TP: Tensor,
    planes: Planes,
    slot_T: Tensor,
    product_TX: Tensor,
    tail: Tensor,
    row_slot_T: Tensor,
    positions_T: Tensor,
) -> None:
    """See ``Fused.store_key_and_tail``."""
    rows, channels = x_TK.shape
    assert channels % 32 == 0 and x_TK.stride(1) == 1
    assert product_TX.stride(1) == 1 and tail[0].is_contiguous()
    assert row_slot_T.is_contiguous() and positions_T.is_contiguous()
    width = product_TX.shape[1]
    if rows:
        _store_key_and_tail[(rows, 2)](
            x_TK,
            weight_K,
            *checked_angles(cos_TP, sin_TP),
            *record_of(planes, slot_T, values=channels // 2, scales=channels // 32),
            x_TK.stride(0),
            cos_TP.stride(0),
            *strides_of(planes),
            eps,
            product_TX,
            tail,
            row_slot_T,
            positions_T,
            rows,
            product_TX.stride(0),
            tail.stride(0),
            GROUPS=channels // 32,
            GROUPS_POW2=triton.next_power_of_2(channels // 32),
            SLOTS=planes[0].shape[1],
            PAIRS=cos_TP.shape[1],
            RING=tail.shape[1],
            WIDTH=width,
            WIDTH_POW2=triton.next_power_of_2(width),
            num_warps=2,
            **launch(x_TK.device),
        )


def _publish(
    x_TC: Tensor,
    weight_C: Tensor,
    eps: float,
    rotation: tuple[Tensor, Tensor],
    planes: Planes,
    slot_T: Tensor,
    *,
    group: int,
    latent_TC: Tensor | None,
) -> None:
    rows, channels = x_TC.shape
    assert channels % group == 0 and x_TC.stride(1) == 1
    if rows:
        _publish_row[(rows,)](
            x_TC,
            weight_C,
            *checked_angles(*rotation),
            latent_TC,
            *record_of(planes, slot_T, values=channels // 2, scales=channels // group),
            x_TC.stride(0),
            rotation[0].stride(0),
            *strides_of(planes),
            eps,
            GROUP=group,
            GROUPS=channels // group,
            GROUPS_POW2=triton.next_power_of_2(channels // group),
            SLOTS=planes[0].shape[1],
            PAIRS=rotation[0].shape[1],
            LATENT=latent_TC is not None,
            num_warps=warps_of(channels),
            **launch(x_TC.device),
        )


_KEY = {**ROW, "latent_ptr": "*bf16:16", **RECORD, **STRIDES}
# as in ``fused.triton``
AOT = (
    (
        _publish_pairs,
        {
            **_KEY,
            "x_ptr": "*fp32:16",
            "tail_ptr": "*fp32:16",
            "row_slot_ptr": "*i64:16",
            "position_ptr": "*i64:16",
            "tail_stride": "i32:16",
        },
        {"RING": 8, "GROUPS": 32, "GROUPS_POW2": 32, "SLOTS": 64, "PAIRS": 32, **PDL_ON},
        {"num_warps": 4},
    ),
    (
        _store_key_and_tail,
        {
            **_KEY,
            "product_ptr": "*fp32:16",
            "tail_ptr": "*fp32:16",
            "row_slot_ptr": "*i64:16",
            "position_ptr": "*i64:16",
            "rows": "i32",
            "product_stride": "i32:16",
            "tail_stride": "i32:16",
        },
        {
            "GROUPS": 4,
            "GROUPS_POW2": 4,
            "SLOTS": 64,
            "PAIRS": 32,
            "RING": 8,
            "WIDTH": 1024,
            "WIDTH_POW2": 1024,
            **PDL_ON,
        },
        {"num_warps": 2},
    ),
    *(
        (
            _publish_row,
            _KEY,
            {
                "GROUP": group,
                "GROUPS": groups,
                "GROUPS_POW2": groups,
                "SLOTS": 64,
                "PAIRS": 32,
                "LATENT": group == 16,
                **PDL_ON,
            },
            {"num_warps": warps_of(group * groups)},
        )
        for group, groups in ((16, 32), (32, 4))
    ),
)
