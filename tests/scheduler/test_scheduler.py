"""The scheduler against a runner that checks every block, position and token (see fake_runner)."""

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flashstep.config.cache import HitPolicy
from flashstep.config.speculative import Speculation
from flashstep.request import FinishReason
from flashstep.step import rows_ahead
from tests.scheduler.driving import Rig, request


def prompts(count: int, length: int, seed: int = 0) -> list[list[int]]:
    chance = random.Random(seed)
    return [[chance.randrange(2, 97) for _ in range(length)] for _ in range(count)]


# ---- random event sequences ------------------------------------------------------------------------------------------


@settings(
    max_examples=160, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(
    seed=st.integers(0, 1 << 30),
    policy=st.sampled_from(["fcfs", "priority"]),
    hit_policy=st.sampled_from(list(HitPolicy)),
    block_size=st.sampled_from([2, 4, 8]),
    window=st.sampled_from([3, 4, 8]),
    budget=st.sampled_from([1, 3, 7, 16, 64]),
    slots=st.sampled_from([1, 2, 5]),
    spare_blocks=st.integers(0, 12),
    spare_window=st.integers(0, 12),
    threshold=st.sampled_from([0, 5]),
    drafts=st.sampled_from([None, None, 1, 2, 5]),
    by_batch_size=st.sampled_from([(), ((2, 9, 0),), ((2, 3, 1), (4, 4, 0))]),
)
def test_any_sequence_of_events_gives_the_tokens_of_a_sequential_run(
    seed,
    policy,
    hit_policy,
    block_size,
    window,
    budget,
    slots,
    spare_blocks,
    spare_window,
    threshold,
    drafts,
    by_batch_size,
):
    chance = random.Random(seed)
    max_model_len = 40
    ahead = rows_ahead(drafts or 0) - 1
    rig = Rig(
        num_blocks=-(-max_model_len // block_size) + spare_blocks,
        num_window_blocks=-(-(window + ahead) // block_size) + 2 + spare_window,
        block_size=block_size,
        window=window,
        max_model_len=max_model_len,
        hit_policy=hit_policy,
        speculation=None if drafts is None else Speculation(num_tokens=drafts, by_batch_size=by_batch_size),
        order_seed=seed,
        max_num_seqs=slots,
        max_num_batched_tokens=budget,
        long_prefill_token_threshold=threshold,
        policy=policy,
    )
    shared = prompts(2, 40, seed)
    names: list[str] = []
    for number in range(chance.randrange(1, 25)):
        event = chance.random()
        if event < 0.6 or not names:
            stem = chance.choice(shared)[: chance.randrange(1, 39)]
            ended = [name for name in names if rig.told[name].finish_reason is not None]
            if ended and chance.random() < 0.4:  # somebody's answer is continued, or asked about
                name = chance.choice(ended)
                stem = [*rig.requests[name].prompt, *rig.told[name].tokens][: chance.choice([38, 39, 39])]
            tail = [chance.randrange(2, 97) for _ in range(chance.choice([0, 0, 1, 5]))]
            told_logprobs = chance.choice([None, None, None, 0])
            prompt = (stem + tail)[:39]
            handed_over = told_logprobs is None and chance.random() < 0.4
            item = request(
                f"r{number}",
                prompt,
                chance.choice([1, 2, 9, 60]),
                seed=chance.randrange(5),
                ignore_eos=chance.random() < 0.5,
                stop_token_ids=tuple(chance.sample(range(2, 97), 2)),
                prompt_logprobs=told_logprobs,
                transferred=chance.choice([len(prompt) - 1, chance.randrange(len(prompt))])
                if handed_over
                else 0,
                priority=chance.randrange(3),
                arrival=rig.time,
                cache_salt=chance.choice(["", "", "other"]),
            )
            rig.add(item)
            names.append(item.id)
        elif event < 0.7:
            rig.abort(*chance.sample(names, min(len(names), 2)))
        for _ in range(chance.randrange(5)):
            chance.choice([rig.plan, rig.run, rig.commit])()
            rig.time += 0.1
        rig.scheduler.check_integrity()
    rig.finish()
    rig.check_outputs()
    for name, item in rig.requests.items():
        told = rig.told[name]
        if item.params.prompt_logprobs is not None and told.finish_reason is not FinishReason.ABORT:
            assert [p.token for p in told.prompt_logprobs] == list(item.prompt[1:])


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlapped", [False, True])
def test_preemption_recomputes_and_everybody_finishes(overlapped):
    """A13: a pool for one and a half requests, six at once."""
    rig = Rig(
        num_blocks=27, num_window_blocks=30, max_model_len=72, max_num_batched_tokens=32, max_num_seqs=8
    )
    rig.add(*(request(f"r{i}", p, 64, ignore_eos=True) for i, p in enumerate(prompts(6, 8))))
    rig.finish(overlapped=overlapped)
    rig.check_outputs()
    assert rig.scheduler.stats().preemptions > 0
    assert (
        sum(told.outputs[-1].preemptions for told in rig.told.values()) == rig.scheduler.stats().preemptions
    )
    sofar = [[output.preemptions for output in told.outputs] for told in rig.told.values()]
    assert all(counts == sorted(counts) for counts in sofar)
    assert any(counts[-2] for counts in sofar), "known before the end, for who stops listening earlier"


def test_a_preempted_request_stands_at_the_head_and_is_the_last_admitted():
    rig = Rig(
        num_blocks=7, num_window_blocks=30, max_model_len=28, max_num_seqs=4, enable_prefix_caching=False
    )
    rig.add(*(request(n, p, 20, ignore_eos=True) for n, p in zip("abcd", prompts(4, 7), strict=True)))
    rig.step()  # a, b and c take two blocks each; d needs two and finds one
    assert [a.request_id for a in rig.plans[0].admitted] == ["a", "b", "c"]
    while not any(plan.released for plan in rig.plans):
        assert rig.step()
    preempting = next(plan for plan in rig.plans if plan.released)
    assert preempting.admitted == ()
    while len([a for plan in rig.plans for a in plan.admitted]) == 3:
        assert rig.step()
    back = [a.request_id for plan in rig.plans for a in plan.admitted][3]
    assert back in ("b", "c"), "the head of the line is who was preempted, not d"
    rig.finish()
    rig.check_outputs()


def test_one_victim_is_enough_while_its_blocks_are_on_their_way():
    """Four requests reach a block's edge in the same step, with a step in flight that still holds the victim's blocks."""
    rig = Rig(num_blocks=8, num_window_blocks=30, max_model_len=32, enable_prefix_caching=False)
    rig.add(*(request(n, p, 20, ignore_eos=True) for n, p in zip("abcd", prompts(4, 7), strict=True)))
    while not any(plan.released for plan in rig.plans):
        while rig.plan() is not None:
            pass
        assert rig.commit()
    assert [plan.released for plan in rig.plans if plan.released] == [(3,)]
    rig.finish()
    rig.check_outputs()


def test_blocks_of_a_finished_request_wait_for_its_steps_in_flight():
    rig = Rig(num_blocks=8, max_model_len=32, enable_prefix_caching=False)
    rig.add(request("a", prompts(1, 8)[0], 20, ignore_eos=True))
    rig.plan()
    rig.plan()
    rig.abort("a")
    usage = rig.scheduler.stats().cache_usage
    assert usage > 0, "two steps that write its blocks have not returned"
    rig.commit()
    assert rig.scheduler.stats().cache_usage == usage
    rig.commit()
    assert rig.scheduler.stats().cache_usage == 0
    rig.scheduler.check_integrity()


def test_windows_slide_so_that_a_long_request_holds_few_window_blocks():
    rig = Rig(num_blocks=100, num_window_blocks=8, max_model_len=400, max_num_batched_tokens=16)
    rig.add(request("long", prompts(1, 300)[0], 90, ignore_eos=True))
    rig.finish()
    rig.check_outputs()


def test_a_long_chunk_leaves_window_blocks_to_those_who_decode():
    rig = Rig(
        num_blocks=200, num_window_blocks=20, max_model_len=400, max_num_batched_tokens=64, max_num_seqs=8
    )
    rig.add(*(request(f"r{i}", p, 100, ignore_eos=True) for i, p in enumerate(prompts(3, 8))))
    for _ in range(5):
        rig.step()
    rig.add(request("long", prompts(1, 300)[0], 5))
    rig.finish()
    rig.check_outputs()
    assert rig.scheduler.stats().preemptions == 0
    decoding = [sum(span.length == 1 for span in plan.spans) for plan in rig.plans[5:60]]
    assert min(decoding) >= 3, "nobody pauses for the long prompt's chunks"


# ---- prefix cache ----------------------------------------------------------------------------------------------------


def cached(rig: Rig, name: str) -> int | None:
    return rig.told[name].outputs[0].cached_tokens


def test_a_repeated_prompt_hits_and_unrelated_ones_between_change_nothing():
    """A01: the same prompt three times, with others between that reuse its slot."""
    rig = Rig(window=8)
    x, y, z = prompts(3, 3 * 8 + 5)
    for name, prompt in [("x1", x), ("y", y), ("x2", x), ("z", z), ("x3", x)]:
        rig.add(request(name, prompt, 16))
        rig.finish()
    rig.check_outputs()
    assert [cached(rig, n) for n in ("x1", "y", "x2", "z", "x3")] == [0, 0, 28, 0, 28]


@pytest.mark.parametrize("block_size", [4, 16])
def test_partial_and_short_prefixes_hit_to_the_block(block_size):
    """A02: P of 5b + 3 tokens with different tails; and 1.5b tokens alone, twice."""
    b = block_size
    rig = Rig(block_size=b, window=8, max_model_len=8 * b)
    stem, t1, t2, t3 = (
        p[:n] for p, n in zip(prompts(4, 6 * b), (5 * b + 3, 2 * b, 2 * b, b // 2), strict=True)
    )
    for name, tail in (("1", t1), ("2", t2), ("3", t3)):
        rig.add(request(name, stem + tail))
        rig.finish()
    short = prompts(1, 3 * b // 2, seed=5)[0]
    for name in ("short1", "short2"):
        rig.add(request(name, short))
        rig.finish()
    rig.check_outputs()
    assert [cached(rig, n) for n in ("1", "2", "3", "short1", "short2")] == [0, 5 * b, 5 * b, 0, b]


def test_at_least_one_prompt_token_is_computed():
    rig = Rig(block_size=4)
    prompt = prompts(1, 16)[0]
    for name in "ab":
        rig.add(request(name, prompt, 1))
        rig.finish()
    assert cached(rig, "b") == 12
    assert rig.plans[-1].spans[0].length == 4


def test_an_odd_cut_never_splits_a_pair():
    """A04: hits end at a block's edge, and blocks are even, whatever the lengths."""
    rig = Rig(block_size=2, window=3)
    stem = prompts(1, 40)[0]
    for length in range(1, 40):
        rig.add(request(f"r{length}", stem[:length], 3, ignore_eos=True))
        rig.finish()
        hit = cached(rig, f"r{length}")
        assert hit is not None and hit % 2 == 0
        assert hit == (length - 1) // 2 * 2 if length > 2 else True
    rig.check_outputs()


def test_outputs_extend_the_cached_prefix():
    """A second turn finds the blocks that the first turn's answer filled."""
    rig = Rig(block_size=4)
    first = request("1", prompts(1, 9)[0], 12, ignore_eos=True)
    rig.add(first)
    rig.finish()
    turn = [*first.prompt, *rig.told["1"].tokens, 5, 6, 7]
    rig.add(request("2", turn))
    rig.finish()
    rig.check_outputs()
    assert cached(rig, "2") == 20  # 21 tokens, of which the last was never computed


def test_a_salt_isolates_tenants():
    rig = Rig()
    prompt = prompts(1, 30)[0]
    for name, salt in (("a", "x"), ("b", "y"), ("c", "x")):
        rig.add(request(name, prompt, cache_salt=salt))
        rig.finish()
    assert [cached(rig, n) for n in "abc"] == [0, 0, 28]


def test_prompt_logprobs_need_every_row():
    rig = Rig()
    prompt = prompts(1, 30)[0]
    for name, wanted in (("a", None), ("b", 0), ("c", None)):
        rig.add(request(name, prompt, prompt_logprobs=wanted))
        rig.finish()
    assert [cached(rig, n) for n in "abc"] == [0, 0, 28]
    assert [item.token for item in rig.told["b"].prompt_logprobs] == prompt[1:]


@pytest.mark.parametrize("budget", [64, 3])
def test_a_bounded_hit_replays_one_window_and_a_short_one_is_a_miss(budget):
    rig = Rig(block_size=4, window=8, hit_policy=HitPolicy.BOUNDED, max_num_batched_tokens=budget)
    long, short = prompts(1, 30)[0], prompts(1, 11, seed=9)[0]
    for name, prompt in (("a", long), ("b", long), ("c", short), ("d", short)):
        rig.add(request(name, prompt))
        rig.finish()
    rig.check_outputs()
    assert [cached(rig, n) for n in "abcd"] == [0, 28, 0, 0], "a hit of 8 = window is a miss"
    assert [rig.told[n].outputs[0].replayed_tokens for n in "abcd"] == [0, 8, 0, 0]
    assert rig.scheduler.stats().replayed_tokens == 8
    assert rig.runner.replayed == 8


def test_the_next_plan_finds_what_the_plan_in_flight_computes():
    rig = Rig()
    prompt = prompts(1, 30)[0]
    rig.add(request("a", prompt))
    rig.plan()
    rig.add(request("b", prompt))
    rig.plan()
    assert rig.plans[1].admitted[0].computed == 28
    rig.finish()
    rig.check_outputs()


# ---- limits and ends -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "outputs"), [(62, 2), (63, 1)])
def test_the_context_is_filled_to_its_last_place(length, outputs):
    """A23: limit 64; the fake runner asserts that no position >= 64 is ever computed."""
    rig = Rig(max_model_len=64)
    rig.add(request("a", prompts(1, length)[0], 100, ignore_eos=True))
    rig.finish()
    assert len(rig.told["a"].tokens) == outputs
    assert rig.told["a"].finish_reason is FinishReason.LENGTH


def test_what_can_never_run_is_refused_with_both_numbers():
    rig = Rig(max_model_len=64)
    for length in (64, 65):
        with pytest.raises(ValueError, match=rf"{length} tokens.*64"):
            rig.scheduler.add(request("a", prompts(1, length)[0]))
    with pytest.raises(ValueError, match="empty"):  # A21
        rig.scheduler.add(request("a", ()))
    with pytest.raises(ValueError, match="max_tokens"):
        rig.scheduler.add(request("a", (3,), 0))
    rig.add(request("a", (3,)))
    with pytest.raises(ValueError, match="in use"):
        rig.scheduler.add(request("a", (3,)))


def test_a_late_stop_wastes_one_step_and_its_token_is_thrown_away():
    rig = Rig()
    prompt = prompts(1, 5)[0]
    rig.add(request("probe", prompt, 6, ignore_eos=True))
    rig.finish()
    stop = rig.told["probe"].tokens[2]
    rig.add(request("a", prompt, 50, ignore_eos=True, stop_token_ids=(stop,)))
    before = len(rig.plans)
    rig.finish()
    assert rig.told["a"].finish_reason is FinishReason.STOP
    assert rig.told["a"].outputs[-1].stop_token == stop
    assert len(rig.plans) - before == len(rig.told["a"].tokens) + 1


def test_the_last_token_by_length_wastes_nothing():
    rig = Rig()
    rig.add(request("a", prompts(1, 5)[0], 6, ignore_eos=True))
    rig.finish()
    assert len(rig.plans) == 6


def test_an_accepted_run_of_several_tokens_ends_at_the_stop(monkeypatch):
    """A11 through commit: whatever stands behind the stop is neither told nor counted."""
    rig = Rig()
    rig.add(request("a", prompts(1, 5)[0], 5, ignore_eos=True, stop_token_ids=(12,)))
    rig.plan()
    plan, requests = rig.planned.popleft()
    result = rig.runner.run(plan, requests)
    span = type(result.spans[0])(slot=0, request_id="a", tokens=(10, 11, 12, 20, 21, 22))
    rig.take(rig.scheduler.commit(type(result)(step=0, spans=(span,))))
    assert rig.told["a"].tokens == [10, 11, 12]
    assert rig.told["a"].finish_reason is FinishReason.STOP
    assert rig.scheduler.stats().generation_tokens == 3
    rig.scheduler.check_integrity()


def test_abort_in_every_state_gives_everything_back():
    """A20: waiting, in a chunk, decoding, with one and two steps in flight, twice, and unknown ids."""
    for moves in range(8):
        rig = Rig(max_num_seqs=1, max_num_batched_tokens=8)
        rig.add(*(request(n, p, 50, ignore_eos=True) for n, p in zip("ab", prompts(2, 20), strict=True)))
        for move in range(moves):
            (rig.plan, rig.plan, rig.commit)[move % 3]()
        rig.abort("b", "a", "nobody", "a")
        rig.abort("a")
        while rig.commit():
            pass
        assert not rig.scheduler.has_work
        rig.scheduler.check_integrity()
        assert {told.finish_reason for told in rig.told.values()} == {FinishReason.ABORT}


def test_bad_limits_are_refused_all_at_once():
    with pytest.raises(
        ValueError, match=r"block_size is 3.*policy is 'lifo'.*blocks of 3.*num_window_blocks is 1"
    ):
        Rig(block_size=3, num_blocks=4, num_window_blocks=1, policy="lifo")


# ---- fairness --------------------------------------------------------------------------------------------------------


def test_512_requests_on_64_slots_finish_in_order_of_arrival():
    """A35."""
    rig = Rig(num_blocks=600, num_window_blocks=600, max_num_seqs=64, max_num_batched_tokens=256)
    rig.add(*(request(f"r{i}", p, 6, ignore_eos=True) for i, p in enumerate(prompts(512, 6))))
    rig.finish()
    rig.check_outputs()
    assert rig.finish_order == [f"r{i}" for i in range(512)]


def test_priority_goes_first_and_arrival_breaks_ties():
    rig = Rig(policy="priority", max_num_seqs=1)
    data = [("a", 1, 0.0), ("b", 0, 3.0), ("c", 1, -1.0), ("d", -5, 9.0), ("e", 0, 2.0)]
    rig.add(*(request(n, (5, 6), 2, ignore_eos=True, priority=p, arrival=t) for n, p, t in data))
    rig.finish()
    assert rig.finish_order == ["d", "e", "b", "c", "a"]


def test_a_prompt_of_ten_budgets_is_chunked():
    rig = Rig(num_blocks=50, max_model_len=200, max_num_batched_tokens=16)
    rig.add(request("long", prompts(1, 160)[0], 3, ignore_eos=True))
    rig.finish()
    rig.check_outputs()
    assert [plan.rows for plan in rig.plans] == [16] * 10 + [1, 1]


def test_long_prompts_starve_neither_decodes_nor_short_prompts():
    rig = Rig(
        num_blocks=1200,
        num_window_blocks=400,
        max_model_len=1000,
        max_num_batched_tokens=32,
        enable_prefix_caching=False,
    )
    rig.add(request("chat", (5, 6, 7), 200, ignore_eos=True))
    rig.step()
    rig.add(*(request(f"long{i}", p, 2, ignore_eos=True) for i, p in enumerate(prompts(4, 900))))
    for number in range(12):
        before = len(rig.told["chat"].tokens)
        rig.add(request(f"short{number}", prompts(1, 10, number)[0], 1))
        for _ in range(2):
            rig.step()
        assert len(rig.told["chat"].tokens) == before + 2, "a decode runs in every step"
        assert rig.told[f"short{number}"].finish_reason is not None, "ten tokens get through beside 3600"
    half = [sum(s.length for s in plan.spans if s.slot == 1) for plan in rig.plans[1:]]
    assert min(half) >= 15, "the oldest prompt always gets half of what decodes leave"
    rig.finish()
    rig.check_outputs()


def test_a_threshold_caps_a_long_prompt_only_while_others_wait():
    rig = Rig(num_blocks=100, max_model_len=200, max_num_batched_tokens=64, long_prefill_token_threshold=8)
    rig.add(request("a", prompts(1, 100)[0], 1))
    rig.step()
    assert rig.plans[0].rows == 64
    rig.add(request("b", prompts(1, 100, 3)[0], 1))
    rig.step()
    assert [span.length for span in rig.plans[1].spans] == [8, 8]
    rig.finish()


def test_block_numbers_do_not_matter():
    """A07: twenty permuted free lists; the fake runner's tags find a wrong block, the tokens say the same."""
    told = []
    for seed in range(20):
        rig = Rig(
            num_blocks=30, num_window_blocks=30, max_model_len=40, order_seed=seed, max_num_batched_tokens=16
        )
        rig.add(*(request(f"r{i}", p[: 3 + i], 12, ignore_eos=True) for i, p in enumerate(prompts(15, 17))))
        rig.finish()
        told.append({name: item.tokens for name, item in rig.told.items()})
    assert all(item == told[0] for item in told)


def test_stats_count():
    rig = Rig()
    prompt = prompts(1, 30)[0]
    rig.add(request("a", prompt, 4, ignore_eos=True))
    rig.finish()
    rig.add(request("b", prompt, 4, ignore_eos=True))
    stats = rig.scheduler.stats()
    assert (stats.running, stats.waiting, stats.generation_tokens, stats.prompt_tokens) == (0, 1, 4, 30)
    rig.finish()
    stats = rig.scheduler.stats()
    assert (stats.prefix_queries, stats.prefix_hits, stats.generation_tokens, stats.prompt_tokens) == (
        60,
        28,
        8,
        60,
    )
    assert stats.steps == len(rig.plans)
    assert (stats.cached_tokens, stats.replayed_tokens) == (28, 0)
    rows = [sum(span.length for span in plan.spans) for plan in rig.plans]
    assert stats.rows == sum(rows)
    assert sum(stats.step_rows) == stats.steps
    for power, steps in enumerate(stats.step_rows):
        assert steps == sum((1 << power) // 2 < n <= 1 << power for n in rows)


# ---- drafts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("k", range(1, 9))
def test_drafts_change_the_number_of_steps_and_nothing_else(k, overlapped):
    rig = Rig(num_blocks=200, num_window_blocks=100, speculation=Speculation(num_tokens=k), max_num_seqs=4)
    for number, length in enumerate(range(1, 10)):
        rig.add(request(f"r{number}", prompts(1, length, number)[0], 60, seed=number, ignore_eos=True))
    rig.finish(overlapped=overlapped)
    rig.check_outputs()
    counts = rig.scheduler.stats().acceptance
    assert counts is not None and not counts.synthetic and counts.num_tokens == k
    assert all(counts.histogram), "every number of accepted drafts occurs"
    assert counts.steps == sum(counts.histogram)
    assert counts.accepted_tokens == sum(counts.per_position)
    # a request's first token comes of its prompt, all others of steps that verify drafts, or have no room for any
    tokens = sum(len(told.tokens) for told in rig.told.values())
    assert (
        tokens - len(rig.told) - 9 <= counts.accepted_tokens + counts.steps <= tokens - len(rig.told) + 8 * k
    )
    ends = [told.outputs[-1].acceptance for told in rig.told.values()]
    assert sum(end.steps for end in ends) == counts.steps
    assert sum(end.draft_tokens for end in ends) == counts.draft_tokens


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("k", [1, 5])
def test_a_preempted_request_loses_its_drafts_and_no_token(k, overlapped):
    """A13: a pool for one and a half requests, six at once, with drafts."""
    rig = Rig(
        num_blocks=27,
        num_window_blocks=30,
        max_model_len=72,
        max_num_batched_tokens=32,
        max_num_seqs=8,
        speculation=Speculation(num_tokens=k),
    )
    rig.add(*(request(f"r{n}", prompts(1, 8, n)[0], 64, seed=n, ignore_eos=True) for n in range(6)))
    rig.finish(overlapped=overlapped)
    rig.check_outputs()
    assert rig.scheduler.stats().preemptions > 0


def test_fewer_drafts_at_larger_batches():
    speculation = Speculation(num_tokens=5, by_batch_size=((3, 4, 2), (5, 9, 0)))
    rig = Rig(num_blocks=200, num_window_blocks=200, max_num_seqs=8, speculation=speculation)
    for number in range(6):
        rig.add(
            request(f"r{number}", prompts(1, 4, number)[0], 10 + 10 * number, seed=number, ignore_eos=True)
        )
    rig.finish(overlapped=False)
    rig.check_outputs()
    for plan in rig.plans:
        decoding = [span for span in plan.spans if span.drafts is not None]
        wanted = {0: 0, 1: 5, 2: 5, 3: 2, 4: 2, 5: 0, 6: 0}[len(decoding)]
        assert {span.drafts for span in decoding} <= {wanted}, "the size counts those that decode"
        assert plan.propose == speculation.depth(sum(span.sample for span in plan.spans))
    assert {len(plan.spans) for plan in rig.plans} >= {1, 3, 6}


@pytest.mark.parametrize("stop", [(), (5, 6, 7, 8, 9, 10, 11, 12)])
@pytest.mark.parametrize("overlapped", [False, True])
def test_what_is_counted_is_what_was_verified(stop, overlapped):
    """Of all requests and of each: steps that verified drafts, drafts, and how many stood; nothing after an end counts."""
    rig = Rig(num_blocks=200, num_window_blocks=100, speculation=Speculation(num_tokens=5), max_num_seqs=4)
    for number in range(8):
        rig.add(
            request(
                f"r{number}", prompts(1, 5, number)[0], 40, seed=number, ignore_eos=True, stop_token_ids=stop
            )
        )
    counted = [0, 0, 0]
    while rig.scheduler.has_work:
        while rig.plan() is not None and overlapped:
            pass
        rig.run()
        result = rig.returned[-1]
        for span in result.spans:
            if span.drafted and rig.told[span.request_id].finish_reason is None:
                for place, count in enumerate((1, span.drafted, len(span.tokens) - 1)):
                    counted[place] += count
        rig.commit()
    total = rig.scheduler.stats().acceptance
    assert total is not None
    assert [total.steps, total.draft_tokens, total.accepted_tokens] == counted
    ends = [told.outputs[-1].acceptance for told in rig.told.values()]
    for name in ("steps", "draft_tokens", "accepted_tokens"):
        assert sum(getattr(end, name) for end in ends) == getattr(total, name)
    for name in ("histogram", "per_position"):
        assert tuple(map(sum, zip(*(getattr(end, name) for end in ends), strict=True))) == getattr(
            total, name
        )


@pytest.mark.parametrize("k", [1, 3, 5])
@pytest.mark.parametrize("length", range(1, 9))
def test_an_answer_that_length_ended_can_be_continued_from_the_cache(k, length):
    """The last token of an answer never gets a row, so its block is not whole: who finds it would read what nobody wrote."""
    rig = Rig(num_blocks=200, num_window_blocks=100, block_size=4, speculation=Speculation(num_tokens=k))
    for limit in range(1, 14):
        rig.add(request(f"a{limit}", prompts(1, length, limit)[0], limit, seed=limit, ignore_eos=True))
    rig.finish()
    for limit in range(1, 14):
        told = rig.told[f"a{limit}"].tokens
        rig.add(request(f"b{limit}", [*prompts(1, length, limit)[0], *told, 50], 6, seed=1, ignore_eos=True))
    rig.finish()  # the rig's runner looks at every record that is read
    rig.check_outputs()
    assert rig.scheduler.stats().prefix_hits > 0


def test_drafts_starve_nobody():
    """A budget of 12 rows, six who decode and one who arrives late: everybody gets a token in every step."""
    rig = Rig(
        num_blocks=400,
        num_window_blocks=200,
        max_model_len=400,
        max_num_seqs=8,
        max_num_batched_tokens=12,
        speculation=Speculation(num_tokens=5),
    )
    for number in range(6):
        rig.add(request(f"r{number}", prompts(1, 4, number)[0], 390, seed=number, ignore_eos=True))
    for _ in range(20):
        rig.step()
    rig.add(request("late", prompts(1, 30, 9)[0], 20, seed=9, ignore_eos=True))
    for _ in range(60):
        before = {name: len(told.tokens) for name, told in rig.told.items()}
        rig.step()
        decoding = [n for n in before if n != "late" and rig.told[n].finish_reason is None]
        assert all(len(rig.told[name].tokens) > before[name] for name in decoding)
        assert rig.plans[-1].rows <= 12
    assert rig.told["late"].finish_reason is not None
    rig.finish()
    rig.check_outputs()


def test_blocks_for_drafts_preempt_nobody():
    """Blocks for every newest token and few more: fewer drafts, not fewer requests."""
    for speculation in (None, Speculation(num_tokens=5)):
        rig = Rig(
            num_blocks=22, num_window_blocks=90, max_model_len=56, max_num_seqs=5, speculation=speculation
        )
        rig.add(request("long", prompts(1, 4)[0], 52, seed=0, ignore_eos=True))
        rig.add(*(request(f"r{n}", prompts(1, 12, n)[0], 8, seed=n, ignore_eos=True) for n in range(1, 5)))
        rig.finish(overlapped=False)
        rig.check_outputs()
        assert rig.scheduler.stats().preemptions == 0
    cut = [span.drafts for plan in rig.plans for span in plan.spans if span.drafts in range(5)]
    assert cut, "blocks were short"


def test_a_prompt_does_not_count_as_decoding():
    speculation = Speculation(num_tokens=5, by_batch_size=((2, 9, 0),))
    rig = Rig(max_num_batched_tokens=24, max_num_seqs=4, speculation=speculation)
    rig.add(request("r", prompts(1, 4)[0], 60, seed=0, ignore_eos=True))
    rig.step()
    rig.add(request("late", prompts(1, 60, 1)[0], 2, seed=1, ignore_eos=True))
    rig.step()
    rig.step()
    decoding = [span.drafts for plan in rig.plans[1:3] for span in plan.spans if span.drafts is not None]
    assert decoding == [5, 5], "the other one is in the middle of its prompt"
    rig.finish()
    rig.check_outputs()


def test_the_smallest_window_pool_serves_drafts():
    """What the scheduler demands is enough, and one block less is refused."""
    least = -(-(8 + 2 * 6 - 1) // 4) + 2
    with pytest.raises(ValueError, match=f"needs {least}"):
        Rig(num_window_blocks=least - 1, speculation=Speculation(num_tokens=5))
    rig = Rig(num_window_blocks=least, speculation=Speculation(num_tokens=5))
    rig.add(*(request(f"r{n}", prompts(1, 9, n)[0], 60, seed=n, ignore_eos=True) for n in range(3)))
    rig.finish()
    rig.check_outputs()


# ---- prompts whose records come from outside -------------------------------------------------------------------------


@pytest.mark.parametrize("hit_policy", list(HitPolicy))
@pytest.mark.parametrize("length", [2, 3, 9, 40, 41])
def test_a_prompt_that_was_handed_over_takes_one_row(length, hit_policy):
    """All of its global blocks, the window blocks of its end, and one row: that of its last token."""
    rig = Rig(hit_policy=hit_policy, block_size=4, window=8, max_num_batched_tokens=16)
    rig.add(request("r", prompts(1, length)[0], 3, ignore_eos=True, transferred=length - 1))
    plan = rig.plan()
    assert plan is not None and len(plan.spans) == 1
    span = plan.spans[0]
    assert (span.start, span.length, span.sample, span.replay) == (length - 1, 1, True, 0)
    assert span.transferred == length - 1 and plan.admitted[0].computed == length - 1
    assert len(span.blocks) == -(-length // 4)
    assert span.window_base == max(length - 1 - 8, 0) // 4
    assert span.window_base + len(span.window_blocks) == -(-length // 4)
    rig.finish()
    rig.check_outputs()
    assert rig.runner.transferred == length - 1 and rig.runner.rows == 3
    assert rig.scheduler.stats().transferred_tokens == length - 1 and rig.scheduler.stats().cached_tokens == 0


def test_a_whole_batch_is_handed_over_in_one_step():
    rig = Rig(num_blocks=200, num_window_blocks=80, max_num_seqs=16, max_num_batched_tokens=16)
    rig.add(*(request(f"r{n}", p, 4, transferred=39) for n, p in enumerate(prompts(16, 40))))
    plan = rig.plan()
    assert plan is not None and len(plan.spans) == 16 and plan.rows == 16
    rig.finish()
    rig.check_outputs()


def test_what_is_cached_here_does_not_come_from_outside():
    """A hit goes before the rest; its window blocks stay where the new window reaches into them."""
    rig = Rig(block_size=4, window=8)
    first = prompts(1, 24)[0]
    rig.add(request("a", first, 1))
    rig.finish()
    for name, more in (("near", 3), ("far", 30)):
        longer = [*first, *prompts(1, more, seed=more)[0]]
        rig.add(request(name, longer, 2, ignore_eos=True, transferred=len(longer) - 1))
        plan = rig.plan()
        assert plan is not None and plan.spans[0].transferred == len(longer) - 1 - 24
        rig.finish()
    rig.check_outputs()
    stats = rig.scheduler.stats()
    assert stats.transferred_tokens == 2 + 29 and stats.cached_tokens == stats.prefix_hits == 48
    assert cached(rig, "near") == cached(rig, "far") == 24


@pytest.mark.parametrize("length", [40, 41, 42, 43])
def test_bounded_hits_are_left_alone_where_a_cache_comes(length):
    """Also where they are as long as what comes: no window is replayed beside a true one."""
    rig = Rig(hit_policy=HitPolicy.BOUNDED, block_size=4, window=8)
    for name in "ab":
        rig.add(request(name, prompts(1, length)[0], 3, ignore_eos=True, transferred=length - 1))
        rig.finish()
    rig.check_outputs()
    stats = rig.scheduler.stats()
    assert stats.transferred_tokens == rig.runner.transferred == 2 * (length - 1)
    assert stats.cached_tokens == stats.replayed_tokens == stats.prefix_hits == 0


def test_who_is_preempted_before_the_first_token_has_computed_its_prompt():
    """A chunk of it has run; the urgent request then takes its blocks."""
    rig = Rig(
        num_blocks=12, num_window_blocks=20, max_model_len=48, max_num_batched_tokens=4, max_num_seqs=2,
        enable_prefix_caching=False, policy="priority",
    )  # fmt: skip
    rig.add(request("urgent", prompts(1, 13)[0], 34, ignore_eos=True, priority=0))
    for _ in range(4):
        rig.step()
    rig.add(request("r", prompts(1, 30)[0], 4, ignore_eos=True, transferred=8, priority=1))
    rig.step()
    assert rig.runner.transferred == 8
    rig.finish()
    rig.check_outputs()
    assert rig.told["r"].outputs[-1].preemptions == 1
    (told,) = {output.transferred_tokens for output in rig.told["r"].outputs} - {None}
    assert told == rig.scheduler.stats().transferred_tokens == 0


def test_who_is_let_in_has_room_for_the_rows_of_two_steps_in_flight():
    """Window blocks for three of four, counted as ``cache.budget`` counts them: the fourth waits and preempts nobody."""
    size, window = 4, 8
    each = -(-(window + rows_ahead(0) - 1) // size) + 1
    rig = Rig(
        block_size=size, window=window, num_blocks=300, num_window_blocks=3 * each, max_num_seqs=4,
        max_num_batched_tokens=32, enable_prefix_caching=False,
    )  # fmt: skip
    rig.add(*(request(f"r{n}", p, 60, ignore_eos=True) for n, p in enumerate(prompts(8, 16))))
    rig.finish()
    rig.check_outputs()
    assert rig.scheduler.stats().preemptions == 0


def test_a_preempted_request_computes_what_was_handed_over_to_it():
    rig = Rig(
        num_blocks=20, num_window_blocks=20, max_model_len=64, max_num_batched_tokens=32, max_num_seqs=4
    )
    rig.add(*(request(f"r{n}", p, 32, ignore_eos=True, transferred=15) for n, p in enumerate(prompts(3, 16))))
    rig.finish()
    rig.check_outputs()
    assert rig.scheduler.stats().preemptions > 0 and rig.runner.transferred == 3 * 15
    assert rig.runner.rows > 3 * 32 + 15, "a prompt was computed"


def test_what_cannot_be_handed_over_is_refused():
    rig = Rig()
    for transferred in (5, -1):
        with pytest.raises(ValueError, match="has at most 4 of them"):
            rig.add(request("r", prompts(1, 5)[0], transferred=transferred))
    with pytest.raises(ValueError, match="prompt_logprobs needs every row"):
        rig.add(request("r", prompts(1, 5)[0], transferred=4, prompt_logprobs=0))
