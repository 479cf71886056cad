"""Sends a plan of sessions: each turn when it is due, each answer to whoever takes it, until the plan ends or somebody stops
it.

Open loop: sessions begin at their times, however many are still open. Closed loop: at most so many are open. Both together: a
session begins at its time, or when a place is free. Takes a ``Client`` and a plan; gives ``Record``. Knows no statistics and
no terminal.
"""

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Literal

import msgspec

from flashstep.bench.load.bodies import Shape
from flashstep.bench.load.client import AWAY_AFTER, Answered, Client
from flashstep.bench.load.prompts import Session

AHEAD = 64  # sessions that are made before they are due, in a thread: a long prompt takes a while
Stream = Literal["run", "warm-up", "probe"]


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a plan. ``due_s`` is when its session or turn was to begin (``time.perf_counter()``); in a closed loop a
    session waits for a place after that. ``wished_prompt`` and ``wished_output`` are tokens, None where the plan has no
    wish."""

    stream: Stream
    session: str
    turn: int
    due_s: float
    wished_prompt: int | None
    wished_output: int | None
    answered: Answered


class Drive:
    """A stream. ``take`` gets each record as its request ends; ``duration_s`` ends the sending, not what is open."""

    def __init__(
        self,
        client: Client,
        shape: Shape,
        *,
        take: Callable[[Record], None],
        stream: Stream = "run",
        max_concurrency: int | None = None,
        duration_s: float | None = None,
    ) -> None:
        self._client = client
        self._shape = shape
        self._take = take
        self._stream: Stream = stream
        self._slots = asyncio.Semaphore(max_concurrency) if max_concurrency else None
        self._duration_s = duration_s
        self._stop = asyncio.Event()
        self._lost = 0  # requests in a row that reached nobody
        self.stopped = ""  # why the plan was not sent to its end
        self.left_out = 0  # later turns of sessions whose earlier turn failed
        self.open: dict[str, float] = {}  # requests under way, and when each was sent

    def stop(self, reason: str) -> None:
        """Send nothing more; ``reason`` is a sentence. What is open goes on (``Client.interrupt`` ends that too)."""
        self.stopped = self.stopped or reason
        self._stop.set()

    async def run(self, plan: Iterable[tuple[float, Session]]) -> None:
        """Send ``plan``, sessions with seconds after now, and wait for every answer."""
        made = iter(plan)
        ahead = await _some(made)
        start_s = time.perf_counter()
        self._until_s = None if self._duration_s is None else start_s + self._duration_s
        async with asyncio.TaskGroup() as group:
            while ahead:
                following = asyncio.create_task(_some(made))
                for at_s, session in ahead:
                    await self._sleep_until(start_s + at_s)
                    if self._slots is not None:
                        await self._slots.acquire()
                    if self._is_over():
                        await following
                        return
                    group.create_task(self._session(session, start_s + at_s))
                ahead = await following

    def _is_over(self) -> bool:
        return self._stop.is_set() or (self._until_s is not None and time.perf_counter() >= self._until_s)

    async def _sleep_until(self, due_s: float) -> None:
        wait_s = due_s - time.perf_counter()
        if wait_s > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), wait_s)

    async def _session(self, session: Session, due_s: float) -> None:
        try:
            answers: list[str] = []
            for index, turn in enumerate(session.turns):
                if index:
                    due_s = time.perf_counter() + turn.think_s
                    await self._sleep_until(due_s)
                    if self._is_over():
                        return
                answered = await self._ask(session, index, answers, due_s)
                if answered.fault:
                    self.left_out += len(session.turns) - index - 1
                    return
                answers.append(answered.text)
        finally:
            if self._slots is not None:
                self._slots.release()

    async def _ask(self, session: Session, index: int, answers: list[str], due_s: float) -> Answered:
        call = self._shape.call(session, index, answers)
        self.open[call.key] = time.perf_counter()
        answered = await self._client.send(call)
        del self.open[call.key]
        turn = session.turns[index]
        self._take(
            Record(
                stream=self._stream,
                session=session.key,
                turn=index,
                due_s=due_s,
                wished_prompt=turn.prompt_tokens,
                wished_output=turn.output_len,
                answered=answered,
            )
        )
        self._lost = self._lost + 1 if answered.fault == "unreachable" else 0
        if self._lost == AWAY_AFTER:
            self.stop(
                f"the server is gone: {AWAY_AFTER} requests in a row did not reach it; the rest was not sent"
            )
        return answered


async def _some(made: Iterator[tuple[float, Session]]) -> list[tuple[float, Session]]:
    return await asyncio.to_thread(lambda: list(itertools.islice(made, AHEAD)))
