"""What a replay's records say: measured ones only, E15 to E20 on hand-made answers, prefix hits, ranks."""

from typing import Any

import pytest

from flashstep.bench.load.client import Answered
from flashstep.bench.load.floor import Floor
from flashstep.bench.load.ranks import gap
from flashstep.bench.load.replay import Record
from flashstep.bench.load.replayed import Measured, summary_of
from flashstep.bench.metrics import METRICS


def record(key: str, *, rank: int = 0, phase: str = "measured", **answer: Any) -> Record:
    known = {"sent_s": 0.0, "first_s": 0.1, "last_s": 0.3, "ended_s": 0.4, "output_tokens": 11}
    counted = {"prompt_tokens": 100, "cached_tokens": 60}
    return Record(
        key=key,
        conversation="s",
        turn=0,
        replay=0,
        lane=0,
        phase=phase,  # ty: ignore[invalid-argument-type]
        rank=rank,
        input_tokens=100,
        output_tokens=11,
        hit=3,
        blocks=4,
        answer=Answered(key=key, **(known | counted | answer)),
    )


def test_latencies_are_those_of_the_definitions() -> None:
    found = summary_of([record("a"), record("b", last_s=1.1)])
    columns = found.samples.columns
    assert columns["ttft_ms"] == pytest.approx((100, 100))
    assert columns["itl_ms"] == pytest.approx((20, 100)), "(latency - TTFT) / (tokens - 1)"
    assert columns["e2el_ms"] == pytest.approx((300, 1100)), "to the last content, not to the end"
    assert columns["interactivity_tps"] == pytest.approx((50, 10))


def test_the_published_p90_is_the_slow_tail_and_the_users_field_s_p90_the_fast_one() -> None:
    found = summary_of([record(str(n), last_s=0.1 + 0.01 * n) for n in range(1, 12)])
    itl, user = found.spreads["itl_ms"], found.spreads["interactivity_tps"]
    assert found.metrics["p90_interactivity_tps"] == pytest.approx(1000 / itl.at(90))
    assert found.metrics["median_interactivity_tps"] == pytest.approx(1000 / itl.at(50))
    assert found.metrics["p90_interactivity_tps"] == pytest.approx(user.at(10), rel=0.02)
    assert user.at(90) > 3 * found.metrics["p90_interactivity_tps"]


def test_throughput_is_by_class_from_the_first_begin_to_the_last_end() -> None:
    found = summary_of(
        [record("a"), record("b", sent_s=1.0, ended_s=2.0), record("c", phase="warm-up", ended_s=9.0)]
    ).metrics
    assert found["request_rate"] == 1 and found["output_tps"] == 11 and found["total_tps"] == 111
    assert (found["cached_input_tps"], found["uncached_input_tps"]) == (60, 40)
    assert (found["prefix_hit"], found["theoretical_prefix_hit"]) == (0.6, 0.75)


def test_only_whole_measured_answers_count_and_the_others_are_told() -> None:
    found = summary_of(
        [
            record("a"),
            record("b", phase="warm-up"),
            record("c", fault="cut off", error="the connection broke"),
            record("w", phase="warm-up", fault="cut off", error="the connection broke"),
            record("e", output_tokens=4),
            record("f", output_tokens=None, cached_tokens=None),
        ]
    )
    assert found.samples.keys == ("a", "e", "f") and (found.succeeded, found.failed) == (3, 1)
    assert found.samples.columns["itl_ms"][2] is None
    assert not {"output_tps", "total_tps", "cached_input_tps", "prefix_hit"} & found.metrics.keys(), (
        "one told nothing"
    )
    assert [fault.split(":")[0] for fault in found.faults] == [
        "1 of 4 requests failed",
        "1 of 3 answers came without a count of tokens",
        "1 of 2 answers have other lengths than wished, by 7 tokens at most",
        "1 requests of the warm-up failed",
    ]


def test_nothing_answered_is_no_error() -> None:
    found = summary_of([])
    assert found.metrics == {} and found.samples.keys == ()


def test_ranks_have_keys_of_their_own() -> None:
    both = [record("a", rank=0), record("a", rank=1)]
    of = {mode: summary_of(both, names=[f"{mode}/0", f"{mode}/1"]) for mode in ("mirror", "lag")}
    floor = Floor(ttft_bias_ms=0, delay_ms=0, delay_p99_ms=0, chunk_us=1, chunks_a_second=1)
    measured = Measured(subject={}, words="", job="", num_ranks=2, floor=floor, summaries=of)
    assert measured.samples().keys == ("mirror/0/a", "mirror/1/a", "lag/0/a", "lag/1/a")


def test_metrics_have_names_of_the_table() -> None:
    assert set(summary_of([record("a")]).metrics) <= set(METRICS)


def test_the_gap_is_the_share_that_lagging_costs() -> None:
    assert gap(100.0, 86.4) == pytest.approx(0.136)
