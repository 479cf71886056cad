"""The server's view of an engine; the engine here is the other end of the real wire, spoken by hand."""

import asyncio
import time
from contextlib import asynccontextmanager

import pytest

from flashstep.ipc import messages
from flashstep.ipc.channel import Addresses, EngineEnd
from flashstep.ipc.client import MESSAGES_AT_ONCE, EngineClient, EngineDied, RequestRejected
from flashstep.ipc.messages import Outputs, RequestOutput
from flashstep.request import Acceptance
from tests.ipc.test_channel import READY, STATS
from tests.scheduler.driving import request

ACCEPTANCE = Acceptance(
    synthetic=False,
    num_tokens=1,
    steps=3,
    draft_tokens=3,
    accepted_tokens=2,
    histogram=(1, 2),
    per_position=(2,),
)


@asynccontextmanager
async def pair(*, ready: bool = True):
    addresses = Addresses.fresh()
    client, engine = EngineClient(addresses), EngineEnd(addresses)
    try:
        if ready:
            engine.send(READY)
            await client.start(timeout_s=5)
        yield client, engine
    finally:
        client.close()
        engine.close()
        addresses.remove()


async def heard(engine):
    for _ in range(1000):
        message = engine.receive()
        if message is not None:
            return message
        await asyncio.sleep(0.002)
    raise AssertionError("the engine heard nothing")


def output(name: str, *tokens: int, **rest) -> RequestOutput:
    return RequestOutput(id=name, tokens=tokens, **rest)


async def collect(stream) -> list[RequestOutput]:
    return [item async for item in stream]


async def test_ready_tells_what_the_engine_is():
    async with pair() as (client, _):
        assert client.ready == READY
        assert client.alive


async def test_start_times_out_and_a_failure_before_ready_is_raised():
    async with pair(ready=False) as (client, _):
        with pytest.raises(TimeoutError):
            await client.start(timeout_s=0.05)
    async with pair(ready=False) as (client, engine):
        engine.send(messages.Failed("no such file"))
        with pytest.raises(EngineDied, match="no such file"):
            await client.start(timeout_s=5)


async def test_each_stream_gets_its_own_outputs_in_order():
    async with pair() as (client, engine):
        a, b = client.submit([request("a", (1,)), request("b", (2,))])
        assert [item.id for item in (await heard(engine)).requests] == ["a", "b"]
        reading = asyncio.gather(collect(a), collect(b))
        for step in range(5):
            engine.send(Outputs((output("a", step), output("b", 10 + step))))
        engine.send(
            Outputs(
                (output("b", finish_reason="stop", stop_token=1), output("a", 99, finish_reason="length"))
            )
        )
        got_a, got_b = await asyncio.wait_for(reading, 5)
        assert [t for item in got_a for t in item.tokens] == [0, 1, 2, 3, 4, 99]
        assert [t for item in got_b for t in item.tokens] == [10, 11, 12, 13, 14]
        assert (got_a[-1].finish_reason, got_b[-1].finish_reason) == ("length", "stop")
        assert client.num_unfinished == 0


async def test_a_slow_reader_gets_everything_merged_into_one():
    async with pair() as (client, engine):
        (stream,) = client.submit([request("a", (1,))])
        engine.send(
            Outputs((output("a", 1, cached_tokens=32, replayed_tokens=0, queued_s=0.5, prefill_s=1.5),))
        )
        engine.send(Outputs((output("a", 2),)))
        last = {"finish_reason": "stop", "stop_token": 3, "preemptions": 2, "acceptance": ACCEPTANCE}
        engine.send(Outputs((output("a", 3, **last),)))
        await asyncio.sleep(0.2)
        assert await collect(stream) == [
            output(
                "a",
                1,
                2,
                3,
                cached_tokens=32,
                replayed_tokens=0,
                queued_s=0.5,
                prefill_s=1.5,
                **last,
            )
        ]


async def test_choices_of_one_prompt_send_it_once():
    async with pair() as (client, engine):
        long, same = (7,) * 1000, [1] * 3
        sent = [
            request("a", (1,)), request("b", long), request("c", long), request("d", long),
            request("e", (2,)), request("f", tuple(same)), request("g", tuple(same)),
        ]  # fmt: skip
        client.submit(sent)
        message = await heard(engine)
        assert sum(len(item.prompt) for item in message.requests) == 1 + 1000 + 1 + 3 + 3
        assert message.whole() == sent


async def test_an_aborted_stream_still_gives_its_last_output():
    async with pair() as (client, engine):
        (stream,) = client.submit([request("a", (1,))])
        stream.abort()
        assert isinstance(await heard(engine), messages.Submit)
        assert await heard(engine) == messages.Abort(("a",))
        engine.send(Outputs((output("a", finish_reason="abort", acceptance=ACCEPTANCE),)))
        assert [item.acceptance for item in await collect(stream)] == [ACCEPTANCE]
        assert stream.done
        stream.close()
        await asyncio.sleep(0.05)
        assert engine.receive() is None, "nothing is left to abort"


async def test_what_comes_with_the_first_token_survives_a_merge_with_what_came_before():
    async with pair() as (client, engine):
        (stream,) = client.submit([request("a", (1,))])
        scores = (messages.TokenLogprob(5, -1.0, 1),)
        engine.send(Outputs((output("a", prompt_logprobs=scores),)))
        engine.send(
            Outputs((output("a", 1, cached_tokens=0, replayed_tokens=0, queued_s=0.5, prefill_s=1.5),))
        )
        engine.send(Outputs((output("a", 2, finish_reason="length"),)))
        await asyncio.sleep(0.2)
        (merged,) = await collect(stream)
        assert merged.prompt_logprobs == scores and merged.tokens == (1, 2)
        assert (merged.cached_tokens, merged.queued_s, merged.prefill_s) == (0, 0.5, 1.5)


async def test_what_cannot_be_sent_leaves_no_stream():
    async with pair() as (client, _):
        with pytest.raises(OverflowError):
            client.submit([request("a", (1 << 64,))])
        assert client.num_unfinished == 0


async def test_a_flood_leaves_the_loop_its_turns_and_is_read_to_its_end():
    async with pair() as (client, engine):
        (stream,) = client.submit([request("a", (1,))])
        for step in range(1000):
            engine.send(Outputs((output("a", step, finish_reason="length" if step == 999 else None),)))
        time.sleep(
            0.2
        )  # the loop stands still: everything is there when it goes on, and no edge comes after the first
        turns = 0
        while client.num_unfinished:
            await asyncio.sleep(0)
            turns += 1
            assert turns < 100_000, "the rest of the flood was never read"
        assert turns > 1000 // MESSAGES_AT_ONCE
        assert [t for item in await collect(stream) for t in item.tokens] == list(range(1000))


async def test_leaving_early_aborts_and_finishing_does_not():
    async with pair() as (client, engine):
        with client.submit([request("a", (1,))])[0] as stream:
            await heard(engine)
            engine.send(Outputs((output("a", 1),)))
            await anext(stream)
        assert await heard(engine) == messages.Abort(("a",))
        assert client.num_unfinished == 0
        engine.send(Outputs((output("a", 2),)))  # was on its way: ignored
        with client.submit([request("b", (1,))])[0] as stream:
            await heard(engine)
            engine.send(Outputs((output("b", 1, finish_reason="stop"),)))
            await collect(stream)
        await asyncio.sleep(0.05)
        assert engine.receive() is None, "no abort after a normal end"


async def test_a_cancelled_reader_aborts():
    async with pair() as (client, engine):

        async def read():
            with client.submit([request("a", (1,))])[0] as stream:
                await collect(stream)

        task = asyncio.create_task(read())
        await heard(engine)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await heard(engine) == messages.Abort(("a",))


async def test_abort_by_id_is_answered_in_the_stream():
    async with pair() as (client, engine):
        (stream,) = client.submit([request("a", (1,))])
        await heard(engine)
        client.abort(["a", "unknown"])
        assert await heard(engine) == messages.Abort(("a",))
        engine.send(Outputs((output("a", finish_reason="abort"),)))
        assert [item.finish_reason for item in await collect(stream)] == ["abort"]
        client.abort(["a"])
        await asyncio.sleep(0.02)
        assert engine.receive() is None


async def test_a_rejection_is_raised_with_its_reason():
    async with pair() as (client, engine):
        (stream,) = client.submit([request("a", (1,))])
        engine.send(messages.Rejected("a", "the prompt is too long"))
        with pytest.raises(RequestRejected, match="too long"):
            await collect(stream)
        assert client.num_unfinished == 0


async def test_a_failure_reaches_every_stream_after_what_had_come():
    async with pair() as (client, engine):
        a, b = client.submit([request("a", (1,)), request("b", (2,))])
        engine.send(Outputs((output("a", 7),)))
        engine.send(messages.Failed("out of luck"))
        assert await asyncio.wait_for(client.wait_failed(), 5) == "out of luck"
        assert (await anext(a)).tokens == (7,)
        for stream in (a, b):
            with pytest.raises(EngineDied, match="out of luck"):
                await anext(stream)
        assert not client.alive and client.failure == "out of luck"


async def test_stats_are_the_newest():
    async with pair() as (client, engine):
        assert client.stats is None
        engine.send(STATS)
        for _ in range(100):
            if client.stats is not None:
                break
            await asyncio.sleep(0.01)
        assert client.stats == STATS


async def test_fifty_thousand_tokens_a_second_cost_little_of_a_core():
    """256 streams, a token each a step; CPU time, so that a busy machine does not matter."""
    async with pair() as (client, engine):
        streams, steps = 256, 200
        requests = [request(f"request-{i:08}", (1,)) for i in range(streams)]

        async def count(stream) -> int:
            total = 0
            async for item in stream:
                total += len(item.tokens)
            return total

        readers = asyncio.gather(*(count(stream) for stream in client.submit(requests)))
        await heard(engine)
        sending = 0.0
        start = time.process_time()
        for step in range(steps):
            reason = "length" if step == steps - 1 else None
            before = time.process_time()
            engine.send(Outputs(tuple(output(r.id, step, finish_reason=reason) for r in requests)))
            sending += time.process_time() - before
            await asyncio.sleep(0)  # the readers keep up: no merging to help
            await asyncio.sleep(0)
        assert sum(await readers) == streams * steps
        spent = time.process_time() - start - sending
        per_second = streams * steps / spent
        print(f"{per_second:,.0f} tokens a second of CPU in the client")
        assert per_second > 100_000  # half of a core is left for HTTP at 50,000
