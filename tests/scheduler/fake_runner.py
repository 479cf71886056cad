"""A runner without a model that checks every promise a plan makes.

Its "KV records" are tags: the hash of all tokens up to a position. A row writes its tag through the block tables and reads the
tags of everything it may see; a wrong, stale, overwritten or missing block is an assertion. The next token is a pure function of
the tokens so far and the seed, so outputs can be compared with a sequential run (``expected``). Its drafts are the true tokens,
wrong from a place on that changes with the position, so every count of accepted drafts occurs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flashstep.config.cache import CacheConfig
from flashstep.config.scheduler import SchedulerConfig
from flashstep.config.speculative import Speculation
from flashstep.request import Request, TokenLogprob
from flashstep.runner.facts import RunnerFacts
from flashstep.step import Span, SpanResult, StepPlan, StepResult

EOS = 1
ROOT = 0x9E3779B97F4A7C15


def mix(state: int, token: int) -> int:
    state = (state ^ (token + 0x9E3779B9)) * 0xBF58476D1CE4E5B9 & (1 << 64) - 1
    return state ^ state >> 29


def next_token(tag: int, *, seed: int, vocab_size: int) -> int:
    return mix(tag, seed * 7919 + 13) % vocab_size


def expected(
    request: Request, *, vocab_size: int, max_model_len: int, eos: int = EOS
) -> tuple[list[int], str]:
    """Outputs and finish reason of ``request`` when it runs alone, one token at a time."""
    tag = ROOT
    for token in request.prompt:
        tag = mix(tag, token)
    stops = {*request.params.stop_token_ids, *(() if request.params.ignore_eos else (eos,))}
    outputs: list[int] = []
    while True:
        token = next_token(tag, seed=request.params.seed or 0, vocab_size=vocab_size)
        outputs.append(token)
        tag = mix(tag, token)
        if token in stops:
            return outputs, "stop"
        if len(outputs) == request.params.max_tokens or len(outputs) + len(request.prompt) == max_model_len:
            return outputs, "length"


@dataclass
class History:
    request: Request
    tokens: list[int]
    tags: list[int] = field(default_factory=list)

    def push(self, token: int) -> None:
        self.tokens.append(token)
        self.tags.append(mix(self.tags[-1] if self.tags else ROOT, token))


@dataclass
class Slot:
    id: str
    next: int
    visible_from: int = 0
    blocks: list[int] = field(default_factory=list)
    window: list[int] = field(default_factory=list)
    proposal: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Rows:
    """The rows that a span turns out to have: positions from ``start``, the last ``drafts`` of them drafts."""

    span: Span
    start: int
    tokens: list[int]  # of the rows
    drafts: int
    tags: list[int]


@dataclass(frozen=True)
class Over:
    """A step that is over when it was launched."""

    step: StepResult
    over: bool = True

    def when_over(self, call) -> None:
        call()

    def result(self) -> StepResult:
        return self.step


class FakeRunner:
    balancedness = None

    def __init__(
        self,
        scheduler: SchedulerConfig,
        cache: CacheConfig,
        *,
        sliding_window: int,
        vocab_size: int = 97,
        speculation: Speculation | None = None,
    ) -> None:
        self.facts = RunnerFacts(
            scheduler=scheduler,
            cache=cache,
            sliding_window=sliding_window,
            vocab_size=vocab_size,
            eos_token_ids=(EOS,),
            token_map_fingerprint="fake",
            speculation=speculation,
        )
        self.sequences: dict[str, History] = {}
        self.slots: dict[int, Slot] = {}
        self.records: dict[tuple[int, int], int] = {}
        self.window_records: dict[tuple[int, int], int] = {}
        self.rows = 0
        self.next_step = 0
        self.replayed = 0
        self.transferred = 0

    def launch(self, plan: StepPlan, requests: Sequence[Request], compiled: Mapping[str, Any]) -> "Over":
        return Over(self.run(plan, requests))

    def run(self, plan: StepPlan, requests: Sequence[Request]) -> StepResult:
        assert plan.step == self.next_step, "steps run in order"
        assert plan.spans, "a plan has a span"
        assert plan.rows <= self.facts.scheduler.max_num_batched_tokens
        self.next_step += 1
        for request_id in plan.finished:
            del self.sequences[request_id]
        for slot in plan.released:
            del self.slots[slot]
        for request in requests:
            assert request.id not in self.sequences
            sequence = self.sequences[request.id] = History(request, [])
            for token in request.prompt:
                sequence.push(token)
        for admission in plan.admitted:
            assert admission.slot not in self.slots, "a slot has one holder"
            assert admission.request_id in self.sequences, "the runner was told of the request"
            self.slots[admission.slot] = Slot(admission.request_id, admission.computed)
        assert len({span.slot for span in plan.spans}) == len(plan.spans)
        # a forward: tables first, then all writes, then all reads (as a layer does)
        rows = [self._tables(span) for span in plan.spans]
        for span in plan.spans:
            if span.transferred:
                self._receive(span)
        for item in rows:
            self._write(item)
        return StepResult(step=plan.step, spans=tuple(self._read(item, plan.propose) for item in rows))

    def _tables(self, span: Span) -> Rows:
        slot = self.slots[span.slot]
        if not slot.blocks:
            slot.window = [-1] * span.window_base
            if span.replay:
                slot.visible_from = span.start
        else:
            assert span.window_base == 0
        slot.blocks += span.blocks
        slot.window += span.window_blocks
        assert span.length >= 1
        rows = self._rows(span, slot)
        assert rows.start == slot.next, f"position {slot.next} is next, {rows.start} was asked for"
        end = rows.start + len(rows.tokens)
        assert end <= span.start + span.length, "the plan did not count on so many rows"
        assert end <= self.facts.max_model_len
        assert end - rows.drafts <= len(self.sequences[slot.id].tokens), "a row's token is known when it runs"
        if span.drafts is None:
            slot.next = end
        return rows

    def _rows(self, span: Span, slot: Slot) -> Rows:
        sequence = self.sequences[slot.id]
        if span.drafts is None:
            known = range(span.start, min(span.start + span.length, len(sequence.tokens)))
            tokens = [sequence.tokens[p] for p in known]
            assert len(tokens) == span.length, "a row's token is known when it runs"
            return Rows(span, span.start, tokens, 0, [sequence.tags[p] for p in known])
        start = len(sequence.tokens) - 1
        if (room := self.room(sequence)) == 0:
            return Rows(span, slot.next, [], 0, [])
        drafts = slot.proposal[: min(span.drafts, room - 1)]
        tags = [sequence.tags[start]]
        for token in drafts:
            tags.append(mix(tags[-1], token))
        return Rows(span, start, [sequence.tokens[start], *drafts], len(drafts), tags)

    def room(self, sequence: History) -> int:
        """Tokens that the request may still have."""
        prompt = len(sequence.request.prompt)
        limit = min(sequence.request.params.max_tokens, self.facts.max_model_len - prompt)
        return limit - (len(sequence.tokens) - prompt)

    def _write(self, rows: Rows) -> None:
        span = rows.span
        slot, size = self.slots[span.slot], self.facts.cache.block_size
        others = [s for n, s in self.slots.items() if n != span.slot]
        held = {b for s in others for b in s.blocks}
        held_window = {b for s in others for b in self._live_window(s)}
        for place, tag in enumerate(rows.tags):
            index, offset = divmod(rows.start + place, size)
            if place >= span.replay:
                assert slot.blocks[index] not in held, (
                    "a block is written by one request and read by no other meanwhile"
                )
                self.records[slot.blocks[index], offset] = tag
            assert slot.window[index] >= 0
            assert slot.window[index] not in held_window
            self.window_records[slot.window[index], offset] = tag

    def _receive(self, span: Span) -> None:
        """Records from outside: global ones of the positions before the span, and those of them that are in window blocks."""
        slot, size = self.slots[span.slot], self.facts.cache.block_size
        sequence = self.sequences[slot.id]
        others = [s for n, s in self.slots.items() if n != span.slot]
        held = {b for s in others for b in s.blocks}
        held_window = {b for s in others for b in self._live_window(s)}
        assert not span.replay and span.start - span.transferred >= 0
        assert span.start <= len(sequence.request.prompt) - 1, "a row of the prompt is left"
        self.transferred += span.transferred
        for position in range(span.start - span.transferred, span.start):
            index, offset = divmod(position, size)
            assert slot.blocks[index] not in held, "somebody reads or writes a block that is received"
            self.records[slot.blocks[index], offset] = sequence.tags[position]
            if slot.window[index] >= 0:
                assert slot.window[index] not in held_window
                self.window_records[slot.window[index], offset] = sequence.tags[position]

    def _live_window(self, slot: Slot) -> list[int]:
        first = max(slot.next - self.facts.sliding_window, 0) // self.facts.cache.block_size
        return [b for b in slot.window[first:] if b >= 0]

    def _check_records(self, slot: Slot, first: int, tags: Sequence[int]) -> None:
        """``tags`` of positions 0 .. are in the slot's global records, and from ``first`` on in its window records."""
        size = self.facts.cache.block_size
        for position, tag in enumerate(tags):
            index, offset = divmod(position, size)
            assert self.records.get((slot.blocks[index], offset)) == tag, (
                "a global record is not the request's"
            )
            if position >= max(first, slot.visible_from):
                assert self.window_records.get((slot.window[index], offset)) == tag, (
                    "a window record is stale"
                )

    def _read(self, rows: Rows, propose: int) -> SpanResult:
        span = rows.span
        slot, window = self.slots[span.slot], self.facts.sliding_window
        sequence = self.sequences[slot.id]
        end = rows.start + len(rows.tokens)
        self.rows += len(rows.tokens)
        self.replayed += span.replay
        self._check_records(slot, rows.start - window + 1, [*sequence.tags[: rows.start], *rows.tags])
        logprobs: tuple[TokenLogprob, ...] = ()
        if span.prompt_logprobs:
            stop = min(end, len(sequence.request.prompt) - 1)
            logprobs = tuple(
                TokenLogprob(sequence.tokens[p + 1], -float(p), 1) for p in range(span.start, stop)
            )
        if not span.sample or not rows.tokens:
            return SpanResult(slot=span.slot, request_id=slot.id, prompt_logprobs=logprobs)
        assert end - rows.drafts == len(sequence.tokens), "a token is sampled after the last one"
        seed = sequence.request.params.seed or 0
        news = []
        for draft in (*rows.tokens[len(rows.tokens) - rows.drafts :], None):
            token = next_token(sequence.tags[-1], seed=seed, vocab_size=self.facts.vocab_size)
            sequence.push(token)
            news.append(token)
            if token != draft:
                break
        slot.next = len(sequence.tokens) - 1
        slot.proposal = self._propose(sequence, propose)
        if propose:  # the draft looks back one position further than a row does
            self._check_records(slot, slot.next - window, sequence.tags[: slot.next])
        return SpanResult(
            slot=span.slot,
            request_id=slot.id,
            tokens=tuple(news),
            prompt_logprobs=logprobs,
            drafted=rows.drafts,
        )

    def _propose(self, sequence: History, count: int) -> list[int]:
        tag, drafts = sequence.tags[-1], []
        wrong_from = len(sequence.tokens) * 7 % 9
        for place in range(count):
            token = next_token(tag, seed=sequence.request.params.seed or 0, vocab_size=self.facts.vocab_size)
            drafts.append(token if place < wrong_from else (token + 1) % self.facts.vocab_size)
            tag = mix(tag, drafts[-1])
        return drafts
