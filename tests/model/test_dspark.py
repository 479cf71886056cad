"""The draft in the engine against the oracle's at tier N2, bit for bit, wherever its context came from."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flashstep.engram.token_map import TokenMap
from flashstep.kernels import choose_ops
from flashstep.kernels.attention import reference as attention
from flashstep.kernels.gemm import reference as gemm
from flashstep.kernels.mhc import reference as mhc
from flashstep.kernels.norm_rope import reference as norm_rope
from flashstep.model import dspark
from flashstep.model.block import Block, Inside, State
from flashstep.model.rope import compressed_frequencies
from flashstep.model.rows import Rows
from flashstep.model.transformer import Transformer
from flashstep.quant import mxfp8
from oracle import dspark as oracle_draft
from oracle import model as oracle
from tests.model import tiny
from tests.model.checkpoints import read_checkpoint
from tests.model.driver import CPU, Chunk, Driver
from tests.oracle.golden import VECTORS, needs_vectors

Drafted = tuple[
    Tensor, ...
]  # base logits, hidden states, logits with the bias of a greedy chain, confidences
LONGEST = 66


class Case:
    """A configuration with weights, the draft's among them: its oracle and its drivers."""

    def __init__(self, config, weights, tables, token_map) -> None:
        self.config, self.weights, self.tables, self.token_map = config, weights, tables, token_map
        self.values = tiny.oracle_weights(weights, tables, config)

    def driver(self, **settings) -> Driver:
        return Driver(
            self.config, self.weights, self.tables, token_map=self.token_map, drafts=True, **settings
        )

    @torch.inference_mode()
    def oracle(self, tokens: list[int], replay: oracle.Replay = oracle.Replay()) -> "Expected":  # noqa: B008
        """Logits and features of a whole forward over ``tokens``."""
        c, trace = self.config, {}
        out = oracle.forward(
            c,
            self.values,
            torch.tensor([tokens]),
            numerics=oracle.N2,
            token_map=self.token_map,
            options=oracle.Options(replay=replay),
            trace=trace,
        )
        whole = torch.zeros(1, len(tokens), c.hidden_size * len(c.dspark_target_layer_ids)).bfloat16()
        for layer in c.dspark_target_layer_ids:  # the layer that cuts records what comes before the cut
            streams = trace[f"layers.{layer}.attention_in"]
            trace[f"layers.{layer}.attention_in"] = streams[:, -len(out.rows_T) :]
        whole[:, out.rows_T] = oracle_draft.features(c, trace, numerics=oracle.N2)
        assert out.logits_BTV is not None
        return Expected(case=self, tokens=tokens, logits=out.logits_BTV[0], features=whole)


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What the oracle says of one sequence."""

    case: Case
    tokens: list[int]
    logits: Tensor
    features: Tensor

    @torch.inference_mode()
    def drafts(self, positions: list[int]) -> Drafted:
        """The drafts after each number of committed tokens; the anchors are the tokens that follow."""
        config, values = self.case.config, self.case.values
        place = torch.tensor(positions)
        token = torch.tensor(self.tokens)[place]
        anchors = oracle_draft.Anchors(sequence=torch.zeros_like(place), position=place, token=token)
        block = oracle_draft.draft(config, values, self.features, anchors, numerics=oracle.N2)
        chained = oracle_draft.chain(config, values, block, token, numerics=oracle.N2)
        return block.base_MKV, block.hidden_MKD, chained.logits_MKV, torch.sigmoid(chained.confidence_MK)


@torch.inference_mode()
def chain(driver: Driver, held: list) -> Drafted:
    """A proposal of each sequence and its greedy chain."""
    block, draft = driver.propose(held), driver.model.draft
    assert draft is not None
    previous = torch.tensor([h.tokens[h.done] for h in held])
    logits, sure = [], []
    for place in range(draft.width):
        embedding, bias = draft.markov(previous)
        logits.append(block.logits_RKV[:, place] + bias)
        sure.append(draft.confidence(block.hidden_RKD[:, place], embedding))
        previous = logits[-1].argmax(1)
    return block.logits_RKV, block.hidden_RKD, torch.stack(logits, 1), torch.stack(sure, 1)


def assert_same(got: Drafted, want: Drafted, text: object = "") -> None:
    for name, ours, theirs in zip(("base", "hidden", "logits"), got[:3], want[:3], strict=True):
        assert ours.dtype is theirs.dtype and torch.equal(ours, theirs), f"{name} {text}"
    assert (got[3] - want[3]).abs().max() < 1e-6, f"confidence {text}"  # sigmoid in fp64 against fp32


@functools.cache
def case(name: str, block: int = 5) -> Case:
    config = tiny.configuration(name, dspark_block_size=block)
    return Case(config, *tiny.random_weights(config, seed=ord(name), drafts=True), tiny.token_map(config))


@functools.cache
def expected(name: str, block: int = 5) -> Expected:
    c = case(name, block)
    return c.oracle(tiny.random_tokens(LONGEST, config=c.config, seed=ord(name)))


@pytest.mark.parametrize("name", "AG")
def test_prompts_of_every_length_in_one_batch_equal_the_oracle(name: str) -> None:
    """Prompts around and far past the window of 8, blocks in random order; together and alone."""
    e = expected(name)
    lengths = [*range(1, 20), 31, 32, 33, 64, 65]
    driver = e.case.driver(num_slots=len(lengths), seed=1)
    held = [driver.open(e.tokens) for _ in lengths]
    driver.step([Chunk(h, n) for h, n in zip(held, lengths, strict=True)])
    together = chain(driver, held)
    assert_same(together, e.drafts(lengths))
    for place, h in enumerate(held[::4]):
        assert_same(chain(driver, [h]), tuple(t[4 * place, None] for t in together), "alone")


@needs_vectors
@pytest.mark.parametrize("name", ["a_base", "d_release_like"])
def test_golden_checkpoints_equal_the_oracle(name: str) -> None:
    """Around windows of 16 and 128, and as near to the recorded drafts as flips of single codes leave them."""
    folder = VECTORS / name / "ckpt"
    config, weights, tables = read_checkpoint(folder, drafts=True)
    c = Case(config, weights, tables, torch.tensor(TokenMap.read(folder, config).ids))
    stored = np.load(VECTORS / name / "logits_native.npz")
    recorded = np.load(VECTORS / name / "dspark_native.npz")
    anchor = int(recorded["L257/draft_ids"][0])
    e = c.oracle([*stored["L257/ids"].flatten().tolist(), anchor])
    lengths = [1, 2, 15, 16, 17, 18, 63, 127, 128, 129, 130, 257]
    driver = c.driver(block_size=16, num_blocks=80, num_slots=len(lengths), seed=2)
    held = [driver.open(e.tokens) for _ in lengths]
    driver.step([Chunk(h, n) for h, n in zip(held, lengths, strict=True)], logits="none")
    got = chain(driver, held)
    assert_same(got, e.drafts(lengths))
    far = (got[2][-1] - torch.tensor(recorded["L257/draft_logits"])).abs()
    assert far.median() < 0.1  # logits have a deviation of 3


@pytest.mark.parametrize(("name", "block"), [("A", 5), ("A", 8), ("G", 8)])
def test_rejected_rows_leave_no_trace(name: str, block: int) -> None:
    """A08: prompts of 1 to 9 tokens; every number of drafts is accepted in turn, the others are wrong and overwritten."""
    e = expected(name, block)
    driver = e.case.driver(num_slots=9, seed=3)
    held = [driver.open(e.tokens) for _ in range(9)]
    driver.step([Chunk(h, n) for n, h in enumerate(held, 1)])
    for cycle in range(14):
        stood = [(cycle + place) % (block + 1) for place in range(9)]
        live = [(h, a) for h, a in zip(held, stood, strict=True) if h.done + block + 1 < LONGEST]
        assert_same(chain(driver, [h for h, _ in live]), e.drafts([h.done for h, _ in live]), cycle)
        for h, a in live:
            first = h.done + a + 1  # the first wrong draft
            h.tokens = [t + (first <= n) for n, t in enumerate(e.tokens)]
        starts = [h.done for h, _ in live]
        out = driver.step([Chunk(h, h.done + block + 1) for h, _ in live])
        for (h, a), start, rows in zip(live, starts, out, strict=True):
            assert torch.equal(rows[: a + 1], e.logits[start : start + a + 1]), f"position {start}"
            h.tokens, h.done = e.tokens, start + a + 1
    assert all(h.done > 40 for h in held)


@pytest.mark.parametrize("size", [1, 3, 16])
def test_chunks_blocks_and_released_windows_cannot_be_seen(size: int) -> None:
    """Chunks of any size, permuted blocks; what the next rows do not read is released and poisoned after each draft."""
    e = expected("A")
    driver = e.case.driver()
    want = e.drafts([size * n for n in range(1, 65 // size + 1)])
    for seed in (None, 4):
        driver.reset(seed)
        driver.open(e.tokens)
        held = driver.open(e.tokens)
        for place in range(want[0].shape[0]):
            driver.step([Chunk(held, held.done + size)], logits="none")
            assert_same(chain(driver, [held]), tuple(t[place, None] for t in want), held.done)
            driver.drop_window(held)


@pytest.mark.parametrize("name", "AG")
@pytest.mark.parametrize("cuts", [(), (20, 57), (20, 29, 43, 51)])
def test_features_of_trimmed_rows_are_cut(name: str, cuts: tuple[int, ...]) -> None:
    """Bounded replay: target layers before the cut (A: the source itself) and behind it (G) give features of the same rows."""
    c, prompt = case(name), 61
    start = prompt - c.config.sliding_window
    tokens = expected(name).tokens
    e = c.oracle(tokens, replay=oracle.Replay(kept=torch.arange(start, LONGEST)))
    driver = c.driver(seed=6)
    held = driver.open(tokens)
    for stop in (*cuts, prompt, *range(prompt + 1, LONGEST - 1)):
        driver.step([Chunk(held, stop)], tail=start)
        if stop >= prompt:
            assert_same(chain(driver, [held]), e.drafts([stop]), stop)
    assert not torch.equal(e.features[:, start:], expected(name).features[:, start:])


def test_a_target_layer_before_the_cut_gives_features_of_the_kept_rows() -> None:
    base, (prompt, start) = case("A"), (30, 22)
    config = tiny.configuration("A", dspark_target_layer_ids=[1, 4, 7])
    c = Case(config, base.weights, base.tables, base.token_map)
    tokens = expected("A").tokens
    e = c.oracle(tokens[:prompt], replay=oracle.Replay(kept=torch.arange(start, prompt)))
    driver = c.driver()
    held = driver.open(tokens)
    driver.step([Chunk(held, prompt)], tail=start)
    assert_same(chain(driver, [held]), replace(e, tokens=tokens).drafts([prompt]))


def test_the_draft_needs_all_of_its_weights_and_no_others() -> None:
    c = case("A")
    pool = c.driver().pool
    build = functools.partial(Transformer, c.config, ops=choose_ops(CPU), pool=pool, engram_tables=c.tables)
    assert build(c.weights).draft is None
    with pytest.raises(ValueError, match=r"mtp\.1\.stray"):
        build({**c.weights, "mtp.1.stray": torch.zeros(1)}, drafts=True)
    missing = dict(c.weights)
    del missing["mtp.2.markov_head.embed.weight"]
    with pytest.raises(ValueError, match=r"mtp\.2\.markov_head\.embed\.weight"):
        build(missing, drafts=True)


# ---- broken parts ---------------------------------------------------------------------------------------------------

attend_block, rest = attention.attend_block, Block._rest
store_contexts = dspark.DraftModel._store


def place_by_place(
    q: Tensor, k: Tensor, *, rows: Any, causal: bool = False, slide: bool = False, **more: Any
) -> Tensor:
    """``attend_block`` one place at a time, with less to see for some."""
    out = []
    for place in range(q.shape[1]):
        own = k[:, : place + 1] if causal else k
        turn = {name: more[name].unflatten(0, q.shape[:2])[:, place] for name in ("cos_TP", "sin_TP")}
        width = more["width"] - place * slide
        out.append(
            attend_block(q[:, place, None], own, rows=replace(rows), **{**more, **turn, "width": width})
        )
    return torch.cat(out, 1)


def features_behind(self: Block, inside: Inside, *arguments: Any) -> State:
    after = rest(self, inside, *arguments)
    if not self._captures:
        return after
    x_TSD = mhc.write(*after.streams)
    mean_TD = mhc.collapse(x_TSD, x_TSD.new_full(x_TSD.shape[:2], 1 / x_TSD.shape[1]))
    return replace(after, features=(*inside.features[:-1], mean_TD))


def normed_context(self: dspark.DraftModel, features_TF: Tensor, rows: Rows) -> None:
    stages = len(self._blocks)
    context = norm_rope.rms(self._main(features_TF), self._main_norm_weight, eps=self._eps)
    keys = []
    for stage in range(stages):
        weight = case("A").weights[f"mtp.{stage}.attn_norm.weight"]
        again = gemm.quantise_input(norm_rope.rms(context, weight, eps=self._eps))
        keys.append(self._wkv.product(again).chunk(stages, dim=1)[stage])
    self._store(torch.cat(keys, 1), rows)


def scaled_context(self: dspark.DraftModel, keys_TX: Tensor, rows: Rows) -> None:
    store_contexts(self, keys_TX, replace(rows, window_rotation=rows.compressed_rotation))


def exact_keys(x: Tensor, *, dtype: torch.dtype) -> Tensor:
    return x.to(dtype)


BROKEN: dict[str, Callable[[Any], None]] = {
    "causal block": lambda patch: patch(
        attention, "attend_block", functools.partial(place_by_place, causal=True)
    ),
    "window slides": lambda patch: patch(
        attention, "attend_block", functools.partial(place_by_place, slide=True)
    ),
    "own keys unquantised": lambda patch: patch(
        attention,
        "mxfp8",
        SimpleNamespace(dequantise=mxfp8.dequantise, quantise_dequantise=exact_keys),
    ),
    "context normed again": lambda patch: patch(dspark.DraftModel, "remember", normed_context),
    "context with YaRN": lambda patch: patch(dspark.DraftModel, "_store", scaled_context),
    "block with YaRN": lambda patch: patch(dspark, "window_frequencies", compressed_frequencies),
    "features behind the layer": lambda patch: patch(Block, "_rest", features_behind),
}


def drafted_at(length: int) -> Drafted:
    driver = case("A").driver()
    held = driver.open(expected("A").tokens)
    driver.step([Chunk(held, length)])
    return chain(driver, [held])


def test_place_by_place_is_the_same_where_nothing_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "attend_block", place_by_place)
    assert_same(drafted_at(30), expected("A").drafts([30]))


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_part_shows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BROKEN[name](monkeypatch.setattr)
    assert not torch.equal(drafted_at(30)[2], expected("A").drafts([30])[2])
