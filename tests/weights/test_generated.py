"""Weights made on the spot: the same at each asking, valid bytes, of order one, and those of a rank where a layout is given."""

import math

import pytest
import torch

from flashstep.engram.hash import EngramHash, smaller_tables
from flashstep.parallel.layout import Layout
from flashstep.quant.tensor import QuantTensor
from flashstep.weights.generated import BINADES, GeneratedWeights
from flashstep.weights.names import Kind, parameters
from tests.model.tiny import cached_configuration

CPU = torch.device("cpu")


def test_all_parameters_are_there_in_their_form_and_repeatable() -> None:
    model = cached_configuration("A")
    weights = GeneratedWeights(model, device=CPU, seed=3, drafts=True)
    wanted = {name: p for name, p in parameters(model).items() if p.kind is not Kind.ENGRAM_TABLE}
    assert list(weights) == list(wanted) and len(weights) == len(wanted)
    for name, parameter in wanted.items():
        value, again = weights[name], weights[name]
        assert tuple(value.shape) == parameter.shape
        if isinstance(value, QuantTensor):
            assert isinstance(again, QuantTensor)
            assert torch.equal(value.data.view(torch.uint8), again.data.view(torch.uint8))
            values, fan_in = value.dequantise(), parameter.shape[-1]
            assert values.isfinite().all()
            if value.scale.numel() > 500:  # of fewer scales the largest may be missing
                assert 0.4 < values.std() * math.sqrt(fan_in) < 2.5, name
            assert int(value.scale.max()) - int(value.scale.min()) <= BINADES
        else:
            assert isinstance(again, torch.Tensor) and torch.equal(value, again) and value.isfinite().all()
    assert not any(name.startswith("mtp.") for name in GeneratedWeights(model, device=CPU))


def test_other_seeds_other_weights_and_progress_is_told() -> None:
    model, told = cached_configuration("A"), []
    first = GeneratedWeights(model, device=CPU, seed=1, progress=lambda done, of: told.append((done, of)))
    second = GeneratedWeights(model, device=CPU, seed=2)
    one, other = first["embed.weight"], second["embed.weight"]
    assert isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and not torch.equal(one, other)
    assert told == [(1, len(first))]


@pytest.mark.parametrize("text", ["tp2:1", "dep2:0"])
def test_a_rank_has_its_part(text: str) -> None:
    layout, model = Layout.parse(text), cached_configuration("A")
    view = layout.view(model)
    weights = GeneratedWeights(view, device=CPU, layout=layout, drafts=True)
    whole = GeneratedWeights(model, device=CPU, drafts=True)
    experts = "layers.0.ffn.experts.w1"
    held = {
        name: math.prod(weights[name].shape)
        for name in (experts, "layers.0.ffn.gate.weight", "layers.0.attn.wq_b.weight")
    }
    all_of = {name: math.prod(whole[name].shape) for name in held}
    if layout.kind == "tp":
        assert [held[name] * 2 // all_of[name] for name in held] == [1, 2, 1]
    else:
        assert [held[name] * 2 // all_of[name] for name in held] == [1, 2, 2]


def test_smaller_tables_are_tables_that_the_hash_accepts() -> None:
    model = smaller_tables(cached_configuration("A"), rows=300)
    EngramHash(model)  # refuses sizes that are not the sums of its primes
    assert 200 < model.engram_num_embeddings[0] < 700
    planes = GeneratedWeights(model, device=CPU).engram(1)
    assert planes.values_RD.shape == (model.engram_num_embeddings[0], model.engram_head_dim)
    assert planes.values_RD.float().isfinite().all()
