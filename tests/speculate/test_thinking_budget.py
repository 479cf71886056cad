"""A limit of reasoning in the engine, on the embedded model: the same tokens with drafts as without, and up to it as without."""

from collections.abc import Callable, Iterable

import pytest

from flashstep.chat import grammar
from flashstep.chat.encode import ChatPrompt
from flashstep.chat.tokenizer import TextTokenizer
from flashstep.config.speculative import DraftSampleMethod
from flashstep.engine.engine import Engine
from flashstep.ipc.messages import RequestOutput
from flashstep.request import Constraint, Request, SamplingParams
from tests.speculate.conftest import SCHEMA

LIMITS = (0, 1, 13, 400)


def tokens_of(outputs: Iterable[RequestOutput]) -> tuple[int, ...]:
    return tuple(token for output in outputs for token in output.tokens)


def requests(prompt: ChatPrompt) -> list[Request]:
    """Every limit, with a schema and without, greedy and drawn, and where EOS and lengths are not what they usually are."""
    end = prompt.reasoning_end
    json = grammar.constraint(grammar.json_schema(SCHEMA), after=end).grammar
    items = []
    for limit in (*LIMITS, None):
        for name, schema in (("free", None), ("json", json)):
            for temperature in (0.0, 1.0):
                constraint = Constraint(grammar=schema, after=end, limit=limit)
                params = SamplingParams(max_tokens=90, temperature=temperature, seed=3, constraint=constraint)
                items.append(Request(id=f"{limit} {name} {temperature}", prompt=prompt.ids, params=params))
        params = SamplingParams(
            max_tokens=60,
            min_tokens=60,
            ignore_eos=True,
            seed=5,
            constraint=Constraint(after=end, limit=limit),
        )
        items.append(Request(id=f"{limit} mixed", prompt=prompt.ids, params=params))
    return items


def answers(engine: Engine, prompt: ChatPrompt) -> dict[str, tuple[int, ...]]:
    outputs = engine.generate(requests(prompt))
    engine.check_integrity()
    assert all(of_one[-1].finish_reason in ("stop", "length") for of_one in outputs.values())
    return {name: tokens_of(of_one) for name, of_one in outputs.items()}


@pytest.fixture(scope="module")
def plain(make_engine: Callable[..., Engine], prompt: ChatPrompt) -> dict[str, tuple[int, ...]]:
    return answers(make_engine(), prompt)


def check(found: dict[str, tuple[int, ...]], end: int) -> None:
    for name, tokens in found.items():
        limit, kind = name.split()[:2]
        free = found[name.replace(limit, "None", 1)]
        reasoning = tokens.index(end) if end in tokens else len(tokens)
        if limit == "None":
            continue
        assert reasoning <= int(limit), name
        assert tokens[:reasoning] == free[:reasoning], "up to the limit nothing changes"
        if end not in free[: int(limit) + 1]:
            assert len(tokens) > int(limit) and tokens[int(limit)] == end, (
                "the end comes when the limit is reached"
            )
        else:
            assert tokens == free, "a limit that is not met changes nothing"
        if kind == "mixed":
            assert len(tokens) == 60


def test_limits_hold_and_change_nothing_else(
    plain: dict[str, tuple[int, ...]], prompt: ChatPrompt, tokenizer: TextTokenizer
) -> None:
    assert prompt.reasoning_end is not None
    check(plain, prompt.reasoning_end)
    forced = [name for name, tokens in plain.items() if name.split()[0] in ("0", "1") and "mixed" not in name]
    for name in forced:
        _, _, answer = tokenizer.decode(list(plain[name]), skip_special_tokens=False).partition("</think>")
        assert answer.startswith("{") or "json" not in name


@pytest.mark.parametrize("on_device", [True, False])
def test_drafts_give_the_same_tokens(
    make_engine: Callable[..., Engine],
    prompt: ChatPrompt,
    plain: dict[str, tuple[int, ...]],
    on_device: bool,
) -> None:
    """Seed by seed, decided on the device where they can be, or all on the host; drafts go on thinking across the limit."""
    engine = make_engine(num_speculative_tokens=5)
    if not on_device:
        engine._runner.decode = None
    assert answers(engine, prompt) == plain
    counts = engine.stats().acceptance
    assert counts is not None and counts.accepted_tokens > 10


def test_drawn_drafts_keep_the_limit(make_engine: Callable[..., Engine], prompt: ChatPrompt) -> None:
    """Other tokens, the same promise."""
    engine = make_engine(draft_sample_method=DraftSampleMethod.PROBABILISTIC)
    end = prompt.reasoning_end
    items = [
        Request(
            id=f"{limit} {seed}",
            prompt=prompt.ids,
            params=SamplingParams(max_tokens=30, seed=seed, constraint=Constraint(after=end, limit=limit)),
        )
        for limit in (0, 1, 9)
        for seed in range(4)
    ]
    for name, outputs in engine.generate(items).items():
        limit = int(name.split()[0])
        assert end in tokens_of(outputs)[: limit + 1], name


def test_only_steps_near_the_limit_wait_for_the_host(
    make_engine: Callable[..., Engine], prompt: ChatPrompt
) -> None:
    engine = make_engine()
    runner = engine._runner
    by_itself, on_host = [], []
    launch, run = runner._launch_decoding, runner._host.run

    def counted_launch(plan: object, decode: object) -> object:
        by_itself.append(plan)
        return launch(plan, decode)

    def counted_run(plan: object) -> object:
        on_host.append(plan)
        return run(plan)

    runner._launch_decoding, runner._host.run = counted_launch, counted_run
    constraint = Constraint(after=prompt.reasoning_end, limit=20)
    params = SamplingParams(max_tokens=60, ignore_eos=True, temperature=1.0, seed=8, constraint=constraint)
    (outputs,) = engine.generate([Request(id="r", prompt=prompt.ids, params=params)]).values()
    assert tokens_of(outputs).index(prompt.reasoning_end) <= 20
    assert len(on_host) <= 5 < 50 < len(by_itself), (len(on_host), len(by_itself))
