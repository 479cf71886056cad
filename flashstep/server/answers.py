"""The answers: response bodies and stream chunks as msgspec structs, and the encoders that write them.

A stream's chunks differ only in their choice, so everything else is encoded once per request (``ChunkWriter``). Reasoning is sent
under the names in use, ``reasoning`` and ``reasoning_content``, or one of them. Knows no engine.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from flashstep.chat.parse import Delta, ToolCallDelta
from flashstep.request import Acceptance

REASONING_FIELDS = {
    "both": ("reasoning", "reasoning_content"),
    "reasoning": ("reasoning",),
    "reasoning_content": ("reasoning_content",),
}

encode = msgspec.json.Encoder().encode


class PromptDetails(msgspec.Struct):
    """``cached_tokens`` came from the prefix cache; ``replayed_tokens`` of them were run again (hit policy "bounded")."""

    cached_tokens: int = 0
    replayed_tokens: int = 0


class CompletionDetails(msgspec.Struct):
    reasoning_tokens: int = 0


class Usage(msgspec.Struct):
    """vLLM's usage with DeepSeek's names beside it."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    prompt_cache_hit_tokens: int
    prompt_cache_miss_tokens: int
    completion_tokens_details: CompletionDetails | UnsetType = UNSET


class SpeculativeDecoding(msgspec.Struct):
    """vLLM's fields. The two ratios are null where nothing was drafted."""

    mean_acceptance_length: float | None
    draft_acceptance_rate: float | None
    acceptance_histogram: tuple[int, ...]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int


class ChoiceMetrics(msgspec.Struct, kw_only=True):
    """Where the time of one choice went, in seconds. ``queue_s`` and ``prefill_s`` are the engine's, the others the server's.

    ``decode_s`` is from the first token to the last, ``tokens_per_s`` the speed of those after the first; both are null where no
    second token came.
    """

    index: int
    queue_s: float | None
    prefill_s: float | None
    time_to_first_token_s: float | None
    decode_s: float | None
    end_to_end_s: float
    tokens_per_s: float | None
    cached_tokens: int
    replayed_tokens: int
    preemptions: int


class AnswerMetrics(msgspec.Struct, omit_defaults=True):
    """``metrics`` of an answer: ``choices`` where the request wants them, and acceptance, which is either real or synthetic."""

    choices: list[ChoiceMetrics] | None = None
    speculative_decoding: SpeculativeDecoding | None = None
    synthetic_speculative_decoding: SpeculativeDecoding | None = None

    @classmethod
    def of(cls, acceptance: Acceptance) -> "AnswerMetrics":
        told = SpeculativeDecoding(
            mean_acceptance_length=acceptance.mean_length,
            draft_acceptance_rate=acceptance.rate,
            acceptance_histogram=acceptance.histogram,
            num_spec_steps=acceptance.steps,
            num_accepted_draft_tokens=acceptance.accepted_tokens,
            num_draft_tokens=acceptance.draft_tokens,
            num_spec_tokens=acceptance.num_tokens,
        )
        if acceptance.synthetic:
            return cls(synthetic_speculative_decoding=told)
        return cls(speculative_decoding=told)


class Function(msgspec.Struct, omit_defaults=True):
    arguments: str
    name: str | None = None


class ToolCall(msgspec.Struct, omit_defaults=True):
    index: int
    function: Function
    id: str | None = None
    type: str | None = None


class ChatDelta(msgspec.Struct, omit_defaults=True):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class Opening(msgspec.Struct):
    """The first delta of a choice. vLLM's has an empty content, DeepSeek's no content and an empty reasoning."""

    role: str = "assistant"
    content: str | None = ""
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: ChatDelta | Opening
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: tuple[int, ...] | UnsetType = UNSET


class TextChoice(msgspec.Struct):
    """A choice of /v1/completions, in a chunk or in a whole response."""

    index: int
    text: str
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: tuple[int, ...] | UnsetType = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET
    prompt_logprobs: list[Any] | UnsetType = UNSET


class FinishedCall(msgspec.Struct):
    id: str
    function: Function
    type: str = "function"


class ChatMessage(msgspec.Struct):
    role: str
    content: str | None
    reasoning: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType | None = UNSET
    tool_calls: list[FinishedCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatMessage
    logprobs: dict[str, Any] | None
    finish_reason: str
    stop_reason: str | int | None
    token_ids: tuple[int, ...] | UnsetType = UNSET


class Response(msgspec.Struct):
    """A whole answer. ``system_fingerprint`` ends in the engine's hit policy, or in "falsified"."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice] | list[TextChoice]
    usage: Usage
    prompt_logprobs: list[Any] | UnsetType = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET
    metrics: AnswerMetrics | UnsetType = UNSET


class ChunkWriter:
    """Writes server-sent events for one request."""

    __slots__ = ("_end", "_head")

    def __init__(
        self,
        *,
        id: str,
        object: str,
        created: int,
        model: str,
        fingerprint: str,
        null_usage: bool = False,
    ) -> None:
        """``null_usage``: a chunk that tells no usage says so, as DeepSeek's do."""
        head = {
            "id": id,
            "object": object,
            "created": created,
            "model": model,
            "system_fingerprint": fingerprint,
        }
        self._head = b"data: " + encode(head)[:-1] + b',"choices":['
        self._end = b'],"usage":null}\n\n' if null_usage else b"]}\n\n"

    def choice(
        self,
        choice: ChatChunkChoice | TextChoice,
        *,
        usage: Usage | None = None,
        metrics: AnswerMetrics | None = None,
        prompt: tuple[int, ...] | None = None,
    ) -> bytes:
        """``prompt``: token ids that this chunk tells, beside its choice."""
        told = b"" if prompt is None else b'],"prompt_token_ids":' + encode(prompt)
        tail = self._end if usage is None and metrics is None else _tail(usage, metrics)
        return self._head + encode(choice) + (told + tail[1:] if told else tail)

    def usage(self, usage: Usage, *, metrics: AnswerMetrics | None = None) -> bytes:
        return self._head + _tail(usage, metrics)


def _tail(usage: Usage | None, metrics: AnswerMetrics | None) -> bytes:
    told = b"" if usage is None else b',"usage":' + encode(usage)
    if metrics is not None:
        told += b',"metrics":' + encode(metrics)
    return b"]" + told + b"}\n\n"


def chat_delta(delta: Delta, *, reasoning_fields: Sequence[str]) -> ChatDelta:
    calls = [_tool_call(call) for call in delta.tool_calls] or None
    made = ChatDelta(content=delta.content or None, tool_calls=calls)
    if delta.reasoning:
        for name in reasoning_fields:
            setattr(made, name, delta.reasoning)
    return made


def _tool_call(call: ToolCallDelta) -> ToolCall:
    return ToolCall(
        index=call.index,
        function=Function(arguments=call.arguments, name=call.name),
        id=call.id,
        type="function" if call.id is not None else None,
    )
