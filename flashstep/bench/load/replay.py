"""Recorded sessions sent again: a closed loop of lanes, each with one session at a time and its sub-agents (H4 to H8).

Takes sessions and a way to send; gives a ``Record`` of each request. A lane's first session is joined somewhere in its middle,
after its cache was warmed with the requests before that point; when a session has ended with all its sub-agents, its lane takes
the next one. Pauses are the recorded ones from the end of a request to the begin of the next. Knows no metric and no file.
"""

import asyncio
import itertools
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from flashstep.bench.load.client import AWAY_AFTER, Answered, Call
from flashstep.bench.load.conversation import Prompts, rid
from flashstep.bench.load.lengths import Words
from flashstep.bench.load.pauses import Pauses
from flashstep.bench.load.sessions import Blocks, Place, Session, in_order

CHAT = "/v1/chat/completions"
TOO_MANY = 429  # the only refusal that is not about the request itself
Phase = Literal["warm-up", "measured"]
Send = Callable[[Call], Awaitable[Sequence[Answered]]]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How a trace is replayed.

    ``duration_s`` None is each session once; else lanes go on until then, and requests under way have ``grace_s`` to end. A first
    session is joined between ``start_from`` and ``start_to`` of its time. Each lane warms up with the last request of every
    conversation that is open at that point, then with the next ``warmup_requests``, one token each and without pauses. ``idle_s``
    and ``lane_idle_s``: bench.load.pauses. ``body`` is of every request; With ``is_marked`` all text is
    of this ``run`` alone, and each replay of a session of itself alone, so that nothing older in the server's cache is hit.
    """

    lanes: int = 1
    duration_s: float | None = None
    grace_s: float = 30.0
    start_from: float = 0.0
    start_to: float = 0.0
    warmup_requests: int = 0
    idle_s: float = 10.0
    lane_idle_s: float = 300.0
    seed: int = 42
    body: dict[str, Any] = {}
    run: str
    is_marked: bool = True

    def of_model(self, model: str) -> "Plan":
        """The same plan for ``model``: the fields that each request has beside its messages and its length (H8)."""
        fields = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
        return msgspec.structs.replace(self, body=fields | self.body)


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One request and its answer. ``key`` is the same in every run of the trace: the conversation, its turn, and from a session's
    second replay on its number. ``rank`` is who answered. ``hit`` of ``blocks`` leading blocks were sent before in this session.
    """

    key: str
    conversation: str
    turn: int
    replay: int
    lane: int
    phase: Phase
    rank: int
    input_tokens: int | None
    output_tokens: int
    hit: int
    blocks: int
    answer: Answered


class Position(msgspec.Struct, frozen=True):
    """Where a session is joined: ``at_s`` of its recorded time, when ``turns[i]`` is the next turn of stream i."""

    at_s: float
    turns: tuple[int, ...]


def begin(session: Session) -> Position:
    """Its first request."""
    return Position(session.turns[0].at_s, tuple(0 for _ in session.streams))


def joined(session: Session, at_s: float) -> Position:
    """Where it was at ``at_s``: the next turn of each stream is the first at or after that."""
    return Position(
        at_s, tuple(sum(1 for turn in stream.turns if turn.at_s < at_s) for stream in session.streams)
    )


def join(session: Session, *, lane: int, plan: Plan) -> Position:
    """Where ``lane`` joins its first session, by the plan's lot."""
    if plan.start_to == 0:
        return begin(session)
    order = in_order(session)
    first, last = (session.streams[place.stream].turns[place.turn].at_s for place in (order[0], order[-1]))
    name = int.from_bytes(session.session.encode()[-8:], "big")
    share = np.random.default_rng([plan.seed, lane, name]).uniform(plan.start_from, plan.start_to)
    return joined(session, first + share * (last - first))


class _Visit:
    """One replay of one session."""

    def __init__(self, session: Session, *, lane: int, replay: int, words: Words, plan: Plan) -> None:
        self.session = session
        self.lane = lane
        self.replay = replay
        self.mark = rid(plan.run, session.session, replay)
        run, mark = (plan.run, self.mark) if plan.is_marked else ("", None)
        self.prompts = Prompts(session, words, run=run, rid=mark)
        self.hits = session.hits
        self.ended: dict[int, asyncio.Event] = {}  # of sub-agents that have begun

    def key(self, place: Place) -> str:
        again = f"#{self.replay}" if self.replay else ""
        return f"{self.session.name_of(place.stream)}/{place.turn}{again}"


class Replay:
    """One replay of ``sessions``. ``send`` answers for each rank; ``keep`` is told of every record as soon as it is there."""

    def __init__(
        self,
        sessions: Sequence[Session],
        plan: Plan,
        *,
        words: Words,
        send: Send,
        interrupt: Callable[[], None],
        keep: Callable[[Record], None],
    ) -> None:
        self._plan = plan
        self._words = words
        self._send = send
        self._interrupt = interrupt
        self._keep = keep
        again = itertools.repeat(sessions) if plan.duration_s is not None else [sessions]
        self._next: Iterator[Session] = itertools.chain.from_iterable(again)
        self._replays: Counter[str] = Counter()
        self._over = asyncio.Event()
        self._pauses = Pauses(idle_s=plan.idle_s, lane_idle_s=plan.lane_idle_s)
        self.phase: Phase = "warm-up"
        self.open: dict[str, float] = {}  # requests under way, and when each was sent
        self._lost = 0  # requests in a row that reached nobody
        self.is_lost = False  # the server is gone

    @property
    def skipped_s(self) -> float:
        return self._pauses.skipped_s

    def end(self) -> None:
        """No further request begins."""
        self._over.set()
        self._pauses.end()

    async def run(self) -> None:
        """All of it: until every session was replayed, the time is over, ``end`` is called or the server is gone.

        Requests that are still under way after the grace time are interrupted, and their records say so.
        """
        firsts = list(itertools.islice(self._next, self._plan.lanes))
        visits = [self._visit(session, lane) for lane, session in enumerate(firsts)]
        async with asyncio.TaskGroup() as group:
            warm = [group.create_task(self._warm_up(visit)) for visit in visits]
        positions = [task.result() for task in warm]
        self.phase = "measured"
        now = asyncio.get_running_loop().time()
        first_s = min(
            _wait_s(visit.session, position) for visit, position in zip(visits, positions, strict=True)
        )
        lanes = asyncio.gather(
            *(
                self._lane(visit, position, now - first_s)
                for visit, position in zip(visits, positions, strict=True)
            )
        )
        over = asyncio.create_task(self._over.wait())
        await asyncio.wait([lanes, over], timeout=self._plan.duration_s, return_when=asyncio.FIRST_COMPLETED)
        self.end()
        over.cancel()
        await asyncio.wait([lanes], timeout=self._plan.grace_s)
        if not lanes.done():
            self._interrupt()
        await lanes

    def _visit(self, session: Session, lane: int) -> _Visit:
        visit = _Visit(
            session, lane=lane, replay=self._replays[session.session], words=self._words, plan=self._plan
        )
        self._replays[session.session] += 1
        return visit

    async def _warm_up(self, visit: _Visit) -> Position:
        """Fill the server's cache as it was where the lane joins; gives where measuring begins."""
        session = visit.session
        position = join(session, lane=visit.lane, plan=self._plan)
        for number, (stream, turn) in enumerate(zip(session.streams, position.turns, strict=True)):
            if 0 < turn < len(stream.turns) and not self._over.is_set():
                await self._warm(visit, Place(number, turn - 1))
        turns = list(position.turns)
        rest = [place for place in in_order(session) if place.turn >= turns[place.stream]]
        for place in rest[: max(0, min(self._plan.warmup_requests, len(rest) - 1))]:
            if self._over.is_set():
                break
            await self._warm(visit, place)
            turns[place.stream] = place.turn + 1
        following = next((place for place in rest if place.turn >= turns[place.stream]), None)
        if following is None:
            return Position(position.at_s, tuple(turns))
        at_s = session.streams[following.stream].turns[following.turn].at_s
        return Position(at_s if self._plan.warmup_requests else position.at_s, tuple(turns))

    async def _warm(self, visit: _Visit, place: Place) -> None:
        await self._request(visit, place, await _messages(visit, place), output_tokens=1)

    async def _lane(self, visit: _Visit, position: Position, begun_s: float) -> None:
        """Sessions one after another; the first one's recorded ``position.at_s`` is ``begun_s`` of the loop's time."""
        while True:
            await self._play(visit, position, begun_s)
            session = next(self._next, None)
            if session is None or self._over.is_set():
                return
            visit, position = self._visit(session, visit.lane), begin(session)
            begun_s = asyncio.get_running_loop().time()

    async def _play(self, visit: _Visit, position: Position, begun_s: float) -> None:
        """One session from ``position`` to the end of its last sub-agent."""
        async with asyncio.TaskGroup() as group:
            for number, stream in enumerate(visit.session.streams):
                turn = position.turns[number]
                open_already = stream.after is None or stream.after < position.turns[0]
                if turn < len(stream.turns) and open_already:
                    due_s = begun_s + stream.turns[turn].at_s - position.at_s
                    self._start(group, visit, number, turn, due_s)

    def _start(self, group: asyncio.TaskGroup, visit: _Visit, number: int, turn: int, due_s: float) -> None:
        visit.ended[number] = asyncio.Event()
        group.create_task(self._converse(group, visit, number, turn, due_s))

    async def _converse(
        self, group: asyncio.TaskGroup, visit: _Visit, number: int, first: int, due_s: float
    ) -> None:
        """One conversation from its turn ``first``, which is due at ``due_s``; it begins its sub-agents and waits for them."""
        stream = visit.session.streams[number]
        clock = asyncio.get_running_loop().time
        for turn in range(first, len(stream.turns)):
            messages = await _messages(
                visit, Place(number, turn)
            )  # while it pauses: a long prompt takes a while
            if number == 0:
                await self._joined(visit, turn)
            await self._pauses.until(due_s, lane=visit.lane)
            if self._over.is_set():
                break
            if await self._request(visit, Place(number, turn), messages) == "refused":
                break
            if turn + 1 < len(stream.turns):
                due_s = clock() + max(0.0, stream.turns[turn + 1].at_s - stream.turns[turn].ended_s)
            if number == 0:
                self._fan_out(group, visit, turn)
        visit.ended[number].set()

    async def _joined(self, visit: _Visit, turn: int) -> None:
        """Until all sub-agents have ended for which the session's own ``turn`` waited."""
        for number, stream in enumerate(visit.session.streams):
            if stream.before == turn and number in visit.ended:
                await visit.ended[number].wait()

    def _fan_out(self, group: asyncio.TaskGroup, visit: _Visit, turn: int) -> None:
        """Begin the sub-agents that the session's own ``turn`` began."""
        now = asyncio.get_running_loop().time()
        ended_s = visit.session.turns[turn].ended_s
        for number, stream in enumerate(visit.session.streams):
            if number and stream.after == turn and number not in visit.ended:
                self._start(group, visit, number, 0, now + max(0.0, stream.turns[0].at_s - ended_s))

    async def _request(
        self,
        visit: _Visit,
        place: Place,
        messages: list[dict[str, str]],
        *,
        output_tokens: int | None = None,
    ) -> Literal["answered", "refused"]:
        """Send one turn. "refused": later prompts of this conversation would be refused, too, for they begin with this one."""
        turn = visit.session.streams[place.stream].turns[place.turn]
        wanted = turn.output_tokens if output_tokens is None else output_tokens
        name = visit.session.name_of(place.stream)
        body = self._plan.body | {"messages": messages, "max_completion_tokens": wanted}
        headers = {
            "X-Request-ID": str(uuid.uuid4()),
            "X-Correlation-ID": f"{visit.mark}-{place.stream}",
        }
        phase, key = self.phase, visit.key(place)
        self._pauses.sent(visit.lane)
        self.open[key] = time.perf_counter()
        try:
            answers = await self._send(Call(key=key, path=CHAT, body=body, headers=headers))
        finally:
            del self.open[key]
            self._pauses.answered(visit.lane)
        hit = visit.hits.get(place, Blocks(0, 0))
        for rank, answer in enumerate(answers):
            self._keep(
                Record(
                    key=key,
                    conversation=name,
                    turn=place.turn,
                    replay=visit.replay,
                    lane=visit.lane,
                    phase=phase,
                    rank=rank,
                    input_tokens=turn.input_tokens,
                    output_tokens=wanted,
                    hit=hit.hit,
                    blocks=hit.total,
                    answer=answer,
                )
            )
        is_away = any(answer.fault == "unreachable" for answer in answers)
        self._lost = self._lost + 1 if is_away else 0
        if self._lost == AWAY_AFTER:
            self.is_lost = True
            self.end()
        is_refused = any(400 <= answer.status < 500 and answer.status != TOO_MANY for answer in answers)
        return "refused" if is_refused else "answered"


async def _messages(visit: _Visit, place: Place) -> list[dict[str, str]]:
    """In a thread, so that no other request waits for it."""
    return await asyncio.to_thread(visit.prompts.messages, place)


def _wait_s(session: Session, position: Position) -> float:
    """From ``position`` to its next request."""
    pending = [
        stream.turns[turn].at_s
        for stream, turn in zip(session.streams, position.turns, strict=True)
        if turn < len(stream.turns) and (stream.after is None or stream.after < position.turns[0])
    ]
    return max(0.0, min(pending, default=position.at_s) - position.at_s)
