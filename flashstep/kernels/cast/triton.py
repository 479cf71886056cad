"""Quantisers into paged records in Triton: one row of activations a program, its groups side by side.

Takes and gives what ``flashstep.kernels.cast`` says, bit for bit what the reference writes (a NaN stays one, its sign and
payload do not). Group scales come from the bits of the largest magnitude, so a NaN or infinity counts as larger than any
number. Rows are bf16 of any row stride; a record's bytes and its scales each lie together. Functions without an underscore are
used by ``kernels.fused`` too. Knows nothing of who owns a slot.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashstep.kernels.cast import Planes

_MXFP8_GROUP, _MXFP4_GROUP, _NVFP4_GROUP = 32, 32, 16


@triton.jit
def largest(x, axis: tl.constexpr) -> tl.tensor:
    """fp32 largest magnitude along ``axis``; comparing bits as integers lets NaN win, as torch's maximum does."""
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.max(bits, axis).to(tl.float32, bitcast=True)


@triton.jit
def power_of_two(v) -> tl.tensor:
    """Biased exponent int32 of the smallest power of two >= ``v`` (fp32, normal): 255 for what is beyond 2^127."""
    bits = v.to(tl.int32, bitcast=True)
    return tl.where(bits > 0x7F000000, 255, (bits + 0x7FFFFF) >> 23)


@triton.jit
def inverse_of(exponent) -> tl.tensor:
    """fp32 2^(127 - exponent), NaN for 255. The exponents that occur leave it normal, so the product is exact."""
    bits = tl.where(exponent == 255, 0x7FC00000, (254 - exponent) << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def fp4_code(v) -> tl.tensor:
    """int32 E2M1 codes 0..7 of the magnitudes of ``v`` (fp32, already scaled): ties to the even code, NaN to 0."""
    a = tl.abs(v)
    low = (a > 0.25).to(tl.int32) + (a >= 0.75).to(tl.int32) + (a > 1.25).to(tl.int32)
    high = (
        (a >= 1.75).to(tl.int32) + (a > 2.5).to(tl.int32) + (a >= 3.5).to(tl.int32) + (a > 5.0).to(tl.int32)
    )
    return low + high


@triton.jit
def sign_of(x) -> tl.tensor:
    """int32 0 or 1: the sign bit of ``x`` (fp32). A division by a scale cannot change it."""
    return (x.to(tl.int32, bitcast=True) >> 31) & 1


@triton.jit
def fp4_value(code) -> tl.tensor:
    """fp32 magnitude of E2M1 codes 0..7 (int32): 0 and .5 by hand, from 1 on a 2-bit exponent and a 1-bit mantissa."""
    normal = ((code + 252) << 22).to(tl.float32, bitcast=True)
    return tl.where(code < 2, code.to(tl.float32) * 0.5, normal)


@triton.jit
def floored(amax, floor: tl.constexpr) -> tl.tensor:
    return tl.where(amax < floor, floor, amax)  # a comparison, unlike a maximum, leaves NaN alone


@triton.jit
def place_of(slot_ptr, row, blocks, SLOTS: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Block and place of a row's slot, int64, and whether it may be written."""
    slot = tl.load(slot_ptr + row)
    block = slot // SLOTS  # of a negative slot it may be 0: division rounds towards zero
    return block, slot % SLOTS, (slot >= 0) & (block < blocks)


@triton.jit
def pairs(x_ptr, group, held, GROUP: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """fp32 even and odd channels [groups, GROUP / 2] of a row, zeros where a group is not ``held``."""
    channel = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(x_ptr + channel, mask=held[:, None], other=0.0).to(tl.float32)
    return tl.split(tl.reshape(x, (x.shape[0], GROUP // 2, 2)))


@triton.jit
def joined(even, odd, GROUP: tl.constexpr) -> tl.tensor:
    """The channels [groups, GROUP] of which these are the even and the odd ones."""
    return tl.reshape(tl.join(even, odd), (even.shape[0], GROUP))


@triton.jit
def largest_of_pairs(even, odd) -> tl.tensor:
    """fp32 [groups]: the largest magnitude of each group of pairs [groups, pairs]."""
    bits = tl.maximum(
        even.to(tl.int32, bitcast=True) & 0x7FFFFFFF, odd.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    )
    return tl.max(bits, 1).to(tl.float32, bitcast=True)


@triton.jit
def mxfp8_exponent(amax) -> tl.tensor:
    """int32 biased exponent of the scale of a group whose largest magnitude is ``amax`` (fp32)."""
    return power_of_two(floored(amax, 1e-4) * (1.0 / 448.0))


@triton.jit
def e4m3_of(x, exponent) -> tl.tensor:
    """E4M3 numbers of ``x`` (fp32 [groups, channels]) under its groups' scales."""
    y = x * inverse_of(exponent)[:, None]
    return tl.where(y > 448.0, 448.0, tl.where(y < -448.0, -448.0, y)).to(tl.float8e4nv)


@triton.jit
def mxfp8_bytes(x, amax) -> tuple[tl.tensor, tl.tensor]:
    """E4M3 bytes of ``x`` (fp32 [groups, channels]) and the E8M0 byte of each group, of its largest magnitude."""
    exponent = mxfp8_exponent(amax)
    return e4m3_of(x, exponent).to(tl.uint8, bitcast=True), exponent.to(tl.uint8)


@triton.jit
def scale_of(exponent) -> tl.tensor:
    """fp32 2^(exponent - 127) of an int32 in 1..254, NaN for 255."""
    return tl.where(exponent == 255, 0x7FC00000, exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def mxfp4_exponent(amax) -> tl.tensor:
    """int32 biased exponent of the scale of a group whose largest magnitude is ``amax`` (fp32)."""
    return power_of_two(floored(amax, 6.0 * 2.0**-126) * (1.0 / 6.0))


@triton.jit
def rounded_mxfp4(x, amax) -> tl.tensor:
    """``x`` (fp32 [groups, channels]) quantised and dequantised, by the largest magnitude of each group."""
    exponent = mxfp4_exponent(amax)
    y = fp4_value(fp4_code(x * inverse_of(exponent)[:, None])) * scale_of(exponent)[:, None]
    signed = y.to(tl.int32, bitcast=True) | (sign_of(x) << 31)  # a negation would lose the sign of zero
    return signed.to(tl.float32, bitcast=True)


@triton.jit
def fp4_bytes(even, odd, GROUP: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """E2M1 pairs, bytes [groups, GROUP / 2], and a scale byte each: E8M0 of a group of 32 channels, E4M3 of one of 16."""
    amax = largest_of_pairs(even, odd)
    if GROUP == 16:
        # both divisions are true ones: a product with the reciprocal would move ties
        quotient = tl.div_rn(floored(amax, 6.0 * 2.0**-9), tl.full(amax.shape, 6.0, tl.float32))
        scale = tl.where(quotient > 448.0, 448.0, quotient).to(tl.float8e4nv)
        scale_byte = scale.to(tl.uint8, bitcast=True)
        whole = tl.broadcast_to(scale.to(tl.float32)[:, None], even.shape)
        low, high = tl.div_rn(even, whole), tl.div_rn(odd, whole)
    else:
        exponent = mxfp4_exponent(amax)
        scale_byte = exponent.to(tl.uint8)
        inverse = inverse_of(exponent)[:, None]
        low, high = even * inverse, odd * inverse
    low_code = fp4_code(low) | (sign_of(even) << 3)
    high_code = fp4_code(high) | (sign_of(odd) << 3)
    return (low_code | (high_code << 4)).to(tl.uint8), scale_byte


@triton.jit
def _store_mxfp8_kernel(
    x_ptr,
    values_ptr,
    scales_ptr,
    slot_ptr,
    blocks,
    x_stride,
    values_block,
    values_place,
    scales_block,
    scales_place,
    SLOTS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_POW2: tl.constexpr,
):
    """One row: E4M3 bytes and an E8M0 byte a group of 32 channels at the row's slot."""
    row = tl.program_id(0)
    block, place, live = place_of(slot_ptr, row, blocks, SLOTS)
    group = tl.arange(0, GROUPS_POW2)
    channel = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    held = (group < GROUPS) & live
    x = tl.load(x_ptr + row.to(tl.int64) * x_stride + channel, mask=held[:, None], other=0.0).to(tl.float32)
    data, exponent = mxfp8_bytes(x, largest(x, 1))
    values_ptr += block * values_block + place * values_place
    scales_ptr += block * scales_block + place * scales_place
    tl.store(values_ptr + channel, data, mask=held[:, None])
    tl.store(scales_ptr + group, exponent, mask=held)


@triton.jit
def _store_fp4_kernel(
    x_ptr,
    values_ptr,
    scales_ptr,
    slot_ptr,
    blocks,
    x_stride,
    values_block,
    values_place,
    scales_block,
    scales_place,
    SLOTS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_POW2: tl.constexpr,
):
    """One row: E2M1 pairs at the row's slot, with an E8M0 byte a group of 32 channels or an E4M3 byte a group of 16."""
    row = tl.program_id(0)
    block, place, live = place_of(slot_ptr, row, blocks, SLOTS)
    group = tl.arange(0, GROUPS_POW2)
    held = (group < GROUPS) & live
    even, odd = pairs(x_ptr + row.to(tl.int64) * x_stride, group, held, GROUP)
    data, scale_byte = fp4_bytes(even, odd, GROUP)
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
    y = rounded_mxfp4(x, largest(x, 1))
    tl.store(out_ptr + channel, y.to(tl.bfloat16), mask=held)


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
            SLOTS=planes[0].shape[1],
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
            SLOTS=planes[0].shape[1],
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
    strides = (*values_plane.stride()[:2], *scales_plane.stride()[:2])
    blocks = values_plane.shape[0]
    return (x_TC, values_plane, scales_plane, slot_T.contiguous(), blocks, x_TC.stride(0), *strides)


_STORE = {
    "x_ptr": "*bf16:16",
    "values_ptr": "*u8:16",
    "scales_ptr": "*u8:16",
    "slot_ptr": "*i64:16",
    "blocks": "i32",
    "x_stride": "i32:16",
    "values_block": "i32:16",
    "values_place": "i32:16",
    "scales_block": "i32:16",
    "scales_place": "i32",
}
_ROUND = {"x_ptr": "*bf16:16", "out_ptr": "*bf16:16", "groups": "i32"}
_WARP = {"num_warps": 1}
_SLOTS = {"SLOTS": 64}
# (kernel, signature, constants, options) to compile ahead of time: released and tiny shapes
AOT = (
    *((_store_mxfp8_kernel, _STORE, {**_SLOTS, "GROUPS": g, "GROUPS_POW2": g}, _WARP) for g in (16, 1, 2)),
    *(
        (_store_fp4_kernel, _STORE, {**_SLOTS, "GROUP": 16, "GROUPS": g, "GROUPS_POW2": g}, _WARP)
        for g in (32, 2, 4)
    ),
    *(
        (_store_fp4_kernel, _STORE, {**_SLOTS, "GROUP": 32, "GROUPS": g, "GROUPS_POW2": g}, _WARP)
        for g in (4, 1)
    ),
    (_round_mxfp4_kernel, _ROUND, {"BLOCK": 32}, {"num_warps": 2}),
)
