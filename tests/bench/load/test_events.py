"""Server-sent events: however the bytes are cut, and whatever stands between them, the same events come out."""

import json
import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashstep.bench.load import events
from flashstep.bench.load.events import EventReader, MalformedEvent, Usage, read_piece

STREAM = (
    b": keep-alive\n\n"
    b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\r\n\r\n'
    b"event: message\nid: 7\ndata:no space\n\n"
    b"data: two\ndata: lines\n\n"
    b": another\n"
    b"data: \xe2\x82\xac\n\n"
    b"\n\n"
    b"data: [DONE]\n\n"
)
EVENTS = [
    b'{"choices":[{"delta":{"role":"assistant","content":""}}]}',
    b"no space",
    b"two\nlines",
    "\u20ac".encode(),
    b"[DONE]",
]


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_where_the_bytes_are_cut_makes_no_difference(cuts: list[int]) -> None:
    reader, found = EventReader(), []
    edges = [0, *sorted(cuts), len(STREAM)]
    for start, end in pairwise(edges):
        found += reader.feed(STREAM[start:end])
    assert found == EVENTS


def test_an_event_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "LONGEST_EVENT_BYTES", 1 << 20)
    reader = EventReader()
    reader.feed(b"data: " + b"x" * (1 << 19))
    with pytest.raises(MalformedEvent, match="1 MiB"):
        reader.feed(b"x" * (1 << 20))


def piece(**choice: object) -> events.Piece:
    return read_piece(json.dumps({"choices": [choice]}).encode())


def test_content_is_content_reasoning_or_a_tools_text() -> None:
    assert not piece(delta={"role": "assistant", "content": ""}).is_content
    assert not piece(delta={"role": "assistant", "content": None, "reasoning_content": ""}).is_content
    assert not piece(delta={}, finish_reason="stop").is_content
    assert piece(delta={"content": "a"}).text == "a"
    assert piece(text="a").text == "a"
    for name in ("reasoning", "reasoning_content"):
        found = piece(delta={name: "hm"})
        assert found.is_content and found.reasoning == "hm" and found.text == ""
    both = piece(delta={"reasoning": "hm", "reasoning_content": "hm"})
    assert both.reasoning == "hm", "a server that writes both names wrote one text"
    called = piece(delta={"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": "{"}}]})
    assert called.is_content and called.tool == "f{"


def test_tokens_that_an_event_lists() -> None:
    assert piece(delta={"content": "ab"}).token_ids is None
    assert piece(delta={"content": "ab"}, token_ids=[3, 4]).token_ids == 2
    assert (
        piece(delta={"content": "ab"}, logprobs={"content": [{"token": "a"}, {"token": "b"}]}).token_ids == 2
    )
    assert piece(text="abc", logprobs={"tokens": ["a", "b", "c"]}).token_ids == 3


def test_usage_on_any_event_and_under_either_name() -> None:
    assert read_piece(b'{"choices":[],"usage":null}').usage is None
    vllm = read_piece(
        b'{"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":4,"prompt_tokens_details":{"cached_tokens":8}}}'
    ).usage
    deepseek = read_piece(b'{"choices":[],"usage":{"completion_tokens":4,"prompt_cache_hit_tokens":8}}').usage
    assert vllm is not None and deepseek is not None
    assert (vllm.prompt_tokens, vllm.completion_tokens, vllm.cached_tokens) == (9, 4, 8)
    assert (deepseek.prompt_tokens, deepseek.cached_tokens) == (None, 8)
    assert Usage().cached_tokens is None


@pytest.mark.parametrize("error", ['{"message": "why", "code": 500}', '"why"', '["why"]'])
def test_an_error_is_told_whatever_its_shape(error: str) -> None:
    assert "why" in read_piece(f'{{"error": {error}}}'.encode()).error


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"7", b'{"choices": 7}', b"\xff\xfe", b"[" * 10000])
def test_what_is_no_event_is_malformed(data: bytes) -> None:
    with pytest.raises(MalformedEvent):
        read_piece(data)


def test_every_line_end_of_the_standard_is_one() -> None:
    for end in (b"\n", b"\r", b"\r\n"):
        text = end.join([b"data: one", b"", b"data: two", b"data: lines", b"", b": bye", b""])
        for size in (1, 2, len(text)):
            reader, found = EventReader(), []
            for start in range(0, len(text), size):
                found += reader.feed(text[start : start + size])
            assert found == [b"one", b"two\nlines"]


def test_a_line_in_many_pieces_is_joined_once() -> None:
    """Four times the bytes take four times as long, not sixteen."""

    def taken_s(pieces: int) -> float:
        reader, start_s = EventReader(), time.process_time()
        for _ in range(pieces):
            reader.feed(b"data: " + b"x" * 1024)
        return time.process_time() - start_s

    taken_s(1000)
    assert min(taken_s(32_000) for _ in range(3)) < 9 * min(taken_s(8_000) for _ in range(3)) + 0.02


def test_an_event_of_endless_lines_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "LONGEST_EVENT_BYTES", 1 << 20)
    reader = EventReader()
    with pytest.raises(MalformedEvent, match="1 MiB"):
        for _ in range(3 << 10):
            reader.feed(b"data: " + b"x" * 1000 + b"\n")
    reader = EventReader()
    for _ in range(3 << 10):
        assert reader.feed(b"data: " + b"x" * 1000 + b"\n\n"), "many events are none too long"


@pytest.mark.parametrize("count", ["1000000000000", "-5", "12.5", "NaN", '"many"', "[3]"])
def test_a_count_that_is_none_is_left_out_and_the_text_kept(count: str) -> None:
    found = read_piece(f'{{"choices":[{{"text":"a"}}],"usage":{{"completion_tokens":{count}}}}}'.encode())
    assert found.text == "a" and found.usage is None and "usage is no count" in found.unread


def test_figures_against_the_format_do_not_cost_the_text() -> None:
    whole = read_piece(b'{"choices":[{"text":"a"}],"usage":{"completion_tokens":12.0}}')
    assert whole.usage is not None and whole.usage.completion_tokens == 12 and whole.unread
    nan = read_piece(
        b'{"choices":[{"delta":{"content":"a"},"logprobs":{"content":[{"token":"a","logprob":NaN}]}}]}'
    )
    assert (nan.text, nan.token_ids) == ("a", 1) and "against the format" in nan.unread


def test_an_error_object_is_an_error() -> None:
    assert read_piece(b'{"object":"error","message":"too long","code":400}').error == "too long"
