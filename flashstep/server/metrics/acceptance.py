"""What speculation did, in the server's words: Prometheus counters, a log line each interval, the counts of one answer.

Takes ``Acceptance``. Synthetic acceptance (drafts that stood by lot) never bears a name of real acceptance: its counters, its log
event and its field in an answer are others, so no dashboard and no benchmark can take one for the other. Knows no HTTP.
"""

import asyncio
import time
from collections.abc import Iterator, Sequence

import msgspec
from prometheus_client.core import CounterMetricFamily

from flashstep.ipc.client import EngineClient
from flashstep.request import Acceptance
from flashstep.telemetry.log import Log

REAL = "vllm:spec_decode"
SYNTHETIC = "flashstep:synthetic_spec_decode"

_log = Log("server")


def counters(
    acceptance: Acceptance, *, names: Sequence[str], values: Sequence[str]
) -> Iterator[CounterMetricFamily]:
    """The counters, under vLLM's names if the acceptance is real; ``names`` and ``values`` are the labels of all metrics."""
    prefix, kind = (SYNTHETIC, "SYNTHETIC: ") if acceptance.synthetic else (REAL, "")
    counts = {
        "num_drafts": ("Steps of a request that had drafts.", acceptance.steps),
        "num_draft_tokens": (
            "Drafts that were verified, or that a grammar forbade.",
            acceptance.draft_tokens,
        ),
        "num_accepted_tokens": ("Drafts that stood.", acceptance.accepted_tokens),
    }
    for name, (text, value) in counts.items():
        counter = CounterMetricFamily(f"{prefix}_{name}", kind + text, labels=names)
        counter.add_metric(values, value)
        yield counter
    counter = CounterMetricFamily(
        f"{prefix}_num_accepted_tokens_per_pos",
        f"{kind}Drafts that stood, by their place in the block.",
        labels=[*names, "position"],
    )
    for position, value in enumerate(acceptance.per_position):
        counter.add_metric([*values, str(position)], value)
    yield counter


def added(parts: Sequence[Acceptance]) -> Acceptance:
    """The sums of all counts, so that a ratio of the sum weighs every step (or draft) alike, whichever part it is of."""
    first = parts[0]
    assert all((part.synthetic, part.num_tokens) == (first.synthetic, first.num_tokens) for part in parts)
    return Acceptance(
        synthetic=first.synthetic,
        num_tokens=first.num_tokens,
        steps=sum(part.steps for part in parts),
        draft_tokens=sum(part.draft_tokens for part in parts),
        accepted_tokens=sum(part.accepted_tokens for part in parts),
        histogram=tuple(sum(counts) for counts in zip(*(part.histogram for part in parts), strict=True)),
        per_position=tuple(
            sum(counts) for counts in zip(*(part.per_position for part in parts), strict=True)
        ),
    )


class AcceptanceLog:
    """Tells what came to the counters since it told last; nothing if no step had drafts."""

    def __init__(self, *, now: float) -> None:
        self._before: Acceptance | None = None
        self._at = now

    def tell(self, counted: Acceptance, *, now: float) -> None:
        """``counted`` are counters since the engine's start, ``now`` is a monotonic time in seconds."""
        fresh, seconds = _since(counted, self._before), now - self._at
        self._before, self._at = counted, now
        if not fresh.steps:
            return
        _log.info(
            "SYNTHETIC acceptance" if fresh.synthetic else "acceptance",
            mean_acceptance_length=fresh.mean_length,
            draft_acceptance_rate=fresh.rate,
            per_position_rates=",".join(f"{rate:.3f}" for rate in fresh.position_rates),
            accepted_tokens_per_s=fresh.accepted_tokens / seconds,
            drafted_tokens_per_s=fresh.draft_tokens / seconds,
            accepted_tokens=fresh.accepted_tokens,
            draft_tokens=fresh.draft_tokens,
            steps=fresh.steps,
        )


async def log_acceptance(client: EngineClient, *, interval_s: float) -> None:
    """Tell every ``interval_s`` (0: never), and when cancelled, what the counters say; silent without speculation."""
    if interval_s == 0:
        return
    log = AcceptanceLog(now=time.monotonic())

    def tell() -> None:
        if client.stats is not None and client.stats.acceptance is not None:
            log.tell(client.stats.acceptance, now=time.monotonic())

    try:
        while True:
            await asyncio.sleep(interval_s)
            tell()
    finally:
        tell()


def _since(counted: Acceptance, before: Acceptance | None) -> Acceptance:
    if before is None:
        return counted
    return msgspec.structs.replace(
        counted,
        steps=counted.steps - before.steps,
        draft_tokens=counted.draft_tokens - before.draft_tokens,
        accepted_tokens=counted.accepted_tokens - before.accepted_tokens,
        histogram=tuple(a - b for a, b in zip(counted.histogram, before.histogram, strict=True)),
        per_position=tuple(a - b for a, b in zip(counted.per_position, before.per_position, strict=True)),
    )
