"""mHC in Triton, an op in several launches: for Hopper where there is no CUDA compiler, and ``write`` everywhere.

The projection is fp32 and the streams are bf16: each weight is cut into three bf16 terms that add up to it exactly, so the
product runs on the matrix units and only its sums round (fp32). Chunks of channels are summed apart and added in a fixed
order, whatever the number of rows: a row's coefficients do not depend on the batch. Suffixes as in the front door.
"""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashstep.kernels.mhc import Entered, Hidden, reference
from flashstep.quant import mxfp8

ROW_TILE = 64  # rows of one product: the least that wgmma takes
CHUNK = 512  # channels of one partial sum
STEP = 64  # channels of one product
WIDTH_TILE = 1024  # channels of a row that one program collapses or writes


class PreparedSite(NamedTuple):
    """fp32 projection [M, S * D] as stored, base [M] and scale [M] of each output; the rest as in ``reference``."""

    projection: Tensor
    base: Tensor
    scale: Tensor
    norm_D: Tensor
    iterations: int
    eps: float
    norm_eps: float

    def double(self) -> reference.PreparedSite:
        """What the reference would have made, so that the switch can force one op."""
        streams = math.isqrt(self.base.numel() + 1) - 1
        return reference.prepare_site(
            self.projection,
            base_M=self.base,
            scale_3=self.scale[::streams][:3],
            norm_D=self.norm_D,
            iterations=self.iterations,
            eps=self.eps,
            norm_eps=self.norm_eps,
        )


@triton.jit
def _project(
    x_ptr,
    projection_ptr,
    partial_ptr,
    square_ptr,
    rows,
    OUTPUTS: tl.constexpr,
    FLAT: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    ROW_TILE: tl.constexpr,
    OUTPUT_TILE: tl.constexpr,
    STEP: tl.constexpr,
):
    """Program (chunk, row tile): the chunk's part of all outputs and of the sum of squares of its rows."""
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64) * ROW_TILE + tl.arange(0, ROW_TILE)
    output = tl.arange(0, OUTPUT_TILE)
    step = tl.arange(0, STEP)
    total = tl.zeros((ROW_TILE, OUTPUT_TILE), tl.float32)
    squares = tl.zeros((ROW_TILE,), tl.float32)
    for start in range(0, CHUNK, STEP):
        at = chunk * CHUNK + start + step
        x = tl.load(
            x_ptr + row[:, None] * FLAT + at[None, :],
            mask=(row[:, None] < rows) & (at[None, :] < FLAT),
            other=0.0,
        )
        weight = tl.load(
            projection_ptr + output[None, :] * FLAT + at[:, None],
            mask=(output[None, :] < OUTPUTS) & (at[:, None] < FLAT),
            other=0.0,
        )
        high = weight.to(tl.bfloat16)
        rest = weight - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        total = tl.dot(x, high, total)
        total = tl.dot(x, middle, total)
        total = tl.dot(x, low, total)
        wide = x.to(tl.float32)
        squares += tl.sum(wide * wide, axis=1)
    tl.store(
        partial_ptr + (row[:, None] * CHUNKS + chunk) * OUTPUTS + output[None, :],
        total,
        mask=(row[:, None] < rows) & (output[None, :] < OUTPUTS),
    )
    tl.store(square_ptr + row * CHUNKS + chunk, squares, mask=row < rows)


@triton.jit
def _finish(
    partial_ptr,
    square_ptr,
    base_ptr,
    scale_ptr,
    out_ptr,
    eps,
    norm_eps,
    STREAMS: tl.constexpr,
    FLAT: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK_TILE: tl.constexpr,
    ITERATIONS: tl.constexpr,
):
    """Program row: adds the partial sums, then both sigmoids, and Sinkhorn on the S x S matrix in registers."""
    OUTPUTS: tl.constexpr = 2 * STREAMS + STREAMS * STREAMS
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, CHUNK_TILE)
    stream = tl.arange(0, STREAMS)
    squares = tl.sum(tl.load(square_ptr + row * CHUNKS + part, mask=part < CHUNKS, other=0.0))
    statistic = tl.rsqrt(squares / FLAT + norm_eps)
    partial_ptr += row * CHUNKS * OUTPUTS
    out_ptr += row * OUTPUTS

    vector = part[:, None] * OUTPUTS + stream[None, :]
    there = part[:, None] < CHUNKS
    pre = tl.sum(tl.load(partial_ptr + vector, mask=there, other=0.0), axis=0) * statistic
    pre = tl.load(base_ptr + stream) + pre * tl.load(scale_ptr + stream)
    tl.store(out_ptr + stream, tl.sigmoid(pre) + eps)
    post = tl.sum(tl.load(partial_ptr + STREAMS + vector, mask=there, other=0.0), axis=0) * statistic
    post = tl.load(base_ptr + STREAMS + stream) + post * tl.load(scale_ptr + STREAMS + stream)
    tl.store(out_ptr + STREAMS + stream, 2 * tl.sigmoid(post))

    place = stream[:, None] * STREAMS + stream[None, :]  # [input, output]
    matrix = tl.load(
        partial_ptr + 2 * STREAMS + part[:, None, None] * OUTPUTS + place[None, :, :],
        mask=part[:, None, None] < CHUNKS,
        other=0.0,
    )
    comb = tl.sum(matrix, axis=0) * statistic
    comb = tl.load(base_ptr + 2 * STREAMS + place) + comb * tl.load(scale_ptr + 2 * STREAMS + place)
    comb = tl.exp(comb - tl.max(comb, axis=1)[:, None])
    comb = comb / tl.sum(comb, axis=1)[:, None] + eps
    comb = comb / (tl.sum(comb, axis=0)[None, :] + eps)
    for _ in range(ITERATIONS - 1):
        comb = comb / (tl.sum(comb, axis=1)[:, None] + eps)
        comb = comb / (tl.sum(comb, axis=0)[None, :] + eps)
    tl.store(out_ptr + 2 * STREAMS + place, comb)


@triton.jit
def _read(
    x_ptr,
    share_ptr,
    weight_ptr,
    collapsed_ptr,
    normed_ptr,
    quantised_ptr,
    x_row,
    x_stream,
    share_row,
    eps,
    STREAMS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    COLLAPSED: tl.constexpr,
    NORMED: tl.constexpr,
    QUANTISED: tl.constexpr,
):
    """Program row: the weighted sum of its streams, its RMS norm, and that quantised as ``gemm.quantise_input`` does it."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    total = tl.zeros((BLOCK,), tl.float32)
    for stream in tl.static_range(STREAMS):
        x = tl.load(x_ptr + row * x_row + stream * x_stream + at, mask=inside, other=0.0)
        total += tl.load(share_ptr + row * share_row + stream) * x.to(tl.float32)
    collapsed = total.to(tl.bfloat16)
    if COLLAPSED:
        tl.store(collapsed_ptr + row * WIDTH + at, collapsed, mask=inside)
    if NORMED:
        wide = collapsed.to(tl.float32)
        scale = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(wide * wide, 0) * (1.0 / WIDTH) + eps))
        weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
        normed = (wide * scale * weight).to(tl.bfloat16)
        tl.store(normed_ptr + row * WIDTH + at, normed, mask=inside)
    if QUANTISED:
        x_GC = tl.reshape(normed.to(tl.float32), (BLOCK // 32, 32))
        amax_G = tl.maximum(tl.max(tl.abs(x_GC), axis=1), 1e-4)
        exponent_G = (((amax_G * (1.0 / 448.0)).to(tl.int32, bitcast=True) + 0x7FFFFF) >> 23) & 0xFF
        scale_G = (exponent_G << 23).to(tl.float32, bitcast=True)
        inverse_G = ((254 - exponent_G) << 23).to(tl.float32, bitcast=True)
        # max passes NaN over
        broken_G = tl.max(tl.where(tl.abs(x_GC) < float("inf"), 0, 1), axis=1)
        scale_G = tl.where(broken_G > 0, float("nan"), scale_G)
        y_GC = tl.minimum(tl.maximum(x_GC * inverse_G[:, None], -448.0), 448.0)
        y_GC = y_GC.to(tl.float8e4nv).to(tl.float32) * scale_G[:, None]
        tl.store(quantised_ptr + row * WIDTH + at, tl.reshape(y_GC, (BLOCK,)).to(tl.bfloat16), mask=inside)


@triton.jit
def _write(
    y_ptr,
    x_ptr,
    share_ptr,
    out_ptr,
    x_row,
    x_stream,
    share_row,
    STREAMS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (row, channel block): all output streams from one read of the sublayer's output and of all input streams."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < WIDTH
    target = tl.arange(0, STREAMS)
    share_ptr += row * share_row + STREAMS + target
    y = tl.load(y_ptr + row * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    total = tl.load(share_ptr)[:, None] * y[None, :]
    for source in tl.static_range(STREAMS):
        x = tl.load(x_ptr + row * x_row + source * x_stream + at, mask=inside, other=0.0).to(tl.float32)
        total += tl.load(share_ptr + (source + 1) * STREAMS)[:, None] * x[None, :]
    out_ptr += (row * STREAMS + target[:, None]) * WIDTH + at[None, :]
    tl.store(out_ptr, total.to(tl.bfloat16), mask=inside[None, :])


def prepare_site(
    fn: Tensor,
    *,
    base_M: Tensor,
    scale_3: Tensor,
    norm_D: Tensor,
    iterations: int,
    eps: float,
    norm_eps: float,
) -> PreparedSite:
    """See ``Mhc.prepare_site``: as stored, with one scale an output."""
    streams = fn.shape[1] // norm_D.shape[0]
    scale_M = torch.cat([scale_3[i].expand(n) for i, n in enumerate((streams, streams, streams * streams))])
    return PreparedSite(
        projection=fn.contiguous(),
        base=base_M.contiguous(),
        scale=scale_M.float().contiguous(),
        norm_D=norm_D.contiguous(),
        iterations=iterations,
        eps=eps,
        norm_eps=norm_eps,
    )


def enter(x_TSD: Tensor, pre_TS: Tensor, site: Any, *, mean: bool) -> Entered:
    """See ``Mhc.enter``."""
    rows, streams, width = x_TSD.shape
    x_TSD = _with_adjacent_channels(x_TSD)
    plain_TD = x_TSD.new_empty((rows, width))
    quantised_TD = torch.empty_like(plain_TD)
    mean_TD = torch.empty_like(plain_TD) if mean else None
    if rows:
        _launch_read(x_TSD, pre_TS, site.norm_D, site.norm_eps, normed=plain_TD, quantised=quantised_TD)
    if rows and mean_TD is not None:
        shares_TS = pre_TS.new_full((1, streams), 1 / streams).expand(rows, streams)
        _launch_read(x_TSD, shares_TS, site.norm_D, site.norm_eps, collapsed=mean_TD)
    return Entered(coefficients(x_TSD, site), Hidden(plain_TD, quantised_TD), mean_TD)


def boundary(
    y_TD: Tensor, x_TSD: Tensor, coefficients_TM: Tensor, site: Any, *, mean: bool
) -> tuple[Tensor, Entered]:
    """See ``Mhc.boundary``."""
    x_TSD = write(y_TD, x_TSD, coefficients_TM)
    return x_TSD, enter(x_TSD, coefficients_TM[:, : x_TSD.shape[1]], site, mean=mean)


def write(y_TD: Tensor, x_TSD: Tensor, coefficients_TM: Tensor) -> Tensor:
    """See ``Mhc.write``."""
    rows, streams, width = x_TSD.shape
    assert streams & (streams - 1) == 0, "the kernels hold a power of two of streams"
    x_TSD, y_TD = _with_adjacent_channels(x_TSD), y_TD.contiguous()
    coefficients_TM = _with_adjacent_channels(coefficients_TM)
    out_TSD = x_TSD.new_empty(x_TSD.shape)
    if rows:
        block = min(WIDTH_TILE, triton.next_power_of_2(width))
        _write[(rows, triton.cdiv(width, block))](
            y_TD,
            x_TSD,
            coefficients_TM,
            out_TSD,
            x_TSD.stride(0),
            x_TSD.stride(1),
            coefficients_TM.stride(0),
            STREAMS=streams,
            WIDTH=width,
            BLOCK=block,
        )
    return out_TSD


def leave(
    y_TD: Tensor,
    x_TSD: Tensor,
    coefficients_TM: Tensor,
    norm_D: Tensor,
    *,
    norm_eps: float,
    rows_R: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """See ``Mhc.leave``."""
    if rows_R is not None:
        y_TD, x_TSD, coefficients_TM = y_TD[rows_R], x_TSD[rows_R], coefficients_TM[rows_R]
    x_TSD = write(y_TD, x_TSD, coefficients_TM)
    hidden_RD = torch.empty_like(y_TD)
    normed_RD = torch.empty_like(y_TD)
    if hidden_RD.shape[0]:
        pre_TS = coefficients_TM[:, : x_TSD.shape[1]]
        _launch_read(x_TSD, pre_TS, norm_D, norm_eps, collapsed=hidden_RD, normed=normed_RD)
    return hidden_RD, normed_RD


def coefficients(x_TSD: Tensor, site: Any) -> Tensor:
    """fp32 [T, M] of bf16 streams."""
    rows, streams, width = x_TSD.shape
    x_TSD = x_TSD.contiguous()
    assert streams & (streams - 1) == 0, "the kernels hold a power of two of streams"
    flat, outputs = streams * width, site.base.numel()
    chunks = triton.cdiv(flat, CHUNK)
    out_TM = x_TSD.new_empty((rows, outputs), dtype=torch.float32)
    if not rows:
        return out_TM
    partial = x_TSD.new_empty((rows, chunks, outputs), dtype=torch.float32)
    squares = x_TSD.new_empty((rows, chunks), dtype=torch.float32)
    _project[(chunks, triton.cdiv(rows, ROW_TILE))](
        x_TSD,
        site.projection,
        partial,
        squares,
        rows,
        OUTPUTS=outputs,
        FLAT=flat,
        CHUNKS=chunks,
        CHUNK=CHUNK,
        ROW_TILE=ROW_TILE,
        OUTPUT_TILE=max(16, triton.next_power_of_2(outputs)),
        STEP=STEP,
    )
    _finish[(rows,)](
        partial,
        squares,
        site.base,
        site.scale,
        out_TM,
        site.eps,
        site.norm_eps,
        STREAMS=streams,
        FLAT=flat,
        CHUNKS=chunks,
        CHUNK_TILE=triton.next_power_of_2(chunks),
        ITERATIONS=site.iterations,
        num_warps=1,
    )
    return out_TM


def _launch_read(
    x_TSD: Tensor,
    share_TS: Tensor,
    weight_D: Tensor,
    eps: float,
    *,
    collapsed: Tensor | None = None,
    normed: Tensor | None = None,
    quantised: Tensor | None = None,
) -> None:
    rows, streams, width = x_TSD.shape
    assert quantised is None or width % mxfp8.GROUP == 0
    share_TS = _with_adjacent_channels(share_TS)
    block = max(triton.next_power_of_2(width), mxfp8.GROUP)
    _read[(rows,)](
        x_TSD,
        share_TS,
        weight_D,
        x_TSD if collapsed is None else collapsed,
        x_TSD if normed is None else normed,
        x_TSD if quantised is None else quantised,
        x_TSD.stride(0),
        x_TSD.stride(1),
        share_TS.stride(0),
        eps,
        STREAMS=streams,
        WIDTH=width,
        BLOCK=block,
        COLLAPSED=collapsed is not None,
        NORMED=normed is not None,
        QUANTISED=quantised is not None,
        num_warps=8 if block >= 2048 else 2,
    )


def _with_adjacent_channels(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


_SHAPE = {"STREAMS": 4, "WIDTH": 5120}
_STRIDES = {"x_row": "i32", "x_stream": "i32", "share_row": "i32"}
AOT = (
    (
        _project,
        {
            "x_ptr": "*bf16",
            "projection_ptr": "*fp32",
            "partial_ptr": "*fp32",
            "square_ptr": "*fp32",
            "rows": "i32",
        },
        {
            "OUTPUTS": 24,
            "FLAT": 20480,
            "CHUNKS": 40,
            "CHUNK": CHUNK,
            "ROW_TILE": ROW_TILE,
            "OUTPUT_TILE": 32,
            "STEP": STEP,
        },
    ),
    (
        _finish,
        {
            **dict.fromkeys(("partial_ptr", "square_ptr", "base_ptr", "scale_ptr", "out_ptr"), "*fp32"),
            "eps": "fp32",
            "norm_eps": "fp32",
        },
        {"STREAMS": 4, "FLAT": 20480, "CHUNKS": 40, "CHUNK_TILE": 64, "ITERATIONS": 20},
    ),
    (
        _read,
        {
            **dict.fromkeys(("x_ptr", "weight_ptr", "collapsed_ptr", "normed_ptr", "quantised_ptr"), "*bf16"),
            "share_ptr": "*fp32",
            **_STRIDES,
            "eps": "fp32",
        },
        {**_SHAPE, "BLOCK": 8192, "COLLAPSED": True, "NORMED": True, "QUANTISED": True},
        {"num_warps": 8},
    ),
    (
        _write,
        {"y_ptr": "*bf16", "x_ptr": "*bf16", "share_ptr": "*fp32", "out_ptr": "*bf16", **_STRIDES},
        {**_SHAPE, "BLOCK": WIDTH_TILE},
    ),
)
