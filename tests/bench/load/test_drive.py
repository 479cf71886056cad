"""Sending a plan: at its times, in its order, no more at once than allowed, and not on and on to a server that is gone."""

import asyncio
import time
from collections.abc import Iterator
from itertools import pairwise

import pytest

from flashstep.bench.load.bodies import Shape
from flashstep.bench.load.client import Answered, Call, Client
from flashstep.bench.load.drive import AWAY_AFTER, Drive, Record
from flashstep.bench.load.floor import LagWatch
from flashstep.bench.load.prompts import Session, Turn

SHAPE = Shape(model="m", history="live")


class Answering(Client):
    """Answers by itself after ``takes_s``; remembers what was sent and how many were open at once."""

    def __init__(self, takes_s: float = 0.02, fault: str = "") -> None:
        super().__init__("http://unused")
        self._takes_s, self._fault = takes_s, fault
        self.calls: list[tuple[float, Call]] = []
        self.now = self.most = 0

    async def send(self, call: Call) -> Answered:
        sent_s = time.perf_counter()
        self.calls.append((sent_s, call))
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(self._takes_s)
        self.now -= 1
        return Answered(
            key=call.key,
            sent_s=sent_s,
            ended_s=time.perf_counter(),
            text=f"answer {call.key}",
            fault=self._fault,
        )


def sessions(number: int, turns: int = 1, think_s: float = 0.0) -> Iterator[Session]:
    for n in range(number):
        asked = [
            Turn(messages=({"role": "user", "content": f"{n}/{t}"},), think_s=think_s if t else 0.0)
            for t in range(turns)
        ]
        yield Session(key=str(n), turns=tuple(asked))


def at(times: list[float], plan: Iterator[Session]) -> Iterator[tuple[float, Session]]:
    return zip(times, plan, strict=False)


async def test_an_open_loop_sends_at_its_times_however_many_are_open() -> None:
    client, records = Answering(takes_s=0.5), list[Record]()
    start_s = time.perf_counter()
    await Drive(client, SHAPE, take=records.append).run(at([0.0, 0.1, 0.2, 0.3], sessions(4)))
    assert client.most == 4
    for (sent_s, _), due_s in zip(client.calls, [0.0, 0.1, 0.2, 0.3], strict=True):
        assert sent_s - start_s >= due_s - 1e-3
    begun_s = records[0].due_s
    assert begun_s >= start_s
    assert [record.due_s - begun_s for record in records] == pytest.approx([0.0, 0.1, 0.2, 0.3])


@pytest.mark.parametrize("most", [1, 3])
async def test_a_closed_loop_has_no_more_open_than_allowed_and_keeps_the_order(most: int) -> None:
    client, records = Answering(), list[Record]()
    drive = Drive(client, SHAPE, take=records.append, max_concurrency=most)
    await drive.run(at([0.0] * 12, sessions(12)))
    assert client.most == most
    assert [call.key for _, call in client.calls] == [str(n) for n in range(12)]
    assert len(records) == 12 and not drive.open


async def test_a_rate_and_a_limit_together() -> None:
    client = Answering(takes_s=0.3)
    start_s = time.perf_counter()
    await Drive(client, SHAPE, take=lambda _: None, max_concurrency=1).run(at([0.0, 0.05, 0.9], sessions(3)))
    sent = [sent_s - start_s for sent_s, _ in client.calls]
    assert client.most == 1
    assert sent[1] >= 0.3, "its time had come, but no place was free"
    assert sent[2] >= 0.9, "a place was free, but its time had not come"


async def test_turns_follow_one_another_with_their_pauses_and_live_answers() -> None:
    client, records = Answering(), list[Record]()
    await Drive(client, SHAPE, take=records.append).run(at([0.0], sessions(1, turns=3, think_s=0.1)))
    assert [call.key for _, call in client.calls] == ["0/0", "0/1", "0/2"]
    last = client.calls[-1][1].body["messages"]
    assert [message["content"] for message in last] == ["0/0", "answer 0/0", "0/1", "answer 0/1", "0/2"]
    for before, after in pairwise(records):
        assert after.answered.sent_s - before.answered.ended_s >= 0.099


async def test_a_failed_turn_ends_its_session() -> None:
    client, records = Answering(fault="status"), list[Record]()
    drive = Drive(client, SHAPE, take=records.append)
    await drive.run(at([0.0, 0.0], sessions(2, turns=3)))
    assert len(records) == 2 and drive.left_out == 4 and not drive.stopped


async def test_a_duration_ends_the_sending_and_waits_for_what_is_open() -> None:
    client, records = Answering(takes_s=0.1), list[Record]()
    drive = Drive(client, SHAPE, take=records.append, max_concurrency=2, duration_s=0.35)
    await drive.run(at([0.0] * 1000, sessions(1000)))
    assert 2 <= len(records) <= 8 and len(records) == len(client.calls)
    assert not drive.stopped, "a duration is a plan's own end"


async def test_a_server_that_is_gone_is_not_asked_forever() -> None:
    client, records = Answering(takes_s=0.0, fault="unreachable"), list[Record]()
    drive = Drive(client, SHAPE, take=records.append, max_concurrency=1)
    await drive.run(at([0.0] * 1000, sessions(1000)))
    assert AWAY_AFTER <= len(records) <= AWAY_AFTER + 1
    assert "the server is gone" in drive.stopped


async def test_a_stop_wakes_what_waits_for_its_time() -> None:
    client, records = Answering(), list[Record]()
    drive = Drive(client, SHAPE, take=records.append)
    running = asyncio.create_task(drive.run(at([0.0, 3600.0], sessions(2, turns=2, think_s=3600.0))))
    await asyncio.sleep(0.2)
    drive.stop("enough")
    await asyncio.wait_for(running, 10)
    assert len(records) == 1 and drive.stopped == "enough"


async def test_a_plan_that_takes_long_to_make_holds_up_no_answer() -> None:
    def slow() -> Iterator[tuple[float, Session]]:
        for session in sessions(200):
            until = time.perf_counter() + 0.004
            while time.perf_counter() < until:
                pass
            yield 0.0, session

    client = Answering(takes_s=0.0)
    async with LagWatch() as watch:
        await Drive(client, SHAPE, take=lambda _: None, max_concurrency=4).run(slow())
    assert len(client.calls) == 200 and watch.lag().p50_ms < 60, "a batch of 64 takes 256 ms to make"
