"""The body of each request: a turn, what came before it in its session, and the fields that all requests share.

Takes a session's turns and answers; gives ``Call``. Knows no network and no time.
"""

import zlib
from typing import Any, Literal

import msgspec

from flashstep.bench.load.client import Call
from flashstep.bench.load.prompts import Message, Session

Endpoint = Literal["chat", "completions"]
History = Literal["recorded", "live"]
Counting = Literal["each event", "at the end", "not"]
# What a server may be asked to count, best first: an unknown field may be refused.
STREAM_OPTIONS: dict[Counting, dict[str, bool]] = {
    "each event": {"include_usage": True, "continuous_usage_stats": True},
    "at the end": {"include_usage": True},
    "not": {},
}


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """What all requests share. ``extra`` are further fields, over ours. ``history`` says whose answer stands in the next
    prompt: the recorded one, so that no answer changes what is asked later, or the live one. ``seed`` makes sampling
    repeatable: each request has its own of it where ``temperature`` is above 0. ``counting`` is whether usage is asked
    for."""

    model: str
    endpoint: Endpoint = "chat"
    temperature: float | None = 0.0
    ignore_eos: bool = True
    seed: int = 0
    extra: dict[str, Any] = {}
    history: History = "recorded"
    counting: Counting = "each event"

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.endpoint == "chat" else "/v1/completions"

    def call(self, session: Session, index: int, live_answers: list[str]) -> Call:
        """The request of turn ``index``; ``live_answers`` are the answers so far."""
        turn = session.turns[index]
        key = session.turn_key(index)
        said = [
            (live_answers[place] if self.history == "live" else before.answer or "")
            for place, before in enumerate(session.turns[:index])
        ]
        body: dict[str, Any] = {"model": self.model, **self._prompt(session, index, said), "stream": True}
        if options := STREAM_OPTIONS[self.counting]:
            body["stream_options"] = options
        if turn.output_len is not None:
            body["max_completion_tokens" if self.endpoint == "chat" else "max_tokens"] = turn.output_len
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.temperature is not None:
            body["temperature"] = self.temperature
            if self.temperature > 0:
                body["seed"] = zlib.crc32(f"{self.seed} {key}".encode())
        return Call(key=key, path=self.path, body=body | self.extra)

    def _prompt(self, session: Session, index: int, said: list[str]) -> dict[str, Any]:
        """All turns up to ``index``, with ``said`` between them."""
        if self.endpoint == "completions":
            texts = [turn.prompt for turn in session.turns[: index + 1]]
            return {"prompt": texts[0] + "".join(a + b for a, b in zip(said, texts[1:], strict=True))}
        messages: list[Message] = []
        for place, turn in enumerate(session.turns[: index + 1]):
            messages += turn.messages
            if place < index:
                messages.append({"role": "assistant", "content": said[place]})
        return {"messages": messages}
