"""The parse vectors in every cutting, and cases A15 to A19: markup, tool_choice none, reasoning, stop strings, counts."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

import deepseek_recipe as recipe
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashstep.chat.conversation import Conversation
from flashstep.chat.encode import ChatEncoder
from flashstep.chat.parse import ChatParser, StopMatcher, TextParser
from tests.chat.conftest import load_vectors
from tests.chat.test_encode import conversation

EOS = 1
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}},
    {"type": "function", "function": {"name": "g", "parameters": {"type": "object", "properties": {}}}},
]
BAR = "\uff5c"
INVOKE = (
    '<{b}DSML{b} invoke name="{name}">\n<{b}DSML{b} parameter name="a" string="true">{value}</{b}DSML{b} parameter>\n'
    "</{b}DSML{b} invoke>\n"
)


def invoke(name: str, value: str) -> str:
    return INVOKE.format(b=BAR, name=name, value=value)


def calls(*invokes: str) -> str:
    return f"\n\n<{BAR}DSML{BAR} calls>\n" + "".join(invokes) + f"</{BAR}DSML{BAR} calls>"


class Answer:
    """Everything that a parser gave, joined."""

    def __init__(self, parser: ChatParser, pieces: Iterable[Sequence[int]], *, reason: str = "stop") -> None:
        self.deltas = []
        for piece in pieces:
            self.deltas.append(parser.push(piece))
            if parser.stopped is not None:
                break
        last, self.finish_reason = parser.finish(reason)
        self.deltas.append(last)
        self.parser = parser
        self.reasoning = "".join(d.reasoning for d in self.deltas)
        self.content = "".join(d.content for d in self.deltas)
        self.calls: list[tuple[str | None, str]] = []
        for piece in (c for d in self.deltas for c in d.tool_calls):
            if piece.id is not None:
                assert piece.index == len(self.calls)
                self.calls.append((piece.name, piece.arguments))
            else:
                name, arguments = self.calls[piece.index]
                self.calls[piece.index] = (name, arguments + piece.arguments)

    @property
    def summary(self) -> tuple[str, str, tuple[tuple[str | None, str], ...], str]:
        return self.reasoning, self.content, tuple(self.calls), self.finish_reason


def one_by_one(ids: Sequence[int]) -> list[list[int]]:
    return [[token] for token in ids]


def talk(*, tools: bool = False, thinking: bool = True, tool_choice: str = "auto") -> Conversation:
    return Conversation(
        messages=[{"role": "user", "content": "q"}],
        tools=TOOLS if tools else (),
        thinking=thinking,
        tool_choice=tool_choice,
    )


def test_vectors(encoder: ChatEncoder) -> None:
    cases = load_vectors("parse_cases.json")["cases"]
    assert len(cases) == 26
    for case in cases:
        prompt = encoder.encode(conversation(case["request"]))
        stop = case["request"].get("stop") or []
        ids = encoder.tokenizer.encode(case["output"])
        message = case["result"]["message"]
        if not case["tokens_same"]:
            message = case["result_tokens"]["message"]
        for pieces in (one_by_one(ids),) if not case["tokens_same"] else (one_by_one(ids), [ids]):
            answer = Answer(prompt.parser(stop=stop), pieces)
            name = case["name"]
            assert answer.content == message["content"], name
            assert answer.reasoning == message.get("reasoning_content", ""), name
            expected = [
                (c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", [])
            ]
            assert answer.calls == expected, name
            assert answer.finish_reason == case["result"]["finish_reason"], name
            if answer.parser.stopped is None:
                assert answer.parser.num_tokens == case["usage_tokens"]["completion_tokens"], name
            details = case["usage_tokens"].get("completion_tokens_details", {})
            assert answer.parser.reasoning_tokens == details.get("reasoning_tokens", 0), name
        cut = Answer(prompt.parser(stop=stop), one_by_one(ids), reason="length")
        assert cut.finish_reason == case["finish_reason_length"], case["name"]


def test_a15_two_calls_in_every_cutting(encoder: ChatEncoder) -> None:
    prompt = encoder.encode(talk(tools=True, thinking=False))
    ids = [
        *encoder.tokenizer.encode("hello" + calls(invoke("f", "Paris"), invoke("g", 'a "quoted" <b>'))),
        EOS,
    ]
    whole = Answer(prompt.parser(), [ids])
    assert whole.content == "hello"
    assert [name for name, _ in whole.calls] == ["f", "g"]
    assert [json.loads(arguments) for _, arguments in whole.calls] == [
        {"a": "Paris"},
        {"a": 'a "quoted" <b>'},
    ]
    assert whole.finish_reason == "tool_calls"
    assert Answer(prompt.parser(), one_by_one(ids)).summary == whole.summary
    for cut in range(1, len(ids)):
        assert Answer(prompt.parser(), [ids[:cut], ids[cut:]]).summary == whole.summary, cut


def test_a15_truncated_at_every_position(encoder: ChatEncoder) -> None:
    prompt = encoder.encode(talk(tools=True))
    ids = encoder.tokenizer.encode("hm</think>hello" + calls(invoke("f", "Paris"), invoke("g", "Rome")))
    for length in range(len(ids)):
        for reason in ("length", "stop"):
            answer = Answer(prompt.parser(), one_by_one(ids[:length]), reason=reason)
            assert "DSML" not in answer.content + answer.reasoning, length
            assert answer.finish_reason in (reason, "tool_calls"), length
            assert all("DSML" not in arguments for _, arguments in answer.calls), length


def test_a15_without_the_wrapper(encoder: ChatEncoder) -> None:
    prompt = encoder.encode(talk(tools=True, thinking=False))
    ids = encoder.tokenizer.encode("hello\n\n" + invoke("f", "Paris"))
    for pieces in ([ids], one_by_one(ids)):
        answer = Answer(prompt.parser(), pieces)
        assert answer.content == "hello"
        assert answer.calls == [("f", '{"a": "Paris"}')]


def test_markup_by_spelling_is_text(encoder: ChatEncoder) -> None:
    """Only the control tokens are markup: the same letters from plain tokens are content, and reasoning does not end on them."""
    prompt = encoder.encode(talk(tools=True))
    text = "one</think>two" + calls(invoke("f", "Paris"))
    answer = Answer(prompt.parser(), one_by_one(encoder.tokenizer.encode_plain(text)))
    assert (answer.reasoning, answer.content, answer.calls) == (text, "", [])


@pytest.mark.parametrize("tools", [True, False])
def test_a16_tool_choice_none_hides_forced_calls(encoder: ChatEncoder, tools: bool) -> None:
    prompt = encoder.encode(talk(tools=tools, tool_choice="none"))
    ids = [*encoder.tokenizer.encode("hm</think>hello" + calls(invoke("f", "Paris"))), EOS]
    for pieces in ([ids], one_by_one(ids)):
        answer = Answer(prompt.parser(max_tool_calls=0), pieces)
        assert answer.summary == ("hm", "hello", (), "stop")


def test_one_call_at_most(encoder: ChatEncoder) -> None:
    """parallel_tool_calls false keeps the first."""
    prompt = encoder.encode(talk(tools=True, thinking=False))
    ids = encoder.tokenizer.encode(calls(invoke("f", "Paris"), invoke("g", "Rome")))
    answer = Answer(prompt.parser(max_tool_calls=1), one_by_one(ids))
    assert answer.calls == [("f", '{"a": "Paris"}')]
    assert answer.finish_reason == "tool_calls"


@pytest.mark.parametrize(
    ("output", "reason", "reasoning", "content"),
    [
        ("Good morning!", "stop", "Good morning!", ""),
        ("abc</think>", "stop", "abc", ""),
        ("</think>hi", "stop", "", "hi"),
        ("a</think>b</think>c", "stop", "a", "bc"),
        ("thinking and", "length", "thinking and", ""),
    ],
)
def test_a17_reasoning(encoder: ChatEncoder, output: str, reason: str, reasoning: str, content: str) -> None:
    prompt = encoder.encode(talk())
    ids = encoder.tokenizer.encode(output) + ([EOS] if reason == "stop" else [])
    for pieces in ([ids], one_by_one(ids)):
        answer = Answer(prompt.parser(), pieces, reason=reason)
        assert answer.summary == (reasoning, content, (), reason)
        assert answer.parser.num_tokens == len(ids)


def test_a17_turn_tokens_never_show(encoder: ChatEncoder) -> None:
    """With ignore_eos a model runs on into the next turn: its control tokens are no text."""
    prompt = encoder.encode(talk(thinking=False))
    spelled = f"a<{BAR}end\u2581of\u2581sentence{BAR}><{BAR}User{BAR}>b<{BAR}Assistant{BAR}>c"
    ids = [*encoder.tokenizer.encode(spelled), 129279, 200000]  # and ids that no token owns
    answer = Answer(prompt.parser(), one_by_one(ids))
    assert answer.content == "abc"
    assert answer.parser.num_tokens == len(ids)


def _byte_ids(encoder: ChatEncoder, data: bytes) -> list[int]:
    tokenizer = encoder.tokenizer
    of_byte = {tokenizer.token_bytes(i): i for i in range(1000) if len(tokenizer.token_bytes(i)) == 1}
    return [of_byte[bytes([byte])] for byte in data]


@settings(max_examples=150, deadline=None)
@given(
    data=st.lists(st.sampled_from([0xF0, 0x9F, 0x99, 0x82, 0x80, 0x41, 0x62, 0xC4, 0x8F, 0xE6]), max_size=12)
)
def test_a18_chat_text_is_the_one_shot_decode(encoder: ChatEncoder, data: list[int]) -> None:
    """The recipe drops an unfinished tail; here the answer ends as the one-shot decode does."""
    prompt = encoder.encode(talk(thinking=False))
    ids = _byte_ids(encoder, bytes(data))
    answer = Answer(prompt.parser(), one_by_one(ids), reason="length")
    assert answer.content == bytes(data).decode("utf-8", errors="replace")
    assert answer.parser.num_tokens == len(ids)
    assert answer.parser.reasoning_tokens == 0
    thinking = encoder.encode(talk())
    for pieces in ([ids], one_by_one(ids), [ids[:5], ids[5:]]):
        thought = Answer(thinking.parser(), pieces, reason="length")
        assert thought.reasoning == answer.content
        assert thought.parser.reasoning_tokens == len(ids), (
            "each token counts once, though several make a character"
        )


def test_a19_counts(encoder: ChatEncoder) -> None:
    """Runs of several tokens, as speculation gives them, count as single tokens do."""
    prompt = encoder.encode(talk())
    for text, reasoning_tokens in (("one two", 2), ("one</think>two three", 1)):
        ids = [*encoder.tokenizer.encode(text), EOS]
        for pieces in ([ids], one_by_one(ids), [ids[:2], ids[2:]]):
            parser = Answer(prompt.parser(), pieces).parser
            assert parser.num_tokens == len(ids)
            assert parser.reasoning_tokens == reasoning_tokens <= parser.num_tokens


def test_a19_markup_that_ends_the_reasoning_is_none_of_it(encoder: ChatEncoder) -> None:
    """Wherever a run of tokens ends within the new lines and the "<" that a call begins with."""
    prompt = encoder.encode(talk(tools=True))
    before = encoder.tokenizer.encode("so\n < so")
    ids = encoder.tokenizer.encode("so\n < so" + calls(invoke("f", "1")))
    for width in range(1, len(ids)):
        pieces = [ids[i : i + width] for i in range(0, len(ids), width)]
        answer = Answer(prompt.parser(), pieces)
        assert (answer.reasoning, len(answer.calls)) == ("so\n < so", 1)
        assert answer.parser.reasoning_tokens == len(before), width


STOPS = ["STOP", "ab", "abc", "\U0001f642", "\n\n", "aab"]


@settings(max_examples=300, deadline=None)
@given(
    text=st.text(alphabet="abcSTOP \n\U0001f642", max_size=20),
    stop=st.lists(st.sampled_from(STOPS), min_size=1, max_size=3, unique=True),
    include=st.booleans(),
    data=st.data(),
)
def test_stop_matcher_does_not_depend_on_cuts(
    text: str, stop: list[str], include: bool, data: st.DataObject
) -> None:
    def run(pieces: list[str]) -> tuple[str, str | None]:
        matcher = StopMatcher(stop, include=include)
        shown = "".join(matcher.push(piece) for piece in pieces)
        return shown + matcher.finish(), matcher.matched

    ends = [(text.index(s) + len(s), order) for order, s in enumerate(stop) if s in text]
    expected: tuple[str, str | None] = (text, None)
    if ends:
        end, order = min(ends)
        expected = (text[:end] if include else text[: end - len(stop[order])], stop[order])
    pieces, rest = [], text
    while rest:
        cut = data.draw(st.integers(1, len(rest)))
        pieces.append(rest[:cut])
        rest = rest[cut:]
    assert run([text]) == run(list(text)) == run(pieces) == expected


def _recipes_own(encoder: ChatEncoder, body: dict[str, Any], ids: Sequence[int]) -> str:
    request = recipe.ChatCompletionRequest(body).convert(recipe.ConversionOptions())
    native = recipe.Tokenizer.from_str(encoder.tokenizer.definition)
    generator = recipe.ChatCompletionRequest.chunk_generator(request, "", "")
    processor = recipe.StreamProcessor(generator, request.parsing_options, native)
    chunks = processor.push(recipe.InferenceChunk.ready())
    for token in ids:
        if processor.finished:
            break
        chunks += processor.push(recipe.InferenceChunk.tokens([token]))
    if not processor.finished:
        chunks += processor.push(recipe.InferenceChunk.finish(recipe.InferenceFinishReason.Stop))
    deltas = [json.loads(chunk.to_json())["choices"][0]["delta"] for chunk in chunks]
    return "".join(delta.get("content") or "" for delta in deltas)


@pytest.mark.parametrize(
    "text", ["hello STOP more", "xabc", "no stop", "aaab", "ST OP", "a\n\nb", "a \U0001f642 b", "ab"]
)
def test_stop_strings_as_the_recipe(encoder: ChatEncoder, text: str) -> None:
    body = {
        "model": "DeepSeek-V4.1-Flash",
        "messages": [{"role": "user", "content": "q"}],
        "thinking": {"type": "disabled"},
        "stop": STOPS,
    }
    ids = encoder.tokenizer.encode(text)
    answer = Answer(encoder.encode(talk(thinking=False)).parser(stop=STOPS), one_by_one(ids))
    assert answer.content == _recipes_own(encoder, body, ids)


def test_stop_options(encoder: ChatEncoder) -> None:
    prompt = encoder.encode(talk())
    ids = encoder.tokenizer.encode("think STOP</think>one STOP two STOP three")
    plain = Answer(prompt.parser(stop=["STOP"]), [ids])
    assert plain.summary == ("think STOP", "one ", (), "stop")
    assert plain.parser.stopped == "STOP"
    counted = plain.parser.num_tokens
    assert encoder.tokenizer.decode(ids[:counted]).endswith("one STOP")
    included = Answer(prompt.parser(stop=["STOP"], include_stop=True), one_by_one(ids))
    assert included.content == "one STOP"
    late = Answer(prompt.parser(stop=["STOP"], min_tokens=counted), one_by_one(ids))
    assert late.content == "one STOP two "


def test_text_held_back_for_a_stop_string_comes_before_calls(encoder: ChatEncoder) -> None:
    prompt = encoder.encode(talk(tools=True, thinking=False))
    ids = encoder.tokenizer.encode("hello ST" + calls(invoke("f", "x")))
    answer = Answer(prompt.parser(stop=["STOP"]), one_by_one(ids))
    assert answer.summary == ("", "hello ST", (("f", '{"a": "x"}'),), "tool_calls")
    kinds = ["call" if d.tool_calls else "text" for d in answer.deltas if d]
    assert kinds == sorted(kinds, reverse=True)


FRAGMENTS = [
    "one ",
    "</think>",
    "hello",
    "\n\n",
    "<",
    "\U0001f642",
    "STOP",
    calls(invoke("f", "Paris")),
    calls(invoke("f", "a"), invoke("g", 'x "<b>')),
    f"<{BAR}DSML{BAR} calls>",
    f"</{BAR}DSML{BAR} parameter>",
    invoke("h", "\u4f60"),
]


@settings(max_examples=250, deadline=None)
@given(
    fragments=st.lists(st.sampled_from(FRAGMENTS), max_size=6),
    cuts=st.lists(st.integers(1, 6), max_size=40),
    thinking=st.booleans(),
    stop=st.sampled_from([[], ["STOP"], ["o"]]),
    reason=st.sampled_from(["stop", "length"]),
)
def test_any_answer_is_the_same_in_any_cutting(
    encoder: ChatEncoder, fragments: list[str], cuts: list[int], thinking: bool, stop: list[str], reason: str
) -> None:
    """Markup whole, broken and in the wrong place: what is read does not depend on how many tokens come at a time."""
    prompt = encoder.encode(talk(tools=True, thinking=thinking))
    ids = encoder.tokenizer.encode("".join(fragments))
    pieces, rest = [], list(ids)
    for cut in cuts:
        pieces.append(rest[:cut])
        rest = rest[cut:]
    single = Answer(prompt.parser(stop=stop), one_by_one(ids), reason=reason)
    for cutting in ([*pieces, rest], [ids]):
        answer = Answer(prompt.parser(stop=stop), cutting, reason=reason)
        assert answer.summary == single.summary
        assert answer.parser.num_tokens == single.parser.num_tokens
        assert answer.parser.reasoning_tokens == single.parser.reasoning_tokens


@settings(max_examples=250, deadline=None)
@given(
    data=st.lists(
        st.sampled_from([0x41, 0x62, 0xF0, 0x9F, 0x99, 0x82, 0x0A, 0x53, 0x54, 0x4F, 0x50]), max_size=16
    ),
    cuts=st.lists(st.integers(1, 4), max_size=16),
    stop=st.sampled_from([[], ["STOP"], ["\U0001f642"], ["b", "Ab"]]),
    min_tokens=st.integers(0, 5),
)
def test_raw_text_is_the_same_in_any_cutting(
    encoder: ChatEncoder, data: list[int], cuts: list[int], stop: list[str], min_tokens: int
) -> None:
    ids = _byte_ids(encoder, bytes(data))

    def read(pieces: Iterable[Sequence[int]]) -> tuple[str, str, str | None, int]:
        parser = TextParser(encoder.tokenizer.detokenizer(), stop=stop, min_tokens=min_tokens)
        text = ""
        for piece in pieces:
            text += parser.push(piece).content
            if parser.stopped is not None:
                break
        last, reason = parser.finish("length")
        return text + last.content, reason, parser.stopped, parser.num_tokens

    pieces, rest = [], ids
    for cut in cuts:
        pieces.append(rest[:cut])
        rest = rest[cut:]
    assert read([ids]) == read(one_by_one(ids)) == read([*pieces, rest])
    if not stop:
        assert read([ids])[0] == bytes(data).decode("utf-8", errors="replace")
