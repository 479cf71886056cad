"""An OpenAI-compatible server that is none of ours, for tests: strict about unknown fields, and bad in a chosen way.

``python -m tests.bench.load.stub`` prints its port and serves until it is killed. A word is a token; a template takes 4 more. A
request's ``metadata`` may hold {"behave": KIND, "from": N}: the requests from the N-th on misbehave so.
"""

import asyncio
import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
KNOWN = set(
    "model messages prompt stream stream_options max_completion_tokens max_tokens temperature seed metadata".split()
)
TEMPLATE_TOKENS = 4
PIECE_S = 0.002


class Stub:
    """A stub as a process of its own: ``with Stub() as stub: stub.url``."""

    def __enter__(self) -> "Stub":
        command = [sys.executable, "-m", "tests.bench.load.stub"]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.url = f"http://127.0.0.1:{int(self.process.stdout.readline())}"
        return self

    def __exit__(self, *_error: object) -> None:
        self.process.kill()
        self.process.communicate()


class Server:
    """Counts requests and answers them."""

    def __init__(self) -> None:
        self._seen = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                length = head.partition("content-length:")[2].partition("\r")[0]
                body = await reader.readexactly(int(length or 0))
                if head.startswith("get"):
                    path = head.split(" ")[1]
                    listed = {"object": "list", "data": [{"id": "stub-1", "object": "model", "created": 1}]}
                    send(writer, 200 if path == "/v1/models" else 404, json.dumps(listed))
                elif not await self.answer(json.loads(body), writer):
                    break
        writer.transport.abort()

    async def answer(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        """Whether the connection goes on."""
        self._seen += 1
        wish = body.get("metadata", {})
        behave = wish.get("behave", "") if self._seen >= wish.get("from", 0) else ""
        options = body.get("stream_options", {})
        unknown = [*(body.keys() - KNOWN), *(options.keys() - {"include_usage"})]
        if unknown:
            send(writer, 400, json.dumps({"error": {"message": f"unknown: {sorted(unknown)}", "code": 400}}))
            return True
        if behave in {"429", "500"}:
            send(writer, int(behave), json.dumps({"error": {"message": f"told why: {behave}"}}))
            return True
        if behave == "html":
            send(writer, 200, "<html>a proxy's page</html>", kind="text/html")
            return True
        return await self.stream(body, behave, options.get("include_usage") and behave != "no usage", writer)

    async def stream(
        self, body: dict[str, Any], behave: str, with_usage: bool, writer: asyncio.StreamWriter
    ) -> bool:
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        chat = "messages" in body
        text = " ".join(message["content"] for message in body["messages"]) if chat else body["prompt"]
        tokens = body.get("max_completion_tokens") or body.get("max_tokens") or 8
        if behave == "slow first":
            await asyncio.sleep(0.5)
        for place in range(tokens):
            if behave == "hang" and place == 2:
                await asyncio.sleep(3600)
            if place == 2 and behave in {"cut", "error event", "malformed", "no end"}:
                broken = {
                    "error event": '{"error": {"message": "the engine fell over"}}',
                    "malformed": '{"choices": 7}',
                }
                if behave in broken:
                    piece(writer, broken[behave])
                if behave != "cut":
                    writer.write(b"0\r\n\r\n")
                    await writer.drain()
                return behave != "cut"  # its body is whole, so the connection is good for more
            choice = {"index": 0, "finish_reason": "length" if place == tokens - 1 else None}
            said = {"delta": {"content": f" w{place}"}} if chat else {"text": f" w{place}"}
            piece(writer, json.dumps({"choices": [choice | said]}))
            await writer.drain()
            await asyncio.sleep(PIECE_S)
        if with_usage:
            counts = {"prompt_tokens": len(text.split()) + TEMPLATE_TOKENS, "completion_tokens": tokens}
            piece(writer, json.dumps({"choices": [], "usage": counts}))
        piece(writer, "[DONE]")
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True


def piece(writer: asyncio.StreamWriter, data: str) -> None:
    framed = f"data: {data}\n\n".encode()
    writer.write(b"%x\r\n%b\r\n" % (len(framed), framed))


def send(writer: asyncio.StreamWriter, status: int, body: str, *, kind: str = "application/json") -> None:
    head = f"HTTP/1.1 {status} Told\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body.encode())


async def main() -> None:
    server = await asyncio.start_server(Server().serve, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
