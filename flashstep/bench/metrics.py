"""What is measured, by name: unit, which way is better, and what one value belongs to. One table, so that no two tools differ.

Definitions are those of spec/serving.md E13 to E22. Knows no measurement.
"""

from typing import Literal, NamedTuple

MOST_FAILED = 0.1  # share of a run's requests (H4): above it the run says too little of the server


class Metric(NamedTuple):
    """``better`` is "lower" or "higher"; ``of`` is what one raw value belongs to ("run": only the whole has one)."""

    unit: str
    better: Literal["lower", "higher"]
    of: Literal["request", "step", "question", "run"]
    words: str


METRICS: dict[str, Metric] = {
    "ttft_ms": Metric("ms", "lower", "request", "time to first token"),
    # one quantity under both of its names: vLLM's TPOT is AgentX's ITL of a request (E13, E16), and readers look for either
    "tpot_ms": Metric("ms", "lower", "request", "time per output token"),
    "itl_ms": Metric("ms", "lower", "request", "inter-token latency"),
    "e2el_ms": Metric("ms", "lower", "request", "request latency"),
    "interactivity_tps": Metric("tokens/s", "higher", "request", "tokens a second and user"),
    "step_us": Metric("us", "lower", "step", "step time"),
    "chain_us": Metric("us", "lower", "run", "time of an op chain, the mean of all shapes"),
    "accuracy": Metric("", "higher", "question", "accuracy"),
    "output_tps": Metric("tokens/s", "higher", "run", "output throughput"),
    "total_tps": Metric("tokens/s", "higher", "run", "total throughput"),
    "request_rate": Metric("requests/s", "higher", "run", "request throughput"),
    "goodput": Metric("requests/s", "higher", "run", "goodput"),
    "p90_interactivity_tps": Metric("tokens/s", "higher", "run", "P90 interactivity"),
    "median_interactivity_tps": Metric("tokens/s", "higher", "run", "median interactivity"),
    "cached_input_tps": Metric("tokens/s", "higher", "run", "throughput of cached input"),
    "uncached_input_tps": Metric("tokens/s", "higher", "run", "throughput of uncached input"),
    "prefix_hit": Metric("", "higher", "run", "prefix hit, measured"),
    "theoretical_prefix_hit": Metric("", "higher", "run", "prefix hit, theoretical"),
    "lockstep_gap": Metric("", "lower", "run", "throughput lost when ranks lag"),
    "acceptance_rate": Metric("", "higher", "run", "share of drafts accepted"),
    "acceptance_length": Metric("tokens", "higher", "run", "tokens a step"),
    "balancedness": Metric("", "higher", "run", "balancedness of expert load"),
}
