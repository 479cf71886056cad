"""Case A2: a full queue turns new requests away with 503, counts them, and loses none that it has."""

import http.client
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.server.conftest import MODEL, Server
from tests.server.test_gate import ask
from tests.server.test_sse import comes_true

TEXT = "/v1/completions"


def opened(server: Server, pool: ThreadPoolExecutor, **fields: Any) -> Any:
    return pool.submit(server.post, TEXT, {"prompt": "x", **fields})


@pytest.fixture
def pool() -> Any:
    with ThreadPoolExecutor(8) as made:
        yield made


def test_unfinished_requests(own_server: Callable[..., Server], pool: ThreadPoolExecutor) -> None:
    server = own_server(serving={"max_num_queued_reqs": 4})
    salt = server.script("held", [[5]] * 200, finish="length", holds=[0])
    running = [opened(server, pool, n=3, **salt)]
    assert comes_true(lambda: server.metric("num_requests_running") == 3)
    for stream in (False, True):  # two more would be five
        status, headers, body = ask(server, "POST", TEXT, {"prompt": "x", "n": 2, "stream": stream})
        assert (status, headers["retry-after"]) == (503, "1")
        assert "3 requests wait or run, of 4 allowed" in json.loads(body)["error"]["message"]
    assert server.metric("admission_rejections_total", model_name=MODEL, reason="max_num_queued_reqs") == 2
    running.append(opened(server, pool, **salt))  # the fourth
    assert comes_true(lambda: server.metric("num_requests_running") == 4)
    assert server.post(TEXT, {"prompt": "x"})[0] == 503
    status, answer = server.post(TEXT, {"prompt": "x", "n": 5})  # would never fit
    assert status == 400 and answer["error"]["param"] == "n"
    server.release("held", 0)
    for one in running:  # nothing of what was taken is lost
        status, answer = one.result()
        assert status == 200
        assert all(choice["finish_reason"] == "length" for choice in answer["choices"])
        assert answer["usage"]["completion_tokens"] == 200 * len(answer["choices"])
    assert server.post(TEXT, {"prompt": "x", "max_tokens": 2, "n": 4})[0] == 200


def test_exactly_as_many_as_allowed(own_server: Callable[..., Server]) -> None:
    """Of a burst just so many are taken, whoever comes first."""
    server = own_server(serving={"max_num_queued_reqs": 8})
    salt = server.script("held", [[5]] * 100, finish="length", holds=[0])
    with ThreadPoolExecutor(24) as pool:
        burst = [opened(server, pool, **salt) for _ in range(24)]
        assert comes_true(lambda: sum(one.done() for one in burst) == 16)
        server.release("held", 0)
        statuses = [one.result()[0] for one in burst]
    assert sorted(statuses) == [200] * 8 + [503] * 16
    assert server.metric("admission_rejections_total") == 16


def test_tokens_of_prompts_without_a_first_token(
    own_server: Callable[..., Server], pool: ThreadPoolExecutor
) -> None:
    server = own_server(serving={"max_num_queued_tokens": 100})
    late = server.script("late", [[5]] * 100, finish="length", holds=[0, 10])
    big = [opened(server, pool, prompt=[5] * 99, **late)]
    assert comes_true(lambda: server.metric("num_requests_running") == 1)
    # 99 stand: one more is let in, whatever its size
    big.append(opened(server, pool, prompt=[5] * 300, **late))
    assert comes_true(lambda: server.metric("num_requests_running") == 2)
    status, answer = server.post(TEXT, {"prompt": "x"})
    assert status == 503 and "399 tokens of prompts wait, of 100 allowed" in answer["error"]["message"]
    assert server.metric("admission_rejections_total", reason="max_num_queued_tokens") == 1
    server.release("late", 0)  # once both answer, there is room although they run
    assert comes_true(lambda: server.post(TEXT, {"prompt": "x", "max_tokens": 1})[0] == 200)
    assert server.metric("num_requests_running") == 2
    server.release("late", 10)
    assert [one.result()[0] for one in big] == [200, 200]


@pytest.mark.parametrize("finish", ["reject", "error", "hang"])
def test_who_ends_without_a_token_is_not_counted_for_ever(
    own_server: Callable[..., Server], finish: str
) -> None:
    server = own_server(serving={"max_num_queued_tokens": 10})
    salt = server.script("ends", [[]], finish=finish)
    if finish == "hang":  # until its client leaves
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
        connection.request("POST", TEXT, json.dumps({"prompt": [5] * 50, **salt}))
        assert comes_true(lambda: server.post(TEXT, {"prompt": "x"})[0] == 503)
        connection.close()
    else:
        assert server.post(TEXT, {"prompt": [5] * 50, **salt})[0] in (400, 500)
    assert comes_true(lambda: server.post(TEXT, {"prompt": "x", "max_tokens": 1})[0] == 200)
