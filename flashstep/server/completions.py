"""POST /v1/completions: raw prompts (text or token ids, one or many) in, raw text out, whole or streamed."""

from collections.abc import Iterable, Sequence

from msgspec import UNSET
from starlette.requests import Request
from starlette.types import ASGIApp

from flashstep.chat.parse import TextParser
from flashstep.request import Constraint, SamplingParams, TokenLogprob
from flashstep.request import Request as EngineRequest
from flashstep.server import answers, constraints, intake
from flashstep.server.answering import (
    Answer,
    Naming,
    collect,
    json_response,
    nobody_listens,
    received,
    stream,
    submit,
    worked,
)
from flashstep.server.choices import Choice, Piece
from flashstep.server.frontend import Frontend
from flashstep.server.logprobs import Spelling, TextLogprobs, prompt_logprobs
from flashstep.server.openai import CompletionBody


async def completions(request: Request) -> ASGIApp:
    front: Frontend = request.app.state.front
    front.check_alive()
    body, size = await received(request, CompletionBody)
    stop = intake.check_common(body)
    prompts = await worked(intake.prompts, front, body, size=size)
    constraint = await constraints.constraint(front, body, None, receive=request.receive)
    lengths = [len(ids) for _, ids in prompts]
    params = await worked(_params, front, body, lengths, constraint, size=size)
    requests: list[EngineRequest] = []
    for (_, ids), own in zip(prompts, params, strict=True):
        requests += intake.children(body, ids, own)
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
            keep_stop=body.include_stop_str_in_output,
            metrics=front.metrics,
            hears_out=front.tells_acceptance or body.return_metrics,
            discard=body.max_tokens == 0,
        )
        for index, source in enumerate(submit(front, requests))
    ]
    answer = _Answer(
        front, body, prompts, Naming(front, request, kind="cmpl", asked=body.request_id), choices
    )
    if body.stream:
        return stream(choices, answer.frames, last=answer.last_frames)
    if not await collect(request, choices, answer.read):
        return nobody_listens()
    return json_response(answer.whole())


def _params(
    front: Frontend, body: CompletionBody, lengths: Sequence[int], constraint: Constraint | None
) -> list[SamplingParams]:
    scoring = body.echo and body.max_tokens == 0  # nothing but the prompt's own log-probabilities is wanted
    return intake.sampling(
        front,
        body,
        lengths=lengths,
        prompt_param="prompt",
        max_tokens=1 if scoring else body.max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=_most(body.prompt_logprobs, body.logprobs if body.echo else None),
        constraint=constraint,
    )


def _most(asked: int | None, echoed: int | None) -> int | None:
    """Alternatives at each position of a prompt whose scores are told, echoed or both. A negative count stays, to be refused."""
    given = [count for count in (asked, echoed) if count is not None]
    return min(given) if min(given, default=0) < 0 else max(given, default=None)


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
        kind = "text_completion"
        super().__init__(front, body, naming, choices, kind=kind, chunk_kind=kind, thinking=False)
        self._body = body
        self._prompts = prompts
        self._spelling = Spelling(front.tokenizer, as_ids=body.return_tokens_as_token_ids)
        self._begun: set[int] = set()
        self._logprobs = [
            TextLogprobs(
                self._spelling, count=body.logprobs or 0, skip_special_tokens=body.skip_special_tokens
            )
            for _ in choices
        ]
        self._scores: list[list[TokenLogprob]] = [[] for _ in choices]  # of the prompt

    def _frames(self, choice: Choice, piece: Piece) -> bytes:
        """The event of one piece; none while nothing can be shown. What is told of the prompt comes with the first tokens."""
        self._scores[choice.index] += piece.prompt_logprobs
        finished = piece.finish_reason is not None
        first = choice.index not in self._begun and (bool(piece.tokens) or finished)
        if first:
            self._begun.add(choice.index)
        text = self._echoed(choice, piece.delta.content) if first else piece.delta.content
        ids = piece.tokens if self._body.return_token_ids else ()
        if not (text or finished or piece.logprobs or ids):
            return b""
        chunk = answers.TextChoice(
            choice.index,
            text,
            self._written(choice, piece.logprobs),
            piece.finish_reason,
            piece.stop_reason if finished else UNSET,
        )
        if self._body.return_token_ids:
            chunk.token_ids = ids
            chunk.prompt_token_ids = self._prompt_ids(choice) if first else UNSET
        usage, metrics = self._told_with(piece)
        return self._writer.choice(chunk, usage=usage, metrics=metrics)

    def _prompt_ids(self, choice: Choice) -> tuple[int, ...]:
        return self._prompts[choice.index // self._body.n][1]

    def _echoed(self, choice: Choice, text: str) -> str:
        """The beginning of an answer, behind its prompt if that is wanted, which then stands in the log-probabilities, too."""
        if not self._body.echo:
            return text
        given, ids = self._prompts[choice.index // self._body.n]
        self._logprobs[choice.index].prompt(ids[0], self._scores[choice.index])
        return (given or "") + text

    def _written(self, choice: Choice, items: Iterable[TokenLogprob]) -> dict[str, object] | None:
        if self._body.logprobs is None:
            return None
        logprobs = self._logprobs[choice.index]
        logprobs.answer(items)
        return logprobs.take()

    def read(self, choice: Choice, piece: Piece) -> None:
        self._scores[choice.index] += piece.prompt_logprobs
        super().read(choice, piece)

    def whole(self) -> bytes:
        return answers.encode(self._response([self._choice(choice) for choice in self._choices]))

    def _choice(self, choice: Choice) -> answers.TextChoice:
        body, parts = self._body, self._parts[choice.index]
        text = self._echoed(choice, "".join(piece.delta.content for piece in parts))
        made = answers.TextChoice(
            choice.index,
            text,
            self._written(choice, [item for piece in parts for item in piece.logprobs]),
            parts[-1].finish_reason,
            parts[-1].stop_reason,
        )
        if body.return_token_ids:
            made.token_ids = tuple(token for piece in parts for token in piece.tokens)
            made.prompt_token_ids = self._prompt_ids(choice)
        if body.prompt_logprobs is not None:
            scores = self._scores[choice.index]
            made.prompt_logprobs = prompt_logprobs(self._spelling, scores, count=body.prompt_logprobs)
        return made
