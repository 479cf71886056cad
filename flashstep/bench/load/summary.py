"""The figures of a run from its records: latencies, throughput, goodput, and sentences about all that went wrong.

Definitions are E13 to E20: percentiles by linear interpolation, throughput over the profiling window (earliest start to
latest end of the requests that succeeded), failed requests and warm-ups in no figure. Takes ``Asked``, of a plan or of a
replay; gives ``Summary``. Knows no network.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from flashstep.bench.ledger import Samples
from flashstep.bench.load.client import Answered
from flashstep.bench.load.metrics_page import Counted
from flashstep.bench.load.token_times import token_times
from flashstep.bench.metrics import MOST_FAILED

MOST_GAPS = 1 << 22  # kept of one kind: 32 MiB
PERCENTILES = (1, 5, 10, 25, 50, 75, 90, 95, 99)
SLOS = {"ttft": "ttft_ms", "tpot": "tpot_ms", "e2el": "e2el_ms"}


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


def _itl_s(answered: Answered) -> float | None:
    """None of an answer whose tokens all came in one chunk, too: nothing was timed."""
    return answered.itl_s or None


def _interactivity(answered: Answered) -> float | None:
    itl_s = _itl_s(answered)
    return None if itl_s is None else 1.0 / itl_s


# one value a request
COLUMNS: Mapping[str, Callable[[Answered], float | None]] = {
    "ttft_ms": lambda answered: _ms(answered.ttft_s),
    "tpot_ms": lambda answered: _ms(_itl_s(answered)),
    "itl_ms": lambda answered: _ms(_itl_s(answered)),
    "e2el_ms": lambda answered: _ms(answered.latency_s),
    "interactivity_tps": _interactivity,
    "input_tokens": lambda answered: answered.prompt_tokens,
    "cached_tokens": lambda answered: answered.cached_tokens,
    "output_tokens": lambda answered: answered.output_tokens,
}
TIMES = ("ttft_ms", "tpot_ms", "itl_ms", "e2el_ms", "interactivity_tps")


class Asked(NamedTuple):
    """A request and its answer. ``key`` is its sample's; wishes are tokens, None where there is none."""

    key: str
    answered: Answered
    wished_prompt: int | None
    wished_output: int | None


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """A distribution. ``std`` is over its values (E20); ``percentiles`` by their number."""

    count: int
    mean: float
    std: float
    minimum: float
    maximum: float
    percentiles: dict[str, float]

    @classmethod
    def of(cls, values: Sequence[float] | np.ndarray) -> "Spread | None":
        """None of no values."""
        if not len(values):
            return None
        array = np.asarray(values, dtype=np.float64)
        found = np.percentile(array, PERCENTILES)
        return cls(
            count=len(array),
            mean=float(array.mean()),
            std=float(array.std()),
            minimum=float(array.min()),
            maximum=float(array.max()),
            percentiles={f"p{place}": float(value) for place, value in zip(PERCENTILES, found, strict=True)},
        )

    def at(self, place: int) -> float:
        return self.percentiles[f"p{place}"]


class Gaps(msgspec.Struct, frozen=True, kw_only=True):
    """All gaps of all requests, in ms: between content chunks as the client read them, and between tokens, where a chunk's
    tokens are spread over the gap before it. ``tokens_known_from`` counts requests by how that number is known; None could
    not be spread. Of more than ``MOST_GAPS`` every ``every``-th is in the spreads."""

    chunks: Spread | None
    tokens: Spread | None
    tokens_a_chunk: float | None
    tokens_known_from: dict[str, int]
    every: int = 1


class _Kept:
    """Values as they come, in a memory that has an end: where it is full, every second one goes."""

    def __init__(self) -> None:
        self._parts: list[np.ndarray] = []
        self._size = self._seen = 0
        self.every = 1

    def add(self, values: np.ndarray) -> None:
        kept = values[-self._seen % self.every :: self.every]
        self._seen += len(values)
        self._size += len(kept)
        self._parts.append(kept)
        while self._size > MOST_GAPS:
            thinned = np.concatenate(self._parts)[::2]
            self._parts, self._size, self.every = [thinned], len(thinned), 2 * self.every

    def spread_ms(self) -> Spread | None:
        return Spread.of(1e3 * np.concatenate(self._parts)) if self._parts else None


class GapTally:
    """Takes answers as they come, so that nobody has to keep their chunks; gives ``Gaps``."""

    def __init__(self) -> None:
        self._chunk_gaps_s, self._token_gaps_s = _Kept(), _Kept()
        self._sources: Counter[str] = Counter()
        self._tokens = self._chunks = 0

    def add(self, answered: Answered) -> None:
        if answered.fault:
            return
        at_s = np.array(answered.content_s)
        self._chunk_gaps_s.add(np.diff(at_s))
        times = token_times(answered)
        self._sources["none" if times is None else times.source] += 1
        if times is not None:
            self._token_gaps_s.add(np.diff(times.at_s))
            self._tokens += len(times.at_s)
            self._chunks += len(at_s)

    def gaps(self) -> Gaps:
        return Gaps(
            chunks=self._chunk_gaps_s.spread_ms(),
            tokens=self._token_gaps_s.spread_ms(),
            tokens_a_chunk=self._tokens / self._chunks if self._chunks else None,
            tokens_known_from=dict(self._sources),
            every=max(self._chunk_gaps_s.every, self._token_gaps_s.every),
        )


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """``spreads`` are of the columns by name, ``samples`` their values; ``metrics`` are named as in ``bench.metrics``, where a
    quantity of requests is its median. ``faults`` are sentences; ``failures`` counts failed requests by kind."""

    requests: int
    succeeded: int
    window_s: float | None
    samples: Samples
    spreads: dict[str, Spread]
    gaps: Gaps
    metrics: dict[str, float]
    failures: dict[str, int]
    faults: tuple[str, ...]

    @property
    def failed(self) -> int:
        return self.requests - self.succeeded

    @property
    def is_valid(self) -> bool:
        """Enough was answered to say something of the server: H4's rule, which is every run's."""
        return self.succeeded > 0 and self.failed <= MOST_FAILED * self.requests


def summarize(
    asked: Sequence[Asked],
    *,
    gaps: Gaps | None = None,
    slos_ms: Mapping[str, float] | None = None,
    counted: Counted | None = None,
) -> Summary:
    """The figures of ``asked``, which are one stream's (their chunks are not looked at). ``slos_ms`` are limits by ``SLOS``."""
    gaps, slos_ms, counted = gaps or GapTally().gaps(), slos_ms or {}, counted or Counted()
    whole = [each for each in asked if not each.answered.fault]
    answers = [each.answered for each in whole]
    columns = {name: tuple(value(answered) for answered in answers) for name, value in COLUMNS.items()}
    samples = Samples(unit="request", keys=tuple(each.key for each in whole), columns=columns)
    spreads = {
        name: spread for name in COLUMNS if (spread := Spread.of(tuple(samples.column(name).values())))
    }
    window_s = _window_s(answers)
    metrics = {name: spreads[name].at(50) for name in TIMES if name in spreads}
    metrics |= throughput(answers)
    if "itl_ms" in spreads:
        metrics["p90_interactivity_tps"] = 1e3 / spreads["itl_ms"].at(90)  # E18: the slow tail
        metrics["median_interactivity_tps"] = 1e3 / spreads["itl_ms"].at(50)
    if slos_ms and window_s:
        good = _good(samples, slos_ms)
        if good is not None:
            metrics["goodput"] = good / window_s
    metrics |= _own_figures(counted)
    return Summary(
        requests=len(asked),
        succeeded=len(whole),
        window_s=window_s,
        samples=samples,
        spreads=spreads,
        gaps=gaps,
        metrics=metrics,
        failures=dict(Counter(each.answered.fault for each in asked if each.answered.fault)),
        faults=(*_failures(asked), *_counting(answers, slos_ms), *_lengths(whole)),
    )


def _window_s(answers: Sequence[Answered]) -> float | None:
    """E19: latest end minus earliest start."""
    if not answers:
        return None
    return max(answered.ended_s for answered in answers) - min(answered.sent_s for answered in answers)


def throughput(answers: Sequence[Answered]) -> dict[str, float]:
    """Requests and tokens a second over the window (E19), by class of token; what one answer does not tell is left out."""
    window_s = _window_s(answers)
    if not window_s:
        return {}
    found = {"request_rate": len(answers) / window_s}
    outputs = [answered.output_tokens for answered in answers if answered.output_tokens is not None]
    prompts = [answered.prompt_tokens for answered in answers if answered.prompt_tokens is not None]
    if len(outputs) == len(answers):
        found["output_tps"] = sum(outputs) / window_s
        if len(prompts) == len(answers):
            found["total_tps"] = (sum(outputs) + sum(prompts)) / window_s
    cached = [answered.cached_tokens for answered in answers if answered.cached_tokens is not None]
    if len(cached) == len(prompts) == len(answers):
        found["cached_input_tps"] = sum(cached) / window_s
        found["uncached_input_tps"] = (sum(prompts) - sum(cached)) / window_s
        found["prefix_hit"] = sum(cached) / max(1, sum(prompts))
    return found


def _good(samples: Samples, slos_ms: Mapping[str, float]) -> int | None:
    """Requests within every limit; None where a limit needs a time per token that some answer has not. One token has none."""
    outputs = samples.columns["output_tokens"]
    timed = zip(outputs, samples.columns["tpot_ms"], strict=True)
    if "tpot" in slos_ms and any(tokens is None or (tokens > 1 and tpot is None) for tokens, tpot in timed):
        return None
    limits = [(samples.columns[SLOS[name]], limit) for name, limit in slos_ms.items()]
    good = 0
    for place, output_tokens in enumerate(outputs):
        values = [
            (column[place], limit)
            for column, limit in limits
            if not (column is samples.columns["tpot_ms"] and (output_tokens or 0) < 2)
        ]
        good += all(value is not None and value <= limit for value, limit in values)
    return good


def _own_figures(counted: Counted) -> dict[str, float]:
    """What the server counted of the run."""
    told = {
        "acceptance_length": counted.acceptance_length,
        "acceptance_rate": counted.acceptance_rate,
    }
    return {name: value for name, value in told.items() if value is not None}


def _failures(asked: Sequence[Asked]) -> list[str]:
    """A sentence for each kind of failure, with its number and one of its reasons."""
    failed: dict[str, list[Answered]] = {}
    for each in asked:
        if each.answered.fault:
            failed.setdefault(each.answered.fault, []).append(each.answered)
    return [
        f"{len(each)} of {len(asked)} requests failed: {kind} ({_reasons(each)})"
        for kind, each in sorted(failed.items())
    ]


def _reasons(failed: Sequence[Answered]) -> str:
    """The most frequent sentence, and how many others there are."""
    told = Counter(answered.error for answered in failed).most_common()
    return told[0][0] + (f"; and {len(told) - 1} other reasons" if len(told) > 1 else "")


def _counting(answers: Sequence[Answered], slos_ms: Mapping[str, Any]) -> list[str]:
    """What is left out because the server did not count."""
    told = []
    uncounted = sum(answered.output_tokens is None for answered in answers)
    if uncounted:
        lost = (
            "TPOT, ITL, interactivity" + (", goodput" if "tpot" in slos_ms else "") + " and token throughput"
        )
        told.append(
            f"{uncounted} of {len(answers)} answers came without a count of tokens: {lost} leave them out"
        )
    listed = sum(answered.tokens_from == "events" for answered in answers)
    if listed:
        told.append(
            f"the output tokens of {listed} of {len(answers)} answers are the sum of what their events listed"
        )
    at_once = sum(bool(answered.itl_s == 0) for answered in answers)
    if at_once:
        told.append(
            f"{at_once} of {len(answers)} answers came as one chunk: TPOT, ITL, interactivity and a tpot limit leave them out"
        )
    unread = [answered.unread for answered in answers if answered.unread]
    if unread:
        told.append(
            f"{len(unread)} of {len(answers)} answers had figures that are none; the first: {unread[0]}"
        )
    empty = sum(answered.first_s is None for answered in answers)
    if empty:
        told.append(f"{empty} of {len(answers)} answers had no content, and so no time to first token")
    return told


def _lengths(whole: Sequence[Asked]) -> list[str]:
    """Where the server's counts are not what was wished."""
    told = []
    for name, pairs in {
        "prompts": [(each.wished_prompt, each.answered.prompt_tokens) for each in whole],
        "answers": [(each.wished_output, each.answered.output_tokens) for each in whole],
    }.items():
        known = [(wish, real) for wish, real in pairs if wish is not None and real is not None]
        other = [abs(real - wish) for wish, real in known if real != wish]
        if other:
            told.append(
                f"{len(other)} of {len(known)} {name} have other lengths than wished, by {max(other)} tokens at most"
            )
    return told
