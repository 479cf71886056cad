"""Memory, planned: how many blocks of each cache group fit, and what the weights take, from the configuration alone.

Takes ModelConfig and EngineConfig; gives ``CacheBudget`` (what ``runner.build`` allocates) and ``report`` (what
``flashstep budget`` prints, with the reason for each figure). Opens no file and allocates nothing. Figures of weights are
those of the checkpoint as stored (spec/model.md 11), the image tower left out.
"""

import msgspec

from flashstep.cache.groups import CacheGroups
from flashstep.config.cache import HitPolicy
from flashstep.config.engine import EngineConfig
from flashstep.config.errors import ConfigError
from flashstep.config.model import MX_GROUP, WEIGHT_BLOCK, ModelConfig
from flashstep.step import MAX_IN_FLIGHT, rows_ahead

CACHED_WINDOW_SHARE = 4  # under EXACT one part in so many of what is left caches windows


class CacheBudget(msgspec.Struct, frozen=True, kw_only=True):
    """The cache groups of one engine in blocks and bytes, and the context length that they allow."""

    block_size: int
    num_blocks: int
    num_window_blocks: int
    block_bytes: int  # of one global block: compressed entries and index keys of all sources
    window_block_bytes: int  # of one window block: the records of all layers
    tail_bytes: int  # of all slots
    max_model_len: int
    live_window_blocks: (
        int  # what a full house needs; if there are fewer, requests wait; if more, they cache windows
    )

    @property
    def bytes(self) -> int:
        return (
            self.num_blocks * self.block_bytes
            + self.num_window_blocks * self.window_block_bytes
            + self.tail_bytes
        )


def plan_cache(model: ModelConfig, engine: EngineConfig) -> CacheBudget:
    """Divide ``engine.cache_bytes`` among the groups; ``ConfigError`` if one request of the wanted length does not fit.

    Tails first (a ring for each slot). Then windows: what decoding in every slot and two chunks in flight hold, and, when exact
    hits are cached, a quarter of the rest; never more than half of all. Global blocks get what is left.
    """
    groups, size = _groups(model, engine), engine.block_size
    wanted = engine.max_model_len or model.max_position_embeddings
    _check(model, engine)
    block_bytes = size * groups.global_bytes_per_pair // 2
    window_block_bytes = size * groups.window_bytes_per_token
    tail_bytes = engine.max_num_seqs * groups.tail_bytes_per_slot
    memory = engine.cache_bytes - tail_bytes
    per_request = -(-(groups.sliding_window + _rows_ahead(model, engine) - 1) // size) + 1
    chunk = min(engine.max_num_batched_tokens, wanted)
    live = engine.max_num_seqs * per_request + MAX_IN_FLIGHT * -(-chunk // size)
    least = per_request + 1
    windows = live
    if engine.enable_prefix_caching and engine.hit_policy is HitPolicy.EXACT:
        windows += max(memory - live * window_block_bytes, 0) // CACHED_WINDOW_SHARE // window_block_bytes
    windows = max(min(windows, memory // 2 // window_block_bytes), least)
    blocks = engine.num_blocks_override or _global_blocks(
        memory - windows * window_block_bytes, block_bytes, full=engine.max_num_seqs * -(-wanted // size)
    )
    length = min(wanted, blocks * size) if engine.max_model_len is None else wanted
    if length < 2 or blocks * size < length:
        need_blocks = -(-wanted // size)
        need = need_blocks * block_bytes + windows * window_block_bytes + tail_bytes
        give = (
            f"num_gpu_blocks_override at least {need_blocks}"
            if engine.num_blocks_override
            else f"kv_cache_memory_bytes at least {need} (it is {engine.cache_bytes})"
        )
        raise ConfigError(
            "the memory plan",
            [
                f"{blocks} global blocks of {size} tokens hold less than one request of max_model_len {wanted}; "
                f"give {give}, or lower max_model_len"
            ],
        )
    return CacheBudget(
        block_size=size,
        num_blocks=blocks,
        num_window_blocks=windows,
        block_bytes=block_bytes,
        window_block_bytes=window_block_bytes,
        tail_bytes=tail_bytes,
        max_model_len=length,
        live_window_blocks=live,
    )


def _groups(model: ModelConfig, engine: EngineConfig) -> CacheGroups:
    return CacheGroups.of(model, drafts=engine.speculative is not None)


def _rows_ahead(model: ModelConfig, engine: EngineConfig) -> int:
    drafts = engine.speculative
    return rows_ahead(0 if drafts is None else drafts.num_speculative_tokens or model.dspark_block_size)


def _global_blocks(memory: int, block_bytes: int, *, full: int) -> int:
    # a model without KV sources has blocks of no bytes: then a full house of the longest requests is enough
    return max(memory, 0) // block_bytes if block_bytes else full


def _check(model: ModelConfig, engine: EngineConfig) -> None:
    problems = []
    if engine.block_size < 2 or engine.block_size % 2:
        problems.append(f"block_size is {engine.block_size}; it must be even and at least 2")
    if engine.max_model_len is not None and engine.max_model_len > model.max_position_embeddings:
        problems.append(
            f"max_model_len is {engine.max_model_len}; the checkpoint's limit is {model.max_position_embeddings}"
        )
    if engine.max_num_seqs < 1 or engine.max_num_batched_tokens < 1:
        problems.append("max_num_seqs and max_num_batched_tokens must be at least 1")
    if problems:
        raise ConfigError("the memory plan", problems)


# ---- weights ---------------------------------------------------------------------------------------------------------


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank holds, where its view of the configuration does not say it: routed experts, parts of Engram projections."""

    experts: int
    draft_experts: int
    engram_parts: int = 1

    @classmethod
    def all_of(cls, model: ModelConfig) -> "Share":
        """A single rank holds everything."""
        return cls(experts=model.n_routed_experts, draft_experts=model.dspark_n_routed_experts)


def weight_bytes(model: ModelConfig, share: Share | None = None) -> dict[str, int]:
    """Bytes of the weights as stored, by group, of the checkpoint or of a rank's ``share``; the image tower is left out."""
    share = share or Share.all_of(model)
    layers = range(model.num_hidden_layers)
    hidden, bf16, f32 = model.hidden_size, 2, 4
    sources = [spec for spec in model.layers if spec.owns_entries]
    selectors = [spec for spec in model.layers if spec.owns_selection]
    compress = sum(
        hidden * model.head_dim * bf16 * (2 if spec.ratio == 2 else 1) + model.head_dim * bf16
        for spec in sources
    )
    select = (
        len(selectors)
        * (
            _fp8(model.index_n_heads * model.index_head_dim, model.q_lora_rank)
            + model.index_n_heads * hidden * bf16
        )
        + len(sources) * (model.index_head_dim * model.head_dim + model.index_head_dim) * bf16
    )
    engram_in = model.hash_columns * model.engram_head_dim
    return {
        "embedding and head": 2 * model.vocab_size * hidden * bf16 + hidden * bf16,
        "attention": len(layers) * _attention(model),
        "compressor and indexer": compress + select,
        "mHC": len(layers) * _mhc(model),
        "routers": len(layers) * model.n_routed_experts * (hidden * bf16 + 2 * f32),
        "routed experts": len(layers) * share.experts * _expert(model),
        "shared experts": len(layers) * _shared_expert(model),
        "Engram projections": len(model.engram_layer_ids)
        * (
            _fp8((model.hc_mult + 1) * hidden // share.engram_parts, engram_in)
            + 2 * model.hc_mult * hidden * bf16
        ),
        "Engram tables": sum(
            rows * (model.engram_head_dim + model.engram_head_dim // MX_GROUP)
            for rows in model.engram_num_embeddings
        ),
        "drafter": _draft(model, experts=share.draft_experts),
    }


def _fp8(out: int, into: int) -> int:
    return out * into + -(-out // WEIGHT_BLOCK) * -(-into // WEIGHT_BLOCK)


def _attention(m: ModelConfig) -> int:
    """Projections, norms (the layer's two as well) and sinks of one layer."""
    heads, rank = m.num_attention_heads, m.o_groups * m.o_lora_rank
    projections = (
        _fp8(m.q_lora_rank, m.hidden_size)
        + _fp8(heads * m.head_dim, m.q_lora_rank)
        + _fp8(m.head_dim, m.hidden_size)
        + _fp8(rank, heads * m.head_dim // m.o_groups)
        + _fp8(m.hidden_size, rank)
    )
    norms = 2 * (m.q_lora_rank + m.head_dim + 2 * m.hidden_size)
    return projections + norms + 4 * heads


def _mhc(m: ModelConfig) -> int:
    rows = m.hc_mult * (2 + m.hc_mult)
    return 2 * 4 * (rows * m.hc_mult * m.hidden_size + rows + 3)


def _expert(m: ModelConfig) -> int:
    """w1, w2 and w3 in FP4 with a scale for each 32 inputs."""
    values = 3 * m.hidden_size * m.moe_intermediate_size
    return values // 2 + values // MX_GROUP


def _shared_expert(m: ModelConfig) -> int:
    return 2 * _fp8(m.moe_intermediate_size, m.hidden_size) + _fp8(m.hidden_size, m.moe_intermediate_size)


def _draft(m: ModelConfig, *, experts: int) -> int:
    stages, hidden = m.num_nextn_predict_layers, m.hidden_size
    if stages == 0:
        return 0
    routers = m.dspark_n_routed_experts * (2 * hidden + 8)
    stage = _attention(m) + _mhc(m) + _shared_expert(m) + experts * _expert(m) + routers
    heads = 2 * (2 * m.vocab_size * m.dspark_markov_rank + hidden + m.dspark_markov_rank + 2 * hidden)
    return stages * stage + _fp8(hidden, len(m.dspark_target_layer_ids) * hidden) + heads


# ---- the printed plan ------------------------------------------------------------------------------------------------


def report(model: ModelConfig, engine: EngineConfig, share: Share | None = None) -> str:
    """The whole plan as text: weights (of a rank's ``share``), cache groups, what fits and why."""
    budget = plan_cache(model, engine)
    groups = _groups(model, engine)
    weights = weight_bytes(model, share)
    draft_layers = len(groups.window_layers) - model.num_hidden_layers
    drafting = f", {draft_layers} of them the drafter's" if draft_layers else ""
    size = budget.block_size
    global_bytes = budget.num_blocks * budget.block_bytes
    window_bytes = budget.num_window_blocks * budget.window_block_bytes
    entry = groups.compressed.bytes + groups.index_key.bytes
    ratios = " + ".join("1" if ratio == 1 else f"1/{ratio}" for _, ratio in groups.sources) or "0"
    lines = ["Weights as stored (image tower left out)"]
    lines += [_line(name, count) for name, count in weights.items() if count]
    lines += [_line("total", sum(weights.values()))]
    if model.engram_layer_ids:
        lines += [f"  The Engram tables are {engine.engram.told(engine.device)} (--engram-config)."]
    if weights["drafter"]:
        lines += [f"  The drafter is {'' if draft_layers else 'not '}loaded (--speculative-config)."]
    lines += [
        "",
        f"Cache: {engine.cache_bytes:,} bytes (--kv-cache-memory-bytes), blocks of {size} tokens",
    ]
    lines += [
        _line("global KV", global_bytes),
        f"    {groups.global_bytes_per_token:g} bytes a token = ({groups.compressed.bytes} compressed + {groups.index_key.bytes} "
        f"index keys = {entry}) x ({ratios}) over {len(groups.sources)} KV sources",
        f"    {budget.num_blocks:,} blocks of {budget.block_bytes:,} bytes = {budget.num_blocks * size:,} tokens",
        _line("windows", window_bytes),
        f"    {groups.window_bytes_per_token:,} bytes a token = {groups.window.bytes} x {len(groups.window_layers)} "
        f"layers{drafting}; a request holds the last {groups.sliding_window} tokens",
        f"    {budget.num_window_blocks:,} blocks of {budget.window_block_bytes:,} bytes; "
        f"{engine.max_num_seqs} requests and the chunks in flight hold {budget.live_window_blocks:,}, "
        f"the rest caches windows of prefixes ({engine.hit_policy.value} hits)",
        _line("tails", budget.tail_bytes),
        f"    {groups.tail_bytes_per_slot:,} bytes a slot x {engine.max_num_seqs} slots (open ratio-2 groups, fp32)",
        _line("total", budget.bytes),
        "",
        "What fits",
        f"  max_model_len {budget.max_model_len:,}{_why(model, engine, budget)}",
        f"  {_fitting(budget, engine)}",
    ]
    return "\n".join(lines)


def _line(name: str, count: int) -> str:
    return f"  {name:<24}{count:>20,} bytes  {count / (1 << 30):>10.3f} GiB"


def _why(model: ModelConfig, engine: EngineConfig, budget: CacheBudget) -> str:
    if engine.max_model_len is not None:
        return " (asked for)"
    if budget.max_model_len == model.max_position_embeddings:
        return " (the checkpoint's limit)"
    return f" (the cache holds no more; the checkpoint allows {model.max_position_embeddings:,})"


def _fitting(budget: CacheBudget, engine: EngineConfig) -> str:
    longest = budget.num_blocks * budget.block_size // budget.max_model_len
    mean = budget.num_blocks * budget.block_size // engine.max_num_seqs
    return (
        f"{longest:,} requests of full length at once, or {engine.max_num_seqs} (--max-num-seqs) of {mean:,} tokens each; "
        f"more wait or are preempted"
    )
