"""``flashstep bench replay``: recorded sessions of agents sent again to a server, and what its users would see."""

import functools
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro

from flashstep.bench.ledger import Entry
from flashstep.bench.load.cards import falsified_by
from flashstep.bench.origin import Origin, without_secrets
from flashstep.cli.extras import require_bench
from flashstep.cli.flags import too_small
from flashstep.cli.load_progress import LoadProgress
from flashstep.cli.load_run import Asking, Run, keep_run, run_load
from flashstep.cli.load_tables import show_replay
from flashstep.cli.recording import Recording
from flashstep.cli.terminal import OUT

if TYPE_CHECKING:
    from flashstep.bench.load.ranks import Mode
    from flashstep.bench.load.replay import Plan
    from flashstep.bench.load.replayed import Measured, Setup
    from flashstep.bench.load.sessions import Session
    from flashstep.bench.load.stopping import Stopping

LEAST = {
    "max_concurrency": 1,
    "warmup_requests": 0,
    "lag_s": 0,
    "grace_s": 0,
    "idle_cap_s": 0,
    "lane_idle_cap_s": 0,
}
OURS = {"model", "messages", "stream", "stream_options", "max_completion_tokens", "max_tokens", "n"}
# of the plan, what two arms must have in common
SETTINGS = "lanes duration_s grace_s start_from start_to warmup_requests idle_s lane_idle_s seed is_marked body".split()


@dataclass(frozen=True, kw_only=True)
class BenchReplay:
    """Replay recorded sessions of agents against an OpenAI-compatible server, as AgentX does.

    The trace is weka JSON or JSON lines of ours (`flashstep bench traces` makes both). Each of --max-concurrency lanes replays
    one session at a time, with its sub-agents and its pauses. Without --duration-s every session is replayed once, whole; with
    it, lanes begin in the middle of sessions (--start-from, --start-to) and take the next session until the time is over.
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
    max_concurrency: int = 1
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
    tokenizer: Path | None = None
    """tokenizer.json, or its folder, to make text of the recorded lengths; without it the server is asked for lengths"""
    timeout_s: float = 21600.0
    """longest wait for one whole answer"""
    seed: int = 42
    """of where lanes join their first sessions"""
    asking: tyro.conf.OmitArgPrefixes[Asking] = field(default_factory=Asking)
    recording: tyro.conf.OmitArgPrefixes[Recording] = field(default_factory=Recording)

    def run(self) -> int:
        require_bench("aiohttp")
        self._check()
        from flashstep.bench.load.traces import digest, read

        sessions = read(self.trace)
        trace = {"trace": digest(sessions), "sessions": len(sessions)}
        return run_load(self._measured(self._setup(sessions), trace))

    async def _measured(self, setup: "Setup", trace: dict[str, Any]) -> int:
        from flashstep.bench.load.replayed import measure, prepare

        watch = LoadProgress()
        prepared = await prepare(setup, watch=watch)

        async def run(stopping: "Stopping", take: Callable[[Any], None] | None, where: Origin) -> Run:
            measured = await measure(prepared, watch=watch, stopping=stopping, take=take)
            show_replay(measured, OUT)
            return Run(entry=self._entry(measured, trace, setup.plan, where), is_valid=measured.is_valid)

        return await keep_run(run, raw=self.asking.raw, recording=self.recording)

    def _check(self) -> None:
        self.recording.check()
        wrong = [*self._wrong_ranks(), *self._wrong_numbers(), *self.asking.problems(OURS)]
        if self.run_id is not None and not self.cache_bust:
            wrong.append("--run-id is what makes a run's text its own, which --no-cache-bust turns off")
        if wrong:
            raise ValueError("; ".join(wrong))

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
        yield from too_small(self, LEAST)
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

    def _modes(self) -> tuple["Mode", ...]:
        if not self._num_ranks:
            return ("single",)
        return ("mirror", "lag") if self.rank_modes == "both" else (self.rank_modes,)

    def _setup(self, sessions: Sequence["Session"]) -> "Setup":
        from flashstep.bench.load.replay import Plan
        from flashstep.bench.load.replayed import Setup

        begin, end = self._start()
        plan = Plan(
            lanes=self.max_concurrency,
            duration_s=self.duration_s,
            grace_s=self.grace_s,
            start_from=begin,
            start_to=end,
            warmup_requests=self.warmup_requests,
            idle_s=self.idle_cap_s,
            lane_idle_s=self.lane_idle_cap_s,
            seed=self.seed,
            body=({"ignore_eos": True} if self.asking.ignore_eos else {}) | self.asking.extra(),
            run=self.run_id if self.run_id is not None else secrets.token_hex(8),
            is_marked=self.cache_bust,
        )
        return Setup(
            sessions=sessions,
            plan=plan,
            clients=[
                functools.partial(self.asking.client, url, timeout_s=self.timeout_s)
                for url in self.dp_urls or (self.url,)
            ],
            dp_ranks=self.dp_ranks,
            modes=self._modes(),
            lag_s=self.lag_s,
            model=self.asking.model,
            tokenizer=self.tokenizer,
            ready_s=self.asking.ready_check_timeout_sec,
        )

    def _entry(self, measured: "Measured", trace: dict[str, Any], plan: "Plan", where: Origin) -> Entry:
        """All modes in one line: their samples' keys begin with the mode and the rank, and so do metrics but the first mode's."""
        first, *_ = measured.summaries.values()
        settings = trace | {
            "words": measured.words,
            "ranks": self._num_ranks,
            "modes": list(self._modes()),
            "lag_s": self.lag_s if self._num_ranks else None,
            **{name: without_secrets(getattr(plan, name)) for name in SETTINGS},
        }
        gap = measured.gap()
        return Entry(
            kind="replay",
            origin=where,
            settings=settings,
            subject=measured.subject,
            samples=measured.samples(),
            metrics=first.metrics if gap is None else first.metrics | {"lockstep_gap": gap},
            seed=self.seed,
            job=measured.job,
            detail=measured.detail() | {"run_id": plan.run},
            faults=measured.faults(),
            failed=sum(found.failed for found in measured.summaries.values()),
            complete=not measured.stopped,
            falsified_by=falsified_by(
                measured.subject["card"], synthetic=any(each.synthetic for each in measured.counted.values())
            ),
        )
