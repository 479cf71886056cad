"""What the scheduler tells of: what a commit or an abort means for a request, and its gauges and counters."""

import msgspec

from flashstep.request import Acceptance, FinishReason, TokenLogprob


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """What a commit or an abort means for one request. Fields as in ``ipc.messages.RequestOutput``."""

    request_id: str
    tokens: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    failure: str | None = None
    stop_token: int | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    cached_tokens: int | None = None
    replayed_tokens: int | None = None
    transferred_tokens: int | None = None
    queued_s: float | None = None
    prefill_s: float | None = None
    preemptions: int = 0
    acceptance: Acceptance | None = None


class SchedulerStats(msgspec.Struct, frozen=True, kw_only=True):
    """Gauges now, counters since the start. Fields as in ``ipc.messages.Stats``."""

    running: int
    waiting: int
    cache_usage: float
    prefix_queries: int
    prefix_hits: int
    preemptions: int
    prompt_tokens: int
    cached_tokens: int
    replayed_tokens: int
    transferred_tokens: int
    generation_tokens: int
    steps: int
    step_rows: tuple[int, ...]
    rows: int
    acceptance: Acceptance | None
