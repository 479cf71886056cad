"""A run of load in words and tables, for a person: what was sent, what came back, what the server counted, what went wrong."""

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from flashstep.bench.metrics import METRICS

if TYPE_CHECKING:
    from flashstep.bench.load.floor import Floor, Lag
    from flashstep.bench.load.metrics_page import Counted
    from flashstep.bench.load.replayed import Measured
    from flashstep.bench.load.serve import Outcome
    from flashstep.bench.load.summary import Spread, Summary

PERCENTILES = (50, 90, 99)
LATENCIES = {
    "ttft_ms": "TTFT, ms",
    "tpot_ms": "TPOT = ITL of a request, ms",
    "e2el_ms": "request latency, ms",
    # AgentX's own p90 of it is the fast tail (E17); the published P90 interactivity is the slow one (E18)
    "interactivity_tps": "tokens/s of each user (P90: the fast tail)",
    "input_tokens": "input, tokens",
    "output_tokens": "output, tokens",
}
RUN = (
    "request_rate output_tps total_tps cached_input_tps uncached_input_tps goodput p90_interactivity_tps "
    "median_interactivity_tps prefix_hit theoretical_prefix_hit"
).split()


def show(outcome: "Outcome", out: Console) -> None:
    """Print ``outcome``; its faults are its caller's."""
    from flashstep.bench.load.causes import shown

    summary = outcome.summary
    subject = outcome.subject
    out.print(
        f"{shown(subject['model'])} at {subject['url']}: {summary.succeeded} of {summary.requests} requests answered"
    )
    _show_figures(summary, outcome.waits_ms, out)
    _show_counted(outcome.counted, out)
    if outcome.probes is not None and (ttft := outcome.probes.spreads.get("ttft_ms")):
        out.print(
            f"probes: {outcome.probes.succeeded} of {outcome.probes.requests} answered, TTFT "
            + ", ".join(f"P{place} {ttft.at(place):,.2f}" for place in PERCENTILES)
            + " ms"
        )
    out.print(_floor_words(outcome.floor, outcome.lag))


def show_replay(measured: "Measured", out: Console) -> None:
    """Print each of its modes."""
    for mode, summary in measured.summaries.items():
        out.print(
            f"{'' if mode == 'single' else f'{mode}: '}{summary.succeeded} requests, {summary.failed} failed; "
            f"{measured.skipped_s[mode]:.1f} s of idle time left out"
        )
        _show_figures(summary, None, out)
        _show_counted(measured.counted.get(mode), out)
        if mode != "single":
            for rank, value in enumerate(measured.rank_tps(mode)):
                out.print(f"{mode}, rank {rank}: {value:,.1f} tokens/s in all")
    gap = measured.gap()
    if gap is not None:
        out.print(f"{METRICS['lockstep_gap'].words}: {100 * gap:.1f}%")
    out.print(_floor_words(measured.floor, max(measured.lags.values(), key=lambda lag: lag.p99_ms)))


def _floor_words(floor: "Floor", lag: "Lag") -> str:
    return (
        f"this client's floor: {floor.ttft_bias_ms:+.2f} ms in TTFT, {floor.delay_ms:.3f} ms from writing a chunk to reading it "
        f"(P99 {floor.delay_p99_ms:.3f}), {floor.chunk_us:.0f} us of processor a chunk; in this run its event loop was "
        f"{lag.p99_ms:.2f} ms late (P99) and {100 * lag.busy_share:.0f} % of a core busy"
    )


def _show_figures(summary: "Summary", waits_ms: "Spread | None", out: Console) -> None:
    if not summary.succeeded:
        return
    out.print(_latencies(summary, waits_ms))
    for name in RUN:
        if name in summary.metrics:
            metric = METRICS[name]
            out.print(f"{metric.words}: {summary.metrics[name]:,.4g} {metric.unit}".rstrip())
    out.print(_token_times(summary))


def _latencies(summary: "Summary", waits_ms: "Spread | None") -> Table:
    table = Table("", "mean", *(f"P{place}" for place in PERCENTILES), "max", box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    rows: list[tuple[str, Spread | None]] = [
        (words, summary.spreads.get(name)) for name, words in LATENCIES.items()
    ]
    rows.append(("between chunks, as read, ms", summary.gaps.chunks))
    rows.append(("between tokens, ms", summary.gaps.tokens))
    rows.append(("waited at this client, ms", waits_ms))
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
    thinned = f"; every {gaps.every}th gap is in the rows above" if gaps.every > 1 else ""
    return f"{gaps.tokens_a_chunk:.2f} tokens a chunk, spread over the gap before it: {told}{thinned}"


def _show_counted(counted: "Counted | None", out: Console) -> None:
    """What the server's own counters say."""
    if counted is None:
        return
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
