"""One choice of an answer: follows an engine stream, parses it, counts, ends it on a stop string, and keeps its metrics.

Takes RequestOutputs, gives ``Piece``s; streaming and whole answers are both made of these. Knows no JSON and no HTTP.
"""

import time
from collections.abc import Sequence
from operator import add, sub
from typing import Protocol

import msgspec

from flashstep.chat.parse import Delta
from flashstep.ipc.client import EngineDied, OutputStream
from flashstep.ipc.messages import RequestOutput
from flashstep.request import Acceptance, TokenLogprob
from flashstep.server.answers import ChoiceMetrics, CompletionDetails, PromptDetails, Usage
from flashstep.server.metrics.outcome import Outcome
from flashstep.server.metrics.registry import REASONS, Metrics


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
    """The engine ended this request with an error. ``status``: 400 if a constraint cannot be followed, 500 if it is our fault."""

    def __init__(self, failure: str | None) -> None:
        self.status = 500 if failure is None else 400
        super().__init__(
            "the engine ended this request with an error"
            if failure is None
            else f"the answer cannot go on in the form that was asked for (grammar, schema or tools): {failure}"
        )


class Choice:
    """``async for piece in choice``. It ends without a finish reason if ``close`` was called (the client hung up)."""

    def __init__(
        self,
        stream: OutputStream,
        parser: Parser,
        *,
        index: int,
        prompt_tokens: int,
        keep_stop: bool,
        metrics: Metrics,
        hears_out: bool = False,
        discard: bool = False,
    ) -> None:
        self.index = index
        self.prompt_tokens = prompt_tokens
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.replayed_tokens = 0
        self.transferred_tokens = 0
        self.finish_reason: str | None = None
        self.acceptance: Acceptance | None = None  # known at the end, of an engine that speculates
        self.preemptions = 0  # so far
        self.hears_out = hears_out  # somebody wants to know these: the end waits for the engine's last word
        self._stream = stream
        self._parser = parser
        self._stop_token_ids = frozenset(stream.params.stop_token_ids)
        self._keep_stop = keep_stop
        self._discard = discard  # the answer is not wanted (max_tokens 0 with echo)
        self._metrics = metrics
        self._arrival = time.monotonic()
        self._first: float | None = None
        self._last = self._arrival
        self._ended = self._arrival
        self._queue_s: float | None = None
        self._prefill_s: float | None = None
        metrics.begin(stream.id)

    @property
    def reasoning_tokens(self) -> int:
        """So far; of text that is held back, the parser decides later."""
        return self._parser.reasoning_tokens

    def timings(self) -> ChoiceMetrics:
        """Where the time went, once the choice has ended."""
        first, after_first = self._first, self.completion_tokens - 1
        decode_s = self._last - first if first is not None and after_first > 0 else None
        return ChoiceMetrics(
            index=self.index,
            queue_s=self._queue_s,
            prefill_s=self._prefill_s,
            time_to_first_token_s=None if first is None else first - self._arrival,
            decode_s=decode_s,
            end_to_end_s=self._ended - self._arrival,
            tokens_per_s=after_first / decode_s if decode_s else None,
            cached_tokens=self.cached_tokens,
            replayed_tokens=self.replayed_tokens,
            preemptions=self.preemptions,
        )

    def close(self) -> None:
        """Stop following; abort the request if it runs. At the end of every choice, and twice does no harm."""
        if self.finish_reason is None:  # a stream that is done without a reason has raised
            self.finish_reason = "error" if self._stream.done else "abort"
            self._count_end()
        self._stream.close()

    def __aiter__(self) -> "Choice":
        return self

    async def __anext__(self) -> Piece:
        if self.finish_reason is not None:
            raise StopAsyncIteration
        piece = self._take(await self._stream.__anext__())
        if self.hears_out and self.finish_reason is not None and not self._stream.done:
            await self._hear_out()
        return piece

    async def _hear_out(self) -> None:
        """Follow a request that was aborted here, for some things come with its last output."""
        try:
            async for output in self._stream:
                self._note_end(output)
        except EngineDied:
            return  # the answer is whole; what is told of it at the end stays unknown

    def _take(self, output: RequestOutput) -> Piece:
        self._observe(output)
        if output.finish_reason == "error":
            self.finish_reason = "error"
            self._count_end()
            raise Failed(output.failure)
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
        self._stream.abort() if self.hears_out else self._stream.close()
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

    def _note_end(self, output: RequestOutput) -> None:
        self.preemptions = output.preemptions or self.preemptions
        if output.acceptance is not None:
            self.acceptance = output.acceptance

    def _observe(self, output: RequestOutput) -> None:
        self._note_end(output)
        if output.cached_tokens is not None:
            self.cached_tokens = output.cached_tokens
        if output.replayed_tokens is not None:
            self.replayed_tokens = output.replayed_tokens
        if output.transferred_tokens is not None:
            self.transferred_tokens = output.transferred_tokens
        if output.queued_s is not None:
            self._queue_s = output.queued_s
        if output.prefill_s is not None:
            self._prefill_s = output.prefill_s
        if output.tokens:
            now = time.monotonic()
            if self._first is None:
                self._first = now
                self._metrics.first_token_s.observe(now - self._arrival)
            else:
                self._metrics.inter_token_s.observe(now - self._last)
            self._last = now

    def _count_end(self) -> None:
        self._ended = time.monotonic()
        reason, params, first = self.finish_reason, self._stream.params, self._first
        self._metrics.ended(
            Outcome(
                request_id=self._stream.id,
                reason=reason if reason in REASONS else "stop",  # tool_calls
                prompt_tokens=self.prompt_tokens,
                cached_tokens=self.cached_tokens,
                transferred_tokens=self.transferred_tokens,
                completion_tokens=self.completion_tokens,
                max_tokens=params.max_tokens,
                temperature=params.temperature,
                top_p=params.top_p,
                preemptions=self.preemptions,
                end_to_end_s=self._ended - self._arrival,
                queued_s=self._queue_s,
                prefill_s=self._prefill_s,
                first_token_s=None if first is None else first - self._arrival,
                decode_s=None if first is None else self._last - first,
            )
        )


class UsageSum:
    """The usage of ``choices`` so far, kept up by ``take`` choice by choice: a stream of thousands tells it on every chunk.

    Each prompt counts once although ``n`` choices answer it.
    """

    def __init__(self, choices: Sequence[Choice], *, n: int, reasoning: bool) -> None:
        self._n = n
        self._reasoning = reasoning
        self._prompt_tokens = sum(choice.prompt_tokens for choice in choices[::n])
        self._taken = [(0, 0, 0, 0)] * len(choices)
        self._sums = (0, 0, 0, 0)

    def take(self, choice: Choice) -> None:
        first = choice.index % self._n == 0
        now = (
            choice.cached_tokens * first,
            choice.replayed_tokens * first,
            choice.completion_tokens,
            choice.reasoning_tokens,
        )
        before, self._taken[choice.index] = self._taken[choice.index], now
        cached, replayed, completion, reasoning = map(add, self._sums, map(sub, now, before))
        self._sums = (cached, replayed, completion, reasoning)

    def usage(self) -> Usage:
        cached, replayed, completion, reasoning = self._sums
        made = Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=completion,
            total_tokens=self._prompt_tokens + completion,
            prompt_tokens_details=PromptDetails(cached, replayed),
            prompt_cache_hit_tokens=cached,
            prompt_cache_miss_tokens=self._prompt_tokens - cached,
        )
        if self._reasoning:
            made.completion_tokens_details = CompletionDetails(reasoning)
        return made


def usage(choices: Sequence[Choice], *, n: int, reasoning: bool) -> Usage:
    """Of all ``choices``, as ``UsageSum`` has it."""
    made = UsageSum(choices, n=n, reasoning=reasoning)
    for choice in choices:
        made.take(choice)
    return made.usage()
