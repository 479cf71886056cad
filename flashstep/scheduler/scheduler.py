"""The scheduler: ``plan`` says what the next step runs, ``commit`` takes what a step gave. Two verbs, and add and abort.

Takes Requests and StepResults; gives StepPlans and Progress. A plan speaks of slots, positions and block numbers only, so step
N+1 is planned while step N runs (at most two in flight): counts run ahead, and with drafts they are bounds until a step returns.
A stop is noticed one step late, and that step's tokens are thrown away. Every plan must be run, in order, and its result
committed, in order. Knows no tensor and no text.
"""

import bisect
import heapq
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter

import msgspec

from flashstep.cache.blocks import BlockPool
from flashstep.cache.prefix import Chain
from flashstep.config.cache import CacheConfig
from flashstep.config.scheduler import SchedulerConfig
from flashstep.config.speculative import Speculation
from flashstep.request import FinishReason, Request
from flashstep.scheduler import policy
from flashstep.scheduler.admission import Memory, admit
from flashstep.scheduler.progress import Progress, SchedulerStats
from flashstep.scheduler.states import Job, State, Tables
from flashstep.scheduler.stop import judge
from flashstep.scheduler.tally import RowTally, Tally
from flashstep.step import MAX_IN_FLIGHT, Admission, Span, SpanResult, StepPlan, StepResult, rows_ahead

_ORDER = attrgetter("order")


class _Sketch:
    """A plan in the making."""

    def __init__(self, step: int, rows: int) -> None:
        self.step = step
        self.left = rows  # of the token budget
        self.admitted: list[Admission] = []
        self.first: list[Request] = []  # those of them that the runner does not know
        self.spans: list[Span] = []
        self.jobs: list[Job] = []  # of the spans
        self.short = False  # somebody had to wait for a block, or was preempted


class _InFlight(msgspec.Struct):
    """A planned step that has not returned: its spans with the jobs and the admission they belong to."""

    step: int
    entries: list[tuple[Job, Span, int]]


class Scheduler:
    """See the module's docstring. One thread uses it.

    ``pools`` replaces the (global, window) block pools, which tests do to permute block numbers. ``clock`` is seconds,
    monotonic, the same as that of ``Request.arrival``. ``speculation`` None: no drafts.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheConfig,
        *,
        sliding_window: int,
        eos_token_ids: Iterable[int],
        speculation: Speculation | None = None,
        pools: tuple[BlockPool, BlockPool] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        ahead = rows_ahead(speculation.num_tokens if speculation else 0)
        _validate(config, cache, sliding_window=sliding_window, ahead=ahead)
        self._config = config
        self._cache = cache
        self._eos = frozenset(eos_token_ids)
        self._clock = clock
        global_pool, window_pool = pools or (None, None)
        self._memory = Memory(
            cache, window=sliding_window, ahead=ahead, global_pool=global_pool, window_pool=window_pool
        )
        self._speculation = speculation
        self._tally = Tally(speculation) if speculation else None
        self._jobs: dict[str, Job] = {}  # all unfinished ones
        self._waiting: list[Job] = []  # sorted by order; a preempted job stands at the head again
        self._running: list[Job] = []  # fcfs: order of admission; priority: sorted by order
        self._free_slots = list(
            range(config.max_num_seqs)
        )  # a heap: low slots first keep the runner's batch dense
        self._in_flight: deque[_InFlight] = deque()
        self._released: list[int] = []  # slots to name in the next plan
        self._gone: list[str] = []  # ids to name in the next plan
        self._first: tuple[Request, ...] = ()
        self._refused: Job | None = (
            None  # the waiting job that did not fit, and the free blocks of both pools then
        )
        self._refused_at = (0, 0)
        self._steps = 0
        self._added = 0
        self._preemptions = 0
        self._prefix_queries = 0
        self._prefix_hits = 0
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._replayed_tokens = 0
        self._transferred_tokens = 0
        self._generation_tokens = 0
        self._row_tally = RowTally(config.max_num_batched_tokens)

    # ---- requests ------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue ``request``; ``ValueError`` if it can never run."""
        limit = self._config.max_model_len
        length = len(request.prompt)
        if request.id in self._jobs:
            raise ValueError(f"request id {request.id!r} is in use")
        if length == 0:
            raise ValueError("the prompt is empty; at least one token is needed")
        if length >= limit:
            raise ValueError(
                f"the prompt has {length} tokens, but the context holds {limit} and at least one is for the output"
            )
        if request.params.max_tokens < 1:
            raise ValueError(f"max_tokens is {request.params.max_tokens}; it must be at least 1")
        if not 0 <= request.transferred < length:
            raise ValueError(
                f"the records of {request.transferred} tokens come from outside; a prompt of {length} tokens has at most "
                f"{length - 1} of them"
            )
        if request.transferred and request.params.prompt_logprobs is not None:
            raise ValueError(
                "prompt_logprobs needs every row of the prompt, and its cache comes from outside"
            )
        stop_ids = frozenset(request.params.stop_token_ids)
        job = Job(
            request,
            limit=min(request.params.max_tokens, limit - length),
            stop_ids=stop_ids if request.params.ignore_eos else stop_ids | self._eos,
            chain=Chain(self._cache.block_size, salt=request.cache_salt),
            order=policy.order_key(request, policy=self._config.policy, number=self._added),
        )
        if self._speculation:
            job.tally = Tally(self._speculation)
        self._added += 1
        self._jobs[request.id] = job
        bisect.insort(self._waiting, job, key=_ORDER)

    def abort(self, request_ids: Iterable[str]) -> list[Progress]:
        """End requests now; ids that are unknown or have finished are ignored."""
        jobs = [job for job in map(self._jobs.get, request_ids) if job is not None]
        unique = list(dict.fromkeys(jobs))
        self._finish(unique)
        return [
            Progress(
                request_id=job.request.id,
                finish_reason=FinishReason.ABORT,
                preemptions=job.preemptions,
                acceptance=job.tally.acceptance() if job.tally else None,
            )
            for job in unique
        ]

    @property
    def has_work(self) -> bool:
        """Some request is unfinished, or some step has not returned."""
        return bool(self._jobs or self._in_flight)

    @property
    def in_flight(self) -> int:
        """Planned steps whose result was not committed."""
        return len(self._in_flight)

    @property
    def unfinished(self) -> tuple[str, ...]:
        return tuple(self._jobs)

    # ---- plan ----------------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """The next step, or None if nothing can run before a step in flight returns (or nothing is to do)."""
        assert len(self._in_flight) < MAX_IN_FLIGHT, "commit a step first"
        while True:
            sketch = _Sketch(self._steps, self._config.max_num_batched_tokens)
            self._plan_decoding(sketch)
            self._plan_prompts(sketch)
            if sketch.spans:
                return self._seal(sketch)
            if not sketch.short or self._in_flight or not self._waiting:
                return None
            # everybody who ran was preempted for somebody who could not use it: start over, with admission

    def first_admitted(self) -> tuple[Request, ...]:
        """The requests that the newest plan admits for the first time, which is what the runner must be told of."""
        return self._first

    def _plan_decoding(self, sketch: _Sketch) -> None:
        """A row and its drafts for each decoding request, as far as budget and blocks go.

        Newest tokens come first, then prompts: drafts get half of what is left where prompts want rows, else all, and the same
        number for each request. A block for the newest token may cost a preemption, blocks for drafts may not.
        """
        decoding = [job for job in self._running if job.state is State.DECODING and not job.exhausted]
        if not decoding:
            return
        depth = self._speculation.depth(len(decoding)) if self._speculation else 0
        if depth:
            spare = max(sketch.left - len(decoding), 0)
            depth = min(depth, (spare // 2 if self._prompts_want_rows else spare) // len(decoding))
        for job in decoding:
            if sketch.left == 0:
                return
            if job.state is not State.DECODING:
                continue  # preempted for one before it
            start = min(job.computed, job.last_row)
            rows = self._blocks_for(job, start, min(1 + depth, job.last_row + 1 - start), sketch)
            if rows:
                # fewer rows than tokens may be left to the request: that cuts no drafts, the runner knows better
                drafts = depth if start + rows > job.last_row else rows - 1
                self._add_decode_span(job, start, rows, drafts, sketch)

    @property
    def _prompts_want_rows(self) -> bool:
        if self._waiting and self._free_slots:
            return True
        return any(job.state is State.PREFILLING for job in self._running)

    def _blocks_for(self, job: Job, start: int, rows: int, sketch: _Sketch) -> int:
        """Take the blocks for ``rows`` rows from ``start``; fewer rows where there are none, 0 if it must wait."""
        tables, size, memory = job.tables, self._cache.block_size, self._memory
        assert tables is not None
        end = -(-(start + rows) // size)
        need, need_window = max(end - len(tables.blocks), 0), max(end - tables.window_end, 0)
        if memory.blocks.available < need or memory.window_blocks.available < need_window:
            rows = min(rows, max(min(len(tables.blocks), tables.window_end) * size - start, 1))
            end = -(-(start + rows) // size)
            need, need_window = max(end - len(tables.blocks), 0), max(end - tables.window_end, 0)
            if not self._make_room(job, sketch, blocks=need, window_blocks=need_window):
                return 0
        tables.blocks += memory.blocks.allocate(need)
        tables.window += memory.window_blocks.allocate(need_window)
        return rows

    def _plan_prompts(self, sketch: _Sketch) -> None:
        """Chunks of running prompts, and new admissions unless memory was short, under the share rule of ``policy``."""
        jobs = [job for job in self._running if job.state is State.PREFILLING]
        running = len(jobs)
        if not sketch.short:
            jobs += self._waiting[: len(self._free_slots)]
        if not jobs or sketch.left == 0:
            return
        wants = [job.wanted for job in jobs]
        threshold = self._config.long_prefill_token_threshold
        if threshold and len(jobs) > 1:
            wants = [min(want, threshold) for want in wants]
        grants = policy.without_overtaking(policy.share_rows(wants, sketch.left), first_waiting=running)
        spare = 0  # rows that an earlier prompt could not use: found in the cache, or no window block
        for index, (job, grant) in enumerate(zip(jobs, grants, strict=True)):
            rows = min(wants[index], grant + spare)
            if index < running and job.state is State.WAITING:
                continue  # preempted for one before it
            if index >= running and (rows == 0 or sketch.short or not self._admit(job, sketch)):
                break  # nobody overtakes
            rows = self._window_for(job, min(rows, job.wanted), sketch)
            spare += grant - rows
            if rows:
                self._add_span(job, rows, sketch)

    def _admit(self, job: Job, sketch: _Sketch) -> bool:
        if job.uncertain:
            return False
        first = job.admissions == 0
        free = (self._memory.blocks.available, self._memory.window_blocks.available)
        if self._refused is job and free[0] <= self._refused_at[0] and free[1] <= self._refused_at[1]:
            return False  # nothing has come free since: a long prompt is not looked up again in every step
        if not admit(job, self._memory, slot=self._free_slots[0], now=self._clock()):
            self._refused, self._refused_at = job, free
            return False
        self._refused = None
        slot = heapq.heappop(self._free_slots)
        assert self._waiting[0] is job and job.prefix is not None
        del self._waiting[0]
        if self._config.policy == "fcfs":
            self._running.append(job)
        else:
            bisect.insort(self._running, job, key=_ORDER)
        sketch.admitted.append(Admission(request_id=job.request.id, slot=slot, computed=job.computed))
        if first:
            sketch.first.append(job.request)
            self._prefix_queries += job.prompt_len
            self._prefix_hits += job.prefix.cached
        return True

    def _window_for(self, job: Job, rows: int, sketch: _Sketch) -> int:
        """Take the window blocks for ``rows`` rows, or for as many as there are; preempt only for the first row."""
        tables, pool, size = job.tables, self._memory.window_blocks, self._cache.block_size
        assert tables is not None
        if rows == 0:
            return 0
        need = -(-(job.computed + rows) // size) - tables.window_end
        if need <= 0:
            return rows
        # a chunk needs many window blocks for a moment: leave one to each decoding request
        may_take = max(pool.available - len(sketch.jobs), min(pool.available, 1))
        take = min(need, may_take)
        if take == 0 and tables.window_end * size == job.computed:
            if not self._make_room(job, sketch, blocks=0, window_blocks=1):
                return 0
            take = 1
        tables.window += pool.allocate(take)
        return min(rows, tables.window_end * size - job.computed)

    def _make_room(self, job: Job, sketch: _Sketch, *, blocks: int, window_blocks: int) -> bool:
        """See that the pools have what ``job`` needs, preempting if nothing comes back by itself. False: it must wait."""
        memory = self._memory
        while memory.blocks.available < blocks or memory.window_blocks.available < window_blocks:
            sketch.short = True
            if memory.fenced or any(other.exhausted for other in self._running):
                return False
            chosen = policy.victim(self._running, beneficiary=job, planned=sketch.jobs)
            if chosen is None:
                return False
            self._preempt(chosen)
        return True

    def _preempt(self, job: Job) -> None:
        tables = job.preempt()
        self._preemptions += 1
        self._running.remove(job)
        self._retire(job, tables)
        bisect.insort(self._waiting, job, key=_ORDER)

    def _retire(self, job: Job, tables: Tables) -> None:
        """``job`` has left its slot; its blocks follow when no step in flight can touch them."""
        heapq.heappush(self._free_slots, tables.slot)
        self._released.append(tables.slot)
        self._memory.give_back(tables, behind=job.last_step if job.in_flight else None)

    def _add_decode_span(self, job: Job, start: int, rows: int, drafts: int, sketch: _Sketch) -> None:
        tables = job.tables
        assert tables is not None
        news, window_news = tables.news() if _has_news(tables) else ((), ())
        job.plan_token(drafts=drafts, step=sketch.step)
        self._add(
            job,
            Span(
                slot=tables.slot,
                start=start,
                length=rows,
                sample=True,
                blocks=news,
                window_blocks=window_news,
                drafts=drafts,
            ),
            sketch,
        )

    def _add_span(self, job: Job, rows: int, sketch: _Sketch) -> None:
        tables, start, prefix = job.tables, job.computed, job.prefix
        assert tables is not None and prefix is not None
        first = tables.sent == 0
        base = tables.window_first if first else 0
        news, window_news = tables.news() if _has_news(tables) else ((), ())
        prompt_logprobs = job.wants_prompt_logprobs and start < job.prompt_len - 1
        sample = job.plan_rows(rows, step=sketch.step)
        self._add(
            job,
            Span(
                slot=tables.slot,
                start=start,
                length=rows,
                sample=sample,
                blocks=news,
                window_blocks=window_news,
                window_base=base,
                replay=min(max(prefix.tokens - start, 0), rows) if prefix.replay else 0,
                transferred=prefix.transferred if first else 0,
                prompt_logprobs=prompt_logprobs,
            ),
            sketch,
        )

    def _add(self, job: Job, span: Span, sketch: _Sketch) -> None:
        sketch.spans.append(span)
        sketch.jobs.append(job)
        sketch.left -= span.most_rows

    def _seal(self, sketch: _Sketch) -> StepPlan:
        for job, span in zip(sketch.jobs, sketch.spans, strict=True):
            if span.drafts is None and span.length > 1:
                self._memory.register(job)  # now, so that the next plan can find what this one fills
        entries = [(job, span, job.admissions) for job, span in zip(sketch.jobs, sketch.spans, strict=True)]
        self._in_flight.append(_InFlight(sketch.step, entries))
        self._steps += 1
        self._row_tally.add(self._config.max_num_batched_tokens - sketch.left)
        released, self._released = self._released, []
        gone, self._gone = self._gone, []
        self._first = tuple(sketch.first)
        return StepPlan(
            step=sketch.step,
            admitted=tuple(sketch.admitted),
            released=tuple(released),
            finished=tuple(gone),
            spans=tuple(sketch.spans),
            propose=self._speculation.depth(sum(span.sample for span in sketch.spans))
            if self._speculation
            else 0,
        )

    # ---- commit --------------------------------------------------------------------------------------------------

    def commit(self, result: StepResult) -> list[Progress]:
        """Take the result of the oldest step in flight; say what it means, request by request."""
        step = self._in_flight.popleft()
        assert result.step == step.step, (
            f"step {result.step} returned, step {step.step} is the oldest in flight"
        )
        assert len(result.spans) == len(step.entries), "a result has one entry for each span of its plan"
        now = self._clock()
        progress: list[Progress] = []
        finished: list[Job] = []
        for (job, span, admission), given in zip(step.entries, result.spans, strict=True):
            assert given.request_id == job.request.id, "results stand in the plan's order"
            job.in_flight -= 1
            if job.state is State.FINISHED:
                continue  # stopped or aborted while this step ran: its tokens are thrown away
            if span.sample:
                planned = 1 + (span.drafts or 0)
                same = job.tables is not None and job.admissions == admission
                job.take_back(planned, brought=len(given.tokens), same_admission=same)
            news = self._commit_span(job, span, given, now)
            if news is not None:
                progress.append(news)
                if news.finish_reason is not None:
                    finished.append(job)
            if job.tables is not None and job.admissions == admission:
                if len(job.tokens) >= (job.registered + 1) * self._cache.block_size:
                    self._memory.register(job)
                self._memory.slide(job.tables, min(span.start + span.length, len(job.tokens) - 1))
        self._finish(finished)
        self._memory.open_fences(step.step)
        return progress

    def _commit_span(self, job: Job, span: Span, given: SpanResult, now: float) -> Progress | None:
        prompt_logprobs = given.prompt_logprobs
        if (
            prompt_logprobs
        ):  # entry i belongs to position start + 1 + i; after a preemption some were told already
            prompt_logprobs = prompt_logprobs[max(job.logprobs_told - span.start, 0) :]
            job.logprobs_told += len(prompt_logprobs)
        if not span.sample:
            assert not given.tokens, f"{job}: a chunk that does not sample brought tokens"
            return (
                Progress(request_id=job.request.id, prompt_logprobs=prompt_logprobs)
                if prompt_logprobs
                else None
            )
        assert given.tokens or given.failure, f"{job}: a span that samples brings at least one token"
        self._count(job, given)
        room = job.limit - (len(job.tokens) - job.prompt_len)
        verdict = judge(given.tokens, room=room, stop_ids=job.stop_ids, failed=given.failure is not None)
        count = len(verdict.kept)
        first = job.first_token_at is None
        job.learn(verdict.kept, now=now)
        self._generation_tokens += count
        if not first and verdict.reason is None:
            return Progress(
                request_id=job.request.id,
                tokens=verdict.kept,
                logprobs=given.logprobs,
                preemptions=job.preemptions,
            )
        if first:
            self._prompt_tokens += job.prompt_len
            self._cached_tokens += job.cached_tokens
            self._replayed_tokens += job.replayed_tokens
            self._transferred_tokens += job.transferred_tokens
        admitted = job.admitted_at
        assert admitted is not None
        return Progress(
            request_id=job.request.id,
            tokens=verdict.kept,
            finish_reason=verdict.reason,
            failure=given.failure if verdict.reason is FinishReason.ERROR else None,
            stop_token=verdict.stop_token,
            logprobs=given.logprobs[:count],
            prompt_logprobs=prompt_logprobs,
            cached_tokens=job.cached_tokens if first else None,
            replayed_tokens=job.replayed_tokens if first else None,
            transferred_tokens=job.transferred_tokens if first else None,
            queued_s=max(admitted - job.request.arrival, 0.0) if first else None,
            prefill_s=now - admitted if first else None,
            preemptions=job.preemptions,
            acceptance=job.tally.acceptance() if job.tally and verdict.reason is not None else None,
        )

    def _count(self, job: Job, given: SpanResult) -> None:
        if given.drafted and given.tokens and job.tally and self._tally:
            for tally in (job.tally, self._tally):
                tally.add(given.drafted, accepted=len(given.tokens) - 1)

    def _finish(self, jobs: Sequence[Job]) -> None:
        if not jobs:
            return
        for job in jobs:
            del self._jobs[job.request.id]
            waited = job.state is State.WAITING
            tables = job.finish()
            if tables is not None:
                self._retire(job, tables)
            if waited:
                self._waiting.remove(job)
            if job.admissions:
                self._gone.append(job.request.id)
        self._running = [job for job in self._running if job.state is not State.FINISHED]

    # ---- telling -------------------------------------------------------------------------------------------------

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            running=len(self._running),
            waiting=len(self._waiting),
            cache_usage=self._memory.usage,
            prefix_queries=self._prefix_queries,
            prefix_hits=self._prefix_hits,
            preemptions=self._preemptions,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            replayed_tokens=self._replayed_tokens,
            transferred_tokens=self._transferred_tokens,
            generation_tokens=self._generation_tokens,
            steps=self._steps,
            step_rows=tuple(self._row_tally.steps),
            rows=self._row_tally.rows,
            acceptance=self._tally.acceptance() if self._tally else None,
        )

    def check_integrity(self) -> None:
        """Assert that no block or slot is lost or held twice. At any time; when idle, nothing may be owned at all."""
        tables = [job.tables for job in self._jobs.values() if job.tables is not None]
        self._memory.check_integrity(tables)
        slots = sorted([*self._free_slots, *(t.slot for t in tables)])
        assert slots == list(range(self._config.max_num_seqs)), f"slots are lost or held twice: {slots}"
        assert len(self._running) == len(tables), "a running job has no tables, or another has"
        assert len(self._running) + len(self._waiting) == len(self._jobs), "a job is in no queue, or in two"
        if not self.has_work:
            assert self._memory.blocks.owned == 0, "idle, but global blocks are owned"
            assert self._memory.window_blocks.owned == 0, "idle, but window blocks are owned"


def _has_news(tables: Tables) -> bool:
    return tables.sent < len(tables.blocks) or tables.window_sent < tables.window_end


def _validate(config: SchedulerConfig, cache: CacheConfig, *, sliding_window: int, ahead: int) -> None:
    """Raise ``ValueError`` with every broken rule."""
    size = cache.block_size
    problems = []
    if size < 2 or size % 2:
        problems.append(
            f"block_size is {size}; it must be even and at least 2, so that a ratio-2 pair never splits"
        )
    if config.max_num_seqs < 1 or config.max_num_batched_tokens < 1:
        problems.append("max_num_seqs and max_num_batched_tokens must be at least 1")
    if config.max_model_len < 2:
        problems.append(f"max_model_len is {config.max_model_len}; a prompt token and an output token need 2")
    if config.policy not in ("fcfs", "priority"):
        problems.append(f"policy is {config.policy!r}; it must be 'fcfs' or 'priority'")
    if size > 0 and cache.num_blocks * size < config.max_model_len:
        problems.append(
            f"{cache.num_blocks} blocks of {size} tokens hold less than one request of max_model_len "
            f"({config.max_model_len}); lower it or give the cache more memory"
        )
    if size > 0 and cache.num_window_blocks < (least := -(-(sliding_window + ahead - 1) // size) + 2):
        problems.append(f"num_window_blocks is {cache.num_window_blocks}; one request alone needs {least}")
    if problems:
        raise ValueError("the scheduler's limits are not usable: " + "; ".join(problems))
