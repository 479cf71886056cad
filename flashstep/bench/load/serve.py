"""``bench serve``: one run of load against a server, from waiting for it to the figures.

Takes a ``Workload`` and a ``Client``; gives ``Outcome``, also where the server died or somebody pressed Ctrl-C. Knows no
ledger and no terminal: what goes on is told to a ``Watch``.
"""

import asyncio
import contextlib
import gc
import hashlib
import math
import signal
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, Protocol

import msgspec

from flashstep.bench.ledger import Entry
from flashstep.bench.load.client import Client
from flashstep.bench.load.drive import Drive, Record
from flashstep.bench.load.floor import Floor, Lag, LagWatch, measure_floor
from flashstep.bench.load.lengths import Words
from flashstep.bench.load.metrics_page import Counted, between
from flashstep.bench.load.prompts import RandomPrompts, Session
from flashstep.bench.load.summary import GapTally, Summary, summarize
from flashstep.bench.load.target import (
    await_server,
    chosen_model,
    counters,
    identity,
    learn_counting,
    learn_words,
    process_of,
)
from flashstep.bench.load.workload import Plan, Workload
from flashstep.bench.origin import Origin

INTERRUPTED = "interrupted"
ROUTING = " routing"


class Watch(Protocol):
    """Who looks on while a run goes on."""

    def tell(self, text: str) -> None:
        """A line about what happens."""

    def begin(
        self, drive: Drive, total: int | None, duration_s: float | None
    ) -> contextlib.AbstractContextManager[Any]:
        """The run begins, of ``total`` requests or ``duration_s``; what is given back is left at its end."""

    def took(self, record: Record) -> None:
        """A request of the run ended."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """A run. ``stopped`` says why the plan was not sent to its end, "" if it was; ``subject`` is who answered; ``job`` its
    process. ``workload`` is what was asked, with the model and the way of counting that were found."""

    workload: Workload
    words: Words | None
    summary: Summary
    probes: Summary | None
    counted: Counted
    floor: Floor
    lag: Lag
    stopped: str
    faults: tuple[str, ...]
    subject: dict[str, Any]
    job: str

    @property
    def is_interrupted(self) -> bool:
        return self.stopped == INTERRUPTED

    @property
    def is_valid(self) -> bool:
        """The whole plan was sent, and every request was answered."""
        return (
            not self.stopped
            and self.summary.succeeded > 0
            and self.summary.succeeded == self.summary.requests
        )


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """What is known before the first request of a run."""

    workload: Workload
    words: Words | None
    subject: dict[str, Any]


async def prepare(
    client: Client, workload: Workload, *, model: str | None, ready_s: float, watch: Watch
) -> Prepared:
    """Wait for the server, up to ``ready_s`` (0: not at all), and learn what the plan needs to know of it. ``ServerAway``."""
    if ready_s:
        await await_server(client, within_s=ready_s, tell=watch.tell)
    name = await chosen_model(client, model)
    shape = msgspec.structs.replace(workload.shape, model=name)
    shape, answered = await learn_counting(client, shape)
    if answered.output_tokens is None:
        watch.tell("the server gives no usage: what needs a count of tokens will be left out")
    words = None if isinstance(workload.source, Path) else await learn_words(client, shape)
    if words is not None and not words.checked:
        watch.tell(
            "the server does not tell how long prompts are: their lengths are in words, and not checked"
        )
    subject = await identity(client, name) | {"usage": shape.counting}
    return Prepared(workload=msgspec.structs.replace(workload, shape=shape), words=words, subject=subject)


async def measure(
    client: Client, prepared: Prepared, *, watch: Watch, take: Callable[[Record], None] | None
) -> Outcome:
    """Warm up, run the plan, and sum up. ``take`` gets every record, warm-ups and probes too, as it comes."""
    workload, words = prepared.workload, prepared.words
    plan = workload.plan(words)
    total = None
    if workload.num_prompts is not None or isinstance(workload.source, Path):
        plan = iter(made := list(plan))  # making prompts takes time that is not the server's
        total = sum(len(session.turns) for _, session in made)
    floor = await measure_floor()
    run = _Run(client, workload, watch, take)
    await run.warm_up(workload.warm_ups(words))
    before = await counters(client)
    with run.interruptible():
        async with LagWatch() as lag_watch:
            await run.drive(plan, total, workload.probes() if workload.probe_rate else None)
        after = await counters(client)
    counted = Counted() if before is None or after is None else between(before, after)
    summary = summarize(run.records, gaps=run.gaps.gaps(), slos_ms=workload.slos_ms, counted=counted)
    probes = None
    if workload.probe_rate:
        probes = summarize(run.probe_records, gaps=GapTally().gaps(), slos_ms={}, counted=Counted())
    lag = lag_watch.lag()
    return Outcome(
        workload=workload,
        words=words,
        summary=summary,
        probes=probes,
        counted=counted,
        floor=floor,
        lag=lag,
        stopped=run.stopped,
        faults=tuple(_faults(run, prepared, summary, probes, lag, counted)),
        subject=prepared.subject,
        job=process_of(client, before),
    )


def _cached_before(run: "_Run", prepared: Prepared) -> str | None:
    """Random prompts have no more in common than their template and prefix: more in the cache is of an earlier run."""
    source = prepared.workload.source
    if prepared.words is None or not isinstance(source, RandomPrompts):
        return None
    shared = prepared.words.overhead + source.prefix_len
    firsts = [record.answered.cached_tokens or 0 for record in run.records if record.turn == 0]
    found = sum(cached > shared for cached in firsts)
    if not found:
        return None
    return (
        f"{found} of {len(firsts)} prompts were in the server's prefix cache already: an earlier run had the same --seed; "
        "restart the server, reset its cache, or take another seed"
    )


def _others(run: "_Run", counted: Counted) -> str | None:
    """A server that made more tokens than we asked for has somebody else to serve."""
    ours = [record.answered for record in (*run.records, *run.probe_records)]
    outputs = [
        answered.output_tokens
        for answered in ours
        if answered.is_whole and answered.output_tokens is not None
    ]
    if (
        counted.generation_tokens is None
        or len(outputs) < len(ours)
        or counted.generation_tokens <= sum(outputs)
    ):
        return None
    return (
        f"the server counted {counted.generation_tokens:.0f} output tokens, {sum(outputs)} of them in our answers: "
        "somebody else used it during the run"
    )


def _faults(
    run: "_Run", prepared: Prepared, summary: Summary, probes: Summary | None, lag: Lag, counted: Counted
) -> Iterator[str]:
    if run.stopped:
        yield run.stopped
    yield from summary.faults
    if probes is not None:
        yield from (f"probes: {fault}" for fault in probes.faults)
    yield from run.warm_up_faults
    if run.left_out:
        yield f"{run.left_out} later turns were not sent, because a turn before them failed"
    if (cached := _cached_before(run, prepared)) is not None:
        yield cached
    if (others := _others(run, counted)) is not None:
        yield others
    if (late := lag.fault(summary.metrics.get("ttft_ms"))) is not None:
        yield late


class _Run:
    """The streams of one run, and what came of them."""

    def __init__(
        self, client: Client, workload: Workload, watch: Watch, take: Callable[[Record], None] | None
    ) -> None:
        self._client = client
        self._workload = workload
        self._watch = watch
        self._keep = take or (lambda record: None)
        self.records: list[Record] = []
        self.probe_records: list[Record] = []
        self.gaps = GapTally()
        self._drives: list[Drive] = []
        self.warm_up_faults: tuple[str, ...] = ()
        self.stopped = ""
        self.left_out = 0

    async def warm_up(self, sessions: list[Session]) -> None:
        """As concurrent as the run may be."""
        if not sessions:
            return
        self._watch.tell(f"warming up: {len(sessions)} to send")
        records: list[Record] = []
        most = self._workload.max_concurrency
        drive = Drive(
            self._client, self._workload.shape, take=records.append, stream="warm-up", max_concurrency=most
        )
        await drive.run((0.0, session) for session in sessions)
        for record in records:
            self._keep(record)
        failed = [record.answered for record in records if record.answered.fault]
        if failed:
            self.warm_up_faults = (
                f"{len(failed)} of {len(records)} requests of the warm-up failed: {failed[0].fault} ({failed[0].error})",
            )

    async def drive(self, plan: Plan, total: int | None, probes: Plan | None) -> None:
        workload = self._workload
        drive = Drive(
            self._client,
            workload.shape,
            take=self._took,
            max_concurrency=workload.max_concurrency,
            duration_s=workload.duration_s,
        )
        beside = Drive(self._client, workload.shape, take=self._took_probe, stream="probe")
        self._drives = [drive, beside]
        gc.collect()
        gc.freeze()  # the plan is long and lives on: no pause for it
        try:
            with self._watch.begin(drive, total, workload.duration_s):
                probing = None if probes is None else asyncio.create_task(beside.run(probes))
                await drive.run(plan)
                if probing is not None:
                    beside.stop("the run has ended")
                    await probing
        finally:
            gc.unfreeze()
        self.stopped, self.left_out = drive.stopped, drive.left_out

    def _took(self, record: Record) -> None:
        self._keep(record)
        self.gaps.add(record.answered)
        self.records.append(_without_chunks(record))
        self._watch.took(record)

    def _took_probe(self, record: Record) -> None:
        self._keep(record)
        self.probe_records.append(_without_chunks(record))

    @contextlib.contextmanager
    def interruptible(self) -> Generator[None]:
        """Ctrl-C ends the run and keeps what there is; pressed again, it does not lose that."""

        def stop() -> None:
            for drive in self._drives:
                drive.stop(INTERRUPTED)
            self._client.interrupt()

        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, stop)
        try:
            yield
        finally:
            loop.remove_signal_handler(signal.SIGINT)


def _without_chunks(record: Record) -> Record:
    """What figures need of it: a long run has millions of chunks, which are in the raw file."""
    bare = msgspec.structs.replace(record.answered, chunks=(), text="", reasoning="")
    return msgspec.structs.replace(record, answered=bare)


def entry(outcome: Outcome, origin: Origin, *, raw: str | None) -> Entry:
    """The ledger's entry of a run; ``raw`` is its raw file's name, relative to the ledger's folder."""
    summary = outcome.summary
    falsified_by = (outcome.subject["card"] or {}).get(
        "falsified_by"
    ) or []  # flashstep's own: what makes texts wrong on purpose
    routing = [name.removesuffix(ROUTING) for name in falsified_by if name.endswith(ROUTING)]
    detail = {
        "window_s": summary.window_s,
        "spreads": summary.spreads,
        "gaps": summary.gaps,
        "failures": summary.failures,
        "floor": outcome.floor,
        "lag": outcome.lag,
        "counted": outcome.counted,
        "acceptance_by_position": outcome.counted.by_position,
    }
    if outcome.probes is not None:
        detail["probes"] = {"spreads": outcome.probes.spreads, "failures": outcome.probes.failures}
    return Entry(
        kind="serve",
        origin=origin,
        settings=_settings(outcome),
        subject=outcome.subject,
        samples=summary.samples,
        metrics=summary.metrics,
        seed=outcome.workload.seed,
        job=outcome.job,
        detail=msgspec.to_builtins(detail),
        faults=outcome.faults,
        complete=outcome.is_valid,
        synthetic_acceptance=outcome.counted.synthetic or "synthetic acceptance" in falsified_by,
        routing=routing[0] if routing else "real",
        raw=raw,
    )


def _settings(outcome: Outcome) -> dict[str, Any]:
    """What another run must have in common with this one to be compared: the workload without the model, in plain JSON."""
    workload = outcome.workload
    plain = msgspec.to_builtins(workload, enc_hook=str)
    for found in ("model", "counting"):
        del plain["shape"][found]
    if math.isinf(workload.arrivals.rate):
        plain["arrivals"]["rate"] = "inf"
    if isinstance(workload.source, Path):
        plain["source"] = {"sha256": hashlib.sha256(workload.source.read_bytes()).hexdigest()}
    if outcome.words is not None:  # other words make other prompts
        digest = hashlib.sha256(" ".join(outcome.words.words).encode()).hexdigest()[:16]
        plain["words"] = {"sha256": digest, "overhead": outcome.words.overhead}
    return plain
