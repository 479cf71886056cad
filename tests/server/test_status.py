"""The figures at /status against /metrics; the page's files and headers; the flag that switches them off."""

import re
import urllib.request
from collections.abc import Callable

from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.serving import await_that
from tests.server.conftest import MODEL, Server


def headers(server: Server, path: str) -> dict[str, str]:
    with urllib.request.urlopen(server.base + path, timeout=20) as response:
        return {name.lower(): value for name, value in response.headers.items()}


def test_the_figures_are_those_of_the_metrics(server: Server) -> None:
    server.client.completions.create(model=MODEL, prompt="hi", max_tokens=3)
    counters = {
        "prompt_tokens": "prompt_tokens_total",
        "generation_tokens": "generation_tokens_total",
        "prefix_queries": "prefix_cache_queries_total",
        "running": "num_requests_running",
    }

    def agree() -> bool:  # the newest Stats may come between the two
        told = server.get("/status")[1]
        return all(told[name] == server.metric(metric) for name, metric in counters.items())

    await_that(agree)
    told = server.get("/status")[1]
    for reason, count in told["finished"].items():
        assert count == server.metric("request_success_total", finished_reason=reason)
    assert told["time_to_first_token_s"][-1] == [None, server.metric("time_to_first_token_seconds_count")]
    assert told["inter_token_s"][-1] == [None, server.metric("inter_token_latency_seconds_count")]
    assert told["model"] == MODEL and told["healthy"] is True and told["acceptance"] is None
    assert told["limits"] == {
        "max_model_len": 512,
        "max_num_seqs": 256,
        "cache_tokens": 3200,
        "hit_policy": "exact",
    }


def test_the_limits_are_metrics_too(server: Server) -> None:
    families = {one.name: one for one in text_string_to_metric_families(server.get("/metrics")[1])}
    for name, value in (("max_model_len", 512), ("max_num_seqs", 256)):
        assert [sample.value for sample in families[f"flashstep:{name}"].samples] == [value]


def test_the_page_names_only_its_own_files(server: Server) -> None:
    status, page = server.get("/")
    assert status == 200 and page.startswith("<!doctype html>")
    assert re.findall(r'(?:src|href)="([^"#]*)"', page) == [
        *("page/icon.svg", "page/page.css", "page/page.js", "page/icon.svg", "metrics", "health", "metrics")
    ]
    for name in ("page/icon.svg", "page/page.css", "page/page.js"):
        text = server.get(f"/{name}")[1]
        addresses = re.findall(r"\b[a-z]+://[^\s\"')]+", text)
        assert set(addresses) <= {"http://www.w3.org/2000/svg"}, "a namespace is a name, all else a request"
    assert server.get("/page/index.html")[0] == 404
    assert server.get("/page/..%2Fstatus.py")[0] == 404


def test_the_page_may_only_load_and_call_this_server(server: Server) -> None:
    sent = headers(server, "/")
    policy = sent["content-security-policy"]
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy and "http" not in policy and "*" not in policy
    assert sent["x-content-type-options"] == "nosniff"
    assert headers(server, "/page/page.js")["content-type"].startswith("text/javascript")
    assert headers(server, "/status")["cache-control"] == "no-store"


def test_a_dead_engine_is_told(own_server: Callable[..., Server]) -> None:
    server = own_server()
    server.kill_engine()
    await_that(lambda: not server.get("/status")[1]["healthy"])


def test_the_page_can_be_switched_off(own_server: Callable[..., Server]) -> None:
    server = own_server(serving={"disable_status_page": True})
    assert [server.get(path)[0] for path in ("/", "/status", "/page/page.js")] == [404] * 3
    assert server.get("/metrics")[0] == 200
