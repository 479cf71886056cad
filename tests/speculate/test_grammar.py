"""Case A12 in the engine: a grammar that begins behind ``</think>``, drafts that jump over the border, on the embedded model."""

import itertools
import json
import re
from collections.abc import Callable
from random import Random

import msgspec
import pytest
from llguidance import LLMatcher, LLParserLimits

from flashstep.chat import grammar
from flashstep.chat.encode import ChatPrompt
from flashstep.chat.tokenizer import TextTokenizer
from flashstep.config.speculative import DraftSampleMethod, RejectionSampleMethod
from flashstep.engine.engine import Engine
from flashstep.request import Constraint, Request, SamplingParams
from flashstep.sampling import constraint as matching
from flashstep.sampling.constraint import Matcher
from flashstep.speculate.dspark import Anchor
from flashstep.speculate.scripted import Scripted
from tests.speculate.conftest import SCHEMA

FORBIDDEN = "</think>```json\n{"  # what the case's drafter proposes, in one block


def requests(prompt: ChatPrompt) -> list[Request]:
    constraint = grammar.constraint(grammar.json_schema(SCHEMA), after=prompt.reasoning_end)
    return [
        Request(
            id=f"T={temperature}",
            prompt=prompt.ids,
            params=SamplingParams(max_tokens=150, temperature=temperature, seed=3, constraint=constraint),
        )
        for temperature in (0.0, 1.0)
    ]


def answers(engine: Engine, prompt: ChatPrompt) -> dict[str, tuple[int, ...]]:
    outputs = engine.generate(requests(prompt))
    engine.check_integrity()
    assert all(of_one[-1].finish_reason == "stop" for of_one in outputs.values())
    return {name: tuple(t for output in of_one for t in output.tokens) for name, of_one in outputs.items()}


@pytest.fixture(scope="module")
def plain(make_engine: Callable[..., Engine], prompt: ChatPrompt) -> dict[str, tuple[int, ...]]:
    return answers(make_engine(), prompt)


def check(found: dict[str, tuple[int, ...]], tokenizer: TextTokenizer) -> None:
    """Free reasoning, then JSON that the schema allows, and nothing else."""
    for tokens in found.values():
        reasoning, _, answer = tokenizer.decode(list(tokens), skip_special_tokens=False).partition("</think>")
        assert re.search("[a-z]{3}", reasoning)
        value = json.loads(answer.removesuffix("<｜end▁of▁sentence｜>"))
        assert value.keys() == {"a"} and 0 <= value["a"] <= 9999


def test_drafts_that_jump_into_a_forbidden_answer(
    make_engine: Callable[..., Engine],
    prompt: ChatPrompt,
    plain: dict[str, tuple[int, ...]],
    tokenizer: TextTokenizer,
) -> None:
    """The block of the case, entered at every offset 0 to 5; whatever the border falls on, tokens are plain decoding's."""
    check(plain, tokenizer)
    border = prompt.reasoning_end
    assert border is not None
    wanted = [border, *tokenizer.encode(FORBIDDEN.removeprefix("</think>"), add_special_tokens=False)]
    ends = {name: tokens.index(border) for name, tokens in plain.items()}
    by_temperature = {0.0: plain["T=0.0"], 1.0: plain["T=1.0"]}
    engine = make_engine(num_speculative_tokens=5)
    for offset in range(6):

        def next_drafts(anchor: Anchor, count: int, offset: int = offset) -> list[int]:
            """The truth up to the border, then the forbidden run; elsewhere the run itself from ``offset`` on."""
            truth = by_temperature[anchor.temperature]
            place, end = anchor.output_position + 1, ends[f"T={anchor.temperature}"]
            if end - place == offset:
                return [*truth[place:end], *wanted][:count]
            return wanted[offset % len(wanted) :][:count]

        engine._runner.drafter = Scripted(next_drafts)
        assert answers(engine, prompt) == plain, f"offset {offset}"


def test_the_models_own_drafts_follow_the_grammar(
    make_engine: Callable[..., Engine],
    prompt: ChatPrompt,
    plain: dict[str, tuple[int, ...]],
    tokenizer: TextTokenizer,
) -> None:
    engine = make_engine(num_speculative_tokens=5)
    assert answers(engine, prompt) == plain
    counts = engine.stats().acceptance
    assert counts is not None and counts.accepted_tokens > 10


@pytest.mark.parametrize(
    "rule", [RejectionSampleMethod.STANDARD, RejectionSampleMethod.BLOCK, RejectionSampleMethod.SYNTHETIC]
)
def test_drawn_and_synthetic_drafts_follow_the_grammar(
    make_engine: Callable[..., Engine],
    prompt: ChatPrompt,
    tokenizer: TextTokenizer,
    rule: RejectionSampleMethod,
) -> None:
    """Other tokens, the same promise: what the schema allows and nothing else."""
    synthetic = {"synthetic_acceptance_length": 2.5} if rule is RejectionSampleMethod.SYNTHETIC else {}
    engine = make_engine(
        draft_sample_method=DraftSampleMethod.PROBABILISTIC, rejection_sample_method=rule, **synthetic
    )
    constraint = grammar.constraint(
        grammar.json_schema(SCHEMA), after=None
    )  # synthetic text may never end its reasoning
    items = [
        Request(
            id=str(seed),
            prompt=prompt.ids,
            params=SamplingParams(max_tokens=60, temperature=1.0, seed=seed, constraint=constraint),
        )
        for seed in range(8)
    ]
    vocabulary = engine._runner._vocabulary
    ended = 0
    for outputs in engine.generate(items).values():
        tokens = list(itertools.chain.from_iterable(output.tokens for output in outputs))
        assert Matcher(vocabulary, constraint).keep(tokens) == len(tokens), "a token that the grammar forbids"
        if outputs[-1].finish_reason == "stop":
            ended += 1
            assert json.loads(tokenizer.decode(tokens, skip_special_tokens=True)).keys() == {"a"}
    assert ended >= 3 or rule is RejectionSampleMethod.SYNTHETIC  # whose text may go on for ever


def test_a_limit_ends_a_request_at_the_same_token_whatever_is_drafted_and_whoever_else_runs(
    make_engine: Callable[..., Engine], prompt: ChatPrompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit of the lexer's states: this pattern takes new ones for every text."""
    limits = LLParserLimits(max_lexer_states=3_000, verbose_errors=False)
    monkeypatch.setattr(matching, "LIMITS", limits)
    hungry = Constraint(grammar=LLMatcher.grammar_from_regex("(?s:.)*a(?s:.){60}x"))

    def ended(engine: Engine, *seeds: int) -> dict[str, tuple[tuple[int, ...], object, object]]:
        params = SamplingParams(max_tokens=300, temperature=2.0, constraint=hungry)
        items = [
            Request(id=f"{seed}", prompt=prompt.ids, params=msgspec.structs.replace(params, seed=seed))
            for seed in seeds
        ]
        return {
            name: (
                tuple(token for output in outputs for token in output.tokens),
                outputs[-1].finish_reason,
                outputs[-1].failure,
            )
            for name, outputs in engine.generate(items).items()
        }

    plain = make_engine()
    both = ended(plain, 1, 2)
    assert all("too many states" in str(why) and len(tokens) > 8 for tokens, _, why in both.values())
    assert ended(plain, 1)["1"] == both["1"]
    engine = make_engine(num_speculative_tokens=5)
    noise = Random(3)
    engine._runner.drafter = Scripted(lambda anchor, count: noise.choices(range(300, 2000), k=count))
    assert ended(engine, 1, 2) == both
    engine.check_integrity()
