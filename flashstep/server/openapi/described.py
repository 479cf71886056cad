"""Structs of answers that handlers write as dictionaries, or by hand for speed: how /openapi.json describes them.

Nothing is encoded with these. That answers and events have these forms is checked by ``tests/server/test_schemathesis.py``.
"""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from flashstep.server import answers


class Error(msgspec.Struct, forbid_unknown_fields=True):
    """``code`` is the HTTP status, ``param`` the field at fault."""

    message: str
    type: str
    param: str | None
    code: int


class OpenAIError(msgspec.Struct, forbid_unknown_fields=True):
    """An error in OpenAI's form."""

    error: Error


class AnthropicProblem(msgspec.Struct, forbid_unknown_fields=True):
    """What was wrong; ``details`` say to the SDK what it can do without."""

    type: str
    message: str
    details: dict[str, Any] | UnsetType = UNSET


class AnthropicError(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="error"):
    """An error in Anthropic's form."""

    error: AnthropicProblem


# ---- small endpoints ------------------------------------------------------------------------------------------------------


class ModelCard(msgspec.Struct, forbid_unknown_fields=True):
    """A served name."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int


class ModelList(msgspec.Struct, forbid_unknown_fields=True):
    """All served names, the first of which stands in answers."""

    object: Literal["list"]
    data: list[ModelCard]


class Tokenized(msgspec.Struct, forbid_unknown_fields=True):
    """``token_strs`` with ``return_token_strs``."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | UnsetType = UNSET


class Detokenized(msgspec.Struct, forbid_unknown_fields=True):
    """The text."""

    prompt: str


class Version(msgspec.Struct, forbid_unknown_fields=True):
    """Of this server."""

    version: str


class Load(msgspec.Struct, forbid_unknown_fields=True):
    """Requests in flight."""

    server_load: int


class Document(msgspec.Struct):
    """An OpenAPI 3.1 document."""

    openapi: str
    info: dict[str, Any]
    paths: dict[str, Any]
    components: dict[str, Any]


class Figures(msgspec.Struct):
    """What the status page shows, of which these are a part."""

    model: str
    version: str
    healthy: bool
    running: int
    waiting: int
    cache_usage: float


# ---- chats and completions ------------------------------------------------------------------------------------------------


def _like(kind: type[msgspec.Struct], name: str, **types: Any) -> type[msgspec.Struct]:
    """``kind`` under another name, with other types for the fields in ``types``."""
    fields: list[Any] = []
    for field in msgspec.structs.fields(kind):
        described = types.get(field.name, field.type)
        fields.append((field.name, described) if field.required else (field.name, described, field.default))
    return msgspec.defstruct(name, fields, namespace={"__doc__": kind.__doc__})


def _list(kind: type) -> Any:
    return list.__class_getitem__(kind)


class Chunk(msgspec.Struct, kw_only=True):
    """One event of a stream: a piece of a choice, or no choice and the usage."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[Any]
    usage: answers.Usage | UnsetType | None = UNSET
    metrics: answers.AnswerMetrics | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


_ChunkChoice = _like(answers.ChatChunkChoice, "ChatChunkChoice", delta=answers.ChatDelta)
ChatCompletion = _like(answers.Response, "ChatCompletion", choices=list[answers.ChatChoice])
ChatCompletionChunk = _like(Chunk, "ChatCompletionChunk", choices=_list(_ChunkChoice))
Completion = _like(answers.Response, "Completion", choices=list[answers.TextChoice])
CompletionChunk = _like(Chunk, "CompletionChunk", choices=list[answers.TextChoice])


# ---- Responses ------------------------------------------------------------------------------------------------------------

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    """A message's text."""

    text: str
    annotations: list[Any]
    logprobs: list[Any]


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    """The reasoning itself."""

    text: str


class ReasoningItem(msgspec.Struct, tag_field="type", tag="reasoning"):
    """``encrypted_content`` where ``include`` asks for it."""

    id: str
    status: ItemStatus
    summary: list[Any]
    content: list[ReasoningText]
    encrypted_content: str | UnsetType = UNSET


class MessageItem(msgspec.Struct, tag_field="type", tag="message"):
    """The answer's text."""

    id: str
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class CallItem(msgspec.Struct, tag_field="type", tag="function_call"):
    """A call for the client to run."""

    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


class ResponseInputDetails(msgspec.Struct):
    """``cached_tokens`` came from the prefix cache; ``replayed_tokens`` of them were run again."""

    cached_tokens: int
    replayed_tokens: int
    cache_write_tokens: int


class ResponseUsage(msgspec.Struct):
    """Responses' names."""

    input_tokens: int
    input_tokens_details: ResponseInputDetails
    output_tokens: int
    output_tokens_details: answers.CompletionDetails
    total_tokens: int


class ResponseError(msgspec.Struct):
    """Why a response failed."""

    code: str
    message: str


class IncompleteDetails(msgspec.Struct):
    """Why a response is not complete."""

    reason: str


class ResponseObject(msgspec.Struct):
    """A response, with the settings that it was asked for with."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    model: str
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    output: list[ReasoningItem | MessageItem | CallItem]
    usage: ResponseUsage | None
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    store: bool
    metadata: dict[str, str]
    metrics: answers.AnswerMetrics | UnsetType = UNSET


class ResponseEvent(msgspec.Struct):
    """``event:`` names the type too; the other fields are those of OpenAI's event of that type."""

    type: str
    sequence_number: int


class InputTokens(msgspec.Struct, forbid_unknown_fields=True):
    """Of a response's prompt."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class Deleted(msgspec.Struct):
    """What is no longer kept."""

    id: str
    object: Literal["response"]
    deleted: bool


# ---- Messages -------------------------------------------------------------------------------------------------------------


class TextBlock(msgspec.Struct, tag_field="type", tag="text"):
    """The answer's text."""

    text: str


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking"):
    """The reasoning itself."""

    thinking: str
    signature: str


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use"):
    """A call for the client to run."""

    id: str
    name: str
    input: dict[str, Any]


class ThinkingTokens(msgspec.Struct):
    """Tokens of the output that were reasoning."""

    thinking_tokens: int


class MessageUsage(msgspec.Struct):
    """Anthropic's names: ``input_tokens`` are those that were not cached."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens
    service_tier: str


class Message(msgspec.Struct, tag_field="type", tag="message"):
    """An answer in Anthropic's form."""

    id: str
    role: Literal["assistant"]
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage
    metrics: answers.AnswerMetrics | UnsetType = UNSET


class MessageEvent(msgspec.Struct):
    """``event:`` names the type too; the other fields are those of Anthropic's event of that type."""

    type: Literal[
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
        "error",
    ]


class TokenCount(msgspec.Struct, forbid_unknown_fields=True):
    """Of a prompt."""

    input_tokens: int
