"""Acceptance and prefix-cache figures from two /metrics pages."""

import pytest

from flashstep.bench.load.metrics_page import Counted, between, read_counters


def page(
    drafts: int, accepted: tuple[int, ...], queries: int, hits: int, prefix: str = "vllm:spec_decode"
) -> str:
    labels = 'engine="0",model_name="m"'
    lines = [
        f"# TYPE {prefix}_num_drafts_total counter",
        f"{prefix}_num_drafts_total{{{labels}}} {drafts}",
        f"{prefix}_num_drafts_created{{{labels}}} 1.7e9",
        f"# TYPE {prefix}_num_draft_tokens_total counter",
        f"{prefix}_num_draft_tokens_total{{{labels}}} {drafts * len(accepted)}",
        f"# TYPE {prefix}_num_accepted_tokens_total counter",
        f"{prefix}_num_accepted_tokens_total{{{labels}}} {sum(accepted)}",
        f"# TYPE {prefix}_num_accepted_tokens_per_pos_total counter",
        *(
            f'{prefix}_num_accepted_tokens_per_pos_total{{{labels},position="{n}"}} {count}'
            for n, count in enumerate(accepted)
        ),
        "# TYPE vllm:prefix_cache_queries_total counter",
        f'vllm:prefix_cache_queries_total{{engine="0"}} {queries}',
        f'vllm:prefix_cache_queries_total{{engine="1"}} {queries}',
        "# TYPE vllm:prefix_cache_hits_total counter",
        f'vllm:prefix_cache_hits_total{{engine="0"}} {hits}',
        "# TYPE vllm:num_requests_running gauge",
        "vllm:num_requests_running 3",
    ]
    return "\n".join(lines) + "\n"


def test_acceptance_is_of_what_ran_between() -> None:
    before, after = page(100, (60, 30), 1000, 100), page(150, (100, 40), 3000, 500)
    counted = between(read_counters(before), read_counters(after))
    assert counted.acceptance_length == pytest.approx(1 + (40 + 10) / 50)
    assert counted.acceptance_rate == pytest.approx(50 / 100)
    assert counted.by_position == pytest.approx((40 / 50, 10 / 50))
    assert counted.prefix_cache_hit_rate == pytest.approx(400 / 4000), "queries of both engines"
    assert not counted.synthetic


def test_positions_are_in_order_of_their_number() -> None:
    accepted = tuple(range(120, 0, -10))
    counted = between({}, read_counters(page(120, accepted, 1, 0)))
    assert counted.by_position == pytest.approx([count / 120 for count in accepted])


def test_synthetic_acceptance_is_told_apart() -> None:
    counted = between({}, read_counters(page(10, (5,), 1, 0, prefix="flashstep:synthetic_spec_decode")))
    assert counted.synthetic and counted.acceptance_length == pytest.approx(1.5)


def test_what_a_server_does_not_count_is_none() -> None:
    counted = between({}, read_counters("# TYPE a gauge\na 1\n"))
    assert counted == Counted()
    assert (counted.acceptance_length, counted.acceptance_rate, counted.prefix_cache_hit_rate) == (
        None,
        None,
        None,
    )


def test_a_page_that_is_none_is_an_error() -> None:
    with pytest.raises(ValueError):
        read_counters("<html>not found</html>")


STARTED = "# TYPE process_start_time_seconds gauge\nprocess_start_time_seconds {}\n"


def test_counters_of_two_processes_are_not_compared() -> None:
    before = read_counters(page(100, (60,), 1000, 100) + STARTED.format(1e9))
    again = between(before, read_counters(page(150, (90,), 3000, 500) + STARTED.format(2e9)))
    assert "started anew" in again.fault and again.acceptance_length is again.prefix_cache_hit_rate is None
    back = between(before, read_counters(page(10, (5,), 20, 3) + STARTED.format(1e9)))
    assert "went back" in back.fault and back.prefix_cache_hit_rate is None
    lot = page(10, (5,), 20, 3, prefix="flashstep:synthetic_spec_decode") + STARTED.format(2e9)
    assert between(before, read_counters(lot)).synthetic, "that drafts stood by lot is told all the same"


def test_a_position_that_is_no_number_has_no_place() -> None:
    strange = page(10, (5, 3), 1, 0).replace('position="1"', 'position="last"')
    assert between({}, read_counters(strange)).by_position == (0.5,)
