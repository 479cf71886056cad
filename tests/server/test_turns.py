"""Fields of messages, parts, calls and items: what clients send back passes, what nobody reads is refused with its path."""

import json
from typing import Any

import anthropic
import pytest

from flashstep.server import turns
from flashstep.server.openapi import fields
from tests.server.conftest import MODEL, Server
from tests.server.test_openai_sdk import CALL as LOOK
from tests.server.valid import CALLED, CHAT, CLAUDE_TOOL, HI, MESSAGES, RESPONSES, TOOL, USED

FLAT = {"type": "function", **TOOL["function"]}
TALK: dict[str, tuple[str, dict[str, Any]]] = {
    CHAT: ("messages", {"max_tokens": 1, "messages": CALLED, "tools": [TOOL]}),
    MESSAGES: ("messages", {"max_tokens": 1, "messages": USED, "tools": [CLAUDE_TOOL]}),
    RESPONSES: (
        "input",
        {
            "max_output_tokens": 1,
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
                {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
                {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
            ],
        },
    ),
}
PLACES = [  # of an object in the talk of an API
    (CHAT, "messages[0]"),
    (CHAT, "messages[1]"),
    (CHAT, "messages[1].tool_calls[0]"),
    (CHAT, "messages[1].tool_calls[0].function"),
    (CHAT, "messages[2]"),
    (MESSAGES, "messages[0]"),
    (MESSAGES, "messages[0].content[0]"),
    (MESSAGES, "messages[1].content[0]"),
    (MESSAGES, "messages[2].content[0]"),
    (RESPONSES, "input[0]"),
    (RESPONSES, "input[0].content[0]"),
    (RESPONSES, "input[1]"),
    (RESPONSES, "input[1].content[0]"),
    (RESPONSES, "input[2]"),
    (RESPONSES, "input[3]"),
]


@pytest.mark.parametrize(("path", "place"), PLACES)
def test_a_field_that_nobody_reads(server: Server, path: str, place: str) -> None:
    """Refused wherever it stands, with its place and the fields that there are; null is absent."""
    said, body = TALK[path]
    for value, status in ((1, 400), (None, 200)):
        sent = json.loads(json.dumps(body))
        at: Any = sent
        for step in place.replace("[", ".").replace("]", "").split("."):
            at = at[int(step)] if step.isdecimal() else at[step]
        at["prefx"] = value
        got, answer = server.post(path, sent)
        assert got == status, answer
    message, param = answer_of(server, path, sent, at)
    assert message.startswith(f"{place} has no field 'prefx' here; its fields are ")
    assert param in (said, None)


def answer_of(server: Server, path: str, sent: Any, at: Any) -> tuple[str, str | None]:
    at["prefx"] = 1
    _, answer = server.post(path, sent)
    return answer["error"]["message"], answer["error"].get("param")


def test_parts_of_chats(server: Server) -> None:
    part = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
    for given, status in ((part, 200), (part | {"detail": "low"}, 400)):
        body = {"max_tokens": 1, "messages": [{"role": "user", "content": [given]}]}
        assert server.post(CHAT, body)[0] == status


@pytest.mark.parametrize(
    ("last", "words"),
    [
        ({"reasoning": "y", "reasoning_content": "z"}, "messages[1]: reasoning and reasoning_content differ"),
        ({"role": "tool"}, "messages[1].tool_call_id: this field is required"),
    ],
)
def test_refused(server: Server, last: dict[str, Any], words: str) -> None:
    turn = {"role": "assistant", "content": "x"} | last
    status, answer = server.post(CHAT, {"max_tokens": 1, "messages": [*HI, turn, *HI]})
    assert status == 400 and answer["error"]["message"].startswith(words), answer


def test_answer_to_no_call(server: Server) -> None:
    """The message at fault is the tool's, which the recipe would say of the call."""
    messages = [*CALLED[:-1], CALLED[-1] | {"tool_call_id": "c2"}]
    status, answer = server.post(CHAT, {"max_tokens": 1, "messages": messages})
    assert status == 400
    assert answer["error"]["message"] == (
        "messages[2].tool_call_id is 'c2'; the calls of the assistant's turn before are 'c1'"
    )


def test_one_limit(server: Server) -> None:
    """Under both names it must be one number."""
    for other, status in ((7, 200), (5, 400)):
        body = {"messages": HI, "max_tokens": 7, "max_completion_tokens": other}
        got, answer = server.post(CHAT, body)
        assert got == status, answer
    assert "max_tokens is 7 and max_completion_tokens 5" in answer["error"]["message"]


def test_dumped_chat(server: Server) -> None:
    """What the package made of an answer goes back whole, nulls, parsed arguments and all, and with LangChain's names."""
    asked = {"model": MODEL, "messages": HI, "tools": [TOOL], "extra_body": server.script("dumped", LOOK)}
    message = server.client.chat.completions.create(**asked).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "2", "name": "Look"}
    chunk = server.client.chat.completions.create(**asked, stream=True)
    pieces = [delta.model_dump() for part in chunk for delta in part.choices[0].delta.tool_calls or ()]
    assert pieces[0]["index"] == 0
    indexed = message.model_dump()
    indexed["tool_calls"][0] |= {"index": 0}
    indexed["tool_calls"][0]["function"]["parsed_arguments"] = {}
    for turn in (message.model_dump(), indexed | {"annotations": [], "parsed": None, "name": "model"}):
        again = [HI[0] | {"name": "bob"}, turn, result]
        body = {"messages": again, "max_tokens": 1, "tools": [TOOL]}
        status, answer = server.post(CHAT, body)
        assert status == 200, answer


def test_dumped_items(server: Server) -> None:
    asked = {"model": MODEL, "tools": [FLAT], "extra_body": server.script("dumped_items", LOOK)}
    response = server.client.responses.create(input="hi", include=["reasoning.encrypted_content"], **asked)
    items = [item.model_dump() for item in response.output]
    result = {"type": "function_call_output", "call_id": items[-1]["call_id"], "output": "2"}
    plain = server.client.responses.create(
        input="hi", model=MODEL, extra_body=server.script("dumped_text", "hm</think>yes")
    )
    told = [item.model_dump() for item in plain.output]
    body = {"input": [*HI, *told, *items, result], "max_output_tokens": 1}
    status, answer = server.post(RESPONSES, body)
    assert status == 200, answer


def test_dumped_blocks(server: Server) -> None:
    with anthropic.Anthropic(base_url=server.base, api_key="none", max_retries=0) as client:
        message = client.messages.create(
            model=MODEL,
            max_tokens=60,
            messages=HI,
            tools=[CLAUDE_TOOL],
            extra_body=server.script("dumped_blocks", LOOK),
        )
    blocks = [block.model_dump() for block in message.content]
    result = {"type": "tool_result", "tool_use_id": blocks[-1]["id"], "content": "2", "is_error": False}
    turns_ = [*HI, {"role": "assistant", "content": blocks}, {"role": "user", "content": [result]}]
    status, answer = server.post(MESSAGES, {"messages": turns_, "max_tokens": 1, "tools": [CLAUDE_TOOL]})
    assert status == 200, answer


def test_the_document_has_the_fields() -> None:
    """A form's fields that are read are the described ones, so that what the document forbids is refused, and nothing else."""
    described = [set(one["properties"]) for one in fields.MESSAGE["anyOf"] + fields.ITEM["anyOf"]]
    for form in (*turns.CHAT.values(), *turns.ITEMS.values()):
        assert {*form.read, *form.idle} in described, form


TOOLS_OF = {"tools": [TOOL]}
SAID: list[tuple[str, dict[str, Any], str]] = [
    # path, what differs from a good body, the whole or the beginning of the message
    (CHAT, {"reasoning_effort": "bogus"}, "reasoning_effort is 'bogus'; it must be none, minimal, low, "),
    (CHAT, {"reasoning_effort": 500}, "reasoning_effort is 500; it must be none, minimal, low, "),
    (RESPONSES, {"reasoning": {"effort": "bogus"}}, "reasoning.effort is 'bogus'; it must be none, "),
    (CHAT, {"response_format": {"type": "json"}}, "response_format.type is 'json'; it must be one of text, json_"),
    (CHAT, {"thinking": {"type": "on"}}, "thinking.type: Invalid enum value 'on'; it must be \"enabled\", "),
    (CHAT, {"thinking": {"type": "enabled", "budget_tokens": 5}}, "thinking: Object contains unknown field `budget_"),
    (CHAT, {"tools": [TOOL | {"type": "x"}]}, "tools[0].type: Invalid enum value 'x'; it must be \"function\""),
    (CHAT, {"tools": [TOOL | {"x": 1}]}, "tools[0]: Object contains unknown field `x`; its fields are type, function"),
    (CHAT, {**TOOLS_OF, "tool_choice": {"type": "x", "function": {"name": "f"}}}, "tool_choice.type: Invalid enum"),
    (RESPONSES, {"text": {"verbosity": "low"}}, "text.verbosity: Invalid enum value 'low'; it must be \"medium\""),
    (RESPONSES, {"tools": [FLAT | {"defer_loading": True}]}, "tools[0].defer_loading: Invalid enum value True; it must"),
    (MESSAGES, {"tool_choice": {"type": "x"}}, "tool_choice.type: Invalid enum value 'x'; it must be \"auto\", "),
    (CHAT, {"tools": []}, "tools is an empty list"),  # as vLLM's chat
    (CHAT, {"add_special_tokens": True}, "this server does not take 'add_special_tokens': a chat's prompt has"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "wrong", "begin"), SAID)
def test_a_refusal_says_what_is_allowed(server: Server, path: str, wrong: dict[str, Any], begin: str) -> None:
    turns_, limit = ("input", "max_output_tokens") if path == RESPONSES else ("messages", "max_tokens")
    status, answer = server.post(path, {turns_: HI, limit: 2, **wrong})
    assert status == 400 and answer["error"]["message"].startswith(begin), answer


@pytest.mark.parametrize(
    ("path", "more"),
    [
        (CHAT, {"add_special_tokens": False, "max_tokens": 2}),
        (RESPONSES, {"tools": [], "max_output_tokens": 2}),
        (MESSAGES, {"tools": [], "max_tokens": 2}),
    ],
)
def test_what_asks_for_nothing(server: Server, path: str, more: dict[str, Any]) -> None:
    turns_ = "input" if path == RESPONSES else "messages"
    status, answer = server.post(path, {turns_: HI, **more})
    assert status == 200, answer


def test_completions_have_no_response_format(server: Server) -> None:
    body = {"prompt": "x", "response_format": {"type": "json_object"}}
    status, answer = server.post("/v1/completions", body)
    assert status == 400 and answer["error"]["message"].endswith("'response_format': use structured_outputs")
