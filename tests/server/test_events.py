"""The events of Responses and Messages add up to one and the same answer, however tokens are grouped (cases A15, A17, A18)."""

import itertools
import json
from collections.abc import Iterator
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from flashstep.chat.conversation import MessagesConversation, ResponsesConversation, Talk
from flashstep.chat.encode import ChatEncoder
from flashstep.chat.parse import Delta
from flashstep.chat.tokenizer import TextTokenizer
from flashstep.server.answers import PromptDetails, Usage
from flashstep.server.messages.events import MessageEvents
from flashstep.server.responses.events import ResponseEvents
from tests.server.conftest import TOKENIZER
from tests.server.test_chat_completions import CALL
from tests.server.test_messages import TOOLS as CLIENT_TOOLS
from tests.server.test_responses import TOOLS as FLAT_TOOLS

ENCODER = ChatEncoder(TextTokenizer.from_file(TOKENIZER))
OUTPUTS = (
    "\u601d\u8003 \U0001f642</think>\u7b54\u6848 \U0001f642 ok",
    "hm</think>Let me see." + CALL,
    "hm" + CALL,
    "never ends \U0001f642",
    "</think>only this",
    "hm</think>" + CALL[: CALL.index("+1")],
    "",
)
USAGE = Usage(5, 7, 12, PromptDetails(), 0, 5)


def pieces(talk: Talk, ids: list[int], cuts: list[int]) -> Iterator[tuple[Delta, str | None]]:
    """What the parser makes of ``ids``, cut at ``cuts``; the last with the finish reason."""
    parser = ENCODER.encode(talk).parser()
    borders = [0, *sorted({cut % (len(ids) + 1) for cut in cuts}), len(ids)]
    for start, end in itertools.pairwise(borders):
        yield parser.push(ids[start:end]), None
    yield parser.finish("stop")


def response(output: str, cuts: list[int]) -> tuple[Any, list[str]]:
    """The final response and the joined deltas of each item, both without ids of calls."""
    talk = ResponsesConversation(input="hi", tools=FLAT_TOOLS)
    made = ResponseEvents({"id": "resp_1"}, seals=True)
    joined: list[str] = []
    for delta, reason in pieces(talk, ENCODER.tokenizer.encode(output), cuts):
        events = list(made.add(delta))
        if reason is not None:
            events += made.end(cut=False, usage=USAGE)
        for event in events:
            if event["type"] == "response.output_item.added":
                joined.append("")
            elif event["type"].endswith(".delta"):
                joined[event["output_index"]] += event["delta"]
    items = [{key: item[key] for key in item if key != "call_id"} for item in made.response["output"]]
    return items, joined


def message(output: str, cuts: list[int]) -> tuple[Any, list[str]]:
    """Likewise of a message."""
    talk = MessagesConversation(messages=[{"role": "user", "content": "hi"}], tools=CLIENT_TOOLS)
    made = MessageEvents("msg_1", model="m")
    joined: list[str] = []
    for delta, reason in pieces(talk, ENCODER.tokenizer.encode(output), cuts):
        events = list(made.add(delta))
        if reason is not None:
            events += made.end(reason=reason, stop_sequence=None, usage=USAGE)
        for event in events:
            if event["type"] == "content_block_start":
                joined.append("")
            elif event["type"] == "content_block_delta" and "signature" not in event["delta"]:
                (text,) = (value for key, value in event["delta"].items() if key != "type")
                joined[event["index"]] += text
    blocks = [{key: block[key] for key in block if key != "id"} for block in made.message["content"]]
    return (blocks, made.message["stop_reason"]), joined


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(OUTPUTS), st.lists(st.integers(0, 500), max_size=40))
def test_any_grouping(output: str, cuts: list[int]) -> None:
    assert response(output, cuts) == response(output, [])
    assert message(output, cuts) == message(output, [])


def test_items_are_the_joined_deltas() -> None:
    for output in OUTPUTS:
        items, joined = response(output, list(range(500)))
        assert [_said(item) for item in items] == joined
        (blocks, _), joined = message(output, list(range(500)))
        for block, text in zip(blocks, joined, strict=True):
            if block["type"] != "tool_use":
                assert block[block["type"]] == text
            elif text.endswith("}"):
                assert block["input"] == json.loads(text)
            else:
                assert block["input"] == {}


def _said(item: dict[str, Any]) -> str:
    return item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
