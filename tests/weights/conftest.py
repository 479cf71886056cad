"""A small checkpoint of every branch, written once; tests that damage it work on copies."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from flashstep.config.model import ModelConfig
from flashstep.weights.dummy import write_dummy

SHARD_BYTES = 400_000


def tiny_json(**changes: Any) -> dict[str, Any]:
    """Configuration A of spec/model.md 13 with fewer experts, as a nested config.json."""
    text = {
        "vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 1,
        "head_dim": 32, "qk_rope_head_dim": 16, "q_lora_rank": 32, "o_groups": 2, "o_lora_rank": 32, "hidden_act": "silu",
        "swiglu_limit": 1.0, "rms_norm_eps": 1e-20, "attention_bias": False, "max_position_embeddings": 4096,
        "rope_theta": 10000, "compress_rope_theta": 160000,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 4, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 256,
        },
        "sliding_window": 8, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc", "norm_topk_prob": True,
        "routed_scaling_factor": 1.5, "compress_ratios": [0, 0, 2, 2, 2, 1, 1, 1, 0, 0, 0],
        "kv_source_layer_ids": [2, 4, 5], "index_source_layer_ids": [2, 4, 5, 6], "candidate_source_layer_id": 5,
        "candidate_topk_blocks": 3, "candidate_block_size": 4, "index_n_heads": 4, "index_head_dim": 32, "index_topk": 4,
        "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "engram_layer_ids": [1, 4],
        "engram_num_embeddings": [660, 864], "engram_max_ngram_size": 4, "engram_vocab_size": 101, "engram_n_heads": 2,
        "engram_head_dim": 32, "engram_pad_token_id": 2, "engram_compressed_vocab_size": 50, "num_nextn_predict_layers": 3,
        "dspark_block_size": 5, "dspark_noise_token_id": 60, "dspark_target_layer_ids": [5, 6, 7],
        "dspark_markov_rank": 32, "dspark_n_routed_experts": 4, "dspark_num_experts_per_tok": 2,
    }  # fmt: skip
    return {
        "model_type": "deepseek_v41",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "image_token_id": 63,
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [32, 32],
            "scale_fmt": "ue8m0",
            "expert_dtype": "fp4",
        },
        "text_config": text | changes,
    }


@pytest.fixture(scope="session")
def config() -> ModelConfig:
    return ModelConfig.parse(tiny_json())


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dummy")
    write_dummy(folder, tiny_json(), seed=3, shard_bytes=SHARD_BYTES)
    return folder


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    """A copy that may be damaged."""
    return Path(shutil.copytree(written, tmp_path / "checkpoint"))


def weight_map(folder: Path) -> dict[str, str]:
    return json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]


def set_weight_map(folder: Path, places: dict[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
