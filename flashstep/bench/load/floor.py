"""What the load client itself adds to the times it reports, measured against a scripted server on the loopback.

Takes nothing; gives ``Floor``. The server is a child process that ends with the measurement. Also: how late the client's event
loop is while a real run goes on, and how busy. Knows no real server.
"""

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncGenerator

import msgspec
import numpy as np

from flashstep.bench.load.client import Answered, Call, Client
from flashstep.bench.load.loopback import Script, Times

START_S = 30.0
PACED = Script(chunks=20, first_ms=5.0, gap_ms=2.0)
MANY = Script(chunks=100, first_ms=5.0, gap_ms=2.0)
BURST = Script(chunks=4000)
MANY_STREAMS = 16
PACED_REQUESTS = 8
TICK_S = 0.01
BUSY_SHARE = 0.8  # of one core: above, the client and not the server may set the pace
LATE_S = 0.002  # P99 of the loop's lag below this is never called late
LATE_SHARE = 0.05  # of the median time to first token


class Floor(msgspec.Struct, frozen=True, kw_only=True):
    """Of this client on this machine, now.

    ``ttft_bias_ms`` is what a time to first token has too much: the median of the client's own minus the server's (first
    event written minus request read), so that connection and transport are inside. ``delay_ms`` and ``delay_p99_ms`` are from
    an event's writing to its reading. ``chunk_us`` is the processor's time for one chunk, of several streams whose chunks
    come one by one; ``chunks_a_second`` is what the client takes of chunks that come together, as fast as they can be
    written.
    """

    ttft_bias_ms: float
    delay_ms: float
    delay_p99_ms: float
    chunk_us: float
    chunks_a_second: float


@contextlib.asynccontextmanager
async def loopback() -> AsyncGenerator[str]:
    """The URL of a scripted server, which ends with the context."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "flashstep.bench.load.loopback",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        port = await asyncio.wait_for(process.stdout.readline(), START_S)
        if not port:
            raise RuntimeError("the scripted server for the client's floor did not start")
        yield f"http://127.0.0.1:{int(port)}"
    finally:
        process.stdin.close()
        await process.wait()


def scripted(key: str, script: Script) -> Call:
    """A call that the scripted server answers by ``script``."""
    body = {"script": msgspec.to_builtins(script), "stream": True}
    return Call(key=key, path="/v1/chat/completions", body=body, headers={"X-Request-ID": key})


async def written(client: Client, key: str) -> Times:
    """The server's own times of the call ``key``."""
    told = await client.get(f"/times/{key}")
    assert told is not None
    return msgspec.json.decode(told, type=Times)


async def measure_floor() -> Floor:
    """Half a second of paced and of bursting streams."""
    async with loopback() as url, Client(url, timeout_s=START_S) as client:
        await client.send(scripted("first", BURST))  # connections and code are warm then
        paced = [await client.send(scripted(f"paced-{n}", PACED)) for n in range(PACED_REQUESTS)]
        truths = [await written(client, answered.key) for answered in paced]
        processor_s = time.thread_time()
        many = await asyncio.gather(*(client.send(scripted(f"many-{n}", MANY)) for n in range(MANY_STREAMS)))
        processor_s = time.thread_time() - processor_s
        start_s = time.perf_counter()
        burst = await client.send(scripted("burst", BURST))
        taken_s = time.perf_counter() - start_s
    biases = [_ttft_bias(answered, truth) for answered, truth in zip(paced, truths, strict=True)]
    delays = [
        read_s - written_s
        for answered, truth in zip(paced, truths, strict=True)
        for read_s, written_s in zip(answered.content_s, truth.written_s, strict=True)
    ]
    return Floor(
        ttft_bias_ms=1e3 * float(np.median(biases)),
        delay_ms=1e3 * float(np.median(delays)),
        delay_p99_ms=1e3 * float(np.percentile(delays, 99)),
        chunk_us=1e6 * processor_s / sum(len(answered.chunks) for answered in many),
        chunks_a_second=len(burst.chunks) / taken_s,
    )


def _ttft_bias(answered: Answered, truth: Times) -> float:
    assert answered.ttft_s is not None, answered.error
    return answered.ttft_s - (truth.written_s[0] - truth.received_s)


class Lag(msgspec.Struct, frozen=True, kw_only=True):
    """How late the event loop was during a run (its ticks, against when they were due), and the share of one core it took."""

    p50_ms: float
    p99_ms: float
    max_ms: float
    busy_share: float

    def fault(self, median_ttft_ms: float | None) -> str | None:
        """The sentence that says that the client itself was in the way, if it was."""
        if self.busy_share > BUSY_SHARE:
            return (
                f"the load client took {100 * self.busy_share:.0f} % of a core: it, not the server, may have set the pace; "
                "send less from one process"
            )
        allowed_ms = max(1e3 * LATE_S, LATE_SHARE * (median_ttft_ms or 0.0))
        if self.p99_ms > allowed_ms:
            return (
                f"the load client's event loop was {self.p99_ms:.1f} ms late (P99; {allowed_ms:.1f} ms would do): times hold its "
                "delay too; give it a core of its own, or send less"
            )
        return None


class LagWatch:
    """Ticks while a run goes on: ``async with LagWatch() as watch: ...``, then ``watch.lag()``."""

    async def __aenter__(self) -> "LagWatch":
        self._late: list[float] = []
        self._start_s, self._processor_s = time.perf_counter(), time.thread_time()
        self._ticking = asyncio.create_task(self._tick())
        return self

    async def __aexit__(self, *_error: object) -> None:
        self._ticking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._ticking
        self._processor_s = time.thread_time() - self._processor_s
        self._taken_s = time.perf_counter() - self._start_s

    def lag(self) -> Lag:
        late = np.array(self._late or [0.0]) * 1e3
        return Lag(
            p50_ms=float(np.percentile(late, 50)),
            p99_ms=float(np.percentile(late, 99)),
            max_ms=float(late.max()),
            busy_share=self._processor_s / max(self._taken_s, 1e-9),
        )

    async def _tick(self) -> None:
        while True:
            due_s = time.perf_counter() + TICK_S
            await asyncio.sleep(TICK_S)
            self._late.append(max(0.0, time.perf_counter() - due_s))
