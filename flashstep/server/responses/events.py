"""A response of /v1/responses while it is made: takes an answer piece by piece, gives its events, and the object as it stands.

A whole answer is the object after the last piece, so it is what the events add up to. Items come in the order of the answer:
reasoning, message, one item for each call. Knows no engine and no HTTP.
"""

import time
from collections.abc import Iterator
from typing import Any

from flashstep.chat.parse import Delta, ToolCallDelta
from flashstep.server.answers import Usage
from flashstep.server.responses.body import sealed

Event = dict[str, Any]


def part(kind: str, text: str) -> dict[str, Any]:
    """The one part of an item's content."""
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


class _Item:
    """An item that still grows. ``kind`` is reasoning, message or function_call."""

    def __init__(self, kind: str, at: int, item: dict[str, Any]) -> None:
        self.kind = kind
        self.at = at
        self.item = item
        self.parts: list[str] = []

    def write(self) -> str:
        """Put what it says into the item; give it."""
        text = "".join(self.parts)
        if self.kind == "function_call":
            self.item["arguments"] = text
        else:
            self.item["content"] = [part(self.kind, text)]
        return text

    @property
    def place(self) -> dict[str, Any]:
        return {"item_id": self.item["id"], "output_index": self.at}


class ResponseEvents:
    """``fields`` is the response object without what the answer decides. ``seals``: reasoning gets ``encrypted_content``."""

    def __init__(self, fields: dict[str, Any], *, seals: bool) -> None:
        undecided = {
            "output": [],
            "usage": None,
            "error": None,
            "incomplete_details": None,
            "completed_at": None,
        }
        self.response: dict[str, Any] = fields | {"status": "in_progress", **undecided}
        self._seals = seals
        self._open: _Item | None = None
        self._sequence = 0

    def begin(self) -> Iterator[Event]:
        yield self._event("response.created", response=dict(self.response))
        yield self._event("response.in_progress", response=dict(self.response))

    def add(self, delta: Delta) -> Iterator[Event]:
        """The events of one piece of the answer."""
        if delta.reasoning:
            yield from self._grow("reasoning", delta.reasoning)
        if delta.content:
            yield from self._grow("message", delta.content)
        for call in delta.tool_calls:
            yield from self._grow_call(call)

    def end(self, *, cut: bool, usage: Usage) -> Iterator[Event]:
        """The last events. ``cut``: ended by the limit of tokens."""
        status = "incomplete" if cut else "completed"
        yield from self._close(status)
        details = usage.completion_tokens_details
        self.response["usage"] = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": usage.prompt_tokens_details.cached_tokens,
                "replayed_tokens": usage.prompt_tokens_details.replayed_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": getattr(details, "reasoning_tokens", 0)},
            "total_tokens": usage.total_tokens,
        }
        if cut:
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            self.response["completed_at"] = int(time.time())
        yield self._stopped(status)

    def fail(self, message: str, *, ours: bool) -> Iterator[Event]:
        """The answer ends in an error, behind what has been said. ``ours``: it is not the request's."""
        yield from self._close("incomplete")
        code = "server_error" if ours else "invalid_prompt"
        self.response["error"] = {"code": code, "message": message}
        yield self._stopped("failed")

    def cancel(self) -> None:
        """Nobody wants the rest; there is no event for that."""
        for _ in self._close("incomplete"):
            pass
        self.response["status"] = "cancelled"

    def snapshot(self) -> dict[str, Any]:
        """The response as it stands, with what the open item says so far."""
        if self._open is not None:
            self._open.write()
        return self.response

    def _stopped(self, status: str) -> Event:
        self.response["status"] = status
        return self._event(f"response.{status}", response=self.response)

    def _event(self, kind: str, **fields: Any) -> Event:
        self._sequence += 1
        return {"type": kind, "sequence_number": self._sequence - 1, **fields}

    def _grow(self, kind: str, text: str) -> Iterator[Event]:
        if self._open is None or self._open.kind != kind:
            yield from self._close("completed")
            yield from self._start_text(kind)
        item = self._open
        assert item is not None, "one has just been opened"
        item.parts.append(text)
        if kind == "reasoning":
            yield self._event("response.reasoning_text.delta", **item.place, content_index=0, delta=text)
        else:
            yield self._event(
                "response.output_text.delta", **item.place, content_index=0, delta=text, logprobs=[]
            )

    def _start_text(self, kind: str) -> Iterator[Event]:
        if kind == "reasoning":
            item = self._started("reasoning", "rs", summary=[], content=[])
        else:
            item = self._started("message", "msg", role="assistant", content=[])
        yield self._event("response.output_item.added", output_index=item.at, item=dict(item.item))
        yield self._event("response.content_part.added", **item.place, content_index=0, part=part(kind, ""))

    def _grow_call(self, call: ToolCallDelta) -> Iterator[Event]:
        if call.id is not None:
            yield from self._close("completed")
            item = self._started("function_call", "fc", call_id=call.id, name=call.name, arguments="")
            yield self._event("response.output_item.added", output_index=item.at, item=dict(item.item))
        item = self._open
        assert item is not None, "the first piece of a call carries its id"
        if call.arguments:
            item.parts.append(call.arguments)
            yield self._event("response.function_call_arguments.delta", **item.place, delta=call.arguments)

    def _started(self, kind: str, prefix: str, **fields: Any) -> _Item:
        at = len(self.response["output"])
        item = {
            "id": f"{prefix}_{self.response['id'].partition('_')[2]}_{at}",
            "type": kind,
            "status": "in_progress",
            **fields,
        }
        self._open = _Item(kind, at, item)
        self.response["output"] = [*self.response["output"], item]
        return self._open

    def _close(self, status: str) -> Iterator[Event]:
        """End the open item, if there is one."""
        item = self._open
        self._open = None
        if item is None:
            return
        text = item.write()
        item.item["status"] = status
        if item.kind == "function_call":
            done = {"arguments": text, "name": item.item["name"]}
            yield self._event("response.function_call_arguments.done", **item.place, **done)
        else:
            yield from self._close_text(item, text)
        yield self._event("response.output_item.done", output_index=item.at, item=item.item)

    def _close_text(self, item: _Item, text: str) -> Iterator[Event]:
        if item.kind == "reasoning":
            yield self._event("response.reasoning_text.done", **item.place, content_index=0, text=text)
            if self._seals:
                item.item["encrypted_content"] = sealed(text)
        else:
            yield self._event(
                "response.output_text.done", **item.place, content_index=0, text=text, logprobs=[]
            )
        yield self._event(
            "response.content_part.done", **item.place, content_index=0, part=item.item["content"][0]
        )
