"""Everything a client can get wrong: an OpenAI-shaped 4xx that names the field, never a 500, and the server goes on.

Cases A21 (empty prompts), A22 (logit_bias), A23 (edges of the context).
"""

import http.client
import json
import socket
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flashstep.server.openai import ChatBody, CompletionBody
from tests.server.conftest import MODEL, Server

HI = [{"role": "user", "content": "hi"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
LIMIT = 512  # of the stub


def refused(server: Server, path: str, body: Any, *, status: int = 400) -> dict[str, Any]:
    got, answer = server.post(path, body)
    assert got == status, answer
    error = answer["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == status and error["message"] and error["type"]
    return error


FIELDS: list[tuple[str, Any]] = [
    ("max_tokens", "many"),
    ("max_tokens", -1),
    ("max_tokens", 0),
    ("max_tokens", 1.5),
    ("max_tokens", 10**30),
    ("temperature", -0.1),
    ("temperature", "hot"),
    ("top_p", 0),
    ("top_p", 1.1),
    ("top_k", -2),
    ("min_p", 2),
    ("presence_penalty", 3),
    ("frequency_penalty", -3),
    ("repetition_penalty", 0),
    ("min_tokens", -1),
    ("min_tokens", 10_000),
    ("n", 0),
    ("n", -1),
    ("n", 129),
    ("seed", 1 << 64),
    ("seed", "x"),
    ("stop", [""]),
    ("stop", 5),
    ("stop", ["a"] * 17),
    ("stop_token_ids", [2048]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", ["a"]),
    ("bad_words", [""]),
    ("bad_words", "word"),
    ("logit_bias", {"999999": 5}),
    ("logit_bias", {"2048": 5}),
    ("logit_bias", {"-1": 5}),
    ("logit_bias", {"AI": -100}),
    ("logit_bias", {"5": "x"}),
    ("logit_bias", {"5": 1e9}),
    ("prompt_logprobs", 21),
    ("prompt_logprobs", -1),
    ("stream_options", {"include_usage": True}),
    ("ignore_eos", "yes"),
    ("ignore_eos", 1),
    ("cache_salt", "x" * 129),
    ("priority", 1 << 63),
    ("top_k", 1 << 63),
    ("top_k", 10**30),
    ("structured_outputs", {}),
    ("structured_outputs", {"json": {}, "regex": "a"}),
    ("structured_outputs", {"json": {"not": {}}}),
    ("structured_outputs", {"json": 5}),
    ("structured_outputs", {"json_object": False}),
    ("structured_outputs", {"regex": "(a"}),
    ("structured_outputs", {"choice": []}),
    ("structured_outputs", {"choice": "a"}),
    ("structured_outputs", {"grammar": "start: b"}),
    ("structured_outputs", {"structural_tag": "{}"}),
    ("structured_outputs", {"json": {}, "banana": 1}),
    ("structured_outputs", "json"),
    ("guided_json", {}),
    ("guided_regex", "a"),
    ("best_of", 2),
    ("banana", 1),
    ("truncate_prompt_tokens", 5),
    ("model", 5),
]


@pytest.mark.parametrize(("field", "value"), FIELDS)
def test_fields_of_both(server: Server, field: str, value: Any) -> None:
    for path, prompt in ((CHAT, {"messages": HI}), (TEXT, {"prompt": "hi"})):
        error = refused(server, path, {**prompt, field: value})
        assert error["param"] == field, error
        assert field in error["message"], error


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("messages", "hi"),
        ("messages", []),
        ("messages", [5]),
        ("messages", [{"role": "robot", "content": "x"}]),
        ("messages", [{"role": "user", "content": None}]),
        ("messages", [{"role": "user", "content": 5}]),
        ("messages", [{"role": "user"}]),
        ("messages", [{"content": "x"}]),
        ("messages", [{"role": "user", "content": [{"type": "banana"}]}]),
        (
            "messages",
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]}],
        ),
        ("messages", [*HI, {"role": "tool", "content": "x", "tool_call_id": "c"}]),
        ("messages", [{"role": "user", "content": "long " * 2000}]),
        ("tools", []),
        ("tools", {}),
        ("tools", [{"type": "function"}]),
        ("tools", [{"type": "function", "function": {"name": "!"}}]),
        ("tool_choice", "banana"),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("response_format", {"type": "json_object"}),  # HI does not say JSON: DeepSeek's rule
        ("response_format", {"type": "json_schema"}),
        ("response_format", {"type": "json_object", "json_schema": {"name": "x", "schema": {}}}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x"}}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": 5}}),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": {}, "banana": 1}}),
        ("response_format", {"type": "structural_tag"}),
        ("response_format", {"type": "text", "banana": 1}),
        ("response_format", {}),
        ("response_format", "json"),
        ("reasoning_effort", "huge"),
        ("reasoning_effort", 0),
        ("reasoning_effort", 101),
        ("reasoning_effort", 1.5),
        ("reasoning_effort", -1e308),
        ("reasoning_effort", True),
        ("chat_template_kwargs", {"banana": 1}),
        ("chat_template_kwargs", {"thinking": True, "enable_thinking": False}),
        ("chat_template_kwargs", "x"),
        ("thinking", {"type": "maybe"}),
        ("top_logprobs", 2),
        ("logprobs", 2),
        ("tools", [{"type": "function", "function": {}}]),
        ("tools", [{"type": "function", "function": {"name": "f", "parameters": {"maximum": 2**64}}}]),
        ("max_completion_tokens", 0),
        ("max_completion_tokens", 10_000),
        ("functions", []),
        ("audio", {}),
    ],
)
def test_fields_of_chats(server: Server, field: str, value: Any) -> None:
    error = refused(server, CHAT, {"messages": HI, field: value})
    assert error["param"] == field, error


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        [""],
        [],
        [[]],
        ["a", ""],
        [-1],
        [2048],
        [1.5],
        [[1], "a", 2],
        {"a": 1},
        5,
        [[2048]],
        ["a", 3],
        True,
    ],
)
def test_a21_prompts(server: Server, prompt: Any) -> None:
    assert refused(server, TEXT, {"prompt": prompt})["param"] == "prompt"


@pytest.mark.parametrize(
    ("field", "value"), [("logprobs", 21), ("logprobs", True), ("suffix", "x"), ("echo", 1)]
)
def test_fields_of_completions(server: Server, field: str, value: Any) -> None:
    assert refused(server, TEXT, {"prompt": "hi", field: value})["param"] == field


def test_missing_fields(server: Server) -> None:
    assert refused(server, TEXT, {})["param"] == "prompt"
    assert refused(server, CHAT, {})["param"] == "messages"
    assert refused(server, "/tokenize", {})["param"] == "prompt"
    assert refused(server, "/detokenize", {"tokens": [99999]})["param"] == "tokens"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "logit_bias": {"5": NaN}}',
        b'{"prompt": "x", "temperature": 1e999}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt": ' + b'{"a":' * 50_000,
        b"\x00\x01\x02",
    ],
)
def test_malformed_bodies(server: Server, body: bytes) -> None:
    for path in (CHAT, TEXT, "/tokenize", "/detokenize"):
        refused(server, path, body)


@pytest.mark.parametrize("depth", [50, 120, 900, 5000])
def test_deep_tool_schema(server: Server, depth: int) -> None:
    schema = b'{"properties":{"a":' * depth + b"{}" + b"}}" * depth
    tools = b'[{"type":"function","function":{"name":"f","parameters":' + schema + b"}}]"
    body = b'{"messages":[{"role":"user","content":"hi"}],"max_tokens":1,"tools":' + tools + b"}"
    status, answer = server.post(CHAT, body)
    assert status in (200, 400), answer
    assert server.get("/health")[0] == 200


def test_ten_megabytes(server: Server) -> None:
    refused(server, TEXT, {"prompt": "a" * (10 << 20)}, status=413)
    refused(server, CHAT, {"messages": [{"role": "user", "content": "a" * (10 << 20)}]}, status=413)
    huge = refused(
        server, TEXT, {"prompt": "a " * (1 << 20)}
    )  # under the limit for bodies, over the context's
    assert huge["message"].startswith("This model's maximum context length is")


def test_unknown_model_path_and_method(server: Server) -> None:
    for path, prompt in ((CHAT, {"messages": HI}), (TEXT, {"prompt": "hi"}), ("/tokenize", {"prompt": "hi"})):
        assert refused(server, path, {"model": "gpt-0", **prompt}, status=404)["param"] == "model"
    assert server.get("/v1/models/gpt-0")[0] == 404
    assert server.get("/nothing")[1]["error"]["code"] == 404
    assert server.get(CHAT)[1]["error"]["code"] == 405


def test_a22_boundary_of_the_vocabulary(server: Server) -> None:
    last = server.tokenizer.num_ids - 1
    for bias in ({str(last): 5}, {"5": 100}, {"5": -100}):
        assert server.post(TEXT, {"prompt": "hi", "max_tokens": 1, "logit_bias": bias})[0] == 200


@pytest.mark.parametrize("chat", [False, True])
def test_a23_edges_of_the_context(server: Server, chat: bool) -> None:
    """Prompts of limit-2 .. limit+1 tokens."""

    def ask(length: int, **options: Any) -> tuple[int, Any]:
        if not chat:
            return server.post(TEXT, {"prompt": [5] * length, **options})
        _, empty = server.post("/tokenize", {"messages": [{"role": "user", "content": ""}]})
        content = " a" * (length - empty["count"])
        _, counted = server.post("/tokenize", {"messages": [{"role": "user", "content": content}]})
        assert counted["count"] == length
        return server.post(CHAT, {"messages": [{"role": "user", "content": content}], **options})

    for length, left in ((LIMIT - 2, 2), (LIMIT - 1, 1)):
        status, answer = ask(length)
        assert status == 200
        assert answer["usage"]["completion_tokens"] == left
        assert answer["choices"][0]["finish_reason"] == "length"
        assert ask(length, max_tokens=1)[0] == 200
        for max_tokens in (0, left + 1, 100):
            status, answer = ask(length, max_tokens=max_tokens)
            assert (status, answer["error"]["param"]) == (400, "max_tokens")
            if max_tokens:
                assert str(length + max_tokens) in answer["error"]["message"]
    for length in (LIMIT, LIMIT + 1):
        for options in ({}, {"max_tokens": 1}):
            status, answer = ask(length, **options)
            assert status == 400
            message = answer["error"]["message"]
            assert message.startswith(f"This model's maximum context length is {LIMIT} tokens.")
            assert str(length) in message


def test_empty_contents_that_a_template_fills(server: Server) -> None:
    for content in ("", []):
        status, answer = server.post(
            CHAT, {"messages": [{"role": "user", "content": content}], "max_tokens": 2}
        )
        assert status == 200 and answer["usage"]["completion_tokens"] == 2


def test_null_is_absent(server: Server) -> None:
    body = {
        "messages": HI,
        "max_tokens": 2,
        "temperature": None,
        "stop": None,
        "functions": None,
        "stream": None,
    }
    assert server.post(CHAT, body)[0] == 200


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
NAMES = sorted(
    {*ChatBody.__struct_fields__, *CompletionBody.__struct_fields__} - {"stream", "max_tokens", "cache_salt"}
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(fields=st.dictionaries(st.sampled_from(NAMES), JSON, min_size=1, max_size=3), chat=st.booleans())
def test_no_body_makes_a_500(server: Server, fields: dict[str, Any], chat: bool) -> None:
    body = {"max_tokens": 1} | ({"messages": HI} if chat else {"prompt": "hi"}) | fields
    status, answer = server.post(CHAT if chat else TEXT, body)
    assert status in (200, 400, 404), answer


def test_what_the_engine_refuses_or_fails(server: Server) -> None:
    rejected = server.script("rejected", "", finish="reject")
    error = refused(server, TEXT, {"prompt": "x", **rejected})
    assert error["message"] == "scripted rejection"
    failed = server.script("failed", "a", finish="error")
    refused(server, TEXT, {"prompt": "x", **failed}, status=500)
    for name in (rejected, failed):  # once a stream has begun, the error is an event
        body = json.dumps({"prompt": "x", "stream": True, "n": 2, **name})
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
        connection.request("POST", TEXT, body)
        data = connection.getresponse().read().decode()
        connection.close()
        assert data.endswith("data: [DONE]\n\n")
        assert '"error"' in data


def test_half_a_request(server: Server) -> None:
    """A client that promises more than it sends and leaves."""
    for _ in range(5):
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    assert server.get("/health")[0] == 200


def test_neighbours_finish_and_the_server_lives(server: Server) -> None:
    extra = server.script("neighbour", [[5]] * 60, finish="length", step_s=0.005)
    stream = server.client.completions.create(model=MODEL, prompt="x", stream=True, extra_body=extra)
    for prompt in ("", [""], [], [[]], ["a", ""]):
        refused(server, TEXT, {"prompt": prompt})
    assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length"
    assert server.get("/health")[0] == 200


def test_engine_death(own_server: Callable[..., Server]) -> None:
    server = own_server()
    extra = server.script("hangs", [[5]] * 5, finish="hang")
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    connection.request("POST", TEXT, json.dumps({"prompt": "x", "stream": True, **extra}))
    response = connection.getresponse()
    waiting = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    waiting.request("POST", TEXT, json.dumps({"prompt": "x", **extra}))
    assert server.get("/health") == (200, "")
    server.kill_engine()
    data = response.read().decode()
    assert '"code":503' in data and data.endswith("data: [DONE]\n\n")
    assert waiting.getresponse().status == 503
    assert server.get("/health")[0] == 503
    refused(server, TEXT, {"prompt": "x"}, status=503)
    assert server.get("/metrics")[0] == 200
    assert server.stop() == 0


def test_a34_another_tokenizer_is_refused(
    own_server: Callable[..., Server], capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RuntimeError):
        own_server(fingerprint="other")
    assert "token map is not the one the engine was built with" in capfd.readouterr().err


def test_a_priority_that_nobody_looks_at_is_refused(own_server):
    server = own_server(scheduling_policy="fcfs")
    for path, body in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}),
    ):
        status, answer = server.post(path, body | {"priority": 5})
        assert status == 400 and "priority is 5" in str(answer), path
        assert server.post(path, body | {"priority": 0})[0] == 200, path
