"""DeepSeek-V4.1's text backbone as one differentiable forward, from spec/model.md alone.

Takes a ModelConfig, dequantised weights under their released names and token ids [B, T] (optionally several packed
documents a row); gives logits and, on request, every intermediate. No cache, no paging, no serving code.

Legend of suffixes: B batch, T rows computed (queries), R all rows of ``ids`` (absolute), N key rows, S streams, D width,
H heads, C head channels, J compressed entries, I index heads, K index channels, E experts, F expert width, V vocabulary.

WHERE VALUES ARE ROUNDED. ``b`` is the cast to ``Numerics.values`` (bf16 in N1 and N2, fp32 in N0), ``f`` the cast to fp32.
Each numbered op below starts from the rounded values of earlier ops, computes entirely in ``Numerics.accumulate`` and
rounds once, at its end (casts from fp64 are torch's own ``.to``):
 1. rms(x; w)          b(w * x * rsqrt(mean(x^2) + eps))
 2. linear             b(x . W^T); LIN8 and LIN4 in N2 first x := Q8(x); LINF and head: f(x . W^T)
 3. mHC coefficients   f(pre), f(post), f(K), Sinkhorn inside; collapse: b(sum a X); write: b(post y + sum K X)
 4. RoPE               w_i in fp64, rounded to fp32; angle = f(position) * w_i in fp32; cos and sin of that angle in fp64,
                       rounded to fp32; the two-multiply rotation, then b
 5. compressor r = 2   f(v), f(s), then b(v0 sigma(s0 - s1) + v1 sigma(s1 - s0)), then rms; r = 1: b(linear), then rms
 6. index scores       w = b(linear x); f( K^-1/2 I^-1/2 * sum_h w_h relu(<iq_h, ki>) ); ties: lowest position wins
 7. attention          l = <q, key> * C^-1/2; m = max over window and selected (not the sink); p = exp(l - m);
                       o = b( sum_n b(p_n) key_n / (sum_n p_n + exp(sink - m)) ): one pass, global max, unrounded
                       denominator; then inverse rotation (op 4)
 8. router             f( sqrt(softplus(x . W^T / temp)) ); selection by f(score + bias), lowest id wins ties;
                       g = f( 1.5 s / (sum s + 1e-20) )
 9. expert             b(silu(min(w1 x, lim)) * clamp(w3 x, +-lim) [* g]) between op 2 on both sides;
                       y = b(sum_e y_e + y_shared)
10. Engram             b(X + gate * v): dot, both statistics and the gate unrounded inside the op
The quantisers Q8 (window k), QN4 (entries), QM4 (index keys and queries) act after ``b`` and are straight-through.
"""

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from flashstep.config.model import LayerSpec, ModelConfig
from flashstep.quant import mxfp4, mxfp8, nvfp4

Weights = Mapping[str, Tensor]
Trace = dict[str, Any]

# ---- how to compute -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """How numbers are kept (spec/model.md section 0).

    ``values`` is what ``b`` rounds to; ``quantise_cache`` applies Q8/QN4/QM4 to window, entries and index;
    ``quantise_inputs`` applies Q8 to the inputs of LIN8 and LIN4. ``accumulate`` is the dtype of every contraction and
    statistic; None means the operands' own (bf16 products, fp32 statistics: training on a GPU). ``released_scores``
    emulates the reference's bf16 index scores.
    """

    values: torch.dtype
    quantise_cache: bool
    quantise_inputs: bool
    accumulate: torch.dtype | None = torch.float64
    released_scores: bool = False

    @property
    def wide(self) -> torch.dtype:
        return self.accumulate or torch.float32


N0 = Numerics(values=torch.float32, quantise_cache=False, quantise_inputs=False)
N1 = Numerics(values=torch.bfloat16, quantise_cache=True, quantise_inputs=False)
N2 = Numerics(values=torch.bfloat16, quantise_cache=True, quantise_inputs=True)
TIERS = {"n0": N0, "n1": N1, "n2": N2}


class _StraightThrough(torch.autograd.Function):
    """Forward: the second argument, exactly; backward: the gradient goes to the first one unchanged."""

    @staticmethod
    def forward(ctx: object, x: Tensor, rounded: Tensor) -> Tensor:
        return rounded

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def straight_through(x: Tensor, quantise_dequantise: Callable[[Tensor], Tensor]) -> Tensor:
    """``quantise_dequantise(x)`` bit for bit, with the gradient of the identity."""
    return _StraightThrough.apply(x, quantise_dequantise(x.detach()))


def q8(x: Tensor) -> Tensor:
    """Q8 over groups of 32 channels (window k, inputs of LIN8 and LIN4); shape and dtype of ``x``."""
    return straight_through(x, mxfp8.quantise_dequantise)


def qn4(x: Tensor) -> Tensor:
    """QN4 over groups of 16 channels (compressed entries); shape and dtype of ``x``."""
    return straight_through(x, nvfp4.quantise_dequantise)


def qm4(x: Tensor) -> Tensor:
    """QM4 over groups of 32 channels (index keys and queries); shape and dtype of ``x``."""
    return straight_through(x, mxfp4.quantise_dequantise)


# ---- primitive operators --------------------------------------------------------------------------------------------


def contract(x: Tensor, weight: Tensor, numerics: Numerics, out: torch.dtype) -> Tensor:
    """x [..., in] . weight [out, in]^T (or weight [G, out, in] with x [..., G, in]), rounded once to ``out``."""
    dtype = numerics.accumulate or (torch.float32 if out == torch.float32 else numerics.values)
    x, weight = x.to(dtype), weight.to(dtype)
    if weight.dim() == 3:
        return torch.einsum("...gi,goi->...go", x, weight).to(out)
    return F.linear(x, weight).to(out)


def rms_norm(x: Tensor, weight: Tensor, eps: float, numerics: Numerics) -> Tensor:
    """b(w * x / rms(x)) over the last dimension; the weight multiplies before the cast."""
    u = x.to(numerics.wide)
    u = u * torch.rsqrt(u.square().mean(-1, keepdim=True) + eps)
    return (weight.to(numerics.wide) * u).to(numerics.values)


def rope_frequencies(config: ModelConfig, *, compressed: bool) -> Tensor:
    """fp32 [rope / 2] angular frequencies: main RoPE, or the compressed layers' base with YaRN blending (3.2)."""
    dim = config.qk_rope_head_dim
    pair = torch.arange(dim // 2, dtype=torch.float64)
    base = config.compress_rope_theta if compressed else config.rope_theta
    frequency = base ** (-2 * pair / dim)
    if compressed:
        yarn = config.rope_scaling

        def edge(rotations: float) -> float:
            span = yarn.original_max_position_embeddings / (2 * math.pi * rotations)
            return dim * math.log(span) / (2 * math.log(base))

        low = max(math.floor(edge(yarn.beta_fast)), 0)
        high = min(math.ceil(edge(yarn.beta_slow)), dim - 1)
        ramp = ((pair - low) / max(high - low, 1e-3)).clamp(0, 1)
        frequency = frequency / yarn.factor * ramp + frequency * (1 - ramp)
    return frequency.float()


def rope_table(frequencies: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 cos and sin [..., rope / 2] at int positions [...]; the angle is an fp32 product."""
    angle = (positions.float().unsqueeze(-1) * frequencies.to(positions.device)).double()
    return angle.cos().float(), angle.sin().float()


def rotate(x: Tensor, table: tuple[Tensor, Tensor], numerics: Numerics) -> Tensor:
    """Rotate adjacent pairs of the LAST channels of ``x`` [..., C]; cos and sin [..., rope / 2] broadcast; b at the end."""
    cos, sin = table
    rope = 2 * cos.shape[-1]
    kept, tail = x.split((x.shape[-1] - rope, rope), -1)
    even, odd = tail.to(numerics.wide).unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
    return torch.cat((kept, turned.to(x.dtype)), -1)


def inverse(table: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The table of the negative angle."""
    return table[0], -table[1]


# ---- manifold hyper-connections (section 2) -------------------------------------------------------------------------


def sinkhorn(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """Doubly stochastic [..., in, out] of ``logits``: softmax over out and a column step, then (row, column) pairs."""
    mix = logits.softmax(-1) + eps
    mix = mix / (mix.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        mix = mix / (mix.sum(-1, keepdim=True) + eps)
        mix = mix / (mix.sum(-2, keepdim=True) + eps)
    return mix


def hc_coefficients(
    streams_BTSD: Tensor, fn: Tensor, base: Tensor, scale: Tensor, config: ModelConfig, numerics: Numerics
) -> tuple[Tensor, Tensor, Tensor]:
    """fp32 pre [..., S], post [..., S] and mix K [..., S in, S out] of one site."""
    s = config.hc_mult
    z = streams_BTSD.flatten(-2).to(numerics.wide)
    m = F.linear(z, fn.to(z.dtype)) * torch.rsqrt(z.square().mean(-1, keepdim=True) + config.rms_norm_eps)
    pre, post, mix = m.split((s, s, s * s), -1)
    base_pre, base_post, base_mix = base.to(z.dtype).split((s, s, s * s))
    scale = scale.to(z.dtype)
    pre = torch.sigmoid(base_pre + pre * scale[0]) + config.hc_eps
    post = 2 * torch.sigmoid(base_post + post * scale[1])
    logits = (base_mix + mix * scale[2]).unflatten(-1, (s, s))
    return pre.float(), post.float(), sinkhorn(logits, config.hc_sinkhorn_iters, config.hc_eps).float()


def collapse(streams_BTSD: Tensor, read_BTS: Tensor, numerics: Numerics) -> Tensor:
    """b(sum_j a_j X_j): [B, T, D]."""
    return (read_BTS.unsqueeze(-1).to(numerics.wide) * streams_BTSD).sum(-2).to(numerics.values)


def write_streams(
    y_BTD: Tensor, streams_BTSD: Tensor, post_BTS: Tensor, mix_BTSS: Tensor, numerics: Numerics
) -> Tensor:
    """X'_j = b(post_j y + sum_i K[i, j] X_i): the sum runs over the FIRST index of K."""
    wide = numerics.wide
    kept = mix_BTSS.to(wide).mT @ streams_BTSD.to(wide)
    return (post_BTS.unsqueeze(-1).to(wide) * y_BTD.unsqueeze(-2) + kept).to(numerics.values)


# ---- compressor, indexer, selection (3.4, 4) ------------------------------------------------------------------------


def compress_pairs(v: Tensor, s: Tensor, numerics: Numerics) -> Tensor:
    """b of the channelwise softmax pool over two tokens: v, s fp32 [B, 2 J, C] -> [B, J, C]."""
    v0, v1 = v.to(numerics.wide).unflatten(1, (-1, 2)).unbind(2)
    s0, s1 = s.to(numerics.wide).unflatten(1, (-1, 2)).unbind(2)
    return (v0 * torch.sigmoid(s0 - s1) + v1 * torch.sigmoid(s1 - s0)).to(numerics.values)


def index_scores(query_BTIK: Tensor, weight_BTI: Tensor, keys_BJK: Tensor, numerics: Numerics) -> Tensor:
    """fp32 [B, T, J]: sum over index heads of w * relu(<query, key>), scaled (unmasked)."""
    heads, channels = query_BTIK.shape[-2:]
    scale = channels**-0.5 * heads**-0.5
    dtype = numerics.accumulate or numerics.values
    weight = weight_BTI.to(numerics.wide) * scale
    if numerics.released_scores:
        weight = weight.bfloat16().to(numerics.wide)
    total = torch.zeros((), dtype=numerics.wide, device=keys_BJK.device)
    for head in range(heads):  # one head at a time: [B, T, I, J] would be the largest tensor of the model
        dot = (query_BTIK[:, :, head].to(dtype) @ keys_BJK.to(dtype).mT).to(numerics.wide)
        if numerics.released_scores:
            dot = dot.bfloat16().to(numerics.wide)
        term = weight[:, :, head, None] * dot.relu()
        total = total + (term.bfloat16() if numerics.released_scores else term)
    return total.bfloat16().float() if numerics.released_scores else total.float()


def select_topk(scores: Tensor, k: int) -> Tensor:
    """bool mask of the ``k`` largest of the last dimension; -inf is never taken; equal scores: lowest index first."""
    if k >= scores.shape[-1]:
        return scores > -math.inf
    threshold = scores.topk(k, dim=-1).values[..., -1:]
    above = scores > threshold
    ties = scores == threshold
    room = k - above.sum(-1, keepdim=True)
    return (above | (ties & (ties.cumsum(-1) <= room))) & (scores > -math.inf)


def candidate_mask(masked_scores_BTJ: Tensor, newest_T: Tensor, config: ModelConfig) -> Tensor:
    """bool [B, T, J]: entries in the best blocks; the block of entry ``newest_T`` (-1: none visible) is forced in."""
    size = config.candidate_block_size
    j = masked_scores_BTJ.shape[-1]
    blocks = F.pad(masked_scores_BTJ, (0, -j % size), value=-math.inf).unflatten(-1, (-1, size)).amax(-1)
    forced = torch.arange(blocks.shape[-1], device=blocks.device) == (newest_T // size).unsqueeze(-1)
    visible = blocks > -math.inf  # packed documents: the newest entry by row may belong to nobody
    blocks = torch.where(forced & visible, math.inf, blocks)
    return select_topk(blocks, config.candidate_topk_blocks).repeat_interleave(size, -1)[..., :j]


# ---- attention (3.3, 3.6) -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """One layer's attention, masks not yet materialised, so that training may use a fused kernel.

    ``rows_T`` and ``key_rows_N`` are absolute rows; a query sees key row n if the documents are equal and
    0 <= row - n < window. ``selected_BTJ`` already holds visibility (None without entries). Keys are the values.
    """

    layer: LayerSpec
    q_BTHC: Tensor
    window_k_BNC: Tensor
    entries_BJC: Tensor | None
    selected_BTJ: Tensor | None
    sink_H: Tensor
    rows_T: Tensor
    key_rows_N: Tensor
    documents_BR: Tensor
    window: int
    dense: bool
    numerics: Numerics


def window_mask(call: AttentionCall, rows_T: Tensor) -> Tensor:
    """bool [B, T, N]: which key rows the given query rows see through the window."""
    distance = rows_T[:, None] - call.key_rows_N[None, :]
    near = (distance >= 0) & (distance < call.window)
    # rows dropped by a bounded replay end the window: nothing behind a gap is seen (section 9)
    keys_N = torch.arange(len(call.key_rows_N), device=rows_T.device)
    near = near & (torch.searchsorted(call.key_rows_N, rows_T)[:, None] - keys_N == distance)
    documents = call.documents_BR
    return near & (documents[:, rows_T, None] == documents[:, None, call.key_rows_N])


def attend(call: AttentionCall, *, rows_a_time: int = 256) -> Tensor:
    """Attention output [B, T, H, C] before the inverse rotation: op 7 of this module's docstring."""
    pieces = []
    for start in range(0, call.q_BTHC.shape[1], rows_a_time):
        part = slice(start, start + rows_a_time)
        probability_BHTM, denominator_BHT1, keys_BMC = _probabilities(call, part)
        rounded = probability_BHTM.to(call.numerics.values).to(keys_BMC.dtype)
        mixed = (rounded @ keys_BMC.unsqueeze(1)) / denominator_BHT1
        pieces.append(mixed.to(call.numerics.values).transpose(1, 2))
    return torch.cat(pieces, 1)


def attention_mass(call: AttentionCall, rows: slice) -> Tensor:
    """fp32 [B, T, J]: share of the whole softmax on each entry, summed over heads, for a slice of the query rows.

    What the indexer is trained to predict. Take a call with ``dense`` for the target over all visible entries.
    """
    assert call.entries_BJC is not None, f"layer {call.layer.index} reads no entries"
    probability, denominator, _ = _probabilities(call, rows)
    share = probability[..., call.window_k_BNC.shape[1] :] / denominator
    return share.sum(1).float()


def _probabilities(call: AttentionCall, part: slice) -> tuple[Tensor, Tensor, Tensor]:
    """Unnormalised exp(l - m) [B, H, t, N + J], the denominator with the sink [B, H, t, 1], and the keys [B, N + J, C]."""
    wide = call.numerics.wide
    seen = window_mask(call, call.rows_T[part])
    keys = call.window_k_BNC
    if call.entries_BJC is not None:
        assert call.selected_BTJ is not None
        seen = torch.cat((seen, call.selected_BTJ[:, part]), -1)
        keys = torch.cat((keys, call.entries_BJC), 1)
    keys = keys.to(wide)
    q = call.q_BTHC[:, part].transpose(1, 2).to(wide)
    logits = (q @ keys.unsqueeze(1).mT) * q.shape[-1] ** -0.5
    logits = logits.masked_fill(~seen.unsqueeze(1), -math.inf)
    top = logits.amax(-1, keepdim=True).detach()
    probability = torch.exp(logits - top)
    sink = torch.exp(call.sink_H.to(wide)[:, None, None] - top)
    return probability, probability.sum(-1, keepdim=True) + sink, keys


# ---- experts (section 5) --------------------------------------------------------------------------------------------


def route(
    x: Tensor, gate: Tensor, bias: Tensor, config: ModelConfig, numerics: Numerics
) -> tuple[Tensor, Tensor]:
    """Expert ids (int64, ascending) and fp32 weights, both [..., k], of ``x`` [..., D]."""
    logits = F.linear(x.to(numerics.wide), gate.to(numerics.wide)) / config.gate_temp
    scores = F.softplus(logits, threshold=40.0).sqrt().float()
    chosen = select_topk(scores + bias, config.num_experts_per_tok)
    ids = chosen.to(torch.int8).topk(config.num_experts_per_tok, dim=-1).indices.sort(-1).values
    picked = scores.gather(-1, ids).to(numerics.wide)
    weights = picked / (picked.sum(-1, keepdim=True) + 1e-20) * config.routed_scaling_factor
    return ids, weights.float()


def swiglu(
    gate: Tensor, up: Tensor, limit: float, numerics: Numerics, route_weight: Tensor | None = None
) -> Tensor:
    """b(silu(min(gate, limit)) * clamp(up, +-limit) [* route_weight]); the gate's clamp is one-sided."""
    hidden = F.silu(gate.to(numerics.wide).clamp(max=limit)) * up.to(numerics.wide).clamp(-limit, limit)
    if route_weight is not None:
        hidden = hidden * route_weight.to(numerics.wide)
    return hidden.to(numerics.values)


@dataclass(frozen=True, kw_only=True)
class ExpertCall:
    """Rows x_ND with their chosen experts: ids_NK (int64), weights_NK (fp32); stacked w1, w3 [E, F, D] and w2 [E, D, F]."""

    x_ND: Tensor
    ids_NK: Tensor
    weights_NK: Tensor
    w1: Tensor
    w3: Tensor
    w2: Tensor
    limit: float
    numerics: Numerics


def experts_routed(call: ExpertCall) -> Tensor:
    """sum_e y_e in the wide dtype [N, D]: each expert on its own rows, every y_e rounded as the reference does."""
    n = call.numerics
    total = torch.zeros(call.x_ND.shape, dtype=n.wide, device=call.x_ND.device)
    for expert in range(call.w1.shape[0]):
        rows, place = (call.ids_NK == expert).nonzero(as_tuple=True)
        if rows.numel() == 0:
            continue
        x = call.x_ND[rows]
        gate = contract(x, call.w1[expert], n, n.values)
        up = contract(x, call.w3[expert], n, n.values)
        hidden = swiglu(gate, up, call.limit, n, call.weights_NK[rows, place, None])
        y = contract(quantise_input(hidden, n), call.w2[expert], n, n.values)
        total = total.index_add(0, rows, y.to(n.wide))
    return total


def experts_dense(call: ExpertCall) -> Tensor:
    """As ``experts_routed`` by two big products over all experts, zero gates for the rest (training).

    The only difference: y_e is not rounded before the sum over experts.
    """
    n = call.numerics
    e, f, d = call.w1.shape
    gates = torch.zeros((*call.ids_NK.shape[:-1], e), dtype=torch.float32, device=call.x_ND.device)
    gates = gates.scatter(-1, call.ids_NK, call.weights_NK).unsqueeze(-1)
    both = contract(call.x_ND, torch.cat((call.w1, call.w3)).flatten(0, 1), n, n.values)
    gate, up = both.unflatten(-1, (2, e, f)).unbind(-3)
    hidden = quantise_input(swiglu(gate, up, call.limit, n, gates), n)
    return contract(hidden.flatten(-2), call.w2.transpose(0, 1).reshape(d, e * f), n, n.values).to(n.wide)


def shared_expert(x: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, limit: float, numerics: Numerics) -> Tensor:
    """The always-active expert: ``x`` [..., D] to values [..., D]."""
    n = numerics
    x = quantise_input(x, n)
    hidden = swiglu(contract(x, w1, n, n.values), contract(x, w3, n, n.values), limit, n)
    return contract(quantise_input(hidden, n), w2, n, n.values)


def quantise_input(x: Tensor, numerics: Numerics) -> Tensor:
    """The input of an FP8 or FP4 linear as the tier sees it."""
    return q8(x) if numerics.quantise_inputs else x


# ---- Engram (section 6) ---------------------------------------------------------------------------------------------


def engram_primes(config: ModelConfig) -> dict[int, list[int]]:
    """Bucket sizes of each Engram layer, n-gram major: consecutive primes, none used twice over all layers (6.2)."""
    used: set[int] = set()
    result: dict[int, list[int]] = {}
    for layer in config.engram_layer_ids:
        primes: list[int] = []
        for _ in range(config.engram_max_ngram_size - 1):
            current = config.engram_vocab_size - 1
            for _ in range(config.engram_n_heads):
                current += 1
                while current in used or not _is_prime(current):
                    current += 1
                used.add(current)
                primes.append(current)
        result[layer] = primes
    return result


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, math.isqrt(n) + 1))


def engram_multipliers(config: ModelConfig, layer: int) -> list[int]:
    """Odd int64 multipliers, one for each look-back step (6.3)."""
    bound = (2**63 - 1) // config.engram_compressed_vocab_size // 2
    drawn = np.random.default_rng(10007 * layer).integers(
        0, bound, size=config.engram_max_ngram_size, dtype=np.int64
    )
    return [2 * int(v) + 1 for v in drawn]


def engram_rows(
    config: ModelConfig, layer: int, compressed_BT: Tensor, documents_BT: Tensor, pad: int
) -> Tensor:
    """int64 [B, T, columns] table rows; ``compressed_BT`` int64 compressed ids, ``pad`` the PAD's compressed id (6.4)."""
    multipliers = engram_multipliers(config, layer)
    primes = engram_primes(config)[layer]
    heads = config.engram_n_heads
    offsets = [0, *itertools.accumulate(primes[:-1])]
    running = compressed_BT * multipliers[0]
    columns = []
    for step in range(1, config.engram_max_ngram_size):
        before = F.pad(compressed_BT, (step, 0), value=pad)[:, : compressed_BT.shape[1]]
        document = F.pad(documents_BT, (step, 0), value=-1)[:, : documents_BT.shape[1]]
        running = running ^ (torch.where(document == documents_BT, before, pad) * multipliers[step])
        for column in range((step - 1) * heads, step * heads):
            columns.append(running % primes[column] + offsets[column])
    return torch.stack(columns, -1)


def engram_inject(
    streams_BTSD: Tensor,
    kv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    config: ModelConfig,
    numerics: Numerics,
) -> Tensor:
    """b(X + gate * v) of streams [B, T, S, D] with kv [B, T, (S + 1) D] (keys stream-major, then the value) (6.5)."""
    x, wide = streams_BTSD.to(numerics.wide), kv.to(numerics.wide)
    keys, value = wide.split((x.shape[-2] * x.shape[-1], x.shape[-1]), -1)
    keys = keys.unflatten(-1, x.shape[-2:])
    weight = q_weight.to(x.dtype) * k_weight.to(x.dtype)
    statistic = torch.rsqrt(x.square().mean(-1) + config.rms_norm_eps) * torch.rsqrt(
        keys.square().mean(-1) + config.rms_norm_eps
    )
    gate = engram_gate((x * weight * keys).sum(-1) * statistic * x.shape[-1] ** -0.5)
    return (x + gate.unsqueeze(-1) * value.unsqueeze(-2)).to(numerics.values)


def engram_gate(dot: Tensor) -> Tensor:
    """sigmoid of the signed square root of ``dot``, its magnitude floored at 1e-6."""
    return torch.sigmoid(torch.copysign(dot.abs().clamp(min=1e-6).sqrt(), dot))


# ---- options --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Functions:
    """The replaceable functions of a forward: compiled or fused twins for training, mutants for the tests.

    Every field has the signature of the module's function of that name.
    """

    rms_norm: Callable[..., Tensor] = rms_norm
    rotate: Callable[..., Tensor] = rotate
    hc_coefficients: Callable[..., tuple[Tensor, Tensor, Tensor]] = hc_coefficients
    collapse: Callable[..., Tensor] = collapse
    write_streams: Callable[..., Tensor] = write_streams
    compress_pairs: Callable[..., Tensor] = compress_pairs
    index_scores: Callable[..., Tensor] = index_scores
    select_topk: Callable[..., Tensor] = select_topk
    candidate_mask: Callable[..., Tensor] = candidate_mask
    attend: Callable[[AttentionCall], Tensor] = attend
    route: Callable[..., tuple[Tensor, Tensor]] = route
    shared_expert: Callable[..., Tensor] = shared_expert
    experts: Callable[[ExpertCall], Tensor] = experts_routed
    engram_inject: Callable[..., Tensor] = engram_inject
    q8_window: Callable[[Tensor], Tensor] = q8
    qn4_entries: Callable[[Tensor], Tensor] = qn4
    qm4_index: Callable[[Tensor], Tensor] = qm4
    inverse: Callable[[tuple[Tensor, Tensor]], tuple[Tensor, Tensor]] = inverse


@dataclass(frozen=True, kw_only=True)
class Replay:
    """Bounded replay (section 9) as approximation to reproduce.

    ``hit``: rows [0, hit) have cached entries and index keys in ``entries`` / ``index_keys`` (by KV source layer, [B, J, C]
    and [B, J, K], as a cold run's trace holds them); only rows from ``hit - window`` are computed, with nothing before.
    ``kept``: absolute rows that layers past the last KV source run on (None: all): the last ``window`` rows of each prefill
    step, and every decoded row. A window ends at a gap.
    """

    hit: int = 0
    entries: Mapping[int, Tensor] = field(default_factory=dict)
    index_keys: Mapping[int, Tensor] = field(default_factory=dict)
    kept: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to compute differently.

    ``dense``: attend to all visible entries (selection ignored; index scores are not computed). ``selections``: forced bool
    masks [B, T, J] by index source. ``layer_inputs``: (streams, read) to feed into given layers instead of the previous
    layer's. ``detach_indexer``: the indexer's inputs pass no gradient on. ``logits``: False skips the head.
    """

    functions: Functions = Functions()
    dense: bool = False
    selections: Mapping[int, Tensor] = field(default_factory=dict)
    layer_inputs: Mapping[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    detach_indexer: bool = False
    logits: bool = True
    replay: Replay = Replay()


@dataclass(frozen=True, kw_only=True)
class OracleOutput:
    """``hidden_BTD``: the normed state that the head reads; ``logits_BTV`` fp32 or None; ``rows_T``: the rows of both."""

    hidden_BTD: Tensor
    logits_BTV: Tensor | None
    rows_T: Tensor


def forward(
    config: ModelConfig,
    weights: Weights,
    ids_BT: Tensor,
    *,
    numerics: Numerics,
    token_map: Tensor | None = None,
    documents_BT: Tensor | None = None,
    options: Options = Options(),
    trace: Trace | None = None,
) -> OracleOutput:
    """The backbone over whole sequences.

    ``weights``: released names (section 11) to dequantised values of any float dtype, without ``.scale``; the routed experts
    of a layer are stacked as ``layers.L.ffn.experts.w1|w2|w3`` [E, out, in]. ``ids_BT`` int64. ``token_map`` int64 [V] gives
    the Engram's compressed id (needed when the config has Engram layers). ``documents_BT`` int64: equal numbers in a row are
    one document; a document starts at a multiple of 8 (of ratio * candidate block, in general) and what pads between them
    has a number of its own; positions, window, entries and n-grams never cross. None: a row is one document.
    ``trace``, if given, receives (not detached) for each layer L under "layers.L.": streams, read (outgoing), attention_in
    (the streams at the entry of its attention, after Engram: the draft's features), attn_out, ffn_out, route_e, route_w;
    where it applies engram_ids, engram_out, latent, entries, index_keys, index_query, index_weights, index_scores (masked,
    not under ``dense``), candidates, selected (bool masks); attention calls are in ``trace["layers.L.attention"]`` (an
    AttentionCall).
    """
    return _Forward(config, weights, ids_BT, numerics, token_map, documents_BT, options, trace).run()


def first_rows(documents_BT: Tensor) -> Tensor:
    """int64 [B, T]: the first row of each row's document."""
    starts = F.pad(documents_BT[:, 1:] != documents_BT[:, :-1], (1, 0), value=True)
    rows = torch.arange(documents_BT.shape[1], device=documents_BT.device)
    return torch.where(starts, rows, 0).cummax(-1).values


class _Forward:
    """One pass: the context of ``forward`` and what layers hand down (entries, keys, selections, candidates)."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        ids_BT: Tensor,
        numerics: Numerics,
        token_map: Tensor | None,
        documents_BT: Tensor | None,
        options: Options,
        trace: Trace | None,
    ) -> None:
        self.config, self.weights, self.ids, self.n = config, weights, ids_BT, numerics
        self.options, self.f, self.trace = options, options.functions, trace
        self.documents = torch.zeros_like(ids_BT) if documents_BT is None else documents_BT
        total = ids_BT.shape[1]
        positions = torch.arange(total, device=ids_BT.device) - first_rows(self.documents)
        self.tables = [
            rope_table(rope_frequencies(config, compressed=compressed), positions)
            for compressed in (False, True)
        ]
        replay = options.replay
        start = max(replay.hit - config.sliding_window, 0) if replay.hit else 0
        self.rows = torch.arange(start, total, device=ids_BT.device)
        if config.engram_layer_ids:
            assert token_map is not None, "a config with Engram layers needs the token map"
            self.compressed = token_map.to(ids_BT.device)[ids_BT]
            self.pad = int(token_map[config.engram_pad_token_id])
        self.entries: dict[int, Tensor] = {}
        self.keys: dict[int, Tensor] = {}
        self.selected: dict[int, Tensor] = {}
        self.candidates: Tensor | None = None

    def run(self) -> OracleOutput:
        """All layers, final collapse, norm and head."""
        c = self.config
        embedded = self.weights["embed.weight"][self.ids[:, self.rows]].to(self.n.values)
        streams = embedded.unsqueeze(-2).expand(*embedded.shape[:-1], c.hc_mult, c.hidden_size)
        read = torch.zeros(streams.shape[:-1], device=streams.device)
        read[..., 0] = 1.0
        for layer in c.layers:
            streams, read = self.options.layer_inputs.get(layer.index, (streams, read))
            streams, read = self._layer(layer, streams, read)
            self._record(layer, streams=streams, read=read)
        hidden = self.f.rms_norm(
            self.f.collapse(streams, read, self.n), self._w("norm.weight"), c.rms_norm_eps, self.n
        )
        logits = (
            contract(hidden, self._w("head.weight"), self.n, torch.float32) if self.options.logits else None
        )
        return OracleOutput(hidden_BTD=hidden, logits_BTV=logits, rows_T=self.rows)

    # ---- one layer (section 2, schedule) ------------------------------------------------------------------------

    def _layer(self, layer: LayerSpec, streams: Tensor, read: Tensor) -> tuple[Tensor, Tensor]:
        c, f, n = self.config, self.f, self.n
        if layer.has_engram:
            streams = self._engram(layer, streams)
        self._record(layer, attention_in=streams)
        next_read, post, mix = self._coefficients(layer, "attn", streams)
        x = f.rms_norm(f.collapse(streams, read, n), self._lw(layer, "attn_norm.weight"), c.rms_norm_eps, n)
        window_k, key_rows = self._window_key(layer, x), self.rows
        if layer.owns_entries:
            self._publish_entries(layer, x)
        kept = self.options.replay.kept
        if kept is not None and layer.index == c.last_kv_source:
            place = torch.isin(self.rows, kept).nonzero().squeeze(-1)
            self.rows = self.rows[place]
            x, streams, next_read, post, mix = (t[:, place] for t in (x, streams, next_read, post, mix))
        y = self._attention(layer, x, window_k, key_rows)
        streams, read = f.write_streams(y, streams, post, mix, n), next_read
        next_read, post, mix = self._coefficients(layer, "ffn", streams)
        x = f.rms_norm(f.collapse(streams, read, n), self._lw(layer, "ffn_norm.weight"), c.rms_norm_eps, n)
        z = self._experts(layer, x)
        self._record(layer, attn_out=y, ffn_out=z)
        return f.write_streams(z, streams, post, mix, n), next_read

    def _coefficients(self, layer: LayerSpec, site: str, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        names = (f"hc_{site}_fn", f"hc_{site}_base", f"hc_{site}_scale")
        return self.f.hc_coefficients(
            streams, *(self._lw(layer, name) for name in names), self.config, self.n
        )

    def _engram(self, layer: LayerSpec, streams: Tensor) -> Tensor:
        n = self.n
        ids = engram_rows(self.config, layer.index, self.compressed, self.documents, self.pad)[:, self.rows]
        looked_up = self._lw(layer, "engram.embed.weight")[ids].flatten(-2).to(n.values)
        kv = self._linear(looked_up, layer, "engram.wkv.weight")
        weights = (self._lw(layer, "engram.q_weight"), self._lw(layer, "engram.k_weight"))
        streams = self.f.engram_inject(streams, kv, *weights, self.config, n)
        self._record(layer, engram_ids=ids, engram_out=streams)
        return streams

    # ---- keys (3.1, 3.4) ----------------------------------------------------------------------------------------

    def _window_key(self, layer: LayerSpec, x: Tensor) -> Tensor:
        k = self._norm(self._linear(x, layer, "attn.wkv.weight"), layer, "attn.kv_norm.weight")
        return self._cached(self.f.rotate(k, self._table(layer, self.rows), self.n), self.f.q8_window)

    def _publish_entries(self, layer: LayerSpec, x: Tensor) -> None:
        n, ratio, hit = self.n, layer.ratio, self.options.replay.hit
        fresh = x[:, hit - int(self.rows[0]) :] if hit else x
        fresh = fresh[:, : fresh.shape[1] // ratio * ratio]
        if ratio == 1:
            pooled = contract(fresh, self._lw(layer, "attn.compressor.wkv.weight"), n, n.values)
        else:
            v = contract(fresh, self._lw(layer, "attn.compressor.wkv.weight"), n, torch.float32)
            s = contract(fresh, self._lw(layer, "attn.compressor.wgate.weight"), n, torch.float32)
            pooled = self.f.compress_pairs(v, s, n)
        latent = self._norm(pooled, layer, "attn.compressor.norm.weight")
        table = self._table(layer, hit + torch.arange(0, fresh.shape[1], ratio, device=x.device))
        entries = self._cached(self.f.rotate(latent, table, n), self.f.qn4_entries)
        k = contract(self._indexer_input(latent), self._lw(layer, "attn.indexer.wk.weight"), n, n.values)
        k = self.f.rotate(self._norm(k, layer, "attn.indexer.k_norm.weight"), table, n)
        keys = self._cached(k, self.f.qm4_index)
        if hit:
            replay = self.options.replay
            entries = torch.cat((replay.entries[layer.index][:, : hit // ratio], entries), 1)
            keys = torch.cat((replay.index_keys[layer.index][:, : hit // ratio], keys), 1)
        self.entries[layer.index], self.keys[layer.index] = entries, keys
        self._record(layer, latent=latent, entries=entries, index_keys=keys)

    # ---- attention (3.5 to 3.8) ---------------------------------------------------------------------------------

    def _attention(self, layer: LayerSpec, x: Tensor, window_k: Tensor, key_rows: Tensor) -> Tensor:
        c, n = self.config, self.n
        latent = self._norm(self._linear(x, layer, "attn.wq_a.weight"), layer, "attn.q_norm.weight")
        q = self._linear(latent, layer, "attn.wq_b.weight").unflatten(-1, (c.num_attention_heads, c.head_dim))
        table = self._table(layer, self.rows)
        heads_table = (table[0].unsqueeze(-2), table[1].unsqueeze(-2))
        if layer.owns_selection:
            self._select(layer, x, latent, heads_table)
        call = AttentionCall(
            layer=layer,
            q_BTHC=self.f.rotate(q, heads_table, n),
            window_k_BNC=window_k,
            entries_BJC=None if layer.kv_source is None else self.entries[layer.kv_source],
            selected_BTJ=None if layer.index_source is None else self.selected[layer.index_source],
            sink_H=self._lw(layer, "attn.attn_sink"),
            rows_T=self.rows,
            key_rows_N=key_rows,
            documents_BR=self.documents,
            window=c.sliding_window,
            dense=self.options.dense,
            numerics=n,
        )
        self._record(layer, attention=call)
        o = self.f.rotate(self.f.attend(call), self.f.inverse(heads_table), n)
        wo_a = self._lw(layer, "attn.wo_a.weight").unflatten(0, (c.o_groups, c.o_lora_rank))
        grouped = o.flatten(-2).unflatten(-1, (c.o_groups, -1))
        return self._linear(contract(grouped, wo_a, n, n.values).flatten(-2), layer, "attn.wo_b.weight")

    def _select(self, layer: LayerSpec, x: Tensor, latent: Tensor, table: tuple[Tensor, Tensor]) -> None:
        """Set ``self.selected`` of this index source (and the candidates, if it is their source): section 4."""
        assert layer.kv_source is not None
        c, f, n, keys = self.config, self.f, self.n, self.keys[layer.kv_source]
        visible = self._visible(layer, keys.shape[1])
        if self.options.dense and self.trace is None:
            self.selected[layer.index] = visible
            return
        query = self._linear(self._indexer_input(latent), layer, "attn.indexer.wq_b.weight")
        query = f.rotate(query.unflatten(-1, (c.index_n_heads, c.index_head_dim)), table, n)
        query = self._cached(query, f.qm4_index)
        weight = contract(
            self._indexer_input(x), self._lw(layer, "attn.indexer.weights_proj.weight"), n, n.values
        )
        self._record(layer, index_query=query, index_weights=weight)
        if self.options.dense:
            self.selected[layer.index] = visible
            return
        scores = f.index_scores(query, weight, keys, n).masked_fill(~visible, -math.inf)
        self._record(layer, index_scores=scores)
        if layer.is_candidate_source:
            self.candidates = f.candidate_mask(scores, (self.rows + 1) // layer.ratio - 1, c)
            self._record(layer, candidates=self.candidates & visible)
        elif layer.uses_candidates:
            assert self.candidates is not None
            scores = scores.masked_fill(~self.candidates, -math.inf)
        selected = self.options.selections.get(layer.index)
        self.selected[layer.index] = f.select_topk(scores, c.index_topk) if selected is None else selected
        self._record(layer, selected=self.selected[layer.index])

    def _visible(self, layer: LayerSpec, entries: int) -> Tensor:
        """bool [B, T, J]: complete at the query's row, and of its document."""
        first = torch.arange(entries, device=self.rows.device) * layer.ratio
        complete = first + layer.ratio - 1 <= self.rows[:, None]
        return complete & (self.documents[:, self.rows, None] == self.documents[:, None, first])

    def _experts(self, layer: LayerSpec, x: Tensor) -> Tensor:
        c, n = self.config, self.n
        ids, gates = self.f.route(
            x, self._lw(layer, "ffn.gate.weight"), self._lw(layer, "ffn.gate.bias"), c, n
        )
        self._record(layer, route_e=ids, route_w=gates)
        call = ExpertCall(
            x_ND=quantise_input(x, n).flatten(0, 1),
            ids_NK=ids.flatten(0, 1),
            weights_NK=gates.flatten(0, 1),
            w1=self._lw(layer, "ffn.experts.w1"),
            w3=self._lw(layer, "ffn.experts.w3"),
            w2=self._lw(layer, "ffn.experts.w2"),
            limit=c.swiglu_limit,
            numerics=n,
        )
        shared = (self._lw(layer, f"ffn.shared_experts.{name}.weight") for name in ("w1", "w3", "w2"))
        routed = self.f.experts(call).unflatten(0, x.shape[:2])
        return (routed + self.f.shared_expert(x, *shared, c.swiglu_limit, n)).to(n.values)

    # ---- small words --------------------------------------------------------------------------------------------

    def _w(self, name: str) -> Tensor:
        return self.weights[name]

    def _lw(self, layer: LayerSpec, name: str) -> Tensor:
        return self.weights[f"layers.{layer.index}.{name}"]

    def _linear(self, x: Tensor, layer: LayerSpec, name: str) -> Tensor:
        return contract(quantise_input(x, self.n), self._lw(layer, name), self.n, self.n.values)

    def _norm(self, x: Tensor, layer: LayerSpec, name: str) -> Tensor:
        return self.f.rms_norm(x, self._lw(layer, name), self.config.rms_norm_eps, self.n)

    def _table(self, layer: LayerSpec, rows: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self.tables[layer.ratio > 0]
        return cos[:, rows], sin[:, rows]

    def _cached(self, x: Tensor, quantiser: Callable[[Tensor], Tensor]) -> Tensor:
        return quantiser(x) if self.n.quantise_cache else x

    def _indexer_input(self, x: Tensor) -> Tensor:
        return x.detach() if self.options.detach_indexer else x

    def _record(self, layer: LayerSpec, **tensors: Any) -> None:
        if self.trace is not None:
            self.trace.update({f"layers.{layer.index}.{name}": tensor for name, tensor in tensors.items()})
