"""Grammars at run time: case A12 with scripted drafts, masks that depend on the text alone, ends, failures, the sampler."""

import gzip
import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLParserLimits
from tokenizers import Tokenizer

from flashstep.config.errors import ConfigError
from flashstep.request import Constraint, SamplingParams, problems
from flashstep.sampling import constraint
from flashstep.sampling.constraint import Matcher, Vocabulary
from flashstep.sampling.grammar import STUCK
from flashstep.sampling.plain import sample_plain
from flashstep.sampling.sampler import SampleRow, sample

TINY = Path(__file__).parents[2] / "flashstep" / "tiny"
VOCAB_SIZE = 2056  # eight more than the tokenizer has
EOS, OTHER_EOS = 1, 2047
THINK_END = 2035
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}


@cache
def vocabulary() -> Vocabulary:
    return Vocabulary.read(TINY, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS, OTHER_EOS))


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(TINY / "tokenizer.json"))


def ids(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False).ids


def text(tokens: Sequence[int]) -> str:
    return tokenizer().decode(list(tokens), skip_special_tokens=False)


def of_schema(schema: Any, *, after: int | None = None) -> Constraint:
    return Constraint(grammar=LLMatcher.grammar_from_json_schema(json.dumps(schema)), after=after)


def of_lark(lark: str, *, after: int | None = None) -> Constraint:
    return Constraint(grammar=LLMatcher.grammar_from_lark(lark), after=after)


def matcher(constraint: Constraint) -> Matcher:
    return Matcher(vocabulary(), constraint)


def allowed(mask_V: torch.Tensor | None) -> list[int]:
    assert mask_V is not None and mask_V.dtype == torch.bool and mask_V.shape == (VOCAB_SIZE,)
    return mask_V.nonzero()[:, 0].tolist()


def next_tokens(one: Matcher) -> list[int]:
    (mask_V,) = one.masks([])
    return allowed(mask_V)


def free(mask_V: torch.Tensor, *, but: Sequence[int] = ()) -> bool:
    """Whether all may stand except an end and ``but``: an answer that ends in its reasoning is none."""
    return set(range(VOCAB_SIZE)).difference(allowed(mask_V)) == {EOS, OTHER_EOS, *but}


def row(output: Sequence[int], mask_V: torch.Tensor | None, **params: Any) -> SampleRow:
    return SampleRow(
        params=SamplingParams(**({"max_tokens": 1000, "temperature": 0.0} | params)),
        seed=7,
        position=len(output),
        prompt=(),
        output=output,
        eos_token_ids=(EOS, OTHER_EOS),
        allowed_V=mask_V,
    )


# ---- A12: reasoning, a schema, and drafts that break it ------------------------------------------------------------------

FENCE = [THINK_END, *ids("```"), *ids("json"), *ids("\n"), *ids("{")]
Drafter = Callable[[list[int]], list[int]]


def logits_after(output: Sequence[int]) -> torch.Tensor:
    """A model that a step's history decides, as the real one. It reasons for 12 tokens, and likes fences and endings."""
    logits_V = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(hash(tuple(output)) % 2**31))
    if len(output) >= 12 and THINK_END not in output:
        logits_V[THINK_END] = 50
    logits_V[ids("```")[0]] += 4
    logits_V[EOS] += 3
    logits_V[ids("}")[0]] += 3
    return logits_V


def decode(drafter: Drafter, *, steps: list[int] | None = None, **params: Any) -> list[int]:
    """Decoding with point-mass drafts: each place is sampled, and a draft stands while it is what was sampled."""
    one = matcher(of_schema(SCHEMA, after=THINK_END))
    output: list[int] = []
    while EOS not in output and len(output) < 200:
        drafts = drafter(output)
        drafts = drafts[: one.keep(drafts)]
        run: list[int] = []
        for place, mask_V in enumerate(one.masks(drafts)):
            (token,) = sample(
                logits_after([*output, *run]).unsqueeze(0), [row([*output, *run], mask_V, **params)]
            )
            run.append(token)
            if place == len(drafts) or token != drafts[place]:
                break
        one.accept(run)
        output += run
        if steps is not None:
            steps.append(len(run))
    assert one.failure is None
    return output[: output.index(EOS) + 1]


def check_answer(output: Sequence[int]) -> None:
    end = output.index(THINK_END)
    answer = json.loads(text(output[end + 1 : -1]))
    assert list(answer) == ["a"] and type(answer["a"]) is int
    assert end == 12


@pytest.mark.parametrize("params", [{}, {"temperature": 1.3}, {"temperature": 0.8, "top_p": 0.9}])
@pytest.mark.parametrize("offset", range(6))
def test_a12_fenced_drafts(offset: int, params: dict[str, float]) -> None:
    """The block is proposed so that ``</think>`` stands at ``offset`` in it, behind what the model will say anyway."""
    alone = decode(lambda _: [], **params)
    check_answer(alone)

    def drafter(output: list[int]) -> list[int]:
        ahead = alone[len(output) : len(output) + offset]
        return [*(token for token in ahead if token != THINK_END), *FENCE]

    steps: list[int] = []
    assert decode(drafter, steps=steps, **params) == alone
    assert offset < 2 or max(steps) > 2, "no draft ever stood"


def test_a12_right_drafts_stand_across_the_border() -> None:
    alone, steps = decode(lambda _: []), []
    assert decode(lambda output: alone[len(output) : len(output) + 5], steps=steps) == alone
    assert len(steps) == -(-len(alone) // 6) and set(steps[:-1]) == {6}


@pytest.mark.parametrize("offset", range(6))
def test_a12_what_is_cut_and_masked(offset: int) -> None:
    one = matcher(of_schema(SCHEMA, after=THINK_END))
    drafts = [*ids(" thought")[:1] * offset, *FENCE]
    assert one.keep(drafts) == offset + 1  # up to </think>: a fence may not follow
    masks = one.masks(drafts[: offset + 1])
    assert all(map(free, masks[: offset + 1]))
    begins = allowed(masks[-1])
    assert begins and all(text([token]).startswith("{") for token in begins)
    right = [*drafts[: offset + 1], *ids("{"), *ids('"')]
    assert one.keep(right) == len(right)
    assert len(one.masks(right)) == len(right) + 1
    assert free(*one.masks([])), "drafts were taken although nobody accepted them"
    one.accept(drafts[: offset + 1])
    assert next_tokens(one) == begins


# ---- masks depend on the text alone --------------------------------------------------------------------------------------

SCALARS = st.one_of(
    st.sampled_from([{"type": "integer"}, {"type": "boolean"}, {"type": "null"}, {"type": "number"}]),
    st.lists(
        st.sampled_from(["a", "\u00e9t\u00e9", "\U0001f600", "\u4e2d\u6587", 'q"\\', "</think>", 7]),
        min_size=1,
        max_size=3,
    ).map(lambda values: {"enum": values}),
    st.integers(0, 4).map(lambda n: {"type": "string", "maxLength": n}),
)
SCHEMAS = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.tuples(inner, st.integers(0, 2)).map(
            lambda pair: {"type": "array", "items": pair[0], "minItems": pair[1], "maxItems": 2}
        ),
        st.dictionaries(st.sampled_from(["x", "y z", "\u00fc"]), inner, min_size=1, max_size=2).map(
            lambda properties: {
                "type": "object",
                "properties": properties,
                "required": list(properties)[:1],
                "additionalProperties": False,
            }
        ),
    ),
    max_leaves=4,
)


def satisfies(value: Any, schema: dict[str, Any]) -> bool:
    if "enum" in schema:
        return value in schema["enum"]
    match schema["type"]:
        case "integer":
            return type(value) is int
        case "number":
            return type(value) in (int, float)
        case "boolean":
            return type(value) is bool
        case "null":
            return value is None
        case "string":
            return type(value) is str and len(value) <= schema["maxLength"]
        case "array":
            right = schema["minItems"] <= len(value) <= schema["maxItems"]
            return right and all(satisfies(item, schema["items"]) for item in value)
    known = schema["properties"]
    return set(schema["required"]) <= set(value) <= set(known) and all(
        satisfies(value[key], known[key]) for key in value
    )


def walk(one: Matcher, draw: Callable[[list[int]], int], *, limit: int = 300) -> list[int]:
    """Tokens up to EOS. Towards the end the shortest way is taken: what closes strings, arrays, numbers."""
    output: list[int] = []
    while not output or output[-1] not in (EOS, OTHER_EOS):
        choices = next_tokens(one)
        closing = [token for token in choices if text([token]) in ('"', "}", "]") or token == EOS]
        eager = len(output) > 25 and closing
        output.append(EOS if eager and EOS in closing else draw(closing if eager else choices))
        one.accept(output[-1:])
        assert len(output) < limit
    return output


@settings(max_examples=40, deadline=None)
@given(SCHEMAS, st.integers(0, 10**6))
def test_random_schemas(schema: dict[str, Any], seed: int) -> None:
    """A random walk ends in a text that satisfies the schema; whatever drafts are tried on its way, the masks are the same."""
    random = Random(seed)
    one = matcher(of_schema(schema))
    output = walk(one, random.choice)
    assert one.failure is None
    assert satisfies(json.loads(text(output[:-1])), schema), text(output)

    plain, busy = matcher(of_schema(schema)), matcher(of_schema(schema))
    done = 0
    while done < len(output):
        width = random.randint(0, 4)
        ahead = output[done : done + width]
        assert busy.keep(ahead) == len(ahead)
        noise = [*ahead[: random.randint(0, 2)], *(random.randrange(VOCAB_SIZE) for _ in range(3))]
        busy.masks(noise[: busy.keep(noise)])
        masks = busy.masks(ahead)
        for place, mask_V in enumerate(masks):
            assert allowed(mask_V) == next_tokens(plain)
            if place < len(ahead):
                plain.accept(ahead[place : place + 1])
        busy.accept(ahead)
        done += len(ahead)
        again = matcher(of_schema(schema))
        again.accept(output[:done])
        assert next_tokens(again) == next_tokens(busy)


@pytest.mark.parametrize(
    "choice", ["\U0001f600", "\u4e2d\u6587 ok", "\u00e9\n\t\"'\\", "</think><think>", "a" * 40]
)
def test_any_text_can_be_said(choice: str) -> None:
    """Characters of many bytes pass token by token, and spellings of control tokens as the text that they are."""
    one = matcher(of_lark(f"start: C\nC: {json.dumps(choice)}"))
    output: list[int] = []
    while EOS not in output:
        output.append(next_tokens(one)[0])
        one.accept(output[-1:])
    assert text(output[:-1]) == choice
    assert len(output) > 2 and not set(output[:-1]) & {2034, 2035}


def test_control_tokens_and_padding_are_never_allowed() -> None:
    added = {token["id"] for token in json.loads((TINY / "tokenizer.json").read_text())["added_tokens"]}
    one = matcher(of_lark("start: /(?s:.*)/"))
    everything = set(next_tokens(one))
    assert everything & added == {EOS, OTHER_EOS} & everything
    assert max(everything - {OTHER_EOS}) < 2031
    assert len(everything) > 1700
    by_number = matcher(of_lark('start: "a" <[2035]> "b"'))
    by_number.accept(ids("a"))
    assert next_tokens(by_number) == [EOS, OTHER_EOS]


def test_the_released_tokenizer() -> None:
    """Text of many scripts passes; none of its 1,280 control tokens and no id of the padding is ever allowed."""
    file = Path(__file__).parents[3] / "shared" / "vectors" / "chat" / "tokenizer.json.gz"
    if not file.exists():
        pytest.skip(f"{file} is absent")
    definition = gzip.decompress(file.read_bytes()).decode()
    end = 128805  # an added token, outside the model's own entries
    released = Vocabulary(definition, vocab_size=129280, eos_token_ids=(EOS, end))
    free = Matcher(released, of_lark("start: /(?s:.*)/"))
    (mask_V,) = free.masks([])
    assert mask_V is not None and mask_V[EOS] and mask_V[end]
    assert int(mask_V[128000:].sum()) == 1 and int(mask_V.sum()) > 120_000
    choice = "\u4e2d\u6587\uff0c\U0001f600 na\u00efve <\uff5cUser\uff5c></think>"
    one = Matcher(released, of_lark(f"start: C\nC: {json.dumps(choice)}"))
    output: list[int] = []
    while EOS not in output:
        (mask_V,) = one.masks([])
        assert mask_V is not None
        output.append(int(mask_V.nonzero()[0]))
        one.accept(output[-1:])
    assert Tokenizer.from_str(definition).decode(output[:-1], skip_special_tokens=False) == choice


# ---- ends ----------------------------------------------------------------------------------------------------------------


def test_the_end() -> None:
    one = matcher(of_lark("start: /ab?/"))
    assert not {EOS, OTHER_EOS} & set(next_tokens(one))
    one.accept(ids("a"))
    assert set(next_tokens(one)) == {*ids("b"), EOS, OTHER_EOS}
    assert one.keep([EOS]) == 1 and one.keep([*ids("b"), EOS, *ids("b")]) == 2
    behind = one.masks([*ids("b"), OTHER_EOS])
    assert [allowed(mask_V) for mask_V in behind[1:]] == [[EOS, OTHER_EOS]] * 2
    one.accept(ids("b"))
    assert next_tokens(one) == [EOS, OTHER_EOS]
    one.accept([OTHER_EOS])
    assert next_tokens(one) == [EOS, OTHER_EOS], "with ignore_eos the text must stay what it is"
    assert one.failure is None


def test_reasoning_is_free_and_only_its_first_end_counts() -> None:
    one = matcher(of_lark('start: "a"', after=THINK_END))
    one.accept([5, 0, 2034, *ids("{ ]")])
    assert all(map(free, one.masks([9, 2036]))) and one.keep([9, EOS]) == 1
    one.accept([THINK_END])
    assert next_tokens(one) == ids("a")
    assert one.keep([THINK_END]) == 0
    at_once = matcher(of_lark('start: "a"'))
    assert next_tokens(at_once) == ids("a")


def test_control_tokens_of_the_grammar_stand_in_it_only() -> None:
    grammar = LLMatcher.grammar_from_lark('start: "<" <[2036]> "a" | <[2037]>')
    one = matcher(Constraint(grammar=grammar, after=THINK_END, control_tokens=(2036,)))
    assert free(*one.masks([]), but=[2036])
    one.accept([THINK_END, *ids("<")])
    assert next_tokens(one) == [2036], "2037 is named and not listed"
    one.accept([2036, *ids("a")])
    assert next_tokens(one) == [EOS, OTHER_EOS] and one.failure is None


# ---- the limit of what comes before ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [0, 1, 5])
@pytest.mark.parametrize("grammar", [None, 'start: "a"'])
def test_a_limit_forces_the_end_of_reasoning(limit: int, grammar: str | None) -> None:
    made = None if grammar is None else LLMatcher.grammar_from_lark(grammar)
    one = matcher(Constraint(grammar=made, after=THINK_END, limit=limit))
    thoughts = ids(" thought")[:1] * 9
    assert one.keep(thoughts) == limit, "drafts are cut where the end is forced"
    assert one.keep([*thoughts[:limit], THINK_END]) == limit + 1
    assert allowed(one.masks(thoughts[:limit])[-1]) == [THINK_END]
    assert one.accept(thoughts[:limit]) == limit
    assert next_tokens(one) == [THINK_END]
    one.accept([THINK_END])
    behind = one.masks([])
    assert behind == [None] if grammar is None else allowed(behind[0]) == ids("a")
    early = matcher(Constraint(grammar=made, after=THINK_END, limit=5))
    early.accept([7, THINK_END])
    assert early.masks([]) == [None] if grammar is None else next_tokens(early) == ids("a")


def test_how_far_a_limit_leaves_tokens_free() -> None:
    one = matcher(Constraint(after=THINK_END, limit=5))
    assert one.free(5) and not one.free(6)
    one.accept([7, EOS, 7])  # an EOS that is ignored is a token like any other
    assert one.free(2) and not one.free(3) and one.masks([7]) == [None, None]
    one.accept([THINK_END])
    assert one.free(1000) and one.keep([7, THINK_END, EOS]) == 3
    assert not matcher(of_lark('start: "a"', after=THINK_END)).free(1)
    assert matcher(Constraint(after=THINK_END)).free(1000)


def test_a_limit_needs_the_token_that_it_is_before() -> None:
    for wrong in (Constraint(limit=3), Constraint(after=THINK_END, limit=-1)):
        (sentence,) = problems(SamplingParams(max_tokens=1, constraint=wrong), VOCAB_SIZE)
        assert sentence.startswith("constraint has the limit")


# ---- failures ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grammar", ["start: b", 'start: "a" </think>', "{", "start: start", "\x00"])
def test_a_grammar_that_is_none_has_failed_from_the_start(grammar: str) -> None:
    """The engine refuses these at its door; if one came through, it would cost its own request only."""
    one = matcher(Constraint(grammar=grammar, after=THINK_END))
    assert one.failure and "\n" not in one.failure
    assert next_tokens(one) == [EOS, OTHER_EOS] and one.keep([7]) == 0
    assert one.accept([EOS]) == 0
    assert one.masks([]) and one.failure and not one.free(1)


def test_a_limit_ends_the_text_and_drafts_alone_do_not_meet_it() -> None:
    """Which of 900 optional keys comes next is more than llguidance looks at in one step; a number instead is not."""
    wide = {"type": "object", "properties": {f"k{number}": {} for number in range(900)}}
    constraint = of_schema({"anyOf": [wide, {"type": "integer"}]})
    one, other = matcher(constraint), matcher(constraint)
    for each in (one, other):
        assert each.keep(ids("{")) == 0, "nobody can see what may stand behind it"
        assert each.keep(ids("7")) == 1 and each.failure is None
    other.accept(ids("7"))
    assert {EOS, OTHER_EOS} < set(next_tokens(other))
    assert other.accept([EOS]) == 1
    assert other.failure is None
    assert one.accept(ids("{")) == 1
    assert next_tokens(one) == [EOS, OTHER_EOS]
    assert one.failure and "items" in one.failure
    assert one.keep([EOS]) == 0 and one.keep(ids("k")) == 0


@pytest.mark.parametrize("drafts", [[], ids("{"), [*ids("{"), EOS], ids("7")])
def test_a_limit_is_met_at_the_same_token_with_drafts_as_without(drafts: list[int]) -> None:
    wide = {"type": "object", "properties": {f"k{number}": {} for number in range(900)}}
    one = matcher(of_schema({"anyOf": [wide, {"type": "integer"}]}))
    drafts = drafts[: one.keep(drafts)]
    one.masks(drafts)
    run = [*drafts, EOS] if drafts == ids("{") else ids("{")
    assert one.accept(run) == 1, "behind it nothing could be sampled"
    assert one.keep([EOS]) == 0 and one.accept([EOS]) == 0
    assert one.failure and "items" in one.failure


def until_it_fails(one: Matcher, draft: Callable[[Sequence[int]], list[int]]) -> tuple[list[int], list[int]]:
    """Random tokens until the grammar cannot be followed, and how many drafts stood in each step."""
    random, output, kept = Random(1), [], []
    while one.failure is None:
        choices = next_tokens(one)
        if one.failure is None:
            drafts = draft(choices)
            kept.append(one.keep(drafts))
            one.masks(drafts[: kept[-1]])
            token = random.choice([token for token in choices if token not in (EOS, OTHER_EOS)])
            output += [token][: one.accept([token])]
    return output, kept


def test_drafts_and_other_requests_do_not_count_for_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the lexer's states, which copies of a matcher share. Of this pattern every new text takes new ones."""
    limits = LLParserLimits(max_lexer_states=20_000, verbose_errors=False)
    monkeypatch.setattr(constraint, "LIMITS", limits)
    hungry = Constraint(grammar=LLMatcher.grammar_from_regex("(?s:.)*a(?s:.){60}x"))
    alone, _ = until_it_fails(one := matcher(hungry), lambda choices: [])
    assert len(alone) > 20 and one.failure and "too many states" in one.failure
    assert until_it_fails(matcher(hungry), lambda choices: [])[0] == alone

    noise = Random(2)
    drafted, kept = until_it_fails(matcher(hungry), lambda choices: noise.choices(choices, k=5))
    assert drafted == alone
    assert max(kept) > 2 and kept[-1] == 0, "the drafts must have met the limit first"

    right = matcher(hungry)
    for place in range(0, len(alone), 4):
        run = alone[place : place + 4]
        right.masks(run[: right.keep(run)])
        assert right.accept(run) == len(run)
    assert next_tokens(right) == [EOS, OTHER_EOS] and right.failure == one.failure


def test_drafts_that_take_too_long_are_not_looked_at() -> None:
    one = matcher(of_lark("start: /[ab]+/"))
    assert one.keep(ids("a") * 3) == 3
    scout = one._scout
    assert scout is not None
    scout._credit.left_s = -1.0
    one.accept(ids("a"))
    assert one.keep(ids("b") * 3) == 0 and one.failure is None
    scout._credit.left_s = 0.5
    one.accept(ids("b"))
    assert one.keep(ids("b") * 3) == 3
    assert matcher(of_lark("start: /[ab]+/", after=THINK_END)).keep([7, THINK_END, *ids("a")]) == 3
    none = Matcher(vocabulary(), of_lark('start: "a"', after=THINK_END), drafts=False)
    assert none.keep([7, 7, THINK_END]) == 2, "what the grammar does not see needs nobody to look"


def test_a_text_that_the_vocabulary_cannot_spell_fails() -> None:
    """Here a vocabulary without "~"; there are tokens for every other byte."""
    definition = json.loads((TINY / "tokenizer.json").read_text())
    entries = definition["model"]["vocab"]
    definition["model"]["vocab"] = {text: token for text, token in entries.items() if "~" not in text}
    small = Vocabulary(json.dumps(definition), vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,))
    one = Matcher(small, of_lark('start: "a~"'))
    assert next_tokens(one) == ids("a") and one.failure is None
    assert one.accept(ids("a")) == 1
    assert next_tokens(one) == [EOS] and one.failure == STUCK


def test_masks_that_take_too_long_end_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others wait for them; here with nothing to spend."""
    monkeypatch.setattr(constraint, "CREDIT_S", 0.0)
    monkeypatch.setattr(constraint, "MASK_S", 0.0)
    one = matcher(of_lark("start: /[ab]+/"))
    assert ids("a")[0] in next_tokens(one)
    assert one.accept(ids("a")) == 0 and one.failure == constraint.SLOW
    limit_only = matcher(Constraint(after=THINK_END, limit=3))
    assert limit_only.keep([7, 7]) == 2 and limit_only.failure is None


def test_a_token_that_the_grammar_forbids_is_noticed() -> None:
    one = matcher(of_lark('start: "ab"'))
    one.accept(ids("x"))
    assert one.failure
    early = matcher(of_lark('start: "ab"'))
    early.accept([EOS])
    assert early.failure


def test_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        Vocabulary.read(tmp_path, vocab_size=8, eos_token_ids=(1,))


def test_the_token_that_begins_it_must_exist() -> None:
    params = SamplingParams(max_tokens=1, constraint=of_lark('start: "a"', after=VOCAB_SIZE))
    assert [sentence.split()[0] for sentence in problems(params, VOCAB_SIZE)] == ["constraint"]
    assert not problems(params, VOCAB_SIZE + 1)


# ---- the sampler's part --------------------------------------------------------------------------------------------------

SMALL = 16
IDS = st.integers(0, SMALL - 1)


@settings(max_examples=120, deadline=None)
@given(
    st.sets(IDS, min_size=1),
    st.fixed_dictionaries(
        {
            "temperature": st.sampled_from([0.0, 1e-4, 1.0, 3.0]),
            "top_k": st.sampled_from([0, 1, 4]),
            "top_p": st.sampled_from([1.0, 0.5]),
            "min_p": st.sampled_from([0.0, 0.3]),
            "repetition_penalty": st.sampled_from([1.0, 1.7]),
            "presence_penalty": st.sampled_from([0.0, 2.0]),
            "logit_bias": st.dictionaries(IDS, st.sampled_from([-100.0, 100.0]), max_size=3),
            "bad_words": st.lists(IDS.map(lambda token: (token,)), max_size=4).map(tuple),
            "min_tokens": st.sampled_from([0, 9]),
        }
    ),
    st.integers(0, 10**6),
)
def test_only_what_is_allowed_is_sampled(tokens: set[int], params: dict[str, Any], seed: int) -> None:
    mask_V = torch.zeros(SMALL, dtype=torch.bool)
    mask_V[list(tokens)] = True
    logits_V = torch.randn(SMALL, generator=torch.Generator().manual_seed(seed)) * 5
    logits_V[next(iter(set(range(SMALL)) - tokens), 0)] += 300
    one = SampleRow(
        params=SamplingParams(max_tokens=10, **params),
        seed=seed,
        position=2,
        prompt=(3,),
        output=(3, 5),
        eos_token_ids=(EOS,),
        allowed_V=mask_V,
    )
    (token,) = sample(logits_V.unsqueeze(0), [one])
    assert token in tokens
    assert token == sample_plain(logits_V, one)
    banned = {word[0] for word in params["bad_words"]} | ({EOS} if params["min_tokens"] else set())
    assert token not in banned or tokens <= banned


def test_a_finished_grammar_ends_the_answer_before_min_tokens() -> None:
    """Case of the docs: min_tokens forbids EOS, the grammar everything else. The answer keeps its form."""
    one = matcher(of_lark('start: "ab"'))
    one.accept(ids("ab"))
    (mask_V,) = one.masks([])
    params = {"min_tokens": 50, "logit_bias": {EOS: -100.0}, "bad_words": ((OTHER_EOS,),)}
    assert sample(torch.zeros(1, VOCAB_SIZE), [row(ids("ab"), mask_V, **params)]) == [OTHER_EOS]
    open_end = matcher(of_lark("start: /a+/"))
    open_end.accept(ids("a"))
    (mask_V,) = open_end.masks([])
    logits_V = torch.zeros(VOCAB_SIZE)
    logits_V[EOS] = 9
    assert sample(logits_V.unsqueeze(0), [row(ids("a"), mask_V, min_tokens=5)])[0] not in (EOS, OTHER_EOS)
    assert sample(logits_V.unsqueeze(0), [row(ids("a"), mask_V)]) == [EOS]
