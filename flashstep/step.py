"""The contract between scheduler and runner: one step's plan and its result.

A plan speaks of requests by slot, of absolute positions and of block numbers, never of token values: step N+1 is planned
while step N runs. The runner keeps each slot's tokens and appends what it samples, so a span that starts at a position
whose token is not known yet simply reads what the previous step left there.
"""

import msgspec

from flashstep.request import TokenLogprob

MAX_IN_FLIGHT = 2  # steps that are planned and have not returned


def rows_ahead(drafts: int) -> int:
    """Rows that a decoding request may hold behind its newest known token: a token and ``drafts`` of each step in flight."""
    return MAX_IN_FLIGHT * (1 + drafts)


class Admission(msgspec.Struct, frozen=True, kw_only=True):
    """A request takes a slot. Its first ``computed`` tokens need no rows (prefix hit); spans follow from there.

    A preempted request is admitted again under the same id: the runner still holds its tokens, prompt and output.
    After a bounded hit (the first span has ``replay`` > 0) no window record before ``computed`` is ever visible to it.
    """

    request_id: str
    slot: int
    computed: int


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of one request in one step: absolute positions ``start .. start + length - 1``.

    ``blocks`` are the global block ids (compressed entries and index keys of all KV sources) newly appended to the slot's
    table in this step; ``window_blocks`` likewise for the window records. Both tables are indexed by
    ``position // block_size``; window table entries behind the window may already belong to somebody else and are never
    read. ``window_base`` is how many leading window table entries were skipped or released (set on admission hits).
    ``replay`` leading rows rebuild windows only: they write no global KV (bounded hits; a small budget may cut a replay
    into several spans, what is visible stays fixed by the admission). ``sample`` asks for a token after the last row.
    ``prompt_logprobs`` asks for every row's. The first span of a request whose cache is handed over follows ``transferred``
    positions that nobody has computed here: their records, and the tail behind them, are put into its blocks before its rows run.

    A decode span (``drafts`` is a number) has bounds for numbers, for nobody knows yet how many drafts of the steps in flight
    stand: it begins at the request's newest token, which is at ``start`` at the latest, and verifies at most ``drafts`` of the
    tokens that the runner has proposed; it has no rows if that token turns out to be the last that the request may have.
    Blocks reach ``start + length``.
    """

    slot: int
    start: int
    length: int
    sample: bool
    blocks: tuple[int, ...] = ()
    window_blocks: tuple[int, ...] = ()
    window_base: int = 0
    replay: int = 0
    transferred: int = 0
    prompt_logprobs: bool = False
    drafts: int | None = None

    @property
    def most_rows(self) -> int:
        """Rows that it has at most: near a request's end a decode span may begin earlier than ``start`` and be longer."""
        return self.length if self.drafts is None else max(self.length, 1 + self.drafts)


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What one step runs. ``released`` slots are dropped before ``admitted`` ones take theirs.

    ``finished`` ids are gone for good: the runner forgets their tokens. ``propose`` is how many drafts the next step may want of
    each request that samples in this one (0: none are made).
    """

    step: int
    admitted: tuple[Admission, ...] = ()
    released: tuple[int, ...] = ()
    finished: tuple[str, ...] = ()
    spans: tuple[Span, ...] = ()
    propose: int = 0

    @property
    def rows(self) -> int:
        """Rows that it has at most."""
        return sum(span.most_rows for span in self.spans)


class SpanResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one span produced: tokens in order, none for a chunk that does not sample.

    ``drafted`` counts the drafts that were verified, or rejected unseen since a grammar forbids them; all of ``tokens`` but the
    last are accepted ones. ``failure``: why the request's constraint cannot be followed behind ``tokens`` (there may be none),
    which ends the request.
    """

    slot: int
    request_id: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # for positions start+1 .. of this span
    drafted: int = 0
    failure: str | None = None


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of ``StepPlan`` number ``step``, span by span in the plan's order."""

    step: int
    spans: tuple[SpanResult, ...] = ()
