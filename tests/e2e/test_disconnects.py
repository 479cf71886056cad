"""Case A20 and F36 with the real engine: clients that hang up at any moment cost two steps at most and leave nothing behind."""

import http.client
import json
import os
import random
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.serving import Served, await_that, small_model

TEXT = "/v1/completions"
STREAMS = 32
ENDLESS = {"prompt": "and so on", "ignore_eos": True, "temperature": 1, "max_tokens": 100_000}
COUNTED = {"include_usage": True, "continuous_usage_stats": True}
QUIET_S = 0.3  # after so long what a stopped engine had sent has arrived


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    small = small_model(tmp_path_factory.mktemp("model") / "small")
    made = Served(small, "--kv-cache-memory-bytes", str(32 << 20), "--max-num-seqs", str(STREAMS))
    yield made
    made.remove()


def last_count(response: http.client.HTTPResponse, newest: bytes) -> int:
    """The completion tokens that the newest event tells of those that have arrived."""
    response.fp.raw._sock.settimeout(0.02)
    try:
        while line := response.readline():
            newest = line if line.startswith(b"data: ") else newest
    except TimeoutError:
        pass
    return json.loads(newest.removeprefix(b"data: "))["usage"]["completion_tokens"]


def test_f36_all_is_free_within_two_steps(served: Served) -> None:
    """Counted in tokens, of which a step makes one for each stream. The engine stands still while the sockets close."""
    before = served.metric("generation_tokens_total")
    asked = {**ENDLESS, "stream": True, "stream_options": COUNTED}
    connections = [served.opened(TEXT, asked) for _ in range(STREAMS)]
    responses = [connection.getresponse() for connection in connections]
    first = [response.readline() for response in responses]
    await_that(lambda: served.metric("num_requests_running") == STREAMS)
    assert served.metric("kv_cache_usage_perc") > 0
    os.kill(served.engine_pid, signal.SIGSTOP)
    time.sleep(QUIET_S)
    try:
        known = sum(map(last_count, responses, first))
    finally:
        for connection in (*connections, *responses):
            connection.close()
        await_that(lambda: served.get("/load") == (200, {"server_load": 0}), within_s=5)
        os.kill(served.engine_pid, signal.SIGCONT)
    await_that(lambda: served.idle, within_s=10)
    made = served.metric("generation_tokens_total") - before
    print(f"{made - known:.0f} tokens after the last of {STREAMS} had hung up")
    assert 0 <= made - known <= 2 * STREAMS


def hang_up(served: Served, kind: str, salt: int) -> None:
    body: dict[str, Any] = {**ENDLESS, "stream": kind != "whole", "cache_salt": str(salt)}
    if kind == "queued":
        body["n"] = STREAMS  # with the others they are more than can run
    connection = served.opened(TEXT, body)
    if kind == "chunks":
        response = connection.getresponse()
        for _ in range(6):
            response.readline()
        response.close()
    elif kind in ("whole", "queued"):
        time.sleep(0.05)
    connection.close()


def test_a20_mixed(served: Served, record_property: Any) -> None:
    """Before the first token, after three chunks, not streamed, while others wait; then ordinary requests, none aborted."""
    kinds = ["first", "chunks", "whole", "queued"] * 10
    random.Random(2).shuffle(kinds)
    for at, kind in enumerate(kinds):
        hang_up(served, kind, at)
    took = await_that(lambda: served.idle, within_s=10)
    record_property("idle_after_s", round(took, 2))
    print(f"idle {took:.2f} s after the last of {len(kinds)} hung up")
    aborted = served.metric("request_success_total")
    await_that(lambda: served.get("/load") == (200, {"server_load": 0}), within_s=5)
    for at in range(20):
        body = {"prompt": "one two", "max_tokens": 3, "ignore_eos": True, "stream": bool(at % 2)}
        assert served.post(TEXT, body)[0] == 200
    assert served.metric("request_success_total") == aborted + 20
    ends = [
        line
        for line in served.get("/metrics")[1].splitlines()
        if line.startswith("vllm:request_success_total")
    ]
    lengths = [line for line in ends if 'finished_reason="length"' in line]
    assert len(lengths) == 1 and float(lengths[0].rsplit(" ", 1)[1]) == 20
    assert "Traceback" not in served.log()


def test_the_prefix_cache_is_each_salts_own(served: Served) -> None:
    """What one tenant's prompt left in the cache another's does not find: neither its blocks nor, by usage, that they exist."""

    def cached(salt: str | None) -> int:
        prompt = "The code of the quiet river is 7305. " * 20
        body = {"prompt": prompt, "max_tokens": 1, **({} if salt is None else {"cache_salt": salt})}
        status, answer = served.post(TEXT, body)
        assert status == 200, answer
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    for salt in ("tenant-a", "tenant-b", None, "tenant-"):
        assert cached(salt) == 0, salt
        assert cached(salt) > 100, salt
