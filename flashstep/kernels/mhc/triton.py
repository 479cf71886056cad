"""mHC in Triton: coefficients as a split product and a finishing pass, collapse and write as one pass over the streams.

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

from flashstep.kernels.mhc import reference

ROW_TILE = 64  # rows of one product: the least that wgmma takes
CHUNK = 512  # channels of one partial sum
STEP = 64  # channels of one product
WIDTH_TILE = 1024  # channels of a row that one program collapses or writes


class PreparedSite(NamedTuple):
    """fp32 projection [M, S * D] as stored, base [M] and scale [M] of each output."""

    projection: Tensor
    base: Tensor
    scale: Tensor

    def double(self) -> reference.PreparedSite:
        """What the reference would have made, so that the switch can force one op."""
        streams = math.isqrt(self.base.numel() + 1) - 1
        scale_3 = self.scale[::streams][:3]
        return reference.prepare_site(self.projection, base_M=self.base, scale_3=scale_3, streams=streams)


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
    pre_ptr,
    post_ptr,
    comb_ptr,
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

    vector = part[:, None] * OUTPUTS + stream[None, :]
    there = part[:, None] < CHUNKS
    pre = tl.sum(tl.load(partial_ptr + vector, mask=there, other=0.0), axis=0) * statistic
    pre = tl.load(base_ptr + stream) + pre * tl.load(scale_ptr + stream)
    tl.store(pre_ptr + row * STREAMS + stream, tl.sigmoid(pre) + eps)
    post = tl.sum(tl.load(partial_ptr + STREAMS + vector, mask=there, other=0.0), axis=0) * statistic
    post = tl.load(base_ptr + STREAMS + stream) + post * tl.load(scale_ptr + STREAMS + stream)
    tl.store(post_ptr + row * STREAMS + stream, 2 * tl.sigmoid(post))

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
    tl.store(comb_ptr + row * STREAMS * STREAMS + place, comb)


@triton.jit
def _collapse(x_ptr, pre_ptr, out_ptr, STREAMS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Program (row, channel block): the weighted sum of the row's streams."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < WIDTH
    total = tl.zeros((BLOCK,), tl.float32)
    for stream in tl.static_range(STREAMS):
        x = tl.load(x_ptr + (row * STREAMS + stream) * WIDTH + at, mask=inside, other=0.0)
        total += tl.load(pre_ptr + row * STREAMS + stream) * x.to(tl.float32)
    tl.store(out_ptr + row * WIDTH + at, total.to(tl.bfloat16), mask=inside)


@triton.jit
def _write(
    y_ptr,
    x_ptr,
    post_ptr,
    comb_ptr,
    out_ptr,
    STREAMS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (row, channel block): all output streams from one read of the sublayer's output and of all input streams."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < WIDTH
    target = tl.arange(0, STREAMS)
    y = tl.load(y_ptr + row * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    total = tl.load(post_ptr + row * STREAMS + target)[:, None] * y[None, :]
    for source in tl.static_range(STREAMS):
        x = tl.load(x_ptr + (row * STREAMS + source) * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
        share = tl.load(comb_ptr + (row * STREAMS + source) * STREAMS + target)
        total += share[:, None] * x[None, :]
    out_ptr += (row * STREAMS + target[:, None]) * WIDTH + at[None, :]
    tl.store(out_ptr, total.to(tl.bfloat16), mask=inside[None, :])


def prepare_site(fn: Tensor, *, base_M: Tensor, scale_3: Tensor, streams: int) -> PreparedSite:
    """See ``Mhc.prepare_site``: as stored, with one scale an output."""
    scale_M = torch.cat([scale_3[i].expand(n) for i, n in enumerate((streams, streams, streams * streams))])
    return PreparedSite(
        projection=fn.contiguous(), base=base_M.contiguous(), scale=scale_M.float().contiguous()
    )


def coefficients(
    x_TSD: Tensor, site: Any, *, iterations: int, eps: float, norm_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``Mhc.coefficients``."""
    rows, streams, width = x_TSD.shape
    assert x_TSD.is_contiguous() and streams & (streams - 1) == 0, (
        "the kernels hold a power of two of streams"
    )
    flat, outputs = streams * width, site.base.numel()
    chunks = triton.cdiv(flat, CHUNK)
    pre_TS = x_TSD.new_empty((rows, streams), dtype=torch.float32)
    post_TS = torch.empty_like(pre_TS)
    comb_TSS = x_TSD.new_empty((rows, streams, streams), dtype=torch.float32)
    if not rows:
        return pre_TS, post_TS, comb_TSS
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
        pre_TS,
        post_TS,
        comb_TSS,
        eps,
        norm_eps,
        STREAMS=streams,
        FLAT=flat,
        CHUNKS=chunks,
        CHUNK_TILE=triton.next_power_of_2(chunks),
        ITERATIONS=iterations,
        num_warps=1,
    )
    return pre_TS, post_TS, comb_TSS


def collapse(x_TSD: Tensor, pre_TS: Tensor) -> Tensor:
    """See ``Mhc.collapse``."""
    rows, streams, width = x_TSD.shape
    assert x_TSD.is_contiguous()
    pre_TS = pre_TS.contiguous()  # the reference's coefficients are views, and the switch may mix the two
    out_TD = x_TSD.new_empty((rows, width))
    if rows:
        block = min(WIDTH_TILE, triton.next_power_of_2(width))
        _collapse[(rows, triton.cdiv(width, block))](
            x_TSD, pre_TS, out_TD, STREAMS=streams, WIDTH=width, BLOCK=block
        )
    return out_TD


def write(y_TD: Tensor, x_TSD: Tensor, *, post_TS: Tensor, comb_TSS: Tensor) -> Tensor:
    """See ``Mhc.write``."""
    rows, streams, width = x_TSD.shape
    assert y_TD.is_contiguous() and x_TSD.is_contiguous() and streams & (streams - 1) == 0
    post_TS, comb_TSS = post_TS.contiguous(), comb_TSS.contiguous()
    out_TSD = torch.empty_like(x_TSD)
    if rows:
        block = min(WIDTH_TILE, triton.next_power_of_2(width))
        _write[(rows, triton.cdiv(width, block))](
            y_TD, x_TSD, post_TS, comb_TSS, out_TSD, STREAMS=streams, WIDTH=width, BLOCK=block
        )
    return out_TSD


_SHAPE = {"STREAMS": 4, "WIDTH": 5120, "BLOCK": WIDTH_TILE}
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
            "partial_ptr": "*fp32",
            "square_ptr": "*fp32",
            "base_ptr": "*fp32",
            "scale_ptr": "*fp32",
            "pre_ptr": "*fp32",
            "post_ptr": "*fp32",
            "comb_ptr": "*fp32",
            "eps": "fp32",
            "norm_eps": "fp32",
        },
        {"STREAMS": 4, "FLAT": 20480, "CHUNKS": 40, "CHUNK_TILE": 64, "ITERATIONS": 20},
    ),
    (_collapse, {"x_ptr": "*bf16", "pre_ptr": "*fp32", "out_ptr": "*bf16"}, _SHAPE),
    (
        _write,
        {"y_ptr": "*bf16", "x_ptr": "*bf16", "post_ptr": "*fp32", "comb_ptr": "*fp32", "out_ptr": "*bf16"},
        _SHAPE,
    ),
)
