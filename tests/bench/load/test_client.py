"""One request: what is timed and counted, and what becomes of every way in which a server can be bad."""

import asyncio
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from flashstep.bench.load.client import Answered, Call, Client
from tests.bench.load.stub import Stub

PIECES_BEFORE_IT_BREAKS = 2


@pytest.fixture(scope="module")
def stub() -> Iterator[Stub]:
    with Stub() as started:
        yield started


def call(behave: str = "", tokens: int = 5, **fields: Any) -> Call:
    body = {
        "messages": [{"role": "user", "content": "one two three"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_completion_tokens": tokens,
        "metadata": {"behave": behave},
    }
    return Call(key="k", path="/v1/chat/completions", body=body | fields)


async def answer(url: str, asked: Call, *, timeout_s: float = 20.0) -> Answered:
    async with Client(url, timeout_s=timeout_s) as client:
        return await client.send(asked)


async def test_a_whole_answer_has_its_counts_and_times(stub: Stub) -> None:
    answered = await answer(stub.url + "/v1", call())
    assert (answered.fault, answered.error, answered.status) == ("", "", 200)
    assert (answered.prompt_tokens, answered.output_tokens, answered.tokens_from) == (7, 5, "usage")
    assert answered.text == " w0 w1 w2 w3 w4" and answered.finish_reason == "length"
    contents = answered.content_s
    assert len(contents) == 5 and len(answered.gaps_s) == 4
    assert answered.sent_s < contents[0] == answered.first_s
    assert contents[-1] == answered.last_s
    assert answered.itl_s == pytest.approx((contents[-1] - contents[0]) / 4)
    assert answered.latency_s == pytest.approx(contents[-1] - answered.sent_s)


async def test_completions_have_text(stub: Stub) -> None:
    body = {"prompt": "one two", "stream": True, "max_tokens": 3}
    answered = await answer(stub.url, Call(key="k", path="/v1/completions", body=body))
    assert answered.text == " w0 w1 w2" and not answered.fault


@pytest.mark.parametrize(
    ("behave", "fault", "told"),
    [
        ("error event", "error event", "the engine fell over"),
        ("malformed", "malformed", "the event begins '{\"choices\": 7}'"),
        ("cut", "cut off", "the connection broke"),
        ("no end", "cut off", "without a finish reason"),
    ],
)
async def test_a_stream_that_breaks_keeps_what_came(stub: Stub, behave: str, fault: str, told: str) -> None:
    answered = await answer(stub.url, call(behave))
    assert answered.fault == fault and told in answered.error
    assert answered.text == " w0 w1" and len(answered.content_s) == PIECES_BEFORE_IT_BREAKS
    assert answered.first_s is not None and answered.ended_s >= answered.first_s
    assert answered.output_tokens is None, "nothing counted the tokens of the part that came"


@pytest.mark.parametrize("status", [429, 500])
async def test_a_refusal_has_the_servers_sentence(stub: Stub, status: int) -> None:
    answered = await answer(stub.url, call(str(status)))
    assert (answered.fault, answered.status) == ("status", status)
    assert answered.error == f"HTTP {status}: told why: {status}"


async def test_a_page_is_no_stream(stub: Stub) -> None:
    answered = await answer(stub.url, call("html"))
    assert answered.fault == "not a stream"
    assert "text/html" in answered.error and "a proxy's page" in answered.error


async def test_a_server_that_never_ends_is_left_in_time(stub: Stub) -> None:
    answered = await answer(stub.url, call("hang"), timeout_s=0.3)
    assert answered.fault == "timeout" and "0.3 s" in answered.error
    assert answered.text == " w0 w1"


async def test_a_slow_first_token_is_all_in_the_ttft(stub: Stub) -> None:
    answered = await answer(stub.url, call("slow first"))
    assert not answered.fault and answered.ttft_s is not None and answered.itl_s is not None
    assert answered.ttft_s >= 0.5 and answered.itl_s < answered.ttft_s / 5


async def test_missing_usage_is_no_count(stub: Stub) -> None:
    answered = await answer(stub.url, call("no usage"))
    assert not answered.fault and len(answered.content_s) == 5
    assert (answered.output_tokens, answered.tokens_from, answered.itl_s) == (None, None, None)
    assert answered.ttft_s is not None


async def test_nobody_there() -> None:
    answered = await answer("http://127.0.0.1:1", call())
    assert answered.fault == "unreachable" and answered.status == 0
    assert "cannot be reached" in answered.error and "Connection refused" in answered.error


async def test_a_killed_server_leaves_the_part_that_came() -> None:
    with Stub() as stub:
        async with Client(stub.url, timeout_s=20) as client:
            asked = asyncio.create_task(client.send(call("hang")))
            await asyncio.sleep(0.3)
            stub.process.send_signal(signal.SIGKILL)
            answered = await asked
    assert answered.fault == "cut off" and answered.text == " w0 w1"


async def test_an_interrupt_ends_what_is_open_and_what_comes_later(stub: Stub) -> None:
    async with Client(stub.url, timeout_s=60) as client:
        asked = asyncio.create_task(client.send(call("hang")))
        await asyncio.sleep(0.2)
        client.interrupt()
        answered = await asyncio.wait_for(asked, 10)
        later = await client.send(call())
    assert (answered.fault, answered.text) == ("interrupted", " w0 w1")
    assert later.fault == "interrupted" and later.status == 0


async def test_a_task_that_is_cancelled_is_cancelled(stub: Stub) -> None:
    """A caller's own deadline works: only ``interrupt`` turns into an answer."""
    async with Client(stub.url) as client:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.send(call("hang")), 0.2)


def test_a_url_without_a_scheme_is_refused() -> None:
    with pytest.raises(ValueError, match="begins with http"):
        Client("127.0.0.1:8000")


async def test_key_and_headers_go_with_every_request_and_the_body_as_it_is() -> None:
    heads: list[tuple[str, bytes]] = []

    async def keep(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = head.lower().partition("content-length: ")[2].partition("\r")[0]
        heads.append((head, await reader.readexactly(int(length or 0))))
        writer.write(b"HTTP/1.1 307 Elsewhere\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(keep, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1/"
    async with server, Client(url, api_key="secret", headers={"X-One": "1"}) as client:
        asked = Call(
            key="k", path="/v1/completions", body={"prompt": "\u20ac", "n": 1.5}, headers={"X-Two": "2"}
        )
        answered = await client.send(asked)
        assert await client.models() == []
    (posted, body), (got, _) = heads
    assert posted.startswith("POST /v1/completions HTTP/1.1\r\n") and got.startswith("GET /v1/models ")
    for head in (posted, got):
        assert "Authorization: Bearer secret\r\n" in head and "X-One: 1\r\n" in head
    assert "X-Two: 2\r\n" in posted and "X-Two" not in got
    assert body.decode() == '{"prompt":"\u20ac","n":1.5}'
    assert (answered.fault, answered.status) == ("status", 307), "a load goes where it was sent, or nowhere"
