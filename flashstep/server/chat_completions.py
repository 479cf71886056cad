"""POST /v1/chat/completions: a conversation in; reasoning, content and tool calls out, whole or streamed."""

from msgspec import UNSET
from starlette.requests import Request
from starlette.types import ASGIApp

from flashstep.chat.encode import ChatPrompt
from flashstep.chat.parse import ToolCallDelta
from flashstep.request import TokenLogprob
from flashstep.server import answers, chats, intake
from flashstep.server.answering import (
    Answer,
    Naming,
    collect,
    json_response,
    nobody_listens,
    received,
    stream,
)
from flashstep.server.choices import Choice, Piece
from flashstep.server.frontend import Frontend
from flashstep.server.logprobs import Spelling, chat_logprobs, prompt_logprobs
from flashstep.server.openai import ChatBody


async def chat_completions(request: Request) -> ASGIApp:
    front: Frontend = request.app.state.front
    front.check_alive()
    body, size = await received(request, ChatBody)
    talk = intake.conversation(body)
    prompt, choices = await chats.start(front, body, talk, size=size, receive=request.receive)
    answer = _Answer(
        front, body, prompt, Naming(front, request, kind="chatcmpl", asked=body.request_id), choices
    )
    if body.stream:
        return stream(choices, answer.frames, last=answer.last_frames)
    if not await collect(request, choices, answer.read):
        return nobody_listens()
    return json_response(answer.whole())


class _Answer(Answer):
    """Builds the answer to one chat, as frames or as a whole."""

    def __init__(
        self, front: Frontend, body: ChatBody, prompt: ChatPrompt, naming: Naming, choices: list[Choice]
    ) -> None:
        super().__init__(
            front,
            body,
            naming,
            choices,
            kind="chat.completion",
            chunk_kind="chat.completion.chunk",
            thinking=prompt.thinking,
        )
        self._reasoning_fields = answers.REASONING_FIELDS[front.options.reasoning_field]
        self._opening = answers.Opening()
        if front.options.stream_style == "deepseek":
            self._opening.content = None
            for name in self._reasoning_fields:
                setattr(self._opening, name, "")
        self._spelling = Spelling(front.tokenizer, as_ids=body.return_tokens_as_token_ids)
        self._body = body
        self._prompt = prompt
        self._begun: set[int] = set()

    def _logprobs(self, items: tuple[TokenLogprob, ...]) -> dict[str, object] | None:
        if not self._body.logprobs:
            return None
        return chat_logprobs(self._spelling, items, count=self._body.top_logprobs or 0)

    def _frames(self, choice: Choice, piece: Piece) -> bytes:
        """The events of one piece; none while the parser holds everything back."""
        first = b""
        if choice.index not in self._begun:
            self._begun.add(choice.index)
            first = self._writer.choice(
                answers.ChatChunkChoice(choice.index, self._opening),
                usage=self._sum.usage() if self._usage_always else None,
                prompt=self._prompt.ids if self._body.return_token_ids else None,
            )
        delta = piece.delta
        if not self._body.include_reasoning:
            delta.reasoning = ""
        ids = piece.tokens if self._body.return_token_ids else UNSET
        finished = piece.finish_reason is not None
        if not (delta or finished or piece.logprobs or (ids and ids is not UNSET)):
            return first
        chunk = answers.ChatChunkChoice(
            choice.index,
            answers.chat_delta(delta, reasoning_fields=self._reasoning_fields),
            self._logprobs(piece.logprobs) if piece.logprobs else None,
            piece.finish_reason,
            piece.stop_reason if finished else UNSET,
            ids,
        )
        usage, metrics = self._told_with(piece)
        return first + self._writer.choice(chunk, usage=usage, metrics=metrics)

    def whole(self) -> bytes:
        body = self._body
        response = self._response([self._choice(choice) for choice in self._choices])
        if body.prompt_logprobs is not None:
            items = [item for piece in self._parts[0] for item in piece.prompt_logprobs]
            response.prompt_logprobs = prompt_logprobs(self._spelling, items, count=body.prompt_logprobs)
        if body.return_token_ids:
            response.prompt_token_ids = self._prompt.ids
        return answers.encode(response)

    def _choice(self, choice: Choice) -> answers.ChatChoice:
        parts = self._parts[choice.index]
        content = "".join(piece.delta.content for piece in parts)
        reasoning = "".join(piece.delta.reasoning for piece in parts) or None
        if not self._body.include_reasoning:
            reasoning = None
        calls = _whole_calls([call for piece in parts for call in piece.delta.tool_calls])
        last = parts[-1]
        assert last.finish_reason is not None, "only finished choices are written"
        message = answers.ChatMessage("assistant", None if calls and not content else content)
        for name in self._reasoning_fields:
            setattr(message, name, reasoning)
        message.tool_calls = calls or UNSET
        made = answers.ChatChoice(
            index=choice.index,
            message=message,
            logprobs=self._logprobs(tuple(item for piece in parts for item in piece.logprobs)),
            finish_reason=last.finish_reason,
            stop_reason=last.stop_reason,
        )
        if self._body.return_token_ids:
            made.token_ids = tuple(token for piece in parts for token in piece.tokens)
        return made


def _whole_calls(pieces: list[ToolCallDelta]) -> list[answers.FinishedCall]:
    calls: list[answers.FinishedCall] = []
    for piece in pieces:
        if piece.id is not None:
            calls.append(answers.FinishedCall(piece.id, answers.Function(piece.arguments, piece.name)))
        else:
            calls[piece.index].function.arguments += piece.arguments
    return calls
