"""The body of /v1/responses: what it asks for is done and repeated; whatever cannot be done is refused by its field's name."""

import json
from typing import Any

import pytest

from flashstep.server.responses.body import sealed
from tests.server.conftest import MODEL, Server
from tests.server.test_responses import TOOLS, create, prompt_tokens, scripted


def test_settings_are_repeated(server: Server) -> None:
    response = create(
        server,
        instructions="be brief",
        metadata={"a": "b"},
        temperature=0.5,
        top_p=0.9,
        max_output_tokens=7,
        user="u",
        prompt_cache_key="k",
        safety_identifier="s",
        service_tier="auto",
        truncation="disabled",
        reasoning={"effort": "low", "summary": "auto"},
        tools=TOOLS,
    )
    assert (response.instructions, response.metadata, response.user) == ("be brief", {"a": "b"}, "u")
    assert (response.temperature, response.top_p, response.max_output_tokens) == (0.5, 0.9, 7)
    assert (response.prompt_cache_key, response.safety_identifier) == ("k", "s")
    assert (response.reasoning.effort, response.reasoning.summary) == ("low", "auto")
    assert response.tools[0].name == "calc"
    assert (response.truncation, response.service_tier, response.background) == ("disabled", "default", False)


def test_kept_reasoning(server: Server) -> None:
    """A client that keeps ``encrypted_content`` alone gives the reasoning back, word for word."""
    options = scripted(server, "calls")
    first = create(server, include=["reasoning.encrypted_content"], store=False, **options)
    (reasoning, *rest) = first.output
    assert reasoning.encrypted_content == sealed("hm")
    bare = {"type": "reasoning", "summary": [], "encrypted_content": reasoning.encrypted_content}
    results = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "x"}
        for call in rest
        if call.type == "function_call"
    ]
    question = {"role": "user", "content": "hi"}
    lengths = {
        prompt_tokens(server, input=[question, kept, *rest, *results], tools=TOOLS)
        for kept in (bare, reasoning)
    }
    assert len(lengths) == 1
    assert lengths != {prompt_tokens(server, input=[question, *rest, *results], tools=TOOLS)}


def test_effort_and_thinking(server: Server) -> None:
    """A number is rendered as such; off by effort "none" or the template's switch gives the prompt that chats have."""
    off = server.client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=1,
        extra_body={"thinking": {"type": "disabled"}},
    )
    assert off.usage is not None
    assert prompt_tokens(server, reasoning={"effort": "none"}) == off.usage.prompt_tokens
    kwargs = {"chat_template_kwargs": {"thinking": False}}
    assert prompt_tokens(server, extra_body=kwargs) == off.usage.prompt_tokens
    assert prompt_tokens(server, reasoning={"effort": 7}) < prompt_tokens(server, reasoning={"effort": 100})


def test_thinking_budget(server: Server) -> None:
    extra = server.script("responses-budget", "hm</think>4")
    create(server, extra_body={**extra, "thinking_token_budget": 64})
    sent = json.loads((server.scripts / "responses-budget.params").read_bytes())
    assert sent["constraint"]["limit"] == 64


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    # body, param, words
    ({"input": "hi", "tools": [{"type": "web_search"}]}, "tools", "'web_search'"),
    ({"input": "hi", "tools": [{"type": "mcp", "server_label": "x"}]}, "tools", "'mcp'"),
    ({"input": "hi", "tools": [{"type": "function"}]}, "tools", "name"),
    ({"input": "hi", "tools": [], "tool_choice": "required"}, "tool_choice", "no tools are offered"),
    (
        {"input": "hi", "tools": TOOLS, "tool_choice": {"type": "allowed_tools"}},
        "tool_choice",
        "'allowed_tools'",
    ),
    ({"input": "hi", "tool_choice": "required"}, "tool_choice", "tool"),
    ({"input": "hi", "truncation": "auto"}, "truncation", "disabled"),
    ({"input": "hi", "include": ["file_search_call.results"]}, "include", "file_search_call.results"),
    ({"input": "hi", "conversation": "c"}, "conversation", "previous_response_id"),
    ({"input": "hi", "max_tokens": 5}, "max_tokens", "max_output_tokens"),
    ({"input": "hi", "max_output_tokens": 0}, "max_output_tokens", "max_output_tokens is 0"),
    ({"input": "hi", "temperature": -1, "max_output_tokens": 0}, "temperature", "max_output_tokens is 0"),
    ({"input": "hi", "max_output_tokens": 9999}, "max_output_tokens", "maximum context length"),
    ({"input": "hi", "n": 2}, "n", "one answer"),
    ({"input": "hi", "frobnicate": 1}, "frobnicate", "no such option"),
    ({"input": "hi", "background": True, "store": False}, "background", "store"),
    ({"input": "hi", "background": True, "stream": True}, "background", "stream"),
    ({"input": "hi", "reasoning": {"effort": "frantic"}}, "reasoning", "frantic"),
    ({"input": "hi", "reasoning": {"effort": 101}}, "reasoning", "1..100"),
    ({"input": "hi", "reasoning": {"summary": "detailed"}}, "reasoning", "detailed"),
    ({"input": "hi", "text": {"verbosity": "low"}}, "text", "low"),
    ({"input": "hi", "text": {"format": {"type": "json_schema", "name": "x"}}}, "text", "schema"),
    ({"input": "hi", "text": {"format": {"type": "xml"}}}, "text", "text.format"),
    ({"input": "hi", "top_logprobs": 3}, "top_logprobs", "/v1/chat/completions"),
    ({"input": "hi", "stop": [""]}, "stop", "stop"),
    ({"input": "hi", "temperature": -1}, "temperature", "temperature is -1"),
    ({"input": "hi", "stream_options": {}}, "stream_options", "stream"),
    *(
        ({"input": "hi", "stream": True, "stream_options": {name: True}}, "stream_options", name)
        for name in ("include_usage", "continuous_usage_stats")
    ),
    ({"input": []}, "input", "empty"),
    ({}, "input", "required"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "'item_reference'"),
    ({"input": [{"role": "robot", "content": "x"}]}, "input", "'robot'"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input",
        "'input_image'",
    ),
    (
        {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "gAAA"}]},
        "input",
        "this server gave",
    ),
    (
        {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}]},
        "input",
        "No tool output",
    ),
]


@pytest.mark.parametrize(("body", "param", "words"), REFUSED)
def test_refused(server: Server, body: dict[str, Any], param: str, words: str) -> None:
    status, answer = server.post("/v1/responses", body)
    assert status == 400, answer
    assert answer["error"]["param"] == param, answer
    assert words in answer["error"]["message"], answer


def test_wrong_model_and_id(server: Server) -> None:
    status, answer = server.post("/v1/responses", {"input": "hi", "model": "other"})
    assert (status, answer["error"]["type"]) == (404, "NotFoundError")
    made = create(server, max_output_tokens=1)
    status, answer = server.get(f"/v1/responses/{made.id}?stream=true")
    assert (status, answer["error"]["param"]) == (400, "stream")
    assert server.get(f"/v1/responses/{made.id}?stream=false")[0] == 200
