"""The replay itself, against a sender that answers at once or after a set time: order, lanes, sub-agents, warm-up, ends."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from flashstep.bench.load.client import AWAY_AFTER, Answered, Call
from flashstep.bench.load.floor import LagWatch
from flashstep.bench.load.lengths import CANDIDATES, Words
from flashstep.bench.load.replay import Plan, Position, Record, Replay, join
from flashstep.bench.load.sessions import Agent, Session, Turn

WORDS = Words(CANDIDATES[:48], 0)
SERVICE_S = 0.02


def turns(number: int, *, at_s: float = 0.0, first_block: int = 1, every_s: float = 0.03) -> tuple[Turn, ...]:
    return tuple(
        Turn(
            at_s=at_s + every_s * place,
            service_s=SERVICE_S,
            input_tokens=64 * (place + 1),
            output_tokens=5,
            blocks=tuple(range(first_block, first_block + place + 1)),
        )
        for place in range(number)
    )


def session(name: str, number: int, *agents: Agent) -> Session:
    return Session(session=name, turns=turns(number), agents=agents)


def agent(name: str, *, at_s: float, number: int) -> Agent:
    made = turns(number, at_s=at_s, first_block=100)
    return Agent(name=name, at_s=at_s, ended_s=made[-1].ended_s, turns=made)


class Sender:
    """Answers each call after ``service_s``; remembers when each began and ended."""

    def __init__(self, *, service_s: float = SERVICE_S, **answer: Any) -> None:
        self.calls: list[Call] = []
        self.spans: dict[str, tuple[float, float]] = {}
        self.most = self.running = 0
        self._service_s = service_s
        self._answer = answer
        self.interrupted = asyncio.Event()

    async def __call__(self, call: Call) -> Sequence[Answered]:
        self.calls.append(call)
        self.running += 1
        self.most = max(self.most, self.running)
        begun = time.perf_counter()
        try:
            async with asyncio.timeout(self._service_s):
                await self.interrupted.wait()
        except TimeoutError:
            pass
        self.running -= 1
        self.spans[call.key] = (begun, time.perf_counter())
        fault = "interrupted" if self.interrupted.is_set() else ""
        known = {
            "key": call.key,
            "sent_s": begun,
            "ended_s": time.perf_counter(),
            "status": 200,
            "fault": fault,
        }
        return [msgspec.convert(known | self._answer, Answered)]


async def replayed(sessions: list[Session], sender: Sender, **plan: Any) -> tuple[list[Record], Replay]:
    records: list[Record] = []
    replay = Replay(
        sessions,
        Plan(run="test", **plan),
        words=WORDS,
        send=sender,
        interrupt=sender.interrupted.set,
        keep=records.append,
    )
    async with asyncio.timeout(20):
        await replay.run()
    return records, replay


def keys(records: list[Record]) -> list[str]:
    return [record.key for record in records]


async def test_every_session_is_replayed_once_in_order_with_its_pauses() -> None:
    sender = Sender()
    records, _ = await replayed([session("a", 3), session("b", 2)], sender)
    assert keys(records) == ["a/0", "a/1", "a/2", "b/0", "b/1"]
    assert all(record.phase == "measured" for record in records)
    for before, after in (("a/0", "a/1"), ("a/1", "a/2"), ("b/0", "b/1")):
        assert sender.spans[after][0] - sender.spans[before][1] >= 0.009, "the recorded pause is 10 ms"


async def test_lanes_hold_one_session_each() -> None:
    sender = Sender()
    records, _ = await replayed([session(name, 3) for name in "abcdefg"], sender, lanes=3)
    assert sorted(keys(records)) == sorted(f"{name}/{turn}" for name in "abcdefg" for turn in range(3))
    assert sender.most == 3
    assert {record.lane for record in records} == {0, 1, 2}


async def test_sub_agents_run_beside_one_another_and_their_parent_waits_for_them() -> None:
    begin = SERVICE_S + 0.001
    both = [agent(name, at_s=begin, number=3) for name in ("x", "y")]
    own = list(turns(3))
    end = both[0].ended_s + 0.005
    own[1:] = [msgspec.structs.replace(turn, at_s=end + 0.03 * place) for place, turn in enumerate(own[1:])]
    whole = Session(session="s", turns=tuple(own), agents=tuple(both))
    sender = Sender(service_s=3 * SERVICE_S)  # slower than recorded: only waiting keeps the order
    await replayed([whole], sender)
    spans = sender.spans
    assert spans["s::sa:x/0"][0] < spans["s::sa:y/0"][1] and spans["s::sa:y/0"][0] < spans["s::sa:x/0"][1]
    assert spans["s::sa:x/0"][0] >= spans["s/0"][1]
    assert spans["s/1"][0] >= max(spans["s::sa:x/2"][1], spans["s::sa:y/2"][1])
    assert sender.most == 2


async def test_a_lane_keeps_its_session_until_the_last_sub_agent_has_ended() -> None:
    late = Session(session="s", turns=turns(1), agents=(agent("x", at_s=0.03, number=4),))
    sender = Sender()
    await replayed([late, session("t", 1)], sender)
    assert sender.spans["t/0"][0] >= sender.spans["s::sa:x/3"][1]


async def test_for_a_time_sessions_are_taken_again_under_new_names() -> None:
    sender = Sender(service_s=0.005)
    records, _ = await replayed([session("a", 2), session("b", 1)], sender, duration_s=0.6)
    found = keys(records)
    assert len(set(found)) == len(found)
    assert found[:6] == ["a/0", "a/1", "b/0", "a/0#1", "a/1#1", "b/0#1"]
    first, again = (next(call for call in sender.calls if call.key == key) for key in ("a/0", "a/0#1"))
    assert first.body["messages"] != again.body["messages"], "another replay has another mark"
    mark = first.body["messages"][0]["content"][:22]
    assert (
        first.body["messages"][0]["content"].removeprefix(mark)[:60] in again.body["messages"][0]["content"]
    )


async def test_a_lane_joins_a_session_in_its_middle_and_warms_what_came_before() -> None:
    sender = Sender()
    plan = {"duration_s": 0.05, "start_from": 0.5, "start_to": 0.5}
    whole = Session(session="s", turns=turns(5), agents=(agent("x", at_s=0.021, number=4),))
    records, _ = await replayed([whole], sender, **plan)
    warm = [record for record in records if record.phase == "warm-up"]
    assert keys(warm) == ["s/1", "s::sa:x/1"], "half of 0.12 s is at the third turn of each"
    assert [call.body["max_completion_tokens"] for call in sender.calls[:3]] == [1, 1, 5]
    assert keys(records)[2:4] == ["s/2", "s::sa:x/2"]
    assert all(a.hit == a.blocks - 1 for a in records if a.turn), (
        "what a prompt shares with the one before is a hit"
    )


async def test_more_warm_up_goes_on_in_recorded_order_and_leaves_something_to_measure() -> None:
    sender = Sender()
    records, _ = await replayed([session("s", 6)], sender, warmup_requests=2)
    assert [(r.key, r.phase, r.output_tokens) for r in records[:3]] == [
        ("s/0", "warm-up", 1),
        ("s/1", "warm-up", 1),
        ("s/2", "measured", 5),
    ]
    records, _ = await replayed([session("s", 2)], Sender(), warmup_requests=9)
    assert [record.phase for record in records] == ["warm-up", "measured"]


async def test_where_a_lane_joins_is_the_seed_s() -> None:
    whole = session("s", 50)
    plan = Plan(run="r", start_from=0.25, start_to=0.75)

    def joined(lane: int, seed: int) -> Position:
        return join(whole, lane=lane, plan=msgspec.structs.replace(plan, seed=seed))

    assert joined(0, 1) == joined(0, 1) != joined(1, 1)
    assert joined(0, 2) != joined(0, 1)
    shares = [joined(lane, 1).turns[0] / 50 for lane in range(300)]
    assert 0.24 <= min(shares) < 0.28 and 0.72 < max(shares) <= 0.76


@pytest.mark.parametrize("text", ["", "something quite different"])
async def test_prompts_do_not_depend_on_what_the_model_answers(text: str) -> None:
    sender = Sender(text=text)
    await replayed([session("s", 4)], sender)
    digest = hash(msgspec.json.encode([call.body for call in sender.calls]))
    plain = Sender()
    await replayed([session("s", 4)], plain)
    assert digest == hash(msgspec.json.encode([call.body for call in plain.calls]))


async def test_requests_have_names_of_their_own_and_conversations_one_each() -> None:
    sender = Sender()
    await replayed([session("s", 2, agent("x", at_s=0.021, number=2))], sender)
    assert len({call.headers["X-Request-ID"] for call in sender.calls}) == 4
    named: dict[str, set[str]] = {}
    for call in sender.calls:
        named.setdefault(call.key.rpartition("/")[0], set()).add(call.headers["X-Correlation-ID"])
    own, other = named["s"], named["s::sa:x"]
    assert len(own) == len(other) == 1 and own != other


async def test_a_refused_conversation_ends_there() -> None:
    sender = Sender(status=400, fault="status", error="too long")
    records, _ = await replayed([session("a", 3), session("b", 3)], sender)
    assert keys(records) == ["a/0", "b/0"]


async def test_a_failed_answer_does_not_end_a_conversation() -> None:
    records, _ = await replayed([session("a", 3)], Sender(status=500, fault="status", error="oops"))
    assert keys(records) == ["a/0", "a/1", "a/2"]


async def test_a_server_that_is_gone_ends_the_replay() -> None:
    sender = Sender(status=0, fault="unreachable", error="refused")
    records, replay = await replayed([session("a", AWAY_AFTER + 3), session("b", 3)], sender)
    assert keys(records) == [f"a/{n}" for n in range(AWAY_AFTER)] and replay.is_lost


async def test_a_request_that_did_not_reach_the_server_does_not_end_the_replay() -> None:
    sender = Sender(status=0, fault="unreachable", error="refused")
    records, replay = await replayed([session("a", 3), session("b", 3)], sender)
    assert len(records) == 6 and not replay.is_lost


async def test_a_long_prompt_in_the_making_holds_up_nobody() -> None:
    """160,000 tokens, no two blocks alike: the loop is free meanwhile (a thread takes turns with it)."""
    blocks = tuple(range(20_000))
    turn = Turn(at_s=0.0, service_s=0.0, input_tokens=64 * len(blocks), output_tokens=5, blocks=blocks)
    async with LagWatch() as watch:
        start_s = time.perf_counter()
        await replayed([Session(session="long", turns=(turn,))], Sender(service_s=0.0))
        made_s = time.perf_counter() - start_s
    assert 1e-3 * watch.lag().max_ms < made_s / 3


async def test_what_is_under_way_after_the_grace_time_is_interrupted_and_kept() -> None:
    sender = Sender(service_s=60)
    records, _ = await replayed([session("a", 3)], sender, duration_s=0.05, grace_s=0.05)
    assert [(record.key, record.answer.fault) for record in records] == [("a/0", "interrupted")]


async def test_an_end_from_outside_ends_during_warm_up_too() -> None:
    sender = Sender(service_s=0.05)
    records: list[Record] = []
    plan = Plan(run="r", warmup_requests=1000)
    replay = Replay(
        [session("a", 1000)],
        plan,
        words=WORDS,
        send=sender,
        interrupt=sender.interrupted.set,
        keep=records.append,
    )
    running = asyncio.create_task(replay.run())
    await asyncio.sleep(0.12)
    replay.end()
    async with asyncio.timeout(10):
        await running
    assert 0 < len(records) < 10 and all(record.phase == "warm-up" for record in records)


async def test_long_pauses_are_cut_where_nothing_runs() -> None:
    far = (turns(1)[0], msgspec.structs.replace(turns(2)[1], at_s=3600.0))
    _, replay = await replayed([Session(session="s", turns=far)], Sender(), idle_s=0.05)
    assert 3598 < replay.skipped_s < 3600
