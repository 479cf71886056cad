"""Spans of real requests at a real collector: vLLM's names, the client's trace, one for each choice, no text."""

from collections.abc import Callable

import pytest

from flashstep.config.server import ServerOptions
from tests.server.conftest import MODEL, Server
from tests.telemetry.collector import attributes, collector

TRACE = "0af7651916cd43dd8448eb211c80319c"
SECRET = "fox and a secret"


def test_spans_of_requests(own_server: Callable[..., Server]) -> None:
    with collector() as taken:
        server = own_server(serving={"otlp_traces_endpoint": taken.url})
        sent = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01", "x-request-id": "mine"}
        script = server.script("traced", f"hm</think>{SECRET}", cached=2)
        ask = {"model": MODEL, "messages": [{"role": "user", "content": SECRET}], "max_tokens": 50}
        whole = server.client.chat.completions.create(**ask, extra_headers=sent, extra_body=script)
        for _ in server.client.completions.create(
            model=MODEL, prompt="hi", max_tokens=3, n=2, stream=True, temperature=0.5
        ):
            pass
        failing = server.script("failing", [[5]], finish="error")
        assert (
            server.post("/v1/completions", {"model": MODEL, "prompt": "hi", "max_tokens": 5} | failing)[0]
            == 500
        )
        server.stop()
    spans = taken.named("llm_request")
    chat, *children, failed = spans
    told = attributes(chat)
    assert chat.trace_id.hex() == TRACE
    assert told["gen_ai.request.id"] == "mine"
    assert told["gen_ai.usage.prompt_tokens"] == whole.usage.prompt_tokens
    assert told["gen_ai.usage.completion_tokens"] == whole.usage.completion_tokens
    assert told["gen_ai.usage.cache_read.input_tokens"] == 2
    assert told["gen_ai.request.max_tokens"] == 50
    assert told["gen_ai.response.model"] == MODEL
    assert told["gen_ai.response.finish_reasons"] == ["stop"]
    assert told["gen_ai.latency.time_in_queue"] == 0.001
    assert told["gen_ai.latency.time_in_model_prefill"] == 0.002
    assert 0 < told["gen_ai.latency.time_to_first_token"] <= told["gen_ai.latency.e2e"]
    inside = [span.name for span in taken.spans if span.parent_span_id == chat.span_id]
    assert sorted(inside) == ["decode", "prefill", "queue"]
    assert [attributes(span)["gen_ai.request.n"] for span in children] == [2, 2]
    assert len({attributes(span)["flashstep.engine_request_id"] for span in children}) == 2
    assert {attributes(span)["gen_ai.request.temperature"] for span in children} == {0.5}
    assert failed.status.code == 2 and attributes(failed)["gen_ai.response.finish_reasons"] == ["error"]
    assert not any("fox" in str(span) for span in taken.spans)


@pytest.mark.parametrize("endpoint", ["grpc://localhost:4317", "localhost:4318", "http://"])
def test_an_endpoint_that_cannot_be_meant(endpoint: str) -> None:
    (told,) = ServerOptions(otlp_traces_endpoint=endpoint).problems()
    assert told.startswith("--otlp-traces-endpoint is") and "http://localhost:4318/v1/traces" in told


def test_without_the_extra_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashstep.config.server.find_spec", lambda _: None)
    (told,) = ServerOptions(otlp_traces_endpoint="http://localhost:4318").problems()
    assert "flashstep[otel]" in told
