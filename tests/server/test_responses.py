"""/v1/responses over a real socket, with the real openai client: whole, streamed, in the background, with tools and forms."""

import json
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.server.conftest import MODEL, Server
from tests.server.test_chat_completions import CALL

EOS = 1
TOOLS: list[Any] = [
    {
        "type": "function",
        "name": "calc",
        "parameters": {"type": "object", "properties": {"a": {"type": "string"}}},
    }
]
ANSWERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # name: output, script options, request options
    "reasoning": ("I think.</think>The answer is 4.", {}, {}),
    "off": ("Just text.", {}, {"reasoning": {"effort": "none"}}),
    "length": ("I think and think", {"finish": "length"}, {}),
    "cut": ("hm</think>one two", {"finish": "length"}, {}),
    "calls": ("hm</think>Let me see." + CALL, {}, {"tools": TOOLS}),
    "calls_none": ("hm</think>Let me see." + CALL, {}, {"tools": TOOLS, "tool_choice": "none"}),
    "one_call": ("hm</think>" + CALL, {}, {"tools": TOOLS, "parallel_tool_calls": False}),
    "stop": ("hm</think>one two STOP three", {}, {"extra_body": {"stop": ["STOP"]}}),
    "unicode": ("\u601d\u8003</think>\u7b54\u6848 \U0001f642 ok", {}, {}),
    "nothing": ("", {}, {}),
}
CUT = ("length", "cut")


def scripted(server: Server, name: str, *, run: int = 1, salt: str = "") -> dict[str, Any]:
    """The options of a request that gets answer ``name`` in steps of ``run`` tokens."""
    output, script, options = ANSWERS[name]
    ids = server.tokenizer.encode(output)
    if script.get("finish", "stop") == "stop":
        script = {"stop_token": EOS, **script}
        ids = [*ids, EOS]
    runs = [ids[i : i + run] for i in range(0, len(ids), run)]
    extra = server.script(f"responses-{name}-{run}{salt}", runs, cached=3, replayed=2, **script)
    return {**options, "extra_body": {**extra, **options.get("extra_body", {})}}


def create(server: Server, **options: Any) -> Any:
    return server.client.responses.create(model=MODEL, **{"input": "hi", **options})


def said(response: Any) -> list[Any]:
    """What the items say, without the ids that differ from answer to answer."""
    made = []
    for item in response.output:
        if item.type == "function_call":
            made.append((item.type, item.status, item.name, item.arguments))
        else:
            made.append((item.type, item.status, [part.text for part in item.content]))
    return made


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("run", [1, 6])
def test_streamed_is_whole(server: Server, name: str, run: int) -> None:
    """Cases A15, A17, A18: the deltas add up to the items, the items are those of the whole answer, however tokens come."""
    options = scripted(server, name, run=run)
    whole = create(server, **options)
    events = list(create(server, stream=True, **options))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    final = events[-1].response
    assert events[-1].type == f"response.{final.status}"
    assert (said(final), final.status, final.usage) == (said(whole), whole.status, whole.usage)
    assert joined(events) == {at: _text(item) for at, item in enumerate(final.output)}
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.id for item in done] == [item.id for item in final.output]


def joined(events: list[Any]) -> dict[int, str]:
    """The deltas of each item; every one comes between the item's ``added`` and ``done``, and ``done`` repeats them."""
    text: dict[int, str] = {}
    ended: set[int] = set()
    for event in events:
        if event.type == "response.output_item.added":
            assert event.output_index == len(text)
            text[event.output_index] = ""
        elif event.type.endswith(".delta"):
            assert event.output_index not in ended
            text[event.output_index] += event.delta
        elif event.type == "response.function_call_arguments.done":
            assert event.arguments == text[event.output_index]
        elif event.type in ("response.output_text.done", "response.reasoning_text.done"):
            assert event.text == text[event.output_index]
        elif event.type == "response.output_item.done":
            ended.add(event.output_index)
    assert ended == set(text)
    return text


def _text(item: Any) -> str:
    return item.arguments if item.type == "function_call" else "".join(part.text for part in item.content)


def test_of_what_kind_the_items_are(server: Server) -> None:
    response = create(server, **scripted(server, "calls"))
    assert said(response) == [
        ("reasoning", "completed", ["hm"]),
        ("message", "completed", ["Let me see."]),
        ("function_call", "completed", "calc", '{"a": "1+1"}'),
        ("function_call", "completed", "calc", '{"a": "2+2"}'),
    ]
    assert response.status == "completed"
    assert response.model == MODEL
    one = create(server, **scripted(server, "one_call"))
    assert [item.type for item in one.output] == ["reasoning", "function_call"]
    assert create(server, **scripted(server, "stop")).output_text == "one two "


@pytest.mark.parametrize("name", CUT)
def test_cut_by_the_limit(server: Server, name: str) -> None:
    response = create(server, **scripted(server, name))
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.output[-1].status == "incomplete"


def test_usage(server: Server) -> None:
    usage = create(server, **scripted(server, "reasoning")).usage
    assert (usage.input_tokens_details.cached_tokens, usage.input_tokens_details.replayed_tokens) == (3, 2)
    assert 0 < usage.output_tokens_details.reasoning_tokens < usage.output_tokens
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens


def test_wire(server: Server) -> None:
    """Every event has its name in a line of its own, and no [DONE] follows: what the SDKs' parsers rely on."""
    options = scripted(server, "reasoning")
    status, text = server.post(
        "/v1/responses", {"input": "hi", "stream": True, **options["extra_body"]}, accept="text/event-stream"
    )
    assert status == 200
    for frame in text.strip().split("\n\n"):
        name, data = frame.split("\n")
        assert name == "event: " + json.loads(data.removeprefix("data: "))["type"]


def test_input_tokens(server: Server) -> None:
    """Of the same prompt as the response's own usage."""
    prompt: dict[str, Any] = {"input": "hi", "instructions": "be brief", "tools": TOOLS}
    counted = server.client.responses.input_tokens.count(model=MODEL, **prompt)
    assert counted.object == "response.input_tokens"
    assert counted.input_tokens == prompt_tokens(server, **prompt)


def test_sampling(server: Server) -> None:
    """Our defaults, whatever the recipe's policy is; vLLM's fields work."""
    extra = server.script("responses-sampling", "a</think>b")
    create(server, extra_body=extra)
    plain = _params(server, "responses-sampling")
    assert (plain["temperature"], plain["top_p"], plain["top_k"], plain["seed"]) == (1.0, 1.0, 0, None)
    asked = {"top_k": 5, "min_p": 0.1, "seed": 3, "min_tokens": 2, "repetition_penalty": 1.1}
    create(server, temperature=0.25, max_output_tokens=9, extra_body={**extra, **asked})
    assert asked.items() <= _params(server, "responses-sampling").items()
    assert _params(server, "responses-sampling")["max_tokens"] == 9
    assert _params(server, "responses-sampling")["temperature"] == 0.25


def _params(server: Server, salt: str) -> dict[str, Any]:
    return json.loads((server.scripts / f"{salt}.params").read_bytes())


def prompt_tokens(server: Server, **options: Any) -> int:
    return create(server, max_output_tokens=1, **options).usage.input_tokens


def test_tools_round_trip(server: Server) -> None:
    """What came out goes in again, and the results with it."""
    options = scripted(server, "calls")
    first = create(server, **options)
    calls = [item for item in first.output if item.type == "function_call"]
    results = [
        {"type": "function_call_output", "call_id": call.call_id, "output": f"= {at}"}
        for at, call in enumerate(calls)
    ]
    history = [{"role": "user", "content": "hi"}, *first.output, *results]
    again = create(server, input=history, tools=TOOLS, **_only_script(scripted(server, "reasoning")))
    assert again.output_text == "The answer is 4."
    chained = create(
        server,
        input=results,
        tools=TOOLS,
        previous_response_id=first.id,
        **_only_script(scripted(server, "reasoning")),
    )
    assert chained.usage.input_tokens == again.usage.input_tokens
    assert chained.previous_response_id == first.id


def _only_script(options: dict[str, Any]) -> dict[str, Any]:
    return {"extra_body": options["extra_body"]}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "calc"}])
def test_required_call(server: Server, choice: Any) -> None:
    """A grammar reaches the engine, thinking or not; where nothing is thought the prompt begins the call."""
    extra = server.script("responses-required", "hm</think>" + CALL)
    made = create(server, tools=TOOLS, tool_choice=choice, extra_body=extra)
    assert {item.type for item in made.output} == {"reasoning", "function_call"}
    assert _params(server, "responses-required")["constraint"]["after"] is not None
    begun = CALL[CALL.index("calls>\n") + len("calls>\n") :]
    extra = server.script("responses-begun", begun)
    made = create(server, tools=TOOLS, tool_choice=choice, reasoning={"effort": "none"}, extra_body=extra)
    assert [item.name for item in made.output] == ["calc", "calc"]
    assert _params(server, "responses-begun")["constraint"]["after"] is None


class Point(BaseModel):
    x: int
    y: int


def test_parse(server: Server) -> None:
    extra = server.script("responses-parse", 'hm</think>{"x": 1, "y": 2}')
    parsed = server.client.responses.parse(model=MODEL, input="hi", text_format=Point, extra_body=extra)
    assert parsed.output_parsed == Point(x=1, y=2)
    grammar = _params(server, "responses-parse")["constraint"]["grammar"]
    assert '\\"required\\"' in grammar or '"required"' in grammar
    with server.client.responses.stream(
        model=MODEL, input="hi", text_format=Point, extra_body=extra
    ) as stream:
        assert stream.get_final_response().output_parsed == Point(x=1, y=2)


def test_retrieve_and_delete(server: Server) -> None:
    made = create(server, **scripted(server, "calls"))
    assert server.client.responses.retrieve(made.id).to_dict() == made.to_dict()
    with pytest.raises(openai.BadRequestError, match="only a background response"):
        server.client.responses.cancel(made.id)
    server.client.responses.delete(made.id)
    unkept = create(server, store=False)
    assert unkept.store is False
    for id in (made.id, unkept.id, "resp_nothing"):
        with pytest.raises(openai.NotFoundError, match="there is no response"):
            server.client.responses.retrieve(id)
    with pytest.raises(openai.NotFoundError, match="there is no response"):
        create(server, previous_response_id=made.id)


def until(seconds: float = 10.0) -> Iterator[None]:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        yield
        time.sleep(0.005)
    pytest.fail("it took too long")


def test_background(server: Server) -> None:
    extra = server.script("responses-background", "hm</think>one two three", step_s=0.01)
    begun = create(server, background=True, extra_body=extra)
    assert (begun.status, begun.background, begun.output) == ("in_progress", True, [])
    for _ in until():
        found = server.client.responses.retrieve(begun.id)
        if found.status != "in_progress":
            break
    assert (found.status, found.output_text) == ("completed", "one two three")
    assert server.client.responses.cancel(begun.id).status == "completed"
    assert create(server, previous_response_id=begun.id, max_output_tokens=1).usage.input_tokens > 40


def test_background_cancelled(server: Server) -> None:
    """The engine's request ends with it, and what was said stays."""
    extra = server.script("responses-cancel", "hm</think>" + "one two three " * 200, step_s=0.01)
    begun = create(server, background=True, extra_body=extra)
    for _ in until():
        found = server.client.responses.retrieve(begun.id)
        if found.output_text:
            break
    cancelled = server.client.responses.cancel(begun.id)
    assert (cancelled.status, cancelled.output[-1].status) == ("cancelled", "incomplete")
    assert cancelled.output_text.startswith(found.output_text)
    assert server.client.responses.cancel(begun.id).to_dict() == cancelled.to_dict()
    for _ in until():
        if server.metric("num_requests_running") == 0:
            break
    with pytest.raises(openai.BadRequestError, match="no answer to continue from"):
        create(server, previous_response_id=begun.id)
    gone = create(server, background=True, extra_body=extra)
    server.client.responses.delete(gone.id)
    for _ in until():
        if server.metric("num_requests_running") == 0:
            break
    with pytest.raises(openai.NotFoundError):
        server.client.responses.retrieve(gone.id)


def test_failures(server: Server) -> None:
    """Whole: an HTTP error. In mid-stream: response.failed, with what had been said. In the background: status failed."""
    extra = server.script("responses-failure", "hm</think>one", finish="error", step_s=0.01)
    with pytest.raises(openai.InternalServerError, match="the engine ended this request"):
        create(server, extra_body=extra)
    events = list(create(server, stream=True, extra_body=extra))
    assert events[-1].type == "response.failed"
    assert events[-1].response.error.code == "server_error"
    assert joined(events) == {at: _text(item) for at, item in enumerate(events[-1].response.output)}
    assert events[-1].response.output[-1].status == "incomplete"
    kept = server.client.responses.retrieve(events[-1].response.id)
    assert kept == events[-1].response, "its id was told"
    with pytest.raises(openai.BadRequestError, match="no answer to continue from"):
        create(server, previous_response_id=kept.id)
    begun = create(server, background=True, extra_body=extra)
    for _ in until():
        found = server.client.responses.retrieve(begun.id)
        if found.status == "failed":
            break
    assert "the engine ended this request" in found.error.message


def test_disconnect(server: Server) -> None:
    """A stream whose client hangs up ends in the engine, too; a background response does not."""
    aborts = server.metric("request_success_total", finished_reason="abort")
    extra = server.script("responses-disconnect", "one " * 500, step_s=0.01)
    body = json.dumps({"input": "hi", "stream": True, **extra}).encode()
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        head = f"POST /v1/responses HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        while b"reasoning_text.delta" not in connection.recv(4096):
            pass
    for _ in until():
        if server.metric("request_success_total", finished_reason="abort") == aborts + 1:
            break


def test_no_more_run_at_once_than_are_kept(own_server: Callable[..., Server]) -> None:
    """Not even of those that come together and wait for something before they begin."""
    server = own_server(serving={"max_stored_responses": 1})
    salt = server.script("hang", [[5]], finish="hang")
    body = {"input": "hi", "background": True, **salt}

    def begin(number: int) -> int:
        return server.post("/v1/responses", body | {"structured_outputs": {"regex": f"a{number}"}})[0]

    with ThreadPoolExecutor(8) as threads:
        statuses = list(threads.map(begin, range(8)))
    assert sorted(statuses) == [200] + [503] * 7
    for _ in until():
        if server.metric("num_requests_running") == 1:
            break


def test_what_get_does_not_take(server: Server) -> None:
    made = create(server, **scripted(server, "off"))
    for query, why in (
        ("include=reasoning.encrypted_content", "include when you create it"),
        ("stream=true", "its stream is not kept"),
        ("starting_after=3", "its stream is not kept"),
        ("page=1", "no such option"),
    ):
        status, answer = server.get(f"/v1/responses/{made.id}?{query}")
        assert (status, answer["error"]["param"]) == (400, query.partition("=")[0])
        assert why in answer["error"]["message"]


def test_flags(own_server: Callable[..., Server]) -> None:
    """``--max-stored-responses`` 0 keeps nothing; ``--per-request-spec-decode-metrics`` tells of both APIs, too."""
    server = own_server(
        drafts=2, serving={"max_stored_responses": 0, "per_request_spec_decode_metrics": "summary"}
    )
    made = create(server, **scripted(server, "reasoning"))
    assert made.store is False
    assert made.metrics["speculative_decoding"]["num_spec_tokens"] == 2
    for options in ({"store": True}, {"background": True}):
        with pytest.raises(openai.BadRequestError, match="keeps no responses"):
            create(server, **options)
    extra = {**scripted(server, "reasoning")["extra_body"], "return_metrics": True}
    messages = [{"role": "user", "content": "hi"}]
    _, message = server.post("/v1/messages", {"messages": messages, "max_tokens": 90, **extra})
    assert message["metrics"]["speculative_decoding"]["num_spec_tokens"] == 2
    assert message["metrics"]["choices"][0]["end_to_end_s"] > 0
    _, text = server.post("/v1/messages", {"messages": messages, "max_tokens": 90, "stream": True, **extra})
    assert '"num_spec_tokens":2' in text.split("event: message_delta")[1]
    timed = create(server, extra_body=extra)
    assert timed.metrics["choices"][0]["cached_tokens"] == 3
    events = list(create(server, stream=True, **scripted(server, "reasoning")))
    assert events[-1].response.metrics == made.metrics


def test_a_response_says_that_it_is_stored_only_if_it_will_be(own_server: Callable[..., Server]) -> None:
    server = own_server(max_model_len=8192, serving={"max_stored_response_bytes": 2000})
    assert create(server, input="y" * 3000, max_output_tokens=2).store is False
    short = create(server, input="y", max_output_tokens=2)
    assert short.store is True and server.client.responses.retrieve(short.id).id == short.id
    with pytest.raises(openai.BadRequestError, match="store is true, and the conversation has"):
        create(server, input="y" * 3000, max_output_tokens=2, store=True)
