"""The attention half of one foreign layer, from the excerpt that travels with the repository, and what must break it."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from flashstep.config.model import ModelConfig
from flashstep.quant import fp8_block
from oracle import model
from oracle.model import Functions, Options, Trace
from tests.oracle.golden import EXCERPT, as_mask, unpacked
from tests.oracle.tiny import config_a

LENGTH = 31


@pytest.fixture(scope="module")
def excerpt() -> dict[str, np.ndarray]:
    with np.load(EXCERPT) as arrays:
        return {key: arrays[key] for key in arrays.files}


def config_of_the_layer() -> ModelConfig:
    """a_base's layer 4 alone: Full, ratio 1, candidate source."""
    config = config_a(
        num_hidden_layers=1,
        vocab_size=8,
        sliding_window=16,
        compress_ratios=(1,),
        kv_source_layer_ids=(0,),
        index_source_layer_ids=(0,),
        candidate_source_layer_id=0,
        candidate_topk_blocks=4,
        index_topk=8,
        index_n_heads=32,
        engram_layer_ids=(),
        engram_num_embeddings=(),
        image_token_id=7,
    )
    scaling = msgspec.structs.replace(config.rope_scaling, original_max_position_embeddings=32)
    return msgspec.structs.replace(config, rope_scaling=scaling)


def weights_of(arrays: dict[str, np.ndarray], config: ModelConfig) -> dict[str, Tensor]:
    """The stored attention half, dequantised; what follows it in the layer is zero."""
    stored = {}
    for key, array in arrays.items():
        if "|" in key:
            name, dtype = key.split("|")
            stored[name] = torch.tensor(array).view(getattr(torch, dtype))
    weights = {}
    for name, tensor in stored.items():
        if tensor.dtype is torch.float8_e4m3fn:
            scale = stored[name.removesuffix("weight") + "scale"]
            weights[f"layers.0.{name}"] = fp8_block.dequantise(tensor, scale)
        elif not name.endswith(".scale"):
            weights[f"layers.0.{name}"] = tensor.float()
    d, f, e = config.hidden_size, config.moe_intermediate_size, config.n_routed_experts
    weights |= {name.replace("attn", "ffn"): t for name, t in weights.items() if "hc_attn" in name}
    weights |= {"layers.0.ffn_norm.weight": torch.ones(d), "norm.weight": torch.ones(d)}
    weights |= {"embed.weight": torch.zeros(8, d), "layers.0.ffn.gate.weight": torch.zeros(e, d)}
    weights["layers.0.ffn.gate.bias"] = torch.zeros(e)
    for name, shape in {"w1": (f, d), "w3": (f, d), "w2": (d, f)}.items():
        weights[f"layers.0.ffn.experts.{name}"] = torch.zeros(e, *shape)
        weights[f"layers.0.ffn.shared_experts.{name}.weight"] = torch.zeros(shape)
    return weights


def run(arrays: dict[str, np.ndarray], functions: Functions, config: ModelConfig | None = None) -> Trace:
    config = config or config_of_the_layer()
    streams = torch.tensor(arrays["in/h"]).view(torch.bfloat16)[None]
    read = torch.tensor(arrays["in/pre_mix"])[None]
    trace: Trace = {}
    with torch.inference_mode():
        model.forward(
            config,
            weights_of(arrays, config),
            torch.zeros(1, LENGTH, dtype=torch.int64),
            numerics=model.N2,
            options=Options(layer_inputs={0: (streams, read)}, logits=False, functions=functions),
            trace=trace,
        )
    return trace


def differences(arrays: dict[str, np.ndarray], trace: Trace) -> list[str]:
    """Which recorded values the trace does not reproduce bit for bit."""
    visible = trace["layers.0.index_scores"][0] > -torch.inf
    candidates = unpacked(arrays["out/candidates"], arrays["out/candidates_shape"]) & visible
    same = {
        "latent": torch.equal(trace["layers.0.latent"][0].float(), torch.tensor(arrays["out/latent"])),
        "attn_out": torch.equal(trace["layers.0.attn_out"][0].float(), torch.tensor(arrays["out/attn_out"])),
        "topk": torch.equal(trace["layers.0.selected"][0], as_mask(arrays["out/topk"], LENGTH)),
        "candidates": torch.equal(trace["layers.0.candidates"][0], candidates),
    }
    return [name for name, equal in same.items() if not equal]


def test_the_foreign_layer_bit_for_bit(excerpt: dict[str, np.ndarray]) -> None:
    assert differences(excerpt, run(excerpt, Functions())) == []


def no_sink(call: model.AttentionCall) -> Tensor:
    return model.attend(replace(call, sink_H=torch.full_like(call.sink_H, -torch.inf)))


def wide_window(call: model.AttentionCall) -> Tensor:
    return model.attend(replace(call, window=call.window + 1))


def narrow_window(call: model.AttentionCall) -> Tensor:
    return model.attend(replace(call, window=call.window - 1))


def no_rotation(table: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return torch.ones_like(table[0]), torch.zeros_like(table[1])


def unchanged(x: Tensor) -> Tensor:
    return x


def own_block_not_forced(scores: Tensor, newest: Tensor, config: ModelConfig) -> Tensor:
    return model.candidate_mask(scores, torch.full_like(newest, -1), config)


BROKEN: dict[str, Functions] = {
    "sink dropped": Functions(attend=no_sink),
    "window of one more": Functions(attend=wide_window),
    "window of one less": Functions(attend=narrow_window),
    "no inverse rotation": Functions(inverse=no_rotation),
    "rotation forward": Functions(inverse=lambda table: table),
    "Q8 window dropped": Functions(q8_window=unchanged),
    "QN4 entries dropped": Functions(qn4_entries=unchanged),
    "QN4 entries as MXFP4": Functions(qn4_entries=model.qm4),
    "QM4 index dropped": Functions(qm4_index=unchanged),
    "top-k of one more": Functions(select_topk=lambda scores, k: model.select_topk(scores, k + 1)),
    "newest block not forced": Functions(candidate_mask=own_block_not_forced),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_layer_does_not_pass(name: str, excerpt: dict[str, np.ndarray]) -> None:
    assert differences(excerpt, run(excerpt, BROKEN[name]))


def test_a_layer_without_yarn_does_not_pass(excerpt: dict[str, np.ndarray]) -> None:
    config = config_of_the_layer()
    plain = msgspec.structs.replace(config.rope_scaling, factor=1)
    assert differences(
        excerpt, run(excerpt, Functions(), msgspec.structs.replace(config, rope_scaling=plain))
    )
