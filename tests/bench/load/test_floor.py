"""The client's own error, against a scripted server that wrote down when it wrote."""

import asyncio
import time

import numpy as np
import pytest
import uvloop

from flashstep.bench.load.client import Client
from flashstep.bench.load.floor import Lag, LagWatch, Script, loopback, measure_floor, scripted, written
from flashstep.bench.load.token_times import token_times

REQUESTS = 12
SLOW = Script(chunks=21, first_ms=300, gap_ms=20, tokens_a_chunk=3)


async def test_times_are_within_one_percent_of_the_servers_own() -> None:
    """In the quieter quarter of the requests: a busy machine delays some, an error of the client's own would be in all."""
    async with loopback() as url, Client(url) as client:
        await client.send(scripted("warm", SLOW))
        calls = [scripted(str(n), SLOW) for n in range(REQUESTS)]
        answers = [
            answered
            for n in range(0, REQUESTS, 4)
            for answered in await asyncio.gather(*map(client.send, calls[n : n + 4]))
        ]
        truths = [await written(client, answered.key) for answered in answers]
    errors = {"ttft": [], "e2el": [], "itl": [], "gap": [], "token gap": []}
    for answered, truth in zip(answers, truths, strict=True):
        assert not answered.fault and len(answered.content_s) == SLOW.chunks
        assert answered.output_tokens == SLOW.chunks * SLOW.tokens_a_chunk
        first, last = truth.written_s[0], truth.written_s[-1]
        itl = (last - first) / (SLOW.chunks * SLOW.tokens_a_chunk - 1)
        assert answered.ttft_s is not None and answered.latency_s is not None and answered.itl_s is not None
        errors["ttft"].append(answered.ttft_s / (first - truth.received_s) - 1)
        errors["e2el"].append(answered.latency_s / (last - truth.received_s) - 1)
        errors["itl"].append(answered.itl_s / itl - 1)
        errors["gap"].append(np.mean(answered.gaps_s) / np.mean(np.diff(truth.written_s)) - 1)
        times = token_times(answered)
        assert times is not None and times.source == "events"
        # the first chunk's three tokens came together; the others are a third of a gap apart
        steady = np.diff(times.at_s[SLOW.tokens_a_chunk - 1 :])
        errors["token gap"].append(
            steady.mean() / (np.mean(np.diff(truth.written_s)) / SLOW.tokens_a_chunk) - 1
        )
    found = {name: float(np.quantile(np.abs(values), 0.25)) for name, values in errors.items()}
    assert max(found.values()) < 0.01, found


async def test_a_floor_is_measured_and_small_against_what_it_measures() -> None:
    floor = await measure_floor()
    assert 0 < floor.delay_ms <= floor.delay_p99_ms
    assert -1 < floor.ttft_bias_ms < 50, "a busy machine's; 0.4 ms on a quiet one"
    assert 0 < floor.chunk_us < 5000 and floor.chunks_a_second > 100


async def test_a_loop_that_is_held_up_is_noticed() -> None:
    async with LagWatch() as watch:
        for _ in range(20):
            await asyncio.sleep(0.011)
            until = time.perf_counter() + 0.03
            while time.perf_counter() < until:
                pass
    lag = watch.lag()
    assert lag.max_ms > 15 and 0.02 < lag.busy_share <= 1
    assert "late" in (lag.fault(10.0) or "")


def test_who_was_in_the_way_is_said() -> None:
    assert Lag(p50_ms=0, p99_ms=1.9, max_ms=9, busy_share=0.5).fault(None) is None
    assert "2.1 ms late" in (Lag(p50_ms=0, p99_ms=2.1, max_ms=9, busy_share=0.5).fault(None) or "")
    assert Lag(p50_ms=0, p99_ms=9, max_ms=9, busy_share=0.5).fault(200.0) is None
    assert "81 % of a core" in (Lag(p50_ms=0, p99_ms=0, max_ms=0, busy_share=0.81).fault(None) or "")


@pytest.mark.bench
@pytest.mark.parametrize("streams", [100, 400, 700])
def test_what_the_client_takes(streams: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Each stream sends 100 chunks a second: 700 are 70,000 a second, if the two processes can."""

    async def run() -> str:
        script = Script(chunks=300, first_ms=500, gap_ms=10)
        async with loopback() as url, Client(url) as client, LagWatch() as watch:
            await client.send(scripted("warm", script))
            start_s, processor_s = time.perf_counter(), time.thread_time()
            answers = await asyncio.gather(*(client.send(scripted(str(n), script)) for n in range(streams)))
            processor_s, taken_s = time.thread_time() - processor_s, time.perf_counter() - start_s
            truths = [await written(client, answered.key) for answered in answers[:50]]
        assert not any(answered.fault for answered in answers)
        chunks = sum(len(answered.chunks) for answered in answers)
        delays = np.concatenate(
            [np.subtract(a.content_s, t.written_s) for a, t in zip(answers[:50], truths, strict=True)]
        )
        return (
            f"{streams} streams: {chunks / taken_s:,.0f} chunks/s, {1e6 * processor_s / chunks:.1f} us of processor each "
            f"(a core takes {chunks / processor_s:,.0f}/s), delay P50 {1e3 * np.median(delays):.2f} "
            f"P99 {1e3 * np.percentile(delays, 99):.2f} ms, loop late P99 {watch.lag().p99_ms:.2f} ms"
        )

    told = uvloop.run(run())
    with capsys.disabled():
        print("\n" + told)
