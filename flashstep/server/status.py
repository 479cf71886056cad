"""The status page at ``/``, its files, and the figures at ``/status`` that it shows: nothing that /metrics does not tell.

The page is files of ``page/``, sent as they are. Its policy lets it load its own files and call this server, and nothing else.
"""

import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client.core import Sample
from starlette.requests import Request
from starlette.responses import Response

import flashstep
from flashstep.server.errors import ApiError
from flashstep.server.frontend import Frontend
from flashstep.server.metrics.engine import NOTHING

PAGE = Path(__file__).parent / "page"
KINDS = {
    "page.css": "text/css",
    "page.js": "text/javascript",
    "icon.svg": "image/svg+xml",
}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


async def page(request: Request) -> Response:
    return Response(_file("index.html"), media_type="text/html", headers=HEADERS)


async def file(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in KINDS:
        raise ApiError(f"GET {request.url.path}: no such path", status=404)
    return Response(_file(name), media_type=KINDS[name], headers=HEADERS)


@cache
def _file(name: str) -> bytes:
    return (PAGE / name).read_bytes()


async def status(request: Request) -> Response:
    """Counters since the start, gauges now; ``time_s`` is a monotonic clock. Histograms are ``[[edge or null, count], ...]``."""
    front: Frontend = request.app.state.front
    body = msgspec.json.encode(figures(front))
    return Response(body, media_type="application/json", headers={"Cache-Control": "no-store"})


def figures(front: Frontend) -> dict[str, Any]:
    """What ``/status`` says. Counts are JSON numbers, times seconds."""
    ready = front.ready
    stats = front.client.stats or NOTHING
    acceptance = None if stats.acceptance is None else msgspec.to_builtins(stats.acceptance)
    samples = {metric.name: metric.samples for metric in front.metrics.collect()}
    return {
        "model": front.names[0],
        "version": flashstep.__version__,
        "healthy": front.client.alive,
        "time_s": time.monotonic(),
        "uptime_s": time.time() - front.created,
        "limits": {
            "max_model_len": ready.max_model_len,
            "max_num_seqs": ready.max_num_seqs,
            "cache_tokens": ready.num_blocks * ready.block_size,
            "hit_policy": ready.hit_policy,
        },
        "running": stats.running,
        "waiting": stats.waiting + stats.deferred,
        "cache_usage": stats.cache_usage,
        "prefix_queries": stats.prefix_queries,
        "prefix_hits": stats.prefix_hits,
        "preemptions": stats.preemptions,
        "prompt_tokens": stats.prompt_tokens,
        "generation_tokens": stats.generation_tokens,
        "acceptance": acceptance,
        "finished": _by("finished_reason", samples["vllm:request_success"]),
        "rejected": sum(_by("reason", samples["vllm:admission_rejections"]).values()),
        "time_to_first_token_s": _buckets(samples["vllm:time_to_first_token_seconds"]),
        "inter_token_s": _buckets(samples["vllm:inter_token_latency_seconds"]),
    }


def _by(label: str, samples: Sequence[Sample]) -> dict[str, float]:
    return {sample.labels[label]: sample.value for sample in samples if not sample.name.endswith("_created")}


def _buckets(samples: Sequence[Sample]) -> list[tuple[float | None, float]]:
    """Cumulative counts by upper edge; that of the last, which has none, is None."""
    edges = [(sample.labels["le"], sample.value) for sample in samples if "le" in sample.labels]
    return [(None if edge == "+Inf" else float(edge), count) for edge, count in edges]
