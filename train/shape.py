"""The shape of the tiny model (and of the half-size one of the smoke run) as a released ``config.json``.

Takes a tokenizer, since the Engram token map decides ``engram_compressed_vocab_size``. Every branch of the architecture
occurs: both ratios, reuse, reindex, a candidate source that binds from 513 tokens on, Engram on two layers.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from flashstep.config.model import EXPECTED_QUANTIZATION, ModelConfig
from flashstep.engram.hash import bucket_primes
from flashstep.engram.token_map import TokenMap
from train.tokenizer import NOISE

TINY: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "head_dim": 64,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 128,
    "o_groups": 4,
    "o_lora_rank": 64,
    "n_routed_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "sliding_window": 64,
    "compress_ratios": [0, 0, 2, 2, 2, 1, 1, 1],
    "kv_source_layer_ids": [2, 4, 5],
    "index_source_layer_ids": [2, 4, 5, 6],
    "candidate_source_layer_id": 5,
    "candidate_topk_blocks": 64,
    "index_n_heads": 4,
    "index_head_dim": 64,
    "index_topk": 64,
    "engram_layer_ids": [1, 4],
    "engram_n_heads": 2,
    "engram_vocab_size": 2003,
    "dspark_target_layer_ids": [5, 6, 7],
}
SMOKE: dict[str, Any] = TINY | {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "q_lora_rank": 64,
    "o_groups": 2,
    "n_routed_experts": 4,
    "dspark_n_routed_experts": 4,
    "moe_intermediate_size": 64,
    "engram_vocab_size": 503,
    "index_topk": 16,
    "candidate_topk_blocks": 8,
}


def config_json(tokenizer: Tokenizer, shape: dict[str, Any] = TINY) -> dict[str, Any]:
    """The nested ``config.json`` of ``shape`` with this tokenizer."""
    text = {
        "model_type": "deepseek_v41_text",
        "vocab_size": tokenizer.get_vocab_size(),
        "num_key_value_heads": 1,
        "hidden_act": "silu",
        "swiglu_limit": 10.0,
        "rms_norm_eps": 1e-20,
        "attention_bias": False,
        "max_position_embeddings": 1_048_576,
        "rope_theta": 10_000,
        "compress_rope_theta": 160_000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 4096,
        },
        "n_shared_experts": 1,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "candidate_block_size": 8,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "engram_max_ngram_size": 4,
        "engram_head_dim": 32,
        "engram_pad_token_id": 2,
        "engram_num_embeddings": [0] * len(shape["engram_layer_ids"]),
        "engram_compressed_vocab_size": TokenMap.build(tokenizer).size,
        "num_nextn_predict_layers": 0,
        "dspark_block_size": 5,
        "dspark_noise_token_id": tokenizer.token_to_id(NOISE),
        "dspark_markov_rank": 64,
        "dspark_n_routed_experts": 8,
        "dspark_num_experts_per_tok": 2,
        **shape,
    }
    data = {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "image_token_id": tokenizer.token_to_id("<｜image｜>"),
        "quantization_config": dict(EXPECTED_QUANTIZATION),
        "text_config": text,
    }
    primes = bucket_primes(ModelConfig.parse(data))
    text["engram_num_embeddings"] = [sum(primes[layer]) for layer in shape["engram_layer_ids"]]
    return data


def with_draft(data: dict[str, Any], stages: int) -> dict[str, Any]:
    """``data`` (a nested ``config.json``) with ``stages`` draft layers, which read only their window."""
    text = data["text_config"]
    ratios = [*text["compress_ratios"][: text["num_hidden_layers"]], *[0] * stages]
    return data | {"text_config": text | {"num_nextn_predict_layers": stages, "compress_ratios": ratios}}


def write_config(folder: Path, data: dict[str, Any]) -> ModelConfig:
    """Write ``config.json`` below ``folder`` and read it back."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    return ModelConfig.read(folder)
