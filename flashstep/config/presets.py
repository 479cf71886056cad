"""Model configurations that need no file: the released DeepSeek-V4.1-Flash, for plans and tests without its checkpoint.

Gives the mapping of its ``config.json`` and the ``ModelConfig`` read from it. The figures are the
publisher's (spec/model.md 1.1).
"""

from typing import Any

from flashstep.config.model import EXPECTED_QUANTIZATION, ModelConfig


def released_json() -> dict[str, Any]:
    """The nested ``config.json`` of DeepSeek-V4.1-Flash (text side; vision tensors are not served)."""
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "image_token_id": 129264,
        "quantization_config": dict(EXPECTED_QUANTIZATION),
        "text_config": {
            "model_type": "deepseek_v41_text",
            **_sizes(),
            **_attention(),
            **_experts(),
            **_engram(),
            **_draft(),
        },
    }


def released() -> ModelConfig:
    """DeepSeek-V4.1-Flash as published."""
    return ModelConfig.parse(released_json(), subject="the released configuration")


def _sizes() -> dict[str, Any]:
    return {
        "vocab_size": 129280,
        "hidden_size": 5120,
        "num_hidden_layers": 40,
        "hidden_act": "silu",
        "swiglu_limit": 10.0,
        "rms_norm_eps": 1e-20,
        "max_position_embeddings": 1048576,
        "tie_word_embeddings": False,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
    }


def _attention() -> dict[str, Any]:
    return {
        "num_attention_heads": 64,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 1280,
        "o_groups": 8,
        "o_lora_rank": 1024,
        "attention_bias": False,
        "rope_theta": 10000,
        "compress_rope_theta": 160000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 65536,
        },
        "sliding_window": 128,
        "compress_ratios": [0] * 2 + [2] * 18 + [1] * 20 + [0] * 3,
        "kv_source_layer_ids": [2, 8, 14, 20],
        "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
        "candidate_source_layer_id": 20,
        "candidate_topk_blocks": 2048,
        "candidate_block_size": 8,
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_topk": 512,
    }


def _experts() -> dict[str, Any]:
    return {
        "n_routed_experts": 384,
        "n_shared_experts": 1,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 2304,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
    }


def _engram() -> dict[str, Any]:
    return {
        "engram_layer_ids": [1, 14],
        "engram_num_embeddings": [384006168, 384016682],
        "engram_max_ngram_size": 4,
        "engram_vocab_size": 16000000,
        "engram_n_heads": 8,
        "engram_head_dim": 256,
        "engram_pad_token_id": 2,
        "engram_compressed_vocab_size": 99092,
    }


def _draft() -> dict[str, Any]:
    return {
        "num_nextn_predict_layers": 3,
        "dspark_block_size": 5,
        "dspark_noise_token_id": 128799,
        "dspark_target_layer_ids": [37, 38, 39],
        "dspark_markov_rank": 256,
        "dspark_n_routed_experts": 128,
        "dspark_num_experts_per_tok": 3,
    }
