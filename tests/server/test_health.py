"""The small endpoints, and the names of the metrics (F30 to F32)."""

import openai
import pytest

import flashstep
from tests.server.conftest import MODEL, Server


def test_models(server: Server) -> None:
    listed = server.client.models.list().data
    assert [card.id for card in listed] == [MODEL, "alias"]
    assert server.client.models.retrieve("alias").id == "alias"
    with pytest.raises(openai.NotFoundError):
        server.client.models.retrieve("gpt-0")
    assert server.get("/v1/models")[1]["data"][0]["max_model_len"] == 512


def test_health_and_version(server: Server) -> None:
    assert server.get("/health") == (200, "")
    assert server.get("/ping") == (200, "")
    assert server.get("/version") == (200, {"version": flashstep.__version__})


@pytest.mark.parametrize(
    "name",
    [
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "cache_config_info",
        "prefix_cache_queries_total",
        "prefix_cache_hits_total",
        "num_preemptions_total",
        "prompt_tokens_total",
        "generation_tokens_total",
        "request_success_total",
        "time_to_first_token_seconds_bucket",
        "inter_token_latency_seconds_bucket",
        "request_time_per_output_token_seconds_bucket",
        "e2e_request_latency_seconds_bucket",
        "request_queue_time_seconds_bucket",
        "request_prefill_time_seconds_bucket",
        "request_prompt_tokens_bucket",
        "request_generation_tokens_bucket",
    ],
)
def test_metric_names(server: Server, name: str) -> None:
    samples = [line for line in server.get("/metrics")[1].splitlines() if line.startswith(f"vllm:{name}{{")]
    assert samples
    assert all(f'model_name="{MODEL}"' in line and 'engine="0"' in line for line in samples)


def test_metrics_move(server: Server) -> None:
    def counts() -> list[float]:
        return [
            server.metric("request_success_total", finished_reason="length"),
            server.metric("time_to_first_token_seconds_count"),
            server.metric("inter_token_latency_seconds_count"),
            server.metric("request_generation_tokens_sum"),
        ]

    before = counts()
    extra = server.script("moves", [[5], [6], [7, 8]], finish="length", step_s=0.02)
    server.client.completions.create(model=MODEL, prompt="hi", extra_body=extra)
    assert [round(b - a) for a, b in zip(before, counts(), strict=True)] == [1, 1, 2, 4]
