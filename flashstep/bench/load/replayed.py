"""A whole measurement by replay: reach the server, learn its words, replay in each mode, keep what comes.

Takes a ``Setup``; gives ``Measured``, also after Ctrl-C or with a server that died. Knows no terminal: what
goes on is told to a ``Watch``.
"""

import hashlib
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec

from flashstep.bench.ledger import Samples
from flashstep.bench.load.bodies import Shape
from flashstep.bench.load.client import Client, bare
from flashstep.bench.load.counting import by_tokenizer
from flashstep.bench.load.floor import Floor, Lag, LagWatch, measure_floor
from flashstep.bench.load.lengths import Words, learn
from flashstep.bench.load.metrics_page import Counted, between
from flashstep.bench.load.ranks import Mode, Rank, Run, gap
from flashstep.bench.load.replay import Plan, Record
from flashstep.bench.load.serve import Watch
from flashstep.bench.load.sessions import Session
from flashstep.bench.load.stopping import INTERRUPTED, Stopping
from flashstep.bench.load.summary import Asked, GapTally, Summary, summarize, throughput
from flashstep.bench.load.target import (
    await_server,
    chosen_model,
    counters,
    identity,
    learn_words,
    process_of,
)


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """``clients`` makes a client of the server, or of each rank's; ``dp_ranks`` are ranks behind one. ``plan.body`` has no model
    yet. ``ready_s`` is the longest wait for the first server (0: none)."""

    sessions: Sequence[Session]
    plan: Plan
    clients: Sequence[Callable[[], Client]]
    dp_ranks: int
    modes: tuple[Mode, ...]
    lag_s: float
    model: str | None
    tokenizer: Path | None
    ready_s: float


class Measured(msgspec.Struct, kw_only=True):
    """``records`` by mode, those of warm-up among them; ``stopped`` says what ended a mode early.

    ``summaries`` are of what was measured; keys of ranks' requests begin with the mode and the rank. ``lags`` and ``floor`` tell
    how much the client itself was in the way, ``counted`` what the server counted (warm-up included, and only where there is one
    server), ``job`` which process that is.
    """

    subject: dict[str, Any]
    words: str  # a digest of those that prompts are made of: others make other prompts
    job: str
    num_ranks: int
    floor: Floor
    records: dict[Mode, list[Record]] = {}
    summaries: dict[Mode, Summary] = {}
    skipped_s: dict[Mode, float] = {}
    lags: dict[Mode, Lag] = {}
    counted: dict[Mode, Counted] = {}
    stopped: list[str] = []

    @property
    def is_valid(self) -> bool:
        return bool(self.summaries) and all(found.is_valid for found in self.summaries.values())

    def faults(self) -> tuple[str, ...]:
        """All that went wrong, in sentences."""
        found = list(self.stopped)
        for mode, summary in self.summaries.items():
            late = self.lags[mode].fault(summary.metrics.get("ttft_ms"))
            counted = self.counted.get(mode, Counted()).fault
            found += [*summary.faults, *(fault for fault in (counted, late) if fault)]
        return tuple(found)

    def samples(self) -> Samples:
        """Of all modes, whose keys differ."""
        parts = [found.samples for found in self.summaries.values()]
        return Samples(
            unit="request",
            keys=tuple(key for part in parts for key in part.keys),
            columns={name: sum((part.columns[name] for part in parts), ()) for name in parts[0].columns},
        )

    def rank_tps(self, mode: Mode) -> list[float]:
        """Tokens a second in all, of each rank in its own time."""
        return [
            throughput([record.answer for record in _good(self.records[mode]) if record.rank == rank]).get(
                "total_tps", 0.0
            )
            for rank in range(self.num_ranks)
        ]

    def gap(self) -> float | None:
        """The share of throughput that lagging costs: of the ranks' mean, where both modes ran."""
        if not {"mirror", "lag"} <= self.records.keys():
            return None
        mirror, lag = (sum(self.rank_tps(mode)) for mode in ("mirror", "lag"))
        return gap(mirror, lag) if mirror and lag else None

    def detail(self) -> dict[str, Any]:
        """What pictures read, in plain JSON."""
        modes = {
            mode: {
                "metrics": found.metrics,
                "spreads": found.spreads,
                "gaps": found.gaps,
                "failures": found.failures,
                "rank_tps": self.rank_tps(mode),
                "skipped_s": self.skipped_s[mode],
                "lag": self.lags[mode],
                "counted": self.counted.get(mode),
            }
            for mode, found in self.summaries.items()
        }
        return msgspec.to_builtins({"modes": modes, "floor": self.floor})


def _good(records: Sequence[Record]) -> list[Record]:
    """Those that count: measured, and answered to their end."""
    return [record for record in records if record.phase == "measured" and record.answer.is_whole]


def summary_of(
    records: Sequence[Record],
    *,
    gaps: GapTally | None = None,
    names: Sequence[str] | None = None,
    counted: Counted | None = None,
) -> Summary:
    """Of one mode's records, without those of warm-up. ``names`` are what the keys of each rank's requests begin with; None is
    for a run without ranks. A made prompt is as long as the recorded one without its template, so that no length is wished."""
    asked = [
        Asked(
            record.key if names is None else f"{names[record.rank]}/{record.key}",
            record.answer,
            None,
            record.output_tokens,
        )
        for record in records
        if record.phase == "measured"
    ]
    found = summarize(asked, gaps=None if gaps is None else gaps.gaps(), counted=counted)
    good = _good(records)
    blocks = sum(record.blocks for record in good)
    theoretical = {"theoretical_prefix_hit": sum(record.hit for record in good) / blocks} if blocks else {}
    warming = sum(record.phase == "warm-up" and not record.answer.is_whole for record in records)
    faults = (f"{warming} requests of the warm-up failed",) if warming else ()
    return msgspec.structs.replace(
        found, metrics=found.metrics | theoretical, faults=(*found.faults, *faults)
    )


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """What is known before the first request of a run; ``setup.plan`` has its model."""

    setup: Setup
    words: Words
    subject: dict[str, Any]
    job: str


async def prepare(setup: Setup, *, watch: Watch) -> Prepared:
    """Wait for the server and learn what prompts need to know of it; ``ValueError`` where there is none to begin with."""
    async with setup.clients[0]() as client:
        if setup.ready_s:
            await await_server(client, within_s=setup.ready_s, tell=watch.tell)
        model = await chosen_model(client, setup.model)
        words = await _words(client, setup, model)
        subject = await identity(client, model)
        job = process_of(client, await counters(client))
    if len(setup.clients) > 1:
        subject["url"] = [client().root for client in setup.clients]
    for session in setup.sessions:  # takes a while, which no request shall wait for
        _ = session.hits
    setup = msgspec.structs.replace(setup, plan=setup.plan.of_model(model))
    return Prepared(setup=setup, words=words, subject=subject, job=job)


async def measure(
    prepared: Prepared, *, watch: Watch, stopping: Stopping, take: Callable[[Record], None] | None
) -> Measured:
    """Replay in each of the modes; ``take`` gets every record as it comes."""
    setup = prepared.setup
    measured = Measured(
        subject=prepared.subject,
        words=_digest(prepared.words),
        job=prepared.job,
        num_ranks=setup.dp_ranks or len(setup.clients),
        floor=await measure_floor(),
    )
    for mode in setup.modes:
        if not measured.stopped:
            await _one(setup, mode, prepared.words, measured, watch=watch, stopping=stopping, take=take)
    return measured


async def _one(
    setup: Setup,
    mode: Mode,
    words: Words,
    measured: Measured,
    *,
    watch: Watch,
    stopping: Stopping,
    take: Callable[[Record], None] | None,
) -> None:
    """One mode, with connections of its own."""
    records = measured.records[mode] = []
    gaps = GapTally()

    def keep(record: Record) -> None:
        if take is not None:
            take(record)
        if record.phase == "measured":
            gaps.add(record.answer)
            watch.took(record.answer)
        records.append(msgspec.structs.replace(record, answer=bare(record.answer)))

    async with AsyncExitStack() as stack:
        ranks = []
        for number, made in enumerate(list(setup.clients) * max(1, setup.dp_ranks)):
            client = await stack.enter_async_context(made())
            ranks.append(Rank.by_header(client, number) if setup.dp_ranks else Rank(client, number, {}))
        run = Run(ranks, setup.sessions, setup.plan, mode=mode, lag_s=setup.lag_s, words=words, keep=keep)
        before = await counters(ranks[0].client)
        stopping.then(run.interrupt)
        async with LagWatch() as lag_watch:
            with watch.begin(run, _total(setup), setup.plan.duration_s):
                await run.run()
        measured.lags[mode] = lag_watch.lag()
        measured.skipped_s[mode] = run.skipped_s
    async with setup.clients[0]() as client:  # the others may be interrupted
        after = await counters(client)
    if before is not None and after is not None and len(setup.clients) == 1:
        measured.counted[mode] = between(before, after)
    if stopping.is_asked:
        measured.stopped.append(INTERRUPTED)
    elif run.is_lost:
        measured.stopped.append("the server is gone: it could not be reached any more; the rest was not sent")
    names = None if mode == "single" else [f"{mode}/{rank}" for rank in range(measured.num_ranks)]
    measured.summaries[mode] = summary_of(records, gaps=gaps, names=names, counted=measured.counted.get(mode))


def _total(setup: Setup) -> int | None:
    """Requests of one mode; None where its time ends it."""
    if setup.plan.duration_s is not None:
        return None
    each = sum(len(stream.turns) for session in setup.sessions for stream in session.streams)
    return each * (setup.dp_ranks or len(setup.clients))


def _digest(words: Words) -> str:
    return hashlib.sha256(" ".join(words.words).encode()).hexdigest()[:16]


async def _words(client: Client, setup: Setup, model: str) -> Words:
    """``ValueError`` where neither the server nor a tokenizer tells how long a text is."""
    if setup.tokenizer is not None:
        return await learn(by_tokenizer(setup.tokenizer))
    extra = {name: value for name, value in setup.plan.body.items() if name != "ignore_eos"}
    words = await learn_words(
        client,
        Shape(model=model, temperature=None, ignore_eos=False, counting="at the end", extra=extra),
    )
    if not words.checked:
        raise ValueError(
            f"the answers of {client.root} have no usage, so that it cannot count tokens; give --tokenizer"
        )
    return words
