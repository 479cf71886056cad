"""The body of POST /v1/responses, with vLLM's sampling fields, and the chat and the conversation it stands for.

Whatever ``deepseek_recipe`` would drop in silence (hosted tools, files, references to items) is refused here by name. Reasoning
that a client brings back counts under ``content`` or, where it kept that alone, under this server's own ``encrypted_content``.
"""

import base64
import binascii
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, ClassVar, Literal

import msgspec

from flashstep.chat.conversation import ResponsesConversation
from flashstep.server import intake, turns
from flashstep.server.errors import ApiError, quoted, refuse
from flashstep.server.openai import ChatBody, JsonSchema, ResponseFormat, StreamOptions, converted
from flashstep.server.protocol import ProtocolBody, own_tools, told_as

KEEPS_REASONING = "reasoning.encrypted_content"
SEAL = b"flashstep1:"  # what our encrypted_content begins with
TEXT_PARTS = ("input_text", "output_text")
ROLES = ("user", "assistant", "system", "developer")
WORDS = {  # of a chat: of this API
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}


class Reasoning(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``summary`` "auto" gets the reasoning itself, in whole, as every answer does; nothing is ever summarised."""

    effort: str | int | float | None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None


class TextFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Chat's ``response_format``, flat."""

    type: Literal["text", "json_object", "json_schema"]
    schema: dict[str, Any] | bool | None = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``verbosity`` "medium" asks for nothing; the model has no switch for another."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class FunctionTool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """``type`` is function: tools that the client runs are the only ones there are."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: Literal[False] = False


class FunctionChoice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``tool_choice`` of one function."""

    type: Literal["function"]
    name: str


class ResponsesBody(ProtocolBody, frozen=True, kw_only=True):
    """POST /v1/responses."""

    refused: ClassVar[dict[str, str]] = {
        "conversation": "conversations are not kept; use previous_response_id, or send the items",
        "prompt": "prompt templates are not kept; send instructions and input",
        "max_tokens": "use max_output_tokens",
        "messages": "use input",
        "response_format": "use text.format",
        "reasoning_effort": "use reasoning.effort",
        "n": "a response is one answer",
        "max_tool_calls": "it limits tools that a server runs, and this one runs none",
        "moderation": "nothing is moderated here",
        "context_management": "a prompt is never cut or compacted; send a shorter one",
        "logprobs": "responses have no log-probabilities here; /v1/chat/completions has",
        "top_logprobs": "responses have no log-probabilities here; /v1/chat/completions has",
    }

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    stop: str | list[str] = msgspec.field(default_factory=list)
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    thinking_token_budget: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    include: list[str] = msgspec.field(default_factory=list)
    truncation: str | None = None
    stream_options: StreamOptions | None = None
    store: bool | None = None
    background: bool = False
    previous_response_id: str | None = None
    metadata: dict[str, str] = msgspec.field(default_factory=dict)
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    service_tier: str | None = None

    @property
    def keeps_reasoning(self) -> bool:
        """Reasoning items are to carry ``encrypted_content``."""
        return KEEPS_REASONING in self.include


class InputBody(ResponsesBody, frozen=True, kw_only=True):
    """POST /v1/responses/input_tokens: a response's body, which may be sent to both; only the prompt's part counts."""


def understood(
    body: ResponsesBody, *, before: Sequence[dict[str, Any]]
) -> tuple[ChatBody, ResponsesConversation]:
    """The chat that ``body`` asks for and its conversation, whose items follow those of ``before``."""
    refuse(chain(_option_problems(body), _item_problems(body.input)))
    tools = None if not body.tools else own_tools(body.tools, FunctionTool, kind="function")
    with told_as(WORDS):
        chat = body.chat(
            max_tokens=body.max_output_tokens,
            stop=body.stop,
            response_format=_format(body),
            thinking_token_budget=body.thinking_token_budget,
            reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
            tools=None if tools is None else [_as_chat_tool(tool) for tool in tools],
            tool_choice=_choice(body.tool_choice),
            parallel_tool_calls=body.parallel_tool_calls,
        )
        talk = intake.conversation(chat)
    own = items(body.input) if before else body.input
    return chat, ResponsesConversation(
        input=own if isinstance(own, str) else [*before, *map(_read_back, own)],
        instructions=body.instructions,
        tools=[msgspec.to_builtins(tool) for tool in tools or ()],
        tool_choice=talk.tool_choice,
        response_format=talk.response_format,
        thinking=talk.thinking,
        effort=talk.effort,
    )


def items(given: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """``input`` as items."""
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


def sealed(reasoning: str) -> str:
    """``encrypted_content`` of a reasoning item: the text itself in base64, for it stands in the item anyway."""
    return base64.b64encode(SEAL + reasoning.encode()).decode()


def _unsealed(content: object) -> str | None:
    try:
        data = base64.b64decode(content, validate=True) if isinstance(content, str) else b""
        return data.removeprefix(SEAL).decode() if data.startswith(SEAL) else None
    except (binascii.Error, ValueError):
        return None


def _read_back(item: dict[str, Any]) -> dict[str, Any]:
    if item.get("type") != "reasoning" or item.get("content"):
        return item
    text = _unsealed(item.get("encrypted_content"))
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


def _option_problems(body: ResponsesBody) -> Iterator[ApiError]:
    if body.truncation not in (None, "disabled"):
        yield ApiError(
            "truncation: a prompt is never cut; it must be disabled, or absent", param="truncation"
        )
    for name in body.include:
        if name != KEEPS_REASONING:
            yield ApiError(
                f"include holds {quoted(name)}; this server can include {KEEPS_REASONING}", param="include"
            )
    if body.background and body.stream:
        yield ApiError(
            "background and stream are both true; ask for a background response by its id", param="background"
        )
    if body.background and body.store is False:
        yield ApiError(
            "background is true and store false; nobody could ask for the response", param="background"
        )
    if body.stream_options is not None and not body.stream:
        yield ApiError("stream_options needs stream to be true", param="stream_options")
    for name in ("include_usage", "continuous_usage_stats"):
        if body.stream_options is not None and getattr(body.stream_options, name):
            yield ApiError(
                f"stream_options.{name}: the usage is always in the last event, and in no other",
                param="stream_options",
            )
    if isinstance(body.input, list) and not body.input:
        yield ApiError("input is an empty list; it needs at least one item", param="input")


def _item_problems(given: str | list[dict[str, Any]]) -> Iterator[ApiError]:
    for at, item in enumerate(items(given)):
        kind = item.get("type", "message")
        yield from turns.strangers(
            item, turns.ITEMS.get(kind) if isinstance(kind, str) else None, f"input[{at}]"
        )
        if kind == "message":
            if item.get("role") not in ROLES:
                yield ApiError(
                    f"input[{at}].role is {quoted(item.get('role'))}; roles are {', '.join(ROLES)}",
                    param="input",
                )
            yield from _part_problems(item.get("content"), f"input[{at}].content")
        elif kind == "function_call_output":
            yield from _part_problems(item.get("output"), f"input[{at}].output")
        elif kind == "reasoning":
            yield from turns.part_strangers(item.get("content"), turns.REASONING_PART, f"input[{at}].content")
            if not item.get("content") and _unsealed(item.get("encrypted_content")) is None:
                yield ApiError(
                    f"input[{at}]: a reasoning item needs its content, or the encrypted_content that this server gave",
                    param="input",
                )
        elif kind != "function_call":
            yield ApiError(
                f"input[{at}] is of type {quoted(kind)}; this server takes message, reasoning, function_call and"
                " function_call_output",
                param="input",
            )


def _part_problems(content: object, where: str) -> Iterator[ApiError]:
    """A text or a list of text parts; whatever else is wrong with it the recipe says."""
    for at, part in enumerate(content if isinstance(content, list) else ()):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind not in TEXT_PARTS:
            yield ApiError(f"{where}[{at}] is of type {quoted(kind)}; only text is supported", param="input")
        else:
            yield from turns.strangers(part, turns.ITEM_PART, f"{where}[{at}]")


def _as_chat_tool(tool: FunctionTool) -> dict[str, Any]:
    fields = {name: value for name, value in msgspec.to_builtins(tool).items() if value is not None}
    fields.pop("type", None)
    fields.pop("defer_loading", None)
    return {"type": "function", "function": fields}


def _choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if not isinstance(choice, dict):
        return choice
    kind = choice.get("type")
    if kind != "function":
        raise ApiError(
            f"tool_choice is of type {quoted(kind)}; it must be auto, none, required, or of type function with a name",
            param="tool_choice",
        )
    return {
        "type": "function",
        "function": {"name": converted(choice, FunctionChoice, name="tool_choice").name},
    }


def _format(body: ResponsesBody) -> ResponseFormat | None:
    form = None if body.text is None else body.text.format
    if form is None:
        return None
    if form.type != "json_schema":
        return ResponseFormat(type=form.type)
    if form.schema is None:
        raise ApiError("text.format: the type json_schema needs a schema", param="text")
    schema = JsonSchema(schema=form.schema, name=form.name, description=form.description, strict=form.strict)
    return ResponseFormat(type=form.type, json_schema=schema)
