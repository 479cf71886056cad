"""Latents, keys, records and index queries in Triton: fp32 inside, bf16 where the families round, bytes as ``cast`` writes them.

One program a row (and a part of it where two things are made), reduced in a fixed order whatever stands beside it. Rows may lie
apart, as slices of a product do. A row is held as pairs of channels, which is what a rotation and an FP4 byte are made of. What
has no underscore is used by ``publish`` too.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashstep.kernels.cast import Planes
from flashstep.kernels.cast.triton import (
    e4m3_of,
    fp4_bytes,
    joined,
    largest,
    largest_of_pairs,
    mxfp8_exponent,
    pairs,
    place_of,
    rounded_mxfp4,
    scale_of,
)
from flashstep.kernels.jit import programmatic, wait_for_producers

_ROUNDED = 32  # groups of 32 channels of one program of _rotate_round


@triton.jit
def _norm_scale(squares, eps, CHANNELS: tl.constexpr):
    """The factor of an RMS norm, of a row's squares [groups, channels]."""
    mean = tl.sum(tl.sum(squares, 1), 0) * (1.0 / CHANNELS)
    return tl.div_rn(1.0, tl.sqrt_rn(mean + eps))


@triton.jit
def _norm_quantise_row(x_ptr, weight_ptr, out_ptr, eps, GROUPS: tl.constexpr, GROUPS_POW2: tl.constexpr):
    """One row: normed, rounded to bf16, quantised per 32 channels; the quantised values in bf16."""
    group = tl.arange(0, GROUPS_POW2)
    held = (group < GROUPS)[:, None]
    channel = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    weight = tl.load(weight_ptr + channel, mask=held, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + channel, mask=held, other=0.0).to(tl.float32)
    normed = (x * _norm_scale(x * x, eps, GROUPS * 32) * weight).to(tl.bfloat16).to(tl.float32)
    exponent = mxfp8_exponent(largest(normed, 1))
    y = e4m3_of(normed, exponent).to(tl.float32) * scale_of(exponent)[:, None]
    tl.store(out_ptr + channel, y.to(tl.bfloat16), mask=held)


@triton.jit
def normed_pairs(
    even, odd, weight_ptr, eps, group, GROUP: tl.constexpr, GROUPS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The RMS norm of a row given as pairs, rounded to bf16, as fp32."""
    even_weight, odd_weight = pairs(weight_ptr, group, group < GROUPS, GROUP)
    scale = _norm_scale(even * even + odd * odd, eps, GROUPS * GROUP)
    even = (even * scale * even_weight).to(tl.bfloat16).to(tl.float32)
    odd = (odd * scale * odd_weight).to(tl.bfloat16).to(tl.float32)
    return even, odd


@triton.jit
def turned_pairs(
    even, odd, cos_ptr, sin_ptr, group, GROUP: tl.constexpr, GROUPS: tl.constexpr, PAIRS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """A row given as pairs with its last P pairs rotated and rounded to bf16, as fp32; other channels as they are."""
    turn = group[:, None] * (GROUP // 2) + tl.arange(0, GROUP // 2)[None, :] - (GROUPS * GROUP // 2 - PAIRS)
    turns = (turn >= 0) & (turn < PAIRS)
    cos = tl.load(cos_ptr + turn, mask=turns, other=1.0)
    sin = tl.load(sin_ptr + turn, mask=turns, other=0.0)
    even_out = tl.where(turns, (even * cos - odd * sin).to(tl.bfloat16).to(tl.float32), even)
    odd_out = tl.where(turns, (even * sin + odd * cos).to(tl.bfloat16).to(tl.float32), odd)
    return even_out, odd_out


@triton.jit
def _key_row(
    x_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    eps,
    group,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """A row of bf16 normed and rotated, as fp32 pairs."""
    even, odd = pairs(x_ptr, group, group < GROUPS, GROUP)
    even, odd = normed_pairs(even, odd, weight_ptr, eps, group, GROUP, GROUPS)
    return turned_pairs(even, odd, cos_ptr, sin_ptr, group, GROUP, GROUPS, PAIRS)


@triton.jit
def _put_mxfp8(even, odd, values_ptr, scales_ptr, group, held):
    """A record of groups of 32 channels, given as pairs."""
    exponent = mxfp8_exponent(largest_of_pairs(even, odd))
    data = joined(e4m3_of(even, exponent), e4m3_of(odd, exponent), 32).to(tl.uint8, bitcast=True)
    channel = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    tl.store(values_ptr + channel, data, mask=held[:, None])
    tl.store(scales_ptr + group, exponent.to(tl.uint8), mask=held)


@triton.jit
def put_fp4(even, odd, values_ptr, scales_ptr, group, held, GROUP: tl.constexpr) -> None:
    """A record of E2M1 pairs, given as pairs of channels."""
    data, scale = fp4_bytes(even, odd, GROUP)
    byte = group[:, None] * (GROUP // 2) + tl.arange(0, GROUP // 2)[None, :]
    tl.store(values_ptr + byte, data, mask=held[:, None])
    tl.store(scales_ptr + group, scale, mask=held)


@triton.jit
def put_pairs(even, odd, out_ptr, group, GROUP: tl.constexpr, GROUPS: tl.constexpr) -> None:
    """A row of bf16, given as pairs."""
    channel = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    tl.store(out_ptr + channel, joined(even, odd, GROUP).to(tl.bfloat16), mask=(group < GROUPS)[:, None])


@triton.jit
def _norm_quantise(
    x_ptr,
    weight_ptr,
    out_ptr,
    x_stride,
    eps,
    GROUPS: tl.constexpr,
    GROUPS_POW2: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row."""
    wait_for_producers(PDL)
    row = tl.program_id(0).to(tl.int64)
    _norm_quantise_row(
        x_ptr + row * x_stride, weight_ptr, out_ptr + row * (GROUPS * 32), eps, GROUPS, GROUPS_POW2
    )


@triton.jit
def _latent_and_key(
    x_ptr,
    latent_weight_ptr,
    key_weight_ptr,
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
    LATENT_GROUPS: tl.constexpr,
    LATENT_POW2: tl.constexpr,
    KEY_GROUPS: tl.constexpr,
    KEY_POW2: tl.constexpr,
    SLOTS: tl.constexpr,
    PAIRS: tl.constexpr,
    STORE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (row, part): part 0 the query latent, part 1 the key, as a record or (not STORE) as bf16 to ``values``."""
    wait_for_producers(PDL)
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    if tl.program_id(1) == 0:
        _norm_quantise_row(
            x_ptr, latent_weight_ptr, latent_ptr + row * (LATENT_GROUPS * 32), eps, LATENT_GROUPS, LATENT_POW2
        )
    else:
        group = tl.arange(0, KEY_POW2)
        even, odd = _key_row(
            x_ptr + LATENT_GROUPS * 32,
            key_weight_ptr,
            cos_ptr + row * cos_stride,
            sin_ptr + row * cos_stride,
            eps,
            group,
            32,
            KEY_GROUPS,
            PAIRS,
        )
        if STORE:
            block, place, live = place_of(slot_ptr, row, blocks, SLOTS)
            values_ptr += block * values_block + place * values_place
            scales_ptr += block * scales_block + place * scales_place
            _put_mxfp8(even, odd, values_ptr, scales_ptr, group, (group < KEY_GROUPS) & live)
        else:
            put_pairs(even, odd, values_ptr + row * (KEY_GROUPS * 32), group, 32, KEY_GROUPS)


@triton.jit
def _store_contexts(
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
    values_stage,
    scales_stage,
    values_block,
    values_place,
    scales_block,
    scales_place,
    eps,
    GROUPS: tl.constexpr,
    GROUPS_POW2: tl.constexpr,
    SLOTS: tl.constexpr,
    PAIRS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (row, stage)."""
    wait_for_producers(PDL)
    row, stage = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    group = tl.arange(0, GROUPS_POW2)
    even, odd = _key_row(
        x_ptr + row * x_stride + stage * (GROUPS * 32),
        weight_ptr + stage * (GROUPS * 32),
        cos_ptr + row * cos_stride,
        sin_ptr + row * cos_stride,
        eps,
        group,
        32,
        GROUPS,
        PAIRS,
    )
    block, place, live = place_of(slot_ptr, row, blocks, SLOTS)
    values_ptr += stage * values_stage + block * values_block + place * values_place
    scales_ptr += stage * scales_stage + block * scales_block + place * scales_place
    _put_mxfp8(even, odd, values_ptr, scales_ptr, group, (group < GROUPS) & live)


@triton.jit
def _rotate_round(
    x_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    groups,
    x_row,
    x_head,
    cos_stride,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """``BLOCK`` of the T * H * (K / 32) groups of 32 channels."""
    wait_for_producers(PDL)
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    held = number < groups
    group, vector = number % GROUPS, number // GROUPS
    row, head = vector // HEADS, vector % HEADS
    inside = tl.arange(0, 32)[None, :]
    start = row.to(tl.int64) * x_row + head * x_head + group * 32
    x = tl.load(x_ptr + start[:, None] + inside, mask=held[:, None], other=0.0).to(tl.float32)
    even, odd = tl.split(tl.reshape(x, (BLOCK, 16, 2)))
    turn = group[:, None] * 16 + tl.arange(0, 16)[None, :] - (GROUPS * 16 - PAIRS)
    turns = (turn >= 0) & (turn < PAIRS) & held[:, None]
    at = (row * cos_stride)[:, None] + turn
    cos = tl.load(cos_ptr + at, mask=turns, other=1.0)
    sin = tl.load(sin_ptr + at, mask=turns, other=0.0)
    even_out = tl.where(turns, (even * cos - odd * sin).to(tl.bfloat16).to(tl.float32), even)
    odd_out = tl.where(turns, (even * sin + odd * cos).to(tl.bfloat16).to(tl.float32), odd)
    amax = largest_of_pairs(even_out, odd_out)
    y = joined(rounded_mxfp4(even_out, amax), rounded_mxfp4(odd_out, amax), 32).to(tl.bfloat16)
    tl.store(out_ptr + number.to(tl.int64)[:, None] * 32 + inside, y, mask=held[:, None])


# ---- the ops -------------------------------------------------------------------------------------------------------


def norm_quantise(x_TC: Tensor, weight_C: Tensor, *, eps: float) -> Any:
    """See ``Fused.norm_quantise``."""
    rows, channels = x_TC.shape
    assert channels % 32 == 0 and x_TC.stride(1) == 1
    out_TC = torch.empty(rows, channels, dtype=torch.bfloat16, device=x_TC.device)
    if rows:
        groups = channels // 32
        _norm_quantise[(rows,)](
            x_TC,
            weight_C,
            out_TC,
            x_TC.stride(0),
            eps,
            GROUPS=groups,
            GROUPS_POW2=triton.next_power_of_2(groups),
            num_warps=warps_of(channels),
            **launch(x_TC.device),
        )
    return out_TC


def latent_and_record(
    x_TX: Tensor,
    *,
    latent_weight_L: Tensor,
    key_weight_C: Tensor,
    eps: float,
    cos_TP: Tensor,
    sin_TP: Tensor,
    planes: Planes,
    slot_T: Tensor,
) -> Any:
    """See ``Fused.latent_and_record``."""
    latent_TL = empty_rows(x_TX, latent_weight_L.shape[0])
    if x_TX.shape[0]:
        _latent_and_key[(x_TX.shape[0], 2)](
            x_TX,
            latent_weight_L,
            key_weight_C,
            *checked_angles(cos_TP, sin_TP),
            latent_TL,
            *record_of(planes, slot_T, values=key_weight_C.shape[0], scales=key_weight_C.shape[0] // 32),
            x_TX.stride(0),
            cos_TP.stride(0),
            *strides_of(planes),
            eps,
            STORE=True,
            SLOTS=planes[0].shape[1],
            **_joint(latent_weight_L, key_weight_C, cos_TP),
            **launch(x_TX.device),
        )
    return latent_TL


def latent_and_key(
    x_TX: Tensor,
    *,
    latent_weight_L: Tensor,
    key_weight_C: Tensor,
    eps: float,
    cos_TP: Tensor,
    sin_TP: Tensor,
) -> tuple[Any, Tensor]:
    """See ``Fused.latent_and_key``."""
    latent_TL, key_TC = empty_rows(x_TX, latent_weight_L.shape[0]), empty_rows(x_TX, key_weight_C.shape[0])
    if x_TX.shape[0]:
        _latent_and_key[(x_TX.shape[0], 2)](
            x_TX,
            latent_weight_L,
            key_weight_C,
            *checked_angles(cos_TP, sin_TP),
            latent_TL,
            key_TC,
            None,
            None,
            0,
            x_TX.stride(0),
            cos_TP.stride(0),
            0,
            0,
            0,
            0,
            eps,
            STORE=False,
            SLOTS=1,
            **_joint(latent_weight_L, key_weight_C, cos_TP),
            **launch(x_TX.device),
        )
    return latent_TL, key_TC


def store_contexts(
    k_TX: Tensor,
    weight_SC: Tensor,
    *,
    eps: float,
    cos_TP: Tensor,
    sin_TP: Tensor,
    planes: Sequence[Planes],
    slot_T: Tensor,
) -> None:
    """See ``Fused.store_contexts``."""
    stages, channels = weight_SC.shape
    steps = [_step([stage[part] for stage in planes]) for part in (0, 1)]
    assert k_TX.stride(1) == 1 and weight_SC.is_contiguous() and channels % 32 == 0
    if k_TX.shape[0]:
        _store_contexts[(k_TX.shape[0], stages)](
            k_TX,
            weight_SC,
            *checked_angles(cos_TP, sin_TP),
            *record_of(planes[0], slot_T, values=channels, scales=channels // 32),
            k_TX.stride(0),
            cos_TP.stride(0),
            *steps,
            *strides_of(planes[0]),
            eps,
            GROUPS=channels // 32,
            GROUPS_POW2=triton.next_power_of_2(channels // 32),
            SLOTS=planes[0][0].shape[1],
            PAIRS=cos_TP.shape[1],
            num_warps=1,
            **launch(k_TX.device),
        )


def rotate_round(x_THK: Tensor, cos_TP: Tensor, sin_TP: Tensor) -> Tensor:
    """See ``Fused.rotate_round``."""
    rows, heads, channels = x_THK.shape
    assert channels % 32 == 0 and x_THK.stride(2) == 1
    out_THK = torch.empty(rows, heads, channels, dtype=torch.bfloat16, device=x_THK.device)
    groups = out_THK.numel() // 32
    if groups:
        _rotate_round[(triton.cdiv(groups, _ROUNDED),)](
            x_THK,
            *checked_angles(cos_TP, sin_TP),
            out_THK,
            groups,
            x_THK.stride(0),
            x_THK.stride(1),
            cos_TP.stride(0),
            HEADS=heads,
            GROUPS=channels // 32,
            PAIRS=cos_TP.shape[1],
            BLOCK=_ROUNDED,
            num_warps=4,
            **launch(x_THK.device),
        )
    return out_THK


def launch(device: torch.device) -> dict[str, bool]:
    return {"PDL": programmatic(device), "launch_pdl": programmatic(device)}


def warps_of(channels: int) -> int:
    """Measured on an H200 at 6 to 8192 rows: more make one row faster and many slower. The same for every number of rows."""
    return min(4, triton.next_power_of_2(max(channels, 256)) // 256)


def empty_rows(x_TX: Tensor, channels: int) -> Tensor:
    return torch.empty(x_TX.shape[0], channels, dtype=torch.bfloat16, device=x_TX.device)


def checked_angles(cos_TP: Tensor, sin_TP: Tensor) -> tuple[Tensor, Tensor]:
    assert cos_TP.stride(1) == 1 and sin_TP.stride() == cos_TP.stride()
    return cos_TP, sin_TP


def record_of(planes: Planes, slot_T: Tensor, *, values: int, scales: int) -> tuple[Tensor | int, ...]:
    """Planes, slots and blocks; a record's bytes lie together, and so do its scales."""
    values_plane, scales_plane = planes
    assert values_plane.shape[2] == values and scales_plane.shape[2] == scales
    assert values_plane.stride(2) == 1 and (scales == 1 or scales_plane.stride(2) == 1)
    assert slot_T.is_contiguous()
    return (values_plane, scales_plane, slot_T, values_plane.shape[0])


def strides_of(planes: Planes) -> tuple[int, ...]:
    return (*planes[0].stride()[:2], *planes[1].stride()[:2])


def _step(stages: Sequence[Tensor]) -> int:
    """Bytes from the plane of one stage to the next one's."""
    steps = {after.data_ptr() - before.data_ptr() for before, after in itertools.pairwise(stages)}
    assert len(steps) <= 1 and len({plane.stride() for plane in stages}) == 1, "the stages lie in one tensor"
    return steps.pop() if steps else 0


def _joint(latent_weight_L: Tensor, key_weight_C: Tensor, cos_TP: Tensor) -> dict[str, int]:
    latent_groups, key_groups = latent_weight_L.shape[0] // 32, key_weight_C.shape[0] // 32
    assert latent_weight_L.shape[0] % 32 == 0 and key_weight_C.shape[0] % 32 == 0
    return {
        "LATENT_GROUPS": latent_groups,
        "LATENT_POW2": triton.next_power_of_2(latent_groups),
        "KEY_GROUPS": key_groups,
        "KEY_POW2": triton.next_power_of_2(key_groups),
        "PAIRS": cos_TP.shape[1],
        "num_warps": 2,
    }


RECORD = {
    "values_ptr": "*u8:16",
    "scales_ptr": "*u8:16",
    "slot_ptr": "*i64:16",
    "blocks": "i32",
}
STRIDES = {
    "x_stride": "i32:16",
    "cos_stride": "i32:16",
    "values_block": "i32:16",
    "values_place": "i32:16",
    "scales_block": "i32:16",
    "scales_place": "i32",
    "eps": "fp32",
}
ROW = {"x_ptr": "*bf16:16", "weight_ptr": "*bf16:16", "cos_ptr": "*fp32:16", "sin_ptr": "*fp32:16"}
PDL_ON = {"PDL": True}
# (kernel, signature, constants, options) to compile ahead of time: released and tiny shapes
AOT = (
    *(
        (
            _norm_quantise,
            {
                "x_ptr": "*bf16:16",
                "weight_ptr": "*bf16:16",
                "out_ptr": "*bf16:16",
                "x_stride": "i32:16",
                "eps": "fp32",
            },
            {"GROUPS": groups, "GROUPS_POW2": triton.next_power_of_2(groups), **PDL_ON},
            {"num_warps": warps_of(groups * 32)},
        )
        for groups in (160, 2)
    ),
    *(
        (
            _latent_and_key,
            {
                **ROW,
                "latent_weight_ptr": "*bf16:16",
                "key_weight_ptr": "*bf16:16",
                "latent_ptr": "*bf16:16",
                **RECORD,
                "values_ptr": "*u8:16" if store else "*bf16:16",
                **STRIDES,
            },
            {
                "LATENT_GROUPS": 40,
                "LATENT_POW2": 64,
                "KEY_GROUPS": 16,
                "KEY_POW2": 16,
                "SLOTS": 64,
                "PAIRS": 32,
                "STORE": store,
                **PDL_ON,
            },
            {"num_warps": 2},
        )
        for store in (True, False)
    ),
    (
        _store_contexts,
        {**ROW, **RECORD, **STRIDES, "values_stage": "i64:16", "scales_stage": "i64:16"},
        {"GROUPS": 16, "GROUPS_POW2": 16, "SLOTS": 64, "PAIRS": 32, **PDL_ON},
        {"num_warps": 1},
    ),
    (
        _rotate_round,
        {
            "x_ptr": "*bf16:16",
            "cos_ptr": "*fp32:16",
            "sin_ptr": "*fp32:16",
            "out_ptr": "*bf16:16",
            "groups": "i32",
            "x_row": "i32:16",
            "x_head": "i32:16",
            "cos_stride": "i32:16",
        },
        {"HEADS": 32, "GROUPS": 4, "PAIRS": 32, "BLOCK": _ROUNDED, **PDL_ON},
        {"num_warps": 4},
    ),
)
