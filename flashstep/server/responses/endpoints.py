"""/v1/responses: POST creates a response, whole, streamed or in the background; GET, DELETE and POST .../cancel by its id.

Takes a body, gives the object or its events. The answer itself is made as a chat's is (``chats``).
"""

import asyncio
import time
import uuid
from collections.abc import Iterable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from flashstep.server import chats
from flashstep.server.answering import (
    collect,
    follow_all,
    json_response,
    nobody_listens,
    received,
    stream,
    told_metrics,
)
from flashstep.server.answers import encode
from flashstep.server.choices import Choice, Piece, usage
from flashstep.server.errors import ApiError
from flashstep.server.frontend import Frontend
from flashstep.server.protocol import frames, told_as
from flashstep.server.responses.body import WORDS, InputBody, ResponsesBody, items, understood
from flashstep.server.responses.events import Event, ResponseEvents
from flashstep.server.responses.store import Ended, ResponseStore, Running

NO_STREAM = "a response is given as it stands; its stream is not kept"
QUERIES = {  # of GET, and why they are refused
    "stream": NO_STREAM,
    "starting_after": NO_STREAM,
    "include_obfuscation": NO_STREAM,
    "include": "a response is given as it was made; say include when you create it",
}
OUR_FAULT = 500  # from this HTTP status on


async def create(request: Request) -> ASGIApp:
    """POST /v1/responses."""
    front: Frontend = request.app.state.front
    front.check_alive()
    body, size = await received(request, ResponsesBody)
    store: ResponseStore = request.app.state.responses
    before = _before(store, body)
    kept = size + len(encode(before))
    if body.background:
        store.check_background(kept)
    elif body.store and not store.fits(kept):
        raise ApiError(f"store is true, and {store.no_room(kept)}", param="store")
    chat, talk = understood(body, before=before)
    with told_as(WORDS):
        _, (choice,) = await chats.start(front, chat, talk, size=size, receive=request.receive)
    answer = _Answer(front, body, choice, store=store, before=before, keeps=store.fits(kept))
    if body.background:
        return json_response(answer.run(kept))
    request.state.visit.follow([choice])
    if body.stream:
        return stream(
            [choice],
            lambda _, piece: frames(answer.events_of(piece)),
            last=lambda: b"",
            first=frames(answer.events.begin()),
            failed=lambda error: frames(answer.failed(error.message, ours=error.status >= OUR_FAULT)),
            done=b"",
        )
    if not await collect(request, [choice], lambda _, piece: answer.read(piece)):
        return nobody_listens()
    return json_response(answer.snapshot())


async def input_tokens(request: Request) -> Response:
    """POST /v1/responses/input_tokens: how long the prompt of such a body is."""
    front: Frontend = request.app.state.front
    body, size = await received(request, InputBody)
    _, talk = understood(body, before=_before(request.app.state.responses, body))
    with told_as(WORDS):
        prompt = await chats.encoded(front, talk, size=size)
    return json_response(encode({"object": "response.input_tokens", "input_tokens": len(prompt.ids)}))


async def retrieve(request: Request) -> Response:
    """GET /v1/responses/{id}."""
    store, id = _asked(request)
    for name, value in request.query_params.items():
        if (name, value) != ("stream", "false"):
            why = QUERIES.get(name, "no such option here")
            raise ApiError(f"{name}: {why}", param=name)
    found = store.find(id)
    return json_response(found.snapshot() if isinstance(found, Running) else found.response)


async def cancel(request: Request) -> Response:
    """POST /v1/responses/{id}/cancel; one that has ended stays as it is."""
    store, id = _asked(request)
    found = store.find(id)
    if isinstance(found, Running):
        found.cancel()
        await asyncio.wait([found.task])
        return json_response(found.snapshot())
    if not found.background:
        raise ApiError(
            "only a background response can be cancelled; hang up to end another", param="response_id"
        )
    return json_response(found.response)


async def delete(request: Request) -> Response:
    """DELETE /v1/responses/{id}."""
    store, id = _asked(request)
    store.forget(id)
    return json_response(encode({"id": id, "object": "response", "deleted": True}))


def _before(store: ResponseStore, body: ResponsesBody) -> list[dict[str, Any]]:
    return [] if body.previous_response_id is None else store.items(body.previous_response_id)


def _asked(request: Request) -> tuple[ResponseStore, str]:
    return request.app.state.responses, request.path_params["id"]


class _Answer:
    """One response: its object and its events, and what is kept of it once it has ended."""

    def __init__(
        self,
        front: Frontend,
        body: ResponsesBody,
        choice: Choice,
        *,
        store: ResponseStore,
        before: list[dict[str, Any]],
        keeps: bool,
    ) -> None:
        self._store = store
        self._keeps = keeps and body.store is not False
        self._choice = choice
        self._body = body
        self._before = before
        self.id = f"resp_{uuid.uuid4().hex}"  # not the client's: whoever knows it can read the response
        fields = _told(body) | {"id": self.id, "model": front.names[0], "store": self._keeps}
        self.events = ResponseEvents(fields, seals=body.keeps_reasoning)

    def snapshot(self) -> bytes:
        return encode(self.events.snapshot())

    def read(self, piece: Piece) -> None:
        for _ in self.events_of(piece):
            pass

    def events_of(self, piece: Piece) -> Iterable[Event]:
        yield from self.events.add(piece.delta)
        if piece.finish_reason is None:
            return
        choice = self._choice
        if (metrics := told_metrics([choice], timings=self._body.return_metrics)) is not None:
            self.events.response["metrics"] = metrics
        yield from self.events.end(
            cut=piece.finish_reason == "length", usage=usage([choice], n=1, reasoning=True)
        )
        self._keep()

    def run(self, size: int) -> bytes:
        """Go on in the background, unless others have taken its place since it was checked; the object as it begins."""
        try:
            self._store.check_background(size)
        except ApiError:
            self._choice.close()
            raise
        task = asyncio.create_task(self._follow())
        running = Running(task=task, cancel=self._choice.close, snapshot=self.snapshot, num_bytes=size)
        self._store.run(self.id, running)
        return self.snapshot()

    async def _follow(self) -> None:
        async def read(choice: Choice) -> None:
            async for piece in choice:
                self.read(piece)

        try:
            await follow_all([self._choice], read)
            if self._choice.finish_reason == "abort":
                self.events.cancel()
                self._keep(continues=False)
        except ApiError as error:
            self.failed(error.message, ours=error.status >= OUR_FAULT)
        except Exception:  # a defect of this server: the response must not seem to run for ever
            self.failed("internal error", ours=True)
            raise
        finally:
            self._choice.close()

    def failed(self, message: str, *, ours: bool) -> list[Event]:
        """The events of a failure; the response stays as it is then."""
        events = list(self.events.fail(message, ours=ours))
        self._keep(continues=False)
        return events

    def _keep(self, *, continues: bool = True) -> None:
        if not self._keeps:
            return
        response = self.events.response
        whole = [*self._before, *items(self._body.input), *response["output"]]
        kept = Ended(
            response=self.snapshot(),
            items=encode(whole) if continues else b"",
            background=self._body.background,
        )
        self._store.end(self.id, kept)


def _told(body: ResponsesBody) -> dict[str, Any]:
    """The settings of ``body`` as a response repeats them."""
    text = {} if body.text is None else msgspec.to_builtins(body.text)
    reasoning = body.reasoning
    as_sent = ("instructions", "max_output_tokens", "metadata", "parallel_tool_calls", "previous_response_id")
    labels = ("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
    return {
        "object": "response",
        "created_at": int(time.time()),
        **{name: getattr(body, name) for name in (*as_sent, *labels, "background", "temperature", "top_p")},
        "reasoning": {
            "effort": None if reasoning is None else reasoning.effort,
            "summary": None if reasoning is None else reasoning.summary,
        },
        "text": {"format": text.get("format") or {"type": "text"}, "verbosity": text.get("verbosity")},
        "tools": body.tools or [],
        "tool_choice": body.tool_choice or "auto",
        "truncation": "disabled",
        "service_tier": "default",
        "top_logprobs": 0,
    }
