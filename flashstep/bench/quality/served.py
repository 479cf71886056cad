"""Questions to a server over HTTP, some at a time; and what that server says of itself that an accuracy run must know.

Takes a URL and bodies; gives ``Reply``s as they come. Needs the ``bench`` extra (aiohttp). Knows no right answers.
"""

import asyncio
import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from flashstep.bench.load.cards import cards, reasons
from flashstep.bench.load.client import Answered, Call, Client
from flashstep.bench.quality.answers import Reply, calls_of
from flashstep.bench.quality.prompts import Asked, Plan, body
from flashstep.bench.quality.questions import Question
from flashstep.bench.quality.run import Gone, Take

PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
SYNTHETIC = re.compile(rb"^flashstep:synthetic_spec_decode", re.MULTILINE)
GONE = ("unreachable", "cut off")


class Server(msgspec.Struct, frozen=True, kw_only=True):
    """Where the questions go. ``extra`` are further fields of each request."""

    url: str
    model: str | None = None
    api_key: str | None = None
    concurrency: int = 8
    timeout_s: float = 600.0
    extra: dict[str, Any] = {}

    def client(self) -> Client:
        return Client(self.url, api_key=self.api_key, timeout_s=self.timeout_s, connections=self.concurrency)


class Described(msgspec.Struct, frozen=True, kw_only=True):
    """What a server says of itself; None where it says nothing."""

    model: str
    version: str | None
    synthetic_acceptance: bool | None
    speculates: bool | None = None

    @property
    def rejection(self) -> str:
        """Which drafts stand there, as far as one can know from outside."""
        if self.speculates is False:
            return "no drafts"
        if self.synthetic_acceptance is None:
            return "the server does not tell"
        return (
            "synthetic" if self.synthetic_acceptance else "real (standard or block: the server does not tell)"
        )


async def describe(server: Server) -> Described:
    """``ValueError`` if there is no server, or it names no model and none was given."""
    async with server.client() as client:
        listed = cards(await client.get("/v1/models"))
        models = list(listed)
        model = server.model or (models[0] if models else None)
        if model is None:
            raise ValueError(
                f"{client.root} lists no model at /v1/models: is it running? (else give --served-model)"
            )
        metrics = await client.get("/metrics")
        version = await client.get("/version")
    try:
        words = None if version is None else str(msgspec.json.decode(version)["version"])
    except (msgspec.DecodeError, KeyError, TypeError):
        words = None
    synthetic = None if metrics is None or b"spec_decode" not in metrics else bool(SYNTHETIC.search(metrics))
    # flashstep counts drafts as soon as there may be some; of others one cannot know
    ours = listed.get(model, {}).get("owned_by") == "flashstep"
    speculates = synthetic is not None if ours and metrics is not None else None
    return Described(model=model, version=words, synthetic_acceptance=synthetic, speculates=speculates)


async def falsity(server: Server) -> tuple[str, ...]:
    """Why the server's texts cannot be its model's, by its own word; () if they may be, or it says nothing.

    flashstep lists what makes its texts wrong on purpose, and counts drafts that stood by lot under a name of their own.
    """
    async with server.client() as client:
        listed = cards(await client.get("/v1/models"))
        metrics = await client.get("/metrics")
    told = [reason for card in listed.values() for reason in reasons(card)]
    if metrics is not None and SYNTHETIC.search(metrics):
        told.append("synthetic acceptance")
    return tuple(dict.fromkeys(told))


async def ask(
    server: Server,
    asked: Asked,
    plan: Plan,
    questions: Sequence[Question],
    *,
    run: int,
    model: str,
    take: Take,
) -> None:
    """Ask ``questions``, ``server.concurrency`` at a time, and hand over each reply when it is there.

    ``Gone`` when as many requests in a row as there are connections, and a few more, met no server.
    """
    waiting = iter(questions)
    lost = _Losses(server.concurrency + 4)
    async with server.client() as client, asyncio.TaskGroup() as group:
        for _ in range(min(server.concurrency, len(questions))):
            group.create_task(_worker(client, waiting, server, (asked, plan, run, model), take, lost))
    if lost.gone:
        raise Gone(lost.last)


class _Losses:
    """Requests in a row that met no server."""

    def __init__(self, most: int) -> None:
        self.last = ""
        self._most = most
        self._count = 0

    @property
    def gone(self) -> bool:
        return self._count >= self._most

    def note(self, answered: Answered) -> None:
        if answered.fault in GONE:
            self._count += 1
            self.last = answered.error
        else:
            self._count = 0


async def _worker(
    client: Client,
    waiting: Iterator[Question],
    server: Server,
    how: tuple[Asked, Plan, int, str],
    take: Take,
    lost: _Losses,
) -> None:
    asked, plan, run, model = how
    for question in waiting:
        if lost.gone:
            return
        fields = body(question, asked, plan, run=run, model=model) | server.extra
        answered = await client.send(Call(key=question.id, path=PATHS[plan.api], body=fields))
        lost.note(answered)
        take(question, _reply(answered))


def _reply(answered: Answered) -> Reply:
    return Reply(
        text=answered.text,
        reasoning=answered.reasoning,
        calls=calls_of(answered.tool_text),
        finish_reason=answered.finish_reason,
        prompt_tokens=answered.prompt_tokens,
        output_tokens=answered.output_tokens,
        error=answered.error,
    )
