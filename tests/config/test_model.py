"""The model configuration: every rule broken once, all problems told at once, real files accepted."""

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashstep.config.errors import ConfigError
from flashstep.config.model import ModelConfig, Role
from flashstep.config.presets import released, released_json
from tests.json_values import VALUES

VECTORS = Path(__file__).parents[3] / "shared" / "vectors" / "model"
RATIOS = released_json()["text_config"]["compress_ratios"]
Change = Callable[[dict[str, Any]], object]


def text(**values: Any) -> Change:
    return lambda data: data["text_config"].update(values)


def ratios(**places: int) -> Change:
    def change(data: dict[str, Any]) -> None:
        for place, value in places.items():
            data["text_config"]["compress_ratios"][int(place[1:])] = value

    return change


def without(*path: str) -> Change:
    def change(data: dict[str, Any]) -> None:
        for key in path[:-1]:
            data = data[key]
        del data[path[-1]]

    return change


def problems_of(*changes: Change) -> tuple[str, ...]:
    data = copy.deepcopy(released_json())
    for change in changes:
        change(data)
    with pytest.raises(ConfigError) as caught:
        ModelConfig.parse(data)
    return caught.value.problems


BROKEN: dict[str, tuple[Change, str]] = {
    "model type": (lambda d: d.update(model_type="deepseek_v4"), "serves only 'deepseek_v41'"),
    "no quantisation": (without("quantization_config"), "quantization_config is missing"),
    "other expert format": (
        lambda d: d["quantization_config"].update(expert_dtype="fp8"),
        "expert_dtype is 'fp8'",
    ),
    "other weight blocks": (
        lambda d: d["quantization_config"].update(weight_block_size=[128, 128]),
        "[128, 128]",
    ),
    "tied embeddings": (text(tie_word_embeddings=True), "embed and head are separate"),
    "unknown key": (text(num_hash_layers=3), "num_hash_layers is unknown"),
    "missing key": (without("text_config", "index_topk"), "text_config.index_topk is missing"),
    "missing id": (without("bos_token_id"), "bos_token_id is missing"),
    "wrong type": (text(hidden_size="5120"), "text_config.hidden_size"),
    "rope scaling field": (lambda d: d["text_config"]["rope_scaling"].update(mscale=1), "mscale"),
    "zero layers wide": (text(swiglu_limit=0), "swiglu_limit is 0"),
    "negative eps": (text(hc_eps=-1.0), "hc_eps is -1.0"),
    "activation": (text(hidden_act="gelu"), "hidden_act is 'gelu'"),
    "scoring": (text(scoring_func="sigmoid"), "scoring_func is 'sigmoid'"),
    "top-k method": (text(topk_method="greedy"), "topk_method is 'greedy'"),
    "top-k norm": (text(norm_topk_prob=False), "norm_topk_prob is False"),
    "attention bias": (text(attention_bias=True), "attention_bias is True"),
    "two KV heads": (text(num_key_value_heads=2), "num_key_value_heads is 2"),
    "two shared experts": (text(n_shared_experts=2), "n_shared_experts is 2"),
    "rope type": (lambda d: d["text_config"]["rope_scaling"].update(rope_type="linear"), "has 'yarn'"),
    "rope factor": (lambda d: d["text_config"]["rope_scaling"].update(factor=0.5), "factor >= 1"),
    "rope factor NaN": (
        lambda d: d["text_config"]["rope_scaling"].update(factor=math.nan),
        "a finite factor",
    ),
    "rope beta 0": (
        lambda d: d["text_config"]["rope_scaling"].update(beta_slow=0),
        "it needs 0 < beta_slow <= beta_fast",
    ),
    "rope betas swapped": (
        lambda d: d["text_config"]["rope_scaling"].update(beta_fast=1, beta_slow=32),
        "it needs 0 < beta_slow <= beta_fast",
    ),
    "rope base 1": (text(compress_rope_theta=1), "compress_rope_theta is 1.0; it must exceed 1"),
    "infinite": (text(rope_theta=math.inf), "rope_theta is inf; it must be positive and finite"),
    "context of one": (text(max_position_embeddings=1), "max_position_embeddings is 1"),
    "more active than experts": (text(num_experts_per_tok=385), "exceeds n_routed_experts (384)"),
    "hidden width": (text(hidden_size=5121), "hidden_size is 5121"),
    "head width": (text(head_dim=500), "head_dim is 500"),
    "q rank": (text(q_lora_rank=1281), "q_lora_rank is 1281"),
    "expert width": (text(moe_intermediate_size=2305), "moe_intermediate_size is 2305"),
    "output rank": (text(o_lora_rank=3), "o_groups * o_lora_rank is 24"),
    "index width": (text(index_head_dim=100), "index_head_dim is 100"),
    "engram width": (text(engram_head_dim=250), "engram_head_dim is 250"),
    "odd rope": (text(qk_rope_head_dim=63), "qk_rope_head_dim is 63"),
    "rope wider than head": (text(qk_rope_head_dim=514), "at most head_dim (512)"),
    "rope wider than index head": (text(qk_rope_head_dim=160), "exceeds index_head_dim (128)"),
    "output groups": (text(o_groups=7), "not a multiple of o_groups (7)"),
    "ratios too few": (lambda d: d["text_config"]["compress_ratios"].pop(), "has 42 entries; it needs 43"),
    "ratio 4": (ratios(_5=4), "compress_ratios[5] is 4"),
    "compressing draft": (ratios(_41=1), "compress_ratios[41] is 1; draft layers"),
    "sources unordered": (
        text(kv_source_layer_ids=[8, 2, 14, 20]),
        "kv_source_layer_ids [8, 2, 14, 20] must be strictly",
    ),
    "index sources doubled": (text(index_source_layer_ids=[2, 8, 8, 14, 20]), "must be strictly ascending"),
    "source far below 0": (
        text(kv_source_layer_ids=[-44, 2, 8, 14, 20]),
        "kv_source_layer_ids names layer -44",
    ),
    "window-only source": (text(kv_source_layer_ids=[1, 2, 8, 14, 20]), "kv_source_layer_ids names layer 1"),
    "source out of range": (
        text(index_source_layer_ids=[2, 8, 14, 20, 99]),
        "index_source_layer_ids names layer 99",
    ),
    "source without index": (
        text(index_source_layer_ids=[2, 8, 14, 20][:3]),
        "layer 20 is a KV source but not",
    ),
    "no source before": (
        text(kv_source_layer_ids=[8, 14, 20], index_source_layer_ids=[8, 14, 20]),
        "no KV source at or",
    ),
    "source of another ratio": (
        text(kv_source_layer_ids=[2, 8, 14]),
        "has ratio 1 but its KV source 14 has 2",
    ),
    "candidate without sources": (
        text(compress_ratios=[0] * 43, kv_source_layer_ids=[], index_source_layer_ids=[]),
        "candidate_source_layer_id needs a KV source",
    ),
    "top-k": (text(index_topk=0), "index_topk is 0"),
    "index heads": (text(index_n_heads=0), "index_n_heads is 0"),
    "candidate no source": (text(candidate_source_layer_id=21), "is not one of kv_source_layer_ids"),
    "candidate too early": (text(candidate_source_layer_id=14), "KV sources [20] follow candidate source 14"),
    "candidate blocks": (text(candidate_topk_blocks=0), "must be positive"),
    "candidate pool": (text(candidate_topk_blocks=64), "the candidate pool (64 blocks x 8) is below"),
    "engram unordered": (
        text(engram_layer_ids=[14, 1]),
        "engram_layer_ids [14, 1] must be strictly ascending",
    ),
    "engram out of range": (text(engram_layer_ids=[1, 40]), "engram_layer_ids names layer 40"),
    "engram counts": (text(engram_num_embeddings=[5]), "one entry for each of engram_layer_ids"),
    "engram n-gram": (text(engram_max_ngram_size=1), "engram_max_ngram_size >= 2"),
    "engram map": (text(engram_compressed_vocab_size=129281), "engram_compressed_vocab_size is 129281"),
    "eos outside": (lambda d: d.update(eos_token_id=129280), "eos_token_id is 129280"),
    "engram pad outside": (text(engram_pad_token_id=-1), "engram_pad_token_id is -1"),
    "noise outside": (text(dspark_noise_token_id=200000), "dspark_noise_token_id is 200000"),
    "negative drafts": (text(num_nextn_predict_layers=-1, compress_ratios=RATIOS[:39]), "negative"),
    "draft target": (text(dspark_target_layer_ids=[40]), "dspark_target_layer_ids names layer 40"),
    "no draft target": (text(dspark_target_layer_ids=[]), "dspark_target_layer_ids is empty"),
    "draft block": (text(dspark_block_size=0), "dspark_block_size and dspark_markov_rank"),
    "draft experts": (text(dspark_num_experts_per_tok=129), "dspark_num_experts_per_tok must lie in"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_each_rule_is_refused_in_a_sentence(name: str) -> None:
    change, sentence = BROKEN[name]
    assert any(sentence in problem for problem in problems_of(change)), problems_of(change)


def test_output_group_width() -> None:
    change = text(head_dim=48, num_attention_heads=2, qk_rope_head_dim=16, o_groups=2, o_lora_rank=32)
    assert any("head_dim / o_groups" in problem for problem in problems_of(change))


def test_all_problems_are_told_at_once() -> None:
    found = problems_of(
        text(index_topk=0), text(hidden_act="gelu"), text(engram_layer_ids=[14, 1]), ratios(_5=4)
    )
    for sentence in ("index_topk is 0", "hidden_act", "engram_layer_ids", "compress_ratios[5]"):
        assert any(sentence in problem for problem in found)


def test_all_reading_problems_are_told_at_once() -> None:
    found = problems_of(
        text(a=1, b=2, hidden_size="x"), without("text_config", "index_topk"), without("pad_token_id")
    )
    assert len(found) == 5


def test_text_config_must_be_there() -> None:
    with pytest.raises(ConfigError, match="no text_config"):
        ModelConfig.parse({"model_type": "deepseek_v41"})


def test_file_problems_are_sentences(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"does not exist; a checkpoint folder holds a config\.json"):
        ModelConfig.read(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        ModelConfig.read(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not JSON"):
        ModelConfig.read(tmp_path / "config.json")


def test_released_roles() -> None:
    config = released()
    roles = [layer.role for layer in config.layers]
    assert [i for i, role in enumerate(roles) if role is Role.FULL] == [2, 8, 14, 20]
    assert [i for i, role in enumerate(roles) if role is Role.REINDEX] == [24, 28, 32, 36]
    assert roles[:2] == [Role.WINDOW] * 2
    assert config.layers[39].kv_source == 20 and config.layers[39].index_source == 36
    assert [layer.index for layer in config.layers if layer.uses_candidates] == [24, 28, 32, 36]
    assert config.hash_columns == 24 and config.last_kv_source == 20


def test_huggingface_spelling_of_the_engram_pad() -> None:
    data = released_json()
    data["text_config"]["engram_pad_id"] = data["text_config"].pop("engram_pad_token_id")
    assert ModelConfig.parse(data) == released()


@pytest.mark.skipif(not VECTORS.is_dir(), reason="../shared is not beside this checkout")
@pytest.mark.parametrize("name", ["a_base", "d_release_like"])
def test_golden_checkpoints_are_accepted(name: str) -> None:
    config = ModelConfig.read(VECTORS / name / "ckpt")
    stored = json.loads((VECTORS / name / "ckpt" / "config.json").read_text())["text_config"]
    assert config.hidden_size == stored["hidden_size"] and len(config.layers) == stored["num_hidden_layers"]


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_value_of_any_key_is_a_model_or_refused_in_sentences(data: st.DataObject) -> None:
    config = json.loads(json.dumps(released_json()))
    where = data.draw(st.sampled_from([config, config["text_config"]]))
    for _ in range(data.draw(st.integers(1, 3))):
        where[data.draw(st.sampled_from(sorted(where)))] = data.draw(VALUES)
    try:
        made = ModelConfig.parse(config)
    except ConfigError as error:
        assert error.problems and all(error.problems)
    else:
        assert made.broken_rules() == []
