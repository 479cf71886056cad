"""Linear layers in Triton for Hopper: weights stay in their stored format and become bf16 in registers, exactly.

Weights are the left operand (out^T = W x^T), so that few rows waste little of a matrix instruction and the converted weight
never passes through shared memory. The inputs of a row are cut into chunks whose length depends on the weight's shape only;
a chunk is one chain of matrix instructions, and chunks are added in order in fp32, whether they lie in one program or in
many: a row's result depends neither on the number of rows nor on its neighbours. Knows no layer.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashstep.kernels.jit import programmatic, wait_for_producers
from flashstep.quant import e8m0, fp8_block, mxfp8
from flashstep.quant.tensor import QuantTensor

BLOCK_I = 128  # inputs of one step: four scale blocks, whose bf16 scales fit in one int64
SCALES = BLOCK_I // fp8_block.BLOCK
BLOCK_I_BF16 = 64
PROGRAMS = 264  # two a multiprocessor: what keeps enough loads in flight
SHORTEST_CHUNK = 512
ROW_TILES_TOGETHER = 8  # row tiles that read one weight tile while it lies in L2
QUANTISED_OF_FEW, QUANTISED_OF_MANY = (32, 4), (64, 2)  # groups that a program quantises, and its warps
MANY_ROWS = 1024
ELEMENTS = 1024  # outputs a program of _add_chunks takes


@dataclass(frozen=True, kw_only=True, slots=True)
class Weight8:
    """E4M3 ``data`` [O, I] and ``scale`` int64 [O / ``scale_rows``, I / 128], each the bf16 scales of four blocks of 32.

    A weight of ``groups`` is [G * O, I].
    """

    data: Tensor
    scale: Tensor
    scale_rows: int
    groups: int | None = None

    def double(self) -> Tensor:
        """What the reference multiplies with, so that the switch can force one op: [O, I], or [G, I, O] of a grouped one."""
        inputs = self.data.shape[1]
        scale_OS = self.scale.view(torch.bfloat16).double().repeat_interleave(self.scale_rows, 0)
        scale_OI = scale_OS.repeat_interleave(fp8_block.BLOCK, 1)[: self.data.shape[0], :inputs]
        weight_OI = self.data.double() * scale_OI
        if self.groups is None:
            return weight_OI
        return weight_OI.unflatten(0, (self.groups, -1)).transpose(1, 2).contiguous()


def prepare_fp8(*weights: QuantTensor) -> Weight8:
    """See ``Gemm.prepare_fp8``. Scales stay one a block, unless rows of two weights would meet inside a block of 32."""
    scale_rows = fp8_block.BLOCK if all(w.shape[0] % fp8_block.BLOCK == 0 for w in weights[:-1]) else 1
    scales = [e8m0.decode(weight.scale) for weight in weights]
    if scale_rows == 1:
        scales = [
            s.repeat_interleave(fp8_block.BLOCK, 0)[: w.shape[0]]
            for s, w in zip(scales, weights, strict=True)
        ]
    data = torch.cat([weight.data.view(torch.uint8) for weight in weights])
    return Weight8(
        data=data.view(torch.float8_e4m3fn), scale=_four_together(torch.cat(scales)), scale_rows=scale_rows
    )


def prepare_fp8_grouped(weight: QuantTensor, *, groups: int) -> Weight8:
    """See ``Gemm.prepare_fp8_grouped``: as stored; blocks count rows of all groups."""
    return Weight8(
        data=weight.data.contiguous(),
        scale=_four_together(e8m0.decode(weight.scale)),
        scale_rows=fp8_block.BLOCK,
        groups=groups,
    )


def prepare_bf16(*weights: Tensor) -> Tensor:
    """See ``Gemm.prepare_bf16``: bf16 [O, I]."""
    return torch.cat(weights).contiguous()


def quantise_input(x_TI: Tensor) -> Tensor:
    """See ``Gemm.quantise_input``: the quantised values, which bf16 holds exactly, [T, I]."""
    rows, inputs = x_TI.shape
    assert inputs % mxfp8.GROUP == 0
    x_TI = x_TI.contiguous()
    out_TI = torch.empty_like(x_TI)
    groups = x_TI.numel() // mxfp8.GROUP
    if groups:
        together, warps = QUANTISED_OF_MANY if rows >= MANY_ROWS else QUANTISED_OF_FEW
        pdl = programmatic(x_TI.device)
        _quantise_input[(triton.cdiv(groups, together),)](
            x_TI, out_TI, groups, GROUPS=together, PDL=pdl, num_warps=warps, launch_pdl=pdl
        )
    return out_TI


def lin8(quantised: Any, weight: Any) -> Tensor:
    """See ``Gemm.lin8``."""
    x_TI = quantised.bfloat16()  # exact, also of the reference's float64
    out_TGO = _multiply(x_TI.unsqueeze(1), weight.data, weight, torch.bfloat16)
    return out_TGO.squeeze(1)


def linb(x_TI: Tensor, weight: Any) -> Tensor:
    """See ``Gemm.linb``."""
    return _multiply(x_TI.unsqueeze(1), weight, None, torch.bfloat16).squeeze(1)


def linf(x_TI: Tensor, weight: Any) -> Tensor:
    """See ``Gemm.linf``: products of bf16 numbers are exact in fp32, so matrix instructions lose nothing but their sums' bits."""
    return _multiply(x_TI.unsqueeze(1), weight, None, torch.float32).squeeze(1)


def linb_grouped(x_TGI: Tensor, weight: Any) -> Tensor:
    """See ``Gemm.linb_grouped``."""
    assert weight.groups == x_TGI.shape[1]
    return _multiply(x_TGI, weight.data, weight, torch.bfloat16)


def _four_together(scale_OB: Tensor) -> Tensor:
    """int64 [O, ceil(B / 4)] of fp32 powers of two [O, B]: four bf16 scales a number, zeros where there is no block."""
    padded = torch.nn.functional.pad(scale_OB, (0, -scale_OB.shape[1] % SCALES))
    return padded.bfloat16().contiguous().view(torch.int64)


def many_rows(x_TGI: Tensor, weight: Tensor, *, chunk: int, dtype: torch.dtype) -> Tensor:
    """[T, G, O] of bf16 x and a bf16 weight [G * O, I] in tiles for thousands of rows, one chain for each ``chunk`` inputs."""
    rows, groups, inputs = x_TGI.shape
    outputs = weight.shape[0] // groups
    chunks = triton.cdiv(inputs, chunk)
    block_t = 256 if chunks == 1 else 128  # a second sum leaves no room for the wider tile
    plan = Plan(
        block_o=128,
        block_t=block_t,
        warps=8,
        stages=4,
        tiles=triton.cdiv(outputs, 128) * triton.cdiv(rows, block_t),
        chunk=chunk,
        chunks=chunks,
        apart=False,
    )
    return _run(x_TGI, weight, None, dtype, plan)


def _multiply(x_TGI: Tensor, data: Tensor, weight: Weight8 | None, dtype: torch.dtype) -> Tensor:
    """[T, G, O] of bf16 x [T, G, I] and a weight [G * O, I]: E4M3 with the scales of ``weight``, or bf16 where that is None."""
    rows, groups, inputs = x_TGI.shape
    plan = plan_of(rows=rows, groups=groups, inputs=inputs, outputs=data.shape[0] // groups)
    return _run(x_TGI, data, weight, dtype, plan)


def _run(x_TGI: Tensor, data: Tensor, weight: Weight8 | None, dtype: torch.dtype, plan: "Plan") -> Tensor:
    if x_TGI.stride(2) != 1:
        x_TGI = x_TGI.contiguous()
    rows, groups, inputs = x_TGI.shape
    outputs = data.shape[0] // groups
    assert data.shape[1] == inputs
    out_TGO = torch.empty(rows, groups, outputs, dtype=dtype, device=x_TGI.device)
    if not rows:
        return out_TGO
    target = out_TGO
    if plan.apart:
        target = torch.empty(plan.chunks, *out_TGO.shape, dtype=torch.float32, device=x_TGI.device)
    _linear[(plan.tiles, groups, plan.chunks if plan.apart else 1)](
        x_TGI,
        data,
        weight.scale if weight else data,
        target,
        rows,
        outputs,
        inputs,
        x_TGI.stride(0),
        x_TGI.stride(1),
        weight.scale.shape[1] if weight else 0,
        plan.chunk,
        plan.chunks,
        BLOCK_O=plan.block_o,
        BLOCK_T=plan.block_t,
        BLOCK_I=BLOCK_I if weight else BLOCK_I_BF16,
        FP8=weight is not None,
        SCALE_ROWS=weight.scale_rows if weight else 1,
        EVEN=inputs % BLOCK_I == 0,
        LOOP=plan.chunks > 1 and not plan.apart,
        ROW_TILES=ROW_TILES_TOGETHER,
        STAGES=plan.stages,
        num_warps=plan.warps,
    )
    if plan.apart:
        count = out_TGO.numel()
        _add_chunks[(triton.cdiv(count, ELEMENTS),)](
            target, out_TGO, count, CHUNKS=plan.chunks, ELEMENTS=ELEMENTS, num_warps=4
        )
    return out_TGO


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How a product is cut. ``chunk`` and ``chunks`` follow from the weight alone, everything else from the rows too."""

    block_o: int
    block_t: int
    warps: int
    stages: int
    tiles: int
    chunk: int
    chunks: int
    apart: bool  # each chunk in a program of its own, added by a second kernel


def plan_of(*, rows: int, groups: int, inputs: int, outputs: int) -> Plan:
    """Few rows: small tiles, and chunks apart while the tiles alone would not fill the device. Host arithmetic only."""
    narrow_tiles = triton.cdiv(outputs, 64) * groups
    wanted = min(max(PROGRAMS // narrow_tiles, 1), max(inputs // SHORTEST_CHUNK, 1))
    chunk = triton.cdiv(triton.cdiv(inputs, wanted), BLOCK_I) * BLOCK_I
    chunks = triton.cdiv(inputs, chunk)
    block_t = min(max(triton.next_power_of_2(rows), 16), 128)
    block_o = 64 if block_t < 128 else 128
    tiles = triton.cdiv(outputs, block_o) * triton.cdiv(rows, block_t)
    apart = chunks > 1 and tiles * groups < PROGRAMS // 2
    # wide tiles that keep one sum leave room for a second program, whose products hide the other's conversions
    wide_stages = 3 if chunks > 1 and not apart else 2
    return Plan(
        block_o=block_o,
        block_t=block_t,
        warps=block_o // 16,
        stages={16: 4, 32: 4, 64: 3, 128: wide_stages}[block_t],
        tiles=tiles,
        chunk=chunk,
        chunks=chunks,
        apart=apart,
    )


@triton.jit
def _quantise_input(x_ptr, out_ptr, groups, GROUPS: tl.constexpr, PDL: tl.constexpr):
    """Q8 of ``GROUPS`` groups of 32 channels, of whatever rows, written back as bf16 values (spec/model.md 0)."""
    wait_for_producers(PDL)
    group_G = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    offset_GC = group_G[:, None] * 32 + tl.arange(0, 32)[None, :]
    mask_GC = (group_G < groups)[:, None]
    x_GC = tl.load(x_ptr + offset_GC, mask=mask_GC, other=0.0).to(tl.float32)
    amax_G = tl.max(tl.abs(x_GC), axis=1)
    scaled_G = tl.maximum(amax_G, 1e-4) * (1.0 / 448.0)
    exponent_G = ((scaled_G.to(tl.int32, bitcast=True) + 0x7FFFFF) >> 23) & 0xFF
    scale_G = (exponent_G << 23).to(tl.float32, bitcast=True)
    inverse_G = ((254 - exponent_G) << 23).to(
        tl.float32, bitcast=True
    )  # exact, as a true division by the scale
    # a group that holds a NaN or an infinity has a NaN scale; max passes NaN over, so it is counted apart
    broken_G = tl.max(tl.where(tl.abs(x_GC) < float("inf"), 0, 1), axis=1)
    scale_G = tl.where(broken_G > 0, float("nan"), scale_G)
    y_GC = tl.minimum(tl.maximum(x_GC * inverse_G[:, None], -448.0), 448.0)
    y_GC = y_GC.to(tl.float8e4nv).to(tl.float32) * scale_G[:, None]
    tl.store(out_ptr + offset_GC, y_GC.to(tl.bfloat16), mask=mask_GC)


@triton.jit
def _linear(
    x_ptr,
    w_ptr,
    scale_ptr,
    out_ptr,
    rows,
    outputs,
    inputs,
    x_row,
    x_group,
    scale_columns,
    chunk,
    chunks,
    BLOCK_O: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_I: tl.constexpr,
    FP8: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    EVEN: tl.constexpr,
    LOOP: tl.constexpr,
    ROW_TILES: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One tile [BLOCK_T, BLOCK_O] of a group's outputs: all its chunks (LOOP), or the one that the third axis names.

    Program axes: tile, group, chunk. Rows and outputs beyond the end repeat the last one and are not stored.
    """
    group = tl.program_id(1)
    tiles_o = tl.cdiv(outputs, BLOCK_O)
    # ROW_TILES row tiles in turn read one weight tile, so that it is read from memory once for all of them
    band = tl.program_id(0) // (ROW_TILES * tiles_o)
    band_rows = tl.minimum(tl.cdiv(rows, BLOCK_T) - band * ROW_TILES, ROW_TILES)
    in_band = tl.program_id(0) % (ROW_TILES * tiles_o)
    o_O = (in_band // band_rows) * BLOCK_O + tl.arange(0, BLOCK_O)
    t_T = (band * ROW_TILES + in_band % band_rows) * BLOCK_T + tl.arange(0, BLOCK_T)

    weight_row_O = (group * outputs + tl.minimum(o_O, outputs - 1)).to(tl.int64)
    x_T_ptr = x_ptr + tl.minimum(t_T, rows - 1).to(tl.int64) * x_row + group * x_group
    w_O_ptr = w_ptr + weight_row_O * inputs
    scale_O_ptr = scale_ptr + (weight_row_O // SCALE_ROWS) * scale_columns

    if LOOP:
        total_OT = tl.zeros((BLOCK_O, BLOCK_T), tl.float32)
        for index in range(chunks):
            total_OT += _chain(
                w_O_ptr,
                x_T_ptr,
                scale_O_ptr,
                index * chunk,
                chunk,
                inputs,
                BLOCK_O,
                BLOCK_T,
                BLOCK_I,
                FP8,
                EVEN,
                STAGES,
            )
    else:
        total_OT = _chain(
            w_O_ptr,
            x_T_ptr,
            scale_O_ptr,
            tl.program_id(2) * chunk,
            chunk,
            inputs,
            BLOCK_O,
            BLOCK_T,
            BLOCK_I,
            FP8,
            EVEN,
            STAGES,
        )

    width = tl.num_programs(1).to(tl.int64) * outputs
    out_ptr += tl.program_id(2) * rows * width
    out_OT_ptr = out_ptr + t_T.to(tl.int64)[None, :] * width + (group * outputs + o_O)[:, None]
    tl.store(
        out_OT_ptr,
        total_OT.to(out_ptr.dtype.element_ty),
        mask=(o_O < outputs)[:, None] & (t_T < rows)[None, :],
    )


@triton.jit
def _chain(
    w_O_ptr,
    x_T_ptr,
    scale_O_ptr,
    begin,
    chunk,
    inputs,
    BLOCK_O: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_I: tl.constexpr,
    FP8: tl.constexpr,
    EVEN: tl.constexpr,
    STAGES: tl.constexpr,
):
    """fp32 [BLOCK_O, BLOCK_T]: the products of one chunk of the inputs, one chain of matrix instructions."""
    sum_OT = tl.zeros((BLOCK_O, BLOCK_T), tl.float32)
    for start in tl.range(begin, tl.minimum(begin + chunk, inputs), BLOCK_I, num_stages=STAGES):
        if FP8:
            scales_O = tl.load(scale_O_ptr + start // BLOCK_I)
            for part in tl.static_range(BLOCK_I // 32):
                i_I = start + part * 32 + tl.arange(0, 32)
                w_OI = _load(w_O_ptr[:, None] + i_I[None, :], (i_I < inputs)[None, :], EVEN)
                x_IT = _load(x_T_ptr[None, :] + i_I[:, None], (i_I < inputs)[:, None], EVEN)
                scale_O = (scales_O >> (16 * part)).to(tl.int16).to(tl.bfloat16, bitcast=True)
                # by fp32: the direct conversion takes an instruction of a quarter of the rate
                w_OI = w_OI.to(tl.float16).to(tl.float32).to(tl.bfloat16) * scale_O[:, None]
                sum_OT = tl.dot(w_OI, x_IT, sum_OT)
        else:
            i_I = start + tl.arange(0, BLOCK_I)
            w_OI = _load(w_O_ptr[:, None] + i_I[None, :], (i_I < inputs)[None, :], EVEN)
            x_IT = _load(x_T_ptr[None, :] + i_I[:, None], (i_I < inputs)[:, None], EVEN)
            sum_OT = tl.dot(w_OI, x_IT, sum_OT)
    return sum_OT


@triton.jit
def _load(ptr, mask, EVEN: tl.constexpr):
    """A tile; ``mask`` only where the last one may be ragged."""
    if EVEN:
        return tl.load(ptr)
    return tl.load(ptr, mask=mask, other=0.0)


@triton.jit
def _add_chunks(parts_ptr, out_ptr, count, CHUNKS: tl.constexpr, ELEMENTS: tl.constexpr):
    """``ELEMENTS`` outputs: the fp32 sums of the chunks, added in order and rounded once."""
    i_N = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    total_N = tl.zeros((ELEMENTS,), tl.float32)
    for index in tl.static_range(CHUNKS):
        total_N += tl.load(
            parts_ptr + tl.full((), index, tl.int64) * count + i_N, mask=i_N < count, other=0.0
        )
    tl.store(out_ptr + i_N, total_N.to(out_ptr.dtype.element_ty), mask=i_N < count)


_LINEAR = {
    "x_ptr": "*bf16",
    "w_ptr": "*fp8e4nv",
    "scale_ptr": "*i64",
    "out_ptr": "*bf16",
    **dict.fromkeys(
        ("rows", "outputs", "inputs", "x_row", "x_group", "scale_columns", "chunk", "chunks"), "i32"
    ),
}
_FP8 = {"BLOCK_I": BLOCK_I, "FP8": True, "SCALE_ROWS": 32, "ROW_TILES": ROW_TILES_TOGETHER}
_BF16 = {"BLOCK_I": BLOCK_I_BF16, "FP8": False, "SCALE_ROWS": 1, "ROW_TILES": ROW_TILES_TOGETHER}
_NARROW = {"BLOCK_O": 64, "BLOCK_T": 16, "STAGES": 4}
_WIDE = {"BLOCK_O": 128, "BLOCK_T": 128, "STAGES": 2}
# (kernel, signature, constants) to compile ahead of time
AOT = (
    *(
        (
            _quantise_input,
            {"x_ptr": "*bf16:16", "out_ptr": "*bf16:16", "groups": "i32"},
            {"GROUPS": together, "PDL": True},
            {"num_warps": warps},
        )
        for together, warps in (QUANTISED_OF_FEW, QUANTISED_OF_MANY)
    ),
    *(
        (_linear, _LINEAR, {**_FP8, **tile, "EVEN": True, "LOOP": loop})
        for tile in (_NARROW, _WIDE)
        for loop in (False, True)
    ),
    (_linear, {**_LINEAR, "out_ptr": "*fp32"}, {**_FP8, **_NARROW, "EVEN": True, "LOOP": False}),
    (_linear, _LINEAR, {**_FP8, **_NARROW, "SCALE_ROWS": 1, "EVEN": False, "LOOP": False}),
    *(
        (
            _linear,
            {**_LINEAR, "w_ptr": "*bf16", "scale_ptr": "*bf16", "out_ptr": "*fp32"},
            {**_BF16, **tile, "EVEN": even, "LOOP": loop},
        )
        for tile, even, loop in ((_NARROW, True, False), (_NARROW, False, True), (_WIDE, True, True))
    ),
    (
        _add_chunks,
        {"parts_ptr": "*fp32", "out_ptr": "*bf16", "count": "i32"},
        {"CHUNKS": 4, "ELEMENTS": ELEMENTS},
    ),
)
