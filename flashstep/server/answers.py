"""The answers: response bodies and stream chunks as msgspec structs, and the encoders that write them.

A stream's chunks differ only in their choice, so everything else is encoded once per request (``ChunkWriter``). Reasoning is sent
under both names in use, ``reasoning`` and ``reasoning_content``. Knows no engine.
"""

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from flashstep.chat.parse import Delta, ToolCallDelta
from flashstep.chat.tokenizer import TextTokenizer
from flashstep.request import Acceptance, TokenLogprob

LOWEST_LOGPROB = -9999.0  # JSON has no infinity

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


class AnswerMetrics(msgspec.Struct, omit_defaults=True):
    """``metrics`` of an answer: one of its fields, for acceptance is either real or synthetic."""

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


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: ChatDelta
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
    reasoning: str | None
    reasoning_content: str | None
    tool_calls: list[FinishedCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatMessage
    logprobs: dict[str, Any] | None
    finish_reason: str
    stop_reason: str | int | None
    token_ids: tuple[int, ...] | UnsetType = UNSET


class Response(msgspec.Struct):
    """A whole answer. ``system_fingerprint`` ends in the engine's hit policy."""

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

    __slots__ = ("_head",)

    def __init__(self, *, id: str, object: str, created: int, model: str, fingerprint: str) -> None:
        head = {
            "id": id,
            "object": object,
            "created": created,
            "model": model,
            "system_fingerprint": fingerprint,
        }
        self._head = b"data: " + encode(head)[:-1] + b',"choices":['

    def choice(
        self,
        choice: ChatChunkChoice | TextChoice,
        *,
        usage: Usage | None = None,
        metrics: AnswerMetrics | None = None,
    ) -> bytes:
        return self._head + encode(choice) + _tail(usage, metrics)

    def usage(self, usage: Usage, *, metrics: AnswerMetrics | None = None) -> bytes:
        return self._head + _tail(usage, metrics)


def _tail(usage: Usage | None, metrics: AnswerMetrics | None) -> bytes:
    told = b"" if usage is None else b',"usage":' + encode(usage)
    if metrics is not None:
        told += b',"metrics":' + encode(metrics)
    return b"]" + told + b"}\n\n"


def chat_delta(delta: Delta) -> ChatDelta:
    reasoning = delta.reasoning or None
    calls = [_tool_call(call) for call in delta.tool_calls] or None
    return ChatDelta(
        content=delta.content or None, reasoning=reasoning, reasoning_content=reasoning, tool_calls=calls
    )


def _tool_call(call: ToolCallDelta) -> ToolCall:
    return ToolCall(
        index=call.index,
        function=Function(arguments=call.arguments, name=call.name),
        id=call.id,
        type="function" if call.id is not None else None,
    )


def spelled(tokenizer: TextTokenizer, token: int) -> str:
    """A token's text, or its bytes where they are no whole character, as OpenAI spells them."""
    data = tokenizer.token_bytes(token)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprobs(tokenizer: TextTokenizer, items: tuple[TokenLogprob, ...], *, count: int) -> dict[str, Any]:
    """Chat's form: one entry a token, with its ``count`` best alternatives."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": spelled(tokenizer, token),
            "logprob": max(logprob, LOWEST_LOGPROB),
            "bytes": list(tokenizer.token_bytes(token)),
        }

    content = [
        entry(item.token, item.logprob)
        | {"top_logprobs": [entry(token, logprob) for token, logprob, _ in item.top[:count]]}
        for item in items
    ]
    return {"content": content}


def text_logprobs(
    tokenizer: TextTokenizer, items: list[TokenLogprob | int], *, count: int, offset: int
) -> dict[str, Any]:
    """Completions' form: parallel lists. An ``int`` is a token without a logprob (the first of an echoed prompt)."""
    tokens, logprobs, tops, offsets = [], [], [], []
    for item in items:
        token = item if isinstance(item, int) else item.token
        text = spelled(tokenizer, token)
        tokens.append(text)
        offsets.append(offset)
        offset += len(text)
        if isinstance(item, int):
            logprobs.append(None)
            tops.append(None)
            continue
        logprobs.append(max(item.logprob, LOWEST_LOGPROB))
        best = {spelled(tokenizer, t): max(logprob, LOWEST_LOGPROB) for t, logprob, _ in item.top[:count]}
        tops.append(best | {text: max(item.logprob, LOWEST_LOGPROB)})
    return {"text_offset": offsets, "token_logprobs": logprobs, "tokens": tokens, "top_logprobs": tops}


def prompt_logprobs(tokenizer: TextTokenizer, items: list[TokenLogprob], *, count: int) -> list[Any]:
    """vLLM's form: null for the first position, then a map of token id to its logprob, rank and text."""

    def entry(token: int, logprob: float, rank: int) -> dict[str, Any]:
        value = max(logprob, LOWEST_LOGPROB)
        return {"logprob": value, "rank": rank, "decoded_token": spelled(tokenizer, token)}

    positions: list[Any] = [None]
    for item in items:
        best = {str(token): entry(token, logprob, rank) for token, logprob, rank in item.top[:count]}
        positions.append({str(item.token): entry(item.token, item.logprob, item.rank)} | best)
    return positions
