"""Speculation through scheduler, runner and model: point-mass drafts change the number of steps, and nothing else.

Cases A08, A10, A13 and A14 of shared/cases, and everything that a request may ask for beside them. Steps overlap as in the
engine's loop. Scripted drafters stand in for the draft layers where a test must choose what is accepted.
"""

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flashstep.config.cache import HitPolicy
from flashstep.config.speculative import DraftSampleMethod, RejectionSampleMethod, SpeculativeOptions
from flashstep.engine.engine import Engine
from flashstep.runner.build import build_runner
from flashstep.speculate.depth import survivals
from flashstep.speculate.scripted import Scripted
from flashstep.weights.dummy import write_dummy
from tests.e2e.test_engine import Story, prompt, request, run, tokens, told
from tests.runner.conftest import write_tokenizer
from tests.speculate.memory import Memory, engine_config
from tests.weights.conftest import tiny_json

DEEPEST = 8
EOS = 1
POINT_MASSES = [
    SpeculativeOptions(num_speculative_tokens=k, rejection_sample_method=method)
    for k, method in (
        (1, RejectionSampleMethod.STANDARD),
        (5, RejectionSampleMethod.STANDARD),
        (5, RejectionSampleMethod.BLOCK),
    )
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Drafts of up to ``DEEPEST`` tokens, over a target that is random too."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("tiny")
    write_dummy(folder, tiny_json(dspark_block_size=DEEPEST), seed=11)
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def make_engine(checkpoint: Path) -> Callable[..., Engine]:
    def make(k: int | None = None, **options: object) -> Engine:
        if k is not None:
            options["speculative"] = SpeculativeOptions(num_speculative_tokens=k)
        return Engine(build_runner(engine_config(checkpoint, **options)), seed=0)

    return make


def scripted(next_drafts: Callable[[int, int, int], list[int]]) -> Scripted:
    """``next_drafts(seed, output position of the newest token, count)`` decides: requests are known by their seeds."""
    return Scripted(lambda anchor, count: next_drafts(anchor.seed, anchor.output_position, count))


def use(engine: Engine, next_drafts: Callable[[int, int, int], list[int]]) -> Engine:
    """Let ``next_drafts`` propose in ``engine``."""
    engine._runner.drafter = scripted(next_drafts)
    return engine


def seeded(engine: Engine, requests: list) -> dict[int, list[int]]:
    """The tokens of each request's seed, without speculation."""
    outputs = run(engine, *requests)
    return {each.params.seed: tokens(outputs[each.id]) for each in requests}


def right_until(
    truth: dict[int, list[int]], wrong: Callable[[int, int], int]
) -> Callable[[int, int, int], list[int]]:
    """Drafts that are the true tokens but for place ``wrong(seed, output position)``."""

    def next_drafts(seed: int, position: int, count: int) -> list[int]:
        drafts = (truth[seed][position + 1 :] + [0] * count)[:count]
        if (place := wrong(seed, position)) < count:
            drafts[place] = (drafts[place] + 1) % 64
        return drafts

    return next_drafts


# ---- A08: every number of accepted drafts at every parity -------------------------------------------------------------


class Truth(NamedTuple):
    """What a run without drafts gave: tokens by seed, and every record that was ever settled, by seed."""

    requests: list
    tokens: dict[int, list[int]]
    records: dict[int, dict[tuple, bytes]]


@pytest.fixture(scope="module")
def truth(checkpoint: Path) -> Truth:
    requests = [request(f"p{n}", prompt(n), max_tokens=44, seed=n) for n in range(1, 9)]
    with pytest.MonkeyPatch.context() as patch:
        plain = Memory.build(engine_config(checkpoint), patch)
    records: dict[int, dict[tuple, bytes]] = {n: {} for n in range(1, 9)}
    story = Story(plain.engine())
    story.add(*requests)
    while story.engine.has_work:
        story.step()
        for seed, found in plain.settled(layers=range(8)).items():
            records[seed].update(found)
    return Truth(requests, {r.params.seed: tokens(story.outputs[r.id]) for r in requests}, records)


@pytest.mark.parametrize("depth", range(1, DEEPEST + 1))
def test_every_accept_length_at_every_parity(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, truth: Truth, depth: int
) -> None:
    """A08: tokens of depth 0, and after each commit the records that a run without drafts has written."""
    speculative = SpeculativeOptions(num_speculative_tokens=depth)
    speculating = Memory.build(engine_config(checkpoint, speculative=speculative), monkeypatch)
    cycles = (
        itertools.count(),
        itertools.count(),
    )  # by parity of the newest token's position; a seed is a prompt's length
    speculating.runner.drafter = scripted(
        right_until(truth.tokens, lambda seed, position: next(cycles[(seed + position) % 2]) % (depth + 1))
    )
    story = Story(speculating.engine())
    story.add(*truth.requests)
    seen: set[tuple[int, int]] = set()  # (parity of the newest token's position, drafts that stood)
    lengths: dict[int, int] = {}
    compared = 0
    while story.engine.has_work:
        story.step()
        for seed, records in speculating.settled(layers=range(8)).items():
            wrong = [key for key, record in records.items() if record != truth.records[seed][key]]
            assert not wrong, f"prompt {seed}: {wrong[:5]}"
            compared += len(records)
        for seed, length in speculating.lengths().items():
            before = lengths.get(seed)
            if before is not None and length > before:
                seen.add(((before - 1) % 2, length - before - 1))
            lengths[seed] = length
    for each in truth.requests:
        assert tokens(story.outputs[each.id]) == truth.tokens[each.params.seed]
    assert seen >= {(parity, count) for parity in (0, 1) for count in range(depth + 1)}
    assert compared > 5_000
    story.engine.check_integrity()


# ---- the draft layers' own drafts, and random ones ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", POINT_MASSES, ids=lambda o: f"{o.rejection_sample_method.value}-{o.num_speculative_tokens}"
)
@pytest.mark.parametrize("policy", list(HitPolicy))
def test_tokens_are_those_of_plain_decoding(
    make_engine: Callable[..., Engine], options: SpeculativeOptions, policy: HitPolicy
) -> None:
    """Greedy and drawn, with chunked prompts, hits, and companions: not a token differs, seed by seed."""
    requests = [
        request(
            f"{temperature}-{n}",
            prompt(n, seed=int(temperature)),  # a bounded hit among these would depend on who came first
            max_tokens=17 + n % 5,
            seed=n,
            temperature=temperature,
            logprobs=2,
        )
        for n in (1, 2, 9, 33, 65)
        for temperature in (0.0, 1.0)
    ]
    again = [
        request(f"again-{each.id}", each.prompt, max_tokens=12, seed=5, temperature=0.7) for each in requests
    ]
    plain, speculating = (
        make_engine(hit_policy=policy, max_num_batched_tokens=24),
        make_engine(hit_policy=policy, max_num_batched_tokens=24, speculative=options),
    )
    for batch in (requests, again):  # the second round hits what the first left
        expected, outputs = run(plain, *batch), run(speculating, *batch)
        for each in batch:
            assert told(outputs[each.id]) == told(expected[each.id]), each.id
    counts = speculating.stats().acceptance
    assert counts is not None and counts.steps > 50


def test_random_drafts_change_nothing_but_speed(make_engine: Callable[..., Engine]) -> None:
    requests = [request(f"p{n}", prompt(n), max_tokens=30, seed=n, temperature=n % 2) for n in range(1, 9)]
    truth = seeded(make_engine(), requests)
    chance = random.Random(5)
    engine = use(make_engine(k=5), lambda _seed, _position, count: chance.choices(range(64), k=count))
    assert seeded(engine, requests) == truth


def test_right_drafts_save_steps(make_engine: Callable[..., Engine]) -> None:
    """With drafts that always stand, k + 1 tokens a step."""
    requests = [request("p", prompt(5), max_tokens=61, seed=1)]
    plain = make_engine()
    truth = seeded(plain, requests)
    engine = use(make_engine(k=5), right_until(truth, lambda _seed, _position: 99))
    assert seeded(engine, requests) == truth
    counts = engine.stats().acceptance
    assert counts is not None and counts.steps == 10 and counts.histogram == (0, 0, 0, 0, 0, 10)


# ---- A10 and every other option ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "option", [{"frequency_penalty": 1.5}, {"presence_penalty": 0.5}, {"repetition_penalty": 1.3}]
)
def test_penalties_count_every_accepted_token(make_engine: Callable[..., Engine], option: dict) -> None:
    """A10: a constant loop (a bias makes one), always-right drafts, 64 tokens."""
    loop = {7: 3.0, 9: 2.9}
    requests = [request("p", prompt(6), max_tokens=64, seed=1, logit_bias=loop, **option)]
    truth = seeded(make_engine(), requests)
    without = seeded(make_engine(), [request("p", prompt(6), max_tokens=64, seed=1, logit_bias=loop)])
    assert truth != without, "the penalty has an effect"
    engine = use(make_engine(k=5), right_until(truth, lambda _seed, _position: 99))
    assert seeded(engine, requests) == truth
    counts = engine.stats().acceptance
    assert counts is not None and counts.histogram[5] >= 8


def test_min_tokens_counts_tokens_and_not_steps(make_engine: Callable[..., Engine]) -> None:
    """A10: EOS on top of everything, allowed from output 20 on; the drafter proposes it all the time."""
    requests = [
        request(
            "p", prompt(6), max_tokens=64, seed=1, min_tokens=20, ignore_eos=False, logit_bias={EOS: 100.0}
        )
    ]
    truth = seeded(make_engine(), requests)
    assert len(truth[1]) == 21 and truth[1][-1] == EOS and EOS not in truth[1][:-1]
    eos = use(make_engine(k=5), lambda _seed, _position, count: [EOS] * count)
    right = use(make_engine(k=5), right_until(truth, lambda _seed, _position: 99))
    assert seeded(eos, requests) == seeded(right, requests) == truth


def test_a_stop_inside_an_accepted_run(make_engine: Callable[..., Engine]) -> None:
    """A11 in the engine: what stands behind the stop is thrown away, the reason is the stop, usage counts what was kept."""
    free = seeded(make_engine(), [request("p", prompt(6), max_tokens=40, seed=1, temperature=1.0)])[1]
    stop = next(token for token in free[8:] if token not in free[: free.index(token)])
    place = free.index(stop)
    requests = [
        request(f"p{limit}", prompt(6), max_tokens=limit, seed=1, temperature=1.0, stop_token_ids=(stop,))
        for limit in (place, place + 1, place + 2, 40)
    ]
    engine = use(make_engine(k=5), right_until({1: free}, lambda _seed, _position: 99))
    outputs = run(engine, *requests)
    kept = {each.params.max_tokens: told(outputs[each.id]) for each in requests}
    assert kept[place] == (free[:place], [], [], "length")
    for limit in (place + 1, place + 2, 40):
        assert kept[limit] == (free[: place + 1], [], [], "stop")


@pytest.fixture(scope="module")
def pair(make_engine: Callable[..., Engine]) -> tuple[Engine, Engine]:
    return make_engine(), make_engine(k=5)


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_mix_of_options(pair: tuple[Engine, Engine], data: st.DataObject) -> None:
    """Drafts that are right to a random depth, any parameters, any company: what is told is told without drafts."""
    draw = data.draw
    number = draw(st.integers(0, 1 << 40))
    requests = [
        request(
            f"{number}-{index}",
            prompt(draw(st.integers(1, 30)), seed=draw(st.integers(0, 2))),
            max_tokens=draw(st.integers(1, 24)),
            min_tokens=draw(st.integers(0, 1)),
            seed=index,
            temperature=draw(st.sampled_from([0.0, 0.3, 1.0, 2.0])),
            top_p=draw(st.sampled_from([1.0, 0.9, 0.3])),
            top_k=draw(st.sampled_from([0, 1, 5])),
            min_p=draw(st.sampled_from([0.0, 0.2])),
            presence_penalty=draw(st.sampled_from([0.0, 1.0])),
            frequency_penalty=draw(st.sampled_from([0.0, -0.5])),
            repetition_penalty=draw(st.sampled_from([1.0, 1.4])),
            logit_bias=draw(st.sampled_from([{}, {5: 4.0, 6: -100.0}])),
            bad_words=draw(st.sampled_from([(), ((5,),), ((5, 6), (7, 8, 9))])),
            stop_token_ids=draw(st.sampled_from([(), (11, 12, 13)])),
            ignore_eos=draw(st.booleans()),
            logprobs=draw(st.sampled_from([None, 0, 3])),
            prompt_logprobs=draw(st.sampled_from([None, None, 1])),
        )
        for index in range(draw(st.integers(1, 5)))
    ]
    plain, speculating = pair
    expected = run(plain, *requests)
    truth = {each.params.seed: tokens(expected[each.id]) for each in requests}
    step = draw(st.integers(1, 7))
    use(speculating, right_until(truth, lambda seed, position: (seed + step * position) % 7))
    outputs = run(speculating, *requests)
    for each in requests:
        assert told(outputs[each.id]) == told(expected[each.id])


# ---- A13 and A14 -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("depth", "policy"), [(1, HitPolicy.EXACT), (5, HitPolicy.EXACT), (5, HitPolicy.BOUNDED)]
)
def test_preemption_with_drafts_in_flight(
    make_engine: Callable[..., Engine], depth: int, policy: HitPolicy
) -> None:
    """A13: memory for one request and a half, six at once. A bounded recomputation is an approximation: there it is counted."""
    requests = [
        request(f"p{n}", prompt(8, seed=n), max_tokens=48, seed=n, temperature=n % 2) for n in range(6)
    ]
    truth = seeded(make_engine(hit_policy=policy), requests)
    engine = make_engine(k=depth, hit_policy=policy, num_blocks_override=21, max_model_len=60)
    use(engine, right_until(truth, lambda seed, position: (seed + position) % (depth + 1)))
    found = seeded(engine, requests)
    if policy is HitPolicy.EXACT:
        assert found == truth
    else:
        assert {len(each) for each in found.values()} == {48}
    assert engine.stats().preemptions > 0
    engine.check_integrity()


@pytest.mark.parametrize(
    "options",
    [
        SpeculativeOptions(),
        SpeculativeOptions(draft_sample_method=DraftSampleMethod.PROBABILISTIC),
        SpeculativeOptions(
            draft_sample_method=DraftSampleMethod.PROBABILISTIC,
            rejection_sample_method=RejectionSampleMethod.BLOCK,
        ),
    ],
    ids=["points", "standard", "block"],
)
def test_a_seed_gives_its_tokens_in_any_company(
    make_engine: Callable[..., Engine], options: SpeculativeOptions
) -> None:
    """A14: alone, beside an unseeded one, beside three seeded ones, arriving late; and other seeds give other tokens."""

    def subject(seed: int = 42, name: str = "r") -> object:
        return request(f"{name}{seed}", prompt(9), max_tokens=20, temperature=1.0, seed=seed)

    def fresh() -> Story:
        return Story(make_engine(speculative=options))

    others = [request(f"o{n}", prompt(5 + n), max_tokens=40, temperature=1.0, seed=n) for n in range(3)]
    stranger = request("x", prompt(4), max_tokens=40, temperature=1.0)
    found = []
    for company in ([], [stranger], others):
        story = fresh()
        story.add(subject(), *company)
        found.append(tokens(story.finish()["r42"]))
    story = fresh()
    story.add(*others)
    for _ in range(5):
        story.step()
    story.add(subject())
    found.append(tokens(story.finish()["r42"]))
    assert len(found[0]) == 20 and all(each == found[0] for each in found)
    story = fresh()
    story.add(*(subject(seed) for seed in range(1, 21)))
    assert len({tuple(tokens(outputs)) for outputs in story.finish().values()}) >= 15


def test_answers_that_length_ended_are_continued_from_the_cache(make_engine: Callable[..., Engine]) -> None:
    """The last token of an answer never runs: a block that ends with it must not be found by who asks on."""
    plain, speculating = make_engine(), make_engine(k=5)
    for limit in (1, 4, 5, 6, 7, 8, 11, 12, 16):
        first = request(f"a{limit}", prompt(4, seed=limit), max_tokens=limit, seed=1)
        truth = seeded(plain, [first])
        use(speculating, right_until(truth, lambda _seed, _position: 99))
        assert seeded(speculating, [first]) == truth
        again = request(f"b{limit}", (*first.prompt, *truth[1], 7), max_tokens=6, seed=1, logprobs=2)
        expected = run(plain, again)[again.id]
        assert told(run(speculating, again)[again.id]) == told(expected), limit
    assert speculating.stats().prefix_hits > 0


def test_what_is_foreseen_for_drawn_drafts_is_the_proposal_before(make_engine: Callable[..., Engine]) -> None:
    options = SpeculativeOptions(
        draft_sample_method=DraftSampleMethod.PROBABILISTIC, enable_adaptive_verification=True
    )
    engine = make_engine(speculative=options)
    engine.add(request("p", prompt(5), max_tokens=20, seed=1, temperature=1.0))
    foreseen: list[tuple[float, ...]] = []
    proposed: list[tuple[float, ...]] = []
    for _ in range(6):
        engine.step()
        (history,) = (h for h in engine._runner._slots._holders if h is not None)
        foreseen.append(history.foreseen)
        proposed.append(survivals(history.proposal.confidences))
    assert foreseen == [(), *proposed[:-1]]


# ---- methods that keep a law or none -----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [RejectionSampleMethod.STANDARD, RejectionSampleMethod.BLOCK])
def test_drawn_drafts_at_temperature_0_are_greedy(
    make_engine: Callable[..., Engine], method: RejectionSampleMethod
) -> None:
    requests = [request(f"p{n}", prompt(n), max_tokens=20, seed=n) for n in (1, 2, 7, 9)]
    options = SpeculativeOptions(
        draft_sample_method=DraftSampleMethod.PROBABILISTIC, rejection_sample_method=method
    )
    assert seeded(make_engine(speculative=options), requests) == seeded(make_engine(), requests)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_synthetic_acceptance_has_the_length_asked_for(
    make_engine: Callable[..., Engine], temperature: float
) -> None:
    options = SpeculativeOptions(
        num_speculative_tokens=5,
        rejection_sample_method=RejectionSampleMethod.SYNTHETIC,
        synthetic_acceptance_length=3.51,
    )
    requests = [
        request(f"p{n}", prompt(5), max_tokens=236, seed=n, temperature=temperature) for n in range(16)
    ]
    engine = make_engine(speculative=options)
    outputs = run(engine, *requests)
    counts = engine.stats().acceptance
    assert counts is not None and counts.synthetic
    # steps at the very end have no room for all drafts; of all others exactly 2 or 3 stand
    assert sum(counts.histogram[2:4]) >= counts.steps - len(requests)
    share = counts.histogram[3] / sum(counts.histogram[2:4])
    assert abs(share - 0.51) < 4 * (0.25 / counts.steps) ** 0.5
    assert all(output[-1].acceptance.synthetic for output in outputs.values())


def test_adaptive_verification_keeps_the_tokens(make_engine: Callable[..., Engine]) -> None:
    requests = [request(f"p{n}", prompt(n), max_tokens=30, seed=n, temperature=n % 2) for n in range(1, 9)]
    truth = seeded(make_engine(), requests)
    engine = make_engine(speculative=SpeculativeOptions(enable_adaptive_verification=True))
    assert seeded(engine, requests) == truth
    counts = engine.stats().acceptance
    assert counts is not None and counts.draft_tokens < counts.steps * DEEPEST, (
        "random drafts are not worth it"
    )
