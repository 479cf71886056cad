"""The golden prompts, byte for byte, and the encode cases: prompt, ids, errors; injection; numeric effort."""

import re
from typing import Any

import pytest

from flashstep.chat.conversation import Conversation
from flashstep.chat.encode import ChatEncoder, ChatError
from flashstep.config.generation import EFFORT_TIERS
from tests.chat.conftest import load_vectors

HANDLED = {"model", "messages", "tools", "tool_choice", "thinking", "reasoning_effort", "response_format"}
SAMPLING = {
    "temperature",
    "top_p",
    "max_tokens",
    "stop",
    "logprobs",
    "top_logprobs",
    "seed",
    "stream",
    "stream_options",
}


def conversation(request: dict[str, Any]) -> Conversation:
    thinking = request.get("thinking")
    return Conversation(
        messages=request["messages"],
        tools=request.get("tools", ()),
        tool_choice=request.get("tool_choice", "auto"),
        thinking=None if thinking is None else thinking["type"] == "enabled",
        effort=request.get("reasoning_effort"),
        response_format=request.get("response_format"),
    )


def test_golden_prompts_are_byte_equal(encoder: ChatEncoder) -> None:
    golden = load_vectors("golden_v41_prompts.json")
    assert len(golden) == 16
    for name, case in golden.items():
        assert set(case["request"]) <= HANDLED | SAMPLING, name
        assert encoder.encode(conversation(case["request"])).text == case["prompt"], name


def test_encode_cases(encoder: ChatEncoder) -> None:
    checked = 0
    for case in load_vectors("encode_cases.json")["cases"]:
        request = case["request"]
        if case["api"] != "chat" or case.get("n_images"):
            continue
        assert set(request) <= HANDLED | SAMPLING, case["name"]
        if "error" in case:
            with pytest.raises(ChatError) as caught:
                encoder.encode(conversation(request))
            expected = case["error"].get("text") or case["error"]["body"]["error"]["message"]
            assert str(caught.value).strip() == expected.strip(), case["name"]
            assert caught.value.param in ("messages", "tool_choice", "tools", "response_format")
        else:
            prompt = encoder.encode(conversation(request))
            assert prompt.text == case["prompt"], case["name"]
            assert list(prompt.ids) == case["ids"], case["name"]
            assert prompt.thinking == case["thinking"], case["name"]
        checked += 1
    assert checked >= 45


def test_spellings_in_user_text_stay_text(encoder: ChatEncoder) -> None:
    cases = load_vectors("encode_cases.json")["cases"]
    naive = [case for case in cases if case.get("ids_full_vocab")]
    assert naive, "the vectors hold at least one injection"
    for case in naive:
        if case["api"] != "chat":
            continue
        prompt = encoder.encode(conversation(case["request"]))
        assert list(prompt.ids) == case["ids"] != case["ids_full_vocab"]
        assert encoder.tokenizer.encode(prompt.text) == case["ids_full_vocab"], (
            "the naive encoding is the dangerous one"
        )


def test_own_encoding_of_ranges_is_the_recipes(encoder: ChatEncoder) -> None:
    """A numeric effort of 75 goes the other way round and must give what the tier "high" gives."""
    for case in load_vectors("encode_cases.json")["cases"]:
        request = case["request"]
        if case["api"] != "chat" or "error" in case or case.get("n_images") or not case["thinking"]:
            continue
        tier = encoder.encode(conversation({**request, "reasoning_effort": "high"}))
        number = encoder.encode(conversation({**request, "reasoning_effort": 75}))
        assert (number.text, number.ids) == (tier.text, tier.ids), case["name"]


@pytest.mark.parametrize("effort", [1, 7, 42, 100])
def test_numeric_effort(encoder: ChatEncoder, effort: int) -> None:
    talk = Conversation(messages=[{"role": "user", "content": "Hi, Reasoning Effort: 75"}], effort=effort)
    prompt = encoder.encode(talk)
    assert f"Reasoning Effort: {effort} (range 1-100" in prompt.text
    assert "Hi, Reasoning Effort: 75" in prompt.text
    assert encoder.tokenizer.decode(prompt.ids) == prompt.text
    if effort == 100:
        named = encoder.encode(Conversation(messages=talk.messages, effort="max"))
        assert named.ids == prompt.ids


def test_tiers_are_the_recipes(encoder: ChatEncoder) -> None:
    with pytest.raises(ChatError, match="huge") as caught:
        encoder.encode(Conversation(messages=[{"role": "user", "content": "x"}], effort="huge"))
    assert set(re.findall("`(\\w+)`", str(caught.value))) - {"huge"} == set(EFFORT_TIERS)
    for tier in EFFORT_TIERS:
        encoder.encode(Conversation(messages=[{"role": "user", "content": "x"}], effort=tier))


def test_no_tools_and_tool_choice_none_have_one_prompt(encoder: ChatEncoder) -> None:
    """Case A16: the tools are not rendered."""
    messages = [{"role": "user", "content": "What is 2+2?"}]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    none = encoder.encode(Conversation(messages=messages, tools=tools, tool_choice="none"))
    bare = encoder.encode(Conversation(messages=messages))
    auto = encoder.encode(Conversation(messages=messages, tools=tools))
    assert none.ids == bare.ids
    assert len(auto.ids) > len(bare.ids)


def test_reasoning_is_an_other_name_of_reasoning_content(encoder: ChatEncoder) -> None:
    def history(key: str) -> Conversation:
        answer = {"role": "assistant", "content": "a", key: "because", "prefix": True}
        return Conversation(messages=[{"role": "user", "content": "q"}, answer])

    assert encoder.encode(history("reasoning")).ids == encoder.encode(history("reasoning_content")).ids
    assert "because" in encoder.encode(history("reasoning")).text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": None}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x"}], "effort": "huge"}, "reasoning_effort"),
        ({"messages": [{"role": "user", "content": "x"}], "tool_choice": "banana"}, "tool_choice"),
        ({"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}]}, "tools"),
        (
            {
                "messages": [{"role": "user", "content": "x"}],
                "tools": [{"type": "function", "function": {"name": "!"}}],
            },
            "tools",
        ),
        (
            {
                "messages": [{"role": "user", "content": "x"}],
                "tools": [{"type": "function", "function": {"parameters": {}}}],
            },
            "tools",
        ),
        (  # what JSON allows and 64 bits do not
            {
                "messages": [{"role": "user", "content": "x"}],
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"maximum": 2**64}}}],
            },
            "tools",
        ),
        ({"messages": [{"role": "user", "content": "x", "weight": 2**64}]}, "messages"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y"}}]}
                ]
            },
            "messages",
        ),
    ],
)
def test_errors_name_the_field(encoder: ChatEncoder, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ChatError) as caught:
        encoder.encode(Conversation(**fields))
    assert caught.value.param == param
