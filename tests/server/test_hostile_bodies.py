"""However much of a body is wrong, and however long or deep what it holds: a short 4xx, on every path that takes one."""

import json
from typing import Any

import pytest

from flashstep.server.errors import MAX_MESSAGE_CHARS, MAX_TOLD, ApiError, refuse
from tests.server.conftest import Server

CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
COUNT, INPUT, TOKENIZE, DETOKENIZE = (
    f"{MESSAGES}/count_tokens",
    f"{RESPONSES}/input_tokens",
    "/tokenize",
    "/detokenize",
)
HI = [{"role": "user", "content": "hi"}]
LEAST: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HI},
    TEXT: {"prompt": "hi"},
    RESPONSES: {"input": "hi"},
    INPUT: {"input": "hi"},
    MESSAGES: {"messages": HI, "max_tokens": 1},
    COUNT: {"messages": HI},
    TOKENIZE: {"messages": HI},
    DETOKENIZE: {"tokens": [1]},
}
MANY, LONG = 50_000, "long" * 50_000
LONGEST_ANSWER = 4096  # bytes

HUGE: list[tuple[str, dict[str, Any]]] = [
    *((path, {f"f{i}": 1 for i in range(MANY)}) for path in LEAST),
    *((path, {LONG: 1}) for path in LEAST),
    *((path, {"model": LONG}) for path in LEAST),
    *((path, {"messages": [{"role": "user", "content": [0] * MANY}]}) for path in (CHAT, MESSAGES, COUNT, TOKENIZE)),
    *((path, {"messages": [{"role": LONG, "content": "x"}]}) for path in (CHAT, MESSAGES, COUNT, TOKENIZE)),
    *((path, {"input": [{"role": "user", "content": [0] * MANY}]}) for path in (RESPONSES, INPUT)),
    *((path, {"input": [{"type": LONG}] * 25}) for path in (RESPONSES, INPUT)),
    *((path, {"input": [{}] * MANY}) for path in (RESPONSES, INPUT)),
    *((path, {"logit_bias": {str(10**6 + i): 1e3 for i in range(MANY)}}) for path in (CHAT, TEXT, RESPONSES, MESSAGES)),
    *((path, {"tool_choice": LONG}) for path in (CHAT, RESPONSES, MESSAGES, TOKENIZE)),
    *((path, {"tools": [{"type": LONG}]}) for path in (CHAT, RESPONSES, MESSAGES, TOKENIZE)),
    *((path, {"reasoning_effort": LONG}) for path in (CHAT, TOKENIZE)),
    (CHAT, {"response_format": {"type": LONG}}),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": LONG}}}}),
    (TEXT, {"structured_outputs": {"regex": "(" * MANY}}),
    (TEXT, {"structured_outputs": {"json": {LONG: 1}}}),
    (TEXT, {"stop_token_ids": [10**9] * 1000}),
    (TEXT, {"bad_words": [LONG]}),
    (TEXT, {"prompt": [10**9] * MANY}),
    (TEXT, {"n": 10**4000}),
    (RESPONSES, {"include": ["a"] * MANY}),
    (RESPONSES, {"include": [LONG] * 25}),
    (RESPONSES, {"previous_response_id": LONG}),
    (RESPONSES, {"text": {"format": {"type": LONG}}}),
    (MESSAGES, {"system": [{"type": "x"}] * MANY}),
    (MESSAGES, {"context_management": {"edits": [{"type": LONG}] * 25}}),
    (MESSAGES, {"output_config": {"effort": LONG}}),
    (DETOKENIZE, {"tokens": [10**9] * MANY}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "wrong"), HUGE, ids=[f"{path} {next(iter(wrong))[:20]}" for path, wrong in HUGE]
)
def test_an_error_is_short(server: Server, path: str, wrong: dict[str, Any]) -> None:
    status, answer = server.post(path, LEAST[path] | wrong)
    assert status in (400, 404), answer
    assert len(json.dumps(answer, ensure_ascii=False).encode()) <= LONGEST_ANSWER
    assert len(answer["error"]["message"]) <= MAX_MESSAGE_CHARS


def test_what_was_left_out_is_said(server: Server) -> None:
    for path, wrong in ((CHAT, {f"f{i}": 1 for i in range(21)}), (RESPONSES, {"include": ["a"] * 21})):
        message = server.post(path, LEAST[path] | wrong)[1]["error"]["message"]
        assert message.endswith("; and more") and message.count("; ") >= 20
        few = dict(list(wrong.items())[:20]) if path == CHAT else {"include": ["a"] * 20}
        assert "and more" not in server.post(path, LEAST[path] | few)[1]["error"]["message"]


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        value = {"type": "object", "properties": {"a": value}}
    return value


@pytest.mark.parametrize("depth", [60, 70, 120, 200, 240])
def test_schemas_however_deep(server: Server, depth: int) -> None:
    """Two levels of JSON for each of the schema; the recipe takes 128, the body of a request some more."""
    schema = nested(depth)
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    function = {"name": "f", "parameters": schema}
    tool = {"name": "f", "input_schema": schema}
    sent: list[tuple[str, dict[str, Any], str]] = [
        (CHAT, {"response_format": form}, "response_format"),
        (CHAT, {"tools": [{"type": "function", "function": function}]}, "tools"),
        (TOKENIZE, {"tools": [{"type": "function", "function": function}]}, "tools"),
        (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "a", "schema": schema}}}, "text"),
        (RESPONSES, {"tools": [{"type": "function", **function}]}, "tools"),
        (MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": schema}}}, "output_config.format"),
        (COUNT, {"output_config": {"format": {"type": "json_schema", "schema": schema}}}, "output_config.format"),
        (MESSAGES, {"tools": [tool]}, ""),
        (MESSAGES, {"messages": [{"role": "user", "content": [schema]}]}, ""),
        (TEXT, {"structured_outputs": {"json": schema}}, "structured_outputs"),
    ]  # fmt: skip
    for path, fields, param in sent:
        status, answer = server.post(path, LEAST[path] | fields)
        assert status in (200, 400), (path, answer)
        if status == 400 and "maximum context length" not in answer["error"]["message"]:
            assert param in (answer["error"].get("param") or answer["error"]["message"]), answer


def test_problems_are_looked_for_no_further_than_they_are_told() -> None:
    numbers = iter(range(MANY))
    with pytest.raises(ApiError, match=r"^0 is wrong; .*; and more$") as caught:
        refuse(ApiError(f"{number} is wrong", param=str(number)) for number in numbers)
    assert caught.value.param == "0"
    assert next(numbers) == MAX_TOLD + 1
    refuse(iter(()))
