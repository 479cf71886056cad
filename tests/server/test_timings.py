"""``return_metrics``: where the time of every choice went, on request, whole and streamed; nothing of it otherwise."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.server.conftest import Server
from tests.server.test_sse import comes_true
from tests.server.test_usage import CHAT, TEXT, body_of, events

STEP_S = 0.02
PATHS = pytest.mark.parametrize("path", [CHAT, TEXT])


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """It speculates, and tells of it only who asks."""
    made = Server(tmp_path_factory.mktemp("drafting"), drafts=2)
    yield made
    made.stop()


def timed(server: Server, **script: Any) -> dict[str, Any]:
    runs = [[token] for token in server.tokenizer.encode("a</think>b c d e")]
    told = {"cached": 3, "replayed": 2, "preemptions": 1, "step_s": STEP_S} | script
    return {"return_metrics": True, **server.script("timed", runs, **told)}


def check(one: dict[str, Any], *, index: int, tokens: int) -> None:
    assert list(one) == [
        "index",
        "queue_s",
        "prefill_s",
        "time_to_first_token_s",
        "decode_s",
        "end_to_end_s",
        "tokens_per_s",
        "cached_tokens",
        "replayed_tokens",
        "preemptions",
    ]
    assert (one["index"], one["queue_s"], one["prefill_s"]) == (index, 0.001, 0.002)  # as the stub has it
    assert (one["cached_tokens"], one["replayed_tokens"], one["preemptions"]) == (3, 2, 1)
    assert 0 < one["time_to_first_token_s"] <= one["end_to_end_s"]
    assert one["decode_s"] >= 0, "a machine without time has seen all tokens at once"
    assert one["time_to_first_token_s"] + one["decode_s"] <= one["end_to_end_s"] + 1e-9
    speed = (tokens - 1) / one["decode_s"] if one["decode_s"] else None
    assert one["tokens_per_s"] == (speed and pytest.approx(speed))


@PATHS
def test_every_choice_has_its_times(server: Server, path: str) -> None:
    body = body_of(path, n=2, **timed(server))
    whole = server.post(path, body)[1]
    tokens = whole["usage"]["completion_tokens"] // 2
    assert list(whole["metrics"]) == ["choices"], "this engine does not speculate"
    for index, one in enumerate(whole["metrics"]["choices"]):
        check(one, index=index, tokens=tokens)
    for options in ({}, {"stream_options": {"include_usage": True}}):
        *others, last = events(server, path, body | options)
        assert not any("metrics" in chunk for chunk in others)
        for index, one in enumerate(last["metrics"]["choices"]):
            check(one, index=index, tokens=tokens)


@PATHS
def test_the_decode_time_is_the_steps(server: Server, path: str) -> None:
    """The engine keeps the tokens behind the first back until that has been counted, and a while longer."""

    def first_tokens() -> float:
        return server.metric("time_to_first_token_seconds_count")

    before, body = first_tokens(), body_of(path, **timed(server, holds=[1]))
    with ThreadPoolExecutor(1) as beside:
        answer = beside.submit(server.post, path, body)
        assert comes_true(lambda: first_tokens() > before)
        known = time.monotonic()
        time.sleep(STEP_S)
        held_s = time.monotonic() - known
        server.release("timed", 1)
        (one,) = answer.result()[1]["metrics"]["choices"]
    assert held_s <= one["decode_s"] <= one["end_to_end_s"]


@PATHS
def test_one_token_has_no_speed(server: Server, path: str) -> None:
    (one,) = server.post(path, body_of(path, max_tokens=1, return_metrics=True))[1]["metrics"]["choices"]
    assert (one["decode_s"], one["tokens_per_s"]) == (None, None)
    assert one["time_to_first_token_s"] > 0


@PATHS
def test_what_a_stop_string_ends_knows_its_preemptions(server: Server, path: str) -> None:
    extra = timed(server, finish="length")
    whole = server.post(path, body_of(path, stop=["c"], **extra))[1]
    assert whole["choices"][0]["finish_reason"] == "stop"
    check(whole["metrics"]["choices"][0], index=0, tokens=whole["usage"]["completion_tokens"])
    for told in (True, False):
        before = server.metric("request_num_preemptions_sum")
        assert server.post(path, body_of(path, stop=["c"], **extra | {"return_metrics": told}))[0] == 200
        assert server.metric("request_num_preemptions_sum") == before + 1, "asked for or not"


@PATHS
def test_acceptance_comes_with_it_and_only_then(drafting: Server, path: str) -> None:
    extra = timed(drafting)
    told = drafting.post(path, body_of(path, **extra))[1]["metrics"]
    assert sorted(told) == ["choices", "speculative_decoding"]
    assert told["speculative_decoding"]["num_spec_tokens"] == 2
    assert "metrics" not in drafting.post(path, body_of(path, **extra | {"return_metrics": False}))[1]
    assert not any("metrics" in chunk for chunk in events(drafting, path, body_of(path, max_tokens=2)))
