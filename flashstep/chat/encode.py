"""A conversation (OpenAI messages, tools, thinking mode) to the V4.1 prompt and its ids, wrapping ``deepseek_recipe``.

The recipe validates, renders and encodes: text that a user or tool wrote never yields a control token, whatever it spells.
What is added here: numeric effort (the recipe knows tiers only), ``reasoning`` beside ``reasoning_content`` in history, and one
kind of error. The parser of what the model answers is made here because the prompt decides its first state. Knows no HTTP.
"""

from collections.abc import Sequence
from typing import Any

import deepseek_recipe as recipe
import msgspec

from flashstep.chat.parse import ChatParser, ControlTokens
from flashstep.chat.tokenizer import TextTokenizer

MODEL = "DeepSeek-V4.1-Flash"  # the name under which the recipe knows the prompt format
IMAGE_SPELLINGS = ("<\uff5cdeepseek_image\uff5c>", "<\uff5cimage\uff5c>")  # the checkpoint's, the recipe's
NUMBERED_TIER = ("high", "75")  # a numeric effort is rendered as this tier, whose number is then replaced
EFFORT_LINE = "Reasoning Effort: "
OPTIONAL_FIELDS = ("tools", "tool_choice", "reasoning_effort", "response_format")


class ChatError(ValueError):
    """The conversation cannot be encoded. ``param`` names the request field at fault."""

    def __init__(self, message: str, *, param: str) -> None:
        super().__init__(message)
        self.param = param


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be said to the model. ``thinking`` None is the default (on); ``effort`` is a tier's name or 1..100.

    ``tool_choice`` "none" gives the prompt of a conversation without tools; "required" is rendered here and enforced nowhere yet.
    ``response_format`` is rendered here; ``chat.grammar`` makes what enforces it.
    """

    messages: Sequence[dict[str, Any]]
    tools: Sequence[dict[str, Any]] = ()
    tool_choice: str | dict[str, Any] = "auto"
    response_format: dict[str, Any] | None = None
    thinking: bool | None = None
    effort: str | int | None = None


class ChatPrompt:
    """An encoded conversation: ``text``, ``ids``, ``thinking``; ``parser()`` reads one answer to it.

    ``reasoning_end`` is the token that stands between reasoning and answer; None if the answer begins at once.
    """

    def __init__(
        self, request: recipe.ConversationRequest, *, text: str, ids: tuple[int, ...], tokens: "_Tokens"
    ) -> None:
        self.text = text
        self.ids = ids
        self.thinking = request.conversation.thinking_mode
        self._request = request
        self._tokens = tokens
        stage = request.parsing_options.thinking_initial_stage
        self._in_reasoning = stage is not None and stage.starts_in_reasoning()
        self.reasoning_end = tokens.control.thinking_end if self._in_reasoning else None

    def parser(
        self,
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        max_tool_calls: int | None = None,
        skip_special_tokens: bool = True,
    ) -> ChatParser:
        """A fresh parser. ``max_tool_calls`` 0 hides every call (tool_choice "none"), 1 keeps the first."""
        options = self._request.parsing_options
        if max_tool_calls == 0:  # recognise the markup although no tool was offered, in order to hide it
            options.parse_tool_calls = True
        processor = recipe.StreamProcessor(
            recipe.ChatCompletionRequest.chunk_generator(self._request, "", ""), options, self._tokens.native
        )
        return ChatParser(
            processor,
            self._tokens.text,
            control=self._tokens.control if skip_special_tokens else self._tokens.all_shown,
            in_reasoning=self._in_reasoning,
            stop=stop,
            include_stop=include_stop,
            min_tokens=min_tokens,
            max_tool_calls=max_tool_calls,
        )


class _Tokens:
    """The tokenizer as text and as the recipe's native object, and which ids never show in an answer."""

    def __init__(self, text: TextTokenizer) -> None:
        self.text = text
        self.native = recipe.Tokenizer.from_str(text.definition)
        turn = (
            recipe.SpecialToken.Bos,
            recipe.SpecialToken.Eos,
            recipe.SpecialToken.System,
            recipe.SpecialToken.User,
            recipe.SpecialToken.Assistant,
            recipe.SpecialToken.LatestReminder,
        )
        self.control = ControlTokens(
            hidden=text.special_ids | {_id_of(text, token) for token in turn},
            thinking_end=_id_of(text, recipe.SpecialToken.ThinkingEnd),
            dsml=_id_of(text, recipe.SpecialToken.Dsml),
        )
        self.all_shown = msgspec.structs.replace(self.control, hidden=frozenset())


class ChatEncoder:
    """Encodes conversations with one tokenizer."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self.tokenizer = tokenizer
        self._tokens = _Tokens(tokenizer)
        image = next((s for s in IMAGE_SPELLINGS if tokenizer.id_of(s) is not None), IMAGE_SPELLINGS[0])
        spellings = recipe.SpecialTokens(image=image)
        self._options = recipe.ConversionOptions().with_special_tokens(spellings)
        self._encoding = (
            recipe.DeepseekV41Encoding().with_special_tokens(spellings).with_tokenizer(self._tokens.native)
        )

    def encode(self, conversation: Conversation) -> ChatPrompt:
        """Raise ``ChatError`` for a conversation that is not valid."""
        request = self._convert(conversation)
        rendered = self._encoding.render_conversation(request.conversation)
        if rendered.image_sources:
            raise ChatError("image input is not supported yet", param="messages")
        if isinstance(conversation.effort, int) and request.conversation.thinking_mode:
            text, ids = self._numbered(rendered, conversation.effort)
        else:
            text, ids = rendered.prompt, tuple(self._encoding.encode(request.conversation))
        return ChatPrompt(request, text=text, ids=ids, tokens=self._tokens)

    def _convert(self, conversation: Conversation) -> recipe.ConversationRequest:
        body: dict[str, Any] = {
            "model": MODEL,
            "messages": [_history(message) for message in conversation.messages],
            "tool_choice": conversation.tool_choice,
        }
        if conversation.tools:
            body["tools"] = list(conversation.tools)
        if conversation.response_format is not None:
            body["response_format"] = conversation.response_format
        if conversation.thinking is not None:
            body["thinking"] = {"type": "enabled" if conversation.thinking else "disabled"}
        effort = conversation.effort
        if effort is not None:
            body["reasoning_effort"] = NUMBERED_TIER[0] if isinstance(effort, int) else effort
        try:
            return self._convert_body(body)
        except ValueError as error:
            raise ChatError(str(error), param=self._at_fault(body)) from error

    def _convert_body(self, body: dict[str, Any]) -> recipe.ConversationRequest:
        try:
            return recipe.ChatCompletionRequest(body).convert(self._options)
        except recipe.ConversionError as error:
            raise ValueError(msgspec.json.decode(error.body)["error"]["message"]) from error
        except (RecursionError, OverflowError) as error:  # nested too deeply; an integer beyond 64 bits
            raise ValueError(str(error)) from error

    def _at_fault(self, body: dict[str, Any]) -> str:
        """The field without which ``body`` would do: the recipe never says which one it is about."""
        for name in OPTIONAL_FIELDS:
            if name not in body:
                continue
            try:
                self._convert_body({key: value for key, value in body.items() if key != name})
            except ValueError:
                continue
            return name
        return "messages"

    def _numbered(self, rendered: recipe.RenderedPrompt, effort: int) -> tuple[str, tuple[int, ...]]:
        """The prompt with its effort number replaced; encoded as the recipe does, plain text between special ranges."""
        at = rendered.prompt.index(EFFORT_LINE) + len(EFFORT_LINE)  # the first system turn opens with it
        shift = len(str(effort)) - len(NUMBERED_TIER[1])
        assert rendered.prompt.startswith(NUMBERED_TIER[1], at)
        text = rendered.prompt[:at] + str(effort) + rendered.prompt[at + len(NUMBERED_TIER[1]) :]
        moved = [(a + shift, b + shift) if a > at else (a, b) for a, b in rendered.special_ranges]
        return text, self._encode_ranges(text, moved)

    def _encode_ranges(self, text: str, special: Sequence[tuple[int, int]]) -> tuple[int, ...]:
        ids: list[int] = []
        done = 0
        for start, end in special:
            if done < start:
                ids += self.tokenizer.encode_plain(text[done:start])
            token = self.tokenizer.id_of(text[start:end])
            assert token is not None, "the recipe accepted this tokenizer, so it has every spelling"
            ids.append(token)
            done = end
        if done < len(text):
            ids += self.tokenizer.encode_plain(text[done:])
        return tuple(ids)


def _id_of(tokenizer: TextTokenizer, token: recipe.SpecialToken) -> int:
    spelling = token.default_str()
    found = tokenizer.id_of(spelling)
    if found is None:
        raise ValueError(f"the tokenizer has no token {spelling}: it is not a DeepSeek-V4.1 tokenizer")
    return found


def _history(message: dict[str, Any]) -> dict[str, Any]:
    """A message as the recipe reads it: vLLM's ``reasoning`` is its ``reasoning_content``."""
    if "reasoning" not in message:
        return message
    renamed = {key: value for key, value in message.items() if key != "reasoning"}
    if renamed.get("reasoning_content") is None:
        renamed["reasoning_content"] = message["reasoning"]
    return renamed
