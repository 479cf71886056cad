"""Plans made by hand, for runner tests: cuts, block numbers and company that the scheduler would never choose.

Every driver has a runner of its own, with empty histories and slots, over the model and memory of the one that it is given.
"""

import itertools
import random
from collections.abc import Sequence

from flashstep.request import Request, SamplingParams
from flashstep.runner.runner import ModelRunner
from flashstep.step import Admission, Span, SpanResult, StepPlan, TokenLogprob

_numbers = itertools.count()


class Live:
    """One admitted request: its slot, its blocks, how far its rows have come."""

    def __init__(self, request: Request, slot: int) -> None:
        self.request = request
        self.slot = slot
        self.length = len(request.prompt)
        self.done = 0
        self.blocks: list[int] = []
        self.window_blocks: list[int] = []
        self.sent = [0, 0]
        self.window_base = 0
        self.hit = 0
        self.replay = 0
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob] = []


class Hand:
    """Drives one runner. ``seed`` permutes block numbers and slots."""

    def __init__(self, runner: ModelRunner, *, seed: int = 0) -> None:
        facts = runner.facts
        self.runner = ModelRunner(
            facts,
            model=runner._model,
            batches=runner._batches,
            vocabulary=runner._vocabulary,
            drafter=runner.drafter,
            costs=runner._host._costs,
        )
        self.size = facts.cache.block_size
        self.window = facts.sliding_window
        self._slots = list(range(facts.scheduler.max_num_seqs))
        self._free = list(range(min(facts.cache.num_blocks, 400)))
        self._free_window = list(range(min(facts.cache.num_window_blocks, 400)))
        for free in (self._slots, self._free, self._free_window):
            random.Random(seed).shuffle(free)
        self._admitted: list[Admission] = []
        self._requests: list[Request] = []
        self._released: list[int] = []
        self._finished: list[str] = []
        self._steps = 0

    def open(self, prompt: Sequence[int], **params: object) -> Live:
        """A new request, admitted by the next step."""
        params = {"max_tokens": 64, "temperature": 0.0} | params
        request = Request(id=f"r{next(_numbers)}", prompt=tuple(prompt), params=SamplingParams(**params))
        self._requests.append(request)
        return self._admit(request)

    def _admit(self, request: Request) -> Live:
        live = Live(request, self._slots.pop())
        self._admitted.append(Admission(request_id=request.id, slot=live.slot, computed=0))
        return live

    def hit(self, live: Live, source: Live, tokens: int, *, replay: int = 0) -> None:
        """Let ``live`` (just opened) start from ``tokens`` tokens that ``source`` holds."""
        count = tokens // self.size
        live.blocks = source.blocks[:count]
        live.done, live.hit, live.replay = tokens - replay, tokens, replay
        if replay:
            live.window_base = live.done // self.size
        else:
            live.window_base = max(tokens - self.window, 0) // self.size
            live.window_blocks = [-1] * live.window_base + source.window_blocks[live.window_base : count]
        live.sent[1] = live.window_base
        live.window_blocks = live.window_blocks or [-1] * live.window_base
        self._admitted[-1] = Admission(request_id=live.request.id, slot=live.slot, computed=live.done)

    def preempt(self, live: Live) -> Live:
        """Take everything from ``live`` and admit it again under the same id, to be computed anew."""
        self._leave(live)
        again = self._admit(live.request)
        again.tokens, again.length = live.tokens, live.length
        again.logprobs, again.prompt_logprobs = live.logprobs, live.prompt_logprobs
        return again

    def close(self, *lives: Live) -> None:
        """End requests; the runner hears of it with the next step."""
        for live in lives:
            self._leave(live)
            self._finished.append(live.request.id)

    def _leave(self, live: Live) -> None:
        self._released.append(live.slot)
        self._slots.insert(0, live.slot)

    def step(self, *rows: tuple[Live, int]) -> None:
        """One step with a span of so many rows for each request; the last row of what is known samples."""
        spans = tuple(self._span(live, count) for live, count in rows)
        plan = StepPlan(
            step=self._steps,
            admitted=tuple(self._admitted),
            released=tuple(self._released),
            finished=tuple(self._finished),
            spans=spans,
        )
        requests = tuple(self._requests)
        self._steps += 1
        self._admitted, self._requests, self._released, self._finished = [], [], [], []
        result = self.runner.run(plan, requests)
        assert result.step == plan.step
        for (live, _), given in zip(rows, result.spans, strict=True):
            self._take(live, given)

    def _span(self, live: Live, count: int) -> Span:
        start, stop = live.done, live.done + count
        while len(live.blocks) * self.size < stop:
            live.blocks.append(self._free.pop())
        while len(live.window_blocks) * self.size < stop:
            live.window_blocks.append(self._free_window.pop())
        news, window_news = live.blocks[live.sent[0] :], live.window_blocks[live.sent[1] :]
        first = live.sent[0] == 0
        live.sent = [len(live.blocks), len(live.window_blocks)]
        live.done = stop
        return Span(
            slot=live.slot,
            start=start,
            length=count,
            sample=stop == live.length,
            blocks=tuple(news),
            window_blocks=tuple(window_news),
            window_base=live.window_base if first else 0,
            replay=min(max(live.hit - start, 0), count) if live.replay else 0,
            prompt_logprobs=live.request.params.prompt_logprobs is not None
            and start < len(live.request.prompt) - 1,
        )

    def _take(self, live: Live, given: SpanResult) -> None:
        assert (given.slot, given.request_id) == (live.slot, live.request.id)
        live.tokens += given.tokens
        live.length += len(given.tokens)
        live.logprobs += given.logprobs
        live.prompt_logprobs += given.prompt_logprobs

    # ---- whole stories ---------------------------------------------------------------------------------------------------

    def prefill(self, live: Live, *cuts: int) -> None:
        """All known rows of ``live`` in spans that end at ``cuts`` and at the end."""
        for stop in (*cuts, live.length):
            self.step((live, stop - live.done))

    def generate(self, live: Live, count: int) -> None:
        """Decode until ``live`` has ``count`` outputs."""
        while len(live.tokens) < count:
            self.step((live, live.length - live.done))

    def alone(
        self, prompt: Sequence[int], *, outputs: int = 1, cuts: Sequence[int] = (), **params: object
    ) -> Live:
        """A request from first to last, with nobody beside it."""
        live = self.open(prompt, **params)
        self.prefill(live, *cuts)
        self.generate(live, outputs)
        self.close(live)
        return live
