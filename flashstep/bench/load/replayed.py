"""A whole measurement by replay: reach the server, learn its words, replay in each mode, keep what comes.

Takes a ``Setup``; gives ``Measured``, also after Ctrl-C or with a server that died. Knows no terminal: ``progress`` is told.
"""

import asyncio
import hashlib
import signal
from collections.abc import Callable, Generator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from flashstep.bench.load.bodies import Shape
from flashstep.bench.load.client import Client
from flashstep.bench.load.counting import by_tokenizer
from flashstep.bench.load.floor import Floor, Lag, LagWatch, measure_floor
from flashstep.bench.load.lengths import Words, learn
from flashstep.bench.load.metrics_page import Counted, between
from flashstep.bench.load.ranks import Mode, Rank, Run, gap
from flashstep.bench.load.raw import RawFile
from flashstep.bench.load.replay import Plan, Record
from flashstep.bench.load.scores import Scores, score, throughput, whole
from flashstep.bench.load.sessions import Session
from flashstep.bench.load.target import chosen_model, counters, identity, learn_words, process_of

PROGRESS_S = 0.5


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """``urls`` has one server, or each rank's; ``dp_ranks`` are ranks behind one. ``plan.body`` has no model yet."""

    sessions: Sequence[Session]
    plan: Plan
    urls: tuple[str, ...]
    dp_ranks: int
    modes: tuple[Mode, ...]
    lag_s: float
    model: str | None
    api_key: str | None
    tokenizer: Path | None
    timeout_s: float
    raw: Path | None


class Progress(msgspec.Struct, frozen=True):
    """Of one mode so far: its phase, requests under way, and the records."""

    mode: Mode
    phase: str
    running: int
    records: Sequence[Record]


class Measured(msgspec.Struct, kw_only=True):
    """``records`` by mode, those of warm-up among them; ``stopped`` says what ended a mode early.

    ``lags`` and ``floor`` tell how much the client itself was in the way, ``counted`` what the server counted (warm-up included,
    and only where there is one server), ``job`` which process that is.
    """

    subject: dict[str, Any]
    words: str  # a digest of those that prompts are made of: others make other prompts
    job: str
    num_ranks: int
    floor: Floor
    records: dict[Mode, list[Record]] = {}
    skipped_s: dict[Mode, float] = {}
    lags: dict[Mode, Lag] = {}
    counted: dict[Mode, Counted] = {}
    stopped: list[str] = []

    def faults(self) -> tuple[str, ...]:
        """All that went wrong, in sentences."""
        found = list(self.stopped)
        for mode, scores in self.scores().items():
            late = self.lags[mode].fault(scores.metrics.get("ttft_ms"))
            found += [*scores.faults, *([] if late is None else [late])]
        return tuple(found)

    def scores(self) -> dict[Mode, Scores]:
        """Of each mode; keys of ranks' requests begin with the mode and the rank."""
        return {
            mode: score(records, names=self._names(mode), counted=self.counted.get(mode))
            for mode, records in self.records.items()
        }

    def of_rank(self, mode: Mode, rank: int) -> list[Record]:
        return [record for record in self.records[mode] if record.rank == rank]

    def rank_tps(self, mode: Mode) -> list[float]:
        """Tokens a second in all, of each rank in its own time."""
        return [
            throughput(whole(self.of_rank(mode, rank))).get("total_tps", 0.0)
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
                "rank_tps": self.rank_tps(mode),
                "skipped_s": self.skipped_s[mode],
                "lag": self.lags[mode],
                "counted": self.counted.get(mode),
            }
            for mode, found in self.scores().items()
        }
        return msgspec.to_builtins({"modes": modes, "floor": self.floor})

    def _names(self, mode: Mode) -> list[str] | None:
        return None if mode == "single" else [f"{mode}/{rank}" for rank in range(self.num_ranks)]


async def measure(setup: Setup, *, progress: Callable[[Progress], None]) -> Measured:
    """Replay in each of ``setup.modes``. ``ValueError`` where there is no server to begin with."""
    async with _client(setup, setup.urls[0]) as client:
        model = await chosen_model(client, setup.model)
        words = await _words(client, setup, model)
        subject = await identity(client, model)
        job = process_of(client, await counters(client))
    if len(setup.urls) > 1:
        subject["url"] = list(setup.urls)
    setup = msgspec.structs.replace(setup, plan=setup.plan.of_model(model))
    measured = Measured(
        subject=subject,
        words=_digest(words),
        job=job,
        num_ranks=setup.dp_ranks or len(setup.urls),
        floor=await measure_floor(),
    )
    with ExitStack() as files:
        take = files.enter_context(RawFile(setup.raw)).take if setup.raw is not None else _nothing
        for mode in setup.modes:
            ended = await _one(setup, mode, words, measured, take, progress)
            if ended:
                measured.stopped.append(ended)
                break
    return measured


async def _one(
    setup: Setup,
    mode: Mode,
    words: Words,
    measured: Measured,
    take: Callable[[Record], None],
    progress: Callable[[Progress], None],
) -> str:
    """One mode, with connections of its own; why it ended early, if it did."""
    records = measured.records[mode] = []

    def keep(record: Record) -> None:
        records.append(record)
        take(record)

    async with AsyncExitStack() as stack:
        ranks = []
        for number, url in enumerate(setup.urls * max(1, setup.dp_ranks)):
            client = await stack.enter_async_context(_client(setup, url))
            ranks.append(Rank.by_header(client, number) if setup.dp_ranks else Rank(client, number, {}))
        run = Run(ranks, setup.sessions, setup.plan, mode=mode, lag_s=setup.lag_s, words=words, keep=keep)
        before = await counters(ranks[0].client)
        async with LagWatch() as lag_watch:
            ended = await _watched(run, records, progress)
        measured.lags[mode] = lag_watch.lag()
        measured.skipped_s[mode] = run.skipped_s
    async with _client(setup, setup.urls[0]) as client:  # the others may be interrupted
        after = await counters(client)
    if before is not None and after is not None and len(setup.urls) == 1:
        measured.counted[mode] = between(before, after)
    return ended


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


def _client(setup: Setup, url: str) -> Client:
    return Client(url, api_key=setup.api_key, timeout_s=setup.timeout_s)


def _nothing(record: Record) -> None:
    """No raw file was asked for."""


async def _watched(run: Run, records: Sequence[Record], progress: Callable[[Progress], None]) -> str:
    """The run to its end, with progress; why it ended early, if it did."""
    with _on_signal(run.interrupt) as signals:
        task = asyncio.create_task(run.run())
        while not task.done():
            await asyncio.wait([task], timeout=PROGRESS_S)
            progress(Progress(run.mode, run.replays[0].phase, run.running, records))
        task.result()
    if signals:
        return "interrupted: what was answered until then is kept"
    return "the server could not be reached any more; the rest was not sent" if run.is_lost else ""


@contextmanager
def _on_signal(then: Callable[[], None]) -> Generator[list[str]]:
    """Ctrl-C calls ``then`` once, and is in the list; a second one is Python's again."""
    loop = asyncio.get_running_loop()
    got: list[str] = []

    def handle() -> None:
        got.append("SIGINT")
        loop.remove_signal_handler(signal.SIGINT)
        then()

    loop.add_signal_handler(signal.SIGINT, handle)
    try:
        yield got
    finally:
        loop.remove_signal_handler(signal.SIGINT)
