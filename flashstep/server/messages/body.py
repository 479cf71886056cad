"""The bodies of POST /v1/messages and /v1/messages/count_tokens, with vLLM's sampling fields, and the chat they stand for.

Whatever ``deepseek_recipe`` would drop in silence (server tools, documents, redacted thinking) is refused here by name.
``cache_control`` is taken everywhere: prompts are cached without being asked, so it changes no answer.
"""

from collections.abc import Iterator
from itertools import chain
from typing import Any, ClassVar, Literal

import msgspec

from flashstep.chat.conversation import MessagesConversation
from flashstep.server import intake, turns
from flashstep.server.errors import ApiError, quoted, refuse
from flashstep.server.openai import ChatBody, JsonSchema, ResponseFormat
from flashstep.server.protocol import ProtocolBody, own_tools, told_as

KEEPS_THINKING = {"type": "clear_thinking_20251015", "keep": "all"}
WORDS = {  # of a chat: of this API
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "stop": "stop_sequences",
    "thinking_token_budget": "thinking.budget_tokens",
}
AS_CHAT_CHOICE = {"auto": "auto", "any": "required", "none": "none"}


class ThinkingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``display`` "summarized" gets the thinking itself, in whole, as every answer does."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: Literal["summarized"] | None = None


class OutputFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the text of the answer must match; the prompt tells the model of it."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``effort`` as everywhere here: a tier's name, or a number."""

    effort: str | int | float | None = None
    format: OutputFormat | None = None


class ContextManagement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Edits of the history. The one that keeps all thinking is what happens anyway; there is no other."""

    edits: list[dict[str, Any]] = []


class ToolChoice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``name`` belongs to the type tool."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class ClientTool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tool that the client runs. Arguments are always streamed as they come, whatever ``eager_input_streaming`` says."""

    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] = "custom"
    strict: bool | None = None
    cache_control: dict[str, Any] | None = None
    eager_input_streaming: bool | None = None
    defer_loading: Literal[False] = False
    allowed_callers: list[Literal["direct"]] = []


class CountBody(ProtocolBody, frozen=True, kw_only=True):
    """POST /v1/messages/count_tokens: a message's body, so that one can be sent to both; only the prompt's part of it counts."""

    refused: ClassVar[dict[str, str]] = {
        "stop": "use stop_sequences",
        "tool": "use tools",
        "output_format": "use output_config.format",
        "reasoning_effort": "use output_config.effort",
        "response_format": "use output_config.format",
        "mcp_servers": "this server runs no tools of its own",
        "container": "this server runs no tools of its own",
        "n": "a message is one answer",
        "max_completion_tokens": "use max_tokens",
        "thinking_token_budget": "use thinking.budget_tokens",
        "thread": "conversations are not kept; send all messages",
    }
    refused_details: ClassVar[dict[str, dict[str, Any]]] = {  # the SDK's tool loop then goes on without
        "thread": {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    }

    max_tokens: int | None = None
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: list[str] = msgspec.field(default_factory=list)
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    cache_control: dict[str, Any] | None = None
    context_management: ContextManagement | None = None


class MessagesBody(CountBody, frozen=True, kw_only=True):
    """POST /v1/messages."""

    max_tokens: int


def understood(body: CountBody) -> tuple[ChatBody, MessagesConversation]:
    """The chat that ``body`` asks for, and its conversation."""
    refuse(chain(_option_problems(body), _message_problems(body)))
    tools = None if not body.tools else own_tools(body.tools, ClientTool, kind="custom", implied="custom")
    choice = body.tool_choice
    with told_as(WORDS):
        chat = body.chat(
            max_tokens=body.max_tokens,
            stop=body.stop_sequences,
            thinking=_thinks(body),
            thinking_token_budget=None if body.thinking is None else body.thinking.budget_tokens,
            reasoning_effort=None if body.output_config is None else body.output_config.effort,
            response_format=_format(body),
            tools=None if tools is None else [_as_chat_tool(tool) for tool in tools],
            tool_choice=None if choice is None else _choice(choice),
            parallel_tool_calls=choice is None or not choice.disable_parallel_tool_use,
        )
        talk = intake.conversation(chat)
    own = MessagesConversation(
        messages=body.messages,
        system=body.system,
        tools=[_as_recipe_tool(tool) for tool in tools or ()],
        tool_choice=talk.tool_choice,
        response_format=talk.response_format,
        thinking=talk.thinking,
        effort=talk.effort,
    )
    if own.continues:
        own = _without_thinking(own, chat)
    return chat, own


def _without_thinking(talk: MessagesConversation, chat: ChatBody) -> MessagesConversation:
    """An answer that begins with the last turn's text has nothing thought before it.

    An effort in ``chat_template_kwargs`` asks for no thinking: it may be the server's default, which holds where one thinks.
    """
    asked_effort = chat.reasoning_effort
    if talk.thinking or (talk.thinking is None and asked_effort not in (None, "none")):
        raise ApiError(
            "messages: the last turn is the assistant's, which needs thinking to be disabled",
            param="messages",
        )
    if chat.response_format is not None or chat.structured_outputs is not None:
        raise ApiError(
            "messages: the last turn is the assistant's, whose text no form of the answer covers; leave one out",
            param="messages",
        )
    return msgspec.structs.replace(talk, thinking=False)


def _thinks(body: CountBody) -> bool | None:
    return None if body.thinking is None else body.thinking.type != "disabled"


def _option_problems(body: CountBody) -> Iterator[ApiError]:
    for edit in () if body.context_management is None else body.context_management.edits:
        if edit != KEEPS_THINKING:
            yield ApiError(
                f"context_management.edits holds {quoted(edit.get('type'))}; a history is never edited, so only"
                f" {KEEPS_THINKING} is taken",
                param="context_management",
            )
    thinking = body.thinking
    if thinking is not None and thinking.type == "disabled" and thinking.budget_tokens is not None:
        yield ApiError("thinking is disabled, and has budget_tokens; leave them out", param="thinking")
    choice = body.tool_choice
    if choice is not None and (choice.type == "tool") != (choice.name is not None):
        yield ApiError(
            "tool_choice: the type tool needs a name, and the others take none", param="tool_choice"
        )


def _message_problems(body: CountBody) -> Iterator[ApiError]:
    if not body.messages:
        yield ApiError("messages is an empty list; it needs at least one message", param="messages")
    if isinstance(body.system, list):
        yield from _block_problems(body.system, "system", allowed=("text",))
    for at, message in enumerate(body.messages):
        yield from turns.strangers(message, turns.TURN, f"messages[{at}]")
        content = message.get("content")
        if isinstance(content, list):
            yield from _block_problems(content, f"messages[{at}].content", allowed=tuple(turns.BLOCKS))


def _block_problems(blocks: list[Any], where: str, *, allowed: tuple[str, ...]) -> Iterator[ApiError]:
    for at, block in enumerate(blocks):
        kind = block.get("type") if isinstance(block, dict) else type(block).__name__
        if kind not in allowed:
            yield ApiError(
                f"{where}[{at}] is of type {quoted(kind)}; this server takes {', '.join(allowed)}",
                param=where.split("[")[0],
            )
            continue
        yield from turns.strangers(block, turns.BLOCKS[kind], f"{where}[{at}]")
        if kind == "tool_result" and isinstance(block.get("content"), list):
            yield from _block_problems(block["content"], f"{where}[{at}].content", allowed=("text",))


def _described(tool: ClientTool) -> dict[str, Any]:
    given = {"name": tool.name, "description": tool.description, "strict": tool.strict}
    return {name: value for name, value in given.items() if value is not None}


def _as_chat_tool(tool: ClientTool) -> dict[str, Any]:
    return {"type": "function", "function": _described(tool) | {"parameters": tool.input_schema}}


def _as_recipe_tool(tool: ClientTool) -> dict[str, Any]:
    return _described(tool) | {"input_schema": tool.input_schema}


def _choice(choice: ToolChoice) -> str | dict[str, Any]:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return AS_CHAT_CHOICE[choice.type]


def _format(body: CountBody) -> ResponseFormat | None:
    form = None if body.output_config is None else body.output_config.format
    if form is None:
        return None
    return ResponseFormat(
        type="json_schema", json_schema=JsonSchema(schema=form.schema, name="answer", strict=True)
    )
