"""A message of /v1/messages while it is made: takes an answer piece by piece, gives its events, and the object as it stands.

A whole answer is the object after the last piece, so it is what the events add up to. Blocks come in the order of the answer:
thinking, text, one block for each tool use. Knows no engine and no HTTP.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

from flashstep.chat.parse import Delta, ToolCallDelta
from flashstep.server.answers import AnswerMetrics, Usage

Event = dict[str, Any]

STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


class MessageEvents:
    """Of one message. Its id is the signature of its thinking, which is taken back with any signature."""

    def __init__(self, id: str, *, model: str) -> None:
        self.message: dict[str, Any] = {
            "id": id,
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": None,
        }
        self._parts: list[str] = []  # of the open block
        self._is_open = False

    def begin(self, usage: Usage) -> Iterator[Event]:
        self.message["usage"] = told(usage)
        yield {"type": "message_start", "message": dict(self.message)}
        yield {"type": "ping"}

    def add(self, delta: Delta) -> Iterator[Event]:
        """The events of one piece of the answer."""
        if delta.reasoning:
            yield from self._grow("thinking", "thinking_delta", delta.reasoning)
        if delta.content:
            yield from self._grow("text", "text_delta", delta.content)
        for call in delta.tool_calls:
            yield from self._grow_call(call)

    def end(
        self, *, reason: str, stop_sequence: str | None, usage: Usage, metrics: AnswerMetrics | None = None
    ) -> Iterator[Event]:
        """The last events. ``reason`` is a chat's finish reason; ``stop_sequence`` is what matched, if one did."""
        yield from self._close()
        matched = reason == "stop" and stop_sequence is not None
        stopped = {
            "stop_reason": "stop_sequence" if matched else STOP_REASONS.get(reason, "end_turn"),
            "stop_sequence": stop_sequence if matched else None,
        }
        self.message |= stopped
        beside: dict[str, Any] = {"usage": told(usage)}
        if metrics is not None:
            beside["metrics"] = metrics
        self.message |= beside
        yield {"type": "message_delta", "delta": stopped, **beside}
        yield {"type": "message_stop"}

    @property
    def _block(self) -> dict[str, Any]:
        """The newest block; the open one if one is open."""
        return self.message["content"][-1]

    @property
    def _at(self) -> int:
        return len(self.message["content"]) - 1

    def _grow(self, kind: str, delta: str, text: str) -> Iterator[Event]:
        if not self._is_open or self._block["type"] != kind:
            yield from self._close()
            signed = {"signature": ""} if kind == "thinking" else {}
            yield self._start({"type": kind, kind: "", **signed})
        self._parts.append(text)
        yield self._delta({"type": delta, kind: text})

    def _grow_call(self, call: ToolCallDelta) -> Iterator[Event]:
        if call.id is not None:
            yield from self._close()
            yield self._start({"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
        if call.arguments:
            self._parts.append(call.arguments)
            yield self._delta({"type": "input_json_delta", "partial_json": call.arguments})

    def _start(self, block: dict[str, Any]) -> Event:
        self._is_open = True
        self._parts = []
        self.message["content"].append(block)
        return {"type": "content_block_start", "index": self._at, "content_block": dict(block)}

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": self._at, "delta": delta}

    def _close(self) -> Iterator[Event]:
        """End the open block, if there is one."""
        if not self._is_open:
            return
        self._is_open = False
        block, text = self._block, "".join(self._parts)
        if block["type"] == "tool_use":
            block["input"] = _object(text)
        else:
            block[block["type"]] = text
        if block["type"] == "thinking":
            block["signature"] = self.message["id"]
            yield self._delta({"type": "signature_delta", "signature": block["signature"]})
        yield {"type": "content_block_stop", "index": self._at}


def told(usage: Usage) -> dict[str, Any]:
    """Anthropic's usage, whose input tokens are those that were not cached."""
    cached = usage.prompt_tokens_details.cached_tokens
    details = usage.completion_tokens_details
    return {
        "input_tokens": usage.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": getattr(details, "reasoning_tokens", 0)},
        "service_tier": "standard",
    }


def _object(arguments: str) -> dict[str, Any]:
    """The arguments of a whole call; empty where they are no JSON object (a call that was cut short, as the recipe has it)."""
    try:
        return msgspec.json.decode(arguments, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return {}
