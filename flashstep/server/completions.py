"""POST /v1/completions: raw prompts (text or token ids, one or many) in, raw text out, whole or streamed."""

import asyncio

from msgspec import UNSET
from starlette.requests import Request
from starlette.types import ASGIApp

from flashstep.chat.parse import TextParser
from flashstep.request import Constraint, SamplingParams, TokenLogprob
from flashstep.request import Request as EngineRequest
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
from flashstep.server.frontend import Frontend
from flashstep.server.openai import CompletionBody, decode


async def completions(request: Request) -> ASGIApp:
    front: Frontend = request.app.state.front
    front.check_alive()
    data = await read_body(request, limit=front.max_body_bytes)
    body = decode(data, CompletionBody)
    front.check_model(body.model)
    stop = intake.check_common(body)
    large = len(data) > LARGE_BODY_BYTES
    read = intake.prompts
    prompts = await asyncio.to_thread(read, front, body) if large else read(front, body)
    constraint = await constraints.constraint(body, after=None)
    requests: list[EngineRequest] = []
    for _, ids in prompts:
        requests += intake.children(body, ids, _params(front, body, len(ids), constraint=constraint))
    choices = [
        Choice(
            source,
            TextParser(
                front.tokenizer.detokenizer(skip_special_tokens=body.skip_special_tokens),
                stop=stop,
                include_stop=body.include_stop_str_in_output,
                min_tokens=body.min_tokens,
            ),
            index=index,
            prompt_tokens=len(requests[index].prompt),
            stop_token_ids=body.stop_token_ids,
            keep_stop=body.include_stop_str_in_output,
            metrics=front.metrics,
            discard=body.max_tokens == 0,
        )
        for index, source in enumerate(submit(front, requests))
    ]
    answer = _Answer(front, body, prompts, Naming(front, request, kind="cmpl"), choices)
    if body.stream:
        return stream(choices, answer.frames, last=answer.last_frames)
    if not await collect(request, choices, answer.read):
        return nobody_listens()
    return json_response(answer.whole())


def _params(
    front: Frontend, body: CompletionBody, prompt_tokens: int, *, constraint: Constraint | None
) -> SamplingParams:
    scoring = body.echo and body.max_tokens == 0  # nothing but the prompt's own log-probabilities is wanted
    echoed = body.logprobs if body.echo else None
    return intake.sampling(
        front,
        body,
        prompt_tokens=prompt_tokens,
        prompt_param="prompt",
        max_tokens=1 if scoring else body.max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=echoed if body.prompt_logprobs is None else max(body.prompt_logprobs, echoed or 0),
        constraint=constraint,
    )


class _Answer(Answer):
    """Builds the answer to one completion request, as frames or as a whole."""

    def __init__(
        self,
        front: Frontend,
        body: CompletionBody,
        prompts: list[tuple[str | None, tuple[int, ...]]],
        naming: Naming,
        choices: list[Choice],
    ) -> None:
        super().__init__(
            body,
            naming,
            choices,
            kind="text_completion",
            chunk_kind="text_completion",
            thinking=False,
            tells_acceptance=front.tells_acceptance,
        )
        self._tokenizer = front.tokenizer
        self._body = body
        self._prompts = prompts
        self._offsets = [0] * len(choices)
        self._echoed = [not body.echo] * len(choices)
        self._scores: list[list[TokenLogprob]] = [[] for _ in choices]  # of the prompt

    def _prompt(self, choice: Choice) -> tuple[str, tuple[int, ...]]:
        text, ids = self._prompts[choice.index // self._body.n]
        return self._tokenizer.decode(ids) if text is None else text, ids

    def frames(self, choice: Choice, piece: Piece) -> bytes:
        """The event of one piece; none while nothing can be shown. An echo comes with the first tokens."""
        self._scores[choice.index] += piece.prompt_logprobs
        finished = piece.finish_reason is not None
        text, items = piece.delta.content, list[TokenLogprob | int](piece.logprobs)
        if not self._echoed[choice.index] and (piece.tokens or finished):
            prompt_text, ids = self._prompt(choice)
            text = prompt_text + text
            items = [ids[0], *self._scores[choice.index], *items]
            self._echoed[choice.index] = True
        ids_shown = piece.tokens if self._body.return_token_ids else UNSET
        if not (text or finished or piece.logprobs or (ids_shown and ids_shown is not UNSET)):
            return b""
        chunk = answers.TextChoice(
            choice.index,
            text,
            self._logprobs(choice, items),
            piece.finish_reason,
            piece.stop_reason if finished else UNSET,
            ids_shown,
        )
        return self._writer.choice(
            chunk, usage=self._usage() if self._usage_always else None, metrics=self._metrics_at(piece)
        )

    def _logprobs(self, choice: Choice, items: list[TokenLogprob | int]) -> dict[str, object] | None:
        if self._body.logprobs is None or not items:
            return None
        offset = self._offsets[choice.index]
        made = answers.text_logprobs(self._tokenizer, items, count=self._body.logprobs, offset=offset)
        self._offsets[choice.index] = made["text_offset"][-1] + len(made["tokens"][-1])
        return made

    def read(self, choice: Choice, piece: Piece) -> None:
        self._scores[choice.index] += piece.prompt_logprobs
        super().read(choice, piece)

    def whole(self) -> bytes:
        return answers.encode(self._response([self._choice(choice) for choice in self._choices]))

    def _choice(self, choice: Choice) -> answers.TextChoice:
        body, parts = self._body, self._parts[choice.index]
        text = "".join(piece.delta.content for piece in parts)
        items = [item for piece in parts for item in piece.logprobs]
        all_items: list[TokenLogprob | int] = list(items)
        prompt_text, ids = self._prompt(choice)
        scores = self._scores[choice.index]
        if body.echo:
            text = prompt_text + text
            all_items = [ids[0], *scores, *items]
        made = answers.TextChoice(
            choice.index,
            text,
            self._logprobs(choice, all_items),
            parts[-1].finish_reason,
            parts[-1].stop_reason,
        )
        if body.return_token_ids:
            made.token_ids = tuple(token for piece in parts for token in piece.tokens)
            made.prompt_token_ids = ids
        if body.prompt_logprobs is not None:
            made.prompt_logprobs = answers.prompt_logprobs(
                self._tokenizer, scores, count=body.prompt_logprobs
            )
        return made
