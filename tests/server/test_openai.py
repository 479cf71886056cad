"""Bodies, as bytes: whatever comes is a struct or an ``ApiError`` that names what is wrong."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashstep.server.errors import ApiError
from flashstep.server.messages.body import CountBody, MessagesBody
from flashstep.server.openai import (
    METADATA,
    OFF,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    decode,
)
from flashstep.server.responses.body import ResponsesBody
from tests.json_values import VALUES, texts

KINDS = (ChatBody, CompletionBody, TokenizeBody, DetokenizeBody, ResponsesBody, MessagesBody, CountBody)
LEAST: dict[type, dict[str, Any]] = {
    ChatBody: {"messages": [{"role": "user", "content": "hi"}]},
    CompletionBody: {"prompt": "hi"},
    TokenizeBody: {},
    DetokenizeBody: {"tokens": [1]},
    ResponsesBody: {"input": "hi"},
    MessagesBody: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1},
    CountBody: {"messages": [{"role": "user", "content": "hi"}]},
}


def outcome(data: bytes, kind: type[msgspec.Struct]) -> msgspec.Struct | ApiError:
    try:
        return decode(data, kind)
    except ApiError as error:
        assert error.status == 400 and error.message
        return error


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_bytes(kind: type[msgspec.Struct], data: st.DataObject) -> None:
    text = data.draw(texts([*kind.__struct_fields__, *METADATA, *OFF]))
    body = text.encode("utf-8", errors="surrogatepass")
    flipped = data.draw(st.none() | st.integers(0, max(len(body) - 1, 0)))
    if flipped is not None and body:
        body = body[:flipped] + data.draw(st.binary(max_size=2)) + body[flipped + 1 :]
    outcome(body, kind)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_an_error_names_a_field_that_is_there_or_missing(
    kind: type[msgspec.Struct], data: st.DataObject
) -> None:
    """One field of a valid body gets any value: it is taken, or the error is of that field."""
    name = data.draw(st.sampled_from(kind.__struct_fields__))
    value = data.draw(
        VALUES.filter(lambda one: "NaN" not in json.dumps(one) and "Inf" not in json.dumps(one))
    )
    made = outcome(json.dumps(LEAST[kind] | {name: value}).encode(), kind)
    if isinstance(made, ApiError):
        assert made.param == name or "not valid JSON" in made.message, made.message
    elif value is None:
        assert made == decode(json.dumps({k: v for k, v in LEAST[kind].items() if k != name}).encode(), kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")])
def test_any_depth(kind: type[msgspec.Struct], opening: str, closing: str) -> None:
    for name in kind.__struct_fields__:
        for depth in (90, 450, 950, 5000):
            outcome(f'{{"{name}":{opening * depth}0{closing * depth}}}'.encode(), kind)


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_decoded_is_decoded_again(kind: type[msgspec.Struct]) -> None:
    made = decode(json.dumps(LEAST[kind]).encode(), kind)
    assert decode(msgspec.json.encode(made), kind) == made
