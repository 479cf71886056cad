"""Server-sent events: however the bytes are cut, and whatever stands between them, the same events come out."""

import json
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
