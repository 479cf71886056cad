"""What the engine counts, as Prometheus metrics under vLLM's names; read from the newest Stats when somebody scrapes.

A metric that vLLM's boards read and whose truth here is a constant (nothing is offloaded, the engine never sleeps) says that
constant; what would be made up is absent (docs/observability.md lists both). Knows no HTTP.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

from flashstep.ipc.messages import Ready, Stats
from flashstep.server.metrics.acceptance import counters

LABELS = ("model_name", "engine")
STEP_TOKENS = tuple(0 if i == 0 else i + 2 for i in range(13))  # exponents of 1, 8, 16 .. 16384
LIMITS = {
    "max_model_len": "Tokens of a prompt and its answer together, at most.",
    "max_num_seqs": "Requests that run at once, at most.",
}
NOTHING = Stats(
    running=0,
    waiting=0,
    cache_usage=0.0,
    prefix_queries=0,
    prefix_hits=0,
    preemptions=0,
    prompt_tokens=0,
    generation_tokens=0,
    steps=0,
)


class EngineCollector:
    """``stats`` gives the newest message, or None before the first."""

    def __init__(self, model: str, *, ready: Ready, stats: Callable[[], Stats | None]) -> None:
        self._values = [model, "0"]
        self._ready = ready
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats() or NOTHING
        yield self._cache_config()
        yield from self._gauges(stats)
        yield from self._counters(stats)
        yield self._step_tokens(stats)
        if stats.acceptance is not None:
            yield from counters(stats.acceptance, names=LABELS, values=self._values)

    def _cache_config(self) -> Metric:
        ready = self._ready
        info = InfoMetricFamily("vllm:cache_config", "The cache as it was built.", labels=LABELS)
        told = {
            "block_size": str(ready.block_size),
            "num_gpu_blocks": str(ready.num_blocks),
            "enable_prefix_caching": str(ready.enable_prefix_caching),
            "hit_policy": ready.hit_policy,
        }
        info.add_metric(self._values, told)
        return info

    def _gauges(self, stats: Stats) -> Iterator[Metric]:
        yield self._gauge("num_requests_running", "Requests in the running batch.", stats.running)
        yield self._gauge(
            "num_requests_waiting", "Requests that wait to run.", stats.waiting + stats.deferred
        )
        yield self._parts(
            GaugeMetricFamily,
            "num_requests_waiting_by_reason",
            "Waiting requests: for a slot or blocks (capacity), for their grammar, which is being compiled (deferred).",
            "reason",
            {"capacity": stats.waiting, "deferred": stats.deferred},
        )
        yield self._gauge(
            "kv_cache_usage_perc", "Share of cache blocks owned by live requests, 0 to 1.", stats.cache_usage
        )
        yield self._parts(
            GaugeMetricFamily,
            "engine_sleep_state",
            "The engine never sleeps.",
            "sleep_state",
            {"awake": 1, "weights_offloaded": 0, "discard_all": 0},
        )
        if stats.balancedness is not None:
            text = "Mean over largest load of the experts' parts, of the newest steps (recorded loads)."
            balance = GaugeMetricFamily("flashstep:expert_balancedness", text, labels=LABELS)
            balance.add_metric(self._values, stats.balancedness)
            yield balance
        for name, text in LIMITS.items():
            gauge = GaugeMetricFamily(f"flashstep:{name}", text, labels=LABELS)
            gauge.add_metric(self._values, getattr(self._ready, name))
            yield gauge
        adapters = ("running_lora_adapters", "waiting_lora_adapters", "max_lora")
        lora = GaugeMetricFamily(
            "vllm:lora_requests_info", "There are no adapters.", labels=[*LABELS, *adapters]
        )
        lora.add_metric([*self._values, "", "", "0"], 0)
        yield lora

    def _counters(self, stats: Stats) -> Iterator[Metric]:
        cached, outside = stats.cached_tokens, stats.transferred_tokens
        plain = {
            "prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.", stats.prefix_queries),
            "prefix_cache_hits": ("Prompt tokens found in the prefix cache.", stats.prefix_hits),
            "external_prefix_cache_queries": ("Prompt tokens whose cache was to come from outside.", outside),
            "external_prefix_cache_hits": ("Prompt tokens whose cache came from outside.", outside),
            "mm_cache_queries": ("Only text is served.", 0),
            "mm_cache_hits": ("Only text is served.", 0),
            "num_preemptions": ("Requests that were stopped to run again later.", stats.preemptions),
            "prompt_tokens": ("Tokens of prompts that were processed, cached ones too.", stats.prompt_tokens),
            "prompt_tokens_cached": ("Of prompt_tokens, those found in the prefix cache.", cached),
            "prompt_tokens_recomputed": (
                "Of the cached, those that were run again for their windows.",
                stats.replayed_tokens,
            ),
            "generation_tokens": ("Tokens generated.", stats.generation_tokens),
            "engine_steps": ("Steps the engine has run.", stats.steps),
        }
        for name, (text, value) in plain.items():
            counter = CounterMetricFamily(f"vllm:{name}", text, labels=LABELS)
            counter.add_metric(self._values, value)
            yield counter
        computed = stats.prompt_tokens - cached - outside
        yield self._parts(
            CounterMetricFamily,
            "prompt_tokens_by_source",
            "prompt_tokens, by where their cache entries came from.",
            "source",
            {"local_compute": computed, "local_cache_hit": cached, "external_kv_transfer": outside},
        )
        yield self._parts(
            CounterMetricFamily,
            "prompt_tokens_cached_by_source",
            "prompt_tokens_cached, by where they lay: always on the device.",
            "source",
            {"device": cached, "host": 0, "disk": 0, "p2p": 0, "external_unspecified": 0},
        )

    def _step_tokens(self, stats: Stats) -> Metric:
        steps = [*accumulate(stats.step_rows)] or [0]
        edges = [(f"{float(1 << i)}", float(steps[min(i, len(steps) - 1)])) for i in STEP_TOKENS]
        histogram = HistogramMetricFamily(
            "vllm:iteration_tokens_total",
            "Tokens that a step runs: of prompts, the newest of each answer, and drafts.",
            labels=LABELS,
        )
        histogram.add_metric(self._values, [*edges, ("+Inf", float(steps[-1]))], sum_value=float(stats.rows))
        return histogram

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=LABELS)
        gauge.add_metric(self._values, value)
        return gauge

    def _parts(
        self,
        kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
        name: str,
        text: str,
        label: str,
        parts: Mapping[str, float],
    ) -> Metric:
        metric = kind(f"vllm:{name}", text, labels=[*LABELS, label])
        for part, value in parts.items():
            metric.add_metric([*self._values, part], value)
        return metric
