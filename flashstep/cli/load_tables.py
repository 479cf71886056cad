"""A run of load in words and tables, for a person: what was sent, what came back, what the server counted, what went wrong."""

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from flashstep.bench.metrics import METRICS

if TYPE_CHECKING:
    from flashstep.bench.load.serve import Outcome
    from flashstep.bench.load.summary import Spread, Summary

PERCENTILES = (50, 90, 99)
LATENCIES = {
    "ttft_ms": "TTFT, ms",
    "tpot_ms": "TPOT = ITL of a request, ms",
    "e2el_ms": "request latency, ms",
    "interactivity_tps": "tokens/s of each user",
}
RUN = (
    "request_rate output_tps total_tps cached_input_tps uncached_input_tps goodput p90_interactivity_tps "
    "median_interactivity_tps prefix_hit"
).split()


def show(outcome: "Outcome", out: Console) -> None:
    """Print ``outcome``."""
    summary = outcome.summary
    subject = outcome.subject
    out.print(
        f"{subject['model']} at {subject['url']}: {summary.succeeded} of {summary.requests} requests answered"
    )
    if summary.succeeded:
        out.print(_latencies(summary))
        for name in RUN:
            if name in summary.metrics:
                metric = METRICS[name]
                out.print(f"{metric.words}: {summary.metrics[name]:,.4g} {metric.unit}".rstrip())
        out.print(_token_times(summary))
    _show_counted(outcome, out)
    if outcome.probes is not None and outcome.probes.succeeded:
        ttft = outcome.probes.spreads["ttft_ms"]
        out.print(
            f"probes: {outcome.probes.succeeded} of {outcome.probes.requests} answered, TTFT "
            + ", ".join(f"P{place} {ttft.at(place):,.2f}" for place in PERCENTILES)
            + " ms"
        )
    floor, lag = outcome.floor, outcome.lag
    out.print(
        f"this client's floor: {floor.ttft_bias_ms:+.2f} ms in TTFT, {floor.delay_ms:.3f} ms from writing a chunk to reading it "
        f"(P99 {floor.delay_p99_ms:.3f}), {floor.chunk_us:.0f} us of processor a chunk; in this run its event loop was "
        f"{lag.p99_ms:.2f} ms late (P99) and {100 * lag.busy_share:.0f} % of a core busy"
    )
    for fault in outcome.faults:
        out.print(f"FAULT: {fault}")


def _latencies(summary: "Summary") -> Table:
    table = Table("", "mean", *(f"P{place}" for place in PERCENTILES), "max", box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    rows: list[tuple[str, Spread | None]] = [
        (words, summary.spreads.get(name)) for name, words in LATENCIES.items()
    ]
    rows.append(("between chunks, as read, ms", summary.gaps.chunks))
    rows.append(("between tokens, ms", summary.gaps.tokens))
    for words, spread in rows:
        if spread is not None:
            values = (spread.mean, *(spread.at(place) for place in PERCENTILES), spread.maximum)
            table.add_row(words, *(f"{value:,.2f}" for value in values))
    return table


def _token_times(summary: "Summary") -> str:
    """How token times came about."""
    gaps = summary.gaps
    if gaps.tokens_a_chunk is None:
        return "times between tokens are left out: nothing told how many tokens a chunk holds"
    words = {
        "events": "as each event told",
        "one a chunk": "as there are as many chunks as tokens",
        "none": "not known",
    }
    told = ", ".join(
        f"{words[source]} ({count} requests)" for source, count in gaps.tokens_known_from.items()
    )
    return f"{gaps.tokens_a_chunk:.2f} tokens a chunk, spread over the gap before it: {told}"


def _show_counted(outcome: "Outcome", out: Console) -> None:
    """What the server's own counters say."""
    counted = outcome.counted
    if counted.acceptance_length is not None and counted.acceptance_rate is not None:
        synthetic = "SYNTHETIC " if counted.synthetic else ""
        positions = " ".join(f"{share:.2f}" for share in counted.by_position)
        out.print(
            f"{synthetic}acceptance, by /metrics: {counted.acceptance_length:.2f} tokens a step, "
            f"{100 * counted.acceptance_rate:.1f} % of drafts (by position: {positions})"
        )
    if counted.prefix_cache_hit_rate is not None:
        out.print(
            f"prefix cache, by /metrics: {100 * counted.prefix_cache_hit_rate:.1f} % of prompt tokens were hits"
        )
