"""Server-sent events over ASGI, and what happens when the client hangs up.

A producer writes frames; a watcher waits for the disconnect and calls ``close`` at once, whatever the producer waits for. Where
the server is told to (``--sse-keep-alive-interval``) a comment goes out whenever no frame has for so long, as it may be while a
long prompt is read. Knows nothing of what the frames say.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

from starlette.types import Receive, Scope, Send

from flashstep.server.frontend import Frontend

DONE = b"data: [DONE]\n\n"
COMMENT = b": keep-alive\n\n"  # no event: clients skip it
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

Write = Callable[[bytes], Awaitable[None]]


@asynccontextmanager
async def closed_on_disconnect(receive: Receive, close: Callable[[], None]) -> AsyncGenerator[None]:
    """Within the block ``close`` is called as soon as the client hangs up. The request's body must have been read."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        close()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()


class EventStream:
    """An ASGI response whose frames ``produce`` writes; ``close`` is called at the end and at a disconnect (or twice)."""

    def __init__(self, produce: Callable[[Write], Awaitable[None]], close: Callable[[], None]) -> None:
        self._produce = produce
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        front: Frontend = scope["app"].state.front
        loop = asyncio.get_running_loop()
        written_s = loop.time()

        async def write(frames: bytes) -> None:
            nonlocal written_s
            written_s = loop.time()
            await send({"type": "http.response.body", "body": frames, "more_body": True})

        async def keep_alive(interval_s: float) -> None:
            while True:
                await asyncio.sleep(written_s + interval_s - loop.time())
                if loop.time() - written_s >= interval_s:
                    await write(COMMENT)

        try:
            async with closed_on_disconnect(receive, self._close):
                await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
                interval_s = front.options.sse_keep_alive_interval
                keeper = asyncio.create_task(keep_alive(interval_s)) if interval_s else None
                try:
                    await self._produce(write)
                finally:
                    if keeper is not None:
                        keeper.cancel()
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._close()


def event(body: bytes) -> bytes:
    return b"data: " + body + b"\n\n"


def named_event(name: str, body: bytes) -> bytes:
    """An event that says its kind before its data, as the SDKs of Responses and Messages want it."""
    return b"event: " + name.encode() + b"\ndata: " + body + b"\n\n"
