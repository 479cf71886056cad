"""A chat server with known times: the first token 50 ms after the request, then one every 2 ms, and an endless prefix cache.

``ScriptedServer`` starts it as a process of its own and reads its log: when each request came and what it asked.
Prompts are counted with the embedded model's tokenizer, in blocks of 16 tokens. With ``lose_after`` it vanishes at that request;
``refuse_over`` refuses longer prompts; ``silent_usage`` counts nothing.
"""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

FIRST_S = 0.050
TOKEN_S = 0.002
BLOCK = 16
ROOT = Path(__file__).parents[3]
TINY = ROOT / "flashstep" / "tiny"
HEAD = b"HTTP/1.1 %b\r\nContent-Type: %b\r\n"


class ScriptedServer:
    """Used as ``with ScriptedServer() as server``."""

    def __init__(self, **script: Any) -> None:
        command = [sys.executable, str(Path(__file__)), json.dumps(script)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.url = f"http://127.0.0.1:{int(self._process.stdout.readline())}"

    def __enter__(self) -> "ScriptedServer":
        return self

    def __exit__(self, *_error: object) -> None:
        self._process.kill()
        self._process.communicate()

    def log(self) -> list[dict[str, Any]]:
        """All chat requests so far, in the order they came."""
        with urllib.request.urlopen(f"{self.url}/log") as response:
            return json.load(response)


class _Server:
    def __init__(self, script: dict[str, Any]) -> None:
        self.script = script
        self.log: list[dict[str, Any]] = []
        self.seen: dict[str, set[tuple[int, int]]] = {}
        self.tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                received_s = time.perf_counter()
                request, *lines = head.decode().split("\r\n")
                fields = {a.lower(): b.strip() for a, _, b in (line.partition(":") for line in lines)}
                body = await reader.readexactly(int(fields.get("content-length", 0)))
                path = request.split(" ")[1]
                if path == "/v1/chat/completions":
                    await self.answer(writer, json.loads(body), fields, received_s)
                elif path == "/log":
                    _send(writer, 200, self.log)
                elif path == "/v1/models":
                    _send(writer, 200, {"object": "list", "data": [{"id": "scripted", "object": "model"}]})
                elif path == "/version":
                    _send(writer, 200, {"version": "1.0-scripted"})
                else:
                    _send(writer, 404, {"error": {"message": "no such path"}})
        writer.close()

    def count(self, messages: list[dict[str, str]], rank: str) -> tuple[int, int]:
        """The prompt's tokens, and how many of them are cached now; from now on all of them are."""
        ids: list[int] = []
        for message in messages:
            ids += [-1, *self.tokenizer.encode(message["content"], add_special_tokens=False).ids]
        seen = self.seen.setdefault(rank, set())
        chain, cached, is_hit = 0, 0, True
        for end in range(BLOCK, len(ids) + 1, BLOCK):
            chain = hash((chain, *ids[end - BLOCK : end]))
            is_hit = is_hit and (end, chain) in seen
            cached = end if is_hit else cached
            seen.add((end, chain))
        return len(ids), cached

    async def answer(
        self, writer: asyncio.StreamWriter, body: dict[str, Any], fields: dict[str, str], received_s: float
    ) -> None:
        rank = fields.get("x-data-parallel-rank", "")
        prompt, cached = self.count(body["messages"], rank)
        wanted = body["max_completion_tokens"]
        entry = {
            "at_s": received_s,
            "roles": [message["role"] for message in body["messages"]],
            "messages": body["messages"],
            "prompt_tokens": prompt,
            "cached_tokens": cached,
            "wanted": wanted,
            "rank": rank,
            "headers": {name: fields.get(name) for name in ("x-request-id", "x-correlation-id")},
            "body": {name: value for name, value in body.items() if name != "messages"},
        }
        self.log.append(entry)
        if len(self.log) == self.script.get("lose_after"):
            os._exit(0)
        if prompt > self.script.get("refuse_over", prompt):
            _send(writer, 400, {"error": {"message": f"{prompt} tokens are too many"}})
            return
        writer.write(HEAD % (b"200 OK", b"text/event-stream") + b"Transfer-Encoding: chunked\r\n\r\n")
        _event(writer, {"choices": [{"index": 0, "delta": {"role": "assistant"}}]})
        for place in range(wanted):
            await asyncio.sleep(max(0, received_s + FIRST_S + place * TOKEN_S - time.perf_counter()))
            _event(writer, {"choices": [{"index": 0, "delta": {"content": " word"}}]})
        _event(writer, {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": wanted,
            "total_tokens": prompt + wanted,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        if not self.script.get("silent_usage"):
            _event(writer, {"choices": [], "usage": usage})
        _event(writer, None)
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        entry["ended_s"] = time.perf_counter()


def _event(writer: asyncio.StreamWriter, data: dict[str, Any] | None) -> None:
    known = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "scripted"}
    text = "[DONE]" if data is None else json.dumps(known | data)
    framed = f"data: {text}\n\n".encode()
    writer.write(b"%x\r\n%b\r\n" % (len(framed), framed))


def _send(writer: asyncio.StreamWriter, status: int, value: object) -> None:
    body = json.dumps(value).encode()
    writer.write(
        HEAD % (str(status).encode(), b"application/json")
        + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    )


async def _main() -> None:
    server = await asyncio.start_server(_Server(json.loads(sys.argv[1])).serve, "127.0.0.1", 0, limit=1 << 26)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(_main())
