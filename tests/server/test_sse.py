"""Case A20: clients that hang up, streaming or not, early or late. The engine hears of each, and of no other request."""

import http.client
import json
import random
import time
from collections.abc import Callable

from tests.server.conftest import PATIENCE_S, Server

CHAT = "/v1/chat/completions"


def hang_up(server: Server, kind: str, *, n: int = 1) -> None:
    """Start an endless answer and close the socket: before the first token, after three chunks, or while it is not streamed."""
    name = "hang" if kind == "queued" else "slow"
    server.script("slow", [[5]] * 100_000, finish="length", step_s=0.005)
    server.script("hang", [[5]], finish="hang")
    body = {"messages": [{"role": "user", "content": "hi"}], "ignore_eos": True, "n": n}
    body |= {"stream": kind != "whole", "cache_salt": name}
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    connection.request("POST", CHAT, json.dumps(body))
    if kind == "chunks":
        response = connection.getresponse()
        for _ in range(6):
            response.readline()
    elif kind != "first":
        assert comes_true(lambda: server.was_asked(name))
    connection.close()


def comes_true(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


def test_a20_disconnects_abort_and_nothing_else_does(server: Server) -> None:
    def aborts() -> float:
        return server.metric("num_preemptions_total")  # the stub counts them there

    def counted() -> float:
        return server.metric("request_success_total", finished_reason="abort")

    time.sleep(0.1)
    before, counted_before = aborts(), counted()
    kinds = ["first", "chunks", "whole", "queued"] * 12
    random.Random(1).shuffle(kinds)
    for kind in kinds:
        hang_up(server, kind)
    hang_up(server, "chunks", n=3)
    assert comes_true(lambda: server.metric("num_requests_running") == 0)
    assert comes_true(lambda: server.metric("kv_cache_usage_perc") == 0)
    assert comes_true(lambda: aborts() - before == counted() - counted_before)
    # a request whose client left before its body was read is never submitted
    assert len(kinds) - kinds.count("first") + 3 <= aborts() - before <= len(kinds) + 3

    before = aborts()
    for i in range(50):
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "stream": bool(i % 2)}
        assert server.post(CHAT, body)[0] == 200
    time.sleep(0.1)
    assert aborts() == before


def test_frames_and_headers(server: Server) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    connection.request(
        "POST", "/v1/completions", json.dumps({"prompt": "hi", "max_tokens": 3, "stream": True})
    )
    response = connection.getresponse()
    assert response.status == 200
    assert response.getheader("content-type") == "text/event-stream; charset=utf-8"
    assert response.getheader("cache-control") == "no-cache"
    frames = response.read().decode().split("\n\n")
    connection.close()
    assert frames[-1] == "" and frames[-2] == "data: [DONE]"
    assert all(json.loads(frame.removeprefix("data: ")) for frame in frames[:-2])


def test_connections_are_kept(server: Server) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    for stream in (True, False, True):
        connection.request(
            "POST", "/v1/completions", json.dumps({"prompt": "hi", "max_tokens": 2, "stream": stream})
        )
        assert connection.getresponse().read()
    connection.close()
