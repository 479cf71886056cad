"""Answers that a real server gives only on a bad day: each is told for what it is, and no server commands a terminal."""

import asyncio
import base64
import errno
import json
import resource
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from flashstep.bench.load.causes import shown
from flashstep.bench.load.client import Answered, Call, Client
from flashstep.bench.load.target import ServerAway, await_server, chosen_model

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
CALL = Call(key="k", path="/v1/completions", body={"prompt": "a"})
Serve = Callable[[str, asyncio.StreamWriter], Awaitable[None]]


def event(value: Any) -> bytes:
    data = b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(data), data)


def text(words: str, reason: str | None = None, **fields: Any) -> bytes:
    return event({"choices": [{"text": words, "finish_reason": reason}], **fields})


@asynccontextmanager
async def served(serve: Serve, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = head.lower().partition("content-length: ")[2].partition("\r")[0]
                await reader.readexactly(int(length or 0))
                await serve(head, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=tls)
    try:
        yield f"{'https' if tls else 'http'}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def asked(*pieces: bytes, timeout_s: float = 20.0) -> Answered:
    async def serve(head: str, writer: asyncio.StreamWriter) -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.02)

    async with served(serve) as url, Client(url, timeout_s=timeout_s) as client:
        return await client.send(CALL)


async def test_the_answer_ends_with_done_and_not_when_the_server_hangs_up() -> None:
    start_s = time.perf_counter()
    answered = await asked(HEAD, text("a", "stop"), event(b"[DONE]"))
    assert not answered.fault and time.perf_counter() - start_s < 5
    assert answered.last_s is not None and answered.ended_s - answered.last_s < 1


async def test_a_connection_serves_again_after_an_answer_that_ended() -> None:
    ports = set()

    async def serve(head: str, writer: asyncio.StreamWriter) -> None:
        ports.add(writer.get_extra_info("peername")[1])
        writer.write(HEAD + text("a", "stop") + event(b"[DONE]"))
        await asyncio.sleep(0.02)
        writer.write(b"0\r\n\r\n")

    async with served(serve) as url, Client(url) as client:
        assert not any([(await client.send(CALL)).fault for _ in range(4)])
    assert len(ports) == 1


async def test_done_without_a_finish_reason_is_no_whole_answer() -> None:
    answered = await asked(HEAD, text("a"), event(b"[DONE]"))
    assert answered.fault == "cut off" and answered.text == "a"


async def test_an_error_object_before_done_is_a_failure() -> None:
    answered = await asked(
        HEAD, text("a"), event({"object": "error", "message": "too long"}), event(b"[DONE]")
    )
    assert answered.fault == "error event" and "too long" in answered.error


async def test_an_error_in_two_packets_is_told_whole() -> None:
    body = json.dumps({"error": {"message": "the reason is long"}}).encode()
    head = b"HTTP/1.1 500 Bad\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    answered = await asked(head + body[:20], body[20:])
    assert answered.error == "HTTP 500: the reason is long"


async def test_figures_that_are_none_keep_the_times() -> None:
    answered = await asked(
        HEAD, text("a"), text("b", "stop", usage={"completion_tokens": 10**12}), event(b"[DONE]")
    )
    assert not answered.fault and answered.output_tokens is None and len(answered.content_s) == 2
    assert "usage is no count" in answered.unread


async def test_no_word_of_a_server_commands_a_terminal() -> None:
    evil = "\x1b]0;owned\x07\x1b[31mred\x9b\r\n\u202e"
    answered = await asked(HEAD, event({"error": {"message": evil}}))
    assert answered.error.isprintable() and "\\x1b]0;owned" in answered.error
    assert shown("caf\u00e9 \u4f60") == "caf\u00e9 \u4f60"


async def test_a_certificate_that_nobody_trusts_is_told(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        "openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
        "-keyout", str(tmp_path / "k"), "-out", str(tmp_path / "c"), stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    assert await process.wait() == 0
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(tmp_path / "c", tmp_path / "k")

    async def serve(head: str, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with served(serve, tls) as url, Client(url) as client:
        answered = await client.send(CALL)
        page = await client.page("/v1/models")
    assert answered.fault == "unreachable" and "TLS: self-signed certificate" in answered.error
    assert page.status == 0 and "self-signed" in page.why


async def test_a_client_out_of_files_says_so_and_takes_what_the_system_allows() -> None:
    async def serve(head: str, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + text("a", "stop") + event(b"[DONE]") + b"0\r\n\r\n")

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    async with served(serve) as url, Client(url) as client:
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == before[1]
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
            answered = await client.send(CALL)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert answered.fault == "out of files" and "Too many open files" in answered.error
    assert errno.EMFILE


async def test_a_user_in_the_url_goes_into_a_header_and_nowhere_else() -> None:
    heads = []

    async def serve(head: str, writer: asyncio.StreamWriter) -> None:
        heads.append(head)
        writer.close()

    async with served(serve) as url, Client(url.replace("//", "//me:p%40ss@") + "/v1") as client:
        assert client.root == url
        answered = await client.send(CALL)
    assert f"Authorization: Basic {base64.b64encode(b'me:p@ss').decode()}\r\n" in heads[0]
    assert answered.fault and "p%40ss" not in answered.error


async def test_a_key_that_is_wrong_is_told_as_that() -> None:
    async def serve(head: str, writer: asyncio.StreamWriter) -> None:
        body = b'{"error": {"message": "wrong key"}}'
        writer.write(b"HTTP/1.1 401 No\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))

    async with served(serve) as url, Client(url) as client:
        with pytest.raises(ServerAway, match="HTTP 401: wrong key"):
            await chosen_model(client, None)


async def test_a_wait_for_a_server_ends_with_its_last_reason() -> None:
    told: list[str] = []
    async with Client("http://127.0.0.1:1") as client:
        with pytest.raises(ServerAway, match="Connection refused"):
            await await_server(client, within_s=0.3, tell=told.append)
    assert "Connection refused" in told[0]
