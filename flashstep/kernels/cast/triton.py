"""Quantisers into paged records in Triton: one row of activations a program, its groups side by side.

Takes and gives what ``flashstep.kernels.cast`` says, bit for bit what the reference writes (a NaN stays one, its sign and
payload do not). Group scales come from the bits of the largest magnitude, so a NaN or infinity counts as larger than any
number. Rows are bf16 of any row stride; a record's bytes and its scales each lie together. Knows nothing of who owns a slot.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashstep.kernels.cast import Planes

_MXFP8_GROUP, _MXFP4_GROUP, _NVFP4_GROUP = 32, 32, 16


@triton.jit
def _largest(x, axis: tl.constexpr):
    """fp32 largest magnitude along ``axis``; comparing bits as integers lets NaN win, as torch's maximum does."""
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.max(bits, axis).to(tl.float32, bitcast=True)


@triton.jit
def _power_of_two(v):
    """Biased exponent int32 of the smallest power of two >= ``v`` (fp32, normal): 255 for what is beyond 2^127."""
    bits = v.to(tl.int32, bitcast=True)
    return tl.where(bits > 0x7F000000, 255, (bits + 0x7FFFFF) >> 23)


@triton.jit
def _inverse(exponent):
    """fp32 2^(127 - exponent), NaN for 255. The exponents that occur leave it normal, so the product is exact."""
    bits = tl.where(exponent == 255, 0x7FC00000, (254 - exponent) << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _fp4_code(v):
    """int32 E2M1 codes 0..7 of the magnitudes of ``v`` (fp32, already scaled): ties to the even code, NaN to 0."""
    a = tl.abs(v)
    low = (a > 0.25).to(tl.int32) + (a >= 0.75).to(tl.int32) + (a > 1.25).to(tl.int32)
    high = (
        (a >= 1.75).to(tl.int32) + (a > 2.5).to(tl.int32) + (a >= 3.5).to(tl.int32) + (a > 5.0).to(tl.int32)
    )
    return low + high


@triton.jit
def _sign(x):
    """int32 0 or 1: the sign bit of ``x`` (fp32). A division by a scale cannot change it."""
    return (x.to(tl.int32, bitcast=True) >> 31) & 1


@triton.jit
def _fp4_value(code):
    """fp32 magnitude of E2M1 codes 0..7 (int32): 0 and .5 by hand, from 1 on a 2-bit exponent and a 1-bit mantissa."""
    normal = ((code + 252) << 22).to(tl.float32, bitcast=True)
    return tl.where(code < 2, code.to(tl.float32) * 0.5, normal)


@triton.jit
def _floored(amax, floor: tl.constexpr):
    return tl.where(amax < floor, floor, amax)  # a comparison, unlike a maximum, leaves NaN alone


@triton.jit
def _place(slot_ptr, row, blocks, slots):
    """Block and place of a row's slot, int64, and whether it may be written."""
    slot = tl.load(slot_ptr + row)
    block = slot // slots  # of a negative slot it may be 0: division rounds towards zero
    return block, slot % slots, (slot >= 0) & (block < blocks)


@triton.jit
def _store_mxfp8_kernel(
    x_ptr,
    values_ptr,
    scales_ptr,
    slot_ptr,
    blocks,
    slots,
    x_stride,
    values_block,
    values_place,
    scales_block,
    scales_place,
    GROUPS: tl.constexpr,
    GROUPS_POW2: tl.constexpr,
):
    """One row: E4M3 bytes and an E8M0 byte a group of 32 channels at the row's slot."""
    row = tl.program_id(0)
    block, place, live = _place(slot_ptr, row, blocks, slots)
    group = tl.arange(0, GROUPS_POW2)
    channel = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    held = (group < GROUPS) & live
    x = tl.load(x_ptr + row.to(tl.int64) * x_stride + channel, mask=held[:, None], other=0.0).to(tl.float32)
    exponent = _power_of_two(_floored(_largest(x, 1), 1e-4) * (1.0 / 448.0))
    y = x * _inverse(exponent)[:, None]
    y = tl.where(y > 448.0, 448.0, tl.where(y < -448.0, -448.0, y))
    data = y.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    values_ptr += block * values_block + place * values_place
    scales_ptr += block * scales_block + place * scales_place
    tl.store(values_ptr + channel, data, mask=held[:, None])
    tl.store(scales_ptr + group, exponent.to(tl.uint8), mask=held)


@triton.jit
def _fp4_pairs(x_ptr, group, held, GROUP: tl.constexpr):
    """fp32 even and odd channels [groups, GROUP / 2] of a row, and the largest magnitude of each group."""
    pair = tl.arange(0, GROUP // 2)
    channel = group[:, None, None] * GROUP + pair[None, :, None] * 2 + tl.arange(0, 2)[None, None, :]
    x = tl.load(x_ptr + channel, mask=held[:, None, None], other=0.0).to(tl.float32)
    even, odd = tl.split(x)
    bits = tl.maximum(
        even.to(tl.int32, bitcast=True) & 0x7FFFFFFF, odd.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    )
    return even, odd, tl.max(bits, 1).to(tl.float32, bitcast=True)


@triton.jit
def _store_fp4_kernel(
    x_ptr,
    values_ptr,
    scales_ptr,
    slot_ptr,
    blocks,
    slots,
    x_stride,
    values_block,
    values_place,
    scales_block,
    scales_place,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_POW2: tl.constexpr,
):
    """One row: E2M1 pairs at the row's slot, with an E8M0 byte a group of 32 channels or an E4M3 byte a group of 16."""
    row = tl.program_id(0)
    block, place, live = _place(slot_ptr, row, blocks, slots)
    group = tl.arange(0, GROUPS_POW2)
    held = (group < GROUPS) & live
    even, odd, amax = _fp4_pairs(x_ptr + row.to(tl.int64) * x_stride, group, held, GROUP)
    if GROUP == 16:
        # both divisions are true ones: a product with the reciprocal would move ties
        quotient = tl.div_rn(_floored(amax, 6.0 * 2.0**-9), tl.full(amax.shape, 6.0, tl.float32))
        scale = tl.where(quotient > 448.0, 448.0, quotient).to(tl.float8e4nv)
        scale_byte = scale.to(tl.uint8, bitcast=True)
        whole = tl.broadcast_to(scale.to(tl.float32)[:, None], even.shape)
        low, high = tl.div_rn(even, whole), tl.div_rn(odd, whole)
    else:
        exponent = _power_of_two(_floored(amax, 6.0 * 2.0**-126) * (1.0 / 6.0))
        scale_byte = exponent.to(tl.uint8)
        inverse = _inverse(exponent)[:, None]
        low, high = even * inverse, odd * inverse
    low_code = _fp4_code(low) | (_sign(even) << 3)
    high_code = _fp4_code(high) | (_sign(odd) << 3)
    data = (low_code | (high_code << 4)).to(tl.uint8)
    byte = group[:, None] * (GROUP // 2) + tl.arange(0, GROUP // 2)[None, :]
    values_ptr += block * values_block + place * values_place
    scales_ptr += block * scales_block + place * scales_place
    tl.store(values_ptr + byte, data, mask=held[:, None])
    tl.store(scales_ptr + group, scale_byte, mask=held)


@triton.jit
def _round_mxfp4_kernel(x_ptr, out_ptr, groups, BLOCK: tl.constexpr):
    """``BLOCK`` groups of 32 channels of a contiguous tensor, quantised and dequantised."""
    group = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    channel = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    held = (group < groups)[:, None]
    x = tl.load(x_ptr + channel, mask=held, other=0.0).to(tl.float32)
    exponent = _power_of_two(_floored(_largest(x, 1), 6.0 * 2.0**-126) * (1.0 / 6.0))
    scale = tl.where(exponent == 255, 0x7FC00000, exponent << 23).to(tl.float32, bitcast=True)
    y = _fp4_value(_fp4_code(x * _inverse(exponent)[:, None])) * scale[:, None]
    signed = y.to(tl.int32, bitcast=True) | (_sign(x) << 31)  # a negation would lose the sign of zero
    tl.store(out_ptr + channel, signed.to(tl.float32, bitcast=True).to(tl.bfloat16), mask=held)


def round_mxfp4(x: Tensor) -> Tensor:
    """See ``Cast.round_mxfp4``."""
    assert x.shape[-1] % _MXFP4_GROUP == 0
    x = x.contiguous()
    out = torch.empty_like(x)
    groups, block = x.numel() // _MXFP4_GROUP, 32
    if groups:
        _round_mxfp4_kernel[(triton.cdiv(groups, block),)](x, out, groups, BLOCK=block, num_warps=2)
    return out


def store_mxfp8(x_TC: Tensor, planes: Planes, *, slot_T: Tensor) -> None:
    """See ``Cast.store_mxfp8``."""
    groups = x_TC.shape[1] // _MXFP8_GROUP
    if x_TC.shape[0]:
        _store_mxfp8_kernel[(x_TC.shape[0],)](
            *_arguments(x_TC, planes, slot_T, values=x_TC.shape[1], scales=groups),
            GROUPS=groups,
            GROUPS_POW2=triton.next_power_of_2(groups),
            num_warps=1,
        )


def store_nvfp4(x_TC: Tensor, planes: Planes, *, slot_T: Tensor) -> None:
    """See ``Cast.store_nvfp4``."""
    _store_fp4(x_TC, planes, slot_T, group=_NVFP4_GROUP)


def store_mxfp4(x_TC: Tensor, planes: Planes, *, slot_T: Tensor) -> None:
    """See ``Cast.store_mxfp4``."""
    _store_fp4(x_TC, planes, slot_T, group=_MXFP4_GROUP)


def _store_fp4(x_TC: Tensor, planes: Planes, slot_T: Tensor, *, group: int) -> None:
    groups = x_TC.shape[1] // group
    if x_TC.shape[0]:
        _store_fp4_kernel[(x_TC.shape[0],)](
            *_arguments(x_TC, planes, slot_T, values=x_TC.shape[1] // 2, scales=groups),
            GROUP=group,
            GROUPS=groups,
            GROUPS_POW2=triton.next_power_of_2(groups),
            num_warps=1,
        )


def _arguments(
    x_TC: Tensor, planes: Planes, slot_T: Tensor, *, values: int, scales: int
) -> tuple[Tensor | int, ...]:
    """What both store kernels take before their constants; a row's channels must lie together, as a record's bytes do."""
    values_plane, scales_plane = planes
    assert values_plane.shape[2] == values and scales_plane.shape[2] == scales
    assert values_plane.stride(2) == 1 and (scales == 1 or scales_plane.stride(2) == 1)
    x_TC = x_TC if x_TC.stride(1) == 1 else x_TC.contiguous()
    blocks, slots = values_plane.shape[:2]
    strides = (*values_plane.stride()[:2], *scales_plane.stride()[:2])
    return (x_TC, values_plane, scales_plane, slot_T.contiguous(), blocks, slots, x_TC.stride(0), *strides)


_STORE = {
    "x_ptr": "*bf16:16",
    "values_ptr": "*u8:16",
    "scales_ptr": "*u8:16",
    "slot_ptr": "*i64:16",
    "blocks": "i32",
    "slots": "i32",
    "x_stride": "i32:16",
    "values_block": "i32:16",
    "values_place": "i32:16",
    "scales_block": "i32:16",
    "scales_place": "i32",
}
_ROUND = {"x_ptr": "*bf16:16", "out_ptr": "*bf16:16", "groups": "i32"}
_WARP = {"num_warps": 1}
# (kernel, signature, constants, options) to compile ahead of time: released and tiny shapes
AOT = (
    *((_store_mxfp8_kernel, _STORE, {"GROUPS": g, "GROUPS_POW2": g}, _WARP) for g in (16, 1, 2)),
    *((_store_fp4_kernel, _STORE, {"GROUP": 16, "GROUPS": g, "GROUPS_POW2": g}, _WARP) for g in (32, 2, 4)),
    *((_store_fp4_kernel, _STORE, {"GROUP": 32, "GROUPS": g, "GROUPS_POW2": g}, _WARP) for g in (4, 1)),
    (_round_mxfp4_kernel, _ROUND, {"BLOCK": 32}, {"num_warps": 2}),
)
