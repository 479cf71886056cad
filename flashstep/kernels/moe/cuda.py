"""Router and routed experts in CUDA C++ for Hopper: FP4 weights become bf16 in registers, exactly, and multiply sorted rows.

A layer of experts is three launches where there are few pairs (row, choice): gate and up with SwiGLU, routing weight and Q8;
down; the sum over a row's choices. Where there are many, one before them plans for both products. Nothing waits for the device.
Every output is one chain of the same sums over the inputs: a row's result depends neither on its neighbours nor on their number.
"""

import ctypes
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashstep.kernels.device import multiprocessors
from flashstep.kernels.jit import c_argument, cuda_library, launched, programmatic
from flashstep.kernels.moe.triton import GATE_CHUNK, gate_sums
from flashstep.quant import e2m1, mxfp4
from flashstep.quant.tensor import QuantTensor

ROUTER, FEW_ROWS, MANY_ROWS, AROUND = (
    Path(__file__).with_name(f"{name}.cu") for name in ("router", "few_rows", "many_rows", "around")
)
ROUTED_TOGETHER = 64  # rows that one launch takes from hidden state to experts
ROUTED_EXPERTS = 32  # experts of a block of that launch
FEW_ROUTED, FEW_CHUNKS = (
    8,
    32,
)  # rows of that launch whose logits are waited for one by one, and chunks of a cluster
SOFTMAX = "softmax"
BLOCK, STEP = 16, 64  # outputs and inputs of a fragment
TOGETHER = 8  # blocks whose fragments of one step lie together: a tile
CODES, FRAGMENT = 512, 544  # bytes: of a fragment's codes, of the fragment with its scales
LARGEST_SCALE = 128  # E8M0 byte; a code's bits read as bf16 are 2^-126 of its value, and bf16 ends at 2^127
RAISED = 126
MOST_EXPERTS = 1024
# (mean rows of an expert, rows that a block multiplies at once): most experts' rows then fill their items well; few_rows.cu has
# those up to MOST_FEW
ITEMS = ((4, 8), (16, 16), (28, 32), (48, 64), (86, 112), (104, 128), (192, 112), (float("inf"), 128))
MOST_FEW = 32
PLANNED_APART = 1024  # pairs from which on a launch of its own plans for both products
# where a code's sign and its three magnitude bits lie in 16 bits, by its place in the fragment
BITS = ((15, 8, 7, 6), (12, 5, 4, 3), (9, 2, 1, 0), (14, 13, 11, 10))


class Weight4(NamedTuple):
    """Fragments uint8 [E, O / 128, I / 64, 8, 544] of a weight [E, O, I], zeros where it ends inside a tile.

    A fragment is 32 lanes of four words of eight codes (``BITS``), then 8 words of four E8M0 bytes, each plus ``RAISED``.
    """

    data: Tensor
    outputs: int
    inputs: int

    def double(self) -> Tensor:
        """float64 [E, O, I], rows in the order of the blocks."""
        experts, tiles, steps = self.data.shape[:3]
        blocks = tiles * TOGETHER
        fragment = self.data.transpose(2, 3).reshape(experts, blocks, steps, FRAGMENT)
        # word [E, B, S, g, q, j]: element e, half h -> row g + 8 (e & 1), column 16 j + 2 q + 8 (e >> 1) + h
        word = fragment[..., :CODES].contiguous().view(torch.int32).view(experts, blocks, steps, 8, 4, 4)
        code = torch.zeros(experts, blocks, 2, 8, steps, 4, 2, 4, 2, dtype=torch.uint8, device=word.device)
        for e, places in enumerate(BITS):
            for half in range(2):
                nibble = torch.zeros_like(word, dtype=torch.uint8)
                for i, place in enumerate(places):
                    nibble |= (((word >> (place + 16 * half)) & 1) << (3 - i)).to(torch.uint8)
                code[:, :, e & 1, :, :, :, e >> 1, :, half] = nibble.permute(0, 1, 3, 2, 5, 4)
        code_EOI = code.reshape(experts, blocks * BLOCK, steps * STEP)
        scale = fragment[..., CODES:].reshape(experts, blocks, steps, 8, 2, 2).permute(0, 1, 5, 3, 2, 4)
        scale_EOG = (scale.int() - RAISED).clamp(min=0).to(torch.uint8).reshape(experts, blocks * BLOCK, -1)
        return mxfp4.dequantise(e2m1.pack(code_EOI), scale_EOG)[:, : self.outputs, : self.inputs].double()


class PreparedGate(NamedTuple):
    """bf16 [E, D], columns padded to eight, and by what the router's blocks meet (one launch at a time).

    ``arrived`` are two counters; ``logits_TE`` are those of up to ``FEW_ROUTED`` rows, int32 -1 between launches.
    """

    weight: Tensor
    arrived: Tensor
    logits_TE: Tensor
    width: int

    def double(self) -> Tensor:
        """float64 [E, D], for the reference."""
        return self.weight[:, : self.width].double()


class PreparedExperts(NamedTuple):
    """Gate and up in turns of eight rows, and down."""

    gate_up_weight: Weight4
    down_weight: Weight4

    @property
    def gate_up(self) -> Tensor:
        """float64 [E, 2F, D], the gate before up, for the reference."""
        return apart(self.gate_up_weight.double())

    @property
    def down(self) -> Tensor:
        """float64 [E, D, F], for the reference."""
        return self.down_weight.double()


def apart(weight_EOI: Tensor) -> Tensor:
    """[E, 2F, D], gate and up in turns of eight rows, with the gate before up."""
    turns = weight_EOI.unflatten(1, (-1, 2, 8))
    return torch.cat((turns[:, :, 0].flatten(1, 2), turns[:, :, 1].flatten(1, 2)), dim=1)


def prepare_gate(weight_ED: Tensor) -> PreparedGate:
    """See ``Moe.prepare_gate``."""
    width = weight_ED.shape[1]
    padded = torch.nn.functional.pad(weight_ED, (0, -width % 8)).contiguous()
    device = weight_ED.device
    logits_TE = torch.full((FEW_ROUTED, padded.shape[0]), -1, dtype=torch.int32, device=device)
    return PreparedGate(padded, torch.zeros(2, dtype=torch.int32, device=device), logits_TE, width)


def route(
    x_TD: Tensor,
    gate: Any,
    *,
    bias_E: Tensor,
    count: int,
    scale: float,
    temperature: float,
    scoring: str,
) -> tuple[Tensor, Tensor]:
    """See ``Moe.route``: one launch for up to ``ROUTED_TOGETHER`` rows, products and selection apart for more."""
    rows, experts, device = x_TD.shape[0], gate.weight.shape[0], x_TD.device
    experts_TK = torch.empty(rows, count, dtype=torch.int64, device=device)
    weights_TK = torch.empty(rows, count, dtype=torch.float32, device=device)
    if not rows:
        return experts_TK, weights_TK
    width = gate.weight.shape[1]
    if width != gate.width:
        x_TD = torch.nn.functional.pad(x_TD, (0, width - gate.width))
    x_TD = x_TD.contiguous()
    library = cuda_library(ROUTER)
    launch = Launch(device)
    last = (experts, count, float(scale), float(temperature), int(scoring == SOFTMAX))
    chunks = -(-width // GATE_CHUNK)
    if rows <= ROUTED_TOGETHER and chunks * -(-experts // ROUTED_EXPERTS) <= 3 * multiprocessors(device):
        few = rows <= FEW_ROUTED and chunks <= FEW_CHUNKS
        sums_CTE = (
            gate.logits_TE if few else torch.empty(chunks, rows, experts, dtype=torch.float32, device=device)
        )
        out = (experts_TK, weights_TK, rows, width)
        launch(library.moe_route, x_TD, gate.weight, bias_E, sums_CTE, gate.arrived, *out, *last)
        return experts_TK, weights_TK
    sums_CTE = gate_sums(x_TD, gate.weight)
    launch(library.moe_select, sums_CTE, bias_E, experts_TK, weights_TK, sums_CTE.shape[0], rows, *last)
    return experts_TK, weights_TK


def prepare_experts(w1: QuantTensor, w3: QuantTensor, w2: QuantTensor) -> PreparedExperts:
    """See ``Moe.prepare_experts``: codes and scales as stored, moved into the order of the fragments."""
    assert w1.shape[0] <= MOST_EXPERTS
    return PreparedExperts(_arranged(w1, w3), _arranged(w2, None))


def swiglu(gate_up_TF: Tensor, *, limit: float) -> Tensor:
    """See ``Moe.swiglu``: the quantised values, which bf16 holds exactly."""
    rows, inner = gate_up_TF.shape[0], gate_up_TF.shape[1] // 2
    out_TF = torch.empty(rows, inner, dtype=torch.bfloat16, device=gate_up_TF.device)
    if rows:
        launch = Launch(gate_up_TF.device)
        launch(cuda_library(AROUND).moe_swiglu, gate_up_TF.contiguous(), out_TF, rows, inner, float(limit))
    return out_TF


def experts(
    quantised: Any, prepared: Any, *, experts_TK: Tensor, weights_TK: Tensor, shared_TD: Tensor, limit: float
) -> Tensor:
    """See ``Moe.experts``."""
    x_TD = quantised.bfloat16().contiguous()  # exact, also of the reference's float64
    shared_TD = shared_TD.contiguous()
    (rows, count), width = experts_TK.shape, x_TD.shape[1]
    out_TD = torch.empty(rows, width, dtype=torch.bfloat16, device=x_TD.device)
    if not rows:
        return out_TD
    gate_up, down = prepared.gate_up_weight, prepared.down_weight
    pairs, total = rows * count, gate_up.data.shape[0]
    block_t = rows_of_item(pairs=pairs, experts=total)
    bound = (pairs + min(pairs, total) * (block_t - 1)) // block_t
    inner_PF = torch.empty(pairs, down.inputs, dtype=torch.bfloat16, device=x_TD.device)
    y_PD = torch.empty(pairs, width, dtype=torch.bfloat16, device=x_TD.device)
    experts_TK, weights_TK = experts_TK.contiguous(), weights_TK.contiguous()
    launch = Launch(x_TD.device)
    plan: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None)
    many = block_t > MOST_FEW
    if many or pairs > PLANNED_APART:
        order_P = torch.empty(pairs, dtype=torch.int32, device=x_TD.device)
        items_B4 = torch.empty(bound, 4, dtype=torch.int32, device=x_TD.device)
        plan = order_P, items_B4, torch.empty(1, dtype=torch.int32, device=x_TD.device)
        launch(cuda_library(AROUND).moe_plan, experts_TK, *plan, pairs, total, block_t)
    product = cuda_library(MANY_ROWS).moe_many if many else cuda_library(FEW_ROWS).moe_few
    for weight, x, out in ((gate_up, x_TD, inner_PF), (down, inner_PF, y_PD)):
        _, tiles, steps, *_ = weight.data.shape
        shape = (weight.inputs, steps, tiles, out.shape[1], count)
        choices = (experts_TK, pairs, total, block_t)
        launch(
            product,
            x,
            weight.data,
            out,
            weights_TK,
            *plan,
            *choices,
            *shape,
            float(limit),
            int(out is y_PD),
            bound,
            multiprocessors(x.device),
        )
    launch(cuda_library(AROUND).moe_combine, y_PD, experts_TK, shared_TD, out_TD, rows, width, count)
    return out_TD


def rows_of_item(*, pairs: int, experts: int) -> int:
    """Rows of one expert that a block multiplies at once, by how many each would have on average: host arithmetic only."""
    return next((rows for mean, rows in ITEMS if pairs <= mean * experts), ITEMS[-1][1])


class Launch:
    """Calls of the library's launchers: tensors by address, floats as such, the stream and the attribute last."""

    def __init__(self, device: torch.device) -> None:
        stream = torch.cuda.current_stream(device).cuda_stream
        self._tail = (ctypes.c_void_p(stream), ctypes.c_int(int(programmatic(device))))

    def __call__(self, function: Any, *arguments: Tensor | int | float | None) -> None:
        error = function(*(c_argument(argument) for argument in arguments), *self._tail)
        launched(function.__name__, error)


def _arranged(weight: QuantTensor, up: QuantTensor | None) -> Weight4:
    """Fragments of ``weight`` [E, O, I], or of it and ``up`` in turns of eight rows."""
    experts, rows, inputs = weight.shape
    assert inputs % mxfp4.GROUP == 0 and rows % 8 == 0
    for part in (weight, up):
        largest = int(part.scale.max()) if part is not None else 0
        if largest > LARGEST_SCALE:
            raise ValueError(
                f"an expert's scale is E8M0 byte {largest}, and this kernel holds at most {LARGEST_SCALE} (2^1); "
                "use --kernels reference:moe.prepare_experts,moe.experts"
            )
    outputs = rows if up is None else 2 * rows
    tiles, steps = -(-outputs // (BLOCK * TOGETHER)), -(-inputs // STEP)
    device = weight.data.device
    data = torch.empty(experts, tiles, steps, TOGETHER, FRAGMENT, dtype=torch.uint8, device=device)
    sources = [
        getattr(part, of).contiguous() if part is not None else None
        for of in ("data", "scale")
        for part in (weight, up)
    ]
    arguments = (*sources, data, experts, rows, inputs, tiles, steps)
    stream = ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)
    error = cuda_library(AROUND).moe_arrange(*(c_argument(argument) for argument in arguments), stream)
    launched("moe_arrange", error)
    return Weight4(data, outputs, inputs)
