"""Prometheus metrics under vLLM's names (spec/serving.md F.8), from the engine's Stats and from what requests live through here.

Histogram edges are vLLM's with finer ones below, so that dashboards built for it go on working. Knows no HTTP.
"""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric

from flashstep.ipc.messages import Ready, Stats
from flashstep.server.acceptance import families

FINE = (0.00025, 0.0005, 0.001, 0.002, 0.004, 0.006, 0.008)
TTFT = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
ITL = (*FINE, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
LATENCY = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
TOKENS = (
    1,
    2,
    5,
    10,
    20,
    50,
    100,
    200,
    500,
    1000,
    2000,
    5000,
    10_000,
    20_000,
    50_000,
    100_000,
    200_000,
    500_000,
    1_000_000,
)
REASONS = ("stop", "length", "abort", "error")
LABELS = ("model_name", "engine")


class EngineCollector:
    """Reads the newest Stats when somebody scrapes."""

    def __init__(self, model: str, *, ready: Ready, stats: Callable[[], Stats | None]) -> None:
        self._labels = [model, "0"]
        self._ready = ready
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        info = InfoMetricFamily("vllm:cache_config", "The cache as it was built.", labels=LABELS)
        sizes = {"block_size": str(self._ready.block_size), "num_gpu_blocks": str(self._ready.num_blocks)}
        info.add_metric(self._labels, sizes | {"hit_policy": self._ready.hit_policy})
        yield info
        stats = self._stats()
        if stats is None:
            stats = Stats(
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
        gauges = {
            "num_requests_running": ("Requests in the running batch.", stats.running),
            "num_requests_waiting": ("Requests that wait to run.", stats.waiting),
            "kv_cache_usage_perc": (
                "Share of cache blocks owned by live requests, 0 to 1.",
                stats.cache_usage,
            ),
        }
        counters = {
            "prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.", stats.prefix_queries),
            "prefix_cache_hits": ("Prompt tokens found in the prefix cache.", stats.prefix_hits),
            "num_preemptions": ("Requests that were stopped to run again later.", stats.preemptions),
            "prompt_tokens": ("Prompt tokens processed.", stats.prompt_tokens),
            "generation_tokens": ("Tokens generated.", stats.generation_tokens),
            "engine_steps": ("Steps the engine has run.", stats.steps),
        }
        for name, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=LABELS)
            gauge.add_metric(self._labels, value)
            yield gauge
        for name, (text, value) in counters.items():
            counter = CounterMetricFamily(f"vllm:{name}", text, labels=LABELS)
            counter.add_metric(self._labels, value)
            yield counter
        if stats.acceptance is not None:
            yield from families(stats.acceptance, names=LABELS, values=self._labels)


class Metrics:
    """One server's registry. The histograms are bound to their labels once: ``observe`` is on the path of every token."""

    def __init__(self, model: str, *, ready: Ready, stats: Callable[[], Stats | None]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(EngineCollector(model, ready=ready, stats=stats))
        self._labels = {"model_name": model, "engine": "0"}
        self.first_token_s = self._histogram("time_to_first_token_seconds", TTFT)
        self.inter_token_s = self._histogram("inter_token_latency_seconds", ITL)
        self.per_output_token_s = self._histogram("request_time_per_output_token_seconds", ITL)
        self.end_to_end_s = self._histogram("e2e_request_latency_seconds", LATENCY)
        self.queue_s = self._histogram("request_queue_time_seconds", LATENCY)
        self.prefill_s = self._histogram("request_prefill_time_seconds", LATENCY)
        self.prompt_tokens = self._histogram("request_prompt_tokens", TOKENS)
        self.generation_tokens = self._histogram("request_generation_tokens", TOKENS)
        finished = Counter(
            "vllm:request_success",
            "Requests that ended, by reason.",
            (*LABELS, "finished_reason"),
            registry=self._registry,
        )
        self.finished = {
            reason: finished.labels(**self._labels, finished_reason=reason) for reason in REASONS
        }

    def _histogram(self, name: str, buckets: tuple[float, ...]) -> Histogram:
        text = f"Histogram of {name.replace('_', ' ')}."
        histogram = Histogram(f"vllm:{name}", text, LABELS, registry=self._registry, buckets=buckets)
        return histogram.labels(**self._labels)

    def text(self) -> bytes:
        return generate_latest(self._registry)
