"""The openai package's conveniences, which read more out of an answer than its text: pydantic forms and tools, stream events.

Plain requests of the package are in the tests of each endpoint.
"""

import json
from typing import Any

import openai
import pydantic
import pytest

from tests.server.conftest import MODEL, Server
from tests.server.test_chat_completions import HI

BAR = "\uff5c"
THOUGHT = "let me see</think>"


class Point(pydantic.BaseModel):
    """Where something is."""

    x: int
    name: str


class Look(pydantic.BaseModel):
    """Look somewhere."""

    where: Point
    times: int


POINT = '{"x": 3, "name": "caf\u00e9"}'
CALL = (
    f"{THOUGHT}\n\n<{BAR}DSML{BAR} calls>\n"
    f'<{BAR}DSML{BAR} invoke name="Look">\n'
    f'<{BAR}DSML{BAR} parameter name="where" string="false">{POINT}</{BAR}DSML{BAR} parameter>\n'
    f'<{BAR}DSML{BAR} parameter name="times" string="false">2</{BAR}DSML{BAR} parameter>\n'
    f"</{BAR}DSML{BAR} invoke>\n</{BAR}DSML{BAR} calls>"
)


def options(server: Server, name: str, output: str, **script: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": HI, "extra_body": server.script(name, output, **script)}


def enforced(server: Server, name: str) -> bool:
    """Whether the engine was told to enforce a form."""
    params = json.loads((server.scripts / f"{name}.params").read_bytes())
    return params["constraint"] is not None


def test_parse_into_a_form(server: Server) -> None:
    asked = options(server, "sdk_form", THOUGHT + POINT)
    message = server.client.chat.completions.parse(**asked, response_format=Point).choices[0].message
    assert message.parsed == Point(x=3, name="caf\u00e9")
    assert enforced(server, "sdk_form")


def test_a_form_that_was_cut_short_is_told(server: Server) -> None:
    asked = options(server, "sdk_cut", THOUGHT + POINT[:9], finish="length")
    with pytest.raises(openai.LengthFinishReasonError):
        server.client.chat.completions.parse(**asked, response_format=Point)


def test_parse_a_tools_arguments(server: Server) -> None:
    asked = options(server, "sdk_tool", CALL)
    tool = openai.pydantic_function_tool(Look)
    choice = server.client.chat.completions.parse(**asked, tools=[tool]).choices[0]
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls or ()
    assert call.function.parsed_arguments == Look(where=Point(x=3, name="caf\u00e9"), times=2)
    assert enforced(server, "sdk_tool"), "the package's tools are strict"


def test_stream_into_a_form(server: Server) -> None:
    asked = options(server, "sdk_stream", THOUGHT + POINT)
    with server.client.chat.completions.stream(
        **asked, response_format=Point, stream_options={"include_usage": True}
    ) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    assert "".join(event.delta for event in events if event.type == "content.delta") == POINT
    (done,) = [event for event in events if event.type == "content.done"]
    assert done.parsed == final.choices[0].message.parsed == Point(x=3, name="caf\u00e9")
    assert final.usage is not None and final.usage.completion_tokens > 0


def test_stream_a_tools_arguments(server: Server) -> None:
    asked = options(server, "sdk_calls", CALL)
    tool = openai.pydantic_function_tool(Look)
    with server.client.chat.completions.stream(**asked, tools=[tool]) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    pieces = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
    assert len(pieces) > 1
    (done,) = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert "".join(piece.arguments_delta for piece in pieces) == done.arguments
    assert done.parsed_arguments == Look(where=Point(x=3, name="caf\u00e9"), times=2)
    assert final.choices[0].finish_reason == "tool_calls"


def test_responses_parse_and_stream_into_a_form(server: Server) -> None:
    extra = server.script("sdk_response", THOUGHT + POINT)
    parsed = server.client.responses.parse(model=MODEL, input="hi", text_format=Point, extra_body=extra)
    assert parsed.output_parsed == Point(x=3, name="caf\u00e9")
    with server.client.responses.stream(
        model=MODEL, input="hi", text_format=Point, extra_body=extra
    ) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        assert stream.get_final_response().output_parsed == parsed.output_parsed
    assert "".join(deltas) == POINT


def test_models_are_listed(server: Server) -> None:
    names = [model.id for model in server.client.models.list()]
    assert names == [MODEL, "alias"]
    assert server.client.models.retrieve("alias").id == "alias"
