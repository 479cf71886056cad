"""The serving model against the oracle at tier N2, bit for bit, however the work is cut, batched and placed."""

import functools
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import oracle.model as oracle
from flashstep.engram.token_map import TokenMap
from flashstep.kernels import choose_ops
from flashstep.model.transformer import Transformer
from tests.model import tiny
from tests.model.checkpoints import read_checkpoint
from tests.model.driver import CPU, Chunk, Driver, Held

VECTORS = Path(__file__).parents[3] / "shared" / "vectors" / "model"
LENGTHS = (*range(1, 12), 15, 16, 17, 31, 33, 64, 65)
LONGEST = max(LENGTHS)
ROLES = "ABCDEFG"


class Case:
    """A configuration with weights: its oracle logits and its drivers."""

    def __init__(self, config, weights, tables, token_map) -> None:
        self.config, self.weights, self.tables, self.token_map = config, weights, tables, token_map
        self.values = tiny.oracle_weights(weights, tables, config)

    def oracle(self, tokens: list[int], **options) -> Tensor:
        """fp32 [rows, V] at N2 with float64 accumulation."""
        return oracle.forward(
            self.config,
            self.values,
            torch.tensor([tokens]),
            numerics=oracle.N2,
            token_map=self.token_map,
            options=oracle.Options(**options),
        ).logits_BTV[0]

    def driver(self, **settings) -> Driver:
        return Driver(self.config, self.weights, self.tables, token_map=self.token_map, **settings)


@functools.cache
def case(name: str) -> Case:
    config = tiny.configuration(name)
    return Case(config, *tiny.random_weights(config, seed=ord(name)), tiny.token_map(config))


@functools.cache
def expected(name: str) -> tuple[list[int], Tensor]:
    tokens = tiny.random_tokens(LONGEST, config=case(name).config, seed=ord(name))
    return tokens, case(name).oracle(tokens)


@functools.cache
def golden(name: str) -> Case:
    if not VECTORS.is_dir():
        pytest.skip("the golden checkpoints are not on this machine")
    folder = VECTORS / name / "ckpt"
    config, weights, tables = read_checkpoint(folder)
    return Case(config, weights, tables, torch.tensor(TokenMap.read(folder, config).ids))


@pytest.mark.parametrize("name", ROLES)
def test_every_length_in_one_batch_equals_the_oracle(name: str) -> None:
    """One forward with a request of each length, blocks in random order: A03 (whole groups), A07, batched = alone."""
    tokens, logits = expected(name)
    driver = case(name).driver(num_slots=len(LENGTHS), num_blocks=160, seed=1)
    out = driver.step([Chunk(driver.open(tokens[:length]), length) for length in LENGTHS])
    for length, rows in zip(LENGTHS, out, strict=True):
        assert torch.equal(rows, logits[:length]), f"length {length}"


@pytest.mark.parametrize("name", ROLES)
def test_decode_equals_the_oracle_from_every_start(name: str) -> None:
    """Token by token from each length 1..11, all in one batch, while window blocks behind are released and poisoned."""
    tokens, logits = expected(name)
    driver = case(name).driver(num_slots=12, num_blocks=256, seed=2)
    held = [driver.open(tokens) for _ in range(1, 12)]
    driver.step([Chunk(h, start) for start, h in enumerate(held, 1)])
    for _ in range(26):
        for h, rows in zip(held, driver.step([Chunk(h, h.done + 1) for h in held]), strict=True):
            assert torch.equal(rows, logits[h.done - 1 : h.done]), f"position {h.done - 1}"
            driver.drop_window(h)


@pytest.mark.parametrize("name", "ADG")
@pytest.mark.parametrize("size", [3, 5, 16])
def test_any_chunking_equals_the_oracle(name: str, size: int) -> None:
    tokens, logits = expected(name)
    driver = case(name).driver(seed=size)
    assert torch.equal(driver.run(tokens, cuts=range(size, LONGEST, size)), logits)


def test_mixed_steps_equal_the_oracle() -> None:
    """Prefill chunks and decode rows of several requests share steps, at odd cuts, and slots are used again."""
    case_a = case("A")
    driver = case_a.driver(num_slots=3, seed=3)
    generator = torch.Generator().manual_seed(4)
    waiting = [tiny.random_tokens(n, config=case_a.config, seed=n) for n in (9, 40, 23, 14, 31, 5, 27)]
    logits = {len(t): case_a.oracle(t) for t in waiting}
    running: list[Held] = []
    while waiting or running:
        while waiting and len(running) < 3:
            running.append(driver.open(waiting.pop()))
        chunks = []
        for h in running:
            size = int(torch.randint(1, 8, (), generator=generator))
            chunks.append(Chunk(h, min(h.done + size, len(h.tokens)), start=h.done))
        for chunk, rows in zip(chunks, driver.step(chunks), strict=True):
            assert torch.equal(rows, logits[len(chunk.sequence.tokens)][chunk.start : chunk.stop])
            driver.drop_window(chunk.sequence)
        for h in [h for h in running if h.done == len(h.tokens)]:
            running.remove(h)
            driver.close(h)


def test_logits_do_not_depend_on_block_numbers() -> None:
    """A07: two requests that take turns allocating, descending ids, then 20 permuted free lists."""
    tokens, logits = expected("A")
    driver = case("A").driver(num_blocks=24, num_slots=2)
    for seed in (None, *range(20)):
        driver.reset(seed)
        first, second = driver.open(tokens[:17]), driver.open(tokens[:14])
        for stop in (3, 9, 14):
            out = driver.step([Chunk(first, stop, start=first.done), Chunk(second, stop, start=second.done)])
            for rows, h in zip(out, (first, second), strict=True):
                assert torch.equal(rows, logits[h.done - rows.shape[0] : h.done])
        assert torch.equal(driver.step([Chunk(first, 17)])[0], logits[14:17])


@pytest.mark.parametrize("name", ["a_base", "d_release_like"])
def test_golden_checkpoints_equal_the_oracle(name: str) -> None:
    """The longest golden prompt in odd chunks; and tier N2 stays as near to the released logits as rounding lets it."""
    c = golden(name)
    stored = np.load(VECTORS / name / "logits_native.npz")
    tokens = stored["L257/ids"].flatten().tolist()
    out = c.driver(block_size=16, seed=5).run(tokens, cuts=(1, 4, 31, 100, 201, 256))
    assert torch.equal(out, c.oracle(tokens))
    released = torch.from_numpy(stored["L257/logits"]).view_as(out)
    assert (out - released).abs().median() < 0.1  # flips of single codes; logits have a deviation of 3
    assert (out.argmax(1) == released.argmax(1)).float().mean() > 0.85


@pytest.mark.parametrize("topk", [8, 16])
def test_selection_begins_to_bind_where_the_config_says(topk: int) -> None:
    """A06: same weights, two index_topk; equal to the dense oracle up to topk whole groups, sparse from there on."""
    config = tiny.configuration("D", index_topk=topk)
    base = case("D")
    c = Case(config, base.weights, base.tables, base.token_map)
    tokens = tiny.random_tokens(128, config=config, seed=6)
    out, dense = c.driver().run(tokens, cuts=(60,)), c.oracle(tokens, dense=True)
    binds = 2 * (topk + 1) - 1  # the first row that sees topk + 1 entries
    assert torch.equal(out[:binds], dense[:binds])
    assert torch.equal(out, c.oracle(tokens))
    assert not torch.equal(out[binds : binds + 4], dense[binds : binds + 4])


@pytest.mark.parametrize(("blocks", "binding"), [(3, True), (64, False)])
def test_candidates_restrict_reindex_layers_only_when_they_bind(blocks: int, binding: bool) -> None:
    """A06: candidate_topk_blocks small and "all": the latter equals a model without a candidate source."""
    base = case("A")
    tokens, _ = expected("A")
    c = Case(tiny.configuration("A", candidate_topk_blocks=blocks), base.weights, base.tables, base.token_map)
    without = Case(tiny.configuration("E"), base.weights, base.tables, base.token_map)
    out = c.driver().run(tokens)
    assert torch.equal(out, c.oracle(tokens))
    assert torch.equal(out, without.oracle(tokens)) is not binding


@pytest.mark.parametrize("name", "AG")
@pytest.mark.parametrize("cuts", [(), (8,), (40,), (20, 57), (20, 29, 43, 51)])
def test_tail_rows_equal_the_oracles_bounded_replay(name: str, cuts: tuple[int, ...]) -> None:
    """Decoder-side: layers past the last KV source run on a prompt's last rows only, wherever it is cut, then on all."""
    c, window = case(name), case(name).config.sliding_window
    tokens, cold = expected(name)
    prompt = 61
    driver = c.driver(seed=7)
    held, start = driver.open(tokens), prompt - window
    out = [driver.step([Chunk(held, stop)], tail=start)[0] for stop in (*cuts, prompt)]
    while held.done < LONGEST:
        out.append(driver.step([Chunk(held, held.done + 1)], tail=start)[0])
    rows = torch.arange(start, LONGEST)
    assert torch.equal(torch.cat(out), c.oracle(tokens, replay=oracle.Replay(kept=rows)))
    assert not torch.equal(torch.cat(out), cold[rows])  # it is an approximation, and must show


def test_a_tail_from_the_start_changes_nothing() -> None:
    tokens, cold = expected("A")
    assert torch.equal(case("A").driver().run(tokens[:8], tail=0), cold[:8])


@pytest.mark.parametrize("name", "ADG")
@pytest.mark.parametrize("hit", [12, 40])
def test_replayed_hit_equals_the_oracles_bounded_replay(name: str, hit: int) -> None:
    """Encoder-side: a hit of ``hit`` tokens keeps entries and keys, recomputes the last window, and sees no window before."""
    c, window = case(name), case(name).config.sliding_window
    tokens, _ = expected(name)
    trace: dict = {}
    oracle.forward(
        c.config, c.values, torch.tensor([tokens]), numerics=oracle.N2, token_map=c.token_map, trace=trace
    )
    sources = c.config.kv_source_layer_ids
    replay = oracle.Replay(
        hit=hit,
        entries={s: trace[f"layers.{s}.entries"] for s in sources},
        index_keys={s: trace[f"layers.{s}.index_keys"] for s in sources},
    )
    driver = c.driver(seed=8)
    other = driver.open(tokens)
    driver.step([Chunk(other, hit + 3)])
    start = hit - window
    shared = hit // driver.block_size
    held = Held(tokens, driver.open([]).slot, other.blocks[:shared], [-1] * (start // driver.block_size))
    held.window_start = start
    before = [driver.pool.source(s).compressed[0][other.blocks[:shared]].clone() for s in sources]
    out = [driver.step([Chunk(held, hit + 5, start=start, replay=window)])[0]]
    after = [driver.pool.source(s).compressed[0][other.blocks[:shared]] for s in sources]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), "a replayed row wrote an entry"
    while held.done < LONGEST:
        out.append(driver.step([Chunk(held, held.done + 1)])[0])
    assert torch.equal(torch.cat(out), c.oracle(tokens, replay=replay))


def test_a_step_that_wants_no_logits_gives_none_and_still_writes() -> None:
    tokens, logits = expected("A")
    driver = case("A").driver()
    held = driver.open(tokens)
    assert driver.step([Chunk(held, 20)], logits="none")[0].shape == (0, case("A").config.vocab_size)
    assert torch.equal(driver.step([Chunk(held, 30)])[0], logits[20:30])


def test_weights_must_be_exactly_what_the_model_uses() -> None:
    c = case("B")
    pool = c.driver().pool
    build = functools.partial(Transformer, c.config, ops=choose_ops(CPU), pool=pool, engram_tables={})
    with pytest.raises(ValueError, match=r"layers\.7\.stray"):
        build({**c.weights, "layers.7.stray": torch.zeros(1)})
    missing = dict(c.weights)
    del missing["layers.3.attn.wkv.weight"]
    with pytest.raises(ValueError, match=r"layers\.3\.attn\.wkv\.weight"):
        build(missing)
    build({**c.weights, "mtp.0.norm.weight": torch.zeros(1)})  # the drafter's names are somebody else's
