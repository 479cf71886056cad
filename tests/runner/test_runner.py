"""The runner against the oracle, bit for bit: any company, any cuts, any block numbers, hits, replays, seeds.

What is compared are log-probabilities of every prompt position and greedy tokens with theirs: fp32, equal or not.
"""

import random
from collections.abc import Sequence

import pytest
import torch

import oracle.model as oracle
from flashstep.runner.runner import ModelRunner
from flashstep.sampling.logprobs import token_logprobs
from flashstep.step import TokenLogprob
from oracle.checkpoint import Checkpoint
from tests.runner.plans import Hand, Live

WINDOW = 8
LENGTHS = [1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 64, 65]  # spec/model.md 13
LOGPROBS = {"logprobs": 5, "prompt_logprobs": 3}


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed * 1000 + length).choices(range(64), k=length)


def witnessed(witness: Checkpoint, ids: Sequence[int], **options: object) -> oracle.OracleOutput:
    with torch.inference_mode():
        return oracle.forward(
            witness.config,
            witness.weights,
            torch.tensor([ids]),
            numerics=oracle.N2,
            token_map=witness.token_map,
            options=oracle.Options(**options),
        )


def expected_prompt_logprobs(witness: Checkpoint, ids: Sequence[int], count: int = 3) -> list[TokenLogprob]:
    if len(ids) < 2:
        return []
    logits = witnessed(witness, ids).logits_BTV
    assert logits is not None
    return token_logprobs(logits[0, :-1], ids[1:], counts=[count] * (len(ids) - 1))


def check_outputs(witness: Checkpoint, live: Live) -> None:
    """Greedy tokens and their log-probabilities are the oracle's over the whole sequence."""
    ids = [*live.request.prompt, *live.tokens]
    logits = witnessed(witness, ids[:-1]).logits_BTV
    assert logits is not None
    tail = logits[0, len(live.request.prompt) - 1 :]
    assert tail.argmax(dim=1).tolist() == live.tokens
    count = live.request.params.logprobs
    if count is not None:
        assert live.logprobs == token_logprobs(tail, live.tokens, counts=[count] * len(live.tokens))


def same(one: Live, other: Live) -> bool:
    return (one.tokens, one.logprobs, one.prompt_logprobs) == (
        other.tokens,
        other.logprobs,
        other.prompt_logprobs,
    )


# ---- exact ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", LENGTHS)
def test_every_length_is_the_oracle(exact: ModelRunner, witness: Checkpoint, length: int) -> None:
    live = Hand(exact).alone(prompt(length), outputs=6, **LOGPROBS)
    assert live.prompt_logprobs == expected_prompt_logprobs(witness, live.request.prompt)
    check_outputs(witness, live)


def test_chunked_is_whole(exact: ModelRunner, witness: Checkpoint) -> None:
    """Any cuts: prompt log-probabilities join without a gap, look-back ids and open groups cross the edges."""
    ids = prompt(33)
    whole = Hand(exact).alone(ids, outputs=4, **LOGPROBS)
    assert whole.prompt_logprobs == expected_prompt_logprobs(witness, ids)
    for cuts in ([1], [2], [15], [16, 17], [3, 4, 5, 32], list(range(1, 33)), [8, 24]):
        assert same(Hand(exact).alone(ids, outputs=4, cuts=cuts, **LOGPROBS), whole), cuts


def test_batched_is_alone_with_permuted_blocks(exact: ModelRunner) -> None:
    prompts = [prompt(length, seed=2) for length in (17, 5, 40, 26)]
    alone = [Hand(exact).alone(ids, outputs=5, **LOGPROBS) for ids in prompts]
    for seed in (1, 2, 3):
        hand = Hand(exact, seed=seed)
        lives = [hand.open(ids, **LOGPROBS) for ids in prompts]
        order = random.Random(seed)
        while any(len(live.tokens) < 5 for live in lives):
            pending = [live for live in lives if len(live.tokens) < 5]
            some = order.sample(pending, order.randint(1, len(pending)))
            # the first step must admit everybody
            some = lives if any(admission for admission in hand._admitted) else some
            hand.step(*((live, order.randint(1, live.length - live.done)) for live in some))
        for live, reference in zip(lives, alone, strict=True):
            assert same(live, reference)


def test_slots_and_blocks_are_reused_without_a_trace(exact: ModelRunner) -> None:
    fresh = Hand(exact).alone(prompt(21, seed=5), outputs=4, **LOGPROBS)
    hand = Hand(exact, seed=4)
    for number in range(8):
        hand.alone(prompt(13 + number, seed=6), outputs=3)
    assert same(hand.alone(prompt(21, seed=5), outputs=4, **LOGPROBS), fresh)


@pytest.mark.parametrize("hit", [4, 8, 12, 20, 24])
def test_exact_hit_is_cold(exact: ModelRunner, witness: Checkpoint, hit: int) -> None:
    shared = prompt(24, seed=7)
    for extra in (1, 2, 5):
        ids = [*shared, *prompt(extra, seed=8)]
        hand = Hand(exact, seed=hit)
        source = hand.open([*shared, 3, 3])
        hand.prefill(source, 5, 19)
        live = hand.open(ids, logprobs=5)
        hand.hit(live, source, hit)
        hand.prefill(live)
        hand.generate(live, 4)
        check_outputs(witness, live)


def test_preempted_goes_on_where_it_was(exact: ModelRunner) -> None:
    """Outputs are recomputed as rows of a prefill; seeds go on at the output position; prompt log-probabilities repeat."""
    params = {"temperature": 1.0, "seed": 5, "frequency_penalty": 1.0, "min_tokens": 12, **LOGPROBS}
    reference = Hand(exact).alone(prompt(19), outputs=12, **params)
    hand = Hand(exact, seed=9)
    live = hand.open(prompt(19), **params)
    hand.prefill(live, 7)
    hand.generate(live, 5)
    other = hand.open(prompt(30))
    hand.prefill(other)
    live = hand.preempt(live)
    live.prompt_logprobs.clear()
    hand.prefill(live, 10, 20)
    live = hand.preempt(live)
    live.prompt_logprobs.clear()
    hand.prefill(live)
    hand.generate(live, 12)
    assert same(live, reference)


# ---- sampling ------------------------------------------------------------------------------------------------------------


def test_seeded_is_the_same_in_any_company(exact: ModelRunner) -> None:
    """A14."""
    params = {"temperature": 2.0, "seed": 42, "logprobs": 0}
    target, outputs = prompt(9, seed=3), 8
    reference = Hand(exact).alone(target, outputs=outputs, **params)
    neighbours = (
        [{}],
        [{"temperature": 1.0, "seed": s} for s in (1, 42)],
        [{"temperature": 2.0, "seed": 42, "top_k": 3}],
    )
    for late, others in zip((0, 2, 5), neighbours, strict=True):
        hand = Hand(exact, seed=late)
        company = [
            hand.open(prompt(6 + n, seed=4), **{"max_tokens": 99, **other}) for n, other in enumerate(others)
        ]
        for _ in range(late):
            hand.step(*((live, live.length - live.done) for live in company))
        live = hand.open(target, **params)
        while len(live.tokens) < outputs:
            hand.step(*((each, each.length - each.done) for each in (*company, live)))
        assert same(live, reference)


def test_seeds_differ(exact: ModelRunner) -> None:
    """A25: children of one prompt, in one batch."""
    hand = Hand(exact)
    lives = [hand.open(prompt(9, seed=3), temperature=2.0, seed=seed) for seed in range(6)]
    for _ in range(6):
        hand.step(*((live, live.length - live.done) for live in lives))
    assert len({tuple(live.tokens) for live in lives}) == 6


def test_min_tokens_and_stops(exact: ModelRunner) -> None:
    """A24: outputs count, not the prompt; EOS and stop ids come right after; the last id is reachable."""
    eos, stop, last = 1, 9, 63
    live = Hand(exact).alone(
        prompt(40),
        outputs=12,
        min_tokens=10,
        stop_token_ids=(stop,),
        logit_bias={eos: 100.0, stop: 90.0, last: 80.0},
    )
    assert live.tokens == [last] * 10 + [eos] * 2


def test_prompt_logprobs_may_be_asked_for_without_alternatives(
    exact: ModelRunner, witness: Checkpoint
) -> None:
    live = Hand(exact).alone(prompt(12), prompt_logprobs=0)
    assert live.prompt_logprobs == expected_prompt_logprobs(witness, live.request.prompt, count=0)
    assert live.logprobs == []


def test_nobody_is_sampled_in_a_step_of_chunks(exact: ModelRunner) -> None:
    hand = Hand(exact)
    live = hand.open(prompt(20))
    hand.step((live, 10))
    assert live.tokens == []
    hand.prefill(live)
    assert len(live.tokens) == 1


# ---- bounded -------------------------------------------------------------------------------------------------------------


def kept(length: int) -> torch.Tensor:
    """The rows that layers past the last source run on: the prompt's last window, however it is cut."""
    return torch.arange(max(length - WINDOW, 0), length)


@pytest.mark.parametrize("length", [5, 8, 9, 16, 33])
def test_bounded_prefill_is_the_oracles_bounded(
    bounded: ModelRunner, witness: Checkpoint, length: int
) -> None:
    ids = prompt(length, seed=1)
    for cuts in ([], [2], [length // 2], [3, length - 1]):
        live = Hand(bounded, seed=length).alone(ids, cuts=cuts, logprobs=5)
        replay = oracle.Replay(kept=kept(length))
        logits = witnessed(witness, ids, replay=replay).logits_BTV
        assert logits is not None
        assert live.logprobs == token_logprobs(logits[0, -1:], live.tokens, counts=[5]), cuts


def test_bounded_is_exact_within_the_window_and_not_beyond(bounded: ModelRunner, exact: ModelRunner) -> None:
    def both(length: int) -> list[Live]:
        return [Hand(runner).alone(prompt(length, seed=2), logprobs=5) for runner in (bounded, exact)]

    assert same(*both(WINDOW))
    assert not same(*both(40))


def test_prompt_logprobs_are_never_trimmed(bounded: ModelRunner, exact: ModelRunner) -> None:
    ids = prompt(40, seed=2)
    assert same(Hand(bounded).alone(ids, **LOGPROBS), Hand(exact).alone(ids, **LOGPROBS))
    # in one step with a request that is trimmed
    hand = Hand(bounded, seed=1)
    trimmed, whole = hand.open(prompt(30), logprobs=5), hand.open(ids, **LOGPROBS)
    hand.step((trimmed, 30), (whole, 40))
    assert same(whole, Hand(bounded).alone(ids, **LOGPROBS))
    assert same(trimmed, Hand(bounded).alone(prompt(30), logprobs=5))


@pytest.mark.parametrize("cut", [None, 3, 8, 9])
def test_bounded_hit_is_the_oracles_bounded(
    bounded: ModelRunner, witness: Checkpoint, cut: int | None
) -> None:
    """Cached entries come from a cold run, only the window before the hit is run again, entries are not rewritten."""
    shared, hit = prompt(24, seed=7), 20
    ids = [*shared, *prompt(3, seed=9)]
    trace: oracle.Trace = {}
    with torch.inference_mode():
        oracle.forward(
            witness.config,
            witness.weights,
            torch.tensor([shared]),
            numerics=oracle.N2,
            token_map=witness.token_map,
            trace=trace,
        )
    sources = witness.config.kv_source_layer_ids
    start = hit - WINDOW
    cuts = [] if cut is None else [start + cut]
    replay = oracle.Replay(
        hit=hit,
        entries={
            s: trace[f"layers.{s}.entries"][:, : hit // witness.config.compress_ratios[s]] for s in sources
        },
        index_keys={
            s: trace[f"layers.{s}.index_keys"][:, : hit // witness.config.compress_ratios[s]] for s in sources
        },
        kept=kept(len(ids)),
    )
    logits = witnessed(witness, ids, replay=replay).logits_BTV
    assert logits is not None
    hand = Hand(bounded, seed=5)
    source = hand.open(shared, **LOGPROBS)  # prompt log-probabilities: a cold run that is not trimmed
    hand.prefill(source)
    live = hand.open(ids, logprobs=5)
    hand.hit(live, source, hit, replay=WINDOW)
    hand.prefill(live, *cuts)
    assert live.logprobs == token_logprobs(logits[0, -1:], live.tokens, counts=[5])


def test_facts(exact: ModelRunner, bounded: ModelRunner) -> None:
    facts = exact.facts
    assert (facts.sliding_window, facts.vocab_size, facts.eos_token_ids, facts.max_model_len) == (
        8,
        64,
        (1,),
        256,
    )
    assert facts.token_map_fingerprint == bounded.facts.token_map_fingerprint
