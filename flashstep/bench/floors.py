"""Physical floors of a step on one H200: what each part must move and compute, and how long that takes at best.

A part's floor is the longer of its bytes at the memory's rate and its arithmetic at the matrix units' rate; a step's is the sum
of its parts', since they run one after another. Launches, synchronisation, softmax, selection and collectives are not in it.
Restates the project's specification (spec/floors.py: formulas, rates, and the records of the peers' caches that its goals are set
by); tests pin it to the numbers printed there. Takes the whole model's configuration and a layout; knows no device.
"""

from collections.abc import Iterable, Sequence

import msgspec

from flashstep.config.model import ModelConfig, Role
from flashstep.parallel.layout import Layout

FP4 = 0.5 + 1 / 32  # bytes of an MXFP4 value: a nibble, and a scale for 32
FP8 = 1.0 + 1 / 1024  # bytes of a value in 32 x 32 blocks
BF16, F32 = 2, 4
RECORD, KEY_RECORD = 584, 132  # bytes of a KV record and of an index key


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """What a device sustains: bytes and operations a second. The defaults are one H200 SXM's (spec/performance.md 0)."""

    memory: float = 4.3e12
    bf16: float = 790e12
    fp8: float = 1.5e15
    tf32: float = 380e12


H200 = Rates()


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a step: ``seconds`` is its floor."""

    name: str
    bytes: float
    flops: float = 0.0
    rate: float = H200.bf16

    @property
    def seconds(self) -> float:
        return max(self.bytes / H200.memory, self.flops / self.rate)


def total(parts: Iterable[Part]) -> float:
    """Seconds of ``parts``, one after another."""
    return sum(part.seconds for part in parts)


class Sizes:
    """Numbers of parameters of ``model``'s matrices, and how ``layout`` divides them."""

    def __init__(self, model: ModelConfig, layout: Layout) -> None:
        m, d = model, model.hidden_size
        self.model, self.layout = model, layout
        self.tp, self.ep = layout.tensor_parts, layout.expert_parts
        self.layers = m.num_hidden_layers
        self.heads = m.num_attention_heads // self.tp
        channels = m.num_attention_heads * m.head_dim
        self.down_q, self.key = d * m.q_lora_rank, d * m.head_dim
        self.up_q = m.q_lora_rank * channels
        self.out_a = channels // m.o_groups * m.o_groups * m.o_lora_rank
        self.out_b = m.o_groups * m.o_lora_rank * d
        self.attention = self.down_q + self.key + (self.up_q + self.out_a + self.out_b) / self.tp
        self.expert = 3 * d * m.moe_intermediate_size
        self.site = m.hc_mult * (m.hc_mult + 2) * m.hc_mult * d
        self.engram_in = m.hash_columns * m.engram_head_dim
        self.engram_out = d * (m.hc_mult + 1)
        self.engram = self.engram_in * self.engram_out
        self.index_queries = m.q_lora_rank * m.index_n_heads * m.index_head_dim
        self.index_weights = d * m.index_n_heads
        self.index_key = m.head_dim * m.index_head_dim
        self.candidates = m.candidate_topk_blocks * m.candidate_block_size
        self.head = m.vocab_size * d
        self.sources = [s for s in m.layers if s.role is Role.FULL]
        self.selectors = [s for s in m.layers if s.owns_selection]
        # a key projection a source, and the gate beside it where pairs are pooled
        self.pooled = sum(2 if s.ratio == 2 else 1 for s in self.sources)

    def touched(self, rows: int) -> float:
        """Local experts that ``rows`` rows of each rank are expected to touch, with uniform routing."""
        m = self.model
        part = m.n_routed_experts // self.ep
        copies = self.layout.local_experts(m.n_routed_experts) - part
        if copies == 0:
            return distinct(part, m.n_routed_experts, m.num_experts_per_tok, rows * self.ep)
        return distinct(part - copies, m.n_routed_experts, m.num_experts_per_tok, rows * self.ep) + distinct(
            2 * copies, m.n_routed_experts, m.num_experts_per_tok / 2, rows * self.ep
        )


def distinct(local: int, experts: int, count: float, rows: int) -> float:
    """How many of ``local`` experts are touched by ``rows`` rows that choose ``count`` of ``experts`` each."""
    return local * (1 - (1 - count / experts) ** rows)


def decode(model: ModelConfig, layout: Layout, *, requests: int, rows: int, context: int) -> list[Part]:
    """The target's part of a decoding step: ``requests`` on this rank (a tensor-parallel group's), ``rows`` each."""
    s, m = Sizes(model, layout), model
    total_rows, d, count = requests * rows, m.hidden_size, m.num_experts_per_tok
    record_bytes = attended = 0.0
    for spec in m.layers:
        chosen = min(m.index_topk, context // spec.ratio) if spec.ratio else 0
        record_bytes += requests * (min(context, m.sliding_window) + rows - 1 + chosen) * RECORD
        attended += total_rows * (min(context, m.sliding_window) + chosen) * s.heads * m.head_dim * 4
    scanned = _scanned(s, context)
    projections = (
        len(s.selectors) * (s.index_queries + s.index_weights)
        + len(s.sources) * s.index_key
        + s.pooled * s.key
    )
    weights = (
        len(s.selectors) * (s.index_queries * FP8 + s.index_weights * BF16)
        + (len(s.sources) * s.index_key + s.pooled * s.key) * BF16
    )
    engrams = len(m.engram_layer_ids)
    streams = 2 * s.layers * total_rows * (2 * m.hc_mult * d + 2 * d) * BF16
    return [
        Part(
            name="attention linears",
            bytes=s.layers * s.attention * FP8,
            flops=2 * s.layers * s.attention * total_rows,
            rate=H200.fp8,
        ),
        Part(
            name="routed experts",
            bytes=s.layers * s.touched(total_rows) * s.expert * FP4 / s.tp,
            flops=2 * s.layers * total_rows * count * s.expert / s.tp,
            rate=H200.fp8,
        ),
        Part(
            name="shared expert",
            bytes=s.layers * s.expert * FP8 / s.tp,
            flops=2 * s.layers * total_rows * s.expert / s.tp,
            rate=H200.fp8,
        ),
        Part(
            name="router",
            bytes=s.layers * m.n_routed_experts * d * BF16,
            flops=2 * s.layers * m.n_routed_experts * d * total_rows,
            rate=H200.tf32,
        ),
        Part(
            name="mHC weights",
            bytes=2 * s.layers * s.site * F32,
            flops=4 * s.layers * s.site * total_rows,
            rate=H200.tf32,
        ),
        Part(name="mHC streams", bytes=streams),
        Part(name="sparse attention", bytes=record_bytes, flops=attended),
        Part(name="indexer projections", bytes=weights, flops=2 * total_rows * projections),
        Part(
            name="indexer scan",
            bytes=requests * scanned * KEY_RECORD,
            flops=total_rows * scanned * 2 * m.index_n_heads * m.index_head_dim,
            rate=H200.fp8,
        ),
        Part(
            name="Engram projections",
            bytes=engrams * s.engram * FP8 / s.tp,
            flops=2 * engrams * total_rows * s.engram / s.tp,
            rate=H200.fp8,
        ),
        Part(name="head", bytes=s.head * BF16 / s.tp, flops=2 * total_rows * s.head / s.tp),
    ]


def _scanned(s: Sizes, context: int) -> int:
    """Index keys that one row's scores of all layers need: behind the candidate source only the candidates."""
    keys = 0
    for spec in s.selectors:
        entries = context // spec.ratio
        keys += min(entries, s.candidates) if spec.uses_candidates else entries
    return keys


def draft(model: ModelConfig, layout: Layout, *, requests: int, rows: int) -> list[Part]:
    """The draft's part of a decoding step: a block a request, context records of ``rows`` rows each, and the Markov chain."""
    s, m = Sizes(model, layout), model
    stages, block, d = m.num_nextn_predict_layers, m.dspark_block_size, m.hidden_size
    places, total_rows = requests * block, requests * rows
    features = len(m.dspark_target_layer_ids) * d * d
    divided = (s.up_q + s.out_a + s.out_b + s.expert) / s.tp
    local = m.dspark_n_routed_experts // s.ep
    touched = distinct(local, m.dspark_n_routed_experts, m.dspark_num_experts_per_tok, places * s.ep)
    markov = m.vocab_size * m.dspark_markov_rank
    seen = m.sliding_window + block
    return [
        Part(
            name="draft linears",
            bytes=(features + stages * (s.down_q + s.key + divided)) * FP8,
            flops=2
            * (
                features * total_rows
                + stages * (s.down_q + s.key) * (total_rows + places)
                + stages * divided * places
            ),
            rate=H200.fp8,
        ),
        Part(
            name="draft routed experts",
            bytes=stages * touched * s.expert * FP4 / s.tp,
            flops=2 * stages * places * m.dspark_num_experts_per_tok * s.expert / s.tp,
            rate=H200.fp8,
        ),
        Part(
            name="draft mHC, router, records",
            bytes=2 * stages * s.site * F32
            + stages * m.dspark_n_routed_experts * d * BF16
            + stages * requests * seen * RECORD,
            flops=stages * places * seen * s.heads * m.head_dim * 4,
        ),
        Part(name="draft head", bytes=s.head * BF16 / s.tp, flops=2 * places * s.head / s.tp),
        Part(name="Markov head", bytes=block * markov * BF16 / s.tp, flops=2 * places * markov / s.tp),
    ]


def prefill(model: ModelConfig, layout: Layout, *, rows: int, context: int, ends: bool) -> list[Part]:
    """A piece of ``rows`` prompt tokens behind ``context``, under bounded replay.

    Layers up to the last KV source on all rows, that source's records for all, and, where the prompt ``ends``, the layers from it
    on for the last window, and one row's logits.
    """
    s, m, d = Sizes(model, layout), model, model.hidden_size
    last = m.last_kv_source
    if last is None:
        return _layers(s, range(s.layers), rows, rows, context)
    parts = _layers(s, range(last), rows, rows, context)
    parts.append(
        Part(
            name="last source's records",
            bytes=2 * s.key * BF16
            + s.site * F32
            + rows * ((2 * m.hc_mult * d + 2 * d) * BF16 + 2 * d * BF16 + RECORD + KEY_RECORD),
            flops=2 * rows * (2 * s.key + s.index_key + s.site),
        )
    )
    if ends:
        parts += _layers(s, range(last, s.layers), min(m.sliding_window, rows), rows, context)
        parts.append(Part(name="head", bytes=s.head * BF16 / s.tp, flops=2 * s.head / s.tp))
    return parts


def _layers(s: Sizes, layers: range, rows: int, new: int, context: int) -> list[Part]:
    """Parts of ``layers`` on ``rows`` rows, the last of ``new`` behind ``context``."""
    m, d, n = s.model, s.model.hidden_size, len(layers)
    count = m.num_experts_per_tok
    inner = m.moe_intermediate_size / s.tp
    specs = [m.layers[layer] for layer in layers]
    selectors = [spec for spec in specs if spec.owns_selection]
    sources = [spec for spec in specs if spec.role is Role.FULL]
    if s.ep == 1:
        touched = distinct(m.n_routed_experts, m.n_routed_experts, count, rows)
    else:
        held = s.layout.local_experts(m.n_routed_experts)
        touched = distinct(held, m.n_routed_experts, count, rows * s.ep)
    seen = context + new / 2 if rows == new else context + new - rows / 2
    held = context + new
    record_bytes = attended = key_bytes = scored = 0.0
    for spec in specs:
        chosen = min(m.index_topk, seen / spec.ratio) if spec.ratio else 0
        attended += rows * (min(m.sliding_window, seen) + chosen) * s.heads * m.head_dim * 4
        record_bytes += min(held, rows + m.sliding_window) * RECORD
        record_bytes += min(held / spec.ratio, rows * m.index_topk) * RECORD if spec.ratio else 0
        if spec.owns_selection:
            within = spec.uses_candidates
            key_bytes += (min(held, rows * s.candidates) if within else held / spec.ratio) * KEY_RECORD
            scored += (
                rows
                * (min(seen, s.candidates) if within else seen / spec.ratio)
                * 2
                * m.index_n_heads
                * m.index_head_dim
            )
    parts = [
        Part(
            name="attention linears",
            bytes=n * s.attention * FP8 + n * rows * (2 * d + 4 * s.heads * m.head_dim) * BF16,
            flops=2 * n * s.attention * rows,
            rate=H200.fp8,
        ),
        Part(
            name="routed experts",
            bytes=n * touched * s.expert * FP4 / s.tp + n * rows * count * (d + 4 * inner + 4 * d),
            flops=2 * n * rows * count * s.expert / s.tp,
            rate=H200.fp8,
        ),
        Part(
            name="shared expert",
            bytes=n * s.expert * FP8 / s.tp + n * rows * (2 * d + 2 * inner) * BF16,
            flops=2 * n * rows * s.expert / s.tp,
            rate=H200.fp8,
        ),
        Part(
            name="router",
            bytes=n * (m.n_routed_experts + rows) * d * BF16,
            flops=2 * n * rows * m.n_routed_experts * d,
            rate=H200.tf32,
        ),
        Part(
            name="mHC",
            bytes=2 * n * s.site * F32 + 2 * n * rows * (2 * m.hc_mult * d + 2 * d) * BF16,
            flops=4 * n * rows * s.site,
            rate=H200.tf32,
        ),
        Part(name="sparse attention", bytes=record_bytes, flops=attended),
        Part(name="indexer scan", bytes=key_bytes, flops=scored, rate=H200.fp8),
    ]
    if selectors:
        projections = len(selectors) * (s.index_queries + s.index_weights) + len(sources) * (
            s.index_key + 2 * s.key
        )
        parts.append(
            Part(
                name="indexer projections",
                bytes=len(selectors) * (s.index_queries + rows * d * BF16) + len(sources) * s.key * F32,
                flops=2 * projections * rows,
            )
        )
    engrams = [spec for spec in specs if spec.has_engram]
    if engrams:
        parts.append(
            Part(
                name="Engram projections",
                bytes=len(engrams) * s.engram * FP8 / s.tp
                + len(engrams) * rows * (s.engram_in + s.engram_out) * BF16 / s.tp,
                flops=2 * len(engrams) * rows * s.engram / s.tp,
                rate=H200.fp8,
            )
        )
    return parts


def of_step(
    model: ModelConfig, layout: Layout, *, requests: int, rows: int, context: int, drafts: bool
) -> Sequence[Part]:
    """Target and draft of one decoding step."""
    parts = decode(model, layout, requests=requests, rows=rows, context=context)
    return [*parts, *draft(model, layout, requests=requests, rows=rows)] if drafts else parts
