"""The router's products for many rows in Triton: fp32 sums, chunk by chunk of the width, as router.cu adds them for few.

A chunk of ``GATE_CHUNK`` inputs is one chain of matrix instructions and chunks are added in order: a row's logits have the same
bits here and there, however the rows are cut into tiles. Knows no scores and no selection.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashstep.kernels.jit import programmatic, wait_for_producers

GATE_CHUNK = 256  # inputs of one chain of router products
PROGRAMS = 132
BLOCK_E = 64


def gate_sums(x_TD: Tensor, gate_ED: Tensor) -> Tensor:
    """fp32 [chunks or 1, T, E] whose sum over the first axis, in order, are the logits of bf16 rows and a gate bf16 [E, D]."""
    rows, width = x_TD.shape
    experts = gate_ED.shape[0]
    chunks = triton.cdiv(width, GATE_CHUNK)
    block_t = min(max(triton.next_power_of_2(rows), 16), 64)
    tiles = triton.cdiv(rows, block_t), triton.cdiv(experts, BLOCK_E)
    apart = tiles[0] * tiles[1] < PROGRAMS
    sums_CTE = torch.empty(chunks if apart else 1, rows, experts, dtype=torch.float32, device=x_TD.device)
    pdl = programmatic(x_TD.device)
    _gate_sums[(*tiles, sums_CTE.shape[0])](
        x_TD.contiguous(),
        gate_ED,
        sums_CTE,
        rows,
        experts,
        width,
        chunks,
        CHUNK=GATE_CHUNK,
        BLOCK_E=BLOCK_E,
        BLOCK_T=block_t,
        BLOCK_D=64,
        EVEN=width % 64 == 0,
        APART=apart,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    return sums_CTE


@triton.jit
def _gate_sums(
    x_ptr,
    gate_ptr,
    sums_ptr,
    rows,
    experts,
    width,
    chunks,
    CHUNK: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    EVEN: tl.constexpr,
    APART: tl.constexpr,
    PDL: tl.constexpr,
):
    """fp32 sums of a tile of rows and experts: all chunks of the width added in order, or (APART) one chunk's sums."""
    wait_for_producers(PDL)
    t_T = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    e_E = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    x_T_ptr = x_ptr + tl.minimum(t_T, rows - 1).to(tl.int64) * width
    gate_E_ptr = gate_ptr + tl.minimum(e_E, experts - 1) * width
    first = tl.program_id(2) if APART else 0
    last = tl.program_id(2) + 1 if APART else chunks
    total_ET = tl.zeros((BLOCK_E, BLOCK_T), tl.float32)
    for chunk in range(first, last):
        sum_ET = tl.zeros((BLOCK_E, BLOCK_T), tl.float32)
        for start in tl.range(chunk * CHUNK, tl.minimum((chunk + 1) * CHUNK, width), BLOCK_D, num_stages=4):
            d_D = start + tl.arange(0, BLOCK_D)
            if EVEN:
                gate_ED = tl.load(gate_E_ptr[:, None] + d_D[None, :])
                x_DT = tl.load(x_T_ptr[None, :] + d_D[:, None])
            else:
                gate_ED = tl.load(gate_E_ptr[:, None] + d_D[None, :], mask=(d_D < width)[None, :], other=0.0)
                x_DT = tl.load(x_T_ptr[None, :] + d_D[:, None], mask=(d_D < width)[:, None], other=0.0)
            sum_ET = tl.dot(gate_ED, x_DT, sum_ET)
        total_ET += sum_ET
    row_T = t_T.to(tl.int64)
    if APART:
        row_T += first * rows
    sums_ET_ptr = sums_ptr + row_T[None, :] * experts + e_E[:, None]
    tl.store(sums_ET_ptr, total_ET, mask=(e_E < experts)[:, None] & (t_T < rows)[None, :])


_GATE = {
    "x_ptr": "*bf16",
    "gate_ptr": "*bf16",
    "sums_ptr": "*fp32",
    **dict.fromkeys(("rows", "experts", "width", "chunks"), "i32"),
}
_SHAPE = {"CHUNK": GATE_CHUNK, "BLOCK_E": BLOCK_E, "BLOCK_D": 64, "PDL": True}
# (kernel, signature, constants) to compile ahead of time
AOT = tuple(
    (_gate_sums, _GATE, {**_SHAPE, "BLOCK_T": block_t, "EVEN": even, "APART": apart})
    for block_t, even, apart in ((16, True, True), (64, True, True), (64, True, False), (64, False, False))
)
