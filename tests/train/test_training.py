"""The trainer: replaced functions mean what the oracle's do, gradients go where they should, losses fall."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

import train.functions
import train.step
from flashstep.config.model import ModelConfig
from flashstep.engram.token_map import TokenMap
from oracle import checkpoint
from oracle import model as oracle
from train.corpus import Corpus
from train.data import Packer, Source
from train.export import export
from train.fast import Sinkhorn, flex_union, tile_lists
from train.functions import no_compile
from train.index_loss import users
from train.shape import SMOKE, config_json
from train.step import Inputs, Trainer, sampled_rows, to_device

TOKENIZER = Path(__file__).parents[2] / "flashstep/tiny/tokenizer.json"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(TOKENIZER))


@pytest.fixture(scope="module")
def config(tokenizer: Tokenizer) -> ModelConfig:
    return ModelConfig.parse(config_json(tokenizer, SMOKE))


@pytest.fixture(scope="module")
def inputs(tokenizer: Tokenizer) -> Inputs:
    batch = Packer(Source(Corpus.builtin(), tokenizer, seed=2, short=True, row=384), 1).batch()
    return to_device(batch, sampled_rows(batch, 16, np.random.default_rng(0)), CPU)


def trainer(config: ModelConfig, tokenizer: Tokenizer, *, twins: bool) -> Trainer:
    token_map = torch.tensor(TokenMap.build(tokenizer).ids)
    return Trainer(config, token_map, seed=0, device=CPU, compile_=no_compile if twins else None)


@pytest.fixture(autouse=True)
def own_quantisers() -> object:
    """A trainer with twins replaces the oracle's quantisers; put them back."""
    kept = oracle.q8, oracle.qn4, oracle.qm4
    yield None
    oracle.q8, oracle.qn4, oracle.qm4 = kept


@pytest.mark.parametrize("quantised", [False, True])
def test_twins_compute_what_the_oracle_does(
    config: ModelConfig,
    tokenizer: Tokenizer,
    inputs: Inputs,
    quantised: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In fp32, where no rounding hides or makes a difference, but for a code that flips at a boundary."""
    for module in (train.functions, train.step):
        monkeypatch.setattr(module, "DENSE", dataclasses.replace(train.functions.DENSE, values=torch.float32))
        monkeypatch.setattr(
            module, "QUANTISED", dataclasses.replace(train.functions.QUANTISED, values=torch.float32)
        )
    plain = trainer(config, tokenizer, twins=False)
    total, _, trace = plain.loss(inputs, quantised=quantised)
    keys = ["attn.wq_b.weight", "hc_ffn_fn", "ffn.experts.w2", "embed.weight"]
    gradients = torch.autograd.grad(total, [plain.parameters.stacks[k] for k in keys])
    twin = trainer(config, tokenizer, twins=True)
    twin_total, _, twin_trace = twin.loss(inputs, quantised=quantised)
    twin_gradients = torch.autograd.grad(twin_total, [twin.parameters.stacks[k] for k in keys])
    last = f"layers.{config.num_hidden_layers - 1}.streams"
    error = (trace[last] - twin_trace[last]).norm() / trace[last].norm()
    assert error < (0.1 if quantised else 1e-5)
    if not quantised:
        assert torch.allclose(total, twin_total, rtol=1e-5)
        for a, b in zip(gradients, twin_gradients, strict=True):
            assert (a - b).norm() < 5e-3 * a.norm()


def test_sinkhorn_and_its_gradient() -> None:
    logits = torch.randn(20, 4, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(20, 4, 4, dtype=torch.float64)
    plain = oracle.sinkhorn(logits, 20, 1e-6)
    fast = Sinkhorn.apply(logits, 20, 1e-6)
    assert torch.allclose(plain, fast, atol=1e-14)
    (a,) = torch.autograd.grad((plain * weight).sum(), logits)
    (b,) = torch.autograd.grad((fast * weight).sum(), logits)
    assert (a - b).norm() < 1e-4 * a.norm()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("ratio", [0, 1, 2])
def test_flex_attention_masks_as_the_oracle_does(ratio: int) -> None:
    tokens, window = 256, 16
    entries = tokens // ratio if ratio else 0
    q, keys, sink = torch.randn(1, tokens, 4, 32), torch.randn(1, tokens + entries, 32), torch.randn(4)
    documents = torch.zeros(1, tokens, dtype=torch.int64)
    documents[0, 80:] = 1
    rows = torch.arange(tokens)
    first = torch.arange(entries) * max(ratio, 1)
    visible = (first + ratio - 1 <= rows[:, None]) & (documents[0, :, None] == documents[0, first])
    chosen = (visible & (torch.rand(tokens, entries) < 0.5))[None] if ratio else None
    for selected, seen in ((None, visible[None]), (chosen, chosen)) if ratio else ((None, None),):
        call = oracle.AttentionCall(
            layer=None, q_BTHC=q, window_k_BNC=keys[:, :tokens], entries_BJC=keys[:, tokens:] if ratio else None,  # ty: ignore[invalid-argument-type]
            selected_BTJ=seen, sink_H=sink, rows_T=rows, key_rows_N=rows, documents_BR=documents, window=window, dense=False,
            numerics=oracle.N0,
        )  # fmt: skip
        lists = tile_lists(tokens, entries, ratio or 1, CPU)
        got = flex_union(q, keys, sink, documents, selected, lists, ratio=ratio, window=window)
        assert torch.allclose(got, oracle.attend(call), atol=2e-6)


def test_the_index_loss_teaches_the_indexer_alone(
    config: ModelConfig, tokenizer: Tokenizer, inputs: Inputs
) -> None:
    t = trainer(config, tokenizer, twins=False)
    trace: oracle.Trace = {}
    t.forward(inputs, quantised=False, trace=trace)
    loss = t.index_loss(trace, inputs.rows)
    stacks = t.parameters.stacks
    keys = [k for k, s in stacks.items() if s.requires_grad]
    gradients = torch.autograd.grad(loss, [stacks[k] for k in keys], allow_unused=True)
    taught = {k for k, g in zip(keys, gradients, strict=True) if g is not None and g.abs().sum() > 0}
    assert taught == {k for k in keys if ".indexer." in k}


def test_targets_are_the_oracles_attention_mass(
    config: ModelConfig, tokenizer: Tokenizer, inputs: Inputs
) -> None:
    t = trainer(config, tokenizer, twins=False)
    trace: oracle.Trace = {}
    with torch.no_grad():
        t.forward(inputs, quantised=False, trace=trace)
    call = trace["layers.5.attention"]
    seen, _ = t.index_loss._seen(call, inputs.rows)
    got = t.index_loss._mass(call, inputs.rows, seen)
    want = oracle.attention_mass(call, slice(None))[0, inputs.rows[0]]
    assert (got[0] - want).abs().max() < 0.05, "bf16 logits against fp32 ones"
    assert users(config, 5) == [5, 6, 7] and users(config, 2) == [2, 3] and users(config, 6) == [6, 7]


@pytest.mark.parametrize("quantised", [False, True])
def test_training_lowers_the_loss(
    config: ModelConfig, tokenizer: Tokenizer, inputs: Inputs, quantised: bool
) -> None:
    t = trainer(config, tokenizer, twins=False)
    t.set_rate(0.5)
    losses = [float(t.step(inputs, quantised=quantised)[0]) for _ in range(6)]
    assert losses[-1] < 0.8 * losses[0], losses


def test_export_holds_the_fake_quantised_weights_bit_for_bit(
    config: ModelConfig, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    t = trainer(config, tokenizer, twins=False)
    assert export(t.parameters.packed(), tokenizer, tmp_path, smoke=True) == config
    loaded = checkpoint.load(tmp_path).weights
    expected = t.parameters.named(t.parameters.values(quantised=True))
    assert expected.keys() == loaded.keys()
    for name, value in expected.items():
        assert torch.equal(value.detach(), loaded[name]), name
    again = trainer(config, tokenizer, twins=False)
    again.parameters.take(loaded)
    for name, value in again.parameters.named(again.parameters.values(quantised=True)).items():
        assert torch.equal(value.detach(), loaded[name]), f"{name} changed when it was quantised again"
