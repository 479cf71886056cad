"""A scripted server on the loopback: streams events at set times and remembers when it wrote each.

Each request's body holds a ``Script``. ``GET /times/KEY`` gives, as JSON, when the request with that X-Request-ID was read
and when each of its events was written, in ``time.perf_counter()`` seconds, which all processes of one machine share. It is
what the load client's own floor is measured against (``floor.py``) and what its tests know the truth from. Runs as a process
of its own (``python -m flashstep.bench.load.loopback``), so that it does not share the client's event loop; prints its port;
ends when its standard input does.
"""

import asyncio
import contextlib
import signal
import sys
import time

import msgspec
import uvloop

STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


class Script(msgspec.Struct, kw_only=True, frozen=True):
    """What one answer is to be: ``chunks`` content events of ``tokens_a_chunk`` tokens, the first ``first_ms`` after the
    request was read, the others ``gap_ms`` apart (0: as fast as they can be written); then usage and [DONE]. ``usage`` "each"
    puts usage on every event, "end" on an event of its own, "none" nowhere."""

    chunks: int = 1
    first_ms: float = 0.0
    gap_ms: float = 0.0
    tokens_a_chunk: int = 1
    usage: str = "each"


class Times(msgspec.Struct, frozen=True):
    """When the server read a request and wrote each content event."""

    received_s: float
    written_s: list[float]


class _Body(msgspec.Struct):
    script: Script = Script()


def event(script: Script, place: int) -> bytes:
    """The content event at ``place``."""
    reason = "length" if place == script.chunks - 1 else None
    choice = {"index": 0, "delta": {"content": " word"}, "finish_reason": reason}
    body = {"id": "loop", "object": "chat.completion.chunk", "choices": [choice]}
    return _framed(body | (_usage(script, place + 1) if script.usage == "each" else {}))


def _usage(script: Script, chunks: int) -> dict[str, object]:
    tokens = chunks * script.tokens_a_chunk
    return {"usage": {"prompt_tokens": 1, "completion_tokens": tokens, "total_tokens": tokens + 1}}


def _framed(body: object) -> bytes:
    data = b"data: " + (body if isinstance(body, bytes) else msgspec.json.encode(body)) + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(data), data)


class Loopback:
    """Answers connections, and keeps their times."""

    def __init__(self) -> None:
        self._times: dict[str, Times] = {}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """All requests of one connection."""
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                received_s = time.perf_counter()
                request, *lines = head.decode().split("\r\n")
                fields = {
                    name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)
                }
                body = await reader.readexactly(int(fields.get("content-length", 0)))
                path = request.split(" ")[1]
                if path.startswith("/times/"):
                    _send_json(writer, self._times.get(path.removeprefix("/times/")))
                else:
                    script = msgspec.json.decode(body, type=_Body).script
                    times = self._times[fields.get("x-request-id", "")] = Times(received_s, [])
                    await _stream(writer, script, times)
        writer.close()


async def _stream(writer: asyncio.StreamWriter, script: Script, times: Times) -> None:
    writer.write(STREAM_HEAD)
    events = [event(script, place) for place in range(script.chunks)]  # made before the first is due
    due_s = times.received_s + script.first_ms / 1e3
    for framed in events:
        if (wait_s := due_s - time.perf_counter()) > 0:
            await asyncio.sleep(wait_s)
        else:
            await writer.drain()
        times.written_s.append(time.perf_counter())
        writer.write(framed)
        due_s += script.gap_ms / 1e3
    if script.usage != "none":
        writer.write(_framed({"choices": [], **_usage(script, script.chunks)}))
    writer.write(_framed(b"[DONE]") + b"0\r\n\r\n")
    await writer.drain()


def _send_json(writer: asyncio.StreamWriter, value: object) -> None:
    body = msgspec.json.encode(value)
    writer.write(
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
        % (len(body), body)
    )


async def main() -> None:
    """Serve until standard input ends."""
    server = await asyncio.start_server(Loopback().serve, "127.0.0.1", 0)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the client's, which closes our standard input
    uvloop.run(main())
