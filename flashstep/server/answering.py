"""What the four APIs share: reading a body, submitting its requests, reading all choices at once, turning failures into errors.

Knows choices and frames, not what the frames say.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from msgspec import UNSET
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from flashstep.ipc.client import EngineDied, OutputStream, RequestRejected
from flashstep.request import Request as EngineRequest
from flashstep.server import answers
from flashstep.server.answers import ChunkWriter
from flashstep.server.choices import Choice, Failed, Piece, UsageSum, usage
from flashstep.server.errors import HUNG_UP, ApiError, engine_gone
from flashstep.server.frontend import Frontend
from flashstep.server.gate import ID_HEADER, Visit
from flashstep.server.metrics.acceptance import added
from flashstep.server.openai import Body, ChatBody, CompletionBody, StreamOptions, decode
from flashstep.server.queue_limits import check_room
from flashstep.server.sse import DONE, EventStream, Write, closed_on_disconnect, event

LARGE_BODY_BYTES = 64 << 10  # what larger ones ask for is done beside the event loop
JSON = "application/json"
PATIENCE = 8  # times the limit: how much of a body that is too long is read before it is refused

Frames = Callable[[Choice, Piece], bytes]
B = TypeVar("B", bound=Body)
T = TypeVar("T")


class Naming:
    """Id, time and model name of one answer, equal in all its chunks.

    The id ends in the header X-Request-Id, or else in ``asked``, or else is drawn.
    """

    def __init__(self, front: Frontend, request: Request, *, kind: str, asked: str | None = None) -> None:
        self.visit: Visit = request.state.visit
        if asked is not None and ID_HEADER not in request.headers:
            self.visit.id = asked
        self.id = f"{kind}-{self.visit.id}"
        self.created = int(time.time())
        self.model = front.names[0]
        self.fingerprint = front.fingerprint

    def writer(self, object: str, *, null_usage: bool = False) -> ChunkWriter:
        return ChunkWriter(
            id=self.id,
            object=object,
            created=self.created,
            model=self.model,
            fingerprint=self.fingerprint,
            null_usage=null_usage,
        )


def told_metrics(choices: Sequence[Choice], *, timings: bool) -> answers.AnswerMetrics | None:
    """Once ``choices`` have ended: acceptance of all together, unless one's is not known; None if nobody asked."""
    known = [choice.acceptance for choice in choices if choice.hears_out and choice.acceptance is not None]
    told = answers.AnswerMetrics.of(added(known)) if len(known) == len(choices) else None
    if timings:
        told = told or answers.AnswerMetrics()
        told.choices = [choice.timings() for choice in choices]
    return told


class Answer:
    """What every answer keeps while its choices come in: its name, their pieces, and when usage and metrics are told.

    In vLLM's style of streams usage has a chunk of its own behind all choices, in DeepSeek's it rides on the last choice's end.
    """

    def __init__(
        self,
        front: Frontend,
        body: ChatBody | CompletionBody,
        naming: Naming,
        choices: list[Choice],
        *,
        kind: str,
        chunk_kind: str,
        thinking: bool,
    ) -> None:
        self._naming = naming
        self._choices = choices
        self._kind = kind
        self._n = body.n
        self._thinking = thinking
        options, serving = body.stream_options or StreamOptions(), front.options
        asked = options.include_usage or serving.enable_force_include_usage
        rides = serving.stream_style == "deepseek"
        self._usage_last = asked and not rides
        self._usage_at_end = asked and rides
        self._usage_always = options.continuous_usage_stats
        self._writer = naming.writer(chunk_kind, null_usage=bool(self._usage_at_end))
        self._unfinished = len(choices)
        self._sum = UsageSum(choices, n=body.n, reasoning=thinking)
        self._parts: list[list[Piece]] = [[] for _ in choices]
        self._tells_timings = body.return_metrics
        naming.visit.follow(choices, n=body.n)

    def frames(self, choice: Choice, piece: Piece) -> bytes:
        """The events of one piece; none while nothing can be shown."""
        self._sum.take(choice)
        return self._frames(choice, piece)

    def _frames(self, choice: Choice, piece: Piece) -> bytes:
        raise NotImplementedError

    def _usage(self) -> answers.Usage:
        return usage(self._choices, n=self._n, reasoning=self._thinking)

    def _metrics(self) -> answers.AnswerMetrics | None:
        return told_metrics(self._choices, timings=self._tells_timings)

    def _told_with(self, piece: Piece) -> tuple[answers.Usage | None, answers.AnswerMetrics | None]:
        """Usage and metrics that the chunk of ``piece`` carries; to be asked once a piece, for it counts the ends."""
        last = False
        if piece.finish_reason is not None:
            self._unfinished -= 1
            last = not self._unfinished
        usage = self._sum.usage() if self._usage_always or (last and self._usage_at_end) else None
        return usage, self._metrics() if last and not self._usage_last else None

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


async def received(request: Request, kind: type[B]) -> tuple[B, int]:
    """The body as ``kind``, of a model that is served here, and its size in bytes."""
    front: Frontend = request.app.state.front
    data = await read_body(request, limit=front.max_body_bytes)
    body = decode(data, kind, front.defaults)
    front.check_model(body.model)
    return body, len(data)


async def read_body(request: Request, *, limit: int) -> bytes:
    """The JSON body as it was sent; 413 if it is longer than ``limit``, 415 if it says that it is something else.

    A body that is too long is read and forgotten, since a client that still writes would see a broken pipe and not the answer;
    one that is far too long gets the answer at once, as does a client that asked first (Expect: 100-continue).
    """
    _check_media(request.headers)
    too_long = ApiError(f"the body is longer than {limit} bytes", status=413)
    patience = PATIENCE * limit
    asked_first = "expect" in request.headers
    if int(request.headers.get("content-length", "0")) > (limit if asked_first else patience):
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
        raise ApiError("the client hung up before its body was whole", status=HUNG_UP) from error
    if size > limit:
        raise too_long
    return b"".join(chunks)


async def worked(work: Callable[..., T], *arguments: Any, size: int) -> T:
    """``work(*arguments)`` for a body of ``size`` bytes: if it is a large one, beside the event loop."""
    return await asyncio.to_thread(work, *arguments) if size > LARGE_BODY_BYTES else work(*arguments)


def _check_media(headers: Headers) -> None:
    """A missing Content-Type is taken for JSON; another one is refused, for it is what pages of other sites may send unasked."""
    media = headers.get("content-type", JSON)
    if media.partition(";")[0].strip().lower() != JSON:
        raise ApiError(f"Content-Type is {media}; it must be {JSON}", status=415)
    coding = headers.get("content-encoding", "identity")
    if coding.lower() != "identity":
        raise ApiError(f"Content-Encoding is {coding}; send the body as it is", status=415)


def submit(front: Frontend, requests: Sequence[EngineRequest]) -> tuple[OutputStream, ...]:
    check_room(front, requests)
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
            await follow_all(choices, follow)
    finally:
        _close(choices)
    return not any(choice.finish_reason == "abort" for choice in choices)


def _failed(error: ApiError) -> bytes:
    return event(error.body())


def stream(
    choices: Sequence[Choice],
    frames: Frames,
    *,
    last: Callable[[], bytes],
    first: bytes = b"",
    failed: Callable[[ApiError], bytes] = _failed,
    done: bytes = DONE,
) -> EventStream:
    """A response that sends ``first``, ``frames`` of every piece as it comes, ``last()`` after the last, then ``done``.

    ``failed`` spells an error in mid-stream, behind which only ``done`` comes.
    """

    async def produce(write: Write) -> None:
        if first:
            await write(first)

        async def follow(choice: Choice) -> None:
            async for piece in choice:
                if data := frames(choice, piece):
                    await write(data)

        try:
            await follow_all(choices, follow)
        except ApiError as error:
            _close(choices)
            await write(failed(error) + done)
            return
        await write(last() + done)

    return EventStream(produce, lambda: _close(choices))


async def follow_all(
    choices: Sequence[Choice], follow: Callable[[Choice], Coroutine[None, None, None]]
) -> None:
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
        raise ApiError(str(error), status=error.status) from error


def _close(choices: Sequence[Choice]) -> None:
    for choice in choices:
        choice.close()


def json_response(body: bytes) -> Response:
    return Response(body, media_type="application/json")


def nobody_listens() -> Response:
    """The client is gone; the server has to return something."""
    return Response(status_code=HUNG_UP)
