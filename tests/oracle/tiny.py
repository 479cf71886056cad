"""Configuration A of spec/model.md 13 and random weights for it, as the oracle takes them (dequantised, by released name)."""

import msgspec
import torch
from torch import Tensor

from flashstep.config.model import ModelConfig
from flashstep.config.presets import released

A_FIELDS = {
    "vocab_size": 512,
    "hidden_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "head_dim": 64,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 64,
    "o_groups": 2,
    "o_lora_rank": 32,
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "swiglu_limit": 1.0,
    "sliding_window": 8,
    "compress_ratios": (0, 0, 2, 2, 2, 1, 1, 1),
    "kv_source_layer_ids": (2, 4, 5),
    "index_source_layer_ids": (2, 4, 5, 6),
    "candidate_source_layer_id": 5,
    "candidate_topk_blocks": 3,
    "candidate_block_size": 4,
    "index_n_heads": 4,
    "index_head_dim": 32,
    "index_topk": 4,
    "engram_layer_ids": (1, 4),
    "engram_num_embeddings": (660, 864),
    "engram_n_heads": 2,
    "engram_head_dim": 32,
    "engram_vocab_size": 101,
    "engram_compressed_vocab_size": 400,
    "num_nextn_predict_layers": 0,
    "image_token_id": 510,
    "dspark_noise_token_id": 500,
}


def config_a(**changes: object) -> ModelConfig:
    """Configuration A without drafts; ``changes`` replace fields. The rules are checked."""
    base = released()
    scaling = msgspec.structs.replace(base.rope_scaling, factor=4, original_max_position_embeddings=256)
    config = msgspec.structs.replace(base, **{**A_FIELDS, "rope_scaling": scaling, **changes})
    assert not config.broken_rules(), config.broken_rules()
    return config


def token_map(config: ModelConfig) -> Tensor:
    """A fixed map of tokens to fewer compressed ids; the PAD's differs from its token id."""
    return (torch.arange(config.vocab_size) * 7 + 3) % config.engram_compressed_vocab_size


def random_weights(config: ModelConfig, seed: int) -> dict[str, Tensor]:
    """fp32 weights with no branch degenerate, rounded to bf16 as a checkpoint holds them."""
    generator = torch.Generator().manual_seed(seed)
    c = config
    d, heads, head = c.hidden_size, c.num_attention_heads, c.head_dim

    def normal(*shape: int, std: float | None = None) -> Tensor:
        std = shape[-1] ** -0.5 if std is None else std
        return (torch.randn(shape, generator=generator) * std).bfloat16().float()

    def scale(n: int) -> Tensor:
        return (1 + torch.randn(n, generator=generator) * 0.1).bfloat16().float()

    weights = {"embed.weight": normal(c.vocab_size, d, std=1.0), "head.weight": normal(c.vocab_size, d)}
    weights["norm.weight"] = scale(d)
    for layer in c.layers:
        w: dict[str, Tensor] = {"attn_norm.weight": scale(d), "ffn_norm.weight": scale(d)}
        for site in ("attn", "ffn"):
            w[f"hc_{site}_fn"] = normal(24, c.hc_mult * d)
            w[f"hc_{site}_base"] = normal(24, std=0.5)
            w[f"hc_{site}_scale"] = torch.rand(3, generator=generator) + 0.5
        w["attn.attn_sink"] = normal(heads, std=0.5)
        w["attn.wq_a.weight"], w["attn.q_norm.weight"] = normal(c.q_lora_rank, d), scale(c.q_lora_rank)
        w["attn.wq_b.weight"] = normal(heads * head, c.q_lora_rank, std=2 * c.q_lora_rank**-0.5)
        w["attn.wkv.weight"], w["attn.kv_norm.weight"] = normal(head, d), scale(head)
        w["attn.wo_a.weight"] = normal(c.o_groups * c.o_lora_rank, heads * head // c.o_groups)
        w["attn.wo_b.weight"] = normal(d, c.o_groups * c.o_lora_rank)
        if layer.owns_entries:
            w["attn.compressor.wkv.weight"], w["attn.compressor.norm.weight"] = normal(head, d), scale(head)
            w["attn.indexer.wk.weight"] = normal(c.index_head_dim, head)
            w["attn.indexer.k_norm.weight"] = scale(c.index_head_dim)
            if layer.ratio == 2:
                w["attn.compressor.wgate.weight"] = normal(head, d)
        if layer.owns_selection:
            w["attn.indexer.wq_b.weight"] = normal(c.index_n_heads * c.index_head_dim, c.q_lora_rank)
            w["attn.indexer.weights_proj.weight"] = normal(c.index_n_heads, d)
        if layer.has_engram:
            rows = c.engram_num_embeddings[c.engram_layer_ids.index(layer.index)]
            w["engram.embed.weight"] = normal(rows, c.engram_head_dim, std=1.0)
            w["engram.wkv.weight"] = normal((c.hc_mult + 1) * d, c.hash_columns * c.engram_head_dim)
            w["engram.q_weight"], w["engram.k_weight"] = (1 + normal(c.hc_mult, d, std=0.1) for _ in range(2))
        e, f = c.n_routed_experts, c.moe_intermediate_size
        w["ffn.gate.weight"], w["ffn.gate.bias"] = normal(e, d), normal(e, std=0.1)
        for name, shape in {"w1": (f, d), "w3": (f, d), "w2": (d, f)}.items():
            w[f"ffn.experts.{name}"] = normal(e, *shape, std=2 * shape[-1] ** -0.5)
            w[f"ffn.shared_experts.{name}.weight"] = normal(*shape, std=2 * shape[-1] ** -0.5)
        weights |= {f"layers.{layer.index}.{name}": tensor for name, tensor in w.items()}
    return weights
