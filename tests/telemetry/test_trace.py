"""Spans on their way to a real collector: times, children, parents; a collector that is not there."""

import socket
import time

from flashstep.telemetry.trace import NS, Phase, Tracer, current_request_id, within
from tests.telemetry.collector import attributes, collector

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"


def test_a_span_and_its_phases_join_the_trace_of_the_header() -> None:
    with collector() as taken:
        tracer = Tracer(taken.url, name="flashstep", version="1")
        with within({"traceparent": f"00-{TRACE}-{PARENT}-01"}, request_id="r1"):
            assert current_request_id() == "r1"
            phases = [Phase("queue", began_s=0.0, took_s=0.25), Phase("prefill", began_s=0.25, took_s=0.5)]
            tracer.request("work", took_s=2.0, attributes={"a": 1, "b": ("x",)}, phases=phases, failed=True)
        assert current_request_id() is None
        tracer.close()
    assert taken.paths == ["/v1/traces"]
    assert taken.resources[0]["service.name"] == "flashstep"
    (span,) = taken.named("work")
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    assert attributes(span) == {"a": 1, "b": ["x"]}
    assert span.end_time_unix_nano - span.start_time_unix_nano == 2 * NS
    assert span.status.code == 2
    (prefill,) = taken.named("prefill")
    assert prefill.parent_span_id == span.span_id and prefill.trace_id == span.trace_id
    assert prefill.start_time_unix_nano - span.start_time_unix_nano == NS // 4
    assert prefill.end_time_unix_nano - prefill.start_time_unix_nano == NS // 2


def test_no_header_or_a_broken_one_begins_a_trace() -> None:
    with collector() as taken:
        tracer = Tracer(taken.url + "/own/path", name="flashstep", version="1")
        for headers in ({}, {"traceparent": "00-zz-1-01"}):
            with within(headers, request_id="r"):
                tracer.request("work", took_s=0.0, attributes={}, phases=[], failed=False)
        tracer.close()
    assert taken.paths == ["/own/path"]
    first, second = taken.named("work")
    assert not first.parent_span_id and not second.parent_span_id
    assert first.trace_id != second.trace_id


def test_a_header_that_says_unsampled_sends_nothing() -> None:
    with collector() as taken:
        tracer = Tracer(taken.url, name="flashstep", version="1")
        with within({"traceparent": f"00-{TRACE}-{PARENT}-00"}, request_id="r"):
            tracer.request("work", took_s=0.0, attributes={}, phases=[], failed=False)
        tracer.close()
    assert taken.spans == []


def test_a_collector_that_is_not_there_delays_no_request() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        tracer = Tracer(f"http://127.0.0.1:{free.getsockname()[1]}", name="flashstep", version="1")
        began = time.monotonic()
        tracer.request("work", took_s=0.0, attributes={}, phases=[], failed=False)
        assert time.monotonic() - began < 1  # an export waits at least as long before it tries again
        tracer.close()
