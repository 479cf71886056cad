"""A conversation (of chats, Responses or Messages) to the V4.1 prompt and its ids, wrapping ``deepseek_recipe``.

The recipe validates, renders and encodes: text that a user or tool wrote never yields a control token, whatever it spells.
What is added here: numeric effort (the recipe knows tiers only), and one kind of error. The parser of what the model answers is
made here because the prompt decides its first state. Knows no HTTP.
"""

from collections.abc import Sequence
from typing import Any

import deepseek_recipe as recipe
import msgspec

from flashstep.chat.calls import OPENING
from flashstep.chat.conversation import NUMBERED_TIER, Talk
from flashstep.chat.parse import ChatParser, ControlTokens
from flashstep.chat.tokenizer import TextTokenizer

IMAGE_SPELLINGS = ("<\uff5cdeepseek_image\uff5c>", "<\uff5cimage\uff5c>")  # the checkpoint's, the recipe's
EFFORT_LINE = "Reasoning Effort: "


class ChatError(ValueError):
    """The conversation cannot be encoded. ``param`` names the request field at fault."""

    def __init__(self, message: str, *, param: str) -> None:
        super().__init__(message)
        self.param = param


class ChatPrompt:
    """An encoded conversation: ``text``, ``ids``, ``thinking``; ``parser()`` reads one answer to it.

    ``reasoning_end`` is the token that stands between reasoning and answer; None if the answer begins at once.
    ``call_marker`` is the token of tool calls' markup; ``begins_calls``: the prompt ends with their opening tag.
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
        self.call_marker = tokens.control.dsml
        self.begins_calls = request.conversation.tool_choice == "required" and text.endswith(OPENING)

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

    def encode(self, talk: Talk) -> ChatPrompt:
        """Raise ``ChatError`` for a conversation that is not valid."""
        request = self._convert(talk)
        try:
            conversation = talk.completed(request.conversation)
        except (RecursionError, OverflowError) as error:
            raise ChatError(f"response_format: {error}", param="response_format") from error
        rendered = self._encoding.render_conversation(conversation)
        if rendered.image_sources:
            raise ChatError("image input is not supported yet", param=talk.told_in)
        if isinstance(talk.effort, int) and conversation.thinking_mode:
            text, ids = self._numbered(rendered, talk.effort)
        else:
            text, ids = rendered.prompt, tuple(self._encoding.encode(conversation))
        return ChatPrompt(request, text=text, ids=ids, tokens=self._tokens)

    def _convert(self, talk: Talk) -> recipe.ConversationRequest:
        body = talk.body()
        try:
            return self._convert_body(talk, body)
        except ValueError as error:
            raise ChatError(str(error), param=self._at_fault(talk, body)) from error

    def _convert_body(self, talk: Talk, body: dict[str, Any]) -> recipe.ConversationRequest:
        try:
            return talk.request(body).convert(self._options)
        except recipe.ConversionError as error:
            raise ValueError(msgspec.json.decode(error.body)["error"]["message"]) from error
        except (RecursionError, OverflowError) as error:  # nested too deeply; an integer beyond 64 bits
            raise ValueError(str(error)) from error

    def _at_fault(self, talk: Talk, body: dict[str, Any]) -> str:
        """The field without which ``body`` would do: the recipe never says which one it is about."""
        for name in talk.names:
            if name not in body:
                continue
            try:
                self._convert_body(talk, {key: value for key, value in body.items() if key != name})
            except ValueError:
                continue
            return talk.names[name]
        return talk.told_in

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
