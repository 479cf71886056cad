"""Case A12 in the engine: a grammar that begins behind ``</think>``, drafts that jump over the border, on the embedded model."""

import itertools
import json
import re
from collections.abc import Callable

import pytest
import torch

from flashstep.chat import grammar
from flashstep.chat.conversation import Conversation
from flashstep.chat.encode import ChatEncoder, ChatPrompt
from flashstep.chat.tokenizer import TextTokenizer
from flashstep.cli.model import tiny_model
from flashstep.config.engine import EngineConfig
from flashstep.config.speculative import DraftSampleMethod, RejectionSampleMethod, SpeculativeOptions
from flashstep.engine.engine import Engine
from flashstep.request import Request, SamplingParams
from flashstep.runner.build import build_runner
from flashstep.sampling.constraint import Matcher
from flashstep.speculate.dspark import Anchor
from flashstep.speculate.scripted import Scripted

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9999}},
    "required": ["a"],
    "additionalProperties": False,
}
FORBIDDEN = "</think>```json\n{"  # what the case's drafter proposes, in one block


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    torch.set_num_threads(1)
    return TextTokenizer.from_file(tiny_model() / "tokenizer.json")


@pytest.fixture(scope="module")
def prompt(tokenizer: TextTokenizer) -> ChatPrompt:
    content = "Anna has 12 pens and buys 4 boxes with 6 pens each. How many pens does Anna have now?"
    return ChatEncoder(tokenizer).encode(Conversation(messages=[{"role": "user", "content": content}]))


@pytest.fixture(scope="module")
def make_engine() -> Callable[..., Engine]:
    def make(**options: object) -> Engine:
        speculative = SpeculativeOptions(**options) if options else None
        config = EngineConfig(
            model=tiny_model(),
            max_num_seqs=8,
            max_model_len=512,
            kv_cache_memory_bytes=1 << 25,
            speculative=speculative,
        )
        return Engine(build_runner(config), seed=0)

    return make


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
