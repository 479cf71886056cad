"""POST /v1/chat/completions: a conversation in; reasoning, content and tool calls out, whole or streamed."""

import asyncio

from msgspec import UNSET
from starlette.requests import Request
from starlette.types import ASGIApp

from flashstep.chat.encode import ChatPrompt
from flashstep.chat.parse import ToolCallDelta
from flashstep.request import Constraint, SamplingParams, TokenLogprob
from flashstep.server import answers, constraints, intake
from flashstep.server.answering import (
    LARGE_BODY_BYTES,
    Answer,
    Naming,
    collect,
    json_response,
    nobody_listens,
    read_body,
    stream,
    submit,
)
from flashstep.server.choices import Choice, Piece
from flashstep.server.errors import ApiError
from flashstep.server.frontend import Frontend
from flashstep.server.openai import ChatBody, decode


async def chat_completions(request: Request) -> ASGIApp:
    front: Frontend = request.app.state.front
    front.check_alive()
    data = await read_body(request, limit=front.max_body_bytes)
    body = decode(data, ChatBody)
    front.check_model(body.model)
    stop = _checked(body)
    talk = intake.conversation(body)
    large = len(data) > LARGE_BODY_BYTES
    encode = intake.chat_prompt
    prompt = await asyncio.to_thread(encode, front, talk) if large else encode(front, talk)
    constraint = await constraints.constraint(body, after=prompt.reasoning_end)
    params = _params(front, body, prompt, constraint=constraint)
    streams = submit(front, intake.children(body, prompt.ids, params))
    hides_calls = body.tool_choice == "none"
    choices = [
        Choice(
            source,
            prompt.parser(
                stop=stop,
                include_stop=body.include_stop_str_in_output,
                min_tokens=body.min_tokens,
                max_tool_calls=0 if hides_calls else None if body.parallel_tool_calls else 1,
                skip_special_tokens=body.skip_special_tokens,
            ),
            index=index,
            prompt_tokens=len(prompt.ids),
            stop_token_ids=body.stop_token_ids,
            keep_stop=body.include_stop_str_in_output,
            metrics=front.metrics,
        )
        for index, source in enumerate(streams)
    ]
    answer = _Answer(front, body, prompt, Naming(front, request, kind="chatcmpl"), choices)
    if body.stream:
        return stream(choices, answer.frames, last=answer.last_frames)
    if not await collect(request, choices, answer.read):
        return nobody_listens()
    return json_response(answer.whole())


def _checked(body: ChatBody) -> tuple[str, ...]:
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError("top_logprobs needs logprobs to be true", param="top_logprobs")
    constraints.check_chat(body)
    return intake.check_common(body)


def _params(
    front: Frontend, body: ChatBody, prompt: ChatPrompt, *, constraint: Constraint | None
) -> SamplingParams:
    try:
        return intake.sampling(
            front,
            body,
            prompt_tokens=len(prompt.ids),
            prompt_param="messages",
            max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            prompt_logprobs=body.prompt_logprobs,
            constraint=constraint,
        )
    except ApiError as error:
        renamed = {"logprobs": "top_logprobs"}
        if body.max_completion_tokens is not None:
            renamed["max_tokens"] = "max_completion_tokens"
        if error.param not in renamed:
            raise
        param = renamed[error.param]
        raise ApiError(error.message.replace(error.param, param), param=param) from error


class _Answer(Answer):
    """Builds the answer to one chat, as frames or as a whole."""

    def __init__(
        self, front: Frontend, body: ChatBody, prompt: ChatPrompt, naming: Naming, choices: list[Choice]
    ) -> None:
        super().__init__(
            body,
            naming,
            choices,
            kind="chat.completion",
            chunk_kind="chat.completion.chunk",
            thinking=prompt.thinking,
            tells_acceptance=front.tells_acceptance,
        )
        self._tokenizer = front.tokenizer
        self._body = body
        self._prompt = prompt
        self._begun: set[int] = set()

    def _logprobs(self, items: tuple[TokenLogprob, ...]) -> dict[str, object] | None:
        if not self._body.logprobs:
            return None
        return answers.chat_logprobs(self._tokenizer, items, count=self._body.top_logprobs or 0)

    def frames(self, choice: Choice, piece: Piece) -> bytes:
        """The events of one piece; none while the parser holds everything back."""
        running_usage = self._usage() if self._usage_always else None
        first = b""
        if choice.index not in self._begun:
            self._begun.add(choice.index)
            first = self._writer.choice(
                answers.ChatChunkChoice(choice.index, answers.ChatDelta(role="assistant", content="")),
                usage=running_usage,
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
            answers.chat_delta(delta),
            self._logprobs(piece.logprobs) if piece.logprobs else None,
            piece.finish_reason,
            piece.stop_reason if finished else UNSET,
            ids,
        )
        return first + self._writer.choice(chunk, usage=running_usage, metrics=self._metrics_at(piece))

    def whole(self) -> bytes:
        body = self._body
        response = self._response([self._choice(choice) for choice in self._choices])
        if body.prompt_logprobs is not None:
            items = [item for piece in self._parts[0] for item in piece.prompt_logprobs]
            response.prompt_logprobs = answers.prompt_logprobs(
                self._tokenizer, items, count=body.prompt_logprobs
            )
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
        made = answers.ChatChoice(
            index=choice.index,
            message=answers.ChatMessage(
                role="assistant",
                content=None if calls and not content else content,
                reasoning=reasoning,
                reasoning_content=reasoning,
                tool_calls=calls or UNSET,
            ),
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
