"""/v1/messages over a real socket, with the real anthropic client: whole, streamed, with tools, thinking and forms."""

import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from tests.server.conftest import MODEL, Server
from tests.server.test_chat_completions import CALL

EOS = 1
HI: list[Any] = [{"role": "user", "content": "hi"}]
TOOLS: list[Any] = [
    {"name": "calc", "input_schema": {"type": "object", "properties": {"a": {"type": "string"}}}}
]
CODING_TOOLS: list[Any] = [
    {**TOOLS[0], "description": "adds", "cache_control": {"type": "ephemeral"}, "type": "custom"}
]
ANSWERS: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    # name: output, script options, request options, stop reason
    "reasoning": ("I think.</think>The answer is 4.", {}, {}, "end_turn"),
    "off": ("Just text.", {}, {"thinking": {"type": "disabled"}}, "end_turn"),
    "length": ("I think and think", {"finish": "length"}, {}, "max_tokens"),
    "calls": ("hm</think>Let me see." + CALL, {}, {"tools": CODING_TOOLS}, "tool_use"),
    "calls_none": (
        "hm</think>Let me see." + CALL,
        {},
        {"tools": TOOLS, "tool_choice": {"type": "none"}},
        "end_turn",
    ),
    "one_call": (
        "hm</think>" + CALL,
        {},
        {"tools": TOOLS, "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        "tool_use",
    ),
    "stop": (
        "hm</think>one two STOP three",
        {},
        {"stop_sequences": ["nothing", "STOP"]},
        "stop_sequence",
    ),
    "unicode": ("\u601d\u8003</think>\u7b54\u6848 \U0001f642 ok", {}, {}, "end_turn"),
    "nothing": ("", {}, {}, "end_turn"),
}


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.base, api_key="none", max_retries=0, timeout=20) as made:
        yield made


def scripted(server: Server, name: str, *, run: int = 1) -> dict[str, Any]:
    """The options of a request that gets answer ``name`` in steps of ``run`` tokens."""
    output, script, options, _ = ANSWERS[name]
    ids = server.tokenizer.encode(output)
    if script.get("finish", "stop") == "stop":
        script = {"stop_token": EOS, **script}
        ids = [*ids, EOS]
    runs = [ids[i : i + run] for i in range(0, len(ids), run)]
    extra = server.script(f"messages-{name}-{run}", runs, cached=3, replayed=2, **script)
    return {**options, "extra_body": extra}


def create(client: anthropic.Anthropic, **options: Any) -> Any:
    return client.messages.create(**{"model": MODEL, "max_tokens": 100, "messages": HI, **options})


def said(message: Any) -> list[Any]:
    """What the blocks say, without the ids that differ from answer to answer."""
    blocks = [block.to_dict() for block in message.content]
    return [{key: block[key] for key in block if key not in ("id", "signature")} for block in blocks]


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("run", [1, 6])
def test_streamed_is_whole(client: anthropic.Anthropic, server: Server, name: str, run: int) -> None:
    """Cases A15, A17, A18: the events add up to the whole message, however tokens come."""
    options = scripted(server, name, run=run)
    whole = create(client, **options)
    with client.messages.stream(model=MODEL, max_tokens=100, messages=HI, **options) as stream:
        final = stream.get_final_message()
    assert (said(final), final.usage) == (said(whole), whole.usage)
    assert (final.stop_reason, final.stop_sequence) == (whole.stop_reason, whole.stop_sequence)
    assert whole.stop_reason == ANSWERS[name][3]
    assert whole.stop_sequence == ("STOP" if name == "stop" else None)
    assert whole.model == MODEL


@pytest.mark.parametrize("name", ANSWERS)
def test_events(client: anthropic.Anthropic, server: Server, name: str) -> None:
    """In the order that clients rely on: each block starts, grows and stops before the next; the last two end the message."""
    events = list(create(client, stream=True, **scripted(server, name)))
    kinds = [event.type for event in events]
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    assert events[0].message.usage.cache_read_input_tokens == 3
    at, is_open = -1, False
    for event in events[1:-2]:
        if event.type == "content_block_start":
            assert not is_open
            at, is_open = at + 1, True
        assert is_open
        assert event.index == at
        if event.type == "content_block_stop":
            is_open = False
    assert not is_open


def test_blocks(client: anthropic.Anthropic, server: Server) -> None:
    message = create(client, **scripted(server, "calls"))
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert message.content[0].signature == message.id
    assert [block.input for block in message.content[2:]] == [{"a": "1+1"}, {"a": "2+2"}]
    one = create(client, **scripted(server, "one_call"))
    assert [block.type for block in one.content] == ["thinking", "tool_use"]
    none = create(client, **scripted(server, "calls_none"))
    assert [block.type for block in none.content] == ["thinking", "text"]
    with client.messages.stream(
        model=MODEL, max_tokens=100, messages=HI, **scripted(server, "calls")
    ) as stream:
        final = stream.get_final_message()
    assert final.content[0].signature == final.id


def test_wire(server: Server) -> None:
    """Every event has its name in a line of its own, and no [DONE] follows; a ping comes, as from Anthropic."""
    extra = scripted(server, "reasoning")["extra_body"]
    status, text = server.post("/v1/messages", {"messages": HI, "max_tokens": 9, "stream": True, **extra})
    assert status == 200
    frames = [frame.split("\n") for frame in text.strip().split("\n\n")]
    for name, data in frames:
        assert name == "event: " + json.loads(data.removeprefix("data: "))["type"]
    assert ["event: ping", 'data: {"type":"ping"}'] in frames


def test_usage(client: anthropic.Anthropic, server: Server) -> None:
    usage = create(client, **scripted(server, "reasoning")).usage
    counted = client.messages.count_tokens(model=MODEL, messages=HI).input_tokens
    assert (usage.cache_read_input_tokens, usage.cache_creation_input_tokens) == (3, 0)
    assert usage.input_tokens + usage.cache_read_input_tokens == counted
    assert 0 < usage.output_tokens_details.thinking_tokens < usage.output_tokens


def test_count_tokens(client: anthropic.Anthropic, server: Server) -> None:
    """Of the whole prompt, as the message's own usage has it."""
    prompt: dict[str, Any] = {
        "messages": HI,
        "system": [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
        "tools": CODING_TOOLS,
        "thinking": {"type": "adaptive"},
    }
    counted = client.messages.count_tokens(model=MODEL, **prompt).input_tokens
    assert counted == create(client, **{**prompt, "max_tokens": 1}).usage.input_tokens
    assert counted > client.messages.count_tokens(model=MODEL, messages=HI).input_tokens


def test_sampling(client: anthropic.Anthropic, server: Server) -> None:
    """Our defaults, whatever the recipe's policy is; vLLM's fields work."""
    extra = server.script("messages-sampling", "a</think>b")
    create(client, extra_body=extra)
    plain = _params(server, "messages-sampling")
    assert (plain["temperature"], plain["top_p"], plain["top_k"]) == (1.0, 1.0, 0)
    asked = {"min_p": 0.1, "seed": 3, "min_tokens": 2, "repetition_penalty": 1.1}
    sampled = {**extra, **asked, "temperature": 0.25, "top_k": 5, "top_p": 0.5}
    create(client, extra_body=sampled)
    assert {**asked, "temperature": 0.25, "top_k": 5, "top_p": 0.5, "max_tokens": 100}.items() <= _params(
        server, "messages-sampling"
    ).items()


def _params(server: Server, salt: str) -> dict[str, Any]:
    return json.loads((server.scripts / f"{salt}.params").read_bytes())


def test_thinking_and_effort(client: anthropic.Anthropic) -> None:
    def count(**options: Any) -> int:
        return client.messages.count_tokens(model=MODEL, messages=HI, **options).input_tokens

    off = count(thinking={"type": "disabled"})
    assert off == count(extra_body={"chat_template_kwargs": {"enable_thinking": False}})
    assert off < count()
    assert count() == count(thinking={"type": "enabled"})
    assert count() == count(
        extra_body={"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}
    )
    efforts = [count(extra_body={"output_config": {"effort": effort}}) for effort in (7, "low", "max")]
    assert efforts[0] < efforts[1] < efforts[2]


def test_thinking_budget(client: anthropic.Anthropic, server: Server) -> None:
    """Enforced by the engine, which lets nothing but the end of the thinking come when it is spent."""
    extra = server.script("messages-budget", "hm</think>4")
    create(client, thinking={"type": "enabled", "budget_tokens": 64}, extra_body=extra)
    constraint = _params(server, "messages-budget")["constraint"]
    assert constraint["limit"] == 64
    assert constraint["after"] is not None


def test_tools_round_trip(client: anthropic.Anthropic, server: Server) -> None:
    """What came out goes in again, and the results with it; what they say is in the prompt, in the order of the calls."""
    options = scripted(server, "calls")
    first = create(client, **options)
    uses = [block for block in first.content if block.type == "tool_use"]
    results = [
        {"type": "tool_result", "tool_use_id": use.id, "content": f"= {at}", "is_error": bool(at)}
        for at, use in enumerate(uses)
    ]
    talk = [*HI, {"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
    extra = scripted(server, "reasoning")["extra_body"]
    again = create(client, messages=talk, tools=TOOLS, extra_body=extra)
    assert again.content[-1].text == "The answer is 4."
    swapped = [*talk[:2], {"role": "user", "content": results[::-1]}]
    counts = {
        client.messages.count_tokens(model=MODEL, messages=one, tools=TOOLS).input_tokens
        for one in (talk, swapped)
    }
    assert len(counts) == 1


def test_tool_runner(client: anthropic.Anthropic, server: Server) -> None:
    """The SDK's loop with its defaults: it asks for a thread, is told in ``details`` that there are none, and goes on."""
    asked = []

    @anthropic.beta_tool
    def calc(a: str) -> str:
        """Calculate.

        Args:
            a: what to calculate
        """
        asked.append(a)
        server.script("runner", "hm</think>All done.")
        return "4"

    extra = server.script("runner", f"hm</think>{CALL}")
    runner = client.beta.messages.tool_runner(
        model=MODEL, max_tokens=70, messages=HI, tools=[calc], extra_body=extra
    )
    assert runner.until_done().content[-1].text == "All done."
    assert asked
    status, answer = server.post(
        "/v1/messages", {"messages": HI, "max_tokens": 9, "n": 2, "thread": {"type": "create"}}
    )
    assert status == 400
    assert answer["error"]["details"] == {
        "error_code": "thread_unsupported_request",
        "unsupported": ["thread"],
    }


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "calc"}])
def test_required_call(client: anthropic.Anthropic, server: Server, choice: Any) -> None:
    """A grammar reaches the engine, thinking or not; where nothing is thought the prompt begins the call."""
    extra = server.script("messages-required", "hm</think>" + CALL)
    made = create(client, tools=TOOLS, tool_choice=choice, extra_body=extra)
    assert {block.type for block in made.content} == {"thinking", "tool_use"}
    assert _params(server, "messages-required")["constraint"]["after"] is not None
    extra = server.script("messages-begun", CALL[CALL.index("calls>\n") + len("calls>\n") :])
    off = {"type": "disabled"}
    made = create(client, tools=TOOLS, tool_choice=choice, thinking=off, extra_body=extra)
    assert [block.name for block in made.content] == ["calc", "calc"]
    assert _params(server, "messages-begun")["constraint"]["after"] is None


def test_cut_call(client: anthropic.Anthropic, server: Server) -> None:
    """A call that the limit cut is no JSON: its input is empty, and the stream has sent what there was."""
    extra = server.script("messages-cut", "hm</think>" + CALL[: CALL.index("+1")], finish="length")
    message = create(client, tools=TOOLS, extra_body=extra)
    assert (message.stop_reason, message.content[-1].input) == ("max_tokens", {})
    pieces = [
        event.delta.partial_json
        for event in create(client, tools=TOOLS, stream=True, extra_body=extra)
        if event.type == "content_block_delta" and event.delta.type == "input_json_delta"
    ]
    assert "".join(pieces) == '{"a": "1'


def test_form(client: anthropic.Anthropic, server: Server) -> None:
    """The prompt tells of it, the engine enforces it behind the thinking."""
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    form = {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
    extra = server.script("messages-form", 'hm</think>{"x": 1}')
    message = create(client, extra_body={**extra, **form})
    assert json.loads(message.content[-1].text) == {"x": 1}
    assert _params(server, "messages-form")["constraint"]["after"] is not None
    plain = client.messages.count_tokens(model=MODEL, messages=HI).input_tokens
    assert client.messages.count_tokens(model=MODEL, messages=HI, extra_body=form).input_tokens > plain + 20


def test_prefill(client: anthropic.Anthropic, server: Server) -> None:
    """A last turn of the assistant is what the answer begins with: no new turn, no thinking."""
    begun = [*HI, {"role": "assistant", "content": "The answer"}]
    extra = server.script("messages-prefill", " is 4.")
    message = create(client, messages=begun, extra_body=extra)
    assert said(message) == [{"type": "text", "text": " is 4."}]
    off: Any = {"type": "disabled"}
    asked = client.messages.count_tokens(model=MODEL, messages=HI, thinking=off).input_tokens
    added = len(server.tokenizer.encode("The answer"))
    assert client.messages.count_tokens(model=MODEL, messages=begun).input_tokens == asked + added


def test_failures(client: anthropic.Anthropic, server: Server) -> None:
    """Whole: an HTTP error in Anthropic's shape. In mid-stream: an event of that shape, which the client raises."""
    extra = server.script("messages-failure", "hm</think>one", finish="error")
    with pytest.raises(anthropic.InternalServerError, match="the engine ended this request"):
        create(client, extra_body=extra)
    with pytest.raises(anthropic.APIStatusError, match="the engine ended this request"):
        list(create(client, stream=True, extra_body=extra))
    _, text = server.post("/v1/messages", {"messages": HI, "max_tokens": 9, "stream": True, **extra})
    name, data = text.strip().split("\n\n")[-1].split("\n")
    assert name == "event: error"
    assert json.loads(data.removeprefix("data: "))["error"]["type"] == "api_error"


def test_disconnect(server: Server) -> None:
    aborts = server.metric("request_success_total", finished_reason="abort")
    extra = server.script("messages-disconnect", "one " * 500, step_s=0.01)
    body = json.dumps({"messages": HI, "max_tokens": 400, "stream": True, **extra}).encode()
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        head = f"POST /v1/messages HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        while b"thinking_delta" not in connection.recv(4096):
            pass
    end = time.monotonic() + 10
    while server.metric("request_success_total", finished_reason="abort") == aborts:
        assert time.monotonic() < end
        time.sleep(0.005)


def blocks(*content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(content)}]}


REFUSED: list[tuple[dict[str, Any], str]] = [
    # what differs from a good body, words
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "'web_search_20250305'"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "'bash_20250124'"),
    ({"tools": [{"name": "f"}]}, "input_schema"),
    ({"tools": [{**TOOLS[0], "defer_loading": True}]}, "defer_loading"),
    ({"tools": [], "tool_choice": {"type": "any"}}, "no tools are offered"),
    ({"tool_choice": {"type": "any"}}, "tool"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "needs a name"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "other"}}, "other"),
    ({"max_tokens": 0}, "max_tokens is 0"),
    ({"max_tokens": None}, "max_tokens: this field is required"),
    ({"max_tokens": 9999}, "maximum context length"),
    ({"messages": []}, "empty"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "robot"),
    ({"messages": None}, "messages: this field is required"),
    (blocks({"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}), "'image'"),
    (blocks({"type": "document", "source": {"type": "text", "data": "x"}}), "'document'"),
    (blocks({"type": "redacted_thinking", "data": "x"}), "'redacted_thinking'"),
    (blocks({"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image"}]}), "'image'"),
    (blocks({"type": "tool_result", "tool_use_id": "t", "content": "x"}), "tool_use_id"),
    (blocks("text"), "'str'"),
    ({"thinking": {"type": "between_tools"}}, "between_tools"),
    ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens is -1"),
    ({"thinking": {"type": "disabled", "budget_tokens": 5}}, "leave them out"),
    ({"thinking_token_budget": 5}, "use thinking.budget_tokens"),
    ({"thinking": {"type": "adaptive", "display": "omitted"}}, "omitted"),
    ({"output_config": {"effort": "frantic"}}, "frantic"),
    ({"output_config": {"effort": 0}}, "1..100"),
    ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "clear_tool_uses_20250919"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"stop": "x"}, "use stop_sequences"),
    ({"mcp_servers": [{"url": "x"}]}, "runs no tools"),
    ({"frobnicate": 1}, "no such option"),
    ({"temperature": -1}, "temperature is -1"),
    (
        {"messages": [*HI, {"role": "assistant", "content": "x"}], "thinking": {"type": "enabled"}},
        "thinking to be disabled",
    ),
]


@pytest.mark.parametrize(("wrong", "words"), REFUSED)
def test_refused(server: Server, wrong: dict[str, Any], words: str) -> None:
    """In Anthropic's shape."""
    status, answer = server.post("/v1/messages", {"messages": HI, "max_tokens": 9, **wrong})
    assert status == 400, answer
    assert (answer["type"], answer["error"]["type"]) == ("error", "invalid_request_error")
    assert words in answer["error"]["message"], answer


def test_wrong_model(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="not served here"):
        create(client, model="other")
    with pytest.raises(anthropic.NotFoundError, match="not served here"):
        client.messages.count_tokens(model="other", messages=HI)
