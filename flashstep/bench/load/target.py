"""The server under load: waits until it is there, learns how it counts and which words are one token to it, and who it says
it is.

Takes a ``Client``; gives ``Shape`` fields, ``Words`` and an identity. All of it happens before a run and counts for nothing.
Knows no plan.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any, NoReturn

import msgspec

from flashstep.bench.load.bodies import STREAM_OPTIONS, Shape
from flashstep.bench.load.cards import cards
from flashstep.bench.load.client import Answered, Call, Client
from flashstep.bench.load.lengths import LEAD, Words, learn
from flashstep.bench.load.metrics_page import PROCESS_START, Counts, read_counters
from flashstep.bench.load.prompts import Session, Turn

POLL_S = 0.25
TELL_EVERY_S = 5.0
REST_S = 0.15
REST_WITHIN_S = 2.0
REFUSED = {400, 404, 405, 415, 422}  # what a field that a server does not know may come to


class ServerAway(ValueError):
    """No server answered in time, or it refuses what every request would ask."""


async def await_server(client: Client, *, within_s: float, tell: Callable[[str], None]) -> None:
    """Until the server answers /v1/models with anything but a 5xx; ``ServerAway`` after ``within_s``."""
    start_s = time.monotonic()
    told_s = start_s - TELL_EVERY_S  # at once, then now and then
    while True:
        page = await client.page("/v1/models")
        if 0 < page.status < 500:
            return
        now = time.monotonic()
        state = f"answers {page.status}" if page.status else "cannot be reached"
        if now - start_s >= within_s:
            raise ServerAway(
                f"{client.root} still {state} after {within_s:g} s (--ready-check-timeout-sec): {page.why}"
            )
        if now - told_s >= TELL_EVERY_S:
            left_s = within_s - (now - start_s)
            tell(f"{client.root} {state}; waiting, {left_s:.0f} s more at most ({page.why})")
            told_s = now
        await asyncio.sleep(POLL_S)


async def chosen_model(client: Client, model: str | None) -> str:
    """``model``, or the first that the server lists; ``ServerAway`` if it lists none."""
    if model is not None:
        return model
    page = await client.page("/v1/models")
    if page.why:
        raise ServerAway(
            f"{client.root}/v1/models: {page.why}; is it an OpenAI-compatible server, and is the key right?"
        )
    listed = list(cards(page.body))
    if not listed:
        raise ServerAway(f"{client.root}/v1/models lists no model; name one with --model")
    return listed[0]


async def learn_counting(client: Client, shape: Shape) -> tuple[Shape, Answered]:
    """``shape`` with the most that the server will count, of what ``shape`` asks for (usage on every event, at the end, not at
    all), and the answer that showed it.

    ``ServerAway`` with the server's sentence where it refuses a plain request too.
    """
    counts = list(STREAM_OPTIONS)
    for counting in counts[counts.index(shape.counting) :]:
        tried = msgspec.structs.replace(shape, counting=counting)
        answered = await client.send(_short(tried, LEAD, "ready"))
        if not answered.fault:
            return tried, answered
        if answered.status not in REFUSED:
            _refuse(client, answered)
    _refuse(client, answered)


async def learn_words(client: Client, shape: Shape) -> Words:
    """The words that prompts of known lengths can be made of."""

    async def count(text: str) -> int | None:
        answered = await client.send(_short(shape, text, "length"))
        if answered.fault:
            _refuse(client, answered)
        return answered.prompt_tokens

    return await learn(count)


async def counters(client: Client) -> Counts | None:
    """The server's /metrics at rest; None where it has none that can be read.

    A server counts a little behind its answers (ours: 0.1 s), so that a page counts when the one before it was the same; a
    server that others use too may never rest, and gives its newest page.
    """
    page = await _page(client)
    until = time.monotonic() + REST_WITHIN_S
    while page is not None:
        await asyncio.sleep(REST_S)
        before, page = page, await _page(client)
        if page == before or time.monotonic() > until:
            break
    return page


async def _page(client: Client) -> Counts | None:
    text = await client.get("/metrics")
    try:
        return None if text is None else read_counters(text.decode())
    except ValueError:
        return None


async def identity(client: Client, model: str) -> dict[str, Any]:
    """Who the server says it is: what /version and its card of ``model`` hold, as far as it has them."""
    return {
        "url": client.root,
        "model": model,
        "version": _json(await client.get("/version")),
        "card": _card(await client.get("/v1/models"), model),
    }


def process_of(client: Client, counts: Counts | None) -> str:
    """A name of the server's process that another run against it gives too: its URL, and when it began if it tells."""
    began = None if counts is None else counts.get(PROCESS_START)
    return client.root if began is None else f"{client.root} since {began:.0f}"


def _short(shape: Shape, text: str, key: str) -> Call:
    """A request for one token, whose prompt is ``text``."""
    chat = shape.endpoint == "chat"
    messages = ({"role": "user", "content": text},) if chat else ()
    turn = Turn(messages=messages, prompt="" if chat else text, output_len=1)
    return shape.call(Session(key=key, turns=(turn,)), 0, [])


def _refuse(client: Client, answered: Answered) -> NoReturn:
    raise ServerAway(f"{client.root} does not answer a request of one token: {answered.error}")


def _json(body: bytes | None) -> Any:
    try:
        return None if body is None else msgspec.json.decode(body)
    except msgspec.DecodeError:
        return None


def _card(listed: bytes | None, model: str) -> dict[str, Any] | None:
    found = cards(listed).get(model)
    return None if found is None else {name: value for name, value in found.items() if name != "created"}
