"""``bench serve``: one run of load against a server, from waiting for it to the figures.

Takes a ``Workload`` and a ``Client``; gives ``Outcome``, also where the server died or somebody pressed Ctrl-C. Knows no
ledger and no terminal: what goes on is told to a ``Watch``.
"""

import asyncio
import contextlib
import gc
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import msgspec

from flashstep.bench.ledger import Entry
from flashstep.bench.load.cards import falsified_by
from flashstep.bench.load.client import Answered, Client, bare
from flashstep.bench.load.drive import Drive, Record
from flashstep.bench.load.floor import Floor, Lag, LagWatch, measure_floor
from flashstep.bench.load.lengths import Words
from flashstep.bench.load.metrics_page import Counted, between
from flashstep.bench.load.prompts import PromptFile, RandomPrompts, Session
from flashstep.bench.load.stopping import INTERRUPTED, Stopping
from flashstep.bench.load.summary import Asked, GapTally, Spread, Summary, summarize
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
from flashstep.bench.origin import Origin, without_secrets

LATE_S, LATE_SHARE = (
    0.01,
    0.1,
)  # a P99 of waiting at the client below the former, or that share of the median TTFT, is none


class Open(Protocol):
    """A run that goes on: ``open`` are its requests under way, and when each was sent."""

    @property
    def open(self) -> Mapping[str, float]: ...


class Watch(Protocol):
    """Who looks on while a run goes on."""

    def tell(self, text: str) -> None:
        """A line about what happens."""

    def begin(
        self, run: Open, total: int | None, duration_s: float | None
    ) -> contextlib.AbstractContextManager[Any]:
        """The run begins, of ``total`` requests or ``duration_s``; what is given back is left at its end."""

    def took(self, answered: Answered) -> None:
        """A request of the run ended."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """A run. ``stopped`` says why the plan was not sent to its end, "" if it was; ``subject`` is who answered; ``job`` its
    process. ``workload`` is what was asked, with the model and the way of counting that were found. ``waits_ms`` is how long
    after its time each request was sent, which no latency holds."""

    workload: Workload
    words: Words | None
    summary: Summary
    probes: Summary | None
    counted: Counted
    floor: Floor
    lag: Lag
    waits_ms: Spread | None
    stopped: str
    faults: tuple[str, ...]
    subject: dict[str, Any]
    job: str


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
    words = None if isinstance(workload.source, PromptFile) else await learn_words(client, shape)
    if words is not None and not words.checked:
        watch.tell(
            "the server does not tell how long prompts are: their lengths are in words, and not checked"
        )
    subject = await identity(client, name) | {"usage": shape.counting}
    return Prepared(workload=msgspec.structs.replace(workload, shape=shape), words=words, subject=subject)


async def measure(
    client: Client,
    prepared: Prepared,
    *,
    watch: Watch,
    stopping: Stopping,
    take: Callable[[Record], None] | None,
) -> Outcome:
    """Warm up, run the plan, and sum up. ``take`` gets every record, warm-ups and probes too, as it comes."""
    workload, words = prepared.workload, prepared.words
    plan = workload.plan(words)
    total = None
    if workload.num_prompts is not None or isinstance(workload.source, PromptFile):
        plan = iter(made := list(plan))  # making prompts takes time that is not the server's
        total = sum(len(session.turns) for _, session in made)
    floor = await measure_floor()
    run = _Run(client, workload, watch, take)
    stopping.then(run.stop)
    await run.warm_up(workload.warm_ups(words))
    before = await counters(client)
    async with LagWatch() as lag_watch:
        await run.drive(plan, total, workload.probes() if workload.probe_rate else None)
    after = await counters(client)
    counted = Counted() if before is None or after is None else between(before, after)
    summary = summarize(_asked(run.records), gaps=run.gaps.gaps(), slos_ms=workload.slos_ms, counted=counted)
    probes = summarize(_asked(run.probe_records)) if workload.probe_rate else None
    waits_ms = Spread.of([1e3 * (record.answered.sent_s - record.due_s) for record in run.records])
    outcome = Outcome(
        workload=workload,
        words=words,
        summary=summary,
        probes=probes,
        counted=counted,
        floor=floor,
        lag=lag_watch.lag(),
        waits_ms=waits_ms if workload.is_paced else None,
        stopped=run.stopped,
        faults=(),
        subject=prepared.subject,
        job=process_of(client, before),
    )
    return msgspec.structs.replace(outcome, faults=tuple(_faults(run, prepared, outcome)))


def _asked(records: list[Record]) -> list[Asked]:
    return [
        Asked(each.answered.key, each.answered, each.wished_prompt, each.wished_output) for each in records
    ]


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


def _waited(outcome: Outcome) -> str | None:
    """Requests that were not sent at their time: latencies do not hold what the server's slowness cost them."""
    waits = outcome.waits_ms
    allowed_ms = max(1e3 * LATE_S, LATE_SHARE * outcome.summary.metrics.get("ttft_ms", 0.0))
    if waits is None or waits.at(99) <= allowed_ms:
        return None
    most = outcome.workload.max_concurrency
    place = "" if most is None else f" for one of --max-concurrency {most} places"
    return (
        f"requests waited{place} at this client, {waits.at(99):,.0f} ms after their time (P99): the rate was not offered as "
        "asked, and no latency holds that time (coordinated omission)"
    )


def _faults(run: "_Run", prepared: Prepared, outcome: Outcome) -> Iterator[str]:
    if run.stopped:
        yield run.stopped
    yield from outcome.summary.faults
    if outcome.probes is not None:
        yield from (f"probes: {fault}" for fault in outcome.probes.faults)
    yield from run.warm_up_faults
    if run.left_out:
        yield f"{run.left_out} later turns were not sent, because a turn before them failed"
    found = (
        outcome.counted.fault,
        _cached_before(run, prepared),
        _others(run, outcome.counted),
        _waited(outcome),
        outcome.lag.fault(outcome.summary.metrics.get("ttft_ms")),
    )
    yield from (fault for fault in found if fault)


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
        self._drives = [drive]
        await drive.run((0.0, session) for session in sessions)
        for record in records:
            self._keep(record)
        failed = [record.answered for record in records if record.answered.fault]
        if failed:
            self.warm_up_faults = (
                f"{len(failed)} of {len(records)} requests of the warm-up failed: {failed[0].fault} ({failed[0].error})",
            )

    async def drive(self, plan: Plan, total: int | None, probes: Plan | None) -> None:
        if self.stopped:
            return
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
        self.stopped, self.left_out = self.stopped or drive.stopped, drive.left_out

    def _took(self, record: Record) -> None:
        self._keep(record)
        self.gaps.add(record.answered)
        self.records.append(_bare(record))
        self._watch.took(record.answered)

    def _took_probe(self, record: Record) -> None:
        self._keep(record)
        self.probe_records.append(_bare(record))

    def stop(self) -> None:
        """Somebody wants an end: what is open is answered as interrupted, and nothing more is sent."""
        self.stopped = INTERRUPTED
        for drive in self._drives:
            drive.stop(INTERRUPTED)
        self._client.interrupt()


def _bare(record: Record) -> Record:
    return msgspec.structs.replace(record, answered=bare(record.answered))


def entry(outcome: Outcome, origin: Origin) -> Entry:
    """The ledger's entry of a run."""
    summary = outcome.summary
    detail = {
        "window_s": summary.window_s,
        "spreads": summary.spreads,
        "gaps": summary.gaps,
        "failures": summary.failures,
        "waits_ms": outcome.waits_ms,
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
        failed=summary.failed,
        complete=not outcome.stopped,
        falsified_by=falsified_by(outcome.subject["card"], synthetic=outcome.counted.synthetic),
    )


def _settings(outcome: Outcome) -> dict[str, Any]:
    """What another run must have in common with this one to be compared: the workload without the model, in plain JSON."""
    workload = outcome.workload
    source = workload.source
    plain = {
        field: msgspec.to_builtins(getattr(workload, field))
        for field in workload.__struct_fields__
        if field != "source"
    }
    del plain["shape"]["model"]
    plain["shape"]["extra"] = without_secrets(plain["shape"]["extra"])
    if math.isinf(workload.arrivals.rate):
        plain["arrivals"]["rate"] = "inf"
    is_file = isinstance(source, PromptFile)
    plain["source"] = {"sha256": source.sha256} if is_file else msgspec.to_builtins(source)
    if outcome.words is not None:  # other words make other prompts
        digest = hashlib.sha256(" ".join(outcome.words.words).encode()).hexdigest()[:16]
        plain["words"] = {"sha256": digest, "overhead": outcome.words.overhead}
    return plain
