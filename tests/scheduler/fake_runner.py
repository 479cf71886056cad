"""A runner without a model that checks every promise a plan makes.

Its "KV records" are tags: the hash of all tokens up to a position. A row writes its tag through the block tables and reads the
tags of everything it may see; a wrong, stale, overwritten or missing block is an assertion. The next token is a pure function of
the tokens so far and the seed, so outputs can be compared with a sequential run (``expected``).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from flashstep.config.cache import CacheConfig
from flashstep.config.scheduler import SchedulerConfig
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


class FakeRunner:
    def __init__(
        self,
        scheduler: SchedulerConfig,
        cache: CacheConfig,
        *,
        sliding_window: int,
        vocab_size: int = 97,
    ) -> None:
        self.facts = RunnerFacts(
            scheduler=scheduler,
            cache=cache,
            sliding_window=sliding_window,
            vocab_size=vocab_size,
            eos_token_ids=(EOS,),
            token_map_fingerprint="fake",
        )
        self.sequences: dict[str, History] = {}
        self.slots: dict[int, Slot] = {}
        self.records: dict[tuple[int, int], int] = {}
        self.window_records: dict[tuple[int, int], int] = {}
        self.rows = 0
        self.next_step = 0
        self.replayed = 0

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
        for span in plan.spans:
            self._tables(span)
        for span in plan.spans:
            self._write(span)
        return StepResult(step=plan.step, spans=tuple(self._read(span) for span in plan.spans))

    def _tables(self, span: Span) -> None:
        slot = self.slots[span.slot]
        assert span.start == slot.next, f"position {slot.next} is next, {span.start} was asked for"
        if not slot.blocks:
            slot.window = [-1] * span.window_base
            if span.replay:
                slot.visible_from = span.start
        else:
            assert span.window_base == 0
        slot.blocks += span.blocks
        slot.window += span.window_blocks
        assert span.length >= 1
        last = span.start + span.length - 1
        assert last < self.facts.max_model_len
        assert last < len(self.sequences[slot.id].tokens), "a row's token is known when it runs"
        slot.next = last + 1

    def _write(self, span: Span) -> None:
        slot, size = self.slots[span.slot], self.facts.cache.block_size
        tags = self.sequences[slot.id].tags
        others = [s for n, s in self.slots.items() if n != span.slot]
        held = {b for s in others for b in s.blocks}
        held_window = {b for s in others for b in self._live_window(s)}
        for position in range(span.start, span.start + span.length):
            index, offset = divmod(position, size)
            if position - span.start >= span.replay:
                assert slot.blocks[index] not in held, (
                    "a block is written by one request and read by no other meanwhile"
                )
                self.records[slot.blocks[index], offset] = tags[position]
            assert slot.window[index] >= 0
            assert slot.window[index] not in held_window
            self.window_records[slot.window[index], offset] = tags[position]

    def _live_window(self, slot: Slot) -> list[int]:
        first = max(slot.next - self.facts.sliding_window, 0) // self.facts.cache.block_size
        return [b for b in slot.window[first:] if b >= 0]

    def _read(self, span: Span) -> SpanResult:
        slot, size, window = self.slots[span.slot], self.facts.cache.block_size, self.facts.sliding_window
        sequence = self.sequences[slot.id]
        tags = sequence.tags
        end = span.start + span.length
        self.rows += span.length
        self.replayed += span.replay
        for position in range(end):
            index, offset = divmod(position, size)
            assert self.records.get((slot.blocks[index], offset)) == tags[position], (
                "a global record is not the request's"
            )
        for position in range(max(span.start - window + 1, slot.visible_from, 0), end):
            index, offset = divmod(position, size)
            assert self.window_records.get((slot.window[index], offset)) == tags[position], (
                "a window record is stale"
            )
        logprobs: tuple[TokenLogprob, ...] = ()
        if span.prompt_logprobs:
            stop = min(end, len(sequence.request.prompt) - 1)
            logprobs = tuple(
                TokenLogprob(sequence.tokens[p + 1], -float(p), 1) for p in range(span.start, stop)
            )
        if not span.sample:
            return SpanResult(slot=span.slot, request_id=slot.id, prompt_logprobs=logprobs)
        assert end == len(sequence.tokens), "a token is sampled after the last one"
        token = next_token(tags[-1], seed=sequence.request.params.seed or 0, vocab_size=self.facts.vocab_size)
        sequence.push(token)
        return SpanResult(slot=span.slot, request_id=slot.id, tokens=(token,), prompt_logprobs=logprobs)
