"""The tiny configurations A to G of spec/model.md 13, with random weights and token maps."""

import copy
import functools
from typing import Any

import torch
from torch import Tensor

from flashstep.config.model import ModelConfig
from flashstep.engram.hash import bucket_primes
from flashstep.engram.table import EngramTable
from flashstep.quant import mxfp8
from flashstep.quant.tensor import QuantTensor
from flashstep.weights.dummy import DummyWeights
from tests.model.checkpoints import assemble

ENVELOPE: dict[str, Any] = {
    "architectures": ["DeepseekV41ForCausalLM"],
    "model_type": "deepseek_v41",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "image_token_id": 510,
    "quantization_config": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [32, 32],
        "scale_fmt": "ue8m0",
        "expert_dtype": "fp4",
    },
}
A: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 64,
    "o_groups": 2,
    "o_lora_rank": 32,
    "hidden_act": "silu",
    "swiglu_limit": 1.0,
    "rms_norm_eps": 1e-20,
    "attention_bias": False,
    "max_position_embeddings": 4096,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 256,
    },
    "sliding_window": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "compress_ratios": [0, 0, 2, 2, 2, 1, 1, 1, 0, 0, 0],
    "kv_source_layer_ids": [2, 4, 5],
    "index_source_layer_ids": [2, 4, 5, 6],
    "candidate_source_layer_id": 5,
    "candidate_topk_blocks": 3,
    "candidate_block_size": 4,
    "index_n_heads": 4,
    "index_head_dim": 32,
    "index_topk": 4,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "engram_layer_ids": [1, 4],
    "engram_num_embeddings": [660, 864],
    "engram_max_ngram_size": 4,
    "engram_vocab_size": 101,
    "engram_n_heads": 2,
    "engram_head_dim": 32,
    "engram_pad_token_id": 2,
    "engram_compressed_vocab_size": 400,
    "num_nextn_predict_layers": 3,
    "dspark_block_size": 5,
    "dspark_noise_token_id": 500,
    "dspark_target_layer_ids": [5, 6, 7],
    "dspark_markov_rank": 32,
    "dspark_n_routed_experts": 4,
    "dspark_num_experts_per_tok": 2,
}
NO_DRAFT = {"num_nextn_predict_layers": 0}
NO_ENGRAM = {"engram_layer_ids": [], "engram_num_embeddings": []}
CHANGES: dict[str, dict[str, Any]] = {
    "A": {},
    "B": {
        **NO_DRAFT,
        **NO_ENGRAM,
        "num_hidden_layers": 6,
        "compress_ratios": [0] * 6,
        "kv_source_layer_ids": [],
        "index_source_layer_ids": [],
        "candidate_source_layer_id": -1,
    },
    "C": {
        **NO_DRAFT,
        **NO_ENGRAM,
        "num_hidden_layers": 6,
        "compress_ratios": [0, 1, 1, 1, 1, 1],
        "kv_source_layer_ids": [1],
        "index_source_layer_ids": [1, 3],
        "candidate_source_layer_id": -1,
    },
    "D": {
        **NO_DRAFT,
        **NO_ENGRAM,
        "num_hidden_layers": 6,
        "compress_ratios": [2, 2, 2, 2, 0, 0],
        "kv_source_layer_ids": [0, 2],
        "index_source_layer_ids": [0, 2],
        "candidate_source_layer_id": -1,
    },
    "E": {"candidate_source_layer_id": -1},
    "F": {"sliding_window": 128, "index_topk": 512, "candidate_topk_blocks": 160},
    "G": {
        "num_hidden_layers": 7,
        "compress_ratios": [0, 2, 2, 1, 1, 1, 1, 0, 0, 0],
        "kv_source_layer_ids": [1, 3],
        "index_source_layer_ids": [1, 3, 5],
        "candidate_source_layer_id": 3,
        "engram_layer_ids": [0],
        "engram_num_embeddings": [660],
        "dspark_target_layer_ids": [4, 5, 6],
    },
}


def configuration(name: str, **changes: Any) -> ModelConfig:
    """Configuration ``name`` with ``changes`` to its text_config."""
    return ModelConfig.parse(
        {**copy.deepcopy(ENVELOPE), "text_config": {**copy.deepcopy(A), **CHANGES[name], **changes}}
    )


def random_weights(
    config: ModelConfig, *, seed: int = 0, drafts: bool = False
) -> tuple[dict, dict[int, EngramTable]]:
    """Random weights and Engram tables of ``config``, the draft's weights if ``drafts``."""
    assert all(
        sum(p) == n for p, n in zip(bucket_primes(config).values(), config.engram_num_embeddings, strict=True)
    )
    return assemble(config, DummyWeights(config, seed).tensor, drafts=drafts)


def token_map(config: ModelConfig) -> Tensor:
    """int64 [vocabulary]: any map onto the compressed vocabulary that moves most ids."""
    return (torch.arange(config.vocab_size) * 7 + 3) % config.engram_compressed_vocab_size


def random_tokens(count: int, *, config: ModelConfig, seed: int = 0) -> list[int]:
    """Tokens with repeats, so that n-grams and scores meet again."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, min(80, config.vocab_size), (count,), generator=generator).tolist()


def oracle_weights(weights: dict, tables: dict[int, EngramTable], config: ModelConfig) -> dict[str, Tensor]:
    """What the oracle takes: dequantised values under the same names, Engram rows among them."""
    values = {n: w.dequantise() if isinstance(w, QuantTensor) else w for n, w in weights.items()}
    for layer, table in tables.items():
        data, scales = table.planes
        values[f"layers.{layer}.engram.embed.weight"] = mxfp8.dequantise(data, scales, dtype=torch.bfloat16)
    return values


cached_configuration = functools.cache(configuration)
