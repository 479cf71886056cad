"""POST /v1/messages: Anthropic's API, whole or streamed; POST /v1/messages/count_tokens: how long its prompt is.

Takes a body, gives the message or its events. The answer itself is made as a chat's is (``chats``).
"""

from collections.abc import Iterable

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from flashstep.server import chats
from flashstep.server.answering import (
    collect,
    json_response,
    nobody_listens,
    received,
    stream,
    told_metrics,
)
from flashstep.server.answers import Usage, encode
from flashstep.server.choices import Choice, Piece, usage
from flashstep.server.frontend import Frontend
from flashstep.server.gate import Visit
from flashstep.server.messages.body import WORDS, CountBody, MessagesBody, understood
from flashstep.server.messages.events import Event, MessageEvents
from flashstep.server.protocol import frames, told_as
from flashstep.server.sse import named_event


async def create(request: Request) -> ASGIApp:
    """POST /v1/messages."""
    front: Frontend = request.app.state.front
    front.check_alive()
    body, size = await received(request, MessagesBody)
    chat, talk = understood(body)
    with told_as(WORDS):
        _, (choice,) = await chats.start(front, chat, talk, size=size, receive=request.receive)
    visit: Visit = request.state.visit
    visit.follow([choice])
    answer = _Answer(f"msg_{visit.id}", front, body, choice)
    if body.stream:
        return stream(
            [choice],
            lambda _, piece: frames(answer.events_of(piece)),
            last=lambda: b"",
            failed=lambda error: named_event("error", error.body("anthropic")),
            done=b"",
        )
    if not await collect(request, [choice], lambda _, piece: answer.read(piece)):
        return nobody_listens()
    return json_response(encode(answer.events.message))


async def count_tokens(request: Request) -> Response:
    """POST /v1/messages/count_tokens."""
    front: Frontend = request.app.state.front
    body, size = await received(request, CountBody)
    _, talk = understood(body)
    with told_as(WORDS):
        prompt = await chats.encoded(front, talk, size=size)
    return json_response(encode({"input_tokens": len(prompt.ids)}))


class _Answer:
    """One message, piece by piece."""

    def __init__(self, id: str, front: Frontend, body: MessagesBody, choice: Choice) -> None:
        self.events = MessageEvents(id, model=front.names[0])
        self._choice = choice
        self._begun = False
        self._timings = body.return_metrics

    def read(self, piece: Piece) -> None:
        for _ in self.events_of(piece):
            pass

    def events_of(self, piece: Piece) -> Iterable[Event]:
        """The message starts with the first piece: until then nobody knows how much of the prompt was cached."""
        choice = self._choice
        if not self._begun:
            self._begun = True
            yield from self.events.begin(self._usage())
        yield from self.events.add(piece.delta)
        if piece.finish_reason is None:
            return
        matched = piece.stop_reason if isinstance(piece.stop_reason, str) else None
        yield from self.events.end(
            reason=piece.finish_reason,
            stop_sequence=matched,
            usage=self._usage(),
            metrics=told_metrics([choice], timings=self._timings),
        )

    def _usage(self) -> Usage:
        return usage([self._choice], n=1, reasoning=True)
