"""Server-sent events over ASGI, and what happens when the client hangs up.

A producer writes frames; a watcher waits for the disconnect and calls ``close`` at once, whatever the producer waits for. Knows
nothing of what the frames say.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

from starlette.types import Receive, Scope, Send

DONE = b"data: [DONE]\n\n"
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
        async def write(frames: bytes) -> None:
            await send({"type": "http.response.body", "body": frames, "more_body": True})

        try:
            async with closed_on_disconnect(receive, self._close):
                await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
                await self._produce(write)
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._close()


def event(body: bytes) -> bytes:
    return b"data: " + body + b"\n\n"
