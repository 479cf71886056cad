"""What records of a replay say: latencies and throughput as E15 to E21 define them, prefix hits, and what went wrong.

Takes ``Record``s; gives ``Scores``. Only measured requests with a whole answer count; percentiles are numpy's linear ones (E20).
Knows no server and no file.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from flashstep.bench.ledger import Samples
from flashstep.bench.load.metrics_page import Counted
from flashstep.bench.load.replay import Record

PERCENTILES = (10, 50, 90, 99)


class Spread(msgspec.Struct, frozen=True):
    mean: float
    p10: float
    p50: float
    p90: float
    p99: float


class Scores(msgspec.Struct, frozen=True, kw_only=True):
    """``spreads`` and ``metrics`` are under names of bench.metrics. ``spreads`` of interactivity_tps is the field AgentX calls
    output_token_throughput_per_user: its p90 is the fast tail (E17); the published P90 interactivity is the slow one (E18).
    """

    requests: int
    failed: int
    samples: Samples
    spreads: dict[str, Spread]
    metrics: dict[str, float]
    faults: tuple[str, ...]


def score(
    records: Sequence[Record], *, names: Sequence[str] | None = None, counted: Counted | None = None
) -> Scores:
    """Of one run's records. ``names`` are what the keys of each rank's requests begin with; None is for a run without ranks.
    ``counted`` is what the server counted meanwhile."""
    measured = [record for record in records if record.phase == "measured"]
    good = whole(records)
    samples = _samples(good, names)
    spreads = {
        name: _spread([value for value in values if value is not None])
        for name, values in samples.columns.items()
        if any(value is not None for value in values)
    }
    return Scores(
        requests=len(good),
        failed=len(measured) - len(good),
        samples=samples,
        spreads=spreads,
        metrics=_metrics(good, spreads) | ({} if counted is None else _accepted(counted)),
        faults=tuple(_faults(records)),
    )


def whole(records: Sequence[Record]) -> list[Record]:
    """Those that count: measured, and answered to their end."""
    return [record for record in records if record.phase == "measured" and record.answer.is_whole]


def joined_samples(parts: Sequence[Samples]) -> Samples:
    """Of several modes, whose keys differ."""
    return Samples(
        unit="request",
        keys=tuple(key for part in parts for key in part.keys),
        columns={name: tuple(v for part in parts for v in part.columns[name]) for name in COLUMNS},
    )


def _samples(good: Sequence[Record], names: Sequence[str] | None) -> Samples:
    rows = [(_key(record, names), record) for record in good]
    columns: dict[str, list[float | None]] = {name: [] for name in COLUMNS}
    for _, record in rows:
        for name, value in _values(record).items():
            columns[name].append(value)
    return Samples(
        unit="request",
        keys=tuple(key for key, _ in rows),
        columns={name: tuple(values) for name, values in columns.items()},
    )


COLUMNS = "ttft_ms itl_ms e2el_ms interactivity_tps input_tokens cached_tokens output_tokens".split()


TIMES = "ttft_ms itl_ms e2el_ms interactivity_tps".split()  # whose median stands for a run


def _values(record: Record) -> dict[str, float | None]:
    answer = record.answer
    itl = answer.itl_s or None  # 0 is all tokens in one chunk: nothing was timed
    return {
        "ttft_ms": _ms(answer.ttft_s),
        "itl_ms": _ms(itl),
        "e2el_ms": _ms(answer.latency_s),
        "interactivity_tps": None if itl is None else 1 / itl,
        "input_tokens": answer.prompt_tokens,
        "cached_tokens": answer.cached_tokens,
        "output_tokens": answer.output_tokens,
    }


def _key(record: Record, names: Sequence[str] | None) -> str:
    return record.key if names is None else f"{names[record.rank]}/{record.key}"


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds


def _spread(values: Sequence[float]) -> Spread:
    return Spread(float(np.mean(values)), *(float(value) for value in np.percentile(values, PERCENTILES)))


def _metrics(good: Sequence[Record], spreads: Mapping[str, Spread]) -> dict[str, float]:
    found: dict[str, float] = {name: spreads[name].p50 for name in TIMES if name in spreads}
    if "itl_ms" in spreads:
        found["p90_interactivity_tps"] = 1000 / spreads["itl_ms"].p90
        found["median_interactivity_tps"] = 1000 / spreads["itl_ms"].p50
    found |= throughput(good)
    blocks = sum(record.blocks for record in good)
    if blocks:
        found["theoretical_prefix_hit"] = sum(record.hit for record in good) / blocks
    told = [
        r.answer for r in good if r.answer.cached_tokens is not None and r.answer.prompt_tokens is not None
    ]
    if told:
        prompts = sum(answer.prompt_tokens or 0 for answer in told)
        found["prefix_hit"] = sum(answer.cached_tokens or 0 for answer in told) / max(1, prompts)
    return found


def _accepted(counted: Counted) -> dict[str, float]:
    found = {"acceptance_length": counted.acceptance_length, "acceptance_rate": counted.acceptance_rate}
    return {name: value for name, value in found.items() if value is not None}


def throughput(good: Sequence[Record]) -> dict[str, float]:
    """Requests and tokens a second, from the first one's begin to the last one's end (E19), by class of token.

    Input is split into cached and uncached where the server tells; tokens that it does not count are left out.
    """
    if not good:
        return {}
    answers = [record.answer for record in good]
    seconds = max(answer.ended_s for answer in answers) - min(answer.sent_s for answer in answers)
    output = sum(answer.output_tokens or 0 for answer in answers)
    prompts = sum(answer.prompt_tokens or 0 for answer in answers)
    cached = sum(answer.cached_tokens or 0 for answer in answers)
    found = {
        "request_rate": len(answers) / seconds,
        "output_tps": output / seconds,
        "total_tps": (output + prompts) / seconds,
    }
    if any(answer.cached_tokens is not None for answer in answers):
        found["cached_input_tps"] = cached / seconds
        found["uncached_input_tps"] = (prompts - cached) / seconds
    return found


def _faults(records: Sequence[Record]) -> list[str]:
    """A sentence for each kind of thing that went wrong, with how often and the first one's words."""
    broken = [record for record in records if not record.answer.is_whole]
    found = []
    for fault, count in Counter(record.answer.fault for record in broken).items():
        first = next(record for record in broken if record.answer.fault == fault)
        found.append(f"{count} requests: {fault}; the first, {first.key}: {first.answer.error}")
    ended = [record for record in records if record.answer.is_whole]
    uncounted = sum(record.answer.output_tokens is None for record in ended)
    if uncounted:
        found.append(f"{uncounted} answers came without a count of their tokens, so they have no ITL")
    short = [r for r in ended if r.answer.output_tokens not in {None, r.output_tokens}]
    if short:
        first = short[0]
        found.append(
            f"{len(short)} answers had another length than the recorded one; the first, {first.key}: "
            f"{first.answer.output_tokens} tokens, not {first.output_tokens}"
        )
    return found
