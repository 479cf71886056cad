"""A request on its way through the engine: a ``Job`` in one of four states, and the memory that the state owns.

    Waiting --admit--> Prefilling --last prompt row planned--> Decoding --stop, length, abort--> Finished
       ^                   |                                      |
       +-----preempt-------+--------------------------------------+

Waiting and Finished own nothing; Prefilling and Decoding own ``Tables``: a slot, global blocks and window blocks. Only the
methods here move a job. Counts run ahead of knowledge: ``computed`` and ``placeholders`` count what is planned, at most (a step
with drafts brings 1 to 1 + drafts tokens), ``tokens`` what is known. Knows no pool and no policy.
"""

import enum
from collections.abc import Iterable

from flashstep.cache.prefix import Chain, Prefix
from flashstep.request import Request
from flashstep.scheduler.tally import Tally

OrderKey = tuple[float, ...]


class State(enum.Enum):
    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    FINISHED = "finished"


class Tables:
    """What an admitted job owns. Global block i and window block i hold positions ``i * block_size ..``.

    ``window`` starts at table index ``window_first``: earlier ones were never taken (a hit) or have slid behind the window.
    ``sent`` counts are how much of both tables the runner has been told.
    """

    __slots__ = ("blocks", "sent", "slot", "window", "window_first", "window_sent")

    def __init__(self, slot: int, *, prefix: Prefix) -> None:
        self.slot = slot
        self.blocks = list(prefix.blocks)
        self.window = list(prefix.window_blocks)
        self.window_first = prefix.window_base
        self.sent = 0
        self.window_sent = prefix.window_base  # table index

    @property
    def window_end(self) -> int:
        """Table index of the next window block."""
        return self.window_first + len(self.window)

    def slide(self, index: int) -> list[int]:
        """Give up the window blocks before table index ``index``."""
        count = index - self.window_first
        if count <= 0:
            return []
        gone = self.window[:count]
        del self.window[:count]
        self.window_first = index
        return gone

    def news(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The global and window blocks that the runner has not been told, as a plan is about to tell it."""
        blocks = tuple(self.blocks[self.sent :])
        window = tuple(self.window[self.window_sent - self.window_first :])
        self.sent = len(self.blocks)
        self.window_sent = self.window_end
        return blocks, window


class Job:
    """One request and how far it has come."""

    __slots__ = (
        "admissions",
        "admitted_at",
        "cached_tokens",
        "chain",
        "computed",
        "first_token_at",
        "in_flight",
        "last_step",
        "limit",
        "logprobs_told",
        "order",
        "pending",
        "placeholders",
        "preemptions",
        "prefix",
        "prompt_len",
        "registered",
        "replayed_tokens",
        "request",
        "state",
        "stop_ids",
        "tables",
        "tally",
        "tokens",
        "transferred_tokens",
    )

    def __init__(
        self, request: Request, *, limit: int, stop_ids: frozenset[int], chain: Chain, order: OrderKey
    ) -> None:
        self.request = request
        self.limit = limit  # output tokens it may have
        self.stop_ids = stop_ids
        self.chain = chain
        self.order = order  # smaller goes first
        self.prompt_len = len(request.prompt)
        self.tokens = list(request.prompt)  # prompt and known outputs
        self.placeholders = 0  # tokens that planned steps will bring at most
        self.pending = 0  # tokens that they will bring at least: planned spans that sample
        self.computed = 0  # rows that are in the cache or planned, at most
        self.registered = 0  # leading blocks that the prefix cache knows (or need not know)
        self.state = State.WAITING
        self.tables: Tables | None = None
        self.prefix: Prefix | None = None  # of the newest admission
        self.in_flight = 0  # planned steps that have not returned
        self.last_step = -1
        self.admissions = 0
        self.preemptions = 0
        self.admitted_at: float | None = None  # the first time
        self.cached_tokens = 0  # of the first admission: later ones find the job's own blocks
        self.replayed_tokens = 0
        self.transferred_tokens = 0  # that are not computed after all, up to the first token
        self.first_token_at: float | None = None
        self.tally: Tally | None = None  # what speculation did, where there is any
        self.logprobs_told = 0  # prompt positions up to which log-probabilities were given out

    def __repr__(self) -> str:
        return f"Job({self.request.id!r}, {self.state.value}, computed={self.computed}, tokens={len(self.tokens)})"

    # ---- counts --------------------------------------------------------------------------------------------------

    @property
    def length(self) -> int:
        """Tokens it has or will have, at most, when all planned steps have returned."""
        return len(self.tokens) + self.placeholders

    @property
    def wanted(self) -> int:
        """Rows to compute before the next token can be sampled."""
        return len(self.tokens) + self.placeholders - self.computed

    @property
    def exhausted(self) -> bool:
        """Every token that it may have is known or surely planned: it ends when its steps return."""
        return len(self.tokens) + self.pending - self.prompt_len >= self.limit

    @property
    def uncertain(self) -> bool:
        """How many tokens the steps in flight bring is open: it cannot be admitted anew before they return."""
        return self.placeholders != self.pending

    @property
    def last_row(self) -> int:
        """The last position that is ever run: that of the last token but one."""
        return self.prompt_len + self.limit - 2

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.request.params.prompt_logprobs is not None and self.logprobs_told < self.prompt_len - 1

    # ---- transitions ---------------------------------------------------------------------------------------------

    def admit(self, tables: Tables, *, prefix: Prefix, now: float) -> None:
        """Waiting -> Prefilling."""
        assert self.state is State.WAITING and self.tables is None, self
        self.state = State.PREFILLING
        self.tables = tables
        self.prefix = prefix
        self.computed = prefix.tokens - prefix.replay
        self.registered = len(prefix.blocks)
        self.admissions += 1
        if self.admitted_at is None:
            self.admitted_at = now
            self.cached_tokens = prefix.cached
            self.transferred_tokens = prefix.transferred
            self.replayed_tokens = prefix.replay
        elif self.first_token_at is None:  # preempted before anything came of it: what is gone is computed
            self.transferred_tokens = min(self.transferred_tokens, max(prefix.tokens - self.cached_tokens, 0))

    def plan_rows(self, rows: int, *, step: int) -> bool:
        """``rows`` more rows are planned in ``step``. True if they end in a sampled token (then it is Decoding)."""
        assert self.tables is not None and 1 <= rows <= self.wanted, self
        samples = rows == self.wanted
        self.computed += rows
        self._plan(step, most=int(samples), least=int(samples))
        if samples:
            self.state = State.DECODING
        return samples

    def plan_token(self, *, drafts: int, step: int) -> None:
        """A row for the newest token and at most ``drafts`` behind it are planned in ``step``."""
        assert self.state is State.DECODING and self.wanted == 1, self
        self.computed += 1 + drafts
        self._plan(step, most=1 + drafts, least=1)

    def take_back(self, planned: int, *, brought: int, same_admission: bool) -> None:
        """A step that was to bring at most ``planned`` tokens has brought ``brought``."""
        self.placeholders -= planned
        self.pending -= 1
        if same_admission:
            self.computed -= planned - brought

    def preempt(self) -> Tables:
        """Prefilling or Decoding -> Waiting; everything is to be computed again. Gives up the tables."""
        assert self.state in (State.PREFILLING, State.DECODING), self
        self.preemptions += 1
        self.computed = 0
        self.registered = 0
        return self._leave(State.WAITING)

    def finish(self) -> Tables | None:
        """Any state -> Finished. Gives up the tables, if it has any."""
        assert self.state is not State.FINISHED, self
        if self.tables is None:
            self.state = State.FINISHED
            return None
        return self._leave(State.FINISHED)

    def learn(self, tokens: Iterable[int], *, now: float) -> None:
        """Tokens that a planned step has brought."""
        if self.first_token_at is None:
            self.first_token_at = now
        self.tokens.extend(tokens)

    def _plan(self, step: int, *, most: int, least: int) -> None:
        self.placeholders += most
        self.pending += least
        self.in_flight += 1
        self.last_step = step

    def _leave(self, state: State) -> Tables:
        assert self.tables is not None, self
        tables, self.tables = self.tables, None
        self.state = state
        return tables
