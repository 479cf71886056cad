"""One replay against one server, or against data-parallel ranks: the same request to all at once (mirror), or each behind the
last (lag), and the gap between the two (E8).

A rank is a server of its own (--dp-urls) or one that a header chooses. Ranks that must step together wait for one another: with
``mirror`` they do equal work at equal times, the best case; with ``lag`` each replays the whole trace by itself, rank r beginning
r x D seconds later, which is nearer to life. Knows no file and no metric.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal, NamedTuple, Self

import msgspec

from flashstep.bench.load.client import Answered, Call, Client
from flashstep.bench.load.lengths import Words
from flashstep.bench.load.replay import Plan, Record, Replay
from flashstep.bench.load.sessions import Session

HEADER = "X-data-parallel-rank"
REQUEST_ID = "X-Request-ID"
Mode = Literal["single", "mirror", "lag"]


class Rank(NamedTuple):
    """How one rank is reached: a client of its own, its number, and the headers that choose it (``by_header``), if any."""

    client: Client
    number: int
    headers: dict[str, str]

    async def send(self, call: Call) -> Answered:
        headers = call.headers | self.headers
        if self.headers:  # one server sees the request of every rank, and wants different names
            headers[REQUEST_ID] = f"{headers[REQUEST_ID]}-{self.number}"
        return await self.client.send(msgspec.structs.replace(call, headers=headers))

    @classmethod
    def by_header(cls, client: Client, number: int) -> Self:
        """One of the ranks behind one server."""
        return cls(client, number, {HEADER: str(number)})


def mirrored(ranks: Sequence[Rank]) -> Callable[[Call], Awaitable[Sequence[Answered]]]:
    """To send a call to all ``ranks`` at once, and have every rank's answer, in order."""

    async def send(call: Call) -> Sequence[Answered]:
        return await asyncio.gather(*(rank.send(call) for rank in ranks))

    return send


class Run:
    """One replay in one mode. Made inside the event loop. ``keep`` is told of each record, with its rank's number."""

    def __init__(
        self,
        ranks: Sequence[Rank],
        sessions: Sequence[Session],
        plan: Plan,
        *,
        mode: Mode,
        lag_s: float,
        words: Words,
        keep: Callable[[Record], None],
    ) -> None:
        self.mode: Mode = mode
        self._lag_s = lag_s if mode == "lag" else 0.0
        # what one mode left in the server's cache must be no hit for the next
        plan = msgspec.structs.replace(plan, run=f"{plan.run} {mode}")

        def replay(those: Sequence[Rank]) -> Replay:
            def kept(record: Record) -> None:
                keep(msgspec.structs.replace(record, rank=those[record.rank].number))

            def interrupt() -> None:
                for rank in those:
                    rank.client.interrupt()

            return Replay(sessions, plan, words=words, send=mirrored(those), interrupt=interrupt, keep=kept)

        self.replays = [replay([rank]) for rank in ranks] if mode == "lag" else [replay(ranks)]
        self._ranks = ranks
        self._ended = asyncio.Event()

    @property
    def open(self) -> dict[str, float]:
        """Requests under way, and when each was sent."""
        replays = enumerate(self.replays)
        return {f"{n}/{key}": sent_s for n, replay in replays for key, sent_s in list(replay.open.items())}

    @property
    def is_lost(self) -> bool:
        """A rank was not reached any more, and the run ended there."""
        return any(replay.is_lost for replay in self.replays)

    @property
    def skipped_s(self) -> float:
        return sum(replay.skipped_s for replay in self.replays)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for number, replay in enumerate(self.replays):
                group.create_task(self._later(number * self._lag_s, replay))

    def interrupt(self) -> None:
        """End now: open requests are answered as interrupted."""
        self._ended.set()
        for replay in self.replays:
            replay.end()
        for rank in self._ranks:
            rank.client.interrupt()

    async def _later(self, after_s: float, replay: Replay) -> None:
        if after_s:
            try:
                async with asyncio.timeout(after_s):
                    await self._ended.wait()
                return
            except TimeoutError:
                pass
        await replay.run()
        if replay.is_lost:
            self.interrupt()


def gap(mirror: float, lag: float) -> float:
    """The share of ``mirror``'s throughput that is lost when ranks lag: what stepping together costs."""
    return 1 - lag / mirror
