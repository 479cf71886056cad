"""Errors on all paths: the overflow text, Anthropic's shape under /v1/messages, a full queue, a dead engine."""

import http.client
import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.server.conftest import Server
from tests.server.test_errors import CHAT, HI, LIMIT, TEXT
from tests.server.test_sse import comes_true

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
LONG = "long " * 2000
TOO_LONG: list[tuple[str, dict[str, Any]]] = [
    (TEXT, {"prompt": LONG}),
    (TEXT, {"prompt": "hi", "max_tokens": LIMIT}),
    (CHAT, {"messages": [{"role": "user", "content": LONG}]}),
    (CHAT, {"messages": HI, "max_completion_tokens": LIMIT}),
    (RESPONSES, {"input": LONG}),
    (RESPONSES, {"input": "hi", "max_output_tokens": LIMIT}),
    (MESSAGES, {"messages": [{"role": "user", "content": LONG}], "max_tokens": 1}),
    (MESSAGES, {"messages": HI, "max_tokens": LIMIT}),
]


@pytest.mark.parametrize(("path", "body"), TOO_LONG)
@pytest.mark.parametrize("stream", [False, True])
def test_f14_overflow_is_told_in_the_words_that_harnesses_match(
    server: Server, path: str, body: dict[str, Any], stream: bool
) -> None:
    status, answer = server.post(path, {**body, "stream": stream})
    assert status == 400
    assert answer["error"]["message"].startswith(f"This model's maximum context length is {LIMIT} tokens.")


def of_anthropic(answer: Any) -> str:
    """The kind of an error in Anthropic's shape."""
    assert set(answer) == {"type", "error"} and answer["type"] == "error"
    assert set(answer["error"]) == {"type", "message"} and answer["error"]["message"]
    return answer["error"]["type"]


def test_errors_of_messages_are_anthropics(server: Server) -> None:
    for path in (MESSAGES, f"{MESSAGES}/count_tokens"):
        for body in (b"", b"{", b"[]", b"\xff", {"messages": 5, "max_tokens": 1}, {"banana": 1}):
            status, answer = server.post(path, body)
            assert (status, of_anthropic(answer)) == (400, "invalid_request_error")
        status, answer = server.get(path)
        assert (status, of_anthropic(answer)) == (405, "invalid_request_error")
        needed = {"max_tokens": 1} if path == MESSAGES else {}
        status, answer = server.post(path, {"model": "gpt-0", "messages": HI, **needed})
        assert (status, of_anthropic(answer)) == (404, "not_found_error")
    status, answer = server.post(f"{MESSAGES}/nothing", {})
    assert (status, of_anthropic(answer)) == (404, "not_found_error")
    status, answer = server.post(MESSAGES, {"messages": [{"role": "user", "content": "a" * (10 << 20)}]})
    assert (status, of_anthropic(answer)) == (413, "request_too_large")


def test_ids_of_responses_that_nobody_has(server: Server) -> None:
    for id in ("resp_nothing", "..", "%2e%2e%2fetc", "x" * 5000, "%00"):
        status, answer = server.get(f"{RESPONSES}/{id}")
        assert (status, answer["error"]["code"]) == (404, 404)


def test_a_full_queue_and_a_dead_engine_in_every_shape(own_server: Callable[..., Server]) -> None:
    server = own_server(serving={"max_num_queued_reqs": 1})
    hangs = server.script("hangs", [[5]], finish="hang")
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    connection.request("POST", TEXT, json.dumps({"prompt": "x", **hangs}))
    bodies = [
        (TEXT, {"prompt": "x"}),
        (CHAT, {"messages": HI}),
        (RESPONSES, {"input": "x"}),
        (MESSAGES, {"messages": HI, "max_tokens": 1}),
    ]
    assert comes_true(lambda: server.metric("num_requests_running") == 1)
    for state in ("full", "dead"):
        for path, body in bodies:
            status, answer = server.post(path, body)
            assert status == 503, answer
            if path == MESSAGES:
                assert of_anthropic(answer) == "overloaded_error"
            else:
                assert answer["error"]["type"] == "ServiceUnavailableError"
            assert ("full" in answer["error"]["message"]) == (state == "full")
        server.kill_engine()
        assert comes_true(lambda: server.get("/health")[0] == 503)
    assert connection.getresponse().status == 503
