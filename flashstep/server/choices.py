"""One choice of an answer: follows an engine stream, parses it, counts, ends it on a stop string, and keeps its metrics.

Takes RequestOutputs, gives ``Piece``s; streaming and whole answers are both made of these. Knows no JSON and no HTTP.
"""

import time
from collections.abc import Iterable
from typing import Protocol

import msgspec

from flashstep.chat.parse import Delta
from flashstep.ipc.client import EngineDied, OutputStream
from flashstep.ipc.messages import RequestOutput
from flashstep.request import Acceptance, TokenLogprob
from flashstep.server.answers import CompletionDetails, PromptDetails, Usage
from flashstep.server.metrics import Metrics


class Parser(Protocol):
    """``ChatParser`` or ``TextParser``."""

    num_tokens: int
    reasoning_tokens: int

    @property
    def stopped(self) -> str | None: ...
    def push(self, tokens: tuple[int, ...]) -> Delta: ...
    def finish(self, reason: str) -> tuple[Delta, str]: ...


class Piece(msgspec.Struct):
    """What one output added to a choice; ``finish_reason`` ends it."""

    delta: Delta
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class Failed(Exception):
    """The engine ended this request with an error."""


class Choice:
    """``async for piece in choice``. It ends without a finish reason if ``close`` was called (the client hung up)."""

    def __init__(
        self,
        stream: OutputStream,
        parser: Parser,
        *,
        index: int,
        prompt_tokens: int,
        stop_token_ids: Iterable[int],
        keep_stop: bool,
        metrics: Metrics,
        discard: bool = False,
    ) -> None:
        self.index = index
        self.prompt_tokens = prompt_tokens
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.replayed_tokens = 0
        self.finish_reason: str | None = None
        self.acceptance: Acceptance | None = None  # known at the end, of an engine that speculates
        self.tells_acceptance = False  # somebody wants it: the end waits for the engine's last word
        self._stream = stream
        self._parser = parser
        self._stop_token_ids = frozenset(stop_token_ids)
        self._keep_stop = keep_stop
        self._discard = discard  # the answer is not wanted (max_tokens 0 with echo)
        self._metrics = metrics
        self._arrival = time.monotonic()
        self._first: float | None = None
        self._last = self._arrival

    @property
    def reasoning_tokens(self) -> int:
        """Known once the choice has ended."""
        return self._parser.reasoning_tokens

    def close(self) -> None:
        """Stop following; abort the request if it runs. At the end of every choice, and twice does no harm."""
        if not self._stream.done and self.finish_reason is None:
            self.finish_reason = "abort"
            self._count_end()
        self._stream.close()

    def __aiter__(self) -> "Choice":
        return self

    async def __anext__(self) -> Piece:
        if self.finish_reason is not None:
            raise StopAsyncIteration
        piece = self._take(await self._stream.__anext__())
        if self.tells_acceptance and self.finish_reason is not None and not self._stream.done:
            await self._hear_out()
        return piece

    async def _hear_out(self) -> None:
        """Follow a request that was aborted here, for its acceptance comes with its last output."""
        try:
            async for output in self._stream:
                self._note_acceptance(output)
        except EngineDied:
            return  # the answer is whole; what speculation did for it stays unknown

    def _take(self, output: RequestOutput) -> Piece:
        self._observe(output)
        if output.finish_reason == "error":
            self.finish_reason = "error"
            self._count_end()
            raise Failed("the engine ended this request with an error")
        if output.finish_reason == "abort":  # not at our wish: a stream that is closed here hears no more
            self.finish_reason = "abort"
            self._count_end()
            raise EngineDied("it was told to stop while it answered")
        if self._discard:
            return self._discarded(output)
        tokens = output.tokens
        hidden_stop = output.stop_token is not None and not self._keep_stop
        parser = self._parser
        before = parser.num_tokens
        delta = parser.push(tokens[:-1] if hidden_stop else tokens)
        if parser.stopped is not None:
            read = parser.num_tokens - before
            return self._end(output, delta, read=read, reason="stop", stop_reason=parser.stopped)
        if output.finish_reason is not None:
            stop_reason = output.stop_token if output.stop_token in self._stop_token_ids else None
            return self._end(
                output, delta, read=len(tokens), reason=output.finish_reason, stop_reason=stop_reason
            )
        self.completion_tokens += len(tokens)
        return Piece(delta, tokens, output.logprobs, output.prompt_logprobs)

    def _end(
        self, output: RequestOutput, delta: Delta, *, read: int, reason: str, stop_reason: str | int | None
    ) -> Piece:
        last, self.finish_reason = self._parser.finish(reason)
        if self._parser.stopped is not None:  # the end of the text may have completed a stop string
            stop_reason = self._parser.stopped
        self.completion_tokens += read
        self._count_end()
        # the request is aborted if the engine is still at it
        self._stream.abort() if self.tells_acceptance else self._stream.close()
        return Piece(
            Delta(
                delta.reasoning + last.reasoning,
                delta.content + last.content,
                (*delta.tool_calls, *last.tool_calls),
            ),
            output.tokens[:read],
            output.logprobs[:read],
            output.prompt_logprobs,
            self.finish_reason,
            stop_reason,
        )

    def _discarded(self, output: RequestOutput) -> Piece:
        if output.finish_reason is not None:
            self.finish_reason = "length"
            self._count_end()
        return Piece(
            Delta(), prompt_logprobs=output.prompt_logprobs, finish_reason=output.finish_reason and "length"
        )

    def _note_acceptance(self, output: RequestOutput) -> None:
        if output.acceptance is not None:
            self.acceptance = output.acceptance

    def _observe(self, output: RequestOutput) -> None:
        self._note_acceptance(output)
        if output.cached_tokens is not None:
            self.cached_tokens = output.cached_tokens
        if output.replayed_tokens is not None:
            self.replayed_tokens = output.replayed_tokens
        if output.queued_s is not None:
            self._metrics.queue_s.observe(output.queued_s)
        if output.prefill_s is not None:
            self._metrics.prefill_s.observe(output.prefill_s)
        if output.tokens:
            now = time.monotonic()
            if self._first is None:
                self._first = now
                self._metrics.first_token_s.observe(now - self._arrival)
            else:
                self._metrics.inter_token_s.observe(now - self._last)
            self._last = now

    def _count_end(self) -> None:
        metrics = self._metrics
        reason = self.finish_reason
        metrics.finished["stop" if reason == "tool_calls" else reason or "abort"].inc()
        if reason in ("abort", "error"):
            return
        metrics.end_to_end_s.observe(time.monotonic() - self._arrival)
        metrics.prompt_tokens.observe(self.prompt_tokens)
        metrics.generation_tokens.observe(self.completion_tokens)
        if self._first is not None and self.completion_tokens > 1:
            metrics.per_output_token_s.observe((self._last - self._first) / (self.completion_tokens - 1))


def usage(choices: list[Choice], *, n: int, reasoning: bool) -> Usage:
    """The sum over ``choices``; each prompt counts once although ``n`` choices answer it."""
    prompts = choices[::n]
    prompt_tokens = sum(choice.prompt_tokens for choice in prompts)
    cached = sum(choice.cached_tokens for choice in prompts)
    completion_tokens = sum(choice.completion_tokens for choice in choices)
    made = Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptDetails(cached, sum(choice.replayed_tokens for choice in prompts)),
        prompt_cache_hit_tokens=cached,
        prompt_cache_miss_tokens=prompt_tokens - cached,
    )
    if reasoning:
        made.completion_tokens_details = CompletionDetails(sum(choice.reasoning_tokens for choice in choices))
    return made
