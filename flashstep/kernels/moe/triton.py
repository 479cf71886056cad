"""Router and grouped experts in Triton for Hopper: FP4 weights become bf16 in registers, exactly.

A layer of experts is four launches: ``_plan`` sorts the pairs (row, expert) by expert and cuts each expert's into blocks of
BLOCK_T, ``_gate_up`` and ``_down`` run over a grid that is an upper bound known on the host, ``_combine`` adds a row's outputs
in ascending expert order. Nothing waits for the device. Every sum is one chain over the inputs, so a row's result depends
neither on its neighbours nor on the size of the blocks.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashstep.quant import e2m1, e8m0, mxfp4
from flashstep.quant.tensor import QuantTensor

STEP = 128  # inputs of one step: four groups of 32, an int16 of codes for the i-th of each, and four scales in one int32
PARTS = STEP // mxfp4.GROUP
LARGEST_SCALE = 128  # E8M0 byte; a code's bits read as bf16 are 2^-126 of its value, and bf16 ends at 2^127
RAISED = 126
# where a code's sign and its three magnitude bits lie in the int16: three of four come to bf16's place by one shift
BITS = ((15, 8, 7, 6), (12, 5, 4, 3), (9, 2, 1, 0), (14, 13, 11, 10))
PROGRAMS = 132
STAGES = {16: 4, 32: 4, 64: 3, 128: 2}  # by block of rows: two programs or more fit a multiprocessor
SOFTMAX = "softmax"
GATE_CHUNK = 512  # inputs of one chain of router products
WIDTH_TOGETHER = 1024
PAIRS_TOGETHER = (256, 1024)  # of few pairs, of many

DECODE = tl.constexpr("""
{
    .reg .b32 a, b;
    and.b32 $0, $4, 0x81C081C0;
    shl.b32 a, $4, 3; and.b32 $1, a, 0x81C081C0;
    shl.b32 a, $4, 6; and.b32 $2, a, 0x81C081C0;
    shl.b32 a, $4, 1; and.b32 a, a, 0x80008000;
    shr.b32 b, $4, 5; and.b32 b, b, 0x01000100; or.b32 a, a, b;
    shr.b32 b, $4, 4; and.b32 b, b, 0x00C000C0; or.b32 $3, a, b;
}
""")


class Weight4(NamedTuple):
    """Codes int16 [E, I / 128, O, 32] (``BITS``) and scales int32 [E, I / 128, O]: four E8M0 bytes, each plus ``RAISED``."""

    data: Tensor
    scale: Tensor
    inputs: int

    def double(self) -> Tensor:
        """float64 [E, O, I]: what the reference multiplies with, so that the switch can force one op."""
        parts = []
        for places in BITS:
            code_ESOI = torch.zeros_like(self.data, dtype=torch.int32)
            for i, place in enumerate(places):
                code_ESOI |= ((self.data.int() >> place) & 1) << (3 - i)
            parts.append(code_ESOI.to(torch.uint8))
        code_EOI = torch.stack(parts, dim=3).transpose(1, 2).flatten(2)
        scale_ESOG = self.scale.unsqueeze(3).view(torch.uint8).int() - RAISED
        scale_EOG = scale_ESOG.clamp(min=0).to(torch.uint8).transpose(1, 2).flatten(2)
        return mxfp4.dequantise(e2m1.pack(code_EOI), scale_EOG)[..., : self.inputs].double()


class PreparedExperts(NamedTuple):
    """Gate, up and down of every expert."""

    gate: Weight4
    up: Weight4
    down_weight: Weight4

    @property
    def gate_up(self) -> Tensor:
        """float64 [E, 2F, D], for the reference."""
        return torch.cat((self.gate.double(), self.up.double()), dim=1)

    @property
    def down(self) -> Tensor:
        """float64 [E, D, F], for the reference."""
        return self.down_weight.double()


def prepare_gate(weight_ED: Tensor) -> Tensor:
    """See ``Moe.prepare_gate``: bf16 [E, D]."""
    return weight_ED.contiguous()


def prepare_experts(w1: QuantTensor, w3: QuantTensor, w2: QuantTensor) -> PreparedExperts:
    """See ``Moe.prepare_experts``: codes and scales as stored, moved so that a step of a tile lies together."""
    return PreparedExperts(_rearranged(w1), _rearranged(w3), _rearranged(w2))


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
    """See ``Moe.route``."""
    rows, width = x_TD.shape
    experts = gate.shape[0]
    experts_TK = torch.empty(rows, count, dtype=torch.int64, device=x_TD.device)
    weights_TK = torch.empty(rows, count, dtype=torch.float32, device=x_TD.device)
    if not rows:
        return experts_TK, weights_TK
    chunks = triton.cdiv(width, GATE_CHUNK)
    block_t = min(max(triton.next_power_of_2(rows), 16), 64)
    tiles = triton.cdiv(rows, block_t), triton.cdiv(experts, 64)
    apart = tiles[0] * tiles[1] < PROGRAMS
    logits_CTE = torch.empty(chunks if apart else 1, rows, experts, dtype=torch.float32, device=x_TD.device)
    x_TD = x_TD.contiguous()
    _gate_logits[(*tiles, chunks if apart else 1)](
        x_TD,
        gate,
        logits_CTE,
        rows,
        experts,
        width,
        chunks,
        CHUNK=GATE_CHUNK,
        BLOCK_E=64,
        BLOCK_T=block_t,
        BLOCK_D=64,
        EVEN=width % 64 == 0,
        APART=apart,
        num_warps=4,
    )
    _select[(rows,)](
        logits_CTE,
        bias_E,
        experts_TK,
        weights_TK,
        experts,
        rows,
        float(scale),
        float(temperature),
        CHUNKS=logits_CTE.shape[0],
        COUNT=count,
        BLOCK_E=triton.next_power_of_2(experts),
        SOFTMAX=scoring == SOFTMAX,
        num_warps=2,
    )
    return experts_TK, weights_TK


def swiglu(gate_up_TF: Tensor, *, limit: float) -> Tensor:
    """See ``Moe.swiglu``."""
    rows, inner = gate_up_TF.shape[0], gate_up_TF.shape[1] // 2
    out_TF = torch.empty(rows, inner, dtype=torch.bfloat16, device=gate_up_TF.device)
    if rows:
        _swiglu[(rows, triton.cdiv(inner, WIDTH_TOGETHER))](
            gate_up_TF.contiguous(), out_TF, inner, float(limit), WIDTH=WIDTH_TOGETHER, num_warps=4
        )
    return out_TF


def experts(
    quantised: Any, prepared: Any, *, experts_TK: Tensor, weights_TK: Tensor, shared_TD: Tensor, limit: float
) -> Tensor:
    """See ``Moe.experts``."""
    x_TD = quantised.bfloat16()  # exact, also of the reference's float64
    (rows, count), width = experts_TK.shape, x_TD.shape[1]
    inner = prepared.gate.data.shape[2]
    out_TD = torch.empty(rows, width, dtype=torch.bfloat16, device=x_TD.device)
    if not rows:
        return out_TD
    plan = _planned(experts_TK.contiguous(), experts=prepared.gate.data.shape[0])
    inner_PF = torch.empty(rows * count, inner, dtype=torch.bfloat16, device=x_TD.device)
    y_PD = torch.empty(rows * count, width, dtype=torch.bfloat16, device=x_TD.device)
    blocks = {
        "BLOCK_O": 64,
        "BLOCK_T": plan.block_t,
        "NATIVE": x_TD.is_cuda,
        "STAGES": STAGES[plan.block_t],
        "num_warps": 4,
    }
    _gate_up[(triton.cdiv(inner, 64), plan.bound)](
        x_TD,
        prepared.gate.data,
        prepared.gate.scale,
        prepared.up.data,
        prepared.up.scale,
        inner_PF,
        weights_TK.contiguous(),
        plan.order_P,
        plan.blocks_B3,
        plan.used,
        width,
        inner,
        float(limit),
        COUNT=count,
        EVEN=width % STEP == 0,
        **blocks,
    )
    _down[(triton.cdiv(width, 64), plan.bound)](
        inner_PF,
        prepared.down_weight.data,
        prepared.down_weight.scale,
        y_PD,
        plan.order_P,
        plan.blocks_B3,
        plan.used,
        inner,
        width,
        EVEN=inner % STEP == 0,
        **blocks,
    )
    _combine[(rows, triton.cdiv(width, WIDTH_TOGETHER))](
        y_PD, shared_TD.contiguous(), out_TD, width, COUNT=count, WIDTH=WIDTH_TOGETHER, num_warps=4
    )
    return out_TD


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """``order_P``: pairs sorted by expert. ``blocks_B3``: expert, first and end in that order; ``used`` of ``bound`` count."""

    order_P: Tensor
    blocks_B3: Tensor
    used: Tensor
    bound: int
    block_t: int


def _planned(experts_TK: Tensor, *, experts: int) -> Plan:
    pairs = experts_TK.numel()
    block_t = min(max(triton.next_power_of_2(triton.cdiv(pairs, experts)), 16), 128)
    # sum of ceil(n / block_t) over the at most min(pairs, experts) experts that have rows
    bound = (pairs + min(pairs, experts) * (block_t - 1)) // block_t
    device = experts_TK.device
    plan = Plan(
        order_P=torch.empty(pairs, dtype=torch.int32, device=device),
        blocks_B3=torch.empty(bound, 3, dtype=torch.int32, device=device),
        used=torch.empty(1, dtype=torch.int32, device=device),
        bound=bound,
        block_t=block_t,
    )
    _plan[(experts,)](
        experts_TK,
        plan.order_P,
        plan.blocks_B3,
        plan.used,
        pairs,
        BLOCK_T=block_t,
        BINS=max(triton.next_power_of_2(experts), 2),
        PAIRS=PAIRS_TOGETHER[pairs > 1024],
        num_warps=4,
    )
    return plan


def _rearranged(weight: QuantTensor) -> Weight4:
    """The codes of ``weight`` [E, O, I] in units of 64 inputs and steps of 128, padded with zeros; scales four a number."""
    _, outputs, inputs = weight.shape
    assert inputs % mxfp4.GROUP == 0
    largest = int(weight.scale.max())
    if largest > LARGEST_SCALE:
        raise ValueError(
            f"an expert's scale is E8M0 byte {largest}, and this kernel holds at most {LARGEST_SCALE} (2^1); "
            "use --kernels reference:moe.prepare_experts,moe.experts"
        )
    packed_EOB = torch.nn.functional.pad(weight.data, (0, -inputs % STEP // 2))
    data_ESOI = torch.zeros(
        packed_EOB.shape[0],
        packed_EOB.shape[2] * 2 // STEP,
        outputs,
        mxfp4.GROUP,
        dtype=torch.int16,
        device=packed_EOB.device,
    )
    for part, places in enumerate(BITS):
        part_EOSB = packed_EOB.unflatten(2, (-1, PARTS, mxfp4.GROUP // 2))[:, :, :, part]
        code_ESOI = e2m1.unpack(part_EOSB.transpose(1, 2)).to(torch.int16)
        for i, place in enumerate(places):
            data_ESOI |= ((code_ESOI >> (3 - i)) & 1) << place
    scale_EOG = e8m0.as_bytes(weight.scale) + RAISED
    scale_EOG = torch.nn.functional.pad(scale_EOG, (0, -scale_EOG.shape[2] % PARTS)).contiguous()
    return Weight4(data_ESOI, scale_EOG.view(torch.int32).transpose(1, 2).contiguous(), inputs)


@triton.jit
def _gate_logits(
    x_ptr,
    gate_ptr,
    logits_ptr,
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
):
    """fp32 logits of a tile of rows and experts: all chunks of the width added in order, or (APART) one chunk's sums."""
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
    logits_ET_ptr = logits_ptr + row_T[None, :] * experts + e_E[:, None]
    tl.store(logits_ET_ptr, total_ET, mask=(e_E < experts)[:, None] & (t_T < rows)[None, :])


@triton.jit
def _select(
    logits_ptr,
    bias_ptr,
    experts_ptr,
    weights_ptr,
    experts,
    rows,
    scale,
    temperature,
    CHUNKS: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK_E: tl.constexpr,
    SOFTMAX: tl.constexpr,
):
    """One row: its scores, the best COUNT of score + bias (lowest expert on ties), and their normalised weights."""
    row = tl.program_id(0).to(tl.int64)
    e_E = tl.arange(0, BLOCK_E)
    real_E = e_E < experts
    logit_E = tl.zeros((BLOCK_E,), tl.float32)
    for chunk in tl.static_range(CHUNKS):
        part_E = logits_ptr + (tl.full((), chunk, tl.int64) * rows + row) * experts + e_E
        logit_E += tl.load(part_E, mask=real_E, other=0.0)
    logit_E = tl.math.div_rn(logit_E, temperature)
    if SOFTMAX:
        logit_E = tl.where(real_E, logit_E, float("-inf"))
        score_E = tl.exp(logit_E - tl.max(logit_E, axis=0))
        score_E = tl.math.div_rn(score_E, tl.sum(score_E, axis=0))
    else:
        # softplus; log1p by its identity log(u) * (y / (u - 1)) with u = fl(1 + y), which corrects the rounding of u
        y_E = tl.exp(-tl.abs(logit_E))
        u_E = 1.0 + y_E
        difference_E = tl.where(u_E == 1.0, 1.0, u_E - 1.0)
        log1p_E = tl.where(u_E == 1.0, y_E, tl.log(u_E) * tl.math.div_rn(y_E, difference_E))
        score_E = tl.sqrt_rn(tl.maximum(logit_E, 0.0) + log1p_E)
    biased_E = score_E + tl.load(bias_ptr + e_E, mask=real_E, other=0.0)
    biased_E = tl.where(biased_E == biased_E, biased_E, float("-inf"))  # a NaN is never better
    left_E = real_E
    for _ in tl.static_range(COUNT):
        best = tl.max(tl.where(left_E, biased_E, float("-inf")), axis=0)
        winner = tl.min(tl.where(left_E & (biased_E == best), e_E, BLOCK_E), axis=0)
        left_E = left_E & (e_E != winner)
    chosen_E = real_E & (left_E == 0)
    total = tl.sum(tl.where(chosen_E, score_E, 0.0), axis=0) + 1e-20
    weight_E = tl.math.div_rn(score_E, total) * scale
    place_E = tl.cumsum(chosen_E.to(tl.int32), axis=0) - 1
    tl.store(experts_ptr + row * COUNT + place_E, e_E.to(tl.int64), mask=chosen_E)
    tl.store(weights_ptr + row * COUNT + place_E, weight_E, mask=chosen_E)


@triton.jit
def _gated(gate, up, limit):
    """fp32 silu(min(gate, limit)) * clamp(up): the gate is clamped from above only."""
    gate = tl.minimum(gate, limit)
    return tl.math.div_rn(gate, 1.0 + tl.exp(-gate)) * tl.minimum(tl.maximum(up, -limit), limit)


@triton.jit
def _swiglu(gate_up_ptr, out_ptr, inner, limit, WIDTH: tl.constexpr):
    """``WIDTH`` channels of one row."""
    row = tl.program_id(0).to(tl.int64)
    i_F = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    gate_F = tl.load(gate_up_ptr + row * 2 * inner + i_F, mask=i_F < inner, other=0.0).to(tl.float32)
    up_F = tl.load(gate_up_ptr + (row * 2 + 1) * inner + i_F, mask=i_F < inner, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * inner + i_F, _gated(gate_F, up_F, limit).to(tl.bfloat16), mask=i_F < inner)


@triton.jit
def _plan(
    experts_ptr,
    order_ptr,
    blocks_ptr,
    used_ptr,
    pairs,
    BLOCK_T: tl.constexpr,
    BINS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """One expert: its pairs' places in the order (ascending, behind those of lower experts), and its blocks."""
    expert = tl.program_id(0)
    bin_B = tl.arange(0, BINS)
    count_B = tl.zeros((BINS,), tl.int32)
    for start in range(0, pairs, PAIRS):
        pair_P = start + tl.arange(0, PAIRS)
        expert_P = tl.load(experts_ptr + pair_P, mask=pair_P < pairs, other=0).to(tl.int32)
        count_B += tl.histogram(expert_P, BINS, mask=pair_P < pairs)
    tiles_B = (count_B + (BLOCK_T - 1)) // BLOCK_T
    first = tl.sum(tl.where(bin_B < expert, count_B, 0), axis=0)
    end = first + tl.sum(tl.where(bin_B == expert, count_B, 0), axis=0)
    place = first
    for start in range(0, pairs, PAIRS):
        pair_P = start + tl.arange(0, PAIRS)
        expert_P = tl.load(experts_ptr + pair_P, mask=pair_P < pairs, other=-1).to(tl.int32)
        mine_P = expert_P == expert
        rank_P = tl.cumsum(mine_P.to(tl.int32), axis=0) - 1
        tl.store(order_ptr + place + rank_P, pair_P, mask=mine_P)
        place += tl.sum(mine_P.to(tl.int32), axis=0)
    block_ptr = blocks_ptr + 3 * tl.sum(tl.where(bin_B < expert, tiles_B, 0), axis=0)
    for start in range(first, end, BLOCK_T):
        tl.store(block_ptr, expert)
        tl.store(block_ptr + 1, start)
        tl.store(block_ptr + 2, tl.minimum(start + BLOCK_T, end))
        block_ptr += 3
    if expert == 0:
        tl.store(used_ptr, tl.sum(tiles_B, axis=0))


@triton.jit
def _decoded(code_OI, NATIVE: tl.constexpr):
    """The four bf16 tiles in int16 codes, times 2^-126: E2M1's bits where bf16 has its lowest exponents."""
    if NATIVE:
        # two codes a register
        w0, w1, w2, w3 = tl.inline_asm_elementwise(
            asm=DECODE,
            constraints="=&r,=&r,=&r,=&r,r",
            args=[code_OI],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        code_OI = code_OI.to(tl.int32)
        w0 = (code_OI & 0x81C0).to(tl.int16).to(tl.bfloat16, bitcast=True)
        w1 = ((code_OI << 3) & 0x81C0).to(tl.int16).to(tl.bfloat16, bitcast=True)
        w2 = ((code_OI << 6) & 0x81C0).to(tl.int16).to(tl.bfloat16, bitcast=True)
        w3 = ((code_OI << 1) & 0x8000) | ((code_OI >> 5) & 0x0100) | ((code_OI >> 4) & 0x00C0)
        w3 = w3.to(tl.int16).to(tl.bfloat16, bitcast=True)
    return w0, w1, w2, w3


@triton.jit
def _scale(scales_O, PART: tl.constexpr):
    """bf16 [O, 1]: byte PART of four raised E8M0 scales, that is times 2^126."""
    bits_O = (scales_O << 7) if PART == 0 else (scales_O >> (8 * PART - 7))
    return (bits_O & 0x7F80).to(tl.int16).to(tl.bfloat16, bitcast=True)[:, None]


@triton.jit
def _load_x(x_T_ptr, i_I, inputs, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(x_T_ptr[None, :] + i_I[:, None])
    return tl.load(x_T_ptr[None, :] + i_I[:, None], mask=(i_I < inputs)[:, None], other=0.0)


@triton.jit
def _gate_up(
    x_ptr,
    gate_ptr,
    gate_scale_ptr,
    up_ptr,
    up_scale_ptr,
    inner_ptr,
    weights_ptr,
    order_ptr,
    blocks_ptr,
    used_ptr,
    width,
    inner,
    limit,
    COUNT: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_T: tl.constexpr,
    NATIVE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One tile [BLOCK_T, BLOCK_O] of an expert's inner activations: gate and up, SwiGLU, routing weight, Q8; in sorted order."""
    if tl.program_id(1) >= tl.load(used_ptr):
        return
    block_ptr = blocks_ptr + tl.program_id(1) * 3
    expert, first, end = tl.load(block_ptr), tl.load(block_ptr + 1), tl.load(block_ptr + 2)
    o_O = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    place_T = first + tl.arange(0, BLOCK_T)
    pair_T = tl.load(order_ptr + tl.minimum(place_T, end - 1))
    x_T_ptr = x_ptr + (pair_T // COUNT).to(tl.int64) * width
    # an expert's steps: codes [step, output, 32], scales [step, output]
    step_O = expert.to(tl.int64) * tl.cdiv(width, 128) * inner + tl.minimum(o_O, inner - 1)
    i_I = tl.arange(0, 32)
    gate_OT = tl.zeros((BLOCK_O, BLOCK_T), tl.float32)
    up_OT = tl.zeros((BLOCK_O, BLOCK_T), tl.float32)
    for start in tl.range(0, width, 128, num_stages=STAGES):
        gate_scales_O = tl.load(gate_scale_ptr + step_O)
        up_scales_O = tl.load(up_scale_ptr + step_O)
        gates = _decoded(tl.load(gate_ptr + step_O[:, None] * 32 + i_I[None, :]), NATIVE)
        ups = _decoded(tl.load(up_ptr + step_O[:, None] * 32 + i_I[None, :]), NATIVE)
        for part in tl.static_range(4):
            x_IT = _load_x(x_T_ptr, start + part * 32 + i_I, width, EVEN)
            gate_OT = tl.dot(gates[part] * _scale(gate_scales_O, part), x_IT, gate_OT)
            up_OT = tl.dot(ups[part] * _scale(up_scales_O, part), x_IT, up_OT)
        step_O += inner

    gate_OT = gate_OT.to(tl.bfloat16).to(tl.float32)
    up_OT = up_OT.to(tl.bfloat16).to(tl.float32)
    weight_T = tl.load(weights_ptr + pair_T)
    h_OT = (_gated(gate_OT, up_OT, limit) * weight_T[None, :]).to(tl.bfloat16).to(tl.float32)
    inner_T_ptr = inner_ptr + place_T.to(tl.int64) * inner
    mask_OT = (o_O < inner)[:, None] & (place_T < end)[None, :]
    tl.store(inner_T_ptr[None, :] + o_O[:, None], _q8(h_OT, BLOCK_O, BLOCK_T), mask=mask_OT)


@triton.jit
def _q8(h_OT, BLOCK_O: tl.constexpr, BLOCK_T: tl.constexpr):
    """Q8 over groups of 32 of the first axis, as bf16 values (spec/model.md 0)."""
    h_GCT = tl.reshape(h_OT, (BLOCK_O // 32, 32, BLOCK_T))
    amax_GT = tl.max(tl.abs(h_GCT), axis=1)
    scaled_GT = tl.maximum(amax_GT, 1e-4) * (1.0 / 448.0)
    exponent_GT = ((scaled_GT.to(tl.int32, bitcast=True) + 0x7FFFFF) >> 23) & 0xFF
    scale_GT = (exponent_GT << 23).to(tl.float32, bitcast=True)
    inverse_GT = ((254 - exponent_GT) << 23).to(tl.float32, bitcast=True)  # exact: powers of two
    broken_GT = tl.max(tl.where(tl.abs(h_GCT) < float("inf"), 0, 1), axis=1)
    scale_GT = tl.where(broken_GT > 0, float("nan"), scale_GT)
    y_GCT = tl.minimum(tl.maximum(h_GCT * inverse_GT[:, None, :], -448.0), 448.0)
    y_GCT = y_GCT.to(tl.float8e4nv).to(tl.float32) * scale_GT[:, None, :]
    return tl.reshape(y_GCT, (BLOCK_O, BLOCK_T)).to(tl.bfloat16)


@triton.jit
def _down(
    inner_ptr,
    down_ptr,
    scale_ptr,
    y_ptr,
    order_ptr,
    blocks_ptr,
    used_ptr,
    inner,
    width,
    EVEN: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_T: tl.constexpr,
    NATIVE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One tile [BLOCK_T, BLOCK_O] of an expert's bf16 outputs, each stored at its pair (row, choice)."""
    if tl.program_id(1) >= tl.load(used_ptr):
        return
    block_ptr = blocks_ptr + tl.program_id(1) * 3
    expert, first, end = tl.load(block_ptr), tl.load(block_ptr + 1), tl.load(block_ptr + 2)
    o_O = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    place_T = first + tl.arange(0, BLOCK_T)
    x_T_ptr = inner_ptr + tl.minimum(place_T, end - 1).to(tl.int64) * inner
    step_O = expert.to(tl.int64) * tl.cdiv(inner, 128) * width + tl.minimum(o_O, width - 1)
    i_I = tl.arange(0, 32)
    y_OT = tl.zeros((BLOCK_O, BLOCK_T), tl.float32)
    for start in tl.range(0, inner, 128, num_stages=STAGES):
        scales_O = tl.load(scale_ptr + step_O)
        weights = _decoded(tl.load(down_ptr + step_O[:, None] * 32 + i_I[None, :]), NATIVE)
        for part in tl.static_range(4):
            x_IT = _load_x(x_T_ptr, start + part * 32 + i_I, inner, EVEN)
            y_OT = tl.dot(weights[part] * _scale(scales_O, part), x_IT, y_OT)
        step_O += width
    pair_T = tl.load(order_ptr + tl.minimum(place_T, end - 1)).to(tl.int64)
    mask_OT = (o_O < width)[:, None] & (place_T < end)[None, :]
    tl.store(y_ptr + pair_T[None, :] * width + o_O[:, None], y_OT.to(tl.bfloat16), mask=mask_OT)


@triton.jit
def _combine(y_ptr, shared_ptr, out_ptr, width, COUNT: tl.constexpr, WIDTH: tl.constexpr):
    """``WIDTH`` channels of one row: its experts' outputs in ascending order, then the shared one's, fp32, rounded once."""
    row = tl.program_id(0).to(tl.int64)
    d_D = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    total_D = tl.zeros((WIDTH,), tl.float32)
    for choice in tl.static_range(COUNT):
        y_D_ptr = y_ptr + (row * COUNT + choice) * width + d_D
        total_D += tl.load(y_D_ptr, mask=d_D < width, other=0.0).to(tl.float32)
    total_D += tl.load(shared_ptr + row * width + d_D, mask=d_D < width, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * width + d_D, total_D.to(tl.bfloat16), mask=d_D < width)


_BLOCKS = {"order_ptr": "*i32", "blocks_ptr": "*i32", "used_ptr": "*i32", "width": "i32", "inner": "i32"}
_GATE_UP = {
    **_BLOCKS,
    "x_ptr": "*bf16",
    "gate_ptr": "*i16",
    "gate_scale_ptr": "*i32",
    "up_ptr": "*i16",
    "up_scale_ptr": "*i32",
    "inner_ptr": "*bf16",
    "weights_ptr": "*fp32",
    "limit": "fp32",
}
_DOWN = {**_BLOCKS, "inner_ptr": "*bf16", "down_ptr": "*i16", "scale_ptr": "*i32", "y_ptr": "*bf16"}
_GATE = {"x_ptr": "*bf16", "gate_ptr": "*bf16", "logits_ptr": "*fp32"}
_SELECT = {"logits_ptr": "*fp32", "bias_ptr": "*fp32", "experts_ptr": "*i64", "weights_ptr": "*fp32"}
_SHAPES = tuple(
    {"EVEN": even, "BLOCK_O": 64, "BLOCK_T": block_t, "NATIVE": True, "STAGES": stages}
    for even, block_t, stages in ((True, 16, 4), (False, 16, 4), (True, 128, 2))
)
# (kernel, signature, constants) to compile ahead of time
AOT = (
    *(
        (
            _gate_logits,
            {**_GATE, **dict.fromkeys(("rows", "experts", "width", "chunks"), "i32")},
            {"CHUNK": GATE_CHUNK, "BLOCK_E": 64, "BLOCK_T": t, "BLOCK_D": 64, "EVEN": even, "APART": apart},
        )
        for t, even, apart in ((16, True, True), (64, True, False), (16, False, True))
    ),
    *(
        (
            _select,
            {**_SELECT, "experts": "i32", "rows": "i32", "scale": "fp32", "temperature": "fp32"},
            {"CHUNKS": chunks, "COUNT": count, "BLOCK_E": block_e, "SOFTMAX": softmax},
        )
        for chunks, count, block_e, softmax in ((10, 6, 512, False), (10, 3, 128, False), (5, 10, 512, True))
    ),
    (
        _swiglu,
        {"gate_up_ptr": "*bf16", "out_ptr": "*bf16", "inner": "i32", "limit": "fp32"},
        {"WIDTH": WIDTH_TOGETHER},
    ),
    *(
        (
            _plan,
            {"experts_ptr": "*i64", **_BLOCKS, "pairs": "i32"},
            {"BLOCK_T": 16, "BINS": 512, "PAIRS": pairs},
        )
        for pairs in PAIRS_TOGETHER
    ),
    *((_gate_up, _GATE_UP, {**shape, "COUNT": 6}) for shape in _SHAPES),
    *((_down, _DOWN, shape) for shape in _SHAPES),
    (
        _combine,
        {"y_ptr": "*bf16", "shared_ptr": "*bf16", "out_ptr": "*bf16", "width": "i32"},
        {"COUNT": 6, "WIDTH": WIDTH_TOGETHER},
    ),
)
