"""What completions and chat share once their requests are known: submit, read all choices at once, turn failures into errors.

Knows choices and frames, not what the frames say.
"""

import asyncio
import time
import uuid
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from msgspec import UNSET
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from flashstep.ipc.client import EngineDied, OutputStream, RequestRejected
from flashstep.request import Request as EngineRequest
from flashstep.server import answers
from flashstep.server.acceptance import added
from flashstep.server.answers import ChunkWriter
from flashstep.server.choices import Choice, Failed, Piece, usage
from flashstep.server.errors import ApiError, engine_gone
from flashstep.server.frontend import Frontend
from flashstep.server.openai import ChatBody, CompletionBody
from flashstep.server.sse import DONE, EventStream, Write, closed_on_disconnect, event

LARGE_BODY_BYTES = 64 << 10  # larger ones are tokenised beside the event loop
PATIENCE = 8  # times the limit: how much of a body that is too long is read before it is refused
MAX_ID_CHARS = 128

Frames = Callable[[Choice, Piece], bytes]


class Naming:
    """Id, time and model name of one answer, equal in all its chunks."""

    def __init__(self, front: Frontend, request: Request, *, kind: str) -> None:
        asked = request.headers.get("x-request-id", "")[:MAX_ID_CHARS]
        self.id = f"{kind}-{asked or uuid.uuid4().hex}"
        self.created = int(time.time())
        self.model = front.names[0]
        self.fingerprint = front.fingerprint

    def writer(self, object: str) -> ChunkWriter:
        return ChunkWriter(
            id=self.id, object=object, created=self.created, model=self.model, fingerprint=self.fingerprint
        )


class Answer:
    """What every answer keeps while its choices come in: its name, their pieces, and when usage is told."""

    def __init__(
        self,
        body: ChatBody | CompletionBody,
        naming: Naming,
        choices: list[Choice],
        *,
        kind: str,
        chunk_kind: str,
        thinking: bool,
        tells_acceptance: bool,
    ) -> None:
        self._naming = naming
        self._choices = choices
        self._writer = naming.writer(chunk_kind)
        self._kind = kind
        self._n = body.n
        self._thinking = thinking
        options = body.stream_options
        self._usage_last = options is not None and options.include_usage
        self._usage_always = options is not None and options.continuous_usage_stats and options.include_usage
        self._parts: list[list[Piece]] = [[] for _ in choices]
        self._tells_acceptance = tells_acceptance
        for choice in choices:
            choice.tells_acceptance = tells_acceptance

    def _usage(self) -> answers.Usage:
        return usage(self._choices, n=self._n, reasoning=self._thinking)

    def _metrics(self) -> answers.AnswerMetrics | None:
        """Of all choices together, once they have ended; None if nobody asked or one of them is not known."""
        known = [choice.acceptance for choice in self._choices if choice.acceptance is not None]
        if not self._tells_acceptance or len(known) < len(self._choices):
            return None
        return answers.AnswerMetrics.of(added(known))

    def _metrics_at(self, piece: Piece) -> answers.AnswerMetrics | None:
        """What the chunk of ``piece`` tells: something only if it is the very last, and no chunk with the usage follows."""
        return None if piece.finish_reason is None or self._usage_last else self._metrics()

    def last_frames(self) -> bytes:
        return self._writer.usage(self._usage(), metrics=self._metrics()) if self._usage_last else b""

    def read(self, choice: Choice, piece: Piece) -> None:
        self._parts[choice.index].append(piece)

    def _response(self, choices: list[Any]) -> answers.Response:
        naming = self._naming
        return answers.Response(
            id=naming.id,
            object=self._kind,
            created=naming.created,
            model=naming.model,
            system_fingerprint=naming.fingerprint,
            choices=choices,
            usage=self._usage(),
            metrics=UNSET if (metrics := self._metrics()) is None else metrics,
        )


async def read_body(request: Request, *, limit: int) -> bytes:
    """The body, or 413 if it is longer than ``limit``.

    A body that is too long is read and forgotten, since a client that still writes would see a broken pipe and not the answer;
    one that is far too long gets the answer at once.
    """
    too_long = ApiError(f"the body is longer than {limit} bytes", status=413)
    patience = PATIENCE * limit
    if int(request.headers.get("content-length", "0")) > patience:
        raise too_long
    chunks = []
    size = 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > patience:
                raise too_long
            if size > limit:
                chunks.clear()
            else:
                chunks.append(chunk)
    except ClientDisconnect as error:
        raise ApiError("the client hung up before its body was whole") from error
    if size > limit:
        raise too_long
    return b"".join(chunks)


def submit(front: Frontend, requests: Sequence[EngineRequest]) -> tuple[OutputStream, ...]:
    try:
        return front.client.submit(requests)
    except EngineDied as error:
        raise engine_gone(str(error)) from error


async def collect(request: Request, choices: Sequence[Choice], read: Callable[[Choice, Piece], None]) -> bool:
    """Read every choice to its end, handing its pieces to ``read``. False if the client hung up first."""

    async def follow(choice: Choice) -> None:
        async for piece in choice:
            read(choice, piece)

    try:
        async with closed_on_disconnect(request.receive, lambda: _close(choices)):
            await _all(choices, follow)
    finally:
        _close(choices)
    return not any(choice.finish_reason == "abort" for choice in choices)


def stream(choices: Sequence[Choice], frames: Frames, *, last: Callable[[], bytes]) -> EventStream:
    """A response that sends ``frames`` of every piece as it comes, ``last()`` after the last, then [DONE]."""

    async def produce(write: Write) -> None:
        async def follow(choice: Choice) -> None:
            async for piece in choice:
                if data := frames(choice, piece):
                    await write(data)

        try:
            await _all(choices, follow)
        except ApiError as error:
            _close(choices)
            await write(event(error.body()) + DONE)
            return
        await write(last() + DONE)

    return EventStream(produce, lambda: _close(choices))


async def _all(choices: Sequence[Choice], follow: Callable[[Choice], Coroutine[None, None, None]]) -> None:
    """Follow all choices at once. The first failure is raised, after the others have been closed and have ended."""
    try:
        if len(choices) == 1:
            await follow(choices[0])
            return
        tasks = [asyncio.ensure_future(follow(choice)) for choice in choices]
        try:
            await asyncio.gather(*tasks)
        finally:
            _close(choices)
            await asyncio.wait(tasks)
    except EngineDied as error:
        raise engine_gone(str(error)) from error
    except RequestRejected as error:
        raise ApiError(str(error)) from error
    except Failed as error:
        raise ApiError(str(error), status=500) from error


def _close(choices: Sequence[Choice]) -> None:
    for choice in choices:
        choice.close()


def json_response(body: bytes) -> Response:
    return Response(body, media_type="application/json")


def nobody_listens() -> Response:
    """The client is gone; the server has to return something."""
    return Response(status_code=499)
