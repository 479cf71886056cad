"""``response_format`` and ``structured_outputs``: the right constraint reaches the engine, and the prompt says what it should."""

import http.client
import json
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from flashstep.chat import calls, grammar
from flashstep.chat.conversation import Conversation
from flashstep.request import Constraint, SamplingParams
from tests.server.conftest import MODEL, Server
from tests.server.test_errors import CHAT, TEXT, refused
from tests.server.test_gate import ask
from tests.server.test_sse import comes_true

THINK_END, DSML = 2035, 2036
ASK = [{"role": "user", "content": "Answer in JSON."}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
BY_SCHEMA = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
OUTPUTS = [
    ({"json": SCHEMA}, grammar.json_schema(SCHEMA)),
    ({"json": json.dumps(SCHEMA)}, grammar.json_schema(SCHEMA)),
    ({"json_object": True, "regex": None}, grammar.json_object()),
    ({"regex": "a+"}, grammar.regex("a+")),
    ({"choice": ["yes", "no"]}, grammar.choice(["yes", "no"])),
    ({"grammar": 'root ::= "a"'}, grammar.grammar('root ::= "a"')),
]


def reached(server: Server, name: str) -> Constraint | None:
    """The constraint of the request that the script ``name`` answered."""
    data = (server.scripts / f"{name}.params").read_bytes()
    return msgspec.json.decode(data, type=SamplingParams).constraint


def chat(server: Server, name: str, **options: Any) -> Any:
    """Status, body; the stub answers with a JSON object."""
    text = '{"a": 1}' if options.get("thinking") else 'hm</think>{"a": 1}'
    body = {"model": MODEL, "messages": ASK, **server.script(name, text), **options}
    status, answer = server.post(CHAT, body)
    assert status == 200, answer
    assert answer["choices"][0]["message"]["content"] == '{"a": 1}'
    return answer


@pytest.mark.parametrize(
    ("form", "wanted"),
    [
        ({"type": "json_object"}, grammar.json_object()),
        (BY_SCHEMA, grammar.json_schema(SCHEMA)),
        ({"type": "json_schema", "json_schema": {"schema": True, "strict": None}}, grammar.json_schema(True)),
    ],
)
@pytest.mark.parametrize("thinking", [True, False])
def test_response_format(server: Server, form: dict[str, Any], wanted: str, thinking: bool) -> None:
    switch = {} if thinking else {"thinking": {"type": "disabled"}}
    answer = chat(server, "format", response_format=form, **switch)
    after = THINK_END if thinking else None
    assert reached(server, "format") == Constraint(grammar=wanted, after=after)
    clean = {
        key: {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value
        for key, value in form.items()
    }
    told = server.encoder.encode(Conversation(messages=ASK, thinking=thinking, response_format=clean))
    assert "## Response Format:" in told.text
    assert answer["usage"]["prompt_tokens"] == len(told.ids)


@pytest.mark.parametrize("form", [{"type": "text"}, None])
def test_text_asks_for_nothing(server: Server, form: Any) -> None:
    answer = chat(server, "text", response_format=form)
    assert reached(server, "text") is None
    assert answer["usage"]["prompt_tokens"] == len(server.encoder.encode(Conversation(messages=ASK)).ids)


@pytest.mark.parametrize(("outputs", "wanted"), OUTPUTS)
def test_structured_outputs_of_chats(server: Server, outputs: dict[str, Any], wanted: str) -> None:
    """They say nothing in the prompt (F28)."""
    answer = chat(server, "outputs", structured_outputs=outputs)
    assert reached(server, "outputs") == Constraint(grammar=wanted, after=THINK_END)
    assert answer["usage"]["prompt_tokens"] == len(server.encoder.encode(Conversation(messages=ASK)).ids)


@pytest.mark.parametrize(("outputs", "wanted"), OUTPUTS)
def test_structured_outputs_of_completions(server: Server, outputs: dict[str, Any], wanted: str) -> None:
    script = server.script("raw", "a")
    status, answer = server.post(
        TEXT, {"prompt": ["x", "y"], "structured_outputs": outputs, "n": 2, **script}
    )
    assert status == 200 and len(answer["choices"]) == 4
    assert reached(server, "raw") == Constraint(grammar=wanted, after=None)


def test_the_openai_client(server: Server) -> None:
    script = server.script("client", 'hm</think>{"a": 1}')
    stream = server.client.chat.completions.create(
        model=MODEL, messages=ASK, response_format=BY_SCHEMA, stream=True, extra_body=script
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert json.loads(text) == {"a": 1}
    made = server.client.completions.create(
        model=MODEL,
        prompt="x",
        extra_body={"structured_outputs": {"regex": "[0-9]+"}, **server.script("client", "7")},
    )
    assert made.choices[0].text == "7"
    assert reached(server, "client") == Constraint(grammar=grammar.regex("[0-9]+"), after=None)


def test_what_is_wrong_is_said(server: Server) -> None:
    def said(path: str, **fields: Any) -> str:
        prompt = {"messages": ASK} if path == CHAT else {"prompt": "x"}
        return refused(server, path, {**prompt, **fields})["message"]

    unsupported = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    by_schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": unsupported}}
    assert 'response_format cannot be enforced: Unimplemented keys: ["uniqueItems"]' in said(
        CHAT, response_format=by_schema
    )
    for path in (CHAT, TEXT):
        assert "structured_outputs.json cannot be enforced" in said(
            path, structured_outputs={"json": unsupported}
        )
        assert "use structured_outputs" in said(path, guided_json=SCHEMA)
        assert "exactly one" in said(path, structured_outputs={"regex": "a", "choice": ["a"]})
    both = said(CHAT, structured_outputs={"regex": "a"}, response_format={"type": "json_object"})
    assert "send one" in both
    assert (
        "response_format"
        in refused(server, TEXT, {"prompt": "x", "response_format": {"type": "text"}})["message"]
    )


def test_tools_beside_a_form(server: Server) -> None:
    """Either the form or calls; with tool_choice none only the form, and a call that must be made has none."""
    tools = [
        {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    ]
    for form in ({"response_format": BY_SCHEMA}, {"structured_outputs": {"json": SCHEMA}}):
        error = refused(server, CHAT, {"messages": ASK, "tools": tools, "tool_choice": "required", **form})
        assert error["param"] in form and "tool_choice" in error["message"]
        chat(server, "auto", tools=tools, **form)
        offered = calls.Calls(
            tools=[calls.Tool(name="f", parameters={"type": "object", "properties": {}})], marker=DSML
        )
        assert reached(server, "auto") == Constraint(
            grammar=calls.offered(offered, form=grammar.json_schema(SCHEMA)),
            after=THINK_END,
            control_tokens=(DSML,),
        )
        chat(server, "none", tools=tools, tool_choice="none", **form)
        assert reached(server, "none") == Constraint(grammar=grammar.json_schema(SCHEMA), after=THINK_END)
    chat(server, "none", tools=tools, response_format={"type": "text"})
    assert reached(server, "none") is None


@pytest.mark.parametrize(
    "form",
    [{"choice": ["a", "b"]}, {"grammar": 'start: "a"'}, {"regex": "a+"}, {"json": {"type": "integer"}}],
)
def test_each_kind_of_form_goes_with_tools(server: Server, form: dict[str, Any]) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": [tool], "max_tokens": 2}
    status, answer = server.post("/v1/chat/completions", body | {"structured_outputs": form})
    assert status == 200, answer


# ---- grammars that take long ---------------------------------------------------------------------------------------------------


def endless(number: int) -> dict[str, Any]:
    """llguidance alone compiles it for minutes, if it ends in 9; each number is another grammar."""
    return {"prompt": "x", "structured_outputs": {"json": {"type": "integer", "multipleOf": number}}}


def test_nobody_waits_for_grammars_without_end(server: Server) -> None:
    """Neither who asks for what is known nor who asks for something new; what is too long is refused or told to come again."""

    def asked(pattern: str) -> int:
        body = {"prompt": "x", "max_tokens": 1, "structured_outputs": {"regex": pattern}}
        return server.post(TEXT, body)[0]

    assert asked("known") == 200
    ended: list[tuple[int, Any, bytes]] = []
    hostile = [
        threading.Thread(
            target=lambda n=n: ended.append(ask(server, "POST", TEXT, endless(99_999_989 + 10 * n)))
        )
        for n in range(12)
    ]
    for thread in hostile:
        thread.start()
    for n in range(8):
        assert asked("known" if n % 2 else f"new {n}") == 200
    refusals = [status for status, *_ in ended].count(400)
    assert refusals <= len(hostile) / 2, "all of ours came before most of theirs"
    for thread in hostile:
        thread.join()
    assert {status for status, *_ in ended} <= {400, 503}
    for status, headers, body in ended:
        sentence = "takes more than 1 second" if status == 400 else "try again later"
        assert sentence in json.loads(body)["error"]["message"]
        assert (headers["retry-after"] == "1") == (status == 503)


def test_who_hangs_up_leaves_the_line(own_server: Callable[..., Server], tmp_path: Path) -> None:
    """At once, and behind many who have gone a long one has its turn."""
    server, gone = own_server(log=tmp_path / "log"), []
    for n in range(12):
        connection = http.client.HTTPConnection("127.0.0.1", server.port)
        connection.request("POST", TEXT, json.dumps(endless(99_998_789 + 10 * n)))
        gone.append(connection)
    assert comes_true(lambda: server.get("/load")[1]["server_load"] >= len(gone) - 3)
    for connection in gone:
        connection.close()
    assert comes_true(lambda: server.get("/load")[1]["server_load"] == 0)
    statuses = re.findall(" path=/v1/completions status=([0-9]+) ", (tmp_path / "log").read_text())
    assert statuses.count("499") >= len(gone) - 3, "3 find no room in the line for long ones"
    assert server.post(TEXT, endless(99_997_689))[0] == 400


@pytest.mark.parametrize("grace_s", [0, 1])
def test_who_waits_in_line_is_told_that_the_server_stops(
    own_server: Callable[..., Server], tmp_path: Path, grace_s: int
) -> None:
    """In the API's words, and those who wait keep nothing from ending."""
    server = own_server(log=tmp_path / "log", serving={"shutdown_timeout": grace_s})
    ended: list[tuple[int, Any, bytes]] = []
    waiting = [
        threading.Thread(
            target=lambda n=n: ended.append(ask(server, "POST", TEXT, endless(99_996_689 + 10 * n)))
        )
        for n in range(6)
    ]
    for thread in waiting:
        thread.start()
    assert comes_true(lambda: server.get("/load")[1]["server_load"] == len(waiting))
    assert server.stop() == 0
    for thread in waiting:
        thread.join()
    assert [status for status, *_ in ended].count(503) >= len(waiting) - 2
    messages = [json.loads(body)["error"]["message"] for status, _, body in ended if status == 503]
    assert all("shut down" in message for message in messages)
    assert "Traceback" not in (tmp_path / "log").read_text()
