"""The wire: every message between server and engine, as tagged msgpack structs.

Server to engine: ``Submit``, ``Abort``, ``Shutdown``. Engine to server: ``Ready`` once, then one ``Outputs`` for each step that
produced anything, ``Stats`` at most every 100 ms, ``Rejected`` for a request the engine cannot take, ``Failed`` before it dies.
"""

from collections.abc import Sequence

import msgspec

from flashstep.request import Acceptance, Request, TokenLogprob


class Submit(msgspec.Struct, frozen=True, tag=True):
    """New requests. Those at the indices ``again`` come without their prompt, which is that of the one before them.

    So n choices of one prompt send it once; ``of`` makes the message, ``whole`` reads it.
    """

    requests: tuple[Request, ...]
    again: tuple[int, ...] = ()

    @classmethod
    def of(cls, requests: Sequence[Request]) -> "Submit":
        again = tuple(at for at in range(1, len(requests)) if requests[at].prompt is requests[at - 1].prompt)
        sent = list(requests)
        for at in again:
            sent[at] = msgspec.structs.replace(sent[at], prompt=())
        return cls(tuple(sent), again)

    def whole(self) -> list[Request]:
        made = list(self.requests)
        for at in self.again:
            made[at] = msgspec.structs.replace(made[at], prompt=made[at - 1].prompt)
        return made


class Abort(msgspec.Struct, frozen=True, tag=True):
    request_ids: tuple[str, ...]


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    pass


class Ready(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The engine serves. What the front end must know to refuse early and to report."""

    max_model_len: int
    max_num_seqs: int
    num_blocks: int
    block_size: int
    hit_policy: str
    enable_prefix_caching: bool = True
    scheduling_policy: str = "fcfs"
    falsifies: tuple[str, ...] = ()  # what makes every text wrong on purpose, for measuring
    vocab_size: int
    token_map_fingerprint: (
        str  # of the Engram token map; the server's tokenizer must give the same (case A34)
    )


class Rejected(msgspec.Struct, frozen=True, tag=True):
    request_id: str
    reason: str


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """New tokens of one request. ``finish_reason`` ("stop", "length", "abort", "error") ends it.

    ``failure`` says why, for the user, where that is his constraint's doing ("error").
    ``stop_token`` is the id that stopped it (it is the last of ``tokens``). ``cached_tokens``, ``replayed_tokens`` and
    ``transferred_tokens`` come with the first output, as do ``queued_s`` and ``prefill_s``. ``preemptions`` are those so far.
    ``acceptance`` comes with the last, where the engine speculates.
    """

    id: str
    tokens: tuple[int, ...] = ()
    finish_reason: str | None = None
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


class Outputs(msgspec.Struct, frozen=True, tag=True):
    outputs: tuple[RequestOutput, ...]


class Stats(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Gauges now, counters since the start."""

    running: int
    waiting: int  # for a slot or for blocks
    deferred: int = 0  # for the grammar of their constraint, which is being compiled
    cache_usage: float  # 0..1, blocks owned by live requests
    prefix_queries: int  # prompt tokens looked up
    prefix_hits: int  # of them, found
    preemptions: int
    prompt_tokens: int  # of requests that have got their first token
    cached_tokens: int = 0  # of them, found in the prefix cache
    replayed_tokens: int = 0  # of those, run again (hit policy bounded)
    transferred_tokens: int = 0  # of prompt_tokens, those whose cache came from outside
    generation_tokens: int
    steps: int
    step_rows: tuple[int, ...] = ()  # [i] counts the steps of 2^(i-1) + 1 .. 2^i rows, [0] those of one row
    rows: int = 0  # of all steps: prompt rows, newest tokens and drafts
    acceptance: Acceptance | None = None  # None: the engine does not speculate
    balancedness: float | None = (
        None  # of the experts' loads in the newest steps; None: they are not recorded
    )


class Failed(msgspec.Struct, frozen=True, tag=True):
    reason: str


ToEngine = Submit | Abort | Shutdown
ToServer = Ready | Outputs | Stats | Rejected | Failed
