"""``flashstep bench replay``: recorded sessions of agents sent again to a server, and what its users would see."""

import asyncio
import os
import secrets
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro
from rich.table import Table

from flashstep.bench.ledger import Entry
from flashstep.bench.metrics import METRICS
from flashstep.bench.origin import origin
from flashstep.cli.extras import require_bench
from flashstep.cli.recording import Recording
from flashstep.cli.terminal import NOTES, OUT, note, require_folders
from flashstep.config.objects import read_object

if TYPE_CHECKING:
    from flashstep.bench.load.ranks import Mode
    from flashstep.bench.load.replay import Plan
    from flashstep.bench.load.replayed import Measured, Progress, Setup
    from flashstep.bench.load.scores import Scores
    from flashstep.bench.load.sessions import Session

INCOMPLETE = 1
RECENT = 200  # requests that the progress line looks at
TELL_EVERY_S = 30.0
LEAST = {
    "concurrency": 1,
    "warmup_requests": 0,
    "lag_s": 0,
    "grace_s": 0,
    "idle_cap_s": 0,
    "lane_idle_cap_s": 0,
}
OURS = {"model", "messages", "stream", "stream_options", "max_completion_tokens", "max_tokens", "n"}
# of the plan, what two arms must have in common
SETTINGS = "lanes duration_s grace_s start_from start_to warmup_requests idle_s lane_idle_s seed is_marked body".split()
# AgentX's own p90 of tokens a second and user is the fast tail (E17); the published P90 interactivity is the slow one (E18)
ROWS = {
    "ttft_ms": "TTFT, ms",
    "itl_ms": "ITL, ms",
    "e2el_ms": "request latency, ms",
    "interactivity_tps": "tokens/s of each user (p90: the fast tail)",
    "input_tokens": "input, tokens",
    "output_tokens": "output, tokens",
}
MOST_FAILED = 0.1  # share of requests (H4): above it a run says too little of the server


@dataclass(frozen=True, kw_only=True)
class BenchReplay:
    """Replay recorded sessions of agents against an OpenAI-compatible server, as AgentX does.

    The trace is weka JSON or JSON lines of ours (`flashstep bench traces` makes both). Each of --concurrency lanes replays one
    session at a time, with its sub-agents and its pauses. Without --duration-s every session is replayed once, whole; with it,
    lanes begin in the middle of sessions (--start-from, --start-to) and take the next session until the time is over.
    """

    trace: tyro.conf.Positional[Path]
    """a file or folder of recorded sessions"""
    url: str = "http://127.0.0.1:8000"
    """the server"""
    dp_urls: tuple[str, ...] = ()
    """data-parallel ranks instead of --url: the server of each"""
    dp_ranks: int = 0
    """data-parallel ranks behind --url, chosen by the header X-data-parallel-rank"""
    rank_modes: Literal["mirror", "lag", "both"] = "both"
    """with ranks: the same request to all at once, or rank r beginning r x --lag-s later, or one after the other"""
    lag_s: float = 5.0
    """how much later each rank begins than the one before it, in seconds"""
    served_model: str | None = None
    """model to ask for; without it the first that the server lists"""
    api_key: str | None = None
    """of the server; others on this machine see it with `ps`"""
    concurrency: int = 1
    """lanes: sessions replayed at a time (sub-agents come on top)"""
    duration_s: float | None = None
    """begin no request after so many seconds, warm-up not counted; without it every session is replayed once"""
    grace_s: float = 30.0
    """longest wait for requests under way when the time is over"""
    start_from: float | None = None
    """a lane joins its first session at this share of its time or later; 0.25 with --duration-s, else 0"""
    start_to: float | None = None
    """and at this share or earlier; 0.75 with --duration-s, else 0"""
    warmup_requests: int = 0
    """one-token requests of each lane before measuring, after those that fill the cache up to where it joins"""
    idle_cap_s: float = 10.0
    """longest time in which nothing runs: then all pauses are shortened alike"""
    lane_idle_cap_s: float = 300.0
    """likewise of one lane"""
    cache_bust: bool = True
    """text of this run alone, and a mark in each replay of a session: only its own earlier turns, and system prompts, are hit"""
    run_id: str | None = None
    """what the text depends on; without it each run has another, and hits nothing that an earlier run left in the cache"""
    ignore_eos: bool = True
    """ask for answers of the recorded length, whatever the model says (not every server knows the field)"""
    extra_body: str | None = None
    """JSON object of further fields for each request, such as '{"temperature": 1}'"""
    tokenizer: Path | None = None
    """tokenizer.json, or its folder, to make text of the recorded lengths; without it the server is asked for lengths"""
    timeout_s: float = 21600.0
    """longest wait for one whole answer"""
    seed: int = 42
    """of where lanes join their first sessions"""
    raw: Path | None = None
    """keep each request with the times of all its chunks in this file of JSON lines, as it ends"""
    recording: tyro.conf.OmitArgPrefixes[Recording] = field(default_factory=Recording)

    def run(self) -> int:
        self._check()
        require_bench("aiohttp")
        from flashstep.bench.load.replayed import measure
        from flashstep.bench.load.traces import digest, read

        sessions = read(self.trace)
        setup = self._setup(sessions)
        with _progress() as progress:
            measured = asyncio.run(measure(setup, progress=progress))
        scores = measured.scores()
        for mode, found in scores.items():
            _show(mode, found, measured)
        entry = self._entry(
            measured, scores, {"trace": digest(sessions), "sessions": len(sessions)}, setup.plan
        )
        OUT.print(_floor(measured))
        for fault in entry.faults:
            OUT.print(f"FAULT: {fault}")
        self.recording.keep(entry)
        failed = sum(found.failed for found in scores.values())
        asked = failed + sum(found.requests for found in scores.values())
        return 0 if entry.complete and asked and failed <= MOST_FAILED * asked else INCOMPLETE

    def _check(self) -> None:
        self.recording.check()
        wrong = [*self._wrong_ranks(), *self._wrong_numbers()]
        if self.run_id is not None and not self.cache_bust:
            wrong.append("--run-id is what makes a run's text its own, which --no-cache-bust turns off")
        if self.raw is not None and self.raw.exists():
            wrong.append(f"--raw is {self.raw}, which is there already")
        wrong += [f"--extra-body: {problem}" for problem in self._extra()[1]]
        if wrong:
            raise ValueError("; ".join(wrong))
        require_folders({"--raw": self.raw})

    def _wrong_ranks(self) -> Iterator[str]:
        if self.dp_urls and (self.dp_ranks or self.url != BenchReplay.url):
            yield "--dp-urls names the ranks' servers: leave --url and --dp-ranks out"
        if len(self.dp_urls) == 1 or self.dp_ranks == 1 or self.dp_ranks < 0:
            yield "one rank has nobody to be compared with: give two or more, or --url alone"
        if not self._num_ranks and (self.rank_modes, self.lag_s) != (
            BenchReplay.rank_modes,
            BenchReplay.lag_s,
        ):
            yield "--rank-modes and --lag-s are for ranks: give --dp-urls or --dp-ranks, too"

    def _wrong_numbers(self) -> Iterator[str]:
        for name, least in LEAST.items():
            if not getattr(self, name) >= least:
                yield f"--{name.replace('_', '-')} is {getattr(self, name)}; it must be at least {least}"
        for name, value in (("duration-s", self.duration_s), ("timeout-s", self.timeout_s)):
            if value is not None and not value > 0:
                yield f"--{name} is {value}; it must be above 0"
        begin, end = self._start()
        if not 0 <= begin <= end <= 1:
            yield (
                f"--start-from {begin:g} and --start-to {end:g} must be shares from 0 to 1, the first not above the second"
            )

    @property
    def _num_ranks(self) -> int:
        return len(self.dp_urls) or self.dp_ranks

    def _start(self) -> tuple[float, float]:
        """Where lanes join their first sessions, as shares of these."""
        begin, end = (0.0, 0.0) if self.duration_s is None else (0.25, 0.75)
        begin = begin if self.start_from is None else self.start_from
        return begin, max(end, begin) if self.start_to is None else self.start_to

    def _extra(self) -> tuple[dict[str, Any], list[str]]:
        if self.extra_body is None:
            return {}, []
        fields, problems = read_object(self.extra_body, example='{"temperature": 1}')
        ours = sorted(set(fields) & OURS)
        return dict(fields), problems + [f"{name} is the replay's own" for name in ours]

    def _modes(self) -> tuple["Mode", ...]:
        if not self._num_ranks:
            return ("single",)
        return ("mirror", "lag") if self.rank_modes == "both" else (self.rank_modes,)

    def _setup(self, sessions: Sequence["Session"]) -> "Setup":
        from flashstep.bench.load.replay import Plan
        from flashstep.bench.load.replayed import Setup

        begin, end = self._start()
        extra, _ = self._extra()
        plan = Plan(
            lanes=self.concurrency,
            duration_s=self.duration_s,
            grace_s=self.grace_s,
            start_from=begin,
            start_to=end,
            warmup_requests=self.warmup_requests,
            idle_s=self.idle_cap_s,
            lane_idle_s=self.lane_idle_cap_s,
            seed=self.seed,
            body=({"ignore_eos": True} if self.ignore_eos else {}) | extra,
            run=self.run_id if self.run_id is not None else secrets.token_hex(8),
            is_marked=self.cache_bust,
        )
        return Setup(
            sessions=sessions,
            plan=plan,
            urls=self.dp_urls or (self.url,),
            dp_ranks=self.dp_ranks,
            modes=self._modes(),
            lag_s=self.lag_s,
            model=self.served_model,
            api_key=self.api_key,
            tokenizer=self.tokenizer,
            timeout_s=self.timeout_s,
            raw=self.raw,
        )

    def _entry(
        self, measured: "Measured", scores: Mapping["Mode", "Scores"], trace: dict[str, Any], plan: "Plan"
    ) -> Entry:
        """All modes in one line: their samples' keys begin with the mode and the rank, and so do metrics but the first mode's."""
        from flashstep.bench.load.scores import joined_samples

        first, *_ = scores.values()
        settings = trace | {
            "words": measured.words,
            "ranks": self._num_ranks,
            "modes": list(self._modes()),
            "lag_s": self.lag_s if self._num_ranks else None,
            **{name: getattr(plan, name) for name in SETTINGS},
        }
        gap = measured.gap()
        metrics = first.metrics if gap is None else first.metrics | {"lockstep_gap": gap}
        falsified = (measured.subject["card"] or {}).get("falsified_by") or []  # flashstep's own
        routing = [name.removesuffix(" routing") for name in falsified if name.endswith(" routing")]
        counted = measured.counted.values()
        ledger_folder = self.recording.ledger.parent if self.recording.ledger is not None else Path()
        return Entry(
            kind="replay",
            origin=origin(),
            settings=settings,
            subject=measured.subject,
            samples=joined_samples([found.samples for found in scores.values()]),
            metrics=metrics,
            seed=self.seed,
            job=measured.job,
            detail=measured.detail() | {"run_id": plan.run},
            faults=measured.faults(),
            complete=not measured.stopped,
            synthetic_acceptance=any(each.synthetic for each in counted)
            or "synthetic acceptance" in falsified,
            routing=routing[0] if routing else "real",
            raw=None if self.raw is None else os.path.relpath(self.raw, ledger_folder),
        )


@contextmanager
def _progress() -> Generator[Callable[["Progress"], None]]:
    """A line that changes on a terminal; elsewhere a line now and then."""
    if NOTES.is_terminal:
        with NOTES.status("reaching the server") as status:
            yield lambda now: status.update(_now(now))
        return
    last_s = time.monotonic()

    def tell(now: "Progress") -> None:
        nonlocal last_s
        if time.monotonic() - last_s >= TELL_EVERY_S:
            last_s = time.monotonic()
            note(_now(now))

    yield tell


def _now(now: "Progress") -> str:
    """What a run has so far, in one line."""
    recent = [record.answer for record in now.records[-RECENT:] if record.answer.is_whole]
    failed = sum(not record.answer.is_whole for record in now.records)
    itl = sorted(answer.itl_s for answer in recent if answer.itl_s)
    text = f"{now.phase} ({now.mode}): {len(now.records)} requests answered, {now.running} under way"
    text += f", {failed} failed" if failed else ""
    return text + (f"; ITL of the last {len(itl)}: median {1000 * itl[len(itl) // 2]:.2f} ms" if itl else "")


def _floor(measured: "Measured") -> str:
    floor = measured.floor
    late = max(lag.p99_ms for lag in measured.lags.values())
    return (
        f"this client's floor: {floor.ttft_bias_ms:+.2f} ms in TTFT, {floor.delay_ms:.3f} ms from writing a chunk to reading it "
        f"(P99 {floor.delay_p99_ms:.3f}); its event loop was {late:.2f} ms late (P99)"
    )


def _show(mode: "Mode", found: "Scores", measured: "Measured") -> None:
    named = "" if mode == "single" else f"{mode}: "
    OUT.print(
        f"{named}{found.requests} requests, {found.failed} failed; {measured.skipped_s[mode]:.1f} s of idle time left out"
    )
    if not found.spreads:
        return
    table = Table("", "mean", "p10", "p50", "p90", "p99")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, title in ROWS.items():
        if name in found.spreads:
            spread = found.spreads[name]
            values = (spread.mean, spread.p10, spread.p50, spread.p90, spread.p99)
            table.add_row(title, *(f"{value:,.2f}" for value in values))
    OUT.print(table)
    for name, value in found.metrics.items():
        metric = METRICS[name]
        if metric.of == "request":
            continue  # its distribution is in the table
        shown = f"{100 * value:.1f}%" if metric.unit == "" else f"{value:,.1f} {metric.unit}"
        OUT.print(f"{metric.words}: {shown}")
    if mode != "single":
        for rank, value in enumerate(measured.rank_tps(mode)):
            OUT.print(f"{mode}, rank {rank}: {value:,.1f} tokens/s in all")
    gap = measured.gap()
    if mode == "lag" and gap is not None:
        OUT.print(f"{METRICS['lockstep_gap'].words}: {100 * gap:.1f}%")
