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
    LARGE_BODY_BYTES,
    collect,
    follow_all,
    json_response,
    nobody_listens,
    read_body,
    stream,
    told_metrics,
)
from flashstep.server.answers import encode
from flashstep.server.choices import Choice, Piece, usage
from flashstep.server.errors import ApiError
from flashstep.server.frontend import Frontend
from flashstep.server.openai import decode
from flashstep.server.protocol import frames, told_as
from flashstep.server.responses.body import WORDS, ResponsesBody, items, understood
from flashstep.server.responses.events import Event, ResponseEvents
from flashstep.server.responses.store import Ended, ResponseStore, Running

OUR_FAULT = 500  # from this HTTP status on


async def create(request: Request) -> ASGIApp:
    """POST /v1/responses."""
    front: Frontend = request.app.state.front
    front.check_alive()
    data = await read_body(request, limit=front.max_body_bytes)
    body = decode(data, ResponsesBody, front.defaults)
    front.check_model(body.model)
    store: ResponseStore = request.app.state.responses
    if body.store and not store.keeps:
        raise ApiError("store is true, and this server keeps no responses", param="store")
    if body.background:
        store.check_background()
    before = _before(store, body)
    chat, talk = understood(body, before=before)
    with told_as(WORDS):
        _, (choice,) = await chats.start(front, chat, talk, large=len(data) > LARGE_BODY_BYTES)
    answer = _Answer(front, body, choice, store=store, before=before)
    if body.background:
        return json_response(answer.run(store))
    request.state.visit.choices, request.state.visit.n = [choice], 1
    if body.stream:
        return stream(
            [choice],
            lambda _, piece: frames(answer.events_of(piece)),
            last=lambda: b"",
            first=frames(answer.events.begin()),
            failed=lambda error: frames(answer.events.fail(error.message, ours=error.status >= OUR_FAULT)),
            done=b"",
        )
    if not await collect(request, [choice], lambda _, piece: answer.read(piece)):
        return nobody_listens()
    return json_response(answer.snapshot())


async def input_tokens(request: Request) -> Response:
    """POST /v1/responses/input_tokens: how long the prompt of such a body is."""
    front: Frontend = request.app.state.front
    data = await read_body(request, limit=front.max_body_bytes)
    body = decode(data, ResponsesBody, front.defaults)
    front.check_model(body.model)
    _, talk = understood(body, before=_before(request.app.state.responses, body))
    with told_as(WORDS):
        prompt = await chats.encoded(front, talk, large=len(data) > LARGE_BODY_BYTES)
    return json_response(encode({"object": "response.input_tokens", "input_tokens": len(prompt.ids)}))


async def retrieve(request: Request) -> Response:
    """GET /v1/responses/{id}."""
    store, id = _asked(request)
    for name, value in request.query_params.items():
        if (name, value) != ("stream", "false"):
            raise ApiError(f"{name}: a response is given as it stands; its stream is not kept", param=name)
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
    ) -> None:
        self._store = store
        self._keeps = self._store.keeps and body.store is not False
        self._choice = choice
        self._body = body
        self._before = before
        self.id = f"resp_{uuid.uuid4().hex}"  # not the client's: whoever knows it can read the response
        choice.hears_out = front.tells_acceptance or body.return_metrics
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

    def run(self, store: ResponseStore) -> bytes:
        """Go on in the background; the object as it begins."""
        task = asyncio.create_task(self._follow())
        store.run(self.id, Running(task=task, cancel=self._choice.close, snapshot=self.snapshot))
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
            self._fail(error.message, ours=error.status >= OUR_FAULT)
        except Exception:  # a defect of this server: the response must not seem to run for ever
            self._fail("internal error", ours=True)
            raise
        finally:
            self._choice.close()

    def _fail(self, message: str, *, ours: bool) -> None:
        for _ in self.events.fail(message, ours=ours):
            pass
        self._keep(continues=False)

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
