"""What the trainer puts in the oracle's replaceable places: compiled twins of its plain functions, and fused ones.

``plain`` is the oracle itself (CPU, witness). ``compiled`` compiles each small function from outside, with the cheap
Sinkhorn gradient, and on CUDA uses FlexAttention. Token dimensions are flattened before compiled code, so that
batches of 48 x 768 and 8 x 4,608 share one compilation.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from flashstep.config.model import ModelConfig
from flashstep.quant import mxfp4, mxfp8, nvfp4
from oracle import model as oracle
from oracle.model import AttentionCall, ExpertCall, Functions, Numerics
from train.fast import (
    Sinkhorn,
    TileLists,
    flex_union,
    sinkhorn_finish,
    sinkhorn_pair,
    sinkhorn_project,
    sinkhorn_start,
    tile_lists,
)

DENSE = Numerics(values=torch.bfloat16, quantise_cache=False, quantise_inputs=False, accumulate=None)
QUANTISED = Numerics(values=torch.bfloat16, quantise_cache=True, quantise_inputs=True, accumulate=None)

Compile = Callable[[Callable[..., Any]], Callable[..., Any]]


def no_compile(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function itself."""
    return function


def compiler() -> Compile:
    """torch.compile with static shapes."""
    torch._dynamo.config.recompile_limit = 128  # ty: ignore[invalid-assignment] - one function serves many shapes, each known beforehand
    return functools.partial(torch.compile, dynamic=False, fullgraph=True)


def plain() -> Functions:
    """The oracle, with both expert products dense (differentiable without host synchronisation)."""
    return Functions(experts=oracle.experts_dense)


def topk_mask(scores: Tensor, k: int) -> Tensor:
    """bool mask of the ``k`` largest; which of equal scores wins is open (training only)."""
    if k >= scores.shape[-1]:
        return scores > -math.inf
    index = scores.topk(k, dim=-1, sorted=False).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, index, True) & (scores > -math.inf)


def fp32_index_scores(query: Tensor, weight: Tensor, keys: Tensor) -> Tensor:
    """As ``oracle.index_scores`` with fp32 products (no gradient): [B, T, I, K], [B, T, I], [B, J, K] -> [B, T, J]."""
    heads, channels = query.shape[-2:]
    w = weight.float() * (channels**-0.5 * heads**-0.5)
    total = None
    for head in range(heads):
        term = torch.relu(query[:, :, head].float() @ keys.float().mT) * w[:, :, head, None]
        total = term if total is None else total + term
    assert total is not None
    return total


def _rows(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Call ``function(x, ...)`` on x with its leading dimensions flattened."""

    def call(x: Tensor, *rest: Any) -> Tensor:
        return function(x.reshape(-1, x.shape[-1]), *rest).view(x.shape)

    return call


def compiled(config: ModelConfig, compile_: Compile, *, flex: bool) -> Functions:
    """The replaceable functions for training; ``flex`` needs CUDA (FlexAttention has no gradients on a CPU)."""
    # a pair of representative numerics: only ``values`` and ``wide`` matter inside, and both tiers share them
    n, eps = DENSE, config.rms_norm_eps
    scale = (config.hc_mult, config.hc_eps, config.hc_sinkhorn_iters)
    norm = compile_(lambda x, w: oracle.rms_norm(x, w, eps, n))
    turn = compile_(lambda x, cos, sin: oracle.rotate(x, (cos, sin), n))
    sites = compile_(lambda x, fn, base, sc: _hc_inputs(x, fn, base, sc, scale[0], scale[1], eps))
    read = compile_(lambda x, a: oracle.collapse(x, a, n))
    write = compile_(lambda y, x, post, mix: oracle.write_streams(y, x, post, mix, n))
    pool = compile_(lambda v, s: oracle.compress_pairs(v, s, n))
    inject = compile_(lambda x, kv, qw, kw: _engram(x, kv, qw, kw, eps))
    gate = compile_(lambda x, w, b: _route(x, w, b, config.num_experts_per_tok, config.routed_scaling_factor))
    scores = compile_(fp32_index_scores)
    hidden = compile_(lambda a, b, limit, g: oracle.swiglu(a, b, limit, n, g))
    shared_hidden = compile_(lambda a, b, limit: oracle.swiglu(a, b, limit, n))
    Sinkhorn.start, Sinkhorn.pair = (
        staticmethod(compile_(sinkhorn_start)),
        staticmethod(compile_(sinkhorn_pair)),
    )
    Sinkhorn.project = staticmethod(compile_(sinkhorn_project))
    Sinkhorn.finish = staticmethod(compile_(sinkhorn_finish))

    def hc(x: Tensor, fn: Tensor, base: Tensor, sc: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
        lead = x.shape[:2]
        pre, post, logits = sites(x.flatten(0, 1), fn, base, sc)
        mix = Sinkhorn.apply(logits, scale[2], scale[1])
        return pre.unflatten(0, lead), post.unflatten(0, lead), mix.unflatten(0, lead)

    def rotate(x: Tensor, table: tuple[Tensor, Tensor], _: Numerics) -> Tensor:
        cos, sin = (t.flatten(0, 1) for t in table)
        return turn(x.flatten(0, 1), cos.contiguous(), sin.contiguous()).view(x.shape)

    def route(x: Tensor, w: Tensor, b: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        ids, weights = gate(x.flatten(0, 1), w, b)
        return ids.unflatten(0, x.shape[:2]), weights.unflatten(0, x.shape[:2])

    def swiglu(a: Tensor, b: Tensor, limit: float, _: Numerics, g: Tensor | None = None) -> Tensor:
        return shared_hidden(a, b, limit) if g is None else hidden(a, b, limit, g)

    return Functions(
        rms_norm=lambda x, w, *_: _rows(norm)(x, w),
        rotate=rotate,
        hc_coefficients=hc,
        collapse=lambda x, a, _: read(x.flatten(0, 1), a.flatten(0, 1)).unflatten(0, x.shape[:2]),
        write_streams=lambda y, x, post, mix, _: write(*(t.flatten(0, 1) for t in (y, x, post, mix))).view(
            x.shape
        ),
        compress_pairs=lambda v, s, _: pool(v, s),
        index_scores=lambda q, w, k, _: scores(q.detach(), w.detach(), k.detach()),
        select_topk=topk_mask,
        candidate_mask=_candidates,
        attend=FlexAttend(compile_) if flex else oracle.attend,
        route=route,
        experts=Experts(swiglu),
        shared_expert=SharedExpert(swiglu),
        engram_inject=lambda x, kv, qw, kw, *_: inject(x.flatten(0, 1), kv.flatten(0, 1), qw, kw).view(
            x.shape
        ),
    )


def _hc_inputs(
    x: Tensor, fn: Tensor, base: Tensor, scale: Tensor, s: int, hc_eps: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """What ``oracle.hc_coefficients`` computes before its Sinkhorn: pre [N, S], post [N, S], logits [N, S, S], all fp32."""
    z = x.flatten(-2).float()
    m = F.linear(z, fn) * torch.rsqrt(z.square().mean(-1, keepdim=True) + eps)
    pre = torch.sigmoid(base[:s] + m[:, :s] * scale[0]) + hc_eps
    post = 2 * torch.sigmoid(base[s : 2 * s] + m[:, s : 2 * s] * scale[1])
    return pre, post, (base[2 * s :] + m[:, 2 * s :] * scale[2]).unflatten(-1, (s, s))


def _engram(x: Tensor, kv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float) -> Tensor:
    """``oracle.engram_inject`` on flattened tokens: [N, S, D], [N, (S + 1) D]."""
    streams, wide = x.float(), kv.float()
    keys, value = wide.split((x.shape[-2] * x.shape[-1], x.shape[-1]), -1)
    keys = keys.unflatten(-1, x.shape[-2:])
    statistic = torch.rsqrt(streams.square().mean(-1) + eps) * torch.rsqrt(keys.square().mean(-1) + eps)
    dot = (streams * (q_weight.float() * k_weight.float()) * keys).sum(-1) * statistic * x.shape[-1] ** -0.5
    return (streams + oracle.engram_gate(dot).unsqueeze(-1) * value.unsqueeze(-2)).to(x.dtype)


def _route(x: Tensor, w: Tensor, bias: Tensor, k: int, scaling: float) -> tuple[Tensor, Tensor]:
    """``oracle.route`` on flattened tokens; expert order is open."""
    scores = F.softplus(F.linear(x.float(), w.float()), threshold=40.0).sqrt()
    ids = (scores + bias).topk(k, dim=-1).indices
    picked = scores.gather(-1, ids)
    return ids, picked / (picked.sum(-1, keepdim=True) + 1e-20) * scaling


def _candidates(scores: Tensor, newest: Tensor, config: ModelConfig) -> Tensor:
    """``oracle.candidate_mask`` with any tie order."""
    size = config.candidate_block_size
    count = scores.shape[-1]
    blocks = scores.unflatten(-1, (-1, size)).amax(-1)
    forced = torch.arange(blocks.shape[-1], device=blocks.device) == (newest // size).unsqueeze(-1)
    blocks = torch.where(forced & (blocks > -math.inf), math.inf, blocks)
    return topk_mask(blocks, config.candidate_topk_blocks).repeat_interleave(size, -1)[..., :count]


class Experts:
    """``oracle.experts_dense`` with the given activation function (two large products; gates of 0 for the rest)."""

    def __init__(self, swiglu: Callable[..., Tensor]) -> None:
        self.swiglu = swiglu

    def __call__(self, call: ExpertCall) -> Tensor:
        n, (experts, width, hidden) = call.numerics, call.w1.shape
        gates = torch.zeros((call.ids_NK.shape[0], experts), device=call.x_ND.device)
        gates = gates.scatter(-1, call.ids_NK, call.weights_NK).unsqueeze(-1)
        g = oracle.contract(call.x_ND, call.w1.flatten(0, 1), n, n.values).unflatten(-1, (experts, width))
        u = oracle.contract(call.x_ND, call.w3.flatten(0, 1), n, n.values).unflatten(-1, (experts, width))
        inner = oracle.quantise_input(self.swiglu(g, u, call.limit, n, gates), n)
        return oracle.contract(
            inner.flatten(-2), call.w2.transpose(0, 1).reshape(hidden, experts * width), n, n.values
        ).to(n.wide)


class SharedExpert:
    """``oracle.shared_expert`` with the given activation function."""

    def __init__(self, swiglu: Callable[..., Tensor]) -> None:
        self.swiglu = swiglu

    def __call__(self, x: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, limit: float, n: Numerics) -> Tensor:
        a = oracle.quantise_input(x, n)
        hidden = self.swiglu(
            oracle.contract(a, w1, n, n.values), oracle.contract(a, w3, n, n.values), limit, n
        )
        return oracle.contract(oracle.quantise_input(hidden, n), w2, n, n.values).to(n.wide)


class FlexAttend:
    """The oracle's ``attend`` by FlexAttention, one compilation for each (shape, ratio, dense or selected)."""

    def __init__(self, compile_: Compile) -> None:
        self.code: dict[tuple[int, bool], Callable[..., Tensor]] = {}
        self.lists: dict[tuple[int, int], TileLists] = {}
        self.compile = compile_

    def __call__(self, call: AttentionCall) -> Tensor:
        tokens, ratio = call.q_BTHC.shape[1], call.layer.ratio
        keys = (
            call.window_k_BNC
            if call.entries_BJC is None
            else torch.cat((call.window_k_BNC, call.entries_BJC), 1)
        )
        if (tokens, ratio) not in self.lists:
            self.lists[tokens, ratio] = tile_lists(
                tokens, tokens // ratio if ratio else 0, ratio or 1, keys.device
            )
        selected = None if call.dense or ratio == 0 else call.selected_BTJ
        code = self.code.setdefault(
            (ratio, selected is None),
            self.compile(functools.partial(flex_union, ratio=ratio, window=call.window)),
        )
        return code(call.q_BTHC, keys, call.sink_H, call.documents_BR, selected, self.lists[tokens, ratio])


def compile_quantisers(compile_: Compile) -> None:
    """Replace the oracle's three fake quantisers by compiled ones with the same values (checked by tests)."""

    def twin(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        code = compile_(function)

        def call(x: Tensor) -> Tensor:
            rounded = code(x.detach().reshape(-1, x.shape[-1])).view(x.shape)
            return oracle._StraightThrough.apply(x, rounded)  # its straight-through gradient, as it is

        return call

    oracle.q8 = twin(mxfp8.quantise_dequantise)  # ty: ignore[invalid-assignment]
    oracle.qn4 = twin(nvfp4.quantise_dequantise)  # ty: ignore[invalid-assignment]
    oracle.qm4 = twin(mxfp4.quantise_dequantise)  # ty: ignore[invalid-assignment]


PLAIN_QUANTISERS = (oracle.q8, oracle.qn4, oracle.qm4)


@contextlib.contextmanager
def plain_quantisers() -> Generator[None]:
    """The oracle's own quantisers inside (comparison paths)."""
    before = (oracle.q8, oracle.qn4, oracle.qm4)
    oracle.q8, oracle.qn4, oracle.qm4 = PLAIN_QUANTISERS
    yield
    oracle.q8, oracle.qn4, oracle.qm4 = before


def quantised_functions(functions: Functions) -> Functions:
    """``functions`` with the quantisers that ``compile_quantisers`` put in the oracle."""
    return dataclasses.replace(functions, q8_window=oracle.q8, qn4_entries=oracle.qn4, qm4_index=oracle.qm4)
