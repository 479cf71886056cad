"""What is to be said to the model, in the words of the API it came in: a chat, Responses' items, or Messages' turns.

Each gives the body that ``deepseek_recipe`` reads for its protocol, with a tier in place of a numeric effort. What the recipe
would drop in silence must have been refused before. Knows no prompt text, no tokens and no HTTP.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import deepseek_recipe as recipe
import msgspec

MODEL = "DeepSeek-V4.1-Flash"  # the name under which the recipe knows the prompt format
NUMBERED_TIER = ("high", "75")  # a numeric effort is rendered as this tier, whose number is then replaced


class Talk(msgspec.Struct, frozen=True, kw_only=True):
    """What the three have in common. ``thinking`` None is the default (on); ``effort`` is a tier's name or 1..100.

    ``tool_choice`` (chat's form) "none" gives the prompt of a conversation without tools; "required" is only rendered here.
    ``response_format`` (chat's form) is rendered here; ``chat.grammar`` makes what enforces it.
    """

    request: ClassVar[type[recipe.ChatCompletionRequest | recipe.ResponsesRequest | recipe.MessagesRequest]]
    names: ClassVar[dict[str, str]]  # optional fields of the recipe's body, each with the user's word for it
    told_in: ClassVar[str]  # the field of a user's request that holds the turns

    tools: Sequence[dict[str, Any]] = ()
    tool_choice: str | dict[str, Any] = "auto"
    response_format: dict[str, Any] | None = None
    thinking: bool | None = None
    effort: str | int | None = None

    def body(self) -> dict[str, Any]:
        """The recipe's request body."""
        raise NotImplementedError

    def completed(self, conversation: recipe.Conversation) -> recipe.Conversation:
        """``conversation``, with what its protocol has no word for."""
        return conversation

    @property
    def tier(self) -> str | None:
        """The effort as the recipe knows it."""
        return NUMBERED_TIER[0] if isinstance(self.effort, int) else self.effort


class Conversation(Talk, frozen=True, kw_only=True):
    """Of chat completions: ``messages`` and ``tools`` as OpenAI's chats have them."""

    request = recipe.ChatCompletionRequest
    names = {name: name for name in ("tools", "tool_choice", "reasoning_effort", "response_format")}
    told_in = "messages"

    messages: Sequence[dict[str, Any]]

    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": MODEL,
            "messages": [_history(message) for message in self.messages],
            "tool_choice": self.tool_choice,
        }
        if self.tools:
            body["tools"] = list(self.tools)
        if self.response_format is not None:
            body["response_format"] = _without_strict(self.response_format)
        if self.thinking is not None:
            body["thinking"] = {"type": "enabled" if self.thinking else "disabled"}
        if self.tier is not None:
            body["reasoning_effort"] = self.tier
        return body


class ResponsesConversation(Talk, frozen=True, kw_only=True):
    """Of Responses: ``input`` items (or a text), ``tools`` in that API's flat form."""

    request = recipe.ResponsesRequest
    names = {"tools": "tools", "tool_choice": "tool_choice", "reasoning": "reasoning", "text": "text"}
    told_in = "input"

    input: str | Sequence[dict[str, Any]]
    instructions: str | None = None

    def body(self) -> dict[str, Any]:
        items = self.input if isinstance(self.input, str) else list(self.input)
        choice = self.tool_choice
        if not isinstance(choice, str):
            choice = {"type": "function", "name": choice["function"]["name"]}
        body: dict[str, Any] = {"model": MODEL, "input": items, "tool_choice": choice}
        if self.instructions is not None:
            body["instructions"] = self.instructions
        if self.tools:
            body["tools"] = list(self.tools)
        if self.response_format is not None:
            form = _without_strict(self.response_format)
            body["text"] = {"format": {"type": form["type"], **form.get("json_schema", {})}}
        tier = "none" if self.thinking is False else self.tier
        if tier is not None:
            body["reasoning"] = {"effort": tier}
        return body


class MessagesConversation(Talk, frozen=True, kw_only=True):
    """Of Messages: ``messages`` and ``tools`` as Anthropic has them; ``system`` is a text or its blocks.

    A last turn of the assistant is what the answer begins with (``thinking`` must then be False).
    """

    request = recipe.MessagesRequest
    names = {
        "tools": "tools",
        "tool_choice": "tool_choice",
        "output_config": "output_config",
        "system": "system",
    }
    told_in = "messages"

    messages: Sequence[dict[str, Any]]
    system: str | Sequence[dict[str, Any]] | None = None

    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = {"model": MODEL, "messages": list(self.messages)}
        if self.system is not None:
            body["system"] = self.system
        if self.tools:
            body["tools"] = list(self.tools)
            choice = self.tool_choice
            if isinstance(choice, str):
                body["tool_choice"] = {"type": "any" if choice == "required" else choice}
            else:
                body["tool_choice"] = {"type": "tool", "name": choice["function"]["name"]}
        if self.thinking is not None:
            body["thinking"] = {"type": "enabled" if self.thinking else "disabled"}
        if self.tier is not None:
            body["output_config"] = {"effort": self.tier}
        return body

    @property
    def continues(self) -> bool:
        """The answer goes on where the last turn stops."""
        return bool(self.messages) and self.messages[-1].get("role") == "assistant"

    def completed(self, conversation: recipe.Conversation) -> recipe.Conversation:
        """With the form of the answer, which the recipe reads from chats and Responses only, and the turn to go on with."""
        form = self.response_format
        if form is None and not self.continues:
            return conversation
        messages = conversation.messages
        if self.continues:
            messages[-1] = recipe.AssistantMessage(messages[-1].content, prefix=True)
        return recipe.Conversation(
            messages,
            thinking_mode=conversation.thinking_mode,
            tools=conversation.tools,
            tool_choice=conversation.tool_choice,
            reasoning_effort=conversation.reasoning_effort,
            response_schema=None if form is None else form["json_schema"]["schema"],
        )


def _without_strict(form: dict[str, Any]) -> dict[str, Any]:
    """The recipe would refuse a strict form that has optional or no properties, and it enforces nothing."""
    if "json_schema" not in form:
        return form
    return form | {"json_schema": {k: v for k, v in form["json_schema"].items() if k != "strict"}}


def _history(message: dict[str, Any]) -> dict[str, Any]:
    """A message as the recipe reads it: vLLM's ``reasoning`` is its ``reasoning_content``."""
    if "reasoning" not in message:
        return message
    renamed = {key: value for key, value in message.items() if key != "reasoning"}
    if renamed.get("reasoning_content") is None:
        renamed["reasoning_content"] = message["reasoning"]
    return renamed
