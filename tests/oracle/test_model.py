"""The oracle's parts against the golden scalars of spec/model.md 6 and 13, and invariants of the whole."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from flashstep.config.model import ModelConfig
from flashstep.config.presets import released
from oracle import model
from oracle.model import Functions, Options, Trace
from tests.oracle.tiny import config_a, random_weights, token_map

LENGTH = 45


def ids_of(length: int, seed: int = 0, rows: int = 1) -> Tensor:
    return torch.randint(3, 500, (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return config_a()


@pytest.fixture(scope="module")
def weights(config: ModelConfig) -> dict[str, Tensor]:
    return random_weights(config, 1)


def logits(config: ModelConfig, weights: dict[str, Tensor], ids: Tensor, **more: object) -> Tensor:
    arguments = {"numerics": model.N2, "token_map": token_map(config), **more}
    output = model.forward(config, weights, ids, **arguments)
    assert output.logits_BTV is not None
    return output.logits_BTV


# ---- golden scalars -------------------------------------------------------------------------------------------------


def test_golden_yarn() -> None:
    w = model.rope_frequencies(released(), compressed=True)
    golden = {15: 3.6355386e-3, 16: 2.265625e-3, 20: 2.9697768e-4, 25: 5.3723127e-6, 31: 5.6805290e-7}
    for i, expected in golden.items():
        assert w[i].item() == pytest.approx(expected, rel=1e-6), i  # given as a fp32 pipeline has them
    main = model.rope_frequencies(released(), compressed=False)
    assert main.tolist() == pytest.approx([10000 ** (-2 * i / 64) for i in range(32)], rel=1e-7)


def test_golden_sinkhorn() -> None:
    rows = [[0.5, -1, 2, 0], [1, 0.25, -0.75, 0.5], [-0.5, 1.5, 0, 1], [0, 0, 0, 0]]
    expected = [
        [0.194238, 0.040232, 0.647623, 0.117906],
        [0.459817, 0.201621, 0.059446, 0.279115],
        [0.073688, 0.505421, 0.090384, 0.330506],
        [0.272256, 0.252725, 0.202546, 0.272472],
    ]
    got = model.sinkhorn(torch.tensor(rows, dtype=torch.float64), 20, 1e-6)
    assert (got - torch.tensor(expected)).abs().max() < 1e-6
    assert (got.sum(0) - 1).abs().max() < 1e-5  # the last step is a column's


def test_golden_router_scores() -> None:
    config = config_a(n_routed_experts=4, num_experts_per_tok=4, routed_scaling_factor=1.0)
    gate = torch.tensor([[-2.0], [0.0], [1.0], [3.0]])
    ids, weights = model.route(torch.ones(1, 1), gate, torch.zeros(4), config, model.N2)
    scores = torch.tensor([0.35627, 0.83256, 1.14598, 1.74602])
    assert ids.tolist() == [[0, 1, 2, 3]]
    assert (weights[0] - scores / scores.sum()).abs().max() < 1e-5
    huge = model.route(torch.ones(1, 1) * 1e4, gate, torch.zeros(4), config, model.N2)[1]
    assert huge.isfinite().all()


def test_the_bias_chooses_but_does_not_weigh() -> None:
    config = config_a(n_routed_experts=4, num_experts_per_tok=2)
    gate = torch.tensor([[-2.0], [0.0], [1.0], [3.0]])
    ids, weights = model.route(torch.ones(1, 1), gate, torch.tensor([9.0, 0, 0, 0]), config, model.N2)
    assert ids.tolist() == [[0, 3]]
    assert weights[0, 0].item() == pytest.approx(1.5 * 0.35627 / (0.35627 + 1.74602), rel=1e-4)
    tied = model.route(torch.ones(1, 1), torch.zeros(4, 1), torch.zeros(4), config, model.N2)[0]
    assert tied.tolist() == [[0, 1]]  # lowest id first


def test_the_gates_clamp_is_one_sided_and_before_the_activation() -> None:
    gate, up = torch.tensor([20.0, -20.0, 1.0, 1.0]), torch.tensor([1.0, 1.0, 20.0, -20.0])
    got = model.swiglu(gate, up, 10.0, model.N0)

    def silu(x: float) -> float:
        return x / (1 + math.exp(-x))

    assert got.tolist() == pytest.approx([silu(10), silu(-20), 10 * silu(1), -10 * silu(1)], rel=1e-6)
    halved = model.swiglu(gate, up, 10.0, model.N0, torch.tensor(0.5))
    assert torch.equal(halved, got / 2)


def test_golden_engram_gate() -> None:
    gate = model.engram_gate(torch.tensor([0.0, -4.0, 0.25], dtype=torch.float64))
    assert gate.tolist() == pytest.approx([0.50025, 0.11920, 0.62246], abs=5e-6)


MULTIPLIERS = {
    1: [76632096046245, 4839876093313, 35959672319349, 73987337458391],
    14: [67716810739261, 51510806800915, 30921347202721, 82619226485591],
}
PRIMES = {
    1: "057 079 081 097 121 129 133 183 189 207 211 253 277 289 307 321 339 381 393 399 403 409 447 463",
    14: "477 487 499 507 511 573 609 627 667 669 693 697 711 729 759 769 781 799 813 819 841 877 879 889",
}
ROWS = (
    "10250667 16051853 42761335 48437066 64953759 91793642 97213675 124972355 "
    "130904169 147647512 174479789 176217609 193213014 209711443 226459680 248375762 "
    "266647502 284737834 292200621 319934002 327756510 339491046 365830131 381142068"
)


def test_golden_engram_multipliers_and_primes() -> None:
    config = released()
    primes = model.engram_primes(config)
    for layer, expected in MULTIPLIERS.items():
        assert model.engram_multipliers(config, layer) == expected
        assert primes[layer] == [16000000 + int(p) for p in PRIMES[layer].split()]
    assert [sum(p) for p in primes.values()] == list(config.engram_num_embeddings)


def test_engram_of_a_single_column() -> None:
    config = config_a(engram_max_ngram_size=2, engram_n_heads=1, engram_vocab_size=5)
    compressed = torch.tensor([[3, 1, 4]])
    rows = model.engram_rows(config, config.engram_layer_ids[0], compressed, torch.zeros_like(compressed), 2)
    assert rows.dtype is torch.int64 and rows.shape == (1, 3, 1) and int(rows.max()) < 5


def test_golden_engram_rows() -> None:
    compressed = torch.tensor([[40, 30, 20, 10]])
    rows = model.engram_rows(released(), 1, compressed, torch.zeros_like(compressed), 2)
    assert rows[0, 3].tolist() == [int(r) for r in ROWS.split()]


def test_engram_looks_back_no_further_than_the_document() -> None:
    compressed = torch.tensor([[40, 30, 20, 10, 11, 12]])
    documents = torch.tensor([[0, 0, 0, 1, 1, 1]])
    split = model.engram_rows(released(), 1, compressed, documents, 2)[0, 3:]
    alone = model.engram_rows(released(), 1, compressed[:, 3:], torch.zeros(1, 3).long(), 2)[0]
    assert torch.equal(split, alone)


def test_selection_takes_the_lowest_index_of_a_tie_and_never_minus_infinity() -> None:
    scores = torch.tensor(
        [[1.0, 3.0, 3.0, 3.0, -math.inf], [-math.inf, 0.0, -math.inf, -math.inf, -math.inf]]
    )
    assert model.select_topk(scores, 2).long().tolist() == [[0, 1, 1, 0, 0], [0, 1, 0, 0, 0]]
    assert model.select_topk(scores, 9).long().tolist() == [[1, 1, 1, 1, 0], [0, 1, 0, 0, 0]]


def test_candidates_force_the_newest_block() -> None:
    config = config_a(candidate_topk_blocks=3, index_topk=4)
    scores = torch.tensor(
        [9, 9, 9, 9, 8, 8, 8, 8, 7, 7, 7, 7, 6, 6, 6, 6, -5, -math.inf, -math.inf, -math.inf]
    )
    mask = model.candidate_mask(scores[None, None], torch.tensor([16]), config)[0, 0]
    assert mask.nonzero().flatten().tolist() == [*range(8), *range(16, 20)]
    none = model.candidate_mask(torch.full((1, 1, 8), -math.inf), torch.tensor([-1]), config)
    assert not none.any()


def test_quantisers_are_exact_forward_and_identity_backward() -> None:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    y = model.qn4(x)
    y.sum().backward()
    assert torch.equal(model.qn4(x.detach()), y)
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones_like(x))


# ---- invariants of the whole ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33])
def test_later_tokens_change_nothing(config: ModelConfig, weights: dict[str, Tensor], cut: int) -> None:
    ids = ids_of(LENGTH)
    assert torch.equal(logits(config, weights, ids)[:, :cut], logits(config, weights, ids[:, :cut]))


def test_batched_equals_alone(config: ModelConfig, weights: dict[str, Tensor]) -> None:
    ids = ids_of(LENGTH, rows=3)
    together = logits(config, weights, ids)
    for row in range(3):
        assert torch.equal(together[row], logits(config, weights, ids[row : row + 1])[0])


def test_packed_documents_equal_alone(config: ModelConfig, weights: dict[str, Tensor]) -> None:
    """Odd lengths leave padding between the documents; nothing looks across, whatever the padding holds."""
    first, second = ids_of(21, seed=3), ids_of(30, seed=4)
    packed = torch.cat((first, ids_of(3, seed=5), second), 1)
    documents = torch.tensor([[0] * 21 + [1] * 3 + [2] * 30])
    trace: Trace = {}
    together = logits(config, weights, packed, documents_BT=documents, trace=trace)
    assert torch.equal(together[:, :21], logits(config, weights, first))
    assert torch.equal(together[:, 24:], logits(config, weights, second))
    assert not trace["layers.6.selected"][0, 24:, :24].any()


def test_everything_selected_equals_dense() -> None:
    """Configuration F: top-k and candidates beyond the length."""
    config = config_a(index_topk=512, candidate_topk_blocks=160, candidate_block_size=4, sliding_window=128)
    weights = random_weights(config, 2)
    ids = ids_of(65)
    assert torch.equal(
        logits(config, weights, ids), logits(config, weights, ids, options=Options(dense=True))
    )


def test_a_forced_selection_reaches_the_reuse_layers(config: ModelConfig, weights: dict[str, Tensor]) -> None:
    ids = ids_of(LENGTH)
    own: Trace = {}
    base = logits(config, weights, ids, trace=own)
    forced = {2: own["layers.2.selected"]}
    assert torch.equal(logits(config, weights, ids, options=Options(selections=forced)), base)
    changed: Trace = {}
    empty = {2: torch.zeros_like(own["layers.2.selected"])}
    logits(config, weights, ids, options=Options(selections=empty), trace=changed)
    assert not torch.equal(changed["layers.3.attn_out"], own["layers.3.attn_out"])


def test_selections_hold_only_visible_candidates(config: ModelConfig, weights: dict[str, Tensor]) -> None:
    trace: Trace = {}
    logits(config, weights, ids_of(65), trace=trace)
    rows = torch.arange(65)
    for layer, ratio in ((2, 2), (4, 2), (5, 1), (6, 1)):
        selected = trace[f"layers.{layer}.selected"][0]
        visible = torch.arange(selected.shape[1]) < ((rows + 1) // ratio)[:, None]
        assert not (selected & ~visible).any()
        assert torch.equal(selected.sum(-1), visible.sum(-1).clamp(max=config.index_topk))
    assert not (trace["layers.6.selected"] & ~trace["layers.5.candidates"]).any()


def test_dense_experts_equal_routed(config: ModelConfig, weights: dict[str, Tensor]) -> None:
    ids = ids_of(17)
    n0 = {"numerics": model.N0}
    dense = Options(functions=Functions(experts=model.experts_dense))
    routed = logits(config, weights, ids, **n0)
    assert (
        logits(config, weights, ids, options=dense, **n0) - routed
    ).abs().max() < 1e-5 * routed.abs().max()


def test_attention_mass_and_sink_sum_to_one(config: ModelConfig, weights: dict[str, Tensor]) -> None:
    trace: Trace = {}
    logits(config, weights, ids_of(33), options=Options(dense=True), trace=trace)
    call = trace["layers.5.attention"]
    mass = model.attention_mass(call, slice(20, 33))
    assert mass.shape == (1, 13, 33)
    total = mass.sum(-1)
    assert (total > 0).all()
    assert (total < config.num_attention_heads).all()
    later = torch.arange(33) > torch.arange(20, 33)[:, None]
    assert (mass[0][later] == 0).all()


def test_every_weight_of_a_quantised_sparse_forward_gets_a_gradient(config: ModelConfig) -> None:
    weights = {name: w.requires_grad_() for name, w in random_weights(config, 4).items()}
    numerics = replace(model.N2, accumulate=None)
    trace: Trace = {}
    output = model.forward(
        config,
        weights,
        ids_of(33),
        numerics=numerics,
        token_map=token_map(config),
        options=Options(functions=Functions(experts=model.experts_dense), detach_indexer=True),
        trace=trace,
    )
    assert output.logits_BTV is not None
    loss = output.logits_BTV.float().logsumexp(-1).mean()
    index = sum(trace[f"layers.{s}.index_scores"].clamp(min=-9).sum() for s in config.index_source_layer_ids)
    grads = torch.autograd.grad(loss + 1e-3 * index, list(weights.values()), allow_unused=True)
    missing = [name for name, g in zip(weights, grads, strict=True) if g is None or not g.abs().sum() > 0]
    assert all(name.endswith("gate.bias") for name in missing), missing  # it chooses, it does not weigh
    # detached: the index loss alone leaves the trunk untouched
    logits(config, weights, ids_of(33), options=Options(detach_indexer=True), trace=trace)
    only = sum(trace[f"layers.{s}.index_scores"].clamp(min=-9).sum() for s in config.index_source_layer_ids)
    assert torch.autograd.grad(only, [weights["embed.weight"]], allow_unused=True) == (None,)


# ---- bounded replay (section 9) -------------------------------------------------------------------------------------


def replay_after(
    config: ModelConfig, weights: dict[str, Tensor], ids: Tensor, hit: int
) -> model.OracleOutput:
    cold: Trace = {}
    logits(config, weights, ids[:, :hit], trace=cold)
    sources = config.kv_source_layer_ids
    replay = model.Replay(
        hit=hit,
        entries={s: cold[f"layers.{s}.entries"] for s in sources},
        index_keys={s: cold[f"layers.{s}.index_keys"] for s in sources},
    )
    return model.forward(
        config,
        weights,
        ids,
        numerics=model.N2,
        token_map=token_map(config),
        options=Options(replay=replay),
    )


def test_a_replayed_hit_computes_from_a_window_before_it(
    config: ModelConfig, weights: dict[str, Tensor]
) -> None:
    ids = ids_of(48)
    output = replay_after(config, weights, ids, 32)
    assert output.rows_T.tolist() == list(range(24, 48))
    assert output.logits_BTV is not None
    cold = logits(config, weights, ids)[:, 24:]
    assert not torch.equal(output.logits_BTV, cold)  # an approximation: windows start at row 24
    # everything comes from the cold run if the window covers the whole hit
    wide = config_a(sliding_window=32)
    whole = replay_after(wide, weights, ids, 32)
    assert whole.logits_BTV is not None
    assert torch.equal(whole.logits_BTV, logits(wide, weights, ids))


def test_first_layer_of_a_replay_reads_only_what_it_recomputed(
    config: ModelConfig, weights: dict[str, Tensor]
) -> None:
    """Tokens before the replayed window reach the new rows through entries and n-grams only, never through a window."""
    one = config_a(
        num_hidden_layers=1,
        compress_ratios=(0,),
        kv_source_layer_ids=(),
        index_source_layer_ids=(),
        candidate_source_layer_id=-1,
        engram_layer_ids=(),
        engram_num_embeddings=(),
    )
    ids = ids_of(40)
    changed = ids.clone()
    changed[:, :24] = ids_of(24, seed=9)
    ours, other = (replay_after(one, weights, i, 32) for i in (ids, changed))
    assert ours.logits_BTV is not None
    assert other.logits_BTV is not None
    assert torch.equal(ours.logits_BTV, other.logits_BTV)


def kept(config: ModelConfig, weights: dict[str, Tensor], ids: Tensor, rows: range) -> Tensor:
    replay = model.Replay(kept=torch.arange(rows.start, rows.stop))
    return logits(config, weights, ids, options=Options(replay=replay))


def test_decoder_layers_on_the_tail_only(config: ModelConfig, weights: dict[str, Tensor]) -> None:
    ids = ids_of(48)
    full = logits(config, weights, ids)
    # layers 6 and 7 follow the last KV source (5): the last row is exact from 2 * (window - 1) + 1 kept rows on
    exact = 2 * (config.sliding_window - 1) + 1
    assert torch.equal(kept(config, weights, ids, range(48 - exact, 48))[:, -1], full[:, -1])
    assert not torch.equal(kept(config, weights, ids, range(48 - exact + 1, 48))[:, -1], full[:, -1])
    assert torch.equal(kept(config, weights, ids, range(48)), full)
