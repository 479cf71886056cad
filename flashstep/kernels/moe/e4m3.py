"""Routed experts in E4M3 for Hopper: FP4 weights become E4M3 in registers, and meet rows of E4M3 in the matrix units.

Less exact than ``cuda``, and faster, hence a row that batch invariance leaves out. A weight is exact where its group's scale is
at least 2^-11 of its output's largest; below, codes are rounded. A row has one scale for 128 inputs instead of 32: what is below
2^-15 of their largest loses bits. Hopper adds products of E4M3 with some 13 bits; after 128 inputs the sums go on in fp32.

A layer is four launches, five where pairs are many: rows in the tiles of their items; gate and up with SwiGLU, routing weight and
Q8; down; the sum over a row's choices. Layers narrower than ``NARROWEST`` are ``cuda``'s.
"""

import ctypes
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashstep.kernels.device import multiprocessors
from flashstep.kernels.jit import c_argument, cuda_library, launched
from flashstep.kernels.moe import cuda
from flashstep.quant import e2m1
from flashstep.quant.tensor import QuantTensor

SOURCE = Path(__file__).with_name("e4m3.cu")
NARROWEST = (
    1024  # of both sides: down of 576 inputs (TP4, 6 rows) took 75 us here and 69 there (H200, 2026-12-01)
)
TILE = 128  # outputs of a tile, and inputs of a step
CODES, FRAGMENT = 1024, 1088  # bytes of 16 outputs x 128 inputs: of the codes, with their scales
SCALED_ROW = 132  # bytes of a row's step: codes and their scale
# (mean rows of an expert, rows that a block multiplies at once)
ITEMS = ((7, 8), (16, 16), (28, 32), (48, 64), (float("inf"), 104))
PLANNED_APART = 1024  # pairs beyond which a launch of its own plans


class Weight(NamedTuple):
    """Fragments uint8 [E, O / 128, I / 128, 8, 1088] of a weight [E, O, I], zeros beyond its ends.

    A fragment is two halves of 64 inputs, each 32 lanes of four words of eight codes; then for each lane group eight scales,
    bytes d: 2^(6 - d) of its output's ``worth``, fp32 [E, O / 128, 128].
    """

    data: Tensor
    worth: Tensor
    outputs: int
    inputs: int

    def double(self) -> Tensor:
        """float64 [E, O, I], rows in the order of the blocks."""
        experts, tiles, steps, *_ = self.data.shape
        # [E, tile, step, block, half, g, q, group of 32, upper rows]; low halves have columns 4 q .. of the group, then 16 on
        word = self.data[..., :CODES].contiguous().view(torch.int32).unflatten(-1, (2, 8, 4, 2, 2))
        code = torch.stack(
            [
                torch.stack(
                    [
                        (word >> (16 * part + 4 * byte) & 7)
                        | (word >> (8 * byte + (3 if part else 7)) & 1) << 3
                        for byte in range(4)
                    ],
                    dim=-1,
                )
                for part in range(2)
            ],
            dim=-2,
        )  # [E, tile, step, block, half, g, q, group, upper, part, byte]
        code = code.permute(0, 1, 3, 8, 5, 2, 4, 7, 9, 6, 10).reshape(experts, tiles * TILE, steps * TILE)
        far = (
            self.data[..., CODES:].unflatten(-1, (8, 2, 2, 2)).int()
        )  # [E, tile, step, block, g, half, group, upper]
        far = far.permute(0, 1, 3, 7, 4, 2, 5, 6).reshape(experts, tiles * TILE, steps * 4)
        scale = torch.exp2(6.0 - far).repeat_interleave(32, -1)
        value = (e2m1.decode(e2m1.pack(code.to(torch.uint8))) * scale).double() * self.worth.flatten(
            1
        ).unsqueeze(-1)
        return value[:, : self.outputs, : self.inputs]


class PreparedExperts(NamedTuple):
    """Gate and up in turns of eight rows, and down."""

    gate_up_weight: Weight
    down_weight: Weight

    @property
    def gate_up(self) -> Tensor:
        """float64 [E, 2F, D], the gate before up, for the reference."""
        return cuda.apart(self.gate_up_weight.double())

    @property
    def down(self) -> Tensor:
        """float64 [E, D, F], for the reference."""
        return self.down_weight.double()


def prepare_experts(
    w1: QuantTensor, w3: QuantTensor, w2: QuantTensor
) -> PreparedExperts | cuda.PreparedExperts:
    """See ``Moe.prepare_experts``."""
    if min(w1.shape[1:]) < NARROWEST:
        return cuda.prepare_experts(w1, w3, w2)
    assert w1.shape[0] <= cuda.MOST_EXPERTS
    return PreparedExperts(_arranged(w1, w3), _arranged(w2, None))


def experts(
    quantised: Any, prepared: Any, *, experts_TK: Tensor, weights_TK: Tensor, shared_TD: Tensor, limit: float
) -> Tensor:
    """See ``Moe.experts``."""
    if not isinstance(prepared, PreparedExperts):
        return cuda.experts(
            quantised,
            prepared,
            experts_TK=experts_TK,
            weights_TK=weights_TK,
            shared_TD=shared_TD,
            limit=limit,
        )
    x_TD = quantised.bfloat16().contiguous()  # exact, also of the reference's float64
    (rows, count), width, device = experts_TK.shape, x_TD.shape[1], x_TD.device
    out_TD = torch.empty(rows, width, dtype=torch.bfloat16, device=device)
    if not rows:
        return out_TD
    gate_up, down = prepared
    pairs, total = rows * count, gate_up.data.shape[0]
    block_t = rows_of_item(pairs=pairs, experts=total)
    bound = (pairs + min(pairs, total) * (block_t - 1)) // block_t
    order_P = torch.empty(pairs, dtype=torch.int32, device=device)
    items_B4 = torch.empty(bound, 4, dtype=torch.int32, device=device)
    plan = order_P, items_B4, torch.empty(1, dtype=torch.int32, device=device)
    x_tiles, inner_tiles = (
        torch.empty(bound, weight.data.shape[2], block_t * SCALED_ROW, dtype=torch.uint8, device=device)
        for weight in prepared
    )
    y_PD = torch.empty(pairs, width, dtype=torch.bfloat16, device=device)
    experts_TK, weights_TK = experts_TK.contiguous(), weights_TK.contiguous()
    launch, library, around = cuda.Launch(device), cuda_library(SOURCE), cuda_library(cuda.AROUND)
    planned = pairs > PLANNED_APART
    if planned:
        launch(around.moe_plan, experts_TK, *plan, pairs, total, block_t)
    steps = gate_up.data.shape[2]
    launch(
        library.moe_tiles, x_TD, x_tiles, experts_TK, *plan, int(planned), pairs, total, block_t, bound, width, steps, count
    )  # fmt: skip
    for weight, x, inner, out in ((gate_up, x_tiles, inner_tiles, None), (down, inner_tiles, None, y_PD)):
        _, tiles, steps, *_ = weight.data.shape
        shape = (block_t, steps, tiles, width, down.data.shape[2])
        launch(
            library.moe_product, x, weight.data, weight.worth, inner, out, weights_TK, *plan, *shape, float(limit),
            int(weight is down), bound, multiprocessors(device),
        )  # fmt: skip
    launch(around.moe_combine, y_PD, experts_TK, shared_TD.contiguous(), out_TD, rows, width, count)
    return out_TD


def rows_of_item(*, pairs: int, experts: int) -> int:
    """Rows of one expert that a block multiplies at once, by how many each would have on average: host arithmetic only."""
    return next(rows for mean, rows in ITEMS if pairs <= mean * experts)


def _arranged(weight: QuantTensor, up: QuantTensor | None) -> Weight:
    """Fragments of ``weight`` [E, O, I], or of it and ``up`` in turns of eight rows."""
    experts, rows, inputs = weight.shape
    assert inputs % 32 == 0 and rows % 8 == 0
    outputs, device = rows if up is None else 2 * rows, weight.data.device
    tiles, steps = -(-outputs // TILE), -(-inputs // TILE)
    data = torch.empty(experts, tiles, steps, TILE // 16, FRAGMENT, dtype=torch.uint8, device=device)
    most = torch.empty(experts, tiles, TILE, dtype=torch.uint8, device=device)
    worth = torch.empty(experts, tiles, TILE, dtype=torch.float32, device=device)
    sources = [
        getattr(part, of).contiguous() if part is not None else None
        for of in ("data", "scale")
        for part in (weight, up)
    ]
    arguments = (*sources, most, worth, data, experts, rows, inputs, tiles, steps)
    stream = ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)
    error = cuda_library(SOURCE).moe_fragments(*(c_argument(argument) for argument in arguments), stream)
    launched("moe_fragments", error)
    return Weight(data, worth, outputs, inputs)
