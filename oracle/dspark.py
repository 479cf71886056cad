"""The DSpark draft as one differentiable forward, from spec/model.md 8.1 to 8.4 alone: no cache, no serving code.

Takes features of a backbone forward (``features`` of its trace) and M anchors, each a sequence and a position in it; gives
base logits of all K places, then Markov logits and confidences for given or greedily chained previous tokens. Thousands of
anchors over the same rows cost one batch. Rounding points and ops are those of ``oracle.model``, and these:
11. features     b(mean over streams), from the streams at the entry of a target layer's attention (after Engram)
12. context      mx = rms(LIN8 F), op 2 and 1; key = rope(rms(LIN8 mx)), then Q8 where the tier quantises its cache
13. base logits  f(head . rms(y)), y the collapsed streams (b); bias = f(markov head . em); L = f(base + bias)
14. confidence   f(proj . concat(y, em)), before the sigmoid

Legend, besides ``oracle.model``'s: M anchors, K places of a block, W window, G width of the features (targets x D).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from flashstep.config.model import ModelConfig
from oracle import model
from oracle.model import (
    ExpertCall,
    Functions,
    Numerics,
    Trace,
    Weights,
    contract,
    first_rows,
    quantise_input,
    rope_table,
)


@dataclass(frozen=True, kw_only=True)
class Anchors:
    """Where blocks start: all int64 [M].

    ``position`` is the absolute row n of the anchor token in its row of ``ids``; rows before n are committed, so n is at
    least 1 past the start of its document, which is the document of row n - 1. The anchor itself may lie behind the last
    row. ``token`` is the anchor's id.
    """

    sequence: Tensor
    position: Tensor
    token: Tensor


@dataclass(frozen=True, kw_only=True)
class Attention:
    """One draft layer's attention: q [M, K, H, C]; keys (= values) [M, W + K, C], context first, and who is seen.

    ``seen_MN`` bool [M, W + K] is the same for all queries of a block: the context inside the window and the document,
    and the whole block.
    """

    q_MKHC: Tensor
    keys_MNC: Tensor
    seen_MN: Tensor
    sink_H: Tensor
    numerics: Numerics


def attend(call: Attention) -> Tensor:
    """Output [M, K, H, C] before the inverse rotation: op 7 of ``oracle.model``."""
    wide = call.numerics.wide
    keys = call.keys_MNC.to(wide)
    q = call.q_MKHC.flatten(1, 2).to(wide)  # queries and heads see the same keys: one product
    logits = (q @ keys.mT) * q.shape[-1] ** -0.5
    logits = logits.masked_fill(~call.seen_MN[:, None], -math.inf)
    top = logits.amax(-1, keepdim=True).detach()
    probability = torch.exp(logits - top)
    sink = call.sink_H.to(wide).repeat(call.q_MKHC.shape[1])[:, None]
    total = probability.sum(-1, keepdim=True) + torch.exp(sink - top)
    mixed = (probability.to(call.numerics.values).to(wide) @ keys) / total
    return mixed.to(call.numerics.values).view(call.q_MKHC.shape)


PLAIN = Functions()


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to compute differently: the backbone's replaceable functions, and this file's attention."""

    functions: Functions = PLAIN
    attend: Callable[[Attention], Tensor] = attend


@dataclass(frozen=True, kw_only=True)
class Block:
    """``base_MKV`` fp32: logits without the Markov bias; ``hidden_MKD``: the collapsed state before the norm.

    ``routes`` holds, a layer, the chosen experts [M, K, k].
    """

    base_MKV: Tensor
    hidden_MKD: Tensor
    routes: tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True)
class Drafts:
    """A greedy chain: ``tokens`` int64 [M, K + 1], the anchor first; logits and confidences (before the sigmoid) in fp32."""

    tokens: Tensor
    logits_MKV: Tensor
    confidence_MK: Tensor


def features(config: ModelConfig, trace: Trace, *, numerics: Numerics) -> Tensor:
    """[B, T, G] in the tier's values: op 11, the target layers in ascending order (8.1)."""
    streams = [trace[f"layers.{layer}.attention_in"] for layer in sorted(config.dspark_target_layer_ids)]
    return torch.cat([s.to(numerics.wide).mean(-2).to(numerics.values) for s in streams], -1)


def draft(
    config: ModelConfig,
    weights: Weights,
    features_BTG: Tensor,
    anchors: Anchors,
    *,
    numerics: Numerics,
    documents_BT: Tensor | None = None,
    options: Options = Options(),
) -> Block:
    """The draft layers and the shared head for every anchor (8.2, 8.3).

    ``weights`` as for ``oracle.model.forward``, with the ``mtp.`` names (experts of a layer stacked alike); ``documents_BT``
    as there: the context of an anchor never crosses into another document, and positions count from its first row.
    """
    return _Draft(config, weights, numerics, options).run(features_BTG, anchors, documents_BT)


def markov(
    config: ModelConfig, weights: Weights, block: Block, previous_MK: Tensor, *, numerics: Numerics
) -> tuple[Tensor, Tensor]:
    """Logits [M, K, V] and confidences [M, K] (before the sigmoid), both fp32, given the token before each place (8.4)."""
    last = f"mtp.{config.num_nextn_predict_layers - 1}"
    em = weights[f"{last}.markov_head.embed.weight"][previous_MK].to(numerics.values)
    bias = contract(em, weights[f"{last}.markov_head.head.weight"], numerics, torch.float32)
    joined = torch.cat((block.hidden_MKD, em), -1)
    proj = weights[f"{last}.confidence_head.proj.weight"]
    return block.base_MKV + bias, contract(joined, proj, numerics, torch.float32).squeeze(-1)


def chain(
    config: ModelConfig, weights: Weights, block: Block, token_M: Tensor, *, numerics: Numerics
) -> Drafts:
    """Greedy drafts: each place's most probable token (ties: lowest id) is the next place's previous one."""
    tokens, logits, confidence = [token_M], [], []
    for place in range(config.dspark_block_size):
        part = Block(
            base_MKV=block.base_MKV[:, place, None], hidden_MKD=block.hidden_MKD[:, place, None], routes=()
        )
        scores, sure = markov(config, weights, part, tokens[-1][:, None], numerics=numerics)
        logits.append(scores)
        confidence.append(sure)
        tokens.append(scores[:, 0].argmax(-1))
    return Drafts(
        tokens=torch.stack(tokens, 1), logits_MKV=torch.cat(logits, 1), confidence_MK=torch.cat(confidence, 1)
    )


class _Draft:
    """One pass over a batch of blocks; the leading dimensions [M, K] of a block stand where the backbone has [B, T]."""

    def __init__(self, config: ModelConfig, weights: Weights, numerics: Numerics, options: Options) -> None:
        self.config = config
        self.router = msgspec.structs.replace(
            config,
            n_routed_experts=config.dspark_n_routed_experts,
            num_experts_per_tok=config.dspark_num_experts_per_tok,
        )
        self.weights, self.n, self.options, self.f = weights, numerics, options, options.functions
        self.frequencies = model.rope_frequencies(config, compressed=False)
        self.routes: list[Tensor] = []

    def run(self, features_BTG: Tensor, anchors: Anchors, documents_BT: Tensor | None) -> Block:
        c, n, f = self.config, self.n, self.f
        batch, total = features_BTG.shape[:2]
        device = features_BTG.device
        if documents_BT is None:
            documents_BT = torch.zeros((batch, total), dtype=torch.int64, device=device)
        first = first_rows(documents_BT)
        rows = torch.arange(total, device=device)
        context_table = rope_table(self.frequencies, rows - first)
        mx = self._norm(self._linear(features_BTG, "mtp.0.main_proj.weight"), "mtp.0.main_norm.weight")

        start_M = first[anchors.sequence, anchors.position - 1]
        position_MK = (anchors.position - start_M)[:, None] + torch.arange(c.dspark_block_size, device=device)
        table = rope_table(self.frequencies, position_MK)
        row_MW = anchors.position[:, None] + torch.arange(-c.sliding_window, 0, device=device)
        seen = torch.cat((row_MW >= start_M[:, None], torch.ones_like(position_MK, dtype=torch.bool)), 1)
        context_MW = anchors.sequence[:, None] * total + row_MW.clamp(min=0)

        ids = torch.full_like(position_MK, c.dspark_noise_token_id)
        ids[:, 0] = anchors.token
        embedded = self.weights["embed.weight"][ids].to(n.values)
        streams = embedded.unsqueeze(-2).expand(*embedded.shape[:-1], c.hc_mult, c.hidden_size)
        read = torch.zeros(streams.shape[:-1], device=device)
        read[..., 0] = 1.0
        for layer in range(c.num_nextn_predict_layers):
            name = f"mtp.{layer}"
            context = self._key(mx, name, context_table).flatten(0, 1)
            context = context.index_select(0, context_MW.flatten()).unflatten(0, context_MW.shape)
            streams, read = self._layer(name, streams, read, context=context, seen=seen, table=table)
        y = f.collapse(streams, read, n)
        normed = self._norm(y, f"mtp.{c.num_nextn_predict_layers - 1}.norm.weight")
        base = contract(normed, self.weights["head.weight"], n, torch.float32)
        return Block(base_MKV=base, hidden_MKD=y, routes=tuple(self.routes))

    def _layer(
        self,
        name: str,
        streams: Tensor,
        read: Tensor,
        *,
        context: Tensor,
        seen: Tensor,
        table: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor]:
        """The backbone's schedule of one layer (section 2), no Engram."""
        f, n = self.f, self.n
        next_read, post, mix = self._coefficients(name, "attn", streams)
        x = self._norm(f.collapse(streams, read, n), f"{name}.attn_norm.weight")
        y = self._attention(name, x, context=context, seen=seen, table=table)
        streams, read = f.write_streams(y, streams, post, mix, n), next_read
        next_read, post, mix = self._coefficients(name, "ffn", streams)
        x = self._norm(f.collapse(streams, read, n), f"{name}.ffn_norm.weight")
        return f.write_streams(self._experts(name, x), streams, post, mix, n), next_read

    def _coefficients(self, name: str, site: str, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        parts = (self.weights[f"{name}.hc_{site}_{part}"] for part in ("fn", "base", "scale"))
        return self.f.hc_coefficients(streams, *parts, self.config, self.n)

    def _key(self, x: Tensor, name: str, table: tuple[Tensor, Tensor]) -> Tensor:
        """Keys [..., C] of context rows (from mx) or of a block (from its normed input)."""
        k = self._norm(self._linear(x, f"{name}.attn.wkv.weight"), f"{name}.attn.kv_norm.weight")
        k = self.f.rotate(k, table, self.n)
        return self.f.q8_window(k) if self.n.quantise_cache else k

    def _attention(
        self, name: str, x: Tensor, *, context: Tensor, seen: Tensor, table: tuple[Tensor, Tensor]
    ) -> Tensor:
        c, n, f, w = self.config, self.n, self.f, self.weights
        latent = self._norm(self._linear(x, f"{name}.attn.wq_a.weight"), f"{name}.attn.q_norm.weight")
        q = self._linear(latent, f"{name}.attn.wq_b.weight").unflatten(
            -1, (c.num_attention_heads, c.head_dim)
        )
        heads_table = (table[0].unsqueeze(-2), table[1].unsqueeze(-2))
        call = Attention(
            q_MKHC=f.rotate(q, heads_table, n),
            keys_MNC=torch.cat((context, self._key(x, name, table)), 1),
            seen_MN=seen,
            sink_H=w[f"{name}.attn.attn_sink"],
            numerics=n,
        )
        o = f.rotate(self.options.attend(call), f.inverse(heads_table), n)
        wo_a = w[f"{name}.attn.wo_a.weight"].unflatten(0, (c.o_groups, c.o_lora_rank))
        grouped = o.flatten(-2).unflatten(-1, (c.o_groups, -1))
        return self._linear(contract(grouped, wo_a, n, n.values).flatten(-2), f"{name}.attn.wo_b.weight")

    def _experts(self, name: str, x: Tensor) -> Tensor:
        c, n, w = self.config, self.n, self.weights
        gate, bias = w[f"{name}.ffn.gate.weight"], w[f"{name}.ffn.gate.bias"]
        ids, gates = self.f.route(x, gate, bias, self.router, n)
        self.routes.append(ids)
        call = ExpertCall(
            x_ND=quantise_input(x, n).flatten(0, 1),
            ids_NK=ids.flatten(0, 1),
            weights_NK=gates.flatten(0, 1),
            w1=w[f"{name}.ffn.experts.w1"],
            w3=w[f"{name}.ffn.experts.w3"],
            w2=w[f"{name}.ffn.experts.w2"],
            limit=c.swiglu_limit,
            numerics=n,
        )
        shared = (w[f"{name}.ffn.shared_experts.{part}.weight"] for part in ("w1", "w3", "w2"))
        routed = self.f.experts(call).unflatten(0, x.shape[:2])
        return (routed + self.f.shared_expert(x, *shared, c.swiglu_limit, n)).to(n.values)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return contract(quantise_input(x, self.n), self.weights[name], self.n, self.n.values)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return self.f.rms_norm(x, self.weights[name], self.config.rms_norm_eps, self.n)
