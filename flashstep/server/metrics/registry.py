"""Prometheus metrics under vLLM's names (spec/serving.md F.8): what requests live through, and the registry of all metrics.

Histogram edges are vLLM's with finer ones below, so that dashboards built for it go on working. Knows no HTTP.
"""

from collections.abc import Callable, Iterator

import msgspec
from prometheus_client import (
    CollectorRegistry,
    Counter,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import Metric

from flashstep.ipc.messages import Ready, Stats
from flashstep.server.metrics.engine import LABELS, EngineCollector
from flashstep.server.metrics.outcome import Outcome, family

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
FEW = (0, 1, 2, 5, 10, 20, 50)
NUM_CHOICES = (1, 2, 5, 10, 20, 50, 100)
REASONS = ("stop", "length", "abort", "error")
REJECTIONS = ("max_num_queued_reqs", "max_num_queued_tokens")


class _Family(msgspec.Struct):
    """The requests of one prompt."""

    n: int = 0
    running: int = 0
    longest: int | None = None  # tokens of the longest answer that came to its end


class Metrics:
    """One server's registry. The histograms are bound to their labels once: ``observe`` is on the path of every token.

    ``begin`` and ``ended`` are called once for each request; ``listeners`` hear of every end and of how many requests its
    prompt has.
    """

    def __init__(self, model: str, *, ready: Ready, stats: Callable[[], Stats | None]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(EngineCollector(model, ready=ready, stats=stats))
        self._labels = {"model_name": model, "engine": "0"}
        self._families: dict[str, _Family] = {}
        self.listeners: list[Callable[[Outcome, int], None]] = []
        self.first_token_s = self._histogram("time_to_first_token_seconds", TTFT)
        self.inter_token_s = self._histogram("inter_token_latency_seconds", ITL)
        self._per_output_token_s = self._histogram("request_time_per_output_token_seconds", ITL)
        self._end_to_end_s = self._histogram("e2e_request_latency_seconds", LATENCY)
        self._queue_s = self._histogram("request_queue_time_seconds", LATENCY)
        self._prefill_s = self._histogram("request_prefill_time_seconds", LATENCY)
        self._decode_s = self._histogram("request_decode_time_seconds", LATENCY)
        self._inference_s = self._histogram("request_inference_time_seconds", LATENCY)
        self._prompt_tokens = self._histogram("request_prompt_tokens", TOKENS)
        self._generation_tokens = self._histogram("request_generation_tokens", TOKENS)
        self._longest_tokens = self._histogram("request_max_num_generation_tokens", TOKENS)
        self._computed_tokens = self._histogram("request_prefill_kv_computed_tokens", TOKENS)
        self._max_tokens = self._histogram("request_params_max_tokens", TOKENS)
        self._n = self._histogram("request_params_n", NUM_CHOICES)
        self._preemptions = self._histogram("request_num_preemptions", FEW)
        self._finished = self._counter(
            "request_success", "Requests that ended, by reason.", "finished_reason", REASONS
        )
        rejections = Counter(
            "vllm:admission_rejections",
            "Requests that were turned away before the engine saw them.",
            ("model_name", "reason"),
            registry=self._registry,
        )
        self._rejections = {reason: rejections.labels(model, reason) for reason in REJECTIONS}
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self._registry)

    def _histogram(self, name: str, buckets: tuple[float, ...]) -> Histogram:
        text = f"Histogram of {name.replace('_', ' ')}."
        histogram = Histogram(f"vllm:{name}", text, LABELS, registry=self._registry, buckets=buckets)
        return histogram.labels(**self._labels)

    def _counter(self, name: str, text: str, label: str, values: tuple[str, ...]) -> dict[str, Counter]:
        counter = Counter(f"vllm:{name}", text, (*LABELS, label), registry=self._registry)
        return {value: counter.labels(**self._labels, **{label: value}) for value in values}

    def begin(self, request_id: str) -> None:
        """A request was sent to the engine. All of a family are, before the first of them ends."""
        one = self._families.setdefault(family(request_id), _Family())
        one.n += 1
        one.running += 1

    def ended(self, outcome: Outcome) -> None:
        """Count a request that has begun and ends now."""
        self._finished[outcome.reason].inc()
        n = self._count_family(outcome)
        if outcome.finished:
            self._observe(outcome)
        for listener in self.listeners:
            listener(outcome, n)

    def rejected(self, reason: str) -> None:
        """Count a request that was turned away; ``reason`` is one of ``REJECTIONS``."""
        self._rejections[reason].inc()

    def _count_family(self, outcome: Outcome) -> int:
        """How many requests it has."""
        key = family(outcome.request_id)
        one = self._families[key]
        one.running -= 1
        if outcome.finished:
            one.longest = max(one.longest or 0, outcome.completion_tokens)
        if not one.running:
            del self._families[key]
            if one.longest is not None:
                self._n.observe(one.n)
                self._longest_tokens.observe(one.longest)
        return one.n

    def _observe(self, outcome: Outcome) -> None:
        self._prompt_tokens.observe(outcome.prompt_tokens)
        self._computed_tokens.observe(
            outcome.prompt_tokens - outcome.cached_tokens - outcome.transferred_tokens
        )
        self._generation_tokens.observe(outcome.completion_tokens)
        self._max_tokens.observe(outcome.max_tokens)
        self._preemptions.observe(outcome.preemptions)
        self._end_to_end_s.observe(outcome.end_to_end_s)
        times = (
            (self._queue_s, outcome.queued_s),
            (self._prefill_s, outcome.prefill_s),
            (self._decode_s, outcome.decode_s),
            (self._inference_s, outcome.inference_s),
        )
        for histogram, seconds in times:
            if seconds is not None:
                histogram.observe(seconds)
        if outcome.decode_s is not None and outcome.completion_tokens > 1:
            self._per_output_token_s.observe(outcome.decode_s / (outcome.completion_tokens - 1))

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Everything that ``text`` says, as objects."""
        return iter(self._registry.collect())
