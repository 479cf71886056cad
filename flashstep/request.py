"""A request as the engine sees it: token ids and sampling parameters, no text, no tensors.

The server turns HTTP bodies into these; scheduler, runner and sampler read them. Stop *strings* are not here: text is
matched where text is made (chat), which then aborts the request.
"""

import enum

import msgspec


class FinishReason(enum.Enum):
    """Why a request ended (OpenAI words; ``tool_calls`` is added by the chat layer)."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


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


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to continue. ``cache_salt`` isolates prefix-cache tenants; smaller ``priority`` goes first."""

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    arrival: float = 0.0  # seconds, time.monotonic() of the front end
    priority: int = 0
    cache_salt: str = ""
