"""What bodies may say: every problem at once, a sentence for each option that others have, thinking in every spelling."""

import json
from typing import Any

import pytest

from flashstep.server.openai import LATER, OFF, ChatBody, CompletionBody
from tests.server.conftest import Server
from tests.server.test_usage import CHAT, TEXT, body_of, events

HI = [{"role": "user", "content": "hi"}]
PATHS = pytest.mark.parametrize("path", [CHAT, TEXT])


def refused(server: Server, path: str, **fields: Any) -> dict[str, Any]:
    status, answer = server.post(path, body_of(path, **fields))
    assert status == 400, answer
    return answer["error"]


# ---- all at once -------------------------------------------------------------------------------------------------------


@PATHS
def test_every_wrong_type_and_unknown_field_is_told(server: Server, path: str) -> None:
    wrong = {"banana": 1, "suffix": "x", "temperature": "hot", "n": 1.5, "stop": [5], "seed": True}
    error = refused(server, path, **wrong)
    assert error["param"] == "banana"
    for name in wrong:
        assert name in error["message"], error
    assert "stop[0]: Expected `str`, got `int`" in error["message"]


@PATHS
def test_a_missing_field_does_not_hide_a_wrong_one(server: Server, path: str) -> None:
    status, answer = server.post(path, {"top_k": "x"})
    required = "messages" if path == CHAT else "prompt"
    assert status == 400 and answer["error"]["param"] in (required, "top_k")
    assert f"{required}: this field is required" in answer["error"]["message"]
    assert "top_k: Expected `int`" in answer["error"]["message"]


@PATHS
def test_every_value_out_of_range_is_told(server: Server, path: str) -> None:
    error = refused(server, path, n=0, stop=[""], best_of=3, cache_salt="x" * 129, priority=1 << 63)
    assert error["param"] == "n"
    assert all(
        name in error["message"]
        for name in ("n is 0", "best_of is 3", "stop takes", "cache_salt", "priority")
    )
    late = refused(server, path, temperature=-1, top_p=2, max_tokens=100_000, logit_bias={"99999": 1})
    assert late["message"].startswith("This model's maximum context length is")
    assert all(name in late["message"] for name in ("temperature is -1", "top_p is 2", "logit_bias names"))


def test_names_are_those_that_were_sent(server: Server) -> None:
    error = refused(
        server,
        CHAT,
        max_completion_tokens=0,
        logprobs=True,
        top_logprobs=21,
        prompt_logprobs=22,
        min_tokens=-1,
    )
    assert error["param"] == "max_completion_tokens"
    for words in ("max_completion_tokens is 0", "; top_logprobs is 21", "; prompt_logprobs is 22"):
        assert words in error["message"], error


@PATHS
@pytest.mark.parametrize(
    ("text", "param"),
    [
        ('"temperature": true', "temperature"),
        ('"max_tokens": 5.5', "max_tokens"),
        ('"max_tokens": "5"', "max_tokens"),
        ('"max_tokens": ""', "max_tokens"),
        ('"n": true', "n"),
        ('"stream": 1', "stream"),
        ('"stream": "true"', "stream"),
        ('"seed": 1' + "0" * 30, "seed"),
        ('"seed": -9223372036854775809', "seed"),
        ('"logit_bias": {"5": true}', "logit_bias"),
        ('"logit_bias": {"": 1}', "logit_bias"),
        ('"stop": ""', "stop"),
        ('"request_id": ""', "request_id"),
        ('"top_k": 1' + "0" * 400, "top_k"),
        ('"temperature": 1' + "0" * 400, "temperature"),
    ],
)
def test_numbers_are_not_guessed_at(server: Server, path: str, text: str, param: str) -> None:
    start = json.dumps(body_of(path))[:-1]
    status, answer = server.post(path, f"{start}, {text}}}".encode())
    assert (status, answer["error"]["param"]) == (400, param), answer


# ---- options of others -------------------------------------------------------------------------------------------------


@PATHS
def test_what_is_refused_says_why(server: Server, path: str) -> None:
    known = {*(ChatBody if path == CHAT else CompletionBody).__struct_fields__}
    for name, sentence in LATER.items():
        if name in known:
            continue
        error = refused(server, path, **{name: "something"})
        assert (error["param"], sentence in error["message"]) == (name, True), error


@PATHS
def test_what_asks_for_nothing_is_taken(server: Server, path: str) -> None:
    for name, value in OFF.items():
        status, answer = server.post(path, body_of(path, max_tokens=1, **{name: value}))
        assert status == 200, answer
    assert refused(server, path, use_beam_search=True)["param"] == "use_beam_search"
    assert "/v1/responses keeps" in refused(server, path, store=True)["message"]
    assert refused(server, path, length_penalty=True)["param"] == "length_penalty"
    status, _ = server.post(
        path, body_of(path, max_tokens=1, n=2, best_of=2, length_penalty=1, session_id="s")
    )
    assert status == 200


@PATHS
def test_ids_by_header_body_or_lot(server: Server, path: str) -> None:
    kind = "chatcmpl-" if path == CHAT else "cmpl-"
    body = body_of(path, max_tokens=2, request_id="mine")
    assert server.post(path, body)[1]["id"] == kind + "mine"
    assert server.post(path, body, **{"X-Request-Id": "header"})[1]["id"] == kind + "header"
    assert {chunk["id"] for chunk in events(server, path, body)} == {kind + "mine"}
    drawn = {server.post(path, body_of(path, max_tokens=1))[1]["id"] for _ in range(2)}
    assert len(drawn) == 2 and all(one.startswith(kind) for one in drawn)


# ---- thinking ----------------------------------------------------------------------------------------------------------


def prompt(server: Server, messages: list[dict[str, Any]] | None = None, **body: Any) -> str:
    status, answer = server.post("/tokenize", {"messages": messages or HI, **body})
    assert status == 200, answer
    return server.tokenizer.decode(answer["tokens"])


@pytest.mark.parametrize("on", [True, False])
def test_thinking_in_every_spelling(server: Server, on: bool) -> None:
    typed = {"type": "enabled" if on else "disabled"}
    end = "<think>" if on else "</think>"
    for spelled in (
        {"thinking": on},
        {"thinking": typed},
        {"enable_thinking": on},
        {"chat_template_kwargs": {"thinking": on}},
        {"chat_template_kwargs": {"thinking": typed}},
        {"chat_template_kwargs": {"enable_thinking": on}},
        {"thinking": typed, "enable_thinking": on, "chat_template_kwargs": {"thinking": on}},
    ):
        assert prompt(server, **spelled).endswith(end), spelled


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"thinking": True, "enable_thinking": False}, "enable_thinking"),
        ({"thinking": True, "chat_template_kwargs": {"thinking": False}}, "chat_template_kwargs"),
        ({"thinking": {"type": "enabled"}, "reasoning_effort": "none"}, "reasoning_effort"),
        ({"reasoning_effort": 30, "chat_template_kwargs": {"reasoning_effort": "low"}}, "reasoning_effort"),
        ({"reasoning_effort": "42"}, "reasoning_effort"),
        ({"reasoning_effort": ""}, "reasoning_effort"),
        ({"reasoning_effort": False}, "reasoning_effort"),
        ({"reasoning_effort": 0.001}, "reasoning_effort"),
        ({"reasoning_effort": -1}, "reasoning_effort"),
        ({"reasoning_effort": 50.5}, "reasoning_effort"),
        ({"chat_template_kwargs": {"reasoning_effort": True}}, "chat_template_kwargs"),
        ({"thinking": {"type": "auto"}}, "thinking"),
        ({"thinking": "on"}, "thinking"),
        ({"enable_thinking": "false"}, "enable_thinking"),
        ({"extra_body": {"thinking": False}}, "extra_body"),
        ({"reasoning": {"effort": "low"}}, "reasoning"),
    ],
)
def test_what_thinking_cannot_mean(server: Server, fields: dict[str, Any], param: str) -> None:
    assert refused(server, CHAT, max_tokens=1, **fields)["param"] == param


@pytest.mark.parametrize(
    ("effort", "number"),
    [("low", 50), ("high", 75), ("max", 100), (1, 1), (100, 100), (0.5, 50), (50.0, 50), ("medium", 75)],
)
def test_effort_at_both_places(server: Server, effort: str | float, number: int) -> None:
    for fields in ({"reasoning_effort": effort}, {"chat_template_kwargs": {"reasoning_effort": effort}}):
        assert f"Reasoning Effort: {number} (" in prompt(server, **fields)


# ---- continuing a message ----------------------------------------------------------------------------------------------

PARTIAL = [*HI, {"role": "assistant", "content": "so far", "reasoning": "r"}]
THOUGHT = [*HI, {"role": "assistant", "content": "", "reasoning_content": "so far"}]


@pytest.mark.parametrize(
    ("messages", "end", "field"),
    [(PARTIAL, "<think>r</think>so far", "content"), (THOUGHT, "<think>so far", "reasoning")],
)
def test_a_message_is_continued(server: Server, messages: list[dict[str, Any]], end: str, field: str) -> None:
    """G8, in vLLM's words and in DeepSeek's; the answer is the continuation alone, in reasoning or content."""
    begun = [*messages[:-1], messages[-1] | {"prefix": True}]
    bodies = ({"messages": begun}, {"messages": messages, "continue_final_message": True})
    for body in (*bodies, {**bodies[1], "add_generation_prompt": False}):
        assert prompt(server, **body).endswith(end)
        extra = server.script("continued", " and on")
        message = server.post(CHAT, {**body, **extra})[1]["choices"][0]["message"]
        assert message[field] == " and on"
    assert prompt(server, messages=PARTIAL + HI, add_generation_prompt=True).endswith("<think>")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"continue_final_message": True}, "continue_final_message"),
        (
            {"messages": PARTIAL, "continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
        ({"add_generation_prompt": False}, "add_generation_prompt"),
    ],
)
def test_what_cannot_be_continued(server: Server, fields: dict[str, Any], param: str) -> None:
    assert refused(server, CHAT, **fields)["param"] == param


# ---- how much one request may ask for ----------------------------------------------------------------------------------


def test_lists_have_an_end(server: Server) -> None:
    """What a small body could ask for, and what would keep the others waiting."""
    many = {"bad_words": ["a"] * 1025, "stop_token_ids": [5] * 1025}
    error = refused(server, CHAT, **many)
    assert all(name in error["message"] for name in many)
    for prompt, n in ((["a"] * 4097, 1), ([[5]] * 33, 128)):
        error = refused(server, TEXT, prompt=prompt, n=n, max_tokens=1)
        assert (error["param"], "4096" in error["message"]) == ("prompt", True), error
    status, answer = server.post(TEXT, {"prompt": [[5]] * 32, "n": 4, "max_tokens": 1})
    assert status == 200 and [choice["index"] for choice in answer["choices"]] == list(range(128))
    assert server.post(TEXT, {"prompt": [5] * 500, "max_tokens": 1})[0] == 200, "ids are one prompt"
