"""Figures from records with known times: definitions, percentiles, throughput, goodput, and what is said about failures."""

from typing import Any

import numpy as np
import pytest

from flashstep.bench.load import summary as module
from flashstep.bench.load.client import Answered, Chunk
from flashstep.bench.load.summary import PERCENTILES, Asked, GapTally, Summary, summarize


def record(
    key: str,
    *,
    sent_s: float = 0.0,
    ttft_s: float = 0.1,
    itl_s: float = 0.01,
    tokens: int | None = 11,
    wished_output: int | None = None,
    **fields: Any,
) -> Asked:
    """A request of ``tokens`` content chunks of one token, the first ``ttft_s`` after it was sent, ``itl_s`` apart."""
    chunks = tuple(Chunk(sent_s + ttft_s + n * itl_s, 1, True, 9) for n in range(tokens or 11))
    told = {
        "first_s": chunks[0].at_s,
        "last_s": chunks[-1].at_s,
        "chunks": chunks,
        "prompt_tokens": 100,
        "output_tokens": tokens,
        "tokens_from": "usage" if tokens else None,
        "ended_s": chunks[-1].at_s + 0.5,  # usage and [DONE] come late: they are in no latency
        "status": 200,
    }
    answered = Answered(key=key, sent_s=sent_s, **(told | fields))
    return Asked(key, answered, fields.get("prompt_tokens"), wished_output)


def summary(*records: Asked, **slos_ms: float) -> Summary:
    tally = GapTally()
    for each in records:
        tally.add(each.answered)
    return summarize(records, gaps=tally.gaps(), slos_ms=slos_ms)


def test_one_request_has_the_definitions_of_e15_to_e17() -> None:
    found = summary(record("a", sent_s=5.0))
    columns = {name: values[0] for name, values in found.samples.columns.items()}
    assert columns["ttft_ms"] == pytest.approx(100)
    assert columns["e2el_ms"] == pytest.approx(200), "the last content, not the end of the stream"
    assert columns["itl_ms"] == columns["tpot_ms"] == pytest.approx(10)
    assert columns["interactivity_tps"] == pytest.approx(100)
    assert found.metrics["output_tps"] == pytest.approx(11 / 0.7), "over the window to the latest end"
    assert found.metrics["total_tps"] == pytest.approx(111 / 0.7)
    assert found.metrics["request_rate"] == pytest.approx(1 / 0.7)


def test_percentiles_are_linear_and_interactivity_is_the_slow_tail() -> None:
    rng = np.random.default_rng(0)
    itls = rng.uniform(0.001, 0.05, 37)
    found = summary(*(record(str(n), itl_s=itl) for n, itl in enumerate(itls)))
    spread = found.spreads["itl_ms"]
    for place in PERCENTILES:
        assert spread.at(place) == pytest.approx(1e3 * np.percentile(itls, place))
    assert (spread.mean, spread.std) == pytest.approx((1e3 * itls.mean(), 1e3 * itls.std()))
    slow = found.metrics["p90_interactivity_tps"]
    assert slow == pytest.approx(1 / np.percentile(itls, 90))
    assert slow < found.metrics["median_interactivity_tps"] < found.spreads["interactivity_tps"].at(90)


def test_the_window_goes_from_the_earliest_start_to_the_latest_end_of_what_succeeded() -> None:
    failed = record("c", sent_s=100.0, fault="timeout", error="no end")
    found = summary(record("a", sent_s=1.0), record("b", sent_s=3.0), failed)
    assert found.window_s == pytest.approx(2.7)
    assert found.metrics["output_tps"] == pytest.approx(22 / 2.7)
    assert found.samples.keys == ("a", "b") and found.failures == {"timeout": 1}


def test_goodput_counts_requests_within_every_limit() -> None:
    records = [
        record("good"),
        record("slow", itl_s=0.02),
        record("late", ttft_s=0.3),
        record("one token", tokens=1),
    ]
    window_s = summary(*records).window_s
    assert window_s is not None
    assert summary(*records, tpot=15).metrics["goodput"] == pytest.approx(3 / window_s)
    assert summary(*records, ttft=200, tpot=15).metrics["goodput"] == pytest.approx(2 / window_s)
    assert summary(*records, ttft=200, tpot=15, e2el=150).metrics["goodput"] == pytest.approx(1 / window_s)
    assert "goodput" not in summary(*records).metrics


def test_without_counts_what_needs_them_is_left_out_and_said() -> None:
    found = summary(record("a", tokens=None, prompt_tokens=None), record("b"), tpot=15, ttft=200)
    assert not {"output_tps", "total_tps", "goodput"} & found.metrics.keys()
    assert {"ttft_ms", "e2el_ms", "request_rate"} <= found.metrics.keys()
    assert found.spreads["itl_ms"].count == 1 and found.spreads["ttft_ms"].count == 2
    assert "1 of 2 answers came without a count of tokens" in found.faults[0] and "goodput" in found.faults[0]


def test_input_is_split_where_the_server_tells_what_was_cached() -> None:
    found = summary(record("a", cached_tokens=75), record("b", cached_tokens=25))
    assert found.metrics["prefix_hit"] == pytest.approx(0.5)
    assert found.metrics["cached_input_tps"] == pytest.approx(100 / 0.7)
    assert found.metrics["uncached_input_tps"] == pytest.approx(100 / 0.7)
    assert "prefix_hit" not in summary(record("a", cached_tokens=75), record("b")).metrics


def test_failures_are_told_by_kind_and_number() -> None:
    records = [record(str(n)) for n in range(3)]
    records += [record(f"c{n}", fault="cut off", error="the connection broke: reset") for n in range(2)]
    records += [record("d", fault="cut off", error="other")]
    records += [record("s", fault="status", error="HTTP 429: slow down")]
    faults = summary(*records).faults
    assert faults == (
        "3 of 7 requests failed: cut off (the connection broke: reset; and 1 other reasons)",
        "1 of 7 requests failed: status (HTTP 429: slow down)",
    )


def test_lengths_that_are_not_those_wished_are_told() -> None:
    assert summary(record("a", wished_output=11)).faults == ()
    assert summary(record("a", wished_output=20)).faults == (
        "1 of 1 answers have other lengths than wished, by 9 tokens at most",
    )


def test_gaps_are_of_chunks_and_of_tokens() -> None:
    two = tuple(Chunk(at_s, tokens, True, 9) for at_s, tokens in ((1.0, 1), (1.2, 2), (1.4, 2)))
    gaps = summary(record("a", chunks=two, tokens=5, first_s=1.0, last_s=1.4)).gaps
    assert gaps.chunks is not None and gaps.tokens is not None
    assert (gaps.chunks.count, gaps.chunks.mean) == (2, pytest.approx(200))
    assert (gaps.tokens.count, gaps.tokens.mean) == (4, pytest.approx(100))
    assert gaps.tokens_a_chunk == pytest.approx(5 / 3) and gaps.tokens_known_from == {"events": 1}


def test_nothing_at_all_is_a_summary_too() -> None:
    found = summary(record("a", fault="unreachable", error="refused"), ttft=1.0)
    assert (found.requests, found.succeeded, found.window_s, found.metrics) == (1, 0, None, {})


@pytest.mark.parametrize("at_once", [1, 5, 6, 10])
def test_answers_that_came_as_one_chunk_have_no_time_per_token(at_once: int) -> None:
    """From all to few of them: nothing divides by 0, a limit on it makes no goodput, and it is said."""
    together = [record(f"a{n}", last_s=0.1) for n in range(at_once)]
    found = summary(*together, *(record(f"b{n}") for n in range(10 - at_once)), tpot=15)
    assert (
        found.samples.columns["itl_ms"][:at_once]
        == found.samples.columns["tpot_ms"][:at_once]
        == (None,) * at_once
    )
    assert ("p90_interactivity_tps" in found.metrics) == (at_once < 10) and "goodput" not in found.metrics
    assert f"{at_once} of 10 answers came as one chunk" in found.faults[0]


def test_a_token_rate_is_of_all_answers_or_none() -> None:
    assert "cached_input_tps" not in summary(record("a", cached_tokens=75), record("b")).metrics


def test_figures_that_are_none_are_told() -> None:
    assert (
        "1 of 2 answers had figures that are none; the first: NaN"
        in summary(record("a"), record("b", unread="NaN")).faults
    )


def test_a_run_is_valid_with_a_tenth_failed() -> None:
    failed = [record(f"f{n}", fault="timeout") for n in range(2)]
    assert summary(*(record(str(n)) for n in range(18)), *failed).is_valid
    assert not summary(*(record(str(n)) for n in range(17)), *failed).is_valid and not summary().is_valid


def test_gaps_of_a_long_run_are_thinned_evenly_and_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_GAPS", 1000)
    rng, tally = np.random.default_rng(0), GapTally()
    for n in range(50):
        at_s = np.cumsum(rng.exponential(0.01, 101))
        chunks = tuple(Chunk(float(each), 1, True, 9) for each in at_s)
        tally.add(record(str(n), chunks=chunks).answered)
    gaps = tally.gaps()
    assert gaps.every == 8 and gaps.chunks is not None and 500 <= gaps.chunks.count <= 1000
    assert gaps.chunks.mean == pytest.approx(10, rel=0.15)
