"""A request as the engine sees it: token ids and sampling parameters, no text, no tensors.

The server turns HTTP bodies into these; scheduler, runner and sampler read them. Stop *strings* are not here: text is
matched where text is made (chat), which then aborts the request.
"""

import enum
import math
from collections.abc import Iterator
from itertools import chain, islice

import msgspec

MAX_LOGPROBS = 20  # alternatives a request may ask for at a position, as OpenAI's and vLLM's servers
LOGIT_BIAS_LIMIT = 100.0
PENALTY_LIMIT = 2.0
MAX_PROBLEMS = 32  # sentences on one request: nobody reads a million
INTEGER_BITS = 64  # integers travel to the engine as signed 64-bit ones


class FinishReason(enum.Enum):
    """Why a request ended (OpenAI words; ``tool_calls`` is added by the chat layer)."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Constraint(msgspec.Struct, frozen=True, kw_only=True):
    """What the output must follow: a grammar in llguidance's serialised form, a limit of what comes before it, or both.

    ``after`` is the token behind whose first appearance in the output the grammar begins (``</think>``); None: at once. When
    ``limit`` tokens have come before ``after``, nothing else can come (None: no limit). ``grammar`` None: anything.
    ``control_tokens`` are the control tokens that the grammar may name by number; no other is ever let through by a grammar,
    and before it begins these are not let through either.
    """

    grammar: str | None = None
    after: int | None = None
    limit: int | None = None
    control_tokens: tuple[int, ...] = ()


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to turn logits into tokens. Validated by ``problems`` at the door; trusted below it.

    ``temperature`` 0 is greedy. ``top_k`` 0 or -1 is off. ``seed`` None draws one at admission. ``bad_words`` are token
    id sequences. ``logprobs`` None is off, n returns the n best beside the chosen token; ``prompt_logprobs`` likewise for
    every prompt position after the first. ``stop_token_ids`` and the model's EOS end the request unless ``ignore_eos``
    (which concerns EOS only); neither can be sampled before ``min_tokens`` outputs.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    bad_words: tuple[tuple[int, ...], ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    constraint: Constraint | None = None


class TokenLogprob(msgspec.Struct, frozen=True):
    """A token's log-probability and rank (1 is best), with the best alternatives as (id, logprob, rank)."""

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float, int], ...] = ()


class Acceptance(msgspec.Struct, frozen=True, kw_only=True):
    """What speculation did, of one request or of all: steps that had drafts, how many, and how many stood.

    ``histogram[a]`` counts steps in which ``a`` drafts stood; ``per_position[i]`` counts steps in which draft i stood.
    ``synthetic``: the drafts stood by lot (``rejection_sample_method`` synthetic), whatever they were.
    """

    synthetic: bool
    num_tokens: int  # k of the engine
    steps: int
    draft_tokens: int
    accepted_tokens: int
    histogram: tuple[int, ...]  # k + 1 counts
    per_position: tuple[int, ...]  # k counts

    @property
    def mean_length(self) -> float | None:
        """Tokens of a step that had drafts, the one that is no draft included; None if there was no such step."""
        return 1 + self.accepted_tokens / self.steps if self.steps else None

    @property
    def rate(self) -> float | None:
        """Share of the drafts that stood; None if there were none."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else None

    @property
    def position_rates(self) -> tuple[float, ...]:
        """For each place in a block, the share of steps in which that draft stood; empty if there was no step."""
        return tuple(count / self.steps for count in self.per_position) if self.steps else ()


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to continue. ``cache_salt`` isolates prefix-cache tenants; smaller ``priority`` goes first.

    The cache records of the first ``transferred`` tokens of the prompt come from outside and are not computed here, unless the
    request is preempted; at least one token of a prompt is.
    """

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    arrival: float = 0.0  # seconds, time.monotonic() of the front end
    priority: int = 0
    cache_salt: str = ""
    transferred: int = 0


def problems(params: SamplingParams, vocab_size: int) -> list[str]:
    """What is wrong with ``params``, as at most ``MAX_PROBLEMS`` sentences that begin with the field's name (serving.md F.3).

    The server calls this at the door, with types already checked; whatever passes may be used as a tensor index.
    """
    found = chain(
        _number_problems(params),
        _length_problems(params),
        _token_problems(params, vocab_size),
        _constraint_problems(params.constraint, vocab_size),
    )
    return list(islice(found, MAX_PROBLEMS))


def _number_problems(p: SamplingParams) -> Iterator[str]:
    if not (math.isfinite(p.temperature) and p.temperature >= 0):
        yield f"temperature is {p.temperature}; it must be a finite number of at least 0"
    if not 0 < p.top_p <= 1:
        yield f"top_p is {p.top_p}; it must lie in (0, 1]"
    if not -1 <= p.top_k < 1 << INTEGER_BITS - 1:
        yield f"top_k is {p.top_k}; it must be at least 1, or 0 or -1 for no limit, and below 2^{INTEGER_BITS - 1}"
    if not 0 <= p.min_p <= 1:
        yield f"min_p is {p.min_p}; it must lie in [0, 1]"
    for name in ("presence_penalty", "frequency_penalty"):
        value = getattr(p, name)
        if not -PENALTY_LIMIT <= value <= PENALTY_LIMIT:
            yield f"{name} is {value}; it must lie in [-2, 2]"
    if not (math.isfinite(p.repetition_penalty) and p.repetition_penalty > 0):
        yield f"repetition_penalty is {p.repetition_penalty}; it must be a finite number above 0"
    if p.seed is not None and not -(1 << INTEGER_BITS - 1) <= p.seed < 1 << INTEGER_BITS - 1:
        yield f"seed is {p.seed}; it must be a signed 64-bit integer"


def _length_problems(p: SamplingParams) -> Iterator[str]:
    if p.max_tokens < 1:
        yield f"max_tokens is {p.max_tokens}; it must be at least 1"
    if p.min_tokens < 0:
        yield f"min_tokens is {p.min_tokens}; it must be at least 0"
    elif p.min_tokens > max(p.max_tokens, 0):
        yield f"min_tokens is {p.min_tokens}; it must not exceed max_tokens ({p.max_tokens})"
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(p, name)
        if value is not None and not 0 <= value <= MAX_LOGPROBS:
            yield f"{name} is {value}; it must lie in 0..{MAX_LOGPROBS}"


def _token_problems(p: SamplingParams, vocab_size: int) -> Iterator[str]:
    allowed = f"token ids lie in 0..{vocab_size - 1}"
    for token, bias in p.logit_bias.items():
        if not 0 <= token < vocab_size:
            yield f"logit_bias names token {token}; {allowed}"
        if not -LOGIT_BIAS_LIMIT <= bias <= LOGIT_BIAS_LIMIT:
            yield f"logit_bias of token {token} is {bias}; it must lie in [-100, 100]"
    for token in p.stop_token_ids:
        if not 0 <= token < vocab_size:
            yield f"stop_token_ids names token {token}; {allowed}"
    for word in p.bad_words:
        if not word:
            yield "bad_words holds an empty word; each needs at least one token"
        for token in word:
            if not 0 <= token < vocab_size:
                yield f"bad_words names token {token}; {allowed}"


def _constraint_problems(constraint: Constraint | None, vocab_size: int) -> Iterator[str]:
    """The grammar itself is compiled later, and fails then (``sampling.constraint``); the server has looked at it before."""
    if constraint is None:
        return
    after = constraint.after
    if after is not None and not 0 <= after < vocab_size:
        yield f"constraint begins after token {after}; token ids lie in 0..{vocab_size - 1}"
    if constraint.limit is not None and (after is None or constraint.limit < 0):
        yield f"constraint has the limit {constraint.limit}; it must be at least 0, and needs the token that it is before"
    for token in constraint.control_tokens:
        if not 0 <= token < vocab_size:
            yield f"constraint names token {token}; token ids lie in 0..{vocab_size - 1}"
